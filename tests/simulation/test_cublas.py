"""cuBLAS's workspaces on a simulated GPU: one a thread, from its first product on."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from utils.memory import Category
from utils.simulation import simulate
from utils.simulation.cublas import LT_APART_UNTIL, LT_BYTES, Workspaces, workspace_bytes
from utils.simulation.cuda_choices import choose_optimizer_kernels
from utils.units import MIB

LT = LT_BYTES * (tuple(int(n) for n in torch.__version__.split(".")[:2]) <= LT_APART_UNTIL)


def train(model, _):
    model(torch.zeros(8, 64)).sum().backward()


def other(found):
    return found.breakdown[Category.OTHER]


@pytest.mark.parametrize(
    ("device", "each"),
    [("T4", 8320 * 1024), ("A100 80GB", 8320 * 1024), ("H100", 32 * MIB), ("MI300X", 128 * MIB)],
)
def test_a_training_step_takes_two(device, each):
    assert (
        other(simulate(lambda: (nn.Linear(64, 64, bias=False), None), train, device=device))
        == 2 * each
    )


def test_forward_alone_takes_one():
    def step(model, _):
        with torch.no_grad():
            model(torch.zeros(8, 64))

    assert other(simulate(lambda: (nn.Linear(64, 64), None), step)) == workspace_bytes((8, 0)) + LT


def test_recomputed_products_share_that_of_backward():
    def step(model, _):
        x = torch.zeros(8, 64, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()

    found = simulate(lambda: (nn.Linear(64, 64, bias=False), None), step)
    assert other(found) == 2 * workspace_bytes((8, 0))


def test_a_step_without_products_takes_none():
    def step(model, _):
        model(torch.zeros(1, 3, 8, 8)).sum().backward()

    assert other(simulate(lambda: (nn.Conv2d(3, 4, 3), None), step)) == 0


def test_a_cpu_has_none():
    def build():
        return nn.Linear(64, 64), None

    assert other(simulate(build, train, device="cpu")) == 0


def test_the_allocators_figures_contain_them():
    found = simulate(lambda: (nn.Linear(64, 64, bias=False), None), train, device="H100")
    assert found.allocator_bytes["allocated peak"] >= found.peak_bytes >= 64 * MIB
    assert found.reserved_bytes >= 64 * MIB


def test_products_with_a_bias_had_their_own_until_2_11(monkeypatch):
    aten = torch.ops.aten
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    taken = Workspaces((9, 0))
    assert taken.taken_by(aten.addmm.default) == 33 * MIB
    assert taken.taken_by(aten.addmm.default) == taken.taken_by(aten.relu.default) == 0
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    assert Workspaces((9, 0)).taken_by(aten.addmm.default) == 32 * MIB


def test_adafactor_loops_over_tensors_on_a_gpu_too():
    weight = [nn.Parameter(torch.zeros(2, 2))]
    optimizers = [torch.optim.Adafactor(weight), torch.optim.AdamW(weight)]
    choose_optimizer_kernels(optimizers)
    assert [o.param_groups[0]["foreach"] for o in optimizers] == [None, True]


def test_what_build_takes_is_there_in_the_step():
    def build():
        model = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            model(torch.zeros(8, 64))
        return model, None

    found = simulate(build, lambda model, _: (2 * model.weight).sum().backward())
    assert found.allocator_bytes["allocated peak"] >= workspace_bytes((8, 0))
    assert found.peak_bytes >= workspace_bytes((8, 0))
