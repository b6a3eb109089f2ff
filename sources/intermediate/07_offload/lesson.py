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
# sharding) and `Trainer`. You compute what the link costs, and leave with a script. New words stand in the
# [glossary](../00_glossary.ipynb).
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
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
from IPython.display import Code
from transformers import AutoModelForCausalLM

from evidence.validation import compare_all, summarize
from utils import (
    GB, Evidence, Transformer, check, draw_breakdown, draw_lanes, llama_config, measure, model_shape,
    predicted, run_ranks, score, scoreboard, scratch, show, simulate,
)

# %% jupyter={"source_hidden": true}
from utils.catalog import device as gpu
from utils.lessons.lesson_07 import by_libraries, streaming
from utils.lessons.lesson_07.by_libraries import SMALL, whole_loss
from utils.lessons.lesson_07.link import Link
from utils.lessons.lesson_07.offload import OffloadedOptimizer
from utils.lessons.lesson_07.small_run import run_small
from utils.lessons.lesson_07.waiting import arrivals, planned
from utils.lessons.lesson_07.validation_figures import draw_validation
from utils.memory import host_memory
from utils.models.finetune import finetune_step
from utils.models.pretrained import enable_checkpointing
from utils.planner import Batch, Cluster, Lora, Plan, estimate
from utils.planner.step_time.collectives import bandwidth_in_training
from utils.planner.offload import SCHEMES
from utils.planner.step_time.step_end import HOST_ADAM_SECONDS
from utils.techniques import op_problem
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed

batches = by_libraries.batches()
zero_problem, adam_problem, file_problem = deepspeed_problem(), op_problem("cpu-adam"), op_problem("async-io")
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__} is here.", *filter(None, (adam_problem, file_problem)), sep="\n")

# %% [markdown]
# ## 1. What can leave
#
# A step needs each *weight* in forward and again in backward. It needs a *gradient* from the moment backward makes
# it until the optimizer uses it. It needs the *optimizer's states* (fp32 master copy, two moments) once. What is needed
# least often leaves first ([Ren and others 2021](https://arxiv.org/abs/2101.06840), ZeRO-Offload).

# %%
shape = model_shape("llama-2-7b")
P = shape.parameter_count
kept = {
    "nothing leaves": {"parameters": 2 * P, "gradients": 2 * P, "optimizer state": 12 * P},
    "the optimizer leaves": {"parameters": 2 * P, "gradients": 2 * P},
    "gradients leave, too": {"parameters": 2 * P}}
bars = [predicted(name, parts) for name, parts in kept.items()]
show(draw_breakdown(bars, limit="24GB", unit="GB", title="States of Llama-2-7B on the card, bf16 training"),
     alt="; ".join(f"{name}: {sum(parts.values()) / GB:.1f} GB" for name, parts in kept.items()))

# %% [markdown]
# **Read it.** For 24 GB it is not enough that the optimizer leaves. If each gradient leaves as it is made, there is room
# for activations.
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
# **Weights, block by block.** They live on the host. `fetch` waits for one block's weights and asks for those of the
# `following` block, so that they travel while this one computes. Forward keeps only the block's input; backward fetches
# the block again, computes it again, and sends its gradients down. This is the function, as it runs below:

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
show(draw_breakdown(list(runs.values()), unit="MB", title="A small transformer in fp32, each form at its own peak"),
     alt="; ".join(f"{form}: {run.peak_bytes / 1e6:.1f} MB" for form, run in runs.items()))
pd.DataFrame(rows).T.style.format(precision=2).set_caption("measured; device and host are one memory here, told apart by placement")

# %% [markdown]
# **Read it.** The losses are equal: offload moves numbers, it does not change them. The optimizer sends all gradients
# down and all weights up. Activations go both ways, and without them the peak lies in the optimizer's step. To send the
# saved weights as well frees nothing and costs 44% more traffic. Streamed weights come up twice, and two blocks of them at
# most are on the device.
#
# ## 3. When does the link cost nothing?
#
# A pass of $c$ operations a parameter and token computes for $c P T / F$ seconds on $T$ tokens; to send $b$ bytes a
# parameter one way takes $b P / B$. So the link is hidden from $T = b F / (c B)$ tokens of a micro-batch on. $F$ is the
# card's speed, $B$ the link's; $P$ cancels. Checkpointed, forward has $c = 2$, and backward, which computes forward again, 6.
# Gradients leave in backward: $b / c = 2 / 6$. Streamed weights come in both; forward, the shorter, decides: $2 / 2$.

