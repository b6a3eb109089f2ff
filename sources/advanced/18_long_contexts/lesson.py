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
# **Promise.** You add softmax up in blocks, pass keys around a ring of four ranks, and get one process's gradients.
# At 128k tokens, chunked loss and checkpoints cut a 7B's peak from 935 GiB a GPU to 74, too much for its 80 GB. Eight GPUs
# that share the sequence need 23 each.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | two minutes on two CPU cores |
#
# ## A bet
#
# Four ranks hold a quarter of a sequence each, in order, and a token attends to all tokens before it. By how many percent is
# attention slower than if all ranks had equal work? Section 3 counts.

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
from utils.lessons.lesson_18.compare import apart, gathered, merged_error, sent_bytes
from utils.lessons.lesson_18.figures import draw_growth, draw_rounds
from utils.lessons.lesson_18.holders import draw_exchange, draw_holders
from utils.lessons.lesson_18.pieces import attend_piece, piece_gradients
from utils.lessons.lesson_18.published import LLAMA_3_FLOPS, nvidia_tflops, torchtitan_rows
from utils.lessons.lesson_18.records.growth import DRAWN, LINES, RANKS as GPUS, VERDICT, fits, is_the_same, recorded, ring_of
from utils.lessons.lesson_18.refusals import check_heads, check_length
from utils.lessons.lesson_18.rounds import pairs_of, round_ends
from utils.lessons.lesson_18.volumes import told_megabytes

# %% [markdown]
# ## 1. Where the bytes go
#
# Qwen2.5-7B trains on eight H100s with flash attention; FSDP2 shards its states. Each GPU has its own sequence; in the last line
# the eight share one. *Both* is chunked loss and checkpoints. Bands end 16% above what the caching allocator reserves: so far
# above its simulation a published run lies (section 5). New words: [glossary](../00_glossary.ipynb).

# %%
growth, held, room_bytes, ABOVE = recorded(), recorded("reserved_bytes"), simulated_device("H100").usable_bytes, 0.16
show(draw_growth({name: growth[name] for name in DRAWN}, held, room_bytes=room_bytes, above=ABOVE, told_at=131_072, device="a simulated H100-80GB",
                 title="Qwen2.5-7B on 8 GPUs: FSDP2, fp32 states, bf16, flash attention"),
     alt="Peaks over 8k to 1M tokens, doubling as tokens double. At 128k: plain 935 GiB, chunked loss and checkpoints 74.3, these offloaded 53.5, a ring of eight 23.0. With 16% on top of reserved bytes the second does not fit, the others do; at 1M none fits.")

# %% [markdown]
# **Read it.** Each line doubles with the tokens once it leaves what does not grow: states (10.6 GiB) and gathered weights. With
# flash attention **memory is linear, and only the work is quadratic**. The column of 128k again, with its parts above 2 GiB:

# %% jupyter={"source_hidden": true}
for name, how in LINES.items():
    if ring_of(name) > 1:  # section 5 has the rings
        continue
    found = of_one_rank("qwen2.5-7b", 131_072, *how)
    parts = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in found.breakdown.items() if size > 2**31)
    print(f"{name}: peak {found.peak_bytes / 2**30:.1f} GiB (simulated): {parts}")
    assert is_the_same(found.peak_bytes, growth[name][131_072]), "the picture shows another step than this one"
for name in ("both", "both, checkpoints offloaded"):
    print(f"{name}: {held[name][2**17] / 2**30:.1f} GiB reserved (simulated), the GPU has {room_bytes / 2**30:.1f}:", fits(held[name][2**17], room_bytes, ABOVE))
print(f"28 blocks' inputs: 28 x 131,072 x 3,584 x 2 bytes = {28 * 2**17 * 3584 * 2 / 2**30:.1f} GiB; three fp32 copies of the logits: 131,072 x 152,064 x 12 = {1.5 * 2**20 * 152_064 / 2**30:.1f}")

