"""Blocks behind a link, over time: planned from two numbers, and run for real behind a slow one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from utils import Span, Transformer, TransformerConfig, text_batches, text_tokens
from utils.catalog.rules import whole
from utils.checked import check_public

from .link import Link
from .streaming import stream_blocks

__all__ = ["Arrivals", "arrivals", "planned"]

MOST_BLOCKS = 100_000
WIDE = TransformerConfig(vocabulary=256, hidden=256, layers=5, heads=4, feedforward=704)


class Arrivals(NamedTuple):
    """Of a step's tensors that came up: all, and those that did while a block computed."""

    tensors: int
    behind_compute: int

    def __str__(self) -> str:
        return f"{self.behind_compute} of {self.tensors} tensors came up while a block computed"


def planned(
    compute_seconds: float, transfer_seconds: float, blocks: int, *, ahead: bool
) -> tuple[list[Span], list[Span]]:
    """The link's and the device's spans in a forward pass whose weights stream.

    Args:
        compute_seconds, transfer_seconds: of one block.
        blocks: how many.
        ahead: a block is asked for when the one before begins to compute; else when it has ended.

    Raises:
        ValueError: no blocks, or more than a model has.
    """
    whole("planned", blocks=blocks, most=MOST_BLOCKS)
    link: list[Span] = []
    device: list[Span] = []
    begun = done = 0.0
    for _ in range(blocks):
        free = link[-1].end_seconds if link else 0.0
        arrives = max(begun if ahead else done, free) + transfer_seconds
        link.append(Span("transfer", arrives - transfer_seconds, arrives))
        begun = max(arrives, done)
        done = begun + compute_seconds
        device.append(Span("compute", begun, done))
    return link, device


def arrivals() -> dict[str, Arrivals]:
    """A real step behind a slowed link, its blocks asked for one by one and one ahead.

    The link takes as long for a block's weights as the block computes, on average.
    """
    block_bytes = sum(p.nbytes for p in Transformer(WIDE).blocks[0].parameters())
    work, _ = _step(None, ahead=True)
    rate = block_bytes * len(work) / sum(span.end_seconds - span.start_seconds for span in work)
    arms = {"one by one": False, "one ahead": True}
    return {name: _count(*_step(rate, ahead=ahead)) for name, ahead in arms.items()}


def _step(rate: float | None, *, ahead: bool) -> tuple[Sequence[Span], Sequence[Span]]:
    """What was computed, and what came up."""
    tokens, targets = next(iter(text_batches(text_tokens(16 * 128 + 1), batch=16, sequence=128)))
    torch.manual_seed(0)
    model, link = Transformer(WIDE), Link(rate)
    model.blocks, stream = stream_blocks(model.blocks, link, ahead=ahead)
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    stream.finish()
    link.close()
    work = [Span(one.kind, one.start_seconds, one.end_seconds) for one in stream.log]
    return work, [
        Span("up", one.start_seconds, one.end_seconds) for one in link.log if one.way == "up"
    ]


def _count(work: Sequence[Span], came: Sequence[Span]) -> Arrivals:
    behind = [
        up
        for up in came
        if any(w.start_seconds < up.end_seconds and up.start_seconds < w.end_seconds for w in work)
    ]
    return Arrivals(len(came), len(behind))


check_public(globals())
