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
# **Promise.** A ResNet-50 training script does not fit a 16 GB card at batch 1024. You convert it by
# hand to 16-bit arithmetic and find the largest batch that fits, by search: 625 images in fp32, 1245
# in mixed precision (simulated). A toy network shows over five seeds what happens to accuracy, beside
# the published figures for ResNet-50.
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
from functools import partial

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from utils import Evidence, MixedStep, OverBudgetError, budget, check, cifar10, compare, computes
from utils import device as card_of
from utils import draw_losses, draw_peaks, format_bytes, low_precision, measure, recorded_table
from utils import resnet, score, scoreboard, show, simulate, tf32
from utils.data import normalize
from utils.simulation.devices import simulated_device

device = here.meter_device  # where the meter can count: CUDA or CPU
on_gpu = device.type == "cuda"

# %% [markdown]
# ## 1. The peak, in both precisions
#
# One training step as you know it. The line with `autocast` is the new one: with a 16-bit type it turns
# mixed precision on, without one it does nothing. Section 2 explains it.

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


def build():
    torch.manual_seed(0)
    model = resnet(50, stem="cifar")
    return model, torch.optim.Adam(model.parameters())


def metered(batch, dtype=None):
    model, optimizer = build()
    model.to(device)
    with tf32(False):  # appendix A
        return measure(lambda: training_step(model, optimizer, batch, dtype), model=model,
                       optimizer=optimizer, items=batch, unit="images", timed_steps=0,
                       name=f"{'fp32' if dtype is None else 'mixed'}, batch {batch}")


# %%
low, reason = low_precision(device)
fast = computes(device, low)
sizes = {"tiny": [1, 2, 3, 4, 6] if fast else [1, 2, 4], "small": [1, 8, 32, 64], "full": [1, 16, 64, 256]}[here.scale]
runs = {(size, dtype): metered(size, dtype) for dtype in (None, low) for size in sizes}
lines = {name: [runs[size, dtype] for size in sizes] for name, dtype in [("fp32", None), ("mixed", low)]}
half = {"half of fp32": {run.items: run.peak_bytes / 2 for run in lines["fp32"]}}
show(draw_peaks(lines, predicted_bytes=half, title="ResNet-50 with Adam: the peak of a step"),
     alt="Peak memory against the batch size: both precisions begin at the same peak at one image; then "
     "mixed precision rises about half as steeply. A dashed line at half of fp32 lies far below both.")

# %%
peaks = pd.DataFrame({name: {run.items: run.peak_bytes / 2**20 for run in line} for name, line in lines.items()})
peaks.index.name = "images"
peaks["mixed / fp32"] = peaks["mixed"] / peaks["fp32"]
print(f"your bet for one image: {my_bet_ratio}, {Evidence.MEASURED}: {peaks['mixed / fp32'].iloc[0]:.3f}")
if not on_gpu:
    assert (peaks["mixed / fp32"] <= 1).all(), "mixed precision raised a peak: was the model changed?"
    assert peaks["mixed / fp32"].iloc[-1] < 0.96, "at the largest batch it saves: was the model changed?"
peaks.rename(columns={"fp32": "fp32 (MiB)", "mixed": "mixed (MiB)"}).round(2)

# %% [markdown]
# **Read it.** At one image the two peaks are the same. From two images on, mixed precision saves, and each image
# more adds to what it saves. It is never the more expensive of the two. And it is far from one half: at
# these batches the model states fill most of the memory, and they do not shrink.
# Section 3 says why the lines part where they do.
#
# ## What you will be able to do
#
# - Convert a training script to `torch.amp` (automatic mixed precision, AMP), and say what each line does.
# - Say which tensors halve, which stay, which are *added*, and which moment decides the peak.
# - Find the largest batch on a card by search, and set the learning rate for it.
# - Compare accuracy fairly: the same seeds, one change at a time.
#
# Mixed precision trades digits for **memory** and **compute**. A word that is new to you stands in
# the [glossary](../00_glossary.ipynb).

