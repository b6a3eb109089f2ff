"""Checks of lesson and lab 01, "Where does the memory go?"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from utils.labs.verdict import Verdict, correct, not_yet
from utils.memory import Category, Measurement, measure
from utils.units import format_bytes

MOST_CALLS = 40
LEAN_LIMIT_BYTES = 6_400_000  # between freeing gradients before forward and after it


def momentum_bytes(answer: Any) -> Verdict:
    """Lesson 01: bytes per parameter of SGD with momentum, in fp32."""
    if answer == 12:
        return correct("weights 4, gradients 4, momentum 4")
    nudges = {
        3: "That is how many numbers. How many bytes does each take?",
        4: "That is the momentum alone. What else does training keep?",
        8: "Either the momentum or the gradients are missing.",
        16: "That is Adam. Momentum keeps one number per parameter, not two.",
    }
    return not_yet(
        expected="bytes per parameter of weights, gradients and momentum together",
        got=answer,
        nudge=nudges.get(answer, "Count the numbers per parameter, then four bytes each."),
    )


def doubled_batch(answer: Any) -> Verdict:
    """Lesson 01: 2 GiB of states and 4 GiB that grows with the batch, doubled."""
    if not isinstance(answer, (int, float)):
        return not_yet("a number of GiB is wanted", got=repr(answer))
    if abs(answer - 10) < 0.5:
        return correct("2 GiB of states stay, 4 GiB become 8")
    nudge = (
        "That doubles everything. The states do not know the batch."
        if answer == 12
        else "Which part of the 6 GiB grows with the batch, and which stays?"
    )
    return not_yet(expected="states + twice the rest", got=f"{answer} GiB", nudge=nudge)


def peak_moves(answer: Any) -> Verdict:
    """Lesson 01: with smaller activations the peak moves towards the end of backward."""
    if answer == "less":
        return correct("the peak moves to a later moment, where more of the gradients are alive")
    if answer == "half":
        nudge = "Look at the end of backward: what is alive there does not shrink with activations."
        return not_yet("that holds only if the peak stays where it is", nudge=nudge)
    return not_yet('the answer is "half" or "less"', got=repr(answer))


def state_bytes(function: Callable[[int, str], int]) -> Verdict:
    """Exercise 1: bytes of parameters, gradients and optimizer state."""
    for optimizer, per_parameter in [("sgd", 8), ("momentum", 12), ("adam", 16)]:
        found, right = function(1000, optimizer), 1000 * per_parameter
        if found != right:
            nudge = _state_nudge(found, right)
            return not_yet(
                f"for 1000 parameters and {optimizer!r}", expected=right, got=found, nudge=nudge
            )
    return correct("8, 12 and 16 bytes per parameter")


def _state_nudge(found: Any, right: int) -> str:
    if found == right // 4:
        return "That counts numbers. Each takes four bytes."
    if found == right - 4000:
        return "One of weights, gradients and state is missing."
    return "Which numbers does this optimizer keep for each parameter, beside weight and gradient?"


def saved_bytes(function: Callable[[nn.Module, torch.Tensor], int]) -> Verdict:
    """Exercise 2: the saved-tensor ledger, on a network with views, shared storage and types."""
    model, inputs = _ledger_case()
    found, right = function(model, inputs), _reference_ledger(model, inputs, once=True, own=False)
    if found == right:
        return correct("every storage once, none of the model's own", score=format_bytes(right))
    wrong = {
        _reference_ledger(model, inputs, once=True, own=True): (
            "That counts the parameters too. They exist anyway: leave out the model's storages."
        ),
        _reference_ledger(model, inputs, once=False, own=False): (
            "Some tensors share a storage and were counted more than once."
        ),
        _reference_ledger(model, inputs, once=False, own=True): (
            "Shared storages are counted more than once, and the parameters are counted too."
        ),
    }
    return not_yet(expected=right, got=found, nudge=wrong.get(found, _LEDGER_NUDGE))


_LEDGER_NUDGE = (
    "Is the output alive until the sum is taken? Do you count bytes of storages, not elements?"
)


class _SharedViews(nn.Module):
    """Saves one storage through two views, and its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.last = nn.Linear(32, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        left, right = torch.relu(self.first(inputs)).chunk(2, dim=1)
        return self.last(left * right)


def _ledger_case() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return _SharedViews(), torch.randn(16, 32)


def _reference_ledger(model: nn.Module, inputs: torch.Tensor, *, once: bool, own: bool) -> int:
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[tuple[int, int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if own or storage.data_ptr() not in mine:
            kept.append((storage.data_ptr(), storage.nbytes()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(inputs)
    total = sum(dict(kept).values()) if once else sum(size for _, size in kept)
    del output
    return total


class _TooManyCalls(Exception):
    pass


def largest_batch(function: Callable[[Callable[[int], int], int], int]) -> Verdict:
    """Exercise 3: the answer must be exact, in few calls."""
    most = 0
    for per_item, limit in [(10, 1000), (1, 1000), (7, 100_000), (600, 1000), (2000, 1000)]:
        right = max(0, (limit - 100) // per_item)
        calls: list[int] = []
        try:
            found = function(_counted_peak(per_item, calls), limit)
        except _TooManyCalls:
            nudge = "Double the batch until it fails, then halve the distance."
            return not_yet(f"more than {MOST_CALLS} measurements", nudge=nudge)
        if found != right:
            note = f"a step of 100 + {per_item} x batch bytes, limit {limit}"
            return not_yet(note, expected=right, got=found, nudge=_batch_nudge(found, right))
        most = max(most, len(calls))
    return correct(score=f"{most} measurements at most")


def _counted_peak(per_item: int, calls: list[int]) -> Callable[[int], int]:
    def peak_bytes_at(batch: int) -> int:
        calls.append(batch)
        if len(calls) > MOST_CALLS:
            raise _TooManyCalls
        return 100 + per_item * batch

    return peak_bytes_at


def _batch_nudge(found: Any, right: int) -> str:
    if right == 0:
        return "Not even one item fits here. What does your function return then?"
    if found == right + 1:
        return "That is the smallest batch that does not fit. The one before it is wanted."
    if isinstance(found, int) and found & (found - 1) == 0 and found < right:
        return "Doubling alone finds a power of two. Search between it and the next."
    return "A peak that equals the limit still fits. Does your search end at the right side?"


def read_timeline(answer: dict[str, Any]) -> Verdict:
    """Exercise 4: the same network is measured again, and the answers are compared."""
    right = _wide_and_short()
    ratio = right.breakdown[Category.TEMPORARIES] / right.breakdown[Category.PARAMETERS]
    if answer["phase of the peak"] != right.peak_phase:
        nudge = "The triangle marks the peak. Which name stands above that background?"
        return not_yet("the phase", got=answer["phase of the peak"], nudge=nudge)
    if abs(float(answer["temporaries / parameters at the peak"]) - ratio) > 0.25:
        got = answer["temporaries / parameters at the peak"]
        nudge = "Compare the heights of the grey and the blue block below the triangle."
        return not_yet("the temporaries", got=got, nudge=nudge)
    if answer["half the batch lowers the peak by a tenth or more"] is not False:
        nudge = "Nothing that grows with the batch is alive in that phase."
        return not_yet("the batch", got=True, nudge=nudge)
    return correct(f"{right.peak_phase}, {ratio:.1f} times the parameters, and the batch is innocent")


def _wide_and_short() -> Measurement:
    """The network of exercise 4: a wide embedding, of which a step uses a handful of rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20_000, 64), nn.Flatten(), nn.Linear(16 * 64, 10))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    tokens, labels = torch.randint(0, 20_000, (8, 16)), torch.randint(0, 10, (8,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()

    return measure(step, model=model, optimizer=optimizer, items=8, timed_steps=0)


def cured_step(function: Callable[..., Any]) -> Verdict:
    """Exercise 5: the same training, the same history, nothing left behind."""
    model, optimizer, inputs, labels = _classifier(rows=512, width=512)
    history: list[Any] = []
    try:
        run = measure(
            lambda: function(model, optimizer, inputs, labels, history),
            model=model, optimizer=optimizer, timed_steps=1,
        )  # fmt: skip
    except ValueError as error:
        return not_yet(f"the step could not be measured: {error}")
    if [type(entry) for entry in history] != [float] * 3:
        got = f"{len(history)} entries of {type(history[-1]).__name__ if history else 'nothing'}"
        nudge = "An entry with a history keeps its graph. `loss.item()` is a number."
        return not_yet("one Python number per step", got=got, nudge=nudge)
    left = run.timeline.at(run.timeline.end_ns)
    if left[Category.ACTIVATIONS] + left[Category.OTHER] > 0:
        nudge = "Who still holds the graph after backward? Look at retain_graph."
        return not_yet("activations are still alive after the step", nudge=nudge)
    if not _close(history, _reference_losses(3)):
        nudge = "The order is zero_grad, forward, backward, step; the value is that step's loss."
        return not_yet("the losses differ", expected=_reference_losses(3), got=history, nudge=nudge)
    return correct("nothing stays but the states", score=format_bytes(left.total_bytes))


def _reference_losses(steps: int) -> list[float]:
    model, optimizer, inputs, labels = _classifier(rows=512, width=512)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _close(left: list[float], right: list[float]) -> bool:
    return all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(left, right, strict=True))


def _classifier(rows: int, width: int) -> tuple[nn.Module, Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.randn(rows, 256), torch.randint(0, 10, (rows,))


def lean_step(function: Callable[..., Any]) -> Verdict:
    """Exercise 6: the same parameters after the step, at a lower peak."""
    model, optimizer, inputs, labels = _classifier(rows=512, width=512)
    try:
        run = measure(
            lambda: function(model, optimizer, inputs, labels),
            model=model, optimizer=optimizer, timed_steps=0,
        )  # fmt: skip
    except ValueError as error:
        return not_yet(f"the step could not be measured: {error}")
    if not _same_parameters(model, steps=2):
        nudge = "Are the gradients of the step before still there when backward adds to them?"
        return not_yet("the parameters after the step are not the same", nudge=nudge)
    if run.peak_bytes > LEAN_LIMIT_BYTES:
        nudge = "The old gradients are alive during forward. When could they go?"
        limit = f"at most {format_bytes(LEAN_LIMIT_BYTES)}"
        return not_yet(expected=limit, got=format_bytes(run.peak_bytes), nudge=nudge)
    return correct(score=f"peak {format_bytes(run.peak_bytes)}")


def _same_parameters(model: nn.Module, steps: int) -> bool:
    reference, optimizer, inputs, labels = _classifier(rows=512, width=512)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(reference(inputs), labels).backward()
        optimizer.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)
