"""Jobs as `scontrol --oneliner show jobs` prints them."""

from __future__ import annotations

import re
from dataclasses import dataclass

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
_PAIR = re.compile(r"(?:^|\s)(\w+)=(.*?)(?=\s\w+(?::\w+)*=|$)")
_STEP = re.compile(r"step (\d+) loss ([0-9.]+)")


@dataclass(frozen=True)
class SlurmJob:
    """One job, or one task of an array.

    Attributes:
        number: Slurm's.
        array: the array's number, which its first task has as well; None for other jobs.
        label: as people write it: "7", or "7_2" for task 2.
        name: what it is called.
        state: such as "PENDING", "RUNNING", "COMPLETED".
        reason: why it waits or failed.
        restarts: how often it was requeued.
        nodes: such as "n[1-2]"; "" while it waits.
        exit_code: of its script.
    """

    number: int
    array: int | None
    label: str
    name: str
    state: str
    reason: str
    restarts: int
    nodes: str
    exit_code: int


@dataclass
class JobSpan:
    """A job in one state on the same nodes, in seconds since Slurm's start."""

    label: str
    name: str
    state: str
    nodes: str
    restarts: int
    start_seconds: float
    end_seconds: float

    @property
    def node_names(self) -> list[str]:
        """The nodes, one by one."""
        return node_names(self.nodes)


def losses_of(text: str) -> dict[int, float]:
    """The loss of each step that a training script printed; of a step done twice, the last."""
    return {int(step): float(loss) for step, loss in _STEP.findall(text)}


def read_jobs(text: str) -> list[SlurmJob]:
    """The jobs of scontrol's text, in order of their numbers; a text without jobs gives none."""
    rows = [dict(_PAIR.findall(line)) for line in text.splitlines() if line.startswith("JobId=")]
    return sorted((_job(row) for row in rows), key=lambda job: job.number)


def node_names(nodes: str) -> list[str]:
    """`n[1-2,4]` as n1, n2, n4."""
    found = re.fullmatch(r"([a-z]+)\[([\d,-]+)\]", nodes)
    if not found:
        return [name for name in nodes.split(",") if name]
    names = []
    for piece in found[2].split(","):
        first, _, last = piece.partition("-")
        names += [f"{found[1]}{i}" for i in range(int(first), int(last or first) + 1)]
    return names


def _job(row: dict[str, str]) -> SlurmJob:
    array, task = row.get("ArrayJobId"), row.get("ArrayTaskId")
    label = f"{array}_{task}" if array else row["JobId"]
    nodes = row.get("NodeList", "")
    return SlurmJob(
        int(row["JobId"]),
        int(array) if array else None,
        label,
        row.get("JobName", ""),
        row["JobState"],
        row.get("Reason", ""),
        int(row.get("Restarts", 0)),
        "" if nodes == "(null)" else nodes,
        int(row.get("ExitCode", "0:0").split(":")[0]),
    )
