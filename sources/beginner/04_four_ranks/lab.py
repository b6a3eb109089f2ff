# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 04: One model, four ranks
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 3 of 5 | 45 | lesson 04; any laptop (Linux, macOS or WSL2) |
#
# Five exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check`
# that says *not attempted*, *not yet* with a nudge, or *correct*. The checks run your functions on real
# ranks, with a timeout: a deadlock ends in a message. The exercises follow the
# [lesson](../../notebooks/beginner/04_four_ranks.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/beginner/04")

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from utils import RankError, check, run_ranks

# %% [markdown]
# ## Exercise 1: data parallelism by hand, in one call
#
# **Spec.** Every rank calls both functions on its own replica; both work in place and return nothing.
# `start_together(model)` gives every rank the parameters *and* buffers of rank 0.
# `average_gradients(model)`, called after backward, replaces each gradient by its mean over the ranks.
# The lesson's took a call per tensor; yours takes **one all-reduce**, of one flat tensor.

# %%
def start_together(model: nn.Module) -> None:
    # BEGIN SOLUTION
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    # END SOLUTION


def average_gradients(model: nn.Module) -> None:
    # BEGIN SOLUTION
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    # END SOLUTION


# %%
check("04.by_hand", {"start_together": start_together, "average_gradients": average_gradients})

# %% [markdown]
# <details><summary>Hint 1</summary><code>dist.broadcast(tensor, src=0)</code> overwrites the tensor on all
# ranks but rank 0.</details>
# <details><summary>Hint 2</summary>A parameter needs a gradient, so autograd objects to a change in place:
# give <code>parameter.detach()</code>, which shares its memory.</details>
# <details><summary>Hint 3</summary><code>torch.cat</code> joins flattened gradients into a copy. After the
# all-reduce and the division, <code>flat.split(sizes)</code> takes it apart again; copy each part back
# with <code>parameter.grad.copy_(...)</code>.</details>

# %% [markdown]
# ## Exercise 2: what does not hide
#
# DDP sends its buckets one after the other, over a ring. Simplified: all but the last are ready when backward
# begins. The last one is full when backward is over; it begins when the link is free as well.
#
# **Spec.** `exposed_seconds(bucket_bytes, ranks, link_bytes_per_second, backward_seconds)` returns by how
# many seconds the step is longer than its compute. `bucket_bytes` lists the buckets' payloads in the order
# of sending; there is at least one.

# %%
def exposed_seconds(
    bucket_bytes: list[int], ranks: int, link_bytes_per_second: float, backward_seconds: float
) -> float:
    # BEGIN SOLUTION
    ring = 2 * (ranks - 1) / ranks
    *before, last = [ring * size / link_bytes_per_second for size in bucket_bytes]
    return max(0.0, sum(before) - backward_seconds) + last
    # END SOLUTION


check("04.exposed_seconds", exposed_seconds)

# %% [markdown]
# <details><summary>Hint 1</summary>Turn each payload into seconds first: what a ring sends of it, over the
# link's rate.</details>
# <details><summary>Hint 2</summary>At which moment, counted from the start of backward, is the link free of
# all buckets but the last? The last one begins then, or when backward ends: whichever is later.</details>

# %% [markdown]
# ## Exercise 3: buckets
#
# **Spec.** `make_buckets(sizes_bytes, cap_bytes)` gets the sizes of the parameters, first layer first. It
# returns a list of buckets, each a list of indices, in the order in which backward fills them: the
# *last* parameter first. The rule is DDP's: a bucket is closed once it has reached the cap, so the
# parameter that takes it there still goes in. Each bucket is one all-reduce.

# %%
def make_buckets(sizes_bytes: list[int], cap_bytes: int) -> list[list[int]]:
    # BEGIN SOLUTION
    buckets, filled_bytes = [], 0
    for index in reversed(range(len(sizes_bytes))):
        if not buckets or filled_bytes >= cap_bytes:
            buckets.append([])
            filled_bytes = 0
        buckets[-1].append(index)
        filled_bytes += sizes_bytes[index]
    return buckets
    # END SOLUTION


