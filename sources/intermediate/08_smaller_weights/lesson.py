# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 Smaller weights for inference
#
# {{badges}}
#
# **Promise.** You round the weights of a trained model to 8, 4, 3 and 2 bits, by methods that you write
# yourself, and measure what it loses. Then you say which card serves a model of 7 or 70 billion
# parameters, over which context, and how fast its tokens can come.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 70 for the lab | any laptop | about a minute of computing on two CPU cores |
#
# ## A bet
#
# Llama-2-70B is packed to 4 bits a weight. It then fits on one A100 with 80 GB. How many tokens per second
# can that card write for one reader, at the most? Write your guess. Section 8 computes it, beside a
# published rate.

# %%
my_bet_tokens_per_second = 100

# %% tags=["setup"]
here = setup("intermediate/08")

# %%
import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from utils import check, device, format_bytes, measure, score, scoreboard, scratch, show, simulate
from utils.models import llama_config
from utils.techniques import nf4
from utils.techniques.bitsandbytes_import import bitsandbytes_problem
from utils.lessons.lesson_08 import int8
from utils.lessons.lesson_08.awq import awq
from utils.lessons.lesson_08.bytes_llama import bytes_llama, made_by, sequence_losses
from utils.lessons.lesson_08.figures import draw_context_memory, draw_decoding, draw_error_by_bits
from utils.lessons.lesson_08.gptq import gptq
from utils.lessons.lesson_08.inference import Serving, paged_tokens
from utils.lessons.lesson_08.library_text import calibration_tokens, held_out_sequences
from utils.lessons.lesson_08.packed import pack_linears
from utils.lessons.lesson_08.rounding import output_error, round_to_nearest
from utils.lessons.lesson_08.weight_only import inputs_of, linears_of, quantize_weights
from evidence.validation.tables import source, table

# %% [markdown]
# ## What you will be able to do
#
# - Say what a served model holds, which card serves it, and how fast at most.
# - Write GPTQ, AWQ and absmax rounding, and measure the error where it counts: in a layer's output.
# - Choose a format, and know what a calibration text can break.
#
# Fewer bits pay for **memory** with accuracy. They also save bytes to move, which is what writing tokens waits for.
#
# ## 1. What a served model holds
#
# No gradients, no optimizer state. What is left are **weights** and the **cache of keys and values**: each
# token, read or written, leaves a key and a value in every layer, so that later tokens need not compute
# them again. That is $2 \times \text{layers} \times \text{key-value heads} \times \text{head width}$ numbers.
#
# **Predict.** `Serving` adds up these formulas for published shapes. Eight sequences at a time:

# %%
MODELS = ("llama-2-7b", "llama-2-70b")
served = {f"{name}, {bits} bits": Serving(model=name, bits=bits, group=None if bits == 16 else 128)
          for name in MODELS for bits in (16, 4)}
cards = {name: device(name).memory_bytes for name in ("RTX-4090", "A100-80GB", "H200")}
contexts = [2**power for power in range(9, 18)]
memory = {name: {c: s.memory_bytes(8, c) for c in contexts} for name, s in served.items()}
show(draw_context_memory(memory, cards, title="Eight sequences: weights and cache over the context"),
     alt="Memory over context for Llama-2 7B and 70B in 16 and 4 bits, with the memory of three cards.")

# %% tags=["nbval-check-output"]
rows = [{"model": name, "weights": format_bytes(s.weight_bytes), "cache of a token": format_bytes(s.cache_bytes_per_token),
         **{f"tokens beside them, {card}": f"{s.cache_tokens(room):,}" for card, room in cards.items()}}
        for name, s in served.items()]
pd.DataFrame(rows).set_index("model").T

# %% [markdown]
# **Read it.** To the left weights decide, to the right the cache does. Fewer bits take off the same GiB everywhere. The table
# says which card serves what: "tokens" are those of all sequences together, 0 where the weights do not fit. (Llama-2 was
# trained on 4,096 tokens: beyond, the lines say what its shape would hold.)
#
# The lines of 7B and 70B meet, because a token of the ten times larger model leaves *less* cache: Llama-2-7B keeps
# keys and values of all its 32 heads; in Llama-2-70B 64 heads share 8. That is **grouped-query attention**.
#
# **Question.** How many KiB would one token of Llama-2-70B leave *without* grouped queries?

# %%
ungrouped_kib = ...
check("08.ungrouped_kib", ungrouped_kib)

# %% [markdown]
# **Run.** Is the formula right? transformers' Llama reads 4,096 tokens, keeps their cache and writes one more, in bf16,
# on a simulated card.

