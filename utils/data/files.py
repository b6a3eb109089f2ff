"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill: it becomes `folder` if the block ends well, and is deleted if not.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    unfinished.mkdir(parents=True, exist_ok=True)
    try:
        yield unfinished
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        os.replace(unfinished, folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster, with the same content
            raise
