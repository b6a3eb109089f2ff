"""`python -m utils.lessons.lesson_18.records.growth`: the peaks that lesson 18's first picture draws, kept."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ..at_size import of_one_rank
from ..ring import ring_attention

MODEL = "qwen2.5-7b"
LENGTHS = (8_192, 32_768, 131_072, 524_288, 1_048_576)
RANKS = 8
VERSION = torch.__version__.partition("+")[0]
FILE = Path(__file__).parents[1] / "growth.json"
TWO = ("chunked loss", "checkpointing")
LINES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "chunked loss": TWO[:1],
    "checkpointing": TWO[1:],
    "both": TWO,
    "both, checkpoints offloaded": (*TWO, "offload"),
    "both, over a ring of 8": TWO,
}


def peak_bytes(line: str, tokens: int) -> int:
    """The simulated peak of one rank, of one of `LINES`, at a length of the sequence."""
    if "ring" in line:
        return of_one_rank(MODEL, tokens // RANKS, *LINES[line], attend=ring_attention).peak_bytes
    return of_one_rank(MODEL, tokens, *LINES[line]).peak_bytes


def is_the_same(found_bytes: int, kept_bytes: int) -> bool:
    """Whether a peak is the one that was kept; of another PyTorch, whose kernels keep otherwise, to 5%."""
    kept_with = json.loads(FILE.read_text(encoding="utf-8"))["torch"]
    if kept_with == VERSION:
        return found_bytes == kept_bytes
    return abs(found_bytes / kept_bytes - 1) < 0.05


def recorded() -> dict[str, dict[int, int]]:
    """The peaks in bytes that were kept, by line and tokens."""
    kept = json.loads(FILE.read_text(encoding="utf-8"))["peak_bytes"]
    return {line: {int(n): size for n, size in curve.items()} for line, curve in kept.items()}


if __name__ == "__main__":
    peaks = {line: {str(n): peak_bytes(line, n) for n in LENGTHS} for line in LINES}
    FILE.write_text(
        json.dumps({"model": MODEL, "torch": VERSION, "peak_bytes": peaks}, indent=1) + "\n",
        encoding="utf-8",
    )
