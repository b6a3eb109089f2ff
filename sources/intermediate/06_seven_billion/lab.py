# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 06: Seven billion parameters on 24 GB
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 3 of 5 | 50 | lesson 06; any laptop |
#
# Five exercises. Put code or answers in place of the `...`; each `check` says *not attempted*,
# *not yet* with a nudge, or *correct*. Hints are folded away. The exercises follow the
# [lesson](../../notebooks/intermediate/06_seven_billion.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/intermediate/06")

# %%
import torch
import torch.nn.functional as F
from torch import nn

from utils import Transformer, TransformerConfig, check, format_bytes
from utils.techniques import add_lora, nf4_levels

# %% [markdown]
# ## Exercise 1: the states sheet of a LoRA run
#
# **Spec.** `lora_states(frozen_parameters, matrices, rank)` returns a dict of bytes with four entries:
# `"frozen weights"`, `"adapters"`, `"gradients"` and `"optimizer state"`. The frozen model is in bf16,
# the adapters and their gradients are fp32, the optimizer is AdamW. `matrices` lists the adapted
# matrices as `(inputs, outputs)`.

# %%
def lora_states(frozen_parameters: int, matrices: list[tuple[int, int]], rank: int) -> dict[str, int]:
    # BEGIN SOLUTION
    count = rank * sum(inputs + outputs for inputs, outputs in matrices)
    return {"frozen weights": 2 * frozen_parameters, "adapters": 4 * count,
            "gradients": 4 * count, "optimizer state": 8 * count}
    # END SOLUTION


check("06.lora_states", lora_states)

# %% [markdown]
# <details><summary>Hint 1</summary>An adapter of a matrix is two thin matrices: rank x inputs, and
# outputs x rank.</details>
# <details><summary>Hint 2</summary>A frozen weight has neither a gradient nor moments.</details>
# <details><summary>Hint 3</summary>Per adapter parameter: 4 bytes of weight, 4 of gradient, 8 of
# moments.</details>

# %% [markdown]
# ### Use it
#
# Llama-2-7B with rank 16 on all seven matrices of each of its 32 blocks. Until your function returns a
# dict, the cell prints nothing.

# %%
block = [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]
sheet = lora_states(6_738_415_616, 32 * block, 16)
if isinstance(sheet, dict):
    for name, size_bytes in sheet.items():
        print(f"{name:<16}{format_bytes(size_bytes):>12}   predicted")

# %% [markdown]
# ## Exercise 2: NF4 by hand
#
# **Spec.** `nf4_quantize(weight, levels)` returns `(codes, scales)`. Blocks of 64 neighbouring weights,
# read row by row, share a scale: the largest magnitude in the block. The code of a weight is the number
# (0 to 15) of the level nearest to weight / scale. `levels` are the sixteen values of NF4, rising.
# `codes` has one entry for each weight, `scales` one for each block. Unlike the lesson's weights, yours need
# not fill whole blocks: the last one holds what is left.

