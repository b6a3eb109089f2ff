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
# **The question.** What must a run save, how, and how often, so that a failure costs no more than a restart and the work
# since the last save?
#
# **Promise.** You compute how often to save. You end training with `kill -9` at four moments of a save, and find a whole
# checkpoint each time. You resume four ranks on this CPU so that every later loss is the same *to the last bit*.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 55, and 80 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | half a minute on two CPU cores |
#
# ## A bet
#
# You train on 256 GPUs for 30 days. A save stops the training for one minute. Every how many minutes do you save?

# %%
my_bet_minutes = ...

# %% tags=["setup"]
here = setup("advanced/16")

# %% jupyter={"source_hidden": true}
import inspect
import itertools
import json
import logging
import os
import random
import shutil
import signal
import warnings
import zlib
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

# %% jupyter={"source_hidden": true}
from utils import Batch, Cluster, Evidence, Plan, Span, Transformer, TransformerConfig, check, export, format_seconds
from utils import model_shape, run_ranks, scratch_folder, search, show
from utils.catalog import link
from utils.planner.failing_runs import RunPlan, failing_runs
from utils.planner.goodput import DAY, best_interval_seconds, checkpoint_bytes, working_share
from utils.parallel import load_newest, list_checkpoints, newest_whole, step_of
from utils.lessons.lesson_16.attempts import change_a_byte, damaged_copy, told
from utils.lessons.lesson_16.checkpoint_files import draw_files, draw_left
from utils.lessons.lesson_16.exact_run import Run, mean_of_ranks
from utils.lessons.lesson_16.failure_logs import FAILURE_LOGS
from utils.lessons.lesson_16.failures import draw_days, draw_forgotten, draw_goodput

# %% [markdown]
# New words stand in the [glossary](../00_glossary.ipynb).
#
# ## 1. How often: between too soon and too late
#
# When one GPU fails, a synchronous job stops. The work since the last save is *lost*, and the job is *restarted*. Here three
# days of work meet the same failures and are saved at three intervals. Look at how much is lost, and where each row ends. Of 200
# runs the one nearest to the means is drawn:

# %%
HOUR = 3600.0


def one_run(days, interval, save, restart, mean, seed):
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


runs = {hours: [one_run(3, hours * HOUR, 300.0, HOUR / 2, 8 * HOUR, seed) for seed in range(200)] for hours in (0.25, 1.5, 6)}
days = np.array([[run[-1].end_seconds / DAY for run in those] for those in runs.values()])
drawn, lanes = abs(days - days.mean(1, keepdims=True)).sum(0).argmin(), {}
for (hours, those), mean in zip(runs.items(), days.mean(1), strict=True):
    lost = sum(span.end_seconds - span.start_seconds for span in those[drawn] if span.kind == "lost")
    lanes[f"every {hours:g} h: {lost / HOUR:.1f} h lost"] = those[drawn]
    print(f"every {hours:g} h: {mean:.2f} days, mean of 200 runs (simulated)")
show(draw_days(lanes, title="One of 200 runs: failures every 8 h, save 5 min, restart 30 min"),
     alt="Three runs: frequent saves take a quarter of the time, rare saves lose whole hours, the middle one ends first.")

# %% [markdown]
# **Read it.** Saves every 15 minutes take nearly a quarter of the time. Saves every 6 hours lose whole hours at a failure. The best
# interval lies between, and depends on how often failures come. Here are published logs, as failures per 1,000 *node-days*; a
# node has 8 GPUs:

# %% jupyter={"source_hidden": true}
gpus, rows = 256, []
for log in FAILURE_LOGS:
    hours = log.hours_between(gpus)
    rows.append({"log": log.name, "per 1,000 node-days": f"{log.failures_per_1000_node_days:.1f}",
                 "hours between two": f"{hours:.0f}", "failures in 30 days": f"{24 * 30 / hours:.1f}"})
display(pd.DataFrame(rows).style.hide().set_caption(f"Rates from published numbers; hours and failures of {gpus} GPUs predicted from them"))

