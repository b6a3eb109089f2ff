"""Extended depths and batches against whole ones: the same messages in the same order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from evidence.validation.simulation_cpu import OPTIMIZERS, cross_entropy, keep_matmuls
from utils.lessons.lesson_07.offload import OffloadedOptimizer
from utils.memory import Category, Measurement, OverBudgetError, budget
from utils.simulation import simulate
from utils.simulation.extrapolation import FROM_LAYERS, extrapolate
from utils.simulation.message_stream import stream
from utils.units import MIB, Evidence

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

BuildAt = Callable[[int], tuple[nn.Module, torch.optim.Optimizer]]
DEVICES = ("cpu", "H100")
VOCABULARY, LENGTH, HIDDEN = 512, 64, 32


class Block(nn.Module):
    """The least that has activations, a residual stream, and room for an adapter."""

    def __init__(self, hidden: int, adapter: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)
        self.adapter = (
            nn.Sequential(
                nn.Linear(hidden, adapter, bias=False), nn.Linear(adapter, hidden, bias=False)
            )
            if adapter
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        out = x + self.down(F.gelu(self.up(normed)))
        return out if self.adapter is None else out + self.adapter(normed)


class Ladder(nn.Module):
    """Many small blocks between an embedding and a head; every n-th may be checkpointed."""

    def __init__(self, layers: int, every: int = 0, adapter: int = 0) -> None:
        super().__init__()
        self.every = every
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(HIDDEN, adapter) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            recomputed = self.every and index % self.every == 0
            x = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
        return self.head(x)


def only_adapters(model: Ladder) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)


def freeze_half(model: Ladder) -> None:
    for part in (model.embed, *model.blocks[: len(model.blocks) // 2]):
        part.requires_grad_(False)


def ladder(
    optimizer: str = "SGD", change: Callable[[Ladder], Any] = lambda model: None, **sizes: int
) -> BuildAt:
    def build_at(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Ladder(layers, **sizes)
        change(model)
        return model, OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])

    return build_at


def train(
    model: nn.Module, optimizer: Any, batch: int = 2, *, autocast: bool = False, clip: bool = False
) -> None:
    tokens = torch.randint(VOCABULARY, (batch, LENGTH))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = cross_entropy(model(tokens), tokens)
    loss.backward()
    if clip:  # stacks the norms of all gradients: a size that grows with depth
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


mixed = functools.partial(train, autocast=True)
TECHNIQUES: dict[str, tuple[BuildAt, Callable[..., None], tuple[int, int, int]]] = {
    "SGD": (ladder(), train, FROM_LAYERS),
    "AdamW for-loop": (ladder("AdamW for-loop"), train, FROM_LAYERS),
    "AdamW foreach": (ladder("AdamW foreach"), train, FROM_LAYERS),
    "AdamW fused": (ladder("AdamW fused"), train, FROM_LAYERS),
    "autocast bf16": (ladder("AdamW foreach"), mixed, FROM_LAYERS),
    "full checkpointing": (ladder("AdamW fused", every=1), train, FROM_LAYERS),
    "full checkpointing, autocast": (ladder(every=1), mixed, FROM_LAYERS),
    "every 2nd": (ladder(every=2), train, (2, 4, 8)),
    "selective": (ladder(change=keep_matmuls), train, FROM_LAYERS),
    "frozen half": (ladder("AdamW foreach", freeze_half), train, (4, 6, 10)),
    "adapters on a frozen base": (
        ladder("AdamW fused", only_adapters, adapter=4),
        train,
        FROM_LAYERS,
    ),
    "clipped": (ladder(), functools.partial(train, clip=True), FROM_LAYERS),
}


def assert_allocator(extended: Measurement, whole: Measurement) -> None:
    """A GPU's own words: of the deep step, not of a shallow one."""
    assert set(extended.allocator_bytes) == set(whole.allocator_bytes)
    if whole.reserved_bytes is None:
        return
    assert abs(whole.reserved_bytes - extended.reserved_bytes) <= 2 * MIB, "a segment at most"
    assert extended.reserved_bytes >= extended.allocator_bytes["allocated peak"]
    assert extended.allocator_bytes["allocated peak"] >= extended.peak_bytes
    assert extended.host_bytes == whole.host_bytes


