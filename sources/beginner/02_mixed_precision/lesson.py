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
# **Promise.** You convert the script by hand, say beforehand what that does to the *peak*, and find the largest batch
# that fits a T4: more than 570 images in fp32, and more than 1150 in mixed precision (simulated).
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
from dataclasses import replace

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from evidence.record import recorded
from evidence.validation.tables import source, table
from utils import Evidence, OverBudgetError, check, cifar10, compare, draw_peaks, format_bytes, low_precision
from utils import measure, resnet, score, scoreboard, show, simulate, tf32
from utils.lessons.lesson_02.edge import largest_batch
from utils.lessons.lesson_02.figures import with_notes
from utils.lessons.lesson_02.script import MAIN, TOP
from utils.lessons.lesson_02.toy import a_transformer, on_tokens, percent_right, shrunk, shuffled, toy_network
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
# trust that). Here the GPU is a T4 with 16 GB, the card of many free notebooks. It has no units for bf16, so its
# 16-bit type is fp16.

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
    return simulate(build, lambda m, o: training_step(m, o, batch, dtype), device="T4", within=within,
                    items=batch, unit="images", name=f"{'mixed' if dtype else 'fp32'}, batch {batch}")

# %%
FP16, sizes = torch.float16, [1, 4, 8, 16, 64]
runs = {(size, dtype): on_the_card(size, dtype) for dtype in (None, FP16) for size in sizes}
lines = {name: [runs[size, dtype] for size in sizes] for name, dtype in [("fp32", None), ("mixed", FP16)]}
figure = draw_peaks(lines, title="ResNet-50 (32 x 32, CIFAR stem) with Adam: the peak of a step")
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
low, reason = low_precision(device)
real = [at_one_image(dtype) for dtype in (None, low)]
print(f"your bet for one image: {my_bet_ratio}")
print(f"{Evidence.MEASURED} here: {format_bytes(real[0].peak_bytes)} in fp32, {real[1].peak_bytes / real[0].peak_bytes:.3f} times that in {low}")
peaks = pd.DataFrame({name: {run.items: run.peak_bytes / 2**20 for run in line} for name, line in lines.items()})
peaks["mixed / fp32"] = peaks["mixed"] / peaks["fp32"]
assert (peaks["mixed / fp32"] <= 1).all() and peaks["mixed / fp32"].iloc[-1] < 0.7, "was the model changed?"
peaks.rename_axis("images").rename(columns={"fp32": "fp32 (MiB)", "mixed": "mixed (MiB)"}).round(2)

# %% [markdown]
# **Read it.** At one image mixed precision changes nothing, measured here and simulated for the T4. (The two peaks differ,
# since a GPU's Adam updates all tensors at once, a CPU's one after another.) The lines part between 4 and 8 images. At 64
# the ratio is 0.6, and still no half: the model states are in both peaks. New words stand in the
# [glossary](../00_glossary.ipynb).

# %% [markdown]
# ## 2. The conversion, by hand
#
# **`torch.amp.autocast`** wraps forward and loss. Inside, matrix products and convolutions cast
# their inputs to 16 bits; operations that need digits or range run in fp32. Backward is outside: it
# runs each operation in the type that forward chose.
#
# **`torch.amp.GradScaler`** is for fp16 alone. Small gradients would become 0 there, so it multiplies
# the loss by a large number, divides the gradients by it before the step, skips a step whose
# gradients overflowed, and adapts the number. So one scaler serves a whole run. It is a few bytes, which the simulated step
# leaves out.

# %%
def scaler_for(dtype):
    return torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)  # new


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


# %%
train_set, test_set = shrunk(cifar10("train"), 3072), shrunk(cifar10("test"), 2000)
few = list(shuffled(train_set, 64, 1, seed=0))[:4]


def four_losses(dtype):
    model = toy_network(seed=0).to(device)
    return train_amp(model, torch.optim.Adam(model.parameters(), lr=1e-2), scaler_for(dtype), few, dtype)


