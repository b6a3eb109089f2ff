"""What was built is taken again as long as nothing that it was built from has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from _built import digest, is_current, mark  # noqa: E402

FILES = ("README.md", "pyproject.toml", "docs/site/conf.py", "notebooks/a/01.ipynb", "tools/b.py")


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A few inputs, and a site that was built from them."""
    for name in FILES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "build/site").mkdir(parents=True)
    mark(tmp_path / "build/site", digest(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "name", ["tools/__pycache__/b.pyc", "notebooks/.ipynb_checkpoints/1.ipynb", "data"]
)
def test_what_is_no_input_changes_nothing(course: Path, name: str) -> None:
    (course / name).parent.mkdir(parents=True, exist_ok=True)
    (course / name).write_text("other")
    assert is_current(course / "build/site", digest(course))


@pytest.mark.parametrize(
    "change",
    [
        *(lambda root, name=name: (root / name).write_text("other") for name in FILES),
        lambda root: (root / "README.md").unlink(),
        lambda root: (root / "README.md").rename(root / "READ.md"),
        lambda root: (root / "docs/new.css").write_text(""),
        lambda root: (root / "build/site").rmdir(),
        lambda root: (root / "build/site.inputs").unlink(),
    ],
)
def test_any_change_of_an_input_builds_anew(course: Path, change: Callable[[Path], object]) -> None:
    change(course)
    assert not is_current(course / "build/site", digest(course))
