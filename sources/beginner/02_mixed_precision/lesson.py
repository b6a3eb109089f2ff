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
# **The question.** A ResNet-50 for images of 32 x 32 pixels does not fit a 16 GB card at batch 1024. Does it fit once
# it computes in 16 bits?
#
# **Promise.** You build mixed precision by hand, see which moment of a step decides its memory, and predict the largest batch
# that a T4, a card of 16 GB, holds.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 50, and 90 for the lab | any laptop; a GPU if you have one; beyond Binder's 1 GB of memory | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# "Mixed precision halves training memory." Train ResNet-50 on **one** image, with PyTorch's default Adam. The *peak* is the
# most memory that the step holds at any moment. What is it in mixed precision, divided by that in fp32?

# %%
my_bet_ratio = 0.5

# %% tags=["setup"]
here = setup("beginner/02")

# %%
from dataclasses import replace

import pandas as pd
import torch
import torch.nn.functional as F
from torch.func import functional_call

from evidence.record import recorded
from evidence.validation.tables import source, table
from utils import Evidence, OverBudgetError, check, choose_autocast_dtype, cifar10, draw_breakdown, format_bytes
from utils import measure, resnet, show, simulate, tf32
from utils.lessons.lesson_02.figures import as_simulated, draw_moments, draw_on_the_card
from utils.lessons.lesson_02.gradients import at_convolutions
from utils.lessons.lesson_02.record_table import record_table
from utils.lessons.lesson_02.script import MAIN, TOP
from utils.lessons.lesson_02.toy import shrunk, shuffled, toy_network
from utils.simulation.devices import simulated_device

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# ## 1. The peak falls only where backward decides
#
# The step below is the usual one, but for `autocast`, which turns mixed precision on. The GPU, a T4, is *simulated*: tensors
# have shapes, types and lifetimes, but no data, and each allocation is counted as a GPU's allocator would count it (lesson
# [05a](../intermediate/05a_trusting_simulation.ipynb) tests that). New words stand in the [glossary](../00_glossary.ipynb). In
# the picture, look where each line begins to rise.

# %%
def training_step(model, optimizer, batch, dtype=None, keep=False):
    at = next(model.parameters()).device
    images = torch.randn(batch, 3, 32, 32, device=at)
    labels = torch.randint(0, 10, (batch,), device=at)
    optimizer.zero_grad(set_to_none=not keep)  # frees the gradients, or keeps them as zeros
    with torch.amp.autocast(at.type, dtype=dtype, enabled=dtype is not None):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()  # section 2 adds a loss scale: a few numbers, which move no peak
    optimizer.step()


def build(fused=None):
    torch.manual_seed(0)
    model = resnet(50, stem="cifar")  # its first layers keep an image of 32 x 32 pixels at full size
    return model, torch.optim.Adam(model.parameters(), fused=fused)


def on_the_card(batch, dtype=None, gpu="T4", within=None, fused=None, keep=False):
    return simulate(lambda: build(fused), lambda m, o: training_step(m, o, batch, dtype, keep), device=gpu, within=within,
                    items=batch, unit="images", name=f"{'mixed' if dtype else 'fp32'}, batch {batch}")

# %%
FP16, runs = torch.float16, {}


def run(size, dtype=None):
    runs[size, dtype] = runs.get((size, dtype)) or on_the_card(size, dtype)
    return runs[size, dtype]


precisions = {"fp32": None, "mixed": FP16}
lines = {name: [run(size, dtype) for size in (1, 2, 4, 5, 8, 9, 16, 32, 64)] for name, dtype in precisions.items()}
show(draw_moments(lines, title="The peak of a step: ResNet-50 (32 x 32, CIFAR stem), Adam, simulated for a T4"),
     alt="Peak memory against the batch size. Up to 4 images both peaks lie in the optimizer step, on one flat line. "
     "Beyond, backward decides: fp32 rises from 5 images on, mixed precision from 9 on and about half as steeply.")

# %% jupyter={"source_hidden": true}
def at_one_image(dtype):
    model, optimizer = build()
    model.to(device)
    with tf32(False):  # TF32 would round the factors of products to 10 binary digits behind the point
        return measure(lambda: training_step(model, optimizer, 1, dtype), model=model, optimizer=optimizer,
                       timed_steps=0, name=f"{'mixed' if dtype else 'fp32'}, batch 1, here")


