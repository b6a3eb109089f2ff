"""Of BLOOM's log: pairs of layouts that differ in TP and DP, and setups that were run more than once."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd

PAIRS = Path(__file__).with_name("bloom_prequel_pairs.csv")
REPEATS = Path(__file__).with_name("bloom_prequel_repeats.csv")
FASTER_NODES = "02-25"  # "do not compare today's numbers to yesterday's"


def bloom_prequel_pairs() -> pd.DataFrame:
    """What TP 4 gains over TP 8 (published), at a fixed batch: with twice the replicas."""
    return pd.DataFrame(map(_pair, _rows(PAIRS)))


def bloom_prequel_repeats() -> str:
    """What the log says of noise: how far runs of one setup are apart, on nodes of one speed.

    Of the setup that is 2.8% apart the log notes two memories: it may be two. So that is the most it can be.
    """
    runs: dict[tuple[str, ...], list[float]] = {}
    for row in _rows(REPEATS):
        setup = (row["nodes"], row["model"], row["tp"], row["stages"], row["micro_batch"])
        speed = str(row["day"] >= FASTER_NODES)
        runs.setdefault((*setup, speed), []).append(float(row["tflops"]))
    apart: dict[str, list[float]] = {}
    for (nodes, *_), rates in runs.items():
        apart.setdefault(nodes, []).append(max(rates) / min(rates) - 1)
    told = (
        f"on {nodes} node{'s' * (nodes != '1')}, {len(shares)} setup{'s' * (len(shares) > 1)}, "
        f"{'at most ' * (len(shares) > 1)}{max(shares):.1%} apart"
        for nodes, shares in apart.items()
    )
    return f"runs of one setup (published): {'; '.join(told)}"


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
