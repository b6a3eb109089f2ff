"""A loader of images whose workers run ahead: no leak, and still the host is full.

"The job is killed, there is no error, and nvidia-smi shows an almost empty GPU."
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from utils.units import MIB

BUDGET_BYTES = 128 * MIB  # of shared memory; Docker gives a container 64 MB unless told otherwise
BATCH, SHAPE = 8, (3, 256, 256)
SHARED = "/dev/shm/torch_"


class Images(Dataset[torch.Tensor]):
    """Images that are made when asked for, as fp32 or as the bytes that they are stored in."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full(SHAPE, index % 256, dtype=torch.uint8).to(self.dtype)


def shared_bytes() -> int:
    """Shared memory of batches on their way; 0 where /proc cannot tell.

    What a worker has made is an open file of its, mapped nowhere, so that no process's size shows
    it; what came out of turn is mapped here.
    """
    files = {}
    for worker in psutil.Process().children(recursive=True):
        for entry in Path(f"/proc/{worker.pid}/fd").glob("*"):
            with contextlib.suppress(OSError):  # closed meanwhile: the batch was taken
                if os.readlink(entry).startswith(SHARED):
                    files[os.stat(entry).st_ino] = os.stat(entry).st_size
    maps = Path("/proc/self/maps")
    for row in maps.read_text().splitlines() if maps.exists() else []:
        area, _, _, _, inode, *path = row.split(maxsplit=5)
        if path and path[0].startswith(SHARED):
            start, end = (int(part, 16) for part in area.split("-"))
            files[int(inode)] = end - start
    return sum(files.values())


def settled_bytes(most_seconds: float = 5.0) -> int:
    """The same once the workers have caught up, as they do while a training step takes its time."""
    sizes, end = [-1], time.monotonic() + most_seconds
    while time.monotonic() < end and (len(sizes) < 4 or len(set(sizes[-4:])) > 1):
        time.sleep(0.1)
        sizes.append(shared_bytes())
    return sizes[-1]


def main(workers: int, prefetch: int, dtype: torch.dtype, batches: int = 32) -> None:
    """Print, as JSON, the mean of the images and the shared bytes at four moments of the run."""
    loader = DataLoader(Images(dtype), BATCH, num_workers=workers, prefetch_factor=prefetch)
    seen, total = [], 0.0
    for number, images in enumerate(loader, start=1):
        total += images.float().mean().item()
        del images
        if number % (batches // 4) == 0:
            seen.append(settled_bytes())
        if number == batches:
            break
    print(json.dumps({"mean": total / batches, "shared_bytes": seen}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--prefetch", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "uint8"], default="float32")
    given = parser.parse_args(sys.argv[1:])
    main(given.workers, given.prefetch, getattr(torch, given.dtype))
