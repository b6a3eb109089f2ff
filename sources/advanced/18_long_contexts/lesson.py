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
# Chunked loss and checkpoints take a 7B's 128k tokens from 935 GiB a GPU to 74; eight GPUs on one sequence, to 23.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | two minutes on two CPU cores |
#
# ## A bet
#
# Four ranks hold a quarter of a sequence each, in order. A token looks at all before it. By how many percent is attention slower
# than if every rank had equal work? Section 3 measures.

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
from utils.lessons.lesson_18.library import pytorch_ring, pytorch_sent_bytes
from utils.lessons.lesson_18.pieces import attend_piece, piece_gradients
from utils.lessons.lesson_18.published import torchtitan_rows
from utils.lessons.lesson_18.records.growth import LINES, RANKS as GPUS, is_the_same, recorded
from utils.lessons.lesson_18.refusals import check_heads, check_length
from utils.lessons.lesson_18.timed import slowed

# %% [markdown]
# ## 1. Where the bytes go
#
# Qwen2.5-7B on eight H100s: states sharded (FSDP2, fp32 states, bf16 compute), flash attention, one sequence a GPU; in the last
# line the eight share one. Simulated beforehand (`records/growth.py`). Bands reach 16% up: so far above its simulation a
# published run lies (section 5). New words: [glossary](../00_glossary.ipynb).

# %%
growth, room_bytes, ABOVE = recorded(), simulated_device("H100").usable_bytes, 0.16
show(draw_growth(growth, room_bytes=room_bytes, above=ABOVE, told_at=131_072, device="a simulated H100-80GB",
                 title="Qwen2.5-7B on 8 GPUs: FSDP2, fp32 states, bf16, flash attention"),
     alt="Peaks over 8k to 1M tokens, doubling as tokens double. At 128k: plain 935 GiB, chunked loss and checkpoints 74.3, a ring of eight 23.0. With 16% on top the second no longer fits, the ring does; at 1M it does not.")

# %% [markdown]
# **Read it.** A line doubles with the tokens, once it leaves what does not grow (states, 10.6 GiB, and gathered weights): with flash
# attention **nothing is quadratic but the work**. The column of 128k, simulated again, parts above 2 GiB:

# %% jupyter={"source_hidden": true}
for name, how in LINES.items():
    if "ring" in name:  # section 5 has the ring
        continue
    found = of_one_rank("qwen2.5-7b", 131_072, *how)
    parts = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in found.breakdown.items() if size > 2**31)
    host = f", and {found.host_bytes / 2**30:.1f} on the host" * (found.host_bytes > 0)
    print(f"{name:<28}{found.peak_bytes / 2**30:>6.1f} GiB (simulated; {ABOVE:.0%} above: {(1 + ABOVE) * found.peak_bytes / 2**30:,.0f}){host}: {parts}")
    assert is_the_same(found.peak_bytes, growth[name][131_072]), "the picture shows another step than this one"
print(f"inputs of 28 blocks: 28 x 131,072 x 3,584 x 2 bytes = {28 * 131_072 * 3584 * 2 / 2**30:.1f} GiB (an eighth {28 * 2**14 * 3584 * 2 / 2**30:.2f}); "
      f"the head in bf16 {152_064 * 3584 * 2 / 2**30:.2f}; the GPU {room_bytes / 2**30:.1f}")

# %% [markdown]
# **Read it.** Without a chunked loss logits of 152,064 words stay, and their gradients; without checkpoints
# ([05](../intermediate/05_checkpointing.ipynb)) what 28 blocks keep. Both leave the blocks' inputs, 24.5 GiB, and **one** block's inside with
# its gradients, 34. Do not count on 74.3 of 78.4 GiB: 86 do not fit. With the inputs on the host 62 do.
#
# Twice the length fits neither way. Alone a GPU can go on: ALST tiles the MLP, too, and keeps checkpoints on the host: Llama-8B
# on 500k tokens (published). Here the *tokens* are divided, and their work.
#
# ## 2. Attention in blocks, around a ring
#
# What would be quadratic? A matrix of scores. Flash attention reads keys block by block and keeps, for each query, the largest
# score so far, the sum of exponentials, and an output, which fade as a larger score comes.

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
    for length in (512, 1024, 2048):
        qkv = torch.randn(3, 1, 2, length, 32).requires_grad_(learns)
        found = measure(lambda: way(*qkv).sum().backward() if learns else way(*qkv), model=torch.nn.Linear(1, 1), name=name, timed_steps=0)
        peaks.append(found.peak_bytes / 2**20)  # no model: any
    gap = (way(*qkv) - flash(*qkv)).abs().max().item()
    print(f"{name:<36}", *(f"{size:6.2f}" for size in peaks), f"MiB (measured) at 512, 1,024, 2,048 tokens; {gap:.0e} from PyTorch's")
    assert gap < 1e-5, f"{name}: fp32 rounds at 1e-7, sums of 2,048 terms a little above"

