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
# **Promise.** You build mixed precision by hand, get the same losses from PyTorch's two calls, say beforehand what that
# does to the *peak*, and find the largest batch that fits a T4: more than 570 images in fp32 and more than 1150 in mixed
# precision, if its CUDA context takes 500 MiB (simulated).
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
from dataclasses import replace

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from evidence.record import recorded
from evidence.validation.tables import source, table
from utils import Evidence, OverBudgetError, check, cifar10, compare, format_bytes, choose_autocast_dtype
from utils import measure, resnet, score, scoreboard, show, simulate, tf32
from utils.lessons.lesson_02.curves import draw_peaks
from utils.lessons.lesson_02.figures import with_notes, with_recorded
from utils.lessons.lesson_02.script import MAIN, TOP
from utils.lessons.lesson_02.toy import shrunk, shuffled, toy_network
from utils.simulation.devices import simulated_device

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# ## 1. The peak, in both precisions
#
# One training step as you know it. The line with `autocast` is new: with a 16-bit type it turns mixed precision on (section 2
# builds it), without one it does nothing.
#
# **Simulation.** The step runs on tensors that have a shape, a type and a lifetime, and no data. Each allocation is
# counted as a GPU's allocator would ([05a](../intermediate/05a_trusting_simulation.ipynb) says how far to
# trust that). Here the GPU is a T4 with 16 GB, which has no units for bf16: its 16-bit type is fp16.

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
    model = resnet(50, stem="cifar")  # its first layers keep an image of 32 x 32 pixels at full size
    return model, torch.optim.Adam(model.parameters())


def on_the_card(batch, dtype=None, within=None):
    return simulate(build, lambda m, o: training_step(m, o, batch, dtype), device="T4", within=within,
                    items=batch, unit="images", name=f"{'mixed' if dtype else 'fp32'}, batch {batch}")

# %%
FP16, sizes = torch.float16, [1, 4, 8, 16, 64]
runs = {(size, dtype): on_the_card(size, dtype) for dtype in (None, FP16) for size in sizes}
lines = {name: [runs[size, dtype] for size in sizes] for name, dtype in [("fp32", None), ("mixed", FP16)]}
figure = draw_peaks(lines, title="The peak of a step: ResNet-50 (32 x 32, CIFAR stem), Adam, simulated T4")
gib = {key: run.peak_bytes / 2**30 for key, run in runs.items()}
notes = {f"{gib[64, FP16] / gib[64, None]:.2f} of fp32": (64, gib[64, FP16]), "one peak for both": (1, gib[1, None])}
show(with_notes(figure, sizes, notes),
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
low, reason = choose_autocast_dtype(device)
real = [at_one_image(dtype) for dtype in (None, low)]
print(f"your bet for one image: {my_bet_ratio}")
print(f"{Evidence.MEASURED} here: {format_bytes(real[0].peak_bytes)} in fp32, {real[1].peak_bytes / real[0].peak_bytes:.3f} times that in {low}")
peaks = pd.DataFrame({name: {run.items: run.peak_bytes / 2**20 for run in line} for name, line in lines.items()})
peaks["mixed / fp32"] = peaks["mixed"] / peaks["fp32"]
assert (peaks["mixed / fp32"] <= 1).all() and peaks["mixed / fp32"].iloc[-1] < 0.7, "was the model changed?"
peaks.rename_axis("images").rename(columns={"fp32": "fp32 (MiB)", "mixed": "mixed (MiB)"}).round(2)

# %% [markdown]
# **Read it.** At one image mixed precision changes nothing, measured here and simulated for the T4. (Where this machine is a
# CPU the two peaks differ: its Adam updates one tensor after another, a GPU's all at once.) The lines part between 4 and 8
# images. At 64 the ratio is 0.6, and still no half: the model states are in both peaks. New words stand in the
# [glossary](../00_glossary.ipynb).

# %% [markdown]
# ## 2. The conversion, by hand
#
# fp16 has few digits, and little range: from 65,520 on it is infinite, below $2^{-25}$ it rounds to 0. Three things make it
# train all the same. **Casts:** layers compute on 16-bit copies of weights and inputs. **Master weights:** what the optimizer
# updates stays fp32. **A loss scale:** the loss is multiplied before backward, so that small gradients stay above 0, and the
# gradients are divided after it, in fp32. If one is not finite, the scale was too large: skip the step, and halve it. After
# `patience` good steps, double it.

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
# Now the library's two calls. **`torch.amp.autocast`** makes the casts, operation by operation: matrix products and
# convolutions take 16 bits, what needs digits or range fp32. It wraps forward and loss; backward is outside, and runs each
# operation in the type that forward chose. **`torch.amp.GradScaler`** is the loss scale with its check.

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
# Both train one small network on the same 12 batches. The scale starts high and `patience` is 4, so that you see it fall and
# rise; PyTorch's own defaults are $2^{16}$ and 2,000.

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
# **Read it.** By hand and by library: the same losses on this machine, the same scale. Three steps of twelve are skipped: fp16 made
# nine updates. bf16 runs without a scaler: it has the range of fp32, so small gradients
# do not become 0.
#
# <div class="alert alert-warning"><b>Trap.</b> A T4 or V100 has no units for bf16, and
# <code>torch.cuda.is_bf16_supported()</code> says True there all the same: it counts <a
# href="https://github.com/pytorch/pytorch/pull/148322">emulation</a>. Ask
# <code>is_bf16_supported(including_emulation=False)</code>; on those cards take fp16 with a scaler.</div>

# %% [markdown]
# ### Which tensor has which type
#
# A *forward hook* is called with what a layer returns. Here hooks note its type, on a simulated T4.
# Predict: which of the eight rows will say `float32`?

# %%
types = {}


def a_layer_of_each():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, 16), nn.LayerNorm(16))
    for layer in model:
        layer.register_forward_hook(lambda layer, _, out: types.update({f"output of {type(layer).__name__}": out.dtype}))
    return model, torch.optim.Adam(model.parameters())


