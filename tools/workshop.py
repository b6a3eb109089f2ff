"""Minutes for instructors: what lessons take to run, section by section, and to read.

python tools/workshop.py measure [PATH ...]     runs lessons, and keeps seconds and memory
python tools/workshop.py measure --since TIME   goes on: leaves out what was measured after TIME
python tools/workshop.py tables                 writes them into docs/instructor/*.md and the README
python tools/workshop.py tables --check         says which tables are older than that

With a CPU build of PyTorch `measure` keeps memory alone, beside the rest: CUDA's libraries weigh in every
process, and machines without a GPU, Binder's among them, do without them.

Running time is measured, and kept in docs/instructor/measured.json with its machine. Reading time is
computed from words. Whatever else a guide says about minutes is its author's estimate.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import nbformat
from _findings import words
from badges import BINDER_BYTES, BINDER_MOST_BYTES, on_binder
from course import MemoryWatch, _kernel_pid
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
GUIDES = Path("docs/instructor")
MEASURED = GUIDES / "measured.json"
# Slower than a novel: the text is technical, and every second paragraph asks for a look at a figure.
WORDS_PER_MINUTE = 130
CELL_SECONDS = 600
MIB = 2**20
CPU_BUILD = "cpu_build"
_MARK = re.compile(r"<!-- sections: (?P<path>\S+) -->.*?<!-- /sections -->", re.DOTALL)
_SUMMARY = re.compile(r"<!-- lessons -->.*?<!-- /lessons -->", re.DOTALL)
_TOGETHER = re.compile(r"<!-- together -->.*?<!-- /together -->", re.DOTALL)
_README_ROW = re.compile(r"^\| \[[^\]]*\]\((?P<path>notebooks/\S+)\).*$", re.MULTILINE)
# What stands in italics behind a lesson's name in the README: "WSL2, 1 GB+".
_README_MARKS = re.compile(r"(?<=-->)(?: \*(?P<marks>[^*|]+)\*)?(?= \|)")
_BINDER_MARK = re.compile(r"\d GB\+")
_HEADING = re.compile(r"^## (?P<title>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """A part of a lesson under one heading of the second level; the first is its opening."""

    title: str
    words: int
    seconds: float | None

    @property
    def reading_minutes(self) -> float:
        return self.words / WORDS_PER_MINUTE


def titles(notebook: NotebookNode) -> Iterator[tuple[NotebookNode, str, int]]:
    """Each cell, or part of one from heading to heading, with its section and its words."""
    title = "Opening"
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            yield cell, title, 0
            continue
        starts = [0, *(found.start() for found in _HEADING.finditer(cell.source)), None]
        for part in (cell.source[i:j] for i, j in itertools.pairwise(starts)):
            found = _HEADING.match(part)
            title = found["title"].strip() if found else title
            if part:
                yield cell, title, words(part)


def sections(root: Path, path: str, measured: dict) -> list[Section]:
    """The sections of a lesson, in order; seconds where they were measured."""
    notebook = nbformat.read(root / path, as_version=4)
    seconds = measured.get("lessons", {}).get(path, {}).get("sections", {})
    count: dict[str, int] = {}
    for _, title, number in titles(notebook):
        count[title] = count.get(title, 0) + number
    return [Section(title, number, seconds.get(title)) for title, number in count.items()]


def seconds_of(cell: NotebookNode) -> float:
    """What a cell took, from the kernel's own times."""
    times = cell.metadata.get("execution", {})
    begin, end = times.get("iopub.status.busy"), times.get("iopub.status.idle")
    if not begin or not end:
        return 0.0
    parse = datetime.datetime.fromisoformat
    return (parse(end) - parse(begin)).total_seconds()


def measure(root: Path, path: str) -> dict:
    """Run a lesson twice: its seconds by section, then the peak of its processes' memory.

    Watching memory takes time, from what is watched too, so no second is counted while that runs.

    Raises:
        CellExecutionError, CellTimeoutError, DeadKernelError: a cell failed, or the kernel did.
    """
    by_section: dict[str, float] = {}
    for cell, title, _ in titles(executed(root, path)):
        by_section[title] = round(by_section.get(title, 0.0) + seconds_of(cell), 1)
    watch = MemoryWatch()
    executed(root, path, watch)
    return {
        "seconds": round(sum(by_section.values()), 1),
        "peak_bytes": watch.peak_bytes,
        "sections": by_section,
    }


def measure_memory(root: Path, path: str) -> dict:
    """The peak of a lesson's processes alone.

    Raises:
        CellExecutionError, CellTimeoutError, DeadKernelError: a cell failed, or the kernel did.
    """
    watch = MemoryWatch()
    executed(root, path, watch)
    return {"peak_bytes": watch.peak_bytes}


