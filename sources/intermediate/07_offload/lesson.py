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
# **Promise.** A full fine-tune of Llama-2-7B has 107.8 GB of states. You move them to host memory, one kind after
# the other: by hand in twenty lines, then with DeepSpeed and `Trainer`, with the losses of the plain run. At 7B,
# simulated, 2 bytes per parameter stay on the card. Then you count what crosses the link.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 45 | any laptop (Linux, macOS, WSL2) | about a minute of computing on two CPU cores |

# %% [markdown]
# ## A bet
#
# DeepSpeed's ZeRO-2 on **one** GPU, in bf16, with the optimizer offloaded. Of the 16 bytes of states per parameter,
# how many stay on the device between two steps? Write your guess. Section 3 counts.

# %%
my_bet_bytes = 4

# %% tags=["setup"]
here = setup("intermediate/07")

# %%
import contextlib
import io
import warnings

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F

from utils import GB, Evidence, Transformer, TransformerConfig, check, draw_breakdown, llama_config, model_shape
from utils import predicted, run_ranks, score, scoreboard, show, simulate, text_batches, text_tokens
from utils.catalog import device as gpu
from utils.models.finetune import TARGETS, build_finetune, finetune_step
from utils.models.pretrained import enable_checkpointing
from utils.planner import Batch, Plan, memory
from utils.techniques import OffloadedOptimizer
from utils.techniques.cpu_ranks import fsdp_on_cpu
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.techniques.zero import resident, zero_config, zero_engine

# %%
# peft asks transformers for something by a name that transformers has replaced.
warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
import peft
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()
zero_problem = deepspeed_problem()
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__} is here.")

# %% [markdown]
# ## What you will be able to do
#
# - Say what each kind of offload leaves on the card, and what it sends over the link in a step.
# - Write an offloaded optimizer, and prove it equal to the plain one.
# - Read what DeepSpeed holds, tensor by tensor, and configure it, alone or in `Trainer`.
# - Decide whether offload or adapters bring a model onto your card.
#
# Words that are new to you stand in the [glossary](../00_glossary.ipynb).
#
# ## 1. What can leave
#
# A step needs the *weights* in forward and backward, all the time. It needs a *gradient* from the moment
# backward makes it until the optimizer uses it. It needs the *optimizer's states* (fp32 master copy, two
# moments) once a step. What is needed least often leaves first
# ([Ren and others 2021](https://arxiv.org/abs/2101.06840), ZeRO-Offload).

# %%
shape = model_shape("llama-2-7b")
P = shape.parameter_count
kept = {
    "nothing leaves": {"parameters": 2 * P, "gradients": 2 * P, "optimizer state": 12 * P},
    "the optimizer leaves": {"parameters": 2 * P, "gradients": 2 * P},
    "gradients leave, too": {"parameters": 2 * P}}  # fmt: skip
bars = [predicted(name, parts) for name, parts in kept.items()]
show(draw_breakdown(bars, limit="24GB", unit="GB", title="States of Llama-2-7B on the card, bf16 training"),
     alt="; ".join(f"{name}: {sum(parts.values()) / GB:.1f} GB" for name, parts in kept.items()))  # fmt: skip

# %% [markdown]
# **Read it.** On a card of 24 GB the optimizer's leaving is not enough. With gradients gone as they are made,
# weights in bf16 stay, and there is room for activations. (Weights can leave as well, layer by layer: ZeRO-3 and
# ZeRO-Infinity.)
#
# ## 2. An optimizer in host memory, by hand
#
# The optimizer works on fp32 copies in host memory. A step sends gradients down the link and weights up.

# %%
class HostAdamW:
    def __init__(self, parameters, **settings):
        self.here = list(parameters)
        self.there = [p.detach().to("cpu", torch.float32, copy=True).requires_grad_() for p in self.here]
        self.inner = torch.optim.AdamW(self.there, **settings)

    @torch.no_grad()
    def step(self):
        for here, there in zip(self.here, self.there, strict=True):
            there.grad = here.grad.to("cpu", torch.float32, copy=True)  # down the link
            here.grad = None
        self.inner.step()  # computed by the CPU
        for here, there in zip(self.here, self.there, strict=True):
            here.copy_(there)  # up the link


# %%
SMALL = TransformerConfig(vocabulary=256, hidden=128, layers=4, heads=4, feedforward=352)
batches = list(text_batches(text_tokens(20 * 4 * 32 + 1), batch=4, sequence=32))


