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
# **Promise.** You write a checkpoint by hand, and measure five ways to choose, with the same losses and gradients to the
# last bit. A model of 1.3 billion parameters then fits a simulated card of 40 GB that it overflowed.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 60 for the lab | any laptop; a GPU if you have one; beyond Binder's 1 GB | about a minute on two CPU cores |
#
# ## A bet
#
# Backward needs the activations that forward made. If every block of a model is checkpointed, it runs its
# forward a second time. By how many percent does the arithmetic of a step grow? Write your guess in
# place of the 0. Section 2 counts.

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
from utils.views.breakdown import draw_breakdown
from utils.lessons.lesson_05.block_choice import block_costs
from utils.lessons.lesson_05.depth import operations_of
from utils.lessons.lesson_05.moments import draw_moments, moments
from utils.lessons.lesson_05.repeatable import NotRepeatableError, check_repeatable
from utils.lessons.lesson_05.tradeoff import draw_tradeoff

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# A model of nine blocks, with dropout in each, takes a step of AdamW twice: as it is, and with every block
# checkpointed. `checkpoint_blocks` does what these lines do, and what section 4 asks for:
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
# **Read it.** On the left every activation waits for backward. On the right forward keeps the blocks' inputs. In
# backward one block's inside at a time comes back, is used, and goes: a **tooth**. (The drop at the left is `zero_grad`.) Four
# moments may be the peak:
#
# | moment | alive beside parameters and optimizer state, every block checkpointed |
# |---|---|
# | the loss, and where its backward begins | all inputs, and the logits |
# | first tooth | all inputs, one inside |
# | last tooth | one input, one inside, all gradients |
# | optimizer step | all gradients; on a GPU, unless `fused=True`, temporaries as large as all parameters (*foreach*) |
#
# Here the last tooth is: a block's gradients are larger than its input. **A choice lowers the peak only if it
# lowers the moment that decides.**
#
# ## 1. A checkpoint by hand
#
# Forward keeps nothing but the block's input. In backward the block runs again, this time with autograd watching.
# `replay` says whether it gets the first run's random state (the CPU's; a GPU has its own).

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
# **Read it.** Without the replayed state the second run drops other elements: nothing is raised, and the gradients belong
# to another network. `torch.utils.checkpoint` replays the state.
#
# `Forgetful` is PyTorch's older way, `use_reentrant=True`: a backward inside of backward. It has a hole. Autograd calls
# a Function's backward only if one of its *inputs* needs a gradient, and a batch of data does not.

# %%
block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
batch = torch.randn(4, 8)  # data: needs no gradient
by_hand, by_torch = Forgetful.apply(block, True, batch), checkpoint(block, batch, use_reentrant=False)
print("needs a gradient:", by_hand.requires_grad, "by hand,", by_torch.requires_grad, "with use_reentrant=False")

# %% [markdown]
# **Read it.** By hand, a block that is fed with data would never be trained. `use_reentrant=False` puts a placeholder
# where autograd would save a tensor; when backward opens one, the block runs again. Always write it. You build it in the
# lab.
#
# ## 2. Which blocks?
#
# The nine blocks again, five ways:
#
# | way | keeps |
# |---|---|
# | none | everything |
# | every 2nd | all of the blocks 1, 3, 5, 7, inputs of the others |
# | every block | the blocks' inputs |
# | segments of 3 | one input in three; three blocks are recomputed together |
# | selective | inputs, and the results of matrix products and attention |

# %%
WAYS = {"none": {"every": 0}, "every 2nd": {"every": 2}, "every block": {"every": 1}, "segments of 3": {"segment": 3},
        "selective": {"keep": EXPENSIVE}}

# %% [markdown]
# *Selective* keeps the results of those operations. In plain PyTorch it is a policy, asked at every operation:

# %%
def policy(context, operation, *args, **kwargs):
    keep = operation in EXPENSIVE
    asked["kept" if keep else "not kept"] += 1
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


asked, one_layer = Counter(), Transformer(replace(small, layers=1)).to(device)
contexts = partial(create_selective_checkpoint_contexts, policy)
checkpoint(one_layer, tokens[:1, :-1], use_reentrant=False, context_fn=contexts).sum().backward()
print("one layer and the head:", ", ".join(f"{times} operations {kept}" for kept, times in asked.items()))

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
def extra_percent(way):
    return 100 * (operations[way] / operations["none"] - 1)


def heights(run, unit_bytes):
    return ", ".join(f"{name} {size / unit_bytes:.2f}" for name, size in moments(run).items())


