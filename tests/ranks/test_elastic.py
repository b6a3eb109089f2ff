"""Jobs under elastic torchrun that meet a fault: noticed, brought back, right, and nothing left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from no_namespaces import refuse_namespaces
from rank_cases import nothing_left, wait_until

from utils.lessons.lesson_16a.records.per_step import run_per_step, torchft_problem
from utils.lessons.lesson_16a.records.survive_script import SCRIPT
from utils.ranks import elastic, run_killable
from utils.ranks.as_root import call_as_root
from utils.ranks.elastic import link_problem, run_elastic
from utils.ranks.elastic_job import ElasticJob
from utils.ranks.namespaces import linked_hosts
from utils.ranks.recovery import ElasticRun, Fault

TIMEOUT_SECONDS, EVERY, NAP_SECONDS = 3.0, 10, 0.02
with_links = pytest.mark.skipif(bool(link_problem()), reason=f"no link here: {link_problem()}")
with_torchft = pytest.mark.skipif(bool(torchft_problem()), reason=torchft_problem() or "-")
ROUNDS = 20


def right_weights(steps: int) -> torch.Tensor:
    """Those of one process that nobody disturbs."""
    torch.manual_seed(0)
    weight = torch.randn(16, 1)
    for step in range(steps):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
        weight -= 0.1 / 24 * x.T @ (x @ weight - x.sum(1, keepdim=True))
    return weight.flatten()


def job(folder: Path, steps: int, *faults: Fault, **settings: Any) -> ElasticRun:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    return run_elastic(
        script,
        folder,
        steps,
        TIMEOUT_SECONDS,
        NAP_SECONDS,
        EVERY,
        faults=faults,
        timeout_seconds=150,
        **settings,
    )


def interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


@contextlib.contextmanager
def clean(folder: Path) -> Iterator[None]:
    """No process, namespace, interface or file is left: also none that someone else adopted."""
    run_killable(int, timeout_seconds=60)  # the server is meant to stay
    links, scratch = interfaces(), folder / "scratch"
    scratch.mkdir(exist_ok=True)
    # A folder of our own: other programs of this machine make temporary files as well.
    with mock.patch.object(tempfile, "tempdir", str(scratch)), nothing_left():
        yield
    words = str(folder)

    def gone() -> bool:
        everyone = psutil.process_iter(["cmdline"])
        return not [p for p in everyone if words in " ".join(p.info["cmdline"] or [])]

    assert wait_until(gone), "a process of the job is left"
    assert os.listdir(scratch) == [], "a temporary file is left"
    assert interfaces() == links, "an interface is left"


def check(run: ElasticRun, steps: int, *kinds: str) -> None:
    found = [recovery.fault.kind for recovery in run.recoveries]
    assert found == list(kinds), f"faults that happened: {found}"
    names = {"kill a rank": "rank 1 on", "kill a host": "host 1:", "cut the link": "the network"}
    for recovery in run.recoveries:
        assert recovery.named.startswith(names[recovery.fault.kind]), recovery.named
    for recovery in run.recoveries:
        assert recovery.saw, f"no rank saw anything of {recovery.fault}"
        assert recovery.back_seconds is not None, f"no step after {recovery.fault}"
        assert recovery.steps_lost <= EVERY, f"{recovery.steps_lost} steps done again: too many"
    weight = torch.tensor(run.result["weight"])
    assert torch.allclose(weight, right_weights(steps), atol=1e-5), "it trained something else"


def test_a_killed_rank_is_noticed_and_all_start_again(tmp_path: Path) -> None:
    with clean(tmp_path):
        run = job(tmp_path, 40, Fault("kill a rank", 15))
    check(run, 40, "kill a rank")
    (found,) = run.recoveries
    assert (found.ranks_before, found.ranks_after) == (2, 2)
    assert list(found.saw) == [0], "the other rank sees it, the dead one cannot"
    assert "onnection" in found.saw[0][1], found.saw
    assert [world for *_, world, _ in run.worlds()] == [2, 2]
    assert run.worlds()[1][3] == 10, "it goes on from the checkpoint"


@pytest.mark.slow
@with_links
def test_a_killed_host_and_a_cut_link_and_growing_again(tmp_path: Path) -> None:
    faults = Fault("kill a host", 15), Fault("cut the link", 35, seconds=7)
    with clean(tmp_path):
        run = job(tmp_path, 400, *faults)
    check(run, 400, "kill a host", "cut the link")
    host, link = run.recoveries
    assert (host.ranks_before, host.ranks_after) == (2, 2), "the host came back"
    assert sorted(link.saw) == [0, 1], "nobody died: both ranks wait for the timeout"
    assert all("Timed out" in text for _, text in link.saw.values()), link.saw
    assert [world for *_, world, _ in run.worlds()][-2:] == [1, 2], "shrunk, then grown"


@pytest.mark.slow
@with_links
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", ["kill a rank", "kill a host", "cut the link"])
def test_many_rounds_leave_nothing(kind: str, part: int, tmp_path: Path) -> None:
    """Twenty rounds of each, in four parts."""
    for _ in range(ROUNDS // 4):
        with clean(tmp_path):
            run = job(tmp_path, 24, Fault(kind, 12, seconds=300 if kind == "cut the link" else 0.5))
        check(run, 24, kind)


@pytest.mark.slow
def test_without_namespaces_two_agents_share_the_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_namespaces(monkeypatch)
    with clean(tmp_path):
        run = job(tmp_path, 60, Fault("kill a rank", 15), Fault("kill a host", 35))
    assert run.transport == "loopback" and "no hosts of namespaces: not today" in run.why
    check(run, 60, "kill a rank", "kill a host")


@pytest.mark.slow
def test_a_killed_agent_alone_leaves_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the lesson says of `kill -9` on an agent; here we end them in its place."""
    seen: list[bool] = []

    def kill_the_agent_alone(this: ElasticJob, host: int) -> None:
        agent = this.agents[host]
        if not seen and agent.pid:
            ranks = psutil.Process(agent.pid).children(recursive=True)
            os.kill(agent.pid, signal.SIGKILL)
            time.sleep(1)
            seen.append(bool(ranks) and all(rank.is_running() for rank in ranks))
        drop(this, host)

    drop = ElasticJob._drop
    monkeypatch.setattr(ElasticJob, "_drop", kill_the_agent_alone)
    with clean(tmp_path):
        run = job(tmp_path, 40, Fault("kill a host", 15, seconds=60))
    assert seen[0], "the ranks of a killed agent ended by themselves"
    assert len(run.worlds()) == 1, "somebody noticed"


