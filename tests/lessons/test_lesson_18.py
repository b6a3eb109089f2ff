"""Lesson 18: one sequence on four ranks is one process's, sends what formulas say, and refuses what cannot be shared."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from utils.lessons.lesson_18 import workers
from utils.lessons.lesson_18.compare import (
    apart,
    gathered,
    sent_bytes,
)
from utils.lessons.lesson_18.holders import draw_exchange, draw_holders
from utils.lessons.lesson_18.pieces import attend_piece
from utils.lessons.lesson_18.published import QWEN3_8B, torchtitan_runs
from utils.lessons.lesson_18.refusals import check_heads, check_length
from utils.lessons.lesson_18.ring import places, ring_attention, shares, ulysses_attention
from utils.lessons.lesson_18.rounds import hides_from, pairs_of, round_ends, round_seconds
from utils.ranks import RankError, run_ranks

RANKS, LENGTH, WIDTH = 4, 64, 16
NEAR = 1e-13  # fp64 rounds at 1e-16; sums of 64 terms lie above
SOON_SECONDS = 30.0  # a rank that waits for another waits 120


def laid_out(zigzag: bool) -> Callable[[int], Tensor]:
    def own(length: int) -> Tensor:
        return places(length, dist.get_rank(), RANKS, zigzag)

    return own


def moved(numbers: float) -> float:
    """Bytes of some numbers for each of a rank's tokens and channels, in fp64."""
    return numbers * LENGTH // RANKS * WIDTH * 8


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("way", ["in order", "zigzag", "gathered", "Ulysses"])
def test_a_shared_sequence_is_one_process_and_sends_what_the_formula_says(
    way: str, kv_heads: int
) -> None:
    attention: dict[str, Callable[..., Any]] = {
        "in order": functools.partial(ring_attention, zigzag=False),
        "zigzag": ring_attention,
        "gathered": gathered,
        "Ulysses": ulysses_attention,
    }
    numbers = {
        "gathered": 2 * (RANKS - 1) * 2 * kv_heads,
        "Ulysses": (RANKS - 1) / RANKS * 2 * (2 * 4 + 2 * max(kv_heads, RANKS)),
    }.get(way, (3 * RANKS - 2) * 2 * kv_heads)
    own = laid_out(way in ("zigzag", "gathered"))
    for found in run_ranks(apart, RANKS, attention[way], own, 4, kv_heads, LENGTH, WIDTH):
        assert found.gap < NEAR
        assert sent_bytes(found.put_in, RANKS) == moved(numbers)


def combined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By heads over ranks 0, 1 and 2, 3; around rings of 0, 2 and of 1, 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    around = functools.partial(ring_attention, group=mesh["ring"].get_group())
    return ulysses_attention(q, k, v, group=mesh["heads"].get_group(), attend=around)


