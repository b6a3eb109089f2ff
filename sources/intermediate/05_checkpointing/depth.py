"""Operations of a deep model's step, from those of two shallow ones."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["operations_of"]


def operations_of(
    model_of: Callable[[int], nn.Module], loss_of: Callable[[nn.Module], Tensor], layers: int
) -> int:
    """Operations of the matrix products of forward and backward, counted without data.

    They are a straight line in depth where layers are alike, and every second one may differ from
    the next: so two and four layers say it all.

    Args:
        model_of: builds the model with so many layers.
        loss_of: makes its loss.
        layers: how many the real model has.

    Raises:
        ValueError: `layers` is no even number from 2 on.
    """
    if layers < 2 or layers % 2:
        raise ValueError(f"layers is {layers}; give an even number, 2 or more.")
    two, four = (_counted(model_of, loss_of, depth) for depth in (2, 4))
    return two + (layers - 2) // 2 * (four - two)


def _counted(
    model_of: Callable[[int], nn.Module], loss_of: Callable[[nn.Module], Tensor], layers: int
) -> int:
    # Apart from the simulated peak: a counter keeps tensors alive that checkpointing drops.
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        loss_of(model_of(layers)).backward()
    return int(counter.get_total_flops())
