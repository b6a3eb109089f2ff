"""The last cell of a lesson says what to do at work: its blocks run, and do what they promise.

A lesson's `monday.py` has a function for each block, `block_1`, `block_2`, ... in their order: it
takes the block's text, runs it in a setting of its own, and asserts what the page promises of it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import jupytext
import pytest

from utils.lessons import folders

pytestmark = pytest.mark.deepspeed  # as transformers does, where DeepSpeed is installed

HEADING = "## On Monday"
BLOCK = re.compile(r"^```(?:python|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Half a minute and more: launchers with their time limits, some hundred steps. `make soak` runs them.
SLOW = (("03", 2), ("10", 1), ("12", 0), ("14", 0), ("16a", 1), ("17", 2))
FOLDERS = {n: f for n, f in folders().items() if n[:2] != "00" and (f / "lesson.py").is_file()}


def blocks(number: str) -> list[str]:
    """The fenced blocks of a lesson's last cell, in their order."""
    last = jupytext.read(FOLDERS[number] / "lesson.py").cells[-1]
    told = f"{FOLDERS[number]}/lesson.py: its last cell is markdown and begins with {HEADING!r}"
    assert last.cell_type == "markdown" and last.source.startswith(HEADING), told
    return BLOCK.findall(last.source)


def proofs(number: str) -> dict[str, Callable[[str], None]]:
    """The functions that run them, by name."""
    told = f"{FOLDERS[number]}/monday.py: a function block_1(text), block_2(text), ... a block"
    assert (FOLDERS[number] / "monday.py").is_file(), told
    module = importlib.import_module(f"utils.lessons.lesson_{number}.monday")
    return {name: found for name, found in vars(module).items() if re.fullmatch(r"block_\d", name)}


@pytest.mark.parametrize("number", FOLDERS)
def test_a_lesson_ends_with_what_to_do(number: str) -> None:
    texts = blocks(number)
    assert texts, f"{FOLDERS[number]}/lesson.py: {HEADING!r} has no block of code"
    expected = [f"block_{place}" for place in range(1, len(texts) + 1)]
    assert sorted(proofs(number)) == expected, f"{FOLDERS[number]}/monday.py: one function a block"


def _runs() -> list[Any]:
    # What is missing is told by the test above; here only what is there can be run.
    there = [number for number, folder in FOLDERS.items() if (folder / "monday.py").is_file()]
    found = [(number, place) for number in there for place in range(len(proofs(number)))]
    return [pytest.param(*one, marks=[pytest.mark.slow] * (one in SLOW)) for one in found]


def test_what_is_slow_is_there() -> None:
    assert {number for number, _ in SLOW} <= set(FOLDERS)
    assert all(f"block_{place + 1}" in proofs(number) for number, place in SLOW)


@pytest.mark.parametrize(("number", "place"), _runs())
def test_its_lines_do_what_it_says(number: str, place: int) -> None:
    proofs(number)[f"block_{place + 1}"](blocks(number)[place])