# %%
low, reason = choose_autocast_dtype(device)
real = [at_one_image(dtype) for dtype in (None, low)]
print(f"{Evidence.MEASURED} here, at one image: {format_bytes(real[0].peak_bytes)} in fp32, {format_bytes(real[1].peak_bytes)} in {low}")
print(f"your bet for the ratio: {my_bet_ratio}, and it is {real[1].peak_bytes / real[0].peak_bytes:.3f}")
peaks = pd.DataFrame({name: {r.items: r.peak_bytes / 2**20 for r in line} for name, line in lines.items()})
peaks["mixed / fp32"] = peaks["mixed"] / peaks["fp32"]
assert (peaks["mixed / fp32"] <= 1).all() and peaks["mixed / fp32"].iloc[-1] < 0.7, "was the model changed?"
peaks.loc[[1, 4, 16, 64]].rename_axis("images").rename(columns={name: f"{name} (MiB, {Evidence.SIMULATED})" for name in lines}).round(2)

# %% [markdown]
# **Read it.** The bet's answer is 1, simulated and measured. (A CPU's Adam makes fewer temporaries, so its peak is lower.)
# On the picture's left both peaks lie in the optimizer step, which 16 bits do not touch. On its right both lie in backward,
# where activations are alive, and those halve. At 64 images the ratio is 0.6 and not 0.5, since not everything halves.

# %% [markdown]
# ## 2. The conversion, by hand
#
# A GPU's *tensor cores* multiply fp16 numbers fast, and sum in fp32. So convolutions and linear layers compute in fp16, on 16-bit
# copies, or *casts*, of weights and inputs. BatchNorm takes 16-bit inputs, but its few weights get no copy. Yet fp16 has few
# digits and a small range: from 65,520 on a number is infinite, and below $2^{-25}$ it is 0. Three rules guard against that:
#
# - **Master weights.** The optimizer updates fp32 weights.
# - **An fp32 loss.** Its exponentials and sums are fp32, too.
# - **A loss scale.** The loss is multiplied before backward, so that small gradients stay above 0, and the fp32 gradients
#   are divided after it. If one is not finite, the step is skipped and the scale halved. After `patience` good steps it
#   doubles.

# %%
def train_by_hand(model, optimizer, batches, scale, patience):
    good, history, products = 0, [], (torch.nn.Conv2d, torch.nn.Linear)
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, products)]
    for images, labels in batches:
        optimizer.zero_grad()
        copies = {f"{path}.{name}": master.half() for path, layer in layers for name, master in layer.named_parameters()}
        logits = functional_call(model, copies, images.half())  # BatchNorm has no copies: it uses its fp32 weights
        loss = F.cross_entropy(logits.float(), labels)  # exponentials and sums: in fp32
        (scale * loss).backward()  # a copy's fp16 gradient goes through the cast, and is fp32 at its master
        for master in model.parameters():
            master.grad /= scale
        finite = all(master.grad.isfinite().all() for master in model.parameters())
        history.append({"loss": loss.item(), "scale": int(scale), "step": "made" if finite else "skipped"})
        if finite:
            optimizer.step()  # fp32 gradients, states and weights
        good = good + 1 if finite else 0
        if not finite:
            scale /= 2
        elif good == patience:
            scale, good = scale * 2, 0
    return history, scale


# %% [markdown]
# Now PyTorch's two calls. **`torch.amp.autocast`** chooses a type for each operation: 16 bits for matrix products and
# convolutions, fp32 for what needs digits or range, such as losses ([CUDA's
# list](https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32)). Most others follow their
# input. *Hooks*, functions that PyTorch calls at a set point, note the types in this ResNet:

