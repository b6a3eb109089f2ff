# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 Offload: memory that lies behind a link
#
# {{badges}}
#
# **One question.** A full fine-tune of Llama-2-7B has 107.8 GB of states. On a card of 24 GB, how many bytes must stay, how
# many cross the link to the host, and how many seconds does a step take?
#
# **Promise.** You offload by hand, then by DeepSpeed. You leave with a script, and with lines that estimate a step on your machine.
# New words: [glossary](../00_glossary.ipynb).
#
# **Verdict.** If adapters are good enough, take QLoRA (lesson 06). Offload is for runs that must train all weights, at a price in seconds.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 75 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | under a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# A step trains on 16 texts, four at once. By DeepSpeed the full fine-tune then sends 135 GB over the link, QLoRA nothing. How many
# times as long as QLoRA's is its step?

# %%
my_bet_times = ...

# %% tags=["setup"]
here = setup("intermediate/07")

# %% jupyter={"source_hidden": true}
import inspect
import math
import textwrap
from functools import partial

import pandas as pd
import torch
from IPython.display import Code
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils import (
    GB, Evidence, Transformer, check, draw_lanes, llama_config, measure, model_shape, run_ranks, scratch, show,
    simulate, text_batches, text_tokens,
)

# %% jupyter={"source_hidden": true}
from utils.catalog import device as gpu
from utils.lessons.lesson_07 import by_libraries, script_text, streaming
from utils.lessons.lesson_07.by_libraries import SMALL, whole_loss
from utils.lessons.lesson_07.flow import draw_flow
from utils.lessons.lesson_07.forms import FORMS, prepared
from utils.lessons.lesson_07.link import Link
from utils.lessons.lesson_07.offload import OffloadedOptimizer
from utils.lessons.lesson_07.sides import draw_sides
from utils.lessons.lesson_07.small_run import run_small
from utils.lessons.lesson_07.speeds import training_speeds
from utils.lessons.lesson_07.start_up import start_up
from utils.lessons.lesson_07.step_lanes import StepParts, step_lanes
from utils.memory import host_memory
from utils.models.finetune import finetune_step
from utils.models.pretrained import enable_checkpointing
from utils.planner import Batch, Cluster, Lora, Plan, estimate
from utils.techniques import op_problem
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.units import Category

batches = by_libraries.batches()
zero_problem, adam_problem, file_problem = deepspeed_problem(), op_problem("cpu-adam"), op_problem("async-io")
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__} is here.", *filter(None, (adam_problem, file_problem)), sep="\n")

# %% [markdown]
# ## 1. Optimizer state and gradients leave, weights stay
#
# A step needs each *weight* in forward and in backward, each *gradient* until the optimizer has used it, and the *optimizer state*
# once: an fp32 master copy of the weights, and two moments. So ZeRO-Offload
# ([Ren and others 2021](https://arxiv.org/abs/2101.06840)) keeps of these only the weights on the card, and the CPU steps.

# %%
shape = model_shape("llama-2-7b")
P, CARD = shape.parameter_count, gpu("RTX 4090").memory_bytes
show(draw_flow(P, model="Llama-2-7B"),
     alt=f"Backward sends {2 * P / GB:.1f} GB of gradients down, the CPU steps on {12 * P / GB:.1f} GB of state, {2 * P / GB:.1f} GB of weights come up")

# %%
weights, gradients, state = {Category.PARAMETERS: 2 * P}, {Category.GRADIENTS: 2 * P}, {Category.OPTIMIZER_STATE: 12 * P}
there = state | {Category.GRADIENTS: 4 * P}
placed = {"nothing leaves": (weights | gradients | state, {}), "optimizer state leaves": (weights | gradients, there),
          "gradients leave, too": (weights, there)}
show(draw_sides(placed, title="States of Llama-2-7B, bf16 training", evidence=Evidence.PREDICTED,
                limit_bytes=CARD, limit=f"RTX 4090: {CARD / GB:.1f} GB"),
     alt="; ".join(f"{name}: {sum(card.values()) / GB:.1f} GB on the card, {sum(host.values()) / GB:.1f} in host memory"
                   for name, (card, host) in placed.items()))

