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
# **Promise.** What brings a fine-tune of Llama-2-7B onto one card of 24 GB? The states of training all of it take
# 107.8 GB. You take that apart: adapters, four-bit weights, checkpointing, each by hand or in a line. Then four lines of
# peaks over tokens say which of the three a step needs, and you write the script for the real model.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 50 for the lab | any laptop (Windows: WSL2); a GPU if you have one; beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# You fine-tune Llama-2-7B by `peft`: weights in four bits, fp32 adapters of rank 16 on all matrices of its blocks, bf16
# autocast, no checkpointing, two texts of 1,024 tokens. Four bits are half a byte, so the weights should take 3.5 GB.
# What is the *peak* of such a step, in GB? And which alone brings four such texts under 24 GB: four bits, or
# checkpointing? Section 5 has both answers.

# %%
my_bet_gb = 3.5
my_bet_cure = "four bits"

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

from evidence.recorded import recorded_fine_tunes
from utils import GB, Evidence, compare, has_native_dtype, draw_breakdown, format_bytes, llama_config, load_base, measure, model_shape
from utils import predicted, prepare_ranks, run_ranks, score, scoreboard, scratch_folder, show, text_batches, text_tokens
from utils.data import docstring_pairs
from utils.models.finetune import finetune_step
from utils.simulation import extrapolate
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.techniques.bitsandbytes_import import bitsandbytes_problem
from utils.techniques.nf4 import dynamic_levels
from utils.lessons.lesson_06.budget_map import draw_budget_map, most_items
from utils.lessons.lesson_06.packing import pack, unpatched
from utils.lessons.lesson_06.planned import step_seconds
from utils.lessons.lesson_06.script_parts import MAIN, imports, pinned
from utils.lessons.lesson_06.small_base import write_small_base

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% jupyter={"source_hidden": true}
import peft
from accelerate.utils.operations import convert_outputs_to_fp32
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
print("Written for", pinned())
if deepspeed_problem() is None:
    load_deepspeed()  # Trainer imports it where it is installed; the lesson does not use it
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
moments_8 = 2 * (1 + 4 / 256)  # bytes a parameter: each moment one byte, and an fp32 scale for 256 of them
for name, count in (("every weight", P), ("the adapters", adapters)):
    print(f"eight-bit in place of fp32 moments, of {name}: {(8 - moments_8) * count / GB:.2f} GB less ({Evidence.PREDICTED})")
show(draw_breakdown([predicted(name, parts) for name, parts in sheet.items()], unit="GB",
                    title="States of Llama-2-7B, all held at once"),
     alt="; ".join(f"{name}: {sum(parts.values()) / GB:.1f} GB" for name, parts in sheet.items()))

# %% [markdown]
# **Read it.** The full sheet fills more than four cards of 24 GB. Its gradients and optimizer state exist because *every
# weight moves*. So let most weights stand still: a frozen weight needs no gradient and no moments. The two short
# bars are what you build now: LoRA, then QLoRA, its packed weights.
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
assert largest <= 1e-6, "your LoRA differs from PEFT's: compare scale and start values"

# %% [markdown]
# **Read it.** Your ten lines are what `peft` computes by default. Now the
# memory: `measure` counts a step of the same network, first with all weights trained, then with the adapters alone.

# %%
full, pair = LlamaForCausalLM(config).to(device), []
for name, model in (("all weights, fp32", full), ("LoRA, fp32", mine.to(device))):
    optimizer = adamw(model)
    pair.append(measure(lambda m=model, o=optimizer: finetune_step(m, o, 8, 128), model=model, optimizer=optimizer,
                        items=1024, unit="tokens", name=name, timed_steps=0))
share = sum(p.numel() for p in mine.parameters() if p.requires_grad) / sum(p.numel() for p in full.parameters())
print(f"LoRA trains {100 * share:.1f}% of the parameters, and its peak is",
      f"{100 * pair[1].peak_bytes / pair[0].peak_bytes:.0f}% of the full one")
compare(pair, title="A small Llama, 8 x 128 tokens: all or LoRA")

