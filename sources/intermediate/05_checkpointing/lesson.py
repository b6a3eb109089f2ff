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
# **The answer.** Find the moment that decides the peak. If it is where backward begins, checkpoint the first blocks, as
# many as the overflow asks for: each runs again in backward. Compare the time with fewer sequences a step.
# (At 1.3B: simulated.)
#
# **Promise.** You write a checkpoint by hand, measure five ways to choose, and fit 1.3 billion parameters on a simulated
# 40 GB card.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 60 for the lab | any laptop; a GPU if you have one; beyond Binder's 1 GB | about two minutes on two CPU cores |
#
# ## A bet
#
# Every block runs again in backward. By how many percent do a step's operations grow (matrix products
# and attention)? Replace the 0.

# %%
my_bet_percent = 0

# %% tags=["setup"]
here = setup("intermediate/05")

# %% jupyter={"source_hidden": true}
import random
from dataclasses import replace
from functools import cache, partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from evidence.record import recorded
from utils import Transformer, TransformerConfig, UNet, check, format_bytes, measure, show, simulate
from utils.simulation.devices import simulated_device
from utils.techniques import EXPENSIVE, checkpoint_blocks, in_segments
from utils.catalog import device as card
from utils.lessons.lesson_05.arms import draw_arms
from utils.lessons.lesson_05.block_choice import block_costs, fewest_blocks
from utils.lessons.lesson_05.compiled import compiled
from utils.lessons.lesson_05.depth import operations_of
from utils.lessons.lesson_05.moments import deciding, draw_moments, moments
from utils.lessons.lesson_05.speeds import draw_speeds
from utils.lessons.lesson_05.tradeoff import draw_tradeoff

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# Nine blocks with dropout take a step of AdamW: as they are, and all checkpointed. `checkpoint_blocks` does what these
# lines do, and holds batch norm's statistics still (section 4):
#
# ```python
# for block in model.blocks:
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)
# ```
#
# When is each step highest?

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
show(figure, alt="Bytes alive through a step, twice; each moment has its height in MiB. All kept: a hill, whose top is where backward begins. Every block "
     "checkpointed: a low slope in forward, then nine teeth in backward that stand on growing gradients.")

# %% [markdown]
# **Read it.** On the left every activation waits for backward. On the right forward keeps of the blocks only their
# inputs. In backward one block at a time runs again, and its activations come back: a **tooth**. A block's input is its **edge**,
# and all else that it saves for backward its **inside**. Four moments may be the peak:
#
# | moment | alive beside parameters and optimizer state, every block checkpointed |
# |---|---|
# | loss peak: the loss, and where its backward begins | all edges, the logits |
# | first tooth | all edges, one inside, the head's gradient |
# | last tooth | one edge, one inside, the gradients of all later layers |
# | optimizer step | all gradients; on a GPU, unless `fused=True`, temporaries as large as all parameters |
#
# On the right the last tooth decides: from tooth to tooth an edge goes, and a block's larger gradients come.
# **A choice lowers the peak only if it lowers the moment that decides.**
#
# ## 1. A checkpoint by hand
#
# In backward the block runs again, and autograd watches. With `replay` it starts from the first run's random state.

# %%
class Forgetful(torch.autograd.Function):
    """Keeps a block's input, and runs the block again in backward."""

    @staticmethod
    def forward(ctx, block, replay, x):
        ctx.block = block
        ctx.state = torch.get_rng_state() if replay else None
        ctx.save_for_backward(x)
        return block(x)  # inside of a Function's forward autograd records nothing

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
# A block with dropout, plain and forgetful:

# %%
def loss_and_gradients(call):
    torch.manual_seed(0)
    first = nn.Linear(32, 32)
    block = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 32))
    loss = call(block, first(torch.randn(64, 32))).square().mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in (*first.parameters(), *block.parameters())])


plain_loss, plain = loss_and_gradients(lambda block, x: block(x))
for replay in (True, False):
    loss, found = loss_and_gradients(lambda block, x: Forgetful.apply(block, replay, x))
    print(f"replay {replay!s:<5}  same loss: {loss == plain_loss}  same gradients: {torch.equal(found, plain)}")

