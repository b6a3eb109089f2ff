"""Sharded states: ZeRO-1, 2 and 3, hybrid and plain data parallelism, by FSDP2's settings.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. What the stages differ in
is when the whole parameters are given up and when gradients are reduced:

| stage | after a block's forward | after a micro-batch's backward | mesh |
|---|---|---|---|
| 0 | kept | kept; reduced in the step's last | replicate = ranks, shard = 1 |
| 1 | kept | kept; reduced in the step's last | shard = ranks |
| 2 | kept | given up; reduced | shard = ranks |
| 3 | given up | given up; reduced | shard = ranks |

With both axes above 1 (HSDP) gradients are added up inside a group, and between groups in the
step's last backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from utils.parallel.dims import DATA_AXES
from utils.parallel.mesh import axes_of, ranks_along
from utils.parallel.model_parts import part_blocks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def apply_fsdp(
    part: nn.Module,
    mesh: DeviceMesh,
    *,
    zero_stage: int,
    mixed: bool = False,
    offload: bool = False,
) -> None:
    """Shard a model or stage over the data axes of a mesh, in place: each block, then the rest.

    Args:
        part: has `blocks`; tensor parallelism and recomputation come before.
        mesh: with axes "replicate", "shard" or both.
        zero_stage: 0 to 3, see above.
        mixed: computes in bfloat16 and reduces gradients in float32.
        offload: shards, gradients and the optimizer's step live in host memory, on a GPU; on a CPU
            they are there anyway.

    Raises:
        ValueError: an unknown stage.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage is {zero_stage!r}; write 0, 1, 2 or 3.")
    how: dict[str, Any] = {
        "mesh": mesh[axes_of(mesh, DATA_AXES)],
        "reshard_after_forward": zero_stage == 3,
        "mp_policy": BF16 if mixed else MixedPrecisionPolicy(),
        "offload_policy": OffloadPolicy(),
    }
    if offload and mesh.device_type == "cuda":
        how["offload_policy"] = CPUOffloadPolicy()
    for block in part_blocks(part):
        fully_shard(block, **how)
    fully_shard(part, **how)


def reduce_on_last_micro_batch(
    mesh: DeviceMesh, *, zero_stage: int
) -> Callable[[FSDPModule, bool], None]:
    """What `accumulated_passes` calls before each backward, so that each stage sends what it must."""
    hybrid = all(ranks_along(mesh, [axis]) > 1 for axis in DATA_AXES)

    def before_backward(model: FSDPModule, is_last: bool) -> None:
        model.set_is_last_backward(is_last)
        if zero_stage <= 1:
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
        elif hybrid:
            model.set_requires_all_reduce(is_last)

    return before_backward
