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
# **Promise.** You put tensor, pipeline and data parallelism around one model on eight real ranks, and its
# losses equal those of one process. You plant the three bugs that such code usually has, and see what gives each
# away. Then 100 and 175 billion parameters on 64 simulated GPUs: the memory of every stage, the bytes on every link,
# and the order of axes that keeps nearly all of them inside the nodes.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 60 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |

# %% [markdown]
# ## A bet
#
# 100 billion parameters train on 8 nodes of 8 GPUs: tensor parallel over 4, pipeline over 8, data parallel
# over 2. Of all bytes that GPUs send in a step, how many percent leave their node, if the axes lie well on the nodes?
# And if badly? Write two guesses. Section 6 counts.

# %%
my_bet_percent_well, my_bet_percent_badly = 20, 50

# %% tags=["setup"]
here = setup("advanced/14")

# %%
import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.parallel import loss_parallel

from utils import GB, GIB, Batch, Cluster, Evidence, Plan, Transformer, TransformerConfig, check, draw_losses
from utils import draw_ranks, draw_stage_memory, estimate, export, run_ranks, score, scoreboard
from utils import show, simulate
from utils.catalog import ModelShape, model_shape
from utils.data import text_tokens
from utils.memory import held
from utils.parallel import ParallelDims, accumulated_passes, adamw, clip, cut, device_mesh, materialise, own_positions
from utils.parallel import own_rows, pipeline_passes, reduce_late, shard_states, share_sequences, split_tensors, sum_over
from utils.parallel import token_weight
from utils.planner import axis_bytes, framework, ring_bytes
from evidence.validation.simulation_megatron_stage import megatron_stage, states_and_kept
from evidence.validation.tables import source, table
from utils.lessons.lesson_14.orders import draw_orders

# %% [markdown]
# ## What you will be able to do
#
# - Compose three axes in a dozen lines, in the order that works.
# - Name, for each number of a step, the axes over which it must be added up.
# - Find the usual bugs from losses and norms.
# - Place axes on links by counting bytes, and predict the memory of each stage.
#
# On the map of memory, compute and communication this lesson spends **communication** where links are fast, to
# save **memory**. The [glossary](../00_glossary.ipynb) has the words. First the picture: where 64 ranks lie.

# %%
HUNDRED = ModelShape(name="100B", family="llama", layers=80, hidden=10_240, heads=80, feedforward=27_648,
                     vocabulary=32_000, max_sequence=2048)
by_dtensor = replace(framework("fsdp"), name="fsdp, inputs kept", gathered_inputs=1.0)  # what section 6 runs
cluster = Cluster(gpu="A100-80GB", nodes=8)
three = Plan(tp=4, pp=8, dp=2, zero_stage=1, sequence_parallel=True, framework=by_dtensor)
batch = Batch(sequences=1536, sequence_length=2048)
in_3d = estimate(HUNDRED, cluster, three, batch)
show(draw_ranks(in_3d, title="Two replicas, eight stages of four slices"),
     alt="8 nodes of 8 GPUs. Each node holds one stage: two replicas, each of four slices t0 to "
     "t3. Every hop from stage to stage leaves a node.")

# %% [markdown]
# ## 1. One rank, three coordinates
#
# A rank is a point in a box. Its *stage* says which layers it holds, its *slice* which part of each matrix, its
# *replica* which rows of the batch it reads. The axis of the replicas is named `shard`, since they share out the
# states. Ranks that differ in one coordinate alone form a group, and each collective runs in such a group. Ranks are
# numbered with the last axis fastest.

# %% tags=["nbval-check-output"]
DIMS = ParallelDims(pp=2, shard=2, tp=2)
for rank in range(DIMS.ranks):
    at = DIMS.coordinates(rank)
    print(f"rank {rank}: stage {at['pp']}, replica {at['shard']}, slice {at['tp']};",
          *(f"{axis} {DIMS.group(rank, axis)}" for axis in ("pp", "shard", "tp")))

# %% [markdown]
# **Question.** Which ranks must read the same rows of the batch as rank 5, itself included? Write a set.

# %%
same_rows = ...
check("14.same_rows", same_rows)

# %% [markdown]
# ## 2. Compose
#
# The reference is plain training in one process, in float64, so that a wrong sum cannot hide in rounding.

# %%
TINY = TransformerConfig(vocabulary=128, hidden=64, layers=4, heads=4, feedforward=192)
ROWS, LENGTH, MICRO_BATCHES, RATE, STEPS = 16, 32, 2, 3e-3, 4
TEXT = text_tokens(100_000).long() % 128  # ASCII, in both halves of the vocabulary


