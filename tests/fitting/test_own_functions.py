"""`fit` on functions of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from utils.fitting import fit
from utils.simulation import simulate

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # other libraries' own
CARD = "RTX 4090"


class Wide(nn.Module):
    """Alike blocks in a list, which hold most of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def own_build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Wide().to("cuda")
    return model, torch.optim.AdamW(model.parameters())


def own_step(model: Any, optimizer: Any) -> None:
    model(torch.randn(4096, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_functions_of_ones_own_get_the_same_answer_and_cures() -> None:
    found = fit(own_build, own_step, card=CARD, name="wide")
    plain = simulate(own_build, own_step, device=CARD)
    assert found.verdict.peak_bytes == plain.peak_bytes and found.verdict.name == "wide"
    saved = {tried.name: tried.saved_bytes for tried in [*found.cures, *found.without_gain]}
    kept_bytes = 8 * 2 * 4096 * 1024 * 4  # what a block's two linear layers and its GELU keep
    assert saved["checkpointing of all blocks"] > 0.7 * kept_bytes
    assert set(saved) == {
        "checkpointing of all blocks", "activations to the host", "fused AdamW", "8-bit AdamW",
    }  # fmt: skip
    lines = [cure.line for tried in found.cures for cure in tried.cures]
    assert any("checkpoint_blocks(model.blocks)" in line for line in lines), (
        "the program's own name"
    )


def test_what_saves_nothing_alone_may_help_where_the_peak_moved_to() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(Wide() for _ in range(8))).to("cuda")
        return model, torch.optim.AdamW(model.parameters())

    def step(model: Any, optimizer: Any) -> None:
        model(torch.randn(1024, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = fit(build, step, card=CARD)
    alone = {tried.name: tried for tried in [*found.cures, *found.without_gain]}
    assert alone["checkpointing of all blocks"].verdict.measurement.peak_phase == "optimizer step"
    assert found.pair in found.pairs
    assert found.pair and found.pair.saved_bytes > max(t.saved_bytes for t in found.cures)


def test_a_cure_that_a_program_cannot_take_says_why() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(64, 64).to("cuda")
        return model, torch.optim.SGD(model.parameters())

    def step(model: Any, optimizer: Any) -> None:
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()

    found = fit(build, step, card=CARD)
    assert "no list of alike blocks" in found.refused["checkpointing of all blocks"]
    assert "SGD" in found.refused["8-bit AdamW"]


def test_an_error_of_ones_own_function_comes_through() -> None:
    def step(model: Any, optimizer: Any) -> None:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        fit(own_build, step, card=CARD)
