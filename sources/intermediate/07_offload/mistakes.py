"""Answers to the exercises of lab 07 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from utils.labs.mistakes import KnownAnswers

from . import offload_choice as choice
from .run import StreamedRun

known = KnownAnswers()
known.mistakes(
    "without_offload",
    what_it_divides=(14, "How many ranks"),
    weights=(2, "A part of one"),
    a_share=(0.875, "That is a share"),
)


def by_rule(hides: Any, after: bool = True, count: bool = True) -> Callable[..., float]:
    def exposed_seconds(
        p: float, tokens: float, m: int, flops: float, link: float, streams: bool
    ) -> float:
        compute, down, up = 8 * p * tokens / flops, 2 * p / link, (4 * p if streams else 0) / link
        last = 0.0 if streams or not after else 2 * p / link
        return (m if count else 1) * hides(compute, down, up) + last

    return exposed_seconds


known.mistakes(
    "exposed_seconds",
    one_direction_waits=(by_rule(lambda c, d, u: max(0.0, d + u - c)), "Down and up run at once"),
    nothing_after=(
        by_rule(lambda c, d, u: max(0.0, max(d, u) - c), after=False),
        "no compute to hide behind",
    ),
    one_micro_batch=(
        by_rule(lambda c, d, u: max(0.0, max(d, u) - c), count=False),
        "one micro-batch",
    ),
    negative=(by_rule(lambda c, d, u: max(d, u) - c), "nothing is gained"),
    the_whole_step=(by_rule(lambda c, d, u: max(c, d, u)), "the whole step"),
    a_constant=(lambda *asked: 7.0, "For each micro-batch"),
    no_return=(lambda *asked: None, "returns nothing"),
)


class Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, link: Any) -> torch.Tensor:
        ctx.link = link
        return link.up(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, None]:
        return ctx.link.down(gradients[0]), None


def fetched(weights: Any, link: Any) -> dict[str, torch.Tensor]:
    return {name: Fetch.apply(weight, link) for name, weight in weights.items()}


def keeps_weights(block: Any, weights: Any, x: Any, link: Any) -> Any:
    return functional_call(block, fetched(weights, link), (x,))


def copies_are_leaves(block: Any, weights: Any, x: Any, link: Any) -> Any:
    copies = {name: link.up(weight).requires_grad_() for name, weight in weights.items()}
    return functional_call(block, copies, (x,))


def no_gradient(block: Any, weights: Any, x: Any, link: Any) -> Any:
    with torch.no_grad():
        return functional_call(block, {n: link.up(w) for n, w in weights.items()}, (x,))


def computes_twice(block: Any, weights: Any, x: Any, link: Any) -> Any:
    def run(x: Any) -> Any:
        return functional_call(block, fetched(weights, link), (x,))

    return checkpoint(run, x, use_reentrant=False)


def with_hooks(
    is_weight: Any, swapped: bool = False, over_the_link: bool = True
) -> Callable[..., Any]:
    def streamed(block: Any, weights: Any, x: Any, link: Any) -> Any:
        copies = fetched(weights, link)

        def pack(tensor: Any) -> Any:
            name = next((n for n, c in copies.items() if is_weight(tensor, c)), None)
            return tensor if name is None else (name, tensor.size(), tensor.stride())

        def unpack(packed: Any) -> Any:
            if isinstance(packed, torch.Tensor):
                return packed
            weight = weights[packed[0]]
            return (link.up(weight) if over_the_link else weight).as_strided(*packed[1:])

        hooks = (unpack, pack) if swapped else (pack, unpack)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            y = functional_call(block, copies, (x,))
        if not swapped:  # where pack runs in backward, it still looks names up
            copies.clear()
        return y

    return streamed


def is_its_view(tensor: Any, copy: Any) -> bool:
    return tensor is copy or tensor._base is copy


def memoised() -> Callable[..., Any]:
    """Right on its first call for a block, and that call's result ever after."""
    kept: dict[int, Any] = {}

    def streamed(block: Any, *given: Any) -> Any:
        if id(block) not in kept:
            kept[id(block)] = with_hooks(is_its_view)(block, *given)
        return kept[id(block)]

    return streamed


