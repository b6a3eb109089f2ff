"""Published rows of lesson 18's last section."""

from __future__ import annotations

from typing import NamedTuple

from evidence.validation.tables import table
from utils.catalog import model_shape
from utils.checked import check_public

__all__ = [
    "ALST_TOKENS", "LLAMA_3_ALONE_FLOPS", "LLAMA_3_BATCH_TOKENS", "LLAMA_3_FLOPS", "QWEN3_8B", "TRL_GB", "TRL_SECONDS",
    "torchtitan_runs",
]  # fmt: skip

# Model FLOP/s of a GPU: Llama 3 405B in bf16 on 16,384 H100, 131,072 tokens, CP 16 (arXiv:2407.21783, table 4).
LLAMA_3_FLOPS = 380e12
# The row above it: as many GPUs and tokens a step, sequences of 8,192 tokens, CP 1.
LLAMA_3_ALONE_FLOPS = 400e12
# Of the same row: 8 groups of GPUs with 16 sequences each are a step of the optimizer; the table prints 16M.
LLAMA_3_BATCH_TOKENS = 8 * 16 * 131_072

QWEN3_8B = model_shape("Qwen/Qwen3-8B")

# TRL's guide (huggingface.co/docs/trl/en/long_context_training) and its example (examples/sft_qwen3_8b_1m_context): one
# sequence of 2**20 tokens a step on eight H100s, checkpoints offloaded. Accelerate's way of sharing is left at its default, "allgather".
TRL_SECONDS, TRL_GB = 380, 56.2

# Snowflake's recipe (snowflakedb/ArcticTraining, run-h100-sp1-llama-8b.yml): Llama 3.1 8B alone on one H100 of 80 GB, states and
# checkpoints on the host, MLP tiled. It notes that a sequence of this length runs.
ALST_TOKENS = 500_000


class Row(NamedTuple):
    """A run in long sequences: full checkpointing, compiled, 8-bit products.

    Attributes:
        gpus, length, cp: how many, tokens of a sequence, and GPUs that share one.
        reserved_gib: the largest of all ranks.
        tokens_per_second: of one GPU.
    """

    gpus: int
    length: int
    cp: int
    reserved_gib: float
    tokens_per_second: int

    def __str__(self) -> str:
        """The row in words."""
        return (
            f"CP {self.cp}: {self.length:>7,} tokens, {self.length // self.cp:,} a rank: {self.reserved_gib} GiB "
            f"reserved, {self.tokens_per_second:>5,} tokens/s a GPU"
        )


def torchtitan_runs(number: str = "2") -> list[Row]:
    """torchtitan's rows in long sequences, those with fewer GPUs to a sequence first: H100 of 96 GB at 500 W.

    Args:
        number: of its page's table: "2" is Llama 3.1 8B on 8 GPUs, "6" its 405B on 512 with TP 8 and PP 8.
    """
    return [
        Row(int(row["n_gpus"]), int(row["seq_len"]), int(row["cp"]), float(row["memory_gib"]), int(row["tps_per_gpu"]))
        for row in table("torchtitan")
        if row["table"] == number
    ]  # fmt: skip


check_public(globals())
