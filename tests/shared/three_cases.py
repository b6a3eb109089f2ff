"""What lesson 14 defines, taken out of its source, for tests of the same code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jupytext

LESSON = Path(__file__).parents[2] / "sources/advanced/14_three_dimensions/lesson.py"
DEFINES = (
    "tokens", "whole_model", "one_process", "my_part", "my_passes", "my_rows", "my_clip",
    "train", "program", "real_peak", "at_size", "sent_by_axis", "clip_by_stage", "shuffled_by_rank", "add_up_ends", "clip_tied",
    "tied_model",
)  # fmt: skip


def lesson_names(**names: Any) -> dict[str, Any]:
    """The lesson's imports, constants and functions; `names` replace its own."""
    found: dict[str, Any] = {"__name__": "__main__"}
    for cell in jupytext.read(LESSON).cells:
        if cell.cell_type != "code":
            continue
        if "\nimport torch\n" in cell.source or cell.source.startswith("TINY = "):
            exec(cell.source, found)
        elif cell.source.startswith("def "):
            # Functions alone: what the cell runs comes after two empty lines, without an indent.
            parts = [part for part in cell.source.split("\n\n\n") if part.startswith("def ")]
            exec("\n\n\n".join(parts), found)
    missing = [name for name in DEFINES if name not in found]
    assert not missing, f"lesson 14 no longer defines {missing}"
    found.update(names)
    return found
