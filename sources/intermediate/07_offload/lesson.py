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
# **One question.** A full fine-tune of Llama-2-7B has 107.8 GB of states. What does it cost to train it on a card of
# 24 GB: how many bytes must stay on the card, how many cross the link, and how many seconds does a step take?
#
# **Promise.** You move states to host memory by hand, with equal losses, then by DeepSpeed, FSDP2 (PyTorch's own
# sharding) and `Trainer`, and leave with a script. New words: [glossary](../00_glossary.ipynb).
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 75 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | under a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# DeepSpeed's ZeRO-2 on **one** GPU, in bf16, with the optimizer offloaded. Of the 16 bytes of states per parameter,
# how many stay on the device between backward and the step? Write your guess. Section 4 counts.

# %%
my_bet_bytes = 4

# %% tags=["setup"]
from utils import setup

here = setup("intermediate/07")

# %% jupyter={"source_hidden": true}
import contextlib
import inspect
from functools import partial

import pandas as pd
import torch
from IPython.display import Code
from transformers import AutoModelForCausalLM

from evidence.validation import compare_all, summarize
from utils import (
    GB, Evidence, Transformer, check, draw_breakdown, draw_lanes, llama_config, measure, model_shape,
    run_ranks, scratch, show, simulate,
)

# %% jupyter={"source_hidden": true}
from utils.catalog import device as gpu
from utils.lessons.lesson_07 import by_libraries, streaming
from utils.lessons.lesson_07.by_libraries import SMALL, whole_loss
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
from utils.planner.offload import SCHEMES
from utils.planner.step_time.step_end import HOST_ADAM_SECONDS
from utils.techniques import op_problem
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.units import Category

batches = by_libraries.batches()
zero_problem, adam_problem, file_problem = deepspeed_problem(), op_problem("cpu-adam"), op_problem("async-io")
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__} is here.", *filter(None, (adam_problem, file_problem)), sep="\n")

# %% [markdown]
# ## 1. What can leave
#
# A step needs each *weight* in forward and again in backward. It needs a *gradient* from the moment backward makes
# it until the optimizer uses it. It needs the *optimizer state* (an fp32 master copy, two moments) once. What is
# needed least often leaves first
# ([Ren and others 2021](https://arxiv.org/abs/2101.06840), ZeRO-Offload).

# %%
shape = model_shape("llama-2-7b")
P, CARD = shape.parameter_count, gpu("RTX 4090").memory_bytes
weights, gradients, state = {Category.PARAMETERS: 2 * P}, {Category.GRADIENTS: 2 * P}, {Category.OPTIMIZER_STATE: 12 * P}
show(draw_sides({"nothing leaves": (weights | gradients | state, {}),
                 "the optimizer state leaves": (weights | gradients, state | {Category.GRADIENTS: 4 * P}),
                 "gradients leave, too": (weights, state | {Category.GRADIENTS: 4 * P})},
                title="States of Llama-2-7B, bf16 training", evidence=Evidence.PREDICTED, limit_bytes=CARD, limit="RTX 4090"),
     alt="On the card 107.8, 27.0 and 13.5 GB; in host memory 0, 107.8 and 107.8 GB; an RTX 4090 has 25.3 GB")

# %% [markdown]
# **Read it.** Only if each gradient leaves as soon as it is made is there room for activations. The host keeps gradients in
# fp32: 4 bytes where the card had 2.
#
# ## 2. By hand
#
# `Link` copies a tensor `down` to the host or `up` to the device, and counts the bytes. On a CPU both are
# the same memory: the meter then counts by *placement*. What is made inside of `host_memory()` is the host's.
#
# **Optimizer and gradients.** Master copies and moments live in host memory. A hook sends each gradient down as soon as
# backward has made it. After the CPU's step the weights come up.


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
        with host_memory():
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
# Weights are among them: they are on the device anyway, so here they stay. PyTorch's own form,
# `torch.autograd.graph.save_on_cpu(pin_memory=True)`, knows no such exception: it sends weights, too.


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
# **Weights, block by block.** They live on the host. `fetch` waits for one block's weights and asks for the next block's,
# which travel while this one computes. Forward keeps only the block's input; backward fetches and computes the block again,
# and sends its gradients down. This is the function, as it runs below:

