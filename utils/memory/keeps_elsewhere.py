"""Models some of whose tensors belong to another object, as ZeRO's do to its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch

from utils.memory.events import Category


@runtime_checkable
class KeepsElsewhere(Protocol):
    """A model that says what is kept for it outside of its parameters and buffers.

    The meter asks a model that has this method where the metered step begins and where it ends.
    What it names counts in its category; all else that no module owns is *other* or *temporary*.
    `utils.techniques.zero` gives it to the module of DeepSpeed's engine. A framework of your own:

        model.kept_elsewhere = lambda: {Category.GRADIENTS: optimizer.flat_gradients}
    """

    def kept_elsewhere(self) -> Mapping[Category, Iterable[torch.Tensor]]:
        """The tensors by what they are, as they lie now; they may change from step to step."""
        ...
