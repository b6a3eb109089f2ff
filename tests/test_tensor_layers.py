"""Tensor and sequence parallelism by hand: equal to one process, to DTensor and to Megatron-Core.

And what it sends and keeps: equal to the planner's and the papers' formulas.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_cases import (
    BATCH,
    GROUPED,
    LENGTH,
    PLAIN,
    Trained,
    apart,
    model,
    one_process,
    put_together,
    ways,
)
from torch import Tensor, nn

from utils.catalog import ModelShape
from utils.lessons.lesson_12.gpt import GPTBlock
from utils.lessons.lesson_12.megatron import megatron_layers, megatron_problem
from utils.lessons.lesson_12.tensor_layers import Split, one_column, rows, vocabulary_cross_entropy
from utils.lessons.lesson_12.tensor_split import split_layers
from utils.lessons.lesson_12.tensor_traffic import tensor_traffic
from utils.models import Transformer, TransformerConfig
from utils.parallel import ParallelDims, device_mesh
from utils.planner import Batch, Plan
from utils.ranks import RankError, run_ranks
from utils.simulation import simulate

RANKS = 4


@functools.cache
def trained(grouped: bool, dtype: torch.dtype) -> tuple[Trained, list[dict[str, Trained]]]:
    """One process, and every rank in every way; one launch for all that is asserted of it."""
    config = GROUPED if grouped else PLAIN
    ranks = RANKS if dtype is torch.float64 else 2  # half the work, and the same rounding
    found = run_ranks(ways, ranks, config, dtype, not grouped, timeout_seconds=300)
    return one_process(config, dtype), found


@pytest.mark.parametrize("grouped", [False, True])
def test_twenty_steps_in_double_precision(grouped):
    """Grouped: two key-value heads on four ranks, biases, embedding and head one matrix."""
    wanted, ranks = trained(grouped, torch.float64)
    for rank in ranks:
        for way, found in rank.items():
            assert found.losses == pytest.approx(wanted.losses, rel=1e-9, abs=0), way
    for way in ranks[0]:
        gradients = put_together([rank[way].gradients for rank in ranks], wanted.gradients)
        assert apart(gradients, wanted.gradients) < 1e-9, way


def test_twenty_steps_in_single_precision():
    wanted, ranks = trained(False, torch.float32)
    for way in ranks[0]:
        assert ranks[0][way].losses == pytest.approx(wanted.losses, rel=1e-5, abs=0), way
        gradients = put_together([rank[way].gradients for rank in ranks], wanted.gradients)
        assert apart(gradients, wanted.gradients) < 1e-6, way


def test_all_ranks_compute_the_same_loss_to_the_bit():
    for grouped in (False, True):
        _, ranks = trained(grouped, torch.float64)
        for way, found in ranks[0].items():
            assert all(rank[way].losses == found.losses for rank in ranks), way


def sent(way: str, grouped: bool = False) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes of the first step, by collective and axis."""
    found = trained(grouped, torch.float64)[1][0][way].sent
    return {(row.collective, row.axis): (row.calls, row.payload_bytes) for row in found}


STREAM = BATCH * LENGTH * PLAIN.hidden * 8  # of float64
LAYERS = PLAIN.layers
NUMBERS = 3 * BATCH * LENGTH * 8  # a token's maximum, sum and target


