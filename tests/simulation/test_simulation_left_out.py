"""What programs do around a step: it runs, with a remark where something is left out, or a sentence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchvision.ops import DeformConv2d

from utils.memory import measure
from utils.memory.source import CountingSource, source_for
from utils.simulation import simulate
from utils.simulation.cuda_allocator import reserved
from utils.simulation.devices import simulated_device
from utils.units import MIB

pytestmark = pytest.mark.filterwarnings("ignore")  # what these ways warn of themselves


def layer() -> nn.Module:
    return nn.Linear(64, 64).cuda()


def adamw(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(64, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_static_graph_takes_what_a_plain_one_takes() -> None:
    def build(static: bool) -> Any:
        wrapped = nn.parallel.DistributedDataParallel
        return adamw(wrapped(nn.Sequential(layer(), layer()), static_graph=static))

    peaks = {simulate(lambda s=s: build(s), step, world=8).peak_bytes for s in (False, True)}
    assert len(peaks) == 1


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(64)


def with_workers(model: nn.Module, optimizer: Any) -> None:
    for x in torch.utils.data.DataLoader(Samples(), batch_size=32, num_workers=2):
        model(x.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def joined() -> Any:
    dist.init_process_group("nccl")
    return adamw(layer())


def recorded(model: nn.Module, optimizer: Any) -> None:
    y = model(torch.randn(64, 64, device="cuda"))
    y.record_stream(torch.cuda.current_stream())
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


ddp = nn.parallel.DistributedDataParallel


def joined_in_the_step(model: nn.Module, optimizer: Any) -> None:
    dist.init_process_group("nccl", init_method="env://")
    step(model, optimizer)
    dist.destroy_process_group()


def uneven(model: Any, optimizer: Any) -> None:
    with model.join():
        step(model, optimizer)


def beside_a_thread(model: nn.Module, optimizer: Any) -> None:
    beside = threading.Thread(target=int)
    beside.start()
    step(model, optimizer)
    beside.join()


def clipped(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(64, 64, device="cuda")).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("build", "run", "remark"),
    [
        (joined, step, "init_process_group() is left out"),
        (lambda: adamw(torch.jit.script(layer())), step, "torch.jit is left out"),
        (lambda: adamw(layer()), with_workers, "workers are left out"),
        (lambda: adamw(layer()), recorded, "record_stream() is left out"),
        (lambda: adamw(layer()), clipped, "no gradient is infinite"),
        (lambda: adamw(layer()), joined_in_the_step, "init_process_group() is left out"),
        (lambda: adamw(ddp(layer())), uneven, "join() is left out"),
        (lambda: adamw(torch.jit.freeze(layer())), step, "torch.jit is left out"),
        (lambda: adamw(layer()), beside_a_thread, "A thread is started"),
    ],
)
def test_it_runs_with_a_remark(build: Any, run: Any, remark: str) -> None:
    found = simulate(build, run)
    assert any(remark in note for note in found.notes), found.notes
    assert found.peak_bytes >= 4 * 4 * (64 * 64 + 64)


def test_a_default_device_is_the_simulated_one() -> None:
    """PyTorch itself would look for a GPU, and go on looking after the simulation."""

    def by_default(model: nn.Module, optimizer: Any) -> None:
        torch.set_default_device("cuda")
        assert torch.randn(3).device.type == torch.get_default_device().type == "cuda"
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
        step(model, optimizer)

    plain = simulate(lambda: adamw(layer()), step)
    assert simulate(lambda: adamw(layer()), by_default).peak_bytes == plain.peak_bytes
    assert torch.zeros(3).device.type == "cpu"


def test_one_replica_of_data_parallel_is_its_module() -> None:
    plain, wrapped = (
        simulate(lambda w=w: adamw(w(layer())), step) for w in (nn.Sequential, nn.DataParallel)
    )
    assert plain.peak_bytes == wrapped.peak_bytes


def counted(model: nn.Module, _: Any) -> None:
    rows = model(torch.ones(64, 64, device="cuda"))
    sizes = torch.bincount(rows.argmax(-1), minlength=2).tolist()
    torch.cat([torch.zeros(size, 1024, device="cuda") for size in sizes[:2]])


def test_counts_can_be_given_and_nothing_is_called_a_bound() -> None:
    few, many = (
        simulate(lambda: nn.Linear(64, 2).cuda(), counted, values={"sizes": sizes})
        for sizes in ([8, 8], [512, 256])
    )
    assert many.peak_bytes - few.peak_bytes == 2 * 4 * 1024 * (768 - 16)
    assert any(note.startswith("No upper bound") for note in many.notes)


def test_a_verdict_is_that_of_the_bytes_reserved() -> None:
    card = simulated_device("RTX 4090")
    room = card.usable_bytes or 0
    assert card.verdict(room - MIB, room - MIB).startswith("Fits")
    assert "what the allocator reserves" in card.verdict(room - MIB, room + MIB)
    assert card.verdict(room + MIB, room + 3 * MIB).endswith("1.00 MiB too much.")


def test_near_its_end_the_allocator_gives_back_what_is_free() -> None:
    """30 MiB, given back, and 40 MiB: 70 MiB are reserved where there is room, and 40 where not."""
    events = [(1, 1, 30 * MIB), (2, 1, -30 * MIB), (3, 2, 40 * MIB)]
    assert reserved([], events, None).reserved_peak_bytes == 70 * MIB
    assert reserved([], events, 50 * MIB).reserved_peak_bytes <= 50 * MIB
    assert reserved([], events, 39 * MIB).reserved_peak_bytes == 70 * MIB


class Deformed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.layer = (
            nn.Conv2d(16, 18, 3, padding=1),
            DeformConv2d(16, 16, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, self.offsets(x))


def masked(model: nn.Module, optimizer: Any) -> None:
    rows = model(torch.randn(4096, 256))
    rows[rows > -1e9].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def deformed(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(4, 16, 32, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make", "run"), [(Deformed, deformed), (lambda: nn.Linear(256, 256), masked)]
)
def test_beside_the_meter(make: Callable[[], nn.Module], run: Callable[..., Any]) -> None:
    if not isinstance(source_for(torch.device("cpu")), CountingSource):
        pytest.skip("needs the counting allocator, and so a C++ compiler")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sgd = lambda: (m := make(), torch.optim.SGD(m.parameters(), lr=0.1))  # noqa: E731
        simulated = simulate(sgd, run, device="cpu", values=True)
        model, optimizer = sgd()
        real = measure(
            lambda: run(model, optimizer), model=model, optimizer=optimizer, timed_steps=0
        )
    finally:
        torch.set_num_threads(threads)
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.005)
