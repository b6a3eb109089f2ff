# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 13: Pipelines
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 4 of 5 | 75 | lesson 13; any laptop (Windows: WSL2) |
#
# Five exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check` that says *not
# attempted*, *not yet* with a nudge, or *correct*. Hints are folded away. The exercises follow the
# [lesson](../../notebooks/advanced/13_pipelines.ipynb). Work in a copy (`make my-labs`). Exercise 3 is the main one:
# PyTorch runs the schedule that you invent.
#
# A schedule is a list of actions for each rank, as texts: `"2F0"` is stage 2, forward, micro-batch 0; `B` is a
# backward, or `I` (to the input) and later `W` (to the weights).

# %% tags=["setup"]
here = setup("labs/advanced/13")

# %%
import re
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage

from utils import check, draw_schedules, run_ranks, show
from utils.parallel import read_program
from utils.planner.schedules import schedule_actions, run_schedule, timed
from utils.views import Panel
from utils.lessons.lesson_13.own_schedule import OwnSchedule
from utils.lessons.lesson_13.timed import SleepingStage

# %% [markdown]
# ## Exercise 1: 1F1B for any pipeline
#
# **Spec.** `one_f_one_b(stages, micro_batches)` returns 1F1B's lists, one for each rank; rank r holds stage r. A rank
# runs some forwards to warm up, then one forward and one backward in turn, then the backwards that are left. It must work
# for any number of stages and micro-batches, also where there are fewer micro-batches than stages. Rank r never holds
# more than min(micro_batches, stages - r) of them.

# %%
def one_f_one_b(stages: int, micro_batches: int) -> list[list[str]]:
    # BEGIN SOLUTION
    rows = []
    for rank in range(stages):
        warm = min(stages - 1 - rank, micro_batches)
        row = [f"{rank}F{k}" for k in range(warm)]
        for k in range(micro_batches):
            if warm + k < micro_batches:
                row.append(f"{rank}F{warm + k}")
            row.append(f"{rank}B{k}")
        rows.append(row)
    return rows
    # END SOLUTION


# %%
check("13.one_f_one_b", one_f_one_b)

# %% [markdown]
# <details><summary>Hint 1</summary>The last rank can run a backward right after its first forward. How many more
# forwards fit into the wait of the rank before it?</details>
# <details><summary>Hint 2</summary>Write the forwards and the backwards of a rank as two lists. Warm-up takes
# forwards from the front, then you take one of each in turn. Mind lists that are shorter than the warm-up.</details>

# %% [markdown]
# ## Exercise 2: find the deadlock before it runs
#
# An action can begin when all before it in its rank's list are done, and what it needs is done:
#
# - a forward needs the same micro-batch's forward on the stage before;
# - a backward (`B` or `I`) needs its own stage's forward, and the backward (`B` or `I`) of the stage behind;
# - `W` needs its own stage's `I`.
#
# **Spec.** `stuck(rows)` returns, for each rank, the action at which it waits for ever, or None if its list gets done.
# A rank may hold several stages, in any order.

# %%
def stuck(rows: list[list[str]]) -> list[str | None]:
    # BEGIN SOLUTION
    program = [[re.fullmatch(r"(\d+)([FBIW])(\d+)", action).groups() for action in row] for row in rows]
    last = max(int(stage) for row in program for stage, _, _ in row)
    done, place, before = set(), [0] * len(rows), None

    def can_begin(stage, kind, number):
        before, behind = int(stage) - 1, int(stage) + 1
        if kind == "F":
            return before < 0 or (str(before), "F", number) in done
        if kind == "W":
            return (stage, "I", number) in done
        gradient = behind > last or done & {(str(behind), "B", number), (str(behind), "I", number)}
        return (stage, "F", number) in done and bool(gradient)

    while place != before:
        before = list(place)
        for rank, row in enumerate(program):
            while place[rank] < len(row) and can_begin(*row[place[rank]]):
                done.add(row[place[rank]])
                place[rank] += 1
    return [row[at] if at < len(row) else None for row, at in zip(rows, place, strict=True)]
    # END SOLUTION


# %%
check("13.stuck", stuck)

# %% [markdown]
# <details><summary>Hint 1</summary>Keep a set of what is done and a place for each rank. Go round the ranks and let each
# move as far as it can.</details>
# <details><summary>Hint 2</summary>A rank that could not move may be able to later. When is it certain that nobody ever
# moves again?</details>
# <details><summary>Hint 3</summary><code>re.fullmatch(r"(\d+)([FBIW])(\d+)", action).groups()</code> takes an action
# apart.</details>

