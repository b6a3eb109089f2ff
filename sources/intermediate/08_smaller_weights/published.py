"""What rounding costs Llama-2-7B and 70B: the perplexities that AWQ's authors published."""

from __future__ import annotations

import csv
from pathlib import Path

FILE = Path(__file__).with_name("llama2_perplexity.csv")
GROUP = 128  # of all rows
METHODS = ("nearest", "GPTQ", "GPTQ, reordered", "AWQ")


def perplexity(model: str, bits: int = 16, method: str = "") -> float:
    """A row of the table, per token of WikiText-2; with no method the model in 16 bits.

    Raises:
        KeyError: the table has no such row.
    """
    return _rows()[model, bits, method]


def growth(model: str, bits: int, method: str) -> float:
    """By how many percent perplexity grows over that in 16 bits.

    Raises:
        KeyError: the table has no such row.
    """
    return 100 * (perplexity(model, bits, method) / perplexity(model) - 1)


def stored_bits(bits: int, group: int = GROUP) -> float:
    """Bits a weight where each group keeps a scale of 16 bits and a zero point of `bits`."""
    return bits + (16 + bits) / group


def source() -> str:
    """Where the table was read."""
    with open(FILE, encoding="utf-8") as lines:
        return lines.readline().removeprefix("# source: ").strip()


def _rows() -> dict[tuple[str, int, str], float]:
    with open(FILE, newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        return {(r["model"], int(r["bits"]), r["method"]): float(r["perplexity"]) for r in rows}