# %%
def built(name):
    with torch.device("meta"):
        llama = LlamaForCausalLM(llama_config(name)).to(torch.bfloat16)
    return llama.to_empty(device="cpu").eval(), None


@torch.no_grad()
def read_and_write(llama, _, batch=1):
    text, token = torch.zeros(batch, 4096, dtype=torch.long), torch.zeros(batch, 1, dtype=torch.long)
    cache = llama(text, use_cache=True, logits_to_keep=1).past_key_values
    llama(token, past_key_values=cache, use_cache=True)

# %%
for name, card, batch in (("llama-2-7b", "RTX-4090", 1), ("llama-2-7b", "A100-80GB", 8), ("llama-2-70b", "H200", 1)):
    run = simulate(lambda name=name: built(name), partial(read_and_write, batch=batch), device=card, name=name)
    formula = Serving(model=name).memory_bytes(batch, 4096)
    print(f"{name:<12} batch {batch}: {format_bytes(formula)} (predicted), {format_bytes(run.peak_bytes)} (simulated),",
          f"ratio {run.peak_bytes / formula:.3f}. {run.notes[0]}")

# %% [markdown]
# **Read it.** The formula counts what stays: weights and cache. What the simulation adds is what reading 4,096 tokens at
# once takes for a moment, more with eight sequences. Servers read long texts in parts.
#
# ### A cache in pages
#
# A server does not know how long an answer will be. To reserve the longest possible cache for every reader wastes most
# of it. A **paged cache** gives out blocks of 16 tokens as they are needed, and loses less than one block a
# sequence ([Kwon and others 2023](https://arxiv.org/abs/2309.06180)). Answers of 20 to 2,048 tokens, most of them
# short, five draws:

# %%
LONGEST = 2048
for seed in range(5):
    draw = torch.rand(256, generator=torch.Generator().manual_seed(seed))
    lengths = [int(20 * (LONGEST / 20) ** share) for share in draw.tolist()]
    used = sum(lengths)
    print(f"draw {seed}: used of what is reserved {used / (256 * LONGEST):.0%}, of what is paged {used / paged_tokens(lengths):.1%}")

# %% [markdown]
# **Read it.** The same memory holds several times as many readers. (The lengths are made; how much is won depends on
# yours.)
#
# ## 2. A model that has learned something
#
# On random weights nothing can be lost. Ours is a Llama of 0.9 million parameters, trained to continue sources of
# Python's standard library, byte by byte. Its **perplexity** is $e$ to the mean loss on modules that it has never
# seen: among how many bytes it is in doubt, on average.

# %%
model, held_out = bytes_llama(), held_out_sequences()
plain_losses = sequence_losses(model, held_out)


def loss_in(few):
    """Perplexity, and the change in percent with its standard error: the same sequences in both arms."""
    losses = sequence_losses(few, held_out)
    more = losses - plain_losses
    change, spread = 100 * more.mean().expm1(), 100 * more.std() / len(more) ** 0.5
    return losses.mean().exp().item(), change.item(), spread.item()

# %%
origin = made_by()
print(f"trained for {origin['steps']} steps on the {origin['text']}, to a training loss of {origin['training_loss']} (recorded)")
print(f"perplexity {loss_in(model)[0]:.3f} on {held_out[:, 1:].numel():,} bytes (measured on the CPU)")

# %% [markdown]
# Take one layer apart, the gate of the second block. `inputs_of` listens to what comes in while the model reads a
# **calibration text**: 32 sequences, 4,096 bytes.

# %%
PATH, GROUP = "blocks.1.feedforward.gate", 32
gate = model.get_submodule(PATH)
with inputs_of({PATH: gate}) as seen, torch.no_grad():
    model(calibration_tokens())
weight, inputs = gate.weight.detach(), seen[PATH]
print(f"weight {tuple(weight.shape)}; {inputs.rows:,} inputs seen")

# %% [markdown]
# ## 3. Round to nearest
#
# A **group** of neighbours in a row, 32 here, shares a scale and a zero point, the code that stands for 0. With $b$ bits
# there are $2^b$ places on its grid; each weight takes the nearest. The scale is kept in 16 bits.

# %%
def grid_of(part, bits):
    low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    return scale, torch.round(-low / scale)


def on_grid(part, bits, scale, zero):
    codes = (torch.round(part / scale) + zero).clamp(0, 2**bits - 1)
    return scale * (codes - zero)

