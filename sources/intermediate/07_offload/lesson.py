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
# many cross the link, and how many seconds does a step take?
#
# **Promise.** You offload by hand with equal losses, then by DeepSpeed and FSDP2 (PyTorch's sharding). You leave
# with a script, and with lines that estimate a step on your machine. New words: [glossary](../00_glossary.ipynb).
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 75 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | under a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# In each step of 16 texts, four at once, the full fine-tune by DeepSpeed sends 135 GB over the link. QLoRA (lesson 06)
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

from evidence.record import recorded
from evidence.validation import offload as published
from evidence.validation.tables import table
from utils import (
    GB, Evidence, Transformer, check, draw_lanes, llama_config, measure, model_shape, run_ranks, scratch, show,
    simulate, text_batches, text_tokens,
)

# %% jupyter={"source_hidden": true}
from utils.catalog import device as gpu
from utils.lessons.lesson_07 import by_libraries, late_steps, script_text, streaming
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
# ## 1. What can leave
#
# A step needs each *weight* in forward and again in backward, each *gradient* until the optimizer has
# used it, and the *optimizer state* (an fp32 master copy, two moments) once.
# ZeRO-Offload ([Ren and others 2021](https://arxiv.org/abs/2101.06840)) therefore keeps the weights on the card, puts
# gradients and optimizer state into host memory, and lets the CPU do the step.

# %%
shape = model_shape("llama-2-7b")
P, CARD = shape.parameter_count, gpu("RTX 4090").memory_bytes
show(draw_flow(P, model="Llama-2-7B"),
     alt=f"Backward sends {2 * P / GB:.1f} GB of gradients down, the CPU steps on {12 * P / GB:.1f} GB of state, {2 * P / GB:.1f} GB of weights come up")

# %% [markdown]
# Programs find 25.4 GB: 24 GiB less the driver's part.

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
# **Read it.** In row two the gradients stay on the card until backward ends. Only row three, where each leaves as soon as it is made, has room for activations.
#
# ## 2. By hand
#
# `Link` copies a tensor `down` to the host or `up` to the device, and counts the bytes. On a CPU both are one memory: what is
# made inside `host_memory()` counts as the host's.
#
# **Optimizer and gradients.** A hook sends each gradient down.


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
# **Activations.** Autograd hands each tensor that it saves to a *pack* hook, and asks for it in backward by *unpack*.
# Saved weights are on the device anyway, so here they stay. PyTorch's `torch.autograd.graph.save_on_cpu(pin_memory=True)`
# sends them, too.


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
# **Weights, block by block.** `fetch` waits for one block's weights and asks for the next block's, which travel while this one
# computes. Forward keeps only the block's input. Backward fetches and computes the block again, and sends its gradients down.

# %%
Code(inspect.getsource(streaming.Streamed), language="python")

# %% [markdown]
# Each form trains for 20 steps in fp32, one micro-batch a step.

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
    rows[name] = {"losses apart": f"{apart:.0e}", "device peak, MB": runs[name].peak_bytes / 1e6, "in": runs[name].peak_phase, **sent}

# %%
sides = {name: (run.breakdown, run.host.breakdown if run.host_timeline else {}) for name, run in runs.items()}
show(draw_sides(sides, title="A small transformer in fp32, 4 texts of 64 tokens: each side at its own peak in a step", evidence=Evidence.MEASURED,
                unit_bytes=1e6, unit="MB", places=("on the device", "in host memory")),
     alt="; ".join(f"{name}: {run.peak_bytes / 1e6:.1f} MB" for name, run in runs.items()))
pd.DataFrame(rows).T.style.format(precision=2).set_caption("measured; device and host are one memory here, told apart by placement")

