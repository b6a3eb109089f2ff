"""Lesson 09's plumbing: what each rank trains on, what is looked at in a step, and whose bytes they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from utils.memory import measure, reachable_storages
from utils.memory.events import Category
from utils.memory.measurement import Measurement
from utils.memory.observer import note_storages
from utils.models import Transformer, TransformerConfig
from utils.shims.ddp import bucket_bytes
from utils.shims.fsdp import sums_in_the_node
from utils.simulation import simulate
from utils.techniques.zero import note_states, resident
from utils.traffic.collectives import Traffic
from utils.traffic.counter import traffic

MICRO_BATCH, LENGTH, VOCABULARY = 2, 64, 256
AT_PEAK = ("parameters", "gradients", "optimizer state", "activations")  # the rest is one sum
SINGLE_NUMBERS_BYTES = 64  # step counts, norms and flags are smaller

Sizes = dict[tuple[str, str], int]  # bytes by kind (or collective) and dtype

# By what stands in an attribute's path, first match first.
KINDS = {
    "exp_avg": "moments",
    ".grad": "gradients",
    "averaged_gradients": "gradients",
    "fp32_": "master",
    "grad_partitions": "gradients",
    "ipg_bucket": "bucket",
}


class Way(NamedTuple):
    """One way to train on ranks: how to go backward from a loss, and how to step."""

    model: Any
    optimizer: torch.optim.Optimizer
    backward: Callable[[Tensor], Any]
    update: Callable[[], Any]


class Looked(NamedTuple):
    """What one rank saw: a metered step, its losses, and what another step sent and held.

    The states are bytes by kind and dtype. `gradient_norm` is of the first step, over all ranks.
    """

    run: Measurement
    losses: list[float]
    sent: tuple[Traffic, ...]
    after_backward: Sizes
    optimizer_begins: Sizes
    gradient_norm: float


def fresh_model(size: TransformerConfig, place: str = "cpu") -> Transformer:
    """The same weights on every rank; on "cuda" each rank takes its own GPU."""
    torch.manual_seed(0)
    simulated = place == "cpu" or dist.get_backend() == "fake"
    return Transformer(size).to("cpu" if simulated else f"cuda:{dist.get_rank()}")


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Way:
    """A way whose loop is PyTorch's own."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Way(model, optimizer, Tensor.backward, update)


def loss_of(model: Any, number: int, sequences: int = MICRO_BATCH, length: int = LENGTH) -> Tensor:
    """The loss of this rank's micro-batch of a number; DDP's model computes under autocast."""
    place = next(model.parameters()).device
    random = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (sequences, length + 1), generator=random).to(place)
    with torch.autocast(place.type, torch.bfloat16, isinstance(model, DistributedDataParallel)):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def look(build: Callable[[], Way], name: str, timed_steps: int = 1) -> Looked:
    """On a rank: steps under the meter, then one whose sends and states are listed."""
    way, losses, rows, norms = build(), [], {}, []
    is_zero = _is_zero(way)

    def states() -> Sizes:
        whole = reachable_storages(model=way.model, optimizer=way.optimizer)
        held = by_kind(resident(way.model) if is_zero else whole)
        if isinstance(way.model, DistributedDataParallel):  # its C++ reducer keeps them
            held["bucket", "float32"] = sum(bucket_bytes(way.model))
        return held

    def step() -> None:
        loss = loss_of(way.model, 0)  # one batch for all steps: its loss falls each time
        way.backward(loss)
        losses.append(loss.item())
        del loss
        if is_zero:
            note_states(way.model)  # tells the meter where DeepSpeed keeps gradients
        rows["after backward"] = states() if metered else {}
        if not (is_zero or norms):
            norms.append(gradient_norm(way.model))
        way.update()
        if is_zero and not norms:
            norms.append(float(way.model.get_global_grad_norm()))

    metered = False
    inner = way.model.module if is_zero else way.model
    run = measure(
        step,
        model=inner,
        optimizer=way.optimizer,
        name=name,
        timed_steps=timed_steps,
        warmup_steps=2,
    )
    metered = True
    way.optimizer.register_step_pre_hook(lambda *_: rows.update(begins=states()))
    with traffic() as sent:
        step()
    return Looked(run, losses, sent.rows, rows["after backward"], rows["begins"], norms[0])


