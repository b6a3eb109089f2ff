# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 Tensor and sequence parallelism
#
# {{badges}}
#
# **Promise.** You split every matrix of a transformer over four ranks, by hand and with PyTorch's DTensor, and train
# 20 steps with the losses of one process to nine digits. You count what a layer sends and what each rank keeps, set
# both beside the papers' formulas, and explain them to the byte.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 70 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# Four ranks share every matrix of a layer. One GPU alone would keep 100% of the layer's activations for backward. How
# many percent does each of the four ranks keep? Write your guess. Section 5 measures.

# %%
my_bet_percent = 25

# %% tags=["setup"]
here = setup("advanced/12")

# %%
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from utils import Batch, Cluster, Evidence, Plan, Span, Transformer, TransformerConfig, check
from utils import draw_lanes, model_shape, run_ranks, score, scoreboard, show, simulate, traffic
from utils.catalog import SUSTAINED, link
from utils.parallel import ParallelDims, device_mesh, split_tensors
from utils.parallel.tensor_shares import own_head_rows
from utils.planner.step_time.block_time import block_time
from utils.planner.calibration import BESIDE_TRAINING
from utils.lessons.lesson_12.gpt import GPTBlock
from utils.lessons.lesson_12.megatron import megatron_layers, megatron_problem
from utils.lessons.lesson_12.tensor_flow import Exchange, Held, draw_kept, draw_tensor_flow
from utils.lessons.lesson_12.tensor_layers import Split, columns, rows, vocabulary_cross_entropy
from utils.lessons.lesson_12.tensor_split import split_layers
from evidence.validation.tables import source, table

RANKS = 4

# %% [markdown]
# ## What you will be able to do
#
# - Write column- and row-parallel layers, and say where ranks must talk, and why only there.
# - Predict bytes sent and bytes kept of a layer, with and without sequence parallelism.
# - Split a model with `parallelize_module`, and find out what its plan really sends.
# - Say why tensor parallelism stays inside a node.
#
# On the map: it cuts **memory** of states *and* activations, and pays with **communication** inside every layer.
# Lesson 09 shared *states* among ranks that compute different data. Here ranks share the computing of the *same* data.
# New words stand in the [glossary](../00_glossary.ipynb).

# %%
TENSOR = [Held("x", "whole"), Held("Y = gelu(x A)", "channels"), Held("Y B", "partial"),
          Exchange("all-reduce"), Held("sum", "whole"), Held("dropout, norm", "whole")]
SEQUENCE = [Held("x", "sequence"), Exchange("all-gather"), Held("x", "whole"), Held("Y = gelu(x A)", "channels"),
            Held("Y B", "partial"), Exchange("reduce-scatter"), Held("sum", "sequence"),
            Held("dropout, norm", "sequence")]
show(draw_tensor_flow({"tensor\nparallel": TENSOR, "and sequence\nparallel": SEQUENCE},
                      title="A feed-forward layer on four ranks, forward, from left to right"),
     alt="Four ranks in two schemes. Tensor parallel: each has the whole input, a quarter of the channels inside, a "
     "term of the output; an all-reduce gives all of them the sum. With sequence parallelism each has a quarter of "
     "the sequence outside, gathered before and reduce-scattered after.")

# %% [markdown]
# ## 1. Two matrices, one sum
#
# A feed-forward layer is $z = \mathrm{gelu}(x A)\,B$. Cut $A$ by **columns**: each rank computes some channels of the
# inside, and GELU works on each channel by itself. Cut $B$ by **rows**, the same channels: each rank has a term of the
# sum $z$. So forward needs one sum over the ranks, at the end. Megatron calls it $g$. Backward mirrors it: each
# rank's share of $A$ gives a term of the gradient of $x$, so one sum, at the layer's beginning. Megatron calls it $f$
# ([Shoeybi and others 2019](https://arxiv.org/abs/1909.08053), section 3). Both in 20 lines:

# %%
class CopyIn(torch.autograd.Function):
    """f: forward nothing, backward a sum over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


# %%
class SumOut(torch.autograd.Function):
    """g: forward a sum over the ranks, backward nothing."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# %%
def mine(tensor, dim):
    """This rank's part of a whole matrix."""
    return tensor.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone().requires_grad_()


def split_feedforward(A, B, x):  # nn.Linear keeps its matrix turned: (outputs, inputs)
    inside = F.gelu(F.linear(CopyIn.apply(x), A))
    return SumOut.apply(F.linear(inside, B))


# %% [markdown]
# **Predict.** The *stream* is what flows from layer to layer: $s$ positions, $b$ sequences, $h$ channels. One sum of it
# forward and one backward are $2 \cdot s\,b\,h$ numbers, here of 8 bytes.
# Gradients of $A$ and $B$ stay where their parts are.

# %%
S, B, H = 16, 2, 32  # sequence, batch, hidden; the text's matrix B is C here


