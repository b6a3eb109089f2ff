# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 05: Trading compute for memory
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 3 of 5 | 60 | lesson 05; any laptop |
#
# Five exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check`
# that says *not attempted*, *not yet* with a nudge, or *correct*. Hints are folded away. The
# exercises follow the [lesson](../../notebooks/intermediate/05_checkpointing.ipynb). Work in a copy
# (`make my-labs`). Exercise 3 is the main one: your answer is graded against the optimum.

# %% tags=["setup"]
here = setup("labs/intermediate/05")

# %%
import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from utils import check, checkpoint_blocks, format_bytes, measure
from utils.models import UNet
from utils.lessons.lesson_05.block_choice import activation_peak, block_costs, recompute_flops

# %% [markdown]
# ## Exercise 1: a checkpoint that forgets and remembers
#
# In the lesson you built a checkpoint as an `autograd.Function`. PyTorch's present one
# (`use_reentrant=False`) works with *saved-tensor hooks* instead: what forward would save is replaced by
# its number, and the first time that backward asks for one, the block runs again.
#
# **Spec.** `checkpointed(block, x)` returns `block(x)`. Until backward it keeps `x` and the random state,
# and no activation of the block. Gradients are those of the plain block, dropout included, and backward
# leaves the random state as it found it. Two things that the lesson's `Forgetful` cannot do must work: an
# `x` that needs no gradient, and `torch.autograd.grad` for the block's weights. Do not call
# `torch.utils.checkpoint`: the check notices.

# %%
def checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    # BEGIN SOLUTION
    state, count, again = torch.get_rng_state(), 0, []

    def pack(tensor):
        nonlocal count
        count += 1
        return count - 1  # a number in place of the tensor

    def unpack(number):
        if not again:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.set_rng_state(state)
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda tensor: again.append(tensor.detach()), lambda tensor: tensor
                ):
                    block(x)
        return again[number]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return block(x)
    # END SOLUTION


check("05.checkpointed", checkpointed)

# %% [markdown]
# <details><summary>Hint 1</summary>The pack hook may return anything: a counter's value will do. The
# unpack hook gets that value back and must return a tensor.</details>
# <details><summary>Hint 2</summary>In unpack, run <code>block(x)</code> once more under other hooks, whose
# pack collects the tensors in a list, in the same order as before. The engine runs hooks without
# gradients: <code>torch.enable_grad()</code>.</details>
# <details><summary>Hint 3</summary><code>torch.get_rng_state()</code> before forward,
# <code>torch.set_rng_state(state)</code> inside of <code>with torch.random.fork_rng(devices=[]):</code>
# before the second run. The empty list: no GPU takes part here.</details>

# %% [markdown]
# ## Exercise 2: predict the peak
#
# A model has `layers` equal blocks. Each keeps its input of `edge_bytes`, and `inside_bytes` more. The
# blocks 0, `every`, 2 `every`, ... are checkpointed (none if `every` is 0). All inputs stay until their
# block's backward is over.
#
# **Spec.** `predicted_bytes(layers, edge_bytes, inside_bytes, every)` returns the most bytes of
# activations that are alive at one moment of backward. Gradients and temporaries do not count.

# %%
def predicted_bytes(layers: int, edge_bytes: int, inside_bytes: int, every: int) -> int:
    # BEGIN SOLUTION
    def alive_at(block: int) -> int:
        chosen = len(range(0, block, every)) if every else 0  # of the blocks before this one
        return (block + 1) * edge_bytes + (block - chosen + 1) * inside_bytes

    return max(alive_at(block) for block in range(layers))
    # END SOLUTION


