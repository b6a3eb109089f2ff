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
# **Promise.** You build a ring of four ranks, and get the gradients of one process. Eight simulated H100s answer: **memory goes by
# the tokens on a GPU**. Up to 512k each GPU can train on its own sequence. At 1M they share one. A step shared by eight is eight times
# shorter, at the same tokens a second (predicted). If all of a published run's shortfall is due to sharing, it is four times, at half.
# With hundreds of GPUs the batch forces sharing far earlier.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | two minutes on two CPU cores |
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

import torch
import torch.distributed as dist
import torch.nn.functional as F

from utils import Transformer, TransformerConfig, check, measure, model_shape, run_ranks, score, show
from utils.catalog import link
from utils.simulation.devices import simulated_device
from utils.lessons.lesson_18.at_size import of_one_rank, token_flop
from utils.lessons.lesson_18.compare import apart, gathered, sent_bytes
from utils.lessons.lesson_18.figures import draw_growth, draw_rounds
from utils.lessons.lesson_18.holders import draw_exchange, draw_holders
from utils.lessons.lesson_18.pieces import attend_piece as kernel
from utils.lessons.lesson_18.published import LLAMA_3_BATCH_TOKENS, LLAMA_3_FLOPS, QWEN3_8B, TRL_SECONDS, torchtitan_runs
from utils.lessons.lesson_18.records.growth import DRAWN, LINES, RANKS as GPUS, MARGINS, TOLD, VERDICT, fits, is_the_same, longest, on_host_bytes, recorded, ring_of, told_outside
from utils.lessons.lesson_18.refusals import check_heads, check_length
from utils.lessons.lesson_18.ring import ring_attention
from utils.lessons.lesson_18.rounds import hides_from, pairs_of, round_ends, round_seconds

# %% [markdown]
# ## 1. Memory grows no faster than the tokens
#
# Eight H100s train Qwen2.5-7B with flash attention and FSDP2. The picture shows what a GPU reserves (simulated), and
# a margin of 10%. On the first three lines each GPU has its own sequence, and each line adds to the one before:
#
# - *chunked loss, checkpoints*: few tokens' logits at a time, and of a block only its input
#   ([05](../intermediate/05_checkpointing.ipynb));
# - *checkpoints on the host*: these inputs wait in the CPU's memory;
# - *on the host, MLP tiled*: 8,192 tokens at a time, computed once more in backward.
#
# On the last two lines the eight GPUs share one sequence, and nothing is on the host. Look where lines cross the GPU's 78 GiB. New words:
# [glossary](../00_glossary.ipynb).

# %%
held, room_bytes, ABOVE = recorded("reserved_bytes"), simulated_device("H100").usable_bytes, 0.10
show(draw_growth({name: held[name] for name in DRAWN}, room_bytes=room_bytes, above=ABOVE, told=TOLD, device="a simulated H100-80GB",
                 title="Qwen2.5-7B on 8 GPUs: FSDP2, fp32 states, bf16, flash attention"),
     alt="What a GPU reserves, and 10% on top, over 8k to 1M tokens: as tokens double, lines at most double. The GPU has 78 GiB. At 128k chunked loss and checkpoints take 86. At 256k with checkpoints on the host 105, with a tiled MLP 49. At 512k tiled takes 71 and a ring of eight 56. At 1M the ring takes 86, as one GPU does at 128k, and only the ring with a tiled MLP fits, with 60.")

# %% [markdown]
# **Read it.** At 1M the ring of eight takes 86 GiB, as one GPU does at an eighth of the tokens, 128k: **the tokens on a GPU decide**. As tokens
# double, no line more than doubles: flash attention never stores the scores of all pairs. Only the work is quadratic.
#
# Three peaks at 128k:

# %% jupyter={"source_hidden": true}
for name in [*LINES][1:4]:  # section 5 has the rings
    found = of_one_rank("qwen2.5-7b", 131_072, *LINES[name])
    parts = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in found.breakdown.items() if size > 2**31)
    print(f"{name}: peak {found.peak_bytes / 2**30:.1f} GiB, {held[name][131_072] / 2**30:.1f} reserved (simulated). Parts above 2 GiB: {parts}")
    assert is_the_same(found.peak_bytes, recorded()[name][131_072]), "the record is of another step than this one"
