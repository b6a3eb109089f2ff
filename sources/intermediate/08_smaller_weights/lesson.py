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
# **Promise.** How few bits can the weights of a trained model take, and what does each bit cost? You round one to 8, 4, 3
# and 2 bits, by methods that you write yourself, and measure what it loses, and see what it buys on a card.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 70 for the lab | any laptop | less than a minute of computing on two CPU cores |
#
# ## A bet
#
# A small Llama has learned to continue Python's sources. All 28 matrices of its blocks are rounded to 4 bits a weight,
# scales counted apart. By how many *percent* does its perplexity per byte grow, on text that it has never seen? Section 4 measures.

# %%
my_bet_percent = 10

# %% tags=["setup"]
here = setup("intermediate/08")

# %% jupyter={"source_hidden": true}
import copy
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file, save_file

from utils import check, device, format_bytes, score, scoreboard, scratch, show
from utils.techniques import nf4
from utils.techniques.bitsandbytes_import import bitsandbytes_problem
from utils.lessons.lesson_08 import int8
from utils.lessons.lesson_08.awq import awq, clipped_to_nearest
from utils.lessons.lesson_08.bytes_llama import bytes_llama, made_by, sequence_losses
from utils.lessons.lesson_08.figures import draw_context_memory, draw_decoding, draw_error_by_bits, draw_price
from utils.lessons.lesson_08.gptq import gptq
from utils.lessons.lesson_08.inference import Serving, paged_tokens
from utils.lessons.lesson_08.library_text import calibration_tokens, held_out_sequences
from utils.lessons.lesson_08.outlier import with_outlier
from utils.lessons.lesson_08.packed_linear import pack_linears
from utils.lessons.lesson_08.rounding import output_error, round_to_nearest
from utils.lessons.lesson_08.weight_only import inputs_of, linears_of, quantize_weights
from evidence.validation.tables import source, table

# %% [markdown]
# ## 1. What a served model holds
#
# **Weights**, and the **cache of keys and values**: each token leaves a key and a value in every layer, so that later tokens
# need not compute them again. That is $2 \times \text{layers} \times \text{key-value heads} \times \text{head width}$ numbers.
#
# `Serving` adds up these formulas for published shapes. "4 bits" are 4.625 with scales, this lesson's format, here for the
# head too (section 4 leaves the head alone). Eight sequences at a time (new words: [glossary](../00_glossary.ipynb)):

# %%
MODELS = ("llama-2-7b", "llama-2-70b")
FOUR = 4 + (16 + 4) / 32  # this lesson's format: 32 weights share a scale of 16 bits and a zero point of 4
served = {f"{name}, {label}": Serving(model=name, bits=bits)
          for name in MODELS for label, bits in (("16 bits", 16), ("4 bits", FOUR))}
cards = {name: device(name).memory_bytes for name in ("RTX-4090", "A100-80GB", "H200")}
contexts = [2**power for power in range(9, 16)]
memory = {name: {c: s.memory_bytes(8, c) for c in contexts} for name, s in served.items()}
show(draw_context_memory(memory, cards, title="Eight sequences, weights and a cache of 16 bits\n4 bits: groups of 32, head included"),
     alt="Memory over context for Llama-2 7B and 70B in 16 and 4 bits, with the memory of three cards.")

# %% tags=["nbval-check-output"]
rows = [{"model": name, "weights": format_bytes(s.weight_bytes), "cache of a token": format_bytes(s.cache_bytes_per_token),
         **{f"tokens beside them at most, {card}": f"{s.cache_tokens(room):,}" for card, room in cards.items()}}
        for name, s in served.items()]
pd.DataFrame(rows).set_index("model").T

# %% [markdown]
# **Read it.** To the left weights decide, to the right the cache does. The table is an upper bound, of all sequences together:
# a server also needs activations, workspace and the driver's memory, so 70B in 16 bits leaves an H200 little to
# count on. (Llama-2 was trained on 4,096 tokens; beyond them, the shape alone.)
#
# A token of the larger model leaves *less* cache: Llama-2-7B keeps keys and values of all its 32 heads; in Llama-2-70B 64
# heads share 8. That is **grouped-query attention**.
#
# **Question.** How many KiB would one token of Llama-2-70B leave *without* grouped queries?

# %%
ungrouped_kib = ...
check("08.ungrouped_kib", ungrouped_kib)

