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
# **Promise.** You compute how often to save. You end training with `kill -9` at five points of a save, and load a whole
# checkpoint each time. You resume four ranks on this CPU so that the next 20 losses are the same *to the last bit*.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 55, and 80 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | about a minute on two CPU cores |
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
from utils import Evidence, Transformer, TransformerConfig, check, model_shape, run_ranks, scratch_folder, show
from utils.catalog import link
from utils.planner.failing_runs import RunPlan, failing_runs
from utils.planner.goodput import DAY, working_share
from utils.parallel import list_checkpoints, step_of
from utils.lessons.lesson_16.attempts import change_a_byte, damaged_copy, told
from utils.lessons.lesson_16.checkpoint_files import draw_files, draw_left
from utils.lessons.lesson_16.exact_run import Run, mean_of_ranks
from utils.lessons.lesson_16.failure_logs import FAILURE_LOGS
from utils.lessons.lesson_16.failures import draw_days, draw_forgotten, draw_goodput, one_run

# %% [markdown]
# New words stand in the [glossary](../00_glossary.ipynb).
#
# ## 1. How often: between too soon and too late
#
# When one GPU fails, a synchronous job stops. The work since the last save is *lost*, and the job is *restarted*. Here three
# days of work meet the same failures, with three intervals. Look at where each row ends; of 200 runs the one nearest to the
# means is drawn:

# %% jupyter={"source_hidden": true}
HOUR = 3600.0
runs = {hours: [one_run(3, hours * HOUR, 300.0, HOUR / 2, 8 * HOUR, seed) for seed in range(200)] for hours in (0.25, 1.5, 6)}
days = np.array([[run[-1].end_seconds / DAY for run in those] for those in runs.values()])
drawn, lanes = abs(days - days.mean(1, keepdims=True)).sum(0).argmin(), {}
for (hours, those), mean in zip(runs.items(), days.mean(1), strict=True):
    saving, lost = (sum(span.end_seconds - span.start_seconds for span in those[drawn] if span.kind == kind) / HOUR for kind in ("saving", "lost"))
    lanes[f"every {hours:g} h: {saving:.1f} h saving, {lost:.1f} h lost"] = those[drawn]
    print(f"every {hours:g} h: {mean:.2f} days, mean of 200 runs (simulated)")
show(draw_days(lanes, title="Failures every 8 h on average, save 5 min, restart 30 min"),
     alt="Three runs: the one with frequent saves spends a day on saving, the one with rare saves loses more than a day, the middle one ends first.")

# %% [markdown]
# **Read it.** Every 15 minutes costs a day of saving, every 6 hours more than a day of lost work. Of these three, 1.5 hours ends
# first. How often do failures come? Published logs, as failures per 1,000 *node-days* (a node has 8 GPUs):

# %% jupyter={"source_hidden": true}
gpus, rows = 256, []
for log in FAILURE_LOGS:
    hours = log.hours_between(gpus)
    rows.append({"log": log.name, "per 1,000 node-days": f"{log.failures_per_1000_node_days:.1f}",
                 "hours between two": f"{hours:.0f}", "failures in 30 days": f"{24 * 30 / hours:.1f}"})
display(pd.DataFrame(rows).style.hide().set_caption(f"Rates from published numbers; hours and failures of {gpus} GPUs predicted from them"))

# %% [markdown]
# **Read it.** In 30 days a job on 256 GPUs would stop about 4 times by one log and 23 times by another. So count
# what stops *your* jobs. Here we use 3.8 and 24.
#
# **Goodput** is the share of wall time that is work which lasted. A save costs $d$ of training time, and failures come every $M$
# on average (the *mean time between failures*). With $t$ of work between saves, saving takes about $d/t$ of the time, and
# failures lose about $t/(2M)$, half an interval each. The sum is least at
#
# $$t=\sqrt{2\,d\,M}$$
#
# (Young 1974). Daly (2006) gives the goodput, with a restart of $R$:
#
# $$\text{goodput} = \frac{t}{M\,e^{R/M}\,(e^{(t+d)/M}-1)}$$
#
# `working_share` is this formula. The folded cell simulates whole runs, to test it:

