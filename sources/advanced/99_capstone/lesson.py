# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 99 Capstone: nine questions
#
# {{badges}}
#
# **The question.** Can you defend an answer? Nine interview questions, each with two minutes of answer, the cell that shows each
# sentence, and numbers to have at hand. The [lab](../../labs/advanced/99_capstone.ipynb) has fourteen timed cases.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 280 for the lab | any laptop; no GPU is used | under a minute of computing |

# %% [markdown]
# ## A bet
#
# Section 1 has nine numbers that people pass on. By what factor is the worst off?

# %%
my_bet_factor = 5

# %% tags=["setup"]
here = setup("advanced/99")

# %%
from dataclasses import replace

import pandas as pd
import torch

from utils import GB, Batch, Cluster, Evidence, Lora, Plan, cost, estimate, format_bytes, model_shape
from utils import score, scoreboard, search, show
from utils.catalog import device, link, price
from utils.labs.faulty_runs import spoiled_run
from utils.labs.slow_jobs import SlowJob, lesson_job
from utils.planner import SearchSpace, axis_bytes, plan_name
from utils.planner.flops import hardware_flops, model_flops
from utils.planner.goodput import goodput
from utils.planner.step_time.kernels import ceiling_flops_per_second, flash_flops_per_second
from evidence.validation.tables import table
from utils.lessons.lesson_99.sayings import Saying, draw_sayings

# %% [markdown]
# ## 1. Nine numbers that circulate
#
# What is said, and what is right. *Predicted* is arithmetic or the course's planner.

# %%
def alone(model, sequences, length, gpu="A100-80GB", **choices):
    """One card with everything on it."""
    return estimate(model, Cluster(gpu=gpu, nodes=1, gpus_per_node=1), Plan(micro_batch=sequences, **choices),
                    Batch(sequences=sequences, sequence_length=length))


seven_b, adapters, qlora = "llama-2-7b", Lora(rank=8), Lora(rank=8, base="nf4-dq")
peaks = {name: alone(seven_b, 1, 2048, lora=kind).peak.allocated_bytes
         for name, kind in (("all", None), ("LoRA", adapters), ("QLoRA", qlora))}
trillion = next(row for row in table("narayanan_table1") if float(row["params_b"]) > 1000)
hfu = float(trillion["tflops_per_gpu_incl_recompute"]) / 312
one_t, batch_1t = model_shape("megatron-1t"), Batch(sequences=3072, sequence_length=2048)
full = Plan(recompute="full", attention="unfused")
mfu = hfu * model_flops(one_t, batch_1t) / hardware_flops(one_t, full, batch_1t)
recompute = next(row for row in table("korthikanti_table4") if row["experiment"] == "baseline with full recompute")
sharded = estimate("opt-1.3b", Cluster(gpu="V100-32GB", nodes=1, gpus_per_node=4), Plan(dp=4, zero_stage=3, framework="deepspeed"),
                   Batch(sequences=4, sequence_length=1024))

# %%
P_175, a100 = 175e9, device("A100-80GB")
sayings = [
    Saying("fp32 Adam: 18 x 4 bytes a parameter", 72, 16, "bytes", Evidence.PREDICTED),
    Saying("175B, Megatron-LM: states on 1 of 64", 600 / 64, 18 * P_175 / 64 / GB, "GB", Evidence.PREDICTED),
    Saying("7B, QLoRA: peak of 2,048 tokens", 3.5, peaks["QLoRA"] / GB, "GB", Evidence.PREDICTED),
    Saying("7B, LoRA: share of full training's peak", 0.1, 100 * peaks["LoRA"] / peaks["all"], "%", Evidence.PREDICTED),
    Saying("1.3B, ZeRO-3 on 4 ranks: peak, 16P/N", 16 * 1.3158e9 / 4 / GB, sharded.peak.allocated_bytes / GB, "GB", Evidence.PREDICTED),
    Saying("A100: NVLink, one direction", 600, a100.nvlink.link_bytes_per_second / GB, "GB/s", Evidence.PUBLISHED),
    Saying("A100: fastest bf16 matrix product", 312, a100.matmul_ceiling_tflops, "TFLOP/s", Evidence.PUBLISHED),
    Saying("1T on 3,072 A100: MFU", 100 * hfu, 100 * mfu, "%", Evidence.PREDICTED),
    Saying("22B layer: full recomputation, more time", 33, float(recompute["overhead_pct"]), "%", Evidence.PUBLISHED),
]
worst = max(sayings, key=lambda row: max(row.factor, 1 / row.factor))
show(draw_sayings(sayings, title="Nine numbers that circulate, over what is right"), alt="Nine lines from 1: "
     + "; ".join(f"{row.name} {row.factor:.2g} times" for row in sayings) + ".")
print(f"worst: {worst.name}, off by a factor of {max(worst.factor, 1 / worst.factor):.0f}; you bet {my_bet_factor}")

