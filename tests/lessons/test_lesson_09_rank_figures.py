"""Who holds what, and one category through several steps."""

from __future__ import annotations

import pytest
from view_cases import measured, texts

from utils.lessons.lesson_09.holders import draw_holders
from utils.lessons.lesson_09.over_phases import draw_gradients
from utils.lessons.lesson_09.verdict import draw_borders, draw_kept, draw_rounds
from utils.traffic.collectives import Traffic
from utils.units import MIB, Category
from utils.views import draw_breakdown, draw_over_time
from utils.views.style import LOOKS


def filled(figure, category):
    """Width and left edge of the filled parts of a category."""
    color = LOOKS[category].color
    (axes,) = figure.axes
    from matplotlib.colors import to_rgba

    parts = [p for p in axes.patches if p.get_facecolor() == to_rgba(color)]
    return [(round(p.get_x() % 1.15, 6), p.get_width()) for p in parts]


def test_a_sharded_category_is_filled_in_its_ranks_part():
    figure = draw_holders({"a": (), "b": ("gradients",)}, ranks=4, sends={"b": "reduces"})
    parts = filled(figure, Category.GRADIENTS)
    assert parts[:4] == [(0.0, 1)] * 4
    assert parts[4:] == [(0.0, 0.25), (0.25, 0.25), (0.5, 0.25), (0.75, 0.25)]
    assert filled(figure, Category.PARAMETERS) == [(0.0, 1)] * 8
    assert "reduces" in texts(figure) and "rank 3" in texts(figure)


@pytest.mark.parametrize(
    "given",
    [({}, 4), ({"a": ()}, 1), ({"a": ("activations",)}, 4)],
    ids=["none", "one rank", "kind"],
)
def test_what_cannot_be_held(given):
    sharded, ranks = given
    with pytest.raises(ValueError, match="one scheme or more on 2 to 64 ranks"):
        draw_holders(sharded, ranks=ranks)


def test_strips_are_as_high_as_their_bytes():
    (axes,) = draw_holders({"a": ()}, ranks=2, parameter_bytes=(4, 4, 4)).axes
    assert len({round(part.get_height(), 6) for part in axes.patches}) == 1
    for wrong in ((4, 4), (4, 4, 0)):
        with pytest.raises(ValueError, match="each above zero"):
            draw_holders({"a": ()}, parameter_bytes=wrong)


def test_one_category_on_one_scale():
    figure = draw_over_time({"one": measured(4), "two": measured(8)}, "gradients", per=MIB)
    one, two = figure.axes
    assert one.get_ylim() == two.get_ylim() and one.get_ylim()[1] == pytest.approx(115)
    assert one.get_ylabel() == "gradients (bytes per parameter)"
    assert one.get_title(loc="left") == "one" and "backward" in texts(figure)


def test_no_such_category():
    with pytest.raises(ValueError, match="runs and one of parameters"):
        draw_over_time({"one": measured()}, "gradient")


def test_bars_in_decimal_units():
    found = texts(draw_breakdown([measured(4)], unit="MB"))
    assert "memory (MB)" in found and f"{measured(4).peak_bytes / 1e6:,.1f} MB" in found
    with pytest.raises(ValueError, match="not a size"):
        draw_breakdown([measured(4)], unit="furlongs")


def test_gradients_of_each_rank_stand_on_the_same_phases():
    runs = {"one": {0: measured(4), 3: measured(8)}}
    figure = draw_gradients(runs, per=MIB, title="t", reduces=("one",), buckets=("one",))
    first, last = figure.axes
    assert first.get_xlim() == last.get_xlim() and first.get_ylim() == last.get_ylim()
    assert "rank 0" in first.get_ylabel() and "rank 3" in last.get_ylabel()
    assert {"forward", "backward", "reduce", "step"} <= {t.get_text() for t in first.texts}
    assert "reduce" not in texts(draw_gradients(runs, per=MIB)), "it reduces inside of backward"
    with pytest.raises(ValueError, match="one rank or more"):
        draw_gradients({}, per=MIB)


def test_bars_of_rounds_end_at_their_sums():
    calls = (
        Traffic("all-gather", "world", "bfloat16", 1, 100),  # a rank's part
        Traffic("reduce-scatter", "world", "float32", 1, 400),
    )
    figure = draw_rounds({"g = 1": {"a": calls}, "g = 4": {"b": ()}}, 4, 100, title="t")
    one, four = figure.axes
    # 150 numbers of two bytes and 75 of four; a round of 100 parameters is 75 numbers
    assert one.get_title(loc="left") == "g = 1" and [t.get_text() for t in one.texts] == ["3.0"]
    assert "reduce gradients, bf16" not in texts(figure), "the legend names what is drawn"
    assert [t.get_text() for t in four.texts] == ["0.0"]


def test_two_nodes_and_what_crosses():
    found = texts(draw_borders())
    assert "half A" in found and "once a step" in found and "every micro-batch" in found


def test_a_bar_spans_the_cases_and_a_dot_is_the_first() -> None:
    percents = {200: {"a": [100, 100], "b": [96, 90, 97]}, 25: {"a": [100, 100], "b": [99, 98]}}
    figure = draw_kept(percents, {"a": 4, "b": 2}, least_percent=95, title="t")
    one, two = figure.axes
    assert [text.get_text() for text in one.get_yticklabels()] == ["b, 2.0 GB", "a, 4.0 GB"]
    bars = [list(line.get_xdata()) for line in one.lines]
    assert bars[:4] == [[90, 97], [96], [100, 100], [100]] and bars[4] == [95, 95]
    assert one.lines[0].get_color() != two.lines[0].get_color(), "whether it always keeps 95%"
    assert "200 GB/s a node" in texts(figure)
    with pytest.raises(ValueError, match="no network"):
        draw_kept({}, {"a": 4}, least_percent=95, title="t")
