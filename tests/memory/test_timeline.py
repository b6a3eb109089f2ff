"""The timeline on random event streams, against sums worked out another way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.memory.events import (
    Allocation,
    AllocationEvent,
    Category,
    KnownStorage,
    Mark,
    ModuleSpan,
    Phase,
)
from utils.memory.ledger import Observations, allocations
from utils.memory.timeline import Breakdown, MemoryTimeline

TICK = 10  # time between two records: events of a real source never share a time
KNOWN = [Category.PARAMETERS, Category.GRADIENTS, Category.INPUTS, Category.OPTIMIZER_STATE]


class Stream(NamedTuple):
    """Random records of one step and the timeline that the meter makes of them."""

    events: list[AllocationEvent]
    seen: Observations
    timeline: MemoryTimeline


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Births and deaths at a handful of addresses, reused at will, in and before the step.

    Frees may hit addresses that hold nothing, births addresses that hold something (a free
    that the source missed), and known storages addresses of either kind.
    """
    kinds = st.sampled_from(["alloc", "alloc", "alloc", "free", "free", "known", "mark", "module"])
    records = draw(st.lists(st.tuples(kinds, st.integers(1, 6), st.integers(1, 999)), max_size=45))
    start_ns = TICK * draw(st.integers(0, len(records))) + 5
    end_ns = start_ns + TICK * len(records)
    if records and draw(st.booleans()):
        end_ns = start_ns + TICK * draw(st.integers(0, len(records)))
    events, known, marks, spans = [], [], [Mark(start_ns, Phase.BEFORE_FORWARD)], []
    for index, (kind, address, size) in enumerate(records):
        now = TICK * (index + 1)
        if kind in ("alloc", "free"):
            sign = 1 if kind == "alloc" else -1
            events.append(AllocationEvent(now, address, sign * size))
        elif kind == "known":
            known.append(KnownStorage(now, address, size, KNOWN[size % len(KNOWN)]))
        elif now > start_ns and kind == "mark":
            marks.append(Mark(now, list(Phase)[size % len(Phase)], "" if size % 3 else "by hand"))
        elif now > start_ns and kind == "module":
            cast = tuple(event.bytes for event in events[-2:] if event.bytes > 0)
            spans.append(ModuleSpan(now, now + TICK * (size % 7) + 3, f"m{address}", cast))
    seen = Observations(start_ns, end_ns, marks, spans, known)
    blocks = allocations(events, seen)
    return Stream(events, seen, MemoryTimeline(blocks, marks, start_ns, end_ns))


def counted(stream: Stream, time_ns: int) -> int:
    """Bytes alive at a time, address by address: what did the last record there leave?"""
    return sum(_held(stream, address, time_ns) for address in range(1, 7))


def _held(stream: Stream, address: int, time_ns: int) -> int:
    start_ns, end_ns = stream.seen.start_ns, stream.seen.end_ns
    happened = [e for e in stream.events if e.address == address and e.time_ns <= end_ns]
    found = [k for k in stream.seen.known if k.address == address]
    rows = sorted([*happened, *found], key=lambda row: row.time_ns)
    held, late = 0, 0
    for index, row in enumerate(rows):
        if isinstance(row, AllocationEvent):
            if row.time_ns <= time_ns:
                held, late = max(row.bytes, 0), 0
            continue
        before = next((r for r in rows[:index][::-1] if isinstance(r, AllocationEvent)), None)
        older = any(
            isinstance(r, KnownStorage) and _counts_as_older(r, start_ns)
            for r in rows[rows.index(before) + 1 if before else 0 : index]
        )
        empty = not older and (before is None or before.bytes < 0)
        after = next((r for r in rows[index:] if isinstance(r, AllocationEvent)), None)
        if empty and _counts_as_older(row, start_ns) and (after is None or after.time_ns > time_ns):
            late += row.bytes  # it was there from the start, whenever it was noticed
    return held + late