# %% [markdown]
# **Read it.** Red is too large, blue too small; eight are off by less than six. The worst counts trained parameters and calls them
# memory. fp32 takes 16 bytes a parameter (weight, gradient, two moments), Megatron-LM 18: bf16 weight, fp32 gradient, copy, moments.

# %% [markdown]
# ## 2. The questions
#
# Below each answer its sentences are shown, in their order: the pointer over a link names the cell. Words: [glossary](../00_glossary.ipynb).
#
# ### Q1. The components of memory
#
# *Name the components of training memory, and the technique for each. Lab: `components`.*
#
# Parameters, gradients and Adam's moments take 16 bytes a parameter, in fp32 and under autocast. Activations grow with every sample,
# and a language model's logits can be the largest. Memory peaks at one moment: what is freed at another saves nothing. Recomputation,
# mixed precision and a loss in chunks shrink activations. Sharding, offload and 8-bit moments shrink states. Adapters drop most
# gradients and moments, and keep most activations.
#
# *Shown in* [01§3](../beginner/01_where_memory_goes.ipynb#3.-The-states:-a-formula-without-surprises "P = sum"), [01§4](../beginner/01_where_memory_goes.ipynb#4.-Activations:-what-grows-with-the-batch "your ledger"), [01§6](../beginner/01_where_memory_goes.ipynb#6.-A-transformer:-the-last-layer-can-be-the-largest "language_optimizer"), [01§5](../beginner/01_where_memory_goes.ipynb#5.-Why-the-peak-is-where-it-is "maxima"), [05§2](../intermediate/05_checkpointing.ipynb#2.-Which-blocks? "extra_percent"), [02§3](../beginner/02_mixed_precision.ipynb#3.-What-halves,-and-which-moment-decides "when_backward_begins"), [05§5](../intermediate/05_checkpointing.ipynb#5.-Logits-are-activations-too "loss_runs"), [09§1](../intermediate/09_sharding.ipynb#1.-The-staircase "textbook"), [07§2](../intermediate/07_offload.ipynb#2.-By-hand "draw_sides"), [06§1](../intermediate/06_seven_billion.ipynb#1.-The-states-sheet "moments_8"), [06§2](../intermediate/06_seven_billion.ipynb#2.-LoRA-by-hand "LoRA trains").

# %%
amp = {"framework": "fsdp"}  # weights, gradients and moments in fp32, matrix products in bf16: 16 bytes a parameter
ways = {"recompute blocks": {"recompute": "full"}, "loss in chunks": {"loss": "chunked"}, "step in backward": {"optimizer_in_backward": True},
        "optimizer to host": {"offload": "optimizer"}, "LoRA": {"lora": adapters}, "QLoRA": {"lora": qlora}}
peak, saved = {}, {}
for batch in (4, 16):
    peak[batch] = alone("opt-1.3b", batch, 1024, **amp).peak
    saved[f"batch {batch}: saved, GB"] = {
        name: (peak[batch].allocated_bytes - alone("opt-1.3b", batch, 1024, **amp, **how).peak.allocated_bytes) / GB
        for name, how in ways.items()}
    print(f"batch {batch}: a peak of {peak[batch].allocated_bytes / GB:.1f} GB in {peak[batch].phase}, of which",
          *(f"{name} {held / GB:.1f}," for name, held in peak[batch].bytes_by_category.items() if held > 0.1 * GB))
pd.DataFrame(saved).round(1).rename_axis(columns="OPT-1.3B, sequences of 1,024 (predicted)")

# %% [markdown]
# **Read it.** At batch 4 the peak is the optimizer's step, where no activation is left: what shrinks them saves nothing. At batch 16 it
# is forward, where no gradient is alive.
#
# ### Q2. AMP turns to NaN
#
# *Training with AMP turns to NaN: how do you debug it? Lab: `nan_run`.*
#
# A scaler skips steps while its scale is too large: that is healthy. A scale that falls without end is a fault, such as an overflow in
# forward. I record which module first gives something not finite, and keep that one in fp32. I run fp32 beside it: if that explodes,
# too, blame the learning rate or the data. bf16 has the range of fp32. I clip after `unscale_`. One NaN in the data looks like one more
# skipped step, until I check the input.
#
# *Shown in* [03](../beginner/03_when_numbers_break.ipynb#Planted:-a-scale-that-is-too-large "skipped steps"), [03](../beginner/03_when_numbers_break.ipynb#%28c%29-NaN,-and-the-scale-falls-without-end "written_by_hand"), [03§3](../beginner/03_when_numbers_break.ipynb#3.-A-run,-and-its-flight-recorder "summary"), [03§4](../beginner/03_when_numbers_break.ipynb#4.-What-must-stay-in-fp32 "Fp32Norm"), [03](../beginner/03_when_numbers_break.ipynb#%28d%29-fp16-skips-step-after-step,-so-blame-fp16? "before_first_skip"), [03§1](../beginner/03_when_numbers_break.ipynb#1.-The-formats "largest"), [03](../beginner/03_when_numbers_break.ipynb#%28a%29-The-loss-falls-in-fp32-and-hardly-in-fp16 "clipped"), [03§6](../beginner/03_when_numbers_break.ipynb#6.-Break-it,-diagnose-it:-a-NaN-in-the-data "spoiled").

