"""Where other libraries look into tensors, answered while a simulation runs."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from utils.simulation.deepspeed import zero_without_data

_PATCHED = ("bitsandbytes", "deepspeed", "transformers")


@contextlib.contextmanager
def libraries() -> Iterator[None]:
    """Inside, the libraries that are loaded run on tensors without data. Undone at the end.

    Raises:
        ValueError: one of them was loaded inside, too late for that.
    """
    loaded = {name for name in _PATCHED if name in sys.modules}
    with contextlib.ExitStack() as stack:
        if "bitsandbytes" in loaded:
            stack.enter_context(_code_tables())
        if "deepspeed" in loaded:
            stack.enter_context(zero_without_data())
        if "transformers" in loaded:
            stack.enter_context(_one_sequence_a_row())
        yield
    for name in _PATCHED:
        if name in sys.modules and name not in loaded:
            raise ValueError(
                f"'{name}' was imported inside of the simulation, which has to know of it before. "
                "Import it at the top, and simulate again."
            )


def _code_tables() -> contextlib.AbstractContextManager[Any]:
    """bitsandbytes' eight-bit optimizers read a table of 256 values back as numbers, once.

    The table depends on nothing, so it is computed with data and then copied.
    """
    functional = importlib.import_module("bitsandbytes.functional")
    make = functional.create_dynamic_map

    def table(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _disable_current_modes():
            values = make(*args, **kwargs).tolist()
        return torch.tensor(values)

    return mock.patch.object(functional, "create_dynamic_map", table)


def _one_sequence_a_row() -> contextlib.AbstractContextManager[Any]:
    """transformers looks at the positions for several sequences packed into a row.

    It finds none in a plain batch, and takes attention without a mask; where it cannot look, it
    makes a mask of (sequence, sequence) instead (masking_utils.py, `find_packed_sequence_indices`).
    """
    masking = importlib.import_module("transformers.masking_utils")
    return mock.patch.object(masking, "find_packed_sequence_indices", lambda positions: None)
