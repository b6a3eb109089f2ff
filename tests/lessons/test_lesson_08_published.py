"""Published perplexities of Llama-2, and the methods that the lesson sets beside them."""

from __future__ import annotations

import pytest
import torch

from utils.lessons.lesson_08 import published
from utils.lessons.lesson_08.methods import methods
from utils.lessons.lesson_08.weight_only import Inputs


@pytest.mark.parametrize("model", ["Llama-2-7B", "Llama-2-70B"])
def test_each_method_has_its_rows(model: str) -> None:
    for method in published.METHODS:
        four, three = (published.growth(model, bits, method) for bits in (4, 3))
        assert 0 < four < three, f"{method}: {four:.1f}%, {three:.1f}%"


def test_growth_is_over_the_model_in_sixteen_bits() -> None:
    assert published.growth("Llama-2-7B", 4, "nearest") == pytest.approx(100 * (5.73 / 5.47 - 1))
    assert published.stored_bits(4) == 4 + 20 / 128, "a scale of 16 bits and a zero point of 4"
    assert "arXiv:2306.00978" in published.source(), "who measured it"


def test_the_methods_store_what_their_formats_take() -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(32, 64), Inputs.none_yet(64)
    inputs.add(torch.randn(256, 64))
    bits = {
        name: 8 * method(weight, inputs).stored_bytes / weight.numel()
        for name, method in methods(32).items()
    }
    assert bits["fp16"] == 16, "two bytes"
    assert bits["nearest-4"] == bits["GPTQ-4"] == 4 + 20 / 32, "codes, a scale and a zero point"
    assert bits["AWQ-2"] == 2 + 18 / 32 + 16 / 32, "and a scale of each column, over 32 outputs"