# %%
print(f"{low} suits this device: {reason}")
started = {str(dtype): four_losses(dtype) for dtype in (None, torch.bfloat16, FP16)}
for name, losses in started.items():
    print(f"{name:<15} losses", [round(loss, 4) for loss in losses])
    assert abs(losses[0] / started["None"][0] - 1) < 0.01, "same weights, same batch: run from the top"

# %% [markdown]
# **Read it.** Four lines of the loop are new or changed. The losses begin nearly the same (same weights and images, fewer
# digits), then drift apart a little. With bf16 the scaler is switched off and passes everything through: bf16 has the
# exponents of fp32, so small gradients do not become 0.
#
# <div class="alert alert-warning"><b>Trap.</b> A T4 or V100 has no units for bf16, and
# <code>torch.cuda.is_bf16_supported()</code> says True there all the same: it counts <a
# href="https://github.com/pytorch/pytorch/pull/148322">emulation</a>. Ask
# <code>is_bf16_supported(including_emulation=False)</code>; on those cards take fp16 with a scaler.</div>

# %% [markdown]
# ### Which tensor has which type
#
# A *forward hook* is called with what a layer returns. Here hooks note its type, on a simulated T4 under autocast.
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
# fp32 than this ResNet does. What *stays* from step to step is fp32, and so are gradients. Lesson 15 has [who keeps
# which copy, and when](../advanced/15_design_studio.ipynb#2.-On-paper).
#
# ### Break it, diagnose it: why not `model.half()`?
#
# Then everything halves, Adam's state as well. One step:

# %%
broken = toy_network(seed=0).half().to(device)
optimizer = torch.optim.Adam(broken.parameters())
images, labels = few[0]
F.cross_entropy(broken(images.half().to(device)).float(), labels.to(device)).backward()
gradients = torch.cat([p.grad.flatten() for p in broken.parameters()])
optimizer.step()
weights = torch.cat([p.detach().flatten() for p in broken.parameters()])
v = torch.cat([state["exp_avg_sq"].flatten() for state in optimizer.state.values()])
lost = ~weights.isfinite()
print(f"all gradients finite: {bool(gradients.isfinite().all())}; weights that are not, after one step: {lost.sum()} of {len(weights)}")
print(f"where v is 0: {(v == 0).sum()}, of these lost: {(lost & (v == 0)).sum()}; eps = 1e-8 in fp16: {torch.tensor(1e-8).half().item()}")
print("bytes of v per parameter:", v.nbytes / len(v))
assert lost.any(), "the fp16 model should break here: is eps still 1e-8?"

# %% [markdown]
# **Diagnose it.** The gradients are finite, and two weights of three are not after the step: the *optimizer step* broke
# them, just those with a $v$ of 0. That is the mean of squared gradients, and squares of small numbers are 0 in fp16. Adam
# divides by $\sqrt{v} + \epsilon$, and $\epsilon$ is 0 in fp16 as well. Autocast keeps weights and states in fp32, and that is why it does not halve them: no `half()` beside it,
# says [PyTorch](https://docs.pytorch.org/docs/stable/amp.html).
#
# ### Old names
#
# `torch.cuda.amp` is `torch.amp` for CUDA alone. [Apex](https://github.com/NVIDIA/apex), NVIDIA's library, had
# `amp.initialize` before, now [removed](https://github.com/NVIDIA/apex/pull/1896). Its `FusedAdam` is
# `AdamW(..., fused=True)` today. *TF32* (A100 and newer; fp32 tensors, multiplied with 10 binary digits) and
# `channels_last` change speed, and bytes by cuDNN's workspace alone.

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
print(f"MiB when backward begins, 64 images   ({runs[64, None].evidence})")
(alive / 2**20).round(2).assign(**{"mixed / fp32": ratio.astype(str).replace("inf", "added")})

# %% [markdown]
# **Read it.** Parameters, Adam's state and the running statistics of batch norm do not move by a byte. Activations nearly
# halve. *Cast weights*, the 16-bit copies, are added: a little less than $2P$, because batch norm's weights are not
# cast. Now the larger of both moments:

