"""Checks of lesson and lab 12, "Tensor and sequence parallelism"."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any
from unittest import mock

from utils.labs.cases import Case, Exercise, Question, scored, takes
from utils.labs.checking import starts_ranks
from utils.labs.kinds import function, keys, number, one_of, whole
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.ranks import RankError, run_ranks

from . import workers

RANKS = workers.RANKS
TIMEOUT_SECONDS = 20.0  # right answers take a second or two


other_way = Question(
    "Lesson 12: collectives of a feed-forward's forward, cut by rows and then by columns.",
    whole("a number of collectives"),
    right=2,
    wrong={
        1: "That is columns, then rows. GELU of a sum is not the sum of GELUs.",
        0: "Each rank has a term of x A only. Can GELU work on a term?",
        3: "One before GELU, and one to bring the parts of z together. What is the third?",
    },
    nudge="What must be there before GELU, and what do ranks hold at the end?",
    note="a sum before GELU, and a gather of z's parts at the end",
)

STREAM_MB = 4096 * 8192 * 2 / 1e6  # one sequence's stream, in bf16
mb_per_layer = Question(
    "Lesson 12: MB that a rank of eight sends around a ring for a layer of Llama-2-70B.",
    number("a number of MB"),
    right=4 * 2 * 7 / 8 * STREAM_MB,
    relative=0.02,
    wrong={
        4 * 7 / 8 * STREAM_MB: "That is half. A number takes two bytes in bf16; backward makes two "
        "sums, as forward does; and an all-reduce goes around the ring twice.",
        2 * 7 / 8 * STREAM_MB: "That is one all-reduce. A step makes four.",
        7 * 2 * 7 / 8 * STREAM_MB: "That is the tutorial's plan, with seven.",
        4
        * STREAM_MB: "That is what a rank puts in. Around a ring of eight it sends 2 x 7/8 of it.",
        4 * 2 * 3 / 4 * STREAM_MB: "That is a ring of four. Here are eight ranks.",
    },
    nudge="Tokens times h numbers make a stream, two bytes a number; four all-reduces, 2 x 7/8 each.",
    note="470 MB in each of 80 layers, for one sequence: 38 GB a step",
)


def _kept(s: int, b: int, h: int, a: int, k: int, f: int, t: int, split: str) -> float:
    share = 1 if split == "no" else t
    inputs = 4 / t if split == "parts" else 4
    heads = max(k / t, 1)
    return s * b * (h * (4 / share + inputs + 4 / t) + 4 * heads * (h // a) + 4 * a / t + 6 * f / t)


def _case(*given: Any) -> Case:
    s, b, h, a, k, f, t, split = given
    right = _kept(*given)
    no_copies = right - 4 * s * b * (h // a) * (max(k / t, 1) - k / t)
    gathered = "Inputs of matrices that are kept gathered are whole on every rank."
    divided = "Not everything is divided: which of these does every rank hold whole?"
    mistakes = [
        (_kept(s, b, h, a, k, f, t, "parts"), gathered if split == "gathered" else divided),
        (_kept(s, b, h, a, k, f, 1, split) / t, divided),
        (
            no_copies,
            "There are fewer key-value heads than ranks, and a head does not fall apart: each rank keeps one, whole.",
        ),
        (
            _kept(s, b, h, a, k, f, t, "no"),
            "With the sequence split, what lies between pairs of matrices is divided, too.",
        ),
        (_kept(s, b, h, a, a, f, t, split), "Keys and values have K heads here, not A."),
        (right / 2, "That counts numbers. Most take two bytes."),
    ]
    says = (
        f"s {s}, b {b}, h {h}, {a} heads, {k} key-value heads, f {f}, {t} rank(s), "
        f"sequence split: {split!r}"
    )
    wrong = dict(reversed(mistakes))  # of equal values the first's text
    return Case(given, right, says, {v: text for v, text in wrong.items() if v != right})


kept_bytes = Exercise(
    "Exercise 1: bytes that a rank keeps of a Llama block.",
    cases=[
        _case(*shape, t, split)
        for shape in [(4096, 1, 4096, 32, 32, 11008), (2048, 2, 8192, 64, 8, 28672)]
        for t, split in [(1, "no"), (4, "no"), (8, "parts"), (8, "gathered")]
    ]
    + [_case(4096, 1, 8192, 64, 8, 28672, 16, split) for split in ("no", "parts")]
    + [_case(2048, 1, 4096, 32, 1, 11008, 2, "parts")],
    returns=number("a number of bytes"),
    relative=1e-9,
    nudge="Go through the table row by row: is it divided by the ranks, only with the sequence, or by heads?",
    note="copies of heads, and inputs kept gathered, are what does not shrink",
)


# --- row_parallel --------------------------------------------------------------------------------

PAR_RING_BYTES = workers.ring_bytes(
    {
        "reduce-scatter": 8 * workers.S * workers.B * workers.OUT,
        "all-gather": 8 * workers.S * workers.B * workers.OUT // RANKS,
    }
)
# A sum for the bias alone is right as well, and short; the score tells.
MOST_RING_BYTES = PAR_RING_BYTES + workers.ring_bytes({"all-reduce": 8 * workers.OUT})
PAR_KEPT_BYTES = 8 * workers.S * workers.B * workers.IN // RANKS


@starts_ranks
@takes(function())
def row_parallel(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: a row-parallel layer whose output is split along the sequence."""
    try:
        found = run_ranks(workers.row_parallel, RANKS, answer, timeout_seconds=TIMEOUT_SECONDS)
    except RankError as error:
        failure = error.failures[error.rank]
        nudge = "Does every rank call the same collectives, with tensors of the same size?"
        return not_yet(f"rank {error.rank} {failure.what}", nudge=nudge)
    return (
        _wrong_output(found)
        or _wrong_gradient(found)
        or _wasteful(found[0])
        or correct(
            "equal to one process, in output and gradients",
            score=scored(workers.ring_bytes(found[0].sent), PAR_RING_BYTES, "bytes over a ring")
            + f", with {found[0].kept_bytes} bytes kept, par {PAR_KEPT_BYTES}",
        )
    )