# %%
def types_of_a_step(model, optimizer, dtype):
    seen, (images, labels) = {}, (torch.randn(2, 3, 32, 32, device=device), torch.tensor([0, 1], device=device))

    def note(layer, given, out):  # one row for each kind of layer and type of its input
        seen.setdefault((type(layer).__name__, given[0].dtype), {"layer": layer, "output": out.dtype})

    for layer in model.to(device).modules():
        layer.register_forward_hook(note)
    with torch.amp.autocast(device.type, dtype=dtype):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    for row in seen.values():
        if (weight := getattr(row.pop("layer"), "weight", None)) is not None:
            row |= {"weight": weight.dtype, "gradient": weight.grad.dtype, "Adam's state": optimizer.state[weight]["exp_avg"].dtype}
    return [{"layer": name, "input": given} | row for (name, given), row in seen.items()] + [{"layer": "loss", "output": loss.dtype}]


# %%
of_layers = pd.DataFrame(types_of_a_step(*build(), FP16)).set_index("layer")
of_layers.loc[["Conv2d", "BatchNorm2d", "ReLU", "Linear", "loss"]].map(lambda dtype: str(dtype).removeprefix("torch.")).replace("nan", "")

# %% [markdown]
# **Read it.** Behind the images these layers take and give 16 bits. Weights, gradients, Adam's state and the loss are fp32.
#
# **`torch.amp.GradScaler`** is the loss scale with its check. Old code takes autocast and scaler from `torch.cuda.amp`, or
# uses NVIDIA's Apex.

# %%
def train_amp(model, optimizer, scaler, batches, dtype):
    losses = []
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.amp.autocast(device.type, dtype=dtype, enabled=dtype is not None):  # new; None is fp32
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()  # was: loss.backward()
        scaler.step(optimizer)  # was: optimizer.step()
        scaler.update()  # new
        losses.append(loss.item())
    return losses


# %% [markdown]
# Both train one small network, with BatchNorm, on the same 12 batches. Compare the two fp16 columns, and look at the step after
# the scale has doubled.

# %%
images, labels = shrunk(cifar10("train"), 256)  # 8 x 8 pixels
few = list(shuffled((images.to(device), labels.to(device)), 64, 3, seed=0))


def toy():
    model = toy_network(seed=0).to(device)  # convolutions with BatchNorm and ReLU, and a linear layer
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def by_library(dtype):
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**18, growth_interval=8, enabled=dtype is FP16)
    return train_amp(*toy(), scaler, few, dtype), scaler.get_scale()


# %%
by_hand, last_scale = train_by_hand(*toy(), few, scale=2.0**18, patience=8)
losses, library_scale = by_library(FP16)
steps = pd.DataFrame(by_hand).assign(library=losses, bf16=by_library(torch.bfloat16)[0], fp32=by_library(None)[0])
gap = (steps["loss"] / steps["library"] - 1).abs().max()
print(f"by hand and autocast + GradScaler: losses at most {gap:.1e} apart (relative), last scales {last_scale:,.0f} and {library_scale:,.0f}")
assert gap < 1e-3 and last_scale == library_scale, "sums in another order may part the losses by 1e-3, no more"
assert {"made", "skipped"} == set(steps["step"]), "a doubled scale should be too large here"
steps.rename(columns={"loss": "fp16 by hand", "library": "fp16 library"}).round(4)

# %% [markdown]
# **Read it.** Both give the same losses and last scale. After eight good steps the scale doubles, gradients overflow,
# and one step is skipped. All losses end lower than they began. bf16, the other 16-bit type, needs no scaler: it has fp32's
# range, and three binary digits fewer than fp16.
#
# <div class="alert alert-warning"><b>Trap.</b> A T4 or V100 has no bf16 units, yet
# <code>torch.cuda.is_bf16_supported()</code> says True: it counts <a
# href="https://github.com/pytorch/pytorch/pull/115924">emulation</a>. Ask
# <code>is_bf16_supported(including_emulation=False)</code>.</div>
#
# The loop also fits ResNet-50. One step, on two small images:

# %%
def one_step(train):
    model = build()[0].to(device)
    told = train(model, torch.optim.SGD(model.parameters(), lr=0.1))  # unlike Adam's, its step tells a gradient's size
    return told, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


two = [(torch.randn(2, 3, 16, 16, device=device), torch.tensor([0, 1], device=device))]
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8)
([row], _), weights_by_hand = one_step(lambda model, optimizer: train_by_hand(model, optimizer, two, scale=2.0**8, patience=8))
[loss], weights = one_step(lambda model, optimizer: train_amp(model, optimizer, scaler, two, FP16))
print(f"ResNet-50: loss {row['loss']:.4f} by hand, {loss:.4f} by library; "
      f"after the step ({row['step']}), weights at most {(weights_by_hand - weights).abs().max():.1e} apart")
