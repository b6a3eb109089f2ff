"""Memory of a plan: formulas of the papers, properties that must hold, and bad input."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import BATCH, GPT, LLAMA, PLANS

from utils.catalog import device, model_shape
from utils.planner import Batch, Cluster, Lora, Plan, estimate, framework, memory, worst
from utils.planner.activations import block_bytes
from utils.planner.adapters import adapter_parameters
from utils.planner.saved_tensors import saved_tensors
from utils.planner.stage_bytes.stage_memory import DOES_NOT_FIT, FITS, PREDICTED, TIGHT
from utils.planner.stage_bytes.states import buffer_bytes, state_bytes
from utils.planner.stages import block_parameters, padded_vocabulary, stages
from utils.units import GIB, Category

PAPER = {"attention": "unfused", "dropout": True}


def _peak(plan, model=GPT, batch=BATCH):
    return worst(memory(model, plan, batch)).allocated_bytes


def test_a_fused_matrix_of_adapters_keeps_what_its_values_are_a_view_of():
    """litgpt's one matrix for q, k and v: counted on its own block with saved_tensors_hooks."""
    lora = Lora(targets=("q", "v"), adapter_bytes=2, adapter_dropout=True, fused=True)
    plain, fused = (
        Plan(framework="litgpt", lora=replace(lora, fused=how)) for how in (False, True)
    )
    more = block_bytes(LLAMA, fused, 1000, "none") - block_bytes(LLAMA, plain, 1000, "none")
    inputs = -(2 + 1) * LLAMA.hidden  # q and v share theirs, and its mask
    assert more == 1000 * (8 * LLAMA.hidden + inputs)
    every = replace(fused, lora=replace(lora, fused=True, targets=("q", "k", "v")))
    names = {row.name: row.bytes_per_token for row in saved_tensors(LLAMA, every, 1000)}
    assert names["adapters' updates before zeros"] == 0


def test_a_parallel_residual_keeps_one_input_for_both_norms():
    together = replace(GPT, name="parallel", parallel_residual=True)
    kept, less = (block_bytes(model, Plan(), 1000, "none") for model in (GPT, together))
    assert kept - less == 1000 * 2 * GPT.hidden


def test_gaps_take_no_more_than_the_device_has():
    row = worst(memory(GPT, Plan(dp=8, micro_batch=2), BATCH))
    small = replace(device("A100-80GB"), memory_bytes=int(row.needed_bytes + 1))
    assert row.allocated_bytes < row.reserved_on(device("B300")) == row.reserved_bytes
    assert row.reserved_on(small) == pytest.approx(row.allocated_bytes + 1)
    assert row.reserved_on(device("T4")) == row.allocated_bytes


@pytest.mark.parametrize("t", [1, 2, 8])
def test_activations_are_equations_1_2_and_4_of_korthikanti(t):
    s, b, h, a = 2048, 4, GPT.hidden, GPT.heads
    plan = Plan(tp=t, micro_batch=b, **PAPER)
    scores = 5 * a * s / (h * t)
    assert block_bytes(GPT, plan, s, "none") == pytest.approx(s * b * h * (10 + 24 / t + scores))
    if t > 1:
        both = replace(plan, sequence_parallel=True)
        assert block_bytes(GPT, both, s, "none") == pytest.approx(s * b * h * (34 / t + scores))
        assert block_bytes(GPT, both, s, "selective") == pytest.approx(s * b * h * 34 / t)
    assert block_bytes(GPT, plan, s, "full") == 2 * s * b * h


@pytest.mark.parametrize(
    ("dp", "cp", "buffers"), [(1, 1, 0.0), (2, 1, 2e9), (1, 2, 2e9), (2, 2, 2e9)]
)
def test_two_ranks_that_share_gradients_have_buffers(dp: int, cp: int, buffers: float):
    plan, model = Plan(dp=dp, cp=cp, framework="deepspeed"), model_shape("llama-2-7b")
    assert buffer_bytes(plan, stages(model, plan)[0]) == buffers


def test_a_llama_block_by_hand():
    model = model_shape("llama-3-8b")
    h, f, kv, a = 4096, 14_336, 1024, 32
    by_hand = 4 * h + 4 * h + 2 * h + 2 * h + 4 * kv + 4 * f + 2 * f + 4 * a
    assert block_bytes(model, Plan(), 1000, "none") == 1000 * by_hand


def test_the_175b_model_on_64_gpus_holds_what_figure_1_shows():
    plan = Plan(
        tp=8, pp=8, virtual_stages=3, sequence_parallel=True, recompute="selective", **PAPER
    )
    first = memory(model_shape("megatron-175b"), plan, BATCH)[0]
    assert first.bytes_by_category["activations"] / GIB == pytest.approx(12.35, abs=0.01)
    # The figure divides all parameters by all ranks; the first stage has the embedding besides.
    assert 45.6 < first.state_bytes / GIB < 48


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["megatron", "nanotron", "fsdp", "deepspeed", "fp32"])
def test_zero_on_one_rank_holds_what_no_zero_holds(stage, name):
    plain = Plan(framework=name)
    assert memory(GPT, replace(plain, zero_stage=stage), BATCH) == memory(GPT, plain, BATCH)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_does_not_move_activations(stage):
    held = memory(GPT, Plan(dp=8, zero_stage=stage), BATCH)[0].bytes_by_category
    assert held["activations"] == memory(GPT, Plan(dp=8), BATCH)[0].bytes_by_category["activations"]


