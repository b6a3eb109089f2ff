# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16 Runs that survive
#
# {{badges}}
#
# **Promise.** You kill training with `kill -9` at random moments and lose no checkpoint. You resume a run on four ranks so
# that every later loss is the same *to the last bit*, and price interval and spares for 70B on 256 GPUs. Then you kill a
# rank, a host and a link, and the job restarts by itself.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 90, and 80 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |
#
# ## A bet
#
# You train a 70B model on 256 GPUs for 30 days. How many failures will stop the job? Write your guess.

# %%
my_bet_failures = 1

# %% tags=["setup"]
here = setup("advanced/16")

# %%
import datetime
import itertools
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import statistics
import tempfile
import threading
import time
import urllib.request
import warnings
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

# %%
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from utils import Batch, Cluster, Evidence, Plan, RankError, Span, Transformer, TransformerConfig, check, format_bytes, format_seconds
from utils import export, model_shape, run_ranks, scratch, scratch_folder, search, show
from utils.catalog import link, price
from utils.planner import plan_name
from utils.planner.failing_runs import RunPlan, failing_runs
from utils.planner.goodput import DAY, best_interval_seconds, checkpoint_bytes, working_share
from utils.parallel import load_newest, named, newest_whole, save_safely, step_of
from utils.lessons.lesson_16.calls import recorded_calls
from utils.lessons.lesson_16.elastic import Fault, link_problem, run_elastic
from utils.lessons.lesson_16.failure_logs import FAILURE_LOGS, poisson_interval
from utils.lessons.lesson_16.failures import draw_days, draw_forgotten, draw_goodput
from utils.lessons.lesson_16.progress import draw_progress, progress_of
from utils.lessons.lesson_16.records.per_step import torchft_problem
from utils.lessons.lesson_16.records.survive import run_in
from utils.lessons.lesson_16.watching import RULES_TEST, Exporter, StandInGpu, prometheus_problem, promtool, report
from utils.lessons.lesson_16.watching import watch
from evidence.record import recorded

# %% [markdown]
# ## What you will be able to do
#
# - Turn a failure log into a checkpoint interval, spares and dollars.
# - Save so that a kill at any moment leaves a whole checkpoint, and resume exactly.
# - Restart without a human, and find who hangs, who is slow, and whose numbers are wrong.
#
# New words stand in the [glossary](../00_glossary.ipynb).
#
# ## 1. What fails, and how often
#
# A synchronous job stops when one GPU does. Beside work, its time goes into *saving*, into work that is *lost*, into
# *restarting*, and into *waiting* for a node. Here one run meets the same failures under three save intervals; a save
# takes 5 minutes:

# %%
HOUR = 3600.0
measured_here = f"measured on this machine, {os.cpu_count()} CPU cores"  # beside seconds: yours will differ


def one_run(days, interval, save, restart, mean, seed=1):
    chance, spans, clock, done = random.Random(seed), [], 0.0, 0.0
    while True:
        fails_at = clock + chance.expovariate(1 / mean)
        while clock + interval + save <= fails_at and done < days * DAY:  # a whole save, or nothing
            spans += [Span("work", clock, clock + interval), Span("saving", clock + interval, clock + interval + save)]
            clock, done = clock + interval + save, done + interval
        if done >= days * DAY:
            return spans
        spans += [Span("lost", clock, fails_at), Span("restarting", fails_at, fails_at + restart)]
        clock = fails_at + restart


lanes = {f"every {hours:g} h": one_run(3, hours * HOUR, 300.0, HOUR / 2, 8 * HOUR) for hours in (0.25, 1.5, 6)}
show(draw_days(lanes, title="Three days of work, a failure every 8 hours on average"),
     alt="Three runs: frequent saves take a quarter of the time, rare saves lose whole hours, the middle one ends first.")

# %% [markdown]
# **Read it.** Too many saves take a quarter of the time; too few lose hours at each failure. The best lies between, and
# depends on the mean time between failures. Published logs give it. A count (Llama 3: 419 in 54 days) is a sample; the
# **exact Poisson interval** holds all rates that make it plausible.

# %%
gpus, days, rows = 256, 30, []
for log in FAILURE_LOGS:
    hours, count = log.hours_between(gpus), log.failures
    spread = [f"{hours * count / mean:.0f}" for mean in reversed(poisson_interval(count))] if count else ["no count published"]
    rows.append({"log": log.name, "failures per million GPU hours": 1e6 * log.per_gpu_hour,
                 "per 1,000 node-days": log.failures_per_1000_node_days, "hours between two": hours,
                 "its 95% interval": " to ".join(spread), f"failures in {days} days": 24 * days / hours})
display(pd.DataFrame(rows).style.format(precision=1).format("{:.0f}", subset=["hours between two"]).hide()
        .set_caption(f"Rates as published; hours and failures of {gpus} GPUs predicted from them"))
print("your bet:", my_bet_failures)

# %% [markdown]
# **Read it.** Llama 3's interval is narrow, yet the rates lie six times apart: what is counted matters most (RSC-1 is
# one cluster). Measure your own. Used below: the lowest and highest rate, 3.8 and 24 failures per 1,000 node-days (8 GPUs a node).
#
# **Goodput** is the share of time that is work which lasted. Daly's formula predicts its mean; Young's $\sqrt{2\,d\,M}$
# is nearly the best interval (the code takes Daly's), with save time $d$ and mean time between failures $M$. Both assume
# that a node is always at hand. `failing_runs` is the loop above for 1,000 runs at once, with spares and repairs.

