"""The files of all schedulers, made from one job."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from utils.catalog import ModelShape
from utils.planner.cluster import Cluster
from utils.planner.exporters.job import IMAGE_BASE, job_of
from utils.planner.exporters.kubernetes import kubernetes_manifests, kubernetes_notes, train_job
from utils.planner.exporters.ray import ray_notes, ray_script
from utils.planner.exporters.skypilot import skypilot_notes, skypilot_task
from utils.planner.exporters.slurm import slurm_notes, slurm_script

PINNED = ("torch", "numpy")  # what train.py takes, and PyTorch warns without
DOCKERFILE = f"""\
# docker build -t NAME .       on another base: --build-arg BASE=python:3.12-slim
ARG BASE={IMAGE_BASE}
FROM ${{BASE}}
WORKDIR /job
COPY . /job
# NVIDIA's image brings PyTorch, CUDA and NCCL as one set: then nothing is installed over it.
RUN python3 -c "import torch" || pip install --no-cache-dir -r requirements.txt
ENV PYTHONUNBUFFERED=1
"""


@dataclass(frozen=True)
class Launchers:
    """Texts of the files by name, and for each scheduler what its file cannot say."""

    files: dict[str, str]
    notes: dict[str, tuple[str, ...]]


def launchers(
    model: ModelShape,
    cluster: Cluster,
    script: str | None,
    arguments: tuple[str, ...],
    connections: str,
    name: str | None,
) -> Launchers:
    """The files that start `script`; none, with a note each, where there is no script."""
    if script is None:
        none = ("No file: there is no script for this plan to start.",)
        return Launchers({}, dict.fromkeys(("slurm", "kubernetes", "ray", "skypilot"), none))
    own = script == "train.py"
    variables = {} if own else {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    job = job_of(model, cluster, script, arguments, variables, name)
    spot = cluster.pricing == "spot"
    files = {
        "job.slurm": slurm_script(job),
        "kubernetes.yaml": kubernetes_manifests(job),
        "trainjob.yaml": train_job(job),
        "ray_train.py": ray_script(job),
        "skypilot.yaml": skypilot_task(job, spot=spot),
        "Dockerfile": DOCKERFILE,
        "requirements.txt": requirements(),
    }
    notes = {
        "slurm": slurm_notes(job),
        "kubernetes": kubernetes_notes(job),
        "ray": ray_notes(job),
        "skypilot": skypilot_notes(job, spot=spot),
    }
    return Launchers(
        {name: text for name, text in files.items() if text is not None},
        {target: tuple(texts) for target, texts in notes.items()},
    )


def requirements() -> str:
    """Exact versions, those that this course was run with; a build of its own leaves its mark out."""
    return "".join(f"{name}=={metadata.version(name).partition('+')[0]}\n" for name in PINNED)
