# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 07: Offload
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 4 of 5 | 75 | lesson 07; any laptop |
#
# Four exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check`
# that says *not attempted*, *not yet* with a nudge, or *correct*. Hints are folded away. The
# exercises follow the [lesson](../../notebooks/intermediate/07_offload.ipynb). Work in a copy
# (`make my-labs`). Exercise 2 is the main one; in exercises 3 and 4 your score stands beside a par.

# %% tags=["setup"]
here = setup("labs/intermediate/07")

# %%
import itertools

import torch
from torch.func import functional_call

from utils import GB, check, model_shape
from utils.catalog import device as gpu
from utils.lessons.lesson_07.offload_choice import OffloadItem, offloaded_seconds, on_card, on_host
from utils.lessons.lesson_07.run import StreamedRun

# %% [markdown]
# ## Exercise 1: what the link adds
#
# A step has several micro-batches of `tokens` tokens. Each computes $8 P \cdot$ tokens operations. In every one of them
# bf16 gradients go down, 2 bytes a parameter. Where weights *stream* they come up twice in each micro-batch, in bf16;
# where they do not, they come up once, after the optimizer's step, when the device has nothing to compute. Within a
# micro-batch, compute and both directions of the link run at once; a micro-batch ends when all three have.
#
# **Spec.** `exposed_seconds(parameters, tokens, micro_batches, flops_per_second, link_bytes_per_second, streams)`
# returns by how many seconds the step is longer than its compute. The optimizer's own seconds do not count.

# %%
def exposed_seconds(parameters, tokens, micro_batches, flops_per_second, link_bytes_per_second, streams):
    # BEGIN SOLUTION
    compute = 8 * parameters * tokens / flops_per_second
    down, up = 2 * parameters, 4 * parameters if streams else 0
    transfer = max(down, up) / link_bytes_per_second
    after = 0 if streams else 2 * parameters / link_bytes_per_second
    return micro_batches * max(0, transfer - compute) + after
    # END SOLUTION


check("07.exposed_seconds", exposed_seconds)

# %% [markdown]
# <details><summary>Hint 1</summary>Take one micro-batch: compute, down, up. Which is the longest, and by how much is it
# longer than compute?</details>
# <details><summary>Hint 2</summary>An exposed time is never negative. What runs when nothing computes is exposed in
# full.</details>

# %% [markdown]
# ## Exercise 2: a streamed block that computes once
#
# The lesson's streamed block forgets activations as well, and computes each block twice. Where activations have
# room, that is a waste. Write one that keeps activations and forgets *weights* alone.
#
# **Spec.** `streamed(block, weights, x, link)` returns `block(x)`.
#
# - `block` has no memory: `functional_call(block, {name: tensor}, (x,))` runs it with the tensors that you give.
# - `weights` are the host's, by name; they require gradients. After backward each has its `.grad`, in host memory.
# - `link.up(tensor)` gives a copy on the device, `link.down(tensor)` one on the host. Each weight comes up once in forward and at
#   most once in backward; each gradient goes down once; nothing else crosses.
# - After forward, no weight is left on the device. The block runs once.

# %%
# BEGIN SOLUTION
class Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, link):
        ctx.link = link
        return link.up(weight)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.link.down(gradient), None
# END SOLUTION
# STUB: # A helper of your own may stand here.


