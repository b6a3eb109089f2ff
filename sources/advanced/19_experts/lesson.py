# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 19 Experts
#
# {{badges}}
#
# **Promise.** At the end of this notebook you TODO: what you can do then, and could not before.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 45 for the lab | any laptop | in seconds on two CPU cores |
#
# Words of the course stand in the [glossary](../00_glossary.ipynb).

# %% [markdown]
# ## A bet
#
# TODO: one question that the lesson answers. Two layers of 1,024 x 1,024 fp32 numbers: how many MiB are their
# parameters? Write your guess in place of the 1.

# %%
my_bet_mib = 1

# %% tags=["setup"]
here = setup("advanced/19")

# %%
import torch
from torch import nn

from utils import check, draw_timeline, measure, show

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# ## 1. One step in one picture
#
# TODO: what will be seen, before the cell. (A lesson has 25 to 60 cells, its first picture within eight;
# CONTRIBUTING.md has all limits.)

# %%
model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).to(device)
optimizer = torch.optim.Adam(model.parameters())
inputs = torch.randn(64, 1024, device=device)


def step():
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


first = measure(step, model=model, optimizer=optimizer, name="two layers")
show(draw_timeline(first), alt="TODO: what the picture shows, for those who do not see it.")

# %% [markdown]
# **Read it.** TODO: what it means, after the cell.

# %%
print(f"{first.breakdown['parameters'] / 2**20:.0f} MiB of parameters; your bet was {my_bet_mib}")

# %% [markdown]
# ## 2. On paper
#
# TODO: the formula. A number in fp32 takes four bytes. How many MiB are Adam's two moments of both layers?

# %%
check("19.two_moments", ...)

# %% [markdown]
# ## Recap
#
# - TODO: what was measured, with its number.
#
# ### Where next
#
# Do the [lab](../../labs/advanced/19_experts.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/19_experts.ipynb).

# %% [markdown]
# ## On Monday
#
# TODO: what to write at work, in the reader's own names. Adam's two moments beside your parameters, in GiB:
#
# ```python
# states_gib = sum(2 * 4 * p.numel() for p in model.parameters()) / 2**30
# ```
