"""Techniques that save memory or share work, one per file, as lessons and simulations use them.

Names are imported when they are first used: quantization brings a library that takes seconds.
"""

from __future__ import annotations

import importlib
from typing import Any

from utils.checked import checked

_HOME = {
    "ATTENTION": "checkpointing",
    "EXPENSIVE": "checkpointing",
    "FrozenStatistics": "checkpointing",
    "MATMULS": "checkpointing",
    "blocks_of": "checkpointing",
    "checkpoint_blocks": "checkpointing",
    "in_segments": "checkpointing",
    "NumericsRecorder": "numerics_recorder",
    "NonFinite": "numerics_recorder",
    "Shares": "numerics_recorder",
    "StepRecord": "numerics_recorder",
    "has_bitsandbytes": "bitsandbytes_import",
    "LoraLinear": "lora",
    "add_lora": "lora",
    "merge_lora": "lora",
    "DoubleQuantized": "nf4",
    "dequantize_nf4": "nf4",
    "nf4_levels": "nf4",
    "quantize_nf4": "nf4",
    "measure_disk": "offload_capacity",
    "op_problem": "deepspeed_ops",
    "adam_state_bytes": "optimizers",
    "adamw_8bit": "optimizers",
    "optimizer_bytes": "optimizers",
    "MixedStep": "precision",
    "has_native_dtype": "precision",
    "choose_autocast_dtype": "precision",
    "tf32": "precision",
    "NF4Linear": "quantization",
    "quantize_linears": "quantization",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"utils.techniques has no name {name!r}; it offers: {sorted(_HOME)}")
    found = getattr(importlib.import_module(f"utils.techniques.{_HOME[name]}"), name)
    return checked(found, __name__)
