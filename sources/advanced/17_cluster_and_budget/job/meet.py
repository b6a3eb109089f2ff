"""Ranks that meet, in the standard library alone: what train.py of lab 17 joins in place of PyTorch.

Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as `torch.distributed` does.
"""

import os
import socket
import time

PATIENCE_SECONDS = 8.0


class Ranks:
    """All ranks of a job: rank 0 listens at MASTER_ADDR, the others call it."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.others = self._listen(place) if self.rank == 0 else [self._call(place)]

    def _listen(self, place: tuple[str, int]) -> list[socket.socket]:
        with socket.create_server(place, backlog=self.size) as server:
            server.settimeout(PATIENCE_SECONDS)
            try:
                found = [server.accept()[0] for _ in range(self.size - 1)]
            except TimeoutError:
                raise SystemExit(
                    f"rank 0 of {self.size} waits at {place}: others never came"
                ) from None
        for other in found:
            other.settimeout(PATIENCE_SECONDS)
        return found

    def _call(self, place: tuple[str, int]) -> socket.socket:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return socket.create_connection(place, timeout=PATIENCE_SECONDS)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise SystemExit(f"rank {self.rank} finds nobody at {place}: {error}") from None
                time.sleep(0.05)

    def any(self, flag: bool) -> bool:
        """Whether the flag of any rank is true; all ranks call it, and all get the same answer."""
        if self.rank:
            self._send(self.others[0], flag)
            return self._receive(self.others[0])
        found = any([flag, *[self._receive(other) for other in self.others]])
        for other in self.others:
            self._send(other, found)
        return found

    def wait(self) -> None:
        """Go on when all ranks are here."""
        self.any(False)

    def _send(self, other: socket.socket, flag: bool) -> None:
        other.sendall(b"1" if flag else b"0")

    def _receive(self, other: socket.socket) -> bool:
        byte = other.recv(1)
        if not byte:
            raise SystemExit(f"rank {self.rank}: another rank has gone")
        return byte == b"1"
