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
# **One question.** Your training runs in one process. What makes four processes train the *same* model, and what does it cost?
#
# **The answer, shown below.** Equal starts and averaged gradients make them one model, where shares weigh the same and nothing looks
# across the batch. In memory activations are divided; parameters, gradients and optimizer state are not. Every gradient is sent in
# each step: while the link keeps up with backward, only the last ones cost time.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 45 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# A small ResNet (308,650 parameters, fp32, SGD with momentum) takes batches of 64 images. Under DDP four processes take 16 each.
# What does *one* of them need at its peak, in percent of one process with all 64?

# %%
my_bet_percent = 25

# %% tags=["setup"]
here = setup("beginner/04")

# %% jupyter={"source_hidden": true}
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from evidence.validation.tables import source
from utils import Evidence, check, format_bytes, resnet, run_ranks, scratch, show, small_resnet, traffic
from utils.catalog import link
from utils.lessons.lesson_04 import figures, scenarios, sending, training
from utils.lessons.lesson_04.data_parallel import accumulated_backward
from utils.lessons.lesson_04.machine import my_device, where
from utils.lessons.lesson_04.sharding import sharded_loader
from utils.lessons.lesson_04.taking_apart import moment, parts_of, table_of_parts
from utils.lessons.lesson_04.token_means import TOKENS, errors_of, summed_loss
from utils.lessons.lesson_04.training import gradient_difference, largest_difference, scaled_peak_bytes
from utils.units import MIB

# %% [markdown]
# ## 1. Data parallelism by hand
#
# A [**rank**](../00_glossary.ipynb) is one process of a group of **world size**. Each holds a **replica**, a whole copy
# of the model, and takes its share of every batch. Which bars are shorter on a rank?

# %%
show(figures.draw_holders(images=64),
     alt="One process beside four ranks. Parameters, optimizer state and gradients are bars of the same length everywhere; "
     "a rank's activations are a quarter, its rest is hardly shorter, and only ranks have DDP's buckets.")

# %% [markdown]
# Ranks meet in **collectives**, operations that all call: over *gloo* between CPUs, over *NCCL* between NVIDIA GPUs.

# %% tags=["nbval-check-output"]
def meet():
    number = torch.tensor([10.0 * dist.get_rank()], device=my_device())
    dist.all_reduce(number)  # everyone gets the sum
    return f"rank {dist.get_rank()} of {dist.get_world_size()}: {10 * dist.get_rank()} became {number.item():.0f}"

print(*run_ranks(meet, 4), sep="\n")

# %% [markdown]
# Training needs this *all-reduce*, and a *broadcast*.
#
# 1. Replicas start equal: rank 0 broadcasts its parameters and buffers to all.
# 2. After backward the gradients are summed over the ranks,
# 3. and divided by the world size: the mean of equal shares' means is the batch's mean.

