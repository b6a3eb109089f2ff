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
# **The question.** *"1.3 billion parameters on our cluster: less memory a GPU, without giving up speed."* Which
# sharding frees the most memory for what it sends?
#
# **Promise.** You write ZeRO-3 in thirty lines. Then you train one model in five ways on four real ranks: what each
# holds is measured to the byte, what it sends is counted by its calls, both beside the textbook. So you can answer for
# 1.3B, with a job to start.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 60 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |

# %% [markdown]
# ## A bet
#
# Data parallelism keeps all 16 bytes of states per parameter on every rank. ZeRO-1 shards 12 of them
# over the ranks, and the textbook says that it sends no byte more than DDP. How many bytes does
# DeepSpeed's ZeRO-1, as it comes, send, in percent of a DDP whose gradients have the same dtype? Write
# your guess. Section 5 counts.

# %%
my_bet_percent = 100

# %% tags=["setup"]
here = setup("intermediate/09")

# %% jupyter={"source_hidden": true}
import json
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils import GB, Batch, Cluster, Transformer, TransformerConfig, check, draw_over_time
from utils import estimate, export, run_ranks, score, scoreboard, show, simulate, traffic
from utils.catalog import ModelShape
from utils.memory import held
from utils.planner import framework
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.techniques.fsdp import shard
from utils.techniques.zero import SETTINGS, note_states, zero_config, zero_engine
from evidence.validation import foundry
from utils.lessons.lesson_09.speed import fastest, scheme_row
from utils.lessons.lesson_09.staircase import draw_staircase, draw_who_holds, peak_rows
from utils.lessons.lesson_09.ways import MICRO_BATCH, Way, fresh_model, look, loss_of, plain
from utils.lessons.lesson_09.ways import ring_bytes, whole_elements

# %% jupyter={"source_hidden": true}
PLACE = "cpu"  # "cuda" if this machine has four GPUs: then each rank takes one
zero_problem = deepspeed_problem(PLACE)
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__}, ranks on {PLACE}")

# %% [markdown]
# ## 1. The staircase
#
# Mixed precision holds, for each parameter, 2 bytes of parameter, 2 of gradient and 12 of optimizer
# state (an fp32 master copy and Adam's two moments). On $N$ ranks DDP holds all of it $N$ times. ZeRO
# cuts the copies away, the largest first
# ([Rajbhandari and others 2019](https://arxiv.org/abs/1910.02054), section 5):
#
# $$16P \;\rightarrow\; 4P + \tfrac{12P}{N} \;\rightarrow\; 2P + \tfrac{14P}{N} \;\rightarrow\; \tfrac{16P}{N}$$
#
# **Activations are not sharded**: every rank has a batch of its own, so there is no copy to cut away. The
# [glossary](../00_glossary.ipynb) has the words.

# %%
show(draw_who_holds(),
     alt="Four ranks in four schemes. DDP: all ranks hold everything. ZeRO-1: each holds a quarter of the optimizer "
     "state. ZeRO-2: a quarter of the gradients, too. ZeRO-3: a quarter of everything.")

# %% tags=["nbval-check-output"]
def textbook(stage, ranks):
    """Bytes of states per parameter and rank."""
    whole, shared = [(16, 0), (4, 12), (2, 14), (0, 16)][stage]
    return whole + shared / ranks


print("ranks   DDP  ZeRO-1  ZeRO-2  ZeRO-3   bytes per parameter (predicted)")
for ranks in (1, 2, 4, 64):
    print(f"{ranks:>5}" + "".join(f"{textbook(stage, ranks):8.2f}" for stage in range(4)))

# %% [markdown]
# **Read it.** The first row says the same number four times: **on a single GPU no stage saves anything**. Where a
# tutorial's "ZeRO-2 on one GPU" saves memory, *offload* does it (lesson 07).
#
# **Question.** How many bytes per parameter does ZeRO-2 hold on 8 ranks?

# %%
stage_2_on_8_ranks = ...
check("09.stage_2_on_8", stage_2_on_8_ranks)

