"""Answers to the exercises of lab 15 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from utils.catalog import model_shape
from utils.labs.mistakes import KnownAnswers
from utils.planner import Framework, Lora, Plan, estimate, framework

from .checks import BATCH, MODEL, OOM_PLAN, TO_FIX, the_cluster

known = KnownAnswers()
LIGHT = Framework(name="light", gradient_bytes=0, master_bytes=0, moment_bytes=0)
known.mistakes(
    "gb_per_gpu",
    gradients_in_16_bits=(16 * 130 / 64, "gradients are fp32"),
    of_all_gpus=(18 * 130, "64 GPUs share it"),
    weights_alone=(4.06, "weights alone"),
    seven=(7, "Bytes per parameter"),
    with_its_unit=("36 GB", "a number of GB"),
    not_finite=(math.nan, "no finite number"),
)
known.rights("gb_per_gpu", rounded=36.6, of_numpy=np.float32(36.6))
known.mistakes(
    "highest_usd",
    at_the_whole_data_sheet=(4.76, "uses 53% of it"),
    of_all_gpus=(161.6, "all 64"),
    of_a_day=(60.6, "a day"),
    forward_alone=(7.57, "backward 4"),
    as_lambda_asks=(2.79, "are GPU hours"),
    with_its_unit=("$2.52", "a number of dollars"),
    not_finite=(math.nan, "no finite number"),
)
known.rights("highest_usd", rounded=2.52, of_numpy=np.float32(2.525))
TO_HOST: dict[str, Any] = {"sequence_parallel": True, "offload": "optimizer"}
known.mistakes(
    "plan_small_cards",
    too_many_gpus=(Plan(dp=8, tp=8, pp=8, **TO_HOST), "the cluster has 64"),
    of_the_lesson=(Plan(tp=8, pp=8, sequence_parallel=True), "within the allocator's reach"),
    two_at_a_time=(Plan(tp=8, pp=8, sequence_parallel=True, micro_batch=2), "Which choice makes"),
    no_pipeline=(Plan(dp=8, tp=8, sequence_parallel=True), "optimizer state"),
    recomputes=(
        Plan(tp=8, pp=8, sequence_parallel=True, micro_batch=4, recompute="full"),
        "costs a third",
    ),
    recomputes_and_offloads=(Plan(tp=8, pp=8, recompute="full", **TO_HOST), "costs a third"),
    tp_leaves_the_node=(Plan(tp=16, pp=4, **TO_HOST), "leaves the node"),
    kept_whole=(Plan(tp=8, pp=8, offload="optimizer"), "splits what TP leaves whole"),
    one_replica=(Plan(tp=8, pp=8, **TO_HOST), "in two replicas"),
    tp_of_2=(Plan(dp=4, tp=2, pp=8, zero_stage=1, **TO_HOST), "Which choice makes"),
    a_dict=({"tp": 8}, "a Plan(...) is wanted"),
    adapters_alone=(
        Plan(tp=8, pp=8, sequence_parallel=True, micro_batch=8, lora=Lora()),
        "adapters alone",
    ),
    other_books=(lambda solution: replace(solution, framework=LIGHT), "books"),
)
known.rights(
    "plan_small_cards",
    one_replica_two_at_a_time=Plan(tp=8, pp=8, micro_batch=2, **TO_HOST),
    without_zero=Plan(dp=2, tp=4, pp=8, **TO_HOST),
    zero_2=Plan(dp=2, tp=4, pp=8, zero_stage=2, **TO_HOST),
    framework_by_name=lambda solution: replace(solution, framework=framework("megatron")),
)


def all_it_needs(solution: dict[str, Any]) -> dict[str, Any]:
    found = estimate(model_shape(MODEL), the_cluster(), OOM_PLAN, BATCH)
    return solution | {"missing GiB": found.peak.needed_bytes / 2**30}


known.mistakes(
    "explain_oom",
    last_stage=({"fullest stage": 15}, "count from 0"),
    second_stage=({"fullest stage": 1}, "count from 0"),
    optimizer_state=({"largest category": "optimizer state"}, "GiB there"),
    no_category=({"largest category": "cache"}, "no category"),
    all_it_needs=(all_it_needs, "all it needs"),
    in_bytes=(
        lambda solution: solution | {"missing GiB": solution["missing GiB"] * 2**30},
        "in GiB",
    ),
    a_text=({"missing GiB": "a lot"}, "a number of GiB"),
    not_finite=({"missing GiB": math.nan}, "no finite number"),
    stage_not_finite=({"fullest stage": math.nan}, "no finite number"),
)


@known.right("explain_oom")
def capital_and_numpy(solution: dict[str, Any]) -> dict[str, Any]:
    return {
        "fullest stage": np.int64(0),
        "largest category": " Activations",
        "missing GiB": np.float32(solution["missing GiB"]),
    }


known.mistakes(
    "fix_by_one_change",
    nothing_changed=(replace(TO_FIX), "nothing changed"),
    two_changed=(replace(TO_FIX, sequence_parallel=True, recompute="full"), "Undo all but"),
    recomputes=(replace(TO_FIX, recompute="full"), "slower than another"),
    offloads=(replace(TO_FIX, offload="optimizer"), "neither arithmetic"),
    kept_whole=(replace(TO_FIX, zero_stage=1), "kept whole on every TP rank"),
    does_not_divide=(replace(TO_FIX, micro_batch=7), "does not divide"),
    adapters_alone=(replace(TO_FIX, lora=Lora()), "adapters alone"),
    other_books=(replace(TO_FIX, framework=LIGHT), "books"),
)


def bought(flop: float) -> tuple[float, float]:
    size = (flop / 120) ** 0.5
    return size, 20 * size


known.mistakes(
    "token_budget",
    no_return=(lambda usd, price, peak, mfu: None, "returns nothing"),
    not_finite=(lambda usd, price, peak, mfu: (math.nan, math.nan), "no finite number"),
    texts=(lambda usd, price, peak, mfu: ("7B", "140B"), "two numbers"),
    zeros=(lambda usd, price, peak, mfu: (0.0, 0.0), "sqrt(FLOP"),
    no_mfu=(lambda usd, price, peak, mfu: bought(usd / price * 3600 * peak), "where is the MFU"),
    hours_as_seconds=(
        lambda usd, price, peak, mfu: bought(usd / price * peak * mfu),
        "3600 seconds",
    ),
    forward_alone=(
        lambda usd, price, peak, mfu: bought(3 * usd / price * 3600 * peak * mfu),
        "6 in all",
    ),
    tokens_of_its_own=(
        lambda usd, price, peak, mfu: (bought(usd / price * 3600 * peak * mfu)[0], 3e11),
        "20 times the parameters",
    ),
    seven_fold=(
        lambda usd, price, peak, mfu: bought(7 * usd / price * 3600 * peak * mfu),
        "sqrt(FLOP",
    ),
)
known.rights(
    "token_budget", list_of_numpy=lambda solution, *asked: [np.float32(n) for n in solution(*asked)]
)


def billed(change: Callable[[int, float], Any]) -> Callable[..., Any]:
    """The solution, with its bill changed."""

    def cards(solution: dict[str, Any]) -> dict[str, Any]:
        return solution | {"bill": lambda *asked: change(*solution["bill"](*asked))}

    return cards


known.mistakes(
    "two_cards",
    no_bill=(billed(lambda gpus, usd: None), "two numbers"),
    ten_gpus=(billed(lambda gpus, usd: (10, 1e5)), "rounded up"),
    dollars_not_finite=(billed(lambda gpus, usd: (gpus, math.nan)), "no finite number"),
    texts=(billed(lambda gpus, usd: ("10", "1e5")), "two numbers"),
    no_function=({"bill": 3}, "a function"),
    half_a_card=(billed(lambda gpus, usd: (gpus - 1, 1e5)), "Half a card"),
    a_number=({"an A10 holds the states": 0}, "True or False"),
    another_card=({"choice": "H100"}, '"A100", "A10"'),
    it_holds=({"an A10 holds the states": True}, "on every card of 24"),
    a10=({"choice": "A10"}, "over PCIe"),
)


@known.right("two_cards")
def lower_case_and_numpy(solution: dict[str, Any]) -> dict[str, Any]:
    bill = lambda *asked: [np.float64(n) for n in solution["bill"](*asked)]  # noqa: E731
    return {"bill": bill, "an A10 holds the states": np.False_, "choice": "a100"}