# %% [markdown]
# **Read it.** Offload changes no loss. At the device's plain peak, early in backward, no gradients exist yet. Row two therefore
# saves the optimizer state alone. A tensor that two operations save crosses twice (14.8 MB of activations, not 12.0). In the
# last row the blocks' gradients and optimizer state leave, too, and few activations stay.
# Streamed weights come up twice; at most two blocks of them are on the device, as *communication buffers*. *Temporaries* are
# the block that is computed again, with its gradients. Embeddings and head do not stream (thin slices).
#
# ## 3. When does the link cost nothing?
#
# A pass that computes $c$ operations for each of $P$ parameters and $T$ tokens takes $c P T / F$ seconds, on a card of $F$
# operations a second. To send $b$ bytes a parameter one way takes $b P / B$, on a link of $B$ bytes a second. If both run at
# once, the link is hidden from $T = b F / (c B)$ tokens of a *micro-batch* on, which is what the card takes at once. With
# every block checkpointed, forward has $c = 2$ and backward 6. Gradients ($b = 2$) leave in backward: $b / c = 2 / 6$.
# Streamed weights ($b = 2$) come in both passes, and the shorter one decides: $2 / 2$. The bound holds only where transfers
# run beside compute: in DeepSpeed by `overlap_comm`, ZeRO-3's default, not ZeRO-2's.
#
# $B$ is a rule: 12.0 of PCIe 3's 15.75 GB/s, as NCCL rates such links (`topo.h`), and the same share of faster ones.
# $F$, which includes attention's seconds, was set on training runs of other cards than the RTX 4090; there
# [Liao and others](https://arxiv.org/abs/2403.06504) report 156 TFLOP/s, 45 for ZeRO-Infinity (13 billion parameters).

# %%
CARDS = {name: training_speeds(shape, name) for name in ("RTX 4090", "A100 80GB", "H100")}
for name, (F, B) in CARDS.items():
    shares = F / gpu(name).peak_flops_per_second("bf16"), B / gpu(name).pcie.link_bytes_per_second
    print(f"{name}: F {F / 1e12:.0f} TFLOP/s, {shares[0]:.0%} of peak; B {B / GB:.1f} GB/s, {shares[1]:.0%} of line rate")
record = recorded("device_speed")[0]
copies = {row["quantity"]: row["median"] for row in record.rows}
print(f"{record.evidence} on an {record.device}, whose link is an H100's: {copies['device to host']:.1f} GB/s down, {copies['host to device']:.1f} up")

# %%
moves = {  # bytes a parameter: on the card, on the host, down, up; and b / c of the pass that hides them
    "nothing leaves": (16, 0, 0, 0, 0), "optimizer state leaves": (4, 16, 2, 2, float("nan")),
    "gradients leave, too": (2, 16, 2, 2, 2 / 6), "weights leave, too": (0, 18, 2, 4, 2 / 2)}
rows = {}
for name, (*held, ratio) in moves.items():
    rows[name] = {what: each * P / GB for what, each in zip(("card, GB", "host, GB", "down, GB", "up, GB"), held, strict=True)}
    rows[name] |= {f"hidden from, tokens ({card})": ratio * F / B for card, (F, B) in CARDS.items()}
pd.DataFrame(rows).T.style.format(precision=0, thousands=",", na_rep="after backward").set_caption("Llama-2-7B, a step of one micro-batch, predicted")

# %% [markdown]
# **Read it.** The recorded link beats the rule by 15%. Gradients of one text of 2,048 tokens hide on the RTX 4090, but not
# with half of $B$, with Liao's $F$, or on the faster cards. The CPU's step begins after backward, where all gradients are
# clipped together. But no weight need be new before its next use:

# %%
assert late_steps.clipped_losses(late=True) == late_steps.clipped_losses(late=False), "is a weight used before its step?"
print(f"losses of {len(batches)} clipped steps: equal to the bit")
Code(inspect.getsource(late_steps.step_before_use), language="python")

