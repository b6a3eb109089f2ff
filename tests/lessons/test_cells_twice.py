"""Every cell runs twice, and after an interrupt: people go back, change a number, and run it again."""

from __future__ import annotations

import contextlib
import queue
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parents[2]
BOOKS = sorted(
    path for folder in ("notebooks", "solutions") for path in (ROOT / folder).rglob("*.ipynb")
)
QUICK = "00_start_here"  # of a few seconds
CELL_SECONDS = 600.0
INTERRUPT_SECONDS = 60.0  # an interrupted cell has ended by then
LONGEST_WAIT_SECONDS = 4.0
STARTS_RANKS = re.compile(
    r"\b(run_ranks|run_torchrun|run_elastic|run_hosts|run_ray|prepare_ranks)\("
)


@contextlib.contextmanager
def kernel(folder: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """A kernel that works in a folder, ended afterwards."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(client: BlockingKernelClient, code: str) -> str:
    """Run a cell to its end; its error, or ""."""
    reply = client.execute_interactive(
        code, timeout=CELL_SECONDS, output_hook=lambda message: None, allow_stdin=False
    )
    return error_of(reply)


def error_of(reply: dict[str, Any]) -> str:
    content = reply["content"]
    return f"{content['ename']}: {content['evalue']}" if content["status"] == "error" else ""


def interrupt(manager: KernelManager, client: BlockingKernelClient, code: str, after: float) -> str:
    """Start a cell and interrupt it after some seconds; what came of it."""
    asked = client.execute(code, allow_stdin=False)
    with contextlib.suppress(queue.Empty):
        return error_of(reply_to(client, asked, after))  # it was through before
    manager.interrupt_kernel()
    return error_of(reply_to(client, asked, INTERRUPT_SECONDS))


def reply_to(client: BlockingKernelClient, asked: str, seconds: float) -> dict[str, Any]:
    while True:
        reply = client.get_shell_msg(timeout=seconds)
        if reply["parent_header"].get("msg_id") == asked:
            return reply


def problems(path: Path, interrupts: random.Random | None) -> list[str]:
    """What went wrong as each cell of a notebook ran a second time; with interrupts before that."""
    cells = nbformat.read(path, as_version=4).cells
    found = []
    with kernel(path.parent) as (manager, client):
        for place, cell in enumerate(cells):
            if cell.cell_type != "code" or "raises-exception" in cell.metadata.get("tags", []):
                continue
            if interrupts and STARTS_RANKS.search(cell.source):
                said = interrupt(
                    manager, client, cell.source, interrupts.random() * LONGEST_WAIT_SECONDS
                )
                if said and "KeyboardInterrupt" not in said and "nterrupt" not in said:
                    found.append(f"[{place}] interrupted: {said}")
            for time in ("first", "second"):
                if error := run(client, cell.source):
                    found.append(f"[{place}] run a {time} time: {error}")
                    break
    return found


def test_a_short_lesson_runs_twice() -> None:
    assert problems(ROOT / "notebooks" / f"{QUICK}.ipynb", None) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=str(p.relative_to(ROOT).with_suffix(""))) for p in BOOKS],
)
def test_every_cell_runs_twice_and_after_an_interrupt(path: Path) -> None:
    assert problems(path, random.Random(path.stem)) == []
