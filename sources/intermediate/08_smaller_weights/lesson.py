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
# and 2 bits by methods that you write yourself, see what it loses, beside what Llama-2-7B and 70B lost, and what it buys on a card.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 70 for the lab | any laptop | less than a minute of computing on two CPU cores |
#
# ## A bet
#
# A small Llama has learned to continue Python's sources. All 28 matrices of its blocks are rounded to the nearest of 16 places, 4 bits a
# weight. By how many *percent* does its perplexity per byte grow, on text that it has never seen?

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

from utils import Evidence, check, device, format_bytes, scratch, show
from utils.techniques import nf4
from utils.techniques.bitsandbytes_import import bitsandbytes_problem
from utils.lessons.lesson_08 import int8, published
from utils.lessons.lesson_08.awq import awq
from utils.lessons.lesson_08.bytes_llama import bytes_llama, made_by, sequence_losses
from utils.lessons.lesson_08.figures import draw_context_memory, draw_decoding, draw_error_by_bits, draw_grid, draw_price
from utils.lessons.lesson_08.gptq import gptq
from utils.lessons.lesson_08.inference import Serving
from utils.lessons.lesson_08.library_text import calibration_tokens, held_out_sequences
from utils.lessons.lesson_08.methods import methods
from utils.lessons.lesson_08.outlier import with_outlier
from utils.lessons.lesson_08.packed_linear import pack_linears
from utils.lessons.lesson_08.rounding import output_error, round_to_nearest
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
show(draw_grid(part[0].tolist(), grids, title="One group of 32 weights, and where rounding puts them (measured)"),
     alt="Thirty-two weights above the 16 places of 4 bits, and above the 4 places of 2 bits; a line joins each to its place.")
for bits, (scale, zero) in grids.items():
    codes = [round(w / scale) + int(zero) for w in part[0, :4].tolist()]
    print(f"{bits} bits: from {part.min():.3f} to {part.max():.3f}, scale {scale:.4f}, zero point {zero:.0f}; "
          f"first four weights {[round(w, 3) for w in part[0, :4].tolist()]} take codes {codes}; "
          f"stored 32 x {bits} + 16 + {bits} bits, {bits + (16 + bits) / GROUP:.3f} a weight")

# %% [markdown]
# Now the whole model, by this method and by three that sections 2 and 3 open: NF4 ([lesson 06](06_seven_billion.ipynb)'s 16 uneven places), GPTQ and AWQ.
# **Perplexity** is $e$ to the mean loss: per *byte* for our model, on six modules that it has never seen, per token of about four bytes
# for a large one. So we also count over four bytes. Each arm reads the same sequences, and the standard error is that of the difference.

# %%
METHODS, held_out = methods(GROUP), held_out_sequences()
plain_losses = sequence_losses(model, held_out)


def growth(losses, than=plain_losses, count=1):
    """Percent by which perplexity grows, over so many bytes, and its standard error: each sequence beside itself."""
    more = count * (losses - than)
    factor = more.mean().exp()
    return 100 * (factor - 1).item(), 100 * (factor * more.std() / len(more) ** 0.5).item()


def rounded(name, model=model):
    few = copy.deepcopy(model)
    return few, quantize_weights(few, calibration_tokens(), METHODS[name])


made, losses = {}, {}
for name in METHODS:
    few, made[name] = rounded(name)
    losses[name] = sequence_losses(few, held_out)

# %%
matrices = sum(layer.weight.numel() for layer in linears_of(model.blocks).values())
stored_bytes = {name: sum(row.made.stored_bytes for row in rows) for name, rows in made.items()}
point = {name: (8 * stored_bytes[name] / matrices, *growth(losses[name], count=4)) for name in METHODS}
ours = {way: [point[f"{way}-{b}"] for b in (2, 3, 4)] for way in ("nearest", "GPTQ", "AWQ")}
theirs = {way: [(published.stored_bits(b), published.growth("Llama-2-7B", b, way), 0) for b in (3, 4)]
          for way in ("nearest", "GPTQ", "AWQ")}
