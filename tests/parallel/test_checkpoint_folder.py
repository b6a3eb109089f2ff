"""Random saves, roll-backs, damage and kills: what was saved last and is whole is what loads."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from utils.parallel import checkpoint_folder
from utils.parallel.checkpoint_folder import (
    CHECKSUMS,
    begin,
    beyond,
    list_checkpoints,
    newest_whole,
    problems,
    publish,
    remove,
    step_of,
    write_list,
)

CHANGES = ("mkdir", "rename", "unlink", "rmdir", "fsync")


class Killed(BaseException):
    """What a kill is to a process: no `except Exception` hears of it."""


@contextmanager
def killed_at(moment: int | None) -> Iterator[None]:
    """Inside, the n-th change to a folder does not happen any more, nor does what follows it."""
    left = itertools.count(-1 if moment is None else moment, -1)

    def deadly(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if moment is not None and next(left) <= 0:
                raise Killed
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in CHANGES:
            stack.enter_context(mock.patch.object(os, name, deadly(getattr(os, name))))
        yield


def save(folder: Path, step: int, keep: int, content: bytes) -> Path:
    """As `save_safely`, of one rank and two files."""
    new = begin(folder, step)
    files = {".metadata": b"of " + content, "__0_0.distcp": content}
    for name, data in files.items():
        with (new / name).open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())  # a moment at which a kill may come
    write_list(new, {name: (len(data), zlib.crc32(data)) for name, data in files.items()}, 1)
    final = publish(new)
    remove(beyond(list_checkpoints(folder), keep, lambda path: not problems(path)))
    return final


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << place % 8
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path, int], None]] = {
    "flip": flip,
    "cut": lambda path, place: path.write_bytes(path.read_bytes()[: place % path.stat().st_size]),
    "remove": lambda path, place: path.unlink(),
}
SAVE = st.tuples(st.just("save"), st.integers(1, 9), st.none() | st.integers(0, 24))
DAMAGE = st.tuples(st.sampled_from([*DAMAGES]), st.integers(0, 9), st.integers(0, 400))
HISTORY = st.lists(st.one_of(SAVE, SAVE, DAMAGE), min_size=1, max_size=12)


def content_of(path: Path) -> bytes:
    return (path / "__0_0.distcp").read_bytes()


def live(folder: Path, history: list[tuple[Any, ...]], keep: int) -> None:
    """Go through a history; `whole` is what was saved and is whole, in the order of saving."""
    whole: list[bytes] = []
    for number, (what, which, moment) in enumerate(history):
        content = b"%d of step %d" % (number, which)
        if what == "save":
            before = list(whole)
            try:
                with killed_at(moment):
                    save(folder, which, keep, content)
                whole.append(content)
            except Killed:
                whole += [content] if content in all_whole(folder) else []
            left = [each for each in whole if each in all_whole(folder)]
            assert len(left) >= min(keep, len(whole)), f"{history}: a whole one is gone"
            assert left == whole[-len(left) :] if left else not whole, "and not the oldest"
            assert whole[-1:] in ([content], before[-1:]), "what was just written stays"
            whole = left
        elif len(whole) > 1:  # damage to the last whole one would leave none, whatever was done
            path = sorted(p for p in list_checkpoints(folder) if not problems(p))[
                which % len(whole)
            ]
            whole.remove(content_of(path))
            files = sorted(path.iterdir())
            DAMAGES[what](files[moment % len(files)], moment)
            assert problems(path), "no damage goes unseen"
        found = newest_whole(folder)
        assert (content_of(found) if found else None) == (whole[-1] if whole else None), history


def all_whole(folder: Path) -> list[bytes]:
    return [content_of(path) for path in list_checkpoints(folder) if not problems(path)]


def through(history: list[tuple[Any, ...]], keep: int) -> None:
    place = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="kept-", dir=place))
    try:
        live(folder, history, keep)
    finally:
        shutil.rmtree(folder)


LIMITS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=300, **LIMITS)
@given(HISTORY, st.integers(1, 3))
@example([("save", 5, None), ("save", 9, None), ("save", 6, None)], 2)
@example([("save", 5, None), ("save", 9, None), ("flip", 1, 7), ("save", 6, None)], 1)
@example([("save", 5, None)] * 4, 2)
def test_what_was_saved_last_and_is_whole_is_what_loads(history, keep: int) -> None:
    through(history, keep)


@pytest.mark.slow
@settings(max_examples=10_000, **LIMITS)
@given(HISTORY, st.integers(1, 3))
def test_ten_thousand_histories(history, keep: int) -> None:
    through(history, keep)


def test_every_bit_of_a_list_counts(tmp_path: Path) -> None:
    path = save(tmp_path, 5, 1, b"five")
    data = (path / CHECKSUMS).read_bytes()
    for place in range(len(data)):
        for bit in range(8):
            (path / CHECKSUMS).write_bytes(
                bytes([*data[:place], data[place] ^ 1 << bit, *data[place + 1 :]])
            )
            assert problems(path), f"bit {bit} of byte {place}"


def test_a_list_of_something_else_is_no_list(tmp_path: Path) -> None:
    path = save(tmp_path, 5, 1, b"five")
    for text in (
        "[]",
        "7",
        "{}",
        '{"version": 2}',
        '{"version": [], "files": {}}',
        '{"version": 1}',
    ):
        (path / CHECKSUMS).write_text(text)
        assert "list of checksums" in problems(path)[0], text
    (path / CHECKSUMS).write_text(json.dumps({"version": 9, "files": {}}))
    assert "update" in problems(path)[0]


def test_ranks_read_a_part_each(tmp_path: Path) -> None:
    path = save(tmp_path, 5, 1, b"five")
    for file in (".metadata", "__0_0.distcp"):
        (path / file).unlink()
    parts = [problems(path, part, 3) for part in range(3)]
    assert parts == [[".metadata is missing"], ["__0_0.distcp is missing"], []]
    assert step_of(path) == 5 and checkpoint_folder.VERSION == 2