# %%
def share_start(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    return model

def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

def make_step(model, optimizer, after_backward):
    def step(images, labels):
        optimizer.zero_grad()
        (loss := F.cross_entropy(model(images), labels)).backward()
        if after_backward:
            after_backward(model)
        optimizer.step()
        return loss.detach()

    return step

# %% [markdown]
# `sharded_loader` gives step $k$ of four ranks the items of step $k$ of one. *Group norm* normalizes each image by itself;
# section 4 says why. **Payload** is the bytes that a rank puts into collectives.

# %%
data, _ = training.pictures(2048)
BATCH = 64  # of all ranks together
SGD = partial(torch.optim.SGD, lr=0.03, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=1e-3)

def train(wrap, after_backward=None, *, batch=BATCH, steps=3, dtype=torch.float32, norm="group", width=32,
          make_optimizer=SGD, metered=False):
    torch.manual_seed(dist.get_rank())  # replicas would start unequal: rule 1 has to mend it
    with traffic() as at_start:
        model = wrap(small_resnet(norm, width=width).to(my_device(), dtype))
    optimizer = make_optimizer(model.parameters())
    loader = sharded_loader(data, batch, drop_last=True)  # this rank's share of each batch
    step = make_step(model, optimizer, after_backward)
    return training.observe(model, optimizer, step, loader, steps=steps, dtype=dtype, at_start=at_start, metered=metered)

def unchanged(model):
    return model

def run(ranks, ways):  # all ways in one launch; a report of each, from rank 0
    return run_ranks(lambda: {name: way() for name, way in ways.items()}, ranks, timeout_seconds=400)[0]

# %%
one_process = run(1, {batch: partial(train, unchanged, batch=batch, metered=True) for batch in (32, 64, 128)})
ways = {"one process": one_process[BATCH]} | run(4, {"four ranks, by hand": partial(train, share_start, average_gradients, metered=True)})
hand, P = ways["four ranks, by hand"], sum(parameter.numel() for parameter in small_resnet().parameters())
print(f"{P:,} parameters, gradients of 4 P = {4 * P:,} bytes")
print("at the start:", hand.at_start, "\nin a step:   ", hand.sent)
assert hand.sent.payload_bytes == hand.at_start.payload_bytes == 4 * P, "not every gradient once"

# %% [markdown]
# **Read it.** Each rank puts in exactly $4P$ bytes a step: every gradient once. In a *ring* $N$ ranks
# cut $B$ bytes into $N$ shares, which all travel at once. Follow share A: three hops make the whole sum, three more bring it to all.

# %%
show(figures.draw_ring(),
     alt="In each hop every rank passes a share of the gradients to the next rank; after three hops each share is a sum of all four, "
     "after three more all ranks have all sums.")

# %% [markdown]
# So a rank sends one share in each of $2(N-1)$ hops:
#
# $$2 \, (N-1) \, \frac{B}{N} \ \text{bytes on each link}$$
#
# **Question.** One million parameters in fp32: how many MB does each of *eight* ranks send in a ring, per step?

# %%
sent_by_each_of_eight_mb = ...
check("04.ring_of_eight", sent_by_each_of_eight_mb)

# %% [markdown]
# ## 2. Is it right? A test, and four faults
#
# Each row below the first breaks one rule. **Predict:** which does the *first* loss betray, and which the first *gradient*?

# %%
def sum_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

def forget_one(model):
    average_gradients(nn.ParameterList(list(model.parameters())[1:]))

NARROW = partial(train, width=8, dtype=torch.float64, steps=2)
RULES = {"right": partial(NARROW, share_start, average_gradients),
         "not broadcast": partial(NARROW, unchanged, average_gradients), "not reduced": partial(NARROW, share_start),
         "one tensor forgotten": partial(NARROW, share_start, forget_one), "not divided": partial(NARROW, share_start, sum_gradients),
         "not divided, Adam": partial(NARROW, share_start, sum_gradients, make_optimizer=ADAM)}

alone = run(1, {"SGD": partial(NARROW, unchanged), "Adam": partial(NARROW, unchanged, make_optimizer=ADAM)})

def apart(found, reference):
    losses = [abs(a - b) / b for a, b in zip(found.losses, reference.losses, strict=True)]
    return [*losses, gradient_difference(found, reference)]

rows = {name: apart(found, alone["Adam" if "Adam" in name else "SGD"]) for name, found in run(4, RULES).items()}
faults = pd.DataFrame(rows, ["loss 1", "loss 2", "gradient 1"]).T.rename_axis(columns="relative difference (measured)")
assert faults.loc["right"].max() < 1e-12 < 1e-3 < faults["gradient 1"].drop("right").min(), "the gradient should tell"
faults.map("{:.0e}".format)

# %% [markdown]
# **Read it.** The first loss precedes any update: only *not broadcast* shows. The second all but hides *not divided* under Adam,
# whose step hardly depends on the gradient's size. The first **gradient** shows each fault: test it, in fp64.
#
# ## 3. The real one: DDP
#
# `DistributedDataParallel` keeps the same rules. Backward fills **buckets**, flat tensors of gradients, each reduced in one
# call. With *views* (`gradient_as_bucket_view=True`) a gradient is a part of its bucket. Which columns explain your bet's answer?

# %%
VIEWS = partial(DistributedDataParallel, gradient_as_bucket_view=True)
DDP_WAYS = {"four ranks, DDP": partial(train, DistributedDataParallel, metered=True),
            "four ranks, DDP, views": partial(train, VIEWS, metered=True)}
OTHERS = {batch: partial(train, DistributedDataParallel, batch=batch, metered=True) for batch in (32, 128)}
four = run(4, DDP_WAYS | OTHERS)
ways |= {name: four[name] for name in DDP_WAYS}
print(f"Rank 0 at its peak, in MiB ({Evidence.MEASURED} on {where()}):")
training.table_of(ways)

# %% jupyter={"source_hidden": true}
one, ddp = ways["one process"], ways["four ranks, DDP"]
for batch, found in {32: four[32], 64: ddp, 128: four[128]}.items():
    alone = one_process[batch]
    rest = format_bytes(scaled_peak_bytes(alone, 2) - scaled_peak_bytes(alone, 1))  # the peak with rest doubled, less the peak
    print(f"batch {batch:>3}: a DDP rank's peak is {found.memory.peak_bytes / alone.memory.peak_bytes:.0%} of one process's,",
          f"whose rest is {rest} ({Evidence.MEASURED})")
halved, doubled = (f"{scaled_peak_bytes(ddp, factor) / scaled_peak_bytes(one, factor):.0%}" for factor in (0.5, 2))
print(f"your bet, for 64: {my_bet_percent}%. If rest were halved, the answer would be {halved}; doubled, {doubled} ({Evidence.PREDICTED})")

# %% [markdown]
# **Read it.** A rank's peak is states, buckets and rest, plus a quarter of the activations. So the larger the batch, the nearer a
# quarter: at section 6's size, where activations are nearly all, 26%. *Rest*, mostly a kernel's scratch, shrinks a little: it
# differs between machines, and your bet's answer with it.
#
# Buckets are one more copy of the gradients. Views save it where backward ends, but hardly at this peak. Do 24 steps
# train one model?

# %%
LONG, SINGLE = partial(NARROW, steps=24), partial(NARROW, steps=24, dtype=torch.float32)
alone = run(1, {"fp64": partial(LONG, unchanged), "fp32": partial(SINGLE, unchanged)})
over_24 = run(4, {"DDP, fp64": partial(LONG, DistributedDataParallel), "DDP, fp32": partial(SINGLE, DistributedDataParallel),
                  "not reduced, fp64": partial(LONG, share_start)})
off = {name: largest_difference(found.losses, alone[name[-4:]].losses, 24) for name, found in over_24.items()}
print("largest relative difference of a loss from one process's:", *(f"{name} {by:.0e}" for name, by in off.items()), sep="  ")
assert off["DDP, fp64"] < 1e-10 < 1e-2 < off["not reduced, fp64"], "DDP should train the same model, and the fault should not"

# %% [markdown]
# **Read it.** DDP differs in the last digits only.
#
# ### What the gradient test lets pass
#
# The test deals out shares and calls DDP itself. A loop may keep one process's loader, or go around DDP by `model.module(x)`.
# After a real step `check_ranks` compares the norm of each weight tensor, and counts items drawn twice.

# %%
def check_ranks(model, loader):  # each rank calls it; right: 0 and 0
    mine = torch.stack([parameter.detach().double().norm() for parameter in model.parameters()])
    dist.broadcast(of_rank_0 := mine.clone(), src=0)
    differs = torch.tensor(not mine.equal(of_rank_0), device=mine.device).int()
    drawn = [item for batch in loader.batch_sampler or [loader.sampler] for item in batch]
    times = torch.bincount(torch.tensor(drawn), minlength=len(loader.dataset)).to(mine.device)
    for each in (differs, times):
        dist.all_reduce(each)
    repeats = (times - 1).clamp(min=0).sum().item()  # to pad, a sampler takes fewer again than there are ranks
    return {"ranks with other weights than rank 0": differs.item(), "items drawn again": repeats * (repeats >= dist.get_world_size())}

def real_step(make_loader, around_ddp=False):
    model, loader = VIEWS(small_resnet(width=8).to(my_device())), make_loader()
    step = make_step(model.module if around_ddp else model, SGD(model.parameters()), None)
    step(*(part.to(my_device()) for part in next(iter(loader))))
    return check_ranks(model, loader)

LOADERS = {"right": lambda: DataLoader(data, BATCH // 4, sampler=DistributedSampler(data)),
           "right, batch_sampler": lambda: DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data), BATCH // 4, False)),
           "one process's loader": lambda: DataLoader(data, BATCH, shuffle=True),
           "another seed on each rank": lambda: DataLoader(data, BATCH // 4, sampler=DistributedSampler(data, seed=dist.get_rank()))}
loops = run(4, {name: partial(real_step, make) for name, make in LOADERS.items()} | {"model.module(x)": partial(real_step, LOADERS["right"], True)})
assert [[n > 0 for n in row.values()] for row in loops.values()] == [[False, False]] * 2 + [[False, True]] * 2 + [[True, False]], "each test tells its faults alone"
pd.DataFrame(loops).T.rename_axis(columns=f"({Evidence.MEASURED})")

# %% [markdown]
# ### Buckets, and overlap
#
# Backward makes the last layer's gradients first, and DDP reduces a full bucket *while* backward goes on. By default the first is
# full at 1 MiB, others at 25 MiB.
#
# What does that hide? Here layers and link *sleep*. In backward each of four layers sleeps 50 ms and makes
# 1 MiB of gradients. The link sleeps 40 ms a MiB: it is a **comm hook**, which DDP calls with each full bucket. A bucket begins
# when it is full and the link is free. **Predict** how long backward takes with four buckets, with one all-reduce, and at half
# the rate.

# %%
def slow_link(seconds_per_byte, sent):
    link = ThreadPoolExecutor(1)  # one bucket at a time

    def send(tensor, reduced):
        begin = time.perf_counter()
        time.sleep(seconds_per_byte * tensor.nbytes)
        dist.all_reduce(tensor)
        sent.append((begin, time.perf_counter()))
        reduced.set_result(tensor / dist.get_world_size())

    def hook(_, bucket):
        link.submit(send, bucket.buffer(), reduced := torch.futures.Future())
        return reduced  # backward goes on; its end waits for all of them

    return hook

# %% jupyter={"source_hidden": true}
def backward_over(ms_per_mib, calls):
    model = DistributedDataParallel(sending.sleepy_layers(4, seconds_per_item=0.05 / 4), bucket_cap_mb=4 / calls)  # of four items
    model.register_comm_hook(None, slow_link(ms_per_mib / 1e3 / MIB, sent := []))
    return sending.timed_backward(model, sent)

def predicted_seconds(ms_per_mib, calls):
    full = [sending.Bucket(4 * MIB // calls, call / calls) for call in range(1, calls + 1)]
    return sending.timetable(full, 0.2, 2, 1e3 * MIB / ms_per_mib)[-1][1]  # two ranks

WAYS = {"four buckets": (40, 4), "one all-reduce": (40, 1), "four buckets, half the rate": (80, 4), "one all-reduce, half the rate": (80, 1)}
backwards = run(2, {name: partial(backward_over, *how) for name, how in WAYS.items()})
for name, how in WAYS.items():
    print(f"{name:<30} {1e3 * predicted_seconds(*how):.0f} ms ({Evidence.PREDICTED}), {1e3 * backwards[name].seconds:.0f} ms ({Evidence.MEASURED})")
assert len({each.gradient for each in backwards.values()}) == 1, "another order of sending, the same gradient"
show(figures.draw_overlap(backwards, title="Layers sleep 50 ms each, the link 40 or 80 ms a MiB", device="CPU, two ranks"),
     alt="Backward in four parts. Four buckets: three are sent beside backward, the last one after it. One all-reduce begins when backward "
     "is over. At half the rate buckets queue, and more than two of four are sent after backward.")

# %% [markdown]
# **Read it.** The rule holds. One all-reduce hides nothing. While the link keeps up, buckets hide all but the last one: 120 of
# 160 ms (predicted). At half the rate they queue, and 170 of 320 ms show.
#
# ### Accumulation, and `no_sync`
#
# A batch too large for memory is taken in **micro-batches**, whose gradients add up for one step. DDP sends in *every*
# backward; `no_sync()` keeps it quiet until the last. Must it enclose the forward, too?

# %% tags=["nbval-check-output"]
def payload_of_four_parts(forward_quiet, backward_quiet):
    model = DistributedDataParallel(small_resnet().to(my_device()))
    images, labels = (part.to(my_device()) for part in data[:16])
    with traffic() as sent:
        for number in range(4):
            part = slice(4 * number, 4 * number + 4)
            with model.no_sync() if forward_quiet and number < 3 else contextlib.nullcontext():
                loss = F.cross_entropy(model(images[part]), labels[part]) / 4
            with model.no_sync() if backward_quiet and number < 3 else contextlib.nullcontext():
                loss.backward()
    return sum(row.payload_bytes for row in sent.rows if row.collective == "all-reduce")

INSIDE = {"nothing": (False, False), "backward": (False, True), "forward and backward": (True, True)}
for inside, payload_bytes in run_ranks(lambda: {name: payload_of_four_parts(*quiet) for name, quiet in INSIDE.items()}, 2)[0].items():
    print(f"in no_sync: {inside:<21} {payload_bytes:>9,} bytes a step, {payload_bytes / (4 * P):.0f} x 4 P")

# %% [markdown]
# It must: in the forward DDP decides whether its backward will send.
#
# ## 4. Where the equality ends
#
# ### The last uneven batch
#
# A rank that waits alone in an all-reduce
# [fails after minutes](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group).
# So `DistributedSampler` repeats items, or leaves some out: all ranks take as many steps.
# ([`join()`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html) allows unequal counts.)
#
# **Question.** 1,003 items over 8 ranks, padded: how many items of an epoch are repeats?

# %% tags=["nbval-check-output"]
for drop_last in (False, True):
    samplers = [DistributedSampler(range(10), 4, rank, shuffle=False, drop_last=drop_last) for rank in range(4)]
    print(f"{'drop_last' if drop_last else 'padded':<10}", *(list(sampler) for sampler in samplers))

repeated_items = ...
check("04.repeated_items", repeated_items)

# %% [markdown]
# **Read it.** Padded, items 0 and 1 count double; with `drop_last` 8 and 9 are left out.
#
# ### A mean over tokens
#
# A language model's loss is a mean over *tokens*, of all micro-batches of all ranks. `by_tokens` divides the sum of losses by their
# number, and multiplies by $N$, since DDP divides by $N$. The other rules take means of means:

# %%
def mean_of_means(model, mine):
    for text in mine:
        (summed_loss(model, text) / len(text[1]) / len(mine)).backward()

def mean_of_shares(model, mine):  # right within a rank
    sum(summed_loss(model, text) for text in mine).div(sum(len(text[1]) for text in mine)).backward()

def by_tokens(model, mine):
    accumulated_backward(model, mine, summed_loss, lambda text: len(text[1]))

# %%
token_errors = errors_of(mean_of_means, mean_of_shares, by_tokens)
print("one linear layer; tokens of each micro-batch, rank 0 and 1:", *TOKENS)
print(*(f"{name:<15} gradient wrong by {error:.0e} of its norm" for name, error in token_errors.items()), sep="\n")
assert token_errors.pop("by_tokens") < 1e-12 < 0.05 < min(token_errors.values()), "tokens should be right, means wrong"

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> transformers fixed this mistake
# <a href="https://github.com/huggingface/transformers/pull/34191">within a process</a> in October 2024, across devices
# <a href="https://github.com/huggingface/transformers/pull/34373">by an option</a>, which is the
# <a href="https://github.com/huggingface/transformers/pull/39395">default since 4.54</a>.</div>
#
# ### Batch norm looks at its own share
#
# A rank's batch norm sees a quarter. Below, one process takes whole batches, another quarters.

# %%
BATCH_NORM = partial(NARROW, norm="batch", steps=3)
by_parts = run(1, {"whole": partial(BATCH_NORM, unchanged), "quarters": partial(BATCH_NORM, training.quarter_by_quarter)})
ranks = run_ranks(partial(BATCH_NORM, DistributedDataParallel), 4)
from_whole, from_quarters = (largest_difference(ranks[0].losses, each.losses, 3) for each in by_parts.values())
print(f"losses of four ranks, relative: {from_whole:.0e} from whole batches, {from_quarters:.0e} from quarters (fp64)")
print("running statistics after 3 steps, summed, rank 0 to 3:", *(f"{report.buffers:.4f}" for report in ranks))
print(ranks[0].sent)
assert from_quarters < 1e-12 < 1e-3 < from_whole, "four ranks should follow the process that goes by quarters"

# %% [markdown]
# **Read it.** Four ranks follow the quarters. DDP broadcasts *rank 0's* running statistics before each forward, then each
# rank updates its own: evaluate and save rank 0's. Below 16 images a GPU its error rises
# ([Wu and He](https://arxiv.org/abs/1803.08494), figure 1): `SyncBatchNorm` takes statistics over all ranks.
#
# ## 5. Is it faster? Scaling efficiency
#
# **Speed-up** is the images a second of $N$ ranks over those of one; **efficiency** is speed-up over $N$. NVIDIA
# published ResNet-50, 256 images a GPU, in TF32 and under AMP (automatic mixed precision). Do bytes explain what
# eight A100s lose?
#
# **Question.** Under AMP a step sends `"half"` the bytes of gradients, or the `"same"`? Why?

# %%
payload_under_amp = ...
check("04.bytes_under_amp", payload_under_amp)

# %% [markdown]
# Section 3's rule predicts what shows; a bucket takes $2(N-1)/N$ of its bytes over the rate. Assumed: each GPU has its own link at
# its standard's rate; backward takes two thirds of the step, each layer its share of the FLOPs.

# %% tags=["nbval-check-output"]
speeds = scenarios.published_speeds()  # images a second of one GPU, of eight
IMAGES, GPUS = 256, 8  # images on each
for name, (lone, eight) in speeds.items():
    print(f"{name:<4} step {1e3 * IMAGES / lone:.0f} ms on one A100, {1e3 * (GPUS * IMAGES / eight - IMAGES / lone):.1f} ms more on eight:",
          f"speed-up {eight / lone:.2f}, efficiency {eight / lone / GPUS:.0%} (published)")
print("published:", source("nvidia_resnet50").partition(" @")[0])
backward_seconds = 2 / 3 * IMAGES / speeds["AMP"][0]
buckets = sending.buckets_of(partial(resnet, 50, stem="imagenet", num_classes=1000), (1, 3, 224, 224))
print(f"buckets, and when they are full in {1e3 * backward_seconds:.0f} ms of backward:",
      *(f"{each.payload_bytes / MIB:.1f} MiB at {1e3 * each.ready_share * backward_seconds:.0f} ms" for each in buckets), sep="  ")

def at_worst(name):  # sending that hides behind nothing
    return 2 * (GPUS - 1) / GPUS * sum(bucket.payload_bytes for bucket in buckets) / link(name).link_bytes_per_second

def shows_ms(name, rate, backward):  # by how much AMP's step grows: what is left of sending when backward is over
    spans = sending.timetable(buckets, backward * backward_seconds, GPUS, rate * link(name).link_bytes_per_second)
    return f"{1e3 * max(0.0, spans[-1][1] - backward * backward_seconds):.1f}"

links, HOW = ("NVLink 3", "PCIe 4 x16", "Ethernet 100G", "Ethernet 25G"), {"as assumed": (1, 1), "half the rate": (0.5, 1), "double the rate": (2, 1), "half the backward": (1, 0.5)}
shown = {f"not hidden, {said}": [shows_ms(name, *how) for name in links] for said, how in HOW.items()}
shown = {"all sending": [f"{1e3 * at_worst(name):.1f}" for name in links]} | shown
pd.DataFrame(shown, links).rename_axis(columns="ms a step (predicted, eight A100s, AMP)")

# %% [markdown]
# **Read it.** On NVLink all sending takes 0.6 ms. Eight GPUs lose 9.6 ms in TF32 and 19.6 ms under AMP: bytes do
# not explain that. At 25 Gbit/s the answer hangs on the assumptions: between 2.7 and 45.4 ms show beside AMP's 104 ms.
# (DDP's `bf16_compress_hook` halves the bytes.)
#
# ### Why is it slow?
#
# A rank is *ready* when its last bucket is full. The rank that is ready first has five parts, whose sum is the step:
#
# | part | what it is | what helps |
# |---|---|---|
# | *loading* | until it has its batch | more `num_workers` |
# | *computing* | from there until it is ready, less the fixed part | the clocks and cores that one process had |
# | *fixed part* | twice the computing of half a share, less that of a share | larger shares |
# | *waiting* | until the last rank is ready | equal shares and hardware |
# | *DDP's part* | from there until all is sent | larger shares, `no_sync`, a faster link ([lesson 11](../advanced/11_links.ipynb)) |
#
# The measure is one process with the whole batch: two ranks should need half of each part. Each row below plants 50 ms a step
# (layers sleep again). **Predict** which part grows.

# %%
def take_apart(model, loader, loss_of, send=allreduce_hook, rounds=12):
    device, batch, full, rows, batches = next(model.parameters()).device, None, [], [], iter(loader)
    now = partial(moment, device)  # on a GPU an event: it is still at what Python asked for earlier
    model.register_comm_hook(None, lambda _, bucket: full.append(now()) or send(None, bucket))
    for number in range(2 * rounds):
        halved = number >= rounds  # half of a share, and nothing is sent
        dist.barrier()
        begin, batch, loaded = now(), batch if halved else [part.to(device) for part in next(batches)], now()
        with model.no_sync() if halved else contextlib.nullcontext():
            loss_of(model, [part[::2] for part in batch] if halved else batch).backward()
        rows.append([begin, loaded, now() if halved else full[-1], now()])
    return parts_of(rows)  # gathers all ranks'

# %%
def planted(fault):
    def sleep(where):
        time.sleep(0.05 * (fault.endswith(where) and (dist.get_rank() == 1 or "rank 1" not in fault)))

    def loss_of(model, batch):
        sleep("forward")
        return model(batch[0]).square().mean()

    loader = sharded_loader(sending.sleepy_data(16 * BATCH), BATCH)
    seconds_per_item = 0.001 + 0.05 / (BATCH / 2) * (fault == "every item")
    model = DistributedDataParallel(sending.sleepy_layers(1, seconds_per_item))  # one bucket, of 1 MiB
    send = slow_link(0.05 / MIB, []) if fault == "the link" else allreduce_hook
    return take_apart(model, (sleep("loader") or batch for batch in loader), loss_of, send)

FAULTS = ("nothing", "every loader", "rank 1's loader", "every item", "every forward", "rank 1's forward", "the link")
parts = run(1, {"one process, a half of it": partial(planted, "nothing")}) | run(2, {fault: partial(planted, fault) for fault in FAULTS})
table_of_parts(parts, share=1 / 2).rename_axis(columns=f"ms a step, {Evidence.MEASURED}: median (middle half)")

# %% [markdown]
# **Read it.** Where 50 ms were planted, their part grew most (two ranks, one bucket); *waiting* names the slow rank, and why it is
# late. Row *nothing* shows what a busy machine alone makes of it: trust only what is far above.
#
# At work take `take_apart` and `sources/beginner/04_four_ranks/taking_apart.py` (imported above), with a model that you throw away
# (the hook stays). Run one process first, and read the part that grew most. (`share=1` where each rank takes as many items.)
#
# ## 6. The scenarios as asked
#
# *"Scale our ResNet to four GPUs: DDP, then mixed precision. Time and memory?"*
# The bet kept the batch of all ranks (**strong scaling**); here each GPU keeps 256 images (**weak scaling**). `simulate` runs a
# step without data, for A100s; NCCL's and cuDNN's buffers and the CUDA context come on top.

# %%
CASES = {"one GPU": (1, "TF32"), "four GPUs, DDP": (4, "TF32"), "four GPUs, DDP + AMP": (4, "AMP")}
bet, asked = scenarios.asked(CASES, speeds, buckets, IMAGES)
print(bet)
asked

# %% [markdown]
# **Read it.** Four GPUs need little more each than one, and about a quarter of the time. AMP nearly halves the peak. Minutes, of
# ImageNet, range from no loss to that of NVIDIA's eight (AMP's with `--channels-last`).
#
# *"Our CNN trains on CIFAR-10. Move it to four GPUs."* Keep batch, rate and schedule: `train.py` takes the same images in
# each step, and prints seconds and peak of *your* GPUs (`--size 224`: images as large as the table's). Here `--fake` takes one
# step with random images: is the saved model the judged one?

# %%
here.write_script("train.py", training.script_text())
with scratch("lesson-04") as folder, contextlib.chdir(folder):  # it saves model.pt where it is started
    printed = training.run_script(here.root / "build/lesson-04/train.py", 2, "--network", "shufflenet_v2_x0_5", "--epochs", "1", "--fake")
pd.DataFrame({f"accuracy on random images ({Evidence.MEASURED})": training.judged_twice(printed)}, ["judged by two ranks", "model.pt, loaded by one process"])

# %% [markdown]
# ## Recap
#
# - **The same model.** Equal starts and averaged gradients make them one model, where shares weigh the same and nothing looks
#   across the batch.
# - **Memory.** Activations are divided; parameters, gradients and optimizer state are not
#   ([lesson 09](../intermediate/09_sharding.ipynb) divides those).
# - **Time.** Every gradient is sent in each step, $4P$ bytes of payload: while the link keeps up with backward, only the last ones
#   cost time.
#
# **Test yourself.** Eight GPUs are three times as fast as one. How do you find out why?
#
# <details><summary>Answer</summary>
#
# Take a step of one and of eight apart, as in section 5, and read the part that grew most.
#
# </details>
#
# **Where next.** The [lab](../../labs/beginner/04_four_ranks.ipynb) (`make my-labs`), then its
# [solution](../../solutions/beginner/04_four_ranks.ipynb).

# %% [markdown]
# ## On Monday
#
# Before the optimizer is made:
#
# ```python
# # You have model, dataset, batch_size (items of all ranks in one optimizer step),
# # and accumulate (micro-batches that each rank takes for it, 1 or more)
# import contextlib
# import copy
# import os
# import torch
# import torch.distributed as dist
# from torch.nn.parallel import DistributedDataParallel
# from torch.utils.data import DataLoader, DistributedSampler
#
# dist.init_process_group()  # NCCL between GPUs, gloo between CPUs
# rank, ranks = dist.get_rank(), dist.get_world_size()
# assert batch_size % (ranks * accumulate) == 0, "unequal shares would weigh unequally"
# torch.manual_seed(rank)  # dropout and augmentation: other numbers on each rank
# device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
# if device.type == "cuda":
#     torch.cuda.set_device(device)
# # Only below about 16 images a GPU, or to match one process:
# # model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
# model = DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
# sampler = DistributedSampler(dataset)  # it shuffles
# loader = DataLoader(dataset, batch_size // (ranks * accumulate), sampler=sampler, drop_last=True)  # and your other arguments
# ```
#
# Test your loss, a mean over items:
#
# ```python
# def gradient_difference():  # holds five fp64 copies of the parameters for a moment
#     plain = copy.deepcopy(model.module).double().eval()  # no dropout, and batch norm looks at no batch
#     batch = [part.to(device) for part in next(iter(DataLoader(dataset, 2 * ranks)))]
#     batch = [part.double() if part.is_floating_point() else part for part in batch]
#     for part in batch:
#         dist.broadcast(part, src=0)  # the same on all, augmented or not
#
#     def gradient(network, mine):
#         network.zero_grad()
#         loss_of(network, mine).backward()
#         return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
#
#     whole = gradient(plain, batch)
#     shared = gradient(DistributedDataParallel(plain), [part[rank::ranks] for part in batch])
#     return ((shared - whole).norm() / whole.norm()).item()
#
# apart = gradient_difference()
# print(f"rank {rank}: gradients {apart:.0e} apart")  # right: 1e-12 or less; a wrong rule: many orders more
# ```
#
# For a mean over tokens, with `accumulate = 1` (more: lab exercise 4):
#
# ```python
# import torch.nn.functional as F
#
# def loss_of(model, batch):
#     inputs, targets = batch
#     total = (targets != -100).sum()  # -100 marks a token that has no target
#     dist.all_reduce(total)  # the tokens of all ranks
#     logits = model(inputs)
#     return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") * ranks / total
# ```
#
# Record a step, and open it in [Perfetto](https://ui.perfetto.dev):
#
# ```python
# for _ in range(3):  # in the second step DDP orders its buckets
#     with torch.profiler.profile() as profile:
#         loss_of(model, [part.to(device) for part in next(iter(loader))]).backward()
# profile.export_chrome_trace(f"step-{rank}.json")  # look for "all_reduce", beside backward or after it
# model.zero_grad()
# ```
#
# Train, or go on where a run stopped:
#
# ```python
# # You choose `epochs`, and `amp` (True: bf16)
# first = 0
# if os.path.exists("checkpoint.pt"):  # on a disk that all machines share
#     saved = torch.load("checkpoint.pt", map_location=device)
#     model.module.load_state_dict(saved["model"])
#     optimizer.load_state_dict(saved["optimizer"])
#     first = saved["epoch"] + 1
# for epoch in range(first, epochs):
#     sampler.set_epoch(epoch)  # another order
#     optimizer.zero_grad()  # micro-batches left over from the last epoch are dropped
#     for number, batch in enumerate(loader, 1):
#         is_last = number % accumulate == 0
#         with contextlib.nullcontext() if is_last else model.no_sync():
#             with torch.autocast(device.type, torch.bfloat16, enabled=amp):
#                 loss = loss_of(model, [part.to(device) for part in batch]) / accumulate
#             loss.backward()
#         if is_last:
#             optimizer.step()  # clip before it, if you do: gradients are averaged by now
#             optimizer.zero_grad()
#         if epoch == first and number == accumulate:  # `check_ranks` of section 3: copy it here
#             faults = check_ranks(model, loader)
#             assert not any(faults.values()), f"ranks at fault: {faults}"
#     if rank == 0:  # `module`: else DDP puts "module." before each name. Add your scheduler's and scaler's states
#         torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "checkpoint.new")
#         os.replace("checkpoint.new", "checkpoint.pt")  # a crash while it saves leaves the old file whole
# dist.destroy_process_group()
# ```
#
# Evaluate in parts: ranks that wait may time out. At *Expected
# to have finished reduction*, `TORCH_DISTRIBUTED_DEBUG=DETAIL` names the parameter without a gradient: use,
# freeze or drop it, or give DDP `find_unused_parameters=True`.
#
# With transformers' `Trainer`:
#
# ```python
# import os
# from transformers import Trainer, TrainingArguments
#
# ranks = int(os.environ["WORLD_SIZE"])
# arguments = TrainingArguments("out", num_train_epochs=1, logging_strategy="epoch", average_tokens_across_devices=True,
#                               per_device_train_batch_size=batch_size // (ranks * accumulate), gradient_accumulation_steps=accumulate)
# trainer = Trainer(model, arguments, train_dataset=dataset)
# trainer.train()
# ```
#
# It averages over all ranks' tokens only where `trainer.model_accepts_loss_kwargs`, or with a `compute_loss_func`. Start either with
# `torchrun --nproc-per-node=4 train.py`.