# %% [markdown]
# ## 2. The conversion, by hand
#
# The script in fp32: weights, images, activations and gradients take 4 bytes a number. It trains on the
# same few images four times, so the loss has to fall. The images are CIFAR-10's, or generated ones
# where there is no network; the output says which.

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
data = {split: cifar10(split) for split in ("train", "test")}
few = [next(data["train"].batches(max(sizes), seed=0))] * 4


def fresh(rate=1e-4):
    torch.manual_seed(0)
    model = resnet(50, stem="cifar").to(device)
    return model, torch.optim.Adam(model.parameters(), lr=rate)


fp32_losses = train_fp32(*fresh(), few)
print(f"fp32, {data['train'].source} data: losses", [round(loss, 3) for loss in fp32_losses])
assert fp32_losses[-1] < fp32_losses[0], "the loss did not fall: is the rate still 1e-4?"

# %% [markdown]
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
amp_losses = train_amp(*fresh(), few, low)
print(f"16-bit type here: {low}; {reason}")
print("mixed: losses", [round(loss, 3) for loss in amp_losses])
assert abs(amp_losses[0] / fp32_losses[0] - 1) < 0.05, "same weights, same batch: run from the top"

# %% [markdown]
# **Read it.** Five lines are new or changed. The losses agree at first (same weights and images, fewer
# digits), then drift apart. With bf16 the scaler is switched off and passes everything through: bf16 has the
# range of fp32, so nothing becomes 0 that fp32 would keep. Which type suits your device? The output
# says it, and why. On a T4 or V100, which only *emulate* bf16, the answer is fp16 with a scaler.
#
# <div class="alert alert-warning"><b>Trap.</b> <code>torch.cuda.is_bf16_supported()</code> says True
# on a T4. It counts emulation, which is slow: <a href="https://github.com/pytorch/pytorch/pull/148322">a
# change that was proposed to PyTorch</a> describes how it misleads. Ask
# <code>is_bf16_supported(including_emulation=False)</code>.</div>

# %% [markdown]
# ### Which tensor has which type
#
# PyTorch calls a *forward hook* with what a layer returns. Here hooks note its type in a smaller ResNet
# under autocast. The other rows are a parameter, its gradient, Adam's state and a running mean of batch
# norm. Predict first: which of the seven rows will say `float32`?

# %%
small = resnet(18, stem="cifar").to(device)
adam = torch.optim.Adam(small.parameters())
types = {}


def note(module, inputs, output):
    types[f"output of {type(module).__name__}"] = output.dtype


for module in small.modules():
    if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
        module.register_forward_hook(note)
training_step(small, adam, 2, low)
weight = small.fc.weight
types |= {"parameter": weight.dtype, "its gradient": weight.grad.dtype,
          "Adam's state": adam.state[weight]["exp_avg"].dtype,
          "running mean": small.bn1.running_mean.dtype}
states = {types[n] for n in ("parameter", "its gradient", "Adam's state")}
assert states == {torch.float32}, "autocast leaves the states in fp32: did you call half()?"
del small, adam, weight, module
pd.DataFrame({"type": types}).astype(str)

# %% [markdown]
# **Read it.** Layers return 16-bit numbers. What *stays* from step to step is fp32: parameters,
# gradients, Adam's means. The weights must be: an update is often smaller than the last digit of a
# 16-bit weight and would be lost (lesson 03). Lesson 15 has one table of [who keeps which copy, and
# when](../advanced/15_design_studio.ipynb#2.-On-paper): 14, 16 or 18 bytes per parameter.
#
# **Question.** Autocast makes a 16-bit copy of each weight and keeps it until backward has used it.
# How many bytes per parameter does that *add*?

# %%
added_bytes_per_parameter = ...
check("02.added_bytes", added_bytes_per_parameter)

