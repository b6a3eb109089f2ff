# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 20 Eight bits, and four
#
# {{badges}}
#
# **The question.** By their data sheets H100 multiplies matrices of 8-bit numbers twice as fast as of 16-bit ones, and B200 of 4-bit
# ones twice as fast again. Which numbers of a training step may be that small?
#
# **Promise.** You round numbers by hand, multiply as a GPU does, and train; then you know, and which bytes stay.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 70 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# A tensor is rounded to E4M3, eight bits, with **one** scale for all of it. Then one number of 131,072 grows to a thousand
# times a typical one. By what factor does the error of all the *other* numbers grow?

# %%
my_bet_factor = 100.0

# %% tags=["setup"]
here = setup("advanced/20")

# %% jupyter={"source_hidden": true}
import itertools
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from utils import check, run_ranks, score, show
from utils.lessons.lesson_20.figures import draw_number_lines, draw_outliers
from utils.lessons.lesson_20.held import bytes_and_seconds, gathered_on_rank, kept_by_swiglu
from utils.lessons.lesson_20.small_model import batches, fresh, go_on, gradients, spikes, unplanted
from evidence.validation import bridge
from evidence.validation.tables import table

RANKS, SIZE = 2, 64 * 1024  # numbers of section 5's gather

# %% [markdown]
# ## 1. What so few bits can say
#
# A floating-point number is a sign, a power of two (the *exponent*), and digits (the *mantissa*): 4 and 3 bits in E4M3.
# Below the smallest exponent digits are lost one by one. E8M0, a scale, has neither sign nor digits. New words
# stand in the [glossary](../00_glossary.ipynb).

# %%
@dataclass(frozen=True)
class Form:
    name: str
    mantissa_bits: int
    least: int  # exponent of the smallest number with all digits
    largest: float


E4M3, E5M2, E2M1 = Form("E4M3", 3, -6, 448.0), Form("E5M2", 2, -14, 57344.0), Form("E2M1", 1, 0, 6.0)


def rounded(x, form, noise=None):
    """To the nearest number, ties to even; with noise from 0 to 1, up or down by chance. Too large: the largest."""
    exponent = (torch.frexp(x).exponent - 1).clamp(min=form.least)
    step = torch.ldexp(torch.ones_like(x), exponent - form.mantissa_bits)
    steps = (x / step).round() if noise is None else (x / step + noise).floor()
    return (steps * step).clamp(-form.largest, form.largest)


# %%
every = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).pow(9)  # sizes of many powers of two
FAST = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
for form, dtype in FAST.items():
    alike = torch.equal(rounded(every, form), every.clamp(-form.largest, form.largest).to(dtype).float())
    assert alike, f"{form.name}: PyTorch rounds otherwise"
numbers = {form.name: rounded(every.abs(), form).unique()[1:].tolist() for form in (E4M3, E5M2, E2M1)}
show(draw_number_lines(numbers, title="Digits or range: every positive number of the small formats"),
     alt="Ticks on a logarithmic line: E2M1 has seven positive numbers from 0.5 to 6; E4M3 reaches over 18 powers of two, "
     "E5M2 over 32, with fewer numbers in each; E8M0 has powers of two alone, from 2 to the -127 to 2 to the 127.")

# %% tags=["nbval-check-output"]
print(f"{'':<6}{'smallest':>10}{'largest':>9}{'largest / smallest':>20}{'error of a number at most':>27}")
for form in (E4M3, E5M2, E2M1):
    least, most = numbers[form.name][0], form.largest
    print(f"{form.name:<6}{least:>10.2g}{most:>9g}{most / least:>20,.0f}{2.0**-(form.mantissa_bits + 1):>27.2%}")
print("1,000, infinity and NaN, cast to E4M3 here:", torch.tensor([1e3, torch.inf, torch.nan]).to(FAST[E4M3]).tolist())