# %%
Code(inspect.getsource(streaming.Streamed), language="python")

# %% [markdown]
# Each form trains the same model for 20 steps in fp32.


# %%
def prepared(form):
    torch.manual_seed(0)
    model, link, around, finish = Transformer(SMALL), Link(), contextlib.nullcontext, lambda: None
    if form == "weights":
        model.blocks, stream = streaming.stream_blocks(model.blocks, link)
        finish = stream.finish  # waits for the gradients
    if form.startswith("activations"):  # with no weights to know, all that is saved leaves, as by save_on_cpu
        around = partial(activations_on_host, [] if "weights" in form else list(model.parameters()), link)
    optimizer = HostAdamW(model.parameters(), link, lr=1e-3) if form == "optimizer, gradients" else \
        torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens, targets):
        model.zero_grad()
        with around():
            loss = whole_loss(model, tokens, targets)
        loss.backward()
        finish()
        optimizer.step()
        return loss.item()

    return model, getattr(optimizer, "inner", optimizer), step, link


# %%
def on_host(form, model, inner):
    there = [p for block in model.blocks for p in block.parameters()] if form == "weights" else []
    states = inner if form == "optimizer, gradients" else [inner.state[weight] for weight in there]
    return {"parameters": there, "optimizer state": states} if states else {}

# %%
losses, runs, rows = {}, {}, {}
for form in ("plain", "optimizer, gradients", "activations", "activations, saved weights", "weights"):
    model, inner, step, link = prepared(form)
    losses[form] = [step(*batch) for batch in batches]
    sent = {f"{way} a step, MB": link.bytes(way) / len(batches) / 1e6 for way in ("down", "up")}
    runs[form] = measure(partial(step, *batches[0]), model=model, optimizer=inner, timed_steps=0,
                         host=on_host(form, model, inner), name=form)
    link.close()
    apart = max(abs(a / b - 1) for a, b in zip(losses[form], losses["plain"], strict=True))
    assert apart <= 1e-6, f"{form} changes numbers: is a copy stale?"
    rows[form] = {"device peak, MB": runs[form].peak_bytes / 1e6, "in": runs[form].peak_phase,
                  "host peak, MB": (runs[form].host_bytes or 0) / 1e6, **sent}
    print(f"{form}: losses of {len(batches)} steps {apart:.0e} from the plain ones")

# %%
sides = {form: (run.breakdown, run.host.breakdown if run.host_timeline else {}) for form, run in runs.items()}
show(draw_sides(sides, title="A small transformer in fp32, peaks of a step", evidence=Evidence.MEASURED, unit_bytes=1e6, unit="MB"),
     alt="; ".join(f"{form}: {run.peak_bytes / 1e6:.1f} MB" for form, run in runs.items()))
pd.DataFrame(rows).T.style.format(precision=2).set_caption("measured; device and host are one memory here, told apart by placement")

# %% [markdown]
# **Read it.** The losses are equal: offload moves numbers and changes none. Activations go both ways, and without them the
# peak lies in the optimizer's step. To send the
# saved weights as well frees nothing and costs 43% more traffic. Streamed weights come up twice, and at most two blocks of
# them are on the device: in the last row they are the *communication buffers*, and *temporaries* are the block that is
# computed again with its gradients.
#
# ## 3. When does the link cost nothing?
#
# A pass of $c$ operations a parameter and token computes for $c P T / F$ seconds on $T$ tokens; to send $b$ bytes a
# parameter one way takes $b P / B$. So from $T = b F / (c B)$ tokens of a micro-batch on (what the card takes at once) the
# link is hidden. $F$ and $B$ are the speeds of card and link, the planner's for training, here and in section 5.
# Checkpointed, forward has $c = 2$, and backward 6. Gradients leave in backward: $b / c = 2 / 6$. Streamed weights come in
# both; forward decides: $2 / 2$.