# %% [markdown]
# A **paged cache** gives out blocks of 16 tokens as they are needed, and loses less than one block a sequence ([Kwon and others 2023](https://arxiv.org/abs/2309.06180)):

# %%
lengths = [20, 300, 700]
print(f"{sum(lengths):,} tokens: {paged_tokens(lengths):,} in pages, {3 * 2048:,} where the longest possible answer is reserved")

# %% [markdown]
# ## 2. Round to nearest
#
# Ours is a Llama of 0.9 million parameters, trained to continue sources of
# Python's standard library, byte by byte. Its **perplexity** is $e$ to the mean loss per *byte*, on six modules that it
# has never seen. A token of a large model is about four bytes, and perplexity multiplies: 1% more per byte is 4% per
# four bytes.

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
# Take one layer apart, the gate of the second block. `inputs_of` notes what comes in while the model reads a
# **calibration text**.

# %%
PATH, GROUP = "blocks.1.feedforward.gate", 32
gate = model.get_submodule(PATH)
with inputs_of({PATH: gate}) as seen, torch.no_grad():
    model(calibration_tokens())
weight, inputs = gate.weight.detach(), seen[PATH]
print(f"weight {tuple(weight.shape)}; {inputs.rows:,} inputs seen")

# %% [markdown]
# **Rounding.** A **group** of neighbours in a row, 32 here, shares a scale and a zero point, the code that stands for 0. With $b$ bits
# there are $2^b$ places on its grid; each weight takes the nearest. The scale is kept in 16 bits.

# %%
def grid_of(part, bits):
    low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    return scale, torch.round(-low / scale)


def on_grid(part, bits, scale, zero):
    codes = (torch.round(part / scale) + zero).clamp(0, 2**bits - 1)
    return scale * (codes - zero)


def nearest(weight, bits, group=GROUP):
    parts = weight.split(group, dim=1)
    return torch.cat([on_grid(part, bits, *grid_of(part, bits)) for part in parts], dim=1)


def error_of(stored):
    return output_error(weight, stored, inputs.moments)

# %%
for bits in (8, 4, 3, 2):
    print(f"{bits} bits: the layer's output is off by {error_of(nearest(weight, bits)):.2%}")

# %% [markdown]
# **The error that counts** is that of $Wx$, for the $x$ that really come. For a rounded $Q$ it takes no more of them
# than $H = \sum x x^T$ (`moments`), since $\sum |(W-Q)x|^2 = \operatorname{tr}\,(W-Q)\,H\,(W-Q)^T$. Two methods
# lower it with the same bits, or nearly.
#
# ## 3. Two methods that look at the inputs
#
# ### GPTQ: the columns to come make up for the error
#
# Round the first column: the output is off. Move the columns that are still free so that it is as right as it can be,
# round the second, and so on
# ([Frantar and others 2022](https://arxiv.org/abs/2210.17323)). The error is quadratic, so the best move is known:
# $-e\,U_{q,\text{later}}/U_{qq}$, with $e$ the weight less its rounded value and $U$ the upper Cholesky factor of
# $H^{-1}$. Two inputs of equal size and correlation 0.9: where rounding took 0.3 from the first weight, the second grows by
# $0.9 \times 0.3 = 0.27$, since its input mostly moves along. (*Damping* of $H$'s diagonal: so that the inverse exists.)

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
# **Read it.** The weights are *farther* off than before, and the output's error is halved, on the very inputs that GPTQ was
# fitted to. It does not make the errors small, it makes them cancel.
#
# **Question.** Suppose the layer's inputs have nothing to do with each other: $H$ is diagonal. By how many percent
# does GPTQ lower the error of rounding to nearest?

# %%
gain_percent = ...
check("08.independent_inputs", gain_percent)

# %% [markdown]
# ### AWQ: widen what is multiplied by much
#
# A column with a ten times larger input does ten times the harm. AWQ multiplies such columns by
# $s > 1$ before rounding and divides their input by $s$ ([Lin and others 2023](https://arxiv.org/abs/2306.00978)).
# $s$ is the input's mean magnitude to a power, and twenty powers are tried. The authors also search how far each
# group's grid reaches: **clipping** the largest weights makes all steps smaller. `awq` does both. "Clipped", below, is
# rounding to nearest with that search alone.

