"""The picture of a cluster's jobs, and the stored runs that it may show."""

from __future__ import annotations

import re

import pytest
from view_cases import texts

from evidence.record.store import recorded
from utils.lessons.lesson_17.cluster_lanes import draw_cluster, draw_troubles
from utils.lessons.lesson_17.cluster_runs import STEPS, kept_lines
from utils.lessons.lesson_17.clusters import JobSpan
from utils.lessons.lesson_17.signal_figure import draw_signal
from utils.units import Evidence

HISTORY = [
    JobSpan("1", "tiny", "PENDING", "", 0, 0.0, 2.0),
    JobSpan("1", "tiny", "RUNNING", "n[1-2]", 0, 2.0, 12.0),
    JobSpan("1", "tiny", "PENDING", "", 1, 12.0, 18.0),
    JobSpan("1", "tiny", "RUNNING", "n[1,3]", 1, 18.0, 30.0),
    JobSpan("1", "tiny", "COMPLETED", "n[1,3]", 1, 30.0, 99.0),
]


def test_bars_lie_on_the_nodes_and_tell_start_training_and_waiting_apart():
    figure = draw_cluster(
        HISTORY,
        ["n1", "n2", "n3"],
        killed={"n2": 7.0},
        trains=[6.0, 21.0],
        marks={"n2 is killed": 7.0, "Slurm notices": 7.5, "it starts again": 18.0},
        title="Lost",
        evidence=Evidence.RECORDED,
        device="a machine, 2026-01-01",
    )
    [axes] = figure.axes
    bars = {
        (round(p.get_y() + p.get_height() / 2), p.get_x(), p.get_x() + p.get_width(), p.get_hatch())
        for p in axes.patches
    }
    starts, dead = "//", "\\\\\\"
    assert bars == {
        (0, 2, 6, starts),
        (0, 6, 7, ""),  # it goes on until its other node dies
        (0, 7, 12, ""),  # then it holds the node
        (0, 18, 21, starts),
        (0, 21, 30, ""),
        (1, 2, 6, starts),
        (1, 6, 7, ""),
        (1, 7, 30, dead),
        (2, 18, 21, starts),
        (2, 21, 30, ""),
        (3, 0, 2, ""),
        (3, 12, 18, ""),
    }
    holds = next(p for p in axes.patches if p.get_x() == 7 and p.get_y() < 0)
    assert holds.get_facecolor() == (1, 1, 1, 1), "what trains nothing is no bar of training"
    assert axes.get_xlabel() == "time since Slurm's start (s)"
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "n1",
        "n2",
        "n3",
        "queue: tiny",
    ]
    assert "recorded on a machine" in figure.get_supxlabel()
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    kinds = [
        "job starts, until it has a new save",
        "job goes on from there",
        "job holds the node, no step runs",
    ]
    assert words[:5] == [*kinds, "node is dead", "in the queue"]
    assert words[5:] == ["1  n2 is killed", "2  Slurm notices", "3  it starts again"]
    near = [note.xyann[1] for note in axes.texts if note.get_text() in ("1", "2", "3")]
    assert near[0] < near[1] and near[2] == near[0], "numbers that are near do not overlap"
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_cluster([], ["n1"], title="")


def test_of_a_log_the_lines_stay_that_tell_what_befell_the_ranks():
    lost = "[rank0]: RuntimeError: [/gloo/pair.cc:561] Connection closed by peer [10.78.0.12]:5"
    log = (
        f"[W] socket\nstep 6 loss 4.1\n[rank0]:   File x\n{lost}\nsrun: error: n1: task 0: Exited\n"
    )
    assert kept_lines(log) == [
        "step 6 loss 4.1",
        "[rank0]: Connection closed by peer",
        "srun: error: n1: task 0: Exited",
    ]


def test_the_drawing_says_who_hears_the_signal_and_that_it_is_no_run():
    said = texts(draw_signal())
    assert "drawing" in said
    assert re.search(r"batch shell:\n.*none", said) and "138" in said and "75" in said


def test_the_stored_runs_lost_a_node_were_warned_and_lost_no_step():
    names = ("cluster_runs", "cluster_troubles")
    found = [row for name in names for record in recorded(name) for row in record.rows]
    rows = {row["quantity"]: row for row in found}
    assert set(rows) == {"slurm", "ray"}, "the lesson shows both where they cannot run"
    job = rows["slurm"]
    assert len(job["losses"]) == len(rows["ray"]["losses"]) == STEPS
    assert job["losses"] == pytest.approx(rows["ray"]["losses"], rel=1e-6)
    assert 0 < rows["ray"]["killed_at_seconds"] < rows["ray"]["seconds"]
    last = JobSpan(**[span for span in job["history"] if span["name"] == "tiny"][-1])
    assert (last.state, last.restarts, last.nodes) == ("COMPLETED", 2, "n[1,3]")
    assert (
        job["trains"][0] < job["killed"] < job["trains"][1] <= job["signalled"] < job["trains"][2]
    )
    assert "due to failure of node n2" in job["decisions"], "Slurm itself, for the dead node"
    assert job["decisions"].count("Requeuing") == 2, "and job.slurm, after 75"
    assert job["log"].count("exit code 75") == 2, "both ranks saved before they ended"
    once, gently = job["uneven_ends"].split("\n\n")
    assert "srun ended with 143" in once and "srun ended with 75" in gently
    assert "5  start 3: cred_expire (5 s) has passed since the requeue" in texts(
        draw_troubles(job, evidence=Evidence.RECORDED, device="a machine")
    )