# %%
check("04.make_buckets", make_buckets)

# %% [markdown]
# <details><summary>Hint 1</summary>Go through <code>reversed(range(len(sizes_bytes)))</code> once.</details>
# <details><summary>Hint 2</summary>Begin a new bucket when the last one has reached the cap, and at the very
# start.</details>

# %% [markdown]
# ## Exercise 4: accumulate, and weigh by tokens
#
# **Spec.** `accumulate(model, micro_batches)` runs on every rank. `model` is a `DistributedDataParallel`;
# each micro-batch is a pair: inputs `(tokens, 6)` and targets `(tokens,)`, with unequal numbers of tokens.
# Afterwards `parameter.grad` is, on every rank, the gradient of the mean cross-entropy over *all tokens of
# all micro-batches of all ranks*. Gradients are sent once. **Your score is the bytes sent.**

# %%
def accumulate(model: nn.Module, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    # BEGIN SOLUTION
    tokens = torch.tensor(sum(len(targets) for _, targets in micro_batches))
    dist.all_reduce(tokens)
    scale = dist.get_world_size() / tokens.item()

    def backward(inputs, targets):
        (F.cross_entropy(model(inputs), targets, reduction="sum") * scale).backward()

    with model.no_sync():
        for inputs, targets in micro_batches[:-1]:
            backward(inputs, targets)
    backward(*micro_batches[-1])
    # END SOLUTION


# %%
check("04.accumulate", accumulate)

# %% [markdown]
# <details><summary>Hint 1</summary>Count the tokens of this rank, then add the counts of all ranks up with an
# <code>all_reduce</code>, before the first backward.</details>
# <details><summary>Hint 2</summary><code>F.cross_entropy(..., reduction="sum")</code> gives the sum over a
# micro-batch. DDP will divide the gradient by the world size; multiply by it.</details>
# <details><summary>Hint 3</summary>Forward and backward of all micro-batches but the last stand inside
# <code>with model.no_sync():</code>.</details>

# %% [markdown]
# ## Exercise 5: break it, diagnose it
#
# This function is to return the mean validation loss over the ranks, on every rank. A rank whose share of
# the data is empty has a NaN as its loss, and is to be left out of the mean. Here that is rank 2 of 3. The
# function never returns. Run the cell and read the message.

# %%
def broken_report(loss: torch.Tensor) -> float:
    if loss.isnan():  # "this rank has nothing to report"
        return loss.item()
    losses = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    return torch.stack(losses).mean().item()


def report_on_rank():
    rank = dist.get_rank()
    return broken_report(torch.tensor(float("nan") if rank == 2 else rank + 1.0))


try:
    run_ranks(report_on_rank, 3, timeout_seconds=1.5)
except RankError as error:
    print(str(error).partition("\n\nTraceback")[0])

# %% [markdown]
# **Spec.** Name the rank that the others wait for (a number) and the collective that they wait in (its
# name, in quotes). Then write `cured_report`, which returns the mean of the losses that are no NaN, on
# *every* rank.

# %%
# BEGIN SOLUTION
missing_rank = 2
its_collective = "all_gather"
# END SOLUTION
# STUB: missing_rank = ...
# STUB: its_collective = ...


def cured_report(loss: torch.Tensor) -> float:
    # BEGIN SOLUTION
    losses = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    return torch.stack(losses).nanmean().item()
    # END SOLUTION


# %%
check("04.deadlock", {"rank": missing_rank, "collective": its_collective, "cure": cured_report})

# %% [markdown]
# <details><summary>Hint 1</summary>The message says where each rank stood. One stood nowhere: it had finished.
# </details>
# <details><summary>Hint 2</summary>A rank may have nothing to say, but it must call the collective all the
# same. Gather first, then leave out.</details>
# <details><summary>Hint 3</summary><code>nanmean()</code> is the mean of what is no NaN.</details>
#
# Here is the [solution](../../solutions/beginner/04_four_ranks.ipynb) of this lab, with its outputs.
