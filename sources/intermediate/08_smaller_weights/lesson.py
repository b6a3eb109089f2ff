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
# **Promise.** You round a small trained model to 4, 3 and 2 bits, to nearest and by GPTQ, both written out here, and see what that costs.
# Then you decide what to narrow when you serve Llama-2: weights, the cache, or both.
#
# **The verdict**, predicted: narrowing both, to 4-bit weights and an 8-bit cache, leaves the fewest bytes to keep, and to read for a token. If
# you narrow one, 4-bit weights save more up to 36,574 cached tokens in Llama-2-7B, an 8-bit cache above; in the 70B, by tokens that fit, always.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 70 for the lab | any laptop | less than a minute on two CPU cores |
#
# ## A bet
#
# A small Llama has learned to continue Python's sources. All 28 matrices of its blocks are rounded to nearest, with codes of 4 bits.
# By how many *percent* does its perplexity per byte grow, on modules that it has never seen?

# %%
my_bet_percent = 10

# %% tags=["setup"]
here = setup("intermediate/08")

# %% jupyter={"source_hidden": true}
import copy

import pandas as pd
import torch

from utils import GIB, Evidence, check, device, format_bytes, show
from utils.models.transformer import attend
from utils.techniques.bitsandbytes_import import bitsandbytes_problem
from utils.lessons.lesson_08 import published
from utils.lessons.lesson_08.awq import awq
from utils.lessons.lesson_08.bytes_llama import bytes_llama, made_by, sequence_losses
from utils.lessons.lesson_08.figures import draw_context_memory, draw_decoding, draw_error_by_bits, draw_grid, draw_inputs, draw_price, draw_rates
from utils.lessons.lesson_08.inference import Serving, crossing_tokens
from utils.lessons.lesson_08.int8 import multiplied_by
from utils.lessons.lesson_08.library_text import calibration_tokens, held_out_sequences
from utils.lessons.lesson_08.methods import methods
from utils.lessons.lesson_08.outlier import stands_out, with_outlier
from utils.lessons.lesson_08.packed_linear import pack_linears
from utils.lessons.lesson_08.rounding import output_error
from utils.lessons.lesson_08.weight_only import inputs_of, linears_of, quantize_weights
from evidence.validation.tables import source, table

# %% [markdown]
# ## 1. Round to nearest
#
# A **group** of 32 neighbours in a row shares a **scale**, the step of its grid, kept in 16 bits, and a **zero point**, the code that
# stands for 0. With $b$ bits the grid has $2^b$ places, and each weight takes the nearest. The layer is the *gate*, the first matrix of the
# second block's feed-forward (new words: [glossary](../00_glossary.ipynb)).

# %%
PATH, GROUP = "blocks.1.feedforward.gate", 32
model = bytes_llama()
weight = model.get_submodule(PATH).weight.detach()


def grid_of(part, bits):
    low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).clamp(min=2**-20).half().float()  # a group of zeros has no reach
    return scale, torch.round(-low / scale)


def on_grid(part, bits, scale, zero):
    codes = (torch.round(part / scale) + zero).clamp(0, 2**bits - 1)
    return scale * (codes - zero)


def nearest(weight, bits, group=GROUP):
    parts = weight.split(group, dim=1)
    return torch.cat([on_grid(part, bits, *grid_of(part, bits)) for part in parts], dim=1)

# %%
part = weight[:1, :GROUP]
grids = {bits: tuple(x.item() for x in grid_of(part, bits)) for bits in (4, 2)}
show(draw_grid(part[0].tolist(), grids, title="One group of 32 weights, and where rounding puts them"),
     alt="Thirty-two weights above the 16 places of 4 bits, and above the 4 places of 2 bits; a line joins each to its place.")
for bits, (scale, zero) in grids.items():
    codes = [round(w / scale) + int(zero) for w in part[0, :4].tolist()]
    print(f"{bits} bits: from {part.min():.3f} to {part.max():.3f}, scale {scale:.4f}, zero point {zero:.0f}; "
          f"first four weights {[round(w, 3) for w in part[0, :4].tolist()]} take codes {codes}; "
          f"stored 32 x {bits} + 16 + {bits} bits, {bits + (16 + bits) / GROUP:.3f} a weight")

# %% [markdown]
# Now all 28 matrices. **Perplexity** is $e$ to the mean loss, here of a *byte*. The standard error is that of the mean difference over the
# sequences.

# %%
held_out = held_out_sequences()  # from six modules that the model was not trained on
plain_losses = sequence_losses(model, held_out)


