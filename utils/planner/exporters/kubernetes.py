"""Kubernetes: an indexed Job with what it needs, of built-in kinds, and Kubeflow's TrainJob.

Fields: https://kubernetes.io/docs/reference/kubernetes-api/ and
https://www.kubeflow.org/docs/components/trainer/. No value passes a shell: commands are lists.
"""

from __future__ import annotations

from typing import Any

from utils.planner.exporters.job import PORT, RESTARTS, TrainingJob
from utils.planner.exporters.yaml_text import yaml_text

FOLDER = "/saves"  # in the container
GPU = "nvidia.com/gpu"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def kubernetes_manifests(job: TrainingJob) -> str:
    """YAML of a volume for saves, a service that gives pods names, and the Job."""
    return "---\n".join(yaml_text(found) for found in (_volume(job), _service(job), _job(job)))


def train_job(job: TrainingJob) -> str:
    """YAML of a TrainJob for Kubeflow's runtime torch-distributed, which starts torchrun itself."""
    trainer = {
        "image": job.image,
        "command": ["torchrun", job.script, *_arguments(job)],
        "numNodes": job.nodes,
        "numProcPerNode": job.gpus_per_node,
        "resourcesPerNode": {"limits": {GPU: str(job.gpus_per_node)}},
        "env": [{"name": key, "value": value} for key, value in job.variables.items()],
    }
    return yaml_text(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": _named(job),
            "spec": {
                "runtimeRef": {"name": "torch-distributed"},
                "trainer": {key: value for key, value in trainer.items() if value},
            },
        }
    )


def kubernetes_notes(job: TrainingJob) -> list[str]:
    """What the reader must set or know before kubectl takes the files."""
    return [
        *job.notes(),
        f"Build the Dockerfile, push it, and put its name in place of {job.image}.",
        "The volume is ReadWriteMany: its storage class must be a shared file system.",
        "trainjob.yaml needs Kubeflow Trainer and its runtime torch-distributed; give that runtime "
        f"the volume at {FOLDER}, or a restart begins anew. kubernetes.yaml needs neither.",
        "A pod that a node drain ends is not counted as a failure; another is, "
        f"{RESTARTS} times for each node.",
    ]


def _named(job: TrainingJob) -> dict[str, Any]:
    return {"name": job.name}


def _arguments(job: TrainingJob) -> list[str]:
    return [*(("--saves", FOLDER) if job.is_exported else ()), *job.arguments]


def _volume(job: TrainingJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _named(job),
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": f"{job.saves_gib}Gi"}},
        },
    }


def _service(job: TrainingJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _named(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "ports": [{"name": "meeting", "port": PORT}],
        },
    }


def _job(job: TrainingJob) -> dict[str, Any]:
    disrupted = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _named(job),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimitPerIndex": RESTARTS,
            "podFailurePolicy": {"rules": [disrupted]},
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "subdomain": job.name,
                    "containers": [_container(job)],
                    "volumes": [
                        {"name": "saves", "persistentVolumeClaim": {"claimName": job.name}},
                        # NCCL's buffers; a container has 64 MiB of shared memory otherwise.
                        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
                    ],
                }
            },
        },
    }


def _container(job: TrainingJob) -> dict[str, Any]:
    # $(NODE_RANK) is filled in by Kubernetes, which knows the variables of this list alone.
    command = [
        "torchrun",
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.gpus_per_node}",
        "--node-rank=$(NODE_RANK)",
        f"--master-addr={job.name}-0.{job.name}",
        f"--master-port={PORT}",
        job.script,
        *_arguments(job),
    ]
    rank = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    return {
        "name": "train",
        "image": job.image,
        "command": command,
        "env": [rank, *({"name": key, "value": value} for key, value in job.variables.items())],
        "resources": {"limits": {GPU: job.gpus_per_node}},
        "volumeMounts": [
            {"name": "saves", "mountPath": FOLDER},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