show(draw_price({"0.9 million parameters, groups of 32,\nover four bytes (measured on the CPU)": ours | {"NF4": [point["NF4"]], "int8": [point["int8"]]},
                 "Llama-2-7B, groups of 128,\nper token (published)": theirs}, device="the CPU", kinds=[Evidence.PUBLISHED]),
     alt="Growth of perplexity over stored bits a weight, in our model and in Llama-2-7B: next to nothing at 8 bits, a few percent at 4, steep below.")
print("published:", published.source())

# %% [markdown]
# **Read it.** Four bits cost a few percent, three several times that, two ruin a small model. Which method is best differs between the two
# models: section 3 says what carries over. Our AWQ stands 0.1 bit to the right because each matrix keeps a scale of 16 bits for each input.
# Libraries fold it into the layer before; unfolded, in a matrix of 4,096 outputs, it would be 16 / 4,096, 0.004 bit.

# %%
origin, byte = made_by(), plain_losses.mean() / torch.tensor(2.0).log()
print(f"trained for {origin['steps']} steps on the {origin['text']} (recorded); {held_out[:, 1:].numel():,} unseen bytes")
print(f"perplexity {plain_losses.mean().exp():.3f} a byte, {byte:.2f} bits a byte (measured); Llama-2-7B: "
      f"{published.perplexity('Llama-2-7B')} a token, about {published.perplexity('Llama-2-7B') ** 0.25:.2f} a byte of its own text (published)")
print(f"your bet {my_bet_percent}%; nearest at 4 bits {growth(losses['nearest-4'])[0]:+.2f}% a byte")

# %% [markdown]
# Ours is a weak model: good for seeing how methods work, no judge between them.
#
# ## 2. Two methods that look at the inputs
#
# What a layer's rounding does is the error of $Wx$, for the $x$ that really come. Only their sum $H = \sum x x^T$ (`moments`) matters:
# for a rounded $Q$, $\sum |(W-Q)x|^2 = \operatorname{tr}\,(W-Q)\,H\,(W-Q)^T$. `inputs_of` adds it up while the model reads a **calibration text**.

# %%
def inputs_on(seed):
    with inputs_of({PATH: model.get_submodule(PATH)}) as seen, torch.no_grad():
        model(calibration_tokens(seed=seed))
    return seen[PATH]


inputs, other_inputs = inputs_on(1), inputs_on(10)


def error_of(stored, on=inputs):
    return output_error(weight, stored, on.moments)


print(f"weight {tuple(weight.shape)}, {inputs.rows:,} inputs; nearest, 4 bits: the output is off by {error_of(nearest(weight, 4)):.2%}")

# %% [markdown]
# ### GPTQ: the columns to come make up for the error
#
# Round the first column: the output is off. Move the columns that are still free so that it is as right as it can be, round the second,
# and so on ([Frantar and others 2022](https://arxiv.org/abs/2210.17323)). The error is quadratic in the weights, so the best move is
# known: $-e\,U_{q,\text{later}}/U_{qq}$. Here $e$ is what rounding took from column $q$, and $U$ the upper triangle with $U^T U = H^{-1}$.
# Take two inputs that mostly move together: if the first weight loses 0.3, how far should the second go?

# %%
H = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
print(f"U = {U.tolist()}: the second weight moves by {-0.3 * U[0, 1] / U[0, 0]:+.2f}")

# %% [markdown]
# It gives back 0.9 of the 0.3. For the whole layer *damping*, a little more on $H$'s diagonal, makes sure that the inverse exists:

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
for name, stored in {"nearest": nearest(weight, 4), "GPTQ": by_gptq}.items():
    print(f"4 bits, {name:<7}: weights off by {(stored - weight).norm() / weight.norm():.2%}, "
          f"output by {error_of(stored):.2%}, on another text {error_of(stored, other_inputs):.2%}")

