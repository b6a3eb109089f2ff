"""Checks of lab 99, the capstone: one for each case of `cases`, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from utils.labs.cases import takes
from utils.labs.kinds import keys
from utils.labs.verdict import Verdict

from .cases import CASES
from .cases.sheet import seed_kind


def _check(name: str) -> Callable[[Mapping[str, Any]], Verdict]:
    sheet = CASES[name]

    @takes(keys({"seed": seed_kind(), **sheet.parts}))
    def examined(answer: Mapping[str, Any]) -> Verdict:
        parts = {part: answer[part] for part in sheet.parts}
        return sheet.verdict(sheet.data(answer["seed"]), parts)

    # By this name a process of its own finds it.
    examined.__name__ = examined.__qualname__ = name
    examined.__doc__ = f"{sheet.title}: {sheet.question}"
    return examined


components, sixteen_gb, nan_run, four_ranks = map(
    _check, ("components", "sixteen_gb", "nan_run", "four_ranks")
)
seven_billion, zero_or_fsdp = map(_check, ("seven_billion", "zero_or_fsdp"))
order_of_cures, unknown_job = map(_check, ("order_of_cures", "unknown_job"))
eight_nodes, one_billion, lay_out = map(_check, ("eight_nodes", "one_billion", "lay_out"))
half_the_cards, survive, two_offers = map(_check, ("half_the_cards", "survive", "two_offers"))
