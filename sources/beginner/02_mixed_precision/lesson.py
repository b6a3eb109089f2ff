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
# **Promise.** A ResNet-50 training script runs out of a 16 GB card at batch 1024. You convert it by
# hand to 16-bit arithmetic, find the largest batch that fits by search, and check over five seeds
# that at the same batch 16 bits cost less than 2 percentage points of accuracy.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 40 | any laptop; a GPU if you have one | about a minute of computing on two CPU cores; on a GPU larger networks train, for longer (not timed yet) |

# %% [markdown]
# ## A bet
#
# "Mixed precision halves training memory." You train ResNet-50 with Adam on **one** image. Take what is
# alive when backward begins: how much is it in mixed precision, divided by what it is in fp32? 0.5 says
# half as much, 1 says no change. Write your guess in place of the 0.5. Section 3 measures it.

# %%
my_bet_ratio = 0.5

# %% tags=["setup"]
here = setup("beginner/02")

# %%
import statistics
import time
import warnings
from dataclasses import replace

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from utils import Evidence, MixedStep, OverBudgetError, budget, check, cifar10, compare, computes
from utils import draw_losses, draw_memory_by_batch, draw_throughput, format_bytes, low_precision
from utils import measure, recorded_table, resnet, score, scoreboard, show, simulate, tf32
from utils.catalog import device as card_of
from utils.data import normalize

device = here.meter_device  # where the meter can count: CUDA or CPU
on_gpu = device.type == "cuda"

# %% [markdown]
# ## What you will be able to do
#
# - Convert a training script to `torch.amp` (automatic mixed precision, AMP), and say which line does
#   what.
# - Say which tensors halve, which stay, and which are *added*.
# - Find the largest batch on a card by search, and set the learning rate for it.
# - Compare accuracy fairly: the same seeds, the same order of the data.
#
# Mixed precision trades digits for **memory** and **compute**. A word that is new to you stands in
# the [glossary](../00_start_here.ipynb#7.-Glossary).

# %% [markdown]
# ## 1. The script, in fp32
#
# This is a standard training loop: images, loss, backward, step. Weights, images, activations and
# gradients are all fp32, 4 bytes a number. It runs for two batches, so that you see that it works. The
# images are CIFAR-10's, or generated ones where there is no network; the output says which.

# %%
def train_fp32(model, optimizer, batches):
    losses = []
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
low, reason = low_precision(device)
fast = computes(device, low)
batch = {"tiny": 6 if fast else 4, "small": 64, "full": 256}[here.scale]
print(f"16-bit type: {low}; {reason}")
data = {split: cifar10(split) for split in ("train", "test")}


def first_batches(count=2):
    batches = data["train"].batches(batch, seed=0)
    return [next(batches) for _ in range(count)]


def build():
    torch.manual_seed(0)
    model = resnet(50, stem="cifar")
    return model, torch.optim.Adam(model.parameters())


# %%
model, optimizer = build()
fp32_losses = train_fp32(model.to(device), optimizer, first_batches())
print(f"ResNet-50, fp32, batch {batch}: losses", [round(loss, 4) for loss in fp32_losses])

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
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)  # new
    losses = []
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.amp.autocast(device.type, dtype=dtype):  # new
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()  # was: loss.backward()
        scaler.step(optimizer)  # was: optimizer.step()
        scaler.update()  # new
        losses.append(loss.item())
    return losses


# %%
model, optimizer = build()
amp_losses = train_amp(model.to(device), optimizer, first_batches(), low)
print(f"ResNet-50, {low}, batch {batch}: losses", [round(loss, 4) for loss in amp_losses])
assert abs(amp_losses[0] / fp32_losses[0] - 1) < 0.05, "same weights, same batch: run from the top"

# %% [markdown]
# **Read it.** Five lines are new or changed. The first losses agree to within 5%, as the cell asserts:
# same weights, same images, fewer digits. The second may differ more, after a first step of its own in
# each run. Section 6 trains for longer. With bf16 the
# scaler is disabled and passes everything through: bf16 has the range of fp32, so nothing underflows
# that fp32 would keep.
#
# Which type suits your device? `low_precision` chose, and printed why. A T4 or V100 only
# *emulates* bf16; there, fp16 with a scaler is the answer.

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> <code>torch.cuda.is_bf16_supported()</code> says True
# on a T4. It counts emulation, which is slow: <a href="https://github.com/pytorch/pytorch/pull/148322">a
# change that was proposed to PyTorch</a> describes how it misleads. Ask
# <code>is_bf16_supported(including_emulation=False)</code>.</div>

