"""The ground under lab 07's streamed block: runs it on a counting link, and names what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from utils.labs.checkpoint_probe import backward
from utils.labs.kinds import tensor
from utils.labs.verdict import Verdict, correct, not_yet
from utils.memory import host_memory, measure
from utils.units import format_bytes

RESULT = tensor()
WIDTH, ROWS = 64, 48
Weights = dict[str, Tensor]


class CountingLink:
    """Copies, and counts their bytes in each direction."""

    def __init__(self) -> None:
        self.bytes = {"up": 0, "down": 0}

    def up(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        self.bytes["up"] += tensor.nbytes
        return tensor.detach().clone()

    def down(self, tensor: Tensor) -> Tensor:
        """A copy in host memory."""
        self.bytes["down"] += tensor.nbytes
        with host_memory():
            return tensor.detach().clone()


class Residual(nn.Module):
    """The exercise's block; counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.runs = [0]

    def forward(self, x: Tensor) -> Tensor:
        """x + down(gelu(up(norm(x))))"""
        self.runs[0] += 1
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def exercise_block() -> tuple[Residual, Weights]:
    """A block without memory of its own, and its weights on the host, by name."""
    block = Residual()
    with host_memory():
        weights = {
            name: p.detach().clone().requires_grad_() for name, p in block.named_parameters()
        }
    return block.to("meta"), weights


def judge_streamed(answer: Callable[..., Any]) -> Verdict:
    """The verdict on a streamed block: numbers, runs, traffic, and bytes kept after forward."""
    block, weights = exercise_block()
    plain = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    x, link = torch.randn(ROWS, WIDTH), CountingLink()
    here, there = (x.clone().requires_grad_() for _ in range(2))
    block.runs[0] = 0
    found = RESULT.returned(answer(block, weights, there, link))
    after_forward = dict(link.bytes)
    wanted = functional_call(_quiet(block), plain, (here,))
    if found.shape != wanted.shape or not torch.equal(found, wanted):
        return not_yet(
            "the result is not the block's own",
            nudge="functional_call(block, copies, (x,)) gives it.",
        )
    wanted.square().sum().backward()
    if not found.requires_grad:
        nudge = "Copies made by `link.up` have no past. What must carry the gradient back to the host's weights?"
        return not_yet("the result carries no gradient", nudge=nudge)
    backward(found.square().sum())
    return (
        _wrong_gradients(weights, plain, there, here)
        or _wrong_runs(block)
        or _wrong_traffic(link, after_forward, weights)
        or _kept(answer)
        or _not_fetched(link, after_forward)
        or correct("after forward the device holds the activations, and no matrix of weights")
    )


def _quiet(block: Residual) -> Residual:
    other = copy.copy(block)
    other.runs = [0]
    return other


def _wrong_gradients(
    weights: Weights, plain: Weights, there: Tensor, here: Tensor
) -> Verdict | None:
    missing = [name for name, weight in weights.items() if weight.grad is None]
    if missing:
        nudge = (
            "A copy is a leaf of its own, and its gradient stays with it. A torch.autograd.Function whose "
            "forward is `link.up` can send the gradient down in its backward."
        )
        return not_yet(
            f"the host's weights have no gradient: {', '.join(missing[:3])}", nudge=nudge
        )
    pairs = [(w.grad, plain[name].grad) for name, w in weights.items()] + [(there.grad, here.grad)]
    for found, wanted in pairs:
        if (
            found is None
            or wanted is None
            or not torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
        ):
            return not_yet(
                "the gradients are not those of the plain block",
                nudge="Does unpack give the tensor back in the same layout as pack was given it?",
            )
    return None


def _wrong_runs(block: Residual) -> Verdict | None:
    if block.runs[0] == 1:
        return None
    nudge = "The lesson's block computes twice. Here activations stay; only weights are forgotten."
    return not_yet(
        "how often the block ran", expected="once", got=f"{block.runs[0]} times", nudge=nudge
    )


def _wrong_traffic(link: CountingLink, forward: dict[str, int], weights: Weights) -> Verdict | None:
    size = sum(w.nbytes for w in weights.values())
    if forward["down"]:
        return not_yet(
            "something goes down in forward",
            expected="nothing",
            got=format_bytes(forward["down"]),
            nudge="Activations stay where they are. What should pack return for them?",
        )
    if link.bytes["down"] != size:
        return not_yet(
            "bytes sent down",
            expected=f"each gradient once, {format_bytes(size)}",
            got=format_bytes(link.bytes["down"]),
            nudge="Through `link.down`, and once.",
        )
    if forward["up"] != size or link.bytes["up"] > 2 * size:
        return not_yet(
            "bytes brought up",
            expected=f"once for forward, at most once more for backward, "
            f"{format_bytes(2 * size)} in all",
            got=format_bytes(link.bytes["up"]),
            nudge="A weight that backward asks for twice may be fetched once.",
        )
    return None


def _not_fetched(link: CountingLink, forward: dict[str, int]) -> Verdict | None:
    if link.bytes["up"] > forward["up"]:
        return None
    nudge = "The device cannot read host memory: what backward needs comes up by `link.up` again."
    return not_yet("backward had its weights without the link", nudge=nudge)


def _kept(answer: Callable[..., Any]) -> Verdict | None:
    (plain, runs), (found, ran) = _alive(None), _alive(answer)
    if ran < runs:
        nudge = "Is a result kept from one call to the next? Every call computes block(x) anew."
        return not_yet("the block does not run in every call of your function", nudge=nudge)
    weights = exercise_block()[1].values()
    matrices, smallest = (
        sum(w.nbytes for w in weights if w.dim() > 1),
        min(w.nbytes for w in weights),
    )
    beyond = found - plain
    if beyond > smallest:
        nudge = "Autograd saves the weights that the products need. What does your pack return for those?"
        if beyond <= matrices:  # the norm's, which is saved as it is, is gone
            nudge = "A linear layer saves a *transposed view* of its weight: the same storage, another tensor."
        return not_yet(
            "weights are still on the device after forward",
            expected="activations alone",
            got=f"{format_bytes(beyond)} more",
            nudge=nudge,
        )
    return None


def _alive(answer: Callable[..., Any] | None) -> tuple[int, int]:
    """Bytes on the device after forward, beside a plain block's weights; and how often it ran."""
    block, weights = exercise_block()
    block.runs[0] = 0
    holder = nn.ParameterList([nn.Parameter(w.detach()) for w in weights.values()])
    named = dict(zip(weights, holder, strict=True))
    x, kept = torch.randn(ROWS, WIDTH).requires_grad_(), []

    def step() -> None:
        kept.clear()
        kept.append(
            answer(block, named, x, CountingLink())
            if answer
            else functional_call(block, named, (x,))
        )

    found = measure(step, model=holder, timed_steps=0)
    return found.timeline.at(found.timeline.end_ns).total_bytes, block.runs[0]
