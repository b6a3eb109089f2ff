"""The arithmetic of the link, and what was published beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evidence.validation.comparison import summarize
from evidence.validation.offload import comparisons, zero_offload_comparisons
from utils.catalog import model_shape
from utils.planner import Batch, Lora, Plan
from utils.planner.offload import SCHEMES, step_seconds
from utils.planner.plan_context import PlanContext
from utils.planner.stage_bytes.states import host_bytes, states
from utils.units import Category

LLAMA = model_shape("llama-2-7b")
BATCH = Batch(sequences=64, sequence_length=2048)


def _setup(plan: Plan) -> PlanContext:
    return PlanContext(LLAMA, plan, BATCH)


def test_states_are_whole() -> None:
    """Fp16 weights and gradients, master copies and moments: what leaves the card is on the host."""
    for scheme in SCHEMES.values():
        assert scheme.device_bytes + scheme.host_bytes >= 16, f"{scheme.name} loses states"


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_what_adapters_leave_the_card_is_on_the_host(offload: str) -> None:
    plan = Plan(framework="bf16", lora=Lora(), zero_stage=3)
    here, gone = _setup(plan), _setup(replace(plan, offload=offload))
    (stage,) = here.stages
    left = sum(states(here, stage).values()) - sum(states(gone, stage).values())
    assert host_bytes(gone, stage) == left > 0, f"{offload}: bytes are lost"
    assert host_bytes(here, stage) == 0, "without offload nothing is on the host"


def test_from_zero_2_on_gradients_leave_with_the_optimizer() -> None:
    """Two bytes a parameter stay, and sixteen lie on the host: the scheme "gradients, too"."""
    plan = Plan(framework="deepspeed", zero_stage=2, offload="optimizer")
    (stage,) = _setup(plan).stages
    held, scheme = states(_setup(plan), stage), SCHEMES["gradients, too"]
    assert sum(held.values()) == scheme.device_bytes * stage.parameters, "2 bytes stay"
    assert host_bytes(_setup(plan), stage) == scheme.host_bytes * stage.parameters, "16 on the host"
    first = replace(plan, zero_stage=1)
    assert states(_setup(first), stage)[Category.GRADIENTS] > 0, "ZeRO-1 keeps whole gradients"
    by_megatron = replace(plan, framework="megatron")
    assert states(_setup(by_megatron), stage)[Category.GRADIENTS] > 0, (
        "its buffer stays on the card"
    )


@pytest.mark.parametrize(
    ("name", "micro_batches", "down", "up"),
    [
        ("nothing leaves", 4, 0, 0),
        ("optimizer state", 4, 2, 2),
        ("gradients, too", 4, 8, 2),
        ("weights, too", 4, 8, 16),
        ("states to and fro", 1, 14, 12),
    ],
)
def test_bytes_over_the_link(name: str, micro_batches: int, down: float, up: float) -> None:
    assert SCHEMES[name].link_bytes(10.0, micro_batches) == (10 * down, 10 * up)


def test_a_step_of_parts() -> None:
    assert step_seconds(3.0, 1.0, 2.0, 0.5) == 3.5
    assert step_seconds(1.0, 4.0, 2.0) == 4.0
    assert step_seconds(1.0, 4.0, 2.0, 1.0, overlap=False) == 8.0


def test_published_runs_are_predicted_within_15_percent() -> None:
    found = summarize(comparisons())
    assert [row.rows for row in found] == [9, 5, 4]
    for row in found:
        assert row.mean <= 0.15, f"{row.source}: {row.mean:.1%} off on average"
        assert row.worst <= 0.25, f"{row.source}: {row.worst:.1%} off at worst"
    assert summarize(zero_offload_comparisons(overlap=True))[0].mean <= 0.15
