"""Tensor and sequence parallelism by hand: equal to one process, to DTensor and to Megatron-Core.

And what it sends and keeps: equal to the planner's and the papers' formulas.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from utils.lessons.lesson_12.tensor_layers import vocabulary_cross_entropy
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
