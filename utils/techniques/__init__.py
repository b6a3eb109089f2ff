"""Techniques that save memory, one per file, in the form that lessons and simulations share.

Names are imported when they are first used: quantization brings a library that takes seconds.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "LoraLinear": "lora",
    "add_lora": "lora",
    "OffloadedOptimizer": "offload",
    "MixedStep": "precision",
    "computes": "precision",
    "low_precision": "precision",
    "tf32": "precision",
    "NF4Linear": "quantization",
    "quantize_linears": "quantization",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'utils.techniques' has no name {name!r}")
    return getattr(importlib.import_module(f"utils.techniques.{_HOME[name]}"), name)
