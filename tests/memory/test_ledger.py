"""Categories from addresses and lifetimes, on streams built by hand; a CUDA snapshot replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
from utils.memory.source import CUDA_BLOCK_BYTES, events_from_snapshot, rounded
from utils.memory.timeline import MemoryTimeline

SNAPSHOT = Path(__file__).parent / "data" / "cuda_snapshot_by_hand.json"
START, END, SIZE = 100, 900, 64
TRAINING = [
    Mark(START, Phase.BEFORE_FORWARD),
    Mark(200, Phase.FORWARD),
    Mark(300, Phase.LOSS),
    Mark(400, Phase.BACKWARD),
    Mark(500, Phase.RECOMPUTE),
    Mark(600, Phase.BACKWARD),
    Mark(700, Phase.OPTIMIZER_STEP),
    Mark(800, Phase.AFTER_STEP),
]


def lives(*spans: tuple[int, int, int | None]) -> list[AllocationEvent]:
    """Events of blocks given as (address, born, died)."""
    events = [AllocationEvent(born, address, SIZE) for address, born, _ in spans]
    events += [AllocationEvent(died, address, -SIZE) for address, _, died in spans if died]
    return sorted(events)


def categories(
    events: list[AllocationEvent], marks: list[Mark] = TRAINING, **seen: object
) -> list[Category]:
    """The category of each block of a step with these events, in order of birth."""
    blocks = allocations(events, Observations(START, END, marks, **seen))
    return [block.category for block in sorted(blocks, key=lambda block: block.born_ns)]


@pytest.mark.parametrize(
    ("born", "died", "expected"),
    [
        (50, None, Category.OTHER),  # the warm-up left it
        (50, 250, Category.OTHER),
        (150, 250, Category.INPUTS),  # made before forward, alive when it begins
        (150, 160, Category.TEMPORARIES),
        (210, 220, Category.TEMPORARIES),
        (210, 350, Category.OTHER),  # not alive when backward begins
        (210, 450, Category.ACTIVATIONS),
        (210, None, Category.ACTIVATIONS),
        (310, 320, Category.LOGITS_AND_LOSS),
        (310, 450, Category.LOGITS_AND_LOSS),
        (410, 420, Category.TEMPORARIES),
        (410, 650, Category.TEMPORARIES),  # recomputation interrupts backward, no more
        (410, 750, Category.OTHER),
        (510, 520, Category.TEMPORARIES),
        (510, 650, Category.RECOMPUTED),
        (710, 720, Category.TEMPORARIES),
        (710, 850, Category.OTHER),
        (810, 850, Category.TEMPORARIES),
        (810, None, Category.OTHER),
    ],
)
def test_category_from_birth_and_death(born: int, died: int | None, expected: Category) -> None:
    assert categories(lives((1, born, died))) == [expected]


def test_blocks_that_the_warmup_freed_are_no_part_of_the_step() -> None:
    assert categories(lives((1, 10, 20), (1, 30, 40))) == []


def test_events_after_the_end_are_ignored() -> None:
    blocks = allocations(lives((1, 150, 950), (2, 910, 920)), Observations(START, END, TRAINING))
    assert [(block.address, block.died_ns) for block in blocks] == [(1, None)]


def test_without_backward_activations_are_alive_at_the_end_of_forward() -> None:
    inference = TRAINING[:3]
    kept, dropped = (1, 210, 320), (2, 215, 290)
    assert categories(lives(kept, dropped), inference) == [
        Category.ACTIVATIONS,
        Category.TEMPORARIES,
    ]


def test_each_forward_of_an_accumulation_has_its_own_backward() -> None:
    marks = [
        Mark(START, Phase.BEFORE_FORWARD),
        Mark(200, Phase.FORWARD),
        Mark(300, Phase.BACKWARD),
        Mark(400, Phase.FORWARD),
        Mark(500, Phase.BACKWARD),
    ]
    first, second, short = (1, 210, 310), (1, 410, 510), (2, 420, 430)
    assert categories(lives(first, second, short), marks) == [
        Category.ACTIVATIONS,
        Category.ACTIVATIONS,
        Category.TEMPORARIES,
    ]


def test_a_known_storage_is_what_its_address_holds_at_that_time() -> None:
    before, gradient, after = (7, 410, 420), (7, 430, 650), (7, 660, 670)
    known = [KnownStorage(440, 7, SIZE, Category.GRADIENTS)]
    assert categories(lives(before, gradient, after), known=known) == [
        Category.TEMPORARIES,
        Category.GRADIENTS,
        Category.TEMPORARIES,
    ]


def test_the_first_name_of_a_storage_stays() -> None:
    known = [
        KnownStorage(START, 1, SIZE, Category.PARAMETERS),
        KnownStorage(210, 1, SIZE, Category.INPUTS),
    ]
    assert categories([], known=known) == [Category.PARAMETERS]


def test_older_memory_counts_if_known_at_the_start_or_if_it_is_an_input() -> None:
    known = [
        KnownStorage(START, 1, SIZE, Category.BUFFERS),
        KnownStorage(START, 2, 0, Category.GRADIENTS),
        KnownStorage(250, 3, SIZE, Category.INPUTS),
        KnownStorage(250, 4, SIZE, Category.GRADIENTS),
    ]
    events = [AllocationEvent(260, 5, -SIZE)]  # frees of unknown memory change nothing
    blocks = allocations(events, Observations(START, END, TRAINING, known=known))
    assert [(b.category, b.born_ns, b.bytes) for b in blocks] == [
        (Category.BUFFERS, START, SIZE),
        (Category.INPUTS, START, SIZE),
    ]


def test_cast_weights_are_the_sizes_that_a_module_announced_each_once() -> None:
    spans = [ModuleSpan(205, 250, "block"), ModuleSpan(210, 240, "block.linear", (SIZE,))]
    outside, copy, result = (1, 206, 450), (2, 215, 450), (3, 220, 450)
    blocks = allocations(
        lives(outside, copy, result, (4, 245, 450)), Observations(START, END, TRAINING, spans)
    )
    assert [(b.category, b.module) for b in blocks] == [
        (Category.ACTIVATIONS, "block"),
        (Category.CAST_WEIGHTS, "block.linear"),
        (Category.ACTIVATIONS, "block.linear"),
        (Category.ACTIVATIONS, "block"),
    ]


def test_a_block_of_a_buckets_size_that_existed_before_is_communication() -> None:
    events = lives((1, 50, None), (2, 210, 450))
    assert categories(events, communication_bytes=(SIZE,)) == [
        Category.COMMUNICATION,
        Category.ACTIVATIONS,
    ]


def test_an_address_taken_again_without_a_free_holds_one_block() -> None:
    events = [AllocationEvent(210, 1, 10), AllocationEvent(220, 1, 30)]
    timeline = MemoryTimeline(
        allocations(events, Observations(START, END, TRAINING)), TRAINING, START, END
    )
    assert timeline.peak_bytes == 30


@pytest.fixture
def replayed() -> MemoryTimeline:
    """The hand-built snapshot's second device, with one parameter older than the recording."""
    snapshot = json.loads(SNAPSHOT.read_text())
    base, us = 139_000_000_000_000, 1000
    seen = Observations(
        start_ns=1100 * us,
        end_ns=1600 * us,
        marks=[
            Mark(1100 * us, Phase.BEFORE_FORWARD),
            Mark(1150 * us, Phase.FORWARD),
            Mark(1300 * us, Phase.LOSS),
            Mark(1405 * us, Phase.BACKWARD),
        ],
        known=[
            KnownStorage(1100 * us, base + 900_000_000, 700, Category.PARAMETERS),
            KnownStorage(1100 * us, base, 1000, Category.OPTIMIZER_STATE),
            KnownStorage(1415 * us, base + 6656, 200, Category.GRADIENTS),
        ],
    )
    blocks = allocations(events_from_snapshot(snapshot, 1), seen, CUDA_BLOCK_BYTES)
    return MemoryTimeline(blocks, seen.marks, seen.start_ns, seen.end_ns)