# %% [markdown]
# ### Which tensor has which type
#
# PyTorch calls a *forward hook* with what a layer returns. Here hooks note its type, for the
# convolutions, batch norms and the linear layer of a smaller ResNet under autocast. The other rows are
# a parameter, its gradient, Adam's state and a running mean of batch norm. Predict first: which of the
# seven rows will say `float32`?

# %%
small = resnet(18, stem="cifar").to(device)
adam = torch.optim.Adam(small.parameters())
types = {}


def note(module, inputs, output):
    types[f"output of {type(module).__name__}"] = output.dtype


for module in small.modules():
    if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
        module.register_forward_hook(note)
with torch.amp.autocast(device.type, dtype=low):
    loss = F.cross_entropy(small(torch.randn(2, 3, 32, 32, device=device)),
                           torch.tensor([0, 1], device=device))  # fmt: skip
loss.backward()
adam.step()
weight = small.fc.weight
types |= {"parameter": weight.dtype, "its gradient": weight.grad.dtype,
          "Adam's state": adam.state[weight]["exp_avg"].dtype,
          "running mean": small.bn1.running_mean.dtype}  # fmt: skip
print(pd.Series(types).to_string())
states = {types[n] for n in ("parameter", "its gradient", "Adam's state")}
assert states == {torch.float32}, "autocast leaves the states in fp32: did you call half()?"

# %% [markdown]
# **Read it.** Layers return 16-bit numbers. What *stays* from step to step is not:
# parameters, gradients, Adam's means. The weights must stay in fp32: an update is often smaller than
# the last digit of a 16-bit weight and would be lost (lesson 03). Lesson 15 has one table of [who keeps
# which copy, and when](../advanced/15_design_studio.ipynb#2.-On-paper): 14, 16 or 18 bytes.
#
# **Question.** Autocast makes a 16-bit copy of each weight and keeps it until backward has used it.
# How many bytes per parameter does that *add*?

# %%
added_bytes_per_parameter = ...
check("02.added_bytes", added_bytes_per_parameter)

# %% [markdown]
# ## 3. What halves, what stays, what is added
#
# For $P$ parameters, $a$ bytes of activations per image in fp32 and batch $b$, at the moment when
# backward begins, with Adam, from step two on:
#
# $$\text{fp32: } 12P + a\,b \qquad\qquad \text{mixed: } 12P + 2P + \tfrac{a}{2}\,b$$
#
# (Not 16: there are no gradients yet.) At this moment it saves if
# $2P < \tfrac{a}{2} b$. Measure both, at batch 1 and at a larger one.

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


def metered(batch, dtype=None, timed_steps=0, within=None, use_tf32=False, **layout):
    model, optimizer = build()
    model.to(device, **layout)
    name = f"{'tf32' if use_tf32 else 'fp32' if dtype is None else 'mixed'}, batch {batch}"
    with tf32(use_tf32):  # section 5; by default a GPU's convolutions would use it
        return measure(lambda: training_step(model, optimizer, batch, dtype), model=model,
                       optimizer=optimizer, items=batch, unit="images", name=name,
                       timed_steps=timed_steps, within=within)  # fmt: skip


# %%
timed = 2 if fast else 1
runs = {(size, dtype): metered(size, dtype, timed if size == batch else 0)
        for size in (1, batch) for dtype in (None, low)}  # fmt: skip


def when_backward_begins(measurement):
    spans = measurement.timeline.spans
    return dict(measurement.timeline.at(next(s.start_ns for s in spans if s.name == "backward")))