# %%
rows, behind_a_pass = [], {"nothing leaves": 0, "gradients, too": 2 / 6, "weights, too": 2 / 2}  # b/c
for scheme in SCHEMES.values():
    down, up = scheme.link_bytes(P)
    row = {"what leaves": scheme.name, "card, GB": scheme.device_bytes * P / GB, "host, GB": scheme.host_bytes * P / GB,
           "down, GB": down / GB, "up, GB": up / GB}
    for name in ("RTX 4090", "A100 80GB", "H100"):
        card = gpu(name)
        tokens_each = card.peak_flops_per_second("bf16") / 2 / card.pcie.link_bytes_per_second  # F/B
        row[f"hidden from, tokens ({name})"] = behind_a_pass.get(scheme.name, float("nan")) * tokens_each
    rows.append(row)
pd.DataFrame(rows).set_index("what leaves").style.format(precision=0, thousands=",", na_rep="never").set_caption(
    "Llama-2-7B, a step of one micro-batch, predicted: half of the peak FLOP/s, the link's line rate, both directions at once")

# %% [markdown]
# **Read it.** One text of 2,048 tokens hides its gradients on the first two cards, and not on an H100. Half of the link's
# rate needs twice the tokens. *Never*: optimizer state alone leaves gradients on the card until backward has ended.
# States sent to and fro, so that the GPU can do the step, are seven times as many bytes: so ZeRO-Offload steps on the CPU.
#
# **Two things no batch hides**: what moves around the optimizer's step (weights up; in row two gradients, too), and the
# step itself, 2.57 s for 10 billion parameters (published, Ren and others, Table 4). Only an update that comes a
# step late, the paper's other offer, hides them.
#
# Streamed weights in forward, below and above the table's 2,622 tokens.

# %%
card, layers = gpu("RTX 4090"), 8
transfer = 2 * P / shape.layers / card.pcie.link_bytes_per_second
lanes = {}
for name, tokens, ahead in (("512 tokens", 512, True), ("3,072 tokens", 3072, True), ("3,072, not ahead", 3072, False)):
    compute = 2 * P / shape.layers * tokens / (card.peak_flops_per_second("bf16") / 2)
    lanes[f"{name}: link"], lanes[f"{name}: GPU"] = planned(compute, transfer, layers, ahead=ahead)
show(draw_lanes(lanes, title="Forward through 8 blocks of Llama-2-7B at line rate, weights streamed", evidence=Evidence.PREDICTED, device="RTX 4090"),
     alt="512 tokens: the GPU waits for the link; 3,072 tokens: the link waits for the GPU; without prefetch both wait")
for name, found in arrivals().items():
    print(f"a real step behind a slowed link, {name}: {found} (measured)")
    assert bool(found.behind_compute) == (name == "one ahead"), "only what is asked for ahead travels behind compute"

# %% [markdown]
# **Read it.** At 512 tokens the GPU mostly waits for the link, at 3,072 the link for the GPU. Not asked for ahead, each
# waits for the other; the real step, on this CPU, says the same.
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
# ZeRO-Infinity). Each row is one `zero_optimization`, trained on 20 batches in bf16.

# %%
cpu = {"device": "cpu"}
ARMS = {"ZeRO-2": {"stage": 2}, "ZeRO-2, offloaded": {"stage": 2, "offload_optimizer": cpu},
        "ZeRO-2, offloaded, 4 batches a step": {"stage": 2, "offload_optimizer": cpu, "micro_batches": 4},
        "ZeRO-3, offloaded": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}}
if not adam_problem:
    ARMS["ZeRO-2, offloaded, DeepSpeedCPUAdam"] = {**ARMS["ZeRO-2, offloaded"], "own_adam": True}
with scratch("lesson-07") as folder:
    if not file_problem:
        file = {"device": "nvme", "nvme_path": str(folder)}
        weights = file | {"buffer_size": 1_000_000}  # elements; by default 1e8
        ARMS["ZeRO-Infinity, a file"] = {"stage": 3, "offload_optimizer": file, "offload_param": weights}
    found = {} if zero_problem else run_ranks(by_libraries.by_deepspeed, 1, ARMS, str(folder), timeout_seconds=900)[0]