def halves(length: int) -> Tensor:
    rank = dist.get_rank()
    return places(length, rank // 2, 2).chunk(2)[rank % 2]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_and_a_ring_combine_and_send_what_the_page_predicts(kv_heads: int) -> None:
    copies = max(kv_heads, 2)
    for found in run_ranks(apart, RANKS, combined, halves, 4, kv_heads, LENGTH, WIDTH):
        assert found.gap < NEAR
        around, received = (found.put_in.pop(kind, 0) for kind in ("send", "receive"))
        assert around == moved((3 * 2 - 2) * 2 * copies)
        assert received in (0, around)
        assert sum(found.put_in.values()) / 2 == moved(1 / 2 * 2 * (2 * 4 + 2 * copies))


BF16 = 2**-8


def test_in_16_bits_gradients_travel_in_32() -> None:
    given = (RANKS, ring_attention, laid_out(True), 2, 2, LENGTH, WIDTH, torch.bfloat16)
    for found in run_ranks(apart, *given):
        assert found.relative < 3 * BF16
        assert found.put_in["send"] == (8 * RANKS - 4) * 2 * LENGTH // RANKS * 2 * WIDTH


def held_between(attention: Callable[..., Tensor]) -> tuple[int, int]:
    """Bytes that a ring keeps from forward for backward, and those of its own tensors."""
    q, k, v = (torch.randn(1, n, LENGTH // RANKS, WIDTH, requires_grad=True) for n in (4, 2, 2))
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = attention(q, k, v)
    logs = out.numel() // WIDTH * 4
    return sum(kept.values()), sum(x.nbytes for x in (q, k, v, out)) + logs


def test_a_ring_keeps_its_own_keys_alone() -> None:
    for kept, own in run_ranks(held_between, RANKS, ring_attention):
        assert kept == own


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("zigzag", [False, True])
def test_every_token_lies_on_one_rank_and_zigzag_makes_work_even(ranks: int, zigzag: bool) -> None:
    own = [places(LENGTH, rank, ranks, zigzag) for rank in range(ranks)]
    assert torch.cat(own).sort().values.equal(torch.arange(LENGTH))
    work = [int((mine + 1).sum()) for mine in own]
    assert sum(work) == pairs_of(LENGTH, LENGTH, causal=True)
    assert (len(set(work)) == 1) == (zigzag or ranks == 1)


def rounds_of(ranks: int, zigzag: bool) -> list[list[int]]:
    """Pairs of each rank and round, of a ring."""
    found, own = [], LENGTH // ranks
    for rank in range(ranks):
        seen = [shares(rank, (rank - step) % ranks, own, zigzag) for step in range(ranks)]
        sizes = [(len(range(own)[rows]), len(range(own)[columns]), causal) for rows, columns, causal in filter(None, seen)]  # fmt: skip
        pairs = iter([pairs_of(*size) for size in sizes])
        found.append([next(pairs) if part else 0 for part in seen])
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_in_order_a_ring_waits_for_its_last_rank(ranks: int) -> None:
    even = pairs_of(LENGTH, LENGTH, causal=True) / ranks
    assert round_ends(rounds_of(ranks, zigzag=True))[-1] == even
    slower = round_ends(rounds_of(ranks, zigzag=False))[-1] / even - 1
    assert slower == pytest.approx(1 - 1 / ranks, abs=2 / LENGTH)  # the diagonal's own pairs


def test_published_rows_are_those_of_the_lesson() -> None:
    rows = torchtitan_runs()
    assert [row.cp for row in rows] == [1, 2, 4, 8]
    assert {row.length // row.cp for row in rows} == {32_768}


def test_the_shape_of_trls_model_has_its_checkpoints_count() -> None:
    assert QWEN3_8B.parameter_count == QWEN3_8B.published_count


def test_a_round_takes_its_flop_and_its_bytes() -> None:
    tokens, gradients = 1_000, 2  # fp32 gradients are as long as two messages in bf16
    found = round_seconds(QWEN3_8B, 1e9, tokens, 1e12)
    pairs = tokens**2 / 2
    assert found[0] == pytest.approx(4 * 32 * 128 * pairs / 1e12)
    assert found[1] == pytest.approx(2 * 2 * 8 * 128 * tokens / 1e9)
    assert found[2:] == pytest.approx((2.5 * found[0], (1 + gradients) * found[1]))


def test_a_message_hides_from_where_its_round_works_as_long() -> None:
    tokens, work, message = 8, 5.0, 7.0
    longer = hides_from(tokens, work, message) / tokens
    assert work * longer**2 == pytest.approx(message * longer)


@pytest.mark.parametrize("wrong", [{"work": 0.0}, {"message": -1.0}])
def test_a_round_without_work_hides_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        hides_from(8, **{"work": 1.0, "message": 1.0, **wrong})


def test_the_pictures_say_who_holds_and_who_sends() -> None:
    in_order, zigzag, rounds, way_home = draw_holders().axes
    assert in_order.get_title(loc="left").endswith("2, 6, 10, 14")
    assert zigzag.get_title(loc="left").endswith("8, 8, 8, 8")
    told = [text.get_text() for text in rounds.texts]
    assert told.count("KV 0, 7\n1, 6 see 0") == told.count("KV 2, 5\n6 sees 2, 5") == 1
    terms = [text.get_text().partition("\n") for text in way_home.texts]
    assert [of_0 for of_0, _, _ in terms] == [
        "piece 0: 1 term",
        *(f"piece 0: {n} terms" for n in (2, 3, 4, 4)),
    ]
    assert {of_7 for _, _, of_7 in terms} == {"piece 7: 1 term"}, (
        "only queries of piece 7 see its keys"
    )
    before, _, after = draw_exchange().axes
    sent, came = ([text.get_text() for text in axes.texts] for axes in (before, after))
    assert sent.count("stays") == came.count("stayed") == RANKS
    assert sent[RANKS:][:RANKS] == ["to 0", "stays", "to 2", "to 3"], "rank 1 sends"


def test_a_piece_of_grouped_queries_is_softmax() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 12, 8, dtype=torch.float64) for n in (6, 2, 2))
    out, lse = attend_piece(q, k, v, causal=False)
    scores = q @ k.repeat_interleave(3, 1).mT * 8**-0.5
    torch.testing.assert_close(out, scores.softmax(-1) @ v.repeat_interleave(3, 1))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize(
    ("length", "ranks", "said"),
    [(6, 4, "shorter than the ring"), (20, 4, "Pad the sequence to 24"), (9, 1, "two pieces")],
)
def test_a_sequence_that_does_not_divide_is_refused(length: int, ranks: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_length(length, ranks)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "said"),
    [(28, 4, 8, "Take 7 ranks"), (28, 4, 7, "whole copies"), (6, 6, 4, "Take 3 ranks")],
)
def test_heads_that_do_not_divide_are_refused(
    heads: int, kv_heads: int, ranks: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_heads(heads, kv_heads, ranks)


def refused(kind: str) -> str:
    """On every rank: the sentence of a refusal, before anything is sent."""
    try:
        if kind == "length":
            places(6, dist.get_rank(), RANKS)
        else:
            ulysses_attention(*(torch.zeros(1, n, 4, 8) for n in (6, 2, 2)))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["length", "heads"])
def test_all_ranks_refuse_in_one_sentence(kind: str) -> None:
    said = set(run_ranks(refused, RANKS, kind))
    assert len(said) == 1
    assert said != {""}


def not_caught() -> None:
    ulysses_attention(*(torch.zeros(1, n, 4, 8) for n in (6, 2, 2)))


def test_nobody_waits_for_a_rank_that_refused() -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="6 query heads do not divide over 4 ranks"):
        run_ranks(not_caught, RANKS)
    assert time.monotonic() - began < SOON_SECONDS


def test_the_labs_runs_show_their_faults() -> None:
    found = {run: workers.observed(run) for run in workers.FAULT_OF}
    learned = {run: [gap for gap in one.tokens if gap == gap] for run, one in found.items()}
    assert max(learned["A"]) < NEAR, "tokens' losses are right"
    assert found["A"].loss > 1e-3, "their mean is not"
    assert learned["B"][0] < NEAR < 1e-3 < min(learned["B"][1:]), "wrong from the second piece on"
    assert max(*learned["C"], found["C"].loss) < NEAR, "forward is right"
    wrong = {name for name, gap in found["C"].gradients.items() if gap > 1e-6}
    last = {f"blocks.1.attention.{name}.weight" for name in ("key", "value")}
    assert {name for name in wrong if "blocks.1.attention." in name} == last
    assert max(*learned["D"], *found["D"].gradients.values()) < 1e-5, "the angles' rounding"