# %%
plan = RunPlan(work_seconds=30 * DAY, interval_seconds=HOUR, save_seconds=60.0, restart_seconds=900.0, nodes=32)
simulated, formula, best = {}, {}, {}
for rate in (3.8, 24.0):
    at_rate, name = replace(plan, failures_per_1000_node_days=rate), f"{rate} failures per 1,000 node-days"
    mean = at_rate.mean_seconds
    best[rate] = best_interval_seconds(60.0, mean)
    formula[name] = {t: working_share(t, 60.0, 900.0, mean) for t in np.geomspace(90, 2 * DAY, 100)}
    simulated[name] = {t: failing_runs(replace(at_rate, interval_seconds=t), 1000).goodput for t in (180, 900, HOUR, 4 * HOUR, DAY)}
    for t, goodput in simulated[name].items():
        assert abs(goodput.mean() - working_share(t, 60.0, 900.0, mean)) < 0.02, f"the formula misses at {t} s"
    print(f"{name}: best interval {format_seconds(best[rate])}, goodput {working_share(best[rate], 60.0, 900.0, mean):.2%} (predicted)")
show(draw_goodput(simulated, formula, title="70B on 256 GPUs: 60 s for a save, 15 min to restart (assumed)"),
     alt="Goodput over the interval: flat around its best at both rates, and falling on both sides.")

# %% [markdown]
# **Read it.** The simulated means (whiskers: 95% of runs) lie on the formula; a star marks its best. The top is flat:
# twice or half the best interval hardly costs.
#
# **Question.** A save now takes a quarter of its former time. By which factor does the best interval change (Young)?

# %%
interval_factor = ...
check("16.interval_factor", interval_factor)

# %% [markdown]
# In your own cluster no node is at hand: a repair takes a day, and every spare is paid for.

# %%
paid, rows = price("H100", provider="Nebius", kind="on demand"), []
print(f"{paid.provider}, {paid.gpu}: ${paid.usd_per_gpu_hour} for a GPU hour ({paid.as_of}; published)")
for rate, spares in itertools.product(best, range(5)):
    run = replace(plan, failures_per_1000_node_days=rate, spares=spares, interval_seconds=best[rate])
    found = failing_runs(run, 1000)
    dollars = found.wall_seconds / HOUR * 8 * (run.nodes + spares) * paid.usd_per_gpu_hour
    rows.append({"failures per 1,000 node-days": f"{rate:g}", "spares": spares, "goodput": f"{found.goodput.mean():.1%}",
                 "waiting": f"{found.share('waiting'):.1%}", "million $": f"{dollars.mean() / 1e6:.3f}",
                 "95% of runs below": f"{np.quantile(dollars, 0.95) / 1e6:.3f}"})
display(pd.DataFrame(rows).style.hide().set_caption("30 days of work on 32 nodes and spares: 1,000 runs each (simulated)"))

# %% [markdown]
# **Read it.** Without a spare, most of the time that is no work is waiting for repairs. The cheapest number of spares
# grows with the rate, and beyond it each costs more than it saves.
#
# ## 2. A checkpoint of many ranks
#
# With FSDP2 each rank holds a shard of weights and moments. In `torch.distributed.checkpoint` (DCP) each rank writes its
# own file, and `.metadata` says where each piece lies. `get_state_dict`, `dcp.save`, `dcp.load`, `set_state_dict` are the
# calls that you need at work:

