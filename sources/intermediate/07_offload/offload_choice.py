"""Which parts of a step's memory to put on the host: bytes on both sides, and the seconds it takes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from utils.planner.offload import step_seconds


@dataclass(frozen=True)
class OffloadItem:
    """Something that lies on the card or on the host, and what its leaving costs in a step.

    Attributes:
        name: What it is.
        device_bytes: It frees on the card.
        host_bytes: It takes on the host.
        down_bytes, up_bytes: It sends over the link.
        host_seconds: The CPU works for it while the device waits.
    """

    name: str
    device_bytes: float
    host_bytes: float
    down_bytes: float
    up_bytes: float
    host_seconds: float = 0.0


def on_card(items: Sequence[OffloadItem], chosen: Collection[int]) -> float:
    """Bytes that stay on the card when the chosen items (by number) leave."""
    return sum(item.device_bytes for number, item in enumerate(items) if number not in chosen)


def on_host(items: Sequence[OffloadItem], chosen: Collection[int]) -> float:
    """Bytes that the chosen items take on the host."""
    return sum(items[number].host_bytes for number in chosen)


def offloaded_seconds(
    items: Sequence[OffloadItem],
    chosen: Collection[int],
    compute_seconds: float,
    link_bytes_per_second: float,
) -> float:
    """Seconds of a step: compute and both directions of the link at once, then the CPU's work."""
    down = sum(items[number].down_bytes for number in chosen) / link_bytes_per_second
    up = sum(items[number].up_bytes for number in chosen) / link_bytes_per_second
    waiting = sum(items[number].host_seconds for number in chosen)
    return step_seconds(compute_seconds, down, up, waiting)


def best_offload(
    items: Sequence[OffloadItem],
    card_bytes: float,
    host_bytes: float,
    compute_seconds: float,
    link_bytes_per_second: float,
) -> frozenset[int]:
    """The set that fits both memories in the fewest seconds, by trying all (up to 16 items).

    Raises:
        ValueError: more items, or no set fits; what is missing.
    """
    if len(items) > 16:
        raise ValueError(f"{len(items)} items have too many sets to try; join some, to 16 at most.")
    every = range(len(items))
    sets = [frozenset(s) for n in range(len(items) + 1) for s in itertools.combinations(every, n)]
    fit = [s for s in sets if on_card(items, s) <= card_bytes and on_host(items, s) <= host_bytes]
    if not fit:
        raise ValueError(
            f"No choice fits {card_bytes / 1e9:.1f} GB of card and {host_bytes / 1e9:.1f} GB of host: "
            "more host memory, a disk, or a smaller model."
        )
    return min(
        fit, key=lambda s: offloaded_seconds(items, s, compute_seconds, link_bytes_per_second)
    )
