"""Answers to the exercises of lab 13 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from utils.labs.mistakes import KnownAnswers
from utils.planner.schedules import schedule_actions

from .programs import BROKEN, STUCK

known = KnownAnswers()
known.mistakes("micro_batches", seven=(7, "Which m"))
known.mistakes("messages", one=(1, "both ways"))
known.mistakes("held", five=(5, "i counted from 0"))


def texts(rows: Any) -> list[list[str]]:
    return [[str(action) for action in row] for row in rows]


def like_1f1b(warm_of: Callable[[int, int], int], kinds: str = "B") -> Callable[..., Any]:
    """1F1B with another warm-up, or with backwards in parts."""

    def rows(stages: int, count: int) -> list[list[str]]:
        found = []
        for rank in range(stages):
            warm, row = min(warm_of(rank, stages), count), []
            row += [f"{rank}F{k}" for k in range(warm)]
            for k in range(count):
                row += [f"{rank}F{warm + k}"] if warm + k < count else []
                row += [f"{rank}{kind}{k}" for kind in kinds]
            found.append(row)
        return found

    return rows


right_1f1b = like_1f1b(lambda rank, stages: stages - 1 - rank)
known.mistakes(
    "one_f_one_b",
    warm_up_turned_round=(like_1f1b(lambda rank, stages: rank), "earlier ranks run ahead"),
    one_forward_too_many=(like_1f1b(lambda rank, stages: stages - rank), "One forward too many"),
    gpipe=(lambda p, m: texts(schedule_actions("gpipe", p, m)), "All forwards first is GPipe"),
    no_warm_up=(like_1f1b(lambda rank, stages: 0), "waits for each backward"),
    split_backwards=(
        like_1f1b(lambda rank, stages: stages - 1 - rank, kinds="IW"),
        "whole backwards",
    ),
    last_pass_missing=(lambda p, m: [row[:-1] for row in right_1f1b(p, m)], "never runs"),
    first_pass_twice=(lambda p, m: [[*row, row[0]] for row in right_1f1b(p, m)], "stands twice"),
    last_rank_missing=(lambda p, m: right_1f1b(p, m)[:-1], "there are 3 lists, and 4 ranks"),
    ranks_turned_round=(lambda p, m: right_1f1b(p, m)[::-1], "which holds stage 0"),
    one_text_a_rank=(
        lambda p, m: [" ".join(row) for row in right_1f1b(p, m)],
        "One list for each rank",
    ),
    pairs=(lambda p, m: [[("F", 0)]] * p, 'An action is a text, such as "2F0"'),
    no_rank=(lambda p, m: [["F0"]] * p, "'F0' is no action"),
    no_return=(lambda p, m: None, "returns nothing"),
)
known.rights("one_f_one_b", tuples=lambda p, m: tuple(map(tuple, right_1f1b(p, m))))


def by_case(attribute: str, only: int | None = None) -> Callable[..., Any]:
    """Answers from the table of cases, one of them replaced."""

    def answer(rows: list[list[str]]) -> list[str | None]:
        number = next(i for i, case in enumerate(STUCK) if case.rows == rows)
        return STUCK[number].right if number != only else [attribute] * len(rows)

    return answer


def one_sweep(rows: list[list[str]]) -> list[str | None]:
    return next(case for case in STUCK if case.rows == rows).one_sweep


known.mistakes(
    "stuck",
    one_sweep=(one_sweep, "may move later"),
    hangs_where_nothing_does=(by_case("0B0", only=0), "Nothing hangs here"),
    first_of_case_2=(by_case("0F0", only=2), "I gives the stage before"),
    first_of_case_3=(by_case("0B0", only=3), "1I0 gives it, as 1B0 would"),
    first_of_case_4=(by_case("0I0", only=4), "W needs the I"),
    first_of_case_5=(by_case("0F0", only=5), "by their stage"),
    first_of_case_6=(by_case("0B1", only=6), "never comes"),
    one_entry=(lambda rows: [None], "One entry for each rank"),
    places=(lambda rows: [0] * len(rows), "not its place"),
    no_return=(lambda rows: None, "returns nothing"),
)


@known.right("stuck")
def empties_the_lists(solution: Any, rows: list[list[str]]) -> list[str | None]:
    found = solution([list(row) for row in rows])
    rows.clear()
    return found


def late_weights(stages: int, count: int) -> list[list[str]]:
    """All passes to the weights at the end: nothing is ever let go."""
    rows = like_1f1b(lambda rank, p: p - 1 - rank, kinds="I")(stages, count)
    return [[*row, *(f"{rank}W{k}" for k in range(count))] for rank, row in enumerate(rows)]


known.mistakes(
    "own_schedule",
    right_1f1b=(right_1f1b, "Split B"),
    gpipe=(lambda p, m: texts(schedule_actions("gpipe", p, m)), "holds too many"),
    late_weights=(late_weights, "run a W before the next F"),
    warm_up_turned_round=(like_1f1b(lambda rank, stages: rank, kinds="IW"), "Which two ranks wait"),
    last_pass_missing=(
        lambda p, m: [row[:-1] for row in texts(schedule_actions("zb-h1", p, m))],
        "never runs",
    ),
    empty=(lambda p, m: [[]] * p, "The schedule is empty"),
)


@known.right("own_schedule", "174 units of time, par 156")
def backwards_split_in_place(stages: int, count: int) -> list[list[str]]:
    return like_1f1b(lambda rank, p: p - 1 - rank, kinds="IW")(stages, count)


def answer_4(circle: Any, change: Callable[[list[list[str]]], Any]) -> dict[str, Any]:
    rows = [list(row) for row in BROKEN]
    return {"circle": circle, "cured": change(rows) or rows}


def with_row(rank: int, row: str) -> Callable[[list[list[str]]], Any]:
    def change(rows: list[list[str]]) -> None:
        rows[rank] = row.split()

    return change


CURE = with_row(2, "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5")
OTHER_CURE = with_row(2, "2F0 2B0 2F1 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5")
COSTLY = with_row(1, "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5")


def everything(rows: list[list[str]]) -> list[list[str]]:
    return texts(schedule_actions("1f1b", 4, 6))


known.mistakes(
    "diagnosis",
    another_pair=(answer_4([0, 1], CURE), "Whom do those two wait for"),
    all_ranks=(answer_4([0, 1, 2, 3], CURE), "Whom do those two wait for"),
    not_cured=(answer_4([1, 2], lambda rows: None), "The circle is still there"),
    costs_memory=(answer_4([1, 2], COSTLY), "at the price of memory"),
    everything=(answer_4([1, 2], everything), "One of the two has the wrong warm-up"),
    passes_missing=(answer_4([1, 2], with_row(2, "2F0 2B0")), "never runs"),
    a_number=(answer_4(2, CURE), "a list of ranks"),
)
known.rights(
    "diagnosis",
    list_and_other_cure=answer_4([1, 2], OTHER_CURE),
    tuple_turned_round=answer_4((2, 1), CURE),
    a_set=answer_4({1, 2}, CURE),
    set_and_other_cure=answer_4({1, 2}, OTHER_CURE),
    numbers_of_numpy=answer_4([np.int64(1), 2.0], CURE),
)


def even(seconds: list[float], stages: int) -> list[int]:
    least, more = divmod(len(seconds), stages)
    return [least + (i < more) for i in range(stages)]


def greedy(seconds: list[float], stages: int) -> list[int]:
    """Fill up to the average, and leave one layer for each later stage."""
    counts, rest = [], list(seconds)
    for left in range(stages, 1, -1):
        goal, held, taken = sum(rest) / left, 0.0, 0
        while taken < len(rest) - left + 1 and (not taken or held + rest[taken] <= goal):
            held += rest[taken]
            taken += 1
        counts.append(taken)
        rest = rest[taken:]
    return [*counts, len(rest)]


def filled(seconds: list[float], limit: float, stages: int) -> list[int]:
    """Stages that stay below a limit, or nothing if it takes more of them."""
    counts, held = [0], 0.0
    for index, each in enumerate(seconds):
        must_open = len(seconds) - index == stages - len(counts)
        if counts[-1] and (held + each > limit or must_open):
            counts.append(0)
            held = 0.0
        held, counts[-1] = held + each, counts[-1] + 1
        if held > limit:
            return []
    return counts if len(counts) == stages else []


@known.right("cut_layers")
def by_search(seconds: list[float], stages: int) -> list[int]:
    low, high = 0.0, sum(seconds)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if filled(seconds, middle, stages) else (middle, high)
    return filled(seconds, high, stages)


known.mistakes(
    "cut_layers",
    even=(even, "not the best"),
    greedy=(greedy, "not the best"),
    empty_stages=(lambda seconds, stages: [len(seconds)] + [0] * (stages - 1), "at least one"),
    layers_left_out=(lambda seconds, stages: [1] * stages, "Every layer once"),
    one_number=(lambda seconds, stages: [len(seconds)], "a number for each stage"),
    no_return=(lambda seconds, stages: None, "returns nothing"),
)
