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
# in ten lines, then with PyTorch's. The losses equal those of one process. You count the payload
# of every gradient to the byte, predict an epoch on four A100, and leave with a script for CPUs and GPUs.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 45 for the lab | any laptop (Windows: WSL2); several GPUs if you have them; beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# You train on four processes, and each takes a quarter of every batch. How much memory does *one* of
# them need at its peak, in percent of what one process needs for the whole batch? Write your guess in
# place of the 25. Section 3 compares it with the measurement.

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
# This lesson buys *compute* (more processors), not memory, and pays in *communication*: every rank holds the whole
# model. All ranks compute in one place: on GPUs if there are four, else on the CPU.

# %%
figure = draw_holders({"data parallel": ()}, sends={"data parallel": "sends all gradients"},
                      parameter_bytes=(4, 4, 4), title="Who holds what (fp32, SGD with momentum)")  # fmt: skip
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
# algorithm. In a *ring* of $N$ ranks, to reduce $B$ bytes each sends
#
# $$2 \, \frac{N-1}{N} \, B \ \text{bytes}$$

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
# The rest is a plain training loop. The network is a small ResNet with *group norm*: section 7 says
# why not batch norm. Its seed is the rank's number, so that replicas would start unequal without
# rule 1. The images are CIFAR-10's, at half their size, or generated ones where there is no network. `sharded_loader`
# gives each rank its share; section 4 opens it.

# %%
pictures = cifar10("train")
data = TensorDataset(F.avg_pool2d(normalize(pictures.images[:2048]), 2), pictures.labels[:2048].clone())
del pictures  # 50,000 images: 150 MB that nobody needs any more
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
# Each rank reports its losses, its median step, its peak in one more step, and what it sends at the
# start and in another step.

# %%
def train(wrap, after_backward=lambda model: None, autocast=False, norm="group", steps=16):
    device = my_device()
    torch.manual_seed(dist.get_rank())
    with traffic() as startup:
        parallel = wrap(small_resnet(norm).to(device))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.03, momentum=0.9)
    loader = sharded_loader(data, BATCH, drop_last=True)
    step = make_step(parallel, optimizer, after_backward, autocast)
    with tf32(False):  # on a GPU, too, all digits of fp32
        losses, step_seconds = run_steps(step, loader, device, steps)
        batch = [part.to(device) for part in next(iter(loader))]
        memory = measure(lambda: step(*batch), model=parallel, optimizer=optimizer,
                         items=BATCH, unit="images", timed_steps=0)  # fmt: skip
        with traffic() as sent:
            step(*batch)
    return {"losses": losses, "step_seconds": step_seconds, "peak_bytes": memory.peak_bytes,
            "startup": startup, "sent": sent}  # fmt: skip


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
# there are parameter tensors. The start costs the same $4P$, once. Now the losses:

# %%
def largest_difference(losses, reference, steps=8):
    pairs = zip(losses[:steps], reference[:steps], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


for steps in (1, 16):
    apart = largest_difference(hand["losses"], one["losses"], steps)
    print(f"largest relative difference, steps 1 to {steps}: {apart:.1e}")
assert largest_difference(hand["losses"], one["losses"]) < 1e-3, "more than rounding: is a rule missing?"

# %% [markdown]
# **Read it.** The losses differ by rounding alone: floating-point sums in another order. Each step starts from the last
# one's rounding, so it grows; the first proves the ranks right. (Lesson 14 proves them in double precision.)
#
# <div class="alert alert-warning"><b>Trap.</b> A mean over ranks is a mean over items only if all
# shares are of equal size. If a rank's loss is a <i>sum</i>, you want the sum of the gradients, and DDP
# still divides. PyTorch's
# <a href="https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html">page
# on DDP</a> says so in a note.</div>
#
# ## 3. The real one: DDP, and DDP with mixed precision
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
            "sent at the start": "nothing" if alone else format_bytes(first["startup"].payload_bytes),
            "sent per step": "nothing" if alone else format_bytes(sent),
            "calls": 0 if alone else sum(r.calls for r in first["sent"].rows),
            "on a ring's link (predicted)": format_bytes(int(ring_bytes(sent, len(reports)))),
            "median step here": format_seconds(max(r["step_seconds"] for r in reports))}  # fmt: skip


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
# gradients (`gradient_as_bucket_view=True` saves it). Where states fill the memory, DDP saves nothing. By hand makes a
# call per tensor where DDP makes one per bucket. (Do not compare the times: these ranks share cores.)
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
# them at a quarter of a MiB, and `torch.profiler` records steps; the one that hides most is drawn.

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
    for _ in range(8):
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
                for name, start, end in events if name.startswith("autograd::engine::evaluate_function")]  # fmt: skip
    return backward, sorted((start, end) for name, start, end in events if name == "gloo:all_reduce")


