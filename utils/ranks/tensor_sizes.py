"""Tensors of different sizes in one collective: what each rank gave, and the sentence about it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Collectives to which all ranks give the same sizes; as gloo records them.
_SAME_SIZES = frozenset(
    {
        "all_reduce",
        "all_gather",
        "_all_gather_base",
        "broadcast",
        "reduce",
        "reduce_scatter",
        "_reduce_scatter_base",
    }
)


class Given(NamedTuple):
    """What a rank gave to one collective: its group and number there, its kind, the tensors."""

    group: str
    number: int
    kind: str
    tensors: str


def given_here() -> tuple[Given, ...]:
    """What this process gave to collectives lately, as PyTorch's flight recorder has it."""
    if "torch.distributed" not in sys.modules:
        return ()
    from utils.shims.torch_distributed import recorded_collectives

    return tuple(
        Given(
            str(entry["process_group"]),
            entry["collective_seq_id"],
            entry["profiling_name"].rpartition(":")[2],
            ", ".join(map(_tensor, entry["input_sizes"], entry["input_dtypes"])),
        )
        for entry in recorded_collectives()
        if not entry["is_p2p"]
    )


def _tensor(sizes: Sequence[int], dtype: str) -> str:
    return f"{list(sizes)} {dtype.lower()}"


def different_sizes(given: Mapping[int, Sequence[Given]]) -> str:
    """The first collective to which ranks gave different sizes, and who gave what; "" if none."""
    calls: dict[tuple[str, int, str], dict[int, Given]] = {}
    for rank, rows in sorted(given.items()):
        for row in rows:
            if row.kind in _SAME_SIZES:
                calls.setdefault((row.group, row.number, row.kind), {})[rank] = row
    for (_, _, kind), rows in sorted(calls.items(), key=lambda call: call[0][1]):
        if len({row.tensors for row in rows.values()}) > 1:
            return f", {kind}: {_each(rows)}"
    return ""


def last_given(given: Mapping[int, Sequence[Given]]) -> str:
    """What ranks gave to the last collective that they called; "" if nothing is known."""
    last = {rank: rows[-1] for rank, rows in sorted(given.items()) if rows}
    kinds = {row.kind for row in last.values()}
    return f", {kinds.pop()}: {_each(last)}" if len(kinds) == 1 else ""


def _each(rows: Mapping[int, Given]) -> str:
    return ", ".join(f"rank {rank} gave {row.tensors}" for rank, row in rows.items())
