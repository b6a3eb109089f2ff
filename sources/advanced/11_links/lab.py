# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 11: Links and collectives
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 4 of 5 | 75 | lesson 11; any laptop (Windows: WSL2) |
#
# Five exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check` that says *not
# attempted*, *not yet* with a nudge, or *correct*. Hints are folded away. The exercises follow the
# [lesson](../../notebooks/advanced/11_links.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/advanced/11")

# %%
import time

import torch

from utils import MIB, check, fit_alpha_beta, run_ranks, show
from utils.labs.slow_jobs import unknown_job
from utils.lessons.lesson_11.hosts import run_hosts
from utils.lessons.lesson_11.messages import draw_messages
from utils.lessons.lesson_11.wire import Wire, messages

# %% [markdown]
# ## Exercise 1: a ring that knows the hosts
#
# The lesson's ring runs 0, 1, 2, ... A scheduler may number ranks otherwise: here `host_of[r]` is the host on which
# rank r lives, such as `[0, 1, 0, 1, 0, 1, 0, 1]`. A ring by number would cross the slow link at every hop.
#
# **Spec.** `ordered_ring(wire, tensor, host_of)` adds up `tensor` (1-D, of any length) over all ranks, in place, and
# returns it. It is a ring: each rank sends to one other. It leaves each host once. It takes $2(N-1)$ steps, and a
# message is one part of N. You may use `wire.rank`, `wire.size` and `wire.exchange(tensor, to, source, like=...)`.
# **Your score is the bytes between hosts.**