for way, run in runs.items():
    print(f"{way:<13} peak {format_bytes(run.peak_bytes)}: {heights(run, 2**20)} (measured)",
          f"  {extra_percent(way):+5.1f}% operations (counted)")
print(f"your bet: {my_bet_percent}%, counted: {extra_percent('every block'):.1f}%")

# %% jupyter={"source_hidden": true}
figure = draw_tradeoff(list(runs.values()), [extra_percent(way) for way in WAYS], cost_label="more operations of matrix products and attention (%, counted)",
                       title=f"Peak against operations: nine blocks, fp32, {sequences} x 128 tokens")
show(figure, alt="Measured peaks against counted extra operations: none and selective stand at zero, "
     "every block is lowest, segments of 3 cost most.")

# %% [markdown]
# **Read it.** *Every block* counts less than 33%: the head is not recomputed; fused attention has five products in backward
# to two in forward; and PyTorch stops a recomputation once all that was saved is back, before the block's last product. A segment stops once,
# not three times: so *segments of 3* cost more.
#
# *Selective* repeats no product. Not counted: elementwise work, and Python, asked at each operation. It and *every 2nd* peak
# at the first tooth, where more is kept.
#
# **Question.** Of these nine blocks you checkpoint only the *last*. Does the peak fall by its inside, `"yes"` or `"no"`?

# %%
last_block_helps = ...
check("05.last_block", last_block_helps)

# %% [markdown]
# ### The rule of the square root
#
# Chen and others (2016) cut $n$ layers into segments of $s$. *Edge* is a layer's input, *inside* all else that it
# saves. At the first tooth $n/s$ edges are kept, and the segment's other $s - 1$ edges and $s$ insides are back. With
# nothing inside, $n/s + s - 1$ is smallest at $s = \sqrt{n}$. At the last tooth stand $s$ edges, $s$ insides, and the
# gradients of $n - s$ blocks.

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
# **Question.** Now 36 blocks that keep 8 tensors inside and 1 at the edge. Which segment size $s$ keeps
# the fewest at the first tooth: $36/s + (s-1) + 8s$?

# %%
segment_size = ...
check("05.best_segment", segment_size)

# %% [markdown]
# ## 3. Where it gives little back
#
# **Unequal blocks.** A U-Net's middle blocks see few pixels, so they keep little. In the lab you find the cheapest set under a
# budget.
#
# **Tiny layers.** A checkpoint keeps its input, so it pays only if the layer would keep *more*. A linear layer keeps
# just its input, and a ReLU its result, which is the next layer's input anyway.

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
    step = partial(one_step, model, optimizer)
    peak = measure(step, model=model, optimizer=optimizer, timed_steps=0).peak_bytes
    print(f"eight of nine blocks frozen, {way:<11}: peak {format_bytes(peak)} (measured)")

# %% [markdown]
# **Diagnose it.** Autograd keeps activations only where a gradient will pass: here in the last block. Checkpointed, that
# block runs again right after the loss, when the logits are gone.
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
# **Read it.** The training losses are equal to the last digit: no training curve shows it. But in evaluation a batch
# that should count by 0.1 in the running mean counts by 1 - 0.9² = 0.19. (That the loss is lower
# means nothing: the images are noise.) The cure is a context around recomputation alone: you write it in the lab.
#
# **What does not repeat.** Torch's random state is replayed; Python's and NumPy's are not. PyTorch compares the number,
# shapes, dtypes and devices of what is saved again with forward's, and no values: here the mask that drops columns. So ask
# before you train: `check_repeatable` runs a block twice.

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
assert loss == plain_loss and not torch.equal(found, plain), "the second run should drop other columns"
try:
    check_repeatable(nn.Sequential(nn.Linear(8, 8), OwnDropout()), torch.randn(4, 8))
except NotRepeatableError as error:
    print(str(error).partition(", with")[0])

# %% [markdown]
# ## 5. Logits are activations too
#
# With a large vocabulary the loss decides, and checkpointed blocks leave the logits' share of it. The cure is the same
# idea: logits for some tokens at a time, reduced to a sum of losses, forgotten, and computed again.

# %%
def whole_loss(hidden, head, targets):
    return F.cross_entropy(head(hidden), targets)


def chunked_loss(hidden, head, targets, chunks=8):
    def one_chunk(part, wanted):
        return F.cross_entropy(head(part), wanted, reduction="sum")

    pairs = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)  # each token has a label: -100 is the lab's
    return sum(checkpoint(one_chunk, *pair, use_reentrant=False) for pair in pairs) / len(targets)


