"""Lesson 06 where bitsandbytes is missing."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.deepspeed  # transformers imports it
LESSON = Path(__file__).parents[2] / "notebooks/intermediate/06_seven_billion.ipynb"
BLOCK = """
import importlib.abc, importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "bitsandbytes" else find_spec(name, *a)

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "bitsandbytes":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.mark.slow
def test_without_bitsandbytes(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
    book = nbformat.read(LESSON, as_version=4)
    surroundings = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "COURSE_SCOREBOARD": str(tmp_path / "scoreboard.json"),
    }
    client = NotebookClient(
        book,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(LESSON.parent)}},
    )
    client.execute(env=surroundings)  # raises where a cell ends in an error
    said = "".join(o.text for c in book.cells for o in c.get("outputs", []) if "text" in o)
    assert "bitsandbytes is not installed" in said
    assert "section 3 compares with no" in said
    assert "'Break it' has no packed weights" in said and "as packed" not in said
    assert "section 4 trains nothing" in said
    assert "held-out loss of the base in 16 bits" in said
    assert "with adapters" not in said
