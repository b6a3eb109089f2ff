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
# **Promise.** You make a training step forget its activations and compute them again, with the same
# losses and gradients to the last bit. You measure six ways to choose what is forgotten. A model of 1.3 billion
# parameters, simulated, fits a card of 40 GB that it overflowed.
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

# %%
import random
import statistics
import time
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from utils import Transformer, TransformerConfig, UNet, check, compare, draw_over_time
from utils import draw_timeline, format_bytes, measure, recorded_table, resnet, score
from utils import scoreboard, show, simulate
from utils.simulation.devices import simulated_device
from utils.techniques import EXPENSIVE, checkpoint_blocks, in_segments
from utils.lessons.lesson_05.block_choice import activation_peak, best_blocks, block_costs, recompute_flops
from utils.lessons.lesson_05.repeatable import NotRepeatableError, check_repeatable, recompute_explained
from utils.lessons.lesson_05.step_costs import step_cost
from utils.lessons.lesson_05.tradeoff import draw_tradeoff

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
# ## What you will be able to do
#
# - Write a checkpoint by hand, and say why the random state must be replayed.
# - Predict the peak and the arithmetic, and say where the folklore of "33%" comes from.
# - Recognize the cases in which checkpointing saves nothing, raises the peak, or breaks a model.
#
# Checkpointing pays for **memory** with **compute**. It shrinks [activations](../00_glossary.ipynb); states and
# gradients stay.
#
# ## 1. A checkpoint by hand
#
# Forward keeps nothing but the block's input. In backward the block runs again, this time with autograd watching.
# The flag `replay` says whether the random state of the first run is used again. (It is the
# CPU's; on a GPU you would save `torch.cuda.get_rng_state()` too.)

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
# A block with dropout, three times: plain, forgetful, and forgetful without the random state. The
# gradients of the first layer tell whether all is well.

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
# **Read it.** Without the replayed state, the second run drops other elements than the first. The loss is
# right, nothing is raised, and the gradients belong to another network. `torch.utils.checkpoint` replays
# the state unless you say `preserve_rng_state=False`, which is safe only where nothing is random.
#
# ### `use_reentrant`
#
# `Forgetful` is PyTorch's older way, `use_reentrant=True`: a backward inside of backward. It has a hole.
# Autograd calls a Function's backward only if one of its *inputs* needs a gradient, and a batch of data
# does not.

# %%
block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
batch = torch.randn(4, 8)  # data: needs no gradient
for name, out in {
    "by hand": Forgetful.apply(block, True, batch),
    "use_reentrant=False": checkpoint(block, batch, use_reentrant=False),
}.items():
    print(f"{name:<20} result needs a gradient: {out.requires_grad}")

# %% [markdown]
# **Read it.** By hand, the first block of a network would never be trained. The present way,
# `use_reentrant=False`, puts a placeholder in the place of each tensor that autograd would save; when backward
# opens one, the block runs again, until the last needed tensor is there. Always write
# `use_reentrant=False`. You build it yourself in the lab.
#
# ## 2. Which blocks?
#
# A transformer of nine blocks, with dropout in each. `checkpoint_blocks(model, ...)` wraps each chosen
# block's call in `torch.utils.checkpoint`. Six ways:
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
WAYS = {
    "none": {"every": 0},
    "every 2nd": {"every": 2},
    "every block": {"every": 1},
    "segments of 3": {"every": 1},
    "selective": {"keep": EXPENSIVE},
    "selective, every 2nd": {"every": 2, "keep": EXPENSIVE},
}
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
# *Selective* is a list of operations whose results are kept. `checkpoint_blocks(..., keep=EXPENSIVE)` gives
# it to PyTorch. In plain PyTorch it is a policy, asked at every operation:

# %%
def policy(context, operation, *args, **kwargs):
    asked.append(operation in EXPENSIVE)
    return CheckpointPolicy.MUST_SAVE if asked[-1] else CheckpointPolicy.PREFER_RECOMPUTE


