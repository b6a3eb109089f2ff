"""A fresh Jupyter kernel: what really happens to a cell's tensors after its error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from utils.checked import check_public

# A step that holds 64 MiB when it fails, and `tell()`, which says whether they are still there.
FAILS = """import gc, sys, traceback, weakref

class Tensor(bytearray):
    pass

def step_that_fails():
    global witness
    activations = Tensor(2**26)
    witness = weakref.ref(activations)
    raise RuntimeError("out of memory, say")

def tell():
    gc.collect()
    print("gone" if witness() is None else "alive")
"""


def run_cells(cells: Sequence[str], timeout_seconds: float = 60) -> list[str]:
    """Run cells one after the other in a kernel of their own; what each of them printed.

    A cell that fails leaves its error in the kernel, as in a notebook, and the next one runs.

    Raises:
        ValueError: there is no cell, or the limit is no positive number of seconds.
    """
    if not cells:
        raise ValueError("run_cells() needs a cell or more.")
    if not 0 < timeout_seconds < math.inf:
        raise ValueError(
            f"timeout_seconds={timeout_seconds}: a cell needs a limit above 0, such as 60."
        )
    from jupyter_client.manager import start_new_kernel

    # Its note on the connection would stand among the outputs.
    quiet = ["--IPKernelApp.log_level=50", "--InteractiveShell.colors=NoColor"]
    manager, client = start_new_kernel(
        startup_timeout=timeout_seconds, kernel_name="python3", extra_arguments=quiet
    )
    try:
        return [_printed(client, cell, timeout_seconds) for cell in cells]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _printed(client: Any, cell: str, timeout_seconds: float) -> str:
    texts: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            texts.append(message["content"]["text"])

    client.execute_interactive(cell, allow_stdin=False, output_hook=keep, timeout=timeout_seconds)
    return "".join(texts).strip()


__all__ = ["FAILS", "run_cells"]

check_public(globals())
