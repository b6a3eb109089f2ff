"""What the rows of a record contradict: the meter against the CUDA allocator's own figures.

The first run on a GPU is the first proof of the meter there, so what disagrees is printed.
"""

from __future__ import annotations

from collections.abc import Iterator

from evidence.record.store import Record, Row

# Of the bytes that tensors ask for: both count the same blocks, the allocator a few of its own.
REQUESTED_TOLERANCE = 0.005
# The allocator rounds each block up to 512 bytes: it is above the meter, and not by much.
ALLOCATED_TOLERANCE = 0.02


def disagreements(record: Record) -> list[str]:
    """A sentence for each row whose figures contradict each other; none for a record of a CPU."""
    if not record.on_gpu:
        return []
    found = (
        f"{record.experiment}, {_settings(row)}: {problem}"
        for row in record.rows
        if row.get("completed")
        for problem in _problems(row)
    )
    return list(found)


def _problems(row: Row) -> Iterator[str]:
    limits = {"requested": REQUESTED_TOLERANCE, "allocated": ALLOCATED_TOLERANCE}
    for name, tolerance in limits.items():
        ratio = row.get(f"meter_to_{name}")
        if ratio is not None and abs(ratio - 1) > tolerance:
            yield (
                f"the meter counts {ratio:.4f} of what the CUDA allocator has {name}; "
                f"within {tolerance:.1%} was expected"
            )
    parts = sum(row.get("breakdown", {}).values())
    if "peak_bytes" in row and parts != row["peak_bytes"]:
        yield f"the breakdown adds up to {parts:,} bytes, the peak is {row['peak_bytes']:,}"


def _settings(row: Row) -> str:
    """What the row was run with: all that stands before its results."""
    names = list(row)[: list(row).index("completed")]
    return ", ".join(f"{name} {row[name]}" for name in names)