# %%
def nf4_quantize(weight: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # BEGIN SOLUTION
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scales = blocks.abs().amax(dim=1)
    distance = (blocks / scales[:, None])[..., None] - levels
    return distance.abs().argmin(dim=-1).flatten()[: weight.numel()], scales
    # END SOLUTION


check("06.nf4_quantize", nf4_quantize)

# %% [markdown]
# <details><summary>Hint 1</summary>Blocks are rows of 64. Fill the last one up with a value that changes no
# largest magnitude, and drop the codes of what you added.</details>
# <details><summary>Hint 2</summary>After division by the scale every weight lies in -1 .. 1, as the levels
# do.</details>
# <details><summary>Hint 3</summary>Subtract all sixteen levels from each weight (a new last dimension of
# 16), and take the <code>argmin</code> of the magnitude.</details>

# %% [markdown]
# ## Exercise 3: merge an adapter
#
# **Spec.** `merged_weight(weight, down, up, alpha)` returns the weight of one plain layer that computes
# what the frozen layer and its adapter compute together. `weight` is W (outputs, inputs), `down` is A
# (rank, inputs), `up` is B (outputs, rank). Do not change `weight` itself.

# %%
def merged_weight(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, alpha: float) -> torch.Tensor:
    # BEGIN SOLUTION
    rank = down.shape[0]
    return weight + alpha / rank * up @ down
    # END SOLUTION


check("06.merged_weight", merged_weight)

# %% [markdown]
# <details><summary>Hint 1</summary>The adapter adds (alpha / rank) B A x to W x.</details>
# <details><summary>Hint 2</summary>The rank is the number of rows of A.</details>

# %% [markdown]
# ## Exercise 4: fit it
#
# Another model than the lesson's: Llama-**3**-8B, whose vocabulary has 128,256 entries, within 24 GB, on a simulated
# card. Your texts are 1,024 tokens long or more. **Your score is the tokens per step**: sequence length times
# micro-batch. Get to 9,000 or beyond. `simulated_finetune` tries a choice and returns its measurement. It takes
# some seconds; look at what fills the card (`print(trial)`). The methods are
# `"LoRA"`, `"QLoRA"`, `"QLoRA + checkpointing"`, `"QLoRA + 8-bit AdamW"` and `"full fine-tune"`.

# %%
from utils.lessons.lesson_06.finetune import simulated_finetune
from utils.techniques.bitsandbytes_import import bitsandbytes_problem

has_packing = bitsandbytes_problem() is None
if not has_packing:
    print(f"{bitsandbytes_problem()}. Without it nothing is packed: try LoRA; 9,000 tokens need the library.")
trial = simulated_finetune("QLoRA" if has_packing else "LoRA", 1024, 2)
print(f"{trial.items:,} tokens a step: {trial.peak_bytes / 1e9:.1f} GB (simulated), the peak in {trial.peak_phase}")

# %%
# BEGIN SOLUTION
method = "QLoRA + checkpointing"
sequence_length = 1114  # ten texts of 1,024 need 24.4 GB
micro_batch = 9
# END SOLUTION
# STUB: method = ...
# STUB: sequence_length = ...
# STUB: micro_batch = ...

check("06.fit", {"method": method, "sequence length": sequence_length, "micro-batch": micro_batch})

# %% [markdown]
# <details><summary>Hint 1</summary>First find the method that leaves the most room for activations.</details>
# <details><summary>Hint 2</summary>Memory grows in a straight line with the tokens. Two trials give you the
# line.</details>
# <details><summary>Hint 3</summary>With checkpointing the logits and their gradient fill the card next (the meter
# calls them temporaries and activations): four times the vocabulary of Llama-2. What is left over, divided by the
# bytes per token, is your limit. A text need not be 1,024 tokens: other products of length and micro-batch fit
# closer.</details>

# %% [markdown]
# ## Exercise 5: break it, diagnose it
#
# This run raises no error, and its loss does not move by a single digit. Look at it first: which
# parameters have a gradient, and which does the optimizer hold?

# %%
def broken_finetune(model, tokens):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    add_lora(model, rank=4)
    losses = []
    for _ in range(20):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
torch.manual_seed(0)
tiny = TransformerConfig(vocabulary=32, hidden=32, layers=2, heads=2, feedforward=64)
network, tokens = Transformer(tiny), torch.randint(0, 32, (4, 17))
losses = broken_finetune(network, tokens)
print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}")
with_gradient = sum(parameter.grad is not None for parameter in network.parameters())
print(f"{with_gradient} tensors have a gradient, {sum(1 for _ in network.parameters())} tensors are there")

# %% [markdown]
# **Spec.** `cured_finetune` trains the adapters on the same tokens, leaves the frozen weights alone, and
# returns the losses as a list of Python numbers.

# %%
def cured_finetune(model, tokens):
    # BEGIN SOLUTION
    add_lora(model, rank=4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
    # END SOLUTION


check("06.cured_finetune", cured_finetune)

# %% [markdown]
# <details><summary>Hint 1</summary>An optimizer holds the tensors that it was given when it was
# made.</details>
# <details><summary>Hint 2</summary>Were the adapters there at that time?</details>
# <details><summary>Hint 3</summary>It skips a parameter without a gradient, and says nothing.</details>
#
# Here is the [solution](../../solutions/intermediate/06_seven_billion.ipynb) of this lab, with its
# outputs.
