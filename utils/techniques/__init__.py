"""Techniques that save memory, one per file, in the form that lessons and simulations share."""

from utils.techniques.block_choice import (
    BlockCost,
    activation_peak,
    best_blocks,
    block_costs,
    recompute_flops,
)
from utils.techniques.checkpointing import (
    ATTENTION,
    EXPENSIVE,
    MATMULS,
    FrozenStatistics,
    blocks_of,
    checkpoint_blocks,
    in_segments,
)
from utils.techniques.lora import LoraLinear, add_lora
from utils.techniques.quantization import NF4Linear, quantize_linears
from utils.techniques.repeatable import NotRepeatableError, check_repeatable, recompute_explained

__all__ = [
    "ATTENTION", "EXPENSIVE", "MATMULS", "BlockCost", "FrozenStatistics", "LoraLinear", "NF4Linear",
    "NotRepeatableError", "activation_peak", "add_lora", "best_blocks", "block_costs", "blocks_of",
    "check_repeatable", "checkpoint_blocks", "in_segments", "quantize_linears", "recompute_explained",
    "recompute_flops",
]  # fmt: skip
