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
# **The question.** 64 GPUs, and a model that fits none of them. How do tensor, pipeline and data parallelism share it, so
# that its losses stay those of one process, every stage fits, and few bytes leave the nodes?
#
# **Promise.** You compose three axes on eight processes, and see what gives away the three usual bugs. Then 175 and 100
# billion parameters on 64 GPUs: three ranks of each plan are simulated whole.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 60 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |
#
# ## A bet
#
# 100 billion parameters on 8 nodes of 8 GPUs: tensor parallel over 4, pipeline over 8, data parallel
# over 2. Of all bytes sent in a step, how many percent leave their node, if the axes lie well on the nodes?
# And if badly? Section 5 counts.

# %%
my_bet_percent_well, my_bet_percent_badly = 20, 50

# %% tags=["setup"]
here = setup("advanced/14")

# %% jupyter={"source_hidden": true}
import itertools
from collections import Counter
from dataclasses import replace

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.parallel import loss_parallel

from utils import GB, GIB, Batch, Cluster, Evidence, Plan, Transformer, TransformerConfig, check
from utils import draw_stage_memory, estimate, export, run_ranks, score, scoreboard, show
from utils.catalog import ModelShape, model_shape
from utils.data import text_tokens
from utils.parallel import ParallelDims, accumulated_passes, adamw, apply_cp, apply_fsdp, apply_tp, device_mesh, keep_chunk
from utils.parallel import local_positions, local_rows, pipeline_passes, reduce_on_last_micro_batch, sum_over
from utils.planner import axis_bytes, framework, ring_bytes
from utils.planner.calibration import BESIDE_TRAINING
from evidence.validation.simulation_megatron_stage import megatron_stage, states_and_kept
from evidence.validation.tables import table
from utils.lessons.lesson_14.at_size import simulated_rank
from utils.lessons.lesson_14.bugs import draw_bugs
from utils.lessons.lesson_14.groups import draw_groups
from utils.lessons.lesson_14.orders import draw_orders

# %% [markdown]
# ## 1. One rank, three coordinates
#
# Four *slices* of each matrix, eight *stages* of layers, two *replicas*: where the ranks lie, and who sends to whom
# ([glossary](../00_glossary.ipynb)):

# %%
HUNDRED = ModelShape(name="100B", family="llama", layers=80, hidden=10_240, heads=80, feedforward=27_648,
                     vocabulary=32_000, max_sequence=2048)
# PyTorch's rules of memory; its tensor parallelism keeps the gathered inputs of a matrix until backward.
by_dtensor = replace(framework("fsdp"), name="fsdp, inputs kept", gathered_inputs=1.0)
cluster = Cluster(gpu="A100-80GB", nodes=8)
three = Plan(tp=4, pp=8, dp=2, zero_stage=1, sequence_parallel=True, framework=by_dtensor)
batch = Batch(sequences=1536, sequence_length=2048)
in_3d = estimate(HUNDRED, cluster, three, batch)
show(draw_groups(in_3d, title="Two replicas, eight stages of four slices"),
     alt="Nodes are rows of 8 GPUs: four slices of replica 0, four of replica 1. Rings of four slices and pairs of "
     "replicas lie inside a node. Every GPU sends straight down to its own slice and replica in the next node's stage.")

# %% [markdown]
# A rank is a point in a box. Its stage says which layers it holds, its slice which part of each matrix, its
# replica which rows of the batch it reads. A collective runs in a group: ranks that differ in one coordinate alone.
#
# | axis in the code | its places | other names |
# |---|---|---|
# | `pp` | stages | pipeline parallel |
# | `shard` | replicas, which share out the states | data parallel, DP, `dp` |
# | `tp` | slices | tensor parallel |
#
# Eight ranks; the last axis is numbered fastest:

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
# The reference: one process, in float64, so that a wrong sum cannot hide in rounding.

# %%
TINY = TransformerConfig(vocabulary=128, hidden=64, layers=4, heads=4, feedforward=192)
ROWS, LENGTH, MICRO_BATCHES, RATE, STEPS = 16, 32, 4, 3e-3, 4
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
print("norms: ", *(f"{norm:.6f}" for norm in norms_alone))

