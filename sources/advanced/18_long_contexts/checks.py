"""Checks of lesson and lab 18, "Long contexts"."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from utils.labs.cases import Case, Exercise, Question, scored, takes
from utils.labs.checking import starts_ranks
from utils.labs.kinds import Kind, WrongKind, function, keys, number, one_of, whole
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.ranks import RankError, run_ranks

from . import workers

RANKS = workers.RANKS
TIMEOUT_SECONDS = 20.0  # right answers take a second or two

rank_0_percent = Question(
    "Lesson 18: the share of a ring's time that the first of sixteen ranks works, tokens in order.",
    number("a number of percent"),
    right=100 / 31,
    relative=0.02,
    wrong={
        100 / 16: "That is 1 of 16 rounds. Rank 0 has half a square, and the last rank 15.5.",
        100
        / 32: "That counts 16 rounds of a whole square. The last rank's own square is half masked.",
        50: "That is its work in its one round. The others' rounds take time, too.",
    },
    nudge="How many squares does rank 0 compute, and how many the last rank, which sets the time?",
    note="half a square of 15.5: 3.2%",
)

most_ranks = Question(
    "Lesson 18: ranks over which Ulysses can share a sequence of Qwen2.5-7B, of eight.",
    whole("a number of ranks"),
    right=4,
    wrong={
        7: "Seven divide 28 query heads. But 4 key-value heads over 7 ranks are neither whole heads nor whole copies.",
        8: "28 query heads over 8 ranks would be 3.5 each.",
        28: "A node has eight GPUs.",
        2: "Two can. Is there a larger number that divides 28, and shares 4 key-value heads?",
    },
    nudge="It must divide the 28 query heads, and the key-value heads as heads or as copies.",
    note="7 query heads and one key-value head each",
)


# --- window --------------------------------------------------------------------------------------


def _window_bytes(length: int, ranks: int, window: int, heads: int, width: int) -> int:
    own = length // ranks
    moves = min(ranks - 1, -(-(window - 1) // own))
    return moves * 2 * own * heads * width * 2


def _window(*given: int) -> Case:
    length, ranks, window, heads, width = given
    right, own = _window_bytes(*given), length // ranks
    move = 2 * own * heads * width * 2
    part = "A neighbour that is needed in part must send: round up."
    both = "Keys and values travel, two bytes a number."
    mistakes = [
        (right // 2, both),
        (right // 4, both),
        (
            min(ranks - 1, -(-window // own)) * move,
            "A window of w counts the query itself: it looks back w - 1.",
        ),
        (min(ranks - 1, window // own) * move, part),
        (min(ranks - 1, (window - 1) // own) * move, part),
        (-(-(window - 1) // own) * move, "After n - 1 moves every rank has seen all keys."),
        (
            (ranks - 1) * move,
            "That is the whole ring. Whose keys does the first query of a rank still see?",
        ),
    ]
    says = f"{length:,} tokens, {ranks} rank(s), a window of {window:,}"
    wrong = {value: text for value, text in reversed(mistakes) if value != right}
    return Case(given, right, says, wrong)


window_bytes = Exercise(
    "Exercise 1: bytes that a rank sends around a ring when queries see a window.",
    cases=[
        _window(131_072, 8, 4096, 8, 128),
        _window(131_072, 8, 20_000, 8, 128),
        _window(131_072, 8, 131_072, 8, 128),
        _window(4096, 4, 3000, 4, 64),
        _window(4096, 4, 1, 4, 64),
        _window(4096, 4, 1025, 4, 64),
        _window(4096, 4, 1026, 4, 64),
        _window(4096, 4, 1024, 4, 64),
        _window(4096, 4, 10_000, 4, 64),
        _window(4096, 1, 100, 4, 64),
    ],
    returns=number("a number of bytes"),
    relative=1e-9,
    nudge="How far does a rank's first query look back, how many ranks is that, and how large is a move?",
    note="a window makes the ring's bytes independent of the number of ranks",
)


# --- attention to a shared cache -----------------------------------------------------------------

PAR_CACHE_BYTES = 2 * (RANKS - 1) / RANKS * 8 * workers.B * workers.A * (workers.D + 2)
# Outputs and log-sum-exps gathered are right as well; keys and values are not.
MOST_CACHE_BYTES = (RANKS - 1) * 8 * workers.B * workers.A * (workers.D + 2)

_CACHE = {
    "own": "That is attention to this rank's own keys. The others have most of them.",
    "mean": "A mean of the ranks' results: a rank whose keys score low counts as much as one whose keys score high.",
    "mean of some": "A mean of the ranks' results: a rank whose keys score low counts as much as one whose keys score high.",
    "sum": "Each rank's softmax adds up to 1 by itself, so the sum of results has a weight of several.",
    "by keys": "Weighted by the number of keys. What weighs is their sum of exponentials.",
    "no scale": "Scores are divided by the root of the width.",
}


@starts_ranks
@takes(function())
def cache_attention(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: one query, and a cache of keys whose parts lie on four ranks."""
    try:
        found = run_ranks(workers.cached, RANKS, answer, timeout_seconds=TIMEOUT_SECONDS)
    except RankError as error:
        failure = error.failures[error.rank]
        nudge = "One rank has no keys at all, and ranks have unequal numbers. Does every rank make the same calls?"
        return not_yet(f"rank {error.rank} {failure.what}", nudge=nudge)
    for place, scale in enumerate(workers.SCALES):
        for rank, reports in enumerate(found):
            if verdict := _wrong_result(rank, scale, reports[place]):
                return verdict
    sent = max(report.sent for report in found[0])
    if sent > MOST_CACHE_BYTES:
        return not_yet(
            "more is sent than needed",
            expected=f"{PAR_CACHE_BYTES:,.0f} bytes over a ring",
            got=f"{sent:,.0f}",
            nudge="Keys and values stay where they are. What is the size of a rank's result and of its sums?",
        )
    return correct(
        "equal to one process, with no key sent",
        score=scored(sent, PAR_CACHE_BYTES, "bytes over a ring", "{:,.0f}".format),
    )