print(f"the GPU has {room_bytes / 2**30:.1f} GiB; 28 blocks' inputs: 28 x 131,072 x 3,584 x 2 bytes = {28 * 2**17 * 3584 * 2 / 2**30:.1f}")

# %% [markdown]
# **Read it.** With chunked loss and checkpoints two parts grow: the blocks' inputs, 24.5 GiB, and the inside of **one** block in backward.
# The host takes the inputs, and the peak moves to where gradients stand beside that block.
#
# ## 2. Softmax adds up in blocks, so keys can go around a ring
#
# At 1M these means do not suffice. Context parallelism divides a sequence's *tokens*. Here four ranks share eight *pieces*. A rank holds two
# neighbours (*in order*), or one piece from the front and one from the back (*zigzag*). Queries stay. Keys and values, from here on
# *keys*, **go around a ring**, one rank further each *round*. Follow zigzag's rounds, in the middle:

# %%
show(draw_holders(), alt="Causal attention as squares of pieces. In order ranks compute 2, 6, 10 and 14 squares; in zigzag 8 each. Below, zigzag's keys move one rank to the right each round. At the bottom, the gradient of keys 0 and 7 visits ranks 0 to 3 and moves once more, home to rank 0: piece 0 collects a term on each rank, piece 7 on rank 0 alone.")

# %% [markdown]
# **Read it.** In round 1, rank 1 has the keys of pieces 0 and 7. Its queries, 1 and 6, both see piece 0, and neither sees 7.
#
# So a rank meets its keys in blocks, as flash attention does. For each query it keeps the largest score so far, the sum of
# exponentials, and the output. A larger score scales these down:

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
# **Read it.** Twice the tokens take four times the memory at once, and twice in blocks. Autograd keeps each block's weights, and is
# quadratic again. Flash attention's backward computes them anew, as ours will.
#
# Two blocks' outputs $o_1, o_2$ and log-sum-exps $l_1, l_2$ merge to
# $$l = \log(e^{l_1} + e^{l_2}), \quad o = e^{l_1 - l}\, o_1 + e^{l_2 - l}\, o_2.$$
# `places` gives a rank its tokens. `seen` says which of its queries see which keys of another rank:

# %%
def places(length, zigzag):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    check_length(length, ranks)  # a sentence, the same on all ranks, before anything is sent
    pieces = torch.arange(length).chunk(2 * ranks)
    own = (rank, 2 * ranks - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)
    return torch.cat([pieces[i] for i in own])

def seen(source, own, zigzag):
    """Which of my `own` rows see which of the source's columns, and is it a triangle? None: nothing to do."""
    rank, everything, half = dist.get_rank(), slice(0, own), own // 2
    if source == rank:
        return everything, everything, True
    if not zigzag:
        return (everything, everything, False) if source < rank else None
    return (everything, slice(0, half), False) if source < rank else (slice(half, own), everything, False)


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
def ring_forward(q, kv, zigzag):
    rank, ranks, sums = dist.get_rank(), dist.get_world_size(), torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q, dtype=sums), q.new_full(q.shape[:3], -torch.inf, dtype=sums)
    for step in range(ranks):
        next_keys = pass_on(kv) if step < ranks - 1 else lambda: None  # on their way while this round is computed
        if todo := seen((rank - step) % ranks, q.shape[2], zigzag):
            rows, columns, triangle = todo
            part, part_lse = kernel(q[:, :, rows], *kv[..., columns, :], triangle)  # flash attention: outputs, log-sum-exps
            merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        kv = next_keys()
    return out.to(q.dtype), lse


