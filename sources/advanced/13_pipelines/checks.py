"""Checks of lesson and lab 13, "Pipelines"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from utils.labs.cases import Question, judge, scored, takes
from utils.labs.kinds import Kind, WrongKind, function, keys, number, several, whole
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.parallel.actions import Action, DeadlockError, check_program, read_action
from utils.planner.schedules import in_flight, run_schedule, schedule_actions

from .programs import BROKEN, OWN, SHAPES, STUCK, StuckCase, best_cut, layer_problems

Rows = list[list[Action]]

micro_batches = Question(
    "Lesson 13: micro-batches that keep the bubble of eight stages at 10%.",
    number("a number of micro-batches"),
    right=70,
    wrong={
        80: "That is p / m. The first stage fills the pipeline in p - 1 passes.",
        63: "That compares idle with the whole time. Here it is compared with the work.",
    },
    nudge="Idle over work is (p - 1) / m. Which m makes it 0.1?",
    note="7 / 70",
    expected="how many micro-batches",
)

held = Question(
    "Lesson 13: micro-batches that stage 2 of 8 holds under 1F1B, of 4.",
    number("a number of micro-batches"),
    right=4,
    wrong={
        6: "p - i is 6, and there are only 4 micro-batches.",
        8: "That is p. A stage holds what it has run forward and not yet backward.",
    },
    nudge="min(m, p - i), with i counted from 0.",
    note="min(4, 8 - 2)",
    expected="how many micro-batches",
)

messages = Question(
    "Lesson 13: messages of a step of interleaved 1F1B, eight ranks, three stages on each, sixteen micro-batches.",
    number("a number of messages"),
    right=736,
    wrong={
        224: "That is one stage a rank. How many borders are there between 24 stages?",
        368: "That is one way. Gradients come back over the same borders.",
        768: "24 stages have 23 borders between them.",
        672: "Interleaving goes around: from the last rank back to the first is a border, too.",
    },
    nudge="2 (v p - 1) m: borders between stages, both ways, for every micro-batch.",
    note="2 x 23 x 16; one stage a rank sends 224",
    expected="how many messages",
)


def _read_rows(value: Any) -> Rows:
    if not isinstance(value, (list, tuple)):
        raise WrongKind("One list for each rank.")
    return [_read_row(row) for row in value]


def _read_row(row: Any) -> list[Action]:
    if not isinstance(row, (list, tuple)) or isinstance(row, Action):
        raise WrongKind("One list for each rank, with its actions in it.")
    if not all(isinstance(part, (str, Action)) for part in row):
        raise WrongKind('An action is a text, such as "2F0".')
    try:
        return [part if isinstance(part, Action) else read_action(part) for part in row]
    except ValueError as error:
        raise WrongKind(str(error)) from None


ROWS = Kind("a list of actions for each rank", _read_rows)


def _misplaced(rows: Rows, stages: int) -> str:
    """What is wrong with the ranks of a program whose rank r is to hold stage r; "" if nothing."""
    if len(rows) != stages:
        return f"there are {len(rows)} lists, and {stages} ranks"
    for rank, row in enumerate(rows):
        if other := next((action for action in row if action.stage != rank), None):
            return f"{other} stands on rank {rank}, which holds stage {rank}"
    return ""


def _unsound(rows: Rows, stages: int, count: int, deadlock_nudge: str) -> Verdict | None:
    """The verdict on a program that cannot run; None if it can."""
    says = f"{stages} stages, {count} micro-batches"
    if problem := _misplaced(rows, stages):
        return not_yet(f"{says}: {problem}", nudge="One list for each rank, in order.")
    try:
        check_program(rows, count)
    except DeadlockError as error:
        return not_yet(f"{says}: {error}", nudge=deadlock_nudge)
    except ValueError as error:
        return not_yet(f"{says}: {error}", nudge="Every action once, of every micro-batch.")
    return None


@takes(function())
def one_f_one_b(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: 1F1B's lists for any number of stages and micro-batches."""
    for stages, count in SHAPES:
        rows, right = ROWS.returned(answer(stages, count)), schedule_actions("1f1b", stages, count)
        ahead = "In warm-up earlier ranks run ahead: rank r needs stages - 1 - r forwards first."
        if verdict := _unsound(rows, stages, count, ahead):
            return verdict
        if verdict := _holds_too_much(rows, stages, count):
            return verdict
        if any(action.kind in "IW" for row in rows for action in row):
            return not_yet("1F1B has whole backwards", nudge="Write B; I and W come in exercise 3.")
        took, par = run_schedule(rows, 1, 2).total, run_schedule(right, 1, 2).total
        if took > par:
            return not_yet(
                f"{stages} stages, {count} micro-batches: it takes longer than 1F1B",
                expected=f"{par} units, with F = 1 and B = 2",
                got=f"{took} units",
                nudge="A rank that warms up too little waits for each backward.",
            )
    return correct(f"1F1B in all {len(SHAPES)} shapes")


def _holds_too_much(rows: Rows, stages: int, count: int) -> Verdict | None:
    for rank, row in enumerate(rows):
        most, found = min(count, stages - rank), in_flight(row)
        if found > most:
            nudge = "One forward too many before the first backward: the steady part begins with a forward."
            if found == count:
                nudge = (
                    "All forwards first is GPipe. Begin backwards as soon as the warm-up is over."
                )
            return not_yet(
                f"{stages} stages, {count} micro-batches: rank {rank} holds too many",
                expected=f"at most {most}",
                got=found,
                nudge=nudge,
            )
    return None