# %%
class Small:
    """A sharded transformer; rows depend on the step alone, so that any number of ranks sees the same."""

    def __init__(self, hidden=128):
        torch.manual_seed(0)
        self.model = fully_shard(Transformer(TransformerConfig(hidden=hidden, layers=2, heads=4, feedforward=3 * hidden)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def pieces(self):
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))

    def take(self, pieces):
        set_state_dict(self.model, self.optimizer, model_state_dict=pieces["model"], optim_state_dict=pieces["optimizer"])

    def step(self, number):
        rows = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(number))
        mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
        loss = F.cross_entropy(self.model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return mean_of_ranks(loss)


# %%
def mean_of_ranks(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def save_after_three(folder):
    run = Small()
    for step in range(3):
        run.step(step)
    dcp.save(run.pieces(), checkpoint_id=folder)
    return [run.step(step) for step in range(3, 6)], sum(p.numel() for p in run.model.parameters())


def load_here(folder):
    logging.disable(logging.WARNING)  # of a folder without .metadata it prints a page
    run = Small()
    pieces = run.pieces()  # says what to load; filled in place
    dcp.load(pieces, checkpoint_id=folder)
    run.take(pieces)
    return [run.step(step) for step in range(3, 6)]


# %%
work = scratch_folder("lesson-16")
after, parameters = run_ranks(save_after_three, 4, work / "four")[0]
on_two = run_ranks(load_here, 2, work / "four")[0]
print("4 ranks, never stopped: ", *map("{:.7f}".format, after), "\n2 ranks, from the files:", *map("{:.7f}".format, on_two))
assert max(abs(a - b) / a for a, b in zip(after, on_two, strict=True)) < 1e-6, "two ranks go on where four stopped"
sizes = {file.name: file.stat().st_size for file in sorted((work / "four").iterdir())}
print(f"12 bytes a parameter, a quarter each: {format_bytes(3 * parameters)} (predicted);",
      ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items()), "(measured)")
assert max(sizes.values()) < 1.15 * 3 * parameters, "each rank writes its own shard, and little more"

# %% [markdown]
# **Read it.** Weights and two moments in fp32 make 12 bytes a parameter, divided by the ranks. Two ranks read the pieces
# of four: DCP *reshards*. Sums in another order may change a loss in the seventh digit, where fp32 ends.
#
# `dcp.save` blocks until all is written. `dcp.async_save` copies to host memory, and a thread writes. What *blocks* is
# the save time of section 1.

# %%
def blocked(folder):
    run, seconds = Small(hidden=512), {}
    run.step(0)
    pieces, group = run.pieces(), dist.new_group(backend="gloo")  # its thread must not mix messages with training's
    start = time.perf_counter()
    dcp.save(pieces, checkpoint_id=folder / "sync")
    seconds["dcp.save"] = time.perf_counter() - start
    start = time.perf_counter()
    saving = dcp.async_save(pieces, checkpoint_id=folder / "async", process_group=group)
    seconds["dcp.async_save"] = time.perf_counter() - start
    saving.result()
    seconds["until its files are there"] = time.perf_counter() - start
    return seconds


seconds = run_ranks(blocked, 4, work)[0]
total = sum(file.stat().st_size for file in (work / "sync").iterdir())
print(f"{format_bytes(total)}:", ", ".join(f"{name} {s:.2f} s" for name, s in seconds.items()), f"({measured_here})")

# %% [markdown]
# **Read it.** Training waits only for the second time; the checkpoint is whole after the third.
#
# ### The scenario as asked: a checkpoint strategy
#
# *"175B on 64 A100: what do we save, where, how often?"* Beside it 70B on 256 H100. Saved are 14 bytes a parameter (bf16
# weights; master copy and two moments in fp32), each once in any layout. The copy passes PCIe; the write passes each
# node's port, and a store of 10 GB/s (Meta's sustains 2 TB/s,
# [arXiv:2407.21783](https://arxiv.org/abs/2407.21783); published).

# %%
asked, rows = {"gpt-3-175b": ("A100-80GB", 64, "PCIe 4 x16"), "llama-2-70b": ("H100", 256, "PCIe 5 x16")}, []
for name, (card, gpus, bus) in asked.items():
    model, nodes, batch = model_shape(name), gpus // 8, Batch(sequences=1536, sequence_length=2048)
    cluster = Cluster(gpu=card, nodes=nodes)
    layout, size = search(model, cluster, batch).best, checkpoint_bytes(model, Plan())
    files = export(model, cluster, layout.plan, batch).write(here.root / "build" / "lesson-16" / name)  # git ignores build/
    print(f"# written to build/lesson-16/{name}: {len(files)} files for {plan_name(layout)}")
    copied = size / gpus / link(bus).link_bytes_per_second
    written = max(size / nodes / link("Ethernet 100G").link_bytes_per_second, size / 1e10)
    for rate, (how, blocks) in itertools.product(best, (("dcp.save", written), ("dcp.async_save", copied))):
        mean = replace(plan, nodes=nodes, failures_per_1000_node_days=rate).mean_seconds
        every = best_interval_seconds(blocks, mean)
        again = 900 + written + (written - blocks)  # restart, read; what was still being written is lost
        rows.append({"": name, "TB": size / 1e12, "GB a GPU": size / gpus / 1e9, "failures per 1,000 node-days": f"{rate:g}",
                     "saved by": how, "blocks, s": blocks, "whole after, s": written, "every": format_seconds(every),
                     "goodput": f"{working_share(every, blocks, again, mean):.1%}"})
        assert every > written, "a save must be whole before the next begins"
display(pd.DataFrame(rows).style.format(precision=1).hide().set_caption(f"{Evidence.PREDICTED}; 15 minutes to restart (assumed)"))

# %% [markdown]
# **Read it.** The store decides: ask for its rate first. Asynchronous saves may be frequent. Not shown: a
# store's slow moments.
#
# ## 3. A save that is cut off
#
# The save that everybody writes first goes into the same folder each time. DCP asks a **planner** for every piece that it
# writes; a planner that counts them lets us kill rank 1 in the middle of a save.

# %%
class KilledAt(DefaultSavePlanner):
    left = 4

    def resolve_data(self, item):
        self.left -= 1
        if self.left < 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(item)


def saves_twice(first, second):
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    run = Small()
    dcp.save(run.pieces(), checkpoint_id=first)
    run.step(0)
    dcp.save(run.pieces(), checkpoint_id=second, planner=KilledAt())


def last_line(error):
    return str(error).strip().splitlines()[-1].split("Error: ")[-1].replace(f"{work}/", "")


def change_a_byte(path):
    file = next(path.glob("__0_*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")


# %%
for first, second in (("same", "same"), ("old", "new")):
    try:
        run_ranks(saves_twice, 2, work / first, work / second)
    except RankError:
        print(f"saved into {first!r}, then killed while saving into {second!r}:")
    for name in dict.fromkeys((first, second)):
        try:
            print(f"   {name!r} loads, next loss {run_ranks(load_here, 2, work / name)[0][0]:.4f}")
        except RankError as error:
            print(f"   {name!r} does not load: {last_line(error).partition('; rank local')[0]}")

# %% [markdown]
# **Read it.** In the same folder, one kill destroyed *both* checkpoints. In a new folder the half save has no `.metadata`
# and is refused, and the old one is whole.
#
# But `.metadata` does not say that the bytes reached the disk, or are still the same. So build the safe way: **new folder,
# checksums, to the disk, rename, keep the last two.** A rename is all or nothing on a file system (ext4, XFS, NFS, Lustre);
# object stores have none. The last is not the highest step: a run that went back saves step 60 after 100, and must not
# delete it. So names *count the saves*. Then a timer kills a rank at a random moment; the next round goes on from the last
# whole save.

# %%
def save_by_hand(pieces, folder, step, keep=2):
    new = folder / f"step-{step:08d}.writing"
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    dist.barrier()
    dcp.save(pieces, checkpoint_id=new)
    if dist.get_rank() == 0:
        files = {file.name: (file.stat().st_size, zlib.crc32(file.read_bytes())) for file in new.iterdir()}
        (new / "checksums.json").write_text(json.dumps({"version": 1, "ranks": dist.get_world_size(), "files": files}))
        for path in (*new.iterdir(), new):
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)  # else the name may survive a power cut, and the bytes not
            os.close(handle)
        number = 1 + max((int(path.name.split("-")[-1]) for path in named(folder)), default=0)
        new.rename(folder / f"step-{step:08d}-save-{number}")
        os.fsync(handle := os.open(folder, os.O_RDONLY))  # the new name, before an old one goes
        os.close(handle)
        for old in named(folder)[keep:]:  # what was saved last stands first
            shutil.rmtree(old.rename(new))  # nor does half of an old one keep its name
    dist.barrier()


# %%
def train_until_killed(folder, after_seconds, victim):
    run = Small()
    pieces = run.pieces()
    done = load_newest(pieces, folder) if newest_whole(folder) else 0  # whole: all checksums are right
    run.take(pieces)
    for step in itertools.count(done):
        run.step(step)
        save_by_hand(run.pieces(), folder, step + 1)
        if step == done and dist.get_rank() == victim:
            threading.Timer(after_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


# %%
chance, reached = random.Random(16), 0
for number in range(5):
    try:
        run_ranks(train_until_killed, 2, work / "safe", chance.uniform(0, 0.5), number % 2)
    except RankError:
        found, cut_off = newest_whole(work / "safe"), [path.name for path in (work / "safe").glob("*.writing")]
    print(f"kill {number + 1}: newest whole {found.name if found else None}; cut off: {cut_off or 'nothing'}")
    assert (step_of(found) if found else 0) >= reached, "a checkpoint that was there is lost"
    reached = step_of(found) if found else 0

# %% [markdown]
# **Read it.** `save_safely` and `load_newest` in `utils.parallel.safe_checkpoint` also say in
# a sentence what is wrong, and each rank sums its own files *as it writes them*: a sum of what was read back, as above,
# blesses a damaged write. **A checkpoint is code**: `dcp.load` unpickles what it finds; `load_newest` reads plain data
# alone. The first three faults hit both checkpoints; a whole one would load:

# %%
def fault(what, attempt, change=lambda path: None):
    folder = Path(tempfile.mkdtemp(dir=work)) / what.replace(" ", "-")  # a new one in each run of this cell
    shutil.copytree(work / "safe", folder)
    for path in named(folder):
        change(path)
    try:
        run_ranks(attempt, 2, folder)
    except RankError as error:
        print(f"{what}: {last_line(error)[:320]}")


def load(folder):
    load_newest(Small().pieces(), folder)


def save_on_full_disk(folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # no file of this process may grow further
    save_safely(Small().pieces(), folder, step=999)


fault("one changed byte", load, change_a_byte)
fault("half of its ranks", load, lambda path: next(path.glob("__1_*.distcp")).unlink())
fault("a newer version", load, lambda path: (path / "checksums.json").write_text('{"version": 3, "files": {}}'))
fault("another model", lambda folder: load_newest(Small(hidden=64).pieces(), folder))
fault("a full disk", save_on_full_disk)

# %% [markdown]
# ## 4. Exact resume
#
# A resumed curve that looks *similar* proves nothing: forget a piece, and it still looks similar. Equality can be tested.
# Besides weights and moments a run has the **schedule** of its learning rate, the **scaler**, the place in the **data**, and
# the **random states** of every rank. torchdata's loader knows its place, also in the middle of an epoch:

# %%
class Points(torch.utils.data.Dataset):
    def __init__(self, own=True):
        self.rows, self.own = torch.randn(480, 16, generator=torch.Generator().manual_seed(0)), own

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):  # with noise, from a generator of the row's own or from the worker's global one
        generator = torch.Generator().manual_seed(index) if self.own else None
        return self.rows[index] + 0.3 * torch.randn(16, generator=generator), int(self.rows[index, :8].sum() > 0)


# %%
def stateful_loader(data, workers=2):
    sampler = StatefulDistributedSampler(data, shuffle=True, drop_last=True)  # a part of the order for each rank
    return StatefulDataLoader(data, batch_size=8, sampler=sampler, num_workers=workers, drop_last=True,
                              multiprocessing_context="fork")


class Run:
    def __init__(self, own=True):
        torch.manual_seed(0)  # the same weights on all ranks
        self.model = fully_shard(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 2)))
        torch.manual_seed(1 + dist.get_rank())  # and dropout of each rank's own
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1, (step + 1) / 10) * 0.97**step)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4)
        self.loader, self.epoch, self.batches = stateful_loader(Points(own)), 0, iter(())

    def next_batch(self):
        for batch in self.batches:
            return batch
        self.loader.sampler.set_epoch(self.epoch)
        self.batches, self.epoch = iter(self.loader), self.epoch + 1
        return next(self.batches)