# %% [markdown]
# **Read it.** The line is what PyTorch reports of a 24 GiB RTX 4090. In row two gradients stay until backward ends, and pass it; the
# host's are their fp32 copies. In row three each leaves as soon as it is made: 13.5 GB stay.
#
# ## 2. Offload by hand, with the plain run's losses
#
# `Link` copies a tensor `down` to the host or `up` to the device, and counts bytes. On a CPU both are one memory: what is made inside
# `host_memory()` counts as the host's.
#
# **Optimizer and gradients.** A hook sends each gradient down as soon as it is complete.


# %%
class HostAdamW:
    def __init__(self, parameters, link, **settings):
        self.here, self.link = list(parameters), link
        with host_memory():
            self.there = [p.detach().to("cpu", torch.float32, copy=True) for p in self.here]
        self.inner = torch.optim.AdamW(self.there, **settings)
        for here, there in zip(self.here, self.there, strict=True):
            here.register_post_accumulate_grad_hook(partial(self.leave, there))

    def leave(self, there, here):
        gradient = self.link.down(here.grad)
        with host_memory():  # a later micro-batch is added to the first
            there.grad = gradient.float() if there.grad is None else there.grad + gradient
        here.grad = None  # of all gradients one is on the device at a time

    @torch.no_grad()
    def step(self):
        with host_memory():
            self.inner.step()  # computed by the CPU
            self.inner.zero_grad()
            sent = [there.to(here.dtype) for here, there in zip(self.here, self.there, strict=True)]
        for here, weight in zip(self.here, sent, strict=True):
            here.copy_(self.link.up(weight))


# %% [markdown]
# **Activations.** Autograd hands each tensor that it saves to a *pack* hook, and asks an *unpack* hook for it in backward.
# Weights are among them, and stay. PyTorch has a ready one: `torch.autograd.graph.save_on_cpu(pin_memory=True)` (for weights, too).