# %%
P = sum(p.numel() for p in build()[0].parameters())
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
# nothing. Where activations decide, it saves. The formula is low, by an eighth at 8 images:
# it knows no workspace of the matrix library, no temporaries, and not that gradients begin while most activations are alive.

# %%
compare([replace(runs[key], name=f"{runs[key].name}: {runs[key].peak_phase}") for key in [(1, None), (1, FP16), (16, None), (16, FP16)]],
        title="ResNet-50 with Adam, one image and several")

# %% [markdown]
# **Question.** Now train with SGD without momentum: no state, no temporaries. Take these out of the formulas: from how many
# images on is the peak of mixed precision *lower* than that of fp32? ($P$ and $a$ stand above.)

# %%
first_lower_batch = ...
check("02.first_batch", first_lower_batch)

# %% [markdown]
# Can mixed precision *raise* a peak? **Predict** for a single layer of four million weights, and two rows of input.

# %%
def bytes_per_parameter(optimizer_of, dtype, **options):  # but for cuBLAS's workspace, "other"
    def layer():
        model = nn.Linear(1024, 4096)
        return model, optimizer_of(model.parameters(), **options)

    def step(model, optimizer):
        optimizer.zero_grad()
        with torch.amp.autocast(model.weight.device.type, dtype=dtype, enabled=dtype is not None):
            loss = model(torch.randn(2, 1024)).square().mean()
        loss.backward()
        optimizer.step()

    return sum(size for kind, size in simulate(layer, step, device="T4").breakdown.items() if kind != "other") / (1025 * 4096)


# %%
for optimizer_of, options in [(torch.optim.SGD, {}), (torch.optim.Adam, {"fused": True}), (torch.optim.Adam, {})]:
    plain, mixed = (bytes_per_parameter(optimizer_of, dtype, **options) for dtype in (None, FP16))
    print(f"{optimizer_of.__name__:<5}{options or ''!s:<16} peak, bytes per parameter: {plain:.1f} in fp32, {mixed:.1f} mixed")
    assert options or optimizer_of is torch.optim.Adam or mixed > 1.1 * plain, "two gradients should be alive together"

# %% [markdown]
# **Read it.** Backward makes the weight's gradient in 16 bits, then its fp32 form, and for a moment both are alive: $4P + 2P
# + 4P$ with SGD, where fp32 holds $8P$. Only plain Adam's temporaries hide that. So weights without activations gain no
# memory.

# %% [markdown]
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
# **Read it.** Batch 1024 in fp32 does not fit. What does? Two batches give a straight line of peaks, and the line a
# guess. But the card must hold what its allocator *reserves*, tensors and the gaps between them. So the search goes down
# from the guess, until one size fits and the next does not.

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

# %% [markdown]
# The verdict hangs on the assumed context. Halve it, and double it.

# %%
def with_context(mib):
    room = card.total_bytes - mib * 2**20
    spare = {f"{name}: spare (GiB)": (room - run(1024, dtype).peak_bytes) / 2**30 for name, dtype in [("fp32", None), ("mixed", FP16)]}
    return spare | {f"{name}: largest": int(limit + (room - most) / slope) for name, (limit, _, slope) in limits.items()}


verdicts = pd.DataFrame({mib: with_context(mib) for mib in (250, 500, 1000)}).T
assert (verdicts["mixed: spare (GiB)"] > 0).all() and (verdicts["fp32: spare (GiB)"] < 0).all(), "the context decides"
print(f"spare beside the tensors of batch 1024 ({Evidence.SIMULATED}); largest batch, along the line ({Evidence.PREDICTED})")
verdicts.rename_axis("context (MiB)").round(2)

