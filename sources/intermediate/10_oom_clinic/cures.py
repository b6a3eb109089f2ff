"""The general cures of the clinic, as wrappers around any patient, and what they cost in operations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from utils.checked import check_public
from utils.clinic import Patient
from utils.techniques import checkpoint_blocks

__all__ = [
    "accumulated",
    "checkpointed",
    "flops",
    "offloaded",
    "smaller_optimizer",
    "under_bf16",
]

SMALL = 2**14  # elements: fewer are not worth the way


def under_bf16(patient: Patient) -> Patient:
    """Its training under autocast to bf16."""
    return patient.treated(
        train=_under(lambda: torch.autocast("cpu", torch.bfloat16), patient.train)
    )


def accumulated(patient: Patient, parts: int = 2) -> Patient:
    """Each batch in parts, one after the other."""
    return patient.treated(train=lambda model, optimizer: patient.train(model, optimizer, parts))


def checkpointed(patient: Patient) -> Patient:
    """Every block computed again in backward."""

    def build() -> tuple[Any, Any]:
        model, optimizer = patient.build()
        return checkpoint_blocks(model), optimizer

    return patient.treated(build=build)


def smaller_optimizer(patient: Patient) -> Patient:
    """Adafactor, whose second moments are a row and a column."""

    def build() -> tuple[Any, Any]:
        model, _ = patient.build()
        return model, torch.optim.Adafactor(model.parameters())

    return patient.treated(build=build)


def offloaded(patient: Patient) -> Patient:
    """What autograd saves lies on the host until backward."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    return patient.treated(train=_under(lambda: hooks(_to_bytes, _from_bytes), patient.train))


def flops(patient: Patient) -> int:
    """Operations of all its steps."""
    model, optimizer = patient.build()
    with FlopCounterMode(display=False) as counter:
        patient.train(model, optimizer)
    return counter.get_total_flops()


def _under(make_context: Callable[[], AbstractContextManager[Any]], train: Any) -> Any:
    def run(*args: Any) -> list[float]:
        with make_context():
            return train(*args)

    return run


def _to_bytes(tensor: Tensor) -> Any:
    """A saved tensor as Python bytes: host memory, which the device's allocator does not count."""
    if tensor.numel() < SMALL or isinstance(tensor, torch.nn.Parameter):
        return tensor
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return bytearray(flat.numpy()), tensor.dtype, tensor.shape


def _from_bytes(kept: Any) -> Tensor:
    if torch.is_tensor(kept):
        return kept
    content, dtype, shape = kept
    return torch.frombuffer(content, dtype=dtype).view(shape).clone()


check_public(globals())
