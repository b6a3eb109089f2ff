"""A lesson's code lies in its folder: what may import what, and names that it had before."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from utils.labs.checking import checks_of, lab_numbers
from utils.lessons import SOURCES, folders
from utils.moved import today

ROOT = Path(__file__).resolve().parents[2]
# What lessons and labs of version 0.1 imported, a module a line.
EARLIER = [
    line.split() for line in (ROOT / "tests/lessons/earlier_names.txt").read_text().splitlines()
]
LESSONS = "utils.lessons.lesson_"


def imported(path: Path) -> set[str]:
    """The modules that a file names in its import statements."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_neither_utils_nor_evidence_imports_a_lesson() -> None:
    """But speeds, which are tests of what lies in both."""
    houses = ("utils", "evidence/record", "evidence/validation")
    files = [path for house in houses for path in sorted((ROOT / house).rglob("*.py"))]
    assert [str(f) for f in files for name in imported(f) if name.startswith(LESSONS)] == []


@pytest.mark.parametrize("line", EARLIER, ids=[line[0] for line in EARLIER])
def test_what_earlier_labs_imported_is_found(line: list[str]) -> None:
    found: dict[str, object] = {}
    exec(f"from {line[0]} import {', '.join(line[1:])}", found)
    assert set(line[1:]) <= set(found)


def test_there_are_earlier_names() -> None:
    assert sum(line[0].startswith("utils.labs.") for line in EARLIER) >= 15
    assert today("utils.labs.cases_99.survive") == "utils.lessons.lesson_99.cases.survive"
    assert today("utils.labs.cases") == today("utils.labs.verdict") == ""


@pytest.mark.parametrize("house", ["utils", "evidence"])
@pytest.mark.parametrize("command", ["record", "validation"])
def test_commands_go_on_under_both_names(house: str, command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"{house}.{command}", "--help"], capture_output=True, cwd=ROOT
    )
    assert f"python -m evidence.{command}" in done.stdout.decode(), done.stderr.decode()


def test_an_earlier_name_is_the_module_of_today_and_no_second_one() -> None:
    earlier = importlib.import_module("utils.validation.tables")
    assert earlier is importlib.import_module("evidence.validation.tables")


@pytest.mark.parametrize(
    ("package", "earlier", "today_in"),
    [
        ("utils.views", "Case", f"{LESSONS}10.views.PatientBytes"),
        ("utils.clusters", "Span", f"{LESSONS}17.clusters.jobs.JobSpan"),
    ],
)
def test_a_class_with_another_name_today_is_found(package: str, earlier: str, today_in: str):
    found: dict[str, type] = {}
    exec(f"from {package} import {earlier}", found)
    assert f"{found[earlier].__module__}.{found[earlier].__qualname__}" == today_in


def test_a_name_that_never_was_is_pythons_own_sentence() -> None:
    with pytest.raises(ModuleNotFoundError, match="utils.labs.nothing"):
        importlib.import_module("utils.labs.nothing")


def test_a_lessons_function_is_found_by_its_module_in_another_process() -> None:
    sent = pickle.dumps(checks_of("09")["zero_1"])
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).__module__)"
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, cwd=ROOT)
    assert done.stdout.decode().strip() == f"{LESSONS}09.checks", done.stderr.decode()


def test_every_folder_is_a_lesson_and_labs_have_checks() -> None:
    assert len(folders()) >= 19 and all((f / "lesson.py").is_file() for f in folders().values())
    with_lab = [number for number, folder in folders().items() if (folder / "lab.py").is_file()]
    assert lab_numbers() == with_lab == sorted(with_lab)


def test_two_lessons_of_one_number_are_a_sentence(tmp_path: Path) -> None:
    for name in ("beginner/01_one", "advanced/01_other"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"Two lessons have the number 01: .* Rename one"):
        folders(tmp_path)
    assert SOURCES.name == "sources"


def test_nothing_of_the_course_imports_by_an_earlier_name() -> None:
    """Those are for labs of version 0.1 alone."""
    own = Path(__file__).resolve()
    houses = ("utils", "sources", "evidence", "tools", "tests")
    files = [f for house in houses for f in sorted((ROOT / house).rglob("*.py")) if f != own]
    earlier = [
        f"{file.relative_to(ROOT)}: {node.module}.{alias.name}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("utils")
        for alias in node.names
        if today(node.module or "") or today(f"{node.module}.{alias.name}")
        if node.module != "utils.labs" and not _is_there(node.module or "", alias.name)
    ]
    assert not earlier, f"import these by the names of today: {earlier}"


def _is_there(module: str, name: str) -> bool:
    """Whether today's module has that name, or a file of it."""
    home = ROOT / module.replace(".", "/")
    if not (home.with_suffix(".py").is_file() or home.is_dir()):
        return module.startswith("utils.lessons.")
    return today(module) == "" and not today(f"{module}.{name}")
