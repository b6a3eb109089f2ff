"""What lab 19 runs on ranks: the learner's dispatch that sends a token once to a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from utils.traffic.counter import traffic

RANKS, TOKENS, H, WIDTH, EXPERTS, K = 4, 24, 16, 12, 16, 6
HELD = EXPERTS // RANKS
NEAR = 1e-9


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: list[int], into: list[int]) -> Tensor:
        ctx.sizes = out, into
        got = rows.new_empty(sum(into), *rows.shape[1:])
        dist.all_to_all_single(got, rows.contiguous(), into, out)
        return got

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        out, into = ctx.sizes
        return _Send.apply(gradients[0], into, out), None, None  # pyright: ignore[reportReturnType]


def send(rows: Tensor, out: list[int], into: list[int]) -> Tensor:
    """The first out[0] rows go to rank 0, the next out[1] to rank 1; into[r] come from rank r, in order.

    Autograd passes through it: gradients take the same way back.
    """
    return _Send.apply(rows, out, into)  # pyright: ignore[reportReturnType]


def tell(out: list[int]) -> list[int]:
    """How many rows each rank will send here, if this one sends out[r] to rank r."""
    told = torch.tensor(out)
    asked = torch.empty_like(told)
    dist.all_to_all_single(asked, told)
    return asked.tolist()


def expert(rows: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """One expert: (N, H) -> (N, H)."""
    gate, up = (rows @ w_in).chunk(2, -1)
    return (F.silu(gate) * up) @ w_out


def mixture(x: Tensor, choice: Tensor, weight: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """All experts in one process: (T, H) -> (T, H)."""
    y = torch.zeros_like(x)
    for e in range(len(w_in)):
        token, slot = (choice == e).nonzero(as_tuple=True)
        part = weight[token, slot, None] * expert(x[token], w_in[e], w_out[e])
        y = y.index_add(0, token, part)
    return y


class Setting(NamedTuple):
    """All ranks' tokens, their routing, all experts, and the gradient that comes back."""

    x: Tensor
    choice: Tensor
    weight: Tensor
    w_in: Tensor
    w_out: Tensor
    pull: Tensor


def setting() -> Setting:
    """The same on every rank; rank 3 has no token for the experts of rank 0, and expert 15 has none."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    logits = drawn(RANKS * TOKENS, EXPERTS)
    logits[-TOKENS:, :HELD] = -9.0
    logits[:, -1] = -9.0
    top, choice = logits.topk(K)
    weight = top.softmax(-1)
    x, w_in, w_out = (
        drawn(RANKS * TOKENS, H),
        drawn(EXPERTS, H, 2 * WIDTH),
        drawn(EXPERTS, WIDTH, H),
    )
    return Setting(x, choice, weight, w_in * 0.3, w_out * 0.3, drawn(RANKS * TOKENS, H))


class DispatchReport(NamedTuple):
    """One rank: distances from one process, and from known mistakes; numbers put into collectives.

    A gradient that is missing is None.
    """

    shape: tuple[int, ...]
    output: dict[str, float]
    gradients: dict[str, float | None]
    sent: int


def dispatch(layer: Callable[..., Any]) -> DispatchReport:
    """On every rank: the learner's function, forward and backward, beside one process."""
    rank, all_of = dist.get_rank(), setting()
    tokens, own = slice(rank * TOKENS, (rank + 1) * TOKENS), slice(rank * HELD, (rank + 1) * HELD)
    whole = [
        t.clone().requires_grad_() for t in (all_of.x, all_of.weight, all_of.w_in, all_of.w_out)
    ]
    wanted = mixture(whole[0], all_of.choice, *whole[1:])
    wanted.backward(all_of.pull)
    parts = [
        part.detach().clone().requires_grad_()
        for part in (whole[0][tokens], whole[1][tokens], whole[2][own], whole[3][own])
    ]
    choice = all_of.choice[tokens].clone()
    with traffic() as counted:
        found = layer(parts[0], choice, *parts[1:])
        if isinstance(found, Tensor) and found.shape == parts[0].shape and found.requires_grad:
            found.backward(all_of.pull[tokens])
    if not isinstance(found, Tensor):
        raise TypeError(f"your function is to return a tensor, and returns {found!r:.60}")
    sent = sum(row.payload_bytes for row in counted.rows if "float" in row.dtype) // 8
    if found.shape != parts[0].shape:
        return DispatchReport(tuple(found.shape), {}, {}, sent)
    outputs = {
        name: _apart(found.detach(), value)
        for name, value in _candidates(all_of, wanted, rank).items()
    }
    wants = (whole[0].grad, whole[1].grad, whole[2].grad, whole[3].grad)
    cut = (tokens, tokens, own, own)
    gradients = {
        name: None if part.grad is None else _apart(part.grad, _of(want)[where])
        for name, part, want, where in zip(
            ("x", "weight", "w_in", "w_out"), parts, wants, cut, strict=True
        )
    }
    return DispatchReport(tuple(found.shape), outputs, gradients, sent)


def _candidates(all_of: Setting, wanted: Tensor, rank: int) -> dict[str, Tensor]:
    tokens = slice(rank * TOKENS, (rank + 1) * TOKENS)
    x, choice, weight = all_of.x[tokens], all_of.choice[tokens], all_of.weight[tokens]
    here = (choice // HELD == rank).double()
    last = torch.zeros_like(x)
    for target in range(RANKS):
        there = weight * (choice // HELD == target)
        some = (choice // HELD == target).any(-1)
        part = mixture(x, choice, there, all_of.w_in, all_of.w_out)
        last[some] = part[some]
    return {
        "right": wanted[tokens].detach(),
        "unweighted": mixture(x, choice, torch.ones_like(weight), all_of.w_in, all_of.w_out),
        "own alone": mixture(x, choice, weight * here, all_of.w_in, all_of.w_out),
        "last rank": last,
    }


def _of(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "backward reaches all of them"
    return gradient


def _apart(found: Tensor, wanted: Tensor) -> float:
    distance = ((found - wanted).norm() / wanted.norm()).item()
    return distance if distance == distance else float("inf")


def numbers_sent(rank: int, once: bool) -> int:
    """Numbers that a rank puts into exchanges, forward and backward: once a rank, or once an expert.

    Once: a row of H numbers and a weight for each of the other side's experts goes there, H come back, and backward
    brings H back there and the first kind home.
    """
    all_of = setting()
    asks = [
        len({int(e) // HELD for e in chosen}) if once else len(chosen)
        for chosen in all_of.choice.tolist()
    ]
    targets = [
        {int(e) // HELD for e in chosen} if once else [int(e) // HELD for e in chosen]
        for chosen in all_of.choice.tolist()
    ]
    mine = sum(asks[rank * TOKENS : (rank + 1) * TOKENS])
    got = sum(list(chosen).count(rank) for chosen in targets)
    there = H + HELD if once else H
    return mine * (there + H) + got * (there + H)
