"""ZeRO by DeepSpeed on four ranks: losses, traffic and held bytes, each against its formula."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
import torch.distributed as dist
from rank_cases import nothing_left
from zero_cases import (
    STAGES,
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
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.techniques.zero import SETTINGS, note_states, zero_config, zero_engine

SIZES = parameter_sizes()
P = sum(SIZES)
BYTES = {"fp32": 4, "bf16": 2}
COUNTER = 4  # AdamW's step counter, one for each tensor that it steps
pytestmark = pytest.mark.skipif(deepspeed_problem() is not None, reason=str(deepspeed_problem()))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", STAGES)
def test_losses_equal_those_of_one_process(name, precision, accumulation):
    found = trained(name, precision, accumulation, 20)[0].losses
    tolerance = {"fp32": 1e-6, "bf16": 5e-4}[precision]
    assert found == pytest.approx(one_process(precision), rel=tolerance)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-2"])
def test_gradients_are_all_reduced_and_parameters_gathered(name, accumulation):
    """All-reduce then all-gather: in a ring (2 + 1) P (N - 1) / N elements, not 2 P (N - 1) / N."""
    times = accumulation if name == "ZeRO-2" else 1
    for run in trained(name, "bf16", accumulation, 20):
        assert run.payload("all-reduce") == times * 2 * P
        assert run.payload("all-gather") == 2 * P // WORLD
        assert run.payload("reduce") == run.payload("reduce-scatter") == 0


def test_gradients_can_be_reduced_to_their_owners():
    """A reduce is half of an all-reduce: in a ring (1 + 1) P (N - 1) / N elements."""
    for run in trained("ZeRO-2", "bf16", use_multi_rank_bucket_allreduce=False):
        assert run.payload("reduce") == 2 * P and run.payload("all-reduce") == 0
        assert run.payload("all-gather") == 2 * P // WORLD


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
        assert run.payload("all-gather") == accumulation * 2 * gathered // WORLD
        assert run.payload("reduce-scatter") == accumulation * 2 * P
        assert run.payload("all-reduce") == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-2"])
def test_what_a_rank_of_zero_1_and_2_holds(name, precision):
    """2P + 12P/N after the step in bf16; gradients of the rank's share of tensors after backward."""
    unit = BYTES[precision]
    for rank, run in enumerate(trained(name, precision, 1, 20)):
        after, backward, step = (
            run.moments[when] for when in ("after the step", "after backward 0", "in the step")
        )
        lasting = unit * P + 3 * 4 * P // WORLD
        assert after.named("bit16_groups_flat") == unit * P
        assert after.named("single_partition_of_fp32_groups") == 4 * P // WORLD
        assert after.named("exp_avg") == 2 * 4 * P // WORLD
        assert after.allocated_bytes - lasting == pytest.approx(0, abs=2000)
        assert backward.named("averaged_gradients") == unit * touched(rank)
        assert step.named("single_partition_of_fp32_groups") == 2 * 4 * P // WORLD


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
    unit = BYTES[precision]
    for run in trained("ZeRO-3", precision, 1, 20):
        after, step = run.moments["after the step"], run.moments["in the step"]
        assert after.named("lp_param_buffer") == unit * P // WORLD
        assert after.named("grad_partitions_flat_buffer") == unit * P // WORLD
        assert after.named("fp32_partitioned_groups_flat") == 4 * P // WORLD
        assert after.named("exp_avg") == 2 * 4 * P // WORLD
        bucket = zero_config(3, P, world_size=WORLD)["zero_optimization"]["reduce_bucket_size"]
        assert after.named("ipg_bucket") == unit * bucket
        assert step.named("fp32_partitioned_groups_flat") == 2 * 4 * P // WORLD


@pytest.mark.parametrize("name", STAGES)
def test_every_allocated_byte_has_a_name(name):
    for run in trained(name, "bf16", 1, 20):
        for moment in run.moments.values():
            named = sum(row.bytes for row in moment.rows)
            assert named == pytest.approx(moment.allocated_bytes, abs=2000)


def test_zero_1_keeps_all_gradients_while_it_accumulates():
    first, last = (
        trained("ZeRO-1", "bf16", 2, 20)[0].moments[f"after backward {n}"] for n in (0, 1)
    )
    assert first.named(".grad") >= 2 * P > last.named("averaged_gradients")
    two = trained("ZeRO-2", "bf16", 2, 20)[0].moments["after backward 0"]
    assert two.named(".grad") < P


