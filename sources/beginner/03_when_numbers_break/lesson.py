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
# **Promise.** You plant faults and read what each leaves in a record, down to layer or row, with its cure. Three appear only in
# fp16, and CUDA's autocast hides two of these; others strike every format.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 65, and 80 for the lab | any laptop; this lesson runs on the CPU everywhere | under a minute of computing on two CPU cores |

# %% [markdown]
# ## A bet
#
# A run in fp16 uses loss scaling. At step 17 one NaN ("not a number") stands in the data, in one row. Does the training
# loss become NaN for good (`"dies"`), or does training go on (`"lives"`)? Section 6 runs it.

# %%
my_bet = ...

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

from utils import NumericsRecorder, check, explore, show
from utils.lessons.lesson_03.cuda_list import CudaList
from utils.lessons.lesson_03.flight import draw_flight, draw_twins, draw_zeros
from utils.lessons.lesson_03.format_figures import draw_bits, draw_formats
from utils.lessons.lesson_03.network import network
from utils.lessons.lesson_03.number_formats import FORMATS

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

# %% [markdown]
# ## 1. The formats
#
# A number has a sign bit $s$, $x$ *exponent* bits, read as a whole number $e$, and $m$ *mantissa* bits, read as $f$.
# With the bias $b = 2^{x-1} - 1$ it is worth
#
# $$(-1)^{s} \cdot 2^{e-b} \cdot \left(1 + f / 2^m\right)$$
#
# Exponent bits buy **range**, mantissa bits **digits**. Where $e = 0$ stand zero and the **subnormal** numbers, which
# fade out; an $e$ of all ones means infinity or NaN. New words: [glossary](../00_glossary.ipynb).

# %%
names = [name for name in FORMATS if "fp8" not in name]
show(draw_formats(names, up_to=1.02), alt="Ranges of four formats on a logarithmic line: bf16 and tf32 reach as far "
     "as fp32, fp16 far less. Beside it their numbers from 1 to 1.02: bf16 has three, fp16 and tf32 have 21.")

# %% tags=["nbval-check-output"]
print(f"{'format':<10}{'bits':>5}{'exponent':>10}{'mantissa':>10}{'largest':>12}{'step at 1':>12}{'smallest':>12}")
for form in (FORMATS[name] for name in names):
    print(f"{form.name:<10}{form.bits:>5}{form.exponent_bits:>10}{form.mantissa_bits:>10}"
          f"{form.largest:>12.4g}{form.epsilon:>12.2g}{form.smallest:>12.2g}")
for dtype, name in [(FP32, "fp32"), (FP16, "fp16"), (BF16, "bf16")]:
    assert torch.finfo(dtype).max == FORMATS[name].largest, f"{name}: the formula differs from PyTorch"

# %% [markdown]
# **Read it.** bf16 is fp32 without 16 mantissa bits. fp16 spends three bits less on the exponent: more digits, and a
# range that ends at 65,504. tf32 is for matmuls of fp32 tensors only. For 8 and 4 bits see [lesson
# 20](../advanced/20_eight_bits.ipynb). One flipped bit of 0.1:

# %% jupyter={"source_hidden": true}
show(*draw_bits("bf16", 0.1, "first exponent bit"))
values = [0.1, 1.0, 1.001, 2049.0, 65504.0, 70000.0, 1e-7, 2e-8, 1e-40]
explore(draw_bits, format=names, value=values,
        flip=["no bit", "sign bit", "first exponent bit", "last exponent bit",
              "first mantissa bit", "last mantissa bit"])

# %% [markdown]
# **Question.** In fp16 the step between neighbours is 1 at 1,024 and 2 at 2,048; a sum halfway goes to the neighbour
# whose last bit is 0. You count `n = n + 1` from zero. At which number does the counter stop for ever?

# %%
counter_stops_at = ...
check("03.counter_stops", counter_stops_at)

# %% [markdown]
# ## 2. Three ways to break
#
# **Overflow**: too large, becomes infinity. **Underflow**: too small, becomes zero. **Swallowed update**: weight plus
# update is the old weight.

