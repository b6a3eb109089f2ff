# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 20: Eight bits, and four
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 3 of 5 | 70 | lesson 20; any laptop |
#
# Four exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check` that says *not
# attempted*, *not yet* with a nudge, or *correct*. Hints are folded away. The exercises follow the
# [lesson](../../notebooks/advanced/20_eight_bits.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/advanced/20")

# %%
import math

import torch

from utils import check
from utils.lessons.lesson_20.kernels import FAULTS, KERNELS

# %% [markdown]
# ## Exercise 1: two numbers a byte
#
# No computer addresses half a byte, so E2M1 lies in memory as pairs. A number's four bits are, from the highest: sign, two
# bits of exponent, one of mantissa. The eight codes without a sign are worth 0, 0.5, 1, 1.5, 2, 3, 4 and 6, in this order.
#
# **Spec.** `pack(values)` takes an even count of finite numbers and returns a list of bytes, as numbers from 0 to 255. The first of
# two numbers stands in the low four bits. Each goes to the nearest, and halfway to the code whose last bit is 0. What is too
# large becomes 6. A negative zero, or what rounds to it, keeps its sign.

# %%
def pack(values: list[float]) -> list[int]:
    # BEGIN SOLUTION
    worth = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = []
    for value in values:
        place = min(range(8), key=lambda p: (abs(min(abs(value), 6.0) - worth[p]), p % 2))
        codes.append(place + (8 if math.copysign(1, value) < 0 else 0))
    return [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
    # END SOLUTION


check("20.pack", pack)

# %% [markdown]
# <details><summary>Hint 1</summary>Sort the eight places by distance first, and by their last bit second.</details>
# <details><summary>Hint 2</summary>`math.copysign(1, value)` tells -0.0 from 0.0.</details>
#
# ## Exercise 2: a product of blocks
#
# The lesson scales numbers back before it multiplies. A kernel multiplies 8-bit *codes*, and scales only sums, as many as
# there are blocks: that is why a block lies along the sum.
#
# **Spec.** `product_of_blocks(a, a_scales, b, b_scales)` returns the product (M, N) of a (M, K) and the transposed b (N, K), as
# DeepSeek-V3 scales them. `a` and `b` hold codes (as fp32 numbers). `a_scales` is (M, K / 128): one for 128 codes of a row.
# `b_scales` is (N / 128, K / 128): one for each tile of 128 rows and 128 columns. A number is its code times its scale.

# %%
def product_of_blocks(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor) -> torch.Tensor:
    # BEGIN SOLUTION
    total = torch.zeros(len(a), len(b))
    for place in range(a.shape[1] // 128):
        part = slice(128 * place, 128 * (place + 1))
        sums = a[:, part] @ b[:, part].T
        total += sums * a_scales[:, place, None] * b_scales[:, place].repeat_interleave(128)
    return total
    # END SOLUTION


check("20.product_of_blocks", product_of_blocks)

# %% [markdown]
# <details><summary>Hint 1</summary>Go along K in steps of 128. In one step all scales of a row of `a` are one number.</details>
# <details><summary>Hint 2</summary>`repeat_interleave(128)` gives each row of `b` the scale of its tile.</details>
#
# ## Exercise 3: scales from the past
#
# Transformer Engine's delayed scaling remembers the largest numbers of some steps, and leaves a margin.
#
# **Spec.** `delayed_scales(largest, history, margin)` gets the largest absolute number of a tensor in each step, and returns the
# scale that each step divides by. It is the largest of the last `history` **finished** steps (as many as there are), times
# $2^{\text{margin}}$, over 448. Steps whose largest is infinite or NaN are forgotten. While nothing finite is remembered, a
# step uses its own largest; and where that is not finite, or the largest used is 0, the scale is 1.

# %%
def delayed_scales(largest: list[float], history: int, margin: int) -> list[float]:
    # BEGIN SOLUTION
    scales, seen = [], []
    for now in largest:
        finite = math.isfinite(now)
        used = max(seen[-history:]) if seen else (now if finite else 0.0)
        scales.append(used * 2.0**margin / 448 if used else 1.0)
        if finite:
            seen.append(now)
    return scales
    # END SOLUTION


check("20.delayed_scales", delayed_scales)

# %% [markdown]
# <details><summary>Hint 1</summary>Remember a step *after* its scale is written down, and only if it is finite.</details>
#
# ## Exercise 4: four kernels, not all sound
#
# `KERNELS` has four functions, `"A"` to `"D"`. Each takes x (rows, columns), both in multiples of 32, and gives it back as
# rounded to E4M3: blocks of 32 along a row, each with a power of two as scale, to the nearest. So they say. Each is sound, or has
# one of the `FAULTS`; some faults are in none. On random numbers each is a few percent off: feed them what tells faults apart.
#
# **Spec.** Put the name of a fault, one of `FAULTS`, for each.

# %%
for name, kernel in KERNELS.items():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    print(f"{name}: {(kernel(x) - x).norm() / x.norm():.1%} off")
print(*FAULTS, sep=", ")

# %%
# BEGIN SOLUTION
diagnosis = {"A": "blocks down the columns", "B": "scale rounded down", "C": "sound", "D": "cut toward zero"}
# END SOLUTION
# STUB: diagnosis = {"A": ..., "B": ..., "C": ..., "D": ...}

check("20.diagnosis", diagnosis)

# %% [markdown]
# <details><summary>Hint 1</summary>One number of a million in a tensor of ones: which others change, in its row or its column?</details>
# <details><summary>Hint 2</summary>Compare the mean of what comes back, and a block's largest number, with what went in.</details>
#
# Here is the [solution](../../solutions/advanced/20_eight_bits.ipynb) of this lab, with its outputs.
