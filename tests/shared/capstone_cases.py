"""The model answers of the capstone, out of its lab, and what they give for each seed."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from lab_cases import definitions, solved_lab

from utils import Lora, Plan, cost, estimate, model_shape, search
from utils.lessons.lesson_99.cases import CASES
from utils.planner import SearchSpace, axis_bytes
from utils.planner.goodput import DAY, best_interval_seconds, working_share

LAB = solved_lab("advanced/99_capstone")


@cache
def model_answers() -> dict[str, Callable[[Any], dict[str, Any]]]:
    names = {"itertools": itertools, "math": math, "re": re, "Counter": Counter, "Lora": Lora, "Plan": Plan, "axis_bytes": axis_bytes,
                 "cost": cost, "estimate": estimate, "model_shape": model_shape, "search": search, "SearchSpace": SearchSpace, "DAY": DAY,
                 "best_interval_seconds": best_interval_seconds, "working_share": working_share}  # fmt: skip
    return definitions(
        LAB, "\nanswer = ", starts=("# BEGIN SOLUTION\ndef ", "# BEGIN SOLUTION\nCURE_FOR"), **names
    )


@cache
def right(name: str, seed: int) -> dict[str, Any]:
    return model_answers()[name](CASES[name].data(seed))


def drawn(name: str, seed: int) -> dict[str, Any]:
    """What the check of a case is given by a right answer under a seed."""
    return {"seed": seed, **right(name, seed)}