# %% [markdown]
# **Read it.** In 30 days a job on 256 GPUs would stop about 4 times by one log and 23 times by another. So count what stops *your* jobs. Here we use
# the lowest rate and the highest, 3.8 and 24.
#
# **Goodput** is the share of wall time that is work which lasted. Let a save take $d$, and let failures come every $M$ on
# average (the mean time between failures). Saved after each $t$ of work, a run spends about $d/t$ of the time on saves. A
# failure loses half an interval on average, which is $t/(2M)$ of the time. The sum is least at
#
# $$t=\sqrt{2\,d\,M}$$
#
# (Young 1974). Daly (2006) gives the goodput itself, for random failures and a restart of $R$:
#
# $$\text{goodput} = \frac{t}{M\,e^{R/M}\,(e^{(t+d)/M}-1)}$$
#
# `working_share` is this formula, and `failing_runs` simulates whole runs to test it:

# %%
bet = None if my_bet_minutes is ... else 60.0 * my_bet_minutes
plan = RunPlan(work_seconds=30 * DAY, interval_seconds=HOUR, save_seconds=60.0, restart_seconds=900.0, nodes=32)
simulated, formula, rows = {}, {}, []
for rate in (3.8, 24.0):
    at_rate, name = replace(plan, failures_per_1000_node_days=rate), f"{rate:g} failures per 1,000 node-days"
    mean = at_rate.mean_seconds
    formula[name] = {t: working_share(t, 60.0, 900.0, mean) for t in np.geomspace(90, 2 * DAY, 100)}
    simulated[name] = {t: failing_runs(replace(at_rate, interval_seconds=t), 1000).goodput for t in (180, 900, HOUR, 4 * HOUR, DAY)}
    assert all(abs(found.mean() - working_share(t, 60.0, 900.0, mean)) < 0.005 for t, found in simulated[name].items()), "formula and runs differ"
    for save in (30.0, 60.0, 120.0):
        young = np.sqrt(2 * save * mean)
        assert abs(best_interval_seconds(save, mean) / young - 1) < 0.03, "Young's interval and Daly's"
        at_best, at_half, at_twice, *at_bet = (working_share(t, save, 900.0, mean) for t in (young, young / 2, 2 * young, *([bet] if bet else ())))
        rows.append([f"{rate:g}", f"{save:g}", f"{young / 60:.0f}", *(f"{share:.1%}" for share in (at_best, min(at_half, at_twice), *at_bet))])
names = ["failures per 1,000 node-days", "save, s", "best interval, min", "goodput", "at half or twice", *([f"your bet, {bet / 60:g} min"] if bet else [])]
display(pd.DataFrame(rows, columns=names).style.hide().set_caption("Predicted: 256 GPUs, 15 min to restart (assumed)"))
show(draw_goodput(simulated, formula, title="1,000 runs of 30 days on 256 GPUs (simulated): save 60 s, restart 15 min", bet_seconds=bet),
     alt="Goodput over the interval: flat around its best at both rates, and falling on both sides; your bet, if any, as a line.")

# %% [markdown]
# **Read it.** This answers the bet: save every 61 minutes at the high rate, every 154 at the low one. The top of each curve is
# flat. Half or twice the best interval costs about one percentage point at most in this table, so a rough guess of $M$ is
# enough. Formula and simulation agree, but both take failures as independent, at a constant rate.
#
# **Question.** A save takes a quarter of its former time. By which factor does the best interval change?

# %%
interval_factor = ...
check("16.interval_factor", interval_factor)

# %% [markdown]
# ## 2. How: each rank writes its shard, and training goes on
#
# With FSDP2 each rank holds a shard of the weights and of Adam's moments. With PyTorch's distributed checkpoint (**DCP**) each
# rank writes its own file, and `.metadata` says where each piece lies. Below four ranks save and two ranks load. `run_ranks(f,
# 4)` calls `f` in four processes on this CPU:

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
def save_after_three(folder):
    run = Small()
    for step in range(3):
        run.step(step)
    dcp.save(run.pieces(), checkpoint_id=folder)
    return [run.step(step) for step in range(3, 6)]