# %%
rows = {}
for name, run in found.items():
    rows[name] = {"device": run.device_each, "host": run.host_each} | ({"file": run.file_each} if run.file_each else {})
    if "batches" in name:
        continue  # fewer steps, other losses
    off = [abs(a / b - 1) for a, b in zip(run.losses, found["ZeRO-2"].losses, strict=True)]
    apart = max(off)
    rows[name] |= {"losses apart": f"{apart:.0e}", "equal from the start": str(next((n for n, each in enumerate(off) if each), len(off)))}
    within = torch.finfo(torch.bfloat16).eps / 4 if "CPUAdam" in name else 5e-4  # it rounds in another order
    assert apart <= within, f"{name} trains another model than ZeRO-2: same seed?"
display(pd.DataFrame(rows).T.style.format(precision=2, na_rep="").set_caption(f"bytes per parameter between backward and step, measured; your bet for row two: {my_bet_bytes}"))
sharded = run_ranks(by_libraries.by_fsdp, 1, timeout_seconds=900)[0]
apart = max(abs(a / b - 1) for a, b in zip(sharded, losses["plain"], strict=True))
print(f"FSDP2 with CPUOffloadPolicy, fp32: losses {apart:.0e} from the plain run of section 2")
assert apart <= 1e-6, "FSDP2 trains another model: same seed?"

# %% [markdown]
# **Read it.** Row two keeps 2 bytes, the bf16 weights, and a buffer as large as the largest tensor: gradients have left.
# Its losses equal row one's at first, then differ by roundings. Its host holds fp32 gradients, copies and moments, 16 bytes, and 2 more: a bf16 copy for the way up. Where a step adds up
# several batches, their sum lies there as well, 2 bytes in bf16, and comes up to be added to (DeepSpeed 0.19.8,
# `stage_1_and_2.py`). ZeRO-3's 20 are the 16, the bf16 weights that have left, and bf16 gradients; its bucket stays.
#
# **Question.** What does ZeRO-2 save on one GPU *without* offload, in bytes per parameter?

# %%
saved_without_offload = ...
check("07.without_offload", saved_without_offload)

# %% [markdown]
# **Around adapters there is little to gain.** Adapters with 20 million fp32 parameters train with AdamW. How many GB
# does it free to offload the optimizer state? (The next cell counts DeepSpeed's master copy as well.)

# %%
freed_gb = ...
check("07.offloaded_gigabytes", freed_gb)

# %%
if not zero_problem:
    lora = run_ranks(by_libraries.adapters_by_deepspeed, 1, {name: ARMS[name] for name in list(ARMS)[:2]}, timeout_seconds=900)[0]
    assert lora["ZeRO-2"].losses == lora["ZeRO-2, offloaded"].losses, "offload moves states and changes no number: same seed?"
    print("LoRA with ZeRO-2 and offload: the same losses, to the last bit")
per_block = {"two": 4 * shape.hidden, "all seven": 8 * shape.hidden + 3 * (shape.hidden + shape.feedforward)}
for targets_of, ends in per_block.items():
    moving = 12 * 8 * shape.layers * ends  # master copy and two moments
    print(f"7B, rank 8 on {targets_of} matrices of a block: {moving / GB:.2f} GB can move ({Evidence.PREDICTED})")

# %% [markdown]
# **`Trainer`** takes either by one argument. DeepSpeed's stands in section 5's script. FSDP must know what to gather at a
# time: the class of a block. Adapters on two ranks, offloaded:

# %%
fsdp = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_offload": True}}
plain_losses, _ = run_ranks(by_libraries.by_trainer, 1, {"ddp_find_unused_parameters": False}, timeout_seconds=900)[0]
sharded, wrapper = run_ranks(by_libraries.by_trainer, 2, fsdp, timeout_seconds=900)[0]
apart = max(abs(a / b - 1) for a, b in zip(sharded, plain_losses, strict=True))
print(f"{wrapper} on 2 ranks: losses {apart:.0e} from those of one process")
assert apart < 1e-5, "FSDP trains another model: same seed, same batches on every rank?"

# %% [markdown]
# ## 5. The scenario as asked
#
# *"A 7B model on our 24 GB card, by PEFT and with offload."* One RTX 4090, steps of 16 texts of 2,048 tokens, 50 million
# tokens in all. **Does it fit?** Every block checkpointed, bf16 weights. By formula, where backward begins: 2 bytes a
# parameter; for each text that runs at once, an input for each block, and 12 bytes a logit: fp32 log-probabilities, their
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


