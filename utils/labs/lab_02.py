"""Checks of lesson and lab 02, "Mixed precision on a vision model"."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from utils.labs.verdict import Verdict, correct, not_yet
from utils.techniques import MixedStep

MOST_SIMULATIONS = 12
CARD_BYTES = 16 * 10**9
STEPS = 4


def added_bytes(answer: Any) -> Verdict:
    """Lesson 02: bytes per parameter that autocast's copies add."""
    if answer == 2:
        return correct("one 16-bit number for each weight that is cast")
    nudges = {
        0: "The fp32 weights stay. What does a 16-bit matrix product read?",
        -2: "The fp32 weights stay; the copy comes on top.",
        4: "A copy in fp32 would take that. How wide is a 16-bit number?",
        16: "That is the number of bits. How many bytes?",
    }
    nudge = nudges.get(answer, "One copy of each weight, 16 bits wide.") if _is_number(answer) else ""
    return not_yet("a number of bytes per parameter is wanted", got=repr(answer), nudge=nudge)


def what_halves(answer: Any) -> Verdict:
    """Lesson 02: the category that shrinks."""
    text = str(answer).strip().lower()
    if text == "activations":
        return correct("and they alone")
    nudges = {
        "parameters": "Autocast casts copies. The parameters themselves stay in fp32.",
        "gradients": "Look at the table of types: a gradient has its parameter's type.",
        "optimizer state": "Adam's means stayed in fp32, to the byte.",
        "cast weights": "Those are added by mixed precision.",
    }
    return not_yet("one category of the bars", got=repr(answer), nudge=nudges.get(text, ""))


def linear_rate(answer: Any) -> Verdict:
    """Lesson 02: the linear rule for SGD."""
    if _is_number(answer) and math.isclose(answer, 0.2, rel_tol=1e-3):
        return correct("twice the batch, twice the rate")
    wrong = _is_number(answer) and math.isclose(answer, 0.1 * 2**0.5, rel_tol=0.02)
    nudge = "That is the rule for Adam." if wrong else "The rate grows as the batch does."
    return not_yet("a learning rate for batch 1024", got=repr(answer), nudge=nudge)


def _is_number(answer: Any) -> bool:
    return isinstance(answer, (int, float)) and not isinstance(answer, bool)


class _WatchedScaler(torch.amp.GradScaler):
    """Notes in which order its parts are called, and with what loss dtype autocast is left."""

    def __init__(self, calls: list[str], **settings: Any) -> None:
        super().__init__("cpu", **settings)
        self._calls = calls

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        scaled.register_hook(lambda gradient: self._note_backward(gradient))
        self._calls.append("scale")
        return scaled

    def _note_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        inside = torch.is_autocast_enabled("cpu")
        self._calls.append("backward inside autocast" if inside else "backward")
        return gradient

    def step(self, optimizer: Any, *args: Any, **settings: Any) -> Any:
        self._calls.append("step")
        return super().step(optimizer, *args, **settings)

    def update(self, new_scale: Any = None) -> None:
        self._calls.append("update")
        super().update(new_scale)


def amp_step(function: Callable[..., Any]) -> Verdict:
    """Exercise 1: the order of calls, and the same losses as the reference."""
    model, optimizer, inputs, labels = _classifier()
    dtypes: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    calls: list[str] = []
    scaler = _WatchedScaler(calls)
    try:
        losses = []
        for _ in range(STEPS):
            losses.append(function(model, optimizer, scaler, inputs, labels))
            _poison_gradients(model)
    except RuntimeError:  # PyTorch refuses a second step without an update
        if "step" not in calls or "update" in calls:
            raise
        return not_yet("the second step failed", got=" -> ".join(calls), nudge=_order_nudge(calls))
    if dtypes and dtypes[0] is not torch.float16:
        nudge = 'Wrap forward and loss: torch.amp.autocast("cpu", dtype=torch.float16).'
        return not_yet("the forward pass did not run in fp16", got=dtypes[0], nudge=nudge)
    wanted = ["scale", "backward", "step", "update"]
    if calls != wanted * STEPS:
        return not_yet(expected=" -> ".join(wanted), got=" -> ".join(calls[:5]) or "no calls",
                       nudge=_order_nudge(calls))  # fmt: skip
    found = [float(loss) if loss is not None else math.nan for loss in losses]
    right = _reference_losses()
    if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(found, right, strict=True)):
        nudge = "Return the unscaled loss. Are the old gradients cleared before backward?"
        return not_yet("the losses differ", expected=right, got=found, nudge=nudge)
    return correct("scale, backward, step, update")


