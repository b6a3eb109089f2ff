"""Checks of lesson and lab 04, "One model, four ranks: DDP"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from utils.labs import ranks_04 as workers
from utils.labs.checking import starts_ranks
from utils.labs.verdict import Verdict, correct, not_yet
from utils.ranks import RankError, run_ranks

TIMEOUT_SECONDS = 20.0  # of a deadlock: right answers take a second


def ring_of_eight(answer: Any) -> Verdict:
    """Lesson 04: a million fp32 gradients over a ring of eight."""
    if not isinstance(answer, (int, float)):
        return not_yet("a number of MB is wanted", got=repr(answer))
    if abs(answer - 7) < 0.01:
        return correct("2 x 7/8 x 4 MB: hardly more than for four ranks")
    nudges = {
        4: "That is the payload. A ring passes most of it on, twice.",
        3.5: "That is half of it: reducing and handing round each send (N - 1) / N of the payload.",
        8: "Twice the payload is the limit for many ranks. What is the factor for eight?",
        1.75: "That counts numbers. Each takes four bytes.",
    }
    nudge = nudges.get(answer, "Put B = 4 bytes x parameters and N = 8 into the formula above.")
    return not_yet(expected="2 (N - 1) / N x B, in MB", got=answer, nudge=nudge)


def bytes_under_amp(answer: Any) -> Verdict:
    """Lesson 04: autocast leaves parameters and gradients in fp32."""
    if answer == "same":
        return correct("parameters stay in fp32, so their gradients do; only activations are 16-bit")
    if answer == "half":
        nudge = "What dtype has a parameter's .grad under autocast? See the table's column."
        return not_yet("the table says otherwise", nudge=nudge)
    return not_yet('the answer is "half" or "same"', got=repr(answer))


def repeated_items(answer: Any) -> Verdict:
    """Lesson 04: 1,003 items over 8 ranks."""
    if answer == 5:
        return correct("8 x 126 = 1,008 places for 1,003 items")
    nudge = "Every rank takes the same number of items: 1,003 / 8, rounded up. How many places is that?"
    if answer == 3:
        nudge = "That is what is left over. How many are missing to the next multiple of 8?"
    return not_yet(got=repr(answer), nudge=nudge)


@starts_ranks
def by_hand(answer: dict[str, Callable[..., Any]]) -> Verdict:
    """Exercise 1: the start shared, the gradients averaged, on four ranks."""
    start, average = answer.values()
    found = _on_ranks(workers.by_hand, 4, start, average)
    if isinstance(found, Verdict):
        return found
    return _start(found) or _average(found) or _one_call(found[0])


def _start(found: list[workers.ByHand]) -> Verdict | None:
    first = found[0]
    for rank, other in enumerate(found):
        if not workers.close(other.parameters, found[0].parameters):
            kept = workers.close(other.parameters, other.own_parameters)
            what = "kept its own parameters" if kept else "has other parameters than rank 0"
            nudge = "You forgot to broadcast the start: every replica begins as rank 0's."
            return not_yet(f"rank {rank} {what} after the start", nudge=nudge)
        if not workers.close(other.buffers, found[0].buffers):
            nudge = "The parameters are shared, the buffers are not. Broadcast model.buffers() as well."
            return not_yet(f"rank {rank} has other buffers than rank 0", nudge=nudge)
    if not workers.close(first.parameters, first.own_parameters):
        nudge = "All ranks are to get what rank 0 has, with src=0, and rank 0 is to keep it."
        return not_yet("the replicas are equal, but not to rank 0's model", nudge=nudge)
    return None


def _average(found: list[workers.ByHand]) -> Verdict | None:
    right = found[0].right
    for rank, report in enumerate(found):
        if workers.close(report.gradient, right):
            continue
        if workers.close(report.gradient, 4 * right):
            nudge = "You forgot to divide by the world size: that is the sum over ranks, not the mean."
            return not_yet("the gradients are 4 times too large", nudge=nudge)
        if workers.close(report.gradient, report.own_gradient):
            nudge = "Reduce parameter.grad itself, or copy what was reduced back into it."
            return not_yet(f"rank {rank} still has only its own gradients", nudge=nudge)
        ratio = float(report.gradient.norm() / right.norm())
        nudge = "Sum over the ranks, then divide once by dist.get_world_size(), for every parameter."
        return not_yet(f"rank {rank}: gradients of {ratio:.2f} times the right size", nudge=nudge)
    return None


def _one_call(report: workers.ByHand) -> Verdict:
    if report.reduces != 1:
        nudge = "torch.cat the flat gradients, reduce that one tensor, and copy its parts back."
        return not_yet(f"{report.reduces} all-reduces", expected="one", nudge=nudge)
    return correct("four replicas, equal to one process", score="1 all-reduce")


def sent_bytes(function: Callable[[int, int, int], float]) -> Verdict:
    """Exercise 2: bytes that a rank of a ring sends in one step."""
    for count, ranks, size in [(1_000_000, 4, 4), (1_000_000, 1, 4), (350, 7, 2)]:
        found, right = function(count, ranks, size), 2 * (ranks - 1) * count * size / ranks
        if not isinstance(found, (int, float)):
            return not_yet("a number is wanted", got=repr(found), nudge="Is there a `return`?")
        if abs(found - right) > 1e-6 * max(right, 1):
            what = f"for {count:,} gradients of {size} bytes on {ranks} rank(s)"
            return not_yet(what, expected=right, got=found, nudge=_sent_nudge(found, count * size, ranks))
    return correct("the payload twice, less one part in N; nothing for one rank")


def _sent_nudge(found: float, payload: int, ranks: int) -> str:
    if ranks == 1:
        return "One rank has nobody to send to."
    if found == payload:
        return "That is the payload, what a rank puts in. What does a ring make of it?"
    if found == 2 * payload:
        return "Nearly: in each of the two rounds a rank passes on N - 1 of N parts, not all."
    if found == payload * (ranks - 1) / ranks:
        return "That is one round, the reducing. The sums must go round as well."
    if found == 2 * payload * (ranks - 1):
        return "That is all ranks together. One rank sends an N-th of it."
    return "Two rounds; in each, a rank sends N - 1 parts of payload / N bytes."


def make_buckets(function: Callable[[list[int], int], list[list[int]]]) -> Verdict:
    """Exercise 3: DDP's rule, a bucket is closed by the parameter that takes it to the cap."""
    calls = 0
    for sizes, cap in [([40, 10, 10, 10, 30], 40), ([5] * 9, 20), ([100, 1, 1], 10)]:
        found = [list(bucket) for bucket in function(list(sizes), cap)]
        if problem := _bucket_problem(found, sizes, cap):
            return not_yet(f"sizes {sizes}, cap {cap}", got=found, nudge=problem)
        calls += len(found)
    return correct("last layer first, closed at the cap", score=f"{calls} all-reduces")


