"""Lesson 19's exchange of rows: what travels and is held, losses of one process, and what all ranks refuse alike."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from utils.lessons.lesson_19 import routing, workers
from utils.lessons.lesson_19.exchange import RoutingError, gathered_counts, held_experts
from utils.lessons.lesson_19.layers import Mixture, experts_held, keep_my_experts, small_model
from utils.lessons.lesson_19.mistakes import once
from utils.lessons.lesson_19.training import Losses, one_thread, train
from utils.ranks import run_ranks
from utils.traffic.counter import traffic

RANKS, HIDDEN, LAYERS, STEPS, TOKENS, K = 4, 32, 2, 10, 32, 2


def _route(x: Tensor, router: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weight, choice = (x @ router).softmax(-1).topk(k)
    return choice, weight / weight.sum(-1, keepdim=True)


def _whole(x: Tensor, router: Tensor, w_in: Tensor, w_out: Tensor, k: int) -> Tensor:
    choice, weight = _route(x, router, k)
    return workers.mixture(x, choice, weight, w_in, w_out)


def _exchanged(x: Tensor, router: Tensor, w_in: Tensor, w_out: Tensor, k: int) -> Tensor:
    """A row for each expert of a token, by `gathered_counts`."""
    choice, weight = _route(x, router, k)
    held, place = len(w_in), dist.get_rank()
    order = choice.flatten().argsort(stable=True)
    everyone = gathered_counts(choice, (x @ router).softmax(-1), held)
    mine = everyone[:, place * held : (place + 1) * held]
    out, into = everyone[place].view(-1, held).sum(1).tolist(), mine.sum(1).tolist()
    rows = workers.send(x[order // k], out, into)
    which = torch.arange(held).repeat(len(mine)).repeat_interleave(mine.flatten())
    done = torch.zeros_like(rows)
    for e in range(held):
        here = (which == e).nonzero(as_tuple=True)[0]
        done = done.index_add(0, here, workers.expert(rows[here], w_in[e], w_out[e]))
    back = workers.send(done, into, out)
    return torch.zeros_like(x).index_add(0, order // k, weight.flatten()[order, None] * back)


def _by_the_rule(model: Any) -> None:
    for name, p in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def _one() -> Losses:
    return train(small_model(_whole))


def _on_ranks(rule: bool) -> tuple[Losses, int, int]:
    model = small_model(_whole)
    keep_my_experts(model, dist.get_rank(), RANKS, _exchanged)
    with traffic() as sent:
        losses = train(model, _by_the_rule if rule else _over_all)
    rows = sum(row.payload_bytes for row in sent.rows if row.collective == "all-to-all")
    return losses, experts_held(model), rows


def _over_all(model: Any) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def test_losses_and_bytes_of_four_ranks() -> None:
    one, results = run_ranks(_one, 1)[0], run_ranks(_on_ranks, RANKS, True)
    assert results[0][0] == pytest.approx(one, rel=1e-12)
    for losses, _, _ in results:
        torch.testing.assert_close(losses.first_gradient, one.first_gradient, rtol=1e-9, atol=1e-15)
    predicted = 4 * K * TOKENS * HIDDEN * 8 * LAYERS * STEPS
    assert sum(row[2] for row in results) == RANKS * predicted
    assert [row[1] for row in results] == [experts_held(small_model(_whole)) // RANKS] * RANKS


def test_experts_averaged_over_all_ranks_are_found() -> None:
    one, results = run_ranks(_one, 1)[0], run_ranks(_on_ranks, RANKS, False)
    assert results[0][0][0] == pytest.approx(one[0], rel=1e-12)
    assert abs(results[0][0][-1] / one[-1] - 1) > 1e-5
    gradients = results[0][0].first_gradient, one.first_gradient
    assert F.cosine_similarity(*gradients, 0) < 0.9, "gradients tell at once"


def test_small_products_take_one_thread_and_give_the_others_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError), one_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_shared_expert_sees_every_token() -> None:
    torch.manual_seed(0)
    layer = Mixture(8, 4, 4, 2, lambda x, *rest: torch.zeros_like(x), shared=6)
    x = torch.randn(3, 5, 8)
    assert layer.shared is not None
    assert torch.equal(layer(x), layer.shared(x))


# What all ranks refuse alike


def _refused(trouble: str) -> str:
    rank = dist.get_rank()
    probabilities = torch.full((10, 8), 0.125)
    choice = torch.arange(8).repeat(10, 1)[:, :2]
    held, room = 2, None
    if trouble == "nan" and rank == 2:
        probabilities[3] = float("nan")
    if trouble == "infinity" and rank == 1:
        probabilities[:2, 0] = float("inf")
    if trouble == "collapsed":
        choice, room = torch.zeros(10, 1, dtype=torch.long), 25
    if trouble == "held":
        held = 4
    if trouble == "divide":
        probabilities = probabilities[:, :6]
        choice = choice % 6
    try:
        gathered_counts(choice, probabilities, held, most_rows=room)
    except RoutingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        ("nan", "router of rank 2 gave NaN or infinity for 1 of its tokens"),
        ("infinity", "router of rank 1 gave NaN or infinity for 2 of its tokens"),
        ("collapsed", "Rank 0 would get 40 rows and has room for 25: expert 0 alone is sent 100%"),
        ("held", "A rank holds 4 of 8 experts, and 4 ranks share them: it is to hold 2"),
        ("divide", "6 experts do not divide evenly over 4 ranks.*1, 2, 3, 6"),
        ("", "^$"),
    ],
)
def test_every_rank_says_the_same_and_none_waits(trouble: str, sentence: str) -> None:
    said = run_ranks(_refused, RANKS, trouble, timeout_seconds=30.0)
    assert len(set(said)) == 1
    assert re.search(sentence, said[0])


def test_experts_that_do_not_divide() -> None:
    assert held_experts(256, 64) == 4
    with pytest.raises(RoutingError, match="8 experts do not divide evenly over 3 ranks"):
        held_experts(8, 3)
    with pytest.raises(RoutingError, match="over 3 ranks"):
        keep_my_experts(small_model(_whole), 0, 3, _whole)


def _collapsed() -> float:
    """All rows to expert 0, dropless: three ranks get nothing, and gradients still come home."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(6, HIDDEN, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(9)
    w_in, w_out = (torch.randn(s, dtype=torch.float64) for s in ((8, HIDDEN, 24), (8, 12, HIDDEN)))
    router = torch.zeros(HIDDEN, 8, dtype=torch.float64)
    own = slice(2 * rank, 2 * rank + 2)
    _exchanged(x, router, w_in[own], w_out[own], 1).square().sum().backward()
    assert x.grad is not None
    found, x.grad = x.grad.clone(), None
    _whole(x, router, w_in, w_out, 1).square().sum().backward()
    assert x.grad is not None
    return ((found - x.grad).norm() / x.grad.norm()).item()


def test_a_router_that_sends_all_to_one_expert() -> None:
    assert max(run_ranks(_collapsed, RANKS)) < 1e-12


# Once to each rank


def test_once_to_each_rank_sends_what_the_formula_says() -> None:
    reports = run_ranks(workers.dispatch, RANKS, once())
    assert [report.sent for report in reports] == [
        workers.numbers_sent(rank, once=True) for rank in range(RANKS)
    ]


def test_rows_that_leave_a_node() -> None:
    for trip in routing.TRIPS:
        each, once_a_node = (routing.network_rows(trip, once) for once in (False, True))
        assert once_a_node <= each
    assert routing.network_rows(routing.TRIPS[0], True) == 1
    assert routing.network_rows(routing.TRIPS[3], False) == 0, "one node: nothing leaves it"


def test_a_top_1_weight_that_is_scaled_gives_the_router_no_gradient() -> None:
    model = small_model(partial(_whole), k=1)
    tokens = torch.randint(64, (2, 9))
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert model.blocks[0].feedforward.router.grad.abs().max() < 1e-15
