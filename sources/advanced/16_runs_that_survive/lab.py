# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 16: Runs that survive
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 4 of 5 | 80 | lesson 16; any laptop (Windows: WSL2) |
#
# Four exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check` that says *not
# attempted*, *not yet* with a nudge, or *correct*. Hints are folded away. The exercises follow the
# [lesson](../../notebooks/advanced/16_runs_that_survive.ipynb). Work in a copy (`make my-labs`). Exercise 1 is the main
# one: your save is ended at every single line and change.

# %% tags=["setup"]
here = setup("labs/advanced/16")

# %%
import inspect
import json
import os
import shutil
import zlib
from pathlib import Path

import pandas as pd
import torch

from utils import check
from utils.lessons.lesson_16.dead_runs import dead_run
from utils.lessons.lesson_16.choice import JOBS
from utils.lessons.lesson_16.run import LabRun
from utils.planner.goodput import DAY, best_interval_seconds, waiting_seconds, working_share

# %% [markdown]
# ## Exercise 1: the safe save
#
# Without ranks, so that nothing hides. A checkpoint is a dict of file names and bytes.
#
# **Spec.** `save(files, folder, step, keep)` writes one below `folder` (which exists). At most `keep` checkpoints stay
# there, this one included. `load(folder)` gives `(step, files)` of what was **saved last** and is whole, or None. You choose
# names and further files. The check
#
# - goes back: it saves step 60 after step 100, and one step four times; also where the one before is damaged;
# - flips a bit in each file of the newest, cuts it in half, removes it: `load` must give the one before;
# - fills the disk: `save` must raise the `OSError`, and the old one must load;
# - ends your `save` before **every line that it runs and every change that it makes** to a file or folder, as `kill -9`
#   would: after each such end `load` must give the old checkpoint or the new one, whole, and the next `save` must work;
#   also with `keep=1`;
# - cuts the power at the same moments: then bytes that no `os.fsync` brought to the disk are gone, and so is a rename whose
#   folder was not synced.

