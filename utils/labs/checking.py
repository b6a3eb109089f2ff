"""`check("01.adam_states", answer)`: finds the check, runs it, and always answers."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from utils.labs.cases import Exercise, Question
from utils.labs.kinds import NO_RETURN
from utils.labs.scoreboard import ScoreboardError, note
from utils.labs.stubs import MOST_NESTED, functions_of, parts_of, untouched
from utils.labs.verdict import Report, Status, Verdict, check_failed, not_yet
from utils.lessons import SOURCES, folders
from utils.ranks.killable import run_to_outcome

Check = Callable[[Any], Verdict]
# Of a right answer on a busy laptop: lab 10's take six seconds of a processor.
TIMEOUT_SECONDS = 30.0
STARTS_RANKS = "starts_ranks"
_GRADIENTS_OFF = (
    "torch.set_grad_enabled(False) holds for all that follows, in the whole process. "
    "`with torch.no_grad():` ends by itself, also where its lines raise."
)
_NOTHING_LEFT = (
    "next(...) found nothing left. Give it a default, or ask first whether there is more."
)
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
_NOT_LEARNERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], SOURCES, *_LIBRARIES)
)


def check(name: str, answer: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Report:
    """Check an answer to an exercise, such as `check("01.adam_states", adam_states)`.

    An answer that can be called runs in a process of its own: a crash or an endless loop ends in
    a "not yet", and the kernel lives on. The verdict is kept on the scoreboard.

    Raises:
        ValueError: there is no exercise of that name; the message offers the nearest.
    """
    report = _report(name, answer, timeout_seconds)
    try:
        note(report)
    except ScoreboardError as error:
        print(error)
    return report


def _report(name: str, answer: Any, timeout_seconds: float) -> Report:
    function = find(name)
    if reason := untouched(answer):
        return Report(name, Verdict(Status.NOT_ATTEMPTED, f"{reason}."))
    if not _callables_in(answer) or getattr(function, STARTS_RANKS, False):
        return Report(name, run_check(function, answer))
    return _check_in_process(name, function, answer, timeout_seconds)


def starts_ranks(function: Check) -> Check:
    """Mark a check that runs the learner's code on ranks, and nowhere else.

    It stays in the kernel's process, from which ranks start in a fraction of a second: they are
    processes of their own, with a timeout of their own.
    """
    setattr(function, STARTS_RANKS, True)
    return function


def find(name: str) -> Check:
    """The check of an exercise.

    Raises:
        ValueError: there is none of that name.
    """
    number, _, exercise = str(name).partition(".")
    if number not in lab_numbers():
        raise ValueError(
            f"{name!r} names no lab. Write number and exercise, such as '01.adam_states'; "
            f"there are labs {', '.join(lab_numbers()) or 'none yet'}."
        )
    checks = checks_of(number)
    if exercise not in checks:
        near = difflib.get_close_matches(exercise, checks, cutoff=0.4)
        offers = ", ".join(f"{number}.{match}" for match in near or checks)
        hint = f"Did you mean {offers}?" if near else f"It has {offers}."
        raise ValueError(f"Lab {number} has no exercise {exercise!r}. {hint}")
    return checks[exercise]


def lab_numbers() -> list[str]:
    """The labs that have checks: "01" where that lesson's folder has a `checks.py`."""
    return [number for number, folder in folders().items() if (folder / "checks.py").is_file()]


def checks_of(number: str) -> dict[str, Check]:
    """The checks of a lab by exercise: its module's questions, and its functions of one answer."""
    module = importlib.import_module(f"utils.lessons.lesson_{number}.checks")
    found = {name: value for name, value in sorted(vars(module).items()) if name[0] != "_"}
    return {name: value for name, value in found.items() if _is_check(value, module.__name__)}


def _is_check(value: Any, module: str) -> bool:
    if isinstance(value, (Question, Exercise)):
        return True
    if not inspect.isfunction(value):
        return False
    is_own = value.__module__ == module or hasattr(value, "kind")  # `takes` marks a check as one
    return is_own and len(inspect.signature(value).parameters) == 1


