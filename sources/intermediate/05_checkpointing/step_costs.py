"""What a step of a model costs beside its peak: products computed, and bytes kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from utils.checked import check_public
from utils.memory import Measurement, measure

__all__ = ["StepCost", "step_cost"]

# A fused attention's backward computes two and a half forwards (Dao 2023, arXiv:2307.08691).
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class StepCost:
    """A metered step, the operations of its products, and the bytes that wait for backward."""

    run: Measurement
    product_flops: float
    kept_bytes: int


def step_cost(
    model: nn.Module, loss_of: Callable[[], Tensor], *, attention_flops: float, name: str = ""
) -> StepCost:
    """Cost of `loss_of().backward()`, also of a compiled one, which runs once before.

    Args:
        model: whose parameters are not counted as kept.
        loss_of: makes the loss.
        attention_flops: of one forward of one fused attention, which the profiler does not count.
        name: of the measurement.

    Raises:
        ValueError: what comes is no loss.
    """

    def step() -> None:
        model.zero_grad()
        loss = loss_of()
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ValueError(f"loss_of gives {type(loss).__name__}; it must return the loss.")
        loss.backward()

    step()
    run = measure(step, model=model, name=name, timed_steps=0)
    return StepCost(run, _product_flops(step, attention_flops), kept_bytes(model, loss_of))


def _product_flops(step: Callable[[], Any], attention_flops: float) -> float:
    """Of matrix products, and of attention where it runs as one kernel."""
    with torch.profiler.profile(with_flops=True) as profile:
        step()
    events = profile.key_averages()
    products = sum(event.flops for event in events if event.key.endswith("mm"))
    calls = {e.key: e.count for e in events if e.key.startswith("aten::_scaled_dot")}
    forwards = sum(ATTENTION_BACKWARD * n if "backward" in k else n for k, n in calls.items())
    return products + forwards * attention_flops


def kept_bytes(model: nn.Module, loss_of: Callable[[], Tensor]) -> int:
    """Bytes of all that autograd saves for backward but parameters, each storage once."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        kept[saved.data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        loss_of().backward()
    return sum(size for address, size in kept.items() if address not in own)


check_public(globals())
