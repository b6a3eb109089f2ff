# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 18 Long contexts
#
# {{badges}}
#
# **The question.** A 7B model must train on sequences of 128k tokens, and longer. How do GPUs share one sequence?
#
# **Promise.** You add softmax up in pieces, pass keys around a ring of four ranks, and get one process's gradients, to
# fp64's rounding. Cures take a 7B from 935 GiB to 74, eight GPUs on one sequence to 23.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |
#
# ## A bet
#
# Four ranks hold a quarter of a sequence each, in order: rank 0 the first. A token looks at all before it. By how many
# percent is attention slower than if every rank had equal work? Section 3 measures.

# %%
my_bet_percent = 10

# %% tags=["setup"]
here = setup("advanced/18")

# %%
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F

from utils import Transformer, TransformerConfig, check, measure, model_shape, run_ranks, score, show
from utils.simulation.devices import simulated_device
from utils.lessons.lesson_18.at_size import of_one_rank
from utils.lessons.lesson_18.compare import apart, gathered, sent_bytes
from utils.lessons.lesson_18.figures import draw_growth, draw_rounds
from utils.lessons.lesson_18.pieces import attend_piece, piece_gradients
from utils.lessons.lesson_18.published import chosen_plan, llama_rows, torchtitan_rows
from utils.lessons.lesson_18.records.growth import LINES, RANKS as GPUS, is_the_same, recorded
from utils.lessons.lesson_18.refusals import check_heads, check_length
from utils.lessons.lesson_18.timed import slowed

RANKS = 4

# %% [markdown]
# ## 1. Where the bytes go
#
# Qwen2.5-7B on one of eight H100s, states sharded (FSDP2, fp32 states, bf16 compute), one sequence a GPU, flash
# attention. The picture was simulated beforehand (`records/growth.py`). New words stand in the [glossary](../00_glossary.ipynb).

# %%
growth = recorded()
show(draw_growth(growth, room_bytes=simulated_device("H100").usable_bytes, device="a simulated H100-80GB",
                 title="Qwen2.5-7B on 8 GPUs: FSDP2, fp32 states, bf16, flash attention"),
     alt="Peaks over 8k to 1M tokens: lines bend upwards, then climb by two as tokens double. A plain step fits 8k tokens, both cures just 128k, a ring of eight just 1M.")

# %% [markdown]
# **Read it.** A line climbs by two as the tokens double, once it leaves what does not grow (states, 10.6 GiB, and gathered
# weights): with flash attention **nothing is quadratic but the work**. The column of 128k, simulated again:

# %% jupyter={"source_hidden": true}
for name, cures in LINES.items():
    if "ring" in name:  # section 5 has the ring
        continue
    found = of_one_rank("qwen2.5-7b", 131_072, *cures)
    parts = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in found.breakdown.items() if size > 2**31)
    host = f", and {found.host_bytes / 2**30:.1f} on the host" * (found.host_bytes > 0)
    print(f"{name:<28}{found.peak_bytes / 2**30:>6.1f} GiB (simulated){host}: {parts}")
    assert is_the_same(found.peak_bytes, growth[name][131_072]), "the picture shows another step than this one"

# %% [markdown]
# **Read it.** (Parts above 2 GiB.) Each cure alone leaves what the other takes: without a chunked loss the logits of 152,064
# words and their gradients, without checkpoints ([05](../intermediate/05_checkpointing.ipynb)) what 28 blocks keep. Both leave 28
# inputs, 24.5 GiB, and **one** block's inside with its gradients, 34. Their 74.3 GiB, under 78.4 of room, are a maybe: section 5
# finds the simulation 14% low. Offload moves 25.4 GiB to the host; the peak falls by 20.8, and comes later, beside gradients.
#
# Twice the length fits neither way. One GPU can go on alone: ALST tiles the MLP, and trains Llama-8B
# on 500k tokens. Here the *tokens* are divided, and with them the work; sequence parallelism
# ([12](12_tensor_parallel.ipynb)) divides them between attention and MLP, heads inside.
#
# ## 2. Attention in pieces, around a ring
#
# What would be quadratic? A matrix of scores. Flash attention reads keys piece by piece and keeps,
# for each query, the largest score so far, the sum of exponentials, and an output, which fade as a larger score comes.

