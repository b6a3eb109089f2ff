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
# **Promise.** You build mixed precision by hand, get the same losses from PyTorch's two calls, and predict what that
# does to the *peak*; then, from a simulation and a recorded run, the largest batch that a T4 holds in each precision.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 50, and 90 for the lab | any laptop; a GPU if you have one; beyond Binder's 1 GB of memory | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# "Mixed precision halves training memory." You train ResNet-50 with Adam on **one** image. The *peak* is the most memory
# that the step holds at any moment. How large is the peak in mixed precision, divided by that in fp32? 0.5 is half, 1 the
# same.

# %%
my_bet_ratio = 0.5

# %% tags=["setup"]
here = setup("beginner/02")

# %%
import math
from dataclasses import replace

import pandas as pd
import torch
import torch.nn.functional as F
from torch.func import functional_call

from evidence.record import recorded
from evidence.validation.tables import source, table
from utils import Evidence, OverBudgetError, check, cifar10, compare, format_bytes, choose_autocast_dtype
from utils import measure, resnet, show, simulate, tf32
from utils.lessons.lesson_02.figures import as_simulated, draw_moments, draw_on_the_card
from utils.lessons.lesson_02.gradients import at_convolutions
from utils.lessons.lesson_02.record_table import record_table
from utils.lessons.lesson_02.script import MAIN, TOP
from utils.lessons.lesson_02.toy import shrunk, shuffled, toy_network
from utils.simulation.devices import simulated_device

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# ## 1. The peak, in both precisions
#
# A training step as you know it, but for `autocast`, which turns mixed precision on; section 2 builds it.
#
# **Simulation.** The step runs on tensors that have a shape, a type and a lifetime, and no data. Each allocation is counted
# as a GPU's allocator would ([05a](../intermediate/05a_trusting_simulation.ipynb) says how far to trust that). The GPU is a
# T4 with 16 GB, whose 16-bit type is fp16.

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


def on_the_card(batch, dtype=None, within=None, fused=None, keep=False):
    return simulate(lambda: build(fused), lambda m, o: training_step(m, o, batch, dtype, keep), device="T4", within=within,
                    items=batch, unit="images", name=f"{'mixed' if dtype else 'fp32'}, batch {batch}")

# %%
FP16, sizes = torch.float16, [1, 4, 8, 16, 32, 64]
runs = {(size, dtype): on_the_card(size, dtype) for dtype in (None, FP16) for size in sizes}
lines = {name: [runs[size, dtype] for size in sizes] for name, dtype in [("fp32", None), ("mixed", FP16)]}
show(draw_moments(lines, title="The peak of a step: ResNet-50 (32 x 32, CIFAR stem), Adam, simulated for a T4"),
     alt="Peak memory against the batch size. Up to 4 images both peaks lie in the optimizer step, on one flat line. "
     "Beyond, backward decides: fp32 rises first, mixed precision a little later and about half as steeply.")

# %%
def at_one_image(dtype):
    model, optimizer = build()
    model.to(device)
    with tf32(False):  # TF32 would round the factors of products to 10 binary digits
        return measure(lambda: training_step(model, optimizer, 1, dtype), model=model, optimizer=optimizer,
                       timed_steps=0, name=f"{'mixed' if dtype else 'fp32'}, batch 1, here")


# %%
low, reason = choose_autocast_dtype(device)
real = [at_one_image(dtype) for dtype in (None, low)]
print(f"your bet for one image: {my_bet_ratio}")
print(f"{Evidence.MEASURED} here: {format_bytes(real[0].peak_bytes)} in fp32, {real[1].peak_bytes / real[0].peak_bytes:.3f} times that in {low}")
peaks = pd.DataFrame({name: {run.items: run.peak_bytes / 2**20 for run in line} for name, line in lines.items()})
peaks["mixed / fp32"] = peaks["mixed"] / peaks["fp32"]
assert (peaks["mixed / fp32"] <= 1).all() and peaks["mixed / fp32"].iloc[-1] < 0.7, "was the model changed?"
peaks.rename_axis("images").rename(columns={name: f"{name} (MiB, {Evidence.SIMULATED})" for name in lines}).round(2)