# %%
moment = {key: when_backward_begins(run) for key, run in runs.items()}
names = ["parameters", "optimizer state", "buffers", "cast weights", "activations"]
table = pd.DataFrame({"fp32": moment[batch, None], "mixed": moment[batch, low]}).fillna(0)
table = table.reindex(names).astype(int)
table["mixed / fp32"] = (table["mixed"] / table["fp32"]).round(3)
print(f"bytes when backward begins, batch {batch}   ({Evidence.MEASURED})")
print(table.replace({"mixed / fp32": float("inf")}, "added").to_string())
P = table.loc["parameters", "fp32"] // 4
assert (table.loc[names[:3], "mixed / fp32"] == 1).all(), "autocast does not touch the states"
assert 0.5 <= table.loc["activations", "mixed / fp32"] < 0.56, "activations halve; some stay fp32"

# %% [markdown]
# **Read it.** Parameters, Adam's state and the running statistics of batch norm do not move by a
# byte. Activations shrink to about half. A new row appears: *cast weights*, the 16-bit copies. The
# formula says $2P$ for them. They are a little less, because batch norm's weights are not cast.
#
# ### The batch where mixed precision costs memory

# %%
added = moment[1, low]["cast weights"]
saved = {s: moment[s, None]["activations"] - moment[s, low]["activations"] for s in (1, batch)}
for size in saved:
    before, after = (moment[size, kind] for kind in (None, low))
    ratio = (after["activations"] + added) / before["activations"]
    print(f"batch {size}, mixed / fp32: activations + copies {ratio:.2f},",
          f"all that is alive {sum(after.values()) / sum(before.values()):.2f}")  # fmt: skip
per_image = saved[batch] / batch
print(f"2 P = {format_bytes(2 * P)}, copies {format_bytes(added)} ({Evidence.MEASURED})")
print(f"saved per image {per_image / 1e6:.2f} MB: break-even at {added / per_image:.1f} images")
print(f"your bet for one image: {my_bet_ratio}")
assert saved[1] < added, "one image saves less than the copies cost; was the model changed?"

# %% [markdown]
# **Read it.** At batch 1 the ratio is above 1: the copies outweigh what the activations save, and mixed
# precision *costs* memory at that moment. Below the break-even batch it costs, above it saves. And the
# ratio of everything that is alive is far from 0.5, because Adam's states dominate a small batch. The
# folklore is right about one category, at a large batch.

# %%
compare([runs[key] for key in runs], title="ResNet-50 with Adam, fp32 and mixed")

# %% [markdown]
# **Read it.** These are peaks of the whole step. Where the column *peak in* says "optimizer
# step", as at batch 1 on a CPU, no activations and no copies are alive at the peak, and both precisions
# need the same. What mixed precision adds there, it adds below the peak. Where the peak is in
# backward, the copies look smaller than in the table: part of them is already freed.
#
# **Question.** Which category is it that halves? Answer with its name in the bars, in quotes.

# %%
what_halves = ...
check("02.what_halves", what_halves)

# %% [markdown]
# ## 4. What fills 16 GB
#
# On a GPU the next cells cap the allocator at 16 GB (or at all of a smaller card) and run for real. Elsewhere they *simulate* a
# V100 with 16 GB: the same model and the same step, on tensors without data, until the first
# allocation that crosses the limit. A V100 has no bf16, so mixed means fp16. (A scaler
# looks at values, and simulated tensors have none. It is left out; it would add two numbers.)

# %%
card = budget(min(16 * 10**9, here.memory_bytes) if on_gpu else "16GB")
card_low = low if on_gpu else torch.float16
print("the card's limit:", format_bytes(card.limit_bytes))


def on_the_card(batch, dtype=None, within=card):
    if on_gpu:
        return metered(batch, dtype, within=within)
    name = f"{'fp32' if dtype is None else 'mixed'}, batch {batch}"
    return simulate(build, lambda m, o: training_step(m, o, batch, dtype), device="V100 16GB",
                    items=batch, unit="images", name=name, within=within)  # fmt: skip


try:
    on_the_card(1024)
except OverBudgetError as error:
    print(error)

# %% [markdown]
# **Read it.** Batch 1024 in fp32 does not fit. The message gives the 16 GB in GiB, and names the phase, the module and the
# category that grew. Now search. Two smaller batches give a straight line, and the line a guess. A
# guess is no proof, so the search runs outwards from it, until one size fits and the next does not.

# %%
def largest_batch(fits, guess):
    if fits(guess):
        low, stride = guess, 1
        while fits(low + stride):
            low, stride = low + stride, 2 * stride
        high = low + stride
    else:
        high, stride = guess, 1
        while not fits(high - stride):
            high, stride = high - stride, 2 * stride
        low = high - stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# %%
