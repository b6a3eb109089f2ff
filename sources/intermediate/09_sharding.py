# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 Sharding: ZeRO-1, 2, 3 and FSDP
#
# {{badges}}
#
# **Promise.** You train one model in five ways on four real ranks, DDP, ZeRO-1, ZeRO-2, ZeRO-3 and
# FSDP2, with equal losses, and account for what each rank holds and sends, byte for byte, beside
# what the textbook says.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 45 | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |

# %% [markdown]
# ## A bet
#
# Data parallelism keeps all 16 bytes of states per parameter on every rank. ZeRO-1 shards 12 of them
# over the ranks, and the textbook says that it sends no byte more than DDP. How many bytes does
# DeepSpeed's ZeRO-1, as it comes, send compared with DDP: 100%, less, or more? Write your guess.

# %%
my_bet_percent = 100

# %% tags=["setup"]
here = setup("intermediate/09")

# %%
import json
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from utils import Evidence, Transformer, TransformerConfig, check, compare, format_bytes, measure
from utils import run_ranks, score, scoreboard, show, simulate, traffic
from utils.memory import held
from utils.techniques.deepspeed import build_extension, deepspeed_problem, load_deepspeed
from utils.techniques.deepspeed_config import read_config
from utils.techniques.fsdp import no_sync, shard
from utils.techniques.zero import SETTINGS, note_states, resident, zero_config, zero_engine

zero_problem = deepspeed_problem()
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__}. {build_extension()}")

# %% [markdown]
# ## What you will be able to do
#
# - Predict the bytes per rank of each stage: $16P$, $4P + 12P/N$, $2P + 14P/N$, $16P/N$.
# - Name what an implementation holds beyond that, with dtype and size.
# - Predict what it sends in a step, by collective.
# - Choose between ZeRO-1, ZeRO-2, ZeRO-3 and FSDP2, and write the configuration.
#
# On the map of memory, compute and communication, sharding trades **communication** for **memory**.
# It touches parameters, gradients and optimizer state. **Activations are not sharded**: they shrink
# with the micro-batch, recomputation, or a split of the sequence. Lesson 04 built data parallelism by
# hand; the [glossary](../00_start_here.ipynb#7.-Glossary) has the words.

# %% [markdown]
# ## 1. The staircase
#
# Mixed precision holds, for each parameter, 2 bytes of parameter, 2 of gradient and 12 of optimizer
# state (an fp32 master copy and Adam's two moments). On $N$ ranks DDP holds all of it $N$ times. ZeRO
# cuts the copies away, the largest first
# ([Rajbhandari and others 2019](https://arxiv.org/abs/1910.02054), section 5 and Table 1):
#
# $$16P \;\rightarrow\; 4P + \tfrac{12P}{N} \;\rightarrow\; 2P + \tfrac{14P}{N} \;\rightarrow\; \tfrac{16P}{N}$$

# %% tags=["nbval-check-output"]
def textbook(stage, ranks):
    """Bytes of states per parameter and rank."""
    whole, shared = [(16, 0), (4, 12), (2, 14), (0, 16)][stage]
    return whole + shared / ranks


print("ranks   DDP  ZeRO-1  ZeRO-2  ZeRO-3   bytes per parameter (predicted)")
for ranks in (1, 2, 4, 8, 64):
    print(f"{ranks:>5}" + "".join(f"{textbook(stage, ranks):8.2f}" for stage in range(4)))

# %% [markdown]
# **Read it.** The first row says the same number four times. A part of one is the whole: **on a single
# GPU no stage saves anything**. That many tutorials recommend "ZeRO-2 on one GPU" is due to
# *offload*, which moves the states to CPU memory; the partition itself does nothing there. Section 6
# measures it.
#
# **Question.** How many bytes per parameter does ZeRO-2 hold on 8 ranks?

# %%
stage_2_on_8_ranks = ...
check("09.stage_2_on_8", stage_2_on_8_ranks)

