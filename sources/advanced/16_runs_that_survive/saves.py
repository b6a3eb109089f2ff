"""What lab 16 does to a learner's safe save: ends it at every moment, damages its files, fills the disk."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from utils.files import scratch
from utils.labs.kinds import as_number

from .kills import Image, Recorder, Unsynced, put_back

Files = dict[str, bytes]


class Pair(NamedTuple):
    """The learner's two functions."""

    save: Callable[..., Any]
    load: Callable[..., Any]


def content(step: int) -> Files:
    """What a run has to save after a step; files of both kinds differ from step to step."""
    rows = {f"rank_{rank}.bin": bytes([step, rank]) * (500 + 100 * step) for rank in range(2)}
    return rows | {".metadata": f"step {step}, 2 ranks".encode()}


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """An empty folder, gone afterwards."""
    in_memory = Path("/dev/shm")  # where the system has it: hundreds of saves wait for no disk
    place = in_memory if os.access(in_memory, os.W_OK) else None
    with scratch("lab-16", place) as folder:
        yield folder


class Loss(NamedTuple):
    """A kill, or a power cut, after which something was wrong."""

    line: int
    is_power_cut: bool
    what: str


def first_loss(
    pair: Pair, before: tuple[int, ...], step: int, keep: int
) -> tuple[Loss | None, int]:
    """The first moment of a save at which an end loses something, and the number of moments."""
    with new_folder() as folder:
        for earlier in before:
            pair.save(content(earlier), folder, earlier, keep)
        recorder = Recorder(folder)
        recorder.record(pair.save, content(step), folder, step, keep)
        for line, is_power_cut, image in recorder.moments:
            _lay_out(image, folder)  # the same place, for those who write its name into a file
            if wrong := _wrong_after(pair, folder, before, step):
                return Loss(line, is_power_cut, wrong), 0
    return None, len(recorder.moments)


def _lay_out(image: Image, folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    put_back(image, folder)


def _wrong_after(pair: Pair, folder: Path, before: tuple[int, ...], step: int) -> str:
    found = pair.load(folder)
    allowed = [(s, content(s)) for s in {*before[-1:], step}]
    if found is None and not before:
        return ""  # nothing was there
    if as_pair(found) not in allowed:
        return "lost" if found is None else "mixed"
    pair.save(content(step + 1), folder, step + 1, 1)
    return "" if as_pair(pair.load(folder)) == (step + 1, content(step + 1)) else "stuck"


def as_pair(found: Any) -> tuple[int | float, Files] | None:
    """What `load` gave as (step, files), whatever kind of pair and of bytes it is; None for others."""
    if not isinstance(found, (tuple, list)) or len(found) != 2 or not isinstance(found[1], dict):
        return None
    step, files = as_number(found[0]), found[1]
    if step is None or not all(isinstance(data, (bytes, bytearray)) for data in files.values()):
        return None
    return step, {name: bytes(data) for name, data in files.items()}


def files_of(folder: Path) -> dict[Path, bytes]:
    """All files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damaged(pair: Pair, damage: Callable[[Path], None]) -> list[tuple[str, Any]]:
    """What `load` gives with one file of the newer of two saves damaged, for each of its files."""
    found = []
    with new_folder() as folder:
        pair.save(content(1), folder, 1, 2)
        old = set(files_of(folder))
        pair.save(content(2), folder, 2, 2)
        names = [path.relative_to(folder) for path in files_of(folder) if path not in old]
        for name in names:
            with new_folder() as copy:
                shutil.copytree(folder, copy, dirs_exist_ok=True)
                damage(copy / name)
                found.append((name.name, as_pair(pair.load(copy))))
    return found


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def unsynced(pair: Pair) -> Unsynced:
    """What is not on the disk once a save has returned."""
    with new_folder() as folder:
        recorder = Recorder(folder)
        recorder.record(pair.save, content(1), folder, 1, 1)
        return recorder.unsynced()


class Return(NamedTuple):
    """A save whose step is not what loads next."""

    steps: list[int]
    found: Any


def first_forgotten(
    pair: Pair, steps: tuple[int, ...], keep: int, *, damage: bool
) -> Return | None:
    """Save steps in an order that goes back; the first save that does not load right after it.

    With damage, each file of the folder is damaged before the next save.
    """
    with new_folder() as folder:
        for number, step in enumerate(steps):
            for path in files_of(folder) if damage else ():
                flip(path)
            files = content(step) | {"number": bytes([number])}
            pair.save(files, folder, step, keep)
            if as_pair(found := pair.load(folder)) != (step, files):
                return Return([*steps[: number + 1]], found)
    return None


def on_full_disk(pair: Pair) -> tuple[str, Any]:
    """The name of what `save` raises where no file may grow beyond 600 bytes, and what loads then."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with new_folder() as folder:
        pair.save(content(1), folder, 1, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
        raised = ""
        try:
            pair.save(content(2), folder, 2, 2)
        except OSError:
            raised = "OSError"
        except Exception as error:  # the learner's code  # noqa: BLE001
            raised = type(error).__name__
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return raised, as_pair(pair.load(folder))