def feedforward_on_rank():
    torch.manual_seed(0)
    A, C = torch.randn(4 * H, H, dtype=torch.float64), torch.randn(H, 4 * H, dtype=torch.float64)
    x = torch.randn(S, B, H, dtype=torch.float64)
    whole = [t.clone().requires_grad_() for t in (A, C, x)]
    wanted = F.linear(F.gelu(F.linear(whole[2], whole[0])), whole[1])
    wanted.square().sum().backward()
    part = [mine(A, 0), mine(C, 1), x.clone().requires_grad_()]
    with traffic() as sent:
        found = split_feedforward(*part)
        found.square().sum().backward()
    pairs = [(found, wanted), (part[0].grad, mine(whole[0].grad, 0)),
             (part[1].grad, mine(whole[1].grad, 1)), (part[2].grad, whole[2].grad)]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs), str(sent), sent.payload_bytes


# %%
apart, lines, found = run_ranks(feedforward_on_rank, RANKS)[0]
print(f"output and three gradients: {apart:.0e} from one process, in fp64")
print(f"{lines}; predicted {2 * S * B * H * 8:,} bytes, counted {found:,}")
assert apart < 1e-9, "the split layer computes something else: is every sum there, forward and backward?"
assert found == 2 * S * B * H * 8, "a sum too many or too few: one in f, one in g"

# %% [markdown]
# **Question.** Someone cuts $A$ by rows and $B$ by columns instead. Every rank holds the whole $x$ at first, and
# shall hold the whole $z$ at last. How many collectives does *forward* need?

# %%
collectives_the_other_way = ...
check("12.other_way", collectives_the_other_way)

# %% [markdown]
# ## 2. Attention by heads
#
# Heads are to attention what channels are to GELU: each works by itself. So queries, keys and values are cut by
# columns, **whole heads at a time**, and the output matrix by rows. Again one $f$ and one $g$. A layer then makes four
# sums of the stream: two forward, two backward.
#
# With grouped queries there can be fewer key-value heads, $K$, than ranks. Then several ranks hold a **copy** of the
# one that their query heads share. Each copy sees a part of its gradient: these must be added up over the copies.
# (Megatron-Core 0.16 gathers all projections instead, and holds no copies.)

# %%
def attention(layer, x, own, f, g):
    """With the rows `own` of each projection; f and g stand where the ranks meet."""
    x = f(x)
    q, k, v = (F.linear(x, getattr(layer, name).weight[rows_of]).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
               for name, rows_of in own.items())
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return g(F.linear(mixed.transpose(1, 2).flatten(2), layer.output.weight[:, own["query"]]))


def layer_of(heads, kv_heads):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(hidden=16 * heads, heads=heads, kv_heads=kv_heads, layers=1)).double().blocks[0].attention