# %% tags=["nbval-check-output"]
print("overflow    fp16", torch.tensor(300.0, dtype=FP16) ** 2, "  bf16", torch.tensor(300.0, dtype=BF16) ** 2)
print("underflow   fp16", torch.tensor(1e-4, dtype=FP16) ** 2, "  bf16", torch.tensor(1e-4, dtype=BF16) ** 2)
for dtype in (FP32, FP16, BF16):
    sums = {update: torch.tensor(1.0, dtype=dtype) + torch.tensor(update, dtype=dtype) for update in (1e-3, 1e-4)}
    print(f"swallowed   {dtype!s:<15}", *(f"1 + {update} = {found.item():.6f} {found == 1}  " for update, found in sums.items()))
print("position 257 in bf16 is", torch.tensor(257.0, dtype=BF16).item())
print("infinity - infinity =", torch.tensor(math.inf) - math.inf, "  0 * infinity =", torch.tensor(math.inf) * 0,
      "  a mean over no label:", F.cross_entropy(torch.zeros(2, 3), torch.tensor([-100, -100])))

# %% [markdown]
# **Read it.** `True`: swallowed, in bf16 eight times sooner than in fp16, which also lacks range. So mixed precision
# keeps weights in fp32. Positions and rotary angles belong there, too. NaN comes from infinities that meet each other
# or a zero, as in an attention row that is masked everywhere, and from 0/0, as where all labels are ignored.

# %% [markdown]
# ## 3. A run, and its flight recorder
#
# Layer `0` is linear, `1` and `2` are blocks (a norm, two linear layers, a residual around them), `3` is a norm, `4`
# linear. `Norm`, an RMSNorm (each row is scaled to a mean square of 1), is written by hand.

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
# The **scaler** multiplies the loss before backward, so that small gradients stay above zero, and divides the gradients
# before the step. If one is not finite, it skips the step and halves the scale; after enough good steps it doubles it.
# The *flight recorder* notes of each step the loss, the scale, the norm of the gradients (after backward, and as the
# optimizer stepped with them), and the **first** tensor that is not finite, by kind:
#
# | kind | that tensor | accuses |
# |---|---|---|
# | input | came into the model or a module | data, or code before it |
# | output | made of finite inputs | this module |
# | loss | made of finite outputs | the loss function |
# | incoming gradient | came back to a module's output | what follows it |
# | gradient | made in a module's backward, for its weights or its input | it, or too large a scale |

# %%
def train(dtype, scaled=False, *, init_scale=2.0**16, interval=20, lr=0.1, clip=None, unscale=True,
          batches=inputs, loss_of=F.cross_entropy, loss_weight=1.0, mode=nullcontext,
          guard=False, model=None):
    model = model or network(Norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr / loss_weight, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=interval, enabled=scaled)
    with NumericsRecorder(model, optimizer, scaler) as recorder:
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
          f"  skipped {sum(r.step_norm is None for r in records):2}",  # the optimizer was not called
          f"  first not finite: {f'step {first.step}, {first.first}' if first else 'none'}")


def ending(records):
    return sum(r.loss for r in records[-5:]) / 5


plain = {"fp32": train(FP32), "bf16, no scaler": train(BF16), "fp16, no scaler": train(FP16),
         "fp16, scaler": train(FP16, scaled=True)}
for name, records in plain.items():
    summary(name, records)

# %% [markdown]
# **Read it.** Each line has the first loss and the mean of the last five. Nothing breaks: what does from here on is
# **planted**. (PyTorch doubles the scale after 2,000 good steps, this run after 20.)
#
# ### Planted: a loss that is too small
#
# Multiply the loss by one millionth, the learning rate by a million: on paper the same training.

# %%
tiny = {"loss_weight": 1e-6}
stalled, rescued = train(FP16, **tiny), train(FP16, scaled=True, **tiny)
for name, records in [("fp16, no scaler", stalled), ("fp16, scaler", rescued), ("bf16", train(BF16, **tiny))]:
    summary(name, records)
