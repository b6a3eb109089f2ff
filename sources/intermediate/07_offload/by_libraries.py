"""What lesson 07 runs in ranks: DeepSpeed's offload."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils import Transformer, TransformerConfig, text_batches, text_tokens
from utils.techniques.deepspeed import load_deepspeed
from utils.techniques.zero import resident, zero_config, zero_engine

SMALL = TransformerConfig(vocabulary=256, hidden=128, layers=4, heads=4, feedforward=352)
STEPS = 20
# DeepSpeed's names of what stays on the device when the rest leaves.
ON_DEVICE = ("bit16_groups_flat", "for_gpu_offload", "ipg_bucket")


class Held(NamedTuple):
    """Losses of a run, and bytes per parameter between backward and step.

    `start_each` is the largest clone that DeepSpeed made of weights at its start.
    """

    losses: list[float]
    device_each: float
    host_each: float
    file_each: float
    start_each: float


def batches() -> list[tuple[Tensor, Tensor]]:
    """The tokens and targets of each step."""
    return list(text_batches(text_tokens(STEPS * 4 * 32 + 1), batch=4, sequence=32))


def whole_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Of a model of the course, in fp32."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def by_deepspeed(arms: Mapping[str, Mapping[str, Any]], folder: str) -> dict[str, Held]:
    """Train by each of DeepSpeed's `zero_optimization` settings, on one rank, in bf16.

    Args:
        arms: its settings by name; with "own_adam": True the step is DeepSpeedCPUAdam's, with
            "micro_batches" a step adds up so many batches, with "only_first": True as if all but
            the first were lost, and with "by_block": True a block has a parameter group of its own.
        folder: for what is offloaded to a file.
    """
    load_deepspeed()  # for the CPU, as in the notebook
    return {name: _held(arm, folder) for name, arm in arms.items()}


def more_arms(folder: str, *, adam: bool, files: bool) -> dict[str, dict[str, Any]]:
    """Settings that need parts of DeepSpeed which are compiled apart: its Adam, and its way to files."""
    arms: dict[str, dict[str, Any]] = {}
    if adam:
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        arms["ZeRO-2, offloaded, DeepSpeedCPUAdam"] = zero | {"own_adam": True}
    if files:
        file = {"device": "nvme", "nvme_path": folder}
        weights = file | {"buffer_size": 1_000_000}  # elements; by default 1e8
        arms["ZeRO-Infinity, a file"] = {
            "stage": 3,
            "offload_optimizer": file,
            "offload_param": weights,
        }
    return arms


def _held(
    arm: Mapping[str, Any],
    folder: str,
) -> Held:
    torch.manual_seed(0)
    model, zero = Transformer(SMALL), dict(arm)
    stage, own_adam = zero.pop("stage"), zero.pop("own_adam", False)
    adds, only_first = zero.pop("micro_batches", 1), zero.pop("only_first", False)
    grouped = zero.pop("by_block", False)
    trained = list(model.parameters())
    count = sum(parameter.numel() for parameter in trained)
    config = zero_config(
        stage, count, world_size=1, micro_batch=4, precision="bf16", accumulation=adds, **zero
    )
    # By default DeepSpeed clips at a norm of 1. It adds the norm up in another order where the
    # optimizer is offloaded, and its last bit then changes what is learned.
    settings = config | {"zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    groups = _by_block(model) if grouped else [trained]
    engine, start = _started(model, _adamw(groups, own_adam), settings)
    losses, rows = [], []
    for number, batch in enumerate(batches()):
        loss = whole_loss(engine, *batch)
        engine.backward(0 * loss if only_first and number % adds else loss)
        losses.append(loss.item())
        rows = [(row.path, row.bytes / count) for row in resident(engine)]
        engine.step()
    stays = "offload_optimizer" not in zero
    here = sum(each for path, each in rows if stays or any(name in path for name in ON_DEVICE))
    files = Path(folder).rglob("*") if folder else ()
    on_disk = sum(file.stat().st_size for file in files if file.is_file())
    return Held(losses, here, sum(each for _, each in rows) - here, on_disk / count, start / count)


def _started(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> tuple[Any, int]:
    """The engine, and the bytes of the largest clone that was made on the way."""
    sizes, plain = [0], Tensor.clone

    def clone(tensor: Tensor, **how: Any) -> Tensor:
        sizes.append(tensor.nbytes)
        return plain(tensor, **how)

    with mock.patch.object(Tensor, "clone", clone):
        engine = zero_engine(model, optimizer, settings)
    return engine, max(sizes)


def _by_block(model: nn.Module) -> list[list[nn.Parameter]]:
    blocks = [list(block.parameters()) for block in model.get_submodule("blocks").children()]
    inside = {p for block in blocks for p in block}
    return blocks + [[p] for p in model.parameters() if p not in inside]


def _adamw(groups: list[list[nn.Parameter]], own_adam: bool) -> torch.optim.Optimizer:
    parameters = [{"params": group} for group in groups]
    if not own_adam:
        return torch.optim.AdamW(parameters, lr=1e-3)
    adam: Any = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return adam(parameters, lr=1e-3, weight_decay=0.01)  # torch's default
