# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 When numbers break
#
# {{badges}}
#
# **The question.** A mixed-precision run stalls, or turns to NaN. Which number broke, and where?
#
# **Promise.** You plant five faults, record each run, and name every fault from its record, down to the layer or the
# row, with its cure. Three of the five are gone in bf16, and two were never a matter of precision.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 65, and 80 for the lab | any laptop; this lesson runs on the CPU everywhere | under a minute of computing on two CPU cores |

# %% [markdown]
# ## A bet
#
# A run in fp16 uses loss scaling. At step 17 a single NaN ("not a number", what infinity minus infinity
# gives) stands in the data, in one row of one batch. Does the training loss become NaN for good
# (`"dies"`), or does training go on (`"lives"`)? Write your guess. Section 6 runs it.

# %%
my_bet = "dies"

# %% tags=["setup"]
here = setup("beginner/03")

# %%
import math
import warnings
from contextlib import nullcontext

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from utils import FlightRecorder, check, explore, show
from utils.lessons.lesson_03.cuda_list import CudaList
from utils.lessons.lesson_03.flight import draw_flight
from utils.lessons.lesson_03.format_figures import draw_bits, draw_formats
from utils.lessons.lesson_03.network import network
from utils.lessons.lesson_03.number_formats import FORMATS

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

# %% [markdown]
# ## 1. The formats
#
# A floating-point number has a sign bit $s$, $x$ *exponent* bits, read as a whole number $e$, and $m$ *mantissa* bits, read
# as $f$. With the bias $b = 2^{x-1} - 1$ it is worth
#
# $$(-1)^{s} \cdot 2^{e-b} \cdot \left(1 + f / 2^m\right)$$
#
# Exponent bits buy **range**, mantissa bits **digits**. Where $e = 0$ the leading 1 becomes 0 and the exponent $1 - b$: these
# **subnormal** numbers lose digits as they fade into zero. An $e$ of
# all ones means infinity or NaN. New words stand in the [glossary](../00_glossary.ipynb).

# %%
names = [name for name in FORMATS if "fp8" not in name]
show(draw_formats(names), alt="Ranges of four formats on a logarithmic line: bf16 and tf32 reach as far as "
     "fp32, fp16 far less. Beside it their numbers from 1 to 1.5: bf16 has the fewest.")

# %% tags=["nbval-check-output"]
print(f"{'format':<10}{'bits':>5}{'exponent':>10}{'mantissa':>10}{'largest':>12}{'step at 1':>12}{'smallest':>12}")
for form in (FORMATS[name] for name in names):
    print(f"{form.name:<10}{form.bits:>5}{form.exponent_bits:>10}{form.mantissa_bits:>10}"
          f"{form.largest:>12.4g}{form.epsilon:>12.2g}{form.smallest:>12.2g}")
for dtype, name in [(FP32, "fp32"), (FP16, "fp16"), (BF16, "bf16")]:
    assert torch.finfo(dtype).max == FORMATS[name].largest, f"{name}: the formula differs from PyTorch"

# %% [markdown]
# **Read it.** bf16 is fp32 with 16 mantissa bits cut off: the same range, few digits. fp16 spends
# three bits less on the exponent: more digits, and a range that ends at 65,504. tf32 is no storage
# format: an NVIDIA matmul may round fp32 inputs to it. Formats of 8 and 4 bits need scales:
# [lesson 20](../advanced/20_eight_bits.ipynb).
# Choose a number, a format, a bit to flip (below, 0.1 in bf16):

# %%
values = [0.1, 1.0, 1.001, 2049.0, 65504.0, 70000.0, 1e-7, 2e-8, 1e-40]
explore(draw_bits, format=names, value=values,
        flip=["no bit", "sign bit", "first exponent bit", "last exponent bit",
              "first mantissa bit", "last mantissa bit"])

# %%
figure, alt = draw_bits("bf16", 0.1)
show(figure, alt)

# %% [markdown]
# **Question.** In fp16 the step between neighbours is 1 at 1,024 and 2 at 2,048. You count in fp16:
# `n = n + 1`, from zero. At which number does the counter stop for ever?

