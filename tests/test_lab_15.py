"""The checks of lab 15: right answers, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jupytext
import numpy as np
import pytest
from lab_cases import definitions, nudged, solved_lab

from utils.catalog import model_shape
from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_15 import checks as lab_15
from utils.planner import Framework, Lora, Plan, estimate, framework

LAB = solved_lab("advanced/15_design_studio")
RIGHT = Plan(tp=8, pp=8, sequence_parallel=True, micro_batch=2)
FOUND = lab_15._on_64(lab_15.OOM_PLAN)
OOM = {
    "fullest stage": 0,
    "largest category": "activations",
    "missing GiB": FOUND.missing_bytes / 2**30,
}


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    return definitions(LAB)


LIGHT = Framework(name="light", gradient_bytes=0, master_bytes=0, moment_bytes=0)


def bill(solved: dict[str, Any]) -> dict[str, Any]:
    return {"bill": solved["bill"], "an A10 holds the states": False, "choice": "A100"}


def test_the_solution_is_correct(solved: dict[str, Any]) -> None:
    verdicts = [
        lab_15.plan_175b(RIGHT), lab_15.explain_oom(OOM),
        lab_15.fix_by_one_change(replace(lab_15.TO_FIX, sequence_parallel=True)),
        lab_15.token_budget(solved["token_budget"]), lab_15.two_cards(bill(solved)),
        lab_15.gb_per_gpu(36.6), lab_15.micro_batches(300),
    ]  # fmt: skip
    assert [str(v) for v in verdicts if v.status is not Status.CORRECT] == []


def test_every_answer_of_the_lesson_is_accepted() -> None:
    """The plan by rules leaves a margin; the search's winner is the par."""
    for plan in (Plan(tp=8, pp=8, sequence_parallel=True),
                 Plan(tp=4, pp=16, sequence_parallel=True)):  # fmt: skip
        assert lab_15.plan_175b(plan).status is Status.CORRECT, plan


def test_a_plan_within_the_allocators_reach_is_not() -> None:
    """77.5 of 79.1 GiB before any gap."""
    full = lab_15._on_64(Plan(tp=8, pp=8))
    assert full.fits and full.tight
    nudged(lab_15.plan_175b(full.plan), "within the allocator's reach")


def test_the_lab_solves_what_the_check_asks() -> None:
    text = LAB.read_text(encoding="utf-8")
    assert "my_plan = Plan(tp=8, pp=8, sequence_parallel=True, micro_batch=2)" in text
    assert "Plan(tp=4, pp=16, sequence_parallel=True, micro_batch=2)" in text
    assert "broken = Plan(tp=4, pp=16)" in text and Plan(tp=4, pp=16) == lab_15.TO_FIX
    same = estimate(model_shape(lab_15.MODEL), lab_15.the_cluster(), lab_15.OOM_PLAN, lab_15.BATCH)
    assert same == FOUND and not FOUND.fits


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (16 * 130 / 64, "gradients are fp32"),
        (18 * 130, "64 GPUs share it"),
        (4.06, "weights alone"),
        (7, "Bytes per parameter"),
        ("36 GB", "a number of GB"),
        (math.nan, "no finite number"),
    ],
)
def test_states_of_the_wrong_kind(answer: Any, words: str) -> None:
    nudged(lab_15.gb_per_gpu(answer), words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [(320, "p - 1 stages"), (16, "nearly half"), (10, "Solve"), ("many", "a number of")],
)
def test_a_wrong_bubble(answer: Any, words: str) -> None:
    nudged(lab_15.micro_batches(answer), words)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(dp=8, tp=8, pp=8, sequence_parallel=True), "the cluster has 64"),
        (Plan(tp=4, pp=16, sequence_parallel=True, micro_batch=2), "activations"),
        (Plan(dp=8, tp=8, sequence_parallel=True), "optimizer state"),
        (Plan(tp=8, pp=8, sequence_parallel=True, recompute="full"), "costs a third"),
        (Plan(tp=16, pp=4, sequence_parallel=True), "leaves the node"),
        (Plan(tp=8, pp=8), "kept whole on every TP rank"),
        (Plan(tp=2, pp=32, sequence_parallel=True), "Which choice makes"),
        (
            Plan(
                tp=8,
                pp=8,
                sequence_parallel=True,
                micro_batch=2,
                offload="optimizer",
                cp=1,
                recompute="full",
            ),
            "costs a third",
        ),
        ({"tp": 8}, "a Plan(...) is wanted"),
        (Plan(tp=8, pp=8, sequence_parallel=True, micro_batch=8, lora=Lora()), "adapters alone"),
        (replace(RIGHT, framework=LIGHT), "books"),
    ],
)
def test_a_plan_that_will_not_do(plan: Any, words: str) -> None:
    nudged(lab_15.plan_175b(plan), words)


