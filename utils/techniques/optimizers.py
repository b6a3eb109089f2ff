"""AdamW with states of eight bits, and how many bytes an optimizer keeps.

Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861: each moment
takes one byte a parameter and one fp32 scale for every 256 of them. The moments are unpacked to
fp32 for the step and packed again; the parameters themselves are not quantized.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from utils.rules import positive
from utils.techniques.bitsandbytes_import import bitsandbytes_library

BLOCK = 256  # values of a moment that share a scale
SMALLEST = 4096  # elements; the moments of smaller tensors stay in fp32 (bitsandbytes' default)
TABLE_BYTES = 2 * 256 * 4  # the values of the signed and the unsigned eight-bit type, once


def adamw_8bit(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    paged: bool = False,
) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW with moments in eight bits.

    Args:
        parameters: those to train.
        lr: learning rate.
        weight_decay: as in AdamW.
        paged: the moments lie in unified memory, which the driver moves to the CPU when the GPU is
            full (QLoRA, section 3, "Paged Optimizers").

    Raises:
        ValueError: nothing to train, a negative rate or decay, or paged moments for parameters that are not on a CUDA device.
        ModuleNotFoundError: bitsandbytes is not installed.
    """
    positive("adamw_8bit", least=0, lr=lr, weight_decay=weight_decay)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ValueError("No parameter requires a gradient, so there is nothing to optimize.")
    if paged and any(parameter.device.type != "cuda" for parameter in trained):
        raise ValueError(
            "Paged moments lie in CUDA's unified memory, and these parameters are on "
            f"{trained[0].device.type!r}. Leave out paged=True: without a GPU there is no page to move."
        )
    offered = bitsandbytes_library().optim
    kind = offered.PagedAdamW8bit if paged else offered.AdamW8bit
    return kind(trained, lr=lr, weight_decay=weight_decay)


def adam_state_bytes(sizes: Iterable[int], bits: int = 32) -> int:
    """Bytes of Adam's two moments, by formula; step counters left out.

    Args:
        sizes: number of elements of each trained tensor.
        bits: 32, or 8 for `adamw_8bit`, whose two tables of values count once.

    Raises:
        ValueError: another number of bits.
    """
    if bits == 32:
        return sum(8 * size for size in sizes)
    if bits != 8:
        raise ValueError(f"bits is {bits}; moments have 32 or 8.")
    sizes = list(sizes)
    table = TABLE_BYTES if any(size >= SMALLEST for size in sizes) else 0
    return table + sum(map(_moments_in_8_bits, sizes))


def _moments_in_8_bits(size: int) -> int:
    return 8 * size if size < SMALLEST else 2 * (size + 4 * -(-size // BLOCK))


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that an optimizer keeps, each storage once, scalars (steps) left out."""
    kept = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    }
    return sum(kept.values())
