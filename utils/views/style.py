"""One look for every figure: colours, hatches, units on axes, evidence in the corner."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.units import GIB, KIB, MIB, Category, Evidence, Phase

STYLE_FILE = Path(__file__).with_name("course.mplstyle")
LONGEST_LINE = 22  # characters


class Look(NamedTuple):
    """How a category is filled. In grey any two differ in hatch or clearly in brightness."""

    color: str
    hatch: str = ""


# matplotlib's petroff10 (Petroff 2021, arXiv:2107.02270), safe for colour-blind readers, and greys.
LOOKS: dict[Category, Look] = {
    Category.PARAMETERS: Look("#3f90da"),
    Category.GRADIENTS: Look("#ffa90e", "//"),
    Category.OPTIMIZER_STATE: Look("#832db6"),
    Category.BUFFERS: Look("#717581", "||"),
    Category.INPUTS: Look("#94a4a2", ".."),
    Category.ACTIVATIONS: Look("#bd1f01", "\\\\"),
    Category.CAST_WEIGHTS: Look("#92dadd", "++"),
    Category.RECOMPUTED: Look("#e76300", "xx"),
    Category.LOGITS_AND_LOSS: Look("#b9ac70", "oo"),
    Category.COMMUNICATION: Look("#a96b59", "--"),
    Category.GATHERED: Look("#3f90da", "**"),
    Category.WORKSPACES: Look("#4d4d4d", ".."),
    Category.TEMPORARIES: Look("#c9c9c9"),
    Category.KEPT: Look("#94a4a2", "\\\\"),
    Category.OTHER: Look("#4d4d4d", "||"),
}

PHASE_SHADES: dict[Phase, str] = {
    Phase.BEFORE_FORWARD: "#ffffff",
    Phase.FORWARD: "#dcebf8",
    Phase.LOSS: "#f5efd6",
    Phase.BACKWARD: "#f8dedb",
    Phase.RECOMPUTE: "#fbe3cf",
    Phase.OPTIMIZER_STEP: "#e8d9f2",
    Phase.AFTER_STEP: "#ffffff",
}


@contextlib.contextmanager
def course_style() -> Iterator[None]:
    """Draw in the course's style without changing matplotlib's settings for good."""
    with plt.style.context(str(STYLE_FILE)):
        yield


def byte_unit(largest_bytes: float) -> tuple[int, str]:
    """The binary unit in which an axis up to `largest_bytes` reads best."""
    for size, name in [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")]:
        if largest_bytes >= size:
            return size, name
    return 1, "bytes"


def print_evidence(
    figure: Figure, evidences: Iterable[Evidence], devices: Iterable[str] = ()
) -> None:
    """Say in the figure's corner what kind of numbers it shows, and from which devices."""
    kinds = set(evidences)
    placed = ", ".join(sorted(str(kind) for kind in kinds - {Evidence.PREDICTED}))
    names = {device for device in devices if device}
    if placed == str(Evidence.SIMULATED):  # their names say it again: "a simulated A100-80GB"
        names = {name.removeprefix(f"a {placed} ") for name in names}
    where = ", ".join(sorted(names))
    parts = [f"{placed} on {where}" if placed and where else placed]
    parts += [str(Evidence.PREDICTED)] * (Evidence.PREDICTED in kinds)
    text = ", ".join(filter(None, parts))
    figure.supxlabel(text, x=0.995, ha="right", fontsize=10, color="#555555", style="italic")


def wrapped(name: str) -> str:
    """A name for an axis, in lines short enough to leave room for the bars."""
    return textwrap.fill(name, LONGEST_LINE)


def empty_figure(width: float = 9.0, height: float = 4.5) -> tuple[Figure, Axes]:
    """A figure that pyplot does not keep, so that no cell shows it twice."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()
