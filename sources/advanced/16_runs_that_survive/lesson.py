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
# **The question.** What must a run save, how, and how often, so that a failure at any moment takes the time since the last
# save and nothing else?
#
# **Promise.** You compute the interval, end training with `kill -9` at random moments and lose no checkpoint, and resume
# four ranks so that every later loss is the same *to the last bit*. ([Lesson 16a](16a_when_a_run_breaks.ipynb) is about the
# moment of the failure: who notices, and what starts the job again.)
#
# | minutes | hardware | runs |
# |---|---|---|
# | 55, and 80 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | half a minute of computing on two CPU cores |
#
# ## A bet
#
# You train a 70B model on 256 GPUs for 30 days. A save stops the training for one minute. Every how many minutes do you save?

# %%
my_bet_minutes = 30

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
import threading
import time
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
from utils import Batch, Cluster, Evidence, Plan, RankError, Span, Transformer, TransformerConfig, check, format_bytes, format_seconds
from utils import export, model_shape, run_ranks, scratch_folder, search, show
from utils.catalog import link
from utils.planner import plan_name
from utils.planner.failing_runs import RunPlan, failing_runs
from utils.planner.goodput import DAY, best_interval_seconds, checkpoint_bytes, working_share
from utils.parallel import load_newest, list_checkpoints, newest_whole, step_of
from utils.lessons.lesson_16.attempts import change_a_byte, damaged_copy, lose_a_rank, told
from utils.lessons.lesson_16.exact_run import Run, mean_of_ranks
from utils.lessons.lesson_16.failure_logs import FAILURE_LOGS, poisson_interval
from utils.lessons.lesson_16.failures import draw_days, draw_forgotten, draw_goodput

# %% [markdown]
# New words stand in the [glossary](../00_glossary.ipynb).
#
# ## 1. How often
#
# A synchronous job stops when one GPU does. Then the work since the last save is *lost*, and the job is *restarted*. Here one
# run of three days of work meets the same failures under three save intervals:

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


lanes = {}
for hours in (0.25, 1.5, 6):
    runs = [one_run(3, hours * HOUR, 300.0, HOUR / 2, 8 * HOUR, seed) for seed in range(200)]
    lanes[f"every {hours:g} h"] = runs[1]
    print(f"every {hours:g} h: {np.mean([run[-1].end_seconds for run in runs]) / DAY:.2f} days, mean of 200 runs (simulated)")
show(draw_days(lanes, title="Failures every 8 h on average; save 5 min, restart 30 min"),
     alt="Three runs: frequent saves take a quarter of the time, rare saves lose whole hours, the middle one ends first.")

# %% [markdown]
# **Read it.** Saves every 15 minutes take a quarter of the time; saves every 6 hours lose up to 6 hours at a failure. The best
# lies between, also on the mean of 200 runs.
#
# It depends on the mean time between failures, which published logs give. A count (Llama 3: 419 in 54 days) is a sample: the
# **exact Poisson interval** holds the rates under which such a count is no surprise, if failures come independently.

# %% jupyter={"source_hidden": true}
gpus, rows = 256, []
for log in FAILURE_LOGS:
    hours, count = log.hours_between(gpus), log.failures
    spread = [f"{hours * count / mean:.0f}" for mean in reversed(poisson_interval(count))] if count else ["no count published"]
    rows.append({"log": log.name, "per 1,000 node-days": f"{log.failures_per_1000_node_days:.1f}", "hours between two": f"{hours:.0f}",
                 "its 95% interval": " to ".join(spread), "failures in 30 days": f"{24 * 30 / hours:.1f}"})
display(pd.DataFrame(rows).style.hide()
        .set_caption(f"Rates from published numbers, nodes of 8 GPUs; hours and failures of {gpus} GPUs predicted from them"))