# %% [markdown]
# **Predict.** A tensor of logits takes $4 \cdot 512 \cdot 16{,}000$ bytes, 31.25 MiB; the head's weight 3.91 MiB. The plain
# loss holds three such tensors (the log-softmax, its gradient, the logits' gradient) and the weight: 97.7 MiB. Eight chunks hold
# three eighths, the weight, and its gradient, which adds up from chunk to chunk: 19.5 MiB. PyTorch has its own form, too, since 2.13.

# %%
def torch_loss(hidden, head, targets):
    return F.linear_cross_entropy(hidden, head.weight, targets, options=nn.LinearCrossEntropyOptions())


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
# **Read it.** By hand the peak falls to a fifth, for one more product with the head. PyTorch's form
# computes the gradients in forward, chunk by chunk, and repeats none.
#
# ## 6. Scale up: 1.3 billion parameters on 40 GB
#
# The same `build` and a real size: GPT-3 XL's 24 layers and width of 2,048 (Brown and others 2020, Table 2.1),
# with 16 heads in place of its 24 and the blocks of our transformer, 4 sequences of 2,048 tokens, bf16
# autocast, AdamW. The simulator follows CUDA's autocast lists and flash attention, also where the code says "cpu".

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
large_runs = [simulated(way, **WAYS[way]) for way in ("none", "selective", "every block")]
large_runs.insert(1, simulated("the last block alone", only=[23]))

# %%
more = [simulated("every block, loss in chunks", large_loss_in_chunks), simulated("every block, default AdamW", fused=None),
        simulated("none, two micro-batches", large_loss_by_halves, every=0)]
large_runs = [*large_runs[:4], *more]
for run in large_runs:
    print(f"{run.name:<27} {run.notes[0].partition(' the ')[0].lower():<12} {format_bytes(run.peak_bytes)}: {heights(run, 2**30)} (simulated)")

# %% jupyter={"source_hidden": true}
named = [replace(run, name=f"{run.name}: {max(moments(run), key=moments(run).get)}") for run in large_runs]
room = simulated_device("A100 40GB").usable_bytes  # less its context
figure = draw_breakdown(named, limit=f"{room / 2**30:.1f}GiB", title="1.3B, 4 x 2,048 tokens, bf16, AdamW")
show(figure, alt="Peaks of seven ways, stacked by category, beside a line at what the card leaves: the plain step and "
     "the last block alone are over it; every block with its loss in chunks is lowest.")

# %% [markdown]
# **Read it.** Each name has the moment that decides; the line is the card. Five ways fit, and two recompute no product: *selective*, and the
# plain step in two micro-batches. *The last block alone* gives 0.8 GiB back: it runs again when logits and their gradients
# are gone. *Every block* peaks in the loss. Lower that, and the last tooth decides, with nearly all gradients. With the
# default AdamW the optimizer step decides, and no choice of blocks helps. Then shrink states (lessons
# 06 to 09).
#
# A simulation has no time, but its arithmetic can be counted:

# %%
def large_operations(way, adapters=False):
    def model_of(layers):
        model = Transformer(replace(large, layers=layers))
        if adapters:
            add_lora(model, targets=("query", "key", "value", "output", "gate", "up", "down"))
        return checkpoint_blocks(model, **WAYS[way])

    return operations_of(model_of, large_loss, large.layers)


for name, adapters in {"all weights trained": False, "adapters in every block": True}.items():
    plain, again = (large_operations(way, adapters) for way in ("none", "every block"))
    print(f"{name}: every block costs {100 * (again / plain - 1):.0f}% more operations (counted)")

# %% [markdown]
# **Read it.** Frozen weights need no gradients: their backward is one part, not two, and a forward again costs more
# of the step. Does a GPU agree? It ran these steps:

# %%
record, by_name = recorded("gpt1b_recompute")[0], {run.name: run for run in large_runs}
ran = {(row["checkpointed"], row["micro_batch"]): row for row in record.rows}
print(f"{record.evidence}: {record.device}, {record.date}")
for of in [("none", 4), ("none", 2), ("selective", 4), ("every block", 4), ("none", 1), ("selective", 1), ("every block", 1)]:
    row, slower = ran[of], ran["none", 4]["tokens_per_second"] / ran[of]["tokens_per_second"]
    print(f"{of[0]:<12} step of {of[1]}: {row['requested_peak_bytes'] / 2**30:5.2f} GiB, {slower:.2f} times the seconds a token of the first")
    off = by_name[of[0]].peak_bytes / row["requested_peak_bytes"] - 1
    assert of[1] != 4 or abs(off) < 0.005, f"{of[0]}: simulated and recorded differ by {off:.1%}"

