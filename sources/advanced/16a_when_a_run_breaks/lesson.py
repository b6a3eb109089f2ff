# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16a When a run breaks
#
# {{badges}}
#
# **The question.** A part of a job fails at night. What brings the job back without you?
#
# **Promise.** You kill a rank and a host and cut a cable, and see the job come back. Where it hangs, slows down or
# computes wrongly, you find the rank to blame. Then you price a month of 70B on 256 GPUs.
# | minutes | hardware | runs |
# |---|---|---|
# | 50 | any laptop (Windows: WSL2); beyond Binder's 1 GB | one to three minutes of computing on two CPU cores |
#
# ## A bet
#
# Two hosts train together, a rank on each. A collective may wait for 3 seconds. We kill rank 1 (`kill -9`), later all of
# host 1, at last we pull the cable between the two. After how many seconds does rank 0 notice?

# %%
my_seconds_until_noticed = {"kill a rank": 3.0, "kill a host": 3.0, "cut the link": 3.0}

# %% tags=["setup"]
here = setup("advanced/16a")

# %% jupyter={"source_hidden": true}
import datetime
import itertools
import math
import os
import re
import statistics
import time

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn

# %% jupyter={"source_hidden": true}
from utils import Batch, Cluster, Evidence, check, export, model_shape, run_ranks, scratch, scratch_folder, search, show
from utils.catalog import price
from utils.planner import plan_name
from utils.planner.failing_runs import RunPlan, failing_runs
from utils.planner.goodput import DAY, best_interval_seconds
from utils.ranks.calls import recorded_calls
from utils.ranks.elastic import Fault, link_problem, run_elastic
from utils.lessons.lesson_16a.backends import backends_table
from utils.lessons.lesson_16a.launch import launch_command
from utils.lessons.lesson_16a.progress import began_seconds, draw_progress, progress_of
from utils.lessons.lesson_16a.records.survive import run_in
from utils.lessons.lesson_16a.records.survive_script import SCRIPT
from utils.lessons.lesson_16a.shrinking import shrinking_runs
from utils.lessons.lesson_16a.watchers import draw_watchers
from utils.lessons.lesson_16a.watching import RULES, RULES_TEST, Exporter, StandInGpu, prometheus_problem, promtool, report, watch
from evidence.record import recorded

# %% [markdown]
# New words stand in the [glossary](../00_glossary.ipynb).
#
# ## 1. Killed, killed, cut off: torchrun brings it back
#
# On each host an **agent** (`torchrun`) starts the ranks and watches them. Agents meet at a **rendezvous**, a small store on
# host 0. When a rank is lost, the agents meet again, and *all* ranks start anew from the last checkpoint. Look at the two
# arrows between the hosts:

# %%
show(draw_watchers(title="Who watches whom (a drawing)"),
     alt="Two hosts, on each an agent that starts a rank and looks at it ten times a second. Both agents tell a store on host 0 that "
     "they live. The ranks send each other gradients over TCP, and share a checkpoint on storage that both see.")

# %% [markdown]
# Here is a stored run of the script that you start below (timeout 4 s, the cut lasts 12). Look for red, where nobody
# has noticed yet:

# %%
measured_here = f"measured on this machine, {os.cpu_count()} CPU cores"  # beside seconds: yours will differ
stored = recorded("survive")[0]
story, when = run_in(stored, "three faults"), f"{stored.device}, {stored.date}"
show(draw_progress({"job": progress_of(story, last_step=300)}, title="Three faults, and the job comes back from each",
                   evidence=Evidence.RECORDED, device=when),
     alt="Steps against seconds: the line of two ranks ends at each fault and begins again, after a shaded gap, some steps lower. "
     "After the cut link one rank goes on alone; when host 1 joins again there is one more gap, and two ranks follow.")
print("ranks, start by start:", *(world for *_, world, _ in story.worlds()), f"(recorded on {when})")

# %% [markdown]
# **Read it.** Each line is one start of all ranks: some steps are done again. After the cut the job *shrinks* to one rank.
# When host 1 joins again, all stop once more, and it *grows*. `--nnodes=1:2` allows both.
#
# The script must load its checkpoint, save so that a kill leaves a whole one, and *die* of its errors: an agent sees nothing
# else. Here it is (`note` writes a journal):

