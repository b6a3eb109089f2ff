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
# **The question.** By their data sheets H100 multiplies 8-bit numbers twice as fast as 16-bit ones, and B200 4-bit
# ones twice as fast again. Which numbers of a training step may be that small?
#
# **In short:** the factors of products may, where few enough numbers share a scale; so may what FSDP gathers, what a SwiGLU keeps
# and, by published runs, Adam's moments. Long sums and master weights may not. Products get faster; model states stay as large.
#
# **Promise.** You round numbers, emulate products, and choose a recipe for your GPU.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 70 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |
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
from dataclasses import dataclass
from functools import cache, partial

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.functional import ScalingType
from torch.utils.checkpoint import checkpoint

from utils import check, run_ranks, show
from utils.lessons.lesson_20.figures import draw_gains, draw_number_lines, draw_outliers, draw_products, draw_spike
from utils.lessons.lesson_20.held import compiled_fsdp, gathered_on_rank, kept_by_swiglu, published_gains, published_peaks, swiglu_gradients
from utils.lessons.lesson_20.small_model import batches, beside_one, fresh, gradients, spikes, unplanted
from utils.lessons.lesson_20.short_sums import in_14_bits

RANKS, SIZE = 2, 64 * 1024  # numbers of section 5's gather

# %% [markdown]
# ## 1. What so few bits can say
#
# A floating-point number has a sign, a power of two (the *exponent*) and digits (the *mantissa*). E4M3 spends 4 bits on the exponent
# and 3 on the mantissa. Below its smallest exponent digits go one by one (*subnormal* numbers). E8M0 is a power of two alone, and
# serves as a scale. New words: [glossary](../00_glossary.ipynb).
#
# How close do ticks stand (digits), how far does a row reach (range)?

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


# %% jupyter={"source_hidden": true}
every = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).pow(9)  # sizes of many powers of two
FAST = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
for form, dtype in FAST.items():
    alike = torch.equal(rounded(every, form), every.clamp(-form.largest, form.largest).to(dtype).float())
    assert alike, f"{form.name}: PyTorch rounds otherwise"
numbers = {form.name: rounded(every.abs(), form).unique()[1:].tolist() for form in (E2M1, E4M3, E5M2)}
full = {form.name: 2.0**form.least for form in (E2M1, E4M3, E5M2)}
show(draw_number_lines(numbers, full, title="Digits or range: the positive numbers of each format (computed)"),
     alt="Ticks on a logarithmic line: E2M1 has seven positive numbers from 0.5 to 6; E4M3 reaches over 18 powers of two, E5M2 "
     "over 32, with fewer numbers in each. Crosses and fp16's lighter end mark numbers with fewer digits. bf16 and E8M0 go on beyond both edges.")

# %% jupyter={"source_hidden": true}
between = torch.linspace(1, 2, 100_001)
print(f"{'':<6}{'smallest':>10}{'largest':>9}{'largest / smallest':>20}{'worst error with all digits':>29}")
for form in (E4M3, E5M2, E2M1):
    least, most = numbers[form.name][0], form.largest
    worst = (rounded(between, form) / between - 1).abs().max()
    print(f"{form.name:<6}{least:>10.2g}{most:>9g}{most / least:>20,.0f}{worst:>29.1%}")
print("1,000, infinity and NaN, cast to E4M3 here:", torch.tensor([1e3, torch.inf, torch.nan]).to(FAST[E4M3]).tolist())

# %% [markdown]
# **Read it.** E5M2 has more range than E4M3, and its rounding error is about twice as large. Four bits span only a factor of 12.
#
# ## 2. Who shares a scale decides
#
# Before the cast, numbers are divided by a **scale**, so that the largest becomes the format's largest. Whatever is far
# smaller fades to zero. So it matters which numbers, a *block*, share a scale:
#
# | scheme | numbers that share a scale | scale | bits a number |
# |---|---|---|---|
# | per tensor, per row | all; a row | fp32 | 8 |
# | [DeepSeek-V3](https://arxiv.org/abs/2412.19437) | 128; of weights 128 x 128 | fp32 | 8.25; weights 8.002 |
# | [MXFP8](https://arxiv.org/abs/2310.10537) | 32 | E8M0 | 8.25 |
# | [NVFP4](https://arxiv.org/abs/2509.25149) | 16; of weights 16 x 16 | E4M3, and one in fp32 for the tensor | 4.5, as stored |
#
# Where does each line begin to rise?

# %%
def fast(x, form):
    return x.clamp(-form.largest, form.largest).to(FAST[form]).float() if form in FAST else rounded(x, form)


def power_of_two(scale):  # up, so that no largest number is cut; the MX specification cuts those above 448
    return scale.log2().ceil().exp2()


def two_levels(scale):  # NVFP4: block scales in E4M3, as shares of a second scale
    second = (scale.max() / E4M3.largest).clamp(min=1e-30)  # zeros stay zeros
    return fast(scale / second, E4M3) * second


