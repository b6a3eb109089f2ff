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
# **The question.** What does it take for four ranks to hold a quarter of a layer each, and to compute it together?
#
# **Promise.** You split every matrix of a transformer by hand and with PyTorch's DTensor, and find what each rank still
# holds whole. You divide that, too, and count what it sends. The losses stay those of one process to 15 digits.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 70 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# Four ranks share every matrix of a layer. One GPU alone would keep 100% of the layer's activations for backward. How
# many percent does each of the four ranks keep? Write your guess. Section 3 measures.

# %%
my_bet_percent = 25

# %% tags=["setup"]
here = setup("advanced/12")

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)

from utils import Batch, Cluster, Evidence, Plan, Span, Transformer, TransformerConfig, check
from utils import draw_lanes, model_shape, run_ranks, score, scoreboard, show, traffic
from utils.catalog import SUSTAINED, link
from utils.planner.step_time.block_time import block_time
from utils.planner.calibration import BESIDE_TRAINING
from utils.lessons.lesson_12.compare import apart, attention_apart, columns_apart, kept_bytes, loss_apart, mine
from utils.lessons.lesson_12.tensor_flow import draw_feedforward, draw_kept
from utils.lessons.lesson_12.tensor_layers import vocabulary_cross_entropy
from utils.lessons.lesson_12.tensor_split import split_layers
from utils.lessons.lesson_12.workers import ring_bytes
from evidence.validation.tables import source, table

RANKS = 4

# %% [markdown]
# Lesson 09 shared *states* among ranks that compute different data. Here ranks share the computing of the *same* data.
# New words stand in the [glossary](../00_glossary.ipynb). In one picture:

# %%
show(draw_feedforward(),
     alt="Four ranks in two schemes. Tensor parallel: each has the whole input, a quarter of the channels inside, a "
     "term of the output; an all-reduce gives all of them the sum. With sequence parallelism each has a quarter of "
     "the sequence outside, gathered before and reduce-scattered after.")

# %% [markdown]
# ## 1. Two matrices, one sum
#
# A feed-forward layer is $z = \mathrm{gelu}(x A)\,B$. Cut $A$ by **columns**: each rank computes some channels of the
# inside, and GELU works on each channel by itself. Cut $B$ by **rows**, the same channels: each rank has a term of the
# sum $z$. So forward needs one sum over the ranks, at the end: Megatron's $g$. Backward mirrors it: each
# rank's share of $A$ gives a term of the gradient of $x$, so one sum, at the layer's beginning: $f$
# (Shoeybi and others 2019, section 3).

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


def split_feedforward(A, B, x):  # nn.Linear keeps its matrix turned: (outputs, inputs)
    inside = F.gelu(F.linear(CopyIn.apply(x), A))
    return SumOut.apply(F.linear(inside, B))


# %% [markdown]
# **Predict.** The *stream* flows from layer to layer: $s$ positions, $b$ sequences, $h$ channels. One sum of it
# forward and one backward are $2 \cdot s\,b\,h$ numbers, here of 8 bytes.
# Gradients of $A$ and $B$ stay where their parts are.

# %%
S, B, H = 16, 2, 32  # sequence, batch, hidden; the text's matrix B is C here


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
print(f"gradients of A, B and x: {gap:.0e} from one process, in fp64")
print(f"{lines}; predicted {2 * S * B * H * 8:,} bytes, counted {found:,}")
assert gap < 1e-9, "the split layer computes something else: is every sum there, forward and backward?"
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
# columns, **whole heads at a time**, and the output matrix by rows. Again one $f$ and one $g$: a layer makes four
# sums of the stream, two forward, two backward.
#
# With grouped queries there can be fewer key-value heads than ranks. Then several ranks hold a **copy** of the
# one that their query heads share, and each copy sees a part of its gradient.

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
# Weights, gradients and optimizer states are quarters now, but for copied heads and norms. Activations? This is what a GPT
# layer in 16 bits keeps for backward on $t$ ranks (Korthikanti and others 2022; `GPTBlock` keeps just that). The last term
# is the scores of $a$ heads: flash attention has none.
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
for way, size in kept.items():
    print(f"{way:<16} keeps {size:>9,} bytes, {size / kept['one GPU']:.0%} (measured)")
print(f"your bet: {my_bet_percent}%")