# %%
def awq_by_hand(weight, inputs, bits):
    """The least error of the output over twenty powers, and its power: no clipping."""
    tried = []
    for power in torch.arange(20) / 20:
        scales = inputs.magnitudes**power
        scales = scales / (scales.max() * scales.min()).sqrt()
        stored = nearest(weight * scales, bits) / scales
        tried.append((output_error(weight, stored, inputs.moments), power.item()))
    return min(tried)

# %%
error, power = awq_by_hand(weight, inputs, 4)
share = inputs.magnitudes.max() / inputs.magnitudes.median()
print(f"4 bits: nearest {error_of(nearest(weight, 4)):.2%}, AWQ {error:.2%} at power {power:.2f}")
print(f"the largest input channel is {share:.1f} times the median one")

# %% [markdown]
# **Read it.** No input channel of this layer stands out, so there is little to protect. Section 4 plants one.
#
# Now error against bits. Each method fits to three other draws of calibration text, and `error_of` measures on the first,
# which it has *not* seen.

# %%
def inputs_on(seed):
    with inputs_of({PATH: gate}) as found, torch.no_grad():
        model(calibration_tokens(seed=seed))
    return found[PATH]


ROUNDED_BY = {
    "nearest, no text": lambda x, bits, group: round_to_nearest(weight, bits, group),
    "clipped": lambda x, bits, group: clipped_to_nearest(weight, x.moments, bits, group),
    "AWQ": lambda x, bits, group: awq(weight, x.moments, x.magnitudes, bits, group),
    "GPTQ": lambda x, bits, group: gptq(weight, x.moments, bits, group)}
texts = [inputs_on(seed) for seed in (10, 11, 12)]
errors = {name: {bits: [error_of(rounded_by(text, bits, GROUP).weight()) for text in texts] for bits in (2, 3, 4)}
          for name, rounded_by in ROUNDED_BY.items()}
show(draw_error_by_bits(errors, device="the CPU", title="One layer, groups of 32: error on inputs that no method was fitted to"),
     alt="Relative error of a layer's output over 2, 3 and 4 bits by four methods: falling lines, GPTQ lowest.")
pd.DataFrame({name: {b: sorted(found)[1] for b, found in rows.items()} for name, rows in errors.items()}).style.format("{:.2%}")

# %% [markdown]
# **Read it.** The step of a grid is its reach over $2^b - 1$: from 4 bits to 3 it grows 2.14 times, from 3 to 2 it grows 2.33
# times. Rounding to nearest follows: 2.1 times, then 2.4. GPTQ's error is the lowest at each width. AWQ lies on "clipped": its lead is clipping.
#
# ### Eight bits, and the channels that spoil them
#
# **Absmax** divides a row by its largest magnitude. Inputs, too, can then be whole numbers. But models of billions of
# parameters grow a few input channels that are far larger than all others, and these take the whole scale of a token's row $x$. `LLM.int8()` keeps channels that reach 6 out of the product of whole
# numbers: it takes 16 bits for them (fp32 here)
# ([Dettmers and others 2022](https://arxiv.org/abs/2208.07339)). Ours has none. So `with_outlier` plants one and leaves the
# model's function as it is: each norm makes channel 7 thirty times as large, and what reads it divides its weights.

# %%
def eight_bits(rows):
    scales = rows.abs().amax(dim=1)
    return torch.round(rows * (127 / scales)[:, None]).to(torch.int8), scales / 127


def int8_product(x, w):
    (x_codes, x_scales), (w_codes, w_scales) = eight_bits(x), eight_bits(w)  # fp32 is exact: sums stay below 2**24
    return (x_codes.float() @ w_codes.float().T) * torch.outer(x_scales, w_scales)


def split_product(x, w, threshold=6.0):
    large = (x.abs() >= threshold).any(dim=0)
    return int8_product(x[:, ~large], w[:, ~large]) + x[:, large] @ w[:, large].T