# %%
def noted_step(model, optimizer):
    weight = model[0].weight
    with torch.amp.autocast(weight.device.type, dtype=FP16):
        loss = F.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.zeros(2, dtype=torch.long))
    loss.backward()
    optimizer.step()
    types.update({"the loss": loss.dtype, "parameter": weight.dtype, "its gradient": weight.grad.dtype,
                  "Adam's state": optimizer.state[weight]["exp_avg"].dtype})


simulate(a_layer_of_each, noted_step, device="T4")
del types["output of Flatten"]  # only another shape
assert {types["parameter"], types["its gradient"], types["Adam's state"]} == {torch.float32}, "did you call half()?"
pd.DataFrame({"type": types}).astype(str)

# %% [markdown]
# **Read it.** Three layers return 16-bit numbers. Layer norm and the loss are on [CUDA's list of operations in
# fp32](https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32), so a transformer keeps more in
# fp32 than this ResNet. What *stays* from step to step is fp32: the masters, their gradients, Adam's state. ([Who keeps
# which copy, and when](../advanced/15_design_studio.ipynb#2.-On-paper).)
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
largest_lost = gradients[lost].abs().max().item()
print(f"gradients of the lost: {(gradients[lost] == 0).sum()} are 0, the largest is {largest_lost:.1e}; 0.001 times its square: {largest_lost**2 / 1000:.1e}")
assert lost.any() and largest_lost**2 / 1000 < 2**-24, "the fp16 model should break here: is eps still 1e-8?"
ones = weights.new_ones(4096, dtype=torch.float32).uniform_(0.01, 1)  # and with fp32 states?
for dtype in (torch.float16, torch.bfloat16):
    stuck = ones.to(dtype) - 1e-4 == ones.to(dtype)
    print(f"{dtype}: a step of 1e-4 rounds away for {stuck.float().mean():.0%} of the weights from 0.01 to 1")

