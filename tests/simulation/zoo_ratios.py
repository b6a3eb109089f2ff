"""Simulates all that the H200 ran and writes both peaks side by side: `python tests/simulation/zoo_ratios.py`.

From the root, with `tests/shared` and the root on PYTHONPATH. It takes minutes, and goes on where it
was stopped; lesson 05a draws the table. A second one has what was reserved, of the programs that had
the card's memory to themselves or of which the record says what others had left.
"""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from test_zoo import run_on
from zoo_sharded import ZOO as ZOO  # registers the programs

from evidence.recorded import (
    CARD,
    FOLDER,
    experiment_rows,
    recorded_fine_tunes,
    rows,
    simulated_adapters,
    simulated_gpt,
)
from utils.lessons.lesson_05a.families import ADAFACTOR, PACKED, PLAIN
from utils.memory import Category
from utils.units import MIB

TABLE, RESERVED = FOLDER / "simulated.csv", FOLDER / "simulated_reserved.csv"
FIELDS_RESERVED = ("program", "kind", "recorded_reserved_bytes", "simulated_reserved_bytes")
FIELDS = ("program", "recorded_peak_bytes", "simulated_peak_bytes")
MOST_LEFT_BYTES = 16 * MIB
Run = tuple[str, int, Callable[[], Any]]


def all_runs() -> Iterator[Run]:
    """Each program's name, the bytes that the GPU's allocator counted, and its simulation."""
    for name, simulated in [
        ("gpt1b_recompute", simulated_gpt),
        ("llama7b_adapters", simulated_adapters),
    ]:
        for index, row in enumerate(experiment_rows(name)):
            yield f"{name} {index}", row["requested_peak_bytes"], lambda s=simulated, r=row: s(r)
    for index, fit in enumerate(recorded_fine_tunes()):
        yield f"fit {index}: {fit.model}", fit.peak_bytes, fit.simulated
    for row in rows("programs"):
        name = row["program"]
        yield name, int(row["requested_peak_bytes"]), lambda name=name: run_on(name, CARD)


def reserved_runs() -> Iterator[tuple[str, str, int, Callable[[], Any]]]:
    """Name, kind, reserved bytes and simulation of each run whose reserved bytes are its own."""
    for name, simulated in [
        ("gpt1b_recompute", simulated_gpt),
        ("llama7b_adapters", simulated_adapters),
    ]:
        for index, row in enumerate(experiment_rows(name)):
            kind = PACKED if row.get("method", "").startswith("QLoRA") else PLAIN
            size = row["reserved_peak_bytes"]
            yield f"{name} {index}", kind, size, lambda s=simulated, r=row: s(r)
    for index, fit in enumerate(recorded_fine_tunes()):
        kind = PACKED if fit.recipe.method == "qlora" else PLAIN
        kind = ADAFACTOR if fit.recipe.optimizer == "adafactor" else kind
        yield f"fit {index}: {fit.model}", kind, fit.reserved_bytes, fit.simulated


def left_by_others(name: str, found: Any) -> int:
    """Bytes that earlier programs of its process had left alive, of which the record has the sum.

    They are some MiB, and stay from one program to the next. What is more is the program's own, and
    missing from its simulation: those after BOFT and LBFGS show nothing of it.
    """
    kept = {row["program"]: int(row["kept_bytes"]) for row in rows("programs")}
    if name not in kept:
        return 0
    end = found.timeline.at(found.timeline.end_ns)
    left = max(0, kept[name] - end.total_bytes + end[Category.OTHER])
    return left if left <= MOST_LEFT_BYTES else 0


def stored(table: Path = TABLE) -> dict[str, dict[str, str]]:
    """The rows of a table that are there, by program."""
    if not table.exists():
        return {}
    with open(table, newline="", encoding="utf-8") as lines:
        return {row["program"]: row for row in csv.DictReader(lines)}


def main() -> None:
    """Append what is missing."""
    done = stored()
    with open(TABLE, "a", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
        if not done:
            writer.writeheader()
        for name, recorded_bytes, simulated in all_runs():
            if name in done:
                continue
            found = simulated()
            real = recorded_bytes - left_by_others(name, found)
            writer.writerow(dict(zip(FIELDS, (name, real, found.peak_bytes), strict=True)))
            out.flush()
            print(f"{found.peak_bytes / real:.5f}  {name}", file=sys.stderr, flush=True)


def write_reserved() -> None:
    """Append what the second table misses."""
    done = stored(RESERVED)
    with open(RESERVED, "a", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, FIELDS_RESERVED, lineterminator="\n")
        if not done:
            writer.writeheader()
        for name, kind, size, simulated in reserved_runs():
            if name not in done:
                values = (name, kind, size, simulated().reserved_bytes)
                writer.writerow(dict(zip(FIELDS_RESERVED, values, strict=True)))
                out.flush()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # The card's PyTorch, 2.11, held a workspace more for products with a bias; any newer one simulates it here.
    with mock.patch("utils.simulation.cublas.LT_APART_UNTIL", (99, 0)):
        main()
        write_reserved()