# %%
bet = None if my_bet_minutes is ... else 60.0 * my_bet_minutes


def mean_seconds(rate, nodes):  # M: a rate is failures per 1,000 node-days
    return 1000 * DAY / (rate * nodes)


def young(save, mean):
    return (2 * save * mean) ** 0.5


rows = []
for rate, save in itertools.product((3.8, 24.0), (30.0, 60.0, 120.0)):
    mean = mean_seconds(rate, nodes=32)
    best = young(save, mean)
    tried = {"goodput": best, "at half": best / 2, "at twice": 2 * best} | ({f"your bet, {bet / 60:g} min": bet} if bet else {})
    shares = {name: f"{working_share(t, save, 900.0, mean):.1%}" for name, t in tried.items()}
    rows.append({"failures per 1,000 node-days": f"{rate:g}", "save, s": f"{save:g}", "best interval, min": f"{best / 60:.0f}"} | shares)
display(pd.DataFrame(rows).style.hide().set_caption("Predicted: 256 GPUs, 15 min to restart (assumed)"))

# %% jupyter={"source_hidden": true}
plan = RunPlan(work_seconds=30 * DAY, interval_seconds=HOUR, save_seconds=60.0, restart_seconds=900.0, nodes=32)
simulated, formula = {}, {}
for rate in (3.8, 24.0):
    name, mean, at_rate = f"{rate:g} failures per 1,000 node-days", mean_seconds(rate, 32), replace(plan, failures_per_1000_node_days=rate)
    formula[name] = {t: working_share(t, 60.0, 900.0, mean) for t in np.geomspace(90, 2 * DAY, 100)}
    simulated[name] = {t: failing_runs(replace(at_rate, interval_seconds=t), 1000).goodput for t in (180, 900, HOUR, 4 * HOUR, DAY)}
    apart = max(abs(found.mean() - working_share(t, 60.0, 900.0, mean)) for t, found in simulated[name].items())
    print(f"{name}: mean of 1,000 runs and formula at most {100 * apart:.2f} points apart, at five intervals")
    assert apart < 0.005, "formula and runs differ"
show(draw_goodput(simulated, formula, title="1,000 runs of 30 days of work, 256 GPUs: save 60 s, restart 15 min", bet_seconds=bet),
     alt="Goodput over the interval: flat around its best at both rates, and falling on both sides; your bet, if any, as a line.")

# %% [markdown]
# **Read it.** This answers the bet: every 61 minutes at the high rate, every 154 at the low one. Half or twice the best interval
# costs 1.1 points at most in this table, so a rough guess of $M$ is enough. Formula and simulation both take failures to be
# independent.
#
# **Question.** A save takes a quarter of its former time. By which factor does the best interval change?

# %%
interval_factor = ...
check("16.interval_factor", interval_factor)

# %% [markdown]
# ## 2. How: each rank writes its shard, and training goes on
#
# With FSDP2 each rank holds a shard of the weights and of Adam's moments. With PyTorch's distributed checkpoint (**DCP**) each
# rank writes its own file, and `.metadata` says where each piece lies. Below four ranks save and two load. `run_ranks(f, 4)`
# calls `f` in four processes:

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
    print(f"2 ranks, {'all loaded' if moments else 'a fresh optimizer'}: 3 losses, up to {apart:.1e} from those of the 4 ranks (measured)")
    assert (apart < 1e-5) == moments, "two ranks go on where four stopped, with all pieces alone"

# %%
show(draw_files(work / "four", "model.embed.weight", 2, title="One tensor of the checkpoint: written by 4 ranks, needed by 2"),
     alt="Four ranks write rows of one tensor into a file each; two ranks need rows from two files each, as .metadata tells them.")

