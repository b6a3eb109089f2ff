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
# **Promise.** You compose three axes on eight processes, and see what gives away the three usual bugs. Then 100 and 175
# billion parameters on 64 simulated GPUs: memory of every stage, bytes on every link.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 60 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |
#
# ## A bet
#
# 100 billion parameters train on 8 nodes of 8 GPUs: tensor parallel over 4, pipeline over 8, data parallel
# over 2. Of all bytes that GPUs send in a step, how many percent leave their node, if the axes lie well on the nodes?
# And if badly? Write two guesses. Section 5 counts.

# %%
my_bet_percent_well, my_bet_percent_badly = 20, 50

# %% tags=["setup"]
here = setup("advanced/14")

# %% jupyter={"source_hidden": true}
import itertools
import math
from collections import Counter
from dataclasses import replace

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.parallel import loss_parallel

from utils import GB, GIB, Batch, Cluster, Evidence, Plan, Transformer, TransformerConfig, check, draw_losses
from utils import draw_ranks, draw_stage_memory, estimate, export, run_ranks, score, scoreboard, show
from utils.catalog import ModelShape, model_shape
from utils.data import text_tokens
from utils.parallel import ParallelDims, accumulated_passes, adamw, clip_grad_norm, keep_chunk, device_mesh, local_positions, local_rows
from utils.parallel import pipeline_passes, reduce_on_last_micro_batch, apply_fsdp, apply_cp, apply_tp, sum_over
from utils.parallel import token_weight
from utils.planner import axis_bytes, framework, ring_bytes
from utils.planner.calibration import BESIDE_TRAINING
from evidence.validation.simulation_megatron_stage import megatron_stage, states_and_kept
from evidence.validation.tables import table
from utils.lessons.lesson_14.at_size import simulated_rank
from utils.lessons.lesson_14.orders import draw_orders

# %% [markdown]
# ## 1. One rank, three coordinates
#
# Where 64 ranks lie ([glossary](../00_glossary.ipynb)):

# %%
HUNDRED = ModelShape(name="100B", family="llama", layers=80, hidden=10_240, heads=80, feedforward=27_648,
                     vocabulary=32_000, max_sequence=2048)
by_dtensor = replace(framework("fsdp"), name="fsdp, inputs kept", gathered_inputs=1.0)  # section 5's: Megatron gathers them again
cluster = Cluster(gpu="A100-80GB", nodes=8)
three = Plan(tp=4, pp=8, dp=2, zero_stage=1, sequence_parallel=True, framework=by_dtensor)
batch = Batch(sequences=1536, sequence_length=2048)
in_3d = estimate(HUNDRED, cluster, three, batch)
show(draw_ranks(in_3d, title="Two replicas, eight stages of four slices"),
     alt="8 nodes of 8 GPUs. Each node holds one stage: two replicas, each of four slices t0 to "
     "t3. Every hop from stage to stage leaves a node.")

# %% [markdown]
# A rank is a point in a box. Its *stage* says which layers it holds, its *slice* which part of each matrix, its
# *replica* which rows of the batch it reads. The axis of the replicas is named `shard`, since they share out the
# states. Each collective runs in a group: ranks that differ in one coordinate alone. The last axis is numbered fastest.

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
# **The order matters.** First the layers that a stage does not hold are cut away. Then sequences are
# shared (context parallelism, where there is any), then matrices are split, and at last what is left is sharded: FSDP2
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
# Forward and backward are the schedule's work. It must know the shape that stages send: with sequence parallelism each
# rank sends its own part of the sequence.

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
# Each number of a step is added up over *some* axes, and two of the usual bugs leave one out. *Data* is `shard`, with
# context parallelism in it:
#
# | number | added up over | why |
# |---|---|---|
# | tokens that the loss is over | data | other replicas read other rows |
# | the loss | pp, data | only the last stage has one |
# | gradients | data, and what else holds a copy | every copy must take the same step |
# | the square of the norm | pp, data, tp | all scale alike; a *copy* counts once |
#
# The loop has a place for each. Three of its arguments let bugs in: `read`, `clipped` and `after_backward`.

