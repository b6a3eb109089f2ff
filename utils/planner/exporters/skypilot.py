"""SkyPilot: a task file for spot nodes of whatever cloud has them, found again after each loss.

Fields: https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

from __future__ import annotations

import shlex

from utils.planner.exporters.job import PORT, RESTARTS, TrainingJob
from utils.planner.exporters.yaml_text import yaml_text

FOLDER = "/saves"  # a bucket, mounted on every node
NAME = "SAVES_BUCKET"


def skypilot_task(job: TrainingJob, *, spot: bool) -> str:
    """YAML of a task for `sky jobs launch`; the bucket's name is a variable of the task."""
    words = [*(("--saves", FOLDER) if job.is_exported else ()), *job.arguments]
    run = (
        'HEAD_NODE="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"\n'
        'torchrun --nnodes="$SKYPILOT_NUM_NODES" --nproc-per-node="$SKYPILOT_NUM_GPUS_PER_NODE" \\\n'
        f'  --node-rank="$SKYPILOT_NODE_RANK" --master-addr="$HEAD_NODE" --master-port={PORT} \\\n'
        f"  {shlex.join([job.script, *words])}\n"
    )
    recovery = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": RESTARTS}
    return yaml_text(
        {
            "name": job.name,
            "workdir": ".",
            "num_nodes": job.nodes,
            "resources": {
                "accelerators": {job.gpu: job.gpus_per_node},
                "use_spot": spot,
                "job_recovery": recovery,
            },
            "envs": {NAME: f"{job.name}-saves", **job.variables},
            "file_mounts": {FOLDER: {"name": "${" + NAME + "}", "mode": "MOUNT"}},
            "context": "pip install -r requirements.txt\n",
            "run": run,
        }
    )


def skypilot_notes(job: TrainingJob, *, spot: bool) -> list[str]:
    """What the reader must know before sky takes the file."""
    notes = [
        "Start it with `sky jobs launch skypilot.yaml`; `sky launch` alone does not recover.",
        f"The bucket's name must be the only one in its cloud: --env {NAME}=...",
        "The device's name is the catalog's; `sky show-gpus` lists SkyPilot's.",
    ]
    if not spot:
        notes.append("The cluster is not priced as spot, so use_spot is false.")
    return [*job.notes(), *notes]