def _wrong_output(found: list[workers.RowParallelReport]) -> Verdict | None:
    first = found[0]
    if first.shape != (workers.S // RANKS, workers.B, workers.OUT):
        wanted = (workers.S // RANKS, workers.B, workers.OUT)
        nudge = "Each rank returns its part of the sequence, the first dimension, all channels."
        return not_yet("the output's shape", expected=wanted, got=first.shape, nudge=nudge)
    for rank, report in enumerate(found):
        for mistake, distance in report.output.items():
            if distance < workers.NEAR:
                if mistake == "right":
                    break
                return not_yet(f"the output of rank {rank}", nudge=_OUTPUTS[mistake])
        else:
            nudge = "Sum the terms of all ranks, then add the bias; rank r returns the r-th part of the sequence."
            return not_yet(f"the output of rank {rank} is not that of one process", nudge=nudge)
    return None


_OUTPUTS = {
    "one term": "That is this rank's own term of the sum. Where do the others come in?",
    "bias each": "The bias is in every term, so the sum has it once for each rank. Add it after the sum.",
    "mean": "That is the mean over the ranks. A product's terms add up.",
}
_GRADIENTS = {
    "x": {
        "part": "x needs the gradient of all positions, and this rank's backward gets those of its part: gather them.",
        "": "Gradient of x: all positions of the gradient, times this rank's weight.",
    },
    "weight": {
        "part": "Each position adds to the weight's gradient, also those whose output went to other ranks.",
        "": "Gradient of the weight: (all positions of the gradient)^T times x.",
    },
    "bias": {
        "part": "This rank sees a part of the sequence, so a part of the bias's gradient. Who has the rest?",
        "": "Gradient of the bias: the sum over every position and sequence, on every rank.",
    },
}


def _wrong_gradient(found: list[workers.RowParallelReport]) -> Verdict | None:
    for name in ("x", "weight", "bias"):
        for rank, report in enumerate(found):
            distances = report.gradients[name]
            if distances is None:
                nudge = (
                    "Does backward return a gradient for each input of forward, in the same order?"
                )
                return not_yet(f"{name} has no gradient on rank {rank}", nudge=nudge)
            if distances["right"] < workers.NEAR:
                continue
            part = distances.get("part", 1.0) < workers.NEAR
            times = "It is as many times too large as there are ranks: summed once too often."
            nudge = _GRADIENTS[name]["part" if part else ""]
            nudge = times if distances["times ranks"] < workers.NEAR else nudge
            return not_yet(f"the gradient of {name} on rank {rank}", nudge=nudge)
    return None


def _wasteful(report: workers.RowParallelReport) -> Verdict | None:
    sent = workers.ring_bytes(report.sent)
    if sent > MOST_RING_BYTES:
        nudge = "An all-reduce brings every rank everything, and each needs a part: there is a collective for that."
        if report.sent.get("all-reduce", 0) <= 8 * workers.OUT:
            nudge = "Is something gathered that each rank has, or sent twice?"
        if report.sent.get("all-gather", 0) > 8 * workers.S * workers.B * workers.OUT // RANKS:
            nudge = "What is gathered in forward is not needed: the output stays split."
        return not_yet(
            "more is sent than needed",
            expected=f"{PAR_RING_BYTES} bytes over a ring",
            got=f"{sent}",
            nudge=nudge,
        )
    if report.kept_bytes > PAR_KEPT_BYTES:
        nudge = "Backward needs x and the weight. The terms, and the output, it does not."
        return not_yet(
            "more is kept for backward than needed",
            expected=f"{PAR_KEPT_BYTES} bytes",
            got=f"{report.kept_bytes}",
            nudge=nudge,
        )
    return None


# --- dropout -------------------------------------------------------------------------------------

_STEPS, _TP, _DP = range(40), range(8), range(8)
LARGEST_SEED = 2**63 - 1


@takes(function())
def dropout_seed(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: which masks differ between ranks, and which must not."""
    kind = whole("a whole number, the seed")
    for sequence in (False, True):
        seeds: dict[tuple[int, ...], int] = {}
        for step, tp, dp in product(_STEPS, _TP, _DP):
            for place, where in enumerate(("scores", "stream")):
                with _salted_hashes() as salted:
                    seed = kind.returned(answer(where, step, tp, dp, sequence))
                if salted:
                    nudge = "Ranks are processes, and so is a resumed run. hashlib gives all of them one number."
                    return not_yet(
                        "Python's hash of a text is another in every process",
                        got=salted[0],
                        nudge=nudge,
                    )
                if not 0 <= seed <= LARGEST_SEED:
                    nudge = "torch.manual_seed takes whole numbers from 0 to 2^63 - 1."
                    return not_yet("a seed that no generator takes", got=shown(seed), nudge=nudge)
                seeds[place, step, tp, dp] = seed
        if problem := _seed_problem(seeds, sequence):
            return problem
    again = (answer("scores", 3, 1, 2, True), answer("scores", 3, 1, 2, True))
    if again[0] != again[1]:
        nudge = "Recomputation and a resumed run must draw the same masks: the seed follows from the arguments alone."
        return not_yet("two calls alike give two seeds", got=shown(again), nudge=nudge)
    return correct("scores by heads, the stream by what a rank holds of it, and never twice")


@contextlib.contextmanager
def _salted_hashes() -> Iterator[list[str]]:
    """Inside, calls of `hash` whose value depends on the process are noted: those of texts."""
    found: list[str] = []
    real = builtins.hash

    def noted(value: object) -> int:
        if _holds_text(value):
            found.append(f"hash({shown(value)})")
        return real(value)

    with mock.patch.object(builtins, "hash", noted):
        yield found


def _holds_text(value: object) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(map(_holds_text, value))
    return isinstance(value, (str, bytes))


def _seed_problem(seeds: Mapping[tuple[int, ...], int], sequence: bool) -> Verdict | None:
    split = "with" if sequence else "without"
    alike = _alike_in_group(seeds)
    if alike["scores"]:
        nudge = "Ranks of a tensor-parallel group have different heads. With one seed their heads drop the same scores."
        return not_yet(
            f"scores, {split} a split sequence: two ranks of a group draw one mask", nudge=nudge
        )
    if sequence and alike["stream"]:
        nudge = "With a split sequence each rank has other positions: the same mask would repeat along the sequence."
        return not_yet("stream, with a split sequence: two ranks draw one mask", nudge=nudge)
    if not sequence and not alike["all of stream"]:
        nudge = "Without it every rank holds the same stream, and must drop the same elements, or the copies part."
        return not_yet(
            "stream, without a split sequence: ranks of a group draw other masks", nudge=nudge
        )
    return _seeds_twice(seeds, sequence)


def _alike_in_group(seeds: Mapping[tuple[int, ...], int]) -> dict[str, bool]:
    """Whether ranks of one tensor-parallel group share seeds, at step 5 and data rank 1."""
    scores, stream = ([seeds[place, 5, tp, 1] for tp in _TP] for place in (0, 1))
    return {
        "scores": len(set(scores)) < len(scores),
        "stream": len(set(stream)) < len(stream),
        "all of stream": len(set(stream)) == 1,
    }


def _seeds_twice(seeds: Mapping[tuple[int, ...], int], sequence: bool) -> Verdict | None:
    """No mask is drawn twice, but by ranks that hold the same stream."""
    seen: dict[int, tuple[int, ...]] = {}
    for (place, step, tp, dp), seed in seeds.items():
        who = (place, step, dp) if place and not sequence else (place, step, tp, dp)
        other = seen.setdefault(seed, who)
        if other != who:
            nudge = "Sums of small numbers meet: step 1 on rank 0 is step 0 on rank 1. Give each its own digits."
            if other[0] != place:
                nudge = "Scores and stream draw from one seed: make the place a part of it."
            elif other[1] == step:
                nudge = "Data-parallel ranks read other rows: each draws masks of its own."
            names = ("scores", "stream")
            got = f"{names[other[0]]} at step {other[1]} and {names[place]} at step {step}, on other ranks or places"
            return not_yet("one seed is used twice", got=got, nudge=nudge)
    return None


# --- diagnosis -----------------------------------------------------------------------------------

FAULTS = (
    "a sum missing in backward",
    "dropout of scores alike on all ranks",
    "dropout of the stream differs between ranks",
    "none",
)
PARTS = (
    "attention of block 0",
    "feed-forward of block 0",
    "attention of block 1",
    "feed-forward of block 1",
)
_LOOK = {
    "run A": "Are the ranks' streams equal after forward? Are the gradients right where backward begins, and where it ends?",
    "run B": "Forward has parted already: the ranks' streams differ. What may differ between ranks there?",
    "run C": "Nothing is wrong with sums. How many masks do eight heads draw?",
}


@takes(
    keys(
        {
            "run A": one_of(*FAULTS),
            "where in run A": one_of(*PARTS),
            "run B": one_of(*FAULTS),
            "run C": one_of(*FAULTS),
        }
    )
)
def diagnosis(answer: Mapping[str, Any]) -> Verdict:
    """Exercise 4: three faulty runs, found from what the ranks report."""
    for run, fault in workers.FAULT_OF.items():
        if answer[f"run {run}"] != FAULTS[fault]:
            return not_yet(f"run {run}", got=shown(answer[f"run {run}"]), nudge=_LOOK[f"run {run}"])
    if answer["where in run A"] != PARTS[workers.WHERE]:
        nudge = "Backward comes from the end. Its own weights still get right gradients in the part whose sum is missing; what lies before it does not."
        return not_yet("where in run A", got=shown(answer["where in run A"]), nudge=nudge)
    return correct("found from gradients, streams and masks; no loss would have told")