# %%
records = spoiled_run()
bad = next(record for record in records if record.first and record.first.kind == "input")
print("scales:", *(f"2^{int(record.scale).bit_length() - 1}" for record in records), " skipped:", sum(record.skipped for record in records))
print(f"first that is more than a scale: step {bad.step}, {bad.first} (measured)")

# %% [markdown]
# **Read it.** In fp16, four of five skipped steps are the scaler's search. The fifth had a NaN in its input.
#
# ### Q3. Scaling is slow
#
# *Scaling is slow: how do you find out why? Lab: `four_ranks`.*
#
# Efficiency is one worker's step alone over the step of N, each with the batch that the one had. I time loading, computing and sending
# apart, on every rank. All wait for the last one, so the rank that waits least is the slow one. Sending hides behind backward if buckets
# leave early, and small buckets pay a start each. Accumulation without `no_sync` sends after every micro-batch. The losses
# must stay those of one process.
#
# *Shown in* [04§5](../beginner/04_four_ranks.ipynb#5.-Is-it-faster?-Scaling-efficiency "at_worst"), [04](../beginner/04_four_ranks.ipynb#Why-is-it-slow? "take_apart"), [11§6](11_links.ipynb#6.-Eight-nodes,-three-times-as-fast "job.look"), [04](../beginner/04_four_ranks.ipynb#Buckets,-and-overlap "profile_backwards"), [11§4](11_links.ipynb#4.-Buckets-and-overlap "bucket_cost"), [04](../beginner/04_four_ranks.ipynb#Accumulation,-and-no_sync "no_sync"), [04§2](../beginner/04_four_ranks.ipynb#2.-Is-it-right?-A-test,-and-four-faults "apart").

# %%
workers = 4  # here nodes; each has the batch that one has alone
one_node = SlowJob(nodes=1).step().step_seconds
causes = {"healthy": {}, "0.2 s of loading on each": {"load_seconds": tuple((node, 0.2) for node in range(workers))},
          "one 1.4 times slower": {"slow_nodes": ((2, 1.4),)}, "all gradients in one bucket": {"bucket_bytes": 2_600_000_000},
          "no no_sync, 16 passes": {"reduced_passes": 16}}
for name, how in causes.items():
    step = SlowJob(nodes=workers, **how).step()
    waits = [round(seconds, 2) for seconds in step.seconds("waiting for a node")]
    print(f"{name:<28} efficiency {one_node / step.step_seconds:4.0%}, each waits for another {waits} s (simulated)")

# %% [markdown]
# **Read it.** The slow worker waits for nobody. One bucket leaves when backward ends: nothing hides it.
#
# ### Q4. ZeRO-3 or FSDP
#
# *ZeRO-3 or FSDP, for which case? Lab: `zero_or_fsdp`.*
#
# They are one idea: parameters, gradients and moments are split N ways, activations are not. Both need more than 16P/N, for gathered
# layers and buckets. I take the lowest stage that fits: stage 1 reduces gradients and gathers new parameters once a step, stage 2 reduces
# in every backward, stage 3 gathers parameters twice for every micro-batch, too. DeepSpeed is for a configuration file, or for states on
# NVMe. FSDP2 is for PyTorch code, for tensor parallelism, and for checkpoints that another number of ranks loads without conversion. On
# one GPU, without offload, neither saves a byte.
#
# *Shown in* [09§3](../intermediate/09_sharding.ipynb#3.-The-same-model,-five-ways "first loss"), [99](99_capstone.ipynb#Sharding-and-activations "Category.ACTIVATIONS"), [09§4](../intermediate/09_sharding.ipynb#4.-What-each-really-holds "largest"), [09§5](../intermediate/09_sharding.ipynb#5.-What-each-really-sends "round_bytes"), [09](../intermediate/09_sharding.ipynb#Break-it:-ZeRO-2-with-accumulation "accumulated"), [09§3](../intermediate/09_sharding.ipynb#3.-The-same-model,-five-ways "zero_config"), [07§4](../intermediate/07_offload.ipynb#4.-DeepSpeed-and-FSDP2 "FSDP2"), [14§2](14_three_dimensions.ipynb#2.-Compose "one_process"), [16§2](16_runs_that_survive.ipynb#2.-A-checkpoint-of-many-ranks "on_two"), [09](../intermediate/09_sharding.ipynb#One-GPU "on_one_rank").

