"""Gradient checkpointing: which blocks of a model are recomputed, and what is kept inside them.

Chen et al. 2016, arXiv:1604.06174. The recomputation itself is `torch.utils.checkpoint`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
MATMULS = tuple(
    packet.default
    for packet in (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution)
)
ATTENTION = tuple(
    packet.default
    for packet in (
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
    )
)
EXPENSIVE = MATMULS + ATTENTION  # what selective checkpointing keeps; all else is cheap to repeat

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_blocks(
    model: nn.Module | Sequence[nn.Module],
    *,
    every: int = 1,
    only: Iterable[int] | None = None,
    keep: Iterable[Callable[..., Any]] = (),
    freeze_statistics: bool = True,
    preserve_rng_state: bool = True,
) -> nn.Module | Sequence[nn.Module]:
    """Recompute blocks of a model in backward instead of keeping their activations; in place.

    Names, parameters and state_dict stay as they are, and so do losses and gradients, bit by bit.
    A second call replaces the first. Without gradients (`torch.no_grad`) nothing is recomputed.

    Args:
        model: a model that `blocks_of` knows, or its blocks in the order of their calls.
        every: recompute each n-th block, from the first; 1 for all, 0 for none.
        only: recompute exactly the blocks with these indices; goes before `every`.
        keep: operations whose results are kept even so, such as `MATMULS` or `EXPENSIVE`:
            selective checkpointing.
        freeze_statistics: leave the running statistics of batch and instance norms alone while
            recomputing.
        preserve_rng_state: replay the random state, so that dropout draws the same mask again.

    Returns:
        The model.

    Raises:
        ValueError: `every` is negative, or an index names no block.
    """
    blocks = blocks_of(model)
    chosen = _chosen(len(blocks), every, only)
    recompute = _Recompute(tuple(keep), freeze_statistics, preserve_rng_state)
    for index, block in enumerate(blocks):
        if issubclass(now := type(block), _Checkpointed):
            block.__class__ = now.__mro__[2]
        if index in chosen:
            block.__class__ = _checkpointed_class(type(block))
            block._recompute = recompute  # type: ignore[assignment]
    return model


def blocks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """A model's blocks in the order of their calls: its `blocks`, a ResNet's, or its own parts.

    Raises:
        ValueError: the model shows no blocks, or there are none.
    """
    blocks = getattr(model, "blocks", None)
    layers = [getattr(model, f"layer{n}", None) for n in (1, 2, 3, 4)]
    stages = [layer for layer in layers if isinstance(layer, nn.Sequential)]
    if blocks is not None:
        found = list(blocks)
    elif len(stages) == len(layers):
        found = [block for stage in stages for block in stage]  # torchvision's ResNets
    elif isinstance(model, (nn.Sequential, nn.ModuleList, list, tuple)):
        found = list(model)
    else:
        found = []
    if not found or not all(isinstance(block, nn.Module) for block in found):
        raise ValueError(
            f"{type(model).__name__} shows no blocks: give a list of its modules in the order of "
            "their calls, such as checkpoint_blocks([model.first, model.second])."
        )
    return found


def in_segments(blocks: Iterable[nn.Module], size: int) -> nn.ModuleList:
    """Runs of `size` blocks, each to be checkpointed as one: `model.blocks = in_segments(...)`.

    With n blocks, segments of sqrt(n) keep about 2 sqrt(n) tensors instead of n, where a block
    keeps its input and nothing inside; Chen et al. 2016, section 4. The state_dict's names change.

    Raises:
        ValueError: the size is below 1.
    """
    if size < 1:
        raise ValueError(f"size is {size}; a segment needs 1 block or more.")
    parts = list(blocks)
    starts = range(0, len(parts), size)
    return nn.ModuleList(Segment(parts[start : start + size]) for start in starts)


class Segment(nn.ModuleList):
    """Blocks that run one after the other; all get the same further arguments."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The first block's input to the last block's output."""
        for block in self:
            x = block(x, *args, **kwargs)
        return x


def _chosen(count: int, every: int, only: Iterable[int] | None) -> set[int]:
    if only is not None:
        chosen = set(only)
        if wrong := sorted(index for index in chosen if index not in range(count)):
            last = count - 1
            raise ValueError(f"There is no block {wrong[0]}: the {count} blocks are 0 to {last}.")
        return chosen
    if every < 0:
        raise ValueError(f"every is {every}; 1 is for all blocks, 2 for each second, 0 for none.")
    return set(range(0, count, every)) if every else set()


def fork_random_state(tree: Any) -> AbstractContextManager[None]:
    """Put the random state back afterwards: the CPU's, and that of the GPUs whose tensors are given.

    Without a list, `torch.random.fork_rng` touches every GPU of the machine, and warns.
    """
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return torch.random.fork_rng(devices=sorted({t.get_device() for t in leaves if t.is_cuda}))


@dataclass(frozen=True)
class _Recompute:
    """How one block is recomputed."""

    keep: tuple[Callable[..., Any], ...]
    freeze_statistics: bool
    preserve_rng_state: bool

    def contexts(self, block: nn.Module) -> Contexts:
        """What forward runs in, and what its recomputation runs in."""
        frozen = FrozenStatistics(block) if self.freeze_statistics else None
        frozen = frozen if frozen and frozen.norms else None
        if not self.keep:
            return nullcontext(), frozen or nullcontext()
        first, again = create_selective_checkpoint_contexts(list(self.keep))
        return first, _Both(frozen, again) if frozen else again


class _Checkpointed:
    """Mixed into a block's class, as transformers' GradientCheckpointingLayer is inherited.

    It wraps the call and not the forward, so that the block's hooks run in recomputation too.
    """

    _recompute: _Recompute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = super().__call__  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        how = self._recompute
        extra = {}
        if how.keep or how.freeze_statistics:
            extra["context_fn"] = functools.partial(how.contexts, cast("nn.Module", self))
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=how.preserve_rng_state,
            **extra,
            **kwargs,
        )


@functools.cache
def _checkpointed_class(plain: type[nn.Module]) -> type[nn.Module]:
    return type(f"Checkpointed{plain.__name__}", (_Checkpointed, plain), {})


class FrozenStatistics(AbstractContextManager[None]):
    """Inside, batch and instance norms update copies of their running statistics.

    PyTorch updates them in each forward in training mode, so twice under recomputation
    (https://github.com/pytorch/pytorch/issues/96136). The copies are dropped, so that the statistics
    keep their bits. (A momentum of zero would do for BatchNorm; InstanceNorm averages its copies of
    the statistics over the batch even then, which may round.)
    """

    def __init__(self, module: nn.Module) -> None:
        self.norms = [
            part for part in module.modules() if getattr(part, "running_mean", None) is not None
        ]
        self._before: list[dict[str, Tensor]] = []

    def __enter__(self) -> None:
        self._before = [dict(norm.named_buffers(recurse=False)) for norm in self.norms]
        for norm, buffers in zip(self.norms, self._before, strict=True):
            _set_buffers(norm, {name: buffer.clone() for name, buffer in buffers.items()})

    def __exit__(self, *_: object) -> None:
        for norm, buffers in zip(self.norms, self._before, strict=True):
            _set_buffers(norm, buffers)


def _set_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(module, name, buffer)


class _Both(AbstractContextManager[None]):
    """Two contexts as one that can be entered again, as a second backward does."""

    def __init__(self, *parts: AbstractContextManager[Any]) -> None:
        self._parts, self._stack = parts, ExitStack()

    def __enter__(self) -> None:
        for part in self._parts:
            self._stack.enter_context(part)

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)
