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
# **One question.** Your training runs in one process. What makes four processes train the *same* model, and what does it
# cost?
#
# **The answer, proved below.** Equal starts and averaged gradients make them one model. In memory only activations are
# divided. In each step every gradient is sent: a fast link hides that behind backward, a slower one less.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 45 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# A small ResNet (308,650 parameters, fp32, SGD with momentum) takes batches of 64 images of 16 x 16. Under DDP four processes
# take 16 each. What does *one* of them need at its peak, in percent of one process with all 64? Write your guess:

# %%
my_bet_percent = 25

# %% tags=["setup"]
here = setup("beginner/04")

# %% jupyter={"source_hidden": true}
import contextlib
import time
from functools import partial

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from evidence.validation.tables import source, table
from utils import Evidence, check, format_bytes, format_seconds, resnet, run_ranks
from utils import scratch, show, simulate, small_resnet, traffic
from utils.catalog import link
from utils.lessons.lesson_04 import figures, sending
from utils.lessons.lesson_04.data_parallel import accumulated_backward
from utils.lessons.lesson_04.machine import my_device, where
from utils.lessons.lesson_04.sharding import sharded_loader
from utils.lessons.lesson_04.token_means import TOKENS, errors_of, summed_loss
from utils.lessons.lesson_04.training import gradient_difference, largest_difference, observe, pictures, run_script
from utils.lessons.lesson_04.training import scaled_peak_bytes, script_text, table_of

# %% [markdown]
# ## 1. Data parallelism by hand
#
# A [**rank**](../00_glossary.ipynb) is one process of a group of **world size**. Each holds a **replica**, a whole copy
# of the model, and takes its own share of every batch. Which bars are shorter on a rank?

# %%
show(figures.draw_holders(images=64),
     alt="One process beside four ranks. Parameters, optimizer state and gradients are bars of the same length everywhere; "
     "a rank's activations are a quarter, and only ranks have DDP's buckets.")

# %% [markdown]
# Ranks meet in **collectives**, operations that all of them call. `run_ranks` runs a function in real processes.
# *gloo* carries data between CPUs, *NCCL* between NVIDIA GPUs.


# %% tags=["nbval-check-output"]
def meet():
    number = torch.tensor([10.0 * dist.get_rank()], device=my_device())
    dist.all_reduce(number)  # everyone gets the sum
    return f"rank {dist.get_rank()} of {dist.get_world_size()}: {10 * dist.get_rank()} became {number.item():.0f}"

print(*run_ranks(meet, 4), sep="\n")

# %% [markdown]
# Training needs two: a *broadcast* (everyone gets what rank 0 has) and this *all-reduce*.
#
# 1. Replicas start equal: rank 0 broadcasts its parameters and buffers.
# 2. After backward the gradients are summed over the ranks,
# 3. and divided by the world size, since each rank's loss is a mean over its share.
#
# The mean of equal shares' means is the batch's mean. `after_backward` takes rules 2 and 3.


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
# `sharded_loader` gives step $k$ of four ranks the items of step $k$ of one. The ResNet has *group norm*, which normalizes
# each image by itself; section 4 says why. Images are CIFAR-10's at half size, or generated.

# %%
data, _ = pictures(2048)
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
    return observe(model, optimizer, step, loader, steps=steps, dtype=dtype, at_start=at_start, metered=metered)


# %% [markdown]
# `observe` reports losses (means over ranks), rank 0's first gradient, with `metered` the memory of one more step, and
# **payload**: the bytes that a rank puts into collectives.

# %%
def unchanged(model):
    return model

def run(ranks, ways):  # all ways in one launch; a report of each, from rank 0
    return run_ranks(lambda: {name: way() for name, way in ways.items()}, ranks, timeout_seconds=400)[0]

one_process = run(1, {batch: partial(train, unchanged, batch=batch, metered=True) for batch in (32, 64, 128)})
ways = {"one process": one_process[BATCH]} | run(4, {"four ranks, by hand": partial(train, share_start, average_gradients, metered=True)})
hand, P = ways["four ranks, by hand"], sum(parameter.numel() for parameter in small_resnet().parameters())
print(f"{P:,} parameters, gradients of 4 P = {4 * P:,} bytes")
print("at the start:", hand.at_start, "\nin a step:   ", hand.sent)
assert hand.sent.payload_bytes == hand.at_start.payload_bytes == 4 * P, "not every gradient once"

