"""Checks of lesson and lab 16, "Runs that survive"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from utils.labs.cases import Question, judge, scored, takes
from utils.labs.kinds import (
    Kind,
    WrongKind,
    function,
    instance,
    keys,
    number,
    one_of,
    or_none,
    whole,
)
from utils.labs.verdict import Verdict, correct, not_yet, shown

from .choice import JOBS, MODES, PlannedRun, best_choice, bill
from .dead_runs import CAUSES, PLANTED
from .saves import (
    Pair,
    as_pair,
    content,
    cut,
    damaged,
    files_of,
    first_forgotten,
    first_loss,
    flip,
    new_folder,
    on_full_disk,
    unsynced,
)

interval_factor = Question(
    "Lesson 16: the best interval's factor where a save takes a quarter of the time.",
    number("a factor"),
    right=0.5,
    wrong={
        0.25: "Twice as often for each halving would be too often: what grows is the square root.",
        2.0: "Saves are cheaper. Do you save more often, or less?",
        4.0: "Saves are cheaper. Do you save more often, or less?",
        1.0: "Young's interval is sqrt(2 d M), and d changed.",
    },
    nudge="Young: sqrt(2 d M). What is the square root of a quarter?",
    note="sqrt(1/4)",
    expected="a factor",
    within=1e-9,
)

idle_gpus = Question(
    "Lesson 16a: the GPUs that do no work where one node of a replica on two is dead.",
    whole("a number of GPUs"),
    right=16,
    wrong={
        8: "Those are the dead node's. The other node of its replica holds half of a model.",
        256: "So it is under torchrun, until all have started again. Under torchft the other replicas go on.",
        1: "Count GPUs, and all that need the dead ones.",
        2: "Count GPUs, and all that need the dead ones.",
    },
    nudge="A replica is TP x PP GPUs. What can the rest of it do without a part of the model?",
    note="a whole replica, TP 2 x PP 8; 240 go on",
    expected="a number of GPUs",
)

slow_rank = Question(
    "Lesson 16a: the slow rank, by the seconds that each spends inside the all-reduce.",
    whole("a rank"),
    right=2,
    wrong=dict.fromkeys(
        (0, 1, 3), "This one waits in the all-reduce for somebody. Who waits for nobody?"
    ),
    nudge="Ranks count from 0. Who waits for nobody?",
    note="it comes last, and so waits the least",
    expected="a rank",
)


# Exercise 1


@takes(keys({"save": function(), "load": function()}))
def safe_save(answer: Mapping[str, Any]) -> Verdict:
    """Exercise 1: a save that no kill, damage or full disk turns into a loss."""
    pair = Pair(answer["save"], answer["load"])
    ends = 0
    if verdict := _round_trips(pair) or _goes_back(pair) or _bad_disk(pair) or _not_on_disk(pair):
        return verdict
    for says, before, step, keep in (
        ("the first save of all", (), 1, 2),
        ("a second save", (1,), 2, 2),
        ("a third save, where one is kept", (1, 2), 3, 1),
        ("the same step saved again", (2,), 2, 1),
    ):
        loss, moments = first_loss(pair, before, step, keep)
        if loss:
            got, nudge = _LOSSES[loss.what]
            return not_yet(
                f"{says}, {'the power cut' if loss.is_power_cut else 'killed'} at line "
                f"{loss.line + 1} of your code that runs",
                got=got,
                expected="the old one or the new one, whole",
                nudge=_POWER if loss.is_power_cut else nudge,
            )
        ends += moments
    return correct(f"ended at {ends} moments, damaged, the disk full: nothing was lost")


_LOSSES = {
    "lost": (
        "nothing loads",
        "Until the new one has its name, the old one must stay. Which line "
        "removes or overwrites it too early?",
    ),
    "mixed": (
        "files of two saves, or a part of one",
        "Write where nothing lies yet, and give it its name when all is written.",
    ),
    "stuck": (
        "the next save after the kill does not load",
        "What does your save do with what a save that was cut off left behind?",
    ),
}
_POWER = (
    "What has not reached the disk is gone, and what was removed may stay removed. In this order: "
    "fsync the files, rename, fsync the folder, and only then remove."
)


def _goes_back(pair: Pair) -> Verdict | None:
    """Saves whose steps do not grow, as of a run that went back to an older checkpoint."""
    for steps, keep in (((50, 100, 60, 70, 80), 2), ((50, 100, 60), 1), ((5, 5, 5, 5), 2)):
        if wrong := first_forgotten(pair, steps, keep, damage=False):
            return not_yet(
                f"saved steps {', '.join(map(str, wrong.steps))} with keep={keep}, then loaded",
                expected=f"step {wrong.steps[-1]}, as it was saved last",
                got=shown(wrong.found)[:80],
                nudge="A run that went back saves lower steps, "
                "or the same ones again. The highest step is not what was saved last: let "
                "names count the saves.",
            )
    if wrong := first_forgotten(pair, (100, 60, 60, 70), 1, damage=True):
        return not_yet(
            f"saved step {wrong.steps[-1]} where the one before it is damaged, keep=1",
            expected=f"step {wrong.steps[-1]}",
            got=shown(wrong.found)[:80],
            nudge="What was just written stays: it is the only one that you know whole.",
        )
    return None


def _not_on_disk(pair: Pair) -> Verdict | None:
    never, too_early, renames = unsynced(pair)
    if never:
        return not_yet(
            f"{never[0]} is never brought to the disk",
            expected="os.fsync on each file",
            got=f"{len(never)} files without",
            nudge="After a power cut, a rename may be "
            "on the disk while the bytes of the file are not.",
        )
    if too_early:
        return not_yet(
            f"{too_early[0]} is brought to the disk before all of it is written",
            expected="file.flush(), then os.fsync",
            got=f"{len(too_early)} files synced too early",
            nudge="What you write stands in a buffer of Python first, and fsync "
            "does not see it. Who empties that buffer, and when?",
        )
    if renames:
        return not_yet(
            f"the name {renames[0]} is never brought to the disk",
            expected="os.fsync on the folder, after the rename",
            got="no fsync of it",
            nudge="A name stands in the folder that holds it. Open that with os.open(folder, "
            "os.O_RDONLY) and sync it, too.",
        )
    return None


def _round_trips(pair: Pair) -> Verdict | None:
    with new_folder() as folder:
        if (found := pair.load(folder)) is not None:
            return not_yet(
                "an empty folder",
                expected=None,
                got=shown(found),
                nudge="Before the first save there is nothing to load.",
            )
        sizes = []
        for step in (9, 10, 11, 12):
            pair.save(content(step), folder, step, 2)
            found = pair.load(folder)
            if as_pair(found) != (step, content(step)):
                nudge = "As texts, '9' comes after '10': compare numbers."
                if as_pair(found) is None:
                    nudge = "`load` gives a pair: the step, and a dict of names and bytes."
                return not_yet(
                    f"saved step {step}, then loaded",
                    expected=f"step {step} and its files",
                    got=shown(found)[:80],
                    nudge=nudge
                    if step > 9 or not as_pair(found)
                    else "All files of the newest save, as they were given.",
                )
            sizes.append(sum(map(len, files_of(folder).values())))
        if sizes[-1] > 1.6 * sizes[1]:
            return not_yet(
                "four saves with keep=2",
                expected="two of them on the disk",
                got=f"{sizes[-1]:,} bytes, after two saves {sizes[1]:,}",
                nudge="Remove the oldest after the new one has its name.",
            )
    return None


def _bad_disk(pair: Pair) -> Verdict | None:
    for says, damage, nudge in (
        ("one bit flipped", flip, "Sizes do not see a flipped bit: keep a checksum of each file."),
        ("cut in half", cut, "A file that is too short is not whole."),
        ("removed", lambda path: path.unlink(), "Which files belong to it must be written down."),
    ):
        for name, found in damaged(pair, damage):
            if found != (1, content(1)):
                return not_yet(
                    f"{name} of the newest save: {says}",
                    expected="the save before it",
                    got=shown(found)[:80],
                    nudge=nudge,
                )
    raised, found = on_full_disk(pair)
    if raised != "OSError":
        return not_yet(
            "a disk that is full",
            expected="OSError, as the system raised it",
            got=raised or "no error",
            nudge="A save that failed in silence is the worst: let the error through.",
        )
    if found != (1, content(1)):
        return not_yet(
            "after a disk that was full",
            expected="the save before it",
            got=shown(found)[:80],
            nudge="What is not whole must not have a name that `load` takes.",
        )
    return None


# Exercise 2


@takes(function())
def days_and_dollars(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2a: what a choice takes on average."""
    kind = Kind("a pair: days, dollars", _read_pair)
    for says, job in JOBS[:5]:
        for mode in MODES:
            for spares in (0, 1, 3):
                found = kind.returned(answer(job._asdict(), mode, 7200.0, spares))
                right = bill(job, mode, 7200.0, spares)
                what = f"{says}, {mode}, every 2 h, {spares} spares"
                hints = _bill_mistakes(job, mode, spares)
                for which, unit in ((0, "days"), (1, "dollars")):
                    wrong = {other[which]: nudge for other, nudge in hints}
                    if verdict := judge(
                        found[which],
                        right[which],
                        f"{what}: {unit}",
                        wrong=wrong,
                        nudge="Days: work over the share that is work. Dollars: all "
                        "nodes, spares too, for all hours.",
                        relative=1e-6,
                    ):
                        return verdict
    return correct("right for 30 choices")


