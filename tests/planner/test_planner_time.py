"""Time of a plan: parts that must add up, effects that must have their sign, bad input."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from plan_cases import BATCH, BIG, GPT, NODE, PLANS, cluster_of, estimated

from utils.catalog import DEVICES, device, model_shape
from utils.planner import (
    Batch,
    Cluster,
    FailureRate,
    Lora,
    Plan,
    calibration,
    compare_plans,
    cost,
    estimate,
    explain,
    framework,
    goodput,
    memory,
    plan_name,
    search,
    step_time,
)
from utils.planner.adapters import adapter_parameters
from utils.planner.flops import hardware_flops, model_flops
from utils.planner.plan_context import ClusterPlanContext
from utils.planner.schedules import run_schedule, schedule_actions
from utils.planner.step_seconds.kernels import (
    ceiling_flops_per_second,
    flash_flops_per_second,
    matmul_seconds,
    memory_seconds,
    shape_efficiency,
    sustained_share,
)
from utils.planner.step_seconds.step_end import data_parallel_seconds
from utils.units import GB, Evidence

A100, H100 = device("A100-80GB"), device("H100")


def test_model_flops_are_korthikanti_appendix_a():
    b, s, layers, h, v = 64, 2048, GPT.layers, GPT.hidden, GPT.vocabulary
    formula = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops(GPT, BATCH) == pytest.approx(formula)
    full = hardware_flops(GPT, Plan(recompute="full"), BATCH)
    assert full == pytest.approx(
        96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    )


def test_the_175b_step_takes_what_table_5_says():
    plan = Plan(
        tp=8,
        pp=8,
        virtual_stages=3,
        sequence_parallel=True,
        recompute="selective",
        attention="unfused",
        dropout=True,
    )
    found = estimate(BIG, Cluster(gpu="A100-80GB", nodes=8), plan, BATCH)
    assert found.step_seconds == pytest.approx(13.75, rel=0.08)
    low, high = found.step_seconds_interval
    assert low < 13.75 < high


@settings(max_examples=60, deadline=None)
@given(plan=PLANS)
def test_properties_of_every_plan(plan):
    found = estimate(GPT, cluster_of(plan.ranks), plan, BATCH)
    assert min(vars(found.time).values()) >= 0
    assert found.step_seconds == pytest.approx(sum(vars(found.time).values()))
    ceiling = ceiling_flops_per_second(A100) / A100.peak_flops_per_second("bf16")
    assert 0 < found.mfu <= found.hfu <= ceiling
    assert found.evidence is Evidence.PREDICTED
    slower = replace(cluster_of(plan.ranks), network_bytes_per_second=20 * GB)
    assert step_time(GPT, slower, plan, BATCH).total >= found.step_seconds
    more = Batch(sequences=128, sequence_length=2048)
    assert step_time(GPT, cluster_of(plan.ranks), plan, more).total > found.step_seconds


def test_the_formula_of_a_pipeline_is_what_running_it_takes():
    """Equal stages: m * t + (p - 1) * t / v, from the parts and from the executed schedule."""
    for p, v, m in ((4, 1, 8), (4, 3, 8), (2, 4, 6)):
        forward, backward = 1.0, 2.0
        ran = run_schedule(schedule_actions("1f1b", p, m, v), forward / v, backward / v)
        work = forward + backward
        assert ran.total == pytest.approx((m * work) + (p * work - work) / v)


def test_recompute_costs_time_and_interleaving_saves_bubble():
    none, full = (estimated(tp=2, recompute=again) for again in ("none", "full"))
    assert 1.15 < full.step_seconds / none.step_seconds < 1.45
    plain, interleaved = estimated(pp=4), estimated(pp=4, virtual_stages=3)
    assert interleaved.time.pipeline < plain.time.pipeline
    assert interleaved.step_seconds < plain.step_seconds


def test_tensor_parallelism_is_dear_between_nodes():
    inside = estimated(BIG, tp=8, pp=8).time.tensor_parallel
    plan = Plan(tp=16, pp=4)
    one_port = replace(cluster_of(64), network_bytes_per_second=25 * GB, network_ports=1)
    across, slow = (
        estimate(BIG, c, plan, BATCH).time.tensor_parallel for c in (cluster_of(64), one_port)
    )
    blocks = 2  # times as many of them on a stage
    assert across > 1.3 * blocks * inside
    assert slow > 5 * blocks * inside


def test_tiles_and_waves():
    assert shape_efficiency(256 * 108, 128, 108) == 1.0
    assert shape_efficiency(256 * 109, 128, 108) < 0.75  # one tile too many: a second wave
    assert shape_efficiency(256 * 108, 129, 108) < shape_efficiency(256 * 108, 256, 108)


def test_odd_dimensions_leave_the_tensor_cores():
    even, odd = (matmul_seconds(A100, 4096, 4096, k) for k in (4096, 4098))
    assert odd > 5 * even
    assert matmul_seconds(H100, 4096, 4096, 4096) < even


def test_a_card_has_waves_of_its_own_multiprocessors() -> None:
    """Of tiles of 256 x 128: 72 fill an A10 once, 80 need two waves of it and one of a 3090's 82."""
    a10, rtx_3090 = device("A10"), device("RTX 3090")
    full, over = (9 * 256, 8 * 128, 8192), (10 * 256, 8 * 128, 8192)
    assert matmul_seconds(a10, *over) / matmul_seconds(a10, *full) > 1.4
    assert matmul_seconds(rtx_3090, *over) / matmul_seconds(rtx_3090, *full) < 1.02


