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
# **The question.** A 7B model is to train on sequences of up to a million tokens. From what length must GPUs share one sequence
# (*context parallelism*, CP), and how?
#
# **Promise.** You build a ring of four ranks, with the gradients of one process, and say what forces sharing. **On eight H100s memory does past
# half a million tokens (simulated), with blocks' inputs on the host and the MLP tiled. With 128 GPUs and more the batch does earlier**: 16M
# tokens a step leave each 128k. A step shared by eight takes an eighth of the tokens and of the time (predicted), and under a third in the
# worst reading of published runs.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 110, and 75 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | two minutes on two CPU cores |
#
# ## A bet
#
# Four ranks share a sequence. Each holds a quarter, in order, and a token attends to all before it. By how many percent is attention
# slower than with equal work?

# %%
my_bet_percent = 10

# %% tags=["setup"]
here = setup("advanced/18")

# %%
import functools
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F

from utils import Transformer, TransformerConfig, check, measure, model_shape, run_ranks, score, show
from utils.catalog import link
from utils.simulation.devices import simulated_device
from utils.lessons.lesson_18.at_size import of_one_rank, token_flop
from utils.lessons.lesson_18.compare import apart, gathered, sent_bytes
from utils.lessons.lesson_18.figures import draw_growth, draw_rounds, draw_steps
from utils.lessons.lesson_18.holders import draw_exchange, draw_holders
from utils.lessons.lesson_18.pieces import attend_piece as kernel
from utils.lessons.lesson_18.published import LLAMA_3_BATCH_TOKENS, LLAMA_3_FLOPS, QWEN3_8B, TRL_SECONDS, torchtitan_runs
from utils.lessons.lesson_18.records.growth import DRAWN, LINES, RANKS as GPUS, MARGINS, TOLD, is_the_same, longest, recorded, told_outside, told_verdict
from utils.lessons.lesson_18.refusals import check_length
from utils.lessons.lesson_18.ring import ring_attention, ulysses_attention as ulysses
from utils.lessons.lesson_18.rounds import pairs_of, round_ends, round_seconds

# %% [markdown]
# ## 1. Memory grows no faster than the tokens
#
# Eight H100s train Qwen2.5-7B with flash attention and FSDP2. The picture shows what a GPU reserves (simulated), and
# 10% on top. On three lines each GPU has its own sequence; each line adds to the one before:
#
# - *chunked loss, checkpoints*: few tokens' logits at a time, and of a block only its input
#   ([05](../intermediate/05_checkpointing.ipynb));
# - *checkpoints on the host*: these inputs wait in the CPU's memory;
# - *on the host, MLP tiled*: 8,192 tokens at a time, computed once more in backward.
#
# On two lines eight GPUs share one sequence. Look where lines cross the GPU's 78 GiB, and which parts of a peak grow. New words:
# [glossary](../00_glossary.ipynb).

# %% jupyter={"source_hidden": true}
held, room_bytes, ABOVE = recorded("reserved_bytes"), simulated_device("H100").usable_bytes, 0.10
show(draw_growth({name: held[name] for name in DRAWN}, room_bytes=room_bytes, above=ABOVE, told=TOLD, device="a simulated H100-80GB",
                 title="Qwen2.5-7B on 8 GPUs: FSDP2, fp32 states, bf16, flash attention"),
     alt="What a GPU reserves, and 10% on top, over 8k to 1M tokens: as tokens double, lines at most double. The GPU has 78 GiB. At 128k chunked loss and checkpoints take 86. At 256k with checkpoints on the host 105, with a tiled MLP 49. At 512k tiled takes 71 and a ring of eight 56. At 1M the ring takes 86, as one GPU does at 128k, and only the ring with a tiled MLP fits, with 60.")
for name in [*LINES][1:4]:  # section 5 has the rings
    found = of_one_rank("qwen2.5-7b", 131_072, *LINES[name])
    parts = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in found.breakdown.items() if size > 2**31)
    print(f"{name}: peak {found.peak_bytes / 2**30:.1f} GiB, {held[name][131_072] / 2**30:.1f} reserved (simulated). Parts above 2 GiB: {parts}")
    assert is_the_same(found.peak_bytes, recorded()[name][131_072]), "the record is of another step than this one"
print(f"the GPU has {room_bytes / 2**30:.1f} GiB; 28 blocks' inputs: 28 x 131,072 x 3,584 x 2 bytes = {28 * 2**17 * 3584 * 2 / 2**30:.1f}")

# %% [markdown]
# **Read it.** At 1M the ring of eight takes 86 GiB, as one GPU does at an eighth of the tokens: **the tokens on a GPU decide**. As tokens
# double, no line more than doubles, for flash attention never stores all scores. The host takes the blocks' inputs,
# 24.5 GiB at 128k, and tiling cuts the inside of **one** block.
#
# ## 2. Softmax adds up in blocks, so keys can go around a ring
#
# So cut the tokens. Four ranks share a sequence of eight *pieces*. A rank holds two neighbours (*in order*), or one piece from the front and
# one from the back (*zigzag*). Queries stay. Keys and values (*KV*) **go around a ring**, one rank further each *round*. Follow zigzag's
# rounds, in the middle:

