"""Published rows of lesson 18's last section."""

from __future__ import annotations

from typing import NamedTuple

from evidence.validation.tables import table
from utils.checked import check_public

__all__ = ["LLAMA_3_FLOPS", "torchtitan_runs"]

# Model FLOP/s of a GPU: Llama 3 405B in bf16 on 16,384 H100, 131,072 tokens, CP 16 (arXiv:2407.21783, table 4).
LLAMA_3_FLOPS = 380e12

# Tables of torchtitan's page, by the model: on H100 of 96 GB at 500 W, compiled; 405B with TP 8 and PP 8 beside CP.
_TABLES = {"llama-3-8b": "2", "llama-3.1-405b": "6"}


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
            f"reserved, {self.tokens_per_second:>4} tokens/s a GPU (published)"
        )


def torchtitan_runs() -> dict[str, list[Row]]:
    """torchtitan's rows in long sequences, by the model, those with fewer GPUs to a sequence first."""
    return {
        model: [
            Row(int(row["n_gpus"]), int(row["seq_len"]), int(row["cp"]), float(row["memory_gib"]), int(row["tps_per_gpu"]))
            for row in table("torchtitan")
            if row["table"] == number
        ]
        for model, number in _TABLES.items()
    }  # fmt: skip


check_public(globals())
