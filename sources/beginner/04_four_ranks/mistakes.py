"""Answers to the exercises of lab 04 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from utils.labs.mistakes import KnownAnswers

known = KnownAnswers()
known.mistakes(
    "ring_of_eight",
    payload=(4, "That is the payload"),
    factor_alone=(8, "factor for eight"),
    with_its_unit=("7 MB", "a number of MB"),
    out_of_the_blue=(123, "into the formula"),
    not_finite=(float("nan"), "no finite number"),
)
known.mistakes(
    "bytes_under_amp",
    half=("half", "What dtype"),
    a_bool=(True, '"half" or "same"'),
)
known.mistakes(
    "repeated_items",
    left_over=(3, "left over"),
    none=(0, "rounded up"),
)


def start(model: Any) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def start_parameters_alone(model: Any) -> None:
    for tensor in model.parameters():
        dist.broadcast(tensor.detach(), src=0)


def start_from_the_mean(model: Any) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(tensor.detach())


def average(model: Any) -> None:
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    parts = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter) / dist.get_world_size()


def average_by_tensor(model: Any) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def add_up(model: Any) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def divide_alone(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def average_a_copy(model: Any) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.clone())


def divide_by_four(model: Any) -> None:
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    parts = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter) / 4


def die(model: Any) -> None:
    if dist.get_rank() == 2:
        os._exit(1)


def never_end(model: Any) -> None:
    while True:
        time.sleep(0.01)


def by_hand(start_together: Any = start, average_gradients: Any = average) -> dict[str, Any]:
    return {"start_together": start_together, "average_gradients": average_gradients}


known.rights("by_hand", flat=by_hand())
known.mistakes(
    "by_hand",
    no_start=(by_hand(lambda model: None), "You forgot to broadcast the start"),
    parameters_alone=(by_hand(start_parameters_alone), "model.buffers()"),
    start_from_the_mean=(by_hand(start_from_the_mean), "not to rank 0's model"),
    add_up=(by_hand(average_gradients=add_up), "You forgot to divide by the world size"),
    average_by_tensor=(by_hand(average_gradients=average_by_tensor), "copy its parts back"),
    divide_by_four=(by_hand(average_gradients=divide_by_four), "Is the 4 written into it?"),
    average_a_copy=(by_hand(average_gradients=average_a_copy), "only its own gradients"),
    divide_alone=(by_hand(average_gradients=divide_alone), "divide once"),
    die=(by_hand(average_gradients=die), "rank 2 ended by itself with exit code 1"),
    fails=(by_hand(average_gradients=lambda model: model.nothing), "has no attribute 'nothing'"),
)
known.mistakes(
    "by_hand",
    timeout_seconds=1.5,
    never_end=(
        by_hand(average_gradients=never_end),
        "of never_end.  Look for a loop that never ends",
    ),
)


def sending(sizes: Any, ranks: int, link: float) -> list[float]:
    return [2 * (ranks - 1) / ranks * size / link for size in sizes]


def hidden(sizes: Any, ranks: int, link: float, backward: float) -> float:
    return max(0.0, sum(sending(sizes, ranks, link)) - backward)


def below_zero(sizes: Any, ranks: int, link: float, backward: float) -> float:
    return sum(sending(sizes, ranks, link)) - backward


def always_hidden(sizes: Any, ranks: int, link: float, backward: float) -> float:
    return sending(sizes, ranks, link)[-1]


def never_alone(sizes: Any, ranks: int, link: float, backward: float) -> float:
    *before, last = sending(sizes, max(ranks, 2), link)
    return max(0.0, sum(before) - backward) + last


known.mistakes(
    "exposed_seconds",
    payload=(lambda sizes, ranks, link, backward: sum(sizes) / link, "That is the payload"),
    all_sending=(
        lambda sizes, ranks, link, backward: sum(sending(sizes, ranks, link)),
        "all sending",
    ),
    hidden=(hidden, "Does the last bucket hide?"),
    below_zero=(below_zero, "never negative"),
    always_hidden=(always_hidden, "the last bucket alone"),
    never_alone=(never_alone, "nobody to send to"),
    a_constant=(lambda sizes, ranks, link, backward: 0.03, "begins when backward ends"),
    no_return=(lambda sizes, ranks, link, backward: None, "Is there a `return`?"),
)


@known.right("exposed_seconds")
def empties_the_list(sizes: Any, ranks: int, link: float, backward: float) -> float:
    done = 0.0
    while len(sizes) > 1:
        done += sending([sizes.pop(0)], ranks, link)[0]
    return max(done, backward) + sending(sizes, ranks, link)[0] - backward


def greedy(order: Any, fits: Any) -> Any:
    def make_buckets(sizes: list[int], cap: int) -> list[list[int]]:
        buckets: list[list[int]] = []
        for index in order(len(sizes)):
            total = sum(sizes[i] for i in buckets[-1]) if buckets else cap + 1
            if fits(total, sizes[index], cap):
                buckets[-1].append(index)
            else:
                buckets.append([index])
        return buckets

    return make_buckets


def backwards(count: int) -> range:
    return range(count - 1, -1, -1)


known.mistakes(
    "make_buckets",
    forwards=(greedy(range, lambda total, size, cap: total < cap), "last layer's gradients first"),
    closes_before_it_is_full=(
        greedy(backwards, lambda total, size, cap: total + size <= cap),
        "before it had reached",
    ),
    one_each=(greedy(backwards, lambda total, size, cap: False), "before it had reached"),
    one_more=(
        greedy(backwards, lambda total, size, cap: total <= cap),
        "one more parameter went in",
    ),
    the_first_alone=(lambda sizes, cap: [[0]], "exactly one bucket"),
    an_empty_one=(
        lambda sizes, cap: [[i] for i in backwards(len(sizes))] + [[]],
        "no bucket is empty",
    ),
    another_order=(lambda sizes, cap: [[3, 4], [1, 2], [0]], "Keep the order"),
)


def accumulating(scale: Any, quiet: bool = True) -> Any:
    def accumulate(model: Any, parts: list[Any]) -> None:
        tokens = torch.tensor(sum(len(targets) for _, targets in parts))
        local = tokens.item()
        dist.all_reduce(tokens)
        for number, (inputs, targets) in enumerate(parts):
            model.require_backward_grad_sync = number == len(parts) - 1 or not quiet
            loss = F.cross_entropy(model(inputs), targets, reduction="sum")
            (loss * scale(tokens.item(), local, len(targets), len(parts))).backward()

    return accumulate


def in_one_forward(model: Any, parts: list[Any]) -> None:
    inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    tokens = torch.tensor(len(targets))
    dist.all_reduce(tokens)
    loss = F.cross_entropy(model(inputs), targets, reduction="sum")
    (loss * dist.get_world_size() / tokens.item()).backward()


def counted_in_fp16(model: Any, parts: list[Any]) -> None:
    tokens = torch.tensor(sum(len(targets) for _, targets in parts), dtype=torch.float16)
    dist.all_reduce(tokens)
    for number, (inputs, targets) in enumerate(parts):
        model.require_backward_grad_sync = number == len(parts) - 1
        loss = F.cross_entropy(model(inputs), targets, reduction="sum")
        (loss * dist.get_world_size() / tokens.item()).backward()


known.mistakes(
    "accumulate",
    counted_in_fp16=(counted_in_fp16, "16 bits count exactly to 2,048"),
    mean_of_means=(
        accumulating(lambda total, local, here, parts: 1 / here / parts),
        "micro-batches' means",
    ),
    summed=(accumulating(lambda total, local, here, parts: 1 / total), "Who multiplies by it"),
    own_tokens=(accumulating(lambda total, local, here, parts: 1 / local), "this rank's tokens"),
    not_divided=(accumulating(lambda total, local, here, parts: 1.0), "of all ranks."),
    syncs_each_time=(
        accumulating(lambda total, local, here, parts: 2 / total, quiet=False),
        "no_sync()",
    ),
    in_one_forward=(in_one_forward, "accumulation is there to spare that"),
)


def mean_of_two(loss: torch.Tensor) -> float:
    loss = loss.nan_to_num()
    dist.all_reduce(loss)
    return loss.item() / 2


def mean_of_those_that_have_one(loss: torch.Tensor) -> float:
    losses = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    return torch.stack(losses).nanmean().item()


def mean_with_the_nan(loss: torch.Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def mean_of_all_but_one(loss: torch.Tensor) -> float:
    loss = loss.nan_to_num()
    dist.all_reduce(loss)
    return loss.item() / (dist.get_world_size() - 1)


def mean_with_zeros(loss: torch.Tensor) -> float:
    loss = loss.nan_to_num()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def written_in(loss: torch.Tensor) -> float:
    return 1.5


def as_a_tensor(loss: torch.Tensor) -> torch.Tensor:
    return torch.tensor(mean_of_those_that_have_one(loss))


def still_early(loss: torch.Tensor) -> float:
    return loss.item() if loss.isnan() else mean_of_those_that_have_one(loss)


known.mistakes(
    "deadlock",
    another_rank=({"rank": 0}, "waits in no collective"),
    another_collective=({"collective": "barrier"}, "It stood in"),
    rank_as_text=({"rank": "2"}, "the number of a rank"),
    mean_with_the_nan=({"cure": mean_with_the_nan}, "no finite number"),
    mean_with_zeros=({"cure": mean_with_zeros}, "A NaN is no loss of 0"),
    mean_of_all_but_one=({"cure": mean_of_all_but_one}, "Here two ranks have no loss"),
    written_in=({"cure": written_in}, "Is it written into it?"),
    as_a_tensor=({"cure": as_a_tensor}, "`.item()`"),
    still_early=(
        {"collective": "dist.all_gather()", "cure": still_early},
        "a collective that not all ranks call",
    ),
    mean_of_two=({"cure": mean_of_two}, "Is the 2 written into it"),
)
known.rights(
    "deadlock",
    as_the_course_spells_it={"collective": "all-gather", "cure": mean_of_those_that_have_one},
)
