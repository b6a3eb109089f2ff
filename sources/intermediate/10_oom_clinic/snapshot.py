"""Snapshots in the format of `torch.cuda.memory._dump_snapshot`, made from a metered run.

The run's requests go through the simulated caching allocator; what it did becomes the trace, and what
it holds at the end the segments. Where PyTorch has a Python stack, these have category, phase and
module, which the meter knows.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from utils.checked import check_public
from utils.clinic.allocator_replay import Replay
from utils.files import write_whole
from utils.memory.events import Allocation
from utils.simulation.cuda_allocator import Act

FIRST_ADDRESS = 0x7F00_0000_0000
_KEYS = {"segments", "device_traces"}
_EVENT_KEYS = {"action", "addr", "size", "stream"}
_BLOCK_KEYS = {"size", "state"}
# What reading takes, at most: plain values take ten to thirty times their bytes in a pickle.
_ROOM_PER_BYTE, _LEAST_ROOM_BYTES = 100, 2**28


class SnapshotError(ValueError):
    """A file that is no snapshot, or one that this version does not read."""


def snapshot_of(replay: Replay) -> dict[str, Any]:
    """A snapshot of the replayed allocator, as `torch.cuda.memory._snapshot()` gives one."""
    trace = [event for time_ns, act in replay.acts for event in _events(replay, time_ns, act)]
    return {
        "segments": _segments(replay),
        "device_traces": [trace],
        "allocator_settings": {"made by": "the simulated caching allocator of this course"},
        "external_annotations": [],
    }


def write_snapshot(path: str | Path, replay: Replay) -> Path:
    """Write a snapshot as a pickle of plain values, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(Path(path), pickle.dumps(snapshot_of(replay), protocol=4))
    return Path(path)


def read_snapshot(path: str | Path) -> dict[str, Any]:
    """Read a snapshot that this course or PyTorch wrote.

    Raises:
        SnapshotError: the file is missing, cut short, no snapshot, or one of another version.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise SnapshotError(f"The snapshot {path} cannot be read: {error.strerror}.") from error
    try:
        with _at_most(_ROOM_PER_BYTE * len(data) + _LEAST_ROOM_BYTES):
            found = _PlainUnpickler(io.BytesIO(data)).load()
    except (
        EOFError,
        pickle.UnpicklingError,
        UnicodeDecodeError,
        ValueError,
        IndexError,
        KeyError,
        OverflowError,
        AttributeError,
        TypeError,
        MemoryError,
    ) as error:
        raise SnapshotError(
            f"{Path(path).name} is cut short or damaged ({type(error).__name__}: {error}). "
            "Write it again, and wait until the program that writes it has ended."
        ) from error
    if problem := _problem(found):
        raise SnapshotError(
            f"{Path(path).name} is a snapshot of another version, or none: {problem}. This course "
            "reads those of torch.cuda.memory._dump_snapshot() of PyTorch 2.1 and newer."
        )
    return found


@contextlib.contextmanager
def _at_most(more_bytes: int) -> Iterator[None]:
    """Inside, this process gets no more memory than that beyond what it has (Linux alone).

    One wrong byte makes a pickle ask for a table of up to 64 GB, and write it full.
    """
    if sys.platform != "linux":
        yield
        return
    import resource  # here: Windows has no such module

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + more_bytes
    limited = most if soft == resource.RLIM_INFINITY else min(soft, most)
    resource.setrlimit(resource.RLIMIT_AS, (limited, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts; a pickle could else run any code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _problem(found: Any) -> str:
    """What a snapshot lacks; "" if nothing."""
    if not isinstance(found, dict):
        return f"it holds a {type(found).__name__} where a dict is expected"
    if missing := sorted(_KEYS - found.keys()):
        return f"it has no {missing[0]!r}"
    if not isinstance(found["segments"], list) or not isinstance(found["device_traces"], list):
        return "'segments' and 'device_traces' are no lists"
    if not all(isinstance(trace, list) for trace in found["device_traces"]):
        return "'device_traces' is no list of lists"
    for event in (event for trace in found["device_traces"] for event in trace):
        if not isinstance(event, dict) or not event.keys() >= _EVENT_KEYS:
            return f"an event lacks one of {', '.join(sorted(_EVENT_KEYS))}"
    for segment in found["segments"]:
        blocks = segment.get("blocks") if isinstance(segment, dict) else None
        if not isinstance(blocks, list) or not all(map(_is_block, blocks)):
            return "a segment has no blocks with 'size' and 'state'"
    return ""


def _is_block(block: Any) -> bool:
    return isinstance(block, dict) and block.keys() >= _BLOCK_KEYS


def _events(replay: Replay, time_ns: int, act: Act) -> list[dict[str, Any]]:
    """An act as PyTorch tells it: a block that is freed is first asked for, on one stream at once."""
    actions = ["free_requested"] * (act.action == "free_completed") + [act.action]
    return [_event(replay, time_ns, act, action) for action in actions]


def _event(replay: Replay, time_ns: int, act: Act, action: str) -> dict[str, Any]:
    known = replay.timeline.allocations[act.name] if act.name >= 0 else None
    return {
        "action": action,
        "addr": FIRST_ADDRESS + act.start,
        "size": act.size,
        "stream": 0,
        "time_us": (time_ns - replay.timeline.start_ns) // 1000,
        # PyTorch's page needs a category "unknown" wherever there are others.
        "category": str(known.category) if known else "unknown",
        "frames": _frames(known),
    }


def _frames(block: Allocation | None) -> list[dict[str, Any]]:
    if block is None:
        return []
    where = block.module or "outside of any module"
    return [
        {"name": str(block.category), "filename": where, "line": 0},
        {"name": f"born in {block.born_in}", "filename": "", "line": 0},
    ]


def _segments(replay: Replay) -> list[dict[str, Any]]:
    found = {
        start: {
            "device": 0,
            "address": FIRST_ADDRESS + start,
            "total_size": size,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "allocated_size": 0,
            "active_size": 0,
            "requested_size": 0,
            "blocks": [],
        }
        for start, size in sorted(replay.allocator.segments.items())
    }
    starts = list(found)
    at = -1
    for start, size, name in replay.allocator.layout():
        while at + 1 < len(starts) and starts[at + 1] <= start:
            at += 1
        known = replay.timeline.allocations[name] if name is not None else None
        segment: dict[str, Any] = found[starts[at]]
        taken = size if known else 0
        segment["allocated_size"] += taken
        segment["active_size"] += taken
        segment["requested_size"] += known.bytes if known else 0
        segment["blocks"].append(
            {
                "address": FIRST_ADDRESS + start,
                "size": size,
                "requested_size": known.bytes if known else size,
                "state": "active_allocated" if known else "inactive",
                "frames": _frames(known),
            }
        )
    return list(found.values())


__all__ = ["SnapshotError", "read_snapshot", "snapshot_of", "write_snapshot"]

check_public(globals())
