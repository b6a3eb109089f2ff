"""What lab 02 shows beside its exercises: fates of modules, and three runs that do not train."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lab_answers import solution
from lab_cases import definitions, solved_lab
from torch import nn

from utils.lessons.lesson_02 import ledger as ledger_02

LAB = solved_lab("beginner/02_mixed_precision")


def test_the_fates_are_what_the_ledger_says() -> None:
    network, images = ledger_02.small_network(), torch.randn(8, 3, 32, 32)
    fp32, mixed = (ledger_02.kept_by_module(network, images, d) for d in (None, torch.bfloat16))
    ratios = {name: mixed[name] / fp32[name] for name in solution("02.did_not_halve")}
    assert ratios["relu"] == ratios["gelu"] == 0.5 and ratios["pool"] == 1 and ratios["wide"] > 4


def test_the_three_runs_show_their_faults(capsys: Any) -> None:
    watched = definitions(LAB, "\nfor number", starts=("def watched",), torch=torch, F=F, nn=nn)[
        "watched"
    ]
    traces = []
    for fault in range(3):
        watched(fault)
        traces.append(capsys.readouterr().out.splitlines())
    half, renewed, unscaled = traces
    assert "gradients finite: True" in half[0] and "weights finite after: False" in half[0]
    assert all("gradients finite: False" in line for line in renewed)
    assert all("gradients finite: True" in line for line in unscaled)
    assert len({line.split("loss ")[1].split(",")[0] for line in renewed}) == 1
    assert all(int(line.split("zero: ")[1].split("%")[0]) > 80 for line in unscaled)
