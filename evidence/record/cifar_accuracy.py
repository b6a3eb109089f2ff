"""Final accuracy of ResNet-50 on CIFAR-10 in each precision, over paired seeds.

A seed decides the initial weights and the order of the images, so that rows of one seed differ in
the precision alone.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from evidence.record.experiment import Experiment, Stage, Trial
from evidence.record.store import Row
from utils.data import Cifar10, cifar10
from utils.models.resnets import resnet
from utils.techniques.precision import MixedStep, Precision, offered, tf32

DEPTH = 50
SEEDS = range(5)
EPOCHS = 8
BATCH = 512
STEPS_PER_EPOCH = 40  # the first 20,480 images of the epoch's order
HIGHEST_RATE = 2e-3  # of a one-cycle schedule


def trials(device: torch.device) -> list[Trial]:
    """A trial per precision and seed; none on a CPU, where they would take days."""
    if device.type != "cuda":
        return []
    return [_trial(precision, seed, device) for precision in offered(device) for seed in SEEDS]


def _trial(precision: Precision, seed: int, device: torch.device) -> Trial:
    settings = {
        "quantity": "final accuracy",
        "stem": "cifar",
        "image_size": 32,
        "precision": precision.name,
        "seed": seed,
        "epochs": EPOCHS,
        "images_per_step": BATCH,
    }
    return Trial(settings, partial(_accuracy, precision, seed, device))


def _accuracy(precision: Precision, seed: int, device: torch.device, stage: Stage) -> Row:
    train, test = cifar10("train"), cifar10("test")
    torch.manual_seed(seed)
    model = resnet(depth=DEPTH, stem="cifar").to(device)
    stage.name = "training"
    with tf32(precision.tf32):
        losses = _train(model, train, precision, seed)
        stage.name = "evaluation"
        share = _share_right(model, test, device)
    last = losses[-STEPS_PER_EPOCH:]
    return {
        "data": test.source,
        "final_accuracy_percent": 100 * share,
        "last_epoch_loss": sum(last) / len(last),
        "optimizer_steps": len(losses),
    }


def _train(model: nn.Module, data: Cifar10, precision: Precision, seed: int) -> list[float]:
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(model.parameters(), lr=HIGHEST_RATE)
    step = MixedStep(model, optimizer, dtype=precision.autocast or torch.float32)
    steps = min(STEPS_PER_EPOCH, len(data) // BATCH)
    losses: list[torch.Tensor] = []
    for epoch in range(EPOCHS):
        batches = data.batches(BATCH, seed=EPOCHS * seed + epoch, drop_last=True)
        for _, (images, labels) in zip(range(steps), batches, strict=False):
            progress = len(losses) / (EPOCHS * steps)
            _set_rate(optimizer, HIGHEST_RATE * min(progress / 0.3, (1 - progress) / 0.7))
            losses.append(step(images.to(device), labels.to(device)))
    return torch.stack(losses).tolist()


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    # By hand: a scheduler would warn of the steps that the loss scaler skips.
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def _share_right(model: nn.Module, data: Cifar10, device: torch.device) -> float:
    """In fp32 or TF32, whatever the training used: the weights are compared, not the evaluation."""
    model.eval()
    right = sum(
        int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
        for images, labels in data.batches(min(BATCH, len(data)))
    )
    return right / len(data)


EXPERIMENT = Experiment(
    name="cifar_accuracy",
    summary="ResNet-50 on CIFAR-10: final accuracy in each precision, over five paired seeds",
    configuration={
        "model": "ResNet-50, CIFAR's stem",
        "optimizer": f"Adam, one cycle up to {HIGHEST_RATE}",
        "data": "CIFAR-10, or what the row names where it is not there",
        "tf32": "both matmuls and convolutions; in all other rows neither",
    },
    trials=trials,
)