# %%
print(SCRIPT[SCRIPT.index("dist.init"):])

# %% [markdown]
# Your two hosts are **network namespaces** of this machine, joined by a virtual cable. A supervisor starts host 1's agent
# again a second after its death. Your link stays cut, so your job ends on one rank. This starts host 0's agent:

# %%
why = link_problem()  # empty where a link can be cut
print(launch_command(linked=not why))

# %%
STEPS, TIMEOUT_SECONDS, NAP_SECONDS, STEPS_BETWEEN_SAVES = 70, 3.0, 0.03, 10
faults = [Fault("kill a rank", 15), Fault("kill a host", 32), Fault("cut the link", 48, seconds=300)]
if why:
    print(f"No link can be cut here ({why}); its row comes from the stored run.")
    faults = faults[:2]
with scratch("lesson-16a") as folder:
    (folder / "train.py").write_text(SCRIPT)
    job = run_elastic(folder / "train.py", folder, STEPS, TIMEOUT_SECONDS, NAP_SECONDS, STEPS_BETWEEN_SAVES,
                      hosts=2, least_hosts=1, faults=faults, timeout_seconds=240)
print("hosts of", job.transport)

# %%
met = [(job, found, measured_here) for found in job.recoveries]
met += [(story, found, f"recorded on {when}") for found in story.recoveries[len(met):]]
for run, found, evidence in met:
    kind, began = found.fault.kind, began_seconds(run, found)
    print(f"{kind:<13} noticed after {found.noticed_seconds:4.1f} s (your guess {my_seconds_until_noticed[kind]:.1f}), "
          + (f"new processes after {began:4.1f} s, " if began else "") + f"training after {found.back_seconds:4.1f} s ({evidence})\n"
          f"    ranks {found.ranks_before} -> {found.ranks_after}, steps since the save, done twice: {found.steps_lost}\n    to blame, by the journals of all ranks: {found.named}")
for host, text in sorted(job.output.items()):
    print(f"torchrun on host {host} wrote:", *dict.fromkeys(re.findall(r"failed \(exitcode: -?\d+\) local_rank: \d+", text)), sep="\n    ")

# %% [markdown]
# **Read it.** The kernel of a *dead process* closes its connections, so rank 0 knows at once. A *cut link* says nothing: both
# ranks wait for the timeout. So would they for a host without power; ours lost its processes only.
#
# Noticing a dead process is the small part of a gap. Then the agents meet. A silent host must miss three signs of life
# (`keep_alive_interval`, 5 s by default), and missing hosts are waited for (`last_call_timeout`, 30 s). At last new processes
# load PyTorch and the checkpoint. torchrun says who died: -9 is a kill, 1 an error of the script.
#
# That was gloo, over TCP. NCCL uses other words:

# %%
display(backends_table([(found, evidence) for _, found, evidence in met]))

# %% [markdown]
# The table's 4.3 s pass before each of 7 retries: half a minute or more.
#
# Was it the same training? Ranks share each batch, so up to rounding the weights must be those of one undisturbed process:

# %%
def gap_to_one_process(left_out=None):
    torch.manual_seed(0)
    weight = torch.randn(16, 1)
    for step in range(STEPS):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
        if step != left_out:
            weight -= 0.1 / 24 * x.T @ (x @ weight - x.sum(1, keepdim=True))
    return (torch.tensor(job.result["weight"]) - weight.flatten()).abs().max().item()


gap, planted = gap_to_one_process(), gap_to_one_process(left_out=40)
print(f"largest difference of a weight: {gap:.1e}; to a process that leaves out step 40: {planted:.1e} (measured)")
assert gap < 1e-5 < planted, "the job that came back trained something else"