# %% [markdown]
# **Read it.** Of this tensor each of two ranks needs rows from two files: DCP *reshards*. All loaded, three losses lie within a
# millionth of those of the four ranks; with a fresh optimizer more than a thousand times as far.
#
# `dcp.save` returns when all is written. `dcp.async_save` copies the shard to host memory and returns, and a thread writes the
# copy. Do the files hold the weights of the call?

# %%
def saved_meanwhile(folder):
    run, group = Small(hidden=256), dist.new_group(backend="gloo")  # a group of its own, for the thread
    run.step(0)
    under_way = dcp.async_save(run.pieces(), checkpoint_id=folder / "async", process_group=group)
    is_whole = (folder / "async/.metadata").exists()  # it is written last
    right = run.step(1)  # changes all weights, before any wait
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
# **Read it.** The call returned before its files were whole, yet they hold the weights *of the call*.
#
# ### The scenario as asked: a checkpoint strategy
#
# *"175B on 64 A100: what do we save, where, how often?"* The code above saves 12 bytes a parameter: fp32 weights and Adam's two
# fp32 moments. Each GPU copies a 64th to *pinned* host memory (the plain call above pins none; Monday's script does), and a
# thread writes to a store that all hosts see.
#
# An asynchronous save costs this copy, and the time that the writing thread takes from the steps: they share Python's lock (the
# GIL). Assumed are steps a tenth slower and a store of 10 GB/s, both halved and doubled. Each way to save gets its own
# $\sqrt{2\,d\,M}$:

# %%
size = 12 * model_shape("gpt-3-175b").parameter_count
copied = size / 64 / (link("PCIe 4 x16").sustained_bytes_per_second / 2)  # two GPUs share a link
print(f"{size / 1e12:.2f} TB a checkpoint; the copy takes {copied:.1f} s and {size / 8 / 1e9:.0f} GB of each host's memory (predicted)")
rows = []
for rate, store in itertools.product((3.8, 24.0), (5e9, 1e10, 2e10)):
    mean, written = mean_seconds(rate, nodes=8), size / store
    costs = {"dcp.save": written} | {f"async_save, steps {slow:.0%} slower": copied + slow * written for slow in (0.05, 0.1, 0.2)}
    row = {"failures per 1,000 node-days": f"{rate:g}", "store, GB/s": f"{store / 1e9:g}", "write, s": f"{written:.0f}"}
    shares = []
    for name, d in costs.items():
        back = 900 + written + (written if name != "dcp.save" else 0)  # asynchronously what was still being written is lost, too
        shares.append(working_share(young(d, mean), d, back, mean))
        row[name] = f"{young(d, mean) / HOUR:.1f} h: {shares[-1]:.1%}"
    assert min(shares[1:]) > shares[0], "an asynchronous save is better in each row"
    rows.append(row)
os.makedirs(here.root / "build/lesson-16", exist_ok=True)
pd.DataFrame(rows).to_csv(here.root / "build/lesson-16/how_often_175b.csv", index=False)
print("the table below: build/lesson-16/how_often_175b.csv")
display(pd.DataFrame(rows).style.hide().set_caption(
    f"Best interval: goodput ({Evidence.PREDICTED}). Assumed: store, slowdown, 15 min to restart, a read as long as a write, no time for checksums"))