def _wrong_result(rank: int, scale: float, report: workers.CacheReport) -> Verdict | None:
    wanted = (workers.B, workers.A, 1, workers.D)
    if report.shape != wanted:
        nudge = "One result for the one query, of all heads, the same on every rank."
        return not_yet("the result's shape", expected=wanted, got=report.shape, nudge=nudge)
    large = scale > 1
    says = f"the result on rank {rank}" + ", where scores are large" * large
    if not report.finite:
        nudge = "A rank without keys has no largest score, and a sum of 0. What does it put into the sums?"
        if large:
            nudge = "Exponentials of large scores overflow. Take the largest score of all ranks off first."
        return not_yet(f"{says} is not finite", nudge=nudge)
    if report.apart["right"] < workers.NEAR:
        return None
    known = (text for name, text in _CACHE.items() if report.apart[name] < workers.NEAR)
    nudge = "Each rank's term is its exponentials times its values; both the terms and the exponentials are added up."
    return not_yet(says, nudge=next(known, nudge))


# --- packed tokens -------------------------------------------------------------------------------

PACKS = (((256, 64, 448), 4), ((64, 512), 2), ((96, 96, 192, 384), 4), ((512,), 8), ((640, 64), 1))
LARGEST_SHARE = 1.05  # of the mean work


def _read_places(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, range):
        value = list(value)
    if not isinstance(value, (list, tuple)):
        raise WrongKind("One place of the row for each token, such as [0, 1, 14, 15].")
    return [whole().read(each) for each in value]


PLACES = Kind("a list of places in the row", _read_places)


def _work(lengths: Sequence[int], own: Sequence[int]) -> int:
    """Pairs of a query and a key of its own document."""
    position = [place for length in lengths for place in range(length)]
    return sum(position[place] + 1 for place in own)


