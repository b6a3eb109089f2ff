"""Rows that were recorded on a named GPU, as a table for a lesson."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from evidence.record.store import Record, Row, recorded
from utils.units import format_bytes, format_seconds


@dataclass(frozen=True)
class RecordedTable:
    """The rows with their evidence, GPU and date; without rows, a sentence instead."""

    table: pd.DataFrame
    sentence: str

    def __str__(self) -> str:
        return self.sentence if self.table.empty else self.table.to_string(index=False)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        page = f"<p>{html.escape(self.sentence)}</p>"
        if not self.table.empty:
            page = self.table.to_html(index=False, border=0)
        return {"text/html": page, "text/plain": str(self)}


def recorded_table(
    experiment: str,
    *,
    where: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
    root: Path | None = None,
) -> RecordedTable:
    """What `python -m evidence.record EXPERIMENT` found on GPUs. What a CPU recorded is left out.

    Args:
        experiment: its name, such as "resnet50".
        where: only rows with these settings, such as `{"image_size": 32, "batch": 64}`.
        columns: only these parts of a row, in this order; all that are one value if empty.
        root: the folder of the records; the repository's if None.

    Raises:
        RecordError: no experiment has this name, or a record is damaged or incomplete.
        ValueError: a column is in no row.
    """
    rows = [
        (record, row)
        for record in recorded(experiment, root)
        if record.on_gpu
        for row in record.rows
        if all(row.get(name) == value for name, value in (where or {}).items())
    ]
    missing = [name for name in columns if rows and not any(name in row for _, row in rows)]
    if missing:
        raise ValueError(f"No recorded row of {experiment} has {', '.join(missing)}.")
    table = pd.DataFrame([_cells(record, row, columns) for record, row in rows]).fillna("")
    return RecordedTable(table, "" if rows else _no_row(experiment, where))


def _no_row(experiment: str, where: Mapping[str, Any] | None) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in (where or {}).items())
    return (
        f"No GPU row of {experiment}{f' with {settings}' if settings else ''} exists yet: "
        f"a machine with a GPU makes one with `python -m evidence.record {experiment}`."
    )


def _cells(record: Record, row: Row, columns: Sequence[str]) -> dict[str, str]:
    wanted = columns or [name for name, value in row.items() if not isinstance(value, (dict, list))]
    cells = {_heading(name): _text(name, row[name]) for name in wanted if name in row}
    origin = {"evidence": str(record.evidence), "GPU": record.device, "date": record.date}
    return {**cells, **origin}


def _heading(name: str) -> str:
    for suffix in ("_bytes", "_seconds"):
        name = name.removesuffix(suffix)
    return name.replace("_", " ")


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_seconds"):
        return format_seconds(value)
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
