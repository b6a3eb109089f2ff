"""What a kill or a power cut would leave of lab 16's folder, at every line and change of a save.

A kill leaves what the system has: what stands in a buffer of Python is lost. A power cut leaves what
is on the disk: of a file what it held at its last `os.fsync`, and of a rename nothing until the folder
that it leads to was synced.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MOST_LINES = 400
_CHANGES = frozenset(
    {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"}
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# What lies below a folder, by relative path: bytes of a file, None for a folder, a link's target.
Image = dict[str, bytes | str | None]


class Moment(NamedTuple):
    """What an end at one moment would leave."""

    line: int  # of the learner's lines that ran, from 0
    is_power_cut: bool
    image: Image


class Unsynced(NamedTuple):
    """What a save that has returned has not brought to the disk."""

    never: list[str]
    too_early: list[str]  # synced, and written to after that
    renames: list[str]


class Recorder:
    """Watches a save into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._line, self._is_looking = folder, 0, False
        self._on_disk: dict[int, bytes] = {}  # by inode
        for name, inode in _inodes(folder).items():  # of earlier saves
            self._on_disk[inode] = (folder / name).read_bytes()
        self._renames: list[tuple[str, str, Image]] = []  # from, to, what was there; not yet synced
        self._moments: dict[Any, Moment] = {}

    @property
    def moments(self) -> list[Moment]:
        """Those that differ, in order."""
        return list(self._moments.values())

    def record(self, save: Callable[..., Any], *args: Any) -> None:
        """Call `save(*args)`. Lines of the learner's own file count, in helpers too."""
        function = getattr(save, "func", save)
        own = function.__code__.co_filename

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != own:
                return None
            if event == "line" and self._line < MOST_LINES:
                self._look()
                self._line += 1
            return trace

        before = sys.gettrace()
        with self._hearing_changes(), self._hearing_syncs(function.__globals__):
            sys.settrace(trace)
            try:
                save(*args)
            finally:
                sys.settrace(before)

    def after_power_cut(self) -> Image:
        """What is on the disk now."""
        image = image_of(self._folder)
        for name, inode in _inodes(self._folder).items():
            image[name] = self._on_disk.get(inode, b"")
        for source, target, was_there in reversed(self._renames):
            if target in image and source not in image:
                moved = [name for name in image if f"{name}/".startswith(f"{target}/")]
                image |= {source + name[len(target) :]: image.pop(name) for name in moved}
                image |= was_there
        return image

    def unsynced(self) -> Unsynced:
        """What a power cut would take from a save that has returned."""
        image, inodes = image_of(self._folder), _inodes(self._folder)
        never = [name for name, inode in inodes.items() if inode not in self._on_disk]
        early = [
            name
            for name, inode in inodes.items()
            if name not in never and self._on_disk[inode] != image[name]
        ]
        return Unsynced(never, early, [to for _, to, _ in self._renames if to in image])

    def _look(self, emptied: str = "") -> None:
        self._is_looking = True
        there = {*_inodes(self._folder).values()}  # a removed file's inode is given to another
        self._on_disk = {i: data for i, data in self._on_disk.items() if i in there}
        now = image_of(self._folder)
        for is_cut, image in ((False, now), (True, self.after_power_cut())):
            self._note(is_cut, image)
        if emptied in now:
            self._note(False, now | {emptied: b""})
        self._is_looking = False

    def _note(self, is_cut: bool, image: Image) -> None:
        key = tuple(sorted(image.items(), key=lambda item: item[0]))
        self._moments.setdefault(key, Moment(max(0, self._line - 1), is_cut, image))

    @contextlib.contextmanager
    def _hearing_changes(self) -> Iterator[None]:
        _hear()
        _listeners.append(self._changed)
        try:
            yield
        finally:
            _listeners.remove(self._changed)

    def _changed(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_looking or (event == "open" and not (args[2] or 0) & _WRITES):
            return
        if event == "open":
            empties = args[2] & os.O_TRUNC and isinstance(args[0], (str, bytes, os.PathLike))
            return self._look(self._name(args[0]) if empties else "")
        self._look()
        if event == "os.rename":
            source, target = map(self._name, args[:2])
            below = f"{target}/"
            there = {k: v for k, v in image_of(self._folder).items() if f"{k}/".startswith(below)}
            self._renames.append((source, target, there))

    def _name(self, path: Any) -> str:
        return os.path.relpath(os.fsdecode(path), self._folder)

    @contextlib.contextmanager
    def _hearing_syncs(self, names: dict[str, Any]) -> Iterator[None]:
        """`os.fsync` and its like report, also where they were imported by name."""
        syncs = ("fsync", "fdatasync", "sync")
        originals = {name: getattr(os, name) for name in syncs if hasattr(os, name)}

        def noted(original: Callable[..., Any], handle: Any = None) -> None:
            original() if handle is None else original(handle)
            self._synced(handle)

        put = {name: functools.partial(noted, original) for name, original in originals.items()}
        own = {
            key: name
            for key, value in names.items()
            for name, original in originals.items()
            if value is original
        }
        try:
            for name, reporting in put.items():
                setattr(os, name, reporting)
            names.update({key: put[name] for key, name in own.items()})
            yield
        finally:
            for name, original in originals.items():
                setattr(os, name, original)
            names.update({key: originals[name] for key, name in own.items()})

    def _synced(self, handle: Any) -> None:
        files = {inode: name for name, inode in _inodes(self._folder).items()}
        if handle is None:  # all
            self._renames.clear()
            self._on_disk |= {i: (self._folder / name).read_bytes() for i, name in files.items()}
            return
        found = os.fstat(handle if isinstance(handle, int) else handle.fileno())
        if stat.S_ISDIR(found.st_mode):
            parents = ((rename, (self._folder / rename[1]).parent) for rename in self._renames)
            self._renames = [
                rename
                for rename, parent in parents
                if not parent.exists() or parent.stat().st_ino != found.st_ino
            ]
        elif found.st_ino in files:
            self._on_disk[found.st_ino] = (self._folder / files[found.st_ino]).read_bytes()


def image_of(folder: Path) -> Image:
    """What lies below a folder."""
    return {os.path.relpath(path, folder): _content(path) for path in _below(folder)}


def put_back(image: Image, folder: Path) -> None:
    """Make an empty folder hold what an image says."""
    for name, content in sorted(image.items()):
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(content) if isinstance(content, str) else path.write_bytes(content)


def _below(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        yield from (os.path.join(root, name) for name in (*folders, *files))


def _content(path: str) -> bytes | str | None:
    if os.path.islink(path):
        return os.readlink(path)
    return None if os.path.isdir(path) else Path(path).read_bytes()


def _inodes(folder: Path) -> dict[str, int]:
    """Of the files below a folder."""
    files = (path for path in _below(folder) if os.path.isfile(path) and not os.path.islink(path))
    return {os.path.relpath(path, folder): os.stat(path).st_ino for path in files}


_listeners: list[Callable[[str, tuple[Any, ...]], None]] = []


@functools.cache
def _hear() -> None:
    """Python keeps an audit hook for good; without listeners it does nothing."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if _listeners and (event == "open" or event in _CHANGES):
            _listeners[-1](event, args)

    sys.addaudithook(hook)
