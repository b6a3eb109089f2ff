"""Snapshots, traces and their pages: what is written, and what is refused with a sentence."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from utils.clinic import replay
from utils.lessons.lesson_10.pages import (
    VIEWERS,
    VIEWS,
    TraceError,
    read_trace,
    write_snapshot_page,
    write_trace_page,
)
from utils.lessons.lesson_10.snapshot import SnapshotError, read_snapshot, write_snapshot
from utils.memory import MemoryTimeline, measure
from utils.memory.source import events_from_snapshot


@pytest.fixture(scope="module")
def timeline() -> MemoryTimeline:
    """One step of a small model, from its first allocation on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))

    def step() -> None:
        model(torch.randn(256, 512)).sum().backward()

    return measure(step, model=model, timed_steps=0, warmup_steps=0).timeline


def test_a_snapshot_has_what_pytorchs_own_has(timeline: MemoryTimeline, tmp_path: Path) -> None:
    found = replay(timeline)
    read = read_snapshot(write_snapshot(tmp_path / "run.pickle", found))
    blocks = [block for segment in read["segments"] for block in segment["blocks"]]
    assert sum(block["size"] for block in blocks) == found.allocator.reserved_bytes
    taken = [block["size"] for block in blocks if block["state"] == "active_allocated"]
    assert sum(taken) == found.allocator.allocated_bytes, "the allocator's own two numbers"
    assert [p.name for p in tmp_path.iterdir()] == ["run.pickle"], "and nothing else on disk"


def test_the_meter_reads_back_what_it_wrote(timeline: MemoryTimeline, tmp_path: Path) -> None:
    """The same events as a GPU's snapshot would give the meter."""
    read = read_snapshot(write_snapshot(tmp_path / "run.pickle", replay(timeline)))
    alive = peak = 0
    for event in events_from_snapshot(read):
        alive += event.bytes
        peak = max(peak, alive)
    assert peak == replay(timeline).allocator.allocated_peak_bytes, "one peak by both ways"


def test_pytorchs_own_summary_reads_it(timeline: MemoryTimeline, tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    found = replay(timeline)
    snapshot = read_snapshot(write_snapshot(tmp_path / "run.pickle", found))
    told = _memory_viz.segsum(snapshot)  # raises where the bytes do not add up
    assert f"segments: {len(found.allocator.segments)}\n" in told, "PyTorch counts our segments"


DAMAGED: dict[str, tuple[Any, str]] = {
    "of PyTorch before 2.1, a list": ([{"address": 1}], "a list where a dict"),
    "without traces": ({"segments": []}, "'device_traces'"),
    "with traces of another form": ({"segments": [], "device_traces": [3]}, "no list of lists"),
    "with other events": ({"segments": [], "device_traces": [[{"action": "x"}]]}, "an event lacks"),
    "with other segments": ({"segments": [{}], "device_traces": []}, "a segment has no blocks"),
    "with other segments' blocks": (
        {"segments": [{"blocks": [{}]}], "device_traces": []},
        "a segment has no blocks",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_snapshots_of_other_versions_are_refused(name: str, tmp_path: Path) -> None:
    content, words = DAMAGED[name]
    path, page = tmp_path / "old.pickle", tmp_path / "page.html"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(SnapshotError, match="another version") as caught:
        write_snapshot_page(page, path)
    assert words in str(caught.value), "the sentence says what is missing"
    assert not page.exists() and len(list(tmp_path.iterdir())) == 1, "nothing is left on disk"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_a_snapshot_cut_short_is_refused(
    share: float, timeline: MemoryTimeline, tmp_path: Path
) -> None:
    whole = write_snapshot(tmp_path / "run.pickle", replay(timeline)).read_bytes()
    (tmp_path / "run.pickle").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(SnapshotError, match="cut short or damaged"):
        write_snapshot_page(tmp_path / "page.html", tmp_path / "run.pickle")
    assert [p.name for p in tmp_path.iterdir()] == ["run.pickle"], "no page, and no part of one"


@pytest.mark.parametrize("number", [2**24, 2**30, 2**32 - 1])
def test_a_damaged_snapshot_never_takes_the_memory_that_it_asks_for(
    number: int, tmp_path: Path
) -> None:
    """One byte makes "put in place NUMBER of the table" of another command: gigabytes of table."""
    path = tmp_path / "run.pickle"
    path.write_bytes(b"\x80\x04}r" + number.to_bytes(4, "little") + b".")
    before = psutil.Process().memory_info().vms
    with pytest.raises(SnapshotError, match="cut short or damaged|another version"):
        read_snapshot(path)
    assert psutil.Process().memory_info().vms < before + 2**29


def test_wrong_bytes_end_in_a_sentence(timeline: MemoryTimeline, tmp_path: Path) -> None:
    chance, path = random.Random(0), tmp_path / "run.pickle"
    whole = write_snapshot(path, replay(timeline)).read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(SnapshotError):
            read_snapshot(path)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"segments": Path("x"), "device_traces": []}))
    with pytest.raises(SnapshotError, match="it asks for pathlib"):
        read_snapshot(path)


def test_a_missing_snapshot_and_a_view_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot be read"):
        read_snapshot(tmp_path / "none.pickle")
    with pytest.raises(ValueError, match=VIEWS[0]):
        write_snapshot_page(tmp_path / "page.html", tmp_path / "none.pickle", "Timeline")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"traceEvents": 3}', '{"other": []}'])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(TraceError, match=r"trace\.json"):
        write_trace_page(tmp_path / "page.html", tmp_path / "trace.json")
    assert not (tmp_path / "page.html").exists(), "nothing is left on disk"


def test_a_trace_may_be_packed(tmp_path: Path) -> None:
    import gzip

    events = {"traceEvents": [{"name": "</script>", "ph": "X", "ts": 0, "dur": 1}]}
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps(events).encode()))
    assert read_trace(tmp_path / "t.json.gz") == events, "gzip is unpacked"
    page = write_trace_page(tmp_path / "page.html", tmp_path / "t.json.gz").read_text()
    assert '"<\\/script>"' in page, "a name cannot end the page's script"


def test_the_viewers_come_with_their_licences() -> None:
    names = {path.name for path in VIEWERS.iterdir()}
    assert {
        "LICENSE.pytorch",
        "NOTICE.pytorch",
        "LICENSE.d3",
        "LICENSE.catapult",
        "LICENSE.webcomponents",
    } <= names
