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
# **The question.** Four ranks hold a quarter of each layer and compute it together. What must each still keep whole, and what
# do they send?
#
# **Promise.** You split layers by hand, and a model by PyTorch's DTensor, and count what a rank holds and sends.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 70 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# Four ranks share every matrix of a GPT layer with dropout, whose attention keeps no scores. One GPU would keep 100% of its
# activations for backward. How many percent does each of the four keep? Section 3 measures.

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

from utils import Transformer, TransformerConfig, check, model_shape, run_ranks, show, traffic
from utils.lessons.lesson_12.compare import (apart, attention_apart, columns_apart, kept_bytes, kept_terms, layer_traffic,
                                             loss_apart, mine)
from utils.lessons.lesson_12.tensor_flow import draw_feedforward, draw_kept, draw_key_heads
from utils.lessons.lesson_12.tensor_layers import vocabulary_cross_entropy
from utils.lessons.lesson_12.tensor_split import split_layers
from utils.lessons.lesson_12.workers import ring_bytes

RANKS, S, B, H = 4, 16, 2, 32  # ranks; positions, sequences and channels of section 1

# %% [markdown]
# Lesson 09 shared *states* among ranks that compute different data. Here ranks share the computing of the *same* data.
# Here the *stream* is the residual stream, a *product* a GEMM, a *word* an entry of the vocabulary, a *port* a NIC. Gaps to one
# process are norms of a difference, as shares. More: [glossary](../00_glossary.ipynb).

# %%
show(draw_feedforward(),
     alt="Four ranks in two schemes. Tensor parallel: each has the whole input, a quarter of A's columns and of C's rows, and a "
     "term of the output. With sequence parallelism each has a quarter of the sequence outside.")

# %% [markdown]
# ## 1. Two matrices, one sum
#
# A feed-forward layer is $z = \mathrm{gelu}(x A)\,C$. Cut $A$ by **columns**: each rank computes some channels of the
# inside, and GELU works on each channel by itself. Cut $C$ by **rows**, the same channels: each rank has a term of the
# sum $z$, a *partial* sum. So forward needs one sum over the ranks, at the end: Megatron's $g$. Backward mirrors it: each
# rank's share of $A$ gives a term of the gradient of $x$, so one sum, at the beginning: $f$.

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
# **Predict.** The stream has $s$ positions, $b$ sequences, $h$ channels. Around a ring of $t$
# ranks, a reduce-scatter or an all-gather makes each rank send $(t-1)/t$ of it, and an all-reduce twice that: here 1.5
# streams. Two all-reduces of 8-byte numbers are $2 \cdot 1.5 \cdot 8\,sbh$ bytes. **All bytes sent on this page are
# counted so.**

# %%
def feedforward_on_rank():
    torch.manual_seed(0)
    A, C, x = (torch.randn(shape, dtype=torch.float64) for shape in ((4 * H, H), (H, 4 * H), (S, B, H)))
    whole = [t.clone().requires_grad_() for t in (A, C, x)]
    F.linear(F.gelu(F.linear(whole[2], whole[0])), whole[1]).square().sum().backward()
    parts = [mine(A, 0), mine(C, 1), x.clone().requires_grad_()]
    with traffic() as sent:
        split_feedforward(*parts).square().sum().backward()
    wanted = mine(whole[0].grad, 0), mine(whole[1].grad, 1), whole[2].grad
    return max(apart(p.grad, w) for p, w in zip(parts, wanted, strict=True)), str(sent), sent.payload_bytes


# %%
gap, lines, found = run_ranks(feedforward_on_rank, RANKS)[0]
predicted, sent = 2 * 2 * (RANKS - 1) / RANKS * S * B * H * 8, ring_bytes({"all-reduce": found})
print(f"gradients of A, C and x: {gap:.0e} from one process, in fp64")
print(f"put in: {lines}; around a ring a rank sends {sent:,} bytes, predicted {predicted:,.0f}")
assert gap < 1e-9, "the split layer computes something else: is every sum there, forward and backward?"
assert sent == predicted, "a sum too many or too few: one in f, one in g"

# %% [markdown]
# **Question.** Someone cuts $A$ by rows and $C$ by columns instead. Every rank holds the whole $x$ at first, and
# shall hold the whole $z$ at last. How many collectives does *forward* need?

