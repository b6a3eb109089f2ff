"""What the cases share that are answered by a plan: reading it, its estimate, its slower ways."""

from __future__ import annotations

from collections.abc import Iterable

from utils.catalog import ModelShape
from utils.labs.kinds import Kind, instance
from utils.labs.verdict import Verdict, not_yet
from utils.planner import (
    Batch,
    Cluster,
    Estimate,
    Plan,
    estimate,
    plan_name,
    why_it_does_not_fit,
)
from utils.units import GB

A_PLAN = instance(Plan, "a Plan(...)")


def plan_kind() -> Kind:
    """A plan of the planner."""
    return A_PLAN


def estimated(
    model: ModelShape | str, cluster: Cluster, plan: Plan, batch: Batch, says: str
) -> Estimate | Verdict:
    """The estimate of an answer, or the "not yet" of a plan that cannot be written so."""
    try:
        return estimate(model, cluster, plan, batch)
    except ValueError as sentence:
        return not_yet(f"{says}: {sentence}", got=plan_name_of(plan))


def plan_name_of(plan: Plan) -> str:
    """The choices that differ from a plain plan."""
    plain = vars(Plan()) | {"framework": "megatron"}
    mine = vars(plan) | {"framework": plan.conventions.name}
    if plan.lora is not None:
        mine["lora"] = f"rank {plan.lora.rank}, base {plan.lora.base}"
    changed = {name: value for name, value in mine.items() if value != plain[name]}
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "a plain Plan()"


def room(found: Estimate, says: str, nudge: str) -> Verdict | None:
    """A "not yet" for a plan that does not fit, or within the allocator's reach only."""
    if not found.fits:
        return not_yet(f"{says}: {why_it_does_not_fit(found)}", got=plan_name(found), nudge=nudge)
    if found.tight:
        held = found.peak.device_bytes / found.cluster.device.memory_bytes
        return not_yet(
            f"{says} fits, and with the gaps between blocks it holds {held:.0%} of the card",
            got=plan_name(found),
            nudge="Leave 5% free: near the limit the allocator searches at every step.",
        )
    return None


def fastest(
    model: ModelShape | str, cluster: Cluster, batch: Batch, plans: Iterable[Plan]
) -> Estimate:
    """Of these plans, the fastest that fits with headroom.

    Raises:
        ValueError: none does.
    """
    found = []
    for plan in plans:
        try:
            row = estimate(model, cluster, plan, batch)
        except ValueError:  # it does not divide, or the host has no room
            continue
        if row.fits and not row.tight:
            found.append(row)
    if not found:
        raise ValueError("None of these plans fits with headroom. Offer others.")
    return min(found, key=lambda row: row.step_seconds)


def gigabytes(value: float) -> str:
    """Bytes in GB, as scores show them."""
    return f"{value / GB:.1f} GB"
