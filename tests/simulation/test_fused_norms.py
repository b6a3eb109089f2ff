"""RMSNorm on a simulated GPU: the fused kernel keeps its input and one fp32 per row."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from utils.memory import Category
from utils.simulation import simulate

NORMS, ROWS, WIDTH = 8, 4096, 4096
BYTES = ROWS * WIDTH * 2
STATISTICS = ROWS * 4


class Chain(nn.Module):
    def __init__(self, norms=NORMS, **options):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, **options) for _ in range(norms))

    def forward(self, x):
        for norm in self.norms:
            x = norm(x)
        return x


def simulated(step, model=Chain, dtype=torch.bfloat16, **options):
    def build():
        made = model(**options).to(dtype)
        return made, torch.optim.SGD(made.parameters(), lr=0.1)

    return simulate(build, step, device="A100-80GB")


def rows(model, dtype=torch.bfloat16):
    return torch.randn(ROWS, WIDTH, dtype=dtype, device=model.norms[0].weight.device)


def train(model, optimizer):
    model(rows(model)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_each_keeps_its_input_and_a_number_a_row():
    found = simulated(train)
    kept = found.breakdown[Category.ACTIVATIONS]
    # Of a chain of eight, seven inputs are results of the norm before; the last result is summed.
    assert kept == (NORMS - 1) * BYTES + NORMS * STATISTICS


@pytest.mark.parametrize("norms", [1, 3])
def test_one_more_norm_costs_its_input_its_row_numbers_and_its_weight(norms):
    def step(model, optimizer):
        x = rows(model).requires_grad_()
        y = model(x)
        y.backward(torch.empty_like(y))
        optimizer.zero_grad()

    more, fewer = (simulated(step, norms=n).peak_bytes for n in (norms + 1, norms))
    assert more - fewer == BYTES + STATISTICS + WIDTH * 2


def test_a_weight_of_another_type_goes_through_plain_operations():
    def step(model, optimizer):
        model(rows(model)).sum().backward()

    fused = simulated(step, norms=2).peak_bytes
    with pytest.warns(UserWarning, match="Cannot dispatch to fused implementation"):
        composed = simulated(step, norms=2, dtype=torch.float32).peak_bytes
    assert composed > 3 * fused


def test_recomputed_it_is_the_same():
    def step(model, optimizer):
        x = rows(model).requires_grad_()
        checkpoint(model, x, use_reentrant=False).sum().backward()

    plain, recomputed = simulated(train), simulated(step)
    assert recomputed.peak_bytes <= plain.peak_bytes + BYTES


def test_a_gradient_of_the_gradient():
    def step(model, optimizer):
        x = rows(model).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        assert model.norms[0].weight.grad is not None

    simulated(step, norms=2)


def test_rows_that_lie_apart_are_copied_for_the_kernel_alone():
    def step(model, optimizer):
        x = torch.randn(WIDTH, ROWS, dtype=torch.bfloat16, device=model.norms[0].weight.device)
        model(x.t()).sum().backward()

    apart = simulated(step, norms=1)
    assert apart.breakdown[Category.ACTIVATIONS] <= STATISTICS + BYTES


def test_without_weight():
    def step(model, optimizer):
        x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device=model.head.weight.device)
        model.head(model.norm(x)).sum().backward()

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH, elementwise_affine=False)
            self.head = nn.Linear(WIDTH, 8, bias=False)

    found = simulated(step, model=Plain)
    small = 4 * WIDTH * 8 * 2 + ROWS * 8 * 2 + 2048
    ours = found.peak_bytes - found.breakdown[Category.OTHER]
    assert 2 * BYTES + STATISTICS <= ours <= 2 * BYTES + STATISTICS + small
