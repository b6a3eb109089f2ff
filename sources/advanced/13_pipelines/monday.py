"""Runs the lines of lesson 13's last cell, on ranks, and asserts what the page promises of them."""

from __future__ import annotations

import contextlib
import inspect
import io
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from utils.lessons.blocks import run_block
from utils.ranks import run_ranks
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed

from .saved import saved_for_backward
from .small_model import LAYERS, batch, layers_of, one_process

RANKS, STEPS = 2, 3
FP32 = torch.float32  # as DeepSpeed trains; the lesson itself compares in fp64


def block_1(text: str) -> None:
    """PyTorch's schedule: losses of one process; with GPipe in its place rank 0 keeps more.

    The last rank keeps no outputs, batches are moved to the device, and the saved parts make one model.
    """
    wanted, norm, model = _alone()
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(_by_schedule, RANKS, text, folder)
        saved = [torch.load(Path(folder, f"part_{rank}.pt")) for rank in range(RANKS)]
        states = [torch.load(Path(folder, f"optimizer_{rank}.pt")) for rank in range(RANKS)]
        assert all(state["state"] for state in states), "a rank saved no moments"
        gpipe = run_ranks(
            _by_schedule, RANKS, text.replace("Schedule1F1B", "ScheduleGPipe"), folder
        )
        unguarded = text.replace(", return_outputs=False", "")
        assert unguarded != text, "the line says what it turns off"
        keeping = run_ranks(_by_schedule, RANKS, unguarded, folder)
    assert found[-1]["losses"], "the last rank has no losses"
    gaps = [abs(a / b - 1) for a, b in zip(found[-1]["losses"], wanted, strict=True)]
    assert max(gaps) < 1e-5, f"losses are {found[-1]['losses']}, and those of one process {wanted}"
    for rank in found:
        assert abs(rank["norm"] / norm - 1) < 1e-5, f"a norm of {rank['norm']}, and {norm} is due"
    assert gpipe[0]["kept"] == 4 * found[0]["kept"], "of eight micro-batches 1F1B holds two"
    outputs = [run[-1]["outputs"] for run in (found, keeping)]
    assert outputs == [0, 4 * RANKS], f"the last rank keeps {outputs} outputs without and with them"
    whole = {name: value for part in saved for name, value in part.items()}
    assert len(whole) == sum(map(len, saved)), "names of two parts are the same"
    for name, value in model.state_dict().items():
        # AdamW's first steps are as large where a gradient is nearly zero: no finer bound holds.
        torch.testing.assert_close(whole[name], value, rtol=1e-3, atol=1e-3)


def block_2(text: str) -> None:
    """DeepSpeed's engine: losses of one process; clipped by the first stage's norm at 1.0, the default."""
    if run_ranks(deepspeed_problem, 1)[0]:
        return  # it is not for this system
    adam = '"AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}'
    assert adam in text, "the page's two scripts decay weights alike"
    decays = [
        inspect.signature(kind).parameters["weight_decay"].default
        for kind in (torch.optim.AdamW, load_deepspeed().ops.adam.FusedAdam)
    ]
    assert decays == [0.01, 0], f"the page says why the key stands; the defaults are {decays}"
    text = text.replace(adam, '"SGD", "params": {"lr": 0.1}')
    line = '"gradient_clipping": 0.0,'
    assert line in text, "the page names the line that it takes out"
    as_it_comes, at_one = text.replace(line, ""), text.replace("0.0,", "1.0,")
    by_first_stage = one_process(STEPS, LAYERS // RANKS, FP32).losses
    for lines, wanted in (
        (text, one_process(STEPS, dtype=FP32).losses),
        (as_it_comes, by_first_stage),
        (at_one, by_first_stage),
    ):
        found = run_ranks(_by_deepspeed, RANKS, lines)[-1]
        gaps = [abs(a / b - 1) for a, b in zip(found, wanted, strict=True)]
        assert max(gaps) < 1e-5, f"DeepSpeed's losses are {found}, where {wanted} were expected"


def _whole_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    every = (batch(step, FP32) for step in range(STEPS))
    return [(torch.cat(inputs), torch.cat(targets)) for inputs, targets in every]


class _Elsewhere:
    """A batch that lies on another device until `to` moves it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def to(self, device: torch.device) -> torch.Tensor:
        """The tensor on `device`."""
        return self._tensor.to(device)


def _alone() -> tuple[list[float], float, nn.Module]:
    """Losses of one process, its last step's norm, and the model after it."""
    model, losses, norm = layers_of(0, 1, FP32), [], torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in _whole_batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, norm.item(), model


def _by_schedule(text: str, folder: str) -> dict[str, Any]:
    """What the lines leave on this rank.

    The losses, the bytes kept for backward at most, the batch left out, the last norm, and how many
    outputs the stage still holds.
    """
    layers, batches = list(layers_of(0, 1, FP32)), _whole_batches()
    names: dict[str, Any] = {"torch": torch, "nn": nn, "dist": dist, "loss_fn": F.mse_loss}
    names["loader"] = [(_Elsewhere(inputs), _Elsewhere(targets)) for inputs, targets in batches]
    own = [p for layer in layers for p in layer.parameters()]
    with saved_for_backward([*own, *(inputs for inputs, _ in batches)]) as saved:
        made = run_block(text, layers=layers, device=torch.device("cpu"), folder=folder, **names)
    return {
        "losses": made["losses"],
        "kept": saved.peak_bytes,
        "norm": made["square"].sqrt().item(),
        "outputs": len(made["stage"].output_chunks),
    }


def _by_deepspeed(text: str) -> list[float]:
    deepspeed = load_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    pairs = [pair for step in range(STEPS) for pair in zip(*batch(step, FP32), strict=True)]
    names: dict[str, Any] = {"deepspeed": deepspeed, "loss_fn": F.mse_loss, "data": iter(pairs)}
    sizes = {"rows": 2, "micro_batches": 8, "stages": dist.get_world_size(), "steps": STEPS}
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its layers on every start
        made = run_block(text, layers=list(layers_of(0, 1, FP32)), **names, **sizes)
    return made["losses"]
