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
# **The question.** Four ranks hold a quarter of each matrix and compute every layer together. What must each of them still
# keep whole, and what do they send?
#
# **Promise.** You split layers by hand, and a model with PyTorch's DTensor. You count what a rank keeps and sends.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 70 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# Four ranks share every matrix of a GPT layer with dropout, and nothing else. What percentage of one GPU's activations does each
# keep for backward? Attention's scores are not counted.

# %%
my_bet_percent = 25

# %% tags=["setup"]
here = setup("advanced/12")

# %%
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)

from utils import Transformer, TransformerConfig, check, model_shape, run_ranks, show, simulate, traffic
from utils.lessons.lesson_12.compare import (attention_apart, columns_apart, feedforward_apart, kept_bytes, kept_terms,
                                             layer_traffic, loss_apart)
from utils.lessons.lesson_12.tensor_flow import draw_feedforward, draw_kept
from utils.lessons.lesson_12.tensor_layers import vocabulary_cross_entropy
from utils.lessons.lesson_12.tensor_split import split_layers
from utils.lessons.lesson_12.workers import ring_bytes
from utils.parallel import ParallelDims, device_mesh

RANKS, S, B, H = 4, 16, 2, 32  # ranks; positions, sequences and channels of section 1
SHAPE, DIMS = model_shape("llama-2-70b"), ParallelDims(tp=8)  # of section 4's simulation

# %% [markdown]
# In lesson 09 the ranks divided the model's *states*. Here they divide the *computation* of each layer, on the same data. Look at what
# each rank holds at the ends of this picture. Terms: [glossary](../00_glossary.ipynb).

# %%
show(draw_feedforward(),
     alt="Four ranks in two schemes. Tensor parallel: each has the whole input, a quarter of A's columns and of C's rows, and a "
     "term of the output. With sequence parallelism each has a quarter of the sequence outside; the whole input only passes.")

# %% [markdown]
# ## 1. Two matrices, one sum
#
# **Tensor parallelism** (TP) cuts a layer's matrices over the ranks. Take a feed-forward layer, $z = \mathrm{gelu}(x A)\,C$:
#
# - Cut $A$ by **columns**. Each rank computes a quarter of the inner channels, and GELU works on each by itself.
# - Cut $C$ by **rows**, at the same channels. Each rank has one term of the sum $z$, a *partial sum*.
#
# Forward needs one sum over the ranks, at the end: Megatron-LM's $g$. Backward mirrors it: each rank has one term of the gradient of
# $x$, and $f$ adds these up, at the layer's beginning.

# %%
def summed(x):
    total = x.clone()
    dist.all_reduce(total)
    return total


class CopyIn(torch.autograd.Function):
    """f: forward nothing, backward a sum over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


# %%
class SumOut(torch.autograd.Function):
    """g: forward a sum over the ranks, backward nothing."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def split_feedforward(A, C, x):  # nn.Linear keeps (outputs, inputs): columns of A are its dimension 0
    inside = F.gelu(F.linear(CopyIn.apply(x), A))
    return SumOut.apply(F.linear(inside, C))


# %% [markdown]
# **Predict.** The *residual stream* between layers has $s$ positions, $b$ sequences and $h$ channels. Around a ring of $t$ ranks, a
# reduce-scatter of it makes each rank send $\frac{t-1}{t}\,sbh$ numbers, and so does an all-gather. An all-reduce is both:
# $1.5\,sbh$ for four ranks. The next cell makes two, of 8-byte numbers. (All sent bytes here: counted calls, as a ring sends them.)

# %%
gap, found = run_ranks(feedforward_apart, RANKS, split_feedforward)[0]
predicted, sent = 2 * 2 * (RANKS - 1) / RANKS * S * B * H * 8, ring_bytes({"all-reduce": found})
print(f"gradients of A, C and x: {gap:.0e} from one process, as a share of their norm, in fp64")
print(f"a rank sends {sent:,} bytes, predicted {predicted:,.0f}")
assert gap < 1e-9, "the split layer computes something else: is every sum there, forward and backward?"
assert sent == predicted, "a sum too many or too few: one in f, one in g"

