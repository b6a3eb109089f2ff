"""The running scoreboard: what each lesson measured on this machine, and what its lab's checks said.

The rows lie in my_labs/scoreboard.json, which git ignores; COURSE_SCOREBOARD names another file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Protocol

from utils.files import write_whole
from utils.labs.verdict import Report, Status
from utils.units import Evidence, format_bytes, format_seconds

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).resolve().parents[2]
CHECKED = "checked"  # in place of evidence: the row is a verdict
_HEAD = ("lesson", "what", "peak memory", "step time", "evidence")


class Measured(Protocol):
    """What the scoreboard reads from a measurement."""

    name: str
    evidence: Evidence

    @property
    def peak_bytes(self) -> int: ...
    @property
    def median_step_seconds(self) -> float | None: ...


@dataclass(frozen=True)
class Row:
    """One line of the scoreboard: a measurement, or what a check said of an exercise, and when."""

    lesson: str
    what: str
    peak_bytes: int | None
    step_seconds: float | None
    evidence: str
    verdict: str = ""
    score: str = ""
    at: str = ""

    def __post_init__(self) -> None:
        texts, numbers = (
            (self.lesson, self.what, self.evidence, self.verdict, self.score, self.at),
            (self.peak_bytes, self.step_seconds),
        )
        right_texts = all(isinstance(text, str) for text in texts)
        if not right_texts or not all(isinstance(n, (int, float, type(None))) for n in numbers):
            raise TypeError(f"a row of the scoreboard takes names and numbers, not {self!r}")

    @property
    def kind(self) -> str:
        """Of what the row is: a measurement and a verdict may have one name."""
        return CHECKED if self.evidence == CHECKED else ""

    def cells(self) -> tuple[str, ...]:
        """The row as it is read."""
        memory = "" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        time = "" if self.step_seconds is None else format_seconds(self.step_seconds)
        return (self.lesson, self.what, memory, time, self.evidence)


class ScoreboardError(Exception):
    """A file of rows that cannot be read or written; the text says what to do."""


@dataclass(frozen=True)
class Scoreboard:
    """The table that `scoreboard` returns: shows itself as the last line of a cell."""

    rows: tuple[Row, ...]
    problem: str = ""

    def __str__(self) -> str:
        if self.problem or not self.rows:
            return self.problem or "The scoreboard has no rows yet."
        table = [_HEAD, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        padded = [[c.ljust(w) for c, w in zip(cells, widths, strict=True)] for cells in table]
        return "\n".join("  ".join(cells).rstrip() for cells in padded)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if self.problem or not self.rows:
            return f"<p>{escape(str(self))}</p>"
        body = [_html_row("td", row.cells()) for row in self.rows]
        return f"<table>{_html_row('th', _HEAD)}{''.join(body)}</table>"


def score(
    lesson: str,
    what: str | Measured,
    *,
    peak_bytes: int | None = None,
    step_seconds: float | None = None,
    evidence: Evidence = Evidence.MEASURED,
) -> None:
    """Put a row on the scoreboard: `score("01", measurement)`, or a name with its numbers.

    A row of the same lesson and name is replaced. A file that cannot be read or written is said
    in a sentence, and the lesson goes on.
    """
    if isinstance(what, type):
        raise ValueError(f"score: what is the class {what.__name__}; give a measurement or a name.")
    if isinstance(what, str):
        row = Row(lesson, what, peak_bytes, step_seconds, str(Evidence(evidence)))
    else:
        row = Row(lesson, what.name, what.peak_bytes, what.median_step_seconds, str(what.evidence))
    try:
        _put(row)
    except ScoreboardError as error:
        print(error)


def note(report: Report) -> None:
    """Keep what a check said, with its score and the time; what was solved stays so.

    An answer that was not tried, and a check that failed, say nothing of the learner.

    Raises:
        ScoreboardError: the file cannot be read or written.
    """
    if report.status not in (Status.CORRECT, Status.NOT_YET):
        return
    lesson, _, exercise = report.name.partition(".")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    said = str(report.status), report.verdict.score, now
    _put(Row(lesson, exercise, None, None, CHECKED, *said), keeps=str(Status.CORRECT))


def _put(row: Row, keeps: str = "") -> None:
    """Put a row in the place of that of the same lesson and name, unless that one has verdict `keeps`.

    A new one of that verdict replaces it all the same.
    """
    path = scoreboard_path()
    with _alone(path):
        rows = read_rows(path)
        same = [r for r in rows if (r.lesson, r.what, r.kind) == (row.lesson, row.what, row.kind)]
        if keeps and row.verdict != keeps and any(r.verdict == keeps for r in same):
            return
        write_rows(path, [*(r for r in rows if r not in same), row])


def scoreboard(lesson: str = "") -> Scoreboard:
    """The measurements of one lesson, or all so far, by lesson."""
    try:
        rows = read_rows(scoreboard_path())
    except ScoreboardError as error:
        return Scoreboard((), str(error))
    wanted = [row for row in rows if lesson in ("", row.lesson) and row.evidence != CHECKED]
    return Scoreboard(tuple(sorted(wanted, key=lambda row: row.lesson)))


def scoreboard_path() -> Path:
    """Where the rows lie; COURSE_SCOREBOARD may be relative to the repository."""
    # Relative to the kernel's folder, it would litter the one that the notebook lies in.
    return ROOT / (os.environ.get("COURSE_SCOREBOARD") or "my_labs/scoreboard.json")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if there is no file.

    Raises:
        ScoreboardError: it cannot be read, or holds something else.
    """
    try:
        return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ScoreboardError(f"The scoreboard {path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError) as error:
        raise ScoreboardError(
            f"The scoreboard {path} is damaged and was left as it is. "
            "Delete it, and run the lessons again that are to be on it."
        ) from error


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write the rows, whole or not at all.

    Raises:
        ScoreboardError: the folder cannot be written to.
    """
    text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise _cannot_write(path, error) from error


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Inside, no other thread or process changes the rows: each would lose those of the others.

    The lock is on the folder, so that no file of its own is left. Where a system or a file system
    knows no such locks (Windows, some network drives), rows are written without.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY) if fcntl else None
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        if fcntl and folder is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        if folder is not None:
            os.close(folder)


def _cannot_write(path: Path, error: OSError) -> ScoreboardError:
    return ScoreboardError(
        f"The scoreboard {path} cannot be written ({error.strerror}), so this row is not on "
        "it. COURSE_SCOREBOARD can name another file."
    )


def _html_row(tag: str, cells: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