def hidden_seconds(events):
    backward, reduces = lanes_of(events)
    layers = [(span.start_seconds, span.end_seconds) for span in backward if span.kind == "backward"]
    return sum(max(0.0, min(end, until) - max(start, begin)) for start, end in reduces for begin, until in layers)


# On a busy machine a profile lacks an all-reduce now and then: only whole ones are drawn.
whole = [events for events in profiled if len(lanes_of(events)[1]) == len(bucket_bytes)]
events = max(whole, key=hidden_seconds)
backward, reduces = lanes_of(events)
sending = {f"bucket {number}, {size / 1024:.0f} KiB": [Span("all-reduce of a bucket", *span)]
           for number, (size, span) in enumerate(zip(bucket_bytes, reduces, strict=True), 1)}  # fmt: skip
lanes = {"rank 0": backward} | sending
figure = draw_lanes(lanes, title="One backward of DDP on rank 0", device="CPU, 1 thread a rank")
show(figure, alt="Backward's operations in the first lane, and below it one lane per bucket: the first "
     "all-reduces begin before backward has ended, the last one with its last gradient.")  # fmt: skip
print(f"hidden behind layers: {hidden_seconds(events) / sum(end - start for start, end in reduces):.0%} of the time of all-reduces")

# %% [markdown]
# **Read it.** The first buckets leave while backward has layers left, which can hide them; here ranks and gloo share
# cores, so backward often waits. The last leaves when nothing is left to hide it. A bucket may be larger
# than its cap: the gradient that reaches the cap still goes in. Large buckets need fewer calls, small ones start
# earlier: that is the whole trade-off of `bucket_cap_mb`.
#
# ## 4. Who gets which items
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
# will do. An *evaluation* on a padded set is slightly wrong: remove the copies. Shares that *differ* between ranks
# give a wrong gradient; section 5 has the cure.
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
# ## 5. Gradient accumulation, and `no_sync`
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
# For a language model the loss is a mean over *tokens*, and micro-batches hold unequal numbers of
# them. A mean of means gives a token in a short text more weight. The right divisor is the number of
# tokens in *all* micro-batches of *all* ranks:
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


right = gradient_of(all_at_once)
errors = [(run_ranks(gradient_of, 2, rule)[0] - right).norm() / right.norm()
          for rule in (mean_of_means, mean_of_shares, by_tokens)]  # fmt: skip
print("relative error of the gradient: mean of means {:.1e}, mean of shares {:.1e},"
      " by tokens {:.1e}".format(*errors))  # fmt: skip
assert errors[2] < 1e-12 < 0.05 < min(errors[:2]), "only the rule by tokens should be exact"

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> This very mistake stood in popular trainers. In October 2024
# transformers <a href="https://github.com/huggingface/transformers/pull/34191">fixed it</a> within a process, and then,
# as an option, <a href="https://github.com/huggingface/transformers/pull/34373">across devices</a>.</div>
#
# ## 6. Data parallel or model parallel: an idle device
#
# You could also cut the *model*: rank 0 has the first layers, rank 1 the rest. But rank 1 must wait for
# the activations, and rank 0 for the gradient. The ranks note when they compute, and measure their
# peak; what they send is one tensor in each direction.

# %%
spans = []  # each rank has its own


@contextlib.contextmanager
def noted(kind):
    start = time.monotonic()
    yield
    spans.append(Span(kind, start, time.monotonic()))


