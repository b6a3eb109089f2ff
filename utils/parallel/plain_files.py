"""How `torch.distributed.checkpoint` writes and reads files here: summed up, and as plain data.

Its own files are pickles, which may call anything when they are read. What stands in `.metadata` is
read by an unpickler that knows its classes alone; what is no tensor as `torch.load(weights_only=True)`
does, and what that could not read is not written.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.futures import Future

from utils.shims.torch_checkpoint import read_metadata


class _SummedFile(io.BufferedWriter):
    """A file that is on the disk when it is closed, and knows what it was meant to hold."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.size = self.checksum = 0

    def write(self, data: Any, /) -> int:
        self.size += memoryview(data).nbytes
        self.checksum = zlib.crc32(data, self.checksum)
        return super().write(data)

    def close(self) -> None:
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()


class _SummingFiles(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", "a writer writes"
        with _SummedFile(Path(path)) as stream:
            yield stream
        self.sums[Path(path).name] = (stream.size, stream.checksum)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class SummingWriter(FileSystemWriter):
    """Knows bytes and CRC-32 of each file that this rank wrote."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=False)  # `_SummedFile` does
        self.fs = _SummingFiles()

    @property
    def sums(self) -> dict[str, tuple[int, int]]:
        return cast(_SummingFiles, self.fs).sums


class PlainSaves(DefaultSavePlanner):
    """Refuses what could not be loaded again without running code."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        if isinstance(found, io.BytesIO):
            name = f"{write_item.index.fqn!r}, a {type(object).__name__},"
            _plain(io.BytesIO(found.getbuffer()), name)
        return found


class PlainLoads(DefaultLoadPlanner):
    """Loads plain data where `dcp` unpickles whatever is there."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(_plain(value, repr(read_item.dest_index.fqn)), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class PlainReader(FileSystemReader):
    """Reads `.metadata` without running it, and no file that is not on the checkpoint's list."""

    def __init__(self, path: Path, files: set[str]) -> None:
        super().__init__(path)
        self._folder, self._files = path, files
        self.unread = ""  # what the disk did not give

    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        with self._noted():
            data = (self._folder / ".metadata").read_bytes()
        metadata = read_metadata(data)
        if foreign := {x.relative_path for x in metadata.storage_data.values()} - self._files:
            raise ValueError(f"it reads files that are none of its own, such as {min(foreign)}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self._noted():
            return super().read_data(plan, planner)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.unread = f"it cannot be read ({error.strerror})"
            raise


def _plain(file: IO[bytes], name: str) -> Any:
    try:
        return torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(
            f"{name} is no plain data: make it tensors, numbers, texts, lists and dicts"
        ) from error