asked, one_layer = [], Transformer(replace(small, layers=1))
contexts = partial(create_selective_checkpoint_contexts, policy)
checkpoint(one_layer, torch.zeros(1, 128, dtype=torch.long), use_reentrant=False, context_fn=contexts).sum().backward()
print(f"one layer, forward and backward: {len(asked)} operations passed the policy, {sum(asked)} of them products or attention")

# %% [markdown]
# **Predict.** A block costs one part forward and two backward. Running it again adds one part to three:
# 33% of the blocks' arithmetic for *every block*, five ninths of that for *every 2nd* (blocks 0, 2, 4, 6, 8).
# A selective step repeats no matrix product, so next to nothing. For memory: *every block* keeps nine inputs
# and the inside of one block, *segments of 3* three inputs and the inside of three.
#
# `FlopCounterMode` counts the operations of matrix products, attention included. For the time the six ways take turns.

# %%
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
    runs[way] = measure(steps[way], model=model, optimizer=optimizer, items=128 * sequences,
                        unit="tokens", name=way, timed_steps=0)
near = 0.0 if device.type == "cpu" else 1e-5  # a GPU may add up in another order at each run
for way in WAYS:
    torch.testing.assert_close(seen[way], seen["none"], rtol=near, atol=near)
print(f"losses of two steps and all gradients equal, tolerance {near}, dropout included: {', '.join(WAYS)}")
peaks = [runs[way].peak_bytes for way in ("every block", "every 2nd", "none")]
assert peaks == sorted(set(peaks)), "more checkpoints, lower peak: are the sequences long enough?"

# %%
def taking_turns(steps, rounds):
    """Seconds of each step, in rounds: what else the machine does meets all of them alike."""
    seconds = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


# %%
for way, seconds in taking_turns(steps, rounds=5).items():
    runs[way] = replace(runs[way], step_seconds=tuple(seconds))
compare(list(runs.values()), title="Six ways to choose what is recomputed")

# %%
def extra_percent(way):
    return 100 * (operations[way] / operations["none"] - 1)


for way, run in list(runs.items())[1:]:
    # Each round by itself: what slows the machine down slows both steps of a round.
    ratios = [100 * (a / b - 1) for a, b in zip(run.step_seconds, runs["none"].step_seconds, strict=True)]
    print(f"{way:<21} peak {format_bytes(run.peak_bytes):>10}   {extra_percent(way):+5.1f}% operations (counted)",
          f"  {statistics.median(ratios):+5.0f}% time ({min(ratios):+.0f} to {max(ratios):+.0f}, measured)")
print(f"your bet: {my_bet_percent}%, counted: {extra_percent('every block'):.1f}%")

# %%
figure = draw_tradeoff(list(runs.values()), [extra_percent(way) for way in WAYS], title="Peak against operations",
                       cost_label="more operations than without checkpointing (%, counted)")
show(figure, alt="Measured peaks against counted extra operations: none and both selective ways stand at zero, "
     "every block is lowest, segments of 3 cost most.")
show(draw_tradeoff(list(runs.values()), title="Peak against time, on this machine"),
     alt="Measured peak memory against the median step for six ways of checkpointing, each with the range of its "
     "steps: none is highest, every block lowest; many ranges overlap.")

# %% [markdown]
# **Read it.** In the first figure the dashed line leaves out a way if another needs no more memory and costs no more.
# The counter sees products only: 0.0% means that no product is repeated. *Every block* counts less than 33%: the head is
# not recomputed, recomputation stops before a block's last product, whose result nobody needs, and fused attention has
# five products in backward to two in forward. (The table's *activations* are those at the peak, less recomputed ones.)
#
# The second figure has medians and ranges of the rounds. Where ranges overlap, it ranks nothing. *Selective* has a price
# that no count of products shows, **dispatch**: each of the operations above, in forward and again in backward, goes
# through a Python function, which in so small a model may take longer than the operation. Large kernels hide it. (On
# A100s another form of selective recomputation took 7% more time: published, section 8.)
#
# ### The timeline
#
# Compare with the mountain of lesson 01.

# %%
figure = draw_timeline(runs["every block"])
show(figure, alt="Timeline of a step with every block checkpointed: a low base of block inputs in forward, then "
     "nine short spikes of recomputed activations in backward.")

