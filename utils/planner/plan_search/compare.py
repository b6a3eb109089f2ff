"""Plans side by side, as text: what a reader looks at to choose."""

from __future__ import annotations

from collections.abc import Sequence

from utils.planner.plan_estimate import Estimate
from utils.units import format_bytes, format_seconds

HEADINGS = ("plan", "needs", "fits", "step", "MFU", "HFU", "bubble", "tokens/s")


def plan_name(found: Estimate) -> str:
    """A plan in one line: "dp8 tp4 pp12 v1 b2 zero1 full"."""
    plan = found.plan
    parts = [f"dp{plan.dp}", f"tp{plan.tp}", f"pp{plan.pp}"]
    parts += [f"cp{plan.cp}"] * (plan.cp > 1)
    parts += [f"ep{plan.ep}"] * (plan.ep > 1)
    parts += [f"v{plan.virtual_stages}"] * (plan.virtual_stages > 1)
    parts += [f"b{plan.micro_batch}", f"zero{plan.zero_stage}", plan.recompute]
    if plan.recompute_layers is not None:
        parts[-1] += f"-{plan.recompute_layers}"
    parts += [plan.precision] * (plan.precision != "bf16")
    parts += [f"offload-{plan.offload}"] * (plan.offload != "none")
    parts += ["offload-activations"] * plan.offload_activations
    if plan.offload_layers is not None:
        parts[-1] += f"-{plan.offload_layers}"
    return " ".join(parts)


def compare_plans(found: Sequence[Estimate]) -> str:
    """A table of plans, one a line.

    Raises:
        ValueError: no plan was given.
    """
    if not found:
        raise ValueError("compare_plans needs one plan or more.")
    rows = [HEADINGS, *(_row(row) for row in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _row(found: Estimate) -> tuple[str, ...]:
    return (
        plan_name(found),
        format_bytes(found.peak.needed_bytes),
        _fits(found),
        format_seconds(found.step_seconds),
        f"{found.mfu:.1%}",
        f"{found.hfu:.1%}",
        f"{found.bubble:.1%}",
        f"{found.tokens_per_second:,.0f}",
    )


def _fits(found: Estimate) -> str:
    if not found.fits:
        return "no"
    return "tight" if found.tight else "yes"