# %%
def attention_on_rank():
    layer, names = layer_of(heads=4, kv_heads=2), ("query", "key", "value")
    x = torch.randn(B, S, 64, dtype=torch.float64)
    own = {name: own_head_rows(layer, name, dist.get_rank(), RANKS) for name in names}
    wanted = attention(layer, x, {name: slice(None) for name in names}, nn.Identity(), nn.Identity())
    wanted.square().sum().backward()
    right, layer.key.weight.grad = layer.key.weight.grad[own["key"]], None
    found = attention(layer, x, own, CopyIn.apply, SumOut.apply)
    found.square().sum().backward()
    alone, total = layer.key.weight.grad[own["key"]].clone(), layer.key.weight.grad
    dist.all_reduce(total)  # zero where a rank has no copy
    gaps = [((a - b).norm() / b.norm()).item() for a, b in ((found, wanted), (alone, right), (total[own["key"]], right))]
    return {name: sorted({row // 16 for row in range(spot.start, spot.stop)}) for name, spot in own.items()}, gaps


# %%
for rank, (heads, gaps) in enumerate(run_ranks(attention_on_rank, RANKS)):
    print(f"rank {rank}: query head {heads['query'][0]}, a copy of key-value head {heads['key'][0]}; output {gaps[0]:.0e} from one",
          f"process, gradient of its key {100 * gaps[1]:.0f}% off alone, {gaps[2]:.0e} added up")
    assert gaps[0] < 1e-9 and gaps[2] < 1e-9 < gaps[1], "outputs are whole, gradients of copies are parts"
for heads, kv_heads in ((6, 6), (12, 3)):
    try:
        own_head_rows(layer_of(heads, kv_heads), "key", 0, RANKS)
    except ValueError as error:
        print(f"{heads} heads, {kv_heads} key-value heads: {error}")

# %% [markdown]
# ## 3. A loss without logits
#
# The output head is the widest matrix. Cut by columns, each rank has the logits of some *words*. To gather them would
# send a whole vocabulary for each token. The loss $\ell$ of a token needs three numbers: the largest logit $m$ (so that
# nothing overflows), the sum of exponentials, and the logit of the target, which one rank has:
#
# $$\ell = \log \sum_w e^{z_w - m} + m - z_{\text{target}}$$

# %%
def split_cross_entropy(logits, targets):
    first = dist.get_rank() * logits.shape[-1]
    top = logits.detach().amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    total = SumOut.apply((logits - top[..., None]).exp().sum(-1))
    here = (targets >= first) & (targets < first + logits.shape[-1])
    place = (targets - first).clamp(0, logits.shape[-1] - 1)
    picked = logits.gather(-1, place[..., None])[..., 0]
    return total.log() + top - SumOut.apply(torch.where(here, picked, 0.0))


# %%
WORDS, TOKENS = 32_000, 64


def loss_on_rank():
    torch.manual_seed(0)
    logits, targets = torch.randn(TOKENS, WORDS, dtype=torch.float64), torch.randint(WORDS, (TOKENS,))
    whole, part = logits.clone().requires_grad_(), mine(logits, 1)
    F.cross_entropy(whole, targets).backward()
    with traffic() as sent:
        loss = split_cross_entropy(part, targets).mean()
        loss.backward()
    apart = (part.grad - mine(whole.grad, 1)).norm() / whole.grad.norm()
    return loss.item() - F.cross_entropy(logits, targets).item(), apart.item(), sent.payload_bytes


# %%
loss_apart, apart, found = run_ranks(loss_on_rank, RANKS)[0]
print(f"loss {loss_apart:.0e} and gradient {apart:.0e} from one process")
print(f"put in: {found:,} bytes, {found // TOKENS // 8} numbers a token; gathering logits: {TOKENS * WORDS // RANKS * 8:,} bytes")
assert apart < 1e-9 and found == 3 * TOKENS * 8, "three numbers a token: a maximum, a sum, a target"

# %% [markdown]
# ## 4. The whole model, two ways
#
# `split_layers(model)` does sections 1 to 3 to a whole transformer. It cuts the embedding by words, too, and refuses
# what does not divide. Its code is `sources/advanced/12_tensor_parallel/tensor_layers.py`.
#
# **DTensor** needs no code but a plan: which layer is cut which way. This plan is written as
# [PyTorch's tutorial](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html) begins:

# %%
def tutorial_plan(model, mesh):
    ends = {"embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(model, mesh, ends)
    by_columns = ("attention.query", "attention.key", "attention.value", "feedforward.gate", "feedforward.up")
    for block in model.blocks:
        parallelize_module(block, mesh, {name: ColwiseParallel() for name in by_columns})
        parallelize_module(block, mesh, {n: RowwiseParallel() for n in ("attention.output", "feedforward.down")})


# %% [markdown]
# The training loop is the same for all. Logits come out as a DTensor with some words on each rank, and
# `loss_parallel()` lets `F.cross_entropy` work on them without gathering: section 3, as a library call.

# %%
LLAMA = TransformerConfig(vocabulary=64, hidden=32, layers=2, heads=4, kv_heads=4, feedforward=96)


def train(model, steps, shared=None):
    optimizer, losses, counted = torch.optim.SGD(model.parameters(), lr=0.1), [], None
    for step in range(steps):
        tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with traffic() as sent, loss_parallel():
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            if shared:
                shared.add_up()
        optimizer.step()
        losses.append(loss.full_tensor().item() if isinstance(loss, DTensor) else loss.item())
        counted = counted or sent.rows
    return losses, {row.collective: (row.calls, row.payload_bytes) for row in counted}


# %%
def loss_of(logits, targets):
    if isinstance(logits, DTensor) or logits.shape[-1] == LLAMA.vocabulary:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return vocabulary_cross_entropy(logits, targets).mean()


# %%
def fresh(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    model = Transformer(replace(LLAMA, **changes))
    model.init_weights(std=0.1)
    return model.to(dtype)


def run(way, layers, dtype, steps):
    model = fresh(dtype, layers=layers)
    sequence, mesh = "sequence" in way, init_device_mesh("cpu", (dist.get_world_size(),))
    if way.startswith("by hand"):
        return train(model, steps, split_layers(model, sequence_dim=1 if sequence else None))
    if way == "tutorial's plan":
        tutorial_plan(model, mesh)
    elif way.startswith("DTensor"):
        split_tensors(model, mesh, sequence=sequence)
    return train(model, steps)


# %%
WAYS = ["by hand", "tutorial's plan", "DTensor", "by hand, sequence", "DTensor, sequence"]


def all_ways(layers, dtype, steps=20):
    return {way: run(way, layers, dtype, steps) for way in WAYS}


one = {dtype: run_ranks(run, 1, "one process", 2, dtype, 20)[0][0] for dtype in (torch.float64, torch.float32)}
two_layers = run_ranks(all_ways, RANKS, 2, torch.float64)[0]
single = run_ranks(all_ways, RANKS, 2, torch.float32)[0]
three_layers = run_ranks(all_ways, RANKS, 3, torch.float64, 1)[0]  # one step: for the bytes


# %%
def apart_from(losses, wanted):
    return max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True))


print(f"{'losses of 20 steps, four ranks':<32} fp64   fp32   from one process")
for way in WAYS:
    double, simple = (apart_from(found[way][0], one[dtype])
                      for found, dtype in ((two_layers, torch.float64), (single, torch.float32)))
    print(f"{way:<32} {double:.0e}  {simple:.0e}")
    assert double < 1e-9 and simple < 1e-5, f"{way} trains another model: is a sum missing?"

# %% [markdown]
# Now the bytes. A model of three layers and one of two differ by a layer. **Predict:** four sums of the stream,
# $4 \cdot s\,b\,h$ numbers of 8 bytes, for all ways without a split sequence.

# %%
STREAM = 2 * 16 * 32 * 8  # b, s, h, bytes


# %%
def per_layer(way):
    more, less = three_layers[way][1], two_layers[way][1]
    return {kind: tuple(a - b for a, b in zip(more[kind], less[kind], strict=True)) for kind in more}


for way in WAYS[:3]:
    calls, size = per_layer(way)["all-reduce"]
    print(f"{way:<18} {calls} all-reduces, {size:,} bytes a layer: {size / STREAM:g} streams (counted), 4 predicted")
assert [per_layer(way)["all-reduce"][1] / STREAM for way in WAYS[:3]] == [4, 7, 4], "bytes of a layer: see the plans"

# %% [markdown]
# **Read it.** The tutorial's plan gives the right losses and sends 7 streams instead of 4. Query, key and value each take the
# plain tensor and each send its gradient back: three sums for one $f$; gate and up two. `split_tensors` adds one entry
# for each half of the block. It makes the input **one** DTensor for all its matrices, and their gradients are added
# before they travel:
#
# ```python
# "attention": PrepareModuleInput(input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)),
# "feedforward": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
# ```
#
# **Question.** Llama-2-70B has $h = 8192$. A rank trains on one sequence of 4,096 tokens, in bf16. How many MB
# ($10^6$ bytes) does one layer put into all-reduces in a step, by the plan that sends 4 streams?

# %%
mb_per_layer = ...
check("12.mb_per_layer", mb_per_layer)

# %% [markdown]
# ## 5. Sequence parallelism
#
# Between the matrices stand dropout, norms and residuals. So far every rank computes them **whole**, and keeps
# them whole for backward. But they work on each token by itself. So let each rank have a part of the *sequence*
# there ([Korthikanti and others 2022](https://arxiv.org/abs/2205.05198), section 4.2.2). An all-reduce is
# a reduce-scatter followed by an all-gather. Put the first after the matrices, the second before the next ones, and
# the bytes are the same.
#
# The column side, by hand. It has one more idea: it keeps its *part* of $x$ and **gathers again** in
# backward. The row side is yours to write, in the lab.

# %%
class GatherIn(torch.autograd.Function):
    """x A with x cut along the sequence (S, B, H) and A by columns."""

    @staticmethod
    def forward(ctx, x, A):
        ctx.save_for_backward(x, A)  # not the gathered one
        return F.linear(gathered(x), A)

    @staticmethod
    def backward(ctx, gradient):
        x, A = ctx.saved_tensors
        to_x = torch.empty_like(x)
        dist.reduce_scatter_tensor(to_x, gradient @ A)  # f's sum; each rank gets its part
        return to_x, gradient.flatten(0, 1).T @ gathered(x).flatten(0, 1)


def gathered(x):
    whole = x.new_empty(len(x) * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x)
    return whole


# %%
def columns_on_rank():
    torch.manual_seed(0)
    A, x = torch.randn(4 * H, H, dtype=torch.float64), torch.randn(S, B, H, dtype=torch.float64)
    all_of_x, all_of_A = (t.clone().requires_grad_() for t in (x, A))
    F.linear(all_of_x, all_of_A).square().sum().backward()
    part_of_x, part_of_A = mine(x, 0), mine(A, 0)
    GatherIn.apply(part_of_x, part_of_A).square().sum().backward()
    pairs = (part_of_x.grad, mine(all_of_x.grad, 0)), (part_of_A.grad, mine(all_of_A.grad, 0))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


apart = max(run_ranks(columns_on_rank, RANKS))
print(f"gradients of a rank's part of x, and of A: {apart:.0e} from one process")
assert apart < 1e-9, "is the gradient of x summed over the ranks, and A's made with all of x?"

# %% [markdown]
# ### What a rank keeps
#
# A GPT layer in 16 bits keeps $sbh\,(34 + 5as/h)$ bytes: the paper goes through it tensor by tensor, and `GPTBlock` is
# written to keep just those. $a$ heads; the second term is attention's scores. On $t$ ranks:
#
# | | bytes | equation |
# |---|---|---|
# | one GPU | $sbh\,(34 + 5as/h)$ | 1 |
# | tensor parallel | $sbh\,(10 + 24/t + 5as/(ht))$ | 2 |
# | and sequence parallel | $sbh\,(34/t + 5as/(ht))$ | 4 |
#
# The 10: two norm inputs, two inputs of column matrices, at 2 bytes, and two dropout masks at 1.

# %%
LENGTH, BATCH, HIDDEN, HEADS = 128, 2, 128, 4
sbh = LENGTH * BATCH * HIDDEN
scores = 5 * HEADS * LENGTH / HIDDEN


# %%
def kept_bytes(block, x):
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in own)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(x).sum().backward()
    return sum(kept.values())


# %%
def kept_on_rank(sequence):
    part = nn.Module()
    part.blocks, part.embed, part.norm, part.head = nn.ModuleList([GPTBlock(HIDDEN, HEADS)]), None, None, None
    part.bfloat16()
    split_layers(part, sequence_dim=0 if sequence else None)
    length = LENGTH // dist.get_world_size() if sequence else LENGTH
    return kept_bytes(part.blocks[0], torch.randn(length, BATCH, HIDDEN, dtype=torch.bfloat16, requires_grad=True))


# %%
kept = {"one GPU": run_ranks(kept_on_rank, 1, False)[0],
        "tensor parallel": run_ranks(kept_on_rank, RANKS, False)[0],
        "and sequence parallel": run_ranks(kept_on_rank, RANKS, True)[0]}
t = RANKS
formula = {"one GPU": {"norms, inputs, masks": 10, "inside": 24, "scores": scores},
           "tensor parallel": {"norms, inputs, masks": 10, "inside": 24 / t, "scores": scores / t},
           "and sequence parallel": {"norms, inputs, masks": 10 / t, "inside": 24 / t, "scores": scores / t}}

# %%
for way, terms in formula.items():
    predicted = sbh * sum(terms.values())
    beside = LENGTH**2 + 8 * LENGTH * BATCH // (t if "sequence" in way else 1)
    print(f"{way:<22} {kept[way]:>9,} bytes measured = {predicted:>11,.0f} by the formula + {beside:,} beside it",
          f"  {100 * kept[way] / kept['one GPU']:.0f}%")
    assert kept[way] == predicted + beside, f"{way}: the layer keeps something that the paper does not count"
print(f"your bet: {my_bet_percent}%")
figure = draw_kept(kept, {way: {k: sbh * v for k, v in terms.items()} for way, terms in formula.items()},
                   title="Activations of one layer on one rank", device="cpu")
show(figure, alt="Bytes kept by one rank: one GPU most; on four ranks the term of norms, inputs and masks stays whole "
     "until the sequence is split, too.")

# %% [markdown]
# **Read it.** Exact, but for what the paper leaves out as small: the norms' statistics (8 bytes a token) and the mask
# of causal attention (a byte a pair). Tensor parallel keeps far more than a quarter: the 10 is not divided. With flash
# attention the scores go away and the 10 weighs more: at $t = 8$ a rank keeps $13/34$, 38%. **With sequence parallelism
# that gathers again the quarter is true**, but for that mask.
#
# ### What a rank sends
#
# Over a ring of $N$ ranks an all-reduce of $W$ bytes sends $2(N-1)/N \cdot W$ a rank, a reduce-scatter or
# all-gather half of that. (The *payload* of an all-gather is one rank's part.)

# %%
def ring_bytes(found):
    share = {"all-reduce": 2 * (RANKS - 1) / RANKS, "reduce-scatter": (RANKS - 1) / RANKS, "all-gather": RANKS - 1}
    return sum(share[kind] * size for kind, (_, size) in found.items())


over_a_ring = {}
for way in ("by hand", "DTensor, sequence", "by hand, sequence"):
    made = {kind: row for kind, row in per_layer(way).items() if row[0]}  # a call more with a layer more
    over_a_ring[way] = ring_bytes(made)
    print(f"{way:<18} {over_a_ring[way]:>9,.0f} bytes over a ring a layer:",
          ", ".join(f"{calls} x {kind}" for kind, (calls, _) in made.items()),
          f"  {100 * (over_a_ring[way] / over_a_ring['by hand'] - 1):+.0f}%")
assert over_a_ring["DTensor, sequence"] == over_a_ring["by hand"], "an all-reduce is a reduce-scatter and an all-gather"

# %% [markdown]
# **Read it.** DTensor sends what the all-reduces sent, and keeps the gathered inputs ($sbh \cdot 4$ bytes of the 10, not
# divided): it does not gather again. Megatron's way keeps only its part and gathers again, twice a layer: ten collectives of
# half an all-reduce each, where DTensor sends eight. Megatron hides them behind products. Memory or bytes: you choose
# again. (Sums of the norms' gradients are not in these counts.)
#
# The plan of `split_tensors` for this, on top of section 4's:
#
# ```python
# "attention_norm": SequenceParallel(), "feedforward_norm": SequenceParallel(),
# "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
# "attention.output": RowwiseParallel(output_layouts=Shard(1)),  # and so for the feed-forward
# ```
#
# **The trap.** A norm's weight is whole on every rank, and now each rank sees only its part of the tokens, so
# only a part of the gradient. These gradients must be added up over the ranks: `shared.add_up()` above, Megatron's
# `finalize_model_grads`. Without it nothing fails at once. "Break it" shows how it looks.
#
# ## 6. Megatron-Core's own layers
#
# What Megatron-LM trains with, as a library. Ours and theirs on the same weights, two ranks, fp64:

# %%
def beside_megatron(sequence):
    n, rank = dist.get_world_size(), dist.get_rank()
    A, C, x = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
               for shape in ((64, 32), (32, 64), (8, 2, 32)))
    x = (x.chunk(n)[rank] if sequence else x).clone().requires_grad_()
    with megatron_layers() as layers:
        from megatron.core import ModelParallelConfig

        config = ModelParallelConfig(tensor_model_parallel_size=n, sequence_parallel=sequence,
                                     use_cpu_initialization=True, params_dtype=torch.float64)
        make = {"config": config, "init_method": nn.init.zeros_, "bias": False, "skip_bias_add": False}
        up = layers.ColumnParallelLinear(32, 64, gather_output=False, **make)
        down = layers.RowParallelLinear(64, 32, input_is_parallel=True, **make)
        up.weight.data, down.weight.data = A.chunk(n)[rank].clone(), C.chunk(n, 1)[rank].clone()
        out, _ = down(F.gelu(up(x)[0]))
        out.square().sum().backward()
    return [out.detach(), x.grad, up.weight.grad, down.weight.grad]


# %%
def beside_ours(sequence):
    n, rank, split = dist.get_world_size(), dist.get_rank(), Split(sequence_dim=0 if sequence else None)
    A, C, x = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
               for shape in ((64, 32), (32, 64), (8, 2, 32)))
    x = (x.chunk(n)[rank] if sequence else x).clone().requires_grad_()
    up, down = nn.Linear(32, 64, False), nn.Linear(64, 32, False)
    up.weight, down.weight = nn.Parameter(A.chunk(n)[rank].clone()), nn.Parameter(C.chunk(n, 1)[rank].clone())
    out = rows(down, split, F.gelu(columns([up], split, x)[0]))
    out.square().sum().backward()
    return [out.detach(), x.grad, up.weight.grad, down.weight.grad]


