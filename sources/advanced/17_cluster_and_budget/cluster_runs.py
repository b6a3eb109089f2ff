"""Lesson 17's job under a Slurm that loses a node, and under a Ray that loses a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from evidence.record.experiment import Experiment, Stage, Trial
from evidence.record.store import Row
from utils.catalog import ModelShape
from utils.files import scratch
from utils.parallel import saved_steps
from utils.planner import Batch, Cluster, Export, Plan, export

from .clusters import (
    losses_of,
    one_host_slurm,
    ray_problem,
    run_ray,
    slurm_problem,
)

STEPS, EVERY, KILLED_AFTER = 30, 2, 4
ARGUMENTS = ("--steps", str(STEPS), "--every", str(EVERY))
SECONDS = 180.0
SHAPE = ModelShape(name="tiny", family="llama", layers=2, hidden=32, heads=4, kv_heads=2,
                   feedforward=96, vocabulary=64, max_sequence=16)  # fmt: skip
CHECKSUMS = """\
#!/bin/bash
#SBATCH --job-name=checksums
#SBATCH --array=0-3
#SBATCH --output=checksum-%a.txt
sha256sum shard-$SLURM_ARRAY_TASK_ID.bin
sleep 1  # a shard is larger than these
"""


def tiny_job(ranks_per_node: int = 1) -> Export:
    """The job of lesson 17: ZeRO-3 over two nodes, there of one rank each."""
    cluster = Cluster(gpu="A100-80GB", nodes=2, gpus_per_node=ranks_per_node)
    plan = Plan(dp=2 * ranks_per_node, zero_stage=3, micro_batch=2, framework="fp32")
    return export(SHAPE, cluster, plan, Batch(sequences=16, sequence_length=16))


def write_shards(folder: Path) -> None:
    """Four files of data, and the array that takes their checksums."""
    for number in range(4):
        (folder / f"shard-{number}.bin").write_bytes(bytes([number]) * 2**20)
    (folder / "checksums.slurm").write_text(CHECKSUMS, encoding="utf-8")


def trials(device: torch.device) -> list[Trial]:
    """A row for Slurm and one for Ray, each where it runs; on the CPU alone."""
    if device.type != "cpu":
        return []
    found: list[tuple[str, str, Callable[[Stage], Row]]] = [
        ("slurm", slurm_problem(), partial(_in_folder, _under_slurm)),
        ("ray", ray_problem(), partial(_in_folder, _under_ray)),
    ]
    return [Trial({"quantity": name}, run) for name, problem, run in found if not problem]


def _in_folder(run: Callable[[Path], Row], stage: Stage) -> Row:
    with scratch("job") as folder:
        tiny_job().write(folder)
        write_shards(folder)
        stage.name = run.__name__.strip("_")
        return run(folder)


def _under_slurm(folder: Path) -> Row:
    with one_host_slurm(nodes=3, lost_after_seconds=2) as slurm:
        training = slurm.submit(folder / "job.slurm", *ARGUMENTS)
        saves = folder / "saves"
        killed_at = slurm.watch(training, lambda: saved_steps(saves) >= KILLED_AFTER, SECONDS)
        slurm.kill_node("n2")
        array = slurm.submit(folder / "checksums.slurm")
        slurm.wait(training, array, timeout_seconds=SECONDS)
        output = (folder / f"tiny-{training}.out").read_text(encoding="utf-8")
        return {
            "version": slurm.run("sinfo", "--version").strip(),
            "up_seconds": slurm.up_seconds,
            "killed_at_seconds": killed_at,
            "history": [asdict(span) for span in slurm.history],
            "losses": list(losses_of(output).values()),
            "accounting": slurm.accounting(),
        }


def _under_ray(folder: Path) -> Row:
    found = run_ray(folder, *ARGUMENTS, kill_after=KILLED_AFTER, timeout_seconds=2 * SECONDS)
    return {"version": f"ray {metadata.version('ray')}", **asdict(found)}


EXPERIMENT = Experiment(
    name="cluster_runs",
    summary="one training script under a Slurm that loses a node, and a Ray that loses a worker",
    configuration={
        "model": "a Llama-style model of 2 layers, 32 wide, random weights",
        "layout": "ZeRO-3 over 2 ranks: 2 nodes under Slurm, 2 workers under Ray",
        "steps": f"{STEPS}, saved every {EVERY}; killed after the save of step {KILLED_AFTER}",
        "slurm": "3 nodes as namespaces of one machine; SlurmdTimeout 2 s, cred_expire 5 s",
    },
    trials=trials,
)
