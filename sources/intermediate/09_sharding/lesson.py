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
# **Promise.** You write ZeRO-3 in thirty lines, and train one model in five ways on four real ranks: what each
# holds is measured to the byte, what it sends is counted. You end with a job for 1.3B on 64 GPUs.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 60 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |

# %% [markdown]
# ## A bet
#
# Data parallelism keeps all 16 bytes of states per parameter on every rank. ZeRO-1 shards 12 of them, and by the
# textbook sends no byte more than DDP. How many bytes does DeepSpeed's ZeRO-1, as it comes, send, in percent of a DDP
# whose gradients have the same dtype? Write your guess.

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

from utils import GB, Batch, Cluster, Transformer, TransformerConfig, check
from utils import estimate, export, run_ranks, show, simulate, traffic
from utils.catalog import ModelShape
from utils.memory import reachable_storages, phase
from utils.planner import framework
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.techniques.fsdp import shard_blocks
from utils.techniques.zero import note_states, zero_config, zero_engine
from evidence.validation import foundry
from utils.lessons.lesson_09.over_phases import PHASES, draw_gradients, draw_overlap
from utils.lessons.lesson_09.speed import Scheme, fastest, gather_seconds, rates, scheme_row
from utils.lessons.lesson_09.staircase import draw_staircase, draw_who_holds, peak_rows
from utils.lessons.lesson_09.ways import AT_PEAK, MICRO_BATCH, Way, apart_from, fresh_model, gradient_bytes
from utils.lessons.lesson_09.ways import look, loss_of, plain, ring_bytes, whole_elements

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
# gets the mean of its own part.
#
# Two lines carry it. `p.data = view` makes each weight a window on one flat storage. `resize_(0)` empties that storage
# and keeps the windows, so those that autograd saved see the weights again once backward's gather refills it.
# ($N$ must divide a block's parameters; libraries pad.)

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
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)  # AdamW's update would hide a wrong scale
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
    kept_bytes = sum(row.bytes for row in reachable_storages(optimizer=optimizer, model=tower))
    return losses, kept_bytes, [(row.collective, row.calls) for row in sent.rows]


# %%
whole, four = run_ranks(by_hand, 1, False)[0], run_ranks(by_hand, 4, True)
apart, planted = apart_from(whole, four), apart_from(whole, run_ranks(by_hand, 4, True, 4))
print(f"losses of four ranks and of one process, fp64: at most {apart:.0e} apart in 5 steps")
print(f"with a planted fault, sums for means: {planted:.0e}")
print(f"held between steps: one process {whole[1]:,} bytes, one rank of four {four[0][1]:,} (measured)")
print("a step:", ", ".join(f"{calls} x {collective}" for collective, calls in four[0][2]))
assert apart < 1e-12 < planted, "another model is trained: is every gradient a mean, and every part its own?"

# %% [markdown]
# **Read it.** A quarter of the states on each rank, the losses of one process, twelve gathers (six blocks, twice) and
# six reductions. That is ZeRO-3, and FSDP. AdamW, which divides by the gradient's size, would all but hide the planted fault:
# section 3 compares the gradient's norm as well.
#
# ## 3. The same model, five ways
#
# DDP keeps fp32 parameters and gradients (4 + 4 + 8 bytes, the same 16) and computes under autocast. FSDP2 keeps fp32 shards, which are parameter and master in
# one, gathers each block in bf16 before it runs, and frees it after. `shard_blocks` is `fully_shard` on each block and on the
# whole, with gradients reduced in fp32.

# %%
def ddp(name, size, **settings):
    model = DistributedDataParallel(fresh_model(size, PLACE), **settings)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def fsdp(name, size, **settings):
    model = shard_blocks(fresh_model(size, PLACE), precision="bf16", **settings)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


# %% [markdown]
# DeepSpeed keeps bf16 parameters and fp32 masters, and reads a JSON file. Its default buckets, 5e8 elements or 1 GB
# in bf16, would hide all that a small model saves: `zero_config` makes them a quarter of the model. By default stage 3
# never shards these weights (below 100,000 elements) nor frees them: threshold and reuse distance become 0.

