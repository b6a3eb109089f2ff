# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 Mixed precision on a vision model
#
# {{badges}}
#
# **The question.** A ResNet-50 script does not fit a 16 GB card at batch 1024. Does it fit once it computes in
# 16 bits?
#
# **Promise.** You convert the script by hand, say beforehand what that does to the *peak*, and find the largest batch
# that fits: 620 images in fp32, 1236 in mixed precision (simulated).
#
# | minutes | hardware | runs |
# |---|---|---|
# | 50, and 90 for the lab | any laptop; a GPU if you have one; beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# "Mixed precision halves training memory." You train ResNet-50 with Adam on **one** image. The *peak* is
# the most memory that the step holds at any moment; it decides whether the step fits. How large is the
# peak in mixed precision, divided by the peak in fp32? 0.5 says half, 1 says the same. Write your guess.

# %%
my_bet_ratio = 0.5

# %% tags=["setup"]
here = setup("beginner/02")

# %%
import warnings

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from utils import Evidence, OverBudgetError, check, cifar10, compare, draw_peaks, format_bytes, low_precision
from utils import measure, recorded_table, resnet, score, scoreboard, show, simulate, tf32
from utils.lessons.lesson_02.edge import largest_batch
from utils.lessons.lesson_02.script import MAIN, TOP
from utils.lessons.lesson_02.toy import percent_right, shrunk, shuffled, toy_network
from utils.simulation.devices import simulated_device

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# ## 1. The peak, in both precisions
#
# One training step as you know it. The line with `autocast` is the new one: with a 16-bit type it turns
# mixed precision on, without one it does nothing. Section 2 explains it.
#
# **Simulation.** The step runs on tensors that have a shape, a type and a lifetime, and no data. Each allocation is
# counted as a GPU's allocator would count it ([05a](../intermediate/05a_trusting_simulation.ipynb) says how far to
# trust that). Here the GPU is a V100 with 16 GB. It has no bf16, so its 16-bit type is fp16.

# %%
def training_step(model, optimizer, batch, dtype=None):
    at = next(model.parameters()).device
    images = torch.randn(batch, 3, 32, 32, device=at)
    labels = torch.randint(0, 10, (batch,), device=at)
    optimizer.zero_grad()
    with torch.amp.autocast(at.type, dtype=dtype, enabled=dtype is not None):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


def build(stem="cifar"):  # the first layers; CIFAR's keep an image of 32 x 32 pixels at full size
    torch.manual_seed(0)
    model = resnet(50, stem=stem)
    return model, torch.optim.Adam(model.parameters())


def on_the_card(batch, dtype=None, within=None):
    return simulate(build, lambda m, o: training_step(m, o, batch, dtype), device="V100 16GB", within=within,
                    items=batch, unit="images", name=f"{'mixed' if dtype else 'fp32'}, batch {batch}")

# %%
FP16, sizes = torch.float16, [1, 4, 8, 16, 64]
runs = {(size, dtype): on_the_card(size, dtype) for dtype in (None, FP16) for size in sizes}
lines = {name: [runs[size, dtype] for size in sizes] for name, dtype in [("fp32", None), ("mixed", FP16)]}
show(draw_peaks(lines, title="ResNet-50 with Adam: the peak of a step"),
     alt="Peak memory against the batch size: both precisions lie on one flat line for a few images; then fp32 "
     "rises, mixed precision a little later and about half as steeply.")

# %%
def at_one_image(dtype):
    model, optimizer = build()
    model.to(device)
    with tf32(False):  # fp32 as such: section 2
        return measure(lambda: training_step(model, optimizer, 1, dtype), model=model, optimizer=optimizer,
                       timed_steps=0, name=f"{'mixed' if dtype else 'fp32'}, batch 1, here")


# %%
low, reason = low_precision(device)
real = [at_one_image(dtype) for dtype in (None, low)]
print(f"your bet for one image: {my_bet_ratio}; {Evidence.MEASURED} here: {real[1].peak_bytes / real[0].peak_bytes:.3f}")
peaks = pd.DataFrame({name: {run.items: run.peak_bytes / 2**20 for run in line} for name, line in lines.items()})
peaks["mixed / fp32"] = peaks["mixed"] / peaks["fp32"]
assert (peaks["mixed / fp32"] <= 1).all() and peaks["mixed / fp32"].iloc[-1] < 0.7, "was the model changed?"
peaks.rename_axis("images").rename(columns={"fp32": "fp32 (MiB)", "mixed": "mixed (MiB)"}).round(2)

