"""Answers to the exercises of lab 01 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from utils.labs.mistakes import KnownAnswers

from .ledger import SavesAView, ledger

known = KnownAnswers()


@known.mistake("state_bytes", "counts numbers")
def numbers_instead_of_bytes(solution: Any, parameter_count: int, optimizer: str) -> int:
    return solution(parameter_count, optimizer) // 4


@known.mistake("state_bytes", "is missing")
def states_without_gradients(solution: Any, parameter_count: int, optimizer: str) -> int:
    return solution(parameter_count, optimizer) - 4 * parameter_count


known.mistakes(
    "state_bytes",
    states_of_adam_for_all=(lambda count, optimizer: 16 * count, "does this optimizer keep"),
    no_return=(lambda count, optimizer: None, "returns nothing"),
)


def there_before(model: nn.Module, inputs: torch.Tensor) -> set[int]:
    """Addresses of storages that forward does not make."""
    before = [*model.parameters(), *model.buffers(), inputs]
    return {tensor.untyped_storage().data_ptr() for tensor in before}


def counted(total: Callable[[list[torch.Tensor], set[int]], int]) -> Callable[..., int]:
    """A ledger that adds up what it kept in its own way."""

    def saved_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
        own = there_before(model, inputs)
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            output = model(inputs)
        found = total(kept, own)
        del output
        return found

    return saved_bytes


def storages(kept: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in kept]


def bytes_of_views(kept: list[torch.Tensor], own: set[int]) -> int:
    return sum({t.data_ptr(): t.nbytes for t in kept if t.data_ptr() not in own}.values())


@known.mistake("saved_bytes", "counts a buffer")
def buffers_counted(model: nn.Module, inputs: torch.Tensor) -> int:
    return ledger(model, inputs, own=[*model.parameters(), inputs])


@known.mistake("saved_bytes", "it counts the inputs")
def of_the_lesson(model: nn.Module, inputs: torch.Tensor) -> int:
    return ledger(model, inputs, own=[*model.parameters(), *model.buffers()])


@known.mistake("saved_bytes", "Is anything fixed")
def a_constant(model: nn.Module, inputs: torch.Tensor) -> int:
    torch.manual_seed(1)
    return ledger(SavesAView(), torch.randn(16, 32))


@known.mistake("saved_bytes", "The address of one that is gone is used again")
def tensors_gone_while_it_counts(model: nn.Module, inputs: torch.Tensor) -> int:
    own = there_before(model, inputs)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
        model(inputs)
    return sum(kept.values())


known.mistakes(
    "saved_bytes",
    views_counted_twice=(
        counted(lambda kept, own: sum(size for at, size in storages(kept) if at not in own)),
        "counted twice",
    ),
    parameters_counted=(
        counted(lambda kept, own: sum(dict(storages(kept)).values())),
        "what the model owns",
    ),
    elements=(
        counted(lambda kept, own: sum(t.numel() for t in kept)),
        "not of views or elements",
    ),
    sizes_of_views=(counted(bytes_of_views), "not of views"),
    gives_the_output=(lambda model, inputs: model(inputs), "a whole number of bytes"),
    gives_a_tensor=(lambda model, inputs: model(inputs).sum(), "`.item()`"),
)


def search(
    peak_bytes_at: Callable[[int], int], limit_bytes: int, fits: Any = None, first: int = 1
) -> int:
    """The solution, with another comparison or another first batch."""
    fits = fits or (lambda batch: peak_bytes_at(batch) <= limit_bytes)
    low, high = 0, first
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@known.mistake("largest_batch", "measure the guess and its neighbours")
def a_straight_line(peak_bytes_at: Callable[[int], int], limit_bytes: int) -> int:
    one, two = peak_bytes_at(1), peak_bytes_at(2)
    return max(0, (limit_bytes - 2 * one + two) // (two - one))


@known.mistake("largest_batch", "Begin at 1, and double")
def catches_what_stops_it(peak_bytes_at: Callable[[int], int], limit_bytes: int) -> int:
    def fits(batch: int) -> bool:
        try:
            return peak_bytes_at(batch) <= limit_bytes
        except Exception:  # noqa: BLE001
            return False

    return search(peak_bytes_at, limit_bytes, fits, first=1 << 20)


@known.mistake("largest_batch", "halve the distance")
def every_batch(peak_bytes_at: Callable[[int], int], limit_bytes: int) -> int:
    batch = 0
    while peak_bytes_at(batch + 1) <= limit_bytes:
        batch += 1
    return batch


@known.mistake("largest_batch", "power of two")
def doubling_alone(peak_bytes_at: Callable[[int], int], limit_bytes: int) -> int:
    batch = 1
    while peak_bytes_at(2 * batch) <= limit_bytes:
        batch *= 2
    return batch


@known.mistake("largest_batch", "does not fit")
def one_too_high(solution: Any, *given: Any) -> int:
    return solution(*given) + 1


@known.mistake("largest_batch", "Not even one")
def at_least_one(solution: Any, *given: Any) -> int:
    return max(1, solution(*given))


known.mistakes(
    "largest_batch",
    limit_left_out=(
        lambda peak, limit: search(peak, limit, lambda batch: peak(batch) < limit),
        "A peak that equals the limit still fits",
    ),
    huge_first_batch=(
        lambda peak, limit: search(peak, limit, first=1 << 20),
        "ran out of memory",
    ),
    no_return=(lambda peak, limit: None, "returns nothing"),
)

MULTIPLE = "temporaries / parameters at the peak"
HELPS = "half the batch lowers the peak by a tenth or more"
known.mistakes(
    "read_timeline",
    backward=({"phase of the peak": "backward"}, "triangle"),
    one_block=({MULTIPLE: 1}, "blue block"),
    nan=({MULTIPLE: float("nan")}, "no finite number"),
    a_number=({HELPS: 0}, "without quotes"),
    blames_the_batch=({HELPS: True}, "that grows with the batch"),
)

_held: list[Any] = []  # what steps keep beyond their end


def trained(model: Any, optimizer: Any, inputs: Any, labels: Any, **backward: Any) -> torch.Tensor:
    """The solution's step; gives the loss with its graph."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward(**backward)
    optimizer.step()
    return loss


