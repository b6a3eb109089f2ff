"""What is damaged, foreign, old or half there is told from a whole checkpoint, and never loaded."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from checkpoint_cases import Run, save_and_go_on, saved

from utils.models import TransformerConfig
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
from utils.ranks import run_ranks


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
