"""What lab 18 runs on ranks: the learner's attention to a shared cache, and four runs of which some are faulty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from utils.models import Transformer, TransformerConfig
from utils.ranks import run_ranks
from utils.traffic.counter import traffic

from .compare import sent_bytes
from .ring import places, ring_attention, ulysses_attention

RANKS = 4
NEAR = 1e-9

# --- attention to a shared cache -----------------------------------------------------------------

B, A, D = 2, 4, 8
KEYS = (5, 0, 9, 2)  # of each rank
SCALES = (1.0, 300.0)  # of the queries: the scores of the second overflow as exponentials


class CacheReport(NamedTuple):
    """One rank, one scale: how far the result is from right and from known wrong ones.

    Attributes:
        shape: of the result; () where it is no tensor.
        apart: by name, "right" among them.
        finite: whether all of it is.
        sent: bytes that a rank of a ring sends.
    """

    shape: tuple[int, ...]
    apart: dict[str, float]
    finite: bool
    sent: float


def cached(attend: Callable[..., Any]) -> list[CacheReport]:
    """On every rank: the learner's function on this rank's part of the cache, beside one process."""
    rank, found = dist.get_rank(), []
    for scale in SCALES:
        torch.manual_seed(0)
        q = scale * torch.randn(B, A, 1, D, dtype=torch.float64)
        k, v = (torch.randn(B, A, sum(KEYS), D, dtype=torch.float64) for _ in range(2))
        parts = [(x, y) for x, y in zip(k.split(KEYS, 2), v.split(KEYS, 2), strict=True)]
        with traffic() as sent:
            out = attend(q.clone(), *(x.clone() for x in parts[rank]))
        if not isinstance(out, Tensor):
            raise TypeError(f"your function is to return a tensor, and returns {out!r:.60}")
        put_in: dict[str, int] = {}
        for row in sent.rows:
            put_in[row.collective] = put_in.get(row.collective, 0) + row.payload_bytes
        distances = _distances(out, q, k, v, parts) if out.shape == q.shape else {}
        finite = bool(out.isfinite().all())
        found.append(CacheReport(tuple(out.shape), distances, finite, sent_bytes(put_in, RANKS)))
    return found


def _distances(out: Tensor, q: Tensor, k: Tensor, v: Tensor, parts: Any) -> dict[str, float]:
    each = [_softmax(q, *part) for part in parts]
    wanted = {
        "right": _softmax(q, k, v),
        "own": each[dist.get_rank()],
        "mean": sum(each) / RANKS,
        "mean of some": sum(each) / sum(count > 0 for count in KEYS),
        "sum": sum(each),
        "by keys": sum(n * one for n, one in zip(KEYS, each, strict=True)) / sum(KEYS),
        "no scale": _softmax(q * D**0.5, k, v),
    }
    return {name: _apart(out, value) for name, value in wanted.items()}


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5).softmax(-1) @ v


def _apart(found: Tensor, wanted: Any) -> float:
    distance = ((found - wanted).norm() / wanted.norm()).item()
    return distance if distance == distance else float("inf")


# --- four runs -----------------------------------------------------------------------------------

LENGTH, PIECE, WORDS = 64, 8, 64
LENGTHS = (24, 40)
FAULT_OF = {"A": 1, "B": 0, "C": 3, "D": 2}  # of `checks.FAULTS`


class Observed(NamedTuple):
    """What a run reports of its first step, beside one process.

    Attributes:
        loss: relative distance of the loss.
        tokens: the largest distance of a token's loss, by pieces of 8 positions.
        gradients: relative distance of each parameter's gradient, the ranks' added up, by name.
    """

    loss: float
    tokens: list[float]
    gradients: dict[str, float]


def observed(run: str) -> Observed:
    """The report of run "A", "B", "C" or "D"."""
    return run_ranks(_observe, RANKS, run)[0]


def _observe(run: str) -> Observed:
    row = torch.randint(WORDS, (1, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    inputs, targets = row[:, :-1], row[:, 1:].clone()
    if run == "A":
        targets[:, :20] = -100  # a prompt: ranks learn from unequal numbers of tokens
    plain, shared, mask = _model(), _model(), None
    position = torch.arange(LENGTH)
    if run == "D":
        document = torch.arange(2).repeat_interleave(torch.tensor(LENGTHS))
        mask = (document[:, None] == document).tril()
        position = torch.cat([torch.arange(length) for length in LENGTHS])
    wanted, losses = _losses(plain, inputs, targets, position, mask)
    (losses.sum() / (targets != -100).sum()).backward()
    own = places(LENGTH, dist.get_rank(), RANKS, zigzag=run != "D")
    for block in shared.blocks:
        block.attention.attend = _attention(run, mask)
    went_on = torch.arange(LENGTH)  # in run D, too: rotary positions count distances
    found, mine = _losses(shared, inputs[:, own], targets[:, own], went_on[own], None)
    count = (targets[:, own] != -100).sum() if run == "A" else (targets != -100).sum()
    ranks = RANKS if run == "A" else 1
    loss = mine.sum() / count.clamp(min=1) / ranks
    loss.backward()
    return _report(loss.detach(), found, own, wanted, (shared, plain), targets)


def _model() -> Any:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocabulary=WORDS, hidden=32, layers=2, heads=4, kv_heads=4, feedforward=96))  # fmt: skip
    model.init_weights(std=0.2)
    return model.double()


def _losses(model: Any, inputs: Tensor, targets: Tensor, position: Tensor, mask: Any) -> Any:
    if mask is not None:
        for block in model.blocks:
            block.attention.attend = lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask
            )
    losses = F.cross_entropy(model(inputs, position)[0], targets[0], reduction="none")
    return losses.detach(), losses


def _attention(run: str, mask: Tensor | None) -> Callable[..., Tensor]:
    if run == "B":
        return lambda q, k, v: ring_attention(q, k, v, zigzag=False)
    if run == "C":
        return lambda q, k, v: ring_attention(q, _Astray.apply(k), _Astray.apply(v))
    if run == "D":
        return lambda q, k, v: ulysses_attention(q, k, v, mask=mask)
    return ring_attention


class _Astray(torch.autograd.Function):
    """The identity, whose gradients end on the next rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        rank, new = dist.get_rank(), torch.empty_like(gradients[0])
        sent = dist.isend(gradients[0].contiguous(), (rank + 1) % RANKS)
        dist.recv(new, (rank - 1) % RANKS)
        if sent is not None:
            sent.wait()
        return new


def _report(
    loss: Tensor, found: Tensor, own: Tensor, wanted: Tensor, models: Any, targets: Tensor
) -> Observed:
    shared, plain = models
    dist.all_reduce(loss)
    all_losses = torch.zeros(LENGTH, dtype=torch.float64)
    all_losses[own] = found
    dist.all_reduce(all_losses)
    off = (all_losses - wanted).abs().view(-1, PIECE).amax(1)
    learned = (targets[0] != -100).view(-1, PIECE).any(1)
    right = wanted.sum() / (targets != -100).sum()
    errors: dict[str, float] = {}
    for (name, p), w in zip(shared.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(p.grad)
        errors[name] = _apart(p.grad, w.grad)
    tokens = [
        value.item() if use else float("nan") for value, use in zip(off, learned, strict=True)
    ]
    return Observed(_apart(loss, right), tokens, errors)
