"""Simulated adapter training against the peaks that others measured and published."""

from __future__ import annotations

import statistics

import pytest

from evidence.validation.comparison import Comparison
from evidence.validation.simulation_published import (
    litgpt_comparisons,
    litgpt_step,
    peft_comparisons,
)
from evidence.validation.simulation_report import REMARKS, report
from evidence.validation.simulation_torchtitan import torchtitan_comparisons

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def litgpt() -> list[Comparison]:
    return list(litgpt_comparisons())


def errors(rows: list[Comparison], source: str) -> list[float]:
    return [abs(row.error) for row in rows if row.source == source]


@pytest.mark.slow
def test_litgpt_16_bit(litgpt: list[Comparison]) -> None:
    found = errors(litgpt, "litgpt LoRA, bf16")
    assert len(found) == 9
    assert statistics.median(found) <= 0.01
    assert max(found) <= 0.03


@pytest.mark.slow
def test_litgpt_nf4(litgpt: list[Comparison]) -> None:
    found = errors(litgpt, "litgpt QLoRA")
    assert len(found) == 8
    assert statistics.median(found) <= 0.05


@pytest.mark.slow
def test_llama_ran_with_norms_in_fp32(litgpt: list[Comparison]) -> None:
    """Deduced from the 7B rows, marked so; the 13B rows check it."""
    rows = [row for row in litgpt if row.source in ("litgpt LoRA, bf16", "litgpt QLoRA")]
    llama = [row for row in rows if row.case.startswith("Llama")]
    assert {row.case.split(",")[0] for row in llama if row.fitted} == {"Llama 2"}
    assert max(abs(row.error) for row in llama if not row.fitted) <= 0.02
    named = [row.error for row in litgpt if row.source.endswith("named commit")]
    assert len(named) == len(llama) == 7 and max(named) < -0.03


@pytest.mark.slow
def test_the_report_has_every_row_and_both_baselines(litgpt: list[Comparison]) -> None:
    text = report(litgpt)
    assert all(row.case in text for row in litgpt)
    assert all(REMARKS[row.source] in text for row in litgpt)
    assert "accelerate" in text and "bytes/parameter" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_peft() -> None:
    rows = [row for row in peft_comparisons() if row.quantity == "reserved GB, maximum"]
    assert len(rows) == 4
    assert max(abs(row.error) for row in rows) <= 0.05


def test_torchtitan() -> None:
    """On 8 GPUs, where the shards are large, one stream instead of several costs most."""
    rows = list(torchtitan_comparisons())
    assert len(rows) == 2
    assert all(-0.10 <= row.error < 0 for row in rows)


@pytest.mark.slow
def test_what_early_libraries_kept_is_what_their_source_says() -> None:
    """The input of each NF4 layer that nothing else kept, 2 bytes an element."""
    early, today = (litgpt_step("phi-1.5", 1, "bnb.nf4", early) for early in (True, False))
    tokens, hidden, layers = 1044, 2048, 24
    # The feed-forward's GELU result (4 h); attention's output and the norm's are kept anyway.
    feedforward = 2 * tokens * 4 * hidden * layers
    assert early.peak_bytes - today.peak_bytes >= feedforward
