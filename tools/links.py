"""Asks every address that the course leads to whether it is still there: `make links`.

It needs a network. An address that answers 401, 403 or 429 is there, and does not talk to programs.
Results go to build/links.json.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urldefrag
from urllib.request import Request, urlopen

import nbformat

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((https?://[^\s)]+)\)|<(https?://[^\s>]+)>")
THERE = frozenset({401, 403, 405, 406, 418, 429})
TRIES, SECONDS, PAUSE_SECONDS = 3, 20.0, 2.0
AGENT = {"User-Agent": "Mozilla/5.0 (link check of a course)"}


def texts(root: Path) -> Iterable[tuple[str, str]]:
    """Every page of prose: its name and its Markdown."""
    for folder in ("notebooks", "labs", "solutions"):
        for path in sorted((root / folder).rglob("*.ipynb")):
            if ".ipynb_checkpoints" not in path.parts:
                cells = nbformat.read(path, as_version=4).cells
                prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
                yield path.relative_to(root).as_posix(), "\n".join(prose)
    for path in [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]:
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def addresses(root: Path) -> dict[str, list[str]]:
    """Each address without its anchor, and the pages that lead to it."""
    found: dict[str, list[str]] = {}
    for name, text in texts(root):
        for pair in LINK.findall(text):
            address = urldefrag(pair[0] or pair[1]).url
            if name not in found.setdefault(address, []):
                found[address].append(name)
    return found


def problem(address: str, pause_seconds: float = PAUSE_SECONDS) -> str:
    """Why an address cannot be had; "" if it can."""
    said = ""
    for attempt in range(TRIES):
        time.sleep(attempt * pause_seconds)
        try:
            with urlopen(Request(address, headers=AGENT), timeout=SECONDS):
                return ""
        except HTTPError as error:
            error.close()
            if error.code in THERE:
                return ""
            said = f"it answers {error.code}"
            if error.code in (404, 410):
                return said
        except (OSError, HTTPException, ValueError) as error:
            said = f"it cannot be reached ({getattr(error, 'reason', error)})"
    return said


def check(
    found: dict[str, list[str]], pause_seconds: float = PAUSE_SECONDS
) -> list[dict[str, str]]:
    """A row for each address: what it is, who leads there, and its problem."""
    with ThreadPoolExecutor(8) as pool:
        said = pool.map(lambda address: problem(address, pause_seconds), found)
    return [
        {
            "notebook": ", ".join(pages),
            "address": address,
            "error": f"{address}: {what}" * bool(what),
        }
        for (address, pages), what in zip(found.items(), said, strict=True)
    ]


def main(arguments: Sequence[str] = (), root: Path = ROOT) -> int:
    """Check all; 0 if every address answers."""
    rows = check(addresses(root))
    target = root / "build/links.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    broken = [row for row in rows if row["error"]]
    for row in broken:
        print(f"{row['error']} (in {row['notebook']})")
    print(f"{len(rows)} addresses, {len(broken)} of them lead nowhere")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