# %% [markdown]
# **Read it.** Twice the tokens: four times the matrix of scores, twice the blocks. Autograd keeps each
# block's weights: quadratic again. Flash's backward computes them anew, from outputs and log-sum-exps: linear.
#
# And a block can come from anywhere. Outputs $o_1, o_2$ and log-sum-exps $l_1, l_2$ of two make
# $$l = \log(e^{l_1} + e^{l_2}), \quad o = e^{l_1 - l}\, o_1 + e^{l_2 - l}\, o_2.$$
# So each rank keeps its queries, and keys and values **go around a ring**. Four ranks hold two of eight *pieces* each; four *rounds* show each all keys:

# %%
show(draw_holders(), alt="Causal attention as squares of pieces. In order ranks compute 2, 6, 10 and 14 squares; in zigzag 8 each. Below, zigzag's keys move one rank to the right each round.")

# %% [markdown]
# **Read it.** Follow zigzag's rank 1. Its pieces are 1 and 6. From rank 0 come 0 and 7: both its pieces see all of 0, none sees 7. From
# rank 2 come 2 and 5: piece 6 sees both, piece 1 neither. `seen` says this for any rank:

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
def pass_on(x):  # to the next rank, from the one before; call what it returns, to have what came
    rank, ranks, new = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    works = [dist.isend(x.contiguous(), (rank + 1) % ranks), dist.irecv(new, (rank - 1) % ranks)]
    return lambda: [work.wait() for work in works] and new


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
# Backward goes around **again**: kept are this rank's own tensors, $o$ and $l$ of the *whole* sum. `piece_gradients`, the kernel's
# backward, computes weights $P = e^{S - l}$ anew, and gradients of scores $P \circ (dO\,V^T - \mathrm{rowsum}(dO \circ O))$. A
# gradient of keys gets terms on other ranks, so it travels with them, and one move further: home. (On NCCL put both messages into
# `dist.batch_isend_irecv`.)

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
# **Predict.** $A$ query heads and $K$ key-value heads have width $D$; of $s$ tokens a rank holds $s/n$. Forward makes $n-1$ moves,
# backward $n-1$ of them and $n$ of their gradients: $(3n-2) \cdot 2\,\frac{s}{n} K D$ numbers a rank and layer.

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
# **Read it.** Equal to fp64's rounding, both ways. The number of ranks hardly matters: each sends $3-2/n$ times all keys and values.
#
# Training is in bf16. In which type do sums over rounds stand? Ours in either, and **PyTorch's own** ring
# (`context_parallel`'s Python around this CPU's kernel, `library.py`) by both its methods:

# %%
for name, way in {"sums in bf16": ring(True, torch.bfloat16), "sums in fp32": ring(True),
                  "PyTorch's, alltoall": pytorch_ring("alltoall"), "PyTorch's, allgather": pytorch_ring("allgather")}.items():
    found = run_ranks(apart, RANKS, way, functools.partial(places, zigzag=True), K, K, 512, D, torch.bfloat16)
    sent = found[0].put_in.get("send") or pytorch_sent_bytes(found[0].put_in, RANKS)
    unit = 2 * 512 // RANKS * K * D  # numbers of a move
    print(f"{name:<21} error {max(rank.relative for rank in found):.2%} (measured); a rank sends {sent:,} bytes (counted): {sent / unit:.0f} a number of a move")
    assert sent == unit * (6 * RANKS - 4 if "bf16" in name else 8 * RANKS - 4), "n moves of gradients in another type"
print("output of n parts on one process, sums in bf16 and fp32:", *(f"n {n}: {merged_error(n, torch.bfloat16):.2%} and {merged_error(n, torch.float32):.2%};" for n in (4, 16, 64)))

