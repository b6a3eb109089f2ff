"""`make site-check` on three small pages and a deck: what is planted there is found and named."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")

from .site_pages import build_decks, faults, find_browser, site_check

START, LESSON, LAB = site_check.FEW
DECK = LESSON.removeprefix("notebooks/")
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A page</title></head>
<body><main><h1>A page</h1>{body}</main></body></html>
"""
FAULTS = {
    START: "<style>@media (prefers-color-scheme: dark) { h1 { color: #eee } }</style>"
    '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw="><a href="gone.html">on</a>',
    LESSON: '<div id="wide" style="width: 3000px">wide</div>',
    LAB: '<script>console.error("planted")</script>'
    '<script src="http://localhost:9/outside.js"></script>',
}
NAMED = (
    (START, "rules: image-alt in light"),
    (START, "rules: color-contrast in dark"),
    (START, "pictures: without alternative text"),
    (START, "links: leads nowhere: gone.html"),
    (LESSON, 'px wider than 390 px: <div id="wide"'),
    (LESSON, "px wider than 1920 px"),
    (LAB, "console: planted"),
    (LAB, "outside: http://localhost:9/outside.js"),
    (DECK, "slides: slide 1 is drawn at 0."),
)


def site_of(folder: Path, faults: dict[str, str]) -> Path:
    """A site of the three pages, each with its fault."""
    for name in (START, LESSON, LAB):
        page = folder / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(PAGE.format(body=faults.get(name, "")), encoding="utf-8")
    return folder


def wide_slide(deck: Path) -> None:
    """Put something wider than a room's wall on a deck's first slide."""
    text = deck.read_text(encoding="utf-8")
    assert "<h1" in text
    wide = '<div style="width: 3000px">wide</div><h1'
    deck.write_text(text.replace("<h1", wide, 1), encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> str:
    """Chromium; without it the tests are skipped."""
    return find_browser() or pytest.skip("no Chromium (on Debian: apt install chromium)")


@pytest.fixture
def decks(tmp_path: Path) -> Path:
    """The deck of the lesson alone."""
    return build_decks(tmp_path / "decks", LESSON.removesuffix(".html"))


def run(site: Path, decks: Path) -> int:
    return site_check.main(["--few", "--site", str(site), "--decks", str(decks)])


@pytest.mark.usefixtures("browser")
def test_planted_faults_are_found_and_named_until_they_are_mended(
    tmp_path: Path, decks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = site_of(tmp_path / "site", {})
    assert run(site, decks) == 0, capsys.readouterr().out
    assert "4 pages and decks, 0 findings" in capsys.readouterr().out
    site_of(site, FAULTS)
    wide_slide(decks / DECK)
    assert run(site, decks) == 1
    said = capsys.readouterr().out
    for page, fault in NAMED:
        assert any(line.startswith(f"{page}: ") and fault in line for line in said.splitlines()), (
            f"{page}: {fault} is not in:\n{said}"
        )


@pytest.mark.usefixtures("browser")
def test_a_lesson_that_is_too_heavy_fails_the_check(
    tmp_path: Path, decks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = site_of(tmp_path / "site", {LESSON: '<script src="heavy.js"></script>'})
    (site / LESSON).with_name("heavy.js").write_bytes(b" " * 1_600_000)
    assert run(site, decks) == 1
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(LESSON))
    assert "1.60" in row and "too heavy" in row, row


@pytest.mark.usefixtures("browser")
def test_nothing_to_look_at_is_no_pass(tmp_path: Path, decks: Path) -> None:
    with pytest.raises(SystemExit, match="There is no page in .*none"):
        run(tmp_path / "none", decks)
    site = site_of(tmp_path / "site", {})
    with pytest.raises(SystemExit, match="There is no page in .*none"):
        run(site, tmp_path / "none")
    (site / LAB).unlink()
    with pytest.raises(SystemExit, match=f"has no {LAB}"):
        run(site, decks)


def test_what_is_wrong_with_a_slide_is_told_in_words() -> None:
    fine = {"text": "Words", "zoom": 1.0, "right": 1.0, "bottom": 1.0, "cut": 0, "alone": False}
    assert list(faults([fine, fine])) == []
    for change, words in (
        ({"right": 1290.0}, "does not fit"),
        ({"bottom": 730.0}, "does not fit"),
        ({"cut": 1}, "code that is cut"),
        ({"zoom": 0.5}, "0.50 of its size"),
        ({"alone": True}, "a heading alone"),
        ({"text": "Question 1"}, "does not answer"),
    ):
        [one] = faults([{**fine, **change}, fine])
        assert words in one and one.startswith("slide 1 ")
