"""Runs the blocks of the lesson's last cell, and asserts what that cell promises of them."""

from __future__ import annotations

import itertools
import math
from typing import Any

from utils.lessons.blocks import run_block, small_llama

PEAK, CARDS, USD, LENGTH = 312e12, 8, 2.0, 50


def block_1(text: str) -> None:
    """A run at half of its cards' peak: embeddings tied or not, heads as wide together as the model or wider."""
    for tied, head_dim in itertools.product((False, True), (None, 32)):
        model: Any = small_llama(tie_word_embeddings=tied, head_dim=head_dim)
        lookup = model.get_input_embeddings().weight.numel()
        products = sum(p.numel() for p in model.parameters()) - (0 if tied else lookup)
        width = model.model.layers[0].self_attn.q_proj.out_features
        assert width == (128 if head_dim else 64)
        rate = 0.5 * CARDS * PEAK / (6 * products + 12 * 2 * width * LENGTH)
        found = run_block(
            text,
            model=model,
            sequence_length=LENGTH,
            tokens_per_second=rate,
            cards=CARDS,
            peak_flops=PEAK,
        )
        assert math.isclose(found["mfu"], 0.5), f"tied: {tied}, head_dim: {head_dim}"


def block_2(text: str) -> None:
    """What is late is out, however cheap; at the limit is in time; gaps take days, not dollars."""
    day = 86_400.0
    cheap = ("cheap", 8, 0.5, 10 / day, 1.0, 1.0)
    quick = ("quick", 16, USD, 20 / day, 0.5, 1.0)
    wanted = 8 * 10 * 40.0  # the cheap one takes 40 days
    for deadline, best in ((40, (8 * 40 * 24 * 0.5, "cheap")), (39, (16 * 20 * 24 * USD, "quick"))):
        found = run_block(
            text, offers=[cheap, quick], tokens_wanted=wanted, deadline_days=deadline + 1e-6
        )
        assert found["best"][1] == best[1] and math.isclose(found["best"][0], best[0])
    gaps = ("gaps", *cheap[1:5], 0.8)  # 50 days
    for deadline, best in ((50, "gaps"), (49, "quick")):
        found = run_block(
            text, offers=[gaps, quick], tokens_wanted=wanted, deadline_days=deadline + 1e-6
        )
        assert found["best"][1] == best
        if best == "gaps":
            assert math.isclose(found["best"][0], 8 * 40 * 24 * 0.5), "gaps are not paid for"
    late = run_block(text, offers=[cheap, quick], tokens_wanted=wanted, deadline_days=19)
    assert late["best"] is None


def block_3(text: str) -> None:
    """Parameters and twenty tokens for each use up the money's FLOP."""
    found = run_block(text, budget_usd=1e6, usd_per_card_hour=USD, peak_flops=PEAK, mfu=0.45)
    spent = 6 * found["best_parameters"] * 20 * found["best_parameters"]
    assert math.isclose(spent, 1e6 / USD * 3600 * PEAK * 0.45), "C = 6 N D"
