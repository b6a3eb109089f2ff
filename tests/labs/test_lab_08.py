"""What lab 08's pars stand on: its GPTQ beside a library's, and a budget that is nearly spent."""

from __future__ import annotations

import pytest

from utils.lessons.lesson_08 import checks as lab_08
from utils.lessons.lesson_08.few_bits import budget_bytes, choices, layer, layer_par, recorded
from utils.lessons.lesson_08.gptq import gptq
from utils.lessons.lesson_08.mistakes import by_activation
from utils.lessons.lesson_08.rounding import Rounded, output_error


def test_gptq_leaves_no_more_error_than_the_library() -> None:
    weight, moments = layer()
    ours = output_error(weight, gptq(weight, moments, 3, 32).weight(), moments)
    theirs = float(recorded()["left to right"])
    assert ours <= 1.01 * theirs, (
        f"on the same moments: ours {ours:.5f}, GPTQModel's {theirs:.5f} (recorded)"
    )
    assert layer_par() == min(
        float(recorded()[order])
        for order in ("left to right", "groups by activation", "columns by activation")
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # its own are not ours
def test_gptqmodel_itself_leaves_no_less_error() -> None:
    """Where GPTQModel is installed: every order of its columns, on inputs made here."""
    pytest.importorskip("gptqmodel", reason="pip install gptqmodel, in an environment of its own")
    from utils.lessons.lesson_08.records.gptq_layer import ORDERS, by_gptqmodel, layer_with_inputs

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


def test_the_budget_is_kept_and_nearly_spent() -> None:
    """Of the par's way, whatever the losses are: here the outputs' own errors, which are there."""
    table, budget = choices(), budget_bytes()
    errors = {
        path: {bits: error for bits, (_, error) in row.items()} for path, row in table.items()
    }
    bits = lab_08.by_harm(table, budget, errors)
    spent = sum(table[path][count][0] for path, count in bits.items())
    assert 0.97 * budget < spent <= budget, "the par leaves less than one step unspent"
