"""The way between host and device as a thing to hold: copies that are counted, slowed and timed.

On a machine without a GPU both ends are the same memory. The link then still counts what crosses
it, and a token bucket can make it as slow as one likes: a copy of b bytes waits until b tokens have
come in, at so many a second, while the program computes on.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from utils.checked import check_public
from utils.memory.host import host_memory
from utils.techniques.precision import device_of

__all__ = ["Link"]

DOWN, UP = "down", "up"  # to the host, and to the device


class Transfer(NamedTuple):
    """One copy: which way, how much, and when, in seconds of `time.perf_counter()`."""

    way: str
    bytes: int
    start_seconds: float
    end_seconds: float


class TokenBucket:
    """Lets bytes through at a steady rate; one that comes early sleeps.

    Args:
        bytes_per_second: of the link, one direction.

    Raises:
        ValueError: the rate is not above 0.
    """

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(
                f"A link of {bytes_per_second} bytes/s never delivers; write a rate above 0."
            )
        self._rate, self._free_at = bytes_per_second, 0.0

    def take(self, size: int) -> None:
        """Sleep until `size` bytes have passed."""
        begin = max(time.perf_counter(), self._free_at)
        self._free_at = begin + size / self._rate
        time.sleep(max(0.0, self._free_at - time.perf_counter()))


class Link:
    """Copies tensors down to the host and up to the device, one at a time in each direction.

    `link.up(tensor)` copies now; `link.send_up(tensor)` begins, and gives a future. Both directions
    run beside each other, as on PCI Express.

    Args:
        bytes_per_second: makes it that slow in each direction; None: as fast as a copy is.
        device: where "up" is.

    Raises:
        ValueError: PyTorch knows no such device, or the rate is not above 0.
    """

    def __init__(self, bytes_per_second: float | None = None, device: str = "cpu") -> None:
        rates = dict.fromkeys((DOWN, UP), bytes_per_second)
        self._buckets = {w: None if r is None else TokenBucket(r) for w, r in rates.items()}
        self._workers = {way: ThreadPoolExecutor(1, f"link-{way}") for way in (DOWN, UP)}
        self._device, self._lock = device_of(device), threading.Lock()
        self.log: list[Transfer] = []

    def up(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        return self.send_up(tensor).result()

    def down(self, tensor: Tensor) -> Tensor:
        """A copy in host memory."""
        return self.send_down(tensor).result()

    def send_up(self, tensor: Tensor) -> Future[Tensor]:
        """Begin to copy to the device."""
        return self._workers[UP].submit(self._copy, UP, tensor.detach())

    def send_down(self, tensor: Tensor) -> Future[Tensor]:
        """Begin to copy to host memory."""
        return self._workers[DOWN].submit(self._copy, DOWN, tensor.detach())

    def bytes(self, way: str) -> int:
        """What has crossed, "down" or "up"."""
        return sum(one.bytes for one in self.log if one.way == way)

    def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        for worker in self._workers.values():
            worker.shutdown()

    def _copy(self, way: str, tensor: Tensor) -> Tensor:
        start = time.perf_counter()
        bucket = self._buckets[way]
        if bucket is not None:
            bucket.take(tensor.nbytes)
        copy = self._placed(way, tensor)
        with self._lock:
            self.log.append(Transfer(way, tensor.nbytes, start, time.perf_counter()))
        return copy

    def _placed(self, way: str, tensor: Tensor) -> Tensor:
        if way == UP:
            return tensor.to(self._device, copy=True)
        with host_memory():
            return tensor.to("cpu", copy=True)


check_public(globals())
