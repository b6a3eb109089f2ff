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
# **The question.** A part of a job fails: who notices, after how long, who is to blame, and what brings the job back without
# a human?
#
# **Promise.** You kill a rank and a host and cut a cable, and see the job come back. Where a run hangs, slows down or computes
# wrongly instead, you find the rank that is to blame. At the end you price it for 70B on 256 GPUs.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 50 | any laptop (Windows: WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |
#
# ## A bet
#
# Two hosts train together, a rank on each. A collective may wait for 3 seconds. We kill rank 1 (`kill -9`), later all of
# host 1, at last we pull the cable between the two. After how many seconds does rank 0 notice? Write three guesses.

# %%
my_seconds_until_noticed = {"kill a rank": 3.0, "kill a host": 3.0, "cut the link": 3.0}

# %% tags=["setup"]
here = setup("advanced/16a")

# %% jupyter={"source_hidden": true}
import datetime
import itertools
import os
import re
import statistics
import time
import urllib.request
from dataclasses import replace

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
from utils.lessons.lesson_16a.progress import draw_progress, progress_of
from utils.lessons.lesson_16a.records.survive import run_in
from utils.lessons.lesson_16a.records.survive_script import SCRIPT
from utils.lessons.lesson_16a.watching import RULES, RULES_TEST, Exporter, StandInGpu, prometheus_problem, promtool, report, watch
from evidence.record import recorded

# %% [markdown]
# New words stand in the [glossary](../00_glossary.ipynb).
#
# ## 1. Killed, killed, cut off: torchrun brings it back
#
# On each host an **agent** (that is `torchrun`) starts the ranks and watches them. Agents meet at a **rendezvous**, a small
# store on host 0. When a rank is lost, the agents meet again, and *all* ranks start anew. Here is a stored run of the job
# that you start below. Its link was cut for 12 seconds:

# %%
measured_here = f"measured on this machine, {os.cpu_count()} CPU cores"  # beside seconds: yours will differ
stored = recorded("survive")[0]
story, when = run_in(stored, "three faults"), f"{stored.device}, {stored.date}"
show(draw_progress({"job": progress_of(story)}, title="Three faults, and the job comes back from each", evidence=Evidence.RECORDED,
                   device=when),
     alt="Steps against seconds: lines of two ranks end at each fault and begin again a little lower; after the cut link one rank "
     "goes on alone, and when the link is back two ranks follow.")
print("ranks, start by start:", *(world for *_, world, _ in story.worlds()), f"(recorded on {when})")

# %% [markdown]
# **Read it.** Each line is one start of all ranks. It begins at the last checkpoint, so a little below where the line
# before it ended: those steps are done twice. After the cut the job *shrinks* to one rank, and *grows* again when host 1's
# agent asks to join. `--nnodes=1:2` allows both.
#
# So the script must do three things: load its checkpoint if there is one, save so that a kill leaves a whole one, and *die*
# of its errors, since an agent sees nothing else. This is the one that ran, below the lines that read its arguments (`note`
# writes a journal, for our seconds):

# %%
print(SCRIPT[SCRIPT.index("dist.init"):])

# %% [markdown]
# Now run it with your bet. The two hosts are **network namespaces** of this machine, joined by a virtual cable that we can
# pull. A supervisor starts host 1's agent again a second after its death, as a cluster's would.

# %%
STEPS, TIMEOUT_SECONDS, NAP_SECONDS, STEPS_BETWEEN_SAVES = 70, 3.0, 0.03, 10
faults = [Fault("kill a rank", 15), Fault("kill a host", 32), Fault("cut the link", 48, seconds=300)]
if why := link_problem():
    print(f"No link can be cut here ({why}); its row comes from the stored run.")
    faults = faults[:2]
with scratch("lesson-16a") as folder:
    (folder / "train.py").write_text(SCRIPT)
    job = run_elastic(folder / "train.py", folder, STEPS, TIMEOUT_SECONDS, NAP_SECONDS, STEPS_BETWEEN_SAVES,
                      hosts=2, least_hosts=1, faults=faults, timeout_seconds=240)
print("hosts of", job.transport)

