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
# **Promise.** You round the weights of a trained model to 8, 4, 3 and 2 bits, by four methods that you
# write yourself, and measure what it loses. Then you say which card serves a model of 7 or 70 billion
# parameters, over which context, and how fast its tokens can come.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60 | any laptop | about half a minute of computing on two CPU cores |

# %% [markdown]
# ## A bet
#
# Llama-2-70B is packed to 4 bits a weight, with one 16-bit scale and zero point for every 32 weights. It
# then fits on one A100 of 80 GB. How many tokens per second can that card write for one reader, at the
# most? Write your guess. Section 8 computes it, beside a published rate.

# %%
my_bet_tokens_per_second = 100

# %% tags=["setup"]
here = setup("intermediate/08")

# %%
import copy
import itertools

import pandas as pd
import torch

from utils import check, device, draw_context_memory, draw_decoding, draw_error_by_bits
from utils import format_bytes, score, scoreboard, show
from utils.models.bytes_llama import bytes_llama, calibration_tokens, made_by, perplexity
from utils.planner.inference import Serving
from utils.techniques import int8, nf4
from utils.techniques.library import bitsandbytes_problem
from utils.techniques.rounding import Grid, output_error, second_moments
from utils.techniques.weight_only import in_few_bits, inputs_of, linears_of, quantize_weights
from utils.validation.tables import source, table

# %% [markdown]
# ## What you will be able to do
#
# - Say what a served model holds: weights, and a cache that grows with every token.
# - Round a layer to few bits, and measure the error where it counts: in the layer's *output*.
# - Write GPTQ and AWQ, and say what each asks of the calibration text.
# - Predict the tokens per second of a card from bytes alone, and know what is missing.
#
# Training is over here: no gradients, no optimizer state. What is left are **weights** and the **cache of
# keys and values**. Lesson 06 packed frozen weights to train adapters around them; this lesson packs them
# to be served.

# %% [markdown]
# ## 1. What a served model holds
#
# Each token that was read or written leaves a key and a value in every layer, so that later tokens need not
# compute them again: $2 \times \text{layers} \times \text{key-value heads} \times \text{head width}$ numbers.
# Llama-2-7B has as many key-value heads as query heads (32). Llama-2-70B shares 8 among 64: grouped
# queries, without which its cache would be eight times as large.

# %% tags=["nbval-check-output"]
served = {f"{name}, {bits} bits": Serving(model=name, bits=bits, group=None if bits == 16 else 64)
          for name in ("llama-2-7b", "llama-2-70b") for bits in (16, 4)}  # fmt: skip
rows = [{"model": name, "weights": format_bytes(s.weight_bytes),
         "cache of one token": format_bytes(s.cache_bytes_per_token),
         "cache of 4096 tokens": format_bytes(4096 * s.cache_bytes_per_token)}
        for name, s in served.items()]  # fmt: skip
pd.DataFrame(rows).set_index("model")

# %%
contexts = [2**power for power in range(9, 18)]
batch = 8
memory = {name: {c: s.memory_bytes(batch, c) for c in contexts} for name, s in served.items()}
cards = {name: device(name).memory_bytes for name in ("RTX-4090", "A100-80GB", "H200")}
show(draw_context_memory(memory, cards, title=f"{batch} sequences at a time: weights and cache"),
     alt="Memory over context for Llama-2 7B and 70B in 16 and 4 bits, with the memory of three cards")  # fmt: skip

# %% [markdown]
# **Read it.** To the left the lines are flat: weights alone. To the right they double with the context: the
# cache alone. Few bits move the left part down and leave the right part where it is. The lines of 7B and 70B
# draw near each other to the right, because the large model's cache is *smaller* per layer: grouped queries.
#
# A server does not know how long an answer will be. Reserving the longest possible cache for every reader
# wastes most of it; a **paged cache** gives out blocks of 16 tokens as they are needed and loses at most one
# block a sequence ([Kwon and others 2023](https://arxiv.org/abs/2309.06180)).
#
# **Question.** One token of Llama-2-70B leaves how many KiB of cache, in 16 bits?

# %%
cache_kib = ...
check("08.cache_kib", cache_kib)

