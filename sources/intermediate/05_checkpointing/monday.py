"""Runs the lines of lesson 05's last cell."""

from __future__ import annotations

import contextlib
import io
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from utils.lessons.blocks import run_block, small_llama
from utils.memory import measure
from utils.models import Transformer, TransformerConfig
from utils.simulation import simulate
from utils.techniques import checkpoint_blocks

from .repeatable import NotRepeatableError, check_repeatable
from .step_costs import kept_bytes

SMALL = TransformerConfig(vocabulary=64, hidden=64, layers=6, heads=4, feedforward=176)
BATCH = torch.arange(8 * 128).reshape(8, 128) % 64


def _model(layers: int = 6) -> Transformer:
    torch.manual_seed(0)
    return Transformer(replace(SMALL, layers=layers))


def _peak_and_loss(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> tuple[int, float]:
    def step() -> None:
        model.zero_grad()
        loss_of(model).backward()

    peak = measure(step, model=model, timed_steps=0).peak_bytes
    return peak, float(loss_of(model).detach())


def _next_token_loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(BATCH[:, :-1]).flatten(0, 1), BATCH[:, 1:].flatten())


def _loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def block_1(text: str) -> None:
    """The peak by moments, on a simulated GPU: the highest that is printed is the step's own."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Transformer(replace(SMALL, hidden=1024, heads=16, feedforward=2816))
        checkpoint_blocks(model)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        told.append(io.StringIO())
        names = {"model": model, "optimizer": optimizer, "loss_of": _loss_of}
        with contextlib.redirect_stdout(told[-1]):
            run_block(text, batch=torch.randint(0, 64, (8, 1025)), **names)

    told: list[io.StringIO] = []
    run = simulate(build, step, device="A100 40GB")
    lines = [line.rsplit(maxsplit=2) for line in told[-1].getvalue().splitlines()]
    names = ["loss peak", *(f"tooth {n}" for n in reversed(range(6))), "rest", "optimizer step"]
    assert [name for name, *_ in lines] == names, f"it prints {lines}"
    highest, peak = max(float(size) for _, size, _ in lines), run.peak_bytes / 2**30
    assert abs(highest - peak) < 0.01 < peak, f"{highest} GiB printed, {peak:.2f} GiB simulated"


def block_2(text: str) -> None:
    """Every block recomputed, gradients compared by the lines: less than half of the peak.

    Blocks that draw numbers without torch are caught, as `check_repeatable` catches them; so is one
    that gives NaN only where it runs again.
    """
    model = _model()
    peak, loss = _peak_and_loss(model, _next_token_loss)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run_block(text, model=model, loss_of=_loss_of, batch=BATCH)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    assert not left, f"gradients are left in {left}"
    lower, again = _peak_and_loss(model, _next_token_loss)
    assert lower < peak / 2, f"the peak falls from {peak:,} bytes to {lower:,}: less than by half"
    assert loss == again, f"the loss was {loss}, and is {again}"
    for generator, seed in ((random.random, random.seed), (np.random.random, np.random.seed)):
        seed(1)
        _caught(text, generator)
    _nan_caught(text)


class _OwnDropout(nn.Module):
    """Drops columns by numbers that torch does not draw."""

    def __init__(self, generator: Callable[[], float]) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([self.generator() > 0.5 for _ in range(x.shape[-1])])


def _caught(text: str, generator: Callable[[], float]) -> None:
    model = _model(layers=2)
    block: Any = model.blocks[0]
    own = nn.Sequential(_OwnDropout(generator), block.feedforward)
    block.feedforward = own
    try:
        check_repeatable(own, torch.ones(4, 64))
    except NotRepeatableError:
        pass  # expected: it draws another mask at each run
    else:
        raise AssertionError("check_repeatable passes a block that draws other masks")
    try:
        run_block(text, model=model, loss_of=_loss_of, batch=BATCH)
    except AssertionError as error:
        assert "another step than before" in str(error), f"it is caught by another line: {error}"
    else:
        raise AssertionError("a block that draws numbers without torch passes the comparison")


class _NanAgain(nn.Module):
    """The identity, except in one call: the second run of the checkpointed step."""

    PLAIN_STEPS, FORWARD = 2, 1

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (math.nan if self.calls > self.PLAIN_STEPS + self.FORWARD else 1.0)


def _nan_caught(text: str) -> None:
    model = _model(layers=2)
    block: Any = model.blocks[0]
    again = _NanAgain()
    block.feedforward = nn.Sequential(again, block.feedforward)
    try:
        run_block(text, model=model, loss_of=_loss_of, batch=BATCH)
    except AssertionError as error:
        assert "another step than before" in str(error), f"it is caught by another line: {error}"
        assert again.calls == 4, f"it ran {again.calls} times: two plain steps, and two runs of one"
    else:
        raise AssertionError("gradients of NaN pass the comparison")


def block_3(text: str) -> None:
    """Matrix products are kept: none runs again, the peak is lower, the gradients are the same."""
    found = []
    for change in (None, text):
        model = _model()
        if change:
            run_block(change, model=model)
        peak, _ = _peak_and_loss(model, _next_token_loss)
        with FlopCounterMode(display=False) as counter:
            _next_token_loss(model).backward()
        products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
        found.append((peak, products, [p.grad for p in model.parameters()]))
    (peak, products, gradients), (lower, again, others) = found
    assert lower < 0.9 * peak, f"the peak falls from {peak:,} bytes to {lower:,}: too little"
    assert products == again, f"{products:,} operations of products were {again:,}"
    torch.testing.assert_close(others, gradients, rtol=0, atol=0)


def block_4(text: str) -> None:
    """The loss in PyTorch's chunks: the same with ignored labels, at less than half of the peak."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(64, 4096, bias=False), torch.randn(512, 64, requires_grad=True)
    labels = torch.randint(0, 4096, (512,))
    labels[:100] = -100

    def whole() -> Tensor:
        return F.cross_entropy(head(hidden), labels)

    def chunked() -> Tensor:
        return run_block(text, hidden=hidden, head=head, labels=labels)["loss"]

    def gradients(loss_of: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss_of(), [hidden, head.weight])

    torch.testing.assert_close(chunked(), whole())
    torch.testing.assert_close(gradients(chunked), gradients(whole))
    peak, lower = (
        measure(partial(gradients, f), model=head, timed_steps=0).peak_bytes
        for f in (whole, chunked)
    )
    assert lower < peak / 2, f"the peak falls from {peak:,} bytes to {lower:,}: less than by half"


