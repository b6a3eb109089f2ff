"""Low-rank adapters on a frozen model: Hu et al. 2021, arXiv:2106.09685, section 4.1."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from utils.techniques.quantization import NF4Linear
from utils.techniques.replace import replace_linears

HIGHEST_RANK = 2**14  # as wide as the widest published model


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
            ValueError: the rank is below 1 or too high, or a share that is none.
        """
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank is {rank}; an update needs rank 1 or more.")
        if rank > HIGHEST_RANK:
            raise ValueError(f"rank is {rank:,}; it can be {HIGHEST_RANK:,} at most.")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}; write a share from 0 to below 1.")
        self.base = base.requires_grad_(False)
        dtype = dtype or torch.float32
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.is_merged = False

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), in the dtype of the frozen layer's result."""
        out = self.base(x)
        if self.is_merged:
            return out
        update = self.up(self.down(self.dropout(x.to(self.down.weight.dtype))))
        return out + (update * self.scale).to(out.dtype)

    @torch.no_grad()
    def update(self) -> Tensor:
        """(alpha / rank) B A, of the shape of the frozen weight, in the adapters' dtype."""
        return self.scale * (self.up.weight @ self.down.weight)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the update to the frozen weight, in place: the layer then costs what it did before.

        Raises:
            ValueError: it is merged already, or the frozen weight is packed in four bits.
        """
        self._shift(self.is_merged, "merged already", +1)
        self.is_merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take the update off again. What a 16-bit weight lost to rounding does not come back.

        Raises:
            ValueError: it is not merged.
        """
        self._shift(not self.is_merged, "not merged", -1)
        self.is_merged = False

    def _shift(self, refused: bool, state: str, sign: int) -> None:
        if refused:
            raise ValueError(f"This layer is {state}.")
        if isinstance(self.base, NF4Linear):
            raise ValueError(
                "A weight in four bits cannot take an update in place: it would be rounded to "
                "sixteen values again. merge_lora() unpacks it to 16 bits first."
            )
        self.base.weight += sign * self.update().to(self.base.weight.dtype)

    @torch.no_grad()
    def merged_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A plain linear layer with W + (alpha / rank) B A; a packed W is unpacked for it.

        Args:
            dtype: of the new weight; that of the base, or of its computation if it is packed.
        """
        base = self.base
        packed = isinstance(base, NF4Linear)
        dtype = dtype or (base.compute_dtype if packed else base.weight.dtype)
        weight = base.unpacked(torch.float32) if packed else base.weight.float()
        if not self.is_merged:
            weight = weight + self.update().float()
        out, inputs = weight.shape
        linear = nn.Linear(inputs, out, base.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        if base.bias is not None:
            linear.bias = nn.Parameter(base.bias.detach().to(dtype), requires_grad=False)
        return linear


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


def merge_lora(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace every adapted layer by a plain one with the sum, in place, one layer at a time.

    Args:
        model: as `add_lora` left it.
        dtype: as `LoraLinear.merged_linear` takes it.

    Raises:
        ValueError: the model has no adapters.
    """
    paths = [path for path, part in model.named_modules() if isinstance(part, LoraLinear)]
    if not paths:
        raise ValueError("The model has no adapters to merge; add_lora() puts them in.")
    for path in paths:  # names, not layers: a list of these would keep every old weight to the end
        owner, _, name = path.rpartition(".")
        merged = cast("LoraLinear", model.get_submodule(path)).merged_linear(dtype)
        setattr(model.get_submodule(owner), name, merged)
    return model