# %% [markdown]
# ## 2. A model that has learned something
#
# On random weights nothing can be lost. The model of this lesson is a Llama of 0.9 million parameters that
# was trained to continue the sources of Python's standard library, byte by byte. Its **perplexity** is $e$ to
# the mean loss of a byte of text that it has not seen: among how many bytes it is in doubt, on average.

# %%
model = bytes_llama()
in_fp32 = perplexity(model)
in_bf16 = perplexity(copy.deepcopy(model).bfloat16())
print({key: value for key, value in made_by().items() if key in ("steps", "text", "training_loss")})
print(f"perplexity {in_fp32:.4f} in fp32, {in_bf16:.4f} in bf16 (measured on {here.device})")

# %% [markdown]
# We take one layer apart: the down-projection of the second block's feed-forward. Quantization asks one
# thing of a layer: what comes in. `inputs_of` listens while the model reads 32 sequences of text.

# %%
tokens = calibration_tokens()
layers = {"down": model.blocks[1].feedforward.down}
with inputs_of(layers) as seen, torch.no_grad():
    model(tokens)
weight, inputs = layers["down"].weight.detach(), seen["down"]
magnitudes = inputs.magnitudes / inputs.rows
print(f"weight {tuple(weight.shape)}, {inputs.rows} inputs were seen")
print(f"mean |x| over the input channels: median {magnitudes.median():.3f}, largest {magnitudes.max():.3f}")

# %% [markdown]
# ## 3. Rounding to nearest
#
# A group of weights in a row shares a scale and a zero point. With $b$ bits there are $2^b$ places on the grid;
# each weight goes to the nearest.

# %%
def nearest(weight, bits, group):
    stored = torch.empty_like(weight)
    for start in range(0, weight.shape[1], group):
        part = weight[:, start : start + group]
        low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
        scale = (high - low) / (2**bits - 1)
        zero = torch.round(-low / scale)
        codes = (torch.round(part / scale) + zero).clamp(0, 2**bits - 1)
        stored[:, start : start + group] = scale * (codes - zero)
    return stored


def error_of(stored):
    return output_error(weight, stored, inputs.moments)


GROUP = 32
for bits in (8, 4, 3, 2):
    print(f"{bits} bits: the output is off by {error_of(nearest(weight, bits, GROUP)):.2%}")

# %% [markdown]
# **The error that counts** is that of $Wx$, for the $x$ that really come. It needs no more of them than
# $H = \sum x x^T$: $\sum |(W-Q)x|^2 = \operatorname{tr}\,(W-Q)\,H\,(W-Q)^T$. Two methods make it smaller with
# the same bits. They differ in what they do with $H$.

# %% [markdown]
# ## 4. GPTQ: let the columns to come make up for the error
#
# Round the first column. The output is now off. The other columns are still free: move them so that the output
# is as right as it can be, then round the second column, and so on
# ([Frantar and others 2022](https://arxiv.org/abs/2210.17323)). Since the error is quadratic, the best move is
# known: $-e\,U_{q,\text{later}}/U_{qq}$, with $U$ the upper Cholesky factor of $H^{-1}$.

# %%
def gptq_by_hand(weight, moments, bits, group, damping=0.01):
    moving, stored = weight.clone(), torch.empty_like(weight)
    damped = moments.double() + damping * moments.diagonal().double().mean() * torch.eye(len(moments))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    for column in range(weight.shape[1]):
        if column % group == 0:  # a new group: choose its grid from where its weights are now
            grid = Grid.of(moving[:, column : column + group], bits)
        here = moving[:, column : column + 1]
        stored[:, column : column + 1] = grid.weight(grid.codes(here))
        error = (moving[:, column] - stored[:, column]) / factor[column, column]
        moving[:, column + 1 :] -= torch.outer(error, factor[column, column + 1 :])
    return stored


by_gptq = gptq_by_hand(weight, inputs.moments, 4, GROUP)
from_utils = in_few_bits(weight, inputs, method="gptq", bits=4, group=GROUP).weight()
assert torch.allclose(by_gptq, from_utils, atol=1e-6), "the notebook's GPTQ and utils' differ"
print(f"4 bits: nearest {error_of(nearest(weight, 4, GROUP)):.2%}, GPTQ {error_of(by_gptq):.2%}")
moved = (by_gptq - nearest(weight, 4, GROUP)).abs().gt(1e-6).float().mean()
print(f"{moved:.0%} of the weights are on another place of the grid than the nearest")