def simulated(
    build: Callable[[], Way],
    name: str,
    ranks: int,
    micro_batches: int = 2,
    sequences: int = MICRO_BATCH,
    length: int = 2048,
) -> Measurement:
    """A step of several micro-batches on the first of so many simulated A100 of 40 GB.

    HSDP sends between nodes after the last one.
    """
    made: list[Way] = []

    def build_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        made[:] = [build()]
        way = made[0]
        return way.model.module if _is_zero(way) else way.model, way.optimizer

    def step(*_: object) -> None:
        way = made[0]
        for number in range(micro_batches):
            if isinstance(way.model, FSDPModule):
                way.model.set_requires_all_reduce(number == micro_batches - 1)
            way.backward(loss_of(way.model, number, sequences, length))
            if _is_zero(way):
                note_states(way.model)
            elif isinstance(way.model, FSDPModule):
                note_storages(Category.GRADIENTS, sums_in_the_node(way.model))
            if _is_zero(way) or number == micro_batches - 1:
                way.update()  # DeepSpeed counts micro-batches itself

    return simulate(
        build_model, step, world=ranks, device="A100 40GB", name=f"{name}, {ranks} ranks"
    )


def _is_zero(way: Way) -> bool:
    return hasattr(way.model, "backward")


def gradient_norm(model: nn.Module) -> float:
    """Of all parameters together; of shards on all ranks, where they are divided."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def by_kind(rows: Iterable[Any]) -> Sizes:
    """Bytes by kind and dtype of what a rank holds; single numbers left out."""
    sizes: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row.bytes > SINGLE_NUMBERS_BYTES:
            kind = next((kind for part, kind in KINDS.items() if part in row.path), "parameters")
            sizes[kind, row.dtype] += row.bytes
    return dict(sizes)


def ring_bytes(rows: Iterable[Traffic], ranks: int) -> Sizes:
    """Bytes that one rank of a ring sends, by collective and dtype; single numbers left out."""
    part = (ranks - 1) / ranks
    factors = {"all-reduce": 2 * part, "reduce": part, "reduce-scatter": part}
    factors["all-gather"] = ranks - 1  # its payload is one rank's part
    sent: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row.payload_bytes > SINGLE_NUMBERS_BYTES and row.collective in factors:
            sent[row.collective, row.dtype] += round(factors[row.collective] * row.payload_bytes)
    return dict(sent)


def ring_rounds(rows: Iterable[Traffic], ranks: int, count: int) -> dict[tuple[str, str], float]:
    """The same in rounds: how often every parameter's number goes once round the ring, in any dtype."""
    once = count * (ranks - 1) / ranks
    sizes = ring_bytes(rows, ranks)
    return {key: size / getattr(torch, key[1]).itemsize / once for key, size in sizes.items()}


def gradient_bytes(rows: Iterable[Traffic], ranks: int) -> int:
    """Of what `ring_bytes` counts, all but gathered parameters."""
    return sum(size for (kind, _), size in ring_bytes(rows, ranks).items() if kind != "all-gather")


def sent_by_node(rows: Iterable[Traffic], ranks: int, gpus: int) -> int:
    """Bytes that a node of so many GPUs sends to other nodes in a step, from one rank's calls.

    A ring over all ranks leaves a node once. HSDP's rings over nodes are as many as a node has GPUs.
    """
    if ranks <= gpus:
        return 0
    step = [row for row in rows if not row.at_startup]
    across = [row for row in step if row.axis.endswith("replicate")]
    if across:
        return gpus * sum(ring_bytes(across, ranks // gpus).values())
    return sum(ring_bytes(step, ranks).values())


def apart_from(whole: Sequence[Any], parts: Sequence[Sequence[Any]]) -> float:
    """How far the ranks' mean losses, each the first of what a rank gave, are from one process's."""
    mean = [sum(each) / len(parts) for each in zip(*(part[0] for part in parts), strict=True)]
    return max(abs(a / b - 1) for a, b in zip(mean, whole[0], strict=True))


def whole_elements(model: nn.Module, rank: int, ranks: int) -> int:
    """Elements of the tensors that a rank owns a part of: ZeRO-1 and 2 keep their gradients whole."""
    ends = torch.tensor([p.numel() for p in model.parameters()]).cumsum(0)
    starts, count = torch.cat([ends.new_zeros(1), ends[:-1]]), int(ends[-1])
    mine = (starts < (rank + 1) * count // ranks) & (ends > rank * count // ranks)
    return int((ends - starts)[mine].sum())
