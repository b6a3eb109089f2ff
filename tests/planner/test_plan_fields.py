"""What is computed once for many plans depends on no field of a plan that was left out of its key."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace

import pytest

from utils.catalog import model_shape
from utils.planner import Batch, Cluster, Lora, Plan, SearchSpace, candidates
from utils.planner.activations import NEUTRAL as NOT_OF_A_TOKEN
from utils.planner.activations import _per_token
from utils.planner.plan_context import ClusterPlanContext
from utils.planner.plan_search.bounds import alike, same_states
from utils.planner.stage_bytes.states import states
from utils.planner.stages import NEUTRAL as NOT_OF_A_STAGE
from utils.planner.stages import _walked
from utils.planner.step_seconds.block_time import block_times

MODEL, BATCH = model_shape("mixtral-8x7b"), Batch(sequences=64, sequence_length=4096)
BASE = Plan(dp=8, tp=2, pp=2, framework="fsdp")
# A second value of each field: a new one has to be given here, and so has to be thought of.
OTHER = {
    "dp": 4, "tp": 4, "pp": 4, "cp": 2, "ep": 2, "expert_tp": 1, "micro_batch": 2,
    "virtual_stages": 2, "schedule": "gpipe", "partition": "ends", "zero_stage": 3,
    "shard_ranks": 4, "sequence_parallel": True, "recompute": "full", "recompute_layers": 1,
    "attention": "unfused",
    "dropout": True, "framework": "megatron", "offload": "optimizer",
    "offload_activations": True, "offload_layers": 1, "precision": "fp8", "loss": "fused",
    "optimizer_in_backward": True, "overlap_tp": True, "lora": Lora(rank=8),
}  # fmt: skip


def test_every_field_has_a_second_value_here() -> None:
    named = {field.name for field in fields(Plan)}
    assert named == set(OTHER), (
        "give OTHER a value of the new field, and look where a plan stands for many: NEUTRAL in "
        "activations.py and stages.py, alike and same_states in plan_search/bounds.py"
    )


@pytest.mark.parametrize("name", ["FSDP", "Fsdp", "fsdp"])
def test_a_framework_is_found_in_any_case(name: str) -> None:
    assert Plan(dp=8, framework=name) == Plan(dp=8, framework="fsdp")


def _changed(name: str) -> Plan:
    """The base with the other value of one field, past the rules of what goes together."""
    plan = replace(BASE)
    object.__setattr__(plan, name, OTHER[name])
    return plan


@pytest.mark.parametrize("name", sorted(NOT_OF_A_TOKEN))
def test_a_token_s_tensors_do_not_depend_on_it(name: str) -> None:
    kept = [_per_token.__wrapped__(MODEL, p, 4096, False, True) for p in (BASE, _changed(name))]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", sorted(NOT_OF_A_STAGE))
def test_stages_do_not_depend_on_it(name: str) -> None:
    assert _walked.__wrapped__(MODEL, _changed(name)) == _walked.__wrapped__(MODEL, BASE)


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_plans_of_one_key_have_the_same_seconds_of_a_block_and_the_same_states(model: str) -> None:
    """Over every plan that a wide search tries: what `Exact within N plans` stands on."""
    shape, cluster = model_shape(model), Cluster(gpu="H100", nodes=2)
    space = SearchSpace(
        recompute_layers=(None, 1), partitions=("even", "ends"), offload=("none", "optimizer"),
        precision=("bf16", "fp8"), cp=(1, 2), framework="fsdp", largest_micro_batch=4,
    )  # fmt: skip
    seconds, bytes_held = defaultdict(set), defaultdict(set)
    plans = list(candidates(shape, cluster, BATCH, space))
    for plan in plans[:: max(1, len(plans) // 1500)]:
        context = ClusterPlanContext(shape, plan, BATCH, cluster)
        seconds[alike(plan)].add(block_times(context))
        held = tuple(tuple(states(context, stage).items()) for stage in context.stages)
        bytes_held[(plan.dp, same_states(shape, plan))].add(held)
    assert max(map(len, seconds.values())) == 1
    assert max(map(len, bytes_held.values())) == 1
    assert len(plans) > 1000