# %%
def one_step(run):
    inputs, targets = run.next_batch()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(run.model(inputs).float(), targets)
    run.optimizer.zero_grad()
    run.scaler.scale(loss).backward()
    run.scaler.step(run.optimizer)  # skips the step where a gradient is not finite
    run.scaler.update()
    run.schedule.step()
    return mean_of_ranks(loss)


# %%
def pieces_of(run):  # what ranks share is saved once; what a rank has for itself gets a key with its number
    model, optimizer = get_state_dict(run.model, run.optimizer)
    own = {"epoch": run.epoch, "data": run.loader.state_dict(), "random": torch.get_rng_state()}
    return {"model": model, "optimizer": optimizer, "schedule": run.schedule.state_dict(),
            "scaler": run.scaler.state_dict(), f"rank {dist.get_rank()}": own}


def restore(run, pieces, forget):
    own, fresh = pieces[f"rank {dist.get_rank()}"], Run()
    moments = get_state_dict(fresh.model, fresh.optimizer)[1] if forget == "moments" else pieces["optimizer"]
    set_state_dict(run.model, run.optimizer, model_state_dict=pieces["model"], optim_state_dict=moments)
    if forget != "schedule":
        run.schedule.load_state_dict(pieces["schedule"])
    if forget != "scaler":
        run.scaler.load_state_dict(pieces["scaler"])
    if forget != "place in the data":
        run.epoch = own["epoch"]
        run.loader.sampler.set_epoch(run.epoch - 1)
        run.loader.load_state_dict(own["data"])
        run.batches = iter(run.loader)
    if forget != "random states":
        torch.set_rng_state(own["random"])  # last: starting a loader draws from it


