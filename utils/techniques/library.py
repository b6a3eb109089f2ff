"""bitsandbytes, imported when it is first needed, so that the rest runs where it is missing."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from types import ModuleType

from torch.utils._python_dispatch import _disable_current_modes


def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None


@functools.cache
def bitsandbytes_library() -> ModuleType:
    """The package; importing it registers its operations with PyTorch.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    if not has_bitsandbytes():
        raise ModuleNotFoundError(
            "bitsandbytes is not installed, and packing weights or moments needs its operations. "
            "Install it with `pip install bitsandbytes`, or use 16-bit weights and AdamW."
        )
    # On a CPU it warns of an optional kernel for inference that nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    with _disable_current_modes():  # its tables need values, which a simulation has not
        importlib.import_module("bitsandbytes.functional")
        return importlib.import_module("bitsandbytes")