# %% [markdown]
# **Read it.** Without a chunked loss, three fp32 copies of the logits take 222.8 GiB. Without checkpoints
# ([05](../intermediate/05_checkpointing.ipynb)), all that 28 blocks keep stays. With both, the blocks' inputs are left, 24.5 GiB,
# and the inside of **one** block while it is recomputed, with its gradients, 34. The peak of 74.3 GiB seems to fit 78.4, but the
# allocator reserves 77.2, and 8% more does not fit. With the inputs on the host, even 32% more does.
#
# Twice the length fits neither way. Here the *tokens* are divided, and with them the work.
#
# ## 2. Attention in blocks, around a ring
#
# Flash attention never stores the quadratic matrix of scores. It reads keys block by block, and keeps for each query the largest
# score so far, the sum of exponentials, and the output. When a larger score comes, these sums are scaled down.

# %%
def attend_in_blocks(q, k, v, size):
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
# **Read it.** Twice the tokens take four times the memory at once, and twice in blocks. Autograd keeps each block's weights, which
# is quadratic again. Flash's backward computes them anew from outputs and log-sum-exps: its memory is linear, beside a fixed part.
#
# A block of keys can come from anywhere. Outputs $o_1, o_2$ and log-sum-exps $l_1, l_2$ of two blocks merge to
# $$l = \log(e^{l_1} + e^{l_2}), \quad o = e^{l_1 - l}\, o_1 + e^{l_2 - l}\, o_2.$$
# So each rank keeps its queries, and keys and values **go around a ring**. Four ranks hold two of eight *pieces* each. After four
# *rounds* every rank has met all keys:

# %%
show(draw_holders(), alt="Causal attention as squares of pieces. In order ranks compute 2, 6, 10 and 14 squares; in zigzag 8 each. Below, zigzag's keys move one rank to the right each round. At the bottom, the gradient of keys 0 and 7 visits ranks 0 to 3, collects a term on each, and moves once more, home to rank 0.")

# %% [markdown]
# **Read it.** From rank 0 zigzag's rank 1 gets keys 0 and 7: both its pieces see 0, neither sees 7. `seen` says this for any rank:

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
    works = [dist.isend(x.contiguous(), (rank + 1) % ranks), dist.irecv(new, (rank - 1) % ranks)]

    def arrived():
        for work in works:
            work.wait()
        return new
    return arrived
def merge(out, lse, part, its):
    both = torch.logaddexp(lse, its)
    old, new = ((x - both).exp()[..., None].to(out.dtype) for x in (lse, its))
    out.mul_(old).add_(part * new)
    lse.copy_(both)

# %%
def ring_forward(q, kv, zigzag, sums=torch.float32, piece=attend_piece):  # this CPU's flash kernel (`pieces.py`)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, sums))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for step in range(ranks):
        wait = pass_on(kv) if step < ranks - 1 else lambda: None  # on its way while this round is computed
        if todo := seen((rank - step) % ranks, q.shape[2], zigzag):
            rows, columns, triangle = todo
            merge(out[:, :, rows], lse[:, :, rows], *piece(q[:, :, rows], *kv[..., columns, :], triangle))
        kv = wait()
    return out.to(q.dtype), lse


# %% [markdown]
# Backward goes around **again**. Each rank kept its own tensors, and $o$ and $l$ of the *whole* sum. `piece_gradients`, the
# kernel's backward, computes the weights $P = e^{S - l}$ anew. Every rank has a term of the keys' gradient. So the gradient
# travels with its keys, and moves once more to be home. (On NCCL put both messages into `dist.batch_isend_irecv`.)

