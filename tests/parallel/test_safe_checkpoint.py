"""Checkpoints that survive: cut off at any moment, damaged on the disk, of another world or model."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from utils.models import Transformer, TransformerConfig
from utils.parallel import (
    CheckpointError,
    list_checkpoints,
    load_newest,
    newest_whole,
    plain_files,
    save_safely,
    step_of,
)
from utils.parallel.checkpoint_folder import CHECKSUMS, problems
from utils.ranks import RankError, run_ranks

TINY = TransformerConfig(vocabulary=64, hidden=32, layers=2, heads=4, feedforward=96)


class Run:
    """A sharded model in training, with all of its state in one dictionary."""

    def __init__(self, config: TransformerConfig = TINY) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Transformer(config)
        if dist.is_initialized():
            self.model = fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @property
    def state(self) -> dict[str, object]:
        return dict(
            zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True)
        )

    def restore(self, folder: Path) -> int:
        state = self.state
        step = load_newest(state, folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return step

    def train(self, first: int, last: int) -> list[float]:
        return [self._step(number) for number in range(first, last)]

    def _step(self, number: int) -> float:
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(number))
        mine = tokens.chunk(ranks)[rank]
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.item() / ranks


def save_and_go_on(folder: Path) -> list[float]:
    run = Run()
    run.train(0, 3)
    save_safely(run.state, folder, 3)
    return run.train(3, 6)


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


def saved(folder: Path, *steps: int, keep: int = 2) -> Run:
    run = Run()
    run.train(0, 1)
    for step in steps:
        save_safely(run.state, folder, step, keep)
    return run


def test_old_ones_go_and_a_cut_off_one_is_cleared_away(tmp_path: Path) -> None:
    for cut_off in ("step-00000001.writing", "step-00000001-save-1.writing"):
        (tmp_path / cut_off).mkdir()
    saved(tmp_path, 2, 3, 4)
    assert {*map(step_of, tmp_path.iterdir())} == {3, 4}, "two are kept"


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes of"),
        (
            lambda file: file.write_bytes(
                bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]
            ),
            "has changed since it was written",
        ),
    ],
)
def test_damage_is_found_and_the_one_before_is_taken(tmp_path: Path, damage, says: str) -> None:
    saved(tmp_path, 1, 2)
    newest, before = list_checkpoints(tmp_path)
    damage(next(newest.glob("*.distcp")))
    (found,) = problems(newest)
    assert says in found, "the problem in words"
    assert newest_whole(tmp_path) == before, "the one before"
    with pytest.warns(UserWarning, match=f"{newest.name}: .*{says}.*{before.name} is loaded"):
        assert load_newest(Run().state, tmp_path) == 1
    (before / CHECKSUMS).unlink()
    with pytest.raises(CheckpointError, match=rf"no whole .*{newest.name}: .*not finished"):
        load_newest(Run().state, tmp_path)


def test_an_empty_folder_and_a_spoiled_list_say_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no whole checkpoint: start from"):
        load_newest({}, tmp_path)
    saved(tmp_path, 1)
    (list_checkpoints(tmp_path)[0] / CHECKSUMS).write_text("{")
    assert "cannot be read" in problems(list_checkpoints(tmp_path)[0])[0], "not JSON"


def test_a_write_that_went_wrong_is_not_blessed(tmp_path: Path, monkeypatch) -> None:
    """The sums are those of what was meant, and not of what the disk made of it."""
    saved(tmp_path, 1)
    original = io.BufferedWriter.close

    def close(stream) -> None:
        was_open = not stream.closed
        original(stream)
        if was_open and Path(stream.name).suffix == ".distcp":
            data = Path(stream.name).read_bytes()
            Path(stream.name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    monkeypatch.setattr(plain_files._SummedFile, "close", close)
    with pytest.raises(CheckpointError, match="Step 2 was not saved: __0_0.distcp has changed"):
        saved(tmp_path, 2)
    assert [*map(step_of, tmp_path.iterdir())] == [1], "and nothing of it is left"


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    wide = Run(TransformerConfig(vocabulary=64, hidden=64, layers=2, heads=4, feedforward=96))
    wide.train(0, 1)
    with pytest.raises(CheckpointError, match="step-00000001-save-1 does not fit what"):
        wide.restore(tmp_path)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = list_checkpoints(tmp_path)[0] / CHECKSUMS
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 9}))
    with pytest.raises(CheckpointError, match="written in version 9, this program reads up to 2"):
        load_newest(Run().state, tmp_path)


def test_half_of_its_ranks_are_missed(tmp_path: Path) -> None:
    run_ranks(save_and_go_on, 4, tmp_path)
    (path,) = list_checkpoints(tmp_path)
    for file in path.glob("__[23]_*.distcp"):
        file.unlink()
    assert [text.split("_")[2] for text in problems(path)] == ["2", "3"], (
        "the files of ranks 2 and 3 are named"
    )


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("steps", [(50, 100, 60), (50, 100, 60, 70, 80), (5, 5, 5, 5), (9, 10, 1)])
def test_what_was_saved_last_loads_whatever_its_step(tmp_path: Path, steps, keep: int) -> None:
    """A run that went back saves lower steps, or the same ones again."""
    for step in steps:
        path = save_safely({"step": torch.tensor(step)}, tmp_path, step, keep)
        state = {"step": torch.tensor(0)}
        assert load_newest(state, tmp_path) == step == state["step"], steps
        assert path.is_dir(), "what was just written stays"
    assert [*map(step_of, list_checkpoints(tmp_path))] == [*steps[::-1][:keep]]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    """Else each new save goes, or the last whole one does."""
    saved(tmp_path, 50, 100, keep=2)
    next(list_checkpoints(tmp_path)[0].glob("*.distcp")).write_bytes(b"")
    saved(tmp_path, 60, keep=2)
    assert [*map(step_of, list_checkpoints(tmp_path))] == [60, 100, 50], (
        "50 is the second whole one"
    )
    next(list_checkpoints(tmp_path)[0].glob("*.distcp")).write_bytes(b"")
    for step in (70, 80):
        saved(tmp_path, step, keep=1)
        assert [*map(step_of, list_checkpoints(tmp_path))] == [step], "whole, and so enough"


def test_a_folder_of_someone_elses_is_let_be(tmp_path: Path) -> None:
    for name in ("step-best", "step-", "step-3x", "step-best.writing", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000009-save-9").write_text("a file")
    saved(tmp_path, 1, 2, 3, keep=1)
    assert Run().restore(tmp_path) == 3
    assert len([*tmp_path.iterdir()]) == 7, "all of them are still there"


def test_checkpoints_of_version_1_load_and_make_room(tmp_path: Path) -> None:
    """They counted no saves, so their steps order them, and all of them are older."""
    for step in (9, 10, 8):
        saved(tmp_path, step, keep=9)
    for path, name in zip(list_checkpoints(tmp_path), ("8", "00000010-2", "00000010"), strict=True):
        listed = json.loads((path / CHECKSUMS).read_text()) | {"version": 1}
        del listed["checksum"]
        (path / CHECKSUMS).write_text(json.dumps(listed))
        path.rename(tmp_path / f"step-{name}")
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-00000010-2",
        "step-00000010",
        "step-8",
    ]
    assert Run().restore(tmp_path) == 10
    saved(tmp_path, 3)
    assert [*map(step_of, list_checkpoints(tmp_path))] == [3, 10]
    assert Run().restore(tmp_path) == 3


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", CHECKSUMS])
def test_what_the_disk_does_not_give_is_passed_over(tmp_path: Path, monkeypatch, name) -> None:
    saved(tmp_path, 1, 2)
    newest, original, good_reads = list_checkpoints(tmp_path)[0], Path.open, [0]

    def opened(path: Path, mode: str = "r", *args, **kwargs):
        if Path(path) == newest / name and "r" in mode:
            good_reads[0] -= 1
            if good_reads[0] < 0:
                raise OSError(5, "Input/output error")
        return original(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opened)
    for moment in (0, 1):  # while it is checked, and while it is loaded
        good_reads[0] = moment
        with pytest.warns(UserWarning, match=f"{newest.name}: .*cannot be read.*is loaded"):
            assert Run().restore(tmp_path) == 1, "the one before"


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        save_safely({}, tmp_path, 1, keep=0)


def test_the_list_names_every_file(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (path,) = list_checkpoints(tmp_path)
    listed = json.loads((path / CHECKSUMS).read_text())
    assert {*listed["files"], CHECKSUMS} == {p.name for p in path.iterdir()}, (
        "files without a checksum"
    )


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
