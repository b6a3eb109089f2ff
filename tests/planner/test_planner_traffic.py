"""Bytes by axis: what the planner predicts beside what a simulated program sends; ranks on nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from three_cases import LESSON, lesson_names

from utils.catalog import ModelShape
from utils.lessons.lesson_14.placement import busiest_port_bytes, crossing_bytes, layouts, places
from utils.planner import Batch, Cluster, Plan, axis_bytes, estimate, framework, ring_bytes
from utils.planner.plan_context import ClusterPlanContext
from utils.planner.step_seconds.step_end import data_parallel_seconds

SHAPE = ModelShape(
    name="tiny",
    family="llama",
    layers=4,
    hidden=64,
    heads=4,
    feedforward=96,
    vocabulary=64,
    max_sequence=32,
)
KEPT = replace(framework("fsdp"), name="fsdp, inputs kept", gathered_inputs=1.0)
PLAN = Plan(tp=2, pp=2, dp=2, zero_stage=1, sequence_parallel=True, framework=KEPT)
LENGTH, MICRO_BATCHES = 32, 4


@pytest.fixture(scope="module")
def lesson():
    """What lesson 14 defines, at a sequence of 32."""
    return lesson_names(TOKENS=LENGTH)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_lessons_program_sends_what_the_planner_says(lesson, stage):
    dims = PLAN.dims
    run = lesson["at_size"](SHAPE, dims, dims.rank(pp=stage), MICRO_BATCHES)
    lesson["dims"] = dims
    found = lesson["sent_by_axis"](run, dims)
    batch = Batch(sequences=2 * MICRO_BATCHES, sequence_length=LENGTH)
    wanted = axis_bytes(SHAPE, PLAN, batch)[stage]
    # What the planner leaves out: gradients of the norms over tp, once a step, in float32; and a
    # number of the norm over each axis, of the loss over pp.
    norms = 2 * SHAPE.layers // 2 + (stage == 1)
    assert found["tp"] == wanted["tp"] + 4 * SHAPE.hidden * norms + 4
    assert found["pp"] == wanted["pp"] + 2 * 4
    assert found["shard"] == wanted["shard"] + 4
    assert found["replicate"] == wanted["replicate"] == 0


@pytest.mark.parametrize("name", ["FSDP", "HSDP"])
def test_sharded_bytes(lesson, name):
    sizes = {"FSDP": {}, "HSDP": {"shard_ranks": 2}}[name]
    plan = Plan(dp=8, zero_stage=3, framework="fsdp", **sizes)
    run = lesson["at_size"](SHAPE, plan.dims, 0, 2, zero_stage=3)
    found = lesson["sent_by_axis"](run, plan.dims)
    (wanted,) = axis_bytes(SHAPE, plan, Batch(sequences=16, sequence_length=LENGTH))
    # Named: `apply_fsdp` gives up the ends after forward too and gathers them again, which FSDP2
    # left to itself does not; and a number of the norm over each axis.
    n = plan.dims.shard
    ends = 2 * SHAPE.vocabulary * SHAPE.hidden + SHAPE.hidden
    again = 2 * 2 * ends * (n - 1) / n
    assert found["shard"] == pytest.approx(wanted["shard"] + again, rel=1e-4)
    assert found["replicate"] == pytest.approx(wanted["replicate"], rel=1e-4, abs=1)


@pytest.mark.parametrize(("stage", "rounds"), [(1, 3), (2, 2 * 4 + 1), (3, 3 * 4)])
def test_deepspeed_all_reduces_what_it_shares(stage, rounds):
    """As lesson 09 counts its default: whole buckets below stage 3; to their owners halves that."""
    plan = Plan(dp=8, zero_stage=stage, framework="deepspeed")
    to_owners = replace(framework("deepspeed"), name="deepspeed, to owners", whole_gradients=False)
    batch = Batch(sequences=32, sequence_length=LENGTH)
    whole, parts = (
        axis_bytes(SHAPE, each, batch)[0]["shard"]
        for each in (plan, replace(plan, framework=to_owners))
    )
    once = 2 * SHAPE.parameter_count * 7 / 8
    assert whole == rounds * once
    assert parts == {1: 2, 2: 4 + 1, 3: 12}[stage] * once
    cluster = Cluster(gpu="A100-80GB", nodes=8, network_bytes_per_second=1.25e9)
    plans = (replace(plan, dp=64), replace(plan, dp=64, framework=to_owners))
    slow, fast = (
        data_parallel_seconds(
            ClusterPlanContext(SHAPE, each, Batch(sequences=64, sequence_length=LENGTH), cluster),
            1e9,
        )[0]
        for each in plans
    )
    assert slow == pytest.approx((1 if stage == 3 else 2) * fast, rel=0.01)


def test_what_a_ring_sends():
    assert ring_bytes("all-gather", 10, 4) == 30
    assert ring_bytes("reduce-scatter", 40, 4) == 30
    assert ring_bytes("all-reduce", 40, 4) == 60
    assert ring_bytes("send", 7, 2) == 7 and ring_bytes("receive", 7, 2) == 0
    with pytest.raises(ValueError, match="'broadcast' is no ring"):
        ring_bytes("broadcast", 1, 2)


def test_a_plan_that_is_not_counted():
    batch = Batch(sequences=8, sequence_length=LENGTH)
    with pytest.raises(ValueError, match="Write cp=1"):
        axis_bytes(SHAPE, Plan(cp=2), batch)
    with pytest.raises(ValueError, match="tp is 3"):
        axis_bytes(SHAPE, Plan(tp=3), batch)


def test_ranks_are_numbered_as_in_the_mesh():
    dims = PLAN.dims
    layout = [(axis, n) for axis, n in dims.sizes.items() if n > 1]
    for rank, place in enumerate(places(layout)):
        assert place.items() <= dims.coordinates(rank).items()


def test_crossing_bytes():
    sent = {"pp": 1.0, "shard": 10.0, "tp": 100.0}
    assert crossing_bytes([("pp", 2), ("shard", 2), ("tp", 2)], sent, 4) == {
        "pp": 4.0,
        "shard": 0,
        "tp": 0,
    }
    assert crossing_bytes([("tp", 2), ("shard", 2), ("pp", 2)], sent, 4) == {
        "tp": 800.0,
        "shard": 0,
        "pp": 0,
    }
    split = [("shard", 2), ("tp", 2), ("shard", 2)]  # a ring of four, two of them side by side
    assert crossing_bytes(split, sent, 2) == {"shard": 40.0, "tp": 800.0}
    with pytest.raises(ValueError, match="8 ranks do not fill nodes of 3"):
        crossing_bytes([("tp", 8)], sent, 3)
    with pytest.raises(ValueError, match="no bytes for cp"):
        crossing_bytes([("cp", 2)], sent, 2)


def test_the_busiest_port():
    """Stages in the middle send to both sides, the ends to one; a ring's rank to its next alone."""
    sent = {"pp": 2.0, "shard": 10.0}
    assert busiest_port_bytes([("pp", 4)], sent, 1) == 2.0
    assert busiest_port_bytes([("pp", 2)], sent, 1) == 1.0
    assert busiest_port_bytes([("pp", 4), ("shard", 2)], sent, 2) == 2.0
    assert busiest_port_bytes([("shard", 2), ("pp", 4)], sent, 2) == 11.0
    assert busiest_port_bytes([("shard", 2), ("pp", 4)], sent, 8) == 0


def test_layouts_are_all_orders_of_prime_factors():
    assert sorted(layouts({"a": 4, "b": 3})) == [
        (("a", 2), ("a", 2), ("b", 3)),
        (("a", 2), ("b", 3), ("a", 2)),
        (("b", 3), ("a", 2), ("a", 2)),
    ]


def test_hybrid_sharding_takes_its_gathers_off_the_network():
    """Gathers stay on the node's link; what crosses nodes is an eighth of the gradients."""
    cluster = Cluster(gpu="A100-80GB", nodes=8, network_bytes_per_second=1.25e9)
    whole = Plan(dp=64, zero_stage=3, framework="fsdp")
    inside = replace(whole, shard_ranks=8)
    batch = Batch(sequences=64, sequence_length=2048)
    contexts = (ClusterPlanContext(SHAPE, plan, batch, cluster) for plan in (whole, inside))
    flat, hybrid = (data_parallel_seconds(context, 1e9, 100) for context in contexts)
    assert hybrid[1] < flat[1] / 50
    assert hybrid[0] > hybrid[1]
    found = estimate("llama-3.2-1b", cluster, inside, batch)
    assert found.step_seconds > 0


def test_the_lesson_has_what_these_tests_take():
    assert LESSON.exists()