# %% [markdown]
# **Read it.** Most weights are *not* rounded to their nearest neighbour any more, each weight by itself is less
# right than before, and the output is more right.
#
# **Question.** All input channels are independent of each other ($H$ is diagonal). What does GPTQ gain over
# rounding to nearest, in percent?

# %%
gain_percent = ...
check("08.independent_inputs", gain_percent)

# %% [markdown]
# ## 5. AWQ: widen what is multiplied by much
#
# A column whose input is ten times larger does ten times the harm when it is rounded. AWQ multiplies such
# columns by $s > 1$ before rounding and divides their input by $s$, which the norm or layer before can do for
# nothing ([Lin and others 2023](https://arxiv.org/abs/2306.00978)). $s$ is the input's mean magnitude to a
# power between 0 and 1, and twenty powers are tried.

# %%
def awq_by_hand(weight, bits, group):
    tried = []
    for power in torch.arange(20) / 20:
        scales = magnitudes.clamp(min=1e-4) ** power
        scales = scales / (scales.max() * scales.min()).sqrt()
        stored = nearest(weight * scales, bits, group) / scales
        tried.append((error_of(stored), power.item(), stored))
    return min(tried, key=lambda row: row[0])


best_error, power, by_awq = awq_by_hand(weight, 4, GROUP)
print(f"4 bits: nearest {error_of(nearest(weight, 4, GROUP)):.2%}, AWQ {best_error:.2%} at power {power:.2f}")

# %% [markdown]
# AWQ needs the mean magnitudes and a search, no inverse: less calibration text, and it does not fit itself to it
# as closely. The curve below is over three draws of calibration text; each error is measured on text that the
# method has not seen.

# %%
def errors_on_other_text(seed):
    with inputs_of(layers) as fitted, torch.no_grad():
        model(calibration_tokens(seed=seed))
    for method, bits in itertools.product(("nearest", "gptq", "awq"), (2, 3, 4, 8)):
        made = in_few_bits(weight, fitted["down"], method=method, bits=bits, group=GROUP)
        yield method, bits, error_of(made.weight())


errors = {method: {bits: [] for bits in (2, 3, 4, 8)} for method in ("nearest", "gptq", "awq")}
for seed in (10, 11, 12):
    for method, bits, error in errors_on_other_text(seed):
        errors[method][bits].append(error)
show(draw_error_by_bits(errors, device=here.device),
     alt="Relative error of a layer's output over 2, 3, 4 and 8 bits for three methods")  # fmt: skip

# %% [markdown]
# **Read it.** One bit less is about twice the error, for every method: the lines are straight and parallel. A
# method moves its line down by a fixed factor. Calibration is worth a part of a bit, not several.

# %% [markdown]
# ## 6. Eight bits, and the channels that spoil them
#
# Eight bits are enough to multiply in whole numbers as well: inputs and weights each over the largest magnitude of
# their row. Models of billions of parameters have a few input channels that are twenty times larger than
# all others. They take the whole scale of their row. `LLM.int8()` multiplies those channels in 16 bits and the
# rest in eight ([Dettmers and others 2022](https://arxiv.org/abs/2208.07339)). Our model is too small to have
# grown any, so we plant one, in a way that changes nothing: channel times 30, its weights by 30.

# %%
x = torch.randn(256, weight.shape[1], generator=torch.Generator().manual_seed(0))
right = x @ weight.T
x_spoilt, weight_spoilt = x.clone(), weight.clone()
x_spoilt[:, 7] *= 30
weight_spoilt[:, 7] /= 30
assert torch.allclose(x_spoilt @ weight_spoilt.T, right, atol=1e-5), "the planted channel changes nothing"
for name, product in {"int8, no outlier": int8.int8_product(x, weight),
                      "int8, one outlier": int8.int8_product(x_spoilt, weight_spoilt),
                      "LLM.int8() split": int8.split_product(x_spoilt, weight_spoilt)}.items():  # fmt: skip
    print(f"{name:18} error of the output {(product - right).norm() / right.norm():.2%}")

