"""What lesson 15's verdict stands on: the loss that a run buys, and published runs of its kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from view_cases import evidence_of, texts

from evidence.validation import table
from utils.catalog import ModelShape
from utils.lessons.lesson_15.answers import (
    beside_each_other,
    days_from_prediction,
    usd_from_prediction,
)
from utils.lessons.lesson_15.loss import (
    FIRST_FIT,
    REFIT,
    Fit,
    cheapest,
    compute_share,
    loss,
    tokens_for,
)
from utils.lessons.lesson_15.placement import draw_memory_beside, draw_placement
from utils.lessons.lesson_15.relatives import (
    Relative,
    draw_relatives,
    halved_slices,
    megatron_ratios,
    relatives,
)
from utils.lessons.lesson_15.review import review
from utils.lessons.lesson_15.ways_out import WayOut, draw_ways_out
from utils.lessons.lesson_15.whole_runs import WholeRun, whole_runs
from utils.planner import Batch, Cluster, Plan, cost, estimate, goodput
from utils.planner.plan_estimate import SECONDS_INTERVAL

ASKED = 131.13e9, 300e9


@pytest.mark.parametrize("fit", [FIRST_FIT, REFIT])
def test_no_neighbour_of_the_cheapest_is_cheaper(fit: Fit) -> None:
    reached = loss(*ASKED, fit)
    parameters, tokens = cheapest(*ASKED, fit)
    assert loss(parameters, tokens, fit) == pytest.approx(reached, rel=1e-12)
    for factor in (0.98, 1.02):
        other = factor * parameters
        assert other * tokens_for(other, reached, fit) > parameters * tokens
    assert compute_share(parameters, tokens, fit) == pytest.approx(1.0, rel=1e-9)


def test_the_second_fit_agrees_with_20_tokens_a_parameter_and_the_first_does_not() -> None:
    """At Chinchilla's own 70B on 1.4T, which its other two approaches chose."""
    assert compute_share(70e9, 1.4e12, REFIT) > 0.99 > 0.9 > compute_share(70e9, 1.4e12, FIRST_FIT)


def test_a_loss_out_of_reach_is_said() -> None:
    with pytest.raises(ValueError, match="never reach a predicted loss"):
        tokens_for(1e9, REFIT.floor + 0.01)
    with pytest.raises(ValueError, match="tokens"):
        loss(1e9, 0.0)


def test_a_run_that_took_longer_than_the_interval_is_counted_outside() -> None:
    row = Relative("theirs: seconds", (0.9, 1.15), (0.89, 0.9, 1.15, 1.16))
    assert row.inside == 2
    figure = draw_relatives([row])
    assert "theirs: seconds\n2 of 4 runs inside" in texts(figure)
    assert evidence_of(figure) == "published, predicted"


def test_the_runs_are_those_that_the_lesson_speaks_of() -> None:
    found = {row.name: row for row in relatives()}
    slow = [
        r
        for name in found
        if "Narayanan" in name or "MegaScale" in name
        for r in found[name].ratios
    ]
    assert 1.0 < min(slow) < 1.01 and 1.13 < max(slow) < 1.14, "1% to 13% longer than predicted"
    (fsdp,) = (row for name, row in found.items() if "FSDP" in name)
    assert fsdp.ratios[1] > fsdp.interval[1], "micro-batch 2 lies outside"
    assert len(slow) == 14 and slow == megatron_ratios(relatives()), "all of them, and no other"


def test_bloom_is_compared_on_one_side_of_the_tuning_of_its_nodes() -> None:
    repeats = {row["line"]: (row["note"], float(row["sec_per_it"] or 0)) for row in _bloom()}
    before, after = [[repeats[line] for line in two] for two in (("712", "726"), ("776", "848"))]
    assert {note < "02-25" for note, _ in before} == {True}
    assert {note < "02-25" for note, _ in after} == {False}
    for (_, one), (_, other) in (before, after):
        assert abs(one / other - 1) < 0.01, "one layout twice"
    assert before[0][1] / after[0][1] > 1.05, "across the tuning"


def test_runs_on_h100_are_out_of_sample_and_korthikantis_are_not() -> None:
    found = {row.name.partition(" ")[0]: row for row in relatives()}
    assert [name for name, row in found.items() if row.fitted] == ["Korthikanti"]
    core = found["Megatron-Core"].ratios
    assert len(core) == 9 and max(core) < SECONDS_INTERVAL[1], "none took longer than the interval"
    assert sum(ratio < 1 for ratio in core) == 7, "most were faster than predicted"


def test_halving_tp_and_doubling_dp_did_not_always_pay() -> None:
    moves = halved_slices()
    assert all(move.predicted < 0 for move in moves), "the planner promises a gain in each"
    lost = [move for move in moves if move.published > 0]
    assert [move.name for move in lost] == ["72 layers, PP 6, micro-batch 4"]
    gained = {move.name for move in moves if "PP 12" in move.name}
    assert len(moves) == 6 and len(gained) == 4, "a layout noted twice counts once"
    twice = (114.11 + 113.95) / 2
    assert lost[0].published == pytest.approx(117.11 / twice - 1)


