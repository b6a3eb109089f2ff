"""Which checkpoints of a folder are whole, which was saved last, and which may go.

A checkpoint is a folder of files with a list of their checksums. It is written under a name that
nobody reads, and gets its own by one rename when all of it is on the disk: that is all or nothing on
ext4, XFS, Lustre and NFS (whose clients may see it later). In an object store it is not, and the list
alone tells what is whole.

Names count the saves. The highest step is not what was saved last: a run that went back to step 50
saves step 60 after step 100. Nor are clocks asked: those of hosts differ, and are set back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CHECKSUMS = "checksums.json"
VERSION = 2  # of what this file writes; 1 counted no saves, and its list had no checksum of its own
_UNFINISHED = ".writing"
# `step-60-save-7`. Of version 1: `step-60`, and `step-60-2` where a step was saved again.
_NAME = re.compile(r"step-(\d+)(?:-save-(\d+)|-(\d+))?")
_BLOCK_BYTES = 1 << 20

Sums = Mapping[str, tuple[int, int]]  # bytes and CRC-32 of each file, by its name


class Listed(NamedTuple):
    """What a checkpoint's list says: how many ranks saved it, and its files."""

    ranks: int
    files: Sums


class DamagedError(ValueError):
    """A list of checksums that says nothing; the message is the end of a sentence about it."""


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that have their name, whole or not, what was saved last first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_order, reverse=True)


def step_of(path: Path) -> int:
    """The step that a checkpoint was saved after, from its name."""
    return _order(path)[1]


def begin(folder: Path, step: int) -> Path:
    """A new folder to write a checkpoint into; what saves left that were cut off goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"*{_UNFINISHED}"):
        if _NAME.fullmatch(path.stem):
            shutil.rmtree(path)
    saves = 1 + max((_order(path)[0] for path in list_checkpoints(folder)), default=0)
    unfinished = folder / f"step-{step:08d}-save-{saves}{_UNFINISHED}"
    unfinished.mkdir()
    return unfinished


def write_list(unfinished: Path, files: Sums, ranks: int) -> None:
    """Write the list of what was meant to be written.

    Raises:
        DamagedError: it reads otherwise than it was written.
    """
    content = {"version": VERSION, "ranks": ranks, "files": dict(sorted(files.items()))}
    with (unfinished / CHECKSUMS).open("w", encoding="utf-8") as file:
        file.write(json.dumps({"checksum": _sum_of(content), **content}))
        file.flush()
        os.fsync(file.fileno())
    read_list(unfinished)


def publish(unfinished: Path) -> Path:
    """Give a checkpoint its name; all its files are on the disk."""
    final = unfinished.with_suffix("")
    _to_disk(unfinished)
    unfinished.rename(final)
    _to_disk(final.parent)  # the new name, before an old one goes
    return final


def beyond(paths: Sequence[Path], keep: int, is_whole: Callable[[Path], bool]) -> Sequence[Path]:
    """Those that may go, of checkpoints from the last one saved: what is older than `keep` whole ones.

    Damaged ones do not count, so that the last whole one never goes.
    """
    if len(paths) <= keep:
        return ()
    whole = 0
    for number, path in enumerate(paths):
        if whole == keep:
            return paths[number:]
        whole += is_whole(path)
    return ()


def remove(paths: Sequence[Path]) -> None:
    """Remove checkpoints; half of one must not keep its name."""
    for path in reversed(paths):
        shutil.rmtree(path.rename(path.with_name(path.name + _UNFINISHED)))


def read_list(path: Path) -> Listed:
    """What the list of a checkpoint says.

    Raises:
        DamagedError: it is not there, damaged, or of a newer version.
    """
    try:
        found = json.loads((path / CHECKSUMS).read_text(encoding="utf-8"))
        if (version := int(found["version"])) > VERSION:
            raise DamagedError(
                f"it was written in version {version}, this program reads up to {VERSION}: update"
            )
        checksum = found.pop("checksum", None)
        listed = Listed(found["ranks"], {k: (n, s) for k, (n, s) in found["files"].items()})
    except FileNotFoundError:
        raise DamagedError("its save was not finished") from None
    except DamagedError:
        raise
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"its list of checksums cannot be read ({error})") from error
    if (version != 1 or checksum is not None) and checksum != _sum_of(found):
        raise DamagedError("its list of checksums has changed since it was written")
    return listed


def problems(path: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with a checkpoint's files; empty where each is as it was meant.

    Args:
        path: its folder.
        part, parts: look at this part of its files alone, as one of several ranks.
    """
    try:
        files = sorted(read_list(path).files.items())
    except DamagedError as error:
        return [str(error)]
    return differing(path, dict(files[part::parts]))


def differing(path: Path, files: Sums) -> list[str]:
    """What is wrong with these files of a folder."""
    looked = ((name, _problem(path / name, *wanted)) for name, wanted in files.items())
    return [f"{name} {problem}" for name, problem in looked if problem]


def newest_whole(folder: Path) -> Path | None:
    """What was saved last and is whole; None where there is nothing."""
    return next((path for path in list_checkpoints(folder) if not problems(path)), None)


def _order(path: Path) -> tuple[int, int, int]:
    match = _NAME.fullmatch(path.name)
    assert match, f"{path.name} is no checkpoint's name"
    return int(match[2] or 0), int(match[1]), int(match[3] or 1)


def _problem(file: Path, size: int, checksum: int) -> str:
    try:
        if (found := file.stat().st_size) != size:
            return f"has {found:,} bytes of {size:,}"
        return "" if _checksum(file) == checksum else "has changed since it was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _checksum(file: Path) -> int:
    found = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            found = zlib.crc32(block, found)
    return found


def _sum_of(content: object) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _to_disk(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
