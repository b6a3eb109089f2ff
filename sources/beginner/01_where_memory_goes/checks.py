"""Checks of lesson and lab 01, "Where does the memory go?"."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from utils.labs.cases import Case, Exercise, Question, judge, scored, takes
from utils.labs.kinds import NotYet, equal, flag, function, keys, number, one_of, text, whole
from utils.labs.searches import CountedPeak, Search, most_calls
from utils.labs.verdict import Verdict, correct, not_yet
from utils.memory import Category, Measurement, measure
from utils.units import format_bytes

from .ledger import SavesAView, ledger

MOST_CALLS, PAR_CALLS = 40, 28
MEMORY = 4  # times the limit: what the machine has, in exercise 3
LEANER = 1.35  # times lower than the wasteful step's: what freeing gradients early cannot reach
PAR_PARTS = 32  # of the batch, in exercise 6

momentum_bytes = Question(
    "Lesson 01: bytes per parameter of SGD with momentum, in fp32.",
    number("one number of bytes, all added up,"),
    right=12,
    wrong={
        3: "That is how many numbers. How many bytes does each take?",
        4: "That is the momentum alone. What else does training keep?",
        8: "Either the momentum or the gradients are missing.",
        16: "That is Adam. Momentum keeps one number per parameter, not two.",
    },
    nudge="Count the numbers per parameter, then four bytes each.",
    expected="bytes per parameter of weights, gradients and momentum together",
    note="weights 4, gradients 4, momentum 4",
)

doubled_batch = Question(
    "Lesson 01: 2 GiB of states and 4 GiB that grows with the batch, doubled.",
    number("a number of GiB"),
    right=10,
    within=0.5,
    wrong={12: "That doubles everything. The states do not know the batch."},
    nudge="Which part of the 6 GiB grows with the batch, and which stays?",
    expected="states + twice the rest, in GiB",
    note="2 GiB of states stay, 4 GiB become 8",
)

peak_moves = Question(
    "Lesson 01: with smaller activations the peak moves towards the end of backward.",
    one_of("half", "less"),
    right="less",
    wrong={
        "half": "That holds only if the peak stays where it is. Look at the end of backward: "
        "what is alive there does not shrink with activations."
    },
    note="the peak moves to a later moment, where more of the gradients are alive",
)


def _states(count: int, optimizer: str, numbers: int) -> Case:
    right = 4 * numbers * count
    wrong = {
        right // 4: "That counts numbers. Each takes four bytes.",
        right - 4 * count: "One of weights, gradients and state is missing.",
    }
    return Case((count, optimizer), right, f"for {count} parameters and {optimizer!r}", wrong)


state_bytes = Exercise(
    "Exercise 1: bytes of parameters, gradients and optimizer state.",
    [
        _states(count, optimizer, numbers)
        for count in (1000, 7)
        for optimizer, numbers in [("sgd", 2), ("momentum", 3), ("adam", 4)]
    ],
    nudge="Which numbers does this optimizer keep for each parameter, beside weight and gradient?",
    note="8, 12 and 16 bytes per parameter",
)


@takes(function())
def saved_bytes(answer: Callable[[nn.Module, torch.Tensor], int]) -> Verdict:
    """Exercise 2: the ledger, on a network that saves views, a buffer and parameters."""
    torch.manual_seed(1)
    model, inputs, more = SavesAView(), torch.randn(16, 32), torch.randn(24, 32)
    count = partial(ledger, model, inputs)
    owned = "That counts what the model owns. Leave its storages out."
    wrong = {
        **dict.fromkeys((count(own=[]), count(own=[inputs])), owned),
        count(own=[*model.parameters(), inputs]): "That counts a buffer of the model.",
        count(
            own=[*model.parameters(), *model.buffers()]
        ): "That is the lesson's ledger: it counts the inputs, which stood there before.",
        count(once=False): "A storage with two views was counted twice.",
    }
    whole_bytes = whole("a whole number of bytes")
    found, right = whole_bytes.returned(answer(model, inputs)), count()
    nudge = "Bytes of whole storages, not of views or elements?"
    if found < right:
        nudge = (
            f"{nudge} Is every saved tensor alive while you count? The address of one that is "
            "gone is used again: keep the output, and return `tensor.detach()` from pack."
        )
    if verdict := judge(found, right, "a batch of 16", wrong=wrong, nudge=nudge):
        return verdict
    found = whole_bytes.returned(answer(model, more))
    nudge = "The first batch was right. Is anything fixed, or kept from one call to the next?"
    verdict = judge(found, ledger(model, more), "a batch of 24", nudge=nudge)
    return verdict or correct(
        "every storage once, none that stood there before", score=format_bytes(right)
    )


def _peak(per_item: int, batch: int) -> int:
    """Grows with the batch, with a step every 32 items, so that no straight line fits."""
    return 100 + per_item * batch + 64 * (batch // 32)


_EQUAL = "A peak that equals the limit still fits: is it `<=` everywhere?"
_SEARCHES = [
    Search(
        partial(_peak, per_item),
        limit,
        f"a step that grows by {per_item} bytes an item and more at times, limit {limit}",
        nudge,
    )
    for per_item, limit, nudge in [
        (10, 1000, ""),
        (1, 1000, ""),
        (7, 100_000, ""),
        (600, 1000, ""),
        (2000, 1000, ""),
        (10, _peak(10, 70), _EQUAL),
        (10, _peak(10, 64), _EQUAL),
        (500, _peak(500, 1), _EQUAL),
    ]
]


@takes(function())
def largest_batch(answer: Callable[[Callable[[int], int], int], int]) -> Verdict:
    """Exercise 3: the answer must be exact, in few calls, without a batch that cannot be run."""
    most = most_calls(
        answer,
        _SEARCHES,
        nudge=_batch_nudge,
        counted=lambda s: CountedPeak(s.peak, MOST_CALLS, MEMORY * s.limit),
        stopped={
            "calls": (
                f"more than {MOST_CALLS} measurements",
                "Double the batch until it fails, then halve the distance.",
            ),
            "bytes": (
                "a step ran out of memory before it could be measured",
                f"The machine has {MEMORY} times the limit. Begin at 1, and double.",
            ),
        },
    )
    return correct(score=scored(most, PAR_CALLS, "measurements at most"))


def _batch_nudge(found: int, right: int, peak: CountedPeak) -> str:
    if right == 0:
        return "Not even one item fits here. What does your function return then?"
    if found == right + 1:
        return "That is the smallest batch that does not fit. The one before it is wanted."
    if len(peak.calls) < 4:
        return "A straight line through a few batches is a guess: measure the guess and its neighbours."
    if found == right - 1:
        return _EQUAL
    if found & (found - 1) == 0 and found < right:
        return "Doubling alone finds a power of two. Search between it and the next."
    return "Keep one batch that fits and one that does not, until they are neighbours."


_READ = {
    "phase of the peak": text("the name of a phase, in quotes,"),
    "temporaries / parameters at the peak": number("a number, how many times as high,"),
    "half the batch lowers the peak by a tenth or more": flag(),
}


@takes(keys(_READ))
def read_timeline(answer: dict[str, Any]) -> Verdict:
    """Exercise 4: the same network is measured again, and the answers are compared."""
    right = _wide_and_short()
    ratio = right.breakdown[Category.TEMPORARIES] / right.breakdown[Category.PARAMETERS]
    phase, multiple, helps = (answer[name] for name in _READ)
    return (
        judge(
            phase,
            str(right.peak_phase),
            "the phase",
            expected="the one that holds the peak",
            nudge="The triangle marks the peak. Which name stands above that background?",
        )
        or judge(
            multiple,
            ratio,
            "the temporaries",
            expected="a multiple of the parameters",
            within=0.25,
            nudge="Compare the heights of the grey and the blue block below the triangle.",
        )
        or judge(
            helps,
            False,
            "the batch",
            expected="the other",
            nudge="Does anything that grows with the batch live in that phase?",
        )
        or correct(
            f"{right.peak_phase}, {ratio:.1f} times the parameters, and the batch is innocent"
        )
    )


@cache
def _wide_and_short() -> Measurement:
    """The network of exercise 4: a wide embedding, of which a step uses a handful of rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20_000, 64), nn.Flatten(), nn.Linear(16 * 64, 10))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    tokens, labels = torch.randint(0, 20_000, (8, 16)), torch.randint(0, 10, (8,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()

    return measure(step, model=model, optimizer=optimizer, items=8, timed_steps=0)


@takes(function())
def cured_step(answer: Callable[..., Any]) -> Verdict:
    """Exercise 5: the same training, the same history, nothing left behind."""
    history: list[Any] = []
    kept_gradients: list[bool] = []

    def noted(model: nn.Module, *given: Any) -> Any:
        hook = model.register_forward_pre_hook(
            lambda *_: kept_gradients.append(any(p.grad is not None for p in model.parameters()))
        )
        try:
            return answer(model, *given, history)
        finally:
            hook.remove()

    run, _ = _measured(noted, timed_steps=1)
    if [type(entry) for entry in history] != [float] * 3:
        got = f"{len(history)} entries of {type(history[-1]).__name__ if history else 'nothing'}"
        nudge = "A tensor takes memory, and one with a history keeps its graph. `loss.item()` is a number."
        return not_yet("one Python number per step", got=got, nudge=nudge)
    if problem := _left_behind(run):
        return problem
    losses: list[float] = []
    plain, _ = _measured(lambda *given: losses.append(_plain_step(*given)), timed_steps=1)
    if not equal(history, losses, relative=1e-5):
        nudge = "The order is zero_grad, forward, backward, step; the value is that step's loss."
        return not_yet("the losses differ", expected=losses, got=history, nudge=nudge)
    limit = plain.peak_bytes
    if run.peak_bytes > limit and kept_gradients[-1]:
        limit = _measured(_step_in_place)[0].peak_bytes
    if run.peak_bytes > limit:
        nudge = "Nothing is left after the step, but backward frees nothing. Look at retain_graph."
        return not_yet(
            "the peak of the step",
            expected=f"at most {format_bytes(limit)}",
            got=format_bytes(run.peak_bytes),
            nudge=nudge,
        )
    return correct("nothing stays but the states")


def _left_behind(run: Measurement) -> Verdict | None:
    left = run.timeline.at(run.timeline.end_ns)
    for category, nudge in [
        (
            Category.ACTIVATIONS,
            "Who still holds the graph after backward? Look at retain_graph, "
            "and for a tensor with a history that is kept.",
        ),
        (Category.OTHER, "Which tensor does your step keep, in a list or a global name?"),
    ]:
        if left[category] > 0:
            what = f"{format_bytes(left[category])} of {category.value} still alive after the step"
            return not_yet(what, expected="model, gradients and optimizer alone", nudge=nudge)
    return None


def _measured(step: Callable[..., Any], timed_steps: int = 0) -> tuple[Measurement, nn.Module]:
    """A step on the network of exercises 5 and 6, and that network afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(512, 256), torch.randint(0, 10, (512,))
    try:
        run = measure(
            lambda: step(model, optimizer, inputs, labels),
            model=model,
            optimizer=optimizer,
            timed_steps=timed_steps,
        )
    except ValueError as error:
        raise NotYet(not_yet(f"the step could not be measured: {error}")) from None
    return run, model


def _plain_step(
    model: nn.Module, optimizer: Any, inputs: torch.Tensor, labels: torch.Tensor
) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def _step_in_place(
    model: nn.Module, optimizer: Any, inputs: torch.Tensor, labels: torch.Tensor
) -> None:
    """A plain step whose gradients are filled with zeros, and stay."""
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def _wasteful_step(
    model: nn.Module, optimizer: Any, inputs: torch.Tensor, labels: torch.Tensor
) -> None:
    loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _step_in_parts(
    model: nn.Module, optimizer: Any, inputs: torch.Tensor, labels: torch.Tensor
) -> None:
    optimizer.zero_grad()
    for x, y in zip(inputs.chunk(PAR_PARTS), labels.chunk(PAR_PARTS), strict=True):
        (F.cross_entropy(model(x), y) / PAR_PARTS).backward()
    optimizer.step()


@cache
def _lean_bytes() -> tuple[int, int, int]:
    """Peaks of exercise 6: the wasteful step, gradients freed before forward, and the par."""
    steps = (_wasteful_step, _plain_step, _step_in_parts)
    wasteful, plain, par = (_measured(step)[0].peak_bytes for step in steps)
    return wasteful, plain, par


@takes(function())
def lean_step(answer: Callable[..., Any]) -> Verdict:
    """Exercise 6: the same parameters after the step, at a peak that is 1.35 times lower."""
    (run, model), (_, reference) = _measured(answer), _measured(_plain_step)
    wasteful, plain, par = _lean_bytes()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs):
        nudge = (
            "Do old gradients stay and add up? The loss is the mean over the whole batch: what "
            "does the mean over a part have to be divided by?"
        )
        return not_yet("the parameters after the step are not the same", nudge=nudge)
    if run.peak_bytes > wasteful / LEANER:
        expected = f"at most {format_bytes(wasteful / LEANER)}, {LEANER} times lower than the wasteful step"
        return not_yet(
            expected=expected,
            got=f"{format_bytes(run.peak_bytes)} in {run.peak_phase}",
            nudge=_lean_nudge(run.peak_bytes, wasteful, plain),
        )
    return correct(
        f"{wasteful / run.peak_bytes:.2f} times lower than the wasteful step",
        score=scored(run.peak_bytes, par, "at the peak", format_bytes),
    )


def _lean_nudge(peak_bytes: int, wasteful: int, plain: int) -> str:
    if peak_bytes > 1.02 * wasteful:
        return "Higher than before: does a graph of one part stay until the backward of the next?"
    if peak_bytes > 1.02 * plain:
        return "The old gradients are alive during forward. When could they go?"
    if peak_bytes > 0.97 * plain:
        return (
            "Now what grows with the batch decides: activations, and what their backward borrows. "
            "Must the whole batch be in memory at once?"
        )
    return "That is the way. How does the peak change with the size of a part?"
