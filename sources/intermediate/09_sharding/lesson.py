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
# **The question.** *"1.3 billion parameters on our cluster: less memory a GPU, at good speed."* So: which sharding frees
# the most memory, and keeps 95% of the speed of unsharded training?
#
# **Promise.** You write ZeRO-3 by hand, count what five ways to train hold and send on four ranks, and choose for 64 GPUs.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 60 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# In DDP every *rank*, a process with its own GPU, holds all 16 bytes of mixed-precision states per parameter. ZeRO-1
# *shards* 12 of them: each rank keeps its part. What does DeepSpeed's ZeRO-1 send by default, in percent of a DDP whose
# gradients have the same dtype?

# %%
my_bet_percent = 100

# %% tags=["setup"]
here = setup("intermediate/09")

# %% jupyter={"source_hidden": true}
import json
from functools import partial

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils import GB, Batch, Cluster, Transformer, TransformerConfig, check, export, run_ranks, show, traffic
from utils.catalog import ModelShape
from utils.memory import reachable_storages, phase
from utils.planner import Plan
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.techniques.fsdp import shard_blocks
from utils.techniques.zero import zero_config, zero_engine
from utils.lessons.lesson_09 import trust
from utils.lessons.lesson_09.over_phases import PHASES, draw_gradients
from utils.lessons.lesson_09.speed import SCHEMES, peaks, scheme_rows, speeds
from utils.lessons.lesson_09.staircase import draw_staircase, draw_who_holds
from utils.lessons.lesson_09.verdict import draw_borders, draw_rounds, draw_verdict
from utils.lessons.lesson_09.ways import AT_PEAK, MICRO_BATCH, Way, apart_from, fresh_model, gradient_bytes
from utils.lessons.lesson_09.ways import look, loss_of, plain, ring_bytes, sent_by_node, simulated, whole_elements

# %% jupyter={"source_hidden": true}
PLACE = "cpu"  # "cuda" if this machine has four GPUs: then each rank takes one
zero_problem = deepspeed_problem(PLACE)
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__}, ranks on {PLACE}")

# %% [markdown]
# ## 1. The staircase
#
# Mixed precision with Adam holds 2 bytes of parameter, 2 of gradient and 12 of optimizer state (an fp32 master copy and
# two moments) for each of $P$ parameters. DDP holds them all on each of $N$ ranks. ZeRO cuts the copies away in three
# stages ([Rajbhandari and others 2019](https://arxiv.org/abs/1910.02054), section 5). From DDP to ZeRO-3 a rank holds,
# in bytes:
#
# $$16P \;\rightarrow\; 4P + \tfrac{12P}{N} \;\rightarrow\; 2P + \tfrac{14P}{N} \;\rightarrow\; \tfrac{16P}{N}$$
#
# **Activations are not sharded**: every rank has a batch of its own. In the picture follow rank 0 down the rows. The
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
# **Read it.** On 64 ranks ZeRO-1 still holds four bytes whole. ZeRO-3 holds a quarter of one byte.
#
# **Question.** How many bytes per parameter does ZeRO-2 hold on 8 ranks?

# %%
stage_2_on_8_ranks = ...
check("09.stage_2_on_8", stage_2_on_8_ranks)

# %% [markdown]
# ## 2. ZeRO-3 by hand
#
# Each rank keeps its part of a block's parameters. One hook *gathers* the whole block before forward, another frees it
# after, and a third gathers it again before backward. Then a *reduce-scatter* sums the gradients over the ranks, and
# gives each rank its part.
#
# `p.data = view` makes each weight a window on one flat storage. `resize_(0)` empties it; the next gather fills it.

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
# **Read it.** Four ranks train as one process does, and each keeps a quarter of the states. A step gathers each of six
# blocks twice, and reduces it once. DeepSpeed's ZeRO-3 and PyTorch's [FSDP](https://arxiv.org/abs/2304.11277), which came
# from FairScale, add prefetch, padding and mixed precision.
#
# ## 3. The same model, five ways
#
# DeepSpeed's ZeRO has the paper's 2 + 2 + 12 bytes per parameter, and sends gradients in bf16. DDP and FSDP2, today's
# FSDP, have 4 + 4 + 8, for fp32 parameters need no master copy. Both send gradients in fp32 here (FSDP2's `reduce_dtype` sets it). DDP computes under autocast,
# FSDP2 with blocks gathered in bf16.
#
# FSDP2 takes a *mesh*, nodes times ranks of a node. It shards inside a node, and copies from node to node. So one number
# changes sharding and nothing else: $N \times 1$ is *unsharded*, $1 \times N$ is plain FSDP2, and between lies hybrid sharding
# (*HSDP*).

