"""The small network of lesson 02, and its images: mixed precision by hand and by library train it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.data import Cifar10, normalize

Batch = tuple[Tensor, Tensor]


def toy_network(seed: int) -> nn.Sequential:
    """Two convolutions with BatchNorm, and a linear layer; images (batch, 3, 8, 8) to ten logits."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def shrunk(data: Cifar10, count: int) -> Batch:
    """The first images at a quarter of their side, (count, 3, 8, 8), and their labels."""
    return F.avg_pool2d(normalize(data.images[:count]), 4), data.labels[:count]


def shuffled(data: Batch, batch: int, epochs: int, seed: int) -> Iterator[Batch]:
    """Batches of each epoch, in an order that the seed alone decides."""
    images, labels = data
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for part in torch.randperm(len(images), generator=order).split(batch):
            yield images[part], labels[part]