# %%
small, eight = model_shape("opt-1.3b"), Cluster(gpu="A100-40GB", nodes=1, gpus_per_node=8)
whole, rows = Batch(sequences=64, sequence_length=1024), []
for micro in (8, 1):
    for stage in (0, 1, 2, 3):
        plan = Plan(dp=8, zero_stage=stage, micro_batch=micro, framework="fsdp")
        held, sent = estimate(small, eight, plan, whole).peak, axis_bytes(small, plan, whole)[0]
        rows.append({"micro-batch": micro, "stage": stage, "states at the peak, GB": held.state_bytes / GB,
                     "peak, GB": held.allocated_bytes / GB, "a rank sends, GB": sum(sent.values()) / GB})
pd.DataFrame(rows).set_index(["micro-batch", "stage"]).round(1).rename_axis(columns="1.3B, 8 GPUs, 64 sequences (predicted)")

# %% [markdown]
# **Read it.** FSDP2 reduces gradients in fp32 and gathers in bf16: stage 0 moves 4 + 4 bytes a parameter, stage 1 only 4 + 2. With
# micro-batch 1 there are eight backwards. With micro-batch 8 the peak comes before the gradients.
#
# ### Q5. Out of memory
#
# *A job runs out of memory: what do you do, in which order? Lab: `order_of_cures`, `unknown_job`.*
#
# I profile before I cure: which phase, which category, what is alive after each step. Growth from step to step means that something is
# kept, and no technique cures that. Reserved far above alive is fragmentation, or cache of an earlier peak. If the peak is one moment, I
# cure that one: validation without `no_grad`, the logits, the optimizer's copies. Then come the general cures, by their price:
# accumulation repeats no arithmetic, and costs less here than recomputation. The last resort is a larger card.
#
# *Shown in* [10§1](../intermediate/10_oom_clinic.ipynb#1.-Read-the-error,-then-count-between-steps "after_steps"), [10](../intermediate/10_oom_clinic.ipynb#kept_graph "half_cures"), [10§4](../intermediate/10_oom_clinic.ipynb#4.-Alive-is-not-reserved:-fragmentation "fragmented.replayed"), [10](../intermediate/10_oom_clinic.ipynb#validation "no_grad"), [10](../intermediate/10_oom_clinic.ipynb#large_vocabulary "in_chunks"), [10](../intermediate/10_oom_clinic.ipynb#optimizer_doubles "treat"), [10§6](../intermediate/10_oom_clinic.ipynb#6.-In-which-order? "general"), [99](99_capstone.ipynb#Q5.-Out-of-memory "or recompute all"), [15§4](15_design_studio.ipynb#4.-Search,-and-ask-why "search").

# %%
run = Batch(sequences=8, sequence_length=4096)
one = Cluster(gpu="A100-80GB", nodes=1, gpus_per_node=1)
first = estimate("llama-2-7b", one, Plan(micro_batch=8, framework="bf16"), run)  # weights, gradients and moments: 8 bytes a parameter
print(f"7B all in bf16, 8 x 4,096 tokens, {first.verdict}: {format_bytes(first.peak.needed_bytes)}, {format_bytes(first.missing_bytes)} too much")
for name, change in {"accumulate, 1 at a time": {"micro_batch": 1}, "and loss in chunks": {"micro_batch": 1, "loss": "chunked"},
                     "or recompute all": {"recompute": "full", "micro_batch": 8}}.items():
    found = estimate("llama-2-7b", one, replace(first.plan, **change), run)
    print(f"{name:<24}{format_bytes(found.peak.needed_bytes):>11}, {found.step_seconds / first.step_seconds - 1:+.0%} time, {found.verdict} (predicted)")

# %% [markdown]
# **Read it.** Pure bf16 rounds small updates away; 16 bytes a parameter would be 108 GB. "Within the allocator's reach": gaps between
# blocks may fill the card.
#
# ### Q6. Eight nodes
#
# *Eight nodes are only three times as fast as one: why? Lab: `eight_nodes`.*
#
# I look at hardware, network, collectives and code, in that order. One hot GPU makes 63 others wait, and there it looks like a slow
# collective. `Using network Socket` in NCCL's log means TCP, also where a fast card is. A ring sends less than twice the bytes whatever
# the number of ranks: more ranks cost starts. I measure each cure alone, and again after every
# other: what another fault hides saves nothing yet.
#
# *Shown in* [11](11_links.ipynb#A-bet "lesson_job"), [11§6](11_links.ipynb#6.-Eight-nodes,-three-times-as-fast "job.look"), [11§1](11_links.ipynb#1.-A-ring-by-hand "sent_bytes"), [11§2](11_links.ipynb#2.-What-a-message-costs "ring_seconds"), [11§6](11_links.ipynb#6.-Eight-nodes,-three-times-as-fast "CURES").

