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
# **Promise.** ZeRO-3 by hand in thirty lines; then one model, trained in five ways on four real ranks: what each
# holds is measured, what it sends counted.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 60 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |

# %% [markdown]
# ## A bet
#
# Data parallelism keeps all 16 bytes of mixed-precision states per parameter on every rank. ZeRO-1 shards 12 of them,
# and by its paper sends no byte more than DDP. How many bytes does DeepSpeed's ZeRO-1 send by default, in percent of a
# DDP whose gradients have the same dtype?

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
from utils.lessons.lesson_09.speed import SCHEMES, costs, scheme_rows, speeds
from utils.lessons.lesson_09.staircase import draw_staircase, draw_who_holds, peak_rows
from utils.lessons.lesson_09.verdict import draw_borders, draw_rounds, draw_verdict
from utils.lessons.lesson_09.ways import AT_PEAK, MICRO_BATCH, Way, apart_from, fresh_model, gradient_bytes
from utils.lessons.lesson_09.ways import look, loss_of, plain, ring_bytes, simulated, whole_elements

# %% jupyter={"source_hidden": true}
PLACE = "cpu"  # "cuda" if this machine has four GPUs: then each rank takes one
zero_problem = deepspeed_problem(PLACE)
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__}, ranks on {PLACE}")

# %% [markdown]
# ## 1. The staircase
#
# Mixed precision holds, for each parameter, 2 bytes of parameter, 2 of gradient and 12 of optimizer
# state (an fp32 master copy and Adam's two moments). On $N$ ranks DDP holds all of it $N$ times. ZeRO cuts the copies
# away ([Rajbhandari and others 2019](https://arxiv.org/abs/1910.02054), section 5):
#
# $$16P \;\rightarrow\; 4P + \tfrac{12P}{N} \;\rightarrow\; 2P + \tfrac{14P}{N} \;\rightarrow\; \tfrac{16P}{N}$$
#
# **Activations are not sharded**: every rank has a batch of its own. The [glossary](../00_glossary.ipynb) has the words.

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
# **Read it.** **On a single GPU sharding saves nothing.** Where "ZeRO-2 on one GPU" does, it is by *offload*
# (lesson 07).
#
# **Question.** How many bytes per parameter does ZeRO-2 hold on 8 ranks?

# %%
stage_2_on_8_ranks = ...
check("09.stage_2_on_8", stage_2_on_8_ranks)

# %% [markdown]
# ## 2. ZeRO-3 by hand
#
# Each rank keeps its part of a block's parameters. A hook gathers the whole before the block's forward and frees it
# after, and gathers again before backward. Then a reduce-scatter gives each rank the mean of its part of the gradients.
#
# `p.data = view` makes each weight a window on one flat storage. `resize_(0)` empties that storage and keeps the
# windows, which backward's gather fills again.

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
# **Read it.** Each rank keeps a quarter of the states; the mean of their losses is one process's. A step makes twelve
# gathers (six blocks, twice) and six reductions: the arithmetic of ZeRO-3 and [FSDP](https://arxiv.org/abs/2304.11277),
# which add prefetch, padding and mixed precision.
#
# ## 3. The same model, five ways
#
# DeepSpeed holds the paper's 2 + 2 + 12 bytes. DDP and FSDP2 here hold 4 + 4 + 8, with no master apart from the fp32
# parameters, and send gradients in fp32. DDP computes under autocast; FSDP2 gathers each block in bf16. `shard_blocks`
# calls `fully_shard` on each block and the model.

# %%
def ddp(name, size, **settings):
    model = DistributedDataParallel(fresh_model(size, PLACE), **settings)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def fsdp(name, size, **settings):
    model = shard_blocks(fresh_model(size, PLACE), precision="bf16", **settings)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))

# %% [markdown]
# DeepSpeed's *bucket* is the buffer in which it sends many gradients at once; `zero_config` makes it a quarter of this
# model. By default stage 3 leaves weights below a threshold unsharded, and does not free
# what it uses again within its reuse distance; both are 0 here.

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
# **Read it.** Each gradient has DDP's norm to within bf16: it is a mean over the ranks.
#
# ## 4. What each really holds
#
# First predict what a rank holds after backward, then compare. $S = P/N$ is a rank's share.