def growth(losses, count=1):
    """Percent by which perplexity grows, over so many bytes, and its standard error: each sequence beside itself."""
    more = count * (losses - plain_losses)
    factor = more.mean().exp()
    return 100 * (factor - 1).item(), 100 * (factor * more.std() / len(more) ** 0.5).item()


print(f"trained for {made_by()['steps']} steps on the {made_by()['text']} (recorded); "
      f"perplexity {plain_losses.mean().exp():.3f} a byte on {held_out[:, 1:].numel():,} unseen bytes (measured)")
for bits in (4, 3, 2):
    few = copy.deepcopy(model)
    for layer in linears_of(few.blocks).values():
        layer.weight.data = nearest(layer.weight.data, bits)
    change, spread = growth(sequence_losses(few, held_out))
    print(f"nearest, {bits} bits: perplexity {change:+.2f}% (standard error {spread:.2f})", f"your bet: {my_bet_percent}%" * (bits == 4))

# %% [markdown]
# ## 2. Two methods that look at the inputs
#
# Rounding a layer changes its outputs $Wx$. Only the sum $H = \sum x x^T$ (`moments`) matters:
# for a rounded $Q$, $\sum |(W-Q)x|^2 = \operatorname{tr}\,(W-Q)\,H\,(W-Q)^T$. `inputs_of` adds it up while the model reads a
# **calibration text**, drawn from its training text. *Unseen text* is from the six modules.

# %%
calibration, unseen_text, both = calibration_tokens(), held_out[:32, :-1], []
for text in (calibration, unseen_text):
    with inputs_of({PATH: model.get_submodule(PATH)}) as seen, torch.no_grad():
        model(text)
    both.append(seen[PATH])
inputs, unseen_inputs = both


def error_of(stored, on=inputs):
    return output_error(weight, stored, on.moments)

# %% [markdown]
# ### GPTQ: the columns to come make up for the error
#
# Round the first column: the output is off. Move the columns that are still free so that it is as right as it can be, round the second,
# and so on ([Frantar and others 2022](https://arxiv.org/abs/2210.17323)). The error is quadratic in the weights, so the best move is known:
# $-e\,U_{q,\text{later}}/U_{qq}$, where $e$ is what rounding took from column $q$, and $U$ the upper triangle with $U^T U = H^{-1}$.
# *Damping*, a little more on $H$'s diagonal, makes sure that the inverse exists.
#
# Two inputs mostly move together. If the first weight loses 0.3, how far should the second go? The first lines answer.

# %%
U = torch.linalg.cholesky(torch.linalg.inv(torch.tensor([[1.0, 0.9], [0.9, 1.0]])), upper=True)
print(f"H = [[1, 0.9], [0.9, 1]]: the second weight moves by {-0.3 * U[0, 1] / U[0, 0]:+.2f}")


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
for name, stored in {"nearest": nearest(weight, 4), "GPTQ": gptq_by_hand(weight, inputs.moments, 4)}.items():
    print(f"4 bits, {name:<7}: weights off by {(stored - weight).norm() / weight.norm():.2%}, "
          f"output by {error_of(stored):.2%}, on unseen text {error_of(stored, unseen_inputs):.2%}")

# %% [markdown]
# **Read it.** GPTQ's weights are *farther* off, and the output's error is about half: errors cancel.
#
# **Question.** Suppose that $H$ is diagonal: no input tells of another. By how many percent does GPTQ lower the error of rounding to nearest?

# %%
gain_percent = ...
check("08.independent_inputs", gain_percent)

# %% [markdown]
# ### AWQ: finer steps for the columns with large inputs
#
# The same error of a weight does ten times the harm where the input is ten times larger
# ([Lin and others 2023](https://arxiv.org/abs/2306.00978)). A group's step is set by its smallest and largest weight. Multiply a column *between*
# them by $s > 1$, and divide its input by $s$: the product is the same, and while the step stays, that column's part of the error is on average
# divided by $s$. Too large an $s$ widens the group's step. So $s$ is the input's mean magnitude to the best of twenty powers. `awq` then
# tries nine narrower ranges for each group: **clipping** the largest weights makes its steps smaller.

# %%
def awq_scales_by_hand(weight, inputs, bits):
    tried = []
    for power in torch.arange(20) / 20:
        scales = inputs.magnitudes**power
        scales = scales / (scales.max() * scales.min()).sqrt()
        tried.append(nearest(weight * scales, bits) / scales)
    return min(tried, key=error_of)