assert abs(row["loss"] / loss - 1) < 1e-3, "by hand and by library should compute the same"
del weights_by_hand, weights

# %% [markdown]
# ### Without a scale, small gradients become 0
#
# Backward of this ResNet, untrained, runs in fp32 for four random images. Their loss is divided as in a batch of 1024, but
# BatchNorm sees four. The gradients at all convolutions' outputs are rounded to fp16, under four scales.

# %%
gradients, shares = at_convolutions(build()[0].to(device), images=4, batch=1024), {}
for scale in (1, 2**8, 2**16, 2**32):
    low = (gradients * scale).half()
    shares[f"{scale:,}"] = {"become 0": (low == 0).float().mean().item(), "become infinite": low.isinf().float().mean().item()}
of_scales = pd.DataFrame(shares).T.rename_axis("scale")
assert of_scales["become 0"].is_monotonic_decreasing, "a larger scale should lose fewer gradients"
print(f"{len(gradients):,} gradients ({Evidence.MEASURED} in fp32, here), rounded to fp16")
of_scales.map("{:.2%}".format)

# %% [markdown]
# **Read it.** Without a scale 6% of these gradients become 0. A scale of 256 saves nearly all; PyTorch begins at 65,536. A much
# larger one makes infinities. What the zeros would cost in training is not shown.
#
# ### Break it, diagnose it: why not `model.half()`?
#
# It would halve weights, gradients and Adam's state, too. One step of the small network:

# %%
broken = toy_network(seed=0).half().to(device)
optimizer = torch.optim.Adam(broken.parameters())
images, labels = few[0]
F.cross_entropy(broken(images.half()).float(), labels).backward()
gradients = torch.cat([p.grad.flatten() for p in broken.parameters()])
optimizer.step()
weights = torch.cat([p.detach().flatten() for p in broken.parameters()])
v = torch.cat([state["exp_avg_sq"].flatten() for state in optimizer.state.values()])
lost = ~weights.isfinite()
print(f"all gradients finite: {bool(gradients.isfinite().all())}; weights that are not, after one step: {lost.sum()} of {len(weights)}")
print(f"where Adam's v is 0: {(v == 0).sum()}, of these lost: {(lost & (v == 0)).sum()}; eps = 1e-8 in fp16: {torch.tensor(1e-8).half().item()}")
assert lost.any() and (lost != (v == 0)).float().mean() < 0.01, "the fp16 model should break here: is eps still 1e-8?"

# %% [markdown]
# **Diagnose it.** The gradients are finite, and yet a quarter of the weights is lost: just those with a $v$ of 0. $v$ is Adam's
# mean of squared gradients, after one step $0.001 g^2$, and a small one becomes 0 in fp16. Adam divides by $\sqrt{v} +
# \epsilon$, and $\epsilon$ becomes 0, too. So Adam's *state* stays fp32. The *weights* do because a small step from a 16-bit
# weight can round back (lesson [03](03_when_numbers_break.ipynb)).
#
# ## 3. What halves, and which moment decides
#
# Take $P$ parameters, Adam, a batch of $b$ images, and $a$ bytes of activations an image in fp32. Compare two moments, if only
# activations halve:
#
# | moment | fp32 | mixed |
# |---|---|---|
# | backward begins | $12P + ab$ | $12P + 2P + ab/2$ |
# | optimizer step | $16P + 4P$ | $16P + 4P$ |
#
# $12P$ are weights and Adam's state, $2P$ the casts. When backward begins, `zero_grad()` has freed the gradients. The optimizer
# step has gradients, but no activations; its $4P$ are temporaries of Adam on a GPU. The larger moment is the estimate. It is low
# where the two are close: there a moment within backward, with some of both, decides.

