"""What the checks of all labs must survive: junk, and right answers written in other ways."""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Callable
from typing import Any

import capstone_cases
import numpy as np
import torch
from lab_answers import solution

from utils.labs.cases import Question
from utils.labs.checking import STARTS_RANKS, checks_of, find, lab_numbers


class Broken:
    """An object that cannot be shown or compared."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


class Empty:
    """A class without anything that an exercise asks for."""


def circle() -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = [1]
    found.append(found)
    return found


JUNK = {
    "None": None,
    "True": True,
    "NaN": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "numpy NaN": np.float32("nan"),
    "numpy infinity": np.float64("inf"),
    "numpy bool": np.True_,
    "a huge int": 10**400,
    "an int too long to write": 10**5000,
    "a negative number": -3,
    "an odd fraction": 1234.5678,
    "complex": 3 + 4j,
    "decimal NaN": decimal.Decimal("NaN"),
    "empty text": "",
    "text": "a guess",
    "number as text": "12",
    "long text": "x" * 10**6,
    "bytes": b"12",
    "empty list": [],
    "list": [12],
    "list of NaN": [math.nan, math.nan],
    "nested list": [[1, [2]], {"a": 1}],
    "circle": circle(),
    "empty tuple": (),
    "two texts": ("a", "b"),
    "two NaN": (math.nan, math.nan),
    "three Nones": (None, None, None),
    "empty dict": {},
    "other keys": {"wrong": 1, "keys": 2, 3: 4},
    "dict of NaN": {"a": math.nan},
    "set": {1, 7},
    "generator": (x for x in ()),
    "range": range(3),
    "object": object(),
    "broken object": Broken(),
    "tensor": torch.zeros(3),
    "tensor without dimensions": torch.tensor(math.nan),
    "array": np.arange(3),
    "array of NaN": np.array([math.nan]),
    "module": math,
}


def nothing_left(*args: Any, **settings: Any) -> Any:
    """Ends as an iterator does."""
    return next(iter(()))


def gradients_off(*args: Any, **settings: Any) -> int:
    """Leaves PyTorch's gradients switched off."""
    torch.set_grad_enabled(False)
    return 12


CODE = {
    "nothing left": nothing_left,
    "gradients off": gradients_off,
    "class": Empty,
    "builtin": len,
    "no arguments": lambda: 12,
    "nine arguments": lambda a, b, c, d, e, f, g, h, i: 12,
    "a partial": functools.partial(max, 1),
}


def returning(value: Any) -> Callable[..., Any]:
    """A function that takes anything and gives this."""
    return lambda *args, **settings: value


def all_exercises() -> list[str]:
    """Every check of the course: "01.adam_states"."""
    numbers = [number for number in lab_numbers() if number != "97"]
    return [f"{number}.{name}" for number in numbers for name in checks_of(number)]


# `17.repaired_job` takes the text of two files, and starts ranks for such as are right.
OF_RANKS = [
    name
    for name in all_exercises()
    if getattr(find(name), STARTS_RANKS, False) and name != "17.repaired_job"
]


def values() -> list[str]:
    """Exercises whose answer is a value: a lesson's questions, and two of lab 15."""
    questions = [name for name in all_exercises() if isinstance(find(name), Question)]
    return [*questions, "15.plan_small_cards", "15.fix_by_one_change"]


SLOW_PARTS = [f"10.patient_{number}" for number in range(2, 8)]  # read as the first patient is


def takes_parts(name: str) -> bool:
    """Whether an exercise takes a dict with given keys."""
    return bool(getattr(getattr(find(name), "kind", None), "parts", ()))


def right_answer(name: str) -> Any:
    """What a check takes as right: a question's own value, or the solution of the lab."""
    question = find(name)
    if isinstance(question, Question):
        return question.right
    number, _, exercise = name.partition(".")
    return capstone_cases.drawn(exercise, 2) if number == "99" else solution(name)


NUMERIC = {
    "01": ["state_bytes", "saved_bytes", "largest_batch"],
    "02": ["predicted_peak", "measured_peak", "kept_by_module", "largest_on_card", "amp_step"],
    "03": ["decode_float", "find_bad_data"],
    "04": ["exposed_seconds", "make_buckets"],
    "05": ["predicted_bytes", "best_set"],
    "06": ["lora_states"],
    "07": ["exposed_seconds", "best_choice"],
    "08": ["admitted"],
    "09": ["largest_moment", "sent_bytes", "cheapest_plan"],
    "11": ["finish_seconds"],
    "12": ["kept_bytes", "dropout_seed"],
    "13": ["cut_layers"],
    "14": ["place_axes", "deal_layers"],
    "15": ["token_budget"],
    "16": ["days_and_dollars"],
    "19": ["network_rows"],
}  # functions that return numbers, or tuples, lists and dicts of them


def in_numpy(value: Any) -> Any:
    """The same with numpy's numbers, in tuples, lists and dicts too."""
    if isinstance(value, bool) or not isinstance(value, (int, float, tuple, list, dict)):
        return value
    if isinstance(value, (int, float)):
        return np.int64(value) if isinstance(value, int) else np.float64(value)
    if isinstance(value, dict):
        return {key: in_numpy(part) for key, part in value.items()}
    return type(value)(map(in_numpy, value))


def numpied(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with numpy's numbers as its result."""
    return lambda *args, **settings: in_numpy(function(*args, **settings))
