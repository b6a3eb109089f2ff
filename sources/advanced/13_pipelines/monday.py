"""Runs the lines of lesson 13's last cell, on ranks, and asserts what the page promises of them."""

from __future__ import annotations

import contextlib
import io
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


def block_1(text: str) -> None:
    """PyTorch's schedule: losses of one process; with GPipe in its place rank 0 keeps more."""
    wanted, norm = _alone()
    found = run_ranks(_by_schedule, RANKS, text)
    assert found[-1][0], "the last rank has no losses"
    gaps = [abs(a / b - 1) for a, b in zip(found[-1][0], wanted, strict=True)]
    assert max(gaps) < 1e-5, f"losses are {found[-1][0]}, and those of one process {wanted}"
    for _, _, of_stages in found:
        assert abs(of_stages / norm - 1) < 1e-5, f"a norm of {of_stages}, and {norm} is due"
    gpipe = run_ranks(_by_schedule, RANKS, text.replace("Schedule1F1B", "ScheduleGPipe"))
    assert gpipe[0][1] == 4 * found[0][1], "of eight micro-batches 1F1B holds two on rank 0"


def block_2(text: str) -> None:
    """DeepSpeed's engine: losses of one process; clipped by the first stage's norm without the line."""
    if run_ranks(deepspeed_problem, 1)[0]:
        return  # it is not for this system
    text = text.replace('"AdamW", "params": {"lr": 1e-3}', '"SGD", "params": {"lr": 0.1}')
    as_it_comes = text.replace('"gradient_clipping": 0.0,', "")
    assert as_it_comes != text, "the page names the line that it takes out"
    by_first_stage = one_process(STEPS, clip_by_first=LAYERS // RANKS).losses
    for lines, wanted in ((text, one_process(STEPS).losses), (as_it_comes, by_first_stage)):
        found = run_ranks(_by_deepspeed, RANKS, lines)[-1]
        gaps = [abs(a / b - 1) for a, b in zip(found, wanted, strict=True)]
        assert max(gaps) < 1e-5, f"DeepSpeed's losses are {found}, where {wanted} were expected"


def _whole_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.cat(inputs), torch.cat(targets)) for inputs, targets in map(batch, range(STEPS))]


def _alone() -> tuple[list[float], float]:
    """Losses of one process, and its last step's norm."""
    model, losses, norm = layers_of(0, 1), [], torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in _whole_batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, norm.item()


def _by_schedule(text: str) -> tuple[list[float], int, float]:
    """Losses, the bytes that this rank keeps for backward at most, the batch left out, and the last norm."""
    layers, loader = list(layers_of(0, 1)), _whole_batches()
    names: dict[str, Any] = {"torch": torch, "nn": nn, "dist": dist, "loss_fn": F.mse_loss}
    own = [p for layer in layers for p in layer.parameters()]
    with saved_for_backward([*own, *(inputs for inputs, _ in loader)]) as saved:
        made = run_block(text, layers=layers, loader=loader, device=torch.device("cpu"), **names)
    return made["losses"], saved.peak_bytes, made["square"].sqrt().item()


def _by_deepspeed(text: str) -> list[float]:
    deepspeed = load_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    pairs = [pair for step in range(STEPS) for pair in zip(*batch(step), strict=True)]
    names: dict[str, Any] = {"deepspeed": deepspeed, "loss_fn": F.mse_loss, "data": iter(pairs)}
    sizes = {"rows": 2, "micro_batches": 8, "stages": dist.get_world_size(), "steps": STEPS}
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its layers on every start
        made = run_block(text, layers=list(layers_of(0, 1)), **names, **sizes)
    return made["losses"]
