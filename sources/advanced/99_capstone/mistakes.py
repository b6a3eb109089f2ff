"""Answers to the cases of lab 99 that are known, each wrong one with words of its verdict.

A case is drawn by a seed, which stands in the solution: what follows from the data is made from there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from utils import Lora, Plan, cost
from utils.labs.mistakes import KnownAnswers

from .cases import CASES

Answer = dict[str, Any]
known = KnownAnswers()


def changed(**parts: Callable[[Any], Any]) -> Callable[[Answer], Answer]:
    """The solution with parts made from their right values; "_" stands for a space."""

    def made(solution: Answer) -> Answer:
        return solution | {
            name: make(solution[name])
            for name, make in ((part.replace("_", " "), make) for part, make in parts.items())
        }

    return made


def given(name: str, part: str, of: Callable[[Any], Any]) -> Callable[[Answer], Answer]:
    """The solution of a case with a part made from the case's data."""
    return lambda solution: solution | {part: of(CASES[name].data(solution["seed"]))}


def without_context(log: Any) -> int:
    """As if all of the card were PyTorch's."""
    peaks = log.peak_gib
    each = (peaks[6] - peaks[4]) / 2
    return math.floor((log.card_gib - peaks[4]) / each) + 4


def of_most_lines(log: Any) -> int:
    return Counter(line.node for line in log.lines).most_common(1)[0][0]


def by_the_middle(solution: Answer) -> Answer:
    """The A100's fewest nodes by the predicted days, not by the slow side of their interval."""
    case = CASES["two_offers"].data(solution["seed"])
    for nodes in (1, 2, 4, 8, 16, 32):
        found = case.estimate("A100", nodes)
        bill = cost(found, case.tokens)
        if found.fits and not found.tight and bill.days <= case.days:
            return solution | {"A100": {"nodes": nodes, "usd": bill.usd}}
    return solution


def swapped(solution: Answer) -> Answer:
    return solution | {"A": solution["B"], "B": solution["A"]}


def twice_the_fp32_batch(solution: Answer) -> Answer:
    return solution | {"amp batch": 2 * solution["fp32 batch"]}


FULL_ADAPTERS = Plan(lora=Lora(rank=16, base="nf4-dq"), recompute="full", micro_batch=1)
OFFLOADED = Plan(dp=32, zero_stage=3, recompute="full", offload="optimizer")
LATE_STOP = [
    "load the newest checkpoint that verifies",
    "stop every rank",
    "take the node out",
    "put the spare in",
    "compare the loss with the log",
]
FOUR_STEPS = [
    {"offload": "optimizer"},
    {"recompute": "full"},
    {"micro_batch": 1},
    {"loss": "chunked"},
]

known.mistakes(
    "components",
    two_phases=(
        given("components", "fixed GiB", lambda log: 2 * log.peak_gib[1] - log.peak_gib[2]),
        "Which rows lie on one",
    ),
    context_left_out=(
        given("components", "largest batch", without_context),
        "also holds CUDA's context",
    ),
    states_for_activations=({"activations": "8-bit optimizer"}, "computes them again"),
)
known.mistakes(
    "sixteen_gb",
    twice_the_batch=(twice_the_fp32_batch, "The states do not"),
    states_shrink=({"what shrinks": "optimizer state"}, "stay in fp32 under autocast"),
)
known.mistakes(
    "nan_run",
    endless_scale=({"cause": "scale grows without end"}, "A scaler halves after each overflow"),
    smaller_scale=({"cure": "smaller first scale"}, "on what follows from it"),
)
known.mistakes(
    "four_ranks",
    speedup=(changed(efficiency=lambda right: 4 * right), "That is the speedup"),
    little_work=({"cause": "too little work"}, "the cause"),
)
known.mistakes(
    "seven_billion",
    stage_2=(
        {"full": Plan(framework="deepspeed", zero_stage=2)},
        "Over one rank a part is the whole",
    ),
    offloaded=(
        {"adapters": replace(FULL_ADAPTERS, offload="optimizer")},
        "How many bytes of state do the adapters have",
    ),
)
known.mistakes(
    "zero_or_fsdp",
    the_other_way_round=(swapped, "Which of the two is made for that"),
    stage_3=(
        changed(A=lambda plan: replace(plan, zero_stage=3, micro_batch=1)),
        "Stage 3 gathers every parameter",
    ),
)
known.mistakes(
    "order_of_cures",
    needless_step=({"steps": FOUR_STEPS}, "a step is needless"),
    another_category=(
        {"steps": [{"offload": "optimizer"}]},
        "A cure for another one moves nothing",
    ),
)
known.mistakes(
    "unknown_job",
    optimizer=({"cause": "optimizer step"}, "are they what fills it"),
    all_of_it=(
        given("unknown_job", "beyond alive MiB", lambda record: record.allocator_mib),
        "How much of it is not alive",
    ),
)
known.mistakes(
    "eight_nodes",
    backwards=(
        changed(order=lambda right: right[::-1]),
        "What another fault hides saves nothing yet",
    ),
    one_nodes_work=(
        changed(times_one_node=lambda right: right / 8),
        "eight nodes do eight times the work",
    ),
)
known.mistakes(
    "one_billion",
    tp=(
        {"plan": Plan(dp=8, tp=8, sequence_parallel=True, framework="fsdp")},
        "what does TP buy here",
    ),
    weights_alone=(changed(states_GB=lambda right: right / 8), "weights in bf16 alone"),
)
known.mistakes(
    "lay_out",
    too_many=({"plan": Plan(tp=8, pp=8, dp=8, zero_stage=1)}, "there are 64"),
    no_interval=({"days": (200.0, 200.0)}, "One number says nothing"),
)
known.mistakes(
    "half_the_cards",
    no_memory=({"plan": Plan(tp=8, pp=4, sequence_parallel=True)}, "Where else is memory"),
    stage_3=({"plan": OFFLOADED}, "more bytes than stages send"),
)
known.mistakes(
    "survive",
    every_line=(
        given("survive", "failures", lambda log: len(log.lines)),
        "is an echo, not a failure",
    ),
    most_lines=(
        given("survive", "node to repair", of_most_lines),
        "How many of them are echoes",
    ),
    late_stop=({"order": LATE_STOP}, "What comes first"),
    no_spread=({"per 1,000 node-days": (10.0, 10.0)}, "How far off may their rate be"),
)
known.mistakes(
    "two_offers",
    by_the_middle=(by_the_middle, "slow side"),
    splits_nothing=({"A10 plain": {"nodes": 8, "usd": 100_000}}, "splits none of them"),
    no_run=({"choice": "A10 plain"}, "no price of a run"),
)
