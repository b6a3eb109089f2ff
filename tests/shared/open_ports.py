"""Looks at what a launch listens on, all the time while it runs."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator

import psutil

LOOK_SECONDS = 0.4  # ports stay open for a second or longer; a look takes a tenth


class Doors:
    """What this process and its descendants listen on, and who got in from elsewhere."""

    def __init__(self) -> None:
        self.listening: set[tuple[str, int]] = set()
        self.open: list[str] = []
        self._elsewhere = addresses_of_this_machine()

    def look(self) -> None:
        """Note what listens now, and knock at each new port from every other address."""
        for address, port in listening() - self.listening:
            self.listening.add((address, port))
            if not ipaddress.ip_address(address).is_loopback:
                self.open.append(f"port {port} listens on {address}")
            self.open += [
                f"port {port} answers at {at}" for at in self._elsewhere if gets_in(at, port)
            ]


def addresses_of_this_machine() -> list[str]:
    """Those that other machines could use."""
    found = [
        row.address
        for rows in psutil.net_if_addrs().values()
        for row in rows
        if row.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [at for at in found if "%" not in at and not ipaddress.ip_address(at).is_loopback]


def listening() -> set[tuple[str, int]]:
    me, found = psutil.Process(), set()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has just ended
            rows = process.net_connections(kind="inet")
            found |= {tuple(row.laddr) for row in rows if row.status == psutil.CONN_LISTEN}
    return found


def gets_in(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=2):
        return True
    return False


@contextlib.contextmanager
def watched() -> Iterator[Doors]:
    """Look all the time while the block runs; what was open before does not count."""
    doors, is_over = Doors(), threading.Event()
    doors.look()
    doors.listening, before, doors.open = set(), doors.listening, []

    def look() -> None:
        doors.listening |= before
        while not is_over.wait(LOOK_SECONDS):
            doors.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield doors
    finally:
        is_over.set()
        thread.join()
        doors.listening -= before
