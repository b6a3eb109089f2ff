"""Collects what a class handed in into one CSV: `make scores FOLDER=handed_in`.

Each learner hands in `my_labs/scoreboard.json`, or their notebook of lab 99, or both. In the folder
they lie as `NAME.json` and `NAME.ipynb`, or somewhere below a folder `NAME/`. Answers to lab 99 are
checked again (`hand_ins.py` of lesson 99). A file that cannot be used is named in a sentence, and the
rest goes on.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.files import write_whole  # noqa: E402
from utils.labs.scoreboard import Row, ScoreboardError, read_rows  # noqa: E402
from utils.lessons.lesson_99.hand_ins import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    Examined,
    HandInError,
    examine,
    is_capstone,
)

HEAD = ("learner", "lesson", "what", "peak_bytes", "step_seconds", "evidence", "result", "at")
MOST_BYTES = 10**6  # a scoreboard of the whole course has some 20 kB
MOST_NOTEBOOK_BYTES = 10**8  # with pictures of every cell
MOST_AMOUNT = 2.0**63  # bytes or seconds; none of a real run comes near
# With one of these in front, a spreadsheet takes a text for a formula.
FORMULA = ("=", "+", "-", "@", "\t", "\r")
RE_CHECKED = "re-checked"


@dataclass(frozen=True)
class Entry:
    """A line of the table: a row of a scoreboard, or what a check said once more."""

    learner: str
    row: Row
    result: str = ""


class Unusable(Exception):
    """A file that was handed in and cannot be used; the text says why."""


def learner_of(file: Path, folder: Path) -> str:
    """Whose a file is: the first folder below `folder`, else the file's own name."""
    parts = file.relative_to(folder).parts
    name = parts[0] if len(parts) > 1 else file.stem
    return os.fsencode(name).decode("utf-8", "replace")  # a name may hold bytes that are no text


def handed_in(folder: Path) -> tuple[list[Path], list[str]]:
    """The scoreboards and notebooks below a folder, and a sentence for each folder that is closed."""
    files, problems = [], []

    def closed(error: OSError) -> None:
        problems.append(f"{error.filename} was left out: {error.strerror}.")

    for place, folders, names in os.walk(folder, onerror=closed):
        folders[:] = sorted(name for name in folders if name != ".ipynb_checkpoints")
        files += [Path(place, name) for name in names if name.endswith((".json", ".ipynb"))]
    return sorted(files), problems


def collect(folder: Path) -> tuple[list[Entry], list[str]]:
    """Every learner's rows, and a sentence for each file that cannot be used."""
    entries: list[Entry] = []
    files, problems = handed_in(folder)
    seen: dict[tuple[str, str], str] = {}
    for file in files:
        learner, name = learner_of(file, folder), file.relative_to(folder).as_posix()
        try:
            found = entries_of(file, learner)
            if found and (learner, file.suffix) in seen:
                first = seen[learner, file.suffix]
                raise Unusable(f"{learner} has {first} already; keep one of the two")
        except Unusable as reason:
            problems.append(f"{name} was left out: {reason}.")
            continue
        if found:
            seen[learner, file.suffix] = name
        entries += found
    return entries, problems


def entries_of(file: Path, learner: str) -> list[Entry]:
    """The lines of one file; none for a notebook that is not lab 99's.

    Raises:
        Unusable: it is damaged, or none of the course's.
    """
    if file.suffix == ".json":
        return [Entry(learner, row, result_of(row.verdict, row.score)) for row in read(file)]
    notebook = read_notebook(file)
    return re_checked(notebook, learner) if is_capstone(notebook) else []


def read(file: Path) -> list[Row]:
    """The rows of a scoreboard.

    Raises:
        Unusable: it is damaged, or none of the course's.
    """
    none = "it is no scoreboard of the course; ask for my_labs/scoreboard.json"
    check_file(file, MOST_BYTES, "a scoreboard has some kB")
    try:
        rows = read_rows(file)
    except ScoreboardError as error:
        cause = error.__cause__
        reason = (
            f"{cause.strerror}; ask for my_labs/scoreboard.json"
            if isinstance(cause, OSError)
            else none
        )
        raise Unusable(reason) from error
    except RecursionError as error:
        raise Unusable(none) from error
    for row in rows:
        if not all(map(is_amount, (row.peak_bytes, row.step_seconds))):
            raise Unusable(f"the row {row.what!r} of lesson {row.lesson!r} holds no amount")
        said = row.lesson, row.what, row.evidence, row.verdict, row.score, row.at
        if not all(map(is_text, said)):
            raise Unusable(f"the row {row.what!r} of lesson {row.lesson!r} holds half a letter")
    if not rows:
        raise Unusable("it has no rows yet")
    return rows


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


def re_checked(notebook: NotebookNode, learner: str) -> list[Entry]:
    """What lab 99's checks say of a notebook's answers, its cells run here once more.

    Raises:
        Unusable: it cannot be examined.
    """
    print(f"checking {learner}'s answers to lab 99 ...", flush=True)
    try:
        return [entry_of(learner, found) for found in examine(notebook)]
    except HandInError as error:
        raise Unusable(str(error)) from error


def entry_of(learner: str, found: Examined) -> Entry:
    """One case of lab 99 as a line of the table."""
    row = Row("99", f"{found.case}, seed {found.seed}", None, None, RE_CHECKED)
    return Entry(learner, row, result_of(found.status, found.score))


def result_of(verdict: str, score: str) -> str:
    """What a check said, in one text: "correct: 13 calls, par 14"."""
    return ": ".join(filter(None, [verdict, score]))


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


def write(entries: Iterable[Entry], target: TextIO) -> None:
    """Write the CSV, ordered by lesson, what was done, and bytes: the leanest first."""

    def place(entry: Entry) -> tuple[str, str, float]:
        return entry.row.lesson, entry.row.what, entry.row.peak_bytes or math.inf

    table = csv.writer(target, lineterminator="\n")
    table.writerow(HEAD)
    for entry in sorted(entries, key=place):
        row = entry.row
        texts = [plain(text) for text in (entry.learner, row.lesson, row.what)]
        table.writerow(
            [
                *texts,
                row.peak_bytes,
                row.step_seconds,
                *map(plain, (row.evidence, entry.result, row.at)),
            ]
        )


def plain(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(FORMULA) else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the CSV; 1 if a file was left out, or nothing was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder with what was handed in")
    parser.add_argument(
        "--to", type=Path, default=ROOT / "build/scores.csv", help="default: build/scores.csv"
    )
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        print(
            f"{options.folder} is no folder. Put what was handed in into one, NAME.json or NAME.ipynb, and "
            "call: make scores FOLDER=that_folder",
            file=sys.stderr,
        )
        return 1
    entries, problems = collect(options.folder)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not entries:
        print(
            f"{options.folder} holds nothing to collect. Learners hand in my_labs/scoreboard.json, or "
            "their notebook of lab 99; name it after them.",
            file=sys.stderr,
        )
        return 1
    text = io.StringIO(newline="")
    write(entries, text)
    try:
        write_whole(options.to, text.getvalue().encode(errors="replace"))
    except OSError as error:
        print(f"{options.to} cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    learners = {entry.learner for entry in entries}
    print(f"{options.to}: {len(entries)} rows of {len(learners)} learners")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
