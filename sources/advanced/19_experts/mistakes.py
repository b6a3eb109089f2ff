"""Answers to the exercises of lab 19 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from utils.labs.mistakes import KnownAnswers

from . import routing
from .workers import expert, send, tell

known = KnownAnswers()
known.mistakes(
    "mb_an_exchange",
    a_token_once=(58.7, "goes to eight experts"),
    numbers=(234.9, "counts numbers"),
    four=(1879, "four exchanges"),
    fp32=(939.5, "That is fp32"),
    three=(3, "k rows a token"),
)


def by_table(table: Callable[[routing.Crowd], list[list[bool]]]) -> Callable[..., Tensor]:
    """An answer to exercise 1 from a function of `routing`."""

    def kept_rows(choice: Tensor, probability: Tensor, experts: int, capacity: int) -> Tensor:
        crowd = routing.Crowd("", choice.tolist(), probability.tolist(), experts, capacity)
        return torch.tensor(table(crowd))

    return kept_rows


def all_above(choice: Tensor, probability: Tensor, experts: int, capacity: int) -> Tensor:
    """A threshold for each expert: rows that equal it pass, however many."""
    kept = torch.zeros_like(choice, dtype=torch.bool)
    for e in range(experts):
        here = choice == e
        values = probability[here].sort(descending=True).values
        if capacity and len(values):
            kept |= here & (probability >= values[min(capacity, len(values)) - 1])
    return kept


def later_of_equals(choice: Tensor, probability: Tensor, experts: int, capacity: int) -> Tensor:
    turned = by_table(routing.best_rows)(choice.flip(0), probability.flip(0), experts, capacity)
    return turned.flip(0)


def one_less(choice: Tensor, probability: Tensor, experts: int, capacity: int) -> Tensor:
    return by_table(routing.best_rows)(choice, probability, experts, max(0, capacity - 1))


def least_probable(choice: Tensor, probability: Tensor, experts: int, capacity: int) -> Tensor:
    return by_table(routing.best_rows)(choice, -probability, experts, capacity)


known.mistakes(
    "kept_rows",
    first_to_come=(by_table(routing.first_rows), "those who come first"),
    a_room_for_each_choice=(by_table(routing.rows_by_slot), "An expert has one room"),
    all_above=(all_above, "equally probable all pass"),
    later_of_equals=(later_of_equals, "the earlier token's"),
    one_less=(one_less, "A room is not filled"),
    least_probable=(least_probable, "sort all its rows"),
    all_stay=(lambda c, p, e, n: torch.ones_like(c, dtype=torch.bool), "room for"),
    numbers=(lambda c, p, e, n: torch.ones_like(c), "tensor of bool"),
    turned=(lambda c, p, e, n: by_table(routing.best_rows)(c, p, e, n).T, "shape"),
    flat=(
        lambda c, p, e, n: by_table(routing.best_rows)(c, p, e, n).flatten(),
        "a column for each",
    ),
    no_return=(lambda c, p, e, n: None, "returns nothing"),
)
known.rights("kept_rows", of_lists=lambda *given: by_table(routing.best_rows)(*given).tolist())


def counted(**wrong: bool) -> Callable[..., int]:
    """An answer to exercise 2, row by row, with one thing done otherwise."""

    def network_rows(
        choice: Tensor, experts: int, ranks: int, per_node: int, here: int, once: bool
    ) -> int:
        once = once != wrong.get("other_way", False)
        rows = 0
        for chosen in choice.tolist():
            at = [expert_number // (experts // ranks) for expert_number in chosen]
            nodes: Any = [rank // per_node for rank in at]
            if once and wrong.get("by_rank"):
                nodes = [rank // per_node for rank in set(at)]
            elif once:
                nodes = set(nodes)
            rows += sum(node != here or wrong.get("own_too", False) for node in nodes)
        return rows

    return network_rows


known.mistakes(
    "network_rows",
    own_too=(counted(own_too=True), "own node"),
    by_rank=(counted(by_rank=True), "once to each rank"),
    other_way=(counted(other_way=True), "the other way"),
    nothing=(lambda *given: 0, "For each row"),
    a_half=(lambda *given: 0.5, "whole number"),
    no_return=(lambda *given: None, "returns nothing"),
)
known.rights("network_rows", of_numpy=lambda *given: np.int64(counted()(*given)))


def once(**wrong: bool) -> Callable[..., Tensor]:
    """The solution with one thing done otherwise."""

    def dispatch_once(
        x: Tensor, choice: Tensor, weight: Tensor, w_in: Tensor, w_out: Tensor
    ) -> Tensor:
        ranks, held = dist.get_world_size(), len(w_in)
        if wrong.get("unweighted"):
            weight = weight * 0 + 1
        table = x.new_zeros(len(x), ranks * held).scatter(1, choice, weight)
        table = table.view(len(x), ranks, held)
        asked = torch.zeros(len(x), ranks * held, dtype=torch.bool).scatter(1, choice, True)
        target, token = asked.view(len(x), ranks, held).any(-1).T.nonzero(as_tuple=True)
        if wrong.get("own_alone"):
            target, token = (part[target == dist.get_rank()] for part in (target, token))
        out = target.bincount(minlength=ranks).tolist()
        into = tell(out)
        weights = table[token, target]
        if wrong.get("no_gradient_of_weights"):
            weights = weights.detach()
        vectors = x[token].detach() if wrong.get("no_gradient_of_x") else x[token]
        rows, weights = send(torch.cat([vectors, weights], 1), out, into).split(
            [x.shape[1], held], 1
        )
        total = torch.zeros_like(rows)
        for e in range(held):
            mine = weights[:, e].nonzero(as_tuple=True)[0]
            given = expert(rows[mine], w_in[e], w_out[e])
            total = total.index_add(0, mine, weights[mine, e, None] * given)
        back = send(total, into, out)
        if wrong.get("last_rank"):
            y = torch.zeros_like(x)
            y[token] = back
            return y
        y = torch.zeros_like(x).index_add(0, token, back)
        return y.T if wrong.get("turned") else y

    return dispatch_once


def once_for_each_expert(
    x: Tensor, choice: Tensor, weight: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """The lesson's way: a row for each chosen expert, weighted at home; numbers travel as floats, too."""
    ranks, held, k = dist.get_world_size(), len(w_in), choice.shape[1]
    order = choice.flatten().argsort(stable=True)
    token, numbers = order // k, choice.flatten()[order]
    out = (numbers // held).bincount(minlength=ranks).tolist()
    into = tell(out)
    sent = torch.cat([x[token], (numbers % held)[:, None].to(x.dtype)], 1)
    rows, which = send(sent, out, into).split([x.shape[1], 1], 1)
    done = torch.zeros_like(rows)
    for e in range(held):
        mine = (which[:, 0] == e).nonzero(as_tuple=True)[0]
        done = done.index_add(0, mine, expert(rows[mine], w_in[e], w_out[e]))
    back = send(done, into, out)
    return torch.zeros_like(x).index_add(0, token, weight.flatten()[order, None] * back)


def only_who_has_rows(
    x: Tensor, choice: Tensor, weight: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """Rank 3 has nothing for rank 0, and leaves the exchange out."""
    if not bool((choice < len(w_in)).any()):
        return x * weight.sum() * w_in.sum() * w_out.sum()
    return once()(x, choice, weight, w_in, w_out)


known.mistakes(
    "dispatch_once",
    unweighted=(once(unweighted=True), "weighted by its token's weight"),
    own_alone=(once(own_alone=True), "this rank's own experts"),
    last_rank=(once(last_rank=True), "what came back last"),
    no_gradient_of_weights=(once(no_gradient_of_weights=True), "weight has no gradient"),
    no_gradient_of_x=(once(no_gradient_of_x=True), "was x detached"),
    turned=(once(turned=True), "the output's shape"),
    once_for_each_expert=(once_for_each_expert, "once for each expert"),
    x_itself=(lambda x, *rest: x * 1.0, "Follow one token"),
    no_return=(lambda *given: None, "is to return a tensor"),
    raises=(lambda x, *rest: send(x, [1], [1]), "raised"),
)
known.mistakes(
    "dispatch_once",
    slow=True,
    timeout_seconds=8.0,
    only_who_has_rows=(only_who_has_rows, "that has nothing to send"),
)


@known.right("dispatch_once", "par 23,544")
def weighted_before(
    x: Tensor, choice: Tensor, weight: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """Every expert on every row that came, times a weight that may be zero."""
    ranks, held = dist.get_world_size(), len(w_in)
    table = torch.stack(
        [(weight * (choice == e)).sum(-1) for e in range(ranks * held)], -1
    ).unflatten(-1, (ranks, held))
    rows, tokens, out = [], [], []
    for r in range(ranks):
        token = ((choice // held) == r).any(-1).nonzero(as_tuple=True)[0]
        rows.append(torch.cat([x[token], table[token, r]], 1))
        tokens.append(token)
        out.append(len(token))
    into = tell(out)
    came = send(torch.cat(rows), out, into)
    total = sum(
        came[:, len(x[0]) + e, None] * expert(came[:, : len(x[0])], w_in[e], w_out[e])
        for e in range(held)
    )
    assert isinstance(total, Tensor)
    return torch.zeros_like(x).index_add(0, torch.cat(tokens), send(total, into, out))


known.mistakes(
    "diagnosis",
    none_in_a=({"run A": "none"}, "over the steps"),
    weights_in_b=({"run B": "the bias is in the weights as well"}, "Is the bias one, too"),
    none_in_c=({"run C": "none"}, "changes no choice"),
    own_load_in_d=({"run D": "each rank steers by its own load"}, "ranks agree"),
)