# %%
def my_rows(dims, step):
    return local_rows(dims, dist.get_rank(), *tokens(step))


def clip_over_all(optimizer, mesh, limit):
    return clip_grad_norm(optimizer, mesh, limit)


def train(dims, steps, read=my_rows, clipped=clip_over_all, after_backward=None, limit=0.5, model=whole_model):
    part, mesh = my_part(dims, model())
    micro_batch = ROWS // dims.data_ranks // MICRO_BATCHES
    passes = my_passes(part, mesh, dims, micro_batch, MICRO_BATCHES, LENGTH, torch.float64)
    optimizer, losses, norms = adamw([part], RATE), [], []
    places = local_positions(dims, dist.get_rank(), LENGTH)
    for step in range(steps):
        inputs, targets = (t[:, places] for t in read(dims, step))
        with loss_parallel():  # logits are split over the vocabulary
            loss = passes(inputs, targets, token_weight(targets, mesh))  # sums tokens; the loss over pp; gradients
        if after_backward is not None:
            after_backward(part, mesh)
        norms.append(clipped(optimizer, mesh, limit).item())  # sums the square over pp, data and tp
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum_over(mesh, ["shard"], loss).item() / mesh["shard"].size())  # the weight has that factor
    return losses, norms


# %% [markdown]
# Two boxes of eight ranks: TP 2 x PP 2 x DP 2, and TP 2 x PP 2 x CP 2, where two ranks share each sequence.

# %%
BOXES = {"TP x PP x DP": DIMS, "TP x PP x CP": ParallelDims(pp=2, cp=2, tp=2)}


def both_boxes():
    return {name: train(dims, STEPS) for name, dims in BOXES.items()}


# %%
ranks = run_ranks(both_boxes, 8, timeout_seconds=300)
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
# All three run without an error, on code that looks right.
#
# 1. **The norm over some axes only.** PyTorch's own `clip_grad_norm_` knows slices and shards, and not that there are
#    other stages. Each stage scales by a norm of its own.
# 2. **Other rows within a TP group.** A sampler that shuffles by the *rank's* number gives two slices different rows.
# 3. **Tied embeddings, not tied across stages.** The first and the last stage have a copy each of one matrix. Each copy
#    gets a part of the gradient: they must be added up in every step.

# %%
def clip_by_stage(optimizer, mesh, limit):
    return clip_grad_norm(optimizer, mesh["shard", "tp"], limit)  # the number that torch.nn.utils.clip_grad_norm_ finds


def shuffled_by_rank(dims, step):
    seed = dims.coordinates(dist.get_rank())["tp"]
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    return local_rows(dims, dist.get_rank(), *(rows[order] for rows in tokens(step)))


def add_up_ends(part, mesh):
    """The right way: both copies of the matrix get the sum of their gradients."""
    end = part.head if part.embed is None else part.embed
    dist.all_reduce(end.weight.grad.to_local(), group=mesh.get_group("pp"))


# %% [markdown]
# In the tied runs both copies start alike, and clipping is off. **Predict** before you run: which bug shows in the
# losses, which in the norm, and which at the first step?

# %%
def tied_model():
    model = whole_model()
    model.head.weight.data.copy_(model.embed.weight.data)
    return model


def every_bug():
    tied = {"model": tied_model, "limit": math.inf}
    cases = {"norm by stage": {"clipped": clip_by_stage}, "other rows in a TP group": {"read": shuffled_by_rank},
             "tied, gradients added up": {**tied, "after_backward": add_up_ends}, "tied, not added up": tied}
    return {name: train(DIMS, STEPS, **change) for name, change in cases.items()}


bugs = run_ranks(every_bug, 8, timeout_seconds=300)
tied_alone = one_process(STEPS, limit=math.inf, tied=True)

