"""Checks of lesson and lab 11, "Links and collectives"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from utils.labs.cases import Case, Exercise, Question, judge, scored, takes
from utils.labs.checking import starts_ranks
from utils.labs.kinds import Kind, NotYet, flag, function, keys, number, one_of, whole
from utils.labs.slow_jobs import SlowJob, unknown_job
from utils.labs.verdict import Verdict, correct, not_yet
from utils.ranks import RankError, run_ranks
from utils.traffic.cost import AlphaBeta, overlapped_seconds

from . import workers
from .wire import Message, messages

TIMEOUT_SECONDS = 20.0  # of a deadlock: right answers take a second

ring_of_64 = Question(
    "Lesson 11: 1 GB over a ring of 64 ranks.",
    number("a number of GB"),
    right=2 * 63 / 64,
    within=0.005,
    wrong={
        2: "Nearly: that is the limit for many ranks. What is the factor for 64?",
        63 / 64: "That is one round. The complete parts must go round as well.",
        1: "That is B, what a rank puts in. What does the ring make of it?",
        126: "That many B would be whole tensors in every step. A step sends one part of 64.",
    },
    nudge="Put N = 64 and B = 1 GB into 2 (N - 1) / N x B.",
    expected="2 (N - 1) / N x B, in GB",
    note="1.97 GB: hardly more than for 8 ranks",
)

fewer_on_64 = Question(
    "Lesson 11: flat ring against hierarchical over 8 hosts of 8 ranks, bytes out of a host.",
    number("how many times fewer"),
    right=(2 * 63 / 64) / (2 * 7 / 8),
    within=0.006,
    wrong={
        8: "Only if all hops of the flat ring crossed. Numbered host by host, one hop of eight leaves a host.",
        1.75: "That was two hosts. Put H = 8 into 2 (H - 1) / H.",
    },
    nudge="Flat: 2 (N - 1) / N x B with N = 64. Hierarchical: 2 (H - 1) / H x B with H = 8.",
    expected="the ratio of the two formulas",
    note="1.125: on many hosts it saves few bytes, but 14 steps over the slow link replace 126",
)

ranks_of_that_run = Question(
    "Lesson 11: ranks from the ratio of busbw and algbw.",
    whole("a number of ranks"),
    right=24,
    wrong={
        12: "2 (N - 1) / N for an all-reduce: there is a 2 in front.",
        32: "32 ranks would give 1.94. The first row has 29.50 / 15.39.",
        16: "16 ranks would give 1.875. The first row has 29.50 / 15.39.",
        2: "Two ranks have the ratio 1.",
    },
    nudge="Solve busbw / algbw = 2 (N - 1) / N for N.",
    expected="N of 2 (N - 1) / N = 29.50 / 15.39",
    note="29.50 / 15.39 = 1.917 = 2 x 23/24",
)

node_to_look_at = Question(
    "Lesson 11: the node whose all-reduce is short.",
    whole("the number of a node"),
    right=3,
    nudge="A collective ends for all at once. Who came last, so that the others waited for it?",
    expected="the one that all others wait for",
    note="it comes last, so it waits least",
)

_HOSTS = [([0, 1, 0, 1], 64), ([0, 1, 2, 1, 0], 37), ([0, 1, 0, 1, 0, 1, 0, 1], 512)]
PAR_SLOW_BYTES = 2 * 2 * 7 * 512  # 8 ranks, 512 fp64 numbers: two hops of 2 x 7/8 x 4 KiB


@starts_ranks
@takes(function())
def ordered_ring(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: a ring all-reduce along the hosts, of any length, in 2 (N - 1) steps."""
    slow_bytes = []
    for host_of, numbers in _HOSTS:
        says = f"for {len(host_of)} ranks on hosts {host_of} and {numbers} numbers"
        found = _on_ranks(workers.ring, len(host_of), answer, host_of, numbers)
        hops = _noted(found, says)
        if problem := _ring_problem(found, hops, host_of, numbers):
            return not_yet(says, got=problem[0], nudge=problem[1])
        slow_bytes.append(sum(m.bytes for m in hops if host_of[m.source] != host_of[m.target]))
    score = scored(slow_bytes[-1], PAR_SLOW_BYTES, "bytes between hosts, both directions")
    return correct("a ring that leaves each host once, 2 (N - 1) steps", score=score)