# %% [markdown]
# **Read it.** Each rank puts in exactly $4P$ bytes a step: every gradient once. In a *ring* $N$ ranks cut $B$ bytes into $N$ shares, which all travel at once. Follow share A in the thick frame: *A: 0+1* is its
# sum over ranks 0 and 1. Three hops make the whole sum, three more bring it to all.

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
# **Predict.** Each row below the first breaks one rule. Which does the *first* loss betray, the second, the first
# *gradient*? (Four ranks, fp64, a quarter of the channels.)

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

# %%
alone = run(1, {"SGD": partial(NARROW, unchanged), "Adam": partial(NARROW, unchanged, make_optimizer=ADAM)})

def apart(found, reference):
    losses = [abs(a - b) / b for a, b in zip(found.losses, reference.losses, strict=True)]
    return [*losses, gradient_difference(found, reference)]

rows = {name: apart(found, alone["Adam" if "Adam" in name else "SGD"]) for name, found in run(4, RULES).items()}
faults = pd.DataFrame(rows, ["loss 1", "loss 2", "gradient 1"]).T.rename_axis(columns="relative difference (measured)")
assert faults.loc["right"].max() < 1e-12 < 1e-3 < faults["gradient 1"].drop("right").min(), "the gradient should tell"
faults.map("{:.0e}".format)

# %% [markdown]
# **Read it.** The first loss precedes any update: only *not broadcast* shows. The second shows all faults under SGD.
# Adam's step hardly depends on the gradient's size, so there *not divided* leaves 5e-08. The first
# **gradient** shows each: test it, in fp64.
#
# ## 3. The real one: DDP
#
# `DistributedDataParallel` keeps the same rules. Backward fills **buckets**, flat tensors of gradients, each reduced in one
# call. What does a rank need, at three batches?

# %%
VIEWS = partial(DistributedDataParallel, gradient_as_bucket_view=True)
LONG, SINGLE = partial(NARROW, steps=24), partial(NARROW, steps=24, dtype=torch.float32)
DDP_WAYS = {"four ranks, DDP": partial(train, DistributedDataParallel, metered=True),
            "four ranks, DDP, views": partial(train, VIEWS, metered=True)}
OTHERS = {batch: partial(train, DistributedDataParallel, batch=batch, metered=True) for batch in (32, 128)}
four = run(4, DDP_WAYS | OTHERS | {"fp64": partial(LONG, DistributedDataParallel), "fp32": partial(SINGLE, DistributedDataParallel),
                          "not reduced": partial(LONG, share_start)})
ways |= {name: four[name] for name in DDP_WAYS}
one, ddp = ways["one process"], ways["four ranks, DDP"]
assert gradient_difference(ddp, one) < 1e-4, "more than rounding: is a rule missing?"
for batch, found in {32: four[32], 64: ddp, 128: four[128]}.items():
    print(f"batch {batch:>3}: a DDP rank's peak is {found.memory.peak_bytes / one_process[batch].memory.peak_bytes:.0%} of one process's ({Evidence.MEASURED})")
print(f"your bet, for 64: {my_bet_percent}%")

# %% [markdown]
# **Read it.** The larger the batch, the nearer a quarter. Which columns of the table explain it? With *views*
# (`gradient_as_bucket_view=True`) each gradient is a part of a bucket, and counts as a gradient.

# %%
halved, doubled = (f"{scaled_peak_bytes(ddp, factor) / scaled_peak_bytes(one, factor):.0%}" for factor in (0.5, 2))
print(f"Rank 0 at its peak, in MiB ({Evidence.MEASURED} on {where()}). If rest were halved, your bet's answer would be {halved}; doubled, {doubled} ({Evidence.PREDICTED}).")
table_of(ways)

# %% [markdown]
# **Read it.** Activations are divided, states are not. *Rest* has no name of its own, such as a kernel's scratch: it
# depends on the machine, and the percentage with it. DDP's buckets are one more copy of the gradients. Views save that copy where
# backward ends; here the peak lies at its start.
#
# The bet is **strong scaling**: the batch of all ranks stays. In **weak scaling** each rank's share stays.
#
# Does DDP train the same model over many steps? Compare its lines with a fault's:

# %% jupyter={"source_hidden": true}
alone = run(1, {"fp64": partial(LONG, unchanged), "fp32": partial(SINGLE, unchanged)})
assert largest_difference(four["fp64"].losses, alone["fp64"].losses, 24) < 1e-10, "DDP should train the same model"
show(figures.draw_apart({
    "a fault: not reduced, fp64": (four["not reduced"].losses, alone["fp64"].losses),
    "DDP, fp32": (four["fp32"].losses, alone["fp32"].losses),
    "DDP, fp64": (four["fp64"].losses, alone["fp64"].losses)},
    title="How far losses of four ranks lie from one process's (SGD, width 8)", device=where()),
    alt="Three curves over 24 steps on a logarithmic axis with a zero. The fault lies far above the others from step 2 on. "
    "DDP in fp32 and in fp64 stay at the last digits of their type.")

# %% [markdown]
# **Read it.** Over 24 steps it does: sums run in another order, so only the last digits differ.
#
# ### What the gradient test lets pass
#
# The test deals out shares and calls DDP itself. A loop may forget either: no sampler, or `model.module(x)`, which goes
# around DDP. Compare ranks after a real step:

# %%
def check_ranks(model, loader):  # on how many ranks it is so
    mine = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    dist.broadcast(of_rank_0 := mine.clone(), src=0)
    # If each has its share, all batches but the last do not yet reach the whole data set.
    found = [not mine.equal(of_rank_0), (len(loader) - 1) * loader.batch_size * dist.get_world_size() >= len(loader.dataset)]
    dist.all_reduce(found := torch.tensor(found, device=mine.device).int())
    return dict(zip(["weights not rank 0's", "more than a share of the items"], found.tolist(), strict=True))

