"""Fine-tunes with adapters that ran on a card, beside their simulations."""

from __future__ import annotations

import pandas as pd

from evidence.recorded import recorded_fine_tunes, rows
from utils.checked import check_public
from utils.units import GB

RECORDED_ON = "H200, 2026-11-26: PyTorch 2.11, transformers 5.17, peft 0.21.0"
METHODS = ("lora", "qlora")


def beside_recorded(packed: bool) -> pd.DataFrame:
    """A row for each recorded run with adapters, in GB; `packed`: those in four bits too."""
    table = []
    for row in recorded_fine_tunes():
        how = row.recipe
        if how.method not in METHODS or (how.method == "qlora" and not packed):
            continue
        step = row.simulated()
        times = f", {how.accumulation} micro-batches" if how.accumulation > 1 else ""
        table.append(
            {
                "model": row.model.rpartition("/")[2],
                "method": how.method,
                "checkpointed": "yes" if how.checkpointing else "no",
                "texts": f"{how.micro_batch} x {how.tokens:,}{times}",
                "peak, simulated": step.peak_bytes / GB,
                "peak, recorded": row.peak_bytes / GB,
                "reserved, simulated": (step.reserved_bytes or 0) / GB,
                "reserved, recorded": row.reserved_bytes / GB,
            }
        )
    return pd.DataFrame(table)


def outside_allocator_bytes() -> int:
    """The most that a recorded process held on the card beside what PyTorch's allocator reserved."""
    return max(
        int(row["used_on_the_device_bytes"]) - int(row["reserved_peak_bytes"])
        for row in rows("fits")
    )


__all__ = ["RECORDED_ON", "beside_recorded", "outside_allocator_bytes"]

check_public(globals())