# %%
STEPS, SAVED = 40, 20


def never_stopped(folder, own):
    run, losses = Run(own), []
    for step in range(1, STEPS + 1):
        losses.append(one_step(run))
        if step == SAVED:
            save_by_hand(pieces_of(run), folder, step)
    return losses


def resumed(folder, forgotten, own):
    curves = {}
    for forget in forgotten:
        run = Run(own)
        pieces = pieces_of(run)
        load_newest(pieces, folder, ranks=dist.get_world_size())
        restore(run, pieces, forget)
        curves[forget] = [one_step(run) for _ in range(SAVED, STEPS)]
    return curves


# %%
forgotten = ("nothing", "moments", "schedule", "scaler", "place in the data", "random states")
whole = run_ranks(never_stopped, 4, work / "exact", True)[0]
curves = run_ranks(resumed, 4, work / "exact", forgotten, True)[0]
show(draw_forgotten(whole, curves, SAVED, title="Resumed on 4 ranks; forgotten:", device="4 ranks"),
     alt="Six panels of losses: with nothing forgotten the resumed run lies on the other; each forgotten piece parts from it.")
assert curves["nothing"] == whole[SAVED:], "with all pieces the losses are equal, bit for bit"
without_effect = [piece for piece in forgotten[1:] if curves[piece] == whole[SAVED:]]
assert not without_effect, f"each piece matters, and not {without_effect}"
global_noise = run_ranks(never_stopped, 4, work / "global", False)[0]
again = run_ranks(resumed, 4, work / "global", ("nothing",), False)[0]["nothing"]
apart = sum(a != b for a, b in zip(again, global_noise[SAVED:], strict=True))
print(f"noise from the worker's global generator: {apart} of {STEPS - SAVED} losses differ; from the row's own: 0 (measured)")
assert apart > 0, "workers' random states are in no checkpoint"
shutil.rmtree(work, ignore_errors=True)

# %% [markdown]
# **Read it.** With all pieces, no bit differs. Each forgotten piece changes most losses, and each curve still looks
# *healthy*: nobody would notice that the run reads rows twice.
#
# <div class="alert alert-warning"><b>Trap.</b> Workers have random states of their own, which no checkpoint holds: noise
# from their global generator was different after the resume. Cure, as above: a generator seeded by row and epoch.</div>
#
# With `ranks=`, `load_newest` refuses what another number of ranks saved: data and random state would not fit.
#
# ## 5. Killed, killed, cut off: `torchrun` brings it back
#
# On each host an **agent** (that is `torchrun`) starts the ranks and watches them. Agents meet at a **rendezvous**, a
# small store on host 0. When a rank dies, all agents meet again, and *all* ranks start anew. So a script must load its
# checkpoint if there is one, save safely, and die of its errors. Ours keeps a journal for the seconds below:

# %%
START = '''
import datetime, json, os, sys, time
import torch
import torch.distributed as dist

folder, steps, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

def note(what, **more):
    where = {"host": int(os.environ["COURSE_HOST"]), "rank": int(os.environ["RANK"])}
    with open(os.environ["COURSE_JOURNAL"], "a") as journal:
        journal.write(json.dumps({"at": time.time(), "what": what, **where, **more}) + "\\n")

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))  # ranks may start late
steps_group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
rank, world, checkpoint = dist.get_rank(), dist.get_world_size(), f"{folder}/checkpoint.pt"
torch.manual_seed(0)
state = {"step": 0, "weight": torch.randn(16, 1)}
if os.path.exists(checkpoint):
    state = torch.load(checkpoint)
note("start", world=world, step=state["step"], pid=os.getpid())
'''

# %%
LOOP = '''
try:
    for step in range(state["step"], steps):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))[rank::world]
        gradient = x.T @ (x @ state["weight"] - x.sum(1, keepdim=True))
        dist.all_reduce(gradient, group=steps_group)
        state["weight"] -= 0.1 / 24 * gradient
        time.sleep(0.03)  # the rest of a step
        if step % 10 == 9 and rank == 0:
            torch.save({"step": step + 1, "weight": state["weight"]}, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
        note("step", step=step)
except RuntimeError as error:
    note("saw", text=str(error))
    raise  # the agent sees a failed rank
note("done", weight=state["weight"].flatten().tolist())
dist.destroy_process_group()
'''

# %% [markdown]
# **Predict.** Two hosts, one rank each; a collective may take 3 s. We kill rank 1 (`kill -9`), then host 1 with its
# agent (a supervisor restarts it a second later), then cut the link for good. After how many seconds does a rank
# notice?
#
# The hosts are two **network namespaces**; one virtual cable joins them, and we pull it.

# %%
my_seconds_until_noticed = {"kill a rank": 3.0, "kill a host": 3.0, "cut the link": 3.0}
STEPS, TIMEOUT_SECONDS = 70, 3.0
faults = [Fault("kill a rank", 15), Fault("kill a host", 32), Fault("cut the link", 48, seconds=300)]
if why := link_problem():
    print(f"No link can be cut here ({why}); its row comes from the stored run.")
    faults = faults[:2]
with scratch("lesson-16") as folder:
    (folder / "train.py").write_text(START + LOOP)
    job = run_elastic(folder / "train.py", folder, STEPS, TIMEOUT_SECONDS, hosts=2, least_hosts=1, faults=faults, timeout_seconds=240)
print("hosts of", job.transport)

# %%
stored = recorded("survive")[0]
story, when = run_in(stored, "three faults"), f"{stored.device}, {stored.date}"
rows = [(f, measured_here) for f in job.recoveries] + [(f, f"recorded on {when}") for f in story.recoveries[len(job.recoveries):]]
for found, evidence in rows:
    kind = found.fault.kind
    print(f"{kind:<13} noticed after {found.noticed_seconds:4.1f} s (your guess {my_seconds_until_noticed[kind]:.1f}), training "
          f"after {found.back_seconds:4.1f} s, ranks {found.ranks_before} -> {found.ranks_after}, "
          f"steps done twice: {found.steps_lost} ({evidence})\n    to blame: {found.named}")
    for rank, (seconds, text) in found.saw.items():
        print(f"    rank {rank} after {seconds:4.1f} s: {text}")

