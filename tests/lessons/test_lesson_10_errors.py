"""Lesson 10 reads PyTorch's errors: the parts of a card, and which of the four questions they answer."""

from __future__ import annotations

import re
from typing import Any

import pytest

from utils.lessons import folders
from utils.lessons.lesson_10.messages import PUBLISHED
from utils.units import GIB, MIB

LESSON = (folders()["10"] / "lesson.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The two functions, as the page's cells have them."""
    parsing = "SIZE = {" + LESSON.partition("SIZE = {")[2].partition("\n\n\n# %%")[0]
    judging = "def verdict(" + LESSON.partition("def verdict(")[2].partition("\n\n\n")[0]
    names: dict[str, Any] = {"re": re}
    exec(f"{parsing}\n\n\n{judging}", names)
    return names


def error(asked: str, card: str, free: str, tensors: str, pieces: str, process: str = "") -> str:
    return (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {card} of which "
        f"{free} is free. {process}Of the allocated memory {tensors} is allocated by PyTorch, and "
        f"{pieces} is reserved by PyTorch but unallocated."
    )


@pytest.mark.parametrize("message", PUBLISHED, ids=lambda message: message.source)
def test_the_parts_of_a_published_error_are_its_card(page: dict[str, Any], message: Any) -> None:
    parts = page["parts_of"](message.text)
    total = sum(parts[name] for name in page["PARTS"])
    assert total == pytest.approx(parts["card"]) and min(parts.values()) >= 0


def test_the_published_errors_have_their_letters(page: dict[str, Any]) -> None:
    found = {m.source: page["verdict"](page["parts_of"](m.text)) for m in PUBLISHED}
    assert list(found.values()) == ["b2", "a, b1", "c or d", "a, b1 or b2", "a", "c or d"]


def test_pieces_are_a_where_they_are_large_and_would_serve_the_request(
    page: dict[str, Any],
) -> None:
    text = error("2.00 GiB", "80.00 GiB", "0.50 GiB", "71.50 GiB", "7.50 GiB")
    parts = page["parts_of"](text)
    assert page["verdict"](parts) == "c or d", "under a tenth of the card"
    assert page["verdict"](parts, 0.05) == "a"
    text = error("8.01 GiB", "80.00 GiB", "0.50 GiB", "71.50 GiB", "7.50 GiB")
    assert page["verdict"](page["parts_of"](text), 0.05) == "c or d", "joined, they do not serve it"


def test_what_no_process_is_named_for_is_b1_or_b2(page: dict[str, Any]) -> None:
    text = error("1.00 GiB", "6.00 GiB", "0 bytes", "3.00 GiB", "0 bytes")
    parts = page["parts_of"](text)
    assert parts["no process named"] == 3 * GIB and parts["other processes"] == 0
    assert page["verdict"](parts) == "b1 or b2"


def test_a_process_that_cannot_hold_the_bytes_is_not_ours(page: dict[str, Any]) -> None:
    gone = "Including non-PyTorch memory, this process has 0 bytes memory in use. "
    parts = page["parts_of"](
        error("1.96 GiB", "23.43 GiB", "210 MiB", "22.41 GiB", "206 MiB", gone)
    )
    assert parts["this process, else"] == 0 and parts["no process named"] > 500 * MIB
    others = "Process 7 has 1.00 GiB memory in use. Process 8 has 4.00 GiB memory in use. "
    parts = page["parts_of"](
        error("1.00 GiB", "6.00 GiB", "1.00 GiB", "3.00 GiB", "0 bytes", others)
    )
    assert parts["this process, else"] == GIB and parts["other processes"] == GIB


def test_a_stranger_that_holds_more_is_not_taken_for_ours(page: dict[str, Any]) -> None:
    """In a container nobody is called "this process": the smallest that can hold our bytes is."""
    both = "Process 7 has 4.00 GiB memory in use. Process 8 has 70.00 GiB memory in use. "
    parts = page["parts_of"](
        error("1.00 GiB", "80.00 GiB", "6.00 GiB", "3.00 GiB", "0.50 GiB", both)
    )
    assert parts["this process, else"] == 0.5 * GIB and parts["other processes"] == 70 * GIB
    assert page["verdict"](parts) == "b2"


def test_an_old_error_says_that_it_cannot_be_read(page: dict[str, Any]) -> None:
    old = "Tried to allocate 20.00 MiB (GPU 0; 14.56 GiB total capacity; 649.97 MiB already allocated)"
    with pytest.raises(
        ValueError, match=r"does not say: card, in pieces, tensors\. PyTorch before 2\.1"
    ):
        page["parts_of"](old)