def real_step(around_ddp=False, sampled=True, size=BATCH // 4):
    model = VIEWS(small_resnet(width=8).to(my_device()))
    loader = DataLoader(data, size, sampler=DistributedSampler(data) if sampled else None)
    step = make_step(model.module if around_ddp else model, SGD(model.parameters()), None)
    step(*(part.to(my_device()) for part in next(iter(loader))))
    return check_ranks(model, loader)

WRONG = {"no sampler": {"sampled": False}, "one process's loader": {"sampled": False, "size": BATCH}, "model.module(x)": {"around_ddp": True}}
LOOPS = {"right": real_step, **{name: partial(real_step, **how) for name, how in WRONG.items()}}
loops = pd.DataFrame(run(4, LOOPS)).T.rename_axis(columns=f"ranks of 4 ({Evidence.MEASURED})")
assert loops.gt(0).to_numpy().tolist() == [[False, False], [False, True], [False, True], [True, False]], "each test should tell its fault alone"
loops

# %% [markdown]
# ### Buckets, and overlap
#
# By hand took 29 calls a step, DDP two; each costs a start
# ([Li and others](https://arxiv.org/abs/2006.15704), figure 2). Backward makes the last layer's gradients
# first, and DDP reduces a full bucket *while* backward goes on. From the second step on a bucket
# closes with the tensor that fills it: by default the first at 1 MiB, others at 25 MiB.
#
# The picture predicts ResNet-50 on eight A100s under AMP (automatic mixed precision). Assumed: backward takes two thirds of
# NVIDIA's published step, each layer its share of the FLOPs, and each GPU has a link of its own at *line rate*, the rate of its standard.
# Hatched is what backward does not hide.

# %%
published = [row for row in table("nvidia_resnet50") if row["gpu"] == "A100-80GB"]
speeds = {name: [float(row[column]) for row in published]  # images a second of one GPU, of eight
          for name, column in (("TF32", "fp32_or_tf32_images_s"), ("AMP", "mixed_images_s"))}
IMAGES, GPUS = 256, 8  # images on each
backward_seconds = 2 / 3 * IMAGES / speeds["AMP"][0]
buckets = sending.buckets_of(partial(resnet, 50, stem="imagenet", num_classes=1000), (1, 3, 224, 224))
show(figures.draw_buckets(buckets, backward_seconds=backward_seconds, ranks=GPUS, title="ResNet-50 on eight A100s, AMP: when DDP's five buckets travel"),
     alt="Backward as a bar in five parts, and a lane for each of three links. On PCIe and on Ethernet 25G four buckets travel while "
     "backward goes on, and only the fifth after it. At half of Ethernet's rate the end of the third and the last two are left.")

# %% [markdown]
# **Read it.** The last layer fills bucket 1 almost at once; bucket 5 is full when backward ends, so it always shows. On a slow
# link buckets queue. Smaller ones (`bucket_cap_mb`) leave earlier, but take more calls.
#
# Does a real DDP send during backward? The small ResNet, with a cap of 0.25 MiB:

# %%
backwards = run_ranks(sending.profile_backwards, 2, data[:BATCH], 0.25)[0]
fastest = min(backwards, key=lambda each: each.until_sent_seconds)  # the least disturbed of nine
assert sum(fastest.bucket_bytes) == 4 * P, "not all gradients"
print(f"rank 0 of two: backward takes {1e3 * fastest.layers_seconds:.0f} ms ({Evidence.MEASURED} on CPU, 1 thread a rank)")
fastest.table()

# %% [markdown]
# **Read it.** It does: the first all-reduces end before backward.
#
# ### Accumulation, and `no_sync`
#
# A batch too large for memory is taken in **micro-batches**, whose gradients add up for one step. DDP sends in *every*
# backward; `no_sync()` keeps it quiet until the last.


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
# The *forward* counts: there DDP decides whether its backward will send.
#
# ## 4. Where the equality ends
#
# Four ranks equal one process only if shares weigh the same and no layer looks at a share as a whole.
#
# ### The last uneven batch
#
# `DistributedSampler` deals items out like cards:

# %% tags=["nbval-check-output"]
for drop_last in (False, True):
    samplers = [DistributedSampler(range(10), 4, rank, shuffle=False, drop_last=drop_last) for rank in range(4)]
    print(f"{'drop_last' if drop_last else 'padded':<10}", *(list(sampler) for sampler in samplers))

# %% [markdown]
# **Read it.** All ranks must take as many steps: one that waits alone in an all-reduce fails, after
# [10 minutes with NCCL and 30 with gloo](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group).
# So the sampler starts over: items 0 and 1 count double. Without
# `sampler.set_epoch(epoch)` each epoch has the first one's order.
#
# **Question.** 1,003 items over 8 ranks, padded: how many items of an epoch are repeats?

# %%
repeated_items = ...
check("04.repeated_items", repeated_items)

# %% [markdown]
# ### A mean over tokens
#
# A language model's loss is a mean over *tokens*, of *all* micro-batches of *all* ranks. `by_tokens` divides the sum of
# losses by the number of those tokens. It multiplies by $N$, since DDP divides by $N$. The two other rules take means of means:

# %%
def mean_of_means(model, mine):
    for text in mine:
        (summed_loss(model, text) / len(text[1]) / len(mine)).backward()

def mean_of_shares(model, mine):  # right within a rank
    sum(summed_loss(model, text) for text in mine).div(sum(len(text[1]) for text in mine)).backward()

def by_tokens(model, mine):
    accumulated_backward(model, mine, summed_loss, lambda text: len(text[1]))

token_errors = errors_of(mean_of_means, mean_of_shares, by_tokens)
print("one linear layer; tokens of each micro-batch, rank 0 and 1:", *TOKENS)
print(*(f"{name:<15} gradient wrong by {error:.0e} of its norm" for name, error in token_errors.items()), sep="\n")
assert token_errors.pop("by_tokens") < 1e-12 < 0.05 < min(token_errors.values()), "tokens should be right, means wrong"

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> transformers fixed this mistake
# <a href="https://github.com/huggingface/transformers/pull/34191">within a process</a> in October 2024, and across devices
# <a href="https://github.com/huggingface/transformers/pull/39395">by default</a> since 4.54.</div>
#
# ### Batch norm looks at its own share
#
# On four ranks batch norm sees a quarter. Below, one process takes whole batches, another the sampler's quarters.


# %%
def quarter_by_quarter(model):
    whole = model.forward

    def forward(images):
        parts = [whole(images[rank::4]) for rank in range(4)]  # every fourth image
        return torch.stack(parts, dim=1).flatten(0, 1)  # back into the batch's order

    model.forward = forward
    return model

BATCH_NORM = partial(NARROW, norm="batch", steps=3)
one_process = run(1, {"whole": partial(BATCH_NORM, unchanged), "quarters": partial(BATCH_NORM, quarter_by_quarter)})
ranks = run_ranks(partial(BATCH_NORM, DistributedDataParallel), 4)
from_whole, from_quarters = (largest_difference(ranks[0].losses, each.losses, 3) for each in one_process.values())
print(f"losses of four ranks, relative: {from_whole:.0e} from whole batches, {from_quarters:.0e} from quarters (fp64)")
print("running statistics after 3 steps, summed, rank 0 to 3:", *(f"{report.buffers:.4f}" for report in ranks))
print(ranks[0].sent)
assert from_quarters < 1e-12 < 1e-3 < from_whole, "four ranks should follow the process that goes by quarters"

# %% [markdown]
# **Read it.** Four ranks follow the quarters. DDP broadcasts *rank 0's* running statistics before each forward, then each
# rank updates its own: evaluate and save rank 0's. Below 16 images a GPU ([Wu and He](https://arxiv.org/abs/1803.08494), figure 1)
# take `SyncBatchNorm`, which normalizes by the whole batch.
#
# ## 5. Is it faster? Scaling efficiency
#
# **Speed-up** is the images a second of $N$ ranks over those of one; **efficiency** is speed-up over $N$. NVIDIA
# published ResNet-50, 256 images a GPU, in TF32 and under AMP. How much of what eight A100s
# lose can bytes explain?
#
# **Question.** Under AMP a step sends `"half"` the bytes of gradients, or the `"same"`? Why?

# %%
payload_under_amp = ...
check("04.bytes_under_amp", payload_under_amp)

# %% tags=["nbval-check-output"]
for name, (lone, eight) in speeds.items():
    print(f"{name:<4} step {1e3 * IMAGES / lone:.0f} ms on one A100, {1e3 * (GPUS * IMAGES / eight - IMAGES / lone):.1f} ms more on eight:",
          f"speed-up {eight / lone:.2f}, efficiency {eight / lone / GPUS:.0%} (published)")
print("published:", source("nvidia_resnet50").partition(" @")[0])

def at_worst(name):  # sending that hides behind nothing
    gradients_bytes = sum(bucket.payload_bytes for bucket in buckets)
    return 2 * (GPUS - 1) / GPUS * gradients_bytes / link(name).link_bytes_per_second

def shows_ms(name, rate):  # by how much AMP's step grows: what is left of sending when backward is over
    spans = sending.timetable(buckets, backward_seconds, GPUS, rate * link(name).link_bytes_per_second)
    return 1e3 * max(0.0, spans[-1][1] - backward_seconds)

links = ("NVLink 3", "PCIe 4 x16", "Ethernet 100G", "Ethernet 25G")
shown = {"all sending, line rate": [f"{1e3 * at_worst(name):.1f}" for name in links]}
for said, rate in {"line rate": 1, "half of it": 0.5, "double of it": 2}.items():
    shown[f"not hidden, {said}"] = [f"{shows_ms(name, rate):.1f}" for name in links]
pd.DataFrame(shown, links).rename_axis(columns="ms a step (predicted, eight A100s, AMP)")

# %% [markdown]
# **Read it.** Inside one machine, on NVLink, all sending takes 0.6 ms even where nothing hides it. Eight
# GPUs lose 9.6 and 19.6 ms: bytes do not explain that. By
# [NVIDIA's settings](https://github.com/NVIDIA/DeepLearningExamples/blob/master/PyTorch/Classification/ConvNets/configs.yml) one
# GPU also takes eight batches for an optimizer step, eight take one each. On a slow link bytes count: at 25 Gbit/s they add 5.4 ms
# to AMP's 104 ms, at half of that rate 45.4 ms.
#
# ### Why is it slow?
#
# Take a step apart, on every rank. In `no_sync` it sends nothing: that is *computing*. What a whole step takes beyond the
# **slowest** rank's computing is *DDP's part*: copies, sending, noise. Below rank 1 sleeps. Which rows show it?

# %%
def seconds_of(part):
    wait = torch.cuda.synchronize if my_device().type == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    part()
    wait()
    return time.perf_counter() - start

def take_apart(slow_seconds):
    model = DistributedDataParallel(small_resnet(width=8).to(my_device()))
    batches = iter(sharded_loader(data, BATCH))
    share, whole = ([part.to(my_device()) for part in batch] for batch in (next(batches), data[:BATCH]))

    def step(batch, quiet):
        with model.no_sync() if quiet else contextlib.nullcontext():
            loss = F.cross_entropy(model(batch[0]), batch[1])
            time.sleep(slow_seconds * dist.get_rank())
            loss.backward()

    return sending.in_turns(seconds_of, {  # a warm-up round, then the fastest of 15
        "loading": lambda: next(batches), "computing": lambda: step(share, True),
        "the whole step": lambda: step(share, False), "computing all 64": lambda: step(whole, True)})


# %%
PLANTED, columns = {"nothing": 0.0, "rank 1 sleeps 0.1 s": 0.1}, {}
for planted in PLANTED:
    parts = run_ranks(take_apart, 2, PLANTED[planted])
    slowest = max(mine["computing"] for mine in parts)
    for rank, mine in enumerate(parts):
        mine |= {"waits for the slowest": slowest - mine["computing"], "DDP's part": mine["the whole step"] - slowest}
        columns[planted, f"rank {rank}"] = {name: format_seconds(s) if s > 0 else "not seen" for name, s in mine.items()}
pd.DataFrame(columns).rename_axis(columns=["planted", str(Evidence.MEASURED)])

# %% [markdown]
# **Read it.** Rank 1's *computing* shows it, and rank 0 waits as long. The rest is mostly noise in so small a model. On your
# GPUs ([lesson 11](../advanced/11_links.ipynb)) look for:
#
# | cause | it shows as | what helps |
# |---|---|---|
# | data loading | *loading* beside *computing* | more `num_workers` |
# | a slow rank | one rank's *computing* stands out | equal shares and hardware |
# | all-reduce | *DDP's part*, near a ring's time | larger shares, `no_sync`, a faster link |
# | small shares | *computing* near *computing all 64* everywhere | larger shares |
#
# ## 6. The scenarios as asked
#
# *"Scale our ResNet from one process to four GPUs: DDP, then DDP with mixed precision. Epoch time and memory before and
# after each step."* Weak scaling, 256 images a GPU. `simulate` runs the code without data, for A100s;
# NCCL's buffers, cuDNN's workspace and the CUDA context come on top. AMP is bf16 here, fp16 at NVIDIA.


# %%
def build(ranks):
    model = resnet(50, stem="imagenet", num_classes=1000)
    parallel = DistributedDataParallel(model) if ranks > 1 else model  # batch norm, as in NVIDIA's run
    return parallel, torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)

