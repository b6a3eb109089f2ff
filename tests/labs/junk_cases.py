"""Each public function with junk for each argument, and what came of it.

`python tests/labs/junk_cases.py [NAME ...]` prints what was answered by Python's own errors. Run in a
process of its own: some of what is called starts processes, or ends by an alarm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import io
import linecache
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = {Path(__file__).name, "junk_arguments.py"}
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402

matplotlib.use("agg")

from junk_arguments import JUNK, good, warm_up, worker  # noqa: E402

from utils.lessons import folders  # noqa: E402

PACKAGES = (
    "planner", "views", "memory", "simulation", "techniques", "ranks", "traffic", "models", "data",
    "catalog", "clinic", "labs",
)  # fmt: skip
LEAVES = ("best_interval_seconds", "working_share", "waiting_seconds", "checkpoint_bytes")
LONGEST_SECONDS, ALARM_SECONDS = 8, 60  # what is slow, and what is stopped

# What goes into the learner's own model as it is, and what raises there.
HANDED_ON = {
    "micro_batches": "nn/modules",
    "inputs": "nn/modules",
    "args": "nn/modules",
    "kwargs": "nn/modules",
}
# Their time is that of importing torch, and ends by their own limit.
STARTS_A_SCRIPT = ("run_loader", "run_ranks", "run_small")


@dataclasses.dataclass
class Found:
    """What came of one call: "fine", "sentence", "raw" or "slow"."""

    name: str
    parameter: str
    junk: str
    kind: str
    text: str = ""
    named: bool = False


class TooLongError(BaseException):
    """The alarm."""


def of_lessons() -> Iterator[str]:
    """The modules in lessons' folders that check what comes into them."""
    for number, folder in folders().items():
        for path in sorted(folder.rglob("*.py")):
            if "\ncheck_public(globals())" in path.read_text(encoding="utf-8"):
                inner = ".".join(path.relative_to(folder).with_suffix("").parts)
                yield f"utils.lessons.lesson_{number}.{inner}".removesuffix(".__init__")


@functools.cache
def public() -> dict[str, Any]:
    """What is public, by name: "utils.search", "utils.planner.stage_bytes"."""
    found: dict[int, tuple[str, Any]] = {}
    for package in ("utils", *(f"utils.{name}" for name in PACKAGES), *of_lessons()):
        home = importlib.import_module(package)
        for name in home.__all__:
            thing = getattr(home, name)
            if callable(thing) and not _is_made_otherwise(thing):
                found.setdefault(id(thing), (f"{package}.{name}", thing))
    goodput = importlib.import_module("utils.planner.goodput")
    rows = dict(found.values())
    return rows | {f"utils.planner.goodput.{name}": getattr(goodput, name) for name in LEAVES}


def _is_made_otherwise(thing: Any) -> bool:
    others = BaseException | enum.Enum | tuple
    return inspect.ismodule(thing) or (inspect.isclass(thing) and issubclass(thing, others))