# %% [markdown]
# **Read it.** So the next forward can hide a part of the step's end; ZeRO-2 and the last cell's loop (`HostAdamW`, its copies
# beside backward) wait.
# ZeRO-Offload's delayed update and [ZenFlow](https://www.deepspeed.ai/tutorials/zenflow) hide more: later passes compute
# with older weights.
#
# ## 4. DeepSpeed and FSDP2
#
# ZeRO-2 *partitions* gradients and optimizer state over ranks; here is one. The calls:
#
# ```python
# engine, *_ = deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-3), config={
#     "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True},
#     "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}})
# fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=True))  # FSDP2, for each block and the model
# ```
#
# `CPUOffloadPolicy` moves weights, too, as ZeRO-3 with both offloads does. A disk is one more link (`"nvme"`,
# [ZeRO-Infinity](https://arxiv.org/abs/2104.07857)). Each row below is one setting, trained on 20 batches in bf16 without
# clipping; *by block*: see section 5.

# %%
cpu = {"device": "cpu"}
offloaded = {"stage": 2, "offload_optimizer": cpu}
ARMS = {"ZeRO-2": {"stage": 2}, "ZeRO-2, offloaded": offloaded, "ZeRO-2, offloaded, by block": offloaded | {"by_block": True},
        "ZeRO-3, offloaded": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}}
four = {"micro_batches": 4}  # a step adds up four micro-batches; in the planted fault only the first counts
SUMS = {"plain": {"stage": 2} | four, "offloaded": offloaded | four, "fault planted": offloaded | four | {"only_first": True}}
with scratch("lesson-07") as folder:  # more rows where DeepSpeed's own Adam, and its way to files, are built
    ARMS |= by_libraries.more_arms(str(folder), adam=not adam_problem, files=not file_problem)
    found = {} if zero_problem else run_ranks(by_libraries.by_deepspeed, 1, ARMS | SUMS, str(folder), timeout_seconds=900)[0]

# %%
def losses_apart(name, plain):
    return max(abs(a / b - 1) for a, b in zip(found[name].losses, found[plain].losses, strict=True))


rows = {}
for name in ARMS if found else ():
    run, apart = found[name], losses_apart(name, "ZeRO-2")
    rows[name] = {"device": run.device_each, "host": run.host_each, "clone at start": run.start_each, "losses apart": f"{apart:.0e}"}
    rows[name] |= {"file": run.file_each} if run.file_each else {}
    assert apart <= (torch.finfo(torch.bfloat16).eps / 4 if "CPUAdam" in name else 5e-4), f"{name} trains another model than ZeRO-2: same seed?"
display(pd.DataFrame(rows).T.style.format(precision=2, na_rep="").set_caption(
    "bytes per parameter, measured: device and host between backward and step; clone at start: on the card, with ZeRO-3 on the host"))
if found:
    assert losses_apart("offloaded", "plain") <= 5e-4, "offload with micro-batches trains another model: which DeepSpeed?"
    print(f"four micro-batches a step, {found['offloaded'].host_each:.2f} bytes on the host: losses {losses_apart('offloaded', 'plain'):.0e}",
          f"from those without offload; with the fault {losses_apart('fault planted', 'plain'):.0e}")

# %%
sharded = run_ranks(by_libraries.by_fsdp, 1, timeout_seconds=900)[0]
apart = max(abs(a / b - 1) for a, b in zip(sharded, losses["plain"], strict=True))
print(f"FSDP2 with CPUOffloadPolicy, fp32: losses {apart:.0e} from the plain run of section 2")
assert apart <= 1e-6, "FSDP2 trains another model: same seed?"

# %% [markdown]
# **Read it.** Row two keeps 2 bytes, the bf16 weights, and a buffer as large as the largest tensor (0.10). Its host holds 16
# bytes, a bf16 copy for the way up, and such a buffer. With several micro-batches the bf16 sum of the
# gradients lies there too. ZeRO-3's 0.50 bytes are its bucket, here a quarter of the gradients.
#
# **Check your version.** With ZeRO-1 or 2 and offload, DeepSpeed silently dropped all gradients but the first micro-batch's,
# from [#6550](https://github.com/deepspeedai/DeepSpeed/pull/6550) (September 2024) to
# [#7967](https://github.com/deepspeedai/DeepSpeed/pull/7967) (April 2026). The
# planted fault drops the same. Release 0.19.0 is mended.
#
# **Question.** What does ZeRO-2 save on one GPU *without* offload, in bytes per parameter?