# %% [markdown]
# **Read it.** Forward climbs only by the blocks' inputs. Backward shows one tooth for each block: its
# inside appears, is used, and goes, while gradients come. A block's gradients are larger here than its input, so the
# last tooth is the peak.
#
# **Question.** You checkpoint the *last* block alone, and no other. (*Every 2nd* chose it, too: block 8.) Does
# the peak in backward fall? Answer `"yes"` or `"no"`.

# %%
last_block_helps = ...
check("05.last_block", last_block_helps)

# %% [markdown]
# ### The rule of the square root
#
# Chen and others (2016) cut $n$ layers into segments of $s$. *Edge* is a layer's input, *inside* all else that it
# saves. Kept are $n/s$ edges; while a segment is recomputed, its other $s - 1$ edges and $s$ insides are alive. With nothing inside,
# $n/s + s - 1$ is smallest at $s = \sqrt{n}$. A transformer's block keeps far more inside, so its best segment is shorter.
# The costs of our block, counted:

# %%
plain_model, _ = build("none")
costs = block_costs(plain_model, tokens[:, :-1].cpu())
edge, inside = costs[1].input_bytes, costs[1].inside_bytes
gradients = sum(p.nbytes for p in plain_model.blocks[1].parameters())
print(f"a block's edge {format_bytes(edge)}, inside {format_bytes(inside)} or {inside / edge:.0f} edges,",
      f"gradients {format_bytes(gradients)}")
