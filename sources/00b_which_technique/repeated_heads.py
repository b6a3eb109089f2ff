"""Attention on cards older than Ampere: keys and values repeated for each head, so that no scores are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.integrations import sdpa_attention

from utils.checked import check_public
from utils.fitting import Recipe, Trials, mixed_precision, model_config
from utils.simulation.devices import simulated_device
from utils.units import GIB

__all__ = ["kept_scores", "repeated_heads"]


def _never(*_: Any) -> bool:
    """In place of transformers' test of whether attention is handed grouped heads."""
    return False


@contextmanager
def repeated_heads(card: str) -> Iterator[None]:
    """Within it, transformers hands attention as many heads of keys as of queries, on a card without flash attention.

    There PyTorch's memory-efficient kernel, which keeps no scores, takes no grouped heads.
    """
    before = sdpa_attention.use_gqa_in_sdpa
    if not simulated_device(card).flash:
        sdpa_attention.use_gqa_in_sdpa = _never
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = before


def kept_scores(model: str, method: str, card: str, tokens: int) -> str:
    """What a step takes as transformers calls attention, in words."""
    recipe = Recipe(method=method, tokens=tokens, precision=mixed_precision(card))
    found = Trials(model, model_config(model), card).verdict(recipe)
    return (
        f"{model.rpartition('/')[2]}, {method}, on a {card} as transformers calls attention: "
        f"{found.needed_bytes / GIB:.1f} GiB (simulated)"
    )


check_public(globals())
