"""The server that killable processes are forked from: started once, with torch imported.

It is a fresh process, because forking the notebook's own would hang once that has run one
multi-threaded matmul; and it never touches CUDA, which a forked process could not use again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_launching = threading.Lock()


def start_server() -> multiprocessing.context.BaseContext:
    """Start the server if it does not run yet, and return at once: it imports in the background.

    Raises:
        RuntimeError: this system has no such servers (Windows).
    """
    try:
        context = multiprocessing.get_context("forkserver")
    except ValueError as error:
        raise RuntimeError(
            "Windows cannot start processes the way this needs (forkserver). "
            "Run the course in WSL2: https://learn.microsoft.com/windows/wsl/install"
        ) from error
    from multiprocessing.forkserver import ensure_running  # here: Windows has no such module

    context.set_forkserver_preload(["utils.ranks.preload"])
    with without_main(), _on_python_path(ROOT):
        ensure_running()
    return context


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Launch inside this, or the child runs the parent's script again.

    multiprocessing does so to define there what may be needed. Here cloudpickle brings all that
    is needed, and a script or notebook without a guard would run twice.
    """
    with _launching:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextlib.contextmanager
def _on_python_path(folder: Path) -> Iterator[None]:
    # Not every Python's server takes over sys.path, and it skips in silence what it cannot find.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
