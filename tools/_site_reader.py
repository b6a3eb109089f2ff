"""A built site or deck in a browser: what a page says to the console, asks for, and breaks of axe's rules."""

from __future__ import annotations

import functools
import importlib
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from _browser import FLAGS
from playwright.sync_api import ConsoleMessage, Page, Route, sync_playwright

# Levels A and AA of WCAG 2.0, 2.1 and 2.2.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
OF_COLOUR = ["color-contrast", "link-in-text-block"]  # the ones that a second scheme can break
OPTIONS = {"resultTypes": ["violations"], "preload": False}
WIDTHS = (390, 768, 1280, 1920)  # pixels: a phone, a tablet, a laptop, a large screen
WIDTH, HEIGHT = 1280, 900
LOOK = """() => ({
  unnamed: [...document.images].filter(i => !i.alt.trim()).map(i => i.outerHTML.slice(0, 200)),
  broken: [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
})"""
# Colours that fade over would be judged half-way.
STILL = "* { transition: none !important; animation: none !important; }"
# A page of the site follows the system's scheme by a script of its theme, which sets both.
THEME = """scheme => !("mode" in document.documentElement.dataset)
  || document.documentElement.dataset.theme === scheme"""
EAGER = "() => document.querySelectorAll('img[loading=lazy]').forEach(i => i.loading = 'eager')"
LOADED = "() => [...document.images].every(i => i.complete)"
# Two words of code in one colour on one ground are as readable: of thousands on a page axe judges one each.
ALIKE = """() => {
  const seen = new Set();
  const ground = element => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour !== "rgba(0, 0, 0, 0)" || !element.parentElement ? colour : ground(element.parentElement);
  };
  for (const block of document.querySelectorAll("pre")) {
    const below = ground(block);
    for (const word of block.querySelectorAll("span")) {
      const style = getComputedStyle(word);
      const own = [style.color, style.backgroundColor, style.fontWeight, style.fontSize, style.opacity];
      const kind = [below, ...own].join();
      word.toggleAttribute("data-alike", seen.has(kind) && !word.firstElementChild);
      seen.add(kind);
    }
  }
}"""
RUN = """([part, rules]) => axe
  .run({include: [[part]], exclude: [["[data-alike]"]]}, rules).then(found => found.violations)"""
# By how many pixels a page is wider than the window, and the innermost part that reaches furthest.
SIDEWAYS = """() => {
  const root = document.documentElement, over = root.scrollWidth - root.clientWidth;
  if (over <= 0) return null;
  const right = element => element.getBoundingClientRect().right + scrollX;
  const reach = [...document.body.querySelectorAll("*")].filter(e => right(e) >= root.scrollWidth - 1);
  return [over, (reach.at(-1) ?? document.body).outerHTML.slice(0, 160)];
}"""


@dataclass(frozen=True)
class Finding:
    """What a reader of one page would complain about.

    Attributes:
        page: Its address below the site's root.
        kind: "rules", "pictures", "console", "outside", "links", "sideways", "slides" or "page".
        told: What and where, in words.
    """

    page: str
    kind: str
    told: str

    def __str__(self) -> str:
        return f"{self.page}: {self.kind}: {self.told}"


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, format: str, *args: object) -> None:
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
    findings: list[Finding] = field(default_factory=list)
    name: str = ""  # of the page that is open

    def open(self, name: str) -> None:
        """Go to a page."""
        self.name = name
        self.page.goto(self.address + name)

    def read(self, name: str, *schemes: str) -> None:
        """Open a page, and look at all of it, in "light" and "dark", and at each of WIDTHS."""
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        self.page.emulate_media(color_scheme=schemes[0])  # pyright: ignore[reportArgumentType]
        self.open(name)
        self.see_all()
        for rules, scheme in zip((RULES, OF_COLOUR), schemes, strict=False):
            self.page.emulate_media(color_scheme=scheme)  # pyright: ignore[reportArgumentType]
            self.page.wait_for_function(THEME, arg=scheme)
            self.check_rules(f" in {scheme}", rules)
        self.check_widths()

    def see_all(self) -> None:
        """Have all pictures load, those further down, too, and look at each."""
        self.page.evaluate(EAGER)
        self.page.add_style_tag(content=STILL)
        self.page.wait_for_function(LOADED)
        self.check_pictures()

    def check_pictures(self) -> None:
        """See that each picture of the open page is there, and has words."""
        seen = self.page.evaluate(LOOK)
        self.note("pictures", *(f"without alternative text: {i}" for i in seen["unnamed"]))
        self.note("pictures", *(f"does not load: {i}" for i in seen["broken"]))

    def check_rules(self, where: str, rules: Sequence[str] = RULES, part: str = "html") -> None:
        """Run axe on a part of the page that is open."""
        if not self.page.evaluate("() => 'axe' in window"):
            self.page.evaluate(_axe())
        self.page.evaluate(ALIKE)
        for rule in self.page.evaluate(RUN, [part, {"runOnly": list(rules), **OPTIONS}]):
            shown = rule["nodes"][0]["html"][:160]
            self.note("rules", f"{rule['id']}{where}, {len(rule['nodes'])} times: {shown}")

    def check_widths(self) -> None:
        """See that the open page scrolls sideways at none of WIDTHS."""
        for width in WIDTHS:
            self.page.set_viewport_size({"width": width, "height": HEIGHT})
            if found := self.page.evaluate(SIDEWAYS):
                over, part = found
                self.note("sideways", f"{over} px wider than {width} px: {part}")

    def note(self, kind: str, *told: str) -> None:
        """Note findings on the page that is open."""
        self.findings += [Finding(self.name, kind, one) for one in told]

    def hear(self, message: ConsoleMessage) -> None:
        """Note an error of the console."""
        if message.type == "error":
            self.note("console", message.text)

    def refuse(self, route: Route) -> None:
        """Note a request that leaves the site, and end it."""
        self.note("outside", route.request.url)
        route.abort("blockedbyclient")


@functools.cache
def _axe() -> str:
    """axe's script, which comes with the site's optional packages."""
    return importlib.import_module("axe_playwright_python.base").AXE_SCRIPT


@contextmanager
def reader(browser: str, address: str, **options: Any) -> Iterator[Reader]:
    """A reader of the site at an address; a request to anywhere else is refused and noted.

    Args:
        browser: Path of Chromium.
        address: Of the site's root.
        options: What Playwright's `new_page` takes, such as `java_script_enabled=False`.
    """
    viewport = {"width": WIDTH, "height": HEIGHT}
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
        page = chromium.new_page(**{"viewport": viewport, **options})
        one = Reader(page, address)
        page.on("console", one.hear)
        page.on("pageerror", lambda error: one.note("console", str(error)))
        page.route(re.compile(rf"^(?!{re.escape(address)})(https?|wss?):"), one.refuse)
        try:
            yield one
        finally:
            chromium.close()
