"""Weights in files of safetensors: their names, shapes and types, of which the headers tell all.

A file begins with eight bytes, the length of a JSON header in little-endian order, and the header;
the values follow (github.com/huggingface/safetensors, "Format"). Nothing after the header is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from utils.simulation.refusals import NotSimulated
from utils.units import format_bytes

LONGEST_HEADER_BYTES = 100_000_000  # MAX_HEADER_SIZE of safetensors/src/tensor.rs
OPENER = "safe_open"
_TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class WeightsFileError(NotSimulated):
    """A file of weights that cannot be one. The message names it and says what is wrong."""


class HeaderSlice:
    """What `safe_open(...).get_slice(name)` gives: a tensor once it is indexed."""

    def __init__(self, path: Path, name: str, row: dict[str, Any]) -> None:
        self._path, self._name, self._row = path, name, row

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._row["shape"])

    def get_dtype(self) -> str:
        """Its type in safetensors' words, such as "BF16"."""
        return self._row["dtype"]

    def __getitem__(self, index: Any) -> torch.Tensor:
        dtype = _TYPES.get(self.get_dtype())
        if dtype is None:
            raise WeightsFileError(
                f"loads '{self._name}' of {self._path.name}, which is of the type {self.get_dtype()} "
                f"that no simulation knows. It knows {', '.join(_TYPES)}."
            )
        whole = torch.empty(self.get_shape(), dtype=dtype, device="cpu")
        return whole if index is Ellipsis else whole[index].clone()


class HeaderFile:
    """As `safetensors.safe_open`: a file of which only the header is read.

    Raises:
        WeightsFileError: there is no such file, or it is no whole file of safetensors.
    """

    def __init__(self, filename: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        self._path = Path(filename)
        rows = read_header(self._path)
        self._metadata: dict[str, str] | None = rows.pop("__metadata__", None)
        self._rows: dict[str, dict[str, Any]] = rows

    def __enter__(self) -> HeaderFile:
        return self

    def __exit__(self, *args: object) -> None: ...

    def metadata(self) -> dict[str, str] | None:
        """What the file says about itself."""
        return self._metadata

    def keys(self) -> list[str]:
        """The tensors' names."""
        return list(self._rows)

    offset_keys = keys

    def get_slice(self, name: str) -> HeaderSlice:
        """A tensor that is made once it is indexed."""
        return HeaderSlice(self._path, name, self._rows[name])

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All of them."""
        return {name: self.get_tensor(name) for name in self._rows}

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor without data."""
        return self.get_slice(name)[...]


def read_header(path: Path) -> dict[str, Any]:
    """The rows of a file of safetensors by tensor, and what it says about itself.

    Raises:
        WeightsFileError: the file is missing, cut off, or something else.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= min(size, LONGEST_HEADER_BYTES) else b""
    except OSError as error:
        raise WeightsFileError(f"loads {path}, which cannot be read: {error.strerror}.") from error
    if size < 8 or len(header) < length or not length:
        raise WeightsFileError(
            f"loads {path.name}, which is cut off, or no file of safetensors: it has {format_bytes(size)}, and "
            f"its header would take {format_bytes(length)}. Download or save it again."
        )
    return _checked(path, header, size - 8 - length)


def _checked(path: Path, header: bytes, values_bytes: int) -> dict[str, Any]:
    try:
        rows = json.loads(header)
        tensors = [row for name, row in rows.items() if name != "__metadata__"]
        end = max((int(row["data_offsets"][1]) for row in tensors), default=0)
        for row in tensors:
            torch.Size(row["shape"])
            str(row["dtype"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise WeightsFileError(
            f"loads {path.name}, whose header is damaged ({error}). Download or save it again."
        ) from error
    if end > values_bytes:
        raise WeightsFileError(
            f"loads {path.name}, which is cut off: its header speaks of {end:,} bytes of values, and "
            f"{values_bytes:,} are there. Download or save it again."
        )
    return rows


@contextlib.contextmanager
def headers_alone() -> Iterator[None]:
    """Inside, `safe_open` of safetensors, and of modules that took it from there, is `HeaderFile`."""
    if "safetensors" not in sys.modules:
        yield
        return
    plain, in_force = getattr(sys.modules["safetensors"], OPENER), [True]

    def opened(filename: Any, *args: Any, **kwargs: Any) -> Any:
        # A module that is loaded inside keeps this function for good.
        how = HeaderFile if in_force else plain
        return how(filename, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(OPENER) is plain:
                stack.enter_context(mock.patch.object(module, OPENER, opened))
        try:
            yield
        finally:
            in_force.clear()