# %%
collectives_the_other_way = ...
check("12.other_way", collectives_the_other_way)

# %% [markdown]
# ## 2. Attention by heads
#
# Heads are to attention what channels are to GELU: each works by itself. So queries, keys and values are cut by
# columns, **whole heads at a time**, and the output matrix by rows. Again one $f$ and one $g$: a layer makes four
# sums of the stream, two forward, two backward.
#
# With grouped queries there can be fewer key-value heads than ranks. `split_layers` here takes **copies**: each sees a part of
# its gradient. Megatron-Core cuts on inside a head, and each forward gathers queries, keys and values of *all* heads, more than a
# stream, to keep its own. DTensor's plan (section 4) has neither: its ranks must divide the *key-value* heads.

# %%
show(draw_key_heads(),
     alt="By copies, ranks 0 and 1 hold the first key-value head, 2 and 3 the second; gradients are summed in pairs. By a "
     "gather, each holds half a head's weights; an all-gather brings all queries, keys and values, of which it keeps its own.")

# %%
def attention(layer, x, own, f, g):
    """With the rows `own` of each projection; f and g stand where the ranks meet."""
    x = f(x)
    q, k, v = (F.linear(x, getattr(layer, name).weight[rows]).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
               for name, rows in own.items())
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return g(F.linear(mixed.transpose(1, 2).flatten(2), layer.output.weight[:, own["query"]]))


# %%
for rank, it in enumerate(run_ranks(attention_apart, RANKS, attention, CopyIn.apply, SumOut.apply)):
    print(f"rank {rank}: query head {it.query}, a copy of key-value head {it.key}; output {it.output:.0e} from one",
          f"process, gradient of its key {it.alone:.0%} off alone, {it.added_up:.0e} added up over the copies")
    assert it.output < 1e-9 and it.added_up < 1e-9 < it.alone, "outputs are whole, gradients of copies are parts"

# %% [markdown]
# ## 3. What a rank keeps
#
# A rank holds a quarter of the states now, except for copied heads and norms. How much does it keep of the activations? This is
# what a GPT layer with dropout keeps in 16 bits on $t$ ranks (Korthikanti and others 2022). The last term is the scores of $a$
# heads, which flash attention does not keep. `GPTBlock` (`sources/advanced/12_tensor_parallel/gpt.py`) is written to keep what they
# count: the run tests how it *divides*.
#
# | | bytes | their equation |
# |---|---|---|
# | one GPU | $sbh\,(34 + 5as/h)$ | 1 |
# | tensor parallel | $sbh\,(10 + 24/t + 5as/(ht))$ | 2 |
# | and sequence parallel | $sbh\,(34/t + 5as/(ht))$ | 4 |

# %%
LAYER = {"length": 128, "batch": 2, "hidden": 128, "heads": 4}
kept = {"one GPU": run_ranks(kept_bytes, 1, *LAYER.values(), False)[0],
        "tensor parallel": run_ranks(kept_bytes, RANKS, *LAYER.values(), False)[0]}
bare = {way: it.total - it.scores for way, it in kept.items()}  # nearly what flash attention would leave
for way, it in kept.items():
    print(f"{way:<16} keeps {it.total:>9,} bytes, {it.total / kept['one GPU'].total:.0%}; "
          f"without scores {bare[way]:>9,}, {bare[way] / bare['one GPU']:.0%} (measured, less the scores)")
print(f"your bet: {my_bet_percent}%")

# %% [markdown]
# **Read it.** Far more than a quarter: 47% without scores, 40% with them, since they divide well. What
# stands between the matrices, every rank keeps **whole**: inputs of two norms (4 bytes an element), masks of
# two dropouts (2), and the inputs of query, key, value and of $A$ (4), since a column needs all of its input.
#
# But norms and dropout work on each token by itself. So let each rank have a part of the *sequence* there. An all-reduce is
# a reduce-scatter followed by an all-gather: put the first after the matrices, the second before the next, and
# a ring sends as much. Mind the seeds: one on all ranks gives different tokens the same mask (lab).
#
# The column side keeps its *part* of $x$ and **gathers again** in backward. The row side is your lab.

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
# `split_layers` (`tensor_split.py` in the same folder) does this to a whole model: both sides, embedding and head.

