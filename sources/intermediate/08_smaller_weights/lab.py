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
# | 4 of 5 | 70 | lesson 08; any laptop |
#
# Four exercises. Put code or answers in place of the `...`; each `check` says *not attempted*,
# *not yet* with a nudge, or *correct*. Hints are folded away. The exercises follow the
# [lesson](../../notebooks/intermediate/08_smaller_weights.ipynb). Work in a copy (`make my-labs`).
# Exercises 1 and 2 are graded: your score stands beside a par.

# %% tags=["setup"]
here = setup("labs/intermediate/08")

# %%
import torch

from utils import check
from utils.lessons.lesson_08.few_bits import budget_bytes, choices, layer, loss_with, recorded
from utils.lessons.lesson_08.gptq import inverse_factor
from utils.lessons.lesson_08.rounding import Grid

# %% [markdown]
# ## Exercise 1: one layer, as well as the library
#
# Here is a layer of the lesson's model, and the second moments of its inputs. A library, GPTQModel, has rounded it to
# 3 bits in groups of 32. Its errors were recorded, for three orders in which it can take the columns.

# %%
weight, moments = layer()
print(f"weight {tuple(weight.shape)}, moments {tuple(moments.shape)}; recorded with GPTQModel {recorded()['gptqmodel']}:")
for order in ("left to right", "groups by activation", "columns by activation"):
    print(f"  {order:<22} error of the output {float(recorded()[order]):.4f}")

# %% [markdown]
# **Spec.** `few_bits(weight, moments)` returns `codes, scales, zeros`. Codes are whole numbers from 0 to 7 in the shape
# of the weight. Each group of 32 neighbours in a row has a scale and a zero point, a whole number from 0 to 7 too:
# both have the shape (rows, groups). The stored weight is `scale * (code - zero)`. **Your score is the error of the
# output**, and it must reach the library's best, to 1%. Any way is right.
#
# `Grid.of(part, bits)` gives the lesson's grid of each row of `part`; it has `scales`, `zeros`, `codes(part)` and
# `weight(codes)`. `inverse_factor(moments, width)` is the lesson's $U$, with damping, for a layer of `width` inputs.

