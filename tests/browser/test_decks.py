"""Every deck in a real browser: nothing leaves its slide, no heading stands alone, no question unanswered."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")

from .site_pages import ROOT, build_decks, find_browser, read_deck, reader, served, told

pytestmark = pytest.mark.slow
DECKS = [
    path.relative_to(ROOT / "notebooks").with_suffix(".html").as_posix()
    for path in sorted((ROOT / "notebooks").rglob("*.ipynb"))
    if path.stem not in ("00_folklore", "00_glossary")  # pages to look things up in
]


@pytest.fixture(scope="module")
def decks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All decks."""
    return build_decks(tmp_path_factory.mktemp("decks"))


@pytest.mark.parametrize("name", DECKS)
def test_a_room_sees_every_slide_whole(decks: Path, name: str) -> None:
    browser = find_browser() or pytest.skip("no Chromium (on Debian: apt install chromium)")
    with served(decks) as address, reader(browser, address) as one:
        read_deck(one, name)
    assert one.findings == [], told(one.findings)
