"""Published figures of mixtures of experts that the planner's tables do not hold, each with its source."""

from __future__ import annotations

from typing import NamedTuple

from utils.planner import Plan

# Parameters in units of 1e9, held and used for a token, as their authors print them.
PARAMETERS = {
    "Mixtral-8x7B": (47.0, 13.0, "arXiv:2401.04088, abstract"),
    "Qwen3-30B-A3B": (30.5, 3.3, "model card of Qwen/Qwen3-30B-A3B"),
    "DeepSeek-V3": (671.0, 37.0, "arXiv:2412.19437, abstract"),
}


class Row(NamedTuple):
    """A measured layout of Qwen3-235B-A22B: 256 H100 in nodes of 8, a port of 50 GB/s a GPU, bf16.

    Attributes:
        name: what is special about it.
        seconds: of a step of 2,048 sequences of 4,096 tokens.
        plan: the layout; selective recomputation, where the row has some, is left out.
    """

    name: str
    seconds: float
    plan: Plan


_SPLIT = {"expert_tp": 1, "sequence_parallel": True, "zero_stage": 1, "partition": "ends"}
# Source: yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3/readme.md at c1ad0b5.
QWEN3_235B = (
    Row(
        "EP 32 over 4 nodes, DeepEP",
        19.7,
        Plan(dp=16, tp=2, pp=8, ep=32, virtual_stages=4, **_SPLIT),
    ),
    Row(
        "EP 8 in a node, TP 2, PP 32",
        24.2,
        Plan(dp=4, tp=2, pp=32, ep=8, virtual_stages=3, **_SPLIT),
    ),
    Row(
        "EP 8 in a node, TP 4, PP 8", 29.0, Plan(dp=8, tp=4, pp=8, ep=8, virtual_stages=4, **_SPLIT)
    ),
)
OVERLAPPED_SECONDS = 17.6  # the first layout, its exchanges beside another micro-batch's products