# %%
def ordered_ring(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    # BEGIN SOLUTION
    n = wire.size
    order = sorted(range(n), key=lambda rank: host_of[rank])
    place = order.index(wire.rank)
    right, left = order[(place + 1) % n], order[(place - 1) % n]
    parts = list(tensor.tensor_split(n))
    for step in range(1, n):
        out, into = (place - step) % n, (place - step - 1) % n
        parts[into] += wire.exchange(parts[out], right, left, like=parts[into])
    for step in range(n - 1):
        out, into = (place - step) % n, (place - step - 1) % n
        parts[into].copy_(wire.exchange(parts[out], right, left, like=parts[into]))
    return tensor
    # END SOLUTION


check("11.ordered_ring", ordered_ring)

# %% [markdown]
# <details><summary>Hint 1</summary>Give every rank a <i>place</i> in the ring: <code>sorted(range(n), key=...)</code> is stable, so ranks of one
# host stay together.</details>
# <details><summary>Hint 2</summary>The neighbours are ranks, found by place. The parts are counted by place, too: in step k the place p sends
# part p - k and adds to part p - k - 1.</details>
# <details><summary>Hint 3</summary>Parts may differ in length by one number. <code>like=</code> says what comes in.</details>
#
# ### See it
#
# Your messages, drawn. Until your function does something, the cell draws nothing.

# %%
HOST_OF = [0, 1, 0, 1, 0, 1, 0, 1]


def noted(function, *args):
    wire = Wire()
    function(wire, torch.ones(512, dtype=torch.float64), *args)
    return wire.moves


hops = messages(run_ranks(noted, 8, ordered_ring, HOST_OF))
if hops:
    between = sum(m.bytes for m in hops if HOST_OF[m.source] != HOST_OF[m.target])
    show(draw_messages(hops, title=f"My ring: {between:,} bytes between hosts"), alt="My ring, a grid a step.")

# %% [markdown]
# ## Exercise 2: a tree from anywhere
#
# **Spec.** `tree_broadcast(wire, tensor, root)` gives every rank the root's `tensor`, in place, and returns it. Any
# number of ranks, any root. It takes $\log_2 N$ steps, rounded up, and N - 1 messages: in each step everyone who has it
# sends it to one who has not. Use `wire.send(tensor, to)` and `wire.receive(like, source)`. **Your score is the
# steps**, over four cases.

# %%
def tree_broadcast(wire: Wire, tensor: torch.Tensor, root: int) -> torch.Tensor:
    # BEGIN SOLUTION
    n = wire.size
    place, have = (wire.rank - root) % n, 1  # the first `have` places have it
    while have < n:
        if place < have and place + have < n:
            wire.send(tensor, (place + have + root) % n)
        elif have <= place < 2 * have:
            tensor.copy_(wire.receive(tensor, (place - have + root) % n))
        have *= 2
    return tensor
    # END SOLUTION


check("11.tree_broadcast", tree_broadcast)

# %% [markdown]
# <details><summary>Hint 1</summary>Count places from the root: <code>(rank - root) % N</code>. Solve it for root 0 first.</details>
# <details><summary>Hint 2</summary>After k steps the places 0 to 2<sup>k</sup> - 1 have it. In the next one, place p sends to p + 2<sup>k</sup>, if there is such a
# place.</details>

# %% [markdown]
# ## Exercise 3: when is the last bucket through?
#
# Backward makes gradients one after the other: gradient i is there at `ready_seconds[i]` and has `gradient_bytes[i]`.
# They fill a bucket. The gradient that takes it to `bucket_bytes`, or past it, still belongs in and closes it; the end
# of backward closes the last. A closed bucket of n bytes takes `alpha_seconds + n / bytes_per_second` to reduce.
# Buckets go one at a time.
#
# **Spec.** `finish_seconds(...)` returns when the last bucket is reduced.

# %%
def finish_seconds(
    ready_seconds: list[float],
    gradient_bytes: list[int],
    bucket_bytes: int,
    alpha_seconds: float,
    bytes_per_second: float,
) -> float:
    # BEGIN SOLUTION
    free = filled = 0.0
    for i, (ready, size) in enumerate(zip(ready_seconds, gradient_bytes, strict=True)):
        filled += size
        if filled >= bucket_bytes or i == len(ready_seconds) - 1:
            free = max(free, ready) + alpha_seconds + filled / bytes_per_second
            filled = 0.0
    return free
    # END SOLUTION


check("11.finish_seconds", finish_seconds)

# %% [markdown]
# <details><summary>Hint 1</summary>Two things must be so before a bucket starts: its last gradient is there, and the network is free.</details>
# <details><summary>Hint 2</summary>Keep one number, the time at which the network is free.</details>
#
# ### Use it
#
# Measure a slow link of 200 Mbit/s, then choose buckets for it with your function: 32 layers of 512 KiB, one each 10
# ms. Which bucket would you take? Compare with a start ten times as dear, at least 10 ms. Until your function
# returns something, nothing is printed.

# %%
def one_way(wire):
    found = []
    for size in (1024, 256 * 1024, MIB):  # the first is nearly all start
        x, seconds = torch.ones(size // 4), []
        for _ in range(7):
            start = time.perf_counter()
            if wire.rank == 0:  # there and back, so that no message is early
                wire.send(x, 1)
                wire.receive(x, 1)
            else:
                wire.send(wire.receive(x, 0), 0)
            seconds.append((time.perf_counter() - start) / 2)
        found.append((size, min(seconds)))  # other programs can only add time
    return found


run = run_hosts(one_way, 1, megabits_per_second=200)
found = fit_alpha_beta(*zip(*run.results[0], strict=True))
print(f"{run.transport}: {1e3 * found.alpha_seconds:.2f} ms + bytes / {found.bytes_per_second / 1e6:.1f} MB/s (measured, fitted)")
ready, sizes = [0.01 * (i + 1) for i in range(32)], [MIB // 2] * 32
for alpha in (found.alpha_seconds, 10 * max(found.alpha_seconds, 0.001)):
    for layers in (1, 2, 4, 8, 16, 32):
        seconds = finish_seconds(ready, sizes, layers * MIB // 2, alpha, found.bytes_per_second)
        if seconds is not None:
            print(f"start {1e3 * alpha:6.2f} ms, {layers:2} layers a bucket: {1e3 * seconds:5.0f} ms (predicted)")

# %% [markdown]
# ## Exercise 4: is it a ring?
#
# An all-reduce can be right and no ring at all. This function would have found it out.
#
# **Spec.** `is_one_ring(messages, ranks)` takes a list of messages with `.step`, `.source`, `.target`, `.bytes`. It
# returns `True` if each of the ranks sends to one other alone, in all steps, and these hops make a single ring through
# all ranks; else `False`.

# %%
def is_one_ring(messages: list, ranks: int) -> bool:
    # BEGIN SOLUTION
    targets = {}
    for m in messages:
        targets.setdefault(m.source, set()).add(m.target)
    if any(len(those) != 1 for those in targets.values()):
        return False
    seen, at = [], 0
    while at in targets and at not in seen:
        seen.append(at)
        (at,) = targets[at]
    return at == 0 and len(seen) == ranks == len(targets)
    # END SOLUTION


check("11.is_one_ring", is_one_ring)

# %% [markdown]
# <details><summary>Hint 1</summary>Collect for each source the <i>set</i> of its targets.</details>
# <details><summary>Hint 2</summary>One neighbour each is not enough: 0 and 1 may talk to each other, and 2 and 3. Walk from rank 0 from neighbour to neighbour,
# and count.</details>

# %% [markdown]
# ## Exercise 5: three slow jobs
#
# Three jobs of eight nodes, simulated, each slower than it should be. A healthy one takes 0.540 s a step. Each has
# **one** cause that matters; other things may look odd and cost nothing. Look at the layers in order, as in the lesson.
# `unknown_job("A").step()` has `step_seconds`, `buckets`, `network_busy_seconds`, and `seconds(kind)` by node for
# "loading", "forward", "backward", "waiting for a node" and "all-reduce, not hidden".

# %%
for layer in ("hardware", "network", "collectives", "code"):
    print(unknown_job("A").look(layer), end="\n\n")
for name in "ABC":
    print(f"job {name}: {unknown_job(name).step().step_seconds:.3f} s a step")

# %%
for layer in ("hardware", "network", "collectives", "code"):
    print(unknown_job("B").look(layer), end="\n\n")

# %%
for layer in ("hardware", "network", "collectives", "code"):
    print(unknown_job("C").look(layer), end="\n\n")

# %% [markdown]
# **Spec.** For each job: the layer of its cause (`"hardware"`, `"network"`, `"collectives"` or `"code"`), the node that
# has it, or `"all"` if none is different, and how many seconds a step gets shorter when *this* cause is cured and
# nothing else.

# %%
# BEGIN SOLUTION
cause_a, node_a, saved_a = "code", 2, 0.22
cause_b, node_b = "collectives", "all"
saved_b = unknown_job("B").step().step_seconds - 0.540
cause_c, node_c = "network", 6
saved_c = unknown_job("C").step().step_seconds - 0.540 * 1.02  # the hot node stays
# END SOLUTION
# STUB: cause_a = ...
# STUB: node_a = ...
# STUB: saved_a = ...
# STUB: cause_b = ...
# STUB: node_b = ...
# STUB: saved_b = ...
# STUB: cause_c = ...
# STUB: node_c = ...
# STUB: saved_c = ...

check("11.job_a", {"layer": cause_a, "node": node_a, "seconds saved": saved_a})

# %%
check("11.job_b", {"layer": cause_b, "node": node_b, "seconds saved": saved_b})

# %%
check("11.job_c", {"layer": cause_c, "node": node_c, "seconds saved": saved_c})

# %% [markdown]
# <details><summary>Hint 1</summary>Who waits least in the all-reduce comes last. Then ask why it comes last.</details>
# <details><summary>Hint 2</summary>If all wait alike, look at one all-reduce: its bytes over its time. Is that the port's rate, or a start?</details>
# <details><summary>Hint 3</summary>Saved is the step as it is, less the step with this one cured. What else is odd stays in it: a
# clock tells how much longer its node computes.</details>
#
# Here is the [solution](../../solutions/advanced/11_links.ipynb) of this lab, with its outputs.
