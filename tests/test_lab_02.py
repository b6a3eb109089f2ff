"""The checks of lab 02: right answers, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

from typing import Any

import jupytext
import pytest
import torch
import torch.nn.functional as F
from lab_cases import definitions, nudged, solved_lab
from torch import nn

from utils.labs import check, lab_02
from utils.labs.verdict import Status

LAB = solved_lab("beginner/02_mixed_precision")
EXERCISES = ["amp_step", "bytes_at_backward", "break_even_batch", "largest_on_card", "scaled_rate"]
CAUSES = {"run A": "half with Adam", "run B": "new scaler each step", "run C": "no scaler"}


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    return definitions(LAB, "\ncalls = ", "\nfor number", torch=torch, F=F, nn=nn)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(solved: dict[str, Any], exercise: str) -> None:
    verdict = getattr(lab_02, exercise)(solved[exercise])
    assert verdict.status is Status.CORRECT, verdict


def test_the_questions_accept_the_right_answers() -> None:
    assert lab_02.added_bytes(2).status is Status.CORRECT
    assert lab_02.what_halves("Activations").status is Status.CORRECT
    assert lab_02.linear_rate(0.2).status is Status.CORRECT
    assert lab_02.diagnose(CAUSES).status is Status.CORRECT


@pytest.mark.parametrize(
    ("question", "answer", "words"),
    [
        ("added_bytes", 0, "fp32 weights stay"),
        ("added_bytes", -2, "comes on top"),
        ("added_bytes", 16, "How many bytes"),
        ("added_bytes", "two", "a number of bytes"),
        ("what_halves", "parameters", "casts copies"),
        ("what_halves", "gradients", "its parameter's type"),
        ("what_halves", "everything", "as in the legend"),
        ("what_halves", 2, "one category"),
        ("linear_rate", 0.1414, "rule for Adam"),
        ("linear_rate", 0.05, "grows as the batch"),
        ("diagnose", CAUSES | {"run A": "no scaler"}, "gradients finite then"),
        ("diagnose", CAUSES | {"run B": "half with Adam"}, "should have fallen"),
        ("diagnose", CAUSES | {"run C": "too slow"}, "run C"),
        ("diagnose", "no scaler", "a dict with the keys"),
        ("added_bytes", float("nan"), "no finite number"),
        ("added_bytes", True, "a number of bytes"),
        ("linear_rate", float("inf"), "no finite number"),
    ],
)
def test_wrong_answers_are_nudged(question: str, answer: Any, words: str) -> None:
    nudged(getattr(lab_02, question)(answer), words)


def forward(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.amp.autocast("cpu", dtype=torch.float16):
        return F.cross_entropy(model(inputs), labels)


def test_a_step_with_backward_inside_autocast() -> None:
    def amp_step(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> float:
        optimizer.zero_grad()
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), labels)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    nudged(lab_02.amp_step(amp_step), "Backward belongs outside")


def test_a_step_without_autocast() -> None:
    def amp_step(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> float:
        loss = F.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    nudged(lab_02.amp_step(amp_step), "did not run in fp16")


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ("scale", "small gradients become 0"),
        ("step", "would use scaled gradients"),
        ("update", "scaler.update() is missing"),
        ("zero_grad", "old gradients cleared"),
        ("loss", "unscaled loss"),
    ],
)
def test_a_step_that_leaves_something_out(left_out: str, words: str) -> None:
    def amp_step(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> Any:
        if left_out != "zero_grad":
            optimizer.zero_grad()
        loss = forward(model, inputs, labels)
        if left_out == "scale":
            loss.backward()
            optimizer.step()
            return loss.item()
        scaled = scaler.scale(loss)
        scaled.backward()
        if left_out == "step":
            optimizer.step()
        else:
            scaler.step(optimizer)
        if left_out not in ("update", "step"):
            scaler.update()
        return scaled.item() if left_out == "loss" else loss.item()

    nudged(lab_02.amp_step(amp_step), words)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ("scale backward optimizer update", "would use scaled gradients"),
        ("plain-backward step update", "small gradients become 0"),
        ("plain-backward optimizer update", "small gradients become 0"),
    ],
)
def test_calls_that_pytorch_refuses_are_named(calls: str, words: str) -> None:
    def amp_step(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> float:
        optimizer.zero_grad()
        loss = forward(model, inputs, labels)
        scaled = scaler.scale(loss) if "scale" in calls else None
        parts = {"scale": lambda: None, "backward": lambda: scaled.backward(),
                 "plain-backward": loss.backward, "optimizer": optimizer.step,
                 "step": lambda: scaler.step(optimizer), "update": scaler.update}  # fmt: skip
        for part in calls.split():
            parts[part]()
        return loss.item()

    nudged(lab_02.amp_step(amp_step), words)
    nudged(lab_02.amp_step(amp_step), "PyTorch refuses")


def test_a_loss_outside_of_autocast() -> None:
    def amp_step(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> float:
        optimizer.zero_grad()
        with torch.amp.autocast("cpu", dtype=torch.float16):
            outputs = model(inputs)
        loss = F.cross_entropy(outputs, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    nudged(lab_02.amp_step(amp_step), "inside of the `with`")


def test_a_step_that_returns_a_tensor(solved: dict[str, Any]) -> None:
    def amp_step(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> torch.Tensor:
        return torch.tensor(solved["amp_step"](model, optimizer, scaler, inputs, labels))

    nudged(lab_02.amp_step(amp_step), "`.item()`")


@pytest.mark.parametrize(
    ("mixed_bytes", "words"),
    [
        (lambda p, a: 12 * p + a / 2, "copies of the weights"),
        (lambda p, a: (12 * p + a) / 2, "Not everything halves"),
        (lambda p, a: 16 * p + a, "no gradients yet"),
        (lambda p, a: 14 * p + a, "What is halved"),
        (lambda p, a: None, "returns nothing"),
    ],
)
def test_wrong_bytes(mixed_bytes: Any, words: str) -> None:
    def bytes_at_backward(parameters: int, per_image: int, batch: int, mixed: bool) -> Any:
        activations = per_image * batch
        return mixed_bytes(parameters, activations) if mixed else 12 * parameters + activations

    nudged(lab_02.bytes_at_backward(bytes_at_backward), words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, a: 4 * p // a, "equal is not less"),
        (lambda p, a: 2 * p // a + 1, "Only half of an image"),
        (lambda p, a: 16 * p // a, "Solve"),
        (lambda p, a: None, "whole number of images"),
    ],
)
def test_wrong_break_even(answer: Any, words: str) -> None:
    nudged(lab_02.break_even_batch(answer), words)


def test_a_search_that_tries_every_batch() -> None:
    def by_one(peak: Any, limit: int) -> int:
        batch = 1
        while peak(batch + 1) <= limit:
            batch += 1
        return batch

    nudged(lab_02.largest_on_card(by_one), "more than 8 simulations")


def test_a_search_that_only_halves() -> None:
    def halves(peak: Any, limit: int) -> int:
        low, high = 1, 2048
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if peak(middle) <= limit else (low, middle)
        return low

    nudged(lab_02.largest_on_card(halves), "Halving takes eleven")


def test_a_search_that_leaves_out_the_limit_itself(solved: dict[str, Any]) -> None:
    def below(peak: Any, limit: int) -> int:
        return solved["largest_on_card"](peak, limit - 1)

    nudged(lab_02.largest_on_card(below), "A peak that equals the limit still fits")


def test_the_par_is_what_the_solution_takes(solved: dict[str, Any]) -> None:
    par = lab_02.PAR_SIMULATIONS
    verdict = lab_02.largest_on_card(solved["largest_on_card"])
    assert verdict.score == f"{par} simulations at most, par {par}"


def test_a_search_that_trusts_the_line() -> None:
    def line(peak: Any, limit: int) -> int:
        one, two = peak(256), peak(512)
        return int(256 + (limit - one) * 256 / (two - one))

    assert lab_02.largest_on_card(line).status is Status.NOT_YET


def test_a_search_that_is_one_too_high(solved: dict[str, Any]) -> None:
    def one_more(peak: Any, limit: int) -> int:
        return solved["largest_on_card"](peak, limit) + 1

    nudged(lab_02.largest_on_card(one_more), "first batch that does not fit")


def test_a_search_that_forgets_its_return(solved: dict[str, Any]) -> None:
    def silent(peak: Any, limit: int) -> None:
        solved["largest_on_card"](peak, limit)

    nudged(lab_02.largest_on_card(silent), "Is there a `return`?")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda r, old, new, o: r * new / old, "square root of the ratio"),
        (lambda r, old, new, o: r * old / new, "upside down"),
        (lambda r, old, new, o: None, "a number is wanted"),
    ],
)
def test_wrong_rates(answer: Any, words: str) -> None:
    nudged(lab_02.scaled_rate(answer), words)


def test_the_three_runs_show_their_faults(solved: dict[str, Any], capsys: Any) -> None:
    traces = []
    for fault in range(3):
        solved["watched"](fault)
        traces.append(capsys.readouterr().out.splitlines())
    half, renewed, unscaled = traces
    assert "gradients finite: True" in half[0] and "weights finite after: False" in half[0]
    assert all("gradients finite: False" in line for line in renewed)
    assert all("gradients finite: True" in line for line in unscaled)
    assert len({line.split("loss ")[1].split(",")[0] for line in renewed}) == 1
    assert all(int(line.split("zero: ")[1].split("%")[0]) > 80 for line in unscaled)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise: str) -> None:
    notebook = jupytext.read(LAB.parents[3] / "labs/beginner/02_mixed_precision.ipynb")
    cells = [c.source for c in notebook.cells if c.source.startswith(f"def {exercise}(")]
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(cells[0].split("\ncheck(")[0], names)
    assert check(f"02.{exercise}", names[exercise]).status is Status.NOT_ATTEMPTED
