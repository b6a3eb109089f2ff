"""The browser that the site, the decks and notebooks are looked at with."""

from __future__ import annotations

import shutil

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Containers have no user namespaces for a sandbox, and nothing here may call out.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_browser() -> str | None:
    """The path of an installed Chromium, None where there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)
