"""No port that a launch opens can be reached from another machine."""

from __future__ import annotations

import datetime
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from no_namespaces import refuse_namespaces
from open_ports import addresses_of_this_machine, watched
from rank_cases import server_of_torch

from utils.lessons.lesson_16a.records.survive_script import SCRIPT as ELASTIC_SCRIPT
from utils.parallel.loopback import LOCALHOST, loopback_port
from utils.ranks import run_ranks, run_torchrun
from utils.ranks.elastic import run_elastic
from utils.ranks.launch import meeting_point, run_members
from utils.ranks.member import Member
from utils.ranks.recovery import Fault
from utils.shims.torch_distributed import default_store

SCRIPT = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
time.sleep(1)  # to be looked at
dist.destroy_process_group()
"""


def test_an_open_door_is_seen() -> None:
    with watched() as doors:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        doors.look()
    assert any(f"port {store.port} listens on" in text for text in doors.open)
    assert sum("answers at" in text for text in doors.open) >= len(addresses_of_this_machine())


def together() -> None:
    dist.all_reduce(torch.ones(2))
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=20))
    dist.all_reduce(torch.ones(2), group=group)
    threading.Event().wait(1)  # to be looked at


def check(launch: Callable[[], object], ranks: int) -> None:
    with watched() as doors:
        launch()
    assert len(doors.listening) >= ranks  # gloo's own of each rank, and torchrun's store
    assert not doors.open


@pytest.fixture(scope="module")
def server_for_a_cluster() -> Iterator[None]:
    """What ranks are forked from, in an environment that wishes for a cluster; of torch alone: quick."""
    with pytest.MonkeyPatch.context() as patch, server_of_torch():
        patch.setenv("GLOO_SOCKET_IFNAME", "eth0")
        run_ranks(together, 2)
        yield


@pytest.mark.usefixtures("server_for_a_cluster")
def test_run_ranks_opens_nothing_to_others() -> None:
    check(lambda: run_ranks(together, 2), 2)


@pytest.mark.usefixtures("server_for_a_cluster")
def test_no_other_user_reaches_the_store_of_run_ranks() -> None:
    with meeting_point() as place:
        folder = Path(place.file).parent
        assert folder.stat().st_mode & 0o077 == 0, "it opens to its owner alone"
        assert folder.parent.stat().st_mode & 0o066 == 0, "others may not look around it"
        with watched() as doors:
            members = [Member(rank, 1, place, 20) for rank in range(1)]
            assert run_members(kind_of_store, (), members) == ["FileStore"]
    assert place.port not in {port for _, port in doors.listening}, "nobody listens there"


def kind_of_store() -> str:
    store = default_store()
    return type(getattr(store, "underlying_store", store)).__name__


def test_run_torchrun_opens_nothing_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # rank 0 would open the store
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    (tmp_path / "script.py").write_text(SCRIPT)
    check(lambda: run_torchrun(tmp_path / "script.py", 2), 2)


@pytest.mark.slow
def test_run_elastic_on_loopback_opens_nothing_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With namespaces its ports lie where nobody else is; without them all must be on loopback."""
    refuse_namespaces(monkeypatch)
    (tmp_path / "script.py").write_text(ELASTIC_SCRIPT)
    arguments = (tmp_path, 60, 20, 0.02, 10)
    faults = [Fault("kill a rank", 15)]
    check(lambda: run_elastic(tmp_path / "script.py", *arguments, faults=faults), 2)


def test_a_port_for_a_program_is_free_and_none_that_a_system_gives_away() -> None:
    found = set[int]()
    for _ in range(20):
        random.seed(0)
        found.add(loopback_port())
    assert len(found) > 10
    for port in found:
        with socket.create_server((LOCALHOST, port)):
            assert port < 32_768


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOCALHOST, loopback_port())) as taken:
        port, other = taken.getsockname()[1], loopback_port()
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [port, other])
        assert loopback_port() == other
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [port])
        with pytest.raises(OSError, match="are taken; `ss -ltn` shows by what"):
            loopback_port()
