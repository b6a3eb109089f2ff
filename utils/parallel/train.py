"""What all axes share: recomputation, weights, the optimizer, one clip over all ranks, the loop."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grads_with_norm_
from torch.utils.checkpoint import checkpoint

from utils.parallel.data import Passes, token_weight
from utils.parallel.dims import DATA_AXES
from utils.parallel.mesh import joined_ranks, ranks_along, sum_over
from utils.parallel.model_parts import part_blocks
from utils.parallel.saves import note_signals


def recompute(part: nn.Module) -> None:
    """Keep only each block's input, and run the block again in backward; before sharding."""
    for block in part_blocks(part):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def keep_scores(part: nn.Module) -> None:
    """Attention by plain matrix products, which keep all scores for backward; after sharing."""
    for block in part_blocks(part):
        block.attention.attend = functools.partial(_by_products, block.attention.attend)


def _by_products(attend: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return attend(*args)


def materialise(
    parts: Iterable[nn.Module], mesh: DeviceMesh, device: torch.device, weights: str | None = None
) -> None:
    """Give parts from the meta device memory and values; no rank ever holds the whole model.

    Args:
        parts: split, sharded and without memory.
        mesh: over which they are.
        device: where their shards live.
        weights: a file with the full state_dict of the model. Without one, matrices come from
            N(0, 0.02), each shard from a stream of its own, replicas alike.
    """
    seed = 0
    for axis in mesh.mesh_dim_names or ():
        place = 0 if axis == "replicate" else mesh.get_local_rank(axis)
        seed = seed * mesh[axis].size() + place
    torch.manual_seed(seed)
    for part in parts:
        part.to_empty(device=device)
        _draw(part)
        if weights is not None:
            _load(part, weights)


@torch.no_grad()
def _draw(part: nn.Module) -> None:
    for name, parameter in part.named_parameters():
        values = _sharded(parameter).to_local()
        if name.endswith("bias"):
            values.zero_()
        elif name.endswith("norm.weight"):
            values.fill_(1.0)
        else:
            values.normal_(std=0.02)


def _load(part: nn.Module, path: str) -> None:
    full = torch.load(path, mmap=True, weights_only=True)
    mine = {name: full[name] for name in get_model_state_dict(part)}
    set_model_state_dict(part, mine, options=StateDictOptions(full_state_dict=True))


def adamw(parts: Iterable[nn.Module], learning_rate: float) -> torch.optim.AdamW:
    """AdamW; parameters on one mesh form one group, so that they are updated together."""
    groups: dict[DeviceMesh, list[nn.Parameter]] = {}
    for part in parts:
        for parameter in part.parameters():
            groups.setdefault(_sharded(parameter).device_mesh, []).append(parameter)
    named = [{"params": group} for group in groups.values()]
    return torch.optim.AdamW(named, lr=learning_rate, fused=True)


def clip_grad_norm(optimizer: torch.optim.Optimizer, mesh: DeviceMesh, limit: float) -> Tensor:
    """Scale all gradients down to a common norm of at most `limit`; gives the norm before.

    The norm is over all parameters of all stages and shards, so that all ranks scale alike.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    squares = [_own_square(grad, mesh) for group in groups for grad in _gradients(group)]
    square = torch.stack(squares).sum().to(mesh.device_type)
    norm = sum_over(mesh, mesh.mesh_dim_names or (), square).sqrt()
    for group in groups:
        clip_grads_with_norm_(group, limit, norm)
    return norm


def _gradients(group: list[nn.Parameter]) -> list[DTensor]:
    return [_sharded(p.grad) for p in group if p.grad is not None]


def _own_square(grad: DTensor, mesh: DeviceMesh) -> Tensor:
    """The square of what this rank holds of a gradient; of copies the first one counts alone."""
    names = grad.device_mesh.mesh_dim_names or ()
    apart = {n for n, place in zip(names, grad.placements, strict=True) if not place.is_replicate()}
    copied = [axis for axis in mesh.mesh_dim_names or () if axis not in {"pp", *apart}]
    is_first = all(mesh.get_local_rank(axis) == 0 for axis in copied)
    return torch.linalg.vector_norm(grad.to_local()).square() * is_first


def _sharded(parameter: Tensor) -> DTensor:
    if not isinstance(parameter, DTensor):
        raise ValueError("A parameter is not sharded yet: call shard_states on its part first.")
    return parameter


def train_steps(
    batches: Iterable[Sequence[Tensor]],
    passes: Passes,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    *,
    limit: float,
) -> Iterator[float]:
    """Train on this rank's inputs and targets of each step; gives the loss of all ranks' tokens.

    Args:
        batches: inputs and targets (rows, S) of this rank, one pair a step.
        passes: `data.accumulated_passes` or `pipeline.pipeline_passes`.
        optimizer: such as `adamw(parts, ...)`.
        mesh: with the axes over which states are sharded and replicated.
        limit: of the gradient's norm.
    """
    for inputs, targets in batches:
        weight = token_weight(targets, mesh)
        with loss_parallel():  # matters to logits that are divided over tp, and to no other
            loss = passes(inputs, targets, weight)
        clip_grad_norm(optimizer, mesh, limit)
        optimizer.step()
        optimizer.zero_grad()
        yield sum_over(mesh, DATA_AXES, loss).item() / ranks_along(mesh, DATA_AXES)


def report(losses: Iterable[float], first: int = 0) -> list[float]:
    """The losses of all steps; rank 0 prints each as it comes, numbered from `first`."""
    found = []
    for step, loss in enumerate(losses, start=first):
        found.append(loss)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss:.7f}", flush=True)
    return found


def run(train: Callable[[torch.device, int, str | None, str | None, int], object]) -> None:
    """The command line of a training script: join the ranks, train, leave.

    Args:
        train: takes this rank's device, the number of steps, a file of weights, a folder of saves
            and the steps between them.
    """
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--weights", help="a file with a full state_dict to start from")
    options.add_argument("--saves", help="a folder, seen by all ranks, to save in and go on from")
    options.add_argument("--every", type=int, default=100, help="steps between saves")
    given = options.parse_args()
    if given.saves:
        note_signals()
    with joined_ranks() as device:
        train(device, given.steps, given.weights, given.saves, given.every)
