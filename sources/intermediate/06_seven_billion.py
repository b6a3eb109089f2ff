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
# You fine-tune Llama-2-7B with four-bit weights and small adapters, without checkpointing, on one text of
# 2,048 tokens. Four bits are half a byte, so the weights should take 3.5 GB. What is the *peak* of such a
# step, in GB? Section 6 has the answer.

# %%
my_bet_gb = 3.5

# %% tags=["setup"]
here = setup("intermediate/06")

# %%
import contextlib
import io
import subprocess
import sysconfig
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from utils import GB, Category, Evidence, check, compare, draw_breakdown, draw_budget_map, draw_losses
from utils import explore, format_bytes, llama_config, load_base, measure, model_shape, recorded_table
from utils import run_ranks, score, scoreboard, show, simulate, sweep, text_batches, text_tokens
from utils.catalog import device as gpu
from utils.models.pretrained import BaseModelError, enable_checkpointing
from utils.simulation import extrapolate
from utils.techniques import OffloadedOptimizer, adam_state_bytes, adamw_8bit, add_lora, merge_lora, optimizer_bytes
from utils.techniques.finetune import METHODS, TARGETS, build_finetune, finetune_step
from utils.techniques.library import bitsandbytes_problem
from utils.techniques.nf4 import dynamic_levels

device = here.meter_device  # where the meter can count: CUDA or CPU

# %%
# peft asks transformers for something by a name that transformers has replaced.
warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
import peft
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from utils.techniques.cpu_ranks import fsdp_on_cpu
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.techniques.zero import resident, zero_config, zero_engine

transformers_logging.disable_progress_bar()
four_bits = None if bitsandbytes_problem() else "nf4-dq"
if four_bits is None:
    print(f"{bitsandbytes_problem()}. Nothing is packed into four bits here: section 3 compares with no")
    print("library, section 4 trains 16-bit weights with AdamW, sections 5 and 6 show LoRA and the full")
    print("fine-tune, and section 8 and 'Break it' have no packed weights.")
zero_problem = deepspeed_problem()
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__} is here.")
if torch.cuda.is_available():
    print(subprocess.getoutput("nvidia-smi"))
    if here.dtype is torch.float16:
        print("No bfloat16 on this GPU: PyTorch emulates it. Believe the bytes here, not the times. The",
              "map of section 6 assumes flash attention, which this GPU lacks too.")  # fmt: skip

# %% [markdown]
# ## What you will be able to do
#
# - Fill in a states sheet for a full fine-tune, for LoRA and for QLoRA.
# - Write LoRA and NF4 yourself, and show that they equal the libraries.
# - Train, save, reload and merge adapters with the model in 16 bits or fewer.
# - Say, for a given card, which sequence length and micro-batch fit, and what to change if they do not.
#
# Words that are new to you stand in the [glossary](../00_start_here.ipynb#7.-Glossary).
#
# ## 1. The states sheet
#
# Lesson 01 counted 16 bytes per parameter for training with Adam. Here is the sheet for Llama-2-7B, from
# its published shape. Rounded up to seven billion, 16 bytes make the 112 GB that you often read.

# %% tags=["nbval-check-output"]
shape = model_shape("llama-2-7b")
P = shape.parameter_count
adapters = 2 * shape.layers * 8 * 2 * shape.hidden  # rank 8 on two square matrices a block
matrices = P - 2 * shape.vocabulary * shape.hidden - (2 * shape.layers + 1) * shape.hidden
packed_weights = matrices * (4 + 8 / 64 + 32 / 64 / 256) / 8 + 2 * (P - matrices)
rows = {
    "full, fp32 or mixed, 16 bytes": 16 * P,
    "full, mixed, fp32 gradients, 18 bytes": 18 * P,
    "folklore: 18 x 4 bytes": 72 * P,
    "the weights in bf16, nothing else": 2 * P,
    "LoRA: bf16 weights, 16 bytes an adapter": 2 * P + 16 * adapters,
    "QLoRA: packed weights (section 3), the same": packed_weights + 16 * adapters}  # fmt: skip
print(f"P = {P:,} ({shape.source})")
for name, size_bytes in rows.items():
    print(f"{name:<44}{size_bytes / GB:7.1f} GB   {Evidence.PREDICTED}")

