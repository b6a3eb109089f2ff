"""What a measurement asks of its device beside events: to be done, its name, its allocator's figures."""

from __future__ import annotations

import ctypes
import platform

import psutil
import torch


def give_back_free_memory() -> None:
    """Let a C library that can do so (glibc) return freed memory to the system.

    Else a notebook that measures many models keeps the sum of their fragments.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocator_bytes(device: torch.device) -> dict[str, int]:
    """What the allocator itself says since its last reset, in bytes by name; of a CPU what is resident."""
    if device.type != "cuda":
        return {"process resident": psutil.Process().memory_info().rss}
    stats = torch.cuda.memory_stats(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return {
        "requested peak": stats["requested_bytes.all.peak"],
        "allocated peak": torch.cuda.max_memory_allocated(device),
        "reserved peak": torch.cuda.max_memory_reserved(device),
        "used on the device": total_bytes - free_bytes,
    }


def device_name(device: torch.device) -> str:
    """The GPU as its driver calls it, or the CPU with its architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()})"
