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
# **Promise.** Training all of Llama-2-7B takes 107.8 GB before the first activation. You bring it onto a
# card of 24 GB: adapters and four-bit weights, first by hand, then as one complete run with `peft`, `bitsandbytes`
# and DeepSpeed, small here, and as a script for the real model. A map tells you which sizes fit.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 50 for the lab | any laptop (Windows: WSL2); a GPU if you have one; beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# You fine-tune Llama-2-7B with four-bit weights and fp32 adapters of rank 8 on the query and value matrices, without
# checkpointing or autocast, on one text of 2,048 tokens. Four bits are half a byte, so the weights should take 3.5 GB.
# What is the *peak* of such a step, in GB? Section 7 has the answer.

# %%
my_bet_gb = 3.5

# %% tags=["setup"]
here = setup("intermediate/06")

# %%
import contextlib
import io
import os
import warnings

import pandas as pd
import torch
from torch import nn

from utils import GB, Evidence, compare, computes, draw_breakdown
from utils import format_bytes, llama_config, load_base, measure, model_shape, predicted, prepare_ranks
from utils import recorded_table, run_ranks, score, scoreboard, scratch_folder, show, simulate, sweep, text_batches
from utils import text_tokens
from utils.catalog import device as gpu
from utils.data import docstring_pairs
from utils.models.finetune import ALL_LINEAR, METHODS, TARGETS, build_finetune, finetune_step
from utils.simulation import extrapolate
from utils.techniques import OffloadedOptimizer, adam_state_bytes, adamw_8bit, add_lora, merge_lora, optimizer_bytes
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.techniques.bitsandbytes_import import bitsandbytes_problem
from utils.techniques.nf4 import dynamic_levels
from utils.lessons.lesson_06.budget_map import draw_budget_map

device = here.meter_device  # where the meter can count: CUDA or CPU

# %%
# peft asks transformers for something by a name that transformers has replaced.
warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
import peft
import tokenizers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DataCollatorForSeq2Seq
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers import set_seed
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()
four_bits = None if bitsandbytes_problem() else "nf4-dq"
if four_bits is None:
    print(f"{bitsandbytes_problem()}. Nothing is packed into four bits here: section 3 compares with no")
    print("library, section 4 trains 16-bit weights with AdamW, section 5 is skipped, sections 6 and 7 show")
    print("LoRA and the full fine-tune, and section 8 and 'Break it' have no packed weights.")
zero_problem = deepspeed_problem()
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__} is here.")
prepare_ranks()  # section 5 runs on one; until then it imports what we did
if torch.cuda.is_available():
    print(os.popen("nvidia-smi").read())
    if here.dtype is torch.float16:
        print("No bfloat16 on this GPU: PyTorch emulates it. Believe the bytes here, not the times. The",
              "map of section 7 assumes flash attention, which this GPU lacks too.")

# %% [markdown]
# ## What you will be able to do
#
# - Fill in a states sheet for a full fine-tune, for LoRA and for QLoRA.
# - Write LoRA and NF4 yourself, and show that they equal the libraries.
# - Run a fine-tune from data to the merged model, and measure what four bits cost.
# - Say, for a given card, which sequence length and micro-batch fit, and what to change if they do not.
#
# Words that are new to you stand in the [glossary](../00_glossary.ipynb).
#
# ## 1. The states sheet
#
# Lesson 01 counted 16 bytes per parameter for training with Adam. Here is the sheet for Llama-2-7B, from
# its published shape. Rounded up to seven billion, 16 bytes make the 112 GB that you often read.

# %%
shape = model_shape("llama-2-7b")
P = shape.parameter_count
adapters = 2 * shape.layers * 8 * 2 * shape.hidden  # rank 8 on two square matrices a block
matrices = P - 2 * shape.vocabulary * shape.hidden - (2 * shape.layers + 1) * shape.hidden
packed_weights = matrices * (4 + 8 / 64 + 32 / 64 / 256) / 8 + 2 * (P - matrices)
sheet = {
    "full, mixed precision": {"parameters": 2 * P, "gradients": 2 * P, "optimizer state": 12 * P},
    "LoRA, bf16 weights": {"parameters": 2 * P + 4 * adapters, "gradients": 4 * adapters, "optimizer state": 8 * adapters},
    "QLoRA, packed weights": {"parameters": packed_weights + 4 * adapters, "gradients": 4 * adapters, "optimizer state": 8 * adapters}}
print(f"P = {P:,} ({shape.source})")
print(f"mixed with fp32 gradients, 18 bytes: {18 * P / GB:.1f} GB; folklore, 18 x 4 bytes: {72 * P / GB:.1f} GB")
show(draw_breakdown([predicted(name, parts) for name, parts in sheet.items()], limit="24GB", unit="GB",
                    title="States of Llama-2-7B, before any activation"),
     alt="; ".join(f"{name}: {sum(parts.values()) / GB:.1f} GB" for name, parts in sheet.items()))

# %% [markdown]
# **Read it.** The folklore (504 GB for a round 7B) multiplies 18 bytes by 4 bytes again. The true
# sheet fills more than four cards of 24 GB. Its gradients and optimizer state exist because *every weight
# moves*. So let most weights stand still: a frozen weight needs no gradient and no moments (Adam's two running
# means). The two short bars are what you build now: LoRA, then QLoRA, its packed weights (section 3).
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
# Now the same small Llama twice: once with your layer, once with `peft`. The cell copies peft's A and B
# over, because both are random, and then compares twenty steps.

