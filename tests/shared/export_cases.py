"""Exported training scripts at tiny size, run on four gloo ranks and beside one process."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from utils.catalog import ModelShape
from utils.models import Transformer, TransformerConfig
from utils.planner import Batch, Cluster, Export, Plan, export
from utils.planner.exporters.deepspeed import learning_rate
from utils.ranks import run_ranks

WORLD, STEPS, SEQUENCES, LENGTH = 4, 2, 16, 16
TINY = ModelShape(
    name="tiny",
    family="llama",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    feedforward=96,
    vocabulary=64,
    max_sequence=LENGTH,
)
TIED = replace(TINY, name="tied", tied=True, qkv_bias=True)
DEEP = replace(TINY, name="deep", layers=4)


def tiny(
    model: ModelShape = TINY, gpus: int = WORLD, sequence_length: int = LENGTH, **plan: Any
) -> Export:
    """Export a plan for four GPUs; float32, so that losses compare closely."""
    cluster = Cluster(gpu="A100-80GB", nodes=1, gpus_per_node=gpus)
    batch = Batch(sequences=SEQUENCES, sequence_length=sequence_length)
    return export(model, cluster, Plan(**{"framework": "fp32", **plan}), batch)


CASES: dict[str, Export] = {
    "DDP": tiny(dp=4, micro_batch=2),
    "ZeRO-1": tiny(dp=4, zero_stage=1, micro_batch=2),
    "ZeRO-2": tiny(dp=4, zero_stage=2, micro_batch=2, recompute="full"),
    "ZeRO-3": tiny(dp=4, zero_stage=3, micro_batch=2, recompute="full", attention="unfused"),
    "HSDP": tiny(dp=4, zero_stage=3, micro_batch=2, shard_ranks=2, offload="parameters"),
    "TP, tied": tiny(TIED, dp=2, tp=2, zero_stage=3, micro_batch=4),
    "TP, sequence": tiny(
        TIED, dp=2, tp=2, sequence_parallel=True, zero_stage=2, micro_batch=4, recompute="full"
    ),
    "1F1B": tiny(DEEP, dp=2, pp=2, zero_stage=1, micro_batch=4, partition="ends"),
    "GPipe": tiny(DEEP, pp=4, micro_batch=4, schedule="gpipe"),
    "interleaved": tiny(
        DEEP, dp=2, pp=2, virtual_stages=2, zero_stage=3, micro_batch=4, recompute="full"
    ),
    "TP x PP": tiny(tp=2, pp=2, micro_batch=8, sequence_parallel=True, recompute="full"),
    "TP x PP, whole": tiny(DEEP, tp=2, pp=2, virtual_stages=2, micro_batch=8),
    "CP": tiny(dp=2, cp=2, zero_stage=3, micro_batch=4, recompute="full", attention="unfused"),
    "CP, whole": tiny(dp=2, cp=2, micro_batch=4),
    "CP x TP": tiny(TIED, cp=2, tp=2, sequence_parallel=True, zero_stage=1, micro_batch=8),
    "CP x PP": tiny(DEEP, cp=2, pp=2, virtual_stages=2, zero_stage=2, micro_batch=8),
}
MIXED = tiny(dp=2, tp=2, sequence_parallel=True, zero_stage=3, micro_batch=4, framework="fsdp")
HALF = tiny(dp=2, pp=2, zero_stage=1, micro_batch=4, framework="bf16")
IN_BF16 = {"mixed": MIXED, "half": HALF}
EVERY = {**CASES, **IN_BF16}


def script(text: str) -> types.ModuleType:
    """An exported script as a module that is not started; it imports the course's own modules."""
    module = types.ModuleType("exported")
    exec(compile(text, "train.py", "exec"), vars(module))
    return module


def start_weights(model: ModelShape, folder: Path) -> Path:
    """Weights that every run of a model starts from."""
    torch.manual_seed(0)
    path = folder / f"{model.name}.pt"
    torch.save(Transformer(TransformerConfig.from_shape(model)).state_dict(), path)
    return path


def one_process(model: ModelShape, weights: Path, steps: int = STEPS) -> list[float]:
    """Losses of plain training: the global batch at once, no mesh, nothing sharded."""
    plain = _plain(model, weights)
    optimizer, losses = torch.optim.AdamW(plain.parameters(), lr=learning_rate(model)), []
    for step in range(steps):
        loss = _plain_loss(plain, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_gradients(model: ModelShape, weights: Path) -> dict[str, Tensor]:
    """Gradients of the first step in one process, before they are clipped."""
    plain = _plain(model, weights)
    _plain_loss(plain, 0).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def _plain(model: ModelShape, weights: Path) -> Transformer:
    plain = Transformer(TransformerConfig.from_shape(model))
    plain.load_state_dict(torch.load(weights))
    return plain


def _plain_loss(plain: Transformer, step: int) -> Tensor:
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(plain.config.vocabulary, (SEQUENCES, LENGTH + 1), generator=random)
    return F.cross_entropy(plain(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def on_real_ranks(weights: dict[str, Path]) -> dict[str, list[float]]:
    """Losses of all exported scripts, one after the other in one launch, as rank 0 returns them."""
    found = {name: (case.python, weights[case.model.name]) for name, case in EVERY.items()}
    return run_ranks(_trained, WORLD, found, timeout_seconds=300)[0]


def _trained(found: dict[str, tuple[str, Path]]) -> dict[str, list[float]]:
    losses = {}
    for name, (text, weights) in found.items():
        try:
            losses[name] = script(text).train(torch.device("cpu"), STEPS, str(weights))
        except Exception as error:
            raise RuntimeError(f"The exported script of case {name!r} failed.") from error
    return losses