# %% [markdown]
# ## 3. What halves, and which moment decides
#
# Take $P$ parameters, Adam, batch $b$, and $a$ bytes of activations per image in fp32. Two moments
# compete for the peak:
#
# | moment | fp32 | mixed |
# |---|---|---|
# | backward begins (no gradients yet) | $12P + ab$ | $12P + 2P + ab/2$ |
# | optimizer step (no activations any more) | $16P$ | $16P$ |
#
# The peak is the larger of the two. First the upper row: what is alive when backward begins.

# %%
def when_backward_begins(measurement):
    spans = measurement.timeline.spans
    return dict(measurement.timeline.at(next(s.start_ns for s in spans if s.name == "backward")))


most = max(sizes)
moment = {key: when_backward_begins(run) for key, run in runs.items()}
names = ["parameters", "optimizer state", "buffers", "cast weights", "activations"]
table = pd.DataFrame({"fp32": moment[most, None], "mixed": moment[most, low]}).reindex(names).fillna(0)
P = int(table.loc["parameters", "fp32"]) // 4
ratio = (table["mixed"] / table["fp32"]).round(3)
assert (ratio[names[:3]] == 1).all(), "autocast does not touch the states"
assert 0.5 <= ratio["activations"] < 0.56, "activations halve; some stay fp32"
print(f"MiB when backward begins, {most} images   ({Evidence.MEASURED})")
(table / 2**20).round(2).assign(**{"mixed / fp32": ratio.astype(str).replace("inf", "added")})

# %% [markdown]
# **Read it.** Parameters, Adam's state and the running statistics of batch norm do not move by a
# byte. Activations shrink to about half. *Cast weights*, the 16-bit copies, are added: $2P$ says the
# formula, and it is a little less, because batch norm's weights are not cast.

# %%
def predicted_peak(batch, mixed):
    activations = moment[1, None]["activations"] * batch
    begins = 14 * P + activations / 2 if mixed else 12 * P + activations
    return max(begins, 16 * P)


guess = pd.DataFrame({name: {size: predicted_peak(size, name == "mixed") / 2**20 for size in sizes}
                      for name in ("fp32", "mixed")})
guess.index.name = "images"
both = pd.concat({"predicted": guess, "measured": peaks[["fp32", "mixed"]]}, axis=1).round(1)
added, saved = moment[1, low]["cast weights"], moment[1, None]["activations"] - moment[1, low]["activations"]
print(f"one image, when backward begins: copies add {format_bytes(added)}, activations give back {format_bytes(saved)}")
for name, kind in [("fp32", None), ("mixed", low)]:
    print(f"{name}: at one image the peak is in the {runs[1, kind].peak_phase}, at {most} in {runs[most, kind].peak_phase}")
both

# %% [markdown]
# **Read it.** At one image the copies take more than the activations give back, *at the moment when
# backward begins*. That costs nothing: the peak lies in the optimizer step, where there are neither. In
# the formula the lines part at $ab > 4P$. The measured peaks are higher and part earlier: while the first gradients
# appear, most activations are alive, and the formula puts the two into different moments.
#
# So mixed precision never raises the peak of *this* network, and it saves as soon as activations decide it.

# %%
compare([runs[size, kind] for size in (1, most) for kind in (None, low)],
        title="ResNet-50 with Adam, one image and several")

# %% [markdown]
# Can it raise a peak? **Predict** for a single layer of four million weights, and two rows of input.

# %%
def one_layer(make, kind):
    torch.manual_seed(0)
    model, rows = nn.Linear(1024, 4096).to(device), torch.randn(2, 1024, device=device)
    optimizer = make(model.parameters())

    def step():
        optimizer.zero_grad()
        with torch.amp.autocast(device.type, dtype=kind, enabled=kind is not None):
            loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()

    return measure(step, model=model, optimizer=optimizer, timed_steps=0).peak_bytes


makers = {"SGD": torch.optim.SGD, "SGD with momentum": partial(torch.optim.SGD, momentum=0.9),
          "fused Adam": partial(torch.optim.Adam, fused=True), "Adam": torch.optim.Adam}
