"""What `build.py --check` finds: notebooks that differ from their sources, and broken budgets."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _notebook import Target, code_sha256, make
from _outputs import problems
from _regions import SourceError
from _stored import missing_runs, read
from nbformat import NotebookNode

LESSON_CELLS = range(40, 71)
SHORT_CELLS = range(15, 41)  # of a short notebook between two lessons, numbered 05a
MOST_WORDS = 2_400
MEDIAN_CODE_LINES, MOST_CODE_LINES = 10, 25
MOST_BYTES = 10**6
MOST_HINTS = 3
FOLDERS = ("notebooks", "labs", "solutions")
_NOT_OURS = {".ipynb_checkpoints", "__pycache__"}
_NO_PROSE = re.compile(r"</?[a-zA-Z!][^>]*>|\]\([^)]*\)|!\[[^\]]*\]")


def findings(root: Path, targets: list[Target], *, leftovers: bool) -> list[str]:
    """Everything that is wrong with the stored notebooks, one sentence each."""
    found = [f"{t.path.as_posix()}: {what}" for t in targets for what in _of_target(t, root)]
    return found + (_leftovers(root, targets) if leftovers else [])


def _of_target(target: Target, root: Path) -> Iterator[str]:
    try:
        made = make(target, root)
    except SourceError as error:
        yield f"cannot be built: {error}"
        return
    for finding in budget_findings(made, target):
        yield f"{finding} Edit {target.source.as_posix()}."
    if any("TODO" in cell.source for cell in made.cells):
        yield f"says TODO. Write your own words there, in {target.source.as_posix()}."
    stored = read(root / target.path)
    if stored is None:
        yield "is missing or is no notebook; run `make notebooks`."
        return
    yield from too_large((root / target.path).stat().st_size)
    yield from _differences(made, stored)
    if target.is_executed:
        yield from _of_outputs(stored)
    elif any(cell.get("outputs") or cell.get("execution_count") for cell in stored.cells):
        yield f"is a {target.kind} and has outputs; run `make notebooks`."


def _differences(made: NotebookNode, stored: NotebookNode) -> Iterator[str]:
    wanted, there = [[_core(cell) for cell in book.cells] for book in (made, stored)]
    if wanted != there:
        pairs = enumerate(zip(wanted, there, strict=False), start=1)
        first = next((i for i, (w, t) in pairs if w != t), min(len(wanted), len(there)) + 1)
        source = made.metadata.course.source
        yield f"differs from {source} from cell {first} on; run `make notebooks`."
    if _course(made) != _course(stored):
        yield "has other metadata than its source makes; run `make notebooks`."


def _core(cell: NotebookNode) -> tuple[Any, ...]:
    return (cell.get("id"), cell.cell_type, cell.source, cell.metadata)


def _course(notebook: NotebookNode) -> tuple[Any, ...]:
    """The metadata that building sets. Jupyter adds versions of its own when it saves."""
    course = dict(notebook.metadata.get("course", {}))
    course.pop("code_sha256", None)
    return (course, notebook.metadata.get("kernelspec", {}).get("name"))


def _of_outputs(stored: NotebookNode) -> Iterator[str]:
    if stored.metadata.get("course", {}).get("code_sha256") != code_sha256(stored):
        yield "has stale outputs: its code changed after its run; run `make notebooks`."
    yield from (f"{cell} was not run; run `make notebooks`." for cell in missing_runs(stored))
    yield from (f"{problem}." for problem in problems(stored))


def too_large(size: int) -> Iterator[str]:
    """A finding if a file of `size` bytes is over the limit."""
    if size > MOST_BYTES:
        yield f"has {size / 1e6:.1f} MB, more than 1 MB; draw fewer or smaller figures."


def budget_findings(notebook: NotebookNode, target: Target) -> Iterator[str]:
    """What is over budget in a notebook's cells and prose."""
    if target.kind == "page":
        return
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    lengths = [len(source.splitlines()) for source in code]
    if max(lengths) > MOST_CODE_LINES:
        first = code[lengths.index(max(lengths))].partition("\n")[0]
        yield f"a code cell has {max(lengths)} lines, more than {MOST_CODE_LINES}: `{first}`."
    if statistics.median(lengths) > MEDIAN_CODE_LINES:
        yield f"the median code cell has more than {MEDIAN_CODE_LINES} lines."
    if target.kind == "lesson" and not target.path.name.startswith("00"):
        is_short = target.path.name[2] != "_"
        allowed = SHORT_CELLS if is_short else LESSON_CELLS
        yield from _lesson_findings(len(notebook.cells), allowed, words(prose))
    if target.kind == "lab":
        yield from _hint_findings(prose)


def _lesson_findings(cells: int, allowed: range, word_count: int) -> Iterator[str]:
    if cells not in allowed:
        yield f"has {cells} cells; a lesson has {allowed[0]} to {allowed[-1]}."
    if word_count > MOST_WORDS:
        yield f"has {word_count:,} words of prose, more than {MOST_WORDS:,}."


def words(prose: str) -> int:
    """How many words a reader reads: no tags, no addresses, no marks."""
    return sum(any(map(str.isalnum, word)) for word in _NO_PROSE.sub(" ", prose).split())


def _hint_findings(prose: str) -> Iterator[str]:
    for section in re.split(r"^## ", prose, flags=re.MULTILINE):
        hints = len(re.findall(r"<summary>\s*Hint", section))
        if hints > MOST_HINTS:
            title = section.partition("\n")[0]
            yield f"{title!r} has {hints} hints; an exercise has at most {MOST_HINTS}."


def _leftovers(root: Path, targets: list[Target]) -> list[str]:
    known = {root / target.path for target in targets}
    files = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    files = [path for path in files if not path.name.startswith(".")]
    strays = sorted(p for p in files if p not in known and not _NOT_OURS & set(p.parts))
    return [f"{p.relative_to(root).as_posix()}: no source makes this; delete it." for p in strays]
