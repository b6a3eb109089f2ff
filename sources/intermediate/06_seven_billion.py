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
# card of 24 GB: adapters and four-bit weights, first by hand, then with `peft` and `bitsandbytes`. At the
# end a map tells you which sequence lengths and batches fit.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 45 | any laptop; a GPU if you have one | about a minute of computing on two CPU cores |

# %% [markdown]
# ## A bet
#
# You fine-tune Llama-2-7B with four-bit weights and small adapters, on one text of 2,048 tokens. Four bits
# are half a byte, so the weights should take 3.5 GB. What is the *peak* of such a step, in GB? Section 6
# has the answer.

# %%
my_bet_gb = 3.5

# %% tags=["setup"]
here = setup("intermediate/06")

# %%
import math
import subprocess
import sysconfig
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from utils import GB, Evidence, check, compare, draw_breakdown, draw_budget_map, draw_losses, explore
from utils import format_bytes, llama_config, load_base, measure, model_shape, recorded_table, score
from utils import scoreboard, show, simulate, sweep, text_batches, text_tokens
from utils.models import BaseModelError
from utils.models.pretrained import enable_checkpointing
from utils.techniques import METHODS, adam_state_bytes, adamw_8bit, build_finetune, finetune_step
from utils.techniques import has_bitsandbytes, optimizer_bytes
from utils.techniques.nf4 import dynamic_levels

device = here.meter_device  # where the meter can count: CUDA or CPU

# %%
# peft asks transformers for something by a name that transformers has replaced.
warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
import peft
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()
four_bits = "nf4-dq" if has_bitsandbytes() else None
if four_bits is None:
    print("bitsandbytes is not installed, so nothing is packed into four bits here: the comparison in")
    print("section 3 is skipped, section 4 trains 16-bit weights with AdamW, and sections 5 and 6 show")
    print("LoRA alone. `pip install bitsandbytes` brings the rest.")
if torch.cuda.is_available():
    print(subprocess.getoutput("nvidia-smi"))

# %% [markdown]
# ## What you will be able to do
#
# - Fill in a states sheet for a full fine-tune, for LoRA and for QLoRA.
# - Write LoRA and NF4 yourself, and show that they equal the libraries.
# - Train, save, reload and merge adapters without ever holding the model in full precision.
# - Say, for a given card, which sequence length and micro-batch fit, and what to change if they do not.
#
# Words that are new to you stand in the [glossary](../00_start_here.ipynb#7.-Glossary).

# %% [markdown]
# ## 1. The states sheet
#
# Lesson 01 counted 16 bytes per parameter for training with Adam. Here is the sheet for Llama-2-7B, from
# its published shape. Rounded up to seven billion, 16 bytes make the 112 GB that you often read.

# %% tags=["nbval-check-output"]
shape = model_shape("llama-2-7b")
P = shape.parameter_count
rows = {
    "full, fp32 or mixed, 16 bytes": 16 * P,
    "full, mixed, fp32 gradients, 18 bytes": 18 * P,
    "folklore: 18 x 4 bytes": 72 * P,
    "the weights in bf16, nothing else": 2 * P}  # fmt: skip
print(f"P = {P:,} ({shape.source})")
for name, size_bytes in rows.items():
    print(f"{name:<40}{size_bytes / GB:7.1f} GB   {Evidence.PREDICTED}")

# %% [markdown]
# **Read it.** The folklore (504 GB for a round 7B) multiplies by the bytes twice. The true sheet is
# four of your cards and more, and three quarters of it exist because *every weight moves*. So let most
# weights stand still: a frozen weight needs no gradient and no moments.

# %% [markdown]
# ## 2. LoRA by hand
#
# Keep W frozen and learn a difference of low rank beside it (Hu and others, section 4.1):
#
# $$y = W x + \frac{\alpha}{r} B A x, \qquad A \in \mathbb{R}^{r \times \text{in}},\;
# B \in \mathbb{R}^{\text{out} \times r}$$
#
# B starts at zero, so the first step begins where the frozen model stands.

# %%
class Lora(nn.Module):
    def __init__(self, frozen, rank=8, alpha=16):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)  # A
        self.up = nn.Linear(rank, frozen.out_features, bias=False)  # B
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def forward(self, x):
        return self.frozen(x) + self.scale * self.up(self.down(x))


