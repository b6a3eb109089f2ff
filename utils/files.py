"""Files that are written whole or not at all, and temporary folders that outlive nobody for long."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: a killed process's folders stay there
    fcntl = None

_SCRATCH = (
    "bigmodels-"  # short: sockets lie in such folders, and their paths may have 100 characters
)
_OWNER = ".held-by-its-process"
LONGEST_NAME = 60


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, making its folder. A reader sees the old content or the new, never a part.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):  # after success there is no part left to remove
            part.unlink()


@contextlib.contextmanager
def scratch(name: str, place: Path | None = None) -> Iterator[Path]:
    """A temporary folder of that name for this user alone, gone after the block.

    It lies in `place`, or where the system has its temporary files.

    What killed processes left of theirs goes as well, on entry: each holds a lock on a file beside its
    folder, which the system releases however it ends.

    Raises:
        ValueError: `name` cannot be a folder's name, or `place` is no folder.
    """
    if not name.strip(". ") or len(name) > LONGEST_NAME or set(name) & set("/\\\0"):
        raise ValueError(
            f"name: {name[:LONGEST_NAME]!r} cannot be the name of a folder. Write a short one "
            "without a slash, such as 'run'."
        )
    place = place or Path(tempfile.gettempdir())
    if not place.is_dir():
        raise ValueError(
            f"place: there is no folder {str(place)!r}. Make it first, or leave it out."
        )
    _sweep(place)
    outer, held = _hold(place, name)
    owner = os.getpid()
    try:
        yield outer / name
    finally:
        if os.getpid() == owner:  # a forked process ends its copy of this block as well
            shutil.rmtree(outer, ignore_errors=True)
        os.close(held)


def scratch_folder(name: str) -> Path:
    """A folder as in `scratch`, until this process ends."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(scratch(name))


def _hold(place: Path, name: str) -> tuple[Path, int]:
    """A new folder, and the open file whose lock says that it is in use."""
    draft = Path(tempfile.mkdtemp(prefix=f".{_SCRATCH}", dir=place))
    draft.chmod(0o711)  # who opens the inner folder to others, as Slurm does, opens its way too
    (draft / name).mkdir(mode=0o700)
    held = os.open(draft / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
    if fcntl:
        fcntl.flock(held, fcntl.LOCK_EX)
    outer = draft.with_name(draft.name.removeprefix("."))
    draft.rename(outer)  # only now, with its lock, do others look at it
    return outer, held


def _sweep(place: Path) -> None:
    for outer in place.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another user's, or just swept by another process
            if fcntl and not outer.is_symlink():
                held = os.open(outer / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where it is in use
                    shutil.rmtree(outer, ignore_errors=True)
                finally:
                    os.close(held)
