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
# | 4 of 5 | 60 | lesson 09; any laptop (Linux, macOS, WSL2) |
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
# ## Exercise 1: the moment that decides
#
# **Spec.** The textbook counts states at rest. `largest_moment(parameter_count, stage, ranks, bucket)` returns the
# bytes on one rank at the moment when there are **most**, as section 4 of the lesson found DeepSpeed to work. Here
# it also reduces gradients in bf16. `stage` is 1, 2 or 3, `bucket` the elements of `reduce_bucket_size`. Two moments
# compete:
#
# - *at the end of backward*: parameters, 16-bit gradients (stage 1: all of them; 2 and 3: this rank's part and a
#   bucket), 12 bytes of optimizer state;
# - *when the optimizer begins*: parameters, this rank's part of the gradients in 16 bits **and** in fp32, 12
#   bytes of optimizer state, and the bucket where the stage keeps it for good.
#
# Take a part as 1/N, exactly.

# %%
def largest_moment(parameter_count: int, stage: int, ranks: int, bucket: int) -> float:
    # BEGIN SOLUTION
    parameters = 2 * parameter_count / (ranks if stage == 3 else 1)
    always = parameters + 12 * parameter_count / ranks
    part = 2 * parameter_count / ranks
    backward = always + (2 * parameter_count if stage == 1 else part + 2 * bucket)
    begins = always + part + 4 * parameter_count / ranks + (2 * bucket if stage == 3 else 0)
    return max(backward, begins)
    # END SOLUTION


check("09.largest_moment", largest_moment)

# %% [markdown]
# <details><summary>Hint 1</summary>Parameters are whole below stage 3. Optimizer state is divided in all three.</details>
# <details><summary>Hint 2</summary>A bucket of n elements is 2 n bytes in bf16.</details>
# <details><summary>Hint 3</summary>Which stage keeps its bucket from step to step? The lesson's list of what each holds
# says it.</details>

# %% [markdown]
# ## Exercise 2: bytes per step, with accumulation
#
# **Spec.** `sent_bytes(parameter_count, ranks, how, accumulation)` returns what one rank of a ring sends in one
# optimizer step of `accumulation` micro-batches, in bf16. `how` is `"zero1"` or `"zero2"` (DeepSpeed as it comes:
# all-reduce), `"zero2 to owners"` (gradients reduced to their owners), or `"zero3"` (parameters gathered for each
# forward and each backward, gradients reduce-scattered).

# %%
def sent_bytes(parameter_count: int, ranks: int, how: str, accumulation: int) -> float:
    # BEGIN SOLUTION
    g = accumulation
    rounds = {"zero1": 2 + 1, "zero2": 2 * g + 1, "zero2 to owners": g + 1, "zero3": 3 * g}[how]
    return rounds * 2 * parameter_count * (ranks - 1) / ranks
    # END SOLUTION


