# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 Trading compute for memory: gradient checkpointing
#
# {{badges}}
#
# **The question.** Which [activations](../00_glossary.ipynb) should a training step forget and compute again, so that
# it fits, and what does that cost?
#
# **Promise.** You write a checkpoint by hand, measure five ways to choose, all with the same gradients to the last bit, and
# make a model of 1.3 billion parameters fit a simulated card of 40 GB.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 60 for the lab | any laptop; a GPU if you have one; beyond Binder's 1 GB | about a minute on two CPU cores |
#
# ## A bet
#
# If every block of a model is checkpointed, its forward runs a second time. By how many percent does the arithmetic of a
# step grow? Write your guess in place of the 0.

# %%
my_bet_percent = 0

# %% tags=["setup"]
here = setup("intermediate/05")

# %% jupyter={"source_hidden": true}
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from evidence.record import recorded
from utils import Transformer, TransformerConfig, UNet, check, format_bytes, measure, show, simulate
from utils.simulation.devices import simulated_device
from utils.techniques import EXPENSIVE, add_lora, checkpoint_blocks, in_segments
from utils.catalog import device as card
from utils.lessons.lesson_05.arms import draw_arms
from utils.lessons.lesson_05.block_choice import block_costs
from utils.lessons.lesson_05.depth import operations_of
from utils.lessons.lesson_05.moments import deciding, draw_moments, moments
from utils.lessons.lesson_05.repeatable import NotRepeatableError, check_repeatable
from utils.lessons.lesson_05.speeds import draw_speeds
from utils.lessons.lesson_05.tradeoff import draw_tradeoff

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# A model of nine blocks with dropout takes a step of AdamW twice: as it is, and with every block checkpointed.
# `checkpoint_blocks` does what these lines do, and holds batch norm's statistics still (section 4):
#
# ```python
# for block in model.blocks:
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)
# ```

# %%
def build(config=None, device=device, dropout=0.1, segment=1, fused=True, **choice):
    torch.manual_seed(0)
    model = Transformer(config or small)
    for block in model.blocks if dropout else ():
        block.feedforward = nn.Sequential(nn.Dropout(dropout), block.feedforward)
    if segment > 1:
        model.blocks = in_segments(model.blocks, segment)
    checkpoint_blocks(model.to(device), **choice)
    return model, torch.optim.AdamW(model.parameters(), fused=fused)


# %% jupyter={"source_hidden": true}
width, sequences = {"tiny": (128, 4), "small": (512, 16), "full": (1024, 32)}[here.scale]
small = TransformerConfig(vocabulary=256, hidden=width, layers=9, heads=4, feedforward=11 * width // 4)
tokens = torch.randint(0, 256, (sequences, 129), generator=torch.Generator().manual_seed(1)).to(device)


def one_step(model, optimizer):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def measured(name, **choice):
    model, optimizer = build(**choice)
    return measure(partial(one_step, model, optimizer), model=model, optimizer=optimizer, name=name, timed_steps=0)


figure = draw_moments([measured("none", every=0), measured("every block", every=1)],
                      title=f"A step of nine blocks, {sequences} x 128 tokens, fp32, AdamW")
show(figure, alt="Bytes alive through a step, twice. All kept: a hill, whose top is where backward begins. Every block "
     "checkpointed: a low slope in forward, then nine teeth in backward that stand on growing gradients.")

# %% [markdown]
# **Read it.** On the left every activation waits for backward. On the right forward keeps the blocks' inputs; its spikes
# are activations, made and dropped. In backward one block's inside at a time comes back: a **tooth**. Four moments may be
# the peak:
#
# | moment | alive beside parameters and optimizer state, every block checkpointed |
# |---|---|
# | the loss, and where its backward begins | all inputs, and the logits |
# | first tooth | all inputs, one inside |
# | last tooth | one input, one inside, all gradients but its own block's |
# | optimizer step | all gradients; on a GPU, unless `fused=True`, temporaries as large as all parameters |
#
# On the right the last tooth decides: a block's gradients outweigh its input. **A choice lowers the peak only if it
# lowers the moment that decides.**
#
# ## 1. A checkpoint by hand
#
# Forward keeps the block's input alone. In backward the block runs again, this time with autograd watching.
# `replay`: with the first run's random state (the CPU's; a GPU has its own).

# %%
class Forgetful(torch.autograd.Function):
    """Keeps a block's input, and runs the block again in backward."""

    @staticmethod
    def forward(ctx, block, replay, x):
        ctx.block = block
        ctx.state = torch.get_rng_state() if replay else None
        ctx.save_for_backward(x)
        return block(x)  # in here autograd records nothing

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            if ctx.state is not None:
                torch.set_rng_state(ctx.state)
            out = ctx.block(x)
        torch.autograd.backward(out, gradient)  # adds to the gradients of the parameters
        return None, None, x.grad


# %% [markdown]
# A block with dropout: plain, forgetful, forgetful without the random state.

# %%
def first_layer_gradient(call):
    torch.manual_seed(0)
    first = nn.Linear(32, 32)
    block = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 32))
    loss = call(block, first(torch.randn(64, 32))).square().mean()
    loss.backward()
    return loss.item(), first.weight.grad


