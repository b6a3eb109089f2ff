"""What may stay of the outputs of a run: no progress bars, no warnings, nothing of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from nbformat import NotebookNode

_BAR = re.compile(r"\d+%\|.*\|.*\[|\d+(it|B) \[|\[\d\d:\d\d[<,]")  # what tqdm draws
_WARNING = re.compile(r"^.*?(\w*Warning: .*|\[W\d{3,}.*)$", re.MULTILINE)
ANSI = re.compile(r"\x1b\[[0-9;]*m")
WIDGET, STATE = (
    "application/vnd.jupyter.widget-view+json",
    "application/vnd.jupyter.widget-state+json",
)


def name_of(position: int, cell: NotebookNode) -> str:
    """What a reader calls a cell: its place and first line."""
    first = cell.source.strip().partition("\n")[0]
    return f"cell {position + 1} (`{first[:60]}`)"


def problems(notebook: NotebookNode, private: tuple[str, ...] = ()) -> list[str]:
    """Errors and warnings in the outputs, and the texts of `private`, which no output may hold."""
    found = []
    for position, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            found += [f"{name_of(position, cell)} {what}" for what in _problems_of(output, private)]
    return found


def _problems_of(output: NotebookNode, private: tuple[str, ...]) -> Iterator[str]:
    if output.output_type == "error":
        yield f"ended in {output.ename}: {ANSI.sub('', output.evalue)}"
    if output.get("name") == "stderr":
        yield from (f"gave a warning: {match[1]}" for match in _WARNING.finditer(output.text))
    text = json.dumps(output.get("text", output.get("data", "")))
    yield from (f"shows {folder}, a folder of this machine" for folder in private if folder in text)


def clean(notebook: NotebookNode) -> None:
    """Take progress bars out of the outputs, as text and as widgets."""
    state = notebook.metadata.get("widgets", {}).get(STATE, {}).get("state", {})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in map(_without_bars, cell.outputs) if o is not None]
            cell.outputs = [o for o in cell.outputs if not _is_progress(o, state)]
    _drop_unused_widgets(notebook, state)


def _without_bars(output: NotebookNode) -> NotebookNode | None:
    """A stream without what was drawn over; None if nothing else was in it."""
    if output.output_type != "stream":
        return output
    lines = map(_after_returns, output.text.split("\n"))
    if output.name == "stderr":
        lines = (line for line in lines if not _BAR.search(line))
    output.text = "\n".join(lines)
    return output if output.text.strip() else None


def _after_returns(line: str) -> str:
    """What a terminal shows of a line that was drawn several times."""
    return line.rstrip("\r").rpartition("\r")[2]


def _is_progress(output: NotebookNode, state: dict[str, Any]) -> bool:
    view = output.get("data", {}).get(WIDGET)
    models = _tree(view["model_id"], state) if view else set()
    names = {state[model].get("model_name") for model in models}
    return bool(names & {"FloatProgressModel", "IntProgressModel"})


def _tree(model: str, state: dict[str, Any]) -> set[str]:
    """A widget and all it is made of."""
    found, pending = set(), [model]
    while pending:
        model = pending.pop()
        if model in state and model not in found:
            found.add(model)
            pending += re.findall(r"IPY_MODEL_(\w+)", json.dumps(state[model]))
    return found


def _drop_unused_widgets(notebook: NotebookNode, state: dict[str, Any]) -> None:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    views = [output["data"][WIDGET] for output in outputs if WIDGET in output.get("data", {})]
    used = set().union(*(_tree(view["model_id"], state) for view in views))
    for model in set(state) - used:
        del state[model]
    if not state:
        notebook.metadata.pop("widgets", None)
