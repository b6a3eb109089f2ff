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
    """The hooks name the layer with the outlier, and how far one scale is off there."""
    batch = {"input_ids": torch.randint(64, (2, 33))}  # 66 tokens: no whole blocks
    batch["labels"] = batch["input_ids"]
    calm = run_block(text, model=small_llama(), batch=batch)["report"]
    assert len(calm) == 42, f"three products of 14 linear layers, not {len(calm)}"
    outputs = {name: off for (name, what), off in calm.items() if what == "output"}
    assert all(0 < off < 0.1 for each in outputs.values() for off in each), f"calm: {outputs}"
    for (name, what), (
        default,
        one,
        *_,
    ) in calm.items():  # gradients alone go in E5M2, which errs more
        assert default == one if what == "output" else default > 1.2 * one, f"{name}, {what}"
    model = small_llama()
    feedforward = "model.layers.1.mlp"
    with torch.no_grad():  # in exact arithmetic the same model
        model.get_submodule(f"{feedforward}.up_proj").get_parameter("weight")[3] *= 1e7
        model.get_submodule(f"{feedforward}.down_proj").get_parameter("weight")[:, 3] /= 1e7
    wild = run_block(text, model=model, batch=batch)["report"]
    outputs = {name: off for (name, what), off in wild.items() if what == "output"}
    named = max(outputs, key=lambda name: outputs[name][1] - outputs[name][4])
    assert named == f"{feedforward}.down_proj", f"it names {named}"
    _, one, _, _, blocks = outputs[named]
    assert one > 0.9 and one > 1.5 * blocks, f"one scale loses all, blocks less: {outputs[named]}"
    assert all(p.grad is None for p in model.parameters()), "no gradient is left behind"
    _squares_have_a_scale_each(
        run_block(text, model=_Zeros(), batch={"x": batch["input_ids"]})["small"]
    )
    zeros = run_block(text, model=_Zeros(), batch={"x": batch["input_ids"]})["report"]
    assert ("layer", "output") not in zeros, "zeros are passed"


