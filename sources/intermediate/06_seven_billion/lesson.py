# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 Seven billion parameters on 24 GB
#
# {{badges}}
#
# **Promise.** What brings a fine-tune of Llama-2-7B onto one card of 24 GB? Training all of it takes 107.8 GB before
# the first activation. You take that apart: adapters, four-bit weights, checkpointing, each by hand or in a line. Then
# you write the script for the real model, and a map tells which sizes fit.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 50 for the lab | any laptop (Windows: WSL2); a GPU if you have one; beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# You fine-tune Llama-2-7B with four-bit weights and fp32 adapters of rank 16 on all matrices of its blocks, under bf16
# autocast, without checkpointing, on one text of 2,048 tokens. Four bits are half a byte, so the weights should take
# 3.5 GB. What is the *peak* of such a step, in GB? Section 5 has the answer.

# %%
my_bet_gb = 3.5

# %% tags=["setup"]
here = setup("intermediate/06")

# %% jupyter={"source_hidden": true}
import contextlib
import io
import os
import warnings

import pandas as pd
import torch
from torch import nn

from utils import GB, Evidence, compare, computes, draw_breakdown
from utils import format_bytes, llama_config, load_base, measure, model_shape, predicted, prepare_ranks
from utils import recorded_table, run_ranks, score, scoreboard, scratch_folder, show, sweep, text_batches, text_tokens
from utils.data import docstring_pairs
from utils.models.finetune import ALL_LINEAR, TARGETS, build_finetune, finetune_step
from utils.simulation import extrapolate
from utils.techniques import adam_state_bytes, optimizer_bytes
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.techniques.bitsandbytes_import import bitsandbytes_problem
from utils.techniques.nf4 import dynamic_levels
from utils.lessons.lesson_06.budget_map import draw_budget_map
from utils.lessons.lesson_06.script_parts import IMPORTS, MAIN
from utils.lessons.lesson_06.small_base import write_small_base

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% jupyter={"source_hidden": true}
import peft
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DataCollatorForSeq2Seq
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.utils import logging as transformers_logging

# peft asks transformers for something by a name that transformers has replaced.
warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
transformers_logging.disable_progress_bar()
four_bits = None if bitsandbytes_problem() else "nf4-dq"
if four_bits is None:
    print(f"{bitsandbytes_problem()}. Nothing is packed into four bits here: section 3 compares with no")
    print("library, section 4 trains nothing, section 5 maps LoRA alone, 'Break it' has no packed weights.")
zero_problem = deepspeed_problem()
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__} is here.")
prepare_ranks()  # section 4 runs on one; until then it imports what we did
if torch.cuda.is_available() and here.dtype is torch.float16:
    print("No bfloat16 on this GPU: PyTorch emulates it. Believe the bytes here, not the times. The map",
          "of section 5 assumes flash attention, which this GPU lacks too.")

# %% [markdown]
# ## 1. The states sheet
#
# Lesson 01 counted 16 bytes per parameter for training with Adam: parameter, gradient, fp32 copy, two *moments*
# (running means). Here they are for Llama-2-7B, from its published shape. New words: [glossary](../00_glossary.ipynb).

# %%
shape = model_shape("llama-2-7b")
P = shape.parameter_count
adapters = 16 * shape.layers * (8 * shape.hidden + 3 * (shape.hidden + shape.feedforward))  # rank 16, all matrices
matrices = P - 2 * shape.vocabulary * shape.hidden - (2 * shape.layers + 1) * shape.hidden
packed_weights = matrices * (4 + 8 / 64 + 32 / 64 / 256) / 8 + 2 * (P - matrices)
trained = {"gradients": 4 * adapters, "optimizer state": 8 * adapters}
sheet = {"full, mixed precision": {"parameters": 2 * P, "gradients": 2 * P, "optimizer state": 12 * P},
         "LoRA, bf16 weights": {"parameters": 2 * P + 4 * adapters} | trained,
         "QLoRA, packed weights": {"parameters": packed_weights + 4 * adapters} | trained}