def load_here(folder, moments=True):
    logging.disable(logging.WARNING)  # of a folder without .metadata it prints a page
    run = Small()
    pieces = run.pieces()  # says what to load; filled in place
    dcp.load(pieces if moments else {"model": pieces["model"]}, checkpoint_id=folder)
    run.take(pieces)
    return [run.step(step) for step in range(3, 6)]


# %%
work = scratch_folder("lesson-16")
after = run_ranks(save_after_three, 4, work / "four")[0]
for moments in (True, False):
    on_two = run_ranks(load_here, 2, work / "four", moments)[0]
    apart = max(abs(a - b) for a, b in zip(after, on_two, strict=True))
    print(f"2 ranks, {'all loaded' if moments else 'moments left out'}: 3 losses, up to {apart:.1e} from those of the 4 ranks (measured)")
    assert (apart < 1e-5) == moments, "two ranks go on where four stopped, with all pieces alone"

# %%
show(draw_files(work / "four", "model.embed.weight", 2, title="One tensor of the checkpoint: written by 4 ranks, read by 2"),
     alt="Four ranks write rows of one tensor into a file each; two ranks read two files each, as .metadata tells them.")

# %% [markdown]
# **Read it.** Each of the two ranks reads two of the four files: DCP *reshards*. They go on where the four stopped. Losses differ
# by rounding alone, because sums are made in another order; without the moments they differ far more.
#
# How long does training wait? `dcp.save` returns when all is written. `dcp.async_save` copies the shard to host memory and
# returns, and a thread writes the copy while training goes on. Do the files still hold the weights of the call?

# %%
def saved_meanwhile(folder):
    run, group = Small(hidden=256), dist.new_group(backend="gloo")  # a group of its own, for the thread
    run.step(0)
    under_way = dcp.async_save(run.pieces(), checkpoint_id=folder / "async", process_group=group)
    is_whole = (folder / "async/.metadata").exists()  # it is written last
    right = run.step(1)  # changes all weights, while the thread writes
    under_way.result()  # waits, and raises what went wrong in the thread
    again = Small(hidden=256)
    dcp.load(pieces := again.pieces(), checkpoint_id=folder / "async")
    again.take(pieces)
    return is_whole, right, again.step(1), run.step(1)


# %%
is_whole, right, loaded, later = run_ranks(saved_meanwhile, 4, work)[0]
print("whole when dcp.async_save returned:", is_whole)
print(f"loss of step 1: {right:.7f}; from the asynchronous checkpoint {loaded:.7f}; from later weights {later:.7f}")
assert right == loaded != later, "the copy holds the weights of the call"

# %% [markdown]
# **Read it.** The call returned before its files were whole. Yet they hold the weights *of the call*: their loss is the same. An error
# of the thread shows only at `.result()`, so call it before you rely on the save.
#
# ### The scenario as asked: a checkpoint strategy
#
# *"175B on 64 A100: what do we save, where, how often?"* We save 14 bytes a parameter: bf16 weights, their fp32 copies and two
# fp32 moments. Each GPU copies a 64th to its host, and the hosts write to a store that all of them see. The store's rate is
# assumed, then halved and doubled:

# %% jupyter={"source_hidden": true}
model, cluster, batch = model_shape("gpt-3-175b"), Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=1536, sequence_length=2048)
export(model, cluster, search(model, cluster, batch).best.plan, batch).write(here.root / "build" / "lesson-16" / "gpt-3-175b")
print("a plan for this run, and the files that launch it: build/lesson-16/gpt-3-175b")

# %%
size = checkpoint_bytes(model, Plan())
copied = size / 64 / (link("PCIe 4 x16").sustained_bytes_per_second / 2)  # two GPUs share a link
print(f"{size / 1e12:.2f} TB a checkpoint; the copy takes {copied:.1f} s and {size / 8 / 1e9:.0f} GB of each host's memory (predicted)")
print(f"two kept and one under way: {3 * size / 1e12:.1f} TB; with one a day for 30 days: {33 * size / 1e12:.0f} TB (predicted)")

