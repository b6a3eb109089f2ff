"""The site without a server, without scripts, and on paper."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")
pytest.importorskip("myst_nb")
pytest.importorskip("sphinx_book_theme")

from .site_pages import build_site, find_browser, reader, served, told

LESSON = "notebooks/intermediate/09_sharding"
LAB = "labs/intermediate/09_sharding"
FOLDED = """() => [...document.querySelectorAll(".bd-article details > :not(summary)")]
  .filter(part => part.textContent.trim()).map(part => part.checkVisibility())"""
LEADING = """() => [...document.querySelectorAll("nav, .bd-sidebar-primary, .prev-next-area, .copybtn")]
  .filter(part => part.checkVisibility()).map(part => part.outerHTML.slice(0, 160))"""
COLOURS = """() => ["body", ".bd-article pre", ".bd-article .highlight .k, .bd-article .highlight .kn"]
  .map(name => getComputedStyle(document.querySelector(name)))
  .map(style => style.color)"""


@pytest.fixture(scope="module")
def browser() -> str:
    """Chromium; without it the tests are skipped."""
    return find_browser() or pytest.skip("no Chromium (on Debian: apt install chromium)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of one lesson and its lab."""
    return build_site(tmp_path_factory.mktemp("site"), LESSON, LAB)


def test_a_site_on_a_disk_is_read_and_searched(browser: str, site: Path) -> None:
    with reader(browser, f"{site.as_uri()}/") as one:
        one.read(f"{LESSON}.html", "light", "dark")
        one.open("search.html?q=fully_shard")
        one.page.wait_for_selector("#search-results li a")
        first = one.page.locator("#search-results li a").first
        assert "09 " in first.inner_text()
        first.click()
        one.page.wait_for_selector(".bd-article h1")
        assert LESSON in one.page.url
    assert one.findings == [], told(one.findings)


def test_a_browser_without_scripts_shows_text_code_and_figures(browser: str, site: Path) -> None:
    with served(site) as address, reader(browser, address) as one:
        one.open(f"{LESSON}.html")
        coloured = one.page.evaluate(COLOURS)
    with served(site) as address, reader(browser, address, java_script_enabled=False) as one:
        one.open(f"{LESSON}.html")
        shown = one.page.evaluate(COLOURS)
        for part in (".bd-article h1", ".bd-article p", ".bd-article pre", ".bd-article img"):
            assert one.page.locator(part).first.is_visible(), part
        images = one.page.evaluate("() => [...document.images].map(i => i.naturalWidth)")
    assert len(images) > 3 and all(images), "figures are loaded"
    assert shown == coloured and len(set(shown)) > 1, "code has its colours"
    assert one.findings == [], told(one.findings)


@pytest.mark.parametrize("scripts", [True, False])
def test_paper_shows_what_is_folded_and_nothing_that_leads_elsewhere(
    browser: str, site: Path, scripts: bool
) -> None:
    with served(site) as address, reader(browser, address, java_script_enabled=scripts) as one:
        for name in (LESSON, LAB):
            one.open(f"{name}.html")
            assert not all(one.page.evaluate(FOLDED)), "something is folded away on a screen"
            assert one.page.evaluate(LEADING)
            one.page.emulate_media(media="print")
            folded = one.page.evaluate(FOLDED)
            assert folded and all(folded), f"{name}: {folded.count(False)} are not shown"
            assert one.page.evaluate(LEADING) == []
            titles = one.page.locator(".bd-article h1").all()
            assert titles and all(title.is_visible() for title in titles)
            one.page.emulate_media(media="screen")
    assert one.findings == [], told(one.findings)


def test_a_page_in_the_dark_is_printed_in_black_on_white(
    browser: str, site: Path, tmp_path: Path
) -> None:
    """Browsers leave grounds out on paper: light words would not be seen."""
    theme = "document.documentElement.dataset.theme"
    state = f"[{theme}, document.querySelectorAll('details[open]').length]"
    with served(site) as address, reader(browser, address, color_scheme="dark") as one:
        one.open(f"{LESSON}.html")
        before = one.page.evaluate(state)
        one.page.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = {theme}; }})")
        one.page.pdf(path=tmp_path / "lesson.pdf")
        assert before[0] == "dark" and one.page.evaluate("window.printed") == "light"
        assert one.page.evaluate(state) == before, "afterwards it is as it was"
    assert one.findings == [], told(one.findings)