# %% [markdown]
# **Read it.** The error holds while a number has all digits. `rounded` equals PyTorch's cast, so the faster cast takes its
# place below. In this build it makes 448 of an infinity, in others NaN: look for those *before*.
#
# ## 2. One scale, or many
#
# 448 is the largest E4M3: so divide by a **scale** first, and multiply afterwards. It maps the largest number of a
# *block* to the format's largest. What is far smaller fades to zero, so all hangs on who shares a scale:
#
# | scheme | numbers that share a scale | scale | bits a number |
# |---|---|---|---|
# | per tensor, per row | all; a row | fp32 | 8 |
# | [DeepSeek-V3](https://arxiv.org/abs/2412.19437) | 128; of weights 128 x 128 | fp32 | 8.25; weights 8.002 |
# | [MXFP8](https://arxiv.org/abs/2310.10537) | 32 | E8M0 | 8.25 |
# | [NVFP4](https://arxiv.org/abs/2509.25149) | 16 | E4M3, and one in fp32 for the tensor | 4.5 |

# %%
def fast(x, form):
    return x.clamp(-form.largest, form.largest).to(FAST[form]).float() if form in FAST else rounded(x, form)


def power_of_two(scale):  # up: rounded down, as the MX specification has it, some largest numbers are cut
    return scale.log2().ceil().exp2()


def two_levels(scale):  # NVFP4: block scales in E4M3, as shares of a second scale
    second = scale.max() / E4M3.largest
    return fast(scale / second, E4M3) * second


def scaled(x, form, block=None, scale_as=lambda scale: scale, by_chance=False):
    """x (rows, columns) as a kernel sees it: in a format, a scale for each block of a row; None: one for all."""
    if block is not None and x.shape[-1] % block:
        raise ValueError(f"{x.shape[-1]} columns are no whole blocks of {block}: pad them with zeros to a multiple.")
    if not x.isfinite().all():
        raise ValueError(f"{(~x.isfinite()).sum()} numbers are infinite or NaN: they would take the scale with them.")
    parts = x.reshape(1, -1) if block is None else x.unflatten(-1, (-1, block))
    scale = scale_as(parts.abs().amax(-1, keepdim=True) / form.largest).clamp(min=1e-30)  # a block of zeros stays so
    small = rounded(parts / scale, form, torch.rand_like(parts)) if by_chance else fast(parts / scale, form)
    return (small * scale).reshape(x.shape)


# %% [markdown]
# **Predict.** Integers have one step for all, floating point a smaller step for smaller numbers. From which size on does an
# outlier hurt the others, in E4M3?

# %%
SCHEMES = {
    "int8, per tensor": lambda x: (x / (step := x.abs().max() / 127)).round() * step,
    "E4M3, per tensor": partial(scaled, form=E4M3),
    "E4M3, blocks of 128": partial(scaled, form=E4M3, block=128),
    "MXFP8": partial(scaled, form=E4M3, block=32, scale_as=power_of_two),
    "NVFP4": partial(scaled, form=E2M1, block=16, scale_as=two_levels),
    "E2M1, per tensor": partial(scaled, form=E2M1),
}
typical = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
factors, errors = [10.0**power for power in range(7)], {name: [] for name in SCHEMES}
for factor in factors:
    x = typical.clone()
    x[3, 7] = factor
    for name, small in SCHEMES.items():
        off = small(x) - x
        off[3, 7] = 0
        errors[name].append((off.norm() / typical.norm()).item())

# %%
show(draw_outliers(factors, errors, title="One outlier, and the error of all other numbers", device="CPU"),
     alt="int8's error grows from the first: 100% at 1,000. E4M3 per tensor stays at 2.7% up to 10,000 and reaches 95% at a "
     "million. E2M1 per tensor loses all others at 100. E4M3 in blocks stays below 5%, NVFP4 at 10% until a million.")
grown = {factor: e / errors["E4M3, per tensor"][0] for factor, e in zip(factors, errors["E4M3, per tensor"], strict=True)}
print(*(f"x {factor:,.0f}: error x {times:.2f}" for factor, times in grown.items()), sep="; ")
print(f"your bet at 1,000: x {my_bet_factor:g}")
assert 0.9 < grown[1e3] < 1.1 and grown[1e6] > 20, "E4M3 holds at a thousand and fails at a million: is it scaled?"

