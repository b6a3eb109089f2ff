"""A small transformer trained by one process and by every way to shard it, on four ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from utils.memory.holdings import ReachableStorage, reachable_storages
from utils.memory.source import CountingSource
from utils.models import Transformer, TransformerConfig
from utils.ranks import run_ranks, traffic
from utils.techniques.deepspeed import deepspeed_problem
from utils.techniques.fsdp import no_sync, shard_blocks
from utils.techniques.zero import zero_config, zero_engine
from utils.traffic.collectives import Traffic

WORLD, SEQUENCES, LENGTH = 4, 16, 32
# Steps of a run that is compared with one process: in AdamW's moments and in the scaled loss a fault
# shows within four. The long run is what the course promises, and takes five times as long.
STEPS, MANY_STEPS = 4, 20
TINY = TransformerConfig(vocabulary=64, hidden=64, layers=3, heads=4, feedforward=160)
LEARNING_RATE, DECAY = 1e-3, 0.01
STAGES = {"ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}


class Moment(NamedTuple):
    """What a rank held at one moment: by name, and by the allocator's own count."""

    rows: tuple[ReachableStorage, ...]
    allocated_bytes: int

    def named(self, *parts: str) -> int:
        """Bytes of the rows whose path contains one of these."""
        return sum(row.bytes for row in self.rows if any(part in row.path for part in parts))


class Run(NamedTuple):
    """One rank's training: mean losses of the steps, traffic of the last, what it held when."""

    losses: list[float]
    traffic: tuple[Traffic, ...]
    moments: dict[str, Moment]

    def payloads(self) -> dict[tuple[str, str], int]:
        """Bytes put into each kind of collective, by dtype; single numbers (a norm) are left out."""
        found: dict[tuple[str, str], int] = {}
        for row in self.traffic:
            if row.payload_bytes > 64:
                key = row.collective, row.dtype
                found[key] = found.get(key, 0) + row.payload_bytes
        return found


def model() -> Transformer:
    """The same weights everywhere."""
    torch.manual_seed(0)
    return Transformer(TINY)


def parameter_sizes() -> list[int]:
    """Elements of each parameter, in order."""
    return [p.numel() for p in model().parameters()]


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of all runs, one kernel call for each tensor."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=DECAY, foreach=False)


def tokens(step: int) -> Tensor:
    """The whole batch of a step."""
    random = torch.Generator().manual_seed(step)
    return torch.randint(TINY.vocabulary, (SEQUENCES, LENGTH + 1), generator=random)


def loss_of(network: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Mean loss of next tokens, in float32."""
    logits = network(batch[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, batch[:, 1:].flatten())


@functools.cache
def one_process(precision: str, steps: int = STEPS) -> list[float]:
    """Losses of plain training; in bf16 with a float32 master copy that the optimizer steps."""
    network, losses = model(), []
    masters = [p.detach().clone().requires_grad_() for p in network.parameters()]
    if precision == "bf16":
        network.bfloat16()
    optimizer = adamw(masters)
    for step in range(steps):
        loss = loss_of(network, tokens(step))
        loss.backward()
        for own, master in zip(network.parameters(), masters, strict=True):
            master.grad, own.grad = own.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for own, master in zip(network.parameters(), masters, strict=True):
                own.copy_(master)
        losses.append(loss.item())
    return losses


@functools.cache
def trained(
    name: str, precision: str = "fp32", accumulation: int = 1, steps: int = 2, **zero: Any
) -> list[Run]:
    """Every rank's run."""
    if name in STAGES:
        deepspeed_problem()  # loads it here, so that ranks get it ready-made
    return run_ranks(train, WORLD, name, precision, accumulation, steps, zero, timeout_seconds=300)


def train(name: str, precision: str, accumulation: int, steps: int, zero: dict[str, Any]) -> Run:
    """On every rank: train, and look at what is held before, in and after the last step."""
    batches = [_micro_batches(tokens(step), accumulation) for step in range(steps)]
    source, moments, times = CountingSource(), {}, {}
    source.start()
    build = _fsdp if name == "FSDP2" else _zero
    _optimizer, step = build(name, precision, accumulation, zero)

    def look(when: str, **roots: Any) -> None:
        moments[when], times[when] = reachable_storages(**roots), source.now_ns()

    losses = []
    for number, micro_batches in enumerate(batches):
        is_last = number == steps - 1
        with traffic() as sent:
            loss = step(micro_batches, look if is_last else _nothing)
        losses.append(_mean_over_ranks(loss))
    events = source.stop()
    found = {
        when: Moment(rows, sum(_alive(events, times[when]).values()))
        for when, rows in moments.items()
    }
    return Run(losses, sent.rows, found)


def _nothing(when: str, **roots: Any) -> None:
    pass


def _micro_batches(batch: Tensor, accumulation: int) -> list[Tensor]:
    return list(batch.chunk(dist.get_world_size())[dist.get_rank()].chunk(accumulation))


def _mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _alive(events: list[Any], until_ns: int) -> dict[int, int]:
    alive: dict[int, int] = {}
    for event in events:
        if event.time_ns <= until_ns:
            if event.bytes > 0:
                alive[event.address] = event.bytes
            else:
                alive.pop(event.address, None)
    return alive


def _zero(name: str, precision: str, accumulation: int, zero: dict[str, Any]) -> Any:
    network = model()
    config = zero_config(
        STAGES[name],
        sum(parameter_sizes()),
        world_size=dist.get_world_size(),
        micro_batch=SEQUENCES // WORLD // accumulation,
        accumulation=accumulation,
        precision=precision,
        **zero,
    )
    optimizer = adamw(network.parameters())
    engine = zero_engine(network, optimizer, config)
    roots = {"optimizer": engine.optimizer, "engine": engine}

    def step(micro_batches: list[Tensor], look: Callable[..., None]) -> float:
        handle = optimizer.register_step_pre_hook(lambda *_: look("in the step", **roots))
        total = 0.0
        for number, batch in enumerate(micro_batches):
            loss = loss_of(engine, batch)
            engine.backward(loss)
            total += loss.item()
            del loss
            look(f"after backward {number}", **roots)
            engine.step()
        look("after the step", **roots)
        handle.remove()
        return total / len(micro_batches)

    return optimizer, step


def _fsdp(name: str, precision: str, accumulation: int, options: dict[str, Any]) -> Any:
    network = shard_blocks(model(), precision=precision, **options)
    optimizer = adamw(network.parameters())
    roots = {"model": network, "optimizer": optimizer}

    def step(micro_batches: list[Tensor], look: Callable[..., None]) -> float:
        total = 0.0
        for number, batch in enumerate(micro_batches):
            if number < len(micro_batches) - 1:
                with no_sync(network):
                    total += _backward(network, batch, accumulation)
            else:
                total += _backward(network, batch, accumulation)
            look(f"after backward {number}", **roots)
        optimizer.step()
        look("in the step", **roots)
        optimizer.zero_grad()
        look("after the step", **roots)
        return total / len(micro_batches)

    return optimizer, step


def _backward(network: nn.Module, batch: Tensor, accumulation: int) -> float:
    loss = loss_of(network, batch)
    (loss / accumulation).backward()
    return loss.item()
