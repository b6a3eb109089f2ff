"""Two hosts made of network namespaces: each has its own interfaces, and one link joins them.

A namespace lives as long as something holds it. Here that is an open file of this process, with no
name anywhere: when this process ends, even by a kill, the kernel takes the namespaces and their
link away. `tc tbf` (a token bucket) sets the link's rate in both directions, and `tc netem` its delay, which
not every kernel has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

CLONE_NEWNET = 0x40000000  # linux/sched.h
INTERFACE = "eth0"
ADDRESSES = ("10.77.0.1/30", "10.77.0.2/30")  # seen inside the two namespaces alone
BURST_BYTES = 64 * 1024  # that tbf lets through at once
QUEUE_SECONDS = 0.05  # that a packet may wait in tbf before it is dropped


class NamespaceError(OSError):
    """The system does not let us make hosts of namespaces; the text says what is missing."""


class NoDelayError(NamespaceError):
    """Hosts can be made here, but their link cannot be given a delay."""


@contextlib.contextmanager
def linked_hosts(bytes_per_second: float, delay_seconds: float = 0.0) -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a link of that rate, each as a path that `enter` takes.

    Raises:
        NoDelayError: this kernel has no netem, and a delay was asked for.
        NamespaceError: this system cannot, or does not let us.
    """
    _check_tools()
    held: list[int] = []
    try:
        for _ in ADDRESSES:
            held.append(_new_namespace())
        first, second = (f"/proc/{os.getpid()}/fd/{number}" for number in held)
        _run_inside(
            second,
            _ip(
                "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", first
            ),
        )
        for path, address in zip((first, second), ADDRESSES, strict=True):
            _set_up(path, address, bytes_per_second)
            if delay_seconds:
                _delay(path, delay_seconds)
        yield first, second
    finally:
        for number in held:
            os.close(number)


def namespaces_problem() -> str:
    """Why this process can make no hosts of namespaces, as a sentence without its stop; "" if it can."""
    try:
        with linked_hosts(125e6):
            return ""
    except NamespaceError as error:
        return str(error)


def enter(path: str) -> None:
    """Move the calling thread into a namespace; what it opens from now on lies there.

    Raises:
        NamespaceError: the system does not let us.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        _call("setns", handle, CLONE_NEWNET)
    finally:
        os.close(handle)


def set_link(path: str, *, up: bool) -> None:
    """Cut the link of a host, or join it again. Nobody is told: packets no longer arrive.

    Raises:
        NamespaceError: the system does not let us.
    """
    _run_inside(path, _ip("link", "set", INTERFACE, "up" if up else "down"))


def bytes_sent_here() -> int | None:
    """What this host has sent over its link, headers included, as the kernel counts; None elsewhere."""
    try:
        with open("/proc/self/net/dev", encoding="ascii") as lines:
            rows = dict(line.split(":") for line in lines if ":" in line)
    except OSError:
        return None
    names = {name.strip() for name in rows}
    if names != {"lo", INTERFACE}:  # not in one of our namespaces
        return None
    return next(int(row.split()[8]) for name, row in rows.items() if name.strip() == INTERFACE)


def _check_tools() -> None:
    if sys.platform != "linux":
        raise NamespaceError("network namespaces are a feature of Linux")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NamespaceError(f"there is no {' and no '.join(missing)} here (package iproute2)")


def _new_namespace() -> int:
    """An open file that holds a new namespace, whose loopback interface is up."""
    found: list[int] = []

    def make() -> None:
        _call("unshare", CLONE_NEWNET)
        found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        _run(_ip("link", "set", "lo", "up"))

    try:
        _in_thread(make)
    except BaseException:
        for number in found:
            os.close(number)
        raise
    return found[0]


def _set_up(path: str, address: str, bytes_per_second: float) -> None:
    rate = ("rate", f"{8 * bytes_per_second:.0f}bit", "burst", str(BURST_BYTES))
    _run_inside(
        path,
        _ip("addr", "add", address, "dev", INTERFACE),
        _ip("link", "set", INTERFACE, "up"),
        (
            "tc",
            "qdisc",
            "add",
            "dev",
            INTERFACE,
            "root",
            "handle",
            "1:",
            "tbf",
            *rate,
            "latency",
            f"{1000 * QUEUE_SECONDS:.0f}ms",
        ),
    )


def _delay(path: str, seconds: float) -> None:
    command = ("tc", "qdisc", "add", "dev", INTERFACE, "parent", "1:1", "netem", "delay")
    try:
        _run_inside(path, (*command, f"{1e6 * seconds:.0f}us"))
    except NamespaceError as error:
        raise NoDelayError(f"this kernel's links have no delay: {error}") from error


def _ip(*words: str) -> tuple[str, ...]:
    return ("ip", *words)


def _run_inside(path: str, *commands: tuple[str, ...]) -> None:
    def inside() -> None:
        enter(path)
        for command in commands:
            _run(command)

    _in_thread(inside)


def _in_thread(work: Callable[[], None]) -> None:
    """Namespaces are a thread's: this one does the work and ends."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # handed on below  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise NamespaceError(f"`{' '.join(command[:3])}` failed ({said})")


def _call(name: str, *arguments: int) -> None:
    """A call of the C library; Python has these two from 3.12 on."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments):
        number = ctypes.get_errno()
        raise NamespaceError(f"the system refuses {name} ({os.strerror(number)})")
