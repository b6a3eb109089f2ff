"""bitsandbytes: its eight-bit optimizers on tensors without data."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from utils.shims.shim import Library, Shim
from utils.shims.torch_ import with_data

BITSANDBYTES = Library("bitsandbytes", "0.50.2", "utils/shims/bitsandbytes.py")
_TABLE = Shim(
    BITSANDBYTES, "bitsandbytes.functional:create_dynamic_map", "code_tables",
    "the optimizers read a table of 256 values back as numbers", patched=True,
)  # fmt: skip
SHIMS = (_TABLE,)


def code_tables() -> AbstractContextManager[Any]:
    """Inside, tables of values are computed with data and then copied: they depend on nothing."""
    make = _TABLE.get()

    def table(*args: Any, **kwargs: Any) -> torch.Tensor:
        with with_data():
            values = make(*args, **kwargs).tolist()
        return torch.tensor(values)

    return _TABLE.replaced(table)