def find_limit(dtype, one, two):
    tried = {size: on_the_card(size, dtype) for size in (one, two)}
    slope = (tried[two].peak_bytes - tried[one].peak_bytes) / (two - one)
    guess = int(one + (card.limit_bytes - tried[one].peak_bytes) / slope)

    def fits(size):
        try:
            tried[size] = on_the_card(size, dtype)
        except OverBudgetError:
            tried[size] = None
        return tried[size] is not None

    return largest_batch(fits, guess), slope, tried


# %%
limit_fp32, slope_fp32, tried_fp32 = find_limit(None, 256, 512)
limit_mixed, slope_mixed, tried_mixed = find_limit(card_low, 512, 1024)
kind = tried_fp32[512].evidence
for name, limit, slope, tried in [("fp32", limit_fp32, slope_fp32, tried_fp32),
                                  ("mixed", limit_mixed, slope_mixed, tried_mixed)]:  # fmt: skip
    print(f"{name:<6} largest batch {limit:>5}, {slope / 1e6:6.2f} MB an image,",
          f"{len(tried)} steps tried   ({kind})")  # fmt: skip
print(f"{limit_mixed / limit_fp32:.2f} times the batch on the same card")
promise = 512 <= limit_fp32 < 1024 <= limit_mixed
print("512 fits in fp32, 1024 only in mixed precision:", promise)
# A simulation says the same everywhere; a GPU's own limit may differ.
assert promise or on_gpu, "the simulated limits moved: were model, optimizer or card changed?"

# %%
line = {size: tried_fp32[512].peak_bytes + slope_fp32 * (size - 512) for size in (256, 512, 1024)}
mixed = [run for run in (tried_mixed[512], tried_mixed[1024]) if run]
figure = draw_memory_by_batch([runs[batch, None], tried_fp32[256], tried_fp32[512]],
                              predicted_bytes=line, others={"mixed": mixed}, limit="16GB",
                              title="ResNet-50, Adam, fp32: what fills a 16 GB card")  # fmt: skip
show(figure, alt="fp32 memory against batch size: activations grow in a straight line, and the dashed "
     "prediction crosses the 16 GB line between 512 and 1024. The line of mixed precision, half as "
     "steep, stays below it.")  # fmt: skip

# %%
compare([tried_fp32[512], *mixed],
        title="Batch 512 in fp32, 512 and 1024 in mixed precision")  # fmt: skip

# %% [markdown]
# **Read it.** Batch 1024 in mixed precision takes about what 512 takes in fp32: the promise. At these
# sizes nearly everything is activations, so here "half" is nearly true. The model decides, too. The
# stem of this ResNet keeps 32 x 32 images at full size. The next cell asks for the ImageNet stem,
# which shrinks them first.

# %%
def build_imagenet_stem():
    model = resnet(50, stem="imagenet")
    return model, torch.optim.Adam(model.parameters())


other = simulate(build_imagenet_stem, lambda m, o: training_step(m, o, 1024), device="V100 16GB",
                 items=1024, unit="images", name="ImageNet stem, batch 1024")  # fmt: skip
activations = when_backward_begins(other)["activations"]
print(f"ImageNet stem: {activations / 1024 / 1e6:.2f} MB of activations per image, peak",
      format_bytes(other.peak_bytes), f"({other.evidence})")  # fmt: skip

# %% [markdown]
# ## 5. Speed: throughput, TF32, channels_last
#
# Mixed precision is faster where the processor has 16-bit units, and slower where it emulates them. The
# next cell asks `computes` which of the two this device is. *channels_last* stores the colours of a
# pixel next to each other, which 16-bit convolutions on GPUs prefer; it moves numbers and changes none.

# %%
print(f"this device computes {low} itself: {fast}")
layout = metered(batch, low if fast else None, timed, memory_format=torch.channels_last)
layout = replace(layout, name=f"{layout.name}, channels_last")
speeds = [runs[batch, None], runs[batch, low], layout]
if on_gpu and torch.cuda.get_device_capability() >= (8, 0):
    speeds.insert(1, metered(batch, None, timed, use_tf32=True))