# %%
counter_stops_at = ...
check("03.counter_stops", counter_stops_at)

# %% [markdown]
# ## 2. Three ways to break
#
# **Overflow**: too large, becomes infinity. **Underflow**: too small, becomes zero. **Swallowed
# update**: the weight is fine, the update is fine, and their sum is the old weight. Real tensors:

# %% tags=["nbval-check-output"]
print("overflow    fp16", torch.tensor(300.0, dtype=FP16) ** 2, "  bf16", torch.tensor(300.0, dtype=BF16) ** 2)
print("underflow   fp16", torch.tensor(1e-4, dtype=FP16) ** 2, "  bf16", torch.tensor(1e-4, dtype=BF16) ** 2)
weight, update = 1.0, 1e-3
for dtype in (FP32, FP16, BF16):
    before = torch.tensor(weight, dtype=dtype)
    after = before + torch.tensor(update, dtype=dtype)
    print(f"swallowed   {dtype!s:<15} {before.item()} + {update} = {after.item():.6f}", bool(after == before))
print("infinity - infinity =", torch.tensor(math.inf) - math.inf, "  0 * infinity =", torch.tensor(math.inf) * 0)

# %% [markdown]
# **Read it.** `True` says that the update was swallowed. fp16 fails by range, bf16 by digits: that is why mixed precision
# keeps the weights in fp32 and rounds copies of them. The last line shows where NaN comes from: infinities that meet each
# other or a zero.

# %% [markdown]
# ## 3. A run, and its flight recorder
#
# The network is small, so that its layers fit one figure: `0` is a linear layer, `1` and `2` are blocks, `3` is a norm, `4`
# the last linear layer. The `Norm`, an RMSNorm (each row is scaled to a mean square of 1), is written by hand.

# %%
class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


STEPS = 30
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(STEPS, 64, 32, generator=generator)
teacher = torch.randn(32, 8, generator=generator)
labels = (inputs @ teacher).argmax(-1)  # eight classes, a rule that can be learned

# %% [markdown]
# The **scaler** multiplies the loss before backward, so that small gradients stay above zero, and divides
# the gradients before the step. If one is not finite, it skips the step and halves the scale; after
# enough good steps it doubles it. The arguments of `train` are faults to plant, and some cures. The *flight
# recorder* notes for each step the loss, the scale, the norm (length) of all gradients, and the first tensor with an
# infinity or NaN: an "input", an "output" or the "loss" in forward, a "gradient" of a module's own backward, or an
# "incoming gradient" that came back to it.

# %%
def train(dtype, scaled=False, *, init_scale=2.0**16, interval=20, lr=0.1, clip=None, unscale=True,
          batches=inputs, loss_of=F.cross_entropy, loss_weight=1.0, mode=nullcontext,
          guard=False, model=None):
    model = model or network(Norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr / loss_weight, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=interval, enabled=scaled)
    with FlightRecorder(model, optimizer, scaler) as recorder:
        for x, y in zip(batches, labels, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != FP32), mode():
                loss = loss_weight * loss_of(model(x), y)
            scaler.scale(loss).backward()
            if clip:
                if unscale:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if not guard or all(p.grad.isfinite().all() for p in model.parameters()):
                scaler.step(optimizer)
                scaler.update()
            recorder.record(loss / loss_weight)
    return recorder.records


# %%
def summary(name, records):
    first = next((r for r in records if r.first), None)
    print(f"{name:<26} loss {records[0].loss:5.2f} ->{ending(records):6.2f}",
          f"  skipped {sum(r.skipped for r in records):2}",
          f"  first not finite: {f'step {first.step}, {first.first}' if first else 'none'}")


def ending(records):
    return sum(r.loss for r in records[-5:]) / 5


plain = {"fp32": train(FP32), "bf16, no scaler": train(BF16), "fp16, no scaler": train(FP16),
         "fp16, default scaler": train(FP16, scaled=True)}
for name, records in plain.items():
    summary(name, records)
