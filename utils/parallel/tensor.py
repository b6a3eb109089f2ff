"""Tensor parallelism by DTensor: each rank holds some heads, channels and words.

Column- and row-parallel layers of Shoeybi et al. 2019 (arXiv:1909.08053), section 3; the parts
between them split along the sequence as in Korthikanti et al. 2022 (arXiv:2205.05198), 4.2.2.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from utils.parallel.parts import Part, blocks_of

COLUMNS = (
    "attention.query",
    "attention.key",
    "attention.value",
    "feedforward.gate",
    "feedforward.up",
)
ROWS = ("attention.output", "feedforward.down")
NORMS = ("attention_norm", "feedforward_norm")


def block_styles(sequence: bool = False) -> dict[str, ParallelStyle]:
    """How each layer of a block is split.

    Plain: two all-reduces a forward pass, after `output` and `down`. With `sequence` these become
    reduce-scatters, and all-gathers before attention and feed-forward: the same bytes, and between
    them each rank holds a part of every sequence.
    """
    scattered = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
    styles |= {name: RowwiseParallel(output_layouts=scattered) for name in ROWS}
    if sequence:
        styles |= {name: SequenceParallel() for name in NORMS}
        # Attention takes the rotation as well, which is whole on every rank.
        styles["attention"] = _gathered(Shard(1), None)
        styles["feedforward"] = _gathered(Shard(1))
    return styles


def end_styles(sequence: bool = False) -> dict[str, ParallelStyle]:
    """How embedding, last norm and head are split: the table by words, logits left divided."""
    scattered = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=scattered),
        "head": ColwiseParallel(
            input_layouts=scattered, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    return styles | ({"norm": SequenceParallel()} if sequence else {})


def split_tensors(part: Part, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Split a model or stage over the one axis of `mesh`, in place.

    Its logits are a DTensor with some words on each rank, for `data.summed_loss`.

    Args:
        part: has `blocks` and may have `embed`, `norm` and `head`, as `Transformer` does.
        mesh: of one axis, such as `mesh["tp"]`.
        sequence: split along the sequence as well, between the matrices.

    Raises:
        ValueError: the heads of a block do not divide over the ranks.
    """
    embed, head = part.embed, part.head
    tied = embed is not None and head is not None and head.weight is embed.weight
    for block in blocks_of(part):
        _check_heads(block, mesh.size())
        parallelize_module(block, mesh, block_styles(sequence))
    ends = {n: s for n, s in end_styles(sequence).items() if getattr(part, n) is not None}
    if ends:
        parallelize_module(part, mesh, ends)
    if tied:
        part.head.weight = part.embed.weight


def _gathered(*layouts: Shard | None) -> PrepareModuleInput:
    wanted = tuple(None if layout is None else Replicate() for layout in layouts)
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=wanted)


def _check_heads(block: Any, ranks: int) -> None:
    for name in ("query", "key"):
        heads = getattr(block.attention, name).out_features // block.attention.head_dim
        if heads % ranks:
            raise ValueError(
                f"{heads} {name} heads do not divide over {ranks} ranks of tensor parallelism. "
                f"Take a number of ranks that divides {heads}."
            )
