"""Lines of lesson 18's last section: the planner's choice by length, and published rows beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from evidence.validation.tables import table
from utils.catalog import model_shape
from utils.checked import check_public
from utils.planner import Batch, Cluster
from utils.planner.flops import block_forward_flops
from utils.planner.search import search
from utils.units import GIB

__all__ = ["chosen_plan", "llama_rows", "torchtitan_rows"]

STEP_TOKENS = 2**22


def chosen_plan(name: str, length: int) -> str:
    """The planner's fastest plan of 4M tokens a step on 64 H100, in one line.

    Args:
        name: of a published shape.
        length: tokens of a sequence; positions go as far.
    """
    shape = replace(model_shape(name), max_sequence=length)
    batch = Batch(sequences=STEP_TOKENS // length, sequence_length=length)
    found, work = search(shape, Cluster(gpu="H100", nodes=8), batch).best, block_forward_flops(shape, length)  # fmt: skip
    if found is None:
        return f"{name:<11} {length:>9,} tokens: nothing fits"
    plan, attention = found.plan, work["attention"] / 2  # a causal token sees half of the keys
    share = attention / (attention + work["matrices"])
    return (
        f"{name:<11} {length:>9,} tokens: TP {plan.tp} PP {plan.pp} CP {plan.cp:>2} DP {plan.dp:>2} "
        f"ZeRO-{plan.zero_stage}, recompute {plan.recompute:<4} {found.step_seconds:>6.1f} s, "
        f"{found.peak.reserved_bytes / GIB:>3.0f} GiB; attention {share:.0%} of a block's work"
    )


def torchtitan_rows() -> Iterator[str]:
    """torchtitan's rows of 8B in long sequences: full checkpointing, compiled, 8-bit products."""
    for row in table("torchtitan"):
        if row["table"] == "2":
            length, cp = int(row["seq_len"]), int(row["cp"])
            yield (
                f"{row['model']:<13} {row['n_gpus']:>3} GPUs, CP {cp}: {length:>7,} tokens, {length // cp:,} a rank: "
                f"{row['memory_gib']} GiB reserved, {row['tps_per_gpu']:>4} tokens/s a GPU (published)"
            )


def llama_rows() -> Iterator[str]:
    """Llama 3 405B, before and in its stage of 131,072 tokens."""
    for row in table("llama3_table4"):
        yield (
            f"Llama 3 405B, {row['n_gpus']:>5} H100, {int(row['seq_len']):>7,} tokens, CP {row['cp']:>2}: "
            f"{row['tflops_per_gpu']} TFLOP/s a GPU (published)"
        )


check_public(globals())
