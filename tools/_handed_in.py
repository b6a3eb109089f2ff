"""Files that a class handed in, read with care: what cannot be used is said in a sentence."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from utils.labs.checking import find
from utils.labs.scoreboard import CHECKED, Row, ScoreboardError, read_rows
from utils.labs.verdict import Status
from utils.units import Evidence

MOST_BYTES = 10**6  # a scoreboard of the whole course has some 20 kB
MOST_NOTEBOOK_BYTES = 10**8  # with pictures of every cell
MOST_AMOUNT = 2.0**63  # bytes or seconds; none of a real run comes near
SUFFIXES = (".json", ".ipynb")
NO_SCOREBOARD = "it is no scoreboard of the course; ask for my_labs/scoreboard.json"
_LEARNER = re.compile(r"""\bSitting\([^)\n]*?\blearner\s*=\s*(["'])(?P<name>.+?)\1""")


class Unusable(Exception):
    """A file that was handed in and cannot be used; the text says why."""


def learner_of(file: Path, folder: Path) -> str:
    """Whose a file is: the first folder below `folder`, else the file's own name."""
    parts = file.relative_to(folder).parts
    name = parts[0] if len(parts) > 1 else file.stem
    return os.fsencode(name).decode("utf-8", "replace")  # a name may hold bytes that are no text


def same(name: str) -> str:
    """A learner's name as names are compared: two systems may write its letters in two ways."""
    return unicodedata.normalize("NFC", name).casefold().strip()


def printed(text: str) -> str:
    """A name as a sentence holds it: on one line, and without signs that steer a terminal."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def handed_in(folder: Path) -> tuple[list[Path], list[str]]:
    """The scoreboards and notebooks below a folder, and a sentence for whatever else was meant as one."""
    files, problems = [], []

    def closed(error: OSError) -> None:
        problems.append(f"{printed(str(error.filename))} was left out: {error.strerror}.")

    def left_out(path: Path, why: str) -> None:
        name = printed(path.relative_to(folder).as_posix())
        problems.append(f"{name} was left out: {why}.")

    for place, folders, names in os.walk(folder, onerror=closed):
        for name in (name for name in folders if is_wanted(name)):
            left_out(Path(place, name), "it is a folder; ask for the file itself")
        folders[:] = sorted(n for n in folders if not is_wanted(n) and n != ".ipynb_checkpoints")
        files += [Path(place, name) for name in names if is_wanted(name)]
        if Path(place) == folder:  # elsewhere lie files of a learner's own
            for name in sorted(n for n in names if not is_wanted(n) and n[0] != "."):
                left_out(Path(place, name), "its name ends neither in .json nor in .ipynb")
    return sorted(files), problems


def is_wanted(name: str) -> bool:
    """Whether a name is that of a scoreboard or a notebook."""
    return name.lower().endswith(SUFFIXES)


def read(file: Path) -> list[Row]:
    """The rows of a scoreboard.

    Raises:
        Unusable: it is damaged, none of the course's, or claims what no check of it says.
    """
    check_file(file, MOST_BYTES, "a scoreboard has some kB")
    try:
        rows = read_rows(file)
    except ScoreboardError as error:
        cause = error.__cause__
        unread = isinstance(cause, OSError)
        reason = f"{cause.strerror}; ask for my_labs/scoreboard.json" if unread else NO_SCOREBOARD
        raise Unusable(reason) from error
    except RecursionError as error:
        raise Unusable(NO_SCOREBOARD) from error
    if not rows:
        raise Unusable("it has no rows yet")
    for reason in wrong(rows):
        raise Unusable(reason)
    return rows


def wrong(rows: Iterable[Row]) -> Iterator[str]:
    """What no scoreboard of the course holds, row by row."""
    seen: set[tuple[str, str, str]] = set()
    for row in rows:
        name = f"the row {row.what!r} of lesson {row.lesson!r}"
        said = row.lesson, row.what, row.evidence, row.verdict, row.score, row.at
        if not all(map(is_amount, (row.peak_bytes, row.step_seconds))):
            yield f"{name} holds no amount"
        if not all(map(is_text, said)):
            yield f"{name} holds half a letter"
        if reason := claims_too_much(row):
            yield f"{name} {reason}"
        if (key := (row.lesson, row.what, row.kind)) in seen:
            yield f"{name} stands there twice"
        seen.add(key)


def claims_too_much(row: Row) -> str:
    """What a row says that neither a measurement nor a check of the course can have said; else ""."""
    if row.evidence in [str(kind) for kind in Evidence]:
        return "is a measurement with a verdict" if row.verdict or row.score else ""
    if row.evidence != CHECKED:
        return f"claims to be {row.evidence!r}, which no scoreboard says"
    if row.verdict not in (str(Status.CORRECT), str(Status.NOT_YET)):
        return f"has the verdict {row.verdict!r}, which no check says"
    try:
        find(f"{row.lesson}.{row.what}")
    except ValueError:
        return "is of no exercise of the course"
    return ""


def read_notebook(file: Path) -> NotebookNode:
    """A notebook.

    Raises:
        Unusable: it is none.
    """
    check_file(file, MOST_NOTEBOOK_BYTES, "a notebook of the course has less")
    try:
        return nbformat.read(file, as_version=4)
    except OSError as error:
        raise Unusable(str(error.strerror)) from error
    except Exception as error:  # nbformat says in many classes that a text is no notebook
        raise Unusable("it is no notebook; ask for my_labs/advanced/99_capstone.ipynb") from error


def named_inside(notebook: NotebookNode) -> set[str]:
    """Who sits, as a notebook of lab 99 says: `Sitting(learner="Anna")`."""
    code = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    return {found["name"] for text in code for found in _LEARNER.finditer(text)}


def check_file(file: Path, most_bytes: int, why: str) -> None:
    """Refuse what cannot be read to its end: a dangling link, a pipe, a file without end.

    Raises:
        Unusable: it is such a one.
    """
    try:
        size = file.stat().st_size
    except OSError as error:
        what = "a link that leads nowhere" if file.is_symlink() else error.strerror
        raise Unusable(str(what)) from error
    if not file.is_file():
        raise Unusable("it is no file")
    if size > most_bytes:
        raise Unusable(f"it has over {most_bytes // 10**6} MB, and {why}")


def is_amount(number: float | None) -> bool:
    """Whether a number can be bytes or seconds; None stands for none."""
    return number is None or (not isinstance(number, bool) and 0 <= number < MOST_AMOUNT)


def is_text(text: str) -> bool:
    """Whether a file can hold it: JSON can name half of a letter, which none can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
