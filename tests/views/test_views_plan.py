"""Figures of plans: bars add up to what the planner says, schedules are the executed ones."""

from __future__ import annotations

from dataclasses import replace

import ipywidgets as widgets
import pytest
from matplotlib.patches import FancyArrowPatch
from view_cases import evidence_of, texts

from evidence.validation.comparison import Comparison, summarize
from evidence.validation.peers import PeerError
from utils.catalog import ModelShape, device
from utils.lessons.lesson_15.review import review
from utils.lessons.lesson_15.studio import design, draw_design, studio
from utils.planner import Batch, Cluster, Estimate, Plan, estimate, search
from utils.planner.schedules import bubble_closed, run_schedule, schedule_actions
from utils.units import GIB, Evidence
from utils.views import (
    Panel,
    draw_pareto,
    draw_ranks,
    draw_schedule,
    draw_schedules,
    draw_stage_memory,
    draw_validation,
    explore,
)
from utils.views.plan_figures import stage_parts
from utils.views.rank_map import axis_links
from utils.views.schedule import BACKWARD, FORWARD, drawn_micro_batches, executed
from utils.views.style import LOOKS

MODEL = ModelShape(
    name="small",
    family="gpt",
    layers=24,
    hidden=4096,
    heads=32,
    feedforward=16_384,
    vocabulary=51_200,
    max_sequence=2048,
)
CLUSTER = Cluster(gpu="A100-80GB", nodes=1, usd_per_gpu_hour=2.0)
BATCH = Batch(sequences=64, sequence_length=2048)
PLAN = Plan(tp=2, pp=4, sequence_parallel=True)


def planned(**fields: object) -> Estimate:
    return estimate(MODEL, CLUSTER, replace(PLAN, **fields), BATCH)


FOUND = planned()


# Memory of the stages


def test_bars_of_a_stage_add_up_to_what_it_needs() -> None:
    (axes,) = draw_stage_memory(FOUND).axes
    for stage, row in enumerate(FOUND.stages):
        at = [bar for bar in axes.patches if bar.get_x() < stage < bar.get_x() + bar.get_width()]
        assert sum(bar.get_height() for bar in at) == pytest.approx(row.needed_bytes / GIB)
        assert sum(stage_parts(row).values()) == pytest.approx(row.needed_bytes)
    assert axes.get_ylabel() == "memory of one GPU (GiB)"


def test_the_limit_is_the_memory_of_the_gpu() -> None:
    figure = draw_stage_memory(FOUND)
    (line,) = figure.axes[0].lines
    assert line.get_ydata()[0] == pytest.approx(device("A100-80GB").memory_bytes / GIB)
    assert "A100-80GB, 79.1 GiB usable" in texts(figure)
    assert evidence_of(figure) == "predicted"


# Schedules


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_drawn_schedule_is_the_executed_one(chunks: int) -> None:
    found = planned(virtual_stages=chunks)
    rows, result = executed(found, 8)
    assert result.bubble_ratio == pytest.approx(bubble_closed(4, 8, chunks))
    (axes,) = draw_schedule(found, micro_batches=8).axes
    spans = [path for bars in axes.collections for path in bars.get_paths()]
    assert len(spans) == sum(map(len, rows)) + len(rows), "each piece of work, and a row of idling"
    assert axes.get_xlim() == pytest.approx((0, result.total))


def test_a_whole_step_takes_as_long_as_the_planner_says() -> None:
    _, result = executed(FOUND)
    blocks = FOUND.time.matmul + FOUND.time.memory + FOUND.time.tensor_parallel
    assert 0.8 * blocks < result.busy <= blocks, "all but the head, the embedding and the loss"


def test_many_micro_batches_are_cut_and_said() -> None:
    assert drawn_micro_batches(FOUND) == 16 and drawn_micro_batches(FOUND, 10) == 8
    heading = draw_schedule(FOUND).axes[0].get_title(loc="left")
    assert heading.startswith("16 micro-batches: idle 18.8%") and "all 64: 4.7%" in heading
    assert "all" not in draw_schedule(planned(micro_batch=16, recompute="full")).axes[0].get_title(
        loc="left"
    )


def test_chunks_are_numbered_and_light_and_dark_are_said() -> None:
    figure = draw_schedule(planned(virtual_stages=3))
    said = texts(figure)
    assert "dark: chunk 1, 3" in said and "light: chunk 2" in said and "number: chunk" in said
    (axes,) = figure.axes
    assert {"1", "2", "3"} <= {text.get_text() for text in axes.texts}


