"""Published rows of lesson 18's last section."""

from __future__ import annotations

from typing import NamedTuple

from evidence.validation.tables import table
from utils.checked import check_public

__all__ = ["LLAMA_3_FLOPS", "nvidia_tflops", "torchtitan_rows"]

# Model FLOP/s of a GPU: Llama 3 405B in bf16 on 16,384 H100, 131,072 tokens, CP 16 (arXiv:2407.21783, table 4).
LLAMA_3_FLOPS = 380e12

# By GPUs that share a sequence of 32,768 tokens for each: TFLOP/s of one GPU, Llama 2 7B in 8 bits on H100
# (NVIDIA NeMo user guide 24.12, "Long Sequence Performance").
_NVIDIA = {4: 555, 8: 549, 16: 549, 32: 536}


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
            f"CP {self.cp}: {self.length:>7,} tokens, {self.length // self.cp:,} a rank: {self.reserved_gib} GiB "
            f"reserved, {self.tokens_per_second:>4} tokens/s a GPU (published)"
        )


def torchtitan_rows() -> list[Row]:
    """torchtitan's rows of Llama 3.1 8B in long sequences."""
    return [
        Row(int(row["n_gpus"]), int(row["seq_len"]), int(row["cp"]), float(row["memory_gib"]), int(row["tps_per_gpu"]))
        for row in table("torchtitan")
        if row["table"] == "2"
    ]  # fmt: skip


def nvidia_tflops() -> dict[int, int]:
    """TFLOP/s of a GPU by the number that share a sequence, 32,768 tokens on each."""
    return dict(_NVIDIA)


check_public(globals())
