"""Answers to the exercises of lab 16 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from os import fsync
from pathlib import Path
from typing import Any

import torch

from utils.labs.mistakes import KnownAnswers
from utils.planner.goodput import DAY

from .choice import MODES, PlannedRun, best_choice, best_interval, bill
from .dead_runs import PLANTED
from .run import LabRun

known = KnownAnswers()
known.mistakes("interval_factor", seven=(7, "quarter"))
known.mistakes("idle_gpus", one_replica_in_nodes=(4, "TP x PP"))
known.mistakes("slow_rank", counted_from_one=(4, "count from 0"))


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
    """Pickle reads some flipped bits; where it raises, the check says so, and neither passes."""
    paths = saved_here(folder)
    if not paths:
        return None
    return int(paths[-1].stem.split("-")[1]), pickle.loads(paths[-1].read_bytes()[4:])


def save_by_step(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    written(folder / f"{step}.txt", packed(files))


def load_by_text(folder: Path) -> tuple[int, dict[str, bytes]] | None:
    paths = sorted(folder.glob("*.txt"))
    return (int(paths[-1].stem), unpacked(paths[-1]) or {}) if paths else None


def pair(save: Any, load: Any = load_one) -> dict[str, Any]:
    return {"save": save, "load": load}


def load_folder(folder: Path) -> tuple[int, dict[str, bytes]] | None:
    files = unpacked(folder / "last" / "all.one")
    return None if files is None else (int(files.pop("step")), files)


def folder_of(files: dict[str, bytes], folder: Path, name: str, step: int) -> Path:
    new = folder / name
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    written(new / "all.one", packed(files | {"step": b"%d" % step}))
    to_disk(new)
    return new


def save_over(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    last = folder / "last"
    shutil.copytree(folder_of(files, folder, "new", step), last, dirs_exist_ok=True)
    for path in (*last.iterdir(), last, folder):
        to_disk(path)


def save_removed_and_renamed(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    new, last = folder_of(files, folder, "new", step), folder / "last"
    # In one line: no line stands between the two.
    _ = shutil.rmtree(last, ignore_errors=True), new.rename(last), to_disk(folder)


known.rights("safe_save", one_file=pair(save_one), synced_by_name=pair(save_synced_by_name))
known.mistakes(
    "safe_save",
    in_place=(pair(save_in_place), "removes or overwrites it too early"),
    after_removing=(pair(save_after_removing), "removes or overwrites it too early"),
    unsynced=(pair(save_unsynced), "After a power cut"),
    unflushed=(pair(save_unflushed), "stands in a buffer of Python first"),
    synced_late=(pair(save_synced_late), "fsync the files, rename, fsync the folder"),
    without_folder=(pair(save_without_folder), "A name stands in the folder that holds it"),
    folder_late=(pair(save_with_folder_late), "fsync the files, rename, fsync the folder"),
    highest_step=(pair(save_highest), "The highest step is not what was saved last"),
    highest_step_but_own=(
        pair(save_highest_but_own),
        "The highest step is not what was saved last",
    ),
    if_the_old_is_whole=(pair(save_if_old_is_whole), "What was just written stays"),
    all_kept=(pair(save_all), "Remove the oldest"),
    silently=(pair(save_silently), "A save that failed in silence"),
    exclusively=(pair(save_exclusively), "a save that was cut off left behind"),
    by_text=(pair(save_by_step, load_by_text), "'9' comes after '10'"),
    loads_nothing=(pair(save_one, lambda folder: None), "a pair: the step"),
    loads_what_is_not_there=(pair(save_one, lambda folder: (0, {})), "there is nothing to load"),
    copied_over=(pair(save_over, load_folder), "removes or overwrites it too early"),
    removed_and_renamed=(
        pair(save_removed_and_renamed, load_folder),
        "removes or overwrites it too early",
    ),
    unchecked=(pair(save_one, load_unchecked), "keep a checksum of each file"),
)


def wrong_bill(**change: Any) -> Any:
    """The right formula for a job that differs from the given one."""
    return lambda job, mode, interval, spares: tuple(
        bill(PlannedRun(**job)._replace(**change), mode, interval, spares)
    )


def free_spares(
    job: dict[str, Any], mode: str, interval: float, spares: int
) -> tuple[float, float]:
    days = bill(PlannedRun(**job), mode, interval, spares).days
    return days, days * 24 * job["nodes"] * job["usd_per_node_hour"]


known.mistakes(
    "days_and_dollars",
    free_spares=(free_spares, "paid for while they stand by"),
    no_repair=(wrong_bill(repair_seconds=1e-9), "Who waits for a repair"),
    always_sync=(
        lambda j, m, t, s: tuple(bill(PlannedRun(**j), "sync", t, s)),
        "blocks for the copy alone",
    ),
    write_is_free=(
        lambda j, m, t, s: tuple(
            bill(
                PlannedRun(**j)._replace(write_seconds=0.0) if m == "async" else PlannedRun(**j),
                m,
                t,
                s,
            )
        ),
        "loses the seconds of the write",
    ),
    a_constant=(lambda j, m, t, s: (1.0, 2.0), "over the share that is work"),
    dollars_alone=(lambda j, m, t, s: 3.0, "days and dollars"),
)


def choice_by(pick: Any) -> Any:
    """A choice made from all that are within the budget; None where there is none."""

    def choose(job: dict[str, Any]) -> dict[str, Any] | None:
        given = PlannedRun(**job)
        every = [(m, best_interval(given, m), n) for m in MODES for n in range(9)]
        paid = [c for c in every if bill(given, *c).usd <= given.budget_usd]
        best = pick(given, paid) if paid else None
        return best and dict(zip(("mode", "interval_seconds", "spares"), best, strict=True))

    return choose


def with_the_interval_of_sync(job: PlannedRun, paid: list[Any]) -> Any:
    mode, _, spares = min(paid, key=lambda choice: bill(job, *choice).days)
    return mode, best_interval(job, "sync"), spares


def with_youngs_interval(job: PlannedRun, paid: list[Any]) -> Any:
    mode, _, spares = min(paid, key=lambda choice: bill(job, *choice).days)
    mean = 1000 * DAY / (job.failures_per_1000_node_days * job.nodes)
    blocked = job.write_seconds if mode == "sync" else job.copy_seconds
    young = (2 * blocked * mean) ** 0.5
    return mode, young if mode == "sync" else max(young, job.write_seconds), spares


def first_that_fits(job: dict[str, Any]) -> dict[str, Any] | None:
    """Stops at the first number of spares that is too dear, though more would be cheaper."""
    given = PlannedRun(**job)
    best: dict[str, Any] | None = None
    for spares in range(9):
        choice = ("async", best_interval(given, "async"), spares)
        if bill(given, *choice).usd > given.budget_usd:
            break
        best = dict(zip(("mode", "interval_seconds", "spares"), choice, strict=True))
    return best


def cut_short(job: dict[str, Any]) -> dict[str, Any]:
    best = best_choice(PlannedRun(**job))
    assert best, "the first jobs have a choice"
    return {"mode": "async", "interval_seconds": job["write_seconds"] / 2, "spares": best[2]}


known.mistakes(
    "choose",
    cheapest=(
        choice_by(lambda job, paid: min(paid, key=lambda c: bill(job, *c).usd)),
        "number of spares",
    ),
    always_async=(
        choice_by(
            lambda job, paid: min(
                (c for c in paid if c[0] == "async"), key=lambda c: bill(job, *c).days
            )
        ),
        "Try both modes",
    ),
    first_that_fits=(first_that_fits, "None is for budgets that no choice keeps"),
    over_the_budget=(
        lambda job: {
            "mode": "async",
            "interval_seconds": best_interval(PlannedRun(**job), "async"),
            "spares": 8,
        },
        "budget holds for all",
    ),
    no_interval=(
        lambda job: {"mode": "async", "interval_seconds": 0, "spares": 0},
        "An interval above 0",
    ),
    interval_of_sync=(choice_by(with_the_interval_of_sync), "which save time counts in this mode"),
    youngs_interval=(choice_by(with_youngs_interval), "Young's formula is an approximation"),
    none=(lambda job: None, "None is for budgets"),
    cut_short=(cut_short, "needs its write to end"),
)


def but(
    piece: str, change: Callable[[dict[str, Any], int], Any]
) -> Callable[[Any, dict[str, Any], int], dict[str, Any]]:
    """The solution, with a piece that was not saved made otherwise."""

    def rebuild(solution: Any, saved: dict[str, Any], step: int) -> dict[str, Any]:
        found = solution(saved, step)
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
    run.optimizer.step = lambda closure=None: None
    for _ in range(step):
        run.step()
    return run.pieces() | saved


def train_again(saved: dict[str, Any], step: int) -> dict[str, Any]:
    run = LabRun()
    for _ in range(step):
        run.step()
    return run.pieces()


known.mistakes(
    "rebuild",
    of_a_new_run=(lambda saved, step: LabRun().pieces() | saved, "schedule's own counter"),
    order_of_a_new_run=(
        but("order", lambda found, step: LabRun().pieces()["order"]),
        "One order was drawn",
    ),
    place_of_equal_batches=(
        but("order", lambda found, step: found["order"] | {"place": 16 * step % 100}),
        "an epoch",
    ),
    random_of_a_new_run=(
        but("random", lambda found, step: LabRun().pieces()["random"]),
        "Draw and drop",
    ),
    equal_batches=(but("random", equal_batches), "The last batch of an epoch is smaller"),
    train_again=(train_again, "Training again from the start"),
    replay=(replay, "Training again from the start"),
    left_out=(lambda saved, step: saved, "'schedule' is not in what you return"),
    none=(but("schedule", lambda found, step: None), "A piece looks as"),
    no_return=(lambda saved, step: None, "returns nothing"),
)


def run(name: str, **change: Any) -> dict[str, Any]:
    return {name: PLANTED[name]._asdict() | change}


known.rights("dead_runs", capitals=run("A", cause="Skipped Collective", culprit=2.0))
known.mistakes(
    "dead_runs",
    a_cut=(run("A", cause="network cut"), "Who came to its end here"),
    another_rank=(run("A", culprit=0), "who complain are seldom to blame"),
    last_step=(run("A", step=11), "the one at which it went wrong first"),
    b_cut=(run("B", cause="network cut"), "Which host says nothing more"),
    another_host=(run("B", culprit=0), "another host"),
    host_c=(run("C", cause="host killed"), "The agent of that host is alive"),
    step_of_c=(run("C", step=5), "write None"),
    aliens=(run("C", cause="aliens"), "is wanted"),
)