show(draw_throughput(speeds, title="ResNet-50, training steps"),
     alt="Images per second of fp32, mixed precision and channels_last.")  # fmt: skip
for run in speeds:
    print(f"{run.name:<40}{format_bytes(run.peak_bytes):>12}  {run.throughput:>18}  ({run.evidence})")

# %% [markdown]
# **Read it.** Only your own bars count: the order differs between processors. Each bar stands on one or
# two timed steps, its whiskers run from the slowest to the fastest, and overlapping whiskers decide
# nothing. (Where the device only emulates its 16-bit type, the third bar is channels_last in fp32.) The
# peaks of the two layouts differ by little, if at all.
#
# **TF32** is something else. (From an A100 on, it has a bar of its own above.) It is no storage type: tensors stay fp32, 4 bytes. The GPU's units (A100 and
# newer) read only 10 of the 23 binary digits behind the point of each factor, and add in fp32. You can do the
# same rounding by hand on any machine, and see what it costs in digits.

# %%
def rounded_to_tf32(x):
    bits = x.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


torch.manual_seed(0)
left, right = torch.randn(256, 512), torch.randn(512, 256)
exact = left.double() @ right.double()
factors = {"fp32": lambda x: x, "tf32, by hand": rounded_to_tf32,
           "fp16": lambda x: x.half().float(), "bf16": lambda x: x.bfloat16().float()}  # fmt: skip
for name, cast in factors.items():
    error = (cast(left) @ cast(right) - exact).norm() / exact.norm()
    print(f"{name:<14} relative error of the product {error:.1e}   ({Evidence.MEASURED})")

# %%
for name in ("V100 16GB", "A100 40GB", "H100"):
    card_row = card_of(name)
    rates = {kind: getattr(card_row, f"{kind}_tflops") for kind in ("fp32", "tf32", "fp16", "bf16")}
    print(f"{card_row.name:<10}", {kind: rate or "none" for kind, rate in rates.items()},
          f"TFLOP/s   ({Evidence.PUBLISHED})")  # fmt: skip
with tf32(True):
    print("matmul:", torch.backends.cuda.matmul.fp32_precision,
          "convolution:", torch.backends.cudnn.conv.fp32_precision)  # fmt: skip

# %% [markdown]
# **Read it.** TF32 has the digits of fp16 and the range of fp32, and saves no memory at all. The rates are
# peaks from NVIDIA's data sheets, without sparsity, in 10^12 operations a second; no training step
# reaches them. The last line shows today's settings, inside `tf32(True)`: `fp32_precision`, one for
# matrix products and one for convolutions. By default it is on for convolutions and off for matrix
# products. The older `allow_tf32` and `set_float32_matmul_precision("high")` still exist; reading
# `torch.backends.cuda.matmul.allow_tf32` after setting the new one is an error.

# %% [markdown]
# ## 6. Twice the batch: learning rate and accuracy
#
# A doubled batch means half as many steps per epoch, each with a less noisy gradient. Two rules of
# thumb: with SGD multiply the rate by 2 (Goyal and others 2017), with Adam by $\sqrt 2$ (Malladi
# and others 2022). They are starting points; measure.
#
# Does accuracy suffer? One run says little, since another seed moves it as well. So: five seeds
# (three where that takes over a minute), and for each seed the same initial weights and the same order
# of images in every precision. On a CPU a network of two convolutions with 8 channels on shrunk images stands in: without fp16 instructions,
# as most CPUs are, PyTorch takes a slow path for fp16 convolutions. On a GPU it is a ResNet.

# %%
tiny = here.scale == "tiny" or not on_gpu
count = 4096 if tiny else {"small": 5120, "full": 10_000}[here.scale]
EPOCHS = 2 if tiny else 4


def as_tensors(split, count):
    images = normalize(data[split].images[:count])
    images = F.avg_pool2d(images, 4) if tiny else images  # 8 x 8 pixels
    return images.to(device), data[split].labels[:count].to(device)


def make_model(seed):
    torch.manual_seed(seed)
    if not tiny:
        return resnet({"small": 18, "full": 50}[here.scale], stem="cifar").to(device)
    convolutions = [nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(),
                    nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU()]  # fmt: skip
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 10)).to(device)


