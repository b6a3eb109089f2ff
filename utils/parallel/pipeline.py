"""Pipeline parallelism: stages cut from a model, and PyTorch's schedules over them.

A model is cut into chunks of blocks; the first one embeds, the last one predicts. A rank holds one
chunk, or several where the schedule interleaves (Narayanan et al. 2021, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from utils.parallel.data import Passes, loss_dtype, summed_loss
from utils.parallel.mesh import sum_over
from utils.parallel.model_parts import Part, part_blocks

# Schedules whose data goes down the ranks and up again: a rank holds a chunk and its mirror.
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def even_blocks(layers: int, chunks: int) -> tuple[int, ...]:
    """Blocks of each chunk, all alike.

    Raises:
        ValueError: the layers do not divide.
    """
    if chunks < 1 or layers % chunks:
        fit = [n for n in range(1, layers + 1) if layers % n == 0]
        raise ValueError(
            f"{layers} layers do not divide over {chunks} chunks; {', '.join(map(str, fit))} would "
            "do. Or give each chunk its own number of blocks."
        )
    return (layers // chunks,) * chunks


def chunks_of(schedule: str, stage: int, stages: int, chunks: int) -> tuple[int, ...]:
    """Which chunks a pipeline rank holds, in the order in which data passes them.

    Args:
        schedule: PyTorch's name, such as "1F1B", "GPipe" or "Interleaved1F1B".
        stage: place along pp.
        stages: ranks along pp.
        chunks: of the whole model.

    Raises:
        ValueError: the schedule is unknown, or cannot run that many chunks.
    """
    several = _takes_several(schedule)
    if (
        chunks % stages
        or (chunks == stages) == several
        or (_is_v(schedule) and chunks != 2 * stages)
    ):
        held = "2" if _is_v(schedule) else "2 or more" if several else "1"
        raise ValueError(
            f"{schedule} runs {held} chunks on each of {stages} ranks, alike; {chunks} chunks are "
            "given. Cut the model into another number, or choose another schedule."
        )
    if _is_v(schedule):
        return stage, chunks - 1 - stage
    return tuple(range(stage, chunks, stages))


def _takes_several(schedule: str) -> bool:
    return issubclass(get_schedule_class(schedule), PipelineScheduleMulti)


def _is_v(schedule: str) -> bool:
    return schedule.lower() in map(str.lower, V_SHAPED)


def keep_chunk(model: Part, blocks: Sequence[int], chunk: int) -> Part:
    """Leave one chunk of a model, in place: its blocks under their old names, and its ends.

    Build the model on the meta device, so that what is cut away never was in memory.

    Args:
        model: whole, with `embed`, `blocks`, `norm` and `head`.
        blocks: how many blocks each chunk holds, first to last.
        chunk: which one is left.

    Raises:
        ValueError: the numbers do not add up to the model's blocks, or the ends share a matrix.
    """
    every = part_blocks(model)
    if sum(blocks) != len(every):
        raise ValueError(
            f"The chunks hold {sum(blocks)} blocks, and the model has {len(every)}. "
            "Change `blocks` so that they add up."
        )
    is_first, is_last = chunk == 0, chunk == len(blocks) - 1
    if model.head.weight is model.embed.weight and not is_first == is_last:
        raise ValueError(
            "Embedding and head are one matrix, which the first and the last stage would share. "
            "Build the model with tied=False."
        )
    end = list(accumulate(blocks))[chunk]
    held = range(end - blocks[chunk], end)
    model.blocks = nn.ModuleDict({str(i): every[i] for i in held})
    if not is_first:
        model.embed = None
    if not is_last:
        model.norm = model.head = None
    return model


class _Schedule(Protocol):
    """What runs a program of your own, such as lesson 13's `own_schedule.OwnSchedule`."""

    def held(self, rank: int, /) -> tuple[int, ...]:
        """The chunks of a rank."""
        ...

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """PyTorch's schedule object."""
        ...


class _WeightedLoss:
    """What the schedule calls with the logits of a micro-batch; the step sets the token's weight."""

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        return summed_loss(logits, targets) * self.weight


def _handed_on(part: Any, stream: Tensor, tokens: Tensor) -> Tensor:
    """The shape of a chunk's result: the stream, or of the last one the logits, (b, S, V)."""
    return (
        stream if part.head is None else stream.new_empty((*tokens.shape, part.head.out_features))
    )


def pipeline_passes(
    parts: Sequence[nn.Module],
    mesh: DeviceMesh,
    positions: Tensor,
    stream: Tensor,
    *,
    chunks: int,
    schedule: str | _Schedule,
    micro_batches: int,
) -> Passes:
    """Forward and backward of one step through a pipeline, all its micro-batches.

    Args:
        parts: this rank's chunks, in the order of `chunks_of`.
        mesh: has an axis "pp".
        positions: (S,) of the tokens in their sequences, on the device that computes.
        stream: an example of what a stage sends to the next one for a micro-batch, (b, S, H), or
            (b, S / tp, H) where tensor parallelism splits along the sequence; on the meta device.
            Told the shape, stages need not find it out in a pass of their own.
        chunks: of the whole model.
        schedule: PyTorch's name, or a program of your own, as `_Schedule` has it.
        micro_batches: of a step, m.

    Returns:
        A function whose loss is the same on all stages. It raises ValueError where the rows do not
        divide into the micro-batches.
    """
    group, loss_of, rank = mesh.get_group("pp"), _WeightedLoss(), mesh.get_local_rank("pp")
    if isinstance(schedule, str):
        held = chunks_of(schedule, rank, group.size(), chunks)
        kind: Any = get_schedule_class(schedule)
    else:
        held, kind = schedule.held(rank), schedule
    tokens = torch.empty(len(stream), len(positions), dtype=torch.long, device="meta")
    stream = stream.detach().requires_grad_()
    stages = [
        PipelineStage(
            part,
            number,
            chunks,
            positions.device,
            group=group,
            input_args=stream if number else tokens,
            output_args=_handed_on(part, stream, tokens),
        )
        for number, part in zip(held, parts, strict=True)
    ]
    runs = kind(
        stages[0] if isinstance(schedule, str) and not _takes_several(schedule) else stages,
        n_microbatches=micro_batches,
        loss_fn=loss_of,
        scale_grads=False,
    )

    def passes(inputs: Tensor, targets: Tensor, weight: float) -> Tensor:
        if len(inputs) % micro_batches:
            raise ValueError(
                f"{len(inputs)} rows do not divide into {micro_batches} micro-batches of this "
                "pipeline: choose a number of micro-batches that divides them."
            )
        loss_of.weight = weight
        losses: list[Tensor] = []
        given = (inputs,) if 0 in held else ()
        ends: dict[str, Any] = {"target": targets, "losses": losses} if chunks - 1 in held else {}
        places = positions.expand(len(inputs), -1)  # cut into micro-batches like the rows
        runs.step(*given, **ends, positions=places, return_outputs=False)
        none = torch.zeros((), dtype=loss_dtype(stream.dtype), device=inputs.device)
        total = torch.stack(losses).sum() if losses else none
        return sum_over(mesh, ["pp"], total.detach())  # only the last stage has a loss

    return passes
