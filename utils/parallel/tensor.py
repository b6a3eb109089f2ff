"""Tensor parallelism by DTensor: each rank holds some heads, channels and words.

Column- and row-parallel layers of Shoeybi et al. 2019 (arXiv:1909.08053), section 3; the parts
between them split along the sequence as in Korthikanti et al. 2022 (arXiv:2205.05198), 4.2.2.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from utils.parallel.model_parts import Part, part_blocks
from utils.parallel.tensor_shares import check_heads

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

    Plain: two all-reduces forward, after `output` and `down`, and two backward, before attention
    and feed-forward. With `sequence` each becomes a reduce-scatter and an all-gather: the same
    bytes over a ring, and between them each rank holds a part of every sequence. The gathered
    inputs are kept for backward.

    Attention and feed-forward take their input as one DTensor: where each of its matrices takes the
    plain tensor, each sends its own gradient back, five all-reduces for two.
    """
    scattered = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
    styles |= {name: RowwiseParallel(output_layouts=scattered) for name in ROWS}
    styles |= {name: SequenceParallel() for name in NORMS if sequence}
    # Attention takes the rotation as well, which is whole on every rank.
    styles["attention"] = _gathered(scattered, None)
    styles["feedforward"] = _gathered(scattered)
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


def apply_tp(part: Part, mesh: DeviceMesh, *, sequence: bool = False) -> None:
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
    for block in part_blocks(part):
        check_heads(block.attention, mesh.size(), copies=False)
        parallelize_module(block, mesh, block_styles(sequence))
    ends = {n: s for n, s in end_styles(sequence).items() if getattr(part, n) is not None}
    if ends:
        parallelize_module(part, mesh, ends)
    if tied:
        part.head.weight = part.embed.weight


def _gathered(*layouts: Placement | None) -> PrepareModuleInput:
    wanted = tuple(None if layout is None else Replicate() for layout in layouts)
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=wanted)
