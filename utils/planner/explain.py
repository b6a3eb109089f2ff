"""Why a plan and not its neighbour: one choice changed, and what that breaks, costs or gains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from utils.catalog.rules import of_kind
from utils.planner.estimate import Estimate, estimate
from utils.planner.layout import Plan
from utils.planner.memory import StageMemory
from utils.units import Category, format_bytes, format_seconds

# What each part of a step's time is called in a sentence.
PART_NAMES = {
    "matmul": "matrix products", "memory": "kernels that move data", "recompute": "recomputation",
    "tensor_parallel": "collectives inside blocks", "launch": "launching kernels",
    "pipeline": "the pipeline's bubble and sends", "data_parallel": "data-parallel collectives",
    "optimizer": "the optimizer step",
}  # fmt: skip

SAME = 1e-4  # relative difference of step times that nobody could measure


@dataclass(frozen=True)
class Neighbour:
    """A plan that differs from another in one choice.

    Attributes:
        change: The choice, in words: "tp 8 -> 16".
        plan: The changed plan; None where no such plan can even be written down.
        estimate: Its estimate; None where plan, model, batch and cluster do not divide.
        verdict: "invalid", "does not fit", "slower", "no difference" or "faster".
        reason: Why, in one sentence.
    """

    change: str
    plan: Plan | None
    estimate: Estimate | None
    verdict: str
    reason: str


def explain(chosen: Estimate) -> list[Neighbour]:
    """Every neighbour of a plan and why it loses, fastest of those that fit first.

    Raises:
        ValueError: `chosen` is no estimate.
    """
    of_kind("explain", chosen=(chosen, Estimate))
    order = {"faster": 0, "slower": 1, "no difference": 2, "does not fit": 3, "invalid": 4}
    found = [_judge(chosen, change, fields) for change, fields in _changes(chosen)]

    def rank(row: Neighbour) -> tuple[int, float]:
        return order[row.verdict], row.estimate.step_seconds if row.estimate else 0.0

    return sorted(found, key=rank)


def one_change_that_fits(rejected: Estimate) -> Neighbour | None:
    """The fastest plan that fits and is one choice away; None where no single choice is enough."""
    fitting = (row for row in explain(rejected) if row.estimate and row.estimate.fits)
    return min(fitting, key=lambda row: row.estimate.step_seconds, default=None)  # type: ignore[union-attr]


def why_it_does_not_fit(rejected: Estimate) -> str:
    """Which stage overflows by how much, and which category holds most there."""
    if rejected.fits:
        return "It fits."
    peak = rejected.peak
    name, size = largest_category(peak)
    return (
        f"Stage {peak.stage.index} of {rejected.plan.pp} needs {format_bytes(peak.needed_bytes)} "
        f"and lacks {format_bytes(rejected.missing_bytes)}; most of it is {name}, "
        f"{format_bytes(size)}, in the {peak.phase} phase."
    )


def largest_category(row: StageMemory) -> tuple[Category, float]:
    """The category that holds most, and its bytes."""
    return max(row.bytes_by_category.items(), key=lambda item: item[1])


def why_it_is_slower(chosen: Estimate, other: Estimate) -> str:
    """The part of the step that grew most."""
    mine, theirs = vars(chosen.time), vars(other.time)
    part = max(mine, key=lambda name: theirs[name] - mine[name])
    share = other.step_seconds / chosen.step_seconds - 1
    now, before = format_seconds(theirs[part]), format_seconds(mine[part])
    return (
        f"{format_seconds(other.step_seconds)} a step, {share:+.1%}; most of it "
        f"{PART_NAMES[part]}, {now} instead of {before}.{_slow_link(other)}"
    )


def _slow_link(other: Estimate) -> str:
    per_node = other.cluster.gpus_per_node
    if other.plan.tp <= per_node:
        return ""
    return f" Tensor parallelism of {other.plan.tp} leaves the node of {per_node} GPUs."


def _judge(chosen: Estimate, change: str, fields: dict[str, Any]) -> Neighbour:
    plan = None
    try:
        plan = replace(chosen.plan, **fields)
        found = estimate(chosen.model, chosen.cluster, plan, chosen.batch)
    except ValueError as refusal:
        return Neighbour(change, plan, None, "invalid", str(refusal))
    if not found.fits:
        return Neighbour(change, plan, found, "does not fit", why_it_does_not_fit(found))
    if abs(found.step_seconds / chosen.step_seconds - 1) < SAME:
        return Neighbour(change, plan, found, "no difference", "The step takes as long.")
    if found.step_seconds > chosen.step_seconds:
        return Neighbour(change, plan, found, "slower", why_it_is_slower(chosen, found))
    share = 1 - found.step_seconds / chosen.step_seconds
    reason = f"{format_seconds(found.step_seconds)} a step, {share:.1%} less."
    return Neighbour(change, plan, found, "faster", reason)


def _changes(chosen: Estimate) -> Iterator[tuple[str, dict[str, Any]]]:
    plan = chosen.plan
    for name in ("tp", "pp", "cp"):
        for value in _doubled_and_halved(getattr(plan, name)):
            fields = _with_dp(chosen, {name: value})
            yield f"{name} {getattr(plan, name)} -> {value}, dp {fields['dp']}", fields
    for name in ("micro_batch", "virtual_stages"):
        for value in _doubled_and_halved(getattr(plan, name)):
            yield f"{name} {getattr(plan, name)} -> {value}", {name: value}
    choices = {
        "recompute": ("none", "selective", "full"), "zero_stage": (0, 1, 2, 3),
        "offload": ("none", "optimizer"), "sequence_parallel": (False, True),
    }  # fmt: skip
    for name, values in choices.items():
        for value in values:
            if value != getattr(plan, name):
                yield f"{name} {getattr(plan, name)} -> {value}", {name: value}


def _doubled_and_halved(value: int) -> list[int]:
    return [2 * value] + ([value // 2] if value % 2 == 0 else [])


def _with_dp(chosen: Estimate, fields: dict[str, Any]) -> dict[str, Any]:
    """With the dp that keeps the plan on all GPUs, and sequence parallelism where tp allows it."""
    sizes = {name: fields.get(name, getattr(chosen.plan, name)) for name in ("tp", "pp", "cp")}
    dp = max(1, chosen.cluster.gpus // (sizes["tp"] * sizes["pp"] * sizes["cp"]))
    fields = fields | {"dp": dp, "sequence_parallel": sizes["tp"] > 1}
    if sizes["pp"] == 1:
        fields["virtual_stages"] = 1
    return fields
