"""What a measurement is told of: the models, their optimizers, and what else holds tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from utils.memory.events import Category
from utils.memory.holdings import tensors_of
from utils.memory.hookable import hookable
from utils.memory.keeps_elsewhere import KeepsElsewhere

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizer = torch.optim.Optimizer
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None


@dataclass(frozen=True)
class Watched:
    """Models by name ("" for a single one), optimizers, and holders of further tensors by name.

    `host`: holders of what lies in host memory, by category; None where it is not told apart.
    """

    models: Mapping[str, nn.Module]
    optimizers: Sequence[Optimizer]
    keep: Mapping[str, Any]
    host: Mapping[Category, Any] | None = None

    @property
    def name(self) -> str:
        """The models' own names."""
        return ", ".join(type(model).__name__ for model in self.models.values())

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all models."""
        return [p for model in self.models.values() for p in model.parameters()]

    def buffers(self) -> Iterator[torch.Tensor]:
        """The buffers of all models."""
        return chain.from_iterable(model.buffers() for model in self.models.values())

    def paths(self) -> dict[nn.Module, str]:
        """All modules that take hooks, with their paths; those of several models begin with
        the model's name.

        Raises:
            ValueError: a model cannot be watched.
        """
        found: dict[nn.Module, str] = {}
        for name, model in self.models.items():
            for module, path in hookable(model):
                found.setdefault(module, ".".join(filter(None, (name, path))))
        return found

    def kept_elsewhere(self) -> Iterator[tuple[Any, Any]]:
        """Category and tensors of what models say is kept for them."""
        for model in self.models.values():
            if isinstance(model, KeepsElsewhere):
                yield from model.kept_elsewhere().items()

    def on_host(self) -> Iterator[tuple[Category, torch.Tensor]]:
        """What lies in host memory by the program's word: each tensor with its category."""
        for category, holder in (self.host or {}).items():
            found = tensors_of(category, holder)
            gradients = {id(t.grad) for t in found if t.is_leaf and t.grad is not None}
            for t in found:
                yield (Category.GRADIENTS if id(t) in gradients else category), t

    def states(self) -> list[Any]:
        """What the optimizers keep for each parameter."""
        return [state for one in self.optimizers for state in one.state.values()]

    def stepped_elsewhere(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the optimizers step and no model owns: finer copies of own parameters, and others.

        A copy has the shape of a parameter and more bytes an element, as in mixed precision by
        hand, or lies in host memory; all else belongs to a model that was not named.
        """
        placed = {id(t) for _, t in self.on_host()}
        own = self.parameters()
        known = {id(p) for p in own}
        shapes: dict[torch.Size, int] = {}
        for p in own:
            shapes[p.shape] = min(p.element_size(), shapes.get(p.shape, 16))
        copies, others = [], []
        for p in (p for one in self.optimizers for p in one.state if id(p) not in known):
            finer = p.element_size() > shapes.get(p.shape, 16) or p.shape not in shapes
            (copies if finer or id(p) in placed else others).append(p)
        return copies, others


def watched(
    model: Any,
    optimizer: Any,
    keep: Mapping[str, Any] | None,
    host: Mapping[str, Any] | None = None,
) -> Watched:
    """The arguments of `measure`, in one form.

    Raises:
        ValueError: one of them is none of what it should be.
    """
    return Watched(_models(model), _optimizers(optimizer), _kept(keep), _placed(host))


def _models(model: Any) -> dict[str, nn.Module]:
    found = {"": model} if isinstance(model, nn.Module) else _named(model)
    if not found or not all(isinstance(part, nn.Module) for part in found.values()):
        raise ValueError(
            "measure() needs model=, the nn.Module that the step trains or runs, or several in a "
            "list or a dictionary."
        )
    return found


def _optimizers(optimizer: Any) -> list[Optimizer]:
    if optimizer is None:
        return []
    found = [optimizer] if isinstance(optimizer, Optimizer) else list(_named(optimizer).values())
    if not found or not all(isinstance(part, Optimizer) for part in found):
        raise ValueError(
            "optimizer= must be a torch.optim optimizer, several in a list or a dictionary, or "
            "None for inference."
        )
    return [_inner(part) for part in found]


def _inner(optimizer: Any) -> Optimizer:
    """The optimizer that a library's wrapper steps, as accelerate's does."""
    inner = getattr(optimizer, "optimizer", None)
    return _inner(inner) if isinstance(inner, Optimizer) else optimizer


def _kept(keep: Any) -> Mapping[str, Any]:
    if keep is not None and not isinstance(keep, Mapping):
        raise ValueError('keep= names what holds tensors: a dictionary such as {"ema": ema}.')
    return keep or {}


def _placed(host: Any) -> Mapping[Category, Any] | None:
    if host is None:
        return None
    if not isinstance(host, Mapping) or not set(host) <= set(Category):
        raise ValueError(
            "host= names what lies in host memory, by category: a dictionary such as "
            '{"optimizer state": offloaded.inner}.'
        )
    return {Category(name): holder for name, holder in host.items()}


def _named(several: Any) -> dict[str, Any]:
    if isinstance(several, Mapping):
        return {str(name): part for name, part in several.items()}
    if isinstance(several, (list, tuple)):
        return {str(number): part for number, part in enumerate(several)}
    return {}
