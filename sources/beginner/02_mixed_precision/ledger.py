"""What the checks of lab 02 measure beside the learner: what autograd keeps, and a step's peak."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import nn

from utils.memory import measure

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


class FirstHalf(nn.Module):
    """Keeps a view: its storage is twice as large."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(rows, 2 n) -> (rows, n)."""
        return inputs[:, : inputs.shape[1] // 2].sin()


def small_network(
    channels: int = 16, side: int = 32, wide: int = 64, half: bool = False
) -> nn.Sequential:
    """A small vision network whose layers have names; images (batch, 3, side, side) to ten logits.

    What its layers keep for backward halves under autocast, stays as it is, or grows. With `half`
    one more of them keeps a view.
    """
    torch.manual_seed(0)
    layers = {
        "conv": nn.Conv2d(3, channels, 3, padding=1),
        "norm": nn.BatchNorm2d(channels),
        "relu": nn.ReLU(),
        "pool": nn.MaxPool2d(2),
        "mix": nn.Conv2d(channels, channels, 3, padding=1),
        "gelu": nn.GELU(),
        "flat": nn.Flatten(),
        "wide": nn.Linear(channels * (side // 2) ** 2, (1 + half) * wide),
        **({"first half": FirstHalf()} if half else {}),
        "tanh": nn.Tanh(),
        "head": nn.Linear(wide, 10),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


class WorksBetween(nn.Module):
    """Keeps something itself, between its children."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Images (batch, 3, side, side) -> (batch, 4, side - 4, side - 4)."""
        return self.mix(self.conv(inputs).exp())


def kept_by_module(
    model: nn.Module,
    inputs: torch.Tensor,
    dtype: torch.dtype | None,
    *,
    own: bool = False,
    once: bool = True,
    in_bytes: bool = True,
    views: bool = False,
    ends: bool = True,
) -> dict[str, int]:
    """Bytes that autograd keeps for backward, by the child module that keeps them first.

    Args:
        model: run forward once, on the CPU.
        inputs: what it takes.
        dtype: of autocast; None runs without.
        own: count the model's parameters and buffers too.
        once: count a storage for the first module alone.
        in_bytes: False counts elements.
        views: count a view's own bytes, not those of its storage.
        ends: False takes the child that began last for the one that runs.
    """
    tensors = [] if own else [*model.parameters(), *model.buffers()]
    seen = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    running, kept = [""], dict.fromkeys((name for name, _ in model.named_children()), 0)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            size = tensor.nbytes if views else storage.nbytes()
            counted = size if in_bytes else tensor.numel()
            kept[running[-1]] = kept.get(running[-1], 0) + counted
            if once:
                seen.add(storage.data_ptr())
        return tensor.detach()

    with ExitStack() as stack:
        for name, module in model.named_children():
            enter = module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
            leave = module.register_forward_hook(lambda *_: running.pop() and None)
            if not ends:
                leave.remove()
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        stack.enter_context(torch.autocast("cpu", dtype=dtype, enabled=dtype is not None))
        output = model(inputs)
    del output
    return {name: size for name, size in kept.items() if name and size}


def measured_peak(
    build: Build,
    batch: int,
    dtype: torch.dtype | None,
    *,
    steps: bool = True,
    drawn: bool = False,
) -> int:
    """Peak bytes of a training step.

    Without the optimizer's part if `steps` is False; on images drawn in the call of forward if `drawn`.
    """
    model, optimizer = build()
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            # An image drawn here may go as soon as its cast copy is there.
            outputs = model(torch.randn(batch, 3, 32, 32) if drawn else images)
            loss = F.cross_entropy(outputs, labels)
            del outputs
        loss.backward()
        if steps:
            optimizer.step()

    return measure(step, model=model, optimizer=optimizer, items=batch, timed_steps=0).peak_bytes


def small_build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The small network with Adam."""
    model = small_network()
    return model, torch.optim.Adam(model.parameters())