# %%
CARDS = {name: training_speeds(shape, name) for name in ("RTX 4090", "A100 80GB", "H100")}
for name, (F, B) in CARDS.items():
    shares = F / gpu(name).peak_flops_per_second("bf16"), B / gpu(name).pcie.link_bytes_per_second
    print(f"{name}: F {F / 1e12:.0f} TFLOP/s, {shares[0]:.0%} of peak; B {B / GB:.1f} GB/s, {shares[1]:.0%} of line rate")

# %%
rows, behind_a_pass = {}, {"nothing leaves": 0, "gradients, too": 2 / 6, "weights, too": 2 / 2}  # b/c
for scheme in SCHEMES.values():
    down, up = scheme.link_bytes(P)
    rows[scheme.name] = {"card, GB": scheme.device_bytes * P / GB, "host, GB": scheme.host_bytes * P / GB, "down, GB": down / GB, "up, GB": up / GB}
    for name, (F, B) in CARDS.items():
        rows[scheme.name][f"hidden from, tokens ({name})"] = behind_a_pass.get(scheme.name, float("nan")) * F / B
display(pd.DataFrame(rows).T.rename_axis("what leaves").style.format(precision=0, thousands=",", na_rep="never").set_caption(
    "Llama-2-7B, a step of one micro-batch, predicted: both directions at once"))
print("saved inputs of blocks hide from this width on:", {name: round(F / (12 * B)) for name, (F, B) in CARDS.items()}, "; here", shape.hidden)

# %% [markdown]
# **Read it.** One text of 2,048 tokens is too short on each card, on the RTX 4090 by little. Half of the link's rate needs
# twice the tokens. *Never*: what moves when backward has ended. *States to and fro*: moments and masters come up so that the
# GPU does the step. That moves 6.5 times as many bytes as row two: so ZeRO-Offload steps on the CPU.
#
# **Activations need no large batch.** A checkpointed block of width $h$ saves $2h$ bytes a token and computes about $24h^2$
# operations on it, so they hide from $h = F / (12B)$ on. TRL: `activation_offloading=True`; torchtune: `OffloadActivations`.
#
# **What no batch hides in ZeRO-2**: the weights' way up, and the step itself. Two ways out: an update that comes a step late,
# or a step in pieces beside backward (SuperOffload, [Lian and others 2025](https://arxiv.org/abs/2509.21271)).
#
# ## 4. DeepSpeed and FSDP2
#
# ZeRO-2 *partitions* gradients and optimizer state over ranks. Here is one rank. The calls at work:
#
# ```python
# engine, *_ = deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-3), config={
#     "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True},
#     "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}})
# fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=True))  # FSDP2, for each block and the model
# ```
#
# `CPUOffloadPolicy` moves weights, too, as ZeRO-3 with both offloads does. A disk is one more link (`"nvme"`,
# ZeRO-Infinity). Each row is one `zero_optimization`, trained on 20 batches in bf16. *4 a step* adds up four micro-batches
# before each step; in the planted fault only the first counts. *By block* gives each block a parameter group of its own.

# %%
cpu = {"device": "cpu"}
offloaded = {"stage": 2, "offload_optimizer": cpu}
ARMS = {"ZeRO-2": {"stage": 2}, "ZeRO-2, offloaded": offloaded, "ZeRO-2, offloaded, by block": offloaded | {"by_block": True},
        "ZeRO-2, 4 a step": {"stage": 2, "micro_batches": 4},
        "ZeRO-2, offloaded, by block, 4 a step": offloaded | {"by_block": True, "micro_batches": 4},
        "the same, fault planted, 4 a step": offloaded | {"by_block": True, "micro_batches": 4, "only_first": True},
        "ZeRO-3, offloaded": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}}
with scratch("lesson-07") as folder:  # more rows where DeepSpeed's own Adam, and its way to files, are built
    ARMS |= by_libraries.more_arms(str(folder), adam=not adam_problem, files=not file_problem)
    found = {} if zero_problem else run_ranks(by_libraries.by_deepspeed, 1, ARMS, str(folder), timeout_seconds=900)[0]

