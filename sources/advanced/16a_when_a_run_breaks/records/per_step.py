"""Two replicas under torchft: one is killed and comes back while the other one goes on. Needs torchft.

Its servers listen on every address, so all of it lives in a network namespace, which nobody reaches.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from utils.files import scratch
from utils.parallel.loopback import LOCALHOST, local_store
from utils.ranks.agent import as_a_fresh_process
from utils.ranks.child import pack
from utils.ranks.killable import KillableProcess, kill_all
from utils.ranks.namespaces import NamespaceError, enter, linked_hosts
from utils.ranks.recovery import Moment, read_journal

LOOK_SECONDS = 0.05
REPLICAS = 2


def torchft_problem() -> str:
    """Why torchft cannot run here, as a sentence; "" if it can."""
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed: `pip install torchft` (16 MB) brings it."
    try:
        with linked_hosts(125e6):
            return ""
    except NamespaceError as error:
        return (
            f"torchft's servers listen on every address, and no namespace can hold them: {error}."
        )


def run_per_step(
    steps: int,
    kill_at_step: int,
    away_seconds: float = 1.0,
    nap_seconds: float = 0.05,
    timeout_seconds: float = 120.0,
) -> list[Moment]:
    """Train two replicas for some steps; replica 1 is killed after one of them, and started again.

    Returns:
        What the replicas noted, and the fault; `rank` is the replica. The last notes, "done", hold
        the weights.

    Raises:
        RuntimeError: torchft cannot run here.
        TimeoutError: time was over before both were done.
    """
    if problem := torchft_problem():
        raise RuntimeError(problem)
    with scratch("torchft") as folder, linked_hosts(125e6) as hosts:
        job = _TorchftRun(folder, hosts[0], steps, nap_seconds)
        try:
            job.run(kill_at_step, away_seconds, timeout_seconds)
        finally:
            kill_all(job.processes.values())
        return sorted(job.moments, key=lambda moment: moment.seconds)


class _TorchftRun:
    def __init__(self, folder: Path, place: str, steps: int, nap: float) -> None:
        self.folder, self.place, self.steps, self.nap = folder, place, steps, nap
        self.journal = folder / "journal.jsonl"
        self.journal.touch()
        self.start, self.read = time.time(), 0
        self.moments: list[Moment] = []
        self.processes: dict[str, KillableProcess] = {}

    def run(self, kill_at_step: int, away_seconds: float, timeout_seconds: float) -> None:
        limit = time.monotonic() + timeout_seconds
        self._launch("lighthouse", _lighthouse)
        for replica in range(REPLICAS):
            self._launch(f"replica_{replica}", _replica, replica, self.steps, self.nap)
        back: float | None = None
        while len({m.rank for m in self.moments if m.what == "done"}) < REPLICAS:
            if time.monotonic() > limit:
                said = "".join(p.output.decode(errors="replace") for p in self.processes.values())
                raise TimeoutError(f"Not done within {timeout_seconds:g} s:\n{said[-2000:]}")
            self._look()
            if kill_at_step >= 0 and self._steps_of(1) > kill_at_step:
                kill_at_step, back = -1, time.monotonic() + away_seconds
                more = {
                    "kind": "kill a host",
                    "at_step": self._steps_of(1) - 1,
                    "target": 1,
                    "seconds": away_seconds,
                }
                self.moments.append(Moment(time.time() - self.start, "fault", None, None, more))
                self.processes.pop("replica_1").kill()
            if back is not None and time.monotonic() > back:
                back = None
                self._launch("replica_1", _replica, 1, self.steps, self.nap)

    def _launch(self, name: str, function: Any, *args: Any) -> None:
        call = pack(_inside, (self.place, str(self.folder), function, args))
        self.processes[name] = KillableProcess(call, timeout_seconds=10_000.0)
        self.processes[name].start()

    def _look(self) -> None:
        time.sleep(LOOK_SECONDS)
        for process in self.processes.values():
            process.poll()
        rows, self.read = read_journal(self.journal, self.read)
        self.moments += [
            Moment(r.seconds - self.start, r.what, r.host, r.rank, r.more) for r in rows
        ]

    def _steps_of(self, replica: int) -> int:
        steps = [m.more["step"] for m in self.moments if m.what == "step" and m.rank == replica]
        return max(steps, default=-1) + 1


def _inside(place: str, folder: str, function: Any, args: tuple[Any, ...]) -> None:
    enter(place)
    as_a_fresh_process()
    os.chdir(folder)
    function(*args)


def _lighthouse() -> None:
    lighthouse = importlib.import_module("torchft.coordination").LighthouseServer(
        bind=f"{LOCALHOST}:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=1500
    )
    port = lighthouse.address().rpartition(":")[2].rstrip("/")
    Path("lighthouse.new").write_text(f"http://{LOCALHOST}:{port}")
    Path("lighthouse.new").replace("lighthouse")
    signal.pause()


def _replica(replica: int, steps: int, nap: float) -> None:
    import torch

    torchft = importlib.import_module("torchft")
    while not Path("lighthouse").exists():
        time.sleep(LOOK_SECONDS)
    store = local_store()  # torchrun brings one otherwise; without it the manager waits for ever
    os.environ |= {
        "TORCHFT_LIGHTHOUSE": Path("lighthouse").read_text(),
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(store.port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    from datetime import timedelta

    torch.manual_seed(replica)
    model = torch.nn.Linear(16, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        replica_id=f"replica_{replica}",
        hostname=LOCALHOST,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=20),
        checkpoint_transport=_local_transport(),
    )
    replicas = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, sgd)
    world = None
    while manager.current_step() < steps:
        step = manager.current_step()
        optimizer.zero_grad()
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(2 * step + replica))
        (replicas(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        time.sleep(nap)
        if manager.num_participants() != world:
            world = manager.num_participants()
            _note(replica, "start", world=world, step=manager.current_step(), pid=os.getpid())
        _note(replica, "step", step=manager.current_step() - 1)
    _note(replica, "done", weight=model.weight.flatten().tolist())
    time.sleep(2)  # the other one may still ask this one for its state
    with contextlib.suppress(RuntimeError):
        manager.shutdown(wait=False)


def _local_transport() -> Any:
    """torchft's own transport of a state to a replica that comes back, by an address that exists here."""
    from datetime import timedelta

    transport = importlib.import_module("torchft.checkpointing").HTTPTransport

    class Local(transport):
        def metadata(self) -> str:
            port = urlsplit(super().metadata()).port
            return f"http://{LOCALHOST}:{port}/checkpoint/"

    return Local(timeout=timedelta(seconds=10), num_chunks=0)


def _note(replica: int, what: str, **more: Any) -> None:
    row = {"at": time.time(), "what": what, "host": replica, "rank": replica, **more}
    with open("journal.jsonl", "a", encoding="utf-8") as journal:
        journal.write(json.dumps(row) + "\n")