@takes(function())
def packed_places(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: which tokens of packed documents a rank holds, so that all have equal work."""
    worst = 1.0
    for lengths, ranks in PACKS:
        own = [PLACES.returned(answer(lengths, ranks, rank)) for rank in range(ranks)]
        says = f"documents of {', '.join(map(str, lengths))} tokens on {ranks} rank(s)"
        if verdict := _wrong_places(lengths, own, says):
            return verdict
        work = [_work(lengths, places) for places in own]
        share = max(work) / statistics.fmean(work)
        if share > LARGEST_SHARE:
            return not_yet(
                f"{says}: the ranks' work is uneven",
                expected=f"at most {LARGEST_SHARE} times the mean on each",
                got=f"{share:.2f} times the mean on rank {work.index(max(work))}",
                nudge=_uneven(lengths, ranks, own),
            )
        worst = max(worst, share)
    return correct(
        f"each token once, and even work, in all {len(PACKS)} packs",
        score=scored(worst, 1.0, "times the mean work on the fullest rank", "{:.3f}".format),
    )


def _wrong_places(
    lengths: Sequence[int], own: Sequence[Sequence[int]], says: str
) -> Verdict | None:
    total, given = sum(lengths), sorted(place for places in own for place in places)
    if given and (given[0] < 0 or given[-1] >= total):
        nudge = "Places count from 0 along the whole row, over all documents."
        return not_yet(f"{says}: there is no such place", got=shown(given[-1]), nudge=nudge)
    if len(set(given)) < len(given):
        twice = next(a for a, b in itertools.pairwise(given) if a == b)
        nudge = (
            "A token lies on one rank. Do pieces overlap, or do places count anew in each document?"
        )
        return not_yet(
            f"{says}: a token lies on two ranks, or twice on one", got=twice, nudge=nudge
        )
    if len(given) < total:
        missing = min(set(range(total)) - set(given))
        return not_yet(
            f"{says}: no rank holds a token", got=missing, nudge="Every token lies on one rank."
        )
    counts = [len(places) for places in own]
    if len(set(counts)) > 1:
        nudge = "All other layers cost by the token: each rank holds as many. Documents may be cut."
        return not_yet(f"{says}: ranks hold unequal numbers of tokens", got=counts, nudge=nudge)
    return None


def _uneven(lengths: Sequence[int], ranks: int, own: Sequence[Sequence[int]]) -> str:
    pieces = torch.arange(sum(lengths)).chunk(2 * ranks)
    zigzag = [{*torch.cat((pieces[r], pieces[-1 - r])).tolist()} for r in range(ranks)]
    if [set(places) for places in own] == zigzag:
        return (
            "That is zigzag over the whole row. But a token's work begins anew with each document."
        )
    if all(sorted(places) == list(range(min(places), max(places) + 1)) for places in own):
        return "In order, late tokens of a document lie on late ranks, and each costs as much as it has before it."
    return "A token costs as much as its document has before it. Which rank has early tokens, which late ones?"


# --- diagnosis -----------------------------------------------------------------------------------

FAULTS = (
    "tokens laid out one way, the mask another",
    "a mean of the ranks' means",
    "none",
    "gradients of keys and values end on another rank",
    "positions restart at each rank",
)
_LOOK = {
    "A": "Every token's loss is right, and the loss is not: what happens between the two?",
    "B": "Tokens' losses are wrong from the second piece on, and the first piece is right. Would wrong positions alone do that, or does a token see others than it should?",
    "C": "Forward is right to rounding. Which gradients are right, and what lies between them and the first wrong one?",
    "D": "Angles of rotary positions are computed in fp32. How large is their rounding, and what do these positions count?",
}


@takes(keys({run: one_of(*FAULTS) for run in "ABCD"}))
def diagnosis(answer: Mapping[str, str]) -> Verdict:
    """Exercise 4: four runs, found from losses of tokens and gradients."""
    for run, fault in workers.FAULT_OF.items():
        if answer[run] != FAULTS[fault]:
            return not_yet(f"run {run}", got=shown(answer[run]), nudge=_LOOK[run])
    return correct(
        "found from tokens' losses and gradients; a curve of losses would have shown none of it"
    )
