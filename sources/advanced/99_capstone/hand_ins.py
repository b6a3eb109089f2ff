"""Lab 99 once more, from a notebook that was handed in: its cells in a kernel, its answers here.

An answer that runs in the process of its check can change that check. Here the notebook's kernel
only writes down what it hands in, as JSON; the checks run in another process, which has loaded none
of the learner's code and builds no object from it but numbers, texts, lists, dicts and plans.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from utils.labs.checking import check
from utils.labs.kinds import as_number
from utils.labs.verdict import shown
from utils.planner import Lora, Plan
from utils.ranks.killable import run_to_outcome

from .cases import CASES, SEEDS
from .sitting import Sitting

ROOT = Path(__file__).resolve().parents[3]
CELL_SECONDS, NOTEBOOK_SECONDS = 300, 1800.0
CHECK_SECONDS = 600.0  # for all answers of a notebook
MOST_BYTES = 10**6  # fourteen answers have some kB
_PLANS: dict[str, type] = {"Plan": Plan, "Lora": Lora}
_IS = "is a"  # the key under which a plan's dict names its class
# The first cell of all: what follows finds the course that checks, not the learner's copy.
_FIRST = """import sys
sys.path.insert(0, {root!r})
from utils.lessons.lesson_99.hand_ins import note_answers
note_answers({file!r})
"""


class HandInError(Exception):
    """A notebook that cannot be examined; the text says why."""


@dataclass(frozen=True)
class Examined:
    """What the check says of one answer, with the seed of its case."""

    case: str
    seed: int
    status: str
    score: str = ""


def is_capstone(notebook: NotebookNode) -> bool:
    """Whether a notebook hands in answers to lab 99."""
    return any("sitting.hand_in(" in cell.source for cell in notebook.cells)


def examine(notebook: NotebookNode) -> list[Examined]:
    """Run a notebook and check the last answer to each case and seed that it hands in.

    Raises:
        HandInError: it hands nothing in, or no kernel started, or the checks did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder, "answers.jsonl")
        try:
            _run(notebook, answers)
        except RuntimeError as error:  # jupyter_client's, where a kernel does not answer
            raise HandInError(f"no kernel could be started to run it ({error})") from error
        found = _read(answers)
    if not found:
        raise HandInError("run from top to bottom, it hands in no answer")
    outcome = run_to_outcome(_judged, found, timeout_seconds=CHECK_SECONDS)
    if outcome.failure is not None:
        raise HandInError(f"the checks of its answers {outcome.failure.what}")
    return outcome.value


def note_answers(file: str) -> None:
    """In the notebook's kernel: from now on, what a sitting is handed is also written to a file."""
    real: Callable[..., Any] = Sitting.hand_in

    def hand_in(self: Sitting, name: str, answer: Mapping[str, Any]) -> Any:
        if isinstance(answer, Mapping):
            entry = {"case": str(name), "answer": as_json({"seed": self.seed, **answer})}
            with open(file, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(entry) + "\n")
        return real(self, name, answer)

    Sitting.hand_in = hand_in


def as_json(value: Any) -> Any:
    """An answer in JSON's types; a plan as a dict that names its class, anything else as a text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if (number := as_number(value)) is not None:
        return number
    if isinstance(value, (tuple, list)):
        return [as_json(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): as_json(part) for key, part in value.items()}
    if isinstance(value, (Plan, Lora)):
        parts = {part.name: as_json(getattr(value, part.name)) for part in fields(value)}
        return {**parts, _IS: type(value).__name__}
    return getattr(value, "name", None) or shown(value)  # a framework is known by its name


def from_json(value: Any) -> Any:
    """The answer that `as_json` wrote.

    Raises:
        ValueError, TypeError: a plan that cannot be.
    """
    if isinstance(value, list):
        return tuple(map(from_json, value))
    if not isinstance(value, dict):
        return value
    parts = {key: from_json(part) for key, part in value.items() if key != _IS}
    return _PLANS[value[_IS]](**parts) if value.get(_IS) in _PLANS else parts


def _run(notebook: NotebookNode, answers: Path) -> None:
    """Run all cells, whatever becomes of each; what was handed in before one never ended counts."""
    source = _FIRST.format(root=str(ROOT), file=str(answers))
    cells = [nbformat.v4.new_code_cell(source), *notebook.cells]
    # Without folders to look in, "python3" is ipykernel in this very Python.
    kernel = AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
    )
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout=CELL_SECONDS,
        allow_errors=True,
        extra_arguments=["--log-level=40"],
        resources={"metadata": {"path": str(ROOT / "labs/advanced")}},
    )
    notebook.cells = cells
    mine = {"COURSE_SCOREBOARD": str(answers.with_name("scoreboard.json")), "TQDM_DISABLE": "1"}
    end = time.monotonic() + NOTEBOOK_SECONDS
    ended = suppress(CellTimeoutError, DeadKernelError)
    with ended, client.setup_kernel(env=os.environ | mine, cleanup_kc=True):
        for position, cell in enumerate(cells):
            if time.monotonic() < end:
                client.execute_cell(cell, position)


def _read(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Case and answer, in JSON's types: the last to each case and seed, in the order of the cases."""
    if not file.is_file():
        return []
    if file.stat().st_size > MOST_BYTES:
        raise HandInError(f"its answers have over {MOST_BYTES // 10**6} MB")
    try:
        entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        last = {(e["case"], repr(e["answer"]["seed"])): (e["case"], e["answer"]) for e in entries}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise HandInError("what it wrote as its answers cannot be read") from error
    return [pair for name in CASES for pair in last.values() if pair[0] == name]


def _judged(answers: list[tuple[str, dict[str, Any]]]) -> list[Examined]:
    return [_judge(name, answer) for name, answer in answers]


def _judge(name: str, answer: dict[str, Any]) -> Examined:
    seed = answer["seed"] if answer["seed"] in SEEDS else 0
    try:
        value = from_json(answer)
    except (ValueError, TypeError, OverflowError) as error:
        return Examined(name, seed, "not yet", str(error))
    report = check(f"99.{name}", value)
    return Examined(name, seed, str(report.status), report.verdict.score or report.verdict.note)
