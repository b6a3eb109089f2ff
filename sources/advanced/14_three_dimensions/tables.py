"""The table of layouts: what the fullest GPU needs, and what a step waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from pandas.io.formats.style import Styler

from utils.checked import check_public
from utils.planner import Estimate
from utils.units import GIB

__all__ = ["layout_table"]


def layout_table(found: Mapping[int, Sequence[Estimate]], *, caption: str) -> Styler:
    """A row for each plan: its sizes, memory, verdict, and seconds of a step.

    Args:
        found: by the number of sequences, the same plans in the same order. Memory and waits are
            those of the first batch; of the others, the whole step, with a micro-batch of their own.
        caption: of the table.

    Raises:
        ValueError: there are no plans.
    """
    if not found or not all(found.values()):
        raise ValueError("layout_table() takes one plan or more for each batch; got none.")
    rows = []
    for plans in zip(*found.values(), strict=True):
        first, time = plans[0], plans[0].time
        rows.append(
            {
                "TP x PP x DP": f"{first.plan.tp} x {first.plan.pp} x {first.plan.dp}",
                "chunks": first.plan.virtual_stages,
                "micro-batch": first.plan.micro_batch,
                "fullest GPU, GiB": first.peak.needed_bytes / GIB,
                "verdict": first.verdict,
                "products, data, s": time.matmul + time.memory,
                "recomputed, s": time.recompute,
                "waits for tp, s": time.tensor_parallel,
                "for the pipeline, s": time.pipeline,
                "for shard, s": time.data_parallel,
            }
            | {f"step of {n}, s": each.step_seconds for n, each in zip(found, plans, strict=True)}
        )
    styled = pd.DataFrame(rows).style.hide().set_caption(caption)
    styled.format(precision=1)
    styled.set_properties(subset=["TP x PP x DP", "verdict"], **{"white-space": "nowrap"})
    return styled


check_public(globals())
