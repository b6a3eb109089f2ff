"""A module of `utils` serves two lessons or more, or an entry point that the page of architecture names."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import uses  # noqa: E402

import utils  # noqa: E402

PAGE = """
## Entry points

| module | who enters there | why it is no lesson's |
|---|---|---|
| `utils.start` | `make setup` | runs first |

## Something else

| `utils.other` | | |
"""
FILES = {
    "docs/architecture.md": PAGE,
    "sources/beginner/01_one/lesson.py": "from utils import saw\nfrom utils.tools import hammer as tool\n",
    "sources/beginner/02_two/lesson.py": "from utils import tools\ntools.saw()\n",
    "sources/beginner/02_two/helper.py": "import importlib\nname = 'a'\n"
    "importlib.import_module(f'utils.drawn.{name}')\n",
    "sources/beginner/02_two/script.py": "TEXT = '''\nfrom utils.written import out\n'''\n",
    "utils/__init__.py": "",
    "utils/__init__.pyi": "from utils.tools import saw as saw\n",
    "utils/start.py": "from utils.below import x\nNEXT = 'beside.py'\n",
    "utils/below.py": "",
    "utils/beside.py": "",
    "utils/dead.py": "",
    "utils/written.py": "",
    "utils/drawn/__init__.py": "",
    "utils/drawn/a.py": "",
    "utils/tools/__init__.py": "from utils.tools.hammers import hammer\n_HOME = {'saw': 'saws'}\n",
    "utils/tools/hammers.py": "",
    "utils/tools/saws.py": "from utils.tools.teeth import teeth\n",
    "utils/tools/teeth.py": "",
    "evidence/proof.py": "from utils.dead import x\n",
}


@pytest.fixture
def course(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_each_module_of_utils_is_shared_or_entered() -> None:
    assert uses.problems(uses.Uses()) == []


def test_a_use_is_what_an_import_leads_to(course: Path) -> None:
    assert uses.Uses(course).served == {
        "utils.below": set(),
        "utils.beside": set(),
        "utils.dead": set(),
        "utils.drawn.a": {"02"},  # by the beginning of its name
        "utils.start": set(),
        "utils.tools.hammers": {"01"},  # and not all that its package offers
        "utils.tools.saws": {"01", "02"},  # handed out lazily
        "utils.tools.teeth": {"01", "02"},  # by way of saws
        "utils.written": {"02"},  # in a script that the lesson writes out
    }


def test_what_one_lesson_uses_and_what_none_does_are_sentences(course: Path) -> None:
    found = uses.problems(uses.Uses(course))
    names = [sentence.split()[0].removeprefix("utils.") for sentence in found]
    assert names == ["dead", "drawn.a", "tools.hammers", "written"]
    assert "utils.dead serves no lesson. Take it out" in found[0]
    assert "hammers serves lesson 01 alone. Move it to that lesson's folder" in found[2]
    assert "utils.lessons.lesson_01.hammers" in found[2] and "utils/moved.py" in found[2]


def test_an_entry_point_without_a_reason_is_none() -> None:
    assert uses.entry_points(PAGE) == ["utils.start"]
    assert uses.entry_points(PAGE.replace("runs first", " ")) == []


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("| `utils.gone` | x | why |\n", "lists the entry point utils.gone, and there is no such"),
        ("| `utils.start` | x | why |\n" * 20, "lists 21 entry points, more than 20"),
    ],
)
def test_entry_points_are_few_and_exist(course: Path, row: str, sentence: str) -> None:
    (course / uses.PAGE).write_text(PAGE.replace("| `utils.start`", f"{row}| `utils.start`", 1))
    try:
        found = uses.problems(uses.Uses(course))
    except KeyError as error:
        found = [str(error)]
    assert len(found) == 1 and sentence in found[0]


def test_no_name_of_a_package_hides_one_of_its_modules() -> None:
    """But `goodput`: labs of version 0.1 import from the module of that name."""
    hidden = []
    for found in pkgutil.walk_packages(utils.__path__, "utils."):
        package, _, last = found.name.rpartition(".")
        if not last.startswith("_") and "utils.lessons" not in package:
            importlib.import_module(found.name)
            offered = vars(importlib.import_module(package)).get(last)
            hidden += [found.name] * (offered is not None and not inspect.ismodule(offered))
    assert hidden == ["utils.planner.goodput"]