# %%
rows = {}
for name, run in found.items():
    rows[name] = {"device": run.device_each, "host": run.host_each, "clone at start": run.start_each}
    rows[name] |= {"file": run.file_each} if run.file_each else {}
    plain = found["ZeRO-2, 4 a step" if "4 a step" in name else "ZeRO-2"].losses
    off = [abs(a / b - 1) for a, b in zip(run.losses, plain, strict=True)]
    rows[name] |= {"losses apart": f"{max(off):.0e}", "equal until step": str(next((n for n, each in enumerate(off) if each), len(off)))}
    within = torch.finfo(torch.bfloat16).eps / 4 if "CPUAdam" in name else 5e-4  # it rounds in another order
    assert "fault" in name or max(off) <= within, f"{name} trains another model than ZeRO-2: same seed?"
display(pd.DataFrame(rows).T.style.format(precision=2, na_rep="").set_caption(f"bytes per parameter, measured: device and host between backward and step; clone at start: on the card, with ZeRO-3 on the host; your bet for row two: {my_bet_bytes}"))
sharded = run_ranks(by_libraries.by_fsdp, 1, timeout_seconds=900)[0]
apart = max(abs(a / b - 1) for a, b in zip(sharded, losses["plain"], strict=True))
print(f"FSDP2 with CPUOffloadPolicy, fp32: losses {apart:.0e} from the plain run of section 2")
assert apart <= 1e-6, "FSDP2 trains another model: same seed?"

# %% [markdown]
# **Read it.** Row two keeps 2 bytes, the bf16 weights, and a buffer as large as the largest tensor: gradients have left.
# Its losses equal row one's at first; which operation rounds later is not shown. Its host holds 16 bytes, and a bf16 copy
# for the way up. The bf16 sum of several micro-batches lies there too, and comes up to be added to (DeepSpeed 0.19.8,
# `stage_1_and_2.py`). ZeRO-3 leaves a *bucket* on the card, in which it gathers gradients.
#
# **Check your version.** With offload, DeepSpeed silently dropped all gradients but the first micro-batch's from
# [#6550](https://github.com/deepspeedai/DeepSpeed/pull/6550) (September 2024) to
# [#7967](https://github.com/deepspeedai/DeepSpeed/pull/7967) (April 2026). The planted fault shows how far losses then drift.
#
# **Question.** What does ZeRO-2 save on one GPU *without* offload, in bytes per parameter?

# %%
saved_without_offload = ...
check("07.without_offload", saved_without_offload)

# %% [markdown]
# **Around adapters there is little to gain.** Adapters with 20 million fp32 parameters train with AdamW. How many GB
# does it free to offload the optimizer state?

# %%
freed_gb = ...
check("07.offloaded_gigabytes", freed_gb)

# %%
if not zero_problem:
    lora = run_ranks(by_libraries.adapters_by_deepspeed, 1, {name: ARMS[name] for name in list(ARMS)[:2]}, timeout_seconds=900)[0]
    assert lora["ZeRO-2"].losses == lora["ZeRO-2, offloaded"].losses, "offload moves states and changes no number: same seed?"
per_block = {"two": 4 * shape.hidden, "all seven": 8 * shape.hidden + 3 * (shape.hidden + shape.feedforward)}
for rank, targets_of in ((8, "two"), (8, "all seven"), (256, "all seven")):
    moving = 12 * rank * shape.layers * per_block[targets_of]  # master copy and two moments
    print(f"7B, rank {rank} on {targets_of} matrices of a block: {moving / GB:.2f} GB can move ({Evidence.PREDICTED})")

# %% [markdown]
# **`Trainer`** takes either by one argument. DeepSpeed's stands in section 5's script. FSDP must know what to gather at a
# time: the class of a block. Adapters on two ranks, offloaded:

# %%
fsdp = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_offload": True}}
apart, wrapper = by_libraries.trainer_on_ranks(fsdp)
print(f"{wrapper} on 2 ranks: losses {apart:.0e} from those of one process with the same batches")
assert apart < 1e-5, "FSDP trains another model: same seed, same batches?"

# %% [markdown]
# ## 5. The scenario as asked
#
# *"A 7B model on our 24 GB card, by PEFT and with offload."* One RTX 4090, steps of 16 texts of 2,048 tokens, 50 million
# tokens in all. **Does it fit?** Every block checkpointed, bf16 weights. By formula, where backward begins: 2 bytes a
# parameter; for each text of a micro-batch, an input for each block, and 12 bytes a logit: fp32 log-probabilities, their
# gradient, and that of the logits.

# %%
LENGTH = 2048
a_text = 2 * LENGTH * shape.hidden * shape.layers + 12 * LENGTH * shape.vocabulary

# %%
def full(gradients_leave):
    model = AutoModelForCausalLM.from_config(llama_config(shape), dtype=torch.bfloat16).train()
    enable_checkpointing(model)
    adam = torch.optim.AdamW(model.parameters())
    return model, OffloadedOptimizer(adam, master_dtype=torch.float32, gradients_leave=gradients_leave)

# %%
names = {"optimizer state leaves, 1 text": (False, 1), "gradients leave, 1 text": (True, 1), "gradients leave, 4 texts": (True, 4)}
big = {name: simulate(lambda: full(leave), lambda m, o: finetune_step(m, o, texts, LENGTH), device="RTX 4090", name=name)
       for name, (leave, texts) in names.items()}
for name, (_, texts) in list(names.items())[1:]:
    expected = 2 * P + texts * a_text
    print(f"{name}: {expected / GB:.2f} GB predicted, {big[name].peak_bytes / GB:.2f} simulated, in {big[name].peak_phase}")
    assert abs(big[name].peak_bytes / expected - 1) < 0.03, "2 bytes a parameter and activations: what else stays?"
print(f"host: {big[name].host_bytes / GB:.0f} GB simulated; as DeepSpeed holds it, {18 * P / GB:.0f} or {20 * P / GB:.0f} GB")

# %% [markdown]
# **Before the first step there is the start.** To make fp32 masters, ZeRO-2 clones the weights of one parameter group after
# another, on the card. This is the line of the DeepSpeed installed here. `start_up` does the same on a simulated card: with
# all weights in one group, as is usual, and with a group for each block.

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
show(draw_breakdown([*starts.values(), *big.values()], limit=f"{CARD / GB:.1f}GB", unit="GB", title="Llama-2-7B: start and step"),
     alt="; ".join(f"{name}: {run.peak_bytes / GB:.1f} GB" for name, run in (starts | big).items()))
for name, run in starts.items():
    print(f"{name}: {run.peak_bytes / GB:.1f} GB of {CARD / GB:.1f}: {'fits' if run.peak_bytes < CARD else 'out of memory'} (simulated)")

# %% [markdown]
# **Read it.** Four texts fit, and the usual start does not: twice the weights are on the card at once. With a group for each
# block the clone is one block, as *by block* of section 4 measured in small. A bucket comes on top: 1 GB by
# [default](https://www.deepspeed.ai/docs/config-json/), a fifth of it in the script.
#
# **What does a step take?** What crosses is as in DeepSpeed's source: with several micro-batches, each sends the gradients' sum
# down, and each but the first brings it up; once a step gradients go down in fp32, and weights come up. ZeRO-2 sends beside
# backward with `overlap_comm`, off by default: here all waits for all.

# %%
batch, base = Batch(sequences=16, sequence_length=LENGTH), {"recompute": "full", "micro_batch": 4}
ways = {"QLoRA": Plan(lora=Lora(base="nf4-dq"), framework="peft", **base),
        "LoRA + offload": Plan(lora=Lora(), offload="optimizer", framework="peft", **base),
        **{f"full + offload, {each}": Plan(offload="optimizer", framework="deepspeed", zero_stage=2, **base | {"micro_batch": texts})
           for each, texts in (("1 text", 1), ("4 texts", 4))}}

