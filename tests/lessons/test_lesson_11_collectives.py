"""Collectives by hand: equal to gloo's, with the bytes, steps and partners of their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from utils.lessons.lesson_11 import algorithms
from utils.lessons.lesson_11.wire import Message, Move, Wire, messages
from utils.ranks import RankError, run_ranks
from utils.traffic import traffic
from utils.traffic.cost import (
    AlphaBeta,
    bus_bytes_per_second,
    fit_alpha_beta,
    overlapped_seconds,
)

ROWS, COLUMNS = 40, 3  # fp64: 960 bytes; 40 rows divide over 8 and over 5 ranks


def every_kind(rows: int) -> dict[str, tuple[float, list[Move], int]]:
    """By collective: how far from gloo's, the moves, and the bytes that torch's own ops carried."""
    rank, size, wire = dist.get_rank(), dist.get_world_size(), Wire()
    found = {}
    x = torch.randn(
        rows, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    )

    def compare(name: str, ours: Any, expected: torch.Tensor) -> None:
        wire.moves.clear()
        with traffic() as sent:
            result = ours(wire, x.clone())
        carried = sum(row.payload_bytes for row in sent.rows if row.collective == "send")
        apart = ((result - expected).abs().max() / expected.abs().max()).item()
        found[name] = (apart, list(wire.moves), carried)

    total = x.clone()
    dist.all_reduce(total)
    compare("ring", algorithms.ring_all_reduce, total)
    compare("tree", algorithms.tree_all_reduce, total)
    whole = torch.empty(size * rows, COLUMNS, dtype=x.dtype)
    dist.all_gather_into_tensor(whole, x)
    compare("gather", algorithms.ring_all_gather, whole)
    root = x.clone()
    dist.broadcast(root, 0)
    compare("broadcast", algorithms.tree_broadcast, root)
    if rows % size == 0:
        part, moved = torch.empty(rows // size, COLUMNS, dtype=x.dtype), torch.empty_like(x)
        dist.reduce_scatter_tensor(part, x.clone())
        compare("scatter", algorithms.ring_reduce_scatter, part)
        dist.all_to_all_single(moved, x)
        compare("all-to-all", algorithms.all_to_all, moved)
    return found


def children(rank: int, ranks: int) -> int:
    """Of a rank in the binomial tree of `tree_broadcast`."""
    return sum(rank < (1 << k) and rank + (1 << k) < ranks for k in range(ranks.bit_length()))


@pytest.fixture(scope="module")
def eight() -> list[Any]:
    return run_ranks(every_kind, 8, ROWS)


def sent_by(found: list[Any], name: str) -> list[int]:
    hops = messages([rank[name][1] for rank in found])
    return [sum(m.bytes for m in hops if m.source == rank) for rank in range(len(found))]


def test_what_only_moves_numbers_is_equal_to_the_bit(eight: list[Any]) -> None:
    for name in ("gather", "all-to-all", "broadcast"):
        assert [rank[name][0] for rank in eight] == [0.0] * 8, name


def test_sums_are_equal_but_for_the_order_of_adding(eight: list[Any]) -> None:
    for name in ("ring", "tree", "scatter"):
        assert max(rank[name][0] for rank in eight) < 1e-12, name


def test_every_rank_sends_the_bytes_of_the_formula(eight: list[Any]) -> None:
    size = ROWS * COLUMNS * 8
    formulas = {
        "ring": 2 * 7 * size // 8,
        "gather": 7 * size,
        "scatter": 7 * size // 8,
        "all-to-all": 7 * size // 8,
    }
    for name, right in formulas.items():
        assert sent_by(eight, name) == [right] * 8, name
        assert [rank[name][2] for rank in eight] == [right] * 8, (
            f"{name}: the counter says otherwise"
        )
    down = [children(rank, 8) * size for rank in range(8)]
    assert sent_by(eight, "broadcast") == down
    assert sent_by(eight, "tree") == [size * (rank > 0) + down[rank] for rank in range(8)]


def test_steps_are_those_of_the_formula(eight: list[Any]) -> None:
    right = {"ring": 14, "gather": 7, "scatter": 7, "all-to-all": 7, "tree": 6, "broadcast": 3}
    steps = {name: messages([rank[name][1] for rank in eight])[-1].step for name in right}
    assert steps == right


def test_in_a_ring_each_rank_talks_to_its_neighbours_alone(eight: list[Any]) -> None:
    for name in ("ring", "gather", "scatter"):
        hops = messages([rank[name][1] for rank in eight])
        assert {(m.target - m.source) % 8 for m in hops} == {1}, name
        for step in range(1, hops[-1].step + 1):
            assert sorted(m.source for m in hops if m.step == step) == list(range(8)), (name, step)


def test_a_ring_passes_on_every_part(eight: list[Any]) -> None:
    hops = messages([rank["ring"][1] for rank in eight])
    part = ROWS * COLUMNS * 8 // 8
    for number in range(8):
        assert sum(m.at_byte == number * part for m in hops) == 14, f"part {number}"


def test_ranks_that_do_not_divide_the_tensor() -> None:
    found = run_ranks(every_kind, 5, 37)
    for name in ("ring", "tree"):
        assert max(rank[name][0] for rank in found) < 1e-12, name
    assert max(rank["broadcast"][0] for rank in found) == 0.0
    sent = sent_by(found, "ring")
    assert sum(sent) == 2 * 4 * 37 * COLUMNS * 8, "all parts go round, whatever their lengths"
    assert max(sent) - min(sent) <= 2 * COLUMNS * 8, "parts differ by one row at most"
    assert messages([rank["tree"][1] for rank in found])[-1].step == 2 * math.ceil(math.log2(5))


def bad_input() -> list[str]:
    wire, said = Wire(), []
    for wrong in (
        lambda: algorithms.all_to_all(wire, torch.ones(7)),
        lambda: Wire(hosts=3),
        lambda: wire.send(torch.ones(1), wire.size),
        lambda: wire.send(torch.ones(1), wire.rank),
        lambda: wire.among([1 - wire.rank]),
    ):
        try:
            wrong()
        except ValueError as error:
            said.append(str(error))
    return said


def test_wrong_input_is_answered_in_sentences() -> None:
    said = run_ranks(bad_input, 2)[0]
    words = [
        "7 rows do not divide over 2 ranks",
        "2 ranks do not divide over 3 hosts",
        "cannot talk to rank 2",
        "cannot talk to rank 0",
        "cannot join ranks [1]",
    ]
    assert len(said) == len(words)
    for sentence, word in zip(said, words, strict=True):
        assert word in sentence
    with pytest.raises(ValueError, match="There is no process group here"):
        Wire()


def in_another_order() -> None:
    x, whole = torch.ones(4), torch.empty(12)
    calls = [lambda: dist.all_reduce(x), lambda: dist.all_gather_into_tensor(whole, x)]
    for call in calls if dist.get_rank() != 1 else reversed(calls):
        call()


def test_collectives_in_another_order_name_the_rank() -> None:
    with pytest.raises(RankError, match="same collectives in the same order") as caught:
        run_ranks(in_another_order, 3, timeout_seconds=3)
    assert "rank 1 in all_gather" in str(caught.value)


def test_a_rank_receives_one_message_a_step() -> None:
    gather = [[Move(None, 0, source) for source in (1, 2, 3)], *[[Move(0, 8, None)]] * 3]
    assert messages(gather) == [Message(step, step, 0, 8) for step in (1, 2, 3)]


def test_a_chain_takes_a_step_a_hop() -> None:
    chain = [[Move(1, 8, None)], [Move(None, 0, 0), Move(2, 8, None)], [Move(None, 0, 1)]]
    assert messages(chain) == [Message(1, 0, 1, 8), Message(2, 1, 2, 8)]


def test_messages_that_never_meet_are_named() -> None:
    with pytest.raises(ValueError, match="Rank 1 waits for a message that rank 0 never sends"):
        messages([[], [Move(None, 0, 0)]])
    with pytest.raises(ValueError, match="Rank 0 sent rank 1 a message that it never received"):
        messages([[Move(1, 4, None)], []])


def test_the_fit_finds_the_cost_it_was_given() -> None:
    cost, sizes = AlphaBeta(50e-6, 2e9), [2**power for power in range(10, 26, 2)]
    found = fit_alpha_beta(sizes, [cost.seconds(n) for n in sizes])
    assert found == pytest.approx(cost, rel=1e-6)
    assert found.even_bytes == pytest.approx(1e5, rel=1e-6)


def test_a_start_is_never_negative() -> None:
    found = fit_alpha_beta([10, 20, 1000], [9.0, 21.0, 1000.0])
    assert found.alpha_seconds >= 0


@pytest.mark.parametrize(
    ("sizes", "seconds", "words"),
    [
        ([8], [1.0], "two sizes"),
        ([8, 16], [1.0, 0.0], "no time"),
        ([8, 16, 32], [3.0, 2.0, 0.5], "do not grow"),
    ],
)
def test_times_that_fit_nothing_are_refused(sizes: Any, seconds: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_alpha_beta(sizes, seconds)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """Rows of a run of 24 ranks: github.com/NVIDIA/nccl/issues/1453."""
    for size, microseconds, bus in ((33_554_432, 2180.1, 29.50), (8_388_608, 992.6, 16.20)):
        found = bus_bytes_per_second("all-reduce", 24, size, 1e-6 * microseconds)
        assert found / 1e9 == pytest.approx(bus, rel=1e-3)
    with pytest.raises(ValueError, match="no bus factor of 'scan'"):
        bus_bytes_per_second("scan", 8, 1, 1.0)


def test_a_bucket_waits_for_its_gradients_and_for_the_one_before() -> None:
    cost = AlphaBeta(1.0, 10.0).seconds
    assert overlapped_seconds([1, 2, 3], [10, 10, 10], 10, cost) == 7  # 1 + 2, then busy
    assert overlapped_seconds([1, 5, 9], [10, 10, 10], 10, cost) == 11
    assert overlapped_seconds([1, 2, 3], [10, 10, 10], 30, cost) == 7
    assert overlapped_seconds([1, 2, 3], [10, 10, 10], 25, cost) == 7
    with pytest.raises(ValueError, match="as many sizes as times"):
        overlapped_seconds([1], [], 1, cost)