# %% [markdown]
# **Read it.** For this run `dcp.async_save` at its own best interval beats `dcp.save` at its own in each row: by about 0.5 to 1.3
# points at the low rate, 1 to 3 at the high one. With steps a tenth slower and 10 GB/s: save every 3.2 or 1.3 h. The slowdown
# is not measured here.
#
# ## 3. A save that is cut off: what is whole gets its name last
#
# The simplest program saves into the same folder each time. What is left if it is killed halfway? DCP asks a **planner** for
# every piece that it writes; this one kills rank 1 at its fifth. `told` runs two ranks, and says what came of it.

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
# **Read it.** In the same folder one kill destroyed *both* checkpoints. In a new one the old stays whole, and the half one, without
# its `.metadata`, is refused.
#
# Two things are missing. DCP brings its files to the disk, but not the folder's list of them. And nothing tells whether a byte has
# changed. So build the safe save: **new folder, checksums, to the disk, rename, and only then delete what is old.** It needs a
# file system whose rename is all or nothing; object stores are not shown here.

# %%
def to_disk(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)  # else a name may survive a power cut, and the bytes not
    os.close(handle)


# %%
def save_by_hand(pieces, folder, step, keep=2, reaches=lambda state: None, planner=None):
    new = folder / "writing"  # one name, so that the next save clears what was cut off
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    dist.barrier()
    dcp.save(pieces, checkpoint_id=new, planner=planner)
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
# A load takes the newest checkpoint whose checksums are right, if each has a readable `checksums.json`:

# %%
def newest_whole(folder):
    for path in list_checkpoints(folder):  # what was saved last stands first
        sums = json.loads((path / "checksums.json").read_text())["files"]
        if all((path / name).exists() and zlib.crc32((path / name).read_bytes()) == found for name, (_, found) in sums.items()):
            return path


def load_newest(pieces, folder):
    dcp.load(pieces, checkpoint_id=(path := newest_whole(folder)))
    return step_of(path)


# %% [markdown]
# **Break it.** Five runs follow each other in one folder. Each goes on from the newest whole checkpoint, saves twice, and is
# killed in its third save, the first while files are written, the others after. A column is a run:

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
        planner = KilledAt() if fatal_state == "half written" and step == done + 2 else None
        save_by_hand(run.pieces(), folder, step + 1, reaches=reaches, planner=planner)


# %%
left = {}
for state in ("half written", "written", "summed", "named", "old one unnamed"):
    told(train_until_killed, work / "safe", state)
    left[state] = [path.name for path in (work / "safe").iterdir()], newest_whole(work / "safe").name
assert [step_of(work / found) for _, found in left.values()] == [2, 4, 6, 9, 12], "a checkpoint that had its name is lost"
show(draw_left(left, title="What a kill left, by the state of the save; bold: what a load finds"),
     alt="After each of five kills a load finds a whole checkpoint: the one before, or the new one from its name on.")

# %% [markdown]
# **Read it.** Before the rename a load finds the save before, from the rename on the new one. A kill is no power cut: `fsync` is
# not tested here. Now we change one byte of the newest checkpoint:

# %%
def load(folder):
    return load_newest(Small().pieces(), folder)


numbers = []
changed = damaged_copy(work / "safe", lambda path: numbers.append(change_a_byte(path)))
right, wrong = (run_ranks(load_here, 2, list_checkpoints(folder)[0])[0] for folder in (work / "safe", changed))
print("one byte of one weight changed: {:.5f} is now {:.5f}".format(*numbers[0]))
print("by dcp.load: it loads; losses were", *(f"{a:.4f}" for a in right), "and are", *(f"{b:.4f}" for b in wrong), "(measured)")
print("by load_newest: it loads step", told(load, changed))

# %% [markdown]
# **Read it.** `dcp.load` loads the changed byte. With checksums the load lands on the save before: this is why two are kept.
#
# ## 4. What: the six pieces of an exact resume
#
# Weights, moments (with Adam's count of steps), the **schedule** of the learning rate, the **scaler** of fp16, the **place in the
# data** (which torchdata's `StatefulDataLoader` knows), and the **random states** of every rank. This run has all six; `restore`
# can forget one:

# %%
print(inspect.getsource(Run))