# %%
def activations_on_host(weights, link):
    known = {p.untyped_storage().data_ptr() for p in weights}

    def pack(tensor):
        stays = tensor.untyped_storage().data_ptr() in known
        return (stays, tensor if stays else link.down(tensor))

    def unpack(packed):
        stays, tensor = packed
        return tensor if stays else link.up(tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# %% [markdown]
# **Weights, block by block.** `fetch` waits for one block's weights, and asks for the next block's, which travel while this one
# computes. Backward fetches and computes each block again.

# %%
parts_of = (streaming.Stream.fetch, streaming.Stream.send, streaming.Streamed)
Code("\n".join(textwrap.dedent(inspect.getsource(each)) for each in parts_of), language="python")

# %% [markdown]
# Each form trains the same small transformer for 20 steps.

# %%
long_batch = next(iter(text_batches(text_tokens(4 * 64 + 1), batch=4, sequence=64)))
losses, runs, rows = {}, {}, {}
for name in FORMS:
    form = prepared(name, HostAdamW, activations_on_host)
    losses[name] = [form.step(*batch) for batch in batches]
    apart = max(abs(a / b - 1) for a, b in zip(losses[name], losses["plain"], strict=True))
    assert apart <= 1e-6, f"{name} changes numbers: is a copy stale?"
    before = {way: form.link.bytes(way) for way in ("down", "up")}
    form.step(*long_batch)
    sent = {f"{way} a step, MB": (form.link.bytes(way) - before[way]) / 1e6 for way in before}
    runs[name] = measure(partial(form.step, *long_batch), model=form.model, optimizer=form.optimizer, timed_steps=0,
                         host=form.on_host(), name=name)
    form.link.close()
    rows[name] = {"losses apart": f"{apart:.0e}", **sent}

# %%
sides = {name: (run.breakdown, run.host.breakdown if run.host_timeline else {}) for name, run in runs.items()}
show(draw_sides(sides, title="A small transformer in fp32, 4 texts of 64 tokens: each side at its own peak in a step", evidence=Evidence.MEASURED,
                unit_bytes=1e6, unit="MB", places=("on the device", "in host memory")),
     alt="; ".join(f"{name}: {run.peak_bytes / 1e6:.1f} MB" for name, run in runs.items()))
pd.DataFrame(rows).T.style.format(precision=2).set_caption("measured; device and host are one memory here, told apart by placement")

# %% [markdown]
# **Read it.** In these 20 steps each form has the plain run's losses. *Optimizer, gradients* saves the optimizer state alone, as at
# the plain run's peak no gradients exist yet. *Blocks streamed* frees most, in part as it computes each block again. Its weights come
# up twice, and at most two blocks of them are on the device, as *communication buffers*.
#
# ## 3. When does the link cost nothing?
#
# Where a copy runs beside compute that takes at least as long. A pass of $c$ operations for each of $P$ parameters and $T$ tokens
# takes $c P T / F$ seconds at $F$ operations a second. To send $b$ bytes a parameter takes $b P / B$ seconds at $B$ bytes a second. So,
# but for the first or last copy, the link is hidden from so many tokens in a *micro-batch* (what the card takes at once):
#
# $$T = \frac{b F}{c B}$$
#
# With every block checkpointed, forward has $c = 2$ and backward $c = 6$. Gradients in bf16, $b = 2$, leave in backward: $b / c = 2 / 6$.
# Streamed weights come up in both passes, and the shorter one decides: $2 / 2$.
#
# $F$ is $8 P T$ over the seconds that the course's planner predicts for Llama-2-7B, four texts at once. $B$ is the share of the
# link's rate that NCCL assumes for PCIe 3 (`topo.h`).

# %%
CARDS = {name: training_speeds(shape, name) for name in ("RTX 4090", "A100 80GB", "H100")}
rows = {name: {"F, TFLOP/s": F / 1e12, "F, of the card's peak": f"{F / 1e12 / gpu(name).bf16_tflops:.0%}", "B, GB/s": B / GB,
               "B, of the link's": f"{B / gpu(name).host_link.link_bytes_per_second:.0%}",
               "gradients are hidden from, tokens": 2 / 6 * F / B, "streamed weights are hidden from, tokens": 2 / 2 * F / B}
        for name, (F, B) in CARDS.items()}
pd.DataFrame(rows).T.style.format(precision=0, thousands=",").set_caption("every block checkpointed, bf16, predicted")

# %% [markdown]
# **Read it.** On the RTX 4090 one text of 2,048 tokens hides its gradients; with half of $B$ it would not.
#
# ## 4. DeepSpeed and FSDP2
#
# ZeRO-2 *partitions* gradients and optimizer state over ranks, and one GPU is one rank. What helps here is its offload:
#
# ```python
# engine, *_ = deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-3), config={
#     "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True},
#     "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}})
# ```
#
# `DeepSpeedCPUAdam` is AdamW compiled for the CPU. ZeRO-3 moves weights, too, by `offload_param`; with `"device": "nvme"` they go to
# a disk ([ZeRO-Infinity](https://arxiv.org/abs/2104.07857)). FSDP2, PyTorch's sharding, moves weights, gradients and optimizer state by
# one policy, for each block and then for the model. It is not run here: on a CPU it has nothing to move.
#
# ```python
# fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=True))
# ```
#
# **Question.** What does ZeRO-2 save on one GPU *without* offload, in bytes per parameter?

# %%
saved_without_offload = ...
check("07.without_offload", saved_without_offload)

# %% [markdown]
# Each row is one setting of DeepSpeed, trained in bf16, its tensors told apart by name. Look at what is left on the device.

# %%
cpu = {"device": "cpu"}
offloaded = {"stage": 2, "offload_optimizer": cpu}
ARMS = {"ZeRO-2": {"stage": 2}, "ZeRO-2, offloaded": offloaded,
        "ZeRO-3, offloaded": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}}
four = {"micro_batches": 4}  # a step adds up four micro-batches; in the planted fault only the first counts
SUMS = {"plain": {"stage": 2} | four, "offloaded": offloaded | four, "fault planted": offloaded | four | {"only_first": True}}
GROUPS = {"by block": offloaded | {"by_block": True}}  # for section 5
with scratch("lesson-07") as folder:  # more rows where DeepSpeed's own Adam, and its way to files, are built
    ARMS |= by_libraries.more_arms(str(folder), adam=not adam_problem, files=not file_problem)
    found = {} if zero_problem else run_ranks(by_libraries.by_deepspeed, 1, ARMS | SUMS | GROUPS, str(folder), timeout_seconds=900)[0]

# %%
def losses_apart(name, plain):
    return max(abs(a / b - 1) for a, b in zip(found[name].losses, found[plain].losses, strict=True))