def _counts_as_older(row: KnownStorage, start_ns: int) -> bool:
    return row.time_ns <= start_ns or row.category is Category.INPUTS


def moments(stream: Stream) -> list[int]:
    """The step's start and the time of each event in the step."""
    start_ns, end_ns = stream.seen.start_ns, stream.seen.end_ns
    inside = [e.time_ns for e in stream.events if start_ns < e.time_ns <= end_ns]
    return [start_ns, *inside]


@given(streams())
def test_running_sum_equals_a_count_by_address(stream: Stream) -> None:
    timeline = stream.timeline
    for time_ns in moments(stream):
        last = np.searchsorted(timeline.times_ns, time_ns, side="right") - 1
        assert timeline.alive_bytes[last] == counted(stream, time_ns)


@given(streams())
def test_peak_is_the_maximum_and_names_its_first_time(stream: Stream) -> None:
    totals = [counted(stream, time_ns) for time_ns in moments(stream)]
    assert stream.timeline.peak_bytes == max(totals)
    assert stream.timeline.peak_ns == moments(stream)[totals.index(max(totals))]


@given(streams())
def test_the_lasting_peak_leaves_out_the_temporaries_of_every_moment(stream: Stream) -> None:
    seen = [stream.timeline.at(time_ns) for time_ns in moments(stream)]
    lasting = [alive.total_bytes - alive[Category.TEMPORARIES] for alive in seen]
    assert stream.timeline.lasting_peak_bytes == max(lasting)


@given(streams())
def test_categories_add_up_at_the_peak_and_at_every_event(stream: Stream) -> None:
    timeline = stream.timeline
    assert timeline.peak.total_bytes == timeline.peak_bytes
    for time_ns in moments(stream):
        assert timeline.at(time_ns).total_bytes == counted(stream, time_ns)


@given(streams())
def test_curves_add_up_and_agree_with_breakdowns(stream: Stream) -> None:
    timeline = stream.timeline
    curves = timeline.series()
    total = sum(curves.values(), np.zeros(len(timeline.times_ns), dtype=np.int64))
    assert total.tolist() == timeline.alive_bytes.tolist()
    for index, time_ns in enumerate(timeline.times_ns):
        now = {category: curve[index] for category, curve in curves.items() if curve[index]}
        assert now == dict(timeline.at(int(time_ns)))


@given(streams(), st.integers(0, 6000))
def test_first_crossing_is_the_first_event_over_the_limit(stream: Stream, limit: int) -> None:
    over = [(t, counted(stream, t)) for t in moments(stream) if counted(stream, t) > limit]
    crossing = stream.timeline.first_crossing(limit)
    assert (crossing and (crossing.time_ns, crossing.alive_bytes)) == (over[0] if over else None)
    if crossing and crossing.time_ns > stream.seen.start_ns:
        event = next(e for e in stream.events if e.time_ns == crossing.time_ns)
        assert crossing.wanted_bytes == event.bytes
        assert crossing.phase == stream.timeline.phase_at(event.time_ns)


@settings(max_examples=50)
@given(streams(), st.randoms(use_true_random=False))
def test_order_of_allocations_and_of_known_storages_is_of_no_matter(stream, random) -> None:
    timeline, seen = stream.timeline, stream.seen
    shuffled = list(timeline.allocations)
    random.shuffle(shuffled)
    other = MemoryTimeline(shuffled, timeline.marks, timeline.start_ns, timeline.end_ns)
    assert other.alive_bytes.tolist() == timeline.alive_bytes.tolist()
    assert dict(other.peak) == dict(timeline.peak)
    known = list(seen.known)
    random.shuffle(known)
    mixed = Observations(seen.start_ns, seen.end_ns, seen.marks, seen.spans, known)
    assert allocations(stream.events, mixed) == list(timeline.allocations)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 99)), min_size=1))