def _read_places(value: Any) -> list[str | None]:
    if not isinstance(value, (list, tuple)):
        raise WrongKind("One entry for each rank.")
    if not all(isinstance(part, (str, type(None))) for part in value):
        raise WrongKind("An entry is an action's text or None, not its place.")
    return [part if part is None else part.strip() for part in value]


PLACES = Kind("a list with an action or None for each rank", _read_places)


@takes(function())
def stuck(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: where each rank of a program waits for ever."""
    for case in STUCK:
        found = PLACES.returned(answer([list(row) for row in case.rows]))
        if found != case.right:
            return not_yet(
                case.says, expected=case.right, got=shown(found), nudge=_stuck_nudge(case, found)
            )
    return correct(f"right for {len(STUCK)} programs")


def _stuck_nudge(case: StuckCase, found: list[str | None]) -> str:
    if len(found) != len(case.right):
        return "One entry for each rank, also for those that finish: None."
    if found == case.one_sweep:
        return "A rank that could not move may move later: go round until nobody moves any more."
    return case.nudge


@takes(function())
def own_schedule(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: a schedule with at most p micro-batches in flight, scored by its time."""
    took = par = 0.0
    for stages, count in OWN:
        rows = ROWS.returned(answer(stages, count))
        circle = "Walk your lists with `stuck`. Which two ranks wait for each other?"
        if verdict := _unsound(rows, stages, count, circle):
            return verdict
        most = max(map(in_flight, rows))
        if most > stages:
            rank = [in_flight(row) for row in rows].index(most)
            nudge = "Activations stay until the weights' pass: run a W before the next F."
            return not_yet(
                f"{stages} stages, {count} micro-batches: rank {rank} holds too many",
                expected=f"at most {stages}",
                got=most,
                nudge=nudge,
            )
        own, old = (
            run_schedule(rows, 1, 2).total,
            run_schedule(schedule_actions("1f1b", stages, count), 1, 2).total,
        )
        if own >= old and stages > 1:
            nudge = "Split B: whoever waits for your gradient needs I alone. Where does W fit?"
            return not_yet(
                f"{stages} stages, {count} micro-batches: it does not end before 1F1B",
                expected=f"less than {old:g} units",
                got=f"{own:g}",
                nudge=nudge,
            )
        took, par = (
            took + own,
            par + run_schedule(schedule_actions("zb-h1", stages, count), 1, 2).total,
        )
    how = "as fast as it can be: the last rank never waits" if took == par else "faster than 1F1B"
    return correct(how, score=scored(took, par, "units of time", "{:g}".format))


@takes(keys({"circle": several(whole(), what="a list of ranks", in_order=False), "cured": ROWS}))
def diagnosis(answer: Mapping[str, Any]) -> Verdict:
    """Exercise 4: who waits for whom, and one list that ends it."""
    if verdict := judge(
        sorted(answer["circle"]),
        [1, 2],
        "the ranks in the circle",
        expected="two ranks",
        nudge="Rank 0 waits for rank 1, and rank 3 for rank 2. Whom do those two wait for?",
    ):
        return verdict
    return _wrong_cure(answer["cured"]) or correct("rank 2 ran ahead of what rank 1 could give it")


def _wrong_cure(rows: Rows) -> Verdict | None:
    if verdict := _unsound(rows, 4, 6, "The circle is still there: exercise 2 shows where."):
        return verdict
    moved = [rank for rank, row in enumerate(rows) if list(map(str, row)) != BROKEN[rank]]
    if len(moved) > 1:
        return not_yet(
            f"the lists of ranks {moved} are changed",
            expected="one list changed",
            nudge="One of the two has the wrong warm-up.",
        )
    verdict = _holds_too_much(rows, 4, 6)
    if verdict:
        nudge = "It runs, at the price of memory: which of the two has one forward too many?"
        return not_yet(verdict.note, expected=verdict.expected, got=verdict.got, nudge=nudge)
    return None


@takes(function())
def cut_layers(answer: Callable[..., Any]) -> Verdict:
    """Exercise 5: layers into stages, against the exact optimum."""
    counts, worst = several(whole(), what="a list of numbers of layers"), 1.0
    for seconds, stages in layer_problems():
        found = counts.returned(answer(list(seconds), stages))
        says = f"{len(seconds)} layers, {stages} stages"
        if len(found) != stages or sum(found) != len(seconds):
            return not_yet(
                f"{says}: the stages are {len(found)} and hold {sum(found)} layers together",
                nudge="Every layer once, and a number for each stage.",
            )
        if min(found) < 1:
            return not_yet(
                f"{says}: a stage holds {min(found)} layers", nudge="Each has at least one."
            )
        worst = max(worst, _slowest(seconds, found) / best_cut(seconds, stages))
    score = scored(worst, 1.0, "times the optimum's slowest stage", "{:.3f}".format)
    if worst > 1.0 + 1e-9:
        nudge = "Equal numbers of layers, or filling up to the average, is a good guess. Is there a better cut?"
        return not_yet(
            "every cut is whole, but not the best", expected="1.000", got=score, nudge=nudge
        )
    return correct(f"the optimum in all {len(layer_problems())} problems", score=score)


def _slowest(seconds: Sequence[float], counts: Sequence[int]) -> float:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return max(sum(seconds[end - n : end]) for end, n in zip(ends, counts, strict=True))
