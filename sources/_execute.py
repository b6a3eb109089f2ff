"""Runs a notebook in a kernel of the Python that runs this, and takes over what it gave."""

from __future__ import annotations

import os
from pathlib import Path

from _notebook import code_sha256
from _outputs import clean, name_of, problems
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

CELL_TIMEOUT_SECONDS = 300


class RunError(Exception):
    """A notebook that did not run, or whose outputs cannot stay; a sentence for each reason."""


def execute(
    notebook: NotebookNode, folder: Path, settings: dict[str, str], private: tuple[str, ...] = ()
) -> None:
    """Run a notebook in place, in `folder`, with `settings` in its environment.

    Raises:
        RunError: a cell failed, gave a warning, or showed one of the `private` texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    language = notebook.metadata.language_info
    client = NotebookClient(
        notebook, km=_kernel(), timeout=CELL_TIMEOUT_SECONDS, record_timing=False,
        coalesce_streams=True, resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=40"],  # no warning about plain TCP on the loopback address
    )  # fmt: skip
    environment = os.environ | {"KINETO_LOG_LEVEL": "99"} | settings
    failure = ""
    try:
        client.execute(env=environment, cleanup_kc=True)
    except CellExecutionError as error:
        failure = str(error)
    except (CellTimeoutError, DeadKernelError) as error:
        raise RunError(f"{_last_begun(notebook)} did not end: {error}") from error
    found = problems(notebook, private)
    if found:
        raise RunError("\n".join(filter(None, [*found, failure])))
    clean(notebook)
    notebook.metadata.language_info = language
    notebook.metadata.course.code_sha256 = code_sha256(notebook)


def _kernel() -> AsyncKernelManager:
    # Without folders to look in, "python3" is ipykernel in this very Python; one registered under
    # that name for the user or the machine may be another.
    specs = KernelSpecManager(kernel_dirs=[])
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)


def _last_begun(notebook: NotebookNode) -> str:
    """The cell that a run stopped in: the first without a count after the last with one."""
    code = [(i, c) for i, c in enumerate(notebook.cells) if c.cell_type == "code"]
    waiting = [(i, c) for i, c in code if c.source.strip() and c.execution_count is None]
    return name_of(*(waiting or code)[0])
