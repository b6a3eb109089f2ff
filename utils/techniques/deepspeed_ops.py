"""DeepSpeed's compiled helpers of offload: CPUAdam and async I/O. Built once, never in a cell.

`make offload` builds CPUAdam (one to three minutes), `make offload OPS=async-io` async I/O, which
needs the library libaio with its headers. PyTorch keeps both in `build/extensions/`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from utils.shims.deepspeed import op_builder
from utils.techniques.deepspeed import (
    EXTENSIONS,
    build,
    deepspeed_problem,
    load_deepspeed,
)


class _Op(NamedTuple):
    builder: str
    folder: str
    speaks_of: str
    without: str
    needs: str


OPS = {
    "cpu-adam": _Op(
        "CPUAdamBuilder",
        "cpu_adam",
        "DeepSpeedCPUAdam",
        "cells that run it are skipped, and torch's AdamW does the step",
        "a C++ compiler",
    ),
    "async-io": _Op(
        "AsyncIOBuilder",
        "async_io",
        "DeepSpeed's async I/O",
        "cells that offload to a file by DeepSpeed are skipped",
        "libaio with its headers (Debian: apt-get install libaio-dev)",
    ),
}


@functools.cache
def op_problem(name: str) -> str | None:
    """Why a helper cannot be used here, and what is skipped for it; None if it can. Never compiles.

    Args:
        name: "cpu-adam" or "async-io".

    Raises:
        ValueError: another name.
    """
    op = _op(name)
    if problem := deepspeed_problem():
        return problem
    library = EXTENSIONS / op.folder / f"{op.folder}.so"
    how = "make offload" + ("" if name == "cpu-adam" else f" OPS={name}")
    if not library.is_file():
        return f"{op.speaks_of} is not built here, so {op.without}. `{how}` builds it, once."
    if not _stamp(op).is_file() or _stamp(op).read_text() != _built_for():
        return (
            f"{op.speaks_of} was built for other versions of torch, DeepSpeed or Python, or in "
            f"another folder, so {op.without}. `{how}` builds it anew."
        )
    return None


def build_op(name: str) -> str | None:
    """Compile a helper, or find that it is there; why that failed, or None.

    Raises:
        ValueError: an unknown name.
    """
    op = _op(name)
    if problem := deepspeed_problem():
        return problem
    load_deepspeed()
    builder = op_builder(op.builder)
    if builder is None:
        return f"{op.speaks_of} cannot be built here: it needs {op.needs}. Until then {op.without}."
    if problem := build(builder, op.speaks_of, op.without):
        return problem
    _stamp(op).write_text(_built_for())
    op_problem.cache_clear()
    return None


def _op(name: str) -> _Op:
    if name not in OPS:
        raise ValueError(f"{name!r} is none of DeepSpeed's helpers here: {', '.join(OPS)}.")
    return OPS[name]


def _stamp(op: _Op) -> Path:
    return EXTENSIONS / op.folder / "built_for.txt"


def _built_for() -> str:
    """What a compiled helper stands on; another of them, and it would be compiled in a cell.

    The folder is one of them: in a course that was moved or copied its sources lie elsewhere.
    """
    named = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed")]
    return "\n".join(
        [*named, f"Python {platform.python_version()}", platform.machine(), str(EXTENSIONS), ""]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Build what is named, CPUAdam if nothing is; exit status 1 where one cannot be built.

    With `--if-it-can` a machine that cannot build one is told why, and goes on: status 0, unless
    `COURSE_REQUIRE_ALL` wants everything.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    lenient = "--if-it-can" in given and not os.environ.get("COURSE_REQUIRE_ALL")
    for name in [one for one in given if one != "--if-it-can"] or ["cpu-adam"]:
        if problem := _built(name):
            if not lenient:
                sys.exit(problem)
            print(problem, flush=True)


def _built(name: str) -> str | None:
    """Build one where it is not there, with a word before and after; why that failed, or None."""
    if op_problem(name) is None:
        print(f"{_op(name).speaks_of} is built.", flush=True)
        return None
    print(f"Building {_op(name).speaks_of}, once: one to three minutes ...", flush=True)
    start = time.monotonic()
    problem = build_op(name)
    if problem is None:
        print(f"{_op(name).speaks_of} is built, in {time.monotonic() - start:.0f} s.", flush=True)
    return problem


if __name__ == "__main__":
    main()