# %%
ends = {"fp32": [run(size, None) for size in (64, 512, 1024)], "mixed": [run(size, FP16) for size in (64, 1024)]}
at_1024 = {dtype: run(1024, dtype).peak_bytes / 2**30 for dtype in (None, FP16)}
figure = draw_peaks(ends, limits={f"what a T4 leaves: {format_bytes(most)}": most},
                    title="ResNet-50 (32 x 32, CIFAR stem) with Adam on a 16 GB card")
show(with_notes(figure, (64, 512, *largest[:1], 1024), {f"{peak:.1f} GiB": (1024, peak) for peak in at_1024.values()}),
     alt="Peak memory against batch size, two straight lines. fp32 meets the card's limit a little below "
     "600 images and stands far above it at 1024; mixed precision is below the limit at 1024.")

# %% [markdown]
# **Read it.** Yes: it fits, and beside the tensors about 1 GiB stays even with the largest context. The simulation leaves
# out the *workspace* that cuDNN's convolutions take for a moment; where there is too little, PyTorch [tries another
# algorithm](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cudnn/Conv_v8.cpp). What a real GPU took of the
# same network, how fast, and its largest batch in 16 GB; then two other models, simulated:

# %%
record = recorded("resnet50")[0]
for row in record.rows:
    if row["image_size"] == 32 and (row["quantity"] == "largest batch" or row["batch"] == 512):
        print(f"{row['quantity']:<13} {row['precision']:<8} {row['batch']:>5} images, {format_bytes(row['requested_peak_bytes']):>9},",
              f"{row['images_per_second']:>6,.0f} images/s ({record.evidence}: {record.device}, {record.date})")


def activations(build, step):
    found = [when_backward_begins(simulate(build, lambda m, o: step(m, o, dtype), device="T4"))["activations"] for dtype in (None, FP16)]
    return f"{format_bytes(found[0])} of activations in fp32, {found[1] / found[0]:.2f} times that mixed   ({Evidence.SIMULATED})"


print("ImageNet stem, 64 images:       ", activations(lambda: build("imagenet"), lambda m, o, dtype: training_step(m, o, 64, dtype)))
print("12 transformer blocks, 2 x 1024:", activations(a_transformer, on_tokens))

# %% [markdown]
# **Read it.** fp16 takes half of fp32's bytes and doubles the batch. The workspace gives way where room is short: fp32's
# 576 images take little more than its 512, and are the simulated limit. fp16 is nearly four times as fast as fp32
# without TF32, a third faster than with it. "Half" hangs on the model: a transformer halves less.
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
# **Read it.** Mixed precision is lower in four pairs of five, by 0.23 points at most, and higher in one, by 0.13. Expect the same accuracy to a quarter of a point.
#
# How to compare yourself, on a **toy network**: change the type alone.

# %%
def accuracy(seed, dtype):
    model = toy_network(seed).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train_amp(model, optimizer, scaler_for(dtype), shuffled(train_set, 128, 2, seed), dtype)
    return percent_right(model, test_set)


# %%
final = pd.DataFrame({name: [accuracy(seed, dtype) for seed in range(6)] for name, dtype in [("fp32", None), ("fp16", FP16)]})
final["fp16 - fp32"] = final["fp16"] - final["fp32"]
half_width = 2.571 * final["fp16 - fp32"].std() / 6**0.5  # Student's t of 5 degrees of freedom, 95%
assert final.min()["fp32"] > 20 and abs(final["fp16 - fp32"].mean()) < 3, "guessing gives 10%: the same seeds?"
print(f"percent right, toy network, six seeds   ({Evidence.MEASURED})")
print(f"fp16 - fp32: {final['fp16 - fp32'].mean():+.2f}, 95% interval +- {half_width:.2f}: a smaller effect could not be seen")
final.agg(["mean", "min", "max"]).T.round(2)

# %% [markdown]
# **Read it.** Two types of one seed differ by less than the seeds do among themselves: so compare pairs. The toy is trained briefly; for a final accuracy NVIDIA's table is the evidence.
#
# To double the batch is another change, half as many steps an epoch: with SGD and a warm-up, Goyal and others
# ([arXiv:1706.02677](https://arxiv.org/abs/1706.02677)) double the learning rate with it.

