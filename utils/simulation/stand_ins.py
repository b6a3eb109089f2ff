"""Values that a program asks of tensors that have none: stand-ins, and a note on each.

A step that reads `loss.item()` to print it does the same with any number. One that branches on a
value does not: there the caller says which branch to assume. A check that raises is passed unasked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from utils.simulation.branches import PASSES, Way, way_at
from utils.simulation.refusals import NotSimulated
from utils.simulation.source_lines import Place, asking, running

NEED_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
Values = Mapping[str, float | Sequence[float]] | bool | None
ANY = "*"  # the name that stands for every tensor
MOST_ANSWERS = 1_000  # at one line, to "does the loop go on"
aten = torch.ops.aten
# Code of PyTorch and other libraries whose memory does not depend on what it is told: which file,
# what it is told, and what that means.
_HARMLESS: tuple[tuple[str, float, str], ...] = (
    ("torch/amp/grad_scaler.py", 0, "no gradient overflows"),
    ("torch/distributed/fsdp/sharded_grad_scaler.py", 0, "no gradient overflows"),
    ("torch/optim/lbfgs.py", 1, "the closure returns 1 each time, so that one iteration runs"),
    ("torch/optim/", 1, "the optimizer reads 1, and only scales its update by it"),
    ("transformers/optimization.py", 1, "the optimizer reads 1, and only scales its update by it"),
    ("transformers/trainer", 0, "the Trainer finds and logs 0, which is no error of its loss"),
    ("torch/distributions/", 1, "a distribution has valid arguments"),
    ("torch/utils/data/", 0, "a loader gives the first sample each time"),
    ("torch/nn/utils/clip_grad.py", 0, "no gradient is infinite or missing"),
    ("torch/autograd/graph.py", 0, "no gradient is missing"),
    # PyTorch 2.13 lets the ranks vote; 2.11 and 2.15 ask nothing of a simulated group.
    ("torch/distributed/pipelining/", 1, "every stage knows the shapes of what it gets"),
)


# Names at a line of a library where one answer takes the most: layers that are dropped by chance.
_MOST: tuple[tuple[str, str, float, str], ...] = (
    ("transformers/models/", "layerdrop", 0, "no layer is dropped, which takes the most"),
    ("transformers/models/", "skip_the_layer", 0, "no layer is dropped, which takes the most"),
)
NO_BOUND = (
    "No upper bound: where values= says what to assume, other values may take more memory. What "
    "counts or measures something can be given by its name, values={'n': 4096}, one after another "
    "as {'sizes': [512, 128]}."
)

ENDLESS = (
    "asks a tensor whether its loop goes on, and as values= says it did a thousand times. Say how "
    "often it does: values={{'{place}': [1, 1, 0], '*': 1}}."
)


class StandIns:
    """What simulated tensors answer when a program asks for their values."""

    def __init__(self, values: Values, remark: Callable[[str], None]) -> None:
        given = {ANY: 1} if values is True else values or {}
        self._values = {
            name: cycle(value if isinstance(value, Sequence) else (value,))
            for name, value in given.items()
        }
        self._remark = remark
        self._answers: Counter[str] = Counter()  # those that go on, by place
        self.assumed = Place()  # where the last value was taken for granted

    def results(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The results of an operation that depends on values; None if there is no stand-in."""
        is_number = func is aten._local_scalar_dense.default
        value = self._value(asking(), is_number)
        if value is None:
            return None
        if is_number:
            return _of_type(args[0].dtype, value)
        return _all_true(func, args, kwargs) if value else None

    def _value(self, place: Place, is_number: bool) -> float | None:
        for part, value, meaning in _HARMLESS if is_number else ():
            if part in place.asked_in:
                self._remark(f"Assumed in {part.rstrip('/')}: {meaning}.")
                return value
        for part, name, value, meaning in _MOST if is_number else ():
            if part in place.file and name in place.text:
                self._remark(f"Assumed at {place}: {meaning}.")
                return value
        for name, values in self._values.items():
            if name != ANY and place.is_named(name):
                return self._given(place, next(values), f"{name} = ", is_number)
        way = way_at(running()) if is_number else None
        if way is not None and way.meaning == PASSES:
            self._assume(place, PASSES)
            return float(way.truth)
        if ANY not in self._values:
            return None
        value = next(self._values[ANY])
        if way is None or value != 1:
            return self._given(place, value, "", is_number)
        self._goes_on(place, way)
        return float(way.truth)

    def _given(self, place: Place, value: float, name: str, is_number: bool) -> float:
        what = f"{name}{value:g}" if is_number else "all elements count"
        self._assume(place, f"{what}, as values= says")
        self._remark(NO_BOUND)
        return value

    def _goes_on(self, place: Place, way: Way) -> None:
        """Note the way that leaves nothing out; a loop that never ends is refused."""
        self._assume(place, way.meaning)
        self._remark(NO_BOUND)
        self._answers[str(place)] += 1
        if self._answers[str(place)] > MOST_ANSWERS:
            raise NotSimulated(ENDLESS.format(place=place.short))

    def _assume(self, place: Place, what: str) -> None:
        self.assumed = place
        self._remark(f"Assumed at {place}: {what}.")


def _of_type(dtype: torch.dtype, value: float) -> float | int | bool | complex:
    if dtype is torch.bool:
        return bool(value)
    return value if dtype.is_floating_point or dtype.is_complex else int(value)


def _all_true(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The results if every element counts: the largest that the operation can make."""
    tensor = args[0]
    if func is aten.nonzero.default:
        return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)
    if func is aten.masked_select.default:
        return tensor.new_empty(torch.broadcast_shapes(tensor.shape, args[1].shape).numel())
    if func is aten.index.Tensor:
        return func(tensor, _indices(args[1]))
    if func.name().startswith("aten::_ctc_loss"):
        steps, batch = tensor.shape[:2]
        longest = args[1].shape[-1] if args[1].dim() > 1 else args[1].numel() // batch
        return tensor.new_empty(batch), tensor.new_empty(batch, steps, 2 * longest + 1)
    if func is aten.bincount.default:
        least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        return tensor.new_empty(max(1, least), dtype=torch.int64)
    if func.namespace == "torchvision" and "nms" in func.name():
        return tensor.new_empty(tensor.shape[0], dtype=torch.int64)
    if func.name().startswith("aten::_unique2"):
        _, inverse, counts = (*args[1:], *(True, False, False)[len(args) - 1 :])
        shapes = (tensor.shape if inverse else (0,)), (tensor.numel() if counts else 0)
        numbers = (tensor.new_empty(shape, dtype=torch.int64) for shape in shapes)
        return tensor.new_empty(tensor.numel()), *numbers
    return None


def _indices(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Masks as indices of all their elements, one for each of a mask's dimensions."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += index.new_empty((index.numel(), index.dim()), dtype=torch.int64).unbind(1)
        else:
            found.append(index)
    return found