# %%
saved_without_offload = ...
check("07.without_offload", saved_without_offload)

# %% [markdown]
# **Around adapters.** PEFT trains 20 million parameters in fp32, without a master copy. How many GB
# does offloading AdamW's state free?

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
# ## 5. The scenario as asked
#
# *"A 7B model on our 24 GB card, by PEFT and with offload."* One RTX 4090, steps of 16 texts of 2,048 tokens, 50 million
# tokens. **Nothing here has run on a card**: bytes are simulated or predicted, seconds predicted.
#
# **Does it fit?** Weights are in bf16, and every block is checkpointed. By formula, where backward begins: 2 bytes a
# parameter; for each text at once the blocks' inputs, and 12 bytes a logit (fp32 log-probabilities, their gradient, and that
# of the logits).

# %%
LENGTH = 2048
inputs, logits = 2 * LENGTH * shape.hidden * shape.layers, 12 * LENGTH * shape.vocabulary  # bytes of a text


def full(gradients_leave):
    model = AutoModelForCausalLM.from_config(llama_config(shape), dtype=torch.bfloat16).train()
    enable_checkpointing(model)
    adam = torch.optim.AdamW(model.parameters())  # OffloadedOptimizer does what HostAdamW did, on a simulated card
    return model, OffloadedOptimizer(adam, master_dtype=torch.float32, gradients_leave=gradients_leave)

# %%
names = {"optimizer state leaves: 1 text": (False, 1), "gradients leave: 1 text": (True, 1), "gradients leave: 4 texts": (True, 4)}
big = {name: simulate(lambda: full(leave), lambda m, o: finetune_step(m, o, texts, LENGTH), device="RTX 4090", name=name)
       for name, (leave, texts) in names.items()}
for name, (_, texts) in list(names.items())[1:]:
    expected = 2 * P + texts * (inputs + logits)
    print(f"{name}, {expected / GB:.2f} GB predicted, {big[name].peak_bytes / GB:.2f} simulated, in {big[name].peak_phase}")
    assert abs(big[name].peak_bytes / expected - 1) < 0.03, "2 bytes a parameter and activations: what else stays?"

# %% [markdown]
# **Does the start fit?** To make fp32 masters, ZeRO-2 clones the weights of one *parameter group*
# after another, on the card. `start_up` simulates that with one group, as is usual, and with one for each block. First
# comes DeepSpeed's line (`stage_1_and_2.py`).

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

# %% jupyter={"source_hidden": true}
bars = {name: ({Category.PARAMETERS: 2 * P, Category.TEMPORARIES: run.peak_bytes - 2 * P}, {}) for name, run in starts.items()}
bars |= {name: (run.breakdown, {}) for name, run in big.items()}
show(draw_sides(bars, title="Llama-2-7B: peaks of start and step", evidence=Evidence.SIMULATED, device="RTX 4090",
                limit_bytes=CARD, limit=f"RTX 4090: {CARD / GB:.1f} GB"),
     alt="; ".join(f"{name}: {run.peak_bytes / GB:.1f} GB" for name, run in (starts | big).items()))

# %% [markdown]
# **Read it.** Four texts fit, and the usual start does not: the clone (grey) stands beside all weights. By block it is one
# block's. In steps the log-probabilities are activations, the two gradients temporaries.
# DeepSpeed's own buffers come on top: a *bucket* that collects gradients (1 GB by
# [default](https://www.deepspeed.ai/docs/config-json/), 0.2 GB in the script), and one for the largest tensor.
#
# **Does the host have room?** DeepSpeed holds 20 bytes a parameter there, and *pins* all but the moments: only memory that
# stays in place is copied at the link's rate. PyTorch
# [rounds](https://docs.pytorch.org/docs/main/generated/torch.cuda.memory.host_memory_stats.html) a pinned tensor up to a
# power of two. The last cell's loop holds 18 bytes and pins only what arrives.

# %%
with torch.device("meta"):
    groups = by_block(AutoModelForCausalLM.from_config(llama_config(shape)))
