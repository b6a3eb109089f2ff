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
# **Promise.** You write a checkpoint by hand, and measure six ways to choose, with the same losses and gradients to the
# last bit. A model of 1.3 billion parameters then fits a simulated card of 40 GB that it overflowed.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 60 for the lab | any laptop; a GPU if you have one; beyond Binder's 1 GB | about a minute on two CPU cores |
#
# ## A bet
#
# Backward needs the activations that forward made. If every block of a model is checkpointed, it runs its
# forward a second time. By how many percent does the arithmetic of the whole step grow? Write your guess in
# place of the 33. Section 2 counts.

# %%
my_bet_percent = 33

# %% tags=["setup"]
here = setup("intermediate/05")

# %% jupyter={"source_hidden": true}
import random
import statistics
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from utils import Transformer, TransformerConfig, UNet, check, compare, draw_over_time, draw_timeline
from utils import format_bytes, measure, recorded_table, score, scoreboard, show, simulate
from utils.simulation.devices import simulated_device
from utils.techniques import EXPENSIVE, checkpoint_blocks, in_segments
from utils.lessons.lesson_05.block_choice import activation_peak, best_blocks, block_costs, recompute_flops
from utils.lessons.lesson_05.depth import operations_of
from utils.lessons.lesson_05.repeatable import NotRepeatableError, check_repeatable, recompute_explained
from utils.lessons.lesson_05.tradeoff import draw_tradeoff
from utils.lessons.lesson_05.turns import taking_turns

device = here.meter_device  # where the meter can count: CUDA or CPU

# %%
def nine_blocks(every):
    config = TransformerConfig(vocabulary=256, hidden=128, layers=9, heads=4, feedforward=352)
    model = checkpoint_blocks(Transformer(config).to(device), every=every)
    batch = torch.zeros(4, 128, dtype=torch.long, device=device)
    return measure(lambda: model(batch).square().mean().backward(), model=model, timed_steps=0)


kept_or_not = {"all kept": nine_blocks(every=0), "every block computed again": nine_blocks(every=1)}
show(draw_over_time(kept_or_not, "activations", title="What forward keeps, nine blocks (recomputed not shown)"),
     alt="Activations through one step, twice: a hill where all is kept, a low step where blocks run again.")

# %% [markdown]
# ## 1. A checkpoint by hand
#
# Forward keeps nothing but the block's input. In backward the block runs again, this time with autograd watching.
# `replay` says whether it gets the first run's random state (the CPU's; on a GPU you would save that one's too).

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
# A block with dropout: plain, forgetful, forgetful without the random state. The gradients of a layer before it tell.

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
# **Read it.** Without the replayed state the second run drops other elements. The loss is right, nothing is raised, and
# the gradients belong to another network. `torch.utils.checkpoint` replays the state.
#
# `Forgetful` is PyTorch's older way, `use_reentrant=True`: a backward inside of backward. It has a hole. Autograd calls
# a Function's backward only if one of its *inputs* needs a gradient, and a batch of data does not.

# %%
block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
batch = torch.randn(4, 8)  # data: needs no gradient
by_hand, by_torch = Forgetful.apply(block, True, batch), checkpoint(block, batch, use_reentrant=False)
print("needs a gradient:", by_hand.requires_grad, "by hand,", by_torch.requires_grad, "with use_reentrant=False")

# %% [markdown]
# **Read it.** By hand, the first block of a network would never be trained. `use_reentrant=False` puts a placeholder
# where autograd would save a tensor; when backward opens one, the block runs again. Always write it. You build it in the
# lab.
#
# ## 2. Which blocks?
#
# Nine blocks, with dropout in each. `checkpoint_blocks(model, ...)` wraps each chosen block's call in
# `torch.utils.checkpoint`. Six ways:
#
# | way | keeps |
# |---|---|
# | none | everything |
# | every 2nd | all of the blocks 1, 3, 5, 7, inputs of the others |
# | every block | the blocks' inputs |
# | segments of 3 | one input in three; three blocks are recomputed together |
# | selective | inputs, and the results of matrix products and attention |
# | selective, every 2nd | the same in blocks 0, 2, 4, 6, 8, all of the others |

# %%
WAYS = {"none": {"every": 0}, "every 2nd": {"every": 2}, "every block": {"every": 1}, "segments of 3": {"every": 1},
        "selective": {"keep": EXPENSIVE}, "selective, every 2nd": {"every": 2, "keep": EXPENSIVE}}
