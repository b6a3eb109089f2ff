# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 14: Three dimensions at once
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 4 of 5 | 60 | lesson 14; any laptop (Linux, macOS, WSL2) |
#
# Four exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check`
# that says *not attempted*, *not yet* with a nudge, or *correct*. Hints are folded away: click one
# to open it. The exercises follow the
# [lesson](../../notebooks/advanced/14_three_dimensions.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/advanced/14")

# %%
import itertools
import math

import torch
import torch.distributed as dist

from utils import check
from utils.lessons.lesson_14.faulty import faulty_run, one_process
from utils.lessons.lesson_14.placement import crossing_bytes

# %% [markdown]
# ## Exercise 1: axes on nodes
#
# **Spec.** `place_axes(sizes, sent, gpus_per_node)` returns a layout with the **fewest bytes between nodes**. `sizes`
# has the ranks along each axis, `sent` the GB that a rank sends to its neighbour along it in a step (along `"pp"` both
# directions together). A layout is a list of factors, slowest first; its last factors lie in a node. An axis may stand
# in several places: `[("shard", 2), ("pp", 4), ("shard", 4), ("tp", 2)]` has eight replicas, four of them side by side.
# In every case there are factors that fill a node exactly.
#
# `crossing_bytes(layout, sent, gpus_per_node)` counts a layout for you, by axis. Along `"pp"` the last stage
# sends nothing to the first; all other axes are rings. The last case has 4,096 ranks, and the check stops after ten
# seconds. **Your score is the bytes that leave nodes**, over all cases.

