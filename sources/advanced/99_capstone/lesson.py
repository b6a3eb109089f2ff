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
# **The question.** Can you answer nine interview questions in half a minute each, and defend every answer with a number?
# Two habits help: ask of every number what it counts, and look before you cure.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 280 for the lab | any laptop, no GPU | under a minute |

# %% [markdown]
# ## A bet
#
# Section 1 shows seven true numbers, each quoted for something else. By what factor does the worst mislead?

# %%
my_bet_factor = 5

# %% tags=["setup"]
here = setup("advanced/99")

# %%
from dataclasses import replace

import pandas as pd

from utils import GB, Batch, Cluster, Lora, Plan, cost, estimate, model_shape, search, show
from utils.catalog import device, link, price
from utils.labs.faulty_runs import spoiled_run
from utils.labs.slow_jobs import SlowJob, lesson_job
from utils.planner import SearchSpace, axis_bytes, framework, plan_name
from utils.planner.flops import model_flops
from utils.planner.step_seconds.kernels import ceiling_flops_per_second, flash_flops_per_second
from utils.units import Category
from utils.views.lanes import draw_lanes
from utils.views.rank_map import draw_ranks
from evidence.validation.tables import table
from utils.lessons.lesson_99.autocast import autocast_adds
from utils.lessons.lesson_99.bloom import bubble_share, noted_layouts, noted_micro_batches
from utils.lessons.lesson_99.peaks import draw_peaks
from utils.lessons.lesson_99.sayings import draw_sayings, seven_numbers

# %% [markdown]
# ## 1. Seven true numbers, of something else
#
# The first habit. The longer the line, the more its number misleads. *Predicted* means arithmetic or the course's planner.

# %%
sayings = seven_numbers()
worst = max(sayings, key=lambda row: row.off)
show(draw_sayings(sayings, title="Seven true numbers, quoted for something else"), alt="How many times off: "
     + "; ".join(f"{row.name} {row.off:.2g}" for row in sayings) + ".")
print(f"worst: {worst.name}, off by a factor of {worst.off:.0f}; you bet {my_bet_factor}")

# %% [markdown]
# **Read it.** The worst counts 2 of the 18 bytes that Megatron-LM holds for a parameter.

# %% [markdown]
# ## 2. The questions
#
# The second habit. Speak, then open the answer: what is bold must be said. The cell below it gives your number; *Next* is what you are
# asked then. Each sentence ends with its evidence: 01§3 is lesson 01, section 3. GB is 10^9 bytes, so an A100 of 80 GiB offers 85.
# Words: [glossary](../00_glossary.ipynb).
#
# ### Q1. The components of memory
#
# *Name them, and the technique for each.*
#
# <details><summary>Answer</summary>
#
# **Parameters, gradients and Adam's moments take 16 bytes a parameter, in fp32 and under autocast** [01§3](../beginner/01_where_memory_goes.ipynb#3.-The-states:-a-formula-without-surprises "P = sum"). **Activations grow with every
# sample** [01§4](../beginner/01_where_memory_goes.ipynb#4.-Activations:-what-grows-with-the-batch "your ledger"). **Memory peaks at one moment: what is freed at another saves nothing** [01§5](../beginner/01_where_memory_goes.ipynb#5.-Why-the-peak-is-where-it-is "maxima"). Recomputation and a
# loss in chunks shrink activations [05§2](../intermediate/05_checkpointing.ipynb#2.-Which-blocks? "extra_percent") [05§5](../intermediate/05_checkpointing.ipynb#5.-Logits-are-activations-too "loss_runs"). Sharding, offload and 8-bit moments shrink states [09§1](../intermediate/09_sharding.ipynb#1.-The-staircase "textbook") [06§1](../intermediate/06_seven_billion.ipynb#1.-The-states-sheet "moments_8"). Adapters drop
# gradients and moments, and keep most activations [06§2](../intermediate/06_seven_billion.ipynb#2.-LoRA-by-hand "LoRA trains").
#
# *Fails:* you never name the moment of the peak.
#
# </details>
#
# Behind each bar stands the moment of its peak.

# %%
def alone(model, sequences, length, gpu="A100-80GB", **choices):
    """One card with everything on it."""
    return estimate(model, Cluster(gpu=gpu, nodes=1, gpus_per_node=1), Plan(micro_batch=sequences, **choices),
                    Batch(sequences=sequences, sequence_length=length))


amp = framework("fsdp")  # on one card: weights, gradients and moments in fp32, matrix products in bf16
fused = replace(amp, name="fsdp, fused Adam", step_gradient_bytes=0)  # AdamW(fused=True) makes no temporaries
ways = {"as it is": {}, "recompute blocks": {"recompute": "full"}, "fused Adam": {"framework": fused},
        "LoRA on a bf16 base": {"lora": Lora(rank=8)}}
panels = {f"{batch} sequences of 1,024": {name: alone("opt-1.3b", batch, 1024, **{"framework": amp, **how}).peak for name, how in ways.items()}
          for batch in (2, 16)}
told = [f"{panel}, {name}: {peak.allocated_bytes / GB:.1f} GB in {peak.phase}" for panel, peaks in panels.items() for name, peak in peaks.items()]
show(draw_peaks(panels, title="OPT-1.3B, one GPU, FSDP2's bf16 policy: the peak and its moment (predicted)"), alt="; ".join(told) + ".")