# %%
show(draw_holders(), alt="Causal attention as squares of pieces. In order ranks compute 2, 6, 10 and 14 squares; in zigzag 8 each. Below, zigzag's KV move one rank to the right each round. At the bottom, the gradient of KV 0 and 7 visits ranks 0 to 3 and moves once more, home to rank 0: piece 0 collects a term on each rank, piece 7 on rank 0 alone.")

# %% [markdown]
# **Read it.** In round 1, rank 1 has KV of pieces 0 and 7. Its queries, 1 and 6, both see piece 0, and neither sees 7.
#
# So a rank meets keys in blocks. For each query it keeps the largest score, the sum of exponentials, and the output so far. A larger score
# scales these down:

# %%
def attend_in_blocks(q, k, v, size):
    top = q.new_full((*q.shape[:3], 1), -torch.inf)
    total, out, row = torch.zeros_like(top), torch.zeros_like(q), torch.arange(q.shape[2])[:, None]
    for first in range(0, k.shape[2], size):
        part_k, part_v = (x[:, :, first : first + size] for x in (k, v))
        scores = q @ part_k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(first + torch.arange(part_k.shape[2]) > row, -torch.inf)
        larger = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, faded = (scores - larger).exp(), (top - larger).exp()
        total = total * faded + weights.sum(-1, keepdim=True)
        out, top = out * faded + weights @ part_v, larger
    return out / total, (top + total.log())[..., 0]  # and the log of the sum of exponentials

# %% jupyter={"source_hidden": true}
def attend_at_once(q, k, v):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    late = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return scores.masked_fill(late, -torch.inf).softmax(-1) @ v
flash = functools.partial(F.scaled_dot_product_attention, is_causal=True)
def blocks(*qkv):
    return attend_in_blocks(*qkv, 64)[0]
for name, way, learns in (("at once", attend_at_once, False), ("in blocks of 64", blocks, False),
                          ("in blocks, and backward by autograd", blocks, True), ("PyTorch's kernel, and its backward", flash, True)):
    peaks = []
    for length in (1024, 2048, 4096):
        qkv = torch.randn(3, 1, 2, length, 32).requires_grad_(learns)
        found = measure(lambda: way(*qkv).sum().backward() if learns else way(*qkv), model=torch.nn.Linear(1, 1), name=name, timed_steps=0)
        peaks.append(found.peak_bytes / 2**20)  # no model: any
    gap = (way(*qkv) - flash(*qkv)).abs().max().item()
    print(f"{name:<36}", *(f"{size:6.2f}" for size in peaks), f"MiB (measured) at 1,024, 2,048, 4,096 tokens; {gap:.0e} from PyTorch's")
    assert gap < 1e-5, f"{name}: fp32 rounds at 1e-7, sums of 4,096 terms a little above"

# %% [markdown]
# **Read it.** Twice the tokens take four times the memory at once, and twice in blocks. Autograd keeps each block's weights, so it is
# quadratic again. Our backward will compute them anew.
#
# Two blocks' outputs $o_1, o_2$ and log-sum-exps $l_1, l_2$ merge to
# $$l = \log(e^{l_1} + e^{l_2}), \quad o = e^{l_1 - l}\, o_1 + e^{l_2 - l}\, o_2.$$
# `places` gives a rank its tokens, and `squares` goes through the picture's squares. A row may hold several documents. `offsets` say where they
# begin, and cut the squares:

# %%
def pieces_of(rank, zigzag):  # the numbers of a rank's two pieces
    ranks = dist.get_world_size()
    return (rank, 2 * ranks - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)

def places(length, zigzag):
    check_length(length, dist.get_world_size())  # a sentence, the same on all ranks, before anything is sent
    pieces = torch.arange(length).chunk(2 * dist.get_world_size())
    return torch.cat([pieces[i] for i in pieces_of(dist.get_rank(), zigzag)])

def squares(source, offsets, zigzag):
    """Which of my rows see which of the source's columns, square by square, and does the diagonal cut them?"""
    size = offsets[-1] // (2 * dist.get_world_size())
    for i, mine in enumerate(pieces_of(dist.get_rank(), zigzag)):
        for j, theirs in enumerate(pieces_of(source, zigzag)):
            for first, end in pairwise(offsets if theirs <= mine else ()):  # of a document: its part of the square
                rows, columns = (slice(at * size + max(0, first - piece * size), at * size + min(size, end - piece * size))
                                 for at, piece in ((i, mine), (j, theirs)))
                if rows.start < rows.stop and columns.start < columns.stop:
                    yield rows, columns, mine == theirs

# %%
def pass_on(x):  # sends to the next rank; call what it returns, to have what came from the one before
    rank, ranks, new = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    # On NCCL take dist.batch_isend_irecv for both: begun one by one, two ranks' sends may wait for each other.
    works = [dist.isend(x.contiguous(), (rank + 1) % ranks), dist.irecv(new, (rank - 1) % ranks)]
    def arrived():
        for work in works:
            work.wait()
        return new
    return arrived