def resnet_step(model, optimizer, mixed=False, images=IMAGES):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = F.cross_entropy(model(torch.randn(images, 3, 224, 224)), torch.randint(1000, (images,)))
    loss.backward()
    optimizer.step()


# %% jupyter={"source_hidden": true}
CASES = {"one GPU": (1, "TF32"), "four GPUs, DDP": (4, "TF32"), "four GPUs, DDP + AMP": (4, "AMP")}
asked, peaks_bytes = [], []
for name, (gpus, kind) in CASES.items():
    found = simulate(lambda: build(gpus), lambda m, o: resnet_step(m, o, kind == "AMP"), device="A100 80GB", world=gpus,
                     items=IMAGES, unit="images", name=name)
    payload = sum(t.payload_bytes for t in found.traffic if t.collective == "all-reduce")
    assert payload == (sum(b.payload_bytes for b in buckets) if gpus > 1 else 0), "the all-reduce should carry every gradient once"
    calls = sum(t.calls for t in found.traffic if t.collective == "all-reduce")
    assert calls == (len(buckets) if gpus > 1 else 0), "section 3's picture should have DDP's buckets"
    lone, eight = speeds[kind]
    best = 1_281_167 / lone / gpus / 60  # ImageNet's training images
    minutes = f"{best:.1f} (from published speed)" if gpus == 1 else f"{best:.1f} to {best * 8 * lone / eight:.1f} (predicted)"
    asked.append({"": name, "arithmetic": kind, "peak a GPU (simulated)": format_bytes(found.peak_bytes),
                  "payload a step (simulated)": format_bytes(payload), "minutes an epoch": minutes})
    peaks_bytes.append(found.peak_bytes)