def scaled(x, form, block=None, scale_as=lambda scale: scale):
    """x (rows, columns) as a kernel sees it: in a format, a scale for each block of a row; None: one for all."""
    if block is not None and x.shape[-1] % block:
        raise ValueError(f"{x.shape[-1]} columns are no whole blocks of {block}: pad them with zeros to a multiple.")
    if not x.isfinite().all():
        raise ValueError(f"{(~x.isfinite()).sum()} numbers are infinite or NaN: they would take the scale with them.")
    parts = x.reshape(1, -1) if block is None else x.unflatten(-1, (-1, block))
    scale = scale_as(parts.abs().amax(-1, keepdim=True) / form.largest).clamp(min=1e-30)  # a block of zeros stays so
    return (fast(parts / scale, form) * scale).reshape(x.shape)


# %%
def squares(x, form, side=128):  # DeepSeek-V3's weights
    tiles = x.unflatten(0, (-1, side)).unflatten(-1, (-1, side)).transpose(1, 2)
    small = scaled(tiles.reshape(-1, side * side), form, block=side * side)
    return small.reshape(tiles.shape).transpose(1, 2).reshape(x.shape)


# %%
SCHEMES = {
    "int8, per tensor": lambda x: (x / (step := x.abs().max().clamp(min=1e-30) / 127)).round() * step,
    "E4M3, per tensor": partial(scaled, form=E4M3),
    "E4M3, blocks of 128": partial(scaled, form=E4M3, block=128),
    "MXFP8": partial(scaled, form=E4M3, block=32, scale_as=power_of_two),
    "NVFP4": partial(scaled, form=E2M1, block=16, scale_as=two_levels),
    "E2M1, per tensor": partial(scaled, form=E2M1),
}
typical = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
factors, errors = [10.0 ** (third / 3) for third in range(19)], {name: [] for name in SCHEMES}
for factor in factors:
    x = typical.clone()
    x[3, 7] = factor
    for name, small in SCHEMES.items():
        off = small(x) - x
        off[3, 7] = 0
        errors[name].append((off.norm() / typical.norm()).item())

# %% jupyter={"source_hidden": true}
show(draw_outliers(factors, errors, title="Measured: one outlier among normally distributed numbers, and the error of all others"),
     alt="int8's error is 100% at 1,000. E4M3 per tensor stays at 2.7% up to 10,000 and reaches 95% at a "
     "million. E2M1 per tensor loses all others at 100. Blocks of 128 and MXFP8 stay below 5%. NVFP4 stays at 10% up to 100,000 and reaches 72% at a million.")
grown = {f: e / errors["E4M3, per tensor"][0] for f, e in zip(factors, errors["E4M3, per tensor"], strict=True)}
for factor in factors[9::3]:
    zeros = (typical.abs() < factor / E4M3.largest * 2**-10).float().mean()  # half of E4M3's smallest number
    print(f"E4M3, outlier x {factor:>9,.0f}: {zeros:>5.1%} of the others become zero, their error is x {grown[factor]:.2f}")
print(f"your bet at 1,000: x {my_bet_factor:g}")
assert 0.9 < grown[1e3] < 1.1 and grown[1e6] > 20, "E4M3 holds at a thousand and fails at a million: is it scaled?"

# %% [markdown]
# **Read it.** The answer to the bet is 1: in E4M3 an outlier of a thousand costs the others nothing. int8's steps are all equal: best
# without outliers, and lost by then. E4M3's steps shrink with the number, until its exponents end: from 448 / $2^{-6}$ = 28,672 on, typical
# numbers lose digits.
#
# A small block confines the damage. **Four bits** need small blocks: with one scale an outlier of 100 takes everything. NVFP4's hold until their own scales, E4M3 shares of *one* scale, run out of range.
#
# In LLMs single activations are [up to 100,000 times the others](https://arxiv.org/abs/2402.17762). Norms tame most
# layers' inputs, but none stands before `down`, a SwiGLU's last layer.
#
# **Question.** MXFP4 has E2M1 numbers, and an E8M0 scale for 32. How many bits does a number take?

# %%
bits_of_mxfp4 = ...
check("20.bits_of_mxfp4", bits_of_mxfp4)

# %% [markdown]
# ## 3. Long sums stay wide
#
# A kernel multiplies 8-bit numbers, adds up, then applies the scales. PyTorch's `scaled_mm`, and the same by hand:

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

# %% [markdown]
# On a CPU it takes no block scales. So **from here on products are emulated**: factors are rounded, then multiplied in fp32.
#
# How wide must the sum be? DeepSeek found that an H800's tensor cores keep [about 14 bits](https://arxiv.org/abs/2412.19437), and moves
# the sum to an fp32 register every 128 products. Both emulated, with 32 products added exactly before each cut:

# %% jupyter={"source_hidden": true}
for make, signs in ((torch.rand, "positive"), (torch.randn, "of both signs")):
    for k in (128, 4096, 16384):
        x, w = (make(8, k, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))
        a, b, wanted = fast(x, E4M3), fast(w, E4M3), x.double() @ w.double().T
        right = a.double() @ b.double().T
        off = {every: ((in_14_bits(a, b, every) - right).norm() / right.norm()).item() for every in (None, 128)}
        told = f"{off[None]:.3%} in 14 bits, {off[128]:.3%} moved to fp32 every 128"
        print(f"{k:>6} products {signs:<13}: {told} (emulated); factors rounded: {(right - wanted).norm() / wanted.norm():.3%}")
        assert k < 4096 or off[None] > 2 * off[128], "a short sum errs more the longer it is"

# %% [markdown]
# **Read it.** Cuts go toward zero here, so the error grows with the sum. Moved every 128 products, it stays small.
#
# Rounding factors costs more in sums of both signs, cuts in the two longer sums of one sign. torchao takes short
# sums (*fast accumulation*) for a layer's output alone.
#
# ## 4. Factors of products may be small
#
# A linear layer has three products: its output, the gradient to its input $x$, and the gradient to its weight $w$. A scale serves
# a stretch of a sum, and each product adds along another dimension. So rows and stripes turn with the sum, and are rounded
# twice. Squares, and one scale a tensor, serve both ways:

# %%
show(draw_products(title="Who shares a scale: each product's two factors (drawn, not to scale)"),
     alt="Four recipes by three products. A scale for each row along the sum. DeepSeek-V3: activations and gradients in stripes of 128 along the sum, weights in "
     "squares of 128. MXFP8: stripes of 32 for all. NVFP4: stripes of 16, weights in squares of 16. Stripes turn with the sum.")

# %%
class ThreeProducts(torch.autograd.Function):
    """x (tokens, inputs), w (outputs, inputs); each function rounds along the last dimension."""

    @staticmethod
    def forward(ctx, x, w, small_x, small_w, small_g):
        ctx.save_for_backward(x, w)
        ctx.small = small_x, small_w, small_g
        return small_x(x) @ small_w(w).T

    @staticmethod
    def backward(ctx, g):
        (x, w), (small_x, small_w, small_g) = ctx.saved_tensors, ctx.small
        to_x = small_g(g) @ small_w(w.T).T
        to_w = small_g(g.T) @ small_x(x.T).T
        return to_x, to_w, None, None, None


# %%
def all_three(small, small_gradient=None, small_weight=None):
    return lambda x, w: ThreeProducts.apply(x, w, small, small_weight or small, small_gradient or small)


def input_and_gradient(small, small_gradient):  # weights stay as they are
    return lambda x, w: ThreeProducts.apply(x, w, small, torch.clone, small_gradient)


RECIPES = {
    "bf16": [lambda x: x.bfloat16().float()],
    "E4M3, per tensor, gradients in E5M2": [SCHEMES["E4M3, per tensor"], partial(scaled, form=E5M2)],
    "E4M3, per tensor": [SCHEMES["E4M3, per tensor"]],
    "E4M3, per row, powers of two (torchao's)": [lambda x: scaled(x, E4M3, block=x.shape[-1], scale_as=power_of_two)],
    "E4M3, blocks of 128, weights 128 x 128": [SCHEMES["E4M3, blocks of 128"], None, partial(squares, form=E4M3)],
    "MXFP8": [SCHEMES["MXFP8"]],
    "E2M1, per tensor": [SCHEMES["E2M1, per tensor"]],
    "E2M1, blocks of 16, scales in fp32": [partial(scaled, form=E2M1, block=16)],
    "E2M1, blocks of 16, NVFP4's scales": [SCHEMES["NVFP4"]],
}

# %% [markdown]
# A small transformer has read Python's sources for 40 steps in fp32. Now its blocks' linear layers round $x$, $w$ and $g$. How far
# are their weights' gradients from fp32's? NVFP4's squares, rotations and chance are not run here.

# %%
pairs = batches(6, seed=9)


@cache
def right_gradients(planted):
    return [unplanted(gradients(fresh(None, planted), [pair])[1]) for pair in pairs]


def gradient_errors(product, count, planted=1.0, only=""):
    """Of each batch: the error of a matrix's gradient beside its size, mean of all matrices."""
    errors = []
    for pair, right in zip(pairs[:count], right_gradients(planted), strict=False):
        wrong = unplanted(gradients(fresh(product, planted, only), [pair])[1])
        errors.append(torch.stack([(wrong[n] - right[n]).norm() / right[n].norm() for n in right]).mean())
    return torch.stack(errors)


# %%
found = {}
for name, smalls in RECIPES.items():
    off = gradient_errors(all_three(*smalls), 6)
    assert "E4M3, " not in name or off.mean() < 0.2, f"{name}: eight bits lose a fifth of the gradient"
    found[name] = {"mean ± deviation": f"{off.mean():.1%} ± {off.std():.1%}", "least to most": f"{off.min():.1%} to {off.max():.1%}"}