# %% jupyter={"source_hidden": true}
rows, curves = [], {"one process": [0.0] * STEPS}
for name in bugs[0]:
    right, right_norms = tied_alone if name.startswith("tied") else (alone, norms_alone)
    difference = [abs(a / b - 1) for a, b in zip(bugs[0][name][0], right, strict=True)]
    curves[name] = [a - b for a, b in zip(bugs[0][name][0], right, strict=True)]
    rows.append({"": name, "loss of step 1": difference[0], "loss of the last step": difference[-1],
                 "norm, stage 0": bugs[0][name][1][0] / right_norms[0],
                 "norm, stage 1": bugs[-1][name][1][0] / right_norms[0]})
display(pd.DataFrame(rows).style.format(lambda x: x if isinstance(x, str) else f"{x:.2g}").hide()
        .set_caption("Losses: relative difference to one process. Norms of step 1: times the right one (measured)"))
del curves["tied, gradients added up"]  # right, and so all zero
show(draw_losses(curves, minus="one process", title="Three bugs: loss minus that of one process", unit="nats"),
     alt="Loss over steps less that of one process. Other rows within a TP group are off from step 1; copies "
     "that are not added up from step 2; the norm by stage stays near zero.")

# %% [markdown]
# **Read it.** Other rows differ in the first loss already, by a thousandth. The others leave it right: the norm by
# stage drifts by less than a thousandth, the copies are off by 0.03 in step 2 and back in step 4. The norm tells them apart.
# By stage, two stages report two numbers, and neither is right. Copies not added up: all agree, on a wrong one. **Log the norm on every stage, and compare the first steps with one process.**
#
# The right tied run counts the shared matrix twice, so its norm is too large.
#
# <div class="alert alert-warning"><b>Trap.</b> Why <code>% 128</code> above? Of a vocabulary of 256, plain text fills the
# first half, slice 0's: whatever rows slice 1 read, no loss would change.</div>
#
# **Question.** A run's first loss is that of one process, and later ones are not. All stages report the same norm, and
# it is wrong. Which of the three bugs is it: 1, 2 or 3?

# %%
which_bug = ...
check("14.which_bug", which_bug)

# %% [markdown]
# ## 4. Real size: the memory of every stage
#
# 175 billion parameters on 64 GPUs of 80 GB. TP 8 x PP 8 leaves DP 1: "ZeRO-1 on each pipeline
# rank" saves nothing.
# [Korthikanti and others 2022](https://arxiv.org/abs/2205.05198) published this run's memory in their Figure 1.
#
# One rank of the first, a middle and the last stage runs whole on simulated tensors: Megatron-LM's layers, all passes of
# the schedule. Between them the table scales stage 4's activations by blocks in flight.

# %%
LARGE, TOKENS = model_shape("megatron-175b"), 2048
megatron = Plan(tp=8, pp=8, virtual_stages=3, sequence_parallel=True, recompute="selective",
                attention="unfused", dropout=True)
planned = estimate(LARGE, cluster, megatron, Batch(sequences=64, sequence_length=TOKENS))
whole = {stage: megatron_stage(LARGE, megatron, stage, length=TOKENS) for stage in (0, 4, 7)}
show(draw_stage_memory(planned, title="175B, TP 8 x PP 8, 3 chunks: one GPU of each stage",
                       simulated={stage: run.peak_bytes for stage, run in whole.items()}),
     alt="Stacked bars of memory for 8 stages, below the 80 GB card; activations shrink from stage to stage. Diamonds "
     "for stages 0, 4 and 7 lie on the bars.")

# %% jupyter={"source_hidden": true}
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
# **Read it.** Stage 0 has the most blocks in flight, so **stage 0 decides whether the plan fits**. Figure 1 counts the
# parameters of the blocks alone: it agrees with a stage in the middle; embedding and head come on top. The 0.42 GiB
# between prediction and simulation on stage 0 are its table of positions, which the simulated rank lacks.
#
# ## 5. The bytes on every link
#
# The functions of section 2 now build the 100B model, and one of its 64 ranks, in the second of eight stages, is
# simulated. Collectives are counted by axis, with their payload, what each rank puts in. In a ring of n an all-gather sends
# it n - 1 times, a reduce-scatter (n - 1)/n times.

