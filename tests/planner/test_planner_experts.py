"""Mixtures of experts, fp8 and the other choices that change what a rank holds."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from evidence.validation import megatron_experts
from utils.catalog import model_shape
from utils.planner import Batch, Cluster, Plan, SearchSpace, estimate, memory, search, worst
from utils.planner.experts import expert_replicas
from utils.planner.fp8 import FP8_COPIES
from utils.planner.plan_context import PlanContext
from utils.planner.stage_bytes.states import states
from utils.planner.stages import stages
from utils.planner.step_seconds.collectives import Group, all_to_all_seconds
from utils.planner.step_seconds.expert_time import routed_tokens
from utils.units import Category

MIXTRAL = model_shape("mixtral-8x7b")
LLAMA = model_shape("llama-2-7b")
H100 = Cluster(gpu="H100", nodes=8)
LONG = Batch(sequences=256, sequence_length=4096)
SPREAD = Plan(dp=8, tp=2, pp=4, ep=8, expert_tp=1, sequence_parallel=True, zero_stage=1)


# Megatron-LM's own CI


def test_bytes_of_megatrons_experts() -> None:
    rows = megatron_experts.comparisons()
    for quantity, bar in (("peak bytes", 0.05), ("bytes between steps", 0.06)):
        errors = [abs(row.error) for row in rows if row.quantity == quantity]
        assert len(errors) > 60, "rows are missing"
        assert statistics.median(errors) < bar, f"{quantity}: {statistics.median(errors):.1%}"


def test_rows_that_cannot_be_said_are_counted_with_a_reason() -> None:
    counted = megatron_experts.left_out()
    compared = len({row.case for row in megatron_experts.comparisons()})
    assert sum(counted.values()) + compared == 94, counted
    assert all(len(why) > 20 for why in counted)


# Parameters and states


def test_every_expert_lies_somewhere_once_for_each_replica() -> None:
    for plan in (SPREAD, replace(SPREAD, ep=2), replace(SPREAD, ep=4, expert_tp=2)):
        places = stages(MIXTRAL, plan)
        held = sum(stage.expert_parameters for stage in places)
        on_all = held * plan.dp * plan.cp * plan.tp / expert_replicas(plan)
        assert on_all == MIXTRAL.parameter_counts()["experts"]


def test_the_model_is_whole_on_one_rank() -> None:
    (stage,) = stages(MIXTRAL, Plan())
    padding = 2 * 4096 * (-32_000 % 128)
    assert stage.parameters == MIXTRAL.parameter_count + padding


def test_zero_shards_experts_over_their_own_replicas() -> None:
    plan = replace(SPREAD, ep=4)
    first = stages(MIXTRAL, plan)[1]
    held = states(PlanContext(MIXTRAL, plan, LONG), first)[Category.OPTIMIZER_STATE]
    experts = first.expert_parameters
    assert expert_replicas(plan) == 4
    assert held == pytest.approx(12 * ((first.parameters - experts) / 8 + experts / 4))


def test_dense_layers_come_first() -> None:
    mixed = replace(MIXTRAL, name="mixed", dense_layers=3)
    counts = [stage.expert_layers for stage in stages(mixed, Plan(pp=4, tp=1))]
    assert counts == [5, 8, 8, 8]
    chunked = [s.expert_layers for s in stages(mixed, Plan(pp=4, tp=1, virtual_stages=8))]
    assert chunked == [7, 7, 7, 8]


def test_more_experts_a_token_keep_and_compute_more() -> None:
    one = estimate(MIXTRAL, H100, SPREAD, LONG)
    two = estimate(replace(MIXTRAL, experts_per_token=4), H100, SPREAD, LONG)
    kept = [row.peak.bytes_by_category["activations"] for row in (one, two)]
    assert kept[1] > 1.2 * kept[0] and two.time.matmul > 1.5 * one.time.matmul
    context = PlanContext(MIXTRAL, SPREAD, LONG)
    assert routed_tokens(context) == 2 * context.rank_tokens / 2


def test_expert_parallelism_across_nodes_pays_for_the_network() -> None:
    fast = Cluster(gpu="H100", nodes=16, gpus_per_node=4, network_bytes_per_second=200e9)
    slow = replace(fast, network_bytes_per_second=1.25e9)
    inside = replace(SPREAD, ep=4)  # the 4 ranks of one node
    times = {
        plan.ep: [estimate(MIXTRAL, c, plan, LONG).time.tensor_parallel for c in (fast, slow)]
        for plan in (inside, SPREAD)
    }
    assert times[4][0] == times[4][1]
    assert times[8][1] > 2 * times[8][0]


def test_an_all_to_all_of_one_costs_nothing() -> None:
    assert all_to_all_seconds(H100, Group(1), 1e9) == 0.0
    assert all_to_all_seconds(H100, Group(8), 1e9) < all_to_all_seconds(H100, Group(16), 1e9)


# fp8


def test_fp8_is_faster_and_keeps_copies_of_the_matrices() -> None:
    plan, one = Plan(dp=8, zero_stage=1), Cluster(gpu="B200", nodes=1)
    batch = Batch(sequences=64, sequence_length=4096)
    rows = {
        kind: estimate(LLAMA, one, replace(plan, precision=kind), batch)
        for kind in ("bf16", "fp8", "mxfp8")
    }
    assert rows["fp8"].step_seconds < 0.85 * rows["bf16"].step_seconds
    kept = {kind: row.peak.bytes_by_category["activations"] for kind, row in rows.items()}
    assert kept["fp8"] < kept["mxfp8"] < kept["bf16"]
    (stage,) = stages(LLAMA, plan)
    more = {kind: row.peak.bytes_by_category["parameters"] for kind, row in rows.items()}
    for kind in ("fp8", "mxfp8"):  # in place of the 16-bit parameters
        assert more[kind] - more["bf16"] == (FP8_COPIES[kind] - 2) * stage.block_parameters


def test_without_a_distributed_optimizer_parameters_stay_beside_their_copies() -> None:
    plan = Plan(dp=8, precision="fp8")
    (stage,) = stages(LLAMA, plan)
    contexts = (PlanContext(LLAMA, replace(plan, precision=kind), LONG) for kind in ("fp8", "bf16"))
    more, less = (states(context, stage)[Category.PARAMETERS] for context in contexts)
    assert more - less == 2 * stage.block_parameters


def test_sharded_parameters_have_no_lasting_copies() -> None:
    """ZeRO-3 makes copies of what it has gathered: a block or two."""
    plan = Plan(dp=64, zero_stage=3)
    (stage,) = stages(LLAMA, plan)
    kept = {
        kind: worst(
            memory(LLAMA, replace(plan, precision=kind), Batch(sequences=64, sequence_length=4096))
        )
        for kind in ("bf16", "fp8")
    }
    in_fp8, plain = (kept[kind].bytes_by_category for kind in ("fp8", "bf16"))
    assert in_fp8[Category.PARAMETERS] == plain[Category.PARAMETERS] - stage.block_parameters / 64
    assert in_fp8[Category.GATHERED] == plain[Category.GATHERED]


def test_some_blocks_go_to_the_host() -> None:
    away = Plan(dp=8, zero_stage=1, offload_activations=True)
    rows = [
        estimate(LLAMA, replace(H100, nodes=1), replace(away, offload_layers=n), LONG)
        for n in (1, 16, None)
    ]
    kept = [row.peak.bytes_by_category["activations"] for row in rows]
    assert kept[0] > kept[1] > kept[2] and rows[0].host_bytes < rows[1].host_bytes
    assert kept[1] == pytest.approx(kept[0] * 16 / 31)
    with pytest.raises(ValueError, match="offload_activations=True"):
        Plan(offload_layers=4)


# Other choices


def test_some_blocks_recompute() -> None:
    full = Plan(dp=8, recompute="full", zero_stage=1)
    rows = [
        estimate(LLAMA, replace(H100, nodes=1), replace(full, recompute_layers=n), LONG)
        for n in (1, 16, 32)
    ]
    kept = [row.peak.bytes_by_category["activations"] for row in rows]
    again = [row.time.recompute for row in rows]
    assert kept[0] > kept[1] > kept[2] and again[0] < again[1] < again[2]
    assert again[1] == pytest.approx(again[2] / 2)
    whole = estimate(LLAMA, replace(H100, nodes=1), full, LONG)
    assert rows[2].step_seconds == whole.step_seconds and rows[2].peak == whole.peak
    assert rows[0].hfu < rows[1].hfu < rows[2].hfu


def test_uneven_stages_by_hand() -> None:
    by_hand = Plan(pp=4, tp=2, partition=(7, 8, 9, 8))
    assert [stage.layers for stage in stages(LLAMA, by_hand)] == [7, 8, 9, 8]
    ends = [
        stage.layers for stage in stages(replace(LLAMA, layers=30), Plan(pp=4, partition="ends"))
    ]
    assert ends == [7, 8, 8, 7], "embedding and head count as a layer each"


def test_the_optimizer_in_backward_holds_no_gradients() -> None:
    plan, batch = Plan(dp=8), Batch(sequences=8, sequence_length=4096)
    plain, inside = (
        memory(LLAMA, replace(plan, optimizer_in_backward=v), batch)[0] for v in (False, True)
    )
    assert inside.bytes_by_category["gradients"] == 0
    assert plain.allocated_bytes - inside.allocated_bytes > 3.5 * LLAMA.parameter_count


def test_offloaded_activations_leave_two_blocks() -> None:
    plan, batch = Plan(dp=8, zero_stage=1), Batch(sequences=64, sequence_length=4096)
    plain, away = (
        estimate(LLAMA, replace(H100, nodes=1), replace(plan, offload_activations=v), batch)
        for v in (False, True)
    )
    kept = [row.peak.bytes_by_category["activations"] for row in (plain, away)]
    assert kept[1] == pytest.approx(kept[0] * 2 / 32)
    assert away.host_bytes == pytest.approx(8 * kept[0] * 30 / 32) and plain.host_bytes == 0
    assert away.step_seconds >= plain.step_seconds


def test_fused_and_chunked_losses_are_smaller() -> None:
    wide = replace(LLAMA, name="wide", layers=2, vocabulary=128_256)
    batch = Batch(sequences=64, sequence_length=8192)
    held = {
        loss: memory(wide, Plan(dp=8, loss=loss, micro_batch=4), batch)[0].allocated_bytes
        for loss in ("whole", "fused", "chunked")
    }
    assert held["chunked"] < held["whole"] and held["fused"] < held["whole"]


def test_hidden_collectives_are_shorter() -> None:
    plan = Plan(dp=8, tp=8, sequence_parallel=True)
    shown, hidden = (
        estimate(LLAMA, H100, replace(plan, overlap_tp=v), LONG) for v in (False, True)
    )
    assert 0 < hidden.time.tensor_parallel < shown.time.tensor_parallel


def test_heads_wider_than_the_residual_stream() -> None:
    """Qwen 3: 32 heads of 128 on a stream of 2,048."""
    qwen = model_shape("qwen3-30b-a3b")
    assert (qwen.head_dim, qwen.attention_width) == (128, 4096)
    narrow = replace(qwen, head_width=None)
    rows = [
        estimate(shape, H100, Plan(dp=64, ep=8, zero_stage=1), LONG) for shape in (narrow, qwen)
    ]
    assert rows[1].time.matmul > rows[0].time.matmul
    assert (
        rows[1].peak.bytes_by_category["activations"]
        > rows[0].peak.bytes_by_category["activations"]
    )


def test_embedding_and_head_count_as_layers_of_interleaved_stages() -> None:
    """Llama 3.1 405B has 126 layers so that 8 stages of 8 chunks hold 128 with its ends."""
    model = model_shape("llama-3.1-405b")
    plan = Plan(
        tp=8, pp=8, dp=16, virtual_stages=8, partition="ends", sequence_parallel=True, zero_stage=1
    )
    assert [stage.layers for stage in stages(model, plan)] == [15, 16, 16, 16, 16, 16, 16, 15]
    batch = Batch(sequences=128, sequence_length=4096)
    assert estimate(model, replace(H100, nodes=128), plan, batch).bubble < 0.2
    with pytest.raises(ValueError, match="64 and does not divide 126"):
        estimate(model, replace(H100, nodes=128), replace(plan, partition="even"), batch)


def test_a_space_that_divides_nothing_says_which_choice() -> None:
    one, batch = Cluster(gpu="H100", nodes=1), Batch(sequences=64, sequence_length=4096)
    with pytest.raises(ValueError, match=r"No ep of \(3,\) divides 8 experts"):
        search(MIXTRAL, one, batch, space=SearchSpace(ep=(3,)))
    with pytest.raises(ValueError, match=r"No cp of \(3,\) divides 4096 tokens"):
        search(LLAMA, one, batch, space=SearchSpace(cp=(3,)))
