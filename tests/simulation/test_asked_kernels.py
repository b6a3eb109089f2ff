"""On a CPU the simulator asks this machine's kernels what they take in between: the meter's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from utils.memory import measure
from utils.memory.source import CountingSource, source_for
from utils.simulation import asked_kernels, simulate
from utils.simulation.scratch import cpu_scratch

pytestmark = pytest.mark.skipif(
    not isinstance(source_for(torch.device("cpu")), CountingSource),
    reason="needs the counting allocator, and so a C++ compiler",
)


@pytest.fixture(params=[1, 2, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def trained(*shape: int, swapped: bool = False) -> Callable[..., None]:
    """A step on one batch of a shape, which comes transposed if it is `swapped`."""

    def step(model: nn.Module, optimizer: Any) -> None:
        x = torch.randn(*shape)
        model(x.transpose(1, 2) if swapped else x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def projected(model: nn.Module, _: Any) -> None:
    """GaLore's step: gradients in the subspace of their largest singular values."""
    model(torch.randn(64, 256)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            u = torch.linalg.svd(p.grad, full_matrices=False)[0][:, :8]
            p -= 0.1 * (u @ (u.T @ p.grad))
            p.grad = None


def narrow(width: int = 512) -> nn.Module:
    return nn.Sequential(nn.Linear(256, width, bias=False), nn.Linear(width, 96, bias=False))


def by(optimizer: Any, make: Callable[[], nn.Module]) -> Callable[[], Any]:
    return lambda: (model := make(), optimizer(model.parameters()))


def sgd(make: Callable[[], nn.Module]) -> Callable[[], Any]:
    return by(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), make)


CASES: dict[str, tuple[Callable[[], Any], Callable[..., None]]] = {
    "patches in 3D": (
        sgd(lambda: nn.Conv3d(3, 64, (2, 16, 16), (2, 16, 16))),
        trained(2, 3, 4, 64, 64),
    ),
    "patches of 16": (sgd(lambda: nn.Conv2d(3, 96, 16, 16)), trained(4, 3, 64, 64)),
    "patches of 4": (sgd(lambda: nn.Conv2d(3, 40, 4, 4)), trained(3, 3, 48, 32)),
    "Conv3d of one channel": (sgd(lambda: nn.Conv3d(1, 4, 3)), trained(2, 1, 8, 16, 16)),
    "Conv3d": (sgd(lambda: nn.Conv3d(8, 16, 3, padding=1)), trained(2, 8, 8, 16, 16)),
    "strided Conv3d": (sgd(lambda: nn.Conv3d(3, 16, 3, 2)), trained(2, 3, 8, 32, 32)),
    "ConvTranspose1d": (sgd(lambda: nn.ConvTranspose1d(16, 32, 4, 2)), trained(4, 16, 200)),
    "channel by channel": (
        sgd(lambda: nn.Conv2d(24, 24, 7, padding=3, groups=24)),
        trained(2, 24, 28, 28),
    ),
    "BatchNorm1d, transposed": (
        sgd(lambda: nn.Sequential(nn.BatchNorm1d(64))),
        trained(16, 100, 64, swapped=True),
    ),
    "BatchNorm1d": (sgd(lambda: nn.Sequential(nn.BatchNorm1d(64))), trained(16, 64, 100)),
    "Muon": (by(torch.optim.Muon, narrow), trained(64, 256)),
    "Muon, odd sizes": (by(torch.optim.Muon, lambda: narrow(333)), trained(64, 256)),
    "GaLore": (lambda: (narrow(), None), projected),
    "GaLore, odd sizes": (lambda: (narrow(201), None), projected),
}


@pytest.mark.parametrize("name", CASES)
def test_simulated_over_metered(name: str, threads: int) -> None:
    build, step = CASES[name]
    simulated = simulate(build, step, device="cpu").peak_bytes
    model, optimizer = build()
    real = measure(lambda: step(model, optimizer), model=model, optimizer=optimizer, timed_steps=0)
    ratio = simulated / real.peak_bytes
    assert ratio == pytest.approx(1, abs=0.005), (
        f"{ratio:.4f} of the allocator on {threads} threads"
    )


def test_what_is_too_large_to_be_asked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    build, step = CASES["patches of 16"]
    assert not any("Low on a CPU" in note for note in simulate(build, step, device="cpu").notes)
    monkeypatch.setattr(asked_kernels, "MOST_BYTES", 1024)
    monkeypatch.setattr(asked_kernels, "_answers", {})
    said = next(n for n in simulate(build, step, device="cpu").notes if "Low on a CPU" in n)
    assert "convolution, convolution_backward" in said


aten = torch.ops.aten
NUMBERS, INDICES = torch.ones(64, 64), torch.zeros(8, dtype=torch.long)
UNSAFE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "indices": (aten.embedding.default, (NUMBERS, INDICES)),
    "places": (aten.index_put.default, (NUMBERS, [INDICES], NUMBERS[:8])),
    "pivots": (aten.linalg_lu_solve.default, (NUMBERS, torch.ones(64, dtype=torch.int32), NUMBERS)),
    "another's work space": (aten.mkldnn_rnn_layer_backward.default, (NUMBERS,) * 4),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_reads_by_value_is_never_run_on_invented_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(asked_kernels, "_answers", {})
    monkeypatch.setattr(asked_kernels, "_run", lambda *call: ran.append(call))
    kernels = asked_kernels.AskedKernels(lambda *_: 0)
    func, args = UNSAFE[name]
    assert kernels.scratch(func, args, NUMBERS, {}) == 0 and not ran
    kernels.scratch(aten.mm.default, (NUMBERS[:7], NUMBERS), NUMBERS[:7], {})
    assert len(ran) == 1, "a product of matrices is"


def test_asking_leaves_the_random_numbers_as_they_were() -> None:
    before = torch.get_rng_state()
    asked_kernels.AskedKernels(cpu_scratch).scratch(
        aten.mm.default, (NUMBERS[:9], NUMBERS), NUMBERS[:9], {}
    )
    assert torch.equal(torch.get_rng_state(), before)
