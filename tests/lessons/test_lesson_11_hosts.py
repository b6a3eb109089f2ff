"""Two hosts of our own: what crosses their link, what is done without namespaces, what is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import nothing_left

from utils.lessons.lesson_11 import algorithms, hosts
from utils.lessons.lesson_11.hosts import run_hosts
from utils.ranks import RankError, run_ranks
from utils.ranks.namespaces import NamespaceError, bytes_sent_here, linked_hosts

ROOT = Path(__file__).parents[2]
NUMBERS = 64 * 1024  # 256 KiB


def namespaces_work() -> bool:
    try:
        with linked_hosts(50e6):
            return True
    except NamespaceError:
        return False


with_namespaces = pytest.mark.skipif(not namespaces_work(), reason="no namespaces here")


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def race(wire: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"host": wire.rank // (wire.size // wire.hosts)}
    ways = {"ring": algorithms.ring_all_reduce, "hierarchical": algorithms.hierarchical_all_reduce}
    for name, reduce in ways.items():
        x = torch.arange(NUMBERS, dtype=torch.float32) + wire.rank
        wire.moves.clear()
        dist.barrier()
        before = bytes_sent_here()
        reduce(wire, x)
        dist.barrier()
        kernel = None if before is None else (bytes_sent_here() or 0) - before
        half = wire.size // 2
        crossed = sum(
            m.sent_bytes for m in wire.moves if m.to is not None and m.to // half != found["host"]
        )
        right = wire.size * torch.arange(NUMBERS) + sum(range(wire.size))
        found[name] = (crossed, kernel, torch.equal(x, right.float()))
    found["local"] = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    return found


@with_namespaces
def test_namespaces_carry_what_the_wire_counts_and_leave_nothing() -> None:
    run_ranks(os.getpid, 1)  # the server is meant to stay
    before = interfaces()
    with nothing_left():
        run = run_hosts(race, 4, megabits_per_second=400)
    assert (run.transport, run.why) == ("network namespaces", "")
    for rank, found in enumerate(run.results):
        assert found["ring"][2] and found["hierarchical"][2], f"rank {rank}: a wrong sum"
        assert found["local"] == (str(rank % 4), "4")
    size = NUMBERS * 4
    for name, right in (("ring", 7 * size // 4), ("hierarchical", size)):
        for host in (0, 1):
            ranks = [found for found in run.results if found["host"] == host]
            assert sum(found[name][0] for found in ranks) == right, f"{name}, host {host}"
            kernel = max(found[name][1] for found in ranks)
            assert right <= kernel < 1.5 * right, (
                f"{name}: the kernel sent {kernel} bytes from host {host}"
            )
    assert interfaces() == before, "an interface is left"


@with_namespaces
def test_ranks_that_fail_leave_nothing() -> None:
    run_ranks(os.getpid, 1)
    before = interfaces()

    def one_dies(wire: Any) -> None:
        if wire.rank == 1:
            os._exit(7)
        dist.barrier()

    with nothing_left():
        with pytest.raises(RankError, match="one_dies: rank 1 ended by itself with exit code 7"):
            run_hosts(one_dies, 1, timeout_seconds=20)
    assert interfaces() == before, "an interface is left"


@with_namespaces
def test_a_killed_process_takes_its_hosts_along() -> None:
    program = (
        "import os, time\nfrom utils.ranks.namespaces import linked_hosts\n"
        "with linked_hosts(50e6):\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    before = interfaces()
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert interfaces() == before
    with linked_hosts(50e6):
        pass  # the same addresses are free again


def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_without_tc_messages_wait_for_a_link_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    no_tools(monkeypatch)
    run = run_hosts(race, 2, megabits_per_second=800)
    assert run.transport == "paced messages"
    assert "there is no ip and no tc here" in run.why
    size = NUMBERS * 4
    assert sum(found["hierarchical"][0] for found in run.results[:2]) == size
    assert all(found["ring"][2] and found["hierarchical"][2] for found in run.results)
    assert run.results[0]["ring"][1] is None, "no kernel counts a link that is not there"


def timed(wire: Any) -> float:
    dist.barrier()
    start = time.monotonic()
    for _ in range(2):
        wire.exchange(torch.ones(NUMBERS), 1 - wire.rank, 1 - wire.rank)
    return time.monotonic() - start


def test_a_paced_link_lets_nothing_through_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    no_tools(monkeypatch)
    least = 2 * NUMBERS * 4 / (40e6 / 8)
    assert min(run_hosts(timed, 1, megabits_per_second=40).results) >= least, (
        "the link was not waited for"
    )


def test_a_delay_is_there_or_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_hosts(timed, 1, delay_seconds=0.05)
    assert run.delay_seconds == 0.05 or "No delay: " in run.why, run
    if run.delay_seconds:
        assert min(run.results) >= 2 * 0.05, "the link has no delay"
    no_tools(monkeypatch)
    paced = run_hosts(timed, 1, delay_seconds=0.05)
    assert paced.delay_seconds == 0.05 and min(paced.results) >= 2 * 0.05


@with_namespaces
@pytest.mark.slow
def test_without_root_a_user_namespace_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> list[Any]:
        raise NamespaceError("the system refuses unshare")

    monkeypatch.setattr(hosts, "linked_hosts", refused)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    probe = subprocess.run(["unshare", "--user", "--map-root-user", "true"], capture_output=True)
    run = run_hosts(race, 1)
    assert run.transport == ("paced messages" if probe.returncode else "network namespaces"), (
        run.why
    )
    assert all(found["ring"][2] for found in run.results)
    with pytest.raises(RankError, match="rank 1 raised ZeroDivisionError") as caught:
        run_hosts(divides_by_zero, 1)
    assert caught.value.rank == 1 and caught.value.failures[1].kind == "raised"


def divides_by_zero(wire: Any) -> None:
    if wire.rank:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("ranks", "settings", "words"),
    [
        (0, {}, "each of the two hosts takes 1 to 8"),
        (9, {}, "1 to 8"),
        ("4", {}, "a whole number"),
        (1, {"megabits_per_second": 0}, "a link of 1 to 100,000"),
        (1, {"megabits_per_second": "fast"}, "megabits_per_second is 'fast'"),
        (1, {"delay_seconds": -1}, "0 to 1 s"),
    ],
)
def test_hosts_that_cannot_be(ranks: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_hosts(race, ranks, **settings)