# %%
def nearest(weight, bits, group=GROUP):
    parts = weight.split(group, dim=1)
    return torch.cat([on_grid(part, bits, *grid_of(part, bits)) for part in parts], dim=1)


def error_of(stored):
    return output_error(weight, stored, inputs.moments)

# %%
for bits in (8, 4, 3, 2):
    print(f"{bits} bits: the layer's output is off by {error_of(nearest(weight, bits)):.2%}")

# %% [markdown]
# **The error that counts** is that of $Wx$, for the $x$ that really come. To compute it for a rounded $Q$ takes no more
# of them than $H = \sum x x^T$ (`moments`), since $\sum |(W-Q)x|^2 = \operatorname{tr}\,(W-Q)\,H\,(W-Q)^T$. Two methods
# lower it with the same bits.
#
# ## 4. GPTQ: the columns to come make up for the error
#
# Round the first column: the output is off. The other columns are still free. Move them so that the output is as
# right as it can be, round the second, and so on
# ([Frantar and others 2022](https://arxiv.org/abs/2210.17323)). The error is quadratic, so the best move is known:
# $-e\,U_{q,\text{later}}/U_{qq}$, with $e$ the rounding error of column $q$ and $U$ the upper Cholesky factor of
# $H^{-1}$. (*Damping* adds a little to the diagonal of $H$, so that the inverse exists.)

# %%
def gptq_by_hand(weight, moments, bits, group=GROUP, damping=0.01):
    moving, stored = weight.clone(), torch.empty_like(weight)
    damped = moments.double() + damping * moments.diagonal().double().mean() * torch.eye(len(moments))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    for q in range(weight.shape[1]):
        if q % group == 0:  # a new group: its grid, from where its weights are by now
            grid = grid_of(moving[:, q : q + group], bits)
        column = slice(q, q + 1)
        stored[:, column] = on_grid(moving[:, column], bits, *grid)
        error = (moving[:, column] - stored[:, column]) / factor[q, q]
        moving[:, q + 1 :] -= error * factor[column, q + 1 :]
    return stored

# %%
by_gptq = gptq_by_hand(weight, inputs.moments, 4)
from_utils = gptq(weight, inputs.moments, 4, GROUP).weight()
assert abs(error_of(by_gptq) / error_of(from_utils) - 1) < 0.01, "the notebook's GPTQ and utils' differ"
print(f"4 bits, error of the output: nearest {error_of(nearest(weight, 4)):.2%}, GPTQ {error_of(by_gptq):.2%}")
distance = [(stored - weight).norm() / weight.norm() for stored in (nearest(weight, 4), by_gptq)]
print(f"4 bits, error of the weights: nearest {distance[0]:.2%}, GPTQ {distance[1]:.2%}")

# %% [markdown]
# **Read it.** Taken one by one the weights are *farther* off than before, and the output's error is halved. GPTQ does
# not make the errors small, it makes them cancel.
#
# **Question.** Suppose the layer's inputs have nothing to do with each other: $H$ is diagonal. By how many percent
# does GPTQ lower the error of rounding to nearest?

# %%
gain_percent = ...
check("08.independent_inputs", gain_percent)

# %% [markdown]
# ## 5. AWQ: widen what is multiplied by much
#
# A column whose input is ten times larger does ten times the harm when it is rounded. AWQ multiplies such columns by
# $s > 1$ before rounding and divides their input by $s$ ([Lin and others 2023](https://arxiv.org/abs/2306.00978)). The norm
# before can divide for nothing where all that read it share one $s$; here each matrix keeps its own. $s$ is the input's mean magnitude to a power, and twenty
# powers are tried. (`utils`' form then also searches how far each group's grid reaches, as the authors do. So its
# errors below are lower.)

# %%
def awq_by_hand(weight, inputs, bits):
    tried = []
    for power in torch.arange(20) / 20:
        scales = inputs.magnitudes**power
        scales = scales / (scales.max() * scales.min()).sqrt()
        stored = nearest(weight * scales, bits) / scales
        tried.append((error_of(stored), power.item()))
    return min(tried)

# %%
error, power = awq_by_hand(weight, inputs, 4)
share = inputs.magnitudes.max() / inputs.magnitudes.median()
print(f"4 bits: nearest {error_of(nearest(weight, 4)):.2%}, AWQ {error:.2%} at power {power:.2f}")
print(f"the largest input channel is {share:.1f} times the median one")

