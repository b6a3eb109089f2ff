"""A module that is imported inside of a simulation keeps tensors with data, as it does outside.

What a module makes at its top lives until the process ends: without data it would be counted in this
simulation alone, and be no number in all that comes after.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

from utils.shims.torch_ import with_data
from utils.shims.torch_dispatch import torch_function_off


@contextlib.contextmanager
def imported_with_data() -> Iterator[None]:
    """Inside, whatever is imported for the first time is run as without a simulation."""
    plain, by_name = builtins.__import__, importlib.import_module

    def imported(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if not level and _is_there(name, fromlist):
            return plain(name, globals, locals, fromlist, level)
        with with_data(), torch_function_off()():
            return plain(name, globals, locals, fromlist, level)

    def imported_by_name(name: str, package: str | None = None) -> ModuleType:
        if name in sys.modules:
            return by_name(name, package)
        with with_data(), torch_function_off()():
            return by_name(name, package)

    with (
        mock.patch.object(builtins, "__import__", imported),
        mock.patch.object(importlib, "import_module", imported_by_name),
    ):
        yield


def _is_there(name: str, wanted: Sequence[str] | None) -> bool:
    """Whether nothing is left to be run for `from name import wanted`."""
    module: Any = sys.modules.get(name)
    return module is not None and all(each in vars(module) for each in wanted or ())
