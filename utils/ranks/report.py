"""What is said when ranks fail: which one is to blame, and where the others stood."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from utils.ranks.outcome import Failure
from utils.ranks.position import Position

# What a rank raises because another one has gone.
_LEFT_ALONE = re.compile(
    r"Connection (closed|reset) by|Broken pipe|Socket closed|wait timeout|Timed out waiting"
    r"|Connection was likely closed|failed to (recv|send)|remote process|DistStoreError"
    r"|DistNetworkError|NCCL|unhandled system error",
    re.IGNORECASE,
)


# What gloo writes when it aborts a rank whose partner sent more than it had room for.
_OTHER_SIZE = "data size doesn't match expected size"


class RankError(RuntimeError):
    """Ranks that gave no result: `rank` is the one to blame, `failures` holds all, by rank."""

    def __init__(
        self,
        worker: str,
        failures: Mapping[int, Failure],
        positions: Mapping[int, Position],
        prints: Iterable[str] = (),
    ) -> None:
        self.failures = dict(failures)
        self.rank = min(failures, key=lambda rank: _order(rank, failures[rank], positions))
        failure = failures[self.rank]
        headline = f"{worker}: rank {self.rank} {failure.what}"
        others = _others(self.rank, positions)
        parts = [headline, _sizes(prints), _mismatch(positions), others, failure.traceback]
        super().__init__("\n\n".join(filter(None, parts)))


def _order(
    rank: int, failure: Failure, positions: Mapping[int, Position]
) -> tuple[bool, int, int, int]:
    """Causes before consequences: who died or raised by itself, then who kept the others waiting."""
    left_alone = failure.kind == "raised" and bool(_LEFT_ALONE.search(failure.what))
    position = positions.get(rank, Position())
    waited = (2 if position.is_finished else 1 if position.collective else 0) * (
        failure.kind == "timeout"
    )
    return left_alone, waited, ("died", "raised", "timeout").index(failure.kind), rank


def _mismatch(positions: Mapping[int, Position]) -> str:
    inside = {rank: position for rank, position in positions.items() if position.collective}
    if len({position.collective for position in inside.values()}) < 2:
        return ""
    each = ", ".join(f"rank {rank} in {at.collective}" for rank, at in sorted(inside.items()))
    return (
        f"The ranks stood in different collectives: {each}. All ranks of a group must call the "
        "same collectives in the same order: look for one inside an `if` on the rank."
    )


def _sizes(prints: Iterable[str]) -> str:
    if not any(_OTHER_SIZE in text for text in prints):
        return ""
    return (
        "The ranks gave tensors of different sizes to one collective. All ranks of a group must "
        "give the same shape and dtype: look for a size that depends on the rank."
    )


def _others(blamed: int, positions: Mapping[int, Position]) -> str:
    others = {rank: at for rank, at in sorted(positions.items()) if rank != blamed}
    if not others:
        return ""
    rows = ", ".join(f"rank {rank} {position}" for rank, position in others.items())
    return f"The other ranks were stopped: {rows}."
