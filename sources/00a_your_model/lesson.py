# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own model
#
# **Does it fit, where do the bytes go, what would make it fit, and the script that trains it.** Name a model, a card and a
# way to train, and run the cells from top to bottom. No weights are downloaded, and no GPU is needed. The model's own code, of
# transformers, peft and bitsandbytes, runs at full width on tensors without data. It runs with one, two and three layers, and the
# result is extended to the whole depth ([how far to trust that](intermediate/05a_trusting_simulation.ipynb)). In a terminal the
# same is `python -m utils.fitting Qwen/Qwen2.5-7B --card "RTX 4090" --method qlora`.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 10 | any laptop | two to three minutes on two CPU cores |

# %% tags=["setup"]
here = setup("00a")

# %% jupyter={"source_hidden": true}
import functools
import textwrap

import pandas as pd
import torch
from torch import nn

from utils import draw_breakdown, explore, fit, fit_model, format_bytes, show
from utils.catalog.devices import DEVICES, device
from utils.fitting import Recipe, auto_class, mixed_precision, model_config, model_names, script
from utils.fitting.answer_table import lesser, not_tried, ranked, rows
from utils.fitting.recipe import METHODS
from utils.fitting.verdict import MARGIN
from utils.lessons.lesson_00a.cures_figure import draw_cures
from utils.lessons.lesson_00a.handover import studio_line
from utils.lessons.lesson_00a.map_figure import draw_map, longest_tokens, map_of
from utils.lessons.lesson_00a.peak_figure import draw_step
from utils.lessons.lesson_00a.recorded_runs import beside_recorded

# %% [markdown]
# ## Choose
#
# `MODEL` is one of the printed names, a folder that `save_pretrained` wrote, a `config.json`, or any name on the Hugging
# Face Hub (then its `config.json` is fetched, nothing else). Models of images and sound get a verdict, but no script.

# %%
MODEL, CARD = "Qwen/Qwen2.5-7B", "RTX 4090"
recipe = Recipe(method="qlora", rank=16, targets="all-linear", precision=mixed_precision(CARD), optimizer="adamw",
                tokens=4096, micro_batch=1)
print(textwrap.fill(f"{len(model_names())} models by name: {', '.join(model_names())}", 130))
print("Cards:", ", ".join(DEVICES))
print("Methods:", "; ".join(f"{name}: {what}" for name, what in METHODS.items()))

# %% [markdown]
# PyTorch's *allocator* takes blocks from the card and hands tensors out of them. Parts that no tensor fills are its *gaps*. The
# verdict compares what the allocator takes, gaps included, with the *room* on the card: all of its memory but what CUDA needs for
# itself. It assumes that nothing else uses the card; `nvidia-smi` shows what does. Attention is the kernel that transformers
# chooses, here SDPA's flash kernel. The recipe asks for one card. `cards=2` also asks what a second would change: it shares the
# states, and the tokens of long texts ([18](advanced/18_long_contexts.ipynb)).
#
# The figure shows the choice above as it is shipped. Memory climbs through forward, because backward needs each layer's
# *activations*. They alone cross the dashed line, the room. On top stands a short peak, which the right panel widens. There the
# loss makes copies of the *logits*, the scores of all words, in fp32, and gradients as large: each is a step marked +2.32. Other
# choices draw other figures.

# %%
found = fit_model(MODEL, recipe, card=CARD, cards=2)
asked, card_bytes = found.verdict, device(CARD).memory_bytes
print(asked)
logits_bytes = 4 * recipe.micro_batch * recipe.tokens * model_config(MODEL).get_text_config().vocab_size
print(f"One copy of the logits in fp32, tokens x vocabulary x 4 bytes: {format_bytes(logits_bytes)}.")
print(f"The {CARD} has {format_bytes(card_bytes)}, and leaves the allocator {format_bytes(asked.usable_bytes)}.")
show(draw_step(asked, f"{MODEL}, simulated\n{recipe}", card_bytes),
     alt=f"Memory over one step by category, and around its peak. {asked.sentence}")

# %% [markdown]
# Copies of the logits are counted in three categories. Those that backward needs are *activations*. The others are *logits and
# loss*, or *temporaries*, which are freed before forward or backward ends. The two temporaries at the peak are gradients on their
# way from one operation to the next. *Cast weights* are 16-bit copies of the adapters. *Kept beside the model* are the constants
# that unpack four bits.
#
# The 12% describe 21 published peaks of LoRA: they were chosen so that 19 of the 21 lie within. So these peaks do not test them.
# Three are of PEFT, as reserved bytes; 18 are of Qwen, which does not say which bytes it counts. Other methods, such as training
# all weights, have no published peak among them.