# %% [markdown]
# *Next: "At 2 sequences recomputation saves nothing. Is it useless?"* No. At 2 the first bar peaks in the optimizer's step, where
# default Adam borrows one more fp32 copy of the parameters, and `fused=True` none. At 16 it peaks in forward: recomputation saves
# 24 GB, and fused Adam nothing.
#
# ```python
# optimizer = torch.optim.AdamW(model.parameters(), fused=True)
# torch.cuda.memory._record_memory_history()
# train_step()
# torch.cuda.memory._dump_snapshot("step.pickle")             # open at pytorch.org/memory_viz
# ```
#
# ### Q2. AMP turns to NaN
#
# *How do you debug it?*
#
# <details><summary>Answer</summary>
#
# **A scaler that skips steps while its scale is too large is healthy** [03](../beginner/03_when_numbers_break.ipynb#Planted:-a-scale-that-is-too-large "skipped steps"). **A scale that falls without end is a fault** [03](../beginner/03_when_numbers_break.ipynb#%28c%29-NaN,-and-the-scale-falls-without-end "written_by_hand").
# **I find where the first infinity or NaN stands** [Q2](99_capstone.ipynb#Q2.-AMP-turns-to-NaN "record.first"). A module that overflows stays in fp32 [03§4](../beginner/03_when_numbers_break.ipynb#4.-What-must-stay-in-fp32 "Fp32Norm"). bf16 has the
# range of fp32: where fp32 explodes as well, I look at the learning rate and the data [03§1](../beginner/03_when_numbers_break.ipynb#1.-The-formats "largest") [03](../beginner/03_when_numbers_break.ipynb#%28d%29-fp16-skips-step-after-step,-so-blame-fp16? "fp16, first losses").
#
# *Fails:* you change a setting before you know where the first NaN stands.
#
# </details>

# %%
spoiled = spoiled_run()
for record in spoiled:  # 16 steps in fp16, from a scale of 2^22; PyTorch's default is 2^16
    if record.skipped:
        print(f"step {record.step}: skipped at scale 2^{int(record.scale).bit_length() - 1}; first not finite: {record.first} (measured)")

# %% [markdown]
# *Next: "Five skipped steps in sixteen: healthy?"* Four are: the scale began too large. The fifth is a fault: its NaN stands in the
# data, and no precision cures it.
#
# ```python
# def watch(name):                                             # "On Monday" of lesson 03 watches gradients, too
#     def hook(module, inputs, output):                        # an inner module's hook runs before the outer one's
#         for side, tensor in [("input", each) for each in inputs] + [("output", output)]:
#             if torch.is_tensor(tensor) and not tensor.isfinite().all():
#                 raise FloatingPointError(f"the first that is not finite: {side} of {name} ({type(module).__name__})")
#     return hook
#
# hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
# with torch.autocast("cuda", dtype=torch.float16):
#     loss = model(**batch).loss
# for hook in hooks:                                           # they wait for the GPU at every module
#     hook.remove()
# scaler.scale(loss).backward()
# scaler.unscale_(optimizer)                                   # before the gradients are clipped
# torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
# scaler.step(optimizer)
# scaler.update()
# optimizer.zero_grad()
# ```
#
# ### Q3. Scaling is slow
#
# *How do you find out why?*
#
# <details><summary>Answer</summary>
#
# **Efficiency is one worker's step over the step of N, with the same script and batch a worker** [04§5](../beginner/04_four_ranks.ipynb#5.-Is-it-faster?-Scaling-efficiency "at_worst"). I time loading, computing and
# sending on every rank [04](../beginner/04_four_ranks.ipynb#Why-is-it-slow? "take_apart"). **All wait for the last one, so the rank that waits least is the slow one** [11§6](11_links.ipynb#6.-Eight-nodes,-three-times-as-fast "job.look"). Accumulation without `no_sync` sends after every micro-batch [04](../beginner/04_four_ranks.ipynb#Accumulation,-and-no_sync "no_sync").
#
# *Fails:* you blame the network before you time anything.
#
# </details>
#
# Which node never waits?

# %%
workers = 4  # here nodes; each has the batch that one has alone
one_node = SlowJob(nodes=1).step().step_seconds
causes = {"healthy": {}, "0.2 s of loading on each": {"load_seconds": tuple((node, 0.2) for node in range(workers))},
          "one node 1.4 times slower": {"slow_nodes": ((2, 1.4),)}, "no no_sync, 16 passes": {"reduced_passes": 16}}
traces = {name: SlowJob(nodes=workers, **how).step() for name, how in causes.items()}
for name, trace in traces.items():
    alone_seconds = one_node + causes[name].get("load_seconds", [(0, 0.0)])[0][1]  # the same script loads as slowly alone
    print(f"{name:<28} step {trace.step_seconds:.2f} s, efficiency {alone_seconds / trace.step_seconds:4.0%} (simulated)")
show(draw_lanes({f"node {node}": [span for span in spans if span.end_seconds - span.start_seconds > 1e-3]  # 0.3 ms of sending cannot be seen
                 for node, spans in enumerate(traces["one node 1.4 times slower"].stretches)},
                title="One node of four is 1.4 times slower: who waits (simulated)", evidence=None),
     alt="Four lanes of one step: nodes 0, 1 and 3 end backward early and wait; node 2 computes to the end and waits for nobody.")