def block_5(text: str) -> None:
    """A model of transformers: its own switch lowers the peak, the loss stays."""
    model = small_llama(num_hidden_layers=6)

    def loss_of(model: nn.Module) -> Tensor:
        return model(input_ids=BATCH, labels=BATCH).loss

    peak, loss = _peak_and_loss(model, loss_of)
    run_block(text, model=model)
    lower, again = _peak_and_loss(model, loss_of)
    assert lower < 0.6 * peak, f"the peak falls from {peak:,} bytes to {lower:,}: too little"
    assert loss == again, f"the loss was {loss}, and is {again}"


def block_6(text: str) -> None:
    """The compiler's dial: fewer bytes wait for backward than by its default, the loss stays."""
    model, found = _model(layers=1), []
    before, plain = functorch_config.activation_memory_budget, torch.compile
    # The partitioner decides; a backend that only partitions needs no C++ compiler.
    torch.compile = partial(plain, backend="aot_eager_decomp_partition")  # type: ignore[assignment]
    try:
        for lines in ("import torch\nmodel = torch.compile(model)", text):
            torch.compiler.reset()
            loss_of = partial(_next_token_loss, run_block(lines, model=model)["model"])
            loss = float(loss_of().detach())  # compiles
            found.append((kept_bytes(model, loss_of), loss))
    finally:
        torch.compile, functorch_config.activation_memory_budget = plain, before
        torch.compiler.reset()
    (default, loss), (lower, again) = found
    assert lower < 0.8 * default, f"{default:,} bytes kept by default, {lower:,} by the budget"
    assert abs(again - loss) < 1e-5, f"the loss was {loss}, and is {again}"