def activations_go_down(block: Any, weights: Any, x: Any, link: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(link.down, link.up):
        return functional_call(block, fetched(weights, link), (x,))


known.mistakes(
    "streamed",
    keeps_weights=(keeps_weights, "What does your pack return"),
    memoised=(memoised(), "Every call computes block(x) anew"),
    swapped=(
        with_hooks(is_its_view, swapped=True),
        "in this order: pack is given a tensor in forward",
    ),
    past_the_link=(with_hooks(is_its_view, over_the_link=False), "cannot read host memory"),
    views_kept=(with_hooks(lambda tensor, copy: tensor is copy), "transposed view"),
    copies_are_leaves=(copies_are_leaves, "the host's weights have no gradient"),
    no_gradient=(no_gradient, "carries no gradient"),
    computes_twice=(computes_twice, "The lesson's block computes twice"),
    activations_go_down=(activations_go_down, "Activations stay where they are"),
    gives_its_input=(lambda block, weights, x, link: x, "functional_call(block, copies"),
    no_return=(lambda block, weights, x, link: None, "returns nothing"),
)
known.rights("streamed", view_by_its_base=with_hooks(is_its_view))


def largest_first(items: Any, card: float, host: float, *_: float) -> set[int]:
    chosen: set[int] = set()
    for index in sorted(range(len(items)), key=lambda i: -items[i].device_bytes):
        if choice.on_card(items, chosen) > card and choice.on_host(items, chosen | {index}) <= host:
            chosen.add(index)
    return chosen


def of_all_sets(
    here: Callable[[float, float], bool] = operator.le,
    there: Callable[[float, float], bool] = operator.le,
) -> Callable[..., set[int]]:
    """The fastest of all sets that are found to fit card and host."""

    def best_choice(items: Any, card: float, host: float, *rates: float) -> set[int]:
        numbers = range(len(items))
        sets = [s for n in range(len(items) + 1) for s in itertools.combinations(numbers, n)]
        fit = [s for s in sets if here(choice.on_card(items, s), card)]
        fit = [s for s in fit if there(choice.on_host(items, s), host)]
        return set(min(fit, key=lambda s: choice.offloaded_seconds(items, s, *rates)))

    return best_choice


def free_of_charge(items: Any, *limits: float) -> set[int]:
    for item in items:
        object.__setattr__(item, "host_bytes", 0)
    return set(range(len(items)))


def fewest_link_bytes(items: Any, card: float, host: float, *_: float) -> set[int]:
    sets = [
        set(s) for n in range(len(items) + 1) for s in itertools.combinations(range(len(items)), n)
    ]
    fit = [s for s in sets if choice.on_card(items, s) <= card and choice.on_host(items, s) <= host]
    return min(fit, key=lambda s: sum(items[i].down_bytes + items[i].up_bytes for i in s))


known.mistakes(
    "best_choice",
    none_of_them=(lambda items, *_: set(), "the card is over its limit"),
    all_of_them=(lambda items, *_: set(range(len(items))), "the host is over its limit"),
    no_item=(lambda items, *_: {99}, "is no item"),
    a_text=(lambda items, *_: "ab", "a set of item numbers"),
    fewest_link_bytes=(fewest_link_bytes, "which direction is full"),
    card_alone=(of_all_sets(there=lambda taken, limit: True), "The host has a limit, too"),
    below_the_hosts_limit=(of_all_sets(there=operator.lt), "`<=`, not `<`"),
    below_the_cards_limit=(of_all_sets(here=operator.lt), "`<=`, not `<`"),
    free_of_charge=(free_of_charge, "changed the items"),
    largest_first=(largest_first, "which direction is full"),
)
known.rights("best_choice", all_sets=of_all_sets())
known.mistakes(
    "diagnosis",
    weights_alone=({"waits": 48}, "Gradients are waited for"),
    one_a_block=({"waits": 18}, "one a block"),
    half_idle=({"idle seconds": 54.0}, "look at its attributes"),
    forward_alone=({"least seconds": 15.0}, "forward alone"),
    one_pass=({"least seconds": 2.5}, "what must the device do itself"),
)
known.rights("diagnosis", reckoned={"waits": 72, "idle seconds": 108.0, "least seconds": 60.0})


def in_turn(
    ahead: bool, waits_for_all: bool, gradients_late: bool = True
) -> Callable[[StreamedRun], None]:
    def pipelined(run: StreamedRun) -> None:
        numbers = [*range(run.blocks), *reversed(range(run.blocks))]
        coming, going = {}, []

        def ask(block: int) -> None:
            coming[block] = [run.send_up(block, tensor) for tensor in range(run.tensors)]

        for place, block in enumerate(numbers):
            if block not in coming:
                ask(block)
            for ticket in coming[block] if waits_for_all else coming[block][-1:]:
                ticket.wait()
            following = (*numbers, None)[place + 1]
            if ahead and following not in (None, block):
                ask(following)
            (run.forward if place < run.blocks else run.backward)(block)
            if place >= run.blocks:
                going = [run.send_down(block, tensor) for tensor in range(run.tensors)]
                if not gradients_late:
                    going[-1].wait()
            coming[block] = [] if following == block else coming.pop(block)
            if following != block:
                coming.pop(block, None)
                run.release(block)
            elif waits_for_all is False:
                coming[block] = [_Here()]
        going[-1].wait()

    return pipelined


class _Here:
    def wait(self) -> None:
        """Nothing: it is there."""


known.mistakes(
    "pipelined",
    nothing_done=(lambda run: None, "0 passes ran"),
    never_asks=(lambda run: run.forward(0), "0 of its 4 tensors were asked for"),
    too_many_asked=(lambda run: [run.send_up(b, 0) for b in range(3)], "release one first"),
    never_waits=(
        lambda run: (run.send_up(0, 0), [run.send_up(0, t) for t in range(4)], run.forward(0)),
        "still on their way",
    ),
    one_after_the_other=(in_turn(ahead=False, waits_for_all=False), "before you compute this one"),
    waits_for_every_tensor=(in_turn(ahead=True, waits_for_all=True), "Each call of wait costs"),
    waits_for_gradients=(
        in_turn(ahead=True, waits_for_all=False, gradients_late=False),
        "until the end of the step",
    ),
)


@known.right("pipelined", "1.011 times the par's seconds")
def keeps_the_last_block_alone(run: StreamedRun) -> None:
    in_turn(ahead=True, waits_for_all=False)(run)
