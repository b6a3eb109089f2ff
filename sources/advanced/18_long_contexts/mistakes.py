"""Answers to the exercises of lab 18 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from utils.labs.mistakes import KnownAnswers

known = KnownAnswers()
known.mistakes(
    "rank_0_percent",
    one_of_sixteen=(6.25, "15.5"),
    its_round=(50, "others' rounds"),
    three_quarters=(75, "How many squares"),
)
known.mistakes(
    "most_ranks",
    seven=(7, "neither whole heads"),
    eight=(8, "3.5 each"),
    two=(2, "a larger number"),
    one=(1, "must divide the 28"),
)


def window(**wrong: Any) -> Callable[..., float]:
    """The solution with one thing done otherwise."""

    def window_bytes(length: int, ranks: int, window: int, kv_heads: int, width: int) -> float:
        own, back = length // ranks, window - (0 if wrong.get("itself") else 1)
        moves = back // own if wrong.get("down") else math.ceil(back / own)
        moves = moves if wrong.get("uncapped") else min(ranks - 1, moves)
        moves = ranks - 1 if wrong.get("whole") else moves
        return moves * (1 if wrong.get("keys") else 2) * own * kv_heads * width * 2

    return window_bytes


known.mistakes(
    "window_bytes",
    whole_ring=(window(whole=True), "the whole ring"),
    counts_itself=(window(itself=True), "counts the query itself"),
    rounds_down=(window(down=True), "round up"),
    uncapped=(window(uncapped=True), "After n - 1 moves"),
    keys_alone=(window(keys=True), "Keys and values travel"),
    numbers=(lambda *given: window()(*given) / 2, "Keys and values travel"),
    a_constant=(lambda *given: 7, "How far does"),
    not_finite=(lambda *given: math.inf, "no finite number"),
    no_return=(lambda *given: None, "`return`"),
)
known.rights("window_bytes", of_numpy=lambda *given: np.int64(window()(*given)))


def cache(**wrong: Any) -> Callable[..., Any]:
    """The solution with one thing done otherwise."""

    def cache_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        scores = q @ k.mT * (1.0 if wrong.get("unscaled") else q.shape[-1] ** -0.5)
        own = scores.softmax(-1) @ v
        if wrong.get("own"):
            return own
        if wrong.get("mean") or wrong.get("sum") or wrong.get("by_keys"):
            count = torch.tensor([float(k.shape[2])], dtype=q.dtype)
            total = own * count if wrong.get("by_keys") else own.clone()
            dist.all_reduce(total)
            dist.all_reduce(count)
            return total / (count if wrong.get("by_keys") else ranks if wrong.get("mean") else 1)
        if wrong.get("gathers"):
            counts = torch.zeros(ranks, dtype=torch.long)
            counts[dist.get_rank()] = k.shape[2]
            dist.all_reduce(counts)
            most = int(counts.max())
            padded = torch.zeros(2, *k.shape[:2], most, k.shape[3], dtype=k.dtype)
            padded[0, :, :, : k.shape[2]], padded[1, :, :, : k.shape[2]] = k, v
            every = [torch.empty_like(padded) for _ in range(ranks)]
            dist.all_gather(every, padded)
            pairs = [x[..., : int(n), :] for x, n in zip(every, counts, strict=True)]
            keys, values = torch.cat(pairs, 3)
            return (q @ keys.mT * q.shape[-1] ** -0.5).softmax(-1) @ values
        top = torch.zeros_like(q[..., :1])
        if not wrong.get("no_top"):
            lowest = torch.full_like(top, -math.inf)
            top = torch.cat((lowest, scores), -1).amax(-1, keepdim=True)
            if not wrong.get("own_top"):
                dist.all_reduce(top, dist.ReduceOp.MAX)
        weights = (scores - top).exp()
        terms, sums = weights @ v, weights.sum(-1, keepdim=True)
        dist.all_reduce(terms)
        if not wrong.get("own_sum"):
            dist.all_reduce(sums)
        out = terms / sums
        return out.squeeze(2) if wrong.get("flat") else out

    return cache_attention


def gathers_results(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    mine = torch.cat((scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)), -1)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    outs, logs = torch.stack(every).split([q.shape[-1], 1], -1)
    return (outs * logs.softmax(0)).sum(0)


known.mistakes(
    "cache_attention",
    own=(cache(own=True), "this rank's own keys"),
    mean=(cache(mean=True), "A mean of the ranks' results"),
    adds_up=(cache(sum=True), "a weight of several"),
    by_keys=(cache(by_keys=True), "Weighted by the number of keys"),
    unscaled=(cache(unscaled=True), "the root of the width"),
    no_top=(cache(no_top=True), "overflow"),
    own_top=(cache(own_top=True), "both the terms and the exponentials"),
    own_sum=(cache(own_sum=True), "both the terms and"),
    gathers=(cache(gathers=True), "Keys and values stay"),
    flat=(cache(flat=True), "the result's shape"),
    no_return=(lambda q, k, v: None, "is to return a tensor"),
    raises=(lambda q, k, v: (q @ k.mT).amax(-1), "raised"),
)
known.right("cache_attention", "par 960")(cache())
known.right("cache_attention", "1,728 bytes over a ring")(gathers_results)


def packed(**wrong: Any) -> Callable[..., Any]:
    """The solution with one thing done otherwise."""

    def packed_places(lengths: Any, ranks: int, rank: int) -> Any:
        whole = wrong.get("row") or wrong.get("in_order")
        own: list[int] = []
        first = 0
        for length in (sum(lengths),) if whole else lengths:
            size = length // (2 * ranks)
            pieces = (rank, 2 * ranks - 1 - rank)
            if wrong.get("in_order") or wrong.get("each_in_order"):
                pieces = (2 * rank, 2 * rank + 1)
            if wrong.get("overlap"):
                pieces = (rank, 2 * ranks - 2 - rank)
            for piece in pieces:
                own += range(first + piece * size, first + (piece + 1) * size)
            first += 0 if wrong.get("anew") else length
        return own

    return packed_places


def whole_documents(lengths: Any, ranks: int, rank: int) -> list[int]:
    places, first = [], 0
    for number, length in enumerate(lengths):
        if number % ranks == rank:
            places += range(first, first + length)
        first += length
    return places


known.mistakes(
    "packed_places",
    zigzag_of_row=(packed(row=True), "zigzag over the whole row"),
    in_order=(packed(in_order=True), "In order, late tokens"),
    each_in_order=(packed(each_in_order=True), "Which rank has early tokens"),
    overlapping=(packed(overlap=True), "Do pieces overlap"),
    counts_anew=(packed(anew=True), "places count anew"),
    whole_documents=(whole_documents, "unequal numbers of tokens"),
    nothing=(lambda lengths, ranks, rank: [], "no rank holds a token"),
    outside=(lambda lengths, ranks, rank: [sum(lengths) + rank], "no such place"),
    a_number=(lambda lengths, ranks, rank: 3, "One place of the row"),
    halves=(lambda lengths, ranks, rank: [0.5], "nothing after the point"),
    no_return=(lambda lengths, ranks, rank: None, "`return`"),
)
known.rights("packed_places", as_tensor=lambda *given: torch.tensor(packed()(*given)))
known.right("packed_places", "times the mean work on the fullest rank")(
    lambda lengths, ranks, rank: range(rank, sum(lengths), ranks)  # striped
)
known.mistakes(
    "diagnosis",
    none_in_a=({"A": "none"}, "what happens between the two"),
    positions_in_b=({"B": "positions restart at each rank"}, "from the second piece on"),
    none_in_c=({"C": "none"}, "the first wrong one"),
    positions_in_d=({"D": "positions restart at each rank"}, "How large is their rounding"),
)
