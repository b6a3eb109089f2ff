"""The check of addresses, against a server on this machine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import links  # noqa: E402


class Answers(BaseHTTPRequestHandler):
    """Answers with the number in the path."""

    def do_GET(self) -> None:
        self.send_response(int(self.path[1:]))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.server_address[1]}"
        found.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("code", "told"),
    [(200, ""), (403, ""), (429, ""), (404, "it answers 404"), (500, "it answers 500")],
)
def test_an_address_is_there_or_not(server: str, code: int, told: str) -> None:
    assert links.problem(f"{server}/{code}", pause_seconds=0) == told


def test_a_server_that_is_gone_cannot_be_reached() -> None:
    assert "cannot be reached" in links.problem("http://127.0.0.1:9", pause_seconds=0)


def test_each_address_is_asked_once_and_names_its_pages(server: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(f"[x]({server}/404#one) [y]({server}/200)")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/b.md").write_text(f"<{server}/404>, [z]({server}/404#two)")
    rows = links.check(links.addresses(tmp_path), pause_seconds=0)
    broken = [row for row in rows if row["error"]]
    assert len(rows) == 2 and len(broken) == 1, rows
    assert broken[0]["notebook"] == "a.md, docs/b.md", "anchors aside, it is one address"


def test_the_course_leads_to_addresses() -> None:
    found = links.addresses(ROOT)
    assert len(found) > 50, "the lessons' references are found"
    assert not [address for address in found if "//example" in address or "localhost" in address]