rows = {}
for name in ARMS if found else ():
    run, apart = found[name], losses_apart(name, "ZeRO-2")
    rows[name] = {"device": run.device_each, "host": run.host_each, "losses apart": f"{apart:.0e}"}
    rows[name] |= {"file": run.file_each} if run.file_each else {}
    assert apart <= (torch.finfo(torch.bfloat16).eps / 4 if "CPUAdam" in name else 5e-4), f"{name} trains another model than ZeRO-2: same seed?"
display(pd.DataFrame(rows).T.style.format(precision=2, na_rep="").set_caption(
    "a small transformer, bytes per parameter between backward and step, measured"))
if found:
    assert losses_apart("offloaded", "plain") <= 5e-4, "offload with micro-batches trains another model: which DeepSpeed?"
    assert losses_apart("by block", "ZeRO-2") <= 5e-4, "groups by block train another model"
    print(f"with four micro-batches a step, the host holds {found['offloaded'].host_each:.2f} bytes a parameter (measured)")
    for name in ("offloaded", "fault planted"):
        print(f"  {name}: losses {losses_apart(name, 'plain'):.0e} from those without offload")

# %% [markdown]
# **Read it.** *ZeRO-2* alone keeps all 16 bytes. *Offloaded*, it keeps the bf16 weights on the device, 2 bytes a parameter. The
# host has section 1's 16 bytes, and a bf16 copy for the way up. The 0.10 on either side is a buffer as large as the largest weight.
# Several micro-batches add the sum of their gradients in bf16: 20 bytes.
#
# **Check your version.** From September 2024 ([#6550](https://github.com/deepspeedai/DeepSpeed/pull/6550)) until 0.19.0
# ([#7967](https://github.com/deepspeedai/DeepSpeed/pull/7967)) DeepSpeed's offload could silently drop the gradients of
# some micro-batches. The planted fault is a simple kin of it, not the same.
#
# **Around adapters** of rank 8, how much optimizer state is there to move?

# %%
per_block = {"two": 4 * shape.hidden, "all seven": 8 * shape.hidden + 3 * (shape.hidden + shape.feedforward)}
for targets_of, each in per_block.items():
    count = 8 * shape.layers * each  # adapters of rank 8
    print(f"rank 8 on {targets_of} matrices of a block, {count / 1e6:.0f} million parameters: {8 * count / GB:.2f} GB can move,",
          f"{12 * count / GB:.2f} with a master copy ({Evidence.PREDICTED})")

# %% [markdown]
# At most a hundredth of the card. Offloading the frozen weights or the activations beside adapters is not shown here.
#
# ## 5. The scenario as asked
#
# *"A 7B model on our 24 GB card, by PEFT and with offload."* By PEFT there is next to no optimizer state to offload. So here
# all weights train, on an RTX 4090, in steps of 16 texts of 2,048 tokens. **Nothing here has run on a card**: bytes are simulated or
# predicted, seconds predicted.
#
# **The step fits.** Weights are in bf16, and every block is checkpointed. At the peak stand 2 bytes a parameter, and for each text
# at once the blocks' inputs and 12 bytes a logit.

# %%
LENGTH = 2048
inputs, logits = 2 * LENGTH * shape.hidden * shape.layers, 12 * LENGTH * shape.vocabulary  # bytes of a text
# 12: log-probabilities in fp32, their gradient, and that of the logits


def full():
    model = AutoModelForCausalLM.from_config(llama_config(shape), dtype=torch.bfloat16).train()
    enable_checkpointing(model)
    adam = torch.optim.AdamW(model.parameters())  # OffloadedOptimizer does what HostAdamW did, on a simulated card
    return model, OffloadedOptimizer(adam, master_dtype=torch.float32, gradients_leave=True)


big = {}
for texts, name in {1: "step, gradients leave: 1 text", 4: "step, gradients leave: 4 texts"}.items():
    big[name] = simulate(full, lambda m, o: finetune_step(m, o, texts, LENGTH), device="RTX 4090", name=name)
    expected = 2 * P + texts * (inputs + logits)
    print(f"{name}, {expected / GB:.2f} GB predicted, {big[name].peak_bytes / GB:.2f} simulated, in {big[name].peak_phase}")
    assert abs(big[name].peak_bytes / expected - 1) < 0.03, "2 bytes a parameter and activations: what else stays?"

# %% [markdown]
# **The usual start does not fit.** To make fp32 masters on the host, ZeRO-2 first clones the weights on the card, one *parameter
# group* after another. `by_block` makes one for each block.