check("05.predicted_bytes", predicted_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>Backward runs from the last block to the first. When it computes block
# i, everything of the later blocks is gone.</details>
# <details><summary>Hint 2</summary>Add up three things at block i: the inputs that still stand, the insides
# that forward kept, and what block i needs itself. At which block is the sum largest?</details>

# %% [markdown]
# ## Exercise 3: the best set of blocks
#
# Blocks are not alike. In a U-Net the first and the last see the whole image, and the middle sees few
# pixels with many channels. Here are the costs of one, counted in a forward pass: bytes of the inputs,
# bytes inside, operations to run the block again.

# %%
torch.manual_seed(0)
unet = UNet((16, 32, 64, 64))
images, steps = torch.randn(8, 3, 32, 32), torch.arange(8)
costs = block_costs(unet, images, steps)
for index, cost in enumerate(costs):
    print(f"block {index}: input {format_bytes(cost.input_bytes):>9}, inside {format_bytes(cost.inside_bytes):>9},",
          f"{cost.flops / 1e6:6.0f} million operations")
print("activations at the peak, none checkpointed:", format_bytes(activation_peak(costs, set())))
print("activations at the peak, all checkpointed: ", format_bytes(activation_peak(costs, range(len(costs)))))

# %% [markdown]
# **Spec.** `best_set(costs, limit_bytes)` returns the set of block numbers to checkpoint, so that
# `activation_peak(costs, chosen)` is at most `limit_bytes` and `recompute_flops(costs, chosen)` is as
# small as can be. There are up to ten blocks, and always an answer. **Your score is your operations over
# the optimum's**, in the worst of twelve problems; 1.000 is the best.

# %%
def best_set(costs: list, limit_bytes: int) -> set[int]:
    # BEGIN SOLUTION
    choices = [(0, 0, frozenset())]  # bytes kept so far, operations, chosen blocks
    for number, cost in enumerate(costs):
        grown = []
        for kept, operations, chosen in choices:
            kept += cost.input_bytes
            if kept + cost.inside_bytes <= limit_bytes:  # alive when backward is at this block
                grown.append((kept + cost.inside_bytes, operations, chosen))
                grown.append((kept, operations + cost.flops, chosen | {number}))
        choices = []
        for choice in sorted(grown, key=lambda choice: choice[:2]):
            if not choices or choice[1] < choices[-1][1]:  # more bytes must buy fewer operations
                choices.append(choice)
    return set(min(choices, key=lambda choice: choice[1])[2])
    # END SOLUTION


check("05.best_set", best_set)

# %% [markdown]
# <details><summary>Hint 1</summary>Ten blocks have 1,024 sets. You may try them all.</details>
# <details><summary>Hint 2</summary><code>itertools.combinations(range(n), size)</code> for each size from 0
# to n goes through all sets. Keep those whose peak fits, and take the cheapest.</details>
# <details><summary>Hint 3</summary>With many blocks, go through them in order and keep a list of partial
# choices (bytes kept, operations). Drop one if another keeps no more bytes at no higher cost.</details>

# %% [markdown]
# ### Use it
#
# Your set meets the real U-Net under three budgets. The budget is for activations alone; the measured
# peak holds parameters, gradients and the temporaries of convolutions, too. So look at what is *saved*,
# predicted and measured. Until your function returns something, the cell prints nothing.

# %%
def peak_with(chosen):
    def step():
        unet.zero_grad()
        F.mse_loss(unet(images, steps), images).backward()

    checkpoint_blocks(unet, only=chosen)
    return measure(step, model=unet, timed_steps=0).peak_bytes


whole, plain_peak = activation_peak(costs, set()), peak_with(())
for share in (1.0, 0.8, 0.65):
    limit = int(share * whole)
    chosen = best_set(costs, limit)
    if chosen is not None:
        predicted, peak = activation_peak(costs, chosen), peak_with(chosen)
        print(f"budget {format_bytes(limit):>9}: blocks {sorted(chosen)}, activations {format_bytes(predicted):>9}",
              f"(predicted), {recompute_flops(costs, chosen) / 1e6:.0f} million operations more; saved",
              f"{format_bytes(whole - predicted)} (predicted), {format_bytes(plain_peak - peak)} (measured)")
unet = checkpoint_blocks(unet, every=0)

# %% [markdown]
# ## Exercise 4: a loss in chunks
#
# The lesson's chunked loss had a label for every token. In fine-tuning, the tokens of the prompt have the
# label -100 and do not count. Chunks then hold different numbers of labels, and some hold none.
#
# **Spec.** `chunked_loss(hidden, head, labels, chunks)` gives the same loss and gradients as
# `F.cross_entropy(hidden @ head.T, labels, ignore_index=-100)`, with the logits of one chunk alive at a
# time. Shapes: `hidden` (tokens, width), `head` (vocabulary, width), `labels` (tokens,). **Your score is
# the peak.**

# %%
def chunked_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, chunks: int):
    # BEGIN SOLUTION
    def sum_of_chunk(hidden, labels):
        return F.cross_entropy(hidden @ head.T, labels, ignore_index=-100, reduction="sum")

    pairs = zip(hidden.chunk(chunks), labels.chunk(chunks), strict=True)
    sums = [checkpoint(sum_of_chunk, *pair, use_reentrant=False) for pair in pairs]
    return sum(sums) / (labels != -100).sum()
    # END SOLUTION