# %% [markdown]
# **Read it.** The weights are *farther* off than before, and the output's error is halved, on text that GPTQ was not fitted to as well.
# It does not make errors small, it makes them cancel.
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
# $s$ is the input's mean magnitude to a power, and twenty powers are tried. `awq` also searches how far each
# group's grid reaches, as its authors do: **clipping** the largest weights makes all steps smaller.

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
print(f"4 bits: nearest {error_of(nearest(weight, 4)):.2%}, AWQ {error:.2%} at power {power:.2f}, "
      f"with clipping {error_of(awq(weight, inputs.moments, inputs.magnitudes, 4, GROUP).weight()):.2%}")
print(f"the largest input channel is {share:.1f} times the median one")

# %% [markdown]
# No input channel of this layer stands out, so scales find little to protect; here clipping does more. Each method over the bits, on
# text that it was not fitted to:

# %%
by_bits = {
    "nearest": lambda bits: round_to_nearest(weight, bits, GROUP),
    "AWQ": lambda bits: awq(weight, inputs.moments, inputs.magnitudes, bits, GROUP),
    "GPTQ": lambda bits: gptq(weight, inputs.moments, bits, GROUP)}
errors = {name: {bits: [error_of(method(bits).weight(), other_inputs)] for bits in (2, 3, 4)} for name, method in by_bits.items()}
show(draw_error_by_bits(errors, device="the CPU", title="One layer, groups of 32: error on text that no method was fitted to"),
     alt="Relative error of a layer's output over 2, 3 and 4 bits by three methods: falling lines, GPTQ lowest.")

# %% [markdown]
# The step of a grid is its reach over $2^b - 1$: a bit less makes it 2.1 times as wide from 4 to 3, 2.3 times from 3 to 2. The errors follow.
#
# ## 3. The whole model
#
# `quantize_weights` went block by block through the 28 matrices, each calibrated on what the *rounded* blocks before it give; embedding,
# norms and head stayed. A layer's error is only a **proxy** for the loss. Does it tell which method costs less?

# %%
error = {name: sum(row.relative_error for row in rows) / len(rows) for name, rows in made.items()}
rows = {name: (point[name][0], 100 * error[name], *growth(losses[name]), point[name][1]) for name in METHODS}
frame = pd.DataFrame(rows, index=["bits a weight", "layer error %", "growth a byte %", "standard error", "over four bytes %"]).T
frame.style.format("{:.2f}").set_caption("28 matrices (measured); \"clipped\": nearest with AWQ's search of the reach alone")

# %%
for name, than in (("AWQ-4", "nearest-4"), ("NF4", "nearest-4"), ("NF4", "GPTQ-3"), ("clipped-3", "nearest-3"),
                   ("AWQ-3", "clipped-3"), ("clipped-2", "nearest-2"), ("GPTQ-2", "clipped-2")):
    change, spread = growth(losses[name], losses[than])
    print(f"{name:<9} against {than:<9}: layer error {error[name]:.2%} to {error[than]:.2%}, perplexity {change:+.2f}% (standard error {spread:.2f})")

# %% [markdown]
# **Read it.** NF4 is the witness: its layer error is larger than that of nearest-4 and of GPTQ-3, and its perplexity is no worse than the
# first's and better than the second's. AWQ-3 and clipped-3 have the same layer error and different losses. Only the model's loss decides. At
# 3 bits AWQ's lead is its scales, at 2 bits most of the gain is clipping. A difference below two standard errors is none; sequences from six
# modules are alike, so the true errors are larger than printed.
#
# Each bit less costs GPTQ about seven to eight times, nearest three, then seven. How much of this holds for models that people serve?

# %%
columns = {f"{label}, {b} bits": {way: published.growth(label, b, way) for way in published.METHODS}
           for b in (4, 3) for label in ("Llama-2-7B", "Llama-2-70B")}
for b in (4, 3):
    columns[f"ours, {b} bits, four bytes"] = {way: point[f"{way}-{b}"][1] for way in ("nearest", "GPTQ", "AWQ")}
pd.DataFrame(columns).style.format("{:+.1f}", na_rep="").set_caption("growth of perplexity in percent: Llama-2 published, ours measured")

