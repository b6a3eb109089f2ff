"""Pages that open without a network: PyTorch's `memory_viz` and Chromium's trace viewer.

Both viewers lie in `viewers/`, under their own licences; a page holds viewer and data in one file.
"""

from __future__ import annotations

import base64
import gzip
import json
import pickle
import re
from pathlib import Path
from typing import Any

from utils.checked import check_public
from utils.files import write_whole

from .snapshot import read_snapshot

VIEWERS = Path(__file__).parent / "viewers"
VIEWS = ("Active Memory Timeline", "Allocator State History", "Active Cached Segment Timeline")
_D3_NAMES = "const {axisLeft, scaleLinear, zoom, zoomIdentity, brushX} = d3;"
_IMPORT = re.compile(r"^import .* from \"https://[^\"]*\";$", re.MULTILINE)


class TraceError(ValueError):
    """A file that is no trace of `torch.profiler`."""


def write_snapshot_page(path: str | Path, snapshot: str | Path, view: str = VIEWS[0]) -> Path:
    """A page with PyTorch's own viewer and a snapshot in it.

    Args:
        path: the page to write; whole or not at all.
        snapshot: a file of `write_snapshot` or of `torch.cuda.memory._dump_snapshot`.
        view: what the viewer shows first, one of `VIEWS`.

    Raises:
        SnapshotError: the file is no snapshot that can be read; nothing is written.
        ValueError: there is no such view.
    """
    if view not in VIEWS:
        raise ValueError(f"The viewer has no view {view!r}. There are {', '.join(VIEWS)}.")
    data = pickle.dumps(read_snapshot(snapshot), protocol=4)
    data += b"\x00" * (-len(data) % 3)  # the viewer reads no padded base64
    name = Path(snapshot).name
    files = json.dumps([{"name": name, "base64": base64.b64encode(data).decode()}])
    call = f"add_local_files({_in_script(files)}, {_in_script(json.dumps(view))});"
    page = (
        f"<!DOCTYPE html>\n<html><head><meta charset='utf-8'><title>{VIEWS[0]}</title>\n"
        f"<script>{_viewer('d3.min.js')}</script></head>\n<body>\n"
        f"<script type='module'>{_memory_viz()}\n{call}</script>\n</body></html>\n"
    )
    write_whole(Path(path), page.encode())
    return Path(path)


def write_trace_page(path: str | Path, trace: str | Path) -> Path:
    """A page with Chromium's trace viewer and a trace of `export_chrome_trace` in it.

    Raises:
        TraceError: the file is no such trace; nothing is written.
    """
    events = json.dumps(read_trace(trace))
    script = f"window.courseTrace = {_in_script(events)};"
    viewer = gzip.decompress((VIEWERS / "trace_viewer_full.html.gz").read_bytes()).decode()
    page = (
        f"<!DOCTYPE html>\n<html><head><meta charset='utf-8'><title>{Path(trace).name}</title>\n"
        "<style>html, body {margin: 0; height: 100%; overflow: hidden}</style>\n"
        "<script>window.__hideTraceViewerPolyfillWarning = true;</script>\n"
        f"<script>{_viewer('webcomponents.min.js')}</script>\n"
        f"{viewer}\n<script>{script}\n{_viewer('open_trace.js')}</script></body></html>\n"
    )
    write_whole(Path(path), page.encode())
    return Path(path)


def read_trace(path: str | Path) -> dict[str, Any]:
    """The events of a trace, also of one packed by gzip.

    Raises:
        TraceError: it cannot be read, or holds something else.
    """
    try:
        data = Path(path).read_bytes()
        found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(
            f"{Path(path).name} is no whole trace ({error}). Write it with "
            "profiler.export_chrome_trace() after the `with` block has ended."
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise TraceError(f"{Path(path).name} has no 'traceEvents': it is no trace of a profiler.")
    return found


def _memory_viz() -> str:
    """PyTorch's script, its five imports from the network replaced by the d3 of the page."""
    script, count = _IMPORT.subn("", _viewer("MemoryViz.js"))
    if count != 5:
        raise RuntimeError(f"MemoryViz.js has {count} imports where 5 are known: see pages.py.")
    return script.replace("'use strict';", f"'use strict';\n{_D3_NAMES}", 1)


def _viewer(name: str) -> str:
    return (VIEWERS / name).read_text(encoding="utf-8")


def _in_script(text: str) -> str:
    """JSON that may stand in a `<script>`."""
    return text.replace("</", "<\\/")


__all__ = ["VIEWS", "TraceError", "read_trace", "write_snapshot_page", "write_trace_page"]

check_public(globals())
