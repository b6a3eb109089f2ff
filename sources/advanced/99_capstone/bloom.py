"""What BLOOM's team noted of micro-batches: the same layout at 1, 2, 4 and 8 sequences."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

FILE = Path(__file__).with_name("bloom_micro_batches.csv")
GLOBAL_BATCH = 2048


def noted_micro_batches() -> pd.DataFrame:
    """Seconds of an iteration (published), by micro-batch and model."""
    rows = _rows()
    named = zip(rows["model"], rows["gpus"], rows["pp"], strict=True)
    rows["layout"] = [f"{model}, {gpus} A100, PP {pp}" for model, gpus, pp in named]
    return rows.pivot(index="micro_batch", columns="layout", values="seconds")


def noted_layouts() -> list[tuple[int, int]]:
    """GPUs and stages of each model, in the order of `noted_micro_batches`."""
    rows = _rows().drop_duplicates("model").sort_values("model")
    return [(int(gpus), int(stages)) for gpus, stages in zip(rows["gpus"], rows["pp"], strict=True)]


def _rows() -> pd.DataFrame:
    return pd.read_csv(FILE, comment="#")


def bubble_share(stages: int, micro_batch: int, replicas: int = 4) -> float:
    """Share of an iteration that a stage idles in a plain pipeline (formula)."""
    micro_batches = GLOBAL_BATCH / replicas / micro_batch
    return (stages - 1) / (micro_batches + stages - 1)
