"""What lab 06 tries answers on: a Llama's step, simulated, and a watch on the optimizer's steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from utils.catalog import model_shape
from utils.memory import Measurement

MODEL = "llama-3-8b"


def simulated_finetune(method: str, length: int, batch: int) -> Measurement:
    """A step of Llama-3-8B on a simulated RTX 4090; `length` and `batch` of its texts."""
    import transformers  # noqa: F401, before the simulation begins

    from utils.models import llama_config
    from utils.models.finetune import build_finetune, finetune_step
    from utils.simulation import extrapolate

    shape = model_shape(MODEL)

    def build(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        return build_finetune(llama_config(shape, num_hidden_layers=layers), method)

    step = partial(finetune_step, sequences=batch, length=length)
    return extrapolate(
        build,
        step,
        layers=shape.layers,
        device="RTX 4090",
        items=length * batch,
        unit="tokens",
        name=method,
    )


@contextlib.contextmanager
def stale_steps() -> Iterator[list[int]]:
    """Inside, any optimizer's steps with gradients that are not finite are noted, counted from 0.

    A step leaves infinity in the gradients that it used: whoever clears them never sees it.
    """
    found: list[int] = []
    steps = 0

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal steps
        if steps and not all(bool(gradient.isfinite().all()) for gradient in _gradients(optimizer)):
            found.append(steps)
        steps += 1

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for gradient in _gradients(optimizer):
            gradient.fill_(math.inf)

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in parameters if p.grad is not None]
