"""Who holds what, and one category through several steps."""

from __future__ import annotations

import pytest
from view_cases import measured, texts

from utils.catalog import ModelShape
from utils.lessons.lesson_09.holders import draw_holders
from utils.lessons.lesson_09.over_phases import draw_gradients
from utils.lessons.lesson_09.speed import (
    HSDP,
    SCHEMES,
    UNSHARDED,
    line_share,
    peaks,
    scheme_rows,
    speeds,
)
from utils.lessons.lesson_09.trust import job_rows, leanest, verdict_stretched
from utils.lessons.lesson_09.verdict import draw_borders, draw_rounds, draw_verdict
from utils.planner import Batch
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
    figure = draw_rounds({"g = 1": {"a": calls}, "g = 4": {"b": ()}}, 4, 150, title="t")
    one, four = figure.axes
    assert one.get_title(loc="left") == "g = 1" and [t.get_text() for t in one.texts] == ["4.0"]
    assert [t.get_text() for t in four.texts] == ["0.0"]


def test_two_nodes_and_what_crosses():
    found = texts(draw_borders())
    assert "half A" in found and "once a step" in found and "every micro-batch" in found


def verdict(speeds, rates_gb, lines=("a", "b")):
    peaks_gb = {"a": 2, "b": 4}
    return draw_verdict(
        peaks_gb, speeds, rates_gb, least_percent=95, lines=lines, titles=("x", "y")
    )


def test_each_scheme_is_a_point_and_a_line_in_percent_of_the_first():
    speeds = {"a": [1e3, 2e3], "b": [2e3, 3e3]}
    figure = verdict(speeds, (25, 50))
    left, right = figure.axes
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in left.lines[:-1]]
    assert points == [(100, 2), (150, 4)] and left.lines[-1].get_xdata()[0] == 95
    drawn = [list(line.get_ydata()) for line in right.lines if len(line.get_ydata())]
    assert drawn == [[100, 100], [200, 150], [95, 95]]
    assert [text.get_text() for text in right.get_legend().get_texts()] == [*speeds]
    assert "TCP" not in texts(figure)


def test_a_scheme_may_be_a_point_and_no_line():
    figure = verdict({"a": [1e3], "b": [2e3]}, (25,), lines=("a",))
    left, right = figure.axes
    assert "b" in {text.get_text() for text in left.texts}
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["a"]


def test_no_line_joins_tcp_to_infiniband():
    figure = verdict({"a": [1e3, 2e3, 4e3]}, (1.25, 12.5, 25))
    alone, joined, _, border = figure.axes[1].lines
    assert list(alone.get_xdata()) == [1.25] and list(joined.get_xdata()) == [12.5, 25]
    assert 1.25 < border.get_xdata()[0] < 12.5 and "TCP" in texts(figure)


SHAPE = ModelShape(
    name="1.3B", family="llama", layers=24, hidden=2048, heads=16, feedforward=5504,
    vocabulary=50304, max_sequence=2048, tied=True,
)  # fmt: skip
BATCH = Batch(sequences=512, sequence_length=2048)


def test_rows_of_schemes_say_what_their_lines_draw() -> None:
    unsharded, hsdp = scheme_rows(SHAPE, BATCH, {n: SCHEMES[n] for n in (UNSHARDED, HSDP)}, 2)
    assert float(hsdp["peak, GB"]) < 0.5 * float(unsharded["peak, GB"])
    assert hsdp["peak, GB"] == peaks(SHAPE, BATCH, 2)[HSDP]
    drawn = speeds(SHAPE, BATCH, 2, (25,))
    assert unsharded["tokens/s at 25 GB/s"] == f"{drawn[UNSHARDED][0]:,.0f} (+0.0%)"
    assert float(hsdp["collectives cost, ms"]) > float(unsharded["collectives cost, ms"])
    assert 0 < line_share(1.25) < line_share(25) < 1


def test_the_leanest_keeps_the_share_that_is_asked() -> None:
    held, drawn = peaks(SHAPE, BATCH, 2), speeds(SHAPE, BATCH, 2, (200, 25))
    for column, rate in enumerate((200, 25)):
        for keep in (0.0, 0.9, 0.95, 1.0):
            name, gain = leanest(SHAPE, BATCH, SCHEMES, keep, rate)
            shares = {n: found[column] / drawn[UNSHARDED][column] for n, found in drawn.items()}
            assert shares[name] == 1 + gain >= keep
            less = [n for n in held if held[n] < held[name] - 0.1 and shares[n] >= keep]
            assert not less, f"{less} hold less and keep {keep} of the speed"


def test_the_verdict_is_computed_again_with_one_thing_changed() -> None:
    first, *others = verdict_stretched(SHAPE, BATCH)
    name, gain = leanest(SHAPE, BATCH, SCHEMES, 0.95, 200)
    assert first["at 200 GB/s"] == f"{name}, {gain:+.1%}"
    assert len({str({**row, "": ""}) for row in [first, *others]}) == 1 + len(others)
    assert verdict_stretched(SHAPE, BATCH)[0] == first, "a changed constant is put back"


def test_four_at_once_hold_more_and_lose_less() -> None:
    two, four = (float(row.split()[3]) for row in job_rows(SHAPE, BATCH))
    assert four > 1.5 * two