# %%
show(draw_progress({"job": progress_of(job)}, title="A job that comes back three times", device="two hosts of this machine"),
     alt="Steps against seconds: lines of two ranks that end at each fault and begin again there or a little lower; after the cut "
     "link one rank goes on alone.")

# %% [markdown]
# **Read it.** The kernel of a *dead process* closes its connections, so rank 0 knows at once. A *cut link* says nothing:
# both ranks wait for exactly the timeout. A host without power is as silent: ours lost its processes, but its kernel
# lived on. After the cut, host 0's agent waits until host 1 has missed three signs of life (every second here, every
# five by default), and goes on alone, as `--nnodes=1:2` allows. Most other seconds import torch again.
#
# Was it the same training? Each step's batch is divided among the ranks that are there, so up to rounding the weights are
# those of one undisturbed process:

# %%
weight = torch.randn(16, 1, generator=torch.Generator().manual_seed(0))
for step in range(STEPS):
    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
    weight -= 0.1 / 24 * x.T @ (x @ weight - x.sum(1, keepdim=True))
gap = (torch.tensor(job.result["weight"]) - weight.flatten()).abs().max().item()
print(f"largest difference of a weight: {gap:.1e} (measured)")
assert gap < 1e-5, "the job that came back trained something else"

# %% [markdown]
# <div class="alert alert-warning">
#
# **Traps.** (1) A cut link costs the whole timeout. PyTorch's default is 30 minutes for gloo, 10 for NCCL. (2) `kill -9`
# on an agent leaves its ranks running: end the whole host. (3) PyTorch 2.15 gives new ranks the store of the dead ones,
# and gloo fails with `connectFullMesh failed`. Set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` (our launcher opens a new store
# each time). (4) If host 0 dies, so does the rendezvous, and the job: a scheduler must start it again (lesson 17).
#
# </div>
#
# ### Growing again
#
# When host 1's agent asks to join, both begin again *from the last checkpoint*.

# %%
show(draw_progress({"job": progress_of(story)}, title="Shrunk to one host, and grown again", evidence=Evidence.RECORDED,
                   device=when),
     alt="A stored run: after the link is back, a line of two ranks follows that of one rank.")
grown = [world for *_, world, _ in story.worlds()]
print(f"the link was cut for {story.recoveries[-1].fault.seconds:.0f} s; ranks: {', '.join(map(str, grown))} (recorded on {when})")
assert grown[-2:] == [1, 2], "the stored run shrinks to one rank and grows to two"

# %% [markdown]
# ## 6. Tolerance for each step: torchft
#
# [torchft](https://github.com/meta-pytorch/torchft) lets each *replica*, a rank
# or group with a whole model, decide at every step who takes part; a **lighthouse** keeps the list. Gradients are
# averaged over those who are there, and who comes back fetches the weights from a survivor, not from a disk. It wraps
# what you have:
#
# ```python
# manager = Manager(pg=ProcessGroupGloo(timeout=...), min_replica_size=1, state_dict=..., load_state_dict=...)
# model, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
# ```

# %%
runs = {"torchrun: all start again": run_in(stored, "a restart from the checkpoint"),
        "torchft: the survivor goes on": run_in(stored, "tolerance for each step")}
panels = {name: progress_of(run, run.recoveries[0].at_seconds) for name, run in runs.items()}
show(draw_progress(panels, title="The same death, two ways to live on", since="the kill", evidence=Evidence.RECORDED, device=when),
     alt="Above, torchrun's line has a gap and falls back; below, torchft's line of one rank begins right after the "
     "fault, and becomes one of two ranks again.")
for name, run in runs.items():
    steps, after = [m.more["step"] for m in run.moments if m.what == "step" and m.rank == 0], run.recoveries[0].back_seconds
    print(f"{name:<31} next step after {after:4.1f} s, steps done twice: {len(steps) - len(set(steps)):2d} (recorded on {when})")
print(torchft_problem() or "torchft is here: `python -m evidence.record survive` runs all of this again, in a few minutes.")

# %% [markdown]
# **Read it.** torchrun pays twice, to
# shrink and to grow: each time all ranks start from the last checkpoint. torchft pays one broken step, and goes on,
# with a smaller batch: not *exactly* the same run.
#
# ## 7. Hangs
#
# The worst failure says nothing. Here rank 1 leaves out one all-reduce, as after `if loss.isnan(): continue`. PyTorch's
# **flight recorder** keeps the last collectives of every rank, with the lines that called them.

# %%
def train_step(step, group):
    gradient = torch.ones(4)
    if step == 5 and dist.get_rank() == 1:
        return  # "nothing to learn from this batch"
    dist.all_reduce(gradient, group=group)


def train_until_it_hangs():
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    said = "came to its end"
    try:
        for step in range(8):
            train_step(step, group)
        time.sleep(3)  # it evaluates, say, while the others wait
    except RuntimeError as error:
        said = str(error).rpartition("] ")[2]
    return said, recorded_calls()


# %%
found = run_ranks(train_until_it_hangs, 3)
furthest = max(calls[-1].number for _, calls in found)
for rank, (said, calls) in enumerate(found):
    missing = "   <- never called this one" if calls[-1].number < furthest else ""
    print(f"rank {rank}: {said[:44]:<44} last: {calls[-1]}{missing}")
assert [rank for rank, (_, calls) in enumerate(found) if calls[-1].number < furthest] == [1], "rank 1 left one out"