# %% [markdown]
# **What a card measured.** Two runs of this method's program are recorded, on an H200 with PyTorch 2.11 on 2026-11-26. They show
# that the simulator meets these two; they forecast nothing, since a test holds it to them, and the interval of seconds
# above was set with their help. Neither run has the chunked loss below, which needs PyTorch 2.13. No RTX 4090 was at hand.

# %%
beside_recorded("qlora").T.style.format("{:.2f}").set_caption("Qwen2.5-7B, rank 16, on an H200: GiB and seconds of a step")

# %% [markdown]
# Tensors agree within 0.01 GiB both times. The allocator took more on the card than simulated, 0.98 and 1.38 GiB. That is 4.4% and
# 8.3% of what it took, and within the 12%. The weights were packed into four bits on the card, which left gaps, and the simulation
# begins after that. One of the two steps took half as long again as predicted.

# %% [markdown]
# ## What would make it fit
#
# *Needed* is what the allocator takes. Rows that fit with a margin stand first, then those that *just* fit, by less than the 12%,
# then those that do not. Within each group the same step stands before shorter texts, and the quicker before the slower. Bytes are
# simulated, seconds predicted.
#
# *Not modelled* means that the prediction does not know what a change costs: that is not zero. The chunked loss, which never holds
# all logits at once, is such a change. A set with it costs its unknown seconds besides those printed.
# [TRL](https://github.com/huggingface/trl/releases/tag/v1.7.0) calls its own chunked loss neutral or slightly faster.
#
# Activations go to the host by `save_on_cpu`. It copies a tensor each time that one is saved, so the host gets more bytes than
# the card had of activations. The copies stop the stream that computes, so both directions' bytes over the link's rate are added
# to the step.
#
# Below the table stands the line of code for each change but expandable segments, which the script sets. The script further down
# has the bodies of `chunk_loss` and `checkpoint_each`.

# %%
best = found.together
table = pd.DataFrame(rows(found)).set_index("cure")
show_columns = ["needed", "fits", "added a step", "a step", "tokens a second", "costs"]
display(table[show_columns].style.set_caption("Simulated bytes, predicted seconds (80% of measured steps lay between)"))
print(f"'just' begins at {format_bytes(asked.usable_bytes / (1 + MARGIN))}.", lesser(found))
print(*not_tried(found), sep="\n")
if line := studio_line(found):  # more than these cards
    print("For lesson 15, in place of its line `shape = ...`:", line)
lines = {cure.name: cure.line for tried in ranked(found) for cure in tried.cures}
print("The lines of all:", *(f"{name}: {line}" for name, line in lines.items()), sep="\n    ")
show(draw_cures(found, f"{MODEL}, {recipe.tokens:,} tokens, simulated:\ntensors at the peak, and the allocator's gaps"),
     alt="; ".join(f"{tried.name}: {format_bytes(tried.verdict.needed_bytes)}" for tried in ranked(found)))

# %% [markdown]
# The script below takes the quickest set that was tried at your number of tokens and fits with a margin. Here that is the chunked
# loss with every second block checkpointed, +304 ms. Checkpointing of all blocks alone is one line of code, but recomputes every
# block, +609 ms. So the set stays the quicker one unless its chunked loss costs more than 0.3 s. Texts of 1,024 tokens pass
# slightly more tokens a second, but they are shorter texts.
#
# The recipe asked for has all cures off. Tools often switch some on. PEFT's `prepare_model_for_kbit_training` turns checkpointing
# on unless told otherwise; it also casts 16-bit weights to fp32, which is not simulated here. TRL's `SFTTrainer` chunks its loss by
# default since 1.7.0. The row of both cures, with all blocks checkpointed, is the nearest to such a start: it fits.
#
# What the host costs depends on the link's rate. The course's catalog takes 24 GB/s each way for PCIe 4 x16. The next cell prints
# the cost for half and for twice that rate. Even at twice the rate it adds more than recomputation does, so the choice stays.

# %%
chosen = found.runs
print("The set:" if chosen.fits else "Nothing fits; this saves most:", best.name if best else "as asked")
print(chosen.sentence, chosen.speed, sep="\n")
if chosen.seconds:
    hours = [10_000_000 / chosen.recipe.step_tokens * seconds / 3600 for seconds in chosen.seconds]
    print(f"10 million tokens: {hours[1]:.1f} hours ({hours[0]:.1f} to {hours[2]:.1f}, predicted)")
for tried in found.cures:
    if tried.name == "activations to the host" and tried.added_seconds:
        print(f"{tried.name} adds {tried.added_seconds:.2f} s; over a link half as fast {2 * tried.added_seconds:.2f} s, "
              f"twice as fast {tried.added_seconds / 2:.2f} s (predicted)")