# %% [markdown]
# **Read it.** The folklore (504 GB for a round 7B) takes 18, which is bytes already, times 4 bytes. The true
# sheet is four of your cards and more, and at least three quarters of it exist because *every weight moves*.
# So let most weights stand still: a frozen weight needs no gradient and no moments (Adam's two running means
# of each gradient). The last two rows are all states of what you build now.
#
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
        tokens = tokens.to(model.device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


short = list(text_batches(text_tokens(20 * 4 * 32 + 1), batch=4, sequence=32))
# On the CPU everywhere: on a GPU two runs of one attention backward may differ in the last digit.
by_hand, by_peft = (fit(m, torch.optim.AdamW(trained(m), lr=1e-3), short) for m in (mine, theirs))
largest = max(abs(a / b - 1) for a, b in zip(by_hand, by_peft))
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
                        items=1024, unit="tokens", name=name, timed_steps=3))  # fmt: skip
share = sum(p.numel() for p in trained(mine)) / sum(p.numel() for p in full.parameters())
print(f"LoRA trains {100 * share:.1f}% of the parameters, and its peak is",
      f"{100 * pair[1].peak_bytes / pair[0].peak_bytes:.0f}% of the full one")  # fmt: skip
compare(pair, title="A small Llama, all weights or adapters")

# %% [markdown]
# **Read it.** "LoRA trains 0.1% of the parameters, so it saves 99.9%" is folklore. Gradients and optimizer
# state all but vanish. The weights stay. So do about two thirds of the activations: a frozen layer need
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
                           ("NF4, blocks of 64", levels, 64)):  # fmt: skip
    back = dequantize(*quantize(weight, table, block), table).view_as(weight)
    print(f"{name:<26} mean error {(back - weight).abs().mean():.3f}")
codes, scales = quantize(weight, levels)

# %% [markdown]
# **Read it.** With a single scale one outlier makes all other weights coarse. Blocks keep the harm local;
# the levels of NF4 do the rest. Now the comparison with the library: the codes must be identical.

# %%
packed = (codes.flatten()[::2] << 4 | codes.flatten()[1::2]).to(torch.uint8)
if four_bits:
    library = torch.ops.bitsandbytes
    theirs_packed, theirs_scales = library.quantize_4bit(weight, 64, "nf4", torch.uint8)
    same = torch.equal(packed, theirs_packed.flatten()) and torch.equal(scales, theirs_scales)
    assert same, "a scale is the largest |w| of its block, a code the nearest level's index"
    unpacked = library.dequantize_4bit(theirs_packed, scales, 64, "nf4", weight.shape, torch.float32)
    difference = (unpacked.view(-1, 64) - dequantize(codes, scales, levels)).abs().max()
    print(f"all {codes.numel():,} codes are those of bitsandbytes; largest difference {difference:.0e}")
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
      f"16 bits, {packed_weights / GB:.1f} GB ({Evidence.PREDICTED})")  # fmt: skip

# %% [markdown]
# **Read it.** Half a byte per weight is not all: scales, and the layers that stay in 16 bits (embeddings, and
# the *head*, the last matrix, onto the vocabulary), raise 3.4 GB to 3.9 GB. A matmul unpacks the layer's weight to 16 bits, uses it and drops it, in forward and again
# in backward.
#
# <div class="alert alert-warning"><b>Trap.</b> bitsandbytes is not <i>quantization-aware training</i>. That
# trains weights so that they survive rounding later. Here the packed weights never change: only
# adapters learn, in fp32.</div>
#
# ## 4. The real stack
#
# The parts together: `transformers` loads and packs, `peft` adapts, checkpointing computes activations
# again (lesson 05), bitsandbytes' AdamW keeps its moments in eight bits. First a base model. A small one
# learns Python's own sources for some steps and goes to a folder. Its tokens are the bytes of the text, 256
# kinds, so it needs no tokenizer.
#
# `load_base` takes the real model by its name. For real text you also need its tokenizer, a learning rate
# near 2e-4, and one model at a time (`del lora` before you load `qlora`):
#
# ```python
# name = "meta-llama/Llama-2-7b-hf"  # accept its licence on the Hub first
# tokenizer = transformers.AutoTokenizer.from_pretrained(name)
# model = load_base(name, quantization="nf4-dq", device="cuda")
# tokens = tokenizer(text, return_tensors="pt").input_ids
# ```

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