# %% [markdown]
# **Read it.** At a thousand nothing happens: that outliers hurt all others is a lesson of integers (int8 is better, but up to 10
# only). From 448 / $2^{-6}$ = 28,672 on, typical numbers lose digits; at 229,376 they are at E4M3's smallest. Such outliers are
# found: single activations of LLMs, between layers, before a norm, are
# [up to 100,000 times the others](https://arxiv.org/abs/2402.17762). **Four bits** span a factor of 12: they need small blocks.
#
# **Question.** MXFP4 has E2M1 numbers, and an E8M0 scale for 32. How many bits does a number take?

# %%
bits_of_mxfp4 = ...
check("20.bits_of_mxfp4", bits_of_mxfp4)

# %% [markdown]
# Refused:

# %%
for x in (torch.ones(2, 100), torch.tensor([[1.0, float("inf")] * 16])):
    try:
        scaled(x, E4M3, block=32)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## 3. The product, and its sum
#
# A kernel multiplies 8-bit numbers and scales the sums: PyTorch's `scaled_mm`, beside the same by hand:

# %%
def parts_of(x, form, per_row):
    scale = (x.abs().amax(1, keepdim=True) if per_row else x.abs().max().view(1)).clamp(min=1e-30) / form.largest
    return (x / scale).to(FAST[form]), scale


draw = partial(torch.randn, generator=torch.Generator().manual_seed(2))
x, w = draw(64, 256), draw(32, 256)
for recipe, per_row in ((ScalingType.TensorWise, False), (ScalingType.RowWise, True)):
    for form in (E4M3, E5M2):
        (a, of_a), (b, of_b) = parts_of(x, form, per_row), parts_of(w, E4M3, per_row)
        of_b = of_b.T if per_row else of_b
        by_hand = (a.float() @ b.float().T) * of_a * of_b
        try:
            y = F.scaled_mm(a, b.T, of_a, recipe, of_b, recipe, output_dtype=torch.float32)
        except NotImplementedError:  # PyTorch 2.11
            print(f"{recipe.name}: this PyTorch has no `scaled_mm` for a CPU")
            continue
        apart, lost = (y - by_hand).norm() / by_hand.norm(), (y - x @ w.T).norm() / (x @ w.T).norm()
        print(f"{recipe.name:<11}{form.name} x E4M3: {apart:.0e} from by hand; {lost:.1%} from fp32")
        assert apart < 1e-6, "only the order of fp32 sums may differ"

# %% jupyter={"source_hidden": true}
eight, one = x.to(torch.float8_e4m3fn), torch.ones(1024)
for name, scale, how in (("1x128", one[:128].view(64, 2), None), ("1x32", one.to(torch.float8_e8m0fnu), SwizzleType.SWIZZLE_32_4_4)):
    recipe = getattr(ScalingType, f"BlockWise{name}")
    try:
        F.scaled_mm(eight, eight.T, scale, recipe, scale, recipe, swizzle_a=how, swizzle_b=how)
    except (ValueError, NotImplementedError) as error:
        print(f"blocks of {name}, on this CPU: {str(error).splitlines()[0]}")

# %% [markdown]
# This CPU refuses both; so **from here on products are emulated**: `scaled` operands, multiplied in fp32. For one scale and for
# rows it equals the kernel above but for the sum; for blocks see exercise 2. On H800
# DeepSeek found that tensor cores add 8-bit products up with
# [about 14 bits](https://arxiv.org/abs/2412.19437): errors of *up to* nearly 2% in sums of 4,096. DeepSeek-V3 moves the sum to an
# fp32 register every 128. Emulated (32 products of an instruction added exactly; the *mean* error):

# %%
def cut(x, bits):  # toward zero
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).trunc(), exponent - bits)