# %%
job = lesson_job()
layers = {"hardware": "slow_nodes", "network": "network", "collectives": "reduced_passes", "code": "load_seconds"}


def times_one_node(*cured):
    return 8 * one_node / job.fixed(*(layers[layer] for layer in cured)).step().step_seconds


same_loader = SlowJob(nodes=1, load_seconds=job.load_seconds).step().step_seconds
print(f"as found {8 * same_loader / job.step().step_seconds:.1f} times one node with the same script, {times_one_node():.1f} times one whose loader")
print(f"runs ahead; all four cured {times_one_node(*layers):.1f}; below two cures, on the diagonal one (simulated, beside the latter):")
pd.DataFrame({b: {a: times_one_node(a, b) for a in layers} for b in layers}).round(1)

# %% [markdown]
# **Read it.** Hardware and code show their worth once the network is cured. Network and collectives cure one wait: together they bring
# no more than each alone.
#
# ### Q7. Half of the cards
#
# *32 GPUs and a model that does not fit: what do you choose, and what is the main worry? Lab: `half_the_cards`.*
#
# 18 bytes times 175B over 32 cards is more than a card has. So its optimizer goes to the host, if that has room.
# Tensor parallelism stays in the node, and the pipeline goes across nodes, because it sends least. Many more micro-batches than stages
# keep the bubble small. The worry is a slow network: there the pipeline takes twice as long, and ZeRO-3 twenty to fifty times.
#
# *Shown in* [15](15_design_studio.ipynb#Test-yourself "half = replace"), [15](15_design_studio.ipynb#Test-yourself "roomy"), [12§5](12_tensor_parallel.ipynb#5.-Why-it-stays-inside-a-node "passed"), [14§5](14_three_dimensions.ipynb#5.-The-bytes-on-every-link "leaving"), [13](13_pipelines.ipynb#The-price-of-a-message "bubble_closed"), [15](15_design_studio.ipynb#One-change-at-a-time "zero_3").

# %%
four = Cluster(gpu="A100-80GB", nodes=4)
slow = replace(four, network_bytes_per_second=link("Ethernet 10G").link_bytes_per_second)
b512 = Batch(sequences=512, sequence_length=2048)
best = search("gpt-3-175b", four, b512, space=SearchSpace(offload=("none", "optimizer"))).best
zero_3 = Plan(dp=32, zero_stage=3, micro_batch=4, recompute="full", offload="optimizer", framework="fsdp")  # 8 do not fit
print(f"18 x 175B / 32 = {18 * P_175 / 32 / GB:.0f} GB a card; on the host {best.host_bytes / GB:,.0f} of a node's {four.host_bytes_per_node / GB:,.0f} GB")
for name, plan in ((f"Megatron-LM, {plan_name(best)}", best.plan), ("ZeRO-3 by FSDP2", zero_3),
                   ("ZeRO-3 by DeepSpeed", replace(zero_3, framework="deepspeed"))):
    fast, late = (estimate("gpt-3-175b", machines, plan, b512).step_seconds for machines in (four, slow))
    print(f"{name}: {fast:,.0f} s a step, on 10G Ethernet {late / fast:,.1f} times as long (predicted)")

# %% [markdown]
# **Read it.** A node has eight ports of 200 Gb/s, or one of 10. Megatron-LM's plans have no ZeRO-3: two others run it.
#
# ### Q8. 175B on 64 GPUs
#
# *175B on 64 GPUs: lay it out. Lab: `lay_out`.*
#
# TP x PP x DP is the number of GPUs. A second replica of 175B needs ZeRO-1, and leaves no margin: DP is 1. TP 8 with sequence
# parallelism in the node and PP 8 across nodes fits with a margin, and recomputes nothing. Early stages hold more micro-batches, the last
# one the logits. A search finds TP 4 x PP 16, a little faster and fuller. On 300B tokens it takes most of a year: I name the interval, what
# failures take, the MFU that somebody reached, and ask whether fewer parameters would do.
#
# *Shown in* [15§1](15_design_studio.ipynb#1.-Ranks-on-nodes "first = Plan"), [15§3](15_design_studio.ipynb#3.-The-first-layout,-stage-by-stage "compare_plans"), [13§3](13_pipelines.ipynb#3.-What-a-stage-holds "in_flight"), [15§4](15_design_studio.ipynb#4.-Search,-and-ask-why "search"), [15§5](15_design_studio.ipynb#5.-Days,-dollars,-failures "bill"), [15§5](15_design_studio.ipynb#5.-Days,-dollars,-failures "goodput"), [15§5](15_design_studio.ipynb#5.-Days,-dollars,-failures "budget_usd").

