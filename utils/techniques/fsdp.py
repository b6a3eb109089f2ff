"""FSDP2: parameters, gradients and optimizer state sharded by PyTorch itself, block by block.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. A block is gathered as a
whole before its forward and its backward, and its gradients are reduced and scattered after them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils._pytree import tree_leaves

from utils.ranks import rank_device

_MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard_blocks(
    model: nn.Module,
    *,
    blocks: Iterable[nn.Module] | None = None,
    precision: str = "bf16",
    reshard_after_forward: bool = True,
    offload: bool = False,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Shard a model over the ranks, in place: each block, then the root with what is left.

    Make the optimizer afterwards, from the model's new parameters. The root (embedding, last norm
    and head of a transformer) is not resharded after its forward: backward begins with it.

    Args:
        model: its parameters are float32 shards from now on.
        blocks: what is gathered at a time; `model.blocks` if None.
        precision: "bf16" gathers and computes in bfloat16 and reduces gradients in float32; "fp32".
        reshard_after_forward: True gathers a block again for backward; False keeps it, which sends
            a third less and holds the whole model.
        offload: shards, gradients and the optimizer step live in CPU memory; on a CPU, where they
            are anyway, only the order of work changes.
        mesh: the ranks; if None all of the process group, on the kind of device where the model is.

    Raises:
        ValueError: no blocks, an unknown precision, or no process group.
    """
    if precision not in ("bf16", "fp32"):
        raise ValueError(f"precision is {precision!r}; write 'bf16' or 'fp32'.")
    parts = list(getattr(model, "blocks", ()) if blocks is None else blocks)
    if not parts:
        raise ValueError(
            f"{type(model).__name__} has no `blocks`: give blocks=, the layers that are to be "
            "gathered one at a time. With the root alone the whole model is gathered at once."
        )
    on_gpu = next(model.parameters()).device.type == "cuda"
    how: dict[str, Any] = {
        "mesh": _all_ranks(model) if mesh is None else mesh,
        "mp_policy": _MIXED if precision == "bf16" else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy(),
    }
    for block in parts:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **how)
    fully_shard(model, **how)  # in place
    return model


def _all_ranks(model: nn.Module) -> DeviceMesh:
    if not dist.is_initialized():
        raise ValueError(
            "There is no process group here: use shard_blocks() in a worker of run_ranks."
        )
    # Left to itself, FSDP takes a GPU wherever there is one, also for more ranks than GPUs.
    place = next(model.parameters()).device.type
    return init_device_mesh(
        rank_device().type if place == "meta" else place, (dist.get_world_size(),)
    )


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward adds up whole gradients on this rank and sends none of them.

    The unsharded gradients take 4 bytes (bf16: 2 to 4) per parameter until the next backward
    outside reduces them: the price of sending once for several micro-batches.

    Raises:
        ValueError: the model is not sharded.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError("no_sync needs a model that shard_blocks() or fully_shard() has sharded.")
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def check_all_used(model: nn.Module, *inputs: torch.Tensor) -> None:
    """Refuse a model whose forward leaves parameters out. Call it before wrapping or sharding.

    DDP stops in its second step when a gradient is missing; DeepSpeed and FSDP2 go on in silence,
    and what is never trained stays in every shard. Runs on the meta device, without memory.

    Raises:
        ValueError: the names of parameters without a gradient, and what to do.
    """
    empty = copy.deepcopy(model).to("meta")
    outputs = tree_leaves(empty(*(tensor.to("meta") for tensor in inputs)))
    torch.autograd.backward([x.sum() for x in outputs if getattr(x, "requires_grad", False)])
    named = [(n, p) for n, p in empty.named_parameters() if p.requires_grad and p.grad is None]
    if named:
        some = ", ".join(name for name, _ in named[:3]) + (", ..." if len(named) > 3 else "")
        raise ValueError(
            f"{len(named)} parameters are not used in forward: {some}. Their gradients never come. "
            "Freeze them with requires_grad_(False), or take them out of the model."
        )


shard = shard_blocks  # labs of earlier versions import it