# %%
def at_size(shape, dims, rank, micro_batches, zero_stage=1):
    """One rank of `dims`, made by `my_part` and run by `my_passes`, on tensors without data."""
    return simulated_rank(shape, dims, rank, part_of=my_part, passes_of=my_passes, micro_batches=micro_batches,
                          length=TOKENS, zero_stage=zero_stage)


def sent_by_axis(run, dims):
    sent = Counter()
    for row in run.traffic:
        if not row.at_startup:
            sent[row.axis] += ring_bytes(row.collective, row.payload_bytes, dims.sizes[row.axis])
    return sent


# %%
dims, few = three.dims, 8
second = at_size(HUNDRED, dims, dims.rank(pp=1), few)
for row in second.traffic:
    if row.payload_bytes > 1e6 and not row.at_startup:
        print(row)
counted = sent_by_axis(second, dims)
print(f"peak {second.peak_bytes / GIB:.1f} GiB (simulated), {in_3d.stages[1].allocated_bytes / GIB:.1f} (predicted)")
expected = axis_bytes(HUNDRED, three, Batch(sequences=few * three.dp, sequence_length=TOKENS))[1]
for axis in ("tp", "pp", "shard"):
    print(f"{axis:>5}: {counted[axis] / GB:8.3f} GB sent a step (simulated), {expected[axis] / GB:8.3f} (predicted)")
    assert abs(counted[axis] / expected[axis] - 1) < 0.001, f"{axis}: the planner counts other bytes"

# %% [markdown]
# **Read it.** The planner's bytes and the program's agree within a tenth of a percent; the simulated peak is 4% lower.
# A real step has 1536 sequences, so each replica passes 768 through. Traffic over *tp* and *pp* grows with the
# micro-batches; that of data parallelism comes once a step. This rank's bytes stand for all 64: embedding and head are left
# out.
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
best, *_, worst = (sum(left.values()) for left in orders.values())
print(f"well placed {best / all_bytes:.2%} of {all_bytes / GB:,.0f} GB leave nodes, badly {worst / all_bytes:.0%} (simulated);",
      f"your bets {my_bet_percent_well}% and {my_bet_percent_badly}%")
seconds = [left / (64 * cluster.network_bytes_per_second_per_gpu) for left in (best, worst)]
print(f"at the ports' full rate {seconds[0]:.1f} s or {seconds[1]:.0f} s; the planner's whole step: {in_3d.step_seconds:.0f} s (predicted)")

# %% [markdown]
# **Read it.** *tp* inside the nodes. It need not be innermost: the first two
# orders fill each node with the same ranks. A node of eight has room for the four slices and one more pair: both
# replicas, or two neighbouring stages. Which is better depends on the batch. **The order is an outcome of bytes, not a
# law.**
#
# <div class="alert alert-warning"><b>Trap.</b> "Stages send little, so the network does not matter." A hop inside a node
# sends nothing over it; one to another node sends all, and with 3 chunks a stage the 7 hops are 23.</div>
#
# **Question.** From how many sequences in a batch on does the order tp < pp < shard leave fewer bytes between nodes
# than tp < shard < pp? `leaving` and `counted` are yours to use.

# %%
turning_point = ...
check("14.turning_point", turning_point)

# %% [markdown]
# ### The same plan as files
#
# `export` writes the layout for each tool: Megatron-LM's arguments, DeepSpeed's JSON, a script of section 2's functions.
# DeepSpeed has ZeRO-1 and the batch in the JSON, stages in a `PipelineModule`, slices in the model.

