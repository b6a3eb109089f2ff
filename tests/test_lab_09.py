"""Lab 09's checks: on the solution, the untouched lab, and wrong answers with their own nudges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lab_cases import answers, nudged, solved_lab, untouched_lab

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_09 import checks as lab_09
from utils.lessons.lesson_09 import plans as plans_09
from utils.techniques.zero import zero_config

pytestmark = pytest.mark.deepspeed


NAMES = {"torch": torch, "dist": dist, "zero_config": zero_config}
EXERCISES = ["largest_moment", "sent_bytes", "cheapest_plan", "zero_1", "accumulation"]


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


def moments(count, stage, ranks, bucket, copy=True, lasting=True):
    always = 2 * count / (ranks if stage == 3 else 1) + 12 * count / ranks
    backward = always + (2 * count if stage == 1 else 2 * count / ranks + 2 * bucket)
    begins = always + 2 * count / ranks + (4 * count / ranks if copy else 0)
    return backward, begins + (2 * bucket if stage == 3 and lasting else 0)


def textbook(count, stage, ranks):
    shares = [12 / (ranks if stage >= 1 else 1), 2 / (ranks if stage >= 2 else 1)]
    return count * (sum(shares) + 2 / (ranks if stage >= 3 else 1))


def test_largest_moment():
    right = lambda *a: max(moments(*a))  # noqa: E731
    assert verdict("largest_moment", right).status is Status.CORRECT
    assert verdict("largest_moment", lambda *a: np.float32(right(*a))).status is Status.CORRECT
    refused("largest_moment", lambda p, s, n, b: textbook(p, s, n), "textbook's")
    refused("largest_moment", lambda *a: moments(*a)[0], "textbook's")  # stage 1: they are equal
    refused("largest_moment", lambda *a: moments(*a)[1], "the other moment")
    refused("largest_moment", lambda *a: sum(moments(*a)), "not at once")
    refused("largest_moment", lambda *a: moments(*a, copy=False)[1], "an fp32 copy")
    kept = lambda *a: max(moments(*a, lasting=False))  # noqa: E731
    refused("largest_moment", kept, "for good")
    refused("largest_moment", lambda *a: None, "`return`")
    refused("largest_moment", lambda *a: math.nan, "no finite number")


ROUNDS = {
    "zero1": lambda g: 3,
    "zero2": lambda g: 2 * g + 1,
    "zero2 to owners": lambda g: g + 1,
    "zero3": lambda g: 3 * g,
}


def test_sent_bytes():
    once = lambda p, n: 2 * p * (n - 1) / n  # noqa: E731
    right = lambda p, n, how, g: ROUNDS[how](g) * once(p, n)  # noqa: E731
    assert verdict("sent_bytes", right).status is Status.CORRECT
    refused("sent_bytes", lambda p, n, how, g: right(p, n, how, g) / 2, "counts elements")
    refused("sent_bytes", lambda p, n, how, g: ROUNDS[how](g) * 2 * p, "does not send its own part")
    refused("sent_bytes", lambda p, n, how, g: math.nan, "no finite number")
    assert verdict("sent_bytes", lambda *a: np.float32(right(*a))).status is Status.CORRECT
    refused("sent_bytes", lambda p, n, how, g: 2 * once(p, n), "all-reduce is two")
    refused("sent_bytes", lambda p, n, how, g: ROUNDS[how](1) * once(p, n), "one micro-batch")
    refused("sent_bytes", lambda p, n, how, g: g * ROUNDS[how](1) * once(p, n), "Not everything")


def plan_for(count, ranks, card, texts, each, fits=lambda size, card: size <= card, order=min):
    plans = []
    for stage in range(4):
        for micro in range(1, texts + 1):
            if texts % micro == 0 and fits(textbook(count, stage, ranks) + micro * each, card):
                g = texts // micro
                plans.append(([2, 3, 2 * g + 1, 3 * g][stage], (stage, micro)))
    return order(plans)[1] if plans else None


def test_cheapest_plan():
    assert verdict("cheapest_plan", plan_for).status is Status.CORRECT
    assert "par" in verdict("cheapest_plan", plan_for).score
    as_list = lambda *a: plan_for(*a) and [np.int64(x) for x in plan_for(*a)]  # noqa: E731
    assert verdict("cheapest_plan", as_list).status is Status.CORRECT
    refused("cheapest_plan", lambda *a: plan_for(*a) or (3, 1), "Nothing fits")
    refused("cheapest_plan", lambda *a: (0, 1), "states of the stage")
    refused("cheapest_plan", lambda *a: (1, 3), "divides the texts")
    refused("cheapest_plan", lambda *a: None, "Something fits")
    below = lambda *a: plan_for(*a, fits=lambda size, card: size < card)  # noqa: E731
    refused("cheapest_plan", below, "`<=`")
    lowest = lambda *a: plan_for(*a, order=lambda plans: min(plans, key=lambda p: p[1]))  # noqa: E731
    refused("cheapest_plan", lowest, "fewer of those send less")


@pytest.mark.parametrize(("sentence", "rule"), plans_09.MISTAKES)
def test_a_wrong_rule_for_plans_is_told_what_is_wrong_with_it(sentence, rule):
    def cheapest_plan(*card):
        plans = rule.plans(card)
        return min(plans, key=lambda plan: (plans[plan], plan)) if plans else None

    nudged(lab_09.cheapest_plan(cheapest_plan), sentence)


def test_ties_between_plans_may_be_broken_by_either():
    def highest(*card):
        plans = plans_09.Rule().plans(card)
        return max(plans, key=lambda plan: (-plans[plan], plan)) if plans else None

    assert lab_09.cheapest_plan(highest).status is Status.CORRECT


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
    assert "2,448 bytes sent, par 1,632" in str(found)
    refused("zero_1", lambda p, s, r: None, "not those of one process")
    refused("zero_1", lambda p, s, r: [][1], "every rank call the same")  # noqa: PLE0643


def cured_by(**settings):
    return zero_config(1, 1_000_000, world_size=4, accumulation=4, **settings)


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
    refused("accumulation", answer(cured=whole), "Which stage shares it")
    refused("accumulation", answer(cured=cured_by(micro_batch=4)), "micro-batch was 1")
    refused(
        "accumulation",
        answer(cured=cured_by() | {"communication_data_type": "fp32"}),
        "sends gradients in another type",
    )
    refused(
        "accumulation", answer(cured=cured_by() | {"gradient_cliping": 1.0}), "DeepSpeed does not"
    )
    clipped = cured_by() | {"gradient_clipping": 1.0}
    assert verdict("accumulation", answer(cured=clipped)).status is Status.CORRECT
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
