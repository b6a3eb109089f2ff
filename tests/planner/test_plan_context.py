"""One object from plan to table: who takes it, and what it hands on."""

import ast
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest

from utils import planner
from utils.catalog import model_shape
from utils.planner import Batch, Cluster, Plan
from utils.planner.plan_context import ClusterPlanContext

PLANNER = Path(planner.__file__).parent
# What a function can be handed; a context is the first four in one.
OBJECTS = {
    "ModelShape",
    "Cluster",
    "Plan",
    "Batch",
    "Stage",
    "PlanContext",
    "ClusterPlanContext",
    "SearchTask",
}
MOST = 2
# Public beside `planner.__all__`: lessons and evidence ask for them.
PUBLIC = {*planner.__all__, "block_time", "hardware_flops", "tensor_traffic"}


def _functions():
    for path in sorted(PLANNER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(PLANNER)}:{node.name}", node


def _objects(node):
    """Of the planner's objects, those that the function's parameters are annotated with."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    named = (
        {name.id for name in ast.walk(argument.annotation) if isinstance(name, ast.Name)}
        for argument in arguments
        if argument.annotation
    )
    return [sorted(names & OBJECTS)[0] for names in named if names & OBJECTS]


def test_no_private_function_takes_more_than_two_of_the_planners_objects():
    taken = {place: _objects(node) for place, node in _functions() if node.name not in PUBLIC}
    assert sum(map(len, taken.values())) > 100, "annotations are read"
    assert {place: what for place, what in taken.items() if len(what) > MOST} == {}


COMPUTED = [
    name
    for kind in ClusterPlanContext.__mro__
    for name, member in vars(kind).items()
    if isinstance(member, cached_property)
]


@pytest.mark.parametrize("name", COMPUTED)
def test_what_a_context_hands_on_depends_on_neither_zero_nor_offload(name):
    model, batch = model_shape("mixtral-8x7b"), Batch(sequences=64, sequence_length=4096)
    plan = Plan(dp=4, tp=2, pp=2, ep=2, expert_tp=1, recompute="full", micro_batch=2)
    context = ClusterPlanContext(model, plan, batch, Cluster(gpu="H100", nodes=2))
    other = {"zero_stage": 3, "offload": "parameters"}
    fresh = replace(context, plan=replace(plan, **other))
    handed = getattr(context, name)
    varied = context.varied(other)
    assert varied.plan == fresh.plan
    assert getattr(varied, name) is handed
    if name == "activations":
        assert (handed.kept, handed.working) == (fresh.activations.kept, fresh.activations.working)
    else:
        assert handed == getattr(fresh, name)
