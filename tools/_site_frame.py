"""What the theme puts around each page, where the course needs less of it, or other."""

from __future__ import annotations

import re
from pathlib import Path

# Without scripts nothing resolves "auto", and the theme then has no colours at all.
UNDECIDED, LIGHT = 'data-theme="auto"', 'data-theme="light"'
# For results under the search field while one types, which this site does not show: 650 kB a page, before
# anything is drawn. The page of results brings its own.
_SEARCH = re.compile(
    r'\s*<script src="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*"></script>'
)
RESULTS = "search.html"


class FrameError(Exception):
    """The theme's pages are not as they were; the text says what to mend."""


def mend_frames(site: Path) -> None:
    """Rewrite all pages of a built site.

    Raises:
        FrameError: a page has no such frame.
    """
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if not name.startswith("_static/"):
            path.write_text(_mended(path.read_text(encoding="utf-8"), name), encoding="utf-8")


def _mended(text: str, name: str) -> str:
    if UNDECIDED not in text.partition("<head")[0]:
        raise FrameError(f"{name} does not begin with {UNDECIDED}: mend tools/_site_frame.py.")
    text = text.replace(UNDECIDED, LIGHT, 1)
    return text if name == RESULTS else _SEARCH.sub("", text)