# %%
def zero(name, size, **settings):
    model = fresh_model(size, PLACE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    count = sum(p.numel() for p in model.parameters())
    config = zero_config(int(name[5]), count, world_size=dist.get_world_size(), micro_batch=MICRO_BATCH, **settings)
    config["gradient_clipping"] = 0.0  # its default of 1.0 would clip, which the others do not
    engine = zero_engine(model, optimizer, config)  # deepspeed.initialize(model=, optimizer=, config=), and the meter told
    engine.allreduce_gradients = phase(PHASES[0])(engine.allreduce_gradients)  # bands of the next figures
    return Way(engine, optimizer, engine.backward, phase(PHASES[1])(engine.step))


BUILDERS = {"DDP": ddp, "ZeRO-1": zero, "ZeRO-2": zero, "ZeRO-3": zero, "FSDP2": fsdp}
names = [name for name, build in BUILDERS.items() if build is not zero or not zero_problem]

# %% tags=["nbval-check-output"]
SMALL = TransformerConfig(vocabulary=256, hidden=128, layers=4, heads=4, feedforward=352)
N, P = 4, sum(p.numel() for p in Transformer(SMALL).parameters())
print(f"P = {P:,} parameters on N = {N} ranks")
print("DeepSpeed's ZeRO-1:", json.dumps(zero_config(1, P, world_size=N)["zero_optimization"]))

# %% [markdown]
# `look` meters steps on each rank, and lists what one more sends and holds.

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
# **Read it.** Each library's gradient has DDP's norm to within bf16: it is a mean over the ranks.
#
# ## 4. What each really holds
#
# A prediction, compared with what a rank holds after backward, to the byte. $S = P/N$ is a rank's share.

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
# **Read it.** *After* backward ZeRO-1 and ZeRO-2 hold the same: ZeRO-1 frees what it does not own once it is
# reduced. The kept gradients are a little over $2S$, because both ranks keep a tensor that crosses their border. ZeRO-3
# keeps its bucket for good. FSDP2 meets $16P/N$ with another sum: no separate master.
#
# The meter saw what comes and goes. Which moment is the fullest, on the fullest rank?

# %%
largest = {name: max((rank.run for rank in ranks), key=lambda run: run.peak_bytes) for name, ranks in found.items()}
rows = {name: {kind: run.breakdown[kind] / P for kind in AT_PEAK} | {"sum": run.peak_bytes / P, "in": run.peak_phase} for name, run in largest.items()}
display(pd.DataFrame(rows).T.style.format(precision=2).set_caption("bytes per parameter at the peak of the fullest rank (measured)"))

# %%
both = {name: {rank: found[name][rank].run for rank in (0, N - 1)} for name in names if name != "DDP"}
show(draw_gradients(both, per=P, title="Gradients that two of four ranks keep, buckets not counted"),
     alt="Gradients through one step on the first and the last rank. In ZeRO-1's backward they climb to two bytes per "
     "parameter and fall when they are reduced; in ZeRO-2's each rank keeps a quarter; all ZeRO stages rise in the step by an fp32 copy.")
copies = {name: runs[name].optimizer_begins["gradients", FP] for name in names[1:-1]}
print("fp32 gradients when the optimizer begins, bytes:", copies, f"(measured); 4 S = {4 * S:,}")
assert set(copies.values()) <= {4 * S}, "each rank keeps its share alone, 4 S bytes: is N changed?"

# %% [markdown]
# **Read it.** *During* backward ZeRO-1 has all gradients, the textbook's 2 bytes: by default it reduces when
# backward is over (`overlap_comm` sends earlier, with a second bucket). ZeRO-2 reduces bucket by bucket and keeps its own
# part; the last rank owns the last layers, so its part comes first. ZeRO-3 keeps a buffer. All three then make an **fp32 copy of their
# gradients** for the step, $4S$, which the textbook leaves out.
#
# **Which moment decides?** Here the start of backward: activations are largest, and ZeRO-1 has next to no
# gradients yet. DDP's buckets are a second copy of the gradients, unless `gradient_as_bucket_view=True`.
#
# ### One GPU
#
# Section 1's first row, run. (ZeRO-3's half byte above 16 is its bucket.)

# %%
def on_one_rank(stages):
    looks = {name: look(partial(zero, name, SMALL), name, timed_steps=0) for name in stages}
    return {name: sum(seen.after_backward.values()) / P for name, seen in looks.items()}

# %%
stages = [name for name in names if name.startswith("ZeRO")]
for name, one in run_ranks(on_one_rank, 1, stages)[0].items():
    print(f"{name} on one rank: {one:.2f} B/P after backward (measured); unsharded 16")
    assert one > 15.99, f"{name}: one rank has no other to shard over, so all 16 bytes stay"

# %% [markdown]
# ## 5. What each really sends
#
# We count each rank's calls, and give each the bytes of a ring: of a tensor of $B$ bytes a rank sends
# $B(N-1)/N$ in a reduce-scatter, an all-gather or (on average) a reduce, twice that in an
# all-reduce. One *round* is every parameter once, in bf16: $2P(N-1)/N$ bytes.
# The ZeRO paper needs two in stages 1 and 2, as many as DDP, and three in stage 3.

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
# **three**: they *all-reduce* each bucket, though every rank keeps only its part, and then gather the parameters. FSDP2
# gathers blocks twice and the root (embedding, norm, head) once; its fp32 reduction counts twice. Now change a setting of each.

# %%
def sent_by(name, setting):
    way = BUILDERS[name](name, SMALL, **setting)
    for number in range(3):
        with traffic() as sent:
            way.backward(loss_of(way.model, number))
            way.update()
    return ring_bytes(sent.rows, N)


OWNERS = {"use_multi_rank_bucket_allreduce": False}
CHANGES = [("ZeRO-1", OWNERS, 2), ("ZeRO-2", OWNERS, 2), ("ZeRO-3", {"stage3_max_reuse_distance": 10**9}, 2), ("FSDP2", {"reshard_after_forward": False}, 3)]
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
# its owner, in more and smaller calls. `reshard_after_forward=False` keeps the whole
# model until backward. With its default reuse distance, 1e9 elements, ZeRO-3 keeps **every** layer of a small model: such
# a test shows neither its memory nor its traffic.
#
# ### Break it: ZeRO-2 with accumulation
#
# You accumulate over four micro-batches to send less. Predict how often each sends its gradients. Then run.

# %%
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
    return gradient_bytes(sent.rows, N)


# %%
MICRO_BATCHES = 4
expected = {("ZeRO-1", False): 1, ("ZeRO-2", False): 4, ("FSDP2", False): 4, ("FSDP2", True): 1}
ways = [(name, hold_back) for name, hold_back in expected if name in names]
counted = run_ranks(lambda: [accumulated(*way) for way in ways], N)[0]
for (name, hold_back), sent in zip(ways, counted, strict=True):
    times = sent / gradient_bytes(runs[name].sent, N)  # beside the step of one micro-batch, counted above
    print(f"{name}{' with set_requires_gradient_sync(False) until the last' if hold_back else ''}: gradients sent {times:g} times with g = {MICRO_BATCHES}")
    assert times == expected[name, hold_back], f"{name}: is set_requires_gradient_sync used?"

# %% [markdown]
# **Diagnose it.** ZeRO-2 has room for its own part of the gradients alone, so it sends what each
# backward made at once: $g$ times a step. ZeRO-1 keeps all, $2P$, and sends once. FSDP2 leaves you the choice; its price is
# whole fp32 gradients, $4P$.
#
# **Question.** ZeRO-2 as it comes, 8 accumulation steps: how many *rounds* in a step?

# %%
rounds_of_8 = ...
check("09.rounds_of_8", rounds_of_8)

# %% [markdown]
# ### HSDP: shard in the node, copy between nodes
#
# On several nodes the link between them is the slow one. Hybrid sharding (HSDP) divides the states over the ranks of a
# node alone; nodes hold copies, and add up gradients once a step. Below two "nodes" of two ranks.

# %%
def hybrid():
    mesh = dist.init_device_mesh(PLACE, (2, 2), mesh_dim_names=("replicate", "shard"))
    way = fsdp("HSDP", SMALL, mesh=mesh)
    with traffic() as sent:
        for number in range(MICRO_BATCHES):
            way.model.set_requires_all_reduce(number == MICRO_BATCHES - 1)
            way.backward(loss_of(way.model, number))
    return sent.rows, sum(p.to_local().nbytes for p in way.model.parameters())

# %%
rows, part_bytes = run_ranks(hybrid, N)[0]
print("\n".join(map(str, rows)), f"\nparameters on a rank: {part_bytes / P:.2f} B/P, of 4 (measured)")
across = [row for row in rows if row.axis.endswith("replicate")]
assert [(row.collective, row.payload_bytes) for row in across] == [("all-reduce", 2 * P)], "is set_requires_all_reduce used?"

# %% [markdown]
# **Read it.** Gathers and reduce-scatters stay in the "node" (`shard`), four times. Across (`replicate`) goes one
# all-reduce a block of this rank's half, once a step. The price: each rank holds a node's share, $16P/8$ on nodes of eight.

# %% [markdown]
# ## 6. The scenario as asked: 1.3B, less memory, at good speed
#
# First memory, at two sequences of 2,048 tokens. `simulate` runs one of any number of ranks on tensors without data;
# buckets are the 5e7 elements of the last cell.

# %%
LARGE = TransformerConfig(vocabulary=50304, hidden=2048, layers=24, heads=16, feedforward=5504, tied=True)
SHAPE = ModelShape(name="1.3B", family="llama", layers=24, hidden=2048, heads=16, feedforward=5504,
                   vocabulary=50304, max_sequence=2048, tied=True)  # the same for the planner
P_large = SHAPE.parameter_count
with torch.device("meta"):
    large = Transformer(LARGE)
assert P_large == sum(p.numel() for p in large.parameters()), "the planner has another model"
print(f"P = {P_large:,}; 16P = {16 * P_large / GB:.1f} GB (predicted)")

# %% jupyter={"source_hidden": true}
BUCKETS = {"ZeRO-3": {"reduce_bucket_size": 50_000_000}}
BUCKETS["ZeRO-1"] = BUCKETS["ZeRO-2"] = BUCKETS["ZeRO-3"] | {"allgather_bucket_size": 50_000_000}


def at_size(name, ranks, rank=0, sequences=2, length=2048):
    made = []

    def build_large():
        made[:] = [BUILDERS[name](name, LARGE, **BUCKETS.get(name, {}))]
        return made[0].model.module if BUILDERS[name] is zero else made[0].model, made[0].optimizer

    def step_large(*_):
        way = made[0]
        way.backward(loss_of(way.model, 0, sequences=sequences, length=length))
        if BUILDERS[name] is zero:
            note_states(way.model)
        way.update()

    return simulate(build_large, step_large, world=ranks, rank=rank, device="A100 80GB", name=f"{name}, {ranks}")


# %%
WORLDS = {"DDP": (4,), "ZeRO-1": (4, 64), "ZeRO-2": (4, 64), "ZeRO-3": (4, 64), "FSDP2": (4, 64)}  # DDP holds the same on 64
steps = {name: {ranks: at_size(name, ranks) for ranks in WORLDS[name]} for name in names}
formulas = {name: {ranks: textbook(min(stage, 3), ranks) * P_large for ranks in (4, 64)} for stage, name in enumerate(BUILDERS)}
show(draw_staircase(steps, formulas, limits=("16GB", "40GB"), title="1.3B, two sequences of 2,048 tokens: sharding divides states, activations stay"),
     alt="Stacked bars of a rank's peak for DDP, ZeRO-1, 2, 3 and FSDP2 on 4 and on 64 ranks; a diamond marks the "
     "states by the formula. From DDP to FSDP2 the states shrink to a sliver; activations, logits and temporaries stay as they are.")

# %%
display(pd.DataFrame(peak_rows(steps, formulas)).style.format(precision=2).hide().set_caption("GB; the formula predicted, the others simulated"))
for rank in (0, 3) if not zero_problem else ():
    short = at_size("ZeRO-2", 4, rank=rank, sequences=1, length=512)
    print(f"one sequence of 512, ZeRO-2 on 4 ranks: rank {rank} peaks at {short.peak_bytes / GB:.2f} GB in {short.peak_phase} (simulated)")

# %% [markdown]
# **Read it.** States shrink to a sliver; activations, logits and temporaries stay. Each peak lies where backward begins:
# no rank holds gradients yet (but ZeRO-3's buffer), so ranks peak alike, and **in a step of one micro-batch ZeRO-2 saves nothing
# over ZeRO-1**, of 2.6 GB by the formula; ZeRO-1 carries them once micro-batches add up. At one sequence of 512 activations are small, and the step's fp32 copy decides.
#
# ### When is a gather free?
#
# FSDP2 gathers the next block while this one computes. Forward takes $2$ FLOP a parameter and token on each GPU; a gather brings
# $2$ bytes a parameter into each *node*, through all its ports: the size cancels. Backward needs 1.5 times the
# tokens.

# %%
block, reached = sum(p.numel() for p in large.blocks[0].parameters()), 0.5 * 312e12  # FLOP/s: half of an A100's bf16 peak
for rate_gb in (200, 25, 1.25):  # of a node
    print(f"{rate_gb:6.2f} GB/s a node: a block of {block / 1e6:.1f}M is gathered in {2000 * block / (rate_gb * GB):.1f} ms at line rate, "
          f"{1e3 * (seconds := gather_seconds(2 * block, rate_gb)):.1f} by the planner: hidden in forward from {seconds * reached / (2 * block):,.0f} tokens a GPU on (predicted)")
cases = {f"{gb} GB/s a node": (gather_seconds(2 * block, gb), 2 * block * 2 * 2048 / reached) for gb in (200, 25)}
show(draw_overlap(cases, title="Forward of four blocks, 2 x 2,048 tokens, half of an A100's peak"),
     alt="Gathers and computing of four blocks. At 200 GB/s all gathers but the first hide behind computing; at 25 GB/s each block waits for its gather.")

# %% [markdown]
# **Read it.** On eight fast ports gathers hide, on one they do not, on 10 Gb/s Ethernet never.
#
# Now speed, on 64 A100 of 40 GB, eight to a node, at an *equal* batch. `fastest` asks the course's planner for
# the fastest plan within **20 GB**, half a card. "To owners" is
# `use_multi_rank_bucket_allreduce=false`; $g$ counts micro-batches of a step; DDP sends once a step (`no_sync`).

# %%
DEEPSPEED = replace(framework("deepspeed"), name="deepspeed, all ports", one_port=False)
TO_OWNERS = replace(DEEPSPEED, name="deepspeed, to owners", whole_gradients=False)
BF16_REDUCE = replace(framework("fsdp"), name="fsdp, bf16 reduction", reduce_bytes=2)
SCHEMES = {"DDP, 40 GB": Scheme("fsdp", 0, 40), "DDP, 40 GB, bf16 hook": Scheme(BF16_REDUCE, 0, 40), "FSDP2, 40 GB": Scheme("fsdp", 3, 40),
           "FSDP2": Scheme("fsdp", 3), "FSDP2, bf16": Scheme(BF16_REDUCE, 3),
           "HSDP 8 x 8": Scheme("fsdp", 3, shard_ranks=8), "HSDP 8 x 8, bf16": Scheme(BF16_REDUCE, 3, shard_ranks=8),
           "ZeRO-1": Scheme(DEEPSPEED, 1), "ZeRO-1, to owners": Scheme(TO_OWNERS, 1), "ZeRO-2": Scheme(DEEPSPEED, 2), "ZeRO-3": Scheme(DEEPSPEED, 3)}
BATCH = Batch(sequences=512, sequence_length=2048)
sheet = {name: scheme_row(SHAPE, BATCH, scheme) for name, scheme in SCHEMES.items()}
display(pd.DataFrame(sheet).T.style.format(precision=2).set_caption("predicted, by what a node sends to others in a second: 200 GB/s and 1.25 GB/s"))

# %% jupyter={"source_hidden": true}
row = next(row for _, row in foundry.lines() if (row["model"], row["seq_len"], row["n_gpus"], row["gpu"]) == ("1b", "2048", "64", "a100_40gb"))
told = estimate(*foundry.setup(row)).tokens_per_second / 64
print(f"llm-foundry's MPT of 1.3B, FSDP on 64 A100-40GB, 200 GB/s, {row['micro_batch_size']} at once: {int(row['throughput_tok_s_gpu']):,} tokens/s/GPU (published), "
      f"{told:,.0f} (this planner, of that very run)")
for name in ("DDP, 40 GB", "FSDP2, 40 GB", "HSDP 8 x 8", "ZeRO-1, to owners"):
    print(f"{name:<18} at 100, 200 and 400 GB/s:", *(f"{rate:,.0f}" for rate in rates(SHAPE, BATCH, SCHEMES[name], (100, 200, 400))), "(predicted)")
one_port = rates(SHAPE, BATCH, Scheme("deepspeed", 1), (200,))[0]
print(f"ZeRO-1, if a collective used one of a node's eight ports, as a table of 2021 suggests: {one_port:,.0f} (predicted)")
for gb in (0.625, 1.25, 2.5):
    best = max(SCHEMES, key=lambda name: rates(SHAPE, BATCH, SCHEMES[name], (gb,))[0])
    print(f"fastest at {gb} GB/s: {best} (predicted)")
print("peaks, planner and simulation (g = 1):", ", ".join(f"{name} {fastest(SHAPE, BATCH, SCHEMES[name], 200).peak.allocated_bytes / GB:.1f}, {steps[name][64].peak_bytes / GB:.1f} GB" for name in names[1:]))
print("FSDP2, gradients held:", ", ".join(f"{(1 + 24 * block / P_large) * g + 2:.1f} rounds at g = {g}" for g in (4, 8)), f"for {4 * P_large / GB:.1f} GB of whole gradients (formula)")

# %% [markdown]
# **The answer.** States are 0.33 of FSDP2's 12.9 GB (10.9 simulated): activations decide. So let what sharding frees buy a larger
# micro-batch: on the whole card FSDP2 takes four sequences for DDP's two: 18,375 tokens/s for 17,978 (predicted);
# within half a card at 16,624. HSDP takes 2.3 GB more, sends 9.2 GB between nodes for 40.7, and reaches 17,141. ZeRO-1 to
# owners is fastest there, 18,842, if its collectives use all ports.
#
# The planner stands 8% above the published run (of pure bf16; half of that table set its constants), so the order at 200 GB/s
# is open: measure HSDP and ZeRO-1.
#
# At 1.25 GB/s **what a node sends decides**: 10.4 GB make 809 tokens/s, 5.2 make 1,569, 4.6 make 1,755. Reducing in bf16
# halves the gradients' share; a sum over 64 ranks then rounds.
#
# ### The job
#
# HSDP by its plan, clipped, saved in shards. Its core:

# %%
cluster = Cluster(gpu="A100-40GB", nodes=8, network_bytes_per_second=200 * GB)
job = export(SHAPE, cluster, fastest(SHAPE, BATCH, SCHEMES["HSDP 8 x 8"], 200).plan, BATCH)
folder = here.root / "build" / "lesson-09"  # git ignores this folder
print(f"{len(job.write(folder))} files in {folder.relative_to(here.root)}; on each node:\n{job.torchrun}\n")
print("def train" + job.python.partition("def train")[2].partition("\n\n\n")[0])

# %% [markdown]
# ## Recap: which one when
#
# | take | when | costs |
# |---|---|---|
# | DDP | states fit on every rank | gradients twice, unless as views |
# | ZeRO-1 | optimizer state is too large; many accumulation steps | a third round by default; whole gradients in backward |
# | ZeRO-2 | accumulated gradients, or those of the step, decide | reduces after each backward |
# | ZeRO-3 | parameters too; you have DeepSpeed's configs, or offload to NVMe | a bucket for good; tuning |
# | FSDP2 | parameters too, in PyTorch or a Trainer; saves for other numbers of ranks ([lesson 16](../advanced/16_runs_that_survive.ipynb)) | gathers in every micro-batch; the root whole |
# | HSDP | FSDP2 on several nodes, where a node's share fits | $16P$ over a node's ranks only |
#
# Your own model over some cards: [this page](../00a_your_model.ipynb) simulates it. FSDP began in
# [FairScale](https://engineering.fb.com/2021/07/15/open-source/fsdp/).
#
# **Where next.** The [lab](../../labs/intermediate/09_sharding.ipynb), in a copy (`make my-labs`), and its
# [solution](../../solutions/intermediate/09_sharding.ipynb).
#
# **References.** Zhao and others 2023, *PyTorch FSDP*, [arXiv:2304.11277](https://arxiv.org/abs/2304.11277).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** `torchrun` has started the ranks; each has set its device and called `init_process_group`.
# `model.blocks` is your list of equal blocks, `batches` your data. Load the weights in **fp32**, or masters
# and moments would be bf16. In place of DDP's wrap and of autocast:
#
# ```python
# import torch
# import torch.distributed.checkpoint as dcp
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
#
# assert all(p.dtype == torch.float32 for p in model.parameters())
# policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# for block in model.blocks:
#     fully_shard(block, mp_policy=policy)  # HSDP: mesh=init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
# fully_shard(model, mp_policy=policy)  # the rest, on the same mesh
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
# for inputs, targets in batches:  # this rank's own
#     loss = torch.nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
#     loss.backward()
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm of all shards
#     optimizer.step()
#     optimizer.zero_grad()
# states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
# dcp.save(states, checkpoint_id="out/last")  # each rank its shards
# dcp.load(states, checkpoint_id="out/last")  # in the next run, on any number of ranks
# set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
# ```
#
# Accumulating, call `model.set_requires_gradient_sync(is_last)` before each backward if whole gradients fit; under HSDP
# `set_requires_all_reduce(is_last)`.
#
# **transformers, by DeepSpeed.** `model` and `dataset` are yours. Stage 1 where you accumulate; 3 where the weights do
# not fit, with the model made after the arguments and `stage3_gather_16bit_weights_on_model_save`. Buckets of 5e7
# elements are 0.1 GB each. Micro-batches add up in bf16. (`"data_types": {"grad_accum_dtype": "fp32"}` makes stage 1 another
# optimizer, with all-reduces of its own.)
#
# ```python
# from transformers import Trainer, TrainingArguments
#
# arguments = TrainingArguments("out", bf16=True, per_device_train_batch_size=1, gradient_accumulation_steps=8, deepspeed={
#     "bf16": {"enabled": True}, "gradient_clipping": 1.0,
#     "zero_optimization": {"stage": 1, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000,
#                           "use_multi_rank_bucket_allreduce": False},  # two rounds in place of three
#     "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto"})
# trainer = Trainer(model, arguments, train_dataset=dataset)
# trainer.train()
# trainer.save_model("out/last")  # on all ranks
# ```
#
# Start either with `torchrun --nproc-per-node=8 train.py`. **Look at** the first gradient's norm: DDP's to within 1%; at
# `torch.cuda.max_memory_allocated()`, which falls by about section 1's bytes where states make the peak; and at tokens a
# second.
