"""Checks of lesson and lab 04, "One model, four ranks: DDP"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from utils.labs.cases import Case, Question, first_wrong, judge, scored, takes
from utils.labs.checking import starts_ranks
from utils.labs.kinds import NotYet, function, keys, number, one_of, several, text, whole
from utils.labs.verdict import Verdict, correct, not_yet
from utils.ranks import RankError, run_ranks

from . import workers

TIMEOUT_SECONDS = 20.0  # of a deadlock: right answers take a second

ring_of_eight = Question(
    "Lesson 04: a million fp32 gradients over a ring of eight.",
    number("a number of MB"),
    right=7,
    within=0.01,
    wrong={
        4: "That is the payload. A ring passes most of it on, twice.",
        3.5: "That is half of it: reducing and handing round each send (N - 1) / N of the payload.",
        8: "Twice the payload is the limit for many ranks. What is the factor for eight?",
        1.75: "That counts numbers. Each takes four bytes.",
    },
    nudge="Put B = 4 bytes x parameters and N = 8 into the formula above.",
    expected="2 (N - 1) / N x B, in MB",
    note="2 x 7/8 x 4 MB: hardly more than for four ranks",
)

bytes_under_amp = Question(
    "Lesson 04: autocast leaves parameters and gradients in fp32.",
    one_of("half", "same"),
    right="same",
    wrong={"half": "The table says otherwise. What dtype has a parameter's .grad under autocast?"},
    note="parameters stay in fp32, so their gradients do; only activations are 16-bit",
)

repeated_items = Question(
    "Lesson 04: 1,003 items over 8 ranks.",
    number("a number of items"),
    right=5,
    wrong={3: "That is what is left over. How many are missing to the next multiple of 8?"},
    nudge="Every rank takes the same number of items: 1,003 / 8, rounded up. How many places is that?",
    note="8 x 126 = 1,008 places for 1,003 items",
)


@starts_ranks
@takes(keys({"start_together": function(), "average_gradients": function()}))
def by_hand(answer: dict[str, Callable[..., Any]]) -> Verdict:
    """Exercise 1: the start shared, the gradients averaged, on four ranks and on two."""
    for ranks in (4, 2):
        found = _on_ranks(
            workers.by_hand, ranks, answer["start_together"], answer["average_gradients"]
        )
        if problem := _start(found) or _average(found) or _one_call(found[0]):
            return problem
    return correct("replicas that equal one process, four and two", score="1 all-reduce, par 1")


def _start(found: list[workers.ByHand]) -> Verdict | None:
    first = found[0]
    for rank, other in enumerate(found):
        if not workers.close(other.parameters, found[0].parameters):
            kept = workers.close(other.parameters, other.own_parameters)
            what = "kept its own parameters" if kept else "has other parameters than rank 0"
            nudge = "You forgot to broadcast the start: every replica begins as rank 0's."
            return not_yet(f"rank {rank} {what} after the start", nudge=nudge)
        if not workers.close(other.buffers, found[0].buffers):
            nudge = (
                "The parameters are shared, the buffers are not. Broadcast model.buffers() as well."
            )
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
        if workers.close(report.gradient, len(found) * right):
            nudge = (
                "You forgot to divide by the world size: that is the sum over ranks, not the mean."
            )
            return not_yet(f"the gradients are {len(found)} times too large", nudge=nudge)
        if workers.close(report.gradient, len(found) / 4 * right):
            nudge = (
                "Four ranks were right. Is the 4 written into it? Divide by dist.get_world_size()."
            )
            return not_yet(
                f"on {len(found)} ranks the gradients are {len(found) / 4:g} times the right size",
                nudge=nudge,
            )
        if workers.close(report.gradient, report.own_gradient):
            nudge = "Reduce parameter.grad itself, or copy what was reduced back into it."
            return not_yet(f"rank {rank} still has only its own gradients", nudge=nudge)
        ratio = float(report.gradient.norm() / right.norm())
        nudge = (
            "Sum over the ranks, then divide once by dist.get_world_size(), for every parameter."
        )
        return not_yet(f"rank {rank}: gradients of {ratio:.2f} times the right size", nudge=nudge)
    return None


def _one_call(report: workers.ByHand) -> Verdict | None:
    nudge = "torch.cat the flat gradients, reduce that one tensor, and copy its parts back."
    return judge(report.reduces, 1, f"{report.reduces} all-reduces", nudge=nudge)


def _exposed(sizes: list[int], ranks: int, backward: float, nudge: str) -> Case:
    link = 10e9
    seconds = [2 * (ranks - 1) / ranks * size / link for size in sizes]
    right = max(0.0, sum(seconds[:-1]) - backward) + seconds[-1]
    known = {
        sum(sizes)
        / link: "That is the payload over the link's rate. How much does a ring send of it?",
        sum(
            seconds
        ): "That is all sending. Buckets travel while backward computes: what is hidden does not count.",
        0.0: "Does the last bucket hide? It is full only when backward is over.",
        sum(seconds)
        - backward: "An exposed time is never negative: a link that is done early gives nothing back.",
        seconds[-1]: "That is the last bucket alone. Are the others through when backward is over?",
    }
    buckets = ", ".join(f"{size:,}" for size in sizes)
    says = f"for buckets of {buckets} bytes, {ranks} rank(s), 10 GB/s, backward {backward} s"
    wrong = {value: text for value, text in known.items() if value != right}
    return Case((list(sizes), ranks, link, backward), right, says, wrong, nudge)


@takes(function())
def exposed_seconds(answer: Callable[[list[int], int, float, float], float]) -> Verdict:
    """Exercise 2: by how much sending makes a step longer."""
    sizes, alone = [600_000_000, 300_000_000, 100_000_000], "One rank has nobody to send to."
    cases = [  # made anew in each call: a learner's function may change its list
        _exposed(
            sizes, 4, 0.2, "The first buckets hide here; the last one begins when backward ends."
        ),
        _exposed(
            sizes,
            4,
            0.1,
            "Here the link is still busy when backward ends: the last bucket waits for it.",
        ),
        _exposed([400_000_000], 2, 0.5, "A single bucket is the last one: nothing hides it."),
        _exposed([400_000_000, 1_000_000], 1, 0.1, alone),
    ]
    note = "what is sent behind backward costs nothing; the last bucket always does"
    return first_wrong(answer, cases, within=1e-9, relative=1e-6) or correct(note)


_SIZES = [([40, 10, 10, 10, 30], 40), ([5] * 9, 20), ([100, 1, 1], 10), ([2, 3, 1, 3], 4)]
PAR_BUCKETS, PAR_PAYLOAD_BYTES = 8, 148
EXACT_BYTES = 4  # of a count of tokens: fp32 holds all whole numbers up to 16 million
_BUCKETS = several(
    several(whole(), what="a list of indices"), what="a list of buckets, each a list of indices"
)


@takes(function())
def make_buckets(answer: Callable[[list[int], int], list[list[int]]]) -> Verdict:
    """Exercise 3: DDP's rule, a bucket is closed by the parameter that takes it to the cap."""
    calls = 0
    for sizes, cap in _SIZES:
        found = _BUCKETS.returned(answer(list(sizes), cap))
        if problem := _bucket_problem(found, sizes, cap):
            return not_yet(f"sizes {sizes}, cap {cap}", got=[*map(list, found)], nudge=problem)
        calls += len(found)
    return correct(
        "last layer first, closed at the cap", score=scored(calls, PAR_BUCKETS, "all-reduces")
    )


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
@takes(function())
def accumulate(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: weighted by tokens, sent once."""
    found = _on_ranks(workers.accumulated, 2, answer)
    for rank, report in enumerate(found):
        if not workers.close(report.gradient, report.right):
            return not_yet(f"rank {rank}'s gradient is wrong", nudge=_weights_nudge(report))
        if report.gradient_calls > 1:
            times = f"gradients were sent {report.gradient_calls} times in one step"
            return not_yet(times, expected="once", nudge="All but the last backward: no_sync().")
        if report.most_tokens > max(map(max, workers.TOKENS)):
            nudge = "Then the activations of all of them are alive at once: accumulation is there to spare that."
            return not_yet(
                "one forward over several micro-batches",
                nudge=nudge,
                expected=f"at most {max(map(max, workers.TOKENS))} tokens in a forward",
                got=report.most_tokens,
            )
    if (count_bytes := found[0].payload_bytes - found[0].gradient.nbytes) < EXACT_BYTES:
        nudge = "16 bits count exactly to 2,048 (fp16) or 256 (bf16) only, and real batches have more tokens."
        return not_yet(
            "the number of tokens",
            expected=f"{EXACT_BYTES} bytes or more",
            got=f"{count_bytes} bytes",
            nudge=nudge,
        )
    score = scored(found[0].payload_bytes, PAR_PAYLOAD_BYTES, "bytes sent")
    return correct("every token weighs the same", score=score)


def _weights_nudge(report: workers.Accumulated) -> str:
    if workers.close(report.gradient, report.by_micro_batch):
        return "That is the mean of the micro-batches' means. Divide sums by tokens instead."
    if workers.close(report.gradient, report.right / 2):
        return "DDP divides by the world size. Who multiplies by it, so that tokens alone divide?"
    if workers.close(report.gradient, report.by_rank):
        return "That divides by this rank's tokens. Count those of all ranks, with an all_reduce."
    return "Sum of losses x world size / tokens of all micro-batches of all ranks."


_ZERO = "A NaN is no loss of 0: divide by the number of losses that are numbers."
_LOSSES = [  # ranks, those without a loss, the mean of rank + 1 over the others, known mistakes
    (3, (2,), 1.5, {1.0: _ZERO}),
    (
        4,
        (1, 3),
        2.0,
        {
            1.0: _ZERO,
            1.5: "1.5 was the mean of other losses. Is it written into it?",
            4 / 3: "Here two ranks have no loss: count those that have one, instead of "
            "taking one from the world size.",
        },
    ),
    (
        4,
        (2,),
        7 / 3,
        {
            7 / 4: _ZERO,
            7 / 2: "Twice two ranks had a loss, and now three have. Is the 2 written into it?",
        },
    ),
]


@starts_ranks
@takes(keys({"rank": whole("the number of a rank"), "collective": text(), "cure": function()}))
def deadlock(answer: dict[str, Any]) -> Verdict:
    """Exercise 5: the rank that did not come, the collective that it skipped, and a cure."""
    collective = answer["collective"].strip("().` ").removeprefix("dist.").replace("-", "_")
    problem = judge(
        answer["rank"],
        2,
        "the rank",
        expected="the one that the others wait for",
        nudge="Which rank waits in no collective, because its function has returned?",
    ) or judge(
        collective,
        "all_gather",
        "the collective",
        expected="what the others wait in",
        nudge="The message names it: 'It stood in ...'. The others wait there for one more rank.",
    )
    return (
        problem
        or _cure(answer["cure"])
        or correct("every rank calls the same collectives, also one that has nothing to say")
    )


def _cure(cured: Callable[..., Any]) -> Verdict | None:
    for ranks, empty, right, wrong in _LOSSES:
        losses = ", ".join("NaN" if rank in empty else str(rank + 1) for rank in range(ranks))
        nudge = f"The mean of {losses} without NaN is {right}, and every rank returns it."
        for rank, found in enumerate(
            _on_ranks(workers.report, ranks, cured, empty, timeout_seconds=8.0)
        ):
            mean = number("the mean loss").returned(found)
            says = f"the mean loss that rank {rank} of {ranks} returns"
            if verdict := judge(mean, right, says, wrong=wrong, nudge=nudge, relative=1e-6):
                return verdict
    return None


def _on_ranks(
    worker: Callable[..., Any], ranks: int, *args: Any, timeout_seconds: float = 0.0
) -> list[Any]:
    """What each rank found, in TIMEOUT_SECONDS unless told otherwise.

    Raises:
        NotYet: a rank failed.
    """
    try:
        return run_ranks(worker, ranks, *args, timeout_seconds=timeout_seconds or TIMEOUT_SECONDS)
    except RankError as error:
        failure = error.failures[error.rank]
        nudge = "Look for a loop that never ends, or a collective that not all ranks call."
        mismatch = [part for part in str(error).split("\n\n") if part.startswith("The ranks stood")]
        nudge = (mismatch or [nudge])[0] if failure.kind == "timeout" else ""
        raise NotYet(not_yet(f"rank {error.rank} {failure.what}", nudge=nudge)) from None
