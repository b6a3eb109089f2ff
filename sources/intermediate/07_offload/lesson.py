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
# **Promise.** You offload by hand, then by DeepSpeed and by FSDP2, PyTorch's sharding. You leave with a script, and with lines
# that estimate a step on your machine. New words: [glossary](../00_glossary.ipynb).
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 75 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | under a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# A step trains on 16 texts, four at once. The full fine-tune by DeepSpeed then sends 135 GB over the link, and QLoRA (lesson 06)
# sends nothing. On the same card, how many times as long as QLoRA's is its step? Section 5 counts.

# %%
my_bet_times = 10

# %% tags=["setup"]
here = setup("intermediate/07")

# %% jupyter={"source_hidden": true}
import inspect
import math
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
from utils.lessons.lesson_07.start_up import clone_lines, start_up
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
# A step needs each *weight* twice, in forward and in backward. It needs each *gradient* until the optimizer has used it, and the
# *optimizer state* once: an fp32 master copy of the weights, and two moments. ZeRO-Offload
# ([Ren and others 2021](https://arxiv.org/abs/2101.06840)) therefore keeps only the weights of these on the card. Gradients and
# optimizer state lie in the host's memory, and the CPU does the optimizer's step.

# %%
shape = model_shape("llama-2-7b")
P, CARD = shape.parameter_count, gpu("RTX 4090").memory_bytes
show(draw_flow(P, model="Llama-2-7B"),
     alt=f"Backward sends {2 * P / GB:.1f} GB of gradients down, the CPU steps on {12 * P / GB:.1f} GB of state, {2 * P / GB:.1f} GB of weights come up")

# %% [markdown]
# Of a card's 24 GiB programs get 25.4 GB. Compare the bars on the left with that line.

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
# **Read it.** In row two the gradients stay until backward ends, and pass the line. In row three each gradient leaves as soon as it
# is made: 13.5 GB stay, and activations have room.
#
# ## 2. By hand: no loss changes
#
# `Link` copies a tensor `down` to the host or `up` to the device, and counts the bytes. On a CPU both are one memory, so what is
# made inside `host_memory()` counts as the host's.
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
# Weights are among them, and stay where they are. PyTorch's own
# `torch.autograd.graph.save_on_cpu(pin_memory=True)` sends them, too.


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
# computes. Backward fetches a block again and computes it again, then sends its gradients down.

# %%
Code(inspect.getsource(streaming.Streamed), language="python")

# %% [markdown]
# Each form trains a small transformer for 20 steps.

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
# **Read it.** Offload changes no loss: each form has the plain run's.
#
# - *Optimizer, gradients* saves the optimizer state alone: at the plain run's peak, early in backward, no gradients exist yet.
# - *Activations* moves the peak to where gradients exist. A tensor that two operations save crosses twice.
# - *Blocks streamed* frees most, and its weights come up twice. At most two blocks of them are on the device, as *communication
#   buffers*. *Temporaries* are the block that is computed again, with its gradients.
#
# ## 3. When does the link cost nothing?
#
# It costs nothing when a copy takes no longer than the compute beside it. A pass
# that computes $c$ operations for each of $P$ parameters and $T$ tokens takes $c P T / F$ seconds, on a card of $F$ operations a
# second. To send $b$ bytes a parameter takes $b P / B$ seconds, on a link of $B$ bytes a second. So the link
# is hidden if a *micro-batch*, which is what the card takes at once, has at least this many tokens:
#
# $$T = \frac{b F}{c B}$$
#
# With every block checkpointed, forward has $c = 2$ and backward $c = 6$. Gradients in bf16, $b = 2$, leave in backward: $b / c = 2 / 6$.
# Streamed weights come up in both passes, and the shorter one decides: $2 / 2$. $F$ and $B$ are
# predicted here; the last cell measures them on your machine.

