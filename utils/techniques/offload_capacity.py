"""Whether a host or a disk can hold what is offloaded to it, and how fast that disk is."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from utils.units import MIB, format_bytes

BLOCK = 4 * MIB


class DiskSpeed(NamedTuple):
    """Bytes per second of one file, written and read past the page cache where `direct`."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    direct: bool


def check_host_room(wanted_bytes: float) -> None:
    """Refuse states that the host's free memory cannot hold.

    Raises:
        MemoryError: how much is wanted and how much is free.
    """
    free = psutil.virtual_memory().available
    if wanted_bytes > free:
        raise MemoryError(
            f"Offload would put {format_bytes(wanted_bytes)} into host memory, and "
            f"{format_bytes(free)} of it is free. Take a smaller model, offload fewer states, or "
            "offload to a disk."
        )


def check_disk_room(folder: str | Path, wanted_bytes: float) -> None:
    """Refuse states that the disk of a folder cannot hold.

    Raises:
        OSError: the folder is not there, or its disk has less room.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r} to offload to: make it first.")
    free = shutil.disk_usage(folder).free
    if wanted_bytes > free:
        raise OSError(
            f"Offload would write {format_bytes(wanted_bytes)} to {str(folder)!r}, whose disk has "
            f"{format_bytes(free)} free. Name a folder on a larger disk."
        )


def check_offload_room(zero: Mapping[str, Any], parameters: int) -> None:
    """Refuse DeepSpeed's `zero_optimization` where what it offloads has no room.

    The optimizer's states and gradients are 16 bytes a parameter, the weights 2.

    Raises:
        MemoryError, OSError: host memory, or a disk, that is too small.
    """
    host = 0.0
    for key, each in (("offload_optimizer", 16), ("offload_param", 2)):
        where = zero.get(key) or {}
        if where.get("device") == "nvme":
            check_disk_room(where.get("nvme_path", ""), each * parameters)
        elif where.get("device") == "cpu":
            host += each * parameters
    check_host_room(host)


def measure_disk(folder: str | Path, size: int = 64 * MIB, *, direct: bool = True) -> DiskSpeed:
    """Write a file and read it again, and remove it.

    Args:
        folder: on the disk.
        size: of the file, a multiple of 4 MiB.
        direct: past the page cache, as asynchronous I/O does; else reading measures memory.

    Raises:
        ValueError: a size that is no multiple of 4 MiB.
        OSError: no room, or a file system without direct I/O.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"folder is {str(folder)!r}, and there is no such folder.")
    if size < BLOCK or size % BLOCK:
        raise ValueError(f"size is {size}; it is a multiple of {BLOCK} bytes, 4 MiB.")
    check_disk_room(folder, size)
    with (
        _scratch(folder) as path,
        mmap.mmap(-1, BLOCK) as block,
    ):  # mmap: aligned, as O_DIRECT wants
        block.write(os.urandom(BLOCK))
        start = time.perf_counter()
        with _opened(path, os.O_WRONLY | os.O_CREAT, direct) as file:
            for _ in range(size // BLOCK):
                os.write(file, block)
            os.fsync(file)
        wrote = time.perf_counter()
        with _opened(path, os.O_RDONLY, direct) as file:
            while os.readv(file, [block]):
                pass
        read = time.perf_counter()
    return DiskSpeed(size / (wrote - start), size / (read - wrote), direct)


@contextlib.contextmanager
def _scratch(folder: str | Path) -> Iterator[Path]:
    """The path of a file that is gone afterwards, whatever happens."""
    handle, name = tempfile.mkstemp(prefix="disk-speed-", dir=folder)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(path: Path, flags: int, direct: bool) -> Iterator[int]:
    flag = getattr(os, "O_DIRECT", None)
    if direct and flag is None:
        raise OSError(
            "This system has no direct I/O: measure with direct=False, through the cache."
        )
    try:
        file = os.open(path, flags | (flag if direct and flag else 0))
    except OSError as error:
        if not direct:
            raise
        raise OSError(
            f"The file system of {str(path.parent)!r} refuses direct I/O ({error.strerror}). Name "
            "a folder on a disk of its own, or measure with direct=False, through the cache."
        ) from error
    try:
        yield file
    finally:
        os.close(file)