# %%
eight_nodes = Cluster(gpu="A100-80GB", nodes=8, usd_per_gpu_hour=price("A100-80GB", "Lambda").usd_per_gpu_hour)
b1536 = Batch(sequences=1536, sequence_length=2048)
laid = search("gpt-3-175b", eight_nodes, b1536).best
eights = Plan(tp=8, pp=8, sequence_parallel=True)
for plan in (eights, replace(eights, pp=4, dp=2), replace(eights, pp=4, dp=2, zero_stage=1), laid.plan):
    found = estimate("gpt-3-175b", eight_nodes, plan, b1536)
    print(f"{plan_name(found):<30}{found.peak.needed_bytes / GB:4.0f} GB on the fullest GPU, {found.step_seconds:.0f} s a step, {found.verdict} (predicted)")
bill = cost(laid, 300e9)
proven = float(next(row for row in table("korthikanti_table5") if row["model"] == "175B")["mfu_pct_present"]) / 100
print("{:.0f} to {:.0f} days, ".format(*bill.days_interval) + f"${bill.usd / 1e6:.2f}M, at an MFU of {laid.mfu:.0%} (predicted)")
print(f"at {proven:.0%}, published for 175B on 64 A100 with batch 64: {bill.days * laid.mfu / proven:.0f} days, ${bill.usd * laid.mfu / proven / 1e6:.2f}M")

# %% [markdown]
# **Read it.** 64% is more than anyone here has published on A100s: do not promise it.
#
# ### Q9. A100 or A10
#
# *13B: A100s at 45% MFU with 3D parallelism, or cheaper A10s at 38% with data parallelism and checkpointing? Lab: `two_offers`.*
#
# The premise fails: 13B has 16 bytes of states a parameter, and plain data parallelism keeps all of them on every card. Recomputation
# takes activations away, not states. With ZeRO-3 it fits: at 100 Gb/s a node the A10s reach about their 38%, at 10 Gb/s a fifth of it. I
# compare dollars for the same work, not for an hour, and ask who meets the deadline.
#
# *Shown in* [99](99_capstone.ipynb#Q9.-A100-or-A10 "state_bytes"), [05§6](../intermediate/05_checkpointing.ipynb#6.-Scale-up:-1.3-billion-parameters-on-40-GB "large_runs"), [99](99_capstone.ipynb#Q9.-A100-or-A10 "cheap.mfu"), [15§5](15_design_studio.ipynb#5.-Days,-dollars,-failures "offers"), [17a](17a_what_a_run_costs.ipynb#The-scenario-as-asked:-A100s-or-A10s "thirteen").

# %%
for card, plan, claimed in (("A100-80GB", Plan(tp=4, pp=2, sequence_parallel=True), 0.45), ("A10", Plan(dp=8, recompute="full"), 0.38)):
    machines = Cluster(gpu=card, nodes=1)
    found = estimate("llama-2-13b", machines, replace(plan, framework="zero-paper"), Batch(sequences=512, sequence_length=4096))
    hourly, peak = price(card, "Lambda").usd_per_gpu_hour, device(card).bf16_tflops
    print(f"{card:<10} {found.peak.state_bytes / GB:5.0f} GB of states a card, {found.verdict}; ${hourly / (peak * claimed * 3600 / 1e6):.2f} an exaFLOP "
          f"at the claimed {claimed:.0%} (predicted)")
for gigabits in (200, 100, 50, 10):
    machines = Cluster(gpu="A10", nodes=16, network_bytes_per_second=gigabits / 8 * GB, network_ports=1,
                       network_kind="TCP" if gigabits == 10 else "RoCE")
    cheap = estimate("llama-2-13b", machines, Plan(dp=128, zero_stage=3, micro_batch=4, recompute="full", framework="deepspeed"),
                     Batch(sequences=1024, sequence_length=4096))
    print(f"128 A10, ZeRO-3, {gigabits} Gb/s a node: {cheap.verdict}; MFU {cheap.mfu:.0%} (predicted)")

