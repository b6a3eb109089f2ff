"""Progress: lines where steps are done, marks where something happened, nonsense refused."""

from __future__ import annotations

import pytest

from evidence.record import recorded
from utils.lessons.lesson_16a.progress import Mark, Progress, Stretch, draw_progress, progress_of
from utils.lessons.lesson_16a.records.survive import run_in
from utils.ranks.recovery import ElasticRun, Moment
from utils.units import Evidence

FAULT = {"kind": "kill a rank", "at_step": 1, "target": 1, "seconds": 1.0}
RUN = ElasticRun(
    [
        Moment(1.0, "start", 0, 0, {"world": 2, "step": 0}),
        Moment(1.0, "start", 1, 1, {"world": 2, "step": 0}),
        Moment(1.5, "step", 0, 0, {"step": 0}),
        Moment(1.6, "step", 1, 1, {"step": 0}),
        Moment(2.0, "fault", None, None, FAULT),
        Moment(4.0, "start", 0, 0, {"world": 1, "step": 0}),
        Moment(4.5, "step", 0, 0, {"step": 0}),
        Moment(5.0, "link is back", 1),
    ],
    "loopback",
    "",
    {},
)


def test_a_run_becomes_stretches_and_marks() -> None:
    found = progress_of(RUN)
    assert found.stretches == [
        Stretch("2 ranks", [(1.0, 0), (1.5, 1)]),
        Stretch("1 rank", [(4.0, 0), (4.5, 1)]),
    ]
    assert found.marks == [Mark(2.0, "kill a rank"), Mark(5.0, "link is back")]


def test_panels_share_time_and_looks() -> None:
    figure = draw_progress({"a": progress_of(RUN), "b": progress_of(RUN)}, title="Both")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a", "b"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["2 ranks", "1 rank"]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["kill a rank", "link is back"]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="tells 1 to 4 labels apart; these are 0"):
        draw_progress({"a": Progress([])}, title="")
    many = Progress([Stretch(str(n), [(0, 0), (1, 1)]) for n in range(5)])
    with pytest.raises(ValueError, match="these are 5"):
        draw_progress({"a": many}, title="", evidence=Evidence.RECORDED)


# The stored runs that the lesson shows


def test_the_stored_job_met_three_faults_and_grew_again() -> None:
    (record,) = [r for r in recorded("survive") if r.provenance["device_type"] == "cpu"][:1]
    story = run_in(record, "three faults")
    kinds = [found.fault.kind for found in story.recoveries]
    assert kinds == ["kill a rank", "kill a host", "cut the link"]
    assert all(found.saw and found.back_seconds for found in story.recoveries)
    assert [world for *_, world, _ in story.worlds()][-2:] == [1, 2]
    with pytest.raises(ValueError, match="holds no run 'a fire'"):
        run_in(record, "a fire")


def test_the_stored_replica_lost_no_step_and_the_restart_some() -> None:
    record = recorded("survive")[0]
    restart = run_in(record, "a restart from the checkpoint")
    per_step = run_in(record, "tolerance for each step")
    assert per_step.recoveries[0].steps_lost <= 1 < restart.recoveries[0].steps_lost
    for run in (restart, per_step):
        ends = [m.more["weight"] for m in run.moments if m.what == "done"]
        assert len(ends) == 2 and ends[0] == ends[1], "the ranks end with the same weights"
    alert = next(row for row in record.rows if row["quantity"] == "an alert")
    assert alert["alert"] == "GpuIsLost" and alert["firing_seconds"] > 0