clipped = awq(weight, inputs.moments, inputs.magnitudes, 4, GROUP).weight()
for name, stored in {"nearest": nearest(weight, 4), "AWQ's scales": awq_scales_by_hand(weight, inputs, 4), "and clipping": clipped}.items():
    print(f"4 bits, {name:<12}: output off by {error_of(stored):.2%}, on unseen text {error_of(stored, unseen_inputs):.2%}")
print(f"the largest input channel is {inputs.magnitudes.max() / inputs.magnitudes.median():.1f} times the median one")

# %% [markdown]
# This layer has no **outlier**, an input channel far larger than the others. The three methods over the bits:

# %%
by_bits = {"nearest": lambda bits: nearest(weight, bits),
           "AWQ": lambda bits: awq(weight, inputs.moments, inputs.magnitudes, bits, GROUP).weight(),
           "GPTQ": lambda bits: gptq_by_hand(weight, inputs.moments, bits)}
errors = {name: {bits: [error_of(method(bits), unseen_inputs)] for bits in (2, 3, 4)} for name, method in by_bits.items()}
show(draw_error_by_bits(errors, device="the CPU", title="One layer, groups of 32: error of its output on unseen text"),
     alt="Relative error of one layer's output over 2, 3 and 4 bits by three methods: falling lines, GPTQ lowest.")

# %% [markdown]
# ## 3. The whole model
#
# The blocks are rounded one by one, each matrix with the inputs that the *rounded* blocks before it give; embedding, norms and head
# stay. Nearest and GPTQ are yours; the rest comes from the course's modules, with NF4 (16 uneven places;
# [lesson 06](06_seven_billion.ipynb) trains on it). The **layer error** is section 2's on unseen text, a mean over the 28 matrices.

# %%
@torch.no_grad()
def in_few_bits(method, text=calibration, model=model):
    few, errors = copy.deepcopy(model), []
    for block in few.blocks:
        layers = linears_of(block)
        with inputs_of(layers) as seen:  # what the rounded blocks before it give
            few(text)
        for path, layer in layers.items():
            stored = method(layer.weight, seen[path])
            errors.append(output_error(layer.weight, stored, seen[path].moments))
            layer.weight.copy_(stored)
    return few, sum(errors) / len(errors)  # the model, and the mean error on the calibration text


KEPT = methods(GROUP)
METHODS = {name: lambda w, x, keep=KEPT[name]: keep(w, x).weight() for name in KEPT}
METHODS |= {f"nearest-{b}": lambda w, x, b=b: nearest(w, b) for b in (4, 3, 2)}
METHODS |= {f"GPTQ-{b}": lambda w, x, b=b: gptq_by_hand(w, x.moments, b) for b in (4, 3, 2)}
made = {name: in_few_bits(method)[0] for name, method in METHODS.items()}
losses = {name: sequence_losses(few, held_out) for name, few in made.items()}
layers = linears_of(model.blocks)
with inputs_of(layers) as unseen, torch.no_grad():
    model(unseen_text)

# %%
@torch.no_grad()
def layer_error(few):
    each = [output_error(layers[path].weight, layer.weight, unseen[path].moments) for path, layer in linears_of(few.blocks).items()]
    return sum(each) / len(each)


rows = {name: (100 * layer_error(few), *growth(losses[name]), growth(losses[name], count=4)[0]) for name, few in made.items()}
frame = pd.DataFrame(rows, index=["layer error %", "growth a byte %", "standard error", "growth over four bytes %"]).T
frame.style.format("{:.2f}").set_caption("28 matrices (measured); groups of 32, NF4 in blocks of 64, int8 with a scale a row")

# %% [markdown]
# **Read it.** The layer error is a **proxy** that can fail: NF4's is larger than GPTQ-3's, its perplexity grows by half as much.
#
# Llama-2's perplexity counts a *token*, so ours stands over four bytes beside it. Groups, text and size differ too: read each panel for itself.

# %%
matrices = sum(layer.weight.numel() for layer in layers.values())
scales = 16 * sum(layer.in_features for layer in layers.values()) / matrices  # AWQ's, of columns, in bits a weight
stored = {(way, b): published.stored_bits(b, GROUP) + scales * (way == "AWQ") for way in ("nearest", "GPTQ", "AWQ") for b in (4, 3, 2)}
ours = {way: [(stored[way, b], *growth(losses[f"{way}-{b}"], count=4)) for b in (2, 3, 4)] for way in ("nearest", "GPTQ", "AWQ")}
large = {size: {way: [(published.stored_bits(b), published.growth(size, b, way), 0) for b in (3, 4)] for way in ("nearest", "GPTQ", "AWQ")}
         for size in ("Llama-2-7B", "Llama-2-70B")}
