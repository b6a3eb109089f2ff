"""Figures of lesson 17: runs and their law, what money buys, spot, the decision matrix."""

from __future__ import annotations

import pytest
from view_cases import evidence_of, texts

from utils.lessons.lesson_17.decision import Option, decide
from utils.lessons.lesson_17.decision_figures import draw_decision, draw_spot
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