# %% [markdown]
# **Read it.** Neither GPTQ's lead nor the ranking carries over: in Llama-2 AWQ costs least, GPTQ saves less than a third of what nearest costs,
# and ten times the parameters change little. What carries over: 4 bits cost a few percent, 3 bits several times that. (*Reordered*: columns with the
# largest inputs first, GPTQModel's `desc_act`; the lab builds it.)
#
# AWQ was made for models in which a few channels are far larger than all others. Ours has none, so `with_outlier` plants one and leaves
# the function as it is: each norm makes channel 7 thirty times as large, and what reads it divides its weights.

# %%
grown = with_outlier(model)
assert (sequence_losses(grown, held_out) - plain_losses).abs().max() < 1e-4, "the planted channel must change nothing before rounding"
column = nearest(grown.get_submodule(PATH).weight.detach(), 4)[:, 7]
print(f"rounded to nearest, {(column == 0).float().mean():.0%} of the channel's weights in one layer are exactly 0")
for name in ("nearest-4", "AWQ-4", "GPTQ-4"):
    change, spread = growth(sequence_losses(rounded(name, model=grown)[0], held_out))
    print(f"{name:<10} as trained {growth(losses[name])[0]:+.2f}%, with an outlier {change:+.2f}% (standard error {spread:.2f})")

# %% [markdown]
# **Read it.** Rounding to nearest deletes the channel; AWQ and GPTQ pay nothing for it. The channel was planted in the very form that AWQ undoes:
# a demonstration, no test.
#
# ### Kept in few bits
#
# A `PackedLinear` keeps the *codes*, without gaps, and writes its weight out anew in each forward; a server's kernel unpacks
# while it multiplies.

# %%
few, rows = rounded("GPTQ-4")
small = pack_linears(copy.deepcopy(few), {row.layer: row.made for row in rows})
with scratch("lesson-08") as folder:
    save_file(small.state_dict(), file := Path(folder) / "gptq-4.safetensors")
    size = file.stat().st_size
    for kept in small.state_dict().values():
        kept.zero_()  # so that all that is right below comes from the file
    small.load_state_dict(load_file(file))
stored = sum(b.nbytes for path, b in small.blocks.named_buffers())
print(f"in the file {format_bytes(size)}; the matrices {format_bytes(stored)} (measured), {format_bytes(stored_bytes['GPTQ-4'])} (predicted)")
assert stored == stored_bytes["GPTQ-4"], "what is kept is what the format takes"
torch.testing.assert_close(sequence_losses(small, held_out[:32]), sequence_losses(few, held_out[:32]), atol=1e-4, rtol=0)

# %% [markdown]
# ## 4. Inputs in 8 bits too
#
# So far the card still multiplies in 16 bits. It multiplies faster where *inputs* are whole numbers as well (**W8A8**). **Absmax** divides
# a row by its largest magnitude; an outlier takes the whole scale of its token's row. `LLM.int8()` keeps channels that reach 6 out of the product
# of whole numbers ([Dettmers and others 2022](https://arxiv.org/abs/2208.07339)). In the paper their weights stay in 16 bits; bitsandbytes
# keeps int8 codes alone and takes those columns from them.

# %%
def eight_bits(rows):
    scales = rows.abs().amax(dim=1).clamp(min=1e-30)
    return torch.round(rows * (127 / scales)[:, None]).to(torch.int8), scales / 127


def int8_product(x, w):
    (x_codes, x_scales), (w_codes, w_scales) = eight_bits(x), eight_bits(w)  # fp32 is exact: sums stay below 2**24
    return (x_codes.float() @ w_codes.float().T) * torch.outer(x_scales, w_scales)


def split_product(x, w, columns, threshold=6.0):
    large = (x.abs() >= threshold).any(dim=0)
    return int8_product(x.masked_fill(large, 0), w) + x[:, large] @ columns[:, large].T

# %%
PRODUCTS = {"all in int8": int8_product, "split, columns in full": lambda x, w: split_product(x, w, w),
            "split, columns from codes": lambda x, w: split_product(x, w, int8.Int8Weight.of(w).weight())}
for name, arm in {"as trained": model, "one outlier": grown}.items():
    for how, product in PRODUCTS.items():
        with int8.multiplied_by(product, arm) as found:
            change, spread = growth(sequence_losses(arm, held_out))
        print(f"{name:<12} {how:<26} the gate's output off by {found[PATH]:.2%}, perplexity {change:+.2f}% (standard error {spread:.2f})")

