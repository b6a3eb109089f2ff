"""The checks of lab 02: right answers, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

from typing import Any

import jupytext
import pytest
import torch
import torch.nn.functional as F
from lab_cases import definitions, nudged, solved_lab
from torch import nn

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_02 import checks as lab_02
from utils.lessons.lesson_02 import ledger as ledger_02
from utils.memory import measure
from utils.models import resnet

LAB = solved_lab("beginner/02_mixed_precision")
EXERCISES = ["amp_step", "predicted_peak", "measured_peak", "kept_by_module", "largest_on_card"]
FATES = {"relu": "halves", "pool": "stays", "gelu": "halves", "wide": "grows"}
CAUSES = {"run A": "half with Adam", "run B": "new scaler each step", "run C": "no scaler"}


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    ends = ("\ncalls = ", "\nfor number")
    return definitions(LAB, *ends, torch=torch, F=F, nn=nn, measure=measure, resnet=resnet)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(solved: dict[str, Any], exercise: str) -> None:
    verdict = getattr(lab_02, exercise)(solved[exercise])
    assert verdict.status is Status.CORRECT, verdict


def test_the_questions_accept_the_right_answers() -> None:
    assert lab_02.added_bytes(2).status is Status.CORRECT
    assert lab_02.what_halves("Activations").status is Status.CORRECT
    assert lab_02.linear_rate(0.2).status is Status.CORRECT
    assert lab_02.diagnose(CAUSES).status is Status.CORRECT
    assert lab_02.did_not_halve(FATES).status is Status.CORRECT


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
        ("did_not_halve", FATES | {"pool": "halves"}, "Which type has an index"),
        ("did_not_halve", FATES | {"wide": "halves"}, "is that the parameter itself"),
        ("did_not_halve", FATES | {"gelu": "stays"}, "a 16-bit tensor"),
        ("did_not_halve", FATES | {"relu": 0.5}, '"halves", "stays" or "grows"'),
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


def peak_of(
    p: int, kept: float, mixed: bool, s: int, copies: bool = True, half: bool = True
) -> float:
    """The right peak, or one with a part left out."""
    begins = (4 + s + 2 * (mixed and copies)) * p + kept / (2 if mixed and half else 1)
    return max(begins, (8 + s) * p)


@pytest.mark.parametrize(
    ("peak", "words"),
    [
        (lambda p, a, m, s: (4 + s + 2 * m) * p + a / (1 + m), "Which moment holds more"),
        (lambda p, a, m, s: (8 + s) * p, "At a large batch another moment"),
        (lambda p, a, m, s: (8 + s) * p + a, "never alive together"),
        (lambda p, a, m, s: peak_of(p, a, m, 8), "That is Adam"),
        (lambda p, a, m, s: peak_of(p, a, m, s, copies=False), "copies of the weights"),
        (lambda p, a, m, s: peak_of(p, a, False, s) / (2 if m else 1), "States stay in fp32"),
        (lambda p, a, m, s: peak_of(p, a, m, s, half=False), "take half"),
        (
            lambda p, a, m, s: max((4 + s + 2 * m) * p + a / (1 + m), (8 + s + 2 * m) * p),
            "are gone",
        ),
        (lambda p, a, m, s: None, "returns nothing"),
    ],
)
def test_wrong_peaks(peak: Any, words: str) -> None:
    def predicted_peak(p: int, per_image: int, batch: int, mixed: bool, state: int) -> Any:
        return peak(p, per_image * batch, mixed, state)

    nudged(lab_02.predicted_peak(predicted_peak), words)


def a_peak(autocast: bool = True, inverted: bool = False, steps: bool = True, unit: int = 1) -> Any:
    """A measurement of the peak, with what may go wrong in it."""

    def measured_peak(build: Any, batch: int, dtype: torch.dtype | None) -> Any:
        model, optimizer = build()
        images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
        enabled = autocast and (dtype is None if inverted else dtype is not None)

        def step() -> None:
            optimizer.zero_grad()
            with torch.amp.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            if steps:
                optimizer.step()

        found = measure(step, model=model, optimizer=optimizer, timed_steps=0)
        return found.peak_bytes // unit if unit else found

    return measured_peak


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (a_peak(autocast=False), "Are forward and loss inside of autocast"),
        (a_peak(inverted=True), "Are forward and loss inside of autocast"),
        (a_peak(steps=False), "Does the step call it?"),
        (a_peak(unit=2**20), "A whole step"),
        (a_peak(unit=0), "a peak in bytes, a whole number"),
        (lambda build, batch, dtype: 7_000_000 // 2, "A whole step"),
    ],
)
def test_wrong_measurements(answer: Any, words: str) -> None:
    nudged(lab_02.measured_peak(answer), words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"views": True}, "Its whole storage stays alive"),
        ({"own": True}, "own parameters and buffers"),
        ({"once": False}, "was counted for both"),
        ({"in_bytes": False}, "counts elements"),
    ],
)
def test_ledgers_with_a_mistake(settings: dict[str, bool], words: str) -> None:
    def kept(model: Any, inputs: Any, dtype: Any) -> dict[str, int]:
        return ledger_02.kept_by_module(model, inputs, dtype, **settings)

    nudged(lab_02.kept_by_module(kept), words)


def test_images_may_be_drawn_in_the_call_of_forward() -> None:
    def measured_peak(build: Any, batch: int, dtype: Any) -> int:
        model, optimizer = build()

        def step() -> None:
            optimizer.zero_grad()
            with torch.amp.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                outputs = model(torch.randn(batch, 3, 32, 32))
                loss = F.cross_entropy(outputs, torch.randint(0, 10, (batch,)))
            loss.backward()
            optimizer.step()

        return measure(step, model=model, optimizer=optimizer, timed_steps=0).peak_bytes

    verdict = lab_02.measured_peak(measured_peak)
    assert verdict.status is Status.CORRECT, verdict


def test_another_type_of_as_many_bytes(solved: dict[str, Any]) -> None:
    for name in ("measured_peak", "kept_by_module"):
        right = solved[name]
        answer = lambda a, b, dtype, right=right: right(a, b, dtype and torch.bfloat16)  # noqa: E731
        nudged(getattr(lab_02, name)(answer), "as many bytes and other numbers")


def test_a_ledger_without_autocast() -> None:
    def kept(model: Any, inputs: Any, dtype: Any) -> dict[str, int]:
        return ledger_02.kept_by_module(model, inputs, None)

    nudged(lab_02.kept_by_module(kept), "is autocast on")


def test_a_ledger_of_one_sum_or_of_nothing() -> None:
    def total(model: Any, inputs: Any, dtype: Any) -> int:
        return sum(ledger_02.kept_by_module(model, inputs, dtype).values())

    def all_in_the_last(model: Any, inputs: Any, dtype: Any) -> dict[str, int]:
        return {"head": total(model, inputs, dtype)}

    nudged(lab_02.kept_by_module(total), "a dictionary from names")
    nudged(lab_02.kept_by_module(all_in_the_last), "Which module runs")
    nudged(lab_02.kept_by_module(lambda *given: None), "returns nothing")


def test_a_ledger_may_list_modules_that_keep_nothing(solved: dict[str, Any]) -> None:
    def kept(model: Any, inputs: Any, dtype: Any) -> dict[str, int]:
        return {"flat": 0} | solved["kept_by_module"](model, inputs, dtype)

    assert lab_02.kept_by_module(kept).status is Status.CORRECT


def test_the_fates_are_what_the_ledger_says() -> None:
    network, images = ledger_02.small_network(), torch.randn(8, 3, 32, 32)
    fp32, mixed = (ledger_02.kept_by_module(network, images, d) for d in (None, torch.bfloat16))
    ratios = {name: mixed[name] / fp32[name] for name in FATES}
    assert ratios["relu"] == ratios["gelu"] == 0.5 and ratios["pool"] == 1 and ratios["wide"] > 4


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
