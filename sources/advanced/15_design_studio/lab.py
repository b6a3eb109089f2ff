# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 15: The design studio
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 4 of 5 | 60 | lesson 15; any laptop |
#
# Five exercises, graded by the planner. Each ends in a `check` that says *not attempted*, *not yet*
# with a nudge, or *correct*. Hints are folded away. The exercises follow the
# [lesson](../../notebooks/advanced/15_design_studio.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/advanced/15")

# %%
from dataclasses import replace

from utils import Batch, Cluster, Plan, check, compare_plans, draw_stage_memory, estimate
from utils import model_shape, show
from utils.catalog import ModelShape, device, price

cluster = Cluster(gpu="A100-80GB", nodes=8)
model = model_shape("gpt-3-175b")
batch = Batch(sequences=1536, sequence_length=2048)

# %% [markdown]
# ## Exercise 1: the same machines with half the memory
#
# **Spec.** `my_plan` is a `Plan` for `hundred`, 100B, on 64 A100 of *40* GB, with the batch above. It trains all
# parameters, it must fit with headroom (with the gaps between blocks under 95% of the card), and its step may take at
# most 10% longer than the fastest plan that does, offload of the optimizer included. Use `estimate`, not `search`: the
# aim is to find it by reasoning. Your score is the step time.

# %%
hundred = ModelShape(name="100B", family="gpt", layers=56, hidden=12_288, heads=96, feedforward=49_152,
                     vocabulary=51_200, max_sequence=2048, positions="learned", tied=True)
small_cards = Cluster(gpu="A100-40GB", nodes=8)
print(compare_plans([estimate(hundred, small_cards, Plan(tp=8, pp=8, sequence_parallel=True), batch)]))

# %%
# BEGIN SOLUTION
my_plan = Plan(dp=2, tp=4, pp=8, zero_stage=1, sequence_parallel=True, offload="optimizer")
# END SOLUTION
# STUB: my_plan = ...

check("15.plan_small_cards", my_plan)

# %% [markdown]
# <details><summary>Hint 1</summary>The layout of the lesson fits, and fills the card. Recomputation makes room, and costs
# a third of the time. Which part of the states does a step touch only once?</details>
# <details><summary>Hint 2</summary>Print <code>compare_plans([estimate(hundred, small_cards, plan, batch)])</code> with
# <code>offload="optimizer"</code>.</details>
# <details><summary>Hint 3</summary>Spend the room that this leaves: cut each matrix in fewer pieces, in two
# replicas.</details>

# %% [markdown]
# ## Exercise 2: break it, diagnose it
#
# This plan was fine with a micro-batch of 1. With 2 it runs out of memory. Look at the figure, and use
# `estimate` to be exact.

# %%
too_large = estimate(model, cluster, Plan(tp=4, pp=16, sequence_parallel=True, micro_batch=2), batch)
show(draw_stage_memory(too_large), alt="Memory of 16 stages; the first ones cross the GPU's limit.")

# %% [markdown]
# 1. Which stage is the fullest? They count from 0.
# 2. Which category holds most there? Write its name as in the legend, in quotes.
# 3. How many GiB does that stage lack?

# %%
# BEGIN SOLUTION
stage = too_large.peak.stage.index
category = "activations"
missing_gib = too_large.missing_bytes / 2**30
# END SOLUTION
# STUB: stage = ...
# STUB: category = ...
# STUB: missing_gib = ...

check("15.explain_oom", {
    "fullest stage": stage, "largest category": category, "missing GiB": missing_gib,
})

# %% [markdown]
# <details><summary>Hint 1</summary>Stage i holds min(m, p - i) micro-batches.</details>
# <details><summary>Hint 2</summary>The states do not know the micro-batch.</details>
# <details><summary>Hint 3</summary><code>too_large.peak</code> is the fullest stage;
# <code>too_large.missing_bytes</code> is in bytes, and a GiB is 2**30 of them.</details>

# %% [markdown]
# ## Exercise 3: one change
#
# **Spec.** `broken` does not fit. `fixed` differs from it in *one field*, fits, and is within 1% of the
# fastest plan that one change can give. Write `replace(broken, field=value)`. Your score is the step
# time.