# %% [markdown]
# **Read it.** One channel in 128 spoils the product; the split saves most of it. With columns from the codes the layer's error is larger than
# in the paper's arithmetic: the planted channel's weights are small in rows that others scale. Which one is the library's?

# %%
if problem := bitsandbytes_problem():
    print(problem)
else:
    import bitsandbytes

    state = bitsandbytes.MatmulLtState()
    state.threshold, state.has_fp16_weights, state.is_training = 6.0, False, False
    w, x = grown.get_submodule(PATH).weight.detach().half(), torch.randn(64, 128)
    x[:, 7] *= 30
    state.CB, state.SCB, _ = bitsandbytes.functional.int8_vectorwise_quant(w)
    with torch.no_grad():
        theirs = bitsandbytes.matmul(x.half(), w, state=state).float()
    for how, product in PRODUCTS.items():
        print(f"bitsandbytes' product is {(product(x, w.float()) - theirs).norm() / theirs.norm():.2%} from: {how}")
    packed_codes, _ = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    print("codes equal to ours: int8", torch.equal(int8.Int8Weight.of(w).codes, state.CB),
          "NF4", torch.equal(nf4.Nf4Weight.of(weight).packed.flatten(), packed_codes.flatten()))

# %% [markdown]
# ## 5. What it buys
#
# A served model holds **weights** and the **cache of keys and values**: each token leaves a key and a value in every layer, so that later
# tokens need not compute them again. `Serving` adds up published shapes; 4 bits stand in groups of 128 here, as in the published rows, the head included.

# %%
FOUR, THREE = published.stored_bits(4), published.stored_bits(3)
cards = {name: device(name).memory_bytes for name in ("RTX-4090", "A100-80GB", "H200")}
served = {f"{name}, 4 bits": Serving(model=name, bits=FOUR) for name in ("llama-2-7b", "llama-2-70b")}
contexts = [2**power for power in range(9, 16)]
show(draw_context_memory({name: {c: s.memory_bytes(8, c) for c in contexts} for name, s in served.items()}, cards,
                         title="Eight sequences: weights in 4 bits, a cache of 16 bits (predicted)",
                         weight_bytes={name: s.weight_bytes for name, s in served.items()}),
     alt="Memory over context for Llama-2 7B and 70B: a flat band of weights, and a cache that grows above it, beside three cards.")

# %% [markdown]
# **Read it.** The 7B's cache outgrows its weights early, the 70B's late: 64 of its heads share 8 keys and values (**grouped-query
# attention**). Few bits for weights leave the cache as it is; servers can keep it in fp8, half of 16 bits. (Llama-2 was trained on 4,096
# tokens; beyond them, the shape alone.)
#
# For one token of one reader, a GPU reads every weight once. It waits for its memory: **bandwidth over bytes bounds the rate**.
# Beside it, what gpt-fast published:

# %%
NAMES = {"Llama-2-7B": "llama-2-7b", "Llama-2-70B": "llama-2-70b",
         "Llama-3.1-8B": "llama-3-8b", "Llama-3.1-70B": "llama-3-70b"}


def served_as(row):
    group = int(row["group"]) if row["group"] else None
    return Serving(model=NAMES[row["model"]], bits=int(row["bits"]), group=group)


rates = table("gpt_fast_decode")
alone = [row for row in rates if row["gpus"] == "1"]
bound = [served_as(row).tokens_per_second("A100-80GB") for row in alone]
reached = [float(row["tokens_per_second"]) for row in alone]
show(draw_decoding([f"{row['model']}, {row['bits']} bits" for row in alone], bound, reached,
                   title="One sequence (batch 1) on an A100-80GB held to 330 W:\npublished tokens per second, and the bound"),
     alt="The bound on tokens per second from bytes, and published rates of gpt-fast, on an A100.")
print("published by gpt-fast:", source("gpt_fast_decode").partition(": 8 x ")[2].partition(";")[0])