def gradients_in_place(retains: bool) -> Callable[..., None]:
    """A step that fills its gradients with zeros, and keeps them."""

    def cured_step(model: Any, optimizer: Any, inputs: Any, labels: Any, history: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward(retain_graph=retains)
        optimizer.step()
        history.append(loss.item())

    return cured_step


@known.mistake("cured_step", "loss.item()")
def keeps_tensors(*args: Any) -> None:
    args[-1].append(trained(*args[:4]))


@known.mistake("cured_step", "holds the graph")
def keeps_the_graph_elsewhere(*args: Any) -> None:
    _held.append(trained(*args[:4], retain_graph=True))
    args[-1].append(_held[-1].item())


@known.mistake("cured_step", "backward frees nothing")
def graph_retained_for_the_step(*args: Any) -> None:
    args[-1].append(trained(*args[:4], retain_graph=True).item())


@known.mistake("cured_step", "of other still alive")
def leaks_something_else(*args: Any) -> None:
    _held.append(torch.zeros(1000))
    args[-1].append(trained(*args[:4]).item())


@known.mistake("cured_step", "The order is")
def old_gradients_added(model: Any, optimizer: Any, inputs: Any, labels: Any, history: Any) -> None:
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    history.append(loss.item())


@known.mistake("cured_step", "one Python number")
def records_nothing(*args: Any) -> None:
    trained(*args[:4])


known.mistakes(
    "cured_step", zeros_and_a_retained_graph=(gradients_in_place(True), "backward frees nothing")
)
known.rights("cured_step", zeros_instead_of_none=gradients_in_place(False))


def in_parts(parts: int, divide: bool = True, late: bool = False) -> Callable[..., None]:
    """A step over parts of the batch, with what may go wrong in it."""

    def lean_step(model: Any, optimizer: Any, inputs: Any, labels: Any) -> None:
        optimizer.zero_grad()
        losses: list[Any] = []
        for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
            losses.append(F.cross_entropy(model(x), y) / (parts if divide else 1))
            if not late:
                losses.pop().backward()
        if late:
            torch.stack(losses).sum().backward()
        optimizer.step()

    return lean_step


@known.mistake("lean_step", "old gradients are alive")
def as_wasteful_as_before(model: Any, optimizer: Any, inputs: Any, labels: Any) -> None:
    loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@known.mistake("lean_step", "Do old gradients stay")
def nothing_cleared(model: Any, optimizer: Any, inputs: Any, labels: Any) -> None:
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


known.mistakes(
    "lean_step",
    early_alone=(in_parts(1), "Must the whole batch be in memory at once?"),
    too_few_parts=(in_parts(4), "change with the size of a part"),
    one_backward_for_all_parts=(in_parts(4, late=True), "does a graph of one part stay"),
    parts_summed=(in_parts(32, divide=False), "the mean over a part have to be divided by"),
    nothing_done=(lambda *given: None, "could not be measured"),
)
known.rights("lean_step", in_128_parts=in_parts(128))
