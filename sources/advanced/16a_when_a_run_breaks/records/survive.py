"""What jobs of lesson 16a meet and how they come back: stored for machines that cannot run it.

Rows hold the moments of a run, as `utils.ranks.recovery.Moment` has them; `run_in` reads them again.
"""

from __future__ import annotations

import time

import torch

from evidence.record.experiment import Experiment, Stage, Trial
from evidence.record.store import Record, Row
from utils.files import scratch
from utils.ranks.elastic import run_elastic
from utils.ranks.recovery import ElasticRun, Fault, Moment

from .per_step import run_per_step
from .survive_script import SCRIPT

EVERY, NAP_SECONDS, TIMEOUT_SECONDS = 20, 0.05, 4.0
STORY = (
    Fault("kill a rank", 30),
    Fault("kill a host", 70),
    Fault("cut the link", 110, seconds=12.0),
)
# Long enough for host 0 to go on alone; and back while host 1's agent still asks to join: one that gives up
# while the link comes back can close the rendezvous behind itself (RendezvousClosedError).
STORY_STEPS = 700
STEPS, KILLED_AT, AWAY_SECONDS = 420, 70, 10.0  # of the two ways: away long enough to go on without


def trials(device: torch.device) -> list[Trial]:
    """Runs on CPUs: a job with three faults; the same death under torchft and under torchrun; an alert."""
    if device.type != "cpu":
        return []
    return [
        Trial({"quantity": "three faults"}, _story),
        Trial({"quantity": "a restart from the checkpoint"}, _restart),
        Trial({"quantity": "tolerance for each step"}, _per_step),
        Trial({"quantity": "an alert"}, _alert),
    ]


def elastic(faults: tuple[Fault, ...], steps: int) -> ElasticRun:
    """The script of the lesson on two hosts with these faults."""
    with scratch("survive") as folder:
        script = folder / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        return run_elastic(
            script,
            folder,
            steps,
            TIMEOUT_SECONDS,
            NAP_SECONDS,
            EVERY,
            faults=faults,
            timeout_seconds=240,
        )


def _row(moments: list[Moment], transport: str) -> Row:
    rows = [
        [round(m.seconds, 3), m.what, m.host, m.rank, m.more]
        for m in moments
        if m.what != "step" or m.rank == 0
    ]
    return {"transport": transport, "moments": rows}


def _story(stage: Stage) -> Row:
    run = elastic(STORY, STORY_STEPS)
    return _row(list(run.moments), run.transport)


def _restart(stage: Stage) -> Row:
    run = elastic((Fault("kill a host", KILLED_AT, seconds=AWAY_SECONDS),), STEPS)
    return _row(list(run.moments), run.transport)


def _per_step(stage: Stage) -> Row:
    stage.name = "torchft"
    moments = run_per_step(STEPS, KILLED_AT, AWAY_SECONDS, NAP_SECONDS)
    return _row(moments, "network namespaces")


def _alert(stage: Stage) -> Row:
    from ..watching import Exporter, StandInGpu, report, watch

    with scratch("metrics") as folder, Exporter(folder) as exporter:
        gpus = [StandInGpu() for _ in range(4)]
        for rank, gpu in enumerate(gpus):
            report(folder, rank, gpu.after(0.9, 2**30))
        start = time.monotonic()
        with watch([exporter.address]) as prometheus:
            up = time.monotonic() - start
            gpus[2].xid = 79
            report(folder, 2, gpus[2].after(0.0, 2**30))
            alert, seconds = prometheus.wait_for("GpuIsLost")
    return {"up_seconds": up, "firing_seconds": seconds, "alert": alert.name, "says": alert.summary}


def run_in(record: Record, quantity: str) -> ElasticRun:
    """A run of a record.

    Raises:
        ValueError: it holds none of this name.
    """
    rows = [row for row in record.rows if row["quantity"] == quantity and "moments" in row]
    if not rows:
        names = ", ".join(row["quantity"] for row in record.rows if "moments" in row)
        raise ValueError(f"The record holds no run {quantity!r}; it holds {names}.")
    moments = [Moment(*values) for values in rows[0]["moments"]]
    return ElasticRun(moments, rows[0]["transport"], "", {})


EXPERIMENT = Experiment(
    name="survive",
    summary="jobs under torchrun and torchft that are killed, cut off and come back; an alert",
    configuration={
        "model": "16 weights, least squares; two replicas",
        "steps": f"{STORY_STEPS} with three faults, {STEPS} with one, of about {NAP_SECONDS} s",
        "checkpoint": f"every {EVERY} steps",
        "timeout": f"{TIMEOUT_SECONDS} s for a collective; agents: a sign of life each second, three missed",
    },
    trials=trials,
)
