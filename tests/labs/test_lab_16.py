"""What lab 16's checks stand on: moments of a save, the optimum of a choice, and what they put back."""

from __future__ import annotations

import os
import shutil
from os import fsync
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from utils.labs.verdict import Status
from utils.lessons.lesson_16 import checks as lab_16
from utils.lessons.lesson_16.choice import JOBS, MODES, best_choice, bill
from utils.lessons.lesson_16.mistakes import (
    load_one,
    packed,
    save_synced_by_name,
    to_disk,
    unpacked,
    written,
)
from utils.lessons.lesson_16.saves import Pair, first_loss
from utils.planner.goodput import DAY


def test_what_a_check_of_saves_replaces_is_put_back() -> None:
    verdict = lab_16.safe_save({"load": load_one, "save": save_synced_by_name})
    assert verdict.status is Status.CORRECT
    assert os.fsync.__module__ == "posix" and fsync is os.fsync


def save_folder(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    """A folder for each step; the same step again goes through a line of two changes."""
    new, final = folder / "new", folder / f"{step:08d}"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    written(new / "all", packed(files))
    shutil.rmtree(final, ignore_errors=True) or new.rename(final)
    to_disk(folder)
    for old in sorted(folder.glob("????????"))[:-keep]:
        shutil.rmtree(old)


def save_copied(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    """A folder for each step, copied over the one that is there."""
    new, final = folder / "new", folder / f"{step:08d}"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    written(new / "all", packed(files))
    shutil.copytree(new, final, dirs_exist_ok=True)
    os.sync()
    for old in sorted(folder.glob("????????"))[:-keep]:
        shutil.rmtree(old)


def load_folder(folder: Path) -> tuple[int, dict[str, bytes]] | None:
    for path in sorted(folder.glob("????????"), reverse=True):
        if (files := unpacked(path / "all")) is not None:
            return int(path.name), files
    return None


@pytest.mark.parametrize("save", [save_folder, save_copied])
def test_two_changes_in_one_line_are_two_moments(save: Any) -> None:
    """Of the same step saved again, where each line for itself leaves something whole."""
    pair = Pair(save, load_folder)
    loss, _ = first_loss(pair, (2,), 2, 1)
    assert loss and loss.what in ("lost", "mixed"), loss
    assert first_loss(pair, (1,), 2, 2)[0] is None or save is save_copied


def test_the_optimum_is_that_of_a_fine_grid() -> None:
    for says, job in JOBS:
        best = best_choice(job)
        for mode in MODES:
            least = job.write_seconds if mode == "async" else 10.0
            for interval in np.geomspace(least, 10 * DAY, 200):
                for spares in range(9):
                    found = bill(job, mode, float(interval), spares)
                    if found.usd <= job.budget_usd:
                        assert best and bill(job, *best).days <= found.days * (1 + 1e-9), says