flat = [each * sum(p.numel() for p in group) for group in groups for each in (4, 4, 2)]  # masters, gradients, weights' way up
single = [2 * p.numel() for group in groups for p in group]  # sums of micro-batches; in the last cell's loop what arrives
rounded = [sum(2 ** math.ceil(math.log2(size)) for size in pinned) for pinned in (flat, single)]
host_bytes, loop_host_bytes = 8 * P + sum(rounded), 16 * P + rounded[1]  # 8: two moments; the loop pins what arrives alone
print(f"host: {20 * P / GB:.0f} GB as tensors, {host_bytes / GB:.0f} GB with pinned tensors rounded up (predicted)")

# %% [markdown]
# Of 128 GiB (137 GB) 135 leave too little for the system. With `PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1` tensors
# above 1 MB stay unrounded (PyTorch's source; not run).
#
# **What does a step take?** The next cell follows the source of DeepSpeed 0.19.8, one part after another. (By block the weights
# hide behind AdamW: 0.6 s less than here and in the picture.)
#
# | part | bytes a parameter | when |
# |---|---|---|
# | the gradients' sum comes up | 2, link | each micro-batch but the first |
# | the new sum goes down | 2, link | each micro-batch of several |
# | gradients go down in fp32 | 4, link | once |
# | clip, AdamW, make bf16 | 8 + 28 + 6, host memory | once |
# | weights come up | 2, link | once |
#
# `overlap_comm` would hide little: for sums DeepSpeed waits for each tensor's copy before the next (source; not run).
# The last cell's loop sends gradients beside backward, and the CPU adds them up: 6 bytes the first time, then 10. Its
# 125.5 GB fit the assumed two memory modules, of 64 GiB. Four, usual for 160 GB, run slower: see "host memory at half".

# %%
F, B = CARDS["RTX 4090"]
HOST = 2 / 3 * 2 * 8 * 5.6e9  # two channels of DDR5-5600, 8 bytes wide; that two thirds of it are reached is assumed


def full_step(texts, loop=False, F=F, B=B, HOST=HOST, P=P, all_texts=16, length=LENGTH):
    m = all_texts // texts
    same = {"compute": 8 * P * texts * length / F, "weights": 2 * P / B, "micro_batches": m, "beside": loop}
    if loop:  # clipping is 12 bytes here: torch scales gradients that are small enough, too
        return StepParts(up=0, down=2 * P / B, first_add=6 * P / HOST, add=10 * P / HOST, last_down=0, step=(12 + 28 + 6) * P / HOST, **same)
    each = 2 * P / B if m > 1 else 0
    return StepParts(up=each, down=each, first_add=0, add=0, last_down=4 * P / B, step=(8 + 28 + 6) * P / HOST, **same)


# %%
batch, base = Batch(sequences=16, sequence_length=LENGTH), {"recompute": "full", "micro_batch": 4}
deepspeed = {"offload": "optimizer", "framework": "deepspeed", "zero_stage": 2}
WAYS = {"QLoRA": (Plan(lora=Lora(base="nf4-dq"), framework="peft", **base), {}),
        "LoRA + offload": (Plan(lora=Lora(), offload="optimizer", framework="peft", **base), {}),
        "full + offload, 1 text": (Plan(**base | deepspeed | {"micro_batch": 1}), {"texts": 1}),
        "full + offload, 4 texts": (Plan(**base | deepspeed), {"texts": 4}),
        "full + offload, 8 texts, chunked loss": (Plan(**base | deepspeed | {"micro_batch": 8, "loss": "chunked"}), {"texts": 8}),
        "full + offload, 4 texts, the last cell's loop": (Plan(**base | deepspeed), {"texts": 4, "loop": True})}
largest = 2 * shape.vocabulary * shape.hidden  # bytes of the largest tensor
cluster = Cluster(gpu=gpu("RTX 4090"), nodes=1, gpus_per_node=1, host_memory_bytes=200 * GB)

# %%
def seconds(told, how, **rates):
    return step_lanes(full_step(**how, **rates))[1] if how else told.step_seconds * F / rates.get("F", F)


