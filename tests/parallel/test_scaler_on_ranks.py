"""What lesson 03 says of loss scaling over ranks: an overflow on one must skip the step on all."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

from utils.ranks import run_ranks

RANKS = 2


def stepped(kind: str) -> tuple[bool, float]:
    """Whether this rank stepped, and its scale, where a gradient of rank 1 alone overflowed."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    if kind == "FSDP2":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        make = ShardedGradScaler if kind == "FSDP1, sharded" else torch.amp.GradScaler
        scaler = make("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (parameter,) = model.parameters()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    assert parameter.grad is not None
    mine = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    if dist.get_rank() == 1:
        mine.fill_(math.inf)
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    before = held.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(held, before), scaler.get_scale()


def test_fsdp2_agrees_by_itself() -> None:
    assert run_ranks(stepped, RANKS, "FSDP2") == [(False, 4.0)] * RANKS


def test_fsdp1_needs_the_sharded_scaler() -> None:
    assert run_ranks(stepped, RANKS, "FSDP1, sharded") == [(False, 4.0)] * RANKS
    assert run_ranks(stepped, RANKS, "FSDP1, plain") == [(True, 8.0), (False, 4.0)]
