"""Simulated ranks of Megatron-LM against its CI's bytes and Korthikanti's activations."""

from __future__ import annotations

import pytest

from evidence.validation.comparison import Comparison
from evidence.validation.simulation_megatron_rows import (
    korthikanti_comparisons,
    megatron_comparisons,
)


@pytest.fixture(scope="module")
def rows() -> list[Comparison]:
    return list(megatron_comparisons())


@pytest.mark.slow
@pytest.mark.parametrize("quantity", ["GiB between steps", "peak GiB"])
def test_megatron(rows: list[Comparison], quantity: str) -> None:
    found = [row for row in rows if row.quantity == quantity]
    assert len(found) == 6
    assert max(abs(row.error) for row in found) <= 0.05


@pytest.mark.slow
def test_what_was_deduced_from_its_row_is_marked(rows: list[Comparison]) -> None:
    marked = {row.case.partition(" ")[0] for row in rows if row.fitted}
    assert marked == {"gpt3_15b_8t_release_sm"}
    assert all(row.quantity == "GiB between steps" for row in rows if row.fitted)


def test_korthikanti_activations() -> None:
    found = list(korthikanti_comparisons())
    assert len(found) == 2
    assert max(abs(row.error) for row in found) <= 0.03
