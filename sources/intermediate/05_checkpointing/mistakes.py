"""Answers to the exercises of lab 05 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

from utils.labs.mistakes import KnownAnswers

from .block_choice import activation_peak, recompute_flops

known = KnownAnswers()
known.mistakes(
    "last_block",
    yes=("yes", "backward begins with it"),
    a_number=(3, '"yes" or "no"'),
    another_word=("maybe", '"yes" or "no"'),
)
known.rights("last_block", with_a_space=" No")
known.mistakes("best_segment", the_root=(6, "square root of 36"), one=(1, "Tensors alive"))
known.mistakes(
    "diagnosis",
    parameters=({"what differs": "parameters"}, "parameters() and buffers()"),
    gradients=({"what differs": "gradients"}, "parameters() and buffers()"),
    once=({"updates per step": 1}, "num_batches_tracked"),
    not_finite=({"updates per step": math.nan}, "no finite number"),
)
known.rights("diagnosis", capital={"what differs": "Buffers"})


def by_hooks(
    replay: bool = True, fork: bool = True, grad: bool = True, once: bool = True
) -> Callable[..., torch.Tensor]:
    def checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        state, numbers, again = torch.get_rng_state(), itertools.count(), []

        def unpack(number: int) -> torch.Tensor:
            guard = torch.random.fork_rng() if fork else contextlib.nullcontext()
            if not (once and again):
                again.clear()
                with guard, torch.set_grad_enabled(grad):
                    if replay:
                        torch.set_rng_state(state)
                    with torch.autograd.graph.saved_tensors_hooks(
                        lambda t: again.append(t.detach()), lambda t: t
                    ):
                        block(x)
            return again[number]

        with torch.autograd.graph.saved_tensors_hooks(lambda t: next(numbers), unpack):
            return block(x)

    return checkpointed


def keeps_all(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return block(x)


def borrowed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def borrowed_by_its_long_name(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


class AsAFunction(torch.autograd.Function):
    """The lesson's way: a backward inside of backward."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.block, ctx.state = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            out = ctx.block(x)
        torch.autograd.backward(out, gradients)
        return None, x.grad


def on_a_copy_with_gradients(block: nn.Module, x: torch.Tensor) -> Any:
    return AsAFunction.apply(block, x.detach().requires_grad_())


def memoised() -> Callable[..., torch.Tensor]:
    """Right on its first call for a block, and that call's result ever after."""
    kept: dict[int, torch.Tensor] = {}

    def checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if id(block) not in kept:
            kept[id(block)] = by_hooks()(block, x)
        return kept[id(block)]

    return checkpointed