# %% [markdown]
# Node 2. *Next: "All loaders are slow. Is that a scaling fault?"* No. One node with that loader is as slow, so efficiency stays at 100%.
#
# ```python
# for _ in range(3):                                           # the first steps are slower
#     train_step()
# with torch.profiler.profile() as profile:                    # on every rank: the slow one has the shortest NCCL kernels
#     train_step()
#     torch.cuda.synchronize()
# print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=10))   # older: self_cuda_time_total
#
# for number, batch in enumerate(batches, start=1):            # the micro-batches of one step
#     with contextlib.nullcontext() if number == len(batches) else model.no_sync():
#         (model(**batch).loss / len(batches)).backward()      # forward stands inside no_sync, or DDP sends nevertheless
# ```
#
# ### Q4. ZeRO-3 or FSDP
#
# *For which case?*
#
# <details><summary>Answer</summary>
#
# **Both split parameters, gradients and moments N ways; activations stay whole** [09§4](../intermediate/09_sharding.ipynb#4.-What-each-really-holds "fullest"). **I take the lowest stage that fits: ZeRO-1 sends once a step, ZeRO-2
# reduces in every backward, and ZeRO-3 also gathers parameters twice for every micro-batch** [09§5](../intermediate/09_sharding.ipynb#5.-What-each-really-sends "round_numbers") [09](../intermediate/09_sharding.ipynb#Break-it:-ZeRO-2-with-accumulation "accumulated"). DeepSpeed is for a
# configuration file, or states on NVMe [07§4](../intermediate/07_offload.ipynb#4.-DeepSpeed-and-FSDP2 "file_each"). FSDP2 is for PyTorch code, tensor parallelism with sharded parameters, and checkpoints that any
# number of ranks loads [14§2](14_three_dimensions.ipynb#2.-Compose "one_process") [16§2](16_runs_that_survive.ipynb#2.-How:-each-rank-writes-its-shard,-and-training-goes-on "on_two").
#
# *Fails:* you say ZeRO-3 shards activations.
#
# </details>
#
# The first column decides what fits, the last what it costs to accumulate.

# %%
small, eight = model_shape("opt-1.3b"), Cluster(gpu="A100-40GB", nodes=1, gpus_per_node=8)
whole, sharded = Batch(sequences=64, sequence_length=1024), Plan(dp=8, zero_stage=3, framework="fsdp")
schemes = {"DDP, autocast, reduces fp32": replace(sharded, zero_stage=0, framework=replace(amp, name="ddp", bucket_bytes=4))}
schemes |= {f"DeepSpeed ZeRO-{stage}, reduces bf16": Plan(dp=8, zero_stage=stage, framework="deepspeed") for stage in (1, 2, 3)}
schemes |= {"FSDP2, reduces fp32": sharded}


def sends(scheme, micro_batch):
    return sum(axis_bytes(small, replace(scheme, micro_batch=micro_batch), whole)[0].values()) / GB


rows = {name: {"peak at micro-batch 8 (GB)": estimate(small, eight, replace(scheme, micro_batch=8), whole).peak.allocated_bytes / GB,
               "sends at micro-batch 8 (GB)": sends(scheme, 8), "sends at micro-batch 1 (GB)": sends(scheme, 1)} for name, scheme in schemes.items()}
rows["DDP, autocast, reduces fp32"]["peak at micro-batch 8 (GB)"] += sum(autocast_adds(small, 8 * 1024)) / GB  # autocast keeps more than FSDP2's policy
fp32_gradients = 4 * small.parameter_count / GB  # a ring's rank sends 7/8 of them in a reduction; the loop below saves seven of eight
once = rows["FSDP2, reduces fp32"] | {"sends at micro-batch 1 (GB)": sends(sharded, 1) - 7 * 7 / 8 * fp32_gradients}
rows["FSDP2, reduces fp32 once a step"] = once
print(f"the card offers {eight.device.memory_bytes / GB:.1f} GB; whole fp32 gradients take {fp32_gradients:.1f} GB")
pd.DataFrame(rows).T.style.format(precision=1).set_caption("1.3B, 8 sequences of 1,024 a GPU and step, on 8 GPUs: what a rank holds and sends (predicted)")

# %% [markdown]
# DDP does not fit; ZeRO-1 is the lowest stage that does.
#
# *Next: "Why not stage 3 always?"* With one micro-batch a step, ZeRO-1 and ZeRO-3 send alike. With eight, ZeRO-3 sends eight times
# as much. So does FSDP2, unless it reduces once a step (last row, and this loop) and keeps whole gradients until then.
#
# ```python
# policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# for block in model.layers:
#     fully_shard(block, mp_policy=policy)
# fully_shard(model, mp_policy=policy)
# for number, batch in enumerate(batches, start=1):            # the micro-batches of one step
#     model.set_requires_gradient_sync(number == len(batches))
#     (model(**batch).loss / len(batches)).backward()
# ```
#
# ### Q5. Out of memory
#
# *What do you do, in which order?*
#
# <details><summary>Answer</summary>
#
# **I profile before I cure: which phase, which category, what is alive after each step** [10§1](../intermediate/10_oom_clinic.ipynb#1.-Read-the-error,-then-count-between-steps "after_steps"). What grows from step to step is kept by my
# code [10](../intermediate/10_oom_clinic.ipynb#kept_graph "half_cures"). Reserved far above alive is fragmentation, or an earlier peak's cache [10§4](../intermediate/10_oom_clinic.ipynb#4.-Alive-is-not-reserved:-fragmentation "fragmented.replayed"). **If one moment is too large, I cure
# that one**: logits, validation, the optimizer's copies [10](../intermediate/10_oom_clinic.ipynb#large_vocabulary "in_chunks") [10](../intermediate/10_oom_clinic.ipynb#validation "no_grad") [10](../intermediate/10_oom_clinic.ipynb#optimizer_doubles "treat"). Then come the general cures, by price [10§6](../intermediate/10_oom_clinic.ipynb#6.-In-which-order? "general").
#
# *Fails:* you cure before you look.
#
# </details>
#
# What is large at the peak?

