"""What is held and sent: bytes that a SwiGLU keeps, a gather on ranks, the planner's bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from utils.checked import check_public
from utils.planner import Batch, Cluster, Plan, estimate
from utils.traffic import traffic
from utils.units import GIB

__all__ = ["bytes_and_seconds", "gathered_on_rank", "kept_by_swiglu"]

SHOWN_GIB = 0.25  # smaller parts stay out of the table


def kept_by_swiglu(linear: Callable[[Tensor, Tensor], Tensor], tokens: int, hidden: int) -> int:
    """Bytes that a SwiGLU in bf16, four times `hidden` inside, keeps for backward; weights apart.

    Args:
        linear: x (tokens, inputs) and w (outputs, inputs) to (tokens, outputs).
        tokens, hidden: of the input.
    """
    inner = 4 * hidden
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner), (tokens, hidden))
    gate, up, down, x = (
        torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes
    )
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(F.silu(linear(x, gate)) * linear(x, up), down)
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


def bytes_and_seconds(gpu: str, precision: str) -> dict[str, str]:
    """The planner's memory at the peak and seconds of a step: Llama 3 8B on eight cards, ZeRO-1.

    128 sequences of 4,096 tokens a step, one at a time, as Megatron-Bridge trains.
    """
    plan = Plan(dp=8, zero_stage=1, precision=precision, framework="megatron-bridge", loss="fused")
    cluster = Cluster(gpu=gpu, nodes=1, gpus_per_node=8)
    found = estimate("llama-3-8b", cluster, plan, Batch(sequences=128, sequence_length=4096))
    sizes = {str(part): size / GIB for part, size in found.peak.bytes_by_category.items()}
    sizes["all"] = sum(sizes.values())
    told = {part: f"{size:.1f} GiB" for part, size in sizes.items() if size > SHOWN_GIB}
    seconds = {"products": found.time.matmul, "other kernels": found.time.memory}
    seconds["step"] = found.time.total
    return told | {part: f"{each:.2f} s" for part, each in seconds.items()}


check_public(globals())
