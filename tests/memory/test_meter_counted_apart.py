"""The meter's totals of odd programs against a counter that sits below PyTorch's allocator."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import odd_programs
import pytest

from utils.memory.compile import CompilerError, find_compiler

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def counted(folder: str) -> dict[str, dict[str, Any]]:
    """The rows of all programs, from one process that has the counter loaded before all else."""
    source, library = Path(folder) / "counter.c", Path(folder) / "counter.so"
    source.write_text(odd_programs.COUNTER)
    build = [find_compiler(), "-x", "c", "-O2", "-fPIC", "-shared", "-fno-builtin", str(source), "-o", str(library), "-ldl"]  # fmt: skip
    subprocess.run(build, check=True)
    settings = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
    script = str(Path(odd_programs.__file__))
    done = subprocess.run(
        [sys.executable, script, str(library)], env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["name"]: row for row in rows}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    if sys.platform != "linux":
        pytest.skip("preloads a library, as Linux can")
    try:
        find_compiler()
    except CompilerError:
        pytest.skip("needs a C compiler")
    return str(tmp_path_factory.mktemp("counter"))


@pytest.mark.parametrize("name", [program.__name__ for program in odd_programs.PROGRAMS])
def test_no_byte_is_missing(folder: str, name: str) -> None:
    row = counted(folder)[name]
    share = row["metered"] / row["counted"]
    # What leaked before is alive and has no name: the meter counts it all the same.
    most = float("inf") if name == "leak" else 1.005
    assert 1 <= share <= most, f"{name}: the meter has {share:.4f} of what was counted apart"


def test_a_leak_is_said(folder: str) -> None:
    notes = counted(folder)["leak"]["notes"]
    assert any("grows from step to step" in note for note in notes), notes


def test_parameters_of_a_model_that_was_not_named_are_said(folder: str) -> None:
    notes = counted(folder)["replicas"]["notes"]
    assert any("a model that was not named" in note for note in notes), notes