# %%
run = Batch(sequences=2, sequence_length=8192)
one = Cluster(gpu="A100-40GB", nodes=1, gpus_per_node=1)
first = estimate("llama-3.2-1b", one, Plan(micro_batch=2, framework=amp), run)  # FSDP2's bf16 policy: states of 16 bytes a parameter
held = ", ".join(f"{category} {size / GB:.1f}" for category, size in first.peak.bytes_by_category.items() if size > GB)
print(f"Llama 3.2 1B, 2 x 8,192 tokens: {first.peak.needed_bytes / GB:.1f} GB of {one.device.memory_bytes / GB:.1f}, peak in {first.peak.phase}: {held} (predicted)")
for name, change in {"recompute the blocks": {"recompute": "full"}, "micro-batch 1": {"micro_batch": 1}, "loss in chunks": {"loss": "chunked"},
                     "loss in chunks, micro-batch 1": {"loss": "chunked", "micro_batch": 1},
                     "loss in chunks, recompute": {"loss": "chunked", "recompute": "full"}}.items():
    found = estimate("llama-3.2-1b", one, replace(first.plan, **change), run)
    print(f"{name:<30}{found.peak.needed_bytes / GB:5.1f} GB, {found.step_seconds / first.step_seconds - 1:+.0%} time, {found.verdict} (predicted)")
logits_again = 2 * run.tokens * first.model.vocabulary * first.model.hidden / model_flops(first.model, run)
print(f"a loss in chunks by checkpoint computes its logits twice: {logits_again:+.0%} FLOP (predicted); the times above are without that")

# %% [markdown]
# *Next: "Why did you not simply recompute, or shrink the micro-batch?"* I looked: logits and loss are as large as all activations.
# Neither cure is enough alone; loss in chunks with the smaller micro-batch is.
#
# ```python
# print(torch.cuda.memory_allocated() / 1e9)                   # after each step: what grows is kept by your code
# print(torch.cuda.memory_stats()["inactive_split_bytes.all.current"] / 1e9)   # free pieces of segments in use
# # against fragmentation: PYTORCH_ALLOC_CONF=expandable_segments:True python train.py   (older: PYTORCH_CUDA_ALLOC_CONF)
# ```
#
# ### Q6. Eight nodes
#
# *They are only three times as fast as one: why?*
#
# <details><summary>Answer</summary>
#
# **I look at hardware, network, collectives and code, and cure first what gains most** [11](11_links.ipynb#A-bet "lesson_job"). **One hot GPU makes 63 others wait, and there
# it looks like a slow collective** [11§6](11_links.ipynb#6.-Eight-nodes,-three-times-as-fast "job.look"). `Using network Socket` in NCCL's log means TCP [11§6](11_links.ipynb#6.-Eight-nodes,-three-times-as-fast "job.look"). I measure each cure alone, and after every other [11§6](11_links.ipynb#6.-Eight-nodes,-three-times-as-fast "CURES").
#
# *Fails:* you measure nothing after a cure.
#
# </details>

# %%
job = lesson_job()
layers = {"hardware": "slow_nodes", "network": "network", "collectives": "reduced_passes", "code": "load_seconds"}
as_found = job.step().step_seconds


def faster(*cured):
    return as_found / job.fixed(*(layers[layer] for layer in cured)).step().step_seconds


same_script = SlowJob(nodes=1, load_seconds=job.load_seconds).step().step_seconds
print(f"as found, {8 * same_script / as_found:.1f} times as fast as one node with the same script (simulated)")
pd.DataFrame({b: {a: faster(a, b) for a in layers} for b in layers}).style.format(precision=2).set_caption(
    "times faster than as found, with two layers cured; on the diagonal, with one (simulated)")

# %% [markdown]
# *Next: "Why not replace the hot GPU first?"* Alone that makes the job 1.04 times faster, for sending sets the pace. A faster network
# makes it 2.09, fewer collectives 2.08, and both 2.09: one is enough. Then the GPU counts: with the network, 2.70.
#
# ```
# NCCL_DEBUG=INFO torchrun ... 2>&1 | grep "Using network"
# mpirun -np 64 -N 8 all_reduce_perf -b 8M -e 1G -f 2 -g 1     # nccl-tests built with MPI=1, on all eight nodes: busbw against the link's rate
# all_reduce_perf -b 8M -e 1G -f 2 -g 8                        # inside one node: NVLink alone
# nvidia-smi --query-gpu=clocks.sm,temperature.gpu,clocks_event_reasons.active --format=csv   # older: clocks_throttle_reasons.active
# ```
#
# ### Q7. Half of the cards
#
# *32 GPUs and a model that does not fit: what do you choose, and what is the main worry?*
#
# <details><summary>Answer</summary>
#
# **18 bytes times 175B over 32 cards is more than a card has** [15](15_design_studio.ipynb#Test-yourself "half = replace"). The optimizer goes to the host, if that has room [15](15_design_studio.ipynb#Test-yourself "roomy").
# **Tensor parallelism stays in the node; the pipeline, which sends least, goes across** [12§5](12_tensor_parallel.ipynb#5.-What-it-costs-in-time "passed") [14§5](14_three_dimensions.ipynb#5.-The-bytes-on-every-link "draw_orders"). **The main worry is communication
# across nodes: 10 Gb/s doubles the time** [15](15_design_studio.ipynb#Test-yourself "lame = replace").
#
# *Fails:* you never ask about the network.
#
# </details>
#
# Compare the rows.