@pytest.mark.parametrize(
    ("key", "answer", "words"),
    [
        ("fullest stage", 15, "count from 0"),
        ("fullest stage", 1, "count from 0"),
        ("largest category", "optimizer state", "GiB there"),
        ("largest category", "cache", "no category"),
        ("missing GiB", FOUND.peak.needed_bytes / 2**30, "all it needs"),
        ("missing GiB", FOUND.missing_bytes, "in GiB"),
        ("missing GiB", "a lot", "a number of GiB"),
        ("missing GiB", math.nan, "no finite number"),
        ("fullest stage", math.nan, "no finite number"),
    ],
)
def test_a_misread_overflow(key: str, answer: Any, words: str) -> None:
    nudged(lab_15.explain_oom(OOM | {key: answer}), words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "nothing changed"),
        ({"sequence_parallel": True, "recompute": "full"}, "Undo all but"),
        ({"recompute": "full"}, "slower than another"),
        ({"offload": "optimizer"}, "neither arithmetic"),
        ({"zero_stage": 1}, "kept whole on every TP rank"),
        ({"micro_batch": 7}, "does not divide"),
        ({"lora": Lora()}, "adapters alone"),
        ({"framework": LIGHT}, "books"),
    ],
)
def test_a_fix_that_will_not_do(fields: dict[str, Any], words: str) -> None:
    nudged(lab_15.fix_by_one_change(replace(lab_15.TO_FIX, **fields)), words)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda usd, price, peak, mfu: None, "returns nothing"),
        (lambda usd, price, peak, mfu: (math.nan, math.nan), "no finite number"),
        (lambda usd, price, peak, mfu: ("7B", "140B"), "two numbers"),
        (lambda usd, price, peak, mfu: (0.0, 0.0), "sqrt(FLOP"),
        (lambda usd, price, peak, mfu: _budget(usd / price * 3600 * peak), "where is the MFU"),
        (lambda usd, price, peak, mfu: _budget(usd / price * peak * mfu), "3600 seconds"),
        (lambda usd, price, peak, mfu: _budget(3 * usd / price * 3600 * peak * mfu), "6 in all"),
        (lambda usd, price, peak, mfu: (_budget(usd / price * 3600 * peak * mfu)[0], 3e11),
         "20 times the parameters"),
        (lambda usd, price, peak, mfu: _budget(7 * usd / price * 3600 * peak * mfu), "sqrt(FLOP"),
    ],
)  # fmt: skip
def test_a_wrong_budget(function: Callable[..., Any], words: str) -> None:
    nudged(lab_15.token_budget(function), words)


def _budget(flop: float) -> tuple[float, float]:
    size = (flop / 120) ** 0.5
    return size, 20 * size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bill": lambda *asked: None}, "two numbers"),
        ({"bill": lambda *asked: (10, 1e5)}, "rounded up"),
        ({"bill": lambda *asked: (lab_15._bill(*asked[:3])[0], math.nan)}, "no finite number"),
        ({"bill": lambda *asked: ("10", "1e5")}, "two numbers"),
        ({"bill": 3}, "a function"),
        ({"bill": lambda *asked: (lab_15._bill(*asked[:3])[0] - 1, 1e5)}, "Half a card"),
        ({"an A10 holds the states": 0}, "True or False"),
        ({"choice": "H100"}, '"A100", "A10"'),
        ({"an A10 holds the states": True}, "on every card of 24"),
        ({"choice": "A10"}, "over PCIe"),
    ],
)
def test_two_cards_misjudged(solved: dict[str, Any], change: dict[str, Any], words: str) -> None:
    nudged(lab_15.two_cards(bill(solved) | change), words)


def test_right_answers_in_another_form(solved: dict[str, Any]) -> None:
    """Scalars of numpy, tuples of them, and entries in another order."""
    numpy_oom = {"fullest stage": np.int64(0), "largest category": " Activations",
                 "missing GiB": np.float32(OOM["missing GiB"])}  # fmt: skip
    cards = bill(solved) | {"an A10 holds the states": np.False_, "choice": "a100"}
    cards["bill"] = lambda *asked: [np.float64(n) for n in solved["bill"](*asked)]
    verdicts = [
        check("15.explain_oom", numpy_oom),
        check("15.explain_oom", dict(reversed(OOM.items()))),
        check("15.two_cards", cards),
        check("15.two_cards", dict(reversed(bill(solved).items()))),
        check("15.token_budget", lambda *asked: [np.float32(n) for n in solved["token_budget"](*asked)]),
        check("15.plan_175b", replace(RIGHT, framework=framework("megatron"))),
        check("15.gb_per_gpu", np.float32(36.6)),
        check("15.micro_batches", np.int64(300)),
    ]  # fmt: skip
    assert [str(found) for found in verdicts if not found.is_correct] == []


def test_the_premise_is_the_planners() -> None:
    alone = lab_15._a10_alone()
    assert not alone.fits and alone.peak.state_bytes > 200e9


def test_the_untouched_lab_is_not_attempted() -> None:
    notebook = jupytext.read(LAB.parents[3] / "labs/advanced/15_design_studio.ipynb")
    names: dict[str, Any] = {"check": check}
    reports = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and 'check("15.' in cell.source:
            body, _, call = cell.source.partition("check(")
            exec(body, names)
            reports.append(eval(f"check({call}".replace("# fmt: skip", ""), names))
        elif cell.source.startswith("def "):
            exec(cell.source, names)
    assert [report.status for report in reports] == [Status.NOT_ATTEMPTED] * 5