# %%
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
stack = "QLoRA, checkpointing, 8-bit AdamW" if four_bits else "LoRA, checkpointing, AdamW"
optimizer = make_optimizer(trained(qlora), lr=1e-2)
runs = {
    "LoRA, bf16, AdamW": fit(lora, torch.optim.AdamW(trained(lora), lr=1e-2), batches),
    stack: fit(qlora, optimizer, batches),
}
ends = {name: (sum(losses[:8]) / 8, sum(losses[-8:]) / 8) for name, losses in runs.items()}
for name, (first, last) in ends.items():
    print(f"{name:<36} first pass {first:.3f}, third pass {last:.3f}")
    assert last < first - 0.15, f"{name} hardly learns: is the learning rate 1e-2?"
(_, plain_end), (_, stack_end) = ends.values()
assert abs(plain_end - stack_end) < 0.1, "the stack ends elsewhere: same seed, same batches?"

# %%
figure = draw_losses(runs, device=str(device), title="Fine-tuning on a new text",
                     unit="nats per byte")
show(figure, alt=f"Two loss curves in nats per byte that fall together: {' and '.join(runs)}.")

# %% [markdown]
# **Read it.** The loss is in nats: with natural logarithms. From the first pass over the text to the third both
# means fall by more than 0.15, and those of the third lie within 0.1 of each other. So four bits, recomputed
# activations and eight-bit moments cost this run almost nothing in *training* loss; held-out text was not
# tried. (Checkpointing costs time, not quality: its gradients are the same.)
#
# ### Eight-bit moments, counted
#
# Each moment takes one byte per parameter, and one fp32 scale per 256. Tensors below 4,096 elements stay
# in fp32. Two tables of 256 values are there once. *Paged* moments can move out to the CPU when the GPU is
# full; they need CUDA.

# %%
sizes = [parameter.numel() for parameter in trained(qlora)]
for bits in (32, 8):
    print(f"{sum(sizes):,} parameters, moments in {bits} bits: {format_bytes(adam_state_bytes(sizes, bits))} ({Evidence.PREDICTED})")
print(f"what this optimizer holds: {format_bytes(optimizer_bytes(optimizer))} ({Evidence.MEASURED})")
assert optimizer_bytes(optimizer) == adam_state_bytes(sizes, bits=8 if four_bits else 32), "has it stepped?"
print(f"8 instead of 32 bits for every weight of 7B: {(8 - 2) * P / GB:.0f} GB less ({Evidence.PREDICTED})")
try:
    print("a step with paged moments:", fit(qlora, adamw_8bit(trained(qlora), paged=True), batches[:1]))
except (ValueError, ModuleNotFoundError) as error:
    print(error)

# %% [markdown]
# **Read it.** To the byte. Eight bits take a quarter. With every weight trained that would be 40 GB at 7B; for
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
_ = arguments.device  # finds the GPUs; with several, Trainer would multiply batch and loss
arguments._n_gpu = min(arguments.n_gpu, 1)
recorded_losses = []
trainer = InOrder(model=adapted(four_bits, True), args=arguments, train_dataset=batches)
trainer.add_callback(Losses())
trainer.pop_callback(next(c for c in trainer.callback_handler.callbacks if "Printer" in type(c).__name__))
trainer.train()
loop = runs[stack][:8]
gap = max(abs(a - b) for a, b in zip(recorded_losses, loop, strict=True))
print(f"8 steps: Trainer {recorded_losses[-1]:.3f}, your loop {loop[-1]:.3f}, largest gap {gap:.4f}")
assert gap < 0.02, "Trainer and loop differ: same rate, schedule, clipping and order of batches?"

# %% [markdown]
# ### Several ranks: `deepspeed=` and `fsdp=`
#
# One argument more, and `Trainer` shards. The batch sizes are `"auto"`: Trainer writes those of its other
# arguments into DeepSpeed's configuration, so that they agree. FSDP must know what to gather at a time: the
# class of a block. Checkpointing is then FSDP's own.

# %%
shardings = {
    "plain": {"ddp_find_unused_parameters": False},
    "deepspeed": {"deepspeed": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW; DeepSpeed's for CPUs must be compiled
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto"}},
    "fsdp": {"fsdp": True, "fsdp_config": {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True}},
}  # fmt: skip


def arguments_for(kind, ranks):
    return TrainingArguments(
        output_dir=str(folder / kind), max_steps=2, per_device_train_batch_size=4 // ranks,
        learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, **shardings[kind],
    )  # fmt: skip


def small_lora():
    warnings.simplefilter("ignore", FutureWarning)  # as above, in every rank
    torch.manual_seed(0)
    return peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(
        r=8, target_modules=list(TARGETS), task_type="CAUSAL_LM"))  # fmt: skip