check("05.chunked_loss", chunked_loss)

# %% [markdown]
# <details><summary>Hint 1</summary><code>reduction="sum"</code> gives sums, which may be added. What do you
# divide by in the end?</details>
# <details><summary>Hint 2</summary>Each chunk's logits must be recomputed in backward, or all of them stay:
# <code>checkpoint(function, ..., use_reentrant=False)</code>.</details>

# %% [markdown]
# ## Exercise 5: break it, diagnose it
#
# Two copies of one network train on the same batches, one of them checkpointed. Their training losses agree
# to the last digit. Then both are evaluated.

# %%
def convolutional():
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*parts, nn.BatchNorm2d(16), nn.ReLU()), nn.Linear(16, 10)


# %%
def train(call, batches=3):
    body, head = convolutional()
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05)
    torch.manual_seed(1)
    for _ in range(batches):
        images, labels = torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))
        optimizer.zero_grad()
        loss = F.cross_entropy(head(call(body, images).mean((2, 3))), labels)
        loss.backward()
        optimizer.step()
    body.eval()
    images, labels = torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))  # none was trained on
    held_out = F.cross_entropy(head(body(images).mean((2, 3))), labels)
    print(f"training loss {loss.item():.6f}, evaluation loss {held_out.item():.6f}")
    return body


# %%
plain = train(lambda body, images: body(images))
broken = train(lambda body, images: checkpoint(body, images, use_reentrant=False))

# %% [markdown]
# 1. Which tensors of the two bodies differ: `"parameters"`, `"gradients"` or `"buffers"`? Look at them in
#    a cell of your own.
# 2. How often did the run with `checkpoint` update them in each training step? Write the number.

# %%
# BEGIN SOLUTION
what_differs = "buffers"
updates_per_step = 2
# END SOLUTION
# STUB: what_differs = ...
# STUB: updates_per_step = ...

check("05.diagnosis", {"what differs": what_differs, "updates per step": updates_per_step})

# %% [markdown]
# **Spec.** `cured_checkpoint(block, x)` is a checkpoint with the same result, gradients *and* running
# statistics as `block(x)`, for blocks with `nn.BatchNorm` layers. `checkpoint(..., context_fn=f)` calls
# `f()` for two contexts: forward runs in the first, recomputation in the second. Leave the block as you
# found it.

# %%
def cured_checkpoint(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    # BEGIN SOLUTION
    parts = block.modules()
    norms = [part for part in parts if getattr(part, "num_batches_tracked", None) is not None]

    @contextlib.contextmanager
    def frozen():
        before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, norm.num_batches_tracked.clone()
        try:
            yield
        finally:
            for norm, (momentum, counter) in zip(norms, before, strict=True):
                norm.momentum, norm.num_batches_tracked = momentum, counter

    contexts = lambda: (contextlib.nullcontext(), frozen())  # noqa: E731
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    # END SOLUTION


check("05.cured_checkpoint", cured_checkpoint)

# %% [markdown]
# <details><summary>Hint 1</summary>The new running mean is (1 - momentum) times the old one plus momentum
# times the batch's. With which momentum does nothing change?</details>
# <details><summary>Hint 2</summary><code>num_batches_tracked</code> is a buffer that forward adds one to, in
# place. Give it a copy to count on, and put the original back.</details>
# <details><summary>Hint 3</summary>Write the context with <code>contextlib.contextmanager</code>, and put
# everything back in <code>finally</code>: recomputation ends early, by an exception.</details>
#
# Here is the [solution](../../solutions/intermediate/05_checkpointing.ipynb) of this lab, with its
# outputs.
