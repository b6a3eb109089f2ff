"""What lesson 13's figures say of programs whose numbers are known."""

from __future__ import annotations

import pytest

from utils.lessons.lesson_13.orders_figure import draw_orders
from utils.lessons.lesson_13.placement_figure import draw_placements
from utils.planner.schedules import count_messages, run_schedule, schedule_actions
from utils.units import Evidence
from utils.views import Panel

ROWS = schedule_actions("1f1b", 4, 8)


def test_orders_say_idle_beside_work_and_step_and_mark_the_last_ranks_waits() -> None:
    (axes,) = draw_orders({"1F1B": Panel(ROWS, run_schedule(ROWS, 1, 2))}, title="", unit="").axes
    heading = axes.get_title(loc="left")
    assert "37.5% of the work, 27.3% of the step" in heading and "4, 3, 2, 1" in heading
    notes = {text.get_text() for text in axes.texts}
    assert {"3 forwards", "3 backwards"} <= notes


def test_of_what_was_measured_no_share_is_said() -> None:
    panel = Panel(ROWS, run_schedule(ROWS, 1, 2), Evidence.MEASURED)
    (axes,) = draw_orders({"1F1B": panel}, title="", unit="").axes
    assert axes.get_title(loc="left") == "1F1B (measured)"


def test_each_look_stands_in_the_legend_once() -> None:
    panels = {}
    for kind, chunks in (("1f1b", 2), ("zb-h1", 1)):
        rows = schedule_actions(kind, 4, 8, chunks)
        panels[kind] = Panel(rows, run_schedule(rows, 1 / chunks, 2 / chunks))
    (legend,) = draw_orders(panels, title="", unit="").legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert len(labels) == len(set(labels)) == 6


@pytest.mark.parametrize(("ranks", "chunks"), [([0, 1, 2, 3], 1), ([0, 1, 2, 3] * 2, 2)])
def test_a_placement_sends_what_its_program_sends(ranks: list[int], chunks: int) -> None:
    (axes,) = draw_placements({"it": ranks}, 8).axes
    messages = count_messages(schedule_actions("1f1b", 4, 8, chunks))
    assert f"= {messages} messages" in axes.get_title(loc="left")


def test_a_v_stays_on_the_last_rank() -> None:
    (axes,) = draw_placements({"V": [0, 1, 2, 3, 3, 2, 1, 0]}, 8).axes
    assert "6 borders x 2 x 8 = 96 messages" in axes.get_title(loc="left")
