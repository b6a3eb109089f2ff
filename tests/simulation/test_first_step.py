"""A first step made of a later one: the allocator is then where a whole simulation has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from utils.memory import Allocation, MemoryTimeline
from utils.memory.events import LibraryMemory, Mark
from utils.memory.measurement import Measurement
from utils.simulation import simulate
from utils.simulation.cuda_allocator import requests, reserved
from utils.simulation.first_step import two_steps
from utils.units import MIB, Category, Phase

VOCABULARY, HIDDEN, TOKENS = 20_000, 256, 1024


class Small(nn.Module):
    """What is large at its end is given back in backward, just before that thread's first product."""

    def __init__(self, layers: int = 6, recomputed: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.recomputed = recomputed
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
            x = x.relu()
        return self.head(x)


def frozen(model: Small) -> Small:
    for part in (model.embed, model.head):
        part.requires_grad_(False)
    return model


def train(model: nn.Module, optimizer: Any, *, cleared_first: bool = False, times: int = 1) -> None:
    if cleared_first:
        optimizer.zero_grad()
    for _ in range(times):
        tokens = torch.randint(VOCABULARY, (TOKENS,))
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(tokens), tokens)
        loss.backward()
    optimizer.step()
    if not cleared_first:
        optimizer.zero_grad()


PROGRAMS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "AdamW, fused": (Small, {"fused": True}, {}),
    "AdamW, foreach": (Small, {"foreach": True}, {}),
    "gradients stay until the next step": (Small, {"fused": True}, {"cleared_first": True}),
    "two micro-batches": (Small, {"fused": True}, {"times": 2, "cleared_first": True}),
    "recomputed": (lambda: Small(recomputed=True), {"fused": True}, {}),
    "one weight at both ends": (lambda: Small(tied=True), {"fused": True}, {"cleared_first": True}),
    "ends frozen": (lambda: frozen(Small()), {"fused": True}, {"cleared_first": True}),
}


def found(program: str) -> Measurement:
    make, adamw, how = PROGRAMS[program]

    def build() -> tuple[nn.Module, Any]:
        model = make()
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trained, **adamw)

    return simulate(build, lambda model, optimizer: train(model, optimizer, **how), device="H100")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_first_step_made_of_the_second_is_the_first(program: str) -> None:
    whole = found(program)
    made = reserved(*two_steps(whole.timeline, whole.library_memory), None)
    assert made.reserved_peak_bytes == whole.reserved_bytes
    assert made.allocated_peak_bytes == whole.allocator_bytes["allocated peak"]


def test_where_the_libraries_take_their_memory_decides() -> None:
    """Backward's workspace comes out of what the logits left, which the next step then asks for anew."""
    whole = found("ends frozen")
    assert [(m.bytes, m.phase) for m in whole.library_memory] == [
        (32 * MIB, "forward"),
        (32 * MIB, "backward"),
    ]
    alone = reserved(*requests(whole.timeline), None).reserved_peak_bytes
    before = reserved(*two_steps(whole.timeline), None).reserved_peak_bytes
    assert max(alone, before) < whole.reserved_bytes - 30 * MIB


def timeline(blocks: list[tuple[int, int, int | None, Category]]) -> MemoryTimeline:
    return MemoryTimeline(
        [
            Allocation(n, size, born, died, category, Phase.FORWARD, "")
            for n, (size, born, died, category) in enumerate(blocks)
        ],
        [Mark(0, Phase.FORWARD), Mark(20, Phase.OPTIMIZER_STEP)],
        0,
        30,
    )


def test_what_a_step_replaces_is_what_the_first_one_left() -> None:
    step = timeline(
        [
            (8 * MIB, 0, None, Category.PARAMETERS),
            (4 * MIB, 0, 5, Category.GRADIENTS),
            (16 * MIB, 0, None, Category.OPTIMIZER_STATE),
            (4 * MIB, 10, None, Category.GRADIENTS),
            (2 * MIB, 0, None, Category.OTHER),
            (6 * MIB, 0, 7, Category.OTHER),
        ]
    )
    before, events = two_steps(step, [LibraryMemory(2 * MIB, "forward", 0)])
    assert before == [(0, 8 * MIB)]
    assert [(name, size // MIB) for _, name, size in events] == [
        (4, 2), (3, 4), (2, 16),  # the first step: the library's, its gradient, the states
        (5, 6),  # no block of its size was left: it is there before the second begins
        (3, -4), (5, -6), (9, 4),
    ]  # fmt: skip


def test_a_step_without_events_is_served_as_it_is() -> None:
    step = MemoryTimeline(
        [Allocation(0, MIB, 0, None, Category.PARAMETERS, Phase.FORWARD, "")],
        [Mark(0, Phase.FORWARD)],
        0,
        1,
    )
    assert two_steps(step, [LibraryMemory(MIB, "backward", 3)]) == ([(0, MIB)], [])