# %% [markdown]
# **Read it.** The two who complain are innocent. Merge the traces, and look for the one that is *behind*. Worse: from
# step 5 on, rank 1's gradients were summed with the others' of the step *before*. Under NCCL the dumps are written at the timeout (`TORCH_NCCL_DUMP_ON_TIMEOUT=1`), and `torchfrtrace` merges them; under gloo a rank dumps them
# itself, as here. Two more tools:

# %%
def look(tool):
    rank, _ = dist.get_rank(), os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # PyTorch logs all of it once more
    if tool == "debug level DETAIL":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    group, seconds = dist.new_group(timeout=datetime.timedelta(seconds=2)), datetime.timedelta(seconds=1)
    try:
        if tool == "monitored_barrier":
            time.sleep(2 * (rank == 1))  # rank 1 is somewhere else
            dist.monitored_barrier(group, seconds, wait_all_ranks=True)
        else:
            dist.all_reduce(torch.ones(5 if rank == 0 else 4), group=group)
        return "no error"
    except RuntimeError as error:
        return re.sub(r", TensorDtypes.*?nullopt\)\)", "", str(error)).rpartition("] ")[2]


for tool in ("monitored_barrier", "plain", "debug level DETAIL"):
    said = run_ranks(look, 3, tool)
    print(f"{tool}:", f"  rank 0: {said[0][:380]}", *(f"  rank {rank}: {said[rank].partition('. ')[0]}" for rank in (1, 2)), sep="\n")

# %% [markdown]
# **Read it.** `monitored_barrier` names who is missing. A wrong *shape* is worse than a hang: without
# `TORCH_DISTRIBUTED_DEBUG=DETAIL` some ranks go on with garbage and no error. DETAIL compares every call over all ranks, slowly.
#
# ## 8. Faults that make no noise
#
# **A bit flips** in the memory of one replica. After a synchronous step all replicas hold the same bits, so one number of
# 64 bits for each tensor, compared over ranks, finds it. **A slow rank** hides, too: all wait for it, so all steps take
# equally long. Each rank's *own* seconds, before the collective, tell; so do its seconds *in* it. Four ranks check both.

# %%
def checksums(model):
    return torch.stack([torch.hash_tensor(p.detach()).view(torch.int64) for p in model.parameters()])


def gathered(values):
    dist.all_gather(rows := [torch.empty_like(values) for _ in range(dist.get_world_size())], values)
    return torch.stack(rows)


# %%
def watched_run(folder, steps=12):
    rank, gpu, news = dist.get_rank(), StandInGpu(), []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    for step in range(steps):
        start = time.perf_counter()
        loss = model(torch.randn(16, 32)).square().mean()
        model.zero_grad()
        loss.backward()
        time.sleep(0.06 if rank == 3 else 0.02)  # rank 3's GPU is hot and slow
        own, total = time.perf_counter() - start, 0.07
        for p in model.parameters():
            dist.all_reduce(p.grad)
        sent = time.perf_counter() - start - own
        for p in model.parameters():
            p.data -= 0.01 / dist.get_world_size() * p.grad
        if step == 7 and rank == 2:
            model[0].weight.data.view(torch.int32)[5, 3] ^= 1 << 30  # a cosmic ray
        sums, seconds = gathered(checksums(model)), gathered(torch.tensor([own, sent])).tolist()
        odd = (sums != sums.mode(dim=0).values).nonzero().tolist()  # [rank, tensor] unlike the majority
        news.append((step, odd, seconds))
        report(folder, rank, gpu.after(min(1.0, own / total), 2**30) | {
            "training_step": step + 1, "training_loss": loss.item(), "training_own_seconds": own,
            "training_last_step_timestamp_seconds": time.time(), "training_weights_checksum": sums[rank, 0].item() % 2**32})
    return news


# %%
metrics = scratch_folder("lesson-16")
news = run_ranks(watched_run, 4, metrics)[0]
flips = [(step, odd[0]) for step, odd, _ in news if odd]
print(f"step {flips[0][0]}: rank {flips[0][1][0]}'s tensor {flips[0][1][1]} differs from the others (measured)")
medians, sending = ([statistics.median(rows[rank][kind] for *_, rows in news) for rank in range(4)] for kind in (0, 1))
print("own seconds in a step, by rank:", *(f"{s:.3f}" for s in medians), f" most: rank {medians.index(max(medians))}; in the all-reduce:",
      *(f"{s:.3f}" for s in sending), f" least: rank {sending.index(min(sending))} ({measured_here})")
assert flips[0] == (7, [2, 0]), "the flip is found in the step in which it happens, at rank 2, in the first tensor"

# %% [markdown]
# **Read it.** The cure: copy the tensor from a healthy replica; take the GPU out if it happens twice. The slow rank is *shortest* in the collective: it comes last. On a GPU a host's clock times
# launches: take CUDA events, or a trace. Under ZeRO-3 there are no replicas to compare; checksums of checkpoints remain. A flip in a
# gradient *before* the all-reduce reaches all ranks alike, unseen by this check.
#
# **A loss spike** can come from a bad batch, or from a flip: both are planted below. PaLM's came from neither alone: the same
# batches did no harm to *another state* of the model; going back about 100 steps and skipping 200 to 500 batches helped
# ([arXiv:2204.02311](https://arxiv.org/abs/2204.02311), section 5.1; published). A guard *skips* an update whose
# gradient is far from the recent ones, and *rolls back* if the next is no better.