# %% [markdown]
# Now the same small Llama twice: once with your layer, once with `peft`. The cell copies peft's A and B
# over, because both are random, and then compares twenty steps.

# %%
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                     num_attention_heads=4, use_cache=False)  # fmt: skip
mine, theirs = LlamaForCausalLM(config), LlamaForCausalLM(config)
theirs.load_state_dict(mine.state_dict())
theirs = peft.get_peft_model(theirs, peft.LoraConfig(
    r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))  # fmt: skip
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
    for tokens, _ in batches:
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


short = list(text_batches(text_tokens(20 * 4 * 32 + 1), batch=4, sequence=32))
by_hand, by_peft = (fit(m.to(device), torch.optim.AdamW(trained(m), lr=1e-3), short) for m in (mine, theirs))
largest = max(abs(a / b - 1) for a, b in zip(by_hand, by_peft))
print(f"{len(by_hand)} steps, largest relative difference {largest:.1e}")
assert largest <= 1e-6

# %% [markdown]
# **Read it.** The losses are the same: there is nothing else in LoRA. Now its memory. `measure` counts a
# step of the same network, first with all weights trained, then with the adapters alone.

# %%
def step_of(model, optimizer, sequences=8, length=128):
    return lambda: finetune_step(model, optimizer, sequences, length)


full = LlamaForCausalLM(config).to(device)
pair = []
for name, model in (("all weights", full), ("LoRA", mine)):
    optimizer = torch.optim.AdamW(trained(model))
    pair.append(measure(step_of(model, optimizer), model=model, optimizer=optimizer,
                        items=1024, unit="tokens", name=name, timed_steps=3))  # fmt: skip
share = sum(p.numel() for p in trained(mine)) / sum(p.numel() for p in full.parameters())
print(f"LoRA trains {100 * share:.1f}% of the parameters, and its peak is",
      f"{100 * pair[1].peak_bytes / pair[0].peak_bytes:.0f}% of the full one")  # fmt: skip
compare(pair, title="A small Llama, all weights or adapters")

# %% [markdown]
# **Read it.** "LoRA trains 0.1% of the parameters, so it saves 99.9%" is folklore. Gradients and optimizer
# state all but vanish. The weights stay, and so do the activations: backward still has to pass through
# every frozen layer on its way to the adapters. Two things are left to shrink.

# %% [markdown]
# ## 3. Four bits by hand
#
# A frozen weight is only read, so it may be coarse. **NF4** stores each weight as one of sixteen levels.
# Trained weights look like a normal distribution, so the levels are its quantiles: dense near zero. Each
# block of 64 weights is divided by its largest magnitude first.

# %%
def quantiles(count):
    outermost = 1 - (1 / 32 + 1 / 30) / 2  # between half a 16th and half a 15th from the end
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
                           ("NF4, blocks of 64", levels, 64)):  # fmt: skip
    back = dequantize(*quantize(weight, table, block), table).view_as(weight)
    print(f"{name:<26} mean error {(back - weight).abs().mean():.3f}")
codes, scales = quantize(weight, levels)

# %% [markdown]
# **Read it.** With a single scale one outlier makes all other weights coarse. Blocks keep the harm local;
# the levels of NF4 do the rest. Now the comparison with the library: the codes must be identical.

# %%
packed = (codes.flatten()[::2] << 4 | codes.flatten()[1::2]).to(torch.uint8)
if has_bitsandbytes():
    library = torch.ops.bitsandbytes
    theirs_packed, theirs_scales = library.quantize_4bit(weight, 64, "nf4", torch.uint8)
    assert torch.equal(packed, theirs_packed.flatten()) and torch.equal(scales, theirs_scales)
    unpacked = library.dequantize_4bit(theirs_packed, scales, 64, "nf4", weight.shape, torch.float32)
    difference = (unpacked.view(-1, 64) - dequantize(codes, scales, levels)).abs().max()
    print(f"all {codes.numel():,} codes are those of bitsandbytes; largest difference {difference:.0e}")
    assert difference < 1e-5

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
single = 8 * (packed.nbytes + scales.nbytes) / weight.numel()
double = 8 * (packed.nbytes + scale_codes.numel() + outer.nbytes + 4) / weight.numel()
print(f"bits per weight: {single:.3f} with fp32 scales, {double:.3f} with double quantization")
matrices = P - 2 * shape.vocabulary * shape.hidden - (2 * shape.layers + 1) * shape.hidden
weights_gb = (matrices * (4 + 8 / 64 + 32 / 64 / 256) / 8 + 2 * (P - matrices)) / GB
print(f"Llama-2-7B: {weights_gb:.1f} GB with embeddings, head and norms in 16 bits ({Evidence.PREDICTED})")