def tokens(step):
    starts = torch.randint(99_000, (ROWS,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def whole_model():
    torch.manual_seed(0)
    return Transformer(TINY).double()


# %%
def one_process(steps, limit=0.5, tied=False):
    model = whole_model()
    if tied:
        model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, norms = [], []
    for step in range(steps):
        inputs, targets = tokens(step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


alone, norms_alone = one_process(STEPS)
print("losses:", *(f"{loss:.6f}" for loss in alone), f"({Evidence.MEASURED})")
print("norms: ", *(f"{norm:.6f}" for norm in norms_alone))

# %% [markdown]
# Now eight ranks. **The order matters.** First the layers that a stage does not hold are cut
# away. Then sequences are shared (context parallelism, where there is any), then matrices are split, and at last
# what is left is sharded: FSDP2 must see the slices, not the whole matrices. It counts ranks of context parallelism
# as more ranks to shard over, since they hold the same parameters.

# %%
def my_part(dims, model, zero_stage=1, mixed=False):
    mesh = device_mesh(dims.with_cp_in("shard"), "cpu")
    if dims.pp > 1:
        blocks = (model.config.layers // dims.pp,) * dims.pp
        model = cut(model, blocks, mesh.get_local_rank("pp"))
    if dims.cp > 1:
        share_sequences(model, device_mesh(dims, "cpu")["cp"])
    if dims.tp > 1:
        split_tensors(model, mesh["tp"], sequence=True)
    shard_states(model, mesh, zero_stage=zero_stage, mixed=mixed)
    return model, mesh


# %% [markdown]
# Forward and backward of a step are the schedule's work. It must know the shape of the stream that stages send:
# with sequence parallelism each rank sends its own part of the sequence.

# %%
def my_passes(part, mesh, dims, micro_batch, micro_batches, length, dtype, zero_stage=1):
    positions = own_positions(dims, mesh.get_rank(), length)
    if dims.pp == 1:
        return accumulated_passes(part, micro_batch, positions, reduce_late(mesh, zero_stage=zero_stage))
    shape = (micro_batch, len(positions) // dims.tp, part.config.hidden)
    return pipeline_passes([part], mesh, positions, torch.empty(shape, dtype=dtype, device="meta"),
                           chunks=dims.pp, schedule="1F1B", micro_batches=micro_batches)


# %% [markdown]
# ## 3. A step: four sums
#
# Each number of a step is added up over *some* axes, and two of the usual bugs leave one out. *Data* is `shard`, with context
# parallelism in it where there is any:
#
# | number | added up over | why |
# |---|---|---|
# | tokens that the loss is over | data | other replicas read other rows |
# | the loss | pp, data | only the last stage has one |
# | gradients | data, and what else holds a copy | every copy must take the same step |
# | the square of the norm | pp, data, tp | all scale alike; a *copy* counts once |
#
# The training loop has a place for each. Three of its arguments let bugs in: `read`, `clipped` and `after_backward`.

# %%
def my_rows(dims, step):
    return own_rows(dims, dist.get_rank(), *tokens(step))


def clip_over_all(optimizer, mesh, limit):
    return clip(optimizer, mesh, limit)


def train(dims, steps, read=my_rows, clipped=clip_over_all, after_backward=None, limit=0.5, model=whole_model):
    part, mesh = my_part(dims, model())
    micro_batch = ROWS // dims.data_ranks // MICRO_BATCHES
    passes = my_passes(part, mesh, dims, micro_batch, MICRO_BATCHES, LENGTH, torch.float64)
    optimizer, losses, norms = adamw([part], RATE), [], []
    places = own_positions(dims, dist.get_rank(), LENGTH)
    for step in range(steps):
        inputs, targets = (t[:, places] for t in read(dims, step))
        with loss_parallel():
            loss = passes(inputs, targets, token_weight(targets, mesh))
        if after_backward is not None:
            after_backward(part, mesh)
        norms.append(clipped(optimizer, mesh, limit).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum_over(mesh, ["shard"], loss).item() / mesh["shard"].size())
    return losses, norms, [row.bytes for row in held(model=part, optimizer=optimizer)]


# %% [markdown]
# Two boxes of eight ranks: TP 2 x PP 2 x DP 2, and TP 2 x PP 2 x CP 2, where two ranks share each sequence.

# %%
BOXES = {"TP x PP x DP": DIMS, "TP x PP x CP": ParallelDims(pp=2, cp=2, tp=2)}


def both_boxes():
    return {name: train(dims, STEPS) for name, dims in BOXES.items()}


# %%
ranks = run_ranks(both_boxes, 8, timeout_seconds=120)
for name in BOXES:
    apart = max(abs(a / b - 1) for rank in ranks for a, b in zip(rank[name][0], alone, strict=True))
    norm = max(abs(a / b - 1) for rank in ranks for a, b in zip(rank[name][1], norms_alone, strict=True))
    print(f"{name}: losses {apart:.0e}, norms {norm:.0e} apart from one process, on the worst of 8 ranks")
    assert max(apart, norm) < 1e-9, f"{name}: another model is trained; which of the four sums is wrong?"

# %% [markdown]
# **Read it.** Losses and norms are those of one process, to float64's last digits, on every rank. What does a rank hold
# for it? ZeRO-1 shards the optimizer state over the data ranks; here those ranks shard the fp64 parameters, too,
# between steps. So 24 bytes a parameter (8 of its own, 16 of Adam's moments) are divided by *all eight* ranks. Only the
# weights of the norms are not cut into slices: each slice has a copy.

# %%
P = sum(p.numel() for p in whole_model().parameters())
copies = sum(p.numel() for name, p in whole_model().named_parameters() if "norm" in name)
on_ranks = [sum(rank["TP x PP x DP"][2]) for rank in ranks]
print(f"a rank holds {min(on_ranks):,} to {max(on_ranks):,} bytes between steps (measured); 24 P / 8 = {3 * P:,}")
steps_taken = sum(on_ranks) - 24 * (P + copies)
print(f"all ranks: {sum(on_ranks):,}; 24 (P + a second copy of {copies:,} norm weights) = {24 * (P + copies):,};"
      f" the rest, {steps_taken:,}, are step counts and bookkeeping")

# %% [markdown]
# ## 4. The usual bugs
#
# All three run without an error, on code that looks right.
#
# 1. **The norm over some axes only.** PyTorch's own `clip_grad_norm_` on a stage's parameters knows slices and
#    shards, and not that there are other stages. Each stage scales by a norm of its own.
# 2. **Other rows within a TP group.** A sampler that shuffles by the *rank's* number gives two slices of one
#    matrix different rows.
# 3. **Tied embeddings, not tied across stages.** Embedding and head are one matrix, of which the first and the
#    last stage have a copy each. Each copy gets a part of the gradient: they must be added up in every step.

# %%
def clip_by_stage(optimizer, mesh, limit):
    return clip(optimizer, mesh["shard", "tp"], limit)


def shuffled_by_rank(dims, step):
    seed = dims.coordinates(dist.get_rank())["tp"]
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    return own_rows(dims, dist.get_rank(), *(rows[order] for rows in tokens(step)))


def add_up_ends(part, mesh):
    """The right way: both copies of the matrix get the sum of their gradients."""
    end = part.head if part.embed is None else part.embed
    dist.all_reduce(end.weight.grad.to_local(), group=mesh.get_group("pp"))


# %% [markdown]
# In the tied runs the head starts with the embedding's values, so both copies start alike. Clipping is off
# there. **Predict** before you run: which bug shows in the losses, which in the norm, and which at the first step?

# %%
def tied_model():
    model = whole_model()
    model.head.weight.data.copy_(model.embed.weight.data)
    return model


def every_bug():
    tied = {"model": tied_model, "limit": math.inf}
    cases = {"norm by stage": {"clipped": clip_by_stage}, "other rows in a TP group": {"read": shuffled_by_rank},
             "tied, gradients added up": {**tied, "after_backward": add_up_ends}, "tied, not added up": tied}
    return {name: train(DIMS, STEPS, **change)[:2] for name, change in cases.items()}


bugs = run_ranks(every_bug, 8, timeout_seconds=120)
tied_alone = one_process(STEPS, limit=math.inf, tied=True)

# %%
rows = []
for name in bugs[0]:
    right, right_norms = tied_alone if name.startswith("tied") else (alone, norms_alone)
    difference = [abs(a / b - 1) for a, b in zip(bugs[0][name][0], right, strict=True)]
    rows.append({"": name, "loss of step 1": difference[0], "loss of the last step": difference[-1],
                 "norm, stage 0": bugs[0][name][1][0] / right_norms[0],
                 "norm, stage 1": bugs[-1][name][1][0] / right_norms[0]})
display(pd.DataFrame(rows).style.format(lambda x: x if isinstance(x, str) else f"{x:.2g}").hide()
        .set_caption("Losses: relative difference to one process. Norms of step 1: times the right one (measured)"))
curves = {"one process": alone, **{name: bugs[0][name][0] for name in list(bugs[0])[:2]}}
show(draw_losses(curves, minus="one process", title="Two bugs: loss minus that of one process", unit="nats"),
     alt="Loss over steps less that of one process. Other rows within a TP group are off from step 1; the norm "
     "by stage stays near zero.")

# %% [markdown]
# **Read it.** Other rows differ in the first loss already, by a thousandth. The other two bugs leave it right: nothing has
# been updated yet. After that they drift by less than a thousandth, and such a run looks healthy. (Adam divides a
# gradient by its own size, so a wrong scale cancels nearly; untied copies part slowly.) The norm tells them apart. By
# stage, two stages report two numbers, and neither is right. Untied, all stages agree, on a wrong one. **Log the norm
# on every stage, and compare the first steps with one process.**
#
# The tied run that is right has a norm that is too large all the same: it counts the shared matrix twice, once on each
# of the two stages. In the lab you leave one copy out.
#
# <div class="alert alert-warning"><b>Trap: data that hides a bug.</b> Why <code>% 128</code> above? In a vocabulary of
# 256 all characters of plain text lie in the first half, which slice 0 holds. Slice 1 would embed and score no token,
# and whatever rows it read, no loss would change.</div>
#
# **Question.** A run's first loss is that of one process, and later ones are not. All stages report the same norm, and
# it is wrong. Which of the three bugs is it: 1, 2 or 3?

# %%
which_bug = ...
check("14.which_bug", which_bug)

# %% [markdown]
# ## 5. Real size: the memory of every stage
#
# Now 175 billion parameters on 64 GPUs of 80 GB. TP 8 x PP 8 leaves DP 1, so there is nothing that ZeRO-1 could
# shard: "ZeRO-1 on each pipeline rank" saves nothing here. Three chunks of layers a stage make the bubble smaller.
# [Korthikanti and others 2022](https://arxiv.org/abs/2205.05198) published this run's memory in their Figure 1.
#
# One rank of the first, a middle and the last stage runs whole on simulated tensors: Megatron-LM's layers, as
# `evidence.validation` has them after its source, all passes of the schedule. Between them the table scales
# stage 4's activations by blocks in flight (a chunk is four).

# %%
LARGE, TOKENS = model_shape("megatron-175b"), 2048
megatron = Plan(tp=8, pp=8, virtual_stages=3, sequence_parallel=True, recompute="selective",
                attention="unfused", dropout=True)
planned = estimate(LARGE, cluster, megatron, Batch(sequences=64, sequence_length=TOKENS))
whole = {stage: megatron_stage(LARGE, megatron, stage, length=TOKENS) for stage in (0, 4, 7)}
show(draw_stage_memory(planned, title="One GPU of each stage of 175B",
                       simulated={stage: run.peak_bytes for stage, run in whole.items()}),
     alt="Stacked bars of memory for 8 stages, below the 80 GB card; activations shrink from stage to stage. Diamonds "
     "for stages 0, 4 and 7 lie on the bars.")

# %%
a_block = states_and_kept(whole[4])[1] / planned.stages[4].in_flight
rows = []
for i, stage in enumerate(planned.stages):
    states, kept = states_and_kept(whole[i]) if i in whole else (math.nan, a_block * stage.in_flight)
    rows.append({"stage": i, "blocks in flight": f"{stage.in_flight:.0f}", "states, predicted": stage.state_bytes / GIB,
                 "simulated": states / GIB, "activations, predicted": stage.bytes_by_category["activations"] / GIB,
                 "simulated ": kept / GIB, "by": "whole run" if i in whole else "in flight"})
display(pd.DataFrame(rows).style.format(precision=2, na_rep="").hide().set_caption("175B, GiB of one GPU"))
paper = next(row for row in table("korthikanti_figure1") if row["model"] == "175B")
published = [float(paper[name]) for name in ("fig1_param_opt_gib", "fig1_act_seqsel_gib")]
mean_states = sum(stage.state_bytes for stage in planned.stages) / 8 / GIB
ours = [states_and_kept(whole[4])[0] / GIB, states_and_kept(whole[0])[1] / GIB]
print(f"published: states {published[0]:.1f}, activations of the first stage {published[1]:.1f} GiB")
print(f"simulated: {ours[0]:.1f} (a stage without embedding or head), {ours[1]:.1f}; predicted mean {mean_states:.1f}")
for found, printed in zip(ours, published, strict=True):
    assert abs(found / printed - 1) < 0.03, f"{found:.2f} GiB is not the published {printed:.2f}"

# %% [markdown]
# **Read it.** Figure 1 counts the parameters of the blocks alone: it agrees with a stage in the middle. The first and
# last stage have the embedding and the head on top. The 0.42 GiB between prediction and simulation on stage 0 are its
# table of positions, which the simulated rank lacks. Stage 0 has the most in flight, so **stage 0 decides whether the
# plan fits**.
# The paper's activations and the planner's are formula against formula; only the simulation counts tensors.
#
# ## 6. The bytes on every link
#
# The functions of section 2 now build the 100B model, on the meta device, and `simulate` runs one of its 64 ranks, in
# the second of eight stages. It counts each collective by axis, and its payload: what a rank brings to an all-gather, or
# the whole that a reduce-scatter adds up. What a rank of a ring sends follows.

# %%
def at_size(shape, dims, rank, micro_batches, zero_stage=1):
    kept, config = {}, TransformerConfig.from_shape(shape)

    def build():
        with torch.device("meta"):
            model = Transformer(config)
        part, mesh = my_part(dims, model, zero_stage, mixed=True)
        materialise([part], mesh, torch.device("cpu"))
        kept["mesh"] = mesh
        kept["passes"] = my_passes(part, mesh, dims, 1, micro_batches, TOKENS, torch.bfloat16, zero_stage)
        return part, adamw([part], 1e-4)

    def step(part, optimizer):
        rows = torch.zeros(micro_batches, TOKENS, dtype=torch.long)
        with loss_parallel():
            kept["passes"](rows, rows, 1.0)
        clip(optimizer, kept["mesh"], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return simulate(build, step, device="A100 80GB", world=dims, rank=rank, name=f"{shape.name}: {dims}")


# %%
def sent_by_axis(run, dims):
    sent = Counter()
    for row in run.traffic:
        if not row.at_startup:
            sent[row.axis] += ring_bytes(row.collective, row.payload_bytes, dims.sizes[row.axis])
    return sent


dims, few = three.dims, 8
second = at_size(HUNDRED, dims, dims.rank(pp=1), few)
for row in second.traffic:
    if row.payload_bytes > 1e6 and not row.at_startup:
        print(row)
counted = sent_by_axis(second, dims)
kept = second.breakdown["activations"] / GIB, in_3d.stages[1].bytes_by_category["activations"] / GIB
print(f"peak {second.peak_bytes / GIB:.1f} GiB, {kept[0]:.1f} of it activations (simulated);",
      f"{in_3d.stages[1].allocated_bytes / GIB:.1f}, {kept[1]:.1f} of it activations (predicted)")
expected = axis_bytes(HUNDRED, three, Batch(sequences=few * three.dp, sequence_length=TOKENS))[1]
for axis in ("tp", "pp", "shard"):
    print(f"{axis:>5}: {counted[axis] / GB:8.3f} GB sent a step (simulated), {expected[axis] / GB:8.3f} (predicted)")
    assert abs(counted[axis] / expected[axis] - 1) < 0.001, f"{axis}: the planner counts other bytes"

# %% [markdown]
# **Read it.** The planner's bytes and the program's agree within a tenth of a percent. What the planner leaves out are
# gradients of the norm weights over *tp* and the few numbers of loss and norm. The simulated peak is 4% above the
# predicted one, nearly all of it in activations: the planner counts what a block must keep. Both are without CUDA's
# context.
#
# A real step has 1536 sequences, so each replica passes 768 through, not eight. Traffic over *tp* and *pp* grows with the
# micro-batches; that of data parallelism comes once a step.
#
# Which of it leaves the node depends on **where neighbours lie**. Number the ranks axis by axis, put eight to a node,
# and walk along every ring. The order `tp < shard < pp` counts along *tp* first.

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
m = three.micro_batches(batch)
step_sent = {axis: counted[axis] * (1 if axis == "shard" else m / few) for axis in ("tp", "pp", "shard")}
orders = {" < ".join(reversed(order)): leaving(order, step_sent) for order in itertools.permutations(step_sent)}
orders = dict(sorted(orders.items(), key=lambda item: sum(item[1].values())))
show(draw_orders(orders, title="100B, 1536 sequences: bytes that leave nodes in a step, by order of axes"),
     alt="Six bars. The three whose nodes hold all of tp are small; the others are many times longer, nearly all of it tp.")

# %%
all_bytes = 64 * (step_sent["tp"] + step_sent["shard"]) + 56 * step_sent["pp"]  # the last of 8 stages has no next
port = cluster.network_bytes_per_second_per_gpu
for order, left in orders.items():
    total = sum(left.values())
    print(f"{order:<18}{total / GB:10,.0f} GB leave nodes, {total / all_bytes:6.2%} of all:",
          f"{total / (64 * port):7.1f} s over the network")
best, *_, worst = (100 * sum(left.values()) / all_bytes for left in orders.values())
print(f"well placed {best:.2f}%, badly {worst:.0f}% (simulated); your bets {my_bet_percent_well}% and {my_bet_percent_badly}%")
print(f"the planner's whole step: {in_3d.step_seconds:.0f} s (predicted)")

# %% [markdown]
# **Read it.** *tp* inside the nodes: that was folklore, here it is counted. It need not be innermost: the first two
# orders fill each node with the same ranks. A node of eight has room for the four slices and one more pair. The first
# two orders put both replicas there, the third two neighbouring stages. Which is better depends on the batch: data
# parallelism sends its gradients once a step, the pipeline a stream for each micro-batch. **The order is an outcome of
# bytes, not a law.** The lab has cases where no order of whole axes is best.
#
# <div class="alert alert-warning"><b>Trap.</b> "Stages send little, so the network does not matter." On a fast one.
# Stages that share a node send each other nothing over it; a hop to another node sends all; and interleaving by v
# multiplies it by more than v.</div>
#
# **Question.** From how many sequences in a batch on does the order tp < pp < shard leave fewer bytes between nodes
# than tp < shard < pp? `leaving` and `counted` are yours to use.

# %%
turning_point = ...
check("14.turning_point", turning_point)

# %% [markdown]
# ## 7. ZeRO-3 against three dimensions
#
# ZeRO-3 needs no stages and no slices: 64 ranks share every parameter. It gathers the whole model twice for
# each micro-batch, and reduces its gradients. On which network does that pay?

# %%
zero_3 = Plan(dp=64, zero_stage=3, recompute="full", framework="fsdp", micro_batch=4)
for name, plan in {"TP 4 x PP 8 x DP 2": three, "ZeRO-3 over 64": zero_3}.items():
    stage = axis_bytes(HUNDRED, plan, batch)[plan.pp // 2]
    print(f"{name}: a rank sends", ", ".join(f"{size / GB:,.0f} GB over {axis}" for axis, size in stage.items() if size))
rows = []
for gb_per_second in (200, 50, 12.5, 1.25):
    on = replace(cluster, network_bytes_per_second=gb_per_second * GB)
    found = [estimate(HUNDRED, on, plan, batch) for plan in (three, zero_3)]
    rows.append({"network of a node, GB/s": gb_per_second} | {
        f"{name}, {what}": value for name, row in zip(("3D", "ZeRO-3"), found, strict=True)
        for what, value in (("s a step", row.step_seconds), ("MFU, %", 100 * row.mfu), ("GiB", row.peak.needed_bytes / GIB))})
display(pd.DataFrame(rows).style.format(precision=1).format("{:g}", subset=["network of a node, GB/s"]).hide()
        .set_caption("100B on 64 A100-80GB, bf16 products, fp32 states; GiB: the fullest GPU, with its context (predicted)"))
print(source("narayanan_table2").partition(",")[0])
for row in table("narayanan_table2"):
    if row["params_b"] == "174.6":
        print(f"  {row['scheme']:>6}, 174.6B on {row['n_gpus']:>4} GPUs: {row['tflops_per_gpu_incl_recompute']} TFLOP/s (published)")

# %% [markdown]
# **Read it.** On a fast network ZeRO-3 comes within an eighth, recomputing every block, with far less to build. As the
# network slows down it falls behind: its bytes grow with parameters *and* micro-batches and cross every link. Nearly
# all bytes of the three axes stay in the nodes. The published rows show the same from another side: with more GPUs at
# one batch, ZeRO-3 has less work to hide its gathers behind.
#
# ## 8. One billion on 64 GPUs
#
# It is said that one billion parameters do not fit one A100. At 16 bytes a parameter their states are 16 GB of 80. What
# would have to be true? Take Llama 3.2 1B, whose vocabulary has 128,256 tokens.

# %%
ONE, one_gpu = model_shape("llama-3.2-1b"), Cluster(gpu="A100-80GB", nodes=1, gpus_per_node=1)
print(f"states: 16 x {ONE.parameter_count / 1e9:.2f}B = {16 * ONE.parameter_count / GB:.1f} GB (predicted)")
shapes, rows = ((1, 2048), (8, 2048), (2, 8192), (4, 8192), (1, 65_536)), []
for (sequences, length), recompute in itertools.product(shapes, ("none", "full")):
    plan = Plan(framework="fsdp", micro_batch=sequences, recompute=recompute)
    found = estimate(ONE, one_gpu, plan, Batch(sequences=sequences, sequence_length=length))
    at = {name: found.peak.bytes_by_category[name] / GIB for name in ("logits and loss", "activations")}
    rows.append({"tokens": f"{sequences} x {length:,}", "recompute": recompute, "needs": found.peak.needed_bytes / GIB,
                 **at, "verdict": found.verdict})
display(pd.DataFrame(rows).style.format(precision=1).hide().set_caption("One A100-80GB: GiB at the peak (predicted)"))

# %% [markdown]
# **Read it.** With 2,048 tokens the peak is the optimizer's step, when no activations are left. 16,384 tokens in one
# micro-batch fit, too. Twice as many overflow with activations and logits, until blocks are recomputed. At 65,536 the
# **logits** alone overflow: 128,256 numbers for every token. Sharding over 64 GPUs does not help with either: each rank
# has its own. A smaller micro-batch does, while there is one, or context parallelism; a chunked loss helps with logits.
#
# FSDP shards over all 64; HSDP (hybrid) within each node, with eight replicas.

# %%
SCHEMES = {"FSDP": ParallelDims(shard=64), "HSDP": ParallelDims(replicate=8, shard=8)}
rows = []
for name, box in SCHEMES.items():
    run = at_size(ONE, box, 0, 1, zero_stage=3)
    sent = sent_by_axis(run, box)
    leaves = sent["shard"] if name == "FSDP" else 8 * sent["replicate"]  # a ring over all leaves a node once
    row = {"": name, "peak, GiB": run.peak_bytes / GIB, "sent over shard, GB": sent["shard"] / GB,
           "over replicate, GB": sent["replicate"] / GB, "leaves a node, GB": leaves / GB}
    for speed in (200, 1.25):
        on = replace(cluster, network_bytes_per_second=speed * GB)
        plan = Plan(dp=64, zero_stage=3, framework="fsdp", shard_ranks=box.shard)
        found = estimate(ONE, on, plan, Batch(sequences=64, sequence_length=TOKENS))
        row[f"s a step at {speed} GB/s"] = found.step_seconds
    found = estimate(ONE, on, plan, Batch(sequences=4 * 64, sequence_length=TOKENS))
    row["s of 4 micro-batches there"] = found.step_seconds
    rows.append(row)
    score("14", f"1B, {name} on 64", peak_bytes=run.peak_bytes, evidence=run.evidence)
display(pd.DataFrame(rows).style.format(precision=2).hide()
        .set_caption("Llama 3.2 1B, one sequence of 2,048 a rank (simulated; seconds predicted)"))

# %% [markdown]
# **Read it.** HSDP holds more, an eighth of the states instead of a 64th. The surprise is the network: hardly fewer
# bytes leave a node. FSDP's one ring over 64 ranks leaves each node once, with what one rank sends. HSDP keeps *gathers* inside the node, and then each of its eight ranks all-reduces its part of the gradients
# with the same rank of other nodes, in fp32: eight times the column "over replicate". On the fast network that all-reduce
# is what shows, since one sequence a rank is too little work to hide it, and HSDP is slower. On the slow one bytes decide,
# and HSDP is a tenth faster. It pays where you accumulate, and put the all-reduce off to the last micro-batch
# (`set_requires_all_reduce`): with four, FSDP's ring sends four times as much, HSDP's replicas the same.
#
# Neither is the fastest: one billion fits without sharding parameters.

# %%
for zero_stage in (0, 1, 2, 3):
    plan = Plan(dp=64, zero_stage=zero_stage, framework="fsdp")
    found = [estimate(ONE, replace(cluster, network_bytes_per_second=speed * GB), plan,
                      Batch(sequences=64, sequence_length=TOKENS)) for speed in (200, 1.25)]
    print(f"ZeRO-{zero_stage} over 64: {found[0].step_seconds:.3f} s at 200 GB/s, {found[1].step_seconds:5.2f} s at 1.25 GB/s, "
          f"{found[0].peak.needed_bytes / GIB:.1f} GiB (predicted)")

# %% [markdown]
# ZeRO-1 and 2 send the least: gradients and parameters once. FSDP gathers once more for backward; ZeRO-0's all-reduce
# sends fp32 gradients twice.
#
# ## 9. The same plan as files
#
# `export` writes the layout for each tool, and says what a tool cannot say.

# %%
from utils.techniques.deepspeed import deepspeed_problem
from utils.techniques.deepspeed_config import read_config

job = export(HUNDRED, cluster, replace(three, framework="fsdp"), batch)
print(json.dumps(job.deepspeed, indent=1))
for note in job.notes["deepspeed"][:3]:
    print("DeepSpeed:", note)

# %%
layout = [word for word in job.megatron if word.startswith("--")]
known = {row["name"] for row in table("megatron_arguments")}
assert set(layout) <= known, f"Megatron-LM has no {sorted(set(layout) - known)}"
text = " ".join(job.megatron)
print("Megatron-LM:", text[text.index("--tensor-model") : text.index("--attention-backend")])
print(f"all {len(layout)} options are in Megatron-LM's own list (published)")
if not (problem := deepspeed_problem("cpu")):
    print("DeepSpeed's class reads a batch of", read_config(job.deepspeed, three.dp).train_batch_size)
script = job.python
print(script[script.index("    mesh =") : script.index("\n\n\nif")])
files = job.write(here.root / "build" / "lesson-14")  # git ignores this folder
print(f"# written to build/lesson-14: {len(files)} files")

# %% [markdown]
# **Read it.** The script is section 2 once more. DeepSpeed's three axes are spread out: ZeRO-1 and the batch in the
# JSON, stages in a `PipelineModule`, slices in the model. With stages it refuses ZeRO-2 and 3.
#
# ### What does not divide
#
# Each of these is refused before a rank starts, or by all ranks alike.

# %%
def refused(what):
    try:
        what()
    except ValueError as error:
        print("refused:", str(error).partition("\n")[0])


small = Batch(sequences=10, sequence_length=2048)
refused(lambda: cut(whole_model(), (2, 1), 0))
refused(lambda: own_rows(ParallelDims(shard=3), 0, *tokens(0)))
refused(lambda: DIMS.check_world(6))
refused(lambda: Plan(tp=6).check(HUNDRED, batch))
refused(lambda: replace(three, micro_batch=3).micro_batches(small))

# %% [markdown]
# ## Which axis when
#
# | axis | take it when | costs | no use for |
# |---|---|---|---|
# | TP with SP | a block's states or activations are too large | four collectives a block and pass, on the fastest link | beyond a node; heads that do not divide |
# | PP | layers must be spread over nodes | a bubble, micro-batches in flight on the first stages | few micro-batches |
# | DP with ZeRO-1 | two replicas fit | gradients once a step | a single replica |
# | CP | sequences too long for a rank | keys and values of the other ranks | short sequences |
# | ZeRO-3, FSDP | a fast network, large micro-batches, no code for stages | the model twice a micro-batch | activations, logits |
# | HSDP | shards fit in a node; accumulation | an fp32 all-reduce, more states | a single replica |

# %%
score("14", "100B, stage 1 of 8, on 64", peak_bytes=second.peak_bytes, evidence=second.evidence)
for stage, run in whole.items():
    score("14", f"175B, stage {stage} of 8, on 64", peak_bytes=run.peak_bytes, evidence=run.evidence)
scoreboard("14")

# %% [markdown]
# ## Recap
#
# - A rank is a point in a box. Cut, share, split, shard: in this order.
# - A composed step needs four right sums, and the same rows within a TP group. Compare loss *and* norm of the first steps with one process.
# - Stage 0 has the most in flight: here it decides whether the plan fits.
# - The order of axes follows from bytes: count them.
#
# ### Test yourself
#
# 64 GPUs, TP 8 x PP 8. A colleague turns on ZeRO-1 to make room for a larger micro-batch. What happens?
#
# <details><summary>Answer</summary>
#
# Nothing. 8 x 8 x 1: there is one replica, and the optimizer state of a part is divided by one. The room must come
# from recomputation, or from fewer blocks in flight.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/advanced/14_three_dimensions.ipynb), in a copy: `make my-labs` makes one. Then compare with
# the [solution](../../solutions/advanced/14_three_dimensions.ipynb). [Lesson 15](15_design_studio.ipynb) searches all
# layouts at once.
#
# **References.** Narayanan and others 2021, *Efficient Large-Scale Language Model Training on GPU Clusters*,
# [arXiv:2104.04473](https://arxiv.org/abs/2104.04473). Korthikanti and others 2022,
# [arXiv:2205.05198](https://arxiv.org/abs/2205.05198). Rajbhandari and others 2019, *ZeRO*,
# [arXiv:1910.02054](https://arxiv.org/abs/1910.02054). PyTorch,
# [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) and
# [pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html).
