"""Looks at every page of the site and at every deck as people meet them: `make site-check`.

Site and decks are built, or taken as they are where nothing has changed since. Each page is opened in
light and dark, and at 390, 768, 1,280 and 1,920 pixels; each deck is turned slide by slide. Counted are
axe's rules of the levels A and AA, pictures without words, errors of the console, requests that leave the
site, broken links, and pages or slides that are too wide. Lessons are weighed, too: what a first visit
sends, and how long it takes (measured here, printed, and no reason to fail). It ends with 1 if anything
is found, or a lesson weighs more than it may.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import slides
import website
from _browser import find_browser
from _built import digest, is_current
from _deck_reader import read_deck
from _site_links import broken_links, pages_of
from _site_reader import Finding, Reader, reader, served
from _site_weight import MOST_BYTES, MOST_SECONDS, Weight, weights
from playwright.sync_api import Error as BrowserError
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
FEW = (
    "notebooks/00_start_here.html",
    "notebooks/beginner/01_where_memory_goes.html",
    "labs/beginner/01_where_memory_goes.html",
)
INDEX = "index.html"
WORKERS = min(4, os.cpu_count() or 1)
NO_BROWSER = "There is no Chromium on this machine: install one (on Debian: apt install chromium)."
NO_AXE = "axe is not in .venv. `make site-check` adds it, or without make: .venv/bin/python tools/extra.py site"
Look = Callable[[Reader, str], None]


def read_page(one: Reader, name: str) -> None:
    """A page of the site, in light and dark."""
    one.read(name, "light", "dark")


def read_slides(one: Reader, name: str) -> None:
    """A deck, or the page that lists them."""
    (read_page if name == INDEX else read_deck)(one, name)


def looked_at(
    browser: str, folder: Path, names: Sequence[str], look: Look, bar: tqdm
) -> list[Finding]:
    """What is found on pages of a folder, by as many browsers as there are processors."""
    waiting = deque(names)
    with served(folder) as address, ThreadPoolExecutor(WORKERS) as pool:
        try:
            parts = pool.map(lambda _: _read(browser, address, waiting, look, bar), range(WORKERS))
            return [finding for part in parts for finding in part]
        finally:
            waiting.clear()  # interrupted, a worker ends after the page that it reads


def _read(browser: str, address: str, waiting: deque[str], look: Look, bar: tqdm) -> list[Finding]:
    """Look at pages that others take from, too, until none is left."""
    with reader(browser, address) as one:
        for name in _taken(waiting):
            try:
                look(one, name)
            except BrowserError as error:
                one.note("page", f"could not be looked at: {error.message}")
            bar.update()
        return one.findings


def _taken(waiting: deque[str]) -> Iterator[str]:
    while True:
        try:
            name = waiting.popleft()
        except IndexError:  # empty, or another took the last
            return
        yield name


def check(
    browser: str, site: Path, decks: Path, few: bool = False
) -> tuple[list[Finding], list[Weight], int]:
    """Look at all, or at few.

    Args:
        browser: Path of Chromium.
        site: A built site.
        decks: A folder of built decks.
        few: Look at three pages and one deck alone.

    Returns:
        What was found, the weights of lessons, and how many pages and decks were looked at.

    Raises:
        SystemExit: one of the few is not there.
    """
    names, shown = pages_of(site), pages_of(decks)
    if few:
        names = [name for name in FEW if name in names or sys.exit(f"{site} has no {name}.")]
        shown = [name for name in shown if f"notebooks/{name}" in FEW]
    lessons = [name for name in names if is_lesson(name)]
    with tqdm(
        total=len(names) + len(shown) + len(lessons), unit="page", desc="site and decks"
    ) as bar:
        found = looked_at(browser, site, names, read_page, bar)
        found += looked_at(browser, decks, shown, read_slides, bar)
        with served(site) as address:
            weighed = list(_counted(weights(browser, address, lessons), bar))
    for folder, chosen in ((site, names), (decks, shown)):
        lost = (pair for pair in broken_links(folder) if pair[0] in chosen)
        found += [Finding(name, "links", f"leads nowhere: {link}") for name, link in lost]
    return found, weighed, len(names) + len(shown)


def _counted(weighed: Iterator[Weight], bar: tqdm) -> Iterator[Weight]:
    for one in weighed:
        bar.update()
        yield one


def is_lesson(name: str) -> bool:
    """Whether a page of the site is a lesson."""
    return name.startswith("notebooks/") and name.count("/") == 2


def table(found: Sequence[Finding], weighed: Sequence[Weight], count: int) -> str:
    """Pages with findings, worst first, then the other lessons, heaviest first."""
    weight_of = {one.page: one for one in weighed}
    worst = Counter(finding.page for finding in found)
    heaviest = sorted(weighed, key=lambda one: -one.sent_bytes)
    pages = [page for page, _ in worst.most_common()]
    pages += [one.page for one in heaviest if one.page not in worst]
    lines = [
        f"{'page':<64} {'found':>5} {'MB':>5} {'load s':>6}  what",
        *(_row(page, found, weight_of.get(page)) for page in pages),
        f"{count} pages and decks, {len(found)} findings; "
        f"lessons may weigh {MOST_BYTES / 1e6} MB (first visit, not compressed) and should load "
        f"in {MOST_SECONDS} s (measured here)",
    ]
    return "\n".join(lines)


def _row(page: str, found: Sequence[Finding], weight: Weight | None) -> str:
    kinds = Counter(finding.kind for finding in found if finding.page == page)
    what = [f"{count} {kind}" for kind, count in kinds.most_common()]
    size = f"{'':5} {'':6}"
    if weight:
        size = f"{weight.sent_bytes / 1e6:5.2f} {weight.load_seconds:6.2f}"
        what += ["too heavy"] * weight.is_over
        what += ["slow here"] * (weight.load_seconds > MOST_SECONDS)
    return f"{page:<64} {kinds.total():>5} {size}  {', '.join(what)}".rstrip()


def built(folder: Path | None, usual: Path, build: Callable[[], int], inputs: str) -> Path:
    """A folder that was named, or the usual one, which is built anew where it is not current.

    Raises:
        SystemExit: the named folder has no page, or the build failed, which has said why.
    """
    if folder:
        return folder if pages_of(folder) else sys.exit(f"There is no page in {folder}.")
    if not is_current(usual, inputs) and build():
        sys.exit(f"{usual} was not built: see above.")
    return usual


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Check all and print a table; 0 if nothing is found and no lesson is too heavy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--few", action="store_true", help="three pages and one deck alone")
    parser.add_argument("--site", type=Path, help="a built site; default: build/site, made current")
    parser.add_argument(
        "--decks", type=Path, help="built decks; default: build/slides, made current"
    )
    options = parser.parse_args(arguments)
    browser = find_browser()
    if not browser or not importlib.util.find_spec("axe_playwright_python"):
        print(NO_AXE if browser else NO_BROWSER, file=sys.stderr)
        return 1
    inputs = digest(root)
    site = built(options.site, root / "build/site", lambda: website.main([], root), inputs)
    decks = built(options.decks, root / "build/slides", lambda: slides.main([], root), inputs)
    found, weighed, count = check(browser, site, decks, options.few)
    for finding in found:
        print(finding)
    print(table(found, weighed, count))
    return 1 if found or any(one.is_over for one in weighed) else 0


if __name__ == "__main__":
    sys.exit(main())