# %% [markdown]
# **Read it.** The bet's answer is 1: at one image the peak does not move, measured here and simulated for the T4. (A CPU's
# Adam updates tensor after tensor: its peak is lower.) Up to 4 images the peak lies in the optimizer step, which 16 bits do
# not touch. At 64 the ratio is 0.6: weights and Adam's state are in both peaks. (The grounds' edges are extrapolated from 32
# and 64.) New words stand in the [glossary](../00_glossary.ipynb).

# %% [markdown]
# ## 2. The conversion, by hand
#
# Convolutions and linear layers compute on 16-bit copies (*casts*) of weights and inputs. fp16 has few digits, and little
# range: from 65,520 on it is infinite, below $2^{-25}$ it rounds to 0. Three things make it train. **Master weights:** what
# the optimizer updates stays fp32. **Sums in fp32:** a GPU's matrix units add up products in fp32, and the loss is computed
# in it. **A loss scale:** the loss is multiplied before backward, so that small gradients stay above 0, and the gradients
# are divided after it, in fp32. If one is not finite, skip the step, and halve the scale. After `patience` good steps,
# double it.

# %%
def train_by_hand(model, optimizer, batches, scale, patience):
    good, history = 0, []
    for images, labels in batches:
        optimizer.zero_grad()
        copies = {name: master.half() for name, master in model.named_parameters()}  # the masters stay fp32
        logits = functional_call(model, copies, images.half())  # each layer computes on its fp16 copy
        loss = F.cross_entropy(logits.float(), labels)  # exponentials and sums: in fp32
        (scale * loss).backward()  # a copy's fp16 gradient goes through the cast: fp32 at its master
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
# Now the library's two calls. **`torch.amp.autocast`** chooses a type for each operation: 16 bits for matrix products and
# convolutions, fp32 for what needs digits or range, such as losses and layer norm ([CUDA's
# list](https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32)). Most others, such as batch
# norm and ReLU, follow their input. *Hooks*, functions that PyTorch calls at a set point, tell what becomes of this
# ResNet:

# %%
def types_of_a_step(model, optimizer, dtype):
    seen, (images, labels) = {}, (torch.randn(2, 3, 32, 32, device=device), torch.tensor([0, 1], device=device))
    for layer in model.to(device).modules():
        layer.register_forward_hook(lambda layer, given, out: seen.update({type(layer): {"input": given[0].dtype, "output": out.dtype}}))
    with torch.amp.autocast(device.type, dtype=dtype):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    for layer in model.modules():
        if (weight := getattr(layer, "weight", None)) is not None:
            seen[type(layer)] |= {"weight": weight.dtype, "gradient": weight.grad.dtype, "Adam's state": optimizer.state[weight]["exp_avg"].dtype}
    return {kind.__name__: types for kind, types in seen.items()} | {"loss": {"output": loss.dtype}}


# %%
of_layers = pd.DataFrame(types_of_a_step(*build(), FP16)).T
of_layers.loc[["Conv2d", "BatchNorm2d", "ReLU", "Linear", "loss"]].map(lambda dtype: str(dtype).removeprefix("torch.")).replace("nan", "")

# %% [markdown]
# **Read it.** Activations are 16-bit; weights, gradients, states and loss fp32. A row shows the last layer of its kind: the
# first convolution's input is fp32. (A CPU's list is another; CUDA's gives these layers the same types.)
# **`torch.amp.GradScaler`** is the loss scale with its check. Old code has `torch.cuda.amp`, or another library, NVIDIA's
# Apex.

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
# Both train one small network on the same 12 batches. The scale starts high, and `patience` is 4.

# %%
images, labels = shrunk(cifar10("train"), 768)  # 8 x 8 pixels
few = list(shuffled((images.to(device), labels.to(device)), 64, 1, seed=0))


