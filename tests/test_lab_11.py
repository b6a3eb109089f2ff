"""The checks of lab 11: right answers, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lab_cases import answers, definitions, nudged, solved_lab, untouched_lab
from rank_cases import nothing_left

from utils import MIB, Wire
from utils.labs import check
from utils.labs.slow_jobs import SlowJob, lesson_job, unknown_job
from utils.labs.verdict import Status
from utils.lessons.lesson_11 import checks as lab_11
from utils.ranks import run_ranks
from utils.traffic import algorithms

LAB = solved_lab("advanced/11_links")
FUNCTIONS = ["ordered_ring", "tree_broadcast", "finish_seconds", "is_one_ring"]
EXERCISES = [*FUNCTIONS, "job_a", "job_b", "job_c"]
PARS = {"ordered_ring": "14,336 bytes between hosts, both directions, par 14,336",
        "tree_broadcast": "10 steps in all four, par 10"}  # fmt: skip
STARTS = ("def ordered", "def tree", "def finish", "def is_one", "check(", "cause_", "# BEGIN")
NAMES = {"torch": torch, "Wire": Wire, "unknown_job": unknown_job, "MIB": MIB}


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    return answers(LAB, *STARTS, **NAMES)


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Any:
    run_ranks(os.getpid, 1)  # the server is meant to stay
    with nothing_left():
        yield


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(solved: dict[str, Any], exercise: str) -> None:
    report = check(f"11.{exercise}", solved[exercise])
    assert report.status is Status.CORRECT, report
    assert report.verdict.score == PARS.get(exercise, "")


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise: str) -> None:
    untouched = answers(untouched_lab("advanced/11_links"), *STARTS, **NAMES)
    assert check(f"11.{exercise}", untouched[exercise]).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("question", "answer", "words"),
    [
        ("ring_of_64", 2, "factor for 64"),
        ("ring_of_64", 0.984, "one round"),
        ("ring_of_64", "2 GB", "a number of GB"),
        ("fewer_on_64", 8, "one hop of eight"),
        ("fewer_on_64", 1.75, "two hosts"),
        ("which_uses_tcp", "second", "RDMA"),
        ("nic_of_gpu2", 0, "SYS"),
        ("ranks_of_that_run", 12, "a 2 in front"),
        ("ranks_of_that_run", 16, "1.875"),
        ("node_to_look_at", 0, "came last"),
    ],
)
def test_wrong_answers_to_questions_are_nudged(question: str, answer: Any, words: str) -> None:
    nudged(getattr(lab_11, question)(answer), words)


def test_the_questions_accept_the_right_answers() -> None:
    right = {"ring_of_64": 1.97, "fewer_on_64": 1.125, "which_uses_tcp": "First", "nic_of_gpu2": 2,
             "ranks_of_that_run": 24, "node_to_look_at": 3}  # fmt: skip
    for question, answer in right.items():
        assert getattr(lab_11, question)(answer).status is Status.CORRECT, question


def ring_by_number(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    return algorithms.ring_all_reduce(wire, tensor)


def through_rank_0(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    return algorithms.tree_all_reduce(wire, tensor)


def by_gloo(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def not_in_place(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    order = sorted(range(wire.size), key=lambda rank: host_of[rank])
    return algorithms.ring_all_reduce(wire.among(order), tensor.clone())


def ring_of_views(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> None:
    """A right answer written in another way: from high hosts to low, nothing returned."""
    order = sorted(range(wire.size), key=lambda rank: (-host_of[rank], rank))
    algorithms.ring_all_reduce(wire.among(order), tensor)


def one_after_the_other(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    """Right on an even number of ranks, but each step sends, and then receives, or the reverse."""
    order = sorted(range(wire.size), key=lambda rank: host_of[rank])
    joined = wire.among(order)

    def exchange(part: Any, to: int, source: int, like: Any = None) -> Any:
        if joined.rank % 2 == 0:
            joined.send(part, to)
        received = joined.receive(part if like is None else like, source)
        if joined.rank % 2:
            joined.send(part, to)
        return received

    joined.exchange = exchange  # type: ignore[method-assign]
    return algorithms.ring_all_reduce(joined, tensor)


def all_send_first(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    wire.send(tensor, (wire.rank + 1) % wire.size)
    return tensor.add_(wire.receive(tensor, (wire.rank - 1) % wire.size))


def whole_tensors(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    order = sorted(range(wire.size), key=lambda rank: host_of[rank])
    place, passed = order.index(wire.rank), tensor.clone()
    for _ in range(wire.size - 1):
        right, left = order[(place + 1) % wire.size], order[place - 1]
        passed = wire.exchange(passed, right, left)
        tensor += passed
    return tensor


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ring_by_number, "sort ranks by host"),
        (through_rank_0, "one neighbour alone"),
        (by_gloo, "Use the wire alone"),
        (not_in_place, "Work in place"),
        (one_after_the_other, "belong into one step"),
        (whole_tensors, "one part of the tensor"),
        (lambda wire, tensor, host_of: tensor, "Nobody sent anything"),
    ],
)
def test_wrong_rings_are_nudged(answer: Any, words: str) -> None:
    nudged(check("11.ordered_ring", answer).verdict, words)


def test_another_right_ring_passes() -> None:
    report = check("11.ordered_ring", ring_of_views)
    assert report.status is Status.CORRECT, report


def star(wire: Wire, tensor: torch.Tensor, root: int) -> torch.Tensor:
    for rank in range(wire.size):
        if rank != root and wire.rank == root:
            wire.send(tensor, rank)
    return tensor if wire.rank == root else tensor.copy_(wire.receive(tensor, root))


def from_rank_0(wire: Wire, tensor: torch.Tensor, root: int) -> torch.Tensor:
    return algorithms.tree_broadcast(wire, tensor)


def powers_of_two_alone(wire: Wire, tensor: torch.Tensor, root: int) -> torch.Tensor:
    place, have = (wire.rank - root) % wire.size, 1
    while have < wire.size:
        if place < have:
            wire.send(tensor, (place + have + root) % wire.size)
        elif place < 2 * have:
            tensor.copy_(wire.receive(tensor, (place - have + root) % wire.size))
        have *= 2
    return tensor


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (star, "could send it on in the next step"),
        (from_rank_0, "Count ranks from the root"),
    ],
)
def test_wrong_trees_are_nudged(answer: Any, words: str) -> None:
    nudged(check("11.tree_broadcast", answer).verdict, words)


@pytest.mark.parametrize(
    ("exercise", "answer", "words"),
    [
        ("ordered_ring", all_send_first, "all send first and nobody receives"),
        ("tree_broadcast", powers_of_two_alone, "waits for a message that nobody sends"),
    ],
)
def test_ranks_that_wait_for_ever_are_stopped(
    exercise: str, answer: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_11, "TIMEOUT_SECONDS", 3.0)
    nudged(check(f"11.{exercise}", answer).verdict, words)


def finish(closes: Any, waits: bool = True, last: bool = True, each: bool = False) -> Any:
    def answer(ready: Any, sizes: Any, bucket: Any, alpha: Any, rate: Any) -> float:
        free, filled = 0.0, 0
        for number, (at, size) in enumerate(zip(ready, sizes, strict=True)):
            filled += size
            if closes(filled, bucket) or (last and number == len(ready) - 1):
                free = (max(free, at) if waits else at) + alpha + filled / rate
                filled = 0
        return free

    return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda r, s, b, a, w: r[-1] + len(s) * a + sum(s) / w,
            "Buckets go while backward goes on",
        ),
        (finish(lambda filled, bucket: filled >= bucket, waits=False), "all-reduce before it"),
        (finish(lambda filled, bucket: filled >= bucket, last=False), "what is left goes"),
        (finish(lambda filled, bucket: filled > bucket), "closed: >=, not >"),
        (lambda r, s, b, a, w: float("nan"), "no finite number"),
    ],
)
def test_wrong_finishes_are_nudged(answer: Any, words: str) -> None:
    nudged(check("11.finish_seconds", answer).verdict, words)


def each_has_one(messages: list[Any], ranks: int) -> bool:
    targets = {m.source: m.target for m in messages}
    return sorted(targets.values()) == list(range(ranks))


def never_closes(noted: Any, ranks: int) -> bool:
    """Walks as far as there are ranks, and does not ask where it ends."""
    targets: dict[int, set[int]] = {}
    for m in noted:
        targets.setdefault(m.source, set()).add(m.target)
    seen, at = [], 0
    while at in targets and at not in seen and len(targets[at]) == 1:
        seen.append(at)
        (at,) = targets[at]
    return len(seen) == ranks == len(targets)


def solved_ring(noted: Any, ranks: int) -> bool:
    solution = definitions(LAB, starts=("def is_one_ring(",))["is_one_ring"]
    return solution(noted, ranks)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda messages, ranks: all((m.target - m.source) % ranks == 1 for m in messages),
            "any order that closes",
        ),
        (each_has_one, "Walk round from rank 0"),
        (lambda messages, ranks: True, "go to the one it sends to"),
        (lambda messages, ranks: 1, "True or False"),
        (never_closes, "A ring closes where it began"),
        (
            lambda noted, ranks: solved_ring([m for m in noted if m.step == 1], ranks),
            "in all steps",
        ),
    ],
)
def test_wrong_tests_of_rings_are_nudged(answer: Any, words: str) -> None:
    nudged(check("11.is_one_ring", answer).verdict, words)


@pytest.mark.parametrize(
    ("job", "layer", "node", "saved", "words"),
    [
        ("a", "hardware", 2, 0.22, "before forward"),
        ("a", "code", 0, 0.22, "different from the others"),
        ("a", "code", 2, 0.76, "the whole step"),
        ("b", "network", "all", 0.5, "How many bytes has a message"),
        ("b", "collectives", "all", 0.1, "backward hides"),
        ("c", "hardware", 1, 0.01, "2% slower"),
        ("c", "network", 6, 0.54, "healthy step"),
    ],
)
def test_wrong_diagnoses_are_nudged(
    job: str, layer: str, node: Any, saved: float, words: str
) -> None:
    found = {"layer": layer, "node": node, "seconds saved": saved}
    nudged(getattr(lab_11, f"job_{job}")(found), words)


def test_each_job_has_one_cause_that_matters() -> None:
    for name in "ABC":
        job, healthy = unknown_job(name), SlowJob().step().step_seconds
        gains = {
            cause: job.step().step_seconds - job.fixed(cause).step().step_seconds
            for cause in ("slow_nodes", "weak_ports", "bucket_bytes", "load_seconds")
        }
        largest, second = sorted(gains.values(), reverse=True)[:2]
        assert largest > 0.1 * healthy, f"job {name}: nothing is slow"
        assert second < 0.1 * largest, f"job {name}: a second cause matters: {gains}"


def test_the_lessons_job_is_cured_cause_by_cause() -> None:
    job = lesson_job()
    for cause in ("slow_nodes", "network", "bucket_bytes", "load_seconds"):
        before, job = job.step().step_seconds, job.fixed(cause)
        assert job.step().step_seconds < before, f"curing {cause} gains nothing"
    assert job == SlowJob()
    trace = lesson_job().step()
    last = trace.seconds("waiting for a node")
    assert last.index(min(last)) == 5, "the straggler waits least"
    for number, row in enumerate(trace.stretches):
        assert all(a.end_seconds == b.start_seconds for a, b in itertools.pairwise(row)), number