# %%
CARDS = {name: training_speeds(shape, name) for name in ("RTX 4090", "A100 80GB", "H100")}
rows = {name: {"F, TFLOP/s": F / 1e12, "B, GB/s": B / GB, "gradients are hidden from, tokens": 2 / 6 * F / B,
               "streamed weights are hidden from, tokens": 2 / 2 * F / B} for name, (F, B) in CARDS.items()}
pd.DataFrame(rows).T.style.format(precision=0, thousands=",").set_caption("every block checkpointed, bf16, predicted")

# %% [markdown]
# **Read it.** On the RTX 4090 one text of 2,048 tokens hides its gradients, but with half of $B$ it would not. The faster cards
# need more tokens, as they gain more in compute than in their links.
#
# The rule holds where copies run beside compute. DeepSpeed's ZeRO-2 by default copies after it: `overlap_comm` is off.
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
# `DeepSpeedCPUAdam` is AdamW in compiled code for the CPU. ZeRO-3 moves weights, too, by `offload_param`; with
# `"device": "nvme"` it moves all to a disk, one more link ([ZeRO-Infinity](https://arxiv.org/abs/2104.07857)). FSDP2 moves
# weights, gradients and optimizer state by one policy, for each block and then for the model:
#
# ```python
# fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=True))
# ```
#
# Each row below is one setting of DeepSpeed, trained in bf16. Look at what is left on the device just before the optimizer's step.

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

# %%
sharded = run_ranks(by_libraries.by_fsdp, 1, timeout_seconds=900)[0]
apart = max(abs(a / b - 1) for a, b in zip(sharded, losses["plain"], strict=True))
print(f"FSDP2 with CPUOffloadPolicy, fp32: losses {apart:.0e} from the plain run of section 2")
assert apart <= 1e-6, "FSDP2 trains another model: same seed?"

# %% [markdown]
# **Read it.** *ZeRO-2, offloaded* keeps the bf16 weights on the device, 2 bytes a parameter, and a small buffer. The host has
# section 1's 16 bytes, and a bf16 copy for the way up. Several micro-batches add the sum of their gradients in bf16: 20 bytes.
# *ZeRO-3* keeps no weights on the device between steps: its 0.50 bytes are a bucket for gradients.
#
# **Check your version.** From September 2024 ([#6550](https://github.com/deepspeedai/DeepSpeed/pull/6550)) to April 2026
# ([#7967](https://github.com/deepspeedai/DeepSpeed/pull/7967)) DeepSpeed's ZeRO-1 and 2 with offload silently dropped all
# gradients but the first micro-batch's. Release 0.19.0 is mended. The planted fault drops the same, and only the losses tell.
#
# **Question.** What does ZeRO-2 save on one GPU *without* offload, in bytes per parameter?

# %%
saved_without_offload = ...
check("07.without_offload", saved_without_offload)

# %% [markdown]
# **Around adapters.** LoRA by PEFT trains 20 million parameters in fp32, without a master copy. How many GB does offloading
# AdamW's state free?

# %%
freed_gb = ...
check("07.offloaded_gigabytes", freed_gb)

# %%
per_block = {"two": 4 * shape.hidden, "all seven": 8 * shape.hidden + 3 * (shape.hidden + shape.feedforward)}
for targets_of, each in per_block.items():
    count = 8 * shape.layers * each  # adapters of rank 8
    print(f"rank 8 on {targets_of} matrices of a block, {count / 1e6:.0f} million parameters: {8 * count / GB:.2f} GB can move,",
          f"{12 * count / GB:.2f} with a master copy ({Evidence.PREDICTED})")

