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
# **Promise.** You split a feed-forward layer and attention by hand, and a whole model by PyTorch's DTensor, and count what
# a rank holds, keeps and sends. Losses stay those of one process to 15 digits.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 70 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# Four ranks share every matrix of a GPT layer. One GPU would keep 100% of its activations for backward. How many percent
# does each of the four keep? Section 3 measures.

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

from utils import Batch, Cluster, Plan, Transformer, TransformerConfig, check
from utils import model_shape, run_ranks, score, show, traffic
from utils.catalog import SUSTAINED, link
from utils.planner.step_time.block_time import block_time
from utils.planner.calibration import BESIDE_TRAINING
from utils.lessons.lesson_12.compare import apart, attention_apart, columns_apart, kept_bytes, loss_apart, mine
from utils.lessons.lesson_12.tensor_flow import draw_feedforward, draw_kept
from utils.lessons.lesson_12.tensor_layers import vocabulary_cross_entropy
from utils.lessons.lesson_12.tensor_split import split_layers
from utils.lessons.lesson_12.workers import ring_bytes
from evidence.validation.tables import table

RANKS, S, B, H = 4, 16, 2, 32  # ranks; positions, sequences and channels of section 1

# %% [markdown]
# Lesson 09 shared *states* among ranks that compute different data. Here ranks share the computing of the *same* data.
# New words stand in the [glossary](../00_glossary.ipynb).

# %%
show(draw_feedforward(),
     alt="Four ranks in two schemes. Tensor parallel: each has the whole input, a quarter of A's columns, of the "
     "channels inside and of C's rows, and a term of the output; an all-reduce gives all of them the sum. With sequence "
     "parallelism each has a quarter of the sequence outside, gathered before and reduce-scattered after.")

# %% [markdown]
# ## 1. Two matrices, one sum
#
# A feed-forward layer is $z = \mathrm{gelu}(x A)\,C$. Cut $A$ by **columns**: each rank computes some channels of the
# inside, and GELU works on each channel by itself. Cut $C$ by **rows**, the same channels: each rank has a term of the
# sum $z$. So forward needs one sum over the ranks, at the end: Megatron's $g$. Backward mirrors it: each
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


def split_feedforward(A, C, x):  # nn.Linear keeps its matrix turned: (outputs, inputs)
    inside = F.gelu(F.linear(CopyIn.apply(x), A))
    return SumOut.apply(F.linear(inside, C))


# %% [markdown]
# **Predict.** The *stream* flows from layer to layer: $s$ positions, $b$ sequences, $h$ channels. Around a ring of $t$
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
# Of weights, gradients and states a rank holds a quarter now, but for copied heads and norms (section 4 counts). Of
# activations? This is what a GPT layer in 16 bits keeps for backward on $t$ ranks (Korthikanti and others 2022); the last
# term, scores of $a$ heads, flash attention has not. `GPTBlock` (`sources/advanced/12_tensor_parallel/gpt.py`) is written to keep
# what they count: the run tests how it *divides*.
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
# **Read it.** Far more than a quarter. What stands between the matrices, every rank computes and keeps **whole**:
# inputs of two norms (4 bytes an element), masks of two dropouts (2). Whole, too, are the inputs of query, key,
# value and of $A$ (4): a column needs all of its input. That is the 10. Without scores it weighs more: with flash
# attention and $t = 4$ a rank keeps $(10 + 24/4)/34$, 47%.
#
# But norms and dropout work on each token by itself. So let each rank have a part of the *sequence* there. An all-reduce is
# a reduce-scatter followed by an all-gather: put the first after the matrices, the second before the next, and
# a ring sends as much. Random states follow: the same elements, the same mask.
#
# Here is the column side. It keeps its *part* of $x$ and **gathers again** in backward: one more send, which Megatron
# hides behind `gradient @ A`. The row side is yours, in the lab.

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
# `split_layers` (`tensor_split.py`, there too) does this to a whole model: both sides, embedding and head.

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
show(draw_kept(kept, parts, title="Activations of a GPT layer: one GPU, and one of four ranks\n"
               "bf16, s 128, b 2, h 128, 4 heads, scores kept", device="cpu"),
     alt="Bytes kept: one GPU 100%; a rank of four 40%, as the term of norms, inputs and masks stays whole; "
     "26% once the sequence is split, too.")

