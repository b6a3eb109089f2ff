"""Fine-tunes of a 7B model that ran on a card, beside their simulations."""

from __future__ import annotations

import pandas as pd

from evidence.recorded import recorded_fine_tunes
from utils.checked import check_public
from utils.fitting.model_configs import model_config
from utils.units import GB

MODEL = "Qwen/Qwen2.5-7B"
COPIES, FP32 = 3, 4  # of the logits at the peak, and bytes of a number


def beside_recorded(packed: bool) -> pd.DataFrame:
    """A row for each recorded run, in GB; `packed`: those in four bits too."""
    rows = []
    for row in recorded_fine_tunes():
        how = row.recipe
        if row.model != MODEL or (how.method == "qlora" and not packed):
            continue
        step = row.simulated()
        logits = COPIES * FP32 * how.micro_batch * how.tokens * model_config(MODEL).vocab_size
        rows.append(
            {
                "method": how.method,
                "checkpointed": "yes" if how.checkpointing else "no",
                "texts": f"{how.micro_batch} x {how.tokens:,}",
                "peak, simulated": step.peak_bytes / GB,
                "peak, recorded": row.peak_bytes / GB,
                "logits, predicted": logits / GB,
                "reserved, simulated": (step.reserved_bytes or 0) / GB,
                "reserved, recorded": row.reserved_bytes / GB,
            }
        )
    return pd.DataFrame(rows)


__all__ = ["beside_recorded"]

check_public(globals())