# %% [markdown]
# Around adapters of rank 8 there is at most a hundredth of the card to move. Offload earns its keep where all weights train.
#
# ## 5. The scenario as asked
#
# *"A 7B model on our 24 GB card, by PEFT and with offload."* By PEFT there is next to nothing to offload (section 4). So here
# all weights train, on one RTX 4090, in steps of 16 texts of 2,048 tokens. **Nothing here has run on a card**: bytes are simulated or
# predicted, seconds predicted.
#
# **The step fits.** Weights are in bf16, and every block is checkpointed. The peak is where backward begins. There stand 2 bytes a
# parameter, and for each text at once the blocks' inputs and 12 bytes a logit.

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
# **The usual start does not fit.** ZeRO-2 makes fp32 masters on the host. For this it first clones the weights on the card, one
# *parameter group* after another. `by_block` makes one for each block.

# %%
def by_block(model):
    """A parameter group for each block, and one for each weight outside of the blocks."""
    blocks = [list(block.parameters()) for block in model.model.layers]
    inside = {weight for block in blocks for weight in block}
    return blocks + [[weight] for weight in model.parameters() if weight not in inside]


# %%
print(*([] if zero_problem else clone_lines()), sep="\n")
groupings = {"start, one group": lambda model: [list(model.parameters())], "start, a group a block": by_block}
starts = {name: simulate(lambda: (AutoModelForCausalLM.from_config(llama_config(shape), dtype=torch.bfloat16).to("cuda"), None),
                         lambda model, _: start_up(groups(model), CARD), device="RTX 4090", name=name)
          for name, groups in groupings.items()}
for words, name in {"one group": "ZeRO-2, offloaded", "a group a block": "by block"}.items() if found else ():
    print(f"section 4's small model, {words}: the largest clone has {found[name].start_each:.2f} bytes a parameter ({Evidence.MEASURED})")

# %% jupyter={"source_hidden": true}
bars = {name: ({Category.PARAMETERS: 2 * P, Category.TEMPORARIES: run.peak_bytes - 2 * P}, {}) for name, run in starts.items()}
bars |= {name: (run.breakdown, {}) for name, run in big.items()}
show(draw_sides(bars, title="Llama-2-7B: peaks of start and step", evidence=Evidence.SIMULATED, device="RTX 4090",
                limit_bytes=CARD, limit=f"RTX 4090: {CARD / GB:.1f} GB"),
     alt="; ".join(f"{name}: {run.peak_bytes / GB:.1f} GB" for name, run in (starts | big).items()))

# %% [markdown]
# **Read it.** With one group the clone, in grey, stands beside all weights and passes the line. By block it is one block's.
# Four texts fit, too. DeepSpeed's buffers come on top, such as the *bucket* that collects gradients: 0.2 GB in the script, 1 GB
# by [default](https://www.deepspeed.ai/docs/config-json/).

# %% [markdown]
# **The host needs more than 128 GiB.** DeepSpeed holds 20 bytes a parameter there. All but the two moments it *pins*. Pinned memory
# stays in place, and only from there does the card copy at the link's full rate. The price: PyTorch
# [rounds](https://docs.pytorch.org/docs/main/generated/torch.cuda.memory.host_memory_stats.html) a pinned tensor up to a power
# of two, and this takes DeepSpeed past 128 GiB. The plain loop of the last cell holds 18 bytes, pins 2 of them, and stays below.

# %%
with torch.device("meta"):
    groups = by_block(AutoModelForCausalLM.from_config(llama_config(shape)))
flat = [each * sum(p.numel() for p in group) for group in groups for each in (4, 4, 2)]  # masters, gradients, weights' way up
single = [2 * p.numel() for group in groups for p in group]  # sums of micro-batches; in the last cell's loop what arrives
rounded = [sum(2 ** math.ceil(math.log2(size)) for size in pinned) for pinned in (flat, single)]
host_bytes, loop_host_bytes = 8 * P + sum(rounded), 16 * P + rounded[1]  # 8: two moments; the loop pins what arrives alone
print(f"DeepSpeed: {20 * P / GB:.0f} GB as tensors, {host_bytes / GB:.0f} GB with pinned tensors rounded up ({Evidence.PREDICTED})")
print(f"the last cell's loop: {18 * P / GB:.0f} GB, {loop_host_bytes / GB:.0f} GB; 128 GiB are {128 * 2**30 / GB:.0f} GB")

