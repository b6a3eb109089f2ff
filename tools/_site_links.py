"""The pages of a built site, and the links on them that lead nowhere. Needs no browser."""

from __future__ import annotations

import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

OUTSIDE = re.compile(r"[a-z]+:|//", re.IGNORECASE)


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


def broken_links(site: Path) -> list[tuple[str, str]]:
    """(page, link) for each link to a file or a place of a site that is not there."""
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
            # reveal.js finds its slides by number; a deck has no such places.
            lost = anchor and target in pages and unquote(anchor) not in pages[target].ids
            if target not in files or lost:
                found.append((name, link))
    return sorted(found)
