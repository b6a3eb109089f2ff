"""What fp8 keeps and sends in place of 16 bits: copies of matrices, and kept inputs.

Transformer Engine keeps a matrix twice from the first micro-batch of a step on: for forward products
and, transposed, for backward ones. MXFP8 has a one-byte scale for each 32 elements.
"""

from __future__ import annotations

from utils.planner.layout import Plan

SCALES = 1 + 1 / 32  # of MXFP8
# Bytes per parameter of a block's matrices, both copies; and a kept input beside 16 bits.
FP8_COPIES = {"bf16": 0.0, "fp8": 2.0, "mxfp8": 2.0 * SCALES}
FP8_SHARE = {"fp8": 0.5, "mxfp8": 0.5 * SCALES}


def kept_in_fp8(plan: Plan) -> bool:
    """Whether blocks have no 16-bit parameters; Megatron-LM wants its distributed optimizer for it."""
    return plan.precision != "bf16" and plan.conventions.fp8_parameters and plan.zero_stage > 0


def quantized_bytes(plan: Plan, block_parameters: float) -> float:
    """What fp8 adds to the lasting bytes of a rank's blocks.

    Where the framework keeps parameters in fp8, the copies take the place of the 16-bit ones. ZeRO-3
    shards one copy, and makes both of what it has gathered, see `PlanContext.gathered_held`.
    """
    if plan.precision == "bf16":
        return 0.0
    shared = plan.zero_stage == 3
    copies = FP8_COPIES[plan.precision] * (0.5 if shared else 1.0)
    if not kept_in_fp8(plan):
        return 0.0 if shared else copies * block_parameters
    each = copies - plan.conventions.parameter_bytes
    return each * block_parameters / (plan.shard_group if shared else 1)
