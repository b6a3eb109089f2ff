"""How the check of lab 05 looks at a checkpoint by hand: gradients, random state, what stays."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from utils.labs.cases import scored
from utils.labs.kinds import Kind, NotYet, WrongKind, tensor
from utils.labs.verdict import Verdict, correct, not_yet
from utils.memory import measure
from utils.units import format_bytes

KEPT_SHARE = 0.5  # of what plain forward keeps: below it a checkpoint by hand must stay
_UNPACK = (
    "saved_tensors_hooks(pack, unpack), in this order: pack is given a tensor in forward and may "
    "return anything, unpack is given that in backward and returns a tensor."
)
_TORCH = str(Path(torch.__file__).parent)


def _read_result(value: Any) -> Tensor:
    value = tensor().read(value)
    if not value.is_floating_point():
        raise WrongKind("")
    if not value.requires_grad:
        raise WrongKind("It has no gradients. Was it computed from the inputs, and not detached?")
    return value


RESULT = Kind("a tensor of numbers with gradients", _read_result)


def _read_loss(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.dim():
        raise WrongKind("Add up the losses of the chunks.")
    return RESULT.read(value)


LOSS = Kind("one loss: a tensor without dimensions, with gradients", _read_loss)


class Noisy(nn.Module):
    """Linear layers with dropout: keeps three tensors a layer.

    `runs` has an entry for every forward: whether gradients were enabled in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[bool] = []
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(torch.is_grad_enabled())
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3)
        return x


def noisy_gradients(function: Any, model: nn.Module, x: Tensor) -> tuple[list[Any], Tensor]:
    """The result and the gradients, and the random state that backward leaves.

    Raises:
        NotYet: the result is no tensor, or has no gradients.
    """
    torch.manual_seed(4)
    out = RESULT.returned(function(model, x))
    torch.rand(3)  # somebody else draws between forward and backward
    backward(out.square().sum())
    return [out.detach(), *(p.grad for p in model.parameters())], torch.get_rng_state()


def backward(loss: Tensor) -> None:
    """The backward of what a learner's function returned.

    Raises:
        NotYet: PyTorch refuses what the learner's code left for backward. An error of a line of
            theirs goes through as it is, and is shown with that line.
    """
    try:
        loss.backward()
    except (RuntimeError, TypeError) as error:
        files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
        if any(not file.startswith((_TORCH, __file__)) for file in files):
            raise
        reason = str(error).partition("\n")[0]
        nudge = _UNPACK if "unpack_hook" in reason else ""
        raise NotYet(
            not_yet("backward through your result fails", got=reason, nudge=nudge)
        ) from error


def kept_bytes(function: Any, model: nn.Module, x: Tensor) -> int:
    """Bytes alive when forward is over, beside the model."""
    model.zero_grad()
    held: list[Tensor] = []

    def step() -> None:
        held[:] = [RESULT.returned(function(model, x))]

    found = measure(step, model=model, timed_steps=0)
    alive = found.timeline.at(found.timeline.end_ns)
    return alive.total_bytes - alive.state_bytes


@contextlib.contextmanager
def calls_of_torch_s_own() -> Iterator[list[str]]:
    """Inside, calls of functions of `torch.utils.checkpoint` are noted, under whatever name."""
    before, calls = sys.getprofile(), []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def fails_under_grad(function: Any, block: nn.Module, x: Tensor) -> Verdict | None:
    """The verdict on a result that `torch.autograd.grad` cannot lead back to the block's weights."""
    weights = list(block.parameters())
    try:
        torch.autograd.grad(RESULT.returned(function(block, x)).square().sum(), weights)
    except RuntimeError as error:
        nudge = (
            "An autograd.Function whose backward calls backward hides the weights from autograd: "
            "hooks around block(x) do not."
        )
        got = str(error).partition("\n")[0]
        return not_yet(
            "torch.autograd.grad finds no way to the block's weights", got=got, nudge=nudge
        )
    return None


def ran_without_gradients(block: Noisy) -> Verdict | None:
    """The verdict on a second run in which gradients were off; None if there was none."""
    if len(block.runs) < 2 or block.runs[-1]:
        return None
    nudge = "Backward calls hooks with gradients off: torch.enable_grad() around the second run."
    return not_yet("the block ran again without gradients, so that it saved nothing", nudge=nudge)


def wrong_gradients(
    found: list[Any], left: Tensor, block: Noisy, plain: Noisy, x: Tensor
) -> Verdict | None:
    """The verdict on a result, gradients or a random state that are not the plain block's."""
    wanted, after = noisy_gradients(lambda block, x: block(x), plain, x)
    if not torch.equal(found[0], wanted[0]):
        nudge = "Forward runs as ever; only what is saved changes."
        return not_yet("the result is not the block's own", nudge=nudge)
    if any(gradient is None for gradient in found):
        nudge = "Is forward run with gradients enabled?"
        return ran_without_gradients(block) or not_yet("a parameter has no gradient", nudge=nudge)
    if not same_tensors(found, wanted):
        nudge = "Dropout drew another mask. Which state must be the same when the block runs again?"
        return not_yet("the gradients are not those of the plain block", nudge=nudge)
    if not torch.equal(after, left):
        nudge = "torch.random.fork_rng(devices=[]) puts back the state that was there before."
        return not_yet("backward moved the random state: the next dropout differs", nudge=nudge)
    return None


def runs_too_often(block: Noisy) -> Verdict | None:
    """The verdict on a block that ran more than twice."""
    if len(block.runs) <= 2:
        return None
    nudge = "One second run can answer for all: for each tensor that was saved it ran again."
    return not_yet(
        "how often the block ran",
        expected="twice: in forward, and once in backward",
        got=f"{len(block.runs)} times",
        nudge=nudge,
    )


def kept_after_forward(answer: Callable[..., Any], plain: Noisy, x: Tensor, ran: int) -> Verdict:
    """The verdict on the bytes that stay alive until backward: the score; the par is PyTorch's own.

    `ran` is how often the block ran in a forward and a backward.
    """
    own = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    (whole, runs), (par, _), (kept, found) = (
        _kept_and_runs(f, plain, x) for f in (lambda block, x: block(x), own, answer)
    )
    if found < runs:
        nudge = "Is a result kept from one call to the next? Every call computes block(x) anew."
        return not_yet("the block does not run in every call of your function", nudge=nudge)
    limit = KEPT_SHARE * whole
    if kept > limit:
        nudge = "What does your pack hook return? A tensor that it returns stays alive."
        return not_yet(
            "forward still keeps activations",
            expected=f"at most {format_bytes(limit)}",
            got=format_bytes(kept),
            nudge=nudge,
        )
    if ran < 2:
        nudge = (
            "The meter sees tensors. Copies in another form, such as numpy's, take memory as well."
        )
        return not_yet(
            "backward did not run the block again: its activations were kept somewhere", nudge=nudge
        )
    return correct(score=scored(kept, par, "alive after forward", format_bytes))


def _kept_and_runs(function: Any, block: Noisy, x: Tensor) -> tuple[int, int]:
    before = len(block.runs)
    return kept_bytes(function, block, x), len(block.runs) - before


def same_tensors(left: list[Any], right: list[Any]) -> bool:
    """Whether all are there, and equal bit by bit."""
    pairs = zip(left, right, strict=True)
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
