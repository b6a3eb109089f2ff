# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 One model, four ranks: DDP
#
# {{badges}}
#
# **Promise.** You train one network on four processes, first with data parallelism that you write
# in ten lines, then with PyTorch's. You prove it equal to one process, to the sixteenth digit, count the payload to the
# byte, predict an epoch on four A100, and leave with a script for CPUs and GPUs.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 45 for the lab | any laptop (Windows: WSL2); several GPUs if you have them; beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# You train on four processes, and each takes a quarter of every batch. How much memory does *one* of
# them need at its peak, in percent of what one process needs for the whole batch? Write your guess in
# place of the 25. Section 4 compares it with the measurement.

# %%
my_bet_percent = 25

# %% tags=["setup"]
here = setup("beginner/04")

# %%
import contextlib
import os
import time
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from utils import Evidence, Span, check, cifar10, compare, computes
from utils import draw_holders, draw_lanes, draw_losses, format_bytes, format_seconds, low_precision, measure
from utils import recorded_table, resnet, run_ranks, run_torchrun, score, scoreboard
from utils import scratch, show, simulate, small_resnet, tf32, traffic
from utils.catalog import device as gpu
from utils.data import normalize
from utils.lessons.lesson_04.data_parallel import accumulated_backward
from utils.lessons.lesson_04.sharding import sharded_loader
from evidence.validation.tables import source, table

# %% [markdown]
# ## What you will be able to do
#
# - Write data parallelism by hand, and prove it right against one process.
# - Predict what each rank sends in a step, and count it.
# - Say what accumulation, batch norm and an uneven last batch do to the result.
# - Find out why training on several ranks is not faster.
#
# This lesson buys *compute* (more processors) and pays in *communication*. It saves no memory for states: every rank
# holds the whole model ([lesson 09](../intermediate/09_sharding.ipynb) shards it). All ranks compute in one place: on
# GPUs if there are four, else on the CPU.

# %%
figure = draw_holders({"data parallel": ()}, sends={"data parallel": "sends all gradients"},
                      parameter_bytes=(4, 4, 4), title="Who holds what (fp32, SGD with momentum)")
show(figure, alt="Four boxes, one a rank, each filled whole with parameters, gradients and optimizer state.")

ON_GPUS = torch.cuda.device_count() >= 4


def my_device():
    mine = dist.get_rank() if dist.is_initialized() else 0
    return torch.device("cuda", mine) if ON_GPUS else torch.device("cpu")


def now():
    if ON_GPUS:
        torch.cuda.synchronize()  # a GPU still works when the call has returned
    return time.perf_counter()


LOW = low_precision(my_device())[0]  # bf16, or fp16 where a GPU has no bf16
FAST = computes(my_device(), LOW)
WHERE = torch.cuda.get_device_name() if ON_GPUS else f"CPU, {os.cpu_count()} cores, 1 thread a rank"
print(f"every rank computes on: {WHERE}; 16-bit type {LOW}, computed without emulation: {FAST}")

# %% [markdown]
# ## 1. A process group
#
# A [**rank**](../00_glossary.ipynb) is one process of a group; the **world size** is how many there are. Each rank runs
# the same code on its own data. They meet in **collectives**, operations that all ranks call together. `run_ranks`
# starts real processes and runs a function of this notebook on each. A library carries the data between them: *gloo*
# between CPUs, *NCCL* between NVIDIA GPUs.

# %% tags=["nbval-check-output"]
def meet():
    rank = dist.get_rank()
    number = torch.tensor([10.0 * rank], device=my_device())
    before = number.item()
    dist.all_reduce(number)  # everyone gets the sum
    return f"rank {rank} of {dist.get_world_size()}: {before:.0f} became {number.item():.0f}"


for line in run_ranks(meet, 4):
    print(line)

# %% [markdown]
# **Read it.** Four processes, one sum, and everyone has it. Training needs only two collectives:
# a *broadcast* (everyone gets what rank 0 has) and this *all-reduce*.
#
# `traffic()` counts them. The **payload** is what a rank puts in. What crosses a link depends on the
# algorithm. A *ring* of $N$ ranks cuts the tensor's $B$ bytes into $N$ shares. In $N-1$ hops each share goes round and is
# added up; in $N-1$ more its sum goes round. In each hop a rank sends one share, $B/N$ bytes:
#
# $$2 \, (N-1) \, \frac{B}{N} \ \text{bytes on each link}$$

# %% tags=["nbval-check-output"]
def ring_bytes(payload_bytes, ranks):
    return 2 * (ranks - 1) / ranks * payload_bytes


def count_a_million():
    with traffic() as sent:
        dist.all_reduce(torch.ones(1_000_000, device=my_device()))
    return sent


sent = run_ranks(count_a_million, 4)[0]
print(f"payload, counted: {sent.payload_bytes / 1e6:.1f} MB in {sent.rows[0].calls} call")
print(f"on each link: {ring_bytes(sent.payload_bytes, 4) / 1e6:.1f} MB   ({Evidence.PREDICTED}, for a ring)")