def _poison_gradients(model: nn.Module) -> None:
    # Old gradients would go unseen otherwise: unscaling divides them by the loss scale again.
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.any():
            parameter.grad.fill_(math.inf)


def _order_nudge(calls: list[str]) -> str:
    if "backward inside autocast" in calls:
        return "Backward belongs outside of autocast: it already knows the type of each operation."
    if "scale" not in calls:
        return "Without scaler.scale(loss) small gradients become 0 in fp16."
    if "step" not in calls:
        return "optimizer.step() would use scaled gradients. Let the scaler call it."
    if "update" not in calls:
        return "scaler.update() is missing: without it the scale never falls after an overflow."
    return "First scale and backward, then the step, then the update; each once."


def _classifier() -> tuple[nn.Sequential, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # Adam hides the size of gradients
    return model, optimizer, torch.randn(32, 24), torch.randint(0, 10, (32,))


def _reference_losses() -> list[float]:
    model, optimizer, inputs, labels = _classifier()
    step = MixedStep(model, optimizer, dtype=torch.float16)
    return [step(inputs, labels).item() for _ in range(STEPS)]


def bytes_at_backward(function: Callable[..., Any]) -> Verdict:
    """Exercise 2: what is alive when backward begins."""
    for parameters, per_image, batch in [(1000, 500, 1), (1000, 500, 64), (23_520_842, 25_500_000, 512)]:
        for mixed in (False, True):
            right = _alive(parameters, per_image, batch, mixed)
            found = function(parameters, per_image, batch, mixed)
            if found is None:
                return not_yet("your function returns nothing", nudge="Is there a `return`?")
            if not _is_number(found) or not math.isclose(found, right, rel_tol=1e-9):
                case = f"{parameters} parameters, {per_image} bytes an image, batch {batch}, mixed={mixed}"
                nudge = _alive_nudge(found, parameters, per_image * batch, mixed)
                return not_yet(case, expected=right, got=found, nudge=nudge)
    return correct("12 P + a b in fp32, 14 P + a b / 2 in mixed precision")


def _alive(parameters: int, per_image: int, batch: int, mixed: bool) -> float:
    activations = per_image * batch
    return 14 * parameters + activations / 2 if mixed else 12 * parameters + activations


def _alive_nudge(found: Any, parameters: int, activations: int, mixed: bool) -> str:
    wrong = {12 * parameters + activations / 2: "The 16-bit copies of the weights are missing.",
             (12 * parameters + activations) / 2: "Not everything halves. States stay in fp32.",
             6 * parameters + activations / 2: "Not everything halves. States stay in fp32.",
             16 * parameters + activations: "When backward begins there are no gradients yet."}  # fmt: skip
    nudge = "Parameters and Adam's two means stay in fp32. What is halved, what is added?"
    return wrong.get(found, nudge) if mixed or found in wrong else "Weights 4, Adam 8 bytes, activations."


def break_even_batch(function: Callable[..., Any]) -> Verdict:
    """Exercise 3: the smallest batch at which mixed precision saves."""
    for parameters, per_image in [(23_520_842, 25_500_000), (1000, 4000), (1000, 4001), (10**6, 10)]:
        right = 4 * parameters // per_image + 1
        found = function(parameters, per_image)
        if found != right:
            case = f"{parameters} parameters, {per_image} bytes an image"
            return not_yet(case, expected=right, got=found, nudge=_even_nudge(found, right))
    return correct("the first batch with 2 P < a b / 2")


def _even_nudge(found: Any, right: int) -> str:
    if not _is_number(found):
        return "A whole number of images. Is there a `return`?"
    if found == right - 1:
        return "At that batch nothing is saved yet: equal is not less."
    if abs(found - right / 2) <= 1:
        return "Only half of an image's activations is saved, not all of them."
    return "Solve 2 P < (a / 2) b for b, and take the next whole number."


class _TooManySimulations(Exception):
    pass


def largest_on_card(function: Callable[..., Any]) -> Verdict:
    """Exercise 4: the largest batch, in few simulations."""
    most = 0
    for states, per_image in [(350_000_000, 25_700_000), (400_000_000, 12_900_000), (4_000_000_000, 310_000_000)]:
        calls: list[int] = []
        right = max(b for b in range(1, 2048) if _peak(states, per_image, b) <= CARD_BYTES)
        try:
            found = function(_counted(states, per_image, calls), CARD_BYTES)
        except _TooManySimulations:
            nudge = "Two simulations give a line. Where does it cross the limit?"
            return not_yet(f"more than {MOST_SIMULATIONS} simulations", nudge=nudge)
        if found != right:
            case = f"a step of {states} bytes and {per_image} an image"
            return not_yet(case, expected=right, got=found, nudge=_largest_nudge(found, right))
        most = max(most, len(calls))
    return correct(score=f"{most} simulations at most")


def _largest_nudge(found: Any, right: int) -> str:
    if not _is_number(found):
        return "A whole number of images. Is there a `return`?"
    if found == right + 1:
        return "That is the first batch that does not fit."
    return "A line is a guess: test the guess and its neighbours."


def _counted(states: int, per_image: int, calls: list[int]) -> Callable[[int], int]:
    def simulated_peak_bytes(batch: int) -> int:
        calls.append(batch)
        if len(calls) > MOST_SIMULATIONS:
            raise _TooManySimulations
        return _peak(states, per_image, batch)

    return simulated_peak_bytes


def _peak(states: int, per_image: int, batch: int) -> int:
    """Flat while the peak lies in the optimizer step, then a line with small steps."""
    workspace = per_image // 3 * (batch // 16 % 3)
    return max(int(1.3 * states), states + per_image * batch + workspace)


def scaled_rate(function: Callable[..., Any]) -> Verdict:
    """Exercise 5: the linear rule for SGD, the square root for Adam."""
    for optimizer, power in [("sgd", 1.0), ("adam", 0.5)]:
        for old, new in [(512, 1024), (512, 2048), (1024, 256)]:
            right = 0.1 * (new / old) ** power
            found = function(0.1, old, new, optimizer)
            if not _is_number(found) or not math.isclose(found, right, rel_tol=1e-6):
                case = f"{optimizer}, rate 0.1, batch {old} to {new}"
                return not_yet(case, expected=right, got=found, nudge=_rate_nudge(found, right))
    return correct("linear for SGD, square root for Adam")


def _rate_nudge(found: Any, right: float) -> str:
    if not _is_number(found):
        return "A number is wanted. Is there a `return`?"
    if math.isclose(found, 0.01 / right, rel_tol=1e-6):
        return "The ratio is upside down: a larger batch takes a larger rate."
    return "SGD: in proportion to the batch. Adam: to the square root of the ratio."


CAUSES = ("no scaler", "new scaler each step", "half with Adam")


def diagnose(answer: Any) -> Verdict:
    """Exercise 6: which run has which fault."""
    right = {"run A": "half with Adam", "run B": "new scaler each step", "run C": "no scaler"}
    evidence = {
        "run A": "In which step do the weights stop being finite, and are the gradients finite then?",
        "run B": "The scale: which number should have fallen after the first overflow, and did not?",
        "run C": "The loss is finite and does not move. How many gradients are exactly 0?",
    }
    if not isinstance(answer, dict) or answer.keys() != right.keys():
        return not_yet("a dictionary with run A, run B and run C is wanted", got=repr(answer))
    for run, cause in right.items():
        if answer[run] not in CAUSES:
            return not_yet(run, expected=f"one of {CAUSES}", got=repr(answer[run]))
        if answer[run] != cause:
            return not_yet(run, got=answer[run], nudge=evidence[run])
    return correct("each fault leaves its own trace")
