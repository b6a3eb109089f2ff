"""Recomputation must repeat forward: a check before training, and plain words for what fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from utils.checked import check_public
from utils.techniques.checkpointing import FrozenStatistics, fork_random_state

__all__ = ["NotRepeatableError", "check_repeatable", "recompute_explained"]

Outputs = list[tuple[str, list[Tensor]]]


class NotRepeatableError(RuntimeError):
    """A block that does not give the same again; the text says where and what to do."""


def check_repeatable(block: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Run a block twice with the same random state and compare every part's output, bit by bit.

    PyTorch's own check in backward compares shapes, dtypes and devices only; other values of the
    same shape pass it, and the gradients are silently wrong.

    Raises:
        NotRepeatableError: the block differs; the text names the first part that does.
    """
    first = _outputs(block, args, kwargs)
    second = _outputs(block, args, kwargs)
    if [path for path, _ in first] != [path for path, _ in second]:
        raise NotRepeatableError(_sentence(block, "runs other parts", "when it runs again"))
    for (path, before), (_, after) in zip(first, second, strict=True):
        if difference := _difference(before, after):
            where = f"its part '{path}'" if path else "it"
            raise NotRepeatableError(_sentence(block, where, difference))


@contextlib.contextmanager
def recompute_explained() -> Iterator[None]:
    """`with recompute_explained(): loss.backward()`: PyTorch's error in a sentence to act on.

    Raises:
        NotRepeatableError: recomputation saved other tensors than forward did.
    """
    try:
        yield
    except CheckpointError as error:
        raise NotRepeatableError(
            "A checkpointed block did other things when it was recomputed: PyTorch found tensors of "
            "another number, shape or dtype than forward had saved. Look for a branch on something "
            "that changed in between (a counter, a global, Python's random, train/eval mode), "
            "compute the choice before the block and pass it in, or leave the block out of `only`. "
            f"PyTorch says: {str(error).splitlines()[0]}"
        ) from error


def _outputs(block: nn.Module, args: Any, kwargs: Any) -> Outputs:
    """The outputs of all parts in the order in which they end: the innermost first."""
    seen: Outputs = []
    names = {part: path for path, part in block.named_modules()}

    def note(part: nn.Module, _: Any, output: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        seen.append((names[part], [leaf.detach().clone() for leaf in leaves]))

    handles = [part.register_forward_hook(note) for part in names]
    try:
        tensors = [list(block.parameters()), args, kwargs]
        with fork_random_state(tensors), FrozenStatistics(block), torch.no_grad():
            block(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _difference(before: list[Tensor], after: list[Tensor]) -> str:
    """What differs, in words; empty if nothing does."""
    shapes = [[(tuple(t.shape), t.dtype) for t in side] for side in (before, after)]
    if shapes[0] != shapes[1]:
        return f"gives {shapes[1]} after {shapes[0]}"
    for old, new in zip(before, after, strict=True):
        if not torch.equal(old.nan_to_num(), new.nan_to_num()):
            largest = (old.double() - new.double()).abs().max().item()
            return f"gives other values of the same shape (largest difference {largest:.3g})"
    return ""


def _sentence(block: nn.Module, where: str, what: str) -> str:
    return (
        f"{type(block).__name__} is not repeatable: {where} {what}, with the same inputs and the same "
        "random state of torch. Recomputed activations would not be those of forward. Draw random "
        "numbers from torch, pass in what changes between calls, or leave this block out of "
        "checkpointing."
    )


check_public(globals())