# %% jupyter={"source_hidden": true}
rows = []
for rate, store in itertools.product((3.8, 24.0), (5e9, 1e10, 2e10)):
    mean, written = replace(plan, nodes=8, failures_per_1000_node_days=rate).mean_seconds, size / store
    back = 900 + written  # restart, and a read as long as the write; asynchronously what was still being written is lost, too
    every = best_interval_seconds(written, mean)
    blocking = working_share(every, written, back, mean)
    hourly, slowed = (working_share(HOUR, blocks, back + written, mean) for blocks in (copied, copied + 0.1 * written))
    assert blocking < slowed < hourly, "an asynchronous save each hour is better than a blocking one"
    rows.append({"failures per 1,000 node-days": f"{rate:g}", "store, GB/s": f"{store / 1e9:g}", "write, s": f"{written:.0f}",
                 "dcp.save, best interval": format_seconds(every), "dcp.save, goodput": f"{blocking:.1%}", "async_save each hour, goodput": f"{hourly:.1%}",
                 "the same, steps a tenth slower during the write": f"{slowed:.1%}"})
display(pd.DataFrame(rows).style.hide()
        .set_caption(f"{Evidence.PREDICTED}; assumed: the store's rate, 15 minutes to restart, a read as long as a write, checksums apart"))

# %% [markdown]
# **Read it.** Call `dcp.async_save` every hour, and keep the last two saves and one a day. In each row this beats blocking saves at
# their own best interval, which is hours long.
#
# The last column shows what the verdict hangs on. The writing thread shares Python's lock (the GIL) with the training. If that
# makes steps a tenth slower, the hourly save still wins, at the low rate by less than a point. The tenth is assumed. Time your
# own steps during a write, and add what they lose to $d$.
#
# ## 3. A save that is cut off: what is whole gets its name last
#
# The simplest program saves into the same folder each time. What is left if it is killed halfway? DCP asks a **planner** for
# every piece that it writes, and this one kills rank 1 at its fifth. `told` runs two ranks, and says what came of it.

# %%
class KilledAt(DefaultSavePlanner):
    left = 4

    def resolve_data(self, item):
        self.left -= 1
        if self.left < 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(item)


def saves_twice(first, second):
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # PyTorch warns, and overwrites
    run = Small()
    dcp.save(run.pieces(), checkpoint_id=first)
    run.step(0)
    dcp.save(run.pieces(), checkpoint_id=second, planner=KilledAt())


# %%
for first, second in (("same", "same"), ("old", "new")):
    told(saves_twice, work / first, work / second)
    print(f"saved into {first!r}, then killed while saving into {second!r}:")
    for name in dict.fromkeys((first, second)):
        found = told(load_here, work / name)
        print(f"   load {name!r}: {found if found.startswith('failed') else 'it loads, and trains on'}")

# %% [markdown]
# **Read it.** In the same folder one kill destroyed *both* checkpoints. In a new folder the old one stays whole. The half
# one is refused, because `.metadata` is written last.
#
# Two things are missing. DCP brings its files to the disk, but not the folder's list of them, and a power cut can take that.
# And nothing tells whether a byte has changed since. So build the safe save: **new folder, checksums, to the disk, rename, and
# only then delete what is old.** A rename is all or nothing on ext4, XFS, Lustre and NFS, though NFS may show it late. Most
# object stores have none. `reaches` lets us kill the save at each state:

# %%
def to_disk(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)  # else a name may survive a power cut, and the bytes not
    os.close(handle)