# %% [markdown]
# **Read it.** In bf16 each merge rounds again: errors grow with the parts. In fp32 one rounding stays. PyTorch's `allgather` gathers keys;
# their gradients go around all the same, in fp32: $8n-4$ bytes for each of a move's numbers, by either method, where bf16 takes $6n-4$.
#
# ## 3. Who holds which token
#
# Both layouts give the same sums and send the same bytes. Do they take the same **time**? Here each round sleeps, 200 ms
# for a rank's queries against as many keys, less for fewer pairs: by construction the busiest takes 0.7 s or 0.4, and the picture
# shows who waits. (Who sleeps needs no core.)

# %%
def around(zigzag):
    rounds = zip(*run_ranks(slowed, RANKS, ring_forward, zigzag, 512, 0.2), strict=True)
    return min(rounds, key=lambda ranks: max(spans[-1].end for spans in ranks))


timed = {"in order": around(False), "zigzag": around(True)}
show(draw_rounds(timed, title="A ring of four, forward, 512 tokens: rounds that sleep",
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
# **Read it.** In order rank $r$ meets $r$ ranks' keys whole and half of its own: the last 3.5 of 8, where 2 would be even. That is $1-1/n$, 75%,
# longer. In **zigzag** each rank has half a square a round. Backward has the same rounds.
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
# | ring | $(3n-2) \cdot 2K$ | keys that pass, with gradients | none |
# | gathered | $2(n-1) \cdot 2K$; $3(n-1) \cdot 2K$ if gathered again backward | all keys | their bytes |
# | Ulysses | $\frac{n-1}{n} \cdot 2\,(2A + 2\max(K, n))$ | the exchanged | heads, here in equal shares |

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
# **Read it.** A ring's bytes do not fall as ranks are added, Ulysses' do. Llama 3's gathering sends less than a ring; a ring never
# holds all keys. At size, in bf16, PyTorch's with fp32 gradients; beside them tensor and sequence parallelism
# ([12](12_tensor_parallel.ipynb)), $8(n-1)A$:

# %% jupyter={"source_hidden": true}
print("MB that one of n ranks sends for a layer, 131,072 tokens, forward and backward (predicted):")
for name, n in (("llama-2-7b", 8), ("llama-3-8b", 8), ("qwen2.5-7b", 8), ("llama-3-70b", 64)):
    shape = model_shape(name)
    heads, kv, size = shape.heads, shape.key_value_heads, 131_072 / n * shape.head_dim * 2 / 1e6
    by_heads = f"{(n - 1) / n * 4 * (heads + max(kv, n)) * size:,.0f}" if heads % n == 0 else f"{n} does not divide {heads}"
    print(f"{name:<12} n {n:>2}, A {heads}, K {kv:>2}: ring {(3 * n - 2) * 2 * kv * size:>6,.0f}, PyTorch's {(4 * n - 2) * 2 * kv * size:>6,.0f},",
          f"gathered {4 * (n - 1) * kv * size:>6,.0f}, Ulysses {by_heads}, tensor and sequence parallel {8 * (n - 1) * heads * size:,.0f}")

# %% [markdown]
# **Question.** Qwen2.5-7B has 28 query heads and 4 key-value heads. Over how many of a node's eight GPUs, at most, can
# this page's `ulysses` share one of its sequences? (It wants equal shares; DeepSpeed's does not.)

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
# A long row is mostly several documents. They are **packed**: a token sees its own document's, a document's last token has
# no target, positions restart. Ulysses takes the mask as it is, since a rank has all tokens. (A dense mask of 128k is 16 GiB: take
# FlexAttention there.)

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
counts = learned.view(RANKS, -1).sum(1).tolist()
print("targets by rank:", *counts, f" in a mean of the ranks' means one on rank 0 counts {counts[-1] / counts[0]:.2f} times one on rank 3")

# %% [markdown]
# **Read it.** Without the mask documents leak. Positions that go on change no more than the fp32 angles' rounding: rotary
# positions count *distances*, and the mask cuts those between documents. (transformers makes the mask *from* restarting
# positions.) Ranks hold unequal numbers of targets: divide by the count of **all**.
# Around a ring the mask makes work uneven anew: the lab's exercise 3.
#
# ## 5. 7B at 128k, and the others
#
# Back to the picture's lowest line: eight ranks share one sequence of 131,072 tokens by section 2's ring, and the states.

# %%
ours = of_one_rank("qwen2.5-7b", 131_072 // GPUS, "chunked loss", "checkpointing", attend=ring(True))
print(f"peak {ours.peak_bytes / 2**30:.1f} GiB (simulated):", ", ".join(
    f"{kind} {size / 2**30:.2f}" for kind, size in sorted(ours.breakdown.items(), key=lambda part: -part[1]) if size > 2**25))
moves = [row for row in ours.traffic if row.collective == "send"]  # in bf16, and in fp32
calls, sent = sum(row.calls for row in moves), sum(row.payload_bytes for row in moves)
print(f"{calls} moves, {sent / 1e9:.1f} GB sent around the ring (simulated)")
assert sent == 28 * (4 * (GPUS - 1) + 2 * (GPUS - 1) + 4 * GPUS) * 2 * 131_072 // GPUS * 4 * 128, "28 layers, forward twice: keys in bf16, gradients in fp32"
assert is_the_same(ours.peak_bytes, growth["both, over a ring of 8"][131_072]), "the picture shows another ring than this one"
score("18", ours)

# %% [markdown]
# **Read it.** The blocks' inputs fall to an eighth, 3.06 GiB, and the recomputed block. What does not depend on tokens stays: states, gathered
# weights, and of the activations the head in bf16, 1.02. Beside it Llama 3.1 8B as torchtitan published it:

# %% jupyter={"source_hidden": true}
theirs = of_one_rank("llama-3-8b", 32_768, "checkpointing")
rows = torchtitan_rows()
print(f"Llama 3.1 8B, 32,768 tokens, whole loss, bf16: {theirs.reserved_bytes / 2**30:.1f} GiB reserved (simulated), the first row "
      f"{rows[0].reserved_gib / (theirs.reserved_bytes / 2**30) - 1:.0%} above")
print(*rows, sep="\n")
print("GFLOP of a token's forward (predicted):", *(f"{n:,} tokens {token_flop(model_shape('llama-3-8b'), n) / 1e9:.0f}" for n in (32_768, 262_144)))

# %% [markdown]
# **Read it.** Tokens **a rank** decide: 84 GiB at 32k and at 262k (H100s of 96 GB; compiled, in 8 bits, unlike
# our simulation). What memory no longer feels is the work: tokens per second fall to a seventh. Half of that is arithmetic: a token's
# forward through $P$ weights and $L$ layers of size $h$ takes $2P + 2shL$. The rest is unexplained.
#
# **When do messages hide?** With $c = s/n$ tokens a rank, backward's round in zigzag takes $4ADc^2$ FLOP, twice forward's, and
# moves $4KDc$ bytes of keys and $8KDc$ of fp32 gradients. At $F$ FLOP/s and $B$ bytes/s it hides if $c \ge 3\,\frac KA \frac FB$.
# Llama 3 reached 400 TFLOP/s (published); links at what NCCL sustains.

# %%
def seconds(shape, kv_heads, flops, bandwidth, s=131_072, n=GPUS):
    c, width = s // n, shape.head_dim
    forward, message = 2 * shape.heads * width * c**2 / flops, 4 * kv_heads * width * c / bandwidth
    late = 2 * (n - 1) * max(0, message - forward) + (n - 1) * max(0, 3 * message - 2 * forward) + 2 * message  # the last move home
    return 4 * token_flop(shape, s) * c / flops + shape.layers * late  # forward twice, backward as two

qwen = model_shape("qwen2.5-7b")
for kv_heads, where in ((4, "NVLink 4"), (4, "InfiniBand NDR"), (28, "NVLink 4"), (28, "InfiniBand NDR")):
    bandwidth, rates = link(where).sustained_bytes_per_second, (200e12, 400e12, 800e12)
    least, steps = 3 * kv_heads / 28 * 400e12 / bandwidth, [seconds(qwen, kv_heads, rate, bandwidth) for rate in rates]
    print(f"{where:<15} {bandwidth / 1e9:>3.0f} GB/s, {kv_heads:>2} key heads: hidden from {least:>6,.0f} tokens a rank (400 TFLOP/s), here 16,384;",
          "a step at 200, 400, 800 TFLOP/s:", *(f"{step:.2f}" for step in steps), "s (predicted)")

# %% [markdown]
# **Read it.** 462 tokens a rank are enough in a node, 3,571 across nodes: 16,384 hide nearly all, at any of three $F$. Key heads copied to
# 28 (`repeat_kv`) need 25,000 across nodes, and the step grows from 6.67 s to 7.93. The verdict:

# %% jupyter={"source_hidden": true}
alone = 4 * token_flop(qwen, 131_072) * 131_072 / 400e12
print("Qwen2.5-7B, 8 H100, 128k tokens: peaks simulated, seconds predicted (400 TFLOP/s, NVLink 4; states' gathers left out)")
for name, sequences, step in (("both", 8, alone), ("both, checkpoints offloaded", 8, alone),
                              ("both, over a ring of 8", 1, seconds(qwen, 4, 400e12, link("NVLink 4").sustained_bytes_per_second))):
    peak, fits = growth[name][131_072], (1 + ABOVE) * growth[name][131_072] < room_bytes
    print(f"{name:<28} {peak / 2**30:>5.1f} GiB, {ABOVE:.0%} above {(1 + ABOVE) * peak / 2**30:>3.0f}: {'fits' if fits else 'does not'};",
          f"{sequences} at a time in {step:>4.1f} s, {sequences * 131_072 / step / 8:,.0f} tokens/s a GPU")

# %% [markdown]
# **Read it.** A ring buys memory and small steps, no speed: as many tokens a second.
#
# | take | when | costs |
# |---|---|---|
# | chunked loss, checkpoints ([05](../intermediate/05_checkpointing.ipynb)), on the host | it fits, a sequence a GPU | a forward; the host's link |
# | ring | small steps, or no fit; $c$ above the threshold | $K$-sized messages |
# | gathered | all keys fit | fewer bytes, waited for |
# | Ulysses | heads divide; any mask | all-to-all |
# | Ulysses in a node, a ring across | more GPUs than heads allow | both |
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
# **Diagnose it.** Restarting positions: each rank believes that it has the beginning. Shifted after
# the split, four of 64 targets are gone and three are another piece's first token: the loss is *lower*, divided by 64;
# over the 60 left it hides. (transformers shifts `labels` itself: give it `shift_labels`.) Gradients not at
# home leave the first loss right. A `DistributedSampler` over all ranks gives each its own row. So compare losses over
# steps with one process, in fp64, at a small size; and gather what ranks hold: each position once, one row.

# %% [markdown]
# ## Recap
#
# - With flash attention memory is linear in the length.
# - Softmax adds up by log-sum-exps, in fp32: keys may come from anywhere. Zigzag evens out a ring's work; heads are Ulysses'.
# - Positions and shifted targets are split with the tokens; the loss is divided by all targets.
#
# Do the [lab](../../labs/advanced/18_long_contexts.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/18_long_contexts.ipynb).
#
# **References.** [Ring Attention](https://arxiv.org/abs/2310.01889), [Striped Attention](https://arxiv.org/abs/2311.09431),
# [DeepSpeed-Ulysses](https://arxiv.org/abs/2309.14509), [Llama 3](https://arxiv.org/abs/2407.21783), [ALST](https://arxiv.org/abs/2506.13996).

# %% [markdown]
# ## On Monday
#
# PyTorch's `context_parallel` (2.15, a prototype) shares causal `F.scaled_dot_product_attention`, in zigzag, and refuses other masks.
# Its kernels are CUDA's alone: on CPU ranks section 2's ring stood in.
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
# from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
# from torch.distributed.tensor.experimental import context_parallel
# from torch.distributed.tensor.experimental._attention import set_rotate_method
# from torch.nn.attention import SDPBackend, sdpa_kernel
# from torch.utils.checkpoint import checkpoint
# from torch.utils.data import DataLoader, DistributedSampler
#
# mesh = init_device_mesh(device.type, (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
# set_rotate_method("alltoall")  # keys around a ring; "allgather", the default, holds them all. Key gradients go around either way
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
#     optimizer.step()
#     optimizer.zero_grad()
#     dist.all_reduce(total := loss.detach().clone())
#     print(f"loss {total.item():.4f}")
#
# states = {"model": get_model_state_dict(model)}
# dcp.save(states, checkpoint_id=folder)
# dcp.load(states, checkpoint_id=folder)  # on any number of GPUs
# set_model_state_dict(model, states["model"])
# ```
#
# **Look at** the loss: one process's, to bf16's rounding. Flash takes 16 bits only: for a
# close comparison take fp32 (no `mp_policy`), copied key heads and `SDPBackend.EFFICIENT_ATTENTION`. Not run here:
# `Trainer` with accelerate's `ParallelismConfig(cp_size=8)`, or Ulysses,
# `ParallelismConfig(sp_backend="deepspeed", sp_size=4)`; Megatron's `--context-parallel-size 8 --cp-comm-type p2p` (a ring), `a2a` (Ulysses),
# `a2a+p2p`. Packed documents, on one GPU:
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