# %% [markdown]
# **Read it.** Without replay the second run drops other elements: nothing is raised, and the gradients are wrong.
# `torch.utils.checkpoint` replays the random states of CPU and GPU, and autocast's state.
#
# `Forgetful` works like PyTorch's older `use_reentrant=True`. Autograd calls a Function's backward only if one of its
# *inputs* needs a gradient, and data need none.

# %%
block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
batch = torch.randn(4, 8)  # data: needs no gradient
by_hand, by_torch = Forgetful.apply(block, True, batch), checkpoint(block, batch, use_reentrant=False)
print("needs a gradient:", by_hand.requires_grad, "by hand,", by_torch.requires_grad, "with use_reentrant=False")

# %% [markdown]
# **Read it.** By hand a block fed with data would never be trained. Always write `use_reentrant=False`. It puts
# placeholders where autograd would save tensors. When backward opens one, the block runs again.
#
# ## 2. Which blocks?
#
# | way | keeps |
# |---|---|
# | none | everything |
# | every 2nd | all of four blocks; inputs of five |
# | every block | inputs |
# | segments of 3 | one input in three; three blocks run again together |
# | selective (`EXPENSIVE`) | inputs, and the results of matrix products and attention |

# %%
WAYS = {"none": {"every": 0}, "every 2nd": {"every": 2}, "every block": {"every": 1}, "segments of 3": {"segment": 3},
        "selective": {"keep": EXPENSIVE}}

# %% [markdown]
# **Predict.** A matrix product costs one part in forward and two in backward. Running it again adds one part to three: 33%
# for *every block* and *segments of 3*, five ninths of that for *every 2nd*, nothing for *selective*. `FlopCounterMode`
# counts products and attention, whose backward takes 2.5 parts.

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
    print(f"{way:<13} peak {format_bytes(run.peak_bytes)}: {heights(run, 2**20)} (measured)  {extra_percent[way]:+5.1f}% products and attention (counted)")
model, optimizer = build(**WAYS["every block"])
with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as counter:
    one_step(model, optimizer)
to_the_end = 100 * (counter.get_total_flops() / operations["none"] - 1)
print(f"your bet: {my_bet_percent}%, counted: {extra_percent['every block']:.1f}%, or {to_the_end:.1f}% if each second run went to its block's end")

# %% jupyter={"source_hidden": true}
figure = draw_tradeoff([replace(run, name=f"{way}: {deciding(run)}") for way, run in runs.items()], list(extra_percent.values()), cost_label="more operations of matrix products and attention (%, counted)",
                       title="Nine blocks: peak, the moment that decides it, and operations (time: section 6)")
show(figure, alt="Measured peaks against counted extra operations, each with the moment that decides: none and selective stand at zero, every block is lowest, segments of 3 cost most.")

# %% [markdown]
# **Read it.** *Every block* counts less than 33%, mostly because PyTorch stops a second run once all that was saved
# is back, before the block's last product. *Segments of 3* save one last product in three blocks, so cost more.
#
# **Question.** You checkpoint only the *last* of nine blocks. Does the peak fall by its whole inside (`"yes"`), or by less
# (`"no"`)?

# %%
last_block_helps = ...
check("05.last_block", last_block_helps)

# %% [markdown]
# <details><summary>Answer</summary>
#
# No. Its inside returns first, while all others are alive. Only logits and their gradients are gone by then: less than an
# inside.
#
# </details>
#
# ### The rule of the square root
#
# [Chen and others (2016)](https://arxiv.org/abs/1604.06174) cut $n$ layers into segments of $s$:
#
# | loss peak | first tooth | last tooth |
# |---|---|---|
# | $n/s$ edges | $n/s + (s - 1)$ edges, $s$ insides | $s$ edges, $s$ insides, gradients of $n - s$ blocks |

# %%
model = build(every=0)[0]
cost = block_costs(model, tokens[:, :-1])[1]
edge, inside, gradient = cost.input_bytes, cost.inside_bytes, sum(p.nbytes for p in model.blocks[1].parameters())