# %% [markdown]
# **Read it.** A third of the bytes (gpt-fast's four bits keep a scale and a zero of 16 bits for each 32) is not three times
# the speed: the share of the bound falls with the bits.
#
# With a **batch** the weights are read once for all readers. Tokens per second grow until the cache is most of what is read, or the
# arithmetic takes longer than the reading:

# %%
for label, bits in {"16 bits": 16, "4 bits": FOUR}.items():
    batch = Serving(model="llama-2-7b", bits=bits).arithmetic_batch("A100-80GB")
    print(f"llama-2-7b, {label}: from {batch:.0f} sequences on, products in bf16 at an A100's peak (predicted)")

# %% [markdown]
# Beyond it only W8A8 helps: int8 on an A100, fp8 from Ada and Hopper on. The verdict, for eight sequences of 4,096 tokens; a card
# counts if a tenth of it stays free:

# %%
def verdict(model, bits, cache_bytes):
    s = Serving(model=model, bits=bits, cache_bytes=cache_bytes)
    fits = [card for card, room in cards.items() if s.memory_bytes(8, 4096) <= 0.9 * room]
    name, width = f"Llama-2-{model[8:].upper()}", {FOUR: 4, THREE: 3}.get(bits)
    cost = {16: "0%"}.get(bits, "not in the table")
    if width:
        cost = ", ".join(f"{way} {published.growth(name, width, way):+.1f}%" for way in ("AWQ", "nearest"))
    rate = f"{s.tokens_per_second(fits[0]):.0f}, {s.tokens_per_second(fits[0], 8, 4096):.0f}" if fits else ""
    return {"model": name, "weights": f"{bits:.2f} bits", "cache": f"{8 * cache_bytes} bits",
            "weights + cache": f"{format_bytes(s.weight_bytes)} + {format_bytes(8 * 4096 * s.cache_bytes_per_token)}",
            "smallest card": fits[0] if fits else "none of the three", "tokens/s at most: one reader, eight": rate,
            "perplexity (published)": cost if cache_bytes == 2 else cost + ", and the cache's"}


choices = [(16, 2), (8, 2), (FOUR, 2), (FOUR, 1), (THREE, 2)]
pd.DataFrame([verdict(model, *choice) for model in ("llama-2-7b", "llama-2-70b") for choice in choices]).set_index("model")

# %% [markdown]
# **Read it.** Four bits put 7B on a card of 24 GB and 70B on one of 80 GB. With eight readers of 7B the cache is most of what is read: there fp8 for
# it buys more speed than a third bit. 3 bits save little more and cost several times as much.
#
# | format | library | where it is fast |
# |---|---|---|
# | 4-bit weights: GPTQ, AWQ | GPTQModel, llm-compressor | any NVIDIA card since Turing, few readers |
# | W8A8 in int8 | llm-compressor, torchao | since Turing, many readers |
# | W8A8 and cache in fp8 | llm-compressor, vLLM | Ada, Hopper and later |
# | int8 by LLM.int8(), NF4 | bitsandbytes | for fitting and adapters, not for speed |
# | GGUF | llama.cpp | laptops, CPUs |
#
# ## Break it, diagnose it
#
# A colleague calibrates GPTQ at 2 bits on a hex dump. The report shows half the usual error, but the model is worse than
# without any text. Why?

# %%
digits = torch.tensor([ord(c) for c in "0123456789ABCDEF"])
hex_dump = digits[torch.randint(0, 16, (32, 128), generator=torch.Generator().manual_seed(0))]
print(f"nearest, no text: perplexity {losses['nearest-2'].mean().exp():.2f}")
for name, text in {"Python sources": calibration_tokens(), "a hex dump": hex_dump}.items():
    few = copy.deepcopy(model)
    report = quantize_weights(few, text, METHODS["GPTQ-2"])
    reported = sum(row.relative_error for row in report) / len(report)
    print(f"GPTQ, calibrated on {name:<14}: reported error {reported:.1%}, perplexity {sequence_losses(few, held_out).mean().exp():.2f}")

