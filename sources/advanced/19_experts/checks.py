"""Checks of lesson and lab 19, "Experts"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from utils.labs.cases import Case, Exercise, Question, scored, takes
from utils.labs.checking import starts_ranks
from utils.labs.kinds import Kind, WrongKind, function, keys, number, one_of, whole
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.ranks import RankError, run_ranks

from . import routing, workers

RANKS = workers.RANKS
TIMEOUT_SECONDS = 20.0  # right answers take a second or two

mb_an_exchange = Question(
    "Lesson 19: MB that a rank of DeepSeek-V3 puts into one exchange for 4,096 tokens.",
    number("a number of MB"),
    right=8 * 4096 * 7168 * 2 / 1e6,
    relative=0.02,
    wrong={
        4096 * 7168 * 2 / 1e6: "That is each token once. It goes to eight experts.",
        8 * 4096 * 7168 / 1e6: "That counts numbers. Each takes two bytes in bf16.",
        4 * 8 * 4096 * 7168 * 2 / 1e6: "That is the layer's whole step: four exchanges.",
        8 * 4096 * 7168 * 4 / 1e6: "That is fp32. A number takes two bytes in bf16.",
    },
    nudge="k rows a token, h numbers a row, two bytes a number.",
    note="470 MB, four times in each of 58 layers with experts",
)


# --- rows that stay ------------------------------------------------------------------------------


def _read_flags(value: Any) -> list[list[bool]]:
    if isinstance(value, torch.Tensor):
        if value.dtype != torch.bool:
            raise WrongKind("True where a row stays: a tensor of bool, as a comparison gives.")
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or not all(isinstance(r, (list, tuple)) for r in value):
        raise WrongKind("It has a row for each token and a column for each of its choices.")
    rows = [list(row) for row in value]
    if not all(isinstance(flag, bool) for row in rows for flag in row):
        raise WrongKind("True where a row stays, False where it is dropped.")
    return rows


FLAGS = Kind("a tensor of bool, of the shape of `choice`", _read_flags)


@takes(function())
def kept_rows(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: the rows that an expert's room is given to, the most probable first."""
    for crowd in routing.CROWDS:
        choice, probability = torch.tensor(crowd.choice), torch.tensor(crowd.probability)
        found = FLAGS.returned(answer(choice, probability, crowd.experts, crowd.capacity))
        if (choice.tolist(), len(found)) != (crowd.choice, len(crowd.choice)):
            nudge = "One row for each token, and `choice` stays as it was given."
            return not_yet(f"{crowd.says}: the shape, or `choice` itself, is changed", nudge=nudge)
        if verdict := _wrong_rows(crowd, found):
            return verdict
    return correct(f"right for {len(routing.CROWDS)} routings, ties and empty rooms among them")


def _wrong_rows(crowd: routing.Crowd, found: list[list[bool]]) -> Verdict | None:
    right = routing.best_rows(crowd)
    if found == right:
        return None
    if [len(row) for row in found] != [len(row) for row in right]:
        return not_yet(f"{crowd.says}: the shape", nudge="A column for each of a token's choices.")
    taken = [0] * crowd.experts
    for flags, chosen in zip(found, crowd.choice, strict=True):
        for stays, expert in zip(flags, chosen, strict=True):
            taken[expert] += stays
    wanted = [0] * crowd.experts
    for flags, chosen in zip(right, crowd.choice, strict=True):
        for stays, expert in zip(flags, chosen, strict=True):
            wanted[expert] += stays
    nudge = "Look at one expert: sort all its rows by probability, and keep the first ones."
    if found == routing.rows_by_slot(crowd):
        nudge = "An expert has one room. First and second choices of tokens share it."
    elif max(taken) > crowd.capacity:
        nudge = "More rows stay than there is room for. Do rows that are equally probable all pass?"
    elif taken != wanted:
        nudge = "A room is not filled, though rows wait for it."
    elif found == routing.first_rows(crowd):
        nudge = "That keeps those who come first. Here the most probable rows stay."
    elif len({p for row in crowd.probability for p in row}) == 1:
        nudge = "Of rows that are equally probable the earlier token's stays."
    return not_yet(crowd.says, expected=_drawn(right), got=_drawn(found), nudge=nudge)


def _drawn(flags: list[list[bool]]) -> str:
    return " ".join("".join("x" if flag else "." for flag in row) for row in flags)


# --- rows on the network -------------------------------------------------------------------------