def test_another_maker_s_device_gets_neither_hopper_s_share_nor_its_attention():
    """Its gfx number reads like a capability between Hopper's and Blackwell's."""
    mi300x = device("MI300X")
    assert sustained_share(mi300x) == pytest.approx((0.95 + 0.735 + 0.61) / 3)
    for generation in (2, 3, None):
        rate = flash_flops_per_second(mi300x, generation, 1e6)
        assert rate == pytest.approx(0.61 / 0.87 * 668.4e12, rel=1e-3)  # below its ceiling


@pytest.mark.parametrize("name", [n for n, row in DEVICES.items() if row.vendor == "NVIDIA"])
def test_the_capability_of_each_device_has_its_speeds(name):
    assert sustained_share(device(name)) > 0.5 and flash_flops_per_second(device(name), None, 1e6)


def test_a_card_of_blackwells_time_is_a_faster_ada():
    """Neither Blackwell's share nor its attention: both are of a data center's 1,000 watts."""
    ada = device("RTX 4090")
    card = replace(ada, name="RTX 5090", capability=(12, 0), bf16_tflops=1.27 * ada.bf16_tflops)
    assert sustained_share(card) == sustained_share(ada)
    faster = flash_flops_per_second(card, None, 1e6) / flash_flops_per_second(ada, None, 1e6)
    assert faster == pytest.approx(1.27)
    with pytest.raises(ValueError, match=r"GPU has compute capability 14.0, .* GENERATION_SHARES"):
        sustained_share(replace(ada, name="GPU", capability=(14, 0)))


def test_flash_attention_runs_at_the_rate_of_its_generation():
    """Kernels for Ampere do not use Hopper's units, those for Hopper and Blackwell do."""
    second, third = (flash_flops_per_second(H100, generation, 1e6) for generation in (2, 3))
    assert second == pytest.approx(0.61 * 0.62 * 989e12, rel=1e-3)
    assert third > 1.4 * second
    assert flash_flops_per_second(H100, None, 1e6) == third
    assert flash_flops_per_second(A100, 3, 1e6) == flash_flops_per_second(A100, 2, 1e6)
    assert flash_flops_per_second(A100, 1, 1e6) == pytest.approx(0.32 * 312e12, rel=1e-3)
    assert flash_flops_per_second(device("B200"), None, 1e6) > 1.8 * third
    assert flash_flops_per_second(H100, 2, 300) == pytest.approx(second / 2, rel=1e-3)


def test_backward_hides_tensor_parallel_collectives_where_the_framework_does():
    rules = framework("megatron")
    hidden, bare = (
        estimated(tp=8, micro_batch=4, framework=replace(rules, overlap_tensor=overlap)).time
        for overlap in (True, False)
    )
    assert hidden.tensor_parallel < 0.7 * bare.tensor_parallel


def test_hidden_collectives_still_cost_a_share(monkeypatch):
    plan, cluster = Plan(dp=64, zero_stage=1), cluster_of(64)
    context = ClusterPlanContext(GPT, plan, BATCH, cluster)
    hidden = sum(data_parallel_seconds(context, GPT.parameter_count))
    share = calibration.CONTENTION
    with_cost = step_time(GPT, cluster, plan, BATCH).data_parallel
    monkeypatch.setattr(calibration, "CONTENTION", 0.0)
    without = step_time(GPT, cluster, plan, BATCH).data_parallel
    assert 0.5 * share * hidden < with_cost - without <= share * hidden * (1 + 1e-9)


