"""Runs a lesson for several learners at once on this machine: what one machine for ten can take.

python tools/many_learners.py --learners 10

Each learner has a kernel and a scoreboard of their own, as on a shared JupyterHub; all cells run as
"Run all" does, which is the worst moment of a class. Peak memory and seconds go to
docs/instructor/measured.json.

Threads that wait for work sleep here (`OMP_WAIT_POLICY=passive`), as docs/instructor/room.md asks of
a shared machine: by default they spin, and take the processors from the learners whose threads work.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import psutil
from course import _kernel_pid, held_together
from nbclient import NotebookClient
from workshop import MIB, ROOT, load, machine, save

LESSON = "notebooks/beginner/01_where_memory_goes.ipynb"
SAMPLE_SECONDS = 0.5
CELL_SECONDS = 1800


@dataclass
class Room:
    """The kernels of a class, and the most that they held together."""

    kernels: set[int] = field(default_factory=set)
    peak_bytes: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Sample what all kernels and their children hold, until it is over."""
        while not self.over.wait(SAMPLE_SECONDS):
            held = [process for pid in list(self.kernels) for process in family(pid)]
            self.peak_bytes = max(self.peak_bytes, held_together(held))


def family(pid: int) -> list[psutil.Process]:
    """A process and what it started; nothing once it has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def learn(room: Room, path: Path, number: int, folder: Path) -> float:
    """One learner's run of a lesson; its seconds.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        startup_timeout=600,
        extra_arguments=["--log-level=40"],  # no warning about plain TCP on the loopback address
        resources={"metadata": {"path": str(path.parent)}},
    )
    mine = {
        "COURSE_SCOREBOARD": str(folder / f"learner-{number}.json"),
        "TQDM_DISABLE": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    started = time.perf_counter()
    with client.setup_kernel(env=os.environ | mine):
        room.kernels.add(pid := _kernel_pid(client))
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        room.kernels.discard(pid)
    return time.perf_counter() - started


def together(learners: int, path: Path) -> dict:
    """Run a lesson for some learners at once; peak of all, and seconds of each."""
    room = Room()
    watch = threading.Thread(target=room.watch, daemon=True)
    watch.start()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(learners) as pool:
        runs = [pool.submit(learn, room, path, n, Path(folder)) for n in range(learners)]
        took = [run.result() for run in runs]
        boards = len(list(Path(folder).glob("learner-*.json")))
    room.over.set()
    watch.join()
    return {
        "learners": learners,
        "lesson": path.stem,
        "peak_bytes": room.peak_bytes,
        "median_seconds": round(statistics.median(took)),
        "slowest_seconds": round(max(took)),
        "scoreboards": boards,
    } | machine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, keep and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--learners", type=int, default=10)
    parser.add_argument("--lesson", type=Path, default=ROOT / LESSON)
    options = parser.parse_args(arguments)
    if options.learners < 1:
        parser.error("at least one learner")
    found = together(options.learners, options.lesson.resolve())
    measured = load(ROOT)
    kept = [row for row in measured.get("together", []) if row["learners"] != found["learners"]]
    measured["together"] = sorted([*kept, found], key=lambda row: row["learners"])
    save(ROOT, measured)
    print(
        f"{found['learners']} at once: {found['peak_bytes'] / MIB:,.0f} MiB together, "
        f"{found['median_seconds']} s in the middle, {found['slowest_seconds']} s the slowest"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