raised = {name: one_layer(make, low) / one_layer(make, None) for name, make in makers.items()}
print(*[f"{name:<18} peak, mixed over fp32: {ratio:.2f}" for name, ratio in raised.items()], sep="\n")
assert raised["SGD"] > 1.1, "two gradients of the weight should be alive together"  # a GPU's workspace is in both

# %% [markdown]
# **Read it.** Backward makes the weight's gradient in 16 bits, then its fp32 form, and for a moment both are alive: more than
# fp32 ever holds. (The 16-bit copy is gone by then, since no gradient of the rows asks for it.) Only Adam's step, with
# temporaries of its own, is higher still. Weights without activations gain no memory from mixed precision.
#
# **Question.** Which category is it that halves? Answer with its name in the bars, in quotes.

# %%
what_halves = ...
check("02.what_halves", what_halves)

# %% [markdown]
# ## 4. What fills a 16 GB card
#
# A card with "16 GB" on its box does not give you 16 x 10^9 bytes, nor 16 GiB. A V100 reports 15.75 GiB
# (published: logs of its users), and the CUDA context takes some 0.5 GiB of that before your first tensor (an
# assumption of the course until a GPU is recorded).
#
# **Simulation.** Your own model and step run on tensors that have a shape, a type and a lifetime, and no
# data. Each allocation is counted as a GPU's allocator would count it, so a step of any size can be metered
# on a laptop; [05a](../intermediate/05a_trusting_simulation.ipynb) says how far to trust it. A V100 has no
# bf16, so mixed means fp16. (A scaler looks at values, which simulated tensors lack: it is left out.)

# %%
v100 = card_of("V100 16GB")
usable = simulated_device(v100.name).usable_bytes
card = budget(min(usable, here.memory_bytes) if on_gpu else usable)
card_low = low if on_gpu else torch.float16
print(f"{v100.name} reports {format_bytes(v100.memory_bytes)}; beside the context {format_bytes(card.limit_bytes)}")


def on_the_card(batch, dtype=None):
    name = f"{'fp32' if dtype is None else 'mixed'}, batch {batch}"
    if on_gpu:  # for real, with the allocator capped
        model, optimizer = build()
        model.to(device)
        return measure(lambda: training_step(model, optimizer, batch, dtype), model=model, name=name,
                       optimizer=optimizer, items=batch, unit="images", within=card, timed_steps=0)
    return simulate(build, lambda m, o: training_step(m, o, batch, dtype), device=v100.name,
                    items=batch, unit="images", name=name, within=card)


# %%
try:
    on_the_card(1024)
except OverBudgetError as error:
    print(error)

# %% [markdown]
# **Read it.** Batch 1024 in fp32 does not fit. The message names the phase, the module and the category
# that grew. Now search. Two smaller batches give a straight line, and the line a guess. A guess is no
# proof, so the search runs outwards from it, until one size fits and the next does not.

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
limits = {"fp32": find_limit(None, 256, 512), "mixed": find_limit(card_low, 512, 1024)}
kind = limits["fp32"][2][512].evidence
for name, (limit, slope, tried) in limits.items():
    context = int((v100.memory_bytes - usable) / slope)
    print(f"{name:<6} largest batch {limit:>5}, {slope / 1e6:6.2f} MB an image, {len(tried)} steps tried,",
          f"{context} images more if the context took nothing   ({kind})")
limit_fp32, limit_mixed = limits["fp32"][0], limits["mixed"][0]
print(f"{limit_mixed / limit_fp32:.2f} times the batch on the same card")
assert 512 <= limit_fp32 < 1024 <= limit_mixed or on_gpu, "the limits moved: were model or card changed?"