alive = {s: -(-9 // s) * edge + (s - 1) * edge + s * inside for s in (1, 2, 3, 5, 9)}
for s, size in alive.items():
    print(f"segments of {s}: {format_bytes(size):>10} alive at the peak (predicted)")
found = runs["segments of 3"].peak_bytes - runs["every block"].peak_bytes
print(f"3 against 1: {format_bytes(alive[3] - alive[1])} more (predicted), {format_bytes(found)} more (measured)")


def best_segment(depth, edge, inside):
    return min(range(1, depth + 1), key=lambda s: -(-depth // s) * edge + (s - 1) * edge + s * inside)


for depth in (9, 36, 100, 400, 1600):
    print(f"{depth:>5} blocks, root {depth**0.5:2.0f}: best segment {best_segment(depth, 1, 0):>2} with nothing inside,",
          f"{best_segment(depth, 1, 1):>2} with an edge's worth, {best_segment(depth, edge, inside):>2} for our block")

# %% [markdown]
# **Read it.** *Alive* is what stands at the first tooth: all edges that were kept, those within the segment, and its
# insides. At the last, gradients have replaced edges, here in nearly as many bytes. The rule holds for layers with nothing inside. Our block keeps 22 edges inside, 23 in all: its best segment is
# near $\sqrt{n/23}$, one or two blocks at depths that people train.
#
# **Question.** Now 36 blocks that keep 8 tensors inside and 1 at the edge. Which segment size $s$ keeps
# the fewest: $36/s + (s-1) + 8s$?

# %%
segment_size = ...
check("05.best_segment", segment_size)

# %% [markdown]
# ## 3. Blocks that are not alike: a CNN and a U-Net
#
# In a classifier of images the first blocks see many pixels, the last ones few. The memory lies at one end, the
# parameters at the other. A U-Net goes up to many pixels again. Its *skips* keep the result of each level until then;
# checkpointing cannot free those.

# %%
torch.manual_seed(0)
images, noise_steps = torch.randn(8, 3, 32, 32, device=device), torch.arange(8, device=device)
labels = torch.randint(0, 10, (8,), device=device)
networks = {"ResNet-18": resnet(18).to(device), "U-Net": UNet((16, 32, 64, 64)).to(device)}
inputs = {"ResNet-18": (images,), "U-Net": (images, noise_steps)}
costs = {name: block_costs(network, *inputs[name]) for name, network in networks.items()}
for name in networks:
    parameters = sum(p.nbytes for p in networks[name].parameters())
    print(f"{name:<10} inside of each block (MiB):", *[f"{cost.inside_bytes / 2**20:.1f}" for cost in costs[name]],
          f"  parameters: {format_bytes(parameters)}")

# %% [markdown]
# So ask for the cheapest set under a budget. `best_blocks(costs, limit)` finds it exactly, from counted
# bytes and operations; in the lab you write it. The budget here is two thirds of the activations. **Predict:**
# what each choice saves is the difference of `activation_peak`.

# %%
def image_step(name, chosen):
    network = checkpoint_blocks(networks[name], only=chosen)
    network.zero_grad()
    result = network(*inputs[name])
    loss = F.mse_loss(result, images) if name == "U-Net" else F.cross_entropy(result, labels)
    loss.backward()


def choices_of(name):
    blocks = range(len(costs[name]))
    best = best_blocks(costs[name], int(0.67 * activation_peak(costs[name], ())))
    return {"none": (), "every 2nd": blocks[::2], "every block": blocks, "best set": sorted(best)}


# %%
for name, network in networks.items():
    image_steps = {way: partial(image_step, name, chosen) for way, chosen in choices_of(name).items()}
    found = [measure(step, model=network, name=way, timed_steps=0) for way, step in image_steps.items()]
    for run, chosen in zip(found, choices_of(name).values(), strict=True):
        saved = activation_peak(costs[name], ()) - activation_peak(costs[name], chosen)
        print(f"{name:<9} {run.name:<11} blocks {','.join(map(str, chosen)):<15} saved {format_bytes(saved):>9}",
              f"(predicted) {format_bytes(found[0].peak_bytes - run.peak_bytes):>9} (measured),",
              f"{recompute_flops(costs[name], chosen) / 1e9:5.2f} billion operations repeated")
    repeated = [recompute_flops(costs[name], chosen) / 1e9 for chosen in choices_of(name).values()]
    show(draw_tradeoff(found, repeated, title=f"{name}: peak against operations",
                       cost_label="operations repeated (billions, counted)"),
         alt=f"Measured peak of {name} against the operations repeated: no checkpoint, every 2nd block, every block, "
         "and the best set under a budget.")

# %% [markdown]
# **Read it.** In the U-Net a few blocks bring most of what all of them bring, and the prediction holds. In ResNet-18 it
# does not, because it counts activations alone: nearly all gradients exist when backward reaches the large activations
# of the first blocks. "Checkpoint everything" is for equal blocks; here it pays for some that
# give little back.
#
# ## 4. Layers that are too small
#
# The usual mistake: every layer. A checkpoint keeps its input, and it pays only if the layer would
# keep *more*. A linear layer keeps just its input. A ReLU keeps its result, which is the next
# layer's input anyway. Checkpoint each of them by itself:

# %%
WRAPS = {
    "no checkpoint": lambda chain: checkpoint_blocks(chain, every=0),
    "each tiny layer": lambda chain: checkpoint_blocks(chain),
    "segments of 4 layers": lambda chain: checkpoint_blocks(in_segments(chain, 4)),
}


def chain_run(name):
    layers = [layer for _ in range(10) for layer in (nn.Linear(128, 128), nn.ReLU())]
    chain = WRAPS[name](nn.Sequential(*layers))
    chain = nn.Sequential(*chain).to(device)
    x = torch.randn(8192, 128, device=device)
    return measure(lambda: chain(x).sum().backward(), model=chain, name=name, timed_steps=0)


chains = [chain_run(name) for name in WRAPS]
assert chains[1].peak_bytes > 1.4 * chains[0].peak_bytes, "tiny segments cost: was WRAPS changed?"
compare(chains, title="Twenty tiny layers")

# %% [markdown]
# **Read it.** Wrapping each layer *raises* the peak: now both inputs of a pair stay, where one tensor was
# enough. Segments of four do save. Checkpoint what is large inside and small at the edge: a block, not a layer.
#
# **Question.** Eight pairs of linear layer and ReLU, each of the layers checkpointed by itself. How many
# inputs are kept for backward?

# %%
kept_inputs = ...
check("05.tiny_layers", kept_inputs)

# %% [markdown]
# ## 5. The trap of batch norm
#
# BatchNorm's forward has a side effect: it moves its running statistics, which evaluation uses.
# Recomputation runs forward again, so they move twice a step. Three steps of the U-Net with batch norm,
# by PyTorch's plain checkpoint and by ours, which holds the statistics still while it recomputes.

# %%
def trained(**how):
    torch.manual_seed(0)
    model = UNet((16, 32, 32), norm="batch", dropout=0.1)
    checkpoint_blocks(model, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        x, when = torch.randn(8, 3, 16, 16), torch.randint(0, 1000, (8,))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, when), x)
        loss.backward()
        optimizer.step()
    model.eval()
    x, when = torch.randn(8, 3, 16, 16), torch.randint(0, 1000, (8,))  # a batch of its own
    with torch.no_grad():
        held_out = F.mse_loss(model(x, when), x)
    updates = int(model.middle.norm1.num_batches_tracked)
    return loss.item(), held_out.item(), updates


# %%
found = {
    "no checkpoint": trained(every=0),
    "plain checkpoint": trained(freeze_statistics=False),
    "statistics held still": trained(),
}
for name, (loss, held_out, updates) in found.items():
    print(f"{name:<22} training loss {loss:.6f}   evaluation loss {held_out:.6f}   updates {updates}")
without, twice, still = found.values()
assert without[0] == twice[0] == still[0], "training losses are equal: is the seed set in each run?"
assert twice[1] != without[1] == still[1], "only statistics updated twice change the evaluation"

# %% [markdown]
# **Read it.** The training loss is the same to the last digit, so no training curve shows it. The evaluation
# loss is not. The cure is a context around recomputation alone (`context_fn`), in which the norms update
# copies of their statistics; the lab lets you write it.
#
# <div class="alert alert-warning"><b>Trap.</b> This was
# <a href="https://github.com/pytorch/pytorch/issues/96136">asked of PyTorch in 2023</a>.
# GroupNorm, LayerNorm and RMSNorm keep no running statistics.</div>
#
# ## 6. What does not repeat
#
# Torch's random state is replayed; Python's and NumPy's are not, and neither is a counter. PyTorch compares shapes,
# dtypes and devices of what is saved, no values.

# %%
class Jitter(nn.Module):
    """Scales by a random number that torch knows nothing of."""

    def forward(self, x):
        return x.sin() * (1 + random.random())


class Alternates(nn.Module):
    """Takes another branch, with other shapes, at every second call."""

    def forward(self, x):
        self.forwards = getattr(self, "forwards", 0) + 1
        return x.sin() if self.forwards % 2 else x.chunk(2, dim=-1)[0].sin().repeat(1, 2)


# %%
def gradient_of(part):
    random.seed(0)
    torch.manual_seed(0)
    block = checkpoint_blocks([nn.Sequential(nn.Linear(8, 8), part)])[0]
    loss = block(torch.randn(4, 8)).square().sum()
    with recompute_explained():
        loss.backward()
    return block[0].weight.grad


try:
    gradient_of(Alternates())
except NotRepeatableError as error:
    print(error)

# %% [markdown]
# With other *values* PyTorch finds nothing: the next cell raises no error in backward. So ask before you train.
# `check_repeatable` runs a block twice with the same random state, and names the first part that differs.

# %%
print("backward raised nothing; the gradient is", gradient_of(Jitter())[0, :3])
for part in (nn.Dropout(0.5), Jitter()):
    block = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.GELU(), part))
    try:
        check_repeatable(block, torch.randn(4, 8))
        print(f"{type(part).__name__}: repeatable")
    except NotRepeatableError as error:
        print(f"{type(part).__name__}: {error}")

# %% [markdown]
# ## 7. Logits are activations too
#
# With a large vocabulary the peak stands between forward and backward, and no checkpoint of a block
# lowers it. The cure is the same idea: compute the logits for some tokens, reduce them to a sum of losses,
# forget them, and compute them again in backward. By hand, with a checkpoint for each chunk:

# %%
def whole_loss(hidden, head, targets):
    return F.cross_entropy(head(hidden), targets)


def chunked_loss(hidden, head, targets, chunks=8):
    def one_chunk(part, wanted):
        return F.cross_entropy(head(part), wanted, reduction="sum")

    pairs = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
    return sum(checkpoint(one_chunk, *pair, use_reentrant=False) for pair in pairs) / len(targets)


# %% [markdown]
# **Predict.** One tensor of logits takes $4 \cdot 512 \cdot 16{,}000$ bytes, 31 MiB. The plain loss holds
# two to three of them at once, the chunked one an eighth of that.

# %%
torch.manual_seed(0)
head = nn.Linear(64, 16_000, bias=False).to(device)
hidden = torch.randn(512, 64, device=device, requires_grad=True)
targets = torch.randint(0, 16_000, (512,), device=device)


def loss_step(loss_of):
    head.zero_grad()
    hidden.grad = None
    loss = loss_of(hidden, head, targets)
    loss.backward()
    return loss.item()


# %%
loss_runs, found = [], []
for loss_of in (whole_loss, chunked_loss):
    loss_runs.append(measure(partial(loss_step, loss_of), model=head, name=loss_of.__name__, timed_steps=2))
    found.append((loss_step(loss_of), hidden.grad, head.weight.grad.clone()))
(whole, *gradients), (chunked, *others) = found
gaps = [f"{(a - b).abs().max().item():.1e}" for a, b in zip(gradients, others, strict=True)]
print(f"loss {whole:.6f} and {chunked:.6f}; largest difference of gradients: hidden {gaps[0]}, head {gaps[1]}")
torch.testing.assert_close(gradients, others)
assert loss_runs[1].peak_bytes < loss_runs[0].peak_bytes / 2, "in chunks under half: use more chunks"
compare(loss_runs, title="A loss over a vocabulary of 16,000")

# %% [markdown]
# **Read it.** Loss and both gradients agree, and the peak falls to a fifth; the price is one more product with the
# head, and here more time. Fused forms repeat none, such as [Liger Kernel's](https://github.com/linkedin/Liger-Kernel).
#
# ## 8. Scale up: 1.3 billion parameters on 40 GB
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


with torch.device("meta"):
    count = sum(p.numel() for p in Transformer(large).parameters())
print(f"{count:,} parameters; 16 bytes each: {format_bytes(16 * count)}, 12: {format_bytes(12 * count)} (predicted)")


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
# **Read it.** Activations differ most. *Cast weights* are autocast's bf16 copies of the matrices (lesson 02). What the
# logits take differs, too, because the bars show two moments. With checkpoints the peak lies in the loss: the logits
# and their log-softmax in bf16, and the latter's fp32 copy, which CUDA's autocast makes. Without checkpoints it lies
# where backward begins: the logits are gone, and a gradient stands beside the copy.
#
# A simulation has no time. Its arithmetic can be counted, though not in the same run: a counter keeps tensors
# alive that checkpointing drops. Operations are a line in depth, so two and four layers say it all.

# %%
def operations_at(way, layers, trained):
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model = checkpoint_blocks(Transformer(replace(large, layers=layers)), **WAYS[way])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        large_loss(model).backward()
    return counter.get_total_flops()


def large_operations(way, trained=""):
    two, four = operations_at(way, 2, trained), operations_at(way, 4, trained)
    return two + (large.layers - 2) // 2 * (four - two)


plain_operations = large_operations("none")
more = [100 * (large_operations(run.name) / plain_operations - 1) for run in large_runs]
frozen = 100 * (large_operations("every block", "embed") / large_operations("none", "embed") - 1)
print(f"every block: {more[-1]:.0f}% more operations; with all weights but the embedding frozen {frozen:.0f}% (counted)")
figure = draw_tradeoff(large_runs, more, limit_bytes=room, title="1.3 billion parameters on a card of 40 GB",
                       cost_label="more operations than without checkpointing (%, counted)")
show(figure, alt="Simulated peaks of a 1.3-billion-parameter step against extra operations, with the memory of "
     "an A100 with 40 GB as a line.")
recorded_table("gpt1b_recompute", where={"micro_batch": 4},
               columns=["checkpointed", "first_loss", "peak_bytes", "median_step_seconds"])

# %% [markdown]
# **Read it.** *Selective* fits and repeats no product. Frozen weights need no gradients, so
# their backward is one part, not two, and a forward again costs more of it. These are counts.
# How well do they tell seconds? Korthikanti and others (2022) published the times of one layer of a 22B model.

# %% tags=["nbval-check-output"]
from evidence.validation.tables import source, table

print(source("korthikanti_table4"))
rows = {row["experiment"]: row for row in table("korthikanti_table4")}
for name, row in rows.items():
    print(f"{name:<28} forward {row['forward_ms']:>4} ms   backward {row['backward_ms']:>4} ms",
          f"  {row['overhead_pct'] or 0:>3}% more (published)")
base = rows["baseline no recompute"]
forward_share = float(base["forward_ms"]) / float(base["combined_ms"])
print(f"forward is {100 * forward_share:.0f}% of a layer's time there, not 33%")

# %% [markdown]
# **Read it.** Recomputing all cost 39% of a layer's time, not 33%: a backward takes less than two forwards there. *Selective* means another way there: it drops only the attention scores and repeats
# their products, for 7%. Today's fused attention never keeps those scores.
#
# Real A100s with 40 GB trained 1.3B, too. llm-foundry published these runs; there each GPU holds an eighth of
# the states (lesson 09), and their model keeps fewer activations: more sequences fit than in our figure.

# %% tags=["nbval-check-output"]
print(source("llm_foundry").split(",")[0])
for row in table("llm_foundry"):
    if (row["model"], row["gpu"], row["n_gpus"]) == ("1b", "a100_40gb", "8"):
        ratio = float(row["hfu_pct"]) / float(row["mfu_pct"])
        print(f"{row['seq_len']:>6} tokens x {row['micro_batch_size']:>2} a GPU   checkpointing: "
              f"{row['activation_checkpointing']:<5}   MFU {row['mfu_pct']:>5}%   HFU {row['hfu_pct']:>5}%   "
              f"HFU/MFU {ratio:.3f} (published)")

# %% [markdown]
# **Read it.** HFU charges a whole forward more where blocks are recomputed, MFU does not: their ratio is 1.333, four
# parts to three. That is the source of "checkpointing costs 33%": a rule of
# counting, for one way among many.
#
# ## When to use which
#
# | way | use when | costs | does not help |
# |---|---|---|---|
# | none | it fits | nothing | |
# | selective by operation | activations are a little too large | dispatch in Python (section 2), memory for products | small kernels; if the products are what fills the card |
# | every 2nd block, or a best set | a part is enough | its share of a forward | where the last block or the logits are the peak |
# | every block | it must fit | up to a forward | states, logits, optimizer temporaries |
# | chunked loss | the vocabulary is large | one product with the head | small vocabularies |
# | the compiler's budget (last section) | you compile anyway | compile time | code that breaks the graph |

# %%
for way in ("none", "every block"):
    run = runs[way]
    score("05", f"nine blocks, {way}", peak_bytes=run.peak_bytes, step_seconds=run.median_step_seconds)
for run in large_runs:
    score("05", f"1.3B on an A100 40GB, {run.name}", peak_bytes=run.peak_bytes, evidence=run.evidence)
scoreboard("05")

# %% [markdown]
# ## Break it, diagnose it
#
# A colleague checkpoints every block of a fine-tune and sees no saving. Only the last block and
# the head are trained, the rest is frozen. Look at the two peaks. Why does checkpointing bring nothing?

# %%
def frozen_run(way):
    model, _ = build(way, device=device)
    model.embed.requires_grad_(False)
    for block in model.blocks[:-1]:
        block.requires_grad_(False)

    def frozen_step():
        model.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()

    return measure(frozen_step, model=model, name=way, timed_steps=0)


frozen = [frozen_run(way) for way in ("none", "every block")]
compare(frozen, title="Eight of nine blocks frozen")

# %% [markdown]
# **Diagnose it.** Autograd keeps activations only where a gradient will pass. Below the lowest trained
# parameter none does, so eight blocks keep nothing, checkpointed or not, and the ninth is the last. (With adapters in
# *every* block, lesson 06, checkpointing pays again.)
#
# ## Optional: let the compiler choose
#
# `torch.compile` decides for each *operation* what is kept. `activation_memory_budget` is its dial: 1.0 keeps what its
# default would, 0.0 as little as it can. Beside it, the best sets of whole blocks. The backend here only partitions the
# graph, so it needs no C++ compiler.

# %%
import torch._functorch.config as functorch_config

three_layers = replace(small, layers=3)
attention_flops = 4 * sequences * 128**2 * width


def squared(model):
    return model(tokens[:, :-1]).square().mean()


def cost_of(model, loss_of, name):
    return step_cost(model, partial(loss_of, model), attention_flops=attention_flops, name=name)


compiled = {}
for share in (1.0, 0.5, 0.0):
    torch.compiler.reset()
    model, loss_of = Transformer(three_layers).to(device), torch.compile(squared, backend="aot_eager_decomp_partition")
    with functorch_config.patch(activation_memory_budget=share):
        compiled[share] = cost_of(model, loss_of, f"compiler {share}")
by_budget = [compiled[share].kept_bytes for share in (0.0, 0.5, 1.0)]
assert by_budget == sorted(set(by_budget)), "a smaller budget keeps less: was the model changed?"

# %%
model = Transformer(three_layers).to(device)
three_costs = block_costs(model, tokens[:, :-1])
by_blocks = []
for share in (1.0, 0.75, 0.5):  # less cannot be reached by whole blocks
    chosen = sorted(best_blocks(three_costs, int(share * activation_peak(three_costs, ()))))
    checkpoint_blocks(model, only=chosen)
    by_blocks.append(cost_of(model, squared, f"blocks {chosen}"))
rows = [*compiled.values(), *by_blocks]
more = [100 * (row.product_flops / by_blocks[0].product_flops - 1) for row in rows]
figure = draw_tradeoff([row.run for row in rows], more, title="Three blocks: the compiler's choice and whole blocks",
                       cost_label="more operations than without checkpointing (%, counted)")
show(figure, alt="Measured peak against counted operations: the compiler's middle budget saves much for little, whole "
     "blocks reach lower peaks at more operations.")

# %% [markdown]
# **Read it.** The compiler is finer: at 1.0 it lowers the peak and repeats no product. But its dial governs what
# *stays* until backward, not the peak: with 0.0 backward recomputes the whole model at once. Whole blocks come back one
# at a time: lower ([PyTorch](https://pytorch.org/blog/activation-checkpointing-techniques/)).
#
# ## Recap
#
# - A checkpoint keeps inputs and the random state, and runs forward again: the same bits, fewer bytes.
# - The peak is all kept inputs and the largest thing being recomputed.
# - Its price is counted in operations (at most a third, half with frozen weights) and paid in time (39% in one published layer).
# - Tiny layers, last blocks and frozen parts give nothing back.
# - Batch norm breaks, and so do random numbers from outside torch (Python, NumPy).
#
# ### Test yourself
#
# A step runs out of memory in the loss, with every block checkpointed. What do you change?
#
# <details><summary>Answer</summary>
#
# The logits are the peak: compute the loss in chunks, or use a smaller micro-batch. More checkpointing cannot
# help.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/intermediate/05_checkpointing.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/intermediate/05_checkpointing.ipynb). Next: [notebook 05a](05a_trusting_simulation.ipynb).
#
# **References.** Chen and others, *Training Deep Nets with Sublinear Memory Cost*,
# [arXiv:1604.06174](https://arxiv.org/abs/1604.06174). Korthikanti and others, *Reducing Activation
# Recomputation in Large Transformer Models*, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198), Table 4.
# Brown and others, *Language Models are Few-Shot Learners*, [arXiv:2005.14165](https://arxiv.org/abs/2005.14165),
# Table 2.1. PyTorch,
# [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html).
