"""Every deck in a real browser: nothing leaves its slide, no heading stands alone, no question unanswered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")

from .course import ROOT, find_browser
from .site_pages import Reader, reader, served

pytestmark = pytest.mark.slow
WIDTH, HEIGHT = 1280, 720
SMALLEST = 0.6  # what a tall slide may be drawn at: 15 px of text
SLIDES = """() => Reveal.getSlides().map(slide => {
  const at = Reveal.getIndices(slide);
  Reveal.slide(at.h, at.v);
  const seen = [...slide.querySelectorAll("*")].filter(e => !e.closest("aside, mjx-assistive-mml"));
  const boxes = seen.map(e => e.getBoundingClientRect()).filter(b => b.width && b.height);
  const heads = [...slide.querySelectorAll("h1, h2, h3")].map(h => h.innerText).join("");
  const text = slide.innerText.trim();
  return {
    text, zoom: Number(slide.style.zoom || 1),
    right: Math.max(...boxes.map(b => b.right)), bottom: Math.max(...boxes.map(b => b.bottom)),
    cut: seen.filter(e => e.tagName === "PRE" && e.scrollWidth > e.clientWidth + 1).length,
    alone: text.length <= heads.length + 2 && !slide.querySelector("img, svg, table, pre"),
  };
})"""
DECKS = [
    path.relative_to(ROOT / "notebooks").with_suffix(".html").as_posix()
    for path in sorted((ROOT / "notebooks").rglob("*.ipynb"))
    if path.stem not in ("00_folklore", "00_glossary")  # pages to look things up in
]


@pytest.fixture(scope="module")
def decks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All decks."""
    folder = tmp_path_factory.mktemp("decks")
    command = [sys.executable, "tools/slides.py", "--to", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def slides_of(one: Reader, name: str) -> list[dict[str, Any]]:
    """What a room sees of each slide, in order."""
    one.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    one.page.goto(one.address + name)
    one.page.wait_for_function("() => window.Reveal && Reveal.isReady()")
    one.page.wait_for_function("() => window.MathJax.startup.promise.then(() => true)")
    return one.page.evaluate(SLIDES)


@pytest.mark.parametrize("name", DECKS)
def test_a_room_sees_every_slide_whole(decks: Path, name: str) -> None:
    browser = find_browser() or pytest.skip("no Chromium (on Debian: apt install chromium)")
    with served(decks) as address, reader(browser, address) as one:
        shown = slides_of(one, name)
    over = [s for s in shown if s["right"] > WIDTH + 1 or s["bottom"] > HEIGHT + 1 or s["cut"]]
    assert over == [], f"{len(over)} slides do not fit {WIDTH} x {HEIGHT}: {over[0]}"
    small = [s for s in shown if s["zoom"] < SMALLEST]
    assert small == [], f"too much on a slide to be read: {small}"
    assert [s["text"] for s in shown if s["alone"]] == [], "a heading stands alone"
    asked = [i for i, s in enumerate(shown) if s["text"].startswith("Question")]
    assert all(shown[i + 1]["text"].startswith("Answer.") for i in asked), "a question is left open"
    assert one.complaints == [], "\n".join(one.complaints)