# %% [markdown]
# **Read it.** The count leaves 10% of doubt, and the three rates lie six times apart. Also in *one* cluster (RSC-1) what is
# counted, failed nodes or stopped jobs, changes the rate 3.6 times. Count what stops *your* jobs. Used below are 3.8 and 24.
#
# **Goodput** is the share of wall time that is work which lasted. Let a save take $d$, a restart $R$, and let failures come
# every $M$ on average. With a save after each $t$ of work, saves cost $d/t$, and a failure loses half an interval: $t/2M$.
# The sum is least at $t=\sqrt{2\,d\,M}$ (Young 1974). Daly (2006) also counts failures during saves and restarts:
#
# $$\text{goodput} = \frac{t}{M\,e^{R/M}\,(e^{(t+d)/M}-1)}$$
#
# `working_share` is this formula, `best_interval_seconds` its best $t$, and `failing_runs` draws 1,000 runs at once. All
# assume that another node is at hand.

# %%
plan = RunPlan(work_seconds=30 * DAY, interval_seconds=HOUR, save_seconds=60.0, restart_seconds=900.0, nodes=32)
simulated, formula = {}, {}
for rate in (3.8, 24.0):
    at_rate, name = replace(plan, failures_per_1000_node_days=rate), f"{rate:g} failures per 1,000 node-days"
    best, share = best_interval_seconds(60.0, at_rate.mean_seconds), lambda t: working_share(t, 60.0, 900.0, at_rate.mean_seconds)
    formula[name] = {t: share(t) for t in np.geomspace(90, 2 * DAY, 100)}
    simulated[name] = {t: failing_runs(replace(at_rate, interval_seconds=t), 1000).goodput for t in (180, 900, HOUR, 4 * HOUR, DAY)}
    assert all(abs(found.mean() - share(t)) < 0.005 for t, found in simulated[name].items()), "the formula misses the simulation"
    print(f"{name} (predicted): best every {best / 60:.0f} min (Young: {np.sqrt(2 * 60 * at_rate.mean_seconds) / 60:.0f}), goodput "
          f"{share(best):.1%}; at half and twice {share(best / 2):.1%}; your bet, every {my_bet_minutes:g} min: {share(60.0 * my_bet_minutes):.1%}")
show(draw_goodput(simulated, formula, title="30 days on 256 GPUs: 60 s for a save, 15 min to restart (assumed)"),
     alt="Goodput over the interval: flat around its best at both rates, and falling on both sides.")

# %% [markdown]
# **Read it.** Every simulated mean lies within half a percentage point of the formula. The top is flat: half or twice the
# best interval costs less than one point. At the best a failure still loses half an interval: 77 or 30 minutes. Only a
# quicker save makes that minutes.
#
# **Question.** A save now takes a quarter of its former time. By which factor does the best interval change (Young)?

# %%
interval_factor = ...
check("16.interval_factor", interval_factor)

# %% [markdown]
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
sizes = [file.stat().st_size for file in (work / "four").glob("*.distcp")]
print(f"12 bytes a parameter, a quarter each: {format_bytes(3 * parameters)} (predicted);", *map(format_bytes, sizes), "(measured)")
assert max(sizes) < 1.15 * 3 * parameters, "each rank writes its own shard, and little more"

# %% [markdown]
# **Read it.** Weights and two moments in fp32 make 12 bytes a parameter, divided by the ranks. Two ranks read the pieces
# of four: DCP *reshards*. Sums in another order change two losses in the seventh digit, where fp32 ends.
#
# `dcp.save` blocks until all is written. `dcp.async_save` copies to host memory, and a thread writes. What *blocks* is
# the save time $d$ of section 1. Is the copy safe, if training goes on while the thread writes?

# %%
def saved_meanwhile(folder):
    run, group, whole = Small(hidden=512), dist.new_group(backend="gloo"), {}  # a group of its own, for the thread
    run.step(0)
    dcp.save(run.pieces(), checkpoint_id=folder / "save")
    whole["dcp.save"] = (folder / "save/.metadata").exists()  # it is written last
    under_way = dcp.async_save(run.pieces(), checkpoint_id=folder / "async", process_group=group)
    whole["dcp.async_save"] = (folder / "async/.metadata").exists()
    right = run.step(1)  # changes all weights, while the thread writes
    under_way.result()  # waits, and raises what went wrong in the thread
    again = Small(hidden=512)
    dcp.load(pieces := again.pieces(), checkpoint_id=folder / "async")
    again.take(pieces)
    return whole, right, again.step(1), run.step(1)


