"""What a page of the site costs its reader on a first visit: bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from _browser import FLAGS
from _site_reader import EAGER, HEIGHT, LOADED, WIDTH
from playwright.sync_api import Browser, sync_playwright

MOST_BYTES = 1_500_000
MOST_SECONDS = 0.5  # printed beside each page's; nothing fails by it
LOAD = "performance.getEntriesByType('navigation')[0].loadEventEnd / 1000"


@dataclass(frozen=True)
class Weight:
    """The first visit of a page, with nothing in the browser's cache.

    Attributes:
        page: Its address below the site's root.
        sent_bytes: All that the server sends for it, pictures further down and headers included,
            uncompressed.
        load_seconds: Until the load event, from this machine.
    """

    page: str
    sent_bytes: int
    load_seconds: float

    @property
    def is_over(self) -> bool:
        """Whether it weighs more than a page may."""
        return self.sent_bytes > MOST_BYTES


def weights(browser: str, address: str, names: Sequence[str]) -> Iterator[Weight]:
    """The weight of each page, one at a time: side by side they would wait for each other."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
        try:
            for name in names:
                yield weight(chromium, address, name)
        finally:
            chromium.close()


def weight(chromium: Browser, address: str, name: str) -> Weight:
    """Visit a page in a new profile, and read it to its end."""
    context = chromium.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    page = context.new_page()
    sent: list[float] = []
    network = context.new_cdp_session(page)
    network.send("Network.enable")
    network.on("Network.loadingFinished", lambda event: sent.append(event["encodedDataLength"]))
    page.goto(address + name)
    seconds = page.evaluate(LOAD)
    page.evaluate(EAGER)
    page.wait_for_function(LOADED)
    page.wait_for_load_state("networkidle")
    context.close()
    return Weight(name, round(sum(sent)), seconds)