gaps = {name: abs(ending(records) - ending(plain["fp32"])) for name, records in plain.items()}
assert max(gaps.values()) < 0.05, f"all four end alike on this task; apart by {gaps}"

# %% [markdown]
# **Read it.** Each line shows the first loss and the mean of the last five. Nothing breaks, so all that
# breaks from here on is **planted**. (PyTorch doubles the scale after 2,000 good
# steps, this run after 20.)
#
# ### Planted: a loss that is too small
#
# Multiply the loss by one millionth, the learning rate by a million: in exact arithmetic the same training. Which trains:
# fp16, fp16 with a scaler, bf16?

# %%
tiny = {"loss_weight": 1e-6}
stalled, rescued = train(FP16, **tiny), train(FP16, scaled=True, interval=5, **tiny)
for name, records in [("fp16, no scaler", stalled), ("fp16, scaler", rescued), ("bf16", train(BF16, **tiny))]:
    summary(name, records)
    if name != "fp16, no scaler":
        assert ending(records) < 0.6 * records[0].loss, f"{name} should train: is it scaled?"
assert all(r.grad_norm == 0 for r in stalled), "every gradient underflowed"
assert abs(ending(stalled) - stalled[0].loss) < 0.2, "only the batches differ"
print("share of zero gradients, step 0:", stalled[0].layers["4"].zero, "without,", rescued[0].layers["4"].zero, "with")
show(draw_flight(rescued, title="fp16, tiny loss, with a scaler"),
     alt="The loss falls; the scale doubles every five steps; the gradients are no longer zero.")

# %% [markdown]
# **Read it.** Without a scaler all gradients are zero: the network stands still (its loss moves only with
# the batches). With one they survive, and the loss falls as in fp32. The heat map has layers as rows, steps as columns, and
# as colour the share of the layer's scaled gradient that is 0 in fp16: hardly any.
#
# ### Planted: a scale that is too large
#
# Start the scale at $2^{30}$. Predict the skipped steps: the largest gradient times the scale must stay below 65,504, and
# each skip halves the scale.

# %%
probe = network(Norm)
F.cross_entropy(probe(inputs[0]), labels[0]).backward()
largest = max(p.grad.abs().max().item() for p in probe.parameters())
fits = math.floor(math.log2(FORMATS["fp16"].largest / largest))
falling = train(FP16, scaled=True, init_scale=2.0**30)
settled = next(r for r in falling if not r.skipped)
print(f"predicted: largest gradient {largest:.3f}, scale 2^{fits}, {30 - fits} skipped steps")
print(f"measured:  scale 2^{math.log2(settled.scale):.0f}, {settled.step} skipped steps")
assert all(r.skipped for r in falling[: settled.step]) and settled.step >= 8, "it skips until the scale fits"
assert abs(settled.step - (30 - fits)) <= 1, "one step a halving: was growth or backoff changed?"
assert ending(falling) < 0.7 * falling[0].loss, "after the skips it trains: is lr unchanged?"
show(draw_flight(falling, title="fp16, a scale that starts too large"),
     alt="The scale falls by half in each of the first steps, all marked as skipped, then settles; "
         "the loss falls from there on.")

# %% [markdown]
# **Read it.** Skipped steps are how a scaler *searches*, and no fault. A scale that falls without end is one.
#
# **Question.** A scaler starts at $2^{24}$. The largest gradient fits up to a scale of $2^{17}$. How many
# steps are skipped before the first good one?

# %%
skipped_steps = ...
check("03.skipped_steps", skipped_steps)

# %% [markdown]
# ## 4. What must stay in fp32
#
# `autocast` runs matmuls in 16 bits and lifts fragile operations to fp32. Which ones depends on the **device**: the CPU's
# choice, measured, beside [CUDA's published list](https://docs.pytorch.org/docs/stable/amp.html).

