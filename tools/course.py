"""Runs the whole course headless: `make course`.

Every notebook, lab and solution runs in a kernel of its own, in the course's order. The executed
copies go to build/course/ as web pages, with an index that shows seconds, memory and the
scoreboard, and what is over its budget; the figures go to build/course/figures.json. The notebooks
in the repository stay as they are.
"""

from __future__ import annotations

import html
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter
from nbconvert.filters import strip_ansi
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.labs.scoreboard import Scoreboard, read_rows  # noqa: E402
from utils.units import GIB, format_bytes, format_seconds  # noqa: E402

FOLDERS = ("notebooks", "labs", "solutions")
TIERS = ("", "beginner", "intermediate", "advanced")
CELL_TIMEOUT_SECONDS = 600
SAMPLE_SECONDS = 0.2
BUDGET_SECONDS = 90.0
BUDGET_BYTES = 1.5 * GIB
BUDGETS_BYTES = {"09": 2.5 * GIB}  # four ranks with DeepSpeed in each
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Big Models, Small Memory</title>
<style>body {{ font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
td, th {{ padding: .2em 1em; text-align: left }} td.number {{ text-align: right }}
td.over {{ color: #c85200; font-weight: bold }}</style>
<h1>Big Models, Small Memory</h1>
<table><tr><th>notebook</th><th>result</th><th>time</th><th>peak memory of its processes</th>\
<th>budget</th></tr>
{rows}
</table>
<h2>Scoreboard</h2>
{scoreboard}
</html>
"""


@dataclass(frozen=True)
class Run:
    """What one notebook did."""

    path: Path
    error: str
    seconds: float
    peak_bytes: int
    scoreboard: str

    @property
    def budget_bytes(self) -> float:
        """What its processes may hold, by the number of its lesson."""
        return BUDGETS_BYTES.get(self.path.stem.partition("_")[0], BUDGET_BYTES)

    @property
    def over_budget(self) -> str:
        """What is over its budget; "" if nothing is."""
        found = []
        if self.seconds > BUDGET_SECONDS:
            found.append(f"over {format_seconds(BUDGET_SECONDS)}")
        if self.peak_bytes > self.budget_bytes:
            found.append(f"over {format_bytes(self.budget_bytes)}")
        return ", ".join(found)


class MemoryWatch:
    """Samples the memory of a process and its children: what they hold, shared pages by share."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, pid: int) -> None:
        """Begin to sample."""
        self._thread = threading.Thread(target=self._sample, args=(pid,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _sample(self, pid: int) -> None:
        while not self._stop.is_set():
            with suppress(psutil.Error):  # the kernel itself may have ended
                kernel = psutil.Process(pid)
                processes = [kernel, *kernel.children(recursive=True)]
                self.peak_bytes = max(self.peak_bytes, held_together(processes))
            self._stop.wait(SAMPLE_SECONDS)


def held_together(processes: Iterable[psutil.Process]) -> int:
    """The memory of several processes; one that has just ended holds none."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += held_bytes(process)
    return total


def held_bytes(process: psutil.Process) -> int:
    """Proportional memory where the system tells it (Linux), else resident memory."""
    memory = process.memory_full_info()
    return getattr(memory, "pss", 0) or memory.rss


def notebooks(root: Path = ROOT) -> list[Path]:
    """Everything in the order of the course: a lesson, its lab as handed out, the solution."""
    found = [path for folder in FOLDERS for path in root.glob(f"{folder}/**/*.ipynb")]
    found = [path for path in found if ".ipynb_checkpoints" not in path.parts]
    return sorted(found, key=lambda path: place(path.relative_to(root)))


def place(path: Path) -> tuple[int, str, int]:
    """The sorting key of a notebook: tier, number and name, then lesson, lab, solution."""
    folder, *tier, _ = path.parts
    return TIERS.index(tier[0] if tier else ""), path.stem, FOLDERS.index(folder)


def _kernel_pid(client: NotebookClient) -> int:
    """The process of a notebook's kernel, which runs on this machine."""
    provisioner = client.km.provisioner if client.km else None
    assert isinstance(provisioner, LocalProvisioner) and provisioner.pid is not None
    return provisioner.pid


def run(
    path: Path, target: Path, scoreboard: Path, cell_seconds: int = CELL_TIMEOUT_SECONDS
) -> Run:
    """Run one notebook and write it as a web page; its scores go to the file `scoreboard`."""
    notebook = nbformat.read(path, as_version=4)
    watch, started = MemoryWatch(), time.perf_counter()
    bar = tqdm(total=len(notebook.cells), desc=path.stem[:28].ljust(28), unit="cell", leave=True)
    client = NotebookClient(
        notebook,
        timeout=cell_seconds,
        kernel_name="python3",
        extra_arguments=["--log-level=40"],  # no warning about plain TCP on the loopback address
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_complete=lambda **_: bar.update(),
    )
    error = ""
    try:
        with bar, client.setup_kernel(env=os.environ | {"COURSE_SCOREBOARD": str(scoreboard)}):
            watch.start(_kernel_pid(client))
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
    except (CellExecutionError, DeadKernelError, TimeoutError) as problem:
        error = strip_ansi(str(problem)).strip().splitlines()[-1]
    finally:
        watch.stop()
    seconds = time.perf_counter() - started
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(HTMLExporter().from_notebook_node(notebook)[0], encoding="utf-8")
    return Run(path, error, seconds, watch.peak_bytes, rows_so_far(scoreboard))


def rows_so_far(path: Path) -> str:
    """All rows of a scoreboard's file, as HTML; "" while there are none."""
    rows = read_rows(path)
    by_lesson = sorted(rows, key=lambda row: row.lesson)
    return Scoreboard(tuple(by_lesson))._repr_html_() if rows else ""


def index_page(runs: list[Run], root: Path = ROOT) -> str:
    """The table of all runs and the last scoreboard."""
    boards = [result.scoreboard for result in runs if result.scoreboard]
    rows = "\n".join(index_row(result, root) for result in runs)
    return PAGE.format(rows=rows, scoreboard=boards[-1] if boards else "<p>No entries yet.</p>")


def index_row(result: Run, root: Path) -> str:
    """One row of the index."""
    name = result.path.relative_to(root).with_suffix("")
    state = html.escape(result.error) or "passed"
    mark = f'<td class="over">{result.over_budget}</td>' if result.over_budget else "<td></td>"
    return (
        f'<tr><td><a href="{name}.html">{name}</a></td><td>{state}</td>'
        f'<td class="number">{format_seconds(result.seconds)}</td>'
        f'<td class="number">{format_bytes(result.peak_bytes)}</td>{mark}</tr>'
    )


def figures(runs: list[Run], root: Path = ROOT) -> str:
    """All runs as JSON, to be compared with those of another day."""
    rows = [
        {
            "notebook": result.path.relative_to(root).as_posix(),
            "seconds": round(result.seconds, 2),
            "peak_bytes": result.peak_bytes,
            "budget_seconds": BUDGET_SECONDS,
            "budget_bytes": int(result.budget_bytes),
            "over_budget": result.over_budget,
            "error": result.error,
        }
        for result in runs
    ]
    return json.dumps(rows, indent=1) + "\n"


def summary(runs: list[Run], root: Path) -> int:
    """Print a line for each run and one for all; the number that failed."""
    for result in runs:
        numbers = f"{format_seconds(result.seconds):>8}  {format_bytes(result.peak_bytes):>10}"
        state = ", ".join(filter(None, [result.error or "passed", result.over_budget]))
        print(f"{numbers}  {result.path.relative_to(root)}  {state}")
    failed = sum(bool(result.error) for result in runs)
    over = sum(bool(result.over_budget) for result in runs)
    counts = f"{len(runs) - failed} passed, {failed} failed, {over} over budget"
    print(f"build/course/index.html: {counts}")
    return failed


def main(root: Path = ROOT) -> int:
    """Run everything; 0 when every notebook ran to its end."""
    folder = root / "build" / "course"
    folder.mkdir(parents=True, exist_ok=True)
    scoreboard = folder / "scoreboard.json"
    scoreboard.unlink(missing_ok=True)  # this run's rows alone
    runs = []
    for path in notebooks(root):
        page = folder / path.relative_to(root).with_suffix(".html")
        runs.append(run(path, page, scoreboard))
        folder.joinpath("index.html").write_text(index_page(runs, root), encoding="utf-8")
        folder.joinpath("figures.json").write_text(figures(runs, root), encoding="utf-8")
    failed = summary(runs, root)
    return 1 if failed or not runs else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nInterrupted: what ran is in build/course/index.html.", file=sys.stderr)
        sys.exit(130)