# %%
class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, zigzag, sums):
        out, lse = ring_forward(q, torch.stack((k, v)), zigzag, sums)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.zigzag, ctx.sums = zigzag, torch.promote_types(q.dtype, sums)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, kv = dist.get_rank(), dist.get_world_size(), torch.stack((k, v))
        to_q, to_kv, home = torch.zeros_like(q, dtype=ctx.sums), torch.zeros_like(kv, dtype=ctx.sums), lambda: to_kv
        for step in range(ranks):
            wait = pass_on(kv) if step < ranks - 1 else lambda: None
            if todo := seen((rank - step) % ranks, q.shape[2], ctx.zigzag):
                rows, columns, triangle = todo
                g, own, done, logs = (x[:, :, rows] for x in (gradient, q, out, lse))
                term, *others = piece_gradients(g, own, *kv[..., columns, :], done, logs, triangle)
                to_q[:, :, rows] += term
            to_kv = home()  # sent a round ago
            if todo:
                to_kv[..., columns, :] += torch.stack(others)
            kv, home = wait(), pass_on(to_kv)
        return to_q.to(q.dtype), *home().to(k.dtype), None, None


# %% [markdown]
# **How much is sent?** $A$ query heads and $K$ key-value heads have width $D$; each of $n$ ranks holds $s/n$ of $s$ tokens. Forward
# moves keys $n-1$ times; backward moves them $n-1$ times, and their gradients $n$ times:
# $(3n-2) \cdot 2\,\frac{s}{n} K D$ numbers a rank and layer.

# %%
RANKS, A, K, D, S = 4, 4, 2, 16, 64

def ring(zigzag, sums=torch.float32):
    return lambda q, k, v: RingAttention.apply(q, k, v, zigzag, sums)
for zigzag in (False, True):
    found = run_ranks(apart, RANKS, ring(zigzag), functools.partial(places, zigzag=zigzag), A, K, S, D)
    predicted = (3 * RANKS - 2) * 2 * S // RANKS * K * D * 8
    gap, sent = max(rank.gap for rank in found), {rank.put_in["send"] for rank in found}
    print(f"{'zigzag' if zigzag else 'in order':<8}: output and gradients {gap:.0e} from one process; a rank sends", *sent, f"bytes (counted), predicted {predicted}")
    assert gap < 1e-13 and sent == {predicted}, "fp64 rounds at 1e-16; every piece once, every gradient home"

# %% [markdown]
# **Read it.** Both layouts equal one process to fp64's rounding. A rank sends $3-2/n$ times all keys and values: $n$ hardly matters.
#
# Training is in bf16. Which type do the sums over rounds need?

# %%
move = 2 * 512 // RANKS * K * D  # keys and values of a rank: so many numbers
for name, sums, bytes_each in (("bf16", torch.bfloat16, 6 * RANKS - 4), ("fp32", torch.float32, 8 * RANKS - 4)):
    found = run_ranks(apart, RANKS, ring(True, sums), functools.partial(places, zigzag=True), A, K, 512, D, torch.bfloat16)
    errors = ", ".join(f"{merged_error(blocks, sums):.2%} after {blocks}" for blocks in (4, 16, 64))
    print(f"sums in {name}: outputs and gradients {max(rank.relative for rank in found):.2%} from fp64 (measured); a rank sends {found[0].put_in['send']:,} bytes (counted);\n"
          f"              one process's output, merged from blocks: {errors} (measured)")
    assert found[0].put_in["send"] == move * bytes_each, "keys move in bf16, gradients in the type of the sums"

# %% [markdown]
# **Read it.** In bf16 every merge rounds again, so errors grow with the blocks. In fp32 only the last rounding stays. Key gradients
# then travel in fp32, too: $8n-4$ bytes for each number of a rank's keys and values, in place of $6n-4$.
#
# ## 3. Who holds which token
#
# Do ranks work equally long? `seen` tells how many pairs of query and key a rank computes in each round. A round lasts as long as
# its busiest rank computes:

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
     alt="In order rank 0 works in the first round alone, and rank 3 in all four, until 14 squares. In zigzag all four ranks work in every round, and end at 8.")