images, labels = as_tensors("train", count)
test_images, test_labels = as_tensors("test", 2000)

# %% [markdown]
# `MixedStep` is your loop from section 2 in reusable form. The last lines of the next cell but one check
# that: the same losses, on a CPU bit for bit. They also give it a scaler that bf16 does not need.

# %%
RATE = 1e-2 if tiny else 1e-3


def train(seed, dtype=torch.float32, batch=128, rate=RATE):
    model = make_model(seed)
    step = MixedStep(model, torch.optim.Adam(model.parameters(), lr=rate), dtype=dtype)
    order = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    with tf32(False):
        losses = [step(images[part], labels[part]) for _ in range(EPOCHS)
                  for part in torch.randperm(count, generator=order).split(batch)]  # fmt: skip
        losses = torch.stack(losses).tolist()  # waits for a GPU
    images_per_second = EPOCHS * count / (time.perf_counter() - start)
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in test_images.split(250)])
    accuracy = 100 * (guesses == test_labels).float().mean().item()
    return accuracy, losses, images_per_second


# %%
model = make_model(0)
mine = train_amp(model, torch.optim.Adam(model.parameters()),
                 [(images[:64], labels[:64])] * 3, torch.float16)  # fmt: skip
model = make_model(0)
step = MixedStep(model, torch.optim.Adam(model.parameters()), dtype=torch.float16)
theirs = [step(images[:64], labels[:64]).item() for _ in range(3)]
print("by hand ", mine, "\nMixedStep", theirs)
assert mine == theirs or on_gpu, "MixedStep is your loop: compare the two, line by line"
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    plain = nn.Linear(2, 2)
    MixedStep(plain, torch.optim.SGD(plain.parameters()), dtype=torch.bfloat16,
              scaler=torch.amp.GradScaler("cpu"))  # fmt: skip
print(seen[0].message)

# %%
bf16 = torch.bfloat16 if not on_gpu or computes(device, torch.bfloat16) else None
twice = {"dtype": low, "batch": 256}
arms = {"fp32": {}, "amp fp16": {"dtype": torch.float16}, "amp bf16": {"dtype": bf16},
        "amp, 2x batch": twice, "amp, 2x batch, rate x 1.41": twice | {"rate": 2**0.5 * RATE}}  # fmt: skip
if bf16 is None:
    print("bf16 would be emulated on this card:", low_precision(device)[1])
    del arms["amp bf16"]
results, begun = {name: [] for name in arms}, time.perf_counter()
for seed in range(5):
    if seed < 3 or time.perf_counter() - begun < 60:  # a slow or busy machine makes do with three
        for name, settings in arms.items():
            results[name].append(train(seed, **settings))

# %%
accuracy = pd.DataFrame({name: [run[0] for run in runs_] for name, runs_ in results.items()})
accuracy.index.name = "seed"
speed = {name: statistics.median(run[2] for run in runs_) for name, runs_ in results.items()}
network = "two convolutions on 8 x 8 images" if tiny else "a ResNet"
print(f"final accuracy in percent, {data['test'].source} data, {network}   ({Evidence.MEASURED})")
print(accuracy.round(2).to_string())
print("images per second (median):", ", ".join(f"{name} {each:,.0f}" for name, each in speed.items()))
differences = accuracy.sub(accuracy["fp32"], axis=0).drop(columns="fp32")
print("\nmean difference from fp32, and its spread over seeds, in percentage points")
print(differences.agg(["mean", "min", "max"]).round(2).to_string())
for name in differences.columns.intersection(["amp fp16", "amp bf16"]):
    print(f"{name} within 2 points of fp32: {abs(differences[name].mean()) < 2}")
    assert not tiny or abs(differences[name].mean()) < 2, f"{name}: unlike fp32; use the same seeds"
assert not tiny or accuracy.min().min() > 20, "guessing gives 10%"

# %%
curves = {name: results[name][0][1] for name in results if name in ("fp32", "amp fp16", "amp bf16")}
show(draw_losses(curves, device=runs[batch, None].device, title="Training loss, seed 0"),
     alt="Loss curves of fp32, fp16 and bf16 lie on top of each other.")  # fmt: skip