# %% [markdown]
# <div class="alert alert-warning">
#
# **Traps.** (1) PyTorch's default timeout is 30 minutes for gloo, 10 for NCCL. (2) `kill -9` on an agent leaves its ranks
# running: end the whole host. (3) From 2.5 to 2.15, PyTorch gives new ranks the store of the dead ones. gloo fails with
# `connectFullMesh failed`, NCCL with a stale id ([issue](https://github.com/pytorch/pytorch/issues/135712)). Set
# `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. (4) The job dies with host 0, which has the rendezvous: a scheduler must start it
# again ([lesson 17](17_cluster_and_budget.ipynb)). (5) A restart after an error uses up one of an agent's `--max-restarts`,
# for good.
#
# </div>
#
# ## 2. Or go on with those who are left: torchft
#
# Must all stop because one died? In [torchft](https://github.com/meta-pytorch/torchft) a **lighthouse** tells each *replica*, a
# rank or group with a whole model, who takes part in a step. Those average their gradients. Who comes back fetches the weights
# from a survivor.
#
# ```python
# # torchft_lighthouse --min_replicas 1 runs on one host; TORCHFT_LIGHTHOUSE=http://HOST0:29510 tells all where
# from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # torchft's, not torch's
#
# manager = Manager(pg=ProcessGroupGloo(timeout=...), min_replica_size=1, state_dict=..., load_state_dict=...)
# model, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
# ```
#
# Count the gaps, and the rows in a step:

# %%
runs = {"torchrun: all start again": run_in(stored, "a restart from the checkpoint"),
        "torchft: the survivor goes on": run_in(stored, "tolerance for each step")}
rows_alone = (24, 12)  # one rank takes the whole batch under torchrun, and goes on with its own half under torchft
panels = {name: progress_of(run, run.recoveries[0].at_seconds, rows_per_step={1: alone, 2: 24})
          for (name, run), alone in zip(runs.items(), rows_alone, strict=True)}
show(draw_progress(panels, title="The same death, two ways to live on", since="the kill", evidence=Evidence.RECORDED, device=when),
     alt="Above, torchrun's line falls back after two gaps, one to shrink and one to grow, with 24 rows in every step; below, torchft's "
     "line of one rank begins soon after the fault, with 12 rows a step, and becomes one of two ranks without a gap.")
for name, run in runs.items():
    steps, after = [m.more["step"] for m in run.moments if m.what == "step" and m.rank == 0], run.recoveries[0].back_seconds
    print(f"{name:<31} next step after {after:4.1f} s, steps done twice: {len(steps) - len(set(steps)):2d} (recorded on {when})")

# %% [markdown]
# **Read it.** Compare shapes, not seconds: their timeouts differ. torchrun stops twice, to shrink and to grow. torchft goes on
# with half the rows in a step: not *exactly* the same run. Each replica must hold its whole state: with ZeRO, as in section 6,
# a dead one takes its part of Adam's along.
#
# **Question.** 256 GPUs on 32 nodes of 8, without ZeRO: TP 2 x PP 8 x DP 16, each replica on two nodes of its own. One node
# dies under torchft. How many GPUs, dead ones among them, do no work until it is back?

# %%
idle_gpus = ...
check("16.idle_gpus", idle_gpus)

# %% [markdown]
# ## 3. Nothing moves: who is missing?
#
# Now nothing dies: rank 1 leaves out one all-reduce, as after `if loss.isnan(): continue`. PyTorch's **flight recorder** keeps
# the last collectives of every rank.

# %%
def train_step(step, group):
    gradient = torch.full((4,), float(step))  # so that a sum tells whose steps are in it
    if step == 5 and dist.get_rank() == 1:
        return "left out"  # "nothing to learn from this batch"
    dist.all_reduce(gradient, group=group)
    return gradient[0].item()


def train_until_it_hangs():
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    said, sums = "came to its end", []
    try:
        for step in range(8):
            sums.append(train_step(step, group))
        time.sleep(3)  # it evaluates, say, while the others wait
    except RuntimeError as error:
        said = str(error).rpartition("] ")[2]
    return said, recorded_calls(), sums  # the flight recorder of this rank, read by PyTorch's _dump_fr_trace


# %%
found = run_ranks(train_until_it_hangs, 3)
furthest = max(calls[-1].number for _, calls, _ in found)
for rank, (said, calls, _) in enumerate(found):
    missing = f"   <- never called number {furthest}" if calls[-1].number < furthest else ""
    print(f"rank {rank}: {said[:44]:<44} last: {calls[-1]}{missing}")
print("sums on rank 0, by step:", found[0][2], " right:", [3.0 * step for step in range(7)])
assert [rank for rank, (_, calls, _) in enumerate(found) if calls[-1].number < furthest] == [1], "rank 1 left one out"