bet = simulate(lambda: build(4), partial(resnet_step, images=IMAGES // 4), device="A100 80GB", world=4, name="the bet")
print(f"The bet: one GPU takes {IMAGES} images, or each of four {IMAGES // 4} under DDP: {format_bytes(bet.peak_bytes)} a GPU,",
      f"{bet.peak_bytes / peaks_bytes[0]:.0%} of one GPU's peak ({Evidence.SIMULATED}, TF32)")
pd.DataFrame(asked).set_index("")

# %% [markdown]
# **Read it.** Four GPUs need little more each than one, and about a quarter of the time. AMP nearly halves the peak. Minutes
# range from no loss to the efficiency of NVIDIA's eight; AMP's hold for channels-last (`--channels-last`). For ResNet-50 the bet's answer is 26%:
# states and buckets are little beside activations.
#
# `train.py` measures *your* GPUs; `--size 224` takes nearly the table's memory. Compare images a second: its epoch is
# CIFAR-10's. Time the loader: it resizes on the CPU.

# %%
here.write_script("train.py", script_text())

# %% jupyter={"source_hidden": true}
with scratch("lesson-04") as folder, contextlib.chdir(folder):  # it saves model.pt where it is started
    printed = run_script(here.root / "build/lesson-04/train.py", 2, "--network", "resnet18", "--epochs", "1", "--fake")
told, loaded = (line.rpartition("accuracy ")[2] for line in printed.splitlines() if "accuracy" in line)
assert told == loaded, "what was saved is not what was judged"
print(f"model.pt, judged by two ranks and by one process that loaded it: the same {told} (one step on generated images)")

# %% [markdown]
# *"Our CNN trains on CIFAR-10. Move it to four GPUs."* Keep batch, rate and schedule. `train.py` then takes
# the same images in each step: batch norm and rounding aside, losses stay.

# %% [markdown]
# ## Recap
#
# - **The same model.** One broadcast, then averaged gradients, where shares weigh the same and nothing looks
#   across the batch.
# - **Memory.** Only activations are divided; [lesson 09](../intermediate/09_sharding.ipynb) divides the states.
# - **Bytes.** Each step reduces every gradient, $4P$ bytes in fp32. A fast link hides that behind backward, a slower one less.
#
# **Test yourself.** Eight GPUs are only three times as fast as one. How do you find out why?
#
# <details><summary>Answer</summary>
#
# Take a step apart as in section 5. Compare DDP's part with a ring's time. If computing hardly fell, shares
# are too small.
#
# </details>
#
# **Where next.** The [lab](../../labs/beginner/04_four_ranks.ipynb) (`make my-labs`), then its
# [solution](../../solutions/beginner/04_four_ranks.ipynb).

# %% [markdown]
# ## On Monday
#
# You have `model`, `dataset`, `batch_size` and `accumulate`. Before the optimizer is made:
#
# ```python
# # batch_size: items of all ranks in one optimizer step. accumulate: the micro-batches that each rank takes for it, 1 or more
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
# Test your loss, a mean over items, on a copy in fp64:
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
# For a mean over tokens take this one, and `accumulate = 1` (for more: lab exercise 4):
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
# Then train, or go on where a run stopped:
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
# Evaluate `model.module` in parts: ranks that wait may reach their time-out. At *Expected
# to have finished reduction*, `TORCH_DISTRIBUTED_DEBUG=DETAIL` names the parameter without a gradient. Use, freeze or drop it;
# `find_unused_parameters=True` comes last: it walks the graph each step.
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
# It averages over all ranks' tokens only where `trainer.model_accepts_loss_kwargs`. Start either with
# `torchrun --nproc-per-node=4 train.py`.