# %% [markdown]
# **The step takes about twice QLoRA's.** DeepSpeed copies after compute, so section 3's rule hides nothing: each copy adds its
# seconds. A step of $m$ micro-batches has these parts, by the source of DeepSpeed 0.19.8. Each waits for the one before, but
# weights come up beside AdamW.
#
# | part | bytes a parameter | how often |
# |---|---|---|
# | the gradients' sum comes up | 2, link | $m - 1$ |
# | the new sum goes down | 2, link | $m$, if $m > 1$ |
# | gradients go down in fp32 | 4, link | once |
# | clip, AdamW, make bf16 | 8 + 28 + 6, host memory | once |
# | weights come up | 2, link | once |

# %%
F, B = CARDS["RTX 4090"]
HOST = 2 / 3 * 2 * 8 * 5.6e9  # assumed: two thirds of two channels of DDR5-5600, 8 bytes wide; four modules, as for 160 GB, are usually slower


def full_step(texts, F=F, B=B, HOST=HOST):
    m = 16 // texts
    each = 2 * P / B if m > 1 else 0  # seconds of a sum, one way
    return StepParts(compute=8 * P * texts * LENGTH / F, up=each, down=each, last_down=4 * P / B,
                     step=(8 + 28 + 6) * P / HOST, weights=2 * P / B, micro_batches=m)


# %% jupyter={"source_hidden": true}
lanes = {}
for name, texts in {"1 text at once": 1, "4 texts at once": 4}.items():
    lanes |= {f"{name}: {lane}": spans for lane, spans in step_lanes(full_step(texts))[0].items()}
title = f"Llama-2-7B by DeepSpeed, a step of 16 texts\nof {LENGTH:,} tokens on an RTX 4090:\nlink {B / GB:.0f} GB/s, host memory {HOST / GB:.0f} GB/s"
show(draw_lanes(lanes, title=title, evidence=Evidence.PREDICTED),
     alt="With 1 text at once the GPU waits for the link after each; with 4 it waits four times; AdamW on the CPU comes after both")

# %% [markdown]
# **Read it.** White in a GPU's row is waiting. The copies after a micro-batch take as long whatever its size: with 1 text at once
# they come 16 times, with 4 texts four times.
#
# Next, beside QLoRA's step, and with other speeds:

# %%
batch, base = Batch(sequences=16, sequence_length=LENGTH), {"recompute": "full", "micro_batch": 4}
deepspeed = {"offload": "optimizer", "framework": "deepspeed", "zero_stage": 2}
WAYS = {"QLoRA": (Plan(lora=Lora(base="nf4-dq"), framework="peft", **base), 0),
        "full + offload, 1 text": (Plan(**base | deepspeed | {"micro_batch": 1}), 1),
        "full + offload, 4 texts": (Plan(**base | deepspeed), 4),
        "full + offload, 8 texts, chunked loss": (Plan(**base | deepspeed | {"micro_batch": 8, "loss": "chunked"}), 8)}
buffers = 2 * 1e8 + 2 * shape.vocabulary * shape.hidden  # bytes of the script's bucket, and of the largest tensor
cluster = Cluster(gpu=gpu("RTX 4090"), nodes=1, gpus_per_node=1, host_memory_bytes=200 * GB)
told = {name: estimate(shape, cluster, plan, batch) for name, (plan, _) in WAYS.items()}


def seconds(name, **rates):
    texts = WAYS[name][1]
    return step_lanes(full_step(texts, **rates))[1] if texts else told[name].step_seconds * F / rates.get("F", F)


# %%
sheet = {}
for name, (_, texts) in WAYS.items():
    peak = told[name].peak
    card_bytes = peak.needed_bytes - peak.bytes_by_category.get(Category.COMMUNICATION, 0) + (buffers if texts else 0)
    on_link = sum(span.end_seconds - span.start_seconds for span in step_lanes(full_step(texts))[0]["link"]) if texts else 0
    sheet[name] = {"card, GB": card_bytes / GB, "host, GB": (host_bytes if texts else told[name].host_bytes) / GB,
                   "crossing, GB": on_link * B / GB, "step, s": seconds(name)}