# %% [markdown]
# ## 3. The scenarios
#
# | scenario | end (evidence) | file | case |
# |---|---|---|---|
# | ResNet-50 overflows 16 GB | [02§6](../beginner/02_mixed_precision.ipynb#6.-The-scenario-as-asked "here.write_script"), [§4](../beginner/02_mixed_precision.ipynb#4.-What-fills-a-16-GB-card "on_the_card") | `resnet50_amp.py` | `sixteen_gb` |
# | ResNet to four GPUs | [04§6](../beginner/04_four_ranks.ipynb#6.-The-scenarios-as-asked "DDP + AMP") | `train.py` | `four_ranks` |
# | a CNN to four | [04§6](../beginner/04_four_ranks.ipynb#6.-The-scenarios-as-asked "four ranks, DDP") | `train.py` | `four_ranks` |
# | 7B on 24 GB | [06§5](../intermediate/06_seven_billion.ipynb#The-scenario-as-asked:-a-script-for-a-real-card "here.write_script"), [§4](../intermediate/06_seven_billion.ipynb#4.-The-whole-run "run_ranks(on_rank") | `finetune.py` | `seven_billion` |
# | 7B, PEFT or offload | [07§5](../intermediate/07_offload.ipynb#5.-The-scenario-as-asked "here.write_script"), [§5](../intermediate/07_offload.ipynb#5.-The-scenario-as-asked "full + offload") | `offload.py` | `seven_billion` |
# | 1.3B, less memory, at speed | [09](../intermediate/09_sharding.ipynb#The-job "job.write") | `lesson-09` | `zero_or_fsdp` |
# | 100B on 64 | [14§4](14_three_dimensions.ipynb#4.-Real-size:-the-memory-of-every-stage "planned"), [files](14_three_dimensions.ipynb#The-same-plan-as-files "job.write") | `lesson-14` | `lay_out` |
# | 1B on 8 x 8 | [14§6](14_three_dimensions.ipynb#6.-One-billion-on-64-GPUs "SCHEMES") | `lesson-14` | `one_billion` |
# | 130B, a budget | [15§6](15_design_studio.ipynb#6.-The-scenario-as-asked:-defend-a-design "verdict") | `lesson-15` | `half_the_cards` |
# | 175B, checkpoints | [16§2](16_runs_that_survive.ipynb#The-scenario-as-asked:-a-checkpoint-strategy "gpt-3-175b"), [15§4](15_design_studio.ipynb#4.-Search,-and-ask-why "search") | `lesson-16` | `lay_out` |
# | 70B, failing GPUs | [16§1](16_runs_that_survive.ipynb#1.-How-often "RunPlan"), [§3](16_runs_that_survive.ipynb#3.-A-save-that-is-cut-off "saves_twice") | `lesson-16` | `survive` |
# | 13B, A100 or A10 | [17a](17a_what_a_run_costs.ipynb#The-scenario-as-asked:-A100s-or-A10s "thirteen") | `lesson-17` | `two_offers` |

# %% [markdown]
# ## 4. Six sayings that no other lesson weighs
#
# The [folklore](../00_folklore.ipynb) has 26, each with its cell. *"TP 8 x PP 8 x DP 8 on 64 GPUs"*, and *"each pipeline rank with TP 8
# x PP 8 needs ZeRO-1"*:

# %%
try:
    estimate("gpt-3-175b", eight_nodes, Plan(tp=8, pp=8, dp=8, zero_stage=1), b1536)
except ValueError as sentence:
    print(sentence)
for stage in (0, 1):
    found = estimate("gpt-3-175b", eight_nodes, Plan(tp=8, pp=8, sequence_parallel=True, zero_stage=stage), b1536)
    print(f"TP 8 x PP 8 x DP 1, ZeRO-{stage}: {found.peak.state_bytes / GB:.1f} GB of states on the fullest GPU (predicted)")

# %% [markdown]
# **Verdict.** False: that is 512 GPUs. On 64 DP is 1: ZeRO-1 has nothing to share.
#
# ### Micro-batch and speed
#
# *"A larger micro-batch is faster."* Three models, as
# [BLOOM's team](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md) noted them:

# %%
noted = {row["line"]: row for row in table("bloom_prequel")}
for line in ("482", "518", "520", "584", "586", "608", "610"):
    row = noted[line]
    stages, micro_batches = int(row["pp"]), int(row["gbs"]) / int(row["dp"]) / int(row["mbs"])
    bubble = (stages - 1) / (micro_batches + stages - 1)
    print(f"{row['size_label']}, {row['n_gpus']} A100, TP {row['tp']} x PP {stages}, micro-batch {row['mbs']}: "
          f"{float(row['sec_per_it']):.1f} s an iteration (published), bubble {bubble:.0%} (predicted)")

# %% [markdown]
# **Verdict.** Up to a point: 2 gains 6% over 1; 8 loses 10% against 2 (close to out of memory, they note), loses 1%, gains 4%. Products
# get faster, the bubble larger.
#
# ### Flash attention's rate
#
# *"It runs at the rate of matrix products."* Published shares of the peak, on an H100:

# %%
h100 = device("H100")
print(f"H100: fastest matrix product {ceiling_flops_per_second(h100) / 1e12:.0f} TFLOP/s")
for generation in (1, 2, 3):
    rate = flash_flops_per_second(h100, generation, 4096)
    print(f"FlashAttention-{generation}, causal, forward and backward: {rate / 1e12:.0f} TFLOP/s, {rate / ceiling_flops_per_second(h100):.0%} of it (predicted)")

# %% [markdown]
# **Verdict.** False, and an old kernel is slower still on a new card.
#
# ### Quantization-aware training, or not
#
# *"bitsandbytes is quantization-aware training."* One step of QLoRA:

# %%
from utils.catalog import ModelShape
from utils.models.finetune import build_finetune, finetune_step
from utils.models.pretrained import llama_config
from utils.techniques.bitsandbytes_import import bitsandbytes_problem