# %%
fp32_runs, mixed_runs = ([run for _, run in sorted(tried.items()) if run] for _, _, tried in limits.values())
last = fp32_runs[-1]
line = {last.items: last.peak_bytes, 1024: last.peak_bytes + limits["fp32"][1] * (1024 - last.items)}
show(draw_peaks({"fp32": fp32_runs, "mixed": mixed_runs}, limits={"what the card gives": card.limit_bytes},
                predicted_bytes={"fp32, its line goes on": line}, title="ResNet-50, Adam: what fills a 16 GB card"),
     alt="Peak memory against batch size, two straight lines. fp32 meets the card's limit a little above "
     "600 images, mixed precision above 1200; a dashed line carries fp32 on to 1024.")

# %% [markdown]
# **Read it.** At these sizes nearly everything is activations, so here "half" is nearly true. The model
# decides, too: the stem of this ResNet keeps 32 x 32 images at full size. The ImageNet stem shrinks them
# first.

# %%
def build_imagenet_stem():
    model = resnet(50, stem="imagenet")
    return model, torch.optim.Adam(model.parameters())


other = simulate(build_imagenet_stem, lambda m, o: training_step(m, o, 1024), device=v100.name,
                 items=1024, unit="images", name="ImageNet stem, batch 1024")
activations = when_backward_begins(other)["activations"]
print(f"ImageNet stem: {activations / 1024 / 1e6:.2f} MB of activations per image, peak",
      format_bytes(other.peak_bytes), f"({other.evidence})")

# %% [markdown]
# ## 5. Twice the batch: speed, accuracy, learning rate
#
# A doubled batch means half as many steps per epoch, each with a less noisy gradient. Two rules of
# thumb: with SGD multiply the rate by 2 (the *linear rule*, Goyal and others 2017), with Adam by $\sqrt 2$ (Malladi
# and others 2022).
#
# What does it do to ResNet-50 itself? NVIDIA published its recipe's results on ImageNet, with eight V100 of 16 GB,
# as mean and spread over runs:

# %%
source = "NVIDIA/DeepLearningExamples, PyTorch ResNet50 v1.5, README"
pd.DataFrame(
    {"fp32": ["77.01 +/- 0.16", "78.30 +/- 0.16", "367"], "mixed (fp16)": ["76.88 +/- 0.16", "78.25 +/- 0.12", "1200"]},
    index=["top-1 after 90 epochs (%)", "top-1 after 250 epochs (%)", "images/s on one V100"],
).rename_axis(f"{Evidence.PUBLISHED}: {source}")

# %% [markdown]
# **Read it.** In this table the accuracies differ by less than the runs' spread. (In the README's table for a DGX-2 one
# pair differs by more: 75.81 +/- 0.08 and 76.04 +/- 0.05.) In this recipe one V100 trains 3.3 times as fast. That is the evidence for ResNet-50. Below you make the comparison yourself, on a **toy network** of two
# convolutions and 8 x 8 pixels, which a laptop trains in seconds. It shows how to compare, and its
# result holds for it alone.
#
# One run says little, since another seed moves it as well. So: five seeds, and for each seed the same
# weights and the same order of images in every arm. One thing changes at a time.

# %%
tiny = here.scale == "tiny" or not on_gpu
count = 4096 if tiny else {"small": 5120, "full": 10_000}[here.scale]
EPOCHS, RATE = (2, 1e-2) if tiny else (4, 1e-3)


def as_tensors(split, count):
    images = normalize(data[split].images[:count])
    images = F.avg_pool2d(images, 4) if tiny else images
    return images.to(device), data[split].labels[:count].to(device)


def make_model(seed):
    torch.manual_seed(seed)
    if not tiny:  # on a GPU: a ResNet
        return resnet({"small": 18, "full": 50}[here.scale], stem="cifar").to(device)
    convolutions = [nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(),
                    nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 10)).to(device)


images, labels = as_tensors("train", count)
test_images, test_labels = as_tensors("test", 2000)

# %% [markdown]
# `MixedStep` is your loop from section 2 as an object; the last lines check that its losses are yours.