plain_loss, plain = first_layer_gradient(lambda block, x: block(x))
for replay in (True, False):
    loss, found = first_layer_gradient(lambda block, x: Forgetful.apply(block, replay, x))
    print(f"replay {replay!s:<5}  same loss: {loss == plain_loss}  same gradients: {torch.equal(found, plain)}")

# %% [markdown]
# **Read it.** Without replay the second run drops other elements: nothing is raised, and the gradients belong to another
# network. `torch.utils.checkpoint` replays.
#
# `Forgetful` is PyTorch's older way, `use_reentrant=True`: a backward inside of backward. Autograd calls
# a Function's backward only if one of its *inputs* needs a gradient, and a batch of data does not.

# %%
block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
batch = torch.randn(4, 8)  # data: needs no gradient
by_hand, by_torch = Forgetful.apply(block, True, batch), checkpoint(block, batch, use_reentrant=False)
print("needs a gradient:", by_hand.requires_grad, "by hand,", by_torch.requires_grad, "with use_reentrant=False")

# %% [markdown]
# **Read it.** By hand a block fed with data would never be trained. `use_reentrant=False` puts a placeholder
# where autograd would save a tensor; when backward opens one, the block runs again. Always write it.
#
# ## 2. Which blocks?
#
# Five ways:
#
# | way | keeps |
# |---|---|
# | none | everything |
# | every 2nd | all of the blocks 1, 3, 5, 7, counted from 0; inputs of the five others |
# | every block | the blocks' inputs |
# | segments of 3 | one input in three; three blocks are recomputed together |
# | selective | inputs, and the results of matrix products and attention |

# %%
WAYS = {"none": {"every": 0}, "every 2nd": {"every": 2}, "every block": {"every": 1}, "segments of 3": {"segment": 3},
        "selective": {"keep": EXPENSIVE}}

# %% [markdown]
# `EXPENSIVE` lists matrix products and attention's kernels, as *On Monday* does. In PyTorch *selective* is a policy,
# asked at every operation of forward (by older releases again in the second run):

# %%
def policy(context, operation, *args, **kwargs):
    keep = operation in EXPENSIVE
    asked["kept" if keep else "not kept"] += 1
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


asked, one_layer = Counter(), Transformer(replace(small, layers=1)).to(device)
contexts = partial(create_selective_checkpoint_contexts, policy)
checkpoint(one_layer, tokens[:1, :-1], use_reentrant=False, context_fn=contexts).sum().backward()
print("asked for one layer and the head:", ", ".join(f"{times} operations {kept}" for kept, times in asked.items()))

# %% [markdown]
# **Predict.** A block costs one part forward and two backward. Running it again adds one part to three:
# 33% for *every block*, five ninths of that for *every 2nd*, nothing for *selective*. `FlopCounterMode` counts
# products and attention.

