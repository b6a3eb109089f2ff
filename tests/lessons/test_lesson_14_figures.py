"""The figures and the table of lesson 14, and simulated peaks on a plan's stages."""

from __future__ import annotations

import pytest
from matplotlib.patches import FancyArrowPatch

from utils.lessons.lesson_14.bugs import draw_bugs
from utils.lessons.lesson_14.groups import draw_groups
from utils.lessons.lesson_14.orders import draw_orders
from utils.lessons.lesson_14.ratios import (
    draw_ratios,
    every_layout,
    halved_and_doubled,
    nearness,
    ranked_pairs,
    verdict,
)
from utils.lessons.lesson_14.scripts import monday_script
from utils.lessons.lesson_14.tables import layout_table
from utils.planner import Batch, Cluster, Plan, estimate
from utils.views import draw_stage_memory


def test_every_order_has_its_total_its_largest_axis_and_its_seconds():
    left = {"tp < pp": {"tp": 0.0, "pp": 3e9}, "pp < tp": {"tp": 8e9, "pp": 1e9}}
    figure = draw_orders(left, {"tp < pp": 0.25, "pp < tp": 90.0})
    (axes,) = figure.axes
    said = [text.get_text() for text in axes.texts]
    assert said == ["3 GB, all of it pp; 0.25 s", "9 GB, tp 8, pp 1; 90 s"]
    assert "simulated" in figure.get_supxlabel() and "predicted" in figure.get_supxlabel()
    (low,) = [bar for bar in axes.patches if bar.get_width() == 8]
    assert low.get_x() == 0


def test_a_group_of_each_axis_is_drawn():
    cluster, batch = Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=64, sequence_length=2048)
    found = estimate("megatron-175b", cluster, Plan(tp=4, pp=8, dp=2), batch)
    (axes,) = draw_groups(found, title="here").axes
    names = [text.get_text() for text in axes.texts]
    assert "rank 63\ntp 3" in names and names.count("rank 0\ntp 0") == 1
    assert sum(name.startswith("replica") for name in names) == 2
    arrows = [shape for shape in axes.patches if isinstance(shape, FancyArrowPatch)]
    assert len(arrows) == 3 * 8 + 2 * 4 + 2  # ways between stages, two rings of four, one pair
    with pytest.raises(ValueError, match="fills a node of 8"):
        draw_groups(estimate("megatron-175b", cluster, Plan(tp=8, pp=4, dp=2), batch))


def test_runs_with_bugs_have_a_cell_for_each_step_and_rank():
    right = {"a": ([2.0, 1.0], [1.0, 1.0]), "b": ([2.0, 1.0], [2.0, 1.0])}
    ranks = [{**right, "b": ([2.0, 1.5], [norm, 1.0])} for norm in (1.6, 1.2)]
    left, norms = draw_bugs(ranks, right).axes
    assert [text.get_text() for text in left.texts] == ["0", "0", "0", "5e-01"]
    assert [text.get_text() for text in norms.texts] == ["1.00", "1.00", "0.80", "0.60"]
    filled = [cell.get_facecolor()[:3] != (1, 1, 1) for cell in [*left.patches, *norms.patches]]
    assert filled == [False, False, False, True, False, False, True, True]
    near = [{**right, "b": ([2.0, 1.0 + 1e-7], [2.0, 1.0])}]
    (cell,) = [
        c for c in draw_bugs(near, right).axes[0].patches if c.get_facecolor()[:3] != (1, 1, 1)
    ]
    assert cell.get_facecolor()[1] > 0.5, "what nobody would see is pale"
    with pytest.raises(ValueError, match="the same runs"):
        draw_bugs([{"a": right["a"]}], {})


def test_layouts_stand_in_a_table_with_a_step_for_each_batch():
    cluster = Cluster(gpu="A100-80GB", nodes=8)
    found = {
        n: [
            estimate("megatron-175b", cluster, plan, Batch(sequences=n, sequence_length=2048))
            for plan in (Plan(tp=8, pp=8), Plan(tp=4, pp=8, dp=2, micro_batch=2))
        ]
        for n in (64, 128)
    }
    table = layout_table(found, caption="here").data
    assert list(table["TP x PP x DP"]) == ["8 x 8 x 1", "4 x 8 x 2"]
    assert list(table["micro-batch"]) == [1, 2]
    first = found[64][0]
    parts = [
        "products, data, s",
        "recomputed, s",
        "waits for tp, s",
        "for the pipeline, s",
        "for shard, s",
    ]
    assert table.loc[0, parts].sum() == pytest.approx(first.step_seconds - first.time.optimizer)
    assert list(table["step of 128, s"]) == [each.step_seconds for each in found[128]]
    with pytest.raises(ValueError, match="one plan or more"):
        layout_table({}, caption="none")


@pytest.mark.parametrize("rows", [{}, {"one": {"sideways": 1.0}}])
def test_what_cannot_be_drawn(rows):
    with pytest.raises(ValueError, match="one order or more"):
        draw_orders(rows, dict.fromkeys(rows, 1.0))


