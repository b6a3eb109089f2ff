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
    """Plain PyTorch: a lower peak than in fp32, nearly the same loss, fp32 states, and what it prints."""
    in_fp32 = _changed(text, "in_fp32 = False", "in_fp32 = True")
    (plain, plain_loss, _), (mixed, mixed_loss, dtypes) = (_metered(t) for t in (in_fp32, text))
    saved = 1 - mixed.peak_bytes / plain.peak_bytes
    assert saved > 0.25, f"activations decide here, and the peak fell by {saved:.0%} only"
    gap = abs(mixed_loss / plain_loss - 1)
    assert gap < 0.01, f"the losses of the first step are {gap:.1%} apart"
    assert dtypes == {torch.float32}, f"weights, gradients and states stay in fp32, not {dtypes}"
    with_scaler = re.sub(r"fp16 = .*", "fp16 = True", text)
    for there, scale in [(text, "1,"), (with_scaler, "65,536,"), (in_fp32, "1,")]:
        assert f"scale {scale} 0 of " in _printed(there), f"a run should print a scale of {scale}"
    try:
        _metered(text, half=True)
    except AssertionError as error:
        assert "masters must be fp32" in str(error), f"another fault: {error}"
    else:
        raise AssertionError("a model in 16 bits should be refused")
    _its_settings_hold(text, with_scaler)
    _its_losses_and_skips_are_told(text, with_scaler)


def _its_settings_hold(text: str, with_scaler: str) -> None:
    """Gradients are clipped at their true size; images may lie channels last, and other weights stay."""
    clipped = [_changed(t, "clip_norm = None", "clip_norm = 1e-3") for t in (text, with_scaler)]
    for each in clipped:
        model = run_block(each, **_vision())["model"]
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
        assert 0.5e-3 < norm < 1.01e-3, f"clipped to 1e-3, gradients have a norm of {norm:.1e}"
    last = _changed(text, "channels_last = False", "channels_last = True")
    weight = run_block(last, **_vision())["model"][0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last), (
        "images should lie channels last"
    )
    assert _metered(last)[1] == _metered(text)[1], "a model without images stays as it was"


def _its_losses_and_skips_are_told(text: str, with_scaler: str) -> None:
    """The mean is of steps 10 to 19 alone, and a step that overflows is counted and changes nothing."""
    names = _vision(batches=22)
    out = io.StringIO()
    with redirect_stdout(out):
        losses = run_block(text, **names)["losses"]
    assert len(losses) == 20, "losses are noted for 20 steps"
    assert (
        f"first {losses[0]:.4f}, mean of steps 10 to 19 {sum(losses[10:]) / 10:.4f}"
        in out.getvalue()
    )
    names, out = _vision(batches=1), io.StringIO()
    before = [p.detach().clone() for p in names["model"].parameters()]
    names["loss_function"] = lambda outputs, labels: 1e6 * F.cross_entropy(outputs, labels)
    with redirect_stdout(out):
        run_block(with_scaler, **names)
    assert "scale 32,768, 1 of 1 steps skipped" in out.getvalue(), out.getvalue()
    after = names["model"].parameters()
    assert all(map(torch.equal, before, after)), "a skipped step should change no weight"


def block_2(text: str) -> None:
    """transformers: the Trainer's layers give bf16 without a GPU, and its weights stay in fp32."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    model, seen = Labelled(), set()
    model.layers[0].register_forward_hook(lambda layer, given, out: seen.add(out.dtype))
    dataset = [{"inputs": torch.randn(8), "labels": torch.tensor(n % 2)} for n in range(64)]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        trainer = run_block(text, model=model, dataset=dataset)["trainer"]
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


def _changed(text: str, old: str, new: str) -> str:
    """The block with another setting."""
    assert text.count(old) == 1, f"the block should say {old!r} once"
    return text.replace(old, new)


def _vision(batches: int = 2) -> dict[str, Any]:
    """A small convolutional network, and what else the block's reader has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "loader": [(torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))) for _ in range(batches)],
        "loss_function": F.cross_entropy,
        "device": CPU,
    }


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