# %%
def by_block(model):
    """A parameter group for each block, and one for each weight outside of the blocks."""
    blocks = [list(block.parameters()) for block in model.model.layers]
    inside = {weight for block in blocks for weight in block}
    return blocks + [[weight] for weight in model.parameters() if weight not in inside]


# %%
groupings = {"start, one group": lambda model: [list(model.parameters())], "start, a group a block": by_block}
starts = {name: simulate(lambda: (AutoModelForCausalLM.from_config(llama_config(shape), dtype=torch.bfloat16).to("cuda"), None),
                         lambda model, _: start_up(groups(model), CARD), device="RTX 4090", name=name)
          for name, groups in groupings.items()}
for words, name in {"one group": "ZeRO-2, offloaded", "a group a block": "by block"}.items() if found else ():
    print(f"section 4's small model, {words}: the largest clone has {found[name].start_each:.2f} bytes a parameter ({Evidence.MEASURED})")

# %% jupyter={"source_hidden": true}
bars = {name: ({Category.PARAMETERS: 2 * P, Category.TEMPORARIES: run.peak_bytes - 2 * P}, {}) for name, run in starts.items()}
for (name, run), texts in zip(big.items(), (1, 4), strict=True):
    held = {Category.PARAMETERS: 2 * P, Category.ACTIVATIONS: texts * inputs, Category.LOGITS_AND_LOSS: texts * logits}
    bars[name] = (held | {Category.TEMPORARIES: run.peak_bytes - sum(held.values())}, {})
show(draw_sides(bars, title="Llama-2-7B: simulated peaks of start and step, in predicted parts", evidence=Evidence.SIMULATED, device="RTX 4090",
                limit_bytes=CARD, limit=f"RTX 4090: {CARD / GB:.1f} GB"),
     alt="; ".join(f"{name}: {run.peak_bytes / GB:.1f} GB" for name, run in (starts | big).items()))

# %% [markdown]
# **Read it.** With one group the clone, in grey, passes the line; by block it does not. Four texts fit, too. DeepSpeed's buffers come
# on top, such as the *bucket* that collects gradients: 0.2 GB in the script.
#
# **The host needs more than 128 GiB.** DeepSpeed holds 20 bytes a parameter there, and *pins* all but the two moments: pinned memory
# stays in place, so that the card can copy from it at the link's rate. PyTorch
# [rounds](https://docs.pytorch.org/docs/main/generated/torch.cuda.memory.host_memory_stats.html) each pinned tensor up to a power of two.

# %% jupyter={"source_hidden": true}
with torch.device("meta"):
    groups = by_block(AutoModelForCausalLM.from_config(llama_config(shape)))
flat = [each * sum(p.numel() for p in group) for group in groups for each in (4, 4, 2)]  # masters, gradients, weights' way up
single = [2 * p.numel() for group in groups for p in group]  # sums of micro-batches; in the last cell's loop what arrives
rounded = [sum(2 ** math.ceil(math.log2(size)) for size in pinned) for pinned in (flat, single)]
host_bytes, loop_host_bytes = 8 * P + sum(rounded), 16 * P + rounded[1]  # 8: two moments; the loop pins what arrives alone
print(f"DeepSpeed: {20 * P / GB:.0f} GB as tensors, {host_bytes / GB:.0f} GB with pinned tensors rounded up ({Evidence.PREDICTED})")
print(f"the last cell's loop: {18 * P / GB:.0f} GB, {loop_host_bytes / GB:.0f} GB; 128 GiB are {128 * 2**30 / GB:.0f} GB")

# %% [markdown]
# **Seconds.** By default (`overlap_comm` off) DeepSpeed 0.19.8 copies on the stream that computes: backward stops at each full bucket.
# By its source a step of $m$ micro-batches has these parts beside compute:
#
# | part | bytes a parameter | how often |
# |---|---|---|
# | the gradients' sum comes up | 2, link | $m - 1$ |
# | the new sum goes down | 2, link | $m$, if $m > 1$ |
# | gradients go down in fp32 | 4, link | once |
# | clip, AdamW, make bf16 | 8 + 28 + 6, host memory | once |
# | weights come up, while AdamW works on the next group | 2, link | once |

