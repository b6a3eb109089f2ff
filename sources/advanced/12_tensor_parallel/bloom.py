"""Pairs of layouts in BLOOM's log that differ in tensor parallelism and data parallelism alone."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd

FILE = Path(__file__).with_name("bloom_prequel_pairs.csv")


def bloom_prequel_pairs() -> pd.DataFrame:
    """TFLOP/s a GPU of both layouts, and what the smaller degree gains, in percent (published)."""
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return pd.DataFrame(
        {
            "day": row["day"],
            "model": row["model"],
            "stages": int(row["stages"]),
            "micro-batch": int(row["micro_batch"]),
            "TP": f"{row['tp_a']} -> {row['tp_b']}",
            "TFLOP/s": f"{row['tflops_a']} -> {row['tflops_b']}",
            "gain": f"{float(row['tflops_b']) / float(row['tflops_a']) - 1:+.1%}",
        }
        for row in rows
    )