reference = torch.tensor(curves.pop("fp32"))
for name, losses in curves.items():
    gap = ((torch.tensor(losses) - reference).abs() / reference).mean().item()
    print(f"{name}: mean distance from the fp32 curve {100 * gap:.2f}%")
    assert not tiny or gap < 0.05, f"{name}: the curve leaves fp32's; use the same seed and order"

# %% [markdown]
# **Read it.** On a CPU the cells assert that the curves lie on each other (a mean distance below
# 5%), that *amp fp16* and *amp bf16* are on average within 2 percentage points of fp32, and that every run
# beats guessing (10%) by far; on a GPU at larger scales they print it. Compare the differences with the
# spread of the fp32 column from seed to seed: an fp32 run beside an fp16 run of another seed would
# have measured the seed. The doubled batch makes half as many steps in the same number of epochs; the
# last two columns show what that costs here, and what the larger rate brings back. Throughput counts for *your*
# processor alone, and moves with its load. Where 16 bits are emulated, as fp16 is on most CPUs, it falls.
#
# **Question.** A script trains with SGD at batch 512 and learning rate 0.1. You double the batch. Which
# rate does the linear rule give?

# %%
rate_for_1024 = ...
check("02.linear_rate", rate_for_1024)

# %% [markdown]
# ## 7. Old names, and what replaced them
#
# | in old scripts | what it was | today |
# |---|---|---|
# | `torch.cuda.amp.autocast()` | autocast, for CUDA alone | `torch.amp.autocast("cuda")` |
# | `torch.cuda.amp.GradScaler()` | the same class, for CUDA alone | `torch.amp.GradScaler("cuda")` |
# | `apex.amp.initialize(..., "O1")` | NVIDIA's library, patched PyTorch's functions | autocast |
# | `apex.amp.initialize(..., "O2")` | an fp16 model with fp32 master weights | autocast, or bf16 |
# | `apex.amp.scale_loss` | loss scaling | `GradScaler` |
# | `apex.optimizers.FusedAdam` | one kernel for the whole update | `Adam(..., fused=True)` |
#
# [Apex](https://github.com/NVIDIA/apex) had to be compiled. Its `amp` was deprecated in favour of PyTorch's and
# then [removed](https://github.com/NVIDIA/apex/pull/1896); its optimizers are still there. PyTorch's
# own fused optimizer is worth a measurement: same weights, less borrowed memory?

# %%
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    torch.cuda.amp.GradScaler(enabled=False)
print(*(f"{w.category.__name__}: {w.message}" for w in seen), sep="\n")


def with_adam(name, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    inputs = torch.ones(4, 512, device=device)

    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return model, measure(step, model=model, optimizer=optimizer, name=name, timed_steps=3)


plain, fused = with_adam("Adam"), with_adam("Adam, fused=True", fused=True)
pairs = zip(plain[0].parameters(), fused[0].parameters(), strict=True)
assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs), "the fused kernel changed the weights"
compare([plain[1], fused[1]], title="Adam, and Adam in one kernel")

# %% [markdown]
# **Read it.** The weights agree to 1e-5; the optimizer step's temporaries are gone. That helps most
# where the peak lies in that step: few images, many parameters.
#
# ## 8. Beside a real card
#
# The rows that were recorded on a GPU, or a line that says there are none yet. The experiment runs fp32,
# TF32, fp16 and bf16, with both stems, and searches the largest batch under the same 16 GB cap.

# %%
batch_columns = ["precision", "image_size", "batch", "peak_bytes", "images_per_second"]
for quantity, columns in [("largest batch", batch_columns), ("step", batch_columns),
                          ("final accuracy", ["precision", "seed", "final_accuracy_percent"])]:  # fmt: skip
    display(recorded_table("resnet50", where={"quantity": quantity, "image_size": 32}, columns=columns))

# %% [markdown]
# ## When to use it
#
# | choice | use when | costs | does not help |
# |---|---|---|---|
# | autocast, bf16 | the device computes bf16 | digits; copies of the weights | states; tiny batches |
# | autocast, fp16, scaler | T4, V100 | range; skipped steps now and then | states; tiny batches |
# | TF32 | A100 and newer, code stays fp32 | digits in products | memory |
# | channels_last | convolutions in 16 bits on a GPU | conversion at the borders | memory |
# | `fused=True` | the peak is in the optimizer step | nothing much | activations |

