"""Lesson 17's job: what is looked for while a Slurm runs it, and a Ray that loses a worker."""

from __future__ import annotations

import re
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from evidence.record.experiment import Experiment, Stage, Trial
from evidence.record.store import Row
from utils.catalog import ModelShape
from utils.files import scratch
from utils.parallel import saved_steps
from utils.planner import Batch, Cluster, Export, Plan, export

from .clusters import Slurm, losses_of, ray_problem, run_ray

STEPS, EVERY, KILLED_AFTER = 30, 2, 4
# Of what a job printed: its losses, what a rank that lost its peer says, and how its ranks ended.
KEPT_LINES = re.compile(r"step |srun: error|(\[rank\d+\]: )\w+: .*(Connection \w+ by peer)")
ARGUMENTS = ("--steps", str(STEPS), "--every", str(EVERY))
SECONDS = 180.0
SHAPE = ModelShape(name="tiny", family="llama", layers=2, hidden=32, heads=4, kv_heads=2,
                   feedforward=96, vocabulary=64, max_sequence=16)  # fmt: skip
UNEVEN = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --output=uneven.txt --open-mode=truncate
{command}
echo "srun ended with $?"
"""


def tiny_job(ranks_per_node: int = 1) -> Export:
    """The job of lesson 17: ZeRO-3 over two nodes, there of one rank each."""
    cluster = Cluster(gpu="A100-80GB", nodes=2, gpus_per_node=ranks_per_node)
    plan = Plan(dp=2 * ranks_per_node, zero_stage=3, micro_batch=2, framework="fp32")
    return export(SHAPE, cluster, plan, Batch(sequences=16, sequence_length=16))


def trials(device: torch.device) -> list[Trial]:
    """A row, where Ray runs; on the CPU alone."""
    if device.type != "cpu" or ray_problem():
        return []
    return [Trial({"quantity": "ray"}, _under_ray)]


def saves_of(number: int, folder: Path) -> Path:
    """Where job.slurm has a job save: a folder with its number."""
    return folder / f"saves-{number}"


def next_save(slurm: Slurm, number: int, folder: Path) -> float:
    """Watch a job until it has a save that is newer than the last one now; the seconds at which it had."""
    saves = saves_of(number, folder)
    there = saved_steps(saves)
    return slurm.watch(number, lambda: saved_steps(saves) > there, SECONDS)


def past_save(slurm: Slurm, number: int, folder: Path) -> float:
    """Watch a job until it has printed two steps that its last save does not hold; the seconds at which it had."""
    saves, log = saves_of(number, folder), folder / f"tiny-{number}.out"

    def printed() -> bool:
        saved = saved_steps(saves)
        return saved > 0 and max(losses_of(log.read_text(encoding="utf-8")), default=0) > saved

    return slurm.watch(number, printed, SECONDS)


def restarted(slurm: Slurm, number: int, times: int) -> float:
    """Watch a job until it was put back into the queue that often; the seconds at which it was."""
    return slurm.watch(number, lambda: slurm.job(number)[0].restarts >= times, SECONDS)


def account(slurm: Slurm, number: int, folder: Path, **seconds: Any) -> Row:
    """All that is told of a job that has ended: what was seen of it, what it printed, what Slurm wrote."""
    log = (folder / f"tiny-{number}.out").read_text(encoding="utf-8")
    return {
        "version": slurm.run("sinfo", "--version").strip(),
        "up_seconds": slurm.up_seconds,
        **seconds,
        "history": [asdict(span) for span in slurm.history],
        "losses": list(losses_of(log).values()),
        "log": "\n".join(kept_lines(log)),
        "decisions": slurm.decisions(number),
        "accounting": slurm.accounting(),
    }


def kept_lines(log: str) -> list[str]:
    """Of what a job printed, the lines that tell its story; a rank's last error without the place in Gloo's source."""
    found = ((line, KEPT_LINES.match(line)) for line in log.splitlines())
    return [f"{told[1]}{told[2]}" if told[1] else line for line, told in found if told]


def uneven_ends(slurm: Slurm, folder: Path) -> str:
    """What Slurm says where a rank ends with 75 ten seconds after another, with and without the kill."""
    said = []
    for flags in ("--kill-on-bad-exit=1", "--kill-on-bad-exit=0 --wait=60"):
        command = f"srun {flags} bash -c 'sleep $((10 * SLURM_PROCID)); exit 75'"
        script, output = folder / "uneven.slurm", folder / "uneven.txt"
        script.write_text(UNEVEN.format(command=command), encoding="utf-8")
        slurm.wait(slurm.submit(script), timeout_seconds=SECONDS)
        said.append(f"$ {command}\n{output.read_text(encoding='utf-8')}")
    return "\n".join(said)


def _under_ray(stage: Stage) -> Row:
    with scratch("job") as folder:
        tiny_job().write(folder)
        stage.name = "under Ray"
        found = run_ray(folder, *ARGUMENTS, kill_after=KILLED_AFTER, timeout_seconds=2 * SECONDS)
    return {"version": f"ray {metadata.version('ray')}", **asdict(found)}


EXPERIMENT = Experiment(
    name="cluster_runs",
    summary="one training script under a Ray that loses a worker",
    configuration={
        "model": "a Llama-style model of 2 layers, 32 wide, random weights",
        "layout": "ZeRO-3 over 2 workers",
        "steps": f"{STEPS}, saved every {EVERY}; killed after the save of step {KILLED_AFTER}",
    },
    trials=trials,
)