def in_numpy(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Keeps every activation where no meter of tensors sees it."""
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach().numpy().copy(), torch.from_numpy
    ):
        return block(x)


known.mistakes(
    "checkpointed",
    as_a_function=(AsAFunction.apply, "It has no gradients"),
    function_of_a_copy=(on_a_copy_with_gradients, "hides the weights from autograd"),
    memoised=(memoised(), "Every call computes block(x) anew"),
    in_numpy=(in_numpy, "its activations were kept somewhere"),
    borrowed=(borrowed, "it calls torch.utils.checkpoint"),
    borrowed_by_its_long_name=(borrowed_by_its_long_name, "it calls torch.utils.checkpoint"),
    another_mask=(by_hooks(replay=False), "Dropout drew another mask"),
    random_state_moved=(by_hooks(fork=False), "moved the random state"),
    no_gradients_in_recomputation=(by_hooks(grad=False), "ran again without gradients"),
    once_for_each_tensor=(by_hooks(once=False), "for each tensor that was saved"),
    no_return=(lambda block, x: None, "returns nothing"),
    gives_its_input=(lambda block, x: x, "no gradients"),
    keeps_all=(keeps_all, "still keeps activations"),
    doubled=(lambda block, x: block(x) * 2, "the block's own"),
)


def plan(edges: Callable[..., int], insides: Callable[..., int]) -> Callable[..., int]:
    def predicted_bytes(layers: int, edge: int, inside: int, every: int) -> int:
        chosen = len(range(0, layers, every)) if every else 0
        return edges(layers, chosen) * edge + insides(layers, chosen, every) * inside

    return predicted_bytes


known.mistakes(
    "predicted_bytes",
    forgets_what_is_recomputed=(plan(lambda n, c: n, lambda n, c, k: n - c), "being recomputed"),
    one_too_many=(plan(lambda n, c: n, lambda n, c, k: n - c + 1), "One inside too many"),
    at_least_one=(
        plan(lambda n, c: n, lambda n, c, k: max(n - c, 1)),
        "the last block is a checkpointed one",
    ),
    not_finite=(lambda *asked: math.nan, "a whole number of bytes"),
    a_text=(lambda *asked: "many", "a whole number of bytes"),
    no_return=(lambda layers, edge, inside, every: None, "returns nothing"),
    an_edge_too_few=(
        lambda solution, n, edge, inside, k: solution(n, edge, inside, k) - edge * (k == 1),
        "Every block's input stays",
    ),
    a_constant=(lambda n, edge, inside, k: 7, "Walk backward"),
)


def by_ratio(costs: list[Any], limit: int) -> set[int]:
    """Greedy: the most bytes per operation first, until the peak fits."""
    chosen: set[int] = set()
    order = sorted(range(len(costs)), key=lambda i: -costs[i].inside_bytes / costs[i].flops)
    for index in order:
        if activation_peak(costs, chosen) <= limit:
            break
        chosen.add(index)
    return chosen


def by_sum(costs: list[Any], limit: int) -> set[int]:
    """Fits the sum of what is kept, and forgets the block that is being recomputed."""
    sizes = sum(c.input_bytes for c in costs)
    sets = [s for n in range(len(costs) + 1) for s in itertools.combinations(range(len(costs)), n)]
    fits = [
        s
        for s in sets
        if sizes + sum(c.inside_bytes for i, c in enumerate(costs) if i not in s) <= limit
    ]
    return set(min(fits, key=lambda s: recompute_flops(costs, s), default=range(len(costs))))


def all_sets(fits: Callable[[int, int], bool]) -> Callable[[list[Any], int], set[int]]:
    """The cheapest of all sets whose peak and limit are found to fit."""

    def best_set(costs: list[Any], limit: int) -> set[int]:
        sets = [
            s for n in range(len(costs) + 1) for s in itertools.combinations(range(len(costs)), n)
        ]
        fit = [s for s in sets if fits(activation_peak(costs, s), limit)]
        return set(min(fit, key=lambda s: recompute_flops(costs, s)))

    return best_set


def free_of_charge(costs: list[Any], limit: int) -> set[int]:
    for cost in costs:
        object.__setattr__(cost, "flops", 0)
    return set(range(len(costs)))


known.mistakes(
    "best_set",
    below=(all_sets(operator.lt), "`<=`, not `<`"),
    free_of_charge=(free_of_charge, "changed the costs"),
    all_of_them=(lambda costs, limit: set(range(len(costs))), "times the optimum"),
    none_of_them=(lambda costs, limit: set(), "over the budget"),
    last_block=(lambda costs, limit: {len(costs) - 1}, "The last block gives nothing back"),
    no_block=(lambda costs, limit: {99}, "is no block"),
    by_ratio=(by_ratio, "good guess"),
    by_sum=(by_sum, "sums of bytes saved"),
)
known.right("best_set", "1.000")(all_sets(operator.le))
known.rights(
    "best_set",
    a_list=lambda solution, *given: list(solution(*given)),
    a_tuple=lambda solution, *given: tuple(solution(*given)),
    a_frozen_set=lambda solution, *given: frozenset(solution(*given)),
)


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


known.mistakes(
    "chunked_loss",
    mean_of_means_with_nan=(
        in_chunks(mean_of, lambda parts, labels, n: sum(parts) / n),
        "without any label",
    ),
    mean_of_means=(
        in_chunks(
            lambda h, w, t: mean_of(h, w, t).nan_to_num(), lambda parts, t, n: sum(parts) / n
        ),
        "a mean of means",
    ),
    over_all_tokens=(
        in_chunks(sum_of, lambda parts, labels, n: sum(parts) / len(labels)),
        "divides by all",
    ),
    a_sum=(in_chunks(sum_of, lambda parts, labels, n: sum(parts)), "That is the sum"),
    not_recomputed=(in_chunks(sum_of, counted), "Chunks alone keep all"),
    chunks_of_its_own=(
        lambda h, w, t, n: in_chunks(recomputed, counted)(h, w, t, 16),
        "does not follow `chunks`",
    ),
    tail_left_out=(
        in_chunks(recomputed, counted, cut=whole_chunks_alone),
        "Where do the other 4 go",
    ),
    not_finite=(lambda *args: torch.tensor(math.nan, requires_grad=True), "without any label"),
    a_float=(lambda *args: 3.0, "one loss: a tensor without"),
    two_losses=(lambda *args: torch.ones(2, requires_grad=True), "Add up the losses"),
    hidden_detached=(lambda h, w, t, n: sum_of(h.detach(), w, t) / 156, "Is a chunk detached"),
    head_detached=(
        in_chunks(lambda h, w, t: sum_of(h, w.detach(), t) + 0 * w.sum(), counted),
        "Is a chunk detached",
    ),
)
known.rights(
    "chunked_loss",
    equal_chunks=in_chunks(recomputed, counted, torch.chunk),
    tensor_split=in_chunks(recomputed, counted, torch.tensor_split),
)


def recomputed_in(enter: Callable[[Any], Any], leave: Callable[[Any, Any], None]) -> Any:
    """A checkpoint whose recomputation changes each norm by `enter` and puts it back by `leave`."""

    def cured_checkpoint(block: Any, x: torch.Tensor) -> torch.Tensor:
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


def no_momentum(block: Any) -> float:
    before, block[1].momentum = block[1].momentum, 0.0
    return before


def copied_counter(block: Any) -> torch.Tensor:
    before = block[1].num_batches_tracked
    block[1].num_batches_tracked = before.clone()
    return before


def put_counter(block: Any, before: torch.Tensor) -> None:
    block[1].num_batches_tracked = before


def cure(norms: Callable[[nn.Module], Any], leaves: float | None = None) -> Any:
    """The solution on the norms of a block, which puts back a momentum of its own if given."""

    def enter(block: Any) -> list[Any]:
        found = [part for part in norms(block) if isinstance(part, nn.BatchNorm1d)]
        before: list[Any] = [(norm, norm.momentum, norm.num_batches_tracked) for norm in found]
        for norm, _, counter in before:
            norm.momentum, norm.num_batches_tracked = 0.0, counter.clone()
        return before

    def leave(block: Any, before: list[Any]) -> None:
        for norm, momentum, counter in before:
            norm.momentum, norm.num_batches_tracked = leaves or momentum, counter

    return recomputed_in(enter, leave)


def momentum_at_zero() -> Any:
    def leave(block: Any, before: Any) -> None:
        put_counter(block, before)
        block[1].momentum = 0.0

    def enter(block: Any) -> torch.Tensor:
        block[1].momentum = 0.0
        return copied_counter(block)

    return recomputed_in(enter, leave)


known.mistakes(
    "cured_checkpoint",
    no_cure=(lambda block, x: checkpoint(block, x, use_reentrant=False), "6 updates in 3 steps"),
    momentum_alone=(
        recomputed_in(no_momentum, lambda block, m: setattr(block[1], "momentum", m)),
        "a momentum of None",
    ),
    counter_alone=(recomputed_in(copied_counter, put_counter), "still move in recomputation"),
    no_checkpoint=(lambda block, x: block(x), "nothing is recomputed"),
    momentum_of_its_own=(cure(nn.Module.modules, leaves=0.1), "not a number of your own"),
    first_level=(cure(nn.Module.children), "goes all the way down"),
    eval_mode=(recomputed_in(lambda b: b.eval(), lambda b, _: b.train()), "in eval mode"),
    momentum_stays_zero=(momentum_at_zero(), "in `finally`"),
)
known.rights("cured_checkpoint", every_norm=cure(nn.Module.modules))


@known.right("cured_checkpoint")
def norms_without_statistics(solution: Any, block: Any, x: torch.Tensor) -> Any:
    bare = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    solution(bare, torch.randn(8, 4)).sum().backward()
    assert next(bare.parameters()).grad is not None
    return solution(block, x)
