"""Answers to the exercises of lab 09 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from utils.labs.mistakes import KnownAnswers
from utils.techniques.zero import zero_config

from .plans import MISTAKES, PER_PARAMETER, Rule

known = KnownAnswers()
known.mistakes(
    "zero_3_holds",
    stage_2=((2, 0.5, 1, 2), "ZeRO-2's row"),
    one_moment=([0.5, 0.5, 1, 1], "two moments"),
    in_fp32=((1, 1, 1, 2), "two bytes"),
    whole=((2, 2, 4, 8), "four ranks"),
)
known.rights("zero_3_holds", as_a_list=[0.5, 0.5, 1.0, 2.0])
known.mistakes(
    "zero_2_sends",
    one_micro_batch=((2, 1), "every backward"),
    reductions_alone=((4, 1), "an all-reduce"),
    gathered_each_time=((8, 4), "after the step alone"),
)


def moments(
    count: int, stage: int, ranks: int, bucket: int, copy: bool = True, lasting: bool = True
) -> tuple[float, float]:
    """Bytes at both moments, of an account that may leave a part out."""
    always = 2 * count / (ranks if stage == 3 else 1) + 12 * count / ranks
    backward = always + (2 * count if stage == 1 else 2 * count / ranks + 2 * bucket)
    begins = always + 2 * count / ranks + (4 * count / ranks if copy else 0)
    return backward, begins + (2 * bucket if stage == 3 and lasting else 0)


def textbook(count: int, stage: int, ranks: int) -> float:
    whole, shared = PER_PARAMETER[stage]
    return count * (whole + shared / ranks)


known.mistakes(
    "largest_moment",
    of_the_textbook=(lambda p, s, n, bucket: textbook(p, s, n), "textbook's"),
    end_of_backward=(lambda *given: moments(*given)[0], "textbook's"),  # in stage 1 they are equal
    begin_of_the_step=(lambda *given: moments(*given)[1], "the other moment"),
    sum_of_both=(lambda *given: sum(moments(*given)), "not at once"),
    no_copy=(lambda *given: moments(*given, copy=False)[1], "an fp32 copy"),
    bucket_goes=(lambda *given: max(moments(*given, lasting=False)), "for good"),
    no_return=(lambda *given: None, "`return`"),
    not_finite=(lambda *given: math.nan, "no finite number"),
)


ROUNDS_OF: dict[str, Callable[[int], int]] = {
    "zero1": lambda g: 3,
    "zero2": lambda g: 2 * g + 1,
    "zero2 to owners": lambda g: g + 1,
    "zero3": lambda g: 3 * g,
}


def once(count: int, ranks: int) -> float:
    return 2 * count * (ranks - 1) / ranks


known.mistakes(
    "sent_bytes",
    elements=(lambda p, n, how, g: ROUNDS_OF[how](g) * once(p, n) / 2, "counts elements"),
    own_part=(lambda p, n, how, g: ROUNDS_OF[how](g) * 2 * p, "does not send its own part"),
    not_finite=(lambda p, n, how, g: math.nan, "no finite number"),
    two_rounds=(lambda p, n, how, g: 2 * once(p, n), "all-reduce is two"),
    one_micro_batch=(lambda p, n, how, g: ROUNDS_OF[how](1) * once(p, n), "one micro-batch"),
    everything_in_each=(
        lambda p, n, how, g: g * ROUNDS_OF[how](1) * once(p, n),
        "Not everything",
    ),
)


def cheapest_by(
    rule: Rule, key: Callable[[Any, Any], Any] = lambda rounds, plan: (rounds, plan)
) -> Callable[..., Any]:
    """The plan that a rule finds cheapest, or the first by another key."""

    def cheapest_plan(*card: Any) -> Any:
        plans = rule.plans(card)
        return min(plans, key=lambda plan: key(plans[plan], plan), default=None)

    return cheapest_plan


known.mistakes(
    "cheapest_plan",
    never_none=(lambda solution, *card: solution(*card) or (3, 1), "Nothing fits"),
    ddp=(lambda *card: (0, 1), "states of the stage"),
    no_divisor=(lambda *card: (1, 3), "divides the texts"),
    none=(lambda *card: None, "Something fits"),
    below=(cheapest_by(Rule(fits=operator.lt)), "`<=`"),
    lowest_stage=(cheapest_by(Rule(), lambda _, plan: plan), "fewer of those send less"),
)
for number, (says, rule) in enumerate(MISTAKES):
    by_wrong_rule = cheapest_by(rule)
    by_wrong_rule.__name__ = f"wrong_rule_{number}"
    known.mistake("cheapest_plan", says)(by_wrong_rule)
known.rights(
    "cheapest_plan",
    highest_of_equals=cheapest_by(Rule(), lambda rounds, plan: (rounds, -plan[0], -plan[1])),
)


@known.right("cheapest_plan", "par")
def gives_a_list(solution: Any, *card: Any) -> Any:
    found = solution(*card)
    return found and list(found)


def by_hand(
    average: bool = True,
    gather: bool = True,
    full: bool = False,
    times: int = 1,
    one_by_one: bool = False,
    away: dict[str, Any] | None = None,
    dummy: bool = False,
) -> Callable[..., None]:
    """ZeRO-1 by all-reduce, with parts done otherwise."""

    def zero_1_step(parameters: Any, state: Any, rate: float) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with torch.no_grad():
            for p in parameters if one_by_one else ():
                dist.all_reduce(p.grad)
            gradient = torch.cat([p.grad.flatten() for p in parameters])
            for _ in range(0 if one_by_one else times):
                dist.all_reduce(gradient)
            gradient /= ranks**times if average else 1
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
            sizes = [p.numel() for p in parameters]
            for p, new in zip(parameters, whole.split(sizes), strict=True):
                p.copy_(new.view_as(p))

    return zero_1_step


known.mistakes(
    "zero_1",
    no_gather=(by_hand(gather=False), "all-gather them"),
    full_state=(by_hand(full=True), "its own part only"),
    a_sum=(by_hand(average=False), "Divide by the number of ranks"),
    twice=(by_hand(times=2), "Once is enough"),
    one_by_one=(by_hand(one_by_one=True), "one flat tensor first"),
    state_elsewhere=(by_hand(away={}), "in `state`"),
    full_and_hidden=(by_hand(away={}, full=True, dummy=True), "in `state`"),
    nothing_done=(lambda p, s, r: None, "not those of one process"),
    fails=(lambda p, s, r: [][1], "every rank call the same"),  # noqa: PLE0643
)
known.right("zero_1", "2,448 bytes sent, par 1,632, with 272 bytes of state")(by_hand())

COLLECTIVE, TIMES = "collective that grew", "times that gradients are sent"


def cure(stage: int = 1, accumulation: int = 4, also: Any = None, **settings: Any) -> Any:
    def cured(solution: dict[str, Any]) -> dict[str, Any]:
        made = zero_config(stage, 1_000_000, world_size=4, accumulation=accumulation, **settings)
        return solution | {"cured configuration": made | (also or {})}

    return cured


known.mistakes(
    "accumulation",
    stage_0=(cure(0), "Which stage shares it"),
    larger_micro_batch=(cure(micro_batch=4), "micro-batch was 1"),
    sent_in_fp32=(cure(also={"communication_data_type": "fp32"}), "gradients in another type"),
    a_slip_of_the_pen=(cure(also={"gradient_cliping": 1.0}), "DeepSpeed does not"),
    in_fp32=(cure(precision="fp32"), "twice the bytes"),
    not_finite=({TIMES: math.nan}, "no finite number"),
    odd_values=(cure(also={"bf16": True, "zero_optimization": 1}), "a configuration"),
    another_collective=({COLLECTIVE: "all-gather"}, "Which line"),
    sixteen=({TIMES: 16}, "Divide its bytes"),
    no_accumulation=(cure(accumulation=1), "Keep the four micro-batches"),
    stage_2=(cure(2), "Which stage keeps whole gradients"),
)
known.rights("accumulation", clipped=cure(also={"gradient_clipping": 1.0}))