# %% [markdown]
# ## Which batches fit
#
# Three ways: as asked, with that set, and with the chunked loss and all blocks checkpointed. In the figure a cross is too much, and
# a tilde is *just*. Each cell is simulated, as one sequence of that many tokens in all. "About" marks a number that is read off the
# line between two cells.

# %%
ways = {"as asked": recipe} | {tried.name: tried.verdict.recipe for tried in (best, found.usual) if tried}
grids = {name: map_of(found.trials, way, tokens=(2048, 4096, 8192), micro_batches=(1, 2)) for name, way in ways.items()}
for name, grid in grids.items():
    print(f"{name}: with a margin fit {longest_tokens(grid)} in a micro-batch")
show(draw_map(grids, f"{MODEL}, one {CARD}: GiB that the allocator takes"),
     alt="; ".join(f"{name}: {sum(v.fits for v in grid.values())} of {len(grid)} sizes fit" for name, grid in grids.items()))

# %% [markdown]
# ## The script
#
# It needs no course, and has only the functions that this recipe uses; some of their parameters serve other recipes. Its first
# lines say how to start it, and what it does not do. `texts.txt` is your text. A file `.jsonl` holds chats
# (`{"messages": [...]}` a line) or texts. `ACCUMULATION` adds up more micro-batches in a step.
#
# On a card its first three steps print the measured peak and seconds beside the simulated and predicted ones. It stops there if
# less than 2% of the card's room is left. As printed it ran on no card; tests run such scripts on a CPU, with a tiny model.

# %%
here.write_script("train.py", script(chosen, auto_class(model_config(MODEL)), MODEL))

# %% [markdown]
# ## Other models, other cards
#
# The menus give the verdict alone; all blocks are checkpointed. They start with a smaller model, LoRA and 2,048 tokens. Each change
# simulates anew, some seconds long. Without widgets, change the names in `first`.

# %%
@functools.cache
def verdict_of(model, card, method, tokens):
    way = Recipe(method=method, tokens=tokens, checkpointing=1, precision=mixed_precision(card))
    answer = fit_model(model, way, card=card, cures=False).verdict
    figure = draw_breakdown([answer.named(model)], title=f"{model}, {method}, checkpointed, {tokens:,} tokens", limit=answer.room)
    return figure, answer.sentence


first = {"model": "HuggingFaceTB/SmolLM2-1.7B", "card": CARD, "method": "lora", "tokens": 2048}
print(verdict_of(**first)[1])
explore(verdict_of, first, model=model_names(), card=list(DEVICES), method=list(METHODS), tokens=[512, 1024, 2048, 4096, 8192])

# %% [markdown]
# ## Any program of your own
#
# Give `fit` two functions: one makes model and optimizer, one runs a step. It takes any `nn.Module`, and tries four changes that it
# can make to any program: checkpointing, activations to the host, fused AdamW and 8-bit AdamW. Then it tries the best two, each
# with one more. What saves nothing alone, such as fused AdamW here, stands in pairs only.
#
# Watch where the peak lies. Once activations are gone, it is in the optimizer's step, where PyTorch's default AdamW copies whole
# lists of tensors. `fused=True` does not, and as the second change it saves gigabytes.
#
# All weights are trained here, so the 12% have no evidence for this program: read *just* as "close", and measure.

# %%
def build():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True), 24).to("cuda")
    return model, torch.optim.AdamW(model.parameters())


def step(model, optimizer):
    model(torch.randn(16, 1024, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


own = fit(build, step, card="RTX 4090", name="24 encoder layers")
print(own.verdict)
pd.set_option("display.max_colwidth", None)
tried = sorted([*own.pairs, *own.cures], key=lambda one: one.verdict.needed_bytes)
peaks = [one.verdict.measurement.peak_phase for one in tried]
pd.DataFrame([one.row() for one in tried]).assign(peak=peaks).set_index("cure")[["needed", "fits", "peak", "line"]]

# %% [markdown]
# **Next.** Why each of these works, and what it costs: [where memory goes](beginner/01_where_memory_goes.ipynb),
# [checkpointing](intermediate/05_checkpointing.ipynb), [seven billion on 24 GB](intermediate/06_seven_billion.ipynb),
# [offload](intermediate/07_offload.ipynb), [sharding](intermediate/09_sharding.ipynb),
# [the clinic](intermediate/10_oom_clinic.ipynb). Where no change fits, the second section prints your model's shape: a line that
# you copy into the last section of [the design studio](advanced/15_design_studio.ipynb).