# %% [markdown]
# **Diagnose it.** The gradients are finite, and two weights of three are not after the step, just those with a $v$ of 0. After one step $v$ is $0.001 g^2$: below $2^{-25} = 3 \cdot 10^{-8}$ that is 0 in fp16, though $g$
# is not. The default Adam divides by $\sqrt{v} + \epsilon$, and $\epsilon$ is 0 in fp16 as well (the fused one computes its step in
# fp32 and only stores $v$ as 0). So *states* stay in fp32. *Weights* do for another reason: most small updates round away, in
# bf16 even more. Neither halves.
#
# ### Old names
#
# `torch.cuda.amp` is a deprecated name of `torch.amp`; [Apex](https://github.com/NVIDIA/apex)'s `amp.initialize` is
# [removed](https://github.com/NVIDIA/apex/pull/1896).

# %% [markdown]
# ## 3. What halves, and which moment decides
#
# Take $P$ parameters, Adam, batch $b$, and $a$ bytes of activations per image in fp32. Two moments
# compete for the peak:
#
# | moment | fp32 | mixed |
# |---|---|---|
# | backward begins (`zero_grad()` freed the gradients) | $12P + ab$ | $12P + 2P + ab/2$ |
# | optimizer step (no activations any more) | $16P + 4P$ | $16P + 4P$ |
#
# ($4P$ in the lower row are temporaries of Adam on a GPU. Who accumulates gradients over several backwards has them in the
# upper row too.) The peak is the larger of the two. First the upper row.

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
# **Read it.** Parameters, Adam's state and the running statistics of batch norm do not move by a byte. Activations halve.
# *Cast weights*, the 16-bit copies, are added: a little less than $2P$, because batch norm's weights are not cast.
#
# **Question.** Predict the peak of mixed precision at 1024 images, in GiB. $P$ and the activations of 64 images stand
# above.

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
# **Read it.** For a few images the optimizer step decides, without activations or copies: mixed precision can change
# nothing. Where activations decide, it saves. The formula is low, by an eighth at 8 images: it knows no workspace of the
# matrix library, and not that gradients begin while most activations are alive.

# %%
compare([replace(runs[key], name=f"{runs[key].name}: {runs[key].peak_phase}") for key in [(1, None), (1, FP16), (16, None), (16, FP16)]],
        title="ResNet-50 with Adam, one image and several (16)")

# %% [markdown]
# **Read it.** At 16 images mixed precision halves the activations and adds a sliver of casts: most of the 44.8 MiB are freed
# by then. At one image the peak holds neither.
#
# ## 4. What fills a 16 GB card
#
# A card with "16 GB" on its box does not give you 16 GiB. T4s report 14.56 GiB
# ([here](https://github.com/Zheng-Chong/CatVTON/issues/133)) to 14.76 GiB
# ([there](https://github.com/xinge008/Cylinder3D/issues/109)); the course takes 14.74. The CUDA context takes some 0.5 GiB
# of that before your first tensor: an assumption, varied below. The script as it was:

# %%
card = simulated_device("T4")
most = card.usable_bytes
print(f"a T4's {format_bytes(card.total_bytes)} leave {format_bytes(most)} beside the context")
try:
    on_the_card(1024, within=most)
except OverBudgetError as error:
    print(error)

# %% [markdown]
# **Read it.** Batch 1024 in fp32 does not fit. What does? Two peaks give a line, and the line a guess. But the card must hold
# what its allocator *reserves*: tensors, and gaps that it cannot give back. So the search goes down from the guess in steps
# of 32 images, to one size that fits while the next does not.

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
# The verdict hangs on the assumed context. Halve it, and double it.

# %%
def with_context(mib):
    room = card.total_bytes - mib * 2**20
    left = {f"{name}: left (GiB)": (room - run(1024, dtype).peak_bytes) / 2**30 for name, dtype in [("fp32", None), ("mixed", FP16)]}
    return left | {f"{name}: largest": int(limit + (room - most) / slope) for name, (limit, _, slope) in limits.items()}


verdicts = pd.DataFrame({mib: with_context(mib) for mib in (250, 500, 1000)}).T
assert (verdicts["mixed: left (GiB)"] > 0).all() and (verdicts["fp32: left (GiB)"] < 0).all(), "the context decides"
print(f"left beside the tensors of batch 1024 ({Evidence.SIMULATED}); largest batch, along the line ({Evidence.PREDICTED})")
verdicts.rename_axis("context (MiB)").round(2)

