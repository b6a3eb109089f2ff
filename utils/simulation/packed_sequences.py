"""Packed sequences: what PyTorch does in C++ by reading their lengths, with lengths that are known.

After aten/src/ATen/native/PackedSequence.cpp, which reads the memory of `batch_sizes`, and tensors
without data have none. Numbers of the program's own are known beside them (`known_values.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch

from utils.shims.torch_dispatch import kernels_replaced

Tensor = torch.Tensor


def packed_sequences() -> AbstractContextManager[None]:
    """Inside, sequences of known lengths are unpacked, and their gradients too."""
    names = {"_pad_packed_sequence": _padded, "_pack_padded_sequence_backward": _gradient}
    return kernels_replaced({(f"aten::{n}", "AutogradCPU"): f for n, f in names.items()})


def _padded(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: Any, total: int
) -> tuple[Tensor, Tensor]:
    """`_pad_packed_sequence`: rows with padding, and each sequence's length."""
    sizes: list[int] = batch_sizes.tolist()
    steps = max(total, len(sizes))
    out, step, row = data.new_full((steps, sizes[0], *data.shape[1:]), value), 0, 0
    for size, alike in groupby(sizes):  # steps in which as many sequences go on
        count = len(list(alike))
        rows = data[row : row + count * size].view(count, size, *data.shape[1:])
        out[step : step + count, :size].copy_(rows)
        step, row = step + count, row + count * size
    lengths = torch.tensor([sum(size > i for size in sizes) for i in range(sizes[0])])
    return (out.transpose(0, 1) if batch_first else out), lengths


def _gradient(gradient: Tensor, shape: list[int], batch_sizes: Tensor, batch_first: bool) -> Tensor:
    """`_pack_padded_sequence_backward`: the rows' gradients where they came from, zeros elsewhere."""
    if not batch_first:
        return gradient.new_zeros(shape)
    batch, steps, *rest = shape
    return gradient.new_zeros((steps, batch, *rest)).transpose(0, 1)