sheet = {}
for name, (plan, how) in WAYS.items():
    told = estimate(shape, cluster, plan, batch)
    own = 0 if not how else 3 * largest if how.get("loop") else 2 * 1e8 + largest  # gradients under way; or bucket and buffer
    card_bytes = told.peak.needed_bytes + own - told.peak.bytes_by_category.get(Category.COMMUNICATION, 0)
    on_link = sum(span.end_seconds - span.start_seconds for span in step_lanes(full_step(**how))[0]["link"]) if how else 0
    sheet[name] = {"card, GB": card_bytes / GB, "host, GB": (loop_host_bytes if how.get("loop") else host_bytes if how else told.host_bytes) / GB,
                   "crossing, GB": on_link * B / GB, "step, s": seconds(told, how)}
    for words, rate in {"link": {"B": B}, "host memory": {"HOST": HOST}, "GPU": {"F": F}}.items():
        slow, fast = (seconds(told, how, **{key: times * value for key, value in rate.items()}) for times in (0.5, 2))
        sheet[name][f"{words} at half, twice"] = f"{slow:.0f}, {fast:.0f}"
display(pd.DataFrame(sheet).T.style.format(precision=1).set_caption(
    f"Llama-2-7B, an RTX 4090 of {CARD / GB:.1f} GB, a host of {HOST / GB:.0f} GB/s, 16 texts a step, 4 at once unless the row says so, adapters of rank 8 on q and v, card with CUDA's context, predicted"))

# %%
whole, qlora = sheet["full + offload, 4 texts"], sheet["QLoRA"]
times = whole["step, s"] / qlora["step, s"]
print(f"Predicted. Full fine-tune: {2 * P / GB:.1f} GB of weights stay, {whole['card, GB']:.1f} GB at the peak; {whole['crossing, GB']:.0f} GB cross, {whole['step, s']:.0f} s a step.")
print(f"QLoRA: {qlora['card, GB']:.1f} GB at the peak, nothing crosses, {qlora['step, s']:.0f} s a step. The full step takes {times:.1f} times as long; your bet: {my_bet_times}.")
print("Predicted days for 50 million tokens:", {name: round(50e6 / batch.tokens * row["step, s"] / 86_400, 2) for name, row in sheet.items()})

# %% jupyter={"source_hidden": true}
lanes = {}
for name, how in {"1 text": {"texts": 1}, "4 texts": {"texts": 4}, "loop, 4 texts": {"texts": 4, "loop": True}}.items():
    lanes |= {f"{name}: {lane}": spans for lane, spans in step_lanes(full_step(**how))[0].items()}
show(draw_lanes(lanes, title="16 texts on an RTX 4090: DeepSpeed, the loop", evidence=Evidence.PREDICTED),
     alt="With 1 text at once the GPU waits for the link after each; with 4 it waits less; in the loop it waits for the CPU's sums")

# %% [markdown]
# **Beside published runs** of ZeRO-Offload on a V100 (its Figure 8): the same function at others' rates: 39 TFLOP/s
# (Megatron-LM, abstract), 12 GB/s (ZeRO-Infinity, section 5.2), two thirds of a socket's line rate.

# %%
V100 = {"F": published.V100_FLOPS_PER_SECOND, "B": published.PCIE_BYTES_PER_SECOND, "HOST": 2 / 3 * published.SOCKET_BYTES_PER_SECOND}
rows = {}
for row in table("zero_offload_throughput"):
    texts, count = int(row["micro_batch"]), published.parameters_of(int(row["layers"]), int(row["hidden"]))
    work = 8 * count * 512 // texts * texts * 1024 / 1e12
    rows[f"{row['params_b']} billion"] = {"texts at once": row["micro_batch"], "published": float(row["tflops"])}
    for name, loop in {"the loop's parts": True, "DeepSpeed 0.19.8's": False}.items():
        rows[f"{row['params_b']} billion"][name] = work / step_lanes(full_step(texts, loop, P=count, all_texts=512, length=1024, **V100))[1]
