# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 09: Sharding
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 3 of 5 | 60 | lesson 09; any laptop (Linux, macOS, WSL2) |
#
# Five exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check`
# that says *not attempted*, *not yet* with a nudge, or *correct*. Hints are folded away: click one
# to open it. The exercises follow the
# [lesson](../../notebooks/intermediate/09_sharding.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/intermediate/09")

# %%
import torch
import torch.distributed as dist

from utils import check
from utils.techniques.zero import zero_config

# %% [markdown]
# ## Exercise 1: the staircase
#
# **Spec.** `state_bytes(parameter_count, stage, ranks)` returns the bytes of states on one rank, in the
# mixed precision of the ZeRO paper: 2 bytes of parameter, 2 of gradient, 12 of optimizer state.
# `stage` is 0 (DDP), 1, 2 or 3.

# %%
def state_bytes(parameter_count: int, stage: int, ranks: int) -> float:
    # BEGIN SOLUTION
    parameters = 2 / (ranks if stage >= 3 else 1)
    gradients = 2 / (ranks if stage >= 2 else 1)
    optimizer = 12 / (ranks if stage >= 1 else 1)
    return parameter_count * (parameters + gradients + optimizer)
    # END SOLUTION


check("09.staircase", state_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>Three terms. Each is whole below its stage, and divided by N from it on.</details>
# <details><summary>Hint 2</summary>Stage 1 divides the optimizer state, stage 2 the gradients too, stage 3 the
# parameters too.</details>

# %% [markdown]
# ## Exercise 2: bytes per step
#
# **Spec.** `sent_bytes(parameter_count, ranks, how)` returns what one rank of a ring sends in one step
# of bf16 training, without accumulation. `how` is `"allreduce"` (DeepSpeed's ZeRO-1 and 2 as they come:
# all-reduce gradients, all-gather parameters), `"owners"` (reduce gradients to their owners, all-gather
# parameters) or `"zero3"` (gather all parameters for forward and again for backward, reduce-scatter
# gradients).

# %%
def sent_bytes(parameter_count: int, ranks: int, how: str) -> float:
    # BEGIN SOLUTION
    rounds = {"allreduce": 2 + 1, "owners": 1 + 1, "zero3": 2 + 1}[how]
    return rounds * 2 * parameter_count * (ranks - 1) / ranks
    # END SOLUTION


check("09.sent_bytes", sent_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>A round over a ring sends (N - 1) / N of the whole tensor.</details>
# <details><summary>Hint 2</summary>An all-reduce is two rounds. All the others are one.</details>

# %% [markdown]
# ## Exercise 3: the lowest stage that fits
#
# **Spec.** `smallest_stage(parameter_count, ranks, card_bytes)` returns the lowest stage, 0 to 3, whose
# states fit into `card_bytes`, or `None` if none does. A higher stage never sends less, and with accumulation
# it sends more often, so the lowest is the best. Use `state_bytes`.

# %%
def smallest_stage(parameter_count: int, ranks: int, card_bytes: float):
    # BEGIN SOLUTION
    for stage in range(4):
        if state_bytes(parameter_count, stage, ranks) <= card_bytes:
            return stage
    return None
    # END SOLUTION


check("09.smallest_stage", smallest_stage)

# %% [markdown]
# <details><summary>Hint 1</summary>Try the stages in order, and return the first that fits.</details>
# <details><summary>Hint 2</summary>What does a function return that reaches its end?</details>

# %% [markdown]
# ## Exercise 4: ZeRO-1 by hand
#
# **Spec.** Every rank of four calls `zero_1_step(parameters, state, rate)` after its own backward.
# Gradients are this rank's. `state` is an empty dictionary at first, and yours to fill. The step does SGD with momentum
# as if one process had the whole batch: `velocity = 0.9 * velocity + gradient`, then
# `parameter -= rate * velocity`.
#
# - Average all gradients over the ranks with **one** all-reduce (or reduce-scatter) of a flat tensor.
# - Keep the velocity of **this rank's part alone**, a quarter of all elements.
# - Update that part, then give everyone all parts with **one** all-gather.
#
# All elements divide evenly over the ranks. Your score is the bytes of state, and what you put into
# collectives.

# %%
@torch.no_grad()
def zero_1_step(parameters, state, rate):
    # BEGIN SOLUTION
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gradient = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(gradient)
    mine = slice(rank * len(gradient) // ranks, (rank + 1) * len(gradient) // ranks)
    gradient = gradient[mine] / ranks
    if "velocity" not in state:
        state["velocity"] = torch.zeros_like(gradient)
    state["velocity"].mul_(0.9).add_(gradient)
    whole = torch.cat([p.flatten() for p in parameters])
    part = whole[mine] - rate * state["velocity"]
    dist.all_gather_into_tensor(whole, part)
    for p, new in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
        p.copy_(new.view_as(p))
    # END SOLUTION


check("09.zero_1", zero_1_step)

# %% [markdown]
# <details><summary>Hint 1</summary><code>torch.cat([p.grad.flatten() for p in parameters])</code> is the flat
# gradient. This rank's part of n elements goes from <code>rank * n // ranks</code> to
# <code>(rank + 1) * n // ranks</code>.</details>
# <details><summary>Hint 2</summary>An all-reduce adds up. Divide by the number of ranks.</details>
# <details><summary>Hint 3</summary><code>dist.all_gather_into_tensor(whole, part)</code> puts the ranks' parts one
# after the other. <code>whole.split(sizes)</code> cuts them into parameters again; copy them in place.</details>

# %% [markdown]
# ## Exercise 5: break it, diagnose it
#
# A run with ZeRO-2 on two nodes was slow. To send less, its owner cut each batch into four micro-batches:
# `accumulation=4`. It became slower. This is what a rank put into collectives in one step, for
# 1,000,000 parameters in bf16:
#
# | | before | after |
# |---|---|---|
# | all-reduce, bfloat16 | 2,000,000 bytes | 8,000,000 bytes |
# | all-gather, bfloat16 | 500,000 bytes | 500,000 bytes |
#
# 1. Which collective grew? Its name, in quotes.
# 2. How many times are gradients sent in a step now?
# 3. Write a configuration that keeps the four micro-batches and sends gradients once.

# %%
slow = zero_config(2, 1_000_000, world_size=4, micro_batch=1, accumulation=4)
# BEGIN SOLUTION
grew = "all-reduce"
times_sent = 4
cured = zero_config(1, 1_000_000, world_size=4, micro_batch=1, accumulation=4)
# END SOLUTION
# STUB: grew = times_sent = cured = ...

check("09.accumulation", {
    "collective that grew": grew,
    "times that gradients are sent": times_sent,
    "cured configuration": cured,
})  # fmt: skip

# %% [markdown]
# <details><summary>Hint 1</summary>Gradients of 1,000,000 parameters are 2,000,000 bytes in bf16.</details>
# <details><summary>Hint 2</summary>ZeRO-2 keeps only its own part of the gradients, so it cannot wait.</details>
# <details><summary>Hint 3</summary>Lesson 09, "Break it". What does one stage lower keep?</details>
#
# Here is the [solution](../../solutions/intermediate/09_sharding.ipynb) of this lab, with its
# outputs.
