"""One rank's membership of the process group: joined before its function, left after it."""

from __future__ import annotations

import contextlib
import datetime
import os
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from utils.parallel.loopback import LOCALHOST, loopback_variables
from utils.ranks.gpus import has_a_gpu_each, hide_gpus_unless_enough

if TYPE_CHECKING:
    import torch

PATIENCE_SECONDS = 60.0  # beyond the timeout, so that whoever launched the ranks gives up first


class MeetingPoint(NamedTuple):
    """Where ranks of one machine find each other.

    Attributes:
        file: Their store, in a folder that no other user may enter: whoever writes into a store can
            end a job, or lead its ranks astray, and PyTorch's TCP store lets in all users of a machine.
        port: One that nobody has, for MASTER_PORT.
    """

    file: str
    port: int


@dataclass(frozen=True)
class Member(contextlib.AbstractContextManager[None]):
    """Rank `rank` of `world_size` on this machine, which meet at `place`.

    Torch's usual variables are set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so
    code written for torchrun finds what it looks for. The group is destroyed in any case: a gloo
    process that exits without that may abort. Where there is not a GPU for each rank, none sees one,
    unless `shares_gpus`.
    """

    rank: int
    world_size: int
    place: MeetingPoint
    timeout_seconds: float
    shares_gpus: bool = field(default=False, kw_only=True)

    def __enter__(self) -> None:
        import torch.distributed as dist
        from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

        self._set_environment()
        if not self.shares_gpus:
            hide_gpus_unless_enough(self.world_size, os.environ)
        limit = datetime.timedelta(seconds=self.timeout_seconds + PATIENCE_SECONDS)
        store = FileStore(self.place.file, self.world_size)
        store.set_timeout(limit)
        self.move_in()
        dist.init_process_group(
            _backend(self.rank, self.world_size),
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=limit,
        )
        self.wait_for_the_others("joined")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        raised: TracebackType | None,
    ) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            if kind is None:
                self.wait_for_the_others("finished")
            dist.destroy_process_group()

    def move_in(self) -> None:
        """What a rank does between meeting the store and joining the group: here nothing."""

    def wait_for_the_others(self, what: str) -> None:
        """Begin and leave together: who leaves early breaks off what the others still connect or receive."""
        from utils.shims.torch_distributed import default_store

        store = default_store()
        if store.add(what, 1) == self.world_size:
            store.set(f"all {what}", "yes")
        store.wait([f"all {what}"])

    def _set_environment(self) -> None:
        values = {
            "RANK": self.rank,
            "LOCAL_RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": LOCALHOST,
            "MASTER_PORT": self.place.port,
        }
        os.environ |= {name: str(value) for name, value in values.items()} | loopback_variables()


def rank_device() -> torch.device:
    """Where this rank computes: its own GPU where `run_ranks` chose NCCL, else the CPU."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_backend() == "fake":  # a simulated rank
        return torch.device("cpu")
    if not has_a_gpu_each(dist.get_world_size()):
        return torch.device("cpu")
    return torch.device("cuda", dist.get_rank())


def _backend(rank: int, world_size: int) -> str:
    import torch

    if not has_a_gpu_each(world_size):
        return "gloo"
    torch.cuda.set_device(rank)
    return "cpu:gloo,cuda:nccl"
