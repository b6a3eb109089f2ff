# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 Three dimensions at once
#
# {{badges}}
#
# **The question.** 64 GPUs on 8 nodes, and a model that fits none of them. How do tensor, pipeline and data parallelism
# share it, so that
#
# 1. its losses stay those of one process (sections 2 and 3),
# 2. every stage fits its GPU (section 4),
# 3. few bytes leave the nodes (section 5)?
#
# **Promise.** You weigh layouts, compose the axes on eight processes, plant three usual bugs, and simulate memory and
# traffic.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 60 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | one to two minutes on two CPU cores |
#
# ## A bet
#
# Of all bytes sent, how many percent leave their node if the axes lie well, and if badly?

# %%
my_bet_percent_well, my_bet_percent_badly = 20, 50

# %% tags=["setup"]
here = setup("advanced/14")

# %% jupyter={"source_hidden": true}
import itertools
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.parallel import loss_parallel

from utils import GB, GIB, Batch, Cluster, Evidence, Plan, Transformer, TransformerConfig, check
from utils import draw_stage_memory, estimate, export, run_ranks, show
from utils.catalog import ModelShape, model_shape
from utils.data import text_tokens
from utils.parallel import ParallelDims, accumulated_passes, adamw, apply_cp, apply_fsdp, apply_tp, device_mesh, keep_chunk
from utils.parallel import local_positions, local_rows, pipeline_passes, reduce_on_last_micro_batch, sum_over
from utils.parallel.tensor import block_styles
from utils.planner import axis_bytes, framework, ring_bytes
from utils.planner.calibration import BESIDE_TRAINING
from evidence.validation.simulation_megatron_stage import megatron_stage, states_and_kept
from utils.lessons.lesson_14.at_size import simulated_rank
from utils.lessons.lesson_14.bugs import draw_bugs
from utils.lessons.lesson_14.groups import draw_groups
from utils.lessons.lesson_14.orders import draw_orders
from utils.lessons.lesson_14.placement import busiest_port_bytes
from utils.lessons.lesson_14.tables import layout_table

# %% [markdown]
# ## 1. One rank, three coordinates
#
# Each parallelism is an *axis*, with a name in the code ([glossary](../00_glossary.ipynb)):
#
# | parallelism | axis | divides | into |
# |---|---|---|---|
# | tensor (TP) | `tp` | each matrix | slices |
# | pipeline (PP) | `pp` | the layers | stages |
# | data (DP) | `shard` | the batch's rows; under ZeRO-1 also optimizer states | replicas |
#
# Here each node holds one stage. Look which axis sends most, and whose arrows leave a node:

# %%
HUNDRED = ModelShape(name="100B", family="llama", layers=80, hidden=10_240, heads=80, feedforward=27_648,
                     vocabulary=32_000, max_sequence=2048)
# PyTorch's rules of memory; its tensor parallelism keeps the gathered inputs of a matrix until backward.
by_dtensor = replace(framework("fsdp"), name="fsdp, inputs kept", gathered_inputs=1.0)
cluster, batch = Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=1536, sequence_length=2048)
three = Plan(tp=4, pp=8, dp=2, zero_stage=1, sequence_parallel=True, framework=by_dtensor)
in_3d = estimate(HUNDRED, cluster, three, batch)
show(draw_groups(in_3d, title="TP 4 x PP 8 x DP 2 on eight nodes, and what a rank sends in a step"),
     alt="Nodes are rows of 8 GPUs, a stage each: four TP ranks of replica 0, four of replica 1. Rings over tp and pairs over "
     "shard lie inside a node. Every GPU sends down to the same place in the next node, and gradients come back up.")

# %% [markdown]
# Nearly all goes over *tp*, inside nodes; *pp* alone leaves them.
#
# A rank is a point in a box with a side for each axis: the *mesh*. A collective runs in a *group*, ranks that differ in
# one coordinate alone. The groups of eight ranks, the last axis numbered fastest:

# %% tags=["nbval-check-output"]
DIMS = ParallelDims(pp=2, shard=2, tp=2)
for rank in range(DIMS.ranks):
    at = DIMS.coordinates(rank)
    print(f"rank {rank}: stage {at['pp']}, replica {at['shard']}, TP rank {at['tp']};",
          *(f"{axis} {DIMS.group(rank, axis)}" for axis in ("pp", "shard", "tp")))

# %% [markdown]
# **Question.** Which ranks must read the same rows of the batch as rank 5, itself included? Write a set.

# %%
same_rows = ...
check("14.same_rows", same_rows)

# %% [markdown]
# ### Why 4 x 8 x 2
#
# Nine layouts. One stage means FSDP (ZeRO-3), more mean ZeRO-1. Look at verdicts first, then at waits. *For the
# pipeline* means sends and the *bubble*, while stages fill and empty.

