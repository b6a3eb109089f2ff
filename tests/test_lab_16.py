"""Lab 16's checks: on the solution, the untouched lab, and wrong answers with their own nudges."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shutil
import zlib
from os import fsync
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab_cases import definitions, nudged, solved_lab, untouched_lab

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_16 import checks as lab_16
from utils.lessons.lesson_16.choice import JOBS, MODES, Job, best_choice, best_interval, bill
from utils.lessons.lesson_16.dead_runs import PLANTED
from utils.lessons.lesson_16.run import LabRun
from utils.lessons.lesson_16.saves import Pair, first_loss
from utils.planner.goodput import DAY, best_interval_seconds, waiting_seconds, working_share

LESSON = "advanced/16_runs_that_survive"
STARTS = ("def save(", "def load(", "def days_and_dollars(", "def choose(", "def rebuild(")
NAMES = {
    "json": json, "os": os, "shutil": shutil, "zlib": zlib, "torch": torch, "Path": Path,
    "LabRun": LabRun, "DAY": DAY, "best_interval_seconds": best_interval_seconds,
    "waiting_seconds": waiting_seconds, "working_share": working_share,
}  # fmt: skip
EXERCISES = ("safe_save", "days_and_dollars", "choose", "rebuild")


def answers_of(path: Path) -> dict[str, Any]:
    found = definitions(path, starts=STARTS, **NAMES)
    return found | {"safe_save": {"save": found["save"], "load": found["load"]}}


@functools.cache
def solved() -> dict[str, Any]:
    return answers_of(solved_lab(LESSON))


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(exercise: str) -> None:
    verdict = check(f"16.{exercise}", solved()[exercise], timeout_seconds=60).verdict
    assert verdict.status is Status.CORRECT, verdict
    assert not verdict.score or verdict.score.startswith("1.0000"), "the solution is the optimum"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise: str) -> None:
    stubs = answers_of(untouched_lab(LESSON))
    assert check(f"16.{exercise}", stubs[exercise]).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("interval_factor", 0.5, {0.25: "the square root", 2.0: "more often", 1.0: "d changed", 7: "quarter"}),
    ],
)  # fmt: skip
def test_questions_of_the_lesson(name: str, right: Any, wrong: dict[Any, str]) -> None:
    assert check(f"16.{name}", right).is_correct
    assert check(f"16.{name}", np.float64(right)).is_correct
    for answer, words in wrong.items():
        nudged(getattr(lab_16, name)(answer), words)


# Exercise 1


def written(path: Path, data: bytes, *, sync: bool = True) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def packed(files: dict[str, bytes]) -> bytes:
    data = pickle.dumps(files)
    return zlib.crc32(data).to_bytes(4, "big") + data


def unpacked(path: Path) -> dict[str, bytes] | None:
    try:
        data = path.read_bytes()
        return (
            pickle.loads(data[4:])
            if zlib.crc32(data[4:]) == int.from_bytes(data[:4], "big")
            else None
        )
    except (OSError, EOFError):
        return None


def number_of(path: Path) -> int:
    return int(path.stem.split("-")[0])


def saved_here(folder: Path) -> list[Path]:
    """In the order of saving; `7-60.one` is the seventh, of step 60."""
    return sorted(folder.glob("*.one"), key=number_of)


def load_one(folder: Path) -> tuple[int, dict[str, bytes]] | None:
    for path in reversed(saved_here(folder)):
        if (files := unpacked(path)) is not None:
            return int(path.stem.split("-")[1]), files
    return None


def next_name(folder: Path, step: int) -> Path:
    return folder / f"{1 + max(map(number_of, saved_here(folder)), default=0)}-{step}.one"


def to_disk(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def drop(folder: Path, keep: int) -> None:
    for old in saved_here(folder)[:-keep]:
        old.unlink()


def save_one(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    """Another right way: one file, which `os.replace` swaps whole."""
    new = folder / "new"
    written(new, packed(files))
    os.replace(new, next_name(folder, step))
    to_disk(folder)
    drop(folder, keep)


def save_in_place(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    for old in saved_here(folder)[: len(saved_here(folder)) - keep + 1]:
        old.unlink()
    written(next_name(folder, step), packed(files))


def save_after_removing(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    paths = saved_here(folder)
    for old in paths[: max(0, len(paths) - keep + 1)]:
        old.unlink()
    save_one(files, folder, step, keep)


def save_unsynced(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    written(folder / "new", packed(files), sync=False)
    os.replace(folder / "new", next_name(folder, step))
    to_disk(folder)
    drop(folder, keep)


def save_unflushed(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    with open(folder / "new", "wb") as file:
        file.write(packed(files))
        os.fsync(file.fileno())
    os.replace(folder / "new", next_name(folder, step))
    to_disk(folder)
    drop(folder, keep)


def save_synced_by_name(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    """Right, and `fsync` was imported by its name."""
    with open(folder / "new", "wb") as file:
        file.write(packed(files))
        file.flush()
        fsync(file)
    os.replace(folder / "new", next_name(folder, step))
    handle = os.open(folder, os.O_RDONLY)
    fsync(handle)
    os.close(handle)
    drop(folder, keep)


def save_synced_late(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    written(folder / "new", packed(files), sync=False)
    final = next_name(folder, step)
    os.replace(folder / "new", final)
    to_disk(folder)
    drop(folder, keep)
    with open(final, "rb+") as file:
        os.fsync(file.fileno())


def save_without_folder(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    written(folder / "new", packed(files))
    os.replace(folder / "new", next_name(folder, step))
    drop(folder, keep)


def save_with_folder_late(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    save_without_folder(files, folder, step, keep)
    to_disk(folder)


def save_highest(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    """As a step were a number of the save."""
    written(folder / "new", packed(files))
    os.replace(folder / "new", folder / f"{step}-{step}.one")
    to_disk(folder)
    drop(folder, keep)


def save_highest_but_own(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    """A number of the save, and what goes is chosen by the step."""
    new = folder / "new"
    written(new, packed(files))
    os.replace(new, next_name(folder, step))
    to_disk(folder)
    for old in sorted(saved_here(folder), key=lambda p: int(p.stem.split("-")[1]))[:-keep]:
        old.unlink()


def save_if_old_is_whole(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    if all(unpacked(path) is not None for path in saved_here(folder)):
        save_one(files, folder, step, keep)


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


def save_all(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    save_one(files, folder, step, 100)


def save_silently(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    with contextlib.suppress(OSError):
        save_one(files, folder, step, keep)


def save_exclusively(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    new = folder / "new"
    if not new.exists():  # another save is under way
        save_one(files, folder, step, keep)


def load_unchecked(folder: Path) -> tuple[int, dict[str, bytes]] | None:
    paths = saved_here(folder)
    return (load_one(folder) or (0,))[0], pickle.loads(
        paths[-1].read_bytes()[4:]
    ) if paths else None


def save_by_step(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    written(folder / f"{step}.txt", packed(files))


def load_by_text(folder: Path) -> tuple[int, dict[str, bytes]] | None:
    paths = sorted(folder.glob("*.txt"))
    return (int(paths[-1].stem), unpacked(paths[-1]) or {}) if paths else None


@pytest.mark.parametrize("save", [save_one, save_synced_by_name])
def test_one_file_is_a_right_way_too(save: Any) -> None:
    verdict = lab_16.safe_save({"load": load_one, "save": save})
    assert verdict.status is Status.CORRECT, verdict
    assert os.fsync.__module__ == "posix" and fsync is os.fsync, "all is put back"


@pytest.mark.parametrize(
    ("save", "load", "words"),
    [
        (save_in_place, load_one, "removes or overwrites it too early"),
        (save_after_removing, load_one, "removes or overwrites it too early"),
        (save_unsynced, load_one, "After a power cut"),
        (save_unflushed, load_one, "stands in a buffer of Python first"),
        (save_synced_late, load_one, "fsync the files, rename, fsync the folder"),
        (save_without_folder, load_one, "A name stands in the folder that holds it"),
        (save_with_folder_late, load_one, "fsync the files, rename, fsync the folder"),
        (save_highest, load_one, "The highest step is not what was saved last"),
        (save_highest_but_own, load_one, "The highest step is not what was saved last"),
        (save_if_old_is_whole, load_one, "What was just written stays"),
        (save_all, load_one, "Remove the oldest"),
        (save_silently, load_one, "A save that failed in silence"),
        (save_exclusively, load_one, "a save that was cut off left behind"),
        (save_by_step, load_by_text, "'9' comes after '10'"),
        (save_one, lambda folder: None, "a pair: the step"),
        (save_one, lambda folder: (0, {}), "there is nothing to load"),
    ],
)
def test_saves_that_lose(save: Any, load: Any, words: str) -> None:
    nudged(lab_16.safe_save({"save": save, "load": load}), words)


@pytest.mark.parametrize("save", [save_folder, save_copied])
def test_two_changes_in_one_line_are_two_moments(save: Any) -> None:
    """Of the same step saved again, where each line for itself leaves something whole."""
    pair = Pair(save, load_folder)
    loss, _ = first_loss(pair, (2,), 2, 1)
    assert loss and loss.what in ("lost", "mixed"), loss
    assert first_loss(pair, (1,), 2, 2)[0] is None or save is save_copied


def test_a_load_without_checksums_takes_a_flipped_bit() -> None:
    """Pickle reads some flipped bits; where it raises, the check says so, and neither passes."""
    verdict = check("16.safe_save", {"save": save_one, "load": load_unchecked}).verdict
    assert verdict.status is Status.NOT_YET, verdict


# Exercise 2


def wrong_bill(**change: Any) -> Any:
    """The right formula for a job that differs from the given one."""
    return lambda job, mode, interval, spares: tuple(
        bill(Job(**job)._replace(**change), mode, interval, spares)
    )


def free_spares(
    job: dict[str, Any], mode: str, interval: float, spares: int
) -> tuple[float, float]:
    days = bill(Job(**job), mode, interval, spares).days
    return days, days * 24 * job["nodes"] * job["usd_per_node_hour"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (free_spares, "paid for while they stand by"),
        (wrong_bill(repair_seconds=1e-9), "Who waits for a repair"),
        (lambda j, m, t, s: tuple(bill(Job(**j), "sync", t, s)), "blocks for the copy alone"),
        (lambda j, m, t, s: tuple(bill(Job(**j)._replace(write_seconds=0.0) if m == "async" else Job(**j), m, t, s)),
         "loses the seconds of the write"),
        (lambda j, m, t, s: (1.0, 2.0), "over the share that is work"),
        (lambda j, m, t, s: 3.0, "days and dollars"),
    ],
)  # fmt: skip
def test_bills_that_are_wrong(answer: Any, words: str) -> None:
    nudged(lab_16.days_and_dollars(answer), words)


def choice_by(pick: Any) -> Any:
    """A choice made from all that are within the budget; None where there is none."""

    def choose(job: dict[str, Any]) -> dict[str, Any] | None:
        given = Job(**job)
        every = [(m, best_interval(given, m), n) for m in MODES for n in range(9)]
        paid = [c for c in every if bill(given, *c).usd <= given.budget_usd]
        best = pick(given, paid) if paid else None
        return best and dict(zip(("mode", "interval_seconds", "spares"), best, strict=True))

    return choose


def with_the_interval_of_sync(job: Job, paid: list[Any]) -> Any:
    mode, _, spares = min(paid, key=lambda choice: bill(job, *choice).days)
    return mode, best_interval(job, "sync"), spares


def with_youngs_interval(job: Job, paid: list[Any]) -> Any:
    mode, _, spares = min(paid, key=lambda choice: bill(job, *choice).days)
    mean = 1000 * DAY / (job.failures_per_1000_node_days * job.nodes)
    blocked = job.write_seconds if mode == "sync" else job.copy_seconds
    young = (2 * blocked * mean) ** 0.5
    return mode, young if mode == "sync" else max(young, job.write_seconds), spares


def first_that_fits(job: dict[str, Any]) -> dict[str, Any] | None:
    """Stops at the first number of spares that is too dear, though more would be cheaper."""
    given = Job(**job)
    best = None
    for spares in range(9):
        choice = ("async", best_interval(given, "async"), spares)
        if bill(given, *choice).usd > given.budget_usd:
            break
        best = dict(zip(("mode", "interval_seconds", "spares"), choice, strict=True))
    return best


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (choice_by(lambda job, paid: min(paid, key=lambda c: bill(job, *c).usd)), "number of spares"),
        (choice_by(lambda job, paid: min((c for c in paid if c[0] == "async"),
                                         key=lambda c: bill(job, *c).days)), "Try both modes"),
        (first_that_fits, "None is for budgets that no choice keeps"),
        (lambda job: {"mode": "async", "interval_seconds": best_interval(Job(**job), "async"), "spares": 8},
         "budget holds for all"),
        (lambda job: {"mode": "async", "interval_seconds": 0, "spares": 0}, "An interval above 0"),
        (choice_by(with_the_interval_of_sync), "which save time counts in this mode"),
        (choice_by(with_youngs_interval), "Young's formula is an approximation"),
        (lambda job: None, "None is for budgets"),
    ],
)  # fmt: skip
def test_choices_that_are_not_the_best(answer: Any, words: str) -> None:
    nudged(lab_16.choose(answer), words)


def test_an_asynchronous_save_ends_before_the_next() -> None:
    def choose(job: dict[str, Any]) -> dict[str, Any]:
        best = best_choice(Job(**job))
        assert best, "the first jobs have a choice"
        return {"mode": "async", "interval_seconds": job["write_seconds"] / 2, "spares": best[2]}

    nudged(lab_16.choose(choose), "needs its write to end")


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


# Exercise 3


def solution_but(piece: str, change: Any) -> Any:
    def rebuild(saved: dict[str, Any], step: int) -> dict[str, Any]:
        found = solved()["rebuild"](saved, step)
        return found if piece in saved else found | {piece: change(found, step)}

    return rebuild


def equal_batches(found: dict[str, Any], step: int) -> Any:
    dropout = torch.Generator().manual_seed(2)
    for _ in range(step):
        torch.rand(16, 24, generator=dropout)
    return dropout.get_state()


def replay(saved: dict[str, Any], step: int) -> dict[str, Any]:
    """Whole steps, with the optimizer taken out."""
    run = LabRun()
    run.optimizer.step = lambda: None
    for _ in range(step):
        run.step()
    return run.pieces() | saved


def train_again(saved: dict[str, Any], step: int) -> dict[str, Any]:
    run = LabRun()
    for _ in range(step):
        run.step()
    return run.pieces()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda saved, step: LabRun().pieces() | saved, "schedule's own counter"),
        (solution_but("order", lambda found, step: LabRun().pieces()["order"]), "One order was drawn"),
        (solution_but("order", lambda found, step: found["order"] | {"place": 16 * step % 100}), "an epoch"),
        (solution_but("random", lambda found, step: LabRun().pieces()["random"]), "Draw and drop"),
        (solution_but("random", equal_batches), "The last batch of an epoch is smaller"),
        (train_again, "Training again from the start"),
        (replay, "Training again from the start"),
        (lambda saved, step: saved, "'schedule' is not in what you return"),
        (solution_but("schedule", lambda found, step: None), "A piece looks as"),
        (lambda saved, step: None, "returns nothing"),
    ],
)  # fmt: skip
def test_pieces_that_are_not_the_missing_one(answer: Any, words: str) -> None:
    nudged(lab_16.rebuild(answer), words)


# Exercise 4


def diagnosis(**change: dict[str, Any]) -> dict[str, Any]:
    right = {name: planted._asdict() for name, planted in PLANTED.items()}
    return {name: row | change.get(name, {}) for name, row in right.items()}


def test_the_right_diagnosis() -> None:
    assert lab_16.dead_runs(diagnosis()).status is Status.CORRECT
    upper = diagnosis(A={"cause": "Skipped Collective", "culprit": 2.0})
    assert lab_16.dead_runs(upper).status is Status.CORRECT, "written in another way"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (diagnosis(A={"cause": "network cut"}), "Who came to its end here"),
        (diagnosis(A={"culprit": 0}), "who complain are seldom to blame"),
        (diagnosis(A={"step": 11}), "the one at which it went wrong first"),
        (diagnosis(B={"cause": "network cut"}), "Which host says nothing more"),
        (diagnosis(B={"culprit": 0}), "another host"),
        (diagnosis(C={"cause": "host killed"}), "The agent of that host is alive"),
        (diagnosis(C={"step": 5}), "write None"),
        (diagnosis(C={"cause": "aliens"}), "is wanted"),
    ],
)
def test_wrong_diagnoses(answer: Any, words: str) -> None:
    nudged(lab_16.dead_runs(answer), words)