# %%
P = sum(p.numel() for p in build()[0].parameters())
one_and_many = [run(1), run(1, FP16), run(64), run(64, FP16)]
a, half_of_a = (run(64, dtype).breakdown["activations"] / 64 for dtype in precisions.values())
assert 0.5 <= half_of_a / a < 0.56, "activations halve; some stay fp32"
print(f"P = {P:,}; activations of an image at batch 64, MiB ({Evidence.SIMULATED}): a = {a / 2**20:.2f}, and {half_of_a / 2**20:.2f} in mixed precision")
bars = draw_breakdown([replace(r, name=f"{r.name}: {r.peak_phase}") for r in one_and_many], title="ResNet-50 with Adam, one image and several (64)")
show(as_simulated(bars, "T4"), alt="Four bars of bytes at the peak. At one image both are the same: parameters, gradients, optimizer state, temporaries. "
     "At 64 images activations are most of fp32's bar and half as long in mixed precision, which adds a thin part of cast weights.")

# %% [markdown]
# **Read it.** At one image both bars are the optimizer step. At 64 both are the beginning of backward: activations
# halve, parameters and Adam's state stay, and *cast weights* are added, nearly $2P$.
#
# **Question.** By the formula, with the printed $P$ and $a$, what is the peak of mixed precision at 1024 images, in GiB?

# %%
peak_of_1024_gib = ...
check("02.peak_of_1024", peak_of_1024_gib)

# %%
def predicted_peak(batch, mixed, fused=False, keep=False):  # the last two: see the second table
    begins = (12 + 2 * mixed + 4 * keep) * P + a * batch / (1 + mixed)
    return max(begins, (16 if fused else 20) * P)


# %%
sizes = (1, 8, 32, 1024)  # without 64, from which a was read
guess = pd.DataFrame({name: {size: predicted_peak(size, name == "mixed") / 2**30 for size in sizes} for name in lines})
found = pd.DataFrame({name: {size: run(size, dtype).peak_bytes / 2**30 for size in sizes} for name, dtype in precisions.items()})
pd.concat({f"{Evidence.PREDICTED} (GiB)": guess, f"{Evidence.SIMULATED} (GiB)": found}, axis=1).rename_axis("images").round(2)

# %% [markdown]
# **Read it.** At 1024 images the formula says 12.46 GiB, and the simulation 12.62. At 8 in fp32, where its two moments are
# close, it says 0.45, and the simulation 0.52.
#
# **Can the peak rise?** At one image, if two habits meet. `Adam(..., fused=True)` makes no temporaries: the lower row is $16P$.
# *Accumulated* gradients stay until the next backward: the upper row grows by $4P$.

# %%
habits = {"fused": {"fused": True}, "accumulated": {"keep": True}, "fused, accumulated": {"fused": True, "keep": True}}
pairs = {"as above": [run(1), run(1, FP16)]}
pairs |= {name: [on_the_card(1, dtype, **habit) for dtype in (None, FP16)] for name, habit in habits.items()}
changed = pd.DataFrame({name: [r.peak_bytes / 2**20 for r in pair] for name, pair in pairs.items()}, index=["fp32 (MiB)", "mixed (MiB)"]).T
changed["mixed / fp32"] = changed["mixed (MiB)"] / changed["fp32 (MiB)"]
changed["by formula"] = [predicted_peak(1, True, **habit) / predicted_peak(1, False, **habit) for habit in ({}, *habits.values())]
assert changed["mixed / fp32"].iloc[-1] > 1, "with both habits the copies come on top"
print(f"peaks at one image ({Evidence.SIMULATED}), and their ratio by formula ({Evidence.PREDICTED})")
changed.round(2)

# %% [markdown]
# **Read it.** With both, the casts come on top, and mixed precision takes 7% more than fp32. With `fused` alone the moment
# within backward decides.
#
# ## 4. Twice as many images on a 16 GB card
#
# A T4 "of 16 GB" has 14.74 GiB. The CUDA context, there before your first tensor, takes 0.5 of them
# (assumed). Batch 1024, in fp32:

# %%
card = simulated_device("T4")
most = card.usable_bytes
print(f"a T4's {format_bytes(card.total_bytes)} leave {format_bytes(most)} beside the context")
try:
    on_the_card(1024, within=most)
except OverBudgetError as error:
    print(error)

# %% [markdown]
# **Read it.** It does not fit. To find what does, draw a line through two peaks, and go down in steps of 32, until what the
# simulated allocator *reserves* fits: tensors, gaps between them, and cache. It knows no *workspace*, the memory in which cuDNN, a
# GPU's library of convolutions, computes.

