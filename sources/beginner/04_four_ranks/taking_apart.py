"""A step of DDP taken apart: what each rank notes in a step, gathered, and the parts that explain it.

With `take_apart` of the lesson this file is all that a script needs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Parts", "moment", "parts_of", "parts_of_times", "table_of_parts"]

WARM_UP = 3  # steps: in the second one DDP orders its buckets anew
Moment: TypeAlias = "float | torch.cuda.Event"


class Parts(NamedTuple):
    """Seconds of every step of the rank that is ready first; in each step they add up to the step.

    `computing` is what shrinks with the share, `fixed` what does not. All others wait for
    `slowest_rank`, which is later than the first one most by its `late_by`.
    """

    loading: Tensor
    computing: Tensor
    fixed: Tensor
    waiting: Tensor
    ddps_part: Tensor
    slowest_rank: int
    late_by: str


NAMES = {"loading": "loading", "computing": "computing", "fixed": "fixed part"}
NAMES |= {"waiting": "waiting", "ddps_part": "DDP's part"}


def moment(device: torch.device) -> Moment:
    """Now, in the order of the work on a device: a GPU is still at what Python asked for earlier."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def parts_of(rows: Sequence[Sequence[Moment]]) -> Parts:
    """The parts of a step; every rank calls it with as many rows.

    Args:
        rows: of each step the moments when it began, had its batch, had filled its last bucket, and
            was over. The first half are whole steps; the second half take half of a share, send
            nothing, and say of the last bucket when computing was over.
    """
    mine = [[_seconds(row[0], each) for each in row] for row in rows]
    found: list[list[list[float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return parts_of_times(torch.tensor(found, dtype=torch.float64).transpose(0, 1))


def parts_of_times(times: Tensor) -> Parts:
    """The parts from seconds since a step's begin: (steps, ranks, 4), as `parts_of` takes them."""
    whole, half = (steps[WARM_UP:] for steps in times.chunk(2))
    _, loaded, full, end = whole.unbind(-1)
    computing, last_full = full - loaded, full.amax(1)
    first, last = int(full.median(0).values.argmin()), int(full.median(0).values.argmax())
    # Twice a half's computing holds what does not shrink with the share twice.
    twice_a_half = 2 * (half[..., 2] - half[..., 1]).median(0).values[first]
    fixed = twice_a_half - computing[:, first]
    late = {"loading": loaded, "computing": computing}
    return Parts(
        loading=loaded[:, first],
        computing=computing[:, first] - fixed,
        fixed=fixed,
        waiting=last_full - full[:, first],
        ddps_part=end.amax(1) - last_full,
        slowest_rank=last,
        late_by=max(
            late, key=lambda part: float((late[part][:, last] - late[part][:, first]).median())
        ),
    )


def table_of_parts(found: Mapping[str, Parts], share: float) -> pd.DataFrame:
    """A row a run, in ms: the median of its steps, and its middle half.

    The last column names the part that grew most beyond the first row's, and of waiting for what.

    Args:
        found: the parts by run; the first one is one process.
        share: of the items of one process's step that a rank takes; its row is printed times that.
    """
    first, rows = next(iter(found.values())), {}
    for run, parts in found.items():
        times = {said: getattr(parts, field) for field, said in NAMES.items()}
        measure = {said: share * getattr(first, field) for field, said in NAMES.items()}
        if parts is first:
            times = measure
        grown = {said: float(times[said].median() - measure[said].median()) for said in times}
        most = max(grown, key=lambda said: grown[said])
        grown_ms = 1e3 * grown[most]
        if most == NAMES["waiting"]:
            most += f" for rank {parts.slowest_rank}'s {parts.late_by}"
        row = {"step": _told(torch.stack(list(times.values())).sum(0))}
        row |= {said: _told(each) for said, each in times.items()}
        rows[run] = row | {"grew most": "" if parts is first else f"{most}, by {grown_ms:.0f}"}
    return pd.DataFrame(rows).T


def _told(seconds: Tensor) -> str:
    low, middle, high = (1e3 * seconds.quantile(q).item() for q in (0.25, 0.5, 0.75))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, torch.cuda.Event) or isinstance(end, torch.cuda.Event):
        assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    return end - begin
