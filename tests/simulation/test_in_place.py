"""What backward does in place with data, and losses that hold more than a number: the meter's bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from utils.memory import measure
from utils.simulation import simulate

pytestmark = pytest.mark.usefixtures("one_thread", "counting")
Tensor = torch.Tensor
ROWS, WIDTH = 1024, 256


def zeros() -> Tensor:
    return torch.zeros(ROWS, WIDTH)


def first(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long)


def image(y: Tensor) -> Tensor:
    return y.view(4, 16, 64, 64)


class Own(torch.autograd.Function):
    """Adds two gradients of its own, and keeps both: not in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        one, other = grads[0] * 2, grads[0] * 3
        both = one + other
        return both + one.mul(other)


seen: list[Tensor] = []


def held(y: Tensor) -> Tensor:
    """The first gradient of two is held by the program."""
    seen.clear()
    one = y.sin()
    one.register_hook(lambda grad: seen.append(grad))
    return (one * 2 + y.cos()).mul(y).mean()


def twice(y: Tensor) -> Tensor:
    """A graph of the gradient: nothing is added in place where it is recorded."""
    (grad,) = torch.autograd.grad((y.sin() * y.cos()).sum(), y, create_graph=True)
    return grad.square().mean()


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "a residual": lambda y: ((y + y.sin()) * y).cos().mean(),
    "three uses": lambda y: torch.stack([y] * 3).mean(),
    "two slices": lambda y: (y[:, :128].sin() * y[:, 128:].cos()).mean(),
    "held": held,
    "own function": lambda y: (Own.apply(y) * y).mean(),
    "second derivative": twice,
    "index_select": lambda y: y.index_select(0, torch.arange(ROWS)).mean(),
    "gather": lambda y: y.gather(1, first(ROWS, WIDTH)).mean(),
    "log of a choice": lambda y: -y.log_softmax(1).gather(1, first(ROWS, 1)).mean(),
    "take": lambda y: y.take(torch.arange(ROWS * 200)).mean(),
    "rows": lambda y: y[torch.arange(ROWS)].mean(),
    "elements": lambda y: y[torch.arange(ROWS), first(ROWS)].mean(),
    "largest": lambda y: y.max(1).values.mean(),
    "topk": lambda y: y.topk(64, 1).values.mean(),
    "sorted": lambda y: y.sort(1).values.mean(),
    "median": lambda y: y.median(1).values.mean(),
    "kthvalue": lambda y: y.kthvalue(3, 1).values.mean(),
    "cdist": lambda y: torch.cdist(y[:256], y[256:512]).mean(),
    "unfold": lambda y: F.unfold(image(y), 3).mean(),
    "mse": lambda y: F.mse_loss(y, zeros()),
    "mse, each": lambda y: F.mse_loss(y, zeros(), reduction="none").mean(),
    "smooth L1": lambda y: F.smooth_l1_loss(y, zeros()),
    "Huber": lambda y: F.huber_loss(y, zeros(), reduction="sum"),
    "probabilities": lambda y: F.binary_cross_entropy(y.sigmoid(), zeros()),
    "soft margin": lambda y: F.soft_margin_loss(y, torch.ones(ROWS, WIDTH)),
    "weights of the positive": lambda y: F.binary_cross_entropy_with_logits(
        y, zeros(), pos_weight=torch.ones(WIDTH)
    ),
    "Gaussian": lambda y: F.gaussian_nll_loss(y, zeros(), torch.ones(ROWS, WIDTH)),
    "product": lambda y: y.prod(),
    # Away from 0: for a single zero among a million numbers their backward takes another way.
    "products of rows": lambda y: (y.abs() + 0.5).prod(1).mean(),
    "cumprod": lambda y: (y.abs() + 0.5).cumprod(1).mean(),
    "cummax": lambda y: y.cummax(1).values.mean(),
    "largest of all": lambda y: y.max(),
    "minimum": lambda y: torch.minimum(y[:512], y[512:]).mean(),
    "quantile": lambda y: y.quantile(0.3, 1).mean(),
    "quantiles of all": lambda y: y[:512].quantile(torch.tensor([0.1, 0.9])).mean(),
    "nanquantile": lambda y: y.nanquantile(0.3, 1).mean(),
    "multinomial": lambda y: y.gather(1, y.softmax(1).multinomial(1)).mean(),
    "matrix_exp": lambda y: torch.linalg.matrix_exp(y[:256]).mean(),
    "attention": lambda y: F.scaled_dot_product_attention(*(y.view(4, 4, 64, 256),) * 3).mean(),
    "counted": lambda y: y.mean() + (y > 0).sum(),
    "two of them": lambda y: (
        F.binary_cross_entropy(y.sigmoid(), zeros())
        + F.binary_cross_entropy((2 * y).sigmoid(), zeros(), reduction="sum")
    ),
    "hinge": lambda y: F.hinge_embedding_loss(y, torch.ones(ROWS, WIDTH)),
}


@pytest.mark.parametrize("name", CASES)
def test_simulated_over_metered(name: str) -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        CASES[name](model(torch.randn(ROWS, WIDTH))).backward()
        seen.clear()
        optimizer.step()
        optimizer.zero_grad()

    def build() -> Any:
        model = nn.Linear(WIDTH, WIDTH)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    simulated = simulate(build, step, device="cpu").peak_bytes
    model, optimizer = build()
    real = measure(lambda: step(model, optimizer), model=model, optimizer=optimizer, timed_steps=0)
    ratio = simulated / real.peak_bytes
    assert ratio == pytest.approx(1, abs=0.002), f"{ratio:.4f} of the allocator"
