"""One job under elastic torchrun: its agents, its journal, and the faults that happen to it.

A script notes what it does in a journal, a file of JSON lines whose path is in COURSE_JOURNAL: `what`
("start" with `world` and `step`, "step" with `step`, "saw" with `text`, "done"), `at` (time.time()),
`host` (from COURSE_HOST), `rank` and, at "start", `pid`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from utils.parallel.loopback import LOCALHOST, loopback_variables
from utils.ranks.agent import run_agent
from utils.ranks.child import pack
from utils.ranks.gpus import hide_gpus_unless_enough
from utils.ranks.killable import KillableProcess, kill_all
from utils.ranks.namespaces import ADDRESSES, INTERFACE, set_link
from utils.ranks.recovery import Fault, Moment, read_journal
from utils.ranks.server import start_server

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400  # torchrun's own default; inside a namespace nobody else has it
LOOK_SECONDS = 0.05
AWAY_SECONDS = 1.0  # until the supervisor starts an agent again
EXIT_SECONDS = 1.0  # for agents to end once all ranks are done: one that has died never comes


@dataclass(frozen=True)
class Patience:
    """How long an agent waits for others.

    Attributes:
        keep_alive_seconds: Between two signs of life of an agent; after three missed ones it counts
            as dead. torchrun's own is 5.
        last_call_seconds: For more hosts to join once there are enough.
        read_seconds: For an answer of the store where agents meet. torchrun's own is 60.
    """

    keep_alive_seconds: int = 1
    last_call_seconds: int = 1
    read_seconds: int = 6


@dataclass(frozen=True)
class JobOrder:
    """A call of `run_elastic`, as it may travel to a process that is root."""

    script: Path
    args: tuple[str, ...]
    hosts: int
    ranks_per_host: int
    least_hosts: int
    faults: tuple[Fault, ...]
    restarts: int
    most_bytes: int | None
    patience: Patience
    timeout_seconds: float


@dataclass
class ElasticJob:
    call: JobOrder
    folder: Path
    places: Sequence[str | None]  # for each host its namespace
    faults: list[Fault]  # that are still to happen
    agents: dict[int, KillableProcess] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    output: dict[int, str] = field(default_factory=dict)

    def run(self) -> None:
        """Until all ranks are done, or without restarts until all agents have ended.

        Raises:
            TimeoutError: before that time was over.
            JournalError: the script noted what is no line of a journal.
        """
        self.journal = self.folder / "journal.jsonl"
        self.journal.touch()
        start_server()  # seconds on the first launch, which are none of the job's
        self.start, self.read, self.due = time.time(), 0, []
        self.pids: dict[int, int] = {}
        limit = time.monotonic() + self.call.timeout_seconds
        for host in range(len(self.places)):
            self._start_agent(host)
        while not self._is_done() and (self.call.restarts or self.agents):
            if time.monotonic() > limit:
                raise TimeoutError(self._stands())
            self._look()
        limit = min(limit, time.monotonic() + EXIT_SECONDS)
        while self.agents and time.monotonic() < limit:
            self._look(restart=False)

    def end(self) -> None:
        """Kill what still runs."""
        for host in list(self.agents):
            self._drop(host)
        kill_all([])

    def _is_done(self) -> bool:
        """Whether all ranks of the last world noted that they are."""
        done = {moment.rank for moment in self.moments if moment.what == "done"}
        worlds = [m.more["world"] for m in self.moments if m.what == "start"]
        return bool(worlds) and done >= set(range(worlds[-1]))

    def _look(self, restart: bool = True) -> None:
        wait([w for agent in self.agents.values() for w in agent.waitables], timeout=LOOK_SECONDS)
        for host, agent in list(self.agents.items()):
            outcome = agent.poll()
            if outcome:
                why = outcome.failure.what if outcome.failure else str(outcome.value or "")
                self._note("agent ended", host, why=why)
                self._drop(host)
                if restart and self.call.restarts and (outcome.failure or outcome.value):
                    self._later(AWAY_SECONDS, "start", host)
        self._read()
        self._do_what_is_due()
        self._plant()
        self._hold_to_memory()

    def _hold_to_memory(self) -> None:
        for rank, pid in list(self.pids.items()) if self.call.most_bytes else []:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.memory_info().rss > (self.call.most_bytes or 0):
                    process.kill()
                    self._note("over memory", None, target=rank)
                    del self.pids[rank]

    def _read(self) -> None:
        rows, self.read = read_journal(self.journal, self.read)
        for row in rows:
            moment = Moment(row.seconds - self.start, row.what, row.host, row.rank, row.more)
            self.moments.append(moment)
            if moment.what == "start" and moment.rank is not None:
                self.pids[moment.rank] = moment.more["pid"]

    def _plant(self) -> None:
        if not self.faults:
            return
        fault = self.faults[0]
        news = [m for m in self.moments if m.what in ("fault", "step", "start")]
        if not news or news[-1].what != "step" or news[-1].more["step"] < fault.at_step:
            return
        self.faults.pop(0)
        self._note("fault", **asdict(fault))
        if fault.kind == "kill a rank":
            self._kill(fault.target)
        elif fault.kind == "kill a host":
            self._drop(fault.target)
            if self.call.restarts:
                self._later(fault.seconds, "start", fault.target)
        else:
            self._set_link(up=False)
            self._later(fault.seconds, "link is back", 1)

    def _kill(self, rank: int) -> None:
        world = [m.more["world"] for m in self.moments if m.what == "start"][-1]
        if rank >= world:
            raise RuntimeError(f"Rank {rank} cannot be killed: {world} ranks are left in the job.")
        if rank not in self.pids:
            raise RuntimeError(f"Rank {rank} cannot be killed: it has noted no start with its pid.")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGKILL)

    def _later(self, seconds: float, what: str, host: int) -> None:
        self.due.append((time.monotonic() + seconds, what, host))

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        ready, self.due = [d for d in self.due if d[0] <= now], [d for d in self.due if d[0] > now]
        for _, what, host in ready:
            if what == "start":
                self._start_agent(host)
            else:
                self._set_link(up=True)
                self._note(what, host)

    def _set_link(self, *, up: bool) -> None:
        place = self.places[1]
        assert place is not None  # `run_elastic` refuses a cut without namespaces
        set_link(place, up=up)

    def _note(self, what: str, host: int | None = None, **more: object) -> None:
        self.moments.append(Moment(time.time() - self.start, what, host, None, more))

    def _start_agent(self, host: int) -> None:
        place = self.places[host]
        call = pack(run_agent, (self._arguments(host), self._environment(host), os.getcwd(), place))
        agent = KillableProcess(call, timeout_seconds=10_000.0)
        self.agents[host] = agent
        self._note("agent started", host)
        agent.start()

    def _drop(self, host: int) -> None:
        """Kill an agent with all that it started; keep what they wrote."""
        agent = self.agents.pop(host)
        agent.kill()
        self.output[host] = self.output.get(host, "") + agent.output.decode(errors="replace")

    def _arguments(self, host: int) -> list[str]:
        place, patience = self.places[host], self.call.patience
        address = ADDRESSES[host].partition("/")[0] if place else LOCALHOST
        meet = f"{ADDRESSES[0].partition('/')[0]}:{PORT}" if place else f"{self.folder}/rendezvous"
        settings = {
            "store_type": "tcp" if place else "file",
            "is_host": str(host == 0).lower(),
            "keep_alive_interval": patience.keep_alive_seconds,
            "keep_alive_max_attempt": 3,
            "last_call_timeout": patience.last_call_seconds,
            "join_timeout": 600,
            "read_timeout": patience.read_seconds,
        }
        return [
            f"--nnodes={self.call.least_hosts}:{len(self.places)}",
            f"--nproc-per-node={self.call.ranks_per_host}",
            f"--max-restarts={self.call.restarts}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={meet}",
            "--rdzv-id=1",
            f"--rdzv-conf={','.join(f'{name}={value}' for name, value in settings.items())}",
            f"--local-addr={address}",
            "--monitor-interval=0.1",
            "--tee=3",
            f"--log-dir={self.folder}",
            str(self.call.script),
            *self.call.args,
        ]

    def _environment(self, host: int) -> dict[str, str]:
        inside = {f"{library}_SOCKET_IFNAME": INTERFACE for library in ("GLOO", "NCCL")}
        ours = {
            "COURSE_HOST": str(host),
            "COURSE_JOURNAL": str(self.journal),
            "COURSE_LAUNCHED": str(self.start),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
        }
        modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        ours["PYTHONPATH"] = modules  # scripts may use the course's own
        found = os.environ | ours | (inside if self.places[host] else loopback_variables())
        hide_gpus_unless_enough(self.call.hosts * self.call.ranks_per_host, found)
        return found

    def _stands(self) -> str:
        last = [m for m in self.moments if m.what != "step"][-4:]
        rows = "; ".join(f"{m.seconds:.1f} s {m.what} {m.more or ''}".strip() for m in last)
        steps = max((m.more["step"] for m in self.moments if m.what == "step"), default=None)
        said = "\n".join(self.output.values()) + "".join(
            agent.output.decode(errors="replace") for agent in self.agents.values()
        )
        return (
            f"The job was not done within {self.call.timeout_seconds:g} s; the last step was {steps}, and last "
            f"came: {rows}. Give it more time, or read what the agents wrote:\n{said[-2000:]}"
        )
