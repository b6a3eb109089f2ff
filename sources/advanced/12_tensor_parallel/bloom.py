"""Of BLOOM's log: pairs of layouts that differ in TP and DP, and setups that were run more than once."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd

PAIRS = Path(__file__).with_name("bloom_prequel_pairs.csv")
REPEATS = Path(__file__).with_name("bloom_prequel_repeats.csv")
GPUS, BATCH = 384, 2048  # of every pair
FASTER_NODES = "02-25"  # "do not compare today's numbers to yesterday's"


def bloom_prequel_pairs() -> pd.DataFrame:
    """What a smaller degree gains: as logged (published), and with the bubble taken out (estimated).

    At a fixed batch a smaller degree means more replicas, so fewer micro-batches for each pipeline.
    """
    return pd.DataFrame(map(_pair, _rows(PAIRS)))


def bloom_prequel_repeats() -> str:
    """What the log says of noise: a line for each setup with several runs, on nodes of one speed."""
    runs: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in _rows(REPEATS):
        setup = (row["nodes"], row["model"], row["tp"], row["stages"], row["micro_batch"])
        runs.setdefault((*setup, str(row["day"] >= FASTER_NODES)), []).append(row)
    lines = ["TFLOP/s of setups that the log repeats (published)"]
    for (nodes, model, tp, stages, micro_batch, _), rows in runs.items():
        rates = [float(row["tflops"]) for row in rows]
        told = ", ".join(f"{row['tflops']} ({row['day']})" for row in rows)
        where = f"{nodes} node" if nodes == "1" else f"{nodes} nodes"
        setup_told = f"{where}, {model}, TP {tp}, stages {stages}, micro-batch {micro_batch}"
        lines.append(f"  {setup_told}: {told}, {max(rates) / min(rates) - 1:.1%} apart")
    return "\n".join(lines)


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


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
