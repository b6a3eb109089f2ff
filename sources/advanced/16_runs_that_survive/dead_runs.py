"""Three training jobs that died, for diagnosis: what they wrote, and their flight recorders' traces.

Each was a real job of four ranks on two hosts (ranks 0 and 1 on host 0, ranks 2 and 3 on host 1) under
`torchrun --max-restarts=0`, with a timeout of 5 s and one planted cause; `utils.lessons.lesson_16.records.dead_runs` made
them. All ran the same script, `SCRIPT`, whose line numbers stand in the traces. A `DeadRun` holds, by
rank, the lines that the rank printed (its seconds since the launch first) and the collectives that its
flight recorder held when it caught an error or came to its end; a rank that was killed left no trace.
By host it holds what torchrun said; a host that was killed says nothing more. In run "A" rank 2 skipped
a collective: at step 7 its loss was not finite, it left out the batch and with it the all-reduce, was one
call behind from then on, came to its end first, and the others waited in the last all-reduce. In run "B"
host 1 was killed with its agent and both ranks. In run "C" rank 1 got longer and longer rows, its cache
grew, and it was killed when it held more than its share of memory; the others saw a closed connection.
`PLANTED` has these causes as (cause, rank or host, step) for a checker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from utils.ranks.calls import Call, call_from

FILE = Path(__file__).with_name("dead_runs.json")


class Planted(NamedTuple):
    """What was wrong: the cause, the rank (for "host killed" the host), and the step if it has one."""

    cause: str
    culprit: int
    step: int | None


CAUSES = ("skipped collective", "host killed", "out of memory", "network cut", "straggler")
PLANTED: Mapping[str, Planted] = {
    "A": Planted("skipped collective", 2, 7),
    "B": Planted("host killed", 1, None),
    "C": Planted("out of memory", 1, None),
}

SCRIPT = """\
import argparse
import datetime
import json
import os
import resource
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from utils.ranks.calls import recorded_calls, write_calls

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--bad-row", default="")  # RANK:STEP with a row that is not finite
parser.add_argument("--long-rows", type=int, default=-1)  # a rank whose rows grow
options = parser.parse_args()
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it; first the trace is written
STEPS, WIDTH, ROWS = 12, 256, 64
cache = {}


def note(what, **more):
    row = {"at": time.time(), "what": what, "rank": rank, "host": int(os.environ["COURSE_HOST"])}
    with open(os.environ["COURSE_JOURNAL"], "a") as journal:
        journal.write(json.dumps({**row, **more}) + "\\n")


def log(text):
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    print(f"{time.time() - start:6.2f} s  {held / 1e6:5.0f} MB  {text}", flush=True)


def batch(step):
    rows = ROWS
    if rank == options.long_rows:
        rows *= 32 * (step + 1)
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    if options.bad_row == f"{rank}:{step}":
        x[3, 5] = float("inf")
    return x


def features(step, x):
    cache[step] = torch.cat([x.sin(), x.cos(), x], dim=1)
    return cache[step]


def average_over_ranks(gradient):
    dist.all_reduce(gradient)
    return gradient / world


def train():
    weight = torch.zeros(3 * WIDTH, 1)
    for step in range(STEPS):
        x = batch(step)
        z = features(step, x)
        error = z @ weight - x.sum(1, keepdim=True)
        loss = error.square().mean()
        if not torch.isfinite(loss):
            log(f"step {step:2d}: loss is not finite, batch left out")
            continue
        gradient = average_over_ranks(z.T @ error / len(x))
        weight -= 0.004 * gradient
        log(f"step {step:2d}: loss {loss.item():.3f}")
        note("step", step=step)
        time.sleep(0.2)
    log("training done, evaluating")
    time.sleep(9)


start = float(os.environ["COURSE_LAUNCHED"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
rank, world = dist.get_rank(), dist.get_world_size()
note("start", world=world, step=0, pid=os.getpid())
log(f"rank {rank} of {world} on host {os.environ['COURSE_HOST']}")
try:
    train()
    log("end")
except RuntimeError as error:
    log(f"{type(error).__name__}: {error}")
    raise
finally:
    write_calls(options.folder / f"trace_{rank}.json", recorded_calls())
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class DeadRun:
    """What is left of a job.

    Attributes:
        name: "A", "B" or "C".
        logs: Lines by rank; an empty list where a rank printed nothing.
        agents: Lines of torchrun, by host.
        traces: Collectives by rank, oldest first; a rank without one is missing.
        origin: When it was recorded, and with which torch.
    """

    name: str
    logs: Mapping[int, Sequence[str]]
    agents: Mapping[int, Sequence[str]]
    traces: Mapping[int, Sequence[Call]]
    origin: str


def dead_run(name: str) -> DeadRun:
    """One of the three runs.

    Raises:
        ValueError: there is no run of this name.
    """
    if name not in PLANTED:
        raise ValueError(f"There is no dead run {name!r}; there are {', '.join(PLANTED)}.")
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    run = data["runs"][name]
    return DeadRun(
        name,
        {int(rank): tuple(lines) for rank, lines in run["logs"].items()},
        {int(host): tuple(lines) for host, lines in run["agents"].items()},
        {int(rank): tuple(map(call_from, calls)) for rank, calls in run["traces"].items()},
        f"recorded {data['date']}, torch {data['torch']}",
    )
