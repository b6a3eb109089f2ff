"""The page of architecture, its picture, and the files that it names."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import architecture  # noqa: E402

from utils import parallel, techniques  # noqa: E402

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


READMES = [
    (file.parent, name, line)
    for file in sorted((ROOT / "utils").glob("*/README.md"))
    for line in file.read_text(encoding="utf-8").split("\n- ")
    for name in sorted(set(re.findall(r"`([\w/]+(?:/|\.\w+))`", line)))
    if not name.startswith("utils.")
]


@pytest.mark.parametrize(
    ("room", "named", "line"), READMES, ids=[f"{r.name}-{n}" for r, n, _ in READMES]
)
def test_every_file_that_a_rooms_page_names_is_there(room: Path, named: str, line: str) -> None:
    """A file of a lesson only where the line sends there: "lesson 11's `hosts.py`"."""
    numbers = re.findall(r"[Ll]essons? (\w+)", line) + ["*"] * ("its lesson's folder" in line)
    lessons = [path for n in numbers for path in (ROOT / "sources").glob(f"*/{n}_*/")]
    catalog = ROOT / "utils/catalog" if "catalog" in line else room
    inner = (path for path in room.iterdir() if path.is_dir())
    homes = (room, ROOT, catalog, *inner, *lessons)
    assert any((home / named).exists() for home in homes), f"{room.name}/README.md names {named}"


# A patient of the clinic has an attention of its own, with a fault.
TWICE_ON_PURPOSE = {"Attention"}


def test_no_class_of_utils_is_called_as_another() -> None:
    homes: dict[str, list[str]] = {}
    for file in sorted((ROOT / "utils").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(file.relative_to(ROOT).as_posix())
    twice = {
        n: places for n, places in homes.items() if len(places) > 1 and n not in TWICE_ON_PURPOSE
    }
    assert not twice, f"give one of each another name: {twice}"


def test_tests_lie_in_the_folder_of_what_they_test() -> None:
    loose = sorted(path.name for path in (ROOT / "tests").glob("test_*.py"))
    assert not loose, f"move these into tests/lessons/ or a package's folder: {loose}"


@pytest.mark.parametrize(
    ("package", "home"), [(techniques, techniques._HOME), (parallel, parallel.HOME)]
)
def test_names_that_come_when_they_are_used_come_from_modules_of_today(
    package: ModuleType, home: dict[str, str]
) -> None:
    folder = Path(package.__path__[0])
    gone = {
        name: module for name, module in home.items() if not (folder / f"{module}.py").is_file()
    }
    assert not gone, f"{folder.name}/__init__.py names modules that are not there: {gone}"


def test_a_technique_is_not_called_as_a_module_is() -> None:
    """Once the module is imported it would hide the name: "'module' object is not callable"."""
    modules = {path.stem for path in (ROOT / "utils/techniques").glob("*.py")}
    hidden = sorted(modules & set(techniques.__all__))
    assert not hidden, (
        f"utils/techniques/__init__.py: give these, or their modules, another name: {hidden}"
    )
