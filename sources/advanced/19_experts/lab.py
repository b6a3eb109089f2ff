# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 19: Experts
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 4 of 5 | 80 | lesson 19; any laptop (Windows: WSL2) |
#
# Four exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check` that says *not
# attempted*, *not yet* with a nudge, or *correct*. Hints are folded away. The exercises follow the
# [lesson](../../notebooks/advanced/19_experts.ipynb). Work in a copy (`make my-labs`). Exercise 3 is the main
# one: it is graded on equality with one process, and on what it sends.

# %% tags=["setup"]
here = setup("labs/advanced/19")

# %%
import torch
import torch.distributed as dist

from utils import check
from utils.lessons.lesson_19.routing import observed
from utils.lessons.lesson_19.workers import expert, send, tell

# %% [markdown]
# ## Exercise 1: who is dropped
#
# Where an expert has room for some rows alone, those who come first get it in the plainest implementation, and tokens at a
# sequence's end are dropped more often. Give it to the rows that the router is surest of.
#
# **Spec.** `kept_rows(choice, probability, experts, capacity)` takes two tensors (T, k): the experts of each token, whole numbers
# from 0, and their probabilities. It returns a tensor of bool of that shape, True where a row stays. Each expert keeps at
# most `capacity` rows, first and second choices together, the most probable ones. Of equally probable rows the earlier
# token's stays. (No token chooses an expert twice.)

