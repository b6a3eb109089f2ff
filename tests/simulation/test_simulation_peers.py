"""Other tools on the small steps that this machine's allocator measured."""

from __future__ import annotations

import pytest

from evidence.validation.comparison import Comparison
from evidence.validation.simulation_cpu import CASES
from evidence.validation.simulation_peers import cpu_peers, memtracker_bytes
from utils.simulation import simulate
from utils.units import MIB

pytestmark = pytest.mark.deepspeed

PARAMETERS = 1_000_000


def test_memtracker_agrees_where_kernels_take_no_scratch_memory() -> None:
    name = "transformer, SGD"
    ours = simulate(*CASES[name], device="cpu").peak_bytes
    assert memtracker_bytes(CASES[name]) == pytest.approx(ours, rel=0.05)


def test_memtracker_refuses_frozen_parameters() -> None:
    with pytest.raises(ValueError, match="frozen"):
        memtracker_bytes(CASES["transformer, LoRA"])


@pytest.mark.parametrize("technique", ["AdamW 8-bit", "NF4", "accumulation"])
def test_memtracker_refuses_values_conversions_and_accumulation(technique: str) -> None:
    with pytest.raises(ValueError, match=r"value|converted|one forward|frozen"):
        memtracker_bytes(CASES[f"transformer, {technique}"])


def test_every_tool_answers_for_the_rows_that_it_accepts() -> None:
    rows = [
        Comparison("CPU allocator, transformer", "peak MiB", case, 10.0, 11.0, PARAMETERS)
        for case in ("SGD", "LoRA")
    ]
    found = {error.tool: error for error in cpu_peers(rows)}
    assert found["this simulator"].rows == 2
    assert found["this simulator"].bias == pytest.approx(0.1)
    assert found["MemTracker"].rows == 1
    # fp32 parameters, gradients and two moments: 16 bytes each.
    size = 16 * PARAMETERS / MIB / 10.0 - 1
    assert found["accelerate estimate-memory"].bias == pytest.approx(size)
    assert found["DeepSpeed estimator"].rows == 2