# %%
def both(worker):
    return [worker(sequence) for sequence in (False, True)]


print(megatron_problem() or "Megatron-Core is installed")
if not megatron_problem():
    theirs, ours = (run_ranks(both, 2, worker)[0] for worker in (beside_megatron, beside_ours))
    for name, one_way, other in zip(("tensor parallel", "and sequence"), theirs, ours, strict=True):
        gap = max(((a - b).norm() / b.norm()).item() for a, b in zip(one_way, other, strict=True))
        print(f"{name:<16} output and three gradients {gap:.0e} apart")
        assert gap < 1e-9, "Megatron's layers and ours compute different things"

# %% [markdown]
# Megatron-LM's arguments for all of this, beside those of the model:
#
# ```
# export CUDA_DEVICE_MAX_CONNECTIONS=1   # kernels start in the order of launch, so that sends begin early
# --tensor-model-parallel-size 8 --sequence-parallel --tp-comm-overlap
# ```
#
# ## 7. Real size
#
# Two layers of Llama-2-70B's shape over 8 simulated ranks, with the sequence split: the same `split_layers`. The
# planner counts by formula. Do they agree?

# %%
SHAPE = model_shape("llama-2-70b")
LAYERS = 2
seventy = TransformerConfig.from_shape(SHAPE, layers=LAYERS)
made = {}