display(pd.DataFrame(sheet).T.style.format(precision=1).set_caption(
    f"Llama-2-7B, 16 texts a step on {CARD / GB:.1f} GB (with CUDA's context); QLoRA: 4 at once, rank 8 on q and v; predicted"))


def ratio(**rates):
    return seconds("full + offload, 4 texts", **rates) / seconds("QLoRA", **rates)


print(f"The full step takes {ratio():.1f} times as long as QLoRA's (predicted); your bet: {my_bet_times}.")
for words, rate in {"the card computes": {"F": F}, "the link copies": {"B": B}, "host memory moves": {"HOST": HOST}}.items():
    half, twice = (ratio(**{key: times * value for key, value in rate.items()}) for times in (0.5, 2))
    print(f"  {words} half as fast: {half:.1f} times; twice as fast: {twice:.1f} times")

# %% [markdown]
# **The answer.** With four texts at once 13.5 GB of weights stay, and the peak is 20.4 GB. 135 GB cross. A step takes 27 s, which is
# 1.9 times QLoRA's. This ratio hangs most on the card's speed: a card half as fast has 1.5, one twice as fast 2.6.
#
# **The verdict.** If adapters are good enough, take QLoRA, which needs half these GB. Offload is for runs that must train all
# weights. Then fill the card: with four texts at once instead of one, a step falls from 40 s to 27 s. Eight save 2 s more. They need a loss in chunks ([lesson 05](05_checkpointing.ipynb); in `Trainer`, `use_liger_kernel=True`).
#
# **The script** follows. In it `by_block` replaces the two groups of Trainer:


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

# %% [markdown]
# It starts, saves and loads: one step of a tiny Llama on the CPU, by torch's AdamW, nothing pinned.

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
# **Diagnose it.** Nothing is clipped, as no gradients are on the device any more, and no error says so. Clip
# where they are. DeepSpeed does it by its own `gradient_clipping`.
#
# ## Recap
#
# Llama-2-7B in full on a 24 GB card, by DeepSpeed with four texts at once, predicted:
#
# - **What stays?** 2 bytes a parameter, 13.5 GB, if gradients leave as well as optimizer state. The host holds 16 to 20 bytes.
# - **What crosses?** 135 GB a step.
# - **How long?** 27 s, 1.9 times QLoRA's. The link would cost nothing from $bF/(cB)$ tokens a micro-batch on, but only with copies
#   beside compute.
# - ZeRO-2 partitions nothing on one GPU. Its offload helps where all weights train.
#
# ### Test yourself
#
# A full fine-tune of Llama-2-7B by DeepSpeed with offload runs on an H100, with 64 micro-batches of 512 tokens a step. It is
# slow. What do you change first?
#
# <details><summary>Answer</summary>
#
# Take larger micro-batches. While the card waits, $m > 1$ of them send $4m + 2$ bytes a parameter. At 48 GB/s that takes 36.2 s with
# 64, and 2.5 s with four of 8,192 tokens. Compute takes 3.9 s.
#
# </details>
#
# **Where next.** Do the [lab](../../labs/intermediate/07_offload.ipynb), in a copy: `make my-labs` makes one. Then compare
# with the [solution](../../solutions/intermediate/07_offload.ipynb).

# %% [markdown]
# ## On Monday
#
# **With transformers and DeepSpeed**: `build/lesson-07/offload.py`, which section 5 wrote. Its first lines say what to install and
# how to start it.
#
# **In plain PyTorch**, for a host of 128 GiB, with a checkpointed `model` in bf16 on the card, and its `loader`. Gradients
# travel beside backward, and the CPU adds them up. It has not run on a card either.
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