# %% [markdown]
# ## 2. One configuration for one model
#
# DeepSpeed reads a JSON file. Its defaults are meant for many billions of parameters: buckets of 5e8
# elements, 1 GB in bf16. Around a small model they hide all that is saved. `zero_config` scales them
# to the model, and DeepSpeed's own class reads the result before any rank starts. Our model is the
# course's transformer with under a million parameters: the same kinds of layers as GPT-2, with
# newer norms, positions and feed-forward.

# %% tags=["nbval-check-output"]
SMALL = TransformerConfig(vocabulary=256, hidden=128, layers=4, heads=4, feedforward=352)
N, MICRO_BATCH, LENGTH = 4, 2, 64
P = sum(p.numel() for p in Transformer(SMALL).parameters())
print(f"P = {P:,} parameters on N = {N} ranks")
config = zero_config(2, P, world_size=N, micro_batch=MICRO_BATCH)
print(json.dumps(config, indent=2))

# %%
for key, value in {**config, **config["zero_optimization"]}.items():
    print(f"{key}: {SETTINGS.get(key, 'stage, buckets: below')}")
if not zero_problem:
    read = read_config(config, N)
    print("read by DeepSpeed's class: stage", read.zero_optimization_stage,
          "batch", read.train_batch_size)  # fmt: skip
for wrong in ({"reduce_bucket": 5}, {"micro_batch": 0}):
    try:
        zero_config(2, P, world_size=N, **wrong)
    except ValueError as error:
        print("refused:", error)

# %% [markdown]
# ## 3. The same model, five ways
#
# Three builders return a model, its optimizer, and how to go backward and step. DDP keeps fp32
# parameters and computes under autocast. DeepSpeed keeps bf16 parameters and fp32 masters. FSDP2
# keeps fp32 shards, which are parameter and master in one, and gathers them in bf16: each block before
# it runs, freed after it.