# %% [markdown]
# **Diagnose it.** The reported error is that on the calibration text itself, where the errors were made to cancel. Measure on text that the model will read.
#
# ## Recap
#
# - Rounding costs a few percent of perplexity at 4 bits, several times that at 3; below, the model breaks.
# - GPTQ makes errors cancel, AWQ widens what large channels multiply. A layer's error is a proxy: only the loss, on your text, decides between them.
# - Bandwidth over bytes bounds the rate of one reader; with many, the cache and the arithmetic do.
#
# **Next** the [lab](../../labs/intermediate/08_smaller_weights.ipynb), its
# [solution](../../solutions/intermediate/08_smaller_weights.ipynb), and [lesson 09](09_sharding.ipynb).
#
# **References.** The papers stand where they are used; [gpt-fast](https://github.com/meta-pytorch/gpt-fast).

# %% [markdown]
# ## On Monday
#
# **First ask what it would cost**, without any text or package. `model` is yours, `batch` some hundred texts of those it will *read*,
# `loss_of(model, batch)` its loss. The model is rounded in place, so load it again after.
#
# ```python
# import math
#
# import torch
#
# bits, group, done = 4, 128, 0
# model.eval()  # no dropout in either arm
# with torch.no_grad():
#     before = float(loss_of(model, batch))
#     for name, layer in model.named_modules():
#         if isinstance(layer, torch.nn.Linear) and layer.in_features % group == 0 and not name.endswith("head"):
#             parts = layer.weight.float().view(-1, group)
#             low, high = parts.amin(1, keepdim=True).clamp(max=0), parts.amax(1, keepdim=True).clamp(min=0)
#             scale = ((high - low) / (2**bits - 1)).clamp(min=1e-6)
#             zero = (-low / scale).round()
#             codes = ((parts / scale).round() + zero).clamp(0, 2**bits - 1)
#             layer.weight.copy_((scale * (codes - zero)).view_as(layer.weight))
#             done += layer.weight.numel()
#     cost = float(loss_of(model, batch)) - before
# share = done / sum(p.numel() for p in model.parameters())
# print(f"{bits} bits for {share:.0%} of the weights: perplexity {100 * math.expm1(cost):+.2f}%")
# ```
#
# If the share is small, other matrices are no `nn.Linear` (GPT-2's `Conv1D`, fused experts).
#
# **Then GPTQ, saved, reloaded and measured.** `model_name` is a folder or a name on the Hub, `calibration` and `held_out` are lists of texts, some
# hundred each, that share none. Groups of 128 are what the published rows use, and GPTQModel's default, as is a symmetric grid.
#
# ```python
# import math
# import statistics
#
# import torch
# from gptqmodel import GPTQModel, QuantizeConfig
# from transformers import AutoModelForCausalLM, AutoTokenizer
#
# tokenizer = AutoTokenizer.from_pretrained(model_name)
#
#
# @torch.no_grad()
# def losses(model):
#     texts = [tokenizer(text, return_tensors="pt").input_ids.to(model.device) for text in held_out]
#     return [model(input_ids=ids, labels=ids).loss.item() for ids in texts]
#
#
# before = losses(AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float16, device_map="auto"))
# few = GPTQModel.load(model_name, QuantizeConfig(bits=4, group_size=128))
# few.quantize(calibration[:256])
# few.save(folder)
# more = [b - a for a, b in zip(before, losses(GPTQModel.load(folder).model))]
# print(f"perplexity {100 * math.expm1(statistics.mean(more)):+.2f}%, "
#       f"standard error {100 * statistics.stdev(more) / len(more) ** 0.5:.2f}, {len(more)} texts")
# ```
#
# Serve it: `vllm serve folder`, on Ada or Hopper with `--kv-cache-dtype fp8`. 175B took GPTQ's authors about four hours on one GPU (published).
#
# `BitsAndBytesConfig(load_in_8bit=True)` in `from_pretrained` fits a model without calibration, and is slow:
# [its author](https://github.com/bitsandbytes-foundation/bitsandbytes/issues/490) made those kernels for training.
#
# *Does your own model fit, and what would make it fit? [Ask here](../00a_your_model.ipynb).*