# %% [markdown]
# ## 7. The whole model
#
# All 28 matrices of the four blocks, by each method. Every block is calibrated on what the rounded blocks before
# it really give. NF4, lesson 06's format, is round-to-nearest on a grid for normally distributed weights.

# %%
def rounded(method, bits, seed=1):
    few = copy.deepcopy(model)
    made = quantize_weights(few, calibration_tokens(seed=seed), method=method, bits=bits, group=GROUP)
    return few, sum(row.stored_bytes for row in made)


def in_nf4():
    few = copy.deepcopy(model)
    stored = 0
    for block in few.blocks:
        for layer in linears_of(block).values():
            packed, scales = nf4.quantize_nf4(layer.weight)
            layer.weight.data = nf4.dequantize_nf4(packed, scales, tuple(layer.weight.shape))
            stored += packed.nbytes + scales.nbytes
    return few, stored


# %%
matrices = sum(layer.weight.numel() for block in model.blocks for layer in linears_of(block).values())
results = [("bf16", in_bf16, 2.0 * matrices)]
for name, make in {"int8, nearest": lambda: rounded("nearest", 8), "NF4": in_nf4,
                   **{f"{method}-{bits}": lambda m=method, b=bits: rounded(m, b)
                      for bits in (4, 3, 2) for method in ("nearest", "gptq", "awq")}}.items():  # fmt: skip
    few, stored = make()
    results.append((name, perplexity(few), stored))
frame = pd.DataFrame(results, columns=["weights", "perplexity", "bytes"]).set_index("weights")
frame["bits a weight"] = 8 * frame["bytes"] / matrices
frame["perplexity, %"] = 100 * (frame["perplexity"] / in_fp32 - 1)
frame.drop(columns="bytes").round(3)

# %% [markdown]
# **Read it.** Measured perplexity, on text that neither training nor calibration saw. Eight bits cost next to
# nothing. At four the methods still lie close; at two plain rounding has lost the model and calibration
# keeps some of it. The column of bits counts the scales and zero points of groups of 32: half to two thirds of a bit.
#
# A small model has little to spare: a large one loses less at the same bits. Frantar and others (Table 2, WikiText2) give
# OPT-175B at 3 bits a perplexity that is 4% above fp16, and OPT-125M one that is 95% above.

# %%
by_seed = [perplexity(rounded("gptq", 3, seed)[0]) for seed in (1, 2, 3)]
print("GPTQ, 3 bits, three draws of calibration text:", [round(value, 4) for value in by_seed])

# %% [markdown]
# ### The libraries
#
# The format is what makes a library fast: codes packed so that a kernel unpacks them while it multiplies. These
# are the calls as people need them.
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
# | format | home today | here, without a GPU | heritage |
# |---|---|---|---|
# | int8, LLM.int8() | bitsandbytes, torchao | runs | |
# | NF4 | bitsandbytes | runs (lesson 06) | |
# | GPTQ | GPTQModel, llm-compressor | GPTQModel runs, slowly | AutoGPTQ, no longer developed |
# | AWQ | llm-compressor, GPTQModel | needs a GPU | AutoAWQ, no longer developed |
# | fp8 weights and inputs | torchao, vLLM | needs a GPU with fp8 units | |
#
# Where the format is the same, so are the codes:

# %%
if problem := bitsandbytes_problem():
    print(problem)
else:
    import bitsandbytes.functional as library

    theirs, their_scales, _ = library.int8_vectorwise_quant(weight.half())
    ours, our_scales = int8.absmax(weight.half())
    print(f"int8 codes equal to bitsandbytes': {(ours == theirs).float().mean():.2%},"
          f" scales: {torch.equal(our_scales, their_scales.float())}")  # fmt: skip

# %% [markdown]
# ## 8. How fast can tokens come?
#
# To write one token for one reader, a GPU reads every weight once and does two operations with each. An A100
# needs 150 operations per byte read to be busy; it gets one per byte at 16 bits. So it waits for its memory, and
# **bytes over bandwidth bound the rate**.

