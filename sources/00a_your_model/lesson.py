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
# {{badges}}
#
# **Does it fit, where do the bytes go, what would make it fit, and the script that trains it.** Name a model, a card and a
# way to train, and run the cells from top to bottom. Nothing is downloaded, and no GPU is needed: the model's own code, of
# transformers, peft and bitsandbytes, runs at full width on tensors without data; layers that repeat are simulated three times
# and extended to the whole depth ([how far to trust that](intermediate/05a_trusting_simulation.ipynb)). In a terminal the same is
# `python -m utils.fitting Qwen/Qwen2.5-7B --card "RTX 4090" --method qlora`.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 10 | any laptop | one to two minutes on two CPU cores |

# %% tags=["setup"]
here = setup("00a")

# %% jupyter={"source_hidden": true}
import pandas as pd
import torch
from torch import nn

from utils import draw_breakdown, draw_timeline, explore, fit, fit_model, format_bytes, show
from utils.catalog.devices import DEVICES
from utils.fitting import Recipe, auto_class, mixed_precision, model_config, model_names, script
from utils.lessons.lesson_00a.handover import studio_line
from utils.lessons.lesson_00a.map_figure import draw_map, map_of

# %% [markdown]
# ## Choose
#
# `MODEL` is a name of `model_names()`, a folder that `save_pretrained` wrote, a `config.json`, or any name on the Hugging
# Face Hub (then its `config.json` is fetched, nothing else). `CARD` is a GPU of the catalog. `help(Recipe)` lists the ways.

# %%
MODEL, CARD = "Qwen/Qwen2.5-7B", "RTX 4090"
recipe = Recipe(method="qlora", rank=16, targets="all-linear", precision=mixed_precision(CARD), optimizer="adamw",
                tokens=4096, micro_batch=1)
print(f"{len(model_names())} models by name:", ", ".join(name.partition("/")[2] for name in model_names()))
found = fit_model(MODEL, recipe, card=CARD, cards=2)  # FSDP2 over two is tried where nothing is packed
print(f"\n{found.verdict}")
show(draw_timeline(found.verdict.measurement, title=f"{MODEL}: {recipe.method}, {recipe.tokens:,} tokens", limit=found.verdict.room),
     alt=f"Memory over one step by category. {found.verdict.sentence}")

# %% [markdown]
# ## What would make it fit
#
# Each change by itself, fewest seconds per GiB first; sets of several stand last. *Needed* is what the allocator takes of the card
# (the bars show the tensors in it), *just* means closer to the limit than simulations are exact. Bytes are simulated, seconds
# predicted. transformers computes the loss within forward: its logits stand under activations and temporaries.

# %%
best = found.together
rows = [*found.cures, *(several for several in (best, found.pair) if several and len(several.cures) > 1)]
table = pd.DataFrame([tried.row() for tried in rows]).set_index("cure")
display(table.drop(columns="line").style.set_caption("Simulated bytes, predicted seconds; last: sets of several"))
print("Tried, and gains nothing here:", ", ".join(tried.name for tried in found.without_gain) or "none")
print(*(f"Not tried: {name}: {why}\n" for name, why in found.refused.items()), sep="", end="")
print("A cheap set that fits:" if found.runs.fits else "Nothing fits; this saves most:", best.name if best else "it fits as asked")
if line := studio_line(found):  # more than these cards
    print("For lesson 15, in place of its line `shape = ...`:", line)
print("The lines of all:", *(f"{cure.name}: {cure.line}" for tried in found.cures for cure in tried.cures), sep="\n    ")
show(draw_breakdown([found.verdict.named("as asked"), *(tried.verdict.named(tried.name) for tried in rows)],
                    title=f"{MODEL}: bytes at the peak", limit=found.verdict.room),
     alt="; ".join(f"{tried.name}: {format_bytes(tried.verdict.peak_bytes)}" for tried in rows))

# %% [markdown]
# ## Which batches fit
#
# As asked, and with that set. A cross is too much; a tilde is closer to the card's limit than simulations are exact.

# %%
ways = {"as asked": recipe} | ({"with the set": best.verdict.recipe} if best else {})
grids = {name: map_of(found.trials, way, tokens=(1024, 2048, 4096), micro_batches=(1, 2)) for name, way in ways.items()}
show(draw_map(grids, f"{MODEL} on a {CARD}: GiB that its allocator takes"),
     alt="; ".join(f"{name}: {sum(v.fits for v in grid.values())} of {len(grid)} sizes fit" for name, grid in grids.items()))

# %% [markdown]
# ## The script
#
# It needs no course. Its first three steps print the card's own peak beside the simulated one, and it stops there if they
# leave the card less than 2%. `texts.txt` is your text; a file `.jsonl` holds chats (`{"messages": [...]}` a line) or texts.
# Both are cut into rows of equal length, and every token is learned.

# %%
here.write_script("train.py", script(found.runs, auto_class(model_config(MODEL)), MODEL))

# %% [markdown]
# ## Other models, other cards
#
# The verdict alone, by menus. Each change simulates anew, some seconds long. (Without widgets: change the names above.)

# %%
def verdict_of(model, card, method, tokens):
    way = Recipe(method=method, tokens=tokens, checkpointing=1, precision=mixed_precision(card))
    answer = fit_model(model, way, card=card, cures=False).verdict
    figure = draw_breakdown([answer.named(model)], title=f"{model}, {method}, checkpointed, {tokens:,} tokens", limit=answer.room)
    return figure, answer.sentence


explore(verdict_of, {"model": "HuggingFaceTB/SmolLM2-1.7B", "card": CARD, "method": "lora", "tokens": 2048}, model=model_names(),
        card=list(DEVICES), method=["full", "lora", "qlora"], tokens=[512, 1024, 2048, 4096, 8192])

# %% [markdown]
# ## Any program of your own
#
# Two functions: one makes model and optimizer, one runs a step. `fit` takes any `nn.Module`; the changes are those that need to
# know nothing about it.

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
pd.DataFrame([tried.row() for tried in own.cures]).set_index("cure")[["needed", "saved", "fits", "line"]]

# %% [markdown]
# **Next.** Why each of these works, and what it costs: [where memory goes](beginner/01_where_memory_goes.ipynb),
# [checkpointing](intermediate/05_checkpointing.ipynb), [seven billion on 24 GB](intermediate/06_seven_billion.ipynb),
# [offload](intermediate/07_offload.ipynb), [sharding](intermediate/09_sharding.ipynb),
# [the clinic](intermediate/10_oom_clinic.ipynb). Where no change fits, the second section prints your model's shape: a line that
# you copy into the last section of [the design studio](advanced/15_design_studio.ipynb).
