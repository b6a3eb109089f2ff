"""The lesson's rows of the recorded ResNet-50, beside what the simulation says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from utils.units import GIB

Row = Mapping[str, Any]


def record_table(
    rows: Sequence[Row], simulated_bytes: Sequence[int], cap_bytes: float
) -> pd.DataFrame:
    """GiB of each run: simulated, allocated and reserved, and how far beyond its simulation; its speed.

    Args:
        rows: of the record.
        simulated_bytes: the peak of each, by the simulation.
        cap_bytes: to what a row with a cap was held.
    """
    held = f"{cap_bytes / GIB:.2f} GiB"
    table = [
        {
            "precision": row["precision"],
            "images": row["batch"],
            "held to": held if "cap" in row else "no limit",
            "simulated": peak / GIB,
            "allocated": row["allocated_peak_bytes"] / GIB,
            "reserved": row["reserved_peak_bytes"] / GIB,
            "reserved - simulated": (row["reserved_peak_bytes"] - peak) / GIB,
            "images/s": round(row["images_per_second"]),
        }
        for row, peak in zip(rows, simulated_bytes, strict=True)
    ]
    return pd.DataFrame(table).set_index(["precision", "images"])
