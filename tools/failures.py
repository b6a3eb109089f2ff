"""Says in Markdown what failed, from a list of results: the text of an issue. Standard library.

The file is a JSON list with "notebook" and "error" in each row, as `make course`, `make colab` and
`make links` write it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def report(file: Path, run: str = "") -> str:
    """The failing rows as a list; a sentence where the job failed before it had any."""
    tail = f"\n\nThe run: {run}" if run else ""
    if not file.is_file():
        return f"The job failed before it wrote {file}: see its log.{tail}\n"
    rows = json.loads(file.read_text(encoding="utf-8"))
    failed = [row for row in rows if row["error"]]
    if not failed:
        return f"None of the {len(rows)} rows of {file} failed; the job itself did: see its log.{tail}\n"
    lines = [f"- `{row['notebook']}`: {one_line(row['error'])}" for row in failed]
    return f"{len(failed)} of {len(rows)} failed.\n\n" + "\n".join(lines) + tail + "\n"


def one_line(text: str) -> str:
    """An error as it fits a list."""
    return " ".join(text.split())[:300]


def main(arguments: Sequence[str]) -> int:
    """Print the report of a file."""
    if len(arguments) != 1:
        print("Usage: failures.py RESULTS.json", file=sys.stderr)
        return 2
    where = os.environ
    run = (
        "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}/actions/runs/{GITHUB_RUN_ID}".format_map(where)
        if "GITHUB_RUN_ID" in where
        else ""
    )
    print(report(Path(arguments[0]), run), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