# %%
operations = {
    "softmax": lambda x: x.softmax(-1), "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "pow": lambda x: x.pow(2), "exp": lambda x: x.exp(), "sum": lambda x: x.sum(),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
}
with torch.autocast("cpu", dtype=FP16):
    x = nn.Linear(8, 8)(torch.randn(4, 8))
    on_cpu = {name: operation(x).dtype for name, operation in operations.items()}
lifted_here = {name for name, dtype in on_cpu.items() if dtype == FP32}
assert lifted_here == {"cross_entropy", "mse_loss"}, "this PyTorch lifts others on CPUs: read its list"
table = {"CPU, fp16 (measured)": map(str, on_cpu.values()), "CUDA (published)": "torch.float32"}
pd.DataFrame(table, index=pd.Index(on_cpu, name="result of"))

# %% [markdown]
# **Read it.** The CPU lifts the losses that it knows, but neither softmax nor norms nor powers. So a
# script can fail on a CPU and work on a GPU. This lesson stays on the CPU, where the faults happen; `CudaList` lifts what
# CUDA's autocast would.

# %%
scores = torch.tensor([[0.0, 20.0]], dtype=FP16)
print("log of a softmax in fp16:", scores.softmax(-1).log())
with CudaList():
    print("with CUDA's list:        ", scores.softmax(-1).log(), scores.softmax(-1).dtype)

# %% [markdown]
# **Read it.** A probability of two in a billion is zero in fp16, and its logarithm is infinite. Your own cure works
# everywhere: switch autocast off around the fragile part, and hand it fp32.

# %%
class Fp32Norm(Norm):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):  # on a GPU: "cuda"
            return super().forward(x.float())


with torch.autocast("cpu", dtype=FP16):
    large = torch.full((1, 4), 300.0, dtype=FP16)
    print("Norm    ", Norm(4)(large).detach(), "\nFp32Norm", Fp32Norm(4)(large).detach())

# %% [markdown]
# **Read it.** 300 squared is more than fp16 holds, so the plain norm divides by infinity. Without `.float()` the input
# would still be fp16.

# %% [markdown]
# ## 5. Five faults
#
# Each is recorded in fp16 with a scaler, beside its **twins** in bf16 and fp32: they are half of the diagnosis.

# %%
def three(fault):
    runs = {"fp16": train(FP16, scaled=True, **fault), "bf16": train(BF16, **fault), "fp32": train(FP32, **fault)}
    for name, records in runs.items():
        summary(name, records)
    return runs

# %% [markdown]
# ### (a) The loss falls in fp32 and hardly in fp16
#
# Gradients are clipped to a norm of 1. Look at the two norms: after backward, and what the optimizer stepped with.

# %%
unclipped = three({"clip": 1.0, "unscale": False})
for name, records in unclipped.items():
    print(f"{name}, step 0: norm after backward {records[0].grad_norm:.2f}, stepped with {records[0].step_norm:.2g}")

# %% [markdown]
# **Diagnose it.** Clipping to 1 and stepping with $1/65536$: somebody clipped *scaled* gradients, and the
# scaler divided afterwards ([Lightning did so](https://github.com/Lightning-AI/pytorch-lightning/issues/9694) in 2021).
# Cure: `scaler.unscale_(optimizer)` before `clip_grad_norm_`. (Adam divides by the
# gradient's size, so it hides this fault as far as its eps is far below $1/65536$.)

# %%
cured = train(FP16, scaled=True, clip=1.0)
summary("unscale_, then clip", cured)
r = unclipped["fp16"][0]
assert r.step_norm * r.scale < 1.001 and r.grad_norm > 1, "clipped while scaled: 1 / scale at most"
assert all(r.step_norm <= 1.001 for r in cured), "unscale_ first, then clip to 1"
assert ending(cured) < 0.6 * ending(unclipped["fp16"]), "the cured run trains: is lr unchanged?"

# %% [markdown]
# ### (b) The loss stands still, and the scale is not the reason
#
# The inputs come in raw sensor units, a thousand times larger. The norms should not care.

# %%
raw = {"batches": 1000 * inputs}
norms = three(raw)
show(draw_flight(norms["fp16"], title="(b) fp16"),
     alt="The loss stays near 2; a few steps, most of them early, have gradients that are not finite; else the "
         "gradients of all layers before the last are zero.")