# %%
def pieces_of(run):  # what ranks share is saved once; what a rank has for itself gets a key with its number
    model, optimizer = get_state_dict(run.model, run.optimizer)
    own = {"epoch": run.epoch, "data": run.loader.state_dict(), "random": torch.get_rng_state()}
    return {"model": model, "optimizer": optimizer, "schedule": run.schedule.state_dict(),
            "scaler": run.scaler.state_dict(), f"rank {dist.get_rank()}": own}


def restore(run, pieces, forget):
    own, fresh, optimizer = pieces[f"rank {dist.get_rank()}"], Run(), pieces["optimizer"]
    if forget == "moments":  # zeros and Adam's step 1 instead; the learning rate stands in param_groups, and is kept
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
STEPS, SAVED = 42, 22


def never_stopped(folder, own_noise):
    run, losses = Run(own_noise), []
    for step in range(1, STEPS + 1):
        losses.append(run.step())
        if step == SAVED:
            save_by_hand(pieces_of(run), folder, step)
    return losses


def resumed(folder, forget, own_noise):
    run = Run(own_noise)
    load_newest(pieces := pieces_of(run), folder)
    restore(run, pieces, forget)
    return [run.step() for _ in range(SAVED, STEPS)]


# %% [markdown]
# Four ranks save after step 22 and run on. Then the run is resumed six times. The lower panels show how far its losses are from
# those of the run that never stopped. In an *exact resume* none differs:

# %%
forgotten = ("nothing", "moments", "schedule", "scaler", "place in the data", "random states")
whole = run_ranks(never_stopped, 4, work / "exact", True)[0]
curves = {piece: run_ranks(resumed, 4, work / "exact", piece, True)[0] for piece in forgotten}

# %%
show(draw_forgotten(whole, curves, SAVED, title="Resumed after step 22, one piece forgotten: how many of 20 losses differ", device="4 ranks"),
     alt="Six panels of losses: with nothing forgotten the resumed run lies on the other; each forgotten piece parts from it.")
assert curves["nothing"] == whole[SAVED:], "with all pieces the losses are equal, bit for bit"
assert all(curves[piece] != whole[SAVED:] for piece in forgotten[1:]), "each piece matters"

# %% [markdown]
# **Read it.** With all six pieces no bit of the 20 losses differs. Without any one of the last five, losses differ. Compare
# by `==`, and not the first loss alone: lost moments show in the second, a lost schedule or scaler later.
#
# A trap is left. `Run` adds noise to its data from a generator seeded by row and epoch. Now it comes from the global generator of
# the loader's worker:

# %%
global_noise, twice = (run_ranks(never_stopped, 4, work / name, False)[0] for name in ("global", "twice"))
again = run_ranks(resumed, 4, work / "global", "nothing", False)[0]
for name, losses in (("never stopped, a second time", twice[SAVED:]), ("resumed, nothing forgotten", again)):
    differ = sum(a != b for a, b in zip(losses, global_noise[SAVED:], strict=True))
    print(f"noise from the worker's global generator, {name}: {differ} of {STEPS - SAVED} losses differ (measured)")
assert twice == global_noise and again != global_noise[SAVED:], "workers' random states are not in this checkpoint"
shutil.rmtree(work, ignore_errors=True)

