"""A slow link of our own: who wants to send over it waits until it is free."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_FREE_AT = struct.Struct("d")  # on the clock that all processes share


@dataclass(frozen=True)
class SlowLink:
    """One link out of each host, shared by its ranks; when it is free again stands in a file.

    Attributes:
        folder: Holds a file for each host.
        ranks_per_host: Host 0 has the first ranks, and so on.
        bytes_per_second: In each direction.
        delay_seconds: Added to a message that has passed.
    """

    folder: Path
    ranks_per_host: int
    bytes_per_second: float
    delay_seconds: float

    @classmethod
    def make(
        cls, folder: Path, ranks_per_host: int, rate: float, delay_seconds: float, hosts: int
    ) -> SlowLink:
        """A link with its files, in an empty folder."""
        link = cls(folder, ranks_per_host, rate, delay_seconds)
        for host in range(hosts):
            link._file(host).write_bytes(_FREE_AT.pack(0.0))
        return link

    def __call__(self, target: int, nbytes: int) -> None:
        """Wait as long as the bytes take; nothing where the target is of this host."""
        host = int(os.environ["RANK"]) // self.ranks_per_host
        if target // self.ranks_per_host != host:
            arrival = self._taken_until(host, nbytes) + self.delay_seconds
            time.sleep(max(0.0, arrival - time.monotonic()))

    def _taken_until(self, host: int, nbytes: int) -> float:
        with self._file(host).open("r+b") as file:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            (free_at,) = _FREE_AT.unpack(file.read(_FREE_AT.size))
            until = max(time.monotonic(), free_at) + nbytes / self.bytes_per_second
            file.seek(0)
            file.write(_FREE_AT.pack(until))
        return until

    def _file(self, host: int) -> Path:
        return self.folder / f"host-{host}"