pd.DataFrame(rows).T.style.format(precision=1).set_caption("TFLOP/s of a V100 by ZeRO-Offload: published (read off the figure) and predicted")

# %% [markdown]
# **Read it.** The loop's parts, beside backward like the paper's, come within 11%: weak evidence, as 39 throughout comes within
# 15%, and two published rows exceed it. DeepSpeed 0.19.8's fall to 20% below; no published run checks them.
# Nearest is Liao's 45 on an RTX 4090, where weights move, too; our four texts make 65 (49 without recomputation).
#
# **The verdict.** If adapters are good enough, take QLoRA; offload is for runs that train all weights. The 1.9 times are 1.6
# with half of $F$, and 2.7 with twice. Fill the card first: with one text at once the link takes the largest share. (A
# link's bar is many slices within backward.) Eight texts with a loss in chunks
# ([lesson 05](05_checkpointing.ipynb); in `Trainer`, `use_liger_kernel=True`) halve the micro-batches; they fit by prediction,
# with 1.6 GB to spare. On one host the loop saves its memory, not time: what it hides it pays in sums on the CPU.
#
# **The script** of the full fine-tune; `by_block` replaces Trainer's two groups.


# %%
def zero_offload(on_gpu):
    """ZeRO-2 with the optimizer on the host; a bucket of 0.2 GB."""
    return {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_force_ds_cpu_optimizer": on_gpu,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000_000,  # elements
                                  "offload_optimizer": {"device": "cpu", "pin_memory": on_gpu}},
            "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto"}


# %%
run_text = script_text.run_text(LENGTH, big["gradients leave: 4 texts"].peak_bytes / GB)
here.write_script("offload.py", script_text.IMPORTS, zero_offload, by_block, script_text.PACKED, script_text.TRAINER, run_text)

# %% [markdown]
# It starts, saves and loads: one step of a tiny Llama, by torch's AdamW, nothing pinned.

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
# A loop clips before each step. Here gradients leave in backward. Predict the norm.

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
# **Diagnose it.** Nothing is clipped: no gradients are on the device any more. Clip where they are
# (DeepSpeed: `gradient_clipping`).
#
# ## Recap
#
# - 2 bytes a parameter stay on the card, and 16 or more go to the host (DeepSpeed with several micro-batches: 20). The start
#   must fit, too.
# - The link is free from $bF/(cB)$ tokens a micro-batch on, if transfers run beside compute.
# - ZeRO-2 on one GPU partitions nothing: its offload helps.
#
# ### Test yourself
#
# A full fine-tune of Llama-2-7B with offload on an H100, 64 micro-batches of 512 tokens a step, is much slower than its
# compute. What do you change first?
#
# <details><summary>Answer</summary>
#
# Take larger micro-batches. By DeepSpeed $m > 1$ of them send $4m + 4$ bytes a parameter: 260 with 64, and 20 with four of 8,192
# tokens. At 48 GB/s that is 36.5 s and 2.8 s; compute takes 3.9 s.
#
# </details>
#
# **Where next.** Do the [lab](../../labs/intermediate/07_offload.ipynb), in a copy: `make my-labs` makes one. Then compare
# with the [solution](../../solutions/intermediate/07_offload.ipynb).

# %% [markdown]
# ## On Monday
#
# **With transformers and DeepSpeed**: `torchrun --nproc-per-node 1 offload.py`.
#
# **In plain PyTorch**, also not run on a card, with a `model` in bf16, checkpointed, and its `loader`:
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
# crossing = 4 * MICRO_BATCHES + 4 if MICRO_BATCHES > 1 else 6  # bytes a parameter
# # An estimate: no part hides behind another, attention is left out, and the CPU's rate is that of torch's AdamW.
# print(f"a step by DeepSpeed, at least: {8 * P * TOKENS / F + crossing * P / B + 42 * P / HOST:.1f} s")
# ```
#
# **Look at** `torch.cuda.max_memory_allocated()` after a step: raise the micro-batch until the card is full.