show(draw_zeros({"fp16, no scaler": stalled, "fp16, scaler": rescued}, title="A tiny loss: which gradients are zero in fp16"),
     alt="Two maps of layers by steps. Without a scaler every gradient is zero in every step; with one hardly any is.")

# %% [markdown]
# **Read it.** Without a scaler every gradient is zero: the network is frozen, its loss moves only with the batches.
# With one they survive. bf16 needs none.
#
# ### Planted: a scale that is too large
#
# Start the scale at $2^{30}$. Predict the skips: a batch's largest gradient times the scale must stay below 65,504. A
# skip leaves the weights, so each batch meets the first ones.

# %%
def largest_gradient(step):
    probe = network(Norm)  # the first weights
    F.cross_entropy(probe(inputs[step]), labels[step]).backward()
    return max(p.grad.abs().max().item() for p in probe.parameters())


falling = train(FP16, scaled=True, init_scale=2.0**30)
settled = next(r for r in falling if not r.skipped)
sizes = [largest_gradient(step) for step in range(20)]
predicted = next(k for k, size in enumerate(sizes) if size * 2.0 ** (30 - k) <= FORMATS["fp16"].largest)
print(f"predicted: scale 2^{30 - predicted}, {predicted} skipped steps")
print(f"measured:  scale 2^{math.log2(settled.scale):.0f}, {settled.step} skipped steps")
print(f"largest gradient of batch 0: {sizes[0]:.3f}, of batch 12: {sizes[12]:.3f}; 65504 / 2^18 = {65504 / 2**18:.3f}")

# %% [markdown]
# **Read it.** Skips are how a scaler *searches*, and no fault. Batch 0 alone would predict 12, but batch 12 does not
# fit $2^{18}$. A scale that falls without end is a fault.
#
# **Question.** A scaler starts at $2^{24}$. The largest gradient fits up to a scale of $2^{17}$. How many
# steps are skipped before the first good one?

# %%
skipped_steps = ...
check("03.skipped_steps", skipped_steps)

# %% [markdown]
# ### Planted: weights in bf16
#
# `model.to(bfloat16)` halves the memory. Train it with Adam at 3e-5, three times through the batches, beside weights in
# fp32 under autocast to bf16.

# %%
def fine_tune(weights):
    model, losses = network(Norm).to(weights), []
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-5)
    for step in range(3 * STEPS):
        with torch.autocast("cpu", dtype=BF16, enabled=weights == FP32):
            loss = F.cross_entropy(model(inputs[step % STEPS].to(weights)), labels[step % STEPS])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    same = sum((p == s).sum().item() for p, s in zip(model.parameters(), start, strict=True))
    share = same / sum(s.numel() for s in start)
    print(f"weights in {weights!s:<15} mean loss of the first pass {sum(losses[:STEPS]) / STEPS:.3f}, of the last "
          f"{sum(losses[-STEPS:]) / STEPS:.3f};  weights that never moved: {share:.0%}")
    return losses, share


in_bf16, in_fp32_weights = fine_tune(BF16), fine_tune(FP32)

# %% [markdown]
# **Read it.** No NaN, no skip, and nearly every update is swallowed: Adam's step, about the rate, is less than half the
# distance to the next bf16 number. (Its moments are in bf16, too.) Watch what share of the weights moves. Cure: fp32 weights, or
# an optimizer with an fp32 copy.
#
# ## 4. What must stay in fp32
#
# `autocast` runs matmuls in 16 bits and lifts fragile operations to fp32: the CPU's choice, measured, beside [CUDA's
# published list](https://docs.pytorch.org/docs/stable/amp.html).

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
table = {"CPU, fp16 (measured)": map(str, on_cpu.values()), "CUDA (published)": "torch.float32"}
pd.DataFrame(table, index=pd.Index(on_cpu, name="result of"))

# %% [markdown]
# **Read it.** The CPU lifts losses, but neither softmax nor norms nor powers. So a script can fail on a CPU and work on
# a GPU. This lesson stays where the faults happen; `CudaList` lifts what CUDA's autocast would. Your own cure works
# everywhere: no autocast around the fragile part, and fp32 into it.

