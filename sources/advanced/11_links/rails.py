"""Two nodes of eight GPUs, and why they have eight ways to each other: one ring a port."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.checked import check_public
from utils.units import GB
from utils.views.style import course_style

GPUS = 8
SWITCH, GPU, PORT, RING = "#e6e6e6", "#c3d8ea", "#fff3df", "#c85200"
SWITCH_Y, GPU_Y, PORT_Y = 3.5, 2.45, 1.4  # of the upper node; the lower one is its mirror


def draw_rails(nvlink_bytes_per_second: float, port_bytes_per_second: float) -> Figure:
    """A drawing, of no run: NVSwitch, GPUs and ports of two nodes, and the eight rings between."""
    inside, port = nvlink_bytes_per_second / GB, port_bytes_per_second / GB
    with course_style():
        figure = Figure(figsize=(9.2, 4.6), layout="constrained")
        axes = figure.subplots()
        for name, side in (("node 0", 1), ("node 1", -1)):
            _draw_node(axes, name, side, f"NVSwitch: {inside:.0f} GB/s to each GPU")
        for ring in range(GPUS):
            axes.plot([ring, ring], [-PORT_Y + 0.35, PORT_Y - 0.35], color=RING, lw=2.2)
            label = {"fontsize": 9, "ha": "left", "va": "center", "color": RING}
            axes.text(ring + 0.06, 0, f"ring {ring}", **label)
        total = f"{GPUS} ports x {port:.0f}\n= {GPUS * port:.0f} GB/s"
        axes.text(GPUS - 0.2, 0, total, fontsize=11, va="center", weight="bold")
        axes.set_xlim(-1.3, GPUS + 1.4)
        axes.set_ylim(-4.1, 4.1)
        axes.set_axis_off()
        axes.set_title("A drawing: two nodes, one ring through each port (rates published)")
    return figure


def _draw_node(axes: Axes, name: str, side: int, switch: str) -> None:
    axes.add_patch(_box(-0.5, side * SWITCH_Y, GPUS, SWITCH))
    middle = {"ha": "center", "va": "center", "fontsize": 9}
    axes.text((GPUS - 1) / 2, side * SWITCH_Y, switch, **middle)
    axes.text(-0.65, side * GPU_Y, name, ha="right", va="center", fontsize=11)
    for gpu in range(GPUS):
        axes.plot([gpu, gpu], [side * PORT_Y, side * SWITCH_Y], color="black", lw=0.8, zorder=0)
        for y, what, color in ((GPU_Y, "GPU", GPU), (PORT_Y, "port", PORT)):
            axes.add_patch(_box(gpu - 0.38, side * y, 0.76, color))
            axes.text(gpu, side * y, f"{what} {gpu}", **middle)


def _box(left: float, middle: float, width: float, color: str) -> Rectangle:
    return Rectangle((left, middle - 0.35), width, 0.7, facecolor=color, edgecolor="black", lw=0.8)


__all__ = ["draw_rails"]

check_public(globals())
