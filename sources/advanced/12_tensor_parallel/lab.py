# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 12: Tensor and sequence parallelism
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 4 of 5 | 70 | lesson 12; any laptop (Windows: WSL2) |
#
# Four exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check` that says *not
# attempted*, *not yet* with a nudge, or *correct*. Hints are folded away. The exercises follow the
# [lesson](../../notebooks/advanced/12_tensor_parallel.ipynb). Work in a copy (`make my-labs`). Exercise 2 is the main
# one: it is graded on equality, on the bytes that it sends, and on the bytes that it keeps.

# %% tags=["setup"]
here = setup("labs/advanced/12")

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F

from utils import check
from utils.lessons.lesson_12.workers import observed

# %% [markdown]
# ## Exercise 1: what a rank keeps of a Llama block
#
# The lesson counted a GPT block. A Llama block has RMSNorm, $A$ query heads and $K$ key-value heads of width
# $D = h / A$, a gated feed-forward of width $f$, and flash attention; no dropout. On **one GPU**, in 16 bits, it keeps:
#
# | what | bytes |
# |---|---|
# | the inputs of both norms | $4\,s b h$ |
# | what the norms give: the inputs of `query`, `key`, `value` and of `gate`, `up` | $4\,s b h$ |
# | queries, and attention's result | $4\,s b h$ |
# | keys and values | $4\,s b K D$ |
# | a number in fp32 for each query head and token (flash attention's softmax) | $4\,s b A$ |
# | gate, up, and their product (SiLU is fused: its result is computed again in backward) | $6\,s b f$ |
#
# **Spec.** `kept_bytes(s, b, h, heads, kv_heads, f, ranks, split)` returns the bytes on one of `ranks` ranks. `split` is
# `"no"` (the sequence is not split between pairs of matrices), `"parts"` (it is, and inputs of column-parallel matrices
# are kept as parts and gathered again) or `"gathered"` (it is, and these inputs are kept gathered, as DTensor does). There
# may be more ranks than key-value heads; then each rank still keeps one whole head, a copy (lesson, section 2).