# %%
def attend_in_pieces(q, k, v, size):
    top = q.new_full((*q.shape[:3], 1), -torch.inf)
    total, out, row = torch.zeros_like(top), torch.zeros_like(q), torch.arange(q.shape[2])[:, None]
    for first in range(0, k.shape[2], size):
        part_k, part_v = (x[:, :, first : first + size] for x in (k, v))
        scores = q @ part_k.mT * q.shape[-1] ** -0.5
        column = first + torch.arange(part_k.shape[2])
        scores = scores.masked_fill(column > row, -torch.inf)
        larger = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, faded = (scores - larger).exp(), (top - larger).exp()
        total = total * faded + weights.sum(-1, keepdim=True)
        out = out * faded + weights @ part_v
        top = larger
    return out / total, (top + total.log())[..., 0]  # and the log of the sum of exponentials


# %% jupyter={"source_hidden": true}
def attend_at_once(q, k, v):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    late = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return scores.masked_fill(late, -torch.inf).softmax(-1) @ v


of_torch = functools.partial(F.scaled_dot_product_attention, is_causal=True)
for name, way in {"at once": attend_at_once, "in pieces of 64": lambda *qkv: attend_in_pieces(*qkv, 64)[0]}.items():
    peaks = []
    for length in (512, 1024, 2048):
        qkv = torch.randn(3, 1, 2, length, 32).unbind()
        peaks.append(measure(lambda: way(*qkv), model=torch.nn.Linear(1, 1), name=name, timed_steps=0).peak_bytes / 2**20)  # no model: any
    gap = (way(*qkv) - of_torch(*qkv)).abs().max().item()
    print(f"{name:<16}", *(f"{size:6.2f}" for size in peaks), f"MiB (measured) at 512, 1,024, 2,048 tokens; {gap:.0e} from PyTorch's")
    assert gap < 1e-5, f"{name}: fp32 rounds at 1e-7, sums of 2,048 terms a little above"

# %% [markdown]
# **Read it.** Twice the tokens take four times the matrix of scores, and twice the pieces. And a piece can come
# from anywhere. Outputs $o_1, o_2$ and log-sum-exps $l_1, l_2$ of two pieces make
# $$l = \log(e^{l_1} + e^{l_2}), \quad o = e^{l_1 - l}\, o_1 + e^{l_2 - l}\, o_2.$$
# Two keys, scores 0 and $\log 3$: $o = \frac14 v_1 + \frac34 v_2$, their softmax. So each rank keeps its queries,
# and keys and values **go around a ring**. `attend_piece` (`pieces.py` in the lesson's folder) is this CPU's flash kernel: $o$ and $l$.
#
# | who holds which of 8 pieces | rank 0 | rank 1 | rank 2 | rank 3 |
# |---|---|---|---|---|
# | in order | 0, 1 | 2, 3 | 4, 5 | 6, 7 |
# | zigzag | 0, 7 | 1, 6 | 2, 5 | 3, 4 |
#
# In zigzag a lower rank's front piece lies before both of mine, its back piece after both; a higher rank's two lie between mine.

# %%
def places(length, zigzag):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    check_length(length, ranks)  # a sentence, the same on all ranks, before anything is sent
    pieces = torch.arange(length).chunk(2 * ranks)
    own = (rank, 2 * ranks - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)
    return torch.cat([pieces[i] for i in own])


def seen(source, length, zigzag):
    """Which of my rows see which of the source's columns, and is it a triangle? None: nothing to do."""
    rank, everything, half = dist.get_rank(), slice(0, length), length // 2
    if source == rank:
        return everything, everything, True
    if not zigzag:
        return (everything, everything, False) if source < rank else None
    return (everything, slice(0, half), False) if source < rank else (slice(half, length), everything, False)