# %%
rows = [(f, measured_here) for f in job.recoveries] + [(f, f"recorded on {when}") for f in story.recoveries[len(job.recoveries):]]
for found, evidence in rows:
    kind = found.fault.kind
    print(f"{kind:<13} noticed after {found.noticed_seconds:4.1f} s (your guess {my_seconds_until_noticed[kind]:.1f}), training "
          f"after {found.back_seconds:4.1f} s, ranks {found.ranks_before} -> {found.ranks_after}, "
          f"steps done twice: {found.steps_lost} ({evidence})\n    to blame: {found.named}")
    for rank, (seconds, text) in found.saw.items():
        print(f"    rank {rank} after {seconds:4.1f} s: {text}")

# %% [markdown]
# **Read it.** These seconds are gloo's, over TCP. The kernel of a *dead process* closes its connections, so rank 0 knows at
# once. Under any backend the agent beside a dead rank knows, too: it looks at its processes ten times a second, and ends the
# others. A *cut link* says nothing: both ranks wait for the timeout. A host without power is as silent; ours lost its
# processes, but its kernel lived on. After the cut, host 0's agent waits until host 1 has missed three signs of life (one a
# second here, every five by default). Host 1 cannot go on by itself: the rendezvous is on host 0.
#
# Was it the same training? Each step's batch is divided among the ranks that are there. Up to rounding, the weights must be
# those of one process that nobody disturbed:

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
# **Traps.** (1) The timeout is yours to set. PyTorch's default is 30 minutes for gloo, 10 for NCCL. (2) `kill -9` on an agent
# leaves its ranks running: end the whole host. (3) PyTorch 2.15 gives new ranks the store of the dead ones, and gloo fails
# with `connectFullMesh failed`. Set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. (4) If
# host 0 dies, so does the rendezvous, and the job: a scheduler must start it again (lesson 17).
#
# </div>
#
# ## 2. Or go on with those who are left: torchft
#
# [torchft](https://github.com/meta-pytorch/torchft) lets each *replica*, a rank or group with a whole model, decide at every
# step who takes part; a **lighthouse** keeps the list. Gradients are averaged over those who are there. Who comes back
# fetches the weights from a survivor, not from a disk. It wraps what you have:
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

# %% [markdown]
# **Read it.** torchrun pays twice, to shrink and to grow: each time all ranks start from the last checkpoint. torchft pays
# one broken step, and goes on with a smaller batch: not *exactly* the same run. Where a replica is many GPUs, all of them
# leave together.
#
# **Question.** 256 GPUs on 32 nodes of 8: TP 2 x PP 8 x DP 16, each replica on two nodes of its own. One node dies under
# torchft. How many GPUs, dead ones among them, do no work until it is back?

# %%
idle_gpus = ...
check("16.idle_gpus", idle_gpus)

# %% [markdown]
# ## 3. Nothing moves: who is missing?
#
# Here rank 1 leaves out one all-reduce, as after `if loss.isnan(): continue`. PyTorch's
# **flight recorder** keeps the last collectives of every rank, with the lines that called them.

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
# **Read it.** The two who complain are innocent. Look for the rank that is *behind*. Worse:
# in steps 5 and 6 the sums are wrong, without an error: rank 1's gradients went to the others' step *before*. Under NCCL each
# rank writes its trace at the timeout, and `torchfrtrace` merges them; under gloo a rank asks for its own. Two more tools:

# %%
def look(tool):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # PyTorch logs all of it once more
    rank = dist.get_rank()
    if tool == "debug level DETAIL":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    group, seconds = dist.new_group(timeout=datetime.timedelta(seconds=2)), datetime.timedelta(seconds=1)
    try:
        if tool == "monitored_barrier":
            time.sleep(2 * (rank == 1))  # rank 1 is somewhere else
            dist.monitored_barrier(group, seconds, wait_all_ranks=True)
        else:
            dist.all_reduce(numbers := 1.0 + torch.arange(5 if rank == 0 else 4), group=group)
        return f"no error, and the sums {numbers.tolist()}"
    except RuntimeError as error:
        return re.sub(r", TensorDtypes.*?nullopt\)\)", "", str(error)).rpartition("] ")[2]