def test_zero_stages_shard_what_the_paper_says():
    rules = framework("zero-paper")
    total = {k: sum(state_bytes(1e9, rules, k, 16).values()) for k in range(4)}
    assert total == {0: 16e9, 1: 4e9 + 12e9 / 16, 2: 2e9 + 14e9 / 16, 3: 16e9 / 16}


def test_hsdp_shards_over_its_group_alone():
    whole = Plan(dp=16, zero_stage=3, framework="fsdp")
    inside = replace(whole, shard_ranks=8)
    ratio = memory(GPT, inside, BATCH)[0].state_bytes / memory(GPT, whole, BATCH)[0].state_bytes
    assert ratio == pytest.approx(2)


def test_zero_3_pays_for_gathered_blocks():
    held = memory(GPT, Plan(dp=64, zero_stage=3, framework="fsdp"), BATCH)[0].bytes_by_category
    assert held["gathered parameters"] >= 2 * 2 * block_parameters(GPT, 1)
    assert held["gathered parameters"] > held["parameters"]


@settings(max_examples=60, deadline=None)
@given(plan=PLANS, model=st.sampled_from([GPT, LLAMA]))
def test_properties_of_every_plan(plan, model):
    rows = memory(model, plan, BATCH)
    for row in rows:
        assert set(row.bytes_by_category) == set(PREDICTED)
        assert min(row.bytes_by_category.values()) >= 0
        assert row.state_bytes <= row.lasting_bytes <= row.allocated_bytes
        assert row.allocated_bytes <= row.reserved_bytes < row.device_bytes
    assert sum(row.stage.layers for row in rows) == model.layers
    peak = worst(rows).allocated_bytes
    larger = replace(plan, micro_batch=2 * plan.micro_batch)  # as many micro-batches, each larger
    assert _peak(larger, model, Batch(sequences=128, sequence_length=2048)) >= peak
    longer = Batch(sequences=64, sequence_length=4096)
    assert _peak(plan, model, longer) >= peak
    assert _peak(replace(plan, recompute="full"), model) <= _peak(
        replace(plan, recompute="none"), model
    )
    assert _peak(replace(plan, offload="optimizer"), model) <= peak


def test_recompute_keeps_less():
    sizes = [block_bytes(GPT, Plan(**PAPER), 2048, name) for name in ("none", "selective", "full")]
    assert sizes == sorted(sizes, reverse=True)


def test_every_parameter_is_on_some_rank():
    """Without replication the ranks' shares add up to the model, padded vocabulary included."""
    model = replace(LLAMA, vocabulary=32_000)
    plan = Plan(pp=4, framework=replace(framework("megatron"), vocabulary_multiple=1))
    held = sum(stage.parameters for stage in stages(model, plan))
    assert held == model.parameter_count


def test_a_tied_head_is_a_second_copy_on_the_last_stage():
    one, two = stages(GPT, Plan()), stages(GPT, Plan(pp=2))
    table = padded_vocabulary(GPT, Plan()) * GPT.hidden
    assert one[0].head_parameters == GPT.norm_parameters
    assert two[1].head_parameters == table + GPT.norm_parameters


def test_the_vocabulary_is_padded_for_tensor_parallelism():
    gpt2 = model_shape("gpt2-1.5b")
    assert padded_vocabulary(gpt2, Plan()) == 50_304
    assert padded_vocabulary(gpt2, Plan(tp=8)) == 51_200


def test_key_value_heads_are_copied_where_they_are_fewer_than_ranks():
    model = model_shape("llama-3-70b")  # 8 key-value heads of 128
    copied = 2 * model.hidden * 128 * 8 / 16
    share = (block_parameters(model, 8) - 2 * model.hidden) / 2
    assert block_parameters(model, 16) - 2 * model.hidden == pytest.approx(share + copied)


def test_partitions():
    model = replace(GPT, layers=10)
    layers = {
        name: [s.layers for s in stages(model, Plan(pp=4, partition=name))]
        for name in ("even", "ends")
    }
    assert layers == {"even": [3, 3, 2, 2], "ends": [2, 3, 3, 2]}
    nanotron = replace(
        LLAMA, layers=16, hidden=2048, heads=32, feedforward=8192, vocabulary=131_072, tied=True
    )
    placed = stages(nanotron, Plan(pp=4, partition="compute"))
    assert [s.layers for s in placed] == [5, 5, 5, 1]