# %%
def place_axes(sizes: dict, sent: dict, gpus_per_node: int) -> list:
    # BEGIN SOLUTION
    def leaving(axis, inside):
        whole = sizes[axis]
        if inside == whole:
            return 0.0
        return sent[axis] * (1 / inside - (1 / whole if axis == "pp" else 0))

    divisors = [[k for k in range(1, n + 1) if n % k == 0] for n in sizes.values()]
    fitting = (row for row in itertools.product(*divisors) if math.prod(row) == gpus_per_node)
    best = min(fitting, key=lambda row: sum(map(leaving, sizes, row)))
    outside = [(axis, n // k) for (axis, n), k in zip(sizes.items(), best, strict=True)]
    return outside + list(zip(sizes, best, strict=True))
    # END SOLUTION


check("14.place_axes", place_axes)

# %% [markdown]
# <details><summary>Hint 1</summary>The order inside a node does not matter, and neither does the order outside. Then
# what is left to choose?</details>
# <details><summary>Hint 2</summary>Choose for each axis how many of its ranks lie in a node: divisors whose product is
# <code>gpus_per_node</code>.</details>
# <details><summary>Hint 3</summary>Of a ring of n with k side by side in a node, every k-th hop leaves it, unless k is
# n. Count with <code>crossing_bytes</code> on a small case whether your formula is right, for a chain too.</details>

# %% [markdown]
# ## Exercise 2: one norm over three axes
#
# **Spec.** All eight ranks of PP 2 x DP 2 x TP 2 call `clip_over_axes(gradients, place, limit)`. `gradients` is a list
# of pairs `(tensor, axes)`: the tensor is this rank's, in float64, and `axes` names those along which **other ranks
# hold a copy** of it, such as `("tp",)` for a norm's weight. `place` has this rank's place along `"pp"`, `"shard"` and
# `"tp"`. The function returns the norm of *all* gradients, each counted once, as a number, and multiplies each gradient
# in place by `limit / norm` where the norm is above the limit. A stage may have no gradients at all. **Your score is
# the number of collectives** over the four calls of the check; use the group of all ranks.

# %%
def clip_over_axes(gradients, place, limit):
    # BEGIN SOLUTION
    square = torch.zeros((), dtype=torch.float64)
    for tensor, copied in gradients:
        if all(place[axis] == 0 for axis in copied):
            square += tensor.square().sum()
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if norm > limit:
        for tensor, _ in gradients:
            tensor.mul_(limit / norm)
    return norm
    # END SOLUTION


check("14.clip_over_axes", clip_over_axes)

# %% [markdown]
# <details><summary>Hint 1</summary>A copy must be counted by exactly one of the ranks that hold it. Let the one at
# place 0 do it.</details>
# <details><summary>Hint 2</summary>Squares are added up, norms are not. Add up your own first, then send one
# number.</details>
# <details><summary>Hint 3</summary>A rank that returns early lets the other seven wait for ever.</details>

# %% [markdown]
# ## Exercise 3: two runs, two faults
#
# Runs A and B train the same tiny model, and something is wrong with each. `faulty_run("A", pp=2, shard=2, tp=2)` gives
# the losses and norms of three steps on as many ranks of each axis as you ask for, `one_process()` the right ones. Take
# axes away until a run is right. Then name that axis (`"pp"`, `"shard"` or `"tp"`) and choose the fault's number from
# the list:
#
# 1. Gradients of norm weights are not added up over the slices.
# 2. All replicas read the rows of the first.
# 3. Every stage starts from the same random draws as the first.
# 4. Slices of one matrix read different rows.
# 5. Each stage clips by a norm of its own.
# 6. Gradients of replicas are added up, where their mean is due.

# %%
right = one_process()
print("one process:", *(f"{loss:.4f}" for loss in right["losses"]), "norm", f"{right['norms'][0]:.4f}")
for run in "AB":
    found = faulty_run(run, pp=2, shard=2, tp=2)
    print(f"run {run}:      ", *(f"{loss:.4f}" for loss in found["losses"]), "norm", f"{found['norms'][0]:.4f}")

# %%
# your experiments

# %%
# BEGIN SOLUTION
for run, axis in (("A", "pp"), ("A", "shard"), ("B", "pp"), ("B", "shard")):
    found = faulty_run(run, **{axis: 2})
    print(run, axis, *(f"{loss:.4f}" for loss in found["losses"]))
axis_a, fault_a = "pp", 3
axis_b, fault_b = "shard", 2
# END SOLUTION
# STUB: axis_a = ...
# STUB: fault_a = ...
# STUB: axis_b = ...
# STUB: fault_b = ...

check("14.two_faults", {"A: axis": axis_a, "A: fault": fault_a, "B: axis": axis_b, "B: fault": fault_b})

# %% [markdown]
# <details><summary>Hint 1</summary>Two ranks along one axis, and one along the others: three runs for each of A and
# B.</details>
# <details><summary>Hint 2</summary>Is the loss of <i>step 1</i> right? Before the first update only what is read and
# what was drawn can be wrong.</details>
# <details><summary>Hint 3</summary>Of two faults that an axis can have, one changes the first loss and the other does
# not.</details>

# %% [markdown]
# ## Exercise 4: layers that balance
#
# **Spec.** Under 1F1B stage $i$ of $p$, counted from 0, holds the activations of $\min(m, p - i)$ micro-batches, so
# equal stages are not equally full. `deal_layers(layers, stages, micro_batches, state, kept, end)` returns the number
# of layers of each stage, one at least. A layer takes `state` GB, and `kept` GB for each micro-batch in flight;
# embedding and head take `end` GB each, on the first and the last stage. **Your score is the GB of the fullest stage**,
# summed over all cases; the least possible is par. The largest has 80 layers.

# %%
def deal_layers(layers: int, stages: int, micro_batches: int, state: float, kept: float, end: float) -> list:
    # BEGIN SOLUTION
    def held(stage, count):
        ends = (stage == 0) + (stage == stages - 1)
        return ends * end + count * (state + kept * min(micro_batches, stages - stage))

    counts = [1] * stages
    for _ in range(layers - stages):
        lowest = min(range(stages), key=lambda stage: held(stage, counts[stage] + 1))
        counts[lowest] += 1
    return counts
    # END SOLUTION


check("14.deal_layers", deal_layers)

# %% [markdown]
# <details><summary>Hint 1</summary>Write down what a stage holds with n layers. It is a straight line in n, and steeper
# for early stages.</details>
# <details><summary>Hint 2</summary>Deal one layer after the other. To whom should the next one go?</details>
#
# Here is the [solution](../../solutions/advanced/14_three_dimensions.ipynb) of this lab, with its
# outputs.