# %%
job = export(HUNDRED, cluster, replace(three, framework="fsdp"), batch)
layout = {word for word in job.megatron if word.startswith("--")}
assert layout <= {row["name"] for row in table("megatron_arguments")}, "no options of Megatron-LM's own list"
text = " ".join(job.megatron)
print("Megatron-LM:", text[text.index("--tensor-model") : text.index("--overlap-grad")])
print("DeepSpeed:", {key: job.deepspeed[key] for key in ("train_batch_size", "gradient_accumulation_steps", "zero_optimization")})
files = job.write(here.root / "build" / "lesson-14")  # git ignores this folder
print(f"# written to build/lesson-14: {len(files)} files")

# %% [markdown]
# ## 6. One billion on 64 GPUs
#
# Which axes does a *small* model need? One billion parameters, it is said, do not fit one A100. At 16 bytes each their
# states are 20 GB of 80. What would have to be true? Llama 3.2 1B has a vocabulary of 128,256.

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
# **Read it.** With 2,048 tokens the peak is in the optimizer's step, where no activations are left. 16,384 tokens a
# micro-batch fit. Twice as many overflow, until blocks are recomputed. At 65,536 the **logits** alone overflow. Sharding does not help with either: each rank has its own. A smaller micro-batch does, or
# context parallelism; a chunked loss helps with logits.
#
# So data parallelism alone will do. FSDP shards over all 64, HSDP (hybrid) within each node, with eight replicas. A ring
# over all 64 leaves a node once, HSDP's rings of replicas eight times.

# %%
SCHEMES = {"FSDP": ParallelDims(shard=64), "HSDP": ParallelDims(replicate=8, shard=8)}
leaves_node = {}
schemes = {name: at_size(ONE, box, 0, 1, zero_stage=3) for name, box in SCHEMES.items()}
for name, run in schemes.items():
    sent = sent_by_axis(run, SCHEMES[name])
    leaves = leaves_node[name] = sent["shard"] if name == "FSDP" else 8 * sent["replicate"]
    print(f"{name}: peak {run.peak_bytes / GIB:.1f} GiB; a rank sends {sent['shard'] / GB:.2f} GB over shard,",
          f"{sent['replicate'] / GB:.2f} over replicate; {leaves / GB:.2f} GB leave a node (simulated)")

# %%
def seconds_of(zero_stage, gb_per_second, sequences=64, **choices):
    on = replace(cluster, network_bytes_per_second=gb_per_second * GB)
    plan = Plan(dp=64, zero_stage=zero_stage, framework="fsdp", **choices)
    return estimate(ONE, on, plan, Batch(sequences=sequences, sequence_length=TOKENS)).step_seconds


rows = []
for name, stage, choices in (("DDP", 0, {}), ("ZeRO-1", 1, {}), ("ZeRO-2", 2, {}), ("FSDP", 3, {}), ("HSDP", 3, {"shard_ranks": 8})):
    rows.append({"": name, "200 GB/s": seconds_of(stage, 200, **choices), "1.25 GB/s": seconds_of(stage, 1.25, **choices),
                 "1.25 GB/s, 4 micro-batches": seconds_of(stage, 1.25, 256, **choices)})
display(pd.DataFrame(rows).style.format(precision=3).hide()
        .set_caption("Llama 3.2 1B, one sequence of 2,048 a rank and micro-batch: seconds a step, by a node's network (predicted)"))
slow = replace(cluster, network_bytes_per_second=1.25 * GB)
print(f"predicted with collectives at {slow.network_share * BESIDE_TRAINING:.0%} of a {slow.network} port's rate: FSDP's "
      f"{leaves_node['FSDP'] / GB:.2f} GB take {leaves_node['FSDP'] / (1.25 * GB * slow.network_share * BESIDE_TRAINING):.1f} s of 1.25 GB/s")