def alive(depth, s, edge, inside, gradient):
    kept = -(-depth // s) * edge  # rounded up
    return kept, kept + (s - 1) * edge + s * inside, s * edge + s * inside + (depth - s) * gradient


one, three = moments(runs["every block"]), moments(runs["segments of 3"])
for moment, low, high in zip(one, *(alive(9, s, edge, inside, gradient) for s in (1, 3)), strict=False):
    print(f"{moment}, segments of 3 against 1: {(high - low) / 2**20:+.2f} MiB (predicted),",
          f"{(three[moment] - one[moment]) / 2**20:+.2f} MiB (measured)")

# %% [markdown]
# **Question.** Now 36 blocks with 8 tensors inside and 1 at the edge. Which $s$ keeps the fewest at the first tooth:
# $36/s + (s-1) + 8s$?

# %%
segment_size = ...
check("05.best_segment", segment_size)

# %%
for depth, ratio in ((36, 0), (36, 1), (36, inside // edge), (24, 13), (96, 13)):
    tensors = [alive(depth, s, 1, ratio, 0)[1] for s in range(1, depth + 1)]
    print(f"{depth} layers, inside {ratio:>2} times the edge: fewest at the first tooth with segments of {1 + tensors.index(min(tensors))},",
          f"square root of n / (1 + r): {(depth / (1 + ratio)) ** 0.5:.1f} (predicted)")

# %% [markdown]
# **Read it.** If an inside is as large as $r$ edges, the first tooth is lowest with $s$ near $\sqrt{n/(1+r)}$: here
# $\sqrt{36/9} = 2$. Only with nothing inside is it $\sqrt{n}$.
#
# **A compiler** chooses by operation. Its budget says how much is kept: from 1.0, the default, to 0.0. Three blocks:

# %%
shallow = replace(small, layers=3)
peaks = {name: measured(name, config=shallow, every=every).peak_bytes for name, every in (("none", 0), ("every block", 1))}
for name, budget in (("one graph", 0.5), ("one graph", 0.0), ("a graph a block", 0.0)):
    model, optimizer = build(shallow, every=0)
    with compiled(model, budget, by_block=name == "a graph a block") as body:
        one_step(body, optimizer)  # compiles
        run = measure(partial(one_step, body, optimizer), model=body, optimizer=optimizer, name=name, timed_steps=0)
    peaks[f"{name}, budget {budget}"] = run.peak_bytes
print(", ".join(f"{name}: {format_bytes(peak)}" for name, peak in peaks.items()), "(measured)")

# %% [markdown]
# **Read it.** One graph is one segment. With budget 0.0 it keeps only inputs, then all insides come back: nearly the peak
# of *none*. A graph a block comes near *every block*.
#
# ## 3. Where it costs memory
#
# A checkpoint keeps its input, so it pays only if the layer would keep *more*. A linear layer keeps just its input. A ReLU
# keeps its result: the next layer's input.

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
# **Read it.** Wrapping each layer *raises* the peak: the inputs of a linear layer and of its ReLU stay, where one was
# enough. Checkpoint what is large inside and small at the edge: a block.
#
# ## 4. What it can break
#
# Batch norm's forward moves the running statistics that evaluation uses. Recomputation moves them again. A U-Net takes
# three steps without a checkpoint, by PyTorch's (`freeze_statistics=False`), and by ours, which holds them still.

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
# **Read it.** Training losses are equal, but a batch that should count by 0.1 in the running mean counts
# by 1 - 0.9² = 0.19, and evaluation uses that.
#
# ### Break it, diagnose it
#
# Torch's random state is replayed. Python's and NumPy's are not. PyTorch raises a `CheckpointError` if the second run saves
# other shapes or dtypes, or fewer tensors. It stops early, so it never sees more tensors, and it compares no values.
# Compare gradients before you train: of two plain runs, then of a checkpointed one.

# %%
class OwnDropout(nn.Module):  # drops columns by random numbers that torch knows nothing of
    def forward(self, x):
        return x * torch.tensor([random.random() > 0.5 for _ in range(x.shape[-1])])


def weight_gradient(call, seeds=(torch.manual_seed, random.seed)):
    for seed in seeds:
        seed(0)
    block = nn.Sequential(nn.Linear(8, 8), OwnDropout())
    call(block, torch.randn(4, 8)).square().sum().backward()
    return block[0].weight.grad


# %%
plain = weight_gradient(lambda block, x: block(x))
for name, found in (("plain again", weight_gradient(lambda block, x: block(x))),
                    ("checkpointed", weight_gradient(partial(checkpoint, use_reentrant=False))),
                    ("plain again, only torch seeded", weight_gradient(lambda block, x: block(x), seeds=[torch.manual_seed]))):
    print(f"{name:<31} the same gradient as the plain run: {torch.equal(found, plain)}")

# %% [markdown]
# **Diagnose it.** Nothing is raised; the gradient is wrong. The comparison shows it only if *all* generators are
# seeded: else plain runs differ.
#
# ## 5. Logits are activations too
#
# Logits stand at the loss peak, outside of every block. The cure is the same: logits of some tokens at a time, forgotten,
# computed again.

# %%
def whole_loss(hidden, head, targets):
    return F.cross_entropy(head(hidden), targets)


def chunked_loss(hidden, head, targets, chunks=8):
    def one_chunk(part, wanted):
        return F.cross_entropy(head(part), wanted, reduction="sum")

    pairs = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)  # every token counts; labels of -100: lab, exercise 4
    return sum(checkpoint(one_chunk, *pair, use_reentrant=False) for pair in pairs) / len(targets)


# %% [markdown]
# **Predict.** Logits take $4 \cdot 512 \cdot 16{,}000$ bytes, 31.25 MiB. The plain loss holds three such tensors (the
# log-softmax, its gradient, the logits' gradient) and the head's weight: 97.7 MiB. In eight chunks it holds an eighth of
# the three, the weight and its gradient: 19.5 MiB.

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
# **Read it.** By hand the peak falls to a fifth, for one more product with the head. PyTorch's form computes gradients in
# forward, chunk by chunk. It holds the weight, its gradient and one chunk of logits, 3.9 MiB each.
#
# ## 6. Scale up: 1.3 billion parameters on 40 GB
#
# GPT-3 XL's 24 layers and width of 2,048 ([Brown and others 2020](https://arxiv.org/abs/2005.14165), Table 2.1), 16 heads,
# our blocks, 4 sequences of 2,048 tokens, bf16 autocast, AdamW. `simulate` runs a step on tensors without data, by CUDA's
# rules for autocast, attention and allocator, also where the code says "cpu". See which color shrinks.

# %%
large = TransformerConfig(vocabulary=50_304, hidden=2048, layers=24, heads=16, feedforward=5504, tied=True)


def large_loss(model, sequences=4, cache_enabled=True):
    batch = torch.randint(0, 50_304, (sequences, 2049))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def large_loss_in_chunks(model):
    model.head = nn.Identity()  # its weight is the embedding's, and is used below
    batch = torch.randint(0, 50_304, (4, 2049))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(batch[:, :-1]).flatten(0, 1)
        return chunked_loss(hidden, lambda part: F.linear(part, model.embed.weight), batch[:, 1:].flatten())


# %%
@cache
def simulated(loss_of, times, **choice):
    def step(model, optimizer):
        optimizer.zero_grad()
        for _ in range(times):  # more than once: gradients are accumulated
            loss_of(model).backward()  # no variable holds the graph when the optimizer begins
        optimizer.step()

    return simulate(lambda: build(large, "cpu", dropout=0, **choice), step, device="A100 40GB")


# %%
loss_at = {n: partial(large_loss, sequences=n) for n in (2, 4, 8)}
arms = {"none": (loss_at[4], WAYS["none"]), "none, loss in chunks": (large_loss_in_chunks, WAYS["none"]),
        "the first 7 blocks": (loss_at[4], {"only": range(7)}), "the last 7 blocks": (loss_at[4], {"only": range(17, 24)}),
        "selective": (loss_at[4], WAYS["selective"]), "every block": (loss_at[4], WAYS["every block"]),
        "every block, casts not cached": (partial(large_loss, cache_enabled=False), WAYS["every block"]),
        "every block, default AdamW": (loss_at[4], {"fused": None})}
large_runs = [replace(simulated(loss_of, 1, **choice), name=name) for name, (loss_of, choice) in arms.items()]
by_name = {run.name: run for run in large_runs}
for run in large_runs:
    print(f"{run.name:<29} {heights(run, 2**30)} (GiB, simulated)")

# %% jupyter={"source_hidden": true}
room_bytes = simulated_device("A100 40GB").usable_bytes  # less its context
MARGIN = 1.08  # a GPU reserved up to 7% more than was simulated: shown below
figure = draw_arms(large_runs, room_bytes, margin=MARGIN, title="1.3B, 4 x 2,048 tokens, bf16, AdamW: simulated peaks (and the moment that decides)")
show(figure, alt="Peaks of eight ways, stacked by category, each in an outline of what the allocator reserves, beside a line at what "
     "the card leaves. The plain step crosses it; its loss in chunks, and the last seven blocks, come close.")

# %% [markdown]
# **Read it.** *Fits* asks that what the allocator *reserves* leaves 8% to spare. In five runs below a GPU reserved up to 7.3%
# more than simulated. The 8% was set on them. The plain step overflows at its loss peak:
#
# - **Logits.** In chunks the peak is 3.1 GiB lower.
# - **Activations.** Of 18.7 GiB, seven blocks take 5.0, *selective* 8.6, *every block* most. First and last seven tie: *yes*
#   and *open* are closer than the simulator's error. **Choose the first:** their insides come back last, so their teeth
#   are lower.
# - **Cast weights:** autocast's bf16 copies stay until its `with` ends, a plain block's until its backward. With
#   `cache_enabled=False` a checkpointed block drops its copies at once, and the last tooth decides. With the default
#   AdamW the optimizer step decides.
#
# The price:

# %%
def large_operations(way="none", loss_of=large_loss):
    return operations_of(lambda depth: checkpoint_blocks(Transformer(replace(large, layers=depth)), **WAYS[way]), loss_of, large.layers)


plain = large_operations()
more = {"every block": large_operations("every block") / plain, "loss in chunks": large_operations(loss_of=large_loss_in_chunks) / plain}
print(f"a token: {plain / (4 * 2048) / 1e9:.2f} billion operations;", ", ".join(f"{name} {100 * (ratio - 1):.0f}% more" for name, ratio in more.items()), "(counted)")

# %% [markdown]
# **How many blocks, then?** The limit is the room divided by 1.08. What the plain step reserves above it is the overflow.
# Divide that by what one block gives back (here in the run with seven), and round up to $k$. While the first $k$ do
# not fit, take one more (`fewest_blocks`).

# %%
freed_bytes = (by_name["none"].peak_bytes - by_name["the first 7 blocks"].peak_bytes) / 7
print(f"a block gives back {freed_bytes / 2**30:.2f} GiB at 4 sequences (simulated), {freed_bytes / (4 * 2048 * large.hidden * 4):.0f} times its edge, in fp32")


def reserved_by(blocks, loss_of, times):
    return simulated(loss_of, times, **({"only": range(blocks)} if blocks else WAYS["none"])).reserved_bytes


# %%
CASES = {"2 sequences": (2, 1, MARGIN), "4 sequences": (4, 1, MARGIN), "4, margin of 4%": (4, 1, 1.04), "4, margin of 16%": (4, 1, 1.16),
         "8 sequences": (8, 1, MARGIN), "4, two times": (4, 2, MARGIN), "2, two times": (2, 2, MARGIN)}
for case, (n, times, margin) in CASES.items():
    reserved_of = partial(reserved_by, loss_of=loss_at[n], times=times)
    blocks = fewest_blocks(reserved_of, room_bytes / margin, freed_bytes * n / 4, large.layers)
    percent = 100 * (more["every block"] - 1) * blocks / large.layers
    print(f"{case:<16} plain step reserves {reserved_of(0) / 2**30:.1f} GiB; checkpoint the first {blocks:>2} blocks:",
          f"{reserved_of(blocks) / 2**30:.1f} GiB (simulated), {percent:.0f}% more operations (from the count)")

# %% [markdown]
# **Read it.** The margin decides: seven blocks become five or eleven. 4 sequences, two times, need 14: the first pass's
# gradients stand in the second. **Or accumulate:** 2 sequences, two times, are 4 sequences' tokens without a checkpoint.
#
# A GPU ran other ways, never the first $k$. In its picture, look left of the line:

# %%
record = recorded("gpt1b_recompute")[0]
ran = {(row["checkpointed"], row["micro_batch"]): row for row in record.rows}
print(f"{record.evidence}: {record.device}, {record.date}, PyTorch {record.provenance['torch']}")
for way, n in (("none", 4), ("selective", 4), ("every block", 4), ("none", 8), ("every 2nd", 8)):
    row, run = ran[way, n], simulated(loss_at[n], 1, **WAYS[way])
    print(f"{way:<12} {n} sequences: tensors {row['requested_peak_bytes'] / 2**30:.2f} GiB (simulated {run.peak_bytes / 2**30:.2f}),",
          f"reserved {row['reserved_peak_bytes'] / 2**30:.2f} (simulated {run.reserved_bytes / 2**30:.2f})")
    assert abs(run.peak_bytes / row["requested_peak_bytes"] - 1) < 0.005, f"{way}: simulated and recorded differ by more than 0.5%"

# %%
for n in (1, 2, 4, 8):
    base = ran["none", n]["median_step_seconds"]
    times = {way: [seconds / base for seconds in ran[way, n]["step_seconds"]] for way in ("every 2nd", "selective", "every block")}
    print(f"{n} sequence{'s' * (n > 1)}, times the step of none:",
          ", ".join(f"{way} {median(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f})" for way, ratio in times.items()), "(recorded)")

# %% jupyter={"source_hidden": true}
figure = draw_speeds(record.rows, token_flops=plain / (4 * 2048), peak_flops=card("H200").bf16_tflops * 1e12, device=f"{record.device}, {record.date}",
                     title=f"Recorded: 1.3B, 2,048 tokens a sequence, bf16, eager PyTorch {record.provenance['torch'].partition('+')[0]}", room_bytes=room_bytes)
show(figure, alt="Tokens a second over the memory that a step reserved, for four ways and 1, 2, 4 and 8 sequences, with a line at what a 40 GB "
     "card leaves. Filled points, than which no other is faster for up to 1% more memory: every block of 2 and 4, none of 2, 4 and 8, every 2nd of 4.")

# %% [markdown]
# **Read it.** Tensors came out as simulated, within 0.5%. From 4 sequences on, half of the blocks (*every 2nd*) take about
# half of the extra time of *every block*. At 1 sequence a second run costs far more than its operations.
#
# *Selective* repeats no product, yet at 1 and 2 sequences it costs more time than *every block* (eager PyTorch 2.11), at 8
# about half as much.
#
# **Compare at a similar peak.** Left of the line is what a 40 GB card could hold, at an H200's speed. There *none* with 2
# sequences is faster than *selective* with 4 and *every block* with 8, and about as fast as *every 2nd* with 4. (MFU counts
# attention unmasked.)

# %% [markdown]
# ## Recap
#
# **The answer.** Find the moment that decides the peak. If it is where backward begins, checkpoint the first blocks, as
# many as the overflow asks for: at 1.3B seven of 24 (4 sequences, 40 GB, simulated), for 7% more operations. Compare the
# time with fewer sequences a step.
#
# | the peak | lower it by | price at 1.3B |
# |---|---|---|
# | optimizer step | on a GPU `fused=True`; smaller states | |
# | loss peak: logits | the loss in chunks | 2% more operations by hand |
# | loss peak: activations | fewer sequences, accumulated | gradients stay, smaller products |
# | | the first $k$ blocks | 1% more operations a block |
# | | selective | 2.8 to 1.1 times the time, from 1 to 8 sequences (recorded: H200, eager 2.11) |
# | first tooth | every block | 25% more operations |
# | | segments nearer $\sqrt{n/(1+r)}$ | |
# | last tooth | shorter segments, smaller states | |
#
# **Test yourself.** The last tooth overflows. Does a loss in chunks help?
#
# <details><summary>Answer</summary>
#
# No: logits are gone.
#
# </details>
#
# **Where next.** The [lab](../../labs/intermediate/05_checkpointing.ipynb) (in a copy: `make my-labs`), its
# [solution](../../solutions/intermediate/05_checkpointing.ipynb), [notebook 05a](05a_trusting_simulation.ipynb).
#
# **References.** PyTorch: [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html),
# [techniques](https://pytorch.org/blog/activation-checkpointing-techniques/). Megatron-LM's *selective*:
# [Korthikanti and others 2022](https://arxiv.org/abs/2205.05198).

# %% [markdown]
# ## On Monday
#
# **Which moment decides?** On a GPU, in a second step:
#
# ```python
# import torch
#
# # model.blocks: your list of equal blocks; loss_of(model, batch): your loss; the first step made the optimizer's state
#
#
# def read(name):
#     print(f"{name:<14} {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
#     torch.cuda.reset_peak_memory_stats()
#
#
# hooks = [model.blocks[-1].register_full_backward_pre_hook(lambda *_: read("loss peak"))]
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
# **Blocks.** Once, before `DistributedDataParallel`, `torch.compile` or `fully_shard`, with a `batch` so short that the
# plain step fits. **Look at** gradients and buffers, equal up to noise:
#
# ```python
# import math
# import random
# from functools import partial
#
# import numpy
# import torch
# from torch.utils.checkpoint import checkpoint
#
#
# def one_step():
#     model.load_state_dict(start)  # batch norm's statistics move in forward
#     model.zero_grad()
#     for seed in (random.seed, numpy.random.seed, torch.manual_seed):
#         seed(0)
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
# norm = {name: tensor.float().norm().item() for name, tensor in plain.items()}
# gradients = [name for name, _ in model.named_parameters() if name in plain]
# share = math.hypot(*(noise[name] for name in gradients)) / math.hypot(*(norm[name] for name in gradients))
# print(f"two plain steps differ by {share:.1e} of the gradients' norm")
# assert share < 0.01, "two plain steps differ: seed what else draws random numbers, then compare again"
# for block in model.blocks:  # [:k] for the first k; leave out blocks with batch norm: its statistics would move twice
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)
# off = apart(one_step(), plain)
# wrong = [name for name in off if not off[name] <= 3 * noise[name] + 1e-6 * norm[name]]  # NaN is wrong, too
# assert not wrong, f"another step than before in {wrong}"
# model.load_state_dict(start)
# model.zero_grad()
# ```
#
# **Selective**, in place of that loop:
#
# ```python
# from functools import partial
#
# import torch
# from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
#
# aten = torch.ops.aten  # what is not listed runs again: flex and flash-attn kernels, fp8, collectives
# EXPENSIVE = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention.default,
#              aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default]
# contexts = partial(create_selective_checkpoint_contexts, EXPENSIVE)
# for block in model.blocks:
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
# ```
#
# **The loss peak decides?** PyTorch 2.13 or later
# ([conditions](https://docs.pytorch.org/docs/2.14/generated/torch.nn.LinearCrossEntropyOptions.html)):
#
# ```python
# import torch.nn.functional as F
# from torch import nn
#
# # hidden: what the head would get, (tokens, width). Labels of -100 do not count. A head's bias: linear_bias=head.bias.
# # It pays only if tokens >= width and vocabulary > width. With label smoothing it warns, and makes all logits at once.
# # Under torch.compile it runs in eager mode. This page ran it in fp32 on a CPU alone: under autocast, first compare the
# # loss, the gradients and the peak with those of F.cross_entropy(head(hidden), labels).
# loss = F.linear_cross_entropy(hidden, head.weight, labels, options=nn.LinearCrossEntropyOptions())
# ```
#
# **transformers 5.23**, before peft's wrap; or `Trainer` with `activation_checkpointing=True` (earlier
# `gradient_checkpointing=True`), or accelerate's FSDP with `fsdp_activation_checkpointing: true`:
#
# ```python
# model.config.use_cache = False
# # every_n_layers=2: every 2nd. Earlier: gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
# model.activation_checkpointing_enable({"use_reentrant": False})
# model.train()
# ```
#
# **You compile?** In place of that loop:
#
# ```python
# import torch
# import torch._functorch.config as functorch_config
#
# # Of what is kept, not of the peak: from 1.0, the default, to 0.0. Measure, also a graph a block: block.compile() for each.
# functorch_config.activation_memory_budget = 0.5
# model = torch.compile(model)
# ```
#
# **Megatron-LM** ([NVIDIA](https://docs.nvidia.com/nemo/megatron-bridge/latest/training/activation-recomputation.html)),
# the first k layers of each pipeline stage:
#
# ```text
# --recompute-granularity full --recompute-method block --recompute-num-layers k
#
# # selective: recomputes --recompute-modules, by default core_attn, which flash attention recomputes anyway;
# # measure layernorm mlp, too
# --recompute-granularity selective --recompute-modules layernorm mlp
# ```