for tool in ("monitored_barrier", "plain", "debug level DETAIL"):
    said = run_ranks(look, 3, tool)
    print(f"{tool}:", f"  rank 0: {said[0][:380]}", *(f"  rank {rank}: {said[rank].partition('. ')[0]}" for rank in (1, 2)), sep="\n")

# %% [markdown]
# **Read it.** `monitored_barrier` names who is missing. A wrong *shape* (rank 0's) is worse than a hang: in the plain run
# ranks 1 and 2 go on without an error, with sums that are wrong (right are 3, 6, 9, 12) and differ. With
# `TORCH_DISTRIBUTED_DEBUG=DETAIL` every call is compared over all ranks before it runs: for the search alone.
#
# ## 4. Wrong or slow, and nobody says so
#
# **A bit flips** in the memory of one replica. After a synchronous step all replicas hold the same bits, so one number of
# 64 bits for each tensor, compared over ranks, finds it. **A slow rank** hides, too: all wait for it, so all steps take
# equally long. Each rank's *own* seconds, before the collective, tell. Four ranks watch both:

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
        news.append((step, odd, seconds))
        report(folder, rank, gpu.after(min(1.0, own / 0.07), 2**30) | {
            "training_step": step + 1, "training_own_seconds": own, "training_last_step_timestamp_seconds": time.time()})
    return news


# %%
metrics = scratch_folder("lesson-16a")
news = run_ranks(watched_run, 4, metrics)[0]
flips = [(step, odd[0]) for step, odd, _ in news if odd]
print(f"step {flips[0][0]}: rank {flips[0][1][0]}'s tensor {flips[0][1][1]} differs from the others (measured)")
medians, sending = ([statistics.median(rows[rank][kind] for *_, rows in news) for rank in range(4)] for kind in (0, 1))
print("own seconds in a step, by rank:", *(f"{s:.3f}" for s in medians), f" most: rank {medians.index(max(medians))}; in the all-reduce:",
      *(f"{s:.3f}" for s in sending), f" least: rank {sending.index(min(sending))} ({measured_here})")
assert flips[0] == (7, [2, 0]), "the flip is found in the step in which it happens, at rank 2, in the first tensor"

# %% [markdown]
# **Read it.** Copy the tensor from a healthy replica, and take the GPU out if it happens twice. The check has limits: under
# ZeRO-3 there are no replicas to compare, and a flip in a gradient *before* the all-reduce reaches all ranks alike. The slow
# rank is the one that is *shortest* in the collective, because it comes last.
#
# **Question.** Seconds inside the all-reduce, by rank: 0.31, 0.29, 0.04, 0.30. Which rank do you send somebody to?

# %%
slow_rank = ...
check("16.slow_rank", slow_rank)

# %% [markdown]
# ## 5. What wakes somebody
#
# **Prometheus** fetches numbers from every host, evaluates rules, and raises alerts. For GPUs they come from NVIDIA's
# dcgm-exporter; here our run serves the *same names* from a **stand-in**, which makes them of how busy a rank was:

# %%
with Exporter(metrics) as exporter:
    page = urllib.request.urlopen(f"http://{exporter.address}/metrics").read().decode()
for name in ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_XID_ERRORS", "training_own_seconds"):
    print(*[line for line in page.splitlines() if name in line and "HELP" not in line], sep="\n")

# %% [markdown]
# `watching/rules/`, beside this lesson's source, holds nine alert rules, their tests, and a dashboard for Grafana.
# `GpuIsLost` is `DCGM_FI_DEV_XID_ERRORS` at 48, 74, 79, 95, 119 or 120, the driver's numbers
# ([catalog](https://docs.nvidia.com/deploy/xid-errors/)) for memory errors, NVLink, a GPU off the bus and its controller.
# Where Prometheus is installed, it now fetches the run's numbers, and a GPU is lost:

# %%
print(RULES.read_text().partition("- alert: RunStands")[2].partition("- alert")[0])
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
# **Read it.** Begin with these two: *no step for several step times* (here a minute: `RunStands`, above), and *a lost GPU*.
#
# ## 6. The scenario as asked: 70B on 256 GPUs
#
# *"We train a 70B model on 256 GPUs for 30 days. A GPU, a node, a network fails. How does the run survive?"* First the layout
# that the planner finds for H100, its files, and what a dead node takes:

# %%
model, cluster, batch = model_shape("llama-2-70b"), Cluster(gpu="H100", nodes=32), Batch(sequences=1536, sequence_length=2048)
layout = search(model, cluster, batch).best
files = export(model, cluster, layout.plan, batch).write(here.root / "build" / "lesson-16a" / "llama-2-70b")
replica = cluster.gpus // layout.plan.dp
print(f"# written to build/lesson-16a/llama-2-70b: {len(files)} files for {plan_name(layout)}")
print(f"30 days of work are {30 * DAY * layout.tokens_per_second / 1e12:.1f} T tokens (predicted); a replica is {replica} GPUs on "
      f"{replica // 8} nodes: a dead node takes 1 of {layout.plan.dp}")

# %% [markdown]
# Then time and dollars, by simulation: `failing_runs` draws the failures of 1,000 runs, at the lowest and the highest
# published rate of [lesson 16](16_runs_that_survive.ipynb). A dead process is noticed at once; a repair takes a day, every
# spare is paid for, a save takes 60 s and a restart 15 minutes (all assumed).

# %%
paid = price("H100", provider="Nebius", kind="on demand")


def runs_of(rate, spares, noticed_seconds=0.0, repair_days=1.0):
    plan = RunPlan(work_seconds=30 * DAY, interval_seconds=3600.0, save_seconds=60.0, restart_seconds=900.0 + noticed_seconds,
                   nodes=cluster.nodes, failures_per_1000_node_days=rate, spares=spares, repair_seconds=repair_days * DAY)
    found = failing_runs(replace(plan, interval_seconds=best_interval_seconds(60.0, plan.mean_seconds)), 1000)
    return found, found.wall_seconds / 3600 * 8 * (plan.nodes + spares) * paid.usd_per_gpu_hour


def row_of(rate, spares):
    found, dollars = runs_of(rate, spares)
    return {"failures per 1,000 node-days": f"{rate:g}", "spares": spares, "failures": f"{found.failures.mean():.1f}",
            "goodput": f"{found.goodput.mean():.1%}", "waiting": f"{found.share('waiting'):.1%}",
            "million $": f"{dollars.mean() / 1e6:.3f}", "95% of runs below": f"{torch.tensor(dollars).quantile(0.95) / 1e6:.3f}"}


rows = [row_of(rate, spares) for rate, spares in itertools.product((3.8, 24.0), range(5))]
display(pd.DataFrame(rows).style.hide().set_caption(
    f"30 days of work on 32 nodes and spares, ${paid.usd_per_gpu_hour} a GPU hour ({paid.provider}, {paid.as_of}); simulated"))

# %% [markdown]
# **Read it.** Goodput is the share of wall time that is work which lasted. Without a spare, most of the rest is waiting for
# repairs. At the low rate one spare is cheapest; at the high one two and three cost the same. Does that hang on the repair?

# %%
for rate, days in itertools.product((3.8, 24.0), (0.5, 1.0, 2.0)):
    dollars = [runs_of(rate, spares, repair_days=days)[1].mean() for spares in range(8)]
    print(f"{rate:4g} failures per 1,000 node-days, repair {days:g} days: cheapest with {dollars.index(min(dollars))} spares (simulated)")

# %% [markdown]
# Now let every failure be a silent one: noticed by a timeout of a minute, by gloo's default, or by somebody who comes in 8
# hours later:

# %%
for rate, minutes in itertools.product((3.8, 24.0), (1, 30, 480)):
    found, dollars = runs_of(rate, 2, 60.0 * minutes)
    print(f"{rate:4g} failures per 1,000 node-days, noticed after {minutes:3d} min: goodput {found.goodput.mean():.1%}, "
          f"{dollars.mean() / 1e6:.3f} million $ (simulated, 2 spares)")

