"""Objects as bytes for another process, notebook functions included."""

from __future__ import annotations

import importlib
import io
import sys
from types import ModuleType
from typing import Any

import cloudpickle


class _Pickler(cloudpickle.Pickler):
    """cloudpickle's, which also sends modules of a class of their own by name.

    A function that uses `dist` and any attribute `config` makes cloudpickle send
    `torch.distributed.config` along, and of modules it knows only the plain class.
    """

    def reducer_override(self, obj: Any) -> Any:
        named = isinstance(obj, ModuleType) and type(obj) is not ModuleType
        if named and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def pickled(value: Any) -> bytes:
    """`value` as bytes for `cloudpickle.loads`.

    Raises:
        Exception: whatever the parts of `value` raise that cannot travel.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()