# %% [markdown]
# **Read it.** At one image the two peaks are the same, measured on this machine and simulated for the V100. The lines
# part between 4 and 8 images. At 64 the ratio is 0.6, and still no half: the model states are in both peaks, and they
# do not shrink. Section 3 says why the lines part where they do. New words stand in the
# [glossary](../00_glossary.ipynb).

# %% [markdown]
# ## 2. The conversion, by hand
#
# Two tools, each for one problem.
#
# **`torch.amp.autocast`** wraps forward and loss. Inside, matrix products and convolutions cast
# their inputs to 16 bits; operations that need digits or range stay in fp32. Backward is outside: it
# runs each operation in the type that forward chose.
#
# **`torch.amp.GradScaler`** is for fp16 alone. Small gradients would become 0 there, so it multiplies
# the loss by a large number, divides the gradients by it before the step, skips a step whose
# gradients overflowed, and adapts the number.

# %%
def train_amp(model, optimizer, batches, dtype):
    mixed = dtype is not None  # None is the script as it was, in fp32
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)  # new
    losses = []
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.amp.autocast(device.type, dtype=dtype, enabled=mixed):  # new
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()  # was: loss.backward()
        scaler.step(optimizer)  # was: optimizer.step()
        scaler.update()  # new
        losses.append(loss.item())
    return losses


# %%
train_set, test_set = shrunk(cifar10("train"), 3072), shrunk(cifar10("test"), 2000)
few = list(shuffled(train_set, 64, 1, seed=0))[:4]


def four_losses(dtype):
    model = toy_network(seed=0).to(device)
    return train_amp(model, torch.optim.Adam(model.parameters(), lr=1e-2), few, dtype)


# %%
print(f"{low} suits this device: {reason}")
started = {str(dtype): four_losses(dtype) for dtype in (None, torch.bfloat16, FP16)}
for name, losses in started.items():
    print(f"{name:<15} losses", [round(loss, 4) for loss in losses])
    assert abs(losses[0] / started["None"][0] - 1) < 0.01, "same weights, same batch: run from the top"

# %% [markdown]
# **Read it.** Five lines are new or changed. A small network begins at nearly the same loss in all three types (the
# same weights and images, fewer digits), then drifts apart a little. With bf16 the scaler is switched off and passes
# everything through: bf16 has the range of fp32, so nothing becomes 0 that fp32 would keep.
#
# <div class="alert alert-warning"><b>Trap.</b> A T4 or V100 only <i>emulates</i> bf16, which is slow, and
# <code>torch.cuda.is_bf16_supported()</code> says True there: <a href="https://github.com/pytorch/pytorch/pull/148322">a
# change that was proposed to PyTorch</a> describes how it misleads. Ask
# <code>is_bf16_supported(including_emulation=False)</code>; on those cards take fp16 with a scaler.</div>

# %% [markdown]
# ### Which tensor has which type
#
# A *forward hook* is called with what a layer returns. Here hooks note its type in a smaller ResNet under autocast.
# Predict first: which of the seven rows will say `float32`?

# %%
small = resnet(18, stem="cifar").to(device)
adam = torch.optim.Adam(small.parameters())
types = {}
for module in small.modules():
    if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
        module.register_forward_hook(lambda layer, _, out: types.update({f"output of {type(layer).__name__}": out.dtype}))
training_step(small, adam, 1, low)
weight = small.fc.weight
types |= {"parameter": weight.dtype, "its gradient": weight.grad.dtype,
          "Adam's state": adam.state[weight]["exp_avg"].dtype, "running mean": small.bn1.running_mean.dtype}
assert {types["parameter"], types["its gradient"], types["Adam's state"]} == {torch.float32}, "did you call half()?"
pd.DataFrame({"type": types}).astype(str)

# %% [markdown]
# **Read it.** Layers return 16-bit numbers. What *stays* from step to step is fp32: parameters,
# gradients, Adam's means, the running means of batch norm. Lesson 15 has one table of [who keeps which copy, and
# when](../advanced/15_design_studio.ipynb#2.-On-paper): 14, 16 or 18 bytes per parameter.
#
# **Question.** Autocast makes a 16-bit copy of each weight and keeps it until backward has used it.
# How many bytes per parameter does that *add*?

