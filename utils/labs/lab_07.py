"""Checks of lesson 07, "Offload: memory that lies behind a link"."""

from __future__ import annotations

from utils.labs.cases import Question, judge, takes
from utils.labs.kinds import equal, number
from utils.labs.verdict import Verdict, correct

_IN_MB = "That is MB. A GB has a thousand of them."

without_offload = Question(
    "Lesson 07: what ZeRO-2 saves on one GPU without offload.",
    number("a number of bytes"), right=0,
    wrong={14: "That is what it divides by the number of ranks. How many ranks are there?",
           14.0 / 16: "That is a share. How many bytes per parameter are gone on one rank?"},
    nudge="A part of one is the whole. The first of the two lines above counts it.",
    note="it partitions over one rank: nothing. Offload is what helps",
    expected="bytes saved per parameter",
)  # fmt: skip


@takes(number("a number of GB"))
def offloaded_gigabytes(answer: float) -> Verdict:
    """Lesson 07: what offloading the optimizer state of 20 million fp32 adapters would free."""
    if equal(answer, 0.24, within=0.02):
        return correct("two moments of four bytes and DeepSpeed's fp32 master copy: 0.24 GB of 24")
    base = "That counts the frozen model. Nothing of it is in the optimizer."
    verdict = judge(
        answer, 0.16, expected="bytes of Adam's moments, in GB", within=0.02, relative=0.1,
        wrong={0.08: "That is the weights, or one of the two moments. Adam keeps both.",
               0.32: "Only the optimizer state goes. Weights and gradients of the adapters stay.",
               160: _IN_MB, 240: _IN_MB},
        nudge=base if answer > 1 else "Two moments per adapter parameter, four bytes each.",
    )  # fmt: skip
    return verdict or correct("two moments of four bytes: 0.16 GB of 24")
