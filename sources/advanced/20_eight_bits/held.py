"""What is held, sent and gained: bytes of a SwiGLU, a gather on ranks, a planned step, published pairs."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from evidence.validation import torchtitan
from evidence.validation.tables import table
from utils.checked import check_public
from utils.planner import Batch, Cluster, Estimate, Plan, estimate
from utils.traffic import traffic
from utils.units import GIB

__all__ = [
    "compiled_fsdp",
    "gathered_on_rank",
    "kept_by_swiglu",
    "parts",
    "planned",
    "published_gains",
]

SHOWN_GIB = 0.25  # smaller parts stay out of the table


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


def gathered_on_rank(gather: Callable[[Tensor], Tensor], whole: Tensor) -> tuple[Tensor | str, int]:
    """What this rank's gather of its shard gives, or the sentence that it refuses with; bytes put in."""
    shard = whole.chunk(dist.get_world_size())[dist.get_rank()]
    with traffic() as sent:
        try:
            found: Tensor | str = gather(shard)
        except ValueError as error:
            found = str(error)
    return found, sent.payload_bytes


def planned(gpu: str, precision: str) -> Estimate:
    """The planner's step of Llama 3 8B on eight GPUs: ZeRO-1, nothing recomputed.

    128 sequences of 8,192 tokens a step, one at a time on a GPU, as Megatron-Bridge trains.
    """
    plan = Plan(dp=8, zero_stage=1, precision=precision, framework="megatron-bridge", loss="fused")
    cluster = Cluster(gpu=gpu, nodes=1, gpus_per_node=8)
    return estimate("llama-3-8b", cluster, plan, Batch(sequences=128, sequence_length=8192))


def parts(found: Estimate) -> dict[str, str]:
    """Memory at the peak and seconds of a planned step, part by part."""
    sizes = {str(part): size / GIB for part, size in found.peak.bytes_by_category.items()}
    sizes["all"] = sum(sizes.values())
    told = {part: f"{size:.1f} GiB" for part, size in sizes.items() if size > SHOWN_GIB}
    time = found.time
    seconds = {"products": time.matmul, "other kernels": time.memory}
    seconds["sends, launches, optimizer"] = time.total - time.matmul - time.memory
    seconds["step"] = time.total
    return told | {part: f"{each:.2f} s" for part, each in seconds.items()}


def compiled_fsdp(precision: str) -> float:
    """Predicted tokens a second and GPU of torchtitan's compiled row: 8B, 8 H100, FSDP."""
    row = table("torchtitan")[1]
    model, cluster, plan, batch = torchtitan.setup(row)
    seconds = torchtitan.seconds(model, cluster, replace(plan, precision=precision), batch)
    return batch.tokens / cluster.gpus / seconds


def published_gains() -> dict[str, float]:
    """By case, how many more tokens a second fewer bits gave, as a share: pairs of one layout."""
    before, after = (float(row["tps_per_gpu"]) for row in table("torchtitan")[1:3])
    found = {"8B, 8 H100 (torchtitan): bf16 to FP8": after / before - 1}
    with open(
        Path(__file__).with_name("published_gains.csv"), newline="", encoding="utf-8"
    ) as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            gain = float(row["tokens_after"]) / float(row["tokens_before"]) - 1
            found[f"{row['case']}: {row['from']} to {row['to']}"] = gain
    return found


check_public(globals())
