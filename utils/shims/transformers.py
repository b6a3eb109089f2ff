"""transformers: its attention masks on tensors without data."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from utils.shims.shim import Library, Shim

TRANSFORMERS = Library("transformers", "5.23.0", "utils/shims/transformers.py")
_PACKED = Shim(
    TRANSFORMERS, "transformers.masking_utils:find_packed_sequence_indices", "one_sequence_a_row",
    "it looks at the positions for several sequences packed into a row", patched=True,
)  # fmt: skip
SHIMS = (_PACKED,)


def one_sequence_a_row() -> AbstractContextManager[Any]:
    """Inside, no row is taken for a packed one.

    transformers finds none in a plain batch, and takes attention without a mask; where it cannot
    look, it makes a mask of (sequence, sequence) instead.
    """
    return _PACKED.replaced(lambda positions: None)