# %%
kept["and sequence parallel"] = run_ranks(kept_bytes, RANKS, *LAYER.values(), True)[0]
cuts = {"one GPU": (1, 1), "tensor parallel": (RANKS, 1), "and sequence parallel": (RANKS, RANKS)}  # inside, and between
parts = {way: kept_terms(**LAYER, inside=t, between=n) for way, (t, n) in cuts.items()}
for way, it in kept.items():
    predicted, bare[way] = sum(parts[way].values()), it.total - it.scores
    print(f"{way:<22} {it.total:>9,} bytes measured, {predicted:>11,.0f} predicted")
    assert it.total == predicted, f"{way}: the layer keeps what the paper does not count"

# %%
show(draw_kept({way: it.total for way, it in kept.items()}, parts, bare, device="cpu",
               title="A GPT layer with dropout: one GPU, and one of t = 4 ranks\n"
               "bf16, s 128, b 2, h 128, 4 heads; written as the formula counts"),
     alt="One GPU 100%; a rank of four 40%; 26% once the sequence is split, too. Without scores 47% and 25%.")

# %% [markdown]
# **Read it.** A quarter.
#
# **The trap.** A norm's weight is whole on every rank, and each sees only its part of the tokens now, so
# a part of the gradient. It must be added up over the ranks, as for copied heads: `shared.add_up()` below. So must that of a
# row-parallel **bias**. Add a bias *after* the sum: before it, it counts $t$ times.
#
# ### A loss that gathers no logits
#
# With the head cut by columns, each rank has the logits of some *words*. The loss $\ell$ of a token needs three numbers: the largest logit $m$ (so that
# nothing overflows), the sum of exponentials, and the logit of the target, which one rank has:
#
# $$\ell = \log \sum_w e^{z_w - m} + m - z_{\text{target}}$$

# %%
def split_cross_entropy(logits, targets):  # words only: a label of -100 would give a wrong loss
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
gap, found = run_ranks(loss_apart, RANKS, split_cross_entropy, TOKENS, WORDS)[0]
gathering = ring_bytes({"all-gather": TOKENS * WORDS // RANKS * 8})
print(f"gradient {gap:.0e} from one process; {found // TOKENS // 8} numbers a token: a rank sends",
      f"{ring_bytes({'all-reduce': found}):,} bytes; gathering logits would send {gathering:,}")
assert gap < 1e-9 and found == 3 * TOKENS * 8, "three numbers a token: a maximum, a sum, a target"

# %% [markdown]
# The embedding is cut by words, too (vocabulary-parallel): a rank looks up its own, and the ranks add up.
#
# ## 4. The library's way: a plan
#
# **DTensor** is a tensor that knows how it lies on the ranks: `Shard(1)`, `Replicate()`, or a term of a sum,
# `Partial()`. It sends where an operation needs another layout. You write which layer is cut which way
# (`ColwiseParallel` is `Shard(0)` of a linear layer's weight):

# %%
def plan_of_block(sequence=False, together=True):
    between = Shard(1) if sequence else Replicate()  # (batch, sequence, channels)
    by_columns = ("attention.query", "attention.key", "attention.value", "feedforward.gate", "feedforward.up")
    plan = {name: ColwiseParallel() for name in by_columns}
    plan |= {n: RowwiseParallel(output_layouts=between) for n in ("attention.output", "feedforward.down")}
    if sequence:
        plan |= {name: SequenceParallel() for name in ("attention_norm", "feedforward_norm")}
    if together:  # one DTensor for all matrices that read it. None: an input that is no stream: RoPE's rotation
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


# %% [markdown]
# `loss_parallel()` lets `F.cross_entropy` work on ungathered logits.

# %%
def fresh(layers=2, kv_heads=4):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocabulary=64, hidden=32, layers=layers, heads=4, kv_heads=kv_heads, feedforward=96))
    model.init_weights(std=0.1)
    return model.double()