# %% [markdown]
# **Diagnose it.** bf16 and fp32 train, so it is range. The recorder names `3`, a `Norm`, as the first
# module whose backward gave NaN. There $x^2$ overflows, $1/\sqrt{\infty} = 0$, and the norm quietly returns
# zeros. PyTorch's own detector names the operation, and the cure is the norm of section 4:

# %%
try:
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")  # they hold the traceback of the forward that made it
        train(FP16, scaled=True, **raw)
except RuntimeError as error:
    print("detect_anomaly:", error)
lifted = train(FP16, scaled=True, model=network(Fp32Norm), **raw)
summary("fp16, Fp32Norm", lifted)
listed = train(FP16, scaled=True, mode=CudaList, **raw)
summary("fp16, CUDA's list", listed)
assert "gradient" in norms["fp16"][0].first.kind, "the first signal is a gradient: is the data raw?"
assert ending(norms["fp16"]) > 1.5, "with the plain norm fp16 stalls: is the data still raw?"
for cured in (lifted, listed):
    assert ending(cured) < 0.7 * cured[0].loss, "a lifted norm trains: is it in force?"
    assert not any(r.skipped for r in cured[1:]), "lifted norms do not overflow: is it in force?"

# %% [markdown]
# **Read it.** Under CUDA's autocast this fault does not occur: `pow` and `rsqrt` are on its list. Unless the square is
# written `x * x`, which is on no list:

# %%
class ByProduct(Norm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


silent = train(FP16, scaled=True, mode=CudaList, model=(multiplied := network(ByProduct)), **raw)
summary("CUDA's list, x * x", silent)
print("gradients that are all zero:", sum(not p.grad.any() for p in multiplied.parameters()), "of", len(list(multiplied.parameters())))
with torch.autocast("cpu", dtype=FP16), CudaList():
    print("what the last norm puts out:", multiplied[:4](raw["batches"][0]).abs().max().item())
assert ending(silent) > 1.5 and not any(r.skipped or r.first for r in silent), "nothing learned, nothing reported"

# %% [markdown]
# **Read it.** No NaN, no skipped step, an empty recorder, and nothing learns: this one is real on GPUs. (PyTorch's own
# `nn.RMSNorm` [squared in fp16](https://github.com/pytorch/pytorch/pull/133085) when it was new.) What shows it are
# *zeros*: gradients, and the module's output.
#
# ### (c) NaN, and the scale falls without end
#
# A loss written by hand, as it stands in a formula, with sharpened logits:

# %%
def written_by_hand(logits, y):
    e = (8 * logits).exp()
    return -(e.gather(1, y[:, None]) / e.sum(-1, keepdim=True)).log().mean()


def in_fp32(logits, y):
    with torch.autocast("cpu", enabled=False):
        return written_by_hand(logits.float(), y)


losses = three({"loss_of": written_by_hand, "lr": 0.01})
print("scales, fp16:", [f"2^{math.log2(r.scale):.0f}" for r in losses["fp16"]][::5])
assert losses["fp16"][0].first.kind == "loss", "exp(8 x) overflows in fp16: was the 8 changed?"
assert losses["fp16"][-1].scale < 1, "a forward fault survives every scale, so the scale falls on"
lifted = train(FP16, scaled=True, loss_of=in_fp32, lr=0.01)
summary("fp16, loss in fp32", lifted)
listed = train(FP16, scaled=True, mode=CudaList, loss_of=written_by_hand, lr=0.01)
summary("fp16, CUDA's list", listed)
assert max(ending(lifted), ending(listed)) < 0.5 * lifted[0].loss, "in fp32 the exp fits: is it lifted?"

# %% [markdown]
# **Diagnose it.** "loss": every module is finite, the loss is not. No scale can cure it: the overflow
# happens *before* the scale is applied. $e^{x}$ passes 65,504 at
# $x = 11.1$. Lift the loss to fp32, or better, use `F.cross_entropy`, which subtracts the maximum first.
# CUDA's autocast lifts `exp`.
#
# ### (d) fp16 skips step after step, so blame fp16?

# %%
rates = three({"lr": 3.0})
show(draw_flight(rates["fp16"], title="(d) fp16"),
     alt="The loss jumps in the first steps, then gradients overflow and the scale falls step by step.")
before_first_skip = [round(r.loss, 1) for r in rates["fp16"][:3]]
print("fp16, first losses:", before_first_skip, "  fp32, largest loss:", f"{max(r.loss for r in rates['fp32']):.1e}")
assert max(r.loss for r in rates["fp32"]) > 50, "fp32 explodes as well: was the rate lowered?"
assert before_first_skip[1] > before_first_skip[0], "the loss rises before the first skip"

# %% [markdown]
# **Diagnose it.** The scale falls, steps are skipped: all the signs of a precision fault. But the loss *rose before* the
# first skip, and the fp32 twin explodes as well: the learning rate.

# %% [markdown]
# ## 6. Break it, diagnose it: a NaN in the data
#
# (e) One element of one batch is NaN. In fp16 with a scaler, then in bf16 and fp32:

# %%
spoiled = inputs.clone()
spoiled[17, 41, 5] = math.nan
nan_runs = three({"batches": spoiled})
summary("bf16 with a guard", train(BF16, batches=spoiled, guard=True))
found = next(r for r in nan_runs["fp16"] if r.first)
print("found at step", found.step, "-", found.first, "- skipped:", found.skipped)
assert (found.step, found.first.kind, found.first.rows) == (17, "input", (41,)), "spoiled: 17, row 41"
assert math.isfinite(ending(nan_runs["fp16"])), "the scaler skips the step with the NaN"
assert math.isnan(nan_runs["bf16"][-1].loss), "without a scaler the NaN enters the weights"
for name, records in nan_runs.items():
    print(f"the {name} run", "dies" if math.isnan(records[-1].loss) else "lives", end="; ")
print("your bet:", my_bet)

# %% [markdown]
# **Diagnose it.** The recorder says "input": the model got it and did not make it. Step and row lead to
# the sample. In fp16 the scaler took the NaN for an overflow and skipped the step: a scaler **hides** bad
# data. bf16 and fp32 have none, and one update with NaN ended them. With a **guard** bf16 lives, too: step only if all
# gradients are finite. (That step is not counted as skipped.)
#
# ### Lives, and is dead: batch norm
#
# A skipped step leaves the *weights* as they were. Batch norm changed its running statistics before that, in forward:

# %%
with_batch_norm = network(nn.BatchNorm1d)
alive = train(FP16, scaled=True, batches=spoiled, model=with_batch_norm)
summary("fp16, batch norm", alive)
statistics = [b for name, b in with_batch_norm.named_buffers() if name.endswith("running_mean")]
print("running means with NaN:", sum(bool(b.isnan().any()) for b in statistics), "of", len(statistics))
with_batch_norm.eval()
share = with_batch_norm(inputs[0]).isnan().float().mean().item()
print(f"evaluation on clean data: {100 * share:.0f}% of the outputs are NaN")
assert math.isfinite(ending(alive)) and share == 1, "training lives, evaluation does not: one NaN is planted"

# %% [markdown]
# **Diagnose it.** The training loss falls, and the model is dead: a running mean that was NaN once stays NaN. No guard on gradients helps, as forward has happened. Look at the batch *before* forward.
#
# bf16 cures (a), (b) and (c): what is a matter of range, or comes with a scaler.

# %% [markdown]
# ## Recap: training with AMP turns to NaN, what do you do?
#
# In this order; brackets name fault or section.
#
# | step | look at | if so |
# |---|---|---|
# | 1 | the fp32 twin: does it fail too? | not precision: learning rate (d), data (e), a bug |
# | 2 | the loss before the first bad step: did it rise? | learning rate, warm-up (d) |
# | 3 | skipped steps: does the scale settle? | no fault, if the loss falls and the batches are clean (3) |
# | 4 | the scale falls without end | an overflow that no scale reaches: 5 and 6 |
# | 5 | the first tensor that is not finite: "input"? | data; look at it before forward (e) |
# | 6 | "output", "gradient" or "loss" of which module? | `autocast(enabled=False)` and `.float()` there (4) |
# | 7 | the norm that was stepped with, against the clip | `unscale_` before clipping (a) |
# | 8 | zero gradients by layer | are outputs zero, too? fp32 there (b); else a scaler, or a larger loss (3) |
# | 9 | training is fine, evaluation is NaN | batch norm's running statistics (6) |
# | 10 | nothing helps | bf16 by autocast, weights in fp32 (2), with a guard (6) |
#
# Where ranks share the gradients (lesson 09), an overflow on one must skip the step on all; with FSDP2 the plain
# `GradScaler` [agrees on it](https://github.com/pytorch/pytorch/pull/132816).
#
# Do the [lab](../../labs/beginner/03_when_numbers_break.ipynb) in a copy (`make my-labs`), then compare with the
# [solution](../../solutions/beginner/03_when_numbers_break.ipynb).
#
# **References.** Micikevicius and others, *Mixed Precision Training*, 2017,
# [arXiv:1710.03740](https://arxiv.org/abs/1710.03740). PyTorch,
# [Automatic mixed precision examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html).

# %% [markdown]
# ## On Monday
#
# **Find the first bad tensor.** Your `model`'s step turned to NaN. A hook on each module raises at the first infinity
# or NaN:
#
# ```python
# import torch
#
# def tensors_of(value):
#     if isinstance(value, dict):  # keywords, and what transformers returns
#         value = list(value.values())
#     return [value] if torch.is_tensor(value) else [t for v in value for t in tensors_of(v)] if isinstance(value, (tuple, list)) else []
#
# def watch(name):
#     def hook(module, given, named, out):
#         for kind, values in [("input", (given, named)), ("output", out)]:
#             if not all(t.isfinite().all() for t in tensors_of(values)):
#                 raise FloatingPointError(f"{kind} of {name or 'the model'} ({type(module).__name__}) is not finite")
#     return hook
#
# hooks = [module.register_forward_hook(watch(name), with_kwargs=True) for name, module in model.named_modules()]
# # run the step here; afterwards: for each in hooks: each.remove()
# ```
#
# An output means a module that needs fp32, an input the data or an operation before it. If no hook raises, run the step under
# `torch.autograd.set_detect_anomaly(True)`: it names the operation whose backward gave NaN.
#
# **A step with a guard.** You have `model`, `optimizer`, `loss_function`, `batches`, `device` and `dtype`, fp16 or bf16. It
# skips bad data, clips unscaled gradients, and steps only if they are finite:
#
# ```python
# import torch
#
# scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
# skipped = 0
# for inputs, labels in batches:
#     if not inputs.isfinite().all():  # before forward: batch norm would remember it; on several ranks let all skip
#         skipped += 1
#         continue
#     optimizer.zero_grad()
#     with torch.amp.autocast(device.type, dtype=dtype):
#         loss = loss_function(model(inputs.to(device)), labels.to(device))
#     scaler.scale(loss).backward()
#     scaler.unscale_(optimizer)
#     norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     if scaler.is_enabled() or norm.isfinite():  # a scaler looks for itself
#         scaler.step(optimizer)
#     scaler.update()
#     # log with each step: loss, norm, scaler.get_scale(), skipped
# ```
#
# The scale should settle, and `skipped` stay at 0. **transformers.** You have `model` and `dataset`:
# log unfiltered.
#
# ```python
# from transformers import Trainer, TrainingArguments
#
# settings = TrainingArguments(output_dir="out", max_steps=3, bf16=True, max_grad_norm=1.0, logging_steps=1,
#                              logging_nan_inf_filter=False)  # True, the default, hides NaN from the log
# trainer = Trainer(model=model, args=settings, train_dataset=dataset)
# trainer.train()
# print([(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row])
# ```
