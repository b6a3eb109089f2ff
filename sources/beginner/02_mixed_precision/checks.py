"""Checks of lesson and lab 02, "Mixed precision on a vision model"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from utils.labs.cases import Case, Exercise, Question, judge, scored, takes
from utils.labs.kinds import equal, function, instance, keys, number, one_of, whole
from utils.labs.searches import CountedPeak, Search, most_calls
from utils.labs.verdict import Verdict, correct, not_yet
from utils.techniques import MixedStep

from . import ledger

MOST_SIMULATIONS, PAR_SIMULATIONS = 8, 6
CARD_BYTES = 16 * 10**9
STEPS = 4

peak_of_1024 = Question(
    "Lesson 02: the peak of mixed precision at 1024 images, by the formula, in GiB.",
    number("a number of GiB"),
    right=12.47,
    within=0.04,
    wrong={
        12.29: "That is half of fp32's peak. Which terms do not halve?",
        24.59: "That is fp32. What becomes of the activations?",
        12.42: "What does mixed precision add to the states?",
    },
    nudge=(
        "14 bytes for each parameter, and half of a for each image. A is in MiB, P in parameters; "
        "a GiB is 1,024 MiB."
    ),
    note="activations are nearly all of it, which is why the peak nearly halves here",
)


class _WatchedScaler(torch.amp.GradScaler):
    """Notes in which order its parts are called, and with what loss dtype autocast is left."""

    def __init__(self, calls: list[str], **settings: Any) -> None:
        super().__init__("cpu", **settings)
        self._calls = calls
        self.loss_dtypes: list[torch.dtype] = []

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        self.loss_dtypes.append(outputs.dtype)
        scaled.register_hook(self._note_backward)
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


@takes(function())
def amp_step(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: the order of calls, and the same losses as the reference."""
    model, optimizer, inputs, labels = _classifier()
    dtypes: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    calls: list[str] = []
    scaler, losses = _WatchedScaler(calls), []
    try:
        for _ in range(STEPS):
            losses.append(answer(model, optimizer, scaler, inputs, labels))
            _poison_gradients(model)
    except (AssertionError, RuntimeError):  # PyTorch refuses a step or an update out of order
        if calls[:4] == _ORDER:
            raise
        return not_yet(
            "PyTorch refuses that order of calls",
            expected=" -> ".join(_ORDER),
            got=" -> ".join(calls[:5]) or "no calls",
            nudge=_order_nudge(calls),
        )
    return (
        _problem_of_types(dtypes, scaler.loss_dtypes)
        or _problem_of_order(calls)
        or _problem_of_losses(losses)
        or correct("scale, backward, step, update")
    )


_ORDER = ["scale", "backward", "step", "update"]


def _problem_of_types(outputs: list[torch.dtype], losses: list[torch.dtype]) -> Verdict | None:
    if outputs and outputs[0] is not torch.float16:
        nudge = 'Wrap forward and loss: torch.amp.autocast("cpu", dtype=torch.float16).'
        return not_yet("the forward pass did not run in fp16", got=outputs[0], nudge=nudge)
    if torch.float16 in losses:
        nudge = "Under autocast cross_entropy runs in fp32. Put the loss inside of the `with`, too."
        return not_yet("the loss was computed in fp16, outside of autocast", nudge=nudge)
    return None


def _problem_of_order(calls: list[str]) -> Verdict | None:
    if calls == _ORDER * STEPS:
        return None
    return not_yet(
        expected=" -> ".join(_ORDER),
        got=" -> ".join(calls[:5]) or "no calls",
        nudge=_order_nudge(calls),
    )


def _problem_of_losses(losses: list[Any]) -> Verdict | None:
    found, right = (
        [number("the loss as a Python number").returned(loss) for loss in losses],
        _reference_losses(),
    )
    nudge = "Return the unscaled loss. Are the old gradients cleared before backward?"
    return judge(found, right, "the losses differ", relative=1e-3, nudge=nudge)


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


def _peak_of(parameters: int, per_image: int, batch: int, mixed: bool, state: int) -> Case:
    activations = per_image * batch

    def peak(state: int, copies: int = 2 * mixed, kept: float = activations / (1 + mixed)) -> float:
        return max((4 + state + copies) * parameters + kept, (8 + state) * parameters)

    right, step = peak(state), (8 + state) * parameters
    begins = (4 + state + 2 * mixed) * parameters + activations / (1 + mixed)
    wrong = {
        begins: "At the optimizer step there are gradients, and no activations. Which moment holds more?",
        step: "That is the optimizer step alone. At a large batch another moment holds more.",
        step
        + activations: "Gradients and all activations are never alive together: two moments compete.",
        peak(8): "That is Adam. What does this optimizer keep for each parameter?",
        peak(state, copies=0): "The 16-bit copies of the weights are missing.",
        peak(state, 0, activations) / 2: "Not everything halves. States stay in fp32.",
        peak(state, kept=activations): "The activations of mixed precision take half.",
        max(
            begins, step + 2 * parameters
        ): "At the optimizer step the copies of the weights are gone.",
    }
    wrong = {value: text for value, text in wrong.items() if value != right}
    says = (
        f"{parameters} parameters, {per_image} bytes an image, batch {batch}, mixed={mixed}, "
        f"{state} bytes of state a parameter"
    )
    return Case((parameters, per_image, batch, mixed, state), right, says, wrong)


