"""A built site in a browser: what a page says to the console, links to, and breaks of axe's rules."""

from __future__ import annotations

import functools
import posixpath
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

from .course import FLAGS

# Levels A and AA of WCAG 2.0, 2.1 and 2.2.
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
LOOK = """() => ({
  unnamed: [...document.images].filter(i => !i.alt.trim()).map(i => i.outerHTML.slice(0, 200)),
  broken: [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
})"""
# Colours that fade over would be judged half-way.
STILL = "* { transition: none !important; animation: none !important; }"
THEME = "scheme => document.documentElement.dataset.theme === scheme"
OUTSIDE = re.compile(r"[a-z]+:|//", re.IGNORECASE)
EAGER = "() => document.querySelectorAll('img[loading=lazy]').forEach(i => i.loading = 'eager')"
LOADED = "() => [...document.images].every(i => i.complete)"


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder on the loopback address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@dataclass
class Reader:
    """A browser that reads a site, and notes what a reader would complain about."""

    page: Page
    address: str
    complaints: list[str] = field(default_factory=list)
    axe: Axe = field(default_factory=Axe)

    def read(self, name: str, *schemes: str) -> None:
        """Open a page, and look at all of it, in "light" and "dark"."""
        self.page.emulate_media(color_scheme=schemes[0])
        self.page.goto(self.address + name)
        self.page.evaluate(EAGER)
        self.page.add_style_tag(content=STILL)
        self.page.wait_for_function(LOADED)
        seen = self.page.evaluate(LOOK)
        self.complain(name, "an image without alternative text", seen["unnamed"])
        self.complain(name, "an image that does not load", seen["broken"])
        for scheme in schemes:
            self.page.emulate_media(color_scheme=scheme)
            self.page.wait_for_function(THEME, arg=scheme)
            self.check_rules(name, scheme)

    def check_rules(self, name: str, scheme: str) -> None:
        """Run axe on the page that is open."""
        found = self.axe.run(self.page, options={**RULES, "preload": False}).response["violations"]
        for rule in found:
            where = rule["nodes"][0]["html"][:160]
            told = f"{rule['id']} in {scheme}, {len(rule['nodes'])} times"
            self.complain(name, told, [where])

    def complain(self, name: str, what: str, where: list[str]) -> None:
        """Note a complaint for each place."""
        self.complaints += [f"{name}: {what}: {place}" for place in where]


@contextmanager
def reader(browser: str, address: str, width: int = 1280) -> Iterator[Reader]:
    """A reader of the site at an address; a request to anywhere else is refused and noted."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
        page = chromium.new_page(viewport={"width": width, "height": 900})
        one = Reader(page, address)
        note = functools.partial(one.complain, "console")
        page.on("console", lambda m: note(page.url, [m.text]) if m.type == "error" else None)
        page.on("pageerror", lambda error: note(page.url, [str(error)]))
        outside = re.compile(rf"^https?://(?!{re.escape(address.removeprefix('http://'))})")
        page.route(outside, lambda route: (note("network", [route.request.url]), route.abort()))
        try:
            yield one
        finally:
            chromium.close()


def pages_of(site: Path) -> list[str]:
    """All pages of a site."""
    return sorted(
        path.relative_to(site).as_posix()
        for path in site.rglob("*.html")
        if "_static" not in path.parts
    )


def files_of(site: Path) -> set[str]:
    """All files of a site, by their address."""
    return {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}


class Parsed(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag leads to and what leads to it."""
        values = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := values.get(key))}
        if (link := values.get("href") or values.get("src")) and not OUTSIDE.match(link):
            self.links.add(link)


def broken_links(site: Path) -> list[str]:
    """Links to files or places of a site that are not there, as "page -> link"."""
    pages = {name: Parsed(site / name) for name in pages_of(site)}
    files = files_of(site)
    found = []
    for name, parsed in pages.items():
        for link in parsed.links:
            place, anchor = urldefrag(link)
            target = posixpath.normpath(
                posixpath.join(posixpath.dirname(name), unquote(place.partition("?")[0]))
            )
            target = target if place else name
            lost = anchor and target in pages and unquote(anchor) not in pages[target].ids
            if target not in files or lost:
                found.append(f"{name} -> {link}")
    return sorted(found)
