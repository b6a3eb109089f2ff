"""Who holds what, and one category through several steps."""

from __future__ import annotations

import pytest
from view_cases import measured, texts

from utils.lessons.lesson_09.holders import draw_holders
from utils.lessons.lesson_09.over_phases import draw_gradients, draw_overlap, one_ahead
from utils.lessons.lesson_09.speed import gather_seconds
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
    figure = draw_gradients({"one": {0: measured(4), 3: measured(8)}}, per=MIB, title="t")
    first, last = figure.axes
    assert first.get_xlim() == last.get_xlim() and first.get_ylim() == last.get_ylim()
    assert "rank 0" in first.get_ylabel() and "rank 3" in last.get_ylabel()
    assert {"forward", "backward", "reduce", "step"} <= {t.get_text() for t in first.texts}
    with pytest.raises(ValueError, match="one rank or more"):
        draw_gradients({}, per=MIB)


@pytest.mark.parametrize(
    ("gather", "compute", "works"),
    [(4, 2, [4, 8, 12]), (2, 4, [2, 6, 10]), (3, 3, [3, 6, 9])],
    ids=["waits", "hides", "even"],
)
def test_a_gather_runs_beside_the_block_before(gather, compute, works):
    assert one_ahead(gather, compute, 3)[1] == works
    figure = draw_overlap({"a": (gather, compute)}, blocks=3, title="t")
    assert [t.get_text() for t in figure.axes[0].texts] == ["0", "0", "1", "1", "2", "2"]


def test_a_gather_over_nodes_takes_what_enters_a_node() -> None:
    """63 of 64 parts come through the node's ports, and no ring carries its whole line rate."""
    fast, slow = (gather_seconds(1e9, rate_gb) for rate_gb in (200, 25))
    assert 1 < fast * 200e9 / (1e9 * 63 / 64) < 3 and 4 < slow / fast < 9