# %% [markdown]
# **Question.** Someone cuts $A$ by rows and $C$ by columns instead. Every rank has the whole $x$ and needs the whole $z$. How many
# collectives does *forward* take?

# %%
collectives_the_other_way = ...
check("12.other_way", collectives_the_other_way)

# %% [markdown]
# ## 2. Attention by heads
#
# Each head works by itself, as each channel does in GELU. So queries, keys and values are cut by columns, **whole heads at a
# time**, and the output matrix by rows: again one $f$ and one $g$. With feed-forward that is four all-reduces a layer.
# With *grouped queries*, where several heads share keys and values, the key-value heads must divide over the ranks here.

# %%
def attention(layer, x, own, f, g):
    """With the rows `own` of each projection; f and g stand where the ranks meet."""
    x = f(x)
    q, k, v = (F.linear(x, getattr(layer, name).weight[rows]).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
               for name, rows in own.items())
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return g(F.linear(mixed.transpose(1, 2).flatten(2), layer.output.weight[:, own["query"]]))

# %%
output, gradients = map(max, zip(*run_ranks(attention_apart, RANKS, attention, CopyIn.apply, SumOut.apply), strict=True))
print(f"output {output:.0e} from one process, gradients of x, queries, keys and values {gradients:.0e}")
assert max(output, gradients) < 1e-9, "does each rank take its own heads, and are f and g in their places?"

# %% [markdown]
# ## 3. What a rank keeps
#
# [Korthikanti and others](https://arxiv.org/abs/2205.05198) (2022) count what a GPT layer with dropout keeps for backward in 16
# bits. For each of $t$ ranks, and without attention's scores, which flash attention does not keep, it is:
#
# | | bytes |
# |---|---|
# | one GPU | $34\,sbh$ |
# | tensor parallel | $(10 + 24/t)\,sbh$ |
# | and sequence parallel | $(34/t)\,sbh$ |
#
# Our `GPTBlock` (`gpt.py`) is written to keep these tensors and little else. The next cell measures how they *divide*.

# %%
LAYER = {"length": 128, "batch": 2, "hidden": 128, "heads": 4}
found = {"one GPU": run_ranks(kept_bytes, 1, *LAYER.values(), False)[0],
         "tensor parallel": run_ranks(kept_bytes, RANKS, *LAYER.values(), False)[0]}
kept = {way: it.total - it.scores for way, it in found.items()}  # the scores and their mask left out
for way, size in kept.items():
    print(f"{way:<16} keeps {size:>9,} bytes, {size / kept['one GPU']:.0%}")
print(f"your bet: {my_bet_percent}%")

# %% [markdown]
# **Read it.** A rank of this layer keeps 47%, not 25. Inside a pair of matrices, such as $A$ and $C$, all is divided. Between two pairs
# every rank keeps all **whole**: the input of a norm, the mask of a dropout, the input of the next pair.
#
# Norms and dropout work on each token by itself. With **sequence parallelism** each rank has only a part of the *sequence* there.
# The all-reduce falls into its halves: a reduce-scatter at the end of a pair, an all-gather at the beginning of the next.
#
# So that the gathered input is not kept, our column-parallel layer keeps only its *part*, and **gathers again** in backward. The
# row-parallel layer is your lab.

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
gap = max(run_ranks(columns_apart, RANKS, GatherIn.apply))
print(f"gradients of a rank's part of x, and of A: {gap:.0e} from one process")
assert gap < 1e-9, "is the gradient of x summed over the ranks, and A's made with all of x?"

# %% [markdown]
# Now the same with the sequence split. The prediction also counts what the paper leaves out: the causal mask, and each norm's mean
# and deviation.

# %%
found["and sequence parallel"] = run_ranks(kept_bytes, RANKS, *LAYER.values(), True)[0]
cuts = {"one GPU": (1, 1), "tensor parallel": (RANKS, 1), "and sequence parallel": (RANKS, RANKS)}  # inside pairs, and between
parts = {way: kept_terms(**LAYER, inside=t, between=n) for way, (t, n) in cuts.items()}
for way, it in found.items():
    assert it.total == sum(parts[way].values()), f"{way}: the layer keeps what neither formula, mask nor statistics count"