# %%
at_1024 = {dtype: run(1024, dtype).peak_bytes / 2**30 for dtype in (None, FP16)}
record = recorded("resnet50")[0]
ran = {name: {row["batch"]: row for row in record.rows if row["image_size"] == 32 and row["precision"] == name and row["batch"] < 1200}
       for name in ("tf32", "amp fp16")}
ends = {"fp32": [run(size, None) for size in (64, 512, 1024)], "mixed": [run(size, FP16) for size in (64, 512, 1024, largest[1])]}
figure = draw_peaks(ends, limits={f"what a T4 leaves: {format_bytes(most)}": most},
                    title="ResNet-50 (32 x 32, CIFAR stem) with Adam: simulated T4, recorded H200")
figure = with_recorded(figure, *({batch: row["allocated_peak_bytes"] for batch, row in rows.items()} for rows in ran.values()))
show(with_notes(figure, (64, 512, *largest, 1024), {f"{peak:.1f} GiB": (1024, peak) for peak in at_1024.values()}),
     alt="Peak memory against batch size, two straight lines. fp32 meets the card's limit a little below "
     "600 images and stands far above it at 1024; mixed precision is below the limit at 1024 and meets it near 1150. "
     "The peaks recorded on an H200 lie on the lines.")

# %%
print(f"{record.evidence}: {record.device}, {record.date}; largest batch: of sizes in steps of 32, at most 16 GB ({format_bytes(16e9)}) reserved")
for name, dtype in [("fp32", None), ("tf32", None), ("amp fp16", FP16)]:
    for row in (row for row in record.rows if row["image_size"] == 32 and row["precision"] == name):
        if row["quantity"] == "largest batch" or row["batch"] == 512:
            beside = f", simulated {format_bytes(run(512, dtype).peak_bytes)}" if row["batch"] == 512 else ""
            print(f"{row['quantity']:<13} {name:<8} {row['batch']:>5} images, {row['images_per_second']:>6,.0f} a second: allocated",
                  f"{format_bytes(row['allocated_peak_bytes'])}, reserved {format_bytes(row['reserved_peak_bytes'])}{beside}")

# %% [markdown]
# **Read it.** Yes: it fits. 1.6 GiB stay beside the tensors, 1.1 with the largest context, for gaps and cuDNN's
# *workspace*, which the simulation leaves out: in fp32 without TF32 0.9 GiB at 512 images. An H200 held to 16 GB doubles its
# batch from 576 images to 1184. There, at 512 images, fp16 is 3.8 times as fast as fp32, or 1.4 times if convolutions use TF32,
# PyTorch's default from the A100 on.
#
# ## 5. The same accuracy?
#
# NVIDIA published pairs of runs of its recipe for ResNet-50 on ImageNet ([its
# README](https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5)): SGD, in
# fp16 with a fixed loss scale of 128. Top-1 accuracy in percent:

# %%
rows = pd.DataFrame(table("nvidia_resnet50_accuracy")).set_index(["machine", "epochs"]).astype(float)
rows["mixed - fp32"] = (rows["mixed_top1"] - rows["fp32_top1"]).round(2)
print(f"published: {source('nvidia_resnet50_accuracy').partition(' @')[0]}")
rows[["fp32_top1", "fp32_spread", "mixed_top1", "mixed_spread", "mixed - fp32"]]

# %% [markdown]
# **Read it.** Mixed precision is lower in four pairs of five, by 0.23 points at most, and higher in one, by 0.13. (*Spread* is
# the ± of its table, which does not say of what.) A pair differs in more than the type: by its `configs.yml`, mixed runs use
# channels last, and on a DGX-1 larger batches. That is SGD on ImageNet; for Adam on CIFAR-10 nothing is shown here.
#
# To compare yourself, change the type alone, over *paired* seeds. A double batch is another change.

# %% [markdown]
# ## 6. The scenario as asked
#
# *"ResNet-50 on CIFAR-10 overflows our 16 GB card at batch 1024. Use mixed precision; keep the accuracy."* The file is the
# loop above around torchvision's network. It saves the scaler beside model and optimizer: run again, it goes on.

