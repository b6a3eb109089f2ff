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
# **Full fine-tuning, LoRA or QLoRA: which fits my card, and what do I change or add where it does not?**
#
# For one text of 2,048 tokens (simulated on one card, predicted on several):
#
# - **1B**: LoRA and QLoRA fit a T4, an RTX 4090 and an A100-80GB as asked; all weights only the A100.
# - **7B**: QLoRA fits all three, changed on the smaller two; LoRA takes two T4s. All weights need the host, fewer bits or more cards.
# - **70B**: without the host only QLoRA on an A100 fits one card, changed.
#
# The [glossary](00_glossary.ipynb) has the words.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 10 | any laptop | about two minutes on two CPU cores |

# %% tags=["setup"]
here = setup("00b")

# %% jupyter={"source_hidden": true}
import pandas as pd

from utils import show
from utils.fitting import Recipe, model_config
from utils.lessons.lesson_00b.decision_figure import draw_decisions
from utils.lessons.lesson_00b.decisions import decide
from utils.lessons.lesson_00b.repeated_heads import kept_scores
from utils.lessons.lesson_00b.several_cards import parts_of_a_card, slower_links

# %% [markdown]
# ## 1. The map
#
# Each square is one model, one method and one card. It names the first of these four that fits and leaves 12% of its need free:
#
# 1. **The step as asked.**
# 2. **Changes that keep the numbers of training**, up to rounding. The loss is computed in chunks, or all blocks are recomputed
#    (*checkpointing of all blocks*), or weights and states wait on the host (FSDP2). One change comes before two, then the quicker
#    by predicted seconds. AdamW in pages comes last.
# 3. **Changes to other numbers**: 8-bit moments, or weights and moments in bf16.
# 4. **The fewest cards, without the host**, all blocks recomputed. *FSDP2 over 8* shares weights and states among eight. *Tensor
#    parallel 2* splits each matrix over two cards of one node. Above eight, whole nodes of eight are taken.
#
# Each card reads one text a step; cards that split matrices share one (sequence parallel). Steps have fused AdamW and 16-bit
# autocast; adapters have rank 16 on all linear layers. *Simulated* bytes come from a step on tensors without
# data, *predicted* ones from formulas. Look first for blue squares.

# %%
METHODS, CARDS, TOKENS = ("full", "lora", "qlora"), ("T4", "RTX 4090", "A100-80GB"), 2048
of_1b = decide(["meta-llama/Llama-3.2-1B"], METHODS, CARDS, TOKENS)

# %%
of_7b = decide(["Qwen/Qwen2.5-7B"], METHODS, CARDS, TOKENS)

# %%
squares = of_1b + of_7b + decide(["meta-llama/Llama-3.1-70B"], METHODS, CARDS, TOKENS)
show(
    draw_decisions(
        squares, f"One text of {TOKENS:,} tokens for each card, or tensor-parallel group: what fits"
    ),
    alt="; ".join(
        f"{s.model.rpartition('/')[2]} {s.method} on {s.card}: {s.answer}, "
        f"{s.row()['change'] or 'as asked'}, {s.gib}"
        for s in squares
    ),
)

# %% [markdown]
# **Read it.** An arrow leads from the bytes of the step as asked to those with the change.
#
# **Not tried**: several cards with the host or fewer bits, where fewer may do; one card that 16-bit weights (4-bit for QLoRA) with
# the 12% exceed; FSDP2's host in a T4's fp16. The host's memory is not limited.
#
# **Card-seconds** are the seconds of a step times its cards, for 1,000 tokens. Compare them within a column, and only between
# steps of as many texts. Most measured steps of one card took 0.7 to 1.8 of the predicted seconds (`utils.planner`): small differences say nothing. QLoRA's are probably too low: for 7B on an A100 they are LoRA's, while Qwen
# [published](https://github.com/QwenLM/Qwen) a third more for GPTQ's four bits. T4s have none, so their changes come in the order of
# section 5. 56 RTX 4090s have none, for want of a published link.
#
# **How sure are the bytes?** The 12% were chosen so that nine in ten of the published LoRA peaks in [00a](00a_your_model.ipynb) lie
# within it. None of these trains all weights. For several cards, 80% of a published sweep of such training lies between 0.93 and 1.13
# of the prediction (`utils.planner`). So where a bar ends at its line, have more cards within reach.
#
# **A T4** computes in fp16, which needs a loss scaler; Qwen2-7B [was reported](https://github.com/QwenLM/Qwen3/issues/670) to give NaN
# in it. transformers also passes fewer heads of keys than of queries. [On a T4](https://github.com/huggingface/transformers/issues/48633)
# that leaves only a kernel that keeps all attention scores. The T4's column assumes one line against it:

# %%
print(kept_scores("meta-llama/Llama-3.2-1B", "lora", "T4", TOKENS))
print(next(f"with the line: {s.asked_gib}" for s in of_1b if (s.method, s.card) == ("lora", "T4")))
# The line, before training:
# transformers.integrations.sdpa_attention.use_gqa_in_sdpa = lambda *_: False

# %% [markdown]
# ## 2. The second answer: other numbers, or more cards
#
# Four squares have one, in the last column: a change to other numbers, else cards in place of the host.

# %%
display(
    pd.DataFrame([square.row() for square in squares if square.instead])
    .set_index(["model", "method", "card"])
    .style.set_caption(
        "Bytes simulated on one card, predicted on several; card-seconds of 1,000 tokens predicted"
    )
)