# %%
def save_by_hand(pieces, folder, step, keep=2, reaches=lambda state: None):
    new = folder / "writing"  # one name, so that the next save clears what was cut off
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    dist.barrier()
    dcp.save(pieces, checkpoint_id=new)
    if dist.get_rank() == 0:
        reaches("written")
        files = {file.name: (file.stat().st_size, zlib.crc32(file.read_bytes())) for file in new.iterdir()}
        (new / "checksums.json").write_text(json.dumps({"version": 1, "ranks": dist.get_world_size(), "files": files}))
        for path in (*new.iterdir(), new):
            to_disk(path)
        reaches("summed")
        number = 1 + max((int(path.name.split("-")[-1]) for path in list_checkpoints(folder)), default=0)
        new.rename(folder / f"step-{step:08d}-save-{number}")  # who goes back saves step 60 after step 100
        to_disk(folder)  # the new name, before an old one goes
        reaches("named")
        for old in list_checkpoints(folder)[keep:]:  # what was saved last stands first
            old.rename(new)  # so that half of an old one has no name
            reaches("old one unnamed")
            shutil.rmtree(new)
    dist.barrier()


# %% [markdown]
# **Break it.** Four runs follow each other in one folder. Each goes on from the newest whole checkpoint, saves twice, and is
# killed in its third save. A column of the picture is a run. Look at the bold frames:

# %%
def train_until_killed(folder, fatal_state):
    def reaches(state):
        if state == fatal_state and step == done + 2:
            os.kill(os.getpid(), signal.SIGKILL)

    run, done = Small(), 0
    if newest_whole(folder):  # whole: all checksums are right
        done = load_newest(pieces := run.pieces(), folder)
        run.take(pieces)
    for step in itertools.count(done):
        run.step(step)
        save_by_hand(run.pieces(), folder, step + 1, reaches=reaches)


# %%
left = {}
for state in ("written", "summed", "named", "old one unnamed"):
    told(train_until_killed, work / "safe", state)
    left[state] = [path.name for path in (work / "safe").iterdir()], newest_whole(work / "safe").name
assert [step_of(work / found) for _, found in left.values()] == [2, 4, 7, 10], "a checkpoint that had its name is lost"
show(draw_left(left, title="What a kill in a save left, by the state that the save had reached"),
     alt="After each of four kills a load finds a whole checkpoint: the one before, or the new one from its name on.")

# %% [markdown]
# **Read it.** After a kill before the rename a load finds the save before it: step 2, step 4. From the rename on it finds the new
# one: step 7, step 10. None of the four kills lost what was to be kept. A kill is no power cut, so `fsync` is not tested here.
# Rank 0 sums all files here, which is slow for terabytes; in the script at the end each rank sums its own.
#
# Do checksums matter? We change one byte of each checkpoint, and load:

# %%
def load(folder):
    return load_newest(Small().pieces(), folder)


numbers = []
changed = damaged_copy(work / "safe", lambda path: numbers.append(change_a_byte(path)))
right, wrong = (run_ranks(load_here, 2, list_checkpoints(folder)[0])[0] for folder in (work / "safe", changed))
print("one byte of one weight changed: {:.5f} is now {:.5f}".format(*numbers[0]))
print("by dcp.load: it loads; losses move by", *(f"{abs(a - b):.1e}" for a, b in zip(right, wrong, strict=True)), "(measured)")
print("by load_newest:", told(load, changed))

# %% [markdown]
# **Read it.** One byte made one weight 256 times as large. `dcp.load` takes it without a word, and the losses hardly
# show it. The checksums refuse it.
#
# ## 4. What: six pieces make the resume exact
#
# A run goes on from six pieces: weights, moments, the **schedule** of its learning rate, the **scaler** of fp16, the **place in
# the data**, and the **random states** of every rank. torchdata's `StatefulDataLoader` knows its place. This run has all six:

# %%
print(inspect.getsource(Run))

# %% [markdown]
# `restore` can forget one of them:

# %%
def pieces_of(run):  # what ranks share is saved once; what a rank has for itself gets a key with its number
    model, optimizer = get_state_dict(run.model, run.optimizer)
    own = {"epoch": run.epoch, "data": run.loader.state_dict(), "random": torch.get_rng_state()}
    return {"model": model, "optimizer": optimizer, "schedule": run.schedule.state_dict(),
            "scaler": run.scaler.state_dict(), f"rank {dist.get_rank()}": own}