# %% [markdown]
# **Read it.** There is the quarter. What the paper leaves out as small stands beside it: the
# causal mask, which no rank divides, and the norms' statistics.
#
# **The trap.** A norm's weight is whole on every rank, and each sees only its part of the tokens now, so
# a part of the gradient. It must be added up over the ranks, as for copied heads: `shared.add_up()` below.
#
# ### A loss that gathers no logits
#
# The output head is the widest matrix. Cut by columns, each rank has the logits of some *words*. Gathering would make
# them whole on every rank. The loss $\ell$ of a token needs three numbers: the largest logit $m$ (so that
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
    if together:  # one DTensor for all matrices that read it. None: an input that is no stream, attention's rotation
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
# ungathered: the loss above, as a library call.

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
for way in WAYS:
    (losses, held, less), more = two_layers[way], three_layers[way][2]
    off = max(abs(a / b - 1) for a, b in zip(losses, one, strict=True))
    calls = {kind: more[kind][0] - less[kind][0] for kind in more}
    sent = {kind: ring_bytes({kind: more[kind][1] - less[kind][1]}) for kind in more}
    print(f"{way:<29} losses {off:.0e} from one process, {held / whole:.1%} of the parameters; {sum(sent.values()):,} bytes a layer:",
          ", ".join(f"{calls[kind]} x {kind} {sent[kind]:,}" for kind in sent))
    assert off < 1e-12, f"{way} trains another model: is a sum missing?"

# %% [markdown]
# **Read it.** The tutorial's plan gives the right losses and sends 7/4 of the bytes. Query, key and value each send
# a gradient of the plain input: three sums for one $f$; gate and up two. `together` makes the input **one** DTensor, and
# gradients are added before they travel.
#
# With the sequence split DTensor sends what the all-reduces sent, and 768 bytes for the norms' gradients (by hand all
# norms share one call). But it keeps the gathered inputs, $4\,sbh$ bytes a layer, whole. By hand we gather twice more: a quarter more
# bytes.
#
# **Question.** Llama-2-70B has $h = 8192$. How many MB ($10^6$ bytes) does one of **eight** ranks send for a layer and step of
# one sequence of 4,096 tokens, in bf16, by the plan with four all-reduces?

# %%
mb_per_layer = ...
check("12.mb_per_layer", mb_per_layer)

# %% [markdown]
# ### At real size
#
# Two layers of Llama-2-70B's shape on one of eight simulated ranks, one sequence of 4,096 tokens:

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
ranks_of_70b = {way: two_of_70b(way) for way in ("by hand", "DTensor, sequence", "by hand, sequence")}
for found in ranks_of_70b.values():
    print(f"{found.name:<40} peak {found.peak_bytes / 2**20:,.0f} MiB (simulated):",
          ", ".join(f"{found.breakdown[kind] / 2**20:,.1f} of {kind}" for kind in ("gradients", "activations", "temporaries")))
    score("12", found)
by_plan, by_hand = (ranks_of_70b[way].breakdown for way in ("DTensor, sequence", "by hand, sequence"))
for kind, numbers in (("activations", 5 * 4096 * SHAPE.hidden), ("gradients", SHAPE.vocabulary * SHAPE.hidden)):
    more, predicted = by_plan[kind] - by_hand[kind], 2 * numbers * 7 / 8
    print(f"DTensor, sequence: {more / 2**20:.1f} MiB more {kind} than by hand; predicted {predicted / 2**20:.1f}")
    assert abs(more - predicted) < 2**20, f"DTensor keeps other {kind} than inputs of columns and the embedding's gradient"
for kind, size in planned.items():
    counted = sum(row.payload_bytes for row in found.traffic if row.collective == kind and not row.at_startup)
    print(f"by hand, sequence: {kind:<15} {ring_bytes({kind: counted}, 8) / 1e6:6.1f} MB sent around a ring")
    assert size == counted, f"planner and simulation disagree about {kind}"