# %%
def kept_bytes(s: int, b: int, h: int, heads: int, kv_heads: int, f: int, ranks: int, split: str) -> float:
    # BEGIN SOLUTION
    between = 1 if split == "no" else ranks
    norm_inputs = 4 * h / between
    matrix_inputs = 4 * h / (ranks if split == "parts" else 1)
    own_kv_heads = max(1, kv_heads / ranks)
    keys_values = 4 * own_kv_heads * (h // heads)
    inside = (4 * h + 4 * heads + 6 * f) / ranks
    return s * b * (norm_inputs + matrix_inputs + keys_values + inside)
    # END SOLUTION


check("12.kept_bytes", kept_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>Three kinds of rows: between pairs of matrices, inside pairs, and inputs of
# column matrices, which are the edge between the two.</details>
# <details><summary>Hint 2</summary>A rank has a whole key-value head, or several. With 8 heads on 16 ranks it has
# one, not half of one.</details>

# %% [markdown]
# ## Exercise 2: a row-parallel layer with the sequence split
#
# This is the other side of the lesson's `GatherIn`. Four ranks hold $x$ and $W$ cut along the *inputs*; each product
# $x_r W_r^T$ is a term of a sum. Each rank wants a part of the *sequence* of that sum.
#
# **Spec.** `row_parallel(x, weight, bias)` is called on every rank with its own `x` (S, B, I / ranks) and `weight`
# (O, I / ranks), and the same `bias` (O,). It returns this rank's part, (S / ranks, B, O): rank 0 the first
# positions, rank 1 the next. It must work with autograd:
#
# - Output, and the gradients of `x` and `weight`, are this rank's parts of those of one process.
# - The gradient of `bias` is the **whole** one, on every rank.
# - Backward keeps `x` and the parameters, and nothing else.
#
# **Your score is the bytes that a rank of a ring sends**, forward and backward, beside the bytes it keeps. All
# sizes divide evenly.

# %%
# BEGIN SOLUTION
class RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        term = F.linear(x, weight)
        part = torch.empty_like(term.chunk(dist.get_world_size())[0])
        dist.reduce_scatter_tensor(part, term)
        return part + bias

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        whole = gradient.new_empty(len(x), *gradient.shape[1:])
        dist.all_gather_into_tensor(whole, gradient.contiguous())
        return whole @ weight, whole.flatten(0, 1).T @ x.flatten(0, 1), whole.sum((0, 1))
# END SOLUTION
def row_parallel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    # BEGIN SOLUTION
    return RowParallel.apply(x, weight, bias)
    # END SOLUTION


check("12.row_parallel", row_parallel)

# %% [markdown]
# <details><summary>Hint 1</summary>Write a <code>torch.autograd.Function</code>. Forward: the product, a reduce-scatter along
# the first dimension (<code>dist.reduce_scatter_tensor(part, term)</code>), and the bias <em>after</em> the sum.</details>
# <details><summary>Hint 2</summary>Backward gets the gradient of this rank's positions. Each of the three gradients needs all
# positions: <code>dist.all_gather_into_tensor(whole, part)</code>, of a contiguous part.</details>
# <details><summary>Hint 3</summary>Once the whole gradient is there, the bias needs no collective of its own.</details>

# %% [markdown]
# ## Exercise 3: who drops what
#
# Say a model has two dropouts: one on attention's **scores**, which belong to heads, one on the **stream**. Each rank
# seeds a generator before each. If two ranks share a seed, they draw one mask.
#
# **Spec.** `dropout_seed(where, step, tp_rank, dp_rank, sequence)` returns a whole number from 0 to $2^{63}-1$. `where` is
# `"scores"` or `"stream"`. `tp_rank` is the rank's place among those that share matrices; ranks with another `dp_rank`
# read other rows. `sequence` says whether the stream is split along the sequence. Up to 40 steps, 8 x 8 ranks
# (leave room).
#
# - Ranks that hold **the same elements** of a tensor draw the same mask for it.
# - No other two masks are drawn from the same seed: not of other ranks, places or steps.
# - The same arguments give the same seed: backward may run forward again.

# %%
def dropout_seed(where: str, step: int, tp_rank: int, dp_rank: int, sequence: bool) -> int:
    # BEGIN SOLUTION
    same_on_all = where == "stream" and not sequence
    place = 0 if same_on_all else 1 + tp_rank
    kind = ("scores", "stream").index(where)
    return ((step * 10_000 + dp_rank) * 10_000 + place) * 2 + kind
    # END SOLUTION


check("12.dropout_seed", dropout_seed)

# %% [markdown]
# <details><summary>Hint 1</summary>In one of the four cases of <code>where</code> and <code>sequence</code>, all ranks of a
# tensor-parallel group hold the same elements.</details>
# <details><summary>Hint 2</summary><code>step + tp_rank</code> gives step 1 on rank 0 and step 0 on rank 1 the same number.
# How can one number hold several, so that none is lost?</details>

# %% [markdown]
# ## Exercise 4: break it, diagnose it
#
# Three runs of two GPT blocks on four ranks, split by heads and channels, the stream whole on every rank. In each, one
# thing may be wrong. No loss tells: run A's first loss is right, B and C train. Here is what the ranks report.
#
# Run A has no dropout. For each parameter, in the order of forward: how far rank 0's gradient is from that of one
# process, as a share of the norm of all gradients. (The biases of the keys are left out. Such a bias moves all scores of
# a query alike, which softmax does not see: its gradient is zero, right or wrong.)

# %%
reports = {run: observed(run) for run in ("A", "B", "C")}
for name, error in reports["A"][0].gradient_errors.items():
    if not name.endswith("key.bias"):
        print(f"{name:<36} {error:.0e}")

# %%
for run, ranks in reports.items():
    print(f"run {run}: sum of squares of the stream at the end, by rank:", *(f"{rank.stream:.6f}" for rank in ranks))
for run in ("B", "C"):
    masks = [mask for rank in reports[run] for mask in rank.masks]
    print(f"run {run}: {len(masks)} heads drew {len(set(masks))} different masks for their scores")

# %% [markdown]
# For each run choose one of `"a sum missing in backward"`, `"dropout of scores alike on all ranks"`,
# `"dropout of the stream differs between ranks"` or `"none"`. For run A say also where: `"attention of block 0"`,
# `"feed-forward of block 0"`, `"attention of block 1"` or `"feed-forward of block 1"`.

# %%
# BEGIN SOLUTION
run_a, where_in_a = "a sum missing in backward", "attention of block 1"
run_b, run_c = "dropout of the stream differs between ranks", "dropout of scores alike on all ranks"
# END SOLUTION
# STUB: run_a = ...
# STUB: where_in_a = ...
# STUB: run_b = ...
# STUB: run_c = ...

check("12.diagnosis", {"run A": run_a, "where in run A": where_in_a, "run B": run_b, "run C": run_c})

# %% [markdown]
# <details><summary>Hint 1</summary>Backward goes from the end of the list to its beginning. Where do gradients stop being
# right?</details>
# <details><summary>Hint 2</summary>A sum is missing where the gradient <em>leaves</em> a part. The part's own matrices get theirs
# before that.</details>
# <details><summary>Hint 3</summary>Without a split sequence every rank holds the same stream. In which run is that no longer true?</details>
#
# Here is the [solution](../../solutions/advanced/12_tensor_parallel.ipynb) of this lab, with its
# outputs.
