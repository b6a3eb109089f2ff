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
# A step takes one text of 2,048 tokens a card, or one for each group of cards that splits its matrices. Always AdamW, 16-bit
# autocast, adapters of rank 16 on all linear layers. A square leaves 11% of what it needs free, by which simulated peaks were off.
#
# - *fits*: as asked.
# - *cure*: the change that makes room on this one card for the fewest predicted seconds; if no single one does, a pair. Paged
#   moments come last, since the seconds that pages take over PCIe are not predicted. *Other numbers*: weights or moments
#   have fewer bits, so training is no longer quite the same.
# - *cards*: the fewest, in whole nodes of eight above eight, with every block recomputed: by FSDP2 alone, or with each matrix also
#   split over 2, 4 or 8 cards of a node.
#
# A T4 has no bfloat16 and computes in fp16. It keeps attention's scores, too: it has no flash attention, and PyTorch's other
# kernel without scores takes no grouped heads, which transformers hands it.

# %%
METHODS, CARDS, TOKENS = ("full", "lora", "qlora"), ("T4", "RTX 4090", "A100-80GB"), 2048
of_1b = decide(["meta-llama/Llama-3.2-1B"], METHODS, CARDS, TOKENS)

# %%
of_7b = decide(["Qwen/Qwen2.5-7B"], METHODS, CARDS, TOKENS)

# %%
squares = of_1b + of_7b + decide(["meta-llama/Llama-3.1-70B"], METHODS, CARDS, TOKENS)
show(draw_decisions(squares, f"A text of {TOKENS:,} tokens a card: what fits, with what"),
     alt="; ".join(f"{s.model.rpartition('/')[2]} {s.method} on {s.card}: {s.answer} {s.how}, {s.gib}" for s in squares))

# %% [markdown]
# **Read it.** A square's GiB are what one card holds: *simulated* on one card, *predicted* by the planner's formulas on several.
# [05a](intermediate/05a_trusting_simulation.ipynb) says how far to trust them. Down the T4's column, 7B needs 16 cards when all its
# weights are trained, 2 by LoRA and 1 by QLoRA. QLoRA of 7B needs recomputed blocks on 16 GB, a loss in chunks on 24, and nothing
# on 80. Red squares speak of memory alone. Before you rent, see that your library runs it: 4-bit weights under FSDP
# [are known to](https://www.answer.ai/posts/2024-03-06-fsdp-qlora.html), with weights on the host even 70B on two cards of 24 GB
# (published). The host was not tried in red squares.
#
# ## 2. The same as a table
#
# *as asked* is the step without any cure on one card. Where weights alone are too much for every cure, nothing was simulated.
# Seconds are the planner's, over each card's own link in a node and 25 GB/s a card between nodes; of one T4 it has none.
# Read what a cure costs beside time: weights and moments in bf16 lose small updates, as
# [03](beginner/03_when_numbers_break.ipynb) measures.

# %%
display(pd.DataFrame([square.row() for square in squares]).set_index(["model", "method", "card"])
        .style.set_caption("Simulated on one card, predicted on several"))
print("; ".join(f"{answer}: {count} squares" for answer, count in Counter(s.answer for s in squares).items()))

# %% [markdown]
# ## 3. The questions
#
# Take the best method that you can afford: all weights, else LoRA, else QLoRA. For it go down the list, and stop when the step
# fits. If nothing makes it fit, go on with the next method, or with several cards.
#
# | what does not fit | try | shown in |
# |---|---|---|
# | activations | recompute some blocks | [05 §2](intermediate/05_checkpointing.ipynb#2.-Which-blocks?) |
# | logits of a large vocabulary | compute the loss in chunks | [01 §6](beginner/01_where_memory_goes.ipynb#6.-A-transformer:-the-last-layer-can-be-the-largest) |
# | gradients and moments | fewer bits, or the host, if its link has time | [07 §3](intermediate/07_offload.ipynb#3.-When-does-the-link-cost-nothing?) |
# | 16 bytes a parameter | weights and moments in 16 bits, at a price | [03 §3](beginner/03_when_numbers_break.ipynb#3.-A-run,-and-its-flight-recorder) |
#
# | the next method | what it needs | shown in |
# |---|---|---|
# | all weights | 16 bytes a parameter | [01 §3](beginner/01_where_memory_goes.ipynb#3.-The-states:-a-formula-without-surprises) |
# | LoRA | 2 bytes, and most weights stay as they are | [06 §2](intermediate/06_seven_billion.ipynb#2.-LoRA-by-hand) |
# | QLoRA | half a byte, and weights are rounded | [06 §5](intermediate/06_seven_billion.ipynb#5.-Seven-billion,-simulated) |
#
# | several cards | do | shown in |
# |---|---|---|
# | states do not fit one | share them: FSDP2 | [09 §4](intermediate/09_sharding.ipynb#4.-What-each-really-holds) |
# | one gathered block, or the embedding, does not | split each matrix, too | [12 §3](advanced/12_tensor_parallel.ipynb#3.-What-a-rank-keeps) |
# | more than a node | compose the axes | [14 §4](advanced/14_three_dimensions.ipynb#4.-Real-size:-the-memory-of-every-stage) |
#
# **Next.** [Your own model](00a_your_model.ipynb) answers for yours, with the script; [00](00_start_here.ipynb) lists the lessons, and
# the [glossary](00_glossary.ipynb) the words.