# %% [markdown]
# **Read it.** The two who complain are innocent. Look for the rank *behind*. The recorder cannot say where it left one out:
# all calls look alike. Nor do they hang there: rank 1's next gradients go to the others' step *before*, and the sums of steps
# 5 and 6 are wrong without an error.
#
# ## 4. Wrong or slow, and nobody says so
#
# A hang ends in an error; two faults do not. **A bit flips** in the memory of one replica. After a synchronous step all
# replicas hold the same bits, so one number of 64 bits for each tensor, compared over ranks, finds it. **A slow rank** hides:
# all wait for it, so all steps take equally long. Each rank's *own* seconds, before the collective, tell:

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
        own = time.perf_counter() - start
        for p in model.parameters():
            dist.all_reduce(p.grad)
        sent = time.perf_counter() - start - own
        for p in model.parameters():
            p.data -= 0.01 / dist.get_world_size() * p.grad
        if step == 7 and rank == 2:
            model[0].weight.data.view(torch.int32)[5, 3] ^= 1 << 30  # a cosmic ray
        sums, seconds = gathered(checksums(model)), gathered(torch.tensor([own, sent])).tolist()
        odd = (sums != sums.mode(dim=0).values).nonzero().tolist()  # [rank, tensor] unlike the majority
        news.append((step, odd, seconds, loss.item()))
        report(folder, rank, gpu.after(min(1.0, own / 0.07), 2**30) | {
            "training_step": step + 1, "training_own_seconds": own, "training_last_step_timestamp_seconds": time.time()})
    return news


# %%
metrics = scratch_folder("lesson-16a")
news = run_ranks(watched_run, 4, metrics)[0]
flips = [(step, odd[0]) for step, odd, *_ in news if odd]
print(f"step {flips[0][0]}: rank {flips[0][1][0]}'s tensor {flips[0][1][1]} differs from the others (measured)")
losses = [loss for *_, loss in news]
print("loss on rank 0:", *(f"step {step}: {losses[step]:.3g} " for step in (7, 8, 9)), "(measured)")
medians, sending = ([statistics.median(rows[rank][kind] for _, _, rows, _ in news) for rank in range(4)] for kind in (0, 1))
print("own seconds in a step, by rank:", *(f"{s:.3f}" for s in medians), f" most: rank {medians.index(max(medians))}; in the all-reduce:",
      *(f"{s:.3f}" for s in sending), f" least: rank {sending.index(min(sending))} ({measured_here})")
assert math.isfinite(losses[8]) and not math.isfinite(losses[9]), "one step after the flip all replicas are lost"
assert flips[0] == (7, [2, 0]), "the flip is found in the step in which it happens, at rank 2, in the first tensor"

# %% [markdown]
# **Read it.** The check ran in the step of the flip, in time to copy the tensor from a healthy replica *before the next
# step*. Here nobody did: in step 8 the flip spoils rank 2's gradient, the all-reduce gives it to everybody, and in step 9
# healthy rank 0 has no loss either. Whoever checks every 100 steps goes back to a checkpoint before the last clean check;
# clean needs a finite loss, for replicas that are all NaN look alike. So they do after a flip in a gradient *before* the
# all-reduce. Under ZeRO, as in section 6, one rank updates a weight for all, and its flip reaches all.
#
# **Question.** Seconds inside the all-reduce, by rank: 0.31, 0.29, 0.04, 0.30. Which rank do you send somebody to?

# %%
slow_rank = ...
check("16.slow_rank", slow_rank)

# %% [markdown]
# ## 5. What wakes somebody
#
# A log wakes nobody. **Prometheus** fetches numbers from every host and raises alerts by rules. A GPU's numbers come from
# NVIDIA's dcgm-exporter, here from a **stand-in**. Begin with two of the nine rules in `watching/rules/`, beside this lesson's
# source: `RunStands`, below, and `GpuIsLost`, for the driver's error numbers (XID,
# [catalog](https://docs.nvidia.com/deploy/xid-errors/)) that ask for reset or repair. Where Prometheus is installed, the
# stand-in loses a GPU now:

# %%
print("- alert: RunStands" + RULES.read_text().partition("- alert: RunStands")[2].partition("      - alert")[0])
if problem := prometheus_problem():
    row = next(row for row in stored.rows if row["quantity"] == "an alert")
    print(problem, f"Recorded on {when}: fired {row['firing_seconds']:.1f} s after the error: {row['says']}")
else:
    print("promtool test rules:", promtool("test", "rules", RULES_TEST).split()[-1])
    with Exporter(metrics) as exporter, watch([exporter.address]) as prometheus:
        report(metrics, 1, StandInGpu(xid=79).after(0.0, 2**30))
        alert, seconds = prometheus.wait_for("GpuIsLost")
        print(f"{alert.state} after {seconds:.1f} s, asked four times a second ({measured_here}): {alert.summary}")

# %% [markdown]
# **Read it.** `RunStands` must wait longer than a save and a restart: for section 6's 2 minutes to notice and 15 to
# restart write 1,200 in place of 300.
#
# ## 6. The scenario as asked: 70B on 256 GPUs
#
# *"We train a 70B model on 256 GPUs for 30 days. A GPU, a node, a network fails. How does the run survive?"*
# The planner's layout for H100:

# %%
model, cluster, batch = model_shape("llama-2-70b"), Cluster(gpu="H100", nodes=32), Batch(sequences=1536, sequence_length=2048)
layout = search(model, cluster, batch).best
plan = layout.plan
files = export(model, cluster, plan, batch).write(here.root / "build" / "lesson-16a" / "llama-2-70b")
replica = cluster.gpus // plan.dp
print(f"# written to build/lesson-16a/llama-2-70b: {len(files)} files for {plan_name(layout)}")
print(f"# v: slices of layers on a stage, {plan.virtual_stages}; b: sequences in a micro-batch, {plan.micro_batch}; Adam's state is sharded "
      f"over replicas by ZeRO-{plan.zero_stage}; recomputed: {plan.recompute}")
print(f"30 days of work are {30 * DAY * layout.tokens_per_second / 1e12:.1f} T tokens (predicted); a replica is {replica} GPUs on "
      f"{replica // 8} nodes: a dead node takes 1 of {plan.dp}")

# %% [markdown]
# Without that node a job *waits*, unless it has a *spare*; or it *shrinks* by a replica. By torchrun's source:
#
# - `--nnodes=32` waits, and gives up after `join_timeout` (10 minutes: set it longer than a repair). A 33rd host with the
#   same command is a spare.
# - `--nnodes=30:32` starts 248 ranks on 31 nodes. Megatron-LM refuses them: TP x PP does not divide 248. Your own ranks all
#   build `DeviceMesh("cuda", torch.arange(240).view(15, 8, 2))`; the last eight sleep. Adam's 16 parts must load as 15.
#
# The batch does not divide by 15 replicas:

# %%
def share(replicas):
    """The longest share of the batch, in sequences: an interleaved pipeline takes them in whole rounds of its stages."""
    return plan.pp * math.ceil(batch.sequences / replicas / plan.pp)


speeds = [share(plan.dp) / share(plan.dp - missing) for missing in range(plan.dp)]
for replicas in (plan.dp, plan.dp - 1):
    print(f"{replicas} replicas: {batch.sequences / replicas:g} sequences each, in whole rounds {share(replicas)}; speed "
          f"{speeds[plan.dp - replicas]:.1%} (predicted: a step takes as long as its longest share)")

# %% [markdown]
# The next table simulates 1,000 runs a row, at a low and a high published rate: 3.8 failures for 1,000 node-days
# (Llama 3) and 24 (jobs of 1,024 GPUs on Meta's RSC-1; [lesson 16](16_runs_that_survive.ipynb) has both). Assumed: noticed
# after 2 minutes, a repair of a day, a save of 60 s, a restart of 15 minutes, and a save before a job grows (section 1's lost
# steps). Compare the dollars:

# %%
paid, RATES = price("H100", provider="Nebius", kind="on demand"), (3.8, 24.0)