# %% jupyter={"source_hidden": true}
for layout, ranks in counted.items():
    works = [sum(pairs) for pairs in ranks]
    longer = round_ends(ranks)[-1] * RANKS / sum(works) - 1
    by_rank = " ".join(f"{work / sum(works):.1%}" for work in works)
    print(f"{layout:<9}pairs by rank (counted): {by_rank}; {longer:.0%} longer than with equal work")
print("in order on more ranks (predicted):", *(f"{ranks} ranks {1 - 1 / ranks:.0%};" for ranks in (8, 16, 64)), f"your bet for four: {my_bet_percent}%")

# %% [markdown]
# **Read it.** In order, the last rank meets the keys of $n-1$ ranks whole and half of its own: $n - \frac12$ units of work, where
# $\frac n2$ would be even. The ring takes $1-\frac1n$ longer, 75% for four ranks. In **zigzag** all ranks work alike in every round.
#
# **Question.** Sixteen ranks, in order. How many percent of the ring's time is rank 0 at work?

# %%
rank_0_percent = ...
check("18.rank_0_percent", rank_0_percent)

# %% [markdown]
# ### Heads in place of tokens: Ulysses
#
# Attention's heads do not meet. So exchange: from all heads of *some* tokens to all tokens of *some* heads, attend with any
# kernel, and exchange back. Each all-to-all is its own backward, dimensions swapped:

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
# A third way gathers keys and values on each rank, as Llama 3 does, and scatters their gradients
# ([14](14_three_dimensions.ipynb)'s `utils/parallel/context.py`). In numbers of $\frac{s}{n} D$ that a rank sends, forward and backward:
#
# | way | sends | holds beside its own | limit |
# |---|---|---|---|
# | ring | $(3n-2) \cdot 2K$ | keys that pass, with gradients | $2n$ divides the length |
# | gathered | $2(n-1) \cdot 2K$ | all keys | their bytes |
# | Ulysses | $\frac{n-1}{n} \cdot 2\,(2A + 2\max(K, n))$ | all tokens of its heads | heads divide |

# %%
n, unit = RANKS, S // RANKS * D * 8
WAYS = {"ring": (ring(True), True, (3 * n - 2) * 2 * K), "gathered": (gathered, True, 2 * (n - 1) * 2 * K),
        "Ulysses": (ulysses, False, (n - 1) / n * 2 * (2 * A + 2 * max(K, n)))}
for name, (way, zigzag, numbers) in WAYS.items():  # Ulysses in order: its joined rows are to rise, for `is_causal`
    found = run_ranks(apart, RANKS, way, functools.partial(places, zigzag=zigzag), A, K, S, D)[0]
    sent = sent_bytes(found.put_in, RANKS)
    print(f"{name:<9} {found.gap:.0e} from one process; a rank sends {sent:,.0f} bytes (counted), predicted {numbers * unit:,.0f}")
    assert found.gap < 1e-13 and sent == numbers * unit, f"{name} sends something else than its formula"

# %% [markdown]
# **Read it.** A ring sends about as much on any number of ranks. Ulysses' part for queries falls with $n$, and for keys until $n$
# reaches $K$. Gathering sends less than a ring, but a ring never holds all keys. With checkpoints, the forward ring runs twice. Real models, in bf16 with fp32 gradients around the ring:

# %% jupyter={"source_hidden": true}
print("MB that one of n ranks sends for a layer, 131,072 tokens, forward and backward (predicted):")
print(*(told_megabytes(name, n, 131_072) for name, n in (("llama-3-8b", 8), ("qwen2.5-7b", 8), ("llama-3-70b", 64))), sep="\n")

# %% [markdown]
# **Question.** Qwen2.5-7B has 28 query heads and 4 key-value heads. Over how many of a node's eight GPUs, at most, can
# this page's `ulysses` share one of its sequences?

# %%
most_ranks = ...
check("18.most_ranks", most_ranks)

