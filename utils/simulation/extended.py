"""What is said of a step that was extended from smaller ones: its allocator, its traffic, its notes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from utils.memory.measurement import Measurement
from utils.memory.source import rounded
from utils.memory.timeline import MemoryTimeline
from utils.simulation.cuda_allocator import reserved
from utils.simulation.devices import SIMULATED, VERDICTS, simulated_device
from utils.simulation.first_step import two_steps
from utils.simulation.message_stream import Misaligned
from utils.simulation.simulator import KEPT
from utils.traffic.collectives import Traffic

Depths = tuple[int, int, int]
_EXTENDED = "Extended from"
GUESSED = (
    " Which of several like blocks ends first does not repeat: it is taken to be the oldest, so that what "
    "is reserved may be some percent off."
)


def lasting_notes(found: Measurement) -> tuple[str, ...]:
    """What a measurement says beside the verdict on its own peak."""
    return tuple(note for note in found.notes if not note.startswith((*VERDICTS, KEPT)))


def extended_measurement(
    found: Sequence[Measurement],
    deep: MemoryTimeline,
    places: Depths,
    place: int,
    what: str,
    remark: str = "",
) -> Measurement:
    """The measurement of a step that was extended from three, its timeline, to `place` layers or samples.

    `remark` ends the note that says so.

    Raises:
        ValueError: their communication does not grow along a line.
    """
    base = found[0]
    note = f"{_EXTENDED} {listed(places)} {what} to {place}, allocation by allocation.{remark}"
    return dataclasses.replace(
        base,
        timeline=deep,
        traffic=_traffic(found, places, place, what),
        allocator_bytes=_allocator_bytes(found, deep, places, place),
        notes=(*lasting_notes(base), note),
    )


def _allocator_bytes(
    found: Sequence[Measurement], deep: MemoryTimeline, places: Depths, place: int
) -> dict[str, int]:
    """What the caching allocator says of the extended step, and the host's peak where it grows
    along a line; {} for a CPU."""
    if not found[0].allocator_bytes:
        return {}
    room_bytes = simulated_device(found[0].device.removeprefix(SIMULATED)).usable_bytes
    cache = reserved(*two_steps(deep, found[0].library_memory), room_bytes)
    said = {
        "allocated peak": cache.allocated_peak_bytes,
        "reserved peak": cache.reserved_peak_bytes,
    }
    with contextlib.suppress(Misaligned):  # another moment of the step decides at another size
        hosts = [m.allocator_bytes["host peak"] for m in found]
        said["host peak"] = on_line(hosts, places, place, 1)
    return said


def on_line(values: Sequence[int], places: Sequence[int], place: int, grain: int) -> int:
    """The value at `place` on the line through the outer two points, rounded up to `grain`.

    Raises:
        Misaligned: the middle point is off the line by more than the rounding of all three.
    """
    low, middle, high = values
    first, second, third = places
    whole = third - first
    off = low * whole + (high - low) * (second - first) - middle * whole
    if off and abs(off) >= grain * whole:
        raise Misaligned(f"A block takes {low:,}, {middle:,} and {high:,} bytes: no line.")
    exact = low * whole + (high - low) * (place - first)
    return rounded(-(-exact // whole), grain)


def _traffic(
    found: Sequence[Measurement], places: Depths, place: int, what: str
) -> tuple[Traffic, ...]:
    """Calls and bytes of each kind of collective, along their lines."""
    first, *others = (
        [dataclasses.replace(row, calls=0, payload_bytes=0) for row in m.traffic] for m in found
    )
    if any(other != first for other in others):
        problem = Misaligned("Their steps communicate in different ways.")
        raise refusal(what, places, problem, "simulate() runs them as they are.")
    rows = []
    for same in zip(*(m.traffic for m in found), strict=True):
        try:
            calls = on_line([row.calls for row in same], places, place, 1)
            size = on_line([row.payload_bytes for row in same], places, place, 1)
        except Misaligned as error:
            raise refusal(what, places, error, "simulate() runs them as they are.") from error
        rows.append(dataclasses.replace(same[0], calls=calls, payload_bytes=size))
    return tuple(rows)


def refusal(what: str, places: Depths, error: Misaligned, instead: str) -> ValueError:
    """Why steps cannot be extended, and what can be tried."""
    hint = ""
    if what == "layers":
        hint = (
            " Where every k-th layer differs, give from_layers that lie k apart, "
            "such as (k, 2 * k, 3 * k); where early layers differ, begin deeper."
        )
    return ValueError(f"{listed(places)} {what} cannot be extended. {error}{hint} Else {instead}")


def listed(places: Depths) -> str:
    """Three numbers in words."""
    return f"{places[0]}, {places[1]} and {places[2]}"
