"""The last cell's blocks: two ranks that time their links, find a late rank, and send once a step."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.lessons.blocks import run_block
from utils.ranks import rank_device, run_ranks
from utils.traffic.cost import bus_bytes_per_second
from utils.traffic.counter import traffic

RANKS, LATE, LATE_SECONDS, MICRO_BATCHES = 2, 1, 0.3, 4
MOST_GB_PER_SECOND = 2_000.0  # no link of today
RATE = 0.1


def block_1(text: str) -> None:
    """The figure of nccl-tests, from six all-reduces of 256 MiB."""
    for names in run_ranks(_timed, RANKS, text):
        nbytes, seconds, found, calls, sums = names
        expected = bus_bytes_per_second("all-reduce", RANKS, nbytes, seconds) / 1e9
        assert abs(found / expected - 1) < 1e-9, f"{found} GB/s, by nccl-tests' formula {expected}"
        assert 0 < found < MOST_GB_PER_SECOND, f"{found} GB/s"
        assert calls == 6 and sums == RANKS**6, f"{calls} all-reduces to {sums}"


def block_2(text: str) -> None:
    """The rank that comes late waits least, and every rank says which it is."""
    found = run_ranks(_late, RANKS, text)
    for slowest, waits in found:
        assert slowest == LATE, f"rank {LATE} came late, and rank {slowest} is named: {waits}"
        longest = max(waits)
        assert longest > 0.5 * LATE_SECONDS, f"nobody waited for it: {waits}"


def block_3(text: str) -> None:
    """Gradients sent once for all micro-batches, and the weights of one process."""
    for calls, weights in run_ranks(_accumulated, RANKS, text):
        assert calls == 1, f"{calls} all-reduces in a step: one bucket, once, was promised"
        torch.testing.assert_close(weights, _alone(), rtol=0, atol=1e-12)


def _timed(text: str) -> tuple[int, float, float, int, float]:
    with traffic() as sent:
        names = run_block(text, device=rank_device())
    calls = sum(row.calls for row in sent.rows if row.collective == "all-reduce")
    gradients = names["gradients"]
    return (
        gradients.nbytes,
        names["seconds"],
        names["busbw_gb_per_second"],
        calls,
        gradients[0].item(),
    )


def _late(text: str) -> tuple[int, list[float]]:
    dist.barrier()
    if dist.get_rank() == LATE:
        time.sleep(LATE_SECONDS)
    names = run_block(text)
    return names["slowest"], names["waits"]


def _accumulated(text: str) -> tuple[int, Tensor]:
    """All-reduces of gradients, and the weights after a step."""
    rank, device = dist.get_rank(), rank_device()
    batches = [each.to(device) for each in _batches()[rank::RANKS]]
    names: dict[str, Any] = {"model": _model().to(device), "batches": batches, "loss_of": _loss_of}
    # The wrap itself compares the ranks' models; what is counted begins after it.
    wrap, steps = text.split("for number", 1)
    names = run_block(wrap, **names)
    assert isinstance(names["model"], DistributedDataParallel)
    with traffic() as sent:
        run_block(f"for number{steps}", **names)
    torch.optim.SGD(names["model"].parameters(), lr=RATE).step()
    calls = sum(row.calls for row in sent.rows if row.collective == "all-reduce")
    return calls, _flat(names["model"]).cpu()


def _alone() -> Tensor:
    model = _model()
    batches = _batches()
    for batch in batches:
        (_loss_of(model, batch) / len(batches)).backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return _flat(model)


def _loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()


def _batches() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return list(torch.randn(RANKS * MICRO_BATCHES, 4, 8, dtype=torch.float64, generator=numbers))


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
