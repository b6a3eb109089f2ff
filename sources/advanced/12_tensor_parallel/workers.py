"""What lab 12 runs on ranks: the learner's row-parallel layer, and three faulty runs."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from utils.ranks import run_ranks
from utils.traffic.counter import traffic

from .gpt import GPTBlock
from .tensor_split import split_layers

RANKS = 4
S, B, IN, OUT = 8, 3, 16, 12
NEAR = 1e-9
LOOKS = 10


class RowParallelReport(NamedTuple):
    """One rank: how far output and gradients are from right and from known wrong ones.

    A gradient that is missing is None. `sent` are payloads by collective; `kept_bytes` what stays
    alive between forward and backward beside weight, bias and output.
    """

    shape: tuple[int, ...]
    output: dict[str, float]
    gradients: dict[str, dict[str, float] | None]
    sent: dict[str, int]
    kept_bytes: int


def row_parallel(layer: Callable[..., Any]) -> RowParallelReport:
    """On every rank: the learner's layer, forward and backward, beside one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, weight, bias, pull = (
        torch.randn(shape, dtype=torch.float64)
        for shape in ((S, B, IN), (OUT, IN), (OUT,), (S, B, OUT))
    )
    whole = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    wanted = F.linear(*whole)
    wanted.backward(pull)
    mine = [x.chunk(ranks, -1)[rank], weight.chunk(ranks, -1)[rank], bias]
    mine = [tensor.clone().requires_grad_() for tensor in mine]
    with traffic() as counted:
        found, kept = _forward(layer, mine)
        if isinstance(found, Tensor) and found.shape == (S // ranks, B, OUT):
            found.backward(pull.chunk(ranks)[rank])
    sent: dict[str, int] = {}
    for row in counted.rows:
        sent[row.collective] = sent.get(row.collective, 0) + row.payload_bytes
    if not isinstance(found, Tensor):
        raise TypeError(f"your function is to return a tensor, and returns {found!r:.60}")
    if found.shape != (S // ranks, B, OUT):
        return RowParallelReport(tuple(found.shape), {}, {}, sent, kept)
    outputs = _outputs(found.detach(), wanted.detach(), mine, bias)
    gradients = _gradients(mine, [t.grad for t in whole], pull.chunk(ranks)[rank])
    return RowParallelReport(tuple(found.shape), outputs, gradients, sent, kept)


def _forward(layer: Callable[..., Any], mine: list[Tensor]) -> tuple[Any, int]:
    """The layer's output, and the bytes that it keeps."""
    known = {tensor.untyped_storage().data_ptr() for tensor in mine[1:]}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved.update(_storage(tensor))
        return tensor

    before = {id(found) for found in _alive()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = layer(*mine)
    known |= {*_storage(out)} if isinstance(out, Tensor) else set()
    return out, _kept_bytes(saved, known, before)


def _kept_bytes(saved: dict[int, int], known: set[int], before: set[int]) -> int:
    """Bytes that are saved, or hang on a Function's ctx, once gloo's threads let go of what they sent."""
    least = math.inf
    for look in range(LOOKS):
        time.sleep(0.02 if look else 0.0)
        kept = dict(saved)
        for found in _alive():  # what a Function hangs on its ctx passes no hook
            if id(found) not in before:
                kept |= _storage(found)
        least = min(least, sum(size for place, size in kept.items() if place not in known))
        if kept.keys() <= saved.keys() | known:
            break
    return int(least)


def _storage(tensor: Tensor) -> dict[int, int]:
    storage = tensor.untyped_storage()
    return {storage.data_ptr(): storage.nbytes()}


def _alive() -> list[Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), Tensor)]


def _outputs(found: Tensor, wanted: Tensor, mine: list[Tensor], bias: Tensor) -> dict[str, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    term = F.linear(mine[0], mine[1]).detach().chunk(ranks)[rank]
    right = wanted.chunk(ranks)[rank]
    candidates = {
        "right": right,
        "one term": term + bias,
        "bias each": right + (ranks - 1) * bias,
        "mean": (right - bias) / ranks + bias,
    }
    return {name: _apart(found, value) for name, value in candidates.items()}


def _gradients(
    mine: list[Tensor], whole: list[Any], pull: Tensor
) -> dict[str, dict[str, float] | None]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    right = [whole[0].chunk(ranks, -1)[rank], whole[1].chunk(ranks, -1)[rank], whole[2]]
    own = mine[0].detach().chunk(ranks)[rank].flatten(0, 1)
    part = {"weight": pull.flatten(0, 1).T @ own, "bias": pull.sum((0, 1))}
    found: dict[str, dict[str, float] | None] = {}
    for name, tensor, wanted in zip(("x", "weight", "bias"), mine, right, strict=True):
        if tensor.grad is None:
            found[name] = None
            continue
        found[name] = {
            "right": _apart(tensor.grad, wanted),
            "times ranks": _apart(tensor.grad, ranks * wanted),
            "part": _apart(tensor.grad, part[name]) if name in part else 1.0,
        }
    return found


def _apart(found: Tensor, wanted: Tensor) -> float:
    distance = ((found - wanted).norm() / wanted.norm()).item()
    return distance if distance == distance else float("inf")


def ring_bytes(put_in: Mapping[str, int], ranks: int = RANKS) -> int:
    """What one rank of a ring sends, of what it put into each collective.

    An all-reduce passes what is put in twice around the ring, but for one part in `ranks`; a
    reduce-scatter once; an all-gather passes on the part of every rank but one.
    """
    factor = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": ranks - 1}
    return round(sum(factor.get(kind, (ranks - 1) / ranks) * size for kind, size in put_in.items()))


# --- three faulty runs ---------------------------------------------------------------------------

HIDDEN, HEADS, TOKENS = 32, 8, 16
FAULT_OF = {"A": 0, "B": 2, "C": 1}  # of `checks.FAULTS`
WHERE = 2  # of `checks.PARTS`


class Observed(NamedTuple):
    """What one rank of a run reports.

    Attributes:
        gradient_errors: distance of this rank's gradients from those of one process, as a share of
            the norm of all, by parameter in the order of forward; empty where the run has dropout.
        stream: the sum of squares of the stream after the last block.
        masks: which scores each of this rank's heads dropped in block 0: a number for each
            different mask; empty without dropout.
    """

    gradient_errors: dict[str, float]
    stream: float
    masks: list[int]


def observed(run: str) -> list[Observed]:
    """Every rank's report of run "A", "B" or "C", two GPT blocks on four ranks."""
    return run_ranks(_observe, RANKS, run)


def _observe(run: str) -> Observed:
    has_dropout = run != "A"
    plain, split = (_blocks(0.25 if has_dropout else 0.0) for _ in range(2))
    split_layers(split)
    if run == "A":
        _forget_sum(split.blocks[1].attention)
    masks: list[int] = []
    for block in split.blocks if has_dropout else ():
        _plant(block, run, masks)
    torch.manual_seed(1)
    x = torch.randn(TOKENS, 2, HIDDEN, dtype=torch.float64)
    stream = _passed(split, x)
    errors: dict[str, float] = {}
    if not has_dropout:
        stream.square().mean().backward()
        _passed(plain, x).square().mean().backward()
        errors = _errors(split, plain)
    return Observed(errors, stream.square().sum().item(), masks[: HEADS // RANKS])


def _blocks(probability: float) -> Any:
    torch.manual_seed(0)
    part: Any = nn.Module()
    part.blocks = nn.ModuleList([GPTBlock(HIDDEN, HEADS, probability) for _ in range(2)])
    part.embed = part.norm = part.head = None
    return part.double()


def _passed(part: Any, x: Tensor) -> Tensor:
    for block in part.blocks:
        x = block(x)
    return x


def _forget_sum(attention: Any) -> None:
    """The part's f does nothing backward: each rank goes on with its own term."""
    linears = [attention.query, attention.key, attention.value]
    attention.project = lambda x: tuple(linear(x) for linear in linears)


def _plant(block: Any, run: str, masks: list[int]) -> None:
    rank = dist.get_rank()
    for_scores, for_stream = (rank, rank) if run == "B" else (0, 0)

    def drop_scores(shares: Tensor) -> Tensor:
        torch.manual_seed(100 + for_scores)
        out, mask = torch.native_dropout(shares, 0.25, True)
        by_head = mask.unflatten(0, (2, -1))[0]
        masks.extend(hash(tuple(head.flatten().tolist())) for head in by_head)
        return out

    def drop_stream(x: Tensor) -> Tensor:
        torch.manual_seed(200 + for_stream)
        return torch.native_dropout(x, 0.25, True)[0]

    block.attention.drop, block.drop = drop_scores, drop_stream


def _errors(split: Any, plain: Any) -> dict[str, float]:
    rank, found = dist.get_rank(), {}
    whole = dict(plain.named_parameters())
    norm = torch.cat([p.grad.flatten() for p in whole.values()]).norm()
    for name, parameter in split.named_parameters():
        wanted = whole[name].grad
        for dim in range(wanted.dim()):
            if wanted.shape[dim] != parameter.shape[dim]:
                wanted = wanted.chunk(RANKS, dim)[rank]
        found[name] = ((parameter.grad - wanted).norm() / norm).item()
    return found