def _bucket_problem(found: Sequence[Sequence[int]], sizes: Sequence[int], cap: int) -> str:
    order, wanted = [i for bucket in found for i in bucket], list(range(len(sizes)))[::-1]
    if sorted(order) != sorted(wanted) or not all(found):
        return "Each parameter belongs into exactly one bucket, and no bucket is empty. Is the last one kept?"
    if order == wanted[::-1] and len(wanted) > 1:
        return "Backward makes the last layer's gradients first: go through the sizes from the end."
    if order != wanted:
        return "Keep the order of backward, also within a bucket."
    totals = [sum(sizes[i] for i in bucket) for bucket in found]
    if any(total < cap for total in totals[:-1]):
        return "A bucket was closed before it had reached the cap: DDP lets the next parameter in."
    pairs = zip(totals, found, strict=True)
    if any(total - sizes[bucket[-1]] >= cap for total, bucket in pairs):
        return "A bucket had reached the cap, and one more parameter went in: close it there."
    return ""


@starts_ranks
def accumulate(function: Callable[..., Any]) -> Verdict:
    """Exercise 4: weighted by tokens, sent once."""
    found = _on_ranks(workers.accumulated, 2, function)
    if isinstance(found, Verdict):
        return found
    for rank, report in enumerate(found):
        if not workers.close(report.gradient, report.right):
            return not_yet(f"rank {rank}'s gradient is wrong", nudge=_weights_nudge(report))
        if report.gradient_calls > 1:
            times = f"gradients were sent {report.gradient_calls} times in one step"
            return not_yet(times, expected="once", nudge="All but the last backward: no_sync().")
    return correct("every token weighs the same", score=f"{found[0].payload_bytes} bytes sent")


def _weights_nudge(report: workers.Accumulated) -> str:
    if workers.close(report.gradient, report.by_micro_batch):
        return "That is the mean of the micro-batches' means. Divide sums by tokens instead."
    if workers.close(report.gradient, report.right / 2):
        return "DDP divides by the world size. Who multiplies by it, so that tokens alone divide?"
    if workers.close(report.gradient, report.by_rank):
        return "That divides by this rank's tokens. Count those of all ranks, with an all_reduce."
    return "Sum of losses x world size / tokens of all micro-batches of all ranks."


@starts_ranks
def deadlock(answer: dict[str, Any]) -> Verdict:
    """Exercise 5: the rank that did not come, the collective that it skipped, and a cure."""
    rank, collective, cured = answer.values()
    if rank != 2:
        nudge = "Which rank waits in no collective, because its function has returned?"
        return not_yet("the rank", got=repr(rank), nudge=nudge)
    if str(collective).strip("().` ").removeprefix("dist.") != "all_gather":
        nudge = "The message names it: 'It stood in ...'. The others wait there for one more rank."
        return not_yet("the collective", got=repr(collective), nudge=nudge)
    found = _on_ranks(workers.report, 3, cured, timeout_seconds=8.0)
    if isinstance(found, Verdict):
        return found
    if found != [1.5] * 3:
        nudge = "The losses are 1, 2 and NaN. Their mean without the NaN is 1.5, and every rank returns it."
        return not_yet("the mean loss", expected=[1.5] * 3, got=found, nudge=nudge)
    return correct("every rank calls the same collectives, also one that has nothing to say")


def _on_ranks(
    worker: Callable[..., Any], ranks: int, *args: Any, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Any] | Verdict:
    """What each rank found, or a verdict on the rank that failed."""
    try:
        return run_ranks(worker, ranks, *args, timeout_seconds=timeout_seconds)
    except RankError as error:
        failure = error.failures[error.rank]
        note = f"rank {error.rank} {failure.what}"
        nudge = "Look for a loop that never ends, or a collective that not all ranks call."
        mismatch = [part for part in str(error).split("\n\n") if part.startswith("The ranks stood")]
        return not_yet(note, nudge=(mismatch or [nudge])[0] if failure.kind == "timeout" else "")
