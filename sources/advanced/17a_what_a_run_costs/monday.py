"""Runs the blocks of the lesson's last cell, and asserts what that cell promises of them."""

from __future__ import annotations

import math

from torch import nn

from utils.lessons.blocks import run_block

WIDTH, PEAK, CARDS, USD = 100, 312e12, 8, 2.0
LAYERS, LENGTH = 2, 50


def block_1(text: str) -> None:
    """A run at half of its cards' peak: the price and the days follow."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    rate = 0.5 * CARDS * PEAK / (6 * WIDTH**2 + 12 * LAYERS * WIDTH * LENGTH)
    found = run_block(
        text,
        model=model,
        layers=LAYERS,
        hidden=WIDTH,
        sequence_length=LENGTH,
        tokens_per_second=rate,
        cards=CARDS,
        peak_flops=PEAK,
        usd_per_card_hour=USD,
        tokens_wanted=86_400 * rate * 3,
    )
    assert math.isclose(found["mfu"], 0.5) and math.isclose(found["days"], 3)
    assert math.isclose(found["usd_per_million_tokens"] * rate * 3600 / 1e6, CARDS * USD), (
        "an hour's tokens cost an hour's cards"
    )


def block_2(text: str) -> None:
    """Parameters and tokens use up the money's FLOP, twenty tokens a parameter."""
    found = run_block(text, budget_usd=1e6, usd_per_card_hour=USD, peak_flops=PEAK, mfu=0.45)
    spent = 6 * found["best_parameters"] * found["best_tokens"]
    assert math.isclose(spent, 1e6 / USD * 3600 * PEAK * 0.45), "C = 6 N D"
    assert math.isclose(found["best_tokens"], 20 * found["best_parameters"])