pd.DataFrame(found).T.rename_axis(columns="error of the gradient, 6 batches (measured, products emulated)")

# %% [markdown]
# **Read it.** Eight bits cost about 5%, whoever shares a scale; four bits in blocks of 16 a quarter. Rows and MXFP8 agree: a power of two
# changes no digit. Gradients in E5M2, torchao's and Transformer Engine's default with one scale, cost more.
#
# Now outliers are *planted* in the input of each `down`; that and `down`'s $g$ alone are rounded. A row of `up` is multiplied, so one **channel**
# grows in every token, and `down`'s column is divided: in exact arithmetic the same model. Or **one number** grows while the tensor is
# rounded, and is put back:

# %%
KINDS = "one scale, g in E5M2", "one scale", "rows", "128", "MXFP8", "16 in E2M1", "16, NVFP4's scales"
off_by = {}
for kind, smalls in zip(KINDS, [*list(RECIPES.values())[1:6], *list(RECIPES.values())[-2:]], strict=True):
    small, small_g = smalls[0], smalls[1] if kind == KINDS[0] else smalls[0]
    same = input_and_gradient(small, small_g)
    off_by[kind] = {"no outlier": gradient_errors(same, 3, only="down")}
    for factor in (1e5, 1e6):
        off_by[kind][f"one number x {factor:,.0f}"] = gradient_errors(input_and_gradient(beside_one(small, factor), small_g), 3, only="down")
        off_by[kind][f"channel x {factor:,.0f}"] = gradient_errors(same, 3, factor, "down")
told = pd.DataFrame(off_by).T.map(lambda off: f"{off.mean():.1%} ± {off.std():.1%}" if off.mean() < 1 else "over 100%")
told.rename_axis(columns="`down`'s input and gradient rounded: error of the gradient, 3 batches (measured, emulated)")

# %% [markdown]
# **Read it.** At a million one scale breaks. In `down`'s output each token's row holds the channel: it costs rows three tenths, blocks
# of 128 7%, and MXFP8 below 4%. NVFP4's E4M3 scales break: with scales in fp32 blocks of 16 hold.
#
# A rule for H100, which has no MXFP8: take the coarsest that errs at most 1.5 times as much as the best. Does the 1.5 decide?

# %%
for case in off_by["128"]:
    errors = {kind: off_by[kind][case].mean() for kind in KINDS[:4]}
    chosen = {most: next(k for k in errors if errors[k] <= most * min(errors.values())) for most in (1.25, 1.5, 2)}
    times = ", ".join(f"{kind} {error / min(errors.values()):.1f}" for kind, error in errors.items())
    print(f"{case:<22}: {times} times the best; by 1.5: {chosen[1.5]}; by 1.25: {chosen[1.25]}; by 2: {chosen[2]}")
    assert "1,000,000" not in case or "scale" not in "".join(chosen.values()), "one scale errs over twice as much beside a million"

# %% [markdown]
# **Read it.** Without an outlier one scale is taken, with gradients in E4M3: in E5M2 they pass only the limit of 2. Beside a million
# it never is. Between rows and blocks of 128 the limit can decide.
#
# How do whole runs end? DeepSeek's FP8 kept the loss of two models [within 0.25%](https://arxiv.org/abs/2412.19437)
# of bf16's. The loss of NVIDIA's 12B in NVFP4 ended [slightly above 1.5%](https://arxiv.org/abs/2509.25149) over its FP8 twin's.
#
# ### Could master weights be small?
#
# All this rounds *copies*. The optimizer updates **master weights**: Adam moves one by about the learning rate at most. DeepSeek-V3 began
# with weights of 0.006 and a peak rate of 2.2e-4, and ended with 7.3e-6. What share of such *first* weights moves?

# %%
BF16 = Form("bf16", 7, -126, 3.39e38)
w = 0.006 * torch.randn(200_000, generator=torch.Generator().manual_seed(6))
in_8, in_16 = fast(1024 * w, E4M3) / 1024, rounded(w, BF16)
for rate in (2.2e-4, 7.3e-6):
    moved_8 = (fast(1024 * (in_8 - rate), E4M3) / 1024 != in_8).float().mean()
    moved_16 = (rounded(in_16 - rate, BF16) != in_16).float().mean()
    step = (in_16 - rounded(in_16 - rate, BF16, torch.rand_like(w))).double().mean() / rate
    print(f"rate {rate:.1e}: E4M3 moves {moved_8:.0%}, bf16 {moved_16:.0%}; bf16 rounded by chance goes {step:.0%} of the way in the mean")
    assert moved_8 < moved_16 and abs(step - 1) < 0.3, "fewer digits lose more updates; chance loses none in the mean"

# %% [markdown]
# **Read it.** At the peak rate half of the weights stay in E4M3, and the other half go a whole step. At the last most stay in bf16, too.
# *Stochastic rounding* goes up or down by chance, and loses none in the mean.
#
# ## 5. Which bytes stay, and what speed comes
#
# Products in eight bits leave master weights, gradients and moments as they are. Memory does not halve:

