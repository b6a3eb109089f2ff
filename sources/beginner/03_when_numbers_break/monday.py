"""Runs the blocks of lesson 03's last cell on something small, and asserts what they promise."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import os
import tempfile
from contextlib import chdir
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from utils.lessons.blocks import run_block

CPU = torch.device("cpu")


class Overflows(nn.Module):
    """A module that makes an infinity of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape, returned with infinities."""
        return x / torch.zeros_like(x)


class ByKeyword(nn.Module):
    """Calls and answers as modules of transformers do: by keyword, with a dict inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Overflows()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape, returned with infinities."""
        return self.inner(x=x)


def block_1(text: str) -> None:
    """The hooks name the module that made the first infinity, the input that brought a NaN, and zeros."""
    for layer, sick, said in [
        (Overflows(), 1.0, "output of 1 (Overflows)"),
        (ByKeyword(), 1.0, "output of 1.inner (Overflows)"),
        (nn.ReLU(), math.nan, "input of 0 (Linear)"),
    ]:
        model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2))
        hooks = run_block(text, model=model)["hooks"]
        told = _raised(model, torch.full((2, 4), sick))
        assert said in told, f"the hooks say {told!r}, not {said!r}"
        for each in hooks:
            each.remove()
        model(torch.full((2, 4), sick))  # without hooks nothing raises
    _names_a_gradient(text)
    _lets_masks_pass(text)
    _names_what_is_dead(text)


def _names_a_gradient(text: str) -> None:
    """Forward is finite, backward is not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    run_block(text, model=model)
    try:
        (model(torch.ones(2, 4)).sum() * math.inf).backward()
    except FloatingPointError as error:
        assert "gradient of" in str(error)
        return
    raise AssertionError("an infinite gradient passes")


def _lets_masks_pass(text: str) -> None:
    """An attention mask holds -inf, and the model is healthy."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    run_block(text, model=encoder)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    assert encoder(torch.randn(2, 5, 8), mask=mask).isfinite().all()
    padding = torch.tensor([[False] * 4 + [True]] * 2)
    assert encoder(torch.randn(2, 5, 8), src_key_padding_mask=padding).isfinite().all()


def _names_what_is_dead(text: str) -> None:
    """Weights that are NaN are told before any hook; a module that puts out zeros is named."""
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.ReLU())
    nn.init.constant_(first.bias, -9.0)
    run_block(text, model=model)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        model(torch.zeros(2, 4))
    assert "output of 1 (ReLU) is all zeros" in told.getvalue()
    nn.init.constant_(first.bias, math.nan)
    try:
        run_block(text, model=model)
    except FloatingPointError as error:
        assert "0.bias first" in str(error)
        return
    raise AssertionError("weights with a NaN pass")


def block_2(text: str) -> None:
    """The twins differ where fp16 overflows, and the model keeps its own gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    inputs, labels = 1e5 * torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
    names = {"model": model, "recorded": [(inputs, labels)] * 2, "dtype": torch.float16}
    names |= {"device": CPU, "scale": 2.0**16, "loss_function": F.cross_entropy}
    names["make_optimizer"] = functools.partial(torch.optim.SGD, lr=1e-9)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        run_block(text, **names)
    *low, full, again = told.getvalue().splitlines()
    assert all("float16 step" in line and "loss nan" in line for line in low) and len(low) == 2
    assert "fp32 step 0" in full and "fp32 step 1" in again and "nan" not in full + again
    assert all(p.grad is None for p in model.parameters())


def block_3(text: str) -> None:
    """A NaN in the data and an overflow of gradients leave weights and statistics finite, and are counted."""
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        before = [p.clone() for p in model.parameters()]
        spoiled = torch.randn(32, 8).index_fill(0, torch.tensor(3), math.nan)
        rows = [torch.randn(32, 8) for _ in range(4)]
        batches = [(x, (x[:, 0] > 0).long()) for x in (rows[0], spoiled, *rows[1:])]
        names = _guarded(text, model, batches, dtype, sick={1})
        assert names["bad_batches"] == 1, (
            "one batch has a NaN, and the block counts what it leaves out"
        )
        assert names["skipped_steps"] == 1, "one of four steps had gradients that are not finite"
        assert names["in_a_row"] == 0, "the last step was fine"
        kept = [*model.parameters(), *model.buffers()]
        assert all(t.isfinite().all() for t in kept), f"{dtype}: a NaN went into the model"
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved, f"{dtype}: the good batches should have changed the weights"
        if dtype is torch.float16:
            assert names["scaler"].get_scale() == 2.0**15, "the skipped step halved the scale"
        try:
            _guarded(text, model, batches[:1] * 20, dtype, sick=set(range(20)))
        except FloatingPointError as error:
            count = 17 if dtype is torch.float16 else 10  # from 2^16 to below 1
            assert f"{count} steps in a row" in str(error)
        else:
            raise AssertionError(f"{dtype}: a run that never steps goes on")


def _guarded(
    text: str, model: nn.Module, batches: list[Any], dtype: torch.dtype, sick: set[int]
) -> dict[str, Any]:
    """The guarded loop on some batches; steps in `sick` have gradients that are not finite."""
    calls = itertools.count()

    def loss_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels) * (math.inf if next(calls) in sick else 1.0)

    return run_block(
        text,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_function=loss_function,
        batches=batches,
        device=CPU,
        dtype=dtype,
    )


def block_4(text: str) -> None:
    """transformers: losses and norms of each step are in the log, and a NaN ends the run."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    here = text.replace("bf16=True", "bf16=True, use_cpu=True")  # tests hide the GPU
    assert here != text, "the block says bf16=True"
    for sick in (False, True):
        given = torch.randn(24, 8)
        given[0] = math.nan if sick else given[0]
        dataset = [{"inputs": x, "labels": torch.tensor(n % 2)} for n, x in enumerate(given)]
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            trainer = run_block(here, model=Labelled(), dataset=dataset)["trainer"]
        rows = [row for row in trainer.state.log_history if "grad_norm" in row]
        told = [math.isnan(float(row["loss"])) for row in rows]
        assert any(told) == sick, (
            f"data {'with' if sick else 'without'} NaN, and the log says {rows}"
        )
        assert not any(told[:-1]), "the first NaN ends the run"
        assert sick or len(rows) == 3, f"three steps give three rows, not {len(rows)}"


def _raised(model: nn.Module, given: torch.Tensor) -> str:
    """What the hooks say of a forward, "" if they let it pass."""
    try:
        model(given)
    except FloatingPointError as error:
        return str(error)
    return ""


class Labelled(nn.Module):
    """A classifier as the Trainer wants one: it returns its loss when it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """(rows, 8) and (rows,) -> the mean loss and (rows, 2) logits."""
        logits = self.layer(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}
