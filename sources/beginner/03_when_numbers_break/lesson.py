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
# **In short.** Repeat the run in fp32. If this *twin* fails, too, suspect the learning rate, the data or a bug. If it trains, look in
# the 16-bit run for the first tensor that is not finite, for zeros, and for weights that hardly move.
#
# **Promise.** You plant faults, find each in a record, and cure it.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 65, and 80 for the lab | any laptop, on its CPU | under a minute of computing on two CPU cores |

# %% tags=["setup"]
here = setup("beginner/03")

# %% jupyter={"source_hidden": true}
import math
from contextlib import nullcontext

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from utils import NumericsRecorder, check, show
from utils.lessons.lesson_03.cuda_list import CudaList
from utils.lessons.lesson_03.flight import draw_flight, draw_gradient_sizes, draw_scale, draw_twins
from utils.lessons.lesson_03.format_figures import draw_formats
from utils.lessons.lesson_03.network import network, passed_back
from utils.lessons.lesson_03.number_formats import FORMATS
from utils.lessons.lesson_03.opening import healthy_run

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

# %% [markdown]
# ## A bet
#
# This is a healthy run in fp16 with loss scaling: no step is skipped. In a run like it, one NaN ("not a number") stands in the data of
# step 17. Does the training loss become NaN for good (`"dies"`), or not (`"lives"`)? Section 6 runs it.

# %%
show(draw_flight(healthy_run(17), title="The first 17 steps of a healthy run in fp16, by the flight recorder of section 3"),
     alt="Four panels: the loss falls, the two norms of the gradients agree, the loss scale is constant, hardly any gradient is zero.")

# %%
my_bet = ...

# %% [markdown]
# ## 1. The formats
#
# A number has a sign bit $s$, $x$ *exponent* bits, read as a whole number $e$, and $m$ *mantissa* bits, read as $f$.
# With the bias $b = 2^{x-1} - 1$ it is worth
#
# $$(-1)^{s} \cdot 2^{e-b} \cdot \left(1 + f / 2^m\right)$$
#
# Exponent bits buy **range**, mantissa bits **digits**. Where $e = 0$ it is worth $(-1)^s \cdot 2^{1-b} \cdot f / 2^m$ instead:
# zero and the **subnormal** numbers, of which $f = 1$ is the *smallest*. An $e$ of all ones means infinity or NaN. New words:
# [glossary](../00_glossary.ipynb). Compare the lengths, then the gaps:

# %%
names = [name for name in FORMATS if "fp8" not in name]
show(draw_formats(names, up_to=1.02), alt="Ranges of four formats on a logarithmic line: bf16 and tf32 reach nearly as "
     "far as fp32, fp16 far less. Beside it their numbers from 1 to 1.02: bf16 has three, fp16 and tf32 have 21.")

# %% tags=["nbval-check-output"]
print(f"{'format':<10}{'bits':>5}{'exponent':>10}{'mantissa':>10}{'largest':>12}{'step at 1':>12}{'smallest':>12}")
for form in (FORMATS[name] for name in names):
    print(f"{form.name:<10}{form.bits:>5}{form.exponent_bits:>10}{form.mantissa_bits:>10}"
          f"{form.largest:>12.4g}{form.epsilon:>12.2g}{form.smallest:>12.2g}")
for dtype, name in [(FP32, "fp32"), (FP16, "fp16"), (BF16, "bf16")]:
    assert torch.finfo(dtype).max == FORMATS[name].largest, f"{name}: the formula differs from PyTorch"

# %% [markdown]
# **Read it.** bf16 is fp32 without 16 mantissa bits. fp16 has more digits than bf16, and a range that ends at 65,504. No
# tensor is stored in tf32: GPUs multiply fp32 tensors in it, where that is allowed. 8 bits: [lesson 20](../advanced/20_eight_bits.ipynb).
#
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
print("infinity - infinity =", torch.tensor(math.inf) - math.inf, "  0 * infinity =", torch.tensor(math.inf) * 0,
      "  infinity / infinity =", torch.tensor(math.inf) / math.inf, "  a mean over no label:", F.cross_entropy(torch.zeros(2, 3), torch.tensor([-100, -100])))