def test_bytes_of_a_step_are_those_of_the_formula():
    """Four sums of the stream a block, one of the embedding, one before the head."""
    passes = 4 * LAYERS + 2
    norms = (2 * LAYERS + 1) * PLAIN.hidden * 8
    assert sent("by hand") == {("all-reduce", "world"): (passes + 2, passes * STREAM + NUMBERS)}
    assert sent("by hand with sequence") == {
        ("reduce-scatter", "world"): (passes, passes * STREAM),
        ("all-gather", "world"): (passes + 2 * LAYERS + 1, (passes + 2 * LAYERS + 1) * STREAM // 4),
        ("all-reduce", "world"): (3, NUMBERS + norms),
    }


def test_dtensor_sends_as_many_bytes_in_as_many_calls():
    """Its loss makes three calls of one number; it keeps what it gathered; norms it adds up later."""
    passes = 4 * LAYERS + 2
    assert sent("DTensor") == {("all-reduce", "world"): (passes + 3, passes * STREAM + NUMBERS)}
    assert sent("DTensor with sequence") == {
        ("reduce-scatter", "world"): (passes, passes * STREAM),
        ("all-gather", "world"): (passes, passes * STREAM // 4),
        ("all-reduce", "world"): (3, NUMBERS),
    }


def test_copies_of_a_head_add_up_their_gradients():
    width, biases = GROUPED.head_dim, 1
    of_copies = 2 * LAYERS * width * (GROUPED.hidden + biases) * 8
    for way in ("by hand", "by hand with sequence"):
        assert sent(way, grouped=True)["all-reduce", "copies"] == (1, of_copies), way


# --- what is kept for backward -------------------------------------------------------------------

S, B, H, A = 32, 2, 64, 8


def kept_bytes(sequence: bool) -> int:
    """A worker: of a GPT block in 16 bits, split over all ranks."""
    torch.manual_seed(0)
    part: Any = nn.Module()
    part.blocks = nn.ModuleList([GPTBlock(H, A).bfloat16()])
    part.embed = part.norm = part.head = None
    split_layers(part, sequence_dim=0 if sequence else None)
    own = {p.untyped_storage().data_ptr() for p in part.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    length = S // dist.get_world_size() if sequence else S
    stream = torch.randn(length, B, H, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = part.blocks[0](stream)
    out.float().sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize(
    ("ranks", "sequence", "factor"),
    [
        (1, False, 34 + 5 * A * S / H),
        (4, False, 10 + 24 / 4 + 5 * A * S / (4 * H)),
        (4, True, (34 + 5 * A * S / H) / 4),
        (2, True, (34 + 5 * A * S / H) / 2),
    ],
)
def test_a_rank_keeps_what_the_paper_says(ranks, sequence, factor):
    """Korthikanti et al. 2022, equations 1, 2 and 4. They leave out two things, counted here: mean
    and deviation of both norms, in 16 bits, and the mask of causal attention, a byte a pair."""
    beside = 2 * 2 * 2 * S * B // (ranks if sequence else 1) + S * S
    for found in run_ranks(kept_bytes, ranks, sequence):
        assert found == S * B * H * factor + beside


# --- planner and simulation ----------------------------------------------------------------------

BIG = TransformerConfig(vocabulary=1024, hidden=512, layers=3, heads=8, feedforward=1408)
SHAPE = ModelShape(
    name="three layers",
    family="llama",
    layers=3,
    hidden=512,
    heads=8,
    feedforward=1408,
    vocabulary=1024,
    max_sequence=256,
)


def simulated(sequence: bool, kv_heads: int) -> dict[str, int]:
    """Payload bytes by collective, of two micro-batches on 8 simulated ranks of one axis."""
    found: dict[str, Any] = {}

    def build() -> tuple[Transformer, None]:
        mesh = device_mesh(ParallelDims(tp=8), "cpu")
        whole = Transformer(replace(BIG, kv_heads=kv_heads)).to(torch.bfloat16)
        found["group"] = mesh.get_group("tp")
        found["shared"] = split_layers(whole, found["group"], sequence_dim=1 if sequence else None)
        return whole, None

    def step(part: Transformer, _: None) -> None:
        for _ in range(2):
            tokens = torch.zeros(2, 256, dtype=torch.long)
            loss = vocabulary_cross_entropy(part(tokens).float(), tokens, found["group"])
            loss.mean().backward()
        found["shared"].add_up()

    seen = simulate(build, step, device="A100 80GB", world=ParallelDims(tp=8))
    sums: dict[str, int] = {}
    for row in seen.traffic:
        if not row.at_startup:
            sums[row.collective] = sums.get(row.collective, 0) + row.payload_bytes
    return sums


@pytest.mark.parametrize(("sequence", "kv_heads"), [(False, 8), (True, 8), (True, 2)])
def test_the_planner_counts_what_simulated_ranks_send(sequence, kv_heads):
    """With two key-value heads on eight ranks, copies of each add up their gradients as well."""
    plan = Plan(tp=8, micro_batch=2, sequence_parallel=sequence)
    shape = replace(SHAPE, kv_heads=kv_heads)
    wanted = tensor_traffic(shape, plan, Batch(sequences=4, sequence_length=256))
    assert simulated(sequence, kv_heads) == wanted


def test_the_planner_refuses_to_count_stages():
    with pytest.raises(ValueError, match="write pp=1"):
        tensor_traffic(SHAPE, Plan(tp=2, pp=3), Batch(sequences=4, sequence_length=256))
    assert tensor_traffic(SHAPE, Plan(), Batch(sequences=4, sequence_length=256)) == {}


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


# --- bad input -----------------------------------------------------------------------------------


def refused(**changes: Any) -> None:
    """A worker: split a model that does not divide."""
    settings = {"vocabulary": 64, "hidden": 48, "layers": 1, "heads": 4, "feedforward": 48}
    split_layers(Transformer(TransformerConfig(**settings | changes)))


def odd_sequence() -> None:
    """A worker: a sequence that does not divide."""
    part = model(PLAIN, torch.float32)
    split_layers(part, sequence_dim=1)
    part(torch.zeros(1, 10, dtype=torch.long))


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (partial(refused, heads=6), "6 query heads do not divide over 4 ranks"),
        (partial(refused, heads=12, kv_heads=3), "divides 3, or is a multiple of 3"),
        (partial(refused, feedforward=50), "50 channels of Linear `gate` do not divide"),
        (partial(refused, vocabulary=63), "63 words does not divide over 4 .* Pad it to 64"),
        (odd_sequence, "A sequence of 10 tokens does not divide .* such as 12"),
        (partial(device_mesh, ParallelDims(tp=3), "cpu"), "tp 3 needs 3 ranks, and 4 are"),
        (partial(device_mesh, ParallelDims(tp=4, shard=2), "cpu"), "needs 8 ranks"),
    ],
)
def test_what_does_not_divide_is_refused_in_a_sentence(worker, message):
    with pytest.raises(RankError, match=message):
        run_ranks(worker, RANKS)
