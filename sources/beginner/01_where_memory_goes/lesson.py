# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 Where does the memory go?
#
# {{badges}}
#
# **Promise.** At the end of this notebook you account for one training step of ResNet-50 on
# this machine: 100% of the bytes of its tensors, in named categories, at every moment of the step.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 45, and 60 for the lab | any laptop; a GPU if you have one; beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# ResNet-50 is an image network with some 23.5 million parameters; section 3 counts them. You train
# it with Adam on a small batch of images of CIFAR-10's size, 32 x 32 pixels. Memory rises and falls
# during a step. Its highest moment is the **peak**. Which share of the memory,
# at the peak, is the *parameters*? Write your guess, in percent, in place of the 50.

# %%
my_bet_percent = 50

# %% tags=["setup"]
here = setup("beginner/01")

# %%
import subprocess
from dataclasses import replace

import pandas as pd
import psutil
import torch
import torch.nn.functional as F

from utils import Evidence, check, compare, draw_memory_by_batch, draw_timeline, explore
from utils import device as card_of
from utils import format_bytes, measure, model_shape, predicted, reconcile
from utils import recorded_table, score, scoreboard, show, simulate
from utils.models import Transformer, TransformerConfig, resnet
from utils.simulation.devices import simulated_device

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# ## 1. One step in one picture
#
# A plain training step. Random images will do: only their shapes matter for memory. `measure` runs the step
# for real: once to warm up, once with every allocation recorded, and a few times for the clock. (A ResNet's
# first layers are its *stem*; CIFAR's keeps a 32 x 32 image at full size.)

# %%
batch = {"tiny": 6, "small": 64, "full": 256}[here.scale]


def make_step(model, optimizer, batch_size):
    images = torch.randn(batch_size, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (batch_size,), device=device)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


# %%
model = resnet(50, stem="cifar").to(device)
optimizer = torch.optim.Adam(model.parameters())
first = measure(make_step(model, optimizer, batch), model=model, optimizer=optimizer, items=batch,
                unit="images", name=f"ResNet-50, batch {batch}")
show(draw_timeline(first), alt="Stacked memory over one training step: activations rise through forward, "
     "gradients replace them during backward, and the peak lies between the two.")

# %% [markdown]
# **Read it.** Time runs from left to right. The height is the memory of all tensors; the colours say
# what they are for, the background names the phase. Parameters and Adam's state are there the whole time.
# Forward builds *activations* up. Backward walks from the last layer to the first: it frees activations
# and makes *gradients*. The optimizer step changes the weights. (The thin spike at the left edge is the
# gradients of the step before: `zero_grad` frees them.) The triangle marks the peak; this is who is
# alive at that moment:

# %%
found = first.breakdown
print(first)
print(f"\nparameters are {100 * found['parameters'] / found.total_bytes:.0f}% of the peak; your bet was {my_bet_percent}%")
for counter, size_bytes in first.allocator_bytes.items():
    print(f"another counter, {counter}: {format_bytes(size_bytes)}")

# %% [markdown]
# **Read it.** *Buffers* are tensors of the model that are not trained. *Temporaries* are what one operation
# borrows. The categories add up to all tensors. The last line counts more: the
# process's libraries, too. (*Logits*: section 6.)
#
# ## What you will be able to do
#
# - Name the categories of memory of a training step, and predict the main ones by formula.
# - Measure all of them, and explain the difference between formula and measurement.
# - Say what grows with the batch and what does not.
# - Read the timeline of a step, and say why its peak is where it is.
#
# Every technique of this course trades between **memory**, **compute** and **communication**. This lesson
# is about the first alone: you cannot save what you cannot see. New words stand in the
# [glossary](../00_glossary.ipynb).

# %% [markdown]
# ## 2. What "the memory of a device" is
#
# A GPU has small memories beside its arithmetic, registers and caches, which the hardware and the
# *kernels* (the programs that run on the GPU) manage. One large memory, the **HBM** (high-bandwidth
# memory), holds your tensors. "Out of memory" always means the large one. The A100 with "40 GB" on its box:

# %% tags=["nbval-check-output"]
KIB, MIB = 2**10, 2**20
a100 = card_of("A100 40GB")
memories = {  # NVIDIA A100 Tensor Core GPU whitepaper (2020): 108 multiprocessors
    "registers": 108 * 256 * KIB,
    "L1 cache and shared memory": 108 * 192 * KIB,
    "L2 cache": 40 * MIB,
    "HBM, as CUDA reports it": a100.memory_bytes,
}
for name, size_bytes in memories.items():
    print(f"{name:<28}{format_bytes(size_bytes):>12}   {Evidence.PUBLISHED}")
print(f"that HBM in GB: {a100.memory_bytes / 1e9:.1f}")

# %% [markdown]
# **Read it.** Registers and caches together are less than one percent of the HBM. The name of a card is
# no byte count: this "40 GB" is 42.4 GB (10^9 bytes) or 39.49 GiB (2^30 bytes). The course takes
# each card's bytes from one table, `utils/catalog`, with their source.
#
# A tensor lives in HBM from the moment it is allocated to the moment its last reference is gone. So
# "where does the memory go?" is a question about *allocations and their lifetimes*. Three counters
# answer it, each in its own way:
#
# | who counts | what it counts |
# |---|---|
# | `torch.cuda.memory_allocated()` | bytes of tensors that are alive |
# | `torch.cuda.memory_reserved()` | what PyTorch took from the driver, in large segments, and keeps for reuse |
# | `nvidia-smi` | reserved, plus the CUDA context (what the driver and the code of the kernels take), plus other processes |
#
# On a CPU, PyTorch keeps no such reserve: the meter counts tensors, the system counts the process.

# %%
if torch.cuda.is_available():
    print(torch.cuda.memory_summary(abbreviated=True))
    print(subprocess.getoutput("nvidia-smi"))
else:
    print("No CUDA device here, so torch.cuda.memory_summary() has nothing to say.")
    print("This Python process holds", format_bytes(psutil.Process().memory_info().rss), "now, with")
    print("the model, its states, the interpreter and its libraries, PyTorch's above all.")

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> <code>nvidia-smi</code> shows a high number and the
# step seems to fill the card. Often much of it is only <i>reserved</i>, and free for the next tensor. Judge
# a technique by the peak of allocated bytes (<code>torch.cuda.max_memory_allocated()</code>). PyTorch's
# <a href="https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management">notes on CUDA
# memory management</a> describe both.</div>

# %% [markdown]
# ## 3. The states: a formula without surprises
#
# Some tensors are there when a step ends. For $P$ parameters in fp32 (4 bytes each):
#
# $$\underbrace{4P}_{\text{parameters}} + \underbrace{4P}_{\text{gradients}} +
# \underbrace{4P + 4P}_{\text{Adam: running means}} = 16P \ \text{bytes}$$
#
# Adam keeps two running means for each parameter: of its gradient, and of the gradient's square.
# All of these together are the **model states**. Nothing in the formula knows the batch.

# %% tags=["nbval-check-output"]
P = sum(parameter.numel() for parameter in model.parameters())


def adam_states(parameter_count: int) -> dict[str, int]:
    weights = 4 * parameter_count
    return {"parameters": weights, "gradients": weights, "optimizer state": 2 * weights}


print(f"P = {P:,} parameters, so the states take {format_bytes(16 * P)}")

# %% [markdown]
# The formula speaks of what stays, so compare it with what is alive when the step is over.

# %%
after = first.timeline.at(first.timeline.end_ns)
tensors = len(list(model.parameters()))
assert after["parameters"] == after["gradients"] == 4 * P, "4 P each: is every parameter fp32?"
assert after["optimizer state"] == 8 * P + 4 * tensors, "8 P, with Adam: is that the optimizer?"
print(f"optimizer state - 8 P = {after['optimizer state'] - 8 * P} bytes for {tensors} tensors")
reconcile(adam_states(P), first, at_ns=first.timeline.end_ns)

# %% [markdown]
# **Read it.** Parameters and gradients are equal to the formula, to the byte. Adam holds a little
# more: a step counter of 4 bytes for each parameter tensor. Not predicted are the buffers (the
# running statistics of batch norm) and the inputs; both are too small to be seen in the bars.
#
# ### Which optimizer, which states
#
# SGD keeps nothing, SGD with momentum one number per parameter, Adam two. The bars show
# ResNet-18's peaks with each, at batch 2, where states fill most of the picture.

