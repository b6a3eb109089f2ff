"""DeepSpeed on this machine: whether it can run, loaded quietly, its extension built once.

`python -m utils.techniques.deepspeed` builds the extension; `make setup` calls it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from pathlib import Path
from types import ModuleType

import torch

from utils.memory.compile import CompilerError, find_compiler

_EXTENSION = "ShareMemCommBuilder"
# Of this copy of the course: another copy's would be compiled anew here, and again there.
_EXTENSIONS = Path(__file__).resolve().parents[2] / "build" / "extensions"
_WITHOUT = "cells that run ZeRO are skipped, and the FSDP2 cells run"


def load_deepspeed() -> ModuleType:
    """Import DeepSpeed without its start-up lines; errors of its logger still come through.

    Call it before `run_ranks` too: ranks then get it ready-made, instead of 8 s each.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it found no GPU
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_EXTENSIONS))
    for name in ("DeepSpeed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    return deepspeed


@functools.cache
def deepspeed_problem() -> str | None:
    """Why ZeRO cannot run here, and what is skipped for it; None if it can."""
    if importlib.util.find_spec("deepspeed") is None:
        return f"DeepSpeed is not installed (pip install deepspeed), so {_WITHOUT}."
    if torch.cuda.is_available():
        return None
    try:
        find_compiler()
    except CompilerError as error:
        return f"On a CPU, DeepSpeed compiles an extension: {error} Until then {_WITHOUT}."
    return None


def build_extension() -> str:
    """Compile what DeepSpeed compiles at its first use on a CPU; say in one line what came of it.

    PyTorch keeps the result in `build/extensions/`, so a second call only loads it. A failure is
    said, and is no failure of the set-up: only ZeRO needs it. A lock that an interrupted build
    left there is removed: PyTorch would wait for it for ever.
    """
    if problem := deepspeed_problem():
        return problem
    if torch.cuda.is_available():
        return "DeepSpeed needs no extension for ranks with a GPU each."
    load_deepspeed()
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    builder = accelerator.create_op_builder(_EXTENSION)
    if builder is None or not builder.is_compatible():
        return "DeepSpeed runs here without its extension."
    for lock in _EXTENSIONS.glob("*/lock"):
        lock.unlink(missing_ok=True)
    try:
        builder.load(verbose=False)
    except (RuntimeError, OSError, ImportError) as error:
        first = str(error).partition("\n")[0]
        return f"DeepSpeed's extension could not be compiled ({first}), so {_WITHOUT}."
    return "DeepSpeed's extension is compiled, and kept for later."


def main() -> None:
    """Build the extension with a word on how long it takes."""
    print("DeepSpeed's extension: compiling takes about half a minute the first time", flush=True)
    print(build_extension())


if __name__ == "__main__":
    main()