def toy():
    model = toy_network(seed=0).to(device)  # convolutions, ReLU and a linear layer
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def by_library(dtype):
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20, growth_interval=4, enabled=dtype is FP16)
    return train_amp(*toy(), scaler, few, dtype), scaler.get_scale()


# %%
by_hand, last_scale = train_by_hand(*toy(), few, scale=2.0**20, patience=4)
losses, library_scale = by_library(FP16)
steps = pd.DataFrame(by_hand).assign(library=losses, bf16=by_library(torch.bfloat16)[0], fp32=by_library(None)[0])
gap = (steps["loss"] / steps["library"] - 1).abs().max()
print(f"by hand and autocast + GradScaler: losses at most {gap:.1e} apart (relative), last scales {last_scale:,.0f} and {library_scale:,.0f}")
assert gap < 1e-3 and last_scale == library_scale, "sums in another order may part the losses by 1e-3, no more"
assert {"made", "skipped"} == set(steps["step"]), "the scale should start too large"
steps.rename(columns={"loss": "fp16 by hand", "library": "fp16 library"}).round(4)

# %% [markdown]
# **Read it.** The same losses and scale. Three steps of twelve are skipped. Twelve are too few to learn: guessing costs
# $\ln 10 = 2.303$. bf16 needs no scaler: it has the range of fp32, and three binary digits fewer than fp16.
#
# <div class="alert alert-warning"><b>Trap.</b> A T4 or V100 has no units for bf16, and
# <code>torch.cuda.is_bf16_supported()</code> says True there: it counts <a
# href="https://github.com/pytorch/pytorch/pull/115924">emulation</a>. Ask
# <code>is_bf16_supported(including_emulation=False)</code>; on those, take fp16 with a scaler.</div>

# %% [markdown]
# ### What the scale is for
#
# Backward runs through the untrained ResNet in fp32, for four images that count as in a batch of 1024. Hooks collect the
# gradients of its convolutions' outputs; the table rounds them to fp16 under four scales.

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
# **Read it.** Without a scale, about 6% of these gradients become 0. At 256 hardly any do; PyTorch begins at 65,536.
# A far larger one makes infinities, and skipped steps.
#
# ### Break it, diagnose it: why not `model.half()`?
#
# Then everything halves, Adam's state as well. One step:

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
print(f"where v is 0: {(v == 0).sum()}, of these lost: {(lost & (v == 0)).sum()}; eps = 1e-8 in fp16: {torch.tensor(1e-8).half().item()}")
small = gradients.double() ** 2 / 1000 < 2**-25
print(f"where 0.001 times the gradient's square is below 2^-25: {small.sum()}, of these lost: {(lost & small).sum()}")
assert lost.any() and (lost != small).float().mean() < 0.01, "the fp16 model should break here: is eps still 1e-8?"

# %%
masters = torch.cat([p.detach().flatten() for p in build()[0].parameters() if p.dim() > 1])
unmoved = {dtype: {step: (masters.to(dtype) - step == masters.to(dtype)).float().mean().item() for step in (1e-3, 1e-4, 1e-5)}
           for dtype in (torch.float16, torch.bfloat16)}
print("share of this ResNet's first weights that stand still when a step is taken from them in 16 bits")
pd.DataFrame(unmoved).rename_axis("step").map("{:.1%}".format)

# %% [markdown]
# **Diagnose it.** The gradients are finite, and two weights of three are not after the step: just those with a $v$ of 0.
# After one step $v$ is $0.001 g^2$: below $2^{-25} = 3 \cdot 10^{-8}$ that is 0 in fp16. The default Adam divides by
# $\sqrt{v} + \epsilon$, and $\epsilon$ is 0 as well. So fp16 cannot hold *states*. (In bf16 $v$ cannot fall: $0.999 v$ rounds
# back to $v$.) *Weights* stay in fp32 for another reason: at steps of 1e-5 a third of this ResNet's initial weights would
# stand still in fp16, and nine of ten in bf16.

