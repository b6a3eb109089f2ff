"""Training steps on four ranks, one per way to divide the work, real and simulated alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from utils.memory import measure
from utils.memory.measurement import Measurement
from utils.memory.source import CountingSource
from utils.models import Transformer, TransformerConfig
from utils.ranks import run_ranks

WORLD, BATCH, LENGTH = 4, 2, 64
TINY = TransformerConfig(vocabulary=256, hidden=128, layers=2, heads=4, feedforward=352)
Built = tuple[nn.Module, torch.optim.Optimizer]
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
COLUMNS = (
    "attention.query",
    "attention.key",
    "attention.value",
    "feedforward.gate",
    "feedforward.up",
)
ROWS = ("attention.output", "feedforward.down")


class Sent(NamedTuple):
    """How many collectives, and how many elements the rank put in."""

    calls: int
    elements: int


class Real(NamedTuple):
    """What rank 0 of four measured: the peaks of several runs, the last run, the traffic."""

    peaks: tuple[int, ...]
    last: Measurement
    gathered: Sent
    reduced: Sent

    @property
    def peak_bytes(self) -> int:
        """The least of several runs: gloo's threads at times keep a buffer longer, never shorter."""
        return min(self.peaks)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of the language model."""
    tokens = torch.randint(TINY.vocabulary, (BATCH, LENGTH))
    logits = model(tokens)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded(**how: Any) -> Built:
    """FSDP2, block by block."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    return _optimized(_shard(Transformer(TINY), mesh=mesh, **how))


def split(config: TransformerConfig = TINY) -> Built:
    """Tensor parallelism."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    return _optimized(_split(Transformer(config), mesh))


def split_sequence() -> Built:
    """Tensor parallelism, and the sequence divided wherever it is not in force."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    model = _split(Transformer(TINY), mesh, Shard(1))
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    attended = PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    )
    norms = {"attention_norm": SequenceParallel(), "feedforward_norm": SequenceParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, {**norms, "attention": attended, "feedforward": whole})
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return _optimized(parallelize_module(model, mesh, ends))


def sharded_and_split() -> Built:
    """Two ranks split each layer, two pairs of them share its parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return _optimized(_shard(_split(Transformer(TINY), mesh["tp"]), mesh=mesh["dp"]))


def replicated(**how: Any) -> Built:
    """DistributedDataParallel."""
    return _optimized(DistributedDataParallel(Transformer(TINY), **how))


CASES: dict[str, Callable[[], Built]] = {
    "FSDP2": functools.partial(sharded, reshard_after_forward=True),
    "FSDP2, kept after forward": functools.partial(sharded, reshard_after_forward=False),
    "FSDP2, bf16": functools.partial(sharded, mp_policy=MIXED),
    "TP": split,
    "TP, sequence": split_sequence,
    "TP x FSDP2": sharded_and_split,
    "DDP": replicated,
    "DDP, views": functools.partial(replicated, gradient_as_bucket_view=True),
}


def on_real_ranks(repeats: int) -> dict[str, Real]:
    """Measure all cases on four gloo ranks; what rank 0 found."""
    return run_ranks(_all_measured, WORLD, repeats, timeout_seconds=300)[0]


def _all_measured(repeats: int) -> dict[str, Real] | None:
    torch.set_num_threads(1)
    found = {name: _measured(build, repeats) for name, build in CASES.items()}
    return found if dist.get_rank() == 0 else None


def _measured(build: Callable[[], Built], repeats: int) -> Real:
    peaks = []
    for _ in range(repeats):
        model, optimizer = build()
        step = functools.partial(train, model, optimizer)
        result = measure(
            step, model=model, optimizer=optimizer, timed_steps=0, source=CountingSource()
        )
        peaks.append(result.peak_bytes)
    inputs = _profiled(step)
    return Real(
        tuple(peaks), result, _sent(inputs, "gloo:all_gather"), _sent(inputs, "gloo:all_reduce")
    )


def _profiled(step: Callable[[], None]) -> list[tuple[str, int]]:
    """Gloo's own name of each collective and its input's elements, by PyTorch's profiler."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        step()
    gloo = [event for event in profile.events() if event.name.startswith("gloo:")]
    return [(e.name, sum(math.prod(shape) for shape in e.input_shapes)) for e in gloo]


def _sent(inputs: list[tuple[str, int]], name: str) -> Sent:
    elements = [count for found, count in inputs if found == name]
    return Sent(len(elements), sum(elements))


def _optimized(model: nn.Module) -> Built:
    return model, torch.optim.AdamW(model.parameters())


def _shard(model: nn.Module, **how: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **how)
    return fully_shard(model, **how)


def _split(model: nn.Module, mesh: DeviceMesh, between: Any = None) -> nn.Module:
    rows = RowwiseParallel(output_layouts=between) if between else RowwiseParallel()
    plan = {name: ColwiseParallel() for name in COLUMNS} | dict.fromkeys(ROWS, rows)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model