# %%
batch, base = Batch(sequences=16, sequence_length=LENGTH), {"recompute": "full", "micro_batch": 4}
deepspeed = base | {"offload": "optimizer", "framework": "deepspeed", "zero_stage": 2}
WAYS = {"QLoRA": Plan(lora=Lora(base="nf4-dq"), framework="peft", **base),
        "full + offload, 1 text": Plan(**deepspeed | {"micro_batch": 1}), "full + offload, 4 texts": Plan(**deepspeed)}
cluster = Cluster(gpu=gpu("RTX 4090"), nodes=1, gpus_per_node=1, host_memory_bytes=200 * GB)
told = {name: estimate(shape, cluster, plan, batch) for name, plan in WAYS.items()}
computes = {name: one.step_seconds - one.time.optimizer for name, one in told.items()}  # seconds: one planner for all three
B = CARDS["RTX 4090"].link
HOST = 2 / 3 * 2 * 8 * 5.6e9  # assumed: two thirds of two channels of DDR5-5600, 8 bytes wide


def full_step(name, hidden=False, card=1.0, link=1.0, memory=1.0):
    m = 16 // WAYS[name].micro_batch
    each = 2 * P / (link * B) if m > 1 else 0  # seconds of a sum, one way
    return StepParts(forward=2 / 8 * computes[name] / m / card, backward=6 / 8 * computes[name] / m / card, up=each, down=each,
                     last_down=4 * P / (link * B), step=(8 + 28 + 6) * P / (memory * HOST), weights=2 * P / (link * B),
                     micro_batches=m, hidden=hidden)


# %% jupyter={"source_hidden": true}
lanes = {}
for name, hidden in {"by default": False, "all hidden": True}.items():
    lanes |= {f"{name}: {lane}": spans for lane, spans in step_lanes(full_step("full + offload, 4 texts", hidden))[0].items()}
title = (f"Llama-2-7B by DeepSpeed, 16 texts of {LENGTH:,}\ntokens a step, 4 at once, on an RTX 4090:\nlink {B / GB:.0f} GB/s, host memory {HOST / GB:.0f} GB/s;"
         "\nwhat takes turns is drawn in 4 pieces")
show(draw_lanes(lanes, title=title, evidence=Evidence.PREDICTED),
     alt="By default backward stops for copies; if all were hidden it would not; AdamW on the CPU comes after both")

# %% [markdown]
# **Read it.** White in a GPU's row is waiting. *All hidden* is a bound; how near `overlap_comm: true` comes is not shown here.

# %%
buffers = 2 * 1e8 + 2 * shape.vocabulary * shape.hidden  # bytes of the script's bucket, and of the largest tensor
chosen, sheet = "full + offload, 4 texts", {}
for name in WAYS:
    peak, full = told[name].peak, name != "QLoRA"
    spans, step = step_lanes(full_step(name)) if full else ({"link": []}, told[name].step_seconds)
    card_bytes = peak.needed_bytes - peak.bytes_by_category.get(Category.COMMUNICATION, 0) + (buffers if full else 0)
    sheet[name] = {"card, GB": card_bytes / GB, "host, GB": (host_bytes if full else told[name].host_bytes) / GB,
                   "crossing, GB": sum(each.end_seconds - each.start_seconds for each in spans["link"]) * B / GB,
                   "compute, s": computes[name], "step, s": step}
display(pd.DataFrame(sheet).T.style.format(precision=1).set_caption(
    f"Llama-2-7B, 16 texts a step on {CARD / GB:.1f} GB (with CUDA's context); QLoRA: 4 at once, rank 8 on q and v; compute by one planner; predicted"))


def ratio(hidden=False, **faster):
    return step_lanes(full_step(chosen, hidden, **faster))[1] / (told["QLoRA"].step_seconds / faster.get("card", 1))


print(f"The full step takes {ratio():.1f} times as long as QLoRA's (predicted); your bet: {'none' if my_bet_times is ... else my_bet_times}.")
for words, part in {"the card computes": "card", "the link copies": "link", "host memory moves": "memory"}.items():
    print(f"  {words} half as fast: {ratio(**{part: 0.5}):.1f} times; twice as fast: {ratio(**{part: 2}):.1f} times")
