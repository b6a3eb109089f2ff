"""Turns one percent script into a notebook: cells, ids, bootstrap, badges. Runs nothing."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
from _regions import SourceError, lab_text, lesson_text, solution_text
from badges import badge_markdown, repository_url
from nbformat import NotebookNode

BADGES = "{{badges}}"
BOOTSTRAP = "bootstrap"
OWN_MODEL = (
    "*Does your own model fit, and what would make it fit? [Ask here](../00a_your_model.ipynb).*"
)
_CELL_OPTIONS = {"tags", "jupyter"}
# Of a lesson's folder: each script, where its notebook goes, and what that is.
_SCRIPTS = (
    ("lesson", Path("notebooks"), "lesson"),
    ("page", Path("notebooks"), "page"),
    ("lab", Path("labs"), "lab"),
    ("lab", Path("solutions"), "solution"),
)
_TEXT_OF = {"lesson": lesson_text, "page": lesson_text, "lab": lab_text, "solution": solution_text}
_KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# Without the version, which differs between machines.
_LANGUAGE = {
    "name": "python",
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}


@dataclass(frozen=True)
class Target:
    """A notebook to build: its script, its place, and "lesson", "page", "lab" or "solution".

    A page is prose alone, such as the glossary: a notebook, so that links to it open in JupyterLab
    and in Colab alike. Both paths are relative to the repository.
    """

    source: Path
    path: Path
    kind: str

    @property
    def is_executed(self) -> bool:
        return self.kind in ("lesson", "solution")


def targets(root: Path) -> list[Target]:
    """Every notebook that the lessons' folders under sources/ make, in the order of the course.

    Raises:
        SourceError: a lesson's folder has no script that makes a notebook.
    """
    folders = [p for p in (root / "sources").rglob("[0-9][0-9]*_*") if p.is_dir()]
    # Numbers run through all tiers, so that the name alone gives the order.
    return [
        target
        for folder in sorted(folders, key=lambda p: p.name)
        for target in _made_by(folder.relative_to(root), root)
    ]


def _made_by(folder: Path, root: Path) -> list[Target]:
    """The lesson or page, the lab and its solution of `sources/<tier>/NN_name/`, as it has them."""
    notebook = Path(*folder.parts[1:]).with_suffix(".ipynb")
    found = [
        Target(folder / f"{script}.py", place / notebook, kind)
        for script, place, kind in _SCRIPTS
        if (root / folder / f"{script}.py").is_file()
    ]
    if not found:
        raise SourceError(
            f"{folder.as_posix()}/ has none of lesson.py, page.py and lab.py. "
            "Write one of them, or remove the folder."
        )
    return found


def make(target: Target, root: Path) -> NotebookNode:
    """The notebook of a target, without outputs.

    Raises:
        SourceError: its script cannot be built.
    """
    name = target.source.as_posix()
    text = _TEXT_OF[target.kind]((root / target.source).read_text(encoding="utf-8"), name)
    cells = [_plain(cell, name) for cell in jupytext.reads(text, fmt="py:percent").cells]
    cells = _prose(cells, name) if target.kind == "page" else _with_bootstrap(cells, root, name)
    _fill_badges(cells, target, root)
    _lead_to_own_model(cells, target)
    _set_ids(cells, target.path)
    course = {"source": name, "kind": target.kind}
    metadata = {"kernelspec": _KERNEL, "language_info": _LANGUAGE, "course": course}
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def code_sha256(notebook: NotebookNode) -> str:
    """The hash of a notebook's code cells, by which stale outputs are known.

    Without the bootstrap, which shows nothing: a new address of the repository is no reason to
    run the course again.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    sources = [cell.source for cell in code if BOOTSTRAP not in cell.metadata.get("tags", [])]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def _plain(cell: NotebookNode, file: str) -> NotebookNode:
    """A cell with the options that the course uses, and nothing of jupytext's own."""
    options = {k: v for k, v in cell.metadata.items() if not k.startswith("lines_to_")}
    if unknown := set(options) - _CELL_OPTIONS:
        first = cell.source.partition("\n")[0]
        raise SourceError(
            f"{file}: the cell that begins {first!r} has the option {min(unknown)!r}; "
            f"cells take {' and '.join(sorted(_CELL_OPTIONS))}, and no title."
        )
    new = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    if cell.cell_type not in new:
        raise SourceError(f"{file}: {cell.cell_type} cells are not used in the course.")
    return new[cell.cell_type](cell.source, metadata=options)


def _prose(cells: list[NotebookNode], file: str) -> list[NotebookNode]:
    """The cells of a page."""
    if any(cell.cell_type == "code" for cell in cells):
        raise SourceError(f"{file}: a page has no code; a lesson has.")
    return cells


def _with_bootstrap(cells: list[NotebookNode], root: Path, file: str) -> list[NotebookNode]:
    """Put the bootstrap before the set-up cell, folded away, and import `setup` in that."""
    where = [i for i, cell in enumerate(cells) if "setup" in cell.metadata.get("tags", [])]
    if len(where) != 1:
        raise SourceError(f'{file}: one cell must be tagged "setup", and {len(where)} are.')
    code = (root / "sources" / "bootstrap.py").read_text(encoding="utf-8").strip()
    options = {"tags": [BOOTSTRAP], "jupyter": {"source_hidden": True}}
    bootstrap = nbformat.v4.new_code_cell(code, metadata=options)
    setup = cells[where[0]]
    setup.source = f"from utils import setup\n\n{setup.source}"
    return [*cells[: where[0]], bootstrap, *cells[where[0] :]]


def _lead_to_own_model(cells: list[NotebookNode], target: Target) -> None:
    """End a lesson of a tier with the way to the page that answers for the reader's own model."""
    if target.kind == "lesson" and len(target.path.parts) > 2 and cells[-1].cell_type == "markdown":
        cells[-1].source += f"\n\n{OWN_MODEL}"


def _fill_badges(cells: list[NotebookNode], target: Target, root: Path) -> None:
    """Write the badges into the first cell, where its script asks for them."""
    for position, cell in enumerate(cells):
        if BADGES not in cell.source:
            continue
        if position or cell.cell_type != "markdown":
            raise SourceError(f"{target.source.as_posix()}: {BADGES} belongs into the first cell.")
        badges = _badges(target.path, root)
        # Without badges their paragraph goes, too.
        cell.source = cell.source.replace(BADGES if badges else f"{BADGES}\n\n", badges)


def _badges(path: Path, root: Path) -> str:
    try:
        return badge_markdown(path.as_posix(), repository_url(root))
    except ValueError as error:
        raise SourceError(str(error)) from error


def _set_ids(cells: list[NotebookNode], path: Path) -> None:
    # By content, not by position: a cell put in between leaves the other ids as they were.
    seen: Counter[tuple[str, str]] = Counter()
    for cell in cells:
        key = (cell.cell_type, cell.source)
        text = json.dumps([path.as_posix(), *key, seen[key]])
        cell["id"] = hashlib.sha256(text.encode()).hexdigest()[:12]
        seen[key] += 1
