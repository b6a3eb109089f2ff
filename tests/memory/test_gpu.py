"""On a GPU: the meter, the simulator and the labels of lessons against CUDA's own allocator.

Without one these are skipped; `make record` runs them on the first GPU that is met.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_programs import PROGRAMS, TINY
from torch import nn

from utils.catalog import DEVICES
from utils.memory import measure
from utils.models import Transformer
from utils.ranks import run_ranks
from utils.simulation import simulate
from utils.techniques.precision import tf32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_meter_counts_what_the_allocator_was_asked_for(name: str) -> None:
    build, step = PROGRAMS[name]
    model, optimizer = build()
    found = measure(lambda: step(model, optimizer), model=model, optimizer=optimizer, timed_steps=0)
    asked = found.allocator_bytes["requested peak"]
    assert found.peak_bytes == pytest.approx(asked, rel=0.005), f"{name}: meter against allocator"


@pytest.mark.parametrize("name", ["plain", "checkpointed"])
def test_the_simulator_comes_near(name: str) -> None:
    """Convolutions are left out: which algorithm cuDNN takes, and its workspace, it alone knows."""
    capability = torch.cuda.get_device_capability()
    card = next((d for d in DEVICES.values() if tuple(d.capability) == capability), None)
    if card is None:
        pytest.skip(f"the catalog has no card of capability {capability}")
    build, step = PROGRAMS[name]
    model, optimizer = build()
    real = measure(lambda: step(model, optimizer), model=model, optimizer=optimizer, timed_steps=0)
    found = simulate(build, step, device=card.name, values=True)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.03), f"{name}: simulated"


def test_losses_are_those_of_the_cpu() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = Transformer(TINY).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for seed in range(4):
            tokens = torch.randint(4096, (2, 65), generator=torch.Generator().manual_seed(seed))
            tokens = tokens.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    with tf32(False):
        assert losses("cuda") == pytest.approx(losses("cpu"), rel=1e-3), "four steps, fp32"


def test_the_scaler_skips_a_step_that_overflows() -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    with torch.autocast("cuda", torch.float16):
        loss = (weight.half() * 1000).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.ones_like(weight)), "an overflowed step changed the weights"
    assert scaler.get_scale() < 2.0**24, "the scale did not fall"


def summed() -> float:
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    return total.item()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_ranks_speak_nccl() -> None:
    count = min(4, torch.cuda.device_count())
    assert run_ranks(summed, count) == [float(count)] * count, "an all-reduce over NCCL"
