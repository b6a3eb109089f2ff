"""A real Slurm on one machine: controller, nodes and authentication, each node a host of its own.

Nodes are namespaces with their own network, host name and processes, joined by a bridge; nothing of
it can be reached from outside. The first process ends when its input does, so that all end with the
process that started them, also when that is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from utils.files import scratch

from .configuration import node_address, write_configuration
from .jobs import ENDED, JobSpan, SlurmJob, read_jobs

HOSTS = Path(__file__).with_name("hosts.sh")
NAMESPACES = ("--net", "--mount", "--uts", "--pid")
UP_SECONDS = 20.0  # far more than it takes
LOOK_SECONDS = 0.2
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "pgrep": "procps",
}


class SlurmError(RuntimeError):
    """Slurm cannot be started, or refused what was asked; the text says which and what to do."""


@functools.cache
def slurm_problem() -> str:
    """Why no Slurm can be started here, in a sentence; "" where it can."""
    if sys.platform != "linux":
        return "A Slurm of one's own needs Linux: here you see the recorded run."
    missing = sorted({package for tool, package in PACKAGES.items() if shutil.which(tool) is None})
    if missing:
        return (
            f"Slurm is not installed here (apt-get install {' '.join(missing)}): here you see the "
            "recorded run."
        )
    if os.geteuid() != 0:
        return "Slurm's nodes need root, and you are not: here you see the recorded run."
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True)
    if tried.returncode:
        return "This system does not let root make namespaces: here you see the recorded run."
    return ""


class Slurm:
    """A running Slurm with nodes n1, n2, ...; `stop` ends it, and so does the end of this process.

    Attributes:
        folder: its configuration and logs.
        up_seconds: from the start until every node was idle.
        history: what `wait` saw of jobs: each state, with the nodes and the seconds since the start.
    """

    def __init__(self, nodes: int = 3, lost_after_seconds: int = 10) -> None:
        """Start it and wait until all nodes are idle.

        Args:
            nodes: 1 to 9.
            lost_after_seconds: without an answer a node is lost (SlurmdTimeout); its jobs are requeued.

        Raises:
            SlurmError: it cannot be started here, or did not come up.
            ValueError: not 1 to 9 nodes.
        """
        if problem := slurm_problem():
            raise SlurmError(problem)
        if not 1 <= nodes <= 9:
            raise ValueError(f"{nodes} nodes cannot be made here; take 1 to 9.")
        self._kept = contextlib.ExitStack()
        self.folder = self._kept.enter_context(scratch("slurm"))
        self.history: list[JobSpan] = []
        self._start = time.monotonic()
        write_configuration(self.folder, nodes, lost_after_seconds)
        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh"]
        self._process = subprocess.Popen(
            [*command, str(HOSTS), "head", str(self.folder), str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.stop)
        try:
            self._wait_until_up(nodes)
        except BaseException:
            self.stop()
            raise
        self.up_seconds = self.seconds

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def stop(self) -> None:
        """End all daemons and jobs, and remove the folder. A second call does nothing."""
        atexit.unregister(self.stop)
        process = self._process
        if process.stdin:
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()  # its child goes with it, and with that all others
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
        self._kept.close()

    def run(
        self,
        *command: str,
        timeout_seconds: float = 30.0,
        folder: Path | str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """What a command prints on the head node, such as run("sinfo", "--Node").

        Raises:
            SlurmError: it failed, with its own words; or Slurm is not running.
        """
        if self._process.poll() is not None:
            raise SlurmError("This Slurm has been stopped: start another one with Slurm().")
        # Another mount namespace begins in its root folder.
        place = ["env", f"--chdir={Path(folder or Path.cwd()).resolve()}"]
        inside = ["nsenter", "-t", str(self._inside), *NAMESPACES, "--", *place, *command]
        home = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": home, **(variables or {})}
        try:
            done = subprocess.run(
                inside,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                env=os.environ | own,
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmError(
                f"{command[0]} gave no answer in {timeout_seconds:g} s; is slurmctld alive? Its "
                f"log is {self.folder}/log/slurmctld."
            ) from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
            raise SlurmError(f"{command[0]} refused: {said}")
        return done.stdout

    def submit(
        self,
        script: Path | str,
        *arguments: str,
        options: Sequence[str] = (),
        folder: Path | str | None = None,
    ) -> int:
        """Hand a script to sbatch; the job's number. Its folder is where it is submitted from."""
        path = Path(script).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"There is no script {path}: check its name and folder.")
        words = ["sbatch", "--parsable", *options, str(path), *arguments]
        return int(self.run(*words, folder=folder or path.parent).split(";")[0])

    def jobs(self) -> list[SlurmJob]:
        """All jobs that were submitted, also those that have ended; each task of an array apart."""
        return read_jobs(self.run("scontrol", "--oneliner", "show", "jobs"))

    def job(self, number: int) -> list[SlurmJob]:
        """The tasks of one job: one, or as many as its array has."""
        return [job for job in self.jobs() if number in (job.number, job.array)]

    def wait(self, *numbers: int, timeout_seconds: float = 60.0, until: str = "") -> list[SlurmJob]:
        """Wait until all these jobs have ended (or are in state `until`), and keep their history.

        Raises:
            SlurmError: time was over; the text says what each job waits for.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            mine = self.look(*numbers)
            states = {job.state for job in mine}
            if states <= ({until} if until else ENDED) and mine:
                return mine
            if time.monotonic() > deadline:
                each = "; ".join(f"{job.label} is {job.state} ({job.reason})" for job in mine)
                raise SlurmError(f"After {timeout_seconds:g} s {each}.")
            time.sleep(LOOK_SECONDS)

    def watch(
        self,
        number: int,
        until: Callable[[], bool],
        timeout_seconds: float = 120.0,
    ) -> float:
        """Watch a job until something has happened, and keep its history; the seconds at which it had.

        Args:
            number: the job's.
            until: says whether it has happened.
            timeout_seconds: the longest that it may take.

        Raises:
            SlurmError: the job ended, or time was over, and it had not.
        """
        deadline = time.monotonic() + timeout_seconds
        while not until():
            states = {job.state for job in self.look(number)}
            if states <= ENDED or time.monotonic() > deadline:
                raise SlurmError(
                    f"Job {number} is {', '.join(states)}, and what was waited for has not come."
                )
            time.sleep(LOOK_SECONDS / 2)
        return self.seconds

    def look(self, *numbers: int) -> list[SlurmJob]:
        """These jobs as they are now, which go into `history`."""
        mine = [job for job in self.jobs() if {job.number, job.array} & set(numbers)]
        for job in mine:
            last = next((span for span in reversed(self.history) if span.label == job.label), None)
            if last and (last.state, last.nodes, last.restarts) == (
                job.state,
                job.nodes,
                job.restarts,
            ):
                last.end_seconds = self.seconds
            else:
                self.history.append(
                    JobSpan(
                        job.label,
                        job.name,
                        job.state,
                        job.nodes,
                        job.restarts,
                        self.seconds,
                        self.seconds,
                    )
                )
        return mine

    def nodes(self) -> dict[str, str]:
        """The state of each node, as sinfo says it."""
        lines = self.run("sinfo", "--noheader", "--Node", "--Format=NodeList:20,StateCompact:20")
        return dict(line.split() for line in lines.splitlines())

    def kill_node(self, name: str) -> None:
        """End all processes of a node at once, its slurmd too, as a power failure does.

        Calls to it then fail at once. Else slurmctld would try each for `MessageTimeout`, and it
        counts a node as lost only after two rounds of such calls.
        """
        inside = (self._of_node(name)).read_text().strip()
        self.run("kill", "-9", inside)
        self.run("ip", "route", "replace", "unreachable", node_address(name))

    def start_node(self, name: str) -> None:
        """Start a node that was killed."""
        self._of_node(name)
        if node_address(name) in self.run("ip", "route"):
            self.run("ip", "route", "del", "unreachable", node_address(name))
        self.run("sh", str(HOSTS), "link", str(self.folder), name[1:])

    def accounting(self, *numbers: int) -> str:
        """What sacct says of these jobs, each start of a job in a line of its own.

        Without a database (slurmdbd) it reads what Slurm wrote of ended jobs (`sacct --completion`).
        """
        wanted = ["--jobs", ",".join(map(str, numbers))] if numbers else []
        form = "--format=JobID,JobName,NNodes,NodeList,State,End"
        return self.run("sacct", "--completion", "--starttime=1970-01-01", form, *wanted)

    def decisions(self, number: int) -> str:
        """When and why a job was put back into the queue, in the words of the controller's log."""
        told = re.compile(rf"requeu\w+ (?:job )?JobId={number}\b|not responding", re.IGNORECASE)
        log = (self.folder / "log" / "slurmctld").read_text(encoding="utf-8", errors="replace")
        found = [line.strip("[").partition("]") for line in log.splitlines() if told.search(line)]
        return "\n".join(f"{when.partition('T')[2]} {said.strip()}" for when, _, said in found)

    def _of_node(self, name: str) -> Path:
        path = self.folder / f"{name}.inside"
        if not re.fullmatch(r"n\d", name) or not path.is_file():
            known = ", ".join(sorted(found.stem for found in self.folder.glob("n*.inside")))
            raise ValueError(f"There is no node {name!r}; there are {known}.")
        return path

    def _wait_until_up(self, nodes: int) -> None:
        deadline = time.monotonic() + UP_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(SlurmError, IndexError):
                self._inside = psutil.Process(self._process.pid).children()[0].pid
                if list(self.nodes().values()).count("idle") == nodes:
                    return
            time.sleep(0.05)
        self._process.kill()
        said = self._process.stderr.read().strip() if self._process.stderr else ""
        logs = [*self._last_words("slurmctld"), *self._last_words("munged")]
        raise SlurmError(
            f"Slurm did not come up in {UP_SECONDS:g} s. {said} {' '.join(logs)}".strip()
        )

    def _last_words(self, name: str) -> list[str]:
        path = self.folder / "log" / name
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        return [line for line in lines if "error" in line.lower() or "fatal" in line.lower()][-3:]


@contextlib.contextmanager
def one_host_slurm(nodes: int = 3, lost_after_seconds: int = 10) -> Iterator[Slurm]:
    """A Slurm for a `with` block.

    Raises:
        SlurmError: it cannot be started here; the text says why.
    """
    slurm = Slurm(nodes, lost_after_seconds)
    try:
        yield slurm
    finally:
        slurm.stop()
