"""The cases of the capstone: timed, seeded, judged by the course's own tools.

A case is a module with `data(seed)`, which computes its brief from the seed, and a `SHEET`, which says
what an answer holds and judges it. Nothing is stored: the par of a case is computed where it is asked.
"""

from . import (
    components,
    eight_nodes,
    four_ranks,
    half_the_cards,
    lay_out,
    nan_run,
    one_billion,
    order_of_cures,
    seven_billion,
    sixteen_gb,
    survive,
    two_offers,
    unknown_job,
    zero_or_fsdp,
)
from .sheet import MINUTES, SEEDS, TIERS, Gains, Sheet

CASES: dict[str, Sheet] = {
    "components": components.SHEET,
    "sixteen_gb": sixteen_gb.SHEET,
    "nan_run": nan_run.SHEET,
    "four_ranks": four_ranks.SHEET,
    "seven_billion": seven_billion.SHEET,
    "zero_or_fsdp": zero_or_fsdp.SHEET,
    "order_of_cures": order_of_cures.SHEET,
    "unknown_job": unknown_job.SHEET,
    "eight_nodes": eight_nodes.SHEET,
    "one_billion": one_billion.SHEET,
    "lay_out": lay_out.SHEET,
    "half_the_cards": half_the_cards.SHEET,
    "survive": survive.SHEET,
    "two_offers": two_offers.SHEET,
}

__all__ = ["CASES", "MINUTES", "SEEDS", "TIERS", "Gains", "Sheet"]