def is_cpu_build() -> bool:
    """Whether the installed PyTorch was built without CUDA."""
    from torch.version import cuda  # here: tables need no torch

    return cuda is None


def executed(root: Path, path: str, watch: MemoryWatch | None = None) -> NotebookNode:
    """A lesson with the times of its cells, run in a kernel of its own.

    Raises:
        CellExecutionError, CellTimeoutError, DeadKernelError: a cell failed, or the kernel did.
    """
    notebook = nbformat.read(root / path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=True,
        extra_arguments=["--log-level=40"],  # no warning about plain TCP on the loopback address
        resources={"metadata": {"path": str((root / path).parent)}},
    )
    with tempfile.TemporaryDirectory() as folder:
        board = {"COURSE_SCOREBOARD": f"{folder}/board.json", "TQDM_DISABLE": "1"}
        with client.setup_kernel(env=os.environ | board):
            if watch:
                watch.start(_kernel_pid(client))
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            if watch:
                watch.stop()
    return notebook


def machine() -> dict[str, str | float]:
    """Where and when it was measured, and how much else ran there."""
    return {
        "load": round(os.getloadavg()[0], 1),
        "machine": f"{os.cpu_count()} processors, {platform.system()}, Python {platform.python_version()}",
        "torch": version("torch").partition("+")[0],
        "date": datetime.date.today().isoformat(),
        "ended": datetime.datetime.now().isoformat(timespec="seconds"),
    }


def load(root: Path) -> dict:
    """What was measured so far."""
    file = root / MEASURED
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def save(root: Path, measured: dict) -> None:
    """Keep what was measured."""
    (root / MEASURED).write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


def minutes(number: float) -> str:
    """Minutes as a guide shows them."""
    return "under 1" if number < 0.5 else f"{number:.0f}"


def section_table(found: Sequence[Section]) -> str:
    """The table of one lesson."""
    head = [
        "| section | reading, minutes (from words) | running, seconds (measured) |",
        "|---|---|---|",
    ]
    rows = [f"| {s.title} | {minutes(s.reading_minutes)} | {seconds(s.seconds)} |" for s in found]
    total = sum(s.reading_minutes for s in found)
    known = [s.seconds for s in found if s.seconds is not None]
    rows.append(f"| **all** | **{total:.0f}** | **{seconds(sum(known) if known else None)}** |")
    return "\n".join([*head, *rows])


def seconds(number: float | None) -> str:
    """Seconds as a guide shows them."""
    return "not measured" if number is None else "under 1" if number < 0.5 else f"{number:.0f}"


def summary_table(root: Path, measured: dict) -> str:
    """One row for each lesson that was measured: a new one comes with its numbers."""
    head = [
        "| lesson | reading, minutes (from words) | running, seconds (measured) | memory, MiB (measured) "
        "| without CUDA's libraries, MiB (measured) |",
        "|---|---|---|---|---|",
    ]
    rows = []
    for path in (path for path in lessons(root) if path in measured.get("lessons", {})):
        parts, kept = sections(root, path, measured), measured["lessons"][path]
        reading = sum(part.reading_minutes for part in parts)
        memory = [
            mebibytes(of.get(path)) for of in (measured.get("lessons", {}), without_cuda(measured))
        ]
        rows.append(
            f"| {title(root, path)} | {reading:.0f} | {seconds(kept.get('seconds'))} | {' | '.join(memory)} |"
        )
    notes = [
        f"**{name}.** {origin(list(there.values()))}"
        for name, there in (
            ("Seconds and memory", measured.get("lessons")),
            (
                "Without CUDA's libraries (PyTorch's CPU build, as laptops without a GPU take it)",
                without_cuda(measured),
            ),
        )
        if there
    ]
    return "\n".join([*head, *rows, *(line for note in notes for line in ("", note))])


def without_cuda(measured: dict) -> dict:
    """By lesson, what was measured with a CPU build of PyTorch."""
    return measured.get(CPU_BUILD, {})


def mebibytes(row: dict | None) -> str:
    """A row's memory as a guide shows it."""
    return f"{row['peak_bytes'] / MIB:,.0f}" if row else "not measured"


def origin(rows: Sequence[dict]) -> str:
    """Where rows were measured, in a sentence; a load above the processors makes seconds longer."""
    places = sorted({f"{row['machine']}, torch {row['torch']}, {row['date']}" for row in rows})
    loads = sorted({round(row["load"]) for row in rows if "load" in row})
    busy = f", at a load of {' to '.join(map(str, {loads[0]: 0, loads[-1]: 0}))}" if loads else ""
    return f"Measured on {'; '.join(places)}{busy}."


