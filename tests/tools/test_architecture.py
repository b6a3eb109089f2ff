"""The page of architecture, its picture, and the files that it names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import architecture  # noqa: E402

from utils import techniques  # noqa: E402

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_the_picture_is_what_the_code_gives() -> None:
    assert architecture.main(["--check"]) == 0


def test_another_picture_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (tmp_path / "utils").symlink_to(ROOT / "utils")
    (tmp_path / "docs").mkdir()
    assert architecture.main(["--check"], tmp_path) == 1
    assert "python tools/architecture.py" in capsys.readouterr().out
    assert architecture.main([], tmp_path) == architecture.main(["--check"], tmp_path) == 0


def test_a_module_that_is_gone_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"utils\.gone: no such module\. Mend its name"):
        architecture.module_file("utils.gone")


def test_every_layer_has_a_row_and_every_row_a_sentence() -> None:
    for layer in architecture.layers():
        for name in layer:
            assert architecture.room(name).says, name
            assert f">{name.partition('.')[2] or name}</text>" in architecture.picture()


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`([\w/]+(?:/|\.py|\.toml))`", PAGE))))
def test_every_file_that_the_page_names_is_there(named: str) -> None:
    lesson = ROOT / "sources/beginner/01_where_memory_goes"
    homes = (ROOT, ROOT / "utils", ROOT / "utils/planner", lesson)
    assert any((home / named).exists() for home in homes), named


def test_a_technique_is_not_called_as_a_module_is() -> None:
    """Once the module is imported it would hide the name: "'module' object is not callable"."""
    modules = {path.stem for path in (ROOT / "utils/techniques").glob("*.py")}
    hidden = sorted(modules & set(techniques.__all__))
    assert not hidden, (
        f"utils/techniques/__init__.py: give these, or their modules, another name: {hidden}"
    )
