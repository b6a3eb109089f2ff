"""Runs the blocks of lesson 20's last cell on a small Llama, and asserts what they promise."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from utils.lessons.blocks import run_block, small_llama


def block_1(text: str) -> None:
    """The hooks name the layer with the outlier, and what one scale would lose there."""
    batch = {"input_ids": torch.randint(64, (2, 32))}
    batch["labels"] = batch["input_ids"]
    calm = run_block(text, model=small_llama(), batch=batch)["report"]
    assert len(calm) == 30, f"inputs and gradients of 15 linear layers, not {len(calm)}"
    inputs = {name: lost for (name, what), lost in calm.items() if what == "input"}
    assert all(one < 0.02 for one, _ in inputs.values()), f"a calm model loses little: {inputs}"
    model = small_llama()
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.up_proj").get_parameter("weight")[3] *= 1e7
    wild = run_block(text, model=model, batch=batch)["report"]
    named = max((key for key in wild if key[1] == "input"), key=lambda key: wild[key][0])
    assert named[0] == "model.layers.1.mlp.down_proj", f"it names {named}"
    assert wild[named][0] > 0.5, f"the outlier is told: {wild[named]}"
    assert all(rows <= one for one, rows in wild.values()), f"rows never lose more: {wild}"
    assert all(p.grad is None for p in model.parameters()), "no gradient is left behind"
    zeros = run_block(text, model=_Zeros(), batch={"x": batch["input_ids"]})["report"]
    assert ("layer", "input") not in zeros, "zeros are passed"


class _Zeros(nn.Module):
    """One layer, and zeros that go in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        """(rows, columns) of anything -> a loss of (rows, 16)."""
        return SimpleNamespace(loss=self.layer(torch.zeros(len(x), 16)).square().mean())


def block_2(text: str) -> None:
    """The layers that may be small are converted, the head is not; a step is close to the plain one.

    Where torchao is not installed a stand-in with the two names takes its place: layers whose
    operands are rounded to E4M3 a row.
    """
    batch = {"input_ids": torch.randint(64, (2, 32))}
    batch["labels"] = batch["input_ids"]
    assert "LEAST = 2048" in text, "the page names the shortest side"
    plain, model = small_llama(), small_llama()
    wanted = plain(**batch).loss.item()
    before = [p.clone() for p in model.parameters()]
    with _torchao(), _eager(), TemporaryDirectory() as folder, chdir(folder):
        made = run_block(text.replace("2048", "16"), model=model, batch=batch)
        again = small_llama()
        again.load_state_dict(torch.load("weights.pt"))
    kinds = {name: type(part).__name__ for name, part in model.named_modules()}
    small = [name for name, kind in kinds.items() if "Float8" in kind]
    assert len(small) == 14 and kinds["lm_head"] == "Linear", f"converted: {small}"
    assert abs(made["loss"].item() / wanted - 1) < 0.01, (
        "eight bits give the loss of the plain step"
    )
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(moved), "every parameter took the step"
    pairs = zip(again.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "a model not converted loads them"


class Float8Rows(nn.Linear):
    """What stands in for torchao's layer: rounds input and weight, a scale a row."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., inputs) -> (..., outputs)."""
        return _rounded(input) @ _rounded(self.weight).T


def _rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.detach().abs().amax(-1, keepdim=True) / 448
    return x + ((x.detach() / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale - x).detach()


def _convert(
    model: nn.Module, *, config: Any, module_filter_fn: Callable[[nn.Module, str], bool]
) -> None:
    assert config == "rowwise", f"the page asks for a scale a row, not {config}"
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear) and module_filter_fn(part, name):
            part.__class__ = Float8Rows


@contextmanager
def _torchao() -> Iterator[None]:
    if importlib.util.find_spec("torchao") is not None:
        yield
        return
    inner: Any = ModuleType("torchao.float8")
    inner.Float8LinearConfig = SimpleNamespace(from_recipe_name=lambda name: name)
    inner.convert_to_float8_training = _convert
    names = {"torchao": ModuleType("torchao"), "torchao.float8": inner}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


@contextmanager
def _eager() -> Iterator[None]:
    """A compiler is not everywhere; what is asserted does not depend on it."""
    compile_, torch.compile = torch.compile, lambda model: model
    try:
        yield
    finally:
        torch.compile = compile_
