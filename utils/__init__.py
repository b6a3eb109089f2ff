"""The course's shared package: `from utils import setup, measure, compare, ...`.

Names are imported when they are first used, so that parts without torch need no torch.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from utils.moved import find_by_earlier_names

# Read off the stub, so that editors and type checkers see each name with its type.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOME = {
    alias.name: str(node.module)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'utils' has no name {name!r}; it offers: {sorted(_HOME)}")
    from utils.checked import checked  # here: the set-up runs in this package before all else

    return checked(getattr(importlib.import_module(_HOME[name]), name), __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


find_by_earlier_names()
