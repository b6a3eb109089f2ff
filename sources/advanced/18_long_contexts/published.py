"""Published rows of lesson 18's last section."""

from __future__ import annotations

from typing import NamedTuple

from evidence.validation.tables import table
from utils.checked import check_public

__all__ = ["torchtitan_rows"]


class Row(NamedTuple):
    """8B in long sequences: full checkpointing, compiled, 8-bit products.

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
            f"8B on {self.gpus} GPUs, CP {self.cp}: {self.length:>7,} tokens, {self.length // self.cp:,} a rank: "
            f"{self.reserved_gib} GiB reserved, {self.tokens_per_second:>4} tokens/s a GPU (published)"
        )


def torchtitan_rows() -> list[Row]:
    """torchtitan's rows of Llama 3.1 8B in long sequences."""
    return [
        Row(int(row["n_gpus"]), int(row["seq_len"]), int(row["cp"]), float(row["memory_gib"]), int(row["tps_per_gpu"]))
        for row in table("torchtitan")
        if row["table"] == "2"
    ]  # fmt: skip


check_public(globals())