# %% [markdown]
# **Read it.** `True` means swallowed. bf16 swallows updates up to eight times larger than fp16 does, so mixed precision keeps weights
# in fp32. NaN comes from infinity minus infinity (softmax of a fully masked row), 0 times infinity, infinity over infinity, and 0/0
# (all labels ignored).
#
# ## 3. A run, and its flight recorder
#
# `Norm`, an RMSNorm (each row is scaled to a mean square of 1), is written by hand.

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
print(network(Norm))  # its names stand in the records

# %% [markdown]
# The **scaler** multiplies the loss before backward, so that small gradients do not become zero, and divides the gradients
# before the step. If one is not finite, it skips the step and halves the scale; after enough good steps it doubles it.
#
# The *flight recorder* notes of each step the loss, the scale, the norm of the gradients (after backward, and as the
# optimizer stepped with them), and the **first** tensor that is not finite. PyTorch's *hooks* hand it each module's output
# and the gradient that comes back:

# %%
def first_bad(model, x, y, scale=1.0):
    """One forward and backward in fp16 of a finite x: the first place that is not finite, and the last one before it."""
    finite, bad = ["the input"], []  # in the order of time
    names = {module: name for name, module in model.named_modules() if name}

    def look(place, tensor):
        if not bad:
            (finite if tensor.isfinite().all() else bad).append(place)

    def watch(module, given, out):
        look(f"the output of {names[module]}", out)
        out.register_hook(lambda gradient: look(f"the gradient of the output of {names[module]}", gradient))

    for module in names:
        module.register_forward_hook(watch)
    with torch.autocast("cpu", dtype=FP16):
        loss = F.cross_entropy(model(x), y)
    look("the loss", loss)
    (scale * loss).backward()
    return f"{bad[0]} is not finite; the last finite one was {finite[-1]}" if bad else "all is finite"


for scale in (2.0**16, 2.0**30):
    print(f"scale 2^{math.log2(scale):.0f}:", first_bad(network(Norm), inputs[0], labels[0], scale))

# %% [markdown]
# The recorder hooks inputs, too, and tells five kinds apart:
#
# | kind | that tensor | look first at |
# |---|---|---|
# | input | came into the model or a module | data, or code before it |
# | output | made of finite inputs | this module |
# | loss | made of finite outputs | the loss function |
# | incoming gradient | came back to a module's output | what follows it, or the scale |
# | gradient | made in a module's backward, for its weights or its input | it, or the scale |

# %%
def train(dtype, scaled=False, *, init_scale=2.0**16, interval=20, lr=0.1, clip=None, unscale=True,
          batches=inputs, loss_of=F.cross_entropy, loss_weight=1.0, mode=nullcontext,
          guard=False, model=None, passes=1, adam=False):
    model = model or network(Norm)
    optimizer = torch.optim.Adam(model.parameters(), lr) if adam else torch.optim.SGD(model.parameters(), lr / loss_weight, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=interval, enabled=scaled)
    with NumericsRecorder(model, optimizer, scaler) as recorder:
        for x, y in passes * list(zip(batches, labels, strict=True)):
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
# **Read it.** Each line has the first loss and the mean of the last five. All four learn.
#
# ### Planted: a loss that is too small
#
# Multiply the loss by one millionth, the learning rate by a million: on paper the same training. Where do gradients lie?

# %%
tiny = {"loss_weight": 1e-6}
stalled, rescued = train(FP16, **tiny), train(FP16, scaled=True, **tiny)
for name, records in [("fp16, no scaler", stalled), ("fp16, scaler", rescued), ("bf16", train(BF16, **tiny))]:
    summary(name, records)
