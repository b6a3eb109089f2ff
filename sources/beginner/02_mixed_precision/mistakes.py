"""Answers to the exercises of lab 02 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from utils.labs.mistakes import KnownAnswers
from utils.memory import measure

from . import ledger

known = KnownAnswers()
FP16 = torch.float16

PARTS = "zero_grad forward scale backward step update"


def in_order(calls: str = PARTS, gives: str = "loss") -> Callable[..., Any]:
    """A step of these parts; it returns the loss, or the scaled one."""

    def amp_step(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> float:
        made: dict[str, torch.Tensor] = {}

        def forward() -> None:
            with torch.amp.autocast("cpu", dtype=FP16):
                made["loss"] = F.cross_entropy(model(inputs), labels)

        parts: dict[str, Callable[[], Any]] = {
            "zero_grad": optimizer.zero_grad,
            "forward": forward,
            "scale": lambda: made.update(scaled=scaler.scale(made["loss"])),
            "backward": lambda: made["scaled"].backward(),
            "plain_backward": lambda: made["loss"].backward(),
            "optimizer": optimizer.step,
            "step": lambda: scaler.step(optimizer),
            "update": scaler.update,
        }
        for call in calls.split():
            parts[call]()
        return made[gives].item()

    return amp_step


@known.mistake("amp_step", "Backward belongs outside")
def backward_inside(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> float:
    optimizer.zero_grad()
    with torch.amp.autocast("cpu", dtype=FP16):
        loss = F.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


@known.mistake("amp_step", "did not run in fp16")
def without_autocast(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> float:
    loss = F.cross_entropy(model(inputs), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


@known.mistake("amp_step", "inside of the `with`")
def loss_outside(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> float:
    optimizer.zero_grad()
    with torch.amp.autocast("cpu", dtype=FP16):
        outputs = model(inputs)
    loss = F.cross_entropy(outputs, labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


@known.mistake("amp_step", "`.item()`")
def loss_as_a_tensor(solution: Any, *given: Any) -> torch.Tensor:
    return torch.tensor(solution(*given))


known.mistakes(
    "amp_step",
    nothing_scaled=(in_order("zero_grad forward plain_backward optimizer"), "small gradients"),
    optimizer_steps=(
        in_order("zero_grad forward scale backward optimizer"),
        "use scaled gradients",
    ),
    no_update=(in_order("zero_grad forward scale backward step"), "scaler.update() is missing"),
    old_gradients=(in_order("forward scale backward step update"), "old gradients cleared"),
    gives_the_scaled_loss=(in_order(gives="scaled"), "unscaled loss"),
    update_after_optimizer=(
        in_order("zero_grad forward scale backward optimizer update"),
        "PyTorch refuses that order of calls scale -> backward -> update "
        "optimizer.step() would use scaled gradients",
    ),
    step_of_unscaled=(
        in_order("zero_grad forward plain_backward step update"),
        "Without scaler.scale(loss) small gradients become 0",
    ),
    update_of_unscaled=(
        in_order("zero_grad forward plain_backward optimizer update"),
        "PyTorch refuses",
    ),
)


def peak_of(
    p: int, kept: float, mixed: bool, state: int, copies: bool = True, half: bool = True
) -> float:
    """The right peak, or one with a part left out."""
    begins = (4 + state + 2 * (mixed and copies)) * p + kept / (2 if mixed and half else 1)
    return max(begins, (8 + state) * p)


def peak(formula: Callable[[int, int, bool, int], Any]) -> Callable[..., Any]:
    """A prediction of parameters, fp32 activations, whether it is mixed, and bytes of state."""
    return lambda p, per_image, batch, mixed, state: formula(p, per_image * batch, mixed, state)


known.mistakes(
    "predicted_peak",
    backward_alone=(
        peak(lambda p, a, m, s: (4 + s + 2 * m) * p + a / (1 + m)),
        "Which moment holds more",
    ),
    step_alone=(peak(lambda p, a, m, s: (8 + s) * p), "At a large batch another moment"),
    both_added=(peak(lambda p, a, m, s: (8 + s) * p + a), "never alive together"),
    always_adam=(peak(lambda p, a, m, s: peak_of(p, a, m, 8)), "That is Adam"),
    no_copies=(peak(lambda p, a, m, s: peak_of(p, a, m, s, copies=False)), "copies of the weights"),
    all_halved=(
        peak(lambda p, a, m, s: peak_of(p, a, False, s) / (2 if m else 1)),
        "States stay in fp32",
    ),
    nothing_halved=(peak(lambda p, a, m, s: peak_of(p, a, m, s, half=False)), "take half"),
    copies_at_the_step=(
        peak(lambda p, a, m, s: max((4 + s + 2 * m) * p + a / (1 + m), (8 + s + 2 * m) * p)),
        "are gone",
    ),
    no_return=(peak(lambda p, a, m, s: None), "returns nothing"),
)


def a_peak(
    autocast: bool = True, inverted: bool = False, steps: bool = True, unit: int = 1
) -> Callable[..., Any]:
    """A measurement of the peak, with what may go wrong in it."""

    def measured_peak(build: Any, batch: int, dtype: torch.dtype | None) -> Any:
        model, optimizer = build()
        images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
        enabled = autocast and (dtype is None if inverted else dtype is not None)

        def step() -> None:
            optimizer.zero_grad()
            with torch.amp.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            if steps:
                optimizer.step()

        found = measure(step, model=model, optimizer=optimizer, timed_steps=0)
        return found.peak_bytes // unit if unit else found

    return measured_peak


@known.mistake("measured_peak", "as many bytes and other numbers")
def measured_in_bf16(solution: Any, build: Any, batch: int, dtype: Any) -> int:
    return solution(build, batch, dtype and torch.bfloat16)


known.mistakes(
    "measured_peak",
    no_autocast=(a_peak(autocast=False), "Are forward and loss inside of autocast"),
    inverted=(a_peak(inverted=True), "Are forward and loss inside of autocast"),
    no_step=(a_peak(steps=False), "Does the step call it?"),
    in_mib=(a_peak(unit=2**20), "A whole step"),
    gives_the_measurement=(a_peak(unit=0), "a peak in bytes, a whole number"),
    a_constant=(lambda build, batch, dtype: 7_000_000 // 2, "A whole step"),
)


@known.right("measured_peak")
def images_drawn_in_the_call(build: Any, batch: int, dtype: torch.dtype | None) -> int:
    model, optimizer = build()

    def step() -> None:
        optimizer.zero_grad()
        with torch.amp.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            outputs = model(torch.randn(batch, 3, 32, 32))
            loss = F.cross_entropy(outputs, torch.randint(0, 10, (batch,)))
        loss.backward()
        optimizer.step()

    return measure(step, model=model, optimizer=optimizer, timed_steps=0).peak_bytes


def kept(**settings: bool) -> Callable[[nn.Module, Any, Any], dict[str, int]]:
    """A ledger by module with a mistake."""
    return lambda model, inputs, dtype: ledger.kept_by_module(model, inputs, dtype, **settings)


@known.mistake("kept_by_module", "as many bytes and other numbers")
def kept_in_bf16(solution: Any, model: Any, inputs: Any, dtype: Any) -> dict[str, int]:
    return solution(model, inputs, dtype and torch.bfloat16)


@known.mistake("kept_by_module", "is autocast on")
def ledger_without_autocast(solution: Any, model: Any, inputs: Any, dtype: Any) -> dict[str, int]:
    return solution(model, inputs, None)


@known.mistake("kept_by_module", "a dictionary from names")
def one_sum(solution: Any, *given: Any) -> int:
    return sum(solution(*given).values())


@known.mistake("kept_by_module", "Which module runs")
def all_in_the_last(solution: Any, *given: Any) -> dict[str, int]:
    return {"head": sum(solution(*given).values())}


@known.mistake("kept_by_module", "hooks stay on the model")
def keeps_its_hooks(solution: Any, model: nn.Module, *given: Any) -> dict[str, int]:
    for module in model.children():
        module.register_forward_hook(lambda *_: None)
    return solution(model, *given)


@known.right("kept_by_module")
def what_is_between_under_no_name(solution: Any, *given: Any) -> dict[str, int]:
    return {"": 4096} | solution(*given)


@known.right("kept_by_module")
def lists_what_keeps_nothing(solution: Any, *given: Any) -> dict[str, int]:
    return {"flat": 0} | solution(*given)


known.mistakes(
    "kept_by_module",
    bytes_of_views=(kept(views=True), "Its whole storage stays alive"),
    own_parameters=(kept(own=True), "own parameters and buffers"),
    kept_by_both=(kept(once=False), "was counted for both"),
    elements=(kept(in_bytes=False), "counts elements"),
    began_last=(kept(ends=False), "note when one ends"),
    no_return=(lambda *given: None, "returns nothing"),
)

known.mistakes(
    "did_not_halve",
    indices=({"pool": "halves"}, "Which type has an index"),
    copy_of_the_weight=({"wide": "halves"}, "is that the parameter itself"),
    gelu=({"gelu": "stays"}, "a 16-bit tensor"),
    a_ratio=({"relu": 0.5}, '"halves", "stays" or "grows"'),
)


@known.mistake("largest_on_card", "more than 8 simulations")
def every_batch(peak: Any, limit: int) -> int:
    batch = 1
    while peak(batch + 1) <= limit:
        batch += 1
    return batch


@known.mistake("largest_on_card", "Halving takes eleven")
def halving_alone(peak: Any, limit: int) -> int:
    low, high = 1, 2048
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= limit else (low, middle)
    return low


@known.mistake("largest_on_card", "A peak that equals the limit still fits")
def limit_left_out(solution: Any, peak: Any, limit: int) -> int:
    return solution(peak, limit - 1)


@known.mistake("largest_on_card", "test the guess and its neighbours")
def trusts_the_line(peak: Any, limit: int) -> int:
    one, two = peak(256), peak(512)
    return int(256 + (limit - one) * 256 / (two - one))


@known.mistake("largest_on_card", "first batch that does not fit")
def one_too_high(solution: Any, *given: Any) -> int:
    return solution(*given) + 1


@known.mistake("largest_on_card", "Is there a `return`?")
def no_return(solution: Any, *given: Any) -> None:
    solution(*given)


known.mistakes(
    "diagnose",
    a=({"run A": "no scaler"}, "gradients finite then"),
    b=({"run B": "half with Adam"}, "should have fallen"),
    another=({"run C": "too slow"}, "run C"),
)
