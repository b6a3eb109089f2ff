"""Small faults put into the solutions of all labs: `make soak` tries that checks tell them.

python tools/mutants.py             every exercise
python tools/mutants.py 07 16.choose   these lessons and exercises alone

A mutant differs from the solution by one operator, constant, condition, place of an argument, or by a
statement that is left out. One that passes the check is either as right as the solution, and stands in
`mutants.csv` with the reason, or the check is too weak: then the reason begins with "open: ". No check may fail by itself. Each answer runs
in a process of its own, which is ended after `LIMIT_SECONDS`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import csv
import importlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("labs", "shared"))]

from _mutations import in_solution, mutations  # noqa: E402
from lab_answers import (  # noqa: E402  # pyright: ignore[reportMissingImports]  # of tests/
    exercises_of_labs,
    solution_with,
)

from utils.labs import check  # noqa: E402
from utils.labs.verdict import Status  # noqa: E402

KNOWN = Path(__file__).with_name("mutants.csv")
LIMIT_SECONDS = 10.0
OPEN = "open: "  # begins the reason of one that is wrong, and names the case that would tell it


@dataclass(frozen=True)
class Mutant:
    """A solution with one fault, and its verdict.

    Attributes:
        exercise: "01.state_bytes".
        fault: The statement before and after.
        status: Of its verdict.
        seconds: That the verdict took.
    """

    exercise: str
    fault: str
    status: Status
    seconds: float


def known_reasons() -> dict[tuple[str, str], str]:
    """Why mutants pass, by exercise and fault."""
    with KNOWN.open(encoding="utf-8", newline="") as file:
        return {(row["exercise"], row["fault"]): row["why"] for row in csv.DictReader(file)}


def tried(exercise: str) -> Iterator[Mutant]:
    """Each mutant of an exercise, with its verdict."""
    checks = importlib.import_module(f"utils.lessons.lesson_{exercise.partition('.')[0]}.checks")
    if hasattr(checks, "TIMEOUT_SECONDS"):  # of ranks, which the learner's code runs on
        vars(checks)["TIMEOUT_SECONDS"] = LIMIT_SECONDS
    for fault, answer in _answers(exercise):
        start = time.perf_counter()
        report = check(exercise, answer, timeout_seconds=LIMIT_SECONDS)
        yield Mutant(exercise, fault, report.status, time.perf_counter() - start)


def _answers(exercise: str) -> Iterator[tuple[str, Any]]:
    """Faults, and the answers that have them; a fault that no longer runs makes no answer."""

    def changed(statements: list[ast.stmt]) -> list[ast.stmt]:
        found.extend(mutations(statements, inside))
        return statements

    inside = in_solution(exercise.partition(".")[0])
    found: list[tuple[str, Sequence[ast.stmt]]] = []
    solution_with(exercise, changed)
    for fault, statements in found:
        try:
            answer = solution_with(exercise, lambda _, put=statements: copy.deepcopy([*put]))
        except Exception:  # noqa: BLE001  # refused before there is an answer to check
            continue
        yield fault, answer


def _chosen(wanted: Sequence[str]) -> list[str]:
    every = exercises_of_labs()
    return [n for n in every if not wanted or n in wanted or n.partition(".")[0] in wanted]


def main(wanted: Sequence[str]) -> int:
    """Print a row for each exercise, and what is not known; 1 if there is any."""
    reasons, unknown = known_reasons(), []
    print(f"{'exercise':<28}{'mutants':>8}{'refused':>8}{'passed':>8}{'failed':>8}{'seconds':>9}")
    for exercise in _chosen(wanted):
        rows = list(tried(exercise))
        count = Counter(row.status for row in rows)
        passed, failed = count[Status.CORRECT], count[Status.CHECK_FAILED]
        seconds = sum(row.seconds for row in rows)
        print(
            f"{exercise:<28}{len(rows):>8}{len(rows) - passed - failed:>8}{passed:>8}{failed:>8}{seconds:>9.1f}",
            flush=True,
        )
        unknown += [
            row
            for row in rows
            if row.status is Status.CHECK_FAILED
            or (row.status is Status.CORRECT and (exercise, row.fault) not in reasons)
        ]
        for row in unknown:
            if row.exercise == exercise:
                print(f"  {row.status.value}: {row.fault}", flush=True)
    owed = [fault for fault, why in reasons.items() if why.startswith(OPEN)]
    print(f"{len(owed)} are known to pass a check that should tell them: a case is missing")
    print(f"{len(unknown)} mutants passed, or broke their check, and are not in {KNOWN.name}")
    return int(bool(unknown))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wanted", nargs="*", help="lessons and exercises; all if left out")
    sys.exit(main(parser.parse_args().wanted))