@pytest.mark.slow
def test_a_rank_that_holds_too_much_is_killed(tmp_path: Path) -> None:
    with clean(tmp_path):
        run = job(tmp_path, 400, restarts=0, most_bytes=2**20)
    assert not run.is_done
    assert [m.what for m in run.moments if m.what == "over memory"], "nobody was over a megabyte"


@pytest.mark.slow
def test_time_that_is_over_says_where_the_job_stood(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\nprint('here')\ntime.sleep(600)\n")
    with clean(tmp_path), pytest.raises(TimeoutError, match="not done within 8 s.*agent started"):
        run_elastic(tmp_path / "script.py", timeout_seconds=8)


@pytest.mark.slow
@with_links
@pytest.mark.skipif(os.geteuid() != 0, reason="it is so already")
def test_a_call_in_a_user_namespace_gives_back_what_it_found(tmp_path: Path) -> None:
    with clean(tmp_path):
        found = call_as_root(link_in_there, timeout_seconds=60)
    assert found in ("joined", None), found  # None: no user namespaces for us here


@pytest.mark.slow
@with_links
def test_who_is_not_root_gets_hosts_in_a_user_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if call_as_root(link_in_there, timeout_seconds=60) is None:
        pytest.skip("no user namespaces here")
    refuse_namespaces(monkeypatch)  # here, and not in the process that is root of its own
    monkeypatch.setattr(elastic, "is_unprivileged", lambda: True)
    with clean(tmp_path):
        run = job(tmp_path, 40, Fault("cut the link", 15, seconds=300))
    assert run.transport == "network namespaces"
    check(run, 40, "cut the link")


def link_in_there() -> str:
    with linked_hosts(50e6):
        return "joined"


@pytest.mark.slow
@with_torchft
def test_torchft_goes_on_and_takes_the_lost_one_back(tmp_path: Path) -> None:
    with clean(tmp_path):
        moments = run_per_step(150, 30)
    run = ElasticRun(moments, "network namespaces", "", {})
    (found,) = run.recoveries
    assert found.back_seconds is not None and found.steps_lost <= 1, found
    alone = [m for m in moments if m.what == "start" and m.more["world"] == 1 and m.rank == 0]
    assert alone, "the survivor went on alone"
    weights = [torch.tensor(m.more["weight"]) for m in moments if m.what == "done"]
    assert len(weights) == 2 and torch.equal(*weights), "both end with the same weights"
