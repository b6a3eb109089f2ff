"""Lab 14's checks: on the solution, the untouched lab, and wrong answers with their own nudges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lab_cases import definitions, nudged, solved_lab, untouched_lab

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_14 import checks as lab_14
from utils.lessons.lesson_14.faulty import faulty_run, one_process
from utils.planner import crossing_bytes, layouts

LAB = solved_lab("advanced/14_three_dimensions")
NAMES = {"itertools": itertools, "math": math, "torch": torch, "dist": dist, "check": check}
EXERCISES = ["place_axes", "clip_over_axes", "deal_layers"]
FAULTS = {"A: axis": "pp", "A: fault": 3, "B: axis": "shard", "B: fault": 2}


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_is_correct(name):
    solved = definitions(LAB, starts=(f"def {name}(",), **NAMES)[name]
    found = check(f"14.{name}", solved)
    assert found.verdict.status is Status.CORRECT, found
    score, par = found.verdict.score.split(", par ")
    assert score.split()[0] == par, found


@pytest.mark.parametrize("name", EXERCISES)
def test_the_untouched_lab_is_not_attempted(name):
    begun = definitions(untouched_lab("advanced/14_three_dimensions"), starts=(f"def {name}(",), **NAMES)  # fmt: skip
    assert check(f"14.{name}", begun[name]).verdict.status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("same_rows", {5, 4, 1, 0}, {(4, 5): "first stage", (5, 7): "two replicas", (1, 5): "pipeline"}),
        ("which_bug", 3, {1: "different norms", 2: "at step 1"}),
        ("turning_point", 1820, {908: "two replicas", 100: "Let m vary"}),
    ],
)  # fmt: skip
def test_questions_of_the_lesson(name, right, wrong):
    question = getattr(lab_14, name)
    assert question(right).status is Status.CORRECT
    assert check(f"14.{name}", ...).verdict.status is Status.NOT_ATTEMPTED
    for answer, words in wrong.items():
        nudged(question(answer), words)


def test_the_least_crossing_is_that_of_brute_force():
    for sizes, sent, per_node in lab_14._CLUSTERS[:-1]:
        every = (sum(crossing_bytes(row, sent, per_node).values()) for row in layouts(sizes))
        assert lab_14.least_crossing(sizes, sent, per_node) == pytest.approx(min(every))


def by_order(sizes, sent, per_node):
    """The best order of whole axes."""
    orders = itertools.permutations(sizes.items())
    if math.prod(sizes.values()) > 100:
        return list(sizes.items())
    return min(orders, key=lambda row: sum(crossing_bytes(row, sent, per_node).values()))


def all_rings(sizes, sent, per_node):
    """The solution, with stages in a ring like every other axis."""
    renamed = {f"{axis} ring": n for axis, n in sizes.items()}
    right = definitions(LAB, starts=("def place_axes(",), **NAMES)["place_axes"]
    found = right(renamed, {f"{axis} ring": gb for axis, gb in sent.items()}, per_node)
    return [(axis.removesuffix(" ring"), n) for axis, n in found]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (all_rings, "of n stages n - 1 send"),
        (lambda sizes, sent, n: list(sizes.items())[::-1], "slowest first"),
        (lambda sizes, sent, n: [("tp", 8)], "multiply out"),
        (lambda sizes, sent, n: list(sizes), "list of pairs"),
        (lambda sizes, sent, n: None, "list of pairs"),
        (by_order, "two places"),
    ],
    ids=[
        "rings alone",
        "the wrong way round",
        "other ranks",
        "names alone",
        "nothing",
        "whole axes",
    ],
)
def test_place_axes_refuses(answer, words):
    nudged(lab_14.place_axes(answer), words)


def test_place_axes_takes_the_best_of_all_layouts():
    """Written in another way: small clusters by brute force, in numpy's numbers."""

    def tried(sizes, sent, per_node):
        if math.prod(sizes.values()) > 100:
            return definitions(LAB, starts=("def place_axes(",), **NAMES)["place_axes"](sizes, sent, per_node)  # fmt: skip
        best = min(
            layouts(sizes), key=lambda row: sum(crossing_bytes(row, sent, per_node).values())
        )
        return [(axis, np.int64(size)) for axis, size in best]

    assert lab_14.place_axes(tried).status is Status.CORRECT