# %%
BF, FP, S = "bfloat16", "float32", P // N
bucket = zero_config(3, P, world_size=N)["zero_optimization"]["reduce_bucket_size"]
lasting = {("master", FP): 4 * S, ("moments", FP): 8 * S}
holds = {
    "DDP": {("parameters", FP): 4 * P, ("gradients", FP): 4 * P, ("bucket", FP): 4 * P, ("moments", FP): 8 * P},
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
# reduced. (Two ranks keep a tensor that crosses their border, hence more than $2S$.) ZeRO-3's bucket stays. So do
# DDP's, a second copy of the gradients unless `gradient_as_bucket_view=True`.
#
# Which moment of a step is the fullest?

# %% jupyter={"source_hidden": true}
fullest = {name: max((rank.run for rank in ranks), key=lambda run: run.peak_bytes) for name, ranks in found.items()}
rows = {name: {kind: run.breakdown[kind] / P for kind in AT_PEAK} | {"sum": run.peak_bytes / P, "in": run.peak_phase} for name, run in fullest.items()}
display(pd.DataFrame(rows).T.style.format(precision=2).set_caption("bytes per parameter at the peak of the fullest rank (measured)"))

# %% [markdown]
# **Read it.** For most the start of backward decides: activations are largest, and hardly a gradient is there yet.
# FSDP2 peaks a little later: its buffers hold gathered blocks and a block's gradients on their way.
#
# Next, the gradients through a step (FSDP2's buffers are not drawn).

# %%
zeros = [name for name in names if name.startswith("ZeRO")]
rank_0 = {name: {0: found[name][0].run} for name in names if name != "DDP"}
show(draw_gradients(rank_0, per=P, title="Gradients on one of four ranks", reduces=zeros[:1], buckets=zeros),
     alt="Gradients through one step. In ZeRO-1's backward they climb to two bytes per parameter and fall when they are "
     "reduced after it; ZeRO-2 sends them bucket by bucket and keeps a quarter; all ZeRO stages rise in the step by an fp32 copy.")
copies = {name: runs[name].optimizer_begins["gradients", FP] for name in zeros}
print("fp32 gradients when the optimizer begins, bytes:", copies, f"(measured); 4 S = {4 * S:,}")
assert set(copies.values()) <= {4 * S}, "each rank keeps its share alone, 4 S bytes: is N changed?"

# %% [markdown]
# **Read it.** ZeRO-1 collects all gradients and reduces them after backward. (With `overlap_comm`, off by
# default, during backward.) ZeRO-2 reduces each full bucket at once and keeps its own part;
# rank 0 owns the first layers, whose gradients come last. All three stages then make an **fp32 copy of their share**,
# $4S$, which the paper leaves out.
#
# ### One GPU
#
# ZeRO-3 adds its bucket.

# %%
def on_one_rank():
    return {name: sum(look(partial(zero, name, SMALL), name, timed_steps=0).after_backward.values()) / P for name in zeros}


for name, one in run_ranks(on_one_rank, 1)[0].items():
    print(f"{name} on one rank: {one:.2f} B/P after backward (measured); unsharded 16")
    assert one > 15.99, f"{name}: one rank has no other to shard over, so all 16 bytes stay"

# %% [markdown]
# ## 5. What each really sends
#
# We count each rank's calls, and give each the bytes of a ring: of a tensor of $B$ bytes a rank sends
# $B(N-1)/N$ in a reduce-scatter, an all-gather or (on average) a reduce, and twice that in an all-reduce. One *round*
# is every parameter once, in bf16: $2P(N-1)/N$ bytes. The ZeRO paper needs two rounds in stages 1 and 2, as many as
# DDP, and three in stage 3.

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
# **Read it.** DDP's gradients are fp32: two rounds of 4 bytes are four of 2. DeepSpeed's ZeRO-1 and 2 take
# **three**: they *all-reduce* each bucket, though every rank keeps only its part, and then gather parameters.
# FSDP2 gathers blocks twice, and embedding, norm and head once.

# %%
def sent_by(name, setting):
    way = BUILDERS[name](name, SMALL, **setting)
    for number in range(3):
        with traffic() as sent:
            way.backward(loss_of(way.model, number))
            way.update()
    return ring_bytes(sent.rows, N)


OWNERS = {"use_multi_rank_bucket_allreduce": False}
CHANGES = {"ZeRO-1": (OWNERS, 2), "ZeRO-2": (OWNERS, 2), "ZeRO-3": ({"stage3_max_reuse_distance": 10**9}, 2), "FSDP2": ({"reshard_after_forward": False}, 3)}
counted = run_ranks(lambda: {name: sent_by(name, CHANGES[name][0]) for name in names[1:]}, N)[0]
for name, sent in counted.items():
    (setting, wanted), changed = CHANGES[name], sum(sent.values()) / round_bytes
    print(f"{name} with {setting}: {changed:.2f} rounds (counted calls), {rounds[name]:.2f} before")
    assert changed == wanted, f"{name} should send {wanted} rounds: is its setting still known?"
if not zero_problem:
    print(f"ZeRO-1 by default: {100 * rounds['ZeRO-1'] / 2:.0f}% of a DDP in bf16 (formula); your bet: {my_bet_percent}%")

# %% [markdown]
# **Read it.** With `use_multi_rank_bucket_allreduce=False` each part is reduced to its owner alone: the paper's two
# rounds, in more and smaller calls. `reshard_after_forward=False` keeps the whole model until backward; ZeRO-3's default
# reuse distance, up to a billion parameters, 2 GB.
#
# ### Break it: ZeRO-2 with accumulation
#
# You accumulate over four micro-batches to send less. Predict how often each way sends its gradients.


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
show(draw_rounds(bars, N, round_bytes, title="What a rank sends in a step of g micro-batches: calls counted, bytes of a ring"),
     alt="Bars of rounds for each way. At one micro-batch all take three or four. At four DDP and ZeRO-1 stay where they were; ZeRO-2, ZeRO-3 and FSDP2 grow, FSDP2 less where it holds its gradients back.")

# %% [markdown]
# **Diagnose it.** ZeRO-2 has room for its own part of the gradients alone, so it sends in each backward.
# ZeRO-1 keeps all, $2P$, and sends once. FSDP2 can do so too, by `set_requires_gradient_sync(False)`: whole fp32
# gradients take $4P$. It still gathers in every micro-batch. (Only the figure's calls are measured.)
#
# **Question.** ZeRO-2 with default settings, 8 accumulation steps: how many *rounds* in a step?

# %%
rounds_of_8 = ...
check("09.rounds_of_8", rounds_of_8)

# %% [markdown]
# ### HSDP: shard in the node, copy between nodes
#
# The link between nodes is the slow one. Hybrid sharding (HSDP) divides the states over the ranks of a node alone.
# Nodes hold copies of each other, and add up gradients, once a step by `set_requires_all_reduce`.

# %%
show(draw_borders(), alt="Two nodes of two GPUs, twice. With FSDP2 one ring runs through all four and crosses the border in every "
     "micro-batch. With HSDP gathers and reductions stay in a node, and an all-reduce of half the gradients crosses once a step.")

# %%
def hsdp(name, size, nodes=2):
    place = "cpu" if dist.get_backend() == "fake" else PLACE  # simulated ranks have no GPU
    shape = nodes, dist.get_world_size() // nodes
    return fsdp(name, size, mesh=dist.init_device_mesh(place, shape, mesh_dim_names=("replicate", "shard")))


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
    print(f"{axis:<9}", {kind: round(size / round_bytes, 2) for (kind, _), size in ring_bytes(there, 2).items()}, "rounds (counted calls, a ring's bytes)")
print(f"parameters on a rank: {part_bytes / P:.2f} B/P, of 4 (measured)")
assert [(row.collective, row.payload_bytes) for row in there] == [("all-reduce", 2 * P)], "is set_requires_all_reduce used?"

# %% [markdown]
# **Read it.** A round is $1.5P$ bytes: a rank sends 15.7 bytes per parameter in its node, (5.13 + 5.33) x 1.5,
# and 2 across (`replicate`): one all-reduce of its half, once a step. The price: $16P/8$ of states on nodes of eight.

# %% [markdown]
# ## 6. The scenario as asked: 1.3B, less memory, at good speed
#
# At two sequences of 2,048 tokens and two micro-batches, `simulated` runs one of 64 ranks on tensors without data
# (no GPU, but an A100's flash attention). FSDP2 on *one* rank shards nothing; HSDP shards within nodes of eight.

# %% jupyter={"source_hidden": true}
LARGE = TransformerConfig(vocabulary=50304, hidden=2048, layers=24, heads=16, feedforward=5504, tied=True)
SHAPE = ModelShape(name="1.3B", family="llama", layers=24, hidden=2048, heads=16, feedforward=5504,
                   vocabulary=50304, max_sequence=2048, tied=True)  # the same for the planner
P_large = SHAPE.parameter_count
with torch.device("meta"):
    assert P_large == sum(p.numel() for p in Transformer(LARGE).parameters()), "the planner has another model"
print(f"P = {P_large:,}; 16P = {16 * P_large / GB:.1f} GB (predicted): more than a T4 or a V100 of 16 GB holds")

# %% jupyter={"source_hidden": true}
def at_size(name, ranks, **step):
    settings = {"gradient_as_bucket_view": True} if name == "DDP" else {}
    if name in zeros:
        settings = {"accumulation": step.get("micro_batches", 2), "reduce_bucket_size": 50_000_000}
        settings |= {"allgather_bucket_size": 50_000_000} if name != "ZeRO-3" else {}
    return simulated(partial(BUILDERS[name], name, LARGE, **settings), name, ranks, **step)


# %%
steps = {name: {64: at_size(name, 64)} for name in names}
steps["FSDP2"][1] = at_size("FSDP2", 1)
steps["HSDP 8 x 8"] = {64: simulated(partial(hsdp, "HSDP", LARGE, nodes=8), "HSDP 8 x 8", 64)}
formulas = {name: {ranks: textbook(min(stage, 3), ranks) * P_large for ranks in (1, 64)} for stage, name in enumerate(BUILDERS)}
formulas["HSDP 8 x 8"] = {64: textbook(3, 8) * P_large}
show(draw_staircase(steps, formulas, limits=("A100-40GB",), title="1.3B, two sequences of 2,048 tokens: sharding divides states, activations stay"),
     alt="Stacked bars of a rank's peak: FSDP2 on one rank, then DDP, ZeRO-1, 2, 3, FSDP2 and HSDP on 64 ranks; a diamond marks the "
     "states by the formula. From one rank to 64 FSDP2's states shrink to a sliver, HSDP's to an eighth; the rest stays as it is.")

# %%
display(pd.DataFrame(peak_rows(steps, formulas)).style.format(precision=2).hide().set_caption("GB; the formula predicted, the others simulated (sends: a ring's bytes, g = 2)"))
for sequences, length in ((2, 2048), (1, 512)) if zeros else ():
    alone = {name: at_size(name, 64, micro_batches=1, sequences=sequences, length=length) for name in zeros[:2]}
    print(f"one micro-batch, {sequences} x {length}:", ", ".join(f"{name} {run.peak_bytes / GB:.2f} GB" for name, run in alone.items()), "(simulated)")

# %% [markdown]
# **Read it.** From one rank to 64, FSDP2's states shrink, nothing else. HSDP holds two gigabytes more than FSDP2, and
# its node sends less than half; both reduce in fp32. DDP is highest: autocast adds bf16 copies of the weights and
# larger activations. (It sends 20.75 GB without `no_sync`.) ZeRO-2 saves gradients with several micro-batches or small
# activations. **At one micro-batch of 2 x 2,048 it saves nothing**: the peak is the start of backward.
#
# ### The choice
#
# The course's planner predicts 64 A100 of 40 GB, eight to a node, at 512 sequences a step; gradients are sent in bf16, and
# DDP has no autocast, which flatters it. First all take two at once ($g = 4$), then four ($g = 2$).
# A node sends 1.25 GB/s by 10-gigabit Ethernet (the figure's lines from there to 12.5 predict nothing), 25 by a
# 200-gigabit InfiniBand link, 200 by eight. Above 38 GB too little of 42.4 is left for CUDA's context and NCCL's buffers.

# %%
BATCH = Batch(sequences=512, sequence_length=2048)
for at_once in (2, 4):
    sheet = pd.DataFrame(scheme_rows(SHAPE, BATCH, SCHEMES, at_once))
    display(sheet.style.format(precision=1).hide().set_caption(f"{at_once} sequences at once, g = {8 // at_once} (predicted)"))

# %%
NETWORKS = (1.25, 12.5, 25, 50, 100, 200)  # GB/s of a node
titles = ("Two sequences at once: peak and bytes sent", "As many at once as fit: speed by network")
show(draw_verdict(costs(SHAPE, BATCH, 2), speeds(SHAPE, BATCH, NETWORKS), NETWORKS, titles=titles),
     alt="Left, peak over bytes that a node sends: DDP high and left, HSDP low and left, ZeRO-2, ZeRO-3 and FSDP2 low and far to the right. "
     "Right, tokens per second over the network's rate: HSDP is on top; all are close at 200 GB/s and far apart below 50.")

# %% [markdown]
# **The answer: HSDP**, at two sequences for memory, at four for speed. Beside DDP's two (31.2 GB):
#
# | HSDP | peak | tokens/s at 200, 25, 1.25 GB/s |
# |---|---|---|
# | two | 13.1 GB, -58% | -3%, equal, +11% |
# | four | 23.2 GB, -26% | +3%, +13%, +13% |
#
# At 25 GB/s and above four lead by our 38 GB: DDP's four, 41.2 GB, are *tight* on a card that shows about
# [42.4](https://github.com/TianheWu/CoSeR/issues/10). Where they fit, HSDP leads by 1, 4 and 12% (predicted).
#
# FSDP2 sends more than three times as much between nodes, too much to hide on a slow network. ZeRO-1 keeps up at
# 200 GB/s, since a rank updates a 64th of the weights. Reduced to owners (section 5) it is HSDP's rival: DDP's bytes,
# 15.8 GB, and +3, +2 and 0% at two sequences (predicted, its smaller calls free). Section 5's other settings and
# `zero_hpz_partition_size` are left out.
#
# Next, the planner tested; and HSDP's four over DDP's two.

# %% jupyter={"source_hidden": true}
for rows, says in ((trust.beside_simulation(SHAPE, steps), "peaks at two micro-batches, predicted and simulated"),
                   (trust.beside_published(), "llm-foundry's 1.3B on A100-40GB, FSDP, published; the planner's predicted")):
    display(pd.DataFrame(rows).style.format(precision=1).hide().set_caption(says))
print(trust.verdict_stretched(SHAPE, BATCH))
print(trust.seven_billion(BATCH))

# %% [markdown]
# **Read it.** Memory agrees to 3% where the planner counts this model's norms and loss. "Nothing sharded" is FSDP2 on
# one rank: DDP under autocast takes 36.3 GB, 16% more than planned.
#
# Speed is predicted 7 to 9% too high, and 33% for 32 GPUs, unexplained. **The ranking is untested**: these
# runs shard fully, at 200 GB/s, eight or ten at once, without accumulation over nodes. Leads of a few
# percent mean nothing.
#
# At 1.25 GB/s both wait for the network, whose rate cancels (TCP's 0.6 is one source's "at most"; the other has 0.32 to
# 0.48): the 13% are bytes in NCCL's rings, $(63/64)/(7/8)$. At 25 the lead is 7 to 13%, most of it by four sequences.
# Measure HSDP against your DDP.
#
# 7B leaves less choice: no A100 holds DDP's 16 bytes a parameter; one of 40 GB holds HSDP's share. (The planner
# adds 4 bytes, which AdamW's step takes without `fused=True`.)
#
# ### The job
#
# HSDP, four sequences at once. Gradients are reduced in fp32: nodes send the simulated 9.2 GB. At its
# 200 GB/s the lead, 2%, means nothing: you gain 8 GB, not speed.

# %%
cluster = Cluster(gpu="A100-40GB", nodes=8, network_bytes_per_second=200 * GB)
plan = Plan(dp=64, zero_stage=3, shard_ranks=8, framework="fsdp", micro_batch=4)
job = export(SHAPE, cluster, plan, BATCH)
folder = here.root / "build" / "lesson-09"  # git ignores this folder
print(f"{len(job.write(folder))} files in {folder.relative_to(here.root)}; on each node:\n{job.torchrun}")

# %% [markdown]
# ## Recap: which one when
#
# | take | when | costs |
# |---|---|---|
# | DDP | states fit on every rank | gradients twice, unless as views |
# | ZeRO-1 | optimizer state is too large; many accumulation steps | a third round by default; whole gradients |
# | ZeRO-2 | gradients are too large as well | reduces in each backward |
# | ZeRO-3 | parameters too; you have DeepSpeed's configs, or NVMe | up to $3g$ rounds; a bucket that stays |
# | FSDP2 | parameters too, in PyTorch; saves that any number of ranks loads ([lesson 16](../advanced/16_runs_that_survive.ipynb)) | gathers in every micro-batch |
# | HSDP | FSDP2 on several nodes, where a node's share fits | $16P$ over a node's ranks only |
#
# FSDP1's `FULL_SHARD` is FSDP2, `SHARD_GRAD_OP` is `reshard_after_forward=False`, `HYBRID_SHARD` is HSDP.
#
# **Where next.** The [lab](../../labs/intermediate/09_sharding.ipynb), in a copy (`make my-labs`), and its
# [solution](../../solutions/intermediate/09_sharding.ipynb).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch: HSDP.** Yours are `model.blocks` (equal blocks), `batches` (a multiple of `g`), `nodes` of `gpus`
# each, and `g` micro-batches a step. This replaces DDP's wrapper and autocast:
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
# mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))  # FSDP2: no mesh
# for block in model.blocks:
#     fully_shard(block, mesh=mesh, mp_policy=policy)
# fully_shard(model, mesh=mesh, mp_policy=policy)  # the rest
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
#
# def states():
#     return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)) | {"number": number}
#
# def save():  # each rank its shards; add your scheduler's state_dict()
#     dcp.save(states(), checkpoint_id=f"out/{number}")  # a new folder: a crash meanwhile leaves the last save whole
#     if dist.get_rank() == 0:
#         os.symlink(f"{number}", "out/next")
#         os.replace("out/next", "out/last")  # old folders are yours to delete
#
# number, between_saves = 0, 1_000 * g  # micro-batches: done, and from save to save
# if os.path.exists("out/last/.metadata"):  # a run that goes on, on any number of ranks; all nodes must see "out"
#     saved = states()
#     dcp.load(saved, checkpoint_id="out/last")
#     set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
#     number = saved["number"]
# for number, (inputs, targets) in enumerate(batches, number + 1):  # this rank's own, which it has not had yet
#     is_last = number % g == 0  # of a step's micro-batches
#     model.set_requires_all_reduce(is_last)  # between nodes once a step
#     # model.set_requires_gradient_sync(is_last): in the node too, where whole gradients fit
#     loss = torch.nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
#     (loss / g).backward()
#     if is_last:
#         torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm of all shards
#         optimizer.step()
#         optimizer.zero_grad()
#     if number % between_saves == 0:
#         save()
# if number % between_saves:
#     save()
# ```
#
# A model too large for a host: make it under `torch.device("meta")`, shard it, call `model.to_empty(device="cuda")`,
# and load weights by `set_model_state_dict` with `StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)`.
# `to_empty` leaves garbage in buffers too: compute again those that no checkpoint holds (`persistent=False`, as Llama's
# `inv_freq`).
#
# **transformers, by DeepSpeed.** Take stage 1 where you accumulate; 3 where the
# weights do not fit, with the model made after the arguments and `stage3_gather_16bit_weights_on_model_save`. For FSDP2
# write `fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}` in place of `deepspeed=`
# (transformers 5).
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
# gradient's norm, which is DDP's to within 1%; at `torch.cuda.max_memory_allocated()`; and at tokens a second.