# %%
P_175, four = 175e9, Cluster(gpu="A100-80GB", nodes=4)  # a node sends at eight ports of 200 Gb/s
b512 = Batch(sequences=512, sequence_length=2048)
best = search("gpt-3-175b", four, b512, space=SearchSpace(offload=("none", "optimizer"))).best
all_ports = replace(framework("deepspeed"), name="deepspeed, all ports", one_port=False, overlap_gradients=True)
zero_3 = Plan(dp=32, zero_stage=3, micro_batch=8, recompute="full", offload="parameters", framework="fsdp")  # CPUOffloadPolicy takes all states
print(f"18 x 175B / 32 = {18 * P_175 / 32 / GB:.0f} GB a card; the optimizer takes {best.host_bytes / GB:,.0f} of a host's {four.host_bytes_per_node / GB:,.0f} GB")
days = {}
for name, plan in ((f"TP {best.plan.tp} x PP {best.plan.pp}, optimizer to host", best.plan), ("ZeRO-3, FSDP2, all states to host", zero_3),
                   ("ZeRO-3, DeepSpeed, optimizer to host", replace(zero_3, framework=all_ports, offload="optimizer"))):
    clusters = {"8 x 200": four} | {str(rate): replace(four, network_bytes_per_second=link("Ethernet 10G").link_bytes_per_second * rate / 10)
                                    for rate in (20, 10, 5)}
    days[name] = {f"{rate} Gb/s": 300e9 / (512 * 2048) * estimate("gpt-3-175b", machines, plan, b512).step_seconds / 86400
                  for rate, machines in clusters.items()}
pd.DataFrame(days).T.style.format(precision=0, thousands=",").set_caption("175B on 32 A100: days for 300B tokens, by a node's network (predicted; TCP is given 42% of its rate)")

# %% [markdown]
# *Next: "Why not ZeRO-3?"* Over 8 x 200 Gb/s it takes at most 17% longer than the pipeline, over 10 Gb/s at least ten times as long.
# TCP's 42% is a guess, from what [NCCL's users saw](https://github.com/NVIDIA/nccl/issues/209). With half or twice
# the rate it is at least seven times.
#
# ### Q8. 175B on 64 GPUs
#
# *Lay it out.*
#
# <details><summary>Answer</summary>
#
# **TP x PP x DP is the number of GPUs** [15§1](15_design_studio.ipynb#1.-Ranks-on-nodes "first = Plan"). **TP 8 with sequence parallelism in the node and PP 8 across nodes fits with a margin, and
# recomputes nothing** [15§3](15_design_studio.ipynb#3.-The-first-layout,-stage-by-stage "compare_plans"). TP 4 x PP 16 is predicted to take 7% less time, so I measure both on the first day [Q8](99_capstone.ipynb#Q8.-175B-on-64-GPUs "laid.best"). **At the
# published MFU 300B tokens take a year, failures included** [Q8](99_capstone.ipynb#Q8.-175B-on-64-GPUs "promised_days").
#
# *Fails:* you put TP across nodes.
#
# </details>
#
# Each node is one stage.

# %%
eight_nodes = Cluster(gpu="A100-80GB", nodes=8, usd_per_gpu_hour=price("A100-80GB", "Lambda").usd_per_gpu_hour)
b1536, eights = Batch(sequences=1536, sequence_length=2048), Plan(tp=8, pp=8, sequence_parallel=True)
laid = search("gpt-3-175b", eight_nodes, b1536)
layouts = {"TP 8 x PP 8": estimate("gpt-3-175b", eight_nodes, eights, b1536), "TP 4 x PP 16": laid.best}
print(f"fastest of {laid.considered:,} plans, replicas included: {plan_name(laid.best)}")
for name, found in layouts.items():
    free = (eight_nodes.device.memory_bytes - found.peak.needed_bytes) / GB
    print(f"{name:<13} {found.step_seconds:.0f} s a step, {free:.0f} GB free on the fullest GPU (predicted)")
show(draw_ranks(layouts["TP 8 x PP 8"], title="175B, TP 8 x PP 8"),
     alt="Eight nodes of eight GPUs. Each node is one pipeline stage; its eight GPUs are the slices of tensor parallelism.")

# %%
proven = float(next(row for row in table("korthikanti_table5") if row["model"] == "175B")["mfu_pct_present"]) / 100
as_run = replace(eights, virtual_stages=3, recompute="selective", attention="unfused")  # how the paper ran it
again = estimate("gpt-3-175b", eight_nodes, as_run, Batch(sequences=64, sequence_length=2048))
print(f"TP 8 x PP 8 as it was run, 3 virtual stages, batch 64: MFU {proven:.0%} (published: Korthikanti et al. 2022, Table 5), {again.mfu:.0%} (predicted)")
rates = {"TP 8 x PP 8, as published": proven} | {f"{name}, flash attention, batch 1,536": found.mfu for name, found in layouts.items()}
bill = cost(laid.best, 300e9)  # with failures, and saves of 10 s
promised_days = bill.days * laid.best.mfu / proven
for name, mfu in rates.items():
    share = laid.best.mfu / mfu
    print(f"{name}: at MFU {mfu:.0%} {bill.days * share:.0f} days, ${bill.usd * share / 1e6:.2f}M (predicted)")