# %%
def pass_on(x):  # to the next rank, from the one before; `wait` gives what came
    rank, ranks, new = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    works = [dist.isend(x.contiguous(), (rank + 1) % ranks), dist.irecv(new, (rank - 1) % ranks)]

    def wait():
        for work in works:
            work.wait()
        return new

    return wait


def merge(out, lse, part, its):
    both = torch.logaddexp(lse, its)
    old, new = ((x - both).exp()[..., None].to(out.dtype) for x in (lse, its))
    out.mul_(old).add_(part * new)
    lse.copy_(both)


# %%
def ring_forward(q, kv, zigzag, piece=attend_piece):
    rank, ranks, out = dist.get_rank(), dist.get_world_size(), torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for step in range(ranks):
        wait = pass_on(kv) if step < ranks - 1 else lambda: None  # on its way while this piece is computed
        if todo := seen((rank - step) % ranks, q.shape[2], zigzag):
            rows, columns, triangle = todo
            merge(out[:, :, rows], lse[:, :, rows], *piece(q[:, :, rows], *kv[..., columns, :], triangle))
        kv = wait()
    return out, lse


# %% [markdown]
# Backward goes around **again**: kept are this rank's own tensors, $o$ and $l$ of the *whole* sum. `piece_gradients`, the kernel's
# backward, needs no more: weights $P = e^{S - l}$, gradients of scores $P \circ (dO\,V^T - \mathrm{rowsum}(dO \circ O))$. A
# gradient of keys gets terms on other ranks, so it travels with them, and one move further: home. (On NCCL put both messages into
# `dist.batch_isend_irecv`.)

# %%
class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, zigzag):
        out, lse = ring_forward(q, torch.stack((k, v)), zigzag)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.zigzag = zigzag
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, kv = dist.get_rank(), dist.get_world_size(), torch.stack((k, v))
        to_q, to_kv = torch.zeros_like(q), torch.zeros_like(kv)
        for step in range(ranks):
            wait = pass_on(kv) if step < ranks - 1 else lambda: None
            if todo := seen((rank - step) % ranks, q.shape[2], ctx.zigzag):
                rows, columns, triangle = todo
                g, own, done, logs = (x[:, :, rows] for x in (gradient, q, out, lse))
                term, *others = piece_gradients(g, own, *kv[..., columns, :], done, logs, triangle)
                to_q[:, :, rows] += term
                to_kv[..., columns, :] += torch.stack(others)
            kv, to_kv = wait(), pass_on(to_kv)()
        return to_q, *to_kv, None


# %% [markdown]
# **Predict.** A move carries keys and values of $s/n$ tokens, $K$ heads and width $D$. Forward makes $n-1$ moves,
# backward $n-1$ of them and $n$ of their gradients: $(3n-2) \cdot 2\,\frac{s}{n} K D$ numbers a rank and layer.

# %%
A, K, D, S = 4, 2, 16, 64  # query heads, key-value heads, width, tokens


def ring(zigzag):
    return lambda q, k, v: RingAttention.apply(q, k, v, zigzag)


for zigzag in (False, True):
    found = run_ranks(apart, RANKS, ring(zigzag), functools.partial(places, zigzag=zigzag), A, K, S, D)
    predicted = (3 * RANKS - 2) * 2 * S // RANKS * K * D * 8
    gap, sent = max(rank.gap for rank in found), {rank.put_in["send"] for rank in found}
    print(f"{'zigzag' if zigzag else 'in order':<8}: output and gradients {gap:.0e} from one process; a rank sends", *sent, f"bytes (counted), predicted {predicted}")
    assert gap < 1e-13 and sent == {predicted}, "fp64 rounds at 1e-16; every piece once, every gradient home"

# %% [markdown]
# **Read it.** Equal to fp64's rounding, both ways. How many ranks there are hardly matters: a rank sends $3-2/n$ times all keys and values.
#
# ## 3. Who holds which token
#
# Both layouts give the same sums and send the same bytes. Do they take the same **time**? Here each piece sleeps, 200 ms
# for a rank's queries against as many keys, and less for fewer pairs: a process that sleeps needs no core, so four of them act as four
# devices. Of three rounds we keep the shortest.

