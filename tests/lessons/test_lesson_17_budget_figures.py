"""Figures of lesson 17: runs and their law, what money buys, spot, the decision matrix."""

from __future__ import annotations

import pytest
from view_cases import evidence_of, texts

from utils.lessons.lesson_17.decision import Option, decide
from utils.lessons.lesson_17.decision_figures import draw_decision, draw_spot
from utils.lessons.lesson_17.offer_figures import (
    draw_offers,
    draw_same_loss,
    draw_spot_price,
    verdict,
)
from utils.lessons.lesson_17.scaling import CHINCHILLA, REPLICATION, UNROUNDED
from utils.lessons.lesson_17.scaling_figures import draw_purchase, draw_runs

RUNS = [(n, d, REPLICATION.loss(n, d)) for n in (1e7, 1e8) for d in (1e9, 1e10)]


def test_runs_lie_on_the_lines_of_their_law_and_the_held_out_are_hollow() -> None:
    figure = draw_runs(RUNS, REPLICATION, held_out=[(1e9, 1e9, 2.6)], title="a law")
    axes = figure.axes[0]
    points = [line for line in axes.lines if line.get_marker() not in ("None", "")]
    assert [line.get_markerfacecolor() == "white" for line in points] == [False, False, True]
    assert "1.00B parameters" in texts(figure)
    assert evidence_of(figure) == "measured on this machine, predicted"
    with pytest.raises(ValueError, match="1 to 5 sizes; these are 0"):
        draw_runs([], REPLICATION, title="nothing")


def test_the_valley_names_each_law_s_best_and_more_service_means_more_tokens() -> None:
    laws = {"one": REPLICATION, "two": CHINCHILLA, "three": UNROUNDED}
    loss = REPLICATION.loss(13e9, 260e9)
    figure = draw_purchase(laws, 5.76e23, [1e9, 1e12, 1e14], loss, title="money")
    best = REPLICATION.best_parameters(5.76e23)
    assert f"one: {best / 1e9:.1f}B on" in texts(figure)
    names = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert names == list(laws), "both panels name their lines"
    for line in figure.axes[1].lines:
        ratios = list(line.get_ydata())
        assert ratios == sorted(ratios), "tokens a parameter rise with service"
    with pytest.raises(ValueError, match="1 to 3 laws"):
        draw_purchase({}, 1e20, [1e9], 3.0, title="")


def test_spot_has_a_line_and_points_a_name() -> None:
    line = [(0.1, 0.4), (10.0, 1.4)]
    figure = draw_spot({"quick": line, "slow": line}, {"quick": line}, title="spot")
    assert "on demand costs the same" in texts(figure)
    assert evidence_of(figure) == "simulated on points, predicted"
    with pytest.raises(ValueError, match="these are 0"):
        draw_spot({}, {}, title="")


def test_the_matrix_says_why_an_option_is_out_and_who_wins_where() -> None:
    rows = [Option("near", {"usd": 1.0, "days": 9.0}), Option("never", {}, obstacle="too large")]
    ranked = decide(rows, {"usd": 1})
    shape = {"title": "", "weight_label": "w", "price_label": "p", "now": (0.5, 1.0)}
    figure = draw_decision(ranked, [["near", "far"], ["near", ""]], [0, 1], [1, 2], **shape)
    assert "out: too large" in texts(figure) and "none is left" in texts(figure)
    with pytest.raises(ValueError, match="one row a price"):
        draw_decision(ranked, [["near"]], [0, 1], [1, 2], **shape)
    many = [[str(cell) for cell in range(7)]] * 2
    with pytest.raises(ValueError, match="6 winners apart; these are 7"):
        draw_decision(ranked, many, list(range(7)), [1, 2], **shape)


def test_half_and_twice_the_best_size_are_dearer_by_the_exponents_alone() -> None:
    """At a times k the size, tokens follow from k and the exponents: the budget does not matter."""
    laws = {"one": REPLICATION, "two": CHINCHILLA}
    loss = REPLICATION.loss(13e9, 260e9)
    for flop in (1e22, 5.76e23):
        figure = draw_same_loss(laws, flop, 2e6, [1e9, 1e12], loss, title="sizes")
        assert {"half: +26%", "twice: +15%"} <= set(texts(figure).split("\n"))
    sizes = list(figure.axes[1].lines[0].get_ydata())
    assert sizes[0] == pytest.approx(13, rel=0.01) and sizes[1] < sizes[0], "service wants less"
    with pytest.raises(ValueError, match="1 to 3 laws; these are 0"):
        draw_same_loss({}, 1e20, 1.0, [1e9], 3.0, title="")


def test_the_price_of_spot_is_the_ratio_over_the_goodput() -> None:
    figure = draw_spot_price({"quick": [(1.0, 0.8), (10.0, 0.5)]}, 0.4, {"zone": 3.0}, title="spot")
    assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx([0.5, 0.8])
    assert "zone" in texts(figure) and "on demand costs the same" in texts(figure)
    with pytest.raises(ValueError, match="1 to 3 lines, not 0"):
        draw_spot_price({}, 0.4, {}, title="")


@pytest.mark.parametrize(
    ("days", "word"),
    [
        ((20, 30), "in time"),
        ((29.9, 30.1), "too close to call"),
        ((30, 31), "too close to call"),
        ((30.1, 40), "late"),
    ],
)
def test_a_range_of_days_is_in_time_late_or_too_close(days: tuple[float, float], word: str) -> None:
    assert verdict(days, 30) == word


def test_offers_stand_beside_the_deadline_and_what_cannot_start_says_why() -> None:
    days, usd = {"near": (20.0, 25.0), "far": (40.0, 50.0)}, {"near": (1e5, 2e5), "far": (1e4, 2e4)}
    figure = draw_offers(days, usd, {"never": "too large"}, 30, title="offers")
    for said in ("20.0 to 25.0", "100 to 200", "cannot start: too large", "in time"):
        assert said in texts(figure)
    with pytest.raises(ValueError, match="same offers"):
        draw_offers(days, {}, {}, 30, title="")