def clip(gradients, place, limit, *, once=True, roots=False, each=False, up=False, leave=False,
         copy=False, squared=False, local=False):  # fmt: skip
    if leave and not gradients:
        return 0.0
    square = torch.zeros((), dtype=torch.float64)
    for tensor, copied in gradients:
        if not once or all(place[axis] == 0 for axis in copied):
            part = tensor.square().sum()
            square += part.sqrt() if roots else part
    if not local:
        dist.all_reduce(square)
    for _ in range(3 * each):
        dist.all_reduce(torch.zeros(1))
    norm = (square if roots or squared else square.sqrt()).item()
    norm_or_tiny = max(norm, 1e-30)  # of a stage without gradients, by itself
    scale = limit / norm_or_tiny if up else min(1.0, limit / norm_or_tiny)
    for tensor, _ in gradients:
        if not copy:
            tensor *= scale
    return norm


def clip_of_stage(gradients, place, limit):
    square = torch.zeros(2, dtype=torch.float64)
    square[place["pp"]] = sum(t.square().sum() for t, axes in gradients
                              if all(place[axis] == 0 for axis in axes if axis != "pp"))  # fmt: skip
    dist.all_reduce(square)
    norm = square[place["pp"]].sqrt().item()
    for tensor, _ in gradients:
        tensor *= min(1.0, limit / norm)
    return norm


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"once": False}, "on every rank that has one"),
        ({"local": True}, "this rank's own norm"),
        ({"up": True}, "only where the norm is above"),
        *[
            pytest.param(change, words, marks=pytest.mark.slow)
            for change, words in (
                ({"roots": True}, "the root comes last"),
                ({"squared": True}, "its square"),
                ({"copy": True}, "in place"),
                ({"each": True}, "one number is enough"),
            )
        ],
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_clip_over_axes_refuses(change, words):
    nudged(lab_14.clip_over_axes(lambda *given: clip(*given, **change)), words)


def test_clip_over_axes_says_who_waits_for_whom(monkeypatch):
    monkeypatch.setattr(lab_14, "TIMEOUT_SECONDS", 6.0)
    nudged(
        lab_14.clip_over_axes(lambda *given: clip(*given, leave=True)), "list of gradients is empty"
    )


def test_clip_over_axes_knows_the_norm_of_a_stage():
    nudged(lab_14.clip_over_axes(clip_of_stage), "Add up over pp as well")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"A: axis": "tp"}, "one along the others"),
        ({"A: fault": 5}, "leaves the loss of step 1 right"),
        ({"B: fault": 6}, "leave the loss of step 1 right"),
        ({"B: fault": 4}, "more than one rank along that axis"),
    ],
)
def test_two_faults_refuses(change, words):
    assert lab_14.two_faults(FAULTS).status is Status.CORRECT
    nudged(lab_14.two_faults(FAULTS | change), words)


@pytest.mark.slow
def test_the_planted_faults_show_where_the_lab_says():
    right = one_process()
    for run, axis in (("A", "pp"), ("B", "shard")):
        for along in ("pp", "shard"):
            found = faulty_run(run, **{along: 2})
            same = found["losses"] == pytest.approx(right["losses"], rel=1e-9)
            assert same == (along != axis), (run, along)


def test_runs_that_are_not_there():
    with pytest.raises(ValueError, match="There is no run 'C'"):
        faulty_run("C")
    with pytest.raises(ValueError, match="takes 16 ranks"):
        faulty_run("A", pp=4, shard=2, tp=2)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda n, p, *rest: [n // p] * p, "is possible"),
        (lambda n, p, *rest: [n] + [0] * (p - 1), "at least 1"),
        (lambda n, p, *rest: [n], "One number a stage"),
        (lambda *given: 3, "whole number for each"),
    ],
    ids=["equal stages", "all on the first", "too few", "no list"],
)
def test_deal_layers_refuses(answer, words):
    nudged(lab_14.deal_layers(answer), words)


def test_the_least_peak_is_that_of_brute_force():
    for layers, stages, m, state, kept, end in ((8, 3, 4, 3.0, 1.0, 4.0), (9, 4, 2, 1.0, 2.0, 0.5)):
        every = (row for row in itertools.product(range(1, layers), repeat=stages) if sum(row) == layers)  # fmt: skip
        best = min(max(lab_14.stage_bytes(row, m, state, kept, end)) for row in every)
        assert lab_14.least_peak(layers, stages, m, state, kept, end) == pytest.approx(best)