# %%
def around(zigzag):
    rounds = zip(*run_ranks(slowed, RANKS, ring_forward, zigzag, 512, 0.2), strict=True)
    return min(rounds, key=lambda ranks: max(spans[-1].end for spans in ranks))


timed = {"in order": around(False), "zigzag": around(True)}
show(draw_rounds(timed, title="Causal attention around a ring of four, forward: 512 tokens, 200 ms a square",
                 slept_seconds={"in order": 0.7, "zigzag": 0.4}, device="ranks that sleep"),
     alt="In order rank 0 works a seventh of the time and rank 3 all of it; in zigzag all four work, and end much earlier.")

# %% jupyter={"source_hidden": true}
ends = {}
for layout, ranks in timed.items():
    ends[layout] = max(spans[-1].end for spans in ranks)
    shares = [sum(span.pairs for span in spans) for spans in ranks]
    print(f"{layout:<9}{ends[layout]:.3f} s (measured); pairs of query and key by rank (counted):", *(f"{share / sum(shares):.1%}" for share in shares))
print(f"in order takes {ends['in order'] / ends['zigzag'] - 1:.0%} longer; your bet: {my_bet_percent}%")

# %% [markdown]
# **Read it.** In order rank $r$ has $r$ whole squares and half of one: the last has 3.5 of 8, where 2 would be even. That is 75%
# longer, $1-1/n$ in general, of the sleeps alone: 0.70 s to 0.40. In **zigzag** each round is half a square on every rank.
#
# **Question.** Sixteen ranks, in order. How many percent of the ring's time is rank 0 at work?

# %%
rank_0_percent = ...
check("18.rank_0_percent", rank_0_percent)

# %% [markdown]
# ### Heads in place of tokens: Ulysses
#
# Attention's heads do not meet. So exchange: from all heads of *some* tokens to all tokens of *some* heads, attend with any
# kernel, and exchange back. Each all-to-all is its own backward, with the two dimensions swapped.

# %%
class Exchange(torch.autograd.Function):
    """Cut one dimension over the ranks, join another."""

    @staticmethod
    def forward(ctx, x, cut, join):
        ctx.cut, ctx.join, mine = cut, join, torch.stack(x.chunk(dist.get_world_size(), cut))
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine)
        return torch.cat(theirs.unbind(), join)

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, ctx.join, ctx.cut), None, None