F = CARDS["RTX 4090"].flops
print(f"  all copies in backward hidden: {step_lanes(full_step(chosen, True))[1]:.1f} s, {ratio(True):.1f} times. By section 3's rule that needs",
      f"{4 / 6 * F / B:,.0f} tokens, {8 / 6 * F / B:,.0f} in the last micro-batch; 4 texts have {4 * LENGTH:,}")

# %% [markdown]
# **The answer.** With four texts at once 13.5 GB of weights stay, and the peak is 20.4 GB. 135 GB cross. A step takes 27 s, which is
# 1.9 times QLoRA's; with host memory half as fast as assumed, 2.2 times. With one text at once it takes 40 s, as sums cross with each
# micro-batch: fill the card.
#
# **The verdict.** If adapters are good enough, take QLoRA. Offload is for runs that must train all weights, at a price in seconds.
#
# **The script** follows, and makes one step of a tiny Llama on the CPU, by torch's AdamW, nothing pinned.


# %%
def zero_offload(on_gpu):
    """ZeRO-2 with the optimizer on the host; a bucket of 0.2 GB."""
    return {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_force_ds_cpu_optimizer": on_gpu,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000_000,  # elements
                                  "offload_optimizer": {"device": "cpu", "pin_memory": on_gpu}},
            "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto"}


# %%
run_text = script_text.run_text(LENGTH, big["step, gradients leave: 4 texts"].peak_bytes / GB)
here.write_script("offload.py", script_text.IMPORTS, zero_offload, by_block, script_text.PACKED, script_text.TRAINER, run_text)

# %%
if not zero_problem:
    with scratch("lesson-07-script") as folder:
        ran = run_small(here.root / "build" / "lesson-07" / "offload.py", folder, LENGTH)
        assert ran.losses and ran.saved, "the script ended, and trained or saved nothing"
        saved = (folder / ran.saved[0]).parent
        prompt = AutoTokenizer.from_pretrained(saved)("a line", return_tensors="pt").input_ids
        words = AutoModelForCausalLM.from_pretrained(saved).generate(prompt, max_new_tokens=5, do_sample=False)
    print("loss:", *ran.losses, "\nsaved:", *ran.saved, "\nloaded again:", words.shape[1] - prompt.shape[1], "tokens generated")

# %% [markdown]
# ## Break it, diagnose it
#
# A training loop clips before each step. Here gradients leave in backward. Predict the norm that it finds.

# %%
torch.manual_seed(0)
model = Transformer(SMALL)
optimizer = HostAdamW(model.parameters(), Link())
whole_loss(model, *batches[0]).backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
there = torch.nn.utils.get_total_norm([copy.grad for copy in optimizer.there])
print(f"norm that the loop clips by: {norm:.3f}; norm of the gradients on the host: {there:.3f}")
assert norm == 0 < there, "gradients should have left the device"

# %% [markdown]
# **Diagnose it.** No gradients are on the device, and no error says so. Clip where they are; DeepSpeed does, by `gradient_clipping`.
#
# ## Recap
#
# Llama-2-7B in full on a 24 GB card, by DeepSpeed with four texts at once, predicted:
#
# - **What stays?** 2 bytes a parameter, 13.5 GB. The host holds 160 GB.
# - **What crosses?** 135 GB a step.
# - **How long?** 27 s, 1.9 times QLoRA's; with host memory half as fast as assumed, 2.2 times. The link is not hidden, as by
#   default DeepSpeed's copies do not run beside compute.
# - **Verdict.** If adapters are good enough, take QLoRA. Offload is for runs that must train all weights, at a price in seconds.
#
# ### Test yourself
#
# A full fine-tune of Llama-2-7B by DeepSpeed with offload runs on an H100, in 64 micro-batches of 512 tokens a step. What do you change
# first?
#
# <details><summary>Answer</summary>
#
# Larger micro-batches, as far as memory goes. While the card waits, $4m + 2$ bytes a parameter cross: at 48 GB/s 36.2 s with $m = 64$,
# 2.5 s with four of 8,192 tokens. Compute takes 3.9 s. An 80 GB card also holds all gradients, by `"stage": 1`: not tried here.
#
# </details>
#
# **Where next.** The [lab](../../labs/intermediate/07_offload.ipynb), in a copy (`make my-labs`), then its
# [solution](../../solutions/intermediate/07_offload.ipynb).