F, B = CARDS["RTX 4090"]

# %%
def step_parts(plan, link=1.0, speed=1.0):
    told = estimate(shape, Cluster(gpu=gpu("RTX 4090"), nodes=1, gpus_per_node=1, host_memory_bytes=160 * GB), plan, batch)
    if plan.zero_stage != 2:
        return told, StepParts(told.step_seconds / speed, 0, 0, 0, 0)  # adapters: their states are too few to count
    m = batch.sequences // plan.micro_batch
    sums = 2 * m + 2 * (m - 1) if m > 1 else 0  # bytes a parameter: m times down, m - 1 times up
    on_link = (each * P / (link * B) for each in (sums, 4, 2))
    return told, StepParts((told.step_seconds - told.time.optimizer) / speed, *on_link, HOST_ADAM_SECONDS * P)


# %%
sheet, at = {}, {"as is": {}, "half link": {"link": 0.5}, "twice link": {"link": 2}, "half GPU": {"speed": 0.5}, "twice GPU": {"speed": 2}}
for name, plan in ways.items():
    told, parts = step_parts(plan)
    step = big.get(name.replace("full + offload", "gradients leave"))
    sheet[name] = {"card, GB": (step.peak_bytes if step else told.peak.needed_bytes) / GB, "host, GB": 20 * P / GB if step else told.host_bytes / GB,
                   "crossing, GB": (parts.sums + parts.down + parts.up) * B / GB}
    sheet[name] |= {f"step, s, {words}": sum(step_parts(plan, **change)[1]) for words, change in at.items()}
display(pd.DataFrame(sheet).T.style.format(precision=1).set_caption(
    "Llama-2-7B, an RTX 4090, 16 texts a step, 4 at once unless the row says 1, predicted (card of the full rows: simulated)"))
days = {name: round(50e6 / batch.tokens * row["step, s, as is"] / 86_400, 2) for name, row in sheet.items()}
print("days for 50 million tokens:", days, "\ntimes QLoRA's:", {name: round(each / days["QLoRA"], 1) for name, each in days.items()})

# %%
lanes = {}
for name, texts, beside in (("16 x 1", 1, False), ("4 x 4", 4, False), ("4 x 4, beside", 4, True)):
    drawn, end = step_lanes(step_parts(ways[f"full + offload, {texts} text{'s' * (texts > 1)}"])[1], 16 // texts, beside=beside)
    lanes |= {f"{name}: {lane}": spans for lane, spans in drawn.items()}
    print(f"{name}: {end:.1f} s")
show(draw_lanes(lanes, title="One step of 16 texts, full fine-tune", evidence=Evidence.PREDICTED, device="RTX 4090"),
     alt="16 micro-batches of 1 text wait long for the link, 4 of 4 texts less; beside backward, the link is hidden nearly all")

# %% [markdown]
# **Read it.** With one text at once the step is mostly link; with four, mostly GPU. So fill the card first. `overlap_comm` can
# hide what travels beside backward, not the step's end. Measure your link before you promise days: the last cell has the lines.
#
# **How far off may such seconds be?** The same terms beside what was published for V100. Table 4 is predicted from the bytes
# that Adam moves; the step above takes 0.25 s for 10^9 parameters, rounded from it.

# %%
summaries = summarize(compare_all(("offload",)))
for row in summaries:
    print(f"{row.source:<26}{row.quantity:<24}{row.rows:>2} rows, mean error {row.mean:.1%}, bias {row.bias:+.1%}")
    assert row.mean <= 0.15, f"{row.source}: the prediction is off; which rate is not the published one?"

# %% [markdown]
# **Read it.** Good to a tenth there: enough for the full fine-tune, not to tell QLoRA from LoRA. No row has an RTX 4090 or bf16.
#
# **The script.** For adapters, lesson 06 writes it. Here is that of the full fine-tune. Four traps it avoids:
#
# - **The start.** `by_block`, in place of Trainer's two groups.
# - **Pageable memory.** The system may move ordinary host memory; *pinned* memory stays, and only it is copied at the link's
#   rate: [6 times faster](https://github.com/deepspeedai/DeepSpeed/pull/5301) up, on one GPU (published). DeepSpeed 0.19.8
#   pins by default. Leave room: PyTorch [rounds](https://github.com/pytorch/pytorch/issues/150517) a pinned tensor up to a
#   power of two.
# - **Loading before the arguments.** `TrainingArguments` come first, so that the model is loaded for DeepSpeed.
# - **One core.** From two processes on, `torchrun` sets `OMP_NUM_THREADS=1`: set it to your cores divided by the processes.


# %%
def zero_offload(on_gpu):
    """ZeRO-2 with the optimizer on the host; buckets of 0.2 GB."""
    return {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_force_ds_cpu_optimizer": on_gpu,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000_000,  # elements
                                  "offload_optimizer": {"device": "cpu", "pin_memory": on_gpu}},
            "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto"}


