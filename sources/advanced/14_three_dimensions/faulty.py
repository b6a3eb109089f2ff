"""Two training runs with a fault each, for lab 14: on as many ranks of each axis as you ask for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from utils.models import Transformer, TransformerConfig
from utils.parallel import (
    ParallelDims,
    accumulated_passes,
    adamw,
    apply_fsdp,
    apply_tp,
    clip_grad_norm,
    device_mesh,
    keep_chunk,
    local_rows,
    pipeline_passes,
    reduce_on_last_micro_batch,
    sum_over,
    token_weight,
)
from utils.ranks import run_ranks

TINY = TransformerConfig(vocabulary=64, hidden=32, layers=4, heads=4, feedforward=64)
ROWS, LENGTH, MICRO_BATCHES, RATE, LIMIT, STEPS = 8, 16, 2, 1e-2, 0.5, 3
Run = dict[str, list[float]]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (8, 16) of a step, of all ranks: each row counts up from a start."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(64, (ROWS, 1), generator=random)
    strides = torch.randint(1, 9, (ROWS, 1), generator=random)
    rows = (starts + strides * torch.arange(LENGTH + 1)) % 64
    return rows[:, :-1], rows[:, 1:]


def _model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(TINY).double()


def one_process() -> Run:
    """The losses and norms of plain training."""
    model = _model()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=RATE), {"losses": [], "norms": []}
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        found["losses"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def faulty_run(name: str, *, pp: int = 1, shard: int = 1, tp: int = 1) -> Run:
    """Losses and norms of run "A" or "B" on pp x shard x tp ranks, as its first rank sees them.

    Raises:
        ValueError: there is no such run, or more than 8 ranks are asked for.
    """
    if name not in FAULTS:
        raise ValueError(f"There is no run {name!r}: write {' or '.join(map(repr, FAULTS))}.")
    dims = ParallelDims(pp=pp, shard=shard, tp=tp)
    if dims.ranks > 8:
        raise ValueError(f"{dims} takes {dims.ranks} ranks; take up to 8 here, 1 or 2 an axis.")
    return run_ranks(_on_rank, dims.ranks, name, dims, timeout_seconds=90)[0]


def _on_rank(name: str, dims: ParallelDims) -> Run:
    mesh, model = device_mesh(dims, "cpu"), _model()
    FAULTS[name][0](model, mesh.get_local_rank("pp") if dims.pp > 1 else 0, dims)
    if dims.pp > 1:
        blocks = (TINY.layers // dims.pp,) * dims.pp
        model = keep_chunk(model, blocks, mesh.get_local_rank("pp"))
    if dims.tp > 1:
        apply_tp(model, mesh["tp"], sequence=True)
    apply_fsdp(model, mesh, zero_stage=1)
    micro_batch, positions = ROWS // dims.shard // MICRO_BATCHES, torch.arange(LENGTH)
    if dims.pp > 1:
        shape = (micro_batch, LENGTH // dims.tp, TINY.hidden)
        stream = torch.empty(shape, dtype=torch.float64, device="meta")
        passes = pipeline_passes(
            [model],
            mesh,
            positions,
            stream,
            chunks=dims.pp,
            schedule="1F1B",
            micro_batches=MICRO_BATCHES,
        )
    else:
        passes = accumulated_passes(
            model, micro_batch, positions, reduce_on_last_micro_batch(mesh, zero_stage=1)
        )
    optimizer, found = adamw([model], RATE), {"losses": [], "norms": []}
    for step in range(STEPS):
        inputs, targets = FAULTS[name][1](step, dims)
        with loss_parallel():
            loss = passes(inputs, targets, token_weight(targets, mesh))
        found["norms"].append(clip_grad_norm(optimizer, mesh, LIMIT).item())
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(sum_over(mesh, ["shard"], loss).item() / dims.shard)
    return found


def _as_drawn(model: Transformer, stage: int, dims: ParallelDims) -> None:
    """Every stage keeps its own part of one model."""


def _drawn_alike(model: Transformer, stage: int, dims: ParallelDims) -> None:
    """Every stage starts as if it were the first: the same random numbers."""
    each = TINY.layers // dims.pp
    for number in range(each):
        model.blocks[stage * each + number].load_state_dict(model.blocks[number].state_dict())


def _my_rows(step: int, dims: ParallelDims) -> tuple[Tensor, ...]:
    return local_rows(dims, dist.get_rank(), *batch(step))


def _first_rows(step: int, dims: ParallelDims) -> tuple[Tensor, ...]:
    """The first replica's rows, on every replica."""
    return local_rows(dims, 0, *batch(step))


Start = Callable[[Transformer, int, ParallelDims], None]
Read = Callable[[int, ParallelDims], tuple[Tensor, ...]]
FAULTS: dict[str, tuple[Start, Read]] = {
    "A": (_drawn_alike, _my_rows),
    "B": (_as_drawn, _first_rows),
}