# %%
added_bytes_per_parameter = ...
check("02.added_bytes", added_bytes_per_parameter)

# %% [markdown]
# ### Break it, diagnose it: why not `model.half()`?
#
# Then everything halves, Adam's state as well. Watch memory, then the weights.

# %%
broken = toy_network(seed=0).half().to(device)
optimizer = torch.optim.Adam(broken.parameters())
for number, (images, labels) in enumerate(few[:2]):
    optimizer.zero_grad()
    F.cross_entropy(broken(images.half().to(device)).float(), labels.to(device)).backward()
    gradients = all(p.grad.isfinite().all() for p in broken.parameters())
    optimizer.step()
    weights = all(p.isfinite().all() for p in broken.parameters())
    print(f"step {number}: gradients finite: {gradients}, weights after the step: {weights}")
kept = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.numel() > 1)
print("state bytes per parameter:", kept / sum(p.numel() for p in broken.parameters()))
print("in fp16, eps = 1e-8 is", torch.tensor(1e-8).half().item(), "and (1e-4)^2 is", torch.tensor(1e-4).half().square().item())
assert not weights, "the fp16 model should break here: is eps still 1e-8?"

# %% [markdown]
# **Diagnose it.** The state has 4 bytes in place of 8. But the first gradients are finite, and the weights after the
# step are not: the *optimizer step* broke them. Adam divides by $\sqrt{v} + \epsilon$, and both are 0 in fp16.
# Autocast keeps weights and states in fp32, and that is why it does not halve them. [PyTorch's
# documentation](https://docs.pytorch.org/docs/stable/amp.html) says it in one line: do not call `half()` on your model
# when you use autocast.
#
# ### Old names
#
# | in old scripts | what it was | today |
# |---|---|---|
# | `torch.cuda.amp.autocast()` and `.GradScaler()` | the same, for CUDA alone | `torch.amp...("cuda")` |
# | `apex.amp.initialize`, `scale_loss` | [Apex](https://github.com/NVIDIA/apex), NVIDIA's library: patched functions (O1) or an fp16 model with fp32 weights beside it (O2); [removed](https://github.com/NVIDIA/apex/pull/1896) | autocast, `GradScaler` |
# | `apex.optimizers.FusedAdam` | one kernel for the whole update | `Adam(..., fused=True)` |
#
# Two neighbours save no memory. *TF32* (A100 and newer) rounds the factors of fp32 products to 10 binary digits;
# tensors keep 4 bytes. `channels_last` only reorders images, which 16-bit convolutions prefer.

# %%
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    torch.cuda.amp.GradScaler(enabled=False)
print(*(f"{w.category.__name__}: {w.message}" for w in seen), sep="\n")

# %% [markdown]
# ## 3. What halves, and which moment decides
#
# Take $P$ parameters, Adam, batch $b$, and $a$ bytes of activations per image in fp32. Two moments
# compete for the peak:
#
# | moment | fp32 | mixed |
# |---|---|---|
# | backward begins (no gradients yet) | $12P + ab$ | $12P + 2P + ab/2$ |
# | optimizer step (no activations any more) | $16P + 4P$ | $16P + 4P$ |
#
# ($4P$ in the lower row are temporaries: on a GPU, Adam updates all tensors at once.) The peak is the larger of the
# two. First the upper row: what is alive when backward begins.

# %%
def when_backward_begins(measurement):
    spans = measurement.timeline.spans
    return dict(measurement.timeline.at(next(s.start_ns for s in spans if s.name == "backward")))


# %%
moment = {dtype: when_backward_begins(runs[64, dtype]) for dtype in (None, FP16)}
names = ["parameters", "optimizer state", "buffers", "cast weights", "activations"]
table = pd.DataFrame({"fp32": moment[None], "mixed": moment[FP16]}).reindex(names).fillna(0)
ratio = (table["mixed"] / table["fp32"]).round(3)
assert (ratio[names[:3]] == 1).all(), "autocast does not touch the states"
assert 0.5 <= ratio["activations"] < 0.56, "activations halve; some stay fp32"
print(f"MiB when backward begins, 64 images   ({runs[64, None].evidence})")
(table / 2**20).round(2).assign(**{"mixed / fp32": ratio.astype(str).replace("inf", "added")})