def in_14_bits(a, b, promote=None):
    """a (m, k) times b (n, k); every `promote` products the short sum goes to fp32 and begins anew."""
    parts = (a[:, None].double() * b[None].double()).unflatten(-1, (-1, 32)).sum(-1)
    total = short = torch.zeros(parts.shape[:2], dtype=torch.float64)
    for count, part in enumerate(parts.unbind(-1), 1):
        short = cut(short + part, 14)
        if promote and 32 * count % promote == 0:
            total, short = total + short, torch.zeros_like(short)
    return total + short


# %%
for k in (128, 1024, 4096, 16384):
    a, b = (fast(torch.rand(16, k, generator=torch.Generator().manual_seed(seed)), E4M3) for seed in (3, 4))
    right = a.double() @ b.double().T
    off = {every: ((in_14_bits(a, b, every) - right) / right).mean().item() for every in (None, 128)}
    print(f"{k:>6} products: mean error {off[None]:+.3%} in 14 bits, {off[128]:+.3%} moved to fp32 every 128 (emulated)")
    assert k <= 128 or abs(off[None]) > 4 * abs(off[128]), "a short sum errs more the longer it is"

# %% [markdown]
# **Read it.** Numbers here are positive, so the sum grows; cut toward zero, it falls short, more so the longer it is. Sums
# may **not** be small.
#
# ## 4. Train
#
# A linear layer has three products: $y = xw^\top$, and backward $g\,w$ and $g^\top x$. Each adds up along another
# dimension, and blocks lie along the sum. So $x$ and $w$ are rounded twice, as they are and turned (DeepSeek's square blocks
# are the same when turned). Gradients in 4 bits go up or down *by chance*, so that their mean is right.

# %%
class ThreeProducts(torch.autograd.Function):
    """x (tokens, inputs), w (outputs, inputs); `small` rounds along the last dimension."""

    @staticmethod
    def forward(ctx, x, w, small, small_gradient):
        ctx.save_for_backward(x, w)
        ctx.small, ctx.small_gradient = small, small_gradient
        return small(x) @ small(w).T

    @staticmethod
    def backward(ctx, g):
        (x, w), small = ctx.saved_tensors, ctx.small
        to_x = ctx.small_gradient(g) @ small(w.T).T
        to_w = ctx.small_gradient(g.T) @ small(x.T).T
        return to_x, to_w, None, None


# %%
def recipe(small, small_gradient=None):
    return lambda x, w: ThreeProducts.apply(x, w, small, small_gradient or small)


RECIPES = {
    "bf16": recipe(lambda x: x.bfloat16().float()),
    "E4M3, gradients E5M2, per tensor": recipe(SCHEMES["E4M3, per tensor"], partial(scaled, form=E5M2)),
    "E4M3, per tensor": recipe(SCHEMES["E4M3, per tensor"]),
    "E4M3, per row": recipe(lambda x: scaled(x, E4M3, block=x.shape[-1])),
    "E4M3, blocks of 128": recipe(SCHEMES["E4M3, blocks of 128"]),
    "MXFP8": recipe(SCHEMES["MXFP8"]),
    "NVFP4, gradients by chance": recipe(SCHEMES["NVFP4"], partial(SCHEMES["NVFP4"], by_chance=True)),
    "E2M1, per tensor": recipe(SCHEMES["E2M1, per tensor"]),
}

# %% [markdown]
# A small transformer (two layers, 128 wide, 128 bytes a batch; `small_model.py` in the lesson's folder) has read
# Python's sources for 40 steps in fp32. From there, one backward in each recipe: how far are the gradients of its matrices
# from fp32's? Embedding, norms, attention's products and the head stay in fp32. A channel inside each SwiGLU is planted as an
# outlier: a row of `up` grows, a column of `down` shrinks as much, and the model stays *the same* in exact arithmetic.