def merge(out, lse, part, part_lse):
    both = torch.logaddexp(lse, part_lse)
    old, new = ((x - both).exp()[..., None].to(out.dtype) for x in (lse, part_lse))
    out.mul_(old).add_(part * new)
    lse.copy_(both)

# %%
def ring_forward(q, kv, offsets, zigzag):
    rank, ranks, sums = dist.get_rank(), dist.get_world_size(), torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q, dtype=sums), q.new_full(q.shape[:3], -torch.inf, dtype=sums)  # in fp32 or finer
    for step in range(ranks):
        next_kv = pass_on(kv) if step < ranks - 1 else lambda: None  # on its way while this round is computed
        for rows, columns, triangle in squares((rank - step) % ranks, offsets, zigzag):
            part, part_lse = kernel(q[:, :, rows], *kv[..., columns, :], triangle)  # flash attention: outputs, log-sum-exps
            merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        kv = next_kv()
    return out.to(q.dtype), lse

# %% [markdown]
# Backward goes around **again**. Each rank kept its own queries and KV, and $o$ and $l$ of the *whole* sum. From these, the outputs' gradient $dO$ and
# a block's scores $S = QK^T / \sqrt D$ come the block's terms:
# $$P = e^{S - l}, \quad dV = P^T dO, \quad dS = P \circ \big(dO\,V^T - \mathrm{rowsum}(dO \circ o)\big), \quad dQ = \frac{dS\,K}{\sqrt D},
# \quad dK = \frac{dS^T Q}{\sqrt D}.$$
# KV get a term on each rank whose queries see them. So their gradient travels along, and moves once more to be home:

# %%
def piece_gradients(g, q, k, v, out, lse, triangle):  # g is dO; flash attention's kernel does this without storing the weights
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))  # query heads share a key-value head
    scores = q @ k.mT * scale
    if triangle:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    weights = (scores - lse[..., None]).exp()
    to_scores = weights * (g @ v.mT - (g * out).sum(-1, keepdim=True))
    to_k, to_v = to_scores.mT @ q * scale, weights.mT @ g
    return to_scores @ k * scale, *(x.unflatten(1, (-1, group)).sum(2) for x in (to_k, to_v))

# %%
class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, offsets, zigzag):
        out, lse = ring_forward(q, torch.stack((k, v)), offsets, zigzag)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.sums = (offsets, zigzag), lse.dtype
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, kv = dist.get_rank(), dist.get_world_size(), torch.stack((k, v))
        to_q, to_kv, sent = torch.zeros_like(q, dtype=ctx.sums), torch.zeros_like(kv, dtype=ctx.sums), lambda: to_kv
        for step in range(ranks):
            next_kv, terms = pass_on(kv) if step < ranks - 1 else lambda: None, torch.zeros_like(to_kv)
            for rows, columns, triangle in squares((rank - step) % ranks, *ctx.layout):
                g, own, whole, logs = (x[:, :, rows] for x in (gradient, q, out, lse))
                term, *of_kv = piece_gradients(g, own, *kv[..., columns, :], whole, logs, triangle)
                to_q[:, :, rows] += term
                terms[..., columns, :] += torch.stack(of_kv)
            to_kv = sent() + terms  # the sum so far moved while this round was computed
            kv, sent = next_kv(), pass_on(to_kv)
        return to_q.to(q.dtype), *sent().to(k.dtype), None, None  # its last move brought it home

# %% [markdown]
# **How much is sent?** There are $K$ key-value heads of width $D$, and each of $n$ ranks holds $s/n$ of $s$ tokens. KV move $n-1$
# times in forward and again in backward, and their gradients $n$ times. In a layer a rank sends
# $(3n-2) \cdot 2\,\frac{s}{n} K D$ numbers. `apart` compares ranks with one process, and counts:

# %%
RANKS, A, K, D, S = 4, 8, 2, 16, 64
def ring(zigzag, offsets=(0, S)):  # where documents begin, and the row's end: here one document
    return lambda q, k, v: RingAttention.apply(q, k, v, offsets, zigzag)
for zigzag in (False, True):
    found = run_ranks(apart, RANKS, ring(zigzag), functools.partial(places, zigzag=zigzag), A, K, S, D)
    predicted = (3 * RANKS - 2) * 2 * S // RANKS * K * D * 8
    gap, sent = max(rank.gap for rank in found), {rank.put_in["send"] for rank in found}
    print(f"{'zigzag' if zigzag else 'in order':<8}: output and gradients {gap:.0e} from one process; a rank sends", *sent, f"bytes (counted), predicted {predicted}")
    assert gap < 1e-13 and sent == {predicted}, "fp64 rounds at 1e-16; every piece once, every gradient home"

# %% [markdown]
# **Read it.** Both layouts equal one process to fp64's rounding.
#
# ## 3. Zigzag gives all ranks equal work
#
# `squares` gives each round's pairs of query and key. A round lasts as long as its busiest rank computes:

# %%
def pairs_by_round(zigzag, offsets=(0, 512)):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [sum(pairs_of(rows.stop - rows.start, columns.stop - columns.start, triangle)
                for rows, columns, triangle in squares((rank - step) % ranks, offsets, zigzag)) for step in range(ranks)]
