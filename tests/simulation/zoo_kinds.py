"""Forty more programs, each of another kind, small enough to run for real on a CPU.

Each has a `build`, a `step` and stand-ins for what it asks. They run by the same code with data and
without, and `test_zoo_kinds.py` holds both peaks side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_ranks import ROWS, WIDTH, adamw, mlp, rows, update


class Kind(NamedTuple):
    """A program, and what to assume where it asks for values."""

    build: Callable[[], Any]
    step: Callable[..., Any]
    values: Any = None


KINDS: dict[str, Kind] = {}


def add(
    name: str,
    make: Callable[[], nn.Module],
    loss: Callable[[Any], Tensor],
    values: Any = None,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
) -> None:
    """A program whose step is a loss and an update."""

    def build() -> Any:
        model = make()
        return model, optimizer(p for p in model.parameters() if p.requires_grad)

    KINDS[name] = Kind(build, lambda m, o: update(loss(m), o), values)


# --- optimizers ----------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """By the sign of a mean."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                p.add_(mean.mul(0.9).add(p.grad, alpha=0.1).sign_(), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)


class Orthogonal(torch.optim.Optimizer):
    """Muon's iteration of Newton and Schulz on each matrix."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.95).add_(p.grad)
                if p.dim() < 2:
                    p.add_(momentum, alpha=-group["lr"])
                    continue
                x = momentum / (momentum.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                p.add_(x, alpha=-group["lr"])


class Sharpness:
    """SAM: a second gradient, taken where the loss is worse."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.base = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)


def sharp() -> Any:
    model = mlp()
    model.kept = [Sharpness(model.parameters())]
    return model, model.kept[0].base


def sharpened(model: Any, optimizer: Any) -> None:
    x = rows()
    model(x).square().mean().backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / norm for p in model.parameters()]
        for p, e in zip(model.parameters(), moves, strict=True):
            p.add_(e)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for p, e in zip(model.parameters(), moves, strict=True):
            p.sub_(e)
    optimizer.step()
    optimizer.zero_grad()


add("Lion", mlp, lambda m: m(rows()).square().mean(), optimizer=Lion)
add("Muon by hand", mlp, lambda m: m(rows()).square().mean(), optimizer=Orthogonal)
KINDS["SAM"] = Kind(sharp, sharpened)
add("Adadelta", mlp, lambda m: m(rows()).square().mean(), optimizer=torch.optim.Adadelta)


def scheduled(model: Any, optimizer: Any) -> None:
    """Accumulation, clipping by value and by norm, and a schedule."""
    for _ in range(3):
        (F.cross_entropy(model(rows()), torch.zeros(ROWS, dtype=torch.long)) / 3).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).step()
    optimizer.zero_grad()


KINDS["accumulation, clipping, schedule"] = Kind(lambda: adamw(mlp()), scheduled)

# --- losses --------------------------------------------------------------------------------------


def contrastive(model: nn.Module) -> Tensor:
    """InfoNCE of two views."""
    one, two = (F.normalize(model(rows())) for _ in range(2))
    return F.cross_entropy(one @ two.T / 0.1, torch.arange(ROWS))


def triplets(model: nn.Module) -> Tensor:
    """The hardest of each batch."""
    points = model(rows())
    apart = torch.cdist(points, points)
    same = torch.arange(ROWS)[:, None] % 8 == torch.arange(ROWS)[None] % 8
    far = apart.masked_fill(~same, -1).max(1).values
    near = apart.masked_fill(same, 1e9).min(1).values
    return F.relu(far - near + 0.3).mean()


def focal(model: nn.Module) -> Tensor:
    logits, labels = model(rows()), torch.zeros(ROWS, 10)
    loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (loss * (1 - torch.exp(-loss)) ** 2).mean()


def dice(model: nn.Module) -> Tensor:
    odds, truth = model(torch.randn(2, 3, 64, 64)).softmax(1), torch.ones(2, 4, 64, 64)
    return 1 - (2 * (odds * truth).sum((2, 3)) / (odds + truth).sum((2, 3))).mean()


def optimal_transport(model: nn.Module) -> Tensor:
    """Sinkhorn's iterations."""
    cost = torch.cdist(model(rows()), model(rows()))
    kernel, u = torch.exp(-cost / 0.1), torch.ones(ROWS)
    for _ in range(10):
        v = 1 / (kernel.T @ u)
        u = 1 / (kernel @ v)
    return (u[:, None] * kernel * v[None] * cost).sum()


def listwise(model: nn.Module) -> Tensor:
    scores = model(rows())
    ordered = scores.gather(1, torch.rand(ROWS, 10).argsort(1, descending=True))
    return -(ordered - ordered.flip(1).logcumsumexp(1).flip(1)).mean()


def covariance(model: nn.Module) -> Tensor:
    """VICReg's three terms."""
    a, b = model(rows()), model(rows())
    spread = F.relu(1 - a.var(0).add(1e-4).sqrt()).mean()
    between = (a - a.mean(0)).T @ (a - a.mean(0)) / ROWS
    off = between.flatten()[:-1].view(9, 11)[:, 1:].square().sum()
    return F.mse_loss(a, b) + spread + off


add("InfoNCE", mlp, contrastive)
add("batch-hard triplets", mlp, triplets)
add("focal loss", mlp, focal)
add(
    "Dice",
    lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 4, 1)
    ),
    dice,
)
add("Sinkhorn", mlp, optimal_transport)
add("ListMLE", mlp, listwise)
add("VICReg", mlp, covariance)


def preferences() -> Any:
    model = mlp()
    model.teacher = [mlp().requires_grad_(False)]
    return adamw(model)


def preferred(model: Any, optimizer: Any) -> None:
    """DPO: log-odds of two answers, beside those of a frozen copy."""
    x = torch.randn(2, ROWS, WIDTH)
    chosen = model(x).log_softmax(-1)[..., 0]
    with torch.no_grad():
        before = model.teacher[0](x).log_softmax(-1)[..., 0]
    margin = (chosen - before)[0] - (chosen - before)[1]
    update(-F.logsigmoid(0.1 * margin).mean(), optimizer)


def proximal(model: Any, optimizer: Any) -> None:
    """PPO: two epochs over what was sampled once."""
    x = rows()
    with torch.no_grad():
        policy = torch.distributions.Categorical(logits=model(x))
        action = policy.sample()
        before = policy.log_prob(action)
    for _ in range(2):
        now = torch.distributions.Categorical(logits=model(x))
        ratio = (now.log_prob(action) - before).exp()
        clipped = torch.min(ratio, ratio.clamp(0.8, 1.2))
        update(-clipped.mean() - 0.01 * now.entropy().mean(), optimizer)


KINDS["DPO"] = Kind(preferences, preferred)
KINDS["PPO"] = Kind(lambda: adamw(mlp()), proximal)