# %% [markdown]
# Backward goes around **again**. Each rank kept its own queries and keys, and $o$ and $l$ of the *whole* sum. $dO$ is the gradient of the
# outputs. From $l$ and a block's scores $S = QK^T / \sqrt D$ come the weights $P$, and from these the block's terms:
# $$P = e^{S - l}, \quad dV = P^T dO, \quad dS = P \circ \big(dO\,V^T - \mathrm{rowsum}(dO \circ o)\big), \quad dQ = \frac{dS\,K}{\sqrt D},
# \quad dK = \frac{dS^T Q}{\sqrt D}.$$
# The row's sum is over *all* keys, and the whole $o$ gives it without a message. Keys get a term on each rank whose queries see them. So their gradient travels along, and moves once more to be home:

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
    def forward(ctx, q, k, v, zigzag):
        out, lse = ring_forward(q, torch.stack((k, v)), zigzag)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.zigzag, ctx.sums = zigzag, lse.dtype
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, kv = dist.get_rank(), dist.get_world_size(), torch.stack((k, v))
        to_q, to_kv, sent = torch.zeros_like(q, dtype=ctx.sums), torch.zeros_like(kv, dtype=ctx.sums), lambda: to_kv
        for step in range(ranks):
            next_keys = pass_on(kv) if step < ranks - 1 else lambda: None
            if todo := seen((rank - step) % ranks, q.shape[2], ctx.zigzag):
                rows, columns, triangle = todo
                g, own, whole, logs = (x[:, :, rows] for x in (gradient, q, out, lse))
                term, *terms = piece_gradients(g, own, *kv[..., columns, :], whole, logs, triangle)
                to_q[:, :, rows] += term
            to_kv = sent()  # it moved while this round was computed
            if todo:
                to_kv[..., columns, :] += torch.stack(terms)
            kv, sent = next_keys(), pass_on(to_kv)
        return to_q.to(q.dtype), *sent().to(k.dtype), None  # its last move brought it home


# %% [markdown]
# **How much is sent?** There are $K$ key-value heads of width $D$, and each of $n$ ranks holds $s/n$ of $s$ tokens. Keys move $n-1$
# times in forward and again in backward, and their gradients $n$ times. In a layer a rank sends
# $(3n-2) \cdot 2\,\frac{s}{n} K D$ numbers. `apart` compares ranks with one process, and counts:

# %%
RANKS, A, K, D, S = 4, 8, 2, 16, 64

def ring(zigzag):
    return lambda q, k, v: RingAttention.apply(q, k, v, zigzag)
for zigzag in (False, True):
    found = run_ranks(apart, RANKS, ring(zigzag), functools.partial(places, zigzag=zigzag), A, K, S, D)
    predicted = (3 * RANKS - 2) * 2 * S // RANKS * K * D * 8
    gap, sent = max(rank.gap for rank in found), {rank.put_in["send"] for rank in found}
    print(f"{'zigzag' if zigzag else 'in order':<8}: output and gradients {gap:.0e} from one process; a rank sends", *sent, f"bytes (counted), predicted {predicted}")
    assert gap < 1e-13 and sent == {predicted}, "fp64 rounds at 1e-16; every piece once, every gradient home"

# %% [markdown]
# **Read it.** Both layouts equal one process to fp64's rounding. In bf16, sums and the gradients on their way stay in fp32.
#
# ## 3. Zigzag gives all ranks equal work
#
# Which layout is faster? `seen` gives each round's pairs of query and key. A round lasts as long as its busiest rank computes:

# %%
def pairs_by_round(zigzag, length=512):
    rank, ranks, pairs = dist.get_rank(), dist.get_world_size(), []
    for step in range(ranks):
        todo = seen((rank - step) % ranks, length // ranks, zigzag)
        rows, columns, triangle = todo or (slice(0, 0), slice(0, 0), False)
        pairs.append(pairs_of(rows.stop - rows.start, columns.stop - columns.start, triangle))
    return pairs

# %%
counted = {layout: run_ranks(pairs_by_round, RANKS, layout == "zigzag") for layout in ("in order", "zigzag")}
show(draw_rounds(counted, piece=512 // (2 * RANKS), title="Forward around a ring of four, 512 tokens: pairs counted, time taken as pairs"),
     alt="In order rank 0 works only in the first round, and rank 3 in all four, until 14 squares. In zigzag all four ranks work in every round, and end at 8.")

# %% jupyter={"source_hidden": true}
for layout, ranks in counted.items():
    works = [sum(pairs) for pairs in ranks]
    longer = round_ends(ranks)[-1] * RANKS / sum(works) - 1
    by_rank = " ".join(f"{work / sum(works):.1%}" for work in works)
    print(f"{layout:<9}pairs by rank (counted): {by_rank}; {longer:.0%} longer than with equal work")
print("in order on more ranks (predicted):", *(f"{ranks} ranks {1 - 1 / ranks:.0%};" for ranks in (8, 16, 64)), f"your bet for four: {my_bet_percent}%")

# %% [markdown]
# **Read it.** In order, rank 3 meets the keys of three ranks whole, and half of its own: 3.5 units of work, where equal shares
# are 2. All wait for 75% more pairs, on $n$ ranks $1-\frac1n$. In **zigzag** all work alike in every round.
#
# **Question.** Sixteen ranks, in order. How many percent of the ring's time is rank 0 at work?

# %%
rank_0_percent = ...
check("18.rank_0_percent", rank_0_percent)

# %% [markdown]
# ### Heads in place of tokens: Ulysses
#
# A ring is one way of three. In the second, each rank attends for *some* heads, and to *all* tokens. Ranks exchange until they hold
# these, attend, and exchange back. The exchange is an all-to-all, in backward, too:

# %%
show(draw_exchange(), alt="Tokens by heads: rows of four ranks before, columns of four ranks while they attend; each square says to whom it goes, and from whom it came.")

# %%
class Exchange(torch.autograd.Function):  # cut one dimension over the ranks, join another
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
# The third gathers all keys on each rank, as Llama 3 does ([14](14_three_dimensions.ipynb)). With $A$ query heads, a rank sends in
# forward and backward, in units of $\frac{s}{n} D$ numbers:
#
# | ring | gathered | Ulysses |
# |---|---|---|
# | $(3n-2) \cdot 2K$ | $2(n-1) \cdot 2K$ | $\frac{n-1}{n} \cdot 2\,(2A + 2\max(K, n))$ |

# %%
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
# **Read it.** Gathering sends least here. With Llama 3.1 8B's 32 and 8 heads Ulysses does, from eight ranks. Both wait for their messages, while a ring's travel as it computes.
#
# **Question.** Qwen2.5-7B has 28 query heads and 4 key-value heads. Over how many of a node's eight GPUs, at most, can
# this page's `ulysses` share a sequence?

# %%
most_ranks = ...
check("18.most_ranks", most_ranks)

# %% [markdown]
# ## 4. A whole model needs three things more, and packed rows a mask
#
# All other layers look at one token at a time. So a model needs three things more: this rank's tokens, *their positions* in the row,
# and targets that were shifted **before** they were split.

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
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
one_process = run_ranks(train, 1)[0]
for name, (way, zigzag, _) in WAYS.items():
    losses = run_ranks(train, RANKS, way, zigzag)[0]
    gap = max(abs(a / b - 1) for a, b in zip(losses, one_process, strict=True))
    print(f"{name:<9}", *(f"{loss:.6f}" for loss in losses), f" {gap:.0e} from one process")
    assert gap < 1e-12, f"{name} trains another model: fp64 rounds at 1e-16, and six steps add up a few hundred of these"

# %% [markdown]
# The model must also know such positions. Qwen2.5 was trained on 32,768 positions
# ([published](https://arxiv.org/abs/2412.15115)). Rotary positions turn each pair of a head's numbers at a speed of its own. How far do slow
# pairs turn, without [YaRN](https://arxiv.org/abs/2309.00071) and with it?

# %%
def slow_pairs(length, factor, trained=32_768, width=128, base=1e6):  # of a head of Qwen2.5-7B
    speed = base ** (-torch.arange(0, width, 2) / width)  # radians a position
    turns = trained * speed / (2 * torch.pi)  # whole turns in training
    kept = ((turns - 1) / (32 - 1)).clamp(0, 1)  # YaRN leaves fast pairs as they are, and slows slow ones by the factor
    slow = turns < 1
    return slow.sum().item(), (length / trained * (kept + (1 - kept) / factor))[slow].max().item()
for length in (131_072, 2**19, 2**20):
    (slow, plain), (_, scaled) = slow_pairs(length, 1), slow_pairs(length, length / 32_768)
    print(f"{length:>9,} positions: {slow} of 64 pairs, which made no whole turn in training, reach {plain:.0f} x their largest angle there; with YaRN {scaled:.0f} x, by its definition")

# %% [markdown]
# **Read it.** Without scaling, 24 pairs meet angles that training never showed. TRL's run of 1M starts at a loss of 4.3 with YaRN, and near
# 10 without ([published](https://huggingface.co/docs/trl/en/long_context_training)).
#
# A long row often holds **packed documents**: a token sees its own document only, positions restart, and a document's last token has
# no target. A dense mask does for 64 tokens (at 128k: 16 GiB).

# %%
document = torch.arange(3).repeat_interleave(torch.tensor((24, 8, 32)))
own_document = (document[:, None] == document).tril()
restarting = torch.cat([torch.arange(24), torch.arange(8), torch.arange(32)])
row = torch.randint(64, (1, S), generator=torch.Generator().manual_seed(0))
learned = (document == document.roll(-1)) & (restarting >= 5)  # not into the next document; 6 tokens are a prompt
targets = row.roll(-1).masked_fill(~learned, -100)
def packed_losses(mask=own_document, positions=restarting):
    model, own = fresh(), places(S, zigzag=False)
    for block in model.blocks:
        block.attention.attend = functools.partial(ulysses, mask=mask)
    logits = model(row[:, own], positions[own])
    return F.cross_entropy(logits[0], targets[0, own], reduction="none").detach()
one_by_one = torch.cat([fresh()(row[:, document == d])[0] for d in range(3)])
wanted = F.cross_entropy(one_by_one, targets[0], reduction="none").detach()
for name, changed in {"packed": (), "positions go on": (own_document, torch.arange(S)), "no mask": (torch.ones(S, S).tril().bool(),)}.items():
    gap = (torch.cat(run_ranks(packed_losses, RANKS, *changed)) - wanted).abs().max().item()
    print(f"{name:<16} losses of tokens up to {gap:.0e} from those of each document alone")
    assert (gap > 0.1) == (name == "no mask"), "one document leaks into another, or positions do not restart"
counts = learned.view(RANKS, -1).sum(1).tolist()
print("targets by rank:", *counts, f" in a mean of the ranks' means one on rank 0 counts {counts[-1] / counts[0]:.2f} times one on rank 3")

# %% [markdown]
# **Read it.** Without the mask, documents leak. At 64 tokens positions may go on: rotary ones count *distances*, and the gap is fp32's
# rounding of angles. Ranks hold unequal numbers of targets, so divide by the count of **all**.
#
# ## 5. Each GPU holds 512k tokens, and at 1M eight share
#
# Eight GPUs share 128k tokens and the states. `ring_attention` is section 2's ring, with a kernel in backward, too:

# %%
ours = of_one_rank("qwen2.5-7b", 131_072 // GPUS, "chunked loss", "checkpointing", attend=ring_attention)
print(f"peak {ours.peak_bytes / 2**30:.1f} GiB (simulated):", ", ".join(
    f"{kind} {size / 2**30:.2f}" for kind, size in sorted(ours.breakdown.items(), key=lambda part: -part[1]) if size > 2**25))
moves = [row for row in ours.traffic if row.collective == "send"]  # in bf16, and in fp32
sent = sum(row.payload_bytes for row in moves)
print(f"a rank sends {sent / 1e9:.1f} GB around the ring (simulated), {sent / 28e6:,.0f} MB a layer")
assert sent == 28 * (4 * (GPUS - 1) + 2 * (GPUS - 1) + 4 * GPUS) * 2 * 131_072 // GPUS * 4 * 128, "28 layers, forward twice: keys in bf16, gradients in fp32"
score("18", ours)  # a row of your scoreboard

# %% [markdown]
# **Read it.** Alone, a GPU peaked at 74.3 GiB, here at 23.0.
#
# **How near are published runs?** *torchtitan*: Llama 3.1 8B on H100s of **96 GB** at 500 W, compiled, linear layers in fp8,
# 32,768 tokens a rank. *TRL*: Qwen3-8B, 1M tokens shared by eight, checkpoints on the host. *ALST*: Llama 3.1 8B alone on one H100, MLP tiled,
# checkpoints and states on the host. We simulate in bf16, and predict speed by FLOP at 380 TFLOP/s, which Llama 3 405B reached, shared by 16 (published):

# %% jupyter={"source_hidden": true}
theirs, runs, reached = of_one_rank("llama-3-8b", 32_768, "checkpointing"), torchtitan_runs(), []
above = runs[0].reserved_gib / (theirs.reserved_bytes / 2**30) - 1
print(f"torchtitan's first row: {theirs.reserved_bytes / 2**30:.1f} GiB reserved (simulated), and {above:.0%} above that (published)")
assert abs(above - ABOVE) < 0.015, "the margin is another than this run's"
for row in runs:
    linear, attention = token_flop(model_shape("llama-3-8b"), row.length)
    predicted = LLAMA_3_FLOPS / (4 * linear + 4.5 * attention)
    reached.append(row.tokens_per_second / predicted)
    print(f"{row} (published), {predicted:,.0f} by FLOP (predicted)")
print(told_outside(room_bytes))

# %% [markdown]
# **Read it.** *Memory*: tokens **a rank** decide here, too, with 84 GiB at 32k and at 262k. The first row sets our margin of 10%. TRL's run, 4% above
# or 5% below the simulation, and ALST's, with room for 17%, do not forbid it.
#
# *Time*: at 262k torchtitan reached half of what we predict, and does not tell why. Long pieces should hide their messages,
# for work is quadratic.

# %%
def step_seconds(shape, bandwidth, s, n, flops, tiled=False):
    (linear, attention), c = token_flop(shape, s), s // n
    forward, message, backward, messages = round_seconds(shape, bandwidth, c, flops)
    late = (n - 1) * (2 * max(0, message - forward) + max(0, messages - backward))  # checkpoints: forward twice
    late += 2 * message * (n > 1)  # the gradients' last move hides behind nothing
    again = 6 * shape.hidden * shape.feedforward * shape.layers * tiled  # a third forward of each MLP
    return (4 * linear + 4.5 * attention + again) * c / flops + shape.layers * late

# %% jupyter={"source_hidden": true}
RATES, qwen, speeds = (190e12, 380e12, 760e12), model_shape("qwen2.5-7b"), {n: link(name).sustained_bytes_per_second for n, name in ((1, "NVLink 4"), (8, "NVLink 4"), (16, "InfiniBand NDR"))}
steps = {(line, tokens): [step_seconds(qwen, speeds[ring_of(line)], tokens, ring_of(line), rate, "tiled" in line) for rate in RATES] for line, tokens in VERDICT}
print(f"Qwen2.5-7B on H100s of {room_bytes / 2**30:.1f} GiB, all with chunked loss and checkpoints; reserved: simulated; a step at 380 TFLOP/s, without states' gathers and copies to the host: predicted\n"
      f"{'tokens':<30}{'GiB reserved':>13}" + "".join(f"{f'+{part:.0%}':>6}" for part in MARGINS) + f"{'GiB pinned*':>13}{'s a step':>10}{'tokens/s a GPU':>16}{'M tokens a step of 512 GPUs':>29}")
for (line, tokens), (_, one, _) in steps.items():
    print(f"{tokens // 1024:>5}k {line:<27}{held[line][tokens] / 2**30:>10.1f}{fits(held[line][tokens], room_bytes)}{8 * on_host_bytes(line, tokens) / 2**30:>13,.0f}"
          f"{one:>10,.0f}{tokens / ring_of(line) / one:>16,.0f}{tokens * 512 // ring_of(line) / 2**20:>29,.0f}")
print("* on a host of eight GPUs; the allocator rounds each block's input up to a power of two\n\nAlone, tiled, on the host, a GPU is full at",
      ", ".join(f"{longest(held['on the host, MLP tiled'], room_bytes / (1 + part)) / 1024:.0f}k" for part in MARGINS), "tokens with the four margins (on a straight line from 512k to 1M)")
print(f"Llama 3's batch of {LLAMA_3_BATCH_TOKENS / 2**20:.0f}M tokens (published) gives each of", ", ".join(f"{n} GPUs {LLAMA_3_BATCH_TOKENS // n // 1024}k" for n in (8, 32, 512)))
for name, part in (("messages hidden", 1.0), ("all of torchtitan's shortfall charged to sharing", reached[-1] / reached[0])):
    sooner = [part * own / shared for own, shared in zip(steps["on the host, MLP tiled", 2**19], steps["ring of 8, MLP tiled", 2**19], strict=True)]
    print(f"512k, ring of 8 beside own sequences, {name}: at half, all and twice the rate a step", ", ".join(f"{x:.1f}" for x in sooner), "times shorter;", ", ".join(f"{x / GPUS:.2f}" for x in sooner), "of the tokens a second")
print("torchtitan reached", ", ".join(f"{part:.2f}" for part in reached), "of what FLOP predict, at CP 1, 2, 4, 8")
print(f"TRL, a step shared by eight: {(trl := step_seconds(QWEN3_8B, speeds[8], 2**20, GPUS, LLAMA_3_FLOPS)):.0f} s, as if around a ring (predicted), {TRL_SECONDS} s, keys gathered (published): {trl / TRL_SECONDS:.1f} times faster")
print("backward's messages hide, over NVLink, from", ", ".join(f"{hides_from(1, *round_seconds(qwen, speeds[8], 1, rate)[2:]):,.0f}" for rate in RATES), "tokens a rank (predicted, without latency)")

# %% [markdown]
# **Read it. Up to 512k memory does not make you share**, with any margin. The price is 896 GiB pinned on a host. **At 1M GPUs share**, with any
# margin: alone, a GPU is full at 577k (520k to 645k, interpolated). In a ring of eight tiling suffices, and nothing is pinned. Two rows hang on the
# margin, and fit only without one: 128k with checkpoints, and the untiled ring at 1M.
#
# **A step shared by eight is eight times shorter, at the same tokens a second**, if messages hide; both arms tile. **If all of torchtitan's
# shortfall is due to sharing, it is four times, at half.** But its sequences grew with CP, and none of 262k ran alone. TRL, shared by eight, was 1.3 times
# *faster* than predicted.
#
# **With hundreds of GPUs the batch forces sharing far earlier.** Llama 3 405B took 16M tokens a step, and shared 131k tokens by 16 (published).
# With 16M, each of 512 GPUs has 32k.
#
# ## Break it, diagnose it
#
# The model of section 4 goes around the ring, with one thing wrong each time. Which first loss is right?

# %%
class MovedTooFar(RingAttention):
    @staticmethod
    def backward(ctx, gradient):
        to_q, *to_kv, _ = RingAttention.backward(ctx, gradient)
        return to_q, *(pass_on(x)() for x in to_kv), None  # one move more: each rank gets its neighbour's

for fault in ("positions that restart", "targets shifted after the split", "gradients not at home", "rows that differ by rank"):
    way = ring(True) if "home" not in fault else lambda q, k, v: MovedTooFar.apply(q, k, v, True)
    losses = run_ranks(train, RANKS, way, True, fault)[0]
    gaps = [b / a - 1 for a, b in zip(one_process, losses, strict=True)]
    print(f"{fault:<32} losses off by", " ".join(f"{gap:+.1e}" for gap in gaps))
    assert max(map(abs, gaps)) > 1e-6, f"{fault} was not found"

# %% [markdown]
# **Diagnose it.** Gradients not at home leave the first loss right. The others show at once: each rank believes that it has the beginning, ends of
# pieces learn a wrong token or none, or a `DistributedSampler` counted all ranks. So compare several losses with one process, in fp64.

# %% [markdown]
# ## Recap
#
# **Memory goes by the tokens on a GPU.** Up to 512k each of eight H100s can train on its own sequence (simulated). At 1M they share one. A
# step shared by eight is eight times shorter, at the same tokens a second (predicted). If all of a published run's shortfall is due to
# sharing, it is four times, at half. With hundreds of GPUs the batch forces sharing far earlier. Softmax adds up by log-sum-exps, so keys can
# go around a ring. Zigzag gives all ranks equal work.
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
# PyTorch's `context_parallel` (2.15, a prototype) shares causal `F.scaled_dot_product_attention` in zigzag. This script was run on CPU
# ranks only, with section 2's ring in place of CUDA's kernels.
#
# ```python
# # torchrun --nproc-per-node=8 train.py. You bring:
# # `model`, in fp32; beyond the positions of its training, with YaRN. It has `blocks` with a `feedforward`. Its attention is
# #     F.scaled_dot_product_attention(is_causal=True).
# #     `model(inputs, targets, positions)` gives the *sum* of its tokens' losses, by lesson 05's chunked loss.
# # `rows`, a dataset of S + 1 tokens each; `cp`, the number of GPUs that share a sequence; `folder`, for what is saved.
# # 2 * cp must divide S. Else PyTorch 2.15 lays tokens out in order, without a word, and the last GPU works longest.
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
# from torch.distributed.tensor.experimental import context_parallel
# from torch.distributed.tensor.experimental._attention import set_rotate_method
# from torch.nn.attention import SDPBackend, sdpa_kernel
# from torch.utils.checkpoint import checkpoint
# from torch.utils.data import DataLoader, DistributedSampler
#
# device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
# torch.cuda.set_device(device)
# dist.init_process_group("nccl")
# model.to(device)
# mesh = init_device_mesh(device.type, (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
# set_rotate_method("alltoall")  # keys around a ring; "allgather", the default, holds them all. Time both
# bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# shards = mesh["dp", "cp"]._flatten("shards")  # states are sharded over all GPUs
#
# def tiled(forward, hidden):  # an MLP, some tokens at a time. Leave it out where a step fits without
#     return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in hidden.split(8192, 1)], 1)
#
# for block in model.blocks:
#     block.feedforward.forward = partial(tiled, block.feedforward.forward)
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)
#     fully_shard(block, mesh=shards, mp_policy=bf16)
# fully_shard(model, mesh=shards, mp_policy=bf16)
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
#
# sampler = DistributedSampler(rows, mesh["dp"].size(), mesh["dp"].get_local_rank())  # GPUs that share a sequence read the same row
# for tokens in DataLoader(rows, batch_size=1, sampler=sampler):
#     inputs, targets = tokens[:, :-1].to(device, copy=True), tokens[:, 1:].to(device, copy=True)  # shifted before they are split
#     positions = torch.arange(inputs.shape[1], device=device)
#     count = (targets != -100).sum()
#     dist.all_reduce(count, group=mesh["dp"].get_group())  # the targets of all rows
#     with context_parallel(mesh["cp"], buffers=[inputs, targets, positions], buffer_seq_dims=[1, 1, 0]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
#         with save_on_cpu(pin_memory=True):  # blocks' inputs wait in host memory. Without this line they stay on the GPU
#             loss = model(inputs, targets, positions) / count.clamp(min=1)
#         (loss * dist.get_world_size()).backward()  # FSDP2 averages over the ranks, and we want their sum; Adam would hide it
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
# **Look at** the loss: it should be one process's, to bf16's rounding.
# With TRL, settings alone make such a run: [its example](https://github.com/huggingface/trl/tree/main/examples/sft_qwen3_8b_1m_context).