whole, right, loaded, later = run_ranks(saved_meanwhile, 4, work)[0]
print("checkpoint whole when the call returned:", whole)
print(f"loss of step 1: {right:.7f}; from the asynchronous checkpoint {loaded:.7f}; from later weights {later:.7f}")
assert right == loaded != later, "the copy holds the weights of the call"

# %% [markdown]
# **Read it.** The call returned before its files were whole, and they hold the weights *of the call*. Wait for `.result()`
# before the next save, and before you rename: an error of the thread shows only there.
#
# ### The scenario as asked: a checkpoint strategy
#
# *"175B on 64 A100: what do we save, where, how often?"* Saved are 14 bytes a parameter (bf16 weights; their fp32 master copy
# and two moments), each once in any layout. The copy passes PCIe, the write each node's port and the store. Two rates are
# assumed: the store's, halved and doubled (Meta's sustains 2 TB/s, [arXiv:2407.21783](https://arxiv.org/abs/2407.21783);
# published), and PCIe's, in full or an eighth of it, as for memory that is not pinned. A read takes as long as a write.

# %%
model, cluster, batch = model_shape("gpt-3-175b"), Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=1536, sequence_length=2048)
layout, size, rows = search(model, cluster, batch).best, checkpoint_bytes(model, Plan()), []
files = export(model, cluster, layout.plan, batch).write(here.root / "build" / "lesson-16" / "gpt-3-175b")
print(f"# written to build/lesson-16/gpt-3-175b: {len(files)} files for {plan_name(layout)}")
copied = size / 64 / link("PCIe 4 x16").link_bytes_per_second
print(f"{size / 1e12:.2f} TB a checkpoint; {size / 8 / 1e9:.0f} GB of host memory a node for the copy, which takes {copied:.1f} s "
      "at the full rate of PCIe (predicted)")

# %%
for rate, store in itertools.product((3.8, 24.0), (5e9, 1e10, 2e10)):
    mean = replace(plan, nodes=8, failures_per_1000_node_days=rate).mean_seconds
    written = max(size / 8 / link("Ethernet 100G").link_bytes_per_second, size / store)
    row = {"failures per 1,000 node-days": f"{rate:g}", "store, GB/s": f"{store / 1e9:g}", "whole after, s": f"{written:.0f}"}
    for how, blocks in {"dcp.save": written, "async_save": copied, "async_save, slow copy": 8 * copied}.items():
        every = max(best_interval_seconds(blocks, mean), written)  # a save must be whole before the next begins
        away = 900 + written + (written - blocks)  # restart, read; what was still being written is lost
        best, at_45_minutes = (working_share(t, blocks, away, mean) for t in (every, 2700.0))
        row[f"{how}: every, goodput"] = f"{format_seconds(every)}, {best:.1%}"
        assert blocks == written or best - at_45_minutes < 0.002, "asynchronously, 45 minutes are good enough everywhere"
    rows.append(row)
display(pd.DataFrame(rows).style.hide().set_caption(f"{Evidence.PREDICTED}; 15 minutes to restart (assumed)"))

# %% [markdown]
# **Read it.** The answer in one breath: all 14 bytes, by `dcp.async_save` to the parallel store, and the last two kept. The
# best interval runs from 17 minutes to 2 hours with failure rate and copy, but every 45 minutes is within 0.2 percentage
# points of the best in each row. A blocking save would be made two to eight times a day, and 1 to 5% of the time would be
# lost, as the store's rate decides.
#
# ## 3. A save that is cut off
#
# The first save that one writes goes into the same folder each time. DCP asks a **planner** for every piece that it
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
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # PyTorch warns, and overwrites
    run = Small()
    dcp.save(run.pieces(), checkpoint_id=first)
    run.step(0)
    dcp.save(run.pieces(), checkpoint_id=second, planner=KilledAt())