# %%
for gpus, peak_in_16, peak_in_8 in published_peaks():
    print(f"8B on {gpus}, FSDP, compiled: bf16 {peak_in_16} GB per GPU, products and gather in FP8 {peak_in_8} GB (published by torchao)")

# %% [markdown]
# ### What could shrink: activations
#
# torchao keeps layers' inputs in 16 bits. DeepSeek-V3 keeps a SwiGLU's in E4M3, and makes `down`'s *again* in backward.
# What does each save? $T$ tokens have $H$ channels, and $4H$ inside:

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
class SmallInside(torch.autograd.Function):
    """From what `gate` and `up` give, and `down`'s weight, to the output; keeps the two in E4M3."""

    @staticmethod
    def forward(ctx, gate, up, w):
        ctx.save_for_backward(*parts_of(gate.float(), E4M3, True), *parts_of(up.float(), E4M3, True), w)
        return (F.silu(gate) * up) @ w.T

    @staticmethod
    def backward(ctx, g):
        *kept, w = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [(small.float() * scale).to(g.dtype).requires_grad_() for small, scale in (kept[:2], kept[2:])]
            inside = F.silu(leaves[0]) * leaves[1]  # made again
        return *torch.autograd.grad(inside, leaves, g @ w), g.T @ inside


# %%
def inside_again(gate, up, w):
    return checkpoint(lambda a, b, w: F.linear(F.silu(a) * b, w), gate, up, w, use_reentrant=True)


T, H = 256, 64
kept = {"16 bits": kept_by_swiglu(F.linear, T, H), "16 bits, made again": kept_by_swiglu(F.linear, T, H, inside_again),
        "8 bits": kept_by_swiglu(KeepsEight.apply, T, H), "8 bits, made again": kept_by_swiglu(KeepsEight.apply, T, H, SmallInside.apply)}
formula = {"16 bits": 2 * T * H + 8 * T * 4 * H, "16 bits, made again": 2 * T * H + 4 * T * 4 * H,
           "8 bits": 2 * T * (H + 4) + 6 * T * 4 * H + T * (4 * H + 4), "8 bits, made again": 2 * T * (H + 4) + 2 * T * (4 * H + 4)}
for name, size in kept.items():
    print(f"{name:<19}: {size:,} bytes kept (measured), {formula[name]:,} by the formula, {size / kept['16 bits']:.0%}")
    assert size == formula[name], f"{name}: each tensor once, scales of 4 bytes a row"


# %%
right, small = swiglu_gradients(F.linear, T, H), swiglu_gradients(KeepsEight.apply, T, H, SmallInside.apply)
off = {name: ((small[name] - right[name]).norm() / right[name].norm()).item() for name in right}
print("8 bits, made again: gradients off by", ", ".join(f"{each:.1%} ({name})" for name, each in off.items()), "(measured, normal numbers)")
assert 0.01 < min(off.values()) <= max(off.values()) < 0.06, "eight bits cost a few percent"

# %% [markdown]
# **Read it.** Eight bits in the layers alone save little: SiLU and the multiplication keep three tensors in 16 bits. Making `down`'s input
# again nearly halves the bytes. Eight bits on top cut the rest by 43%, for gradients 3 to 4% off.
#
# ### What is sent
#
# FSDP can cast its shard *before* it gathers. With one scale a tensor, ranks first agree on it:

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
    print(f"equal to rounding the whole: {equal}; handed to collectives: {sent:,} bytes, in bf16 {2 * SIZE // RANKS:,}")
    assert equal and sent == SIZE // RANKS + 8, "a byte a number, and two numbers to agree on"

# %% [markdown]
# **Question.** 64 ranks gather 8 billion weights once, by FSDP, in E4M3. How many GB does each rank *receive*, scales apart?

# %%
received_gb = ...
check("20.received_gb", received_gb)

# %% [markdown]
# ### How much faster
#
# Pairs of one model, layout and cluster, published by torchtitan, [torchao](https://docs.pytorch.org/ao/main/workflows/training.html),
# [PyTorch](https://dev-discuss.pytorch.org/t/enabling-float8-all-gather-in-fsdp2/2359),
# [Megatron-Bridge](https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary-archive.md) (its release in brackets) and for
# [DGX Station](https://build.nvidia.com/station/nvfp4-pretraining):

# %% jupyter={"source_hidden": true}
gains = published_gains()
show(draw_gains(gains, title="More tokens a second per GPU by fewer bits in products, and in the gather where marked *"),
     alt="Bars in three groups. From bf16 to 8 bits: 4 to 50%, most for 70B on 128 H100, least for a scale a row on B200; a scale a tensor also gathers 8 bits. From "
     "bf16 to NVFP4: 68% at 8B. From MXFP8 to NVFP4: 23 to 56% in dense models, 3% in Nemotron 3 Super.")

