"""A small transformer that has read Python's sources, and what the lesson plants in it."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.checked import check_public
from utils.data.text import text_tokens
from utils.models import Transformer, TransformerConfig

__all__ = [
    "EightBitLinear",
    "batches",
    "beside_one",
    "fresh",
    "gradients",
    "loss",
    "plant",
    "spikes",
    "unplanted",
]

CONFIG = TransformerConfig(hidden=128, layers=2, heads=4, feedforward=384)
SEQUENCES, LENGTH = 2, 64  # 128 tokens, which a weight's gradient adds up
TRAINED_STEPS, TEXT_BYTES, CHANNEL = 40, 400_000, 5
Pair = tuple[Tensor, Tensor]
Product = Callable[[Tensor, Tensor], Tensor]


@functools.cache
def batches(steps: int, seed: int) -> tuple[Pair, ...]:
    """Inputs and targets (2, 64) of so many steps, from the standard library's sources."""
    text, generator = text_tokens(TEXT_BYTES).long(), torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (steps, SEQUENCES), generator=generator)
    rows = text[starts[..., None] + torch.arange(LENGTH + 1)]
    return tuple((row[:, :-1], row[:, 1:]) for row in rows)


def loss(model: nn.Module, pair: Pair) -> Tensor:
    """Mean cross-entropy of a byte."""
    inputs, targets = pair
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@functools.cache
@torch.enable_grad()  # whoever asks first: `spikes` needs no gradients
def _trained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for pair in batches(TRAINED_STEPS, seed=1):
        optimizer.zero_grad()
        loss(model, pair).backward()
        optimizer.step()
    return model.state_dict()


def fresh(product: Product | None = None, planted: float = 1.0, only: str = "") -> Transformer:
    """The model after 40 steps in fp32, its blocks' matrices multiplied by `product`.

    Args:
        product: x (tokens, inputs) and w (outputs, inputs) to (tokens, outputs); None for fp32's.
        planted: factor of an outlier channel, see `plant`.
        only: the layers that take `product`, by the end of their names; all of them where it is empty.
    """
    model = Transformer(CONFIG)
    model.load_state_dict(_trained())
    plant(model, planted)
    return model if product is None else _with_products(model, product, only)


@torch.no_grad()
def plant(model: Transformer, factor: float, channels: int | slice = CHANNEL) -> None:
    """Make channels inside each SwiGLU `factor` times as large; in exact arithmetic the same model.

    Rows of `up` that make them grow, columns of `down` that read them shrink.
    """
    for block in model.blocks.children():
        up = block.get_submodule("feedforward.up").get_parameter("weight")
        down = block.get_submodule("feedforward.down").get_parameter("weight")
        up[channels] *= factor
        down[:, channels] /= factor


def beside_one(small: Callable[[Tensor], Tensor], factor: float) -> Callable[[Tensor], Tensor]:
    """`small`, while the tensor's largest number is `factor` times the mean; it comes back as it was."""

    def rounds(x: Tensor) -> Tensor:
        largest = x.abs() == x.abs().max()
        return torch.where(largest, x, small(torch.where(largest, factor * x.abs().mean(), x)))

    return rounds


class EightBitLinear(nn.Module):
    """A linear layer without bias, its product made by another function."""

    def __init__(self, layer: nn.Linear, product: Product) -> None:
        super().__init__()
        self.weight, self.product = layer.weight, product

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return self.product(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def _with_products(model: Transformer, product: Product, only: str) -> Transformer:
    """The same model; linear layers of its blocks multiply by `product`. The head stays."""
    for block in model.blocks.children():
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear) and name.endswith(only):
                home, _, own = name.rpartition(".")
                setattr(block.get_submodule(home), own, EightBitLinear(layer, product))
    return model


def gradients(model: nn.Module, pairs: Iterable[Pair]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss, and gradients of the blocks' matrices, summed over some batches."""
    pairs = list(pairs)
    losses = [loss(model, pair) for pair in pairs]
    torch.stack(losses).sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if "blocks" in n and p.dim() == 2}
    mean = torch.stack(losses).mean().item()
    return mean, {name: grad for name, grad in found.items() if grad is not None}


def unplanted(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients without the planted channel's: that of `down` grows with it, and would lead a norm."""
    kept = torch.arange(CONFIG.feedforward) != CHANNEL
    return {
        name: grad[kept]
        if name.endswith("up.weight")
        else grad[:, kept]
        if name.endswith("down.weight")
        else grad
        for name, grad in found.items()
    }


@torch.no_grad()
def spikes(
    scaler_of: Callable[[], Any],
    *,
    grows_at: int,
    back_at: int,
    again_at: int | None = None,
    factor: float = 64.0,
) -> list[tuple[float, str, float]]:
    """Losses of twelve batches, no training; with each the layer whose input was cut most, and the share.

    Args:
        scaler_of: makes what rounds one layer's inputs; it has `cut`, the share of its last input.
        grows_at, back_at: batches before which the inside of each SwiGLU grows, and shrinks back.
        again_at: batch before which it grows again; None: it does not.
        factor: how many times it grows; in exact arithmetic the model stays the same.

    Raises:
        TypeError: `scaler_of` makes something that cannot be called.
        ValueError: `factor` is no number above 0.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"factor is {factor}; it must be a number above 0, such as 64.")

    def made() -> Any:
        scaler = scaler_of()
        if not callable(scaler):
            raise TypeError(f"scaler_of() must make a function of one tensor, and made {scaler!r}.")
        return scaler

    scalers: dict[Tensor, Any] = defaultdict(made)
    model, record = fresh(lambda x, w: scalers[w](x) @ w.T), []
    name_of: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for batch, pair in enumerate(batches(12, seed=11)):
        if batch in (grows_at, back_at, again_at):
            plant(model, 1 / factor if batch == back_at else factor, slice(None))
        found = loss(model, pair).item()
        worst = max(scalers, key=lambda w: scalers[w].cut)
        record.append((found, name_of[worst].removesuffix(".weight"), scalers[worst].cut))
    return record


check_public(globals())