# %%
def train(seed, dtype=torch.float32, batch=128, rate=RATE):
    model = make_model(seed)
    step = MixedStep(model, torch.optim.Adam(model.parameters(), lr=rate), dtype=dtype)
    order = torch.Generator().manual_seed(seed)
    with tf32(False):
        losses = [step(images[part], labels[part]) for _ in range(EPOCHS)
                  for part in torch.randperm(count, generator=order).split(batch)]
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in test_images.split(250)])
    return 100 * (guesses == test_labels).float().mean().item(), torch.stack(losses).tolist()


model = make_model(0)
mine = train_amp(model, torch.optim.Adam(model.parameters()), [(images[:64], labels[:64])] * 3, torch.float16)
step = MixedStep(model := make_model(0), torch.optim.Adam(model.parameters()), dtype=torch.float16)
theirs = [step(images[:64], labels[:64]).item() for _ in range(3)]
assert mine == theirs or on_gpu, "MixedStep is your loop: compare the two, line by line"

# %%
settings = {"batch 128": {}, "batch 256": {"batch": 256}, "batch 256, rate x 1.41": {"batch": 256, "rate": 2**0.5 * RATE}}
FP16, MIXED = "mixed, fp16", f"mixed, {'fp16' if low is torch.float16 else 'bf16'}"
arms = {("batch 128", FP16): {"dtype": torch.float16}}
arms |= {(name, "fp32"): given for name, given in settings.items()}
arms |= {(name, MIXED): given | {"dtype": low} for name, given in settings.items()}
results = {arm: [train(seed, **given) for seed in range(5)] for arm, given in arms.items()}
final = pd.DataFrame({arm: [accuracy for accuracy, _ in found] for arm, found in results.items()})
final.columns = final.columns.set_names(["setting", "precision"])
assert not tiny or final.min().min() > 20, "guessing gives 10%: is the rate unchanged?"
print(f"final accuracy in percent over five seeds, {data['test'].source} data, "
      f"{'the toy network' if tiny else 'a ResNet'}   ({Evidence.MEASURED})")
final.agg(["mean", "min", "max"]).T.round(2).sort_index()

# %%
base = final["batch 128", "fp32"]
print(f"fp32, one seed to the next: {base.max() - base.min():.2f} points between the best and the worst")
for setting, precision in [("batch 128", FP16), *((name, MIXED) for name in settings)]:
    gap = final[setting, precision] - final[setting, "fp32"]
    print(f"{setting + ', ' + precision:<32} minus fp32: mean {gap.mean():+.2f}, from {gap.min():+.2f} to {gap.max():+.2f}")
    assert not tiny or abs(gap.mean()) < 2, "unlike fp32 by over 2 points: the same seeds?"
curves = {name: results["batch 128", name][0][1] for name in dict.fromkeys(("fp32", FP16, MIXED))}
print(f"fp32's loss, seed 0: {curves['fp32'][0]:.2f} to {curves['fp32'][-1]:.2f}")
show(draw_losses(curves, minus="fp32", device=runs[most, None].device, title="Training loss, seed 0: the difference from fp32"),
     alt="The losses of both 16-bit runs minus that of fp32, step by step: they stay close to zero.")

