"""Sites and decks built for a test, and those of the course's tools that look at them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from .course import ROOT, find_browser

sys.path.insert(0, str(ROOT / "tools"))

import site_check
from _deck_reader import faults, read_deck
from _site_links import Parsed, broken_links, pages_of
from _site_reader import WIDTHS, Finding, Reader, reader, served

__all__ = [
    "ROOT",
    "WIDTHS",
    "Parsed",
    "Reader",
    "broken_links",
    "build_decks",
    "build_site",
    "faults",
    "find_browser",
    "pages_of",
    "read_deck",
    "reader",
    "served",
    "site_check",
    "told",
]


def build_site(folder: Path, *notebooks: str) -> Path:
    """A site below a folder; of all notebooks, or of some."""
    _run("website.py", folder, notebooks)
    return folder / "site"


def build_decks(folder: Path, *notebooks: str) -> Path:
    """Decks in a folder; of all lessons, or of some."""
    _run("slides.py", folder, notebooks)
    return folder


def _run(tool: str, folder: Path, notebooks: Iterable[str]) -> None:
    command = [sys.executable, f"tools/{tool}", "--to", str(folder)]
    command += [f"{name}.ipynb" for name in notebooks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"tools/{tool} failed:\n{done.stderr[-3000:]}"


def told(findings: Iterable[Finding]) -> str:
    """Findings, one a line."""
    return "\n".join(map(str, findings))
