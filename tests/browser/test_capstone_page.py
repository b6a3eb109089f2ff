"""The page of results in Chromium: nothing from the network, no error, no breach of access rules."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from utils.lessons.lesson_99.cases import CASES, Gains
from utils.lessons.lesson_99.results_page import Result, results_html

from .course import browser_page, find_browser


def test_the_page_of_results_is_accessible_and_alone(tmp_path: Path) -> None:
    found = find_browser()
    if found is None:
        pytest.skip("no Chromium on this machine (on Debian: apt install chromium)")
    results = [
        Result(name, sheet, "solved", "1.0 s, par 1.0 s", 300, 1, Gains(2**30, 1e9, 5.0))
        for name, sheet in CASES.items()
    ]
    path = tmp_path / "capstone.html"
    board = [("01", "ResNet-50", "1 GiB", "", "measured")]
    path.write_text(results_html("Ada", 1, results, board), encoding="utf-8")
    with browser_page(found) as page:
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        assert page.locator("tbody tr").count() == len(CASES) + 1
        assert said == [] and asked == [path.as_uri()]
        if find_spec("axe_playwright_python"):
            from axe_playwright_python.sync_playwright import Axe

            broken = Axe().run(page).response["violations"]
            assert [rule["id"] for rule in broken] == []