# %%
def find_limit(dtype, one, two):
    slope = (run(two, dtype).peak_bytes - run(one, dtype).peak_bytes) / (two - one)
    guess = two + int((most - run(two, dtype).peak_bytes) / slope)
    size = guess // 32 * 32
    while run(size, dtype).reserved_bytes > most:
        size -= 32
    assert run(size + 32, dtype).reserved_bytes > most, "the next size fits as well"
    return size, slope


# %%
limits = {name: find_limit(dtype, *pair) for name, dtype, pair in [("fp32", None, (64, 512)), ("mixed", FP16, (64, 1024))]}
for name, (limit, slope) in limits.items():
    print(f"{name:<6} largest batch, before workspace: {limit:>5}; {slope / 2**20:6.2f} MiB an image   ({Evidence.SIMULATED})")
largest = [limit for limit, _ in limits.values()]
print(f"{largest[1] / largest[0]:.2f} times the batch on the same card")
assert 512 <= largest[0] < 1024 <= largest[1], "the limits moved: were model or card changed?"

# %% [markdown]
# **Read it.** An image takes half the bytes, and before workspace twice as many fit. Look at 1024 images:

# %% jupyter={"source_hidden": true}
at_1024 = run(1024, FP16).peak_bytes / 2**30
ends = {name: [run(size, dtype) for size in sorted({64, 512, 1024, limits[name][0]})] for name, dtype in precisions.items()}
notes = {f"{name}: {limit}, before workspace": (limit, most / 2**30, 0, 8) for name, (limit, _) in limits.items()}
notes |= {f"mixed, 1024: {at_1024:.1f} GiB": (1024, at_1024, 80, -28)}
figure = draw_on_the_card(ends, limits={f"may be reserved, {format_bytes(most)}": most}, notes=notes, highest_gib=20,
                          title="What a T4 holds of ResNet-50 with Adam (simulated)")
show(figure, alt="Peak memory against batch size, two lines. fp32 meets what a T4 leaves a little below 600 images, and mixed precision "
     "near 1150. At 1024 images mixed precision lies below that level, and fp32 far above the picture.")

# %% [markdown]
# How much workspace? Here is the record of an H200: free, then held to 16 GB (14.90 GiB) at the largest batch that fits. *TF32*
# rounds the factors of fp32 products to fp16's 10 binary digits; a T4 cannot. Look at `reserved - simulated` in the last two rows.

# %%
record, CAP = recorded("resnet50")[0], 16e9
kinds = {"fp32": None, "tf32": None, "amp fp16": FP16}
rows = [row for row in record.rows if row["image_size"] == 32 and row["precision"] in kinds and 512 <= row["batch"] < 1200]
rows = [row for row in rows if "cap" not in row or row["precision"] != "tf32"]  # there it takes what fp32 does
of_h200 = [on_the_card(row["batch"], kinds[row["precision"]], gpu="H200").peak_bytes for row in rows]
print(f"GiB, {record.evidence}: {record.device}, {record.date}; 'simulated' is of an H200, too")
in_gib = record_table(rows, of_h200, CAP)
in_gib.round(2)

# %%
def largest_beside(name, mib):  # a context of so many MiB, and what the H200 reserved beyond its simulation
    return next(size for size in range(limits[name][0] + 32, 0, -32)
                if run(size, precisions[name]).peak_bytes / 2**30 + beyond[name] + mib / 1024 <= total)


# %%
beyond, total = {}, card.total_bytes / 2**30
for name, row in zip(precisions, rows[-2:], strict=True):
    fate = "fits" if dict(row["tried"])[1024] else "does not fit"
    print(f"H200 held to {format_bytes(CAP)}, {row['precision']}: batch 1024 {fate}, the largest in steps of 32 is {row['batch']} ({record.evidence})")
    beyond[name] = in_gib.loc[(row["precision"], row["batch"]), "reserved - simulated"]

verdicts = pd.DataFrame({f"largest in {name}, {gib:.2f} GiB more": {mib: largest_beside(name, mib) for mib in (250, 500, 1000)}
                         for name, gib in beyond.items()})