# %% [markdown]
# **Read it.** Parameters, Adam's state and the running statistics of batch norm do not move by a
# byte. Activations shrink to half. *Cast weights*, the 16-bit copies, are added: $2P$ says the
# formula, and it is a little less, because batch norm's weights are not cast. Now the larger of both moments:

# %%
P = sum(p.numel() for p in build()[0].parameters())
a = moment[None]["activations"] / 64


def predicted_peak(batch, mixed):
    begins = 14 * P + a * batch / 2 if mixed else 12 * P + a * batch
    return max(begins, 20 * P)


# %%
guess = pd.DataFrame({name: {size: predicted_peak(size, name == "mixed") / 2**20 for size in sizes} for name in lines})
where = pd.DataFrame({name: {run.items: run.peak_phase for run in line} for name, line in lines.items()})
print(f"P = {P:,}, a = {a / 1e6:.1f} MB: 12 P + a b > 20 P from {8 * P / a:.1f} images on, 14 P + a b / 2 > 20 P from {12 * P / a:.1f}")
parts = {f"{Evidence.PREDICTED} (MiB)": guess, f"{Evidence.SIMULATED} (MiB)": peaks[list(lines)].round(1), "the peak is in": where}
pd.concat(parts, axis=1).rename_axis("images").round(1)

# %% [markdown]
# **Read it.** For a few images the optimizer step decides, where neither activations nor copies are alive: mixed
# precision can change nothing. Where activations decide, it saves. The simulated peaks in backward are higher than the
# formula, which knows neither backward's temporaries nor that the first gradients appear while most activations are alive.

# %%
compare([runs[size, dtype] for size in (1, 64) for dtype in (None, FP16)],
        title="ResNet-50 with Adam, one image and several")

# %% [markdown]
# Can mixed precision *raise* a peak? **Predict** for a single layer of four million weights, and two rows of input.

# %%
def one_layer(optimizer_of, dtype, **options):
    model, rows = nn.Linear(1024, 4096).to(device), torch.randn(2, 1024, device=device)
    optimizer = optimizer_of(model.parameters(), **options)

    def step():
        optimizer.zero_grad()
        with torch.amp.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()

    return measure(step, model=model, optimizer=optimizer, timed_steps=0).peak_bytes


# %%
for optimizer_of, options in [(torch.optim.SGD, {}), (torch.optim.Adam, {"fused": True}), (torch.optim.Adam, {})]:
    plain, mixed = (one_layer(optimizer_of, dtype, **options) for dtype in (None, low))
    print(f"{optimizer_of.__name__:<5}{options or ''!s:<16} peak {format_bytes(plain)} in fp32, mixed {mixed / plain:.2f} times that")
    assert options or optimizer_of is torch.optim.Adam or mixed > 1.1 * plain, "two gradients should be alive together"

# %% [markdown]
# **Read it.** Backward makes the weight's gradient in 16 bits, then its fp32 form, and for a moment both are alive: more
# than fp32 ever holds. Only plain Adam's step, with temporaries of its own, is higher still; the fused one needs none. So
# weights without activations gain no memory from mixed precision.

# %% [markdown]
# ## 4. What fills a 16 GB card
#
# A card with "16 GB" on its box does not give you 16 x 10^9 bytes, nor 16 GiB. A V100 reports 15.75 GiB
# (published: logs of its users), and the CUDA context takes some 0.5 GiB of that before your first tensor (an
# assumption of the course until a GPU is recorded). The script as it was:

# %%
most = simulated_device("V100 16GB").usable_bytes
print("beside its context the card leaves", format_bytes(most))
try:
    on_the_card(1024, within=most)
except OverBudgetError as error:
    print(error)

# %% [markdown]
# **Read it.** Batch 1024 in fp32 does not fit. What does? Two batches give a straight line of peaks, and the line a
# guess. A guess is no proof: what the card must hold is what its allocator *reserves*, tensors and the gaps between
# them. So the search goes down from the guess, until one size fits and the next does not.

# %%
def run(size, dtype):
    runs[size, dtype] = runs.get((size, dtype)) or on_the_card(size, dtype)
    return runs[size, dtype]


def find_limit(dtype, one, two):
    slope = (run(two, dtype).peak_bytes - run(one, dtype).peak_bytes) / (two - one)
    guess = two + int((most - run(two, dtype).peak_bytes) / slope)
    return largest_batch(lambda size: run(size, dtype).reserved_bytes <= most, guess + 1), guess, slope