# %%
config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                     num_attention_heads=4, use_cache=False)
mine, theirs = LlamaForCausalLM(config), LlamaForCausalLM(config)
theirs.load_state_dict(mine.state_dict())
theirs = peft.get_peft_model(theirs, peft.LoraConfig(
    r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
mine.requires_grad_(False)
pefts = [part for part in theirs.modules() if isinstance(part, peft.tuners.lora.Linear)]
for block in mine.model.layers:
    for name in ("q_proj", "v_proj"):
        layer, other = Lora(getattr(block.self_attn, name)), pefts.pop(0)
        layer.down.weight.data.copy_(other.lora_A["default"].weight)
        setattr(block.self_attn, name, layer)


# %%
def fit(model, optimizer, batches):
    losses = []
    for batch in batches:
        loss = model(**{name: part.to(model.device) for name, part in batch.items()}, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


windows = text_batches(text_tokens(20 * 4 * 32 + 1), batch=4, sequence=32)
short = [{"input_ids": tokens, "labels": tokens} for tokens, _ in windows]
by_hand, by_peft = (fit(m, torch.optim.AdamW(trained(m), lr=1e-3), short) for m in (mine, theirs))
largest = max(abs(a / b - 1) for a, b in zip(by_hand, by_peft, strict=True))
print(f"{len(by_hand)} steps, largest relative difference {largest:.1e}")
assert largest <= 1e-6, "your LoRA differs from PEFT's: compare scale, start values and dropout"

# %% [markdown]
# **Read it.** The losses are the same: there is nothing else in LoRA. Now its memory. `measure` counts a
# step of the same network, first with all weights trained, then with the adapters alone.

# %%
def step_of(model, optimizer, sequences=8, length=128):
    return lambda: finetune_step(model, optimizer, sequences, length)


full = LlamaForCausalLM(config).to(device)
pair = []
for name, model in (("all weights, fp32", full), ("LoRA, fp32", mine.to(device))):
    optimizer = torch.optim.AdamW(trained(model))
    pair.append(measure(step_of(model, optimizer), model=model, optimizer=optimizer,
                        items=1024, unit="tokens", name=name, timed_steps=0))
share = sum(p.numel() for p in trained(mine)) / sum(p.numel() for p in full.parameters())
print(f"LoRA trains {100 * share:.1f}% of the parameters, and its peak is",
      f"{100 * pair[1].peak_bytes / pair[0].peak_bytes:.0f}% of the full one")
compare(pair, title="A small Llama, all weights or adapters")

# %% [markdown]
# **Read it.** "LoRA trains 0.1% of the parameters, so it saves 99.9%" is folklore. The optimizer
# state all but vanishes (gradients come after this peak). The weights stay. So do most of the activations: a frozen layer need
# not keep its input, but backward still passes through it on its way to the adapters. Two things are
# left to shrink.
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


def nearest(values, levels):
    return torch.bucketize(values, (levels[:-1] + levels[1:]) / 2)


def quantize(weight, levels, block=64):
    blocks = weight.float().reshape(-1, block)
    scales = blocks.abs().amax(dim=1)
    return nearest(blocks / scales[:, None], levels), scales


def dequantize(codes, scales, levels):
    return levels[codes] * scales[:, None]


# %%
weight = torch.randn(512, 512)
weight[7, 7] = 12.0  # one outlier, as trained models have them
even = torch.linspace(-1, 1, 16)
for name, table, block in (("even steps, one scale", even, weight.numel()),
                           ("even steps, blocks of 64", even, 64),
                           ("NF4, blocks of 64", levels, 64)):
    back = dequantize(*quantize(weight, table, block), table).view_as(weight)
    print(f"{name:<26} mean error {(back - weight).abs().mean():.3f}, of weights with a spread of 1")
codes, scales = quantize(weight, levels)


def relative_error(values, table):
    return ((dequantize(*quantize(values, table), table).view_as(values) - values).abs().mean() / values.abs().mean()).item()


for name, values in (("normal", torch.randn(512, 512)), ("uniform", torch.rand(512, 512) - 0.5),
                     ("heavy tails", torch.distributions.StudentT(3.0).sample((512, 512)))):
    print(f"{name:<12} weights: error {relative_error(values, even):.1%} with even steps, {relative_error(values, levels):.1%} with NF4")

# %% [markdown]
# **Read it.** With a single scale one outlier makes all other weights coarse; blocks keep the harm local. NF4's levels
# win where weights crowd around zero, as trained ones do, and lose where they are spread evenly: a table fits a
# distribution. Now the library: the same codes, ties apart.

# %%
packed = (codes.flatten()[::2] << 4 | codes.flatten()[1::2]).to(torch.uint8)
if four_bits:
    theirs_packed, theirs_scales = (library := torch.ops.bitsandbytes).quantize_4bit(weight, 64, "nf4", torch.uint8)
    theirs = torch.stack([theirs_packed >> 4, theirs_packed & 15], dim=-1).view_as(codes).long()
    off = [(levels[chosen] - weight.view(-1, 64) / scales[:, None]).abs() for chosen in (codes, theirs)]
    assert torch.allclose(*off, atol=1e-6), "scales are each block's largest |w|, a code is that of the nearest level"
    unpacked = library.dequantize_4bit(theirs_packed, theirs_scales, 64, "nf4", weight.shape, torch.float32)
    difference = (unpacked.view(-1, 64) - dequantize(theirs, scales, levels)).abs().max()
    print(f"{(codes == theirs).sum():,} of {codes.numel():,} codes are those of bitsandbytes; largest difference {difference:.0e}")
    assert difference < 1e-5, "a weight comes back as level times scale"

# %% [markdown]
# ### Double quantization
#
# One fp32 scale for 64 weights is half a bit per weight. QLoRA quantizes the scales too, into eight bits:
# take off their mean, then blocks of 256 share an fp32 scale of their own. The eight-bit levels
# are another table, in `utils/techniques/nf4.py`.

# %%
mean = scales.mean()
scale_codes, outer = quantize(scales - mean, dynamic_levels(), block=256)
again = dequantize(scale_codes, outer, dynamic_levels()).flatten() + mean
print(f"scales: {100 * ((again - scales) / scales).abs().mean():.2f}% off on average")
if four_bits:  # for fp64 bitsandbytes looks at every level; its quick fp32 kernel may miss by one
    theirs_codes, theirs_outer = library.quantize_blockwise((scales - mean).double(), dynamic_levels(), 256)
    assert torch.equal(scale_codes.flatten(), theirs_codes.flatten().long()), "subtract the mean first"
    assert torch.equal(outer, theirs_outer), "blocks of 256 scales share one"
    print(f"all {theirs_codes.numel():,} codes of scales are those of bitsandbytes")
single = 8 * (packed.nbytes + scales.nbytes) / weight.numel()
double = 8 * (packed.nbytes + scale_codes.numel() + outer.nbytes + 4) / weight.numel()
print(f"bits per weight: {single:.3f} with fp32 scales, {double:.3f} with double quantization")
print(f"Llama-2-7B: half a byte a weight is {P / 2 / GB:.1f} GB; packed, with embeddings, head and norms in",
      f"16 bits, {packed_weights / GB:.1f} GB ({Evidence.PREDICTED})")

# %% [markdown]
# **Read it.** Half a byte per weight is not all: scales, and the layers that stay in 16 bits (embeddings, and
# the *head*, the last matrix, onto the vocabulary), raise 3.4 GB to 3.9 GB. A matmul unpacks the layer's weight to
# 16 bits, uses it and drops it, in forward and again in backward.
#
# <div class="alert alert-warning"><b>Trap.</b> bitsandbytes is not <i>quantization-aware training</i>. That
# trains weights so that they survive rounding later. Here the packed weights never change: only
# adapters learn, in fp32.</div>
#
# ## 4. What do four bits cost?
#
# First a base: a small model learns Python's own sources, with a tokenizer made of the same text, and goes to a
# folder as a real one comes from the Hub: configuration, weights, tokenizer.

# %%
folder = scratch_folder("lesson-06")
text = bytes(text_tokens(200_000).tolist()).decode(errors="replace")
bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(text.splitlines(True), tokenizers.trainers.BpeTrainer(
    vocab_size=512, special_tokens=["</s>"], show_progress=False,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="</s>")
torch.manual_seed(0)
base = LlamaForCausalLM(config).to(device)
windows = text_batches(torch.tensor(tokenizer(text).input_ids), batch=8, sequence=64)
pretraining = [{"input_ids": tokens, "labels": tokens} for tokens, _ in (next(windows) for _ in range(60))]
losses = fit(base, torch.optim.AdamW(base.parameters(), lr=3e-3), pretraining)
for part in (base, tokenizer):
    part.save_pretrained(folder / "base")
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f} nats per token; in the folder:",
      *sorted(path.name for path in (folder / "base").iterdir()))

# %% [markdown]
# The task: from the first line of a function, write what it does. Prompts and answers are Python's own. The loss
# counts **the answer alone**: the labels of a prompt are -100, which cross-entropy leaves out. The first fifth
# of the pairs is held out.

# %%
def tokenized(tokenizer, prompt, answer, longest):
    """Token numbers, and labels that leave the prompt out of the loss."""
    asked = tokenizer(prompt).input_ids
    told = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids
    return {"input_ids": (asked + told)[:longest], "labels": ([-100] * len(asked) + told)[:longest]}


pairs = docstring_pairs(160)
examples = [tokenized(tokenizer, *pair, longest=128) for pair in pairs]
collate = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=64)  # pads labels with -100
held_out = [collate(examples[i : i + 8]) for i in range(0, 32, 8)]
print(pairs[0][0] + pairs[0][1])
for name, numbers in examples[0].items():
    print(f"{name:<10}", *numbers)

# %%
def on(model, batch):
    return model(**{name: part.to(model.device) for name, part in batch.items()}, use_cache=False)


@torch.no_grad()
def held_out_loss(model):
    model.train()  # nothing is dropped here
    return sum(on(model, batch).loss.item() for batch in held_out) / len(held_out)


@torch.no_grad()
def logits(model):
    model.train()
    return torch.cat([on(model, b).logits.float()[b["labels"] != -100] for b in held_out])


# %%
IN = torch.bfloat16 if computes(device, torch.bfloat16) else torch.float32  # where bf16 is emulated, many times slower
bases = {"16 bits": load_base(folder / "base", device=device)}
if four_bits:
    bases["4 bits"] = load_base(folder / "base", quantization=four_bits, device=device)
for name, model in bases.items():
    apart = (logits(model) - logits(bases["16 bits"])).abs().mean()
    print(f"base in {name}: held-out loss {held_out_loss(model):.3f}, mean logit distance {apart:.3f}")
print(f"the logits' own standard deviation: {logits(bases['16 bits']).std():.2f}")

# %% [markdown]
# **Read it.** This is what packing itself does, before anything learns, and no seed is in it: the logits move by
# a small part of their spread. Now train adapters, changing one thing at a time: the base, then the optimizer.
# Each arm runs with three seeds, which draw matrix A and the order of the batches. Would this run show a cost at all? A
# control tells: a base of three levels, -1, 0 and 1, with one scale a matrix.

# %%
def base_in(kind):
    if kind != "three levels":
        return load_base(folder / "base", quantization=kind, dtype=IN, device=device)
    model, table = load_base(folder / "base", dtype=IN, device=device), torch.linspace(-1, 1, 3)
    for weight in (part.weight for part in model.model.modules() if isinstance(part, nn.Linear)):
        own = weight.data.cpu()
        weight.data.copy_(dequantize(*quantize(own, table, own.numel()), table).view_as(own))
    return model


# %%
ARMS = {"control: three levels, AdamW": ("three levels", torch.optim.AdamW), "unpacked base, AdamW": (None, torch.optim.AdamW)}
if four_bits:
    ARMS |= {"4-bit base, AdamW": (four_bits, torch.optim.AdamW), "4-bit base, 8-bit AdamW": (four_bits, adamw_8bit)}


def trained_once(kind, make, seed):
    torch.manual_seed(seed)
    model = peft.get_peft_model(base_in(kind), peft.LoraConfig(r=32, lora_alpha=64, target_modules="all-linear",
                                                                task_type="CAUSAL_LM")).train()
    optimizer = make(trained(model), lr=2e-3)
    fit(model, optimizer, torch.utils.data.DataLoader(examples[32:128], 8, shuffle=True, collate_fn=collate))
    return held_out_loss(model), model, optimizer


ends, untrained = {}, held_out_loss(bases["16 bits"])
for arm, (kind, make) in ARMS.items():
    found = [trained_once(kind, make, seed) for seed in range(3)]
    ends[arm] = [after for after, *_ in found]
    assert max(ends[arm]) < untrained - 0.1, f"{arm} hardly learns: is the learning rate 2e-3?"
    last_model, last_optimizer = found[-1][1:]
table = pd.DataFrame(ends, index=["seed 0", "seed 1", "seed 2"]).T
table["mean"], table["spread"] = table.mean(axis=1), table.max(axis=1) - table.min(axis=1)
table.style.format("{:.3f}").set_caption(f"held-out loss after twelve steps; of the base before them: {untrained:.3f}")

# %% [markdown]
# **Read it.** Compare seed by seed: the arms share their seeds, so the spread between seeds is no yardstick. The control
# costs hundredths of a nat; of four bits, or eight-bit moments, nothing that large shows. More a small model cannot
# say. On large ones NF4 with double quantization matched 16-bit fine-tuning (published: QLoRA,
# section 4).
#
# ### Eight-bit moments, counted
#
# Each moment takes one byte per parameter, and one fp32 scale per 256. Tensors below 4,096 elements stay
# in fp32. Two tables of 256 values are there once. *Paged* moments can move out to the CPU when the GPU is
# full; they need CUDA.

# %%
sizes = [parameter.numel() for group in last_optimizer.param_groups for parameter in group["params"]]
for bits in (32, 8):
    print(f"{sum(sizes):,} parameters, moments in {bits} bits: {format_bytes(adam_state_bytes(sizes, bits))} ({Evidence.PREDICTED})")
print(f"what the last optimizer holds: {format_bytes(optimizer_bytes(last_optimizer))} ({Evidence.MEASURED})")
assert optimizer_bytes(last_optimizer) == adam_state_bytes(sizes, bits=8 if four_bits else 32), "has it stepped yet?"
print(f"8 instead of 32 bits for every weight of 7B: {(8 - 2) * P / GB:.0f} GB less ({Evidence.PREDICTED})")

# %% [markdown]
# **Read it.** To the byte. Eight bits take a quarter. With every weight trained that would save 40 GB at 7B; with
# adapters there is little to save.
#
# ## 5. The whole run
#
# Now all parts in one `Trainer`, as at work: NF4 with double quantization, `peft`, checkpointing, and
# DeepSpeed with the optimizer offloaded (ZeRO-2, lesson 07); tokenized data, masked prompts, evaluation, saving. Five
# functions; section 7 writes them to a file, as a script for the real 7B.

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


def merge(base, adapter, output):
    """The adapters, added to the base in 16 bits: one plain model."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)
    AutoTokenizer.from_pretrained(base).save_pretrained(output)


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
# DeepSpeed wants a process group, so a rank runs it; the same run without DeepSpeed stands beside it.

# %%
RANK_IN = torch.bfloat16 if computes("cpu", torch.bfloat16) else torch.float32  # as IN, for ranks on the CPU


def on_rank(deepspeed):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU of every machine, as use_cpu says below
    warnings.simplefilter("ignore")
    transformers_logging.disable_progress_bar()
    if deepspeed:
        load_deepspeed()  # for the CPU, as here
    with contextlib.redirect_stdout(io.StringIO()):  # Trainer prints every loss
        trainer = finetune(str(folder / "base"), pairs, str(folder / "adapter"), 128, deepspeed, RANK_IN, use_cpu=True,
                           num_train_epochs=1, per_device_train_batch_size=8, learning_rate=2e-3,
                           ddp_find_unused_parameters=False, disable_tqdm=True, save_strategy="no")
    return type(trainer.model_wrapped).__name__, trainer.state.log_history


def logged(log, key):
    return [row[key] for row in log if key in row]


# %%
logs = {}
if four_bits:
    logs["without DeepSpeed"] = run_ranks(on_rank, 1, None, timeout_seconds=300)[0]
    if not zero_problem:
        logs["ZeRO-2 + offload"] = run_ranks(on_rank, 1, zero_2(), timeout_seconds=300)[0]
before = held_out_loss(bases["4 bits" if four_bits else "16 bits"])
for name, (wrapper, log) in logs.items():
    losses, (end,) = logged(log, "loss"), logged(log, "eval_loss")
    print(f"{name:<18} {wrapper}, {RANK_IN}: training loss {losses[0]:.3f} to {losses[-1]:.3f}, held out {before:.3f} to {end:.3f}")
    assert end < before - 0.1, "it hardly learns: is the learning rate 2e-3?"

# %%
if len(logs) == 2:
    apart = max(abs(a - b) for a, b in zip(*(logged(log, "loss") for _, log in logs.values()), strict=True))
    print(f"largest difference of the logged losses: {apart:.0e} nats")
    assert apart < 1e-3, "DeepSpeed trains another model: same seed, batches and precision?"
if logs:
    merge(str(folder / "base"), str(folder / "adapter"), str(folder / "merged"))
    end = logged(list(logs.values())[-1][1], "eval_loss")[-1]
    print(f"reloaded from {sorted(path.name for path in (folder / 'merged').iterdir())}")
    print(f"held-out loss of adapters on the packed base {end:.3f},",
          f"merged in 16 bits {held_out_loss(load_base(folder / 'merged', device=device)):.3f}")

# %% [markdown]
# **Read it.** The run is whole (rank 16 and a falling rate: it ends higher than section 4), to the reloaded merged
# model. DeepSpeed trains the same model: in bf16 its adapters, rounded from an fp32 copy, are what autocast makes of fp32
# adapters without it. (Where the CPU emulates bf16, both ran in fp32.)
# What its offload is worth: [lesson 07](07_offload.ipynb).
#
# ## 6. The methods, measured small
#
# `build_finetune` makes the methods that the rest of the lesson compares, from the course's own layers. Its
# tests hold them against `peft` and bitsandbytes. Adapters train on a frozen model in bf16; the full
# fine-tune trains fp32 weights under bf16 autocast, with checkpointing. First small and for real.

# %%
methods = [name for name, method in METHODS.items() if four_bits or not method.needs_bitsandbytes]
measured = []
for name in methods:
    model, optimizer = build_finetune(config, name, device=device)
    measured.append(measure(step_of(model, optimizer), model=model, optimizer=optimizer,
                            items=1024, unit="tokens", name=name, timed_steps=0))
compare(measured, title=f"A small Llama, {len(methods)} ways, 1,024 tokens")

# %% [markdown]
# **Read it.** In so small a model activations outweigh the weights: checkpointing shows, packing hardly. Eight-bit
# moments change nothing: these adapters have 1,024 elements a tensor, so their moments stay in fp32 (section 4). Which
# method matters at 7B? Section 7 runs the same two functions at full size.
#
# ## 7. Seven billion, simulated
#
# Lesson 05a showed what a simulated peak is worth. Here a step of Llama-2-7B is simulated at depths 2, 3
# and 4 and at three batch sizes, and extended to 32 layers and any batch, allocation by allocation. With
# flash attention, which keeps no matrix of scores, memory depends on the *number of tokens*, not on how they
# are cut into texts. So pieces of 256 tokens stand for all shapes. The cell after the next holds that to
# 0.1%, for the last method of the map, two layers deep. Adapters are the bet's; what others cost follows below.

# %% tags=["bench"]
PIECE = 256
LENGTHS, MICRO_BATCHES = (512, 1024, 2048, 4096), (1, 2, 4, 8)
TOKENS = sorted({length * batch for length in LENGTHS for batch in MICRO_BATCHES})


def at_size(method):
    return sweep(
        lambda layers: build_finetune(llama_config(shape, num_hidden_layers=layers), method),
        lambda model, optimizer, pieces: finetune_step(model, optimizer, pieces, PIECE),
        layers=shape.layers, from_layers=(2, 3, 4), batches=[count // PIECE for count in TOKENS],
        device="RTX 4090", items=PIECE, unit="tokens", name=method,
    )


mapped = [name for name in methods if name in ("LoRA", "QLoRA", "QLoRA + checkpointing")]
found = {method: at_size(method) for method in mapped}
grids = {
    method: {(length, batch): pieces[length * batch // PIECE]
             for length in LENGTHS for batch in MICRO_BATCHES}
    for method, pieces in found.items()
}

# %%
shallow = llama_config(shape, num_hidden_layers=2)
two = [simulate(lambda: build_finetune(shallow, mapped[-1]), lambda m, o, s=size: finetune_step(m, o, *s),
                device="RTX 4090").peak_bytes for size in ((8, 256), (1, 2048))]
print(f"2,048 tokens as one text or as eight: {100 * (two[1] / two[0] - 1):+.3f}%")
assert abs(two[1] / two[0] - 1) < 1e-3, "with flash attention tokens count, not texts: eager here?"

# %%
figure = draw_budget_map(grids, "24GB", title="Llama-2-7B: peak of a step in GB; red with a cross: over 24 GB")
show(figure, alt=f"Grids of peaks over sequence length and micro-batch, one each for {', '.join(mapped)}.")
if four_bits:
    at_bet = found["QLoRA"][2048 // PIECE]
    print(*(f"{category}: {size / GB:.2f} GB" for category, size in at_bet.breakdown.items() if size > 0.005 * GB), sep="\n")
    print(f"your bet: {my_bet_gb} GB; the peak: {at_bet.peak_bytes / GB:.1f} GB ({at_bet.evidence})")
    print(f"with 8-bit AdamW: {(8 - 2) * adapters / GB:.3f} GB less ({Evidence.PREDICTED}, section 4)")
print("cards show:", ", ".join(f"{name} {gpu(name).memory_bytes / GB:.1f} GB" for name in ("RTX 4090", "A10", "L4")))

# %% [markdown]
# **Read it.** Packing saves the same 9.6 GB in every cell, because it shrinks the weights. Checkpointing
# saves more the more tokens there are. "QLoRA 7B takes 3.5 GB" is folklore: the weights alone (parameters and buffers)
# take 3.9 GB, and without checkpointing one text of 2,048 tokens peaks at more than four times the 3.5. With it, the
# largest cell that fits holds sixteen times the tokens of LoRA's. Logits are not a category of their own here:
# transformers computes the loss inside of forward, so the meter counts them as temporaries and activations.
#
# The cap is 24 GB of tensors. Of what a card's driver reports (the last line), its CUDA context takes about 0.5 GB (the
# course's assumption), and PyTorch reserves more than it uses. So on an A10 or an L4 leave some GB free.

# %% [markdown]
# ### Beside published peaks
#
# The simulator against peaks that others measured: litgpt's LoRA of the same Llama-2-7B on an A100 (allocated
# memory, texts of 1,304 tokens), and PEFT's of a 3B on an L40S (reserved memory, evaluation included). Each row but
# the last, our map's, is simulated in its own configuration; litgpt's NF4 twice, with the libraries of its time and
# today's. Its norms are simulated in fp32 ([a change](https://github.com/Lightning-AI/litgpt/commit/6178c7c) made before
# the tables were published). These rows led to that choice; litgpt's 13B rows check it (`make validate`).

# %%
from evidence.validation.simulation_published import litgpt_step, peft_step
from evidence.validation.tables import table

lit = {(row["quantization"], row["micro_batch"]): float(row["max_gpu_ram_gb"])
       for row in table("litgpt_adapters") if row["model"] == "Llama 2" and row["max_gpu_ram_gb"] != "OOM"}
cases = [("litgpt, Llama 2 7B, bf16", lit["None", "1"], litgpt_step("Llama 2", 1, "None", early=False, fp32_norms=True).peak_bytes)]
if four_bits:
    cases += [(f"litgpt, Llama 2 7B, NF4-dq, {when}", lit["bnb.nf4-dq", "1"],
               litgpt_step("Llama 2", 1, "bnb.nf4-dq", early=when == "2023", fp32_norms=True).peak_bytes)
              for when in ("2023", "today")]
row = next(r for r in table("peft_adapters") if r["experiment"].endswith("3B-rank32"))
cases.append(("PEFT, Llama 3.2 3B, bf16, reserved", float(row["memory_max_bytes"]) / GB,
              peft_step(row).reserved_bytes))
low, high = (found["LoRA"][tokens // PIECE].peak_bytes for tokens in (1024, 2048))
cases.append(("our map's LoRA, read at 1,304 tokens", lit["None", "1"], low + 280 / 1024 * (high - low)))
for case, published, simulated in cases:
    ratio = simulated / GB / published
    print(f"{case:<37}published {published:5.2f} GB  simulated {simulated / GB:5.2f} GB  ratio {ratio:.3f}")
    assert "today" in case or abs(ratio - 1) < 0.05, f"{case}: run `make validate` for all rows"
recorded_table("llama7b_adapters", columns=["method", "sequence_length", "micro_batch", "peak_bytes"])

# %% [markdown]
# **Read it.** All rows but "today" lie within 5%. In 2023 bitsandbytes kept an input of every packed layer that
# no one needed, and litgpt unpacked through fp16; today neither does. What a library keeps beside your model changes
# with its version: leave a margin on four-bit peaks until you have measured yours.
#
# ### The same step, as `Trainer` runs it
#
# The map's adapters are few, and no autocast converts anything. The script below trains all linear layers at rank 16,
# and `Trainer(bf16=True)` runs under autocast. One text of 2,048 tokens, QLoRA, not checkpointed:

# %%
def another(layers, targets, rank, autocast, method=mapped[:2][-1]):
    smaller = llama_config(shape, num_hidden_layers=layers)
    model, optimizer = build_finetune(smaller, method, rank=rank, targets=targets)
    if autocast:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model, optimizer


kinds = {"query and value, rank 8": (TARGETS, 8), "all linear, rank 16": (ALL_LINEAR, 16)}
peaks = {(name, way): extrapolate(lambda layers: another(layers, *kind, way == "autocast"),
                                  lambda m, o: finetune_step(m, o, 1, 2048), layers=shape.layers, from_layers=(2, 3, 4),
                                  device="RTX 4090").peak_bytes / GB
         for name, kind in kinds.items() for way in ("no autocast", "autocast")}
pd.Series(peaks).unstack().style.format("{:.1f}").set_caption("GB at the peak, simulated")

# %% [markdown]
# **Read it.** Adapters on every matrix keep every matrix's input: some GB, where "adapters are small" counts weights
# alone. fp32 adapters convert their input and keep the copy, 4 bytes a number; under autocast the copy has 2. Say which
# of the four you mean before you say "7B fits".
#
# ### The scenario as asked: a script for a real card
#
# *"Fine-tune a 7B model on our 24 GB card: four bits, LoRA, checkpointing, ZeRO."* First its peak, as the script trains:
# all linear layers at rank 16, autocast, every block checkpointed, four texts of 1,024 tokens.

# %%
def asked(layers, offload):
    model, optimizer = another(layers, ALL_LINEAR, 16, True, mapped[-1])
    return model, OffloadedOptimizer(optimizer) if offload else optimizer


ready, offloaded = (extrapolate(lambda layers: asked(layers, offload), lambda m, o: finetune_step(m, o, 4, 1024), device="L4",
                                layers=shape.layers, from_layers=(2, 3, 4), name="finetune.py") for offload in (False, True))
print(f"with the optimizer in host memory: {(ready.peak_bytes - offloaded.peak_bytes) / GB:.2f} GB less ({ready.evidence})")
show(draw_breakdown([ready], title="The script at 7B: four texts of 1,024 tokens", limit="24GB", unit="GB"),
     alt=f"A bar of the script's simulated peak by category, {ready.peak_bytes / GB:.1f} GB, beside 24 GB.")

# %% [markdown]
# Then the script: the functions of section 5 with their imports, in a file. Accept the model's licence on the Hub first;
# `pairs.jsonl` has a prompt and an answer a line. On one card ZeRO cuts nothing, and offload gains little: they start
# with two ranks.

# %%
IMPORTS = """# pip install torch transformers peft bitsandbytes accelerate deepspeed
# one card: python finetune.py [model]     two: torchrun --nproc-per-node 2 finetune.py [model]
import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DataCollatorForSeq2Seq,
                          Trainer, TrainingArguments, set_seed)
