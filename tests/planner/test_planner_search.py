"""The search finds what trying everything finds, and explains what it leaves."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.catalog import device, model_shape
from utils.planner import (
    Batch,
    Cluster,
    Plan,
    SearchSpace,
    candidates,
    estimate,
    explain,
    memory,
    one_change_that_fits,
    search,
    why_it_does_not_fit,
    worst,
)
from utils.planner.plan_context import PlanContext
from utils.planner.plan_search.bounds import least_bytes
from utils.planner.plan_search.choice import ERROR, complexity
from utils.planner.stage_bytes import kind_memories
from utils.units import GIB

BIG = model_shape("megatron-175b")
SMALL = replace(model_shape("megatron-1.7b"), layers=8)
EXPERTS = replace(SMALL, name="experts", num_experts=4, experts_per_token=2, dense_layers=1)
SPACES = [
    SearchSpace(),
    SearchSpace(attention="unfused", cp=(1, 2)),
    SearchSpace(framework="nanotron"),
    SearchSpace(offload=("none", "optimizer"), shard_stages=True),
    SearchSpace(framework="fsdp"),
    SearchSpace(recompute_layers=(None, 1), partitions=("even", "ends")),
]


def _by_brute_force(model, cluster, batch, space):
    found = [
        estimate(model, cluster, plan, batch) for plan in candidates(model, cluster, batch, space)
    ]
    return found, [row for row in found if row.fits]


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.sampled_from([1, 2]),
    per_node=st.sampled_from([2, 4]),
    sequences=st.sampled_from([4, 8, 24]),
    layers=st.sampled_from([4, 6]),
    room=st.sampled_from([8, 12, 20, 40]),
    space=st.sampled_from(SPACES),
    kind=st.sampled_from([SMALL, EXPERTS]),
    length=st.sampled_from([1024, 16_384]),  # from 16,384 on context parallelism is tried
)
def test_the_search_equals_brute_force(
    nodes, per_node, sequences, layers, room, space, kind, length
):
    model = replace(kind, layers=layers)
    gpu = replace(device("A100-80GB"), memory_bytes=int(room * GIB))
    cluster = Cluster(gpu=gpu, nodes=nodes, gpus_per_node=per_node)
    batch = Batch(sequences=sequences, sequence_length=length)
    everything, fitting = _by_brute_force(model, cluster, batch, space)
    found = search(model, cluster, batch, space=space)
    assert found.considered == len(everything)
    if not fitting:
        assert found.best is None
        assert found.closest[0].missing_bytes == min(row.missing_bytes for row in everything)
        return
    roomy = [row for row in fitting if not row.tight]
    smallest = search(model, cluster, batch, "bytes", space).best
    if roomy:
        assert found.fastest.step_seconds == min(row.step_seconds for row in roomy)
        assert found.best.step_seconds == _simplest(roomy).step_seconds
        assert complexity(found.best.plan) == complexity(_simplest(roomy).plan)
        assert smallest.peak.needed_bytes == min(row.peak.needed_bytes for row in roomy)
    else:
        assert found.best is None
        assert smallest is None
    points = {(row.step_seconds, row.peak.needed_bytes) for row in found.pareto}
    assert points == _pareto({(row.step_seconds, row.peak.needed_bytes) for row in fitting})


def _simplest(roomy):
    """What a search recommends: the simplest within the error, of these the fastest."""
    limit = (1 + ERROR) * min(row.step_seconds for row in roomy)
    near = [row for row in roomy if row.step_seconds <= limit]
    return min(near, key=lambda row: (complexity(row.plan), row.step_seconds))


def _pareto(points):
    return {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}


@settings(max_examples=40, deadline=None)
@given(index=st.integers(0, 10_000), space=st.sampled_from(SPACES))
def test_bounds_are_below_what_they_bound(index, space):
    cluster, batch = Cluster(gpu="A100-80GB", nodes=2), Batch(sequences=64, sequence_length=2048)
    plans = list(candidates(BIG, cluster, batch, space))
    plan = plans[index % len(plans)]
    context, fullest_stage = PlanContext(BIG, plan, batch), worst(memory(BIG, plan, batch))
    assert least_bytes(context) <= fullest_stage.needed_bytes
    assert worst(kind_memories(context)).needed_bytes == fullest_stage.needed_bytes


def test_a_search_walks_a_layout_once(monkeypatch):
    """Counts of a stage depend on tp and pp alone, and estimates take what the bounds took."""
    cluster, batch = Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=256, sequence_length=2048)
    walked, module = [], sys.modules["utils.planner.stages"]
    module._walked.cache_clear()
    counted = module.block_parameters
    monkeypatch.setattr(module, "block_parameters", lambda *a: walked.append(a) or counted(*a))
    found = search(BIG, cluster, batch)
    layouts = {(plan.tp, plan.pp) for plan in candidates(BIG, cluster, batch, SearchSpace())}
    assert found.considered > 10 * len(layouts)
    assert len(walked) == len(layouts)


def test_175b_on_64_gpus_is_explained():
    cluster, batch = Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=256, sequence_length=2048)
    best = search(BIG, cluster, batch).best
    assert best.fits
    assert best.plan.ranks == 64
    neighbours = explain(best)
    assert not any(
        row.verdict == "faster" and row.estimate.fits
        for row in neighbours
        if row.plan in set(candidates(BIG, cluster, batch, SearchSpace()))
    )
    verdicts = {row.verdict for row in neighbours}
    assert verdicts >= {"slower", "does not fit", "invalid"}
    assert all(row.reason.endswith(".") for row in neighbours if row.verdict != "invalid")
    overflow = next(row for row in neighbours if row.verdict == "does not fit")
    assert "lacks" in overflow.reason
    assert "Stage" in overflow.reason


def test_zero_over_one_replica_changes_nothing():
    cluster, batch = Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=64, sequence_length=2048)
    found = estimate(BIG, cluster, Plan(tp=8, pp=8), batch)
    zero = [row for row in explain(found) if row.change.startswith("zero_stage")]
    assert {row.verdict for row in zero} == {"no difference"}


def test_one_change_makes_a_rejected_plan_fit():
    cluster, batch = Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=64, sequence_length=2048)
    rejected = estimate(BIG, cluster, Plan(tp=8, pp=8, micro_batch=4), batch)
    assert not rejected.fits
    assert "activations" in why_it_does_not_fit(rejected)
    change = one_change_that_fits(rejected)
    assert change.estimate.fits
    assert why_it_does_not_fit(change.estimate) == "It fits."
    hopeless = estimate(BIG, Cluster(gpu="A100-80GB", nodes=1), Plan(tp=8), batch)
    assert one_change_that_fits(hopeless) is None


def test_what_cannot_fit_names_the_closest_plans():
    cluster, batch = Cluster(gpu="A100-80GB", nodes=2), Batch(sequences=64, sequence_length=2048)
    found = search(BIG, cluster, batch)
    assert found.best is None
    assert found.pareto == ()
    assert 1 <= len(found.closest) <= 3
    assert all(row.missing_bytes > 0 for row in found.closest)
    assert len({(row.plan.tp, row.plan.pp) for row in found.closest}) == len(found.closest)


def test_a_thousand_gpus_need_few_estimates():
    """The search is fast because most plans are ruled out: seconds are printed by the benchmark."""
    cluster = Cluster(gpu="A100-80GB", nodes=128)
    found = search(BIG, cluster, Batch(sequences=2048, sequence_length=2048))
    assert found.best.plan.ranks == 1024
    assert found.considered > 1000
    assert found.estimated < found.considered / 5


def test_the_planner_needs_no_torch():
    code = "from utils import search; from evidence.validation import validate; import sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "False"


def test_bad_input():
    cluster = Cluster(gpu="A100-80GB", nodes=1)
    with pytest.raises(ValueError, match="'seconds', 'bytes'"):
        search(SMALL, cluster, Batch(sequences=8, sequence_length=512), "dollars")
    with pytest.raises(ValueError, match="multiple of 8"):
        search(
            replace(SMALL, heads=1, hidden=2304, layers=1),
            cluster,
            Batch(sequences=3, sequence_length=512),
        )