# %% [markdown]
# **Read it.** In each setting the means differ by less than the seeds of one row do; fp16 lies a little above fp32 in
# each seed. The doubled
# batch makes half as many steps in the same number of epochs, and costs accuracy here in *both* precisions:
# it is the batch, not the bits. Whether the larger rate helps, five seeds of a toy cannot tell. The losses
# differ by a hundredth or two.
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
TOP = """# pip install torch torchvision
# python resnet50_amp.py [batch] [epochs] [fake: images without a download]
import sys
import torch
import torch.nn.functional as F
from torchvision import datasets, models, transforms
"""
MAIN = """batch, epochs, fake = int((sys.argv[1:] or ["1024"])[0]), int((sys.argv[2:] or ["10"])[0]), "fake" in sys.argv
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize(3 * [0.47], 3 * [0.25])])
train, test = (datasets.FakeData(2 * batch, (3, 32, 32), 10, to_tensor) if fake else
               datasets.CIFAR10("data", part, to_tensor, download=True) for part in (True, False))
model = models.resnet50(num_classes=10)
model.conv1, model.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False), torch.nn.Identity()
optimizer = torch.optim.Adam(model.to(device).parameters(), lr=1e-3)
for epoch in range(epochs):
    order = torch.utils.data.DataLoader(train, batch, shuffle=True, drop_last=True)
    losses = train_amp(model.train(), optimizer, order, torch.bfloat16 if bf16 else torch.float16)
    model.eval()
    with torch.no_grad():
        right = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in torch.utils.data.DataLoader(test, 250))
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, accuracy {right / len(test):.1%}", flush=True)
print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB (allocated); simulated for batch 1024 on a V100: PEAK GiB")
"""

# %%
at_1024 = simulate(build, lambda m, o: training_step(m, o, 1024, torch.float16), device=v100.name, name="batch 1024")
here.write_script("resnet50_amp.py", TOP, train_amp, MAIN.replace("PEAK", f"{at_1024.peak_bytes / 2**30:.2f}"))
recorded_table("resnet50", where={"quantity": "largest batch", "image_size": 32})

# %% [markdown]
# **Read it.** Simulated: batch 1024 fits in mixed precision and not in fp32 (section 4). Published: NVIDIA's accuracies
# agree within their spread. Measured here: a toy's accuracy, five seeds. Not shown: ResNet-50's own accuracy on
# CIFAR-10, and the card's time; the script measures both.

# %% [markdown]
# ## When to use it
#
# | choice | use when | costs | does not help |
# |---|---|---|---|
# | autocast, bf16 | the device computes bf16 | digits | states; tiny batches |
# | autocast, fp16, scaler | T4, V100 | range; skipped steps now and then | states; tiny batches |
# | TF32 (appendix A) | A100 and newer, code stays fp32 | digits in products | memory |
# | `fused=True` (appendix B) | the peak is in the optimizer step | nothing much | activations |

# %%
score("02", runs[most, None])
score("02", runs[most, low])
score("02", mixed_runs[-1])
scoreboard("02")

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


broken = Half(make_model(0))
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
                         [(images[:64], labels[:64])] * 3, torch.float16)
print("with autocast and a scaler:", [round(loss, 3) for loss in cured_losses])
assert not weights, "the fp16 model should break here: is eps still 1e-8?"
assert all(loss == loss for loss in cured_losses), "a loss is NaN: keep the weights in fp32"

# %% [markdown]
# Both are 0, so Adam divides by 0. Autocast keeps weights and states in fp32, and that is why it does not
# halve them. In [an issue of 2018](https://github.com/pytorch/pytorch/issues/8860) a user met such NaNs,
# raised `eps` to 1e-4 and clamped the convolutions. That hides the fault and changes the optimizer.
# [PyTorch's documentation](https://docs.pytorch.org/docs/stable/amp.html) says it in one line: do
# not call `half()` on your model when you use autocast.
#
# ## Recap
#
# - Forward and loss inside autocast; then scale, backward, step, update.
# - Activations halve. Parameters, gradients and optimizer state stay. Copies of the weights are added.
# - The peak decides. At one image it does not move; at hundreds it nearly halves (this model).
# - Compare accuracy over paired seeds and change one thing, or you compare seeds.
#
# ### Test yourself
#
# A model of 3 billion parameters, trained with Adam in fp32, runs out of a 40 GB card at a batch of one text of 128
# tokens. A colleague says: "turn on mixed precision". What do you expect?
#
# <details><summary>Answer</summary>
#
# Nothing. States take 16 bytes per parameter, 48 GB, and stay. At so small a batch the peak lies in the
# optimizer step, where neither activations nor copies are alive: it does not move. What helps is another
# optimizer, sharding or offload.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/beginner/02_mixed_precision.ipynb), in a copy: `make my-labs` makes one. When you
# are done, compare with the [solution](../../solutions/beginner/02_mixed_precision.ipynb). Lesson
# [03](03_when_numbers_break.ipynb) breaks numbers on purpose.