def ulysses(q, k, v, mask=None):
    ranks = dist.get_world_size()
    check_heads(q.shape[1], k.shape[1], ranks)  # whole heads, or whole copies; else a sentence
    k, v = (x.repeat_interleave(max(1, ranks // x.shape[1]), 1) for x in (k, v))
    q, k, v = (Exchange.apply(x, 1, 2) for x in (q, k, v))  # (B, heads / n, S, D)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
    return Exchange.apply(out, 2, 1)


# %% [markdown]
# A third way gathers keys and values on each rank, as Llama 3 does, and scatters their gradients; its code is
# [lesson 14](14_three_dimensions.ipynb)'s (`utils/parallel/context.py`). In numbers of $\frac{s}{n} D$ that a rank sends, forward and backward:
#
# | way | sends | holds beside its own | limit |
# |---|---|---|---|
# | ring | $(3n-2) \cdot 2K$ | keys and values that pass, with gradients | pieces of tokens |
# | gathered | $2(n-1) \cdot 2K$; $3(n-1) \cdot 2K$ if gathered again backward | all keys and values | pieces of tokens |
# | Ulysses | $\frac{n-1}{n} \cdot 2\,(2A + 2\max(K, n))$ | the exchanged | here $n$ divides $A$; $n$ or $K$ the other |

# %%
n, unit = RANKS, S // RANKS * D * 8
WAYS = {"ring": (ring(True), True, (3 * n - 2) * 2 * K), "gathered": (gathered, True, 2 * (n - 1) * 2 * K),
        "Ulysses": (ulysses, False, (n - 1) / n * 2 * (2 * A + 2 * max(K, n)))}
for name, (way, zigzag, numbers) in WAYS.items():
    found = run_ranks(apart, RANKS, way, functools.partial(places, zigzag=zigzag), A, K, S, D)[0]
    sent = sent_bytes(found.put_in, RANKS)
    print(f"{name:<9} {found.gap:.0e} from one process; a rank sends {sent:,.0f} bytes (counted), predicted {numbers * unit:,.0f}")
    assert found.gap < 1e-13 and sent == numbers * unit, f"{name} sends something else than its formula"

# %% [markdown]
# **Read it.** A ring's bytes do not fall as ranks are added, Ulysses' do. Gathering sends less than a ring at every $n$; a ring never
# holds all keys. In 16 bits:

# %% jupyter={"source_hidden": true}
print("MB that one of n ranks sends for a layer, 131,072 tokens, forward and backward (predicted):")
for name, n in (("llama-2-7b", 8), ("llama-3-8b", 8), ("qwen2.5-7b", 8), ("llama-3-70b", 64)):
    shape = model_shape(name)
    heads, kv, size = shape.heads, shape.key_value_heads, 131_072 / n * shape.head_dim * 2 / 1e6
    by_heads = f"{(n - 1) / n * 4 * (heads + max(kv, n)) * size:,.0f}" if heads % n == 0 else f"refused: {n} does not divide {heads}"
    print(f"{name:<12} n {n:>2}, A {heads}, K {kv:>2}: ring {(3 * n - 2) * 2 * kv * size:>6,.0f},",
          f"gathered {4 * (n - 1) * kv * size:>6,.0f}, Ulysses {by_heads}")

# %% [markdown]
# **Question.** Qwen2.5-7B has 28 query heads and 4 key-value heads. Over how many of a node's eight GPUs, at most, can
# Ulysses share one of its sequences?

# %%
most_ranks = ...
check("18.most_ranks", most_ranks)

# %% [markdown]
# ## 4. A model, and packed documents
#
# All other layers look at one token at a time. So a model needs three things beside the attention: the tokens of this rank, *their
# positions*, and targets that were shifted **before** they were split. The loss is a sum over all ranks' targets, divided once.

# %% jupyter={"source_hidden": true}
def fresh():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocabulary=64, hidden=32, layers=2, heads=4, kv_heads=2, feedforward=96))
    model.init_weights(std=0.2)
    return model.double()


# %%
def train(attention=None, zigzag=True, fault="", steps=6):
    model, losses = fresh(), []
    optimizer, own = torch.optim.SGD(model.parameters(), lr=0.1), places(S, zigzag)
    for block in model.blocks if attention else ():
        block.attention.attend = attention
    for step in range(steps):
        tokens = torch.randint(64, (2, S + 1), generator=torch.Generator().manual_seed(step))
        x, y = tokens[:, :-1][:, own], tokens[:, 1:][:, own]
        if fault == "targets shifted after the split":
            y = torch.cat((x[:, 1:], x[:, :1] * 0 - 100), 1)  # the last has none
        positions = torch.arange(len(own)) if fault == "positions that restart" else own
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, positions).flatten(0, 1), y.flatten(), reduction="sum") / tokens[:, 1:].numel()
        loss.backward()
        for shared in (loss.detach(), *(p.grad for p in model.parameters())):
            dist.all_reduce(shared)  # in place: `loss` is the sum from here on
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
alone = run_ranks(train, 1)[0]
for name, (way, zigzag, _) in WAYS.items():
    losses = run_ranks(train, RANKS, way, zigzag)[0]
    gap = max(abs(a / b - 1) for a, b in zip(losses, alone, strict=True))
    print(f"{name:<9}", *(f"{loss:.6f}" for loss in losses), f" {gap:.0e} from one process")
    assert gap < 1e-12, f"{name} trains another model: fp64 rounds at 1e-16, and six steps add up a few hundred of these"

# %% [markdown]
# A long row is mostly several documents. They are **packed**: a token sees its own document's, the last target of a
# document is no target, and positions restart with each. Ulysses takes the mask as it is, since a rank has all tokens. (A dense
# mask of 128k is 16 GiB: take FlexAttention there.) One row, one seed:

