"""Words and units that every part of the course shares.

GiB means 2**30 bytes and GB means 10**9 bytes; the two are never mixed.
"""

from __future__ import annotations

import enum
import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

_SUFFIX_BYTES = {
    "B": 1,
    "KB": KB,
    "MB": MB,
    "GB": GB,
    "TB": TB,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
}
_BYTE_STEPS = [(TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")]
_TIME_STEPS = [(86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")]


class Evidence(enum.Enum):
    """Where a number comes from. Every measurement, table and figure carries one."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    PREDICTED = "predicted"
    RECORDED = "recorded"
    PUBLISHED = "published"

    def __str__(self) -> str:
        return self.value


class Category(enum.StrEnum):
    """What a byte on the device is there for. Every byte belongs to exactly one.

    The meter finds them, the planner predicts them. A plain name will do as a key:
    `breakdown["activations"]`.
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"
    CAST_WEIGHTS = "cast weights"
    RECOMPUTED = "recomputed activations"
    LOGITS_AND_LOSS = "logits and loss"
    COMMUNICATION = "communication buffers"
    GATHERED = "gathered parameters"
    WORKSPACES = "workspaces"
    TEMPORARIES = "temporaries"
    KEPT = "kept beside the model"
    OTHER = "other"


class Phase(enum.StrEnum):
    """The part of a training step in which something happens."""

    BEFORE_FORWARD = "before forward"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER_STEP = "optimizer step"
    AFTER_STEP = "after step"


def format_bytes(count: float) -> str:
    """Write a byte count with a binary unit: `format_bytes(1536)` is "1.50 KiB"."""
    for size, suffix in _BYTE_STEPS:
        if abs(count) >= size:
            return f"{count / size:,.2f} {suffix}"
    return f"{count:,.0f} B"


def parse_bytes(text: str | int) -> int:
    """Read "24GB", "16 GiB" or a plain count of bytes.

    Raises:
        ValueError: the text is no size, or not a positive one.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(text))
    suffix = (match[2].upper() or "B") if match else ""
    if not match or suffix not in _SUFFIX_BYTES:
        raise ValueError(
            f"{text!r} is not a size. Write a number and a unit, "
            "such as '24GB' (10**9 bytes each) or '16GiB' (2**30 bytes each)."
        )
    count = int(float(match[1]) * _SUFFIX_BYTES[suffix])
    if count <= 0:
        raise ValueError(f"A size must be larger than zero; {text!r} is not.")
    return count


def format_seconds(seconds: float) -> str:
    """Write a duration with a fitting unit: `format_seconds(0.25)` is "250 ms"."""
    for size, suffix in _TIME_STEPS:
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {suffix}"
    return f"{seconds * 1e6:.3g} us"


def format_count(count: float) -> str:
    """Write a large count with a decimal suffix: `format_count(6_738_415_616)` is "6.74B"."""
    for size, suffix in [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")]:
        if abs(count) >= size:
            return f"{count / size:.2f}{suffix}"
    return f"{count:,.0f}"