titles = {f"{size}, groups of 128,\na token (published)": rows for size, rows in large.items()}
show(draw_price({"0.9 million, groups of 32,\nfour bytes (measured)": ours} | titles, device="the CPU", kinds=[Evidence.PUBLISHED]),
     alt="Growth of perplexity over stored bits a weight, in our model, Llama-2-7B and Llama-2-70B, by three methods: all lines fall.")
print("published:", published.source())
for bits in (4, 3):
    found = [published.growth(size, bits, way) for size in large for way in published.METHODS]
    print(f"Llama-2-7B and 70B, {bits} bits: perplexity +{min(found):.1f}% to +{max(found):.1f}% (published)")

# %% [markdown]
# **Read it.** At 4 bits GPTQ costs least in ours; in these two Llama-2, measured by AWQ's own authors, AWQ. Newer models are not shown here.
#
# Models of billions of parameters [have outliers](https://arxiv.org/abs/2208.07339). `with_outlier` plants one and leaves the function as it
# is: each block's norms make channel 7 thirty times as large, and what reads it divides its weights. As trained, do any channels stand out?

# %% jupyter={"source_hidden": true}
grown = with_outlier(model)
assert (sequence_losses(grown, held_out) - plain_losses).abs().max() < 1e-4, "the planted channel must change nothing before rounding"
with inputs_of(linears_of(grown.blocks)) as planted, torch.no_grad():
    grown(unseen_text)
gate = PATH.removeprefix("blocks.")
show(draw_inputs({label: (before, stands_out(planted)[label]) for label, before in stands_out(unseen).items()},
                 {"as trained": unseen[gate].magnitudes.tolist(), "channel 7 planted": planted[gate].magnitudes.tolist()}, layer="the gate"),
     alt="The largest input channel over the median one for each kind of matrix, as trained and with channel 7 planted; beside it the gate's 128 channels.")
print("as trained an input reaches 6 in:", ", ".join(path for path, seen in unseen.items() if seen.largest.max() >= 6))

# %%
for name in ("nearest-4", "AWQ-4", "GPTQ-4"):
    few, _ = in_few_bits(METHODS[name], model=grown)
    gone = [(layer.weight[:, 7] == 0).float().mean() for path, layer in linears_of(few.blocks).items() if not path.endswith(("output", "down"))]
    change, spread = growth(sequence_losses(few, held_out))
    print(f"{name:<9} as trained {growth(losses[name])[0]:+.2f}%, channel 7 planted {change:+.2f}% (standard error {spread:.2f}); "
          f"in the {len(gone)} matrices that read it {min(gone):.0%} to {max(gone):.0%} of its weights are exactly 0")

# %% [markdown]
# **Read it.** As trained some inputs of *down* stand out. Rounding to nearest all but deletes the planted channel, and costs nearly twice as much.
# GPTQ deletes it too, and costs no more. AWQ gives it finer steps, but undoes just the way that it was planted: no test of AWQ.
#
# `quantize_weights`, the loop above with the course's GPTQ, keeps the *codes*, and a `PackedLinear` unpacks them before each product.

# %% jupyter={"source_hidden": true}
rows = quantize_weights(copy.deepcopy(model), calibration, KEPT["GPTQ-4"])
small = pack_linears(copy.deepcopy(model), {row.layer: row.made for row in rows})
held = sum(b.nbytes for path, b in small.blocks.named_buffers())
print(f"the matrices take {format_bytes(held)} (measured), {format_bytes(matrices * stored['GPTQ', 4] / 8)} (predicted); "
      f"in fp16 {format_bytes(2 * matrices)} (predicted)")
print(f"perplexity {growth(sequence_losses(small, held_out))[0]:+.2f}% a byte, by your GPTQ {growth(losses['GPTQ-4'])[0]:+.2f}%")

# %% [markdown]
# ## 4. Inputs in 8 bits too
#
# **W8A8** narrows weights and activations. With both in int8 the products are of whole numbers, for which an A100's peak is
# [twice that in bf16](https://www.nvidia.com/en-us/data-center/a100/). **Absmax** divides a row by its largest magnitude, so an outlier sets the
# scale of its token's row. `LLM.int8()` keeps channels that reach 6 out of that product
# ([Dettmers and others 2022](https://arxiv.org/abs/2208.07339)).

# %%
def eight_bits(rows):
    scales = rows.abs().amax(dim=1).clamp(min=1e-30)
    return torch.round(rows * (127 / scales)[:, None]).to(torch.int8), scales / 127


def int8_product(x, w):
    (x_codes, x_scales), (w_codes, w_scales) = eight_bits(x), eight_bits(w)  # fp32 is exact up to 1,040 inputs: sums below 2**24
    return (x_codes.float() @ w_codes.float().T) * torch.outer(x_scales, w_scales)


