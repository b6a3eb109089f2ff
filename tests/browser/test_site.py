"""The site in a real browser: no error, no broken link, alternative texts, axe's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")
pytest.importorskip("myst_nb")
pytest.importorskip("sphinx_book_theme")

from .site_pages import (
    ROOT,
    Parsed,
    Reader,
    build_decks,
    build_site,
    find_browser,
    pages_of,
    reader,
    served,
    site_check,
    told,
)

PICTURES = ROOT / "build/browser"
LESSON = "notebooks/beginner/01_where_memory_goes"
GLOSSARY = "notebooks/00_glossary"
FEW = (LESSON, GLOSSARY)
PHONE = {"width": 390, "height": 900}


@pytest.fixture(scope="module")
def browser() -> str:
    """Chromium; without it the tests are skipped."""
    if found := find_browser():
        return found
    pytest.skip("no Chromium on this machine (on Debian: apt install chromium)")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site."""
    return build_site(tmp_path_factory.mktemp("site"))


def test_a_lesson_reads_well_in_light_and_in_dark(browser: str, tmp_path: Path) -> None:
    site = build_site(tmp_path, *FEW)
    with served(site) as address, reader(browser, address) as one:
        one.read(f"{LESSON}.html", "light", "dark")
        picture(one, "site_lesson_01_dark.png")
    lesson_leads_to_words(site)
    assert one.findings == [], told(one.findings)


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
def test_every_page_reads_well_and_every_link_leads_somewhere(
    whole: Path, browser: str, tmp_path: Path
) -> None:
    found, weighed, count = site_check.check(
        browser, whole, tmp_path
    )  # decks have a test of theirs
    assert count == len(pages_of(whole)) > 80 and len(weighed) > 20, "every page was looked at"
    assert found == [], told(found)
    assert [one for one in weighed if one.is_over] == [], "lessons that weigh too much"


@pytest.mark.slow
def test_a_phone_shows_a_lesson(whole: Path, browser: str) -> None:
    with served(whole) as address, reader(browser, address, viewport=PHONE) as one:
        one.open(f"{LESSON}.html")
        picture(one, "site_lesson_01_phone.png")
    assert one.findings == [], told(one.findings)


@pytest.mark.slow
def test_search_finds_a_lesson_and_the_arrows_lead_on(whole: Path, browser: str) -> None:
    with served(whole) as address, reader(browser, address) as one:
        one.open("search.html?q=checkpointing")
        one.page.wait_for_selector("#search-results li a")
        titles = " ".join(one.page.locator("#search-results li a").all_inner_texts())
        assert "05 Trading compute for memory" in titles, f"the search found {titles[:300]}"
        one.open(f"{LESSON}.html")
        following = one.page.locator("a.right-next").get_attribute("href") or ""
        assert following.endswith("labs/beginner/01_where_memory_goes.html"), (
            "a lesson's lab is next"
        )
        assert "00_" in (one.page.locator("a.left-prev").get_attribute("href") or "")
    assert one.findings == [], told(one.findings)


@pytest.mark.slow
def test_a_deck_shows_its_slides(browser: str, tmp_path: Path) -> None:
    decks = build_decks(tmp_path, LESSON)
    with served(decks) as address, reader(browser, address) as one:
        one.open(f"{LESSON.removeprefix('notebooks/')}.html#/1")
        heading = one.page.locator("section.present h2").first
        heading.wait_for(state="visible")
        box = heading.bounding_box()
        assert box and 0 < box["y"] < 400, (
            f"the heading stands at the top of the slide, not at {box}"
        )
        assert one.page.evaluate("Reveal.getTotalSlides()") > 15, "the lesson has many slides"
    assert one.findings == [], told(one.findings)
