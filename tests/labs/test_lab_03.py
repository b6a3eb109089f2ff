"""What lab 03 shows beside its exercises: arithmetic of its questions, evidence of its runs."""

from __future__ import annotations

import math

import torch
from lab_answers import solution

from utils.labs.faulty_runs import FAULTS, fault_of, mystery_runs


def test_the_numbers_of_the_questions() -> None:
    counter = torch.tensor(2048.0, dtype=torch.float16)
    assert counter + 1 == counter and counter - 1 + 1 == counter
    weight = torch.tensor(64.0, dtype=torch.bfloat16)
    assert weight + 0.5 != weight and weight + 0.25 == weight


def test_the_evidence_tells_the_faults_apart() -> None:
    found = {}
    for name, twins in mystery_runs().items():
        low, full = twins["fp16"], twins["fp32"]
        first = next((r.first for r in low if r.first), None)
        if first is None:
            found[name] = "no unscale" if low[0].step_norm < 1e-3 * low[0].grad_norm else ""
        elif first.kind == "input":
            found[name] = "NaN in the data"
        elif not math.isfinite(full[-1].loss) or full[-1].loss > 10 * full[0].loss:
            found[name] = "learning rate"
        else:
            found[name] = "loss overflows" if first.kind == "loss" else "norm in fp16"
        if found[name] == "norm in fp16":
            assert (first.kind, first.module) == ("gradient", "norm")
    assert found == solution("03.diagnosis") == {name: fault_of(name) for name in "ABCDE"}
    assert sorted(found.values()) == sorted(FAULTS)
