"""The last cell's blocks: ranks that time their links, find a late one, and send once a step."""

from __future__ import annotations

import contextlib
import io
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
from utils.units import MIB

RANKS, LATE, LATE_SECONDS, MICRO_BATCHES = 2, 1, 0.1, 4
NODES, GPUS_A_NODE = 2, 2
STEPS = 8  # of the 20 that the block would take
MOST_GB_PER_SECOND = 2_000.0  # no link of today
RATE = 0.1


def block_1(text: str) -> None:
    """The figure of nccl-tests, from six all-reduces; of 4 MiB here, for a laptop's sake."""
    assert "2**29" in text, "the block's tensor is no longer of 2 GiB: what is made smaller here?"
    for found in run_ranks(_timed, RANKS, text.replace("2**29", "2**20")):
        nbytes, seconds, bandwidth, calls, sums, says = found
        expected = bus_bytes_per_second("all-reduce", RANKS, nbytes, seconds) / 1e9
        assert abs(bandwidth / expected - 1) < 1e-9, f"{bandwidth}, by nccl-tests {expected} GB/s"
        assert 0 < bandwidth < MOST_GB_PER_SECOND, f"{bandwidth} GB/s"
        assert calls == 6 and sums == RANKS**6, f"{calls} all-reduces to {sums}"
        assert says is None or "of the ports" in says, f"it prints {says!r}"


def block_2(text: str) -> None:
    """The rank that takes longer by itself is named on every rank, and nobody else."""
    for slow in run_ranks(_late, RANKS, text):
        assert [rank for rank, _ in slow] == [LATE], f"rank {LATE} is slow, and named are {slow}"


def block_3(text: str) -> None:
    """Gradients sent once for all micro-batches, and the weights of one process."""
    for calls, weights in run_ranks(_accumulated, RANKS, text):
        assert calls == 1, f"{calls} all-reduces in a step: one bucket, once, was promised"
        torch.testing.assert_close(weights, _alone(), rtol=0, atol=1e-12)


def block_4(text: str) -> None:
    """Two nodes of two ranks: shards added up across nodes in the last pass alone; the same gradients."""
    expected = _gradients_alone(NODES * GPUS_A_NODE)
    for calls, found in run_ranks(_hybrid, NODES * GPUS_A_NODE, text):
        assert 0 < calls["all-reduce"] <= len(_Layered().layers) + 1, f"in every pass: {calls}"
        passes = len(_batches()) // (NODES * GPUS_A_NODE)
        assert calls["reduce-scatter"] == passes * calls["all-reduce"], f"kept whole: {calls}"
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def _timed(text: str) -> tuple[int, float, float, int, float, str | None]:
    said = io.StringIO()
    with traffic() as sent, contextlib.redirect_stdout(said):
        names = run_block(text, device=rank_device())
    calls = sum(row.calls for row in sent.rows if row.collective == "all-reduce")
    gradients = names["gradients"]
    return (
        gradients.nbytes,
        names["seconds"],
        names["busbw_gb_per_second"],
        calls,
        gradients[0].item(),
        said.getvalue() if dist.get_rank() == 0 else None,
    )


def _late(text: str) -> list[tuple[int, float]]:
    device = rank_device()
    model = DistributedDataParallel(_model().to(device))

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        if dist.get_rank() == LATE:
            time.sleep(LATE_SECONDS)
        return _loss_of(model, batch)

    batches = [each.to(device) for each in _batches()[:STEPS]]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with contextlib.redirect_stdout(io.StringIO()):
        names = run_block(text, model=model, batches=batches, loss_of=loss_of, optimizer=optimizer)
    return names["slow"]


def _hybrid(text: str) -> tuple[dict[str, int], Tensor]:
    """Calls by kind, and the whole gradients of all ranks' micro-batches."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), rank_device()
    names: dict[str, Any] = {
        "model": _Layered().to(device),
        "batches": [each.to(device) for each in _batches()[rank::ranks]],
        "loss_of": _loss_of,
        "device": device,
        "nodes": NODES,
        "gpus_a_node": GPUS_A_NODE,
    }
    with traffic() as sent:
        names = run_block(text, **names)
    calls = {
        kind: sum(row.calls for row in sent.rows if row.collective == kind)
        for kind in ("reduce-scatter", "all-reduce")
    }
    whole = [p.grad.full_tensor().flatten() for p in names["model"].parameters()]
    return calls, torch.cat(whole).cpu()


def _gradients_alone(ranks: int) -> Tensor:
    model, batches = _Layered(), _batches()
    for batch in batches:
        (_loss_of(model, batch) / len(batches)).backward()
    assert len(batches) % ranks == 0, f"{len(batches)} micro-batches over {ranks} ranks"
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _accumulated(text: str) -> tuple[int, Tensor]:
    """All-reduces of gradients, and the weights after a step."""
    rank, device = dist.get_rank(), rank_device()
    batches = [each.to(device) for each in _batches()[rank::RANKS]]
    names: dict[str, Any] = {"model": _model().to(device), "batches": batches, "loss_of": _loss_of}
    # The wrap itself compares the ranks' models; what is counted begins after it.
    wrap, steps = text.split("for number", 1)
    names = run_block(wrap, **names)
    assert isinstance(names["model"], DistributedDataParallel)
    assert names["model"].bucket_bytes_cap == 50 * MIB, "not the size that the comment explains"
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


class _Layered(nn.Module):
    """A model with `layers`, as the block calls them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()


def _batches() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return list(torch.randn(RANKS * MICRO_BATCHES, 4, 8, dtype=torch.float64, generator=numbers))


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
