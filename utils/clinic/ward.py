"""Patients of the out-of-memory clinic: training runs that go over a budget, and their cures.

A patient is a script of `utils/clinic/patients`: `build()` makes model and optimizer, `train(model,
optimizer, parts)` runs all of its steps and gives the losses. `examine` runs it once, from the first
step on, under the meter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import gc
import importlib
import inspect
import io
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import nn

from utils.checked import short
from utils.clinic.allocator_replay import Replay, replay, smallest_capacity
from utils.memory.budgets import Budget, OverBudgetError
from utils.memory.measurement import Measurement
from utils.memory.meter import measure
from utils.units import Phase, format_bytes

PATIENTS = (
    "kept_graph",
    "large_vocabulary",
    "fragmentation",
    "optimizer_doubles",
    "validation",
    "forgotten_reference",
    "resolution",
)
LOSS_TOLERANCE = 1e-5  # relative; fp32 in another order, and some steps of Adam enlarge that
Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
Train = Callable[..., list[float]]


class NothingToCureError(ValueError):
    """A patient that stays within its budget already."""


@dataclass(frozen=True)
class Patient:
    """A training run with a budget.

    `fragments` is True where the caching allocator's reserved bytes count, and not what is alive:
    its bytes are those of the smallest GPU on which the replayed allocator serves every request.
    """

    name: str
    limit_bytes: int
    build: Build
    train: Train
    complaint: str = ""
    fragments: bool = False
    diff: str = ""

    def treated(self, *, build: Build | None = None, train: Train | None = None) -> Patient:
        """The same patient with another `build` or `train`: a cure to be examined."""
        return dataclasses.replace(self, build=build or self.build, train=train or self.train)

    def edited(self, changes: Mapping[str, str], **names: Any) -> Patient:
        """The same patient with parts of its script replaced; `diff` shows the lines that differ.

        Args:
            changes: old text, which stands in the script once, and new text.
            names: what the new text uses and the script does not know.

        Raises:
            ValueError: a text does not stand in the script once.
        """
        script = inspect.getmodule(self.train)
        if script is None or not hasattr(script, "BUDGET_BYTES"):
            raise ValueError(f"{self.name} was treated already: edit the patient as it came in.")
        before = after = inspect.getsource(script)
        for old, new in changes.items():
            if before.count(old) != 1:
                raise ValueError(
                    f"{old!r} stands {before.count(old)} times in the script, not once."
                )
            after = after.replace(old, new)
        scope = {**vars(script), "__name__": f"{script.__name__} edited", **names}
        exec(compile(after, f"<{self.name}, edited>", "exec"), scope)
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
        diff = [line for line in lines if line[0] in "-+" and line[:3] not in ("---", "+++")]
        return dataclasses.replace(
            self, build=scope["build"], train=scope["train"], diff="\n".join(diff)
        )


@dataclass(frozen=True)
class Examination:
    """What one run of a patient showed.

    `run` is the meter's, `losses` are those of every step, `seconds` those of the metered run.
    """

    patient: Patient
    run: Measurement
    losses: tuple[float, ...]
    seconds: float

    @cached_property
    def bytes(self) -> int:
        """What counts against the budget: the peak, or the smallest GPU under the caching allocator."""
        return (
            smallest_capacity(self.run.timeline) if self.patient.fragments else self.run.peak_bytes
        )

    @property
    def fits(self) -> bool:
        return self.bytes <= self.patient.limit_bytes

    @property
    def complaint(self) -> str:
        """The error that a device as large as the budget raises; "" if it raises none."""
        try:
            if self.patient.fragments:
                replay(self.run.timeline, self.patient.limit_bytes)
            else:
                Budget(self.patient.limit_bytes).check(self.run.timeline)
        except OverBudgetError as error:
            return str(error)
        return ""

    @property
    def last_step_ns(self) -> int:
        """When the last optimizer step ended; the run's end if there was none."""
        spans = self.run.timeline.spans
        return max(
            (s.end_ns for s in spans if s.phase is Phase.OPTIMIZER_STEP),
            default=self.run.timeline.end_ns,
        )

    def replayed(self, capacity_bytes: int | None = None) -> Replay:
        """The caching allocator after this run's requests, up to the last optimizer step.

        Raises:
            OverBudgetError: the capacity is too small.
        """
        return replay(self.run.timeline, capacity_bytes, self.last_step_ns)

    def same_losses(self, other: Examination) -> bool:
        """Whether all losses agree within `LOSS_TOLERANCE`."""
        return len(self.losses) == len(other.losses) and all(
            math.isclose(a, b, rel_tol=LOSS_TOLERANCE, abs_tol=1e-9)
            for a, b in zip(self.losses, other.losses, strict=True)
        )

    def __str__(self) -> str:
        limit, size = format_bytes(self.patient.limit_bytes), format_bytes(self.bytes)
        verdict = f"fits in {limit}" if self.fits else f"over its budget of {limit}"
        return f"{self.patient.name}: {size}, {verdict}" + (
            "" if self.fits else f"\n{self.complaint}"
        )


def admit(script: str | ModuleType) -> Patient:
    """A patient from a script: a module, or the name of one in `utils/clinic/patients`.

    Raises:
        ValueError: there is no patient of that name.
    """
    if isinstance(script, str):
        if script not in PATIENTS:
            raise ValueError(f"There is no patient {script!r}. There are {', '.join(PATIENTS)}.")
        script = importlib.import_module(f"utils.clinic.patients.{script}")
    quoted = (script.__doc__ or "").partition('"')[2].rpartition('"')[0]
    return Patient(
        name=script.__name__.rpartition(".")[2],
        limit_bytes=script.BUDGET_BYTES,
        build=script.build,
        train=script.train,
        complaint=" ".join(quoted.split()),
        fragments=getattr(script, "FRAGMENTS", False),
    )


def examine(patient: Patient) -> Examination:
    """Run all steps of a patient once under the meter, from the first step on."""
    with contextlib.redirect_stdout(io.StringIO()):
        found = _examined(patient)
    gc.collect()  # an exception's frames refer to themselves
    return found


def _examined(patient: Patient) -> Examination:
    model, optimizer = patient.build()
    losses: list[float] = []
    start = time.perf_counter()
    run = measure(
        lambda: losses.extend(patient.train(model, optimizer)),
        model=model,
        optimizer=optimizer,
        timed_steps=0,
        warmup_steps=0,
        host={},  # nothing before the run; a cure may put something there
        name=patient.name,
    )
    return Examination(patient, run, tuple(losses), time.perf_counter() - start)


def examine_over_budget(patient: Patient) -> Examination:
    """Examine a patient before its cure.

    Raises:
        NothingToCureError: it stays within its budget.
    """
    found = examine(patient)
    if found.fits:
        raise NothingToCureError(
            f"{patient.name} takes {format_bytes(found.bytes)} and stays within its budget of "
            f"{format_bytes(patient.limit_bytes)}: there is nothing to cure. Lower the budget first."
        )
    return found


def source_of(function: Callable[..., Any]) -> str:
    """The lines of a function as its script has them.

    Raises:
        ValueError: no script has them.
    """
    try:
        return inspect.getsource(function)
    except (TypeError, OSError) as error:
        raise ValueError(f"function is {short(function)}, whose lines are in no file.") from error


def numbered(source: str, first: int = 1) -> str:
    """The source with line numbers."""
    return "\n".join(
        f"{number:3}  {line}" for number, line in enumerate(source.splitlines(), first)
    )
