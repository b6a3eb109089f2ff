"""Lab 09's checks: on the solution, the untouched lab, and wrong answers with their own nudges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lab_cases import answers, solved_lab, untouched_lab

from utils.labs import check
from utils.labs.verdict import Status
from utils.techniques.zero import zero_config

pytestmark = pytest.mark.deepspeed


NAMES = {"torch": torch, "dist": dist, "zero_config": zero_config}
EXERCISES = ["staircase", "sent_bytes", "smallest_stage", "zero_1", "accumulation"]


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(exercise):
    found = verdict(exercise, answers(solved_lab("intermediate/09_sharding"), **NAMES)[exercise])
    assert found.status is Status.CORRECT, found


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise):
    untouched = answers(untouched_lab("intermediate/09_sharding"), **NAMES)
    assert verdict(exercise, untouched[exercise]).status is Status.NOT_ATTEMPTED


def verdict(name, answer):
    return check(f"09.{name}", answer).verdict


def refused(name, answer, nudge):
    found = verdict(name, answer)
    assert found.status is Status.NOT_YET and nudge in str(check(f"09.{name}", answer))


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("stage_2_on_8", 3.75, {2: "limit", 1.75: "still whole", 5.5: "ZeRO-1", 9: "whole"}),
        ("one_gpu", 0, {7: "N = 1", 14: "N = 1"}),
        ("reduced_times", 8, {1: "ZeRO-1", 2: "Count the backwards"}),
    ],
)
def test_questions_of_the_lesson(name, right, wrong):
    assert verdict(name, right).status is Status.CORRECT
    assert verdict(name, ...).status is Status.NOT_ATTEMPTED
    for answer, nudge in wrong.items():
        refused(name, answer, nudge)


def state_bytes(count, stage, ranks):
    shares = [12 / (ranks if stage >= 1 else 1), 2 / (ranks if stage >= 2 else 1)]
    return count * (sum(shares) + 2 / (ranks if stage >= 3 else 1))


def test_staircase():
    assert verdict("staircase", state_bytes).status is Status.CORRECT
    refused("staircase", lambda p, s, n: 12 * p / n, "Not all 16 bytes")
    refused("staircase", lambda p, s, n: state_bytes(p, min(s + 1, 3), n), "That is stage")
    refused("staircase", lambda p, s, n: None, "`return`")
    refused("staircase", lambda p, s, n: math.nan, "no finite number")
    assert verdict("staircase", lambda *a: np.float64(state_bytes(*a))).status is Status.CORRECT
    assert verdict("staircase", lambda *a: np.float32(state_bytes(*a))).status is Status.CORRECT


def test_sent_bytes():
    rounds = {"allreduce": 3, "owners": 2, "zero3": 3}
    right = lambda p, n, how: rounds[how] * 2 * p * (n - 1) / n  # noqa: E731
    assert verdict("sent_bytes", right).status is Status.CORRECT
    refused("sent_bytes", lambda p, n, how: right(p, n, how) / 2, "counts elements")
    refused("sent_bytes", lambda p, n, how: rounds[how] * 2 * p, "does not send its own part")
    refused("sent_bytes", lambda p, n, how: math.nan, "no finite number")
    assert verdict("sent_bytes", lambda *a: np.float32(right(*a))).status is Status.CORRECT
    refused("sent_bytes", lambda p, n, how: 2 * 2 * p * (n - 1) / n, "all-reduce is two")


def stage_for(count, ranks, card):
    return next((s for s in range(4) if state_bytes(count, s, ranks) <= card), None)


def test_smallest_stage():
    assert verdict("smallest_stage", stage_for).status is Status.CORRECT
    refused("smallest_stage", lambda *_: 3, "from 0 up")
    always = lambda *a: stage_for(*a) if stage_for(*a) is not None else 3  # noqa: E731
    refused("smallest_stage", always, "None when none fits")
    refused("smallest_stage", with_room_to_spare, "to the last byte")
    as_numpy = lambda *a: None if stage_for(*a) is None else np.int64(stage_for(*a))  # noqa: E731
    assert verdict("smallest_stage", as_numpy).status is Status.CORRECT


def with_room_to_spare(count, ranks, card):
    return next((s for s in range(4) if state_bytes(count, s, ranks) < card), None)


def by_hand(
    parameters, state, rate, average=True, gather=True, full=False, twice=False, one_by_one=False,
    away=None, dummy=False,
):  # fmt: skip
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        if one_by_one:
            for p in parameters:
                dist.all_reduce(p.grad)
        gradient = torch.cat([p.grad.flatten() for p in parameters])
        if not one_by_one:
            dist.all_reduce(gradient)
        if twice:
            dist.all_reduce(gradient)
            gradient /= ranks
        gradient /= ranks if average else 1
        size = len(gradient) // ranks
        mine = slice(rank * size, (rank + 1) * size)
        home, length = state if away is None else away, len(gradient) if full else size
        velocity = home.setdefault("velocity", torch.zeros(length))
        velocity.mul_(0.9).add_(gradient if full else gradient[mine])
        whole = torch.cat([p.flatten() for p in parameters])
        if dummy:
            state.setdefault("velocity", torch.zeros(size))
            whole -= rate * velocity
            dist.all_gather_into_tensor(torch.empty_like(whole), whole[mine].clone())
        else:
            whole[mine] -= rate * (velocity[mine] if full else velocity)
        if gather and not dummy:
            dist.all_gather_into_tensor(whole, whole[mine].clone())
        for p, new in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
            p.copy_(new.view_as(p))


@pytest.mark.parametrize(
    "change, nudge",
    [
        ({"gather": False}, "all-gather them"),
        ({"full": True}, "its own part only"),
        ({"average": False}, "Divide by the number of ranks"),
        ({"twice": True}, "Once is enough"),
        ({"one_by_one": True}, "one flat tensor first"),
        ({"away": {}}, "in `state`"),
        ({"away": {}, "full": True, "dummy": True}, "in `state`"),
    ],
    ids=[
        "no gather",
        "full state",
        "sum",
        "twice",
        "one by one",
        "state elsewhere",
        "full, hidden",
    ],
)
def test_zero_1_refuses(change, nudge):
    refused("zero_1", lambda p, s, r: by_hand(p, s, r, **change), nudge)


def test_zero_1():
    found = check("09.zero_1", by_hand)
    assert found.verdict.status is Status.CORRECT and "272 bytes of state" in str(found)
    refused("zero_1", lambda p, s, r: None, "not those of one process")
    refused("zero_1", lambda p, s, r: [][1], "every rank call the same")  # noqa: PLE0643


def test_accumulation():
    def answer(**changes):
        cured = zero_config(1, 1_000_000, world_size=4, accumulation=4)
        keys = ("collective that grew", "times that gradients are sent", "cured configuration")
        values = {"collective": "all-reduce", "times": 4, "cured": cured, **changes}
        return dict(zip(keys, values.values(), strict=True))

    assert verdict("accumulation", answer()).status is Status.CORRECT
    assert verdict("accumulation", dict(reversed(answer().items()))).status is Status.CORRECT
    assert verdict("accumulation", answer(times=np.int64(4))).status is Status.CORRECT
    whole = zero_config(0, 1_000_000, world_size=4, accumulation=4)
    assert verdict("accumulation", answer(cured=whole)).status is Status.CORRECT
    in_fp32 = zero_config(1, 1_000_000, world_size=4, accumulation=4, precision="fp32")
    refused("accumulation", answer(cured=in_fp32), "twice the bytes")
    refused("accumulation", answer(times=math.nan), "no finite number")
    odd = {"gradient_accumulation_steps": 4, "bf16": True, "zero_optimization": 1}
    refused("accumulation", answer(cured=odd), "a configuration")
    refused("accumulation", answer(collective="all-gather"), "Which line")
    refused("accumulation", answer(times=16), "Divide its bytes")
    once = zero_config(1, 1_000_000, world_size=4)
    refused("accumulation", answer(cured=once), "Keep the four micro-batches")
    again = zero_config(2, 1_000_000, world_size=4, accumulation=4)
    refused("accumulation", answer(cured=again), "Which stage keeps whole gradients")
