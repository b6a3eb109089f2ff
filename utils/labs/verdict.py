"""What a check answers, and how it looks in a notebook."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from html import escape
from typing import Any

MOST_LETTERS = 400  # of a text in a verdict: an answer may hold a hundred million
MOST_TRACEBACK_LETTERS = 8000


class Status(enum.Enum):
    """What a check says about an answer."""

    NOT_ATTEMPTED = "not attempted"
    NOT_YET = "not yet"
    CORRECT = "correct"
    CHECK_FAILED = "the check itself failed"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Verdict:
    """What one check found; made by `correct`, `not_yet` and `check_failed`."""

    status: Status
    note: str = ""
    expected: str = ""
    got: str = ""
    nudge: str = ""
    score: str = ""
    traceback: str = ""

    def __post_init__(self) -> None:
        for part in fields(self)[1:]:
            most = MOST_TRACEBACK_LETTERS if part.name == "traceback" else MOST_LETTERS
            object.__setattr__(self, part.name, _shortened(getattr(self, part.name), most))

    def rows(self) -> dict[str, str]:
        """Label and text of what there is to say."""
        rows = {
            "expected": self.expected,
            "got": self.got,
            "think about": self.nudge,
            "score": self.score,
            "traceback": self.traceback,
        }
        return {label: text for label, text in rows.items() if text}


def correct(note: str = "", *, score: str = "") -> Verdict:
    """The answer is right. `score` is deterministic: peak bytes, bytes sent, steps, dollars."""
    return Verdict(Status.CORRECT, note=note, score=score)


def not_yet(note: str = "", *, expected: object = "", got: object = "", nudge: str = "") -> Verdict:
    """The answer is not right yet.

    Args:
        note: What is wrong, in a sentence; may be left out where `expected` and `got` say it.
        expected: What a right answer gives.
        got: What this one gave.
        nudge: One sentence that names the misconception, not the solution.
    """
    return Verdict(Status.NOT_YET, note=note, expected=_text(expected), got=_text(got), nudge=nudge)


def shown(value: Any) -> str:
    """A learner's value as Python writes it, shortened; also where its own `__repr__` is broken."""
    try:
        return _shortened(repr(value), MOST_LETTERS)
    except Exception as error:  # the learner's own code, or a number too long to write  # noqa: BLE001
        return f"{type(value).__name__} that cannot be shown: {type(error).__name__}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else shown(value)


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text):,} letters) ... {text[-half:]}"


def check_failed(note: str, *, traceback: str = "") -> Verdict:
    """The check could not judge the answer; used where checks are run, not in them."""
    return Verdict(Status.CHECK_FAILED, note=note, traceback=traceback)


_MARKS = {
    Status.NOT_ATTEMPTED: ("\N{WHITE CIRCLE}", "#767676"),
    Status.NOT_YET: ("\N{CIRCLED DIVISION SLASH}", "#c85200"),
    Status.CORRECT: ("\N{HEAVY CHECK MARK}", "#1170aa"),
    Status.CHECK_FAILED: ("\N{WARNING SIGN}", "#a3123f"),
}


@dataclass(frozen=True)
class Report:
    """The answer of `check`: shows itself as the last line of a cell."""

    name: str
    verdict: Verdict
    output: str = ""

    @property
    def status(self) -> Status:
        return self.verdict.status

    @property
    def is_correct(self) -> bool:
        return self.status is Status.CORRECT

    def __str__(self) -> str:
        head = ": ".join(filter(None, [f"{self.name}: {self.status}", self.verdict.note]))
        rows = self.verdict.rows() | ({"it printed": self._tail()} if self.output else {})
        return "\n".join([head, *(f"  {label:<12}{text}" for label, text in rows.items())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        mark, colour = _MARKS[self.status]
        rows = [
            f"<div><i>{label}:</i> {_lines(text)}</div>"
            for label, text in self.verdict.rows().items()
        ]
        if self.output:
            rows.append(f"<div><i>it printed:</i><pre>{escape(self._tail())}</pre></div>")
        note = f" {_lines(self.verdict.note)}" if self.verdict.note else ""
        return (
            f'<div style="border-left: 4px solid {colour}; padding: 0.3em 0.8em">'
            f'<div>{mark} <b style="color: {colour}">{self.status}</b> '
            f"<code>{escape(self.name)}</code>{note}</div>{''.join(rows)}</div>"
        )

    def _tail(self, lines: int = 10) -> str:
        """The last lines of what the learner's code printed."""
        return "\n".join(line[:200] for line in self.output.rstrip().splitlines()[-lines:])


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")