for name, records in [("no scaler", stalled), ("scaler", rescued)]:
    shares = [layer.zero for r in records for layer in r.layers.values()]
    print(f"fp16, {name}: {sum(shares) / len(shares):.0%} of the parameters' gradients are zero")
gradients = passed_back(network(Norm), lambda logits: 1e-6 * F.cross_entropy(logits, labels[0]), inputs[0])
show(draw_gradient_sizes(gradients, 2.0**16, title="A tiny loss: its gradients are below fp16's floor; the scale lifts them"),
     alt="Two histograms of gradient sizes. As they are, all lie where fp16 has only zero; times 65,536 nearly all lie above.")

# %% [markdown]
# **Read it.** The picture has gradients between modules, computed in fp32.
# fp16 rounds to zero what is below $2^{-25}$. Without a scaler the network is frozen: only the batches change its loss.
#
# ### Planted: a scale that is too large
#
# Start the scale at $2^{30}$. Predict the skips: a batch's largest gradient of a parameter times the scale must not pass 65,504. Until
# the first good step the weights stay as they were. This scaler doubles after 10 good steps, PyTorch's after 2,000.

# %%
def largest_gradient(step):
    probe = network(Norm)  # the first weights
    F.cross_entropy(probe(inputs[step]), labels[step]).backward()
    return max(p.grad.abs().max().item() for p in probe.parameters())


falling = train(FP16, scaled=True, init_scale=2.0**30, interval=10, passes=3)
settled = next(r for r in falling if not r.skipped)
sizes = [largest_gradient(step) for step in range(20)]
predicted = next(k for k, size in enumerate(sizes) if size * 2.0 ** (30 - k) <= FORMATS["fp16"].largest)
print(f"predicted: scale 2^{30 - predicted}, {predicted} skipped steps")
print(f"measured:  scale 2^{math.log2(settled.scale):.0f}, {settled.step} skipped steps")
later = falling[settled.step:]
print(f"after the search: {sum(r.skipped for r in later)} of {len(later)} steps skipped")
show(draw_scale(falling, title="A healthy scale: it searches, and then it saws (it doubles after 10 good steps)"),
     alt="The scale falls from 2^30 by a skip a step, then rises and falls again like a saw, with a skip at each tip but the last.")

# %% [markdown]
# **Read it.** These skips are how a scaler *searches*, and no fault; later, too, it doubles until a step overflows. A scale that stays
# level in the long run skips at most once an interval. One that falls without end is a fault.
#
# **Question.** A scaler starts at $2^{24}$. The largest gradient fits up to a scale of $2^{17}$. How many
# steps are skipped before the first good one?

# %%
skipped_steps = ...
check("03.skipped_steps", skipped_steps)

# %% [markdown]
# ### Planted: weights in bf16
#
# `model.to(bfloat16)` halves the memory of weights, gradients and Adam's moments. Take it that Adam moves a weight by the learning rate.
# Between $2^k$ and $2^{k+1}$ neighbours in bf16 are $2^{k-7}$ apart, so a move below $2^{k-8}$ is swallowed. Which share ends where it
# began?

# %%
def fine_tune(weights, lr):
    model, losses = network(Norm).to(weights), []
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(3 * STEPS):
        with torch.autocast("cpu", dtype=BF16, enabled=weights == FP32):
            loss = F.cross_entropy(model(inputs[step % STEPS].to(weights)), labels[step % STEPS])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    same = (nn.utils.parameters_to_vector(model.parameters()) == start).float().mean().item()
    bits = FORMATS["bf16" if weights == BF16 else "fp32"].mantissa_bits
    half_gap = 2.0 ** (start.float().abs().log2().floor() - bits - 1)
    predicted = (half_gap > lr).float().mean().item()
    print(f"weights in {weights!s:<15} rate {lr:.1e}  ends as it began: {predicted:.0%} predicted, {same:.0%} measured;  mean loss "
          f"of the first pass {sum(losses[:STEPS]) / STEPS:.3f}, of the last {sum(losses[-STEPS:]) / STEPS:.3f}")
    return same


