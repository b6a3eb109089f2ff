"""Plans that cannot be exported, and fields that would carry code into a script."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, replace

import pytest
from export_cases import DEEP, TINY

from utils.catalog import Device, Link, ModelShape, device
from utils.planner import (
    FRAMEWORKS,
    Batch,
    Cluster,
    Framework,
    Lora,
    Plan,
    SearchSpace,
    export,
)

BAD = [
    (Plan(dp=2), "the cluster has 4. With the same tp, pp and cp, dp is 4"),
    (Plan(pp=3), "Take tp * pp * cp that divides 4: 2 or 4"),
    (Plan(tp=3), "tp is 3 and does not divide 4"),
    (Plan(dp=4, micro_batch=3), "does not divide 16"),
    (Plan(pp=5), "Largest pp: 4"),
    (Plan(pp=3, virtual_stages=3), "Largest pp * virtual_stages: 4"),
]


@pytest.mark.parametrize(("plan", "message"), BAD)
def test_bad_plans_are_refused_as_the_planner_does(plan, message):
    cluster = Cluster(gpu="A100-80GB", nodes=1, gpus_per_node=4)
    with pytest.raises(ValueError, match=re.escape(message)):
        export(DEEP, cluster, plan, Batch(sequences=16, sequence_length=16))


EVIL = 'False, x=__import__("os").system("touch injected")'
TRUTHS = [
    (Plan, {}, "offload_activations"),
    (Plan, {"tp": 2}, "sequence_parallel"),
    (Plan, {}, "dropout"),
    (Lora, {}, "quantized_head"),
    (Lora, {}, "keeps_inputs"),
    (SearchSpace, {}, "overlap_tp"),
]


@pytest.mark.parametrize("kind", [ModelShape, Cluster, Plan, Batch, Lora, Framework, Device, Link])
def test_no_field_carries_code_into_the_script(kind: type) -> None:
    """A text where a number belongs is refused where the row is made; a name stays a name."""
    plan = Plan(framework=FRAMEWORKS["fp32"], lora=Lora())
    cluster = Cluster(gpu=device("A100-80GB"), nodes=1)
    batch = Batch(sequences=16, sequence_length=16)
    rows = [
        TINY,
        cluster,
        plan,
        batch,
        plan.lora,
        plan.framework,
        cluster.gpu,
        device("T4").host_link,
    ]
    row = next(row for row in rows if type(row) is kind)
    for field in fields(kind):
        try:
            changed = replace(row, **{field.name: EVIL})
        except ValueError:
            continue
        assert field.type == "str"
        model = changed if isinstance(changed, ModelShape) else TINY
        found = export(model, replace(cluster, nodes=1, gpus_per_node=1), Plan(), batch)
        names = {
            node.id
            for node in ast.walk(ast.parse(found.python or ""))
            if isinstance(node, ast.Name)
        }
        assert names and "__import__" not in names


def test_a_script_takes_plain_numbers_even_from_a_row_that_nobody_checked() -> None:
    model = replace(TINY)
    object.__setattr__(model, "tied", EVIL)
    cluster, batch = (
        Cluster(gpu="A100-80GB", nodes=1, gpus_per_node=1),
        Batch(sequences=1, sequence_length=8),
    )
    with pytest.raises(ValueError, match="tied is .*plain numbers alone"):
        export(model, cluster, Plan(), batch)


@pytest.mark.parametrize(("kind", "others", "field"), TRUTHS)
def test_a_truth_value_is_no_text(kind: type, others: dict[str, int], field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 'False'; it must be True or False"):
        kind(**others, **{field: "False"})


@pytest.mark.parametrize("field", ["adapter_bytes", "rank"])
def test_adapters_take_room(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is -1000000000; it must be 1 or more"):
        Lora(**{field: -1e9})  # type: ignore[arg-type]


def test_conventions_and_devices_have_no_negative_sizes() -> None:
    with pytest.raises(ValueError, match="gradient_bytes is -4; it must be 0 or more"):
        replace(FRAMEWORKS["megatron"], gradient_bytes=-4)
    with pytest.raises(ValueError, match="memory_bytes is -1; it must be above 0"):
        replace(device("T4"), memory_bytes=-1)
