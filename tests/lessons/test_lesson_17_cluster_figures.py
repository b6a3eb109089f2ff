"""The picture of a cluster's jobs, and the stored runs that it may show."""

from __future__ import annotations

import pytest

from evidence.record.store import recorded
from utils.lessons.lesson_17.cluster_lanes import draw_cluster
from utils.lessons.lesson_17.cluster_runs import STEPS
from utils.lessons.lesson_17.clusters import JobSpan
from utils.units import Evidence

HISTORY = [
    JobSpan("1", "tiny", "PENDING", "", 0, 0.0, 2.0),
    JobSpan("1", "tiny", "RUNNING", "n[1-2]", 0, 2.0, 12.0),
    JobSpan("1", "tiny", "PENDING", "", 1, 12.0, 18.0),
    JobSpan("1", "tiny", "RUNNING", "n[1,3]", 1, 18.0, 30.0),
    JobSpan("1", "tiny", "COMPLETED", "n[1,3]", 1, 30.0, 99.0),
]


def test_bars_lie_on_the_nodes_and_end_where_a_node_dies():
    figure = draw_cluster(
        HISTORY,
        ["n1", "n2", "n3"],
        killed={"n2": 7.0},
        title="Lost",
        evidence=Evidence.RECORDED,
        device="a machine, 2026-01-01",
    )
    [axes] = figure.axes
    bars = {
        (round(p.get_y() + p.get_height() / 2), p.get_x(), p.get_x() + p.get_width())
        for p in axes.patches
    }
    assert bars == {
        (0, 2, 12),
        (0, 18, 30),
        (1, 2, 7),
        (1, 7, 30),
        (2, 18, 30),
        (3, 0, 2),
        (3, 12, 18),
    }
    assert axes.get_xlabel() == "time (s)", "a half minute is no number of milliseconds"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["n1", "n2", "n3", "queue"]
    assert "recorded on a machine" in figure.get_supxlabel()
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert set(words) == {"tiny", "tiny, started again", "node is dead", "in the queue"}


def test_the_stored_runs_lost_a_node_and_a_worker_and_no_step():
    rows = {row["quantity"]: row for record in recorded("cluster_runs") for row in record.rows}
    assert set(rows) == {"slurm", "ray"}, "the lesson shows both where they cannot run"
    assert len(rows["slurm"]["losses"]) == len(rows["ray"]["losses"]) == STEPS
    assert rows["slurm"]["losses"] == pytest.approx(rows["ray"]["losses"], rel=1e-6)
    assert rows["slurm"]["killed_at_seconds"] < rows["slurm"]["history"][-1]["end_seconds"]
    assert 0 < rows["ray"]["killed_at_seconds"] < rows["ray"]["seconds"]
    last = JobSpan(**rows["slurm"]["history"][-1])
    assert (last.state, last.restarts, last.nodes) == ("COMPLETED", 1, "n[1,3]")
