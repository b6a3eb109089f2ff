# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which technique for my model?
#
# {{badges}}
#
# **Full fine-tuning, LoRA or QLoRA, on which card, with which cure, or on how many cards?** One picture for a model of 1B, one
# of 7B and one of 70B, and the questions that lead through it. For a model of your own ask [the page next door](00a_your_model.ipynb).
#
# | minutes | hardware | runs |
# |---|---|---|
# | 10 | any laptop | about two minutes on two CPU cores |

# %% tags=["setup"]
here = setup("00b")

# %% jupyter={"source_hidden": true}
from collections import Counter

import pandas as pd

from utils import show
from utils.lessons.lesson_00b.decision_figure import draw_decisions
from utils.lessons.lesson_00b.decisions import decide

# %% [markdown]
# ## 1. The map
#
# The step is always the same: one text of 2,048 tokens, AdamW, 16-bit autocast, adapters of rank 16 on all linear layers.
#
# - *fits*: as asked, with more to spare than simulations are off by.
# - *cure*: the change that makes room on this one card for the fewest predicted seconds; if no single one does, a pair. What goes
#   over PCIe in pages comes last, since its seconds are not predicted.
# - *cards*: the fewest that hold the model with every block recomputed and room to spare, by FSDP2 alone or with each matrix also
#   split over the eight cards of a node.
#
# A T4 has neither bfloat16 nor flash attention: it computes in fp16 and keeps attention's scores.

# %%
MODELS = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-70B")
CARDS, TOKENS = ("T4", "RTX 4090", "A100-80GB"), 2048
squares = decide(MODELS, ("full", "lora", "qlora"), CARDS, TOKENS)
show(draw_decisions(squares, f"One text of {TOKENS:,} tokens: what fits, with what"),
     alt="; ".join(f"{s.model.rpartition('/')[2]} {s.method} on {s.card}: {s.answer} {s.how}, {s.gib}" for s in squares))

# %% [markdown]
# **Read it.** A square's GiB are what one card holds: *simulated* on one card, *predicted* by the planner's formulas on several.
# Down the T4's column, 7B needs 24 cards when all its weights are trained, 4 by LoRA and 1 by QLoRA. Along its row, QLoRA needs
# recomputed blocks on 16 GB, a loss in chunks on 24, and nothing on 80. Two ways to need fewer cards are not on this map. Weights
# may wait in host memory: [two cards of 24 GB trained 70B by QLoRA so](https://kaitchup.substack.com/p/multi-gpus-fine-tuning-for-llama)
# (published, August 2024). And [07](intermediate/07_offload.ipynb) moves the optimizer's states there.
#
# ## 2. The same as a table
#
# *as asked* is the step without any cure on one card. Where weights alone are too much for every cure, nothing was simulated.
# Read what a cure costs beside time: weights and moments in bf16 lose small updates, as
# [03](beginner/03_when_numbers_break.ipynb) measures.

# %%
display(pd.DataFrame([square.row() for square in squares]).set_index(["model", "method", "card"])
        .style.set_caption("Simulated on one card, predicted on several"))
print("; ".join(f"{answer}: {count} squares" for answer, count in Counter(s.answer for s in squares).items()))

# %% [markdown]
# ## 3. The questions
#
# Ask them in this order, and stop at the first yes.
#
# | question | if yes | shown in |
# |---|---|---|
# | Do weights, gradients and moments, 16 bytes a parameter, leave room? | train all weights | [01 §3](beginner/01_where_memory_goes.ipynb#3.-The-states:-a-formula-without-surprises) |
# | Is what overflows activations? | recompute some blocks | [05 §2](intermediate/05_checkpointing.ipynb#2.-Which-blocks?) |
# | Is it the logits of a large vocabulary? | compute the loss in chunks | [01 §6](beginner/01_where_memory_goes.ipynb#6.-A-transformer:-the-last-layer-can-be-the-largest) |
# | Is it the states, and does their link have time? | put them on the host, or into 8 bits | [07 §3](intermediate/07_offload.ipynb#3.-When-does-the-link-cost-nothing?) |
# | May most weights stay as they are, 2 bytes each? | LoRA | [06 §2](intermediate/06_seven_billion.ipynb#2.-LoRA-by-hand) |
# | May they be rounded to half a byte? | QLoRA | [06 §5](intermediate/06_seven_billion.ipynb#5.-Seven-billion,-simulated) |
# | Are there several cards? | share the states: FSDP2 | [09 §4](intermediate/09_sharding.ipynb#4.-What-each-really-holds) |
# | Is one gathered block, or the embedding, too much for a card? | split each matrix, too | [12 §3](advanced/12_tensor_parallel.ipynb#3.-What-a-rank-keeps) |
# | Is it more than a node? | compose the axes | [14 §4](advanced/14_three_dimensions.ipynb#4.-Real-size:-the-memory-of-every-stage) |
#
# **Next.** [Your own model](00a_your_model.ipynb) answers for yours, with the script; [00](00_start_here.ipynb) lists the lessons, and
# the [glossary](00_glossary.ipynb) the words.