def build():
    mesh = device_mesh(ParallelDims(tp=8), "cpu")
    model = Transformer(seventy).to(torch.bfloat16)
    made["group"] = mesh.get_group("tp")
    made["shared"] = split_layers(model, made["group"], sequence_dim=1)
    return model, None


def step(model, _):
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    loss = vocabulary_cross_entropy(model(tokens).float(), tokens, made["group"])
    loss.mean().backward()
    made["shared"].add_up()


# %%
from utils.lessons.lesson_12.tensor_traffic import tensor_traffic

seen = simulate(build, step, device="A100 80GB", world=ParallelDims(tp=8), name="two layers of 70B, TP 8")
plan, batch = Plan(tp=8, sequence_parallel=True), Batch(sequences=1, sequence_length=4096)
planned = tensor_traffic(replace(SHAPE, layers=LAYERS, published_count=None), plan, batch)
for row in seen.traffic:
    if not row.at_startup:
        print(f"simulated: {row}")
for kind, size in planned.items():
    counted = sum(r.payload_bytes for r in seen.traffic if r.collective == kind and not r.at_startup)
    print(f"{kind:<15} planned {size:>13,.0f} bytes, simulated {counted:>13,}")
    assert size == counted, f"planner and simulation disagree about {kind}"

# %% [markdown]
# **Read it.** They agree. 8 reduce-scatters and 12 all-gathers are the two layers'; embedding and head make the other
# five. The loss puts in its three numbers a token. The last row adds up the gradients of five norms.
#
# Now the formula of section 5 against the paper's own models, 22 billion to 1 trillion parameters. *Selective*
# recomputation computes attention's inside again, so the scores go. In a pipeline of $p$ stages the first stage keeps
# activations of $p$ micro-batches: as much as the whole model keeps of one. With an interleaved
# schedule, $m > 1$ chunks a stage, it is $1 + (p-1)/(pm)$ times that (their section 4.2.3;
# [lesson 13](13_pipelines.ipynb) draws why, and writes $v$ for $m$).