def test_frozen_matrices_keep_no_inputs():
    names = {t.name for t in saved_tensors(LLAMA, Plan(framework="bf16", lora=Lora()), 1024)}
    full = {t.name for t in saved_tensors(LLAMA, Plan(framework="bf16"), 1024)}
    assert full - names == {
        "norm 1 normalized",
        "norm 2 normalized",
        "q, k, v input",
        "feed-forward input",
        "gated product",
    }
    assert names - full == {"adapter inputs", "adapter dropout masks", "adapter inner"}
    old = Lora(base="nf4", keeps_inputs=True)
    kept = {t.name for t in saved_tensors(LLAMA, Plan(framework="bf16", lora=old), 1024)}
    assert full - kept == {"norm 1 normalized", "norm 2 normalized"}


def test_lora_trains_little_and_qlora_stores_little():
    lora = Lora(rank=8)
    assert adapter_parameters(LLAMA, lora) == 32 * 2 * 8 * 2 * 4096
    batch = Batch(sequences=1, sequence_length=512)
    held = {
        base: memory(LLAMA, Plan(framework="bf16", lora=replace(lora, base=base)), batch)[0]
        for base in ("bf16", "nf4", "nf4-dq")
    }
    states = {base: row.bytes_by_category["parameters"] / 1e9 for base, row in held.items()}
    assert 13.4 < states["bf16"] < 13.6
    assert 3.8 < states["nf4-dq"] < states["nf4"] < 4.3
    full = memory(LLAMA, Plan(framework="bf16"), batch)[0]
    assert held["bf16"].allocated_bytes < full.allocated_bytes / 2


def test_no_gradient_is_held_in_forward_with_one_micro_batch():
    """Freed after the step: the peak of a long sequence holds none, that of two micro-batches all."""
    batch = Batch(sequences=4, sequence_length=4096)
    one = memory(LLAMA, Plan(micro_batch=4, framework="bf16"), batch)[0]
    two = memory(LLAMA, Plan(micro_batch=2, framework="bf16"), batch)[0]
    assert one.phase == "forward"
    assert one.bytes_by_category[Category.GRADIENTS] == 0
    assert two.bytes_by_category[Category.GRADIENTS] == pytest.approx(2 * LLAMA.parameter_count)
    kept = memory(LLAMA, Plan(micro_batch=4), batch)[0]
    assert kept.bytes_by_category[Category.GRADIENTS] > 0


def test_a_short_step_peaks_in_the_optimizer_with_its_temporaries():
    """Parameters, gradients, two moments and AdamW's square roots, two bytes each."""
    batch = Batch(sequences=1, sequence_length=128)
    held = memory(LLAMA, Plan(framework="bf16", recompute="full"), batch)[0]
    assert held.phase == "step"
    states = held.allocated_bytes - held.bytes_by_category[Category.WORKSPACES]
    assert states == pytest.approx(10 * LLAMA.parameter_count)


def test_an_offloaded_optimizer_steps_on_the_host():
    batch = Batch(sequences=1, sequence_length=128)
    plan = Plan(framework="fsdp", recompute="full")
    on, off = (
        memory(LLAMA, replace(plan, offload=where), batch)[0].allocated_bytes
        for where in ("none", "optimizer")
    )
    assert on - off > 11 * LLAMA.parameter_count  # two moments and their square roots


def test_fsdp_gathers_nothing_while_the_optimizer_steps():
    batch = Batch(sequences=8, sequence_length=128)
    held = memory(LLAMA, Plan(dp=8, zero_stage=3, framework="fsdp", recompute="full"), batch)[0]
    assert held.phase == "step"
    assert held.bytes_by_category[Category.GATHERED] == 0


def test_transformer_engine_keeps_one_stand_in_for_each_shape():
    rules = framework("megatron")
    with_it, without = (
        memory(LLAMA, Plan(framework=replace(rules, dummy_gradients=keeps)), BATCH)[
            0
        ].bytes_by_category[Category.WORKSPACES]
        for keeps in (True, False)
    )
    h, f = LLAMA.hidden, LLAMA.feedforward
    shapes = h * 3 * h + h * h + h * 2 * f + f * h
    assert with_it - without == pytest.approx(2 * shapes)


def test_a_plan_within_the_allocators_reach_has_a_verdict_of_its_own():
    held = memory(LLAMA, Plan(micro_batch=4), Batch(sequences=4, sequence_length=4096))[0]
    gpu = device("A100-80GB")
    sizes = {
        FITS: held.device_bytes / 0.94,
        TIGHT: held.device_bytes / 0.96,
        DOES_NOT_FIT: held.needed_bytes - 1,
    }
    for verdict, size in sizes.items():
        assert held.verdict(replace(gpu, memory_bytes=int(size))) == verdict
    assert held.verdict(replace(gpu, memory_bytes=int(sizes[TIGHT])), headroom=0.03) == FITS
    for size, tight in ((sizes[FITS], False), (sizes[TIGHT], True)):
        cluster = Cluster(gpu=replace(gpu, memory_bytes=int(size)), nodes=1, gpus_per_node=1)
        found = estimate(
            LLAMA, cluster, Plan(micro_batch=4), Batch(sequences=4, sequence_length=4096)
        )
        assert (found.tight, found.verdict) == (tight, TIGHT if tight else FITS)
    with pytest.raises(ValueError, match="headroom is 5; it is the share"):
        held.verdict(gpu, headroom=5)
