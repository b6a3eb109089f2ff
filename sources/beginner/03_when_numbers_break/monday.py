"""Runs the blocks of lesson 03's last cell on something small, and asserts what they promise."""

from __future__ import annotations

import math
import os
import tempfile
from contextlib import chdir

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
    """The hooks name the module that made the first infinity, or the input that brought a NaN."""
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


def block_2(text: str) -> None:
    """A NaN in the data and an overflow of gradients leave weights and statistics finite."""
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        before = [p.clone() for p in model.parameters()]
        spoiled = torch.randn(32, 8).index_fill(0, torch.tensor(3), math.nan)
        rows = [torch.randn(32, 8) for _ in range(4)]
        batches = [(x, (x[:, 0] > 0).long()) for x in (rows[0], spoiled, *rows[1:])]
        calls: list[float] = []

        def loss_function(
            logits: torch.Tensor, labels: torch.Tensor, calls: list[float] = calls
        ) -> torch.Tensor:
            calls.append(math.inf if len(calls) == 1 else 1.0)  # the second step's gradients
            return F.cross_entropy(logits, labels) * calls[-1]

        names = run_block(
            text,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_function=loss_function,
            batches=batches,
            device=CPU,
            dtype=dtype,
        )
        assert names["skipped"] == 1, "one batch has a NaN, and the block counts what it leaves out"
        assert len(calls) == 4, "four batches are fine and take a step"
        kept = [*model.parameters(), *model.buffers()]
        assert all(t.isfinite().all() for t in kept), f"{dtype}: a NaN went into the model"
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved, f"{dtype}: the good batches should have changed the weights"


def block_3(text: str) -> None:
    """transformers: losses and norms of each step are in the log, and a NaN is not hidden."""
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
        assert len(rows) == 3, f"three steps give three rows, not {len(rows)}"
        told = any(math.isnan(float(row["loss"])) for row in rows)
        assert told == sick, f"data {'with' if sick else 'without'} NaN, and the log says {rows}"


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