# %%
print(source("korthikanti_figure1").partition(" (")[0])
sizes = {row["model"]: row for row in table("korthikanti_table5")}
for row in table("korthikanti_figure1"):
    it = sizes[row["model"]]
    b, h, a, layers, t, p, m = (int(it[k]) for k in ("micro_batch", "hidden", "heads", "layers", "tp", "pp", "interleave"))
    whole = 2048 * b * h * layers * (1 + (p - 1) / (p * m) if m > 1 else 1)
    tensor, selective = whole * (10 + 24 / t + 5 * a * 2048 / h / t), whole * 34 / t
    print(f"{row['model']:>5}: tensor parallel {tensor / 2**30:6.2f} GiB predicted, {float(row['fig1_act_none_gib']):6.2f} published;",
          f"with sequence and selective {selective / 2**30:5.2f} predicted, {float(row['fig1_act_seqsel_gib']):5.2f} published")

# %% [markdown]
# **Read it.** Equal to the last digit: the paper's bars are computed, too. So this checks our reading of the formula, at full
# size; section 5 checked the formula on a real rank.
#
# ## 8. Why it stays inside a node
#
# A layer needs four sums, and in the forward pass the GPU has nothing else to do while one is under way: the next product
# needs it. In backward, some travel beside the product of a weight's gradient. Inside
# a node of A100s each GPU sends by NVLink. Between nodes the best machines give each GPU a port of its own, 8 a node; in
# others one port serves the node. The planner predicts one layer of 175B, forward and backward, at what collectives reach
# of the line rate (`catalog.SUSTAINED`, by kind of link, and less beside a step's other kernels):

