"""torch.distributed.checkpoint: the classes that its `.metadata` is made of."""

from __future__ import annotations

import enum
import io
import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as public

from utils.shims.shim import Library, Shim

TORCH = Library("torch", "2.15.0", "utils/shims/torch_checkpoint.py")

_STORED = Shim(
    TORCH,
    "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "read_metadata",
    "`.metadata` says with it where in a file each piece lies",
)
_FORMAT = Shim(
    TORCH,
    "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
    "read_metadata",
    "`.metadata` says with it how a tensor lies in memory",
)
_LAYOUT = Shim(
    TORCH,
    "torch.serialization:_get_layout",
    "read_metadata",
    "the layout of a tensor is pickled as a call of it",
)
SHIMS = (_STORED, _FORMAT, _LAYOUT)


def read_metadata(data: bytes) -> public.Metadata:
    """What a `.metadata` holds. It is a pickle, which could call anything; this one knows its classes alone.

    Raises:
        pickle.UnpicklingError: it asks for something else, or is damaged.
    """
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except (
        EOFError,
        UnicodeDecodeError,
        ValueError,
        IndexError,
        KeyError,
        OverflowError,
        AttributeError,
        TypeError,
        ImportError,
    ) as error:
        raise pickle.UnpicklingError(f"its .metadata is damaged ({error})") from error
    if not isinstance(found, public.Metadata):
        raise pickle.UnpicklingError(f"its .metadata holds a {type(found).__name__}")
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        kinds = {
            f"torch.distributed.checkpoint.metadata.{name}": getattr(public, name)
            for name in public.__all__
        }
        private = {shim.target.replace(":", "."): shim.get() for shim in SHIMS}
        self._known = kinds | private | {"torch.Size": torch.Size}

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name == "builtins.getattr":
            return self._member
        if name in self._known:
            return self._known[name]
        if module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype):
            return vars(torch)[global_name]
        if module_name.partition(".")[0] == "pathlib":  # where it was saved; nobody goes there
            return pathlib.PurePath
        raise pickle.UnpicklingError(f"its .metadata asks for {name}: code, and no checkpoint")

    def _member(self, kind: Any, name: str) -> enum.Enum:
        """Of an enumeration that is known: Python before 3.11.4 pickles its members as `getattr`."""
        if kind not in self._known.values() or not issubclass(kind, enum.Enum):
            raise pickle.UnpicklingError(f"its .metadata asks for {name} of {kind}: code")
        return kind[name]