def test_simulated_peaks_stand_on_their_stages():
    plan, batch = Plan(tp=2, pp=4), Batch(sequences=8, sequence_length=2048)
    found = estimate("llama-2-7b", Cluster(gpu="A100-80GB", nodes=1), plan, batch)
    figure = draw_stage_memory(found, simulated={1: 2**30, 3: 2**31})
    (marks,) = [line for line in figure.axes[0].lines if line.get_label() == "simulated peak"]
    assert list(marks.get_xdata()) == [1, 3] and list(marks.get_ydata()) == [1, 2]
    assert "simulated" in figure.get_supxlabel()
    assert "simulated" not in draw_stage_memory(found).get_supxlabel()


def test_a_row_ties_loses_or_is_open():
    assert verdict([1.0, 1.19], 1.2) == "tie"
    assert verdict([1.0, 1.2], 1.2) == "open"
    assert verdict([1.2, 1.3], 1.2) == "loses"
    with pytest.raises(ValueError, match="one ratio or more"):
        verdict([], 1.2)


def test_each_step_stands_over_the_fastest_of_its_world():
    assert nearness({"a": [2.0, 9.0], "b": [4.0, 3.0]}) == {"a": [1.0, 3.0], "b": [2.0, 1.0]}


def test_rates_are_halved_and_doubled_one_at_a_time():
    cluster, batch = Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=64, sequence_length=2048)
    as_is, *others = halved_and_doubled(cluster)
    assert as_is == cluster and len(others) == 6
    half, twice = others[:3], others[3:]
    for plan, place in ((Plan(tp=8, pp=8), 1), (Plan(dp=64, zero_stage=3, recompute="full"), 0)):
        took = estimate("megatron-175b", cluster, plan, batch).step_seconds
        slower = estimate("megatron-175b", half[place], plan, batch).step_seconds
        faster = estimate("megatron-175b", twice[place], plan, batch).step_seconds
        assert slower > took >= faster
    products = [
        estimate("megatron-175b", c, Plan(tp=8, pp=8), batch).time.matmul
        for c in (cluster, half[2])
    ]
    assert 1.8 < products[1] / products[0] <= 2
    with pytest.raises(ValueError, match="has no NVLink"):
        halved_and_doubled(Cluster(gpu="RTX 4090", nodes=1))


def test_pairs_that_ran_are_ranked_by_the_planner():
    pairs = ranked_pairs()
    assert len(pairs) > 5000 and min(pair.predicted for pair in pairs) >= 1
    far = [pair.published > 1 for pair in pairs if pair.predicted >= 1.2]
    near = [pair.published > 1 for pair in pairs if pair.predicted < 1.1]
    assert sum(far) / len(far) > 0.95 > 0.8 > sum(near) / len(near)
    half = ranked_pairs(held_out=True)
    assert 1000 < len(half) < len(pairs) / 2 and set(half) < set(pairs)


def test_every_layout_is_tried_once_and_what_the_planner_refuses_is_left_out():
    cluster, batch = Cluster(gpu="A100-80GB", nodes=1), Batch(sequences=8, sequence_length=2048)

    def estimated(tp, pp, dp, recompute, rows, chunks):
        rows = min(rows, batch.sequences // dp)
        plan = Plan(
            tp=tp, pp=pp, dp=dp, recompute=recompute, micro_batch=rows, virtual_stages=chunks
        )
        return estimate("llama-2-7b", cluster, plan, batch)

    plans = [each.plan for each in every_layout(estimated, ranks=8)]
    assert len(plans) == len(set(plans)) and {plan.ranks for plan in plans} == {8}
    assert {(plan.tp, plan.pp) for plan in plans if plan.recompute == "full"} >= {(1, 8), (8, 1)}
    assert all(plan.virtual_stages == 1 for plan in plans if plan.pp == 1)
    assert not [plan for plan in plans if plan.tp * plan.pp > 8], "no more ranks than there are"


def test_ratios_are_bars_with_their_verdict():
    rows = {"a": [1.0, 1.1, 1.0], "b": [1.3, 1.25, 9.0], "c": [1.0, 1.0, 1.0]}
    figure = draw_ratios({"64 sequences": rows, "8 sequences": rows}, tie=1.2)
    said = [text.get_text() for text in figure.axes[0].texts]
    assert said == ["1.00 to 1.10: tie", "1.25 to 9.00: loses", "1.00: always the fastest"]
    bars = [line for line in figure.axes[0].lines if line.get_linewidth() == 7]
    assert {bar.get_solid_capstyle() for bar in bars} == {"butt"}, "a bar ends at its number"
    assert len(figure.axes) == 2 and "predicted" in figure.get_supxlabel()
    with pytest.raises(ValueError, match="the same layouts"):
        draw_ratios({"64": rows, "8": {"a": [1.0]}}, tie=1.2)


def test_the_script_is_the_one_that_the_page_prints():
    script = monday_script()
    compile(script, "train.py", "exec")
    assert script.startswith("import itertools\n") and "fully_shard(stage" in script