def runs_of(rate, spares, shrinks=False, noticed_seconds=120.0, repair_days=1.0):
    interval = best_interval_seconds(60.0, 1000 * DAY / (rate * cluster.nodes))
    run = RunPlan(work_seconds=30 * DAY, interval_seconds=interval, save_seconds=60.0, restart_seconds=900.0 + noticed_seconds,
                  nodes=cluster.nodes, failures_per_1000_node_days=rate, spares=spares, repair_seconds=repair_days * DAY)
    found = shrinking_runs(run, speeds, grow_seconds=900.0) if shrinks else failing_runs(run, 1000)
    return found, found.wall_seconds / 3600 * 8 * (run.nodes + spares) * paid.usd_per_gpu_hour / 1e6, interval


def row_of(shrinks, spares):
    row = {"a node is missing: the job": "shrinks" if shrinks else "waits", "spares": spares}
    for rate in RATES:
        found, millions, _ = runs_of(rate, spares, shrinks)
        row |= {f"{rate:g}: goodput": f"{found.goodput.mean():.1%}", f"{rate:g}: million $": f"{millions.mean():.3f}",
                f"{rate:g}: 95% of runs below": f"{torch.tensor(millions).quantile(0.95):.3f}"}
    return row


rows = [row_of(False, spares) for spares in range(4)] + [row_of(True, spares) for spares in range(2)]

# %%
display(pd.DataFrame(rows).style.hide().set_caption(
    f"By failures for 1,000 node-days: 30 days of work on 32 nodes and spares, ${paid.usd_per_gpu_hour} a GPU hour ({paid.provider}, "
    f"{paid.as_of}); simulated"))
for rate in RATES:
    found, _, interval = runs_of(rate, 0, shrinks=True)
    print(f"{rate:4g}: {found.failures.mean():.1f} failures in a run, a save every {interval / 3600:.1f} hours (Daly's best)")

# %% [markdown]
# **Read it.** A job that waits keeps one spare at the low rate, two or three at the high one. A job that shrinks needs none;
# at the high rate a spare costs as much and ends a day sooner. Does that hang on the repair?

# %%
for rate, days in itertools.product(RATES, (0.5, 1.0, 2.0)):
    best = {}
    for name, most in (("waits", 6), ("shrinks", 3)):
        millions = [runs_of(rate, spares, name == "shrinks", repair_days=days)[1].mean() for spares in range(most)]
        best[name] = f"{name}: ${min(millions):.3f}M (spares: {millions.index(min(millions))})"
    print(f"{rate:4g} failures for 1,000 node-days, repair in {24 * days:g} h: cheapest if it {'; if it '.join(best.values())} (simulated)")

# %% [markdown]
# At the high rate longer repairs ask for more spares. Shrinking stays cheaper in all rows. And if a failure is noticed after
# NCCL's 10 minutes, or by somebody 8 hours later?

# %%
for rate, minutes in itertools.product(RATES, (2, 10, 480)):
    found, millions, _ = runs_of(rate, 0, shrinks=True, noticed_seconds=60.0 * minutes)
    print(f"{rate:4g} failures for 1,000 node-days, noticed after {minutes:3d} min: goodput {found.goodput.mean():.1%}, "
          f"{millions.mean():.3f} million $ (simulated, shrinks, no spare)")

# %% [markdown]
# **Read it.** Ten minutes cost less than half a point of goodput, eight hours 3.5 points at the low rate and 18 at the high
# one.
#
# **The answer in one breath.** Elastic `torchrun` brings back what dies: all ranks start again from the last whole checkpoint.
# What is silent dies by a timeout, longer than your longest honest wait (the first step, a save). What is slow or wrong does
# not die: watch own seconds and checksums, and let an alert wake you. For 70B on 256 GPUs (simulated) a job that waits keeps
# one spare at the low rate, two to four at the high one; a job that shrinks needs none, or one.
#
# ## Recap
#
# | you see | look at | do |
# |---|---|---|
# | ranks time out, one does not | flight recorder, merged: who is behind? | repair the `if` around a collective |
# | all ranks time out | is every host there? | repair the link |
# | "connection closed", "status=12" | torchrun's exit code; which host fell silent | 1: read the traceback; -9 that nobody sent: was host memory full (`dmesg`)? silent: replace and test the host (`dcgmi diag -r 3`) |
# | step time grew on all ranks | own seconds by rank | take out the slow host |
# | weights differ over replicas | checksums: which rank | copy before the next step, else load a clean checkpoint; twice: take out the GPU |
# | nothing moves, nothing is logged | the alert on the last step's time | dump traces, then restart |
#
# ### Where next
#
# Exercise 4 of [lab 16](../../labs/advanced/16_runs_that_survive.ipynb) has three dead runs to diagnose.