# %% [markdown]
# ## 3. What halves, and which moment decides
#
# Take $P$ parameters, Adam, batch $b$, and $a$ bytes of activations per image in fp32. The peak is at least what either of
# two moments holds:
#
# | moment | fp32 | mixed |
# |---|---|---|
# | backward begins (`zero_grad()` freed the gradients) | $12P + ab$ | $12P + 2P + ab/2$ |
# | optimizer step (no activations any more) | $16P + 4P$ | $16P + 4P$ |
#
# ($4P$ in the lower row are temporaries of Adam on a GPU.) Take the larger as an estimate.

# %%
def when_backward_begins(measurement):
    spans = measurement.timeline.spans
    return dict(measurement.timeline.at(next(s.start_ns for s in spans if s.name == "backward")))


# %%
moment = {dtype: when_backward_begins(runs[64, dtype]) for dtype in (None, FP16)}
names = ["parameters", "optimizer state", "buffers", "cast weights", "activations"]
alive = pd.DataFrame({"fp32": moment[None], "mixed": moment[FP16]}).reindex(names).fillna(0)
ratio = (alive["mixed"] / alive["fp32"]).round(3)
assert (ratio[names[:3]] == 1).all(), "autocast does not touch the states"
assert 0.5 <= ratio["activations"] < 0.56, "activations halve; some stay fp32"
P = sum(p.numel() for p in build()[0].parameters())
print(f"P = {P:,}; MiB when backward begins, 64 images   ({runs[64, None].evidence})")
(alive / 2**20).round(2).assign(**{"mixed / fp32": ratio.astype(str).replace("inf", "added")})

# %% [markdown]
# **Read it.** Activations halve; parameters and Adam's state stay. *Cast weights*, the 16-bit copies, are added: nearly $2P$,
# as batch norm has none.
#
# **Question.** Predict the peak of mixed precision at 1024 images, in GiB.

# %%
peak_of_1024_gib = ...
check("02.peak_of_1024", peak_of_1024_gib)

# %%
a = moment[None]["activations"] / 64  # read off the run of 64 in fp32: that row is no prediction


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
# **Read it.** The formula is low, by an eighth at 8 images: it leaves out *workspace*, in which the library of matrix products
# computes, and gradients made before the peak.

# %%
bars = compare([replace(runs[key], name=f"{runs[key].name}: {runs[key].peak_phase}") for key in [(1, None), (1, FP16), (16, None), (16, FP16)]],
               title="ResNet-50 with Adam, one image and several (16)")
as_simulated(bars.figure, "T4")
thin = runs[16, FP16].breakdown
print("mixed, batch 16, MiB:", ", ".join(f"{part} {thin[part] / 2**20:.1f}" for part in ("cast weights", "temporaries", "other")))
bars

# %% [markdown]
# **Read it.** At 16 images the peak lies between the two moments: backward has passed the last layers, which hold most
# weights, so 61% of the gradients are there beside 95% of the activations, and most casts are gone. (*States* here:
# parameters, buffers, gradients and Adam's; *other*: workspace.)
#
# **Can the peak rise?** `Adam(..., fused=True)` needs no temporaries: the lower row is $16P$. Gradients that you accumulate
# are still there when the next backward begins: $4P$ more in the upper row. With both, fp32 takes $16P + ab$ and mixed
# precision $18P + ab/2$. One image:

# %%
habits = {"fused": {"fused": True}, "accumulated": {"keep": True}, "fused, accumulated": {"fused": True, "keep": True}}
found = {"as above": [runs[1, None], runs[1, FP16]]}
found |= {name: [on_the_card(1, dtype, **habit) for dtype in (None, FP16)] for name, habit in habits.items()}
changed = pd.DataFrame({name: [run.peak_bytes / 2**20 for run in pair] for name, pair in found.items()}, index=["fp32 (MiB)", "mixed (MiB)"]).T
changed["mixed / fp32"] = changed["mixed (MiB)"] / changed["fp32 (MiB)"]
assert changed["mixed / fp32"].iloc[-1] > 1, "with both habits the copies come on top"
print(f"peaks at one image ({Evidence.SIMULATED})")
changed.round(2)