predicted_peak = Exercise(
    "Exercise 2: the peak, as the larger of two moments, for any optimizer.",
    [
        _peak_of(*sizes, mixed, state)
        for sizes, state in [
            ((1000, 500, 64), 8),
            ((1000, 500, 1), 8),
            ((1000, 500, 64), 0),
            ((1000, 500, 10), 4),
            ((23_520_842, 25_500_000, 512), 4),
            ((1000, 4000, 1), 0),
        ]
        for mixed in (False, True)
    ],
    relative=1e-9,
    nudge="Write the bytes of both moments for fp32 and for mixed, then take the larger.",
    note="the larger of two moments; in this model mixed precision never raises it",
)


@takes(function())
def measured_peak(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: the peak of a step, as the meter finds it, in both precisions."""
    for batch in (16, 24):
        for dtype in (torch.bfloat16, None):
            peak = partial(ledger.measured_peak, ledger.small_build, batch, dtype)
            found = whole("a peak in bytes, a whole number,").returned(
                answer(ledger.small_build, batch, dtype)
            )
            if equal(found, peak(drawn=True), relative=0.01):
                continue
            verdict = judge(
                found,
                peak(),
                f"batch {batch}, {dtype or 'fp32'}",
                relative=0.01,
                wrong=_wrong_peaks(batch, dtype),
                nudge="A whole step, from zero_grad to optimizer.step, at that batch?",
            )
            if verdict:
                return verdict
    ran: list[torch.dtype] = []
    answer(partial(_watched_build, ran), 4, torch.float16)
    return _wrong_dtype(ran) or correct("the meter's peak, in fp32 and in bf16")


def _watched_build(ran: list[torch.dtype]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = ledger.small_build()
    _note_dtypes(model, ran)
    return model, optimizer


def _note_dtypes(model: nn.Module, ran: list[torch.dtype]) -> None:
    """Note in which type the model's first layer gives its results."""
    first = next(model.children())
    first.register_forward_hook(lambda module, args, out: ran.append(out.dtype))


def _wrong_dtype(ran: list[torch.dtype]) -> Verdict | None:
    """The verdict on a run that was asked for in fp16."""
    if ran and set(ran) != {torch.float16}:
        nudge = "Another 16-bit type has as many bytes and other numbers: give `dtype` to autocast."
        return not_yet("asked for torch.float16", got=f"layers ran in {ran[0]}", nudge=nudge)
    return None


def _wrong_peaks(batch: int, dtype: torch.dtype | None) -> dict[int, str]:
    other = None if dtype else torch.bfloat16
    text = (
        "That is the peak in fp32. Are forward and loss inside of autocast, in this dtype?"
        if dtype
        else "dtype=None is fp32: autocast takes enabled=False."
    )
    return {
        ledger.measured_peak(ledger.small_build, batch, other): text,
        ledger.measured_peak(ledger.small_build, batch, dtype, steps=False): (
            "Adam makes its state in optimizer.step(). Does the step call it?"
        ),
    }


_LEDGER_CASES = [
    (torch.bfloat16, 8, "under autocast"),
    (None, 8, "without autocast, dtype=None"),
    (torch.bfloat16, 5, "under autocast, another batch"),
    (None, 2, "a model whose own forward keeps something between two children"),
]
_IN_BYTES = "a dictionary from names of modules to whole numbers of bytes"


@takes(function())
def kept_by_module(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: what autograd keeps for backward, by the module that keeps it first."""
    model = ledger.small_network(channels=8, side=16, wide=32, half=True)
    for dtype, batch, says in _LEDGER_CASES:
        inputs = torch.randn(batch, 3, 16, 16)
        asked = ledger.WorksBetween() if "between" in says else model
        count = partial(ledger.kept_by_module, asked, inputs)
        found = _sizes(answer(asked, inputs, dtype))
        if stayed := _hooked(asked):
            return stayed
        right = count(dtype)
        if equal(found, right):
            continue
        other = None if dtype else torch.bfloat16
        for mistake, nudge in [
            (
                count(other),
                "That is the other precision: is autocast on exactly when dtype is given?",
            ),
            (count(dtype, own=True), "That counts the model's own parameters and buffers."),
            (count(dtype, once=False), "A storage that two modules keep was counted for both."),
            (count(dtype, in_bytes=False), "That counts elements, not bytes."),
            (
                count(dtype, views=True),
                "That counts a view's own bytes. Its whole storage stays alive.",
            ),
            (
                count(dtype, ends=False),
                "What is kept after a child has ended is not that child's: note when one ends, too.",
            ),
        ]:
            if equal(found, mistake):
                return not_yet(says, nudge=nudge)
        name = next(n for n in [*right, *found] if found.get(n, 0) != right.get(n, 0))
        nudge = "Which module runs when pack is called? Hooks before and after it can say."
        return not_yet(
            f"{says}, module {name!r}",
            expected=right.get(name, 0),
            got=found.get(name, 0),
            nudge=nudge,
        )
    ran: list[torch.dtype] = []
    _note_dtypes(model, ran)
    answer(model, torch.randn(2, 3, 16, 16), torch.float16)
    return _wrong_dtype(ran) or correct("every storage once, for the module that keeps it first")


def _sizes(found: Any) -> dict[str, int]:
    """A learner's dictionary without the modules that keep nothing."""
    sizes = instance(Mapping, _IN_BYTES).returned(found)
    size = whole("a whole number of bytes for each module")
    read = {str(name): size.returned(value) for name, value in sizes.items()}
    return {name: value for name, value in read.items() if name and value}


def _hooked(model: nn.Module) -> Verdict | None:
    """The verdict on hooks that stay on a model, and run in every forward from then on."""
    left = [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    if not left:
        return None
    nudge = "Keep what register_forward_hook returns, and call its remove() at the end."
    return not_yet("hooks stay on the model after the call", got=", ".join(left[:3]), nudge=nudge)


_FATES = {
    "relu": ("halves", "It keeps its output, a 16-bit tensor under autocast."),
    "pool": ("stays", "It keeps the places of the maxima. Which type has an index?"),
    "gelu": ("halves", "It keeps its input, a 16-bit tensor under autocast."),
    "wide": (
        "grows",
        "Beside its input it keeps the weight that it multiplied with. Under autocast, "
        "is that the parameter itself?",
    ),
}


@takes(keys(dict.fromkeys(_FATES, one_of("halves", "stays", "grows"))))
def did_not_halve(answer: dict[str, str]) -> Verdict:
    """Exercise 5: what became of each module's bytes."""
    for name, (right, evidence) in _FATES.items():
        if verdict := judge(answer[name], right, name, expected="another", nudge=evidence):
            return verdict
    return correct("indices stay, and the copy of a large weight outweighs a small batch")


def _peak(states: int, per_image: int, batch: int) -> int:
    """Flat while the peak lies in the optimizer step, then a line with small steps."""
    workspace = per_image // 3 * (batch // 16 % 3)
    return max(int(1.3 * states), states + per_image * batch + workspace)


_EQUAL = "A peak that equals the limit still fits: is it `<=` everywhere?"
_CARDS = [
    Search(
        partial(_peak, states, per_image),
        limit,
        f"a step of {states} bytes and {per_image} an image, limit {limit}",
        nudge,
    )
    for states, per_image, limit, nudge in [
        (350_000_000, 25_700_000, CARD_BYTES, ""),
        (400_000_000, 12_900_000, CARD_BYTES, ""),
        (4_000_000_000, 310_000_000, CARD_BYTES, ""),
        (350_000_000, 25_700_000, _peak(350_000_000, 25_700_000, 300), _EQUAL),
        (4_000_000_000, 310_000_000, _peak(4_000_000_000, 310_000_000, 32), _EQUAL),
    ]
]


@takes(function())
def largest_on_card(answer: Callable[..., Any]) -> Verdict:
    """Exercise 6: the largest batch, in few simulations."""
    most = most_calls(
        answer,
        _CARDS,
        nudge=_largest_nudge,
        counted=lambda s: CountedPeak(s.peak, MOST_SIMULATIONS),
        stopped={
            "calls": (
                f"more than {MOST_SIMULATIONS} simulations",
                "Halving takes eleven. Two simulations give a line: where does it cross the limit?",
            )
        },
    )
    return correct(score=scored(most, PAR_SIMULATIONS, "simulations at most"))


def _largest_nudge(found: int, right: int, peak: CountedPeak) -> str:
    if found == right + 1:
        return "That is the first batch that does not fit."
    if found == right - 1:
        return _EQUAL
    return "A line is a guess: test the guess and its neighbours."


CAUSES = ("no scaler", "new scaler each step", "half with Adam")
_RUNS = {
    "run A": (
        "half with Adam",
        "In which step do the weights stop being finite, and are the gradients finite then?",
    ),
    "run B": (
        "new scaler each step",
        "The scale: which number should have fallen after the first overflow, and did not?",
    ),
    "run C": (
        "no scaler",
        "The loss is finite and does not move. How many gradients are exactly 0?",
    ),
}


@takes(keys({run: one_of(*CAUSES) for run in _RUNS}))
def diagnose(answer: dict[str, Any]) -> Verdict:
    """Exercise 7: which run has which fault."""
    for run, (cause, evidence) in _RUNS.items():
        if verdict := judge(answer[run], cause, run, expected="another cause", nudge=evidence):
            return verdict
    return correct("each fault leaves its own trace")
