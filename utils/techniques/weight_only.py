"""All linear layers of a transformer in few bits, block after block, as GPTQ and AWQ go through a model.

The weights of a block are rounded with the inputs that the blocks before it give *after* they were
rounded, so that each layer is fitted to what it will really read (Frantar et al. 2022, section 4). The
arithmetic goes on in the model's own type, with the rounded values; the bytes are those of the packed form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from utils.techniques.awq import awq
from utils.techniques.gptq import gptq
from utils.techniques.rounding import output_error, round_to_nearest, second_moments

METHODS = ("nearest", "gptq", "awq")


class InFewBits(Protocol):
    """What a method makes of a weight."""

    def weight(self) -> Tensor:
        """The values in effect, fp32 (outputs, inputs)."""
        ...

    @property
    def stored_bytes(self) -> float:
        """Bytes of the packed form."""
        ...


@dataclass
class Inputs:
    """What is known of a layer's inputs.

    Attributes:
        moments: sum of x x^T, fp32 (inputs, inputs).
        magnitudes: sum of |x|, fp32 (inputs,).
        rows: how many x there were.
    """

    moments: Tensor
    magnitudes: Tensor
    rows: int = 0

    @classmethod
    def none_yet(cls, inputs: int) -> Inputs:
        """Before the first row."""
        return cls(torch.zeros(inputs, inputs), torch.zeros(inputs))

    def add(self, x: Tensor) -> None:
        """Take in rows (..., inputs). Raises ValueError if they are not finite."""
        self.moments += second_moments(x)
        self.magnitudes += x.detach().float().abs().flatten(0, -2).sum(dim=0)
        self.rows += x.numel() // x.shape[-1]


@dataclass(frozen=True)
class LayerRow:
    """One layer, rounded.

    Attributes:
        layer: its path in the model.
        bits: of a weight's code.
        relative_error: of its output on the calibration text.
        stored_bytes: of the packed weight.
    """

    layer: str
    bits: int
    relative_error: float
    stored_bytes: float


@torch.no_grad()
def quantize_weights(
    model: nn.Module,
    tokens: Tensor,
    *,
    method: str = "gptq",
    bits: int | dict[str, int] = 4,
    group: int | None = 64,
) -> list[LayerRow]:
    """Round all linear layers in the blocks of a model, in place; embedding, norms and head stay.

    Args:
        model: with `blocks`, called with tokens (B, S).
        tokens: the calibration text, (B, S), of the kind that the model will read.
        method: "nearest" (no data used), "gptq" or "awq".
        bits: 2 to 8; or by path, such as {"blocks.0.feedforward.down": 8}, for every layer.
        group: inputs that share a scale; None for one scale a row.

    Returns:
        One row a layer, in the model's order.

    Raises:
        ValueError: no blocks, no tokens or tokens outside of the vocabulary, an unknown method, a
            layer without bits, or sizes that cannot be used.
    """
    _check(model, tokens, method)
    rows = []
    blocks = list(model.get_submodule("blocks").named_children())
    for name, block in tqdm(blocks, desc=method, unit="block", leave=False):
        layers = {f"blocks.{name}.{path}": layer for path, layer in linears_of(block).items()}
        with inputs_of(layers) as seen:
            model(tokens)
        for path, layer in layers.items():
            made = in_few_bits(
                layer.weight, seen[path], method=method, bits=_bits_of(path, bits), group=group
            )
            error = output_error(layer.weight, made.weight(), seen[path].moments)
            layer.weight.copy_(made.weight())
            rows.append(LayerRow(path, _bits_of(path, bits), error, made.stored_bytes))
    return rows


def in_few_bits(
    weight: Tensor, inputs: Inputs, *, method: str, bits: int, group: int | None
) -> InFewBits:
    """One weight by one method; see `quantize_weights`.

    Raises:
        ValueError: the method is unknown, or the sizes cannot be used.
    """
    if method == "nearest":
        return round_to_nearest(weight.detach().float(), bits, group)
    if method == "gptq":
        return gptq(weight, inputs.moments, bits, group)
    if method == "awq":
        return awq(weight, inputs.moments, inputs.magnitudes / inputs.rows, bits, group)
    raise ValueError(f"method is {method!r}; choose one of {', '.join(METHODS)}.")


def linears_of(block: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a block by their path in it."""
    return {path: layer for path, layer in block.named_modules() if isinstance(layer, nn.Linear)}


@contextlib.contextmanager
def inputs_of(layers: dict[str, nn.Linear]) -> Iterator[dict[str, Inputs]]:
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


def _bits_of(path: str, bits: int | dict[str, int]) -> int:
    if isinstance(bits, int):
        return bits
    if path not in bits:
        raise ValueError(f"No bits are given for {path!r}; bits names {len(bits)} layers.")
    return bits[path]


def _check(model: nn.Module, tokens: Tensor, method: str) -> None:
    if not len(list(getattr(model, "blocks", nn.ModuleList()).children())):
        raise ValueError(f"{type(model).__name__} has no `blocks` to go through one by one.")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; choose one of {', '.join(METHODS)}.")
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError(
            f"The calibration text is a batch of tokens (B, S); this one is {tuple(tokens.shape)}. "
            "Give a few thousand tokens of the text that the model will read."
        )
    words = getattr(getattr(model, "embed", None), "num_embeddings", None)
    if words is not None and int(tokens.max()) >= words:
        raise ValueError(
            f"The calibration text has token {int(tokens.max())}, and the model knows {words}: it "
            "was made with another tokenizer. Take the model's own."
        )
