"""Designs beside each other as their reviews see them, and long sentences in lines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import pandas as pd

from utils.planner import Estimate, plan_name
from utils.planner.plan_estimate import SECONDS_INTERVAL
from utils.planner.run_cost import Cost

from .loss import loss
from .review import Review

__all__ = ["beside_each_other", "days_from_prediction", "usd_from_prediction", "wrapped"]

COLUMNS = 110


def wrapped(sentence: str) -> str:
    """Lines that a notebook shows without a scroll bar."""
    return textwrap.fill(sentence, COLUMNS)


def beside_each_other(
    judged: Mapping[str, tuple[Estimate, Review]], needs: Mapping[str, str]
) -> pd.DataFrame:
    """A row a design: its plan, days and dollars from the prediction on, what its review says, and
    what it needs, in your words.

    Raises:
        ValueError: a design's needs are not said.
    """
    silent = [name for name in judged if not needs.get(name)]
    if silent:
        raise ValueError(f"What {', '.join(silent)} needs is not said; write it in needs.")
    rows = [{**_row(name, *pair), "needs": needs[name]} for name, pair in judged.items()]
    return pd.DataFrame(rows).set_index("way out")


def days_from_prediction(bill: Cost) -> tuple[float, float]:
    """Days at the predicted speed with the fewest failures, and at the slow end of both."""
    low, high = bill.days_interval
    return low / SECONDS_INTERVAL[0], high


def usd_from_prediction(bill: Cost) -> tuple[float, float]:
    """Dollars of the same two ends."""
    low, high = bill.usd_interval
    return low / SECONDS_INTERVAL[0], high


def _row(name: str, plan: Estimate, review: Review) -> dict[str, str]:
    days, usd = days_from_prediction(review.cost), usd_from_prediction(review.cost)
    failed = [row.name for row in review.criteria if not row.passed]
    return {
        "way out": name,
        "plan": plan_name(plan),
        "tokens": f"{review.cost.tokens / 1e9:,.0f}B",
        "predicted loss": f"{loss(plan.model.parameter_count, review.cost.tokens):.3f}",
        "MFU": f"{plan.mfu:.0%}",
        "days": f"{days[0]:,.0f} to {days[1]:,.0f}",
        "million dollars": f"{usd[0] / 1e6:.2f} to {usd[1] / 1e6:.2f}",
        f"fails of {len(review.criteria)}": ", ".join(failed) or "nothing",
    }