def losses_with(make):
    torch.manual_seed(0)
    model, losses = Transformer(SMALL), []
    optimizer = make(model.parameters())
    for tokens, targets in batches:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        for parameter in model.parameters():
            parameter.grad = None
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
plain = losses_with(lambda p: torch.optim.AdamW(p, lr=1e-3))
assert losses_with(lambda p: HostAdamW(p, lr=1e-3)) == plain, "offload changes no number: is a gradient stale?"
print(f"{len(plain)} steps, loss {plain[0]:.3f} to {plain[-1]:.3f}, equal to the last bit with the optimizer offloaded")

# %% [markdown]
# **Read it.** Offload moves numbers, it does not change them. This form still keeps all gradients until the step. A
# hook on each parameter sends its gradient at once. `OffloadedOptimizer` has both forms; here is what they leave on
# a simulated GPU. (On this machine's CPU, host and device are the same memory, so a measurement could not tell
# them apart. The simulation counts by who asked for the memory.)

# %%
def offloaded(dtype, **how):
    model = Transformer(SMALL).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, OffloadedOptimizer(optimizer, **how) if how else optimizer


def small_step(model, optimizer):
    optimizer.zero_grad()
    tokens = torch.randint(256, (4, 33))
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()


FORMS = {
    "plain, fp32": (torch.float32, {}),
    "optimizer offloaded, fp32": (torch.float32, {"gradients_leave": False}),
    "the same, bf16 weights": (torch.bfloat16, {"master_dtype": torch.float32}),
    "gradients leave in backward": (torch.bfloat16, {"master_dtype": torch.float32, "gradients_leave": True}),
}

# %%
small_p = sum(p.numel() for p in Transformer(SMALL).parameters())
rows = {}
for name, (dtype, how) in FORMS.items():
    run = simulate(lambda: offloaded(dtype, **how), small_step, device="A100 40GB")
    series = run.timeline.series()
    rows[name] = {kind: series[kind].max() / small_p if kind in series else 0.0
                  for kind in ("parameters", "gradients", "optimizer state")}  # fmt: skip
    rows[name]["on the host"] = run.host_bytes / small_p
pd.DataFrame(rows).T.style.format("{:.2f}").set_caption("bytes per parameter, the most of each kind (simulated)")

# %% [markdown]
# **Read it.** Row by row one thing changes. In the last, a gradient is gone before the next one is made; the meter counts
# it as a temporary. The host holds 16 bytes, fp32 copy, its gradient and two moments, and what is on its way.
#
# ## 3. DeepSpeed: ZeRO-2 with `offload_optimizer`
#
# ZeRO-2 *partitions* over ranks. On one rank a part is the whole, so without offload it saves nothing. With
# offload it does what the last row did. The call, as you would write it at work:
#
# ```python
# engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config={
#     "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False,
#     "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}})
# ```
#
# (`zero_force_ds_cpu_optimizer` false takes torch's AdamW; DeepSpeed's own for CPUs is faster and must be compiled.)
# The cell runs it on one rank, and lists what the engine holds between backward and step, by DeepSpeed's own names.

# %%
def around(make_model, loss_of, offload, precision="bf16"):
    load_deepspeed()  # for the CPU, as here
    torch.manual_seed(0)
    model = make_model()
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in own)
    extra = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    settings = zero_config(2, count, world_size=1, micro_batch=4, precision=precision, **extra)
    settings["zero_force_ds_cpu_optimizer"] = False
    engine = zero_engine(model, torch.optim.AdamW(own, lr=1e-3), settings)
    losses = []
    for batch in batches:
        loss = loss_of(engine, *batch)
        engine.backward(loss)
        losses.append(loss.item())
        rows = [(row.path.removeprefix("optimizer."), row.dtype, row.bytes / count) for row in resident(engine)]
        engine.step()
    return losses, rows


def whole_loss(engine, tokens, targets):
    return F.cross_entropy(engine(tokens).flatten(0, 1).float(), targets.flatten())


# %%
HOST = ("fp32_groups", "exp_avg", "param_buffer", "for_cpu_offload")  # by the names that DeepSpeed gives


def held_by(rows):
    found = [{"held": path[:64], "dtype": dtype, "memory": "host" if any(part in path for part in HOST) else "device",
              "bytes per parameter": each} for path, dtype, each in rows if each > 0.01]  # fmt: skip
    return pd.DataFrame(found)