# %% [markdown]
# ## 4. A model, and packed documents
#
# All other layers look at one token at a time. So a model needs three things beside the attention: this rank's tokens, *their
# positions*, and targets that were shifted **before** they were split. The loss is a sum, divided once by all ranks' targets.

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
# A long row is mostly several documents. They are **packed**: a token sees its own document's, a document's last token has no
# target, positions restart. Ulysses takes the mask as it is, since a rank has all tokens.

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


# %%
one_by_one = torch.cat([fresh()(row[:, document == d])[0] for d in range(3)])
wanted = F.cross_entropy(one_by_one, targets[0], reduction="none").detach()
for name, changed in {"packed": (), "positions go on": (own_document, torch.arange(S)), "... from 131,008": (own_document, torch.arange(S) + 131_008),
                      "no mask": (torch.ones(S, S).tril().bool(),)}.items():
    gap = (torch.cat(run_ranks(packed_losses, RANKS, *changed)) - wanted).abs().max().item()
    print(f"{name:<16} losses of tokens up to {gap:.0e} from those of each document alone")
    assert (gap > 0.1) == (name == "no mask"), "one document leaks into another, or positions do not restart"
counts = learned.view(RANKS, -1).sum(1).tolist()
print("targets by rank:", *counts, f" in a mean of the ranks' means one on rank 0 counts {counts[-1] / counts[0]:.2f} times one on rank 3")

# %% [markdown]
# **Read it.** Without the mask, documents leak. Rotary positions count *distances*, and the mask cuts those between documents, so
# positions may go on. But fp32 rounds the angles, and more at large positions: restart them. Ranks hold unequal numbers of
# targets: divide by the count of **all**. Around a ring the mask makes work uneven anew: the lab's exercise 3.
#
# ## 5. 7B at 128k, and longer
#
# Eight ranks share one sequence of 131,072 tokens by section 2's ring, and the states.