# %%
found, probe = {}, batches(1, seed=9)
for factor in (1.0, 1e5, 1e6):
    right = unplanted(gradients(fresh(planted=factor), probe)[1])
    for name, product in RECIPES.items():
        torch.manual_seed(0)
        wrong = unplanted(gradients(fresh(product, planted=factor), probe)[1])
        off = sum(((wrong[n] - right[n]).norm() / right[n].norm()).item() for n in right) / len(right)
        assert factor > 1 or (off > 1) == name.startswith("E2M1"), f"{name}: one scale of E2M1 alone loses the gradient"
        found.setdefault(name, {})[f"outlier x {factor:,.0f}"] = f"{off:.1%}" if off < 1 else "over 100%"
pd.DataFrame(found).T.rename_axis("error of the gradient, the planted channel apart, mean of all matrices (emulated)")

# %% [markdown]
# **Read it.** Eight bits cost 4.5 to 9.2%, also with one scale and an outlier of 100,000. Ten times
# beyond, that scale breaks, rows lose a fifth and blocks hold. NVFP4 fails there, too: its block scales are E4M3 shares of *one* fp32 scale, a
# range of 229,376 again. E2M1 with one scale, all rounded to the nearest, is lost at once. E5M2 for gradients buys nothing
# here: a digit less, for a range not needed.
#
# Does that spoil learning? Train the blocks on, all on the same 40 batches.
# Embedding, norms and head wait: they learn most. A tolerance is published:
# two models smaller than DeepSeek-V3 stayed within 0.25% of bf16's loss, over about a trillion tokens. (NVIDIA calls NVFP4's loss
# [comparable](https://arxiv.org/abs/2509.25149) to an FP8 twin's, with rotations, square blocks and some layers in 16 bits.)

# %%
plain, losses = go_on(40), {"nothing learned": go_on(40, learning_rate=0.0)}
losses |= {name: go_on(40, product) for name, product in RECIPES.items()}
for name, found in losses.items():
    gap = (found.mean() / plain.mean() - 1).item()
    print(f"{name:<34} mean loss {found.mean():.4f}, {gap:+.2%} from fp32: {'within' if abs(gap) < 0.0025 else 'beyond'} 0.25%")
    lost = abs(losses["nothing learned"].mean() / plain.mean() - 1)
    assert name.startswith(("E2M1", "nothing")) or abs(gap) < lost / 4, f"{name}: a quarter of what is learned is lost"

# %% [markdown]
# **Read it.** All recipes of 8 bits stay within, and NVFP4; E2M1 with one scale does not.
# That shows little: on Python 3.12's sources, another text, E2M1 is within (0.16%); on two other sets of batches, run apart, MXFP8 was up to 0.36% off, "nothing learned" as little as
# 0.02%. 0.25% is a sixth of what was learned here. Gross faults are found; that eight bits hold is known from print, and
# SwiGLU's outliers broke a run [after 200 billion tokens](https://arxiv.org/abs/2409.12517).
#
# And the weights themselves? Products read rounded *copies*; an optimizer adds to the *master* weights. Adam's first step is the
# learning rate, up or down. What share of weights in fewer bits does it change?

# %%
KEPT = {"E4M3": lambda w: fast(1024 * w, E4M3) / 1024, "bf16": lambda w: w.bfloat16().float(), "fp32": lambda w: w}
model = fresh()
_, gradient = gradients(model, probe)
for rate in (3e-3, 3e-4, 3e-5):
    changed = dict.fromkeys(KEPT, 0.0)
    for (name, g), (kind, keep) in itertools.product(gradient.items(), KEPT.items()):
        before = keep(model.get_parameter(name).detach())
        changed[kind] += (keep(before - rate * g.sign()) != before).float().mean().item() / len(gradient)
    print(f"learning rate {rate:g}:", "; ".join(f"{kind} {share:.0%} of the weights change" for kind, share in changed.items()))
    assert rate > 1e-3 or changed["E4M3"] < changed["bf16"] <= changed["fp32"], "fewer digits lose more updates"

