"""Dated prices of a GPU hour, read from `prices.csv` beside this file. Edit that file freely."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from utils.catalog.age import age_days, dated, day_of, is_old
from utils.catalog.lookup import find, plain
from utils.rules import one_of

PRICES_CSV = Path(__file__).with_name("prices.csv")
COLUMNS = ("provider", "gpu", "instance_gpus", "usd_per_gpu_hour", "as_of", "source")
# Columns that a file may leave out, and what holds then.
KINDS = ("on demand", "reserved", "spot")
OPTIONAL = {"kind": "on demand", "fabric": "not stated"}


@dataclass(frozen=True)
class Price:
    """What one provider asked for one GPU.

    Attributes:
        provider: Who asked.
        gpu: The GPU, named as in `devices` where it has a row there.
        instance_gpus: GPUs in the instance that was priced.
        usd_per_gpu_hour: US dollars for one GPU and one hour.
        as_of: The day it was read, such as 2026-11-21; or its month or year.
        source: Where it was read.
        kind: "on demand", "reserved" (for a term) or "spot" (the provider may take it back).
        fabric: Whether a network between nodes that trains is in the price: "yes", "no" or
            "not stated".
    """

    provider: str
    gpu: str
    instance_gpus: int
    usd_per_gpu_hour: float
    as_of: str
    source: str
    kind: str = "on demand"
    fabric: str = "not stated"

    def age_days(self, today: date | None = None) -> int:
        """Days since it was read."""
        return age_days(self.as_of, today)

    def is_old(self, today: date | None = None) -> bool:
        """Whether it is older than a year: then ask again before you decide by it."""
        return is_old(self.as_of, today)

    def origin(self, today: date | None = None) -> str:
        """Provider, kind and date, and a flag where it is older than a year."""
        return f"{self.provider}, {self.kind}, {dated(self.as_of, today)}"


def read_prices(path: Path = PRICES_CSV) -> list[Price]:
    """All prices of a file, in its order. Lines that begin with # are comments.

    Raises:
        ValueError: a column is missing, a price is not a number above zero, or its date is no date.
    """
    if not path.is_file():
        raise FileNotFoundError(f"path is {path}, and there is no such file of prices.")
    with open(path, newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.reader(lines) if row and not row[0].startswith("#")]
    header = [name.strip() for name in rows[0]] if rows else []
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise ValueError(
            f"{path.name} lacks the columns {', '.join(missing)}. "
            f"Its first line must be: {','.join(COLUMNS)}"
        )
    return [_price(dict(zip(header, row, strict=False)), path.name) for row in rows[1:]]


def _price(row: dict[str, str], file: str) -> Price:
    where = f"{file}, {row.get('provider', '?')} {row.get('gpu', '?')}"
    dollars = _positive(row, "usd_per_gpu_hour", where)
    gpus = int(_positive(row, "instance_gpus", where))
    text = {name: row.get(name, "").strip() for name in ("provider", "gpu", "as_of", "source")}
    for name, value in text.items():
        if not value:
            raise ValueError(f"{where}: {name} is empty. Every price needs one.")
    day_of(text["as_of"], where)
    text |= {name: row.get(name, "").strip() or usual for name, usual in OPTIONAL.items()}
    one_of(f"{where}: kind", text["kind"], KINDS)
    return Price(instance_gpus=gpus, usd_per_gpu_hour=dollars, **text)


def _positive(row: dict[str, str], column: str, where: str) -> float:
    text = row.get(column, "").strip()
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{where}: {column} is {text!r}; write a number above zero.")
    return value


def price(
    gpu: str, provider: str | None = None, path: Path = PRICES_CSV, kind: str | None = None
) -> Price:
    """The price of a GPU at one provider, or the lowest of all of them.

    Args:
        gpu: By its name.
        provider: By name; None for all.
        path: The file.
        kind: "on demand", "reserved" or "spot"; None for the two that nobody interrupts.

    Raises:
        ValueError: the file has no such price, or is not readable as prices.
    """
    if kind is not None:
        one_of("kind", kind, KINDS)
    rows = [row for row in read_prices(path) if row.kind == (kind or row.kind)]
    rows = [row for row in rows if kind or row.kind != "spot"]
    if provider is not None:
        named = find({row.provider: row.provider for row in rows}, provider, "provider")
        rows = [row for row in rows if row.provider == named]
    find({row.gpu: row for row in rows}, gpu, "priced GPU" if not provider else f"{provider} GPU")
    return min(
        (row for row in rows if plain(row.gpu) == plain(gpu)), key=lambda row: row.usd_per_gpu_hour
    )


def old_prices(today: date | None = None, path: Path = PRICES_CSV) -> list[Price]:
    """The prices of a file that are older than a year at `today`, by default the machine's day.

    Raises:
        ValueError: the file is not readable as prices.
    """
    return [row for row in read_prices(path) if row.is_old(today)]


def price_table(today: date | None = None, path: Path = PRICES_CSV) -> str:
    """All prices of a file as text, each with its date and age; those older than a year say so.

    Raises:
        ValueError: the file is not readable as prices.
    """
    lines = [f"{'GPU':<12}{'$/GPU hour':>11}  {'kind':<10}{'provider':<20}{'as of':<12}{'days':>5}"]
    for row in read_prices(path):
        flag = "  OLDER THAN A YEAR" if row.is_old(today) else ""
        lines.append(
            f"{row.gpu:<12}{row.usd_per_gpu_hour:>11.3f}  {row.kind:<10}{row.provider:<20}"
            f"{row.as_of:<12}{row.age_days(today):>5}{flag}"
        )
    return "\n".join(lines)
