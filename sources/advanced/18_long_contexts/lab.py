# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 18: Long contexts
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 4 of 5 | 75 | lesson 18; any laptop (Windows: WSL2) |
#
# Four exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check` that says *not
# attempted*, *not yet* with a nudge, or *correct*. Hints are folded away. The exercises follow the
# [lesson](../../notebooks/advanced/18_long_contexts.ipynb). Work in a copy (`make my-labs`). Exercise 2 is the main
# one: it runs on four ranks, and is graded on equality and on the bytes that it sends.

# %% tags=["setup"]
here = setup("labs/advanced/18")

# %%
import torch
import torch.distributed as dist

from utils import check
from utils.lessons.lesson_18.workers import observed

# %% [markdown]
# ## Exercise 1: a ring for a window
#
# Mistral's first 7B lets a query see a **window**: itself and the $w - 1$ tokens before it. $n$ ranks hold a sequence *in order*,
# equal parts. Keys and values go around a ring, from each rank to the next, as far as anybody needs them and no further. All
# ranks make the same number of moves, with the whole part each time.
#
# **Spec.** `window_bytes(length, ranks, window, kv_heads, width)` returns the bytes that a rank sends in a layer's forward
# pass, keys and values in bf16. `ranks` divides `length`; the window is 1 or more, and may be longer than the sequence.

# %%
def window_bytes(length: int, ranks: int, window: int, kv_heads: int, width: int) -> int:
    # BEGIN SOLUTION
    own = length // ranks
    moves = min(ranks - 1, -(-(window - 1) // own))
    return moves * 2 * own * kv_heads * width * 2
    # END SOLUTION


check("18.window_bytes", window_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>The first query of a rank looks back furthest. How many tokens of other ranks does it
# see?</details>
# <details><summary>Hint 2</summary>One token of a neighbour is enough: its part must come. And after n - 1 moves everything has
# been everywhere.</details>

# %% [markdown]
# ## Exercise 2: the query travels, the keys stay
#
# When a model *writes*, its one new query sees a long cache of keys and values. Here the cache lies on four ranks, in
# parts of unequal length; one rank has none. A ring would send the cache. But the query is small.
#
# **Spec.** `cache_attention(q, k, v)` is called on every rank with the same `q` (B, A, 1, D) and its own `k` and `v`
# (B, A, T, D), where T differs between ranks and may be 0. It returns, on every rank, the query's attention to the
# keys of **all** ranks, (B, A, 1, D): softmax of $q k^T / \sqrt D$ over all keys, times the values. No mask, no gradients.
# Scores may be large: thousands.
#
# **Your score is the bytes that a rank of a ring sends**: an all-reduce sends $2 \cdot \frac{3}{4}$ of its tensor, an all-gather
# three times what a rank puts in.

# %%
def cache_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    # BEGIN SOLUTION
    scores = q @ k.mT * q.shape[-1] ** -0.5
    lowest = torch.full_like(q[..., :1], torch.finfo(q.dtype).min)
    top = torch.cat((lowest, scores), -1).amax(-1, keepdim=True)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    weights = (scores - top).exp()
    terms = torch.cat((weights @ v, weights.sum(-1, keepdim=True)), -1)
    dist.all_reduce(terms)
    return terms[..., :-1] / terms[..., -1:]
    # END SOLUTION


check("18.cache_attention", cache_attention)

# %% [markdown]
# <details><summary>Hint 1</summary>What does a rank know that the others need? A sum of exponentials, and a sum of exponentials
# times values. Both add up, if all ranks took the same number off their scores.</details>
# <details><summary>Hint 2</summary><code>dist.all_reduce(top, dist.ReduceOp.MAX)</code>. A rank without keys has no largest score:
# what may it put in, so that nothing changes?</details>
# <details><summary>Hint 3</summary>Two sums over the ranks may be one, of a tensor with one more column.</details>

# %% [markdown]
# ## Exercise 3: even work for packed documents
#
# A row packs several documents, one after the other, and a token sees its own document's only. Ranks share the row around a
# ring. The lesson's zigzag evens out work for *one* document.
#
# **Spec.** `packed_places(lengths, ranks, rank)` returns the places in the row, counted from 0 over all documents, that a rank
# holds: a list of whole numbers, or a tensor. `lengths` are the documents' tokens in order, each a multiple of `2 * ranks`.
#
# - Every token lies on one rank, and all ranks hold as many.
# - A token's work is the number of tokens of its document up to itself. No rank has more than 1.05 times the mean.

# %%
def packed_places(lengths: tuple[int, ...], ranks: int, rank: int) -> list[int]:
    # BEGIN SOLUTION
    own, first = [], 0
    for length in lengths:
        size = length // (2 * ranks)
        for piece in (rank, 2 * ranks - 1 - rank):
            own += range(first + piece * size, first + (piece + 1) * size)
        first += length
    return own
    # END SOLUTION


check("18.packed_places", packed_places)

# %% [markdown]
# <details><summary>Hint 1</summary>Where in a row does work fall from much to little?</details>
# <details><summary>Hint 2</summary>What holds for one document holds for each of them.</details>

# %% [markdown]
# ## Exercise 4: break it, diagnose it
#
# Four runs of one step, two blocks on four ranks, in fp64, each beside one process. In each, one thing may be wrong. Runs A, B and C share
# a sequence of 64 tokens around a ring, tokens in zigzag; in A the first 20 targets are a prompt, which nobody
# learns. Run D packs two documents, by heads; there the ranks' positions go on from 0 to 63, while the one process counts each document
# from 0.

# %%
reports = {run: observed(run) for run in "ABCD"}
for run, found in reports.items():
    print(f"run {run}: loss off by {found.loss:.0e}; losses of tokens, by pieces of eight:", *(f"{gap:.0e}" for gap in found.tokens))

# %%
print("gradients off by, run by run:")
for name in reports["A"].gradients:
    if "blocks.0" not in name:
        print(f"{name:<40}", *(f"{run} {found.gradients[name]:.0e}" for run, found in reports.items()))

# %% [markdown]
# For each run choose one of `"tokens laid out one way, the mask another"`, `"a mean of the ranks' means"`, `"none"`,
# `"gradients of keys and values end on another rank"` or `"positions restart at each rank"`. (`nan`: tokens that nobody learns.)

# %%
# BEGIN SOLUTION
run_a, run_b = "a mean of the ranks' means", "tokens laid out one way, the mask another"
run_c, run_d = "gradients of keys and values end on another rank", "none"
# END SOLUTION
# STUB: run_a = ...
# STUB: run_b = ...
# STUB: run_c = ...
# STUB: run_d = ...

check("18.diagnosis", {"A": run_a, "B": run_b, "C": run_c, "D": run_d})

# %% [markdown]
# <details><summary>Hint 1</summary>Go along the step: a token's loss, the loss, the head's gradient, the last block's, the first's. Where does
# each run part from one process?</details>
# <details><summary>Hint 2</summary>In run C the last block's queries have right gradients. Its keys have not.</details>
# <details><summary>Hint 3</summary>Not every distance is a fault: which numbers of run D were never computed in fp64?</details>
#
# Here is the [solution](../../solutions/advanced/18_long_contexts.ipynb) of this lab, with its outputs.