def arguments(name: str, thing: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters by name, and fitting values of those that are needed."""
    parameters = dict(inspect.signature(thing).parameters)
    values, short = {}, name.rpartition(".")[2]
    for key, p in parameters.items():
        if f"{short}.{key}" in good():
            values[key] = good()[f"{short}.{key}"]
        elif p.default is p.empty and p.kind in (
            p.POSITIONAL_OR_KEYWORD,
            p.KEYWORD_ONLY,
            p.POSITIONAL_ONLY,
        ):
            text = (
                p.annotation
                if isinstance(p.annotation, str)
                else getattr(p.annotation, "__name__", "")
            )
            values[key] = good().get(text, None if "None" in text else worker)
    return parameters, values


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TooLongError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again: a callback may swallow the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def called(thing: Any, parameter: inspect.Parameter, value: Any, others: dict[str, Any]) -> None:
    values = {key: other for key, other in others.items() if key != parameter.name}
    if parameter.kind is parameter.VAR_POSITIONAL:
        places = [
            values.pop(p.name)
            for p in inspect.signature(thing).parameters.values()
            if p.kind == 1 and p.name in values
        ]
        answer = thing(*places, value, **values)
    elif parameter.kind is parameter.VAR_KEYWORD:
        answer = thing(**values, junk=value)
    else:
        answer = thing(**values, **{parameter.name: value})
    if isinstance(answer, contextlib.AbstractContextManager) and not isinstance(answer, type):
        with contextlib.suppress(AttributeError), answer:
            pass
    elif inspect.isgenerator(answer):
        for _ in zip(range(3), answer, strict=False):
            pass


def is_ours(file: str) -> bool:
    """Whether a file is of the engine, of its evidence or of a lesson."""
    return any(str(ROOT / house) in file for house in ("utils", "evidence", "sources", "tools"))


def is_its_own(error: BaseException, parameter: str, junk: Any) -> bool:
    """Whether a learner's own function raised the error: junk that was called, or one that got it."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [n for n, frame in enumerate(frames) if is_ours(frame.filename)]
    if not own:
        return False
    line = linecache.getline(frames[own[-1]].filename, frames[own[-1]].lineno or 0)
    called_back = any(Path(frame.filename).name in HERE for frame in frames[own[-1] :])
    if (error_at := HANDED_ON.get(parameter)) and any(error_at in f.filename for f in frames):
        return True
    return called_back or (callable(junk) and re.search(rf"\b{parameter}\b", line) is not None)


def judged(error: BaseException, parameter: str) -> tuple[str, str, bool]:
    """Whether the project raised the error itself, the error in short, and whether it names the argument."""
    frames = traceback.extract_tb(error.__traceback__)
    last, text = frames[-1], str(error)
    own = is_ours(last.filename)
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    named = parameter in text
    said = own and line.startswith("raise")
    where = f"{Path(last.filename).name}:{last.lineno}"
    return (
        "sentence" if said else "raw",
        f"{type(error).__name__}: {text[:150]!r} at {where}",
        named,
    )


def tried(
    name: str, thing: Any, parameter: inspect.Parameter, junk: str, values: dict[str, Any]
) -> Found:
    """One call."""
    start = time.monotonic()
    kind, text, named = "fine", "", True
    try:
        with (
            within(ALARM_SECONDS),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            called(thing, parameter, JUNK[junk](), values)
    except TooLongError as error:
        kind, text = "slow", str(traceback.extract_tb(error.__traceback__)[-1])
    except Exception as error:  # noqa: BLE001 - whatever a call raises is what is judged
        kind, text, named = judged(error, parameter.name)
        if kind == "raw" and is_its_own(error, parameter.name, JUNK[junk]()):
            kind = "own"
    except SystemExit:
        kind, text = "raw", "SystemExit"
    if time.monotonic() - start > LONGEST_SECONDS and thing.__name__ not in STARTS_A_SCRIPT:
        kind = "slow"
    matplotlib.pyplot.close("all")
    return Found(name, parameter.name, junk, kind, text, named)


def swept(names: list[str], share: float = 1.0) -> Iterator[Found]:
    """All calls, or a share of them: the same ones, whatever else is public."""
    for name, thing in public().items():
        if names and not any(name == asked or name.endswith(f".{asked}") for asked in names):
            continue
        parameters, values = arguments(name, thing)
        for parameter in parameters.values():
            chosen = random.Random(f"{name} {parameter.name}")
            for junk in JUNK:
                if chosen.random() < share:
                    found = tried(name, thing, parameter, junk, values)
                    # The first call of a kind may load a library, on a machine that is busy.
                    again = found.kind == "slow"
                    yield tried(name, thing, parameter, junk, values) if again else found


def main(names: list[str]) -> int:
    import matplotlib.pyplot  # noqa: F401

    share = float(os.environ.get("JUNK_SHARE", "1"))
    folder = tempfile.mkdtemp()
    # What is called keeps its files there, and not in the course.
    os.environ |= {"COURSE_SCOREBOARD": f"{folder}/scoreboard.json", "CIFAR10_ROOT": folder}
    os.environ |= {"COURSE_OFFLINE": "1"}
    warm_up()
    os.chdir(folder)
    counts: Counter[str] = Counter()
    for found in swept(names, share):
        counts[found.kind] += 1
        counts["unnamed"] += found.kind == "sentence" and not found.named
        if found.kind in ("raw", "slow"):
            print(found.kind, found.name, found.parameter, found.junk, "|", found.text, flush=True)
    print("TOTAL", sum(counts.values()) - counts["unnamed"], dict(counts))
    return int(counts["raw"] + counts["slow"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
