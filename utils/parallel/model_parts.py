"""What the axes act on: a model, or a stage of one, that is a row of blocks between two ends."""

from __future__ import annotations

from typing import Any

from torch import nn

# A module with `embed`, `blocks`, `norm` and `head`, and a forward that passes over those that are
# None, as `utils.models.Transformer` is. Any: PyTorch's modules do not say what they hold.
Part = Any


def part_blocks(part: nn.Module) -> list[Any]:
    """The blocks of a model or stage, in order.

    Raises:
        ValueError: it has none under that name.
    """
    blocks = getattr(part, "blocks", None)
    if not isinstance(blocks, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"{type(part).__name__} has no `blocks`, an nn.ModuleList of the layers that are alike: "
            "give it one, as utils.models.Transformer has."
        )
    return list(blocks.children())
