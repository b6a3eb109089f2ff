"""`run_hosts`: ranks on two hosts of our own, joined by a slow link.

Hosts are network namespaces where the system lets us make them: as root, or as anybody in a user
namespace. Elsewhere the ranks share this machine, and messages of a `Wire` to the other host wait
for a link that is kept in a file. Either way nothing is left when `run_hosts` returns or raises.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from utils.ranks.killable import run_killable
from utils.ranks.launch import MOST_RANKS, meeting_point, run_members
from utils.ranks.member import Member
from utils.ranks.namespaces import INTERFACE, NamespaceError, enter, linked_hosts
from utils.ranks.slow_link import SlowLink

HOSTS = 2
MEGABITS = 400.0
ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0  # for the processes in a user namespace, which import torch anew


class HostRun(NamedTuple):
    """What ranks on two hosts returned, by rank.

    Attributes:
        results: By rank; host 0 has the first half.
        transport: "network namespaces" or "paced messages".
        why: Why it is no namespaces, in a sentence; else empty.
    """

    results: list[Any]
    transport: str
    why: str


def run_hosts(
    worker: Callable[..., Any],
    ranks_per_host: int,
    *args: Any,
    megabits_per_second: float = MEGABITS,
    timeout_seconds: float = 120.0,
) -> HostRun:
    """Call `worker(wire, *args)` on ranks of two hosts, which a link of that rate joins.

    Ranks are as those of `run_ranks`. With namespaces everything between hosts takes the link, also
    PyTorch's own collectives; with paced messages what goes through `wire` does.

    Raises:
        RankError: a rank raised, died or took too long.
        ValueError: that many ranks, that rate or that timeout cannot be used.
    """
    _check(ranks_per_host, megabits_per_second)
    rate = megabits_per_second * 1e6 / 8
    try:
        results = in_namespaces(worker, ranks_per_host, args, rate, timeout_seconds)
        return HostRun(results, "network namespaces", "")
    except NamespaceError as error:
        why = str(error)
    if _is_unprivileged() and (found := _as_root_of_our_own(worker, ranks_per_host, args, rate,
                                                            timeout_seconds)):  # fmt: skip
        return found
    results = _paced(worker, ranks_per_host, args, rate, timeout_seconds)
    return HostRun(results, "paced messages", f"No hosts of namespaces: {why}.")


def _check(ranks_per_host: Any, megabits_per_second: Any) -> None:
    most = MOST_RANKS // HOSTS
    if isinstance(ranks_per_host, bool) or not isinstance(ranks_per_host, int):
        raise ValueError(
            f"ranks_per_host is a whole number; got {ranks_per_host!r}. The function comes first: "
            "run_hosts(worker, 4)."
        )
    if not 1 <= ranks_per_host <= most:
        raise ValueError(
            f"ranks_per_host={ranks_per_host}: each of the two hosts takes 1 to {most}."
        )
    if not isinstance(megabits_per_second, (int, float)) or not 1 <= megabits_per_second <= 100_000:
        raise ValueError(
            f"megabits_per_second={megabits_per_second!r}: a link of 1 to 100,000 can be made here."
        )


@dataclass(frozen=True)
class _HostMember(Member):
    """A rank that moves into its host's namespace once it has met the store outside."""

    namespace: str
    per_host: int

    def move_in(self) -> None:
        enter(self.namespace)
        local = {"LOCAL_RANK": self.rank % self.per_host, "LOCAL_WORLD_SIZE": self.per_host}
        os.environ |= {name: str(value) for name, value in local.items()}
        os.environ |= {f"{library}_SOCKET_IFNAME": INTERFACE for library in ("GLOO", "NCCL")}


@dataclass(frozen=True)
class _OnHosts:
    """The worker with a wire that knows of hosts; its name is the worker's."""

    worker: Callable[..., Any]
    link: SlowLink | None = None

    @property
    def __name__(self) -> str:
        return getattr(self.worker, "__name__", type(self.worker).__name__)

    def __call__(self, *args: Any) -> Any:
        from utils.traffic.wire import Wire

        return self.worker(Wire(hosts=HOSTS, pace=self.link), *args)


def in_namespaces(
    worker: Callable[..., Any], per_host: int, args: tuple[Any, ...], rate: float, seconds: float
) -> list[Any]:
    """What the ranks of two hosts return, for a process that may make namespaces.

    Raises:
        NamespaceError: this one may not.
    """
    size = HOSTS * per_host
    with linked_hosts(rate) as hosts, meeting_point() as port:
        members = [
            _HostMember(rank, size, port, seconds, hosts[rank // per_host], per_host)
            for rank in range(size)
        ]
        return run_members(_OnHosts(worker), args, members)


def _paced(
    worker: Callable[..., Any], per_host: int, args: tuple[Any, ...], rate: float, seconds: float
) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="link-") as folder, meeting_point() as port:
        link = SlowLink.make(Path(folder), per_host, HOSTS, rate)
        members = [
            Member(rank, HOSTS * per_host, port, seconds) for rank in range(HOSTS * per_host)
        ]
        return run_members(_OnHosts(worker, link), args, members)


def _is_unprivileged() -> bool:
    return sys.platform == "linux" and os.geteuid() != 0 and shutil.which("unshare") is not None


def _as_root_of_our_own(
    worker: Callable[..., Any], per_host: int, args: tuple[Any, ...], rate: float, seconds: float
) -> HostRun | None:
    """The same by a process that is root in a user namespace; None where that is refused."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        call = Path(folder, "call")
        call.write_bytes(cloudpickle.dumps((worker, per_host, args, rate, seconds)))
        code = run_killable(_start_as_root, str(call), timeout_seconds=seconds + START_SECONDS)
        if code:
            return None
        results, error = cloudpickle.loads(call.with_name("answer").read_bytes())
    if error is not None:
        raise error
    return HostRun(results, "network namespaces", "")


def _start_as_root(call: str) -> int:
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        sys.executable,
        "-m",
        "utils.ranks.as_root",
        call,
    ]
    return subprocess.run(command, cwd=ROOT).returncode
