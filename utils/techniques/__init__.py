"""Techniques that save memory, one per file, in the form that lessons and simulations share.

Names are imported when they are first used: quantization brings a library that takes seconds.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "BlockCost": "block_choice",
    "activation_peak": "block_choice",
    "best_blocks": "block_choice",
    "block_costs": "block_choice",
    "recompute_flops": "block_choice",
    "ATTENTION": "checkpointing",
    "EXPENSIVE": "checkpointing",
    "FrozenStatistics": "checkpointing",
    "MATMULS": "checkpointing",
    "blocks_of": "checkpointing",
    "checkpoint_blocks": "checkpointing",
    "in_segments": "checkpointing",
    "FlightRecorder": "flight_recorder",
    "NonFinite": "flight_recorder",
    "Shares": "flight_recorder",
    "StepRecord": "flight_recorder",
    "LoraLinear": "lora",
    "add_lora": "lora",
    "MixedStep": "precision",
    "computes": "precision",
    "low_precision": "precision",
    "tf32": "precision",
    "NF4Linear": "quantization",
    "quantize_linears": "quantization",
    "NotRepeatableError": "repeatable",
    "check_repeatable": "repeatable",
    "recompute_explained": "repeatable",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'utils.techniques' has no name {name!r}")
    return getattr(importlib.import_module(f"utils.techniques.{_HOME[name]}"), name)
