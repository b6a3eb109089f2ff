"""Disks and hosts without room, file systems without direct I/O: a sentence each, nothing left."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from utils.lessons.lesson_07.peak import allocated_peak
from utils.techniques import offload_capacity
from utils.techniques.offload_capacity import (
    check_disk_room,
    check_host_room,
    check_offload_room,
    measure_disk,
)
from utils.units import MIB


def test_a_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, 8 * MIB, direct=False)
    assert found.write_bytes_per_second > 0 and found.read_bytes_per_second > 0
    assert list(tmp_path.iterdir()) == [], "the file is removed"


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct I/O")
def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **others)

    monkeypatch.setattr(offload_capacity.os, "open", refuse)
    with pytest.raises(OSError, match=r"refuses direct I/O .*direct=False"):
        measure_disk(tmp_path, 4 * MIB)
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk"


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_capacity.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(OSError, match="Name a folder on a larger disk"):
        check_disk_room(tmp_path, 101)
    check_disk_room(tmp_path, 100)
    with pytest.raises(OSError, match="larger disk"):
        measure_disk(tmp_path, 4 * MIB)
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make it first"):
        check_disk_room(tmp_path / "no", 1)


def test_a_host_with_less_memory_than_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        offload_capacity.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000)
    )
    check_host_room(1000)
    with pytest.raises(MemoryError, match="Take a smaller model, offload fewer states"):
        check_host_room(1001)


def test_deepspeed_s_offload_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        offload_capacity.psutil, "virtual_memory", lambda: SimpleNamespace(available=17_000)
    )
    monkeypatch.setattr(offload_capacity.shutil, "disk_usage", lambda _: SimpleNamespace(free=1999))
    optimizer, weights = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}
    check_offload_room({"stage": 2, "offload_optimizer": optimizer}, 1000)
    with pytest.raises(MemoryError, match="offload fewer states"):
        check_offload_room({"offload_optimizer": optimizer, "offload_param": optimizer}, 1000)
    with pytest.raises(OSError, match="larger disk"):
        check_offload_room({"offload_optimizer": optimizer, "offload_param": weights}, 1000)


@pytest.mark.parametrize("size", [0, 5, 4 * MIB + 1])
def test_sizes_are_whole_blocks(tmp_path: Path, size: int) -> None:
    with pytest.raises(ValueError, match="4 MiB"):
        measure_disk(tmp_path, size)


def test_the_most_that_a_function_takes() -> None:
    import torch

    def two_in_turn() -> None:
        for _ in range(2):
            torch.ones(1000)

    assert allocated_peak(two_in_turn) == 4000, "the first is gone when the second comes"
    assert allocated_peak(lambda: [torch.ones(1000) for _ in range(2)]) == 8000