# %% [markdown]
# Two steps on two ranks of this machine's CPU, beside one plain process with the same four texts a step.
# On a CPU accelerate, which `Trainer` calls, would leave FSDP out in silence and use DDP: it takes up FSDP
# on GPUs alone. `fsdp_on_cpu` turns it on.

# %%
def on_ranks(kind):
    if kind == "deepspeed":
        load_deepspeed()  # for the CPU, as here
    arguments = arguments_for(kind, dist.get_world_size())
    rows = [{"input_ids": row, "labels": row} for tokens, _ in short[:8] for row in tokens]
    trainer = Trainer(model=small_lora(), args=arguments, train_dataset=rows)
    trainer.pop_callback(trainer.callback_handler.callbacks[-1])  # it prints every loss
    if arguments.fsdp:
        fsdp_on_cpu(trainer)
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed reports its extension
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, type(trainer.model_wrapped).__name__


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
# ## 5. The methods, measured small
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
                            items=1024, unit="tokens", name=name, timed_steps=2))  # fmt: skip
compare(measured, title=f"A small Llama, {len(methods)} ways, 1,024 tokens")

# %% [markdown]
# **Read it.** In so small a model activations outweigh the weights, and packing weights is hardly seen, eight-bit
# moments not at all. Checkpointing is. Packing costs time, as every matmul unpacks its weight anew; the median
# steps are those of this machine. Which method matters at 7B? `build_finetune` and `finetune_step`, at full size, say it.
#
# ## 6. Seven billion, simulated
#
# Lesson 05a showed what a simulated peak is worth. Here a step of Llama-2-7B is simulated at depths 2, 3
# and 4 and at three batch sizes, and extended to 32 layers and any batch, allocation by allocation. With
# flash attention, which keeps no matrix of scores, memory depends on the *number of tokens*, not on how they
# are cut into texts. So pieces of 256 tokens stand for all shapes. The cell after the next holds that to
# 0.1%, for the last method of the map, two layers deep.

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
    )  # fmt: skip