print(f"P = {P:,} ({shape.source}); adapters of rank 16: {adapters / P:.1%} as many")
show(draw_breakdown([predicted(name, parts) for name, parts in sheet.items()], limit="24GB", unit="GB",
                    title="States of Llama-2-7B, before any activation"),
     alt="; ".join(f"{name}: {sum(parts.values()) / GB:.1f} GB" for name, parts in sheet.items()))

# %% [markdown]
# **Read it.** The full sheet fills more than four cards of 24 GB. Its gradients and optimizer state exist because *every
# weight moves*. So let most weights stand still: a frozen weight needs no gradient and no moments. The two short bars
# are what you build now: LoRA, then QLoRA, its packed weights.
#
# ## 2. LoRA by hand
#
# Keep W frozen and learn an *adapter*, a difference of low rank, beside it (Hu and others, section 4.1):
#
# $$y = W x + \frac{\alpha}{r} B A x, \qquad A \in \mathbb{R}^{r \times \text{in}},\;
# B \in \mathbb{R}^{\text{out} \times r}$$
#
# B starts at zero, so the first step begins where the frozen model stands.

# %%
class Lora(nn.Module):
    def __init__(self, frozen, rank=8, alpha=16):
        super().__init__()
        self.frozen, self.scale = frozen.requires_grad_(False), alpha / rank
        self.down = nn.Linear(frozen.in_features, rank, bias=False)  # A
        self.up = nn.Linear(rank, frozen.out_features, bias=False)  # B
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.frozen(x) + self.scale * self.up(self.down(x))

# %% [markdown]
# The same small Llama twice: once with your layer, once with `peft`, whose random A is copied to yours.