# %%
runs, operations, seen = {}, {}, {}
for way, choice in WAYS.items():
    model, optimizer = build(**choice)
    torch.manual_seed(2)  # every way draws the same dropout
    losses = [one_step(model, optimizer)]
    with FlopCounterMode(display=False) as counter:
        losses.append(one_step(model, optimizer))
    operations[way] = counter.get_total_flops()
    seen[way] = torch.cat([torch.tensor(losses, device=device), *[p.grad.flatten() for p in model.parameters()]])
    runs[way] = measured(way, **choice)
near = 0.0 if device.type == "cpu" else 1e-5  # a GPU may add up in another order at each run
for way in WAYS:
    torch.testing.assert_close(seen[way], seen["none"], rtol=near, atol=near)
print(f"losses of two steps and all gradients equal, tolerance {near}, dropout included: {', '.join(WAYS)}")

# %%
def heights(run, unit_bytes):
    return ", ".join(f"{name} {size / unit_bytes:.2f}" for name, size in moments(run).items())


extra_percent = {way: 100 * (count / operations["none"] - 1) for way, count in operations.items()}
for way, run in runs.items():
    print(f"{way:<13} peak {format_bytes(run.peak_bytes)}: {heights(run, 2**20)} (measured)  {extra_percent[way]:+5.1f}% operations (counted)")
print(f"your bet: {my_bet_percent}%, counted: {extra_percent['every block']:.1f}%")

# %% jupyter={"source_hidden": true}
figure = draw_tradeoff([replace(run, name=f"{way}: {deciding(run)}") for way, run in runs.items()], list(extra_percent.values()), cost_label="more operations of matrix products and attention (%, counted)",
                       title=f"Peak, and the moment that decides it: nine blocks, fp32, {sequences} x 128 tokens")
show(figure, alt="Measured peaks against counted extra operations, each with the moment that decides: none and selective "
     "stand at zero, every block is lowest, segments of 3 cost most.")

# %% [markdown]
# **Read it.** *Every block* counts less than 33%: the head is not recomputed; fused attention has five products in backward
# to two in forward; and PyTorch stops a recomputation once all that was saved is back, before the block's last product.
# *Segments of 3* stop once, not three times: they cost more.
#
# **Question.** Of these nine blocks you checkpoint only the *last*. Does the peak fall by its inside, `"yes"` or `"no"`?

# %%
last_block_helps = ...
check("05.last_block", last_block_helps)

# %% [markdown]
# <details><summary>Answer</summary>
#
# No. Its inside returns first, while all others are alive. The peak falls by no more than what is gone by then: logits
# and their gradients, here less than an inside. Section 6 has the other case.
#
# </details>
#
# ### The rule of the square root
#
# Chen and others (2016) cut $n$ layers into segments of $s$. *Edge* is a layer's input, *inside* all else that it
# saves. At the first tooth $n/s$ edges are kept; the segment's other $s - 1$ edges and $s$ insides are back. With
# nothing inside, $n/s + s - 1$ is smallest at $s = \sqrt{n}$. At the last tooth: $s$ edges, $s$ insides, gradients of
# $n - s$ blocks.

# %%
model = build(every=0)[0]
cost = block_costs(model, tokens[:, :-1])[1]
edge, inside, gradient = cost.input_bytes, cost.inside_bytes, sum(p.nbytes for p in model.blocks[1].parameters())