# %% [markdown]
# **Read it.** Half a byte per weight is not all: scales, and the layers that stay in 16 bits, make 3.9 GB
# of the 3.5. A matmul unpacks the layer's weight to 16 bits, uses it and drops it, in forward and again
# in backward.
#
# <div class="alert alert-warning"><b>Trap.</b> bitsandbytes is not <i>quantization-aware training</i>. That
# trains weights so that they survive rounding later. Here the packed weights never change: only
# adapters learn, in fp32.</div>

# %% [markdown]
# ## 4. The real stack
#
# The parts together: `transformers` loads and packs, `peft` adapts, checkpointing computes activations
# again (lesson 05), bitsandbytes' AdamW keeps its moments in eight bits. First a base model. A small one
# learns Python's own sources for some steps and goes to a folder. On a GPU, put
# `"meta-llama/Llama-2-7b-hf"` in place of the folder: the code stays the same.

# %%
folder = Path(tempfile.mkdtemp(prefix="lesson06-"))
torch.manual_seed(0)
base = LlamaForCausalLM(config).to(device)
ours = text_batches(text_tokens(100_000), batch=4, sequence=128)
losses = fit(base, torch.optim.AdamW(base.parameters(), lr=3e-3), [next(ours) for _ in range(40)])
base.save_pretrained(folder / "base")
saved = sorted(path.name for path in (folder / "base").iterdir())
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}; saved {saved}")

# %% [markdown]
# The new text is from Python's `encodings` package, whose tables read quite unlike code. Two runs see the
# same eight batches three times, from the same start: 16-bit LoRA with AdamW, and the whole QLoRA stack.

# %%
once = 8 * 4 * 128 + 1
tables = text_tokens(100_000, Path(sysconfig.get_path("stdlib")) / "encodings")[-once:]
batches = 3 * list(text_batches(tables, batch=4, sequence=128))