# %%
for first, second in (("same", "same"), ("old", "new")):
    print(f"saved into {first!r}, then killed while saving into {second!r}:", told(saves_twice, work / first, work / second)[:6])
    for name in dict.fromkeys((first, second)):
        print(f"   load {name!r}: {told(load_here, work / name)}")

# %% [markdown]
# **Read it.** In the same folder, one kill destroyed *both* checkpoints. In a new folder the half save has no `.metadata`
# and is refused, and the old one is whole.
#
# DCP brings its own files to the disk (`sync_files=True`), yet not the folder's entry of them, and nothing tells later
# whether bytes have changed. So build the safe way: **new folder, checksums, to the disk, rename, keep the last two.** A
# rename is all or nothing on a POSIX file system (ext4, XFS, NFS, Lustre); most object stores have none. The last is not
# the highest step: a run that went back saves step 60 after 100, and must not delete it. So names *count the saves*.

# %%
def save_by_hand(pieces, folder, step, keep=2):
    new = folder / "writing"  # one name, so that the next save clears what was cut off
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
        number = 1 + max((int(path.name.split("-")[-1]) for path in list_checkpoints(folder)), default=0)
        new.rename(folder / f"step-{step:08d}-save-{number}")
        os.fsync(handle := os.open(folder, os.O_RDONLY))  # the new name, before an old one goes
        os.close(handle)
        for old in list_checkpoints(folder)[keep:]:  # what was saved last stands first
            shutil.rmtree(old.rename(new))  # nor does half of an old one keep its name
    dist.barrier()


# %% [markdown]
# **Break it.** A timer kills a rank at a random moment of the next four steps, now rank 0, now rank 1. The next round goes on
# from the last whole save:

# %%
def train_until_killed(folder, after_steps, victim):
    run = Small()
    pieces = run.pieces()
    done = load_newest(pieces, folder) if newest_whole(folder) else 0  # whole: all checksums are right
    run.take(pieces)
    for step in itertools.count(done):
        start = time.perf_counter()
        run.step(step)
        save_by_hand(run.pieces(), folder, step + 1)
        if step == done and dist.get_rank() == victim:
            seconds = after_steps * (time.perf_counter() - start)
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


# %%
chance, reached = random.Random(16), 0
for number in range(4):
    try:
        run_ranks(train_until_killed, 2, work / "safe", chance.uniform(0, 4), number % 2)
    except RankError:
        found, cut_off = newest_whole(work / "safe"), (work / "safe/writing").exists()
    print(f"kill {number + 1}: newest whole {found.name if found else None}; in the middle of a {'save' if cut_off else 'step'}")
    assert (step_of(found) if found else 0) >= reached, "a checkpoint that was there is lost"
    reached = step_of(found) if found else 0

# %% [markdown]
# **Read it.** No checkpoint that had its name was lost. As each step is saved before the next begins, a kill costs one step
# at most. `save_safely` and `load_newest` in `utils.parallel.safe_checkpoint` also say in a sentence what is wrong. There each
# rank sums its own files *as it writes them*: a sum of what was read back, as above, blesses a damaged write. **A checkpoint
# is code**: `dcp.load` unpickles what it finds; `load_newest` reads plain data alone. Now damage what was saved:

# %%
def load(folder, hidden=128):
    return load_newest(Small(hidden).pieces(), folder)


changed = damaged_copy(work / "safe", change_a_byte)
print("as it was saved, by dcp.load:", told(load_here, list_checkpoints(work / "safe")[0]))
print("one changed byte, by dcp.load:", told(load_here, list_checkpoints(changed)[0]))
print("one changed byte, by load_newest:", told(load, changed))
print("half of its ranks:", told(load, damaged_copy(work / "safe", lose_a_rank)))
print("another model:", told(load, work / "safe", 64))

