"""Lab 08's checks: the solution, the untouched lab, and wrong answers with their own nudges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab_cases import answers, definitions, nudged, solved_lab, untouched_lab
from torch import Tensor

from utils.data.library_text import calibration_tokens
from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_08 import checks as lab_08
from utils.lessons.lesson_08.few_bits import (
    budget_bytes,
    choices,
    layer,
    layer_par,
    loss_with,
    recorded,
)
from utils.techniques.gptq import gptq, inverse_factor
from utils.techniques.rounding import Grid, Rounded, output_error, round_to_nearest

NAME = "intermediate/08_smaller_weights"
EXERCISES = ["few_bits", "spend_bits", "wrong_text", "admitted"]
STARTS = tuple(f"def {exercise}(" for exercise in EXERCISES)
NAMES = {"torch": torch, "Grid": Grid, "inverse_factor": inverse_factor, "loss_with": loss_with}


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    return definitions(solved_lab(NAME), starts=STARTS, **NAMES)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(solved: dict[str, Any], exercise: str) -> None:
    found = getattr(lab_08, exercise)(solved[exercise])
    assert found.status is Status.CORRECT, found


def test_the_solution_spends_as_the_par_does(solved: dict[str, Any]) -> None:
    score = lab_08.spend_bits(solved["spend_bits"]).score
    mine, par = score.split(" perplexity, par ")
    assert mine == par, "the par is what the solution reaches"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise: str) -> None:
    stubs = definitions(untouched_lab(NAME), starts=STARTS, **NAMES)
    assert check(f"08.{exercise}", stubs[exercise]).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("ungrouped_kib", 2560, {320: "with grouped", 1280: "leaves both", 2_621_440: "bytes", 7: "2 x layers"}),
        ("independent_inputs", 0, {10: "diagonal", 100: "diagonal"}),
        ("large_batch", 1, {4: "batch 1", 0: "factor of 1", 2: "Which bytes"}),
    ],
)  # fmt: skip
def test_questions_of_the_lesson(name: str, right: float, wrong: dict[float, str]) -> None:
    assert check(f"08.{name}", right).is_correct
    for answer, words in wrong.items():
        nudged(getattr(lab_08, name)(answer), words)


# Exercise 1 -------------------------------------------------------------------------------------


def parts(made: Rounded) -> tuple[Tensor, Tensor, Tensor]:
    return made.codes, made.scales, made.zeros


def by_activation(
    static: bool = True, put_back: bool = True, inverse: bool = True
) -> Callable[[Tensor, Tensor], Any]:
    def few_bits(weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        order = moments.diagonal().argsort(descending=True)
        ordered = moments[order][:, order]
        factor = (
            inverse_factor(ordered, len(order))
            if inverse
            else torch.linalg.cholesky(ordered + torch.eye(len(order)), upper=True)
        )
        moving, codes = weight[:, order].clone(), torch.empty_like(weight)
        grids = [Grid.of(part, 3) for part in weight.split(32, dim=1)]
        for place, column in enumerate(order.tolist()):
            if not static and place % 32 == 0:
                grids[place // 32] = Grid.of(moving[:, place : place + 32], 3)
            grid = grids[column // 32]
            here = slice(place, place + 1)
            code = grid.codes(moving[:, here])
            codes[:, column if put_back else place] = code[:, 0]
            error = (moving[:, here] - grid.weight(code)) / factor[place, place]
            moving[:, place + 1 :] -= error * factor[here, place + 1 :]
        return (
            codes,
            torch.cat([g.scales for g in grids], 1),
            torch.cat([g.zeros for g in grids], 1),
        )

    return few_bits


def with_nan(weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, zeros = parts(round_to_nearest(weight, 3, 32))
    return codes, scales * torch.nan, zeros


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda w, h: parts(round_to_nearest(w, 3, 32)), "rounding to nearest"),
        (lambda w, h: parts(gptq(w, h, 3, 32)), "left to right"),
        (by_activation(put_back=False), "in which they came"),
        (by_activation(static=False), "own group's grid"),
        (by_activation(inverse=False), "inverse"),
        (lambda w, h: parts(gptq(w, h, 4, 32)), "Clamp"),
        (lambda w, h: parts(gptq(w, h, 3, 64)), "for each group"),
        (lambda w, h: (w, *parts(gptq(w, h, 3, 32))[1:]), "not a code"),
        (with_nan, "Damping"),
        (lambda w, h: gptq(w, h, 3, 32).weight(), "codes, scales and zeros"),
        (lambda w, h: None, "return"),
    ],
)  # fmt: skip
def test_wrong_ways_to_round(answer: Any, words: str) -> None:
    nudged(lab_08.few_bits(answer), words)


def test_other_number_types_and_a_better_way_pass() -> None:
    def whole_numbers(weight: Tensor, moments: Tensor) -> list[Tensor]:
        codes, scales, zeros = by_activation()(weight, moments)
        return [codes.to(torch.int64), scales.double(), zeros.to(torch.uint8)]

    assert lab_08.few_bits(whole_numbers).status is Status.CORRECT


def test_gptq_leaves_no_more_error_than_the_library() -> None:
    weight, moments = layer()
    ours = output_error(weight, gptq(weight, moments, 3, 32).weight(), moments)
    theirs = float(recorded()["left to right"])
    assert ours <= 1.01 * theirs, (
        f"on the same moments: ours {ours:.5f}, GPTQModel's {theirs:.5f} (recorded)"
    )
    assert layer_par() == min(float(recorded()[order]) for order in
                              ("left to right", "groups by activation", "columns by activation"))  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # its own are not ours
def test_gptqmodel_itself_leaves_no_less_error() -> None:
    """Where GPTQModel is installed: every order of its columns, on inputs made here."""
    pytest.importorskip("gptqmodel", reason="pip install gptqmodel, in an environment of its own")
    from evidence.record.gptq_layer import ORDERS, by_gptqmodel, layer_with_inputs

    weight, inputs, moments = layer_with_inputs()
    theirs = {
        name: output_error(weight, by_gptqmodel(weight, inputs, order), moments)
        for name, order in ORDERS.items()
    }
    ours = output_error(weight, gptq(weight, moments, 3, 32).weight(), moments)
    sorted_ours = output_error(
        weight, Rounded(*by_activation()(weight, moments), 3).weight(), moments
    )
    assert ours <= 1.01 * theirs["left to right"], f"ours {ours:.5f}, GPTQModel's {theirs}"
    assert sorted_ours <= 1.01 * theirs["columns by activation"], (
        f"ours {sorted_ours:.5f}, GPTQModel's {theirs}"
    )


# Exercise 2 -------------------------------------------------------------------------------------


def in_order(table: Any, budget: float) -> dict[str, int]:
    bits, spent = dict.fromkeys(table, 2), sum(row[2][0] for row in table.values())
    for path, row in table.items():
        if spent + row[3][0] - row[2][0] <= budget:
            bits[path], spent = 3, spent + row[3][0] - row[2][0]
    return bits


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda table, budget: dict.fromkeys(table, 2), "same bits everywhere"),
        (in_order, "loss_with"),
        (lambda table, budget: {**dict.fromkeys(table, 2), min(table): 3}, "are left"),
        (lambda table, budget: dict.fromkeys(table, 8), "Add up"),
        (lambda table, budget: dict.fromkeys(table, 5), "four choices"),
        (lambda table, budget: {}, "There is no"),
        (lambda table, budget: [2] * 28, "a dict"),
    ],
)
def test_wrong_ways_to_spend(answer: Any, words: str) -> None:
    nudged(lab_08.spend_bits(answer), words)


def test_the_budget_is_kept_and_nearly_spent() -> None:
    table, budget = choices(), budget_bytes()
    spent = sum(table[path][bits][0] for path, bits in lab_08.by_harm(table, budget).items())
    assert 0.97 * budget < spent <= budget, "the par leaves less than one step unspent"


# Exercise 3 -------------------------------------------------------------------------------------


def hex_dump() -> Tensor:
    digits = torch.tensor(list(b"0123456789ABCDEF"))
    return digits[torch.randint(0, 16, (32, 128), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (calibration_tokens, "no text at all"),
        (hex_dump, "not bad enough"),
        (lambda: torch.zeros(4, 5, dtype=torch.long), "A batch of sequences"),
        (lambda: torch.full((4, 128), 300), "reads bytes"),
        (lambda: torch.rand(4, 128), "reads bytes"),
    ],
)
def test_texts_that_break_too_little(answer: Any, words: str) -> None:
    nudged(lab_08.wrong_text(answer), words)


@pytest.mark.parametrize(
    ("same", "what", "words"),
    [
        ("yes", "text that the model will read", "this kind of text"),
        ("no", "the layers' weights", "also in a good one"),
        ("no", "more of the same text", "Whom"),
    ],
)
def test_wrong_diagnoses(same: str, what: str, words: str) -> None:
    nudged(lab_08.diagnosis({"same kind shows it": same, "what shows it": what}), words)


def test_the_right_diagnosis() -> None:
    given = answers(solved_lab(NAME), "# BEGIN SOLUTION", check=None)["diagnosis"]
    assert lab_08.diagnosis(given).status is Status.CORRECT


# Exercise 4 -------------------------------------------------------------------------------------


def counting(up: bool = True, skip: bool = False, strict: bool = False, whole: bool = True) -> Any:
    def admitted(card: int, weights: int, token: int, lengths: list[int], block: int) -> int:
        room = (card - weights) / (token * block)
        room, count = (room // 1 if whole else room), 0
        for length in lengths:
            need = -(-length // block) if up else length / block
            if need < room or (need == room and not strict):
                room, count = room - need, count + 1
            elif not skip:
                break
        return count

    return admitted


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (counting(up=False), "two blocks"),
        (counting(skip=True), "None is passed over"),
        (counting(strict=True), "to the last byte"),
        (lambda *given: counting()(*given[:4], 16), "one token"),
        (lambda *given: None, "return"),
    ],
)
def test_wrong_counts_of_sequences(answer: Any, words: str) -> None:
    nudged(lab_08.admitted(answer), words)


def test_counting_block_by_block_is_accepted() -> None:
    assert lab_08.admitted(counting()).status is Status.CORRECT
