"""Runs the lines that a lesson's last cell gives its reader, as the reader would."""

from __future__ import annotations

from typing import Any


def run_block(text: str, **names: Any) -> dict[str, Any]:
    """Run lines of a page among the names that their reader has; all names after it.

    Args:
        text: the block, as it stands in the page.
        names: what the reader's own program has made before: `model`, `optimizer`, `batch`.

    Raises:
        What the lines raise.
    """
    found = dict(names)
    exec(compile(text, "On Monday", "exec"), found)
    del found["__builtins__"]
    return found