in_bf16 = [fine_tune(BF16, lr) for lr in (1.5e-5, 3e-5, 6e-5)]
in_fp32_weights = fine_tune(FP32, 3e-5)

# %% [markdown]
# **Read it.** In bf16 most weights end where they began, as predicted. Cure: fp32 weights, or an optimizer with an fp32 copy.
# **transformers 5** loads a checkpoint [in its own dtype](https://github.com/huggingface/transformers/pull/42805), often bf16, even
# under `bf16=True`: pass `dtype=torch.float32`.
#
# ## 4. What must stay in fp32
#
# `autocast` runs matmuls in 16 bits and lifts fragile operations to fp32. Compare the CPU's choice with [CUDA's
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
# **Read it.** Of these seven the CPU lifts only the two losses. Below, `CudaList` emulates CUDA's autocast for
# the operations of this lesson. Your own cure: no autocast around the fragile part, and fp32 into it.

# %%
class Fp32Norm(Norm):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):  # on a GPU: "cuda"
            return super().forward(x.float())  # without .float() it would still be fp16


with torch.autocast("cpu", dtype=FP16):
    large = torch.full((1, 4), 300.0, dtype=FP16)
    print("Norm of 300", Norm(4)(large).tolist(), "\nFp32Norm   ", Fp32Norm(4)(large).tolist())

# %% [markdown]
# ## 5. Four faults
#
# Each runs in fp16 with a scaler, again with CUDA's list, and beside its **twins** in bf16 and fp32.
#
# ### (a) The loss falls in fp32 and hardly in fp16
#
# Gradients are clipped to 1. Compare the two norms.

# %%
def twins(fault):
    runs = {"fp16": train(FP16, scaled=True, **fault), "fp16, CUDA's list": train(FP16, scaled=True, mode=CudaList, **fault),
            "bf16": train(BF16, **fault), "fp32": train(FP32, **fault)}
    for name, records in runs.items():
        summary(name, records)
    return runs


clipped_scaled = twins({"clip": 1.0, "unscale": False})
for name, records in clipped_scaled.items():
    print(f"{name}, step 0: norm after backward {records[0].grad_norm:.2f}, stepped with {records[0].step_norm:.2g}")
print(f"a network whose gradients are all zero ends at {ending(stalled):.2f} on these batches")

# %% [markdown]
# **Diagnose it.** fp16 ends where a frozen network does. It stepped with a norm of $1/65536$: *scaled* gradients were
# clipped, and the scaler divided afterwards. Cure: `scaler.unscale_(optimizer)` before `clip_grad_norm_`. Adam divides by the
# gradients' size: does it train in spite of the fault?

# %%
cured = train(FP16, scaled=True, clip=1.0)
summary("unscale_, then clip", cured)
with_adam = train(FP16, scaled=True, clip=1.0, unscale=False, adam=True, lr=0.003)
summary(f"fault, Adam, norm {with_adam[0].step_norm:.2g}", with_adam)

# %% [markdown]
# **Read it.** Adam trains: only its norm shows the fault.
#
# ### (b) The loss stands still, and the scale is not the reason
#
# The inputs come in raw sensor units, a thousand times larger. Look at the map of zero gradients.

# %%
raw = {"batches": 1000 * inputs}
norms = twins(raw)
print(f"ln 8 = {math.log(8):.2f};  layer 4: {norms['fp16'][-1].layers['4'].zero:.1%} of the gradients are zero")
show(draw_flight(norms["fp16"], title="(b) fp16: all gradients but the last bias's are zero, or not finite"),
     alt="The loss stays near 2; a few steps, most of them early, have gradients that are not finite in layers 0 to 2; "
         "else all gradients but the last bias's are zero.")

# %% [markdown]
# **Diagnose it.** bf16 and fp32 train: it is range. fp16 starts near $\ln 8$, the loss of eight equal outputs. Only the bias of `4`
# still learns. The recorder names `3`, a `Norm`: what it sent back to its *input* is not finite. Our hooks agree; section 4 has the
# cure:

