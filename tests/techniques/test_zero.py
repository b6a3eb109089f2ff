"""ZeRO by DeepSpeed on four ranks: losses, traffic and held bytes, each against its formula."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from rank_cases import nothing_left
from zero_cases import (
    MANY_STEPS,
    STAGES,
    STEPS,
    WORLD,
    adamw,
    loss_of,
    model,
    one_process,
    parameter_sizes,
    tokens,
    trained,
)

from utils.memory import measure
from utils.ranks import RankError, run_ranks
from utils.techniques.deepspeed import deepspeed_missing, deepspeed_problem
from utils.techniques.zero import note_states, zero_config, zero_engine

SIZES = parameter_sizes()
P = sum(SIZES)
BYTES = {"fp32": 4, "bf16": 2}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
COUNTER = 4  # AdamW's step counter, one for each tensor that it steps
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(bool(deepspeed_missing()), reason=str(deepspeed_missing())),
]


@pytest.fixture(autouse=True, scope="module")
def deepspeed_ready() -> None:
    """Loaded here with its extension, so that ranks get it ready-made."""
    assert deepspeed_problem() is None


TOLERANCES = {"fp32": 1e-6, "bf16": 5e-4}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", STAGES)
def test_losses_equal_those_of_one_process(name, precision, accumulation):
    found = trained(name, precision, accumulation, STEPS)[0].losses
    assert found == pytest.approx(one_process(precision), rel=TOLERANCES[precision])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", STAGES)
def test_losses_of_many_steps_equal_those_of_one_process(name, precision):
    found = trained(name, precision, 2, MANY_STEPS)[0].losses
    assert found == pytest.approx(one_process(precision, MANY_STEPS), rel=TOLERANCES[precision])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-2"])
def test_gradients_are_all_reduced_and_parameters_gathered(name, accumulation, precision):
    """All-reduce then all-gather: in a ring (2 + 1) P (N - 1) / N elements, not 2 P (N - 1) / N."""
    times = accumulation if name == "ZeRO-2" else 1
    unit, dtype = BYTES[precision], DTYPES[precision]
    norm = 4 if precision == "fp32" else 0  # of the gradients: one more number of the same dtype
    for run in trained(name, precision, accumulation, STEPS):
        assert run.payloads() == {
            ("all-reduce", dtype): times * unit * P + norm,
            ("all-gather", dtype): unit * P // WORLD,
        }


def test_gradients_can_be_reduced_to_their_owners():
    """A reduce is half of an all-reduce: in a ring (1 + 1) P (N - 1) / N elements."""
    for run in trained("ZeRO-2", "bf16", use_multi_rank_bucket_allreduce=False):
        assert run.payloads() == {
            ("reduce", "bfloat16"): 2 * P,
            ("all-gather", "bfloat16"): 2 * P // WORLD,
        }


def kept_gathered(distance: int) -> int:
    """Elements that ZeRO-3 keeps from forward to backward.

    After the forward of a layer lie all later layers, forward and back, before its own backward.
    """
    kept, later = 0, 0
    for size in reversed(SIZES):
        kept += size if later < distance else 0
        later += 2 * size
    return kept


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("distance", [0, 30_000, 10**9])
def test_zero_3_gathers_by_the_distance_of_reuse(distance, accumulation):
    for run in trained("ZeRO-3", "bf16", accumulation, 3, stage3_max_reuse_distance=distance):
        gathered = 2 * P - kept_gathered(distance)
        assert run.payloads() == {
            ("all-gather", "bfloat16"): accumulation * 2 * gathered // WORLD,
            ("reduce-scatter", "bfloat16"): accumulation * 2 * P,
        }


def large(moment):
    """Bytes by attribute and dtype, indices left out; single numbers are no part of it."""
    found = {}
    for row in moment.rows:
        if row.bytes > 64:
            key = re.sub(r"\[[^'].*?\]", "", row.path.removeprefix("optimizer.")), row.dtype
            found[key] = found.get(key, 0) + row.bytes
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-2"])
def test_what_a_rank_of_zero_1_and_2_holds(name, precision):
    """2P + 12P/N after the step in bf16; gradients of the rank's share of tensors after backward."""
    unit, dtype, share = BYTES[precision], DTYPES[precision], 4 * P // WORLD
    lasting = {
        ("bit16_groups_flat", dtype): unit * P,
        ("single_partition_of_fp32_groups", "float32"): share,
        ("optimizer.state['exp_avg']", "float32"): share,
        ("optimizer.state['exp_avg_sq']", "float32"): share,
    }
    for rank, run in enumerate(trained(name, precision, 1, STEPS)):
        gradients = {("averaged_gradients", dtype): unit * touched(rank)}
        copy = {("single_partition_of_fp32_groups.grad", "float32"): share}
        assert large(run.moments["after backward 0"]) == lasting | gradients
        assert large(run.moments["in the step"]) == lasting | copy
        assert large(run.moments["after the step"]) == lasting


