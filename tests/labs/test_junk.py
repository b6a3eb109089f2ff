"""No public function answers junk by Python's own error, and none takes long over it."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import junk_cases
import numpy as np
import pytest
import torch

import utils
from utils import Batch, Cluster, Plan, planner, ranks, techniques
from utils.checked import checked

SWEEP = Path(junk_cases.__file__)


def swept(share: float, timeout_seconds: int) -> tuple[str, int]:
    """What the sweep prints, and how many calls it made."""
    environment = {**os.environ, "JUNK_SHARE": str(share), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, SWEEP],
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout_seconds,
    )
    total = re.search(r"TOTAL (\d+)", done.stdout)
    assert total, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout if done.returncode else "", int(total[1])


def test_a_sample_of_junk_is_answered_in_sentences() -> None:
    bad, calls = swept(0.02, 500)
    assert not bad
    assert calls > 500


@pytest.mark.slow
def test_all_junk_is_answered_in_sentences() -> None:
    bad, calls = swept(1, 3600)
    assert not bad
    assert calls > 10_000


def test_every_public_function_is_checked() -> None:
    plain = [
        name
        for name, thing in junk_cases.public().items()
        if not isinstance(thing, type) and junk_cases.inspect.signature(thing).parameters
        if not hasattr(thing, "is_checked")
    ]
    assert plain == []


@pytest.mark.parametrize("name", ["search", "draw_timeline", "format_bytes", "simulate"])
def test_a_checked_function_travels_by_its_name(name: str) -> None:
    """Else each worker that uses it would carry its whole module along."""
    function = getattr(utils, name)
    assert pickle.loads(pickle.dumps(function)) is function
    assert cloudpickle.loads(cloudpickle.dumps(function)) is function
    assert len(cloudpickle.dumps(function)) < 100


def test_a_package_and_the_course_hand_out_the_same_function() -> None:
    assert utils.search is planner.search
    assert utils.checkpoint_blocks is techniques.checkpoint_blocks
    assert utils.run_ranks is ranks.run_ranks


def asked(
    count: int,
    share: float = 0.5,
    names: Sequence[str] = (),
    deep: bool = False,
    *rest: str,
    size: int | None = None,
) -> Any:
    return count, share, names, deep, rest, size


ask: Any = checked(asked)


@checked
def total(row: Sequence[float]) -> float:
    return sum(row)


@checked
def totals(rows: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: sum(row) for name, row in rows.items()}


ANSWERS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("8",), {}, "asked: count is '8'; it must be a whole number, without quotes: 8."),
    ((8.5,), {}, "asked: count is 8.5; it must be a whole number. Nearest: 8 or 9."),
    ((True,), {}, "asked: count is True; it must be a whole number."),
    (
        (10**30,),
        {},
        "asked: count is 10000000.*; the largest number it can be is 9,223,372,036,854,775,807.",
    ),
    ((1, "x"), {}, "asked: share is 'x'; it must be a number."),
    ((1, 1, "ab"), {}, r"names is 'ab'; it must be of type Sequence\[str\] \(a text is no list\)"),
    ((1, 1, np.ones(2)), {}, r"names is \[1.0, 1.0\].*item 0 of list is not an instance of str"),
    ((1, 1, ["a", 2]), {}, r"names is \['a', 2\].*item 1 of list is not an instance of str"),
    ((1, 1, [], "False"), {}, "deep is 'False'; it must be True or False."),
    ((1, 1, [], True, 5), {}, "rest is 5; it must be text in quotes."),
    ((1,), {"size": 1.5}, "size is 1.5; it must be a whole number or None"),
    ((1,), {"sise": 1}, "asked: there is no argument sise. There is size."),
    ((), {}, r"asked: missing a required argument: 'count'. Write asked\(count\)."),
    (("\ud800",), {}, "count is '.ud800'; it must be a whole number"),
]


@pytest.mark.parametrize(("args", "kwargs", "sentence"), ANSWERS)
def test_a_sentence_names_what_came_and_what_is_wanted(
    args: tuple[Any, ...], kwargs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        ask(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Batch(64, 2048), r"Batch: every .* by its name: sequences=, .*Write Batch\(seq"),
        (lambda: Plan(4), r"Plan: every argument is given by its name: dp=.*lora=\.$"),
        (lambda: Cluster(gpus=16), "no argument gpus. There is gpu, gpus_per_node, "),
        (lambda: Plan(seq_parallel=True), "no argument seq_parallel. There is sequence_parallel"),
    ],
)
def test_what_takes_names_alone_says_how_it_is_written(
    make: Callable[[], Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_numbers_of_other_kinds_count() -> None:
    assert ask(8.0, 1)[:2] == (8, 1)
    assert type(ask(8.0)[0]) is type(ask(np.int64(8))[0]) is int
    assert ask(1, np.float32(0.5), size=np.int32(3))[5] == 3
    assert ask(1, deep=np.bool_(True))[3] is True


def test_rows_of_numbers_count_as_lists() -> None:
    for row in (np.ones(2), torch.ones(2)):
        assert total(row) == 2
        assert totals({"a": row}) == {"a": 2}
    with pytest.raises(ValueError, match="row is a ndarray"):
        total(np.ones((2, 2)))


def test_an_error_inside_of_a_function_stays_its_own() -> None:
    @checked
    def fails(count: int) -> None:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        fails(1)