# Ranks on nodes


def test_ranks_lie_where_the_planner_prices_them() -> None:
    """TP 4 over 16 stages on nodes of 8: every second hop leaves its node."""
    two = replace(CLUSTER, nodes=2)
    found = estimate(MODEL, two, Plan(tp=4, pp=4, sequence_parallel=True), BATCH)
    assert axis_links(found) == {
        "tp": "inside a node",
        "pp": "2 hops in a node, 1 over the network",
    }
    (axes,) = draw_ranks(found).axes
    assert {f"s{s}\nt{t}" for s in range(4) for t in range(4)} <= {t.get_text() for t in axes.texts}
    hops = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
    assert len(hops) == 3
    wide = estimate(MODEL, two, Plan(dp=2, tp=8, sequence_parallel=True), BATCH)
    assert axis_links(wide) == {"tp": "inside a node", "dp": "over the network"}
    assert evidence_of(draw_ranks(wide)) == "predicted"


def test_no_colour_means_two_things() -> None:
    assert not {FORWARD, BACKWARD} & {
        look.color for name, look in LOOKS.items() if str(name) in FOUND.peak.bytes_by_category
    }


# Plans beside each other


def test_the_front_is_numbered_and_named() -> None:
    plans = search(MODEL, CLUSTER, BATCH)
    figure = draw_pareto([FOUND, planned(micro_batch=16)], pareto=plans.pareto)
    for number in range(1, len(plans.pareto) + 1):
        assert f"{number}  dp" in texts(figure)
    line = next(line for line in figure.axes[0].lines if line.get_label() == "no plan beats these")
    assert list(line.get_xdata()) == [row.step_seconds for row in plans.pareto]


# Validation


def test_every_source_has_its_row_and_its_rules() -> None:
    rows = [Comparison("A", "peak bytes", str(i), 10.0, 10.0 + i, size=1.0 + i) for i in range(5)]
    rows += [Comparison("B", "seconds", str(i), 100.0, 1e4) for i in range(3)]
    peers = [PeerError("A", "this planner", 5, 0.2, 0.2), PeerError("A", "other", 5, 0.6, -0.6)]
    figure = draw_validation(summarize(rows), peers)
    left, right = figure.axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == ["A\npeak bytes, 5 rows", "B\nseconds, 3 rows"]
    ratios = left.collections[0].get_offsets()[:, 0]
    assert list(ratios) == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4])
    assert max(left.collections[1].get_offsets()[:, 0]) == 4.0, "far ratios end at the edge"
    points = {c.get_label(): c.get_offsets()[:, 0].tolist() for c in right.collections}
    assert points["other"] == [0.6]
    assert points["this planner"] == pytest.approx([0.2, 99.0])
    assert evidence_of(figure) == "published, predicted"


# The studio

CHOICES = {
    "gpu": "A100-80GB",
    "nodes": 1,
    "link": "InfiniBand HDR x 8",
    "tp": 2,
    "pp": 4,
    "virtual_stages": 1,
    "zero_stage": 0,
    "recompute": "none",
    "offload": "none",
    "micro_batch": 1,
    "sequences": 64,
}


def test_controls_make_the_plan_and_dp_is_what_is_left() -> None:
    assert design(MODEL, **CHOICES).plan == PLAN
    assert design(MODEL, **(CHOICES | {"pp": 1, "zero_stage": 1})).plan.dp == 4
    with pytest.raises(ValueError, match="the cluster has 8"):
        design(MODEL, **(CHOICES | {"tp": 16}))


def test_the_static_figure_says_fit_speed_and_cost() -> None:
    figure, alt = draw_design(FOUND, tokens=1e9)
    for words in ("Fits, ", "MFU", "bubble", "1B tokens", "$2.0 a GPU hour", "given with"):
        assert words in alt
    assert r"\$" in texts(figure), "a bare dollar sign would begin a formula"
    too_large = planned(dp=8, tp=1, pp=1, sequence_parallel=False)
    assert "lacks" in draw_design(too_large)[1]