# %%
def front_step(front, images, shape):
    with noted("forward"):
        hidden = front(images)
    dist.send(hidden.detach(), 1)
    gradient = torch.empty(shape)
    dist.recv(gradient, 1)
    with noted("backward"):
        hidden.backward(gradient)


# %%
def back_step(back, labels, shape):
    hidden = torch.empty(shape, requires_grad=True)
    dist.recv(hidden.detach(), 0)
    with noted("forward"):
        loss = F.cross_entropy(back(hidden), labels)
    with noted("backward"):
        loss.backward()
    dist.send(hidden.grad, 0)


# %%
def split_training(cut=4):
    torch.manual_seed(0)
    layers, first = small_resnet(), dist.get_rank() == 0
    images, labels = (part.clone() for part in data[:BATCH])
    shape = (BATCH, *layers[:cut](images[:1]).shape[1:])
    mine = layers[:cut] if first else layers[cut:]
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.03, momentum=0.9)

    def step():
        optimizer.zero_grad()
        front_step(mine, images, shape) if first else back_step(mine, labels, shape)
        optimizer.step()

    peak_bytes = measure(step, model=mine, optimizer=optimizer, timed_steps=0).peak_bytes
    spans.clear()
    step()
    return spans, peak_bytes


split = run_ranks(split_training, 2)
lanes = {f"rank {rank}": found for rank, (found, _) in enumerate(split)}
figure = draw_lanes(lanes, title="One network, cut over two ranks", device="CPU, 1 thread a rank")
show(figure, alt="Rank 0 computes its forward and then waits; rank 1 computes forward and backward; then "
     "rank 0 computes its backward. At no time do both compute.")  # fmt: skip

# %%
every = [span for lane in lanes.values() for span in lane]
whole = max(span.end_seconds for span in every) - min(span.start_seconds for span in every)
busy = [sum(span.end_seconds - span.start_seconds for span in lane) for lane in lanes.values()]
for rank, (_, peak_bytes) in enumerate(split):
    print(f"rank {rank}: idle {100 * (1 - busy[rank] / whole):.0f}% of the step,",
          f"peak {format_bytes(peak_bytes)}   ({Evidence.MEASURED})")  # fmt: skip
print(f"one process, the same batch: peak {format_bytes(one['peak_bytes'])}")
assert sum(busy) <= whole, "both ranks computed at once"
assert max(peak for _, peak in split) < one["peak_bytes"], "a part needs less memory than the whole"

# %% [markdown]
# **Read it.** Each rank needs less memory than one process: it has part of the layers and of their activations. But one
# works while the other waits: two devices are no faster than one. Data parallelism keeps both busy and saves no memory
# for states. [Lesson 13](../advanced/13_pipelines.ipynb) fills these gaps with micro-batches; lesson 09 saves the
# memory.
#
# ## 7. Batch norm looks at its own share
#
# Batch norm normalizes by the statistics of the batch that it sees, and on four ranks that is a
# quarter. So the losses *differ* from one process's. To show that nothing else is wrong, a third run
# is one process that normalizes each quarter by itself.

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
     "process with whole batches goes its own way.")  # fmt: skip
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

# %% tags=["nbval-check-output"]
speed = {(row["gpu"], row["n_gpus"]): float(row["mixed_images_s"]) for row in table("nvidia_resnet50")}
images, gradients = 1_281_167, 4 * 25_557_032  # ImageNet's training set; ResNet-50's parameters
one_gpu = speed["A100-80GB", "1"]
print(f"1 A100: {one_gpu:,.0f} images/s, an epoch {images / one_gpu / 60:.1f} minutes (published)")
for gpus in (4, 8):
    sending = ring_bytes(gradients, gpus) / gpu("A100 80GB").peer_link.link_bytes_per_second
    computing = 256 / one_gpu
    speedup = gpus * computing / (computing + sending)
    print(f"{gpus} A100: step {1e3 * computing:.0f} ms, sending {1e3 * sending:.2f} ms, speed-up {speedup:.2f},",
          f"an epoch {images / one_gpu / speedup / 60:.1f} minutes (predicted)")  # fmt: skip
print(f"8 A100: speed-up {speed['A100-80GB', '8'] / one_gpu:.2f} (published)")
print(source("nvidia_resnet50").partition(",")[0])