# %% [markdown]
# ## 6. The scenario as asked
#
# *"ResNet-50 on CIFAR-10 overflows our 16 GB card at batch 1024. Use mixed precision; keep the accuracy."* The file is your
# loop around torchvision's network. It times each epoch, and saves the scaler beside model and optimizer: run again, it
# goes on.

# %%
here.write_script("resnet50_amp.py", TOP, train_amp, MAIN.replace("PEAK", f"{at_1024[FP16]:.2f}"))

# %%
score("02", runs[1024, None])
score("02", runs[1024, FP16])
scoreboard("02")

# %% [markdown]
# **Read it.** Simulated: batch 1024 fits a T4 in mixed precision and not in fp32. Published: NVIDIA's accuracies.
# Recorded: peaks and speed on an H200. Measured here: the peaks of one image, and a toy's accuracy. Not shown: ResNet-50's
# accuracy on CIFAR-10, and its speed on a T4; for those run the script with `512 10 fp32`, `512 10 fp16` and `1024 10 fp16`.

# %% [markdown]
# ## Recap
#
# - Forward and loss inside autocast; then scale, backward, step, update. bf16 needs no scaler.
# - Activations nearly halve in convolutions and batch norm, less in a transformer. Parameters, gradients and optimizer state
#   stay. Copies of the weights are added.
# - The peak decides. At one image it does not move; at hundreds it nearly halves (this model).
# - Compare accuracy over paired seeds, and change one thing.
#
# **Test yourself.** A model of 3 billion parameters, trained with Adam in fp32, runs out of a 40 GB card at a batch of one
# text of 128 tokens. A colleague says: "turn on mixed precision". What do you expect?
#
# <details><summary>Answer</summary>
#
# It does not fit. Weights, gradients and states take 16 bytes per parameter, 48 GB, and plain Adam's step peaks at 20, 60 GB.
# What helps is another optimizer, sharding or offload.
#
# </details>
#
# Do the [lab](../../labs/beginner/02_mixed_precision.ipynb), in a copy (`make my-labs`), then compare with the
# [solution](../../solutions/beginner/02_mixed_precision.ipynb). Lesson [03](03_when_numbers_break.ipynb) breaks numbers on
# purpose.
#
# **Reference.** Micikevicius and others, *Mixed Precision Training*,
# [arXiv:1710.03740](https://arxiv.org/abs/1710.03740).

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
# scaler = torch.amp.GradScaler(device.type, enabled=fp16)  # one for the run; bf16 needs none
# if device.type == "cuda":
#     torch.cuda.reset_peak_memory_stats()  # else the peak of what ran before stays
# for inputs, labels in loader:
#     optimizer.zero_grad()
#     with torch.amp.autocast(device.type, dtype=torch.float16 if fp16 else torch.bfloat16):
#         loss = loss_function(model(inputs.to(device)), labels.to(device))
#     scaler.scale(loss).backward()
#     # if you clip: scaler.unscale_(optimizer) first, so that gradients have their true size
#     scaler.step(optimizer)
#     scaler.update()
# if device.type == "cuda":
#     print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
# ```
#
# Save `scaler.state_dict()` with the optimizer's, and evaluate under autocast too.
#
# **transformers.** You have `model` (in fp32) and `dataset`. The `Trainer` does the same by one setting (`fp16=True` on a
# T4 or V100):
#
# ```python
# from transformers import Trainer, TrainingArguments
#
# settings = TrainingArguments(output_dir="out", per_device_train_batch_size=64, max_steps=20, logging_steps=1, bf16=True)
# trainer = Trainer(model=model, args=settings, train_dataset=dataset)
# trainer.train()
# ```
#
# It works if the losses of the first steps agree to two digits and the peak is lower. If it did not move, activations do not
# decide it: `AdamW(..., fused=True)` takes the temporaries out of the optimizer step; states that are too large need another
# technique.
