"""How far the planner can be trusted here: its speed beside published runs."""

from __future__ import annotations

from dataclasses import replace

from evidence.validation import foundry
from utils.checked import check_public
from utils.planner import estimate

Row = dict[str, str | float]


def beside_published() -> list[Row]:
    """llm-foundry's runs of 1.3B by FSDP on A100 of 40 GB over RoCE: tokens per second of a GPU."""
    rows: list[Row] = []
    for index, row in foundry.lines():
        if (row["model"], row["seq_len"], row["gpu"]) != ("1b", "2048", "a100_40gb"):
            continue
        model, cluster, plan, batch = foundry.setup(row)
        told = estimate(model, replace(cluster, network_kind="RoCE"), plan, batch)
        gpus, published = int(row["n_gpus"]), int(row["throughput_tok_s_gpu"])
        rows.append(
            {
                "GPUs": row["n_gpus"],
                "at once": row["micro_batch_size"],
                "g": row["grad_accum"],
                "tokens/s/GPU, published": f"{published:,}",
                "planner's error": f"{told.tokens_per_second / gpus / published - 1:+.0%}",
                "set its constants": "yes" if index % 2 == 0 else "no",
            }
        )
    return rows


__all__ = ["beside_published"]

check_public(globals())