def split_product(x, w, threshold=6.0):
    large, (codes, scales) = (x.abs() >= threshold).any(dim=0), eight_bits(w)
    return int8_product(x.masked_fill(large, 0), w) + x[:, large] @ (codes * scales[:, None])[:, large].T


PRODUCTS = {"all in int8": int8_product, "split at 6": split_product}
for name, arm in {"as trained": model, "channel 7 planted": grown}.items():
    for how, product in PRODUCTS.items():
        with multiplied_by(product, arm) as found:
            change, spread = growth(sequence_losses(arm, held_out))
        print(f"{name:<17} {how:<11} the gate's output off by {found[PATH]:.2%}, perplexity {change:+.2f}% (standard error {spread:.2f})")

# %% [markdown]
# **Read it.** The planted channel makes the gate's error seven times as large, and the split takes most of that back. Does the
# library split so? Below, channel 7 is 30 in each row.

# %%
if problem := bitsandbytes_problem():
    print(problem)
else:
    import bitsandbytes

    state = bitsandbytes.MatmulLtState()
    state.threshold, state.has_fp16_weights, state.is_training = 6.0, False, False
    w, x = grown.get_submodule(PATH).weight.detach().half(), torch.randn(64, 128)
    x[:, 7] = 30
    state.CB, state.SCB, _ = bitsandbytes.functional.int8_vectorwise_quant(w)
    with torch.no_grad():
        theirs = bitsandbytes.matmul(x.half(), w, state=state).float()
    for how, product in PRODUCTS.items():
        print(f"bitsandbytes' product is {(product(x, w.float()) - theirs).norm() / theirs.norm():.2%} from {how}")

# %% [markdown]
# **Read it.** It does, within 0.2% of ours.
#
# ## 5. What it buys
#
# A served model holds **weights** and the **cache of keys and values**: each token leaves a key and a value in every layer, so that later
# tokens need not compute them again. `Serving` adds up published shapes, with 4 bits in groups of 128 and the head in 16 bits.

# %%
FOUR, CONTEXT = published.stored_bits(4), 4096
CHOICES = {"16 + 16": (16, 2), "16 + 8": (16, 1), "8 + 16": (8, 2), "8 + 8": (8, 1), "4 + 16": (FOUR, 2), "4 + 8": (FOUR, 1)}
MODELS = {"Llama-2-7B": "llama-2-7b", "Llama-2-70B": "llama-2-70b"}
cards = {name: device(name).memory_bytes for name in ("RTX-4090", "A100-80GB", "H200")}


def served(model, choice):
    bits, cache_bytes = CHOICES[choice]
    return Serving(model=MODELS[model], bits=bits, head_bits=16, cache_bytes=cache_bytes)


for name in MODELS:
    s = served(name, "16 + 16")
    print(f"{name}: a key and a value x {s.shape.layers} layers x {s.shape.key_value_heads} key-value heads (of {s.shape.heads} query heads) x "
          f"{s.shape.head_dim} numbers x 2 bytes: {format_bytes(s.cache_bytes_per_token)} a token")
drawn = [choice for choice in CHOICES if choice != "8 + 16"]
lines = {m: {c: {n: served(m, c).memory_bytes(8, n) for n in (0, 16384)} for c in drawn} for m in MODELS}
show(draw_context_memory(lines, cards, title="Eight sequences: bits of weights + bits of cache (predicted)", trained_tokens=CONTEXT,
                         weight_bytes={m: {c: served(m, c).weight_bytes for c in drawn} for m in MODELS}),
     alt="Memory over context for Llama-2 7B and 70B, a line for each of five choices of bits for weights and cache, beside three cards.")

# %% [markdown]
# **Read it.** From a star on the cache outweighs the weights. In the 70B eight query heads share a key-value head (**grouped-query attention**).
# In grey: more tokens than Llama-2 was trained on.
#
# What does a cache of 8 bits cost? Our model's keys and values go through fp8, a float of 8 bits:

# %%
def attend_fp8(query, key, value):
    return attend(query, *(part.to(torch.float8_e4m3fn).to(part.dtype) for part in (key, value)))


for what, few in {"cache in fp8": model, "GPTQ-4 and cache in fp8": made["GPTQ-4"]}.items():
    narrow = copy.deepcopy(few)
    for block in narrow.blocks:
        block.attention.attend = attend_fp8
    change, spread = growth(sequence_losses(narrow, held_out))
    print(f"{what:<23} perplexity {change:+.2f}% a byte (standard error {spread:.2f})")