names = {"optimizer offloaded": (False, 1), "gradients leave, too": (True, 1), "gradients leave, 4 texts": (True, 4)}
big = {name: simulate(lambda: full(leave), lambda m, o: finetune_step(m, o, texts, LENGTH), device="RTX 4090", name=name)
       for name, (leave, texts) in names.items()}
show(draw_breakdown(list(big.values()), limit="24GB", unit="GB", title="Llama-2-7B, all weights trained, texts of 2,048 tokens"),
     alt="; ".join(f"{name}: {run.peak_bytes / GB:.1f} GB" for name, run in big.items()))
for name, (_, texts) in list(names.items())[1:]:
    expected = 2 * P + texts * a_text
    print(f"{name}: {expected / GB:.2f} GB predicted, {big[name].peak_bytes / GB:.2f} simulated, in {big[name].peak_phase}")
    assert abs(big[name].peak_bytes / expected - 1) < 0.03, "2 bytes a parameter and activations: what else stays?"
print(f"host: {big[name].host_bytes / GB:.0f} GB simulated; as DeepSpeed holds it, {18 * P / GB:.0f} or {20 * P / GB:.0f} GB")

# %% [markdown]
# **Read it.** Four texts fit, and the host pays. DeepSpeed's buckets come on top: 5e8 elements each by
# [default](https://www.deepspeed.ai/docs/config-json/), 1 GB in bf16. **What does a step take?** The planner counts
# compute. What crosses is as in DeepSpeed's source: each micro-batch sends the gradients' sum down, each but the
# first brings it up; once a step gradients go down in fp32, and weights come up. The paper draws transfers beside
# backward; ZeRO-2 does so with `overlap_comm`, off by default, so here they wait. All hangs on the rate that the link keeps
# up, by the planner's constants 54% of line rate: so half and twice that, too.

# %%
batch, base = Batch(sequences=16, sequence_length=LENGTH), {"recompute": "full"}
ways = {"QLoRA": Plan(lora=Lora(base="nf4-dq"), framework="peft", **base),
        "LoRA + offload": Plan(lora=Lora(), offload="optimizer", framework="peft", **base),
        **{f"full + offload, {each}": Plan(offload="optimizer", framework="deepspeed", zero_stage=2, micro_batch=texts, **base)
           for each, texts in (("1 text", 1), ("4 texts", 4))}}

# %%
def step_seconds(plan, card):
    told = estimate(shape, Cluster(gpu=card, nodes=1, gpus_per_node=1, host_memory_bytes=160 * GB), plan, batch)
    if plan.zero_stage != 2:
        return told, told.step_seconds, 0
    micro_batches = batch.sequences // plan.micro_batch
    crossing = P * (2 * micro_batches + 2 * (micro_batches - 1) + 4 + 2)  # sums down and up; gradients down, weights up
    compute = told.step_seconds - told.time.optimizer
    return told, compute + crossing / bandwidth_in_training(card.pcie) + HOST_ADAM_SECONDS * P, crossing


sheet = {name: {} for name in ways}
for factor, words in ((0.5, "half:"), (1, "as is:"), (2, "twice:")):
    link = gpu("RTX 4090").pcie
    card = replace(gpu("RTX 4090"), pcie=replace(link, link_bytes_per_second=factor * link.link_bytes_per_second))
    for name, plan in ways.items():
        told, seconds, crossing = step_seconds(plan, card)
        sheet[name] |= {"host, GB": 20 * P / GB if crossing else told.host_bytes / GB, "crossing, GB": crossing / GB}
        sheet[name][f"step, s ({words} {bandwidth_in_training(card.pcie) / GB:.1f} GB/s)"] = seconds

# %%
display(pd.DataFrame(sheet).T.style.format(precision=1).set_caption("Llama-2-7B, an RTX 4090, 16 texts a step, predicted"))
days = {name: round(50e6 / batch.tokens * step_seconds(plan, gpu("RTX 4090"))[1] / 86_400, 2) for name, plan in ways.items()}
print("days for 50 million tokens:", days, f"\nCPU-Adam's part of a full step: {HOST_ADAM_SECONDS * P:.1f} s")