# %% [markdown]
# **Read it.** AWQ gains little here: no channel of this small model stands out, so there is little to protect. Section 7
# has the case that it was made for.
#
# Now error against bits. Each method fits to the inputs of another draw of calibration text, and `error_of` measures on
# the first draw, which it has *not* seen. The bands span three draws, too narrow to be seen. Below the figure stands one draw
# at 4 bits, with larger groups as well.

# %%
def inputs_on(seed):
    with inputs_of({PATH: gate}) as found, torch.no_grad():
        model(calibration_tokens(seed=seed))
    return found[PATH]


ROUNDED_BY = {
    "nearest, no text": lambda x, bits, group: round_to_nearest(weight, bits, group),
    "AWQ": lambda x, bits, group: awq(weight, x.moments, x.magnitudes, bits, group),
    "GPTQ": lambda x, bits, group: gptq(weight, x.moments, bits, group)}
texts = [inputs_on(seed) for seed in (10, 11, 12)]
errors = {name: {bits: [error_of(rounded_by(text, bits, GROUP).weight()) for text in texts] for bits in (2, 3, 4, 8)}
          for name, rounded_by in ROUNDED_BY.items()}
show(draw_error_by_bits(errors, device="the CPU"),
     alt="Relative error of a layer's output over 2, 3, 4 and 8 bits: falling lines, GPTQ lowest; AWQ meets plain rounding at 8 bits.")

# %%
by_group = {name: {f"groups of {group}": f"{error_of(rounded_by(texts[0], 4, group).weight()):.2%}" for group in (32, 64, 128)}
            for name, rounded_by in ROUNDED_BY.items()}
pd.DataFrame(by_group).T.rename_axis("error of the output, 4 bits (measured)")

# %% [markdown]
# **Read it.** One bit less is about twice the error, for every method. AWQ's
# gain fades towards 8 bits; GPTQ moves its line down by a factor, and is worth about one bit here. Larger groups save scales and cost error.
#
# ## 6. Eight bits, and the channels that spoil them
#
# With eight bits one scale a row is enough: **absmax** divides a row by its largest magnitude. Then inputs, too, can be
# whole numbers, and the product is one of integers. But models of billions of parameters grow a few input channels
# that are far larger than all others, and these take the whole scale of a row. `LLM.int8()` takes 16 bits for
# channels that reach 6, eight for the rest ([Dettmers and others 2022](https://arxiv.org/abs/2208.07339)).
#
# Ours has none, so plant one, and leave the model's function as it is: each norm makes channel 7 thirty times as large,
# and the layers behind it divide its weights by thirty.

# %%
def with_outlier(model, channel=7, factor=30.0):
    grown = copy.deepcopy(model)
    with torch.no_grad():
        for block in grown.blocks:
            attention, mlp = block.attention, block.feedforward
            for norm, readers in ((block.attention_norm, (attention.query, attention.key, attention.value)),
                                  (block.feedforward_norm, (mlp.gate, mlp.up))):
                norm.weight[channel] *= factor
                for reader in readers:
                    reader.weight[:, channel] /= factor
    return grown

# %%
grown = with_outlier(model)
same = (sequence_losses(grown, held_out) - plain_losses).abs().max()
assert same < 1e-4, "the planted channel must change nothing before rounding"
print(f"largest change of a sequence's loss: {same:.1e}")