def test_bytes_have_an_axis_of_their_own_and_the_room_is_drawn() -> None:
    rows = [Relative("theirs, A100", (0.9, 1.15), (1.0,), fitted=True),
            Relative("theirs: bytes", (0.9, 1.1), (1.0, 1.3), (), ("tp8",))]  # fmt: skip
    figure = draw_relatives(rows, room=1.17)
    assert len(figure.axes) == 2
    assert "room on the card for the winner: x 1.17" in texts(figure) and "tp8" in texts(figure)


def test_a_sparse_checkpoint_is_counted_in_the_risk() -> None:
    found = estimate(MODEL, CLUSTER, PLAN, BATCH)
    said = []
    for seconds in (None, 86_400.0):
        verdict = review(
            found, found, tokens=1e9, days=30, usd=1e5, checkpoint_interval_seconds=seconds
        )
        said += [row.reason for row in verdict.criteria if row.name == "risk"]
    assert said[0] != said[1], "the design's own interval, and Daly's"


def test_ranges_begin_at_the_prediction() -> None:
    found = estimate(MODEL, CLUSTER, PLAN, BATCH)
    bill = cost(found, 1e9, goodput(CLUSTER, spares=1))
    first, last = days_from_prediction(bill)
    assert first == pytest.approx(bill.days_interval[0] / SECONDS_INTERVAL[0])
    assert last == bill.days_interval[1]
    assert usd_from_prediction(bill)[0] / first == pytest.approx(bill.usd_interval[1] / last)


def test_each_design_says_what_it_needs_and_where_it_fails() -> None:
    found = estimate(MODEL, CLUSTER, PLAN, BATCH)
    poor = review(found, found, tokens=1e9, days=30, usd=1, spares=1)
    rows = beside_each_other({"ours": (found, poor)}, {"ours": "more money"})
    assert rows.loc["ours", "needs"] == "more money"
    assert "cost" in str(rows.loc["ours", "fails of 12"])
    with pytest.raises(ValueError, match="What ours needs is not said"):
        beside_each_other({"ours": (found, poor)}, {})


def test_whole_runs_scale_with_the_product_of_parameters_and_tokens() -> None:
    run = WholeRun("one", 1e9, 1e9, 100.0)
    assert run.scaled_hours(2e9, 3e9) == pytest.approx(600.0)
    assert run.mfu == pytest.approx(6e18 / (100 * 3600 * 312e12))
    names = [row.name for row in whole_runs()]
    assert names == ["LLaMA-65B", "OPT-175B", "BLOOM-176B", "GLM-130B"]
    (glm,) = (row for row in whole_runs() if "GLM" in row.name)
    assert glm.gpu_hours == 768 * 60 * 24


MODEL = ModelShape(
    name="small", family="gpt", layers=8, hidden=1024, heads=8, feedforward=4096, vocabulary=51_200,
    max_sequence=2048, positions="learned", tied=True,
)  # fmt: skip
CLUSTER, BATCH = (
    Cluster(gpu="A100-80GB", nodes=2, usd_per_gpu_hour=2.0),
    Batch(sequences=64, sequence_length=2048),
)
PLAN = Plan(dp=2, tp=4, pp=2, sequence_parallel=True)


def test_a_placement_draws_groups_and_sends_of_stages_that_fill_a_node() -> None:
    found = estimate(MODEL, CLUSTER, PLAN, BATCH)
    words = texts(draw_placement(found, title="ours"))
    assert "t3\nd1" in words and "8 parallel sends, each GPU to its own t and d" in words
    spread = estimate(MODEL, CLUSTER, Plan(tp=2, pp=8, sequence_parallel=True), BATCH)
    with pytest.raises(ValueError, match="one node of 8"):
        draw_placement(spread, title="ours")


def test_memory_beside_says_what_the_first_stage_leaves() -> None:
    found = estimate(MODEL, CLUSTER, PLAN, BATCH)
    words = texts(draw_memory_beside([found, found], title="twice"))
    assert "GiB empty on stage 0" in words and "temporaries" not in words
    with pytest.raises(ValueError, match="needs plans"):
        draw_memory_beside([], title="none")


def test_ways_out_are_drawn_beside_published_and_predicted_shares() -> None:
    figure = draw_ways_out({"ours": WayOut(0.7, 0.65, (0.4, 0.5))})
    words = texts(figure)
    assert "MFU to reach" in words and "ours" in words
    assert evidence_of(figure) == "published, predicted"
    with pytest.raises(ValueError, match="needs rows"):
        draw_ways_out({})


def test_the_flags_that_the_lesson_adds_are_megatron_lms() -> None:
    folder = Path(__file__).parents[2] / "sources" / "advanced" / "15_design_studio"
    text = (folder / "lesson.py").read_text(encoding="utf-8")
    added = text.partition("whole_run = (")[2].partition("print(whole_run")[0]
    known = {row["name"] for row in table("megatron_arguments")}
    flags = re.findall(r"--[a-z0-9-]+", added)
    assert len(flags) == 9 and set(flags) <= known


def _bloom() -> list[dict[str, str]]:
    return table("bloom_prequel")
