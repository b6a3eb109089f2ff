# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab NUMBER: TITLE
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 2 of 5 | 45 | lesson NUMBER; any laptop |
#
# One exercise. It asks you to put code in place of the `...`, and ends in a `check` that says *not attempted*,
# *not yet* with a nudge, or *correct*. It follows the [lesson](../../notebooks/TIER/FOLDER.ipynb). Work in a
# copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/TIER/NUMBER")

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


check("NUMBER.state_bytes", state_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>TODO: four tensors of the parameters' size, of four bytes a number.</details>
#
# Here is the [solution](../../solutions/TIER/FOLDER.ipynb) of this lab, with its outputs.
