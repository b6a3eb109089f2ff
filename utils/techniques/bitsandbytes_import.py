"""bitsandbytes, imported when it is first needed, so that the rest runs where it is missing."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from types import ModuleType

from utils.shims.torch_ import with_data


@functools.cache
def bitsandbytes_problem() -> str | None:
    """Why nothing can be packed here; None if bitsandbytes is there and loads."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed (`pip install bitsandbytes`)"
    try:
        _load()
    except Exception as error:  # what a broken build raises differs by system and version  # noqa: BLE001
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"bitsandbytes is installed and cannot be loaded ({reason})"
    return None


def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed and loads; `bitsandbytes_problem` says why not."""
    return bitsandbytes_problem() is None


def bitsandbytes_library() -> ModuleType:
    """The package; importing it registers its operations with PyTorch.

    Raises:
        ModuleNotFoundError: it is not installed, or cannot be loaded.
    """
    if problem := bitsandbytes_problem():
        raise ModuleNotFoundError(
            f"{problem}, and packing weights or moments needs its operations. Install it, or use "
            "16-bit weights and AdamW."
        )
    return _load()


def _load() -> ModuleType:
    # On a CPU it warns of an optional kernel for inference that nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    with with_data():  # its tables need values, which a simulation has not
        importlib.import_module("bitsandbytes.functional")
        return importlib.import_module("bitsandbytes")
