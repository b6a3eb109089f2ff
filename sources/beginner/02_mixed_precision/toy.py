"""Networks of lesson 02 beside its ResNet: a toy that a laptop trains over seeds, and a transformer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.data import Cifar10, normalize
from utils.models import Transformer, TransformerConfig

Batch = tuple[Tensor, Tensor]
VOCABULARY = 50_304


def toy_network(seed: int) -> nn.Sequential:
    """Two convolutions and a linear layer; images (batch, 3, 8, 8) to ten logits."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 10),
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


@torch.no_grad()
def percent_right(model: nn.Module, data: Batch) -> float:
    """How many of the images the network names rightly, in percent."""
    images, labels = (part.to(next(model.parameters()).device) for part in data)
    return 100 * (model.eval()(images).argmax(1) == labels).float().mean().item()


def a_transformer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Twelve blocks of width 768 with a vocabulary of 50,304, and Adam: to simulate, not to train here."""
    torch.manual_seed(0)
    sizes = TransformerConfig(
        vocabulary=VOCABULARY, hidden=768, layers=12, heads=12, feedforward=2048, tied=True
    )
    model = Transformer(sizes)
    return model, torch.optim.Adam(model.parameters())


def on_tokens(
    model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None
) -> None:
    """Its step on 2 texts of 1,024 tokens, under autocast in `dtype`, or in fp32 if that is None."""
    tokens = torch.randint(0, VOCABULARY, (2, 1025))
    optimizer.zero_grad()
    with torch.autocast(tokens.device.type, dtype=dtype, enabled=dtype is not None):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