width, sequences = {"tiny": (128, 4), "small": (512, 16), "full": (1024, 32)}[here.scale]
small = TransformerConfig(vocabulary=256, hidden=width, layers=9, heads=4, feedforward=11 * width // 4)


def build(way, config=small, device="cpu", dropout=0.1):
    torch.manual_seed(0)
    model = Transformer(config)
    for block in model.blocks if dropout else ():
        block.feedforward = nn.Sequential(nn.Dropout(dropout), block.feedforward)
    if way.startswith("segments"):
        model.blocks = in_segments(model.blocks, 3)
    checkpoint_blocks(model.to(device), **WAYS[way])
    return model, torch.optim.AdamW(model.parameters(), fused=True)


# %% [markdown]
# *Selective* is a list of operations whose results are kept. In plain PyTorch it is a policy, asked at every operation:

# %%
def policy(context, operation, *args, **kwargs):
    asked.append(operation in EXPENSIVE)
    return CheckpointPolicy.MUST_SAVE if asked[-1] else CheckpointPolicy.PREFER_RECOMPUTE


asked, one_layer = [], Transformer(replace(small, layers=1))
contexts = partial(create_selective_checkpoint_contexts, policy)
checkpoint(one_layer, torch.zeros(1, 128, dtype=torch.long), use_reentrant=False, context_fn=contexts).sum().backward()
print(f"one layer, forward and backward: the policy was asked {len(asked)} times, {sum(asked)} were products or attention")

# %% [markdown]
# **Predict.** A block costs one part forward and two backward. Running it again adds one part to three:
# 33% of the blocks' arithmetic for *every block*, five ninths of that for *every 2nd*, no matrix product for *selective*.
# Memory: *every block* keeps nine inputs and the inside of one block, *segments of 3* three inputs and the inside of three.
#
# `FlopCounterMode` counts the operations of matrix products, attention included.

# %% jupyter={"source_hidden": true}
tokens = torch.randint(0, 256, (sequences, 129), generator=torch.Generator().manual_seed(1)).to(device)


def one_step(model, optimizer):
    optimizer.zero_grad()
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


# %%
runs, operations, steps, seen = {}, {}, {}, {}
for way in WAYS:
    model, optimizer = build(way, device=device)
    steps[way] = partial(one_step, model, optimizer)
    torch.manual_seed(2)  # every way draws the same dropout
    losses = [steps[way]()]
    with FlopCounterMode(display=False) as counter:
        losses.append(steps[way]())
    operations[way] = counter.get_total_flops()
    seen[way] = torch.cat([torch.tensor(losses, device=device), *[p.grad.flatten() for p in model.parameters()]])
    runs[way] = measure(steps[way], model=model, optimizer=optimizer, name=way, timed_steps=0)
near = 0.0 if device.type == "cpu" else 1e-5  # a GPU may add up in another order at each run
for way in WAYS:
    torch.testing.assert_close(seen[way], seen["none"], rtol=near, atol=near)
print(f"losses of two steps and all gradients equal, tolerance {near}, dropout included: {', '.join(WAYS)}")

# %%
def extra_percent(way):
    return 100 * (operations[way] / operations["none"] - 1)


seconds = taking_turns(steps, rounds=5, device=device)
for way, run in list(runs.items())[1:]:
    ratios = [100 * (a / b - 1) for a, b in zip(seconds[way], seconds["none"], strict=True)]  # within each round
    print(f"{way:<21} peak {format_bytes(run.peak_bytes):>10}   {extra_percent(way):+5.1f}% operations (counted)",
          f"  {statistics.median(ratios):+5.0f}% time ({min(ratios):+.0f} to {max(ratios):+.0f}, measured)")
print(f"your bet: {my_bet_percent}%, counted: {extra_percent('every block'):.1f}%")

# %% jupyter={"source_hidden": true}
figure = draw_tradeoff(list(runs.values()), [extra_percent(way) for way in WAYS], title="Peak against operations",
                       cost_label="more operations than without checkpointing (%, counted)")
show(figure, alt="Measured peaks against counted extra operations: none and both selective ways stand at zero, "
     "every block is lowest, segments of 3 cost most.")

# %% [markdown]
# **Read it.** The dashed line leaves out a way if another needs no more memory and costs no more. *Every block* counts
# less than 33%: the head is not recomputed, nor a block's last product, whose result nobody needs, and fused attention
# has five products in backward to two in forward.
#
# *Selective* repeats no product. What the last column shows for it is **dispatch**: each operation above passes through
# a Python function. Large kernels hide that. Where ranges of time overlap, they rank nothing; section 6 has published
# times of A100s.

# %% jupyter={"source_hidden": true}
figure = draw_timeline(runs["every block"])
show(figure, alt="Timeline of a step with every block checkpointed: a low base of block inputs in forward, then "
     "nine short spikes of recomputed activations in backward.")

# %% [markdown]
# **Read it.** Forward climbs only by the blocks' inputs. Backward shows one tooth for each block: its inside appears, is
# used, and goes. A block's gradients, which stay, are larger here than its input: so the last tooth is the peak.
#
# **Question.** You checkpoint the *last* block alone, and no other. Does the peak in backward fall? Answer `"yes"` or
# `"no"`.

# %%
last_block_helps = ...
check("05.last_block", last_block_helps)

# %% [markdown]
# ### The rule of the square root
#
# Chen and others (2016) cut $n$ layers into segments of $s$. *Edge* is a layer's input, *inside* all else that it
# saves. Alive at the first tooth are $n/s$ kept edges, the segment's other $s - 1$ edges, and its $s$ insides. With
# nothing inside, $n/s + s - 1$ is smallest at $s = \sqrt{n}$. And with our block's inside?

# %%
cost = block_costs(build("none")[0], tokens[:, :-1].cpu())[1]
edge, inside = cost.input_bytes, cost.inside_bytes


def alive(depth, s, edge, inside):
    return -(-depth // s) * edge + (s - 1) * edge + s * inside


print(f"our block: edge {format_bytes(edge)}, inside {format_bytes(inside)} or {inside / edge:.0f} edges")
more = alive(9, 3, edge, inside) - alive(9, 1, edge, inside)
measured = runs["segments of 3"].peak_bytes - runs["every block"].peak_bytes
print(f"segments of 3 against 1: {format_bytes(more)} more (predicted), {format_bytes(measured)} more (measured)")
for depth in (9, 36, 100, 400):
    best = [min(range(1, depth + 1), key=lambda s: alive(depth, s, *sizes)) for sizes in ((1, 0), (edge, inside))]
    print(f"{depth:>5} blocks: best segment {best[0]:>2} with nothing inside, {best[1]:>2} for our block")

# %% [markdown]
# **Read it.** Our block keeps far more inside than at its edge. At depths that people train, its best segment is one or
# two blocks.
#
# **Question.** Now 36 blocks that keep 8 tensors inside and 1 at the edge. Which segment size $s$ keeps
# the fewest: $36/s + (s-1) + 8s$?

# %%
segment_size = ...
check("05.best_segment", segment_size)

# %% [markdown]
# ## 3. Where it gives little back
#
# **Unequal blocks.** A U-Net's first and last blocks see many pixels, those in the middle few. So ask for the cheapest
# set under a budget: `best_blocks(costs, limit)` finds it exactly, from counted bytes and operations; in the lab you
# write it. The budget is two thirds of the activations. **Predict:** what a choice saves is the difference of
# `activation_peak`.

# %%
torch.manual_seed(0)
unet, images, noise_steps = UNet((16, 32, 64, 64)).to(device), torch.randn(8, 3, 32, 32, device=device), torch.arange(8, device=device)
costs = block_costs(unet, images, noise_steps)
print("inside of each block (MiB):", *[f"{cost.inside_bytes / 2**20:.1f}" for cost in costs])
best = best_blocks(costs, int(0.67 * activation_peak(costs, ())))
peaks = {}
for way, chosen in {"none": (), "every block": range(len(costs)), "best set": sorted(best)}.items():
    checkpoint_blocks(unet, only=chosen)
    peaks[way] = measure(lambda: F.mse_loss(unet(images, noise_steps), images).backward(), model=unet, timed_steps=0).peak_bytes
    saved = activation_peak(costs, ()) - activation_peak(costs, chosen)
    print(f"{way:<11} blocks {','.join(map(str, chosen)):<13} saved {format_bytes(saved):>9} (predicted)",
          f"{format_bytes(peaks['none'] - peaks[way]):>9} (measured), {recompute_flops(costs, chosen) / 1e9:.2f} billion operations repeated")

# %% [markdown]
# **Read it.** Three blocks bring most of what all seven bring, for less than half the operations.
#
# **Tiny layers.** The usual mistake: every layer. A checkpoint keeps its input, so it pays only if the layer would keep
# *more*. A linear layer keeps just its input, and a ReLU its result, which is the next layer's input anyway.

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
assert chains[1].peak_bytes > 1.4 * chains[0].peak_bytes, "tiny segments cost: was WRAPS changed?"
for run in chains:
    print(f"{run.name:<21} peak {format_bytes(run.peak_bytes)} (measured)")

# %% [markdown]
# **Read it.** Wrapping each layer *raises* the peak: both inputs of a pair stay, where one tensor was
# enough. Checkpoint what is large inside and small at the edge: a block, not a layer.
#
# **Question.** Eight pairs of linear layer and ReLU, each layer checkpointed by itself. How many inputs are kept?

# %%
kept_inputs = ...
check("05.tiny_layers", kept_inputs)

# %% [markdown]
# ### Break it, diagnose it
#
# A colleague checkpoints every block of a fine-tune and sees next to no saving. Only the last block and the head are
# trained. Why?

# %%
for way in ("none", "every block"):
    model, optimizer = build(way, device=device)
    for part in (model.embed, *model.blocks[:-1]):
        part.requires_grad_(False)
    step = partial(one_step, model, optimizer)
    peak = measure(step, model=model, optimizer=optimizer, timed_steps=0).peak_bytes
    print(f"eight of nine blocks frozen, {way:<11}: peak {format_bytes(peak)} (measured)")

# %% [markdown]
# **Diagnose it.** Autograd keeps activations only where a gradient will pass. Below the lowest trained parameter none
# does. (With adapters in *every* block, lesson 06, checkpointing pays again.)
#
# ## 4. What it can break
#
# **Batch norm.** Its forward has a side effect: it moves the running statistics that evaluation uses. Recomputation runs
# forward again, so they move twice a step. Three steps of a U-Net, by PyTorch's plain checkpoint and by ours, which
# holds the statistics still meanwhile.

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
without, twice, still = found.values()
assert without[0] == twice[0] == still[0], "training losses are equal: is the seed set in each run?"
assert twice[1] != without[1] == still[1], "only statistics updated twice change the evaluation"

# %% [markdown]
# **Read it.** The training loss is the same to the last digit, so no training curve shows it. The evaluation loss is
# not. The cure is a context around recomputation alone (`context_fn`): you write it in the lab. GroupNorm, LayerNorm
# and RMSNorm keep no running statistics.
#
# **What does not repeat.** Torch's random state is replayed; Python's and NumPy's are not. PyTorch compares the shapes of
# what is recomputed with those of forward, and no values. So ask before you train: `check_repeatable` runs a block twice.

# %%
class Jitter(nn.Module):
    """Scales by a random number that torch knows nothing of."""

    def forward(self, x):
        return x.sin() * (1 + random.random())


block = nn.Sequential(nn.Linear(8, 8), Jitter())
with recompute_explained():  # other shapes would raise, in words
    checkpoint(block, torch.randn(4, 8), use_reentrant=False).sum().backward()
print("backward raised nothing")
try:
    check_repeatable(block, torch.randn(4, 8))
except NotRepeatableError as error:
    print(str(error).partition(", with")[0])

# %% [markdown]
# ## 5. Logits are activations too
#
# With a large vocabulary the peak stands between forward and backward, where no checkpoint of a block lowers it. The cure is the same idea: logits for some tokens at a time, reduced to a sum of losses, forgotten, and computed
# again.

# %%
def whole_loss(hidden, head, targets):
    return F.cross_entropy(head(hidden), targets)


def chunked_loss(hidden, head, targets, chunks=8):
    def one_chunk(part, wanted):
        return F.cross_entropy(head(part), wanted, reduction="sum")

    pairs = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
    return sum(checkpoint(one_chunk, *pair, use_reentrant=False) for pair in pairs) / len(targets)


# %% [markdown]
# **Predict.** A tensor of logits takes $4 \cdot 512 \cdot 16{,}000$ bytes, 31 MiB. The plain loss holds two to three, the
# chunked one an eighth of that.

# %%
torch.manual_seed(0)
head = nn.Linear(64, 16_000, bias=False).to(device)
hidden = torch.randn(512, 64, device=device, requires_grad=True)
targets = torch.randint(0, 16_000, (512,), device=device)
loss_runs, found, gradients = {}, [], partial(torch.autograd.grad, inputs=[hidden, head.weight])
for loss_of in (whole_loss, chunked_loss):
    run = measure(lambda: gradients(loss_of(hidden, head, targets)), model=head, timed_steps=0)
    loss_runs[loss_of.__name__] = run.peak_bytes
    found.append(gradients(loss_of(hidden, head, targets)))
print({name: format_bytes(peak) for name, peak in loss_runs.items()}, "at the peak (measured)")
torch.testing.assert_close(*found)  # both gradients agree
assert loss_runs["chunked_loss"] < loss_runs["whole_loss"] / 2, "in chunks under half: use more chunks"

# %% [markdown]
# **Read it.** The gradients agree, and the peak falls to a fifth; the price is one more product with the head. Fused
# forms repeat none, such as [Liger Kernel's](https://github.com/linkedin/Liger-Kernel).
#
# ## 6. Scale up: 1.3 billion parameters on 40 GB
#
# The same `build` and a real size: GPT-3 XL's 24 layers and width of 2,048 (Brown and others 2020, Table 2.1),
# with 16 heads in place of its 24 and the blocks of our transformer, 4 sequences of 2,048 tokens, bf16
# autocast, AdamW. States take 16 bytes per parameter; 4 of them are gradients, which do not exist yet at the loss.

# %%
large = TransformerConfig(vocabulary=50_304, hidden=2048, layers=24, heads=16, feedforward=5504, tied=True)


def large_loss(model):
    batch = torch.randint(0, 50_304, (4, 2049))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def large_step(model, optimizer):
    optimizer.zero_grad()
    large_loss(model).backward()  # no variable holds the graph when the optimizer begins
    optimizer.step()


# %%
large_runs = []
for way in ("none", "every 2nd", "selective", "every block"):
    run = simulate(lambda: build(way, large, dropout=0), large_step, device="A100 40GB", name=way)
    large_runs.append(run)
    print(f"{way:<12} {format_bytes(run.peak_bytes):>10} in {run.peak_phase}; {run.notes[0]}")
room = simulated_device("A100 40GB").usable_bytes  # less its context
assert large_runs[0].peak_bytes > room, "without checkpoints it should not fit: is it smaller now?"
assert large_runs[-1].peak_bytes < room, "every block checkpointed, it fits: lower the batch"
compare(large_runs, title="1.3 billion parameters, 4 x 2,048 tokens")

# %% [markdown]
# **Read it.** Activations differ most. *Cast weights* are autocast's bf16 copies of the matrices (lesson 02). With
# checkpoints the peak lies in the loss (section 5). A simulation has no time, but its arithmetic can be counted:

# %%
def large_operations(way, trained=""):
    def model_of(layers):
        model = checkpoint_blocks(Transformer(replace(large, layers=layers)), **WAYS[way])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        return model

    return operations_of(model_of, large_loss, large.layers)


plain_operations = large_operations("none")
more = [100 * (large_operations(run.name) / plain_operations - 1) for run in large_runs]
frozen = 100 * (large_operations("every block", "embed") / large_operations("none", "embed") - 1)
print(f"every block: {more[-1]:.0f}% more operations; with all weights but the embedding frozen {frozen:.0f}% (counted)")

# %% jupyter={"source_hidden": true}
figure = draw_tradeoff(large_runs, more, limit_bytes=room, title="1.3 billion parameters on a card of 40 GB",
                       cost_label="more operations than without checkpointing (%, counted)")
show(figure, alt="Simulated peaks of a 1.3-billion-parameter step against extra operations, with the memory of "
     "an A100 with 40 GB as a line.")
recorded_table("gpt1b_recompute", where={"micro_batch": 4},
               columns=["checkpointed", "first_loss", "peak_bytes", "median_step_seconds"])

# %% [markdown]
# **Read it.** *Selective* fits and repeats no product. Frozen weights need no gradients, so their backward is one part,
# not two, and a forward again costs more of it. How well do counts tell seconds? Korthikanti and others (2022)
# published the times of one layer of a 22B model.

# %% tags=["nbval-check-output"] jupyter={"source_hidden": true}
from evidence.validation.tables import source, table

print(source("korthikanti_table4"))
rows = {row["experiment"]: row for row in table("korthikanti_table4")}
for name, row in rows.items():
    print(f"{name:<28} forward {row['forward_ms']:>4} ms   backward {row['backward_ms']:>4} ms",
          f"  {row['overhead_pct'] or 0:>3}% more (published)")

# %% [markdown]
# **Read it.** Recomputing all cost 39% of a layer's time, not 33%: a backward takes less than two forwards there.
# *Selective* means another way there: it drops only the attention scores and repeats their products, for 7%. Today's
# fused attention never keeps those scores. "Checkpointing costs 33%" is a rule of counting, for one way among many.
#
# | way | use when | costs | does not help |
# |---|---|---|---|
# | none | it fits | nothing | |
# | selective by operation | activations are a little too large | dispatch in Python, memory for products | small kernels |
# | every 2nd block, or a best set | a part is enough | its share of a forward | where the last block or the logits are the peak |
# | every block | it must fit | up to a forward | states, logits, optimizer temporaries |
# | chunked loss | the vocabulary is large | one product with the head | small vocabularies |
# | the compiler's budget (On Monday) | you compile anyway | compile time | code that breaks the graph |

# %% jupyter={"source_hidden": true}
for way in ("none", "every block"):
    score("05", f"nine blocks, {way}", peak_bytes=runs[way].peak_bytes, step_seconds=statistics.median(seconds[way]))
for run in large_runs:
    score("05", f"1.3B on an A100 40GB, {run.name}", peak_bytes=run.peak_bytes, evidence=run.evidence)
scoreboard("05")

# %% [markdown]
# ## Recap
#
# - A checkpoint keeps inputs and the random state, and runs forward again: the same bits, fewer bytes.
# - The peak is all kept inputs and the largest thing being recomputed.
# - Its price is counted in operations (at most a third, half with frozen weights) and paid in time (39% in one published layer).
# - Tiny layers, last blocks and frozen parts give nothing back; batch norm and foreign random numbers break.
#
# **Test yourself.** A step runs out of memory in the loss, with every block checkpointed. What do you change?
#
# <details><summary>Answer</summary>
#
# The logits are the peak: compute the loss in chunks, or use a smaller micro-batch. More checkpointing cannot
# help.
#
# </details>
#
# **Where next.** Do the [lab](../../labs/intermediate/05_checkpointing.ipynb), in a copy: `make my-labs`. Then compare with
# the [solution](../../solutions/intermediate/05_checkpointing.ipynb). Next: [notebook 05a](05a_trusting_simulation.ipynb).
#
# **References.** Chen and others, *Training Deep Nets with Sublinear Memory Cost*,
# [arXiv:1604.06174](https://arxiv.org/abs/1604.06174). Korthikanti and others, *Reducing Activation
# Recomputation in Large Transformer Models*, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198), Table 4.
# Brown and others, *Language Models are Few-Shot Learners*, [arXiv:2005.14165](https://arxiv.org/abs/2005.14165),
# Table 2.1. PyTorch: [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html), and
# [the choice of the compiler](https://pytorch.org/blog/activation-checkpointing-techniques/).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** `model.blocks` is your list of equal blocks (perhaps `model.layers`). Do it once, before
# `fully_shard(block)`, `DistributedDataParallel` or `torch.compile`:
#
# ```python
# from functools import partial
#
# from torch.utils.checkpoint import checkpoint
#
# for block in model.blocks:
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)
# ```
#
# **transformers.** On any of its models, before peft's wrap (`Trainer` does it with `activation_checkpointing=True`;
# accelerate's FSDP with `fsdp_activation_checkpointing: true`, instead and not as well). Earlier releases say
# `gradient_checkpointing` wherever this one says `activation_checkpointing`:
#
# ```python
# model.config.use_cache = False
# model.activation_checkpointing_enable({"use_reentrant": False})
# model.train()
# ```
#
# **You compile anyway?** Let the compiler choose operations, from 1.0, its default, to 0.0, as little kept as it can:
#
# ```python
# import torch
# import torch._functorch.config as functorch_config
#
# functorch_config.activation_memory_budget = 0.5
# model = torch.compile(model)
# ```
#
# **Look at** the first losses (unchanged) and `torch.cuda.max_memory_allocated()` (lower). If it
# is not, the peak is not in the blocks: see sections 3 and 5.
