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
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from _handed_in import (  # noqa: E402
    Unusable,
    handed_in,
    learner_of,
    named_inside,
    printed,
    read,
    read_notebook,
    same,
)

from utils.files import write_whole  # noqa: E402
from utils.labs.scoreboard import CHECKED, Row  # noqa: E402
from utils.labs.verdict import Status  # noqa: E402
from utils.lessons.lesson_99.hand_ins import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    Examined,
    HandInError,
    examine,
    is_capstone,
)

HEAD = ("learner", "lesson", "what", "peak_bytes", "step_seconds", "evidence", "result", "at")
# With one of these in front, a spreadsheet takes a text for a formula; the last four are wide forms.
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
CORRECT = str(Status.CORRECT)
RE_CHECKED = "re-checked"


@dataclass(frozen=True)
class Entry:
    """A line of the table: a row of a scoreboard, or what a check said once more."""

    learner: str
    row: Row
    result: str = ""


def collect(folder: Path) -> tuple[list[Entry], list[str]]:
    """Every learner's rows, and a sentence for each file that cannot be used or is to be asked about."""
    entries: list[Entry] = []
    files, problems = handed_in(folder)
    everyone = {same(learner_of(file, folder)) for file in files}
    seen: dict[tuple[str, str], str] = {}
    for file in files:
        learner, name = learner_of(file, folder), printed(file.relative_to(folder).as_posix())
        key = same(learner), file.suffix.lower()
        try:
            found, others = entries_of(file, learner)
            if found and key in seen:
                raise Unusable(f"{printed(learner)} has {seen[key]} already; keep one of the two")
        except Unusable as reason:
            problems.append(f"{name} was left out: {reason}.")
            continue
        if found:
            seen[key] = name
        entries += found
        problems += [
            f"{name} is in the table as {printed(learner)}'s, and names {printed(other)} inside: ask whose it is."
            for other in sorted(others)
            if same(other) in everyone - {same(learner)}
        ]
    return entries, [*problems, *overclaimed(entries)]


def entries_of(file: Path, learner: str) -> tuple[list[Entry], set[str]]:
    """The lines of one file, and who is named in it; no lines for a notebook that is not lab 99's.

    Raises:
        Unusable: it is damaged, or none of the course's.
    """
    if file.suffix.lower() == ".json":
        rows = read(file)
        return [Entry(learner, row, result_of(row.verdict, row.score)) for row in rows], set()
    notebook = read_notebook(file)
    if not is_capstone(notebook):
        return [], set()
    return re_checked(notebook, learner), named_inside(notebook)


def overclaimed(entries: Sequence[Entry]) -> Iterator[str]:
    """A sentence for each learner whose scoreboard says more of lab 99 than its checks say once more."""
    again: dict[tuple[str, str], set[bool]] = {}
    for entry in (entry for entry in entries if entry.row.evidence == RE_CHECKED):
        case = same(entry.learner), entry.row.what.partition(", seed ")[0]
        again.setdefault(case, set()).add(entry.result.startswith(CORRECT))
    claimed: dict[str, list[str]] = {}
    for entry in (entry for entry in entries if entry.row.evidence == CHECKED):
        case = same(entry.learner), entry.row.what
        if entry.row.lesson == "99" and entry.row.verdict == CORRECT and again.get(case) == {False}:
            claimed.setdefault(entry.learner, []).append(entry.row.what)
    for learner, cases in claimed.items():
        yield (
            f"{printed(learner)}'s scoreboard says {CORRECT} of {', '.join(sorted(cases))} in lab 99, and "
            "the answer that was handed in, checked again, is not: the row re-checked counts."
        )


def re_checked(notebook: NotebookNode, learner: str) -> list[Entry]:
    """What lab 99's checks say of a notebook's answers, its cells run here once more.

    Raises:
        Unusable: it cannot be examined.
    """
    print(f"checking {printed(learner)}'s answers to lab 99 ...", flush=True)
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


def write(entries: Iterable[Entry], target: TextIO) -> None:
    """Write the CSV, ordered by lesson, what was done, and bytes: the leanest first."""

    def place(entry: Entry) -> tuple[str, str, float]:
        peak = entry.row.peak_bytes
        return entry.row.lesson, entry.row.what, math.inf if peak is None else peak

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
