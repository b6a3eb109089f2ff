"""`sweep` against whole simulations of each batch size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from utils.models import Transformer, TransformerConfig
from utils.simulation import simulate, sweep
from utils.simulation.devices import simulated_device
from utils.techniques import checkpoint_blocks
from utils.units import MIB, Evidence

pytestmark = pytest.mark.long

LENGTH = 128


def build(layers: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    config = TransformerConfig(vocabulary=512, hidden=128, layers=layers, heads=4, feedforward=256)
    model = checkpoint_blocks(Transformer(config))
    return model, torch.optim.AdamW(model.parameters())


def step(model: Any, optimizer: Any, sequences: int) -> None:
    tokens = torch.zeros(sequences, LENGTH, dtype=torch.long)
    optimizer.zero_grad()
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def test_each_batch_is_that_of_a_whole_simulation() -> None:
    found = sweep(
        build,
        step,
        layers=9,
        batches=[7, 2, 1, 16],
        device="RTX 4090",
        items=LENGTH,
        unit="tokens",
        name="tiny",
    )
    assert list(found) == [7, 2, 1, 16]
    for batch, extended in found.items():
        whole = simulate(lambda: build(9), lambda m, o, b=batch: step(m, o, b), device="RTX 4090")
        assert extended.peak_bytes == whole.peak_bytes
        assert extended.breakdown == whole.breakdown
        assert extended.peak_phase == whole.peak_phase
        assert extended.reserved_bytes is not None and whole.reserved_bytes is not None
        assert abs(extended.reserved_bytes - whole.reserved_bytes) <= 2 * MIB, "a segment at most"
        card = simulated_device("RTX 4090")
        own = card.verdict(extended.peak_bytes, extended.reserved_bytes)
        assert extended.notes[0] == own, "the verdict of its own peak"
        assert (extended.items, extended.unit) == (batch * LENGTH, "tokens")
        assert extended.evidence is Evidence.SIMULATED


def test_on_a_cpu_each_batch_is_simulated_as_it_is() -> None:
    """Its kernels' working memory is on no line."""
    found = sweep(build, step, layers=5, batches=[13, 3], device="cpu")
    for batch, extended in found.items():
        whole = simulate(lambda: build(5), lambda m, o, b=batch: step(m, o, b), device="cpu")
        assert (extended.peak_bytes, extended.breakdown) == (whole.peak_bytes, whole.breakdown)
        assert not any("samples" in note for note in extended.notes)


def test_what_cannot_be_swept() -> None:
    with pytest.raises(ValueError, match="batches is"):
        sweep(build, step, layers=9, batches=[])
    with pytest.raises(ValueError, match="batches is"):
        sweep(build, step, layers=9, batches=[0])
