"""What is imported for the first time inside of a simulation is as it is outside."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from utils import simulate

NAME = "imported_inside"
MODULE = "import torch\ntable = torch.arange(4) * 2\nclass Kept:\n    scale = torch.ones(1)\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / f"{NAME}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield NAME
    sys.modules.pop(NAME, None)


def by_name() -> Any:
    return importlib.import_module(NAME)


def by_statement() -> Any:
    import imported_inside  # pyright: ignore[reportMissingImports]

    return imported_inside


def by_what_it_holds() -> Any:
    from imported_inside import Kept, table  # pyright: ignore[reportMissingImports]

    return sys.modules[Kept.__module__] if table is not None else None


@pytest.mark.parametrize("imported", [by_name, by_statement, by_what_it_holds])
@pytest.mark.parametrize("device", ["cpu", "T4"])
def test_its_tensors_have_data_and_are_not_counted(
    imported: Callable[[], Any], device: str, module: str
) -> None:
    def peak_bytes(first: Callable[[], Any]) -> int:
        def build() -> tuple[nn.Module, torch.optim.Optimizer]:
            first()
            model = nn.Linear(64, 64)
            return model, torch.optim.SGD(model.parameters())

        def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return simulate(build, step, device=device).peak_bytes

    with_import = peak_bytes(imported)
    found = sys.modules[module]
    assert found.table.tolist() == [0, 2, 4, 6] and float(found.Kept.scale) == 1
    assert with_import == peak_bytes(lambda: None)