# %% [markdown]
# That is our model at 128 bytes of context; longer ones are not shown here.
#
# Now the speed. For one token of one request, a GPU reads every matrix once: **bandwidth over bytes bounds the rate**. Beside the bound, what
# [gpt-fast](https://github.com/meta-pytorch/gpt-fast) published:

# %%
alone = [row for row in table("gpt_fast_decode") if row["gpus"] == "1" and row["model"] == "Llama-2-7B"]
kept = [Serving(model="llama-2-7b", bits=int(row["bits"]), group=int(row["group"] or 0) or None) for row in alone]
bound, reached = [s.tokens_per_second("A100-80GB") for s in kept], [float(row["tokens_per_second"]) for row in alone]
show(draw_decoding([f"{row['model']}, {row['bits']} bits" for row in alone], bound, reached,
                   notes=["", *(f", {each / reached[0]:.1f} times 16 bits" for each in reached[1:])],
                   title="One sequence (batch 1) on an A100-80GB held to 330 W:\npublished tokens per second, and the bound"),
     alt="The bound on tokens per second from bytes, and published rates of gpt-fast, on an A100.")
print("published by gpt-fast:", source("gpt_fast_decode").partition(": 8 x ")[2].partition(";")[0])
print(f"4 bits (with a scale and a zero of 16 bits for each 32) read 1/{kept[0].linear_bytes / kept[-1].linear_bytes:.1f} of the bytes of 16 bits")

# %% [markdown]
# **Read it.** At 4 bits 1/3.2 of the bytes bring 1.9 times the rate, not 3.2.
#
# In a **batch** the weights are read once for all requests, each cache for its request alone. A step takes at least as long as its reading or
# its arithmetic, whichever is longer.

# %%
def arithmetic_rate(s, card, context):
    """Tokens per second at the card's peak in bf16: all weights, and attention to the context."""
    operations = 2 * s.linear_numbers + 4 * context * s.shape.layers * s.shape.heads * s.shape.head_dim
    return device(card).peak_flops_per_second("bf16") / operations


def rate(s, card, batch, context):  # at most, all sequences together
    read = s.linear_bytes + batch * context * s.cache_bytes_per_token
    return min(batch * device(card).memory_bytes_per_second / read, arithmetic_rate(s, card, context))


for name, one in ((m, one) for m in MODELS for one in ("8 + 8", "16 + 8")):
    tokens = crossing_tokens(served(name, one), served(name, "4 + 16"))
    print(f"{name}: {one} reads less than 4 + 16 from {tokens:,.0f} cached tokens: batch {tokens / 256:.0f} of 256, {tokens / CONTEXT:.1f} of 4,096")
for bits, s in ((bits, served("Llama-2-7B", f"{bits} + 16")) for bits in (16, 4)):
    print(f"7B, weights in {bits} bits, A100: from {s.arithmetic_batch('A100-80GB'):.0f} tokens at once on, arithmetic takes longer than reading them")

# %% jupyter={"source_hidden": true}
def over_batch(choice, context, card="A100-80GB"):
    most = served("Llama-2-7B", choice).cache_tokens(cards[card]) // context
    return [(b, rate(served("Llama-2-7B", choice), card, b, context)) for b in sorted({*(2**n for n in range(9) if 2**n <= most), min(most, 256)})]


contexts = {f"{context:,} tokens each": context for context in (256, CONTEXT)}
met = [crossing_tokens(served("Llama-2-7B", one), served("Llama-2-7B", "4 + 16")) for one in ("8 + 8", "16 + 8")]
curves = {label: {c: over_batch(c, context) for c in drawn} for label, context in contexts.items()}
show(draw_rates(curves, {label: arithmetic_rate(served("Llama-2-7B", "4 + 8"), "A100-80GB", n) for label, n in contexts.items()},
                full={label: [c for c in drawn if curves[label][c][-1][0] < 256] for label in contexts},
                crossings={label: [(t / n, rate(served("Llama-2-7B", "4 + 16"), "A100-80GB", t / n, n)) for t in met] for label, n in contexts.items()},
                title="Llama-2-7B on an A100-80GB: the bound, by bits of weights + cache (predicted)"),
     alt="The bound on tokens per second over the batch, at 256 and at 4,096 tokens of context, for five choices of bits; crossings circled.")

# %% [markdown]
# **Read it.** At the circles two formats change places: a smaller cache saves there what smaller weights do, with many short requests or few
# long ones. At 4,096 tokens the card is full far below the arithmetic. A prompt is read all at once (**prefill**): above the printed
# numbers of tokens its arithmetic takes longer than reading the weights. Fewer bits for the weights alone leave it in 16 bits; W8A8 does not.
#
# The verdict, for eight requests of 4,096 tokens. What is left free is for activations.