# %%
class Fp32Norm(Norm):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):  # on a GPU: "cuda"
            return super().forward(x.float())  # without .float() it would still be fp16


scores = torch.tensor([[0.0, 20.0]], dtype=FP16)
print("log of a softmax:  fp16", scores.softmax(-1).log().tolist())
with CudaList():
    print("            CUDA's list", scores.softmax(-1).log().tolist())
with torch.autocast("cpu", dtype=FP16):
    large = torch.full((1, 4), 300.0, dtype=FP16)
    print("Norm of 300", Norm(4)(large).tolist(), "\nFp32Norm   ", Fp32Norm(4)(large).tolist())

# %% [markdown]
# **Read it.** A probability of two in a billion is zero in fp16. 300 squared overflows: the norm divides by infinity.

# %% [markdown]
# ## 5. Five faults
#
# Each in fp16 with a scaler, beside its **twins** in bf16 and fp32.

# %%
def three(fault):
    runs = {"fp16": train(FP16, scaled=True, **fault), "bf16": train(BF16, **fault), "fp32": train(FP32, **fault)}
    for name, records in runs.items():
        summary(name, records)
    return runs

# %% [markdown]
# ### (a) The loss falls in fp32 and hardly in fp16
#
# Gradients are clipped to 1. Compare the two norms.

# %%
unclipped = three({"clip": 1.0, "unscale": False})
for name, records in unclipped.items():
    print(f"{name}, step 0: norm after backward {records[0].grad_norm:.2f}, stepped with {records[0].step_norm:.2g}")
print(f"a network whose gradients are all zero ends at {ending(stalled):.2f} on these batches")

# %% [markdown]
# **Diagnose it.** fp16 ends where a frozen network does. It stepped with $1/65536$: somebody clipped *scaled*
# gradients, and the scaler divided afterwards ([as
# Lightning](https://github.com/Lightning-AI/pytorch-lightning/issues/9694) in 2021). Cure: `scaler.unscale_(optimizer)`
# before `clip_grad_norm_`. Adam, which divides by each element's size, hides this only while elements stay far above
# its eps, 1e-8. Of $N$ equal ones each is $1/(65536\sqrt{N})$:

# %%
cured = train(FP16, scaled=True, clip=1.0)
summary("unscale_, then clip", cured)
print("elements by N:", {f"{n:.0e}": f"{1 / 65536 / math.sqrt(n):.1e}" for n in (1e4, 1e6, 1e9)}, "(predicted)")

# %% [markdown]
# ### (b) The loss stands still, and the scale is not the reason
#
# The inputs come in raw sensor units, a thousand times larger. The norms should not care.

# %%
raw = {"batches": 1000 * inputs}
norms = three(raw)
print(f"ln 8 = {math.log(8):.2f}")
show(draw_flight(norms["fp16"], title="(b) fp16: nothing learns, most gradients are zero"),
     alt="The loss stays near 2; a few steps, most of them early, have gradients that are not finite in layers 0 to 2; "
         "else the gradients of all layers, the last one's weights too, are zero.")

# %% [markdown]
# **Diagnose it.** bf16 and fp32 train: it is range. fp16 starts at $\ln 8$: eight nearly equal outputs, the sign of a
# dead last norm. The recorder names `3`, a `Norm`: its backward first gave NaN, to its *input*, so the map, of
# parameters, is red before `3`. $x^2$ overflows, $1/\sqrt{\infty} = 0$, and the norm quietly returns zeros. PyTorch's
# slow detector names operation and line; section 4 has the cure:

# %%
try:
    with warnings.catch_warnings(record=True) as told, torch.autograd.set_detect_anomaly(True):
        train(FP16, scaled=True, **raw)
except RuntimeError as error:
    print("detect_anomaly:", error)
    forward = next(str(each.message) for each in told if "Traceback of forward" in str(each.message))
    print("made in forward by:", forward.partition("(Triggered")[0].strip().splitlines()[-1].strip())
lifted = train(FP16, scaled=True, model=network(Fp32Norm), **raw)
summary("fp16, Fp32Norm", lifted)
listed = train(FP16, scaled=True, mode=CudaList, **raw)
summary("fp16, CUDA's list", listed)