# %%
document = torch.arange(3).repeat_interleave(torch.tensor((24, 8, 32)))
own_document = (document[:, None] == document).tril()
restarting = torch.cat([torch.arange(24), torch.arange(8), torch.arange(32)])
row = torch.randint(64, (1, S), generator=torch.Generator().manual_seed(0))
learned = (document == document.roll(-1)) & (restarting >= 12)  # not into the next document; 12 tokens are a prompt
targets = row.roll(-1).masked_fill(~learned, -100)


def packed_losses(mask=own_document, positions=restarting):
    model, own = fresh(), places(S, zigzag=False)
    for block in model.blocks:
        block.attention.attend = functools.partial(ulysses, mask=mask)
    logits = model(row[:, own], positions[own])
    return F.cross_entropy(logits[0], targets[0, own], reduction="none").detach()


# %%
one_by_one = torch.cat([fresh()(row[:, document == d])[0] for d in range(3)])
wanted = F.cross_entropy(one_by_one, targets[0], reduction="none").detach()
for name, changed in {"packed": (), "positions go on": (own_document, torch.arange(S)), "no mask": (torch.ones(S, S).tril().bool(),)}.items():
    gap = (torch.cat(run_ranks(packed_losses, RANKS, *changed)) - wanted).abs().max().item()
    print(f"{name:<16} losses of tokens up to {gap:.0e} from those of each document alone")
    assert (gap > 1e-3) == (name == "no mask"), "one document leaks into another, or positions do not restart"
counts = learned.view(RANKS, -1).sum(1)
means = (wanted.view(RANKS, -1).sum(1) / counts).mean().item()
print("targets by rank:", *counts.tolist(), f" a mean of the ranks' means is off by {means / (wanted.sum().item() / counts.sum().item()) - 1:.1%}")

# %% [markdown]
# **Read it.** Without the mask documents leak. Positions that go on change no more than the fp32 angles' rounding: rotary
# positions count *distances*, and the mask cuts those between documents. (Learned positions must restart.) And ranks, like
# micro-batches, hold unequal numbers of targets: a mean of means weights some tokens double. Divide by the count of **all**.
# Around a ring the mask also makes work uneven anew: the lab's exercise 3.
#
# ## 5. 7B at 128k, and the others
#
# Back to the picture's lowest line. Eight ranks share one sequence of 131,072 tokens by the ring of section 2, states sharded
# over the same ranks, both cures. Beside it Llama 3.1 8B as torchtitan published it: four ranks a sequence, so 32,768 tokens each.