def adapted(quantization, checkpointing):
    model = load_base(folder / "base", quantization=quantization, device=device)
    torch.manual_seed(1)  # the same A in both runs
    model = peft.get_peft_model(model, peft.LoraConfig(
        r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"))  # fmt: skip
    if checkpointing:
        enable_checkpointing(model)
    return model.train()


# %%
lora = adapted(None, checkpointing=False)
qlora = adapted(four_bits, checkpointing=True)
make_optimizer = adamw_8bit if four_bits else torch.optim.AdamW
optimizer = make_optimizer(trained(qlora), lr=1e-2)
runs = {
    "LoRA, bf16, AdamW": fit(lora, torch.optim.AdamW(trained(lora), lr=1e-2), batches),
    "QLoRA, checkpointing, 8-bit AdamW": fit(qlora, optimizer, batches),
}
ends = {name: (sum(losses[:8]) / 8, sum(losses[-8:]) / 8) for name, losses in runs.items()}
for name, (first, last) in ends.items():
    print(f"{name:<36} first pass {first:.3f}, third pass {last:.3f}")
    assert last < first - 0.15
(_, plain), (_, packed_end) = ends.values()
assert abs(plain - packed_end) < 0.1

# %%
figure = draw_losses(runs, device=str(device), title="Fine-tuning on a new text (nats per byte)")
show(figure, alt="Two loss curves that fall together: 16-bit LoRA, and QLoRA with 8-bit moments.")

# %% [markdown]
# **Read it.** Both losses fall by more than 0.15, and end within 0.1 of each other. Four bits, recomputed activations
# and eight-bit moments cost this run almost nothing in quality. (Checkpointing costs time, not quality:
# its gradients are the same.)

# %% [markdown]
# ### Eight-bit moments, counted
#
# Each moment takes one byte per parameter, and one fp32 scale per 256. Tensors below 4,096 elements stay
# in fp32. Two tables of 256 values are there once. *Paged* moments can move out to the CPU when the GPU is
# full; they need CUDA.

# %%
sizes = [parameter.numel() for parameter in trained(qlora)]
print(f"{len(sizes)} adapter tensors, {sum(sizes):,} parameters")
for bits in (32, 8):
    print(f"moments in {bits} bits: {format_bytes(adam_state_bytes(sizes, bits))} ({Evidence.PREDICTED})")
print(f"what this optimizer holds: {format_bytes(optimizer_bytes(optimizer))} ({Evidence.MEASURED})")
assert optimizer_bytes(optimizer) == adam_state_bytes(sizes, bits=8 if four_bits else 32)
try:
    adamw_8bit(trained(qlora), paged=True)
except (ValueError, ModuleNotFoundError) as error:
    print(error)

# %% [markdown]
# **Read it.** To the byte. Eight bits take a quarter. With every weight trained that is tens of gigabytes at 7B; for
# adapters there is little left to save.
#
# ### The same through `Trainer`
#
# `Trainer` runs the loop for you. The subclass hands it the same batches in the same order, so that the
# two can be compared.

# %%
class InOrder(Trainer):
    def get_train_dataloader(self):
        return [{"input_ids": tokens, "labels": tokens} for tokens, _ in batches]


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            recorded_losses.append(logs["loss"])


# %%
arguments = TrainingArguments(
    output_dir=str(folder / "trainer"), max_steps=8, per_device_train_batch_size=4,
    learning_rate=1e-2, lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=0.0,
    optim="adamw_8bit" if four_bits else "adamw_torch", logging_steps=1, report_to="none",
    save_strategy="no", disable_tqdm=True, use_cpu=device.type == "cpu",
)  # fmt: skip
recorded_losses = []
trainer = InOrder(model=adapted(four_bits, True), args=arguments, train_dataset=batches)
trainer.add_callback(Losses())
trainer.pop_callback(next(c for c in trainer.callback_handler.callbacks if "Printer" in type(c).__name__))
trainer.train()
loop = runs["QLoRA, checkpointing, 8-bit AdamW"][:8]
gap = max(abs(a - b) for a, b in zip(recorded_losses, loop, strict=True))
print(f"8 steps: Trainer {recorded_losses[-1]:.3f}, your loop {loop[-1]:.3f}, largest gap {gap:.4f}")
assert gap < 0.02

# %% [markdown]
# Several GPUs need one argument more. Lesson 09 runs both of these; here is their text.
#
# ```python
# TrainingArguments(..., deepspeed={
#     "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
#     "bf16": {"enabled": True},
#     "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"})
#
# TrainingArguments(..., fsdp=True, fsdp_config={
#     "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True})
# ```
#
# Checkpointing is `activation_checkpointing=True`; older versions call it `gradient_checkpointing`.

# %% [markdown]
# ## 5. Three methods, measured small
#
# `build_finetune` makes the three methods that the rest of the lesson compares, from the course's own
# layers. Its tests hold them against `peft` and bitsandbytes. First here, small and for real.

# %%
methods = [name for name, method in METHODS.items() if four_bits or not method.packed]
measured = []
for name in methods:
    model, optimizer = build_finetune(config, name, device=device)
    measured.append(measure(step_of(model, optimizer), model=model, optimizer=optimizer,
                            items=1024, unit="tokens", name=name, timed_steps=2))  # fmt: skip
compare(measured, title="A small Llama, three ways, 1,024 tokens")

# %% [markdown]
# **Read it.** In so small a model, activations and logits outweigh the weights, and packing weights is
# hardly seen. Checkpointing is. Which one matters at 7B? The same two functions say it.

# %% [markdown]
# ## 6. Seven billion, simulated
#
# Lesson 05a showed what a simulated peak is worth. Here a step of Llama-2-7B is simulated at depths 2, 3
# and 4 and at three batch sizes, and extended to 32 layers and any batch, allocation by allocation. With
# flash attention memory depends on the *number of tokens*, not on how they are cut into texts. So
# pieces of 256 tokens stand for all shapes; the check in the next cell holds that to 0.1%.

# %%
PIECE = 256
LENGTHS, MICRO_BATCHES = (512, 1024, 2048, 4096), (1, 2, 4, 8)
TOKENS = sorted({length * batch for length in LENGTHS for batch in MICRO_BATCHES})


def at_size(method):
    return sweep(
        lambda layers: build_finetune(llama_config(shape, num_hidden_layers=layers), method),
        lambda model, optimizer, pieces: finetune_step(model, optimizer, pieces, PIECE),
        layers=shape.layers, from_layers=(2, 3, 4), batches=[count // PIECE for count in TOKENS],
        device="RTX 4090", items=PIECE, unit="tokens", name=method,
    )  # fmt: skip


found = {method: at_size(method) for method in methods}
grids = {
    method: {(length, batch): pieces[length * batch // PIECE]
             for length in LENGTHS for batch in MICRO_BATCHES}
    for method, pieces in found.items()
}  # fmt: skip

# %%
shallow = llama_config(shape, num_hidden_layers=2)
two = [simulate(lambda: build_finetune(shallow, methods[-1]), lambda m, o, s=size: finetune_step(m, o, *s),
                device="RTX 4090").peak_bytes for size in ((8, 256), (1, 2048))]  # fmt: skip
print(f"2,048 tokens as one text or as eight: {100 * (two[1] / two[0] - 1):+.3f}%")
assert abs(two[1] / two[0] - 1) < 1e-3

# %%
figure = draw_budget_map(grids, "24GB", title="Llama-2-7B: peak of a step in GB; a cross is over 24 GB")
show(figure, alt="Three grids of peaks over sequence length and micro-batch. LoRA fits in a few cells, "
     "QLoRA in more, QLoRA with checkpointing in all but the largest.")  # fmt: skip
at_bet = found[methods[min(1, len(methods) - 1)]][2048 // PIECE]
print(at_bet)
print(f"your bet: {my_bet_gb} GB; the peak: {at_bet.peak_bytes / GB:.1f} GB ({at_bet.evidence})")

# %% [markdown]
# **Read it.** Packing saves the same 9.6 GB in every cell, because it shrinks the weights. Checkpointing
# saves more the more tokens there are. "QLoRA 7B takes 3.5 GB" is folklore: that is not even the weights,
# and the peak of one text of 2,048 tokens is four times as much without checkpointing. With it, the largest
# cell that fits holds sixteen times the tokens of LoRA's.
#
# The cap is 24 GB of tensors, and such a card has 24 GiB, about 25.8 GB. The difference is for the CUDA context and for
# what PyTorch reserves in between.

# %%
def bars(sequence_length, micro_batch):
    picked = [grid[sequence_length, micro_batch] for grid in grids.values()]
    title = f"Llama-2-7B, {micro_batch} x {sequence_length:,} tokens"
    peaks = ", ".join(f"{m.name} {m.peak_bytes / GB:.1f} GB" for m in picked)
    return draw_breakdown(picked, title=title, limit="24GB"), f"{title}: {peaks}."


explore(bars, sequence_length=list(LENGTHS), micro_batch=list(MICRO_BATCHES))

# %% [markdown]
# The controls work in a running notebook. The same figure for four texts of 1,024 tokens, as a picture:

# %%
show(*bars(1024, 4))

# %% [markdown]
# ### Beside published peaks
#
# The simulator against peaks that others measured: litgpt's LoRA on an A100 (allocated memory), and PEFT's
# on an H100 (reserved memory, evaluation included). Each row is simulated in its own configuration. litgpt's
# row with NF4 stands twice: with the libraries of its time, and with today's.

# %%
from utils.validation.simulation_published import litgpt_step, peft_step
from utils.validation.tables import table

lit = {row["quantization"]: float(row["max_gpu_ram_gb"]) for row in table("litgpt_adapters")
       if (row["model"], row["micro_batch"], row["gpu"]) == ("StableLM Alpha", "1", "1 x A100")}  # fmt: skip
cases = [("litgpt, StableLM 3B, bf16", lit["None"], litgpt_step("StableLM Alpha", 1, "None", early=False))]
if four_bits:
    cases += [(f"litgpt, StableLM 3B, NF4, {when}", lit["bnb.nf4"],
               litgpt_step("StableLM Alpha", 1, "bnb.nf4", early=when == "2023"))
              for when in ("2023", "today")]  # fmt: skip
row = next(r for r in table("peft_adapters") if r["experiment"].endswith("3B-rank32"))
cases.append(("PEFT, Llama 3.2 3B, bf16", float(row["memory_max_bytes"]) / GB, peft_step(row)))
for case, published, run in cases:
    simulated = run.peak_bytes / GB
    ratio = simulated / published
    print(f"{case:<36}published {published:5.2f} GB  simulated {simulated:5.2f} GB  ratio {ratio:.3f}")
    assert "NF4" in case or abs(ratio - 1) < 0.06
recorded_table("llama7b_adapters", columns=["method", "sequence_length", "micro_batch", "peak_bytes"])

# %% [markdown]
# **Read it.** The 16-bit rows lie within 6%. In 2023 bitsandbytes kept an input of every packed layer that
# no one needed, and litgpt unpacked through fp16. The row "2023" has both, the row "today" has neither, and
# needs much less. Four-bit rows miss more than 16-bit ones (lesson 05a), and not all of that is explained:
# leave a margin of some 10% until a GPU row is recorded. No published row has the sizes of our map.

# %% [markdown]
# ## 7. Where offload helps, and where not
#
# **Question.** Adapters with 20 million fp32 parameters train with AdamW. How many GB does it free
# to offload the optimizer state to the CPU?

# %%
freed_gb = ...
check("06.offloaded_gigabytes", freed_gb)

# %%
from utils.planner import Batch, Lora as LoraPlan, Plan, memory

text = Batch(sequences=1, sequence_length=2048)
plans = {
    "full, as it is": Plan(recompute="full"),
    "full, optimizer offloaded": Plan(recompute="full", offload="optimizer"),
    "QLoRA, as it is": Plan(recompute="full", framework="bf16", lora=LoraPlan(base="nf4-dq")),
    "QLoRA, optimizer offloaded": Plan(recompute="full", framework="bf16", offload="optimizer",
                                       lora=LoraPlan(base="nf4-dq")),
}  # fmt: skip
for name, plan in plans.items():
    print(f"{name:<28}{memory(shape, plan, text)[0].allocated_bytes / GB:8.2f} GB   {Evidence.PREDICTED}")

# %% [markdown]
# **Read it.** Around a full fine-tune offload moves most of the states away, though what is left is still
# no 24 GB. Around QLoRA it moves hundredths of a gigabyte, and pays for it with transfers. Nor does ZeRO-2 help on one GPU: it divides
# by the number of ranks, which is one. Lesson 07 is about offload; lesson 09 measures ZeRO.

# %% [markdown]
# ## 8. Save, reload, merge
#
# Only the adapters are saved. Reloading puts them on a freshly packed base. **Merging** adds
# (alpha / r) B A to W, so that inference pays nothing extra: it needs the *16-bit* base, and it can be
# done on the CPU, one layer after the other.

# %%
def logits(model):
    model.train()  # nothing is dropped here; in eval mode bitsandbytes repacks weights for a CPU
    with torch.no_grad():
        return model(input_ids=batches[0][0].to(device), use_cache=False).logits.float()


qlora.save_pretrained(folder / "adapter")
files = {name: sum(path.stat().st_size for path in (folder / name).glob("*.safetensors"))
         for name in ("base", "adapter")}  # fmt: skip
reloaded = peft.PeftModel.from_pretrained(
    load_base(folder / "base", quantization=four_bits, device=device), folder / "adapter")  # fmt: skip
print(f"reloaded: largest difference {(logits(reloaded) - logits(qlora)).abs().max():.1e}")
assert torch.allclose(logits(reloaded), logits(qlora), atol=1e-5)
print({name: format_bytes(size) for name, size in files.items()})
adapters_7b = 2 * shape.layers * 8 * 2 * shape.hidden  # rank 8 on two square projections a block
print(f"at 7B: {4 * adapters_7b / 1e6:.1f} MB of adapters, {2 * P / GB:.1f} GB of model ({Evidence.PREDICTED})")

# %%
def on_base(quantization, dtype):
    model = load_base(folder / "base", quantization=quantization, dtype=dtype, device=device)
    return peft.PeftModel.from_pretrained(model, folder / "adapter")


def moved_by_merging(model):
    before = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of just what this cell measures
        return (logits(model.merge_and_unload()) - before).abs().max().item()


plain = moved_by_merging(on_base(None, torch.float32))
print(f"merged into the plain base:  logits move by {plain:.1e}")
assert plain < 1e-3
if four_bits:
    rounded = moved_by_merging(on_base(four_bits, torch.float32))
    print(f"merged into packed weights:  logits move by {rounded:.1e}")
    assert rounded > 10 * plain

# %% [markdown]
# **Read it.** Reloaded and merged, the model is the same. Merged into *packed* weights it is not: the sum
# is rounded to sixteen levels again. Keep the adapters: at 7B their file is
# hardly a thousandth of the model's.
#
# <div class="alert alert-warning"><b>Trap.</b> An adapter trained on the packed base, merged into the
# 16-bit one, sees weights that it did not train with. The change is small and not zero. Evaluate the
# model that you will serve.</div>

# %% [markdown]
# ### A base that cannot be loaded
#
# `load_base` takes any folder with a Llama, or a name on the Hub. What is missing, cut off or of another
# kind ends in a sentence, before anything is computed:

# %%
(folder / "cut").mkdir()
for name, length in (("config.json", None), ("model.safetensors", 9999)):
    (folder / "cut" / name).write_bytes((folder / "base" / name).read_bytes()[:length])
for source in ("./llama-2-7b", folder / "cut"):
    try:
        load_base(source)
    except BaseModelError as error:
        print(str(error).replace(str(folder), "..."))

# %% [markdown]
# ## When to use what
#
# | technique | shrinks | costs | does not help |
# |---|---|---|---|
# | LoRA | gradients, optimizer state | sometimes quality | weights, activations |
# | NF4 weights | weights, to a quarter | unpacking in every matmul, some accuracy | activations |
# | checkpointing | activations | a second forward | weights |
# | 8-bit or paged AdamW | optimizer state | a little accuracy; transfers when paged | adapters: it is small already |
# | optimizer offload | optimizer state | transfers | adapters |
# | shorter texts, smaller micro-batch | activations, logits | tokens per step | weights |

# %%
score("06", f"Llama-2-7B, {methods[-1]}, 4,096 tokens", evidence=Evidence.SIMULATED,
      peak_bytes=found[methods[-1]][4096 // PIECE].peak_bytes)  # fmt: skip
for run in measured:
    score("06", f"small Llama, {run.name}", peak_bytes=run.peak_bytes,
          step_seconds=run.median_step_seconds)  # fmt: skip
scoreboard()

# %% [markdown]
# ## Break it, diagnose it
#
# A guide tells you to call `prepare_model_for_kbit_training` on a packed model. Look at what it does to the
# bytes.

# %%
def bytes_by_dtype(model):
    sizes = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
    return {str(dtype): format_bytes(size) for dtype, size in sizes.items()}


packed_model = load_base(folder / "base", quantization=four_bits, device=device)
print("before:", bytes_by_dtype(packed_model))
prepared = peft.prepare_model_for_kbit_training(packed_model, use_gradient_checkpointing=False)
print("after: ", bytes_by_dtype(prepared))
extra_gb = 2 * 2 * shape.vocabulary * shape.hidden / GB
print(f"at 7B, embeddings and head in fp32: {extra_gb:.2f} GB more ({Evidence.PREDICTED})")
assert all(p.dtype is not torch.bfloat16 for p in prepared.parameters())

# %% [markdown]
# **Diagnose it.** It freezes everything, and turns all that is not packed into fp32: embeddings, head and
# norms. That was meant for stability in fp16. In bf16 you may freeze the model yourself, as
# `get_peft_model` does, and save half a gigabyte, plus 16-bit instead of fp32 activations behind the norms.

# %% [markdown]
# ## Recap
#
# - 16 bytes per parameter make a full fine-tune of Llama-2-7B impossible on 24 GB.
# - LoRA removes gradients and moments; NF4 removes three quarters of the weights; checkpointing removes
#   most activations. Each touches another category.
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
