"""What ran on a card, and what a padding mask adds to the step."""

from __future__ import annotations

import pytest
import torch

from utils.catalog import model_shape
from utils.lessons.lesson_06.recorded_runs import beside_recorded, outside_allocator_bytes
from utils.lessons.lesson_06.script_step import accumulated_step, scripted
from utils.simulation import simulate
from utils.units import GB

pytestmark = [
    pytest.mark.deepspeed,  # transformers and peft import it
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # peft asks for it
]
TEXTS, LENGTH, LAYERS = 2, 512, 2


@pytest.fixture(autouse=True)
def libraries() -> None:
    """Imported before a simulation begins."""
    import peft  # noqa: F401
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401


def test_only_runs_with_adapters_stand_in_the_table_and_their_peaks_agree() -> None:
    runs = beside_recorded(packed=False)
    assert set(runs["method"]) == {"lora"} and runs["model"].nunique() == 2
    assert runs["peak, simulated"].to_list() == pytest.approx(
        runs["peak, recorded"].to_list(), 1e-3
    )


def test_a_process_holds_more_on_its_card_than_its_allocator() -> None:
    assert 0.3 * GB < outside_allocator_bytes() < 1.5 * GB


def test_each_block_keeps_a_copy_of_a_padding_mask() -> None:
    shape = model_shape("llama-2-7b")
    peaks = {
        padded: simulate(
            lambda: scripted(shape, LAYERS, packed=False, checkpointed=False),
            lambda model, optimizer, padded=padded: accumulated_step(
                model, optimizer, TEXTS, LENGTH, padded=padded
            ),
            device="RTX 4090",
        ).peak_bytes
        for padded in (False, True)
    }
    numbers = TEXTS * LENGTH**2
    of_mask = numbers * (LAYERS * torch.bfloat16.itemsize + torch.bool.itemsize)
    assert peaks[True] - peaks[False] == pytest.approx(of_mask, rel=0.05)