# %% [markdown]
# **Read it.** At NVLink's full rate the link takes less than a percent, even unhidden. The published speed-up of eight is lower,
# so the rest is lost elsewhere: in loading, in ranks that wait for each other, or in launching. You look for it below.
# Far out, ResNet-50 kept about 90% efficiency from 8 to 256 GPUs ([Goyal and others
# 2017](https://arxiv.org/abs/1706.02677), abstract).
#
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
# ### The learning rate, when the batch grows
#
# Four GPUs with 64 images each take steps of 256, a quarter as many. The linear rule: multiply the learning rate by as
# much as the batch grows, and *warm up*, raise it from the old rate over the first epochs
# ([Goyal and others 2017](https://arxiv.org/abs/1706.02677), section 2: 0.1 for 256 images, five epochs; up to 8,192).
# Here a batch grows 16 times, for a toy network without norms.

# %%
small_images, labels = F.avg_pool2d(data.tensors[0], 2).flatten(1), data.tensors[1]


def losses_at(batch, rate, raised_from=None, seed=0, epochs=20, first_epochs=5):
    torch.manual_seed(seed)
    linear = [nn.Linear(192, 128), nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 10)]
    for layer in linear:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    model = nn.Sequential(*[part for layer in linear for part in (layer, nn.ReLU())][:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses, warm_steps = [], first_epochs * len(labels) // batch
    for part in (part for _ in range(epochs) for part in torch.randperm(len(labels)).split(batch)):
        if raised_from is not None:
            done = min(1.0, len(losses) / warm_steps)
            optimizer.param_groups[0]["lr"] = raised_from + done * (rate - raised_from)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(small_images[part]), labels[part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

# %%
K, RATE = 16, 0.02  # how many times the batch grows; the rate for 32 images
seeds = {"at once": [losses_at(32 * K, RATE * K, seed=seed) for seed in range(3)],
         "warmed up": [losses_at(32 * K, RATE * K, raised_from=RATE, seed=seed) for seed in range(3)]}  # fmt: skip
show(draw_losses({name: runs[0] for name, runs in seeds.items()}, device=WHERE, title=f"{32 * K} images a step, rate {RATE} x {K}, seed 0"),
     alt="Two loss curves: at once the loss jumps up in the first steps and ends higher; warmed up it falls.")  # fmt: skip
ends = {name: [sum(losses[-8:]) / 8 for losses in runs] for name, runs in seeds.items()}
for name, runs in seeds.items():
    print(f"{name:<10} three seeds: highest", *(f"{max(each):.1f}" for each in runs), " at the end", *(f"{end:.2f}" for end in ends[name]))
print(f"steps of 32 at rate {RATE}, as many epochs: {sum(losses_at(32, RATE)[-128:]) / 128:.2f}")
assert sum(ends["warmed up"]) < sum(ends["at once"]) - 0.3, "warm-up should end lower: was rate or start changed?"

# %% [markdown]
# **Read it.** Both ways begin at the same loss. At once, the next steps throw it higher, and the runs end higher.
# Raised step by step, the same rate trains, though not as far as 16 times as many small steps.
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
del model, optimizer, loss  # DDP holds the group: with it alive, a rank may abort at its end
gc.collect()
dist.destroy_process_group()  # always, and last
'''

# %%
with scratch("lesson-04") as folder:
    script, tensors = Path(folder) / "train.py", Path(folder) / "images.pt"
    script.write_text(SET_UP + LOOP)
    torch.save(data.tensors, tensors)
    os.environ["PYTHONPATH"] = str(here.root)  # where the script finds utils
    printed = run_torchrun(script, 2, tensors)
found = [float(line.split()[-1]) for line in printed.splitlines()]
print("one process, the same steps:", *(f"{loss:.5f}" for loss in one["losses"][:32:8]))
assert len(found) == 4, "an epoch has 32 steps, and rank 0 prints every eighth"
assert largest_difference(found, one["losses"][::8], steps=2) < 1e-3, "more than rounding"

# %% [markdown]
# The first losses are one process's; then rounding grows. Save script and tensors in the course's folder; on four GPUs it is
# `PYTHONPATH=. torchrun --rdzv-backend=c10d --rdzv-conf=store_type=file --nproc-per-node=4 train.py images.pt`. On several
# machines, `--nnodes` says how many, `--rdzv-endpoint` where they meet.
#
# <div class="alert alert-warning"><b>Trap.</b> That endpoint, or <code>--standalone</code>, listens on every address, asks
# for no password, and runs what it is sent
# (<a href="https://github.com/pytorch/pytorch/blob/main/SECURITY.md#using-distributed-features">PyTorch
# says so</a>). A cluster needs a network closed to all others.</div>
#
# ## 10. Scale up
#
# The same at real size: ResNet-50 on images of 224 x 224, 64 a GPU, on four *simulated* A100 cards, in fp32 and in
# mixed precision. `simulate` runs the model's own code on tensors without data, DDP's buckets included.

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
        for name, (ranks, mixed) in CASES.items()}  # fmt: skip
for kind in runs["four GPUs, DDP + AMP"].traffic:
    print(kind)
compare(list(runs.values()), title="ResNet-50, 64 images of 224 x 224 a GPU")

# %%
large = resnet(50, stem="imagenet", num_classes=1000)
gradient_bytes = 4 * sum(p.numel() for p in large.parameters())
summed = sum(t.payload_bytes for t in runs["four GPUs, DDP + AMP"].traffic if t.collective == "all-reduce")
assert summed == gradient_bytes, "the all-reduce should carry every gradient once"
print(f"gradients {format_bytes(gradient_bytes)}, on a ring's link {format_bytes(int(ring_bytes(summed, 4)))}",
      f"({Evidence.PREDICTED})")  # fmt: skip
for experiment, where in [("resnet50", {"image_size": 224}), ("gloo_ranks", {})]:
    display(recorded_table(experiment, where=where))

# %% [markdown]
# **Read it.** The peak *rises* by DDP's buckets; each GPU has its own 64 images, so nothing shrinks
# (*weak* scaling). Mixed precision nearly halves the activations, and the bytes sent stay: gradients are fp32.
#
# ## When to use what
#
# | technique | use when | costs | does not help |
# |---|---|---|---|
# | DDP | the model fits one device, and you want speed | $4P$ bytes of payload a step, bucket copies | a model that does not fit |
# | accumulation with `no_sync` | the batch does not fit, or the link is slow | time: parts run one after another | states |
# | cutting the model | one device cannot hold it | idle devices, until pipelined | speed |

# %%
best = ways["four ranks, DDP"]
score("04", "small ResNet, 4 DDP ranks (one rank)", peak_bytes=max(r["peak_bytes"] for r in best),
      step_seconds=max(r["step_seconds"] for r in best))  # fmt: skip
for run in runs.values():
    score("04", run)
scoreboard("04")

# %% [markdown]
# ## Break it, diagnose it
#
# A hand-written DDP that forgets to divide.

# %%
def sum_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


undivided = run_ranks(train, 4, share_start, sum_gradients)[0]["losses"]
figure = draw_losses({"one process": one["losses"][:16], "not divided": undivided}, device=WHERE, title="Summed, not averaged")
show(figure, alt="The losses begin equal and part after the first step: four times the gradient.")
assert abs(undivided[0] - one["losses"][0]) < 1e-4, "the first loss is taken before any update"
assert largest_difference(undivided, one["losses"]) > 0.01, "a gradient four times too large should show"

# %% [markdown]
# **Diagnose it.** Nothing fails. The first loss is equal, so the *start* and the *data* are right; from
# the second step on the losses part, so the *update* is wrong. The gradient is four times too large, as
# if the learning rate were. (A forgotten broadcast shows in the first loss already.)
#
# ## Recap
#
# - DDP is a broadcast at the start and an averaged all-reduce per step: $4P$ bytes of payload for fp32.
# - Losses equal one process's where shares are equal and nothing looks across the batch.
# - Buckets travel while backward computes.
# - Accumulation: send once (`no_sync`), weigh by tokens. A larger batch wants a higher rate, and warm-up.
# - Memory for states does not fall. Sharding, lesson 09, does that.
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