# %%
BIG, PORT = model_shape("gpt-3-175b"), link("InfiniBand HDR").link_bytes_per_second
print(f"NVLink {link('NVLink 3').link_bytes_per_second / 1e9:.0f} GB/s a GPU, InfiniBand {PORT / 1e9:.0f} GB/s a port (published)")
for kind in ("NVLink 3", "InfiniBand"):
    print(f"alone, collectives reach {SUSTAINED[kind].share:.0%} of {kind}, in training {BESIDE_TRAINING:.0%} of that")
lanes = {}
print(f"{'ranks':<24} products   other kernels   communication   in all   GPUs x time")
for tp, ports in ((2, 8), (4, 8), (8, 8), (16, 8), (16, 1)):
    machine = Cluster(gpu="A100 80GB", nodes=8, network_bytes_per_second=ports * PORT, network_ports=ports)
    plan = Plan(tp=tp, dp=64 // tp, sequence_parallel=True)
    times = block_time(BIG, machine, plan, Batch(sequences=64, sequence_length=2048))
    passed = times.forward + times.backward
    parts = {"products": passed.matmul, "other kernels": passed.memory, "communication": passed.communication}
    name = f"TP {tp}" + (f", {ports} port{'s' * (ports > 1)} a node" if tp > 8 else "")
    print(f"{name:<24}" + "".join(f"{1e3 * seconds:>10.2f} ms" for seconds in [*parts.values(), passed.total]),
          f"{1e3 * tp * passed.total:>9.0f} ms (predicted)")
    edges = [0.0, passed.matmul, passed.matmul + passed.memory, passed.total]
    lanes[name] = [Span(kind, *edges[i : i + 2]) for i, kind in enumerate(parts)]

# %%
show(draw_lanes(lanes, title="A layer of 175B, forward and backward, nodes of 8 A100", evidence=Evidence.PREDICTED),
     alt="Predicted time of a layer: products halve with each doubling of the ranks; communication is small up to 8 "
     "ranks, half as long as the products for 16 with a port a GPU, and over three times as long with one port a node.")

# %% [markdown]
# **Read it.** From 2 to 8 ranks the layer is over three times as fast on four times the GPUs. With 16 and eight
# ports a node, a third of the time is sending; the last column shows what that costs. With one port, 16 ranks take about
# as long as 4. Pipeline and data parallelism send less often: they take the slow links
# ([lesson 14](14_three_dimensions.ipynb)).
#
# **"TP = 8, always"** is folklore, though. More ranks make thinner products, and each sends no less. BLOOM's team
# measured the same model both ways on the same day:

# %%
print(source("bloom_prequel").partition("@")[0])
for row in table("bloom_prequel"):
    if (row["section"], row["size_label"], row["pp"]) == ("Re-do", "182B", "6"):
        print(f"{row['n_gpus']} A100, {row['size_label']}: tp {row['tp']} x pp {row['pp']} x dp {row['dp']}, micro-batch {row['mbs']}:",
              f"{row['tflops_per_gpu']} TFLOP/s, {row['mem_gb']} GB of a GPU in use (published)")

# %% [markdown]
# **Read it.** TP 4 was a little faster, and needed more memory.
#
# ### Asynchronous tensor parallelism
#
# An all-gather brings $t$ pieces, and a product can begin with the first. Cut both into pieces, and let each piece
# travel while the one before is multiplied (Wang and others, ASPLOS 2023). PyTorch does it under `torch.compile`, on
# GPUs with NVLink, Megatron by `--tp-comm-overlap`.

# %%
plan, t = Plan(tp=8, dp=8, sequence_parallel=True), 8
passed = block_time(BIG, machine, plan, Batch(sequences=64, sequence_length=2048)).forward
gather, product = passed.communication / 4, passed.matmul / 4  # one of four, on average
plain = [Span("gather", 0, gather), Span("product", gather, gather + product)]
each = gather / (t - 1)  # a rank has its own piece
sends = [Span("gather", i * each, (i + 1) * each) for i in range(t - 1)]
products, free = [], 0.0
for i in range(t):
    ready = max(free, sends[i - 1].end_seconds if i else 0.0)
    free = ready + product / t
    products.append(Span("product", ready, free))
figure = draw_lanes({"one after the other": plain, "in pieces: link": sends, "in pieces: compute": products},
                    title="An all-gather and its product, 175B, TP 8", evidence=Evidence.PREDICTED)
show(figure, alt="Above, a gather and then a product. Below, eight products: the gather's pieces travel "
     "meanwhile, and the gather is hidden.")
print(f"{1e3 * (gather + product):.2f} ms one after the other, {1e3 * free:.2f} ms in pieces (predicted)")

# %% [markdown]
# **Read it.** The picture leaves out that small products are slower and that sending takes memory bandwidth. PyTorch's
# team published speed-ups of up to 20% in the forward of Llama 3 70B, and of 8% in the whole step
# ([PyTorch forum, 2024](https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487)).
#
# ## When to use which
#
# | take | when | costs | does not help |
# |---|---|---|---|
# | tensor parallelism, 2 to 8 | a layer, or its activations, is too large for a GPU; fast links | four sums a layer, each in the next product's way | across nodes; small layers |
# | sequence parallelism | always with it | gathers in backward, or bytes for gathered inputs; norms to add up | attention's inside: that is context parallelism |
# | loss parallel | always with it | three numbers a token | |
# | asynchronous TP | long products on NVLink | tuning | thin products |
# | FSDP instead | the layer fits; many tokens a rank | gathers weights, not activations | few tokens a rank |

# %%
for way, size in kept.items():
    score("12", f"activations of a layer, {way}", peak_bytes=size)
score("12", seen)
scoreboard("12")

# %% [markdown]
# ## Break it, diagnose it
#
# The model of section 4 with the sequence split, and two key-value heads for four ranks. In the second run the line
# `shared.add_up()` is gone. Look at the losses, step by step, and at a weight that all ranks hold. Which losses are right?
# What happens to the weight, and why?

# %%
def forgotten(add_up):
    model = fresh(kv_heads=2)
    shared = split_layers(model, sequence_dim=1)
    losses, _ = train(model, 6, shared if add_up else None)
    norm = model.blocks[0].attention_norm.weight.detach().clone()
    return losses, norm


# %%
right, wrong = (run_ranks(forgotten, RANKS, add_up) for add_up in (True, False))
for name, found in (("with add_up", right), ("without", wrong)):
    drift = max((rank[1] - found[0][1]).abs().max().item() for rank in found)
    print(f"{name:<12} losses of rank 0:", *(f"{loss:.6f}" for loss in found[0][0]))
    print(f"{'':<12} the first norm's weight differs between ranks by {drift:.1e}")
assert wrong[0][0][0] == right[0][0][0] and wrong[0][0][-1] != right[0][0][-1], "step 0 hides it, later steps do not"

# %% [markdown]
# **Diagnose it.** The first loss is right: forward has no error. Then each rank updates its norms by its own
# tokens, and each copy of a head by its own queries. Tensors that must be equal drift apart, and training goes on. Its
# losses are wrong, yet some are *lower* than the right ones: a curve alone does not tell. Compare replicated
# parameters between ranks in a test, to the last bit.
#
# ## Recap
#
# - Columns, then rows: one sum forward ($g$), one backward ($f$), for attention and feed-forward each.
# - A loss needs three numbers a token, not the logits.
# - Tensor parallelism alone leaves $10\,sbh$ bytes whole. Sequence parallelism that gathers again divides all.
# - Same losses do not mean same bytes: count what a plan sends.
# - Each of a layer's four sums stands in the next product's way: it stays on NVLink.
#
# ### Test yourself
#
# A model has 8 key-value heads. You go from TP 8 to TP 16 inside one large NVLink domain. What changes for keys and
# values?
#
# <details><summary>Answer</summary>
#
# Each key-value head now stands on two ranks. Its weights, gradients and states do not shrink further, its gradient
# needs a sum over the two copies, and both compute the same keys and values.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/advanced/12_tensor_parallel.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/12_tensor_parallel.ipynb).
#
# **References.** Shoeybi and others, *Megatron-LM*, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053). Korthikanti and others,
# *Reducing Activation Recomputation in Large Transformer Models*, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198). PyTorch,
# [Tensor Parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html). Wang and others, *Overlap
# Communication with Dependent Computation via Decomposition in Large Deep Learning Models*, ASPLOS 2023. BLOOM's
# [chronicles](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md).