# %%
def ddp(name):
    model = DistributedDataParallel(fresh_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return model, optimizer, lambda loss: loss.backward(), plain_step(optimizer)


def fsdp(name):
    model = shard(fresh_model(), precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return model, optimizer, lambda loss: loss.backward(), plain_step(optimizer)


def zero(name, accumulation=1, **settings):
    model = fresh_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    config = zero_config(int(name[5]), P, world_size=dist.get_world_size(),
                         micro_batch=MICRO_BATCH, accumulation=accumulation, **settings)  # fmt: skip
    engine = zero_engine(model, optimizer, config)
    return engine, optimizer, engine.backward, engine.step


# %%
def fresh_model():
    torch.manual_seed(0)
    return Transformer(SMALL)


def plain_step(optimizer):
    def step():
        optimizer.step()
        optimizer.zero_grad()

    return step


def loss_of(model, number):
    random = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    tokens = torch.randint(256, (MICRO_BATCH, LENGTH + 1), generator=random)
    with torch.autocast("cpu", torch.bfloat16, isinstance(model, DistributedDataParallel)):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


# %% [markdown]
# Each rank runs steps under the meter, counts the traffic of one more step, and lists what it
# holds: before the step, when gradients are there, and after it. `held` walks through all attributes
# of an object and finds every tensor's storage; its sum is the allocator's own count.

# %%
def everything(model, optimizer):
    return resident(model) if hasattr(model, "backward") else held(model=model, optimizer=optimizer)


# %%
def on_rank(name):
    build = {"DDP": ddp, "FSDP2": fsdp}.get(name, zero)
    model, optimizer, backward, update = build(name)
    losses, rows = [], {}

    def step(look=False):
        loss = loss_of(model, len(losses))
        backward(loss)
        losses.append(loss.item())
        if build is zero:
            note_states(model)  # tells the meter what DeepSpeed keeps where
        if look:
            del loss
            rows["gradients there"] = everything(model, optimizer)
        update()

    inner = model.module if build is zero else model
    found = measure(step, model=inner, optimizer=optimizer, items=MICRO_BATCH * LENGTH,
                    unit="tokens", name=name, timed_steps=3)  # fmt: skip
    with traffic() as sent:
        step(look=True)
    rows["after the step"] = everything(model, optimizer)
    return found if dist.get_rank() == 0 else None, losses, sent.rows, rows


# %%
names = ["DDP", "FSDP2"] if zero_problem else ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"]
found = {name: run_ranks(on_rank, N, name, timeout_seconds=200) for name in names}
runs = {name: ranks[0] for name, ranks in found.items()}
compare([run[0] for run in runs.values()], title="One rank of four, bf16 mixed precision")

# %% [markdown]
# **Read it.** The optimizer state shrinks at the first stair and no further. DDP shows a second copy
# of the gradients: its buckets. Activations are not sharded by any of them. Each bar is taken at its
# own peak, so some have freed part of them by then. In a
# model this small they are a large part of the bar. Times are those of four ranks on the cores of this
# machine, so they say more about the overhead of many small collectives than about a cluster.

# %%
steps_in_common = min(len(losses) for _, losses, _, _ in runs.values())
means = {name: [sum(rank[1][s] for rank in ranks) / N for s in range(steps_in_common)]
         for name, ranks in found.items()}  # fmt: skip
for name, mean in means.items():
    apart = max(abs(a / b - 1) for a, b in zip(mean, means["DDP"], strict=True))
    print(f"{name:<7} first loss {mean[0]:.4f}, last loss {mean[-1]:.4f}, apart {apart:.0e}")
    assert apart < 5e-4

# %% [markdown]
# **Read it.** Losses agree to the digits that bf16 has: sharding moves bytes, it does not change the
# mathematics. The course's tests run 20 steps of each against one process: in fp32 the difference stays
# below 1e-6, in bf16 below 5e-4, with and without accumulation.

# %% [markdown]
# ## 4. What each really holds
#
# Now item by item, by the names that the implementation itself uses, in bytes per parameter of the
# model. The textbook's number is for all states while gradients are there.

# %%
def items(name, when, least=0.02):
    for row in runs[name][3][when]:
        if row.bytes / P >= least:
            print(f"   {row.bytes / P:6.2f} B/P  {row.dtype:<9} {row.path}")


for name in names[1:-1]:
    total = sum(row.bytes for row in runs[name][3]["gradients there"]) / P
    print(f"{name}: {total:.2f} B/P when gradients are there; textbook {textbook(int(name[5]), N):.2f}")
    items(name, "gradients there")

# %% [markdown]
# **Read it.** Without accumulation ZeRO-1 and ZeRO-2 hold the same. DeepSpeed's ZeRO-1 frees the
# gradients of other ranks' parts once they are reduced, so it too keeps its own alone. The
# textbook's difference appears when gradients add up over micro-batches: then ZeRO-1 keeps all of them.
# The kept gradients are a little over $2P/N$, because a tensor that crosses the border of two parts
# is kept whole by both. ZeRO-3 keeps its bucket for good: the price of a stage that
# `16P/N` does not mention.

# %%
def largest(name, category):
    """Bytes per parameter at the moment of the step when there are the most of a category."""
    series = runs[name][0].timeline.series()
    return max((int(curve.max()) for c, curve in series.items() if str(c) == category), default=0) / P


print("        parameters  gradients  optimizer state  communication   B/P, each at its own largest")
for name in names:
    row = [largest(name, c) for c in ("parameters", "gradients", "optimizer state", "communication buffers")]
    print(f"{name:<8}" + "".join(f"{value:>{w}.2f}" for value, w in zip(row, (10, 11, 17, 15), strict=True)))
fsdp_rows = runs["FSDP2"][3]["gradients there"]
fsdp_total = sum(row.bytes for row in fsdp_rows)
print(f"FSDP2 with gradients: {fsdp_total / (16 * P / N):.4f} of 16P/N (measured)")
assert abs(fsdp_total / (16 * P / N) - 1) < 0.03

# %% [markdown]
# **Read it.** FSDP2 meets $16P/N$, with another sum: 4 bytes of fp32 parameter, 4 of fp32 gradient and
# 8 of moments, no separate master. The last column is what comes on top for a moment: DDP's buckets, and
# the layers that FSDP2 and ZeRO-3 hold *gathered*. On few ranks these can outweigh what stage 3 saves over stage 2.
# DeepSpeed also makes an **fp32 copy of its gradients inside the step**: $4P/N$ that no table mentions.
#
# <div class="alert alert-warning"><b>Trap.</b> "ZeRO-3 also partitions activations." It does not. The
# ZeRO paper's second part, ZeRO-R, partitions <i>checkpoints</i> over the ranks of tensor parallelism,
# where all of them hold the same ones. Data-parallel ranks have different batches, so there is no copy
# to cut away.</div>

# %% [markdown]
# ## 5. What each really sends
#
# A ring of $N$ ranks sends, per rank: for a reduce, a reduce-scatter or an all-gather of $B$ bytes in
# all, $B(N-1)/N$. An all-reduce is two of these. So DDP sends $2 \cdot (N-1)/N$ times its gradients. The
# ZeRO paper: a reduce-scatter of gradients and an all-gather of parameters, two rounds as well.

# %%
def ring_bytes(rows):
    """Bytes that one rank sends, by collective, single numbers left out."""
    factor = {"all-reduce": 2 * (N - 1) / N, "reduce": (N - 1) / N, "reduce-scatter": (N - 1) / N,
              "all-gather": N - 1}  # the payload of an all-gather is one rank's part  # fmt: skip
    sent = Counter()
    for row in rows:
        if row.payload_bytes > 64 and row.collective in factor:
            sent[row.collective, row.dtype] += round(factor[row.collective] * row.payload_bytes)
    return sent


round_bytes = 2 * P * (N - 1) / N  # one round of all parameters in bf16
for name in names:
    sent = ring_bytes(runs[name][2])
    parts = ", ".join(f"{kind} {b / round_bytes:.2f} ({t})" for (kind, t), b in sent.items())
    print(f"{name:<7}{sum(sent.values()) / round_bytes:5.2f} rounds of 2P(N-1)/N bytes: {parts}")

# %% [markdown]
# **Read it.** DDP sends fp32 gradients here: two rounds of 4 bytes are four of 2. DeepSpeed's ZeRO-1 and 2 take **three** rounds: by
# default they *all-reduce* each bucket, two rounds, though every rank keeps only its part, and then
# gather the parameters. ZeRO-3 gathers twice and reduces once. FSDP2 gathers blocks twice
# and the root (embedding, norm, head) once, since it is not resharded after forward; it reduces in fp32, which counts twice.
# The next cell asserts all of it, exactly, and changes two settings.

# %%
def sent_by(name, **settings):
    engine, _, backward, update = zero(name, **settings)
    for number in range(3):
        with traffic() as sent:
            backward(loss_of(engine, number))
            update()
    return ring_bytes(sent.rows)


if not zero_problem:
    assert sum(ring_bytes(runs["ZeRO-1"][2]).values()) == 3 * round_bytes
    owners = run_ranks(lambda: sent_by("ZeRO-2", use_multi_rank_bucket_allreduce=False), N)[0]
    kept = run_ranks(lambda: sent_by("ZeRO-3", stage3_max_reuse_distance=10**9), N)[0]
    assert sum(owners.values()) == sum(kept.values()) == 2 * round_bytes
    bet = 100 * sum(ring_bytes(runs["ZeRO-1"][2]).values()) / (2 * round_bytes)
    print("ZeRO-2, reduced to owners:", dict(owners))
    print("ZeRO-3, everything kept gathered:", dict(kept))
    print(f"ZeRO-1 as it comes: {bet:.0f}% of DDP in the same dtype; your bet was {my_bet_percent}%")

# %% [markdown]
# **Read it.** `use_multi_rank_bucket_allreduce=false` gives the paper's two rounds: each part
# is reduced to its owner, in more and smaller calls. That is why it is not the default. The reuse distance
# decides for ZeRO-3: DeepSpeed's default of 1e9 elements keeps **every** layer of a model this small
# gathered from forward to backward. A small test of ZeRO-3 with default settings therefore shows neither its memory nor its traffic.
#
# ### Break it: ZeRO-2 with accumulation
#
# You accumulate over four micro-batches to send less. Predict the all-reduces of ZeRO-1 and ZeRO-2,
# compared with one micro-batch. Then run.

# %%
def accumulated(name, micro_batches):
    engine, _, backward, update = zero(name, accumulation=micro_batches)
    with traffic() as sent:
        for number in range(micro_batches):
            backward(loss_of(engine, number))
            update()  # steps at the last micro-batch only
    return ring_bytes(sent.rows)["all-reduce", "bfloat16"] / (2 * round_bytes)


if not zero_problem:
    for name in ("ZeRO-1", "ZeRO-2"):
        times = [run_ranks(accumulated, N, name, g)[0] for g in (1, 4)]
        print(f"{name}: gradients all-reduced {times[0]:.0f} time with g = 1, {times[1]:.0f} with g = 4")
        assert times == [1, 1 if name == "ZeRO-1" else 4]

# %% [markdown]
# **Diagnose it.** ZeRO-2 has room for its own part of the gradients alone, so it must send what each
# backward made at once: $g$ times a step. ZeRO-1 keeps all gradients, $2P$, adds up, and sends once.
# So with accumulation on a slow link ZeRO-1 may be faster, for $2P(1 - 1/N)$ more bytes. FSDP2
# leaves you the choice: `no_sync` above is `set_requires_gradient_sync(False)`.
#
# **Question.** ZeRO-2, 8 accumulation steps: how many times are gradients reduced in a step?

# %%
reduced_times = ...
check("09.reduced_times", reduced_times)

# %% [markdown]
# ## 6. One GPU
#
# One rank, two stages. Without any sharding it would hold 2 bytes of bf16 parameter, 4 of master copy and
# 8 of moments when the step is over. What does the partition save?

# %%
def lasting(name):
    engine, _, backward, update = zero(name)
    for number in range(2):
        backward(loss_of(engine, number))
        update()
    return sum(row.bytes for row in resident(engine)) / P


if not zero_problem:
    for name in ("ZeRO-1", "ZeRO-2"):
        print(f"{name} on one rank: {run_ranks(lasting, 1, name)[0]:.2f} B/P after the step (measured);",
              "unsharded parameter, master and moments: 14")  # fmt: skip

# %%
bytes_saved_on_one_gpu = ...
check("09.one_gpu", bytes_saved_on_one_gpu)

# %% [markdown]
# ## 7. Scale up: 1.3 billion parameters
#
# The same transformer with the width and depth of the 1.3B GPT class. Its states are 21 GB: no card of
# 16 GB holds them, a T4 or a V100 16GB, and a 24 GB card has 3 GB left for all the rest. `simulate` runs
# rank 0 of a world of any size, with the same `shard`, every layer, on tensors without data.

# %%
LARGE = TransformerConfig(vocabulary=50257, hidden=2048, layers=24, heads=16, feedforward=5504,
                          tied=True)  # fmt: skip
with torch.device("meta"):
    P_large = sum(p.numel() for p in Transformer(LARGE).parameters())
print(f"P = {P_large:,}; 16P = {16 * P_large / 1e9:.1f} GB ({Evidence.PREDICTED})")


def build_large():
    model = shard(Transformer(LARGE), precision="bf16")
    return model, torch.optim.AdamW(model.parameters())


def step_large(model, optimizer):
    tokens = torch.randint(50257, (1, 513))
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


worlds = (1, 4, 16, 64)
steps = {w: simulate(build_large, step_large, world=w, name=f"{w} ranks") for w in worlds}
compare(list(steps.values()), title="FSDP2, 1.3B, one rank of many, one sequence of 512")

# %%
print("ranks   16P/N  states   rest   (GB; predicted, simulated, simulated)")
for ranks, run in steps.items():
    peak = {str(category): run.breakdown[category] for category in run.breakdown}
    states = sum(peak.get(k, 0) for k in ("parameters", "gradients", "optimizer state"))
    rest = {k: v for k, v in peak.items() if k not in ("parameters", "gradients", "optimizer state")}
    top = ", ".join(f"{k} {v / 1e9:.2f}" for k, v in sorted(rest.items(), key=lambda kv: -kv[1])[:3])
    print(f"{ranks:>5}{16 * P_large / ranks / 1e9:8.2f}{states / 1e9:8.2f}{sum(rest.values()) / 1e9:7.2f}   {top}")
gathered = 2 * (LARGE.vocabulary + 1) * LARGE.hidden
print(f"the root, gathered in bf16: {gathered / 1e9:.2f} GB; its gradient to be reduced in fp32: {2 * gathered / 1e9:.2f} GB")

# %% [markdown]
# **Read it.** On few ranks the states are the stair itself. On many the peak lies in backward, where not all
# gradients exist yet, so the states are below it. What does not shrink with $N$
# takes over: the gathered root (a table of 50,257 rows), the fp32 copy of its gradient on the way to the
# reduction, and the activations, of which every rank has its own. On 64 ranks they are most of the memory. That is the answer to
# "ZeRO-3 needs $16P/N$": it needs that *plus* a part which no number of ranks shrinks.

# %% [markdown]
# ## ZeRO-3 or FSDP: which one when
#
# | take | when | costs | does not help |
# |---|---|---|---|
# | DDP | states fit on every rank | nothing more | one rank that is too small |
# | ZeRO-1 | optimizer state is too large; many accumulation steps | a third round of sending as it comes | parameters that do not fit |
# | ZeRO-2 | gradients too; few accumulation steps | reduces after each backward | one GPU |
# | ZeRO-3 | parameters too, with offload to CPU or NVMe, or a Trainer configuration alone | a reduce bucket, tuning of distance and prefetch | activations |
# | FSDP2 | parameters too, in PyTorch code; with tensor parallelism, `compile`, DTensor checkpoints | fp32 reduction, whole root gathered | activations |
#
# Section 5 measured the rounds and section 4 the bytes. Both are one stair: the choice between ZeRO-3 and FSDP2 is one of
# tools. FSDP began as `FullyShardedDataParallel` in the library **FairScale**, which PyTorch took over
# in 2022; FSDP2 is its successor with one DTensor per parameter. Hugging Face's `Trainer` takes either:

# %%
fsdp_settings = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True,
    "transformer_layer_cls_to_wrap": ["Block"]}}  # fmt: skip
