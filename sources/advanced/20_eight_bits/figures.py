"""The lesson's drawings: numbers of each format, what an outlier costs, three products, gains, a spike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

from .held import Gain

__all__ = ["draw_gains", "draw_number_lines", "draw_outliers", "draw_products", "draw_spike"]

RED, BLUE, PURPLE, ORANGE, BROWN, GREY = (
    "#bd1f01",
    "#3f90da",
    "#832db6",
    "#e76300",
    "#a96b59",
    "#717581",
)
LOW, HIGH = -26, 18  # powers of two that the number lines show
# smallest, smallest with all digits, end, numbers a power of two with all digits
WIDE = {"fp16": (-24, -14, 16, 1024), "bf16": (-133, -126, 128, 128)}


def draw_number_lines(
    numbers: Mapping[str, Sequence[float]], full: Mapping[str, float], *, title: str
) -> Figure:
    """Each positive number of a format as a tick on a logarithmic line; wide formats as bars.

    Args:
        numbers: by the format's name, its positive numbers in rising order.
        full: by the format's name, its smallest number with all digits.
        title: of the figure.
    """
    with course_style():
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for row, (name, values) in enumerate(numbers.items()):
            few = [value for value in values if value < full[name]]
            axes.plot(few, [row] * len(few), "x", ms=7, mew=1.4, color=RED)
            rest = [value for value in values if value >= full[name]]
            axes.plot(rest, [row] * len(rest), "|", ms=20, mew=0.6, color="black")
            axes.text(values[-1] * 1.4, row, f"to {values[-1]:,.0f}", va="center", fontsize=9)
        _draw_wide(axes, len(numbers))
        names = [*numbers, *WIDE, "E8M0, a scale"]
        axes.plot([], [], "|", ms=12, mew=1, color="black", label="a number with all its digits")
        axes.plot([], [], "x", ms=7, mew=1.4, color=RED, label="a number with fewer digits")
        axes.set_xscale("log", base=2)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(2.0**LOW, 2.0**HIGH)
        axes.set_xticks([2.0**power for power in range(-24, 17, 8)])
        axes.set_xlabel("size of the number")
        axes.set_title(title)
        axes.grid(False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.34), ncols=2)
    return figure


def _draw_wide(axes: Axes, row: int) -> None:
    """Formats too dense or too long for ticks, and E8M0, whose ends lie outside."""
    for name, (least, full, end, count) in WIDE.items():
        least, full, end = (2.0 ** min(max(power, LOW), HIGH) for power in (least, full, end))
        axes.hlines(row, full, end, color="#bbbbbb", lw=15)
        if least < full:
            axes.hlines(row, least, full, color="#f3c6bd", lw=15)
            axes.text(
                (least * full) ** 0.5, row, "fewer digits", ha="center", va="center", fontsize=9
            )
        axes.text(
            1.0, row, f"{count:,} numbers a power of two", ha="center", va="center", fontsize=9
        )
        if name == "bf16":
            _draw_ends(axes, row, "$2^{-133}$", "$2^{128}$")
        row += 1
    axes.plot(
        [2.0**p for p in range(LOW + 3, HIGH - 2)],
        [row] * (HIGH - LOW - 5),
        "|",
        ms=20,
        mew=0.6,
        color="black",
    )
    _draw_ends(axes, row, "$2^{-127}$", "$2^{127}$")


def _draw_ends(axes: Axes, row: int, least: str, largest: str) -> None:
    for place, text, side in (
        (2.0**LOW, f"← {least}", "left"),
        (2.0**HIGH, f"{largest} →", "right"),
    ):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(place, row, text, ha=side, va="center", fontsize=9, bbox=box)


# by scheme: color, line, marker, and where its name stands (x, y in %, side)
LINES = {
    "int8, per tensor": (GREY, "-", "s", (27, 4.3, "left")),
    "E2M1, per tensor": (BROWN, "-", "^", (33, 38, "left")),
    "E4M3, per tensor": (RED, "-", "o", (1.95e5, 62, "right")),
    "E4M3, blocks of 128": (BLUE, "--", None, (1.25e6, 4.9, "left")),
    "MXFP8": (PURPLE, "-.", None, (1.25e6, 3.1, "left")),
    "NVFP4": (ORANGE, ":", "D", (300, 7.2, "left")),
}


def draw_outliers(
    factors: Sequence[float], errors: Mapping[str, Sequence[float]], *, title: str
) -> Figure:
    """The error of all other numbers over the size of one outlier, a scheme a line.

    Args:
        factors: how many times the others' size the outlier is.
        errors: by scheme, the relative error of the others, a factor each.
        title: of the figure.
    """
    if unknown := set(errors) - set(LINES):
        raise ValueError(f"errors has {sorted(unknown)}; the schemes are {', '.join(LINES)}.")
    with course_style():
        figure = Figure(figsize=(10, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for name, found in errors.items():
            color, line, marker, (x, y, side) = LINES[name]
            percent = [100 * e for e in found]
            axes.loglog(factors, percent, line, color=color, marker=marker, ms=4, lw=1.8)
            axes.text(
                x,
                y,
                name.replace(", per", ",\nper"),
                color=color,
                ha=side,
                va="center",
                fontsize=10,
            )
        for place, text in (
            (448 * 2**6, "28,672: typical\nnumbers lose digits"),
            (448 * 2**9, "229,376: E4M3's\nsmallest number"),
        ):
            axes.axvline(place, color="#999999", lw=0.9, ls=(0, (4, 3)))
            side = "right" if place < 1e5 else "left"
            axes.text(
                place * (0.9 if side == "right" else 1.1),
                1.25,
                text,
                fontsize=9,
                ha=side,
                va="center",
            )
        axes.text(40, 2.15, "E4M3 and MXFP8", fontsize=10, va="center")
        axes.set_xlim(0.8, 2.2e7)
        axes.set_xticks([10.0**p for p in range(7)])
        axes.set_xlabel("one number of 131,072 is so many times a typical one")
        axes.set_ylabel("error of all the others, %")
        axes.set_yticks([1, 10, 100], ["1", "10", "100"])
        axes.set_title(title)
    return figure


SIZE = 16  # cells along each side of a drawn matrix
# by recipe: format; blocks (rows, columns) in drawn cells of activations and of weights; what it says
RECIPES = {
    "Per row": ("E4M3", (1, 16), (1, 16), "a row", "a row", ""),
    "DeepSeek-V3": ("E4M3", (1, 8), (8, 8), "1 x 128", "128 x 128", "moved to fp32 every 128"),
    "MXFP8": ("E4M3", (1, 4), (1, 4), "1 x 32", "1 x 32", ""),
    "NVFP4": (
        "E2M1, g by chance, gᵀ and x, rotated",
        (1, 2),
        (2, 2),
        "1 x 16",
        "16 x 16",
        "",
    ),
}
PRODUCTS = {  # title: the two factors, whether each is a weight, and the dimension that is summed
    "forward:  y = x wᵀ": (("x", False), ("wᵀ", True), "inputs"),
    "to x:  g w": (("g", False), ("w", True), "outputs"),
    "to w:  gᵀ x": (("gᵀ", False), ("x", False), "tokens"),
}


def draw_products(*, title: str) -> Figure:
    """Who shares a scale in each of a linear layer's three products, by recipe.

    Args:
        title: of the figure.
    """
    with course_style():
        figure = Figure(figsize=(10, 7.8))
        figure.set_layout_engine(
            "constrained", rect=(0.015, 0, 0.985, 1)
        )  # names stand left of the axes
        grid = figure.subplots(len(RECIPES), len(PRODUCTS))
        for row, name in enumerate(RECIPES):
            for axes, (product, (left, right, along)) in zip(
                grid[row], PRODUCTS.items(), strict=True
            ):
                _draw_product(axes, name, left, right, along)
                if row == 0:
                    axes.set_title(product, fontsize=12, loc="center")
            label = f"{name}\n{RECIPES[name][0].replace(', ', chr(10))}"
            grid[row][0].text(-14, SIZE / 2, label, ha="left", va="center", fontsize=9.5)
        figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=13)
        key = "orange: of the tokens; blue: weights; a tile of one shade: numbers that share a scale; arrows: along the sum"
        figure.supxlabel(key, fontsize=9.5, x=0.01, ha="left")
    return figure


def _draw_product(
    axes: Axes, recipe: str, left: tuple[str, bool], right: tuple[str, bool], along: str
) -> None:
    _, activation, weight, small, large, added = RECIPES[recipe]
    for place, ((symbol, is_weight), turned) in ((0, (left, False)), (SIZE + 5, (right, True))):
        block, said = (weight, large) if is_weight else (activation, small)
        rows, columns = block[::-1] if turned else block
        _draw_matrix(axes, place, (rows, columns), BLUE if is_weight else ORANGE)
        if turned:
            said = "a column" if said == "a row" else " x ".join(said.split(" x ")[::-1])
        axes.text(
            place + SIZE / 2,
            -1.6,
            f"{symbol}: a scale for {said}",
            ha="center",
            va="center",
            fontsize=8.5,
        )
    axes.text(SIZE + 2.5, SIZE / 2, "·", ha="center", va="center", fontsize=16)
    axes.annotate("", (SIZE, SIZE + 1.2), (0, SIZE + 1.2), arrowprops={"arrowstyle": "->", "lw": 1})
    axes.annotate(
        "", (2 * SIZE + 6.2, 0), (2 * SIZE + 6.2, SIZE), arrowprops={"arrowstyle": "->", "lw": 1}
    )
    axes.text(
        SIZE + 2.5,
        SIZE + 2.8,
        f"sum over {along}" + (f", {added}" if added else ""),
        ha="center",
        va="center",
        fontsize=8.5,
    )
    axes.set_xlim(-0.5, 2 * SIZE + 8)
    axes.set_ylim(-2.6, SIZE + 4)
    axes.set_aspect("equal")
    axes.axis("off")


def _draw_matrix(axes: Axes, place: float, block: tuple[int, int], color: str) -> None:
    rows, columns = block
    shades = [
        [0.65 if (i // rows + j // columns) % 2 else 0.2 for j in range(SIZE)] for i in range(SIZE)
    ]
    pixels = [[to_rgba(color, shade) for shade in row] for row in shades]
    axes.imshow(pixels, extent=(place, place + SIZE, 0, SIZE), interpolation="nearest")
    axes.add_patch(Rectangle((place, 0), SIZE, SIZE, fill=False, lw=1))


GROUP_COLORS = {
    ("bf16", "8 bits"): (BLUE, ""),
    ("bf16", "4 bits"): (ORANGE, "//"),
    ("8 bits", "4 bits"): (BROWN, ".."),
}


def draw_gains(gains: Sequence[Gain], *, title: str) -> Figure:
    """Bars of how many percent more tokens a second fewer bits give, a group of formats a block.

    Args:
        gains: pairs, those of a group side by side.
        title: of the figure.
    """
    rows = [float(row) for row in range(len(gains))]
    for index, (last, gain) in enumerate(pairwise(gains), 1):
        if (last.before, last.after) != (gain.before, gain.after):
            rows[index:] = [row + 0.9 for row in rows[index:]]
    with course_style():
        figure = Figure(figsize=(10, 1.1 + 0.36 * (rows[-1] + 1)), layout="constrained")
        axes = figure.add_subplot()
        for row, gain in zip(rows, gains, strict=True):
            color, hatch = GROUP_COLORS[gain.before, gain.after]
            axes.barh(row, 100 * gain.share, facecolor=color, edgecolor="black", hatch=hatch)
            axes.text(100 * gain.share + 0.8, row, f"+{gain.share:.0%}", va="center", fontsize=10)
        axes.set_yticks(rows, [gain.case for gain in gains])
        axes.invert_yaxis()
        axes.set_xlim(0, 100 * max(gain.share for gain in gains) + 12)
        axes.set_xlabel("more tokens a second per GPU, %")
        kinds = {(gain.before, gain.after) for gain in gains}
        for (before, after), (color, hatch) in GROUP_COLORS.items():
            if (before, after) in kinds:
                label = f"{before} → {after}"
                axes.bar(0, 0, facecolor=color, edgecolor="black", hatch=hatch, label=label)
        axes.legend(loc="lower right")
        figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=13)
        axes.grid(visible=False, axis="y")
        print_evidence(figure, [Evidence.PUBLISHED])
    return figure


def draw_spike(
    own: Sequence[tuple[float, str, float]],
    arms: Mapping[str, Sequence[tuple[float, str, float]]],
    changes: Mapping[int, str],
    *,
    title: str,
) -> Figure:
    """What scales of earlier batches cost, batch by batch: how far the loss is off, and what is cut.

    Args:
        own: what `spikes` gives where each batch has its own scale: loss in nats, layer, share cut.
        arms: the same by whose scale is used instead, two of them.
        changes: what happens to the tensors before a batch.
        title: of the figure.
    """
    off = {
        name: [late[0] - right[0] for right, late in zip(own, arm, strict=True)]
        for name, arm in arms.items()
    }
    cut = {name: [100 * share for *_, share in arm] for name, arm in arms.items()}
    with course_style():
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, found, text in zip(
            panels,
            (off, cut),
            ("loss less own scale's, nats", "inputs cut, worst layer, %"),
            strict=True,
        ):
            for shift, color, (name, values) in zip(
                (-0.2, 0.2), (RED, BLUE), found.items(), strict=True
            ):
                places = [batch + shift for batch in range(len(values))]
                axes.bar(places, values, width=0.4, color=color, label=name)
            top = axes.get_ylim()[1]
            for place, word in changes.items():
                axes.axvline(place - 0.5, color="#777777", lw=0.9, ls=(0, (4, 3)))
                axes.text(place - 0.4, 1.03 * top, word, fontsize=8.5)
            axes.set_ylim(top=1.12 * top)
            axes.set_xlabel("batch")
            axes.set_ylabel(text)
        panels[0].legend(
            loc="lower left", fontsize=8.5, frameon=True, framealpha=1, edgecolor="none"
        )
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        print_evidence(figure, [Evidence.MEASURED], ["CPU, 8 bits emulated"])
    return figure


check_public(globals())