# %% [markdown]
# **Read it.** "LoRA trains 0.1% of the parameters, so it saves 99.9%" is folklore. The 67% are
# this small model's; of Llama-2-7B the states weigh more. Both peaks lie where backward begins, and no weight has a gradient yet. At that moment LoRA saves nearly all optimizer state, and part of the activations:
#
# - a linear layer keeps its input for one purpose, the gradient of its weight. Frozen, it keeps none;
# - an adapter is a linear layer that is trained, and keeps its input;
# - norms, attention and the activation function keep theirs, whoever is trained: backward passes through them on its
#   way to the adapters.
#
# Most activations stay, and so do the weights. Those two are left to shrink.
#
# ## 3. Four bits by hand
#
# A frozen weight is only read, so it may be coarse. **NF4** stores each weight as one of sixteen levels. Trained weights
# are close to a normal distribution (published: QLoRA, appendix F), so the levels are its quantiles: dense near zero.
# Eight lie above zero and seven below, so that zero itself is a level. Each block of 64 weights is divided by its
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
weight, even = torch.randn(512, 512), torch.linspace(-1, 1, 16)
with_outlier = weight.clone()
with_outlier[7, 7] = 12.0


def error(values, table, block=64):
    back = dequantize(*quantize(values, table, block), table).view_as(values)
    return f"{((back - values).abs().mean() / values.abs().mean()).item():.1%}"


cases = {"normal": weight, "normal, one outlier": with_outlier, "uniform": torch.rand(512, 512) - 0.5}
for name, values in cases.items():
    print(f"{name:<20} even steps: one scale {error(values, even, values.numel())},",
          f"blocks of 64 {error(values, even)}; NF4 in blocks {error(values, levels)}")

# %% [markdown]
# **Read it.** Blocks help twice: most have a smaller largest weight than the
# whole matrix, and an outlier makes 63 others coarse instead of all. NF4's levels win where weights crowd around
# zero, and lose where they are spread evenly.
#
# ### Double quantization
#
# An fp32 scale for each 64 weights is half a bit a weight. So the scales are quantized as well: their mean off, then
# eight bits each, 256 of them under one scale of their own (`dynamic_levels()`: the 256 values of bitsandbytes' eight-bit
# type, fine near zero). The library's codes beside yours:

# %%
codes, scales = quantize(weight, levels)
packed = (codes.flatten()[::2] << 4 | codes.flatten()[1::2]).to(torch.uint8)
scale_codes, outer = quantize(scales - scales.mean(), dynamic_levels(), block=256)
if four_bits:
    library = torch.ops.bitsandbytes
    theirs_packed, theirs_scales = library.quantize_4bit(weight, 64, "nf4", torch.uint8)
    apart = (packed != theirs_packed.flatten()).float().mean().item()
    print(f"of {packed.numel():,} bytes of codes {apart:.1e} differ from bitsandbytes'")
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
# vocabulary), raise 3.4 GB to 3.9 GB.
#
# How does a gradient pass a weight in four bits? Each product unpacks the weight, uses it and drops it; backward
# unpacks it again.

# %%
class Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scales):
        ctx.packed = codes, scales  # neither x nor the unpacked weight is kept
        return x @ dequantize(codes, scales, levels).view(512, 512).T

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ dequantize(*ctx.packed, levels).view(512, 512), None, None

# %%
x, y = (torch.ones(4, 512, requires_grad=True) for _ in range(2))
Packed.apply(x, codes, scales).square().sum().backward()
(y @ dequantize(codes, scales, levels).view(512, 512).T).square().sum().backward()
assert torch.equal(x.grad, y.grad), "backward multiplies by the weight, not by its transpose"
print("the gradient of the input is that of a plain layer with the unpacked weight")

# %% [markdown]
# What four bits cost in quality, [lesson 08](08_smaller_weights.ipynb) measures; under adapters, large models matched
# 16-bit fine-tuning (published: QLoRA, section 4).
#
# <div class="alert alert-warning"><b>Trap.</b> bitsandbytes is not <i>quantization-aware training</i>. That
# trains weights so that they survive rounding later. Here the packed weights never change: only
# adapters learn.</div>
#
# ## 4. The whole run
#
# Now all parts in one `Trainer`, as at work: NF4, `peft`, checkpointing. Four functions, first on a small base; section 5
# writes them to a file, for the real 7B. The task: from the first line of a function, write what it does. The loss counts
# **the answer alone**: labels of the prompt are -100.

