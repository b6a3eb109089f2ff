"""Tensor parallelism by hand beside Megatron-Core: the same losses and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from utils.lessons.lesson_12.megatron import megatron_layers, megatron_problem
from utils.lessons.lesson_12.tensor_layers import Split, one_column, rows, vocabulary_cross_entropy
from utils.ranks import RankError, run_ranks

RANKS = 4


# --- Megatron-Core -------------------------------------------------------------------------------


Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


class Taken(NamedTuple):
    """Losses of 20 steps, this rank's gradients of the first, and losses of some logits."""

    losses: list[float]
    gradients: list[Tensor]
    of_logits: Tensor


def steps_of(layers: list[Pair], weights: list[nn.Parameter], x: Tensor, sequence: bool) -> Taken:
    """Two feed-forward layers with residuals learn to halve their input."""
    losses, gradients = [], []
    for step in range(20):
        stream = x
        for up, down in layers:
            stream = stream + down(F.gelu(up(stream)))
        loss = (stream - x / 2).square().mean()
        loss.backward()
        if step == 0:
            gradients = [weight.grad.clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight -= 0.02 * weight.grad
                weight.grad = None
        total = loss.detach() / (dist.get_world_size() if sequence else 1)
        if sequence:
            dist.all_reduce(total)
        losses.append(total.item())
    return Taken(losses, gradients, torch.zeros(()))


def starting_point(dtype: torch.dtype) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Whole matrices of two layers, and their input (S, B, H)."""
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: 0.2 * torch.randn(shape, dtype=dtype, generator=random)  # noqa: E731
    return [(draw(64, 32), draw(32, 64)) for _ in range(2)], 5 * draw(8, 2, 32)


def some_logits() -> tuple[Tensor, Tensor]:
    """Of one rank's words, and the words that were wanted."""
    torch.manual_seed(0)
    logits, words = torch.randn(3, 2, 64), torch.randint(64, (3, 2))
    return logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous(), words


def parts_of(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return first.chunk(ranks)[rank].clone(), second.chunk(ranks, dim=1)[rank].clone()


def by_megatron(dtype: torch.dtype, sequence: bool) -> Taken:
    """A worker."""
    whole, x = starting_point(dtype)
    x = x.chunk(dist.get_world_size())[dist.get_rank()] if sequence else x
    pairs, weights = [], []
    with megatron_layers() as layers:
        config = importlib.import_module("megatron.core").ModelParallelConfig(
            tensor_model_parallel_size=dist.get_world_size(),
            use_cpu_initialization=True,
            params_dtype=dtype,
            sequence_parallel=sequence,
        )
        make: dict[str, Any] = {
            "config": config,
            "init_method": nn.init.zeros_,
            "bias": False,
            "skip_bias_add": False,
        }
        for matrices in whole:
            up = layers.ColumnParallelLinear(32, 64, gather_output=False, **make)
            down = layers.RowParallelLinear(64, 32, input_is_parallel=True, **make)
            up.weight.data, down.weight.data = parts_of(*matrices)
            weights += [up.weight, down.weight]
            pairs.append((lambda x, up=up: up(x)[0], lambda x, down=down: down(x)[0]))
        found = steps_of(pairs, weights, x, sequence)
        return found._replace(of_logits=layers.vocab_parallel_cross_entropy(*some_logits()))


def by_ours(dtype: torch.dtype, sequence: bool) -> Taken:
    """A worker."""
    whole, x = starting_point(dtype)
    x = x.chunk(dist.get_world_size())[dist.get_rank()] if sequence else x
    split, pairs, weights = Split(sequence_dim=0 if sequence else None), [], []
    for matrices in whole:
        up, down = nn.Linear(32, 64, False), nn.Linear(64, 32, False)
        up.weight, down.weight = map(nn.Parameter, parts_of(*matrices))
        weights += [up.weight, down.weight]
        pairs.append((partial(one_column, up, split), partial(rows, down, split)))
    found = steps_of(pairs, weights, x, sequence)
    return found._replace(of_logits=vocabulary_cross_entropy(*some_logits()))


def both_ways(worker: Callable[..., Taken]) -> list[Taken]:
    """A worker: in double and single precision, without and with a split sequence."""
    return [
        worker(dtype, sequence)
        for dtype in (torch.float64, torch.float32)
        for sequence in (False, True)
    ]


def test_megatron_core_is_equal_or_the_learner_reads_what_to_install():
    """20 steps: 1e-9 in double precision; single: losses 1e-5, first gradients 1e-6 of their norm."""
    ours = run_ranks(both_ways, 2, by_ours)[0]
    assert ours[0].losses[-1] < 0.9 * ours[0].losses[0], "the layers learn"
    if problem := megatron_problem():
        assert "pip install --no-deps 'megatron-core" in problem, problem
        with pytest.raises(RankError, match="Megatron-Core is not installed"):
            run_ranks(_enter_megatron, 1)
        return
    theirs = run_ranks(both_ways, 2, by_megatron, timeout_seconds=300)[0]
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        near, gradient_near = (1e-9, 1e-9) if number < 2 else (1e-5, 1e-6)
        assert one.losses == pytest.approx(other.losses, rel=near, abs=0)
        mine, right = (torch.cat([g.flatten() for g in way.gradients]) for way in (one, other))
        assert ((mine - right).norm() / right.norm()).item() < gradient_near
        torch.testing.assert_close(one.of_logits, other.of_logits)


def _enter_megatron() -> None:
    with megatron_layers():
        pass