def teeth(depth, s, edge, inside, gradient):
    kept = -(-depth // s) * edge  # rounded up
    return kept + (s - 1) * edge + s * inside, s * edge + s * inside + (depth - s) * gradient


one, three = moments(runs["every block"]), moments(runs["segments of 3"])
for place, low, high in zip(("first tooth", "last tooth"), *(teeth(9, s, edge, inside, gradient) for s in (1, 3)), strict=True):
    print(f"{place}, segments of 3 against 1: {format_bytes(high - low)} more (predicted),",
          f"{format_bytes(three[place] - one[place])} more (measured)")

# %% [markdown]
# **Question.** Now 36 blocks with 8 tensors inside and 1 at the edge. Which $s$ keeps the fewest at the first tooth:
# $36/s + (s-1) + 8s$?

# %%
segment_size = ...
check("05.best_segment", segment_size)

# %%
for ratio in (0, 1, inside // edge):
    tensors = [teeth(36, s, 1, ratio, 0)[0] for s in range(1, 37)]
    print(f"36 layers, inside {ratio} times the edge: fewest at the first tooth with segments of {1 + tensors.index(min(tensors))} (predicted)")

# %% [markdown]
# **Read it.** The last ratio is our blocks': one block a segment is best. The square root is for layers with next to nothing
# inside.
#
# ## 3. Where it gives little back
#
# **Unequal blocks.** A U-Net's middle blocks see few pixels, so they keep little. In the lab you find the cheapest set under a
# budget.
#
# **Tiny layers.** A checkpoint keeps its input, so it pays only if the layer would keep *more*. A linear layer keeps just
# its input, a ReLU its result: the next layer's input anyway.

# %%
WRAPS = {"no checkpoint": lambda chain: checkpoint_blocks(chain, every=0),
         "each tiny layer": lambda chain: checkpoint_blocks(chain),
         "segments of 4 layers": lambda chain: checkpoint_blocks(in_segments(chain, 4))}


def chain_run(name):
    layers = [layer for _ in range(10) for layer in (nn.Linear(128, 128), nn.ReLU())]
    chain = nn.Sequential(*WRAPS[name](nn.Sequential(*layers))).to(device)
    x = torch.randn(8192, 128, device=device)
    return measure(lambda: chain(x).sum().backward(), model=chain, name=name, timed_steps=0)


chains = [chain_run(name) for name in WRAPS]
for run in chains:
    print(f"{run.name:<21} peak {format_bytes(run.peak_bytes)} (measured)")

# %% [markdown]
# **Read it.** Wrapping each layer *raises* the peak: both inputs of a pair stay, where one was
# enough. Checkpoint what is large inside and small at the edge: a block.
#
# ### Break it, diagnose it
#
# A colleague checkpoints every block of a fine-tune and saves next to nothing. Only the last block and the head are
# trained. Why?

# %%
for way in ("none", "every block"):
    model, optimizer = build(**WAYS[way])
    for part in (model.embed, *model.blocks[:-1]):
        part.requires_grad_(False)
    peak = measure(partial(one_step, model, optimizer), model=model, optimizer=optimizer, timed_steps=0).peak_bytes
    print(f"eight of nine blocks frozen, {way:<11}: peak {format_bytes(peak)} (measured)")

# %% [markdown]
# **Diagnose it.** Autograd keeps activations only where a gradient will pass: here in the last block. Its inside returns
# at once; only the logits are gone by then.
#
# ## 4. What it can break
#
# **Batch norm.** Its forward moves the running statistics that evaluation uses. Recomputation is a second forward, so
# they move twice a step. Three steps of a U-Net, by PyTorch's plain checkpoint and by ours, which holds them still.

# %%
def trained(**how):
    torch.manual_seed(0)
    model = checkpoint_blocks(UNet((16, 32, 32), norm="batch", dropout=0.1), **how)
    optimizer, when = torch.optim.SGD(model.parameters(), lr=0.05), torch.arange(8)
    *batches, held_out = torch.randn(4, 8, 3, 16, 16)
    for x in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, when), x)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        evaluated = F.mse_loss(model.eval()(held_out, when), held_out)
    return loss.item(), evaluated.item(), int(model.middle.norm1.num_batches_tracked)


# %%
found = {"no checkpoint": trained(every=0), "plain checkpoint": trained(freeze_statistics=False), "statistics held still": trained()}
for name, (loss, held_out, updates) in found.items():
    print(f"{name:<22} training loss {loss:.6f}   evaluation loss {held_out:.6f}   updates {updates}")

