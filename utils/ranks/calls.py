"""What this rank gave to collectives, from PyTorch's flight recorder: which, how large, at which line.

Under gloo the recorder holds collectives and no sends, says "scheduled" of each whether it ended or
not, and writes no file by itself: a rank asks for it, at the latest where it catches its timeout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from utils.ranks.position import Frame, position_in


@dataclass(frozen=True)
class Call:
    """One collective.

    Attributes:
        number: In its group, from 1; the same on all ranks that called the same ones.
        kind: Such as "all_reduce".
        sizes: Of the tensors that went in.
        dtype: Of the first one; "" without any.
        file, line, function: Of the innermost line that is no library's; "", 0, "" if unknown.
        group: The name of the group.
    """

    number: int
    kind: str
    sizes: tuple[tuple[int, ...], ...]
    dtype: str
    file: str
    line: int
    function: str
    group: str

    def __str__(self) -> str:
        sizes = ", ".join(str(list(size)) for size in self.sizes)
        return f"{self.kind} {self.number} of {sizes} at line {self.line} of {self.function}"


def recorded_calls() -> list[Call]:
    """The collectives that this process called lately, oldest first, point-to-point left out."""
    from utils.shims.torch_distributed import recorded_collectives

    return [_call(entry) for entry in recorded_collectives(with_stacks=True) if not entry["is_p2p"]]


def _call(entry: dict[str, Any]) -> Call:
    frames = [Frame(f["filename"], f["line"], f["name"]) for f in entry.get("frames") or []]
    at = position_in(frames).frame or Frame("", 0, "")
    return Call(
        entry["collective_seq_id"],
        entry["profiling_name"].rpartition(":")[2],
        tuple(tuple(size) for size in entry["input_sizes"]),
        next(iter(entry["input_dtypes"]), "").lower(),
        Path(at.file).name,
        at.line,
        at.function,
        str(entry["process_group"][0]),
    )


def write_calls(path: Path, calls: Sequence[Call]) -> None:
    """Write calls as JSON."""
    path.write_text(json.dumps([asdict(call) for call in calls], indent=0), encoding="utf-8")


def call_from(row: dict[str, Any]) -> Call:
    """A call from its JSON.

    Raises:
        KeyError, TypeError: it is none.
    """
    return Call(**{**row, "sizes": tuple(tuple(size) for size in row["sizes"])})
