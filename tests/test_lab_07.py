"""The questions of lesson 07: right answers, and plausible wrong ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from lab_cases import nudged

from utils.labs import check, lab_07


@pytest.mark.parametrize("answer", [0.16, 0.24, np.float32(0.16), np.float64(0.24)])
def test_the_question_of_the_lesson(answer: float) -> None:
    """Two moments; and DeepSpeed's offload takes the fp32 master copy along: 12 bytes each."""
    assert check("07.offloaded_gigabytes", answer).is_correct


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (0.08, "one of the two moments"),
        (0.32, "Only the optimizer state goes"),
        (56, "Nothing of it is in the optimizer"),
        (160, "That is MB"),
        (240, "That is MB"),
        (0.04, "Two moments"),
        (math.nan, "no finite number"),
        (0.5, "Two moments"),
        ("0.16 GB", "a number of GB"),
    ],
)
def test_wrong_answers_to_the_question(answer: Any, words: str) -> None:
    nudged(lab_07.offloaded_gigabytes(answer), words)


@pytest.mark.parametrize(("answer", "words"), [(14, "How many ranks"), (2, "A part of one"),
                                               (0.875, "That is a share")])  # fmt: skip
def test_what_zero_2_saves_on_one_gpu(answer: Any, words: str) -> None:
    assert check("07.without_offload", np.int64(0)).is_correct
    nudged(lab_07.without_offload(answer), words)