# %% [markdown]
# **Question.** A model has one million parameters in fp32. How many MB does each of *eight* ranks send
# per step, if a ring averages all gradients?

# %%
sent_by_each_of_eight_mb = ...
check("04.ring_of_eight", sent_by_each_of_eight_mb)

# %% [markdown]
# ## 2. Data parallelism by hand
#
# Every rank holds a **replica**, a whole copy of the model, and takes its share of each batch. Three
# rules keep the replicas equal to the model that one process would train:
#
# 1. They start equal: rank 0 broadcasts its parameters and buffers.
# 2. After backward the gradients are summed over the ranks,
# 3. and divided by the world size, since each rank's loss is a mean over its share.
#
# The mean of equal shares' means is the mean of the batch, so the gradients are the same, too.

# %%
def share_start(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    return model


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


# %% [markdown]
# The rest is a plain training loop: a small ResNet with *group norm* (section 7 says why), seeded by the rank's number,
# so that replicas would start unequal without rule 1. The images are CIFAR-10's, at half their size, or generated where
# there is no network. `sharded_loader` gives each rank its share; section 5 opens it.

# %%
pictures = cifar10("train")
data = TensorDataset(F.avg_pool2d(normalize(pictures.images[:2048]), 2), pictures.labels[:2048].clone())
tested = cifar10("test")
held_out = F.avg_pool2d(normalize(tested.images[:512]), 2), tested.labels[:512].clone()
print(f"images: {pictures.source}")
del pictures, tested  # 60,000 images: 180 MB that nobody needs any more
BATCH = 64  # of all ranks together
STEPS = {"tiny": 256, "small": 512, "full": 1024}[here.scale]


def make_step(parallel, optimizer, after_backward, autocast):
    kind = my_device().type
    scaler = torch.amp.GradScaler(kind, enabled=autocast and LOW is torch.float16)

    def step(images, labels):
        optimizer.zero_grad()
        with torch.autocast(kind, LOW, enabled=autocast):
            loss = F.cross_entropy(parallel(images), labels)
        scaler.scale(loss).backward()
        after_backward(parallel)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


# %%
def run_steps(step, loader, device, count):
    steps = []
    for number in range(count):
        if number % len(loader) == 0:
            loader.sampler.set_epoch(number // len(loader))  # another order in each epoch
            batches = iter(loader)
        start = now()
        dist.all_reduce(loss := step(*(each.to(device) for each in next(batches))))  # for the curve alone
        steps.append((loss.item() / dist.get_world_size(), now() - start))
    return [loss for loss, _ in steps], sorted(seconds for _, seconds in steps)[count // 2]


# %% [markdown]
# Each rank reports its losses, its share of right answers on images that it never saw, its median step, its peak in one
# more step, and what it puts in at the start and in another step.

# %%
def train(wrap, after_backward=lambda model: None, autocast=False, norm="group", steps=16, dtype=torch.float32):
    device = my_device()
    torch.manual_seed(dist.get_rank())
    with traffic() as startup:
        parallel = wrap(small_resnet(norm).to(device, dtype))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.03, momentum=0.9)
    loader = sharded_loader(TensorDataset(data.tensors[0].to(dtype), data.tensors[1]), BATCH, drop_last=True)
    step = make_step(parallel, optimizer, after_backward, autocast)
    with tf32(False):  # on a GPU, too, all digits of fp32
        losses, step_seconds = run_steps(step, loader, device, steps)
        with torch.no_grad():
            right = (parallel(held_out[0].to(device, dtype)).argmax(1).cpu() == held_out[1]).double().mean().item()
        batch = [part.to(device) for part in next(iter(loader))]
        memory = measure(lambda: step(*batch), model=parallel, optimizer=optimizer,
                         items=BATCH, unit="images", timed_steps=0)
        with traffic() as sent:
            step(*batch)
    return {"losses": losses, "right": right, "step_seconds": step_seconds, "peak_bytes": memory.peak_bytes,
            "startup": startup, "sent": sent}


# %%
ways = {
    "one process": run_ranks(train, 1, lambda m: m, lambda m: None, False, "group", STEPS, timeout_seconds=200),
    "four ranks, by hand": run_ranks(train, 4, share_start, average_gradients),
}
P = sum(parameter.numel() for parameter in small_resnet().parameters())
one, hand = (reports[0] for reports in ways.values())
print(f"{P:,} parameters, gradients of 4 P = {4 * P:,} bytes")
print("the start of four ranks:", hand["startup"], "\na step of four ranks:   ", hand["sent"])
assert hand["sent"].payload_bytes == hand["startup"].payload_bytes == 4 * P, "not every gradient once"

# %% [markdown]
# **Read it.** Each rank puts in exactly $4P$ bytes a step: every gradient once, in as many calls as
# there are parameter tensors. The start costs the same $4P$, once.
#
# ## 3. Is it right? A proof, and four faults
#
# **Predict.** The first losses of one process and of four ranks agree. Which of these faults would the *first* loss
# betray, and which the losses of sixteen steps? Nothing is broadcast at the start; nobody divides; nobody reduces; one
# tensor of 29 is forgotten.

# %%
def start_apart(model):
    return model


def sum_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def forget_one(model):
    average_gradients(nn.ParameterList(list(model.parameters())[1:]))


RULES = {"right": (share_start, average_gradients), "not broadcast": (start_apart, average_gradients),
         "not divided": (share_start, sum_gradients), "not reduced": (share_start, lambda model: None),
         "one tensor forgotten": (share_start, forget_one)}

# %%
def largest_difference(losses, reference, steps=8):
    pairs = zip(losses[:steps], reference[:steps], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def apart(rule, dtype, reference):
    losses = run_ranks(train, 4, *rule, False, "group", 16, dtype)[0]["losses"]
    return [f"{largest_difference(losses, reference, steps):.1e}" for steps in (1, 16)]

# %%
exact = run_ranks(train, 1, start_apart, lambda model: None, False, "group", 16, torch.float64)[0]["losses"]
found = {(name, "fp64"): apart(rule, torch.float64, exact) for name, rule in RULES.items()}
found["right", "fp32"] = apart(RULES["right"], torch.float32, one["losses"])
errors = {name: float(row[1]) for (name, dtype), row in found.items() if dtype == "fp64"}
assert errors.pop("right") < 1e-13 < 1e-4 < min(errors.values()), "fp64 should tell right from wrong"
assert float(found["right", "fp32"][1]) < 1e-3, "more than rounding: is a rule missing?"
pd.DataFrame(found, index=["loss 1", "losses 1 to 16"]).T  # differences over one process's loss, measured

# %% [markdown]
# **Read it.** The first loss is taken before any update: it judges the start and the data alone, and three of four faults
# pass it. After sixteen steps every fault shows. In fp32 the right code differs too: floating-point sums in another
# order, and each step starts from the last one's rounding. In fp64 only the sixteenth digit is left, so `.double()` on
# a small model is the proof. *Not divided* fails nowhere: as if the learning rate were four times as large.
#
# <div class="alert alert-warning"><b>Trap.</b> A mean over ranks is a mean over items only if all
# shares are equal. If a rank's loss is a <i>sum</i>, DDP
# <a href="https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html">still
# divides</a>.</div>
#
# ## 4. The real one: DDP, and DDP with mixed precision
#
# `DistributedDataParallel` does the same three things. It wraps the model, hooks itself into backward,
# and gathers gradients into **buckets**, flat tensors that it reduces in one call each.
#
# Predict before you run: under autocast (AMP, automatic mixed precision), does a step send fewer
# bytes?

# %%
def ddp(model):
    return DistributedDataParallel(model)


ways["four ranks, DDP"] = run_ranks(train, 4, ddp, lambda m: None, False, "group", STEPS, timeout_seconds=300)
# Where 16 bits are emulated, mixed precision is many times slower: a few steps will do.
ways["four ranks, DDP + AMP"] = run_ranks(train, 4, ddp, lambda m: None, True, "group", 16 if FAST else 4)

# %%
def row(name, reports):
    first, alone = reports[0], len(reports) == 1
    sent = first["sent"].payload_bytes
    return {"way": name, "peak of a rank": format_bytes(max(r["peak_bytes"] for r in reports)),
            "payload at the start": "nothing" if alone else format_bytes(first["startup"].payload_bytes),
            "payload a step": "nothing" if alone else format_bytes(sent),
            "calls": 0 if alone else sum(r.calls for r in first["sent"].rows),
            "on a ring's link (predicted)": format_bytes(int(ring_bytes(sent, len(reports)))),
            "median step here": format_seconds(max(r["step_seconds"] for r in reports))}


# %%
print("DDP, at the start:", *ways["four ranks, DDP"][0]["startup"].rows, sep="\n  ")
print(f"peaks, payloads, calls and steps: {Evidence.MEASURED} on {WHERE}")
pd.DataFrame([row(name, reports) for name, reports in ways.items()]).set_index("way")

# %%
def smooth(losses, width=16):
    return [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]



curves = {name: smooth(ways[name][0]["losses"]) for name in ("one process", "four ranks, DDP")}
figure = draw_losses(curves, device=WHERE, title=f"{STEPS} steps, each point the mean of 16")
show(figure, alt="Two loss curves that fall together over the steps, one process and four ranks with DDP.")
(start, end), (_, end_ddp) = ((curve[0], curve[-1]) for curve in curves.values())
print(f"one process: {start:.2f} to {end:.2f}; four ranks end at {end_ddp:.2f}")
assert end < start - 0.2 and abs(end - end_ddp) < 0.25 * (start - end), "they should learn, and alike"
assert largest_difference(ways["four ranks, DDP"][0]["losses"], one["losses"]) < 1e-3, "more than rounding"
ddp_share = 100 * ways["four ranks, DDP"][0]["peak_bytes"] / one["peak_bytes"]
print(f"peak of a DDP rank: {ddp_share:.0f}% of one process's; your bet was {my_bet_percent}%")

# %% [markdown]
# **Read it.** The first losses are equal but for rounding; after about a hundred steps rounding has grown, and the curves
# still fall together. Four times the ranks do not mean a quarter of the memory: activations shrink to a quarter, but
# every rank keeps all parameters, gradients and optimizer state, and DDP adds its buckets, one more copy of the
# gradients (`gradient_as_bucket_view=True` saves it). Where states fill the memory, DDP saves nothing.
#
# By hand takes longer a step, with the same payload. Is it the calls, 29 against 2?

# %%
def reducing_seconds(flat):
    tensors = [torch.ones(p.numel(), device=my_device()) for p in small_resnet().parameters()]
    tensors = [torch.cat(tensors)] if flat else tensors
    rounds = []
    for _ in range(15):
        dist.barrier()
        start = now()
        for tensor in tensors:
            dist.all_reduce(tensor)
        rounds.append(now() - start)
    return sorted(rounds)[len(rounds) // 2]



for calls, flat in ((29, False), (1, True)):
    print(f"all gradients in {calls:>2} calls: {format_seconds(max(run_ranks(reducing_seconds, 4, flat)))} ({Evidence.MEASURED})")

# %% [markdown]
# **Read it.** Each call costs a start of its own, whatever it carries, and waits for the last rank.
#
# **Question.** DDP + AMP: did the bytes per step become `"half"`, or were they the `"same"`? Why?

# %%
bytes_under_amp = ...
check("04.bytes_under_amp", bytes_under_amp)

# %% [markdown]
# ### Buckets, and overlap
#
# Backward makes the last layer's gradients first. DDP does not wait for the rest: a full bucket is
# reduced *while* backward goes on. DDP closes a bucket once it has reached its cap, by default 1 MiB
# for the first and 25 MiB for the others: two buckets here, as *calls* above says. The next cell closes
# them at a quarter of a MiB, and `torch.profiler` records nine steps. The median one is drawn.

# %%
def profiled_step():
    model = DistributedDataParallel(small_resnet(), bucket_cap_mb=0.25)
    images, labels = data[:BATCH]

    def step():
        F.cross_entropy(model(images), labels).backward()

    for _ in range(2):  # after the first backward DDP orders its buckets anew
        step()
    with traffic() as sent:
        step()
    profiled = []
    for _ in range(9):
        with torch.profiler.profile() as profile:
            step()
        profiled.append([(e.name, e.time_range.start / 1e6, e.time_range.end / 1e6) for e in profile.events()])
    return profiled, [row.payload_bytes for row in sent.collectives]


profiled, bucket_bytes = run_ranks(profiled_step, 2)[0]
print("buckets, in the order in which they are sent:", *map(format_bytes, bucket_bytes))
assert sum(bucket_bytes) == 4 * P, "the buckets are not all gradients"

# %%
def lanes_of(events):
    backward = [Span("gradient into its bucket" if "AccumulateGrad" in name else "backward", start, end)
                for name, start, end in events if name.startswith("autograd::engine::evaluate_function")]
    return backward, sorted((start, end) for name, start, end in events if name == "gloo:all_reduce")


def hidden_seconds(events):
    backward, reduces = lanes_of(events)
    layers = [(span.start_seconds, span.end_seconds) for span in backward if span.kind == "backward"]
    return sum(max(0.0, min(end, until) - max(start, begin)) for start, end in reduces for begin, until in layers)


def hidden_share(events):
    return hidden_seconds(events) / sum(end - start for start, end in lanes_of(events)[1])


# %%
# On a busy machine a profile lacks an all-reduce now and then: only whole ones count.
whole = sorted((each for each in profiled if len(lanes_of(each)[1]) == len(bucket_bytes)), key=hidden_share)
events = whole[len(whole) // 2]
backward, reduces = lanes_of(events)
sending = {f"bucket {number}, {size / 1024:.0f} KiB": [Span("all-reduce of a bucket", *span)]
           for number, (size, span) in enumerate(zip(bucket_bytes, reduces, strict=True), 1)}
lanes = {"rank 0": backward} | sending
figure = draw_lanes(lanes, title="One backward of DDP on rank 0", device="CPU, 1 thread a rank")
show(figure, alt="Backward's operations in the first lane, and below it one lane per bucket: the first "
     "all-reduces begin before backward has ended, the last one with its last gradient.")
print(f"hidden behind layers, of the time of all-reduces: {hidden_share(events):.0%} in the median step,",
      f"{hidden_share(whole[0]):.0%} to {hidden_share(whole[-1]):.0%} in {len(whole)} steps ({Evidence.MEASURED})")

# %% [markdown]
# **Read it.** The first buckets leave while backward has layers left, which can hide them. Here ranks and gloo share
# cores, so how much is hidden changes from step to step. The last leaves when nothing is left to hide it. A bucket may
# be larger than its cap: the gradient that reaches it still goes in. Large buckets need fewer calls, small ones start
# earlier: the whole trade-off of `bucket_cap_mb`.
#
# ## 5. Who gets which items, and what each weighs
#
# A `DistributedSampler` deals the items out like cards. What if they do not come out even? Ten items
# over four ranks:

# %% tags=["nbval-check-output"]
for drop_last in (False, True):
    print("drop_last" if drop_last else "padded")
    for rank in range(4):
        sampler = DistributedSampler(range(10), 4, rank, shuffle=False, drop_last=drop_last)
        print(f"  rank {rank}: {list(sampler)}")

# %% [markdown]
# **Read it.** All ranks must take the same number of steps, or one waits for ever in an all-reduce. So
# the sampler starts over: items 0 and 1 count double. Or, with `drop_last`, it leaves items out. For training either
# will do. An *evaluation* on a padded set is slightly wrong: remove the copies.
#
# **Question.** 1,003 items over 8 ranks, padded: how many items of an epoch are repeats?

# %%
repeated_items = ...
check("04.repeated_items", repeated_items)

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> Without <code>sampler.set_epoch(epoch)</code> each epoch
# has the first one's order. Nothing fails; the model learns a little worse.
# <a href="https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler">PyTorch's
# page</a> warns of it.</div>
#
# ## 6. Gradient accumulation, and `no_sync`
#
# A batch too large for the memory is taken in parts, **micro-batches**: backward adds their gradients
# up, and one optimizer step follows. DDP would all-reduce after *every* backward. `no_sync()` keeps it
# quiet until the last.

# %% tags=["nbval-check-output"]
def payload_of_four_parts(quiet):
    model = DistributedDataParallel(small_resnet().to(my_device()))
    images, labels = (part.to(my_device()) for part in data[:16])
    with traffic() as sent:
        for number in range(4):
            silent = quiet and number < 3
            with model.no_sync() if silent else contextlib.nullcontext():
                part = slice(4 * number, 4 * number + 4)
                (F.cross_entropy(model(images[part]), labels[part]) / 4).backward()
    return sum(row.payload_bytes for row in sent.rows if row.collective == "all-reduce")


for quiet in (False, True):
    payload_bytes = run_ranks(payload_of_four_parts, 2, quiet)[0]
    print(f"no_sync: {quiet!s:<6} {payload_bytes:>9,} bytes a step, {payload_bytes / (4 * P):.0f} x 4 P")

# %% [markdown]
# ### Weigh by tokens, not by micro-batches
#
# A language model's loss is a mean over *tokens*, of which micro-batches hold unequal numbers. A mean of means gives a
# token in a short text more weight. The right divisor is the tokens of *all* micro-batches of *all* ranks:
#
# $$\text{loss} = \frac{\sum_{\text{ranks}} \sum_{\text{micro-batches}} \sum_{\text{tokens}} \ell}{\sum_{\text{ranks}} \sum_{\text{micro-batches}} \text{tokens}}$$
#
# DDP divides by the number of ranks $N$, so each rank multiplies by $N$ first.

# %%
TOKENS = [[3, 11], [4, 2]]  # of each rank's two micro-batches


def texts(rank):
    torch.manual_seed(rank)
    return [(torch.randn(n, 6).double(), torch.randint(5, (n,))) for n in TOKENS[rank]]


def summed_loss(model, text):
    return F.cross_entropy(model(text[0]), text[1], reduction="sum")


def gradient_of(backward):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5).double()
    backward(DistributedDataParallel(model) if dist.is_initialized() else model)
    return model.weight.grad


# %%
def mean_of_means(model):
    for text in texts(dist.get_rank()):
        (summed_loss(model, text) / len(text[1]) / 2).backward()


def mean_of_shares(model):  # right within a rank, and 14 tokens beside 6
    mine = texts(dist.get_rank())
    (sum(summed_loss(model, text) for text in mine) / sum(TOKENS[dist.get_rank()])).backward()


def by_tokens(model):
    accumulated_backward(model, texts(dist.get_rank()), summed_loss, lambda text: len(text[1]))


def all_at_once(model):
    every = [text for rank in (0, 1) for text in texts(rank)]
    (sum(summed_loss(model, text) for text in every) / sum(map(sum, TOKENS))).backward()


# %%
right = gradient_of(all_at_once)
errors = [(run_ranks(gradient_of, 2, rule)[0] - right).norm() / right.norm()
          for rule in (mean_of_means, mean_of_shares, by_tokens)]
print("relative error of the gradient: mean of means {:.1e}, mean of shares {:.1e},"
      " by tokens {:.1e}".format(*errors))
assert errors[2] < 1e-12 < 0.05 < min(errors[:2]), "only the rule by tokens should be exact"

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> This very mistake stood in popular trainers. In October 2024
# transformers <a href="https://github.com/huggingface/transformers/pull/34191">fixed it</a> within a process, and then,
# as an option, <a href="https://github.com/huggingface/transformers/pull/34373">across devices</a>.</div>
#
# ## 7. Batch norm looks at its own share
#
# Batch norm normalizes by the statistics of the batch that it sees: on four ranks, a quarter. So the losses *differ*
# from one process's. To show that nothing else is wrong, a third run is one process that goes by quarters.

# %%
def quarter_by_quarter(model):
    """The same model, for one process: each quarter of a batch has its own statistics."""
    whole = model.forward

    def forward(images):
        parts = [whole(images[rank::4]) for rank in range(4)]  # dealt out as to ranks
        return torch.stack(parts, dim=1).flatten(0, 1)

    model.forward = forward
    return model


normed = {
    "one process, batch norm": run_ranks(train, 1, lambda m: m, lambda m: None, False, "batch"),
    "four ranks, batch norm": run_ranks(train, 4, ddp, lambda m: None, False, "batch"),
    "one process, by quarters": run_ranks(train, 1, quarter_by_quarter, lambda m: None, False, "batch"),
}
curves = {name: reports[0]["losses"] for name, reports in normed.items()}
whole_batch, four_ranks, quarters = curves.values()
print(f"four ranks and one process: losses differ by up to {largest_difference(four_ranks, whole_batch):.1e}")
print(f"four ranks and quarter by quarter: up to {largest_difference(four_ranks, quarters):.1e}")
assert 10 * largest_difference(four_ranks, quarters) < largest_difference(four_ranks, whole_batch), \
    "four ranks should follow the process that goes by quarters"

# %%
figure = draw_losses(curves, device=WHERE, title="With batch norm, ranks change the result")
show(figure, alt="Three loss curves with batch norm: four ranks and one process by quarters coincide, one "
     "process with whole batches goes its own way.")
print("sent by a rank in one step:", normed["four ranks, batch norm"][0]["sent"], sep="\n")

# %% [markdown]
# **Read it.** Four ranks follow the process that goes by quarters, and differ from whole batches. So DDP is right, and
# batch norm is another function when the share is smaller. The broadcasts are its running statistics: DDP sends
# those of rank 0 before each forward.
#
# `torch.nn.SyncBatchNorm` computes the statistics over all ranks, at the price of two collectives
# per layer; it needs GPUs. Group norm and layer norm never look across the batch, and need nothing.
#
# ## 8. Is it faster? Scaling efficiency
#
# **Speed-up** is the time of one rank divided by the time of $N$; **efficiency** is the speed-up divided by $N$.
# Predict it for GPUs: ResNet-50 in mixed precision, 256 images a GPU. One A100's speed is published. At worst the
# all-reduce of its gradients hides behind nothing.

# %%
rows = table("nvidia_resnet50")
speed = {row["n_gpus"]: float(row["mixed_images_s"]) for row in rows if row["gpu"] == "A100-80GB"}
images, gradients = 1_281_167, 4 * 25_557_032  # ImageNet's training set; ResNet-50's parameters


def at_worst(gpus, images_per_second, batch=256):
    """Seconds of sending and of computing a step, and the speed-up if nothing hides."""
    sending = ring_bytes(gradients, gpus) / gpu("A100 80GB").peer_link.link_bytes_per_second
    computing = batch / images_per_second
    return sending, computing, gpus * computing / (computing + sending)


# %% tags=["nbval-check-output"]
print(f"1 A100: {speed['1']:,.0f} images/s, an epoch {images / speed['1'] / 60:.1f} minutes (published)")
for gpus in (4, 8):
    sending, computing, speedup = at_worst(gpus, speed["1"])
    print(f"{gpus} A100: step {1e3 * computing:.0f} ms, sending {1e3 * sending:.2f} ms, speed-up {speedup:.2f},",
          f"an epoch {images / speed['1'] / speedup / 60:.1f} minutes (predicted)")
print(f"8 A100: speed-up {speed['8'] / speed['1']:.2f} (published)")
print(source("nvidia_resnet50").partition(",")[0])

# %% [markdown]
# **Read it.** At NVLink's full rate the link takes less than a percent, even unhidden. The published speed-up of eight is lower,
# so the rest is lost elsewhere: in loading, in ranks that wait for each other, or in launching. You look for it below.
# ### Why is it slow?
#
# Take the step apart, one cause at a time: the loader alone, computing alone (`no_sync` sends nothing),
# then everything.

# %%
def seconds_of(action):
    dist.barrier()
    start = now()
    action()
    return now() - start


def take_apart():
    model = DistributedDataParallel(small_resnet().to(my_device()))
    loader = sharded_loader(data, BATCH)
    share, whole = ([part.to(my_device()) for part in batch] for batch in (next(iter(loader)), data[:BATCH]))

    def step(images, labels, quiet):
        with model.no_sync() if quiet else contextlib.nullcontext():
            F.cross_entropy(model(images), labels).backward()

    parts = {"loading": lambda: next(iter(loader)), "computing": lambda: step(*share, quiet=True),
             "with sending": lambda: step(*share, quiet=False), "computing the whole batch": lambda: step(*whole, quiet=True)}
    # In turns: what else the machine does meets all parts alike. The first round warms up.
    rounds = [{name: seconds_of(part) for name, part in parts.items()} for _ in range(12)][1:]
    return {name: sorted(each[name] for each in rounds)[len(rounds) // 2] for name in parts}

# %%
for rank, parts in enumerate(run_ranks(take_apart, 2)):
    print(f"rank {rank}:", ", ".join(f"{name} {format_seconds(s)}" for name, s in parts.items()))

# %% [markdown]
# **Read it.** Compare the times. Four causes show so:
#
# | cause | it shows as | what helps |
# |---|---|---|
# | data loading | *loading* is as long as *computing* | more loader processes (`num_workers`), a faster format |
# | all-reduce | *with sending* is much longer than *computing* | larger batch per rank, accumulation with `no_sync`, a faster link |
# | a slow rank | *computing* differs between ranks | equal shares, equal hardware; look for a rank that also logs or saves |
# | small shares | *computing* is hardly less than that of the whole batch | a larger batch per rank |
#
# On GPUs `NCCL_DEBUG`, `nccl-tests` and Nsight say more: [lesson 11](../advanced/11_links.ipynb).
#
# ## 9. `torchrun`: a script, as on a server
#
# On a server you write a script. `torchrun` starts it once per rank and tells each, through environment variables, who
# it is. `run_torchrun` calls it and raises where a rank fails. This one trains the ResNet of section 2: here on two
# ranks with gloo, on GPUs over NCCL in mixed precision, without a change.

# %%
SET_UP = '''
import gc, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from utils import small_resnet
from utils.lessons.lesson_04.sharding import sharded_loader

gpu, rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])  # torchrun's variable
device = torch.device("cuda", rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
torch.manual_seed(dist.get_rank())  # DDP gives all ranks the start of rank 0
model = DistributedDataParallel(small_resnet().to(device), device_ids=[rank] if gpu else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
loader = sharded_loader(TensorDataset(*torch.load(sys.argv[1])), 64)  # has a DistributedSampler
'''

# %%
LOOP = '''
loader.sampler.set_epoch(0)
for step, (images, labels) in enumerate(loader):
    optimizer.zero_grad()
    with torch.autocast(device.type, torch.bfloat16, enabled=gpu):  # fp16: a GradScaler, too (lesson 02)
        loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
    if step % 8 == 0 and dist.get_rank() == 0:  # all ranks have this mean: one prints it
        print(f"step {step}: loss of all ranks {loss.item() / dist.get_world_size():.5f}")
del model, optimizer, loss  # DDP sends through the group: it goes first
gc.collect()
dist.destroy_process_group()  # always, and last
'''
script = here.root / "build" / "lesson-04" / "train.py"  # git ignores this folder
script.parent.mkdir(parents=True, exist_ok=True)
script.write_text(SET_UP + LOOP)
print(f"# written to {script.relative_to(here.root)}")

# %%
with scratch("lesson-04") as folder:
    tensors = Path(folder) / "images.pt"
    torch.save(data.tensors, tensors)
    os.environ["PYTHONPATH"] = str(here.root)  # where the script finds utils
    printed = run_torchrun(script, 2, tensors)
found = [float(line.split()[-1]) for line in printed.splitlines()]
for step, loss, alone in zip(range(0, 32, 8), found, one["losses"][::8], strict=False):
    print(f"step {step:>2}: two ranks {loss:.5f}, one process {alone:.5f}, apart {abs(loss - alone) / alone:.1e}")
assert len(found) == 4 and largest_difference(found, one["losses"][::8], 2) < 1e-3, "32 steps, rounding apart"

# %% [markdown]
# Rounding apart, they are one process's. Save tensors in the course's folder; on four GPUs it is `PYTHONPATH=.
# torchrun --rdzv-backend=c10d --rdzv-conf=store_type=file --nproc-per-node=4 build/lesson-04/train.py images.pt`. On several
# machines, `--nnodes` says how many, `--rdzv-endpoint` where they meet.
#
# <div class="alert alert-warning"><b>Trap.</b> That endpoint, or <code>--standalone</code>, listens on every address, asks
# for no password, and runs what it is sent
# (<a href="https://github.com/pytorch/pytorch/blob/main/SECURITY.md#using-distributed-features">PyTorch
# says so</a>). A cluster needs a network closed to all others.</div>
#
# ## 10. The scenarios as asked
#
# *"Scale our ResNet from one process to four GPUs: DDP, then DDP with mixed precision. Epoch time and memory before and
# after each step."* ResNet-50 on images of 224 x 224, 64 a GPU, on four *simulated* A100 cards. `simulate` runs the
# model's own code on tensors without data, DDP's buckets included. Speeds of one GPU are published, at 256 images; those
# of four follow from them as in section 8, with nothing hidden.

# %%
def build(ranks):
    model = resnet(50, stem="imagenet", num_classes=1000)
    parallel = DistributedDataParallel(model) if ranks > 1 else model
    return parallel, torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)


def resnet_step(model, optimizer, mixed=False):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = F.cross_entropy(model(torch.randn(64, 3, 224, 224)), torch.randint(1000, (64,)))
    loss.backward()
    optimizer.step()


CASES = {"one GPU": (1, False), "four GPUs, DDP": (4, False), "four GPUs, DDP + AMP": (4, True)}
runs = {name: simulate(lambda: build(ranks), lambda m, o: resnet_step(m, o, mixed), device="A100 40GB", world=ranks,
                       items=64, unit="images", name=f"ResNet-50, {name}")
        for name, (ranks, mixed) in CASES.items()}
for kind in runs["four GPUs, DDP + AMP"].traffic:
    print(kind)
compare(list(runs.values()), title="ResNet-50, 64 images of 224 x 224 a GPU")

# %%
summed = sum(t.payload_bytes for t in runs["four GPUs, DDP + AMP"].traffic if t.collective == "all-reduce")
assert summed == gradients, "the all-reduce should carry every gradient once"
alone = {mixed: float(rows[0][name]) for mixed, name in ((False, "fp32_or_tf32_images_s"), (True, "mixed_images_s"))}
asked = []
for name, (gpus, mixed) in CASES.items():
    speedup = at_worst(gpus, alone[mixed])[2]
    asked.append({"": name, "peak a GPU (simulated)": format_bytes(runs[name].peak_bytes),
                  "on a ring's link, a step (predicted)": format_bytes(int(ring_bytes(summed, gpus))),
                  "images/s (4: predicted)": f"{alone[mixed] * speedup:,.0f}",
                  "epoch, minutes": f"{images / alone[mixed] / speedup / 60:.1f}"})
display(pd.DataFrame(asked).set_index(""))
for experiment, where in [("resnet50", {"image_size": 224}), ("gloo_ranks", {})]:
    display(recorded_table(experiment, where=where))

# %% [markdown]
# **Read it.** DDP buys the time and costs memory: the peak *rises* by its buckets, since each GPU has its own 64 images
# (*weak* scaling). Mixed precision nearly halves the activations; the bytes sent stay, since gradients are fp32. Not
# shown: loading and waiting.
#
# *"Our CNN trains on CIFAR-10. Move it to four GPUs."*

# %%
for name in ("one process", "four ranks, DDP"):
    first = ways[name][0]
    print(f"{name:<16} {STEPS} steps of {BATCH} images, rate 0.03: {first['right']:.0%} of 512 unseen images right,",
          f"step {format_seconds(first['step_seconds'])} ({Evidence.MEASURED})")
assert abs(ways["one process"][0]["right"] - ways["four ranks, DDP"][0]["right"]) < 0.1, "ranks should not cost accuracy"

# %% [markdown]
# **Read it.** At an equal *global* batch nothing changes but the time: rate and schedule stay. On four GPUs you would
# rather keep 64 images *a GPU*: 256 a step, a quarter of the steps. Then multiply the rate by four, and warm up: raise
# it from the old rate over the first epochs ([Goyal and others 2017](https://arxiv.org/abs/1706.02677), section 2: 0.1
# for 256 images, five epochs; up to 8,192 images). What limits the speed-up of so small a network is its share: 16
# images hardly fill a GPU (the last row of section 8's table).
#
# ## When to use what
#
# | technique | use when | costs | does not help |
# |---|---|---|---|
# | DDP | the model fits one device, and you want speed | $4P$ bytes of payload a step, bucket copies | a model that does not fit |
# | accumulation with `no_sync` | the batch does not fit, or the link is slow | time: parts run one after another | states |
# | cutting the model ([lesson 13](../advanced/13_pipelines.ipynb)) | one device cannot hold it | idle devices, until pipelined | speed |

# %%
best = ways["four ranks, DDP"]
score("04", "small ResNet, 4 DDP ranks (one rank)", peak_bytes=max(r["peak_bytes"] for r in best),
      step_seconds=max(r["step_seconds"] for r in best))
for run in runs.values():
    score("04", run)
scoreboard("04")

# %% [markdown]
# ## Recap
#
# - DDP is a broadcast at the start and an averaged all-reduce per step: $4P$ bytes of payload for fp32.
# - Losses equal one process's where shares are equal and nothing looks across the batch; fp64 proves it.
# - Accumulation: send once (`no_sync`), weigh by tokens. A larger batch wants a higher rate, and warm-up.
# - Memory for states does not fall. Sharding, lesson 09, does that.
#
# ### On Monday
#
# In a script of your own, three lines, and a launcher that starts it once a GPU:
#
# ```python
# dist.init_process_group("nccl")
# model = DistributedDataParallel(model.to(rank), device_ids=[rank])
# loader = DataLoader(data, batch_size, sampler=DistributedSampler(data))  # and set_epoch(epoch)
# ```
#
# With transformers there is nothing to write: `torchrun --nproc-per-node=4 train.py` makes `Trainer` use DDP.
#
# ### Test yourself
#
# Your job on eight GPUs is only three times as fast as on one. How do you find out why?
#
# <details><summary>Answer</summary>
#
# Take the step apart. Time the loader alone. Time a step inside <code>no_sync</code>: what the full step takes
# longer is communication that backward does not hide; compare it with ring bytes divided by the link's speed. Compare
# ranks: a slow one holds all others up. Last, ask whether a rank's share is too small to keep a GPU busy.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/beginner/04_four_ranks.ipynb), in a copy: `make my-labs`. Then compare
# with the [solution](../../solutions/beginner/04_four_ranks.ipynb).
#
# **References.** Li and others 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel
# Training*, [arXiv:2006.15704](https://arxiv.org/abs/2006.15704). Patarasuk and Yuan 2009, *Bandwidth
# optimal all-reduce algorithms for clusters of workstations* (the ring). Goyal and others 2017, *Accurate,
# Large Minibatch SGD*, [arXiv:1706.02677](https://arxiv.org/abs/1706.02677). PyTorch,
# [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).