def assert_same(extended: Measurement, whole: Measurement) -> None:
    """Peak, its phase, categories, and every message of the step."""
    assert extended.peak_bytes == whole.peak_bytes
    assert extended.peak_phase == whole.peak_phase
    assert extended.breakdown == whole.breakdown
    assert stream(extended.timeline, True) == stream(whole.timeline, True), "each block's own end"
    assert_allocator(extended, whole)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_an_extended_step_is_the_whole_step(technique: str, device: str) -> None:
    build_at, step, depths = TECHNIQUES[technique]
    extended = extrapolate(build_at, step, layers=12, from_layers=depths, device=device)
    assert_same(extended, simulate(lambda: build_at(12), step, device=device))
    assert extended.evidence is Evidence.SIMULATED
    assert extended.notes[-1].startswith("Extended from {}, {} and {} layers to 12".format(*depths))


@pytest.mark.parametrize(("device", "depth"), [("cpu", 48), ("H100", 96)])
def test_on_both_sides_of_a_crossing(device: str, depth: int) -> None:
    """The peak of shallow models lies in the loss, of deep ones in the optimizer's step."""
    build_at = ladder("AdamW foreach", every=1)
    small = [simulate(lambda n=n: build_at(n), train, device=device) for n in (3, 4)]
    assert {found.peak_phase for found in small} == {"loss"}
    for layers, phase in [(9, "loss"), (depth, "optimizer step")]:
        extended = extrapolate(build_at, train, layers=layers, device=device)
        assert_same(extended, simulate(lambda n=layers: build_at(n), train, device=device))
        assert extended.peak_phase == phase
    naive = small[0].peak_bytes + (depth - 3) * (small[1].peak_bytes - small[0].peak_bytes)
    libraries = extended.breakdown[Category.OTHER]  # cuBLAS's workspaces, alike at every depth
    assert naive - libraries < 0.95 * (extended.peak_bytes - libraries)


def test_what_a_gpu_reserves_and_the_host_keeps_is_that_of_the_deep_step() -> None:
    def build_at(layers: int) -> tuple[nn.Module, Any]:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers)))
        return model, OffloadedOptimizer(torch.optim.AdamW(model.parameters()))

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.zeros(512, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    extended = extrapolate(build_at, step, layers=24, device="H100")
    assert extended.reserved_bytes >= 24 * 8 * MIB, "weights and gradients of all layers"
    assert extended.host_bytes >= 24 * 16 * MIB, "an fp32 copy, its gradient and two moments"
    assert_allocator(extended, simulate(lambda: build_at(24), step, device="H100"))


def test_like_blocks_that_end_in_no_order_are_told() -> None:
    """Sums are right all the same; the note says that the places are a guess."""

    def build_at(layers: int) -> tuple[nn.Module, Any]:
        return nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers))), None

    def step(model: nn.Module, _: Any) -> None:
        for index, _layer in enumerate(model):
            blocks = [torch.empty(1024), torch.empty(1024)]
            blocks.pop(index % 2)
            blocks.pop()

    extended = extrapolate(build_at, step, layers=24, device="H100")
    assert "is taken to be the oldest" in extended.notes[-1]
    assert extended.peak_bytes == simulate(lambda: build_at(24), step, device="H100").peak_bytes
    assert "oldest" not in str(extrapolate(ladder(), train, layers=24, device="H100").notes)


@pytest.mark.parametrize("layers", [FROM_LAYERS[-1] - 1, FROM_LAYERS[-1]])
def test_a_depth_within_reach_is_simulated_whole(layers: int) -> None:
    found = extrapolate(ladder(), train, layers=layers, device="cpu")
    assert found.breakdown == simulate(lambda: ladder()(layers), train, device="cpu").breakdown
    assert found.notes == ()


