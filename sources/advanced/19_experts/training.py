"""Training loops of lesson 19: ten steps on ranks, and some more on text."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from utils.data import text_tokens
from utils.models.transformer import Transformer, TransformerConfig

from .exchange import gathered_counts
from .layers import Compute, small_model

BATCH, LENGTH, WORDS = 8, 16, 64
_HELD_OUT = 6500


class Losses(list[float]):
    """Losses by step, with all experts' gradients at the first step, in one vector."""

    first_gradient: Tensor


def train(
    model: Any,
    after_backward: Callable[[Any], None] = lambda model: None,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 10,
    added_loss: Callable[[Any], Any] = lambda model: 0.0,
) -> Losses:
    """Losses of the next token over all ranks' tokens, a batch of eight sequences divided over them.

    Args:
        model: of this rank.
        after_backward: what it does to gradients before the step.
        make: the optimizer's class.
        steps: how many.
        added_loss: of the model after its forward, beside the loss of the next token.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer, losses, gradient = make(model.parameters(), lr=0.01), [], torch.zeros(0)
    for step in range(steps):
        tokens = counting(step).chunk(ranks)[rank]
        optimizer.zero_grad()
        loss = next_token_loss(model, tokens)
        (loss + added_loss(model)).backward()
        after_backward(model)
        if step == 0:
            gradient = experts_gradient(model)
        optimizer.step()
        losses.append(loss.detach() / ranks)
    total = torch.stack(losses)
    dist.all_reduce(total)
    found = Losses(total.tolist())
    found.first_gradient = gradient
    return found


def experts_gradient(model: Any) -> Tensor:
    """Gradients of all experts of all layers in one vector, in one order however ranks share them."""
    parts = []
    for block in model.blocks:
        experts, count = block.feedforward.experts, block.feedforward.router.shape[1]
        for p in experts.parameters():
            mine = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            whole = mine.new_zeros(count, *mine.shape[1:])
            whole[experts.first : experts.first + len(mine)] = mine
            dist.all_reduce(whole)
            replicas = dist.get_world_size() * len(mine) // count
            parts.append(whole.flatten() / replicas)
    return torch.cat(parts)


def counting(step: int) -> Tensor:
    """Eight sequences (8, 17) that count up from a random place by 1, 2 or 3, modulo 64."""
    drawn = torch.Generator().manual_seed(step)
    first = torch.randint(WORDS, (BATCH, 1), generator=drawn)
    by = torch.randint(1, 4, (BATCH, 1), generator=drawn)
    return (first + by * torch.arange(LENGTH + 1)) % WORDS


def rows_sent(mixture: Compute, route: Callable[..., Any]) -> Tensor:
    """Rows of each rank (down) for each rank (across), in the first layer at the first step."""
    given: list[Any] = []
    model, ranks = small_model(mixture), dist.get_world_size()
    experts = model.blocks[0].feedforward.experts
    experts.register_forward_pre_hook(lambda module, inputs: given.append(inputs))
    model(counting(0).chunk(ranks)[dist.get_rank()][:, :-1])
    x, router, k = given[0]
    choice, _, p = route(x, router, k)
    held = p.shape[1] // ranks
    return gathered_counts(choice, p, held).view(ranks, ranks, held).sum(-1)


def next_token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Mean loss of the next token, of sequences (B, S + 1)."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Matrices as small as here take longer on several threads, which wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _text() -> Tensor:
    return text_tokens(400_000).long()


@one_thread()
def train_on_text(
    layer: Callable[[], Any],
    added_loss: Callable[[Any], Any],
    after_step: Callable[[Any], None],
    seed: int,
    steps: int = 70,
) -> tuple[Any, Tensor]:
    """A block with `layer()` as its feed-forward, trained on the standard library's bytes.

    Args:
        layer: makes the layer, which notes `load` in forward, the rows of each expert.
        added_loss: of the layer, beside the loss of the next token.
        after_step: what is done to the layer after each step.
        seed: of weights and batches.
        steps: how many.

    Returns:
        The model, and the rows of each expert by step, (steps, E).
    """
    torch.manual_seed(seed)
    model: Any = Transformer(TransformerConfig(hidden=64, layers=1, heads=4))
    model.init_weights(std=0.05)
    made = model.blocks[0].feedforward = layer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    text, loads = _text(), []
    for _ in range(steps):
        starts = torch.randint(len(text) - _HELD_OUT - 65, (BATCH,)).tolist()
        loss = next_token_loss(model, torch.stack([text[a : a + 65] for a in starts]))
        optimizer.zero_grad()
        (loss + added_loss(made)).backward()
        optimizer.step()
        after_step(made)
        loads.append(made.load)
    return model, torch.stack(loads)


@one_thread()
def held_out(model: Any) -> float:
    """Loss of the next token on text that the model has not seen."""
    with torch.no_grad():
        return next_token_loss(model, _text()[-_HELD_OUT:].view(-1, 65)).item()