def _ring_problem(
    found: Sequence[workers.Sent], hops: Sequence[Message], host_of: Sequence[int], numbers: int
) -> tuple[str, str] | None:
    ranks = len(host_of)
    if problem := _result_problem(found):
        return problem
    targets = {rank: {m.target for m in hops if m.source == rank} for rank in range(ranks)}
    if busy := [rank for rank, those in targets.items() if len(those) > 1]:
        return (
            f"rank {busy[0]} sent to ranks {sorted(targets[busy[0]])}",
            "In a ring a rank sends to one neighbour alone. Who is it?",
        )
    crossing = sum(host_of[m.source] != host_of[m.target] for m in hops if m.step == 1)
    if crossing > len(set(host_of)):
        return (
            f"{crossing} messages cross between hosts in every step",
            "Put the ranks of one host one after the other: sort ranks by host, and go round in that order.",
        )
    least, steps = -(-numbers // ranks) * 8, hops[-1].step
    longest = max(m.bytes for m in hops)
    if longest > least:
        return (
            f"a message of {longest} bytes",
            "A step sends one part of the tensor, not all of it: torch.tensor_split.",
        )
    if steps > 2 * (ranks - 1):
        return (
            f"{steps} steps; 2 (N - 1) is {2 * (ranks - 1)}",
            "Sending and receiving belong into one step: wire.exchange does both at once.",
        )
    return None


def _result_problem(found: Sequence[workers.Sent]) -> tuple[str, str] | None:
    wrong = [(rank, sent) for rank, sent in enumerate(found) if sent.share < 1]
    if not wrong:
        rest = [rank for rank, sent in enumerate(found) if not sent.returned]
        return (
            (f"rank {rest[0]} returned another tensor", "Return the tensor that you were given.")
            if rest
            else None
        )
    rank, sent = wrong[0]
    if sent.is_own:
        return (
            f"rank {rank}'s tensor is what it was before",
            "Work in place: the parts of torch.tensor_split are views; "
            "`part += ...` and `part.copy_(...)` change the tensor, `part = ...` does not.",
        )
    return (
        f"rank {rank} holds {sent.share:.0%} of the right numbers",
        "Follow one part by hand: who holds it, complete or not, after each step? Count places in the ring, not ranks.",
    )


_ROOTS = [(4, 0), (4, 3), (5, 2), (8, 5)]
PAR_BROADCAST_STEPS = 10  # 2, 2, 3 and 3


@starts_ranks
@takes(function())
def tree_broadcast(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: a tree from any root, over any number of ranks."""
    total = 0
    for ranks, root in _ROOTS:
        says = f"for {ranks} ranks from root {root}"
        found = _on_ranks(workers.broadcast, ranks, answer, root, 16)
        hops = _noted(found, says)
        if problem := _tree_problem(found, hops, ranks, root):
            return not_yet(says, got=problem[0], nudge=problem[1])
        total += hops[-1].step
    score = scored(total, PAR_BROADCAST_STEPS, "steps in all four")
    return correct("in each step twice as many have it", score=score)


def _tree_problem(
    found: Sequence[workers.Sent], hops: Sequence[Message], ranks: int, root: int
) -> tuple[str, str] | None:
    problem = _result_problem(found)
    if problem and root and found[root].share < 1:
        return (
            "the root's own tensor was overwritten",
            "Count ranks from the root: (rank - root) % N is 0 there. Who is rank 0 now?",
        )
    if problem:
        return problem
    steps, least = hops[-1].step, math.ceil(math.log2(ranks))
    if len(hops) > ranks - 1:
        return (
            f"{len(hops)} messages; {ranks - 1} would do",
            "Send to those alone that do not have it yet.",
        )
    if steps > least:
        star = all(m.source == root for m in hops)
        nudge = (
            "The root sends every message itself. Who has the tensor, could send it on in the next step."
            if star
            else "In each step everyone who has the tensor sends it to one who has not."
        )
        return (f"{steps} steps; {least} would do", nudge)
    return None


def _cost(nbytes: float) -> float:
    return AlphaBeta(0.001, 1e6).seconds(nbytes)


def _finish(ready: list[float], sizes: list[int], bucket: int, says: str, **wrong: Any) -> Case:
    right = overlapped_seconds(ready, sizes, bucket, _cost)
    return Case((ready, sizes, bucket, 0.001, 1e6), right, says, **wrong)


_READY = [0.010, 0.020, 0.030, 0.040]
finish_seconds = Exercise(
    "Exercise 3: when the last bucket is reduced.",
    [
        _finish(
            _READY,
            [5000] * 4,
            4000,
            "with every gradient a bucket",
            wrong={
                0.064: "That is backward, and then everything. Buckets go while backward goes on.",
                0.060: "All-reduces run beside backward; the last one starts when its gradient is there.",
            },
        ),
        _finish(
            _READY,
            [5000] * 4,
            20_000,
            "with one bucket for all",
            wrong={
                0.064: "Four starts? One bucket is one all-reduce.",
            },
        ),
        _finish(
            _READY,
            [30_000, 1000, 1000, 1000],
            900,
            "where the first bucket keeps the network busy",
            nudge="A bucket waits for its gradients *and* for the all-reduce before it.",
        ),
        _finish(
            _READY,
            [5000] * 4,
            12_000,
            "where the last bucket is not full",
            wrong={
                0.056: "Here the cap was exceeded by the third gradient, and the fourth is alone. Is it sent?",
            },
            nudge="The gradient that takes a bucket to its cap or past it still belongs in. At the end what is left goes, full or not.",
        ),
        _finish(
            _READY,
            [5000] * 4,
            10_000,
            "where two gradients fill a bucket to the byte",
            nudge="A bucket that has just reached its cap is closed: >=, not >.",
        ),
        _finish(
            [0.5],
            [0],
            1,
            "with a gradient of no bytes",
            nudge="An all-reduce of nothing still costs its start.",
        ),
    ],
    relative=1e-9,
    nudge="free = max(free, ready) + alpha + bytes / rate, bucket after bucket.",
    note="a bucket starts when its last gradient is there and the one before is through",
)


def _along(*order: int) -> list[tuple[int, int]]:
    return [(order[i], order[(i + 1) % len(order)]) for i in range(len(order))]


def _case(
    pairs: list[tuple[int, int]], ranks: int, right: bool, says: str, nudge: str = ""
) -> Case:
    """Every pair talks in each of two steps."""
    noted = [Message(step, source, target, 64) for step in (1, 2) for source, target in pairs]
    return Case((noted, ranks), right, says, nudge=nudge)


is_one_ring = Exercise(
    "Exercise 4: one ring over all ranks, or not.",
    [
        _case(_along(0, 1, 2, 3), 4, True, "for the ring 0, 1, 2, 3"),
        _case(
            [(1, 0), (2, 0), (3, 0), (0, 1), (0, 2), (0, 3)], 4, False, "for a star around rank 0"
        ),
        _case(
            _along(0, 2, 4, 1, 3),
            5,
            True,
            "for the ring 0, 2, 4, 1, 3",
            "The neighbour need not be rank + 1: any order that closes is a ring.",
        ),
        _case(_along(3, 2, 1, 0), 4, True, "for the ring that runs backwards"),
        _case(
            [*_along(0, 1), *_along(2, 3)],
            4,
            False,
            "for 0, 1 and 2, 3 in two rings",
            "Each rank has one neighbour, and still nobody of the first pair hears of the second. Walk round from rank 0.",
        ),
        _case(_along(0, 1, 2, 3)[:-1], 4, False, "for a line that does not close"),
        _case(
            _along(0, 1, 2),
            4,
            False,
            "where rank 3 takes no part",
            "It closes after three. Are these all ranks?",
        ),
        _case(
            [*_along(0, 1, 2, 3), (0, 2)],
            4,
            False,
            "where rank 0 sends to rank 2 besides",
            "A dict from source to target keeps the last one only. Who else was sent to?",
        ),
        _case(_along(0, 1), 2, True, "for two ranks"),
        _case(
            [(0, 1), (1, 2), (2, 3), (3, 1)],
            4,
            False,
            "for 0, 1, 2, 3, which goes on to 1 and never comes back",
            "All four are passed and nobody twice, and rank 3 does not send to rank 0. A ring closes where it began.",
        ),
        Case(
            (
                [Message(1, *pair, 64) for pair in _along(0, 1, 2, 3)]
                + [Message(2, *pair, 64) for pair in _along(3, 2, 1, 0)],
                4,
            ),
            False,
            "where each rank sends to one neighbour in step 1 and to the other in step 2",
            nudge="To one other *in all steps*: look at all messages, not at those of the first step.",
        ),
    ],
    returns=flag(),
    nudge="From rank 0 go to the one it sends to, and on. After how many are you back?",
    note="one neighbour each, and one walk through all of them",
)

_LAYERS = ("hardware", "network", "collectives", "code")
ALL = "all"  # the node, where none is different


def _node(value: Any) -> int | str:
    if isinstance(value, str) and value.strip().lower() == ALL:
        return ALL
    return whole().read(value)


_PARTS = keys(
    {
        "layer": one_of(*_LAYERS),
        "node": Kind('the number of a node, or "all"', _node),
        "seconds saved": number("a number of seconds"),
    }
)


def _job(
    name: str, layer: str, node: int | str, cause: str, nudges: dict[str, str], note: str
) -> Any:
    """The check of one unknown job; `nudges` by the layer that was blamed in place of the right one."""

    @takes(_PARTS)
    def check_job(answer: dict[str, Any]) -> Verdict:
        job = unknown_job(name)
        saved = job.step().step_seconds - job.fixed(cause).step().step_seconds
        problem = judge(
            answer["layer"], layer, "the layer", wrong=nudges, expected="the layer of the cause"
        )
        problem = (
            problem
            or judge(
                answer["node"],
                node,
                "the node",
                expected='the node, or "all" where none is different',
                nudge="Is one node different from the others in what this layer shows?",
            )
            or judge(
                answer["seconds saved"],
                saved,
                "the seconds saved by this cure alone",
                relative=0.03,
                within=0.003,
                expected="seconds of a step, before less after",
                wrong={
                    job.step().step_seconds: "That is the whole step. What is left of it after the cure?",
                    SlowJob()
                    .step()
                    .step_seconds: "That is a healthy step. How much shorter is it than this one?",
                },
                nudge="What of it shows in the step? Busy seconds that backward hides save nothing.",
            )
        )
        return problem or correct(note)

    check_job.__doc__ = f"Exercise 5: the unknown job {name}."
    return check_job


job_a = _job(
    "A",
    "code",
    2,
    "load_seconds",
    {
        "hardware": "Node 2 comes late, as a straggler does. But its clock is that of the others: what does it do before forward?",
        "network": "All ports give their rate, and NCCL uses them. Whom do the others wait for?",
        "collectives": "207 all-reduces of 187 µs are 0.04 s, and backward, 0.36 s, hides them. Whom do the others wait for?",
    },
    "node 2 waits for its data, and seven nodes wait for node 2",
)
job_b = _job(
    "B",
    "collectives",
    ALL,
    "reduced_passes",
    {
        "hardware": "All clocks are alike, and no node waits less than another.",
        "network": "The ports give 197 of 200 Gb/s, and NCCL uses them. How many bytes do all messages of a step have together, and how many the gradients?",
        "code": "No node waits for data.",
    },
    "every micro-batch is reduced: accumulation without no_sync",
)
job_c = _job(
    "C",
    "network",
    6,
    "weak_ports",
    {
        "hardware": "Node 1 is hot, and 2% slower. Can that make half of what you see? Look on.",
        "collectives": "The buckets are DDP's own. Why does one of 25 MiB take milliseconds?",
        "code": "No node waits for data.",
    },
    "every all-reduce goes at the rate of the weakest port; the hot node costs little",
)


def _noted(found: Sequence[workers.Sent], says: str) -> list[Message]:
    for rank, sent in enumerate(found):
        if sent.elsewhere:
            called = f"rank {rank} called {', '.join(sent.elsewhere)}"
            nudge = "Use the wire alone: send, receive, exchange."
            raise NotYet(not_yet(says, got=called, nudge=nudge))
    try:
        hops = messages([sent.moves for sent in found])
    except ValueError as error:
        raise NotYet(not_yet(says, got=str(error), nudge="Every send needs its receive.")) from None
    if not hops:
        nudge = "Nobody sent anything. wire.exchange(part, to, source) sends and receives."
        raise NotYet(not_yet(says, got="no messages", nudge=nudge))
    return hops


def _on_ranks(worker: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """What each rank found.

    Raises:
        NotYet: a rank failed.
    """
    try:
        return run_ranks(worker, ranks, *args, timeout_seconds=TIMEOUT_SECONDS)
    except RankError as error:
        failure = error.failures[error.rank]
        nudge = (
            "Somebody waits for a message that nobody sends, or all send first and nobody receives: "
            "follow one step of every rank. wire.exchange does both at once."
        )
        nudge = nudge if failure.kind == "timeout" else ""
        raise NotYet(
            not_yet(f"on {ranks} ranks, rank {error.rank} {failure.what}", nudge=nudge)
        ) from None