# %% jupyter={"source_hidden": true}
IMPORTS = """# pip install torch transformers accelerate deepspeed      texts.txt: one text a line
# torchrun --nproc-per-node 1 offload.py [model]
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

if torch.cuda.is_available():  # compiled at its first start: that needs a compiler
    from deepspeed.ops.adam import DeepSpeedCPUAdam as Adam
else:
    from torch.optim import AdamW as Adam
"""


def packed(tokenizer, texts, length):
    """Texts one after the other, cut into pieces of one length: no padding."""
    ids = [token for text in texts for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


# %%
MAIN = """class ByBlock(Trainer):
    def create_optimizer(self, model=None):
        groups = [{"params": group} for group in by_block(self.model)]
        self.optimizer = Adam(groups, lr=self.args.learning_rate, weight_decay=self.args.weight_decay)
        return self.optimizer
"""

# %%
RUN = """if __name__ == "__main__":
    base, on_gpu = (sys.argv[1:] or ["meta-llama/Llama-2-7b-hf"])[0], torch.cuda.is_available()
    pieces = packed(AutoTokenizer.from_pretrained(base), Path("texts.txt").read_text().splitlines(), LENGTH)
    arguments = TrainingArguments(  # first: what is loaded after it knows of DeepSpeed
        "tuned", deepspeed=zero_offload(on_gpu), bf16=True, use_cpu=not on_gpu, learning_rate=1e-5, num_train_epochs=1,
        per_device_train_batch_size=4, gradient_accumulation_steps=4, gradient_checkpointing=True, logging_steps=1,
        save_strategy="epoch", save_only_model=True,  # False: to resume, 12 bytes a parameter more on disk
        report_to="none")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    ByBlock(model, arguments, default_data_collator, pieces).train()
    print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB (allocated); simulated for Llama-2-7B: PEAK GB, buckets apart")
"""
RUN = RUN.replace("LENGTH", str(LENGTH)).replace("PEAK", f"{big['gradients leave, 4 texts'].peak_bytes / GB:.1f}")
here.write_script("offload.py", IMPORTS, zero_offload, by_block, packed, MAIN, RUN)

# %% [markdown]
# The same file, one step on a tiny Llama:

# %%
if not zero_problem:
    with scratch("lesson-07-script") as folder:
        ran = run_small(here.root / "build" / "lesson-07" / "offload.py", folder, LENGTH)
    print("loss:", *ran.losses, "\nsaved:", *ran.saved)
    assert ran.losses and ran.saved, "the script ended, and trained or saved nothing"

# %% [markdown]
# **Not shown**: the script on a card, where it prints its own peak.

# %% [markdown]
# ## Break it, diagnose it
#
# A loop clips its gradients before each step. Here gradients leave in backward. Predict the norm.

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
# **Diagnose it.** Nothing fails, and nothing is clipped: there are no gradients on the device any more. Clip where they
# are. DeepSpeed does so itself, by its setting `gradient_clipping`.
#
# ## Recap
#
# - Needed least often leaves first: optimizer state, then gradients, then weights. 2 bytes per parameter stay, or two
#   blocks; the host takes 16 to 20. The start must fit as well as the step.
# - The link is free from $bF/(cB)$ tokens a micro-batch on, if transfers run beside compute; around the step never.
# - ZeRO-2 on one GPU partitions nothing: its offload is what helps. Adapters of rank 8 have
#   almost nothing to offload.
#
# ### Test yourself
#
# A full fine-tune of Llama-2-7B on an H100, optimizer and gradients offloaded, is much slower than its compute.
# A step has 64 micro-batches of 512 tokens. What do you change first, and what do you look at next?
#
# <details><summary>Answer</summary>
#
# Gradients go down in every micro-batch, and 512 tokens are far below section 3's bound for this card. Take micro-batches
# of 8,192 tokens: a sixteenth of the transfers. Then look at the CPU step and the weights' way up.
#
# </details>
#
# **Where next.** Do the [lab](../../labs/intermediate/07_offload.ipynb), in a copy: `make my-labs` makes one. Then compare
# with the [solution](../../solutions/intermediate/07_offload.ipynb).
#
# **Reference.** Rajbhandari and others 2021, *ZeRO-Infinity*, [arXiv:2104.07857](https://arxiv.org/abs/2104.07857).

# %% [markdown]
# ## On Monday
#
# `offload.py` is the recipe for transformers and DeepSpeed: start it by `torchrun --nproc-per-node 1 offload.py`.
# **Plain PyTorch.** You have a `model` in bf16 on the card, checkpointed, and its `loader`. Gradients leave beside backward,
# on a stream of their own, into pinned memory; the CPU does the step:
#
# ```python
# import torch
#
# MICRO_BATCHES, side = 4, torch.cuda.Stream()
# masters = {p: p.detach().to("cpu", torch.float32, copy=True) for p in model.parameters()}
# arrived = {p: torch.empty_like(p, device="cpu", pin_memory=True, requires_grad=False) for p in masters}
# optimizer = torch.optim.AdamW(masters.values(), lr=1e-5, fused=True)
#
# def leave(p):
#     side.wait_stream(torch.cuda.current_stream())  # until this gradient is computed
#     with torch.cuda.stream(side):
#         arrived[p].copy_(p.grad, non_blocking=True)
#     p.grad.record_stream(side)  # its memory is not used again before the copy has ended
#     p.grad = None
#
# for p in masters:
#     p.register_post_accumulate_grad_hook(leave)
#
# for number, batch in enumerate(loader, 1):
#     (model(**batch).loss / MICRO_BATCHES).backward()
#     side.synchronize()  # until all gradients have arrived
#     for p, master in masters.items():
#         gradient = arrived[p].to(torch.float32, copy=True)
#         master.grad = gradient if master.grad is None else master.grad.add_(gradient)
#     if number % MICRO_BATCHES == 0:
#         torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)  # where the gradients are
#         optimizer.step()
#         optimizer.zero_grad()
#         with torch.no_grad():
#             for p, master in masters.items():
#                 p.copy_(arrived[p].copy_(master))  # by way of the pinned tensor
# ```
#
# **Your link.** The rate of section 5; pageable memory shows what pinning is worth:
#
# ```python
# import time
# import torch
#
# for pinned in (False, True):
#     host = torch.empty(2**28, pin_memory=pinned).fill_(1)  # 1 GiB
#     card = torch.empty(2**28, device="cuda").fill_(1)
#     for way, to, source in (("down", host, card), ("up", card, host)):
#         torch.cuda.synchronize()
#         start = time.perf_counter()
#         to.copy_(source)
#         torch.cuda.synchronize()
#         print(f"{way}, pinned {pinned}: {source.nbytes / (time.perf_counter() - start) / 1e9:.1f} GB/s")
# ```
#
# **Look at** `torch.cuda.max_memory_allocated()`, near 2 bytes a parameter, activations and buckets: raise the micro-batch
# until the card is full. On the host 20 bytes a parameter must be free.