def _read_pair(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise WrongKind("Return days and dollars.")
    return tuple(number().read(part) for part in value)


def _bill_mistakes(
    job: PlannedRun, mode: str, spares: int
) -> list[tuple[tuple[float, float], str]]:
    right = bill(job, mode, 7200.0, spares)
    free = right.days * 24 * job.nodes * job.usd_per_node_hour
    no_wait = bill(job._replace(repair_seconds=1e-9), mode, 7200.0, spares)
    found = [
        ((math.nan, free), "Spares are paid for while they stand by."),
        (no_wait, "Who waits for a repair? `waiting_seconds` is a part of each restart."),
    ]
    if mode == "async":
        lost = bill(job._replace(write_seconds=0.0), mode, 7200.0, spares)
        found += [
            (
                lost,
                "Until it is written, an asynchronous save is none: a failure loses the "
                "seconds of the write, too.",
            ),
            (bill(job, "sync", 7200.0, spares), "An asynchronous save blocks for the copy alone."),
        ]
    return found


CHOICE = or_none(keys({"mode": one_of(*MODES), "interval_seconds": number(), "spares": whole()}))


@takes(function())
def choose(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2b: mode, interval and spares with the fewest days within a budget."""
    worst = 1.0
    for says, job in JOBS:
        found, best = CHOICE.returned(answer(job._asdict())), best_choice(job)
        if found is None or best is None:
            if found != best:
                return not_yet(
                    says,
                    expected="None" if best is None else "a choice",
                    got=shown(found),
                    nudge="None is for budgets that no choice keeps, and only for them.",
                )
            continue
        choice = found["mode"], float(found["interval_seconds"]), found["spares"]
        if not 0 < choice[1] < math.inf or choice[2] < 0:
            return not_yet(says, got=shown(found), nudge="An interval above 0, and spares from 0.")
        if choice[0] == "async" and choice[1] < job.write_seconds:
            return not_yet(
                f"{says}: a save begins before the one before it is written",
                expected=f"at least {job.write_seconds:g} s",
                got=f"{choice[1]:.0f} s",
                nudge="An asynchronous save needs its write to end.",
            )
        mine, par = bill(job, *choice), bill(job, *best)
        if mine.usd > job.budget_usd * (1 + 1e-9):
            near = mine.usd < 1.001 * job.budget_usd
            return not_yet(
                says,
                expected=f"at most ${job.budget_usd:,.2f}",
                got=f"${mine.usd:,.2f}",
                nudge="Nearly: the budget has room for the best interval and no other. "
                "Young's formula is an approximation; `best_interval_seconds` takes Daly's."
                if near
                else "The budget holds for all nodes and spares, over all days.",
            )
        worst = max(worst, mine.days / par.days)
        if mine.days > 1.002 * par.days:
            return not_yet(
                f"{says}: there is a quicker choice",
                expected=f"{par.days:.2f} days",
                got=f"{mine.days:.2f} days",
                nudge=_slow_nudge(choice, best),
            )
    return correct(
        f"the optimum of all {len(JOBS)} jobs",
        score=scored(worst, 1.0, "times the optimum's days", "{:.4f}".format),
    )


def _slow_nudge(choice: tuple[str, float, int], best: tuple[str, float, int]) -> str:
    if choice[0] != best[0]:
        return "Try both modes: blocked seconds come at every save, lost ones at every failure."
    if choice[2] != best[2]:
        return (
            "Try every number of spares that the budget allows; a faster plan may even be cheaper."
        )
    return "The interval: which save time counts in this mode? Daly's optimum takes that one."


# Exercise 3


@takes(function())
def rebuild(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: find a missing piece of a run's state again, without training."""
    from .run import PIECES, LabRun, TrainedAgain, saved_after, without_training

    for steps in (5, 7, 24):
        for missing in PIECES:
            pieces, wanted = saved_after(steps)
            left = {name: piece for name, piece in pieces.items() if name != missing}
            says = f"saved after step {steps}, without {missing!r}"
            try:
                found = without_training(answer, left, steps)
            except TrainedAgain:
                return not_yet(
                    f"{says}: your code took a training step",
                    nudge="Training again from "
                    "the start finds everything, in a month. What was drawn, and how often?",
                )
            whole_ = instance(dict, "a dict with all pieces").returned(found)
            if lacks := [name for name in pieces if name not in whole_]:
                return not_yet(
                    f"{says}: {lacks[0]!r} is not in what you return",
                    nudge="Give all pieces back: those that are there, and the one you found.",
                )
            run = LabRun()
            try:
                run.load(whole_)
            except (RuntimeError, TypeError, KeyError, ValueError, AttributeError) as error:
                return not_yet(
                    f"{says}: it cannot be loaded: {error}",
                    nudge="A piece looks as `pieces()` of the run gives it.",
                )
            losses = [run.step() for _ in wanted]
            if losses != wanted:
                first = next(
                    i for i, (a, b) in enumerate(zip(losses, wanted, strict=True)) if a != b
                )
                return not_yet(
                    f"{says}: the loss of step {steps + first + 1} differs",
                    expected=wanted[first],
                    got=losses[first],
                    nudge=_piece_nudge(missing, steps, first),
                )
    return correct("bit-equal losses after 3 moments without each of 3 pieces")


def _piece_nudge(missing: str, steps: int, first: int) -> str:
    if missing == "schedule":
        return "The factor is a function of the step; the schedule's own counter must know it, too."
    if missing == "order":
        if steps == 7:
            return "After 7 steps of 16 rows an epoch of 100 rows is over: where does `place` stand then?"
        return "One order was drawn for each epoch that has begun. Draw as many, and keep the last."
    if first == 0 and steps == 5:
        return "Each step drew one number for each row and unit. Draw and drop as many."
    return "The last batch of an epoch is smaller: it draws fewer numbers."


# Exercise 4

DIAGNOSIS = keys(
    {
        "cause": one_of(*CAUSES),
        "culprit": whole("the number of a rank, or of a host"),
        "step": or_none(whole("a step")),
    }
)
_LOOK = {
    "A": {
        "network cut": "A cut link stops all ranks beyond it. Who came to its end here?",
        "host killed": "Both hosts wrote to the end. Who is one call behind the others?",
        "straggler": "Nobody was slow: the others waited for a call that never came.",
        "out of memory": "Nobody was killed. Count the all-reduces of each rank's trace.",
    },
    "B": {
        "network cut": "After a cut link both sides wait for the timeout. Which host says nothing more?",
        "out of memory": "One rank's memory would not end its agent and its neighbour, too.",
        "skipped collective": "A rank that skips a call still writes a trace at its end.",
        "straggler": "A slow rank is still there. Who is not?",
    },
    "C": {
        "host killed": "The agent of that host is alive: it says how its rank ended.",
        "network cut": "The peer closed the connection at once. A cut link is silent until the timeout.",
        "skipped collective": "The rank with the fewest calls was killed. By what? Read its column of MB.",
        "straggler": "It was slow, and that is not why it ended. Read its column of MB.",
    },
}


@takes(keys(dict.fromkeys(PLANTED, DIAGNOSIS)))
def dead_runs(answer: Mapping[str, Any]) -> Verdict:
    """Exercise 4: what ended three jobs, and who."""
    for name, planted in PLANTED.items():
        found = answer[name]
        if found["cause"] != planted.cause:
            return not_yet(
                f"run {name}: it was not {found['cause']}", nudge=_LOOK[name][found["cause"]]
            )
        if found["culprit"] != planted.culprit:
            who = "host" if planted.cause == "host killed" else "rank"
            return not_yet(
                f"run {name}: it was another {who}",
                got=found["culprit"],
                nudge="Those who complain are seldom to blame. Who is behind, or silent?",
            )
        if found["step"] != planted.step:
            nudge = (
                "No single step did it: write None."
                if planted.step is None
                else "Not the step where it hung: the one at which it went wrong first."
            )
            return not_yet(f"run {name}: another step", got=found["step"], nudge=nudge)
    return correct("three causes, three culprits")
