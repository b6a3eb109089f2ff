"""Megatron-Core on a machine without a GPU: where it puts the buffers of its layers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from utils.shims.shim import Library, Shim

MEGATRON = Library("megatron-core", "0.16.1", "utils/shims/megatron.py")
_DEVICE = Shim(
    MEGATRON,
    "torch.cuda:current_device",
    "buffers_on_cpu",
    "its layers make the buffers of gathers and reduce-scatters there, with gloo as well",
    patched=True,
)
SHIMS = (_DEVICE,)


def buffers_on_cpu() -> AbstractContextManager[Any]:
    """Inside, Megatron-Core's parallel layers keep their buffers in the CPU's memory."""
    return _DEVICE.replaced(lambda: "cpu")