# %% [markdown]
# **Read it.** One byte of a weight's exponent has changed. `dcp.load` takes it without a word, and training goes on with other
# losses. The checksum refuses it.
#
# ## 4. Exact resume
#
# A resumed curve that looks *similar* proves nothing: forget a piece, and it still looks similar. Equality can be tested.
# Besides weights and moments a run has the **schedule** of its learning rate, the **scaler** of fp16, the place in the
# **data**, and the **random states** of every rank. torchdata's `StatefulDataLoader` knows its place, also in the middle of
# an epoch. This run has all of them (its data come from `exact_run.py`, beside this lesson's source):

# %%
print(inspect.getsource(Run))

# %% [markdown]
# This is what to save, and how to restore it:

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


# %%
forgotten = ("nothing", "moments", "schedule", "scaler", "place in the data", "random states")
whole = run_ranks(never_stopped, 4, work / "exact", True)[0]
curves = {piece: run_ranks(resumed, 4, work / "exact", piece, True)[0] for piece in forgotten}

# %%
print(f"the loss itself moves by up to {max(abs(a - b) for a, b in itertools.pairwise(whole)):.2f} from a step to the next (measured)")
show(draw_forgotten(whole, curves, SAVED, title="Resumed after step 20, one piece forgotten: how many of 20 losses differ", device="4 ranks"),
     alt="Six panels of losses: with nothing forgotten the resumed run lies on the other; each forgotten piece parts from it.")
assert curves["nothing"] == whole[SAVED:], "with all pieces the losses are equal, bit for bit"
without_effect = [piece for piece in forgotten[1:] if curves[piece] == whole[SAVED:]]
assert not without_effect, f"each piece matters, and not {without_effect}"

# %% [markdown]
# **Read it.** With all pieces, no bit differs. Each forgotten piece changes at least 16 of the 20 losses, and each curve still
# looks *healthy*: no difference is much larger than what the loss moves by anyway.
#
# A trap is left. The data of `Run` get noise, as augmentation gives it, from a generator that is seeded by the row. Take the
# loader's worker's global generator in its place:

# %%
global_noise = run_ranks(never_stopped, 4, work / "global", False)[0]
again = run_ranks(resumed, 4, work / "global", "nothing", False)[0]
differ = sum(a != b for a, b in zip(again, global_noise[SAVED:], strict=True))
print(f"noise from the worker's global generator: {differ} of {STEPS - SAVED} losses differ; from the row's own: 0 (measured)")
assert differ > 0, "workers' random states are not in this checkpoint"
print("on 2 ranks:", told(resumed, work / "exact", "nothing", True))
shutil.rmtree(work, ignore_errors=True)