# %% [markdown]
# ## Exercise 3: a schedule of your own
#
# F, I and W take one unit of time each, B two; messages are free. Rank r holds stage r, one stage each. From the
# forward of a micro-batch to its `B` or `W`, a rank holds its activations.
#
# **Spec.** `own_schedule(stages, micro_batches)` returns a schedule in which every micro-batch passes every stage
# forward and backward, nothing deadlocks, and **no rank ever holds more than `stages` micro-batches**. It must end sooner
# than 1F1B. **Your score is the time that all problems take together; par is ZB-H1's.** There are at least as many
# micro-batches as stages.

# %%
def own_schedule(stages: int, micro_batches: int) -> list[list[str]]:
    # BEGIN SOLUTION
    rows = []
    for rank in range(stages):
        warm, weights = stages - 1 - rank, 0
        row = [f"{rank}F{k}" for k in range(warm)]
        for k in range(micro_batches):
            if warm + k < micro_batches:
                row.append(f"{rank}F{warm + k}")
            row.append(f"{rank}I{k}")
            if k >= rank:  # later ranks hold fewer micro-batches, and may put off their weights
                row.append(f"{rank}W{weights}")
                weights += 1
        rows.append(row + [f"{rank}W{k}" for k in range(weights, micro_batches)])
    return rows
    # END SOLUTION


# %%
check("13.own_schedule", own_schedule)

# %% [markdown]
# <details><summary>Hint 1</summary>Start from your 1F1B with I and W in place of B. When does the rank before yours get
# what it waits for?</details>
# <details><summary>Hint 2</summary>Under 1F1B, rank r holds stages - r micro-batches, and may hold r more here. A W that is
# put off fills an idle moment at the end.</details>
# <details><summary>Hint 3</summary>Each W that waits keeps one micro-batch in flight. So how many may wait on rank r,
# and after which of its backwards must the first one run?</details>

# %% [markdown]
# ### Use it
#
# PyTorch's pipelining reads a schedule from CSV, a line for each rank. `OwnSchedule` writes that file and hands it over.
# Four ranks run yours, with stages that sleep 20 ms a pass. Until your function returns something, the cell prints nothing.

# %%
def trained(rows, nap=0.02):
    rank = dist.get_rank()
    module = SleepingStage(rank, nap, nap, nap)
    stage = PipelineStage(module, rank, 4, torch.device("cpu"))
    schedule = OwnSchedule(rows)([stage], n_microbatches=8, loss_fn=F.mse_loss)
    inputs, targets = torch.linspace(1, 2, 8).reshape(8, 1).requires_grad_(), torch.zeros(8, 1)
    for _ in range(2):  # the first step finds out the shapes
        module.zero_grad()
        module.forget()
        dist.barrier()
        schedule.step(*([inputs] if rank == 0 else []), **({"target": targets} if rank == 3 else {}))
    return module.spans, module.weight.grad.item()


# %%
def launch_seconds(rows, ran):
    """From the end of a pass to a W, which waits for nobody: what it takes to start a pass."""
    gaps = [ran.starts[rank][i] - ran.ends[rank][i - 1] for rank, row in enumerate(rows)
            for i, action in enumerate(row) if i and action.kind == "W"]
    return statistics.median(gaps) if gaps else 0.0


mine = own_schedule(4, 8)

# %%
if mine is not None:
    rows = read_program(mine)
    results = run_ranks(trained, 4, rows)
    ran = timed(rows, {action: span for spans, _ in results for action, span in spans.items()})
    panels = {"yours, drawn": Panel(rows, run_schedule(rows, 1, 2)), "1F1B, drawn": Panel(old := schedule_actions("1f1b", 4, 8), run_schedule(old, 1, 2))}
    show(draw_schedules(panels), alt="Your schedule and 1F1B, drawn: yours ends earlier.")
    weights = torch.ones(4, requires_grad=True)
    F.mse_loss(torch.linspace(1, 2, 8) * weights.prod(), torch.zeros(8)).backward()
    print("gradients on 4 ranks", [round(g, 5) for _, g in results], " in one process", [round(g, 5) for g in weights.grad.tolist()])
    launch = launch_seconds(rows, ran)
    launched = run_schedule(rows, 0.02, 0.04, launch=launch).total / (8 * 0.06) - 1
    print(f"bubble of the work: {run_schedule(rows, 1, 2).bubble_ratio:.3f} as drawn, {launched:.3f} with {1e3 * launch:.1f} ms to start a pass "
          f"(predicted); {ran.total / (8 * 0.06) - 1:.3f} (measured)")