# %%
limits = {name: find_limit(dtype, *pair) for name, dtype, pair in [("fp32", None, (64, 512)), ("mixed", FP16, (64, 1024))]}
for name, (limit, guess, slope) in limits.items():
    print(f"{name:<6} guess {guess:>5}, largest batch {limit:>5}, {slope / 1e6:6.2f} MB an image   ({Evidence.SIMULATED})")
largest = [limit for limit, *_ in limits.values()]
print(f"{largest[1] / largest[0]:.2f} times the batch on the same card")
assert 512 <= largest[0] < 1024 <= largest[1], "the limits moved: were model or card changed?"

# %%
ends = {"fp32": [run(size, None) for size in (64, 512, largest[0])], "mixed": [run(size, FP16) for size in (64, 1024, largest[1])]}
line = {size: runs[512, None].peak_bytes + limits["fp32"][2] * (size - 512) for size in (largest[0], 1024)}
show(draw_peaks(ends, limits={"what the card gives": most}, predicted_bytes={"fp32, its line goes on": line},
                title="ResNet-50, Adam: what fills a 16 GB card"),
     alt="Peak memory against batch size, two straight lines. fp32 meets the card's limit a little above "
     "600 images, mixed precision above 1200; a dashed line carries fp32 on to 1024.")

# %% [markdown]
# **Read it.** Yes: it fits, with some 200 images to spare. At these sizes nearly everything is activations, so here "half"
# is nearly true. The verdict hangs on the model: the ImageNet stem shrinks the same images first.

# %%
other = simulate(lambda: build("imagenet"), lambda m, o: training_step(m, o, 1024), device="V100 16GB", items=1024)
print(f"ImageNet stem, fp32: {when_backward_begins(other)['activations'] / 1024 / 1e6:.2f} MB of activations per image,",
      f"peak at batch 1024 {format_bytes(other.peak_bytes)}   ({other.evidence})")

# %% [markdown]
# ## 5. The same accuracy, at twice the batch?
#
# NVIDIA published its recipe for ResNet-50 on ImageNet, mean and spread over runs ([its
# README](https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5)):
#
# | | fp32 | mixed (fp16) |
# |---|---|---|
# | top-1 after 90 epochs, eight V100 of 16 GB (%) | 77.01 +/- 0.16 | 76.88 +/- 0.16 |
# | top-1 after 250 epochs (%) | 78.30 +/- 0.16 | 78.25 +/- 0.12 |
# | one DGX-2 pair of the same README (%) | 75.81 +/- 0.08 | 76.04 +/- 0.05 |
# | images/s on one V100 | 367 | 1200 |
#
# On the V100s the accuracies differ by less than the spread, on the DGX-2 by more; a card trains 3.3 times as fast. That
# is the evidence for ResNet-50. A doubled batch is another change: half as many steps per epoch. Two rules of thumb: with SGD multiply
# the rate by 2 (the *linear rule*, Goyal and others 2017), with Adam by $\sqrt 2$ (Malladi and others 2022).
#
# How to compare, on a **toy network** that a laptop trains in seconds: each row changes one thing against the row above it,
# over five seeds; a seed has the same first weights and order of images in every row.

# %%
def accuracy(seed, dtype=FP16, batch=128, rate=1e-2):
    model = toy_network(seed).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    train_amp(model, optimizer, shuffled(train_set, batch, 2, seed), dtype)
    return percent_right(model, test_set)


# %%
arms = {"fp32, batch 128": {"dtype": None}, "mixed, fp16": {}, "and batch 256": {"batch": 256},
        "and rate x 1.41": {"batch": 256, "rate": 2**0.5 * 1e-2}}
final = pd.DataFrame({name: [accuracy(seed, **given) for seed in range(5)] for name, given in arms.items()})
steps = final.diff(axis=1)  # against the row above, seed by seed
assert final.min().min() > 20 and abs(steps["mixed, fp16"].mean()) < 2, "guessing gives 10%: the same seeds?"
print(f"final accuracy in percent over five seeds, the toy network   ({Evidence.MEASURED})")
pd.concat({"accuracy": final.agg(["mean", "min", "max"]).T, "minus the row above": steps.agg(["mean", "min", "max"]).T}, axis=1).round(2)

