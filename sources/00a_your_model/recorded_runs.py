"""The same program as it ran on a card, beside its simulation on that card."""

from __future__ import annotations

import pandas as pd

from evidence.recorded import CARD, recorded_fine_tunes
from utils.checked import check_public
from utils.fitting.model_configs import model_config
from utils.fitting.seconds import predicted_seconds
from utils.rules import one_of
from utils.units import GIB

MODEL = "Qwen/Qwen2.5-7B"


def beside_recorded(method: str = "qlora") -> pd.DataFrame:
    """A row for each recorded fine-tune of `MODEL` by a method, without accumulation: GiB and seconds.

    Raises:
        ValueError: none of a method was recorded.
    """
    one_of("method", method, sorted({row.recipe.method for row in recorded_fine_tunes()}))
    rows = []
    for row in recorded_fine_tunes():
        how = row.recipe
        if row.model != MODEL or how.method != method or how.accumulation > 1:
            continue
        step, seconds = row.simulated(), predicted_seconds(model_config(MODEL), how, CARD)
        rows.append(
            {
                "tokens": f"{how.micro_batch} x {how.tokens:,}",
                "checkpointed": "all blocks" if how.checkpointing else "none",
                "tensors, simulated": step.peak_bytes / GIB,
                "tensors, recorded": row.peak_bytes / GIB,
                "allocator, simulated": (step.reserved_bytes or 0) / GIB,
                "allocator, recorded": row.reserved_bytes / GIB,
                "seconds, predicted": seconds[1] if seconds else None,
                "seconds, recorded": row.step_seconds,
            }
        )
    return pd.DataFrame(rows).set_index(["tokens", "checkpointed"])


__all__ = ["beside_recorded"]

check_public(globals())
