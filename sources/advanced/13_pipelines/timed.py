"""Stages that sleep for a known time, so that processes which share few cores behave as devices."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from utils.checked import check_public
from utils.parallel.actions import Action

__all__ = ["SleepingStage"]

Spans = dict[Action, tuple[float, float]]


class SleepingStage(nn.Module):
    """A pipeline stage that sleeps in place of computing, and notes when.

    Its passes to the input and to the weight are separate nodes of the graph, as a zero-bubble
    schedule needs. It computes `x * weight`, with one weight, 1 at the start.

    Attributes:
        spans: Start and end in seconds of each pass: F, I and W; the clock is the machine's, the
            same in all its processes. The n-th pass of a kind is that of micro-batch n.
    """

    def __init__(
        self, stage: int, forward_seconds: float, input_seconds: float, weights_seconds: float
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.stage, self.spans = stage, Spans()
        self._takes = {"F": forward_seconds, "I": input_seconds, "W": weights_seconds}
        self._counts: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and pass `x` on."""
        self.sleep("F")
        return _Nap.apply(x, self, "I") * _Nap.apply(self.weight, self, "W")

    def forget(self) -> None:
        """Drop what was noted; the next pass of each kind is that of micro-batch 0."""
        self.spans = {}
        self._counts.clear()

    def sleep(self, kind: str) -> None:
        """One pass."""
        start = time.monotonic()
        time.sleep(self._takes[kind])
        self.spans[Action(self.stage, kind, self._counts[kind])] = (start, time.monotonic())
        self._counts[kind] += 1


class _Nap(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, stage: SleepingStage, kind: str) -> Tensor:
        ctx.stage, ctx.kind = stage, kind
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.stage.sleep(ctx.kind)
        return gradients[0], None, None


check_public(globals())