# %%
print(first_bad(network(Norm), raw["batches"][0], labels[0], scale=2.0**16))
lifted = train(FP16, scaled=True, model=network(Fp32Norm), **raw)
summary("fp16, Fp32Norm", lifted)

# %% [markdown]
# **Read it.** $x^2$ overflows, $1/\sqrt{\infty} = 0$, and the norm quietly returns zeros. CUDA's autocast prevents this: `pow` and
# `rsqrt` are on its list. The product `x * x` is not:

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


by_product = {name: train(kind, scaled=kind == FP16, model=network(ByProduct), **raw) for name, kind in [("fp16", FP16), ("bf16", BF16), ("fp32", FP32)]}
silent_run = by_product["fp16, CUDA's list"] = train(FP16, scaled=True, mode=CudaList, model=(multiplied := network(ByProduct)), **raw)
summary("CUDA's list, x * x", silent_run)
with torch.autocast("cpu", dtype=FP16), CudaList():
    silent, unmoved = zeros(multiplied, raw["batches"][0])
print("modules that put out zeros:", silent, "\ngradients that are all zero:", len(unmoved), "of", len(list(multiplied.parameters())))

# %% [markdown]
# **Read it.** No NaN, no skip, and only the last bias learns. An activation of 256 is enough: its square is 65,536. Look for *zeros* as
# you look for NaN.
#
# ### (c) NaN, and the scale falls without end
#
# A loss written by hand, with sharpened logits.

# %%
def written_by_hand(logits, y):
    e = (8 * logits).exp()
    return -(e.gather(1, y[:, None]) / e.sum(-1, keepdim=True)).log().mean()


steep = {"lr": 0.01, "init_scale": 2.0**13}
losses = twins({"loss_of": written_by_hand, **steep})
print("scales, fp16:", [f"2^{math.log2(r.scale):.0f}" for r in losses["fp16"]][::5])
skipped = [r for r in losses["fp16"] if r.skipped]
print(f"skipped: {len(skipped)}, of which {sum(not math.isfinite(r.loss) for r in skipped)} with a loss that is not finite")

# %% [markdown]
# **Diagnose it.** The loss breaks first, and in every skipped step. That is *before* the scale, so no
# scale cures it: $e^{x}$ passes 65,504 at $x = 11.1$. Cure: the loss in fp32 (CUDA's list lifts `exp`), or `F.cross_entropy`, which
# subtracts the maximum first.
#
# ### (d) fp16 skips step after step, so blame fp16?
#
# Rings mark where the last layer's weights get gradients of zero, as in (b).

# %%
rates = twins({"lr": 3.0})
show(draw_twins({name: rates[name] for name in ("fp16", "bf16", "fp32")}, log=True, title="(d) the fp32 twin explodes, too"),
     alt="Left, three losses rise, those of bf16 and fp32 far higher than fp16's, and fall back where the rings begin; fp32 then ends in NaN, "
         "fp16 goes on. Right, fp16's scale falls step by step, and most steps are skipped.")
print("fp16, first losses:", [round(r.loss, 1) for r in rates["fp16"][:3]], "  fp32, largest loss:", f"{max(r.loss for r in rates['fp32']):.1e}")

# %% [markdown]
# **Diagnose it.** fp16's loss had risen when it first skipped, and the fp32 twin explodes: it is not fp16. Section 3's runs
# differ in the rate alone, 0.1 for 3, and learn: it is the learning rate.
#
# ## 6. Break it, diagnose it: a NaN in the data
#
# (e) One element of one batch is NaN.

