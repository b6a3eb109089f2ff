"""What `build.py --check` finds: notebooks that differ from their sources, and broken budgets."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _notebook import BOOTSTRAP, OWN_MODEL, Target, code_sha256, make
from _outputs import problems
from _regions import SourceError
from _stored import missing_runs, read
from nbformat import NotebookNode

LESSON_CELLS = range(25, 61)
MOST_WORDS = 1_800
MOST_SECTIONS = 9
MOST_LESSON_LINES, MOST_FOLDED_LINES = 250, 60  # of code, without the bootstrap
MEDIAN_CODE_LINES, MOST_CODE_LINES = 10, 25
MOST_BYTES = 10**6
MOST_HINTS = 3
FOLDERS = ("notebooks", "labs", "solutions")
_NOT_OURS = {".ipynb_checkpoints", "__pycache__"}
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
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
        yield from _lesson_findings(notebook, prose)
        yield from _code_findings(notebook)
    if target.kind == "lab":
        yield from _hint_findings(prose)


def _lesson_findings(notebook: NotebookNode, prose: str) -> Iterator[str]:
    cells, word_count = len(notebook.cells), words(prose)
    sections = len(re.findall(r"^## ", _CODE.sub("", prose), re.MULTILINE))
    if cells not in LESSON_CELLS:
        yield f"has {cells} cells; a lesson has {LESSON_CELLS[0]} to {LESSON_CELLS[-1]}."
    if word_count > MOST_WORDS:
        yield f"has {word_count:,} words of prose, more than {MOST_WORDS:,}."
    if sections > MOST_SECTIONS:
        yield f"has {sections} sections, more than {MOST_SECTIONS}."


def _code_findings(notebook: NotebookNode) -> Iterator[str]:
    shown, folded = code_lines(notebook)
    if shown > MOST_LESSON_LINES:
        yield f"shows {shown} lines of code, more than {MOST_LESSON_LINES}."
    if folded > MOST_FOLDED_LINES:
        yield f"has {folded} folded lines of code, more than {MOST_FOLDED_LINES}."


def code_lines(notebook: NotebookNode) -> tuple[int, int]:
    """Lines of code that a reader sees, and that are folded away; the bootstrap is neither."""
    shown = folded = 0
    for cell in notebook.cells:
        if cell.cell_type != "code" or BOOTSTRAP in cell.metadata.get("tags", []):
            continue
        lines = len(cell.source.splitlines())
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            folded += lines
        else:
            shown += lines
    return shown, folded


def words(prose: str) -> int:
    """How many words a reader reads: no code, no tags, no addresses, no marks, not the builder's line."""
    without = _NO_PROSE.sub(" ", _CODE.sub(" ", prose.replace(OWN_MODEL, "")))
    return sum(any(map(str.isalnum, word)) for word in without.split())


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