# %%
def streamed(block, weights, x, link):
    # BEGIN SOLUTION
    copies = {name: Fetch.apply(weight, link) for name, weight in weights.items()}
    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in copies.items()}

    def pack(tensor):
        name = names.get(tensor.untyped_storage().data_ptr())
        return tensor if name is None else (name, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        name, *layout = packed
        return link.up(weights[name]).as_strided(*layout)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return functional_call(block, copies, (x,))
    # END SOLUTION


check("07.streamed", streamed)

# %% [markdown]
# <details><summary>Hint 1</summary>If a copy is a leaf, the graph's end holds it until backward: hooks cannot free it. Make the
# copy by a <code>torch.autograd.Function</code>: forward is <code>link.up</code>, backward returns
# <code>link.down(gradient)</code>.</details>
# <details><summary>Hint 2</summary><code>saved_tensors_hooks(pack, unpack)</code>: for a weight, pack returns what is needed to
# fetch it again; for anything else the tensor itself.</details>
# <details><summary>Hint 3</summary>A linear layer saves a transposed view. Views share their storage:
# <code>tensor.untyped_storage().data_ptr()</code> tells, and <code>as_strided(size, stride, offset)</code> makes the view
# again.</details>

# %% [markdown]
# ## Exercise 3: what to offload
#
# Each item of a list says what it frees on the card, takes on the host, sends down and up in a step, and for how many
# seconds the CPU works for it while the device waits. Compute and both directions run at once, then comes the CPU:
# `offloaded_seconds(items, chosen, compute_seconds, link_bytes_per_second)` gives the step's seconds.
#
# **Spec.** `best_choice(items, card_bytes, host_bytes, compute_seconds, link_bytes_per_second)` returns the set of item
# numbers (from 0) that leave, so that `on_card(items, chosen)` and `on_host(items, chosen)` are within their limits and
# the step takes the fewest seconds. There are up to ten items, and always an answer. **Your score is your seconds over
# the optimum's**, in the worst of ten problems; 1.000 is the best.

# %%
def best_choice(items, card_bytes, host_bytes, compute_seconds, link_bytes_per_second):
    # BEGIN SOLUTION
    numbers = range(len(items))
    sets = itertools.chain.from_iterable(itertools.combinations(numbers, size) for size in range(len(items) + 1))
    fit = [chosen for chosen in sets if on_card(items, chosen) <= card_bytes and on_host(items, chosen) <= host_bytes]
    return set(min(fit, key=lambda chosen: offloaded_seconds(items, chosen, compute_seconds, link_bytes_per_second)))
    # END SOLUTION


check("07.best_choice", best_choice)

# %% [markdown]
# <details><summary>Hint 1</summary>How many sets do ten items have? Is that too many to try?</details>
# <details><summary>Hint 2</summary><code>itertools.combinations(range(n), size)</code> for each size from 0 to n goes
# through all sets.</details>
#
# ### Use it
#
# Your choice for Llama-2-7B with checkpointing on an RTX 4090, 20 GB of it for these items, for two hosts and three
# batches. Until your function returns a set, only the first row is printed.

# %%
shape, card = model_shape("llama-2-7b"), gpu("RTX 4090")
P, link = shape.parameter_count, card.host_link.link_bytes_per_second
for tokens, host_gb in ((2048, 64), (2048, 128), (16384, 128), (32768, 128)):
    edges = 2 * tokens * shape.hidden * shape.layers
    items = [OffloadItem("optimizer state", 12 * P, 16 * P, 0, 2 * P, 0.25e-9 * P),
             OffloadItem("gradients", 2 * P, 0, 2 * P, 0),
             OffloadItem("weights", 2 * P * 30 / 32, 2 * P, 0, 4 * P),
             OffloadItem("block inputs", edges, edges, edges, edges)]
    compute = 8 * P * tokens / (card.peak_flops_per_second("bf16") / 2)
    if on_host(items, {0, 1}) > host_gb * GB:
        print(f"{tokens:,} tokens, host of {host_gb} GB: the optimizer state does not fit the host; a disk is next")
    elif (chosen := best_choice(items, 20 * GB, host_gb * GB, compute, link)) is not None:
        seconds = offloaded_seconds(items, chosen, compute, link)
        print(f"{tokens:,} tokens, host of {host_gb} GB: {', '.join(items[n].name for n in sorted(chosen))} leave;",
              f"{on_card(items, chosen) / GB:.1f} GB stay, {seconds:.2f} s a step, {compute:.2f} of them compute (predicted)")

# %% [markdown]
# ## Exercise 4: break it, diagnose it
#
# An offload that works, gives the right losses, and is slow. It runs here on a clock of its own (nothing is computed),
# so that its seconds are the same on every machine. A `StreamedRun` has `blocks` blocks of `tensors` tensors each.
# Backward takes three times as long as forward: it computes a block again, then its gradients.
#
# | call | what happens |
# |---|---|
# | `run.send_up(block, tensor)` | one tensor begins to come to the device; returns a ticket |
# | `run.send_down(block, tensor)` | one gradient begins to leave; returns a ticket |
# | `ticket.wait()` | stand still until it has arrived, and for what the call itself costs |
# | `run.forward(block)`, `run.backward(block)` | compute; all of the block's tensors must have been waited for, and be there |
# | `run.release(block)` | give back the room of its weights; the device holds two blocks at most |
#
# Each direction carries one tensor after the other, in the order of the calls.

# %%
def waits_for_every_tensor(run):
    for block in range(run.blocks):
        for tensor in range(run.tensors):
            run.send_up(block, tensor).wait()
        run.forward(block)
        run.release(block)
    for block in reversed(range(run.blocks)):
        for tensor in range(run.tensors):
            run.send_up(block, tensor).wait()
        run.backward(block)
        for tensor in range(run.tensors):
            run.send_down(block, tensor).wait()
        run.release(block)


# %%
def fresh_run():
    return StreamedRun(blocks=6, tensor_seconds=(1.0, 1.0, 1.0, 1.0), compute_seconds=2.5, wait_seconds=0.5)


run = fresh_run()
waits_for_every_tensor(run)
run.check_end()
print(f"{run.seconds:.0f} s a step")

# %% [markdown]
# How often does the program wait in this step? For how many seconds is the device idle? How many seconds would remain
# if the link and the waits cost nothing at all? Reckon first; then compare with `run.waits` and `run.idle_seconds`.

# %%
# BEGIN SOLUTION
waits, idle_seconds, least_seconds = run.waits, run.idle_seconds, run.seconds - run.idle_seconds
# END SOLUTION
# STUB: waits = ...
# STUB: idle_seconds = ...
# STUB: least_seconds = ...

check("07.diagnosis", {"waits": waits, "idle seconds": idle_seconds, "least seconds": least_seconds})

# %% [markdown]
# **Spec.** `pipelined(run)` runs the same step as fast as two blocks' room allows. **Your score is your seconds over the
# par's**, on four runs, some with a slow link, some with costly waits.

# %%
def pipelined(run):
    # BEGIN SOLUTION
    def ask(block):
        return [run.send_up(block, tensor) for tensor in range(run.tensors)][-1]
    def arrive(block):
        if block in coming:
            coming.pop(block).wait()
    coming, last = {0: ask(0)}, run.blocks - 1
    for block in range(run.blocks):
        arrive(block)
        if block < last:
            coming[block + 1] = ask(block + 1)
        run.forward(block)
        if block < last - 1:  # there is room for the last two, and backward begins with them
            run.release(block)
    for block in reversed(range(run.blocks)):
        arrive(block)
        if 0 < block < last:
            coming[block - 1] = ask(block - 1)
        run.backward(block)
        gradients = [run.send_down(block, tensor) for tensor in range(run.tensors)]
        run.release(block)
    gradients[-1].wait()
    # END SOLUTION


check("07.pipelined", pipelined)

# %% [markdown]
# <details><summary>Hint 1</summary>Ask for the next block before you compute this one. In a direction tensors arrive in order: wait for the
# last of a block alone.</details>
# <details><summary>Hint 2</summary>Gradients have until the end of the step. One wait is enough for all of them.</details>
# <details><summary>Hint 3</summary>Backward begins with the blocks that forward ended with. How many of them have room to stay?</details>
#
# Here is the [solution](../../solutions/intermediate/07_offload.ipynb) of this lab, with its
# outputs.