# %% [markdown]
# **Read it.** Without a split sequence most activations stand on all eight ranks. DTensor keeps 280 MiB more than by hand: inputs of five column sides,
# gathered: two a layer, and the head's. And 437.5 MiB of gradients: the embedding's comes out
# whole. The last 62.6 are temporaries. By hand ten reduce-scatters send 587 MB, and fifteen gathers, five of them the second ones, 881.
#
# ## 5. Why it stays inside a node
#
# The next product waits for each sum of forward. Inside
# a node of A100s a GPU sends by NVLink; between nodes by a port of its own, or one for all. The planner predicts
# a layer of 175B, one sequence of 2,048 tokens, forward and backward. *Communication* is the time that shows: four of
# backward's six collectives run beside a product, and count 38% (`CONTENTION`).

# %%
BIG, PORT = model_shape("gpt-3-175b"), link("InfiniBand HDR").link_bytes_per_second
for name, line, kind in (("NVLink", link("NVLink 3").link_bytes_per_second, "NVLink 3"), ("a port", PORT, "InfiniBand")):
    print(f"{name}: {line / 1e9:.0f} GB/s a direction (published), {SUSTAINED[kind].share * BESIDE_TRAINING * line / 1e9:.0f} in training (planner)")
print(f"{'ranks':<30} products  other kernels  communication   in all  GPUs x time (predicted)")
for tp, ports, faster in ((2, 8, 1), (4, 8, 1), (8, 8, 1), (16, 8, 2), (16, 8, 1), (16, 8, 0.5), (16, 1, 1)):
    machine = Cluster(gpu="A100 80GB", nodes=8, network_bytes_per_second=ports * faster * PORT, network_ports=ports)
    plan = Plan(tp=tp, dp=64 // tp, sequence_parallel=True)
    times = block_time(BIG, machine, plan, Batch(sequences=64, sequence_length=2048))
    passed = times.forward + times.backward
    parts = passed.matmul, passed.memory, passed.communication, passed.total
    name = f"TP {tp}" + (f", {ports} x {faster * PORT / 1e9:.4g} GB/s a node" if tp > 8 else "")
    print(f"{name:<28}", *(f"{1e3 * s:>9.2f} ms" for s in parts), f"{1e3 * tp * passed.total:>8.0f} ms")

# %% [markdown]
# **Read it.** GPUs times time is the price. Inside the node, four times the ranks cost 19% more. The doubling
# that leaves the node costs 30% with a port a GPU, 23% with ports twice as fast, 65% with half. With one port a node,
# 16 ranks take about as long as 4. Pipeline and data
# parallelism send less often: they take the slow links ([lesson 14](14_three_dimensions.ipynb)).
#
# **"TP = 8, always"** is folklore, though: more ranks make thinner products, and each sends no less. From
# [BLOOM's log](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md), the
# layouts in our extract that differ by it:

# %%
pairs = {}
for row in table("bloom_prequel"):
    alike = tuple(row[it] for it in ("note", "size_label", "nheads", "n_gpus", "pp", "mbs", "gbs"))
    pairs.setdefault(alike, {})[row["tp"]] = row
for (day, size, _, gpus, stages, micro_batch, _), by_tp in pairs.items():
    if {"4", "8"} <= by_tp.keys():
        print(f"{size}, {gpus} A100, pp {stages}, micro-batch {micro_batch}, {day} (published):", "; ".join(
            f"TP {tp}, dp {by_tp[tp]['dp']}: {by_tp[tp]['tflops_per_gpu']} TFLOP/s, {by_tp[tp]['mem_gb']} GB" for tp in "84"))

# %% [markdown]
# The whole log has six such pairs, a row being one iteration: TP 4 is ahead in five, by 2 to 19%, and 2.6% behind in one. It
# takes more memory, and leaves each pipeline half the micro-batches. Take the smallest TP that fits.
#
# | take | when | costs |
# |---|---|---|
# | tensor parallelism, 2 to 8 | a layer is too large; fast links | four sums a layer |
# | sequence and loss parallelism | always with it | second gathers, or inputs kept gathered |
# | FSDP instead | the layer fits; many tokens a rank | gathers weights, not activations |
# | recomputation instead ([05](../intermediate/05_checkpointing.ipynb)) | slow links | up to one more forward |
#
# ## Break it, diagnose it
#
# The model of section 4, sequence split by hand, two key-value heads for four ranks. `shared.add_up()` makes two
# sums: of norms, over all ranks, and of copied heads, over two. One is left out. Which losses are right? What drifts?

# %%
def forgotten(left_out):
    model = fresh(kv_heads=2)
    shared = split_layers(model, sequence_dim=1)
    shared.over = [sums for what, sums in zip(("norms", "copies"), shared.over, strict=True) if what != left_out]
    losses, block = train(model, 6, mean_of_words, shared), model.blocks[0]
    return losses, block.attention_norm.weight.detach().clone(), block.attention.key.weight.detach().clone()


for left_out in (None, "norms", "copies"):
    losses, norms, keys = zip(*run_ranks(forgotten, RANKS, left_out), strict=True)
    drift = max((norm - norms[0]).abs().max() for norm in norms), (keys[1] - keys[0]).abs().max()
    print(f"{f'without the sum of {left_out}' if left_out else 'all sums':<26}", *(f"{loss:.6f}" for loss in losses[0]),
          f" a norm differs by {drift[0]:.0e} between ranks, the two copies of a key head by {drift[1]:.0e}")
    assert (drift[0] > 0, drift[1] > 0) == (left_out == "norms", left_out == "copies"), "what is not added up drifts"

# %% [markdown]
# **Diagnose it.** The first loss is right. Then each rank updates its norms by its own
# tokens, or each copy of a head by its own queries. What must be equal drifts apart. Some wrong losses are *lower*: a curve
# does not tell. Compare replicated parameters between ranks, to the last bit.

# %% jupyter={"source_hidden": true}
for way, size in kept.items():
    score("12", f"activations of a layer, {way}", peak_bytes=size)

# %% [markdown]
# ## Recap
#
# - Columns, then rows: one sum forward ($g$), one backward ($f$).
# - Of a GPT layer, tensor parallelism alone leaves $10\,sbh$ bytes whole. Splitting the sequence between the matrices divides them.
# - A loss needs three numbers a token; no rank gathers the logits.
# - Same losses do not mean same bytes: count what a plan sends.
#
# **Test yourself.** A model has 8 key-value heads. You go from TP 8 to TP 16 inside one NVLink domain. What changes for
# keys and values?
#
# <details><summary>Answer</summary>
#
# Each head stands on two ranks: its weights shrink no further, and its gradient needs a sum over both.
#
# </details>
#
# Do the [lab](../../labs/advanced/12_tensor_parallel.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/12_tensor_parallel.ipynb).
#
# **References.** Shoeybi and others, *Megatron-LM*, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053). Korthikanti and others,
# *Reducing Activation Recomputation*, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198).

# %% [markdown]
# ## On Monday
#
# When one layer's activations, not the states, fill your GPUs, and they share NVLink. Start with
# `torchrun --nproc-per-node 2`; every rank reads the same batch. In PyTorch (2.15 here), before the optimizer is made, with
# your layers' names:
#
# ```python
# # Before: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])); device = torch.device("cuda"); `model` on it, the same on all
# # ranks; world_size = int(os.environ["WORLD_SIZE"]), which divides heads, channels, words and the sequence. Attention must
# # view by *local* heads: q.view(b, s, -1, head_dim), since a rank has n_heads / world_size of them.
# import torch
# import torch.nn.functional as F
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.tensor import DTensor, Replicate, Shard
# from torch.distributed.tensor.debug import CommDebugMode
# from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
#                                                loss_parallel, parallelize_module)
#
# whole, part = Replicate(), Shard(1)  # activations are (batch, sequence, channels)
# mesh = init_device_mesh(device.type, (world_size,))
# parallelize_module(model, mesh, {  # if embed and head were one matrix: model.head.weight = model.embed.weight, after this
#     "embed": RowwiseParallel(input_layouts=whole, output_layouts=part),
#     "norm": SequenceParallel(),
#     "head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
# })
# for block in model.blocks:
#     parallelize_module(block, mesh, {
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
# **Look at** the counts: four reduce-scatters and four all-gathers a block, two of each for the ends, three all-reduces for
# the loss; the norms' come later, in `clip_grad_norm_` or `step`. In fp32, losses are those of one process to rounding.
# `torch.cuda.max_memory_allocated()` falls. In transformers (5.23 here), under the same `torchrun`:
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
# Megatron-LM does all of this lesson by `--tensor-model-parallel-size 8 --sequence-parallel`; `--tp-comm-overlap` needs Transformer Engine.
