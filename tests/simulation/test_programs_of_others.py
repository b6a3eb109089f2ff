"""Programs that bring code of their own or of a library's: simulated, or a sentence with its place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils import is_torch_cuda_available

from utils.memory import Category
from utils.simulation import SimulationError, simulate
from utils.simulation.cublas import workspace_bytes

A100 = "A100 80GB"
LIBRARY = """
def clipped(loss):
    if loss > 10:  # a value
        return loss * 0
    return loss
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A library where libraries lie, in a folder called site-packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("a_library")
    del sys.modules["a_library"]


def linear() -> nn.Module:
    return nn.Linear(1024, 1024).to("cuda")


def test_a_library_that_asks_is_named_with_the_line_that_called_it(library: ModuleType) -> None:
    def step(model: nn.Module, _: Any) -> None:
        library.clipped(model(torch.ones(4, 1024, device="cuda")).sum()).backward()

    said = r"a_library.py, line 3 .*called at test_programs_of_others.py, line \d+"
    with pytest.raises(SimulationError, match=said):
        simulate(linear, step, device=A100)
    assert simulate(linear, step, device=A100, values=True).peak_bytes > 0


class Doubled(torch.autograd.Function):
    """Keeps a tensor for backward, as the program's own formula says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.repeat(2, 1))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (kept,) = ctx.saved_tensors
        return grads[0] * kept[: len(grads[0])]


def test_a_formula_of_the_programs_own_keeps_what_it_keeps() -> None:
    def step(model: nn.Module, _: Any) -> None:
        Doubled.apply(model(torch.ones(64, 1024, device="cuda"))).sum().backward()

    timeline = simulate(linear, step, device=A100).timeline
    kept = [a.bytes for a in timeline.allocations if a.category is not Category.TEMPORARIES]
    assert 2 * 64 * 1024 * 4 in kept, "what save_for_backward was given is not counted as kept"


def test_a_model_that_the_step_moves_to_the_host_and_back() -> None:
    alive: list[int] = []

    def step(model: nn.Module, _: Any) -> None:
        with torch.no_grad():
            alive.append(torch.cuda.memory_allocated())
            model.to("cpu")
            alive.append(torch.cuda.memory_allocated())
            model.to("cuda")
            alive.append(torch.cuda.memory_allocated())
            model(torch.ones(1, 1024, device="cuda"))

    found = simulate(linear, step, device=A100)
    weights = 4 * (1024 * 1024 + 1024)
    libraries = alive[-2]  # cuBLAS's workspace stays
    assert libraries == workspace_bytes((8, 0))
    assert alive[-3:] == [weights + libraries, libraries, weights + libraries]
    assert found.host_bytes >= weights


def test_what_transformers_hears_of_gpus_ends_with_the_simulation() -> None:
    heard: list[bool] = []

    def step(model: nn.Module, _: Any) -> None:
        heard.append(is_torch_cuda_available())
        model(torch.ones(1, 1024)).sum().backward()

    is_torch_cuda_available.cache_clear()
    simulate(linear, step, device=A100)
    assert heard[-1] and is_torch_cuda_available() == torch.cuda.is_available()