# %% [markdown]
# *Next: "Your search finds TP 4 x PP 16. Why do you not promise it?"* Its lead is a prediction, and it leaves 7 GB of a card, not 19.
# TP 8 x PP 8 has a published run, of another batch and schedule: I promise the year that its MFU gives.
#
# ### Q9. A100 or A10
#
# *13B: A100s at 45% MFU with 3D parallelism, or cheaper A10s at 38% with data parallelism and checkpointing?*
#
# <details><summary>Answer</summary>
#
# **The premise fails: 13B has 16 bytes of states a parameter, and plain data parallelism keeps all on every card** [Q9](99_capstone.ipynb#Q9.-A100-or-A10 "state_bytes"). Recomputation takes
# no states away [05§6](../intermediate/05_checkpointing.ipynb#6.-Scale-up:-1.3-billion-parameters-on-40-GB "large_runs"). With ZeRO-3 the planner gives the A10s 39% at 100 Gb/s a node, and a fifth of it at 10 [Q9](99_capstone.ipynb#Q9.-A100-or-A10 "found.mfu"). **For
# the same work, at the claimed MFU, 64 A100s are cheaper and sooner than 128 A10s** [17a](17a_what_a_run_costs.ipynb#The-scenario-as-asked:-A100s-or-A10s "thirteen").
#
# *Fails:* you compare hourly prices.
#
# </details>
#
# The last line is the price at which the verdict turns.

# %%
slice_of_3d, zero_10 = Plan(tp=4, pp=2, dp=8, sequence_parallel=True), Plan(dp=128, zero_stage=3, micro_batch=4, recompute="full", framework="deepspeed")
offers = {"128 A10, plain DP": ("A10", 100, replace(zero_10, zero_stage=0), 0.38), "128 A10, ZeRO-3, 100 Gb/s": ("A10", 100, zero_10, 0.38),
          "128 A10, ZeRO-3, 10 Gb/s": ("A10", 10, zero_10, 0.38), "64 A100, TP 4 x PP 2 x DP 8": ("A100-80GB", 1600, slice_of_3d, 0.45)}
dollars = {}
for name, (card, gigabits, plan, claimed) in offers.items():
    machines = Cluster(gpu=card, nodes=plan.ranks // 8, usd_per_gpu_hour=price(card, "Lambda").usd_per_gpu_hour, network_bytes_per_second=gigabits / 8 * GB,
                       network_ports=1, network_kind="TCP" if gigabits == 10 else "RoCE")
    found = estimate("llama-2-13b", machines, plan, Batch(sequences=1024, sequence_length=4096))
    if not found.fits:
        print(f"{name}: {found.verdict}; {found.peak.state_bytes / GB:.0f} GB of states a card of {machines.device.memory_bytes / GB:.0f} (predicted)")
        continue
    bill, slower = cost(found, 300e9), found.mfu / claimed
    dollars[name] = bill.usd * slower
    print(f"{name}: claimed MFU {claimed:.0%}, {bill.days * slower:.0f} days, ${dollars[name] / 1e3:,.0f}k; "
          f"predicted MFU {found.mfu:.0%}, {bill.days:.0f} days, ${bill.usd / 1e3:,.0f}k (300B tokens)")
a10s, a100s, hourly = dollars["128 A10, ZeRO-3, 100 Gb/s"], dollars["64 A100, TP 4 x PP 2 x DP 8"], price("A10", "Lambda")
turns_usd = hourly.usd_per_gpu_hour * a100s / a10s
print(f"at the claimed MFU A10s win below ${turns_usd:.2f} an hour, and cost ${hourly.usd_per_gpu_hour} ({hourly.provider}, {hourly.as_of})")

# %% [markdown]
# *Next: "When would you take the A10s?"* Below that price, with 100 Gb/s a node in writing and 38% measured.

# %% [markdown]
# ## 3. The scenarios
#
# <details><summary>Twelve jobs, each ending in files</summary>
#
# | scenario | ends in | writes, below `build/` | lab's case |
# |---|---|---|---|
# | ResNet-50 overflows 16 GB | [02§6](../beginner/02_mixed_precision.ipynb#6.-The-scenario-as-asked "here.write_script") | `resnet50_amp.py` | `sixteen_gb` |
# | ResNet to four GPUs | [04§6](../beginner/04_four_ranks.ipynb#6.-The-scenarios-as-asked "DDP + AMP") | `train.py` | `four_ranks` |
# | a CNN to four | [04§6](../beginner/04_four_ranks.ipynb#6.-The-scenarios-as-asked "run_script") | `train.py` | `four_ranks` |
# | 7B on 24 GB | [06§5](../intermediate/06_seven_billion.ipynb#The-scenario-as-asked:-a-script-for-a-real-card "here.write_script") | `finetune.py` | `seven_billion` |
# | 7B, PEFT or offload | [07§5](../intermediate/07_offload.ipynb#5.-The-scenario-as-asked "here.write_script") | `offload.py` | `seven_billion` |
# | 1.3B, less memory | [09](../intermediate/09_sharding.ipynb#The-job "job.write") | `lesson-09` | `zero_or_fsdp` |
# | 100B on 64 | [14§4](14_three_dimensions.ipynb#4.-Real-size:-the-memory-of-every-stage "planned") | `lesson-14` | `lay_out` |
# | 1B on 8 x 8 | [14§6](14_three_dimensions.ipynb#6.-One-billion-on-64-GPUs "SCHEMES") | `lesson-14` | `one_billion` |
# | 130B, a budget | [15§6](15_design_studio.ipynb#6.-The-scenario-as-asked:-defend-a-design "verdict") | `lesson-15` | `half_the_cards` |
# | 175B, checkpoints | [16§2](16_runs_that_survive.ipynb#The-scenario-as-asked:-a-checkpoint-strategy "gpt-3-175b") | `lesson-16` | `lay_out` |
# | 70B, failing GPUs | [16§1](16_runs_that_survive.ipynb#1.-How-often:-between-too-soon-and-too-late "RunPlan") | `lesson-16` | `survive` |
# | 13B, A100 or A10 | [17a](17a_what_a_run_costs.ipynb#The-scenario-as-asked:-A100s-or-A10s "thirteen") | `lesson-17` | `two_offers` |
#
# </details>

