"""Lesson 18 at real sizes: what its pictures and its verdict say is what is simulated."""

from __future__ import annotations

import pytest
import torch

from utils.lessons.lesson_18 import at_size
from utils.lessons.lesson_18.at_size import RANKS as GPUS
from utils.lessons.lesson_18.at_size import Reader, of_one_rank
from utils.lessons.lesson_18.figures import draw_growth, draw_steps
from utils.lessons.lesson_18.published import ALST_TOKENS, TRL_GB
from utils.lessons.lesson_18.records.growth import (
    DRAWN,
    LINES,
    OUTSIDE,
    TOLD,
    VERDICT,
    fits,
    longest,
    on_host_bytes,
    recorded,
    recorded_outside,
    ring_of,
    simulated,
    simulated_outside,
    told_outside,
    told_verdict,
)
from utils.lessons.lesson_18.ring import ring_attention
from utils.models import TransformerConfig

pytestmark = pytest.mark.long


def test_seven_billion_at_128k_around_a_ring() -> None:
    found = of_one_rank(
        "qwen2.5-7b", 131_072 // GPUS, "chunked loss", "checkpointing",
        attend=ring_attention, layers=4,
    )  # fmt: skip
    sent = [row for row in found.traffic if row.collective == "send"]
    keys, gradients = 3 * (GPUS - 1), GPUS  # with checkpoints forward goes around twice
    assert sum(row.calls for row in sent) == 4 * (keys + gradients)
    numbers = 4 * 2 * (131_072 // GPUS) * 4 * 128  # of a move, in four layers
    assert sum(row.payload_bytes for row in sent) == numbers * (2 * keys + 4 * gradients)


@pytest.mark.parametrize(
    "line",
    ["chunked loss, checkpoints", "ring of 8, MLP tiled", "ring of 16", "on the host, MLP tiled"],
)
def test_the_pictures_numbers_are_the_simulations(line: str) -> None:
    found = simulated(line, 131_072)
    assert found.peak_bytes == recorded()[line][131_072]
    assert found.reserved_bytes == recorded("reserved_bytes")[line][131_072]


def test_trls_run_is_the_one_that_was_kept() -> None:
    found = simulated_outside("TRL", 2**20)
    assert found.peak_bytes == recorded_outside("TRL", "peak_bytes")[2**20]
    assert found.reserved_bytes == recorded_outside("TRL")[2**20]


@pytest.mark.slow
def test_so_is_alsts() -> None:
    found = simulated_outside("ALST", 250_000)
    assert found.reserved_bytes == recorded_outside("ALST")[250_000]


def test_published_runs_do_not_forbid_the_margin() -> None:
    told = told_outside(78.4 * 2**30)
    assert f"{TRL_GB} GB" in told and "+4% or -5%" in told
    assert f"{ALST_TOKENS:,} tokens" in told and "17% above" in told


def test_of_published_runs_all_lengths_are_kept() -> None:
    assert {run: tuple(recorded_outside(run)) for run in OUTSIDE} == OUTSIDE


def test_the_longest_sequence_lies_on_a_line_through_the_last_two() -> None:
    curve = {1: 100, 10: 20, 20: 40}
    assert longest(curve, 30) == 15
    assert longest(curve, 50) == 25


def test_the_picture_has_every_line() -> None:
    assert recorded().keys() == recorded("reserved_bytes").keys() == LINES.keys()
    assert set(DRAWN) == TOLD.keys() < LINES.keys()
    assert all(tokens in recorded("reserved_bytes")[line] for line, tokens in VERDICT)


def test_what_fits_is_said_with_each_margin() -> None:
    assert fits(100 * 2**30, 107 * 2**30).split() == ["fits", "fits", "no", "no"]


def test_the_verdicts_table_has_its_rows() -> None:
    _, head, *rows = told_verdict(80 * 2**30).splitlines()
    assert head.split()[3:7] == ["+0%", "+5%", "+10%", "+20%"]
    for row, (line, tokens) in zip(rows, VERDICT, strict=True):
        assert row.split()[0] == f"{tokens // 1024}k" and line in row
        held, *fitting, pinned = row.removeprefix(f"{tokens // 1024:>5}k {line}").split()
        assert held == f"{recorded('reserved_bytes')[line][tokens] / 2**30:.1f}"
        assert len(fitting) == 4
        assert (pinned == "0") == ("host" not in line)


def test_the_picture_of_steps_sets_seconds_against_tokens_a_second() -> None:
    seconds = {(1, 800): 80.0, (8, 800): 10.0, (1, 1600): 400.0, (8, 1600): 50.0}
    (axes,) = draw_steps(seconds, ring=8, worst=0.5, no_room=1600, title="").axes
    drawn = [tuple(float(x[0]) for x in line.get_data()) for line in axes.lines]  # pyright: ignore[reportArgumentType, reportIndexIssue]
    assert drawn == [(80, 10), (10, 10), (20, 5), (400, 4), (50, 4), (100, 2)]


def test_a_host_pins_the_inputs_of_28_blocks_each_a_power_of_two() -> None:
    whole = 28 * 2**30  # 131,072 x 3,584 x 2 bytes are 0.875 GiB
    assert on_host_bytes("checkpoints on the host", 131_072) == whole
    assert on_host_bytes("ring of 8, on the host", 8 * 131_072) == whole
    assert on_host_bytes("ring of 8", 131_072) == 0


@pytest.mark.parametrize(
    ("line", "ranks"), [("plain", 1), ("ring of 8, on the host", 8), ("ring of 16", 16)]
)
def test_a_line_tells_its_ring(line: str, ranks: int) -> None:
    assert ring_of(line) == ranks


def test_a_tiled_mlp_learns_what_a_whole_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_size, "TILE_TOKENS", 8)
    found = []
    for cures in ((), ("checkpointing", "tiled MLP")):
        torch.manual_seed(0)
        shape = TransformerConfig(vocabulary=32, hidden=16, layers=2, heads=2, kv_heads=1, feedforward=48)  # fmt: skip
        model = Reader(shape, cures).double()
        tokens = torch.arange(20)[None]  # 8, 8 and 4
        loss = model(tokens, tokens)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for whole, tiled in zip(*found, strict=True):
        torch.testing.assert_close(tiled, whole)


def test_the_first_picture_tells_what_is_reserved_with_its_margin() -> None:
    curves = {"near": {8: 100 * 2**30, 16: 200 * 2**30}, "far": {8: 900 * 2**30, 16: 1800 * 2**30}}
    told: dict[str, tuple[str | int, ...]] = {"near": ("above", 8, 16), "far": ("below", 8)}
    (axes,) = draw_growth(curves, room_bytes=150 * 2**30, above=0.1, told=told, title="", device="").axes  # fmt: skip
    assert [text.get_text() for text in axes.texts][:3] == ["110", "220", "990"]


@pytest.mark.slow
def test_what_is_laid_out_from_few_layers_is_what_a_whole_simulation_gives() -> None:
    few, whole = (
        of_one_rank(
            "qwen2.5-7b", 131_072 // GPUS, "chunked loss", "checkpointing",
            attend=ring_attention, layers=6, from_layers=depths,
        )
        for depths in ((2, 3, 4), (6, 7, 8))
    )  # fmt: skip
    assert few.peak_bytes == whole.peak_bytes
    assert few.breakdown == whole.breakdown