# %% [markdown]
# ## On Monday
#
# **With transformers and DeepSpeed**: `build/lesson-07/offload.py`, whose first lines say how.
#
# **In plain PyTorch**, for a host of 128 GiB, a checkpointed `model` in bf16 on the card, and its `loader`. Gradients travel beside
# backward; the CPU adds them up, in seconds that are not counted here. It has not run on a card either.
#
# ```python
# from collections import deque
# import torch
#
# MICRO_BATCHES, side, under_way = 4, torch.cuda.Stream(), deque()
# masters = {p: p.detach().to("cpu", torch.float32, copy=True) for p in model.parameters() if p.requires_grad}
# sums = {p: torch.empty_like(master) for p, master in masters.items()}  # kept: new pages cost time in each step
# arrived = {p: torch.empty_like(p, device="cpu", pin_memory=True, requires_grad=False) for p in masters}
# came = set()  # the weights whose gradients came in this micro-batch: others' tensors hold what was there before
# optimizer = torch.optim.AdamW(masters.values(), lr=1e-5, fused=True)
#
# def leave(p):
#     assert p not in came, "two gradients in one backward: the second would overwrite the first"
#     came.add(p)
#     side.wait_stream(torch.cuda.current_stream())  # until this gradient is computed
#     with torch.cuda.stream(side):
#         arrived[p].copy_(p.grad, non_blocking=True)
#     under_way.append((side.record_event(), p.grad))  # its memory is kept until its copy has ended
#     p.grad = None
#     if len(under_way) > 2:  # a slow link must not fill the card with gradients
#         under_way.popleft()[0].synchronize()
#
# for p in masters:
#     p.register_post_accumulate_grad_hook(leave)
#
# for number, batch in enumerate(loader, 1):
#     (model(**batch).loss / MICRO_BATCHES).backward()
#     side.synchronize()  # until all gradients have arrived
#     under_way.clear()
#     for p in came:
#         if masters[p].grad is None:  # its first in this step
#             masters[p].grad = sums[p].copy_(arrived[p])
#         else:  # in pieces that fit the CPU's cache, as torch first writes the bf16 operand out in fp32
#             for total, piece in zip(sums[p].view(-1).split(2**20), arrived[p].view(-1).split(2**20)):
#                 total.add_(piece)
#     came.clear()
#     if number % MICRO_BATCHES == 0:
#         torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)  # where the gradients are
#         optimizer.step()
#         optimizer.zero_grad()  # each .grad is None again; `sums` keeps the memory
#         with torch.no_grad():
#             for p, master in masters.items():
#                 p.copy_(arrived[p].copy_(master))  # by way of the pinned tensor
# ```
#
# **Your three rates, and the step that they predict:**
#
# ```python
# import time
# import torch
#
# P, TOKENS, MICRO_BATCHES = 6.74e9, 16 * 2048, 4  # parameters; tokens and micro-batches of a step
#
# def rate(work, amount):
#     seconds = []
#     for _ in range(5):
#         torch.cuda.synchronize()
#         start = time.perf_counter()
#         work()
#         torch.cuda.synchronize()
#         seconds.append(time.perf_counter() - start)
#     return amount / min(seconds)
#
# card = torch.ones(2**26, device="cuda")
# for pinned in (False, True):
#     host = torch.empty(2**26, pin_memory=pinned).fill_(1)
#     B = rate(lambda: host.copy_(card), card.nbytes)
#     print(f"link, pinned {pinned}: {B / 1e9:.1f} GB/s")
# p = torch.zeros(2**26, requires_grad=True)
# p.grad = torch.ones(2**26)
# HOST = rate(torch.optim.AdamW([p], fused=True).step, 28 * p.numel())
# a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
# F = rate(lambda: a @ a, 2 * 4096**3)  # the most: training reaches less
# print(f"host memory: {HOST / 1e9:.0f} GB/s; products: {F / 1e12:.1f} TFLOP/s")
# crossing = 4 * MICRO_BATCHES + 2 if MICRO_BATCHES > 1 else 4  # bytes a parameter; weights come up beside AdamW
# # An estimate: a product is faster than training, attention is left out, and the CPU's rate is that of torch's AdamW.
# print(f"a step by DeepSpeed, about: {8 * P * TOKENS / F + crossing * P / B + 42 * P / HOST:.1f} s")
# ```
#
# **Look at** `torch.cuda.max_memory_allocated()` after a step: raise the micro-batch until the card is full.
