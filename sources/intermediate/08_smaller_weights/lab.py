# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 08: Smaller weights
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 3 of 5 | 70 | lesson 08; any laptop |
#
# Four exercises. Each asks you to put code in place of the `...`, and ends in a `check` that says *not
# attempted*, *not yet* with a nudge, or *correct*. Hints are folded away: click one to open it. The
# exercises follow the [lesson](../../notebooks/intermediate/08_smaller_weights.ipynb). Work in a copy
# (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/intermediate/08")

# %%
import torch

from utils import check
from utils.labs.lab_08 import budget_bytes, choices
from utils.models.bytes_llama import calibration_tokens
from utils.techniques.rounding import Grid

# %% [markdown]
# ## Exercise 1: the columns that matter first
#
# The lesson's GPTQ goes from left to right. A column that is rounded early has many others that can make up for
# its error; the last has none. So round those first whose inputs are largest.
#
# **Spec.** `largest_first(weight, moments, bits)` returns the weight that is stored, (outputs, inputs), in the order
# in which it came. One grid a row: `Grid.of(weight, bits)`, chosen before anything moves. Columns are taken by the
# diagonal of `moments`, largest first. One input never came, so damp: add 0.01 of the diagonal's mean to the diagonal.
# Your score is the error of the output at 3 bits.

# %%
def largest_first(weight, moments, bits):
    # BEGIN SOLUTION
    order = moments.diagonal().argsort(descending=True)
    moving, stored = weight[:, order].clone(), torch.empty_like(weight)
    grid = Grid.of(weight, bits)
    damped = moments[order][:, order].double()
    damped += 0.01 * damped.diagonal().mean() * torch.eye(len(damped))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    for place, column in enumerate(order.tolist()):
        stored[:, column] = grid.weight(grid.codes(moving[:, place : place + 1])).squeeze(1)
        error = (moving[:, place] - stored[:, column]) / factor[place, place]
        moving[:, place + 1 :] -= torch.outer(error, factor[place, place + 1 :])
    return stored
    # END SOLUTION


check("08.largest_first", largest_first)

# %% [markdown]
# <details><summary>Hint 1</summary><code>order = moments.diagonal().argsort(descending=True)</code>; sort the
# columns of the weight, and both rows and columns of the moments.</details>
# <details><summary>Hint 2</summary>Write each finished column to its old place: <code>stored[:, order[place]]</code>.</details>

# %% [markdown]
# ## Exercise 2: spend bits where they count
#
# `choices()` tells for each of the 28 matrices what 2, 3, 4 or 8 bits take in bytes, and by how much the output
# is then off.

# %%
first = next(iter(choices()))
for bits, (stored_bytes, error) in choices()[first].items():
    print(f"{first} at {bits} bits: {stored_bytes:,.0f} bytes, error {error:.2%}")
print(f"budget for all matrices: {budget_bytes():,.0f} bytes")

# %% [markdown]
# **Spec.** `spend_bits(table, budget)` returns the bits of each matrix, `{path: bits}`, for all paths of the table. Their
# bytes add up to at most the budget. Your score is the perplexity of the whole model, packed so by GPTQ. It must be
# below that of the same bits everywhere.

# %%
def spend_bits(table, budget):
    # BEGIN SOLUTION
    steps = (2, 3, 4, 8)
    bits = dict.fromkeys(table, 2)
    spent = sum(row[2][0] for row in table.values())
    while True:
        offers = []
        for path, now in bits.items():
            for more in steps[steps.index(now) + 1 :]:
                price = table[path][more][0] - table[path][now][0]
                gain = table[path][now][1] ** 2 - table[path][more][1] ** 2
                if spent + price <= budget:
                    offers.append((gain / price, path, more, price))
        if not offers:
            return bits
        _, path, more, price = max(offers)
        bits[path], spent = more, spent + price
    # END SOLUTION


check("08.spend_bits", spend_bits)

# %% [markdown]
# <details><summary>Hint 1</summary>Begin with 2 bits everywhere. What is left of the budget?</details>
# <details><summary>Hint 2</summary>Buy, again and again, the step that takes off the most error for a byte.</details>

# %% [markdown]
# ## Exercise 3: break calibration
#
# GPTQ believes its calibration text. **Spec.** `wrong_text()` returns tokens, whole numbers from 0 to 255 in a tensor
# (sequences, 128), at most 64 sequences, with which GPTQ at 3 bits does *worse* on the held-out text than rounding
# to nearest, which looks at no text at all.

# %%
def wrong_text():
    # BEGIN SOLUTION
    return torch.full((32, 128), 32)  # blanks: nearly all of what the model knows is never asked for
    # END SOLUTION


check("08.wrong_text", wrong_text)

# %% [markdown]
# <details><summary>Hint 1</summary>With which text do most channels stay near zero?</details>
# <details><summary>Hint 2</summary>The fewer different inputs a layer sees, the freer GPTQ is to spoil it for all others.</details>

# %% [markdown]
# ## Exercise 4: how many readers
#
# **Spec.** `served_sequences(weight_bytes, layers, kv_heads, head_width, context_tokens, card_bytes)` returns how many
# sequences of that context a card serves at a time: the weights once, and for every sequence a 16-bit cache of keys and
# values. 0 where the weights alone do not fit.

# %%
def served_sequences(weight_bytes, layers, kv_heads, head_width, context_tokens, card_bytes):
    # BEGIN SOLUTION
    each = 2 * layers * kv_heads * head_width * 2 * context_tokens
    return max(0, int((card_bytes - weight_bytes) // each))
    # END SOLUTION


check("08.served_sequences", served_sequences)

# %% [markdown]
# <details><summary>Hint 1</summary>What does one sequence keep, over all layers?</details>
# <details><summary>Hint 2</summary>Round down, and never below 0.</details>
