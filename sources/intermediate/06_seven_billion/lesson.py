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
# **Promise.** Trained in full, Llama-2-7B needs 107.8 GB for its states alone (predicted). On one card of 24 GB you train
# adapters instead. For its texts, up to 4,096 tokens, what else do you need: four-bit weights, checkpointing, or both? You
# build adapters and four-bit packing by hand, draw the map that answers, and leave with a script.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 50 for the lab | any laptop (Windows: WSL2); a GPU if you have one; beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# You fine-tune Llama-2-7B with `peft`. The matrices of its blocks are frozen in four bits. Beside each stand small trained
# matrices in fp32, *adapters* of rank 16. A step takes two texts of 1,024 tokens under bf16 autocast, without
# checkpointing. How many GB does it take at its *peak*?
#
# Now leave the weights in 16 bits and take four such texts. They are too many for 24 GB. Which one change makes room:
# four-bit weights, or checkpointing?

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

from utils import GB, Evidence, draw_breakdown, has_native_dtype, llama_config, load_base, measure, model_shape
from utils import predicted, prepare_ranks, run_ranks, score, scratch_folder, show, text_batches, text_tokens
from utils.catalog import device as find_device
from utils.data import docstring_pairs
from utils.simulation import extrapolate
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.techniques.bitsandbytes_import import bitsandbytes_problem
from utils.techniques.nf4 import dynamic_levels
from utils.lessons.lesson_06.budget_map import draw_budget_map, most_items
from utils.lessons.lesson_06.kept import draw_kept, kept_by_block
from utils.lessons.lesson_06.packing import unpatched
from utils.lessons.lesson_06.recorded_runs import RECORDED_ON, beside_recorded, outside_allocator_bytes
from utils.lessons.lesson_06.script_parts import MAIN, imports, pinned
from utils.lessons.lesson_06.script_step import accumulated_step, scripted, step_seconds
from utils.lessons.lesson_06.small_base import write_small_base

# %% jupyter={"source_hidden": true}
import peft
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DataCollatorForSeq2Seq
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.utils import logging as transformers_logging

device = here.meter_device  # where the meter can count: CUDA or CPU
# peft asks transformers for something by a name that transformers has replaced.
warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()  # dequantize() tells its dtype
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
# Lesson 01 counted 16 bytes for each parameter that Adam trains: parameter and gradient in 16 bits, a copy in fp32, and
# two *moments*, which are running means. **LoRA** freezes the parameters and trains adapters. **QLoRA** also *packs* the
# frozen weights, here into four bits. Compare the totals. New words: [glossary](../00_glossary.ipynb).

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
saved = [(8 - moments_8) * count / GB for count in (P - shape.vocabulary * shape.hidden, adapters)]  # transformers keeps an embedding's in fp32
print(f"eight-bit moments save {saved[0]:.1f} GB of the full sheet, {saved[1]:.2f} GB of the others ({Evidence.PREDICTED})")
show(draw_breakdown([predicted(name, parts) for name, parts in sheet.items()], unit="GB",
                    title="States of Llama-2-7B; adapters of rank 16"),
     alt="; ".join(f"{name}: {sum(parts.values()) / GB:.1f} GB" for name, parts in sheet.items()))

# %% [markdown]
# **Read it.** With all weights trained, the states fill more than four cards. A frozen weight needs neither gradient nor
# optimizer state: LoRA leaves 14.1 GB, packed weights 4.5 GB.
#
# ## 2. LoRA by hand
#
# LoRA learns a difference of low rank r beside each frozen matrix W, the product of two thin matrices:
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
# Is that what `peft` does? Train the same small Llama twice, with your layer and with `peft`'s on query and value, from the
# same A.

# %%
config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, use_cache=False)
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


largest = max(abs(a / b - 1) for a, b in zip(twenty_losses(mine), twenty_losses(theirs), strict=True))
print(f"twenty steps, largest relative difference of the losses {largest:.1e}")
assert largest <= 1e-6, "your LoRA differs from PEFT's: compare scale and start values"

# %% [markdown]
# **Read it.** The losses are equal. Now a step's peak in this small model, first with all weights trained, then with your
# adapters:

# %%
full, peaks = LlamaForCausalLM(config).to(device), []
for name, model in (("full", full), ("LoRA", mine.to(device))):
    optimizer = adamw(model)
    step = measure(lambda m=model, o=optimizer: accumulated_step(m, o, 8, 128), model=model, optimizer=optimizer, timed_steps=0)
    at_peak = {str(category): size / step.peak_bytes for category, size in step.breakdown.items()}
    print(f"{name}: {at_peak['activations']:.0%} of the peak are activations ({Evidence.MEASURED})")
    peaks.append(step.peak_bytes)
share = sum(p.numel() for p in mine.parameters() if p.requires_grad) / sum(p.numel() for p in full.parameters())
print(f"LoRA trains {100 * share:.1f}% of the parameters, and its peak is {100 * peaks[1] / peaks[0]:.0f}% of the full one ({Evidence.MEASURED})")

# %% [markdown]
# **Read it.** "LoRA trains 0.1% of the parameters, so it saves 99.9%" is folklore. Here the peak falls by a third. At both
# peaks most bytes are activations.
#
# So what does a block *keep* until backward? Compare each bar with the last, where the block is *checkpointed*: computed
# again in backward ([lesson 05](05_checkpointing.ipynb)).

# %%
arms = {"all weights trained,\nfp32": {}, "LoRA: query, value": {"targets": ["q_proj", "v_proj"]},
        "LoRA: all matrices": {"targets": "all-linear"}}
arms |= {"QLoRA: all matrices": {"targets": "all-linear", "packed": True}} if four_bits else {}
arms |= {"LoRA or QLoRA,\ncheckpointed": {"targets": "all-linear", "checkpointed": True}}
kept = {name: kept_by_block(llama_config(shape, num_hidden_layers=2), **how) for name, how in arms.items()}
show(draw_kept(kept, "One block of Llama-2-7B: rank 16, bf16 autocast, flash attention"),
     alt="; ".join(f"{' '.join(name.split())}: {sum(parts.values()) / 1000:.0f} KB a token" for name, parts in kept.items()))

# %% [markdown]
# **Read it.** With adapters a block keeps a third less at best than the first bar, whose weights are fp32; checkpointed,
# next to nothing.
#
# - A linear layer keeps its input for the gradient of its weight. A frozen one keeps nothing.
# - Norms, attention, activation function and the product after it keep theirs.
# - Each adapter keeps its input. On query and value alone that is less, but QLoRA's authors needed all linear layers to
#   match full fine-tuning (published: QLoRA, section 4).
# - Beside packed layers, under autocast, `peft` omits a cast of the input, so adapters with the same input share it.
#
# ## 3. Four bits by hand
#
# **NF4** stores a frozen weight as one of sixteen levels. Trained weights are close to a normal distribution (published:
# QLoRA, appendix F), so the levels are its quantiles, dense near zero. First, each block of 64 weights is divided by its
# largest magnitude, the block's *scale*.

# %%
def quantiles(count):
    outermost = 1 - (1 / 32 + 1 / 30) / 2  # midway between the ends of 16 and of 15 equal shares
    return torch.special.ndtri(torch.linspace(outermost, 0.5, count + 1, dtype=torch.float64)[:-1])


levels = torch.cat([quantiles(8), -quantiles(7), torch.zeros(1, dtype=torch.float64)]).sort().values  # zero is one of them
levels = (levels / levels.max()).float()


def quantize(weight, levels, block=64):
    blocks = weight.float().reshape(-1, block)
    scales = blocks.abs().amax(dim=1)
    return torch.bucketize(blocks / scales[:, None], (levels[:-1] + levels[1:]) / 2), scales


def dequantize(codes, scales, levels):
    return levels[codes] * scales[:, None]

# %%
weight, even = torch.randn(512, 512), torch.linspace(-1, 1, 16)


def error(table, block=64):
    back = dequantize(*quantize(weight, table, block), table).view_as(weight)
    return f"{((back - weight).abs().mean() / weight.abs().mean()).item():.1%}"


print(f"mean error: even steps and one scale {error(even, weight.numel())}, in blocks of 64 {error(even)}; NF4 in blocks {error(levels)}")