# %% [markdown]
# **Read it.** fp16 moves the mean by less than the seeds of one row differ. The doubled batch costs more than the bits do,
# and the larger rate wins some of it back, in each of the five seeds of this toy.
#
# **Question.** A script trains with SGD at batch 512 and learning rate 0.1. You double the batch. Which
# rate does the linear rule give?

# %%
rate_for_1024 = ...
check("02.linear_rate", rate_for_1024)

# %% [markdown]
# ## 6. The scenario as asked
#
# *"ResNet-50 on CIFAR-10 overflows our 16 GB card at batch 1024. Use mixed precision; keep the accuracy."* The file for
# that card is your loop around torchvision's network. It prints the card's own peak and accuracy.

# %%
at_1024 = f"{runs[1024, FP16].peak_bytes / 2**30:.2f}"
here.write_script("resnet50_amp.py", TOP, train_amp, MAIN.replace("PEAK", at_1024))
recorded_table("resnet50", where={"quantity": "largest batch", "image_size": 32})

# %%
score("02", real[0])
score("02", real[1])
score("02", runs[largest[1], FP16])
scoreboard("02")

# %% [markdown]
# **Read it.** Simulated: batch 1024 fits in mixed precision and not in fp32. Published: NVIDIA's accuracies. Measured here:
# the peaks of one image, and a toy's accuracy. Not shown: ResNet-50's own accuracy on CIFAR-10, and the card's time; the
# script measures both.

# %% [markdown]
# ## Recap
#
# - Forward and loss inside autocast; then scale, backward, step, update. bf16 needs no scaler.
# - Activations halve. Parameters, gradients and optimizer state stay. Copies of the weights are added.
# - The peak decides. At one image it does not move; at hundreds it nearly halves (this model).
# - Compare accuracy over paired seeds and change one thing, or you compare seeds.
#
# **Test yourself.** A model of 3 billion parameters, trained with Adam in fp32, runs out of a 40 GB card at a batch of one
# text of 128 tokens. A colleague says: "turn on mixed precision". What do you expect?
#
# <details><summary>Answer</summary>
#
# Nothing. States take 16 bytes per parameter, 48 GB, and stay. What helps is another optimizer, sharding or offload.
#
# </details>
#
# Do the [lab](../../labs/beginner/02_mixed_precision.ipynb), in a copy (`make my-labs`), then compare with the
# [solution](../../solutions/beginner/02_mixed_precision.ipynb). Lesson [03](03_when_numbers_break.ipynb) breaks numbers on
# purpose.
#
# **References.** Micikevicius and others, *Mixed Precision Training*,
# [arXiv:1710.03740](https://arxiv.org/abs/1710.03740). Goyal and others, *Accurate, Large Minibatch
# SGD*, [arXiv:1706.02677](https://arxiv.org/abs/1706.02677). Malladi and others, *On the SDEs and
# Scaling Rules for Adaptive Gradient Algorithms*, [arXiv:2205.10287](https://arxiv.org/abs/2205.10287).
# PyTorch, [Automatic mixed precision](https://docs.pytorch.org/docs/stable/amp.html).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** You have `model`, `optimizer`, `loss_function`, `loader` and `device`, all in fp32, and no `half()`.
# Note the peak of your loop as it is; then write it so:
#
# ```python
# import torch
#
# fp16 = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
# scaler = torch.amp.GradScaler(device.type, enabled=fp16)  # bf16 needs none
# for inputs, labels in loader:
#     optimizer.zero_grad()
#     with torch.amp.autocast(device.type, dtype=torch.float16 if fp16 else torch.bfloat16):
#         loss = loss_function(model(inputs.to(device)), labels.to(device))
#     scaler.scale(loss).backward()
#     scaler.unscale_(optimizer)  # where you clip: gradients get their true size first
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     scaler.step(optimizer)
#     scaler.update()
# if device.type == "cuda":
#     print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
# ```
#
# **transformers.** You have `model` (in fp32) and `dataset`. The `Trainer` does the same by one setting (`fp16=True` on a
# T4 or V100):
#
# ```python
# from transformers import Trainer, TrainingArguments
#
# settings = TrainingArguments(output_dir="out", per_device_train_batch_size=64, max_steps=20, bf16=True)
# trainer = Trainer(model=model, args=settings, train_dataset=dataset)
# trainer.train()
# ```
#
# It works if the losses of the first steps agree to two digits and the peak is lower. If the peak did not move, it lies in
# the optimizer step: raise the batch.