# %%
here.write_script("resnet50_amp.py", TOP, train_amp, MAIN.replace("PEAK", f"{at_1024[FP16]:.2f}"))

# %%
score("02", runs[1024, None])
score("02", runs[1024, FP16])
scoreboard("02")

# %% [markdown]
# **Read it.** Not shown: ResNet-50's accuracy on CIFAR-10, and its speed on a T4. For those run the script with `512 10 0 fp32`
# and `512 10 0 fp16`, then with seeds 1 to 4 in place of the 0, then `1024 10 0 fp16`.

# %% [markdown]
# ## Recap
#
# - 16-bit copies to compute with, fp32 masters to update, and in fp16 a loss scale that skips what overflows. In PyTorch:
#   forward and loss inside autocast; then scale, backward, step, update.
# - Activations halve in this ResNet. Parameters, gradients and optimizer state stay; copies of the weights are added.
# - The peak decides. At one image it does not move; at hundreds it nearly halves.
#
# **Test yourself.** A model of 3 billion parameters, trained with Adam in fp32, runs out of a 40 GB card at a batch of one
# text of 128 tokens. A colleague says: "turn on mixed precision". What do you expect?
#
# <details><summary>Answer</summary>
#
# It does not fit. Weights, gradients and states take 16 bytes per parameter, 48 GB, and PyTorch's default Adam peaks at 20
# bytes per parameter, 60 GB, in its step, where no activation is alive: there is nothing to halve. What helps is another optimizer, sharding or offload.
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
# **Plain PyTorch.** You have `model`, `optimizer`, `loss_function`, `loader` and `device`. Weights must be fp32 and no `half()`
# anywhere: load a transformers model with `dtype=torch.float32` (version 5 takes its checkpoint's type by default). Note
# losses and peak of your loop as it is; then write it so:
#
# ```python
# import torch
#
# assert {p.dtype for p in model.parameters()} == {torch.float32}, "the masters must be fp32: load the model so"
# fp16 = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
# scaler = torch.amp.GradScaler(device.type, enabled=fp16)  # one for the run; bf16 needs none
# if device.type == "cuda":
#     torch.cuda.reset_peak_memory_stats()  # else the peak of what ran before stays
# for step, (inputs, labels) in enumerate(loader):
#     optimizer.zero_grad()
#     with torch.amp.autocast(device.type, dtype=torch.float16 if fp16 else torch.bfloat16):
#         loss = loss_function(model(inputs.to(device)), labels.to(device))
#     scaler.scale(loss).backward()
#     # if you clip: scaler.unscale_(optimizer) first, so that gradients have their true size
#     scaler.step(optimizer)
#     scaler.update()
#     if step < 20:
#         print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():,.0f}")
# if device.type == "cuda":
#     print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
# ```
#
# It works if the *first* loss and the mean of losses 10 to 20 agree with fp32's to two digits, and the peak is lower. In fp16
# the scale halves at each skipped step; a scale that falls without end is a fault.
# With accumulated gradients, `step` and `update` come once, after the last `backward`. Save `scaler.state_dict()` too, and
# evaluate under autocast.
#
# **transformers.** You have `model` (in fp32) and `dataset`. The `Trainer` does this by one setting; it also clips, at 1.0:
#
# ```python
# import torch
# from transformers import Trainer, TrainingArguments
#
# assert {p.dtype for p in model.parameters()} == {torch.float32}, "the masters must be fp32: load the model so"
# fp16 = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)  # a T4, a V100
# settings = TrainingArguments(output_dir="out", per_device_train_batch_size=64, max_steps=20, logging_steps=1, fp16=fp16, bf16=not fp16)
# trainer = Trainer(model=model, args=settings, train_dataset=dataset)
# trainer.train()
# if torch.cuda.is_available():
#     print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
# ```
#
# A peak that does not move is made of states, or of activations that autocast leaves in fp32, such as a language model's logits.
# Plain PyTorch has `AdamW(..., fused=True)`, which takes the temporaries out of the optimizer step (the `Trainer`'s default
# has it); for the rest take another technique.