# %%
grown, off = with_outlier(model), {}
same = (sequence_losses(grown, held_out) - plain_losses).abs().max()
assert same < 1e-4, "the planted channel must change nothing before rounding"
for name, arm in {"as trained": model, "one outlier": grown}.items():
    layer, rows = arm.get_submodule(PATH), []
    keep = layer.register_forward_pre_hook(lambda _, args: rows.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        arm(calibration_tokens())
    keep.remove()
    x, w = rows[0], layer.weight.detach()
    off[name] = [((y - x @ w.T).norm() / (x @ w.T).norm()).item() for y in (int8_product(x, w), split_product(x, w))]
    print(f"{name:<12} channels that reach 6: {(x.abs() >= 6).any(0).sum()}; all in int8: off by {off[name][0]:.2%}; LLM.int8()'s split: {off[name][1]:.2%}")

# %% [markdown]
# **Read it.** One channel in 128 spoils the product; the split keeps it out. (In the next table int8 is a format of *weights*
# alone.)
#
# ## 4. The whole model
#
# All 28 matrices of the four blocks, by each method; embedding, norms and head stay. `quantize_weights` goes block by
# block: each is calibrated on what the *rounded* blocks before it give. NF4 is lesson 06's grid, in blocks of 64.

# %%
class Sixteen:
    """What the others are compared with."""

    def __init__(self, weight):
        self.half, self.stored_bytes = weight.half(), 2 * weight.numel()

    def weight(self):
        return self.half.float()


METHODS = {"fp16": lambda w, x: Sixteen(w), "int8": lambda w, x: int8.Int8Weight.of(w),
           "NF4": lambda w, x: nf4.Nf4Weight.of(w)}
for b in (4, 3, 2):
    METHODS[f"nearest-{b}"] = lambda w, x, b=b: round_to_nearest(w, b, GROUP)
    METHODS[f"clipped-{b}"] = lambda w, x, b=b: clipped_to_nearest(w, x.moments, b, GROUP)
    METHODS[f"AWQ-{b}"] = lambda w, x, b=b: awq(w, x.moments, x.magnitudes, b, GROUP)
    METHODS[f"GPTQ-{b}"] = lambda w, x, b=b: gptq(w, x.moments, b, GROUP)

# %%
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
frame["four bytes %"] = 100 * ((1 + frame["change %"] / 100) ** 4 - 1)
display(frame.style.format({"perplexity": "{:.3f}", "change %": "{:+.2f}", "standard error": "{:.2f}", "bytes": "{:,.0f}",
                            "bits a weight": "{:.2f}", "mean error": "{:.2%}", "four bytes %": "{:+.2f}"}).set_caption("28 matrices (measured)"))
print(f"your bet {my_bet_percent}%; GPTQ at 4 bits {frame.loc['GPTQ-4', 'change %']:+.2f}%, nearest {frame.loc['nearest-4', 'change %']:+.2f}%")

# %%
price = {way: [tuple(frame.loc[f"{way}-{b}", ["bits a weight", "change %", "standard error"]]) for b in (2, 3, 4)]
         for way in ("nearest", "clipped", "AWQ", "GPTQ")}
show(draw_price(price, device="the CPU", title="28 matrices of a Llama of 0.9 million parameters, groups of 32"),
     alt="Growth of perplexity per byte over stored bits a weight, by four methods: below one percent at 4 bits, steeply more at 2.")

# %% [markdown]
# **Read it.** On text that neither training nor calibration saw; the standard error is that of the change, over this text.
# Eight bits cost nothing that can be seen. Four cost 0.59% a byte by rounding to nearest, 2.4% over four bytes; GPTQ takes
# 0.12% a byte. The knee is at three bits: 1.75% and 0.82%; with two bits left it is 12.77% and 6.82%.
#
# AWQ-4 and nearest-4 differ by less than either's standard error. (The mean error is taken on the calibration text itself.) Now the model with the planted channel, the same model before rounding:

# %%
for name in ("nearest-4", "clipped-4", "AWQ-4", "GPTQ-4"):
    _, change, spread = loss_in(rounded(name, model=grown)[0])
    print(f"{name:<10} as trained {frame.loc[name, 'change %']:+.2f}%, with an outlier {change:+.2f}% (standard error {spread:.2f})")

# %% [markdown]
# **Read it.** Rounding to nearest pays about twice as much, AWQ and GPTQ do not: AWQ widens the channel's weights again before
# rounding; in GPTQ the other columns make up for its error. "Clipped" pays like nearest: the scales do it. Now wider groups, and another
# calibration text:

# %%
def priced(name, group=32, seed=1):
    few = copy.deepcopy(model)
    method = {"nearest-4": lambda w, x: round_to_nearest(w, 4, group), "GPTQ-4": lambda w, x: gptq(w, x.moments, 4, group)}[name]
    made = quantize_weights(few, calibration_tokens(seed=seed), method)
    return 8 * sum(row.made.stored_bytes for row in made) / matrices, *loss_in(few)[1:]


for name, group, seed in (("nearest-4", 128, 1), ("GPTQ-4", 128, 1), ("GPTQ-4", 32, 2)):
    bits, change, spread = priced(name, group, seed)
    print(f"{name:<9} group {group:>3}, calibration text {seed}: {bits:.2f} bits, {change:+.2f}% (standard error {spread:.2f})")

# %% [markdown]
# The group of 128 is hardly dearer here, and stores 4.16 bits.
#
# And `LLM.int8()`, whose inputs are whole numbers too, in all 28 matrices:

# %%
for name, arm in {"as trained": model, "one outlier": grown}.items():
    for product in (int8_product, split_product):
        hooks = [layer.register_forward_hook(lambda m, x, _, by=product: by(x[0].flatten(0, -2), m.weight).view(*x[0].shape[:-1], -1))
                 for layer in linears_of(arm.blocks).values()]
        _, change, spread = loss_in(arm)
        print(f"{name:<12} {product.__name__:<14} {change:+.2f}% (standard error {spread:.2f})")
        for hook in hooks:
            hook.remove()

# %% [markdown]
# ### Kept in few bits
#
# A `PackedLinear` keeps the *codes*, without gaps, and writes its weight out anew in each forward; a server's kernel unpacks
# while it multiplies. Embedding, norms and head stay in fp32.

# %%
few, made = rounded("GPTQ-4")
small = pack_linears(copy.deepcopy(few), {row.layer: row.made for row in made})
with scratch("lesson-08") as folder:
    save_file(small.state_dict(), file := Path(folder) / "gptq-4.safetensors")
    size = file.stat().st_size
    for kept in small.state_dict().values():
        kept.zero_()  # so that all that is right below comes from the file
    small.load_state_dict(load_file(file))
stored = sum(b.nbytes for path, b in small.blocks.named_buffers())
print(f"in the file {format_bytes(size)}; the matrices {format_bytes(stored)} (measured), {format_bytes(frame.loc['GPTQ-4', 'bytes'])} (predicted)")
assert stored == frame.loc["GPTQ-4", "bytes"], "what is kept is what the format takes"
torch.testing.assert_close(sequence_losses(small, held_out[:32]), sequence_losses(few, held_out[:32]), atol=1e-4, rtol=0)

# %% [markdown]
# ### The libraries
#
# | format | home today |
# |---|---|
# | int8, LLM.int8(), NF4 | bitsandbytes |
# | int8, int4, fp8, of weights only or of activations too | torchao |
# | GPTQ | GPTQModel, llm-compressor |
# | AWQ | llm-compressor, GPTQModel |
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

# %% [markdown]
# ## 5. What it buys: how fast can tokens come?
#
# For one token of one reader, a GPU reads every weight once, and does two operations with each. It waits for its memory: **bandwidth over bytes bounds the rate**. Beside it, what gpt-fast published for one A100:

# %%
NAMES = {"Llama-2-7B": "llama-2-7b", "Llama-2-70B": "llama-2-70b",
         "Llama-3.1-8B": "llama-3-8b", "Llama-3.1-70B": "llama-3-70b"}


def served_as(row):
    group = int(row["group"]) if row["group"] else None
    return Serving(model=NAMES[row["model"]], bits=int(row["bits"]), group=group)


rates = table("gpt_fast_decode")
alone = [row for row in rates if row["gpus"] == "1"]
bound = [served_as(row).tokens_per_second("A100-80GB") for row in alone]
published = [float(row["tokens_per_second"]) for row in alone]
show(draw_decoding([f"{row['model']}, {row['bits']} bits" for row in alone], bound, published,
                   title="One sequence on an A100-80GB: share of the bound"),
     alt="The bound on tokens per second from bytes, and published rates of gpt-fast, on an A100.")
print("published:", source("gpt_fast_decode").partition(": 8 x")[2].partition(";")[0], "(gpt-fast)")

# %% [markdown]
# **Read it.** A third of the bytes (gpt-fast's four bits have a scale and a zero of 16 bits for each 32) is not three times
# the speed: the share of the bound, in percent, falls with the bits.
#
# With a **batch** the weights are read once for all readers, so tokens per second grow with it, until the cache is most of what is read or,
# with short contexts, the arithmetic takes longer than the reading. The second comes at:

# %%
for label, kept in served.items():
    if "7b" in label:
        print(f"{label}: {kept.arithmetic_batch('A100-80GB'):.0f} sequences, products in bf16 at an A100's peak (predicted)")

# %% [markdown]
# Beyond it, a format helps in which the card *multiplies* faster, such as fp8.
#
# **Question.** A batch is so large that the cache is all that is read. By what factor do tokens per second grow when
# the weights go from 16 bits to 4?

# %%
factor = ...
check("08.large_batch", factor)

# %% [markdown]
# ### For inference
#
# | you want to | take | costs | does not help |
# |---|---|---|---|
# | serve on one card | 4 bits by GPTQ or AWQ, calibrated on your own kind of text | see section 4, per byte and per four bytes | long contexts: the cache stays |
# | serve many readers | 8 bits or fp8, a paged cache | a kernel for the format | fewer bits, for speed, where the cache is what is read; they do make room |
# | fit at any price | 3 bits, more for some layers (lab) | see section 4 | 2 bits by rounding to nearest |

# %%
for name in ("fp16", "int8", "GPTQ-4", "GPTQ-3"):
    score("08", f"28 matrices, {name}, stored", peak_bytes=int(frame.loc[name, "bytes"]))
scoreboard("08")

# %% [markdown]
# ## Break it, diagnose it
#
# A colleague calibrates GPTQ at 2 bits on a hex dump. The report shows half the usual error, but the model is worse than
# without any text. Why?

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
# **Diagnose it.** The reported error is that on the calibration text itself, where the errors were made to cancel. Measure on text that the model will read.
#
# ## Recap
#
# - What counts is the error of the output. GPTQ makes errors cancel, AWQ widens what large channels multiply.
# - Eight bits cost next to nothing, four little, two much; by how much is for your model, your text and your group to say.
# - Bytes over bandwidth bound the rate at small batches: 35 GB at 2 TB/s is at most 57 tokens per second.
#
# **Next** the [lab](../../labs/intermediate/08_smaller_weights.ipynb), its
# [solution](../../solutions/intermediate/08_smaller_weights.ipynb), and [lesson 09](09_sharding.ipynb).
#
# **References.** The papers stand where they are used; [gpt-fast](https://github.com/meta-pytorch/gpt-fast).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch: first ask what it would cost.** `model` is yours, `batch` some hundred texts of those it will *read*
# (by eight, chance decides), `loss_of(model, batch)` its loss. It is rounded in place, so load it again after.
#
# ```python
# import torch
#
# bits, group, done = 4, 32, 0
# model.eval()  # no dropout in either arm
# with torch.no_grad():
#     before = loss_of(model, batch)
#     for name, layer in model.named_modules():
#         if isinstance(layer, torch.nn.Linear) and layer.in_features % group == 0 and not name.endswith("head"):
#             parts = layer.weight.float().view(-1, group)
#             low, high = parts.amin(1, keepdim=True).clamp(max=0), parts.amax(1, keepdim=True).clamp(min=0)
#             scale = ((high - low) / (2**bits - 1)).clamp(min=1e-6)
#             zero = (-low / scale).round()
#             codes = ((parts / scale).round() + zero).clamp(0, 2**bits - 1)
#             layer.weight.copy_((scale * (codes - zero)).view_as(layer.weight))
#             done += layer.weight.numel()
#     cost = loss_of(model, batch) - before
# share = done / sum(p.numel() for p in model.parameters())
# print(f"{bits} bits for {share:.0%} of the weights: perplexity {100 * cost.expm1():+.2f}%")
# ```
#
# A small share: the other matrices are no `nn.Linear` (GPT-2's `Conv1D`, fused experts).
#
# **transformers, bitsandbytes.** Eight bits by LLM.int8(), while the weights load. `model_name` is a folder or a name on the Hub:
#
# ```python
# import torch
# from transformers import AutoModelForCausalLM, BitsAndBytesConfig
#
# model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float16,
#                                              quantization_config=BitsAndBytesConfig(load_in_8bit=True))
# print(f"{model.get_memory_footprint() / 1e9:.2f} GB")
# ```
#
# Four bits on a GPU: `GPTQModel.load(name, QuantizeConfig(bits=4, group_size=32))`, `.quantize(texts)`, `.save(folder)`,
# `vllm serve folder`. **Look at** the perplexity on text that nothing was fitted to, and at the footprint: in eight bits, half of
# 16 and a little more, as embedding and head stay.
