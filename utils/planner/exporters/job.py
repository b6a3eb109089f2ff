"""What all schedulers are told of one plan: a safe name, nodes, and the words of a command.

A name that a learner types may hold quotes, line ends or `$(...)`. Schedulers' files see `job_name`
of it alone: letters, digits and hyphens, which mean nothing to a shell, to YAML or to Kubernetes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from utils.catalog import ModelShape
from utils.planner.cluster import Cluster
from utils.units import GIB

LONGEST_NAME = 40  # Kubernetes adds "-" and a number to it, and takes 63 in all
PORT = 29500
EVERY = 100  # steps between saves
RESTARTS = 3  # of a job that failed by itself
BYTES_PER_PARAMETER = 12  # of a save: float32 parameters and Adam's two moments
# The base holds PyTorch 2.12 with CUDA and NCCL (NVIDIA's catalog, release 26.05).
IMAGE_BASE = "nvcr.io/nvidia/pytorch:26.05-py3"


@dataclass(frozen=True)
class TrainingJob:
    """One training job, as schedulers see it.

    Attributes:
        name: lower-case letters, digits and hyphens.
        asked_name: what the user wrote.
        nodes, gpus_per_node: machines, and ranks on each.
        gpu: the device's name in the catalog.
        script: the Python file.
        arguments: its arguments, one word each.
        variables: of the environment.
        saves_gib: room for three saves of the whole state, two kept and one under way, in GiB.
    """

    name: str
    asked_name: str
    nodes: int
    gpus_per_node: int
    gpu: str
    script: str
    arguments: tuple[str, ...]
    variables: dict[str, str]
    saves_gib: int

    @property
    def image(self) -> str:
        """What the job's container is called, in a registry that the user puts in."""
        return f"registry.example.com/{self.name}:1"

    @property
    def is_exported(self) -> bool:
        """The script is the exported train.py, not Megatron-LM's."""
        return self.script == "train.py"

    def notes(self) -> list[str]:
        """What became of the name."""
        if self.name == self.asked_name:
            return []
        asked = ascii(self.asked_name)[:60]
        return [f"The job is called {self.name}: schedulers do not take {asked} as it is."]


def job_of(
    model: ModelShape,
    cluster: Cluster,
    script: str,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    name: str | None,
) -> TrainingJob:
    """The job that runs `script` on a cluster; it is called after the model where nobody says how."""
    asked = model.name if name is None else name
    saves = math.ceil(3 * BYTES_PER_PARAMETER * model.parameter_count / GIB)
    own = ("--every", str(EVERY)) if script == "train.py" else ()
    return TrainingJob(
        job_name(asked),
        asked,
        cluster.nodes,
        cluster.gpus_per_node,
        cluster.device.name,
        script,
        (*own, *arguments),
        variables,
        saves,
    )


def job_name(text: str) -> str:
    """A name that every scheduler takes: a-z, 0-9 and hyphens, from a letter on, 40 at most."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower())[: 2 * LONGEST_NAME]
    return re.sub(r"^[^a-z]+", "", plain)[:LONGEST_NAME].strip("-") or "job"
