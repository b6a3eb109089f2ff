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
# **Full fine-tuning, LoRA or QLoRA: which fits my card, and what do I change or add where it does not?** One picture answers for
# models of 1B, 7B and 70B on three cards. The [glossary](00_glossary.ipynb) has the words.
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
# Each square of the picture is one model, one method and one card. It names the first of these four that fits and leaves 12% of
# its need free:
#
# 1. **The step as asked.**
# 2. **A change that keeps the same numbers**, up to rounding. The loss is computed in chunks, or all blocks are recomputed
#    (*checkpointing of all blocks*), or weights and states wait on the host (FSDP2). One change is tried before two, and the
#    quicker before the slower, by predicted seconds. AdamW in pages comes last, as its seconds are not predicted.
# 3. **A change to other numbers**: 8-bit moments, or weights and moments in bf16.
# 4. **The fewest cards.** *FSDP2 over 8* shares weights and states among eight. *Tensor parallel 2* splits each matrix over two
#    cards of one node; a larger split comes only where it saves cards. Above eight cards whole nodes of eight are taken.
#
# Each card reads one text of 2,048 tokens a step; cards that split matrices read one text together. All steps have fused AdamW
# and 16-bit autocast, and adapters have rank 16 on all linear layers. Bytes of one card are *simulated*: the step runs on tensors
# without data. Bytes of several cards are *predicted* by formulas.
#
# Three limits: a T4 has no predicted seconds, so its changes are tried in the order of section 5, and the host is not tried in its
# fp16. Where 16-bit weights (4-bit for QLoRA) with the 12% exceed a card, only several cards are tried. The host's memory is not
# limited; section 2 says what it holds.

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
# **Read it.** Find your model's rows and your card's column. An arrow leads from the bytes of the step as asked to those with the
# change. The bar shows how full the card then is.
#
# **Card-seconds** are the seconds of a step times its cards, for 1,000 tokens. Compare them within a column, as cards differ in
# price. A step of more texts spreads the host's and the optimizer's share over more tokens. QLoRA's are too low: for 7B on an A100
# the map gives it what it gives LoRA, while Qwen's README has 7.0 s a step for QLoRA and 5.2 for LoRA
# ([7B, 2,048 tokens, one A100](https://github.com/QwenLM/Qwen), published). Where no link between nodes was published, no seconds
# are given.
#
# **How sure are the bytes?** The 12% were chosen so that nine in ten of the published LoRA peaks in [00a](00a_your_model.ipynb) lie
# within it. None of these trains all weights. For several cards, 80% of the published peaks lie between 0.93 and 1.13 of the
# prediction (`utils.planner`). A peak at 1.13 does not fit where a bar ends at its line: have more cards within reach there.
#
# **A T4** computes in fp16. That needs a loss scaler, and Qwen2-7B [was reported](https://github.com/QwenLM/Qwen3/issues/670) to give
# NaN in it. The map also has one line that a T4 needs. Without it transformers passes keys of grouped heads, for which
# [this card](https://github.com/huggingface/transformers/pull/45776) falls back to a kernel that keeps all attention scores.

# %%
print(kept_scores("meta-llama/Llama-3.2-1B", "lora", "T4", TOKENS))
print(next(f"with the line: {s.asked_gib}" for s in of_1b if (s.method, s.card) == ("lora", "T4")))
# The line, before training:
# transformers.integrations.sdpa_attention.use_gqa_in_sdpa = lambda *_: False

# %% [markdown]
# ## 2. The second answer: other numbers, or more cards
#
# Four squares have a second answer, under *or*. It changes the numbers of training, or takes more cards in place of the host.

# %%
display(
    pd.DataFrame([square.row() for square in squares if square.instead])
    .set_index(["model", "method", "card"])
    .style.set_caption(
        "Bytes simulated on one card, predicted on several; card-seconds of 1,000 tokens predicted"
    )
)

# %% [markdown]
# **Read it.** At one text a step the host is dear: all weights of 7B take 4.6 card-seconds on one RTX 4090 and its host, and 1.8
# on eight cards that share the states. On an A100 weights and moments in bf16 take 0.3 in place of 4.2, at another price: they lose
# small updates, as [03](beginner/03_when_numbers_break.ipynb) measures. Of a T4 no seconds are predicted, as no measured step of
# one checks them.
#
# ## 3. Why all weights of 70B take 16 A100s
#
# On eight cards the states alone are too much, however matrices are split. On 16 the states fit, and the rest decides. It shrinks
# with the split: over four cards it is small enough.

# %%
seventy, full = model_config("meta-llama/Llama-3.1-70B"), Recipe(method="full", tokens=TOKENS)
display(
    pd.DataFrame(parts_of_a_card(seventy, full, "A100-80GB", (8, 16)))
    .set_index(["cards", "tensor parallel"])
    .style.set_caption("A card of several, predicted; an A100-80GB has 78.65 GiB")
)

# %% [markdown]
# The rest is least where the split covers all eight cards: then FSDP2 gathers nothing. The seconds hang on the link between the
# two nodes:

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
# **Four bits on several cards.** A † marks squares that need four bits and split matrices. Four-bit weights of bitsandbytes train
# under FSDP1 with `bnb_4bit_quant_storage` set to the compute type,
# [even 70B on two cards of 24 GB](https://www.answer.ai/posts/2024-03-06-fsdp-qlora.html) with weights on the host (published). Under
# FSDP2 they are [an open request](https://github.com/huggingface/accelerate/issues/3874) (read in 2026); torchtune's NF4 weights
# [train there](https://github.com/meta-pytorch/torchtune/issues/1029).
#
# ## 4. Which method?
#
# For much new text, train all weights. For instructions, start with LoRA. Take QLoRA where frozen 16-bit weights do not fit.
#
# | method | what weights take | shown in |
# |---|---|---|
# | all weights: `from_pretrained(..., dtype=torch.float32)`, `TrainingArguments(bf16=True, optim="adamw_torch_fused")`, on a T4 `fp16=True` | 16 bytes a parameter, with their states | [01 §3](beginner/01_where_memory_goes.ipynb#3.-The-states:-a-formula-without-surprises) |
# | LoRA: `LoraConfig(r=16, target_modules="all-linear")` | 2 bytes, frozen; small new matrices train | [06 §2](intermediate/06_seven_billion.ipynb#2.-LoRA-by-hand) |
# | QLoRA: also `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)`, on a T4 `torch.float16` | half a byte in the blocks' linear layers; head and embedding 2, or 4 after `prepare_model_for_kbit_training` | [06 §5](intermediate/06_seven_billion.ipynb#5.-Seven-billion,-simulated) |
#
# ## 5. Which change?
#
# Among changes that keep the numbers, take the quickest that fits, and two if one is not enough. Before you take the host, see
# what section 2 offers in its place.
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
# If no change is enough, compare the card-seconds of several cards with those of the next smaller method.
#
# | what does not fit | do | shown in |
# |---|---|---|
# | states | share them: `fully_shard(part, mp_policy=...)`, each block first, then the model | [09 §4](intermediate/09_sharding.ipynb#4.-What-each-really-holds) |
# | a gathered block, or the embedding | split each matrix: `parallelize_module(...)` | [12 §3](advanced/12_tensor_parallel.ipynb#3.-What-a-rank-keeps) |
# | both | compose the axes | [14 §4](advanced/14_three_dimensions.ipynb#4.-Real-size:-the-memory-of-every-stage) |
#
# **Next.** [Your own model](00a_your_model.ipynb) answers for yours, with the script; [00](00_start_here.ipynb) lists the lessons.
