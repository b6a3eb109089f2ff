"""Progress: lines where steps are done, marks where something happened, nonsense refused."""

from __future__ import annotations

import pytest

from evidence.record import recorded
from utils.lessons.lesson_16a.backends import NCCL_SAYS, backends_table
from utils.lessons.lesson_16a.progress import (
    Again,
    Gap,
    Mark,
    Progress,
    Stretch,
    began_seconds,
    draw_progress,
    progress_of,
)
from utils.lessons.lesson_16a.records.survive import run_in
from utils.lessons.lesson_16a.watchers import draw_watchers
from utils.ranks.recovery import KINDS, ElasticRun, Fault, Moment, Recovery
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


def grown() -> ElasticRun:
    """A run whose host stays away for ten seconds; the ranks see it after one, and grow again later."""
    fault = FAULT | {"kind": "kill a host", "seconds": 10.0}
    return ElasticRun(
        [
            Moment(1.0, "start", 0, 0, {"world": 2, "step": 0}),
            Moment(2.0, "step", 0, 0, {"step": 6}),
            Moment(2.5, "fault", None, None, fault),
            Moment(3.0, "saw", 0, 0, {"text": "gone"}),
            Moment(6.0, "start", 0, 0, {"world": 1, "step": 5, "age_seconds": 2.0}),
            Moment(9.0, "step", 0, 0, {"step": 8}),
            Moment(13.0, "step", 0, 0, {"step": 11}),
            Moment(16.0, "start", 0, 0, {"world": 2, "step": 10}),
            Moment(17.0, "step", 0, 0, {"step": 10}),
        ],
        "loopback",
        "",
        {},
    )


def test_what_lies_between_stretches_is_known() -> None:
    found = progress_of(grown(), 1.0)
    assert found.gaps == [Gap(1.0, 2.0, 5.0), Gap(12.0, 12.0, 15.0)], "from the last step on"
    assert found.again == [Again(5.0, 5, 7), Again(15.0, 10, 12)], "steps 5 and 6, then 10 and 11"
    assert [mark.text for mark in found.marks] == ["kill a host", "host is back", "host 1 joins"]
    assert [mark.seconds for mark in found.marks] == [1.5, 11.5, 12.0]
    cut = progress_of(grown(), last_step=9, rows_per_step={1: 12, 2: 24})
    assert cut.stretches[1] == Stretch("1 rank", [(6.0, 5), (9.0, 9)], "12 rows a step")
    assert cut.stretches[2].points == [(16.0, 10)], "the start stays, steps after the last do not"
    texts = [text.get_text() for text in draw_progress({"a": found}, title="").axes[0].texts]
    assert texts.count("2 steps\nagain") == 2


def test_processes_begin_before_they_note_their_start() -> None:
    run = grown()
    assert began_seconds(run, run.recoveries[0]) == 6.0 - 2.0 - 2.5
    assert began_seconds(RUN, RUN.recoveries[0]) is None, "it was not noted"


def test_who_watches_whom_names_all() -> None:
    texts = " ".join(text.get_text() for text in draw_watchers(title="x").axes[0].texts)
    for word in ("agent 0", "agent 1", "rank 0", "rank 1", "rendezvous", "checkpoint", "timeout"):
        assert word in texts, word


def test_each_fault_has_its_words_under_nccl() -> None:
    assert set(NCCL_SAYS) == set(KINDS)
    found = Recovery(Fault("kill a rank", 1), 2.0, {0: (0.2, "closed")}, 3.0, 2, 2, 0, "rank 1")
    page = backends_table([(found, "measured here")]).to_html()
    assert "rank 0 after 0.2 s: closed (measured here)" in page and "exit code -9" in page


def test_panels_share_time_and_looks() -> None:
    figure = draw_progress({"a": progress_of(RUN), "b": progress_of(RUN)}, title="Both")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a", "b"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "2 ranks",
        "1 rank",
        "noticed, nobody trains",
    ]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["1 step\nagain", "kill a rank", "link is back"]
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