# %%
def ddp(name, size, **settings):
    model = DistributedDataParallel(fresh_model(size, PLACE), **settings)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def fsdp(name, size, **settings):
    model = shard_blocks(fresh_model(size, PLACE), precision="bf16", **settings)  # fully_shard: each block, then the model
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def hsdp(name, size, nodes=2):
    place = "cpu" if dist.get_backend() == "fake" else PLACE  # simulated ranks have no GPU
    shape = nodes, dist.get_world_size() // nodes
    return fsdp(name, size, mesh=dist.init_device_mesh(place, shape, mesh_dim_names=("replicate", "shard")))

# %% [markdown]
# DeepSpeed sends gradients in *buckets*, here of a quarter of this model. Two defaults of ZeRO-3 would hide the sharding of
# so small a model, so they are off: one leaves small weights whole, one keeps gathered what is soon used again.

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

# %% tags=["nbval-check-output"] jupyter={"source_hidden": true}
SMALL = TransformerConfig(vocabulary=256, hidden=128, layers=4, heads=4, feedforward=352)
N, P = 4, sum(p.numel() for p in Transformer(SMALL).parameters())
print(f"P = {P:,} parameters on N = {N} ranks")
print("DeepSpeed's ZeRO-1:", json.dumps(zero_config(1, P, world_size=N)["zero_optimization"]))

# %% tags=["bench"]
builders = {name: BUILDERS[name] for name in names} | {"unsharded": partial(hsdp, nodes=N), "HSDP": hsdp}  # 4 x 1, 2 x 2
found = {name: run_ranks(look, N, partial(build, name, SMALL), name, timeout_seconds=200) for name, build in builders.items()}
runs = {name: ranks[0] for name, ranks in found.items()}
means = {name: [sum(each) / N for each in zip(*(rank.losses for rank in ranks), strict=True)] for name, ranks in found.items()}
for name, mean in means.items():
    apart = max(abs(a / b - 1) for a, b in zip(mean, means["DDP"], strict=True))
    norm = found[name][0].gradient_norm / found["DDP"][0].gradient_norm
    print(f"{name:<10} first loss {mean[0]:.4f}, fifth {mean[-1]:.4f}, at most {apart:.0e} from DDP's; "
          f"first gradient's norm {norm:.4f} of DDP's")
    assert abs(norm - 1) < 0.01, f"{name}: is the gradient a mean over the ranks? A sum has {N} times the norm"
    assert apart < 0.1 * (1 - mean[-1] / mean[0]), f"{name} trains another model: same seed, same share of the batch?"
meshes = list(zip(*(means[name] for name in ("unsharded", "HSDP", "FSDP2")), strict=True))
print(f"the three meshes: at most {max(max(each) / min(each) - 1 for each in meshes):.0e} apart")

# %% [markdown]
# **Read it.** All train alike: losses follow DDP's to 0.03%, and first gradients have DDP's norm, where a sum would have
# four times as much. Of FSDP2's three meshes even the last digits agree.
#
# ## 4. What each really holds
#
# Predict what a rank holds at the step, when gradients are reduced. $S = P/N$ is its share.

