"""The script of the lesson's last cell: its text as printed there, and a run of it on ranks."""

from __future__ import annotations

import contextlib
import io
import logging
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from utils.checked import check_public
from utils.ranks import run_ranks

__all__ = ["monday_script", "run_script"]


def monday_script() -> str:
    """The first block of code under *On Monday*, as it stands on the page.

    Raises:
        ValueError: the page has none.
    """
    page = Path(__file__).with_name("lesson.py").read_text(encoding="utf-8")
    _, found, last = page.rpartition("\n# ## On Monday\n")
    lines = [line.removeprefix("#").removeprefix(" ") for line in last.splitlines()]
    if not found or "```python" not in lines:
        raise ValueError("lesson.py ends in '## On Monday', with a block of python.")
    begins = lines.index("```python") + 1
    return "\n".join(lines[begins : lines.index("```", begins)]) + "\n"


def run_script(path: Path, ranks: int, *arguments: str) -> list[str]:
    """Run a script as `torchrun` does, in its own folder: the lines that all ranks print, in order."""
    printed = run_ranks(_as_torchrun_does, ranks, str(path), arguments, timeout_seconds=300)
    return sorted(line for text in printed for line in text.splitlines())


def _as_torchrun_does(path: str, arguments: Sequence[str]) -> str:
    dist.destroy_process_group()  # the script makes its own
    sys.argv = [path, *arguments]
    logging.getLogger("torch.distributed.tensor").setLevel(
        logging.ERROR
    )  # how to sum a norm faster
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.chdir(Path(path).parent),
        warnings.catch_warnings(action="ignore"),
    ):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


check_public(globals())