whole = {}
if not zero_problem:
    whole = {offload: run_ranks(around, 1, lambda: Transformer(SMALL), whole_loss, offload, timeout_seconds=200)[0]
             for offload in (False, True)}  # fmt: skip
    assert whole[True][0] == whole[False][0], "offload changes no number: same seed?"
    display(held_by(whole[True][1]).round(2))

# %%
for offload, (_, rows) in whole.items():
    table = held_by(rows)
    there = table["memory"].eq("host") & offload  # without offload nothing is on the host
    total = table["bytes per parameter"]
    print(f"ZeRO-2 on one rank{', offloaded' if offload else '':<11}: {total[~there].sum():5.2f} bytes per parameter on",
          f"the device, {total[there].sum():5.2f} on the host ({Evidence.MEASURED}); your bet: {my_bet_bytes}")  # fmt: skip

# %% [markdown]
# **Read it.** The losses are the same. Without offload all 16 bytes are on the device: the partition saved nothing. With
# offload the bf16 weights stay, and a buffer as large as the largest tensor. The gradients are on the host, in fp32, as the
# copy's `.grad`. The host holds more than our form: the bf16 weights on their way back, too.
#
# **Question.** What does ZeRO-2 save on one GPU *without* offload, in bytes per parameter?

# %%
saved_without_offload = ...
check("07.without_offload", saved_without_offload)

# %% [markdown]
# ## 4. Around adapters there is little to gain
#
# **Question.** Adapters with 20 million fp32 parameters train with AdamW. How many GB does it free
# to offload the optimizer state to the CPU?

# %%
freed_gb = ...
check("07.offloaded_gigabytes", freed_gb)

# %%
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                     num_attention_heads=4, use_cache=False)  # fmt: skip


def small_lora():
    warnings.simplefilter("ignore", FutureWarning)  # as above, in every rank
    torch.manual_seed(0)
    return peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(
        r=8, target_modules=list(TARGETS), task_type="CAUSAL_LM"))  # fmt: skip


def lora_loss(engine, tokens, _):
    return engine(input_ids=tokens, labels=tokens, use_cache=False).loss


# %%
if not zero_problem:
    (kept_losses, _), (moved_losses, rows) = (
        run_ranks(around, 1, small_lora, lora_loss, offload, "fp32", timeout_seconds=200)[0]
        for offload in (False, True))  # fmt: skip
    assert kept_losses == moved_losses, "offload moves states and changes no number: same seed?"
    moved = held_by(rows).query("memory == 'host'")
    print(f"the same losses; on the host, for each adapter parameter: {moved['bytes per parameter'].sum():.1f} bytes")
per_block = {"two": 4 * shape.hidden, "all seven": 8 * shape.hidden + 3 * (shape.hidden + shape.feedforward)}
for targets, ends in per_block.items():
    moving = 12 * 8 * shape.layers * ends  # master copy and two moments
    print(f"7B, rank 8 on {targets} matrices of a block: {moving / GB:.2f} GB can move ({Evidence.PREDICTED})")

# %% [markdown]
# **Read it.** Twelve bytes a trained parameter can move: master copy and moments. (The copy's gradient and buffers are extras in
# host memory.) For adapters that is 0.05 to 0.24 GB of 24. QLoRA (lesson 06) with offload trains, and gains
# little: turn it on when every weight is trained.
#
# ## 5. `Trainer`: `deepspeed=` and `fsdp=`
#
# One argument more, and `Trainer` shards or offloads. The batch sizes are `"auto"`: Trainer writes those of its other
# arguments into DeepSpeed's configuration, so that they agree. FSDP must know what to gather at a time: the
# class of a block. Checkpointing is then FSDP's own.