# %%
spoiled = inputs.clone()
spoiled[17, 41, 5] = math.nan
nan_runs = twins({"batches": spoiled})
summary("bf16 with a guard", guarded := train(BF16, batches=spoiled, guard=True))
show(draw_twins({"fp16, scaler": nan_runs["fp16"], "bf16": nan_runs["bf16"], "bf16, guard": guarded},
                title="(e) one NaN in the data: the scaler hides it, bf16 dies of it", mark=(17, "NaN in the batch")),
     alt="Three losses fall alike to step 17. bf16's ends there; those of fp16 with a scaler and of bf16 with a guard go on.")

# %%
check("03.bet", my_bet)

# %% [markdown]
# **Diagnose it.** The scaler took the NaN for an overflow and skipped the step: a
# scaler **hides** bad data. bf16 and fp32 have no scaler, and one update ended them. With a **guard**, which steps
# only if all gradients are finite, bf16 lives, too.
#
# ### Lives, and is dead: batch norm
#
# A skipped step leaves the *weights*. Batch norm changed its statistics before that, in forward:

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
# **Diagnose it.** Training lives and evaluation is dead: a running mean that was NaN stays NaN. `update_bn` computes the
# statistics anew.

# %% jupyter={"source_hidden": true}
def still(records):
    return ending(records) > 0.8 * records[0].loss


def trains(*runs):
    return all(ending(records) < 0.7 * records[0].loss for records in runs)


assert all(abs(ending(r) - ending(plain["fp32"])) < 0.05 for r in plain.values()), "section 3: four plain runs end alike"
assert all(r.grad_norm == 0 for r in stalled) and trains(rescued), "tiny loss: all zero without a scaler; is it scaled?"
assert any(r.skipped for r in later) and falling[-1].scale > 2**10, "after the search a healthy scale saws"
assert settled.step >= 8 and abs(settled.step - predicted) <= 1, "one skip a halving: was growth or backoff changed?"
assert min(in_bf16) > 0.6 > in_fp32_weights, "bf16 swallows most updates: was the rate raised?"
assert on_cpu["cross_entropy"] == FP32 != on_cpu["softmax"], "this PyTorch lifts others on CPUs: read its list"
assert clipped_scaled["fp16"][0].step_norm < 1e-4, "(a) clipped while scaled: 1 / scale at most"
assert all(r.step_norm <= 1.001 for r in cured) and trains(cured, with_adam), "(a) unscale_ first, then clip to 1"
assert still(norms["fp16"]) and "gradient" in norms["fp16"][0].first.kind, "(b) fp16 stalls: is the data raw?"
assert trains(lifted, norms["fp16, CUDA's list"], losses["fp16, CUDA's list"]), "(b), (c) a lifted norm or loss trains: is it in force?"
assert still(silent_run) and not any(r.skipped or r.first for r in silent_run), "(b) nothing learned, nothing reported"
assert losses["fp16"][0].first.kind == "loss" and losses["fp16"][-1].scale < 1, "(c) a forward fault survives every scale"
assert max(r.loss for r in rates["fp32"]) > 50, "(d) fp32 explodes as well: was the rate lowered?"
assert next(r for r in nan_runs["fp16"] if r.first).first.rows == (41,), "(e) the NaN stands in row 41"
assert math.isfinite(ending(alive)) and share == 1, "training lives, evaluation does not: one NaN is planted"
print("This run agrees with sections 3 to 6.")

# %% [markdown]
# ## Recap: training with AMP stalls or turns to NaN, what do you do?
#
# CUDA's list is emulated. "Stands still": the loss ends within a fifth of its start. How bf16 ends in (d), in NaN or above its
# start, changes with the CPU's kernels.

# %% jupyter={"source_hidden": true}
def verdict(records):
    skipped = sum(r.skipped for r in records)
    if skipped > STEPS / 2:
        return f"skips {skipped} of {len(records)}"
    if ending(records) > 1.2 * records[0].loss:
        return "rises"
    return "NaN" if not math.isfinite(ending(records)) else "learns" if not still(records) else "stands still"


tiny_runs = {"fp16": stalled, "fp16, CUDA's list": train(FP16, mode=CudaList, **tiny),
             "bf16": train(BF16, **tiny), "fp32": train(FP32, **tiny)}
