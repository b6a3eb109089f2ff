"""Blocks whose weights live in host memory and come to the device one at a time, the next ahead.

As ZeRO-Infinity streams layers (Rajbhandari et al. 2021, arXiv:2104.07857, section 6.2), on one
rank: forward keeps each block's input alone; backward fetches the block again, computes it again,
and sends its gradients down. Twice the weights go up in a step, and the gradients go down once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from utils.checked import check_public
from utils.memory.events import Category
from utils.memory.host import host_memory
from utils.memory.observer import note_storages

from .link import Link

__all__ = ["stream_blocks"]


class Stream:
    """Carries the weights of alike blocks up, the next block's ahead, and their gradients down.

    Args:
        blocks: with their weights in host memory.
        link: what carries.
        ahead: begin to fetch the next block before the present one is computed.

    Raises:
        ValueError: no blocks, blocks of different shapes, or one with buffers.
    """

    def __init__(self, blocks: Iterable[nn.Module], link: Link, *, ahead: bool = True) -> None:
        self.blocks = list(blocks)
        _check(self.blocks)
        self._shape = copy.deepcopy(self.blocks[0]).to("meta")  # stands for each, without memory
        self._link, self._ahead = link, ahead
        self._coming: dict[int, list[Future[Tensor]]] = {}
        self._going: list[tuple[nn.Parameter, Future[Tensor]]] = []

    def fetch(self, number: int, following: int) -> dict[str, Tensor]:
        """A block's weights on the device, by name; `following` begins to come."""
        if number not in self._coming:
            self._ask(number)
        names = [name for name, _ in self.blocks[number].named_parameters()]
        coming = self._coming.pop(number)
        found = {name: one.result() for name, one in zip(names, coming, strict=True)}
        note_storages(Category.COMMUNICATION, found.values())
        if self._ahead and 0 <= following < len(self.blocks):
            self._ask(following)
        return found

    def compute(self, weights: dict[str, Tensor], *inputs: Any) -> Tensor:
        """A block with these weights."""
        return functional_call(self._shape, weights, inputs)

    def send(self, number: int, gradients: Iterable[Tensor]) -> None:
        """Begin to send a block's gradients down."""
        for parameter, gradient in zip(self.blocks[number].parameters(), gradients, strict=True):
            self._going.append((parameter, self._link.send_down(gradient)))

    def finish(self) -> None:
        """Wait for the gradients, and add them to those in host memory. Call it before the step."""
        for parameter, one in self._going:
            arrived = one.result()
            with host_memory():
                parameter.grad = arrived if parameter.grad is None else parameter.grad + arrived
        self._going.clear()

    def _ask(self, number: int) -> None:
        self._coming[number] = [self._link.send_up(p) for p in self.blocks[number].parameters()]


class StreamedBlock(nn.Module):
    """One block of a `Stream`, in the place of the plain one. Its parameters are the host's."""

    def __init__(self, stream: Stream, number: int) -> None:
        super().__init__()
        self.block, self.number = stream.blocks[number], number
        self._stream = (stream,)  # in a tuple: a deep copy of the model would else copy all of it

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        """`x` is differentiated, and must require gradients to train; what else comes is not."""
        return Streamed.apply(x, self._stream[0], self.number, others)


def stream_blocks(
    blocks: Iterable[nn.Module], link: Link, **how: Any
) -> tuple[nn.ModuleList, Stream]:
    """Blocks that stream, to put in the place of the plain ones, and their stream.

    The weights are copied to host memory. `how` are `Stream`'s.

    Raises:
        ValueError: `Stream` takes no such argument.
    """
    if unknown := sorted(set(how) - set(inspect.signature(Stream).parameters)):
        raise ValueError(f"how has {unknown[0]!r}, and Stream takes no such argument.")
    with host_memory():
        there = [copy.deepcopy(block).cpu() for block in blocks]
    stream = Stream(there, link, **how)
    return nn.ModuleList(StreamedBlock(stream, number) for number in range(len(there))), stream


class Streamed(torch.autograd.Function):
    """A block whose weights are on the device while it computes, and at no other time."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stream: Stream, number: int, others: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.stream, ctx.number, ctx.others = stream, number, others
        weights = stream.fetch(number, number + 1)
        y = stream.compute(weights, x, *others)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stream, number = ctx.stream, ctx.number
        x = ctx.saved_tensors[0].detach().requires_grad_()
        weights = stream.fetch(number, number - 1)
        leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
        with torch.enable_grad():
            y = stream.compute(leaves, x, *ctx.others)
        first, *rest = torch.autograd.grad(y, [x, *leaves.values()], gradients)
        stream.send(number, rest)
        return first, None, None, None


def _check(blocks: list[nn.Module]) -> None:
    if not blocks:
        raise ValueError("There are no blocks to stream.")
    shapes = {tuple((n, tuple(p.shape)) for n, p in b.named_parameters()) for b in blocks}
    if len(shapes) > 1:
        raise ValueError(
            "These blocks have different shapes, and one of them stands for all on the device: "
            "stream alike blocks, and keep the others there."
        )
    if any(True for block in blocks for _ in block.buffers()):
        raise ValueError(
            "A block has buffers, which would stay behind: stream blocks without them."
        )


check_public(globals())