# %%
names = {"Llama-2-7B": "llama-2-7b", "Llama-2-70B": "llama-2-70b",
         "Llama-3.1-8B": "llama-3-8b", "Llama-3.1-70B": "llama-3-70b"}  # fmt: skip
alone = [row for row in table("gpt_fast_decode") if row["gpus"] == "1"]
bound = [Serving(model=names[row["model"]], bits=int(row["bits"]),
                 group=int(row["group"]) if row["group"] else None).tokens_per_second("A100-80GB")
         for row in alone]  # fmt: skip
published = [float(row["tokens_per_second"]) for row in alone]
show(draw_decoding([f"{row['model']}, {row['bits']} bits" for row in alone], bound, published),
     alt="The bound on tokens per second from bytes, and published rates of gpt-fast, on an A100-80GB")  # fmt: skip
print(source("gpt_fast_decode").partition(":")[0])

# %%
at_most = bound[[(row["model"], row["bits"]) for row in alone].index(("Llama-2-70B", "4"))]
print(f"your bet {my_bet_tokens_per_second}; at most {at_most:.0f} tokens per second (predicted), 25 published")

# %% [markdown]
# **Read it.** A quarter of the bytes is not four times the speed. The share of the bound falls with the bits and with
# the size: what a step pays besides bytes stays. Take the 16-bit rows on one to eight GPUs, where the bytes
# per GPU shrink and nothing else changes, and see what is left when bytes are taken off:

# %%
left = []
for row in (row for row in table("gpt_fast_decode") if row["bits"] == "16"):
    shape = Serving(model=names[row["model"]])
    reading = shape.linear_bytes / int(row["gpus"]) / 1.7e12  # the bandwidth that its authors could reach
    each = (1 / float(row["tokens_per_second"]) - reading) / shape.shape.layers
    left.append({"model": row["model"], "GPUs": row["gpus"], "reading, ms": 1e3 * reading,
                 "left per layer, microseconds": 1e6 * each})  # fmt: skip
pd.DataFrame(left).set_index("model").round(1)

# %% [markdown]
# Between 50 and 90 microseconds a layer, on one GPU or on eight: launches, attention, norms, and on several GPUs the
# all-reduce. Few bits do not touch it, and unpacking adds to it.
#
# With a **batch** the weights are read once for all readers, so tokens per second grow with it until arithmetic or the
# cache takes over; then the weights' bits matter less than those of the cache.
#
# **Question.** Weights in 4 bits instead of 16, at a batch so large that the cache is all that is read. By what
# factor do the tokens per second grow?

# %%
factor = ...
check("08.large_batch", factor)

# %% [markdown]
# ## 9. For inference, for training
#
# | you want to | take | not |
# |---|---|---|
# | serve on one card | 4 bits, GPTQ or AWQ, with calibration text of your own domain | 2 bits, because they fit |
# | serve many readers | 8 bits or fp8, and look at the cache first | fewer bits of weight |
# | fine-tune on one card | NF4 under LoRA (lesson 06) | GPTQ: its weights are made for one set of inputs |
# | train from the start | bf16, fp8 where the card has it (lesson 03) | any of these |
#
# **Quantization-aware training** rounds in forward and lets the gradient pass as if it had not, so that the weights
# learn to stand on the grid. bitsandbytes does not do that: it stores frozen weights, or an optimizer's state, in few
# bits. torchao has it (`torchao.quantization.qat`).

# %% [markdown]
# ## Your scoreboard

# %%
best = frame["perplexity"].filter(like="-4").idxmin()
score("08", f"small Llama, {best}, matrices alone", peak_bytes=int(frame["bytes"][best]))
score("08", "small Llama, bf16, matrices alone", peak_bytes=2 * matrices)
scoreboard()

# %% [markdown]
# ## Say it
#
# 1. Why does GPTQ move weights away from their nearest neighbour?
# 2. Which does a longer context ask for: fewer bits of weight, or of cache?
# 3. A card reads 2 TB/s. What is the most that it can write with 35 GB of weights, for one reader?
#
# The [lab](../../labs/intermediate/08_smaller_weights.ipynb) has you write GPTQ against the library's error, spend a
# byte budget layer by layer, and break calibration.
