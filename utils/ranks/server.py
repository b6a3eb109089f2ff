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
from multiprocessing import process
from pathlib import Path
from typing import TYPE_CHECKING

from utils.ranks.orphans import CAN_ADOPT, end_orphans
from utils.shims.forkserver import helpers_of_their_own_group, server_pid, stop_server

if TYPE_CHECKING:  # Windows has no such class
    from multiprocessing.context import ForkServerContext

ROOT = Path(__file__).resolve().parents[2]
# Libraries that ranks get ready-made if this process has imported them: seconds each, in every
# rank. With each, what it imports only when it is first used.
LIBRARIES = {
    "transformers": ("transformers.models.llama.modeling_llama",),
    "peft": ("peft.tuners.lora",),
    "torch.distributed.pipelining": (),
    "torch.distributed.checkpoint": ("torch.distributed.checkpoint.state_dict",),
    "torchdata": ("torchdata.stateful_dataloader.sampler",),
    "deepspeed": (
        "deepspeed.comm.mori",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.ops.op_builder.all_ops",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.runtime.zero.stage3",
        "torch.utils.cpp_extension",
        "torch.distributed.checkpoint.state_dict",
    ),
}
_launching = threading.Lock()
_preloaded: set[str] = set()  # by the one server that this process has


def start_server() -> ForkServerContext:
    """Start the server if it does not run yet, and return at once: it imports in the background.

    Raises:
        RuntimeError: this system has no such servers (Windows).
        FileNotFoundError: the working folder has been deleted.
    """
    working_folder()
    try:
        context = multiprocessing.get_context("forkserver")
    except ValueError as error:
        raise RuntimeError(
            "Windows cannot start processes the way this needs (forkserver). "
            "Run the course in WSL2: https://learn.microsoft.com/windows/wsl/install"
        ) from error
    from multiprocessing.forkserver import ensure_running  # here: Windows has no such module

    context.set_forkserver_preload(["utils.ranks.preload"])
    used = {name for name in LIBRARIES if name in sys.modules}
    if not used <= _preloaded:
        stop_server()  # the next launch starts one with more in it
        _preloaded.update(used)
    modules = " ".join(module for name in used for module in (name, *LIBRARIES[name]))
    settings = {"COURSE_PRELOAD": modules, "COURSE_KERNEL": str(os.getpid())}
    with without_main(), _environment(PYTHONPATH=_on_path(ROOT), **settings):
        with helpers_of_their_own_group():
            ensure_running()
    return context


def working_folder() -> str:
    """Where this process works.

    Raises:
        FileNotFoundError: somebody has deleted that folder, or the one in which this process started.
    """
    # Where multiprocessing starts its processes.
    started_in = process.ORIGINAL_DIR  # pyright: ignore[reportAttributeAccessIssue]
    try:
        now = os.getcwd()
        if started_in is not None:
            os.stat(started_in)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            "The working folder of this notebook has been deleted, and no process can start there. Restore "
            "it, or restart the kernel from a folder that exists."
        ) from error
    return now


def end_orphans_of_server() -> None:
    """End what processes left behind that have ended: on Linux the server has inherited it."""
    pid = server_pid()
    if CAN_ADOPT and pid is not None:
        with _launching:  # else one could be on its way that is not in the list yet
            running = (child.pid for child in multiprocessing.active_children())
            end_orphans(pid, {number for number in running if number is not None})


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


def _on_path(folder: Path) -> str:
    # Not every Python's server takes over sys.path, and it skips in silence what it cannot find.
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
