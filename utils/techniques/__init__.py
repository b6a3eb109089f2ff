"""Techniques that save memory or share work, one per file, as lessons and simulations use them.

Names are imported when they are first used: quantization brings a library that takes seconds.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "DataParallel": "data_parallel",
    "accumulated_backward": "data_parallel",
    "average_gradients": "data_parallel",
    "buckets_of": "data_parallel",
    "share_start": "data_parallel",
    "FlightRecorder": "flight_recorder",
    "NonFinite": "flight_recorder",
    "Shares": "flight_recorder",
    "StepRecord": "flight_recorder",
    "LoraLinear": "lora",
    "add_lora": "lora",
    "OffloadedOptimizer": "offload",
    "MixedStep": "precision",
    "computes": "precision",
    "low_precision": "precision",
    "tf32": "precision",
    "NF4Linear": "quantization",
    "quantize_linears": "quantization",
    "shard_batch": "sharding",
    "sharded_loader": "sharding",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'utils.techniques' has no name {name!r}")
    return getattr(importlib.import_module(f"utils.techniques.{_HOME[name]}"), name)