def test_a_contradiction_in_the_batch_is_a_sentence():
    config = {**zero_config(1, P, world_size=4, micro_batch=2), "train_batch_size": 12}
    assert config["train_micro_batch_size_per_gpu"] == 2
    with pytest.raises(ValueError, match=r"2 x gradient_accumulation_steps 1 x 4 ranks is 8, .* 12"):
        zero_engine_refuses(config)
    with pytest.raises(ValueError, match="micro_batch.* is 0; it must be a whole number"):
        zero_config(1, P, world_size=4, micro_batch=0)


def zero_engine_refuses(config):
    from utils.techniques.deepspeed_config import read_config

    read_config(config, 4)


def test_an_unknown_key_is_a_sentence_with_the_nearest():
    with pytest.raises(ValueError, match="no setting 'reduce_bucket_sizes'.*reduce_bucket_size"):
        zero_config(2, P, world_size=4, reduce_bucket_sizes=5)
    config = zero_config(2, P, world_size=4)
    with pytest.raises(ValueError, match="no setting 'zero_optimisation'.*zero_optimization"):
        zero_engine_refuses({**config, "zero_optimisation": {}})
    with pytest.raises(ValueError, match="zero_optimization is True; it is a mapping"):
        zero_engine_refuses({**config, "zero_optimization": True})
    with pytest.raises(ValueError, match="stage is 4; ZeRO has the stages 1, 2 and 3"):
        zero_config(4, P, world_size=4)
    with pytest.raises(ValueError, match="write 'bf16' or 'fp32'"):
        zero_config(1, P, world_size=4, precision="fp8")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeeds_own_class_reads_the_configuration(stage):
    from utils.techniques.deepspeed_config import read_config

    config = zero_config(stage, P, world_size=4, micro_batch=2, accumulation=3)
    read = read_config(config, 4)
    assert (read.zero_optimization_stage, read.train_batch_size) == (stage, 24)


def test_every_setting_is_explained():
    for stage in (1, 2, 3):
        config = zero_config(stage, P, world_size=4)
        assert {*config, *config["zero_optimization"]} - {"zero_optimization"} <= set(SETTINGS)


def test_without_deepspeed_it_says_what_is_skipped(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "deepspeed" else found(n, *a)
    )
    deepspeed_problem.cache_clear()
    assert "not installed" in deepspeed_problem() and "skipped" in deepspeed_problem()
    deepspeed_problem.cache_clear()


def test_without_a_compiler_it_says_what_is_skipped(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    deepspeed_problem.cache_clear()
    assert "No C++ compiler" in deepspeed_problem() and "skipped" in deepspeed_problem()
    deepspeed_problem.cache_clear()


def test_no_group_is_a_sentence():
    with pytest.raises(ValueError, match="worker of run_ranks"):
        network = model()
        zero_engine(network, adamw(network.parameters()), zero_config(1, P, world_size=1))


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
    with pytest.raises(RankError, match=r"(?s)rank 1.*memory"):
        run_ranks(launched, 2, 1, timeout_seconds=120)


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


def test_a_failed_build_is_a_sentence(monkeypatch):
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()

    class Broken:
        def is_compatible(self):
            return True

        def load(self, verbose):
            raise RuntimeError("Error building extension\nmore")

    monkeypatch.setattr(type(accelerator), "create_op_builder", lambda *_: Broken())
    deepspeed_problem.cache_clear()
    assert "(Error building extension), so cells that run ZeRO are skipped" in deepspeed_problem()
    deepspeed_problem.cache_clear()


def test_deepspeed_keeps_the_device_that_it_was_loaded_for(monkeypatch):
    assert load_deepspeed("cpu") is load_deepspeed()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # restored afterwards
    with pytest.raises(RuntimeError, match="loaded for 'cpu' .* 'cuda' is wanted .* Restart"):
        load_deepspeed("cuda")


def on_another_device() -> None:
    network = model().to("meta")
    zero_engine(network, adamw(network.parameters()), zero_config(1, P, world_size=1))


def test_a_model_on_another_device_is_a_sentence():
    with pytest.raises(RankError, match="lies on 'meta', and DeepSpeed computes on 'cpu'"):
        run_ranks(on_another_device, 1, timeout_seconds=60)


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
