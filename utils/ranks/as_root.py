"""A call where nobody is root, by a process that is root in a user namespace of its own.

That process, `unshare --user --map-root-user python ...`, reads a function and its arguments from a file
and writes what came of it beside it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from utils.files import scratch
from utils.ranks.killable import run_killable
from utils.ranks.namespaces import NamespaceError
from utils.ranks.pickling import pickled

ANSWER = "answer"  # a file beside that of the call
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import sys; from utils.ranks.as_root import answer; answer(sys.argv[1])"
START_SECONDS = 60.0  # for the processes in a user namespace, which import torch anew


def is_unprivileged() -> bool:
    """Whether this process is not root, on a system that may let it be in a user namespace."""
    return sys.platform == "linux" and os.geteuid() != 0 and shutil.which("unshare") is not None


def call_as_root(function: Callable[..., Any], *args: Any, timeout_seconds: float) -> Any:
    """What the function returns there; None where the system refuses us a user namespace.

    Raises:
        Exception: whatever the function raised, but for a NamespaceError.
        ChildError: it took longer than the timeout and a minute.
    """
    with scratch("as-root") as folder:
        path = folder / "call"
        path.write_bytes(pickled((function, args)))
        seconds = timeout_seconds + START_SECONDS
        run_killable(_start, str(path), timeout_seconds=seconds)
        answered = path.with_name(ANSWER)
        found = cloudpickle.loads(answered.read_bytes()) if answered.exists() else None
    if isinstance(found, Exception):
        raise found
    return found


def _start(call: str) -> None:
    unshare = ("unshare", "--user", "--map-root-user")
    if subprocess.run((*unshare, "true"), capture_output=True).returncode:
        return  # no user namespaces for us here
    modules = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = (*unshare, sys.executable, "-c", PROGRAM, call)
    subprocess.run(command, cwd=ROOT, env=os.environ | modules)


def answer(call: str) -> None:
    """Run the call and write what it gave or raised; nothing where no hosts can be made."""
    path = Path(call)
    try:
        function, args = cloudpickle.loads(path.read_bytes())
        found = function(*args)
    except NamespaceError:
        return
    except Exception as error:  # for whoever asked, in its own process  # noqa: BLE001
        found = error
    path.with_name(ANSWER).write_bytes(pickled(found))
