"""Colors of the clinic's figures, and the line of a budget."""

from __future__ import annotations

from utils.units import MIB, format_bytes

SICK, WELL, FREE, EDGE, OUTSIDE = "#bd1f01", "#3f90da", "#ffffff", "#717581", "#ffa90e"


def draw_limit(axes, limit_bytes: int, *, upright: bool = False) -> None:
    """The budget, as a dashed line with its name."""
    at = limit_bytes / MIB
    line = axes.axvline if upright else axes.axhline
    line(at, color="black", linewidth=1.5, linestyle="--", zorder=0.9 if upright else 2)
    axes.annotate(
        f" budget {format_bytes(limit_bytes)}",
        (at, 0.98) if upright else (0.01, at),
        xycoords=axes.get_xaxis_transform() if upright else axes.get_yaxis_transform(),
        xytext=(0, 0 if upright else 3),
        textcoords="offset points",
        va="top" if upright else "bottom",
        fontsize=9,
    )