verdicts["left at 1024, mixed (GiB)"] = [total - at_1024 - mib / 1024 for mib in verdicts.index]
assert (verdicts.iloc[:, 0] < 1024).all() and (verdicts.iloc[:, 1] >= 1024).all(), "the limits moved: were model or card changed?"
verdicts.rename_axis("context (MiB)").round(2)

# %% [markdown]
# **Read it.** Held to 16 GB, the H200 reserved 0.23 GiB more than simulated in mixed precision, and 0.69 in fp32. Should a T4
# need as much, it holds 1120 images, and 544 in fp32. A context half or twice as large moves neither by more than one step. At
# 512 images fp16 was 3.8 times as fast as fp32, and 1.4 times as TF32.
#
# **The answer: yes, by prediction.** In mixed precision batch 1024 takes 12.62 GiB of a T4's 14.74, and in fp32 24.85. That
# leaves 1.63 for workspace and gaps. No T4 was run, and its cuDNN may take more. On one, such as Colab's, the first run of
# section 6's `resnet50_amp.py 1024 3 0 fp16 fake` settles it.
#
# ## 5. Accuracy: not shown for this loop, only for relatives
#
# **No pair below compares section 2's method with fp32.** NVIDIA's
# [README](https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5) gives
# ResNet-50's top-1 accuracy on ImageNet, in percent, trained with SGD; its ± is unexplained, here *spread*. The 16-bit runs have
# a [fixed loss
# scale](https://github.com/NVIDIA/DeepLearningExamples/blob/097c7ff917b7c56246590b1246a8f5bd8957c534/PyTorch/Classification/ConvNets/configs.yml);
# the DGX-2's predate NVIDIA's autocast. The A100's "fp32" is TF32, and the DGX-1's is older than its mixed precision.

# %%
pairs = pd.DataFrame(table("nvidia_resnet50_accuracy")).set_index(["machine", "epochs"]).astype(float)
pairs["mixed - fp32"] = (pairs["mixed_top1"] - pairs["fp32_top1"]).round(2)
wider = pairs[pairs["mixed - fp32"].abs() > pairs[["fp32_spread", "mixed_spread"]].max(axis=1)]
print("wider than both spreads:", "; ".join(f"{machine}, {epochs} epochs, {gap:+}" for (machine, epochs), gap in wider["mixed - fp32"].items()))
print(f"published: {source('nvidia_resnet50_accuracy').partition(' @')[0]}")
pairs[["fp32_top1", "fp32_spread", "mixed_top1", "mixed_spread", "mixed - fp32"]]

# %% [markdown]
# **Read it.** Mixed precision is lower in four pairs of seven, by more than both spreads in two. In these the 16-bit
# runs also had [twice the batch per
# GPU](https://github.com/NVIDIA/DeepLearningExamples/tree/5562ab767af8645cff9b697ac4ea9a95a90c987b/PyTorch/Classification/ConvNets/resnet50v1.5/training),
# in the same batch per step.

# %% [markdown]
# ## 6. The scenario as asked
#
# *"ResNet-50 on CIFAR-10 overflows our 16 GB card at batch 1024. Use mixed precision; keep the accuracy."* The file is section
# 2's loop around torchvision's network. Run again, it goes on from what it saved.

# %%
here.write_script("resnet50_amp.py", TOP, train_amp, MAIN.replace("PEAK", f"{run(1024, FP16).peak_bytes / 2**30:.2f}"))

# %% [markdown]
# **Read it.** "Keep the accuracy" is yours to test, on a card: run `512 10 s fp32` and `512 10 s fp16` for seeds `s` from 0
# to 4, and compare the mean of the five differences with their standard deviation. A mean twice as large is hardly chance. One
# about as large can be. With a doubled batch, tune the learning rate anew.

