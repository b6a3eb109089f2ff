"""Schedules run as they should, and the closed forms are what running them gives."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from utils.parallel.actions import (
    Action,
    DeadlockError,
    check_program,
    read_program,
    stage_owners,
    write_csv,
)
from utils.planner.schedules import (
    bubble_closed,
    count_messages,
    in_flight,
    in_flight_closed,
    run_schedule,
    schedule_actions,
    timed,
)

SHAPES = {"stages": st.integers(1, 7), "groups": st.integers(1, 4), "chunks": st.integers(1, 4)}


@settings(max_examples=150, deadline=None)
@given(**SHAPES, schedule=st.sampled_from(["1f1b", "gpipe"]), rest=st.integers(0, 3))
def test_closed_forms_equal_the_executed_schedule(stages, groups, chunks, schedule, rest):
    if stages == 1 or schedule == "gpipe":
        chunks = 1
    m = stages * groups if chunks > 1 else groups + rest
    rows = schedule_actions(schedule, stages, m, chunks)
    for rank, row in enumerate(rows):
        assert in_flight(row) == in_flight_closed(schedule, rank, stages, m, chunks)
        assert sorted(row) == sorted(
            Action(c * stages + rank, kind, i)
            for kind in "BF"
            for i in range(m)
            for c in range(chunks)
        )
    check_program(rows, m)
    assert count_messages(rows) == (2 * (stages * chunks - 1) * m if stages > 1 else 0)
    ran = run_schedule(rows, 1.0, 2.0)
    assert ran.bubble_ratio == pytest.approx(bubble_closed(stages, m, chunks))


@settings(max_examples=50, deadline=None)
@given(stages=st.integers(1, 8), m=st.integers(1, 20))
def test_in_flight_of_1f1b_is_min_of_micro_batches_and_distance_to_the_end(stages, m):
    found = [in_flight(row) for row in schedule_actions("1f1b", stages, m)]
    assert found == [min(m, stages - i) for i in range(stages)]


@settings(max_examples=30, deadline=None)
@given(**SHAPES)
def test_a_backward_pass_follows_its_forward_pass_and_its_successor(stages, groups, chunks):
    assume(stages > 1)
    rows = schedule_actions("1f1b", stages, stages * groups, chunks)
    ran = run_schedule(rows, 1.0, 2.0, transfer=0.25)
    ends = {(r, w): ran.ends[r][k] for r, row in enumerate(rows) for k, w in enumerate(row)}
    starts = {(r, w): ran.starts[r][k] for r, row in enumerate(rows) for k, w in enumerate(row)}
    owners = stage_owners(rows)
    for (rank, action), start in starts.items():
        stage, number = action.stage, action.micro_batch
        if action.kind == "B":
            assert start >= ends[rank, Action(stage, "F", number)]
            if stage + 1 < len(owners):
                assert start >= ends[owners[stage + 1], Action(stage + 1, "B", number)] + 0.25


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_only_1f1b_waits_for_messages_in_each_micro_batch(stages):
    def more(schedule, chunks=1):
        """Idle time that a micro-batch adds to a step, in messages."""
        low, high = (
            run_schedule(schedule_actions(schedule, stages, m, chunks), 1 / chunks, 2 / chunks, 0.5)
            for m in (8 * stages, 16 * stages)
        )
        return (high.total - high.busy - low.total + low.busy) / (8 * stages * 0.5)

    assert more("1f1b") == pytest.approx(2 * (stages - 1) / stages)
    others = [more("gpipe"), more("zb-h1"), more("1f1b", 2)]
    assert others == pytest.approx([0, 0, 0], abs=1e-9)


def waited(schedule, stages, chunks, message):
    """Messages that a step of 8 p micro-batches waits for, each so long; a rank's forward is 1."""
    rows = schedule_actions(schedule, stages, 8 * stages, chunks)
    free, slow = (run_schedule(rows, 1 / chunks, 2 / chunks, t) for t in (0.0, message))
    return (slow.total - free.total) / message


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("part", [0.02, 0.5, 1.0])  # of the longest message that is hidden
def test_hidden_messages_cost_time_once_in_a_step(stages, part):
    assert waited("gpipe", stages, 1, part) == pytest.approx(2 * (stages - 1))
    of_1f1b = 8 * 2 * (stages - 1) + 2 * (stages - 2)
    assert waited("1f1b", stages, 1, part) == pytest.approx(of_1f1b)
    for chunks in (2, 3, 4):
        hidden = waited("1f1b", stages, chunks, part / chunks)
        assert hidden == pytest.approx(2 * (chunks * stages - 1))
    assert waited("zb-h1", stages, 1, part / 2) == pytest.approx(4 * (stages - 1))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_message_longer_than_what_hides_it_costs_more(stages):
    for chunks in (2, 3, 4):
        assert waited("1f1b", stages, chunks, 1.05 / chunks) > 2 * (chunks * stages - 1) + 0.1
    assert waited("zb-h1", stages, 1, 1.05 / 2) > 4 * (stages - 1) + 0.1