# %%
config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                     num_attention_heads=4, use_cache=False)
mine, theirs = LlamaForCausalLM(config), LlamaForCausalLM(config)
theirs.load_state_dict(mine.state_dict())
theirs = get_peft_model(theirs, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
mine.requires_grad_(False)
pefts = [part for part in theirs.modules() if isinstance(part, peft.tuners.lora.Linear)]
for block in mine.model.layers:
    for name in ("q_proj", "v_proj"):
        layer, other = Lora(getattr(block.self_attn, name)), pefts.pop(0)
        layer.down.weight.data.copy_(other.lora_A["default"].weight)
        setattr(block.self_attn, name, layer)

# %%
def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def twenty_losses(model):
    optimizer, losses = adamw(model), []
    for tokens, _ in text_batches(text_tokens(20 * 4 * 32 + 1), batch=4, sequence=32):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

# %%
pairs_of_losses = list(zip(twenty_losses(mine), twenty_losses(theirs), strict=True))
largest = max(abs(a / b - 1) for a, b in pairs_of_losses)
print(f"{len(pairs_of_losses)} steps, largest relative difference of the losses {largest:.1e}")
assert largest <= 1e-6, "your LoRA differs from PEFT's: compare scale, start values and dropout"

# %% [markdown]
# **Read it.** There is nothing else in LoRA. Now its memory: `measure` counts a step of the same network, first with
# all weights trained, then with the adapters alone.

# %%
full, pair = LlamaForCausalLM(config).to(device), []
for name, model in (("all weights, fp32", full), ("LoRA, fp32", mine.to(device))):
    optimizer = adamw(model)
    pair.append(measure(lambda m=model, o=optimizer: finetune_step(m, o, 8, 128), model=model, optimizer=optimizer,
                        items=1024, unit="tokens", name=name, timed_steps=0))
share = sum(p.numel() for p in mine.parameters() if p.requires_grad) / sum(p.numel() for p in full.parameters())
print(f"LoRA trains {100 * share:.1f}% of the parameters, and its peak is",
      f"{100 * pair[1].peak_bytes / pair[0].peak_bytes:.0f}% of the full one")
compare(pair, title="A small Llama, all weights or adapters")

# %% [markdown]
# **Read it.** "LoRA trains 0.1% of the parameters, so it saves 99.9%" is folklore. The optimizer state all but
# vanishes. The weights stay, and so do most of the activations: backward still passes through frozen layers on its way
# to the adapters. Two things are left to shrink.
#
# ## 3. Four bits by hand
#
# A frozen weight is only read, so it may be coarse. **NF4** stores each weight as one of sixteen levels.
# Trained weights look like a normal distribution, so the levels are its quantiles: dense near zero. Eight
# lie above zero and seven below, so that zero itself is a level. Each block of 64 weights is divided by its
# largest magnitude first.

# %%
def quantiles(count):
    outermost = 1 - (1 / 32 + 1 / 30) / 2  # midway between the ends of 16 and of 15 equal shares
    return torch.special.ndtri(torch.linspace(outermost, 0.5, count + 1, dtype=torch.float64)[:-1])


levels = torch.cat([quantiles(8), -quantiles(7), torch.zeros(1, dtype=torch.float64)]).sort().values
levels = (levels / levels.max()).float()


def quantize(weight, levels, block=64):
    blocks = weight.float().reshape(-1, block)
    scales = blocks.abs().amax(dim=1)
    return torch.bucketize(blocks / scales[:, None], (levels[:-1] + levels[1:]) / 2), scales


def dequantize(codes, scales, levels):
    return levels[codes] * scales[:, None]

# %%
weight = torch.randn(512, 512)
weight[7, 7] = 12.0  # one outlier, as trained models have them
even = torch.linspace(-1, 1, 16)


def error(values, table, block=64):
    back = dequantize(*quantize(values, table, block), table).view_as(values)
    return f"{((back - values).abs().mean() / values.abs().mean()).item():.1%}"


print("even steps, one scale:", error(weight, even, weight.numel()))
for name, values in (("normal", weight), ("uniform", torch.rand(512, 512) - 0.5)):
    print(f"blocks of 64, {name:<8} even steps {error(values, even)}, NF4 {error(values, levels)}")

# %% [markdown]
# **Read it.** With a single scale one outlier makes all other weights coarse; blocks keep the harm local. NF4's levels
# win where weights crowd around zero, as trained ones do, and lose where they are spread evenly.
#
# ### Double quantization
#
# An fp32 scale for each 64 weights is half a bit a weight. So the scales are quantized as well: their mean off, then
# eight bits each, 256 of them under one scale of their own. The library's codes beside yours:

# %%
codes, scales = quantize(weight, levels)
packed = (codes.flatten()[::2] << 4 | codes.flatten()[1::2]).to(torch.uint8)
scale_codes, outer = quantize(scales - scales.mean(), dynamic_levels(), block=256)
if four_bits:
    library = torch.ops.bitsandbytes
    theirs_packed, theirs_scales = library.quantize_4bit(weight, 64, "nf4", torch.uint8)
    apart = (packed != theirs_packed.flatten()).float().mean().item()
    print(f"of {packed.numel():,} bytes of codes {apart:.1e} differ from bitsandbytes' (ties)")
    # For fp64 bitsandbytes looks at every level; its quick fp32 kernel may miss by one.
    theirs_codes, _ = library.quantize_blockwise((scales - scales.mean()).double(), dynamic_levels(), 256)
    assert torch.equal(scale_codes.flatten(), theirs_codes.flatten().long()), "subtract the mean first"
    assert apart < 1e-3 and torch.equal(scales, theirs_scales.flatten()), "blocks of 64 share a scale"

# %%
bits = {"fp32": packed.nbytes + scales.nbytes, "quantized": packed.nbytes + scale_codes.numel() + outer.nbytes + 4}
print("bits per weight:", ", ".join(f"{8 * size / weight.numel():.3f} with {name} scales" for name, size in bits.items()))
print(f"Llama-2-7B: half a byte a weight is {P / 2 / GB:.1f} GB; packed, with embeddings, head and norms in",
      f"16 bits, {packed_weights / GB:.1f} GB ({Evidence.PREDICTED})")

# %% [markdown]
# **Read it.** Scales, and the layers that stay in 16 bits (embeddings, and the *head*, the last matrix, onto the
# vocabulary), raise 3.4 GB to 3.9 GB. A matmul unpacks its layer's weight to 16 bits, uses it and drops it, in
# forward and again in backward. What four bits cost in quality, [lesson 08](08_smaller_weights.ipynb) measures; under
# adapters, large models matched 16-bit fine-tuning (published: QLoRA, section 4).
#
# <div class="alert alert-warning"><b>Trap.</b> bitsandbytes is not <i>quantization-aware training</i>. That
# trains weights so that they survive rounding later. Here the packed weights never change: only
# adapters learn, in fp32.</div>
#
# ## 4. The whole run
#
# Now all parts in one `Trainer`, as at work: NF4, `peft`, checkpointing, and DeepSpeed's ZeRO-2 with the optimizer
# offloaded. Five functions, first on a small base; section 5 writes them to a file, for the real 7B. The task: from the
# first line of a function, write what it does. The loss counts **the answer alone**: labels of the prompt are -100.

# %%
folder = scratch_folder("lesson-06")
first, last = write_small_base(folder / "base", config, device)
print(f"a base, trained on Python's sources from a loss of {first:.2f} to {last:.2f}; in its folder:",
      *sorted(path.name for path in (folder / "base").iterdir()))

# %%
def tokenized(tokenizer, prompt, answer, longest):
    """Token numbers, and labels that leave the prompt out of the loss."""
    asked = tokenizer(prompt).input_ids
    told = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids
    return {"input_ids": (asked + told)[:longest], "labels": ([-100] * len(asked) + told)[:longest]}

# %%
pairs = docstring_pairs(120)
print(pairs[0][0] + pairs[0][1])
print("labels:", *tokenized(AutoTokenizer.from_pretrained(folder / "base"), *pairs[0], longest=128)["labels"])

# %%
def qlora(base, dtype):
    """The base in four bits, every block checkpointed, adapters on all its linear layers."""
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                 bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=packing, dtype=dtype)
    for part in model.modules():  # or, on some CPUs, eval() repacks weights and spoils later gradients
        part.support_avx512bf16_for_cpu = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear",
                                            task_type="CAUSAL_LM"))