"""
MAIN = """if __name__ == "__main__":
    base, rows = (sys.argv[1:] or ["meta-llama/Llama-2-7b-hf"])[0], Path("pairs.jsonl").read_text().splitlines()
    pairs, ranks = [(row["prompt"], row["answer"]) for row in map(json.loads, rows)], int(os.environ.get("WORLD_SIZE", 1))
    finetune(base, pairs, "adapter", 1024, zero_2() if ranks > 1 else None, num_train_epochs=3, learning_rate=2e-4,
             per_device_train_batch_size=4, gradient_accumulation_steps=4, save_strategy="epoch",
             per_device_eval_batch_size=1,  # by default 8 texts are evaluated at once
             use_cpu=not torch.cuda.is_available())
    print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB (allocated); simulated for Llama-2-7B: PEAK GB")
    if int(os.environ.get("RANK", 0)) == 0:
        merge(base, "adapter", "merged")  # in the host's memory: 2 bytes a parameter
"""

# %%
here.write_script("finetune.py", IMPORTS, tokenized, qlora, zero_2, finetune, merge,
                  MAIN.replace("PEAK", f"{ready.peak_bytes / GB:.1f}"))

# %% [markdown]
# **Read it.** The script has room on the smallest card of 24 GB. No card has confirmed it yet: the figure is simulated,
# with the course's NF4 layers. The script prints the card's own peak beside it.
#
# ## 8. Save, reload, merge
#
# Only the adapters are saved. Reloading puts them on a freshly packed base. **Merging** adds
# (alpha / r) B A to W, so that inference pays nothing extra. It needs the *16-bit* base, and goes one
# layer after the other, so that it needs little beside it.

# %%
last_model.save_pretrained(folder / "small")
files = {name: sum(path.stat().st_size for path in (folder / name).glob("*.safetensors")) for name in ("base", "small")}
packed_base = load_base(folder / "base", quantization=four_bits, dtype=IN, device=device)
reloaded = peft.PeftModel.from_pretrained(packed_base, folder / "small")
print(f"reloaded: largest difference {(logits(reloaded) - logits(last_model)).abs().max():.1e}")
assert torch.allclose(logits(reloaded), logits(last_model), atol=1e-5), "reload on the same packed base"
print("files:", ", ".join(f"{name} {format_bytes(size)}" for name, size in files.items()))
script_adapters = 16 * shape.layers * (8 * shape.hidden + 3 * (shape.hidden + shape.feedforward))  # rank 16, all matrices
print(f"at 7B: {4 * adapters / 1e6:.1f} MB of adapters (the script's: {4 * script_adapters / 1e6:.1f} MB),",
      f"{2 * P / GB:.1f} GB of model ({Evidence.PREDICTED})")

# %%
def on_base(quantization, dtype):
    model = load_base(folder / "base", quantization=quantization, dtype=dtype, device=device)
    return peft.PeftModel.from_pretrained(model, folder / "small")


def moved_by_merging(model):
    before = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of just what this cell measures
        return (logits(model.merge_and_unload()) - before).abs().mean().item()


# %%
moved = {dtype: moved_by_merging(on_base(None, dtype)) for dtype in (torch.float32, torch.bfloat16)}
for dtype, distance in moved.items():
    print(f"merged into a base in {dtype}: logits move by {distance:.1e} on average")
assert moved[torch.float32] < 1e-3, "in fp32 merging moves only the last digits: merge once"
if four_bits:
    rounded = moved_by_merging(on_base(four_bits, torch.float32))
    print(f"merged into packed weights: logits move by {rounded:.1e}")
    assert rounded > 10 * moved[torch.float32], "packing again rounds: is this base packed?"
    other = logits(on_base(None, torch.float32)) - logits(on_base(four_bits, torch.float32))
    print(f"the adapters on the base they did not train with: {other.abs().mean():.1e} apart")


# %%
def merging(model, optimizer=None):
    merge_lora(add_lora(model, rank=8, targets=TARGETS))


small = merge_lora(build_finetune(config, "LoRA", device=device)[0])
peak = measure(lambda: merging(small), model=small, timed_steps=0).peak_bytes
print(f"small: {format_bytes(sum(p.nbytes for p in small.parameters()))} of weights, peak {format_bytes(peak)} (measured)")
at_7b = simulate(lambda: (merge_lora(build_finetune(llama_config(shape), "LoRA")[0]), None), merging, device="L4")
print(f"7B: {2 * P / GB:.2f} GB of weights, peak of merging {at_7b.peak_bytes / GB:.2f} GB ({at_7b.evidence})")
assert at_7b.peak_bytes < 1.03 * 2 * P, "merge layer by layer, or two copies of the weights live"

# %% [markdown]
# **Read it.** Reloaded, and merged in fp32, the model is the same. In bf16 the sum is rounded to 8 bits of
# precision, in *packed* weights to sixteen levels again. At 7B merging needs the weights and a few copies of one
# layer beside them. Keep the adapters: at 7B a thousandth to a hundredth of the model's bytes.
#
# <div class="alert alert-warning"><b>Trap.</b> An adapter trained on the packed base, merged into the
# 16-bit one, sees weights that it did not train with. "On the base they did not train with", above,
# says how far that moves the logits. Evaluate the model that you will serve.</div>
#
# ## When to use what
#
# | technique | shrinks | costs | does not help |
# |---|---|---|---|
# | LoRA | gradients, optimizer state | sometimes quality | weights, most activations |
# | NF4 weights | weights, to a quarter | unpacking in every matmul; accuracy: measure it | activations |
# | checkpointing | activations | a second forward | weights |
# | 8-bit or paged AdamW | optimizer state | accuracy: measure it; transfers when paged | adapters: it is small already |
# | optimizer offload (lesson 07) | optimizer state, gradients | transfers | adapters |
# | shorter texts, smaller micro-batch | activations, logits | tokens per step | weights |

# %%
score("06", f"Llama-2-7B, {mapped[-1]}, 4,096 tokens", evidence=Evidence.SIMULATED,
      peak_bytes=found[mapped[-1]][4096 // PIECE].peak_bytes)
for run in measured:
    score("06", f"small Llama, {run.name}", peak_bytes=run.peak_bytes)
scoreboard("06")

# %% [markdown]
# ## Break it, diagnose it
#
# PEFT's own guide to quantization calls `prepare_model_for_kbit_training` on a packed model. Look at what it does
# to the bytes, and to the step.

# %%
def bytes_by_dtype(model):
    sizes = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
    return ", ".join(f"{dtype} {format_bytes(size)}" for dtype, size in sizes.items())


def step_peak(model):
    own = peft.get_peft_model(model, peft.LoraConfig(
        r=8, target_modules=list(TARGETS), task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW(trained(own.train()))
    return measure(step_of(own, optimizer), model=own, optimizer=optimizer, timed_steps=0).peak_bytes


if four_bits:
    for word in ("as packed", "prepared"):
        model = load_base(folder / "base", quantization=four_bits, device=device)
        if word == "prepared":
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            assert torch.bfloat16 not in {p.dtype for p in model.parameters()}, "PEFT keeps bf16 now"
        print(f"{word:<10}{bytes_by_dtype(model)}, peak of a step {format_bytes(step_peak(model))}")
    extra_gb = 2 * 2 * shape.vocabulary * shape.hidden / GB
    print(f"at 7B, embeddings and head in fp32: {extra_gb:.2f} GB more ({Evidence.PREDICTED})")
else:
    print("Without bitsandbytes there is no packed model to break.")

# %% [markdown]
# **Diagnose it.** It freezes everything, and turns all that is not packed into fp32: embeddings, head and
# norms. That was meant for stability in fp16. With fp32 embeddings the sum that runs through all blocks is fp32 as
# well, and so is what each block keeps of it: the peaks show that. In bf16 you may freeze the model yourself,
# as `get_peft_model` does, and save half a gigabyte at 7B plus those activations.

# %% [markdown]
# ## Recap
#
# - 16 bytes per parameter keep a full fine-tune of Llama-2-7B off a card of 24 GB, unless most of them leave it (lesson 07).
# - LoRA removes gradients and moments; NF4 removes three quarters of the weights; checkpointing removes
#   most activations. Each touches another category.
# - What packing costs: measure it on held-out text, with seeds, before you say it is nothing.
# - A map of peaks answers "does it fit?" before you rent a card.
# - Save adapters; merge into 16 bits.
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
# Do the [lab](../../labs/intermediate/06_seven_billion.ipynb), in a copy: `make my-labs`. Then compare with
# the [solution](../../solutions/intermediate/06_seven_billion.ipynb).
#
# **References.** Hu and others, *LoRA*, [arXiv:2106.09685](https://arxiv.org/abs/2106.09685). Dettmers and
# others, *QLoRA*, [arXiv:2305.14314](https://arxiv.org/abs/2305.14314); *8-bit Optimizers via Block-wise
# Quantization*, [arXiv:2110.02861](https://arxiv.org/abs/2110.02861). litgpt,
# [resource tables](https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md). PEFT,
# [method comparison](https://github.com/huggingface/peft/tree/main/method_comparison).