mapped = [name for name in methods if name in ("LoRA", "QLoRA", "QLoRA + checkpointing")]
found = {method: at_size(method) for method in mapped}
grids = {
    method: {(length, batch): pieces[length * batch // PIECE]
             for length in LENGTHS for batch in MICRO_BATCHES}
    for method, pieces in found.items()
}  # fmt: skip

# %%
shallow = llama_config(shape, num_hidden_layers=2)
two = [simulate(lambda: build_finetune(shallow, mapped[-1]), lambda m, o, s=size: finetune_step(m, o, *s),
                device="RTX 4090").peak_bytes for size in ((8, 256), (1, 2048))]  # fmt: skip
print(f"2,048 tokens as one text or as eight: {100 * (two[1] / two[0] - 1):+.3f}%")
assert abs(two[1] / two[0] - 1) < 1e-3, "with flash attention tokens count, not texts: eager here?"

# %%
figure = draw_budget_map(grids, "24GB", title="Llama-2-7B: peak of a step in GB; red with a cross: over 24 GB")
show(figure, alt=f"Grids of peaks over sequence length and micro-batch, one each for {', '.join(mapped)}.")

# %%
if four_bits:
    at_bet = found["QLoRA"][2048 // PIECE]
    print(*(f"{category}: {size / GB:.2f} GB" for category, size in at_bet.breakdown.items()), sep="\n")
    print(f"your bet: {my_bet_gb} GB; the peak: {at_bet.peak_bytes / GB:.1f} GB ({at_bet.evidence})")
    in_8_bits = extrapolate(
        lambda layers: build_finetune(llama_config(shape, num_hidden_layers=layers), "QLoRA + 8-bit AdamW"),
        lambda model, optimizer: finetune_step(model, optimizer, 8, PIECE),
        layers=shape.layers, from_layers=(2, 3, 4), device="RTX 4090")  # fmt: skip
    print(f"with 8-bit AdamW: {(at_bet.peak_bytes - in_8_bits.peak_bytes) / GB:.3f} GB less ({at_bet.evidence})")
print({name: f"shows {gpu(name).memory_bytes / GB:.1f} GB" for name in ("RTX 4090", "A10", "L4")})

# %% [markdown]
# **Read it.** Packing saves the same 9.6 GB in every cell, because it shrinks the weights. Checkpointing
# saves more the more tokens there are. "QLoRA 7B takes 3.5 GB" is folklore: that is not even the weights,
# and the peak of one text of 2,048 tokens is four times as much without checkpointing. With it, the largest
# cell that fits holds sixteen times the tokens of LoRA's. Logits are not a category of their own here:
# transformers computes the loss inside of forward, so the meter counts them as temporaries and activations.
#
# The cap is 24 GB of tensors. Each card (the last line, sizes as their drivers report them) keeps about 0.5 GB for its CUDA context, and PyTorch reserves more than
# it uses. So on an A10 or an L4 plan for 22 GB.

# %%
def bars(sequence_length, micro_batch):
    picked = [grid[sequence_length, micro_batch] for grid in grids.values()]
    title = f"Llama-2-7B, {micro_batch} x {sequence_length:,} tokens"
    peaks = ", ".join(f"{m.name} {m.peak_bytes / GB:.1f} GB" for m in picked)
    return draw_breakdown(picked, title=title, limit="24GB"), f"{title}: {peaks}."


explore(bars, sequence_length=list(LENGTHS), micro_batch=list(MICRO_BATCHES))
show(*bars(1024, 4))

# %% [markdown]
# **Read it.** The controls work in a running notebook; the picture is for four texts of 1,024 tokens. It is in GiB,
# in which 24 GB are 22.4. Adapters count as parameters. The optimizer state is there, too thin to be seen.
#
# ### Beside published peaks
#
# The simulator against peaks that others measured: litgpt's LoRA of the same Llama-2-7B on an A100 (allocated
# memory, texts of 1,304 tokens), and PEFT's of a 3B on an H100 (reserved memory, evaluation included). Each row
# is simulated in its own configuration. litgpt's row with NF4 stands twice: with the libraries of its time, and
# with today's.

# %%
from utils.validation.simulation_published import litgpt_step, peft_step
from utils.validation.tables import table

lit = {(row["quantization"], row["micro_batch"]): float(row["max_gpu_ram_gb"])
       for row in table("litgpt_adapters") if row["model"] == "Llama 2" and row["max_gpu_ram_gb"] != "OOM"}
cases = [(f"litgpt, Llama 2 7B, bf16, batch {size}", lit["None", str(size)],
          litgpt_step("Llama 2", size, "None", early=False).peak_bytes) for size in (1, 2)]  # fmt: skip
if four_bits:
    cases += [(f"litgpt, Llama 2 7B, NF4-dq, {when}", lit["bnb.nf4-dq", "1"],
               litgpt_step("Llama 2", 1, "bnb.nf4-dq", early=when == "2023").peak_bytes)
              for when in ("2023", "today")]  # fmt: skip
row = next(r for r in table("peft_adapters") if r["experiment"].endswith("3B-rank32"))
cases.append(("PEFT, Llama 3.2 3B, bf16, reserved", float(row["memory_max_bytes"]) / GB,
              peft_step(row).reserved_bytes))  # fmt: skip
low, high = (found["LoRA"][tokens // PIECE].peak_bytes for tokens in (1024, 2048))
cases.append(("our map's LoRA, read at 1,304 tokens", lit["None", "1"], low + 280 / 1024 * (high - low)))
for case, published, simulated in cases:
    ratio = simulated / GB / published
    print(f"{case:<37}published {published:5.2f} GB  simulated {simulated / GB:5.2f} GB  ratio {ratio:.3f}")
    assert "NF4" in case or abs(ratio - 1) < 0.06, f"{case}: run `make validate` for all rows"
recorded_table("llama7b_adapters", columns=["method", "sequence_length", "micro_batch", "peak_bytes"])

# %% [markdown]
# **Read it.** The 16-bit rows lie within 6%. In 2023 bitsandbytes kept an input of every packed layer that
# no one needed, and litgpt unpacked through fp16. The row "2023" has both, the row "today" has neither, and
# needs much less. The "2023" row comes out some 6% low, and that is not explained (lesson 05a): leave a margin
# of 10% on four-bit peaks until a GPU row is recorded.
#
# ## 7. Where offload helps, and where not
#
# **Question.** Adapters with 20 million fp32 parameters train with AdamW. How many GB does it free
# to offload the optimizer state to the CPU?

# %%
freed_gb = ...
check("06.offloaded_gigabytes", freed_gb)

# %% [markdown]
# First around adapters, for real: DeepSpeed's ZeRO-2 with `offload_optimizer`, on one rank and on its CPU. What
# it holds has names, so you can see what would leave a GPU.

# %%
def around_adapters(offload):
    load_deepspeed()  # for the CPU, as here
    model = small_lora()
    own = trained(model)
    count = sum(parameter.numel() for parameter in own)
    extra = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    settings = zero_config(2, count, world_size=1, micro_batch=4, precision="fp32", **extra)
    settings["zero_force_ds_cpu_optimizer"] = False
    engine = zero_engine(model, torch.optim.AdamW(own, lr=1e-2), settings)
    losses = []
    for tokens, _ in short[:8]:
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    rows = [(row.path.removeprefix("optimizer."), row.bytes / count) for row in resident(engine)]
    return losses, [(path, each) for path, each in rows if "fp32_groups" in path or "exp_avg" in path]


# %%
if not zero_problem:
    (kept_losses, kept), (moved_losses, moved) = (
        run_ranks(around_adapters, 1, offload, timeout_seconds=200)[0] for offload in (False, True))  # fmt: skip
    assert kept_losses == moved_losses, "offload moves states and changes no number: same seed?"
    print("the same losses with offload and without; held for each adapter parameter, with offload:")
    for path, each in moved:
        print(f"{each:5.1f} bytes  {path}")

# %%
states = 4 + 4 + 4  # master copy and two moments: what was there without offload, too
seven = 8 * shape.layers * (4 * 2 * shape.hidden + 3 * (shape.hidden + shape.feedforward))
if not zero_problem:
    assert sum(each for _, each in kept) == states, "a master copy and two moments, 12 bytes: fp32?"
for targets, count in (("two", adapters), ("all seven", seven)):
    print(f"7B, rank 8 on {targets} matrices of a block: {states * count / GB:.2f} GB ({Evidence.PREDICTED})")

# %% [markdown]
# **Read it.** Twelve bytes a trained parameter move: fp32 master copy and two moments. (The copy's gradient is an
# extra in host memory.) For adapters that is 0.05 to 0.24 GB of 24, little to gain, paid for with two transfers
# a step. Nor does ZeRO-2 itself help on one GPU: it divides by the number of ranks, which is one. Lesson 09
# measures that. Now around a full fine-tune:

# %%
from utils.planner import Batch, Lora as LoraPlan, Plan, memory


def full(layers, offload):
    model, optimizer = build_finetune(llama_config(shape, num_hidden_layers=layers), "full fine-tune")
    return model, OffloadedOptimizer(optimizer) if offload else optimizer


text, step = Batch(sequences=1, sequence_length=2048), lambda m, o: finetune_step(m, o, 1, 2048)
runs_7b = {"full, as it is": extrapolate(lambda layers: full(layers, False), step, layers=shape.layers,
                                         from_layers=(2, 3, 4), device="RTX 4090"),
           "full, offloaded": simulate(lambda: full(shape.layers, True), step, device="RTX 4090")}  # fmt: skip
adapter_plan = {"framework": "bf16", "lora": LoraPlan(base="nf4-dq")}
plans = {"full": {"framework": "fsdp"}, "QLoRA": adapter_plan}  # fsdp: fp32 states, bf16 arithmetic
for kind, plan in plans.items():
    for offload, word in (("none", "as it is"), ("optimizer", "offloaded")):
        held = memory(shape, Plan(recompute="full", offload=offload, **plan), text)[0].allocated_bytes
        run = runs_7b.get(f"{kind}, {word}")
        beside = f"{run.peak_bytes / GB:7.1f} GB {run.evidence}, in {run.peak_phase}" if run else ""
        print(f"{kind + ', ' + word:<18}{held / GB:7.2f} GB {Evidence.PREDICTED}{beside}")
temporary = runs_7b["full, as it is"].breakdown[Category.TEMPORARIES]
print(f"AdamW's temporaries as it is: {temporary / GB:.1f} GB;",
      f"on the host when offloaded: {runs_7b['full, offloaded'].host_bytes / GB:.1f} GB ({Evidence.SIMULATED})")  # fmt: skip

# %% [markdown]
# **Read it.** Here offload matters: the moments leave, and with them the temporaries of the step. The plan and the
# simulation differ by these: PyTorch's default AdamW works on all tensors at once and needs one more copy of
# the weights, which `fused=True` avoids. Weights and gradients stay, in fp32, so even what is left is no 24 GB; the host holds
# 16 bytes a parameter. The sheet of section 1 has the same 16. QLoRA's two plans differ by hundredths. (They are the
# planner's estimate of the step that the map simulates at 5.3 GB.) Lesson 07 is about offload.
#
# ## 8. Save, reload, merge
#
# Only the adapters are saved. Reloading puts them on a freshly packed base. **Merging** adds
# (alpha / r) B A to W, so that inference pays nothing extra. It needs the *16-bit* base, and goes one
# layer after the other, so that it needs little beside it.

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
assert torch.allclose(logits(reloaded), logits(qlora), atol=1e-5), "reload on the same packed base"
print({name: format_bytes(size) for name, size in files.items()})
print(f"at 7B: {4 * adapters / 1e6:.1f} MB of adapters, {2 * P / GB:.1f} GB of model ({Evidence.PREDICTED})")

# %%
def on_base(quantization, dtype):
    model = load_base(folder / "base", quantization=quantization, dtype=dtype, device=device)
    return peft.PeftModel.from_pretrained(model, folder / "adapter")


def moved_by_merging(model):
    before = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of just what this cell measures
        return (logits(model.merge_and_unload()) - before).abs().max().item()


moved = {dtype: moved_by_merging(on_base(None, dtype)) for dtype in (torch.float32, torch.bfloat16)}
for dtype, distance in moved.items():
    print(f"merged into a base in {dtype}: logits move by {distance:.1e}")
assert moved[torch.float32] < 1e-3, "in fp32 merging moves only the last digits: merge once"
if four_bits:
    rounded = moved_by_merging(on_base(four_bits, torch.float32))
    print(f"merged into packed weights: logits move by {rounded:.1e}")
    assert rounded > 10 * moved[torch.float32], "packing again rounds: is this base packed?"
    other = logits(on_base(None, torch.float32)) - logits(on_base(four_bits, torch.float32))
    print(f"the adapters on the base they did not train with: {other.abs().max():.1e} apart")


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
# layer beside them. Keep the adapters: their file is about a thousandth of the model's.
#
# <div class="alert alert-warning"><b>Trap.</b> An adapter trained on the packed base, merged into the
# 16-bit one, sees weights that it did not train with. "On the base they did not train with" above is how far that
# moves the logits. Evaluate the model that you will serve.</div>
#
# ### A base that cannot be loaded
#
# `load_base` takes any folder with a Llama, or a name on the Hub. What is missing, cut off or of another
# kind ends in a sentence, before anything is computed:

# %%
(folder / "cut").mkdir(exist_ok=True)
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
# | LoRA | gradients, optimizer state | sometimes quality | weights, most activations |
# | NF4 weights | weights, to a quarter | unpacking in every matmul, some accuracy | activations |
# | checkpointing | activations | a second forward | weights |
# | 8-bit or paged AdamW | optimizer state | a little accuracy; transfers when paged | adapters: it is small already |
# | optimizer offload | optimizer state | transfers | adapters |
# | shorter texts, smaller micro-batch | activations, logits | tokens per step | weights |

# %%
score("06", f"Llama-2-7B, {mapped[-1]}, 4,096 tokens", evidence=Evidence.SIMULATED,
      peak_bytes=found[mapped[-1]][4096 // PIECE].peak_bytes)  # fmt: skip
for run in measured:
    score("06", f"small Llama, {run.name}", peak_bytes=run.peak_bytes,
          step_seconds=run.median_step_seconds)  # fmt: skip
scoreboard()

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
    return {str(dtype): format_bytes(size) for dtype, size in sizes.items()}


def step_peak(model):
    own = peft.get_peft_model(model, peft.LoraConfig(
        r=8, target_modules=list(TARGETS), task_type="CAUSAL_LM"))  # fmt: skip
    optimizer = torch.optim.AdamW(trained(own.train()))
    return measure(step_of(own, optimizer), model=own, optimizer=optimizer, timed_steps=0).peak_bytes


if four_bits:
    for word in ("as packed", "prepared"):
        model = load_base(folder / "base", quantization=four_bits, device=device)
        if word == "prepared":
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            assert all(p.dtype is not torch.bfloat16 for p in model.parameters()), "PEFT kept 16-bit weights"
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