def test_korthikanti_first_stage_holds_l_times_one_plus_p_minus_1_over_pm():
    p, v, layers = 8, 3, 96
    chunks = in_flight_closed("1f1b", 0, p, 64, v)
    assert chunks * layers / (p * v) == pytest.approx(layers * (1 + (p - 1) / (p * v)))


@settings(max_examples=60, deadline=None)
@given(stages=st.integers(1, 8), more=st.integers(0, 12))
def test_zb_h1_ends_when_the_last_stage_can(stages, more):
    m = stages + more
    rows = schedule_actions("zb-h1", stages, m)
    check_program(rows, m)
    assert run_schedule(rows, 1.0, 2.0).total == 3 * m + stages - 1
    for rank, row in enumerate(rows):
        assert in_flight(row) == in_flight_closed("zb-h1", rank, stages, m) == stages
    assert count_messages(rows) == 2 * (stages - 1) * m


def test_two_stages_side_by_side_on_a_rank_send_nothing():
    v_shaped = read_program([["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]])
    check_program(v_shaped)
    assert count_messages(v_shaped) == 4  # 0 to 1 and 2 to 3, and back
    assert run_schedule(v_shaped, 1.0, 2.0, transfer=0.5).total == 12 + 4 * 0.5


def test_pytorch_s_texts_are_read_and_written(tmp_path):
    rows = read_program([["0F0", "", None, "(0F1;0B0)OVERLAP_F_B", "0I1", "0W1"]])
    assert [str(action) for action in rows[0]] == ["0F0", "0F1", "0B0", "0I1", "0W1"]
    assert write_csv(rows, tmp_path / "rows.csv").read_text().split() == ["0F0,0F1,0B0,0I1,0W1"]
    with pytest.raises(ValueError, match="'0X1' is no action: write the stage"):
        read_program([["0X1"]])


GOOD = schedule_actions("1f1b", 3, 4)


def changed(rank, change):
    return [change(list(row)) if r == rank else row for r, row in enumerate(GOOD)]


@pytest.mark.parametrize(
    ("rows", "micro_batches", "message"),
    [
        (changed(1, lambda row: row[:-1]), None, "Rank 1 never runs 1B3: every micro-batch needs"),
        (changed(1, lambda row: row[1:]), None, "Rank 1 never runs 1F0"),
        (
            changed(2, lambda row: [*row, row[2]]),
            None,
            "2F1 stands twice on rank 2, at places 2 and 8",
        ),
        (GOOD, 3, "0F3 is of micro-batch 3; there are 3, from 0"),
        (GOOD, 5, "Rank 0 never runs 0F4"),
        (changed(0, lambda row: [*row, Action(2, "F", 9)]), None, "stage 2 is held by rank 0"),
        ([[], GOOD[1], GOOD[2]], None, "No rank runs stage 0"),
        ([[], []], None, "The schedule is empty"),
        (
            changed(0, lambda row: [*row, Action(0, "W", 1)]),
            None,
            "a part of it again: B is I and W",
        ),
        (
            changed(0, lambda row: [a for a in row if a != (0, "B", 1)] + [Action(0, "I", 1)]),
            None,
            "Rank 0 never runs 0W1",
        ),
    ],
)
def test_programs_that_are_no_training_step_are_refused(rows, micro_batches, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_program(rows, micro_batches)


def test_a_schedule_that_waits_for_itself_is_refused():
    first = read_program([["0B0", "0F0"], ["1F0", "1B0"]])
    with pytest.raises(DeadlockError, match="rank 0 cannot begin 0B0 before rank 0 has done 0F0"):
        run_schedule(first, 1.0, 2.0)


def test_a_deadlock_names_the_circle():
    rows = read_program(
        [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"], ["2F0", "2F1", "2B0", "2B1"]]
    )
    with pytest.raises(DeadlockError) as caught:
        check_program(rows)
    assert sorted(caught.value.circle) == [1, 2]
    assert "rank 1 cannot begin 1B0 before rank 2 has done 2B0" in str(caught.value)
    assert caught.value.waits[0] == (Action(0, "B", 0), Action(1, "B", 0))


def test_measured_times_make_a_run():
    (row,) = read_program([["0F0", "0B0"]])
    spans = {
        Action(0, "F", 0): (5.0, 6.0),
        Action(0, "W", 0): (6.5, 7.0),
        Action(0, "I", 0): (7.0, 8.5),
    }
    ran = timed([row], spans)
    assert ran.starts == ((0.0, 1.5),) and ran.ends == ((1.0, 3.5),)
    assert ran.total == 3.5 and ran.busy == 3.0


def test_orders_refuse_what_they_cannot_give():
    with pytest.raises(ValueError, match="4 and does not divide 5"):
        schedule_actions("1f1b", 4, 5, 2)
    with pytest.raises(ValueError, match="ZB-H1 has one chunk"):
        schedule_actions("zb-h1", 4, 8, 2)
    with pytest.raises(ValueError, match="write one of '1f1b', 'gpipe', 'zb-h1'"):
        schedule_actions("2f2b", 4, 8)
