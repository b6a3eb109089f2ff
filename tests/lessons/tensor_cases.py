"""20 training steps of one model: in one process, split by hand, and split by DTensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from utils.lessons.lesson_12.tensor_layers import vocabulary_cross_entropy
from utils.lessons.lesson_12.tensor_split import split_layers
from utils.models import Transformer, TransformerConfig
from utils.parallel.tensor import apply_tp
from utils.traffic.collectives import Traffic
from utils.traffic.counter import traffic

STEPS, BATCH, LENGTH, WORDS = 20, 2, 16, 64
# One key-value head for two of four ranks; biases; embedding and head are one matrix.
GROUPED = TransformerConfig(
    vocabulary=WORDS,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    feedforward=48,
    qkv_bias=True,
    tied=True,
)
PLAIN = TransformerConfig(vocabulary=WORDS, hidden=32, layers=2, heads=4, feedforward=48)


class Trained(NamedTuple):
    """Losses of all steps, gradients of the first (on ranks: whole ones), and its traffic."""

    losses: list[float]
    gradients: dict[str, Tensor]
    sent: tuple[Traffic, ...] = ()


def model(config: TransformerConfig, dtype: torch.dtype) -> Transformer:
    """The same weights everywhere, larger than usual, so that gradients are no noise."""
    torch.manual_seed(0)
    found = Transformer(config)
    found.init_weights(std=0.1)
    return found.to(dtype)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets (B, S) of every step."""
    torch.manual_seed(1)
    rows = [torch.randint(WORDS, (BATCH, LENGTH + 1)) for _ in range(STEPS)]
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def one_process(config: TransformerConfig, dtype: torch.dtype) -> Trained:
    """The reference."""
    whole = model(config, dtype)
    return _train(whole, lambda x, y: F.cross_entropy(whole(x).flatten(0, 1), y.flatten()))


def by_hand(config: TransformerConfig, dtype: torch.dtype, sequence: bool) -> Trained:
    """A worker: split by `tensor_layers`."""
    part = model(config, dtype)
    shared = split_layers(part, sequence_dim=1 if sequence else None)
    return _train(part, lambda x, y: vocabulary_cross_entropy(part(x), y).mean(), shared.add_up)


def by_dtensor(config: TransformerConfig, dtype: torch.dtype, sequence: bool) -> Trained:
    """A worker: split by `tensor`."""
    part = model(config, dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    apply_tp(part, mesh, sequence=sequence)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(part(x).flatten(0, 1), y.flatten())

    with loss_parallel():
        return _train(part, loss_of)


def ways(config: TransformerConfig, dtype: torch.dtype, dtensor: bool = True) -> dict[str, Trained]:
    """A worker: all ways on this rank."""
    found = {}
    for sequence in (False, True):
        name = " with sequence" if sequence else ""
        found[f"by hand{name}"] = by_hand(config, dtype, sequence)
        if dtensor:
            found[f"DTensor{name}"] = by_dtensor(config, dtype, sequence)
    return found


def _train(part: nn.Module, loss_of, shared=lambda: None) -> Trained:
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    losses, gradients, sent = [], {}, ()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        if step == 0 and dist.is_initialized():
            with traffic() as counted:
                loss = loss_of(x, y)
                loss.backward()
                shared()
            sent = counted.rows
        else:
            loss = loss_of(x, y)
            loss.backward()
            shared()
        if step == 0:
            gradients = {n: _whole(p.grad) for n, p in part.named_parameters()}
        optimizer.step()
        losses.append(_whole(loss).item())
    return Trained(losses, gradients, sent)


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def put_together(ranks: list[dict[str, Tensor]], whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the whole model from every rank's parts; copies of a head are taken once."""
    found = {}
    for name, wanted in whole.items():
        parts = [rank[name] for rank in ranks]
        if parts[0].shape == wanted.shape:
            found[name] = parts[0]
            continue
        dim = next(d for d, n in enumerate(wanted.shape) if parts[0].shape[d] != n)
        copies = len(parts) * parts[0].shape[dim] // wanted.shape[dim]
        found[name] = torch.cat(parts[::copies], dim)
    return found


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The distance of all gradients from the right ones, as a share of the right ones' norm."""
    pairs = [(found[name].flatten(), right.flatten()) for name, right in wanted.items()]
    mine, theirs = map(torch.cat, zip(*pairs, strict=True))
    return ((mine - theirs).norm() / theirs.norm()).item()