# %% [markdown]
# The second number adds what it takes to start a pass, measured before each W. The measured one holds the messages, too.
#
# ## Exercise 4: break it, diagnose it
#
# Someone tuned 1F1B for four ranks and six micro-batches by hand. The job hangs.

# %%
texts = [
    "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5",
    "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 1B5",
    "2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2F5 2B3 2B4 2B5",
    "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5",
]
BROKEN = [text.split() for text in texts]

# %%
print("where the ranks stand:", stuck(BROKEN))

# %% [markdown]
# 1. Two ranks wait for each other. Which? Write a list of their numbers. (A rank that only waits for one of them is not in the circle.)
# 2. Cure it: move actions in the list of **one** rank, so that nothing hangs and no rank r holds more than 1F1B lets it,
#    min(6, 4 - r) micro-batches.

# %%
# BEGIN SOLUTION
circle = [1, 2]
cured = [list(row) for row in BROKEN]
cured[2] = one_f_one_b(4, 6)[2]
# END SOLUTION
# STUB: circle = ...
# STUB: cured = ...

check("13.diagnosis", {"circle": circle, "cured": cured})

# %% [markdown]
# <details><summary>Hint 1</summary>For each rank: at which action does it stand, what does that action need, and which
# rank would have to do it?</details>
# <details><summary>Hint 2</summary>Count the warm-up forwards of each rank. Which rank $r$ has more than
# $4 - r$?</details>

# %% [markdown]
# ## Exercise 5: stages that take equally long
#
# A pipeline runs at the pace of its slowest stage. Layers are not alike: the first is light here, and the head with its
# vocabulary is heavy. The ten blocks between are alike: where their times differ, the machine had other work. These are
# the times on this machine.

# %%
def seconds_of_layers(width=128, vocabulary=2500):
    """Of a light layer, ten blocks and a head; forward and backward."""
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(10)]
    layers = [nn.Linear(width, width), *blocks, nn.Linear(width, vocabulary)]
    x, rounds = torch.randn(512, width, requires_grad=True), [[] for _ in layers]
    for _ in range(7):  # in turn: what else the machine does meets all layers alike
        for layer, seconds in zip(layers, rounds, strict=True):
            start = time.perf_counter()
            layer(x).sum().backward()
            seconds.append(time.perf_counter() - start)
    return [min(seconds) for seconds in rounds]


layer_seconds = seconds_of_layers()
print("ms of each layer (measured):", " ".join(f"{1e3 * s:.1f}" for s in layer_seconds))

# %% [markdown]
# **Spec.** `cut_layers(seconds, stages)` returns how many layers each stage holds, first to last, each at least one, so
# that the slowest stage is as fast as can be. The order of layers stays. There are up to 100 layers and 16 stages. **Your
# score is the slowest stage over the optimum's**, in the worst of the problems; 1.000 is the best.

# %%
def cut_layers(seconds: list[float], stages: int) -> list[int]:
    # BEGIN SOLUTION
    # best[n]: the cut of the first n layers whose slowest stage is fastest, and that stage's time
    sums = [0.0]
    for each in seconds:
        sums.append(sums[-1] + each)
    best = {n: (sums[n], [n]) for n in range(1, len(seconds) + 1)}
    for _ in range(stages - 1):
        grown = {}
        for n in range(1, len(seconds) + 1):
            cuts = [(max(best[k][0], sums[n] - sums[k]), best[k][1] + [n - k]) for k in range(1, n) if k in best]
            if cuts:
                grown[n] = min(cuts)
        best = grown
    return best[len(seconds)][1]
    # END SOLUTION


# %%
check("13.cut_layers", cut_layers)

# %% [markdown]
# <details><summary>Hint 1</summary>Greedy filling up to the average can leave the last stage too much. What is the best
# cut of the first n layers into k stages, if you know all best cuts into k - 1?</details>
# <details><summary>Hint 2</summary>Or ask: can all stages stay below t seconds? That is easy by greed. Search the smallest
# t.</details>
#
# ### Use it

# %%
counts = cut_layers(layer_seconds, 4)
for name, each in {"even": [3, 3, 3, 3], "yours": counts}.items():
    if each is not None:
        ends = [sum(each[: i + 1]) for i in range(4)]
        stages = [sum(layer_seconds[end - n : end]) for end, n in zip(ends, each, strict=True)]
        print(f"{name:<6} {each}: slowest stage {1e3 * max(stages):.1f} ms; idle even in the steady state: "
              f"{1 - sum(stages) / (4 * max(stages)):.0%} (predicted from measured layers)")

# %% [markdown]
# Here is the [solution](../../solutions/advanced/13_pipelines.ipynb) of this lab, with its outputs.