def together_table(measured: dict) -> str:
    """What several learners at once took."""
    rows = [
        f"| {row['learners']} | {row['peak_bytes'] / MIB:,.0f} | "
        f"{row['peak_bytes'] / MIB / row['learners']:,.0f} | {row['median_seconds']} | "
        f"{row['slowest_seconds']} |"
        for row in measured.get("together", [])
    ]
    if not rows:
        return "Not measured yet."
    head = [
        "| learners at once | memory of all, MiB | a learner, MiB | seconds, median | slowest |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, "", origin(measured["together"])])


def title(root: Path, path: str) -> str:
    """A lesson's heading."""
    return nbformat.read(root / path, as_version=4).cells[0].source.partition("\n")[0].lstrip("# ")


def lessons(root: Path) -> list[str]:
    """All lessons in the order of the course."""
    found = sorted((root / "notebooks").rglob("[0-9]*.ipynb"), key=lambda path: path.name)
    return [
        p.relative_to(root).as_posix()
        for p in found
        if "glossary" not in p.name and ".ipynb_checkpoints" not in p.parts
    ]


def filled(root: Path, text: str, measured: dict) -> str:
    """A guide with its tables written anew."""

    def table(match: re.Match[str]) -> str:
        found = section_table(sections(root, match["path"], measured))
        return f"<!-- sections: {match['path']} -->\n{found}\n<!-- /sections -->"

    summary = f"<!-- lessons -->\n{summary_table(root, measured)}\n<!-- /lessons -->"
    together = f"<!-- together -->\n{together_table(measured)}\n<!-- /together -->"
    text = _TOGETHER.sub(lambda _: together, _MARK.sub(table, text))
    return _SUMMARY.sub(lambda _: summary, text)


def beyond_binder(text: str, measured: dict) -> str:
    """The README, whose row of a lesson says how it stands to Binder's memory, where that was measured."""
    known = on_binder(measured)

    def row(match: re.Match[str]) -> str:
        taken = known.get(match["path"], {}).get("peak_bytes")
        if taken is None:
            return match[0]
        limit = 2 if taken > BINDER_MOST_BYTES else 1 if taken > BINDER_BYTES else 0
        return _README_MARKS.sub(lambda found: _marked(found["marks"] or "", limit), match[0], 1)

    return _README_ROW.sub(row, text)


def _marked(marks: str, limit_gb: int) -> str:
    """The marks of a lesson with the limit of Binder's that it passes; 0 for none."""
    others = [mark for mark in marks.split(", ") if mark and not _BINDER_MARK.fullmatch(mark)]
    told = ", ".join([*others, *[f"{limit_gb} GB+"] * bool(limit_gb)])
    return f" *{told}*" if told else ""


def outdated(root: Path) -> dict[Path, str]:
    """Guides, and the README, that differ from the lessons, with the text that they should have."""
    measured = load(root)
    guides = [*sorted((root / GUIDES).glob("*.md")), root / "README.md"]
    texts = {path: path.read_text(encoding="utf-8") for path in guides}
    new = {
        path: beyond_binder(filled(root, text, measured), measured) for path, text in texts.items()
    }
    return {path: text for path, text in new.items() if text != texts[path]}


def measure_all(root: Path, paths: Sequence[str], since: str) -> int:
    """Measure lessons and keep each as it ends; how many failed."""
    failed = 0
    kind, run = (CPU_BUILD, measure_memory) if is_cpu_build() else ("lessons", measure)
    for path in paths:
        if since and load(root).get(kind, {}).get(path, {}).get("ended", "") >= since:
            continue
        try:
            result = run(root, path)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as problem:
            failed += 1
            print(f"{path}  failed: {str(problem).strip().splitlines()[-1]}", flush=True)
            continue
        measured = load(root)
        measured.setdefault(kind, {})[path] = result | machine()
        save(root, measured)
        took = f"{result['seconds']} s  " if "seconds" in result else ""
        print(f"{path}  {took}{result['peak_bytes'] / MIB:.0f} MiB", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Measure, write or check; 0 if all is well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("measure", "tables"))
    parser.add_argument("paths", nargs="*", help="lessons; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--since", default="", help="such as 2026-11-22T21:30, local time")
    options = parser.parse_intermixed_args(arguments)  # a path may follow --since
    if options.what == "measure":
        if unknown := sorted(set(options.paths) - set(lessons(root))):
            parser.error(f"no lessons: {', '.join(unknown)}; write notebooks/beginner/01_...ipynb")
        return 1 if measure_all(root, options.paths or lessons(root), options.since) else 0
    changed = outdated(root)
    for path, text in changed.items():
        print(
            f"{path.relative_to(root)}: {'older than the lessons' if options.check else 'written'}"
        )
        if not options.check:
            path.write_text(text, encoding="utf-8")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