# %% [markdown]
# **Read it.** At rates of large models (DeepSeek-V3: 2.2e-4) most updates are lost in E4M3: smaller than half a
# step. Sums of products, and weights that many small steps are **added** to, must stay wide. Adam's moments need
# not (not measured here): [8 bits](https://arxiv.org/abs/2110.02861) with scales for blocks are common, and both have
# [trained in FP8](https://arxiv.org/abs/2409.12517).
#
# ## 5. Which bytes stay
#
# **Activations.** A SwiGLU of $T$ tokens, $H$ channels, $4H$ inside, whose layers keep their inputs for backward in E4M3, a scale
# a row, and not in 16 bits. How many percent does it save?

# %%
class KeepsEight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        small, scale = parts_of(x.float(), E4M3, per_row=True)
        ctx.save_for_backward(small, scale, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        small, scale, w = ctx.saved_tensors
        return g @ w, g.T @ (small.float() * scale).to(g.dtype)


# %%
T, H = 256, 64
kept = {"16 bits": kept_by_swiglu(F.linear, T, H), "8 bits": kept_by_swiglu(KeepsEight.apply, T, H)}
formula = {"16 bits": 2 * T * H + 8 * T * 4 * H, "8 bits": 2 * T * (H + 4) + 6 * T * 4 * H + T * (4 * H + 4)}
for name, size in kept.items():
    print(f"{name}: {size:,} bytes kept (measured), {formula[name]:,} by the formula, {size / kept['16 bits']:.0%}")
    assert size == formula[name], f"{name}: each tensor once, scales of 4 bytes a row"

# %% [markdown]
# **Read it.** Little. Of four tensors inside, `down` reads one; SiLU and the multiplication keep three in 16 bits. And the input
# that `gate` and `up` shared is kept twice, at half the bytes.
#
# **Sends.** FSDP can cast its shard *before* it gathers. With one scale a tensor, ranks agree on one number; the same
# message tells all of a NaN on one.

# %%
def gather_small(shard):
    told = torch.stack([shard.nan_to_num(0, 0, 0).abs().max(), (~shard.isfinite()).any().float()])
    dist.all_reduce(told, dist.ReduceOp.MAX)
    if told[1]:
        raise ValueError("A shard holds an infinity or NaN, here or on another rank: nothing is gathered.")
    scale = told[0].clamp(min=1e-30) / E4M3.largest
    small = (shard / scale).to(torch.float8_e4m3fn).view(torch.uint8)  # gloo sends bytes
    whole = small.new_empty(dist.get_world_size() * len(small))
    dist.all_gather_into_tensor(whole, small)
    return whole.view(torch.float8_e4m3fn).float() * scale


# %%
whole = torch.randn(SIZE, generator=torch.Generator().manual_seed(5))
for found, sent in run_ranks(gathered_on_rank, RANKS, gather_small, whole):
    equal = torch.equal(found, scaled(whole.view(1, -1), E4M3).view(-1))
    print(f"equal to rounding the whole: {equal}; put in {sent:,} bytes, in bf16 {2 * SIZE // RANKS:,}")
    assert equal and sent == SIZE // RANKS + 8, "a byte a number, and two numbers to agree on"
whole[-1] = torch.nan  # on the last rank
said = {text for text, _ in run_ranks(gathered_on_rank, RANKS, gather_small, whole)}
print("a NaN on rank 1:", *said)
assert len(said) == 1 and "NaN" in said.pop(), "all ranks refuse with one sentence, nobody waits"

# %% [markdown]
# **All of it.** Llama 3 8B on eight cards, 128 sequences of 4,096 a step, optimizer states sharded (ZeRO-1), by the course's
# planner. Then NVIDIA's rates of Megatron-Bridge (release, model, format, cards), at 8,192, so
# slower. "Left out": the row set no constant of the planner.

# %%
cases = {"H100": ("bf16", "fp8"), "B200": ("bf16", "fp8", "mxfp8")}
pd.DataFrame({f"{gpu}, {kind}": bytes_and_seconds(gpu, kind) for gpu, kinds in cases.items() for kind in kinds}).fillna("").rename_axis("predicted")

# %%
published = bridge.comparisons()
for row in published:
    if " 8B " in row.case:
        print(f"{row.case:<26}{row.published:>8,.0f} tokens/s/GPU published,{row.predicted:>8,.0f} predicted{'' if row.fitted else ', left out'}")
errors_left_out = [abs(row.error) for row in published if not row.fitted]
print(f"the {len(errors_left_out)} rows that set no constant, 8B to 405B: off by {sum(errors_left_out) / len(errors_left_out):.1%} in the mean")
for row in table("torchtitan")[1:3]:
    print(f"torchtitan, 8B on 8 H100, {'float8' if row['float8'] == '1' else 'bf16':<6}: {row['tps_per_gpu']} tokens/s/GPU, {row['memory_gib']} GiB (published)")

# %% [markdown]
# **Read it.** Products take 53 to 58% of their time, not half: head and attention stay in 16 bits. Other kernels take longer:
# they cast. The 0.39 s of B200's fp8 step in neither row are mostly launches of kernels. A step takes about a third less:
# predicted, no published pair checks it; torchtitan's, other software, gained 28% of speed, and 0.2 GiB. Memory moves
# little: weights lie there twice, a byte each; master weights and moments have 32 bits, gradients
# and activations between products 16.
#
#
# | number | may be | why |
# |---|---|---|
# | operands of products: weights' copies, activations, gradients | 8 bits; 4 in blocks of 16, with rotations and more (section 4) | losses stay close, in print |
# | their scales | E8M0 or E4M3 a block; fp32 | they must reach the largest number |
# | sums of products | fp32; 14 bits for 128 of them | cut toward zero, they drift |
# | gradients of weights | 16 bits; DeepSeek-V3: 32 | sums, over batches and ranks |
# | master weights | 32 bits | small updates are lost |
# | moments | 32 bits; DeepSeek-V3: 16; in blocks 8 | in print |
# | embedding, norms, head, attention's products | 16 bits and more | sensitive (DeepSeek-V3's choice) |
# | what is gathered | 8 bits | cast anyway, if all agree on the scale |
#
# **Question.** 64 ranks gather 8 billion weights by FSDP, in E4M3. How many GB does each rank *receive*, scales apart?

# %%
received_gb = ...
check("20.received_gb", received_gb)

# %% [markdown]
# ## Break it, diagnose it
#
# To find a tensor's largest number, a kernel reads it once more. **Delayed scaling** takes the
# *last* steps' largest. Here layers' inputs are rounded with the scale of the last batch, or of this one. At batch 4 the inside of
# each SwiGLU grows 64 times (`down` shrinks: the same model); at batch 8 it shrinks back. Which batch suffers?

# %%
class Scaler:
    def __init__(self, delayed):
        self.delayed, self.last, self.cut = delayed, None, 0.0

    def __call__(self, x):
        largest = x.abs().max()
        used = self.last if self.delayed and self.last is not None else largest
        scale, self.last = used.clamp(min=1e-30) / E4M3.largest, largest
        self.cut = (x.abs() > used).float().mean().item()
        return fast(x / scale, E4M3) * scale


# %%
right, wrong = (spikes(lambda: Scaler(delayed), grows_at=4, back_at=8) for delayed in (False, True))
for batch, ((now, *_), (late, layer, cut_share)) in enumerate(zip(right, wrong, strict=True)):
    print(f"batch {batch:>2}: loss {now:.4f} with this batch's scale, {late:.4f} with the last one's; cut most: {cut_share:.2%} in {layer}")
gaps = [late[0] - now[0] for now, late in zip(right, wrong, strict=True)]
assert max(gaps) == gaps[4] > 10 * max(map(abs, gaps[:4] + gaps[5:])), "the spike alone is cut"
assert wrong[4][1].endswith("down") and wrong[4][2] > 0.1, "inside the SwiGLU, where it was planted"

# %% [markdown]
# **Diagnose it.** No NaN, no infinity: numbers above the old maximum are cut to it, and one loss is 1.2% too high. Batches
# differ more: only a twin shows it, or the *share that is cut*, by layer. A scale too large costs little: 64 times
# leaves 448/64 for the largest number, and floating point keeps its digits. But a margin must be as large as the growth, here
# $2^6$; many *past* steps would not have told. The largest of now mends it (first column), as MXFP8, blocks and torchao do.

# %% jupyter={"source_hidden": true}
for name, size in kept.items():
    score("20", f"kept by a SwiGLU, {name}", peak_bytes=size)

# %% [markdown]
# ## Recap
#
# - Each floating-point number has a scale of its own: E4M3 with one scale bears an outlier of 10,000, E2M1 is lost at 100.
# - Operands of products may have 8 bits, in blocks of 16 even 4; moments 8, in blocks. Sums and master weights may not.
# - FP8 makes products quicker and gathers smaller. Most activations keep their bytes.
# - A scale too large costs little, one too small cuts: count what is cut.
#
# Do the [lab](../../labs/advanced/20_eight_bits.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/20_eight_bits.ipynb).
#
# **References.** Those linked above, and *FP8 formats for deep learning*, [arXiv:2209.05433](https://arxiv.org/abs/2209.05433).

# %% [markdown]
# ## On Monday
#
# **Ask your tensors first.** You have `model` and a `batch` that it takes by keyword. For each linear layer: how far the largest
# input lies from a typical one, and what share E4M3 would turn to zero, with one scale or one a row (token):
#
# ```python
# import torch
#
# report = {}
#
# def lost(x, largest):
#     return ((x > 0) & (x < largest / 448 * 2**-10)).float().mean().item()  # half of E4M3's smallest number
#
# def watch(name):
#     def hook(module, inputs):
#         x = inputs[0].detach().float().abs()
#         if x.any():  # zeros need no scale
#             ratio = (x.max() / x[x > 0].median()).item()
#             report[name] = ratio, lost(x, x.max()), lost(x, x.amax(-1, keepdim=True))
#     return hook
#
# hooks = [m.register_forward_pre_hook(watch(n)) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
# with torch.no_grad():
#     model(**batch)
# for each in hooks:
#     each.remove()
# for name, (ratio, one, rows) in sorted(report.items(), key=lambda row: -row[1][0])[:10]:
#     print(f"{name:<40} largest / median {ratio:>10,.0f}   lost by one scale {one:.2%}, by one a row {rows:.2%}")
# ```
#
# **Look at** the last columns: both near zero, one scale will do; rows lose less, take rows; both lose,
# blocks. **torchao** (0.18; fast from H100 on, runs on a CPU to try) rounds operands and keeps `weight` and states: have
# fp32 weights, and tokens a batch in multiples of 16. The forward product is added up the short way of section 3.
#
# ```python
# import torch
# from torchao.float8 import Float8LinearConfig, convert_to_float8_training
#
# def may_be_small(module, name):  # sides in multiples of 16; the head stays
#     return isinstance(module, torch.nn.Linear) and "lm_head" not in name and not any(n % 16 for n in module.weight.shape)
#
# convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"), module_filter_fn=may_be_small)
# print(sum("Float8" in type(m).__name__ for m in model.modules()), "layers multiply in 8 bits")
# model.compile()  # in place, so names in its state_dict stay; fuses the casts, and torchao counts on it
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
# with torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16):
#     loss = model(**batch).loss
# loss.backward()
# optimizer.step()
# ```
#
# Convert before `fully_shard`; with one scale (`"tensorwise"`) FSDP2 can gather 8 bits:
# `Float8LinearConfig(enable_fsdp_float8_all_gather=True)`. **Transformer Engine** (not run here, it needs
# a GPU): its layers, under `te.autocast(enabled=True, recipe=...)`. **Look at** the loss beside a bf16 twin's, both smoothed, over all tokens you can pay: within 0.25%.
