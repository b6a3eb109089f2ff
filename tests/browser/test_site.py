"""The site in a real browser: no error, no broken link, alternative texts, axe's rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")
pytest.importorskip("myst_nb")
pytest.importorskip("sphinx_book_theme")

from .course import ROOT, find_browser
from .site_pages import Parsed, Reader, broken_links, pages_of, reader, served

PICTURES = ROOT / "build/browser"
LESSON = "notebooks/beginner/01_where_memory_goes"
GLOSSARY = "notebooks/00_glossary"
FEW = (LESSON, GLOSSARY)
TIERS = ("beginner", "intermediate", "advanced")
PARTS = (
    ".",
    "notebooks",
    "labs",
    "solutions",
    "docs",
    "docs/instructor",
    *(f"{folder}/{tier}" for folder in ("notebooks", "labs", "solutions") for tier in TIERS),
)
PHONE = 390


def build(folder: Path, *notebooks: str) -> Path:
    """A site in a folder; of all notebooks, or of some."""
    command = [sys.executable, "tools/website.py", "--to", str(folder)]
    command += [f"{name}.ipynb" for name in notebooks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"the site was not built:\n{done.stderr[-3000:]}"
    return folder / "site"


@pytest.fixture(scope="module")
def browser() -> str:
    """Chromium; without it the tests are skipped."""
    if found := find_browser():
        return found
    pytest.skip("no Chromium on this machine (on Debian: apt install chromium)")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site."""
    return build(tmp_path_factory.mktemp("site"))


def test_a_lesson_reads_well_in_light_and_in_dark(browser: str, tmp_path: Path) -> None:
    site = build(tmp_path, *FEW)
    with served(site) as address, reader(browser, address) as one:
        one.read(f"{LESSON}.html", "light", "dark")
        picture(one, "site_lesson_01_dark.png")
    lesson_leads_to_words(site)
    assert one.complaints == [], "\n".join(one.complaints)


def lesson_leads_to_words(site: Path) -> None:
    """The lesson's first words lead to rows of the glossary that are there."""
    links = Parsed(site / f"{LESSON}.html").links
    words = {link.partition("#")[2] for link in links if "#term-" in link}
    there = Parsed(site / f"{GLOSSARY}.html").ids
    assert len(words) > 10, f"lesson 01 links only {sorted(words)} to the glossary"
    assert words <= there, f"the glossary has no rows for {sorted(words - there)}"


def picture(one: Reader, name: str) -> None:
    """Keep what stands in the window."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    one.page.screenshot(path=PICTURES / name)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_page_in_light_and_dark(whole: Path, browser: str, part: str) -> None:
    names = [name for name in pages_of(whole) if str(Path(name).parent) == part]
    assert names, f"the site has no page in {part}"
    with served(whole) as address, reader(browser, address) as one:
        for name in names:
            one.read(name, "light", "dark")
    assert one.complaints == [], "\n".join(one.complaints)


@pytest.mark.slow
def test_every_page_is_looked_at_and_every_link_leads_somewhere(whole: Path) -> None:
    folders = {str(Path(name).parent) for name in pages_of(whole)}
    assert folders == set(PARTS), "each folder of the site is one of PARTS"
    broken = broken_links(whole)
    assert broken == [], "\n".join(broken)


@pytest.mark.slow
def test_a_phone_shows_no_page_wider_than_itself(whole: Path, browser: str) -> None:
    with served(whole) as address, reader(browser, address, PHONE) as one:
        wide = {name: over for name in pages_of(whole) if (over := too_wide(one, name)) > 0}
        one.page.goto(f"{address}{LESSON}.html")
        picture(one, "site_lesson_01_phone.png")
    assert wide == {}, f"these pages scroll sideways on {PHONE} pixels: {wide}"


def too_wide(one: Reader, name: str) -> int:
    """By how many pixels a page is wider than the window."""
    one.page.goto(one.address + name)
    return one.page.evaluate(
        "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )


@pytest.mark.slow
def test_search_finds_a_lesson_and_the_arrows_lead_on(whole: Path, browser: str) -> None:
    with served(whole) as address, reader(browser, address) as one:
        one.page.goto(f"{address}search.html?q=checkpointing")
        one.page.wait_for_selector("#search-results li a")
        titles = " ".join(one.page.locator("#search-results li a").all_inner_texts())
        assert "05 Trading compute for memory" in titles, f"the search found {titles[:300]}"
        one.page.goto(f"{address}{LESSON}.html")
        following = one.page.locator("a.right-next").get_attribute("href") or ""
        assert following.endswith("labs/beginner/01_where_memory_goes.html"), (
            "a lesson's lab is next"
        )
        assert "00_" in (one.page.locator("a.left-prev").get_attribute("href") or "")
    assert one.complaints == [], "\n".join(one.complaints)


@pytest.mark.slow
def test_a_deck_shows_its_slides(browser: str, tmp_path: Path) -> None:
    command = [sys.executable, "tools/slides.py", "--to", str(tmp_path), f"{LESSON}.ipynb"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with served(tmp_path) as address, reader(browser, address) as one:
        one.page.goto(f"{address}{LESSON.removeprefix('notebooks/')}.html#/1")
        heading = one.page.locator("section.present h2").first
        heading.wait_for(state="visible")
        box = heading.bounding_box()
        assert box and 0 < box["y"] < 400, (
            f"the heading stands at the top of the slide, not at {box}"
        )
        assert one.page.evaluate("Reveal.getTotalSlides()") > 15, "the lesson has many slides"
    assert one.complaints == [], "\n".join(one.complaints)
