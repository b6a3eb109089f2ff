"""Case "sixteen_gb": how large a batch mixed precision allows, from a log of small ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from utils.labs.cases import judge, scored
from utils.labs.kinds import number, one_of, whole
from utils.labs.verdict import Verdict, correct
from utils.models import resnet
from utils.simulation import simulate
from utils.units import GIB, MIB, Evidence

from .sheet import Gains, Sheet

_RUNS: dict[int, tuple[int, str, int]] = {1: (18, "Adam", 2), 2: (34, "Adam", 4), 3: (18, "SGD", 3)}
LOGGED, DEVICE = (1, 128, 256), "V100-16GB"
HALVES = ("parameters", "gradients", "optimizer state", "activations")


@dataclass(frozen=True)
class TwoPrecisions:
    """Peaks of ResNet steps with the CIFAR stem.

    Attributes:
        seed: Whose.
        fp32_mib, amp_mib: Peak in MiB by images in the batch.
        budget_mib: What the job may take of its card.
    """

    seed: int
    fp32_mib: Mapping[int, float]
    amp_mib: Mapping[int, float]
    budget_mib: float

    def __str__(self) -> str:
        depth, optimizer, gib = _RUNS[self.seed]
        rows = [f"  {b:>4}: {self.fp32_mib[b]:8.1f} MiB in fp32, {self.amp_mib[b]:8.1f} MiB with autocast to fp16"
                for b in LOGGED]  # fmt: skip
        return "\n".join([
            f"ResNet-{depth} with the CIFAR stem trains with {optimizer}; the job may take {gib} GiB of its card.",
            "Peaks of a step, by images in the batch (simulated):",
            *rows, "What is the largest batch in each precision, how many MiB does autocast take off the peak at batch 1,",
            "and what is it that shrinks?",
        ])  # fmt: skip


def peak_mib(seed: int, images: int, dtype: torch.dtype | None) -> float:
    """The simulated peak of one step, in MiB."""
    depth, optimizer, _ = _RUNS[seed]
    low = dtype is not None

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = resnet(depth, stem="cifar")
        make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, optimizer)
        return model, make(
            model.parameters(), **({} if optimizer == "Adam" else {"lr": 0.1, "momentum": 0.9})
        )

    def step(model: nn.Module, used: torch.optim.Optimizer) -> None:
        pixels, labels = torch.randn(images, 3, 32, 32), torch.randint(0, 10, (images,))
        used.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.float16, enabled=low):
            loss = F.cross_entropy(model(pixels), labels)
        loss.backward()
        used.step()

    found = simulate(
        build, step, device=DEVICE, items=images, unit="images", name=f"{images} images"
    )
    return found.peak_bytes / MIB


@functools.cache
def data(seed: int) -> TwoPrecisions:
    """The log of a seed."""
    rows = [{b: peak_mib(seed, b, dtype) for b in LOGGED} for dtype in (None, torch.float16)]
    return TwoPrecisions(seed, *rows, budget_mib=_RUNS[seed][2] * GIB / MIB)


def largest(case: TwoPrecisions, peaks: Mapping[int, float], below: int = LOGGED[-2]) -> int:
    """The largest batch by a line through two rows of the log, the last and another."""
    last = LOGGED[-1]
    each = (peaks[last] - peaks[below]) / (last - below)
    return math.floor((case.budget_mib - peaks[last]) / each + last)


def _verdict(case: TwoPrecisions, answer: Mapping[str, Any]) -> Verdict:
    full, amp = largest(case, case.fp32_mib), largest(case, case.amp_mib)
    line = "At batch 1 the peak lies in the optimizer step, with no activations alive. Which rows lie on one line?"
    close = {"relative": 0.002, "expected": "images"}
    problem = (
        judge(answer["fp32 batch"], full, "the batch in fp32", **close,
              wrong={largest(case, case.fp32_mib, 1): line, case.budget_mib / (case.fp32_mib[LOGGED[-1]] / LOGGED[-1]): "The states do not grow."},
              nudge="MiB for each image from two rows that lie on one line; then what the budget leaves.")
        or judge(answer["amp batch"], amp, "the batch with autocast", **close,
                 wrong={largest(case, case.amp_mib, 1): line,
                        2 * full: "Twice would be right if all memory halved. The states do not."},
                 nudge="The same with the other column.")
        or judge(answer["saved at batch 1 MiB"], case.fp32_mib[1] - case.amp_mib[1], "what is saved at batch 1", within=0.5,
                 expected="MiB", nudge="Read the first row. Where is that peak?")
        or judge(answer["what shrinks"], "activations", "what shrinks", expected="one of the four",
                 nudge="Parameters, their gradients and Adam's moments stay in fp32 under autocast.")
    )  # fmt: skip
    return problem or correct(
        "the states stay, the activations shrink", score=scored(answer["amp batch"], amp, "images")
    )


def _gains(case: TwoPrecisions, answer: Mapping[str, Any]) -> Gains:
    saved = (case.fp32_mib[LOGGED[-1]] - case.amp_mib[LOGGED[-1]]) * MIB
    return Gains(bytes_saved=saved, evidence=Evidence.SIMULATED)


SHEET = Sheet(
    "Twice the batch", "beginner", "what mixed precision saves, and where",
    "A ResNet overflows its card as the batch grows: what does mixed precision change?", ("02",),
    {"fp32 batch": whole("a number of images"), "amp batch": whole("a number of images"),
     "saved at batch 1 MiB": number("a number of MiB"), "what shrinks": one_of(*HALVES, what="a part of memory")},
    data, _verdict, _gains,
)  # fmt: skip
