"""All linear layers of a transformer in few bits, block after block, as GPTQ and AWQ go through a model.

The weights of a block are rounded with the inputs that the blocks before it give *after* they were
rounded, so that each layer is fitted to what it will really read (Frantar et al. 2022, section 4). The
arithmetic goes on in the model's own type, with the rounded values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from utils.checked import check_public

from .rounding import InFewBits, output_error, second_moments

__all__ = ["Inputs", "inputs_of", "linears_of", "quantize_weights"]


@dataclass
class Inputs:
    """What is known of a layer's inputs.

    Attributes:
        moments: sum of x x^T, fp32 (inputs, inputs).
        absolute: sum of |x|, fp32 (inputs,).
        largest: the largest |x| of each input, fp32 (inputs,).
        rows: how many x there were.
    """

    moments: Tensor
    absolute: Tensor
    largest: Tensor
    rows: int = 0

    @classmethod
    def none_yet(cls, inputs: int) -> Inputs:
        """Before the first row."""
        return cls(torch.zeros(inputs, inputs), torch.zeros(inputs), torch.zeros(inputs))

    @property
    def magnitudes(self) -> Tensor:
        """The mean of |x| of each input: fp32 (inputs,)."""
        return self.absolute / self.rows

    def add(self, x: Tensor) -> None:
        """Take in rows (..., inputs). Raises ValueError if there is none, or one is not finite."""
        self.moments += second_moments(x)
        magnitudes = x.detach().float().abs().flatten(0, -2)
        self.absolute += magnitudes.sum(dim=0)
        self.largest = torch.maximum(self.largest, magnitudes.amax(dim=0))
        self.rows += x.numel() // x.shape[-1]


Method = Callable[[Tensor, Inputs], InFewBits]


@dataclass(frozen=True)
class LayerRow:
    """One layer, rounded.

    Attributes:
        layer: its path in the model.
        made: its weight in few bits.
        relative_error: of its output on the calibration text.
    """

    layer: str
    made: InFewBits
    relative_error: float


@torch.no_grad()
def quantize_weights(
    model: nn.Module, tokens: Tensor, method: Method | Mapping[str, Method]
) -> list[LayerRow]:
    """Round all linear layers in the blocks of a model, in place; embedding, norms and head stay.

    Args:
        model: with `blocks`, called with tokens (B, S).
        tokens: the calibration text, (B, S), of the kind that the model will read.
        method: makes a weight in few bits of a weight and its inputs, such as
            `lambda w, x: gptq(w, x.moments, 4, 64)`; or one for each layer, by path.

    Returns:
        One row a layer, in the model's order.

    Raises:
        ValueError: no blocks, no tokens or tokens outside of the vocabulary, a layer without a
            method, or sizes that the method cannot use.
    """
    _check(model, tokens)
    rows: list[LayerRow] = []
    blocks = list(model.get_submodule("blocks").named_children())
    for name, block in tqdm(blocks, desc="rounding", unit="block", leave=False):
        layers = {f"blocks.{name}.{path}": layer for path, layer in linears_of(block).items()}
        with inputs_of(layers) as seen:
            model(tokens)
        for path, layer in layers.items():
            made = _method_of(path, method)(layer.weight, seen[path])
            stored = made.weight()
            rows.append(
                LayerRow(path, made, output_error(layer.weight, stored, seen[path].moments))
            )
            layer.weight.copy_(stored)
    return rows


def linears_of(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a module by their path in it."""
    return {path: part for path, part in module.named_modules() if isinstance(part, nn.Linear)}


@contextlib.contextmanager
def inputs_of(layers: Mapping[str, nn.Linear]) -> Iterator[dict[str, Inputs]]:
    """Inside, what goes into each layer is taken down."""
    seen = {path: Inputs.none_yet(layer.in_features) for path, layer in layers.items()}

    def look(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, args: seen[path].add(args[0])

    hooks = [layer.register_forward_pre_hook(look(path)) for path, layer in layers.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _method_of(path: str, method: Method | Mapping[str, Method]) -> Method:
    if not isinstance(method, Mapping):
        return method
    if path not in method:
        raise ValueError(
            f"No method is given for {path!r}; the mapping names {len(method)} layers."
        )
    return method[path]


def _check(model: nn.Module, tokens: Tensor) -> None:
    if not len(list(getattr(model, "blocks", nn.ModuleList()).children())):
        raise ValueError(f"{type(model).__name__} has no `blocks` to go through one by one.")
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError(
            f"The calibration text is a batch of tokens (B, S); this one is {tuple(tokens.shape)}. "
            "Give a few thousand tokens of the text that the model will read."
        )
    words = getattr(getattr(model, "embed", None), "num_embeddings", None)
    if words is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < words:
        raise ValueError(
            f"The calibration text has tokens from {int(tokens.min())} to {int(tokens.max())}, and "
            f"the model knows {words}: it was made with another tokenizer. Take the model's own."
        )


check_public(globals())