print("TrainingArguments(..., deepspeed=config), with config from zero_config:")
print(json.dumps(config["zero_optimization"]))
print("TrainingArguments(..., **fsdp_settings), with fsdp_settings:")
print(json.dumps(fsdp_settings))

# %% [markdown]
# ### The scoreboard

# %%
for name in names:
    score("09", runs[name][0])
score("09", steps[64])
scoreboard()

# %% [markdown]
# ## Recap
#
# - Sharding cuts copies: optimizer state, then gradients, then parameters. Activations have no copies.
# - Implementations hold and send more than the textbook: buckets, gathered layers, fp32 copies, a third round.
# - ZeRO-2 sends gradients after every backward.
# - On one GPU a partition saves nothing.
#
# ### Test yourself
#
# Why can ZeRO-3 need more memory than ZeRO-2 on two ranks? Then open the answer.
#
# <details><summary>Answer</summary>
#
# On two ranks stage 3 saves one byte per parameter over stage 2 (9 against 8). Its bucket, the
# gathered layers and what is prefetched may be more than that.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/intermediate/09_sharding.ipynb), in a copy: `make my-labs` makes one. When you
# are done, compare with the [solution](../../solutions/intermediate/09_sharding.ipynb).
#
# **References.** Rajbhandari and others 2019, *ZeRO*, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054). Zhao
# and others 2023, *PyTorch FSDP*, [arXiv:2304.11277](https://arxiv.org/abs/2304.11277). DeepSpeed,
# [configuration](https://www.deepspeed.ai/docs/config-json/). PyTorch,
# [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
