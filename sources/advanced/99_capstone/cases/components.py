"""Case "components": take a log of peaks apart, and name the technique for each part."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.labs.cases import judge, scored
from utils.labs.kinds import number, one_of, whole
from utils.labs.verdict import Verdict, correct
from utils.planner import Batch, Cluster, Estimate, Plan, estimate
from utils.units import GIB

from .sheet import Gains, Sheet

_RUNS = {  # at lengths where CUDA's context costs a sequence of the batch
    1: ("gpt2-774m", "RTX 4090", 960, "deepspeed"),
    2: ("opt-1.3b", "A100-40GB", 832, "fp32"),
    3: ("tinyllama-1.1b", "A100-40GB", 2048, "fsdp"),
}
_LOGGED = (1, 2, 4, 6)
TECHNIQUES = ("8-bit optimizer", "checkpointing", "step in backward", "frozen and quantized base")
RIGHT = {
    "parameters": "frozen and quantized base",
    "gradients": "step in backward",
    "optimizer state": "8-bit optimizer",
    "activations": "checkpointing",
}


@dataclass(frozen=True)
class PeakLog:
    """Peaks of one training step on one GPU, by batch.

    Attributes:
        model, gpu: What was trained, on what.
        peak_gib: `max_memory_allocated` by sequences in the batch, in GiB.
        phase: When each of these peaks was.
        card_gib, context_gib: Memory of the card, and what the driver and CUDA keep of it.
    """

    model: str
    gpu: str
    peak_gib: Mapping[int, float]
    phase: Mapping[int, str]
    card_gib: float
    context_gib: float

    def __str__(self) -> str:
        rows = [
            f"  {b:>3}: peak {gib:6.2f} GiB, in: {self.phase[b]}"
            for b, gib in self.peak_gib.items()
        ]
        return "\n".join(
            [
                f"{self.model} trains on one {self.gpu} of {self.card_gib:.2f} GiB with Adam. CUDA's context takes "
                f"{self.context_gib:.2f} GiB.",
                "The log, by sequences in the batch (predicted):",
                *rows,
                "How many GiB stay whatever the batch, how many come with each sequence, what is the largest batch, and which",
                "technique takes most off each part?",
            ]
        )


def at_batch(seed: int, sequences: int) -> Estimate:
    """One step of the seed's run at another batch."""
    model, gpu, length, framework = _RUNS[seed]
    return estimate(
        model,
        Cluster(gpu=gpu, nodes=1, gpus_per_node=1),
        Plan(micro_batch=sequences, framework=framework),
        Batch(sequences=sequences, sequence_length=length),
    )


@functools.cache
def data(seed: int) -> PeakLog:
    """The log of a seed."""
    rows = {b: at_batch(seed, b) for b in _LOGGED}
    first = rows[1]
    return PeakLog(
        _RUNS[seed][0],
        _RUNS[seed][1],
        {b: r.peak.allocated_bytes / GIB for b, r in rows.items()},
        {b: r.peak.phase for b, r in rows.items()},
        first.cluster.device.memory_bytes / GIB,
        first.peak.context_bytes / GIB,
    )


def _seed_of(log: PeakLog) -> int:
    return next(seed for seed, run in _RUNS.items() if run[0] == log.model)


def _line(log: PeakLog, a: int, b: int) -> tuple[float, float]:
    """GiB at no sequences, and for each of them, through two rows of the log."""
    slope = (log.peak_gib[b] - log.peak_gib[a]) / (b - a)
    return log.peak_gib[b] - b * slope, slope


def _verdict(log: PeakLog, answer: Mapping[str, Any]) -> Verdict:
    states, slope = _line(log, 4, 6)
    naive, steep = _line(log, 1, 2)
    room = (log.card_gib - log.context_gib - states) / slope
    bent = (
        "One of your rows has its peak in another phase or on another line. Which rows lie on one?"
    )
    unread = math.floor((log.card_gib - states) / slope)
    problem = (
        judge(
            answer["fixed GiB"],
            states,
            "what does not grow",
            relative=0.02,
            expected="GiB",
            wrong={naive: bent},
            nudge="A line through the rows whose peak grows with the batch, at no sequences.",
        )
        or judge(
            answer["GiB per sequence"],
            slope,
            "what a sequence adds",
            relative=0.02,
            expected="GiB",
            wrong={steep: bent},
            nudge="The difference of two rows, over the sequences.",
        )
        or judge(
            answer["largest batch"],
            math.floor(room),
            "the largest batch",
            expected="sequences",
            wrong=_too_many(unread, math.ceil(room)),
            nudge="(card - context - states) / GiB per sequence.",
        )
    )
    return problem or _wrong_technique(answer) or _right(log, math.floor(room))


def _too_many(unread: int, rounded_up: int) -> dict[int, str]:
    """Two mistakes that may come to the same number: then it is told of both."""
    context = "The card also holds CUDA's context. Whose GiB are these?"
    half = "Half a sequence does not train. Round down."
    if unread == rounded_up:
        return {unread: f"{context} {half}"}
    return {unread: context, rounded_up: half}


def _wrong_technique(answer: Mapping[str, Any]) -> Verdict | None:
    told = {
        "activations": "Activations are kept from forward to backward. Which technique computes them again?",
        "optimizer state": "Adam's moments are two numbers a parameter. Which technique stores them in fewer bits?",
        "gradients": "All gradients need never exist at once. When could each be used and dropped?",
        "parameters": "Weights that do not train may be stored in four bits. Which technique is that?",
    }
    for part, right in RIGHT.items():
        if problem := judge(
            answer[part],
            right,
            f"the technique for {part}",
            nudge=told[part],
            expected="another technique",
        ):
            return problem
    return None


def _right(log: PeakLog, most: int) -> Verdict:
    return correct("the log in four parts", score=scored(most, most, "sequences on the card"))


def _gains(log: PeakLog, answer: Mapping[str, Any]) -> Gains:
    """What checkpointing takes off the peak at the largest batch in the log."""
    row = at_batch(_seed_of(log), _LOGGED[-1])
    model, batch = row.model, row.batch
    kept = estimate(
        model,
        row.cluster,
        Plan(micro_batch=batch.sequences, recompute="full", framework=row.plan.framework),
        batch,
    )
    return Gains(bytes_saved=row.peak.needed_bytes - kept.peak.needed_bytes)


SHEET = Sheet(
    "Take a peak apart",
    "beginner",
    "components of memory, and the technique for each",
    "Name the components of training memory, and the technique for each.",
    ("01", "05"),
    {
        "fixed GiB": number("a number of GiB"),
        "GiB per sequence": number("a number of GiB"),
        "largest batch": whole("a number of sequences"),
        **{part: one_of(*TECHNIQUES, what="a technique") for part in RIGHT},
    },
    data,
    _verdict,
    _gains,
)