# %%
BF, FP, S = "bfloat16", "float32", P // N
bucket = zero_config(3, P, world_size=N)["zero_optimization"]["reduce_bucket_size"]
lasting = {("master", FP): 4 * S, ("moments", FP): 8 * S}
holds = {
    "DDP": {("parameters", FP): 4 * P, ("gradients", FP): 4 * P, ("bucket", FP): 4 * P, ("moments", FP): 8 * P},
    "ZeRO-1": {("parameters", BF): 2 * P, ("gradients", BF): 2 * whole_elements(Transformer(SMALL), 0, N), **lasting},
    "ZeRO-3": {("parameters", BF): 2 * S, ("gradients", BF): 2 * S, ("bucket", BF): 2 * bucket, **lasting},
    **{name: {("parameters", FP): 4 * part, ("gradients", FP): 4 * part, ("moments", FP): 8 * part}
       for name, part in (("unsharded", P), ("HSDP", P // 2), ("FSDP2", S))},
}
holds["ZeRO-2"] = holds["ZeRO-1"]  # whole_elements: a tensor on the border of two parts stays whole on both

# %%
STAGES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3, "unsharded": 0, "HSDP": 3, "FSDP2": 3}
for name in (name for name in STAGES if name in runs):
    counted, says = runs[name].after_backward, textbook(STAGES[name], 2 if name == "HSDP" else N)
    assert counted == holds[name], f"{name}: holds {counted}, your table says {holds[name]}"
    total, parts = sum(counted.values()) / P, sorted(counted.items())
    print(f"{name:<10}{total:5.2f} bytes per parameter (measured; textbook {says:5.2f}):",
          ", ".join(f"{kind} {size / P:.2f} ({dtype})" for (kind, dtype), size in parts))

# %% [markdown]
# **Read it.** On each mesh FSDP2 holds what the textbook says. ZeRO-1 holds less, for it has freed reduced gradients that
# it does not own. ZeRO-3 keeps its bucket. DDP's buckets are a second copy of the gradients, unless
# `gradient_as_bucket_view=True`.
#
# But a run fails at its fullest moment. Which moment of a step is that?

# %% jupyter={"source_hidden": true}
fullest = {name: max((rank.run for rank in ranks), key=lambda run: run.peak_bytes) for name, ranks in found.items()}
rows = {}
for name, run in fullest.items():
    parts = {kind: run.breakdown[kind] / P for kind in AT_PEAK}
    rows[name] = parts | {"all else": run.peak_bytes / P - sum(parts.values()), "peak": run.peak_bytes / P, "in": run.peak_phase}
display(pd.DataFrame(rows).T.style.format(precision=2).set_caption("bytes per parameter at the peak of the fullest rank (measured)"))

# %% [markdown]
# **Read it.** All peak in backward, where activations are largest and most gradients are still to come (not ZeRO-3's). So
# with one micro-batch ZeRO-1 and ZeRO-2 peak almost alike. *All else* is mostly buffers, and weights cast or gathered in bf16.
#
# Next, gradients through one step: when does the orange area grow, and shrink?

# %%
zeros = [name for name in names if name.startswith("ZeRO")]
if zeros:
    show(draw_gradients({name: {0: found[name][0].run} for name in zeros}, per=P, title="Gradients on one of four ranks", reduces=zeros[:1], buckets=zeros),
         alt="Gradients through one step. In ZeRO-1's backward they climb to two bytes per parameter and fall when they are "
         "reduced after it; ZeRO-2 sends them bucket by bucket and keeps a quarter; all stages rise in the step by an fp32 copy.")
copies = {name: runs[name].optimizer_begins["gradients", FP] for name in zeros}
print("fp32 gradients when the optimizer begins, bytes:", copies, f"(measured); 4 S = {4 * S:,}")
assert set(copies.values()) <= {4 * S}, "each rank keeps its share alone, 4 S bytes: is N changed?"

# %% [markdown]
# **Read it.** ZeRO-1 collects all gradients, and reduces them after backward. ZeRO-2 reduces each full bucket at once and
# keeps its own part. At the step all three make an **fp32 copy of their share**, $4S$, which the paper leaves out.
#
# ### One GPU

# %%
def on_one_rank():
    return {name: sum(look(partial(zero, name, SMALL), name, timed_steps=0).after_backward.values()) / P for name in zeros}


for name, one in run_ranks(on_one_rank, 1)[0].items():
    print(f"{name} on one rank: {one:.2f} bytes per parameter after backward (measured); unsharded 16")
    assert one > 15.99, f"{name}: one rank has no other to shard over, so all 16 bytes stay"

# %% [markdown]
# **Read it.** No state is saved, and ZeRO-3 adds its bucket. Where "ZeRO-2 on one GPU" saves memory, it is by *offload*
# ([lesson 07](07_offload.ipynb)).
#
# ## 5. What each really sends
#
# We count a rank's calls, and give each the bytes of a ring. Of a tensor of $B$ bytes a rank sends $B(N-1)/N$ in a
# reduce-scatter or an all-gather, and twice that in an all-reduce. The unit below is the *round*, every parameter once
# in bf16: $2P(N-1)/N$ bytes. By the ZeRO paper DDP and stages 1 and 2 send two rounds, stage 3 three.

# %%
root = P - sum(p.numel() for p in Transformer(SMALL).blocks.parameters())  # gathered once, blocks twice
REDUCE, GATHER, SCATTER = "all-reduce", "all-gather", "reduce-scatter"
sends = {"DDP": {(REDUCE, FP): 8 * P}, "ZeRO-1": {(REDUCE, BF): 4 * P, (GATHER, BF): 2 * P},
         "ZeRO-2": {(REDUCE, BF): 4 * P, (GATHER, BF): 2 * P},
         "ZeRO-3": {(GATHER, BF): 4 * P, (SCATTER, BF): 2 * P},
         "FSDP2": {(GATHER, BF): 2 * (2 * P - root), (SCATTER, FP): 4 * P}}  # times (N - 1) / N
sends["unsharded"] = sends["DDP"]
round_bytes, rounds = 2 * P * (N - 1) / N, {}
for name in (*names, "unsharded"):
    formula = {key: size * (N - 1) // N for key, size in sends[name].items()}
    assert all(ring_bytes(rank.sent, N) == formula for rank in found[name]), (
        f"{name} sends other bytes than the formula: are bucket sizes and steps unchanged?")
    rounds[name] = sum(formula.values()) / round_bytes
    parts = ", ".join(f"{kind} {size / round_bytes:.2f} ({dtype})" for (kind, dtype), size in formula.items())
    print(f"{name:<10}{rounds[name]:5.2f} rounds (counted calls, a ring's bytes; equal to the formula): {parts}")

# %% [markdown]
# **Read it.** DDP's and unsharded FSDP2's four rounds are the paper's two, in fp32. DeepSpeed's ZeRO-1 and 2 send
# **three**: they *all-reduce* each bucket, though every rank keeps only its part, and then gather parameters.
#
# Each library can send less.

# %%
def sent_by(name, setting):
    way = BUILDERS[name](name, SMALL, **setting)
    for number in range(3):
        with traffic() as sent:
            way.backward(loss_of(way.model, number))
            way.update()
    return ring_bytes(sent.rows, N), sum(row.calls for row in sent.rows)


OWNERS = {"use_multi_rank_bucket_allreduce": False}
CHANGES = {"ZeRO-1": (OWNERS, 2), "ZeRO-2": (OWNERS, 2), "ZeRO-3": ({"stage3_max_reuse_distance": 10**9}, 2), "FSDP2": ({"reshard_after_forward": False}, 3)}
counted = run_ranks(lambda: {name: sent_by(name, CHANGES[name][0]) for name in names[1:]}, N)[0]
for name, (sent, calls) in counted.items():
    (setting, wanted), changed = CHANGES[name], sum(sent.values()) / round_bytes
    before = sum(row.calls for row in runs[name].sent)
    print(f"{name} with {setting}: {changed:.2f} rounds in {calls} calls (counted), {rounds[name]:.2f} in {before} before")
    assert changed == wanted, f"{name} should send {wanted} rounds: is its setting still known?"
if not zero_problem:
    print(f"ZeRO-1 by default: {100 * rounds['ZeRO-1'] / 2:.0f}% of a DDP in bf16 (formula); your bet: {my_bet_percent}%")

# %% [markdown]
# **Read it.** The bet: ZeRO-1 sends **150%** by default. `use_multi_rank_bucket_allreduce=False` reduces each part to its
# owner alone: the paper's two rounds, in more calls. The other two settings keep gathered weights until backward.
# ZeRO-3's is DeepSpeed's default, which section 3 turned off.
#
# ### Break it: ZeRO-2 with accumulation
#
# A batch too large for one pass is cut into $g$ micro-batches, whose gradients add up. Predict for $g = 4$: how often does
# each way send its gradients? Compare the orange parts of both panels.

# %%
def accumulated(name, hold_back):
    way = BUILDERS[name](name, SMALL, **({"accumulation": MICRO_BATCHES} if name in zeros else {}))
    with traffic() as sent:
        for number in range(MICRO_BATCHES):
            is_last = number == MICRO_BATCHES - 1
            if name == "FSDP2":
                way.model.set_requires_gradient_sync(is_last or not hold_back)
            if name == "DDP":
                way.model.require_backward_grad_sync = is_last  # what its `no_sync` sets
            way.backward(loss_of(way.model, number))
            if name in zeros or is_last:
                way.update()  # DeepSpeed steps at the last micro-batch only
    return sent.rows


# %%
MICRO_BATCHES = 4
expected = {("DDP", True): 1, ("ZeRO-1", False): 1, ("ZeRO-2", False): 4, ("ZeRO-3", False): 4, ("FSDP2", False): 4, ("FSDP2", True): 1}
ways = [(name, hold_back) for name, hold_back in expected if name in names]
counted = run_ranks(lambda: [accumulated(*way) for way in ways], N)[0]
bars = {"g = 1": {name: runs[name].sent for name in names}, "g = 4": {}}
for (name, hold_back), sent in zip(ways, counted, strict=True):
    times = gradient_bytes(sent, N) / gradient_bytes(runs[name].sent, N)  # beside the step of one micro-batch
    assert times == expected[name, hold_back], f"{name}: is set_requires_gradient_sync used?"
    bars["g = 4"][f"{name}, held" if name == "FSDP2" and hold_back else name] = sent
show(draw_rounds(bars, N, round_bytes, title="What a rank sends in a step of g micro-batches: calls measured, bytes by a ring's formula"),
     alt="Bars of rounds for each way. At one micro-batch all take three or four. At four DDP and ZeRO-1 stay where they were; ZeRO-2, ZeRO-3 and FSDP2 grow, FSDP2 less where it holds its gradients back.")

# %% [markdown]
# **Diagnose it.** ZeRO-1, like DDP, keeps all gradients and sends them once. ZeRO-2 has room for its own part alone, so it
# sends in each backward. ZeRO-3 and FSDP2 do too, and gather in every micro-batch. FSDP2 can hold gradients back, whole, by
# `set_requires_gradient_sync(False)`.
#
# **Question.** ZeRO-2 with default settings, 8 accumulation steps: how many *rounds* in a step?

# %%
rounds_of_8 = ...
check("09.rounds_of_8", rounds_of_8)

# %% [markdown]
# ### HSDP: shard in the node, copy between nodes
#
# With accumulation ZeRO-3 and FSDP2, which hold least, send most. HSDP keeps that off the slow links between nodes: only
# sums of gradients cross them, once a step (`set_requires_all_reduce`). What crosses the dotted border?

# %%
show(draw_borders(), alt="Two nodes of two GPUs, twice. With FSDP2 one ring runs through all four and crosses the border in every "
     "micro-batch. With HSDP gathers and reductions stay in a node, and an all-reduce of half the gradients crosses once a step.")

# %%
def hybrid():
    way = hsdp("HSDP", SMALL)
    with traffic() as sent:
        for number in range(MICRO_BATCHES):
            way.model.set_requires_all_reduce(number == MICRO_BATCHES - 1)
            way.backward(loss_of(way.model, number))
    return sent.rows, sum(p.to_local().nbytes for p in way.model.parameters())

# %% jupyter={"source_hidden": true}
rows, part_bytes = run_ranks(hybrid, N)[0]
for axis in ("shard", "replicate"):  # within a "node" of two ranks, and across
    there = [row for row in rows if row.axis.endswith(axis)]
    print(f"a rank, {axis}:", {kind: round(size / P, 2) for (kind, _), size in ring_bytes(there, 2).items()}, "bytes per parameter (counted calls, a ring's bytes)")
across = {name: bars["g = 4"][name] for name in ("DDP", "FSDP2")} | {"HSDP": rows}
print("a node of two to the other:", {name: round(sent_by_node(sent, N, 2) / P, 2) for name, sent in across.items()}, "bytes per parameter (counted calls, a ring's bytes)")
print(f"parameters on a rank: {part_bytes / P:.2f} bytes per parameter, of 4 (measured)")
assert [(row.collective, row.payload_bytes) for row in there] == [("all-reduce", 2 * P)], "is set_requires_all_reduce used?"

# %% [markdown]
# **Read it.** FSDP2's node sends about four times what DDP's does. **HSDP's sends less than DDP's**. The price: with nodes of
# eight a rank holds $16P/8$ bytes.

# %% [markdown]
# ## 6. The scenario as asked: 1.3B, less memory, at good speed
#
# The cluster has 64 A100 of 40 GB, eight to a node. First memory: `simulated` runs one rank on tensors without data.
# The last three bars are FSDP2's meshes: 64 x 1, 8 x 8 and 1 x 64. What shrinks there, and what stays?

# %% jupyter={"source_hidden": true}
LARGE = TransformerConfig(vocabulary=50304, hidden=2048, layers=24, heads=16, feedforward=5504, tied=True)
SHAPE = ModelShape(name="1.3B", family="llama", layers=24, hidden=2048, heads=16, feedforward=5504,
                   vocabulary=50304, max_sequence=2048, tied=True)  # the same for the planner
P_large = SHAPE.parameter_count
with torch.device("meta"):
    assert P_large == sum(p.numel() for p in Transformer(LARGE).parameters()), "the planner has another model"
print(f"P = {P_large:,}; 16P = {16 * P_large / GB:.1f} GB (predicted): more than a T4 or a V100 of 16 GB holds")

# %%
def at_size(name, ranks):
    settings = {"gradient_as_bucket_view": True} if name == "DDP" else {}
    if name in zeros:
        settings = {"accumulation": 2, "reduce_bucket_size": 50_000_000}
        settings |= {"allgather_bucket_size": 50_000_000} if name != "ZeRO-3" else {}
    return simulated(partial(BUILDERS[name], name, LARGE, **settings), name, ranks)


# %%
steps = {name: {64: at_size(name, 64)} for name in names[:-1]}
for name, nodes in (("unsharded", 64), ("HSDP 8 x 8", 8), ("FSDP2", 1)):
    steps[name] = {64: simulated(partial(hsdp, name, LARGE, nodes=nodes), name, 64)}
formulas = {name: {64: textbook(STAGES[name.split()[0]], 8 if "HSDP" in name else 64) * P_large} for name in steps}
show(draw_staircase(steps, formulas, limits=("A100-40GB",), title="1.3B, two micro-batches of two sequences of 2,048 tokens, flash attention"),
     alt="Stacked bars of a rank's peak on 64 ranks: DDP, ZeRO-1, 2, 3, then FSDP2 on three meshes: unsharded, HSDP, FSDP2; a diamond marks the "
     "states by the formula. Unsharded states are two thirds of the bar, HSDP's are an eighth of them, FSDP2's a sliver; the rest stays as it is.")

# %% [markdown]
# **Read it.** From mesh to mesh the states shrink, and all else stays. DDP stands above unsharded: autocast adds bf16
# weights and larger activations. **Unsharded is the reference from here on**: between the meshes sharding alone differs.
#
# ### The choice
#
# Now speed, by the course's planner: 512 sequences a step, two at once, hence $g = 4$, all gradients sent in bf16. A node
# has eight 200-gigabit InfiniBand links, as here (200 GB/s), one (25), or 10-gigabit Ethernet (1.25).
# *ZeRO-1 to owners* is section 5's setting, in as few calls as the default, which flatters it.
#
# The dotted line is 95%. Who lies right of it, and lowest? Who stays above it?

# %%
BATCH = Batch(sequences=512, sequence_length=2048)
sheet = pd.DataFrame(scheme_rows(SHAPE, BATCH, SCHEMES, 2))
says = "two sequences at once, g = 4 (predicted); ms of a step at 200 GB/s; tokens of one GPU, beside unsharded"
display(sheet.style.format(precision=1).hide().set_caption(says))

# %%
NETWORKS = (1.25, 12.5, 25, 50, 100, 200)  # GB/s of a node
drawn = speeds(SHAPE, BATCH, 2, NETWORKS)
show(draw_verdict(peaks(SHAPE, BATCH, 2), drawn, NETWORKS, least_percent=95, lines=set(drawn) - {"ZeRO-2", "ZeRO-3"},  # near FSDP2
                  titles=("Memory and speed at 200 GB/s", "Speed by the network")),
     alt="Left, peak over speed at 200 GB/s: right of 95 percent lie unsharded, ZeRO-1 twice, and lowest HSDP; ZeRO-2, ZeRO-3 and FSDP2 lie left of it. "
     "Right, speed over the network's rate: HSDP and ZeRO-1 to owners stay above 95; ZeRO-1 falls below 90 at 25 GB/s; FSDP2 falls to half there, and to a fifth at 1.25.")

# %% [markdown]
# **The answer: HSDP.** Of all that keep 95% of unsharded speed on every network it holds least: 13.1 GB a GPU, where
# unsharded holds 31.2, **58% less** (predicted). At 1.25 GB/s this is plain. At 200 GB/s the differences are smaller than
# the planner's errors.
#
# **Why.** Between nodes HSDP sends no more than unsharded (4.6 and 5.2 GB), so a slow network costs it no more. Inside the
# node it gathers parameters in every micro-batch: at 200 GB/s its collectives cost 84 ms a step, unsharded's 25. A smaller
# optimizer step gives 33 of these back, and 3% of speed are lost (5% with gradients in fp32, as in the job below).
#
# **The rival: ZeRO-1 to owners.** At best it keeps full speed on every network, and it holds 15.8 GB.
#
# The others miss 95%: default ZeRO-1 at 25 GB/s, ZeRO-2, ZeRO-3 (set as in section 3) and FSDP2 at 200.
#
# ### How far to trust it
#
# Two tables test the planner. In the third each row changes one thing.

# %% jupyter={"source_hidden": true}
for rows, says in ((trust.beside_simulation(SHAPE, steps), "memory: peaks at two micro-batches, predicted and simulated"),
                   (trust.beside_published(), "speed: llm-foundry's MPT of 1.3B by FSDP on A100-40GB, published, and the planner"),
                   (trust.verdict_stretched(SHAPE, BATCH), "the verdict: who keeps 95% of unsharded speed and holds least (predicted)")):
    display(pd.DataFrame(rows).style.format(precision=1).hide().set_caption(says))
print(trust.links())

# %% [markdown]
# **Memory** agrees to 3%.
#
# **Speed.** The planner is too fast for all five runs, by 7 to 9% and once, unexplained, by 33%. All shard fully, over RoCE, with
# eight or ten sequences at once: **no row tests the ranking**.
#
# **The verdict.** At 25 GB/s and below every row says HSDP, once by less than half a point. At 200 GB/s five of eight say another. Where
# compute loses half as much to collectives, FSDP2 is the answer; where twice as much, ZeRO-1 to owners.
#
# ### The job
#
# The job reduces gradients in fp32, as FSDP2 did above. At 200 GB/s it frees 18 GB a GPU for 5% of speed. If your cluster
# shows that loss, take four sequences at once: they use ten of these GB.

# %%
cluster = Cluster(gpu="A100-40GB", nodes=8, network_bytes_per_second=200 * GB)
plan = Plan(dp=64, zero_stage=3, shard_ranks=8, framework="fsdp", micro_batch=2)
job = export(SHAPE, cluster, plan, BATCH)
folder = here.root / "build" / "lesson-09"  # git ignores this folder
print(f"{len(job.write(folder))} files in {folder.relative_to(here.root)}; on each node:\n{job.torchrun}\nin train.py:")
print(*(line for line in (folder / "train.py").read_text().splitlines() if "DIMS = " in line or "apply_fsdp(part" in line), sep="\n")
print("HSDP beside unsharded two at once, both with fp32 gradients (predicted):", *trust.job_rows(SHAPE, BATCH), sep="\n")

# %% [markdown]
# ## Recap: which one when
#
# Which sharding frees the most memory, and keeps 95% of the speed of unsharded training? **HSDP**: shard inside each node,
# copy between nodes. It holds 13.1 GB a GPU, unsharded 31.2 (predicted). At 1.25 GB/s this is plain; at 200 GB/s
# measure FSDP2 and ZeRO-1 to owners beside it.
#
# | take | when | costs |
# |---|---|---|
# | DDP | freed memory would buy nothing | $16P$ on each |
# | ZeRO-1 | optimizer state is too large | a third round, unless sent to owners |
# | ZeRO-2 | gradients are too large as well | gradients sent in each micro-batch |
# | ZeRO-3, FSDP2 | parameters are too large as well | parameters gathered in each, too |
# | HSDP | as FSDP2, on several nodes: gathers stay inside a node | $16P$ over a node's ranks only |
#
# **ZeRO-3 or FSDP2?** FSDP2 for a loop in plain PyTorch, and for HSDP. ZeRO-3 where a configuration file drives the run,
# or states go to NVMe ([lesson 07](07_offload.ipynb)).
#
# **Where next.** The [lab](../../labs/intermediate/09_sharding.ipynb), in a copy (`make my-labs`), and its
# [solution](../../solutions/intermediate/09_sharding.ipynb).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch: HSDP.** It replaces DDP's wrapper and autocast. Yours are `model.blocks`, `nodes` of `gpus` each,
# `g` micro-batches a step, and this rank's `batches`, a multiple of `g`.
#
# ```python
# import os
# import torch
# import torch.distributed as dist
# import torch.distributed.checkpoint as dcp
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
#
# # torchrun has started the ranks; each has set its device and called init_process_group
# assert all(p.dtype == torch.float32 for p in model.parameters())  # or masters and moments would be bf16
# policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))  # plain FSDP2: no mesh
# for block in model.blocks:
#     fully_shard(block, mesh=mesh, mp_policy=policy)
# fully_shard(model, mesh=mesh, mp_policy=policy)  # the rest
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
#
# def states():
#     return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)) | {"steps": steps}
#
# def save():  # each rank its shards; add your scheduler's state_dict()
#     dcp.save(states(), checkpoint_id=f"out/{steps}")  # a new folder: a crash meanwhile leaves the last save whole
#     if dist.get_rank() == 0:
#         if os.path.lexists("out/next"):  # of a save that was killed here
#             os.remove("out/next")
#         os.symlink(f"{steps}", "out/next")
#         os.replace("out/next", "out/last")  # old folders are yours to delete
#
# steps, between_saves = 0, 1_000  # done, and from save to save
# if os.path.exists("out/last/.metadata"):  # it goes on, on any number of ranks, with g for as large a batch; all nodes must see "out"
#     saved = states()
#     dcp.load(saved, checkpoint_id="out/last")
#     set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
#     steps = saved["steps"]
# for number, (inputs, targets) in enumerate(batches, 1):  # this rank's own, from data that no rank had in these steps
#     is_last = number % g == 0  # of a step's micro-batches
#     model.set_requires_all_reduce(is_last)  # between nodes once a step
#     # model.set_requires_gradient_sync(is_last): in the node too, where whole gradients fit
#     loss = torch.nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
#     (loss / g).backward()
#     if is_last:
#         torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm of all shards
#         optimizer.step()
#         optimizer.zero_grad()
#         steps += 1
#         if steps % between_saves == 0:
#             save()
# if steps % between_saves:
#     save()
# ```
#
# **transformers, by DeepSpeed.** Where the weights do not fit take stage 3, make the
# model after the arguments, and set `stage3_gather_16bit_weights_on_model_save`. For FSDP2 replace `deepspeed=` by
# `fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}` (transformers 5). For HSDP add
# `parallelism_config=accelerate.ParallelismConfig(dp_replicate_size=nodes, dp_shard_size=8)`; it keeps whole gradients
# between micro-batches.
#
# ```python
# from transformers import Trainer, TrainingArguments
#
# arguments = TrainingArguments("out", bf16=True, per_device_train_batch_size=1, gradient_accumulation_steps=8, deepspeed={
#     "bf16": {"enabled": True}, "gradient_clipping": 1.0,
#     "zero_optimization": {"stage": 1, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000},
#     # measure "use_multi_rank_bucket_allreduce": False in it: fewer bytes in more calls, for a slow link between nodes
#     "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto"})
# trainer = Trainer(model, arguments, train_dataset=dataset)
# trainer.train()
# trainer.save_model("out/last")  # on all ranks
# ```
#
# Start either with `torchrun --nproc-per-node=8 train.py`, on several nodes as the job above. **Look at** the first
# gradient's norm, which is the unsharded one to within 1%; at `torch.cuda.max_memory_allocated()`; and at tokens a second.
