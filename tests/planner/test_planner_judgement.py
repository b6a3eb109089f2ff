"""What the planner recommends and why: simplicity, headroom, failures, prices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from utils.catalog import ModelShape, model_shape, read_prices
from utils.lessons.lesson_15.review import review
from utils.planner import (
    Batch,
    Cluster,
    Plan,
    SearchSpace,
    candidates,
    cost,
    estimate,
    explain,
    goodput,
    search,
    why_it_does_not_fit,
)
from utils.planner.goodput import checkpoint_bytes, waiting_seconds
from utils.planner.neighbours import one_change_that_fits
from utils.planner.plan_search.choice import ERROR, complexity
from utils.planner.run_cost import node_price

A100 = Cluster(gpu="A100-80GB", nodes=8, usd_per_gpu_hour=2.79)
BATCH = Batch(sequences=1536, sequence_length=2048)
BIG = ModelShape(
    name="130B",
    family="gpt",
    layers=72,
    hidden=12_288,
    heads=96,
    feedforward=49_152,
    vocabulary=51_200,
    max_sequence=2048,
    positions="learned",
    tied=True,
)


# The simplest within the error


def test_fewer_axes_no_offload_and_fewer_chunks_are_simpler() -> None:
    plain = Plan(dp=8, tp=8, zero_stage=1)
    harder = [
        replace(plain, pp=2),
        replace(plain, offload="optimizer"),
        replace(plain, zero_stage=3),
        Plan(dp=8, tp=8, pp=2, virtual_stages=2),
    ]
    assert all(complexity(plan) > complexity(plain) for plan in harder)
    assert complexity(replace(plain, zero_stage=0)) == complexity(plain)
    assert complexity(replace(harder[0], virtual_stages=6)) > complexity(harder[3])


def test_offload_for_less_than_the_error_is_not_recommended() -> None:
    space = SearchSpace(offload=("none", "optimizer"))
    found = search(BIG, A100, BATCH, space=space)
    assert found.best.plan.offload == "none"
    assert found.best.step_seconds <= (1 + ERROR) * found.fastest.step_seconds
    if found.best.plan != found.fastest.plan:
        assert "below the planner's error" in found.why
    assert "Exact within" in found.why and "offload none, optimizer" in found.why


def test_the_best_is_never_within_the_allocators_reach() -> None:
    for nodes in (8, 12, 16):
        found = search("gpt-3-175b", replace(A100, nodes=nodes), BATCH)
        assert found.best is None or not found.best.tight


def test_where_all_that_fits_is_tight_the_nearest_plan_is_told() -> None:
    """`best or closest[0]` has something to explain."""
    found = search(BIG, Cluster(gpu="A100-40GB", nodes=8), BATCH)
    assert found.best is None and found.pareto
    assert found.closest[0] in found.pareto
    assert "within the allocator's reach" in why_it_does_not_fit(found.closest[0])


def test_explaining_the_best_never_answers_faster() -> None:
    best = search(BIG, A100, BATCH).best
    verdicts = {row.verdict for row in explain(best)}
    assert "faster" not in verdicts and "within the error" in verdicts
    outside = SearchSpace(recompute=("full",), largest_micro_batch=1)
    smaller = replace(BIG, name="third", layers=24)
    narrow = search(smaller, A100, BATCH, space=outside).best
    rows = [row for row in explain(narrow, outside) if row.verdict == "outside the space"]
    assert rows and all("did not try" in row.reason for row in rows)


def test_one_change_takes_the_simpler_of_two_that_nobody_can_tell_apart() -> None:
    model = model_shape("gpt-3-175b")
    rejected = estimate(
        model, A100, Plan(tp=4, pp=16, sequence_parallel=True, micro_batch=2), BATCH
    )
    assert one_change_that_fits(rejected).plan.offload == "none"


# Axes of the search


def test_long_sequences_try_context_parallelism_unasked() -> None:
    model, one = model_shape("llama-2-7b"), Cluster(gpu="H100", nodes=2)
    sizes = {
        s: {
            plan.cp
            for plan in candidates(
                model, one, Batch(sequences=16, sequence_length=s), SearchSpace()
            )
        }
        for s in (8192, 16_384)
    }
    assert sizes == {8192: {1}, 16_384: {1, 2, 4, 8, 16}}


def test_batches_are_an_axis() -> None:
    model, one = model_shape("llama-2-7b"), Cluster(gpu="H100", nodes=1)
    batches = [Batch(sequences=n, sequence_length=s) for n in (8, 64) for s in (2048, 4096)]
    best = search(model, one, batches).best
    alone = [search(model, one, batch).best.tokens_per_second for batch in batches]
    assert best.tokens_per_second == max(alone) and best.batch in batches
    with pytest.raises(ValueError, match="needs a batch"):
        search(model, one, [])


def test_fsdp_shards_stages_and_megatron_does_not() -> None:
    batch = Batch(sequences=64, sequence_length=2048)
    staged = {
        name: {
            plan.zero_stage
            for plan in candidates(BIG, A100, batch, SearchSpace(framework=name))
            if plan.pp > 1
        }
        for name in ("megatron", "fsdp")
    }
    assert max(staged["megatron"]) == 1 and max(staged["fsdp"]) == 3


# Failures


def test_without_spares_a_repair_stops_the_job() -> None:
    alone, with_one = goodput(A100, spares=0), goodput(A100, spares=1)
    assert alone.share == pytest.approx((0.81, 0.97), abs=0.01)
    assert goodput(A100).share[0] > with_one.share[0] > 0.97 > alone.share[1] - 0.01
    assert waiting_seconds(0, 100.0, 1e9) == 100.0 and waiting_seconds(3, 100.0, 1e9) < 1e-9


def test_a_missed_checkpoint_interval_costs() -> None:
    best, rare = goodput(A100), goodput(A100, checkpoint_interval_seconds=86_400.0)
    assert rare.share[0] < best.share[0] - 0.05


def test_a_checkpoint_is_14_bytes_a_parameter() -> None:
    assert checkpoint_bytes("gpt-3-175b", Plan()) == 14 * model_shape("gpt-3-175b").parameter_count


def test_spot_nodes_fail_more_often() -> None:
    spot = replace(A100, pricing="spot", interruptions_per_1000_node_days=500.0)
    assert goodput(spot).share[0] < goodput(A100).share[0]
    assert goodput(spot).seconds_between_failures[0] == pytest.approx(1000 * 86_400 / (525 * 8))


# Prices and review


def test_whole_nodes_are_priced_before_cheaper_single_cards() -> None:
    row = node_price(replace(A100, usd_per_gpu_hour=None))
    assert row.instance_gpus == 8 and row.fabric != "no" and row.kind == "on demand"
    assert row.usd_per_gpu_hour > min(
        r.usd_per_gpu_hour for r in read_prices() if r.gpu == "A100-80GB"
    )


def test_the_review_does_not_sign_130b_on_1b_tokens() -> None:
    design = estimate(BIG, A100, Plan(tp=8, pp=8, sequence_parallel=True, micro_batch=2), BATCH)
    fastest = search(BIG, A100, BATCH).best
    verdict = review(design, fastest, tokens=1e9, days=300, usd=1e6)
    failed = {row.name: row.reason for row in verdict.criteria if not row.passed}
    assert {"tokens", "repair", "other GPU"} <= set(failed)
    assert "0.0 tokens per parameter" in failed["tokens"] and "81% to 97%" in failed["repair"]
    tight = estimate(BIG, A100, Plan(tp=8, pp=8, micro_batch=4), BATCH)
    names = {
        row.name
        for row in review(tight, fastest, tokens=1e9, days=300, usd=1e6).criteria
        if not row.passed
    }
    assert "headroom" in names


def test_64_h100_finish_what_64_a100_do_not() -> None:
    h100 = Cluster(gpu="H100", nodes=8, usd_per_gpu_hour=2.95)
    bills = [cost(search(BIG, c, BATCH).best, 300e9) for c in (A100, h100)]
    slow = [bill.usd * bill.days_interval[1] / bill.days for bill in bills]
    assert slow[0] > 1e6 > slow[1], "within a million dollars on the slow side"