# %%
def layout(sequences, tp, pp, dp, recompute="none", rows=1, ports=1.0):
    each = min(rows, sequences // dp)  # sequences of a micro-batch: no more than a replica has
    plan = replace(three, tp=tp, pp=pp, dp=dp, recompute=recompute, micro_batch=each,
                   sequence_parallel=tp > 1, zero_stage=1 if pp > 1 else 3)
    nodes = replace(cluster, network_bytes_per_second=cluster.network_bytes_per_second * ports)
    return estimate(HUNDRED, nodes, plan, replace(batch, sequences=sequences))


LAYOUTS = [(8, 8, 1), (8, 4, 2), (4, 16, 1), (4, 8, 2), (4, 4, 4), (4, 4, 4, "full"), (2, 16, 2),
           (1, 1, 64, "full"), (1, 1, 64, "full", 6)]
found = {n: [layout(n, *sizes) for sizes in LAYOUTS] for n in (1536, 64)}
display(layout_table(found, caption=f"100B on 64 A100s of {cluster.device.memory_bytes / GIB:.1f} GiB; but for the last column, at 1536 sequences (predicted)"))
print("4 x 8 x 2, share of the peak:", ", ".join(f"{layout(n, 4, 8, 2).mfu:.0%} at {n} sequences" for n in found), "(predicted)")

# %% [markdown]
# **Read it.** *What fits.* Without recomputation TP 4 needs eight stages, and TP 2 with sixteen lacks 2.9 GiB.
#
# *What it costs.* TP 8 fits too, but waits 2.4 times as long for collectives: a group passes twice the tokens (8 x 8 x 1)
# or layers (8 x 4 x 2), round a longer ring. Sixteen stages wait longer for the pipeline. Full recomputation, by which
# four stages fit, costs more than these waits. **By the planner: as few slices as fit, then as few
# stages, without recomputation.**
#
# 65% of the peak is high. 1536 sequences hide the bubble: at 64 it is 54%. [Korthikanti and
# others](https://arxiv.org/abs/2205.05198) published 51.4% for 175 billion parameters at 64 on 64 such GPUs, interleaved, a run
# that the planner was set on.
#
# FSDP, recomputed, fits too; with six sequences a micro-batch it waits 9.2 s, not 54.9. Whether it will do hangs on the
# ports between nodes:

# %%
for ports in (2, 1, 1 / 2, 1 / 4):
    rivals = {n: [layout(n, *sizes, ports=ports).step_seconds for sizes in ((1, 1, 64, "full", 6), (4, 8, 2))] for n in found}
    said = (f"{n} sequences: FSDP {a:5.1f} s, 4 x 8 x 2 {b:5.1f} s, {a / b:.2f} times;" for n, (a, b) in rivals.items())
    print(f"ports of {ports * cluster.network_bytes_per_second_per_gpu / GB:5.2f} GB/s a GPU.", *said, "(predicted)")

# %% [markdown]
# **Read it.** 4 x 8 x 2 hardly notices slower ports; FSDP does, most with 64 sequences, one a micro-batch. Of the runs
# that the planner was set on, 80% took 0.9 to 1.15 times its seconds ([lesson 15](15_design_studio.ipynb)), so 1.13 times
# tells no layouts apart, not even TP 8 from TP 4; 3.39 does. **FSDP will do where ports are fast and batches large.**
# Elsewhere, compose.
#
# ## 2. Compose
#
# The first condition: the losses of one process. It runs in float64, so that a wrong sum cannot hide in rounding.

# %%
TINY = TransformerConfig(vocabulary=128, hidden=64, layers=4, heads=4, feedforward=192)
ROWS, LENGTH, MICRO_BATCHES, RATE, STEPS = 16, 32, 4, 3e-3, 6
TEXT = text_tokens(100_000).long()  # plain text, all below 128: words for both slices of the vocabulary


def tokens(step):
    starts = torch.randint(99_000, (ROWS,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def whole_model():
    torch.manual_seed(0)
    return Transformer(TINY).double()


# %%
def one_process(steps, tied=False):
    model = whole_model()
    if tied:
        model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, norms = [], []
    for step in range(steps):
        inputs, targets = tokens(step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


alone, norms_alone = one_process(STEPS)
print("losses:", *(f"{loss:.6f}" for loss in alone), f"({Evidence.MEASURED})")

# %% [markdown]
# A rank cuts away the layers of other stages, splits matrices, then shards what is left: FSDP2 must see the slices.
# `parallelize_module` is told how to split each layer of a block:

# %%
for name, style in block_styles(sequence=True).items():
    print(f"{name:18} {type(style).__name__}")

# %% [markdown]
# Column-parallel: each TP rank has some of a matrix's outputs; row-parallel: some of its inputs. Norms
# see a part of each sequence (sequence parallelism, SP).
#
# `apply_fsdp` makes ZeRO-1 of FSDP2: parameters stay gathered between micro-batches, gradients are reduced once.

# %%
def my_part(dims, model, zero_stage=1, mixed=False):
    mesh = device_mesh(dims.with_cp_in("shard"), "cpu")  # calls PyTorch's init_device_mesh
    if dims.pp > 1:
        blocks = (model.config.layers // dims.pp,) * dims.pp
        model = keep_chunk(model, blocks, mesh.get_local_rank("pp"))  # deletes all layers but this stage's
    if dims.cp > 1:  # a fourth axis, context parallelism (CP): ranks share each sequence (lesson 18)
        apply_cp(model, device_mesh(dims, "cpu")["cp"])
    if dims.tp > 1:
        apply_tp(model, mesh["tp"], sequence=True)  # parallelize_module(block, mesh["tp"], block_styles(True)), and the ends
    apply_fsdp(model, mesh, zero_stage=zero_stage, mixed=mixed)  # fully_shard(block, mesh=mesh["shard"]), then the rest
    return model, mesh


def my_passes(part, mesh, dims, micro_batch, micro_batches, length, dtype, zero_stage=1):
    positions = local_positions(dims, mesh.get_rank(), length)
    if dims.pp == 1:
        return accumulated_passes(part, micro_batch, positions, reduce_on_last_micro_batch(mesh, zero_stage=zero_stage))
    shape = (micro_batch, len(positions) // dims.tp, part.config.hidden)  # what a stage sends; the schedule need not find out
    # PyTorch's PipelineStage and Schedule1F1B:
    return pipeline_passes([part], mesh, positions, torch.empty(shape, dtype=dtype, device="meta"),
                           chunks=dims.pp, schedule="1F1B", micro_batches=micro_batches)


# %% [markdown]
# ### A step: four sums
#
# Each number is added up over *some* axes:
#
# | number | added up over | why |
# |---|---|---|
# | tokens that the loss is over | shard | other replicas read other rows |
# | the loss | pp, shard | only the last stage has one |
# | gradients | shard, and wherever else a copy lies | every copy must take the same step |
# | the square of the norm | pp, shard, tp | all ranks scale alike; a *copy* counts once |
#
# A norm layer's weights are copies on every TP rank, and each sees other tokens: FSDP2 adds up their gradients over tp.

# %%
def my_clip(part, mesh, limit, axes=("pp", "shard", "tp"), counted_elsewhere=()):
    """Scale gradients down to one norm of at most `limit`; gives the norm before."""
    square = torch.zeros((), dtype=torch.float64)
    for p in part.parameters():
        if any(p is other for other in counted_elsewhere):
            continue
        # `placements` says of each axis whether its ranks hold parts of the gradient or copies.
        copied = [axis for axis, lies in zip(("shard", "tp"), p.grad.placements, strict=True) if lies.is_replicate()]
        if all(mesh.get_local_rank(axis) == 0 for axis in copied):  # of copies, the first one counts
            square += p.grad.to_local().square().sum()
    norm = sum_over(mesh, axes, square).sqrt()  # an all-reduce along each axis
    torch.nn.utils.clip_grads_with_norm_(part.parameters(), limit, norm)
    return norm


# %% [markdown]
# The loss is a sum over tokens, divided by the number of all. FSDP2 takes the *mean* of gradients over
# replicas, where the sum is due: each rank multiplies by replicas / all tokens.

# %%
def my_rows(dims, step):
    return local_rows(dims, dist.get_rank(), *tokens(step))


def train(dims, steps, read=my_rows, clipped=my_clip, after_backward=None, model=whole_model):  # section 3 plants other ones
    part, mesh = my_part(dims, model())
    passes = my_passes(part, mesh, dims, ROWS // dims.data_ranks // MICRO_BATCHES, MICRO_BATCHES, LENGTH, torch.float64)
    optimizer, losses, norms, replicas = adamw([part], RATE), [], [], mesh["shard"].size()
    positions = local_positions(dims, dist.get_rank(), LENGTH)  # of the tokens that this rank reads
    finish = after_backward(part, mesh) if after_backward else lambda: None
    for step in range(steps):
        inputs, targets = (t[:, positions] for t in read(dims, step))
        all_tokens = sum_over(mesh, ["shard"], torch.tensor(targets.numel())).item()
        with loss_parallel():  # logits are split over the vocabulary
            loss = passes(inputs, targets, replicas / all_tokens)  # adds up the loss over pp, gradients over shard
        finish()
        norms.append(clipped(part, mesh, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum_over(mesh, ["shard"], loss).item() / replicas)
    return losses, norms


# %%
ranks = run_ranks(lambda: train(DIMS, STEPS), 8, timeout_seconds=300)
for number, name, right in ((0, "losses", alone), (1, "norms", norms_alone)):
    apart = max(abs(a / b - 1) for rank in ranks for a, b in zip(rank[number], right, strict=True))
    print(f"{name}: at most {apart:.0e} from those of one process, in {STEPS} steps on 8 ranks ({Evidence.MEASURED})")
    assert apart < 1e-9, f"{name}: another model is trained; which of the four sums is wrong?"

# %% [markdown]
# **Read it.** Every rank agrees with one process to float64's last digits.
#
# ## 3. The usual bugs
#
# Three bugs break this, and run without error:
#
# 1. **The norm of one stage.** PyTorch's own `clip_grad_norm_` adds up over `shard` and `tp`. It knows no stages: each
#    clips by a norm of its own.
# 2. **Other rows within a TP group.** A sampler seeded by the place along `tp` gives two TP ranks different rows.
# 3. **Tied embeddings, not tied across stages.** Embedding and head are one matrix. The first and the last stage have
#    copies, each with a part of the gradient.

# %%
def clip_by_stage(part, mesh, limit):
    return my_clip(part, mesh, limit, axes=("shard", "tp"))  # the norm that PyTorch's clip_grad_norm_ finds


def shuffled_by_rank(dims, step):
    seed = dims.coordinates(dist.get_rank())["tp"]
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    return local_rows(dims, dist.get_rank(), *(rows[order] for rows in tokens(step)))


# %% [markdown]
# The right way for bug 3: the first and the last stage add up their parts, and the norm counts the matrix on one of them.
# Without the second half, it counts twice: a fourth wrong run.

# %%
def add_up_ends(part, mesh):
    """Gives what to call after backward: both copies of the matrix get the sum of their gradients."""
    pipelines = mesh.mesh.flatten(1).T  # a row for each pipeline: its ranks, from first stage to last
    ends, _ = dist.new_subgroups_by_enumeration(pipelines[:, [0, -1]].tolist())
    def after_backward():
        end = part.head if part.embed is None else part.embed
        if end is not None:
            dist.all_reduce(end.weight.grad.to_local(), group=ends)
    return after_backward


def clip_tied(part, mesh, limit):
    return my_clip(part, mesh, limit, counted_elsewhere=[part.head.weight] if part.head is not None else [])


# %% [markdown]
# **Predict**: which bug shows in the first loss, which in the norm, which gives ranks different norms?

# %%
def tied_model():
    model = whole_model()
    model.head.weight.data.copy_(model.embed.weight.data)
    return model


def every_bug(steps):
    added = {"model": tied_model, "after_backward": add_up_ends}
    cases = {"1 norm of one stage": {"clipped": clip_by_stage}, "2 other rows in a TP group": {"read": shuffled_by_rank},
             "3 tied, not added up": {"model": tied_model}, "3 tied, counted twice": added,
             "tied, right": {**added, "clipped": clip_tied}}
    return {name: train(DIMS, steps, **change) for name, change in cases.items()}


bugs = run_ranks(every_bug, 8, 2, timeout_seconds=300)  # two steps each
tied_alone = one_process(2, tied=True)

# %% jupyter={"source_hidden": true}
references = {name: tied_alone if "tied" in name else (alone[:2], norms_alone) for name in bugs[0]}
show(draw_bugs(bugs, references, title="Each run against one process"),
     alt="A row a run. Left, loss less that of one process in two steps: other rows differ from step 1, copies that are not added "
     "up from step 2, the norm of one stage and the copy counted twice hardly. Right, the norm of step 1 on eight ranks: "
     "all four bugs differ, and bug 1 alone differs between stages. The right run agrees everywhere.")
pairs = [pair for rank in bugs for found, right in zip(rank["tied, right"], tied_alone, strict=True) for pair in zip(found, right, strict=True)]
assert all(abs(a / b - 1) < 1e-9 for a, b in pairs), "tied, right: the copies are not one matrix; who adds up, and who is counted?"

# %% [markdown]
# **Read it.** Only other rows change the first loss. The norm shows every bug at once, and bug 1 alone gives two stages
# two norms. Two bugs hardly change even the second loss: they only scale gradients, and AdamW's first update divides each
# by its own size. **Log the norm on every stage, and compare loss *and* norm of a small model's first steps with one
# process.**
#
# **Question.** SGD, TP 4 x PP 4, no clipping. The first loss is that of one process, the third is not. All ranks log one
# norm, 3% too low. With PP 1 all is well. Which bug is it: 1, 2 or 3?

# %%
which_bug = ...
check("14.which_bug", which_bug)

# %% [markdown]
# ## 4. Real size: the memory of every stage
#
# The second condition: every stage fits. So far the planner's formula says so. A simulation does without: a rank
# runs its whole program on tensors without data. First Korthikanti's 175 billion on TP 8 x PP 8:

# %%
LARGE, TOKENS = model_shape("megatron-175b"), 2048
megatron = Plan(tp=8, pp=8, virtual_stages=3, sequence_parallel=True, recompute="selective",
                attention="unfused", dropout=True)
planned = estimate(LARGE, cluster, megatron, Batch(sequences=64, sequence_length=TOKENS))
states, kept = states_and_kept(megatron_stage(LARGE, megatron, 0, length=TOKENS))
first = planned.stages[0]
for name, size, expected in (("states", states, first.state_bytes), ("activations", kept, first.bytes_by_category["activations"])):
    print(f"175B, stage 0: {name} {size / GIB:.2f} GiB (simulated), {expected / GIB:.2f} (predicted)")
    assert abs(size / expected - 1) < 0.03, f"{name}: program and planner disagree"

# %% [markdown]
# ### The layout of section 1: 100 billion
#
# `my_part` and `my_passes` at full size, on stages 0, 1 and 7, then on stage 0 of 2 x 16 x 2:

# %%
def at_size(shape, dims, rank, micro_batches, zero_stage=1):
    """One rank of `dims`, made by `my_part` and run by `my_passes`, on tensors without data."""
    return simulated_rank(shape, dims, rank, part_of=my_part, passes_of=my_passes, micro_batches=micro_batches,
                          length=TOKENS, zero_stage=zero_stage)


# %%
# Gradients exist from the first backward on. The ninth micro-batch then fills the eighth place in flight on stage 0.
dims, few = three.dims, 9
ours = {stage: at_size(HUNDRED, dims, dims.rank(pp=stage), few) for stage in (0, 1, 7)}
for stage, run in ours.items():
    print(f"stage {stage}: tensors {run.peak_bytes / GIB:.1f} GiB (simulated), {in_3d.stages[stage].allocated_bytes / GIB:.1f} (predicted)")
slim = layout(1536, 2, 16, 2)
stage_0, tensors = slim.stages[0], at_size(HUNDRED, slim.plan.dims, 0, 17).peak_bytes  # of 16 stages: 16 in flight
print(f"2 x 16 x 2, stage 0: tensors {tensors / GIB:.1f} GiB (simulated), {stage_0.allocated_bytes / GIB:.1f} (predicted); with context "
      f"{(tensors + stage_0.context_bytes) / GIB:.1f} of {cluster.device.memory_bytes / GIB:.1f} (context predicted)")

# %% jupyter={"source_hidden": true}
for times in (1, 2, 8):
    wide = estimate(replace(HUNDRED, vocabulary=times * HUNDRED.vocabulary), cluster, three, batch).stages
    print(f"vocabulary x {times}: stage 0 needs {wide[0].needed_bytes / GIB:.1f} GiB, stage 7 {wide[7].needed_bytes / GIB:.1f} (predicted)")
show(draw_stage_memory(in_3d, title="100B, TP 4 x PP 8 x DP 2: one GPU of each stage at its\nfullest moment (diamonds: no workspaces)",
                       simulated={stage: run.peak_bytes for stage, run in ours.items()}),
     alt="Stacked bars of memory for 8 stages, all below the 80 GB card. Activations shrink from stage 0 to 5; on stages 6 and 7 "
     "temporaries stand in their place. Diamonds for stages 0, 1 and 7 lie below the top of the tensors.")

# %% [markdown]
# **Read it.** Of $p$ stages, stage $i$ has $p - i$ micro-batches *in flight*: their activations wait for
# backward. So **stage 0 decides whether the plan fits**. The last stage has the logits, yet with eight
# times the vocabulary stage 0 stays fullest.
#
# For stages 6 and 7 the planner finds the optimizer's step fullest, with its temporaries (grey). It counts whole
# gradients there, where FSDP2 has shards left, and lies 8% above the program on stage 7; elsewhere 2% to 5%. By
# the program, 2 x 16 x 2 has 0.8 GiB to spare for gaps between the allocator's blocks: too little to plan on.
#
# ## 5. The bytes on every link
#
# The third condition: few bytes leave the nodes. The rank of stage 1 has also counted what it put into collectives.
# In a ring of n, an all-gather makes it send n - 1 times that, a reduce-scatter (n - 1)/n.

# %%
def sent_by_axis(run, dims):
    sent = Counter()
    for row in run.traffic:
        if not row.at_startup:
            sent[row.axis] += ring_bytes(row.collective, row.payload_bytes, dims.sizes[row.axis])
    return sent


# %%
print(*(row for row in ours[1].traffic if row.payload_bytes > 1e6 and not row.at_startup), sep="\n")
counted = sent_by_axis(ours[1], dims)
expected = axis_bytes(HUNDRED, three, Batch(sequences=few * three.dp, sequence_length=TOKENS))[1]
for axis in ("tp", "pp", "shard"):
    print(f"{axis:>5}: {counted[axis] / GB:8.3f} GB sent a step (simulated), {expected[axis] / GB:8.3f} (predicted)")
    assert abs(counted[axis] / expected[axis] - 1) < 0.001, f"{axis}: the planner counts other bytes"

# %% [markdown]
# **Read it.** Traffic over *tp* and *pp* grows with the micro-batches; *shard* sends once a step. From here this rank
# stands for all 64.
#
# Which bytes leave a node depends on **where neighbours lie**. Ranks are numbered axis by axis, eight to a node:
# `tp < shard < pp` counts along *tp* first:

# %%
def leaving(order, sent, per_node=8):
    """Bytes that leave nodes in a step, by axis; ranks are numbered with the last axis of `order` fastest."""
    places = list(itertools.product(*(range(dims.sizes[axis]) for axis in order)))
    node = {place: number // per_node for number, place in enumerate(places)}
    left = dict.fromkeys(order, 0.0)
    for place, (i, axis) in itertools.product(places, enumerate(order)):
        if axis == "pp" and place[i] == dims.pp - 1:
            continue  # the last stage does not send to the first
        neighbour = (*place[:i], (place[i] + 1) % dims.sizes[axis], *place[i + 1 :])
        left[axis] += sent[axis] * (node[place] != node[neighbour])
    return left


# %%
# What a rank between the ends sends; embedding and head are left out.
step_sent = {axis: counted[axis] * (1 if axis == "shard" else three.micro_batches(batch) / few) for axis in counted}
orders, port_bytes = {}, {}
for order in itertools.permutations(step_sent):
    name = " < ".join(reversed(order))
    orders[name] = leaving(order, step_sent)
    port_bytes[name] = busiest_port_bytes([(axis, dims.sizes[axis]) for axis in order], step_sent, 8)
orders = dict(sorted(orders.items(), key=lambda item: sum(item[1].values())))

# %% jupyter={"source_hidden": true}
share = cluster.network_share * BESIDE_TRAINING  # what collectives alone reach, and of that, beside training
seconds = {name: port_bytes[name] / (share * cluster.network_bytes_per_second_per_gpu) for name in orders}
show(draw_orders(orders, seconds, title=f"100B, {batch.sequences} sequences: what leaves nodes in a step, and seconds\nof the busiest port at {share:.0%} of its rate"),
     alt="Bytes of a step for six orders of axes, and seconds: the three whose nodes hold all of tp send about 1,000 GB, and the "
     "busiest port takes about 1 second; the others send over 120,000 and take 115 seconds.")

# %%
all_bytes = 64 * (step_sent["tp"] + step_sent["shard"]) + 56 * step_sent["pp"]  # the last of 8 stages has no next
best, *_, worst = (sum(left.values()) / all_bytes for left in orders.values())
print(f"of {all_bytes / GB:,.0f} GB well placed {best:.2%} leave nodes, badly {worst:.0%} (simulated); your bets {my_bet_percent_well}%, {my_bet_percent_badly}%")
badly = in_3d.step_seconds - in_3d.time.tensor_parallel + max(seconds.values())
print(f"the planner's step takes {in_3d.step_seconds:.0f} s; with tp between nodes {badly:.0f} s (predicted)")

# %% [markdown]
# **Read it.** **Keep *tp* inside the node**: a rank waits for it four times in every block and pass. The three good orders
# differ by a tenth of a second. A node also has room for both replicas, or two neighbouring stages: the batch decides.
#
# **Question.** From how many sequences in a batch on does the order tp < pp < shard leave fewer bytes between nodes
# than tp < shard < pp? Use `leaving` and `counted`.

# %%
turning_point = ...
check("14.turning_point", turning_point)

# %% [markdown]
# ### The same plan as files
#
# Megatron-LM numbers ranks tp < shard < pp, with `--use-tp-pp-dp-mapping` tp < pp < shard. `export` writes
# `launch.sh` for PyTorch's `train.py`, and `megatron.sh`:

# %%
job = export(HUNDRED, cluster, replace(three, framework="fsdp"), batch)
print("megatron.sh:", *(flag for flag in " ".join(job.megatron).split("--") if "parallel" in flag or "batch" in flag), sep=" --")
print(f"written to build/lesson-14: {len(job.write(here.root / 'build' / 'lesson-14'))} files")  # git ignores this folder

# %% [markdown]
# ## 6. One billion on 64 GPUs
#
# Does a small model need these axes? Llama 3.2 1B, vocabulary 128,256, on one card, four micro-batches a step:

# %%
ONE, one_gpu = model_shape("llama-3.2-1b"), Cluster(gpu="A100-80GB", nodes=1, gpus_per_node=1)
print(f"states: 16 x {ONE.parameter_count / 1e9:.2f}B = {16 * ONE.parameter_count / GB:.1f} GB (predicted)")
for n in (8, 16, 32):
    found = estimate(ONE, one_gpu, Plan(framework="fsdp", micro_batch=n, recompute="full"), Batch(sequences=4 * n, sequence_length=TOKENS))
    print(f"{n:>2} x {TOKENS} tokens, recomputed: {found.verdict}, {found.peak.needed_bytes / GIB:.0f} GiB,",
          f"of which logits {found.peak.bytes_by_category['logits and loss'] / GIB:.0f} GiB (predicted)")

# %% [markdown]
# **Read it.** No: the **logits** fill the card, and FSDP does not share those out. Take smaller
# micro-batches, or the loss in chunks ([lesson 05](../intermediate/05_checkpointing.ipynb)). Data parallelism is enough;
# its schemes send different amounts. HSDP (hybrid) shards states inside nodes; gradients alone go between.
# Micro-batches of 8 over 10 GbE:

# %% jupyter={"source_hidden": true}
# By scheme: bf16 parameters gathered and rounds of fp32 gradients sent in a step of m micro-batches, and ranks of a ring.
SCHEMES = {"ZeRO-1": lambda m: (1, 1, 64), "HSDP, between nodes once": lambda m: (0, 2, 8),
           "DDP, no_sync": lambda m: (0, 2, 64), "FSDP": lambda m: (2 * m, m, 64)}
slow = replace(cluster, network_bytes_per_second=1.25 * GB)
rate = slow.network_bytes_per_second * slow.network_share * BESIDE_TRAINING
for name, scheme in SCHEMES.items():
    gathers, rounds, ring = scheme(4)
    sent = (2 * gathers + 4 * rounds) * (ring - 1) / ring
    print(f"{name:25} {sent:4.1f} bytes a parameter leave a node, {ONE.parameter_count * sent / rate:3.0f} s a step (predicted)")
read, half = 4 * 8 * TOKENS, one_gpu.device.peak_flops_per_second("bf16") / 2
print(f"at {rate / slow.network_bytes_per_second:.0%} of 1.25 GB/s, as collectives reach on Ethernet beside training; computing 4 x 8 x {TOKENS} tokens a GPU, recomputed, takes "
      f"{8 * ONE.parameter_count * read / half:.0f} s at half the peak; 64 GPUs read {64 * read / 1e6:.1f} million tokens a step (predicted)")

# %% [markdown]
# **Read it.** Every scheme sends longer than the GPUs compute. FSDP's default gathers parameters twice and reduces
# gradients once *in every micro-batch*. The others send alike for one micro-batch or many, HSDP with
# `set_requires_all_reduce(False)` until the last. **Over 10 GbE take one of these, and as many micro-batches as your
# batch allows**: four are 4.2 million tokens.
#
# ## Recap
#
# The planner's choice is TP 4 x PP 8 x DP 2: as few slices as fit, then as few stages.
#
# 1. *Losses stay those of one process* if four sums and the rows are right: compare loss *and* norm.
# 2. *Every stage fits* if stage 0 does, under 1F1B with equal stages and small logits.
# 3. *Few bytes leave the nodes* if *tp* stays inside: 0.72%, else 99%.
#
# FSDP will do where ports are fast and batches large.
#
# **Test yourself.** The batch of 4 x 8 x 2 falls from 1,536 to 16 sequences. What share of a step do stages now wait?
#
# <details><summary>Answer</summary>
#
# A replica has 8 micro-batches; stages fill and empty in 7 more turns: 7 / (8 + 7), or 47%.
#
# </details>
#
# **Where next.** The [lab](../../labs/advanced/14_three_dimensions.ipynb), in a copy (`make my-labs`), then its
# [solution](../../solutions/advanced/14_three_dimensions.ipynb).
#
# **References.** [Narayanan and others 2021](https://arxiv.org/abs/2104.04473).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** On every node: `torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d
# --rdzv-endpoint HOST:29500 train.py`. Yours are:
#
# - `build(stage)`: a stage's layers, in fp32, on the CPU. **Seed by the layer**, alike on every rank: `fully_shard` keeps
#   each rank's own shard and sends nothing. The keys of its `ModuleDict` `blocks` are the layers' numbers *in the whole model*.
# - `plan`: the `parallelize_module` plan of all its parameters, norms too; section 2 prints a block's.
# - `loader` (rows by *replica*, `mesh["shard"]`, in the same order after a restart), `loss_fn` (a micro-batch's mean), `device`
#   ("cuda" or "cpu"), and the sizes `pp`, `shard`, `tp` and `micro_batches`, at least `pp`.
# - `folder` and `save_every`, for checkpoints, and `resume`: one to go on from, or `None`.
#
# ```python
# import itertools
# import os
# import socket
# import torch
# import torch.distributed.checkpoint as dcp
# from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
# from torch.distributed.pipelining import PipelineStage, Schedule1F1B
# from torch.distributed.tensor.parallel import parallelize_module
#
# if device == "cuda":
#     torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before anything is built
# # The last axis is numbered fastest: TP groups lie in a node, if ranks are numbered node by node.
# mesh = init_device_mesh(device, (pp, shard, tp), mesh_dim_names=("pp", "shard", "tp"))
# # A TP group may lie on two nodes if pp is numbered fastest, if tp exceeds a node's GPUs, or if ranks are dealt to nodes
# # in turn (srun --distribution=cyclic).
# hosts = [""] * tp
# torch.distributed.all_gather_object(hosts, socket.gethostname(), group=mesh.get_group("tp"))
# assert len(set(hosts)) == 1, f"A TP group lies on {sorted(set(hosts))}: it must lie on one."
# stage = parallelize_module(build(mesh.get_local_rank("pp")), mesh["tp"], plan)  # slices first; moves them to the device
# # Recomputation and torch.compile, block by block, would stand here.
# policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# # Then shards. Parameters stay gathered between micro-batches, since each would gather them again.
# how = {"mesh": mesh["shard"], "mp_policy": policy, "reshard_after_forward": False}
# for block in stage.blocks.values():
#     fully_shard(block, **how)
# fully_shard(stage, **how)
# optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-4)
# pipe = PipelineStage(stage, mesh.get_local_rank("pp"), pp, torch.device(device), group=mesh.get_group("pp"))
# schedule = Schedule1F1B(pipe, n_microbatches=micro_batches, loss_fn=loss_fn)
#
# def clip(limit):
#     """After backward, on every stage: one norm over all three axes."""
#     parameters = [p for p in stage.parameters() if p.grad is not None]
#     square = torch.nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor() ** 2
#     torch.distributed.all_reduce(square, group=mesh.get_group("pp"))
#     torch.nn.utils.clip_grads_with_norm_(parameters, limit, square.sqrt())
#     return square.sqrt()
#
# # Flattened, the optimizer's state goes by the names of parameters, which no two stages share.
# options = StateDictOptions(flatten_optimizer_state_dict=True)
#
# def states(done):
#     model_state, optimizer_state = get_state_dict(stage, optimizer, options=options)
#     return {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(done)}
#
# done = 0
# if resume:  # saved with these sizes, or with others
#     state = states(0)
#     dcp.load(state, checkpoint_id=resume)
#     set_state_dict(stage, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)
#     done = int(state["step"])
#
# losses, norms = [], []
# for step, (inputs, targets) in enumerate(itertools.islice(loader, done, None), start=done + 1):  # past the rows used before
#     each = []  # the last stage's losses, one a micro-batch
#     given, wanted = [inputs] if pipe.is_first else [], targets if pipe.is_last else None
#     schedule.step(*given, target=wanted, losses=each, return_outputs=False)  # else the last stage keeps all logits
#     norms.append(clip(limit=1.0).item())
#     optimizer.step()
#     optimizer.zero_grad()
#     if pipe.is_last:
#         losses.append(torch.stack(each).mean().item())  # of this replica's rows
#     print(f"stage {pipe.stage_index}: norm {norms[-1]:.4f}", *(f"loss {one:.4f}" for one in losses[-1:]), flush=True)
#     if step % save_every == 0:  # each into a folder of its own: a save cut off leaves the last one whole
#         dcp.save(states(step), checkpoint_id=os.path.join(folder, f"step-{step}"))
# ```
#
# Left to you: unequal numbers of tokens (divide by all, as `train` does), logits split
# over tp (`loss_parallel()` around the step), tied embeddings (`add_up_ends`, `clip_tied`).
#
# **Megatron-LM.** In the course's folder: `shape` is a `model_shape(...)`, or a `ModelShape` of your own.
#
# ```python
# from utils import Batch, Cluster, Plan, estimate, export
#
# cluster, batch = Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=1536, sequence_length=2048)
# plan = Plan(tp=4, pp=8, dp=2, zero_stage=1, sequence_parallel=True, framework="megatron")
# print(estimate(shape, cluster, plan, batch))
# job = export(shape, cluster, plan, batch)
# job.write("run")  # run/megatron.sh, on every node, in a clone of Megatron-LM, HEAD_NODE set: ten steps of mock data
# ```