# %% [markdown]
# **Read it.** Blocks of 64 nearly halve the error of even steps. NF4's levels lower it further, on the distribution that
# they were made for.
#
# ### Double quantization
#
# An fp32 scale for each 64 weights adds half a bit to each. So the scales are stored in eight bits too, less their mean,
# with one scale for 256 of them.

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
bits = {"fp32": packed.nbytes + scales.nbytes, "quantized": packed.nbytes + scale_codes.numel() + outer.nbytes + 4}
print("bits per weight:", ", ".join(f"{8 * size / weight.numel():.3f} with {name} scales" for name, size in bits.items()))
print(f"Llama-2-7B: half a byte a weight is {P / 2 / GB:.1f} GB; packed, with embeddings, head and norms in",
      f"16 bits, {packed_weights / GB:.1f} GB ({Evidence.PREDICTED})")

# %% [markdown]
# **Read it.** Your weights' codes are those of `bitsandbytes`. The model takes 3.9 GB and not 3.4: scales take room, and
# the embeddings and the *head*, the matrix that scores the vocabulary, stay in 16 bits.
# [Lesson 08](08_smaller_weights.ipynb) measures what four bits cost in quality.
#
# ## 4. The whole run
#
# Four functions read texts, build the model, train it and merge it, here on a small base. The task: from the first line of
# a Python function, write what it does. The loss counts **the answer alone**: it ignores tokens with the label -100.

# %%
folder = scratch_folder("lesson-06")
print("a base, trained on Python's sources: loss {:.2f}, then {:.2f}".format(*write_small_base(folder / "base", config, device)))

# %%
def tokenized(tokenizer, pairs, longest):
    """Token numbers, and labels that leave the prompt out of the loss."""
    rows = []
    for prompt, answer in pairs:
        asked = tokenizer(prompt).input_ids
        told = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids
        if len(asked + told) <= longest:  # cut, the answer would lose its end, or nothing of it would be left
            rows.append({"input_ids": asked + told, "labels": [-100] * len(asked) + told})
    print(f"{len(rows)} of {len(pairs)} pairs have at most {longest} tokens; the others are left out")
    return rows

# %%
pairs, tokenizer = docstring_pairs(120), AutoTokenizer.from_pretrained(folder / "base")
held_out = tokenized(tokenizer, pairs[: len(pairs) // 5], longest=128)  # what finetune() below holds out
print(pairs[0][0] + pairs[0][1], "\nlabels:", *held_out[0]["labels"])

# %%
def qlora(base, dtype):
    """The base in four bits, every block checkpointed, adapters on all linear layers of the blocks."""
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                 bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=packing, dtype=dtype)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear",
                                            task_type="CAUSAL_LM"))

# %%
def finetune(base, pairs, output, longest, dtype=torch.bfloat16, **settings):
    """Train adapters on all pairs but the first fifth, evaluate on that, save."""
    set_seed(0)
    arguments = TrainingArguments(output, bf16=dtype is torch.bfloat16, logging_steps=1, report_to="none",
                                  eval_strategy="epoch", **settings)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    held_out = max(1, len(pairs) // 5)
    trainer = Trainer(qlora(base, dtype), arguments, DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=64),
                      tokenized(tokenizer, pairs[held_out:], longest), tokenized(tokenizer, pairs[:held_out], longest))
    trainer.train()
    trainer.save_model(output)  # the adapters alone
    return trainer

# %% [markdown]
# Only the adapters are saved. **Merging** adds (alpha / r) B A to W and leaves a plain model.