# %%
def with_optimizer(name, build):
    model = resnet(18, stem="cifar").to(device)
    optimizer = build(model.parameters())
    return measure(make_step(model, optimizer, 2), model=model, optimizer=optimizer,
                   items=2, unit="images", name=name, timed_steps=0)


three = [
    with_optimizer("SGD", lambda p: torch.optim.SGD(p, lr=0.1)),
    with_optimizer("SGD, momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    with_optimizer("Adam", torch.optim.Adam),
]
compare(three, title="ResNet-18, three optimizers, batch 2")

# %% [markdown]
# **Read it.** The optimizer state is nothing, one copy of the parameters, or two. With SGD the peak
# lies in backward, so a few gradients are still missing from the bar. With Adam the peak has moved
# to the optimizer step: the activations are gone, and Adam's arithmetic borrows memory, the grey
# temporaries.
#
# **Question.** How many bytes per parameter do the states of SGD *with momentum* take, in fp32:
# weights, gradients and optimizer state together? Put a number in place of the dots.

# %%
momentum_bytes_per_parameter = ...
check("01.momentum_bytes", momentum_bytes_per_parameter)

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> "It ran with SGD, so it runs with Adam." Adam
# creates its state inside the <i>first</i> <code>optimizer.step()</code>, after forward and
# backward have succeeded. A script can pass its first backward and fail one line later, or fail
# only in the second step. <a href="https://github.com/pytorch/pytorch/issues/9439">A user of a
# VGG model</a> met this: batch 8 ran with SGD; with Adam it ran out of memory after one step.</div>
#
# ### A folklore formula
#
# You may read that training takes "18 x parameters x bytes per parameter". That counts
# bytes twice: 18 already is bytes. 16 is the sum above. 18 is one count of *mixed precision*, with a 16-bit copy of
# the weights: 2 + 4 + 4 + 8 bytes ([who keeps which copy](../advanced/15_design_studio.ipynb#2.-On-paper)).
# For Llama-2-7B:

# %% tags=["nbval-check-output"]
llama = model_shape("llama-2-7b")
count = llama.parameter_count
assert count == llama.published_count, "the shape no longer gives the published count"
print(f"P = {count:,}   ({llama.source})")
rows = {"fp32 with Adam, 16 bytes": 16 * count, "mixed precision, fp32 gradients, 18 bytes": 18 * count,
        "the folklore, 18 x 4 bytes": 72 * count}
for name, total_bytes in rows.items():
    print(f"{name:<44}{total_bytes / 1e9:8.1f} GB   {Evidence.PREDICTED}")

# %% [markdown]
# ## 4. Activations: what grows with the batch
#
# Backward needs the inputs or the outputs of most operations again. Autograd therefore keeps them
# from forward until backward has used them: the **activations**. You can watch it do so.
# `saved_tensors_hooks` calls your function with every tensor that autograd keeps, so a ledger of a
# dozen lines is a meter already. It counts each *storage* once: the block of bytes behind a tensor,
# which several tensors can share. Parameters do not count: they exist anyway.

# %%
def saved_for_backward(model, inputs):
    """Bytes that autograd keeps from a forward, each storage once, without the model's own."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    ledger = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            ledger[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # kept, so its address is not used again; itself, it would hold the graph: a leak

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(inputs)
    assert output.requires_grad, "nothing is saved without gradients: call it outside of no_grad"
    return sum(ledger.values())


# %% [markdown]
# Compare your ledger with the meter at the moment when backward begins: all activations are alive then.

# %%
def when(measurement, phase):
    return next(span.start_ns for span in measurement.timeline.spans if span.name == phase)


images = torch.randn(batch, 3, 32, 32, device=device)
mine = saved_for_backward(model, images)
metered = first.timeline.at(when(first, "backward"))
print("your ledger                ", format_bytes(mine))
print("the meter: activations     ", format_bytes(metered["activations"]))
print("the meter: inputs          ", format_bytes(metered["inputs"]))
ratio = mine / (metered["activations"] + metered["inputs"])
print(f"ledger / (activations + inputs) = {ratio:.4f}")
assert abs(ratio - 1) < 0.01, "over 1% apart: did model or batch change since the measurement?"

# %% [markdown]
# **Read it.** Two meters that share no code agree to within one percent. Your ledger asks autograd
# what it keeps. The meter asks the allocator, the part of PyTorch that hands out memory, what it
# gave in forward and has not got back. The inputs count because the first layer keeps the images.
#
# ### One batch after the other
#
# Predict before you run: double the batch, and which categories double? Four batch sizes are measured;
# the smallest and the largest give the activations per image.

# %%
def at_batch(batch_size):
    return measure(make_step(model, optimizer, batch_size), model=model, optimizer=optimizer,
                   items=batch_size, unit="images", name=f"batch {batch_size}", timed_steps=0)


sizes = [batch // 6, batch // 3, 2 * batch // 3, batch]
sweep = [*(at_batch(size) for size in sizes[:-1]), replace(first, name=f"batch {batch}")]


def activation_bytes(measurement):
    return measurement.timeline.at(when(measurement, "backward"))["activations"]


small, large = sweep[0], sweep[-1]
per_image = (activation_bytes(large) - activation_bytes(small)) / (large.items - small.items)
print(f"activations per image: {per_image / 1e6:.2f} MB")

# %%
figure = draw_memory_by_batch(sweep, predicted_bytes={size: 16 * P + per_image * size for size in sizes})
show(figure, alt="Memory at the peak against batch size: parameters and optimizer state are flat, "
     "activations grow, gradients shrink, and the dashed prediction runs a little above the total.")

# %% [markdown]
# **Read it.** Each batch size is shown at its own peak. Parameters and optimizer state are flat.
# Activations grow, and gradients may shrink: a larger batch has its peak at an earlier moment, when fewer
# gradients exist. (At one image it lies in the optimizer step.) The dashed line,
# 16 P plus activations per image times batch, adds *all* gradients to *all* activations. The step never
# holds both at once, so the line lies above.
#
# **Question.** A step at batch $b$ peaks at 6 GiB, of which 2 GiB are states. About how much does
# it need at batch $2b$, in GiB?

# %%
doubled_batch_gib = ...
check("01.doubled_batch", doubled_batch_gib)

# %% [markdown]
# ## 5. Why the peak is where it is
#
# A peak is one moment. To lower it you must know which moment, and who is alive *then*. Go back to the
# timeline of section 1, and compare its peak with the sum of what each category holds at its own highest.

# %%
maxima = {str(category): int(curve.max()) for category, curve in first.timeline.series().items()}
print(f"peak {format_bytes(first.peak_bytes)} in {first.peak_phase}")
print(f"sum of the categories' own maxima {format_bytes(sum(maxima.values()))},",
      f"{100 * sum(maxima.values()) / first.peak_bytes - 100:.0f}% more than the peak")
share = {"at the peak": {name: found[name] / 2**20 for name in maxima}, "at its own highest": {n: b / 2**20 for n, b in maxima.items()}}
pd.DataFrame(share).round(1).rename_axis("MiB")

# %% [markdown]
# **Read it.** A ResNet's last layers have the most weights and the smallest activations. So backward
# begins by making large gradients and freeing little, and the total still rises. The peak holds *part*
# of the gradients and *most* of the activations. The step never needs the sum of the categories' maxima.
#
# **Question.** You halve the activations of this step, and nothing else. Does the peak fall by half of its
# activations, or by less? Think of where the peak can move. Answer `"half"` or `"less"`.

# %%
peak_moves = ...
check("01.peak_moves", peak_moves)

# %% [markdown]
# ## 6. A transformer: the last layer can be the largest
#
# A language model reads text in pieces, the tokens. It ends in one score for each token of its
# vocabulary, at each position: the **logits**. For a batch of $B$ texts of $T$ tokens and a
# vocabulary of $V$ that is, in fp32,
#
# $$4 \cdot B \cdot T \cdot V \ \text{bytes}$$
#
# and loss and backward make more tensors of the same shape. Predict: in a small transformer with the
# vocabulary of Llama 2, how many such tensors are alive at the peak, and what share of it are they?

# %%
optimizer = None  # Adam's state of ResNet-50: make room first
model.zero_grad()
B, T, V = 2, 128, 32_000
language_model = Transformer(TransformerConfig(
    vocabulary=V, hidden=128, layers=4, heads=4, feedforward=352)).to(device)
language_optimizer = torch.optim.AdamW(language_model.parameters())
tokens = torch.randint(0, V, (B, T + 1), device=device)


def language_step():
    language_optimizer.zero_grad()
    logits = language_model(tokens[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, V), tokens[:, 1:].reshape(-1))
    loss.backward()
    language_optimizer.step()


text = measure(language_step, model=language_model, optimizer=language_optimizer,
               items=B * T, unit="tokens", name="small transformer", timed_steps=0)
show(draw_timeline(text), alt="Memory over one step of a small transformer: logits and loss appear at the end of "
     "forward; where backward begins two temporaries of the same size stand on them, and that is the peak.")
P_text = sum(parameter.numel() for parameter in language_model.parameters())
del language_model, language_optimizer, language_step  # or they stay for the rest of the notebook

# %%
after = text.timeline.at(text.timeline.end_ns)
states = sum(after[category] for category in adam_states(P_text))
print(f"states: predicted {format_bytes(16 * P_text)}, measured {format_bytes(states)}")
one = 4 * B * T * V
print("one tensor of logits:", format_bytes(one))
kinds = ("logits and loss", "temporaries")
for moment, at_ns in [("backward is called", when(text, "backward")), ("peak", text.timeline.peak_ns)]:
    alive = text.timeline.at(at_ns)
    print(f"{moment + ', such tensors:':<36}", ", ".join(f"{alive[kind] / one:.2f} {kind}" for kind in kinds))
spike = sum(text.breakdown[kind] for kind in kinds)
print(f"both kinds are {100 * spike / text.peak_bytes:.0f}% of the peak, which is in {text.peak_phase}")

# %% [markdown]
# **Read it.** The model is small, its vocabulary is not. When backward is called, two tensors of the logits'
# shape are alive: the logits and their log-probabilities. Backward begins with a gradient of each, counted as
# temporaries; these four are the spike. Keeping fewer activations lowers only their thin band, SGD only Adam's
# broad one. Neither touches the spike: the technique has to fit the category. One block of logits even
# stays to the end of the step: the variable `logits` holds it until the function returns.
# [A fine-tuning library](https://github.com/meta-pytorch/torchtune/pull/1046) added `del logits` for that.
#
# <div class="alert alert-warning"><b>Trap.</b> One line, <code>logits = logits.float()</code>, makes
# an fp32 copy of 16-bit logits. It stood in nearly every language model of a popular library.
# <a href="https://github.com/huggingface/transformers/pull/33902">Removing it</a> took the peak of
# sharded (FSDP2) Llama 3.1 8B inference from 18.5 to 10.6 GiB (published by the author).</div>

# %% [markdown]
# ## 7. Predict beside measure
#
# Move the controls. Each change predicts by your formulas and your ledger, then measures for real. Where
# do the two part, and which category is to blame?

# %%
def build(kind):
    if kind == "ResNet-18":
        return resnet(18, stem="cifar").to(device)
    return resnet(50, stem="cifar").to(device)


OPTIMIZERS = {
    "SGD": (0, lambda p: torch.optim.SGD(p, lr=0.1)),
    "SGD, momentum": (4, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "Adam": (8, torch.optim.Adam),
}


def predicted_and_measured(batch_size, model, optimizer):
    network, (state_bytes, make) = build(model), OPTIMIZERS[optimizer]
    count = sum(p.numel() for p in network.parameters())
    one = saved_for_backward(network, torch.randn(2, 3, 32, 32, device=device)) / 2
    guess = predicted("your formulas", {"parameters": 4 * count, "gradients": 4 * count,
        "optimizer state": state_bytes * count, "activations": one * batch_size})
    chosen = make(network.parameters())
    run = measure(make_step(network, chosen, batch_size), model=network, optimizer=chosen,
                  items=batch_size, name=f"{model}, batch {batch_size}", timed_steps=0)
    both = compare([guess, run], title="Predicted and measured")
    return both.figure, both.alt


# %%
explore(predicted_and_measured, batch_size=[1, 2, 4, 8, 16], model=["ResNet-18", "ResNet-50"],
        optimizer=["Adam", "SGD, momentum", "SGD"])

# %% [markdown]
# The controls work in a running notebook only. The same figure for a batch of 16, kept as a picture:

# %%
figure, alt = predicted_and_measured(16, "ResNet-18", "Adam")
show(figure, alt)

# %% [markdown]
# **Read it.** The formula errs in two ways. It says too much, because it adds all gradients to all
# activations. It says too little, because it knows no temporaries. Try ResNet-18 with Adam at batch
# 1: the peak lies in the optimizer step, and the prediction is too low. The next section shows
# which error wins when.

# %% [markdown]
# ## 8. Scale up
#
# How many images fill a card of 16 GB? Predict first, by your formula and the activations per image that
# you measured. Then **simulate**: the same model and step run on tensors that have shapes and lifetimes and no
# data, and every allocation is counted as a GPU's allocator would count it. No such GPU is needed;
# [05a](../intermediate/05a_trusting_simulation.ipynb) says how far to trust it.

# %%
def on_a_card(model, optimizer, size):
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(size, 3, 32, 32)), torch.randint(0, 10, (size,))).backward()
    optimizer.step()


def build_for_card():
    network = resnet(50, stem="cifar")
    return network, torch.optim.Adam(network.parameters())


usable = simulated_device("V100 16GB").usable_bytes
predicted_fit = int((usable - 16 * P) / per_image)
print(f"beside its context the card leaves {format_bytes(usable)}: about {predicted_fit} images   ({Evidence.PREDICTED})")


def at_size(size):
    return simulate(build_for_card, lambda m, o: on_a_card(m, o, size), device="V100 16GB", items=size)


# %%
runs = {size: at_size(size) for size in (6, 64, predicted_fit)}
fits, too_large = 64, predicted_fit + 1
slope = (runs[predicted_fit].peak_bytes - runs[64].peak_bytes) / (predicted_fit - 64)
middle = 64 + int((usable - runs[64].peak_bytes) / slope)  # where the tensors alone fill the card
while too_large - fits > 1:  # what decides is what the allocator reserves
    runs[middle] = runs.get(middle) or at_size(middle)
    fits, too_large = (middle, too_large) if runs[middle].reserved_bytes <= usable else (fits, middle)
    middle = max((fits + too_large) // 2, too_large - 4)
rows = [{"images": size, "predicted MiB": (16 * P + per_image * size) / 2**20, "tensors MiB": run.peak_bytes / 2**20,
         "tensors / predicted": run.peak_bytes / (16 * P + per_image * size), "temporaries MiB": run.breakdown["temporaries"] / 2**20,
         "reserved MiB": run.reserved_bytes / 2**20, "fits": run.reserved_bytes <= usable} for size, run in sorted(runs.items())]
assert runs[fits].reserved_bytes <= usable < runs[fits + 1].reserved_bytes, "the search ended at no edge"
by_tensors = max(size for size, run in runs.items() if run.peak_bytes <= usable)
print(f"the card holds {usable / 2**20:,.0f} MiB: the tensors of {by_tensors} images, and {fits} images ({runs[6].evidence})")
pd.DataFrame(rows).set_index("images").round(3)

# %% [markdown]
# **Read it.** The prediction errs where it matters: that many images do *not* fit. At a small batch the gradients
# that were added in vain make the formula too high. They do not grow with the batch; the temporaries do, and at
# the card's edge the formula is too low. The tensors of a few images fewer would fit. Still fewer do: what the card
# must hold is what its allocator *reserves*, and near the edge gaps between tensors decide. (The card's limit is
# what CUDA reports, less some 0.5 GiB for the context: an assumption until a GPU is recorded.)

# %%
recorded_table("resnet50", where={"quantity": "step", "image_size": 32}, columns=["precision", "batch", "peak_bytes"])

# %% [markdown]
# ## Which technique for which category
#
# Later lessons build them. What each one costs stands in brackets.
#
# | category | grows with | what shrinks it | what does not |
# |---|---|---|---|
# | parameters | model | sharding (communication), quantization (accuracy) | a smaller batch |
# | gradients | model | sharding (communication), freeing each one early (other code) | a smaller batch |
# | optimizer state | model, optimizer | SGD or 8-bit states (perhaps accuracy), sharding (communication), offload (transfers) | mixed precision |
# | activations | batch, sequence, depth | checkpointing (compute), mixed precision (range or precision of numbers), smaller micro-batch (speed) | sharding the states |
# | logits and loss | batch, sequence, vocabulary | chunked loss (a little compute), smaller micro-batch (speed) | checkpointing the layers |
# | temporaries | operation, size of its tensors | fused kernels (not there for every operation) | checkpointing |
#
# Every lesson keeps rows on a scoreboard.

# %%
score("01", first)
score("01", text)
scoreboard("01")

# %% [markdown]
# ## Break it, diagnose it
#
# A validation loop adds up its losses. It never calls `backward`, so nothing should stay. Watch the
# memory that is alive when the step is over. (`model.eval()`, left out here, would not stop autograd.)

# %%
total_loss = torch.zeros((), device=device)


def validate():
    global total_loss
    total_loss = total_loss + F.cross_entropy(model(images), labels)


labels = torch.randint(0, 10, (batch,), device=device)
leak = measure(validate, model=model, name="validation, as written", timed_steps=0)
kept = leak.timeline.at(leak.timeline.end_ns)
print(kept)

# %% [markdown]
# **Diagnose it.** Activations are alive after the step. "Other" holds as much again: what the warm-up step of
# `measure` left behind. `total_loss` has a history, the history holds the graph, and the graph holds the
# activations of every batch so far. The cure is one line.

# %%
total_loss = torch.zeros((), device=device)


@torch.no_grad()
def validate_without_history():
    global total_loss
    total_loss = total_loss + F.cross_entropy(model(images), labels)


clean = measure(validate_without_history, model=model, name="validation, cured", timed_steps=0)
alive_after = [m.timeline.at(m.timeline.end_ns).total_bytes for m in (leak, clean)]
print("alive after the step:", *map(format_bytes, alive_after))
assert alive_after[1] < alive_after[0] / 2, "the history is still held: does no_grad wrap the step?"
compare([leak, clean], title="A validation step, before and after the cure")

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> A ResNet-50 example of a well-known framework
# averaged a loss <i>with</i> its history and
# <a href="https://github.com/horovod/horovod/pull/641">ran out of memory</a> for it. PyTorch's
# <a href="https://docs.pytorch.org/docs/stable/notes/faq.html">frequently asked questions</a> list
# the mistake first: do not accumulate history across your training loop.</div>

# %% [markdown]
# ## Recap
#
# - States do not depend on the batch: 16 bytes per parameter for fp32 with Adam.
# - Activations are proportional to the batch, and logits to the vocabulary.
# - The peak is a moment. Only what is alive then counts.
# - A formula is a prediction. Measure, then explain the ratio.
#
# ### Test yourself
#
# Name the components of a training step's memory, and a technique for each.
#
# <details><summary>Answer</summary>
#
# Parameters (quantize or shard), gradients (shard, or free them early), optimizer state (another
# optimizer, 8-bit states, sharding, offload), activations (checkpointing, mixed precision,
# smaller micro-batch), logits and loss (chunked loss), temporaries (fused kernels). On a GPU also
# the context and the reserve; with several devices also buffers for their messages.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/beginner/01_where_memory_goes.ipynb), in a copy: `make my-labs` makes one.
# When you are done, compare with the [solution](../../solutions/beginner/01_where_memory_goes.ipynb).
#
# **References.** Rajbhandari and others, *ZeRO: Memory Optimizations Toward Training Trillion
# Parameter Models*, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), section 3 and Figure 1. PyTorch,
# [Understanding CUDA memory usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html).
# NVIDIA, *A100 Tensor Core GPU Architecture*, 2020.
