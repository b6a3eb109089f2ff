"""The working memory that PyTorch hands to cuBLAS, once for each thread that multiplies matrices.

Autograd's backward runs in a thread of its own, so that a training step takes two. They stay until
the process ends, and `torch.cuda.max_memory_allocated()` counts them: 64 MiB on an H200, read off its
allocator on 2026-11-26 for 86 programs.
"""

from __future__ import annotations

from typing import Any

import torch

from utils.shims.torch_ import inside_backward
from utils.units import MIB

aten = torch.ops.aten
_PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_int_mm", "_scaled_mm",
)  # fmt: skip
PRODUCTS = frozenset(
    getattr(packet, overload)
    for packet in (getattr(aten, name) for name in _PRODUCTS)
    for overload in packet.overloads()
)
# aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`: ":4096:2:16:8", and 32 MiB on
# Hopper and Blackwell; for AMD's gfx94 128 MiB.
SMALL_BYTES, LARGE_BYTES, AMD_BYTES = (2 * 4096 + 8 * 16) * 1024, 32 * MIB, 128 * MIB
LARGE_CAPABILITIES, AMD_CAPABILITY = (9, 10, 12), (9, 4)
# The same file, `getCUDABlasLtWorkspace`: products with a bias shared no workspace with the others.
LT_BYTES, LT_APART_UNTIL = MIB, (2, 11)


def workspace_bytes(capability: tuple[int, int]) -> int:
    """What a thread's products get on a GPU of this compute capability."""
    if capability == AMD_CAPABILITY:
        return AMD_BYTES
    return LARGE_BYTES if capability[0] in LARGE_CAPABILITIES else SMALL_BYTES


class Workspaces:
    """Which thread of a simulated process has its workspace.

    `taken` lists, in order, whether the thread is backward's, and its bytes; `turns` at which time
    a thread multiplied matrices after the other had.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self.taken: list[tuple[bool, int]] = []
        self.turns: list[tuple[bool, int]] = []
        self._bytes = workspace_bytes(capability)
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        self._lt_bytes = LT_BYTES if version <= LT_APART_UNTIL else 0
        self._served: set[tuple[Any, bool]] = set()

    def taken_by(self, func: Any, now_ns: int = 0) -> int:
        """Bytes that an operation takes for good; 0 for all but a thread's first product."""
        if func not in PRODUCTS:
            return 0
        thread = inside_backward()
        if not self.turns or self.turns[-1][0] is not thread:
            self.turns.append((thread, now_ns))
        taken = self._first("cublas", thread, self._bytes)
        if self._lt_bytes and func is aten.addmm.default:
            taken += self._first("cublasLt", thread, self._lt_bytes)
        if taken:
            self.taken.append((thread, taken))
        return taken

    def _first(self, library: str, thread: bool, size_bytes: int) -> int:
        if (library, thread) in self._served:
            return 0
        self._served.add((library, thread))
        return size_bytes
