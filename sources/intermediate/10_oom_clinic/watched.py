"""What a cure moves where the meter does not look, and what a training ends with beside its losses."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from utils.clinic import Patient
from utils.memory.host import host_memory

SMALL_BYTES = 64 * 1024  # a row of losses may be an array
_LEAVES = {"numpy", "__array__", "tolist"}
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")


class Watched(TorchFunctionMode):
    """Inside, `.to("cpu", copy=True)` is a copy to the host, and what leaves PyTorch is noted.

    Attributes:
        hidden_bytes: Of tensors that became arrays or lists, which no meter of PyTorch's counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden_bytes = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _LEAVES and isinstance(args[0], Tensor) and args[0].nbytes > SMALL_BYTES:
            self.hidden_bytes += args[0].nbytes
        if (
            function is Tensor.to
            and given.get("copy")
            and "cpu" in map(str, (*args[1:], *given.values()))
        ):
            with host_memory():
                return function(*args, **given)
        return function(*args, **given)


class End(NamedTuple):
    """Of a training: its losses, the model with its last weights, and what it printed."""

    losses: list[float]
    model: nn.Module
    printed: str

    @property
    def numbers(self) -> list[float]:
        """Those that it printed."""
        return [float(text) for text in _NUMBER.findall(self.printed)]


def end_of(patient: Patient, sgd_rate: float = 0.0) -> End | None:
    """Train without the meter, by plain SGD of a rate where one is given; None without an optimizer."""
    model, optimizer = patient.build()
    if sgd_rate and not isinstance(optimizer, torch.optim.Optimizer):
        return None  # it steps by itself, as it likes
    if sgd_rate:
        optimizer = torch.optim.SGD(model.parameters(), lr=sgd_rate)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        losses = patient.train(model, optimizer)
    return End(losses, model, printed.getvalue())


def furthest(before: nn.Module, after: nn.Module) -> float:
    """The largest distance of two models' weights, a tensor at a time, over its norm."""
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    with torch.no_grad():
        return max(float((new - old).norm() / old.norm()) for old, new in pairs)
