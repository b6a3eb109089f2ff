"""Of BLOOM's log: pairs of layouts that differ in TP and DP."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd

PAIRS = Path(__file__).with_name("bloom_prequel_pairs.csv")


def bloom_prequel_pairs() -> pd.DataFrame:
    """What TP 4 gains over TP 8 (published), at a fixed batch: with twice the replicas."""
    return pd.DataFrame(map(_pair, _rows(PAIRS)))


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _pair(row: dict[str, str]) -> dict[str, object]:
    return {
        "model": f"{row['model']}, {row['day']}",
        "stages": int(row["stages"]),
        "micro-batch": int(row["micro_batch"]),
        "memory, GB": f"{row['mem_gb_a'] or '?'} -> {row['mem_gb_b'] or '?'}",
        "TFLOP/s, TP 8 -> TP 4": f"{row['tflops_a']} -> {row['tflops_b']}",
        "gain": f"{float(row['tflops_b']) / float(row['tflops_a']) - 1:+.1%}",
    }