# %% [markdown]
# ## Appendix A: TF32 and the layout of images
#
# **TF32** is no storage type: tensors stay fp32, 4 bytes, and no memory is saved. GPUs from the A100 on read only 10
# of the 23 binary digits behind the point of each factor of a product, and add in fp32. The same rounding by
# hand shows what it costs in digits.

# %%
def rounded_to_tf32(x):
    bits = x.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


torch.manual_seed(0)
left, right = torch.randn(256, 512), torch.randn(512, 256)
exact = left.double() @ right.double()
factors = {"fp32": lambda x: x, "tf32, by hand": rounded_to_tf32,
           "fp16": lambda x: x.half().float(), "bf16": lambda x: x.bfloat16().float()}
errors = {name: ((cast(left) @ cast(right) - exact).norm() / exact.norm()).item() for name, cast in factors.items()}
pd.Series(errors).map("{:.1e}".format).rename(f"relative error of a product ({Evidence.MEASURED})").to_frame()

# %%
cards = [card_of(name) for name in ("V100 16GB", "A100 40GB", "H100")]
kinds = ("fp32", "tf32", "fp16", "bf16")
rates = {each.name: [getattr(each, f"{kind}_tflops") or "none" for kind in kinds] for each in cards}
with tf32(True):  # the settings of today: one for products, one for convolutions
    print("matmul:", torch.backends.cuda.matmul.fp32_precision, " convolution:", torch.backends.cudnn.conv.fp32_precision)
pd.DataFrame(rates, index=[f"{kind}, TFLOP/s" for kind in kinds]).T.rename_axis(f"peaks ({Evidence.PUBLISHED})")

# %% [markdown]
# **Read it.** TF32 has the digits of fp16 and the range of fp32. The rates are peaks for dense matrices (sources in
# `utils/catalog`), in 10^12 operations a second; no training step reaches them. By default TF32 is on for convolutions and off
# for products. The older `allow_tf32` still exists; reading it can fail once a new name is set.
#
# `model.to(memory_format=torch.channels_last)` stores the colours of a pixel next to each other, which
# 16-bit convolutions on GPUs prefer. It moves numbers and changes none, and saves no memory.
#
# ## Appendix B: old names, and a fused optimizer
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
# [Apex](https://github.com/NVIDIA/apex)'s fused kernels had to be compiled. Its `amp` was deprecated in favour of PyTorch's and
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

    return model, measure(step, model=model, optimizer=optimizer, name=name, timed_steps=0)


# %%
plain, fused = with_adam("Adam"), with_adam("Adam, fused=True", fused=True)
pairs = zip(plain[0].parameters(), fused[0].parameters(), strict=True)
assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs), "the fused kernel changed the weights"
compare([plain[1], fused[1]], title="Adam, and Adam in one kernel")

# %% [markdown]
# **Read it.** The weights agree to 1e-5; the optimizer step's temporaries are gone. That helps most
# where the peak lies in that step: few images, many parameters.
#
# **References.** Micikevicius and others, *Mixed Precision Training*,
# [arXiv:1710.03740](https://arxiv.org/abs/1710.03740). Goyal and others, *Accurate, Large Minibatch
# SGD*, [arXiv:1706.02677](https://arxiv.org/abs/1706.02677). Malladi and others, *On the SDEs and
# Scaling Rules for Adaptive Gradient Algorithms*, [arXiv:2205.10287](https://arxiv.org/abs/2205.10287).
# NVIDIA, [ResNet50 v1.5 for PyTorch](https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5).
# PyTorch, [Automatic mixed precision](https://docs.pytorch.org/docs/stable/amp.html) and
# [TensorFloat-32](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
