"""Parts of the site: the way through lessons and labs, formulas, and the few icons."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import _site_frame  # noqa: E402
import _site_icons  # noqa: E402

BARS = 'x={sun:[1,1,[],"f0","OUTLINE"],"list":[5,6,[],"f1","M1"]},y={sun:[2,3,["a"],"f0","SOLID"]}'


def site_of(folder: Path, library: str = BARS) -> Path:
    """A page below a folder, and the theme's library of icons."""
    (folder / "_static/scripts").mkdir(parents=True)
    (folder / "labs").mkdir()
    (folder / _site_icons.LIBRARY).write_text(library)
    (folder / "_static/scripts/theme.js").write_text('icon("fa-solid fa-lg fa-list")')
    (folder / "labs/a.html").write_text(
        '<head><link rel="preload" href="../_static/scripts/fontawesome.js?d=1" />\n'
        '<script defer src="../_static/scripts/fontawesome.js?d=1"></script></head>'
        '<i class="fa-solid fa-sun"></i>'
    )
    return folder


def test_a_page_brings_the_icons_that_it_shows_and_no_library(tmp_path: Path) -> None:
    assert _site_icons.use_few_icons(site_of(tmp_path)) == 2
    page, sheet = (
        (tmp_path / "labs/a.html").read_text(),
        (tmp_path / "_static/icons.css").read_text(),
    )
    assert "fontawesome" not in page and 'href="../_static/icons.css"' in page
    assert "SOLID" in sheet and "OUTLINE" not in sheet and ".fa-list::before" in sheet
    assert not (tmp_path / _site_icons.LIBRARY).exists()


@pytest.mark.parametrize(("library", "says"), [("{}", "has no 'list'"), (None, "has no _static")])
def test_a_theme_with_other_icons_is_a_sentence(
    tmp_path: Path, library: str | None, says: str
) -> None:
    site = site_of(tmp_path, library or "")
    if library is None:
        (site / _site_icons.LIBRARY).unlink()
    with pytest.raises(_site_icons.IconError, match=says):
        _site_icons.use_few_icons(site)


def test_only_the_page_of_results_brings_the_search_and_no_page_waits_for_a_script_to_be_light(
    tmp_path: Path,
) -> None:
    scripts = "".join(
        f'<script src="../{name}.js?v=1"></script>\n'
        for name in (
            "_static/searchtools",
            "_static/language_data",
            "searchindex",
            "_static/doctools",
        )
    )
    for name in ("a.html", "search.html"):
        (tmp_path / name).write_text(f'<html data-theme="auto"><head>{scripts}</head></html>')
    _site_frame.mend_frames(tmp_path)
    page, results = (tmp_path / "a.html").read_text(), (tmp_path / "search.html").read_text()
    assert page.count("<script") == 1 and "doctools" in page
    assert results.count("<script") == 4
    assert all('<html data-theme="light">' in text for text in (page, results))


def test_a_theme_with_another_frame_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<html><head></head></html>")
    with pytest.raises(_site_frame.FrameError, match="a.html does not begin with"):
        _site_frame.mend_frames(tmp_path)


def test_a_lesson_leads_to_its_lab_and_that_to_the_next_lesson() -> None:
    pytest.importorskip("sphinx")
    import _site_order

    pages = ["notebooks/00_start_here", "notebooks/advanced/11_b", "notebooks/beginner/01_a",
             "labs/beginner/01_a", "solutions/beginner/01_a", "notebooks/00_glossary"]  # fmt: skip
    order = _site_order.way(pages)
    assert order == ["notebooks/00_start_here", "notebooks/beginner/01_a", "labs/beginner/01_a",
                     "notebooks/advanced/11_b"]  # fmt: skip
    assert _site_order.neighbours("labs/beginner/01_a", order) == (order[1], order[3])
    assert _site_order.neighbours("solutions/beginner/01_a", order) == (order[2], order[3])
    assert _site_order.neighbours(order[-1], order) == (order[2], "")
    assert _site_order.neighbours("notebooks/00_glossary", order) == ("", "")


def test_a_formula_needs_no_script() -> None:
    pytest.importorskip("latex2mathml")
    pytest.importorskip("sphinx")
    from types import SimpleNamespace

    import _site_math
    from docutils import nodes

    for draw, node in ((_site_math.inline, nodes.math), (_site_math.block, nodes.math_block)):
        page = SimpleNamespace(body=[])
        with pytest.raises(nodes.SkipNode):
            draw(page, node("", r"\frac{16P}{N}"))
        assert "<mfrac>" in page.body[0] and "\\" not in page.body[0]