# %% [markdown]
# **Read it.** ZeRO-1 and 2 send the least, gradients and parameters once. DDP's all-reduce sends fp32 gradients twice, FSDP
# gathers once more for backward. HSDP's eight ranks all-reduce fp32 gradients, so hardly fewer bytes leave the node. In
# the last column FSDP and ZeRO-2 send again for each micro-batch; ZeRO-1 and HSDP put it off to the last
# (`set_requires_all_reduce`).

# %% jupyter={"source_hidden": true}
for name, run in schemes.items():
    score("14", f"1B, {name} on 64", peak_bytes=run.peak_bytes, evidence=run.evidence)
score("14", "100B, stage 1 of 8, on 64", peak_bytes=second.peak_bytes, evidence=second.evidence)
for stage, run in whole.items():
    score("14", f"175B, stage {stage} of 8, on 64", peak_bytes=run.peak_bytes, evidence=run.evidence)
scoreboard("14")

# %% [markdown]
# ## Recap
#
# - A rank is a point in a box. Cut, share, split, shard: in this order.
# - A composed step needs four right sums. Compare loss *and* norm of the first steps with one process.
# - Stage 0 has the most in flight: here it decides whether the plan fits.
# - The order of axes follows from bytes: count them.
#
# | axis | take it when | costs | no use for |
# |---|---|---|---|
# | TP with SP | a block's states or activations are too large | four collectives a block and pass, on the fastest link | beyond a node; heads that do not divide |
# | PP | layers must be spread over nodes | a bubble, micro-batches in flight on the first stages | few micro-batches |
# | DP with ZeRO-1 | two replicas fit | gradients once a step | a single replica |
# | FSDP, HSDP | states are too large for ZeRO-2 | the model twice a micro-batch | activations, logits |
#
# Where FSDP over a few cards may do, [this page](../00a_your_model.ipynb) tries your own model.
#
# **Test yourself.** 64 GPUs, TP 8 x PP 8. A colleague turns on ZeRO-1 to make room for a larger micro-batch. What happens?
#
# <details><summary>Answer</summary>
#
# Nothing. 8 x 8 x 1: there is one replica, and the optimizer state of a part is divided by one. The room must come
# from recomputation, or from fewer blocks in flight.
#
# </details>
#
# **Where next.** The [lab](../../labs/advanced/14_three_dimensions.ipynb), in a copy (`make my-labs`), then its
# [solution](../../solutions/advanced/14_three_dimensions.ipynb). [Lesson 15](15_design_studio.ipynb)
# searches all layouts at once.
#
# **References.** Narayanan and others 2021, *Efficient Large-Scale Language Model Training on GPU Clusters*,
# [arXiv:2104.04473](https://arxiv.org/abs/2104.04473). Korthikanti and others 2022,
# [arXiv:2205.05198](https://arxiv.org/abs/2205.05198). Rajbhandari and others 2019, *ZeRO*,
# [arXiv:1910.02054](https://arxiv.org/abs/1910.02054). PyTorch,
# [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) and
# [pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** Yours are `stage`, the layers that this rank's stage holds, `plan`, the `parallelize_module` plan of
# all its parameters (norms too, by `SequenceParallel`), `loss_fn`, `loader` (rows by *replica*, `mesh["dp"]`) and the sizes
# `pp`, `dp`, `tp`. The last axis lies in the node:
#
# ```python
# import torch
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from torch.distributed.pipelining import PipelineStage, Schedule1F1B
# from torch.distributed.tensor.parallel import parallelize_module
#
# mesh = init_device_mesh(device, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
# stage = parallelize_module(stage, mesh["tp"], plan)  # slices first
# stage = fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)  # then shards: else each micro-batch gathers again
# optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
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
# norms = []
# for inputs, targets in loader:
#     schedule.step(*([inputs] if pipe.is_first else []), target=targets if pipe.is_last else None)
#     norms.append(clip(limit=1.0).item())
#     optimizer.step()
#     optimizer.zero_grad()
# ```
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
# **Look at** the norm of the first step: the same on every rank, and that of a small copy of your model in one process.