# %% [markdown]
# **Read it.** The training losses are equal to the last digit. But in evaluation a batch that should count by 0.1 in the
# running mean counts by 1 - 0.9² = 0.19. (The lower loss means nothing: the images are noise.) You write the cure in the
# lab.
#
# **What does not repeat.** Torch's random state is replayed; Python's and NumPy's are not. PyTorch raises a
# `CheckpointError` if the second run saves another number of tensors, other shapes or dtypes. It compares no values, here
# of the mask that drops columns. `check_repeatable` asks before you train, by two runs:

# %%
class OwnDropout(nn.Module):
    """Drops columns by random numbers that torch knows nothing of."""

    def forward(self, x):
        return x * torch.tensor([random.random() > 0.5 for _ in range(x.shape[-1])])


def weight_gradient(call):
    random.seed(0)
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), OwnDropout())
    loss = call(block, torch.randn(4, 8)).square().sum()
    loss.backward()
    return loss.item(), block[0].weight.grad


plain_loss, plain = weight_gradient(lambda block, x: block(x))
loss, found = weight_gradient(lambda block, x: checkpoint(block, x, use_reentrant=False))
print(f"raised: nothing; same loss: {loss == plain_loss}; same gradient: {torch.equal(found, plain)}")
try:
    check_repeatable(nn.Sequential(nn.Linear(8, 8), OwnDropout()), torch.randn(4, 8))
except NotRepeatableError as error:
    print(str(error).partition(", with")[0])

# %% [markdown]
# ## 5. Logits are activations too
#
# With a large vocabulary the loss decides, and logits are outside of every block. The cure is the same idea: logits for
# some tokens at a time, reduced to a sum of losses, forgotten, and computed again.

# %%
def whole_loss(hidden, head, targets):
    return F.cross_entropy(head(hidden), targets)


def chunked_loss(hidden, head, targets, chunks=8):
    def one_chunk(part, wanted):
        return F.cross_entropy(head(part), wanted, reduction="sum")

    pairs = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)  # every token counts; labels of -100: lab, exercise 4
    return sum(checkpoint(one_chunk, *pair, use_reentrant=False) for pair in pairs) / len(targets)


# %% [markdown]
# **Predict.** A tensor of logits takes $4 \cdot 512 \cdot 16{,}000$ bytes, 31.25 MiB. The plain loss holds three (the
# log-softmax, its gradient, the logits' gradient) and the head's weight: 97.7 MiB. Eight chunks hold three eighths, the
# weight and its gradient: 19.5 MiB. PyTorch's form gets eight, too.

# %%
def torch_loss(hidden, head, targets):
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=len(targets) // 8)
    return F.linear_cross_entropy(hidden, head.weight, targets, options=options)


torch.manual_seed(0)
head = nn.Linear(64, 16_000, bias=False).to(device)
hidden = torch.randn(512, 64, device=device, requires_grad=True)
targets = torch.randint(0, 16_000, (512,), device=device)
of_torch = [torch_loss] if hasattr(F, "linear_cross_entropy") else []  # from PyTorch 2.13 on
loss_runs, found, gradients = {}, [], partial(torch.autograd.grad, inputs=[hidden, head.weight])
for loss_of in (whole_loss, chunked_loss, *of_torch):
    run = measure(lambda: gradients(loss_of(hidden, head, targets)), model=head, timed_steps=0)
    loss_runs[loss_of.__name__] = run.peak_bytes
    found.append(gradients(loss_of(hidden, head, targets)))
    torch.testing.assert_close(found[-1], found[0])
print({name: format_bytes(peak) for name, peak in loss_runs.items()}, "at the peak (measured); all gradients agree")

# %% [markdown]
# **Read it.** By hand the peak falls to a fifth, for one more product with the head. PyTorch's form computes each chunk's
# gradients in forward, and repeats nothing.
#
# ## 6. Scale up: 1.3 billion parameters on 40 GB
#
# GPT-3 XL's 24 layers and width of 2,048 (Brown and others 2020, Table 2.1), 16 heads in place of its 24, our blocks, 4
# sequences of 2,048 tokens, bf16 autocast, AdamW. The simulator follows CUDA's autocast lists and flash attention, also
# where the code says "cpu".

