"""What the ranks of lesson 12 compute with their parts of a layer, beside one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from utils.models import Transformer, TransformerConfig
from utils.parallel.tensor_shares import HEAD_LAYERS, own_head_rows
from utils.traffic.counter import traffic

from .gpt import GPTBlock
from .tensor_split import split_layers
from .workers import ring_bytes

__all__ = [
    "Kept",
    "apart",
    "attention_apart",
    "columns_apart",
    "feedforward_apart",
    "kept_bytes",
    "kept_terms",
    "layer_traffic",
    "loss_apart",
    "mine",
]

SEQUENCE, BATCH, HIDDEN, HEAD_DIM = 16, 2, 32, 16
Layer = Callable[..., Any]
Traffics = Mapping[str, tuple[int, int]]


def mine(tensor: Tensor, dim: int) -> Tensor:
    """This rank's part of a whole tensor, as a leaf of its own."""
    own = tensor.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return own.clone().requires_grad_()


def apart(found: Tensor | None, wanted: Tensor) -> float:
    """Their distance, as a share of the norm of what is wanted.

    Raises:
        ValueError: nothing was found: a gradient is missing.
    """
    if found is None:
        raise ValueError("A gradient is missing: does backward reach this tensor?")
    return ((found - wanted).norm() / wanted.norm()).item()


def feedforward_apart(layer: Layer) -> tuple[float, int]:
    """`layer(part of A, part of C, x)`: how far its gradients are from those of one process, and what it puts in.

    Returns:
        The largest distance of the three gradients; the payload bytes of the collectives.
    """
    torch.manual_seed(0)
    shapes = (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (SEQUENCE, BATCH, HIDDEN)
    A, C, x = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    F.linear(F.gelu(F.linear(x, A)), C).square().sum().backward()
    parts = mine(A, 0), mine(C, 1), x.detach().clone().requires_grad_()
    with traffic() as sent:
        layer(*parts).square().sum().backward()
    assert A.grad is not None and C.grad is not None and x.grad is not None
    wanted = mine(A.grad, 0), mine(C.grad, 1), x.grad
    gaps = [apart(part.grad, right) for part, right in zip(parts, wanted, strict=True)]
    return max(gaps), sent.payload_bytes


def attention_apart(attention: Layer, f: Layer, g: Layer) -> tuple[float, float]:
    """`attention(layer, x, own, f, g)`, a head a rank: how far its output and its gradients are from one process's."""
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shape = TransformerConfig(hidden=HEAD_DIM * ranks, heads=ranks, layers=1)
    layer: Any = Transformer(shape).double().blocks[0].attention
    x = torch.randn(BATCH, SEQUENCE, shape.hidden, dtype=torch.float64, requires_grad=True)
    own = {name: own_head_rows(layer, name, rank, ranks) for name in HEAD_LAYERS}

    def run(rows: Mapping[str, slice], f: Layer, g: Layer) -> tuple[Tensor, list[Tensor]]:
        output = attention(layer, x, rows, f, g)
        weights = [getattr(layer, name).weight for name in HEAD_LAYERS]
        grads = torch.autograd.grad(output.square().sum(), [x, *weights])
        mine = [grad[own[name]] for name, grad in zip(HEAD_LAYERS, grads[1:], strict=True)]
        return output, [grads[0], *mine]

    wanted, right = run(dict.fromkeys(HEAD_LAYERS, slice(None)), nn.Identity(), nn.Identity())
    output, found = run(own, f, g)
    return apart(output, wanted), max(map(apart, found, right))


def columns_apart(columns: Layer) -> float:
    """`columns(part of x, part of A)`: how far both gradients are from those of one process."""
    torch.manual_seed(0)
    A, x = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((4 * HIDDEN, HIDDEN), (SEQUENCE, BATCH, HIDDEN))
    )
    F.linear(x, A).square().sum().backward()
    own_x, own_A = mine(x, 0), mine(A, 0)
    columns(own_x, own_A).square().sum().backward()
    assert x.grad is not None and A.grad is not None
    return max(apart(own_x.grad, mine(x.grad, 0)), apart(own_A.grad, mine(A.grad, 0)))


def loss_apart(split_cross_entropy: Layer, tokens: int, words: int) -> tuple[float, int]:
    """How far its gradient is from that of one process, and the bytes that this rank puts in."""
    torch.manual_seed(0)
    logits = torch.randn(tokens, words, dtype=torch.float64, requires_grad=True)
    targets, part = torch.randint(words, (tokens,)), mine(logits, 1)
    F.cross_entropy(logits, targets).backward()
    assert logits.grad is not None
    with traffic() as sent:
        split_cross_entropy(part, targets).mean().backward()
    return apart(part.grad, mine(logits.grad, 1)), sent.payload_bytes


def layer_traffic(less: Traffics, more: Traffics) -> dict[str, str]:
    """What a rank of a ring sends for the layer that `more` has beside `less`, in words, by collective.

    Args:
        less, more: calls and payload bytes of a step, by collective.
    """
    rows, total = {}, 0
    for kind, (calls, put_in) in more.items():
        size = ring_bytes({kind: put_in - less[kind][1]})
        rows[kind] = f"{calls - less[kind][0]} x, {size:,}"
        total += size
    return {"bytes a layer": f"{total:,}"} | rows


def kept_terms(
    length: int, batch: int, hidden: int, heads: int, *, inside: int, between: int
) -> dict[str, float]:
    """Bytes of the formula's terms (Korthikanti et al. 2022, equations 1, 2 and 4), and of the two things it leaves
    out: what norms keep beside their input, here between the pairs, and the mask of causal attention, which no rank
    divides.

    Args:
        length: positions of the whole sequence.
        batch: sequences.
        hidden: channels.
        heads: of attention.
        inside, between: ranks that share what lies inside of a pair of matrices, and between two pairs.
    """
    sbh = length * batch * hidden
    return {
        "between pairs of matrices": (10 * sbh + 8 * length * batch) / between,
        "inside pairs": 24 * sbh / inside,
        "scores": 5 * heads * length**2 * batch / inside,
        "scores' causal mask": length**2,
    }


class Kept(NamedTuple):
    """Bytes that a rank keeps for backward.

    Attributes:
        total: all of them.
        scores: those of tensors of position by position: scores, their dropout, the causal mask.
    """

    total: int
    scores: int


def kept_bytes(length: int, batch: int, hidden: int, heads: int, sequence: bool) -> Kept:
    """Bytes that one rank keeps for the backward of a GPT layer in bf16, but for its weights.

    Args:
        length: positions of the whole sequence.
        batch: sequences.
        hidden: channels.
        heads: of attention.
        sequence: whether the ranks share the sequence between pairs of matrices, too.
    """
    part: Any = nn.Module()
    part.blocks = nn.ModuleList([GPTBlock(hidden, heads)])
    part.embed = part.norm = part.head = None
    split_layers(part.bfloat16(), sequence_dim=0 if sequence else None)
    own = {p.untyped_storage().data_ptr() for p in part.parameters()}
    kept: dict[int, int] = {}
    scores: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in own)
        if tensor.shape[-2:] == (length, length):
            scores.add(storage.data_ptr())
        return tensor

    here = length // dist.get_world_size() if sequence else length
    x = torch.randn(here, batch, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        part.blocks[0](x).sum().backward()
    return Kept(sum(kept.values()), sum(kept[place] for place in scores))