# %%
score("02", runs[batch, None])
score("02", runs[batch, low])
score("02", mixed[-1])
scoreboard()

# %% [markdown]
# ## Break it, diagnose it
#
# "Why not simply `model.half()`? Then everything halves." So it does. Watch memory, then the loss.

# %%
class Half(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner.half()

    def forward(self, x):
        return self.inner(x.half()).float()


broken = Half(make_model(0)) if tiny else Half(resnet(18, stem="cifar").to(device))
optimizer = torch.optim.Adam(broken.parameters(), foreach=False)
for number in range(3):
    optimizer.zero_grad()
    loss = F.cross_entropy(broken(images[:64]), labels[:64])
    loss.backward()
    gradients = all(p.grad.isfinite().all() for p in broken.parameters())
    optimizer.step()
    weights = all(p.isfinite().all() for p in broken.parameters())
    print(f"step {number}: loss {loss.item():.3f}, gradients finite: {gradients}, weights after: {weights}")
states = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.numel() > 1)
print("state bytes per parameter:", states / sum(p.numel() for p in broken.parameters()))

# %% [markdown]
# **Diagnose it.** Adam's state has half its bytes. But the first step's gradients are finite, and the weights
# after it are not. So forward and backward are innocent: the *optimizer step* broke them. Adam divides by
# $\sqrt{v} + \epsilon$. What are $\epsilon$ and a small squared gradient in fp16?

# %%
print("eps = 1e-8 in fp16:", torch.tensor(1e-8).half().item())
print("(1e-4)^2 in fp16:  ", torch.tensor(1e-4).half().square().item())
cured = make_model(0)
cured_losses = train_amp(cured, torch.optim.Adam(cured.parameters()),
                         [(images[:64], labels[:64])] * 3, torch.float16)  # fmt: skip
print("with autocast and a scaler:", [round(loss, 3) for loss in cured_losses])
assert not weights, "the fp16 model should break here: is eps still 1e-8?"
assert all(loss == loss for loss in cured_losses), "a loss is NaN: keep the weights in fp32"

# %% [markdown]
# Both are 0, so Adam divides by 0. Autocast keeps weights and states in fp32, and that is why it does not halve
# them. In <a href="https://github.com/pytorch/pytorch/issues/8860">an issue of 2018</a> a user met
# such NaNs and raised <code>eps</code> to 1e-4, among other changes. That hides the fault and changes
# the optimizer.
# [PyTorch's documentation](https://docs.pytorch.org/docs/stable/amp.html) says it in one line: do
# not call `half()` on your model when you use autocast.
#
# ## Recap
#
# - Forward and loss inside autocast; then scale, backward, step, update.
# - Activations halve. Parameters, gradients and optimizer state stay. Copies of the weights are added.
# - The gain grows with the batch: none at a few images, nearly a factor of 2 at hundreds (this model).
# - Compare accuracy over paired seeds, or you compare seeds.
#
# ### Test yourself
#
# Your script runs out of memory at batch 8 with a model of 3 billion parameters. A colleague says: "turn on
# mixed precision". What do you expect?
#
# <details><summary>Answer</summary>
#
# Little. States take 16 bytes per parameter, 48 GB, and stay. The copies add 6 GB while forward and
# backward run. Only the activations of 8 examples shrink. What helps is another optimizer, sharding or
# offload.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/beginner/02_mixed_precision.ipynb), in a copy: `make my-labs` makes one. When you
# are done, compare with the [solution](../../solutions/beginner/02_mixed_precision.ipynb).
#
# **References.** Micikevicius and others, *Mixed Precision Training*,
# [arXiv:1710.03740](https://arxiv.org/abs/1710.03740). Goyal and others, *Accurate, Large Minibatch
# SGD*, [arXiv:1706.02677](https://arxiv.org/abs/1706.02677). Malladi and others, *On the SDEs and
# Scaling Rules for Adaptive Gradient Algorithms*, [arXiv:2205.10287](https://arxiv.org/abs/2205.10287).
# PyTorch, [Automatic mixed precision](https://docs.pytorch.org/docs/stable/amp.html) and
# [TensorFloat-32](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
