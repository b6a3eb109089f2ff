"""Low-rank adapters on a frozen model: Hu et al. 2021, arXiv:2106.09685, section 4.1."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from utils.techniques.quantization import NF4Linear
from utils.techniques.replace import replace_linears


class LoraLinear(nn.Module):
    """A frozen linear layer W with a trained update: W x + (alpha / rank) B A x."""

    def __init__(
        self,
        base: nn.Linear | NF4Linear,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Wrap a layer; B starts at zero, so the layer computes what it did.

        Args:
            base: the layer; it is frozen.
            rank: the update's rank r: r * (inputs + outputs) trained parameters.
            alpha: the update is multiplied by alpha / rank.
            dropout: share of the update's inputs that is dropped in training.
            dtype: of the adapters; fp32 if None.

        Raises:
            ValueError: the rank is below 1.
        """
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank is {rank}; an update needs rank 1 or more.")
        self.base = base.requires_grad_(False)
        dtype = dtype or torch.float32
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), in the dtype of the frozen layer's result."""
        out = self.base(x)
        update = self.up(self.down(self.dropout(x.to(self.down.weight.dtype))))
        return out + (update * self.scale).to(out.dtype)


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Iterable[str] = ("query", "value"),
    dropout: float = 0.0,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Freeze a model and put adapters on the layers whose names are `targets`, in place.

    Raises:
        ValueError: the model has no linear layer of that name; the sentence lists the names.
    """
    chosen = set(targets)
    model.requires_grad_(False)
    return replace_linears(
        model,
        lambda path: path.rpartition(".")[2] in chosen,
        lambda layer: LoraLinear(layer, rank, alpha, dropout, dtype),
        (nn.Linear, NF4Linear),
    )
