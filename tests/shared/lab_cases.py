"""What the tests of all labs do: take answers out of a lab, and read verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jupytext

from utils.labs.verdict import Status, Verdict

ROOT = Path(__file__).parents[2]


def solved_lab(name: str) -> Path:
    """A lab's source, its solutions in it: "beginner/01_where_memory_goes"."""
    return ROOT / "sources" / name / "lab.py"


def untouched_lab(name: str) -> Path:
    """The lab as a learner finds it."""
    return ROOT / "labs" / f"{name}.ipynb"


def definitions(
    path: Path, *ends: str, starts: tuple[str, ...] = ("def ", "class "), **names: Any
) -> dict[str, Any]:
    """What the cells define that begin with a function or a class, or with one of `starts`.

    A cell runs up to its check, or to the first of `ends`; `names` are there before.
    """
    names |= {"__name__": "__main__"}
    for cell in jupytext.read(path).cells:
        if cell.cell_type == "code" and cell.source.startswith(starts):
            source = cell.source
            for end in ("\ncheck(", *ends):
                source = source.partition(end)[0]
            exec(source, names)
    return names


def answers(path: Path, *starts: str, **names: Any) -> dict[str, Any]:
    """What each check is given, by exercise, from running the cells that begin so (all if none)."""
    found: dict[str, Any] = {}
    names |= {"__name__": "__main__"}
    names["check"] = lambda name, answer: found.update({name.partition(".")[2]: answer})
    for cell in jupytext.read(path).cells:
        is_part = cell.source.startswith(starts) if starts else "check(" in cell.source
        if cell.cell_type == "code" and is_part:
            exec(cell.source.partition("\n\n\ntry:")[0], names)
    return found


def nudged(verdict: Verdict, words: str) -> None:
    """Assert that an answer was sent back with these words."""
    assert verdict.status is Status.NOT_YET
    assert words in f"{verdict.note} {verdict.got} {verdict.nudge}", verdict