# %% jupyter={"source_hidden": true}
for gain in (gain for gain in gains if gain.gpu):
    before, after = (compiled_fsdp(gain, kind) for kind in ("bf16", "fp8"))
    print(f"{gain.case:<41}: bf16 {gain.tokens_before:,.0f} tokens/s per GPU published, {before:,.0f} predicted; "
          f"FP8 {gain.share:+.0%} published, {after / before - 1:+.0%} predicted")

# %% [markdown]
# **Read it.** From bf16 to 8 bits these steps gain 4 to 50%: what is neither product nor gather is no faster, and casts cost time. NVFP4
# gains 23 to 56% over MXFP8 in dense models, and 3% in Nemotron 3 Super. The planner promises more of FP8 than was published, on
# torchao's power-limited B200 two thirds more of bf16, too.
#
# ## Break it, diagnose it
#
# **Delayed scaling** saves a kernel the reading of a tensor for its largest number: it takes *earlier* steps'. Here the
# inside of each SwiGLU grows 64 times at batch 4 (`down` shrinks: the same model), shrinks back at 8, and grows again at 10. Layers'
# inputs are rounded by this batch's own scale, the last batch's, or the largest of up to 1,024 before. Which batches suffer?

# %%
class Scaler:
    def __init__(self, steps):  # whose largest number counts: 0 for this batch's own, else of so many before it
        self.steps, self.seen, self.cut = steps, [], 0.0

    def __call__(self, x):
        largest = x.abs().max()
        used = torch.stack(self.seen[-self.steps:]).max() if self.steps and self.seen else largest
        scale = used.clamp(min=1e-30) / E4M3.largest
        self.seen.append(largest)
        self.cut = (x.abs() > used).float().mean().item()
        return fast(x / scale, E4M3) * scale


# %%
own, last, long = (spikes(lambda steps=steps: Scaler(steps), grows_at=4, back_at=8, again_at=10) for steps in (0, 1, 1024))
show(draw_spike(own, {"the last batch's scale": last, "the largest of 1,024": long}, {4: "64 times larger", 8: "back", 10: "again"}, title="Earlier batches' scales meet tensors that grow"),
     alt="Bars by batch. At 4 both scales cut over half of a layer's inputs, and the loss is too high. At 10 the last batch's cuts as much, and the loss is too low; the largest of 1,024 cuts nothing.")
for batch in (3, 4, 5, 8, 10):
    (right, _, _), (one, where, cut_by_one), (more, _, cut_by_more) = own[batch], last[batch], long[batch]
    print(f"batch {batch:>2}: loss {right:.4f} by its own scale; the last one's: {one - right:+.4f}, cuts {cut_by_one:.2%} of {where}; of 1,024: {more - right:+.4f}, cuts {cut_by_more:.2%}")
assert min(last[4][2], last[10][2], long[4][2]) > 0.1 > 10 * long[10][2], "a spike is cut, its return by the short memory alone"
assert last[4][1].endswith("down"), "inside the SwiGLU, where it was planted"

# %% [markdown]
# **Diagnose it.** Nothing becomes NaN: the clamp cuts what exceeds the old maximum. The loss does not tell: by the last batch's
# scale it is too high at batch 4 and too *low* at 10. The *share that is cut*, layer by layer, tells.
#
# The blue bars do as Transformer Engine's [`DelayedScaling`](https://nvidia.github.io/TransformerEngine/api/common.html): a first spike is
# cut, its return is not. SwiGLU's outliers broke such a run
# [after 200 billion tokens](https://arxiv.org/abs/2409.12517).

# %% [markdown]
# ## Recap
#
# | which number of a step? | bits | known from |
# |---|---|---|
# | factors of products | 8, E4M3; 4 with NVFP4's whole recipe | section 4; published losses |
# | what FSDP gathers | 8 | section 5 |
# | what a SwiGLU keeps | 8, the product made again | section 5 |
# | Adam's moments | 32; 16; 8 in blocks | DeepSeek-V3; [8-bit optimizers](https://arxiv.org/abs/2110.02861) |
# | sums of products | 32; fewer for a layer's output | section 3 |
# | master weights | 32; 16 rounded by chance | section 4 |
# | gradients of weights | 32 | DeepSeek-V3 |
# | embedding, norms, head, router, attention's products | 16 and more | DeepSeek-V3 |
#
# - One E4M3 scale bears an outlier of 10,000 among normal numbers; E2M1 is lost at 100.
# - From bf16 to 8 bits gave 4 to 50% more tokens a second in the pairs shown.
# - A scale too small cuts without a NaN: count what is cut.
#
# Do the [lab](../../labs/advanced/20_eight_bits.ipynb), in a copy: `make my-labs`. Then compare the
# [solution](../../solutions/advanced/20_eight_bits.ipynb).
#
# **References.** Those above; [FP8 formats](https://arxiv.org/abs/2209.05433).

