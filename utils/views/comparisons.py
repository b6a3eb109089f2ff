"""`compare` and `reconcile`: several measurements side by side, and a prediction against one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from utils.memory.measurement import Measurement
from utils.units import Category, format_bytes, format_seconds
from utils.views.breakdown import Bar, as_bar, draw_breakdown, predicted
from utils.views.images import image_html


@dataclass(frozen=True)
class Comparison:
    """A table, and the figure that belongs to it. Ends a cell by showing both."""

    table: pd.DataFrame
    figure: Figure
    alt: str

    def __str__(self) -> str:
        return self.table.to_string(index=False)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        page = self.table.to_html(index=False, border=0) + image_html(self.figure, self.alt)
        return {"text/html": page, "text/plain": str(self)}


def compare(
    measurements: Sequence[Measurement | Bar], *, title: str = "Memory at the peak"
) -> Comparison:
    """Measurements and predictions side by side: a table and the bars of their peaks.

    Raises:
        ValueError: nothing to compare.
    """
    if not measurements:
        raise ValueError("compare() needs a list of measurements.")
    table = pd.DataFrame([_row(item) for item in measurements])
    parts = [
        f"{bar.name} {format_bytes(bar.breakdown.total_bytes)}" for bar in map(as_bar, measurements)
    ]
    alt = f"{title}, stacked bars by category: " + "; ".join(parts)
    return Comparison(table, draw_breakdown(measurements, title=title), alt)


def _row(item: Measurement | Bar) -> dict[str, str]:
    bar = as_bar(item)
    row = {
        "name": bar.name,
        "evidence": str(bar.evidence),
        "peak": format_bytes(bar.breakdown.total_bytes),
        "states": format_bytes(bar.breakdown.state_bytes),
        "activations": format_bytes(bar.breakdown[Category.ACTIVATIONS]),
        "peak in": "",
        "median step": "",
        "throughput": "",
    }
    if isinstance(item, Measurement):
        row["peak in"] = item.peak_phase
        if item.median_step_seconds:
            row["median step"] = format_seconds(item.median_step_seconds)
            row["throughput"] = item.throughput
    return row


def reconcile(
    prediction: Mapping[str, float] | Bar, measurement: Measurement, *, at_ns: int | None = None
) -> Comparison:
    """A prediction beside a measurement, category by category, with the ratio of the two.

    Args:
        prediction: bytes by category name, as `predicted` takes them.
        measurement: what was measured.
        at_ns: the moment of the timeline to compare with; the peak if None.

    Raises:
        ValueError: a name in the prediction is no category.
    """
    guess = prediction if isinstance(prediction, Bar) else predicted("prediction", prediction)
    timeline = measurement.timeline
    found = timeline.peak if at_ns is None else timeline.at(at_ns)
    bar = Bar(measurement.name, found, measurement.evidence, measurement.device)
    categories = [c for c in Category if guess.breakdown[c] or found[c]]
    kind = str(measurement.evidence)
    rows = [_ratio_row(str(c), guess.breakdown[c], found[c], kind) for c in categories]
    rows.append(_ratio_row("total", guess.breakdown.total_bytes, found.total_bytes, kind))
    figure = draw_breakdown([guess, bar], title=f"Predicted and {kind}")
    alt = "; ".join(f"{row['category']}: {row['predicted']} / {row[kind]}" for row in rows)
    return Comparison(pd.DataFrame(rows), figure, f"Predicted and {kind} memory: {alt}")


def _ratio_row(name: str, guess_bytes: int, found_bytes: int, kind: str) -> dict[str, str]:
    ratio = f"{found_bytes / guess_bytes:.3f}" if guess_bytes else "not predicted"
    return {
        "category": name,
        "predicted": format_bytes(guess_bytes),
        kind: format_bytes(found_bytes),
        f"{kind} / predicted": ratio,
    }