# %%
def train_with_spikes(guarded, steps=120):
    torch.manual_seed(0)
    weight, losses, norms, kept, news = torch.zeros(32, requires_grad=True), [], [], [], []
    for step in range(steps):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)) * (30 if step == 40 else 1)
        if step == 80:
            weight.data[3] += 60  # a flipped bit
        loss = (x @ weight - x.sum(1)).square().mean()
        gradient = torch.autograd.grad(loss, weight)[0]
        usual = statistics.median(norms[-20:] or [gradient.norm().item()])
        losses.append(loss.item())
        if guarded and gradient.norm() > 10 * usual:
            news.append(f"step {step}: gradient {gradient.norm() / usual:.0f} times the usual, skipped")
            if len(news) > 1 and f"step {step - 1}:" in news[-2]:  # twice in a row: not the batch
                kept_at, older = kept[-2]
                weight.data.copy_(older)
                news.append(f"step {step}: rolled back to the state of step {kept_at}")
            continue
        norms.append(gradient.norm().item())
        weight.data -= 0.05 * gradient
        if step % 10 == 0:
            kept.append((step, weight.detach().clone()))
    return losses, news


# %%
plain, (guarded, said) = train_with_spikes(False)[0], train_with_spikes(True)
print(*said, sep="\n")
print(f"mean loss of steps 45 to 60: {statistics.mean(plain[45:60]):.2g} plain, {statistics.mean(guarded[45:60]):.2g} guarded")
assert statistics.mean(guarded[45:60]) < 1e-2 * statistics.mean(plain[45:60]), "the bad batch did no harm"
assert guarded[-1] < 1e-2, "after the roll-back the loss is low again"

# %% [markdown]
# **Read it.** One skip absorbs the bad batch. Two in a row mean bad weights: the guard rolls back.
#
# ## 9. Watching
#
# **Prometheus** fetches numbers from every host, evaluates rules, and raises alerts. For GPUs they come from NVIDIA's
# dcgm-exporter; here our run serves the *same names* from a **stand-in**, which derives temperature and power from how
# busy a rank was:

# %%
with Exporter(metrics) as exporter:
    page = urllib.request.urlopen(f"http://{exporter.address}/metrics").read().decode()
for name in ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_XID_ERRORS", "training_own_seconds"):
    print(*[line for line in page.splitlines() if name in line and "HELP" not in line], sep="\n")

# %% [markdown]
# `watching/rules/`, beside this lesson's source, holds nine alert rules, their tests, and a dashboard for Grafana. `GpuIsLost` is
# `DCGM_FI_DEV_XID_ERRORS` at 48, 74, 79, 95, 119 or 120, the driver's numbers ([catalog](https://docs.nvidia.com/deploy/xid-errors/))
# for memory errors, NVLink, a GPU off the bus and its controller; 94, a *contained* error, ends one job alone. Where Prometheus is installed, it now fetches the run's numbers,
# and a GPU is lost:

# %%
if problem := prometheus_problem():
    row = next(row for row in stored.rows if row["quantity"] == "an alert")
    print(problem, f"Recorded on {when}: fired {row['firing_seconds']:.1f} s after the error: {row['says']}")
else:
    print("promtool test rules:", promtool("test", "rules", RULES_TEST).split()[-1])
    with Exporter(metrics) as exporter, watch([exporter.address]) as prometheus:
        report(metrics, 1, StandInGpu(xid=79).after(0.0, 2**30))
        alert, seconds = prometheus.wait_for("GpuIsLost")
        print(f"{alert.state} after {seconds:.1f} s ({measured_here}): {alert.summary}")

# %% [markdown]
# **Read it.** Two rules deserve to wake somebody: *no step for several step times* (here a minute), which catches every hang,
# and *a lost GPU*.
#
# | you see | look at | do |
# |---|---|---|
# | ranks time out, one does not | flight recorder, merged: who is behind? | repair the `if` around a collective |
# | "connection closed by peer" | which host says nothing any more; exit code -9; memory before | replace the host, or mend the leak |
# | step time grew on all ranks | own seconds by rank | take out the slow host |
# | loss jumps | gradient norm, the batch, checksums over replicas | skip; go back and pass over the batches; take out the GPU |
# | nothing moves, nothing is logged | the alert on the last step's time | dump traces, then restart |
#
# ## When to use which
#
# | means | use when | costs | does not help |
# |---|---|---|---|
# | safe save, new folder | always | one more checkpoint on the disk | |
# | asynchronous save | the copy is quicker than the write | host memory | against a failure during the write |
# | spares | your own cluster, slow repairs | their rent, idle | where the cloud has another node |
# | elastic `torchrun` | always; to shrink, several replicas | one restart a failure | if host 0 dies; a single replica waits |
# | torchft | many replicas, frequent failures | exactness; the model in each replica | a single replica |
#
# ## Recap
#
# - The failure rate decides interval and spares; the optimum is flat.
# - A checkpoint is whole, or it has no name. Checksums tell whether it still is.
# - Exact resume can be tested, and similar curves prove nothing.
# - Who complains of a timeout is seldom to blame: find the rank that is behind.
#
# ### Test yourself
#
# 1. Failures become four times as frequent. What happens to the best interval, and to the time lost?
# 2. A job resumed with another number of ranks. Which pieces fit, and which do not?
#
# <details><summary>Answers</summary>
#
# 1. The interval halves. Saves take twice the share, and so does lost work; restarts take four times theirs.
# 2. Weights, moments, schedule and scaler fit; random states of ranks do not. A place in the data fits if it is *one* index
#    that ranks divide (`[rank::world]`, section 5), and not if each rank has its own (section 4).
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/advanced/16_runs_that_survive.ipynb), in a copy: `make my-labs` makes one. Then compare with the
# [solution](../../solutions/advanced/16_runs_that_survive.ipynb). [Lesson 17](17_cluster_and_budget.ipynb) starts such a
# script by a scheduler.
#
# **References.** Daly 2006, *A higher order estimate of the optimum checkpoint interval*. Llama Team 2024,
# [arXiv:2407.21783](https://arxiv.org/abs/2407.21783). Kokolis and others 2024,
# [arXiv:2410.21680](https://arxiv.org/abs/2410.21680). PyTorch,
# [distributed checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html). torchdata,
# [stateful loader](https://meta-pytorch.org/data/main/torchdata.stateful_dataloader.html).
