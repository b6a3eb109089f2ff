"""The figure of bytes that leave nodes by order of axes, and simulated peaks on a plan's stages."""

from __future__ import annotations

import pytest

from utils.lessons.lesson_14.orders import draw_orders
from utils.planner import Batch, Cluster, Plan, estimate
from utils.views import draw_stage_memory


def test_every_order_has_its_total_and_its_largest_axis():
    figure = draw_orders({"tp < pp": {"tp": 0.0, "pp": 3e9}, "pp < tp": {"tp": 8e9, "pp": 1e9}})
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["3, most of it pp", "9, most of it tp"]
    assert "simulated" in figure.get_supxlabel()
    (low,) = [bar for bar in figure.axes[0].patches if bar.get_width() == 8]
    assert low.get_x() == 0


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
