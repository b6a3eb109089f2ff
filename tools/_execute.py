"""Runs a notebook in a kernel of the Python that runs this, and takes over what it gave."""

from __future__ import annotations

import os
from pathlib import Path

from _notebook import code_sha256
from _outputs import ANSI, clean, name_of, problems
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
        notebook,
        km=_kernel(),
        timeout=CELL_TIMEOUT_SECONDS,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=40"],  # no warning about plain TCP on the loopback address
    )
    environment = os.environ | {"KINETO_LOG_LEVEL": "99"} | settings
    failure = _run_cells(client, environment)
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


def _run_cells(client: NotebookClient, environment: dict[str, str]) -> str:
    """Run cell by cell; the traceback of the cell that failed, "" if none did."""
    # Not client.execute(): it handles an interrupt itself, and trips over its own clean-up.
    with client.setup_kernel(env=environment, cleanup_kc=True):
        for position, cell in enumerate(client.nb.cells):
            try:
                client.execute_cell(cell, position, execution_count=client.code_cells_executed + 1)
            except CellExecutionError as error:
                return ANSI.sub("", str(error))
            except (CellTimeoutError, DeadKernelError) as error:
                raise RunError(f"{name_of(position, cell)} did not end: {error}") from error
            except KeyboardInterrupt:
                client.shutdown_kernel = "immediate"  # else the interrupted cell still answers
                raise
        client.set_widgets_metadata()
    return ""
