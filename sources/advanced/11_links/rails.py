"""Two nodes of eight GPUs: one ring drawn whole, through both, and the ports of the seven others."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.checked import check_public
from utils.units import GB
from utils.views.style import course_style

GPUS = 8
SWITCH, GPU, PORT, RING, OTHER = "#e6e6e6", "#c3d8ea", "#fff3df", "#c85200", "#717581"
SWITCH_Y, GPU_Y, PORT_Y = 3.7, 2.45, 1.3  # of the upper node; the lower one is its mirror
HALF = 0.35  # of a box's height
IN, OUT = 0.16, -0.16  # where the ring comes into a node, and where it leaves


def draw_rails(nvlink_bytes_per_second: float, port_bytes_per_second: float) -> Figure:
    """A drawing, of no run: NVSwitch, GPUs and ports of two nodes, and a ring through them."""
    inside, port = nvlink_bytes_per_second / GB, port_bytes_per_second / GB
    with course_style():
        figure = Figure(figsize=(9.2, 5.2), layout="constrained")
        axes = figure.subplots()
        for name, side in (("node 0", 1), ("node 1", -1)):
            _draw_node(axes, name, side, f"NVSwitch: {inside:.0f} GB/s to each GPU")
            _draw_ring_inside(axes, side)
        edge = PORT_Y - HALF
        _arrow(axes, (OUT, edge), (OUT, -edge))  # node 0 sends to node 1,
        _arrow(axes, (IN, -edge), (IN, edge))  # and node 1 to node 0
        axes.text(0.3, 0, "ring 0", fontsize=10, va="center", color=RING, weight="bold")
        for ring in range(1, GPUS):
            axes.plot([ring, ring], [-edge, edge], color=OTHER, lw=1.2, ls=":")
            axes.text(ring + 0.06, 0, f"ring {ring}", fontsize=9, va="center", color=OTHER)
        total = f"{GPUS} ports x {port:.0f}\n= {GPUS * port:.0f} GB/s\n(published)"
        axes.text(GPUS - 0.1, 0, total, fontsize=11, va="center", weight="bold")
        axes.set_xlim(-1.9, GPUS + 1.4)
        axes.set_ylim(-4.3, 4.3)
        axes.set_axis_off()
        axes.set_title("A drawing: ring 0 through 16 GPUs; rings 1 to 7 do so by their own ports")
    return figure


def _draw_node(axes: Axes, name: str, side: int, switch: str) -> None:
    axes.add_patch(_box(-0.9, side * SWITCH_Y, GPUS + 0.4, SWITCH))
    middle = {"ha": "center", "va": "center", "fontsize": 9}
    axes.text((GPUS - 1) / 2, side * (SWITCH_Y + 0.12), switch, **middle)
    axes.text(-1.0, side * GPU_Y, name, ha="right", va="center", fontsize=11)
    for gpu in range(GPUS):
        axes.plot([gpu, gpu], [side * PORT_Y, side * SWITCH_Y], color="black", lw=0.6, zorder=0)
        for y, what, color in ((GPU_Y, "GPU", GPU), (PORT_Y, "port", PORT)):
            axes.add_patch(_box(gpu - 0.38, side * y, 0.76, color))
            axes.text(gpu, side * y, f"{what} {gpu}", **middle)


def _draw_ring_inside(axes: Axes, side: int) -> None:
    """In by port 0, from GPU to GPU, through the switch back to GPU 0, and by it to port 0."""
    into, out = side * IN, side * OUT  # node 1 gets where node 0 sends
    _arrow(axes, (into, side * (PORT_Y + HALF)), (into, side * (GPU_Y - HALF)))
    for gpu in range(GPUS - 1):
        _arrow(axes, (gpu + 0.38, side * GPU_Y), (gpu + 0.62, side * GPU_Y), size=9)
    back = side * (SWITCH_Y - 0.22)
    path = [(GPUS - 1, side * (GPU_Y + HALF)), (GPUS - 1, back), (out, back)]
    axes.plot(*zip(*path, strict=True), color=RING, lw=2.2, solid_joinstyle="round")
    _arrow(axes, path[-1], (out, side * (GPU_Y + HALF)))
    _arrow(axes, (out, side * (GPU_Y - HALF)), (out, side * (PORT_Y + HALF)))


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], size: float = 13
) -> None:
    style = {"arrowstyle": "-|>", "color": RING, "lw": 2.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops={**style, "mutation_scale": size}, zorder=4)


def _box(left: float, middle: float, width: float, color: str) -> Rectangle:
    return Rectangle(
        (left, middle - HALF), width, 2 * HALF, facecolor=color, edgecolor="black", lw=0.8
    )


__all__ = ["draw_rails"]

check_public(globals())