# %%
def merge(base, adapter, output):
    """The adapters, added to the base in 16 bits: one plain model."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)
    AutoTokenizer.from_pretrained(base).save_pretrained(output)

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
    batch = DataCollatorForSeq2Seq(tokenizer)(held_out).to(model.device)
    with torch.no_grad():
        return model(**batch, use_cache=False).loss.item()


plain, packed_base, unpacked = (load_base(folder / "base", quantization=kind, device=device) for kind in (None, four_bits, four_bits))
before = held_out_loss(packed_base)
print(f"held-out loss of the base in 16 bits {held_out_loss(plain):.4f}, in four bits {before:.4f}")

# %%
if four_bits:
    run_ranks(on_rank, 1, timeout_seconds=300)
    merge(str(folder / "base"), str(folder / "adapter"), str(folder / "merged"))
    tuned = {"adapters on four bits": PeftModel.from_pretrained(packed_base, folder / "adapter"),
             "merged into 16 bits, reloaded": load_base(folder / "merged", device=device),
             "merged into the base unpacked from four bits": PeftModel.from_pretrained(unpacked.dequantize(), folder / "adapter").merge_and_unload()}
    losses = {name: held_out_loss(model) for name, model in tuned.items()}
    print(*(f"{name}: {loss:.4f}" for name, loss in losses.items()), sep="\n")
    assert max(losses.values()) < before - 0.05, "it hardly learns: is the learning rate 2e-3?"

# %% [markdown]
# **Read it.** Training lowers the held-out loss from 5.84 to 5.70. The adapters learned beside *rounded* weights; `merge`
# adds them to unrounded ones. This base cannot show what that costs: rounding moves its loss by 0.0001. Evaluate the
# model that you will serve.
#
# ## 5. Seven billion, simulated
#
# Now the step of `Trainer(bf16=True)` for 7B on a simulated GPU: its tensors have shapes and no numbers
# ([lesson 05a](05a_trusting_simulation.ipynb)). It runs with 1, 2 and 3 blocks, and `extrapolate` extends it to 32.
#
# First beside a real card, an H200, which ran two other models with older versions. Compare the peaks, then what the
# allocator *reserved* to hold them:

# %%
CARD, runs = "RTX 4090", beside_recorded(bool(four_bits))
over = (runs["reserved, recorded"] / runs["reserved, simulated"]).groupby(runs["method"]).max()
margin = over.max()
display(runs.style.format(precision=2).hide().set_caption(f"GB: every LoRA and QLoRA run that was recorded ({RECORDED_ON})"))
print(f"recorded over simulated, at most: peak {(runs['peak, recorded'] / runs['peak, simulated']).max():.4f};",
      "reserved", *(f"{most:.3f} ({method})" for method, most in over.items()))

# %% [markdown]
# **Read it.** The peaks agree to two decimals. The card reserved up to 1.097 times what was simulated. The map divides by
# that in all four ways; LoRA's own runs give 1.031. All six ran on another card.
#
# Now Llama-2-7B on a simulated RTX 4090 in four ways. `scripted` builds it as `qlora` did, under bf16 autocast;
# `accumulated_step` runs forward, backward and optimizer. Look at where each line meets the usable memory:

# %%
def peak(way, texts, length=1024, padded=False, **changes):
    return extrapolate(lambda layers: scripted(shape, layers, *way, **changes),
                       lambda model, optimizer: accumulated_step(model, optimizer, texts, length, padded=padded),
                       layers=shape.layers, from_layers=(1, 2, 3), device=CARD, items=texts * length, unit="tokens")

# %% tags=["bench"]
ways = {"LoRA": (False, False), "QLoRA": (True, False), "LoRA + checkpointing": (False, True), "QLoRA + checkpointing": (True, True)}
ways = {name: (packed, checkpointed) for name, (packed, checkpointed) in ways.items() if four_bits or not packed}
found = {name: {texts * 1024: peak(way, texts) for texts in ((4, 16) if way[1] else (2, 4))} for name, way in ways.items()}

# %%
card, lines = find_device(CARD), {name: [*some.values()] for name, some in found.items()}
outside = outside_allocator_bytes()
own, usable_bytes, doubled = (int((card.memory_bytes - factor * outside - 4 * adapters) / (1 + factor * (most - 1)))
                              for factor, most in ((1, over["lora"]), (1, margin), (2, margin)))
print(f"usable: {card.memory_bytes / GB:.1f} GB ({CARD}, sold as 24 GB) less {outside / GB:.2f} outside the allocator (recorded, H200) and",
      f"{4 * adapters / GB:.2f} of gradients from earlier micro-batches, divided by {margin:.3f}: {usable_bytes / GB:.1f} GB;",
      f"by LoRA's own {over['lora']:.3f}: {own / GB:.1f}; with twice as much outside and twice the excess over 1: {doubled / GB:.1f}")
for name, length in {"LoRA": 1024, "QLoRA": 2048, "LoRA + checkpointing": 4096}.items():
    if name in ways:
        text = peak(ways[name], 1, length=length, padded=True)
        print(f"{name}: one padded text of {length:,} tokens reserves {text.reserved_bytes / GB:.1f} GB ({Evidence.SIMULATED})")
figure = draw_budget_map(lines, usable_bytes, marks={"the bet": 2048, "four texts; all that Llama-2 can read": 4096},
                         title=f"Llama-2-7B on an {CARD}: rank 16 on all, autocast, flash attention")
show(figure, alt="GB over tokens: a line each for " + ", ".join(found) + ", and where it meets the card.")

# %% [markdown]
# **Read it.** A line is what the allocator reserves for a micro-batch, in texts of 1,024 tokens without padding. It goes
# through two simulated points; its ring marks where it meets the usable memory.
#
# *Micro-batches* divide many texts, and a single text cannot be cut: your longest one decides. The printed lines take one
# text each, padded.

# %%
rows = {}
for name, way in ways.items():
    (few, less), (many, more) = ((tokens, step.peak_bytes) for tokens, step in found[name].items())
    tokens, step = most_items(lines[name], usable_bytes), found[name][4096]
    rows[name] = {"MB a token": (more - less) / (many - few) / 1e6, "4 texts: peak, GB": step.peak_bytes / GB,
                  "tokens at once": f"{tokens:,.0f}", "16 texts, one by one: s": step_seconds(*way, 1, 1024, 16)}
    score("06", f"Llama-2-7B, {name}, 4,096 tokens", evidence=Evidence.SIMULATED, peak_bytes=step.peak_bytes)
display(pd.DataFrame(rows).T.style.format(precision=1).set_caption(f"{CARD}: bytes and tokens simulated, seconds predicted (lesson 15)"))

# %% [markdown]
# **Read it.** *Tokens at once* is where the ring lies. The rows go by the table's predicted seconds:
#
# 1. **LoRA alone** rounds nothing and computes nothing twice. Whether a text of 1,024 tokens fits is open: padded, it
#    reserves 22.5 GB, where 22.3 are usable, or 23.7 by LoRA's own runs.
# 2. **QLoRA** rounds the weights. A text of 2,048 tokens fits.
# 3. **LoRA with checkpointing** keeps 16 bits. A text of 4,096 tokens fits, all that Llama-2 can read.
# 4. **QLoRA with checkpointing** has room for the most texts at once. A card of 12 GB cannot hold 16-bit weights.
#
# Rows 2 and 3 hold with the printed 19.8 GB too. Call their seconds a tie (litgpt, below), and the rows a trade: row 2
# rounds, row 3 computes twice.
#
# So on 24 GB no text of Llama-2-7B needs both four bits and checkpointing (simulated). Checkpointing is enough for all
# 4,096 tokens, four bits for 2,048. Other models need their own map. The bet:

# %%
if four_bits:
    at_bet = found["QLoRA"][2048]
    print(f"the peak: {at_bet.peak_bytes / GB:.1f} GB ({at_bet.evidence}); your bet: {my_bet_gb} GB",
          "its parts above 0.2 GB (parameters: with adapters, without scales):",
          *(f"{category}: {size / GB:.2f} GB" for category, size in at_bet.breakdown.items() if size > 0.2 * GB), sep="\n")
    print(f"your cure: {my_bet_cure}; alone brings four texts onto the card:",
          *(name for name in ("QLoRA", "LoRA + checkpointing") if found[name][4096].reserved_bytes < usable_bytes))

# %% [markdown]
# **Read it.** "QLoRA 7B takes 3.5 GB" is folklore: most of this peak is activations. Nearly all of them are 171 KB (section
# 2) x 32 blocks x 2,048 tokens, 11.2 GB. So checkpointing makes room for four texts, and four bits do not.
#
# Both cost time. For 1,000 iterations on one text of Alpaca each, litgpt took 3.83 minutes with four bits and 2.36
# without (published: Llama-2-7B, A100), a longer delay than the table's. Time yours.
#
# ### The scenario as asked: a script for a real card
#
# *"Fine-tune a 7B model on our 24 GB card: four bits, LoRA, checkpointing, ZeRO."* The functions of section 4, in one
# file, do the first three; here they ran on the small base and a CPU alone, not on a GPU in bf16. First accept the model's
# licence on the Hub and log in (`hf auth login`). A line of `pairs.jsonl` is `{"prompt": "...", "answer": "..."}`.
#
# Its four texts of 1,024 tokens need checkpointing, not four bits: to keep 16 bits, omit `quantization_config`. To
# compute nothing twice, keep four bits, omit the checkpointing line, and take 8 micro-batches of 2.
#
# ZeRO-2 ([lesson 07](07_offload.ipynb)) divides gradients and optimizer state over cards. Of adapters these are half a GB:
# plain data parallelism is enough.

# %%
second_bytes = found[list(ways)[-1]][4096].peak_bytes + 4 * adapters  # from the second micro-batch on gradients are there
here.write_script("finetune.py", imports(), tokenized, qlora, finetune, merge, MAIN.replace("PEAK_GB", f"{second_bytes / GB:.1f}"))

# %% [markdown]
# ## Break it, diagnose it
#
# PEFT's guide to quantization calls `prepare_model_for_kbit_training` on a packed model. What does that do to the
# script's step?

# %%
if four_bits:
    steps = {"as packed": found["QLoRA + checkpointing"][4096], "prepared": peak((True, True), 4, prepare=True)}
    table = pd.DataFrame({name: {"peak": step.peak_bytes, **step.breakdown} for name, step in steps.items()}).fillna(0) / GB
    table.index = table.index.map(str)
    print(f"GB, {Evidence.SIMULATED}; parts above 0.2", table[table.max(axis=1) > 0.2].round(2).to_string(), sep="\n")

# %% [markdown]
# **Diagnose it.** What is not packed becomes fp32. Embeddings and head double (*parameters*), and autocast makes a bf16
# copy of the head (*cast weights*). What each checkpointed block keeps is fp32 too (*activations*).
#
# By default the call also turns checkpointing on. Where bf16 trains stably, leave it out, but keep the script's line
# `model.gradient_checkpointing_enable({"use_reentrant": False})`. Without both, four texts take 28.3 GB instead of 7.1.
#
# ## Recap
#
# - On 24 GB no text of Llama-2-7B needs both four bits and checkpointing (simulated). Checkpointing is
#   enough for all 4,096 tokens, four bits for 2,048.
# - LoRA removes nearly all gradients and optimizer state, NF4 seven tenths of the weights' bytes, checkpointing most
#   activations, which are 11.4 of the bet's 16.4 GB.
#
# **Test yourself.** QLoRA with 4,096 tokens is out of memory on 24 GB. A colleague turns on optimizer offload and ZeRO-2.
# What do you say?
#
# <details><summary>Answer</summary>
#
# Both touch small states. Most bytes are activations: checkpoint, or put fewer texts into a micro-batch.
#
# </details>
#
# **Next** the [lab](../../labs/intermediate/06_seven_billion.ipynb), in a copy (`make my-labs`), and its
# [solution](../../solutions/intermediate/06_seven_billion.ipynb).
#
# **References.** Hu and others, *LoRA*, [arXiv:2106.09685](https://arxiv.org/abs/2106.09685). Dettmers and
# others, *QLoRA*, [arXiv:2305.14314](https://arxiv.org/abs/2305.14314). litgpt,
# [resource tables](https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch, no library.** `model` is yours, `blocks` the list of its blocks (`model.model.layers` in a Llama). Write
# the names of your linear layers in place of `q_proj`, `v_proj`. Call `step` for each batch. Evaluate under its autocast
# too, because the adapters are fp32 and the rest is bf16.
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
# **transformers, peft.** `model_name` is a folder or a name on the Hub. Without `packing` the weights stay in bf16 and on
# the CPU, so add `.to("cuda")`. For `step` take the first block's, or give `model` to
# `Trainer(..., args=TrainingArguments(..., bf16=True))`:
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
# **Look at** the trained share, and at the peak of a step: `torch.cuda.reset_peak_memory_stats()`, two steps,
# `torch.cuda.max_memory_allocated()`; again with twice the tokens. In Llama-2-7B a token adds about 0.7 MB (simulated). If
# it adds 5 MB by the first block, or 6 by the second, checkpointing is off.
