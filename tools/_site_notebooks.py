"""One stored notebook as a page of the site: figures as files, widgets as what they last showed."""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nbformat
from nbformat import NotebookNode

WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_STATES = "application/vnd.jupyter.widget-state+json"
NOTE = "<p><i>A control stands here in JupyterLab; this is what it showed last.</i></p>"
_DATA_IMAGE = re.compile(r'src="data:image/png;base64,([^"]+)"')
_ANCHOR = re.compile(r"(\]\((?!https?:)[^)\s#]*)#([^)\s]+)(?=[)\s])")  # a title may follow
_BADGES = re.compile(r"^.*\[!\[Open in Colab\].*\n*", re.MULTILINE)
_NOTEBOOK_LINK = re.compile(r'href="((?!https?:)[^"]+)\.ipynb"')
_TABLE = re.compile(r"(<table.*?</table>)", re.DOTALL)


class Figures:
    """Pictures of outputs, each stored once by its bytes.

    Args:
        folder: Where the files go.
        address: The folder's address below the root of what is built.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address

    def stored(self, data: bytes) -> str:
        """Keep one PNG; returns its address below the root."""
        name = f"{hashlib.sha256(data).hexdigest()[:16]}.png"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(data)
        return f"{self.address}/{name}"


def page(notebook: NotebookNode, path: Path, figures: Figures) -> NotebookNode:
    """The notebook as the site and the slides show it.

    Args:
        notebook: As it is stored, with its outputs.
        path: Its place below the site's root, such as notebooks/beginner/01_x.ipynb.
        figures: Where its pictures go.
    """
    states = notebook.metadata.get("widgets", {}).get(WIDGET_STATES, {}).get("state", {})
    cells = [cell for cell in notebook.cells if "bootstrap" not in cell.metadata.get("tags", [])]
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = prose(cell.source)
        else:
            cell.outputs = [shown(output, states, path, figures) for output in cell.outputs]
            _fold(cell)
    kept = {k: v for k, v in notebook.metadata.items() if k in ("kernelspec", "language_info")}
    return nbformat.v4.new_notebook(cells=cells, metadata=kept)


def _fold(cell: NotebookNode) -> None:
    """What JupyterLab folds away the site folds, too."""
    if cell.metadata.get("jupyter", {}).get("source_hidden"):
        cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]


def prose(text: str) -> str:
    """Markdown whose links to headings are Sphinx's, and without badges."""
    return anchored(_BADGES.sub("", text))


def anchored(text: str) -> str:
    """Markdown whose links to headings are Sphinx's."""
    return _ANCHOR.sub(lambda m: f"{m[1]}#{slug(m[2])}", text)


def slug(anchor: str) -> str:
    """The anchor of a heading as MyST makes it, from JupyterLab's: "2.-On-paper" -> "2-on-paper"."""
    return re.sub(r"[^\w\- ]", "", unquote(anchor).lower()).replace(" ", "-")


def shown(
    output: NotebookNode, states: dict[str, Any], path: Path, figures: Figures
) -> NotebookNode:
    """One output with its pictures in files; a widget as its last figures."""
    data = output.get("data")
    if not data:
        return output
    if WIDGET in data:
        parts = list(last_shown(data.pop(WIDGET)["model_id"], states))
        data["text/html"] = (
            NOTE + "".join(parts) if parts else f"<p>{escape(data['text/plain'])}</p>"
        )
    if "text/html" in data:
        data["text/html"] = html(data["text/html"], path, figures)
        data.pop("text/latex", None)
    return output


def last_shown(model: str, states: dict[str, Any]) -> Iterator[str]:
    """The HTML of a widget and of what it holds, in its order."""
    state = states.get(model, {})
    if state.get("model_name") in ("HTMLModel", "HTMLMathModel"):
        yield state["state"].get("value", "")
    for child in state.get("state", {}).get("children", []):
        yield from last_shown(child.removeprefix("IPY_MODEL_"), states)


def html(text: str, path: Path, figures: Figures) -> str:
    """HTML of an output: figures as files that load when reached, tables that scroll, links to pages."""
    up = posixpath.relpath(".", path.parent.as_posix())

    def as_file(match: re.Match[str]) -> str:
        place = figures.stored(base64.b64decode(match[1]))
        return f'loading="lazy" src="{up}/{place}"'

    text = _NOTEBOOK_LINK.sub(r'href="\1.html"', _DATA_IMAGE.sub(as_file, text))
    return _TABLE.sub(r'<div class="scrolls">\1</div>', text)
