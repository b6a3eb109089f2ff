"""A deck in a browser: nothing leaves its slide, no heading stands alone, no question unanswered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from _site_reader import Reader

WIDTH, HEIGHT = 1280, 720
SMALLEST = 0.6  # what a tall slide may be drawn at: 15 px of text
READY = "() => window.Reveal && Reveal.isReady()"
FORMULAS = "() => window.MathJax.startup.promise.then(() => true)"
TURN = """number => {
  const at = Reveal.getIndices(Reveal.getSlides()[number]);
  Reveal.slide(at.h, at.v);
}"""
# A picture loads when its slide is near.
LOADED = "() => [...Reveal.getCurrentSlide().querySelectorAll('img')].every(i => i.complete)"
# The rest of the slides are hidden, and axe looks at what is shown.
SHOWN = "section.present:not(.stack)"
SLIDE = """() => {
  const slide = Reveal.getCurrentSlide();
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
}"""


def read_deck(one: Reader, name: str) -> None:
    """Turn every slide of a deck, as a room sees it, and note what a listener would complain about."""
    one.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    one.open(name)
    one.page.wait_for_function(READY)
    one.page.wait_for_function(FORMULAS)
    shown = [shown_slide(one, i) for i in range(one.page.evaluate("Reveal.getTotalSlides()"))]
    one.check_pictures()
    one.note("slides", *faults(shown))


def shown_slide(one: Reader, number: int) -> dict[str, Any]:
    """Turn to a slide, try axe's rules on it, and say what a room sees."""
    one.page.evaluate(TURN, number)
    one.page.wait_for_function(LOADED)
    one.check_rules(f" on slide {number + 1}", part=SHOWN)
    return one.page.evaluate(SLIDE)


def faults(shown: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What is wrong with slides, in order, as `SLIDE` tells of them."""
    for number, slide in enumerate(shown, start=1):
        after = shown[number]["text"] if number < len(shown) else ""
        for is_so, told in (
            (
                slide["right"] > WIDTH + 1 or slide["bottom"] > HEIGHT + 1,
                f"does not fit {WIDTH} x {HEIGHT}",
            ),
            (slide["cut"], "has code that is cut"),
            (slide["zoom"] < SMALLEST, f"is drawn at {slide['zoom']:.2f} of its size"),
            (slide["alone"], "has a heading alone"),
            (
                slide["text"].startswith("Question") and not after.startswith("Answer."),
                "asks a question that the next does not answer",
            ),
        ):
            if is_so:
                yield f"slide {number} {told}: {slide['text'][:80]!r}"
