"""A small transformer that has read Python's sources, and what the lesson plants in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.checked import check_public
from utils.data.text import text_tokens
from utils.models import Transformer, TransformerConfig

__all__ = ["EightBitLinear", "batches", "fresh", "gradients", "loss", "plant", "with_products"]

CONFIG = TransformerConfig(hidden=128, layers=2, heads=4, feedforward=384)
SEQUENCES, LENGTH = 2, 64  # 128 tokens: one block of them in a weight's gradient
TRAINED_STEPS, TEXT_BYTES, CHANNEL = 150, 400_000, 5
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
def _trained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for pair in batches(TRAINED_STEPS, seed=1):
        optimizer.zero_grad()
        loss(model, pair).backward()
        optimizer.step()
    return model.state_dict()


def fresh(product: Product | None = None, planted: float = 1.0) -> Transformer:
    """The model after 150 steps in fp32, its blocks' matrices multiplied by `product`.

    Args:
        product: x (tokens, inputs) and w (outputs, inputs) to (tokens, outputs); None for fp32's.
        planted: factor of an outlier channel, see `plant`.
    """
    model = Transformer(CONFIG)
    model.load_state_dict(_trained())
    plant(model, planted)
    return model if product is None else with_products(model, product)


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


class EightBitLinear(nn.Module):
    """A linear layer without bias, its product made by another function."""

    def __init__(self, layer: nn.Linear, product: Product) -> None:
        super().__init__()
        self.weight, self.product = layer.weight, product

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return self.product(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def with_products(model: Transformer, product: Product) -> Transformer:
    """The same model; each linear layer of its blocks multiplies by `product`. The head stays."""
    for block in model.blocks.children():
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear):
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


check_public(globals())
