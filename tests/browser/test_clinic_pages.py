"""A snapshot of ours in PyTorch's own viewer, a trace in Chromium's, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("playwright")

from playwright.sync_api import Page
from torch.profiler import ProfilerActivity, profile

from utils.clinic import replay
from utils.lessons.lesson_10.pages import VIEWS, write_snapshot_page, write_trace_page
from utils.lessons.lesson_10.snapshot import write_snapshot
from utils.memory import MemoryTimeline, measure
from utils.units import MIB

from .course import ROOT, browser_page, find_browser

PICTURES = ROOT / "build/browser"
OUTSIDE = "http"
HOVER_LARGEST = """() => {
  const area = shape => shape.getBBox().width * shape.getBBox().height;
  const shapes = [...document.querySelectorAll('svg polygon')].sort((a, b) => area(b) - area(a));
  return shapes.slice(0, 5).map(shape => {
    shape.dispatchEvent(new MouseEvent('mouseover', {bubbles: true}));
    return document.body.innerText;
  });
}"""


def small_run() -> MemoryTimeline:
    """Two steps of a model with blocks of several MiB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    optimizer = torch.optim.AdamW(model.parameters())

    def two_steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(1024, 512)).square().mean().backward()
            optimizer.step()

    return measure(
        two_steps, model=model, optimizer=optimizer, timed_steps=0, warmup_steps=0
    ).timeline


@pytest.fixture(scope="module")
def timeline() -> MemoryTimeline:
    return small_run()


@pytest.fixture
def page() -> Iterator[Page]:
    """An empty page; what it asks the network for is refused, noted, and fails the test."""
    found = find_browser()
    if found is None:
        pytest.skip("no Chromium on this machine (on Debian: apt install chromium)")
    with browser_page(found) as page:
        asked, errors = [], []
        page.route(
            f"{OUTSIDE}*://**", lambda route: (asked.append(route.request.url), route.abort())
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        assert asked == [], f"the page asked the network for {asked}"
        assert errors == [], f"the page's script failed: {errors}"


def test_a_snapshot_opens_in_pytorchs_viewer(
    page: Page, timeline: MemoryTimeline, tmp_path: Path
) -> None:
    snapshot = write_snapshot(tmp_path / "run.pickle", replay(timeline))
    page.goto(write_snapshot_page(tmp_path / "page.html", snapshot).as_uri())
    page.wait_for_function("() => document.querySelectorAll('svg polygon').length > 10")
    legend = page.locator("svg text").all_text_contents()
    assert {"parameters", "gradients", "optimizer state", "activations"} <= set(legend), (
        f"the viewer's legend has the meter's categories, not {legend}"
    )
    told = page.evaluate(HOVER_LARGEST)  # the largest of all may stand for many small ones
    assert any("MiB" in text and "born in" in text for text in told), (
        f"the viewer tells size and phase of the block under the mouse, not {told}"
    )
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / "memory_viz.png")


def test_the_allocators_history_can_be_walked(
    page: Page, timeline: MemoryTimeline, tmp_path: Path
) -> None:
    found = replay(timeline)
    snapshot = write_snapshot(tmp_path / "run.pickle", found)
    page.goto(write_snapshot_page(tmp_path / "page.html", snapshot, VIEWS[1]).as_uri())
    events = page.locator("pre").filter(has_text="alloc")
    events.last.wait_for()
    assert page.locator("pre", has_text="segment_alloc").count() == sum(
        act.action == "segment_alloc" for _, act in found.acts
    ), "every segment that the replay took is in the viewer's list"
    events.last.click()
    text = page.locator("body").inner_text()
    assert "allocated /" in text and "reserved" in text, "the viewer sums up segments and blocks"
    page.screenshot(path=PICTURES / "memory_viz_history.png")


def test_a_trace_opens_in_the_trace_viewer(page: Page, tmp_path: Path) -> None:
    model = nn.Linear(256, 256)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(3):
            model(torch.randn(64, 256)).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    page.goto(write_trace_page(tmp_path / "trace.html", tmp_path / "trace.json").as_uri())
    page.wait_for_function("() => globalThis.courseModel !== undefined", timeout=300_000)
    slices = page.evaluate(
        "() => [...courseModel.getDescendantEvents()].map(event => event.title).filter(Boolean)"
    )
    assert slices.count("aten::linear") == 3, "the viewer holds the three forwards"
    page.wait_for_function("() => document.querySelectorAll('tr-ui-timeline-view').length === 1")
    page.screenshot(path=PICTURES / "trace_viewer.png")


def test_the_pages_hold_all_that_they_need(timeline: MemoryTimeline, tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "run.pickle", replay(timeline))
    text = write_snapshot_page(tmp_path / "page.html", snapshot).read_text(encoding="utf-8")
    assert "import " not in text.partition("<script type='module'>")[2][:400], "no module is loaded"
    assert len(text) < 2 * MIB, "a small run makes a small page"
