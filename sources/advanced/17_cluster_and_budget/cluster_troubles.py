"""Lesson 17's job under a Slurm that kills one of its nodes, and then warns it that its time is over."""

from __future__ import annotations

from pathlib import Path

import torch

from evidence.record.experiment import Experiment, Stage, Trial
from evidence.record.store import Row
from utils.files import scratch

from .cluster_runs import (
    SECONDS,
    STEPS,
    account,
    next_save,
    past_save,
    restarted,
    tiny_job,
    uneven_ends,
)
from .clusters import one_host_slurm, slurm_problem

EVERY = 5


def trials(device: torch.device) -> list[Trial]:
    """One row, where a Slurm can be started; on the CPU alone."""
    if device.type != "cpu" or slurm_problem():
        return []
    return [Trial({"quantity": "slurm"}, _in_folder)]


def _in_folder(stage: Stage) -> Row:
    with scratch("job") as folder:
        tiny_job().write(folder)
        stage.name = "under Slurm"
        return _under_slurm(folder)


def _under_slurm(folder: Path) -> Row:
    with one_host_slurm(nodes=3, lost_after_seconds=2) as slurm:
        words = ("--steps", str(STEPS), "--every", str(EVERY))
        training = slurm.submit(folder / "job.slurm", *words)
        trains = [next_save(slurm, training, folder)]
        killed = past_save(slurm, training, folder)
        slurm.kill_node("n2")
        trains.append(next_save(slurm, training, folder))
        slurm.run("scancel", "--signal=USR1", str(training))
        signalled = slurm.seconds
        restarted(slurm, training, times=2)
        trains.append(next_save(slurm, training, folder))
        slurm.wait(training, timeout_seconds=SECONDS)
        seen = account(slurm, training, folder, killed=killed, signalled=signalled, trains=trains)
        return {**seen, "uneven_ends": uneven_ends(slurm, folder)}


EXPERIMENT = Experiment(
    name="cluster_troubles",
    summary="one training script under a Slurm that loses a node, and then sends SIGUSR1",
    configuration={
        "model": "a Llama-style model of 2 layers, 32 wide, random weights",
        "layout": "ZeRO-3 over 2 ranks on 2 nodes",
        "steps": f"{STEPS}, saved every {EVERY}; a node is killed two steps after a save",
        "signal": "once the second start has saved",
        "slurm": "3 nodes as namespaces of one machine; SlurmdTimeout 2 s, cred_expire 5 s",
    },
    trials=trials,
)