# %%
def save(files: dict[str, bytes], folder: Path, step: int, keep: int) -> None:
    # BEGIN SOLUTION
    def folder_to_disk(path):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

    new = folder / "writing"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    sums = {name: zlib.crc32(data) for name, data in files.items()}
    listed = json.dumps(sums)
    lines = {"sums": f"{zlib.crc32(listed.encode())} {listed}".encode()}
    for name, data in (files | lines).items():
        with open(new / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    folder_to_disk(new)
    older = sorted(folder.glob("????????.*"))  # number of the save, and step
    number = 1 + max((int(path.stem) for path in older), default=0)
    final = new.rename(folder / f"{number:08d}.{step}")
    folder_to_disk(folder)  # the new name, before an old one goes
    for old in [*older, final][:-keep]:
        shutil.rmtree(old)
    # END SOLUTION


# %%
def load(folder: Path) -> tuple[int, dict[str, bytes]] | None:
    # BEGIN SOLUTION
    for path in sorted(folder.glob("????????.*"), reverse=True):
        try:
            checksum, listed = (path / "sums").read_text().split(" ", 1)
            files = {name: (path / name).read_bytes() for name in json.loads(listed)}
            right = zlib.crc32(listed.encode()) == int(checksum)
        except (OSError, ValueError):
            continue
        if right and all(zlib.crc32(files[name]) == crc for name, crc in json.loads(listed).items()):
            return int(path.suffix[1:]), files
    return None
    # END SOLUTION


# %%
check("16.safe_save", {"save": save, "load": load})

# %% [markdown]
# <details><summary>Hint 1</summary>The lesson's order: new folder, write, checksums, <code>fsync</code>, rename,
# <code>fsync</code> of the folder, and only then remove what is old.</details>
# <details><summary>Hint 2</summary>A list of checksums can be damaged, too. How would <code>load</code> notice?</details>
# <details><summary>Hint 3</summary>A step that is saved again, or a lower one: what tells you which was saved last? Neither
# the step nor a clock. Put a number that counts the saves into the name.</details>

# %% [markdown]
# ## Exercise 2: mode, interval and spares within a budget
#
# A job is a dict. `write_seconds` is how long a save takes until it is whole; an asynchronous one blocks the training for
# `copy_seconds`, and is whole after `write_seconds`. Here are two of the seven jobs, with the keys of the dict at the left.

# %%
display(pd.DataFrame({says: job._asdict() for says, job in JOBS[:2]}).style.format(precision=1, thousands=","))

# %% [markdown]
# **Spec.** `days_and_dollars(job, mode, interval_seconds, spares)` returns what a choice takes on average, by Daly's
# formula:
#
# - failures come at `failures_per_1000_node_days`; one stops the job; each waits `waiting_seconds(...)` for a node on
#   average, then restarts;
# - mode `"sync"`: a save stops the training for `write_seconds`; `"async"`: for `copy_seconds`, and each failure loses
#   `write_seconds` more, since the save under way was not whole;
# - nodes *and* spares are paid for until the job ends.
#
# `working_share`, `waiting_seconds` and `best_interval_seconds` are there: read what they take with `?`.

# %%
def days_and_dollars(job: dict, mode: str, interval_seconds: float, spares: int) -> tuple[float, float]:
    # BEGIN SOLUTION
    mean = 1000 * DAY / (job["failures_per_1000_node_days"] * job["nodes"])
    away = job["restart_seconds"] + waiting_seconds(spares, job["repair_seconds"], mean)
    blocked = job["write_seconds"]
    if mode == "async":
        blocked, away = job["copy_seconds"], away + job["write_seconds"]
    days = job["work_days"] / working_share(interval_seconds, blocked, away, mean)
    return days, days * 24 * (job["nodes"] + spares) * job["usd_per_node_hour"]
    # END SOLUTION


# %%
check("16.days_and_dollars", days_and_dollars)

# %% [markdown]
# **Spec.** `choose(job)` returns `{"mode": ..., "interval_seconds": ..., "spares": ...}` with the **fewest days** whose
# dollars stay within `job["budget_usd"]`, or None where no choice does. There are up to 8 spares. An asynchronous save
# must be whole before the next one begins. **Your score is your days over the optimum's**, in the worst of seven jobs.

# %%
def choose(job: dict) -> dict | None:
    # BEGIN SOLUTION
    mean = 1000 * DAY / (job["failures_per_1000_node_days"] * job["nodes"])
    intervals = {"sync": best_interval_seconds(job["write_seconds"], mean),
                 "async": max(best_interval_seconds(job["copy_seconds"], mean), job["write_seconds"])}
    best = None
    for mode, interval in intervals.items():
        for spares in range(9):
            days, dollars = days_and_dollars(job, mode, interval, spares)
            if dollars <= job["budget_usd"] and (best is None or days < best[0]):
                best = days, {"mode": mode, "interval_seconds": interval, "spares": spares}
    return best and best[1]
    # END SOLUTION


# %%
check("16.choose", choose)

# %% [markdown]
# <details><summary>Hint 1</summary>The best interval knows the blocked seconds and the mean time between failures, and
# nothing of spares. So it can be found first, for each mode.</details>
# <details><summary>Hint 2</summary>More spares may cost <i>less</i>: the job ends sooner. Do not stop at the first number that is
# too dear.</details>

# %% [markdown]
# ## Exercise 3: resume exactly, with a piece missing
#
# This is the run: 100 rows (`ROWS`), batches of 16 (`BATCH`), 24 hidden units (`WIDTH`).

# %%
print(inspect.getsource(LabRun))

# %% [markdown]
# A checkpoint holds what `pieces()` gives. Someone's script forgot one of `"schedule"`, `"order"` and `"random"`.
#
# **Spec.** `rebuild(saved, step)` gets the pieces that are there and the number of steps the run took, and returns a dict
# with all five, so that a fresh run that loads them goes on **bit for bit**. No training step may be taken: a real run
# has taken 100,000.

# %%
def rebuild(saved: dict, step: int) -> dict:
    # BEGIN SOLUTION
    run = LabRun()
    for _ in range(step):
        chosen = run.next_rows()
        torch.rand(len(chosen), 24, generator=run.dropout)
    found = run.pieces()
    found["schedule"] |= {"last_epoch": step, "_step_count": step + 1}
    return found | saved
    # END SOLUTION


# %%
check("16.rebuild", rebuild)

# %% [markdown]
# <details><summary>Hint 1</summary>What was drawn is a function of the seed and of how often. Draw as often, and drop
# it.</details>
# <details><summary>Hint 2</summary>The last batch of an epoch has four rows. How many numbers did dropout draw for it?</details>
# <details><summary>Hint 3</summary>A fresh schedule's <code>state_dict()</code> shows its few counters. Which of them depend on the
# step?</details>

# %% [markdown]
# ## Exercise 4: three dead runs
#
# Three real jobs of four ranks on two hosts (ranks 0 and 1 on host 0, ranks 2 and 3 on host 1) ended. Here is what they
# left: the lines of each rank (seconds since the launch, memory), what torchrun said on each host, and the last calls in
# each rank's flight recorder. The timeout was 5 seconds.

# %%
def show_run(name, lines=3, calls=2):
    run = dead_run(name)
    print(f"run {name} ({run.origin})")
    for rank, log in run.logs.items():
        own = [line for line in log if not line.startswith("[rank")]  # without tracebacks
        print(f"  rank {rank}:", *(f"    {line[:150]}" for line in own[-lines:]), sep="\n")
        trace = run.traces.get(rank)
        print("    trace:", *(f"      {call}" for call in trace[-calls:]), sep="\n") if trace else print("    no trace")
    for host, said in run.agents.items():
        print(f"  torchrun on host {host}:", *(f"    {line[:150]}" for line in said[-3:]), sep="\n")


show_run("A")

# %%
show_run("B")

# %%
show_run("C")

# %% [markdown]
# `dead_run(name)` has all lines (`.logs`, `.agents`, `.traces`). For each run give the cause (`"skipped collective"`, `"host
# killed"`, `"out of memory"`, `"network cut"` or `"straggler"`), the culprit (a rank; a host where a host was killed), and
# the step at which it went wrong **first**, or None where no single step is to blame, as in a kill from outside.

# %%
# BEGIN SOLUTION
diagnosis = {
    "A": {"cause": "skipped collective", "culprit": 2, "step": 7},
    "B": {"cause": "host killed", "culprit": 1, "step": None},
    "C": {"cause": "out of memory", "culprit": 1, "step": None},
}
# END SOLUTION
# STUB: diagnosis = ...

check("16.dead_runs", diagnosis)

# %% [markdown]
# <details><summary>Hint 1</summary>Those who report a timeout waited for somebody. Count the calls in each trace: who made
# fewer?</details>
# <details><summary>Hint 2</summary>Who wrote nothing at all at the end: one rank, or a whole host with its torchrun?</details>
# <details><summary>Hint 3</summary>Look at the MB of each rank over the steps, and at all lines of the rank that is
# behind.</details>
#
# Here is the [solution](../../solutions/advanced/16_runs_that_survive.ipynb) of this lab, with its outputs.
