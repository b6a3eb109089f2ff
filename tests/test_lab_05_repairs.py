"""The checks of lab 05 on a loss in chunks and on batch norm's cure: wrong answers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_lab_05 import nudged
from torch import nn
from torch.utils.checkpoint import checkpoint

from utils.labs.verdict import Status
from utils.lessons.lesson_05 import checks as lab_05


def in_chunks(
    each: Callable[..., Any], end: Callable[..., Any], cut: Callable[..., Any] = torch.chunk
) -> Callable[..., Any]:
    def chunked_loss(hidden: Any, head: Any, labels: Any, chunks: int) -> Any:
        pairs = zip(cut(hidden, chunks), cut(labels, chunks), strict=True)
        return end([each(h, head, wanted) for h, wanted in pairs], labels, chunks)

    return chunked_loss


def sum_of(hidden: Any, head: Any, labels: Any) -> Any:
    return F.cross_entropy(hidden @ head.T, labels, ignore_index=-100, reduction="sum")


def mean_of(hidden: Any, head: Any, labels: Any) -> Any:
    return F.cross_entropy(hidden @ head.T, labels, ignore_index=-100)


def counted(parts: list[Any], labels: Any, chunks: int) -> Any:
    return sum(parts) / (labels != -100).sum()


def recomputed(*pair: Any) -> Any:
    return checkpoint(sum_of, *pair, use_reentrant=False)


def whole_chunks_alone(tokens: torch.Tensor, chunks: int) -> list[torch.Tensor]:
    size = len(tokens) // chunks
    return [tokens[start * size : (start + 1) * size] for start in range(chunks)]


@pytest.mark.parametrize("cut", [torch.chunk, torch.tensor_split])
def test_chunks_may_be_cut_in_other_ways(cut: Callable[..., Any]) -> None:
    assert lab_05.chunked_loss(in_chunks(recomputed, counted, cut)).status is Status.CORRECT


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (in_chunks(mean_of, lambda parts, labels, n: sum(parts) / n), "without any label"),
        (
            in_chunks(
                lambda h, w, t: mean_of(h, w, t).nan_to_num(), lambda parts, t, n: sum(parts) / n
            ),
            "a mean of means",
        ),
        (in_chunks(sum_of, lambda parts, labels, n: sum(parts) / len(labels)), "divides by all"),
        (in_chunks(sum_of, lambda parts, labels, n: sum(parts)), "That is the sum"),
        (in_chunks(sum_of, counted), "Chunks alone keep all"),
        (
            lambda h, w, t, n: in_chunks(recomputed, counted)(h, w, t, 16),
            "does not follow `chunks`",
        ),
        (in_chunks(recomputed, counted, cut=whole_chunks_alone), "Where do the other 4 go"),
        (lambda *args: torch.tensor(math.nan, requires_grad=True), "without any label"),
        (lambda *args: 3.0, "one loss: a tensor without"),
        (lambda *args: torch.ones(2, requires_grad=True), "Add up the losses"),
        (lambda h, w, t, n: sum_of(h.detach(), w, t) / 156, "Is a chunk detached"),
        (
            in_chunks(lambda h, w, t: sum_of(h, w.detach(), t) + 0 * w.sum(), counted),
            "Is a chunk detached",
        ),
    ],
)
def test_losses_in_chunks_that_fail(answer: Any, words: str) -> None:
    nudged(lab_05.chunked_loss(answer), words)


# Exercise 5 -------------------------------------------------------------------------------------


def recomputed_in(enter: Callable[[Any], Any], leave: Callable[[Any, Any], None]) -> Any:
    """A checkpoint whose recomputation changes each norm by `enter` and puts it back by `leave`."""

    def cured_checkpoint(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        @contextlib.contextmanager
        def changed() -> Any:
            before = enter(block)
            try:
                yield
            finally:
                leave(block, before)

        contexts = lambda: (contextlib.nullcontext(), changed())  # noqa: E731
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    return cured_checkpoint


def no_momentum(block: nn.Module) -> float:
    before, block[1].momentum = block[1].momentum, 0.0
    return before


def copied_counter(block: nn.Module) -> torch.Tensor:
    before = block[1].num_batches_tracked
    block[1].num_batches_tracked = before.clone()
    return before


def put_counter(block: nn.Module, before: torch.Tensor) -> None:
    block[1].num_batches_tracked = before


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda block, x: checkpoint(block, x, use_reentrant=False), "6 updates in 3 steps"),
        (
            recomputed_in(no_momentum, lambda block, m: setattr(block[1], "momentum", m)),
            "a momentum of None",
        ),
        (recomputed_in(copied_counter, put_counter), "still move in recomputation"),
        (lambda block, x: block(x), "nothing is recomputed"),
    ],
)
def test_cures_of_batch_norm_that_fail(answer: Any, words: str) -> None:
    nudged(lab_05.cured_checkpoint(answer), words)


def cure(norms: Callable[[nn.Module], Any], leaves: float | None = None) -> Any:
    """The solution on the norms of a block, which puts back a momentum of its own if given."""

    def enter(block: nn.Module) -> list[Any]:
        found = [part for part in norms(block) if isinstance(part, nn.BatchNorm1d)]
        before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in found]
        for norm, _, counter in before:
            norm.momentum, norm.num_batches_tracked = 0.0, counter.clone()
        return before

    def leave(block: nn.Module, before: list[Any]) -> None:
        for norm, momentum, counter in before:
            norm.momentum, norm.num_batches_tracked = leaves or momentum, counter

    return recomputed_in(enter, leave)


def test_a_cure_finds_every_norm_and_puts_back_its_own_momentum() -> None:
    assert lab_05.cured_checkpoint(cure(nn.Module.modules)).status is Status.CORRECT
    nudged(lab_05.cured_checkpoint(cure(nn.Module.modules, leaves=0.1)), "not a number of your own")
    nudged(lab_05.cured_checkpoint(cure(nn.Module.children)), "goes all the way down")


def test_a_cure_by_eval_mode() -> None:
    answer = recomputed_in(lambda block: block.eval(), lambda block, _: block.train())
    nudged(lab_05.cured_checkpoint(answer), "in eval mode")


def test_a_cure_that_leaves_the_momentum_at_zero() -> None:
    def leave(block: nn.Module, before: Any) -> None:
        put_counter(block, before)
        block[1].momentum = 0.0

    def enter(block: nn.Module) -> torch.Tensor:
        block[1].momentum = 0.0
        return copied_counter(block)

    nudged(lab_05.cured_checkpoint(recomputed_in(enter, leave)), "in `finally`")