def test_the_studio_answers_what_cannot_be_with_a_sentence() -> None:
    start = {"nodes": 1, "tp": 2, "pp": 4, "sequences": 64}
    box = studio([MODEL], prices={"A100-80GB": 2.5}, start=start)
    grid, picture = box.children
    controls = {control.description: control for control in grid.children}
    assert isinstance(controls["tp"], widgets.SelectionSlider)
    assert 'alt="dp1 tp2 pp4 b1' in picture.value and "$2.5 a GPU hour" in picture.value
    controls["tp"].value = 16
    assert 'alt="No such plan. The plan is for 64 GPUs' in picture.value
    controls["tp"].value = 2
    assert 'alt="dp1 tp2 pp4 b1' in picture.value


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: draw_pareto([]), "at least one plan"),
        (lambda: draw_validation([]), "compare_all"),
        (lambda: studio([MODEL], start={"tp": 3}), "cannot start with tp=3"),
        (lambda: explore(lambda a: None, {"b": 1}, a=[1]), "no such control"),
        (lambda: studio(["llama-9-7b"]), "llama"),
        (
            lambda: draw_pareto(
                [FOUND, estimate(MODEL, replace(CLUSTER, gpu="H100"), PLAN, BATCH)]
            ),
            "different GPUs",
        ),
    ],
)
def test_bad_input_is_a_sentence(call: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()  # type: ignore[operator]


# The review of a design


def test_a_sound_design_passes_every_criterion() -> None:
    best = search(MODEL, CLUSTER, BATCH).best
    assert best is not None
    large = Batch(sequences=1024, sequence_length=2048)
    sound = estimate(MODEL, CLUSTER, PLAN, large)
    fastest = search(MODEL, CLUSTER, large).best
    assert fastest is not None
    cheap = replace(sound, cluster=replace(CLUSTER, usd_per_gpu_hour=0.01))
    verdict = review(
        cheap, replace(fastest, cluster=cheap.cluster), tokens=1e11, days=365, usd=1e5, spares=1
    )
    failed = [row.name for row in verdict.criteria if not row.passed]
    assert failed in ([], ["speed"]) and verdict.points == 12 - len(failed)
    with pytest.raises(ValueError, match="differ in batch"):
        review(sound, best, tokens=1e9, days=30, usd=1e5)


@pytest.mark.parametrize(
    ("fields", "asked", "failed"),
    [
        ({}, {"usd": 1.0}, "cost"),
        ({}, {}, "tokens"),
        ({}, {"checkpoint_interval_seconds": 86_400.0}, "checkpoints"),
        ({}, {}, "other GPU"),
        ({}, {"tokens": 1e13}, "time"),
        ({"recompute": "full"}, {}, "speed"),
        ({"micro_batch": 16}, {}, "batch"),
        ({"tp": 1, "pp": 1, "dp": 8, "sequence_parallel": False}, {}, "fits"),
    ],
)
def test_each_weakness_fails_its_own_criterion(
    fields: dict[str, object], asked: dict[str, float], failed: str
) -> None:
    best = search(MODEL, CLUSTER, BATCH).best
    assert best is not None
    verdict = review(planned(**fields), best, **({"tokens": 1e9, "days": 30, "usd": 1e5} | asked))
    row = next(row for row in verdict.criteria if row.name == failed)
    assert not row.passed and f"FAIL  {failed}" in str(verdict)


# Programs of any kind


def test_schedules_are_drawn_below_each_other_with_their_evidence() -> None:
    panels = {
        name: Panel(rows := schedule_actions(name, 3, 4), run_schedule(rows, 1, 2))
        for name in ("1f1b", "zb-h1")
    }
    panels["as run"] = panels["zb-h1"]._replace(evidence=Evidence.MEASURED)
    figure = draw_schedules(panels, title="Three")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == "1f1b (predicted): bubble 50.0% of the work; in flight 3, 2, 1"
    assert titles[2].startswith("as run (measured): bubble 16.7%") and "3, 3, 3" in titles[2]
    assert (
        "backward to the weights" in texts(figure) and evidence_of(figure) == "measured, predicted"
    )
    for axes, panel in zip(figure.axes, panels.values(), strict=True):
        spans = [path for bars in axes.collections for path in bars.get_paths()]
        assert len(spans) == sum(map(len, panel.rows)) + 3, "each action, and a row of idling"
        assert axes.get_xlim() == pytest.approx((0, panels["1f1b"].result.total))
        assert {text.get_text() for text in axes.texts} == {"0", "1", "2", "3"}, "from 0, as in 2F0"


def test_chunks_count_by_their_share_of_a_rank() -> None:
    rows = schedule_actions("1f1b", 4, 8, 2)
    (axes,) = draw_schedules({"interleaved": Panel(rows, run_schedule(rows, 0.5, 1.0))}).axes
    assert axes.get_title(loc="left").endswith("in flight 5.5, 4.5, 3.5, 2.5")
