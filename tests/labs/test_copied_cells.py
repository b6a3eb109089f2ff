"""No exercise is answered by copying its lesson: functions, expressions and printed numbers do not pass."""

from __future__ import annotations

import pytest
from copied_cells import copies, passing
from hostile_cases import OF_RANKS
from lab_answers import functions_of_labs, solution

from utils.ranks.killable import run_killable

IN_THIS_PROCESS = [name for name in functions_of_labs() if name not in OF_RANKS]


def test_a_lesson_gives_functions_expressions_and_numbers_to_try() -> None:
    texts = [text for text, _ in copies("01.saved_bytes")]
    assert "def saved_for_backward" in texts, "a function of the lesson"
    assert any("images=inputs" in text for text in texts), "an expression, its name bound"
    assert any(text.isdigit() for text in texts), "a printed number"


def test_a_copy_of_the_answer_would_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial can tell: the solution among the copies is found."""
    given = [("the solution", solution("01.state_bytes")), ("another", len)]
    monkeypatch.setattr("copied_cells.copies", lambda name: given)
    assert passing("01.state_bytes") == ["the solution"]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_THIS_PROCESS)
def test_no_cell_of_the_lesson_is_an_answer(name: str) -> None:
    """In a process of its own: what a copy leaves behind when it is stopped concerns no other test."""
    found = run_killable(passing, name, timeout_seconds=1200)
    assert not found, found
