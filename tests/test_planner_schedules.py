"""Schedules run as they should, and the closed forms are what running them gives."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from utils.planner.schedules import (
    Work,
    bubble_closed,
    in_flight,
    in_flight_closed,
    order,
    run,
)

SHAPES = {"stages": st.integers(1, 7), "groups": st.integers(1, 4), "chunks": st.integers(1, 4)}


@settings(max_examples=150, deadline=None)
@given(**SHAPES, schedule=st.sampled_from(["1f1b", "gpipe"]), rest=st.integers(0, 3))
def test_closed_forms_equal_the_executed_schedule(stages, groups, chunks, schedule, rest):
    if stages == 1 or schedule == "gpipe":
        chunks = 1
    m = stages * groups if chunks > 1 else groups + rest
    rows = order(schedule, stages, m, chunks)
    for rank, row in enumerate(rows):
        assert in_flight(row) == in_flight_closed(schedule, rank, stages, m, chunks)
        assert sorted((w.forward, w.micro_batch, w.chunk) for w in row) == sorted(
            (forward, i, c) for forward in (False, True) for i in range(m) for c in range(chunks)
        )
    ran = run(rows, 1.0, 2.0, chunks=chunks)
    assert ran.bubble_ratio == pytest.approx(bubble_closed(stages, m, chunks))


@settings(max_examples=50, deadline=None)
@given(stages=st.integers(1, 8), m=st.integers(1, 20))
def test_in_flight_of_1f1b_is_min_of_micro_batches_and_distance_to_the_end(stages, m):
    found = [in_flight(row) for row in order("1f1b", stages, m)]
    assert found == [min(m, stages - i) for i in range(stages)]


@settings(max_examples=30, deadline=None)
@given(**SHAPES)
def test_a_backward_pass_follows_its_forward_pass_and_its_successor(stages, groups, chunks):
    assume(stages > 1)
    rows = order("1f1b", stages, stages * groups, chunks)
    ran = run(rows, 1.0, 2.0, transfer=0.25, chunks=chunks)
    ends = {(r, w): ran.ends[r][k] for r, row in enumerate(rows) for k, w in enumerate(row)}
    starts = {(r, w): ran.starts[r][k] for r, row in enumerate(rows) for k, w in enumerate(row)}
    for (rank, work), start in starts.items():
        if not work.forward:
            assert start >= ends[rank, Work(True, work.micro_batch, work.chunk)]
            if rank + 1 < stages:
                after = Work(False, work.micro_batch, work.chunk)
                assert start >= ends[rank + 1, after] + 0.25


def test_korthikanti_first_stage_holds_l_times_one_plus_p_minus_1_over_pm():
    p, v, layers = 8, 3, 96
    chunks = in_flight_closed("1f1b", 0, p, 64, v)
    assert chunks * layers / (p * v) == pytest.approx(layers * (1 + (p - 1) / (p * v)))


def test_a_schedule_that_waits_for_itself_is_refused():
    first = [Work(False, 0), Work(True, 0)]
    with pytest.raises(ValueError, match="deadlocks"):
        run([first, [Work(True, 0), Work(False, 0)]], 1.0, 2.0)


def test_interleaving_needs_whole_groups():
    with pytest.raises(ValueError, match="4 and does not divide 5"):
        order("1f1b", 4, 5, 2)