# %%
def kept_rows(choice: torch.Tensor, probability: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
    # BEGIN SOLUTION
    flat = choice.flatten()
    by_probability = probability.flatten().argsort(descending=True, stable=True)
    by = by_probability[flat[by_probability].argsort(stable=True)]  # by expert, then by probability
    counts = flat.bincount(minlength=experts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = torch.arange(len(flat)) - first  # in the expert's queue
    kept = torch.zeros(len(flat), dtype=torch.bool)
    kept[by] = place < capacity
    return kept.view_as(choice)
    # END SOLUTION


check("19.kept_rows", kept_rows)

# %% [markdown]
# <details><summary>Hint 1</summary>Two sorts that keep the order of equals (<code>stable=True</code>): first by probability, then by
# expert. What lies together then, and in which order?</details>
# <details><summary>Hint 2</summary>A row's place in its expert's queue is its place among all, less the rows of the experts
# before.</details>

# %% [markdown]
# ## Exercise 2: what the network carries
#
# Expert $e$ lies on rank $\lfloor e\,R / E \rfloor$ of $R$ ranks, and ranks lie on nodes in their order. An all-to-all sends a row for each
# chosen expert. DeepEP sends a token once to each *node* that has experts for it; the node passes it on inside.
#
# **Spec.** `network_rows(choice, experts, ranks, ranks_per_node, here, once_per_node)` returns how many rows leave the node
# for one rank's tokens, `choice` (T, k). `here` is the number of that rank's node.

# %%
def network_rows(choice: torch.Tensor, experts: int, ranks: int, ranks_per_node: int, here: int, once_per_node: bool) -> int:
    # BEGIN SOLUTION
    node = choice // (experts // ranks) // ranks_per_node
    if not once_per_node:
        return int((node != here).sum())
    asked = torch.zeros(len(choice), ranks // ranks_per_node, dtype=torch.bool).scatter(1, node, True)
    asked[:, here] = False
    return int(asked.sum())
    # END SOLUTION


check("19.network_rows", network_rows)

# %% [markdown]
# <details><summary>Hint 1</summary>From expert to rank to node: two whole-number divisions.</details>
# <details><summary>Hint 2</summary>For once a node: of each token, which <em>different</em> nodes, other than its own?</details>

# %% [markdown]
# ## Exercise 3: once to each rank
#
# The same idea, on four ranks that you have: 16 experts, 6 a token, so a token's experts often share a rank. Send its vector there
# **once**; that rank weights and adds up what its experts give, and sends **one** vector back.
#
# `send(rows, out, into)` is the lesson's exchange, with autograd; `tell(out)` returns `into`, the rows that each rank will send
# here; `expert(rows, w_in, w_out)` is one expert.
#
# **Spec.** `dispatch_once(x, choice, weight, w_in, w_out)` is called on every rank with its own tokens `x` (T, H), their experts
# `choice` (T, 6), numbers from 0 to 15, and `weight` (T, 6), and this rank's experts `w_in` (4, H, 2F) and `w_out` (4, F, H):
# rank r has experts 4r to 4r + 3. It returns (T, H). Gradients of `x`, `weight`, `w_in` and `w_out` must be
# those of one process: weights travel, too. **Your score is the numbers that four ranks put into exchanges, forward and backward.**

# %%
def dispatch_once(x, choice, weight, w_in, w_out):
    # BEGIN SOLUTION
    ranks, held = dist.get_world_size(), len(w_in)
    by_rank = x.new_zeros(len(x), ranks * held).scatter(1, choice, weight).view(len(x), ranks, held)
    chosen = torch.zeros(len(x), ranks * held, dtype=torch.bool).scatter(1, choice, True).view(len(x), ranks, held)
    target, token = chosen.any(-1).T.nonzero(as_tuple=True)  # in order of the rank that they go to
    out = target.bincount(minlength=ranks).tolist()
    into = tell(out)
    rows = send(torch.cat([x[token], by_rank[token, target]], 1), out, into)
    rows, weights = rows.split([x.shape[1], held], 1)
    total = torch.zeros_like(rows)
    for e in range(held):
        mine = weights[:, e].nonzero(as_tuple=True)[0]
        total = total.index_add(0, mine, weights[mine, e, None] * expert(rows[mine], w_in[e], w_out[e]))
    return torch.zeros_like(x).index_add(0, token, send(total, into, out))
    # END SOLUTION


check("19.dispatch_once", dispatch_once)

# %% [markdown]
# <details><summary>Hint 1</summary>Make a table of weights (T, 16), mostly zeros, by <code>scatter</code>: its gradient finds back to
# <code>weight</code>. Seen as (T, 4, 4) it says which rank needs which token.</details>
# <details><summary>Hint 2</summary>A row that travels: the token's vector, and beside it its four weights for that rank's experts. One
# <code>send</code> carries both.</details>
# <details><summary>Hint 3</summary>On arrival: for each of your experts the rows whose weight for it is not zero; <code>index_add</code> the
# weighted outputs. What goes back is one vector a row, and home again <code>index_add</code> by token.</details>

# %% [markdown]
# ## Exercise 4: break it, diagnose it
#
# Four runs of a router whose bias is steered as in the lesson, on four ranks whose tokens differ. (The router itself
# is not trained, which would hide what steering does.) One run is right. What they report: the busiest expert's rows over the
# mean, all ranks together, every 40 steps; the bias of expert 0 on each rank at the end; and how far the weights of experts'
# outputs move when 0.5 is added to *all* biases.

# %%
for run in "ABCD":
    found = observed(run)
    print(f"run {run}: load", *(f"{load:.2f}" for load in found.load), "  bias of expert 0 by rank",
          *(f"{bias:+.3f}" for bias in found.bias_of_expert_0), f"  weights move by {found.moved:.0%}")

# %% [markdown]
# For each run choose `"none"`, `"the bias is steered the wrong way"`, `"the bias is in the weights as well"` or `"each rank steers
# by its own load"`.

# %%
# BEGIN SOLUTION
run_a, run_b = "the bias is steered the wrong way", "each rank steers by its own load"
run_c, run_d = "the bias is in the weights as well", "none"
# END SOLUTION
# STUB: run_a = ...
# STUB: run_b = ...
# STUB: run_c = ...
# STUB: run_d = ...

check("19.diagnosis", {"run A": run_a, "run B": run_b, "run C": run_c, "run D": run_d})

# %% [markdown]
# <details><summary>Hint 1</summary>A bias is for the choice. If all biases rise alike, no choice changes, so nothing may.</details>
# <details><summary>Hint 2</summary>Which run's ranks no longer agree on the bias? With which load would each have to steer so that
# they do?</details>
#
# Here is the [solution](../../solutions/advanced/19_experts.ipynb) of this lab, with its outputs.