# %% [markdown]
# **Read it.** Only with both does mixed precision take more, by 7%: copies come on top of kept gradients.
#
# ## 4. What fills a 16 GB card
#
# A "16 GB" T4 has 14.74 GiB, of which the CUDA context, there before your first tensor, takes 0.5 (assumed). In fp32:

# %%
card = simulated_device("T4")
most = card.usable_bytes
print(f"a T4's {format_bytes(card.total_bytes)} leave {format_bytes(most)} beside the context")
try:
    on_the_card(1024, within=most)
except OverBudgetError as error:
    print(error)

# %% [markdown]
# **Read it.** It does not fit. To find what does, take a line through two peaks, and go down in steps of 32. What counts is what the allocator *reserves*: tensors, and gaps between them that no tensor fits.

# %%
def run(size, dtype):
    runs[size, dtype] = runs.get((size, dtype)) or on_the_card(size, dtype)
    return runs[size, dtype]


def find_limit(dtype, one, two):
    slope = (run(two, dtype).peak_bytes - run(one, dtype).peak_bytes) / (two - one)
    guess = two + int((most - run(two, dtype).peak_bytes) / slope)
    size = guess // 32 * 32
    while run(size, dtype).reserved_bytes > most:
        size -= 32
    assert run(size + 32, dtype).reserved_bytes > most, "the next size fits as well"
    return size, guess, slope


# %%
limits = {name: find_limit(dtype, *pair) for name, dtype, pair in [("fp32", None, (64, 512)), ("mixed", FP16, (64, 1024))]}
for name, (limit, guess, slope) in limits.items():
    print(f"{name:<6} guess {guess:>5}, largest batch {limit:>5}, {slope / 1e6:6.2f} MB an image   ({Evidence.SIMULATED})")
largest = [limit for limit, *_ in limits.values()]
print(f"{largest[1] / largest[0]:.2f} times the batch on the same card")
assert 512 <= largest[0] < 1024 <= largest[1], "the limits moved: were model or card changed?"

# %% [markdown]
# A real GPU also needs cuDNN's workspace. Here is the record of an H200, held to 16 GB or not. (*TF32* rounds the factors of
# fp32 products to 10 binary digits: PyTorch's default in convolutions, where the card has it. A T4 has none.)

# %%
record, CAP = recorded("resnet50")[0], 16e9
kinds = {"fp32": None, "tf32": None, "amp fp16": FP16}
rows = [row for row in record.rows if row["image_size"] == 32 and row["precision"] in kinds and 512 <= row["batch"] < 1200]
print(f"GiB, {record.evidence}: {record.device}, {record.date}; 'simulated' is of the T4")
record_table(rows, [run(row["batch"], kinds[row["precision"]]).peak_bytes for row in rows], CAP)

# %% jupyter={"source_hidden": true}
marks = {kind: {row["batch"]: row["allocated_peak_bytes"] for row in rows if row["precision"] == kind} for kind in kinds}
ends = {"fp32": [run(size, None) for size in (64, 512, 1024)], "mixed": [run(size, FP16) for size in (64, 512, 1024, 1184)]}
top = {kind: {batch: peak / 2**30 for batch, peak in marks[kind].items()} for kind in ("fp32", "amp fp16")}
above = top["fp32"][512] - run(512, None).peak_bytes / 2**30
notes = {f"{above:.1f} GiB above, in forward": (512, top["fp32"][512], -12, -5)}
notes |= {f"{max(peaks)} fit the H200's limit": (max(peaks), max(peaks.values()), 8, 14) for peaks in top.values()}
at_1024 = run(1024, FP16).peak_bytes / 2**30
notes |= {f"mixed, 1024: {at_1024:.1f} GiB": (1024, at_1024, 88, -26)}
figure = draw_on_the_card(ends, marks, highest_gib=20, title="ResNet-50 with Adam, allocated at the peak: simulated (T4), recorded (H200)", notes=notes,
                          limits={f"a T4 less its context, {format_bytes(most)}": most, f"the H200's limit, {format_bytes(CAP)}": CAP})