kept = {way: it.total - it.scores for way, it in found.items()}
bare = {way: {term: size for term, size in terms.items() if "scores" not in term} for way, terms in parts.items()}
show(draw_kept(kept, bare, device="cpu",
               title=f"A GPT layer with dropout: one GPU, and one of t = {RANKS} ranks\nbf16, s 128, b 2, h 128; without attention's scores"),
     alt="One GPU keeps 1090 KiB. A rank of four keeps 47% with tensor parallelism: inside pairs a quarter, between pairs all. It "
     "keeps 25% once the sequence is split, too. Predicted and measured bars are equally long.")

# %% [markdown]
# **Read it.** With the sequence split **by hand** a rank keeps 25%: what lies between pairs (blue) is divided, too.
#
# **The trap.** Every rank holds a norm's whole weight but sees only its part of the tokens. So it has only a part of the weight's
# gradient, and the parts must be added up: `shared.add_up()` below.
#
# ### A loss that gathers no logits
#
# The head is cut by columns, too, so each rank has the logits of a part of the vocabulary. A token's loss $\ell$ needs three numbers
# from the ranks: the largest logit $m$, the sum of exponentials, and the target's logit, which one rank has.
#
# $$\ell = \log \sum_w e^{z_w - m} + m - z_{\text{target}}$$

# %%
def split_cross_entropy(logits, targets):  # every target must be a token: a label of -100 would give a wrong loss
    first = dist.get_rank() * logits.shape[-1]
    top = logits.detach().amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    total = SumOut.apply((logits - top[..., None]).exp().sum(-1))
    here = (targets >= first) & (targets < first + logits.shape[-1])
    place = (targets - first).clamp(0, logits.shape[-1] - 1)
    picked = logits.gather(-1, place[..., None])[..., 0]
    return total.log() + top - SumOut.apply(torch.where(here, picked, 0.0))