def train(model, steps, loss_of=F.cross_entropy, shared=None):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with loss_parallel():
            loss = loss_of(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        if shared:
            shared.add_up()  # gradients of norms and of copied heads
        optimizer.step()
        losses.append(loss.full_tensor().item() if isinstance(loss, DTensor) else loss.item())
    return losses


# %% jupyter={"source_hidden": true}
def mean_of_words(logits, targets):
    return vocabulary_cross_entropy(logits, targets).mean()


def run(way, layers=2, steps=10):
    model, shared, loss_of = fresh(layers), None, F.cross_entropy
    if way.startswith("by hand"):
        shared, loss_of = split_layers(model, sequence_dim=1 if "sequence" in way else None), mean_of_words
    elif way != "one process":
        by_library(model, sequence="sequence" in way, together="tutorial" not in way)
    with traffic() as sent:
        losses = train(model, steps, loss_of, shared)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    return losses, held, {row.collective: (row.calls // steps, row.payload_bytes // steps) for row in sent.rows}


# %% [markdown]
# A model of three layers and one of two differ by a layer. **Predict** for it: four all-reduces of 1.5 streams, $4 \cdot 1.5
# \cdot 8\,s\,b\,h = 49{,}152$ bytes. Which ways send more? Without `together` the plan is that of
# [PyTorch's tutorial](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html) at its beginning.

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
    rows[way] = {"losses from one process": f"{off:.0e}", "parameters held": f"{held / whole:.1%}"}
    rows[way] |= layer_traffic(sent, three_layers[way][2])  # around a ring
pd.DataFrame(rows).T.fillna("")

# %% [markdown]
# **Read it.** The tutorial's plan gives the right losses and sends 7/4 of the bytes: five matrices each send a gradient of the
# plain input. `together` makes the input **one** DTensor, and gradients are added before they travel.
#
# With the sequence split DTensor sends what the all-reduces sent, and the norms' gradients. But this plan, eager and without checkpointing, keeps the gathered inputs: $(4 + 30/t)\,sbh$ bytes of a
# GPT layer where ours by hand keeps $34\,sbh/t$. In return ours gathers two inputs a second time, which is a quarter more bytes.
#
# **Question.** Llama-2-70B has $h = 8192$. How many MB ($10^6$ bytes) does one of **eight** ranks send for a layer and step of
# one sequence of 4,096 tokens, in bf16, by the plan with four all-reduces?

# %%
mb_per_layer = ...
check("12.mb_per_layer", mb_per_layer)

# %% [markdown]
# ### At real size
#
# Two layers of Llama-2-70B's shape on one of eight simulated ranks, 4,096 tokens, no optimizer. MiB at the peak of a step that
# adds to the last one's gradients, as accumulation does. The second plan cuts the *embedding* by columns:

# %% jupyter={"source_hidden": true}
from utils import simulate
from utils.parallel import ParallelDims, device_mesh

SHAPE, DIMS = model_shape("llama-2-70b"), ParallelDims(tp=8)

# %% jupyter={"source_hidden": true}
def two_of_70b(way):
    made, by_plan = {}, "DTensor" in way
    embed = ColwiseParallel if "columns" in way else RowwiseParallel

    def build():
        model = Transformer(TransformerConfig.from_shape(SHAPE, layers=2)).to(torch.bfloat16)
        if by_plan:
            by_library(model, True, embed=embed)
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
ranks_of_70b = {way: two_of_70b(way) for way in ("DTensor", "DTensor, embedding by columns", "by hand")}
ledger = pd.DataFrame({way: {kind.value: size / 2**20 for kind, size in found.breakdown.items()}
                       for way, found in ranks_of_70b.items()})
by_plan, by_columns, by_hand = (found.breakdown for found in ranks_of_70b.values())
for kind, numbers in (("activations", 5 * 4096 * SHAPE.hidden), ("gradients", SHAPE.vocabulary * SHAPE.hidden)):
    more, predicted = by_plan[kind] - by_hand[kind], 2 * numbers * 7 / 8
    print(f"DTensor: {more / 2**20:.1f} MiB more {kind} than by hand; predicted {predicted / 2**20:.1f}")
    assert abs(more - predicted) < 2**20, f"DTensor keeps other {kind} than inputs of columns and the embedding's gradient"
assert by_columns["gradients"] == by_hand["gradients"], "is the embedding's gradient whole, still?"
ledger.T.assign(peak=[found.peak_bytes / 2**20 for found in ranks_of_70b.values()]).round(1)

# %% [markdown]
# **Read it.** DTensor keeps 280 MiB more activations: gathered inputs of five column sides. It holds 437.5 MiB more gradients:
# an embedding cut by words gets its gradient whole. Cut by columns it gets a part, and sends by all-to-all.
#
# ## 5. Why it stays inside a node
#
# A layer makes ten collectives. The next product waits for four in forward and two in backward. Megatron runs four beside a
# product: the second gather beside the gradient of $x$, the reduce-scatter beside that of the weight. Such a collective slows the
# product by a share of its own time (`CONTENTION`, fitted), and what outlasts it is waited for. DTensor's eager plan hides none.

# %% jupyter={"source_hidden": true}
from utils import Cluster
from utils.catalog import SUSTAINED, link
from utils.lessons.lesson_12.bloom import bloom_prequel_pairs
from utils.lessons.lesson_12.layer_time import draw_layer_times, layer_stages
from utils.planner.calibration import BESIDE_TRAINING, CONTENTION


def machine(ports, gb_per_second, gpus=8):
    return Cluster(gpu="A100 80GB", nodes=8, gpus_per_node=gpus, network_ports=ports,
                   network_bytes_per_second=ports * gb_per_second * 1e9)


for name, kind in (("NVLink 3", "NVLink 3"), ("InfiniBand HDR", "InfiniBand")):
    line, share = link(name).link_bytes_per_second / 1e9, SUSTAINED[kind].share
    print(f"{name}: {line:.0f} GB/s a direction (published) x {share:.2f} alone (published) x {BESIDE_TRAINING} in training",
          f"(fitted) = {line * share * BESIDE_TRAINING:.0f}")

# %%
def layer_seconds(stages, slower=1.0):
    """Products of a layer, and what it waits for collectives, each of which takes `slower` times as long as predicted."""
    sent = [slower * it.sent_seconds for it in stages]
    waits = sum(max(CONTENTION * s, s - it.product_seconds) for s, it in zip(sent, stages, strict=True))
    return sum(it.product_seconds for it in stages), waits

# %% [markdown]
# Predicted: a layer of GPT-3 175B, one sequence of 2,048 tokens a micro-batch, forward and backward. *NVLink 16*: sixteen GPUs a
# node. The last columns halve and double the time of every collective:

# %%
LAYOUTS = {"TP 2": (2, 8, 25), "TP 4": (4, 8, 25), "TP 8": (8, 8, 25), "TP 16, NVLink 16": (16, 16, 25),
           "TP 16, 8 ports x 25 GB/s": (16, 8, 25), "TP 16, 8 ports x 12.5 GB/s": (16, 8, 12.5), "TP 16, 1 port x 25 GB/s": (16, 1, 25)}
stages, rows = {}, {}
for name, (tp, ports, gb_per_second) in LAYOUTS.items():
    passed = stages[name] = layer_stages(model_shape("gpt-3-175b"), machine(ports, gb_per_second, 16 if "NVLink 16" in name else 8), tp, tokens=2048)
    products, waits = (1e3 * seconds for seconds in layer_seconds(passed))
    rows[name] = {"products": products, "waits": waits, "in all": products + waits, "GPUs x time": tp * (products + waits)}
    rows[name] |= {f"GPUs x time, collectives x {n}": 1e3 * tp * sum(layer_seconds(passed, n)) for n in (0.5, 2)}
print(f"milliseconds (predicted), CONTENTION = {CONTENTION}")
pd.DataFrame(rows).T.round(1)

# %%
chosen = {name: stages[name] for name in ("TP 8", "TP 16, 8 ports x 25 GB/s", "TP 16, 1 port x 25 GB/s")}
show(draw_layer_times(chosen, CONTENTION, title="Ten collectives of a layer of 175B, beside its products (predicted)"),
     alt="At TP 8 collectives are slivers. At TP 16 over one port they outlast the products laid beside them.")

# %% [markdown]
# **Read it.** GPUs times time is the price. From 2 to 8 ranks in a node it rises by 19%, from 8 to 16 by 22% even if NVLink joins
# all sixteen. Leaving the node adds 7% with a port a GPU, 35% with ports half as fast; with one port a node, 16 ranks
# are slower than 4. At half or twice a collective's time the order stays. Pipeline and data parallelism
# take the slow links ([lesson 14](14_three_dimensions.ipynb)).
#
# **"TP = 8, always"** is folklore, though. Each of eight ranks computes half as much as each of four, and sends no less:
# 12% dearer, predicted. From
# [BLOOM's log](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md),
# pairs that differ in TP and data parallelism alone (published, one iteration each):

# %%
bloom_prequel_pairs()

# %% [markdown]
# Rows 6 and 7 hold one setup at 145.92 and 141.99: equal runs differ by 2.8%. So 4 beats 8 in four of six pairs; rows 2 and 3
# show nothing, nor does 2 against 4. Where 4 fits, try it before 8.
#
# | take | when | costs |
# |---|---|---|
# | tensor parallelism, 2 to 8 | more GPUs than sequences, or a layer's activations too large; NVLink | four sums a layer |
# | sequence and loss parallelism | with it, if ranks divide the sequence | second gathers, or inputs kept |
# | FSDP instead | a sequence a GPU fits | weights gathered twice, gradients scattered |
# | recomputation instead ([05](../intermediate/05_checkpointing.ipynb)) | slow links | one more forward; beside tensor parallelism its collectives, too |
#
# ## Break it, diagnose it
#
# The model of section 4, sequence split by hand, two key-value heads for four ranks. `shared.add_up()` makes two
# sums: of norms, over all ranks, and of copied heads, over two. One is left out. What drifts?

# %%
def spread(tensor, group=None):
    """How far a tensor differs between ranks: 0 where they hold the same. Works in any program of ranks."""
    top, low = tensor.detach().clone(), tensor.detach().clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    dist.all_reduce(low, dist.ReduceOp.MIN, group)
    return (top - low).max().item()

# %%
def forgotten(left_out):
    model = fresh(kv_heads=2)
    shared = split_layers(model, sequence_dim=1)
    replicas = dict(zip(("norms", "copies"), shared.over, strict=True))  # of each: who holds it, and what
    shared.over = [it for what, it in replicas.items() if what != left_out]
    losses = train(model, 6, mean_of_words, shared)
    return losses, {what: max(spread(p, group) for p in it) for what, (group, it) in replicas.items()}

# %%
for left_out in (None, "norms", "copies"):
    losses, drift = run_ranks(forgotten, RANKS, left_out)[0]
    print(f"{f'without the sum of {left_out}' if left_out else 'all sums':<26}", *(f"{loss:.6f}" for loss in losses),
          f" ranks differ in norms by {drift['norms']:.0e}, in copied heads by {drift['copies']:.0e}")
    assert all((drift[what] > 0) == (what == left_out) for what in drift), "what is not added up drifts"

# %% [markdown]
# **Diagnose it.** The first loss is right. Then each rank updates its norms by its own tokens, or its copy of a head by its own
# queries. No loss curve tells. Compare replicas to the last bit: `spread`.

# %% [markdown]
# ## Recap
#
# Columns, then rows: one sum forward ($g$), one backward ($f$). What lies between stays whole, unless the sequence is split.
#
# **Test yourself.** A model has 8 key-value heads. You go from TP 8 to TP 16 inside one NVLink domain. What changes for
# keys and values?
#
# <details><summary>Answer</summary>
#
# With copies their weights shrink no further, and each gradient needs a sum over two ranks. In
# Megatron-Core the weights halve once more, and a layer's forward gathers all queries, keys and values.
#
# </details>
#
# Do the [lab](../../labs/advanced/12_tensor_parallel.ipynb) in a copy (`make my-labs`), then see
# its [solution](../../solutions/advanced/12_tensor_parallel.ipynb).
#
# **References.** Shoeybi and others, *Megatron-LM*, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053). Korthikanti and others,
# *Reducing Activation Recomputation*, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198).

# %% [markdown]
# ## On Monday
#
# When GPUs outnumber a batch's sequences, or one layer's activations fill a GPU, over NVLink. FSDP takes the other GPUs.
# For PyTorch (2.15 here), with your layers' names:
#
# ```python
# # torchrun --nproc-per-node 8 train.py. Before this, you have:
# # - torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), device = torch.device("cuda"), tp = 2,
# #   world_size = int(os.environ["WORLD_SIZE"]), dtype, reduce_dtype = torch.bfloat16, torch.float32, learning_rate;
# # - n_kv_heads, n_channels of the feed-forward layer, n_words, n_tokens of a sequence, a folder for checkpoints;
# # - make_model(): your model, embedding and head two matrices; make_buffers(model): fills what no state dict holds, such
# #   as RoPE's tables; weights: the state dict on rank 0, {} elsewhere;
# # - batches(dp_rank): inputs and targets, the same on all ranks of a TP group;
# # - attention that counts local heads, k.view(b, s, -1, head_dim), and takes s from the tokens: after the embedding
# #   x.shape[1] is s / tp.
# from contextlib import nullcontext
#
# import torch
# import torch.distributed.checkpoint as dcp
# import torch.nn.functional as F
# from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_state_dict, set_model_state_dict, set_state_dict)
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
# from torch.distributed.tensor import DTensor, Replicate, Shard
# from torch.distributed.tensor.debug import CommDebugMode
# from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
#                                                loss_parallel, parallelize_module)
#
# mesh = init_device_mesh(device.type, (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
# with torch.device("meta"):  # shapes alone: no rank ever holds the whole model
#     model = make_model()
# for name, size in {"key-value heads": n_kv_heads, "channels": n_channels, "words": n_words, "sequence": n_tokens}.items():
#     assert size % tp == 0, f"{size} {name} do not divide over {tp} ranks"
#
# whole, part = Replicate(), Shard(1)  # activations are (batch, sequence, channels)
# parallelize_module(model, mesh["tp"], {
#     "embed": RowwiseParallel(input_layouts=whole, output_layouts=part),  # ColwiseParallel(...): a part of its gradient
#     "norm": SequenceParallel(),
#     "head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
# })
# for block in model.blocks:
#     parallelize_module(block, mesh["tp"], {
#         "attention_norm": SequenceParallel(), "feedforward_norm": SequenceParallel(),
#         # One entry an argument by position; None for what is no stream, as a rotation. By name: input_kwarg_layouts={...}
#         "attention": PrepareModuleInput(input_layouts=(part, None), desired_input_layouts=(whole, None)),
#         "feedforward": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
#         **dict.fromkeys(["attention.query", "attention.key", "attention.value"], ColwiseParallel()),
#         **dict.fromkeys(["feedforward.gate", "feedforward.up"], ColwiseParallel()),
#         **dict.fromkeys(["attention.output", "feedforward.down"], RowwiseParallel(output_layouts=part)),
#     })
# for name, p in model.named_parameters():  # a plain tensor's gradient would be that of its own tokens only
#     assert isinstance(p, DTensor), f"{name} is in no plan"
#
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
# sent = CommDebugMode()
# for step, (inputs, targets) in enumerate(batches(mesh["dp"].get_local_rank())):
#     with nullcontext() if step else sent, loss_parallel():  # counting takes time: the first step only
#         logits = model(inputs).to(reduce_dtype)  # the loss in 16 bits would be rounded to 0.06
#         loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
#         loss.backward()
#     norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the whole model's; print norm.full_tensor()
#     optimizer.step()
#     optimizer.zero_grad()
# print(sent.get_comm_counts())
#
# state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
# dcp.save(state, checkpoint_id=folder)  # each rank its parts; another tp or number of ranks can load them
# dcp.load(state, checkpoint_id=folder)
# set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
# ```
#
# **Look at** the counts: four reduce-scatters and four all-gathers a block, two of each for the ends; all-reduces: three for
# the loss, one for each RMSNorm (a LayerNorm has two), one for each row-parallel bias; FSDP's own beside them. In fp32, losses are those of one process to rounding. In
# transformers (5.23 here), under the same `torchrun` (`tp_plan="auto"` in older versions):
#
# ```python
# from transformers import AutoModelForCausalLM
# from transformers.distributed import DistributedConfig
#
# model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=world_size))
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
# loss = model(input_ids=batch, labels=batch).loss
# loss.backward()
# optimizer.step()
# held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
# print(f"{held:,} of {model.num_parameters():,} parameters on this rank")
# ```
#
# **Look at** what a rank holds: its share of all matrices in the model's own plan. Norms and the sequence stay whole.
# In Megatron-LM the same is `--tensor-model-parallel-size 8 --sequence-parallel`.