# %%
large = TransformerConfig(vocabulary=50_304, hidden=2048, layers=24, heads=16, feedforward=5504, tied=True)


def large_loss(model, sequences=4):
    batch = torch.randint(0, 50_304, (sequences, 2049))
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def large_loss_in_chunks(model):
    model.head = nn.Identity()  # its weight is the embedding's, and is used below
    batch = torch.randint(0, 50_304, (4, 2049))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(batch[:, :-1]).flatten(0, 1)
        return chunked_loss(hidden, lambda part: F.linear(part, model.embed.weight), batch[:, 1:].flatten())


def large_loss_by_halves(model):
    (large_loss(model, 2) / 2).backward()  # its graph is gone before the second half begins
    return large_loss(model, 2) / 2


# %%
def simulated(name, loss_of=large_loss, **choice):
    def step(model, optimizer):
        optimizer.zero_grad()
        loss_of(model).backward()  # no variable holds the graph when the optimizer begins
        optimizer.step()

    return simulate(lambda: build(large, "cpu", dropout=0, **choice), step, device="A100 40GB", name=name)


# %%
arms = {"none": (large_loss, WAYS["none"]), "none, loss in chunks": (large_loss_in_chunks, WAYS["none"]),
        "none, two micro-batches": (large_loss_by_halves, WAYS["none"]), "the last block alone": (large_loss, {"only": [23]}),
        "selective": (large_loss, WAYS["selective"]), "every block": (large_loss, {"every": 1}),
        "every block, loss in chunks": (large_loss_in_chunks, {"every": 1}), "every block, default AdamW": (large_loss, {"fused": None})}
large_runs = [simulated(name, loss_of, **choice) for name, (loss_of, choice) in arms.items()]
for run in large_runs:
    print(f"{run.name:<27} {heights(run, 2**30)} (GiB, simulated)")

# %% jupyter={"source_hidden": true}
room_bytes = simulated_device("A100 40GB").usable_bytes  # less its context
figure = draw_arms(large_runs, room_bytes, title="1.3B, 4 x 2,048 tokens, bf16, AdamW: simulated peaks (and the moment that decides)")
show(figure, alt="Peaks of eight ways, stacked by category, each in an outline of what the allocator reserves, beside a line at what "
     "the card leaves. Two outlines cross it: the plain step and the last block alone.")

# %% [markdown]
# **Read it.** What an allocator *reserves* must fit: whole segments, more than its tensors. (*Cast weights*: autocast's
# bf16 copies.) The plain step overflows at the loss. What is alive there?
#
# - **Logits.** In chunks they nearly vanish: it fits, narrowly.
# - **Activations.** *Selective* and *every block* drop them; two micro-batches halve them, and add gradients.
# - *The last block alone* gives back its inside, 0.8 GiB: at its tooth the logits, larger, are gone.
#
# *Every block* still peaks at the loss. Lower that, and the last tooth decides; with the default AdamW the optimizer
# step does. Then states must shrink (lessons 06 to 09). For a model of yours
# [this page](../00a_your_model.ipynb) tries every set of blocks.
#
# The price, in counted arithmetic:

# %%
def large_operations(way="none", loss_of=large_loss, adapters=False):
    def model_of(layers):
        model = Transformer(replace(large, layers=layers))
        if adapters:
            add_lora(model, targets=("query", "key", "value", "output", "gate", "up", "down"))
        return checkpoint_blocks(model, **WAYS[way])

    return operations_of(model_of, loss_of, large.layers)


plain, adapted = large_operations(), large_operations(adapters=True)
more = {"every block": large_operations("every block") / plain, "loss in chunks": large_operations(loss_of=large_loss_in_chunks) / plain,
        "every block, adapters": large_operations("every block", adapters=True) / adapted}
print(f"a token: {plain / (4 * 2048) / 1e9:.2f} billion operations;", ", ".join(f"{name} {100 * (ratio - 1):.0f}% more" for name, ratio in more.items()), "(counted)")