def run_check(function: Check, answer: Any) -> Verdict:
    """The check's verdict; what the learner's code raises becomes a "not yet".

    What the check's own code raises becomes a "check failed": the learner is not to look for a
    fault that is the course's. Gradients that the answer left switched off are switched on again:
    whatever the check found without them, that is what it says.
    """
    had_gradients = torch.is_grad_enabled()
    try:
        verdict = function(answer)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception  # noqa: BLE001
        verdict = _verdict_on(error, function, answer)
    if torch.is_grad_enabled() == had_gradients:
        return verdict
    torch.set_grad_enabled(had_gradients)
    return not_yet("gradients are off after your function has run", nudge=_GRADIENTS_OFF)


def _check_in_process(name: str, function: Check, answer: Any, timeout_seconds: float) -> Report:
    try:
        outcome = run_to_outcome(run_check, function, answer, timeout_seconds=timeout_seconds)
    except TypeError as error:  # cannot be sent there
        return Report(name, not_yet(str(error)))
    except RuntimeError as error:
        return Report(name, check_failed(f"no process could be started to run it in. {error}"))
    if outcome.failure is None:
        return Report(name, outcome.value, outcome.output)
    nudge = "Which loop in it may never end?" if outcome.failure.kind == "timeout" else ""
    return Report(name, not_yet(f"your code {outcome.failure.what}", nudge=nudge), outcome.output)


def _callables_in(answer: Any, depth: int = MOST_NESTED) -> list[Callable[..., Any]]:
    if isinstance(answer, (tuple, list, dict)):
        parts = parts_of(answer) if depth else ()
        return [found for part in parts for found in _callables_in(part, depth - 1)]
    return [answer] if callable(answer) else []


def _verdict_on(error: BaseException, function: Check, answer: Any) -> Verdict:
    """A "not yet" with the innermost line of the learner's own code, or a "check failed"."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    code = getattr(inspect.unwrap(function), "__code__", check.__code__)
    others = ("<frozen", code.co_filename, *_NOT_LEARNERS)
    for raised in _causes(error):
        frames = traceback.extract_tb(raised.__traceback__)
        if learners := [frame for frame in frames if not frame.filename.startswith(others)]:
            line, what = learners[-1], "".join(traceback.format_exception_only(raised)).strip()
            where = f"line {line.lineno}, in {line.name}: {line.line}"
            nudge = _NOTHING_LEFT if isinstance(raised, StopIteration) else ""
            return not_yet(f"your code raised {what}", got=where, nudge=nudge)
    if _comes_from_a_call(error, answer, others):
        return not_yet(f"your answer could not be used: {summary}")
    if _callables_in(answer) and "'NoneType' object" in summary:
        return not_yet(f"your answer could not be used: {summary}", nudge=NO_RETURN)
    tail = error.__traceback__ and error.__traceback__.tb_next  # without run_check
    return check_failed(
        f"{summary}. Compare your answer's form with what the exercise asks for: its type, its "
        "keys, what it returns. If it is right, the fault is the course's: please report it with "
        "the lines below.",
        traceback="".join(traceback.format_exception(type(error), error, tail)).strip(),
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised from: a generator of ours makes another of StopIteration."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _comes_from_a_call(error: BaseException, answer: Any, others: tuple[str, ...]) -> bool:
    """Whether calling the answer raised this, though no line of the learner's did.

    Arguments that do not fit are refused before the first line; and a function that is not the
    learner's own, such as `len`, has no line to show.
    """
    called = _callables_in(answer)
    own = [function for one in called for function in functions_of(one)]
    if called and not any(not f.__code__.co_filename.startswith(others) for f in own):
        return True
    named = tuple(f"{f.__qualname__}(" for f in own)
    named += tuple(f"{one.__qualname__}(" for one in called if isinstance(one, type))
    return isinstance(error, TypeError) and str(error).startswith(named)
