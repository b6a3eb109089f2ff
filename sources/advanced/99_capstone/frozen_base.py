"""Steps of QLoRA on a tiny model, and which of its tensors they changed."""

from __future__ import annotations

import torch

from utils.catalog import ModelShape
from utils.models.finetune import build_finetune, finetune_step
from utils.models.pretrained import llama_config

TINY = ModelShape(
    name="tiny",
    family="llama",
    layers=2,
    hidden=64,
    heads=4,
    feedforward=128,
    vocabulary=256,
    max_sequence=128,
)


def moved_by_steps(steps: int = 2) -> tuple[set[str], set[str], set[str]]:
    """Names of packed weights, of trained parameters, and of all tensors that the steps changed.

    In the first step half of the adapters have no gradient yet: what multiplies it is still zero.
    """
    model, optimizer = build_finetune(llama_config(TINY), "QLoRA")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(steps):
        finetune_step(model, optimizer, 2, 32)
    after = model.state_dict()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    packed = {
        name
        for name, value in before.items()
        if name.endswith("weight") and value.dtype == torch.uint8
    }
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return packed, trained, moved