# %% jupyter={"source_hidden": true}
rows = []
for name, choice in ((name, choice) for name in MODELS for choice in CHOICES):
    s = served(name, choice)
    need = s.memory_bytes(8, CONTEXT)
    smallest = {f"smallest card, {free:.0%} free": next((card for card, room in cards.items() if need <= (1 - free) * room), "none") for free in (0.05, 0.1, 0.2)}
    most = [f"{rate(s, 'A100-80GB', batch, CONTEXT):,.0f}" if need <= cards["A100-80GB"] else "" for batch in (1, 8)]
    rows.append({"model": name, "weights + cache, bits": choice, "weights, GiB": f"{s.weight_bytes / GIB:.1f}", "cache, GiB": f"{(need - s.weight_bytes) / GIB:.1f}",
                 "both, GiB": f"{need / GIB:.1f}"} | smallest | {"A100, one: tokens/s at most": most[0], "A100, eight: tokens/s at most": most[1]})
table_of_eight = pd.DataFrame(rows).set_index(["model", "weights + cache, bits"])
table_of_eight.style.set_caption("eight requests of 4,096 tokens (predicted); blank: all eight do not fit the A100")

# %% [markdown]
# **Read it.** Narrowing both, to 4-bit weights and an 8-bit cache, leaves the fewest bytes to keep, and to read for a token. If you narrow
# one, 4-bit weights save more up to 36,574 cached tokens in Llama-2-7B, so at these 32,768 and at half as many, an 8-bit cache above, so at
# twice as many. In the 70B they do up to 618,528 tokens, and 16-bit weights fit no card here with an 8-bit cache: so always.
# The 70B at 8 + 8 fits one A100 with a tenth free; with a fifth only 4-bit weights do.
#
# Quality: on tasks of Llama-3.1 [Kurtic and others 2024](https://arxiv.org/abs/2411.02355) saw no loss in fp8 W8A8, 1 to 3% in int8 W8A8, and
# 4-bit weights competitive with int8.
#
# | format | library | in [vLLM](https://docs.vllm.ai/en/latest/features/quantization/) on |
# |---|---|---|
# | 4-bit weights: GPTQ, AWQ | GPTQModel, llm-compressor | Turing and later |
# | W8A8 in int8 | llm-compressor, torchao | Turing to Hopper |
# | W8A8 in fp8 | llm-compressor, vLLM | Ada and later; before: weights only |
#
# ## Break it, diagnose it
#
# A colleague calibrates GPTQ at 2 bits on a hex dump. The report shows half the usual error, but the model is worse than
# without any text. Why?

# %%
hex_dump = torch.tensor(list(b"0123456789ABCDEF"))[torch.randint(0, 16, (32, 128), generator=torch.Generator().manual_seed(0))]
print(f"nearest, no text: perplexity {losses['nearest-2'].mean().exp():.2f}")
for name, text in {"Python sources": calibration, "a hex dump": hex_dump}.items():
    few, reported = in_few_bits(METHODS["GPTQ-2"], text)
    print(f"GPTQ, calibrated on {name:<14}: reported error {reported:.1%}, on unseen Python {layer_error(few):.1%}, "
          f"perplexity {sequence_losses(few, held_out).mean().exp():.2f}")

# %% [markdown]
# **Diagnose it.** Each report is on its own calibration text; on unseen Python the hex dump's error is the larger one. Calibrate, and
# measure, on text like that which the model will read.
#
# ## Recap
#
# - **How many bits?** Try 4 for the weights: in the published rows of Llama-2-7B and 70B they cost 2.4 to 4.8% of perplexity, 3 bits 12.7 to 21.8%.
# - **Which method?** GPTQ makes errors cancel, AWQ gives columns with large inputs finer steps. Measure on your own text and tasks.
# - **Weights, cache or both?** Narrowing both, to 4-bit weights and an 8-bit cache, leaves the fewest bytes to keep, and to read for a token. If
#   you narrow one, 4-bit weights save more up to 36,574 cached tokens in Llama-2-7B, an 8-bit cache above; in the 70B, by tokens that fit, always.
#
# **Next** the [lab](../../labs/intermediate/08_smaller_weights.ipynb), its
# [solution](../../solutions/intermediate/08_smaller_weights.ipynb), and [lesson 09](09_sharding.ipynb).

