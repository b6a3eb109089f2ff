"""Ray Train: a script whose workers are the ranks, and which starts them anew when one dies."""

from __future__ import annotations

from utils.planner.exporters.job import EVERY, RESTARTS, TrainingJob

SCRIPT = '''\
"""Train under Ray: python ray_train.py --steps 1000, on the head of a Ray cluster or on one machine.

Ray joins the ranks; what they train stands in train.py. A worker that dies is replaced by a new set,
which goes on from the newest save.
"""

import argparse
import os

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FOLDER = os.path.dirname(os.path.abspath(__file__))
WORKERS = {ranks}


def rank(given: dict) -> None:
    """What each worker runs, in a process of its own."""
    import sys

    sys.path.insert(0, given["folder"])
    import ray.train.torch
    import torch

    import train

    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    train.train(device, given["steps"], given["weights"], given["saves"], given["every"])


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--weights")
    options.add_argument("--saves", default=os.path.join(FOLDER, "saves"))
    options.add_argument("--every", type=int, default={every})
    options.add_argument("--cpu", action="store_true", help="ranks on CPUs, joined by gloo")
    given = options.parse_args()
    if given.cpu:  # a small Ray of its own; without it Ray joins the cluster of `ray start`
        ray.init("local", num_cpus=WORKERS + 1, include_dashboard=False,
                 object_store_memory=200_000_000, _node_ip_address="127.0.0.1")
    TorchTrainer(
        rank,
        train_loop_config={{**vars(given), "folder": FOLDER}},
        torch_config=TorchConfig(backend="gloo" if given.cpu else "cpu:gloo,cuda:nccl"),
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=not given.cpu),
        run_config=RunConfig(name="{name}", storage_path=given.saves,
                             failure_config=FailureConfig(max_failures={restarts})),
    ).fit()


if __name__ == "__main__":
    main()
'''


def ray_script(job: TrainingJob) -> str | None:
    """The text of ray_train.py; None where there is no train.py for it to call."""
    if not job.is_exported:
        return None
    ranks = job.nodes * job.gpus_per_node
    return SCRIPT.format(ranks=ranks, name=job.name, every=EVERY, restarts=RESTARTS)


def ray_notes(job: TrainingJob) -> list[str]:
    """What the reader must set or know before Ray runs it."""
    if not job.is_exported:
        return ["No ray_train.py: it calls train.py, and there is none for this plan."]
    return [
        *job.notes(),
        "Needs ray[train] on all nodes, this folder at one path on all of them, and `ray start` "
        "before it; without a cluster Ray takes this machine.",
    ]
