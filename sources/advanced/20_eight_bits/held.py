"""What is held, sent and gained: bytes of a SwiGLU, a gather on ranks, published pairs and planned ones."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from evidence.validation import torchtitan
from evidence.validation.tables import table
from utils.checked import check_public
from utils.planner import Batch, Cluster
from utils.traffic import traffic

__all__ = [
    "Gain",
    "compiled_fsdp",
    "gathered_on_rank",
    "kept_by_swiglu",
    "published_gains",
    "published_peaks",
    "swiglu_gradients",
]

GROUPS = [("bf16", "8 bits"), ("bf16", "4 bits"), ("8 bits", "4 bits")]


def kept_by_swiglu(
    linear: Callable[[Tensor, Tensor], Tensor],
    tokens: int,
    hidden: int,
    inside: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> int:
    """Bytes that a SwiGLU in bf16, four times `hidden` inside, keeps for backward; weights apart.

    Args:
        linear: x (tokens, inputs) and w (outputs, inputs) to (tokens, outputs).
        tokens, hidden: of the input.
        inside: from what `gate` and `up` give, and `down`'s weight, to the output; None for SiLU,
            multiplication and `linear`.

    Raises:
        ValueError: no tokens, no width, or a `linear` that gives no tensor.
    """
    if tokens < 1 or hidden < 1:
        raise ValueError(f"tokens and hidden are 1 or more; got {tokens} and {hidden}.")
    inner = 4 * hidden
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner), (tokens, hidden))
    gate, up, down, x = (
        torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes
    )
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        a, b = linear(x, gate), linear(x, up)
        if not isinstance(a, Tensor):
            raise ValueError(f"linear(x, w) gives a tensor (tokens, outputs); it gave {a!r:.60}.")
        _ = inside(a, b, down) if inside else linear(F.silu(a) * b, down)
    weights = {w.untyped_storage().data_ptr() for w in (gate, up, down)}
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)


def swiglu_gradients(
    linear: Callable[[Tensor, Tensor], Tensor],
    tokens: int,
    hidden: int,
    inside: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Gradients of a SwiGLU in fp32, of normal numbers: to its input and its three weights.

    Args:
        linear, tokens, hidden, inside: see `kept_by_swiglu`.
    """
    inner, generator = 4 * hidden, torch.Generator().manual_seed(7)
    sizes = {"x": (tokens, hidden), "gate": (inner, hidden), "up": (inner, hidden)}
    sizes["down"] = (hidden, inner)
    leaves = {
        name: torch.randn(size, generator=generator).requires_grad_()
        for name, size in sizes.items()
    }
    x, gate, up, down = leaves.values()
    a, b = linear(x, gate), linear(x, up)
    y = inside(a, b, down) if inside else linear(F.silu(a) * b, down)
    found = torch.autograd.grad(y, list(leaves.values()), torch.randn(y.shape, generator=generator))
    return dict(zip(leaves, found, strict=True))


def gathered_on_rank(gather: Callable[[Tensor], Tensor], whole: Tensor) -> tuple[Tensor | str, int]:
    """What this rank's gather of its shard gives, or the sentence that it refuses with; bytes put in."""
    shard = whole.chunk(dist.get_world_size())[dist.get_rank()]
    with traffic() as sent:
        try:
            found: Tensor | str = gather(shard)
        except ValueError as error:
            found = str(error)
    return found, sent.payload_bytes


@dataclass(frozen=True)
class Gain:
    """Two published runs of one model, layout and cluster, and the bits of their products.

    Attributes:
        case: Model, number of GPUs, recipe and source.
        before, after: Formats of the products: "bf16", "8 bits", "4 bits".
        tokens_before, tokens_after: Tokens a second and GPU; 1 and a ratio where no more was published.
        gpu: By its name in the catalog, or torchtitan's own, where `compiled_fsdp` plans the run; else empty.
        micro_batch: Sequences of 8,192 tokens at a time on a GPU, where `gpu` is given.
    """

    case: str
    before: str
    after: str
    tokens_before: float
    tokens_after: float
    gpu: str
    micro_batch: int

    @property
    def share(self) -> float:
        """How many more tokens a second, as a share."""
        return self.tokens_after / self.tokens_before - 1


def compiled_fsdp(gain: Gain, precision: str) -> float:
    """Predicted tokens a second and GPU of a run of torchtitan's: compiled, eight GPUs, FSDP, 8B.

    Raises:
        ValueError: the pair names no GPU of the catalog.
    """
    if not gain.gpu:
        raise ValueError(f"{gain.case} is no run of eight GPUs by FSDP: nothing plans it here.")
    model, theirs, plan, _ = torchtitan.setup(table("torchtitan")[1])
    gpu = theirs.device if gain.gpu == theirs.device.name else gain.gpu  # their H100 is no other's
    cluster = Cluster(gpu=gpu, nodes=1, gpus_per_node=8)
    batch = Batch(sequences=8 * gain.micro_batch, sequence_length=8192)
    plan = replace(plan, precision=precision, micro_batch=gain.micro_batch)
    return batch.tokens / cluster.gpus / torchtitan.seconds(model, cluster, plan, batch)


def published_gains() -> list[Gain]:
    """Pairs that differ in the bits of their products alone, by group and the largest gain first."""
    place = Path(__file__).with_name("published_gains.csv")
    with open(place, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    gains = [
        Gain(
            case=row["case"],
            before=row["before"],
            after=row["after"],
            tokens_before=float(row["tokens_before"]),
            tokens_after=float(row["tokens_after"]),
            gpu=row["gpu"],
            micro_batch=int(row["micro_batch"]),
        )
        for row in rows
    ]
    return sorted(gains, key=lambda gain: (GROUPS.index((gain.before, gain.after)), -gain.share))


def published_peaks() -> list[tuple[str, float, float]]:
    """GPUs, and peak GB a GPU of torchao's 8B: in bf16, and with FP8 products and gather."""
    place = Path(__file__).with_name("published_peaks.csv")
    with open(place, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [(row["gpus"], float(row["gb_bf16"]), float(row["gb_fp8"])) for row in rows]


check_public(globals())