def test_events_at_one_time_do_not_raise_the_peak(rows: list[tuple[int, int, int]]) -> None:
    """A block that dies when another is born was never alive together with it."""
    lives = [
        Allocation(index, size, born, born + life, Category.OTHER, Phase.FORWARD, "")
        for index, (born, life, size) in enumerate(rows)
    ]
    timeline = MemoryTimeline(lives, [Mark(0, Phase.FORWARD)], 0, 20)
    alive = [sum(a.bytes for a in lives if a.born_ns <= t < a.died_ns) for t in range(20)]
    assert timeline.peak_bytes == max(alive)
    assert timeline.peak.total_bytes == timeline.peak_bytes


def test_nothing_happened() -> None:
    timeline = MemoryTimeline([], [Mark(7, Phase.BEFORE_FORWARD)], 7, 9)
    assert (timeline.peak_bytes, timeline.peak_ns, len(timeline.peak)) == (0, 7, 0)
    assert timeline.series() == {}
    assert timeline.first_crossing(1) is None


def test_spans_join_neighbours_and_cover_the_step() -> None:
    marks = [
        Mark(0, Phase.BEFORE_FORWARD),
        Mark(10, Phase.FORWARD),
        Mark(20, Phase.FORWARD),
        Mark(30, Phase.FORWARD, "clip"),
        Mark(40, Phase.BACKWARD),
    ]
    timeline = MemoryTimeline([], marks, 0, 50)
    names = [(span.name, span.start_ns, span.end_ns) for span in timeline.spans]
    assert names == [
        ("before forward", 0, 10),
        ("forward", 10, 30),
        ("clip", 30, 40),
        ("backward", 40, 50),
    ]
    phases = [timeline.phase_at(time_ns) for time_ns in (-1, 0, 9, 10, 35, 40)]
    assert phases == [
        "before forward",
        "before forward",
        "before forward",
        "forward",
        "clip",
        "backward",
    ]


def test_crossing_names_the_phase_module_and_category() -> None:
    lives = [
        Allocation(1, 100, 0, None, Category.PARAMETERS, Phase.BEFORE_FORWARD, ""),
        Allocation(2, 50, 12, None, Category.ACTIVATIONS, Phase.FORWARD, "layer1.conv"),
        Allocation(3, 60, 14, None, Category.ACTIVATIONS, Phase.FORWARD, "layer2.conv"),
    ]
    marks = [Mark(0, Phase.BEFORE_FORWARD), Mark(10, Phase.FORWARD)]
    timeline = MemoryTimeline(lives, marks, 0, 20)
    assert timeline.first_crossing(210) is None
    assert timeline.first_crossing(209) == (
        14,
        209,
        60,
        210,
        "forward",
        "layer2.conv",
        Category.ACTIVATIONS,
    )
    at_the_start = timeline.first_crossing(99)
    assert at_the_start is not None
    assert (at_the_start.time_ns, at_the_start.alive_bytes) == (0, 100)
    assert at_the_start.category is Category.PARAMETERS


def test_breakdown_is_a_mapping_without_empty_categories() -> None:
    breakdown = Breakdown({Category.INPUTS: 3, Category.OTHER: 0, Category.GRADIENTS: 4})
    assert list(breakdown) == [Category.GRADIENTS, Category.INPUTS]
    assert breakdown[Category.BUFFERS] == 0
    assert (breakdown.total_bytes, breakdown.state_bytes, len(breakdown)) == (7, 4, 2)
    with pytest.raises(TypeError):
        breakdown[Category.INPUTS] = 5


def test_a_breakdown_answers_to_plain_names_and_refuses_wrong_ones() -> None:
    found = Breakdown({Category.ACTIVATIONS: 7, Category.GRADIENTS: 5})
    assert found["activations"] == found[Category.ACTIVATIONS] == 7
    assert found["optimizer state"] == 0
    assert dict(found) == {"gradients": 5, "activations": 7}
    with pytest.raises(KeyError, match="'activation' is no category of bytes. Did you mean"):
        found["activation"]