# %% [markdown]
# **Read it.** Workers have random states of their own, which this checkpoint does not hold. Seed noise by row and epoch (by
# the row alone, as here, each epoch draws the same). Python's `random`, NumPy and each GPU have random states, too: save those
# that your run draws from. With `ranks=`, `load_newest` refuses what another number of ranks saved.
#
# ## Which save, when
#
# | means | use when | costs | does not help |
# |---|---|---|---|
# | new folder, rename | always | one more checkpoint on the disk | object stores: write a marker last, and read only where it is |
# | checksums | always | a pass of one core over each rank's bytes | against numbers that were wrong before the save |
# | `dcp.async_save` | the copy is quicker than the write | host memory | against a failure during the write |
# | a save at SIGTERM | a scheduler announces the end | its grace must be longer than a save | against `kill -9` |
#
# ## Recap
#
# - Save time and failure rate decide the interval, $\sqrt{2\,d\,M}$; the optimum is flat.
# - A checkpoint is whole, or it has no name. Checksums tell whether it still is.
# - Weights, moments, schedule, scaler, place in the data, random states: with all six the losses are equal, bit for bit.
#   Similar curves prove nothing.
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
#    that ranks divide (`[rank::world]`), and not if each rank has its own, as in section 4.
#
# </details>
#
# ### Where next
#
# [Lesson 16a](16a_when_a_run_breaks.ipynb) kills ranks, hosts and links, and the job restarts by itself. The
# [lab](../../labs/advanced/16_runs_that_survive.ipynb) is for both lessons; do it in a copy (`make my-labs` makes one), and
# compare with the [solution](../../solutions/advanced/16_runs_that_survive.ipynb). **References.** Daly 2006, *A higher order
# estimate of the optimum checkpoint interval*. Llama Team 2024, [arXiv:2407.21783](https://arxiv.org/abs/2407.21783). Kokolis
# and others 2024, [arXiv:2410.21680](https://arxiv.org/abs/2410.21680). PyTorch,
# [distributed checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html). torchdata,
# [stateful loader](https://meta-pytorch.org/data/main/torchdata.stateful_dataloader.html).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** Before it stand `model`, `optimizer`, `schedule`, `loader` (a `StatefulDataLoader`; its shuffling sampler
# stateful, too) and `folder`, a `Path` on a file system that all ranks see. Call `save(step)` between steps, and begin with
# `step, batches = resume()`. To see that it works: train 20 steps with a save at 10, start again, and compare losses 11 to 20
# with `==`. Add to `own` what else your run goes on with: the epoch of `set_epoch`, a scaler, other random states.
#
# ```python
# import shutil
# import torch
# import torch.distributed as dist
# import torch.distributed.checkpoint as dcp
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
#
#
# def pieces():
#     weights, moments = get_state_dict(model, optimizer)
#     own = {"data": loader.state_dict(), "random": torch.get_rng_state()}  # on GPUs torch.cuda.get_rng_state(), too
#     return {"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), f"rank {dist.get_rank()}": own}
#
#
# def whole():  # 00000007.step-100 is the seventh save; the last save stands last
#     return sorted(folder.glob("*.step-*"))
#
#
# def save(step, keep=2):
#     new, old = folder / "writing", whole()
#     if dist.get_rank() == 0:
#         shutil.rmtree(new, ignore_errors=True)  # of a save that was cut off
#     dist.barrier()
#     dcp.save(pieces(), checkpoint_id=new)
#     if dist.get_rank() == 0:
#         number = 1 + (int(old[-1].name.split(".")[0]) if old else 0)
#         new.rename(folder / f"{number:08d}.step-{step}")  # what is whole gets its name
#         for path in old[: len(old) + 1 - keep]:
#             shutil.rmtree(path.rename(new))  # and half of an old one has none
#     dist.barrier()
#
#
# def resume():
#     if not whole():
#         return 0, iter(loader)
#     last = whole()[-1]
#     dcp.load(found := pieces(), checkpoint_id=last)
#     set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
#     schedule.load_state_dict(found["schedule"])
#     own = found[f"rank {dist.get_rank()}"]
#     loader.load_state_dict(own["data"])
#     batches = iter(loader)
#     torch.set_rng_state(own["random"])  # last: starting a loader draws from it
#     return int(last.name.split("-")[-1]), batches
# ```
#
# It has no checksums, and does not bring the rename to the disk. Every folder that the planner exports has
# `utils/parallel/safe_checkpoint.py`, which does both and needs no course.
#
# **With accelerate.** `model`, `optimizer`, `schedule` and `loader` are those before `prepare`. Give the loader a `generator=` of
# its own: else its start draws from the random state that dropout goes on with.
#
# ```python
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
# def save(step, keep=2):  # weights, moments, schedule, scaler, place in the data, random states
#     new, old = folder / "writing", sorted(folder.glob("*.step-*"))
#     if accelerator.is_main_process:
#         shutil.rmtree(new, ignore_errors=True)
#     accelerator.wait_for_everyone()
#     accelerator.save_state(new)
#     accelerator.wait_for_everyone()
#     if accelerator.is_main_process:
#         number = 1 + (int(old[-1].name.split(".")[0]) if old else 0)
#         new.rename(folder / f"{number:08d}.step-{step}")
#         for path in old[: len(old) + 1 - keep]:
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