# %% [markdown]
# **Read it.** One text at a time, 458 GB cross and a full step takes three times as long as QLoRA's; four at a time, 135 GB
# and 1.7 times. So fill the card first. Then the rate decides: half of it costs 8 s more. Measure *your* link
# before you promise days: `python -m evidence.record device_speed` does.
#
# | way | gives up |
# |---|---|
# | QLoRA | 4-bit weights; only adapters learn |
# | LoRA + offload | only adapters learn; all that leaves the card is their moments |
# | full + offload | 135 GB of host memory, seconds of link and CPU in every step |
#
# **How far off may such seconds be?** The same terms, beside what was published. No row's own figure goes in.

# %%
summaries = summarize(compare_all(("offload",)))
for row in summaries:
    print(f"{row.source:<26}{row.quantity:<24}{row.rows:>2} rows, mean error {row.mean:.1%}, bias {row.bias:+.1%}")
    assert row.mean <= 0.15, f"{row.source}: the prediction is off; which rate is not the published one?"
show(draw_validation(summaries, title="Offload, predicted beside published"),
     alt="; ".join(f"{row.source}: mean error {row.mean:.0%}" for row in summaries))

# %% [markdown]
# **Read it.** A constant fitted to the rows themselves is nearer in the first two alone. A tenth turns LoRA and QLoRA
# round, not the full fine-tune.
#
# **The script.** For adapters, lesson 06 writes it. Here is that of the full fine-tune, with DeepSpeed's own Adam. Two traps
# it avoids:
#
# - **Pageable memory.** The system may move ordinary host memory to disk; *pinned* memory stays, and only it is copied
#   at the link's rate: [6 times faster](https://github.com/deepspeedai/DeepSpeed/pull/5301) up, on one GPU (published).
# - **Loading before the arguments.** The model must know of DeepSpeed when it is loaded: `TrainingArguments` come first.
#
# Give each rank its own cores, `deepspeed --bind_cores_to_rank`: 3.08 to
# [2.38 s a step](https://github.com/deepspeedai/DeepSpeed/pull/7474) for Qwen2.5-3B on two A100 (published).


# %%
def zero_offload(on_gpu):
    """DeepSpeed compiles its Adam for the CPU at the first start: that needs a compiler. Elsewhere PyTorch's goes on."""
    adam = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    return {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_force_ds_cpu_optimizer": on_gpu,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000_000,  # elements: 0.2 GB a bucket
                                  "offload_optimizer": {"device": "cpu", "pin_memory": on_gpu}},
            "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto"} | ({"optimizer": adam} if on_gpu else {})


# %% jupyter={"source_hidden": true}
IMPORTS = """# pip install torch transformers accelerate deepspeed      texts.txt: one text a line
# torchrun --nproc-per-node 1 offload.py [model]
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator
"""


