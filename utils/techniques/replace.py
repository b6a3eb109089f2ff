"""Replacing the linear layers of a model by other layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

Kind = TypeVar("Kind", bound=nn.Module)


def replace_linears(
    model: nn.Module,
    wanted: Callable[[str], bool],
    make: Callable[[Kind], nn.Module],
    kinds: tuple[type[Kind], ...],
) -> nn.Module:
    """Put `make(layer)` in the place of each layer of these kinds whose path is wanted.

    Raises:
        ValueError: no such layer; the sentence lists the names that there are.
    """
    found = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, kinds)]
    chosen = [(path, layer) for path, layer in found if path and wanted(path)]
    if not chosen:
        names = ", ".join(sorted({path.rpartition(".")[2] for path, _ in found})) or "none"
        raise ValueError(f"No linear layer of the model was chosen. Their names: {names}.")
    for path, layer in chosen:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, make(layer))
    return model