# %%
def few_bits(weight: torch.Tensor, moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # BEGIN SOLUTION
    width, bits, group = weight.shape[1], 3, 32
    grids = [Grid.of(weight[:, start : start + group], bits) for start in range(0, width, group)]
    order = moments.diagonal().argsort(descending=True)
    factor = inverse_factor(moments[order][:, order], width)
    moving, codes = weight[:, order].clone(), torch.empty_like(weight)
    for place, column in enumerate(order.tolist()):
        grid, here = grids[column // group], slice(place, place + 1)
        code = grid.codes(moving[:, here])
        codes[:, column] = code.squeeze(1)
        error = (moving[:, here] - grid.weight(code)) / factor[place, place]
        moving[:, place + 1 :] -= error * factor[here, place + 1 :]
    scales, zeros = (torch.cat([getattr(grid, part) for grid in grids], 1) for part in ("scales", "zeros"))
    return codes, scales, zeros
    # END SOLUTION


check("08.few_bits", few_bits)

# %% [markdown]
# <details><summary>Hint 1</summary>A column that is rounded early has many others to make up for its error; the last has
# none. Which should come first?</details>
# <details><summary>Hint 2</summary>By the diagonal of the moments, largest first. Sort the columns of the weight, and both
# rows and columns of the moments; write each result to its old place.</details>
# <details><summary>Hint 3</summary>Out of order, the columns of a group come at different times. Choose all grids before
# anything moves, from the weight as it came.</details>

# %% [markdown]
# ## Exercise 2: spend bits where they count
#
# For each of the 28 matrices, `choices()` says what 2, 3, 4 or 8 bits take in bytes, and by how much the matrix's output
# is then off. `loss_with({path: bits, ...})` measures the loss of the model on training text with these matrices rounded
# by GPTQ, and the others left, in a fraction of a second. The budget is 3 bits a weight, scales and zero points included.

# %%
first = next(iter(choices()))
for bits, (stored_bytes, error) in choices()[first].items():
    print(f"{first} at {bits} bits: {stored_bytes:,.0f} bytes, error {error:.2%}")
print(f"budget for all matrices: {budget_bytes():,.0f} bytes")
print(f"loss: {loss_with({}):.4f} as trained, {loss_with(dict.fromkeys(choices(), 2)):.4f} with 2 bits everywhere")

# %% [markdown]
# **Spec.** `spend_bits(table, budget)` gets such a table and returns `{path: bits}` for all its paths. Their bytes add up
# to at most the budget. **Your score is the perplexity** of the whole model on held-out text: fewer sequences than the
# lesson's, so do not compare the two. Par is what the solution reaches; you must come within 0.5% of it. The function
# may take some seconds.

# %%
def spend_bits(table: dict, budget: float) -> dict[str, int]:
    # BEGIN SOLUTION
    steps, plain = (2, 3, 4, 8), loss_with({})  # one matrix in 4 or 8 bits moves it by next to nothing
    harm = {path: {count: loss_with({path: count}) for count in (2, 3)} | {4: plain, 8: plain} for path in table}
    bits, spent = dict.fromkeys(table, 2), sum(row[2][0] for row in table.values())
    while True:
        offers = []
        for path, now in bits.items():
            for more in steps[steps.index(now) + 1 :]:
                price = table[path][more][0] - table[path][now][0]
                if spent + price <= budget:
                    offers.append(((harm[path][now] - harm[path][more]) / price, path, more, price))
        if not offers:
            return bits
        _, path, more, price = max(offers)
        bits[path], spent = more, spent + price
    # END SOLUTION


check("08.spend_bits", spend_bits, timeout_seconds=120)

# %% [markdown]
# <details><summary>Hint 1</summary>Begin with 2 bits everywhere. What is left of the budget?</details>
# <details><summary>Hint 2</summary>Buy, again and again, the step that takes off the most for a byte.</details>
# <details><summary>Hint 3</summary>The error of a matrix's own output is not its harm to the model.
# <code>loss_with({path: 2})</code> measures that, matrix by matrix.</details>

# %% [markdown]
# ## Exercise 3: break calibration, and diagnose it
#
# GPTQ believes its calibration text. **Spec.** `wrong_text()` returns tokens, whole numbers from 0 to 255 in a tensor (up to
# 64 sequences, 128), with which GPTQ at 2 bits does much *worse* on held-out Python than rounding to nearest, which looks
# at no text at all: at least 15% more perplexity. The lesson's hex dump is not bad enough.

# %%
def wrong_text() -> torch.Tensor:
    # BEGIN SOLUTION
    return torch.randint(ord("A"), ord("Z") + 1, (32, 128), generator=torch.Generator().manual_seed(0))
    # END SOLUTION


check("08.wrong_text", wrong_text)

# %% [markdown]
# A report of such a run shows the mean error of the layers on the calibration text.
#
# 1. With your text, would another text of the *same* kind show the damage? `"yes"` or `"no"`.
# 2. Which of these would: `"more of the same text"`, `"the layers' weights"` or `"text that the model will read"`?

# %%
# BEGIN SOLUTION
same_kind_shows_it = "no"
what_shows_it = "text that the model will read"
# END SOLUTION
# STUB: same_kind_shows_it = ...
# STUB: what_shows_it = ...

check("08.diagnosis", {"same kind shows it": same_kind_shows_it, "what shows it": what_shows_it})

# %% [markdown]
# <details><summary>Hint 1</summary>A text of few different bytes leaves most directions of the inputs empty, and GPTQ has
# no reason to move weights there. Worse is a text that fills many directions, and the wrong ones.</details>
# <details><summary>Hint 2</summary>Letters are bytes that the model knows. Which are rare in the standard library, and in
# which order would it never have them?</details>

# %% [markdown]
# ## Exercise 4: how many readers
#
# **Spec.** `admitted(card_bytes, weight_bytes, token_bytes, lengths, block)` returns how many of the waiting sequences a card
# takes in at a time. They come in the order of `lengths`, each with its final length in tokens, and none is passed over: the
# first that does not fit ends the count. Each takes whole blocks of `block` tokens, of `token_bytes` of cache each.

# %%
def admitted(card_bytes: int, weight_bytes: int, token_bytes: int, lengths: list[int], block: int) -> int:
    # BEGIN SOLUTION
    room = (card_bytes - weight_bytes) // (token_bytes * block)  # in whole blocks
    for count, length in enumerate(lengths):
        room -= -(-length // block)
        if room < 0:
            return count
    return len(lengths)
    # END SOLUTION


check("08.admitted", admitted)

# %% [markdown]
# <details><summary>Hint 1</summary>Count in blocks: how many does the card have beside the weights, and how many does a
# sequence take?</details>
# <details><summary>Hint 2</summary>Round a sequence's blocks up and the card's down.</details>
#
# Here is the [solution](../../solutions/intermediate/08_smaller_weights.ipynb) of this lab, with its
# outputs.