# %% [markdown]
# ## On Monday
#
# **1. Choose by GPU.** Transformer Engine and torchao's last three, prototypes, were not run here. The former reaches layers like `te.Linear`, never `nn.Linear`.
#
# | GPU | start with | in Transformer Engine | in torchao | published gain, by default | torchao's FSDP gathers |
# |---|---|---|---|---|---|
# | H100, H200 | a scale a tensor | `Float8CurrentScaling(fp8_format=Format.E4M3)` | `Float8LinearConfig`, as in part 3 | 25 to 50% | 8 bits |
# | H100, outliers | a scale a row | none | `Float8LinearConfig.from_recipe_name("rowwise")` | 10% | 16 |
# | H100, rows err, too | blocks of 128 | `Float8BlockScaling()` | `Float8BlockwiseLinearConfig()` | none above | 16 |
# | B200, GB200, GB300 | blocks of 32 | `MXFP8BlockScaling()` | `MXFP8TrainingOpConfig()` | 13 and 16% | 16 |
# | the same, then | NVFP4; last layers in bf16 | `NVFP4BlockScaling()` | `NVFP4TrainingConfig()` | 3 to 56% over MXFP8 | 16 |
#
# One scale gained more on B200, 25%, but MXFP8 bears outliers.
#
# A100 has no FP8 products: stay in bf16. Avoid `DelayedScaling()` where tensors can grow.
#
# **2. Ask your tensors.** You have `model`, and a `batch` that gives a loss. How far off is each product, by who shares a scale?
#
# ```python
# import torch
# import torch.nn.functional as F
#
# SPARED = "lm_head", "router", "gate"  # a mixture's `gate` routes; a SwiGLU's is `gate_proj`, mostly: look at your names
# report = {}
#
# E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#
# def small(x, rows, columns, scale_as=lambda scale: scale, form=E4M3):  # a block of so many rows and columns shares a scale
#     parts = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
#     scale = scale_as(parts.abs().amax((1, 3), keepdim=True).clamp(min=1e-30) / torch.finfo(form).max)
#     return ((parts / scale).to(form).float() * scale).reshape(x.shape)
#
# def power_of_two(scale):  # torchao's rows, MXFP8's blocks
#     return scale.log2().ceil().exp2()
#
# def tell(key, a, b, default=E4M3, weight=True):  # a @ b.T, summed along rows; zeros that fill the last block change no sum
#     a, b = (F.pad(x, (0, -x.shape[1] % 128, 0, -x.shape[0] % 128)) for x in (a, b))
#     right = a @ b.T
#     if right.any():
#         pairs = [(small(a, *a.shape, form=default), small(b, *b.shape)),  # what torchao and Transformer Engine do unasked
#                  (small(a, *a.shape), small(b, *b.shape)),
#                  (small(a, 1, a.shape[1], power_of_two), small(b, 1, b.shape[1], power_of_two)),
#                  (small(a, 1, 128), small(b, 128 if weight else 1, 128)),
#                  (small(a, 1, 32, power_of_two), small(b, 1, 32, power_of_two))]
#         report[key] = [((x @ y.T - right).norm() / right.norm()).item() for x, y in pairs]
#
# def flat(x):
#     return x.detach().reshape(-1, x.shape[-1]).float()
#
# def watch(name):
#     def hook(module, inputs, output):
#         tell((name, "output"), flat(inputs[0]), flat(module.weight))
#         def later(g):
#             tell((name, "to input"), flat(g), flat(module.weight).T, E5M2)
#             tell((name, "to weight"), flat(g).T, flat(inputs[0]).T, E5M2, weight=False)
#         if output.requires_grad:
#             output.register_hook(later)
#     return hook
#
# linears = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n.split(".")[-1] not in SPARED]
# hooks = [m.register_forward_hook(watch(n)) for n, m in linears]
# model(**batch).loss.backward()
# model.zero_grad()
# for each in hooks:
#     each.remove()
# MOST = 1.5  # then 1.25 and 2: does the choice hang on it?
# KINDS = "one scale, g in E5M2", "one scale", "rows", "128", "MXFP8"
# needs = {key: next(i for i, each in enumerate(off) if each <= MOST * min(off[:4])) for key, off in report.items()}
# for key in sorted(report, key=lambda key: report[key][3] - report[key][1])[:10]:
#     told = ", ".join(f"{each:.1%} {kind}" for each, kind in zip(report[key], KINDS))
#     print(f"{key[0]:<40} {key[1]:<9} off by {told}; H100: {KINDS[needs[key]]}")
# print("H100, all products:", KINDS[max(needs.values())])
# ```
#
# **3. Convert, with torchao.** You have `model` in fp32, and `data`, whose batches have tokens in multiples of 16.
#
# ```python
# import torch
# from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
# from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
#
# sharded = torch.distributed.is_initialized()
# in_e4m3 = CastConfig(target_dtype=torch.float8_e4m3fn)  # gradients; unasked torchao takes E5M2
# config = Float8LinearConfig(cast_config_grad_output=in_e4m3, enable_fsdp_float8_all_gather=sharded)  # a scale a tensor; FSDP gathers 8 bits
# # a scale a row: Float8LinearConfig.from_recipe_name("rowwise"), which gathers 16 bits; leave out precompute_... below, and take
# # large = outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)
#
# SPARED = "lm_head", "router", "gate"  # the head and what chooses experts; rename where a SwiGLU's is `gate`
#
# def may_be_small(module, name):  # small products lose: these are torchao's bounds for H100
#     if not isinstance(module, torch.nn.Linear) or name.split(".")[-1] in SPARED:
#         return False
#     outputs, inputs = module.weight.shape
#     large = outputs > 1024 or inputs > 4096
#     return large and outputs % 16 == inputs % 16 == 0
#
# # Prototypes (0.18), in place of the next line: torchao.quantization.quantize_(model, Config(), filter_fn=may_be_small), Config from
# # torchao.prototype.blockwise_fp8_training.linear (no biases, sides in multiples of 128),
# # torchao.prototype.moe_training.config, or torchao.prototype.moe_training.nvfp4_training.nvfp4_training
# convert_to_float8_training(model, config=config, module_filter_fn=may_be_small)
# print(sum("Float8" in type(m).__name__ for m in model.modules()), "layers multiply in 8 bits")
# if not sharded:
#     model.compile()  # in place, so names in its state_dict stay; it fuses the casts
# # sharded: here checkpointing, block.compile() and fully_shard(block, mp_policy=policy) for each block, then for the model, with
# # policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
# for batch in data:
#     optimizer.zero_grad()
#     with torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16):
#         loss = model(**batch).loss
#     loss.backward()
#     optimizer.step()
#     if sharded:
#         precompute_float8_dynamic_scale_for_fsdp(model)  # after each step: one message for all scales
# whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
# weights = get_model_state_dict(model, options=whole)  # every rank calls it; rank 0 has it
# if not sharded or torch.distributed.get_rank() == 0:
#     torch.save(weights, "weights.pt")  # wide weights under their old names: a model not converted loads them
# ```
#
# Compare the smoothed loss with a bf16 twin's, over all tokens you can pay.
#
# **4. On B200**, Transformer Engine. You have `model`, its list of `blocks`, and `data`:
#
# ```python
# import torch
# import transformer_engine.pytorch as te
# from transformer_engine.common.recipe import MXFP8BlockScaling  # then NVFP4BlockScaling
#
# SPARED = "lm_head", "router", "gate"  # as above
# recipe, wide = MXFP8BlockScaling(), 0  # with NVFP4: 4; the last four blocks stay in bf16, as on the DGX Station above
#
# def exchange(module):  # `te.Linear` takes a recipe; sides in multiples of 32
#     for name, part in list(module.named_children()):
#         if name in SPARED:
#             continue
#         if isinstance(part, torch.nn.Linear) and not any(side % 32 for side in part.weight.shape):
#             outputs, inputs = part.weight.shape
#             like = {"bias": part.bias is not None, "params_dtype": part.weight.dtype, "device": part.weight.device}
#             new = te.Linear(inputs, outputs, **like)
#             new.load_state_dict(part.state_dict(), strict=False)  # it has an entry more, of scales
#             setattr(module, name, new)
#         else:
#             exchange(part)
#
# def in_16_bits(forward):
#     def run(*args, **kwargs):
#         with te.autocast(enabled=False):
#             return forward(*args, **kwargs)
#     return run
#
# for block in blocks:
#     exchange(block)
# for block in blocks[len(blocks) - wide:]:
#     block.forward = in_16_bits(block.forward)
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
# for batch in data:  # tokens a batch in multiples of 32
#     optimizer.zero_grad()
#     with torch.autocast("cuda", dtype=torch.bfloat16), te.autocast(enabled=True, recipe=recipe):
#         loss = model(**batch).loss
#     loss.backward()  # outside of both
#     optimizer.step()
# torch.save({name: t for name, t in model.state_dict().items() if "_extra_state" not in name}, "weights.pt")  # without scales
# ```
#
# **5. Count what is cut** of layers' inputs by scales of earlier steps, as `DelayedScaling()`'s. Put this before your loop, and read `worst` after it.
#
# ```python
# import torch
# from collections import defaultdict, deque
#
# seen = defaultdict(lambda: deque(maxlen=1024))  # largest numbers of a layer's inputs, step by step
# worst = {}  # by layer: the largest share of an input that the old scale would cut
#
# def count(name):
#     def hook(module, inputs):
#         x = inputs[0].detach().abs()
#         if seen[name]:
#             share = (x > torch.stack(list(seen[name])).max()).float().mean()
#             worst[name] = torch.maximum(worst.get(name, share), share)
#         seen[name].append(x.max())
#     return hook
#
# for name, part in model.named_modules():
#     if getattr(part, "weight", None) is not None and part.weight.dim() == 2 and not isinstance(part, torch.nn.Embedding):
#         part.register_forward_pre_hook(count(name))
# ```
