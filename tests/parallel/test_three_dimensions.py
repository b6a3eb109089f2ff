"""Lesson 14's composition on eight real ranks, its bugs, and the stages of 175B."""

from __future__ import annotations

import math
from typing import Any

import pytest
from three_cases import lesson_names

from evidence.validation.simulation_megatron_stage import megatron_stage, states_and_kept
from evidence.validation.tables import table
from utils.catalog import model_shape
from utils.planner import Batch, Plan, memory
from utils.ranks import run_ranks
from utils.simulation import simulate
from utils.units import GIB, Category

FEW, MANY = 4, 20
LESSON = lesson_names()
DIMS = LESSON["ParallelDims"]
BOX = DIMS(pp=2, shard=2, tp=2)
BOXES = {"dp": BOX, "cp": DIMS(pp=2, cp=2, tp=2), "no stages": DIMS(shard=2, cp=2, tp=2)}
BOXES["four stages"] = DIMS(pp=4, tp=2)


def trained(name: str, steps: int, **changes: Any) -> list[tuple[list[float], list[float]]]:
    """Losses and norms of all ranks."""
    train, dims = LESSON["train"], BOXES[name]
    return run_ranks(lambda: train(dims, steps, **changes)[:2], 8, timeout_seconds=200)


def close(ranks, right, steps) -> None:
    for losses, norms in ranks:
        assert losses == pytest.approx(right[0], rel=1e-9)
        assert norms == pytest.approx(right[1], rel=1e-9)
        assert len(losses) == steps


def test_three_axes_train_as_one_process():
    close(trained("dp", FEW), LESSON["one_process"](FEW), FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOXES)
def test_three_axes_train_as_one_process_for_twenty_steps(name):
    close(trained(name, MANY), LESSON["one_process"](MANY), MANY)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp", "four stages"])
def test_tied_ends_need_the_sum_of_their_gradients(name):
    """Clipped, too: the middle stages have no copy, and the norm counts the matrix once."""
    tied = {"model": LESSON["tied_model"]}
    right = LESSON["one_process"](FEW, tied=True)
    added = {**tied, "after_backward": LESSON["add_up_ends"]}
    close(trained(name, FEW, **added, clipped=LESSON["clip_tied"]), right, FEW)
    twice = trained(name, FEW, **added)
    assert twice[0][1][0] > 1.1 * right[1][0]
    apart = trained(name, FEW, **tied)
    assert apart[0][0][0] == pytest.approx(right[0][0], rel=1e-9)
    assert apart[0][0][1] != pytest.approx(right[0][1], rel=1e-6)


@pytest.mark.slow
def test_a_norm_by_stage_shows_in_the_norm_and_other_rows_in_the_first_loss():
    right = LESSON["one_process"](FEW)
    by_stage = trained("dp", FEW, clipped=LESSON["clip_by_stage"])
    assert by_stage[0][0][0] == pytest.approx(right[0][0], rel=1e-9)
    square = by_stage[0][1][0] ** 2 + by_stage[-1][1][0] ** 2
    assert math.sqrt(square) == pytest.approx(right[1][0], rel=1e-9)
    other = trained("dp", FEW, read=LESSON["shuffled_by_rank"])
    assert other[0][0][0] != pytest.approx(right[0][0], rel=1e-4)


def test_a_real_rank_needs_what_the_simulation_says():
    small = LESSON["TransformerConfig"](
        vocabulary=512, hidden=256, layers=4, heads=4, feedforward=768
    )
    sizes = small, BOX, 2, 256
    real = run_ranks(LESSON["real_peak"], 8, *sizes, timeout_seconds=200)
    for rank in (0, BOX.rank(pp=1)):
        told = simulate(*LESSON["program"](*sizes), device="cpu", world=BOX, rank=rank)
        assert told.peak_bytes == pytest.approx(real[rank], rel=0.01)


PLAN = Plan(
    tp=8,
    pp=8,
    virtual_stages=3,
    sequence_parallel=True,
    recompute="selective",
    attention="unfused",
    dropout=True,
)


def planned():
    return memory(model_shape("megatron-175b"), PLAN, Batch(sequences=64, sequence_length=2048))


def test_a_stage_that_is_not_there():
    with pytest.raises(ValueError, match="Stage 8 of 8"):
        megatron_stage("megatron-175b", PLAN, 8, length=2048)
    with pytest.raises(ValueError, match="96 layers must divide over 35 chunks"):
        megatron_stage("megatron-175b", Plan(tp=8, pp=35), 0, length=2048)


@pytest.mark.slow
def test_every_stage_of_175b_whole():
    """States and activations: against the plan, the published, and what is in flight."""
    plan, paper = planned(), next(r for r in table("korthikanti_figure1") if r["model"] == "175B")
    found = [
        states_and_kept(megatron_stage("megatron-175b", PLAN, i, length=2048)) for i in range(8)
    ]
    a_block = found[3][1] / plan[3].in_flight
    for stage, (states, kept) in zip(plan, found, strict=True):
        assert states == pytest.approx(stage.state_bytes, rel=0.02), stage.stage.index
        wanted = stage.bytes_by_category[Category.ACTIVATIONS]
        assert kept == pytest.approx(wanted, rel=0.03), stage.stage.index
        assert kept == pytest.approx(a_block * stage.in_flight, rel=0.02), stage.stage.index
    assert found[0][1] / GIB == pytest.approx(float(paper["fig1_act_seqsel_gib"]), rel=0.03)
    mean = sum(states for states, _ in found) / 8 / GIB
    assert mean == pytest.approx(float(paper["fig1_param_opt_gib"]), rel=0.03)