# %% [markdown]
# **Read it.** Frozen weights need no gradients: beside adapters backward is one part, not two. A GPU ran some of these
# steps, in eager mode:

# %%
record = recorded("gpt1b_recompute")[0]
ran, by_name = {(row["checkpointed"], row["micro_batch"]): row for row in record.rows}, {run.name: run for run in large_runs}
print(f"{record.evidence}: {record.device}, {record.date}, PyTorch {record.provenance['torch']}, 4 sequences a step")
for way in ("none", "selective", "every block"):
    row, run = ran[way, 4], by_name[way]
    print(f"{way:<12} tensors {row['requested_peak_bytes'] / 2**30:.2f} GiB (simulated {run.peak_bytes / 2**30:.2f}),",
          f"reserved {row['reserved_peak_bytes'] / 2**30:.2f} ({run.reserved_bytes / 2**30:.2f}),",
          f"{row['median_step_seconds'] / ran['none', 4]['median_step_seconds']:.2f} times the seconds of none")
    assert abs(run.peak_bytes / row["requested_peak_bytes"] - 1) < 0.005, f"{way}: simulated and recorded differ by more than 0.5%"
for way in ("none", "selective", "every block"):
    print(f"{way:<12} seconds of a step of 1, 2, 4 sequences:", ", ".join(f"{ran[way, n]['median_step_seconds']:.3f}" for n in (1, 2, 4)))

# %% jupyter={"source_hidden": true}
figure = draw_speeds(record.rows, token_flops=plain / (4 * 2048), peak_flops=card("H200").bf16_tflops * 1e12, device=f"{record.device}, {record.date}",
                     title=f"Recorded: 1.3B, 2,048 tokens a sequence, bf16, eager PyTorch {record.provenance['torch'].partition('+')[0]}")
show(figure, alt="Tokens a second over the peak of a step for four ways and 1, 2, 4 and 8 sequences. Filled points, which no other beats "
     "in both: every block of any number, none of 2, 4 and 8, every 2nd of 4.")

# %% [markdown]
# **Read it.** Tensors came out as simulated, to half a percent; what is reserved, to 4%. *None, loss in chunks* has less to
# spare: that verdict is open.
#
# *Selective* repeats no product, and costs nearly as much as all blocks: eager PyTorch asks Python about each operation. For
# 1 sequence its step takes as long as for 2: the GPU waits for launches. (`torch.compile` asks once; not recorded.)
#
# **Compare at an equal peak.** No point beats a filled one in both numbers. *Every block* with 4 sequences
# is below *none* with 1, and faster; *none* with 2 beats *selective* with 4. (Accumulated micro-batches, not shown, share
# an optimizer step; under FSDP each gathers weights again.)

# %% [markdown]
# ## Recap
#
# A checkpoint keeps inputs and the random state, and runs forward again. Find the moment that decides (*On Monday*), and
# lower it:
#
# | the peak | lower it by | price at 1.3B |
# |---|---|---|
# | optimizer step | `fused=True`, smaller states | |
# | the loss: logits | the loss in chunks | 2% more operations by hand, 0 in PyTorch's form |
# | the loss: activations | every block, selective, fewer sequences | 26%, 21% more time (H200, eager, 4 sequences) |
# | first tooth | more blocks, shorter segments | up to 25% more operations, beside adapters 42% |
# | last tooth | shorter segments, smaller states | |
#
# **Test yourself.** The last tooth overflows. Does a loss in chunks help?
#
# <details><summary>Answer</summary>
#
# No: logits are gone by then.
#
# </details>
#
# **Where next.** The [lab](../../labs/intermediate/05_checkpointing.ipynb), in a copy: `make my-labs`; its
# [solution](../../solutions/intermediate/05_checkpointing.ipynb); then [notebook 05a](05a_trusting_simulation.ipynb).
#
# **References.** Chen and others 2016, [arXiv:1604.06174](https://arxiv.org/abs/1604.06174). *Selective*: Korthikanti and
# others 2022, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198). Brown and others 2020,
# [arXiv:2005.14165](https://arxiv.org/abs/2005.14165). PyTorch:
# [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html),
# [the compiler's choice](https://pytorch.org/blog/activation-checkpointing-techniques/).