check("09.sent_bytes", sent_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>A round over a ring sends (N - 1) / N of the whole tensor. An all-reduce is two rounds,
# all the others are one.</details>
# <details><summary>Hint 2</summary>Below stage 3 parameters are gathered once, after the step. ZeRO-1 keeps all gradients
# until then; ZeRO-2 has no room to.</details>

# %% [markdown]
# ## Exercise 3: the plan that sends least
#
# **Spec.** `cheapest_plan(parameter_count, ranks, card_bytes, texts, activation_bytes)` returns `(stage, micro_batch)`,
# or `None` if nothing fits. Each rank has `texts` texts a step; the micro-batch divides them, and the rest is
# accumulation. A plan fits if states (2 + 2 + 12 bytes, divided as the stage says) and `activation_bytes` for each
# text of a micro-batch take `card_bytes` or less. Among those, send least, all in bf16, counted in
# rounds as in Exercise 2 for `"zero1"`, `"zero2"` and `"zero3"`; DDP (stage 0) takes 2 rounds, with `no_sync`.
# **Your score is the rounds** over all cards. With as many micro-batches a higher stage never sends less;
# larger micro-batches are fewer.

# %%
def cheapest_plan(parameter_count: int, ranks: int, card_bytes: int, texts: int, activation_bytes: int):
    # BEGIN SOLUTION
    best = None
    for stage, (whole, shared) in enumerate([(16, 0), (4, 12), (2, 14), (0, 16)]):
        for micro_batch in (size for size in range(1, texts + 1) if texts % size == 0):
            states = parameter_count * (whole + shared / ranks)
            if states + micro_batch * activation_bytes <= card_bytes:
                g = texts // micro_batch
                plan = ([2, 3, 2 * g + 1, 3 * g][stage], (stage, micro_batch))
                best = plan if best is None else min(best, plan)
    return best and best[1]
    # END SOLUTION


check("09.cheapest_plan", cheapest_plan)

# %% [markdown]
# <details><summary>Hint 1</summary>There are four stages and few divisors: try every pair.</details>
# <details><summary>Hint 2</summary>Keep the pair with the fewest rounds. What does a function return that found none?</details>

# %% [markdown]
# ## Exercise 4: ZeRO-1 by hand
#
# **Spec.** Every rank of four calls `zero_1_step(parameters, state, rate)` after its own backward.
# Gradients are this rank's. `state` is an empty dictionary at first, and yours to fill. The step does SGD with momentum
# as if one process had the whole batch: `velocity = 0.9 * velocity + gradient`, then
# `parameter -= rate * velocity`.
#
# - Average all gradients over the ranks with **one** collective of a flat tensor.
# - Keep the velocity of **this rank's part alone**, a quarter of all elements.
# - Update that part, then give everyone all parts with **one** all-gather.
#
# All elements divide evenly over the ranks. **Your score is the bytes that a rank of a ring sends**: a
# reduce-scatter sends half of what an all-reduce does.

# %%
@torch.no_grad()
def zero_1_step(parameters, state, rate):
    # BEGIN SOLUTION
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole_gradient = torch.cat([p.grad.flatten() for p in parameters])
    gradient = torch.empty(len(whole_gradient) // ranks)
    dist.reduce_scatter_tensor(gradient, whole_gradient)
    gradient /= ranks
    if "velocity" not in state:
        state["velocity"] = torch.zeros_like(gradient)
    state["velocity"].mul_(0.9).add_(gradient)
    whole = torch.cat([p.flatten() for p in parameters])
    part = whole.chunk(ranks)[rank] - rate * state["velocity"]
    dist.all_gather_into_tensor(whole, part)
    for p, new in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
        p.copy_(new.view_as(p))
    # END SOLUTION


check("09.zero_1", zero_1_step)

# %% [markdown]
# <details><summary>Hint 1</summary><code>torch.cat([p.grad.flatten() for p in parameters])</code> is the flat
# gradient. This rank's part of n elements goes from <code>rank * n // ranks</code> to
# <code>(rank + 1) * n // ranks</code>.</details>
# <details><summary>Hint 2</summary><code>dist.reduce_scatter_tensor(part, whole)</code> gives each rank the sum of its part,
# <code>dist.all_reduce</code> of everything. Both add up: divide by the number of ranks.</details>
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
# 3. Write a configuration that keeps the four micro-batches of one item, in bf16, and a share of the optimizer state on
#    each rank, and sends gradients once.

# %%
slow = zero_config(2, 1_000_000, world_size=4, micro_batch=1, accumulation=4)
# BEGIN SOLUTION
grew = "all-reduce"
times_sent = 4
cured = zero_config(1, 1_000_000, world_size=4, micro_batch=1, accumulation=4)
# END SOLUTION
# STUB: grew = ...
# STUB: times_sent = ...
# STUB: cured = ...

check("09.accumulation", {
    "collective that grew": grew,
    "times that gradients are sent": times_sent,
    "cured configuration": cured,
})

# %% [markdown]
# <details><summary>Hint 1</summary>Gradients of 1,000,000 parameters are 2,000,000 bytes in bf16.</details>
# <details><summary>Hint 2</summary>ZeRO-2 keeps only its own part of the gradients, so it cannot wait.</details>
# <details><summary>Hint 3</summary>Lesson 09, "Break it". What does one stage lower keep?</details>
#
# Here is the [solution](../../solutions/intermediate/09_sharding.ipynb) of this lab, with its
# outputs.
