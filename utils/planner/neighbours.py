"""Why a plan and not its neighbour: one choice changed, and what that breaks, costs or gains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from utils.planner.layout import Plan
from utils.planner.plan_estimate import Estimate, estimate
from utils.planner.plan_search.candidate_plans import candidates
from utils.planner.plan_search.choice import ERROR, Complexity, complexity
from utils.planner.plan_search.space import SearchSpace
from utils.planner.stage_bytes.stage_memory import StageMemory
from utils.rules import of_kind
from utils.units import Category, format_bytes, format_seconds

# What each part of a step's time is called in a sentence.
PART_NAMES = {
    "matmul": "matrix products",
    "memory": "kernels that move data",
    "recompute": "recomputation",
    "tensor_parallel": "collectives inside blocks",
    "launch": "launching kernels",
    "pipeline": "the pipeline's bubble and sends",
    "data_parallel": "data-parallel collectives",
    "optimizer": "the optimizer step",
}

SAME = 1e-4  # relative difference of step times that nobody could measure


@dataclass(frozen=True)
class Neighbour:
    """A plan that differs from another in one choice.

    Attributes:
        change: The choice, in words: "tp 8 -> 16".
        plan: The changed plan; None where no such plan can even be written down.
        estimate: Its estimate; None where plan, model, batch and cluster do not divide.
        verdict: "invalid", "does not fit", "slower", "no difference", "within the error" (faster or
            slower by less than the planner can tell) or "faster"; "outside the space" where it is
            faster and the search was not asked to try it; "too tight" where it is faster and within
            the allocator's reach of the limit.
        reason: Why, in one sentence.
    """

    change: str
    plan: Plan | None
    estimate: Estimate | None
    verdict: str
    reason: str


def explain(chosen: Estimate, space: SearchSpace | None = None) -> list[Neighbour]:
    """Every neighbour of a plan and why it loses, fastest of those that fit first.

    Args:
        chosen: The plan.
        space: What was searched; None for the default with the plan's framework and attention.

    Raises:
        ValueError: `chosen` is no estimate.
    """
    of_kind("explain", chosen=(chosen, Estimate))
    order = {
        "faster": 0,
        "outside the space": 1,
        "within the error": 2,
        "slower": 3,
        "no difference": 4,
        "too tight": 5,
        "does not fit": 6,
        "invalid": 7,
    }
    searched = space or SearchSpace(
        framework=chosen.plan.framework, attention=chosen.plan.attention
    )
    found = [_judge(chosen, change, fields, searched) for change, fields in _changes(chosen)]

    def rank(row: Neighbour) -> tuple[int, float]:
        return order[row.verdict], row.estimate.step_seconds if row.estimate else 0.0

    return sorted(found, key=rank)


def one_change_that_fits(rejected: Estimate) -> Neighbour | None:
    """The plan to take that is one choice away; None where no single choice is enough.

    As in a search: with headroom where there is such a plan, and of those within the planner's
    error of the fastest the simplest.
    """
    fitting = [row for row in explain(rejected) if row.estimate and row.estimate.fits]
    roomy = [row for row in fitting if row.estimate and not row.estimate.tight]
    among = roomy or fitting
    if not among:
        return None
    limit = (1 + ERROR) * min(_seconds(row) for row in among)
    near = [row for row in among if _seconds(row) <= limit]
    return min(near, key=lambda row: (_complexity(row), _seconds(row)))


def _seconds(row: Neighbour) -> float:
    assert row.estimate is not None
    return row.estimate.step_seconds


def _complexity(row: Neighbour) -> Complexity:
    assert row.plan is not None
    return complexity(row.plan)


def why_it_does_not_fit(rejected: Estimate) -> str:
    """Which stage overflows by how much, and which category holds most there."""
    if rejected.tight and rejected.fits:
        return (
            f"It fits, with {format_bytes(rejected.peak.needed_bytes)} of "
            f"{format_bytes(rejected.cluster.device.memory_bytes)}, but only within the allocator's "
            "reach: with the gaps between blocks it fills the card, and runs several times slower."
        )
    if rejected.fits:
        return "It fits."
    peak = rejected.peak
    name, size = largest_category(peak)
    return (
        f"Stage {peak.stage.index} of {rejected.plan.pp} needs {format_bytes(peak.needed_bytes)} "
        f"and lacks {format_bytes(rejected.missing_bytes)}; the largest part is {name}, "
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


def _judge(chosen: Estimate, change: str, fields: dict[str, Any], space: SearchSpace) -> Neighbour:
    plan = None
    try:
        plan = replace(chosen.plan, **fields)
        found = estimate(chosen.model, chosen.cluster, plan, chosen.batch)
    except ValueError as refusal:
        return Neighbour(change, plan, None, "invalid", str(refusal))
    if not found.fits:
        return Neighbour(change, plan, found, "does not fit", why_it_does_not_fit(found))
    share = found.step_seconds / chosen.step_seconds - 1
    if abs(share) < SAME:
        return Neighbour(change, plan, found, "no difference", "The step takes as long.")
    if abs(share) <= ERROR:
        reason = f"{format_seconds(found.step_seconds)} a step, {share:+.1%}: below the error."
        return Neighbour(change, plan, found, "within the error", reason)
    if share > 0:
        return Neighbour(change, plan, found, "slower", why_it_is_slower(chosen, found))
    reason = f"{format_seconds(found.step_seconds)} a step, {-share:.1%} less."
    if found.tight:
        reason = f"{reason[:-1]}, and within the allocator's reach of the limit."
        return Neighbour(change, plan, found, "too tight", reason)
    if not _tried(chosen, plan, space):
        reason += " The search did not try it: see SearchSpace."
        return Neighbour(change, plan, found, "outside the space", reason)
    return Neighbour(change, plan, found, "faster", reason)


def _tried(chosen: Estimate, plan: Plan, space: SearchSpace) -> bool:
    """Whether a search of the space would have looked at a plan."""
    tried = candidates(chosen.model, chosen.cluster, chosen.batch, space)
    return any(plan == other for other in tried)


def _changes(chosen: Estimate) -> Iterator[tuple[str, dict[str, Any]]]:
    plan = chosen.plan
    for name in ("tp", "pp", "cp", *(("ep",) if chosen.model.num_experts else ())):
        for value in _doubled_and_halved(getattr(plan, name)):
            fields = _with_dp(chosen, {name: value})
            yield f"{name} {getattr(plan, name)} -> {value}, dp {fields['dp']}", fields
    for name in ("micro_batch", "virtual_stages"):
        for value in _doubled_and_halved(getattr(plan, name)):
            yield f"{name} {getattr(plan, name)} -> {value}", {name: value}
    choices = {
        "recompute": ("none", "selective", "full"),
        "zero_stage": (0, 1, 2, 3),
        "offload": ("none", "optimizer"),
        "sequence_parallel": (False, True),
    }
    for name, values in choices.items():
        for value in values:
            if value != getattr(plan, name):
                yield f"{name} {getattr(plan, name)} -> {value}", {name: value}


def _doubled_and_halved(value: int) -> list[int]:
    return [2 * value] + ([value // 2] if value % 2 == 0 else [])


def _with_dp(chosen: Estimate, fields: dict[str, Any]) -> dict[str, Any]:
    """With the dp that keeps the plan on all GPUs, and sequence parallelism where tp allows it."""
    sizes = {name: fields.get(name, getattr(chosen.plan, name)) for name in ("tp", "pp", "cp")}
    sizes = {name: int(size) for name, size in sizes.items()}
    dp = max(1, chosen.cluster.gpus // (sizes["tp"] * sizes["pp"] * sizes["cp"]))
    fields = fields | {"dp": dp, "sequence_parallel": sizes["tp"] > 1}
    if sizes["pp"] == 1:
        fields["virtual_stages"] = 1
    return fields