# %%
folder = scratch_folder("lesson-06")
first, last = write_small_base(folder / "base", config, device)
print(f"a base, trained on Python's sources from a loss of {first:.2f} to {last:.2f}; in its folder:",
      *sorted(path.name for path in (folder / "base").iterdir()))

# %%
def tokenized(tokenizer, pairs, longest):
    """Token numbers, and labels that leave the prompt out of the loss."""
    rows = []
    for prompt, answer in pairs:
        asked = tokenizer(prompt).input_ids
        told = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids
        if len(asked + told) <= longest:  # cut, the answer would lose its end, or nothing of it would be left
            rows.append({"input_ids": asked + told, "labels": [-100] * len(asked) + told})
    return rows

# %%
pairs = docstring_pairs(120)
rows = tokenized(AutoTokenizer.from_pretrained(folder / "base"), pairs, longest=128)
print(pairs[0][0] + pairs[0][1], "\nlabels:", *rows[0]["labels"])
print(f"{len(rows)} of {len(pairs)} pairs have at most 128 tokens; the others are left out")

# %%
def qlora(base, dtype):
    """The base in four bits, every block checkpointed, adapters on all its linear layers."""
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                 bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=packing, dtype=dtype)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear",
                                            task_type="CAUSAL_LM"))

# %%
def finetune(base, pairs, output, longest, dtype=torch.bfloat16, **settings):
    """Train adapters on all pairs but a fifth, evaluate on that, save."""
    set_seed(0)
    arguments = TrainingArguments(output, bf16=dtype is torch.bfloat16, logging_steps=1, report_to="none",
                                  eval_strategy="epoch", **settings)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    held_out = len(pairs) // 5
    trainer = Trainer(qlora(base, dtype), arguments, DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=64),
                      tokenized(tokenizer, pairs[held_out:], longest), tokenized(tokenizer, pairs[:held_out], longest))
    trainer.train()
    trainer.save_model(output)  # the adapters alone
    return trainer

# %% [markdown]
# Only the adapters are saved. **Merging** adds (alpha / r) B A to W, so that inference pays nothing extra. The script
# merges into the *16-bit* base, in the host's memory: 2 bytes a parameter. Another way unpacks the four-bit base first
# (`model.dequantize()`) and merges into that.

