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
# | 2 of 5 | 45 | lesson 19; any laptop |
#
# One exercise. It asks you to put code in place of the `...`, and ends in a `check` that says *not attempted*,
# *not yet* with a nudge, or *correct*. It follows the [lesson](../../notebooks/advanced/19_experts.ipynb). Work in a
# copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/advanced/19")

# %%
from utils import check

# %% [markdown]
# ## Exercise 1: TODO
#
# **Spec.** `state_bytes(parameters)` returns the bytes of an fp32 model's parameters, gradients and Adam's two
# moments.

# %%
def state_bytes(parameters: int) -> int:
    # BEGIN SOLUTION
    return 16 * parameters
    # END SOLUTION


check("19.state_bytes", state_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>TODO: four tensors of the parameters' size, of four bytes a number.</details>
#
# Here is the [solution](../../solutions/advanced/19_experts.ipynb) of this lab, with its outputs.
