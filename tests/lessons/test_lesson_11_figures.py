"""Figures of lesson 11: who sends what to whom, and what a message costs."""

from __future__ import annotations

import pytest
from matplotlib.patches import Rectangle
from view_cases import evidence_of, texts

from utils.labs.slow_jobs import SlowJob, lesson_job
from utils.lessons.lesson_11.buckets import draw_buckets
from utils.lessons.lesson_11.host_figure import draw_hosts
from utils.lessons.lesson_11.link_costs import draw_link_costs
from utils.lessons.lesson_11.messages import draw_messages
from utils.lessons.lesson_11.rails import draw_rails
from utils.lessons.lesson_11.ring_parts import draw_ring_parts, held_by_step
from utils.lessons.lesson_11.step_lanes import (
    KINDS,
    cure_lanes,
    draw_steps,
    sending,
    step_lanes,
)
from utils.lessons.lesson_11.wire import Message
from utils.traffic.cost import AlphaBeta
from utils.views.lanes import Span

RING = [
    Message(step, rank, (rank + 1) % 4, 64, 64 * ((rank - step) % 4))
    for step in (1, 2)
    for rank in range(4)
]


def test_every_message_has_a_square_in_its_step() -> None:
    figure = draw_messages(RING, title="a ring")
    for step, axes in enumerate(figure.axes, start=1):
        squares = [p for p in axes.patches if isinstance(p, Rectangle)]
        found = {(round(p.get_y() + 0.5), round(p.get_x() + 0.5)) for p in squares}
        assert found == {(m.source, m.target) for m in RING if m.step == step}, f"step {step}"
        numbers = [t.get_text() for t in axes.texts]
        assert numbers == [str(m.at_byte // 64) for m in RING if m.step == step], f"step {step}"
    assert "64 B a message" in texts(figure)
    assert evidence_of(figure) == "measured on real ranks"


def test_whole_tensors_have_no_part_numbers() -> None:
    figure = draw_messages([Message(1, 0, 1, 8), Message(2, 1, 2, 4)], title="whole")
    assert not any(axes.texts for axes in figure.axes)
    assert "dark 8 B, light 4 B" in texts(figure)
    assert "number: part" not in texts(figure)


def test_hosts_are_parted_by_lines() -> None:
    apart = draw_messages(RING, title="two hosts", hosts=2)
    assert [len(axes.lines) for axes in apart.axes] == [2, 2]


def test_too_many_steps_or_none_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 16 steps; these are 0"):
        draw_messages([], title="")
    with pytest.raises(ValueError, match="these are 17"):
        draw_messages([Message(17, 0, 1, 8)], title="")


def test_a_cost_is_drawn_with_where_its_terms_are_even() -> None:
    cost = AlphaBeta(100e-6, 1e9)  # even at 100 kB
    points = [(size, cost.seconds(size)) for size in (2**12, 2**16, 2**20)]
    figure = draw_link_costs({"here": points}, {"here": cost}, title="a link")
    assert "here, fitted: 100 µs + bytes / 1 GB/s" in texts(figure)
    assert "latency-bound" in texts(figure)
    assert evidence_of(figure) == "measured on this machine; line fitted to these points"
    outside = draw_link_costs({}, {"fast": AlphaBeta(1e-9, 1e9)}, title="even at 1 B")
    assert "latency-bound" not in texts(outside)
    assert evidence_of(outside) == "predicted"


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 4 names; these are 0"):
        draw_link_costs({}, {}, title="")


def test_a_ring_is_replayed_from_its_messages() -> None:
    ring = [
        Message(step, rank, (rank + 1) % 4, 64, 64 * ((rank - back) % 4))
        for step, back in enumerate((1, 2, 3, 0, 1, 2), start=1)
        for rank in range(4)
    ]
    states = held_by_step(ring, 4)
    assert [len(held) for held in states[3][0]] == [4, 3, 2, 1], "complete on one rank"
    assert all(len(held) == 4 for row in states[-1] for held in row), "complete on all"
    figure = draw_ring_parts(ring, title="a ring")
    assert len(figure.axes) == 8
    assert evidence_of(figure) == "measured on real ranks"


def test_hosts_show_what_crosses() -> None:
    ring = [Message(1, rank, (rank + 1) % 4, 64) for rank in range(4)]
    said = texts(draw_hosts({"flat": ring}, 128, title="two hosts", seconds={"flat": 0.25}))
    assert "host 0 to 1: 0.50 x the tensor" in said
    assert "250 ms" in said
    with pytest.raises(ValueError, match="1 to 4 ways; these are 0"):
        draw_hosts({}, 1, title="")


def test_rails_add_up_the_ports() -> None:
    said = texts(draw_rails(450e9, 50e9))
    assert "= 400 GB/s" in said
    assert "A drawing" in said


def test_lanes_of_a_step_share_its_times_out_over_the_passes() -> None:
    job = lesson_job()
    trace, lanes = job.step(), step_lanes(job)
    for node, lane in enumerate(lanes.values()):
        for kind in KINDS:
            spans = [s for s in lane if s.kind == kind and s.end_seconds > s.start_seconds]
            total = sum(s.end_seconds - s.start_seconds for s in spans)
            assert total == pytest.approx(trace.seconds(kind)[node]), (node, kind)
        assert lane[-1].end_seconds == pytest.approx(trace.step_seconds)
    assert sum(s.kind == "backward" for s in lanes["node 5"]) == job.reduced_passes
    assert list(cure_lanes({"as found": job, "healthy": SlowJob()})) == ["as found", "healthy"]


def test_what_is_sent_begins_in_backward_and_ends_with_the_step() -> None:
    job = lesson_job()
    trace, sent = job.step(), sending(job)
    assert len(sent) == trace.buckets
    assert sum(seconds for _, seconds in sent) == pytest.approx(trace.network_busy_seconds)
    # The trace fills one first bucket a step, the lanes one a pass.
    last = sum(sent[-1])
    assert last == pytest.approx(trace.step_seconds, abs=0.005)
    figure = draw_steps(step_lanes(job), [job] * job.nodes, title="a step", ends=["3 times"])
    assert "network sends" in texts(figure) and "3 times" in texts(figure)
    assert evidence_of(figure) == "simulated"


def test_where_backward_ends_stands_in_the_buckets_figure() -> None:
    spans = [Span("backward", 5.0, 5.2), Span("start", 5.0, 5.1), Span("all-reduce", 5.1, 5.4)]
    figure = draw_buckets({"one": (spans, 0.4)}, title="buckets", device="two hosts")
    assert "backward ends" in texts(figure)
    assert figure.axes[0].lines[0].get_xdata()[0] == pytest.approx(200)
