"""The figure of bytes that leave nodes by order of axes, and simulated peaks on a plan's stages."""

from __future__ import annotations

import pytest
from matplotlib.patches import FancyArrowPatch

from utils.lessons.lesson_14.bugs import draw_bugs
from utils.lessons.lesson_14.groups import draw_groups
from utils.lessons.lesson_14.orders import draw_orders
from utils.planner import Batch, Cluster, Plan, estimate
from utils.views import draw_stage_memory


def test_every_order_has_its_total_and_its_largest_axis():
    figure = draw_orders({"tp < pp": {"tp": 0.0, "pp": 3e9}, "pp < tp": {"tp": 8e9, "pp": 1e9}})
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["3 GB, all of it pp", "9 GB, tp 8, pp 1"]
    assert "simulated" in figure.get_supxlabel() and len(figure.axes) == 1
    (low,) = [bar for bar in figure.axes[0].patches if bar.get_width() == 8]
    assert low.get_x() == 0


def test_the_smallest_stand_once_more():
    figure = draw_orders({"tp < pp": {"pp": 3e9}, "pp < tp": {"tp": 800e9}})
    assert [len(axes.texts) for axes in figure.axes] == [2, 1]


def test_a_group_of_each_axis_is_drawn():
    cluster, batch = Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=64, sequence_length=2048)
    found = estimate("megatron-175b", cluster, Plan(tp=4, pp=8, dp=2), batch)
    (axes,) = draw_groups(found, title="here").axes
    names = [text.get_text() for text in axes.texts]
    assert names.count("t3 d1") == 4 and names.count("tp: a ring of slices") == 2
    arrows = [shape for shape in axes.patches if isinstance(shape, FancyArrowPatch)]
    assert len(arrows) == 3 * 8 + 2 * 4 + 1  # ways down, two rings of four, one pair of replicas
    with pytest.raises(ValueError, match="fills a node of 8"):
        draw_groups(estimate("megatron-175b", cluster, Plan(tp=8, pp=4, dp=2), batch))


def test_runs_with_bugs_have_a_line_and_two_bars():
    figure = draw_bugs({"a": [0.0, 0.1], "b": [0.2, 0.3]}, {"a": [1.0, 1.0], "b": [0.8, 0.6]})
    left, right = figure.axes
    assert len(left.get_legend_handles_labels()[1]) == 2
    assert [text.get_text() for text in right.texts] == ["1.00", "0.80", "1.00", "0.60"]
    with pytest.raises(ValueError, match="the same runs"):
        draw_bugs({"a": [0.0]}, {})


@pytest.mark.parametrize("rows", [{}, {"one": {"sideways": 1.0}}])
def test_what_cannot_be_drawn(rows):
    with pytest.raises(ValueError, match="one order or more"):
        draw_orders(rows)


def test_simulated_peaks_stand_on_their_stages():
    plan, batch = Plan(tp=2, pp=4), Batch(sequences=8, sequence_length=2048)
    found = estimate("llama-2-7b", Cluster(gpu="A100-80GB", nodes=1), plan, batch)
    figure = draw_stage_memory(found, simulated={1: 2**30, 3: 2**31})
    (marks,) = [line for line in figure.axes[0].lines if line.get_label() == "simulated peak"]
    assert list(marks.get_xdata()) == [1, 3] and list(marks.get_ydata()) == [1, 2]
    assert "simulated" in figure.get_supxlabel()
    assert "simulated" not in draw_stage_memory(found).get_supxlabel()
