"""The decision matrix that lab 17 has reviewed: twelve lines, some of them wrong."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("right", "forward only", "sparsity", "no date", "HFU", "memory", "units")
PARAMETERS, TOKENS, DEADLINE_DAYS, GOODPUT = 30e9, 600e9, 30, 0.95


@dataclass(frozen=True)
class Line:
    """A line of the matrix.

    Attributes:
        text: What it says.
        kind: What is wrong with it, one of `KINDS`.
        hint: What a reader who missed it should ask.
    """

    text: str
    kind: str
    hint: str = ""


LINES = (
    Line("Training needs 2 x 30e9 x 600e9 = 3.6e22 FLOP.", "forward only",
         "Which passes does a training step make, and how many FLOP has each?"),
    Line("Offer 1: 256 A100-80GB. Peak in bf16: 624 TFLOP/s.", "sparsity",
         "Compare the peak with device('A100-80GB'). When do data sheets print twice as much?"),
    Line("Offer 2: 128 H100. Peak in bf16: 989 TFLOP/s.", "right"),
    Line("A100: $2.79 a GPU hour (Lambda, on demand, 2026-11-21).", "right"),
    Line("H100: $12 a GPU hour, from a slide.", "no date", "When was that? What does the price list say?"),
    Line("Our last run on A100, recomputing every block: the profiler counted 54% of the true peak, so MFU is 54%.",
         "HFU", "Does the model need all of what the profiler counted?"),
    Line("Our last run on H100: tokens/s x 6 x parameters over GPUs x peak, so MFU is 40%.", "right"),
    Line("A100: 30e9 x 2 bytes = 60 GB are less than 80 GB, so plain data parallelism trains it.", "memory",
         "What else lies on the card when Adam takes a step?"),
    Line("A checkpoint has 14 bytes a parameter: 420 GiB.", "units", "How many bytes has a GiB?"),
    Line("Failures and saves leave 95% of the time on both; divide the days by 0.95.", "right"),
    Line("Energy of 128 H100 for 26 days at 700 W: 128 x 0.7 x 24 x 26 = 55,910 kWh before the building.",
         "right"),
    Line("The deadline is 30 days. Who is later is out, whatever the weights.", "right"),
)  # fmt: skip


def matrix_text() -> str:
    """The matrix as it was handed in, its lines numbered from 1."""
    return "\n".join(f"{number:>2}. {line.text}" for number, line in enumerate(LINES, 1))
