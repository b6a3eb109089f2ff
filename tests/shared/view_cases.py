"""Measurements built by hand, and what stands on a figure."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.memory import Measurement, MemoryTimeline
from utils.memory.events import Allocation, Category, Mark, Phase
from utils.units import MIB, Evidence
from utils.views import predicted


def measured(
    batch: int = 4,
    name: str = "a step",
    unit_bytes: int = MIB,
    evidence: Evidence = Evidence.MEASURED,
    seconds: tuple[float, ...] = (0.2, 0.1, 0.4),
    marks: list[Mark] | None = None,
) -> Measurement:
    """A step built by hand: its activations grow with the batch, its peak is in backward."""
    rows = [
        (100, 0, None, Category.PARAMETERS),
        (200, 0, None, Category.OPTIMIZER_STATE),
        (30 * batch, 1000, 5000, Category.ACTIVATIONS),
        (0.25, 1500, 2500, Category.LOGITS_AND_LOSS),
        (100, 3000, 8000, Category.GRADIENTS),
        (10, 3500, 4000, Category.TEMPORARIES),
    ]
    blocks = [
        Allocation(i, int(size * unit_bytes), born, died, category, Phase.FORWARD, "")
        for i, (size, born, died, category) in enumerate(rows)
    ]
    marks = marks or [
        Mark(0, Phase.FORWARD),
        Mark(3000, Phase.BACKWARD),
        Mark(6000, Phase.OPTIMIZER_STEP),
    ]
    timeline = MemoryTimeline(blocks, marks, 0, 10_000)
    return Measurement(name, timeline, evidence, "the test's card", seconds, batch, "images")


SIZES = [measured(4), measured(8), measured(32)]
FORMULA = predicted("my formula", {"parameters": 100 * MIB, "activations": 120 * MIB})


def texts(figure: Figure) -> str:
    """All that is written on a figure."""
    found = figure.findobj(match=lambda artist: hasattr(artist, "get_text"))
    return "\n".join(artist.get_text() for artist in found)


def evidence_of(figure: Figure) -> str:
    return figure._supxlabel.get_text()


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def bars_of(figure: Figure) -> list[list[Rectangle]]:
    """The patches of each row of a bar chart, from left to right."""
    (axes,) = figure.axes
    rows: dict[int, list[Rectangle]] = {}
    for patch in axes.patches:
        rows.setdefault(round(patch.get_y() + patch.get_height() / 2), []).append(patch)
    return [sorted(rows[row], key=lambda patch: patch.get_x()) for row in sorted(rows)]


def top_at(axes: Axes, time_ms: float) -> float:
    """The highest edge of the stack at a time between two events."""
    heights = [0.0]
    for area in axes.collections:
        corners = area.get_paths()[0].vertices
        left = corners[corners[:, 0] <= time_ms]
        right = corners[corners[:, 0] > time_ms]
        if len(left) and len(right):
            at_left = left[left[:, 0] == left[:, 0].max()][:, 1]
            at_right = right[right[:, 0] == right[:, 0].min()][:, 1]
            heights.append(max(set(at_left) & set(at_right)))
    return max(heights)