counted = {layout: run_ranks(pairs_by_round, RANKS, layout == "zigzag") for layout in ("in order", "zigzag")}
show(draw_rounds(counted, piece=512 // (2 * RANKS), title="Forward around a ring of four, 512 tokens: pairs counted, time taken as pairs"),
     alt="In order rank 0 works only in the first round, and rank 3 in all four, until 14 squares. In zigzag all four ranks work in every round, and end at 8.")
for layout, ranks in counted.items():
    works = [sum(pairs) for pairs in ranks]
    longer = round_ends(ranks)[-1] * RANKS / sum(works) - 1
    print(f"{layout:<9}pairs by rank (counted):", *(f"{work / sum(works):.1%}" for work in works), f" {longer:.0%} longer than with equal work")
print(f"your bet: {my_bet_percent}%. In order on 8, 16, 64 ranks (predicted):", *(f"{1 - 1 / ranks:.0%}" for ranks in (8, 16, 64)))

# %% [markdown]
# **Read it.** In order, rank 3 computes 14 squares, where equal shares are 8. All wait for it, 75% longer. In **zigzag** all work alike in
# every round.
#
# **Question.** Sixteen ranks, in order. How many percent of the ring's time is rank 0 at work?

# %%
rank_0_percent = ...
check("18.rank_0_percent", rank_0_percent)

# %% [markdown]
# ### Two other ways: heads in place of tokens, and gathered KV
#
# In *Ulysses* each rank attends for *some* heads, and to *all* tokens. Ranks exchange until they hold
# these, attend, and exchange back. Follow a row on the left to its columns on the right:

# %%
show(draw_exchange(), alt="Tokens by heads: rows of four ranks before, columns of four ranks while they attend; each square says to whom it goes, and from whom it came.")

# %% [markdown]
# In the third way each rank gathers all KV, as in Llama 3 ([14](14_three_dimensions.ipynb)). With $A$ query heads, a rank sends in
# forward and backward, in units of $\frac{s}{n} D$ numbers:
#
# | ring | gathered | Ulysses |
# |---|---|---|
# | $(3n-2) \cdot 2K$ | $2(n-1) \cdot 2K$ | $\frac{n-1}{n} \cdot 2\,(2A + 2\max(K, n))$ |

# %% jupyter={"source_hidden": true}
n, unit = RANKS, S // RANKS * D * 8
WAYS = {"ring": (ring(True), True, (3 * n - 2) * 2 * K), "gathered": (gathered, True, 2 * (n - 1) * 2 * K),
        "Ulysses": (ulysses, False, (n - 1) / n * 2 * (2 * A + 2 * max(K, n)))}
for name, (way, zigzag, numbers) in WAYS.items():  # Ulysses in order: its joined rows are to rise, for `is_causal`
    found = run_ranks(apart, RANKS, way, functools.partial(places, zigzag=zigzag), A, K, S, D)[0]
    sent = sent_bytes(found.put_in, RANKS)
    print(f"{name:<9} {found.gap:.0e} from one process; a rank sends {sent:,.0f} bytes (counted), predicted {numbers * unit:,.0f}")
    assert found.gap < 1e-13 and sent == numbers * unit, f"{name} sends something else than its formula"
print("Ulysses sends less than gathering (predicted), with", *(f"{a} and {k} heads: {[n for n in range(2, a + 1) if a % n == 0 and not (k % n and n % k) and (a + max(k, n)) / n < k]} ranks;" for a, k in ((A, K), (28, 4), (32, 8))))

# %% [markdown]
# **Read it.** Gathering sends least here. With Llama 3.1 8B's 32 and 8 heads Ulysses does, from eight ranks. Both wait for their messages,
# while a ring's travel as it computes.
#
# **Question.** Qwen2.5-7B has 28 query heads and 4 key-value heads. Over how many of a node's eight GPUs, at most, can
# `ulysses` share a sequence, if they must divide the key-value heads or be a multiple of them?

# %%
most_ranks = ...
check("18.most_ranks", most_ranks)

# %% [markdown]
# ## 4. A whole model needs three things more, and packed rows their offsets
#
# All other layers look at one token at a time. So a model needs this rank's tokens, *their positions* in the row, and targets that were
# shifted **before** they were split.

# %%
def fresh(dtype=torch.float64):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocabulary=64, hidden=32, layers=2, heads=4, kv_heads=2, feedforward=96))
    model.init_weights(std=0.2)
    return model.to(dtype)
def train(attention=None, zigzag=True, fault="", steps=6, dtype=torch.float64):
    model, losses, first = fresh(dtype), [], []
    optimizer, own = torch.optim.SGD(model.parameters(), lr=0.1), places(S, zigzag)
    for block in model.blocks if attention else ():
        block.attention.attend = attention
    for step in range(steps):
        seed = step + 100 * dist.get_rank() * (fault == "rows that differ by rank")
        tokens = torch.randint(64, (2, S + 1), generator=torch.Generator().manual_seed(seed))
        x, y = tokens[:, :-1][:, own], tokens[:, 1:][:, own]
        if fault == "targets shifted after the split":
            y = torch.cat((x[:, 1:], x[:, :1] * 0 - 100), 1)  # the last has none
        positions = torch.arange(len(own)) if fault == "positions that restart" else own
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, positions).flatten(0, 1), y.flatten(), reduction="sum") / tokens[:, 1:].numel()
        loss.backward()
        for shared in (loss.detach(), *(p.grad for p in model.parameters())):
            dist.all_reduce(shared)  # in place: `loss` is the sum from here on
        losses, first = [*losses, loss.item()], first or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return losses, first  # and step 1's gradients

