"""What lab 14's checks compare with, by brute force, and the runs with faults."""

from __future__ import annotations

import itertools

import pytest

from utils.lessons.lesson_14 import checks as lab_14
from utils.lessons.lesson_14.faulty import faulty_run, one_process
from utils.lessons.lesson_14.placement import crossing_bytes, layouts


def test_the_least_crossing_is_that_of_brute_force():
    for sizes, sent, per_node in lab_14._CLUSTERS[:-1]:
        every = (sum(crossing_bytes(row, sent, per_node).values()) for row in layouts(sizes))
        assert lab_14.least_crossing(sizes, sent, per_node) == pytest.approx(min(every))


@pytest.mark.slow
def test_the_planted_faults_show_where_the_lab_says():
    right = one_process()
    for run, axis in (("A", "pp"), ("B", "shard")):
        for along in ("pp", "shard"):
            found = faulty_run(run, **{along: 2})
            same = found["losses"] == pytest.approx(right["losses"], rel=1e-9)
            assert same == (along != axis), (run, along)


def test_runs_that_are_not_there():
    with pytest.raises(ValueError, match="There is no run 'C'"):
        faulty_run("C")
    with pytest.raises(ValueError, match="takes 16 ranks"):
        faulty_run("A", pp=4, shard=2, tp=2)


def test_the_least_peak_is_that_of_brute_force():
    for layers, stages, m, state, kept, end in ((8, 3, 4, 3.0, 1.0, 4.0), (9, 4, 2, 1.0, 2.0, 0.5)):
        every = (
            row for row in itertools.product(range(1, layers), repeat=stages) if sum(row) == layers
        )
        best = min(max(lab_14.stage_bytes(row, m, state, kept, end)) for row in every)
        assert lab_14.least_peak(layers, stages, m, state, kept, end) == pytest.approx(best)