faults = {"a tiny loss, no scaler": tiny_runs, "(a) clipped while scaled": clipped_scaled, "(b) a norm with pow": norms,
          "(b) a norm with x * x": by_product, "(c) a loss by hand": losses, "(d) too large a rate": rates, "(e) a NaN in the data": nan_runs}
pd.DataFrame([{"measured on this CPU": fault} | {name: verdict(runs[name]) for name in norms} for fault, runs in faults.items()]
             ).set_index("measured on this CPU")

# %% [markdown]
# Save the batch and the last good checkpoint first. **In short:** repeat the run in fp32. If this twin fails, too, suspect the learning
# rate (d), the data (e), 0/0 (§2) or a bug. If it trains, look in the 16-bit run for the first tensor that is not finite, for zeros, and for
# weights that hardly move.
#
# | step | look at | if so |
# |---|---|---|
# | 1 | did the loss rise before the first bad step? | learning rate (d) |
# | 2 | fp16: does the scale fall and rise? | no fault, if the loss falls and the batches are clean (§3) |
# | 3 | fp16: does it fall without end? | overflow in forward (c), NaN in weights, too large a rate (d) |
# | 4 | is the first tensor that is not finite an "input"? | data; look before forward (e) |
# | 5 | of another kind? | the table of §3; `autocast(enabled=False)` and `.float()` there (§4) |
# | 6 | fp16: the norm stepped with, against the clip | `unscale_` before clipping (a) |
# | 7 | are gradients zero? | with outputs of zero: fp32 there (b); else a scaler (§3) |
# | 8 | a flat loss: what share of the weights moved? | 16-bit weights: keep fp32 ones (§3) |
# | 9 | training is fine, evaluation is NaN | batch norm's statistics: `update_bn` (§6) |
#
# Not shown here: **ranks**. They average gradients, so one rank's NaN reaches all.
#
# Do the [lab](../../labs/beginner/03_when_numbers_break.ipynb) in a copy (`make my-labs`), then see its
# [solution](../../solutions/beginner/03_when_numbers_break.ipynb).

