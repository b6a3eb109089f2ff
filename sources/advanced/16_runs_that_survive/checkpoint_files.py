"""Pictures of checkpoints: which rank writes and reads which file, and what a kill leaves in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.distributed.checkpoint.filesystem import FileSystemReader

from utils.checked import check_public
from utils.units import Evidence, format_bytes
from utils.views.style import course_style, empty_figure, print_evidence

_RANK, _FILE, _NAMELESS = "#92dadd", "#e6e6e6", "#ffffff"


def draw_files(folder: Path, name: str, readers: int, *, title: str) -> Figure:
    """Who wrote the rows of one tensor of a checkpoint into which file, and which ranks need them.

    Args:
        folder: of the checkpoint.
        name: of the tensor, as the checkpoint has it.
        readers: how many ranks need it, each as many rows.
        title: of the figure.

    Raises:
        ValueError: the folder holds no checkpoint, the checkpoint has no such tensor in pieces, or
            there are no readers.
    """
    if not Path(folder, ".metadata").is_file():
        raise ValueError(
            f"draw_files() needs the folder of a finished checkpoint; {folder} is none."
        )
    found = FileSystemReader(folder).read_metadata()
    tensor: Any = found.state_dict_metadata.get(name)
    if readers < 1 or not hasattr(tensor, "chunks"):
        raise ValueError(f"draw_files() needs readers and a tensor of the checkpoint; got {name}.")
    files = {
        index.offset[0]: where.relative_path
        for index, where in (found.storage_data or {}).items()
        if index.fqn == name and index.offset is not None
    }
    pieces = sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in tensor.chunks)
    with course_style():
        figure, axes = empty_figure(height=0.9 + 0.75 * (len(pieces) + 1))
        share = tensor.size[0] / readers
        heights = [(reader + 0.5) * len(pieces) / readers - 0.5 for reader in range(readers)]
        for reader, height in enumerate(heights):
            rows = f"rows {round(reader * share)} to {round((reader + 1) * share) - 1}"
            _box(axes, 2, height, f"rank {reader} of {readers} needs\n{rows}", _RANK)
            _arrow(axes, (1.07, len(pieces)), (2, height), "--")
        for place, (first, count) in enumerate(pieces):
            size = format_bytes((folder / files[first]).stat().st_size)
            rows = f"rows {first} to {first + count - 1}"
            _box(axes, 0, place, f"rank {place} of {len(pieces)} writes\n{rows}", _RANK)
            _box(axes, 1, place, f"{files[first]}\n{size}", _FILE)
            _arrow(axes, (0, place), (1, place), "-")
            for reader, height in enumerate(heights):
                if first < (reader + 1) * share and first + count > reader * share:
                    _arrow(axes, (1, place), (2, height), "-")
        told = ".metadata, written last:\nwhere each piece lies"
        _box(axes, 1, len(pieces), told, _NAMELESS)
        _bare(axes, title, len(pieces))
        print_evidence(figure, [Evidence.MEASURED, Evidence.PREDICTED], [f"{len(pieces)} ranks"])
    return figure


def draw_left(left: Mapping[str, tuple[Sequence[str], str]], *, title: str) -> Figure:
    """What kills left of a folder of checkpoints: a column for each, what a load finds in a bold frame.

    Args:
        left: by when the kill came, the names in the folder and the one that a load finds.
        title: of the figure.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not left:
        raise ValueError("draw_left() needs what at least one kill left.")
    most = max(len(names) for names, _ in left.values())
    with course_style():
        figure, axes = empty_figure(height=1.5 + 0.6 * most)
        for column, (state, (names, found)) in enumerate(left.items()):
            axes.text(
                column, -0.85, f"killed when:\n{state}", ha="center", va="center", fontsize=10
            )
            for row, name in enumerate(sorted(names, key=_newest_first)):
                is_named = name.startswith("step-")
                step = name.split("-")[1].lstrip("0") if is_named else ""
                text = f"step {step}" if is_named else f"{name}: no name"
                text += ": loaded" if name == found else ""
                fill = _RANK if is_named else _NAMELESS
                _box(axes, column, row, text, fill, is_bold=name == found, is_hatched=not is_named)
        _bare(axes, title, most - 1, columns=len(left), top=-1.3)
        print_evidence(figure, [Evidence.MEASURED], ["2 ranks"])
    return figure


def _newest_first(name: str) -> int:
    return -int(name.split("-")[1]) if name.startswith("step-") else 1


def _box(
    axes: Axes,
    column: float,
    row: float,
    text: str,
    fill: str,
    is_bold: bool = False,
    is_hatched: bool = False,
) -> None:
    frame = {
        "boxstyle": "round,pad=0.35",
        "facecolor": fill,
        "edgecolor": "black",
        "linewidth": 2.4 if is_bold else 0.8,
        "linestyle": ":" if is_hatched else "-",
    }
    weight = "bold" if is_bold else "normal"
    axes.text(
        column, row, text, ha="center", va="center", fontsize=8.5, bbox=frame, fontweight=weight
    )


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], dash: str) -> None:
    axes.annotate(
        "",
        (end[0] - 0.21, end[1]),
        (start[0] + 0.21, start[1]),
        arrowprops={"arrowstyle": "->", "linestyle": dash, "color": "#555555"},
    )


def _bare(axes: Axes, title: str, last_row: float, columns: int = 3, top: float = -0.6) -> None:
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(last_row + 0.6, top)
    axes.set_axis_off()
    axes.set_title(title)


__all__ = ["draw_files", "draw_left"]

check_public(globals())