# %% [markdown]
# ## On Monday
#
# `model.blocks`: your list of equal blocks; `loss_of(model, batch)`: your loss.
#
# **Which moment decides?** On a GPU, in a second step (the first makes the optimizer's state):
#
# ```python
# import torch
#
#
# def read(name):
#     print(f"{name:<14} {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
#     torch.cuda.reset_peak_memory_stats()
#
#
# hooks = [model.blocks[-1].register_full_backward_pre_hook(lambda *_: read("the loss"))]
# for n, block in enumerate(model.blocks):
#     hooks.append(block.register_full_backward_hook(lambda *_, n=n: read(f"tooth {n}")))
# optimizer.zero_grad()
# torch.cuda.reset_peak_memory_stats()
# loss_of(model, batch).backward()
# read("rest")
# optimizer.step()
# read("optimizer step")
# for hook in hooks:
#     hook.remove()
# ```
#
# **Every block.** Once, before `DistributedDataParallel`, `torch.compile` or `fully_shard`, with a `batch` so short that the
# plain step fits. **Look at** gradients and buffers, equal up to the noise of two plain runs:
#
# ```python
# from functools import partial
#
# import torch
# from torch.utils.checkpoint import checkpoint
#
#
# def one_step():
#     model.load_state_dict(start)  # batch norm's statistics move in forward
#     model.zero_grad()
#     torch.manual_seed(0)
#     loss_of(model, batch).backward()
#     found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | dict(model.named_buffers())
#     return {name: tensor.cpu().clone() for name, tensor in found.items()}
#
#
# def apart(one, other):
#     return {name: (one[name].float() - tensor.float()).norm().item() for name, tensor in other.items()}
#
#
# start = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
# plain = one_step()
# noise = apart(one_step(), plain)  # 0 on a CPU; some GPU kernels add in another order each time
# for block in model.blocks:
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)
# off = apart(one_step(), plain)
# wrong = [name for name in off if off[name] > 3 * noise[name] + 1e-6 * plain[name].float().norm().item()]
# assert not wrong, f"another step than before in {wrong}"
# model.load_state_dict(start)
# model.zero_grad()
# ```
#
# **Selective**, in place of that loop. What is not listed runs again: flex and flash-attn kernels, fp8, collectives:
#
# ```python
# from functools import partial
#
# import torch
# from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
#
# aten = torch.ops.aten
# EXPENSIVE = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention.default,
#              aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default]
# contexts = partial(create_selective_checkpoint_contexts, EXPENSIVE)
# for block in model.blocks:
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
# ```
#
# **The loss decides?** PyTorch 2.13 or later; `hidden` is what the head would get, (tokens, width); labels of -100 do not
# count; with label smoothing it warns, and makes all logits:
#
# ```python
# import torch.nn.functional as F
# from torch import nn
#
# loss = F.linear_cross_entropy(hidden, head.weight, labels, options=nn.LinearCrossEntropyOptions())
# ```
#
# **transformers 5.23**, before peft's wrap; or `Trainer` with `activation_checkpointing=True`, or accelerate's FSDP with
# `fsdp_activation_checkpointing: true`. Earlier releases: `gradient_checkpointing=True`, or
# `gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})`:
#
# ```python
# model.config.use_cache = False
# model.activation_checkpointing_enable({"use_reentrant": False})
# model.train()
# ```
#
# **You compile?** In place of a loop; from 1.0, the default, to 0.0, the least:
#
# ```python
# import torch
# import torch._functorch.config as functorch_config
#
# functorch_config.activation_memory_budget = 0.5
# model = torch.compile(model)
# ```
#
# **Megatron-LM:** `--recompute-granularity selective`, or `full` with `--recompute-method uniform --recompute-num-layers 1`.