# %%
ours = of_one_rank("qwen2.5-7b", 131_072 // GPUS, "chunked loss", "checkpointing", attend=ring(True))
print(f"peak {ours.peak_bytes / 2**30:.1f} GiB (simulated):", ", ".join(
    f"{kind} {size / 2**30:.2f}" for kind, size in sorted(ours.breakdown.items(), key=lambda part: -part[1]) if size > 2**25))
moves = next(row for row in ours.traffic if row.collective == "send")
print(f"{moves.calls} moves, {moves.payload_bytes / 1e9:.1f} GB sent around the ring (simulated)")
assert moves.calls == 28 * (3 * GPUS - 2 + GPUS - 1), "28 layers; with checkpoints forward goes around twice"
assert moves.payload_bytes == moves.calls * 2 * 131_072 // GPUS * 4 * 128 * 2, "keys and values of 4 heads of 128, in bf16"
assert is_the_same(ours.peak_bytes, growth["both, over a ring of 8"][131_072]), "the picture shows another ring than this one"
score("18", ours)

# %% [markdown]
# **Read it.** An eighth of the tokens, and of all that grew with them. States stay, and gathered weights: head
# and embedding alone are 2.03 GiB. A step learns from an eighth of the tokens. Checkpoints send forward's moves twice. Published:

# %%
theirs = of_one_rank("llama-3-8b", 32_768, "checkpointing")
print(f"Llama 3.1 8B, 32,768 tokens a rank, whole loss, bf16: {theirs.peak_bytes / 2**30:.1f} GiB at the peak,",
      f"{theirs.reserved_bytes / 2**30:.1f} reserved (simulated)")
print(*torchtitan_rows(), sep="\n")

# %% [markdown]
# **Read it.** Tokens **a rank** decide: 8B takes 84 GiB at 32k tokens and at 262k (H100s of 96 GB; compiled, products in 8 bits;
# our simulation is 14% under, unexplained). What memory no longer feels is the work: tokens per second fall to a
# seventh. Half of that is arithmetic: a token's forward ($P$ weights of blocks and head) takes $2P + 2shL$, 24 GFLOP at 32k
# and 84 at 262k. The rest these rows do not explain.

# %%
print("4M tokens a step on 64 H100, the planner's fastest (predicted):")
print(*(chosen_plan("qwen2.5-7b", length) for length in (2**13, 2**15, 2**17, 2**19, 2**20)), *llama_rows(), sep="\n")

# %% [markdown]
# **Read it.** On 64 GPUs 7B's fastest plans share a sequence *in place of* checkpoints from 32k to 512k; 1M takes both. 4M tokens
# take 18 times as long in sequences of 1M, recomputed, as of 8k: attention, 94% of
# a block's work then, grows with the square of the length, what is sent with the length.
# Llama 3, which gathers, kept 95% of its TFLOP/s at 128k. The planner, too, gathers, and takes ranks' work as even.
#
# | take | when | costs |
# |---|---|---|
# | chunked loss, checkpoints ([05](../intermediate/05_checkpointing.ipynb)) | few GPUs, or sharing alone does not fit | a forward of the blocks |
# | gathered keys and values; a ring where these do not fit | GPUs to spare for a sequence | $K$-sized messages a layer |
# | Ulysses | heads divide; any mask | all-to-all |
#
# ## Break it, diagnose it
#
# The model of section 4 around the ring, with one thing wrong each time. Which first losses are right?

# %%
class NotHome(RingAttention):
    @staticmethod
    def backward(ctx, gradient):  # the last move is forgotten: n - 1 more are one back
        to_q, *to_kv, _ = RingAttention.backward(ctx, gradient)
        for _ in range(RANKS - 1):
            to_kv = [pass_on(x)() for x in to_kv]
        return to_q, *to_kv, None


for fault in ("positions that restart", "targets shifted after the split", "gradients not at home"):
    way = ring(True) if "home" not in fault else lambda q, k, v: NotHome.apply(q, k, v, True)
    losses = run_ranks(train, RANKS, way, True, fault)[0]
    gaps = [b / a - 1 for a, b in zip(alone, losses, strict=True)]
    print(f"{fault:<32} losses off by", *(f"{gap:+.1e}" for gap in gaps))
    assert max(map(abs, gaps)) > 1e-6, f"{fault} was not found"

# %% [markdown]
# **Diagnose it.** Restarting positions: each rank believes that it has the beginning; the curve looks like any other. Shifted after
# the split, four of 64 targets are gone and three are another piece's first token: the loss is *lower*. (A transformers model shifts
# `labels` itself: give it `shift_labels`.) Gradients that are not at home leave the first loss right. So compare losses over steps with one
# process, in fp64, at a small size; and ask the ranks what they hold:

# %%
def all_places_once():  # what to look at: no position twice, none left out
    found = []
    for own in (places(S, zigzag=True), torch.arange(S // RANKS)):
        dist.all_gather_into_tensor(whole := own.new_empty(S), own)
        found.append(whole.sort().values.equal(torch.arange(S)))
    return found


print("every position once: in zigzag {}, restarting {}".format(*run_ranks(all_places_once, RANKS)[0]))

# %% [markdown]
# ## Recap
#
# - With flash attention memory is linear in the length. At 128k most is what blocks keep, then logits; with both cures, one block's inside.
# - Pieces of softmax add up by their log-sum-exp: keys may come from anywhere, in any order.
# - A ring sends $(3n-2) \cdot 2\frac{s}{n}KD$ numbers a layer; zigzag makes its work even. Ulysses sends heads, and needs them to divide.
# - Positions and shifted targets are split with the tokens; the loss is divided by all targets.
#
# Do the [lab](../../labs/advanced/18_long_contexts.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/18_long_contexts.ipynb).
#
# **References.** Liu and others, *Ring Attention*, [arXiv:2310.01889](https://arxiv.org/abs/2310.01889). Brandon and others, *Striped Attention*,
# [arXiv:2311.09431](https://arxiv.org/abs/2311.09431). Jacobs and others, *DeepSpeed-Ulysses*, [arXiv:2309.14509](https://arxiv.org/abs/2309.14509).
# *The Llama 3 Herd of Models*, [arXiv:2407.21783](https://arxiv.org/abs/2407.21783). Bekman and others, *Arctic Long Sequence Training* (ALST),
# [arXiv:2506.13996](https://arxiv.org/abs/2506.13996).

# %% [markdown]
# ## On Monday
#
# PyTorch's `context_parallel` (2.15, a prototype) shares causal `F.scaled_dot_product_attention`, in zigzag, and refuses other masks.
# A model that copies key heads first (`repeat_kv`) sends $A$ of them. It has kernels for CUDA alone: here the ring of section 2
# stood in. Section 5's step:
#
# ```python
# # Before: torchrun on `world_size` GPUs; `model.blocks` on `device`; `model(inputs, targets, positions)` gives the *sum* of its tokens' losses, with
# # F.scaled_dot_product_attention(is_causal=True) inside and the chunked loss of lesson 05's last cell; `tokens` (B, S + 1), the same on
# # all ranks; 2 * world_size divides S. After it: an optimizer, on model.parameters().
# from functools import partial
#
# import torch
# import torch.distributed as dist
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
# from torch.distributed.tensor.experimental import context_parallel
# from torch.distributed.tensor.experimental._attention import set_rotate_method
# from torch.nn.attention import SDPBackend, sdpa_kernel
# from torch.utils.checkpoint import checkpoint
#
# mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("cp",))
# set_rotate_method("alltoall")  # a ring; leave it out to gather
# bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# for block in model.blocks:  # states are sharded over the ranks that share the tokens
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)
#     fully_shard(block, mesh=mesh, mp_policy=bf16)
# fully_shard(model, mesh=mesh, mp_policy=bf16)
#
# inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # shifted before they are split
# positions = torch.arange(inputs.shape[1], device=device)
# count = (targets != -100).sum().clamp(min=1)  # of all ranks: they are whole here
#
# with context_parallel(mesh, buffers=[inputs, targets, positions], buffer_seq_dims=[1, 1, 0]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
#     loss = model(inputs, targets, positions) / count
#     (loss * world_size).backward()  # FSDP2 averages over the ranks, and we want their sum; inside: it goes around the ring, too
# dist.all_reduce(total := loss.detach().clone())
# print(f"loss {total.item():.4f}")
# ```
#
# **Look at** the loss: one process's, to bf16's rounding; and at `torch.cuda.max_memory_allocated()`. In transformers'
# `Trainer`, with SDPA and FSDP2: accelerate's `ParallelismConfig(cp_size=8)`, which gathers; Ulysses, where heads
# divide: `ParallelismConfig(sp_backend="deepspeed", sp_size=4)` (neither was run here). Packed documents:
#
# ```python
# from transformers import DataCollatorWithFlattening
#
# collator = DataCollatorWithFlattening()  # one row; positions restart, the first token of each document is no target
# batch = collator([{"input_ids": ids} for ids in documents])
# loss = model(**batch, use_cache=False).loss  # under SDPA or eager, with a cache documents see each other, and nothing says so
# loss.backward()
# ```
#
# **Look at** `batch["position_ids"]`: from them transformers (5.23) makes the mask of SDPA and eager, but not where there is a cache or an
# `attention_mask`; flash attention reads them itself. The loss is that of each document alone, a token a vote: compare once.