# %% [markdown]
# **Read it.** Without a stop the run repeats itself; resumed, it differs: a worker has random states of its own, which this
# checkpoint does not hold. So seed noise by row and epoch. If your run draws from Python's `random`, NumPy or a GPU, save those
# states, too.
#
# ## Recap
#
# - Save every $\sqrt{2\,d\,M}$; $d$ is all training time that a save costs. In our table half or twice this interval cost 1.1 points at most.
# - Each rank copies its shard to the host and trains on while it is written. For 175B on 64 A100, with steps 5 to 20% slower
#   during a write (assumed), this beats `dcp.save` in each predicted row.
# - A checkpoint gets its name when it is whole. Checksums tell whether it still is.
# - With all six pieces, and noise seeded by row and epoch, 20 losses were equal bit for bit on this CPU. A GPU also needs
#   deterministic kernels and collectives, which is not tested here.
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
# `loader` (a `StatefulDataLoader` with a stateful sampler) and `folder` (a `Path` that all ranks see).
#
# - Begin with `step, batches = resume()`; `batches` are the rest of the epoch `loader.sampler.epoch`.
# - Call `save(step)` between steps, and `finish()` at the end.
# - After each step ask `must_stop()`. If true, save, finish and leave. Give `torchrun` a `--shutdown-timeout` longer than two saves,
#   for one may be under way: by default it kills after 30 s.
#
# The last two saves stay, and every 24th. On another number of ranks weights, moments and schedule go on, but the epoch begins
# again: no exact resume. Tested on two CPU ranks, with kills, and resumed on one and three; the GPU lines are untested.
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
# signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.append(1))
#
#
# def must_stop():  # after each step, on all ranks: what one rank was sent stops all of them
#     told = torch.tensor([float(len(asked_to_stop))])
#     dist.all_reduce(told, group=agreement)
#     return bool(told)
#
#
# def pieces():  # add what else your run goes on with: a scaler, other random states
#     weights, moments = get_state_dict(model, optimizer)
#     own = {"data": loader.state_dict(), "random": torch.get_rng_state()} | ({"gpu random": torch.cuda.get_rng_state()} if gpu else {})
#     own["epoch"] = getattr(loader.sampler, "epoch", 0)  # the sampler's own state lacks it
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
# def is_whole(path):  # on all ranks or on none; each checks its share, whatever number of ranks saved
#     files, answers = sorted(path.glob("sums-*.json")), [None] * ranks
#     right = bool(files) and all(file.stem.endswith(f"-of-{len(files)}") for file in files)
#     try:
#         for file in files[rank::ranks]:
#             right = right and all(sum_of(path / name) == found for name, found in json.loads(file.read_text()).items())
#     except (OSError, ValueError):  # a file is missing, or the sums are damaged
#         right = False
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
#         raise RuntimeError(f"No checkpoint of {folder} is whole.")
#     for path in box[0][box[0].index(last) + 1 :] if rank == 0 else ():  # aside, or they would count among the last two
#         print(f"{path.name} is damaged: put aside")
#         path.rename(folder / f"aside-{path.name.replace('.', '-')}")
#     found, step = pieces(), int(last.name.split("-")[-1])
#     is_exact = len(list(last.glob("sums-*.json"))) == ranks
#     if not is_exact:
#         found.pop(f"rank {rank}")  # a rank's own place and random states mean nothing to another number of ranks
#     dcp.load(found, checkpoint_id=last)
#     set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
#     schedule.load_state_dict(found["schedule"])
#     if not is_exact:
#         print(f"{last.name} is of another number of ranks: the epoch begins again, with new random states")
#         return step, iter(loader)
#     own = found[f"rank {rank}"]
#     if hasattr(loader.sampler, "set_epoch"):
#         loader.sampler.set_epoch(own["epoch"])  # before the loader starts: the order hangs on it
#     loader.load_state_dict(own["data"])
#     batches = iter(loader)
#     torch.set_rng_state(own["random"])  # last: starting a loader draws from it
#     if gpu:
#         torch.cuda.set_rng_state(own["gpu random"])
#     return step, batches
# ```
#
# **Does it work?** Train 20 steps twice without a stop, with `torch.use_deterministic_algorithms(True)`,
# `CUBLAS_WORKSPACE_CONFIG=:4096:8` and a deterministic attention, until the losses are equal by `==`. Then save at step 10, start
# again on as many ranks, and compare losses 11 to 20.
#
# **With accelerate.** `model`, `optimizer`, `schedule` and `loader` are those before `prepare`. Give the loader a `generator=` of its
# own; else its start draws from the random state that dropout goes on with. No checksums; tested in one process.
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