# %%
broken = Plan(tp=4, pp=16)
print(compare_plans([estimate(model, cluster, broken, batch)]))

# %%
# BEGIN SOLUTION
fixed = replace(broken, sequence_parallel=True)
# END SOLUTION
# STUB: fixed = ...

check("15.fix_by_one_change", fixed)

# %% [markdown]
# <details><summary>Hint 1</summary>Recomputation and offload both work. What do they cost?</details>
# <details><summary>Hint 2</summary>Tensor parallelism leaves norms, dropouts and the residual stream whole on
# every rank.</details>
# <details><summary>Hint 3</summary><code>explain(estimate(...))</code> lists every single change.</details>

# %% [markdown]
# ## Exercise 4: what a budget buys
#
# **Spec.** `token_budget(usd, usd_per_gpu_hour, peak_flops, mfu)` returns `(parameters, tokens)`: the model
# and the data that the money trains compute-optimally. Training takes 6 FLOP per parameter and token.
# Take 20 tokens per parameter: Chinchilla's own ratio, 70B parameters on 1.4T tokens
# ([Hoffmann and others 2022](https://arxiv.org/abs/2203.15556)).

# %%
def token_budget(usd: float, usd_per_gpu_hour: float, peak_flops: float, mfu: float):
    # BEGIN SOLUTION
    flop = usd / usd_per_gpu_hour * 3600 * peak_flops * mfu
    parameters = (flop / (6 * 20)) ** 0.5
    return parameters, 20 * parameters
    # END SOLUTION


check("15.token_budget", token_budget)

# %% [markdown]
# <details><summary>Hint 1</summary>Dollars over price are GPU hours. Hours, times 3600, times what a GPU
# really computes in a second, are FLOP.</details>
# <details><summary>Hint 2</summary>FLOP = 6 N D, and D = 20 N. Solve for N.</details>

# %% [markdown]
# ## Exercise 5: A100 or A10
#
# 13B parameters, 260B tokens, 30 days. One offer: A100 at 45% MFU. The other: cheaper A10 of 24 GB at
# 38% MFU, with plain data parallelism. **Spec.** `bill(...)` returns `(gpus, usd)`: how many cards meet
# the deadline, rounded up, and what 30 days of them cost. Then answer two questions:
#
# 1. Can an A10 hold a 13B model's states under plain data parallelism? `True` or `False`.
# 2. Which card do you take? `"A100"` or `"A10"`.

# %%
def bill(peak_flops: float, mfu: float, usd_per_gpu_hour: float, parameters: float, tokens: float,
         days: float):
    # BEGIN SOLUTION
    one_card = peak_flops * mfu * days * 86_400
    gpus = -int(-(6 * parameters * tokens) // one_card)
    return gpus, gpus * 24 * days * usd_per_gpu_hour
    # END SOLUTION


# %%
# BEGIN SOLUTION
a10_holds_the_states = False
my_choice = "A100"
# END SOLUTION
# STUB: a10_holds_the_states = ...
# STUB: my_choice = ...

check("15.two_cards", {
    "bill": bill, "an A10 holds the states": a10_holds_the_states, "choice": my_choice,
})

# %% [markdown]
# <details><summary>Hint 1</summary>The model needs 6 N D FLOP. A card gives peak x MFU x seconds.</details>
# <details><summary>Hint 2</summary>16 bytes per parameter, on every card.</details>
# <details><summary>Hint 3</summary>Call <code>bill</code> for both cards, as in the next cell.</details>

# %%
for card, mfu in (("A100-80GB", 0.45), ("A10", 0.38)):
    hourly = price(card, "Lambda").usd_per_gpu_hour
    answer = bill(device(card).bf16_tflops * 1e12, mfu, hourly, 13e9, 260e9, 30)
    print(f"{card} at ${hourly} an hour:", "{:,} cards, ${:,.0f}".format(*answer) if isinstance(answer, tuple) else "no pair yet")

# %% [markdown]
# Here is the [solution](../../solutions/advanced/15_design_studio.ipynb) of this lab, with its
# outputs.