# %% [markdown]
# ## On Monday
#
# **The launch**, on every host; `HOST0` is one that stays. Ranks may change hosts, so all hosts see `/shared` and the
# checkpoints. `train.py` loads the newest, and lets errors end it. Kill a rank by hand once: the job must go on. After a
# hang, `torchfrtrace /shared/traces --prefix rank_` says who is behind.
#
# ```bash
# mkdir -p /shared/traces
# export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # PyTorch 2.5 to 2.15
# export TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/shared/traces/rank_
# # each failure uses up one of --max-restarts, for good
# torchrun --nnodes=1:2 --nproc-per-node=8 --max-restarts=1000 \
#     --rdzv-backend=c10d --rdzv-endpoint=$HOST0:29400 --rdzv-id=run1 \
#     --rdzv-conf=keep_alive_interval=2,last_call_timeout=10 train.py
# ```
#
# **In `train.py`**: a short timeout. After the load, `stop_a_crash_loop(step)`: five starts in a row from one step end the
# job; what fails earlier still loops. Every 100 steps `look_at_ranks(model, forward_seconds)`, under DDP without ZeRO; it calls
# all-NaN replicas alike. On a GPU take the seconds from CUDA events: the host's clock times launches.
#
# ```python
# import datetime
# import sys
# from pathlib import Path
# import torch
# import torch.distributed as dist
#
# dist.init_process_group(timeout=datetime.timedelta(minutes=2))  # longer than your longest honest wait
#
#
# def stop_a_crash_loop(step, starts=Path("/shared/starts"), most=5):
#     """On all ranks, after torch.cuda.set_device. torchrun starts ranks again after any exit code but 0."""
#     stuck = [False]
#     if dist.get_rank() == 0:
#         with starts.open("a") as file:
#             file.write(f"{step}\n")
#         stuck = [starts.read_text().split()[-most:] == [str(step)] * most]
#     dist.broadcast_object_list(stuck)
#     if stuck[0]:
#         if dist.get_rank() == 0:
#             print(f"{most} starts from step {step}: mend the script, delete {starts}", flush=True)
#         dist.destroy_process_group()
#         sys.exit(0)
#
#
# def look_at_ranks(model, forward_seconds):
#     """On all ranks, three or more. The forward pass alone: in DDP's backward a rank already waits for others."""
#     sums = [torch.hash_tensor(p.detach()).view(torch.int64) for p in model.parameters()]
#     mine = torch.stack([*sums, torch.tensor(int(1e6 * forward_seconds), device=sums[0].device)])
#     dist.all_gather(rows := [torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)
#     sums, micros = torch.stack(rows).split([len(sums), 1], dim=1)
#     odd = (sums != sums.mode(dim=0).values).any(dim=1).nonzero().flatten().tolist()
#     slow = (micros[:, 0] > 1.5 * micros.median()).nonzero().flatten().tolist()
#     if dist.get_rank() == 0 and odd:
#         print(f"other weights on ranks {odd}, so go back to a checkpoint from before the last clean look", flush=True)
#     if dist.get_rank() == 0 and slow:
#         print(f"slow ranks {slow}", flush=True)
# ```
#
# **With the Trainer** under DDP (`model`, `dataset` and step numbers are yours), launch with `--nnodes=2`: on one host its
# global batch would be half. A second start must not begin at step 1, nor from a save cut off: rank 0 writes
# `trainer_state.json` last. All hosts see `out`.
#
# ```python
# from pathlib import Path
# from transformers import Trainer, TrainingArguments
#
# args = TrainingArguments("out", ddp_timeout=120, save_strategy="steps", save_steps=10, save_total_limit=2, max_steps=40)
# trainer = Trainer(model=model, args=args, train_dataset=dataset)
# whole = [state.parent for state in Path("out").glob("checkpoint-*/trainer_state.json")]
# last = max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)
# trainer.train(resume_from_checkpoint=str(last) if last else None)
# ```