def restore(run, pieces, forget):
    own, fresh, optimizer = pieces[f"rank {dist.get_rank()}"], Run(), pieces["optimizer"]
    if forget == "moments":  # of the learning rate, which stands in param_groups, nothing is forgotten
        optimizer = optimizer | {"state": get_state_dict(fresh.model, fresh.optimizer)[1]["state"]}
    set_state_dict(run.model, run.optimizer, model_state_dict=pieces["model"], optim_state_dict=optimizer)
    if forget != "schedule":
        run.schedule.load_state_dict(pieces["schedule"])
    if forget != "scaler":
        run.scaler.load_state_dict(pieces["scaler"])
    if forget != "place in the data":
        run.epoch = own["epoch"]
        run.begin(run.epoch - 1)
        run.loader.load_state_dict(own["data"])
        run.batches = iter(run.loader)
    if forget != "random states":
        torch.set_rng_state(own["random"])  # last: starting a loader draws from it


# %%
STEPS, SAVED = 40, 20


def never_stopped(folder, own_noise):
    run, losses = Run(own_noise), []
    for step in range(1, STEPS + 1):
        losses.append(run.step())
        if step == SAVED:
            save_by_hand(pieces_of(run), folder, step)
    return losses


# %%
def resumed(folder, forget, own_noise):
    run = Run(own_noise)
    load_newest(pieces := pieces_of(run), folder, ranks=dist.get_world_size())
    restore(run, pieces, forget)
    return [run.step() for _ in range(SAVED, STEPS)]


# %% [markdown]
# Four ranks save after step 20 and run on. Then the run is resumed six times. The lower panels show how far the losses are
# from those of the run that never stopped. In an *exact resume* none differs:

# %%
forgotten = ("nothing", "moments", "schedule", "scaler", "place in the data", "random states")
whole = run_ranks(never_stopped, 4, work / "exact", True)[0]
curves = {piece: run_ranks(resumed, 4, work / "exact", piece, True)[0] for piece in forgotten}

# %%
show(draw_forgotten(whole, curves, SAVED, title="Resumed after step 20, one piece forgotten: how many of 20 losses differ", device="4 ranks"),
     alt="Six panels of losses: with nothing forgotten the resumed run lies on the other; each forgotten piece parts from it.")
assert curves["nothing"] == whole[SAVED:], "with all pieces the losses are equal, bit for bit"
assert all(curves[piece] != whole[SAVED:] for piece in forgotten[1:]), "each piece matters"

# %% [markdown]
# **Read it.** With all six pieces no bit of a loss differs. Without any one of the five nearly all differ, and yet each curve still
# falls and looks *healthy*. So compare by `==`, not by eye.
#
# A trap is left. `Run` adds noise to its data, as augmentation does, from a generator seeded by row and epoch. Now the noise comes
# from the global generator of the loader's worker:

# %%
global_noise = run_ranks(never_stopped, 4, work / "global", False)[0]
again = run_ranks(resumed, 4, work / "global", "nothing", False)[0]
differ = sum(a != b for a, b in zip(again, global_noise[SAVED:], strict=True))
print(f"noise from the worker's global generator: {differ} of {STEPS - SAVED} losses differ (measured)")
assert differ > 0, "workers' random states are not in this checkpoint"
shutil.rmtree(work, ignore_errors=True)