# %% [markdown]
# **Read it.** Under CUDA's autocast this does not occur: `pow` and `rsqrt` are on its list. `x * x` is on none:

# %%
class ByProduct(Norm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def zeros(model, x):
    """Modules that put out zeros only, and parameters whose gradient is zero; call it after backward."""
    silent = []
    hooks = [module.register_forward_hook(lambda m, given, out, name=name: silent.append(name) if not out.any() else None)
             for name, module in model.named_modules()]
    with torch.no_grad():
        model(x)
    for each in hooks:
        each.remove()
    return silent, [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()]


silent_run = train(FP16, scaled=True, mode=CudaList, model=(multiplied := network(ByProduct)), **raw)
summary("CUDA's list, x * x", silent_run)
with torch.autocast("cpu", dtype=FP16), CudaList():
    silent, unmoved = zeros(multiplied, raw["batches"][0])
print("modules that put out zeros:", silent)
print("gradients that are all zero:", len(unmoved), "of", len(list(multiplied.parameters())))

# %% [markdown]
# **Read it.** No NaN, no skip, and nothing learns. This follows from CUDA's list, here emulated, once activations pass
# 256. (PyTorch's `nn.RMSNorm`, when new, [squared in fp16](https://github.com/pytorch/pytorch/pull/133085).) Look for
# *zeros* as you look for NaN.
#
# ### (c) NaN, and the scale falls without end
#
# A loss written by hand, with sharpened logits:

# %%
def written_by_hand(logits, y):
    e = (8 * logits).exp()
    return -(e.gather(1, y[:, None]) / e.sum(-1, keepdim=True)).log().mean()


def in_fp32(logits, y):
    with torch.autocast("cpu", enabled=False):
        return written_by_hand(logits.float(), y)


steep = {"lr": 0.01, "init_scale": 2.0**13}  # its gradients are large: from 2^16 the scale would have to search
losses = three({"loss_of": written_by_hand, **steep})
print("scales, fp16:", [f"2^{math.log2(r.scale):.0f}" for r in losses["fp16"]][::5])
print("steps that passed:", [(r.step, round(r.loss, 1)) for r in losses["fp16"] if not r.skipped])
skipped = [r for r in losses["fp16"] if r.skipped]
print(f"skipped: {len(skipped)}, of which {sum(not math.isfinite(r.loss) for r in skipped)} with a loss that is not finite")
summary("fp16, loss in fp32", lifted_loss := train(FP16, scaled=True, loss_of=in_fp32, **steep))
summary("fp16, CUDA's list", train(FP16, scaled=True, mode=CudaList, loss_of=written_by_hand, **steep))

# %% [markdown]
# **Diagnose it.** Every module is finite, and in each skipped step the loss is not. That comes *before* the scale, so no scale
# cures it: $e^{x}$ passes 65,504 at $x = 11.1$, or a quotient falls to zero, whose logarithm is infinite. Lift the loss to fp32, or use
# `F.cross_entropy`, which subtracts the maximum first. CUDA's autocast lifts `exp`.
#
# ### (d) fp16 skips step after step, so blame fp16?

# %%
rates = three({"lr": 3.0})
show(draw_twins({"fp16": rates["fp16"], "fp32": rates["fp32"]}, log=True, title="(d) the fp32 twin explodes, too"),
     alt="Left, both losses rise from the first steps; fp32's ends in NaN. fp16's falls back to a flat line where its last "
         "norm puts out zeros. Right, fp16's scale falls step by step, most steps are skipped.")
before_first_skip = [round(r.loss, 1) for r in rates["fp16"][:3]]
print("fp16, first losses:", before_first_skip, "  fp32, largest loss:", f"{max(r.loss for r in rates['fp32']):.1e}")

# %% [markdown]
# **Diagnose it.** All the signs of a precision fault. But the loss rose *before* the first skip, and the fp32 twin
# explodes: the learning rate. Where a loss falls back (hollow marks) nothing recovered: the last norm overflows, fault
# (b) as a second illness.

# %% [markdown]
# ## 6. Break it, diagnose it: a NaN in the data
#
# (e) One element of one batch is NaN.

# %%
spoiled = inputs.clone()
spoiled[17, 41, 5] = math.nan
nan_runs = three({"batches": spoiled})
summary("bf16 with a guard", guarded := train(BF16, batches=spoiled, guard=True))
show(draw_twins({"fp16, scaler": nan_runs["fp16"], "bf16": nan_runs["bf16"], "bf16, guard": guarded},
                title="(e) one NaN in the data: the scaler hides it, bf16 dies of it", mark=(17, "NaN in the batch")),
     alt="Three losses fall alike to step 17. bf16's ends there; those of fp16 with a scaler and of bf16 with a guard go on.")

# %%
check("03.bet", my_bet)

# %% [markdown]
# **Diagnose it.** Step and row lead to the sample. The scaler took the NaN for an overflow and skipped the step: a
# scaler **hides** bad data. bf16 and fp32 have none, and one update with NaN ended them. With a **guard**, which steps
# only if all gradients are finite, bf16 lives, too.
#
# ### Lives, and is dead: batch norm
#
# A skipped step leaves the *weights*. Batch norm changed its running statistics before that, in forward:

# %%
with_batch_norm = network(nn.BatchNorm1d)
alive = train(FP16, scaled=True, batches=spoiled, model=with_batch_norm)
summary("fp16, batch norm", alive)
statistics = [b for name, b in with_batch_norm.named_buffers() if name.endswith("running_mean")]
print("running means with NaN:", sum(bool(b.isnan().any()) for b in statistics), "of", len(statistics))
with_batch_norm.eval()
share = with_batch_norm(inputs[0]).isnan().float().mean().item()
print(f"evaluation on clean data: {100 * share:.0f}% of the outputs are NaN")
torch.optim.swa_utils.update_bn(inputs, with_batch_norm)  # statistics anew, from clean batches
print(f"after update_bn: {100 * with_batch_norm.eval()(inputs[0]).isnan().float().mean().item():.0f}%")

# %% [markdown]
# **Diagnose it.** Weights are fine and evaluation is dead: a running mean that was NaN stays NaN, whatever guards the gradients.
# Look at the batch *before* forward; `update_bn` makes them anew. A last cell holds all this against your run:

# %% jupyter={"source_hidden": true}
def still(records):
    return ending(records) > 0.8 * records[0].loss


def trains(*runs):
    return all(ending(records) < 0.7 * records[0].loss for records in runs)


assert all(abs(ending(r) - ending(plain["fp32"])) < 0.05 for r in plain.values()), "section 3: four plain runs end alike"
assert all(r.grad_norm == 0 for r in stalled) and trains(rescued), "tiny loss: all zero without a scaler; is it scaled?"
assert settled.step >= 8 and abs(settled.step - predicted) <= 1, "one skip a halving: was growth or backoff changed?"
assert in_bf16[1] > 0.8 > in_fp32_weights[1], "bf16 swallows most updates: was the rate raised?"
assert on_cpu["cross_entropy"] == FP32 != on_cpu["softmax"], "this PyTorch lifts others on CPUs: read its list"
assert unclipped["fp16"][0].step_norm < 1e-4, "(a) clipped while scaled: 1 / scale at most"
assert all(r.step_norm <= 1.001 for r in cured) and trains(cured), "(a) unscale_ first, then clip to 1"
assert still(norms["fp16"]) and "gradient" in norms["fp16"][0].first.kind, "(b) fp16 stalls: is the data raw?"
assert trains(lifted, listed, lifted_loss), "(b), (c) a lifted norm or loss trains: is it in force?"
assert still(silent_run) and not any(r.skipped or r.first for r in silent_run), "(b) nothing learned, nothing reported"
assert losses["fp16"][0].first.kind == "loss" and losses["fp16"][-1].scale < 1, "(c) a forward fault survives every scale"
assert max(r.loss for r in rates["fp32"]) > 50, "(d) fp32 explodes as well: was the rate lowered?"
assert next(r for r in nan_runs["fp16"] if r.first).first.rows == (41,), "(e) the NaN stands in row 41"
assert math.isfinite(ending(alive)) and share == 1, "training lives, evaluation does not: one NaN is planted"
print("This run agrees with what sections 3 to 6 say of it.")

# %% [markdown]
# ## Recap: training with AMP stalls or turns to NaN, what do you do?
#
# Where the card has bf16, change to it first, by autocast. Then go down this list in either format (3, 4 and 7 are fp16's).
# Brackets name fault or section.
#
# | step | look at | if so |
# |---|---|---|
# | 1 | does the fp32 twin fail, too? | learning rate (d), data (e), 0/0 (2), a bug |
# | 2 | did the loss rise before the first bad step? | learning rate, warm-up (d) |
# | 3 | does the scale settle? | no fault, if the loss falls and the batches are clean (3) |
# | 4 | does it fall without end? (DeepSpeed: "loss scale already at minimum") | forward overflows (c), weights are NaN, or the rate is too large (d) |
# | 5 | is the first tensor that is not finite an "input"? | data; look before forward (e) |
# | 6 | of another kind? | the table of section 3; `autocast(enabled=False)` and `.float()` there (4) |
# | 7 | the norm stepped with, against the clip | `unscale_` before clipping (a) |
# | 8 | zero gradients | outputs zero, too? fp32 there (b); else a scaler, or a larger loss (3) |
# | 9 | no NaN, a flat loss: what share of the weights moved? | 16-bit weights: keep fp32 ones (3) |
# | 10 | training is fine, evaluation is NaN | batch norm's statistics: `update_bn` (6) |
#
# Where ranks share gradients, an overflow on one must skip the step on all; FSDP2's `GradScaler`
# [does](https://github.com/pytorch/pytorch/pull/132816).
#
# Do the [lab](../../labs/beginner/03_when_numbers_break.ipynb) in a copy (`make my-labs`), then see its
# [solution](../../solutions/beginner/03_when_numbers_break.ipynb).
#
# **Reference.** Micikevicius and others, *Mixed Precision Training*, 2017,
# [arXiv:1710.03740](https://arxiv.org/abs/1710.03740).

# %% [markdown]
# ## On Monday
#
# **Find the first bad tensor.** Hooks on `model` raise at the first infinity or NaN, and name outputs of zeros:
#
# ```python
# import math, torch
#
# if sick := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
#     raise FloatingPointError(f"weights are not finite, {sick[0]} first: go back to a checkpoint")
#
# def tensors_of(value):
#     if isinstance(value, dict):  # keywords, and what transformers returns
#         value = list(value.values())
#     return [value] if torch.is_tensor(value) else [t for v in value for t in tensors_of(v)] if isinstance(value, (tuple, list)) else []
#
# def is_sick(tensor):  # -inf too, but in a mask, whose other numbers are 0
#     if not tensor.is_floating_point() or tensor.isfinite().all():
#         return False
#     return bool(tensor.isnan().any() or (tensor == math.inf).any() or tensor.nan_to_num(0.0, 0.0, 0.0).any())
#
# def watch(name):
#     def hook(module, given, named, out):
#         told = f"of {name or 'the model'} ({type(module).__name__})"
#         if any(is_sick(t) for t in tensors_of((given, named))):
#             raise FloatingPointError(f"input {told} is not finite")
#         if not all(t.isfinite().all() for t in tensors_of(out)):
#             raise FloatingPointError(f"output {told} is not finite")
#         if tensors_of(out) and not any(t.any() for t in tensors_of(out)):
#             print(f"output {told} is all zeros")  # as that of each fresh LoRA adapter
#     return hook
#
# def watch_gradient(name):
#     def hook(gradient):
#         if not gradient.isfinite().all():
#             raise FloatingPointError(f"gradient of {name} is not finite")
#     return hook
#
# hooks = [module.register_forward_hook(watch(name), with_kwargs=True) for name, module in model.named_modules()]
# hooks += [p.register_hook(watch_gradient(name)) for name, p in model.named_parameters() if p.requires_grad]
# # run the step here; then the hooks, which wait for the GPU, go: for each in hooks: each.remove()
# # zero gradients: [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.any()]
# ```
#
# An input accuses data or code before it; an output this module, too large a rate, or 0/0. An infinite gradient may be a scaler's
# search. `torch.autograd.set_detect_anomaly(True)` names the line, but sees NaN only.
#
# **The twin** tells these apart: the last good checkpoint on the batches since then, in both precisions.
#
# ```python
# import copy, torch
#
# # You have: model, of the last good checkpoint; recorded, the batches since, on its device; make_optimizer(parameters), with the
# # run's rate; scale, the scaler's or 1. One GPU; a twin takes up to 16 bytes a parameter. FSDP copies no model: load it twice.
# for enabled in (True, False):
#     twin = copy.deepcopy(model) if enabled else copy.deepcopy(model).float()
#     optimizer = make_optimizer(twin.parameters())
#     torch.manual_seed(0)  # the same dropout
#     for step, (inputs, labels) in enumerate(recorded):
#         with torch.autocast(device.type, dtype=dtype, enabled=enabled):
#             loss = loss_function(twin(inputs), labels)
#         optimizer.zero_grad()
#         (loss * (scale if enabled else 1.0)).backward()
#         gradients = [p.grad.div_(scale if enabled else 1.0) for p in twin.parameters() if p.grad is not None]
#         norm = torch.nn.utils.get_total_norm(gradients)
#         print(dtype if enabled else "fp32", "step", step, "loss", loss.item(), "norm of the gradients", norm.item())
#         if norm.isfinite():
#             optimizer.step()
#     del twin, optimizer
# ```
#
# **A step with a guard** leaves out bad data, clips unscaled gradients, and stops a dead run:
#
# ```python
# import torch  # You have: model, optimizer, loss_function, batches, device, dtype
#
# scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
# bad_batches = skipped_steps = in_a_row = 0
# for inputs, labels in batches:
#     good = inputs.isfinite().all() & labels.isfinite().all() & (labels != -100).any()
#     bad = (~good).float().to(device)  # before forward: batch norm would remember it
#     if torch.distributed.is_initialized():
#         torch.distributed.all_reduce(bad)  # all ranks leave the batch out, or the others wait for ever
#     if bad:
#         bad_batches += 1
#         continue
#     optimizer.zero_grad()
#     with torch.amp.autocast(device.type, dtype=dtype):
#         loss = loss_function(model(inputs.to(device)), labels.to(device))
#     scaler.scale(loss).backward()
#     scaler.unscale_(optimizer)
#     norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # FSDP2: norm = norm.full_tensor()
#     if norm.isfinite():
#         scaler.step(optimizer)  # and the learning rate's scheduler
#         in_a_row = 0
#     else:
#         skipped_steps, in_a_row = skipped_steps + 1, in_a_row + 1
#     scaler.update()
#     # log with each step: loss, norm, scaler.get_scale(), bad_batches, skipped_steps
#     if scaler.get_scale() < 1 or in_a_row == 10 and not scaler.is_enabled():
#         raise FloatingPointError(f"{in_a_row} steps in a row were skipped: this is no search for a scale")
# ```
#
# After the search both counters stand still. **transformers** logs the mean of other losses in place of NaN, or 0.0. You have
# `model` and `dataset`: log unfiltered, and stop. The weights have it by then: go back to a checkpoint.
#
# ```python
# import math
# from transformers import Trainer, TrainerCallback, TrainingArguments
#
# class StopAtNaN(TrainerCallback):
#     def on_log(self, args, state, control, logs, **kwargs):
#         if not all(math.isfinite(float(logs.get(name, 0.0))) for name in ("loss", "grad_norm")):
#             control.should_training_stop = True
#
# settings = TrainingArguments(output_dir="out", max_steps=3, bf16=True, max_grad_norm=1.0, logging_steps=1,
#                              logging_nan_inf_filter=False)  # True is the default
# trainer = Trainer(model=model, args=settings, train_dataset=dataset, callbacks=[StopAtNaN()])
# trainer.train()
# print([(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row])
# ```