# %%
one_process, _ = run_ranks(train, 1)[0]
for name, (way, zigzag, _) in WAYS.items():
    losses, _ = run_ranks(train, RANKS, way, zigzag)[0]
    gap = max(abs(a / b - 1) for a, b in zip(losses, one_process, strict=True))
    print(f"{name:<9}", *(f"{loss:.6f}" for loss in losses), f" {gap:.0e} from one process")
    assert gap < 1e-12, f"{name} trains another model: fp64 rounds at 1e-16, and six steps add up a few hundred of these"

# %% [markdown]
# **Read it.** All three train the model of one process.
#
# A long row often holds **packed documents**: positions restart, and a document's last token has no target. Our ring takes
# their offsets, and one process learns each document by itself. Which of four runs equal it?

# %%
OFFSETS = (0, 24, 32, 64)  # three documents
row = torch.randint(64, (1, S), generator=torch.Generator().manual_seed(0))
restarting = torch.cat([torch.arange(end - first) for first, end in pairwise(OFFSETS)])
targets = row.roll(-1)
targets[:, [*range(6), *(end - 1 for end in OFFSETS[1:])]] = -100  # none: a prompt's, and a document's last token's
COUNT = (targets != -100).sum()
def packed(offsets=OFFSETS, positions=restarting, of_all=True):
    model, own = fresh(), places(S, zigzag=True)
    for block in model.blocks:
        block.attention.attend = ring(True, offsets)
    count = COUNT if of_all else RANKS * (targets[0, own] != -100).sum()
    loss = F.cross_entropy(model(row[:, own], positions[own])[0], targets[0, own], reduction="sum") / count
    loss.backward()
    for shared in (found := [loss.detach(), *(p.grad for p in model.parameters())]):
        dist.all_reduce(shared)
    return found

# %%
alone, total = fresh(), 0.0
for first, end in pairwise(OFFSETS):  # each document by itself, in one process
    loss = F.cross_entropy(alone(row[:, first:end])[0], targets[0, first:end], reduction="sum") / COUNT
    loss.backward()
    total += loss.detach()
wanted = [total, *(p.grad for p in alone.parameters())]
for name, changed in {"the documents' offsets": {}, "one document: they leak": {"offsets": (0, S)}, "positions go on": {"positions": torch.arange(S)},
                      "each rank's own count": {"of_all": False}}.items():
    gaps = [((a - b).norm() / b.norm()).item() for a, b in zip(run_ranks(functools.partial(packed, **changed), RANKS)[0], wanted, strict=True)]
    print(f"{name:<23} loss {gaps[0]:.0e} from one process, gradients up to {max(gaps[1:]):.0e}")
    assert (max(gaps) < (1e-6 if name == "positions go on" else 1e-12)) == (name in ("the documents' offsets", "positions go on")), f"{name}: {max(gaps):.0e} off, look at its positions"
works = [sum(pairs) for pairs in run_ranks(pairs_by_round, RANKS, True, OFFSETS)]
print("pairs by rank, in zigzag (counted):", *works, f" the busiest has {max(works) * RANKS / sum(works) - 1:.0%} above the mean")

# %% [markdown]
# **Read it.** With offsets the ring equals one process. Without them documents leak: the loss is off by 1% only, a gradient by its whole
# size. Positions may go on, for rotary ones count distances: what is left is their angles' rounding in fp32. Ranks hold unequal
# numbers of targets, so divide by the count of **all**. And zigzag is no longer even: the lab mends that.
#
# ## 5. On eight GPUs memory forces sharing past half a million tokens, on 128 the batch earlier
#
# Back to real size: eight GPUs share 128k tokens and the states.