def test_a_budget_is_held_against_the_deep_step_only() -> None:
    whole = extrapolate(ladder(), train, layers=24)
    inside = budget(whole.peak_bytes)
    assert extrapolate(ladder(), train, layers=24, within=inside).notes == whole.notes
    assert whole.notes[0].startswith("Fits")
    with pytest.raises(OverBudgetError, match="during"):
        extrapolate(ladder(), train, layers=24, within=budget(whole.peak_bytes - 1))


@pytest.mark.parametrize("every", [2, 3, 6])
def test_every_kth_layer_at_unaligned_depths_is_refused(every: int) -> None:
    with pytest.raises(ValueError, match=r"3, 4 and 7 layers cannot be extended.*lie k apart"):
        extrapolate(ladder(every=every), train, layers=12, device="cpu")


def test_layers_of_different_shape_are_refused() -> None:
    def build_at(layers: int) -> tuple[nn.Module, Any]:
        model = nn.Sequential(*(nn.Linear(8, 8 * (n % 3 + 1)) for n in range(layers)))
        for n, layer in enumerate(model):
            layer.in_features = 8
            layer.weight = nn.Parameter(torch.empty(8, 8 + n * n))
        return model, None

    def step(model: nn.Module, _: Any) -> None:
        sum((layer.weight.sum() for layer in model), torch.zeros(())).backward()

    with pytest.raises(ValueError, match=r"no repetitions of the same layers: they part at"):
        extrapolate(build_at, step, layers=12, device="cpu")


@pytest.mark.parametrize(
    ("depths", "layers", "problem"),
    [
        ((2, 4, 8), 13, r"repeat every 2 layers, and 8 and 13 must lie"),
        ((2, 4, 7), 12, r"whole repetitions above 2"),
        ((3, 5, 6), 12, r"two or more whole repetitions above 3"),
        ((4, 3, 7), 12, r"three rising numbers"),
        ((3, 4), 12, r"three rising numbers"),
        ((3, 4, 7), 0, r"nothing to simulate at 0"),
    ],
)
def test_depths_that_make_no_line(depths: Any, layers: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        extrapolate(ladder(), train, layers=layers, from_layers=depths)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_is_extended_block_by_block(device: str) -> None:
    """On a CPU none is: the working memory of its kernels at 401 samples is on no line."""
    build_at = ladder("AdamW foreach", every=1)
    extended = extrapolate(build_at, mixed, layers=4, batch=401, device=device)
    whole = simulate(lambda: build_at(4), functools.partial(mixed, batch=401), device=device)
    assert_same(extended, whole)
    said = [
        n for n in extended.notes if n.startswith("Extended from 128, 256 and 384 samples to 401,")
    ]
    assert len(said) == (device != "cpu")


def test_depth_and_batch_together() -> None:
    extended = extrapolate(ladder(), train, layers=9, batch=500)
    whole = simulate(lambda: ladder()(9), functools.partial(train, batch=500))
    assert_same(extended, whole)
    assert [note[:14] for note in extended.notes[1:]] == ["Extended from "] * 2


def test_a_step_that_changes_with_the_batch_is_refused() -> None:
    def in_parts(model: nn.Module, optimizer: Any, batch: int) -> None:
        for _ in range(batch // 128):
            train(model, optimizer, 128)

    def scores(model: nn.Module, _: Any, batch: int) -> None:
        (model.embed.weight.sum() * torch.ones(batch, batch)).sum().backward()

    with pytest.raises(ValueError, match=r"128, 256 and 384 samples cannot be extended.*number of"):
        extrapolate(ladder(), in_parts, layers=1, batch=512)
    with pytest.raises(ValueError, match=r"A block takes .* bytes: no line"):
        extrapolate(ladder(), scores, layers=1, batch=512)