def test_snapshot_events_are_rounded_ordered_and_of_one_device() -> None:
    snapshot = json.loads(SNAPSHOT.read_text())
    assert events_from_snapshot(snapshot) == []
    events = events_from_snapshot(snapshot, 1)
    sizes = [1024, 512, -512, 5120, 512, 1024, -512, 512, -1024, 512, -5120, -512]
    assert [event.bytes for event in events] == sizes
    times = [event.time_ns for event in events]
    assert times == sorted(set(times)), "events of one microsecond keep their order"
    assert times[0] == 1_000_000


def test_snapshot_becomes_a_timeline(replayed: MemoryTimeline) -> None:
    # At the peak: parameter and state; 5120 saved for backward; 512 that was given back but
    # not yet free, since another stream might use it; 1024 that forward still needs.
    assert replayed.peak_bytes == 1024 + 1024 + 5120 + 512 + 1024
    assert replayed.peak_ns == 1_202_000
    assert dict(replayed.peak) == {
        Category.PARAMETERS: 1024,
        Category.OPTIMIZER_STATE: 1024,
        Category.ACTIVATIONS: 5120,
        Category.OTHER: 1024,
        Category.TEMPORARIES: 512,
    }
    assert dict(replayed.at(replayed.end_ns)) == {
        Category.PARAMETERS: 1024,
        Category.GRADIENTS: 512,
        Category.OPTIMIZER_STATE: 1024,
    }


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_rounding(size: int, expected: int) -> None:
    assert rounded(size, CUDA_BLOCK_BYTES) == expected
    assert rounded(size, 1) == size


def test_allocation_keeps_its_module_and_phase() -> None:
    seen = Observations(START, END, TRAINING, [ModuleSpan(205, 250, "layer")])
    assert allocations(lives((1, 210, 450)), seen) == [
        Allocation(1, SIZE, 210, 450, Category.ACTIVATIONS, Phase.FORWARD, "layer")
    ]