# %%
ours = of_one_rank("qwen2.5-7b", 131_072 // GPUS, "chunked loss", "checkpointing", attend=ring(True))
print(f"peak {ours.peak_bytes / 2**30:.1f} GiB (simulated):", ", ".join(
    f"{kind} {size / 2**30:.2f}" for kind, size in sorted(ours.breakdown.items(), key=lambda part: -part[1]) if size > 2**25))
moves = [row for row in ours.traffic if row.collective == "send"]  # in bf16, and in fp32
calls, sent = sum(row.calls for row in moves), sum(row.payload_bytes for row in moves)
print(f"{calls} moves, {sent / 1e9:.1f} GB sent around the ring (simulated), {sent / 28e6:,.0f} MB a layer")
assert sent == 28 * (4 * (GPUS - 1) + 2 * (GPUS - 1) + 4 * GPUS) * 2 * 131_072 // GPUS * 4 * 128, "28 layers, forward twice: keys in bf16, gradients in fp32"
assert is_the_same(ours.peak_bytes, growth["both, over a ring of 8"][131_072]), "the picture shows another ring than this one"
score("18", ours)  # a row of your scoreboard

# %% [markdown]
# **Read it.** An eighth of the blocks' inputs and of the recomputed block is left; states and gathered weights stay.
#
# What do real rings reach? torchtitan trained Llama 3.1 8B with **linear layers in fp8**, and attention in bf16. A token costs
# four forwards in linear layers, and 4.5 in attention: forward twice, and 2.5 for flash's backward, which makes five matrix products
# where forward makes two.

# %% jupyter={"source_hidden": true}
theirs, rows, shape = of_one_rank("llama-3-8b", 32_768, "checkpointing"), torchtitan_rows(), model_shape("llama-3-8b")
held_gib = theirs.reserved_bytes / 2**30
print(f"Llama 3.1 8B, 32,768 tokens, whole loss, bf16: {held_gib:.1f} GiB reserved (simulated); torchtitan's first row {rows[0].reserved_gib / held_gib - 1:.0%} above")
def token_cost(length, fp8_gain):
    linear, attention = token_flop(shape, length)
    return 4 * linear / fp8_gain + 4.5 * attention
for row in rows:
    slower, predicted = rows[0].tokens_per_second / row.tokens_per_second, [token_cost(row.length, gain) / token_cost(rows[0].length, gain) for gain in (1, 2)]
    print(f"{row}: {slower:.2f} times the first row's time a token; predicted {predicted[0]:.2f} to {predicted[1]:.2f}")
    left = slower / predicted[1], slower / predicted[0]  # of the last row, kept for the verdict
print(f"fp8 makes linear layers once to twice as fast; left at CP 8: a factor of {left[0]:.1f} to {left[1]:.1f}")
print("NVIDIA, Llama 2 7B, fp8, 32,768 tokens a rank (published):", ", ".join(f"CP {cp} {rate} TFLOP/s" for cp, rate in nvidia_tflops().items()))

# %% [markdown]
# **Read it.** Tokens **a rank** decide the memory: 84 GiB at 32k and at 262k. The 16% is this one run's. A token takes
# seven times as long at CP 8; arithmetic leaves a factor of 1.4 to 1.9. Messages hardly explain it: the eight GPUs share NVLink,
# where they take a small part of attention's time (below). The cause is unknown. NVIDIA's rate stays level from 128k to 1M
# tokens, with TP 4 or 8 beside CP.
#
# **When do they hide?** With $c = s/n$ tokens a rank, a zigzag round takes $2ADc^2$ FLOP forward and $5ADc^2$ backward. It moves
# $4KDc$ bytes of keys, and backward $8KDc$ of fp32 gradients besides. At $F$ FLOP/s and $B$ bytes/s all hides if
# $c \ge 2.4\,\frac KA \frac FB$. Llama 3 405B reached 380 TFLOP/s at 131,072 tokens (published, bf16).

# %%
def seconds(shape, kv_heads, flops, bandwidth, s=131_072, n=GPUS):
    (linear, attention), c, width = token_flop(shape, s), s // n, shape.head_dim
    forward, message = 2 * shape.heads * width * c**2 / flops, 4 * kv_heads * width * c / bandwidth
    late = 2 * (n - 1) * max(0, message - forward) + (n - 1) * max(0, 3 * message - 2.5 * forward)
    late += 2 * message * (n > 1)  # the last move, home, hides behind nothing
    return (4 * linear + 4.5 * attention) * c / flops + shape.layers * late

# %%
qwen = model_shape("qwen2.5-7b")
for kv_heads, where in ((4, "NVLink 4"), (4, "InfiniBand NDR"), (28, "NVLink 4"), (28, "InfiniBand NDR")):
    bandwidth, rates = link(where).sustained_bytes_per_second, (LLAMA_3_FLOPS / 2, LLAMA_3_FLOPS, 2 * LLAMA_3_FLOPS)
    least, steps = 2.4 * kv_heads / 28 * LLAMA_3_FLOPS / bandwidth, [seconds(qwen, kv_heads, rate, bandwidth) for rate in rates]
    print(f"{where:<15} {bandwidth / 1e9:>3.0f} GB/s, {kv_heads:>2} key heads: hides from {least:>6,.0f} tokens a rank (of 16,384);",
          "a step at 190, 380, 760 TFLOP/s:", *(f"{step:.2f}" for step in steps), "s (predicted)")

# %% [markdown]
# **Read it.** 351 tokens a rank are enough in a node, and 2,714 across nodes: 16,384 hide nearly all. With key heads copied to 28
# (`repeat_kv`), 19,000 are needed across nodes, and the step grows. The verdict, and longer:

# %% jupyter={"source_hidden": true}
print(f"Qwen2.5-7B: GiB reserved (simulated), the H100 has {room_bytes / 2**30:.1f}; at 380 TFLOP/s without states' gathers (predicted); a ring of 16 over InfiniBand")
for line, tokens in VERDICT:
    size, ring_ranks = held[line][tokens], ring_of(line)
    where = link("NVLink 4" if ring_ranks <= 8 else "InfiniBand NDR").sustained_bytes_per_second
    step = seconds(qwen, 4, LLAMA_3_FLOPS, where, tokens, ring_ranks)
    rate = tokens / ring_ranks / step
    slowed = f" ({rate / left[1]:,.0f} to {rate / left[0]:,.0f} if slowed as torchtitan's)" * (ring_ranks > 1)
    print(f"{tokens // 1024:>5}k {line:<34}{size / 2**30:>6.1f}: {fits(size, room_bytes, ABOVE)}; a step {step:,.0f} s, {rate:,.0f} tokens/s a GPU{slowed}")

# %% [markdown]
# **Read it.** At 128k you need no ring: with checkpoints on the host, each GPU trains on its own sequence. A ring buys memory and
# small steps (accumulate eight for the same batch). Beyond, a ring fits: 512k on eight GPUs, and 1M with checkpoints on the host
# or on 16 GPUs. At best it costs no speed; slowed as torchtitan's run, up to half.
#
# ## Break it, diagnose it
#
# The model of section 4 around the ring, with one thing wrong each time. Which first losses are right?

# %%
class NotHome(RingAttention):
    @staticmethod
    def backward(ctx, gradient):  # the last move is forgotten: n - 1 more are one back
        to_q, *to_kv, _, _ = RingAttention.backward(ctx, gradient)
        for _ in range(RANKS - 1):
            to_kv = [pass_on(x)() for x in to_kv]
        return to_q, *to_kv, None, None


for fault in ("positions that restart", "targets shifted after the split", "gradients not at home", "rows that differ by rank"):
    way = ring(True) if "home" not in fault else lambda q, k, v: NotHome.apply(q, k, v, True, torch.float32)
    losses = run_ranks(train, RANKS, way, True, fault)[0]
    gaps = [b / a - 1 for a, b in zip(one_process, losses, strict=True)]
    of_left = f"; the first, over the 60 targets left, {losses[0] / one_process[0] * 64 / 60 - 1:+.1e}" * ("shifted" in fault)
    print(f"{fault:<32} losses off by", " ".join(f"{gap:+.1e}" for gap in gaps) + of_left)
    assert max(map(abs, gaps)) > 1e-6, f"{fault} was not found"

# %% [markdown]
# **Diagnose it.** With restarting positions each rank believes that it has the beginning. Shifted after the split, four of 64
# targets are gone and three are another piece's first token; over the 60 left the loss is off by 1%. (transformers shifts `labels`
# itself: give it `shift_labels`.) Gradients not at home leave the first loss right. A `DistributedSampler` over all ranks gives
# each its own row. So compare several losses with one process, in fp64, at a small size; and gather what ranks hold: each position
# once, of one row.

# %% [markdown]
# ## Recap
#
# - Softmax adds up by log-sum-exps, in fp32: keys may come from anywhere. Zigzag evens out a ring's work.
# - Positions and shifted targets are split with the tokens; the loss is divided by all targets.
#
# Do the [lab](../../labs/advanced/18_long_contexts.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/18_long_contexts.ipynb).
#
# **References.** [Ring Attention](https://arxiv.org/abs/2310.01889), [DeepSpeed-Ulysses](https://arxiv.org/abs/2309.14509),
# [Llama 3](https://arxiv.org/abs/2407.21783), [ALST](https://arxiv.org/abs/2506.13996) (500k tokens on one GPU),
# [torchtitan's table](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md),
# [NVIDIA's](https://docs.nvidia.com/nemo-framework/user-guide/24.12/nemotoolkit/performance/performance_long_sequence.html).

# %% [markdown]
# ## On Monday
#
# PyTorch's `context_parallel` (2.15, a prototype) shares causal `F.scaled_dot_product_attention` in zigzag. For documents' masks take
# FlexAttention, the last block. Kernels are CUDA's alone: on CPU ranks section 2's ring and a dense mask stood in.
#
# ```python
# # torchrun --nproc-per-node=8 train.py. Before: `model.blocks` on `device`; `model(inputs, targets, positions)` gives the *sum* of its tokens'
# # losses, with F.scaled_dot_product_attention(is_causal=True) inside and lesson 05's chunked loss; `rows`, a dataset of S + 1 tokens each;
# # `cp` GPUs share a sequence, 2 * cp divides S; `folder` for what is saved.
# from functools import partial
#
# import torch
# import torch.distributed as dist
# import torch.distributed.checkpoint as dcp
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
# from torch.distributed.tensor.experimental import context_parallel
# from torch.distributed.tensor.experimental._attention import set_rotate_method
# from torch.nn.attention import SDPBackend, sdpa_kernel
# from torch.utils.checkpoint import checkpoint
# from torch.utils.data import DataLoader, DistributedSampler
#
# mesh = init_device_mesh(device.type, (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
# set_rotate_method("alltoall")  # keys around a ring; "allgather", the default, holds them all. Time both
# bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# shards = mesh["dp", "cp"]._flatten("shards")  # states are sharded over all GPUs
# for block in model.blocks:
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
#         loss = model(inputs, targets, positions) / count.clamp(min=1)
#         (loss * dist.get_world_size()).backward()  # FSDP2 averages over the ranks, and we want their sum; Adam would hide it
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over the shards of all GPUs
#     optimizer.step()
#     optimizer.zero_grad()
#     dist.all_reduce(total := loss.detach().clone())
#     print(f"loss {total.item():.4f}")
#
# weights, moments = get_state_dict(model, optimizer)
# states = {"model": weights, "optimizer": moments}
# dcp.save(states, checkpoint_id=folder)
# dcp.load(states, checkpoint_id=folder)  # on any number of GPUs
# set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
# ```
#
# **Look at** the loss: it is one process's, to bf16's rounding. For a close comparison take fp32 (no
# `mp_policy`), copied key heads and `SDPBackend.EFFICIENT_ATTENTION`. In a profiler's trace, NCCL's kernels lie *beside*
# attention's if messages hide, and between them if not. For positions beyond 32,768, Qwen2.5-7B-Instruct's card sets YaRN (published). Not run
# here: Megatron's `--context-parallel-size 8 --cp-comm-type p2p` (a ring) or `a2a` (Ulysses). Packed documents, on one GPU:
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
# **Look at** `batch["position_ids"]`: from them transformers (5.23) makes the mask of SDPA and eager, but not where there is a cache
# or an `attention_mask`. The loss is each document's alone, equal for each token. Packed **and** shared, keys gathered:
#
# ```python
# # In the model's attention. q, k, v (1, heads, S / cp, D) of this GPU's tokens; `own` are their places in the row, in any layout;
# # `document` (S,) numbers each token's document. Once, of torch.nn.attention.flex_attention:
# # flex, block_mask = torch.compile(flex_attention), torch.compile(create_block_mask)
# from torch.distributed.tensor import DTensor, Partial, Shard
#
# def gathered(x, dim):  # from all GPUs, in their order; its gradient is summed over them, and split again
#     return DTensor.from_local(x, mesh["cp"], [Shard(dim)]).full_tensor(grad_placements=[Partial()])
#
# order = gathered(own, 0)
#
# def seen(batch, head, query, key):
#     query, key = own[query], order[key]
#     return (key <= query) & (document[key] == document[query])
#
# mask = block_mask(seen, None, None, len(own), len(order), device=q.device)  # once a row: all layers share it
# out = flex(q, gathered(k, 2), gathered(v, 2), block_mask=mask, enable_gqa=True)
# ```
