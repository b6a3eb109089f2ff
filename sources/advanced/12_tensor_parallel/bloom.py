"""Pairs of layouts in BLOOM's log that differ in TP and DP, and so in the bubble of their pipelines."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd

FILE = Path(__file__).with_name("bloom_prequel_pairs.csv")
GPUS, BATCH = 384, 2048  # of every row


def bloom_prequel_pairs() -> pd.DataFrame:
    """What a smaller degree gains: as logged (published), and with the bubble taken out (estimated).

    At a fixed batch a smaller degree means more replicas, so fewer micro-batches for each pipeline.
    """
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return pd.DataFrame(map(_pair, rows))


def _pair(row: dict[str, str]) -> dict[str, object]:
    stages = int(row["stages"])
    counts = [_micro_batches(row, degree) for degree in (row["tp_a"], row["tp_b"])]
    bubbles = [(stages - 1) / count for count in counts]
    logged = float(row["tflops_b"]) / float(row["tflops_a"])
    return {
        "model": f"{row['model']}, {row['day']}",
        "stages": stages,
        "micro-batch": int(row["micro_batch"]),
        "TP": f"{row['tp_a']} -> {row['tp_b']}",
        "memory, GB": f"{row['mem_gb_a'] or '?'} -> {row['mem_gb_b'] or '?'}",
        "TFLOP/s": f"{row['tflops_a']} -> {row['tflops_b']}",
        "micro-batches a pipeline": f"{counts[0]} -> {counts[1]}",
        "bubble": f"{bubbles[0]:.1%} -> {bubbles[1]:.1%}",
        "gain as logged": f"{logged - 1:+.1%}",
        "gain without bubble": f"{logged * (1 + bubbles[1]) / (1 + bubbles[0]) - 1:+.1%}",
    }


def _micro_batches(row: dict[str, str], degree: str) -> int:
    """Of one pipeline in a step."""
    replicas = GPUS // (int(degree) * int(row["stages"]))
    return BATCH // (replicas * int(row["micro_batch"]))