# %% [markdown]
# **Read it.** At one text a step, all weights of 7B take 4.2 card-seconds on an A100 and its host, and 0.3 with weights and moments in
# bf16. These lose small updates ([03](beginner/03_when_numbers_break.ipynb)). Several A100s were not tried. Do not compare 4.6 and 1.8
# on RTX 4090s: one step updates after one text, the other after eight.
#
# ## 3. Why all weights of 70B take 16 A100s
#
# On cards alone two things decide: a card's share of the states, and *all else*, mostly gathered weights. Find the first row that fits.

# %%
seventy, full = model_config("meta-llama/Llama-3.1-70B"), Recipe(method="full", tokens=TOKENS)
display(
    pd.DataFrame(parts_of_a_card(seventy, full, "A100-80GB", (8, 16)))
    .set_index(["cards", "tensor parallel"])
    .style.set_caption("A card of several, predicted; an A100-80GB has 78.65 GiB")
)

# %% [markdown]
# On eight cards the states alone are too much. On 16 all else is small enough from a split over four on. The seconds hang on the link
# between the two nodes:

# %%
display(
    pd.DataFrame(slower_links(seventy, full, "A100-80GB", (1, 1 / 2, 1 / 4)))
    .set_index("GB/s between nodes, a card")
    .style.set_caption(
        "The fewest cards over the published link, half of it and a quarter (predicted)"
    )
)

# %% [markdown]
# Half the link takes nearly twice the seconds. The first link is 1,600 Gb/s a node, as
# [MosaicML](https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking) published it of A100s. A quarter is what AWS
# [sells with 40 GB ones](https://aws.amazon.com/blogs/compute/amazon-ec2-p4d-instances-deep-dive/): ask before you rent.
#
# **Four bits on several cards.** We know of no library that trains the squares with a †, which split matrices of four bits. bitsandbytes'
# four-bit weights train under FSDP1, with `bnb_4bit_quant_storage` set to the compute type,
# [even 70B on two cards of 24 GB](https://www.answer.ai/posts/2024-03-06-fsdp-qlora.html) with weights on the host (published).
#
# ## 4. Which method?
#
# For much new text, train all weights; for instructions, start with LoRA ([Biderman et al. 2024](https://arxiv.org/abs/2405.09673)). Take
# QLoRA where frozen 16-bit weights do not fit.
#
# | method | what weights take | shown in |
# |---|---|---|
# | all weights: `from_pretrained(..., dtype=torch.float32)`, `TrainingArguments(bf16=True, optim="adamw_torch_fused")`, on a T4 `fp16=True` | 16 bytes a parameter, with their states | [01 §3](beginner/01_where_memory_goes.ipynb#3.-The-states:-a-formula-without-surprises) |
# | LoRA: load in 16 bits, then `LoraConfig(r=16, target_modules="all-linear")` | 2 bytes, frozen; small new matrices train | [06 §2](intermediate/06_seven_billion.ipynb#2.-LoRA-by-hand) |
# | QLoRA: also `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)`, on a T4 `torch.float16` | half a byte in the blocks' linear layers; head and embedding 2, or 4 after `prepare_model_for_kbit_training` | [06 §5](intermediate/06_seven_billion.ipynb#5.-Seven-billion,-simulated) |
#
# ## 5. Which change?
#
# Try them in the order of section 1; see section 2 before the host.
#
# | what does not fit | change | type | shown in |
# |---|---|---|---|
# | logits of a large vocabulary | chunked loss | `TrainingArguments(use_liger_kernel=True)`, or, from PyTorch 2.13 on, `F.linear_cross_entropy(hidden, head.weight, labels, options=nn.LinearCrossEntropyOptions())` | [01 §6](beginner/01_where_memory_goes.ipynb#6.-A-transformer:-the-last-layer-can-be-the-largest) |
# | activations | recompute all blocks | `TrainingArguments(gradient_checkpointing=True)` | [05 §2](intermediate/05_checkpointing.ipynb#2.-Which-blocks?) |
# | weights and states | to the host | `fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), offload_policy=CPUOffloadPolicy())`, each block first, then the model | [07 §3](intermediate/07_offload.ipynb#3.-When-does-the-link-cost-nothing?) |
# | moments | in pages | `TrainingArguments(optim="paged_adamw_32bit")` | |
# | moments | 8 bits: other numbers | `TrainingArguments(optim="adamw_bnb_8bit")` | |
# | 16 bytes a parameter | bf16: other numbers | `from_pretrained(..., dtype=torch.bfloat16)`, without `bf16=True` | [03 §3](beginner/03_when_numbers_break.ipynb#3.-A-run,-and-its-flight-recorder) |
#
# ## 6. Which cards?
#
# | what does not fit | do | shown in |
# |---|---|---|
# | weights and states | share them: `fully_shard(part, mp_policy=...)` | [09 §4](intermediate/09_sharding.ipynb#4.-What-each-really-holds) |
# | a gathered block, or the embedding | split each matrix: `parallelize_module(...)` | [12 §3](advanced/12_tensor_parallel.ipynb#3.-What-a-rank-keeps) |
# | both | compose the axes | [14 §4](advanced/14_three_dimensions.ipynb#4.-Real-size:-the-memory-of-every-stage) |
#
# **Recap**, for one text of 2,048 tokens (simulated or predicted). 1B: LoRA and QLoRA fit all three cards as asked; all weights only the
# A100. 7B: QLoRA fits all three, changed on the smaller two; LoRA takes two T4s. All weights need the host, fewer bits or more cards.
# 70B: without the host only QLoRA on an A100 fits one card, changed.
#
# **Next.** [Your own model](00a_your_model.ipynb) answers for yours, with the script; [00](00_start_here.ipynb) lists the lessons.