show(figure, alt="Peak memory against batch size, two lines. fp32 meets what a T4 leaves a little below 600 images, and mixed "
     f"precision near 1150. The peaks recorded in TF32 and fp16 lie on the lines; fp32 at 512, without a limit, lies {above:.1f} GiB above.")

# %%
def verdict(name, dtype, kind):
    limit, _, slope = limits[name]
    held = next(row["batch"] for row in rows if row["precision"] == kind and "cap" in row)
    return {"tensors and gaps (simulated)": limit, f"H200 held to {format_bytes(CAP)} (recorded)": held,
            f"the same at {format_bytes(most)} (predicted)": held - math.ceil((CAP - most) / slope),
            "batch 1024 leaves, GiB (simulated)": round((card.total_bytes - run(1024, dtype).peak_bytes) / 2**30, 2)}


answer = pd.DataFrame([verdict("fp32", None, "fp32"), verdict("mixed", FP16, "amp fp16")], index=["fp32", "mixed"])
assert answer.iloc[0, 2] < 1024 <= answer.iloc[1, 2], "the limits moved: were model or card changed?"
left = answer.iloc[1, 3]
print("left for gaps and workspace, mixed, batch 1024, GiB:", ", ".join(f"{left - mib / 1024:.2f} with a context of {mib} MiB" for mib in (250, 500, 1000)))
answer.rename_axis("largest batch")

# %% [markdown]
# **Read it.** By prediction it fits. An H200 that may reserve 14.90 GiB trains 1184 images, and not 1216; the T4's 14.25
# would hold 1130 to 1161 (fp32: 548 to 579), if its kernels take as much workspace. Batch 1024 fits if gaps and workspace
# make do with 1.63 GiB: the limited H200's did with 0.3 (fp32: 0.7), and took 1.3 (3.7) without a limit, at 512. No T4 was
# asked. The picture shows what is *allocated*: fp32 at 512 lies below both limits, and reserved 16.30; its peak, in forward,
# has 1.1 GiB of cuDNN's workspace. At 512 fp16 is 3.8 times as fast as fp32, and 1.4 times as TF32.
#
# ## 5. The same accuracy?
#
# NVIDIA's [README](https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5)
# has seven rows for ResNet-50 on ImageNet: SGD, in fp16 with a fixed loss scale of 128. Top-1 accuracy in percent, *spread*
# as printed (±); on the A100 "fp32" is TF32:

# %%
pairs = pd.DataFrame(table("nvidia_resnet50_accuracy")).set_index(["machine", "epochs"]).astype(float)
pairs["mixed - fp32"] = (pairs["mixed_top1"] - pairs["fp32_top1"]).round(2)
one = next(row for row in table("nvidia_resnet50") if row["gpu"] == "V100-16GB" and row["n_gpus"] == "1")
wider = pairs[pairs["mixed - fp32"].abs() > pairs[["fp32_spread", "mixed_spread"]].max(axis=1)]
print("wider than both spreads:", "; ".join(f"{machine}, {epochs} epochs, {gap:+}" for (machine, epochs), gap in wider["mixed - fp32"].items()))
print(f"published: {source('nvidia_resnet50_accuracy').partition(' @')[0]}")
print(f"training on one V100 16 GB: {one['fp32_or_tf32_images_s']} images/s in fp32, {one['mixed_images_s']} in mixed precision")
pairs[["fp32_top1", "fp32_spread", "mixed_top1", "mixed_spread", "mixed - fp32"]]

