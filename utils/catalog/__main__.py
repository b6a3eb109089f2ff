"""`python -m utils.catalog`: prices and cards with dates and ages. `--strict` fails on old ones."""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path

from utils.catalog.age import day_of, is_old
from utils.catalog.devices import DEVICES, device_table
from utils.catalog.prices import old_prices, price_table, read_prices


def main(arguments: list[str] | None = None) -> int:
    """Print both lists; 1 with `--strict` where a price or a card's figures are over a year old."""
    parser = argparse.ArgumentParser(prog="python -m utils.catalog", description=__doc__)
    parser.add_argument("--strict", action="store_true", help="exit 1 if one is over a year old")
    parser.add_argument("--today", type=day_of, help="another day, such as 2027-11-21")
    parser.add_argument("--report", type=Path, help="also write what is old into this JSON file")
    asked = parser.parse_args(arguments)
    if asked.report:
        write_report(asked.report, asked.today)
    print(price_table(asked.today), device_table(asked.today), sep="\n\n")
    prices = len(old_prices(asked.today))
    cards = sum(is_old(row.as_of, asked.today) for row in DEVICES.values())
    print(
        f"\nOlder than a year: {prices} prices, {cards} cards."
        + (" Read them again; edit prices.csv, or as_of in devices.py." if prices + cards else "")
    )
    return 1 if asked.strict and prices + cards else 0


def write_report(file: Path, today: date | None = None) -> None:
    """A row for each price and card, with "error" where it is over a year old; for an issue's text.

    Raises:
        OSError: it cannot be written there.
    """
    found = [(f"{row.provider}, {row.gpu}", row.as_of) for row in read_prices()]
    found += [(name, row.as_of) for name, row in DEVICES.items()]
    rows = [
        {"notebook": name, "error": f"read {day}, over a year ago" if is_old(day, today) else ""}
        for name, day in found
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