# %%
def merge(base, adapter, output):
    """The adapters, added to the base in 16 bits: one plain model."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)
    AutoTokenizer.from_pretrained(base).save_pretrained(output)

# %% [markdown]
# `Trainer` runs in a process of its own, as it will at work:

# %% jupyter={"source_hidden": true}
TRAINED_IN = torch.bfloat16 if has_native_dtype("cpu", torch.bfloat16) else torch.float32  # emulated, it is many times slower


def on_rank():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU of every machine, as use_cpu says below
    warnings.simplefilter("ignore")
    transformers_logging.disable_progress_bar()
    with unpatched(), contextlib.redirect_stdout(io.StringIO()):  # Trainer prints every loss
        trainer = finetune(str(folder / "base"), pairs, str(folder / "adapter"), 128, TRAINED_IN, use_cpu=True,
                           num_train_epochs=1, per_device_train_batch_size=8, learning_rate=2e-3,
                           ddp_find_unused_parameters=False, disable_tqdm=True, save_strategy="no")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    means = [sum(some) / 3 for some in (losses[:3], losses[-3:])]
    print(f"{len(losses)} steps in {TRAINED_IN}: mean loss of the first three {means[0]:.2f}, of the last three {means[1]:.2f}")

# %%
def held_out_loss(model):
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    rows = tokenized(tokenizer, pairs[: len(pairs) // 5], longest=128)
    batch = DataCollatorForSeq2Seq(tokenizer)(rows).to(model.device)
    with torch.no_grad():
        return model(**batch, use_cache=False).loss.item()

# %%
plain, packed_base = (load_base(folder / "base", quantization=kind, device=device) for kind in (None, four_bits))
before = held_out_loss(packed_base)
print(f"held-out loss of the base in 16 bits {held_out_loss(plain):.4f}, in four bits {before:.4f}")

# %%
if four_bits:
    run_ranks(on_rank, 1, timeout_seconds=300)
    merge(str(folder / "base"), str(folder / "adapter"), str(folder / "merged"))
    tuned = held_out_loss(PeftModel.from_pretrained(packed_base, folder / "adapter"))
    merged = held_out_loss(load_base(folder / "merged", device=device))
    print(f"with adapters on four bits {tuned:.4f}; merged in 16 bits and reloaded {merged:.4f}")
    assert max(tuned, merged) < before - 0.05, "it hardly learns: is the learning rate 2e-3?"

# %% [markdown]
# **Read it.** The run is whole, from data to the reloaded merged model. Here packing and merging change the loss by far
# less than training does; but this base had hardly learned anything that rounding could harm. On yours it may: the adapters
# learned on *rounded* weights, and merged into the others they meet what they never saw. So evaluate the model that you
# will serve.
#
# ## 5. Seven billion, simulated
#
# Now the step that `Trainer(bf16=True)` takes, with `transformers`, `peft` and bitsandbytes themselves, on tensors without
# data as if on a GPU (lesson 05a). It runs at depths 1, 2 and 3, and is extended to 32 layers, allocation by allocation.
# Four ways to train: weights in 16 or in four bits, each with checkpointing and without, at two sizes:

# %%
def scripted(layers, packed, checkpointed, targets="all-linear", rank=16, autocast=True, prepare=False):
    model = AutoModelForCausalLM.from_config(llama_config(shape, num_hidden_layers=layers), dtype=torch.bfloat16)
    if packed:
        pack(model)  # bitsandbytes' Linear4bit in place of Linear, as from_pretrained makes them
    model = model.to("cuda")
    if prepare:  # for "Break it", below
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters).train()
    if autocast:  # what accelerate puts around forward for Trainer(bf16=True)
        model.forward = convert_outputs_to_fp32(torch.autocast("cuda", torch.bfloat16)(model.forward))
    return model, adamw(model)

# %%
CARD, SIZES = "RTX 4090", {False: (2048, 4096), True: (4096, 16384)}  # tokens of a step; True: checkpointed


def peaks(name, packed, checkpointed):
    return {tokens: extrapolate(lambda layers: scripted(layers, packed, checkpointed),
                                lambda m, o: finetune_step(m, o, tokens // 1024, 1024), layers=shape.layers,
                                from_layers=(1, 2, 3), device=CARD, items=tokens, unit="tokens", name=name)
            for tokens in SIZES[checkpointed]}

# %% tags=["bench"]
ways = {"LoRA": (False, False), "LoRA + checkpointing": (False, True)}
ways |= {"QLoRA": (True, False), "QLoRA + checkpointing": (True, True)} if four_bits else {}
found = {name: peaks(name, *way) for name, way in ways.items()}

# %%
figure = draw_budget_map({name: list(runs.values()) for name, runs in found.items()}, "24GB",
                         title=f"Llama-2-7B on an {CARD}: rank 16 on all, flash attention")
show(figure, alt="Peak over tokens: a line each for " + ", ".join(found) + ", and where it meets 24 GB.")

# %% [markdown]
# **Read it.** Points are simulated. A line is drawn through each pair. More tokens here
# means more texts of 1,024. Four bits lower a line; checkpointing makes it about nine times flatter. At the script's four texts, with seconds by lesson 15's planner:

# %%
for name, way in ways.items():
    step, most = found[name][4096], most_items(list(found[name].values()), "24GB")
    print(f"{name:<22}{step.peak_bytes / GB:5.1f} GB, reserved {step.reserved_bytes / GB:5.1f} ({Evidence.SIMULATED});",
          f"{step_seconds(*way):.2f} s ({Evidence.PREDICTED}); 24 GB hold {most:,.0f} tokens")
    score("06", f"Llama-2-7B, {name}, 4,096 tokens", evidence=Evidence.SIMULATED, peak_bytes=step.peak_bytes)

# %%
if four_bits:
    at_bet = found["QLoRA"][2048]
    print(*(f"{category}: {size / GB:.2f} GB" for category, size in at_bet.breakdown.items() if size > 0.005 * GB), sep="\n")
    print(f"your bet: {my_bet_gb} GB; the peak: {at_bet.peak_bytes / GB:.1f} GB ({at_bet.evidence})")

# %% [markdown]
# **Read it.** At the script's size checkpointing brings the step onto the card; four bits alone do not.
# Up to some 3,300 of them four bits without checkpointing fit, and nothing is recomputed. Up to some
# 15,000 checkpointed bf16 weights fit, and nothing is rounded. Beyond that you need both. By the planner checkpointing
# makes this step 40% longer, and four bits hardly; they round. On few tokens a step four bits cost time: each pass
# unpacks all weights. On an A100 with short texts, one a step, it took 62% longer (published: litgpt).
#
# The line is 24 GB of *tensors*. With your card compare what PyTorch *reserves*, and about 0.5 GB of CUDA context (the
# course's assumption). "QLoRA 7B takes 3.5 GB" is folklore: its weights alone take more, and the bet's step peaks at more
# than four times that.
#
# ### Which adapters, under which autocast?
#
# "7B fits" hangs on both. The bet's step again; the last row changes targets and rank together:

# %%
changes = {"as above: all matrices, rank 16, autocast": {}, "no autocast": {"autocast": False},
           "query and value, rank 8": {"targets": ["q_proj", "v_proj"], "rank": 8}}
for name, change in changes.items():
    peak = extrapolate(lambda layers: scripted(layers, bool(four_bits), False, **change),
                       lambda m, o: finetune_step(m, o, 2, 1024), layers=shape.layers, from_layers=(1, 2, 3), device=CARD)
    print(f"{name:<42}{peak.peak_bytes / GB:.1f} GB ({peak.evidence})")

# %% [markdown]
# **Read it.** Adapters on every matrix keep inputs that frozen layers would drop: some GB. Yet QLoRA's authors needed
# adapters on all linear layers to match full fine-tuning (published: QLoRA, section 4). Without autocast `peft` converts the input of each adapter to fp32, and each keeps its copy. Under autocast
# on CUDA an adapter beside a four-bit layer takes the bf16 input as it is, so query, key and value keep one tensor among
# them. Beside 16-bit layers `peft` casts it to fp32 for each, and autocast
# makes and keeps a bf16 copy of that: so LoRA's line is steeper than QLoRA's.
#
# ### The scenario as asked: a script for a real card
#
# *"Fine-tune a 7B model on our 24 GB card: four bits, LoRA, checkpointing, ZeRO."* The functions of section 4 with their
# imports, in a file. Accept the model's licence on the Hub first; `pairs.jsonl` has a prompt and an answer a line. ZeRO
# divides gradients and optimizer state over ranks: of adapters half a GB on the sheet, so two cards train by plain data
# parallelism here. [Lesson 07](07_offload.ipynb) has ZeRO-2, where every weight is trained.

# %%
here.write_script("finetune.py", imports(), tokenized, qlora, finetune, merge,
                  MAIN.replace("PEAK_GB", f"{found[list(ways)[-1]][4096].peak_bytes / GB:.1f}"))

# %%
scoreboard("06")

# %% [markdown]
# **Read it.** Can you trust them? A card ran such a step of another 7B:

# %%
for row in recorded_fine_tunes()[6:7] if four_bits else ():  # the same libraries, adapters and autocast, checkpointed, one text of 4,096 tokens
    again = row.simulated()
    print(f"{row.model}: {again.peak_bytes / GB:.2f} GB, reserved {again.reserved_bytes / GB:.1f} ({again.evidence});",
          f"{row.peak_bytes / GB:.2f} GB, reserved {row.reserved_bytes / GB:.1f} ({Evidence.RECORDED}: H200, 2026-11-26)")

# %% [markdown]
# **Read it.** The tensors' peak is the simulated one; the allocator reserved about 8% more than its replay. The script prints your
# card's own peak.
#
# ## Break it, diagnose it
#
# PEFT's own guide to quantization calls `prepare_model_for_kbit_training` on a packed model. Look at what it does to the
# bytes of the small base, and to the script's step at 7B.

# %%
for word in ("as packed", "prepared") if four_bits else ():
    model, prepare = load_base(folder / "base", quantization=four_bits, device=device), word == "prepared"
    if prepare:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    sizes = pd.Series([p.nbytes for p in model.parameters()]).groupby([str(p.dtype) for p in model.parameters()]).sum()
    step = found["QLoRA + checkpointing"][4096] if not prepare else extrapolate(
        lambda layers: scripted(layers, True, True, prepare=True), lambda m, o: finetune_step(m, o, 4, 1024),
        layers=shape.layers, from_layers=(1, 2, 3), device=CARD)
    print(f"{word:<10}{', '.join(f'{dtype} {format_bytes(size)}' for dtype, size in sizes.items())};",
          f"7B: peak of a step {step.peak_bytes / GB:.2f} GB ({Evidence.SIMULATED}), of it",
          ", ".join(f"{category} {size / GB:.2f}" for category, size in step.breakdown.items() if size > 0.005 * GB))

# %% [markdown]
# **Diagnose it.** It freezes everything, and turns all that is not packed into fp32: embeddings, head and norms. PEFT
# does it for stability. The sum that runs through all blocks is then fp32 as well, and so is what each block keeps
# of it: 1.07 GB. Where bf16 trains stably without the call, leave it out (`get_peft_model` freezes), and turn checkpointing
# on yourself, as it does by default.
#
# ## Recap
#
# - LoRA removes gradients and moments, NF4 nearly three quarters of the weights, checkpointing most activations.
# - With LoRA, the activations of thousands of tokens fill the card: checkpoint first, pack where that is not enough.
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
# **Plain PyTorch, no library.** `model` is yours, `blocks` the list of its blocks (`model.model.layers` in a Llama). Write
# the names of your linear layers in place of `q_proj`, `v_proj` (`print(model)` shows them). Freeze in bf16 first, wrap,
# and only then make the optimizer; call `step` for each batch:
#
# ```python
# from functools import partial
#
# import torch
# from torch import nn
# from torch.utils.checkpoint import checkpoint
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
#         return self.frozen(x) + self.scale * self.up(self.down(x))
#
#
# for weight in model.parameters():  # buffers, such as rotary frequencies, keep their type
#     weight.requires_grad_(False)
#     weight.data = weight.data.to(torch.bfloat16)
# for path, layer in list(model.named_modules()):
#     if isinstance(layer, nn.Linear) and path.endswith(("q_proj", "v_proj")):
#         parent, _, name = path.rpartition(".")
#         setattr(model.get_submodule(parent), name, Lora(layer, rank=16, alpha=32))
# if hasattr(model, "config"):  # transformers: recomputing would append to its cache of keys and values again
#     model.config.use_cache = False
# for block in blocks:
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)
# optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
# model.train()
#
#
# def step(batch):
#     with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
#         loss = model(**batch).loss
#     optimizer.zero_grad()
#     loss.backward()
#     optimizer.step()
#     return loss.item()
# ```
#
# **transformers, peft.** `model_name` is a folder or a name on the Hub. Without `packing` the weights stay in bf16. `step`
# is that of the first block, or give `model` to `Trainer(..., args=TrainingArguments(..., bf16=True))`:
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
# model.train()  # from_pretrained() returns it in eval mode, and then no block is checkpointed
# optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
# ```
#
# **Look at** the trained share (for this Llama 0.1% by the first block, 0.6% by the second), the first loss (the frozen model's), and the peak of a step:
# `torch.cuda.reset_peak_memory_stats()`, two steps, `torch.cuda.max_memory_allocated()`; then again with twice the
# tokens. At this size a token adds about 0.7 MB with checkpointing, 5 to 7 without: that tells whether it is on.