def _squares_have_a_scale_each(small: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(256, 256)
    x[3, 7] = 1e7
    back = small(x, 128, 128)
    assert back[:128, :128].count_nonzero() == 1, "the outlier takes its square"
    assert (back[128:] - x[128:]).norm() < 0.05 * x[128:].norm(), "and no other"
    assert torch.equal(small(x.T, 128, 128), back.T), "either way round"


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

    Where torchao is not installed a stand-in with its names takes its place: layers whose
    operands are rounded to E4M3 with one scale.
    """
    batch = {"input_ids": torch.randint(64, (2, 32))}
    batch["labels"] = batch["input_ids"]
    assert all(f" {side}" in text for side in (1024, 4096)), "the page names the bounds"
    plain, model = small_llama(), small_llama()
    wanted = plain(**batch).loss.item()
    before = [p.clone() for p in model.parameters()]
    with _torchao(), _eager(), TemporaryDirectory() as folder, chdir(folder):
        made = run_block(text.replace("> 1024 or", "> 16 or"), model=model, data=[batch])
        again = small_llama()
        again.load_state_dict(torch.load("weights.pt"))
    may = made["may_be_small"]
    sides = ((32, 64), (64, 16), (16, 4112), (40, 64), (64, 4100), (16, 4096))  # outputs, inputs
    shapes = [nn.Linear(inputs, outputs, device="meta") for outputs, inputs in sides]
    assert [may(each, "up") for each in shapes] == [True] * 3 + [False] * 3, "the bounds"
    spared = ("lm_head", "layers.0.mlp.router", "layers.0.mlp.gate")
    assert not any(may(shapes[0], name) for name in spared), "head and routers stay"
    assert may(shapes[0], "layers.0.mlp.gate_proj"), "a SwiGLU's does not"
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


def block_3(text: str) -> None:
    """Each linear layer of a block is exchanged with its weights; the last blocks stay in 16 bits.

    Transformer Engine needs a GPU: a stand-in with its names notes whether a recipe is on.
    """
    assert "NVFP4BlockScaling" in text and '"cuda"' in text, "the page names both"
    batch = {"input_ids": torch.randint(64, (2, 32))}
    batch["labels"] = batch["input_ids"]
    for wide in (0, 1):
        model, plain = small_llama(), small_llama()
        blocks, before = model.model.layers, [p.clone() for p in plain.parameters()]
        cpu = text.replace("MXFP8BlockScaling(), 0", f"MXFP8BlockScaling(), {wide}")
        with _transformer_engine() as seen, TemporaryDirectory() as folder, chdir(folder):
            names = {"model": model, "blocks": blocks, "data": [batch]}
            made = run_block(cpu.replace('"cuda"', '"cpu"'), **names)
            small_llama().load_state_dict(torch.load("weights.pt"))
            mixture = nn.ModuleDict({"router": nn.Linear(32, 32), "up": nn.Linear(32, 32)})
            made["exchange"](mixture)
        kinds = [type(part) is nn.Linear for part in mixture.children()]
        assert kinds == [True, False], "a router stays"
        linears = sum(isinstance(part, nn.Linear) for part in model.model.modules())
        assert len(seen) == linears == 14, f"{len(seen)} of {linears} layers take the recipe"
        assert seen == [True] * (14 - 7 * wide) + [False] * 7 * wide, f"the last {wide} in 16 bits"
        assert type(model.lm_head) is nn.Linear, "the head stays"
        assert abs(made["loss"].item() - plain(**batch).loss.item()) < 0.05, "the same weights"
        pairs = zip(before, model.parameters(), strict=True)
        assert all(not torch.equal(a, b) for a, b in pairs), "every parameter took the step"


def block_4(text: str) -> None:
    """What grows is named, by the share that an old scale would cut; what stays as it was is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    worst = run_block(text, model=model)["worst"]
    x = torch.randn(32, 64)
    model(x)
    assert not worst, "a first step has no old scale"
    model(x)
    assert {name: share.item() for name, share in worst.items()} == {"0": 0, "2": 0}
    with torch.no_grad():
        model.get_submodule("0").get_parameter("weight").mul_(64)
    model(x)
    model(x)
    assert worst["0"] == 0 and worst["2"] > 0.1, f"the second layer's input has grown: {worst}"


@contextmanager
def _transformer_engine() -> Iterator[list[bool]]:
    """Stand-ins for what the block imports; what comes out is whether each layer's forward had a recipe."""
    seen: list[bool] = []
    on: list[bool] = [False]

    class Linear(nn.Linear):
        """Notes whether a recipe is on."""

        def __init__(self, inputs: int, outputs: int, *, params_dtype: Any, **like: Any) -> None:
            super().__init__(inputs, outputs, dtype=params_dtype, **like)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            """(..., inputs) -> (..., outputs)."""
            seen.append(on[-1])
            return super().forward(input)

    @contextmanager
    def autocast(enabled: bool, recipe: Any = None) -> Iterator[None]:
        assert recipe == "MXFP8" or not enabled
        on.append(enabled)
        yield
        on.pop()

    names: dict[str, Any] = {
        name: ModuleType(name)
        for name in (
            "transformer_engine",
            "transformer_engine.pytorch",
            "transformer_engine.common",
            "transformer_engine.common.recipe",
        )
    }
    names["transformer_engine"].pytorch = names["transformer_engine.pytorch"]
    names["transformer_engine.pytorch"].Linear = Linear
    names["transformer_engine.pytorch"].autocast = autocast
    names["transformer_engine.common.recipe"].MXFP8BlockScaling = lambda: "MXFP8"
    sys.modules.update(names)
    try:
        yield seen
    finally:
        for name in names:
            del sys.modules[name]


class Float8Tensors(nn.Linear):
    """What stands in for torchao's layer: rounds input and weight, a scale a tensor."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., inputs) -> (..., outputs)."""
        return _rounded(input) @ _rounded(self.weight).T


def _rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.detach().abs().max() / 448
    return x + ((x.detach() / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale - x).detach()


def _convert(
    model: nn.Module, *, config: Any, module_filter_fn: Callable[[nn.Module, str], bool]
) -> None:
    assert not config["enable_fsdp_float8_all_gather"], f"one process gathers: {config}"
    gradients = config["cast_config_grad_output"]
    assert gradients == {"target_dtype": torch.float8_e4m3fn}, f"gradients are in {gradients}"
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear) and module_filter_fn(part, name):
            part.__class__ = Float8Tensors


@contextmanager
def _torchao() -> Iterator[None]:
    if importlib.util.find_spec("torchao") is not None:
        yield
        return
    inner: Any = ModuleType("torchao.float8")
    inner.CastConfig = inner.Float8LinearConfig = dict
    inner.precompute_float8_dynamic_scale_for_fsdp = None  # of sharded weights: not called here
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