def packed(tokenizer, texts, length):
    """Texts one after the other, cut into pieces of one length: no padding."""
    ids = [token for text in texts for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


# %%
MAIN = """if __name__ == "__main__":
    base, on_gpu = (sys.argv[1:] or ["meta-llama/Llama-2-7b-hf"])[0], torch.cuda.is_available()
    pieces = packed(AutoTokenizer.from_pretrained(base), Path("texts.txt").read_text().splitlines(), LENGTH)
    arguments = TrainingArguments(  # first: what is loaded after it knows of DeepSpeed
        "tuned", deepspeed=zero_offload(on_gpu), bf16=True, use_cpu=not on_gpu, learning_rate=1e-5, num_train_epochs=1,
        per_device_train_batch_size=4, gradient_accumulation_steps=4, gradient_checkpointing=True, logging_steps=1,
        save_strategy="epoch", save_only_model=True, report_to="none")  # False: to resume, 12 bytes a parameter more
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    Trainer(model, arguments, default_data_collator, pieces).train()
    print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB (allocated); simulated for Llama-2-7B: PEAK GB, buckets apart")
"""
MAIN = MAIN.replace("LENGTH", str(LENGTH)).replace("PEAK", f"{big['gradients leave, 4 texts'].peak_bytes / GB:.1f}")
here.write_script("offload.py", IMPORTS, zero_offload, packed, MAIN)

# %% [markdown]
# The same file, one step on a tiny Llama:

# %%
if not zero_problem:
    with scratch("lesson-07-script") as folder:
        ran = run_small(here.root / "build" / "lesson-07" / "offload.py", folder, LENGTH)
    print("loss:", *ran.losses, "\nsaved:", *ran.saved)
    assert ran.losses and ran.saved, "the script ended, and trained or saved nothing"

# %% [markdown]
# **What is shown.** Measured, in small: 2 bytes a parameter stay, losses to 1e-4, the script runs. Simulated: the peak at
# 7B. Predicted: seconds and days. Not shown: the script on a card, where it prints that card's own peak; nor that all
# weights learn *more* than adapters: that depends on your task.

# %%
for run in big.values():
    score("07", f"7B, {run.name}", peak_bytes=run.peak_bytes, evidence=run.evidence)
scoreboard("07")

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
#   blocks; the host takes 16 to 20.
# - The link is free from $bF/(cB)$ tokens a micro-batch on, if transfers run beside compute; around the step never.
#   Fewer, larger micro-batches send less.
# - ZeRO-2 on one GPU partitions nothing: its offload is what helps. Adapters have almost nothing to offload.
#
# ### Test yourself
#
# A full fine-tune of Llama-2-7B on an H100, optimizer and gradients offloaded, is much slower than its compute.
# A step has 64 micro-batches of 512 tokens. What do you change first, and what do you look at next?
#
# <details><summary>Answer</summary>
#
# Gradients go down in every micro-batch, and 512 tokens are far below the 2,616 that could hide them on this card. Take
# micro-batches of 8,192 tokens, checkpointed: a sixteenth of the transfers. What is left no batch hides: the step on
# the CPU (a compiled Adam, on cores of its own?) and the weights' way up (pinned memory?).
#
# </details>
#
# **Where next.** Do the [lab](../../labs/intermediate/07_offload.ipynb), in a copy: `make my-labs` makes one. Then compare
# with the [solution](../../solutions/intermediate/07_offload.ipynb).
#
# **References.** Ren and others 2021, *ZeRO-Offload*, [arXiv:2101.06840](https://arxiv.org/abs/2101.06840).
# Rajbhandari and others 2021, *ZeRO-Infinity*, [arXiv:2104.07857](https://arxiv.org/abs/2104.07857).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** You have a `model` in bf16 on the card and its `loader`. The optimizer's states and all gradients go to
# host memory:
#
# ```python
# import torch
#
# masters = {p: p.detach().to("cpu", torch.float32, copy=True) for p in model.parameters()}
# optimizer = torch.optim.AdamW(masters.values(), lr=1e-5, fused=True)
#
# def leave(p):
#     gradient, master = p.grad.to("cpu", copy=True), masters[p]
#     master.grad = gradient.float() if master.grad is None else master.grad + gradient
#     p.grad = None
#
# for p in model.parameters():
#     p.register_post_accumulate_grad_hook(leave)
#
# for batch in loader:
#     model(**batch).loss.backward()
#     torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)  # where the gradients are
#     optimizer.step()
#     optimizer.zero_grad()
#     with torch.no_grad():
#         for p, master in masters.items():
#             p.copy_(master.to(p.dtype))
# ```
#
# These copies go through pageable memory; DeepSpeed's are pinned. **With transformers**, where `dataset` and
# `model_name` are yours (the seconds of section 5 assume DeepSpeed's compiled Adam: see `offload.py`):
#
# ```python
# from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
#
# arguments = TrainingArguments(
#     "tuned", bf16=True, gradient_checkpointing=True, per_device_train_batch_size=4, gradient_accumulation_steps=4,
#     deepspeed={
#         "bf16": {"enabled": True}, "gradient_clipping": 1.0,
#         "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
#         "zero_force_ds_cpu_optimizer": False,  # PyTorch's Adam steps on the CPU: no compiler needed
#         "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
#         "gradient_accumulation_steps": "auto"})
# model = AutoModelForCausalLM.from_pretrained(model_name, dtype="bfloat16")  # after the arguments
# trainer = Trainer(model, arguments, train_dataset=dataset)
# trainer.train()
# ```
#
# Start it by `torchrun --nproc-per-node 1 train.py`. **Look at** `torch.cuda.max_memory_allocated()`, near 2 bytes a
# parameter, activations and buckets: raise the micro-batch until the card is full. The losses of the first steps must not
# change. On the host 20 bytes a parameter must be free.