def touched(rank: int) -> int:
    """Elements of the tensors that a rank owns a part of: DeepSpeed keeps their gradients whole."""
    first, last, start, count = rank * P // WORLD, (rank + 1) * P // WORLD, 0, 0
    for size in SIZES:
        count += size if start < last and start + size > first else 0
        start += size
    return count


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_rank_of_zero_3_holds(precision):
    """16P/N, the gradients among it for good, and a bucket; a float32 gradient copy at the step."""
    unit, dtype, share = BYTES[precision], DTYPES[precision], P // WORLD
    bucket = zero_config(3, P, world_size=WORLD)["zero_optimization"]["reduce_bucket_size"]
    lasting = {
        ("lp_param_buffer", dtype): unit * share,
        ("grad_partitions_flat_buffer", dtype): unit * share,
        ("ipg_buckets.buffer", dtype): unit * bucket,
        ("fp32_partitioned_groups_flat", "float32"): 4 * share,
        ("optimizer.state['exp_avg']", "float32"): 4 * share,
        ("optimizer.state['exp_avg_sq']", "float32"): 4 * share,
    }
    for run in trained("ZeRO-3", precision, 1, STEPS):
        copy = {("fp32_partitioned_groups_flat.grad", "float32"): 4 * share}
        assert large(run.moments["after the step"]) == lasting
        assert large(run.moments["in the step"]) == lasting | copy


@pytest.mark.parametrize("name", STAGES)
def test_every_allocated_byte_has_a_name(name):
    """But for single numbers that are on the stack of DeepSpeed's step."""
    for run in trained(name, "bf16", 1, STEPS):
        for when, moment in run.moments.items():
            unnamed = moment.allocated_bytes - sum(row.bytes for row in moment.rows)
            assert 0 <= unnamed <= (16 if when == "in the step" else 0)


def test_zero_1_keeps_all_gradients_while_it_accumulates():
    first, last = (
        trained("ZeRO-1", "bf16", 2, STEPS)[0].moments[f"after backward {n}"] for n in (0, 1)
    )
    assert first.named(".grad") >= 2 * P > last.named("averaged_gradients")
    two = trained("ZeRO-2", "bf16", 2, STEPS)[0].moments["after backward 0"]
    assert two.named(".grad") < P


def launched(rank_without_memory: int | None = None) -> float:
    network = model()
    config = zero_config(3, P, world_size=dist.get_world_size(), micro_batch=4, precision="fp32")
    engine = zero_engine(network, adamw(network.parameters()), config)
    if dist.get_rank() == rank_without_memory:
        torch.empty(2**60)
    loss = loss_of(engine, tokens(0)[:4])
    engine.backward(loss)
    engine.step()
    print("trained")
    return loss.item()


def test_a_rank_that_runs_out_of_memory_alone_is_named():
    with pytest.raises(RankError, match=r"(?s)rank 1.*allocate") as caught:
        run_ranks(launched, 2, 1, timeout_seconds=120)
    assert caught.value.rank == 1 and "allocate" in caught.value.failures[1].what


def test_ranks_print_nothing_of_deepspeeds(capsys):
    run_ranks(launched, 2, timeout_seconds=120)
    found = capsys.readouterr()
    assert sorted(found.out.splitlines()) == ["[rank 0] trained", "[rank 1] trained"]


@pytest.mark.slow
def test_fifty_launches_leave_nothing_behind(capsys):
    run_ranks(launched, 2, timeout_seconds=120)
    with nothing_left():
        assert {len(run_ranks(launched, 2, timeout_seconds=120)) for _ in range(50)} == {2}
    found = capsys.readouterr().out.splitlines()  # no word of an abort
    assert sorted(found) == ["[rank 0] trained"] * 51 + ["[rank 1] trained"] * 51


def metered(name: str) -> dict[str, int]:
    network = model()
    optimizer = adamw(network.parameters())
    config = zero_config(STAGES[name], P, world_size=dist.get_world_size(), micro_batch=4)
    engine = zero_engine(network, optimizer, config)

    def step() -> None:
        loss = loss_of(engine, tokens(0)[:4])
        engine.backward(loss)
        note_states(engine)
        engine.step()

    found = measure(step, model=engine.module, optimizer=optimizer, timed_steps=0)
    series = found.timeline.series()
    return {str(category): int(curve.max()) for category, curve in series.items()}


def test_the_meter_knows_what_zero_3_keeps():
    """Shards, and the bucket that stays; both were there before the meter began."""
    for found in run_ranks(metered, WORLD, "ZeRO-3", timeout_seconds=300):
        assert found["parameters"] == 2 * P // WORLD
        assert found["optimizer state"] == 3 * 4 * P // WORLD + COUNTER
        assert found["gradients"] >= (2 + 4) * P // WORLD
        assert found["communication buffers"] >= 2 * (P // 4 // 2 * 2)


def partly_frozen(name: str) -> bool:
    network = model()
    network.embed.requires_grad_(False)
    optimizer = adamw([p for p in network.parameters() if p.requires_grad])
    before = network.head.weight.detach().clone()
    config = zero_config(
        STAGES[name], P, world_size=dist.get_world_size(), micro_batch=4, precision="fp32"
    )
    engine = zero_engine(network, optimizer, config)
    engine.backward(loss_of(engine, tokens(0)[:4]))
    engine.step()
    if name == "ZeRO-3":
        return True  # its parameters are shards now
    return not torch.equal(network.head.weight, before)


@pytest.mark.parametrize("name", STAGES)
def test_a_model_may_be_frozen_in_part(name):
    assert run_ranks(partly_frozen, 2, name, timeout_seconds=120) == [True, True]
