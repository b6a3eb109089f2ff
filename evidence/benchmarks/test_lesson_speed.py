"""The cells of lessons that have a budget of their own, run in a kernel as a reader runs them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from .conftest import Report

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
TAG = "bench"
CELLS = {
    "intermediate/06_seven_billion": ("lines of a 7B step, four ways at six sizes", 50.0),
    "intermediate/09_sharding": ("five strategies on four ranks", 25.0),
}


def seconds_of_tagged(
    notebook: nbformat.NotebookNode, folder: Path, board: Path
) -> Iterator[float]:
    """Run a notebook up to its last tagged cell; the seconds of each tagged one."""
    tagged = [i for i, cell in enumerate(notebook.cells) if TAG in cell.metadata.get("tags", [])]
    assert tagged, f'no cell of this notebook has the tag "{TAG}"'
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        extra_arguments=["--log-level=40"],
        resources={"metadata": {"path": str(folder)}},
    )
    with client.setup_kernel(env=os.environ | {"COURSE_SCOREBOARD": str(board)}):
        for index, cell in enumerate(notebook.cells[: tagged[-1] + 1]):
            start = time.perf_counter()
            client.execute_cell(cell, index)
            if index in tagged:
                yield time.perf_counter() - start


@pytest.mark.parametrize("lesson", CELLS)
def test_tagged_cells(lesson: str, report: Report, tmp_path: Path) -> None:
    what, budget = CELLS[lesson]
    path = NOTEBOOKS / f"{lesson}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    seconds = sum(seconds_of_tagged(notebook, path.parent, tmp_path / "scoreboard.json"))
    report(what, seconds, budget)
