"""Many processes on one machine: functions that can be killed, and ranks made of them."""

from __future__ import annotations

import importlib
from typing import Any

from utils.checked import check_public
from utils.ranks.child import pack
from utils.ranks.killable import KillableProcess, run_killable, run_to_outcome
from utils.ranks.launch import prepare_ranks, run_ranks
from utils.ranks.member import rank_device
from utils.ranks.outcome import ChildError, Failure, Outcome
from utils.ranks.position import Position
from utils.ranks.report import RankError
from utils.ranks.torchrun import run_torchrun

__all__ = [
    "ChildError",
    "Failure",
    "KillableProcess",
    "Outcome",
    "Position",
    "RankError",
    "Sent",
    "pack",
    "prepare_ranks",
    "rank_device",
    "run_killable",
    "run_ranks",
    "run_to_outcome",
    "run_torchrun",
    "traffic",
]

check_public(globals())


def __getattr__(name: str) -> Any:
    # Counting collectives needs torch, which checks of labs without it do not load.
    if name in ("Sent", "traffic"):
        return getattr(importlib.import_module("utils.traffic.counter"), name)
    raise AttributeError(f"module 'utils.ranks' has no name {name!r}")
