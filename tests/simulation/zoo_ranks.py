"""Programs on two ranks, each of another kind, which run on gloo and without data by the same code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from utils.memory import measure
from utils.memory.source import CountingSource

WORLD, ROWS, WIDTH = 2, 64, 256
Program = tuple[Callable[[], Any], Callable[..., Any]]


def update(loss: Tensor, optimizer: Any) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained)


def mlp(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 10)
    )


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def loss_of(model: nn.Module) -> Tensor:
    return model(rows()).square().mean()


def plain(model: Any, optimizer: Any) -> None:
    update(loss_of(model), optimizer)


def flat_reduce(model: Any, optimizer: Any) -> None:
    """Data parallel by hand: one all-reduce of all gradients in a row."""
    loss_of(model).backward()
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat.div_(WORLD)
    for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g))
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model: Any, optimizer: Any) -> None:
    with model.no_sync():
        loss_of(model).backward()
    update(loss_of(model), optimizer)


def averaged(model: Any, optimizer: Any) -> None:
    """Local SGD: steps apart, then the mean of the weights."""
    for _ in range(2):
        update(loss_of(model), optimizer)
    with torch.no_grad():
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data.div_(WORLD)


def zero_one() -> Any:
    model = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)


class Gathered(torch.autograd.Function):
    """The rows of all ranks, for a contrastive loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        whole = grads[0].contiguous()
        dist.all_reduce(whole)
        return whole.chunk(WORLD)[0].contiguous()


def contrasted(model: Any, optimizer: Any) -> None:
    one, two = (Gathered.apply(model(rows())) for _ in range(2))
    loss = nn.functional.cross_entropy(one @ two.T, torch.arange(one.shape[0]))
    update(loss, optimizer)


def exchanged(model: Any, optimizer: Any) -> None:
    """Ulysses: heads for sequence, there and back."""
    x = model(rows())
    there = functional.all_to_all_single_autograd(x, None, None, dist.group.WORLD)
    back = functional.all_to_all_single_autograd(there.sin(), None, None, dist.group.WORLD)
    update(back.square().mean(), optimizer)


def kept_whole() -> Any:
    model = mlp()
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    return adamw(fully_shard(model, reshard_after_forward=False))


def split_by_hand() -> Any:
    """A layer whose rows are shards of a DTensor."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model = nn.Linear(256, 512)
    for name, p in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))
    model.mesh = mesh
    return adamw(model)


def sharded_rows(model: Any, optimizer: Any) -> None:
    x = DTensor.from_local(rows(), model.mesh)
    update(model(x).square().mean().full_tensor(), optimizer)


RANKS: dict[str, Program] = {
    "all-reduce by hand": (lambda: adamw(mlp()), flat_reduce),
    "DDP with no_sync": (
        lambda: adamw(DistributedDataParallel(mlp(), gradient_as_bucket_view=True)),
        accumulated,
    ),
    "local SGD": (lambda: adamw(mlp()), averaged),
    "ZeroRedundancyOptimizer": (zero_one, plain),
    "contrastive over ranks": (lambda: adamw(mlp()), contrasted),
    "all-to-all": (lambda: adamw(mlp()), exchanged),
    "FSDP2, kept whole": (kept_whole, plain),
    "DTensor by hand": (split_by_hand, sharded_rows),
}


def measured() -> dict[str, int] | None:
    """The peaks of all, on this rank; None on the others."""
    torch.set_num_threads(1)
    found: dict[str, int] = {}
    for name, (build, step) in RANKS.items():
        model, optimizer = build()
        run = functools.partial(step, model, optimizer)
        with_data = measure(
            run, model=model, optimizer=optimizer, timed_steps=0, source=CountingSource()
        )
        found[name] = with_data.peak_bytes
    return found if dist.get_rank() == 0 else None
