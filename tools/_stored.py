"""A notebook as it lies in the repository: whether its outputs still belong to its code."""

from __future__ import annotations

from pathlib import Path

import nbformat
from _notebook import code_sha256
from _outputs import name_of
from nbformat import NotebookNode


def read(path: Path) -> NotebookNode | None:
    """A stored notebook; None where there is none, or none that can be read."""
    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError):  # what is no notebook raises a ValueError
        return None


def is_current(notebook: NotebookNode, stored: NotebookNode | None) -> bool:
    """Whether a stored notebook was run with these very code cells."""
    if stored is None:
        return False
    stamp, code = stored.metadata.get("course", {}).get("code_sha256"), code_sha256(notebook)
    return stamp == code == code_sha256(stored) and not missing_runs(stored)


def missing_runs(notebook: NotebookNode) -> list[str]:
    """The code cells that were not run; all of them if there is no output at all."""
    code = [(i, c) for i, c in enumerate(notebook.cells) if c.cell_type == "code" and c.source]
    has_outputs = any(cell.outputs for _, cell in code)
    return [name_of(i, c) for i, c in code if c.execution_count is None or not has_outputs]


def adopt_outputs(notebook: NotebookNode, stored: NotebookNode) -> None:
    """Take the outputs of a stored notebook that has the same code cells."""
    pairs = zip(_code(notebook), _code(stored), strict=True)
    for new, old in pairs:
        new.outputs, new.execution_count = old.outputs, old.execution_count
    notebook.metadata.course.code_sha256 = stored.metadata.course.code_sha256
    if "widgets" in stored.metadata:
        notebook.metadata.widgets = stored.metadata.widgets


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]