# %% [markdown]
# ## Recap
#
# **Does it fit?** Yes, by prediction: in mixed precision batch 1024 takes 12.62 GiB of a T4's 14.74, and in fp32 24.85. Should a T4
# need what the H200 reserved beyond its simulation, it holds 1120 images, and 544 in fp32. **Does it learn as well?** Not shown
# for this loop.
#
# The largest moment of a step decides. Mixed precision halves activations, adds casts, and leaves weights, gradients and Adam's
# state alone. At one image default Adam's step decides, and the peak does not move.
#
# **Test yourself.** A model of 3 billion parameters, trained with Adam in fp32, runs out of memory on a 40 GB card. Would mixed
# precision help?
#
# <details><summary>Answer</summary>
#
# No. Weights, gradients and Adam's state take 16 bytes per parameter, 48 GB, in both precisions.
#
# </details>
#
# Do the [lab](../../labs/beginner/02_mixed_precision.ipynb), in a copy (`make my-labs`), then compare with the
# [solution](../../solutions/beginner/02_mixed_precision.ipynb); then lesson [03](03_when_numbers_break.ipynb).
#
# **Reference.** Micikevicius and others, *Mixed Precision Training*,
# [arXiv:1710.03740](https://arxiv.org/abs/1710.03740).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** You have `model`, `optimizer`, `loss_function`, `loader` and `device`. The weights must be fp32: load a
# transformers model with `dtype=torch.float32`. Run these lines in two processes, first with `in_fp32 = True`. In both,
# `torch.manual_seed(0)` comes before model and loader:
#
# ```python
# import torch
#
# device = torch.device(device)  # "cuda" will do
# in_fp32 = False  # True in the first run; from the A100 on, its convolutions are TF32
# channels_last = False  # True later, for images: the layout in which 16-bit convolutions are fastest
# clip_norm = None  # or the norm to which gradients are clipped, such as 1.0
# assert {p.dtype for p in model.parameters()} == {torch.float32}, "the masters must be fp32: load the model so"
# if channels_last:
#     model.to(memory_format=torch.channels_last)
# fp16 = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
# scaler = torch.amp.GradScaler(device.type, enabled=fp16 and not in_fp32)  # one for the run; bf16 needs none
# if device.type == "cuda":
#     torch.cuda.reset_peak_memory_stats()  # else the peak of what ran before stays
# losses, skipped = [], 0
# for step, (inputs, labels) in enumerate(loader):
#     optimizer.zero_grad()
#     with torch.amp.autocast(device.type, dtype=torch.float16 if fp16 else torch.bfloat16, enabled=not in_fp32):
#         loss = loss_function(model(inputs.to(device)), labels.to(device))
#     scaler.scale(loss).backward()
#     if clip_norm:
#         scaler.unscale_(optimizer)  # gradients have their true size again, and can be clipped
#         torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
#     scale = scaler.get_scale()
#     scaler.step(optimizer)  # with accumulated gradients: step and update once, after the last backward
#     scaler.update()
#     made = scaler.get_scale() >= scale  # a skipped step halves the scale
#     skipped += not made  # call scheduler.step(), if you have one, only where the step was made
#     if step < 20:
#         losses.append(loss.item())
# print(f"loss: first {losses[0]:.4f}, mean of steps 10 to 19 {sum(losses[10:]) / max(len(losses) - 10, 1):.4f}")
# print(f"scale {scaler.get_scale():,.0f}, {skipped} of {step + 1} steps skipped")
# if device.type == "cuda":
#     print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
# ```
#
# It works if the first losses agree to two digits, the means differ by much less than fp32's loss fell, and hardly a step is
# skipped. A scale that falls without end is a fault ([03](03_when_numbers_break.ipynb)). Save `scaler.state_dict()` too, and evaluate under autocast.
#
# **transformers.** You have `model`, in fp32, and `dataset`. The `Trainer` does this by one setting; it also clips, at 1.0:
#
# ```python
# import torch
# from transformers import Trainer, TrainingArguments
#
# assert {p.dtype for p in model.parameters()} == {torch.float32}, "the masters must be fp32: load the model so"
# fp16 = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)  # a T4, a V100
# # For fp32 set both to False. The Trainer's AdamW is fused: if you accumulate, the peak can rise (section 3, last table).
# settings = TrainingArguments(output_dir="out", per_device_train_batch_size=64, max_steps=20, logging_steps=1, fp16=fp16, bf16=not fp16,
#                              use_cpu=not torch.cuda.is_available())
# trainer = Trainer(model=model, args=settings, train_dataset=dataset)
# trainer.train()
# if torch.cuda.is_available():
#     print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
# ```
#
# A peak that does not move is made of weights and states, or of what stays fp32 under autocast, such as a language model's
# logits in its loss. Take another technique.