# %% [markdown]
# **The order matters.** First the layers that a stage does not hold are cut away. Then sequences are
# shared (context parallelism, CP), then matrices are split, and at last what is left is sharded: FSDP2
# must see the slices, not the whole matrices.

# %%
def my_part(dims, model, zero_stage=1, mixed=False):
    mesh = device_mesh(dims.with_cp_in("shard"), "cpu")
    if dims.pp > 1:
        blocks = (model.config.layers // dims.pp,) * dims.pp
        model = keep_chunk(model, blocks, mesh.get_local_rank("pp"))  # deletes all layers but this stage's
    if dims.cp > 1:
        apply_cp(model, device_mesh(dims, "cpu")["cp"])  # attention fetches the others' keys and values
    if dims.tp > 1:
        apply_tp(model, mesh["tp"], sequence=True)  # PyTorch's parallelize_module
    apply_fsdp(model, mesh, zero_stage=zero_stage, mixed=mixed)  # PyTorch's fully_shard, block by block
    return model, mesh


# %% [markdown]
# Forward and backward are the schedule's work. It must know what stages send: each rank its own part of the sequence.

# %%
def my_passes(part, mesh, dims, micro_batch, micro_batches, length, dtype, zero_stage=1):
    positions = local_positions(dims, mesh.get_rank(), length)
    if dims.pp == 1:
        return accumulated_passes(part, micro_batch, positions, reduce_on_last_micro_batch(mesh, zero_stage=zero_stage))
    shape = (micro_batch, len(positions) // dims.tp, part.config.hidden)
    # PyTorch's PipelineStage and Schedule1F1B:
    return pipeline_passes([part], mesh, positions, torch.empty(shape, dtype=dtype, device="meta"),
                           chunks=dims.pp, schedule="1F1B", micro_batches=micro_batches)


# %% [markdown]
# ### A step: four sums
#
# Each number of a step is added up over *some* axes. Ranks that share sequences count as part of `shard`.
#
# | number | added up over | why |
# |---|---|---|
# | tokens that the loss is over | shard | other replicas read other rows |
# | the loss | pp, shard | only the last stage has one |
# | gradients | shard, and wherever else a copy lies | every copy must take the same step |
# | the square of the norm | pp, shard, tp | all ranks scale alike; a *copy* counts once |
#
# A norm's weights are copied on every slice, and with sequence parallelism each slice sees other tokens: their
# gradients are added up over tp too. PyTorch's `SequenceParallel` does it.
#
# First the norm. `placements` says for each gradient whether an axis holds parts of it or copies.

# %%
def my_clip(part, mesh, limit, axes=("pp", "shard", "tp"), counted_elsewhere=()):
    """Scale gradients down to one norm of at most `limit`; gives the norm before."""
    square = torch.zeros((), dtype=torch.float64)
    for p in part.parameters():
        if any(p is other for other in counted_elsewhere):
            continue
        copied = [axis for axis, lies in zip(("shard", "tp"), p.grad.placements, strict=True) if lies.is_replicate()]
        if all(mesh.get_local_rank(axis) == 0 for axis in copied):  # of copies, the first one counts
            square += p.grad.to_local().square().sum()
    norm = sum_over(mesh, axes, square).sqrt()  # an all-reduce along each axis
    torch.nn.utils.clip_grads_with_norm_(part.parameters(), limit, norm)
    return norm


# %% [markdown]
# Then the loop. Bugs come in by `read`, `clipped` and `after_backward`.

# %%
def my_rows(dims, step):
    return local_rows(dims, dist.get_rank(), *tokens(step))


def train(dims, steps, read=my_rows, clipped=my_clip, after_backward=None, model=whole_model):
    part, mesh = my_part(dims, model())
    micro_batch = ROWS // dims.data_ranks // MICRO_BATCHES
    passes = my_passes(part, mesh, dims, micro_batch, MICRO_BATCHES, LENGTH, torch.float64)
    optimizer, losses, norms, replicas = adamw([part], RATE), [], [], mesh["shard"].size()
    places, mend = local_positions(dims, dist.get_rank(), LENGTH), (after_backward(part, mesh) if after_backward else lambda: None)
    for step in range(steps):
        inputs, targets = (t[:, places] for t in read(dims, step))
        all_tokens = sum_over(mesh, ["shard"], torch.tensor(targets.numel())).item()
        with loss_parallel():  # logits are split over the vocabulary
            # FSDP takes the mean of gradients over `shard`, where their sum is due: hence the factor.
            loss = passes(inputs, targets, replicas / all_tokens)  # adds up the loss over pp, gradients over shard
        mend()
        norms.append(clipped(part, mesh, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum_over(mesh, ["shard"], loss).item() / replicas)
    return losses, norms


# %%
# Two boxes of eight ranks; in the second, two ranks share each sequence.
BOXES = {"TP x PP x DP": DIMS, "TP x PP x CP": ParallelDims(pp=2, cp=2, tp=2)}
ranks = run_ranks(lambda: {name: train(dims, STEPS) for name, dims in BOXES.items()}, 8, timeout_seconds=300)
for name in BOXES:
    apart = max(abs(a / b - 1) for rank in ranks for a, b in zip(rank[name][0], alone, strict=True))
    norm = max(abs(a / b - 1) for rank in ranks for a, b in zip(rank[name][1], norms_alone, strict=True))
    print(f"{name}: losses {apart:.0e}, norms {norm:.0e} apart from one process, on the worst of 8 ranks")
    assert max(apart, norm) < 1e-9, f"{name}: another model is trained; which of the four sums is wrong?"

# %% [markdown]
# **Read it.** Losses and norms are those of one process, to float64's last digits, on every rank.
#
# ## 3. The usual bugs
#
# All three run without an error.
#
# 1. **The norm of one stage.** PyTorch's own `clip_grad_norm_` knows slices and replicas, and no stages.
#    Each stage scales its gradients by a norm of its own.
# 2. **Other rows within a TP group.** A sampler seeded by the place in the TP group gives two slices different rows.
# 3. **Tied embeddings, not tied across stages.** Embedding and head are one matrix. The first and the last stage have a
#    copy each, which gets a part of the gradient.

# %%
def clip_by_stage(part, mesh, limit):
    return my_clip(part, mesh, limit, axes=("shard", "tp"))  # the norm that PyTorch's clip_grad_norm_ finds


def shuffled_by_rank(dims, step):
    seed = dims.coordinates(dist.get_rank())["tp"]
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    return local_rows(dims, dist.get_rank(), *(rows[order] for rows in tokens(step)))


# %% [markdown]
# The right way for bug 3: the first and the last stage add up their parts, and the norm counts the matrix on one of them.
# Stages between hold no copy and stay out of the group.

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
# **Predict** before you run: which bug shows in the losses, which in the norm, and which at the first step?

# %%
def tied_model():
    model = whole_model()
    model.head.weight.data.copy_(model.embed.weight.data)
    return model


def every_bug():
    added = {"model": tied_model, "after_backward": add_up_ends}
    cases = {"1 norm of one stage": {"clipped": clip_by_stage}, "2 other rows in a TP group": {"read": shuffled_by_rank},
             "3 tied, not added up": {"model": tied_model}, "3 tied, counted twice": added,
             "tied, right": {**added, "clipped": clip_tied}}
    found = {name: train(DIMS, STEPS, **change) for name, change in cases.items()}
    return found | {"tied, right, 4 stages": train(ParallelDims(pp=4, tp=2), STEPS, **cases["tied, right"])}


bugs = run_ranks(every_bug, 8, timeout_seconds=300)
tied_alone = one_process(STEPS, tied=True)

# %% jupyter={"source_hidden": true}
rows, curves, ratios = [], {}, {}
for name in bugs[0]:
    right, right_norms = tied_alone if "tied" in name else (alone, norms_alone)
    curves[name] = [a - b for a, b in zip(bugs[0][name][0], right, strict=True)]
    ratios[name] = [bugs[rank][name][1][0] / right_norms[0] for rank in (0, -1)]
    rows.append({"": name, "first loss": curves[name][0], "largest of four": max(curves[name], key=abs)})
show(draw_bugs(curves, ratios, title="Each run against one process"),
     alt="Left: loss less that of one process. Other rows are off from step 1, copies that are not added up from step 2. "
     "Right: norm of step 1 over that of one process. Two stages that differ: the norm of one stage. Both right tied runs: 1.")
display(pd.DataFrame(rows).style.format(lambda x: x if isinstance(x, str) else f"{x:.0e}").hide()
        .set_caption("Loss less that of one process, in nats (measured)"))
for name in ("tied, right", "tied, right, 4 stages"):
    apart = max(map(abs, [*curves[name], *(ratio - 1 for ratio in ratios[name])]))
    assert apart < 1e-9, f"{name}: the copies are not one matrix; who adds up, and who is counted?"

# %% [markdown]
# **Read it.** Other rows change the first loss. The two other bugs spoil *gradients*, which the loss shows a
# step later. The norm shows all three in step 1. The right tied runs have the ratio 1 on every
# stage, with two stages and with four. Counted twice, the matrix makes the norm too large and clipped gradients too
# small. **Log the norm on every stage, and compare loss and norm of the first steps with one process.**
#
# Why is the loss of bug 1 nearly right? AdamW divides a gradient by its own running size, so a constant factor
# cancels. With SGD the stage of ratio 0.6 would step 1/0.6 times too far.
#
# **Question.** SGD, TP 4 x PP 4, no clipping. The first loss is that of one process, the third is not. All ranks log one
# norm, 3% too low. With PP 1 all is well. Which bug is it: 1, 2 or 3?

# %%
which_bug = ...
check("14.which_bug", which_bug)

# %% [markdown]
# ## 4. Real size: the memory of every stage
#
# 175 billion parameters on 64 GPUs of 80 GB. TP 8 x PP 8 leaves one replica, so ZeRO has nothing to share out. A stage
# holds its layers in three *chunks* ([lesson 13](13_pipelines.ipynb)). A *block in flight* is a layer of a
# micro-batch whose activations wait for backward.
#
# [Korthikanti and others 2022](https://arxiv.org/abs/2205.05198) give this run's memory by a formula: on the first of $p$
# stages of $v$ chunks $34\, s b h\, L/t$ bytes times $1 + (p - 1)/(p v)$, where attention's scores are computed again. The planner has
# the same formula. Here three ranks run whole on tensors without data: that is independent evidence.

# %%
LARGE, TOKENS = model_shape("megatron-175b"), 2048
megatron = Plan(tp=8, pp=8, virtual_stages=3, sequence_parallel=True, recompute="selective",
                attention="unfused", dropout=True)
planned = estimate(LARGE, cluster, megatron, Batch(sequences=64, sequence_length=TOKENS))
whole = {stage: megatron_stage(LARGE, megatron, stage, length=TOKENS) for stage in (0, 4, 7)}

# %% jupyter={"source_hidden": true}
rows = []
for i, run in whole.items():
    stage, (states, kept) = planned.stages[i], states_and_kept(run)
    rows.append({"stage": i, "blocks in flight": f"{stage.in_flight:.0f}", "states, predicted": stage.state_bytes / GIB,
                 "states, simulated": states / GIB, "activations, predicted": stage.bytes_by_category["activations"] / GIB,
                 "activations, simulated": kept / GIB, "all with workspaces, predicted": stage.needed_bytes / GIB})
display(pd.DataFrame(rows).style.format(precision=2).hide()
        .set_caption(f"175B, TP 8 x PP 8: GiB of one GPU, which has {cluster.device.memory_bytes / GIB:.1f}"))

# %%
chunked = 1 + (8 - 1) / (8 * 3)
by_formula = 34 * TOKENS * LARGE.hidden * LARGE.layers / 8 * chunked / GIB
paper = next(row for row in table("korthikanti_figure1") if row["model"] == "175B")
print(f"stage 0 has {LARGE.layers} x (1 + 7/24) = {LARGE.layers * chunked:.0f} blocks in flight: {by_formula:.2f} GiB by the formula as printed,",
      f"{float(paper['fig1_act_seqsel_gib']):.2f} as the authors evaluate it for Figure 1 (published), {states_and_kept(whole[0])[1] / GIB:.2f} simulated")
assert abs(states_and_kept(whole[0])[1] / GIB / by_formula - 1) < 0.03, "The simulated activations are not the formula's."

# %% [markdown]
# **Read it.** Stage 0 has the most blocks in flight, so here **stage 0 decides whether the plan fits**. (A larger
# vocabulary's logits stand on the last.) The 0.42 GiB of states
# that its simulation lacks are a table of positions.
#
# ### The plan of section 1: 100 billion
#
# The functions of section 2 now build three of its 64 ranks, one each of stages 0, 1 and 7.

# %%
def at_size(shape, dims, rank, micro_batches, zero_stage=1):
    """One rank of `dims`, made by `my_part` and run by `my_passes`, on tensors without data."""
    return simulated_rank(shape, dims, rank, part_of=my_part, passes_of=my_passes, micro_batches=micro_batches,
                          length=TOKENS, zero_stage=zero_stage)


# %%
dims, few = three.dims, 8  # as many micro-batches as stages: more put no more in flight
ours = {stage: at_size(HUNDRED, dims, dims.rank(pp=stage), few) for stage in (0, 1, 7)}
show(draw_stage_memory(in_3d, title="100B, TP 4 x PP 8 x DP 2: one GPU of each stage\n(diamonds are without workspaces and context)",
                       simulated={stage: run.peak_bytes for stage, run in ours.items()}),
     alt="Stacked bars of memory for 8 stages, all below the 80 GB card. Activations shrink from stage to stage. Diamonds "
     "for stages 0, 1 and 7 lie a little below the top of the tensors.")
for stage, run in ours.items():
    row, room = in_3d.stages[stage], cluster.device.memory_bytes
    free = room - run.peak_bytes - (row.needed_bytes - row.allocated_bytes)  # workspaces and context as predicted
    print(f"stage {stage}: tensors {run.peak_bytes / GIB:.1f} GiB (simulated), {row.allocated_bytes / GIB:.1f} (predicted);",
          f"{free / GIB:.1f} of {room / GIB:.1f} GiB stay free")

# %% [markdown]
# **Read it.** Every stage fits, and stage 0 has the least room.
#
# ## 5. The bytes on every link
#
# The simulated rank of stage 1 has also counted its collectives by axis, with their payload, what each rank puts in. In a
# ring of n an all-gather sends it n - 1 times, a reduce-scatter (n - 1)/n times.

# %%
def sent_by_axis(run, dims):
    sent = Counter()
    for row in run.traffic:
        if not row.at_startup:
            sent[row.axis] += ring_bytes(row.collective, row.payload_bytes, dims.sizes[row.axis])
    return sent


# %%
for row in ours[1].traffic:
    if row.payload_bytes > 1e6 and not row.at_startup:
        print(row)
counted = sent_by_axis(ours[1], dims)
expected = axis_bytes(HUNDRED, three, Batch(sequences=few * three.dp, sequence_length=TOKENS))[1]
for axis in ("tp", "pp", "shard"):
    print(f"{axis:>5}: {counted[axis] / GB:8.3f} GB sent a step (simulated), {expected[axis] / GB:8.3f} (predicted)")
    assert abs(counted[axis] / expected[axis] - 1) < 0.001, f"{axis}: the planner counts other bytes"

# %% [markdown]
# **Read it.** Planner and program agree within a tenth of a percent. Traffic over *tp* and *pp* grows with the micro-batches; that of
# *shard* comes once a step. From here on this rank stands for all 64 (the ends hold more).
#
# What leaves the node depends on **where neighbours lie**. Number the ranks axis by axis, put eight to a node,
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
     alt="Left, six bars: the three whose nodes hold all of tp are tiny. Right, these three alone: two are 902 GB, all of it "
     "pp; the third is 996 GB, of shard and pp.")

# %%
all_bytes = 64 * (step_sent["tp"] + step_sent["shard"]) + 56 * step_sent["pp"]  # the last of 8 stages has no next
best, *_, worst = (sum(left.values()) for left in orders.values())
print(f"well placed {best / all_bytes:.2%} of {all_bytes / GB:,.0f} GB leave nodes, badly {worst / all_bytes:.0%} (simulated);",
      f"your bets {my_bet_percent_well}% and {my_bet_percent_badly}%")
share = cluster.network_share * BESIDE_TRAINING
seconds = [left / (64 * cluster.network_bytes_per_second_per_gpu * share) for left in (best, worst)]
print(f"at {share:.0%} of the ports' rate {seconds[0]:.1f} s or {seconds[1]:.0f} s (predicted)")
mfu = next(float(row["mfu_pct_present"]) / 100 for row in table("korthikanti_table5") if row["model"] == "175B")
print(f"the planner's whole step: {in_3d.step_seconds:.0f} s, an MFU of {in_3d.mfu:.0%} (predicted);",
      f"at the {mfu:.0%} published for 175B on 64 A100s it would be {in_3d.step_seconds * in_3d.mfu / mfu:.0f} s")

# %% [markdown]
# **Read it.** *tp* inside the nodes. A node of eight has room for the four slices and one more pair: both
# replicas, or two neighbouring stages. Which is better depends on the batch: **the order is an outcome of bytes, not a
# law.**
#
# **Question.** From how many sequences in a batch on does the order tp < pp < shard leave fewer bytes between nodes
# than tp < shard < pp? Use `leaving` and `counted`.

# %%
turning_point = ...
check("14.turning_point", turning_point)

# %% [markdown]
# ### The same plan as files
#
# Megatron-LM numbers ranks tp < shard < pp, and with `--use-tp-pp-dp-mapping` tp < pp < shard. In PyTorch
# `init_device_mesh` names the axes, the last one fastest. `export` writes the plan for each tool:

# %%
job = export(HUNDRED, cluster, replace(three, framework="fsdp"), batch)
print("Megatron-LM", *(word for word in " ".join(job.megatron).split(" --") if "parallel" in word or "optimizer" in word), sep=" --")
print(f"# written to build/lesson-14: {len(job.write(here.root / 'build' / 'lesson-14'))} files")  # git ignores this folder

# %% [markdown]
# ## 6. One billion on 64 GPUs
#
# Do one billion parameters fill an A100? At 16 bytes each their states are 20 GB of 80. Llama 3.2 1B has a vocabulary of
# 128,256.

# %%
ONE, one_gpu = model_shape("llama-3.2-1b"), Cluster(gpu="A100-80GB", nodes=1, gpus_per_node=1)
print(f"states: 16 x {ONE.parameter_count / 1e9:.2f}B = {16 * ONE.parameter_count / GB:.1f} GB (predicted)")
rows = []
for (sequences, length), recompute in itertools.product(((1, 2048), (8, 2048), (4, 8192), (1, 65_536)), ("none", "full")):
    plan = Plan(framework="fsdp", micro_batch=sequences, recompute=recompute)
    found = estimate(ONE, one_gpu, plan, Batch(sequences=sequences, sequence_length=length))
    at = {name: found.peak.bytes_by_category[name] / GIB for name in ("logits and loss", "activations")}
    rows.append({"tokens": f"{sequences} x {length:,}", "recompute": recompute, "needs": found.peak.needed_bytes / GIB,
                 **at, "verdict": found.verdict})
display(pd.DataFrame(rows).style.format(precision=1).hide().set_caption("One A100-80GB: GiB at the peak (predicted)"))

# %% [markdown]
# **Read it.** States never fill the card; the **logits** do, at 65,536 tokens by themselves. FSDP does not
# help with them: each rank has its own. Slices with `loss_parallel`, context parallelism or a
# loss in pieces do.
#
# So data parallelism will do. Which kind sends least over a slow network? It depends on how often gradients are reduced,
# and in which type. `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` reduces in bf16
# unless you set `reduce_dtype`. FSDP shards over all 64 ranks, one ring that leaves a node once. HSDP (hybrid) shards inside each
# node; eight rings between nodes carry an eighth each.

# %%
def seconds_sent(gathers, rounds, reduce_bytes, ranks, rate=1.25 * GB):
    """Of a step, at a node's port: bf16 parameters gathered, and rounds of gradients, each a reduce-scatter or all-gather."""
    sent = ONE.parameter_count * (ranks - 1) / ranks * (2 * gathers + reduce_bytes * rounds)
    slow = replace(cluster, network_bytes_per_second=rate)
    return sent / (rate * slow.network_share * BESIDE_TRAINING)


SCHEMES = {"DDP": lambda m: (0, 2, 64), "ZeRO-1": lambda m: (1, 1, 64), "ZeRO-2": lambda m: (1, m, 64),
           "FSDP": lambda m: (2 * m, m, 64), "FSDP, gradients once": lambda m: (2 * m, 1, 64),
           "HSDP, between nodes each time": lambda m: (0, 2 * m, 8), "HSDP, between nodes once": lambda m: (0, 2, 8)}

# %% jupyter={"source_hidden": true}
held = dict(zip(SCHEMES, (1, 1, 1 / 64, 1 / 64, 1, 1 / 8, 1 / 8), strict=True))  # of the gradients, between micro-batches
rows = []
for name, scheme in SCHEMES.items():
    row = {"": name, "gradients held, GB in fp32": 4 * held[name] * ONE.parameter_count / GB}
    for m, (dtype, size) in itertools.product((1, 4), (("fp32", 4), ("bf16", 2))):
        gathers, rounds, ranks = scheme(m)
        row[f"m = {m}, {dtype}"] = seconds_sent(gathers, rounds, size, ranks)
    rows.append(row)
display(pd.DataFrame(rows).style.format(precision=1).hide()
        .set_caption("1B on 8 x 8: seconds a step at a node's port of 1.25 GB/s, kept up to "
                     f"{replace(cluster, network_bytes_per_second=1.25 * GB).network_share * BESIDE_TRAINING:.0%}, m micro-batches, fp32 or bf16 gradients (predicted)"))

# %% [markdown]
# **Read it.** Reduced each time, FSDP sends more than ZeRO-2, since it gathers parameters twice a micro-batch. Reduced
# once, it still gathers, and holds whole gradients. In fp32 ZeRO-1 sends least: 6 bytes a parameter, where DDP and HSDP send 8.
# **In bf16 all three send 4**, and HSDP is ahead by its shorter rings alone: 7/8 of that for 63/64. DDP's rows need
# `no_sync()`, FSDP's `set_requires_gradient_sync(False)`, HSDP's `set_requires_all_reduce(False)`.

# %% jupyter={"source_hidden": true}
score("14", "100B, stage 0 of 8, on 64", peak_bytes=ours[0].peak_bytes, evidence=ours[0].evidence)
score("14", "175B, stage 0 of 8, on 64", peak_bytes=whole[0].peak_bytes, evidence=whole[0].evidence)
scoreboard("14")

# %% [markdown]
# ## Recap
#
# - Cut, share, split, shard: in this order.
# - A composed step needs four right sums. Compare loss *and* norm of the first steps with one process.
# - Stage 0 has the most in flight: it decides whether the plan fits. The order of axes follows from bytes: count them.
#
# | axis | take it when | costs | no use for |
# |---|---|---|---|
# | TP with SP | a block's states or activations are too large | four collectives a block and pass, on the fastest link | beyond a node; heads that do not divide |
# | PP | layers must be spread over nodes | a bubble, micro-batches in flight on the first stages | few micro-batches |
# | DP with ZeRO-1 | two replicas fit | gradients and parameters once a step | a single replica |
# | FSDP, HSDP | states are too large for ZeRO-2 | parameters twice a micro-batch, gradients once or each time | activations, logits |
#
# **Test yourself.** 64 GPUs, TP 8 x PP 8. A colleague turns on ZeRO-1 to make room. What happens?
#
# <details><summary>Answer</summary>
#
# Nothing: there is one replica. Room must come from recomputation, or from fewer blocks in flight.
#
# </details>
#
# **Where next.** The [lab](../../labs/advanced/14_three_dimensions.ipynb), in a copy (`make my-labs`), then its
# [solution](../../solutions/advanced/14_three_dimensions.ipynb). [Lesson 15](15_design_studio.ipynb)
# searches all layouts at once.
#
# **References.** Narayanan and others 2021, [arXiv:2104.04473](https://arxiv.org/abs/2104.04473). PyTorch's
# [pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** Start it on every node with `torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d
# --rdzv-endpoint HOST:29500 train.py`. Yours are:
#
# - `build(place)`: the layers of a stage, in fp32, on `device`, which is "cuda" or "cpu". The keys of its `ModuleDict`
#   `stage.blocks` are the layers' numbers *in the whole model*, since they are names in the checkpoint.
# - `plan`: the `parallelize_module` plan of all its parameters, norms too, by `SequenceParallel`.
# - `loader` (rows by *replica*, `mesh["dp"]`), `loss_fn` (a micro-batch's mean), `folder`, `device`, and the sizes `pp`, `dp`,
#   `tp` and `micro_batches`, at least `pp`.
#
# ```python
# import os
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
# # The last axis is numbered fastest: slices lie in the node.
# mesh = init_device_mesh(device, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
# stage = parallelize_module(build(mesh.get_local_rank("pp")), mesh["tp"], plan)  # slices first
# # Recomputation and torch.compile, block by block, would stand here.
# policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# # Then shards. Parameters stay gathered between micro-batches, since each would gather them again.
# how = {"mesh": mesh["dp"], "mp_policy": policy, "reshard_after_forward": False}
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
# losses, norms = [], []
# for inputs, targets in loader:
#     each = []  # the last stage's losses, one a micro-batch
#     given, wanted = [inputs] if pipe.is_first else [], targets if pipe.is_last else None
#     schedule.step(*given, target=wanted, losses=each, return_outputs=False)  # else the last stage keeps all logits
#     norms.append(clip(limit=1.0).item())
#     optimizer.step()
#     optimizer.zero_grad()
#     if pipe.is_last:
#         losses.append(torch.stack(each).mean().item())  # of this replica's rows
#         print(f"loss {losses[-1]:.4f}, norm {norms[-1]:.4f}", flush=True)
#
# # Flattened, the optimizer's state goes by the names of parameters, which no two stages share.
# options = StateDictOptions(flatten_optimizer_state_dict=True)
# model_state, optimizer_state = get_state_dict(stage, optimizer, options=options)
# dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
#
# # To go on, with these sizes or with others: build stage and optimizer as above, then
# model_state, optimizer_state = get_state_dict(stage, optimizer, options=options)
# dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
# set_state_dict(stage, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
# ```
#
# Left to you: where replicas hold unequal numbers of tokens, divide by the tokens of all, as `train` does; logits split
# over tp need `loss_parallel()` around the step; a tied embedding needs `add_up_ends` and `clip_tied`.
#
# **Megatron-LM, DeepSpeed.** In the course's folder: `shape` is a `model_shape(...)`, or a `ModelShape` of your own.
#
# ```python
# from utils import Batch, Cluster, Plan, estimate, export
#
# cluster, batch = Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=1536, sequence_length=2048)
# plan = Plan(tp=4, pp=8, dp=2, zero_stage=1, sequence_parallel=True, framework="megatron")
# print(estimate(shape, cluster, plan, batch))
# job = export(shape, cluster, plan, batch)
# job.write("run")
# ```
#
# **Look at** the first norm: the same on every rank, and that of a small copy of your model in one process.