# %% [markdown]
# ## 2. ZeRO-3 by hand
#
# Each rank keeps its part of a block's parameters. A hook gathers the whole before the block's forward and frees it
# after, gathers again before backward, and when all gradients are there, reduce-scatters them: each rank
# gets the mean of its own part. The optimizer sees the parts alone.
#
# Two lines carry it. `p.data = view` makes each weight a window on one flat storage. `resize_(0)` empties that storage
# and keeps the windows: those that autograd saved in forward see the weights again once backward's gather refills *the
# same* storage. (Here $N$ must divide a block's parameters; libraries pad.)

# %%
class Zero3:
    def __init__(self, block):
        self.whole_ones, self.missing = list(block.parameters()), 0
        self.flat = torch.cat([p.detach().flatten() for p in self.whole_ones])
        self.part = nn.Parameter(self.flat.chunk(dist.get_world_size())[dist.get_rank()].clone())
        for p, view in zip(self.whole_ones, self.flat.split([p.numel() for p in self.whole_ones]), strict=True):
            p.data = view.view_as(p)
            p.register_post_accumulate_grad_hook(self.reduce_when_all_are_there)
        block.register_forward_pre_hook(lambda *_: self.gather())
        block.register_forward_hook(lambda *_: self.free())
        block.register_full_backward_pre_hook(lambda *_: self.gather())
        self.free()

    def gather(self):
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        dist.all_gather_into_tensor(self.flat, self.part.detach())

    def free(self):
        self.flat.untyped_storage().resize_(0)

    def reduce_when_all_are_there(self, _):
        self.missing = (self.missing or len(self.whole_ones)) - 1
        if not self.missing:
            reduce_scatter(self)


# %%
def reduce_scatter(block):
    whole = torch.cat([p.grad.flatten() for p in block.whole_ones])
    block.part.grad = torch.empty_like(block.part)
    dist.reduce_scatter_tensor(block.part.grad, whole)
    block.part.grad /= dist.get_world_size()
    for p in block.whole_ones:
        p.grad = None
    block.free()


# %%
def by_hand(sharded, planted=1):
    torch.manual_seed(0)
    tower = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]).double()
    trained = [Zero3(block).part for block in tower] if sharded else tower.parameters()
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    x, y = torch.randn(2, 16, 64).double().chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    losses = []
    for _ in range(5):
        with traffic() as sent:
            loss = F.mse_loss(tower(x), y)
            optimizer.zero_grad()
            loss.backward()
        for p in tower.parameters() if not sharded else trained:
            p.grad *= planted  # 4: a sum over the ranks in place of a mean
        optimizer.step()
        losses.append(loss.item())
    kept_bytes = sum(row.bytes for row in held(optimizer=optimizer, model=tower))
    return losses, kept_bytes, [(row.collective, row.calls) for row in sent.rows]


# %%
def apart_from(whole, four):
    mean = [sum(rank[0][step] for rank in four) / 4 for step in range(5)]
    return max(abs(a / b - 1) for a, b in zip(mean, whole[0], strict=True))


whole, four = run_ranks(by_hand, 1, False)[0], run_ranks(by_hand, 4, True)
apart, planted = apart_from(whole, four), apart_from(whole, run_ranks(by_hand, 4, True, 4))
print(f"losses of four ranks and of one process, fp64: at most {apart:.0e} apart in 5 steps")
print(f"with a planted fault, sums for means: {planted:.0e}")
print(f"held between steps: one process {whole[1]:,} bytes, one rank of four {four[0][1]:,} (measured)")
print("a step:", ", ".join(f"{calls} x {collective}" for collective, calls in four[0][2]))
assert apart < 1e-12 < planted, "another model is trained: is every gradient a mean, and every part its own?"

# %% [markdown]
# **Read it.** A quarter of the states on each rank, the losses of one process, twelve gathers (six blocks, twice) and
# six reductions. That is ZeRO-3, and FSDP. The planted fault hardly moves the losses: AdamW divides by the gradient's
# size. Only fp64 shows it; in bf16 section 3 compares the gradient's norm as well.
#
# ## 3. The same model, five ways
#
# DDP keeps fp32 parameters and computes under autocast. FSDP2 keeps fp32 shards, which are parameter and master in
# one, gathers each block in bf16 before it runs, and frees it after. `shard` is `fully_shard` on each block and on the
# whole, with gradients reduced in fp32.

# %%
def ddp(name, size, **settings):
    model = DistributedDataParallel(fresh_model(size, PLACE), **settings)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def fsdp(name, size, **settings):
    model = shard(fresh_model(size, PLACE), precision="bf16", **settings)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