# %% [markdown]
# **Read it.** Far more than a quarter. Between the matrices stand dropout, norms and residuals: every rank computes them
# **whole**, and keeps whole what they need. That is the 10: two norm inputs and two inputs of column matrices, at 2 bytes, and two
# dropout masks at 1. With flash attention it weighs more: at $t = 8$ a rank keeps $13/34$, 38%.
#
# But norms and dropout work on each token by itself. So let each rank have a part of the *sequence* there. An all-reduce is
# a reduce-scatter followed by an all-gather: put the first after the matrices and the second before the next ones, and
# the bytes sent are the same. Here is the column side. It keeps its *part* of $x$ and **gathers
# again** in backward. The row side is yours to write, in the lab.

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
# `split_layers` does both sides to a whole model (`sources/advanced/12_tensor_parallel/tensor_layers.py`). Measured
# and predicted:

# %%
kept["and sequence parallel"] = run_ranks(kept_bytes, RANKS, *LAYER.values(), True)[0]
length, batch, hidden, heads = LAYER.values()
sbh, scores, parts = length * batch * hidden, 5 * heads * length / hidden, {}
for way, (t, between) in {"one GPU": (1, 1), "tensor parallel": (RANKS, 1), "and sequence parallel": (RANKS, RANKS)}.items():
    terms = {"norms, inputs, masks": 10 / between, "inside": 24 / t, "scores": scores / t}
    parts[way] = {name: sbh * size for name, size in terms.items()}
    beside = length**2 + 8 * length * batch // between  # a causal mask, and the norms' statistics
    print(f"{way:<22} {kept[way]:>9,} bytes measured = {sum(parts[way].values()):>11,.0f} by the formula + {beside:,}",
          f"beside it  {kept[way] / kept['one GPU']:.0%}")
    assert kept[way] == sum(parts[way].values()) + beside, f"{way}: the layer keeps what the paper does not count"

# %%
show(draw_kept(kept, parts, title="Activations of one layer on one rank", device="cpu"),
     alt="Bytes kept by one rank: one GPU most; on four ranks the term of norms, inputs and masks stays whole "
     "until the sequence is split, too.")

# %% [markdown]
# **Read it.** Exact, but for what the paper leaves out as small: the mask of causal attention, which no rank divides, and the
# norms' statistics. With the sequence split the quarter is there.
#
# **The trap.** A norm's weight is whole on every rank, and each rank sees only its part of the tokens now, so
# only a part of the gradient. It must be added up over the ranks, as for copied heads: `shared.add_up()` below, Megatron's
# `finalize_model_grads`. "Break it" shows a run without.
#
# ### A loss without logits
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
gap, found = run_ranks(loss_apart, RANKS, split_cross_entropy, TOKENS, WORDS)[0]
print(f"gradient {gap:.0e} from one process; put in: {found:,} bytes, {found // TOKENS // 8} numbers a token;",
      f"gathering logits: {TOKENS * WORDS // RANKS * 8:,} bytes")
assert gap < 1e-9 and found == 3 * TOKENS * 8, "three numbers a token: a maximum, a sum, a target"

# %% [markdown]
# The embedding is cut by words as well: a rank looks up its own, puts zeros for the rest, and the ranks add up.
#
# ## 4. The library's way: a plan
#
# **DTensor** is a tensor that knows how it lies on the ranks: `Shard(1)`, `Replicate()`, or a term of a sum,
# `Partial()`. It sends where an operation needs another layout. You write which layer is cut which way:

# %%
def plan_of_block(sequence=False, together=True):
    between = Shard(1) if sequence else Replicate()  # (batch, sequence, channels)
    by_columns = ("attention.query", "attention.key", "attention.value", "feedforward.gate", "feedforward.up")
    plan = {name: ColwiseParallel() for name in by_columns}
    plan |= {n: RowwiseParallel(output_layouts=between) for n in ("attention.output", "feedforward.down")}
    if sequence:
        plan |= {name: SequenceParallel() for name in ("attention_norm", "feedforward_norm")}
    if together:  # one DTensor for all the matrices that read it; attention's second input is its rotation
        plan["attention"] = PrepareModuleInput(input_layouts=(between, None), desired_input_layouts=(Replicate(), None))
        plan["feedforward"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    return plan


# %%
def by_library(model, sequence=False, together=True):
    between, mesh = Shard(1) if sequence else Replicate(), init_device_mesh("cpu", (dist.get_world_size(),))
    ends = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(model, mesh, ends | ({"norm": SequenceParallel()} if sequence else {}))
    for block in model.blocks:
        parallelize_module(block, mesh, plan_of_block(sequence, together))


# %% [markdown]
# Logits come out as a DTensor with some words on each rank, and `loss_parallel()` lets `F.cross_entropy` work on them
# without gathering: the loss above, as a library call. The optimizer is made after the split.

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
    return losses, {row.collective: (row.calls // steps, row.payload_bytes // steps) for row in sent.rows}


# %% [markdown]
# A model of three layers and one of two differ by a layer. **Predict:** four sums of the stream,
# $4 \cdot s\,b\,h$ numbers of 8 bytes, for all ways. Does `together` matter? Without it the plan is that of
# [PyTorch's tutorial](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html) at its beginning.

# %%
WAYS = ["by hand", "DTensor, the tutorial's plan", "DTensor", "DTensor, sequence", "by hand, sequence"]


def all_ways(layers, steps):
    return {way: run(way, layers, steps) for way in WAYS}


one = run_ranks(run, 1, "one process")[0][0]
two_layers, three_layers = (run_ranks(all_ways, RANKS, *of)[0] for of in ((2, 10), (3, 1)))
over_a_ring = {}
for way in WAYS:
    off = max(abs(a / b - 1) for a, b in zip(two_layers[way][0], one, strict=True))
    more, less = three_layers[way][1], two_layers[way][1]
    layer = {kind: tuple(a - b for a, b in zip(more[kind], less[kind], strict=True)) for kind in more}
    over_a_ring[way] = ring_bytes({kind: size for kind, (_, size) in layer.items()})
    print(f"{way:<29} losses {off:.0e} from one process; {over_a_ring[way]:>6,} bytes a layer over a ring:",
          ", ".join(f"{calls} x {kind}" for kind, (calls, _) in layer.items() if calls))
    assert off < 1e-12, f"{way} trains another model: is a sum missing?"

# %% [markdown]
# **Read it.** The tutorial's plan gives the right losses and sends nearly twice the bytes. Query, key and value each
# take the plain tensor and each send its gradient back: three sums for one $f$; gate and up two. `together` makes the input
# **one** DTensor for all of them, and their gradients are added before they travel.
#
# With the sequence split DTensor sends what the all-reduces sent, but keeps the gathered inputs, $sbh \cdot 4$ bytes of the 10,
# undivided; its two all-reduces add up the norms' gradients. By hand we gather again: a quarter more bytes, and a quarter
# held. Memory or bytes: you choose.
#
# **Question.** Llama-2-70B has $h = 8192$. A rank trains on one sequence of 4,096 tokens, in bf16. How many MB
# ($10^6$ bytes) does one layer put into all-reduces in a step, by the plan that sends 4 streams?

# %%
mb_per_layer = ...
check("12.mb_per_layer", mb_per_layer)

# %% [markdown]
# ### At real size
#
# Two layers of Llama-2-70B's shape on eight simulated ranks, one sequence of 4,096 tokens, by the same functions:

# %% jupyter={"source_hidden": true}
from dataclasses import replace
from utils import simulate
from utils.parallel import ParallelDims, device_mesh
from utils.lessons.lesson_12.tensor_traffic import tensor_traffic

SHAPE, DIMS = model_shape("llama-2-70b"), ParallelDims(tp=8)
planned = tensor_traffic(replace(SHAPE, layers=2, published_count=None), Plan(tp=8, sequence_parallel=True),
                         Batch(sequences=1, sequence_length=4096))

# %% jupyter={"source_hidden": true}
def two_of_70b(way):
    made, by_plan, sequence = {}, "DTensor" in way, "sequence" in way

    def build():
        model = Transformer(TransformerConfig.from_shape(SHAPE, layers=2)).to(torch.bfloat16)
        if by_plan:
            by_library(model, sequence)
        else:
            made["group"] = device_mesh(DIMS, "cpu").get_group("tp")
            made["shared"] = split_layers(model, made["group"], sequence_dim=1 if sequence else None)
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
for found in map(two_of_70b, ("by hand", "DTensor, sequence", "by hand, sequence")):
    print(f"{found.name:<40} peak {found.peak_bytes / 2**30:.2f} GiB, {found.breakdown['activations'] / 2**30:.2f} of it",
          "activations (simulated)")
    score("12", found)
for kind, size in planned.items():
    counted = sum(row.payload_bytes for row in found.traffic if row.collective == kind and not row.at_startup)
    print(f"{kind:<15} by formula {size:>13,.0f} bytes, simulated {counted:>13,}")
    assert size == counted, f"planner and simulation disagree about {kind}"

# %% [markdown]
# **Read it.** Without a split sequence most activations stand on all eight ranks: splitting it halves the peak. DTensor's
# gathered inputs stand between. A rank sends what the formula says: ten reduce-scatters of the stream, eight of them the
# two layers'.
#
# ## 5. Why it stays inside a node
#
# A layer needs four sums. In forward the GPU has nothing else to do while one is under way: the next product
# needs it. In backward, some travel beside the product of a weight's gradient. Inside
# a node of A100s each GPU sends by NVLink; between nodes by a port of its own, or one for the node. The planner predicts
# one layer of 175B, forward and backward:

# %%
BIG, PORT = model_shape("gpt-3-175b"), link("InfiniBand HDR").link_bytes_per_second
print(f"NVLink {link('NVLink 3').link_bytes_per_second / 1e9:.0f} GB/s a GPU, InfiniBand {PORT / 1e9:.0f} GB/s a port (published);",
      ", ".join(f"{kind} reaches {SUSTAINED[kind].share:.0%} alone" for kind in ("NVLink 3", "InfiniBand")),
      f"and {BESIDE_TRAINING:.0%} of that in training")
print(f"{'ranks':<22} products  other kernels  communication   in all  GPUs x time (predicted)")
lanes = {}
for tp, ports in ((2, 8), (4, 8), (8, 8), (16, 8), (16, 1)):
    machine = Cluster(gpu="A100 80GB", nodes=8, network_bytes_per_second=ports * PORT, network_ports=ports)
    plan = Plan(tp=tp, dp=64 // tp, sequence_parallel=True)
    times = block_time(BIG, machine, plan, Batch(sequences=64, sequence_length=2048))
    passed = times.forward + times.backward
    parts = {"products": passed.matmul, "other kernels": passed.memory, "communication": passed.communication}
    name = f"TP {tp}" + (f", {ports} port{'s' * (ports > 1)} a node" if tp > 8 else "")
    print(f"{name:<20}", *(f"{1e3 * s:>9.2f} ms" for s in [*parts.values(), passed.total]), f"{1e3 * tp * passed.total:>8.0f} ms")
    edges = [0.0, passed.matmul, passed.matmul + passed.memory, passed.total]
    lanes[name] = [Span(kind, *edges[i : i + 2]) for i, kind in enumerate(parts)]

# %%
show(draw_lanes(lanes, title="A layer of 175B on nodes of A100", evidence=Evidence.PREDICTED),
     alt="Predicted time of a layer: products halve with each doubling of the ranks; communication is small up to 8 "
     "ranks, half as long as the products for 16 with a port a GPU, and over three times as long with one port a node.")

# %% [markdown]
# **Read it.** From 2 to 8 ranks the layer is over three times as fast on four times the GPUs. With 16 and eight
# ports a node, a third of the time is sending. With one port, 16 ranks take about as long as 4. Pipeline and data
# parallelism send less often: they take the slow links ([lesson 14](14_three_dimensions.ipynb)).
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
# TP 4 was a little faster, and needed more memory. Sends can be hidden: cut a gather and its product into pieces,
# and each piece travels while the one before is multiplied. PyTorch does it under `torch.compile` on NVLink; its team
# published speed-ups of up to 20% for the forward of Llama 3 70B, 8% for the step
# ([2024](https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487)).
#
# | take | when | costs |
# |---|---|---|
# | tensor parallelism, 2 to 8 | a layer, or its activations, is too large for a GPU; fast links | four sums a layer, each in the next product's way |
# | sequence and loss parallelism | always with it | gathers again, or gathered inputs kept; norms to add up |
# | FSDP instead | the layer fits; many tokens a rank | gathers weights, not activations |
#
# ## Break it, diagnose it
#
# The model of section 4 with the sequence split by hand, and two key-value heads for four ranks. In the second run
# `shared.add_up()` is gone. Which losses are right? What happens to a weight that all ranks hold, and why?

# %%
def forgotten(add_up):
    model = fresh(kv_heads=2)
    shared = split_layers(model, sequence_dim=1)
    losses = train(model, 6, mean_of_words, shared if add_up else None)
    return losses, model.blocks[0].attention_norm.weight.detach().clone()


right, wrong = (run_ranks(forgotten, RANKS, add_up) for add_up in (True, False))
for name, found in (("with add_up", right), ("without", wrong)):
    drift = max((rank[1] - found[0][1]).abs().max().item() for rank in found)
    print(f"{name:<12} losses of rank 0:", *(f"{loss:.6f}" for loss in found[0][0]))
    print(f"{'':<12} the first norm's weight differs between ranks by {drift:.1e}")
assert wrong[0][0][0] == right[0][0][0] and wrong[0][0][-1] != right[0][0][-1], "step 0 hides it, later steps do not"

# %% [markdown]
# **Diagnose it.** The first loss is right: forward has no error. Then each rank updates its norms by its own
# tokens, and each copy of a head by its own queries. Tensors that must be equal drift apart, and training goes on. Some
# wrong losses are *lower* than the right ones: a curve does not tell. Compare replicated
# parameters between ranks, to the last bit.

# %% jupyter={"source_hidden": true}
for way, size in kept.items():
    score("12", f"activations of a layer, {way}", peak_bytes=size)
scoreboard("12")

# %% [markdown]
# ## Recap
#
# - Columns, then rows: one sum forward ($g$), one backward ($f$), for attention by heads and for the feed-forward.
# - Tensor parallelism alone leaves $10\,sbh$ bytes whole. Splitting the sequence between the matrices divides them.
# - A loss needs three numbers a token, not the logits.
# - Same losses do not mean same bytes: count what a plan sends. Four sums a layer want NVLink.
#
# **Test yourself.** A model has 8 key-value heads. You go from TP 8 to TP 16 inside one large NVLink domain. What changes for
# keys and values?
#
# <details><summary>Answer</summary>
#
# Each key-value head now stands on two ranks. Its weights, gradients and states do not shrink further, its gradient
# needs a sum over the two copies, and both compute the same keys and values.
#
# </details>
#
# Do the [lab](../../labs/advanced/12_tensor_parallel.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/12_tensor_parallel.ipynb).
#
# **References.** Shoeybi and others, *Megatron-LM*, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053). Korthikanti and others,
# *Reducing Activation Recomputation in Large Transformer Models*, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198). PyTorch,
# [Tensor Parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html). BLOOM's
# [chronicles](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md).

# %% [markdown]
# ## On Monday
#
# When one layer's activations, not the states, fill your GPUs, and they share NVLink. Start with
# `torchrun --nproc-per-node 2`; every rank reads the same batch. In plain PyTorch, before the optimizer is made, with
# your layers' names:
#
# ```python
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.tensor import Replicate, Shard
# from torch.distributed.tensor.debug import CommDebugMode
# from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
#                                                loss_parallel, parallelize_module)
#
# whole, part = Replicate(), Shard(1)  # activations are (batch, sequence, channels)
# mesh = init_device_mesh(device.type, (world_size,))
# parallelize_module(model, mesh, {
#     "embed": RowwiseParallel(input_layouts=whole, output_layouts=part),
#     "norm": SequenceParallel(),
#     "head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
# })
# for block in model.blocks:
#     parallelize_module(block, mesh, {
#         "attention_norm": SequenceParallel(), "feedforward_norm": SequenceParallel(),
#         "attention": PrepareModuleInput(input_layouts=(part, None), desired_input_layouts=(whole, None)),
#         "feedforward": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
#         **dict.fromkeys(["attention.query", "attention.key", "attention.value"], ColwiseParallel()),
#         **dict.fromkeys(["feedforward.gate", "feedforward.up"], ColwiseParallel()),
#         **dict.fromkeys(["attention.output", "feedforward.down"], RowwiseParallel(output_layouts=part)),
#     })
# optimizer = torch.optim.AdamW(model.parameters())
#
# with CommDebugMode() as sent, loss_parallel():
#     loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
#     loss.backward()
# norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the whole model's: DTensors know their parts
# optimizer.step()
# print(sent.get_comm_counts())
# ```
#
# **Look at** the counts: four reduce-scatters and four all-gathers a block, two of each for the ends. Losses are those of one process, and
# `torch.cuda.max_memory_allocated()` falls. In transformers, under the same `torchrun`:
#
# ```python
# from transformers import AutoModelForCausalLM
# from transformers.distributed import DistributedConfig
#
# model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=world_size))
# optimizer = torch.optim.AdamW(model.parameters())
# loss = model(input_ids=batch, labels=batch).loss
# loss.backward()
# optimizer.step()
# held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
# print(f"{held:,} of {model.num_parameters():,} parameters on this rank")
# ```
#
# **Look at** what a rank holds: its share of all matrices in the model's own plan, norms whole. It does not split the sequence.
# Megatron-LM does all of this lesson by `--tensor-model-parallel-size 8 --sequence-parallel --tp-comm-overlap`.