def test_the_host_waits_longer_where_stages_make_it_meet_the_device():
    """nanotron over several nodes: each rank of a tensor-parallel group adds its arrival."""
    model, batch = model_shape("llama-2-7b"), Batch(sequences=64, sequence_length=512)
    waits = {
        (tp, pp): step_time(
            model,
            Cluster(gpu="H100", nodes=2),
            Plan(dp=16 // tp // pp, tp=tp, pp=pp, framework="nanotron"),
            batch,
        ).launch
        for tp, pp in ((8, 1), (4, 2), (8, 2))
    }
    assert waits[8, 2] > 1.5 * waits[4, 2]
    assert waits[8, 2] > waits[8, 1]


def test_small_products_are_bound_by_memory():
    moved = 2 * (8 * 8192 + 8192 * 8192 + 8 * 8192)
    assert matmul_seconds(A100, 8, 8192, 8192) == pytest.approx(
        memory_seconds(A100, moved), rel=0.6
    )


def test_lora_saves_the_gradients_of_the_base():
    llama = model_shape("llama-2-7b")
    full = estimated(llama, framework="bf16")
    lora = estimated(llama, framework="bf16", lora=Lora())
    assert 0.6 < lora.step_seconds / full.step_seconds < 0.8


def test_offload_costs_time():
    on, off = estimated(dp=8, zero_stage=3), estimated(dp=8, zero_stage=3, offload="optimizer")
    streamed = estimated(dp=8, zero_stage=3, offload="parameters")
    assert on.step_seconds < off.step_seconds < streamed.step_seconds
    assert on.peak.allocated_bytes > off.peak.allocated_bytes > streamed.peak.allocated_bytes


def test_plans_side_by_side():
    rows = [estimated(tp=8, recompute="full"), estimated(tp=2, pp=4, virtual_stages=3)]
    table = compare_plans(rows).splitlines()
    assert len(table) == 3
    assert "dp1 tp8 pp1 b1 zero0 full" in table[1]
    assert plan_name(rows[1]) == "dp1 tp2 pp4 v3 b1 zero0 none"
    assert len({len(line) for line in table}) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: estimate(GPT, NODE, Plan(dp=4), BATCH), "the cluster has 8"),
        (lambda: estimate(GPT, NODE, Plan(tp=16), BATCH), "Lower tp, pp or cp"),
        (lambda: cost(estimated(dp=8), 0), "tokens is 0"),
        (lambda: FailureRate(low=5, high=2), "lower one first"),
        (lambda: goodput(NODE, checkpoint_seconds=0), "checkpoint_seconds"),
        (lambda: compare_plans([]), "one plan"),
    ],
)
def test_bad_input_is_refused_with_the_rule(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("name", ["megatron-7.5b", "Megatron 7.5B"])
def test_a_name_of_the_catalog_stands_for_the_shape(name):
    plan = Plan(dp=8, zero_stage=1, lora=None)
    assert estimate(name, NODE, plan, BATCH) == estimate(GPT, NODE, plan, BATCH)
    assert step_time(name, NODE, plan, BATCH) == step_time(GPT, NODE, plan, BATCH)
    assert memory(name, plan, BATCH) == memory(GPT, plan, BATCH)
    assert model_flops(name, BATCH) == model_flops(GPT, BATCH)
    assert hardware_flops(name, plan, BATCH) == hardware_flops(GPT, plan, BATCH)
    assert search(name, NODE, BATCH).best == search(GPT, NODE, BATCH).best
    assert adapter_parameters(name, Lora()) == adapter_parameters(GPT, Lora())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: estimate("lama-2-7b", NODE, Plan(dp=8), BATCH), "Nearest: llama-2-7b"),
        (lambda: estimate(7e9, NODE, Plan(dp=8), BATCH), "must be of type ModelShape or str"),
        (
            lambda: estimate(GPT, "A100-80GB", Plan(dp=8), BATCH),
            "cluster is .*must be of type Cluster",
        ),
        (lambda: estimate(GPT, Plan(dp=8), NODE, BATCH), "cluster is .*must be of type Cluster"),
        (lambda: search(GPT, NODE, 64), "batch is 64; it must be of type Batch"),
        (lambda: Plan(dp=8).check(GPT, 64), "batch is 64; it must be of type Batch"),
        (lambda: cost(Plan(dp=8), 1e9), "estimate is .*must be of type Estimate"),
        (lambda: cost(estimated(dp=8), math.nan), "tokens is nan"),
        (lambda: explain(Plan(dp=8)), "chosen is .*must be of type Estimate"),
        (lambda: goodput("H100"), "must be of type Cluster"),
        (lambda: goodput(NODE, restart_seconds=math.inf), "restart_seconds is inf"),
        (lambda: FailureRate(low="3"), "without quotes: 3"),
    ],
)
def test_what_is_of_another_kind_is_refused_with_a_sentence(make, words):
    with pytest.raises(ValueError, match=words):
        make()
