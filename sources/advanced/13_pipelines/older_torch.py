"""A run on ranks that an older PyTorch cannot do over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from utils.checked import check_public
from utils.ranks import RankError, run_ranks

__all__ = ["results_or_skip"]

SENDS_TO_ITSELF = "Pair is not connected"  # gloo, of a rank that holds two neighbouring stages


def results_or_skip(train: Callable[..., Any], ranks: int, name: str, *given: Any) -> list[Any]:
    """What `train(name, *given)` returns on each rank; nothing, and a printed line, where it cannot run.

    Raises:
        RankError: a rank failed for another reason.
    """
    try:
        return run_ranks(train, ranks, name, *given)
    except RankError as error:
        if SENDS_TO_ITSELF not in str(error):
            raise
        print(f"{name:<22} skipped: PyTorch {torch.__version__} cannot run it over gloo")
        return []


check_public(globals())