# %%
def zero_2():
    """DeepSpeed's ZeRO-2, the optimizer in host memory; "auto" is what TrainingArguments say."""
    return {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW; DeepSpeed's own must be compiled
        "bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}

# %%
def finetune(base, pairs, output, longest, deepspeed=None, dtype=torch.bfloat16, **settings):
    """Train adapters on all pairs but a fifth, evaluate on that, save."""
    set_seed(0)
    arguments = TrainingArguments(output, deepspeed=deepspeed, bf16=dtype is torch.bfloat16, logging_steps=1,
                                  report_to="none", eval_strategy="epoch", **settings)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    examples = [tokenized(tokenizer, *pair, longest) for pair in pairs]
    held_out = len(examples) // 5
    trainer = Trainer(qlora(base, dtype), arguments, DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=64),
                      examples[held_out:], examples[:held_out])
    trainer.train()
    trainer.save_model(output)  # the adapters alone
    return trainer

# %% [markdown]
# Only the adapters are saved. **Merging** adds (alpha / r) B A to W, so that inference pays nothing extra. It needs the
# *16-bit* base, in the host's memory: 2 bytes a parameter.

# %%
def merge(base, adapter, output):
    """The adapters, added to the base in 16 bits: one plain model."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)
    AutoTokenizer.from_pretrained(base).save_pretrained(output)

# %% [markdown]
# DeepSpeed wants a process group, so a rank runs it (without DeepSpeed the same run goes without it):

# %% jupyter={"source_hidden": true}
TRAINED_IN = torch.bfloat16 if computes("cpu", torch.bfloat16) else torch.float32  # emulated, it is many times slower


def on_rank(deepspeed):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU of every machine, as use_cpu says below
    warnings.simplefilter("ignore")
    transformers_logging.disable_progress_bar()
    if deepspeed:
        load_deepspeed()  # for the CPU, as here
    with contextlib.redirect_stdout(io.StringIO()):  # Trainer prints every loss
        trainer = finetune(str(folder / "base"), pairs, str(folder / "adapter"), 128, deepspeed, TRAINED_IN, use_cpu=True,
                           num_train_epochs=1, per_device_train_batch_size=8, learning_rate=2e-3,
                           ddp_find_unused_parameters=False, disable_tqdm=True, save_strategy="no")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"{type(trainer.model_wrapped).__name__}: {len(losses)} steps, loss {losses[0]:.2f} to {losses[-1]:.2f}")

# %%
def held_out_loss(model):
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    rows = [tokenized(tokenizer, *pair, longest=128) for pair in pairs[: len(pairs) // 5]]
    batch = DataCollatorForSeq2Seq(tokenizer)(rows).to(model.device)
    with torch.no_grad():
        return model(**batch, use_cache=False).loss.item()

# %%
plain, packed_base = (load_base(folder / "base", quantization=kind, device=device) for kind in (None, four_bits))
before = held_out_loss(packed_base)
print(f"held-out loss of the base in 16 bits {held_out_loss(plain):.3f}, as it is trained {before:.3f}")

# %%
if four_bits:
    run_ranks(on_rank, 1, None if zero_problem else zero_2(), timeout_seconds=300)
    merge(str(folder / "base"), str(folder / "adapter"), str(folder / "merged"))
    tuned = held_out_loss(PeftModel.from_pretrained(packed_base, folder / "adapter"))
    merged = held_out_loss(load_base(folder / "merged", device=device))
    print(f"with adapters {tuned:.3f}; merged in 16 bits and reloaded {merged:.3f}")
    assert max(tuned, merged) < before - 0.05, "it hardly learns: is the learning rate 2e-3?"

# %% [markdown]
# **Read it.** The run is whole, from data to the reloaded merged model. Neither packing nor merging costs a thousandth of a
# nat here, on a base that has hardly learned; so short a run could show no more. On yours it may: the adapters learned on
# *rounded* weights, and merged into the others they meet what they never saw. So evaluate the model that you will serve.
# (Merged into *packed* weights, the sum would be rounded to sixteen levels anew.) On one rank ZeRO cuts nothing, and of
# adapters there is little to offload; [lesson 07](07_offload.ipynb) shows where that pays.
#
# ### Eight-bit moments, counted
#
# Each moment takes one byte per parameter, and one fp32 scale per 256; tensors below 4,096 elements stay in fp32.
# *Paged* moments can move out to the CPU when the GPU is full (on CUDA).

# %%
if four_bits:
    model, optimizer = build_finetune(config, "QLoRA + 8-bit AdamW", device=device, rank=64, targets=ALL_LINEAR)
    finetune_step(model, optimizer, 1, 64)
    sizes = [part.numel() for group in optimizer.param_groups for part in group["params"]]
    print(f"{sum(sizes):,} parameters: moments of {format_bytes(adam_state_bytes(sizes, 32))} in 32 bits, of",
          f"{format_bytes(adam_state_bytes(sizes, 8))} in 8 (predicted), {format_bytes(optimizer_bytes(optimizer))} (measured)")
    assert optimizer_bytes(optimizer) == adam_state_bytes(sizes, 8), "has it stepped yet?"
for name, count in (("every weight of 7B", P), ("the adapters of section 1", adapters)):
    print(f"8 instead of 32 bits for {name}: {(8 - 2) * count / GB:.2f} GB less ({Evidence.PREDICTED})")

# %% [markdown]
# **Read it.** To the byte. It would save 40 GB where every weight is trained; with adapters there is little to save.
#
# ## 5. Seven billion, simulated
#
# Lesson 05a showed what a simulated peak is worth. Here the script's step is simulated at depths 1, 2 and 3 and at three
# batch sizes, and extended to 32 layers and any batch, allocation by allocation. With flash attention, which keeps no
# matrix of scores, memory depends on the *number of tokens*, not on how they are cut into texts: pieces of 256 tokens
# stand for all shapes. The layers are the course's own; its tests hold them against `peft` and bitsandbytes.

# %%
def scripted(layers, method, targets=ALL_LINEAR, rank=16, autocast=True):
    smaller = llama_config(shape, num_hidden_layers=layers)
    model, optimizer = build_finetune(smaller, method, rank=rank, targets=targets)
    if autocast:  # as Trainer(bf16=True) does
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model, optimizer

# %% tags=["bench"]
PIECE, LENGTHS, MICRO_BATCHES = 256, (512, 1024, 2048, 4096), (1, 2, 4, 8)
counts = sorted({length * batch // PIECE for length in LENGTHS for batch in MICRO_BATCHES})


def at_size(method):
    return sweep(lambda layers: scripted(layers, method), lambda m, o, pieces: finetune_step(m, o, pieces, PIECE),
                 layers=shape.layers, from_layers=(1, 2, 3), batches=counts, device="RTX 4090", items=PIECE,
                 unit="tokens", name=method)

# %%
methods = ["LoRA", "QLoRA", "QLoRA + checkpointing"] if four_bits else ["LoRA"]
found = {method: at_size(method) for method in methods}

# %%
grids = {method: {(length, batch): pieces[length * batch // PIECE] for length in LENGTHS for batch in MICRO_BATCHES}
         for method, pieces in found.items()}
figure = draw_budget_map(grids, "24GB", title="Llama-2-7B: peak of a step in GB; red with a cross: over 24 GB")
show(figure, alt=f"Grids of peaks over sequence length and micro-batch, one each for {', '.join(methods)}.")
if four_bits:
    at_bet = grids["QLoRA"][2048, 1]
    print(*(f"{category}: {size / GB:.2f} GB" for category, size in at_bet.breakdown.items() if size > 0.005 * GB), sep="\n")
    print(f"your bet: {my_bet_gb} GB; the peak: {at_bet.peak_bytes / GB:.1f} GB ({at_bet.evidence})")

# %% [markdown]
# **Read it.** Packing saves the same 9.6 GB in every cell, because it shrinks the weights. Checkpointing saves more the
# more tokens there are: it is what lets thousands of them in. "QLoRA 7B takes 3.5 GB" is folklore: the weights alone
# (parameters and buffers) take more, and without checkpointing one text of 2,048 tokens peaks at more than five times
# that. (The meter counts logits as temporaries and activations: transformers computes the loss inside of forward.)
#
# The cap is 24 GB of tensors. Of what a card reports, its CUDA context takes about 0.5 GB (the course's assumption),
# and PyTorch reserves more than it uses. So on an A10 or an L4 leave some GB free.
#
# ### Which adapters, under which autocast?
#
# "7B fits" hangs on both. The bet's step again, one change at a time:

# %%
way = methods[:2][-1]
rows = {"as above: all matrices, rank 16, autocast": grids[way][2048, 1].peak_bytes}
for name, change in (("no autocast", {"autocast": False}), ("query and value, rank 8", {"targets": TARGETS, "rank": 8})):
    rows[name] = extrapolate(lambda layers: scripted(layers, way, **change), lambda m, o: finetune_step(m, o, 1, 2048),
                             layers=shape.layers, from_layers=(1, 2, 3), device="RTX 4090").peak_bytes
for name, peak in rows.items():
    print(f"{way}, {name:<42}{peak / GB:.1f} GB ({Evidence.SIMULATED})")

# %% [markdown]
# **Read it.** Adapters on every matrix keep every matrix's input: some GB, where "adapters are small" counts weights
# alone. fp32 adapters convert their input and keep the copy, 4 bytes a number; under autocast the copy has 2.
#
# ### Beside published peaks
#
# Is the simulator right? litgpt published the peak of its QLoRA of the same Llama-2-7B (an A100, allocated memory, texts
# of 1,304 tokens). Its step, simulated in its own configuration with the libraries of 2023
# ([norms in fp32](https://github.com/Lightning-AI/litgpt/commit/6178c7c): this row was among those that led to that
# choice, litgpt's 13B rows check it in `make validate`):

# %%
from evidence.validation.simulation_published import litgpt_step
from evidence.validation.tables import table

published = {row["quantization"]: float(row["max_gpu_ram_gb"]) for row in table("litgpt_adapters")
             if row["model"] == "Llama 2" and row["micro_batch"] == "1" and row["max_gpu_ram_gb"] != "OOM"}
kind = "bnb.nf4-dq" if four_bits else "None"
peak = litgpt_step("Llama 2", 1, kind, early=True, fp32_norms=True).peak_bytes / GB
print(f"{kind}: published {published[kind]:.2f} GB, simulated {peak:.2f} GB, ratio {peak / published[kind]:.3f}")
assert abs(peak / published[kind] - 1) < 0.05, "run `make validate` for all rows"
recorded_table("llama7b_adapters", columns=["method", "sequence_length", "micro_batch", "peak_bytes"])

# %% [markdown]
# **Read it.** Within 5%, where the configuration is the same to the last norm.
#
# ### The scenario as asked: a script for a real card
#
# *"Fine-tune a 7B model on our 24 GB card: four bits, LoRA, checkpointing, ZeRO."* The functions of section 4 with their
# imports, in a file. Accept the model's licence on the Hub first; `pairs.jsonl` has a prompt and an answer a line. Its
# batch, four texts of 1,024 tokens, is a cell of the map. ZeRO starts with two ranks.

# %%
ready = grids[methods[-1]][1024, 4]
here.write_script("finetune.py", IMPORTS, tokenized, qlora, zero_2, finetune, merge,
                  MAIN.replace("PEAK_GB", f"{ready.peak_bytes / GB:.1f}"))

# %%
score("06", f"Llama-2-7B, {methods[-1]}, 4 x 1,024 tokens", evidence=Evidence.SIMULATED, peak_bytes=ready.peak_bytes)
for run in pair:
    score("06", f"small Llama, {run.name}", peak_bytes=run.peak_bytes)
scoreboard("06")

# %% [markdown]
# **Read it.** The script has room on the smallest card of 24 GB. No card has confirmed it yet: the figure is simulated,
# with the course's NF4 layers. The script prints the card's own peak beside it.
#
# ## Break it, diagnose it
#
# PEFT's own guide to quantization calls `prepare_model_for_kbit_training` on a packed model. Look at what it does to the
# bytes, and to the step.

# %%
def step_peak(model):
    own = get_peft_model(model, LoraConfig(r=8, target_modules=list(TARGETS), task_type="CAUSAL_LM")).train()
    optimizer = adamw(own)
    return measure(lambda: finetune_step(own, optimizer, 8, 128), model=own, optimizer=optimizer, timed_steps=0).peak_bytes

# %%
for word in ("as packed", "prepared") if four_bits else ():
    model = load_base(folder / "base", quantization=four_bits, device=device)
    if word == "prepared":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        assert torch.bfloat16 not in {p.dtype for p in model.parameters()}, "PEFT keeps bf16 now"
    sizes = pd.Series([p.nbytes for p in model.parameters()]).groupby([str(p.dtype) for p in model.parameters()]).sum()
    print(f"{word:<10}{', '.join(f'{dtype} {format_bytes(size)}' for dtype, size in sizes.items())},",
          f"peak of a step {format_bytes(step_peak(model))}")
extra_gb = 2 * 2 * shape.vocabulary * shape.hidden / GB
print(f"at 7B, embeddings and head in fp32: {extra_gb:.2f} GB more ({Evidence.PREDICTED})")

# %% [markdown]
# **Diagnose it.** It freezes everything, and turns all that is not packed into fp32: embeddings, head and norms. That was
# meant for stability in fp16. The sum that runs through all blocks is then fp32 as well, and so is what each block keeps
# of it. In bf16 freeze the model yourself, as `get_peft_model` does.
#
# ## Recap
#
# - 16 bytes per parameter keep a full fine-tune of Llama-2-7B off a card of 24 GB, unless most of them leave it (lesson 07).
# - LoRA removes gradients and moments, NF4 three quarters of the weights, checkpointing most activations.
# - A map of peaks answers "does it fit?" before you rent a card; say which adapters, and which autocast.
# - Save adapters; merge into 16 bits, and evaluate that.
#
# **Test yourself.** A colleague runs QLoRA with 4,096 tokens, is out of memory, and turns on optimizer offload and ZeRO-2.
# What do you say?
#
# <details><summary>Answer</summary>
#
# Both touch states that are small already: the moments of adapters. The activations fill the card.
# Turn on checkpointing, or shorten the texts or the micro-batch; then look at the logits.
#
# </details>
#
# **Next** the [lab](../../labs/intermediate/06_seven_billion.ipynb), in a copy (`make my-labs`), and its
# [solution](../../solutions/intermediate/06_seven_billion.ipynb).
#
# **References.** Hu and others, *LoRA*, [arXiv:2106.09685](https://arxiv.org/abs/2106.09685). Dettmers and
# others, *QLoRA*, [arXiv:2305.14314](https://arxiv.org/abs/2305.14314); *8-bit Optimizers via Block-wise
# Quantization*, [arXiv:2110.02861](https://arxiv.org/abs/2110.02861). litgpt,
# [resource tables](https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch, no library.** `model` is yours. Write the names of your linear layers in place of `q_proj`, `v_proj`
# (`print(model)` shows them). Freeze first, wrap, and only then make the optimizer:
#
# ```python
# import torch
# from torch import nn
#
#
# class Lora(nn.Module):
#     def __init__(self, frozen, rank, alpha):
#         super().__init__()
#         self.frozen, self.scale = frozen, alpha / rank
#         where = {"device": frozen.weight.device, "bias": False}
#         self.down = nn.Linear(frozen.in_features, rank, **where)
#         self.up = nn.Linear(rank, frozen.out_features, **where)
#         nn.init.zeros_(self.up.weight)
#
#     def forward(self, x):
#         update = self.up(self.down(x.to(self.down.weight.dtype)))
#         return self.frozen(x) + (self.scale * update).to(x.dtype)
#
#
# model.requires_grad_(False)
# for path, layer in list(model.named_modules()):
#     if isinstance(layer, nn.Linear) and path.endswith(("q_proj", "v_proj")):
#         parent, _, name = path.rpartition(".")
#         setattr(model.get_submodule(parent), name, Lora(layer, rank=16, alpha=32))
# optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
# ```
#
# **transformers, peft, bitsandbytes.** `model_name` is a folder or a name on the Hub. Then train `model` in your loop, or
# give it to `Trainer(..., args=TrainingArguments(..., bf16=True))`:
#
# ```python
# import torch
# from peft import LoraConfig, get_peft_model
# from transformers import AutoModelForCausalLM, BitsAndBytesConfig
#
# packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
#                              bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
# model = AutoModelForCausalLM.from_pretrained(model_name, quantization_config=packing, dtype=torch.bfloat16)
# model.config.use_cache = False
# model.gradient_checkpointing_enable({"use_reentrant": False})
# model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear",
#                                          task_type="CAUSAL_LM"))
# model.print_trainable_parameters()
# ```
#
# **Look at** the trained share (about half a percent), the first loss (that of the frozen model), and
# `torch.cuda.max_memory_allocated()` beside the map: more than 2 GB above it, and a step is not checkpointed or its
# texts are longer than you think.