VOCABULARY, TOKENS = 32_000, 64
gap, found = run_ranks(loss_apart, RANKS, split_cross_entropy, TOKENS, VOCABULARY)[0]
gathering = ring_bytes({"all-gather": TOKENS * VOCABULARY // RANKS * 8})
print(f"gradient {gap:.0e} of its norm from one process's; {found // TOKENS // 8} numbers a token: a rank sends",
      f"{ring_bytes({'all-reduce': found}):,} bytes; gathering logits would send {gathering:,}")
assert gap < 1e-9 and found == 3 * TOKENS * 8, "three numbers a token: a maximum, a sum, a target"

# %% [markdown]
# ## 4. The library's way: a plan
#
# PyTorch can place every $f$ and $g$ for you. A **DTensor** knows how it lies on the ranks: `Shard(1)` is cut along dimension 1,
# `Replicate()` is whole on each rank, `Partial()` is a term of a sum. Where an operation needs another layout, DTensor sends what is
# missing. You write which layer is cut which way:

# %%
def plan_of_block(sequence=False, together=True):
    between = Shard(1) if sequence else Replicate()  # (batch, sequence, channels)
    by_columns = ("attention.query", "attention.key", "attention.value", "feedforward.gate", "feedforward.up")
    plan = {name: ColwiseParallel() for name in by_columns}  # Shard(0) of nn.Linear's weight
    plan |= {n: RowwiseParallel(output_layouts=between) for n in ("attention.output", "feedforward.down")}
    if sequence:
        plan |= {name: SequenceParallel() for name in ("attention_norm", "feedforward_norm")}
    if together:  # one DTensor for all matrices that read it; None for an argument to leave alone: RoPE's rotation
        plan["attention"] = PrepareModuleInput(input_layouts=(between, None), desired_input_layouts=(Replicate(), None))
        plan["feedforward"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    return plan


# %%
def by_library(model, sequence=False, together=True, embed=RowwiseParallel):
    between, mesh = Shard(1) if sequence else Replicate(), init_device_mesh("cpu", (dist.get_world_size(),))
    ends = {"embed": embed(input_layouts=Replicate(), output_layouts=between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(model, mesh, ends | ({"norm": SequenceParallel()} if sequence else {}))
    for block in model.blocks:
        parallelize_module(block, mesh, plan_of_block(sequence, together))


# %%
def fresh(layers=2):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocabulary=64, hidden=32, layers=layers, heads=4, feedforward=96))
    model.init_weights(std=0.1)
    return model.double()


def train(model, steps, loss_of=F.cross_entropy, shared=None):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))  # one batch, to learn by heart
    for _ in range(steps):
        optimizer.zero_grad()
        with loss_parallel():  # lets F.cross_entropy work on logits that were not gathered
            loss = loss_of(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        if shared:
            shared.add_up()  # gradients of norms
        optimizer.step()
        losses.append(loss.full_tensor().item() if isinstance(loss, DTensor) else loss.item())
    return losses


# %% jupyter={"source_hidden": true}
def mean_loss(logits, targets):
    return vocabulary_cross_entropy(logits, targets).mean()


def run(way, layers=2, steps=10):
    model, shared, loss_of = fresh(layers), None, F.cross_entropy
    if way.startswith("by hand"):
        shared, loss_of = split_layers(model, sequence_dim=1 if "sequence" in way else None), mean_loss
    elif way != "one process":
        by_library(model, sequence="sequence" in way, together="tutorial" not in way)
    with traffic() as sent:
        losses = train(model, steps, loss_of, shared)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    return losses, held, {row.collective: (row.calls // steps, row.payload_bytes // steps) for row in sent.rows}


# %% [markdown]
# We train one model in five ways, with two layers and with three. The difference is one layer. *By hand* is `split_layers`
# (`tensor_split.py`), which puts functions like those above into every layer. **Predict** a layer's bytes: four all-reduces are
# $4\cdot1.5\cdot8\,sbh = 49{,}152$. *The tutorial's plan*, the first in [PyTorch's
# tutorial](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html), lacks the lines under `if together`.

# %%
def all_ways(layers, steps):
    return {way: run(way, layers, steps) for way in WAYS}


WAYS = ["by hand", "DTensor, the tutorial's plan", "DTensor", "DTensor, sequence", "by hand, sequence"]
one, whole, _ = run_ranks(run, 1, "one process")[0]
two_layers, three_layers = (run_ranks(all_ways, RANKS, *of)[0] for of in ((2, 10), (3, 1)))
rows = {}
for way in WAYS:
    losses, held, sent = two_layers[way]
    off = max(abs(a / b - 1) for a, b in zip(losses, one, strict=True))
    assert off < 1e-12, f"{way} trains another model: is a sum missing?"
    print(f"{way:<30} losses {off:.0e} from one process's, {held / whole:.1%} of the parameters on a rank")
    rows[way] = layer_traffic(sent, three_layers[way][2])  # by hand all norms travel in one call: no layer adds one
pd.DataFrame(rows).T.fillna("")

# %% [markdown]
# **Read it.** All five have one process's losses, in fp64.
#
# - The tutorial's plan sends 7/4 of the bytes: queries, keys, values, gate and up each send a gradient of their input. With
#   `together` these are added up before they travel.
# - With the sequence split, DTensor adds 768 bytes for norms. By hand it is a quarter more, for the two gathers of backward.
#
# **Question.** Llama-2-70B has $h = 8192$. How many MB ($10^6$ bytes) does one of **eight** ranks send for a layer and step of
# one sequence of 4,096 tokens, in bf16, by the plan with four all-reduces?

# %%
mb_per_layer = ...
check("12.mb_per_layer", mb_per_layer)

# %% [markdown]
# ### DTensor keeps what it gathered
#
# In return, the layers by hand keep less. We simulate one of eight ranks: two layers of Llama-2-70B's shape, one sequence of 4,096
# tokens, split. The table has MiB at the peak of a second micro-batch (gradients are there already).

# %% jupyter={"source_hidden": true}
def two_of_70b(way):
    made, by_plan = {}, "DTensor" in way

    def build():
        model = Transformer(TransformerConfig.from_shape(SHAPE, layers=2)).to(torch.bfloat16)
        if by_plan:
            by_library(model, sequence=True, embed=ColwiseParallel)  # by rows each rank makes its whole gradient
        else:
            made["group"] = device_mesh(DIMS, "cpu").get_group("tp")
            made["shared"] = split_layers(model, made["group"], sequence_dim=1)
        return model, None

    def step(model, _):
        tokens = torch.zeros(1, 4096, dtype=torch.long)
        with loss_parallel():
            logits = model(tokens).float().flatten(0, 1)
            if by_plan:
                F.cross_entropy(logits, tokens.flatten()).backward()
            else:
                vocabulary_cross_entropy(logits, tokens.flatten(), made["group"]).mean().backward()
                made["shared"].add_up()

    return simulate(build, step, device="A100 80GB", world=DIMS, name=f"70B, two layers, TP 8, {way}")


# %%
ledger = pd.DataFrame({way: {kind.value: size / 2**20 for kind, size in two_of_70b(way).breakdown.items()}
                       for way in ("DTensor", "by hand")}).T
more, predicted = ledger.loc["DTensor"] - ledger.loc["by hand"], 5 * 4096 * SHAPE.hidden * 2 * 7 / 8 / 2**20
print(f"DTensor keeps {more['activations']:.1f} MiB more activations; predicted for five inputs {predicted:.1f}")
assert abs(more["activations"] - predicted) < 1, "DTensor keeps something else than the inputs of columns"
print(f"section 3's GPT layer, two inputs whole: {(4 + 30 / RANKS) / 34:.0%} of one GPU's on each of {RANKS} ranks (predicted)")
ledger[["parameters", "activations"]].round(1)

# %% [markdown]
# **Read it.** DTensor keeps five gathered inputs whole on each rank, two a layer and the head's. So its plan would not reach the 25% of
# section 3's layer, but 34%.
#
# ## 5. What it costs in time
#
# Twice as many ranks halve the work of each, but not what it sends. We price DTensor's plan with the sequence split: eight collectives
# a layer, and ranks that **wait for each**. (Megatron-LM runs some beside products: not shown here.) Times are predictions of the
# course's planner, fitted to published steps. Steps of the first line's model were among them, so it is a mild test; times over a
# network have none here.

# %% jupyter={"source_hidden": true}
from utils import Cluster
from utils.catalog import link
from utils.lessons.lesson_12.bloom import bloom_prequel_pairs
from utils.lessons.lesson_12.layer_time import NIC, draw_layer_times, layer_of_22b, layer_stages, rates_in_training


def machine(gpus=8, nics=8):
    network = nics * link(NIC).link_bytes_per_second
    return Cluster(gpu="A100 80GB", nodes=8, gpus_per_node=gpus, network_ports=nics, network_bytes_per_second=network)


predicted, published = layer_of_22b(machine())
print(f"a layer of 22B at TP 8, four sequences: {predicted:.1f} ms predicted,",
      f"{published:.1f} published (Korthikanti and others 2022, Table 4)")
nvlink, nics = rates_in_training()
print(f"in training, GB/s a direction (fitted): NVLink of a GPU {nvlink:.0f}, eight network cards (NICs) of a node together {nics:.0f}")

# %% [markdown]
# Now a layer of GPT-3 175B on A100s, one sequence of 2,048 tokens, forward and backward. A node has eight GPUs, or sixteen with *NVLink
# 16*. The *price* is the time of all ranks together. The last columns say how much it rises from another row: as predicted, and if
# collectives took half or twice as long.

# %%
LAYOUTS = {"TP 4": (4, 8, 8), "TP 8": (8, 8, 8), "TP 16, NVLink 16": (16, 16, 8),  # ranks; GPUs and NICs of a node
           "TP 16, 8 NICs": (16, 8, 8), "TP 16, 1 NIC": (16, 8, 1)}
RISES_FROM = {"TP 8": "TP 4", "TP 16, NVLink 16": "TP 8", "TP 16, 8 NICs": "TP 16, NVLink 16", "TP 16, 1 NIC": "TP 16, NVLink 16"}
passed = {name: layer_stages(model_shape("gpt-3-175b"), machine(*node), tp, tokens=2048)
          for name, (tp, *node) in LAYOUTS.items()}


def layer_milliseconds(name, slower=1.0):
    return 1e3 * sum(it.kernel_seconds for it in passed[name]), 1e3 * slower * sum(it.sent_seconds for it in passed[name])


def price(name, slower=1.0):
    return LAYOUTS[name][0] * sum(layer_milliseconds(name, slower))


rows = {}
for name in passed:
    kernels, waits = layer_milliseconds(name)
    rows[name] = {"kernels, ms": f"{kernels:.1f}", "waits, ms": f"{waits:.1f}", "price, ms": f"{price(name):.0f}"}
    if before := RISES_FROM.get(name):
        rows[name] |= {"from": before} | {f"collectives x {by}": f"{price(name, by) / price(before, by) - 1:+.0%}" for by in (1, 0.5, 2)}
print("predicted")
pd.DataFrame(rows).T.fillna("")

# %%
chosen = {name: passed[name] for name in ("TP 4", "TP 8", "TP 16, 8 NICs", "TP 16, 1 NIC")}
show(draw_layer_times(chosen, title="A layer of GPT-3 175B on A100s, one sequence of 2,048 tokens (predicted)"),
     alt="From TP 4 to TP 8 the kernels take half as long, and the collectives a little longer. At TP 16 with eight NICs the ranks "
     "wait for a third of the time. Over one NIC they wait much longer than they compute.")

# %% [markdown]
# **Read it.** From TP 4 to TP 8 kernels take half as long, and collectives longer. So the predicted price rises.
#
# - **More ranks** raise it by 12% from 4 to 8, and by 23% from 8 to 16, even if NVLink joins all sixteen: by 7% and 13% where
#   collectives take half as long.
# - **A slow network** adds 216%, with one NIC to a node. Eight NICs add 7% to a node of sixteen, too little for these
#   predictions to tell.
#
# So where ranks wait, take as few as memory allows, and keep them off a slow network. What the GPUs that this frees do next, more
# replicas, has its own price.
#
# **"TP = 8, always" is folklore.** [BLOOM's
# log](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md) tried both on 384 A100s
# before sequence parallelism was published. In its pairs at micro-batch 4 (published, one iteration each; the log does not say which
# runs had `CUDA_LAUNCH_BLOCKING=1`) stages stay, so TP 4 also doubles data parallelism, and a pipeline gets half the micro-batches:

# %%
pairs = bloom_prequel_pairs()
pairs[pairs["micro-batch"] == 4]

# %% [markdown]
# **Read it.** TP 4 was faster in three of four pairs, by 7% at most, and slower in one, by 3%. At micro-batch 2 its pairs
# favour TP 4 more. So try both.
#
# ## Break it, diagnose it
#
# Section 4's model trains with its sequence split by hand, with `shared.add_up()` and without. What drifts, and do the losses show it?

# %%
def spread(tensor, group=None):
    """How far a tensor differs between ranks: 0 where they hold the same."""
    top, low = tensor.detach().clone(), tensor.detach().clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    dist.all_reduce(low, dist.ReduceOp.MIN, group)
    return (top - low).max().item()


def forgotten(left_out):
    model = fresh()
    shared = split_layers(model, sequence_dim=1)
    [(group, norms)] = shared.over  # what every rank holds whole
    losses = train(model, 6, mean_loss, None if left_out else shared)
    return losses, max(spread(p, group) for p in norms)

# %%
for left_out in (False, True):
    losses, drift = run_ranks(forgotten, RANKS, left_out)[0]
    print("without the sum" if left_out else "with the sum   ", *(f"{loss:.6f}" for loss in losses), f" norms {drift:.0e} apart")
    assert (drift > 0) == left_out, "what is not added up drifts"

# %% [markdown]
# **Diagnose it.** The first loss is the same, since forward is, and the later ones stay within 0.2%. But each rank updates its norms
# by its own tokens. Compare replicas: `spread` must be 0.
#
# ## Recap
#
# - **Kept** (a GPT layer with dropout, without scores, on four ranks): 47% of one GPU's activations, since all between two pairs of
#   matrices stays whole. With the sequence split by hand 25%, by DTensor's plan 34% (predicted).
# - **Sent:** one sum a pair forward ($g$) and one backward ($f$). With the sequence split a quarter more, if inputs are gathered again.
# - **Time** (predicted, GPT-3's layer on A100s): where ranks wait, take as few as memory allows, keep them off a slow network, and
#   try both sizes.
# - A forgotten sum of the norms' gradients does not show in the first loss, but in replicas that drift apart.
#
# Do the [lab](../../labs/advanced/12_tensor_parallel.ipynb) in a copy (`make my-labs`), then see
# its [solution](../../solutions/advanced/12_tensor_parallel.ipynb).
#
# **References.** [Shoeybi and others](https://arxiv.org/abs/1909.08053), *Megatron-LM*.

# %% [markdown]
# ## On Monday
#
# In PyTorch (2.15 here), TP takes few GPUs of a node, and FSDP the others. This is section 4's plan, which keeps gathered inputs
# whole. Resuming a broken run is not shown here.
#
# ```python
# # torchrun --nproc-per-node 8 train.py. What these lines expect of you stands at their end.
# from contextlib import nullcontext
#
# import torch
# import torch.distributed.checkpoint as dcp
# import torch.nn.functional as F
# from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
# from torch.distributed.tensor import DTensor, Replicate, Shard
# from torch.distributed.tensor.debug import CommDebugMode
# from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
#                                                loss_parallel, parallelize_module)
#
# # 1. The plan, with your layers' names
# mesh = init_device_mesh(device.type, (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
# with torch.device("meta"):  # shapes alone: no GPU ever holds the whole model
#     model = make_model()
# for name, size in {"key-value heads": n_kv_heads, "channels": n_channels, "tokens of the vocabulary": n_vocabulary,
#                    "tokens of a sequence": n_tokens}.items():
#     assert size % tp == 0, f"{size} {name} do not divide over {tp} ranks"
#
# whole, part = Replicate(), Shard(1)  # activations are (batch, sequence, channels)
# parallelize_module(model, mesh["tp"], {
#     "embed": ColwiseParallel(input_layouts=whole, output_layouts=part),  # RowwiseParallel makes its whole gradient on each rank
#     "norm": SequenceParallel(),
#     "head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
# })
# for block in model.blocks:
#     parallelize_module(block, mesh["tp"], {
#         "attention_norm": SequenceParallel(), "feedforward_norm": SequenceParallel(),
#         # One entry for each positional argument; None leaves it alone, here RoPE's rotation. Arguments by name stand in
#         # input_kwarg_layouts={...} and desired_input_kwarg_layouts={...}.
#         "attention": PrepareModuleInput(input_layouts=(part, None), desired_input_layouts=(whole, None)),
#         "feedforward": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
#         **dict.fromkeys(["attention.query", "attention.key", "attention.value"], ColwiseParallel()),
#         **dict.fromkeys(["feedforward.gate", "feedforward.up"], ColwiseParallel()),
#         **dict.fromkeys(["attention.output", "feedforward.down"], RowwiseParallel(output_layouts=part)),
#         # With QK-norm, a norm of each head's queries and keys: each rank holds its whole weight and makes a part of the gradient.
#         # The norm must see (batch, sequence, heads, channels).
#         # **dict.fromkeys(["attention.query_norm", "attention.key_norm"], SequenceParallel(sequence_dim=2, use_local_output=True)),
#     })
# for name, p in model.named_parameters():  # a plain tensor would get the gradient of its rank's tokens only
#     assert isinstance(p, DTensor), f"{name} is in no plan"
#
# # 2. FSDP over the other GPUs, then the weights
# policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
# sharding = {"mesh": mesh["dp"], "mp_policy": policy}
# for block in model.blocks:
#     fully_shard(block, **sharding)
# fully_shard(model, **sharding)
# model.to_empty(device=device)
# make_buffers(model)
# set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
# optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
#
# # 3. Training
# def drifted():  # of what all ranks of a TP group hold whole
#     apart = {name: spread(p.to_local(), mesh["tp"].get_group())
#              for name, p in model.named_parameters() if p.placements[-1].is_replicate()}
#     return {name: by for name, by in apart.items() if by}
#
# sent = CommDebugMode()
# for step, (inputs, targets) in enumerate(batches(mesh["dp"].get_local_rank())):
#     with nullcontext() if step else sent, loss_parallel():  # collectives are counted in the first step only: it takes time
#         logits = model(inputs).to(reduce_dtype)  # a loss of 4 to 8 in bf16 would be rounded to steps of 0.03
#         loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # the loss of one process, but for rounding
#         loss.backward()
#     norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the whole model's; print norm.full_tensor()
#     optimizer.step()
#     optimizer.zero_grad()
#     # Expected: four reduce-scatters and four all-gathers a block, one of each for the head, two all-to-alls for the embedding;
#     # all-reduces: three for the loss, one for each RMSNorm (a LayerNorm has two); FSDP's own.
#     if step == 0:
#         print(sent.get_comm_counts())
#     # Expected: {}, or rounding. As much as the learning rate means a gradient that is not added up: stop.
#     if step % 1000 == 0:
#         print("drifted apart:", drifted())
# dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/last")  # each rank writes its parts
#
# # 4. To read it, after 1 and 2 in another program
# state = {"model": get_model_state_dict(model)}
# dcp.load(state, checkpoint_id=f"{folder}/last")
# set_model_state_dict(model, state["model"])
#
# # What these lines expect of you:
# # - torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), device = torch.device("cuda"), tp = 2,
# #   world_size = int(os.environ["WORLD_SIZE"]), dtype, reduce_dtype = torch.bfloat16, torch.float32, learning_rate;
# # - n_kv_heads, n_channels of the feed-forward layer, n_vocabulary, n_tokens of a sequence, a folder for the trained model;
# # - spread(tensor, group), from "Break it, diagnose it" above;
# # - queries, keys and values in three matrices, gate and up in two: a fused one would be cut by position, across its parts;
# # - make_model(): your model, embedding and head two matrices; make_buffers(model): fills what no state dict holds, such
# #   as RoPE's tables; weights: the state dict in the host memory of rank 0, {} elsewhere;
# # - batches(dp_rank): inputs and targets, the same on all ranks of a TP group;
# # - attention that counts its local heads, k.view(b, s, -1, head_dim); the model takes s from the tokens, since after the
# #   embedding x.shape[1] is s / tp.
# # Nearest to it in Megatron-LM: --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer (ZeRO-1), with
# # CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell. There a norm or router of your own needs weight.sequence_parallel = True, or it
# # drifts apart.
# ```
#
# **Look at** the counts and at what drifts apart; the comments say what to expect.
#
# In transformers (5.23 here; before, `tp_plan="auto"`), under the same `torchrun`:
#
# ```python
# import os
#
# import torch
# from transformers import AutoModelForCausalLM
# from transformers.distributed import DistributedConfig
#
# # name: a checkpoint. batch: token ids on this rank's GPU, the same on all ranks.
# torch.set_float32_matmul_precision("high")  # products in TF32
# plan = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))
# # Without dtype, weights get the checkpoint's. In bf16 any above 0.004 would round AdamW's step of 1e-5 away.
# model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, distributed_config=plan)
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
# loss = model(input_ids=batch, labels=batch).loss
# loss.backward()
# optimizer.step()
# held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
# print(f"{held:,} of {model.num_parameters():,} parameters on this rank")
# print(model.tp_plan)  # a matrix that no line names stays whole, and so do norms, the sequence and gathered logits
# ```
#
# **Look at** what a rank holds: its share of every matrix that the plan names.
