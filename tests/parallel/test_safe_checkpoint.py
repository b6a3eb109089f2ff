"""Checkpoints that survive: cut off at any moment, damaged on the disk, of another world or model."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import Run, save_and_go_on

from utils.parallel import (
    CheckpointError,
    load_newest,
    newest_whole,
    save_safely,
    step_of,
)
from utils.parallel.checkpoint_folder import problems
from utils.ranks import RankError, run_ranks


def resume(folder: Path) -> tuple[int, list[float]]:
    run = Run()
    step = run.restore(folder)
    return step, run.train(step, 6)


def with_rank_state(folder: Path, ranks: int | None = None) -> str:
    """Save, or load with a state of each rank's own; what the error says."""
    run = Run()
    run.train(0, 1)
    own = {f"rank {dist.get_rank()}": torch.ones(1)}
    if ranks:
        save_safely(run.state | own, folder, 1)
        return ""
    try:
        load_newest(run.state | own, folder)
    except CheckpointError as error:
        return str(error)
    return "it loads"


def test_the_state_of_ranks_fits_their_number_alone(tmp_path: Path) -> None:
    run_ranks(with_rank_state, 2, tmp_path, 2)
    said = run_ranks(with_rank_state, 4, tmp_path)
    assert len(set(said)) == 1, "all ranks hear the same"
    assert "rank 2" in said[0] and "only as many as saved it (2)" in said[0], said[0]


def test_another_number_of_ranks_is_refused_where_that_is_asked(tmp_path: Path) -> None:
    save_safely({"weight": torch.ones(1)}, tmp_path, 1)
    state = {"weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"by 1 ranks, and these are 2.*without ranks="):
        load_newest(state, tmp_path, ranks=2)
    assert state["weight"].item() == 0, "refused before anything is loaded"
    assert load_newest(state, tmp_path, ranks=1) == state["weight"].item() == 1


def small_disk(folder: Path) -> str:
    """No file may grow beyond 4 KiB: what a full disk does, for real."""
    import resource

    run = Run()
    run.train(0, 1)
    save_safely(run.state, folder, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        save_safely(run.state, folder, 2)
    except CheckpointError as error:
        return str(error)
    return "it fits"


def test_a_disk_that_takes_no_more_leaves_what_was_there(tmp_path: Path) -> None:
    said = run_ranks(small_disk, 2, tmp_path)
    causes = ("a file could not be written to its end", "File too large")  # who notices first
    assert all(any(cause in text for cause in causes) for text in said), said
    assert all(text.startswith("Step 2 was not saved") for text in said), said
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001-save-1"], "nothing else is left"
    assert newest_whole(tmp_path), "the one before is whole"


def test_four_ranks_save_and_two_go_on(tmp_path: Path) -> None:
    wanted = run_ranks(save_and_go_on, 4, tmp_path)[0]
    step, found = run_ranks(resume, 2, tmp_path)[0]
    assert step == 3, "the step is the checkpoint's"
    assert found == pytest.approx(wanted, rel=1e-6), "losses after the resume"
    assert run_ranks(resume, 4, tmp_path)[0] == (3, wanted), "the same ranks: to the last bit"


CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def cut_off(folder: Path, moment: int) -> None:
    """Rank 0 is killed at the n-th change that a second save makes to the folder."""
    run = Run()
    run.train(0, 1)
    save_safely(run.state, folder, 1)
    run.train(1, 2)
    left = [moment]

    def deadly(event: str, args: tuple[object, ...]) -> None:
        if event not in CHANGES or (event == "open" and "w" not in str(args[1])):
            return
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 0:
        sys.addaudithook(deadly)
    save_safely(run.state, folder, 2, keep=1)


@pytest.mark.parametrize("moment", [0, 2, 5, 6, 8, 11])
def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path, moment: int) -> None:
    with pytest.raises(RankError, match="rank 0"):
        run_ranks(cut_off, 2, tmp_path, moment, timeout_seconds=60)
    found = newest_whole(tmp_path)
    assert found is not None and step_of(found) in (1, 2), (
        f"left: {sorted(p.name for p in tmp_path.iterdir())}"
    )
    assert Run().restore(tmp_path) >= 1, "it loads, in one process"


def train_until_killed(folder: Path, moment_seconds: float, victim: int) -> None:
    """Save after every step, until one rank is killed at a moment that nobody chose."""
    run = Run()
    run.train(0, 1)
    first = load_newest(run.state, folder) if newest_whole(folder) else 0
    for step in range(first + 1, first + 1000):
        run.train(step, step + 1)
        save_safely(run.state, folder, step)
        if step == first + 1 and dist.get_rank() == victim:
            threading.Timer(moment_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


@pytest.mark.slow
def test_fifty_kills_lose_no_checkpoint(tmp_path: Path) -> None:
    """The newest whole one is found each time, and never older than the one before."""
    chance, before = random.Random(16), 0
    for number in range(50):
        with pytest.raises(RankError):
            run_ranks(train_until_killed, 2, tmp_path, chance.uniform(0.02, 0.6), number % 2)
        found = newest_whole(tmp_path)
        assert found or not before, f"kill {number}: all is lost"
        step = step_of(found) if found else 0
        assert step >= before, f"kill {number}: back from step {before} to {step}"
        before = step
        kept = [path for path in tmp_path.iterdir() if path.suffix != ".writing"]
        assert all(not problems(path) for path in kept), f"kill {number}: a named one is not whole"
    assert before >= 50, "each run saves before it is killed"
