"""A model with one input channel that is far larger than all others, as billions of parameters grow."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from utils.models.transformer import Transformer

from .weight_only import Inputs

SHARED = {  # matrices that read the same input
    "query, key, value": "attention.query",
    "output": "attention.output",
    "gate, up": "feedforward.gate",
    "down": "feedforward.down",
}


@torch.no_grad()
def with_outlier(model: Transformer, channel: int = 7, factor: float = 30.0) -> Transformer:
    """A copy that computes the same, with one channel of every norm `factor` times as large.

    The layers that read the norm divide that channel's weights by `factor`.
    """
    grown = copy.deepcopy(model)
    for name, part in grown.named_modules():
        if name.endswith("attention_norm"):
            _widen(
                part, channel, factor, _readers(grown, name, "attention", "query", "key", "value")
            )
        elif name.endswith("feedforward_norm"):
            _widen(part, channel, factor, _readers(grown, name, "feedforward", "gate", "up"))
    return grown


def stands_out(seen: Mapping[str, Inputs]) -> dict[str, list[float]]:
    """The largest input channel's mean magnitude over the median one's, in each block, by matrices."""
    found: dict[str, list[float]] = {}
    for label, part in SHARED.items():
        each = [inputs.magnitudes for path, inputs in seen.items() if path.endswith(part)]
        found[label] = [float(channels.max() / channels.median()) for channels in each]
    return found


def _readers(model: nn.Module, norm: str, part: str, *names: str) -> list[Tensor]:
    block = norm.rpartition(".")[0]
    return [model.get_submodule(f"{block}.{part}.{name}").get_parameter("weight") for name in names]


def _widen(norm: nn.Module, channel: int, factor: float, readers: list[Tensor]) -> None:
    norm.get_parameter("weight")[channel] *= factor
    for weight in readers:
        weight[:, channel] /= factor