# %% [markdown]
# **Read it.** Nothing was forgotten, and still the losses differ. A worker has random states of its own, which this checkpoint
# does not hold. So seed noise by row and epoch. If your run draws from Python's `random`, NumPy or a GPU, save those states, too.
#
# ## Recap
#
# - Save every $\sqrt{2\,d\,M}$. Half or twice of it costs little.
# - Each rank copies its shard to the host and trains on while it is written; $d$ is what training waits.
# - A checkpoint gets its name when it is whole. Checksums tell whether it still is.
# - With all six pieces the losses are equal, bit for bit, on this CPU. A GPU also needs deterministic kernels and
#   collectives, which is not tested here.
#
# ### Where next
#
# [Lesson 16a](16a_when_a_run_breaks.ipynb): who notices a failure, and what restarts the job. The
# [lab](../../labs/advanced/16_runs_that_survive.ipynb) is for both lessons; compare with the
# [solution](../../solutions/advanced/16_runs_that_survive.ipynb). **References.** Daly 2006, *A higher order
# estimate of the optimum checkpoint interval*; [Llama 3](https://arxiv.org/abs/2407.21783);
# [RSC-1](https://arxiv.org/abs/2410.21680); [DCP](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** Put this script after the lines that start `torch.distributed` and make `model`, `optimizer`, `schedule`,
# `loader` and `folder`. The loader is a `StatefulDataLoader` with a stateful sampler; the folder is a `Path` that all ranks see.
#
# - Begin with `step, batches = resume()`; `batches` are the rest of the epoch.
# - Call `save(step)` between steps, and `finish()` once at the end.
# - After each step ask `must_stop()`. If true, save, finish and leave.
#
# The last two saves stay, and every 24th: one a day, if you save each hour. The copy goes to *pinned* host memory, which a GPU
# reaches fastest. The script is tested on two CPU ranks, with kills; its GPU lines are untested.
#
# ```python
# import json, os, shutil, signal, zlib
# from concurrent.futures import ThreadPoolExecutor
# from pathlib import Path
# import torch
# import torch.distributed as dist
# import torch.distributed.checkpoint as dcp
# from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
#
# gpu, rank, ranks = torch.cuda.is_available(), dist.get_rank(), dist.get_world_size()
# stager = DefaultStager(StagingOptions(use_pinned_memory=gpu, use_non_blocking_copy=gpu, use_shared_memory=False, use_async_staging=False))
# writers, thread, under_way = dist.new_group(backend="gloo"), ThreadPoolExecutor(1), None
# asked_to_stop, agreement = [], dist.new_group(backend="gloo")
# signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.append(1))  # torchrun kills --shutdown-timeout (30 s) later
#
#
# def must_stop():  # after each step, on all ranks: what one rank was sent stops all of them
#     told = torch.tensor([float(len(asked_to_stop))])
#     dist.all_reduce(told, group=agreement)
#     return bool(told)
#
#
# def pieces():  # add what else your run goes on with: the epoch of set_epoch, a scaler, other random states
#     weights, moments = get_state_dict(model, optimizer)
#     own = {"data": loader.state_dict(), "random": torch.get_rng_state()} | ({"gpu random": torch.cuda.get_rng_state()} if gpu else {})
#     return {"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), f"rank {rank}": own}
#
#
# def number(path):  # 00000007.step-100 is the seventh save
#     return int(path.name.split(".")[0])
#
#
# def whole():
#     return sorted(folder.glob("*.step-*"), key=number)
#
#
# def sum_of(path):
#     with path.open("rb") as file:
#         found = 0
#         while block := file.read(1 << 24):
#             found = zlib.crc32(block, found)
#     return found
#
#
# def to_disk(path):
#     handle = os.open(path, os.O_RDONLY)
#     os.fsync(handle)
#     os.close(handle)
#
#
# def save(step, keep=2, keep_every=24):
#     global under_way
#     wait()  # one save at a time
#     new = folder / "writing"
#     if rank == 0:
#         shutil.rmtree(new, ignore_errors=True)  # of a save that was cut off
#     dist.barrier(writers)
#     written = dcp.async_save(pieces(), checkpoint_id=new, process_group=writers, async_stager=stager)
#     under_way = thread.submit(publish, written, new, step, keep, keep_every)
#
#
# def publish(written, new, step, keep, keep_every):
#     written.result()  # raises what went wrong in the write
#     own = [*new.glob(f"__{rank}_*"), *([new / ".metadata"] if rank == 0 else [])]
#     sums = new / f"sums-{rank}-of-{ranks}.json"
#     sums.write_text(json.dumps({path.name: sum_of(path) for path in own}))
#     to_disk(sums)
#     dist.barrier(writers)
#     if rank == 0:
#         to_disk(new)
#         old = whole()
#         new.rename(folder / f"{number(old[-1]) + 1 if old else 1:08d}.step-{step}")  # what is whole gets its name
#         to_disk(folder)
#         for path in old[: max(0, len(old) + 1 - keep)]:
#             if number(path) % keep_every:
#                 shutil.rmtree(path.rename(new))  # and half of an old one has none
#
#
# def wait():  # raises what went wrong in the thread
#     if under_way:
#         under_way.result()
#
#
# def finish():  # after the last save
#     wait()
#     thread.shutdown()
#     stager.close()
#
#
# def is_whole(path):  # on all ranks or on none
#     sums, answers = path / f"sums-{rank}-of-{ranks}.json", [None] * ranks
#     listed = json.loads(sums.read_text()) if sums.exists() else {"sums": None}
#     right = all((path / name).exists() and sum_of(path / name) == found for name, found in listed.items())
#     dist.all_gather_object(answers, right, group=writers)
#     return all(answers)
#
#
# def resume():
#     box = [whole()]
#     dist.broadcast_object_list(box, group=writers)  # what rank 0 sees counts for all
#     if not box[0]:
#         return 0, iter(loader)
#     last = next((path for path in reversed(box[0]) if is_whole(path)), None)
#     if last is None:
#         raise RuntimeError(f"No checkpoint of {folder} is whole and of {ranks} ranks.")
#     for path in box[0][box[0].index(last) + 1 :] if rank == 0 else ():  # aside, or they would count among the last two
#         print(f"{path.name} is damaged, or of other ranks: put aside")
#         path.rename(folder / f"aside-{path.name.replace('.', '-')}")
#     dcp.load(found := pieces(), checkpoint_id=last)
#     set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
#     schedule.load_state_dict(found["schedule"])
#     own = found[f"rank {rank}"]
#     loader.load_state_dict(own["data"])
#     batches = iter(loader)
#     torch.set_rng_state(own["random"])  # last: starting a loader draws from it
#     if gpu:
#         torch.cuda.set_rng_state(own["gpu random"])
#     return int(last.name.split("-")[-1]), batches
# ```
#
# **Does it work?** Train 20 steps twice without a stop. If the losses are not equal by `==`, something is unseeded, or a kernel or
# collective adds in changing order. For the test set `torch.use_deterministic_algorithms(True)`, `CUBLAS_WORKSPACE_CONFIG=:4096:8`
# and a deterministic attention. Once the losses are equal, save at step 10, start again on as many ranks, and compare
# losses 11 to 20.
#
# **With accelerate.** `model`, `optimizer`, `schedule` and `loader` are those before `prepare`. Give the loader a `generator=` of
# its own; else its start draws from the random state that dropout goes on with. This save blocks, has no checksums, and is
# tested in one process.
#
# ```python
# import os
# import shutil
# from pathlib import Path
# from accelerate import Accelerator
# from accelerate.utils import DataLoaderConfiguration
#
# accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
# model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
# folder = Path("saves")
#
#
# def to_disk(path):
#     handle = os.open(path, os.O_RDONLY)
#     os.fsync(handle)
#     os.close(handle)
#
#
# def save(step, keep=2):  # weights, moments, schedule, scaler, place in the data, random states
#     new, old = folder / "writing", sorted(folder.glob("*.step-*"))
#     if accelerator.is_main_process:
#         shutil.rmtree(new, ignore_errors=True)
#     accelerator.wait_for_everyone()
#     accelerator.save_state(new)
#     accelerator.wait_for_everyone()
#     if accelerator.is_main_process:
#         for path in (*new.rglob("*"), new):
#             to_disk(path)
#         number = 1 + (int(old[-1].name.split(".")[0]) if old else 0)
#         new.rename(folder / f"{number:08d}.step-{step}")
#         to_disk(folder)  # the new name, before an old one goes
#         for path in old[: max(0, len(old) + 1 - keep)]:
#             shutil.rmtree(path.rename(new))
#     accelerator.wait_for_everyone()
#
#
# def resume():
#     whole = sorted(folder.glob("*.step-*"))
#     if whole:
#         accelerator.load_state(whole[-1])
#     return int(whole[-1].name.split("-")[-1]) if whole else 0
# ```