# %%
ours = of_one_rank("qwen2.5-7b", 131_072 // GPUS, "chunked loss", "checkpointing", attend=ring_attention)
print(f"peak {ours.peak_bytes / 2**30:.1f} GiB (simulated):", ", ".join(
    f"{kind} {size / 2**30:.2f}" for kind, size in sorted(ours.breakdown.items(), key=lambda part: -part[1]) if size > 2**25))
sent = sum(row.payload_bytes for row in ours.traffic if row.collective == "send")  # in bf16, and in fp32
print(f"a rank sends {sent / 1e9:.1f} GB around the ring (simulated), {sent / 28e6:,.0f} MB a layer")
assert sent == 28 * (4 * (GPUS - 1) + 2 * (GPUS - 1) + 4 * GPUS) * 2 * 131_072 // GPUS * 4 * 128, "28 layers, forward twice: keys in bf16, gradients in fp32"
score("18", ours)  # a row of your scoreboard

# %% [markdown]
# **Read it.** Alone, a GPU peaked at 74.3 GiB. **How near are published runs?**
#
# - *torchtitan*: Llama 3.1 8B on H100s of **96 GB** at 500 W, linear layers in fp8, 32,768 tokens a rank; and its
#   405B, with TP 8 and PP 8.
# - *TRL*: Qwen3-8B, 1M tokens shared by eight, KV gathered, checkpoints on the host.
# - *ALST*: Llama 3.1 8B alone on one H100, MLP tiled, checkpoints and states on the host.
#
# We simulate in bf16, and predict speed at Llama 3's 380 TFLOP/s:

# %% jupyter={"source_hidden": true}
theirs, runs = of_one_rank("llama-3-8b", 32_768, "checkpointing"), torchtitan_runs()
above = runs[0].reserved_gib / (theirs.reserved_bytes / 2**30) - 1
print(f"torchtitan's first row: {theirs.reserved_bytes / 2**30:.1f} GiB reserved (simulated), and {above:.0%} above that (published)")
assert abs(above - ABOVE) < 0.015, "the margin is another than this run's"
def reached(row, name="llama-3-8b"):
    linear, attention = token_flop(model_shape(name), row.length)
    return row.tokens_per_second * (4 * linear + 4.5 * attention) / LLAMA_3_FLOPS
print(*(f"{row} (published): {reached(row):.2f} of what FLOP predict" for row in runs), sep="\n")
first, *_, last = (reached(row, "llama-3.1-405b") for row in torchtitan_runs("6"))
print(f"so CP 8 reaches {reached(runs[-1]) / reached(runs[0]):.2f} of CP 1's FLOP/s, and in 405B's rows {(left := last / first):.2f}\n{told_outside(room_bytes)}")

# %% [markdown]
# **Read it.** *Memory*: the first row sets our margin of 10%. TRL's run stays within it. *Time*: Llama 3 405B lost 5%.
# torchtitan lost about half, but its sequences grew with CP, and none of 262k ran alone.
#
# What does sharing buy? `step_parts` predicts a step's seconds on one of $n$ GPUs. Arrows go from own sequences to one that eight share. Dotted ones
# charge all that the 405B lost to sharing:

# %%
def step_parts(shape, bandwidth, s, n, flops, tiled=True):  # checkpoints: forward twice
    (linear, attention), c = token_flop(shape, s), s // n  # FLOP of a token's forward
    forward, message, backward, messages = round_seconds(shape, bandwidth, c, flops)
    late = (n - 1) * (2 * max(0, message - forward) + max(0, messages - backward)) + 2 * message * (n > 1)  # gradients' last move hides behind nothing
    again = 6 * shape.hidden * shape.feedforward * shape.layers * tiled
    return {"linear layers": 4 * linear * c / flops, "attention": 4.5 * attention * c / flops, "MLPs' third forward": again * c / flops, "messages not hidden": shape.layers * late}
qwen, nvlink = model_shape("qwen2.5-7b"), link("NVLink 4").sustained_bytes_per_second
def seconds(n, s, bandwidth=nvlink):
    return sum(step_parts(qwen, bandwidth, s, n, LLAMA_3_FLOPS).values())
show(draw_steps({(n, s): seconds(n, s) for n in (1, GPUS) for s in (2**17, 2**18, 2**19, 2**20)}, ring=GPUS, worst=left, no_room=2**20,
                title="Qwen2.5-7B on eight H100s: 380 TFLOP/s, MLP tiled, no copies to the host"),
     alt="At each length an arrow goes left, from own sequences to one shared by eight: an eighth of the seconds, at the same height. Dotted arrows go back to the right and down, to over twice the seconds and under half the tokens a second. At 1M own sequences do not fit.")
for n in (1, GPUS):
    print(f"512k tokens on {n} (predicted):", ", ".join(f"{name} {took:.2f} s" for name, took in step_parts(qwen, nvlink, 2**19, n, LLAMA_3_FLOPS).items()))
for name, bandwidth in (("NVLink", nvlink), ("half of it", nvlink / 2), ("InfiniBand NDR", link("InfiniBand NDR").sustained_bytes_per_second)):
    times = {s: seconds(1, s) / seconds(GPUS, s, bandwidth) for s in (2**15, 2**17, 2**19)}
    print(f"{name} ({bandwidth / 1e9:.0f} GB/s): a step is", ", ".join(f"{x:.1f} ({s // 1024}k tokens)" for s, x in times.items()), f"times shorter; with 405B's loss {left * times[2**19]:.1f}")
trl = sum(step_parts(QWEN3_8B, nvlink, 2**20, GPUS, LLAMA_3_FLOPS, tiled=False).values())
print(f"TRL, shared by eight: {trl:.0f} s (predicted, as a ring), {TRL_SECONDS} s (published): {trl / TRL_SECONDS:.1f} times faster")

# %% [markdown]
# **Read it.** A step shared by eight takes an eighth of the tokens and of the time, over InfiniBand, too: from 128k on messages hide
# behind attention. In the worst reading it takes under a third of the time. TRL, which gathers, ran *faster* than predicted.
#
# So sharing brings no more tokens a second. **What forces it?** Memory, or the *batch*, the tokens of an optimizer's step. Put in your own
# `my_gpus` and `my_batch`:

# %%
my_gpus, my_batch = 64, 4 * 2**20  # yours: GPUs, eight or more, and tokens of an optimizer's step
print(told_verdict(room_bytes))
states = ours.breakdown["parameters"] + ours.breakdown["optimizer state"]
def limit(n, part=ABOVE):  # n GPUs shard the states; these, of eight, are in the curve
    return longest(held["on the host, MLP tiled"], room_bytes / (1 + part) + states * (1 - GPUS / n))
print("on 8 GPUs memory forces sharing past", ", ".join(f"{limit(GPUS, part) / 1024:.0f}k" for part in MARGINS), "tokens with the four margins (interpolated)\n")
print("own sequences, at most (* before memory forces sharing, with a margin of 10%)\nbatch, tokens        8 GPUs  32 GPUs 128 GPUs 512 GPUs")
for batch in (LLAMA_3_BATCH_TOKENS // 2, LLAMA_3_BATCH_TOKENS, 2 * LLAMA_3_BATCH_TOKENS):
    print(f"{batch / 2**20:>14.0f}M  ", *(f"{batch // n // 1024:>7}k{'*' if batch / n < limit(n) else ' '}" for n in (8, 32, 128, 512)), sep="")
print(f"yours, {my_batch / 2**20:.0f}M tokens on {my_gpus} GPUs: the {'batch' if my_batch / my_gpus < limit(my_gpus) else 'memory'} forces sharing, past {min(my_batch / my_gpus, limit(my_gpus)) / 1024:,.0f}k")

# %% [markdown]
# **Read it. On eight GPUs memory forces sharing past half a million tokens**, with any margin: 577k, or 520k to 645k. At 512k a GPU trains
# alone, and eight pin 896 GiB on their host, where a block's input takes a power of two.
#
# **With 128 GPUs and more the batch does earlier**, at half of Llama 3's 16M tokens as at twice. With 32, it does up to 16M. Llama 3 itself
# shared 128k for memory, says its paper. Tensor parallelism, which splits sequences, too ([12](12_tensor_parallel.ipynb)), was not tried.
#
# ## Break it, diagnose it
#
# The model of section 4 goes around the ring in fp32, with one thing wrong each time. Which first loss is right?

# %%
class MovedTooFar(RingAttention):
    @staticmethod
    def backward(ctx, gradient):
        to_q, *to_kv, _, _ = RingAttention.backward(ctx, gradient)
        return to_q, *(pass_on(x)() for x in to_kv), None, None  # one move more: each rank gets its neighbour's

in_fp32 = functools.partial(train, steps=3, dtype=torch.float32)
right, right_gradients = run_ranks(in_fp32, 1)[0]
for fault in ("none", "positions that restart", "targets shifted after the split", "gradients not at home", "rows that differ by rank"):
    way = ring(True) if "home" not in fault else lambda q, k, v: MovedTooFar.apply(q, k, v, (0, S), True)
    losses, gradients = run_ranks(in_fp32, RANKS, way, True, fault)[0]
    worst = max(((b - a).norm() / a.norm()).item() for a, b in zip(right_gradients, gradients, strict=True))
    print(f"{fault:<32} losses off by", *(f"{b / a - 1:+.0e}" for a, b in zip(right, losses, strict=True)), f" step 1's gradients by up to {worst:.0e}")
    assert worst < 1e-5 if fault == "none" else worst > 1e-2, f"{fault}: gradients {worst:.0e} off"
print(f"\ntargets shifted after the split: {RANKS} of {S} are lost, {RANKS - 1} wrong. Of 131,072 on eight ranks 8 are lost, {-8 / 2**17:+.0e}; bf16 rounds at {torch.finfo(torch.bfloat16).eps / 2:.0e}")

# %% [markdown]
# **Diagnose it.** Gradients not at home leave the first loss right. In the others each rank believes that it has the beginning, ends of
# pieces lose a target or learn a wrong one, or a `DistributedSampler` counted all ranks. At real size bf16 hides lost targets. **So compare
# step 1's gradients with one process, in fp32, on a short text.**
#
# ## Recap
#
# **On eight H100s memory forces sharing past half a million tokens (simulated), with blocks' inputs on the host and the MLP tiled. With 128
# GPUs and more the batch does earlier.** A step shared by eight takes an eighth of the tokens and of the time (predicted), and under a third
# in the worst reading of published runs. Softmax adds up, so KV can go around a ring. Zigzag evens out work, and offsets keep documents apart.
#
# Do the [lab](../../labs/advanced/18_long_contexts.ipynb), in a copy: `make my-labs`. Compare with the
# [solution](../../solutions/advanced/18_long_contexts.ipynb).
#
# **References.** [Ring Attention](https://arxiv.org/abs/2310.01889), [DeepSpeed-Ulysses](https://arxiv.org/abs/2309.14509),
# [Llama 3](https://arxiv.org/abs/2407.21783), [ALST](https://arxiv.org/abs/2506.13996) and
# [its recipe](https://github.com/snowflakedb/ArcticTraining/blob/main/projects/sequence-parallelism/run-h100-sp1-llama-8b.yml),
# [torchtitan's tables](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md).

# %% [markdown]
# ## On Monday
#
# PyTorch's `context_parallel(mesh, buffers=[inputs, targets], buffer_seq_dims=[1, 1])` is for one causal document. It gathers keys and
# values; `set_rotate_method("alltoall")` makes it a ring. This script uses PyTorch 2.15's parts for packed rows, still private, which gather,
# too. It was run on CPU ranks alone, with dense attention in place of CUDA's `flex_attention`.
#
# ```python
# # torchrun --nproc-per-node=8 train.py. You bring:
# # `model`, in fp32; beyond the positions of its training, with YaRN (arXiv:2309.00071). Each of its `blocks` has a `feedforward`, and an `attention` that calls
# #     its `attend(q, k, v)` on (batch, heads, tokens, width). `model(inputs, targets, positions)` gives the *sum* of its tokens' losses,
# #     by lesson 05's chunked loss.
# # `rows`, a dataset: of each row S + 1 tokens, and its documents' lengths, which add up to S + 1. One document is a row, too.
# # `cp`, the number of GPUs that share a row; 128 * cp divides S. `folder`, for what is saved.
# import os
# from functools import partial
#
# import torch
# import torch.distributed as dist
# import torch.distributed.checkpoint as dcp
# from torch.autograd.graph import save_on_cpu
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
# from torch.distributed.tensor.experimental._attention import _context_parallel_shard, _HeadTailLoadBalancer
# from torch.distributed.tensor.experimental._context_parallel import flex_cp_allgather
# from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
# from torch.nn.attention.flex_attention import flex_attention
# from torch.utils.checkpoint import checkpoint
# from torch.utils.data import DataLoader, DistributedSampler
#
# device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
# torch.cuda.set_device(device)
# dist.init_process_group("nccl")
# model.to(device)
# mesh = init_device_mesh(device.type, (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
# bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# shards = mesh["dp", "cp"]._flatten("shards")  # states are sharded over all GPUs
# flex = torch.compile(flex_attention)
#
# def attend(q, k, v):  # each GPU gathers the row's keys and values; its own queries see those of their document
#     k, v = flex_cp_allgather(k, v, 2, mesh["cp"].get_group().group_name)
#     return flex(q, k, v, block_mask=mask, enable_gqa=True)
#
# def tiled(forward, hidden):  # an MLP, some tokens at a time. Leave it out where a step fits without
#     return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in hidden.split(8192, 1)], 1)
#
# for block in model.blocks:
#     block.attention.attend = attend
#     block.feedforward.forward = partial(tiled, block.feedforward.forward)
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)
#     fully_shard(block, mesh=shards, mp_policy=bf16)
# fully_shard(model, mesh=shards, mp_policy=bf16)
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
#
# sampler = DistributedSampler(rows, mesh["dp"].size(), mesh["dp"].get_local_rank())  # GPUs that share a row read the same one
# for tokens, lengths in DataLoader(rows, batch_size=1, sampler=sampler):
#     tokens, lengths = tokens.to(device), lengths[0].to(device)
#     document = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
#     positions = torch.arange(len(document), device=device) - (lengths.cumsum(0) - lengths)[document]  # each document from 0
#     inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()  # shifted before they are split
#     targets[:, document[1:] != document[:-1]] = -100  # a document's last token has none
#     count = (targets != -100).sum()
#     dist.all_reduce(count, group=mesh["dp"].get_group())  # the targets of all rows
#     S = inputs.shape[1]
#     zigzag = _HeadTailLoadBalancer(S, cp, device)
#     mask = _create_cp_block_mask(lambda b, h, q, k: (k <= q) & (document[k] == document[q]), 1, 1, S, S, (128, 128), mesh["cp"], zigzag)
#     inputs, targets, positions = _context_parallel_shard(mesh["cp"], [inputs, targets, positions[:-1]], [1, 1, 0], zigzag)
#     with save_on_cpu(pin_memory=True):  # blocks' inputs wait in host memory. Without this line they stay on the GPU
#         loss = model(inputs, targets, positions) / count.clamp(min=1)
#     (loss * dist.get_world_size()).backward()  # FSDP2 averages over the ranks, and we want their sum; Adam would hide it
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over the shards of all GPUs
#     optimizer.step()
#     optimizer.zero_grad()
#     dist.all_reduce(total := loss.detach().clone())
#     if dist.get_rank() == 0:
#         print(f"loss {total.item():.4f}")
#
# weights, moments = get_state_dict(model, optimizer)
# states = {"model": weights, "optimizer": moments}
# dcp.save(states, checkpoint_id=folder)
# dcp.load(states, checkpoint_id=folder)  # on any number of GPUs
# set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
# ```
#
# **Look at** step 1's gradients, in fp32, on a short text: one process's, to fp32's rounding. With one document a row,
# [TRL's settings](https://huggingface.co/docs/trl/en/long_context_training) are enough; they take no packed rows.