# %% [markdown]
# **Read it.** Against a minute, half an hour of timeout costs 0.3 points of goodput at the low rate, and 1.4 at the high one.
# Eight hours cost 4 and 21. So what counts is that *something* notices: a timeout, which must be longer than your longest
# honest wait (the first step, a save, an evaluation), and the alert on the last step's time.
#
# **The answer in one breath.** Save whole checkpoints (lesson 16); notice by a timeout and an alert; restart by elastic
# `torchrun`, and test a node before it comes back; keep one spare, or two to four where failures are frequent; find the culprit by traces, own seconds and
# checksums.
#
# ## Recap
#
# | you see | look at | do |
# |---|---|---|
# | ranks time out, one does not | flight recorder, merged: who is behind? | repair the `if` around a collective |
# | "connection closed by peer" | which host says nothing any more; exit code -9; memory before | replace the host, or mend the leak |
# | step time grew on all ranks | own seconds by rank | take out the slow host |
# | weights differ over replicas | checksums: which rank, which tensor | copy from a healthy one; take out the GPU |
# | nothing moves, nothing is logged | the alert on the last step's time | dump traces, then restart |
#
# - A process that dies is noticed at once; a link that falls silent is noticed after the timeout.
# - `torchrun` starts *all* ranks from the last checkpoint; torchft loses a step and a replica. A single replica cannot
#   shrink: it waits for a node.
#
# **Test yourself.** The loss jumps on all ranks alike, and checksums agree. What can it still be?
#
# <details><summary>Answer</summary>
#
# A bad batch, a flip in a gradient before the all-reduce, or the state of the optimizer. PaLM's team went back about 100
# steps and skipped 200 to 500 batches; the same batches did no harm to another state of the model
# ([arXiv:2204.02311](https://arxiv.org/abs/2204.02311), section 5.1).
#
# </details>
#
# ### Where next
#
# Exercise 4 of [lab 16](../../labs/advanced/16_runs_that_survive.ipynb) has three dead runs to diagnose.
# [Lesson 17](17_cluster_and_budget.ipynb) starts such a script by a scheduler. **References.** PyTorch,
# [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html). Llama Team 2024,
# [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4.

# %% [markdown]
# ## On Monday
#
# **The launch**, on every host (1 to 2 of them here). `HOST0` is one that stays; `train.py` loads its newest checkpoint and lets errors end it. Kill
# a rank by hand once: the job must go on by itself. After a hang, `torchfrtrace /shared/traces --prefix rank_` says who is behind.
#
# ```bash
# export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # PyTorch 2.15
# export TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/shared/traces/rank_
# torchrun --nnodes=1:2 --nproc-per-node=8 --max-restarts=5 \
#     --rdzv-backend=c10d --rdzv-endpoint=$HOST0:29400 --rdzv-id=run1 train.py
# ```
#
# **In `train.py`**: a short timeout, and every 100 steps `look_at_ranks(model, forward_seconds)` on all ranks, where weights
# are replicated (DDP). On a GPU take the seconds from CUDA events: the host's clock times launches.
#
# ```python
# import datetime
# import torch
# import torch.distributed as dist
#
# dist.init_process_group(timeout=datetime.timedelta(minutes=2))  # longer than your longest honest wait
#
#
# def look_at_ranks(model, forward_seconds):
#     """On all ranks. The forward pass alone: in DDP's backward a rank already waits for others."""
#     sums = [torch.hash_tensor(p.detach()).view(torch.int64) for p in model.parameters()]
#     mine = torch.stack([*sums, torch.tensor(int(1e6 * forward_seconds), device=sums[0].device)])
#     dist.all_gather(rows := [torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)
#     sums, micros = torch.stack(rows).split([len(sums), 1], dim=1)
#     odd = (sums != sums.mode(dim=0).values).any(dim=1).nonzero().flatten().tolist()
#     slow = (micros[:, 0] > 1.5 * micros.median()).nonzero().flatten().tolist()
#     if dist.get_rank() == 0 and (odd or slow):
#         print(f"other weights on ranks {odd}, slow ranks {slow}", flush=True)
# ```
#
# **With the Trainer** (`model`, `dataset` and the numbers of steps are yours), started by the same `torchrun`. A second start
# must not begin at step 1, and not from a save that was cut off: `trainer_state.json` is written last.
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