TINY = ModelShape(name="tiny", family="llama", layers=2, hidden=64, heads=4, feedforward=128, vocabulary=256, max_sequence=128)
if problem := bitsandbytes_problem():
    print(problem)
else:
    model, optimizer = build_finetune(llama_config(TINY), "QLoRA")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    finetune_step(model, optimizer, 2, 32)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    packed = [name for name, value in before.items() if name.endswith("weight") and value.dtype == torch.uint8]
    adapters_of = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    print(f"{len(packed)} packed weights, of which {len(moved & set(packed))} changed (measured)")
    print(f"{len(moved)} tensors changed, of which {len(moved & adapters_of)} are parts of adapters (measured)")
    assert packed and not moved & set(packed), "QLoRA's base is frozen: which packed weight moved?"

# %% [markdown]
# **Verdict.** False: that trains the weights that are quantized. Here they stay.
#
# ### Sharding and activations
#
# *"ZeRO-3 partitions activations."* OPT-1.3B, 8 sequences of 2,048 on each of 8 GPUs:

# %%
from utils.units import Category

for stage in (0, 1, 2, 3):
    plan = Plan(dp=8, zero_stage=stage, micro_batch=8, framework="fsdp")
    held = estimate("opt-1.3b", eight, plan, Batch(sequences=64, sequence_length=2048)).peak.bytes_by_category
    print(f"ZeRO-{stage}: activations {format_bytes(held[Category.ACTIVATIONS])}, parameters {format_bytes(held[Category.PARAMETERS])} a rank (predicted)")

# %% [markdown]
# **Verdict.** False: a rank keeps what its own batch needs, in every stage.

# %%
score("99", f"175B, 64 A100: {plan_name(laid)}", peak_bytes=int(laid.peak.needed_bytes), step_seconds=laid.step_seconds,
      evidence=Evidence.PREDICTED)
scoreboard("99")

# %% [markdown]
# ## Break it, diagnose it
#
# An answer to mark: *"175B is 600 GB of state, 9.4 GB a GPU on 64, so micro-batches can be large. I take ZeRO-3
# over all 64 to keep it simple; activations are sharded too. A checkpoint every hour."* Find four faults, then run the cell.

# %%
claim = Plan(dp=64, zero_stage=3, micro_batch=8, framework="fsdp")
marked = estimate("gpt-3-175b", eight_nodes, claim, b1536)
print(f"states {marked.peak.state_bytes / GB:.1f} GB, activations {marked.peak.bytes_by_category[Category.ACTIVATIONS] / GB:.0f} GB a GPU: {marked.verdict}")
mended = estimate("gpt-3-175b", eight_nodes, replace(claim, micro_batch=2, recompute="full"), b1536)
print(f"with recomputation and micro-batch 2: {mended.verdict}, {mended.step_seconds / laid.step_seconds:.1f} times the step of {plan_name(laid)}")
low, high = (seconds / 3600 for seconds in goodput(eight_nodes, checkpoint_seconds=60).checkpoint_interval_seconds)
print(f"with saves of 60 s and published failure rates, Daly's interval is {low:.1f} to {high:.1f} h (predicted)")

# %% [markdown]
# **Diagnose it.** (1) 600 GB are a fifth of 16 bytes a parameter. (2) Activations are each rank's own, and overflow. (3) ZeRO-3 fits with
# recomputation and small micro-batches, and is slower than Q8's layout. (4) The interval follows from the failure rate and the save.
#
# ## Recap
#
# - Say the number, its evidence, and what would change your mind.
# - Check the premise: that of Q9 is false.
# - Sit the [lab](../../labs/advanced/99_capstone.ipynb) (`make my-labs`), then open its
#   [solution](../../solutions/advanced/99_capstone.ipynb). `sitting.page()` writes your results.

# %% [markdown]
# ## On Monday
#
# Two numbers to have at hand: the states a card must hold, and the share of its peak that a run reaches. `model` is all trained, and
# counted before anything shards it over `cards` by ZeRO-3 or FSDP; `peak_flops` is the dense peak of your data type.
#
# ```python
# parameters = sum(p.numel() for p in model.parameters())
# states_gb = 16 * parameters / cards / 1e9              # Adam; 18 where bf16 weights have gradients in fp32, 8 all in bf16
# mfu = 6 * parameters * tokens_per_second_per_card / peak_flops   # attention's products come on top at long sequences
# ```
#
# With `Trainer`, tokens a second come from its own count:
#
# ```python
# args.include_num_input_tokens_seen = "all"             # TrainingArguments
# trainer.train()
# done = trainer.state
# seconds = next(row["train_runtime"] for row in reversed(done.log_history) if "train_runtime" in row)
# tokens_per_second_per_card = done.num_input_tokens_seen / seconds / args.world_size
# ```