# %%
SHARDINGS = {
    "plain": {"ddp_find_unused_parameters": False},
    "deepspeed": {"deepspeed": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto"}},
    "fsdp": {"fsdp": True, "fsdp_config": {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True}},
}  # fmt: skip


def arguments_for(kind, ranks):
    return TrainingArguments(
        "build/trainer", max_steps=2, per_device_train_batch_size=4 // ranks, learning_rate=1e-2,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, **SHARDINGS[kind],
    )  # fmt: skip


# %% [markdown]
# Two steps on two ranks of this machine's CPU, beside one plain process with the same four texts a step.
# On a CPU accelerate, which `Trainer` calls, would leave FSDP out in silence and use DDP: it takes up FSDP
# on GPUs alone. `fsdp_on_cpu` turns it on.

# %%
def on_ranks(kind):
    if kind == "deepspeed":
        load_deepspeed()
    arguments = arguments_for(kind, dist.get_world_size())
    rows = [{"input_ids": row, "labels": row} for tokens, _ in batches[:8] for row in tokens]
    trainer = Trainer(model=small_lora(), args=arguments, train_dataset=rows)
    if arguments.fsdp:
        fsdp_on_cpu(trainer)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every loss
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, type(trainer.model_wrapped).__name__


# %%
plain_losses, _ = run_ranks(on_ranks, 1, "plain", timeout_seconds=200)[0]
for kind in ["fsdp"] if zero_problem else ["deepspeed", "fsdp"]:
    losses, wrapper = run_ranks(on_ranks, 2, kind, timeout_seconds=200)[0]
    apart = max(abs(a / b - 1) for a, b in zip(losses, plain_losses, strict=True))
    print(f"{kind + '=':<11}{wrapper} on 2 ranks: losses {apart:.0e} from those of one process")
    assert apart < 1e-5, f"{kind} trains another model: same seed, same batches on every rank?"

# %% [markdown]
# **Read it.** The sharded runs train the same model. What ZeRO and FSDP hold and send is lesson 09. Outside of
# a notebook `torchrun --nproc-per-node 2 train.py` starts such ranks.
#
# ## 6. Seven billion, simulated
#
# A full fine-tune on one text of 2,048 tokens, every block checkpointed: as it is, with the optimizer
# offloaded, with bf16 weights, and with gradients that leave.

# %%
def full(layers, dtype, **how):
    smaller = llama_config(shape, num_hidden_layers=layers)
    if dtype is torch.float32:  # under bf16 autocast
        model, optimizer = build_finetune(smaller, "full fine-tune")
    else:
        model = AutoModelForCausalLM.from_config(smaller, dtype=dtype).train()
        enable_checkpointing(model)
        optimizer = torch.optim.AdamW(model.parameters())
    return model, OffloadedOptimizer(optimizer, **how) if how else optimizer


# %%
runs = {name: simulate(lambda: full(shape.layers, dtype, **how), lambda m, o: finetune_step(m, o, 1, 2048),
                       device="RTX 4090", name=name)
        for name, (dtype, how) in FORMS.items()}  # fmt: skip
figure = draw_breakdown(list(runs.values()), limit="24GB", unit="GB", title="Llama-2-7B, every weight trained")
show(figure, alt="; ".join(f"{name}: {run.peak_bytes / GB:.1f} GB" for name, run in runs.items()))

# %%
sheet = {name: {"peak, GB": run.peak_bytes / GB, "in": run.peak_phase, "host, GB": (run.host_bytes or 0) / GB}
         for name, run in runs.items()}  # fmt: skip
print(f"DeepSpeed's rule, 2 bytes per parameter: {2 * P / GB:.1f} GB on the card before activations, {16 * P / GB:.1f} GB and buffers on the host")
for offload in ("none", "optimizer"):
    plan = Plan(recompute="full", offload=offload, framework="fsdp")
    held = memory(shape, plan, Batch(sequences=1, sequence_length=2048))[0].allocated_bytes
    print(f"planner, fp32 states, offload {offload!r}: {held / GB:.1f} GB ({Evidence.PREDICTED})")
pd.DataFrame(sheet).T.style.format(precision=1)

# %% [markdown]
# **Read it.** One change a row. The optimizer's leaving takes the moments, and with them the temporaries of the step:
# PyTorch's default AdamW works on all tensors at once and needs one more copy of the weights, which `fused=True`
# avoids (the planner counts none). But in fp32 weights and gradients stay, and bf16 weights only halve them. With
# gradients that leave, a full fine-tune of 7B peaks below 24 GB. DeepSpeed's row beside ours: the same 2 bytes, and a
# bucket on the device, 5e8 elements or 1 GB by its default. The price is host memory and the link.
#
# ## 7. What crosses the link
#
# A step sends every gradient down and every weight up: in bf16 $2P + 2P$ bytes, however many tokens it trains. Compute
# grows with the tokens, about $8P$ operations a token with checkpointing. So there is a batch from which
# the link can hide behind compute, if transfers and compute overlap.

# %%
def seconds(tokens, card, matmul_share=0.5):
    """Compute of a step, and its transfers in both directions, one after the other."""
    compute = 8 * P * tokens / (matmul_share * card.peak_flops_per_second("bf16"))
    return compute, 4 * P / card.pcie.link_bytes_per_second


rows = []
for name in ("RTX 4090", "A100 40GB", "H100"):
    card = gpu(name)
    compute, link = seconds(2048, card)
    rows.append({"card": name, "link": card.pcie.name, "transfers, s": link, "compute of 2,048 tokens, s": compute,
                 "tokens at which both are equal": 2048 * link / compute})  # fmt: skip
pd.DataFrame(rows).style.format(precision=2, thousands=",").set_caption("predicted, at half of the peak FLOP/s and the link's full rate")

# %% [markdown]
# **Read it.** Below that batch the link decides, above it compute. Accumulation helps: weights cross once a
# *step*, so more tokens a step pay for the same transfers (DeepSpeed adds up in host memory, so gradients cross
# at every backward). The step of the CPU comes on top: it reads and writes the 16 bytes of each parameter in host
# memory. None of this has been measured on a GPU here; `make record` will.
#
# ## When to use what
#
# | technique | stays on the card, per parameter | costs | does not help |
# |---|---|---|---|
# | nothing | 16 bytes | | |
# | optimizer offload | 4 bytes in bf16, 8 in fp32 | gradients down, weights up, a step on the CPU | adapters: little to move |
# | ... and gradients that leave (ZeRO-2 + offload) | 2 bytes | the same | activations |
# | LoRA or QLoRA, lesson 06 | 2, or about half a byte | sometimes quality | |
#
# For 7B on 24 GB both ways fit. Adapters need no host memory and no link; a full fine-tune by offload needs 108 GB of host
# memory and trains every weight.

# %%
for run in runs.values():
    score("07", f"7B, {run.name}", peak_bytes=run.peak_bytes, evidence=run.evidence)
scoreboard("07")

# %% [markdown]
# ## Break it, diagnose it
#
# A loop clips its gradients before each step, as always. Here gradients leave in backward. Predict the norm.

# %%
torch.manual_seed(0)
model, optimizer = offloaded(torch.float32, gradients_leave=True)
tokens, targets = batches[0]
F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
there = torch.nn.utils.get_total_norm([copy.grad for group in optimizer.inner.param_groups for copy in group["params"]])
print(f"norm that the loop clips by: {norm:.3f}; norm of the gradients on the host: {there:.3f}")
assert norm == 0 < there, "gradients should have left the device"

# %% [markdown]
# **Diagnose it.** Nothing fails, and nothing is clipped: there are no gradients on the device any more. Clip where they
# are. DeepSpeed does so itself, by its setting `gradient_clipping`; `Trainer` passes `max_grad_norm` on as
# `"auto"`.
#
# ## Recap
#
# - Needed least often leaves first: optimizer state, then gradients, then weights.
# - With bf16 weights and gradients that leave, 2 bytes per parameter stay on the card.
# - ZeRO-2 on one GPU partitions nothing. Its offload is what helps.
# - Adapters have almost nothing to offload.
# - What leaves the device escapes what looks for it there.
#
# ### Test yourself
#
# A colleague runs QLoRA with 4,096 tokens, is out of memory, and turns on optimizer offload and ZeRO-2.
# What do you say?
#
# <details><summary>Answer</summary>
#
# Both touch states that are small already: the moments of adapters. The activations fill the card.
# Turn on checkpointing, or shorten the texts or the micro-batch; then look at the logits.
#
# </details>
#
# ### Where next
#
# Sharding over several GPUs is [lesson 09](09_sharding.ipynb). This lesson has no lab yet.
#
# **References.** Ren and others 2021, *ZeRO-Offload*, [arXiv:2101.06840](https://arxiv.org/abs/2101.06840).
# Rajbhandari and others 2021, *ZeRO-Infinity*, [arXiv:2104.07857](https://arxiv.org/abs/2104.07857). DeepSpeed,
# [configuration](https://www.deepspeed.ai/docs/config-json/). PyTorch,
# [accelerate's DeepSpeed guide](https://huggingface.co/docs/accelerate/usage_guides/deepspeed).
