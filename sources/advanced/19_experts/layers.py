"""Modules around the functions that lesson 19 writes: they hold parameters, and call what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from utils.models.transformer import FeedForward, Transformer, TransformerConfig

from .exchange import held_experts

# (x, router, w_in, w_out, k) -> y, of x's shape (T, H).
Compute = Callable[..., Tensor]


class Experts(nn.Module):
    """Experts of one layer, those that this rank holds: `w_in` (E, H, 2 F), `w_out` (E, F, H).

    Attributes:
        first: the number of the first of them, among all of the layer.
    """

    def __init__(self, hidden: int, width: int, count: int, compute: Compute) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(count, hidden, 2 * width) * hidden**-0.5)
        self.w_out = nn.Parameter(torch.randn(count, width, hidden) * width**-0.5)
        self.compute, self.first = compute, 0

    def forward(self, x: Tensor, router: Tensor, k: int, **options: Any) -> Tensor:
        """(T, H) -> (T, H)."""
        return self.compute(x, router, self.w_in, self.w_out, k, **options)


class Mixture(nn.Module):
    """A feed-forward layer of experts, computed by the learner's function.

    Args:
        hidden: channels, H.
        width: of one expert, F.
        experts: how many, E.
        k: those that a token uses.
        compute: `mixture(x, router, w_in, w_out, k)`.
        shared: width of an expert that every token uses; 0 for none.
    """

    def __init__(
        self, hidden: int, width: int, experts: int, k: int, compute: Compute, shared: int = 0
    ) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Parameter(torch.randn(hidden, experts) * hidden**-0.5)
        self.experts = Experts(hidden, width, experts, compute)
        self.shared = dense(hidden, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        y = self._routed(x.flatten(0, -2)).view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def _routed(self, rows: Tensor) -> Tensor:
        return self.experts(rows, self.router, self.k)


class Biased(Mixture):
    """A mixture whose `compute` takes `bias`, added to probabilities for the choice alone: a buffer."""

    bias: Tensor

    def __init__(
        self, hidden: int, width: int, experts: int, k: int, compute: Compute, shared: int = 0
    ) -> None:
        super().__init__(hidden, width, experts, k, compute, shared)
        self.register_buffer("bias", torch.zeros(experts))

    def _routed(self, rows: Tensor) -> Tensor:
        return self.experts(rows, self.router, self.k, bias=self.bias)


def dense(hidden: int, width: int) -> FeedForward:
    """A dense feed-forward layer."""
    return FeedForward(TransformerConfig(hidden=hidden, heads=1, feedforward=width))


def small_model(
    compute: Compute, k: int = 2, hidden: int = 32, layer: type[Mixture] = Mixture
) -> Any:
    """Two blocks in fp64, each a `layer` with 8 experts and a shared one; the same on every rank."""
    torch.manual_seed(0)
    shape = TransformerConfig(vocabulary=64, hidden=hidden, layers=2, heads=4, feedforward=96)
    model: Any = Transformer(shape)
    model.init_weights(std=0.1)
    for block in model.blocks:
        block.feedforward = layer(hidden, 48, 8, k, compute, shared=16)
    return model.double()


def keep_my_experts(model: Any, place: int, places: int, compute: Compute) -> None:
    """Leave this rank its share of every layer's experts, the `place`-th of `places`, and their exchange.

    Raises:
        RoutingError: experts do not divide evenly over the places.
    """
    for block in model.blocks:
        experts = block.feedforward.experts
        experts.first = place * held_experts(len(experts.w_in), places)
        for name, whole in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(whole.detach().chunk(places)[place].clone()))
        experts.compute = compute


def experts_held(model: nn.Module) -> int:
    """Numbers in the experts' matrices that this rank keeps."""
    held = (p for name, p in model.named_parameters() if ".experts." in name)
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in held)
