"""What the checks of lab 09 run on ranks: the learner's ZeRO-1 step on a small model."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from utils.memory.holdings import reachable_storages
from utils.traffic.counter import Sent, traffic

ROWS, STEPS, RATE, MOMENTUM = 16, 3, 0.1, 0.9


LOOKS = 10


class Zero1Report(NamedTuple):
    """One rank after three steps: its parameters and those of right and wrong rules.

    `elsewhere_bytes` are those of tensors that the steps left alive outside of model and state.
    """

    parameters: Tensor
    right: Tensor
    summed: Tensor
    state_bytes: int
    elsewhere_bytes: int
    sent: dict[str, int]
    calls: int


def network() -> nn.Module:
    """272 parameters: 4 ranks share them evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4, bias=False), nn.Tanh())


def zero_1(step: Callable[..., Any]) -> Zero1Report:
    """On every rank: three steps of the learner's."""
    gc.freeze()  # what came with the fork is not looked at, so that its pages are not copied
    model, state = network(), {}
    for number in range(STEPS - 1):
        _stepped(step, model, state, number)
    sent, last_batch = _stepped(step, model, state, STEPS - 1)
    bytes_sent: dict[str, int] = {}
    for row in sent.rows:
        bytes_sent[row.collective] = bytes_sent.get(row.collective, 0) + row.payload_bytes
    known = {"model": model, "state": state, "batch": last_batch}
    kept, elsewhere = _bytes(state=state), _elsewhere(known)
    calls = sum(row.calls for row in sent.rows)
    summed = _trained(dist.get_world_size())
    return Zero1Report(_flat(model), _trained(1.0), summed, kept, elsewhere, bytes_sent, calls)


def _stepped(
    step: Callable[..., Any], model: nn.Module, state: dict[Any, Any], number: int
) -> tuple[Sent, tuple[Tensor, Tensor]]:
    """What one step sent, and the batch that it worked on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, targets = batch(number)
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    model.zero_grad()
    F.mse_loss(model(inputs[mine]), targets[mine]).backward()
    with traffic() as sent:
        step(list(model.parameters()), state, RATE)
    return sent, (inputs, targets)


def _elsewhere(known: dict[str, Any]) -> int:
    """Bytes of tensors outside of what is known, once gloo's threads let go of what they sent."""
    least = _bytes(**known, rest=_alive()) - _bytes(**known)
    for _ in range(LOOKS):
        if not least:
            break
        time.sleep(0.02)
        least = min(least, _bytes(**known, rest=_alive()) - _bytes(**known))
    return least


def _alive() -> list[Tensor]:
    """Every tensor made since `gc.freeze` that anything still refers to."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), Tensor)]


def _bytes(**roots: Any) -> int:
    return sum(row.bytes for row in reachable_storages(**roots))


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs (16, 12) and targets (16, 4) of a step, of all ranks."""
    random = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, 12, generator=random), torch.randn(ROWS, 4, generator=random)


def _trained(gradient_scale: float) -> Tensor:
    """One process, whole batches; the gradient multiplied."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for number in range(STEPS):
        inputs, targets = batch(number)
        optimizer.zero_grad()
        (gradient_scale * F.mse_loss(model(inputs), targets)).backward()
        optimizer.step()
    return _flat(model)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