# %% [markdown]
# **Read it.** Steps of four took what was simulated for an A100, to half a percent. Counts tell less: selective repeats no
# product, and costs nearly as much as all blocks. It repeats the small kernels, and PyTorch asks Python about each
# operation; with one sequence that decides. Smaller steps cost least (as micro-batches they keep one copy of the gradients,
# 4.9 GiB). So try **smaller micro-batches**, then selective, all blocks, chunks. For your own model
# [this page](../00a_your_model.ipynb) finds the cheapest set that fits.

# %% [markdown]
# ## Recap
#
# - A checkpoint keeps inputs and the random state, and runs forward again: the same gradients, fewer bytes.
# - The peak is the loss, the first tooth, the last, or an AdamW that is not fused: a choice helps if it lowers the one that
#   decides.
# - Selective costs no product, a set of blocks its share of a forward, all blocks up to a forward: at 1.3B 25% of the
#   operations, with adapters 42%; on an H200 26% of the time.
# - Tiny layers and a frozen beginning give nothing back; batch norm and foreign random numbers break it silently.
#
# **Test yourself.** With every block checkpointed a step runs out of memory in the loss. What do you change?
#
# <details><summary>Answer</summary>
#
# What is alive there? Logits: compute the loss in chunks. Inputs: longer segments. Or a smaller micro-batch.
#
# </details>
#
# **Where next.** The [lab](../../labs/intermediate/05_checkpointing.ipynb), in a copy: `make my-labs`; its
# [solution](../../solutions/intermediate/05_checkpointing.ipynb); then [notebook 05a](05a_trusting_simulation.ipynb).
#
# **References.** Chen and others 2016, [arXiv:1604.06174](https://arxiv.org/abs/1604.06174). Brown and others 2020,
# [arXiv:2005.14165](https://arxiv.org/abs/2005.14165). PyTorch:
# [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html),
# [the compiler's choice](https://pytorch.org/blog/activation-checkpointing-techniques/).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** `model.blocks` is your list of equal blocks (perhaps `model.layers`), `loss_of(model, batch)` your
# loss. Once, before `fully_shard(block)`, `DistributedDataParallel` or `torch.compile`, and first on a `batch` so short that
# the plain step fits. **Look at** gradients and buffers (equal up to the noise of two plain runs; a loss proves nothing) and
# at the peak that is printed:
#
# ```python
# from functools import partial
#
# import torch
# from torch.utils.checkpoint import checkpoint
#
#
# def one_step():
#     model.zero_grad()
#     model.load_state_dict(start)  # batch norm's statistics move in forward
#     torch.manual_seed(0)
#     if torch.cuda.is_available():
#         torch.cuda.reset_peak_memory_stats()
#     loss_of(model, batch).backward()
#     if torch.cuda.is_available():
#         print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
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
# ```
#
# **Selective**, in place of that loop. Results of these operations stay:
#
# ```python
# from functools import partial
#
# import torch
# from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
#
# aten = torch.ops.aten
# keep = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention.default,
#         aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default]
# contexts = partial(create_selective_checkpoint_contexts, keep)
# for block in model.blocks:
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
# ```
#
# **The loss decides?** PyTorch 2.13 or later; `hidden` is what the head would get, (tokens, width); labels of -100 do not count:
#
# ```python
# import torch.nn.functional as F
# from torch import nn
#
# loss = F.linear_cross_entropy(hidden, head.weight, labels, options=nn.LinearCrossEntropyOptions())
# ```
#
# **transformers 5.23**, before peft's wrap. `Trainer` does it with `activation_checkpointing=True`, accelerate's FSDP with
# `fsdp_activation_checkpointing: true`: one of the three. Where a release lacks the method, call
# `gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})`:
#
# ```python
# model.config.use_cache = False
# model.activation_checkpointing_enable({"use_reentrant": False})
# model.train()
# ```
#
# **You compile anyway?** In place of a loop; from 1.0, the default, to 0.0, as little kept as the compiler can:
#
# ```python
# import torch
# import torch._functorch.config as functorch_config
#
# functorch_config.activation_memory_budget = 0.5
# model = torch.compile(model)
# ```