# %% [markdown]
# **Read it.** The DGX-1's rows are no pairs: [in
# 2021](https://github.com/NVIDIA/DeepLearningExamples/commit/097c7ff917b7c56246590b1246a8f5bd8957c534) NVIDIA replaced the
# mixed numbers alone, till then the higher (77.09, 78.42). Of five pairs mixed precision is lower in two, by 0.23 and 0.13,
# beyond both spreads, and higher in three, by up to 0.17. More differs than the type: by the scripts there the DGX-2's fp32
# ran 128 images a GPU at a time, mixed 256, and the A100's mixed ran channels last. With both, a V100 trains 3.3 times as
# fast, at 224 pixels. For Adam on CIFAR-10 nothing is shown here.

# %% [markdown]
# ## 6. The scenario as asked
#
# *"ResNet-50 on CIFAR-10 overflows our 16 GB card at batch 1024. Use mixed precision; keep the accuracy."* The file is the
# loop above around torchvision's network. Run again, it goes on from what it saved.

# %%
here.write_script("resnet50_amp.py", TOP, train_amp, MAIN.replace("PEAK", f"{run(1024, FP16).peak_bytes / 2**30:.2f}"))

# %% [markdown]
# **Read it.** To compare accuracy, run it with `512 10 0 fp32` and `512 10 0 fp16`, then with seeds 1 to 4: a *pair* shares
# its seed. If the five differences have standard deviation $s$, a mean within $1.2 s$ of 0 shows nothing (Student's $t$,
# 95%). A double batch is another change, as is TF32 in an A100's `fp32` convolutions. Its images/s includes loading, which
# hides some gain.

# %% [markdown]
# ## Recap
#
# The peak decides. For this ResNet at one image mixed precision hardly lowers it, and can raise it; at hundreds, where
# activations decide, it nearly halves: by prediction, batch 1024 fits a T4.
#
# **Test yourself.** A model of 3 billion parameters, trained with Adam in fp32, runs out of a 40 GB card at one text of 128
# tokens. Would mixed precision help?
#
# <details><summary>Answer</summary>
#
# No. Weights, gradients and states take 16 bytes per parameter, 48 GB, and the default Adam's step peaks at 20, 60 GB. No
# activation is alive then: there is nothing to halve. Another optimizer, sharding or offload helps.
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
# **Plain PyTorch.** You have `model`, `optimizer`, `loss_function`, `loader` and `device`. Weights must be fp32: load a
# transformers model with `dtype=torch.float32` (version 5 takes its checkpoint's type). Run these lines in two processes,
# first with `in_fp32 = True`, and call `torch.manual_seed(0)` before you make model and loader:
#
# ```python
# import torch
#
# device = torch.device(device)  # "cuda" will do
# in_fp32 = False  # True in the first run, to compare losses and peak with (from the A100 on, its convolutions: TF32)
# channels_last = False  # True later: the layout of images in which 16-bit convolutions are fastest
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
# skipped; it helps if the peak is lower. A scale that falls without end is a fault ([03](03_when_numbers_break.ipynb)). Save
# `scaler.state_dict()` too, and evaluate under autocast.
#
# **transformers.** You have `model` (in fp32) and `dataset`. The `Trainer` does this by one setting; it also clips, at 1.0:
#
# ```python
# import torch
# from transformers import Trainer, TrainingArguments
#
# assert {p.dtype for p in model.parameters()} == {torch.float32}, "the masters must be fp32: load the model so"
# fp16 = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)  # a T4, a V100
# # For fp32 set both to False. The Trainer's AdamW is fused: accumulate, and the peak can rise (section 3, last table).
# settings = TrainingArguments(output_dir="out", per_device_train_batch_size=64, max_steps=20, logging_steps=1, fp16=fp16, bf16=not fp16,
#                              use_cpu=not torch.cuda.is_available())
# trainer = Trainer(model=model, args=settings, train_dataset=dataset)
# trainer.train()
# if torch.cuda.is_available():
#     print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
# ```
#
# A peak that does not move is made of states, or of what stays fp32 under autocast, such as the copy of a language model's
# logits in its loss: take another technique.
