"""From the first page to the verdict on a model of one's own: three inputs, by keyboard alone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from .course import ROOT, browser_page, copy_course, find_browser, jupyter_lab
from .notebook import Notebook

FIRST_PAGE = "notebooks/00_start_here.ipynb"
PAGE = "00a_your_model.ipynb"
PICTURES = ROOT / "build/browser"
# A newcomer's three inputs: a model that the page does not name first, a card, a length.
MODEL, CARD, TOKENS = "HuggingFaceTB/SmolLM2-1.7B", "RTX 3090", 2048
OUTPUT = """number => [...jupyterapp.shell.currentWidget.content.widgets[number].node
  .querySelectorAll('.jp-OutputArea-output')].map(o => o.innerText).join('\\n')"""


@pytest.fixture
def first_page(tmp_path: Path) -> Iterator[Notebook]:
    browser = find_browser()
    if not browser:
        pytest.skip("no Chromium on this machine (on Debian: apt install chromium)")
    course = copy_course(tmp_path / "course")
    with (
        jupyter_lab(course, tmp_path / "jupyter") as (server, token),
        browser_page(browser) as page,
    ):
        yield Notebook.open(page, server, token, FIRST_PAGE)


def follow_link(notebook: Notebook, target: str) -> None:
    """Tab through the page until a link to `target` has the focus, and press Enter."""
    link = "href => document.activeElement?.getAttribute('href')?.includes(href) ?? false"
    for _ in range(400):
        notebook.page.keyboard.press("Tab")
        if notebook.page.evaluate(link, target):
            notebook.page.keyboard.press("Enter")
            return
    raise AssertionError(f"400 times Tab, and no link to {target} had the focus")


@pytest.mark.slow
def test_a_newcomer_gets_a_verdict_with_the_keyboard_alone(first_page: Notebook) -> None:
    started = time.monotonic()
    follow_link(first_page, PAGE)
    page = first_page.on(PAGE)
    choose = page.cell_with("MODEL, CARD = ")
    verdict = page.cell_with("found = fit_model(")
    page.run_by_keys(until=choose)
    page.edit_by_keys(
        f'MODEL, CARD = "{MODEL}", "{CARD}"',
        'recipe = Recipe(method="lora", precision=mixed_precision(CARD),',
        f"    tokens={TOKENS})",
    )
    page.run_by_keys(until=verdict + 1)
    page.wait_for(f"() => ({OUTPUT})({verdict}).match(/ fits? one {CARD}/)", 600)
    print(f"{time.monotonic() - started:.0f} s from the first page to the verdict")
    page.screenshot(PICTURES / "your_model_by_keyboard.png")
    told = page.page.evaluate(OUTPUT, verdict)
    assert re.search(f"{MODEL} (fits|does not fit) one {CARD}: .*GiB", told), told
    assert page.errors() == []