def _trip_case(trip: routing.Trip, once: bool) -> Case:
    choice = torch.tensor(trip.choice)
    given = (choice, trip.experts, trip.ranks, trip.ranks_per_node, trip.here, once)
    right = routing.network_rows(trip, once)
    nodes = routing.nodes_of(trip)
    by_rank = trip.experts // trip.ranks
    ranks = [[expert // by_rank for expert in chosen] for chosen in trip.choice]
    far = [{r for r in chosen if r // trip.ranks_per_node != trip.here} for chosen in ranks]
    mistakes = [
        (sum(map(len, nodes)), "That is all rows. Some experts lie on this rank's own node."),
        (
            sum(len(set(n)) for n in nodes),
            "That counts this rank's own node, too. Nothing leaves it for there.",
        ),
        (
            sum(map(len, far)),
            "That sends a token once to each rank. A node passes it on to its ranks.",
        ),
        (
            routing.network_rows(trip, not once),
            "That is the other way: once for each expert, or once for each node?",
        ),
    ]
    wrong = {value: text for value, text in reversed(mistakes) if value != right}
    return Case(given, right, f"{trip.says}, once a node: {once}", wrong)


network_rows = Exercise(
    "Exercise 2: rows that leave a node, with and without sending once to each node.",
    cases=[_trip_case(trip, once) for trip in routing.TRIPS for once in (False, True)],
    returns=whole("a number of rows"),
    nudge="For each row: which rank has the expert, which node has the rank, and is it this one?",
    note="of the 64 tokens, 8 experts on 4 nodes, sending once a node more than halves what the network carries",
)


# --- once to each rank ---------------------------------------------------------------------------

PAR_NUMBERS = sum(workers.numbers_sent(rank, once=True) for rank in range(RANKS))
MOST_NUMBERS = round(1.25 * PAR_NUMBERS)  # expert numbers sent beside a weight, for one


@starts_ranks
@takes(function())
def dispatch_once(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: a token goes once to each rank that has experts for it."""
    try:
        found = run_ranks(workers.dispatch, RANKS, answer, timeout_seconds=TIMEOUT_SECONDS)
    except RankError as error:
        failure = error.failures[error.rank]
        nudge = "Does every rank call `tell` and `send` equally often, also one that has nothing to send?"
        return not_yet(f"rank {error.rank} {failure.what}", nudge=nudge)
    sent = sum(report.sent for report in found)
    return (
        _wrong_output(found)
        or _wrong_gradient(found)
        or _wasteful(sent)
        or correct(
            "equal to one process, in output and gradients",
            score=scored(sent, PAR_NUMBERS, "numbers put into exchanges by four ranks"),
        )
    )


_OUTPUTS = {
    "unweighted": "Outputs of experts are added as they are. Each is to be weighted by its token's weight for it.",
    "own alone": "That is the part of this rank's own experts. Where do the others' outputs come back?",
    "last rank": "A token that went to several ranks keeps what came back last. Add all of it: index_add.",
}


def _wrong_output(found: list[workers.DispatchReport]) -> Verdict | None:
    for rank, report in enumerate(found):
        if not report.output:
            wanted = (workers.TOKENS, workers.H)
            return not_yet(
                f"the output's shape on rank {rank}",
                expected=wanted,
                got=report.shape,
                nudge="One vector for each of this rank's tokens, in their order.",
            )
        if report.output["right"] < workers.NEAR:
            continue
        known = (text for name, text in _OUTPUTS.items() if report.output[name] < workers.NEAR)
        nudge = "Follow one token: which ranks get it, which of their experts work on it, with which weights?"
        return not_yet(
            f"the output of rank {rank} is not that of one process", nudge=next(known, nudge)
        )
    return None


_GRADIENTS = {
    "x": "Gradients come home through `send` alone: was x detached, or copied by hand?",
    "weight": "A weight that travels with its token must travel through `send`, as rows of a tensor that has a gradient.",
    "w_in": "An expert's gradient is of all ranks' tokens. Do the rows reach the expert by `send`?",
    "w_out": "An expert's gradient is of all ranks' tokens. Are weights put on after the expert?",
}


def _wrong_gradient(found: list[workers.DispatchReport]) -> Verdict | None:
    for name, nudge in _GRADIENTS.items():
        for rank, report in enumerate(found):
            distance = report.gradients.get(name)
            if distance is None:
                return not_yet(f"{name} has no gradient on rank {rank}", nudge=nudge)
            if not distance < workers.NEAR:
                return not_yet(f"the gradient of {name} on rank {rank}", nudge=nudge)
    return None


def _wasteful(sent: int) -> Verdict | None:
    if sent <= MOST_NUMBERS:
        return None
    each = sum(workers.numbers_sent(rank, once=False) for rank in range(RANKS))
    nudge = "Equal to one process; but more travels than once to each rank, and one sum back."
    if sent >= each:
        nudge = (
            "That sends a token once for each expert. Six of its experts lie on four ranks at most."
        )
    return not_yet(
        "more is sent than needed",
        expected=f"about {PAR_NUMBERS:,} numbers by four ranks",
        got=f"{sent:,}",
        nudge=nudge,
    )


# --- diagnosis -----------------------------------------------------------------------------------

FAULTS = (
    "none",
    "the bias is steered the wrong way",
    "the bias is in the weights as well",
    "each rank steers by its own load",
)
_LOOK = {
    "run A": "What happens to the load over the steps?",
    "run B": "Ranks hold one router between them. Is the bias one, too?",
    "run C": "One number more on all biases changes no choice. What else may it change?",
    "run D": "Load falls, ranks agree, and outputs stay where they are.",
}


@takes(keys({run: one_of(*FAULTS) for run in _LOOK}))
def diagnosis(answer: Mapping[str, Any]) -> Verdict:
    """Exercise 4: four runs of a steered router, found from what they report."""
    for run, nudge in _LOOK.items():
        if answer[run] != FAULTS[routing.FAULT_OF[run[-1]]]:
            return not_yet(run, got=shown(answer[run]), nudge=nudge)
    return correct("found from load, bias and outputs; the loss of a step tells none of them")
