"""`run_hosts`: ranks on two hosts of our own, joined by a slow link.

Hosts are network namespaces where the system lets us make them: as root, or as anybody in a user
namespace. Elsewhere the ranks share this machine, and messages of a `Wire` to the other host wait
for a link that is kept in a file. Either way nothing is left when `run_hosts` returns or raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from utils.checked import asks_first, check_public, in_order
from utils.files import scratch
from utils.ranks.as_root import call_as_root, is_unprivileged
from utils.ranks.launch import MOST_RANKS, meeting_point, run_members
from utils.ranks.member import Member
from utils.ranks.namespaces import INTERFACE, NamespaceError, NoDelayError, enter, linked_hosts

from .slow_link import SlowLink

__all__ = ["HostRun", "run_hosts"]

HOSTS = 2
MEGABITS = 400.0


class HostRun(NamedTuple):
    """What ranks on two hosts returned.

    Attributes:
        results: By rank; host 0 has the first half.
        transport: "network namespaces" or "paced messages".
        delay_seconds: That the link adds to a message.
        why: Why it is not as asked for, in a sentence; else empty.
    """

    results: list[Any]
    transport: str
    delay_seconds: float
    why: str


@dataclass(frozen=True)
class HostCall:
    """A call of `run_hosts`, as it travels to a process that is root."""

    worker: Callable[..., Any]
    ranks_per_host: int
    args: tuple[Any, ...]
    bytes_per_second: float
    delay_seconds: float
    timeout_seconds: float


@asks_first(in_order("function", "ranks_per_host", "run_hosts(worker, 4)"))
def run_hosts(
    worker: Callable[..., Any],
    ranks_per_host: int,
    *args: Any,
    megabits_per_second: float = MEGABITS,
    delay_seconds: float = 0.0,
    timeout_seconds: float = 120.0,
) -> HostRun:
    """Call `worker(wire, *args)` on ranks of two hosts, which a link of that rate joins.

    Ranks are as those of `run_ranks`. With namespaces everything between hosts takes the link, also
    PyTorch's own collectives; with paced messages what goes through `wire` does.

    Args:
        worker: what every rank calls, with its `Wire` first.
        ranks_per_host: 1 to 8.
        args: further arguments.
        megabits_per_second: of the link, in each direction.
        delay_seconds: of the link, where the kernel can (netem); the result says whether.
        timeout_seconds: from the call of the worker to its end, on every rank.

    Raises:
        RankError: a rank raised, died or took too long.
        ValueError: that many ranks, that rate, delay or timeout cannot be used.
    """
    _check(ranks_per_host, megabits_per_second, delay_seconds)
    rate = megabits_per_second * 1e6 / 8
    call = HostCall(worker, ranks_per_host, args, rate, delay_seconds, timeout_seconds)
    try:
        return in_namespaces(call)
    except NamespaceError as error:
        why = str(error)
    if is_unprivileged() and (
        found := call_as_root(in_namespaces, call, timeout_seconds=timeout_seconds)
    ):
        return found
    return _paced(call, f"No hosts of namespaces: {why}.")


def _check(ranks_per_host: Any, megabits_per_second: Any, delay_seconds: Any) -> None:
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
    if not isinstance(delay_seconds, (int, float)) or not 0 <= delay_seconds <= 1:
        raise ValueError(f"delay_seconds={delay_seconds!r}: a link may add 0 to 1 s to a message.")


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
        from .wire import Wire

        return self.worker(Wire(hosts=HOSTS, pace=self.link), *args)


def in_namespaces(call: HostCall) -> HostRun:
    """The call on two hosts, for a process that may make namespaces; without a delay if need be.

    Raises:
        NamespaceError: this one may not.
    """
    try:
        return HostRun(_on_linked(call), "network namespaces", call.delay_seconds, "")
    except NoDelayError as error:
        results = _on_linked(replace(call, delay_seconds=0.0))
        return HostRun(results, "network namespaces", 0.0, f"No delay: {error}.")


def _on_linked(call: HostCall) -> list[Any]:
    per_host, size = call.ranks_per_host, HOSTS * call.ranks_per_host
    link = linked_hosts(call.bytes_per_second, call.delay_seconds)
    with link as hosts, meeting_point() as place:
        members = [
            _HostMember(rank, size, place, call.timeout_seconds, hosts[rank // per_host], per_host)
            for rank in range(size)
        ]
        return run_members(_OnHosts(call.worker), call.args, members)


def _paced(call: HostCall, why: str) -> HostRun:
    size = HOSTS * call.ranks_per_host
    with scratch("link") as folder, meeting_point() as place:
        link = SlowLink.make(
            folder, call.ranks_per_host, call.bytes_per_second, call.delay_seconds, HOSTS
        )
        members = [Member(rank, size, place, call.timeout_seconds) for rank in range(size)]
        results = run_members(_OnHosts(call.worker, link), call.args, members)
    return HostRun(results, "paced messages", call.delay_seconds, why)


check_public(globals())