# %%
few = {}
for name, arm in {"as trained": model, "one outlier": grown}.items():
    layer, rows = arm.get_submodule(PATH), []
    keep = layer.register_forward_pre_hook(lambda _, args: rows.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        arm(calibration_tokens())
    keep.remove()
    x, w = rows[0], layer.weight.detach()
    for way, product in (("int8", int8.int8_product(x, w)), ("split", int8.split_product(x, w))):
        few[f"{name}, {way}"] = ((product - x @ w.T).norm() / (x @ w.T).norm()).item()
    channels = (x.abs() >= int8.THRESHOLD).any(0).sum()
    print(f"{name:<12} int8 {few[f'{name}, int8']:.2%}, LLM.int8() split {few[f'{name}, split']:.2%}; {channels} channels split off")
assert few["one outlier, split"] < few["one outlier, int8"], "the split keeps the large channel out of the scale"

# %% [markdown]
# **Read it.** Without the split one channel in 128 spoils the product; with it the error is what it was. (Below, int8
# is a format of *weights* alone.)
#
# ## 7. The whole model
#
# All 28 matrices of the four blocks, by each method; embedding, norms and head stay. `quantize_weights` goes block by
# block: each is calibrated on what the *rounded* blocks before it give. A method is a function of a weight and its
# inputs, so you can hand in your own. NF4 is lesson 06's grid.

# %%
METHODS = {"fp16": lambda w, x: Sixteen(w), "int8": lambda w, x: int8.Int8Weight.of(w),
           "NF4": lambda w, x: nf4.Nf4Weight.of(w)}
for b in (4, 3, 2):
    METHODS[f"nearest-{b}"] = lambda w, x, b=b: round_to_nearest(w, b, GROUP)
    METHODS[f"AWQ-{b}"] = lambda w, x, b=b: awq(w, x.moments, x.magnitudes, b, GROUP)
    METHODS[f"GPTQ-{b}"] = lambda w, x, b=b: gptq(w, x.moments, b, GROUP)
METHODS["nearest-4, groups of 64"] = lambda w, x: round_to_nearest(w, 4, 64)

# %%
class Sixteen:
    """What the others are compared with."""

    def __init__(self, weight):
        self.half, self.stored_bytes = weight.half(), 2 * weight.numel()

    def weight(self):
        return self.half.float()


def rounded(method, model=model, seed=1):
    few = copy.deepcopy(model)
    return few, quantize_weights(few, calibration_tokens(seed=seed), METHODS[method])

# %%
matrices = sum(layer.weight.numel() for layer in linears_of(model.blocks).values())
results, layer_errors = {}, {}
for name in METHODS:
    few, made = rounded(name)
    layer_errors[name] = [row.relative_error for row in made]
    stored = sum(row.made.stored_bytes for row in made)
    results[name] = (*loss_in(few), stored, 8 * stored / matrices, sum(layer_errors[name]) / len(made))
frame = pd.DataFrame(results, index=["perplexity", "change %", "standard error", "bytes", "bits a weight", "mean error"]).T
assert abs(frame.loc["int8", "perplexity"] / frame.loc["fp16", "perplexity"] - 1) < 0.005, "int8 costs less than 0.5%"
for better, worse in (("int8", "AWQ-4"), ("int8", "GPTQ-4"), ("AWQ-4", "nearest-4"), ("GPTQ-4", "nearest-4")):
    assert frame.loc[better, "mean error"] < frame.loc[worse, "mean error"], f"{better} should beat {worse}: is the calibration text still Python?"
display(frame.style.format({"perplexity": "{:.3f}", "change %": "{:+.2f}", "standard error": "{:.2f}", "bytes": "{:,.0f}",
                            "bits a weight": "{:.2f}", "mean error": "{:.2%}"}).set_caption("28 matrices (measured)"))

# %% [markdown]
# **Read it.** Measured, on text that neither training nor calibration saw; the standard error is that of the change,
# over sequences. Eight bits cost nothing that can be seen. At four the price is below one percent, and GPTQ's is
# smallest. At two it is more than ten times that, for every method. *Bits a weight* count scales and zero points. NF4's scale
# serves 64 weights, so its neighbour is *nearest-4, groups of 64*: rounding to even steps between a group's smallest and
# largest weight is no worse here. Lesson 06's comparison gave both tables one symmetric scale, and there NF4 wins.
#
# At 4 bits AWQ lowers the mean error of the layers and not the perplexity: an average over layers is no promise for the
# whole. The draw of the calibration text matters as well, more at 3 bits than at 4:

# %%
for name in ("AWQ-4", "GPTQ-4", "GPTQ-3"):
    draws = [loss_in(rounded(name, seed=seed)[0])[1] for seed in (2, 3)]
    print(f"{name}: change {frame.loc[name, 'change %']:+.2f}%, with other calibration text", ", ".join(f"{d:+.2f}%" for d in draws))

# %% [markdown]
# Now the model with the planted channel, which is the same model before rounding:

# %%
for name in ("int8", "nearest-4", "AWQ-4", "GPTQ-4"):
    _, change, spread = loss_in(rounded(name, model=grown)[0])
    print(f"{name:<10} as trained {frame.loc[name, 'change %']:+.2f}%, with an outlier {change:+.2f}% (standard error {spread:.2f})")

# %% [markdown]
# **Read it.** Rounding to nearest pays about twice as much. This is what AWQ was made for: it widens the channel's
# weights again before rounding. GPTQ copes as well, since $H$ knows how large the channel is.
#
# Of one family, large models lose less at the same bits. Frantar and others' table of OPT on WikiText2: at 3 bits GPTQ takes OPT-125M
# from a perplexity of 27.65 to 53.85, and OPT-175B from 8.34 to 8.68 (published).
#
# ### Packed, saved, loaded
#
# So far the rounded values lay in fp32. **Packing** stores codes without gaps, and a `PackedLinear` writes the weight
# out anew in each forward, which takes time and, for a moment, memory: look at the *temporaries*. A server's kernel
# unpacks while it multiplies. Embedding, norms and head stay in fp32, in the file as well.

# %%
def packed(name):
    few, made = rounded(name)
    return few, pack_linears(copy.deepcopy(few), {row.layer: row.made for row in made})

# %%
few, small = packed("GPTQ-4")
with scratch("lesson-08") as folder:
    save_file(small.state_dict(), file := Path(folder) / "gptq-4.safetensors")
    size = file.stat().st_size
    small.load_state_dict(load_file(file))
stored = sum(b.nbytes for path, b in small.blocks.named_buffers())
print(f"in the file {format_bytes(size)}; packed matrices {format_bytes(stored)} (measured), {format_bytes(frame.loc['GPTQ-4', 'bytes'])} (predicted)")
assert stored == frame.loc["GPTQ-4", "bytes"], "what is packed is what the format takes"
torch.testing.assert_close(sequence_losses(small, held_out[:32]), sequence_losses(few, held_out[:32]), atol=1e-4, rtol=0)

# %%
@torch.no_grad()
def read_64_bytes(model):
    model(held_out[:1, :64])


weight_bytes = {}
for name, arm in {"fp32": model, "packed, 4 bits": small}.items():
    run = measure(lambda arm=arm: read_64_bytes(arm), model=arm, name=name, timed_steps=0)
    weight_bytes[name] = run.breakdown["parameters"] + run.breakdown["buffers"]  # packed codes are buffers
    print(f"{name:<15} weights {format_bytes(weight_bytes[name])},",
          f"temporaries {format_bytes(run.breakdown['temporaries'])} (measured)")
assert weight_bytes["packed, 4 bits"] < weight_bytes["fp32"] / 4, "packed matrices take an eighth of fp32"

# %% [markdown]
# ### The libraries
#
# The calls at work:
#
# ```python
# from transformers import AutoModelForCausalLM, BitsAndBytesConfig
# AutoModelForCausalLM.from_pretrained(name, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
#
# from torchao.quantization import Int8WeightOnlyConfig, quantize_
# quantize_(model, Int8WeightOnlyConfig())
#
# from gptqmodel import GPTQModel, QuantizeConfig
# model = GPTQModel.load(name, QuantizeConfig(bits=4, group_size=128))
# model.quantize(calibration_texts)
# model.save("model-gptq-4bit")
# ```
#
# | format | home today | without a GPU | heritage |
# |---|---|---|---|
# | int8, LLM.int8() | bitsandbytes | runs, below | |
# | int8, weights only | torchao | runs, below where it is installed | |
# | NF4 | bitsandbytes | runs, below | |
# | GPTQ | GPTQModel, llm-compressor | GPTQModel runs; it set the par of the lab | AutoGPTQ |
# | AWQ | llm-compressor, GPTQModel | not tried here | AutoAWQ, deprecated |
# | int4, fp8 | torchao, vLLM | made for GPUs | |
#
# Where the format is the same, so are the codes:

# %%
if problem := bitsandbytes_problem():
    print(problem)
else:
    import bitsandbytes.functional as library

    theirs, their_scales, _ = library.int8_vectorwise_quant(weight.half())
    ours = int8.Int8Weight.of(weight.half())
    same = torch.equal(ours.codes, theirs) and torch.equal(ours.scales, their_scales.float())
    packed_codes, state = library.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    same_nf4 = torch.equal(nf4.Nf4Weight.of(weight).packed.flatten(), packed_codes.flatten())
    print(f"codes and scales equal to bitsandbytes': int8 {same}, NF4 {same_nf4}")

# %%
if find_spec("torchao") is None:
    print("torchao is not installed (`pip install torchao`): its codes are not compared here.")
else:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Sequential(copy.deepcopy(gate))
    quantize_(layer, Int8WeightOnlyConfig())  # in place
    same = (layer[0].weight.qdata == int8.Int8Weight.of(weight).codes).float().mean()
    # A row's scale is its largest magnitude over 127 here, over (127 + 128) / 2 in torchao's quant_primitives.py.
    print(f"int8 codes equal to torchao's: {same:.0%}; its scales are a little smaller")

# %% [markdown]
# ## 8. How fast can tokens come?
#
# To write one token for one reader, a GPU reads every weight once, and does two operations with each: at 16 bits, one
# operation a byte. An A100 can do 150 for each byte that it reads. So it waits for its memory, and **bandwidth over
# bytes bounds the rate**. Beside it, what gpt-fast published for one A100:

# %%
NAMES = {"Llama-2-7B": "llama-2-7b", "Llama-2-70B": "llama-2-70b",
         "Llama-3.1-8B": "llama-3-8b", "Llama-3.1-70B": "llama-3-70b"}


def served_as(row):
    group = int(row["group"]) if row["group"] else None
    return Serving(model=NAMES[row["model"]], bits=int(row["bits"]), group=group)

# %%
rates = table("gpt_fast_decode")
alone = [row for row in rates if row["gpus"] == "1"]
bound = [served_as(row).tokens_per_second("A100-80GB") for row in alone]
published = [float(row["tokens_per_second"]) for row in alone]
show(draw_decoding([f"{row['model']}, {row['bits']} bits" for row in alone], bound, published),
     alt="The bound on tokens per second from bytes, and published rates of gpt-fast, on an A100.")
at_most = served_as(alone[4]).tokens_per_second("A100-80GB")
print(f"your bet {my_bet_tokens_per_second}; Llama-2-70B in 4 bits: at most {at_most:.0f} (predicted), {published[4]:.0f} (published)")

# %% [markdown]
# **Read it.** A third of the bytes (gpt-fast's four bits have a scale and a zero for each 32) is not three times the
# speed: the share of the bound falls with the bits. What else
# does a token pay? Suppose that a token takes *bytes that a GPU reads x $\beta$ + layers x $\lambda$* seconds. Find the two
# numbers from the 16-bit rows, four models on one to eight GPUs, by least squares of the relative error. Then predict
# the rows in few bits, which took no part.

# %%
def bytes_and_layers(row):
    serving = served_as(row)
    split = serving.linear_bytes - serving.head_bytes  # gpt-fast keeps the head whole on each GPU
    return [split / int(row["gpus"]) + serving.head_bytes, serving.shape.layers]


def published_rate(row):
    return float(row["tokens_per_second"])

# %%
sixteen = [row for row in rates if row["bits"] == "16"]
# Each row is divided by its seconds, so that all rows should give 1.
per_second = [[part * published_rate(row) for part in bytes_and_layers(row)] for row in sixteen]
ones = torch.ones(len(sixteen), 1, dtype=torch.float64)
beta, layer_seconds = torch.linalg.lstsq(torch.tensor(per_second, dtype=torch.float64), ones).solution.flatten().tolist()
print(f"{1e-12 / beta:.2f} TB/s and {1e6 * layer_seconds:.0f} microseconds a layer, from {len(sixteen)} rows in 16 bits")

# %%
def predicted_rate(row):
    read_bytes, layers = bytes_and_layers(row)
    return 1 / (beta * read_bytes + layer_seconds * layers)


found = pd.DataFrame({"row": f"{row['model']} on {row['gpus']} GPUs", "bits": int(row["bits"]),
                      "too fast by, %": 100 * (predicted_rate(row) / published_rate(row) - 1)} for row in rates)
print("published:", source("gpt_fast_decode").partition(": 8 x")[2].partition(";")[0], "(gpt-fast; 16-bit rows are in sample)")
off = found[found["bits"] == 16].set_index("row")["too fast by, %"].abs().nlargest(2)
print("farthest off in 16 bits:", ", ".join(f"{row} by {percent:.0f}%" for row, percent in off.items()))
found.groupby("bits")["too fast by, %"].agg(["count", "min", "max", "mean"]).round(0).astype(int)

# %% [markdown]
# **Read it.** The table says by how many percent the prediction is too fast. In sample the two numbers serve all rows but
# the worst, printed above it, to a few percent. The bandwidth found, $1 / \beta$, is a good three quarters of the data
# sheet's 2.04 TB/s, on cards limited to 330 W. A layer costs tens of microseconds: launches, attention, norms, and between GPUs
# the all-reduce. All rows in few bits are predicted too fast, those in 4 bits most on average. What the two numbers leave out may be
# *unpacking*. (The course has no rates of its own: these are published.)
#
# With a **batch** the weights are read once for all readers, so tokens per second grow with it, until the cache
# takes over, or, with short contexts, arithmetic.

# %% tags=["nbval-check-output"]
for bits, group in ((16, None), (8, None), (4, 128)):
    s = Serving(model="llama-2-7b", bits=bits, group=group)
    rates_of = [f"{s.tokens_per_second('A100-80GB', batch, 2048):>6.0f}" for batch in (1, 8, 32)]
    print(f"7B, {bits:>2} bits, context 2,048: at most {', '.join(rates_of)} tokens/s at batch 1, 8, 32;",
          f"without a cache arithmetic takes over at batch {s.arithmetic_batch('A100-80GB'):.0f} (predicted)")

# %% [markdown]
# **Question.** A batch is so large that the cache is all that is read. By what factor do tokens per second grow when
# the weights go from 16 bits to 4?

# %%
factor = ...
check("08.large_batch", factor)

# %% [markdown]
# ## 9. For inference, for training
#
# | you want to | take | costs | does not help |
# |---|---|---|---|
# | serve on one card | 4 bits by GPTQ or AWQ, calibrated on your own kind of text | below 1% of perplexity here | long contexts: the cache stays |
# | serve many readers | 8 bits or fp8, a paged cache | a kernel for the format | still fewer bits, much |
# | fit at any price | 3 bits, more for some layers (lab) | 0.5 to 2% of perplexity here, 95% for OPT-125M (published) | 2 bits by rounding to nearest |
# | fine-tune on one card | NF4 under adapters (lesson 06); peft trains on GPTQ bases too | a slower step | activations |
# | train from the start | bf16, or fp8 where the card has it | | any of these |
#
# **Quantization-aware training** rounds in forward and lets the gradient pass as if it had not, so that weights learn to
# stand on the grid. torchao has it (`torchao.quantization.qat`). bitsandbytes is *not* that: it stores frozen weights, or
# an optimizer's state, in few bits.

# %%
for name in ("fp16", "int8", "GPTQ-4", "GPTQ-3"):
    score("08", f"28 matrices, {name}, stored", peak_bytes=int(frame.loc[name, "bytes"]))
scoreboard("08")

# %% [markdown]
# ## Break it, diagnose it
#
# A colleague calibrates GPTQ at 2 bits on a hex dump. The report shows half the usual error, but the model is worse than
# one that was rounded without any text. Why?

# %%
digits = torch.tensor([ord(c) for c in "0123456789ABCDEF"])
hex_dump = digits[torch.randint(0, 16, (32, 128), generator=torch.Generator().manual_seed(0))]
print(f"nearest, no text: perplexity {frame.loc['nearest-2', 'perplexity']:.2f}")
for name, text in {"Python sources": calibration_tokens(), "a hex dump": hex_dump}.items():
    few = copy.deepcopy(model)
    made = quantize_weights(few, text, METHODS["GPTQ-2"])
    reported = sum(row.relative_error for row in made) / len(made)
    print(f"GPTQ, calibrated on {name:<14}: reported error {reported:.1%}, perplexity {loss_in(few)[0]:.2f}")

# %% [markdown]
# **Diagnose it.** The reported error is that on the calibration text itself. Sixteen bytes give few different inputs.
# The errors are made to cancel on these, and on nothing else. Measure on text that the model will read.
#
# ## Recap
#
# - A served model is weights and cache; few bits shrink the weights, grouped queries and pages the cache.
# - What counts is the error of the output. GPTQ makes errors cancel, AWQ protects large channels.
# - Eight bits cost next to nothing, four little, two much; of one family, small models lose more.
# - Bytes over bandwidth bound the rate at small batches; layers and unpacking cost extra.
#
# ### Test yourself
#
# A card reads 2 TB/s. What is the most that it can write for one reader with 35 GB of weights, and what comes first to
# mind for eight readers with long contexts?
#
# <details><summary>Answer</summary>
#
# 2,000 / 35, so 57 tokens per second, less what layers and unpacking cost. With eight readers the weights are read once
# for all; look at the cache: its dtype, its pages, grouped queries.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/intermediate/08_smaller_weights.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/intermediate/08_smaller_weights.ipynb). Next: [lesson 09](09_sharding.ipynb). The words
# stand in the [glossary](../00_glossary.ipynb).
#
# **References.** Dettmers and others, *LLM.int8()*, [arXiv:2208.07339](https://arxiv.org/abs/2208.07339). Frantar and others,
# *GPTQ*, [arXiv:2210.17323](https://arxiv.org/abs/2210.17323). Lin and others, *AWQ*,
# [arXiv:2306.00978](https://arxiv.org/abs/2306.00978). Kwon and others, *PagedAttention*,
# [arXiv:2309.06180](https://arxiv.org/abs/2309.06180). Pope and others, *Efficiently Scaling Transformer Inference*,
# [arXiv:2211.05102](https://arxiv.org/abs/2211.05102). [gpt-fast](https://github.com/meta-pytorch/gpt-fast).