# %% [markdown]
# ## 4. Six more sayings
#
# The first habit again: [folklore](../00_folklore.ipynb), six of 26. *"TP 8 x PP 8 x DP 8 on 64 GPUs"*, and *"each pipeline rank with TP 8 x PP 8 needs ZeRO-1"*:

# %%
try:
    estimate("gpt-3-175b", eight_nodes, Plan(tp=8, pp=8, dp=8, zero_stage=1), b1536)
except ValueError as sentence:
    print(sentence)
held = [estimate("gpt-3-175b", eight_nodes, replace(eights, zero_stage=stage), b1536).peak.state_bytes / GB for stage in (0, 1)]
print(f"TP 8 x PP 8 x DP 1, states on the fullest GPU: {held[0]:.1f} GB with ZeRO-0, {held[1]:.1f} GB with ZeRO-1 (predicted)")

# %% [markdown]
# **Verdict.** Both false: DP is 1, and one replica has nobody to share its states with.
#
# ### Micro-batch and speed
#
# *"A larger micro-batch is faster."* [BLOOM's team](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md)
# timed five models with TP 8:

# %%
noted = noted_micro_batches().T
noted.columns = [f"{micro} (s)" for micro in noted.columns]
noted["lost at 8 (%)"] = 100 * (noted["8 (s)"] / noted.min(axis=1) - 1)
for micro in (4, 8):
    noted[f"bubble at {micro} (%, formula)"] = [100 * bubble_share(stages, micro, gpus // 8 // stages) for gpus, stages in noted_layouts()]
noted.style.format(precision=1).set_caption("one iteration, the second of each run, at micro-batch 1, 2, 4 and 8 (published)")

# %% [markdown]
# **Verdict.** True up to 2 or 4, false at 8 for all five: there the bubble, a pipeline's idle time, is nearly twice that at 4.
#
# ### Flash attention's rate
#
# *"It runs at the rate of matrix products."* Causal, forward and backward, at 4,096 tokens:

# %%
products = (f"{ceiling_flops_per_second(device(card)) / device(card).peak_flops_per_second('bf16'):.0%} of an {card}'s" for card in ("A100-80GB", "H100"))
print("fastest matrix product:", ", ".join(products), "peak (published)")
for generation, card in ((2, "A100-80GB"), (3, "H100"), (2, "H100")):
    share = flash_flops_per_second(device(card), generation, 4096) / device(card).peak_flops_per_second("bf16")
    print(f"FlashAttention-{generation}: {share:.0%} of an {card}'s peak (predicted{', from its share of an A100' if (generation, card) == (2, 'H100') else ''})")

# %% [markdown]
# **Verdict.** False here: 50 to 57% on the card that a kernel was written for, and 35% on a newer one. At best FlashAttention-3
# reaches [75%](https://arxiv.org/abs/2407.08608) (published).
#
# ### Quantization-aware training, or not
#
# *"bitsandbytes is quantization-aware training."* That trains weights that are rounded in forward. Two steps of QLoRA on a tiny model:

# %%
from utils.lessons.lesson_99.frozen_base import moved_by_steps
from utils.techniques.bitsandbytes_import import bitsandbytes_problem

if problem := bitsandbytes_problem():
    print(problem)
else:
    packed, trained, moved = moved_by_steps(2)
    print(f"{len(packed)} packed weights, of which {len(moved & packed)} changed; {len(moved & trained)} of {len(trained)} tensors of adapters did (measured)")
    assert packed and not moved & packed, "QLoRA's base is frozen: which packed weight moved?"

# %% [markdown]
# **Verdict.** False of QLoRA: what is quantized does not learn, and what learns is not quantized.
#
# ### Sharding and activations
#
# *"ZeRO-3 partitions activations."* OPT-1.3B, 8 sequences of 2,048 on each of 8 GPUs:

# %%
for stage in (1, 2, 3):
    plan = Plan(dp=8, zero_stage=stage, micro_batch=8, framework="deepspeed")
    held = estimate(small, eight, plan, Batch(sequences=64, sequence_length=2048)).peak.bytes_by_category
    print(f"ZeRO-{stage}: activations {held[Category.ACTIVATIONS] / GB:.1f} GB, parameters {held[Category.PARAMETERS] / GB:.1f} GB a rank (predicted)")

# %% [markdown]
# **Verdict.** False: a rank keeps what its own batch needs. The planner assumes that; four real ranks show it [09§4](../intermediate/09_sharding.ipynb#4.-What-each-really-holds "fullest").

# %% [markdown]
# ## Break it, diagnose it
#
# An answer to mark: *"175B is 600 GB of state, 9.4 GB a GPU on 64, so micro-batches can be large. I take ZeRO-3 over all 64 to keep it
# simple; activations are sharded too."* Find three faults, and a choice without a price.

# %%
claim = Plan(dp=64, zero_stage=3, micro_batch=8, framework="fsdp")
marked = estimate("gpt-3-175b", eight_nodes, claim, b1536)
print(f"states {marked.peak.state_bytes / GB:.1f} GB, activations {marked.peak.bytes_by_category[Category.ACTIVATIONS] / GB:.0f} GB a GPU: {marked.verdict} (predicted)")
for name, plan in {"ZeRO-3, micro-batch 1": replace(claim, micro_batch=1), "ZeRO-3, micro-batch 2, recomputes": replace(claim, micro_batch=2, recompute="full"),
                   "TP 8 x PP 8": eights}.items():
    found = estimate("gpt-3-175b", eight_nodes, plan, b1536)
    print(f"{name:<34}{found.peak.needed_bytes / GB:4.0f} GB, {found.step_seconds:.0f} s a step, MFU {found.mfu:.0%}, {found.verdict} (predicted)")

# %% [markdown]
# **Diagnose it.** First, 600 GB are a fifth of 16 bytes a parameter. Second, ZeRO-3 does not shard activations. Third, so micro-batch 8
# overflows the card. The price: without recomputation not even micro-batch 1 fits. With it, a step takes 15% longer than with
# TP 8 x PP 8.
#
# ## Recap
#
# One number for each question:

# %%
saved = [panel["as it is"].allocated_bytes - panel["recompute blocks"].allocated_bytes for panel in panels.values()]
skipped = [record for record in spoiled if record.skipped]
peak = "peak at micro-batch 8 (GB)"
nine = {
    "components": f"recomputation saves {saved[1] / GB:.0f} GB at 16 sequences, {saved[0] / GB:.0f} at 2: another moment (predicted)",
    "NaN": f"{sum('gradient' in str(record.first) for record in skipped)} of {len(skipped)} skipped steps are the scale's; the last: {skipped[-1].first} (measured)",
    "slow scaling": f"one node of {workers}, 1.4 times slower, leaves {one_node / traces['one node 1.4 times slower'].step_seconds:.0%} (simulated)",
    "ZeRO-3 or FSDP": f"DDP takes {rows['DDP, autocast, reduces fp32'][peak]:.0f} GB of {eight.device.memory_bytes / GB:.0f}, "
                      f"ZeRO-1 {rows['DeepSpeed ZeRO-1, reduces bf16'][peak]:.0f}: the lowest stage that fits (predicted)",
    "out of memory": f"logits and loss: {first.peak.bytes_by_category[Category.LOGITS_AND_LOSS] / GB:.0f} of {first.peak.needed_bytes / GB:.0f} GB at the peak (predicted)",
    "eight nodes": f"{faster('network'):.2f} times faster by the network, {faster('hardware'):.2f} by the hot GPU (simulated)",
    "half of the cards": f"{18 * P_175 / 32 / GB:.0f} GB of states for a card of {four.device.memory_bytes / GB:.0f} (predicted)",
    "175B": f"{promised_days:.0f} days at the published MFU of {proven:.0%} (predicted)",
    "A100 or A10": f"at the claimed MFU A10s win below ${turns_usd:.2f} an hour, and cost ${hourly.usd_per_gpu_hour} (predicted)",
}
for place, (question, number) in enumerate(nine.items(), start=1):
    print(f"Q{place} {question:<18}{number}")

# %% [markdown]
# - Ask of every number what it counts.
# - Look before you cure: for the moment of the peak, the first NaN, the rank that waits least.
# - Sit the [lab](../../labs/advanced/99_capstone.ipynb), then open its [solution](../../solutions/advanced/99_capstone.ipynb).

# %% [markdown]
# ## On Monday
#
# A card's states, and the share of its peak that a run reaches:
#
# ```python
# trained = sum(p.numel() for p in model.parameters() if p.requires_grad)   # before the model is sharded
# frozen = [p for p in model.parameters() if not p.requires_grad]           # LoRA's base: no gradients, no moments
# held = 16 * trained + sum(p.numel() * p.element_size() for p in frozen)   # 16 is Adam on fp32 weights; put 18 for bf16 weights with
#                                                          # fp32 masters and gradients, 8 for all in bf16
# states_gb = held / cards_that_share / 1e9                # DDP: 1. ZeRO-3, FSDP: all cards. TP x PP: tp * pp. ZeRO-1, 2 share only a part
# flops = 6 * trained + 4 * sum(p.numel() for p in frozen) # a token, without attention. 4-bit: numel() counts bytes, so put 8 for 4
# mfu = flops * tokens_per_second_per_card / peak_flops    # the data sheet's dense peak; of a mixture, count the active experts alone
# ```
#
# With `Trainer`:
#
# ```python
# class Clock(TrainerCallback):
#     marks: list[tuple[float, int]] = []
#
#     def on_step_end(self, args, state, control, **kwargs):
#         self.marks.append((time.perf_counter(), state.num_input_tokens_seen))
#
# args.include_num_input_tokens_seen = "all"             # TrainingArguments
# trainer.add_callback(Clock())
# trainer.train()
# (began, tokens_before), (ended, tokens_after) = Clock.marks[1], Clock.marks[-1]   # one session's: a resume stays out
# tokens_per_second_per_card = (tokens_after - tokens_before) / (ended - began) / args.world_size
# ```