# %% [markdown]
# ## On Monday
#
# **Find the first bad tensor.** Hooks on `model` raise at the first infinity or NaN, forward or backward, and name outputs of
# zeros:
#
# ```python
# import math, torch
#
# if sick := [name for name, p in [*model.named_parameters(), *model.named_buffers()] if not p.isfinite().all()]:
#     raise FloatingPointError(f"weights or buffers are not finite, {sick[0]} first: go back to a checkpoint")
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
# finite = ["the loss"]  # the last place on the way back where the gradient was finite
#
# def watch_gradient(place, of_output):
#     def hook(gradient):
#         if not gradient.isfinite().all():
#             raise FloatingPointError(f"the gradient of {place} is not finite, and that of {finite[0]} was: backward broke between them")
#         if of_output:
#             finite[0] = place
#     return hook
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
#         if module is model:
#             finite[0] = "the loss"  # backward comes next
#         for t in tensors_of(out):
#             if t.requires_grad:
#                 t.register_hook(watch_gradient(f"the output {told}", True))
#     return hook
#
# hooks = [module.register_forward_hook(watch(name), with_kwargs=True) for name, module in model.named_modules()]
# hooks += [p.register_hook(watch_gradient(name, False)) for name, p in model.named_parameters() if p.requires_grad]
# # (under FSDP2 a parameter's hook never fires: look at p.grad.to_local() after backward)
# # run the step here, uncompiled, and stop where `loss` is not finite; then the hooks, which wait for the GPU, go: for each in hooks: each.remove()
# # zero gradients: [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.any()]
# ```
#
# Read it by section 3's table. In fp16 an infinite gradient may be a scaler's search.
# `torch.autograd.set_detect_anomaly(True)` names the line whose backward made NaN.
#
# **The twin** repeats the run since the last good checkpoint:
#
# ```python
# import copy, torch
#
# # You have of the last good checkpoint: model; optimizer_state and scaler_state, what state_dict() gave of the two. Of the run:
# # make_optimizer(parameters); loss_function; device; dtype; clip, its largest norm (math.inf: none); recorded, the batches since, on
# # the device. One GPU; a twin takes up to 16 bytes a parameter. FSDP copies no model: load it twice.
# for enabled in (True, False):
#     twin = copy.deepcopy(model) if enabled else copy.deepcopy(model).float()
#     optimizer = make_optimizer(twin.parameters())
#     optimizer.load_state_dict(copy.deepcopy(optimizer_state))  # fresh Adam would begin with full steps, and could explode by itself
#     scaler = torch.amp.GradScaler(device.type, enabled=enabled and dtype is torch.float16)
#     scaler.load_state_dict(scaler_state)
#     torch.manual_seed(0)  # the same dropout
#     for step, (inputs, labels) in enumerate(recorded):
#         with torch.autocast(device.type, dtype=dtype, enabled=enabled):
#             loss = loss_function(twin(inputs), labels)
#         optimizer.zero_grad()
#         scaler.scale(loss).backward()
#         scaler.unscale_(optimizer)
#         norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
#         print(dtype if enabled else "fp32", "step", step, "loss", loss.item(), "norm of the gradients", norm.item())
#         if norm.isfinite():
#             scaler.step(optimizer)  # and the learning rate's scheduler
#         scaler.update()
#     del twin, optimizer
# ```
#
# **A step with a guard** leaves out bad data, names its rank and rows, clips unscaled gradients, and stops a dead run:
#
# ```python
# import torch  # You have: model, optimizer, loss_function, batches, device, dtype
#
# ranks = torch.distributed.is_initialized()
# rank = torch.distributed.get_rank() if ranks else 0
# scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
# bad_batches = skipped_steps = in_a_row = 0
# for number, (inputs, labels) in enumerate(batches):
#     rows = (~inputs.isfinite().reshape(len(inputs), -1).all(1)).nonzero().flatten().tolist()
#     good = not rows and bool(labels.isfinite().all() & (labels != -100).any())
#     if not good:
#         print(f"rank {rank}, batch {number}: rows {rows} are not finite" if rows else f"rank {rank}, batch {number}: bad labels")
#     bad = torch.tensor(float(not good), device=device)  # before forward: batch norm would remember it
#     if ranks:
#         torch.distributed.all_reduce(bad)  # all ranks leave the batch out, or the others wait for ever
#     if bad:
#         bad_batches += 1
#         continue
#     optimizer.zero_grad()
#     with torch.amp.autocast(device.type, dtype=dtype):
#         loss = loss_function(model(inputs.to(device)), labels.to(device))
#     if not loss.isfinite():  # told here: after backward all ranks hold the NaN
#         print(f"rank {rank}, batch {number}: its own loss is {loss.item()}")
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
# **transformers** leaves NaN out of the mean loss that it logs. Log unfiltered, and stop before such weights are saved:
#
# ```python
# import math  # You have: model, dataset
# from transformers import Trainer, TrainerCallback, TrainingArguments
#
# class StopAtNaN(TrainerCallback):  # bf16 and fp32 only: fp16 skips steps with an infinite norm, and is healthy
#     def on_log(self, args, state, control, logs, **kwargs):
#         if not all(math.isfinite(float(logs.get(name, 0.0))) for name in ("loss", "grad_norm")):
#             raise FloatingPointError(f"step {state.global_step}: {logs}")  # a stop by `control` would still save these weights
#
# settings = TrainingArguments(output_dir="out", max_steps=3, bf16=True, max_grad_norm=1.0, logging_steps=1,
#                              logging_nan_inf_filter=False)  # True is the default
# trainer = Trainer(model=model, args=settings, train_dataset=dataset, callbacks=[StopAtNaN()])
# trainer.train()
# print([(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row])
# ```