# %% [markdown]
# ## On Monday
#
# **First ask what it would cost.** `model` is yours, `batches` some tens of equal batches of texts that it will *read*,
# `loss_of(model, batch)` a batch's loss.
#
# ```python
# import math
#
# import torch
#
# bits, group, done = 4, 128, 0
# model.eval()  # no dropout in either arm; it is rounded in place, so load it again
# fused = [name for name, p in model.named_parameters() if "experts" in name and p.ndim == 3]
# assert not fused, f"{fused[0]} is no nn.Linear: these lines would leave the experts as they are"
# with torch.no_grad():
#     before = torch.tensor([float(loss_of(model, batch)) for batch in batches])
#     for name, layer in model.named_modules():
#         if isinstance(layer, torch.nn.Linear) and layer.in_features % group == 0 and not name.endswith("head"):
#             parts = layer.weight.float().view(-1, group)
#             low, high = parts.amin(1, keepdim=True).clamp(max=0), parts.amax(1, keepdim=True).clamp(min=0)
#             scale = ((high - low) / (2**bits - 1)).clamp(min=1e-6)
#             zero = (-low / scale).round()
#             codes = ((parts / scale).round() + zero).clamp(0, 2**bits - 1)
#             layer.weight.copy_((scale * (codes - zero)).view_as(layer.weight))
#             done += layer.weight.numel()
#     more = torch.tensor([float(loss_of(model, batch)) for batch in batches]) - before
# share = done / sum(p.numel() for p in model.parameters())
# cost, error = more.mean().item(), more.std().item() / len(batches) ** 0.5
# print(f"{bits} bits for {share:.0%} of the weights: perplexity {100 * math.expm1(cost):+.2f}%, standard error {100 * error:.2f}")
# ```
#
# **Then GPTQ, saved, reloaded and measured.** `model_name` is a folder or a name on the Hub, `calibration` and `held_out` are lists of some
# hundred texts, none in both.
#
# ```python
# import math
#
# import torch
# from gptqmodel import GPTQModel, QuantizeConfig
# from transformers import AutoModelForCausalLM, AutoTokenizer
#
# tokenizer = AutoTokenizer.from_pretrained(model_name)
# texts = [tokenizer(text, return_tensors="pt").input_ids[:, :2048] for text in held_out]
# texts = [ids for ids in texts if ids.shape[1] > 1]  # one token has none to predict
# counts = torch.tensor([ids.shape[1] - 1.0 for ids in texts])
#
#
# @torch.no_grad()
# def losses(model):
#     return torch.tensor([model(input_ids=ids.to(model.device), labels=ids.to(model.device)).loss.item() for ids in texts])
#
#
# before = losses(AutoModelForCausalLM.from_pretrained(model_name, dtype="auto", device_map="auto"))
# few = GPTQModel.load(model_name, QuantizeConfig(bits=4, group_size=128))
# few.quantize(calibration[:256])
# few.save(folder)
# more = losses(GPTQModel.load(folder).model) - before
# mean = (counts * more).sum() / counts.sum()  # each token counts once, not each text
# error = (counts * (more - mean)).norm() / counts.sum()
# print(f"perplexity {100 * math.expm1(mean):+.2f}%, standard error {100 * error:.2f}, {len(texts)} texts")
# ```
#
# **Or fp8 for weights and inputs**, without calibration:
#
# ```python
# from llmcompressor import oneshot
# from llmcompressor.modifiers.quantization import QuantizationModifier
# from transformers import AutoModelForCausalLM, AutoTokenizer
#
# model = AutoModelForCausalLM.from_pretrained(model_name, dtype="auto", device_map="auto")
# oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"]))
# model.save_pretrained(folder)
# AutoTokenizer.from_pretrained(model_name).save_pretrained(folder)
# ```
#
# Serve either with `vllm serve`, then measure *tasks*, one change at a time:
#
# ```bash
# # vllm serve $FOLDER takes --kv-cache-dtype fp8 as well, and --tensor-parallel-size 2 for two cards.
# # The fp8 cache's scales are 1.0 unless llm-compressor calibrated them: docs.vllm.ai, Quantized KV Cache.
# # Before Ada an attention backend may refuse it (vllm-project/vllm, issue 26431): the log names the backend.
# # gsm8k asks 1,319 questions: at 60% right a score's standard error is 1.3 points.
# lm_eval --model vllm --model_args pretrained=$MODEL_NAME --tasks gsm8k
# lm_eval --model vllm --model_args pretrained=$FOLDER --tasks gsm8k
# lm_eval --model vllm --model_args pretrained=$FOLDER,kv_cache_dtype=fp8 --tasks gsm8k
# ```
