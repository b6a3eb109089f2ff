"""What is said when ranks fail: which one is to blame, and where the others stood."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from utils.ranks.outcome import Failure
from utils.ranks.position import Position
from utils.ranks.tensor_sizes import Given, different_sizes, last_given

# What a rank raises because another one has gone.
_LEFT_ALONE = re.compile(
    r"Connection (closed|reset) by|Broken pipe|Socket closed|wait timeout|Timed out waiting"
    r"|Connection was likely closed|failed to (recv|send)|remote process|DistStoreError"
    r"|DistNetworkError|NCCL|unhandled system error",
    re.IGNORECASE,
)

# Between two ranks, not among all: one that sends while its partner receives is as it should be.
_MESSAGES = (
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
)

# What gloo writes when it aborts a rank whose partner sent more than it had room for.
_OTHER_SIZE = "data size doesn't match expected size"
_NO_GPU = re.compile(
    r"Found no NVIDIA driver|not compiled with CUDA|No CUDA GPUs are available|"
    r"invalid device ordinal|Cannot re-initialize CUDA in forked subprocess"
)


class RankError(RuntimeError):
    """Ranks that gave no result: `rank` is the one to blame, `failures` holds all, by rank."""

    def __init__(
        self,
        worker: str,
        failures: Mapping[int, Failure],
        positions: Mapping[int, Position],
        prints: Iterable[str] = (),
        given: Mapping[int, Sequence[Given]] | None = None,
    ) -> None:
        self.failures = dict(failures)
        self.rank = min(failures, key=lambda rank: _order(rank, failures[rank], positions))
        failure = failures[self.rank]
        headline = f"{worker}: rank {self.rank} {failure.what}"
        others = _others(self.rank, positions)
        hints = [_sizes(prints, given or {}), _mismatch(positions), _no_gpu(failure)]
        parts = [headline, *hints, others, failure.traceback]
        super().__init__("\n\n".join(filter(None, parts)))

    def __reduce__(self) -> tuple[Any, ...]:
        """The process that launched the ranks may hand it on to another one."""
        return _again, (str(self), vars(self))


def _again(message: str, state: dict[str, Any]) -> RankError:
    error = RankError.__new__(RankError, message)
    error.args = (message,)
    vars(error).update(state)
    return error


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
    inside = {
        rank: position
        for rank, position in positions.items()
        if position.collective and position.collective not in _MESSAGES
    }
    if len({position.collective for position in inside.values()}) < 2:
        return ""
    each = ", ".join(f"rank {rank} in {at.collective}" for rank, at in sorted(inside.items()))
    return (
        f"The ranks stood in different collectives: {each}. All ranks of a group must call the "
        "same collectives in the same order: look for one inside an `if` on the rank."
    )


def _sizes(prints: Iterable[str], given: Mapping[int, Sequence[Given]]) -> str:
    found = different_sizes(given)
    if not found and any(_OTHER_SIZE in text for text in prints):
        found = last_given(given)  # of those that live: who aborted cannot be asked
    elif not found:
        return ""
    return (
        f"The ranks gave tensors of different sizes to one collective{found}. All ranks of a "
        "group must give the same shape and dtype: look for a size that depends on the rank."
    )


def _no_gpu(failure: Failure) -> str:
    if failure.kind != "raised" or not _NO_GPU.search(failure.what):
        return ""
    return (
        "Ranks compute on the CPU where there is not one GPU for each of them: write "
        ".to(rank_device()) instead of .cuda(), with rank_device from utils."
    )


def _others(blamed: int, positions: Mapping[int, Position]) -> str:
    others = {rank: at for rank, at in sorted(positions.items()) if rank != blamed}
    if not others:
        return ""
    rows = ", ".join(f"rank {rank} {position}" for rank, position in others.items())
    return f"The other ranks were stopped: {rows}."
