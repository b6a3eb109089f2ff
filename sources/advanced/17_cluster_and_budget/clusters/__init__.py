"""Clusters that can be had on one machine, and the tools that check files for real ones."""

from __future__ import annotations

from utils.checked import check_public

from .jobs import JobSpan, SlurmJob, losses_of
from .manifests import (
    ManifestError,
    MissingToolError,
    check_kubernetes,
    check_skypilot,
    check_train_job,
    kubectl_says,
    read_yaml,
)
from .ray_train import RayError, RayRun, ray_problem, run_ray
from .slurm import Slurm, SlurmError, one_host_slurm, slurm_problem

__all__ = [
    "JobSpan",
    "ManifestError",
    "MissingToolError",
    "RayError",
    "RayRun",
    "Slurm",
    "SlurmError",
    "SlurmJob",
    "check_kubernetes",
    "check_skypilot",
    "check_train_job",
    "kubectl_says",
    "losses_of",
    "one_host_slurm",
    "ray_problem",
    "read_yaml",
    "run_ray",
    "slurm_problem",
]

check_public(globals())