# %% [markdown]
# DeepSpeed keeps bf16 parameters and fp32 masters, and reads a JSON file. Its default buckets, 5e8 elements or 1 GB
# in bf16, would hide all that a small model saves: `zero_config` scales them to a quarter of the model. By default stage 3
# never shards these weights (below 100,000 elements) nor frees them: threshold and reuse distance become 0.

# %%
def zero(name, size, **settings):
    model = fresh_model(size, PLACE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    count = sum(p.numel() for p in model.parameters())
    config = zero_config(int(name[5]), count, world_size=dist.get_world_size(), micro_batch=MICRO_BATCH, **settings)
    config["gradient_clipping"] = 0.0  # its default of 1.0 would clip, which the others do not
    engine = zero_engine(model, optimizer, config)
    return Way(engine, optimizer, engine.backward, engine.step)


BUILDERS = {"DDP": ddp, "ZeRO-1": zero, "ZeRO-2": zero, "ZeRO-3": zero, "FSDP2": fsdp}
names = [name for name, build in BUILDERS.items() if build is not zero or not zero_problem]

# %% tags=["nbval-check-output"]
SMALL = TransformerConfig(vocabulary=256, hidden=128, layers=4, heads=4, feedforward=352)
N, P = 4, sum(p.numel() for p in Transformer(SMALL).parameters())
print(f"P = {P:,} parameters on N = {N} ranks")
print(json.dumps(zero_config(2, P, world_size=N, micro_batch=MICRO_BATCH)))
third = zero_config(3, P, world_size=N)["zero_optimization"]
print("stage 3 instead:", json.dumps(third))
for key in ["allgather_bucket_size", *third]:
    print(f"   {key}: {SETTINGS[key]}")

# %% [markdown]
# Each rank runs steps under the meter, then lists what one more sends, and what it holds after backward and when the
# optimizer begins.

# %% tags=["bench"]
found = {name: run_ranks(look, N, partial(BUILDERS[name], name, SMALL), name, timeout_seconds=200) for name in names}
runs = {name: ranks[0] for name, ranks in found.items()}
means = {name: [sum(each) / N for each in zip(*(rank.losses for rank in ranks), strict=True)] for name, ranks in found.items()}
for name, mean in means.items():
    apart = max(abs(a / b - 1) for a, b in zip(mean, means["DDP"], strict=True))
    norm = found[name][0].gradient_norm / found["DDP"][0].gradient_norm
    print(f"{name:<7} first loss {mean[0]:.4f}, fifth {mean[-1]:.4f}, at most {apart:.0e} from DDP's; "
          f"first gradient's norm {norm:.4f} of DDP's")
    assert abs(norm - 1) < 0.01, f"{name}: is the gradient a mean over the ranks? A sum has {N} times the norm"
    assert apart < 0.1 * (1 - mean[-1] / mean[0]), f"{name} trains another model: same seed, same share of the batch?"

# %% [markdown]
# **Read it.** Each library's gradient has DDP's norm to within bf16: it is a mean over the ranks. The losses agree to
# 2e-4, and fell by 12%.
#
# ## 4. What each really holds
#
# A prediction by kind and dtype; the cell below compares it with what a rank holds after backward, to the byte.
# $S = P/N$ is a rank's share.

# %%
BF, FP, S = "bfloat16", "float32", P // N
bucket = zero_config(3, P, world_size=N)["zero_optimization"]["reduce_bucket_size"]
lasting = {("master", FP): 4 * S, ("moments", FP): 8 * S}
holds = {
    "DDP": {("parameters", FP): 4 * P, ("gradients", FP): 4 * P, ("moments", FP): 8 * P},
    "ZeRO-1": {("parameters", BF): 2 * P, ("gradients", BF): 2 * whole_elements(Transformer(SMALL), 0, N), **lasting},
    "ZeRO-3": {("parameters", BF): 2 * S, ("gradients", BF): 2 * S, ("bucket", BF): 2 * bucket, **lasting},
    "FSDP2": {("parameters", FP): 4 * S, ("gradients", FP): 4 * S, ("moments", FP): 8 * S},
}
holds["ZeRO-2"] = holds["ZeRO-1"]

# %%
for stage, name in enumerate(BUILDERS):
    if name in names:
        counted = runs[name].after_backward
        assert counted == holds[name], f"{name}: holds {counted}, your table says {holds[name]}"
        total, parts = sum(counted.values()) / P, sorted(counted.items())
        print(f"{name:<7}{total:5.2f} B/P after backward (measured); textbook {textbook(min(stage, 3), N):5.2f}: ",
              ", ".join(f"{kind} {size / P:.2f} ({dtype})" for (kind, dtype), size in parts))

# %% [markdown]
# **Read it.** *After* backward ZeRO-1 and ZeRO-2 hold the same: DeepSpeed's ZeRO-1 frees what it does not
# own once it is reduced. The kept gradients are a little over $2S$, because a tensor that crosses the
# border of two parts is kept whole by both. ZeRO-3 keeps its bucket for good, a price that $16P/N$ does
# not mention. FSDP2 meets $16P/N$ with another sum: no separate master.
#
# The meter saw what comes and goes:

# %%
columns = ("parameters", "gradients", "optimizer state", "communication buffers")
largest = {name: {column: runs[name].most(column) / P for column in columns} for name in names}
for name in names:
    at_peak = runs[name].run.breakdown
    largest[name] |= {"peak of all": runs[name].run.peak_bytes / P, "gradients then": at_peak.get("gradients", 0) / P,
                      "activations then": at_peak["activations"] / P}
display(pd.DataFrame(largest).T.style.format(precision=2).set_caption("bytes per parameter (measured): the most of each at its own moment; and the peak"))
block = sum(p.numel() for p in Transformer(SMALL).blocks[0].parameters())
print(f"FSDP2's buffers: two blocks in bf16 {4 * block / P:.2f}, a block's fp32 gradients {4 * block / P:.2f}, the root {2 * (P - 4 * block) / P:.2f}")

# %%
zeros = {name: runs[name].run for name in names if name.startswith("ZeRO")} or {"FSDP2": runs["FSDP2"].run}
show(draw_over_time(zeros, "gradients", per=P, title="Gradients that rank 0 of 4 keeps, buckets not counted"),
     alt="Gradients through one step, a panel for each ZeRO stage: they climb to two bytes per parameter in ZeRO-1's "
     "backward and stay low in those of ZeRO-2 and 3; all rise at the end by fp32 copies.")
for name in names[1:-1]:
    copy_bytes = runs[name].optimizer_begins["gradients", FP]
    print(f"{name}, optimizer begins: fp32 gradients of 4 S = {copy_bytes:,} bytes (N = 4, so 4 S = P)")
    assert copy_bytes == 4 * S, f"{name}: each rank keeps its share alone, 4 S bytes: is N changed?"

# %% [markdown]
# **Read it.** *During* backward ZeRO-1 has all gradients, about the textbook's 2 bytes: it reduces when
# backward is over. ZeRO-2 reduces bucket by bucket and keeps its own part, on rank 0 what backward reaches last. ZeRO-3 keeps a buffer for its part, so its line never reaches zero. All three stages
# then make an **fp32 copy of their gradients** for the step, $4S$, which the textbook leaves out: the spike at the right edge.
#
# **Which moment decides?** DeepSpeed's peaks here are where backward *begins*: activations are largest, and ZeRO-1 has
# next to no gradients yet. So ZeRO-2 saves nearly nothing over it. At 1.3B on 64 ranks (section 6) it saves 1.0 of the
# 2.6 GB promised.
#
# DDP's buckets are a second copy of the gradients, unless `gradient_as_bucket_view=True`. FSDP2's are two gathered
# blocks and the root, for a moment, and one block's fp32 gradients on their way.
#
# ### One GPU
#
# Section 1's first row, run.

# %%
def on_one_rank(stages):
    looks = {name: look(partial(zero, name, SMALL), name, timed_steps=0) for name in stages}
    return {name: sum(seen.after_backward.values()) / P for name, seen in looks.items()}


stages = [name for name in names if name.startswith("ZeRO")]
for name, one in run_ranks(on_one_rank, 1, stages)[0].items():
    print(f"{name} on one rank: {one:.2f} B/P after backward (measured); unsharded 16")
    assert one > 15.99, f"{name}: one rank has no other to shard over, so all 16 bytes stay"

# %% [markdown]
# ## 5. What each really sends
#
# We count each rank's calls, and give each the bytes of a ring of $N$ ranks: of a tensor of $B$ bytes a rank sends
# $B(N-1)/N$ in a reduce-scatter or an all-gather, and in a reduce (one rank gets the sum) on average; twice that in an
# all-reduce. One *round* is every parameter once, in bf16: $2P(N-1)/N$ bytes.
# The ZeRO paper needs two, a reduce-scatter of gradients and an all-gather of parameters: as many as DDP.

# %%
root = P - sum(p.numel() for p in Transformer(SMALL).blocks.parameters())  # gathered once, blocks twice
REDUCE, GATHER, SCATTER = "all-reduce", "all-gather", "reduce-scatter"
sends = {"DDP": {(REDUCE, FP): 8 * P}, "ZeRO-1": {(REDUCE, BF): 4 * P, (GATHER, BF): 2 * P},
         "ZeRO-2": {(REDUCE, BF): 4 * P, (GATHER, BF): 2 * P},
         "ZeRO-3": {(GATHER, BF): 4 * P, (SCATTER, BF): 2 * P},
         "FSDP2": {(GATHER, BF): 2 * (2 * P - root), (SCATTER, FP): 4 * P}}  # times (N - 1) / N
round_bytes, rounds = 2 * P * (N - 1) / N, {}
for name in names:
    formula = {key: size * (N - 1) // N for key, size in sends[name].items()}
    assert all(ring_bytes(rank.sent, N) == formula for rank in found[name]), (
        f"{name} sends other bytes than the formula: are bucket sizes and steps unchanged?")
    rounds[name] = sum(formula.values()) / round_bytes
    parts = ", ".join(f"{kind} {size / round_bytes:.2f} ({dtype})" for (kind, dtype), size in formula.items())
    print(f"{name:<7}{rounds[name]:5.2f} rounds (counted calls, a ring's bytes; equal to the formula): {parts}")

# %% [markdown]
# **Read it.** DDP sends fp32 gradients: two rounds of 4 bytes are four of 2. DeepSpeed's ZeRO-1 and 2 take
# **three**: by default they *all-reduce* each bucket, though every rank keeps only its part,
# and then gather the parameters. ZeRO-3 gathers twice and reduces once. FSDP2 gathers blocks twice and
# the root (embedding, norm, head) once, since it is not resharded after forward; its fp32 reduction counts
# twice. Now change a setting of each.

# %%
def sent_by(name, setting):
    way = BUILDERS[name](name, SMALL, **setting)
    for number in range(3):
        with traffic() as sent:
            way.backward(loss_of(way.model, number))
            way.update()
    return ring_bytes(sent.rows, N)


CHANGES = [("ZeRO-1", {"use_multi_rank_bucket_allreduce": False}, 2), ("ZeRO-2", {"use_multi_rank_bucket_allreduce": False}, 2), ("ZeRO-3", {"stage3_max_reuse_distance": 10**9}, 2),
           ("FSDP2", {"reshard_after_forward": False}, 3)]
changes = [change for change in CHANGES if change[0] in names]
counted = run_ranks(lambda: [sent_by(name, setting) for name, setting, _ in changes], N)[0]
for (name, setting, wanted), sent in zip(changes, counted, strict=True):
    changed = sum(sent.values()) / round_bytes
    print(f"{name} with {setting}: {changed:.2f} rounds (counted calls), {rounds[name]:.2f} before")
    assert changed == wanted, f"{name} should send {wanted} rounds: is its setting still known?"
if not zero_problem:
    print(f"ZeRO-1 as it comes: {100 * rounds['ZeRO-1'] / 2:.0f}% of a DDP in bf16 (formula); your bet: {my_bet_percent}%")

# %% [markdown]
# **Read it.** `use_multi_rank_bucket_allreduce=false` gives the paper's two rounds: each part is reduced to
# the rank that keeps it, in more and smaller calls. `reshard_after_forward=False` gathers once and keeps the whole
# model until backward. `stage3_max_reuse_distance` says how soon a layer must
# be needed again to stay gathered: DeepSpeed's default of 1e9 elements keeps **every** layer of a small model: a
# small test of ZeRO-3 as it comes shows neither its memory nor its traffic.
#
# ### Break it: ZeRO-2 with accumulation
#
# You accumulate over four micro-batches to send less. Predict how often each sends its gradients,
# compared with one micro-batch. Then run.

# %%
MICRO_BATCHES = 4


def gradient_bytes(rows):
    return sum(size for (kind, _), size in ring_bytes(rows, N).items() if kind != GATHER)


def accumulated(name, hold_back):
    way = BUILDERS[name](name, SMALL, **({} if name == "FSDP2" else {"accumulation": MICRO_BATCHES}))
    with traffic() as sent:
        for number in range(MICRO_BATCHES):
            is_last = number == MICRO_BATCHES - 1
            if name == "FSDP2":
                way.model.set_requires_gradient_sync(is_last or not hold_back)  # DDP: no_sync
            way.backward(loss_of(way.model, number))
            if name != "FSDP2" or is_last:
                way.update()  # DeepSpeed steps at the last micro-batch only
    return gradient_bytes(sent.rows)


# %%
expected = {("ZeRO-1", False): 1, ("ZeRO-2", False): 4, ("FSDP2", False): 4, ("FSDP2", True): 1}
ways = [(name, hold_back) for name, hold_back in expected if name in names]
counted = run_ranks(lambda: [accumulated(*way) for way in ways], N)[0]
for (name, hold_back), sent in zip(ways, counted, strict=True):
    times = sent / gradient_bytes(runs[name].sent)  # beside the step of one micro-batch, counted above
    print(f"{name}{' with set_requires_gradient_sync(False) until the last' if hold_back else ''}: gradients sent {times:g} times with g = {MICRO_BATCHES}")
    assert times == expected[name, hold_back], f"{name}: is set_requires_gradient_sync used?"

# %% [markdown]
# **Diagnose it.** ZeRO-2 has room for its own part of the gradients alone, so it must send what each
# backward made at once: $g$ times a step. ZeRO-1 keeps all gradients, $2P$, adds up, and sends once.
# FSDP2 leaves you the choice, and whole gradients are its price.
#
# **Question.** ZeRO-2 as it comes, 8 accumulation steps: how many *rounds* in a step?

# %%
rounds_of_8 = ...
check("09.rounds_of_8", rounds_of_8)

# %% [markdown]
# ## 6. The scenario as asked: 1.3B, less memory, at good speed
#
# First memory. `simulate` runs rank 0 of any number of ranks on tensors without data, by the same builders.

# %%
LARGE = TransformerConfig(vocabulary=50304, hidden=2048, layers=24, heads=16, feedforward=5504, tied=True)
SHAPE = ModelShape(name="1.3B", family="llama", layers=24, hidden=2048, heads=16, feedforward=5504,
                   vocabulary=50304, max_sequence=2048, tied=True)  # the same for the planner
P_large = SHAPE.parameter_count
with torch.device("meta"):
    assert P_large == sum(p.numel() for p in Transformer(LARGE).parameters()), "the planner has another model"
print(f"P = {P_large:,}; 16P = {16 * P_large / GB:.1f} GB (predicted)")

# %% jupyter={"source_hidden": true}
def at_size(name, ranks, **settings):
    made = []

    def build_large():
        made[:] = [BUILDERS[name](name, LARGE, **settings)]
        return made[0].model.module if BUILDERS[name] is zero else made[0].model, made[0].optimizer

    def step_large(*_):
        way = made[0]
        way.backward(loss_of(way.model, 0, sequences=1, length=512))
        if BUILDERS[name] is zero:
            note_states(way.model)
        way.update()

    return simulate(build_large, step_large, world=ranks, device="A100 40GB", name=f"{name}, {ranks}")


# %%
WORLDS = {"DDP": (4,), "ZeRO-1": (4, 64), "ZeRO-2": (4, 64), "ZeRO-3": (4, 64), "FSDP2": (4, 64)}
steps = {name: {ranks: at_size(name, ranks) for ranks in WORLDS[name]} for name in names}
formulas = {name: {ranks: textbook(min(stage, 3), ranks) * P_large for ranks in (1, 2, 4, 8, 16, 32, 64)}
            for stage, name in enumerate(BUILDERS)}
show(draw_staircase(steps, formulas, limit="16GB", title="1.3B parameters, one sequence of 512: peaks above their states"),
     alt="Peak of one rank on 4 and on 64 ranks, for DDP, ZeRO-1, 2, 3 and FSDP2, each with a bar down to its "
     "own states; dashed lines are states by the formula (ZeRO-3 and FSDP2 share one). On 64 ranks the bars of ZeRO-3 and FSDP2 are longest.")

# %%
display(pd.DataFrame(peak_rows(steps, formulas)).style.format(precision=2).hide().set_caption("GB; the formula predicted, the others simulated"))
if not zero_problem:
    kept = at_size("ZeRO-3", 64, stage3_max_reuse_distance=10**9, stage3_max_live_parameters=10**9)
    print(f"ZeRO-3, 64, with its default of 1e9 for reuse and live parameters: {kept.peak_bytes / GB:.2f} GB (simulated)")

# %% [markdown]
# **Read it.** A card with 16 GB cannot hold this model's states whole; four of them can, sharded. With many ranks what
# does not shrink with $N$ takes over: buckets, gathered layers, gradients on their way, activations. "ZeRO-3 needs
# $16P/N$"? It needs that *plus* a part which no number of ranks shrinks, more by its default reuse distance.
#
# Now speed, on 64 A100 of 40 GB, eight to a node. `fastest` asks the planner for the fastest plan within **20 GB**, half
# a card, at an *equal* batch, over micro-batches of 1 to 8, with recomputation or without. "To owners" is DeepSpeed with
# `use_multi_rank_bucket_allreduce=false`.

# %%
TO_OWNERS = replace(framework("deepspeed"), name="deepspeed, to owners", whole_gradients=False)
SCHEMES = {"DDP, the whole card": ("fsdp", 0), "FSDP2": ("fsdp", 3), "ZeRO-1, DeepSpeed": ("deepspeed", 1),
           "ZeRO-2, DeepSpeed": ("deepspeed", 2), "ZeRO-3, DeepSpeed": ("deepspeed", 3),
           "ZeRO-1, to owners": (TO_OWNERS, 1), "ZeRO-2, to owners": (TO_OWNERS, 2)}
BATCH = Batch(sequences=512, sequence_length=2048)
sheet = {name: scheme_row(SHAPE, BATCH, *scheme, limit_gb=40 if "DDP" in name else 20) for name, scheme in SCHEMES.items()}
display(pd.DataFrame(sheet).T.style.format(precision=2).set_caption("predicted: a rank's states and rounds; the plan; tokens/s/GPU by a node's network rate"))

# %% jupyter={"source_hidden": true}
row = next(row for _, row in foundry.lines() if (row["model"], row["seq_len"], row["n_gpus"], row["gpu"]) == ("1b", "2048", "64", "a100_40gb"))
told = estimate(*foundry.setup(row)).tokens_per_second / 64
print(f"llm-foundry's MPT of 1.3B, FSDP on 64 A100-40GB, 200 GB/s, {row['micro_batch_size']} at once: {int(row['throughput_tok_s_gpu']):,} tokens/s/GPU (published), "
      f"{told:,.0f} (this planner, of that very run)")
all_ports = replace(framework("deepspeed"), name="deepspeed, all ports", one_port=False)
rates = {stage: fastest(SHAPE, BATCH, all_ports, stage, network_gb=200, limit_gb=20).tokens_per_second / 64 for stage in (1, 2, 3)}
print("DeepSpeed at 200 GB/s, were it given all ports of a node:", ", ".join(f"ZeRO-{stage} {rate:,.0f}" for stage, rate in rates.items()), "(predicted)")

# %% [markdown]
# **The answer.** In plain PyTorch FSDP2 needs 12.9 GB for DDP's 33.2 and is 8% slower; 11% at half the network's
# rate, 6% at twice. The planner is 8% above the published run: the saving is far larger than that error, the loss of
# speed is not. (Half of that table set its constants.) DeepSpeed trails by one
# constant: one network port of a node's eight, read off a table of 2021. With all eight its ZeRO-1 passes FSDP2:
# measure those two.
#
# At 1.25 GB/s **rounds decide**: two make 1,532 to 1,545 tokens/s, three 1,050 to 1,083, four 809 to 818, in this
# order at half and at twice the rate. With $g$ = 8 FSDP2 sends 31 rounds, ZeRO-1 to owners still two: take that
# where the link is slow or you accumulate.
#
# The job for the real ranks: FSDP2 by its plan, built on the meta device, clipped, saved in shards.

# %%
cluster = Cluster(gpu="A100-40GB", nodes=8, network_bytes_per_second=200 * GB)
job = export(SHAPE, cluster, fastest(SHAPE, BATCH, *SCHEMES["FSDP2"], network_gb=200, limit_gb=20).plan, BATCH)
folder = here.root / "build" / "lesson-09"  # git ignores this folder
print(f"{len(job.write(folder))} files in {folder.relative_to(here.root)}; on each node:\n{job.torchrun}")

# %% [markdown]
# ### The scoreboard

# %% jupyter={"source_hidden": true}
for name in names:
    score("09", name, peak_bytes=runs[name].run.peak_bytes, evidence=runs[name].run.evidence)
for ranks in (4, 64):
    run = steps["FSDP2"][ranks]
    score("09", f"1.3B, FSDP2 on {ranks} ranks", peak_bytes=run.peak_bytes, evidence=run.evidence)
scoreboard("09")

# %% [markdown]
# ## Recap: which one when
#
# Sharding cuts copies: optimizer state, then gradients, then parameters. Not in the textbook: DeepSpeed's third round
# in ZeRO-1 and 2, its fp32 copy of gradients, gathered layers.
#
# | take | when | costs |
# |---|---|---|
# | DDP | states fit on every rank | gradients twice, unless as views |
# | ZeRO-1 | optimizer state is too large; many accumulation steps, a slow link | a third round by default; whole gradients in backward |
# | ZeRO-2 | gradients too; few accumulation steps | reduces after each backward |
# | ZeRO-3 | parameters too; you configure a Trainer | a bucket for good; tuning |
# | FSDP2 | parameters too, in PyTorch code; with tensor parallelism, `compile`, saves for other numbers of ranks ([lesson 16](../advanced/16_runs_that_survive.ipynb)) | the whole root gathered; fp32 reduction if you choose it |
#
# FSDP began as `FullyShardedDataParallel` in **FairScale**
# ([its post of 2021](https://engineering.fb.com/2021/07/15/open-source/fsdp/)).
#
# **Where next.** Do the [lab](../../labs/intermediate/09_sharding.ipynb), in a copy (`make my-labs`); then compare
# with the [solution](../../solutions/intermediate/09_sharding.ipynb).
#
# **References.** Zhao and others 2023, *PyTorch FSDP*, [arXiv:2304.11277](https://arxiv.org/abs/2304.11277).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** `torchrun` has started the ranks; each has set its device and called `init_process_group`.
# `model.blocks` is your list of equal blocks. Load the weights in **fp32**: of a bf16 checkpoint
# masters and moments would be bf16. In place of DDP's wrap and of autocast, before the optimizer:
#
# ```python
# import torch
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
#
# assert all(p.dtype == torch.float32 for p in model.parameters())
# policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# for block in model.blocks:
#     fully_shard(block, mp_policy=policy)  # reshard_after_forward=False: a round less, the model whole in forward
# fully_shard(model, mp_policy=policy)  # the rest
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
# ```
#
# Accumulating, call `model.set_requires_gradient_sync(is_last)` before each backward, if whole gradients fit.
#
# **transformers, by DeepSpeed.** `model` and `dataset` are yours. Stage 1 where you accumulate; 3 where the weights do
# not fit, and then make the model after the arguments. Buckets of 5e7 elements are 0.1 GB each in bf16:
#
# ```python
# from transformers import Trainer, TrainingArguments
#
# arguments = TrainingArguments("out", bf16=True, per_device_train_batch_size=1, gradient_accumulation_steps=8, deepspeed={
#     "bf16": {"enabled": True}, "gradient_clipping": 1.0,
#     "zero_optimization": {"stage": 1, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000,
#                           "use_multi_rank_bucket_allreduce": False,  # two rounds in place of three
#                           "stage3_gather_16bit_weights_on_model_save": True},  # of use at stage 3 alone
#     "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto"})
# trainer = Trainer(model, arguments, train_dataset=dataset)
# trainer.train()
# trainer.save_model("out/last")  # on all ranks
# ```
#
# Start either with `torchrun --nproc-per-node=8 train.py`. **Look at** the first gradient's norm: DDP's to within 1%, as
# in section 3; at `torch.cuda.max_memory_allocated()`, which falls by section 1's share or more where states, not activations,
# make the peak; and at tokens a second: if they fall too far, go one stage back. Under FSDP2 no rank has the whole
# model: save by `torch.distributed.checkpoint` (lesson 16).
