"""Runs the blocks of lesson 02's last cell on something small, and asserts what they promise."""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from utils.lessons.blocks import run_block
from utils.memory import Measurement, measure

CPU = torch.device("cpu")
ROWS, WIDTH = 2048, 64


def block_1(text: str) -> None:
    """Plain PyTorch: a lower peak than in fp32, nearly the same loss, fp32 states, and a scale to read."""
    in_fp32 = text.replace("torch.bfloat16)", "torch.bfloat16, enabled=False)")
    assert in_fp32 != text, "the block says torch.bfloat16 where autocast begins"
    (plain, plain_loss, _), (mixed, mixed_loss, dtypes) = (_metered(t) for t in (in_fp32, text))
    saved = 1 - mixed.peak_bytes / plain.peak_bytes
    assert saved > 0.25, f"activations decide here, and the peak fell by {saved:.0%} only"
    gap = abs(mixed_loss / plain_loss - 1)
    assert gap < 0.01, f"the losses of the first step are {gap:.1%} apart"
    assert dtypes == {torch.float32}, f"weights, gradients and states stay in fp32, not {dtypes}"
    assert "scale 1\n" in _printed(text), "bf16 needs no scaler, and the block's scale should say 1"
    with_scaler = re.sub(r"fp16 = .*", "fp16 = True", text)
    assert "scale 65,536\n" in _printed(with_scaler), "fp16 starts at a scale of 65,536"
    try:
        _metered(text, half=True)
    except AssertionError as error:
        assert "masters must be fp32" in str(error), f"another fault: {error}"
    else:
        raise AssertionError("a model in 16 bits should be refused")


def block_2(text: str) -> None:
    """transformers: the Trainer's layers give bf16, and its weights stay in fp32."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    model, seen = Labelled(), set()
    model.layers[0].register_forward_hook(lambda layer, given, out: seen.add(out.dtype))
    dataset = [{"inputs": torch.randn(8), "labels": torch.tensor(n % 2)} for n in range(64)]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        here = text.replace("bf16=not fp16", "bf16=not fp16, use_cpu=True")  # tests hide the GPU
        trainer = run_block(here, model=model, dataset=dataset)["trainer"]
    assert seen == {torch.bfloat16}, f"layers should give bf16 under the Trainer, not {seen}"
    kept = {p.dtype for p in model.parameters()}
    assert kept == {torch.float32}, f"the weights should stay in fp32, not {kept}"
    assert trainer.state.global_step == 20, "the Trainer should have made its 20 steps"


class Labelled(nn.Module):
    """A classifier as the Trainer wants one: it returns its loss when it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """(rows, 8) and (rows,) -> the mean loss and (rows, 2) logits."""
        logits = self.layers(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _printed(text: str) -> str:
    """What the block prints of its step."""
    out = io.StringIO()
    with redirect_stdout(out):
        _metered(text)
    return out.getvalue()


def _metered(text: str, *, half: bool = False) -> tuple[Measurement, float, set[torch.dtype]]:
    """The block's step on a network whose activations decide: measured, its loss, the kept types."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)])
    model = model.half() if half else model
    optimizer = torch.optim.Adam(model.parameters())
    loader = [(torch.randn(ROWS, WIDTH), torch.randint(0, WIDTH, (ROWS,)))]
    losses: list[float] = []

    def step() -> None:
        names: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
        loss_function: Callable[..., torch.Tensor] = F.cross_entropy
        done = run_block(text, **names, loss_function=loss_function, device=CPU)
        losses.append(done["loss"].item())

    run = measure(step, model=model, optimizer=optimizer, timed_steps=0)
    states = [t for s in optimizer.state.values() for t in s.values()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return run, losses[0], {t.dtype for t in [*model.parameters(), *gradients, *states]}
