"""What lab 06 says where a library is missing."""

from __future__ import annotations

import pytest
from lab_cases import nudged

from utils.lessons.lesson_06 import checks as lab_06


def test_a_choice_that_needs_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_06, "bitsandbytes_problem", lambda: "bitsandbytes is not installed")
    choice = {"method": "QLoRA", "sequence length": 1024, "micro-batch": 1}
    nudged(lab_06.fit(choice), "bitsandbytes is not installed; LoRA runs")
