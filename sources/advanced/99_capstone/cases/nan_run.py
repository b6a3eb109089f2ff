"""Case "nan_run": a mixed-precision run that turns to NaN; the cure is run."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from utils.labs.cases import judge
from utils.labs.faulty_runs import _naive_loss, run
from utils.labs.kinds import flag, one_of, whole
from utils.labs.verdict import Verdict, correct, not_yet
from utils.techniques.numerics_recorder import StepRecord

from .sheet import Gains, Sheet

_FAULTS: dict[int, dict[str, Any]] = {
    1: {"spoil": (11, 5), "init_scale": 2.0**24},
    2: {"loss": _naive_loss, "lr": 0.005},
    3: {"lr": 20.0},
}
LEARNING_RATE = 0.1  # of a run that asks for none
CAUSES = ("NaN in the data", "loss overflows", "learning rate", "scale grows without end")
_RIGHT = {1: "NaN in the data", 2: "loss overflows", 3: "learning rate"}
CURES: dict[str, dict[str, Any]] = {
    "drop the broken rows": {"spoil": None},
    "loss in log space": {"loss": F.cross_entropy},
    "learning rate / 200": {},
    "smaller first scale": {"init_scale": 2.0**8},
    "clip after unscale_": {"clip": 1.0},
}
_TOLD = {
    "NaN in the data": "Look at where the first number that is not finite stands: did a module make it, or receive it?",
    "loss overflows": "All modules were finite in the first bad step. What came after them?",
    "learning rate": "The fp32 twin has the same fault. Which cause does not ask about the precision?",
}


@dataclass(frozen=True)
class NanRun:
    """Records of one run, and of its twin in fp32.

    Attributes:
        seed: Whose.
        fp16, fp32: Step by step, as a `NumericsRecorder` wrote them.
    """

    seed: int
    fp16: tuple[StepRecord, ...]
    fp32: tuple[StepRecord, ...]

    def __str__(self) -> str:
        rows = [
            f"{'step':>4} {'loss':>9} {'scale':>9}  {'':7} {'fp32 loss':>9}  first that is not finite"
        ]
        for low, full in zip(self.fp16, self.fp32, strict=True):
            skipped = "skipped" if low.skipped else ""
            rows.append(f"{low.step:>4} {low.loss:>9.3g} {low.scale or 0:>9.3g}  {skipped:7} "
                        f"{full.loss:>9.3g}  {low.first or ''}")  # fmt: skip
        return "\n".join(["A network trains with autocast to fp16 and a GradScaler. It turns to NaN.",
                          "Its recorder, and that of the same run in fp32 (measured):", *rows,
                          "What is the cause, in which step is the forward pass or the loss first not finite (a scale that",
                          "is too large spoils gradients alone), does the fp32 run break so too, and what cures it?"])  # fmt: skip

    def treated(self, cure: str) -> list[StepRecord]:
        """The same run with one of `CURES`."""
        fault = _FAULTS[self.seed]
        slower = (
            {"lr": fault.get("lr", LEARNING_RATE) / 200} if cure == "learning rate / 200" else {}
        )
        return run(**{**fault, **CURES[cure], **slower})


@functools.cache
def data(seed: int) -> NanRun:
    """The run of a seed."""
    fault = _FAULTS[seed]
    return NanRun(seed, tuple(run(**fault)), tuple(run(torch.float32, **fault)))


def is_broken(record: StepRecord) -> bool:
    """Whether a step is worse than a scale that was too large: its forward pass or loss is not finite."""
    found = record.first
    forward = found is not None and found.kind in ("input", "output", "loss")
    return not math.isfinite(record.loss) or forward


def first_broken(records: tuple[StepRecord, ...]) -> int:
    """The first step whose forward pass or loss is not finite; -1 if there is none."""
    return next((r.step for r in records if is_broken(r)), -1)


def heals(records: list[StepRecord]) -> bool:
    """Whether every forward pass is finite, the last steps are taken, and the loss falls."""
    finite = not any(map(is_broken, records))
    return (
        finite and not any(r.skipped for r in records[-3:]) and records[-1].loss < records[0].loss
    )


def _verdict(case: NanRun, answer: Mapping[str, Any]) -> Verdict:
    right, step = _RIGHT[case.seed], first_broken(case.fp16)
    twin = first_broken(case.fp32) >= 0
    skipped = next((r.step for r in case.fp16 if r.skipped), -1)
    problem = (
        judge(answer["cause"], right, "the cause", expected="another one",
              wrong={"scale grows without end": "A scaler halves after each overflow and skips that step: look "
                     "at its column. What does it do in a healthy run?"}, nudge=_TOLD[right])
        or judge(answer["step"], step, "the step", expected="the first that is broken",
                 wrong={} if skipped in (-1, step) else {
                     skipped: "That step was skipped because the scale was too large: the scaler's daily work."},
                 nudge="The first step with an infinity or NaN in input, output or loss. Gradients alone are the scaler's.")
        or judge(answer["fp32 breaks too"], twin, "the twin in fp32", expected="a look at its column",
                 nudge="A fault that fp32 has as well is none of precision.")
    )  # fmt: skip
    if problem:
        return problem
    after = case.treated(answer["cure"])
    if not heals(after):
        bad = next((r.step for r in after if is_broken(r)), after[-1].step)
        return not_yet(f"with {answer['cure']!r} the run is not healed", got=f"step {bad}: {after[bad].first or 'no progress'}",
                       nudge="Run it: case.treated(cure). Does it act on the cause, or on what follows from it?")  # fmt: skip
    return correct(f"{right}, and the cured run ends at a loss of {after[-1].loss:.2f}")


def _gains(case: NanRun, answer: Mapping[str, Any]) -> Gains:
    return Gains()


SHEET = Sheet(
    "A run that turns to NaN", "beginner", "debugging mixed precision",
    "Training with AMP turns to NaN: how do you debug it?", ("03",),
    {"cause": one_of(*CAUSES, what="a cause"), "step": whole("the number of a step"),
     "fp32 breaks too": flag(), "cure": one_of(*CURES, what="a cure")},
    data, _verdict, _gains,
)  # fmt: skip
