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
# cost? You write it in ten lines, prove it to the last digits, hand it over to PyTorch's DDP, and see where the equality
# ends.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 45 for the lab | any laptop (Windows: WSL2); several GPUs if you have them; beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# Four processes take a quarter of every batch each. How much memory does *one* of them need at its peak, in percent of
# what one process needs for the whole batch? Write your guess in place of the 25; section 3 measures it.

# %%
my_bet_percent = 25

# %% tags=["setup"]
here = setup("beginner/04")

# %%
import contextlib

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from evidence.validation.tables import source, table
from utils import Evidence, check, compare, draw_holders, draw_lanes, draw_losses, format_bytes, format_seconds
from utils import recorded_table, resnet, run_ranks, run_torchrun, score, scoreboard, scratch, show, simulate
from utils import small_resnet, traffic
from utils.catalog import device as gpu
from utils.lessons.lesson_04 import sending
from utils.lessons.lesson_04.data_parallel import accumulated_backward
from utils.lessons.lesson_04.machine import is_fast, low_dtype, my_device, where
from utils.lessons.lesson_04.sharding import sharded_loader
from utils.lessons.lesson_04.token_means import TOKENS, error_of, summed_loss
from utils.lessons.lesson_04.training import largest_difference, observe, pictures, script_text, smooth, table_of

# %% [markdown]
# ## 1. Data parallelism by hand
#
# A [**rank**](../00_glossary.ipynb) is one process of a group; the **world size** is how many there are. Each holds a
# **replica**, a whole copy of the model, and takes its own share of every batch.

# %%
figure = draw_holders({"data parallel": ()}, sends={"data parallel": "sends all gradients"},
                      parameter_bytes=(4, 4, 4), title="Who holds what (fp32, SGD with momentum)")
show(figure, alt="Four boxes, one a rank, each filled whole with parameters, gradients and optimizer state.")

# %% [markdown]
# Nothing is split but the batch: states save no memory ([lesson 09](../intermediate/09_sharding.ipynb) shards them).
# Ranks meet in **collectives**, operations that all of them call. `run_ranks` runs a function in real processes. *gloo*
# carries the data between CPUs, *NCCL* between NVIDIA GPUs.


# %% tags=["nbval-check-output"]
def meet():
    number = torch.tensor([10.0 * dist.get_rank()], device=my_device())
    before = number.item()
    dist.all_reduce(number)  # everyone gets the sum
    return f"rank {dist.get_rank()} of {dist.get_world_size()}: {before:.0f} became {number.item():.0f}"


print(*run_ranks(meet, 4), sep="\n")

# %% [markdown]
# Training needs two collectives: a *broadcast* (everyone gets what rank 0 has) and this *all-reduce*. Three rules:
#
# 1. Replicas start equal: rank 0 broadcasts its parameters and buffers.
# 2. After backward the gradients are summed over the ranks,
# 3. and divided by the world size, since each rank's loss is a mean over its share.
#
# The mean of equal shares' means is the mean of the batch, so the gradients are those of one process.


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
# The rest is a plain training loop: a small ResNet with *group norm* (section 4 says why), on CIFAR-10 at half its size,
# or on generated images where there is no network.

# %%
data, held_out, origin = pictures(2048, 512)
print(f"images: {origin}")
BATCH = 64  # of all ranks together
STEPS = {"tiny": 96, "small": 512, "full": 1024}[here.scale]
LOW = low_dtype()  # bf16, or fp16 where a GPU has no bf16


def train(wrap, after_backward=None, *, steps=8, dtype=torch.float32, autocast=False, norm="group", width=32):
    torch.manual_seed(dist.get_rank())  # replicas would start unequal: rule 1 has to mend it
    with traffic() as at_start:
        model = wrap(small_resnet(norm, width=width).to(my_device(), dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    loader = sharded_loader(data, BATCH, drop_last=True)  # this rank's share; section 4 opens it
    step = make_step(model, optimizer, after_backward, autocast)
    return observe(model, optimizer, step, loader, held_out, steps=steps, dtype=dtype, at_start=at_start)


# %%
def make_step(model, optimizer, after_backward, autocast):
    kind = my_device().type
    scaler = torch.amp.GradScaler(kind, enabled=autocast and LOW is torch.float16)

    def step(images, labels):
        optimizer.zero_grad()
        with torch.autocast(kind, LOW, enabled=autocast):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        if after_backward:
            after_backward(model)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


# %% [markdown]
# `observe` takes the steps and reports losses, accuracy, peak and **payload**, the bytes a rank puts into collectives.


# %%
def unchanged(model):
    return model


def run(ranks, *how, **settings):
    return run_ranks(lambda: train(*how, **settings), ranks, timeout_seconds=400)


ways = {"one process": run(1, unchanged, steps=STEPS), "four ranks, by hand": run(4, share_start, average_gradients)}
one, hand = (reports[0] for reports in ways.values())
P = sum(parameter.numel() for parameter in small_resnet().parameters())
print(f"{P:,} parameters, gradients of 4 P = {4 * P:,} bytes")
print("at the start:", hand.at_start, "\nin a step:   ", hand.sent)
assert hand.sent.payload_bytes == hand.at_start.payload_bytes == 4 * P, "not every gradient once"

# %% [markdown]
# **Read it.** Each rank puts in exactly $4P$ bytes a step: every gradient once. What crosses a link depends on the
# algorithm. A *ring* of $N$ ranks cuts $B$ bytes into $N$ shares. In $N-1$ hops each share goes round and is added up;
# in $N-1$ more its sum goes round. In each hop a rank sends one share, $B/N$ bytes:
#
# $$2 \, (N-1) \, \frac{B}{N} \ \text{bytes on each link}$$
#
# **Question.** One million parameters in fp32: how many MB does each of *eight* ranks send in a ring, per step?

# %%
sent_by_each_of_eight_mb = ...
check("04.ring_of_eight", sent_by_each_of_eight_mb)

# %% [markdown]
# ## 2. Is it right? A proof, and four faults
#
# **Predict.** Each fault below breaks one rule: nothing is broadcast; nobody divides; nobody reduces; one tensor of 29
# is forgotten. Which would the *first* loss betray, and which the losses of eight steps? (fp64: two ranks, a narrow copy.)


# %%
def sum_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def forget_one(model):
    average_gradients(nn.ParameterList(list(model.parameters())[1:]))


RULES = {"right": (share_start, average_gradients), "not broadcast": (unchanged, average_gradients),
         "not divided": (share_start, sum_gradients), "not reduced": (share_start, None),
         "one tensor forgotten": (share_start, forget_one)}


# %%
def apart(losses, reference):
    return [f"{largest_difference(losses, reference, steps):.1e}" for steps in (1, 8)]


exact = run(1, unchanged, dtype=torch.float64, width=8)[0].losses
found = {(name, "fp64"): apart(run(2, *rule, dtype=torch.float64, width=8)[0].losses, exact) for name, rule in RULES.items()}
found["right", "fp32, four ranks"] = apart(hand.losses, one.losses)
errors = {name: float(row[1]) for (name, dtype), row in found.items() if dtype == "fp64"}
assert errors.pop("right") < 1e-13 < 1e-4 < min(errors.values()), "fp64 should tell right from wrong"
pd.DataFrame(found, index=["loss 1", "losses 1 to 8"]).T.rename_axis(columns="difference (measured)")

# %% [markdown]
# **Read it.** The first loss is taken before any update: it judges the start and the data alone, and three of four faults
# pass it. After eight steps every fault shows. In fp32 the right code differs too: its sums run in another order. In
# fp64 only the last digits are left, so `.double()` on a small model, over several steps, is the proof. *Not divided*
# multiplies the learning rate by the number of ranks.
#
# ## 3. The real one: DDP, and DDP with mixed precision
#
# `DistributedDataParallel` keeps the same rules. It hooks into backward and gathers gradients into **buckets**, flat
# tensors that it reduces in one call each.
#
# **Predict.** Under autocast (AMP, automatic mixed precision), does a step send fewer bytes?

# %%
ways["four ranks, DDP"] = run(4, DistributedDataParallel, steps=STEPS)
# Where 16 bits are emulated, mixed precision is many times slower: one step will do.
ways["four ranks, DDP + AMP"] = run(4, DistributedDataParallel, steps=8 if is_fast() else 1, autocast=True)
ddp = ways["four ranks, DDP"][0]
assert largest_difference(ddp.losses, one.losses) < 1e-3, "more than rounding: is a rule missing?"
share = 100 * ddp.peak_bytes / one.peak_bytes
print(f"peak of a DDP rank: {share:.0f}% of one process's; your bet was {my_bet_percent}%")
print(f"{Evidence.MEASURED} on {where()}; {LOW} computed without emulation: {is_fast()}")
table_of(ways)

# %% [markdown]
# **Read it.** Activations shrink to a quarter, but every rank keeps all parameters, gradients and optimizer state, and
# DDP adds its buckets, one more copy of the gradients (`gradient_as_bucket_view=True` saves it). Where states fill the
# memory, DDP saves nothing.

# %% jupyter={"source_hidden": true}
curves = {name: smooth(ways[name][0].losses) for name in ("one process", "four ranks, DDP")}
figure = draw_losses(curves, device=where(), title=f"{STEPS} steps, each point the mean of 16")
show(figure, alt="Two loss curves that fall together over the steps, one process and four ranks with DDP.")
(start, end), (_, end_ddp) = ((curve[0], curve[-1]) for curve in curves.values())
print(f"one process: {start:.2f} to {end:.2f}; four ranks end at {end_ddp:.2f}")
assert end < start - 0.1 and abs(end - end_ddp) < 0.25 * (start - end), "they should learn, and alike"

# %% [markdown]
# **Question.** DDP + AMP: did the payload of a step become `"half"`, or was it the `"same"`? Why?

# %%
payload_under_amp = ...
check("04.bytes_under_amp", payload_under_amp)

# %% [markdown]
# ### Buckets, and overlap
#
# By hand took 29 calls a step, DDP two, for the same payload. What does a call cost?

# %%
for calls, flat in ((29, False), (1, True)):
    seconds = max(run_ranks(sending.reducing_seconds, 2, flat))
    print(f"all gradients in {calls:>2} calls, two ranks: {format_seconds(seconds)} ({Evidence.MEASURED})")

# %% [markdown]
# Each call costs a start of its own. Why not one call, then? Backward makes the last layer's gradients first, and DDP
# reduces a full bucket *while* backward goes on. It closes a bucket once it has reached its cap, by default 1 MiB for
# the first and 25 MiB for the others. With `DistributedDataParallel(model,
# bucket_cap_mb=0.25)`, recorded by `torch.profiler`:

# %%
recorded = run_ranks(sending.profile_backwards, 2, data[:BATCH], 0.25)[0]
middle = recorded[len(recorded) // 2]
assert sum(middle.bucket_bytes) == 4 * P, "not all gradients"
figure = draw_lanes(middle.lanes, title="One backward of DDP on rank 0", device="CPU, 1 thread a rank")
show(figure, alt="Backward's operations in the first lane, and below it one lane per bucket: the first "
     "all-reduces begin before backward has ended, the last one with its last gradient.")
print(f"hidden behind layers, of the time of all-reduces: {middle.hidden_share:.0%} in the median backward,",
      f"{recorded[0].hidden_share:.0%} to {recorded[-1].hidden_share:.0%} in {len(recorded)} ({Evidence.MEASURED})")

# %% [markdown]
# **Read it.** The first buckets leave while backward has layers left to hide them; the last one leaves when nothing is
# left. Here ranks and gloo share cores, so how much is hidden changes from step to step. Large buckets need fewer calls,
# small ones start earlier: the choice behind `bucket_cap_mb`.
#
# ## 4. Where the equality ends
#
# A mean of means is the mean of all only if all shares weigh the same, and no layer looks at the share as a whole. Three
# places break it.
#
# ### The last uneven batch
#
# A `DistributedSampler` deals items out like cards. Ten items over four ranks:

# %% tags=["nbval-check-output"]
for drop_last in (False, True):
    samplers = [DistributedSampler(range(10), 4, rank, shuffle=False, drop_last=drop_last) for rank in range(4)]
    print(f"{'drop_last' if drop_last else 'padded':<10}", *(list(sampler) for sampler in samplers))

# %% [markdown]
# **Read it.** All ranks must take as many steps, or one waits for ever in an all-reduce. So the sampler starts over, and
# items 0 and 1 count double; with `drop_last` it leaves items out. For training either will do; an *evaluation* on a
# padded set is slightly wrong.
#
# **Question.** 1,003 items over 8 ranks, padded: how many items of an epoch are repeats?

# %%
repeated_items = ...
check("04.repeated_items", repeated_items)

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> Without <code>sampler.set_epoch(epoch)</code> each epoch has the first
# one's order, and nothing fails.
# <a href="https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler">PyTorch's
# page</a> warns of it.</div>
#
# ### Accumulation, and `no_sync`
#
# A batch too large for the memory is taken in **micro-batches**: backward adds their gradients up, then comes one
# optimizer step. DDP would all-reduce in *every* backward. `no_sync()` keeps it quiet until the last.


# %% tags=["nbval-check-output"]
def payload_of_four_parts(quiet):
    model = DistributedDataParallel(small_resnet().to(my_device()))
    images, labels = (part.to(my_device()) for part in data[:16])
    with traffic() as sent:
        for number in range(4):
            part = slice(4 * number, 4 * number + 4)
            with model.no_sync() if quiet and number < 3 else contextlib.nullcontext():
                (F.cross_entropy(model(images[part]), labels[part]) / 4).backward()
    return sum(row.payload_bytes for row in sent.rows if row.collective == "all-reduce")


for quiet in (False, True):
    payload_bytes = run_ranks(payload_of_four_parts, 2, quiet)[0]
    print(f"no_sync: {quiet!s:<6} {payload_bytes:>9,} bytes a step, {payload_bytes / (4 * P):.0f} x 4 P")

# %% [markdown]
# A language model's loss is a mean over *tokens*, of which micro-batches hold unequal numbers. The right divisor is the
# tokens of *all* micro-batches of *all* ranks:
#
# $$\text{loss} = \frac{\sum_{\text{ranks}} \sum_{\text{micro-batches}} \sum_{\text{tokens}} \ell}{\sum_{\text{ranks}} \sum_{\text{micro-batches}} \text{tokens}}$$
#
# DDP divides by the number of ranks $N$, so each rank multiplies by $N$ first. The gradient's error under two wrong
# rules and the right one:


# %%
def mean_of_means(model, mine):
    for text in mine:
        (summed_loss(model, text) / len(text[1]) / len(mine)).backward()


def mean_of_shares(model, mine):  # right within a rank, and 14 tokens beside 6
    sum(summed_loss(model, text) for text in mine).div(sum(TOKENS[dist.get_rank()])).backward()


def by_tokens(model, mine):
    accumulated_backward(model, mine, summed_loss, lambda text: len(text[1]))


token_errors = {rule.__name__: error_of(rule) for rule in (mean_of_means, mean_of_shares, by_tokens)}
print(*(f"{name:<15} {error:.1e} ({Evidence.MEASURED})" for name, error in token_errors.items()), sep="\n")
assert token_errors.pop("by_tokens") < 1e-12 < 0.05 < min(token_errors.values()), "tokens should be right, means wrong"

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> This very mistake stood in popular trainers. In October 2024
# transformers <a href="https://github.com/huggingface/transformers/pull/34191">fixed it</a> within a process, and then
# <a href="https://github.com/huggingface/transformers/pull/34373">across devices</a>.</div>
#
# ### Batch norm looks at its own share
#
# Batch norm normalizes by the statistics of the batch that it sees: on four ranks, a quarter. The third run is one
# process that goes by quarters.


# %%
def quarter_by_quarter(model):
    whole = model.forward

    def forward(images):
        parts = [whole(images[rank::4]) for rank in range(4)]  # dealt out as to ranks
        return torch.stack(parts, dim=1).flatten(0, 1)

    model.forward = forward
    return model


whole_batch, four_ranks, quarters = (
    run(ranks, wrap, norm="batch")[0]
    for ranks, wrap in ((1, unchanged), (4, DistributedDataParallel), (1, quarter_by_quarter)))
from_whole, from_quarters = (largest_difference(four_ranks.losses, other.losses) for other in (whole_batch, quarters))
print(f"losses of four ranks, from whole batches: {from_whole:.1e}; from one process by quarters: {from_quarters:.1e}")
print(four_ranks.sent)
assert 10 * from_quarters < from_whole, "four ranks should follow the process that goes by quarters"

# %% [markdown]
# **Read it.** Four ranks follow the process that goes by quarters: DDP is right, and batch norm is another function when
# the share is smaller. The broadcasts are its running statistics. `torch.nn.SyncBatchNorm` computes statistics over all
# ranks and needs GPUs. Group norm and layer norm never look across the batch.
#
# ## 5. Is it faster? Scaling efficiency
#
# **Speed-up** is the images a second of $N$ ranks over those of one; **efficiency** is the speed-up divided by $N$. Predict
# it for ResNet-50 in mixed precision, 256 images a GPU, from the published speed of one A100. At worst the
# all-reduce hides behind nothing.

# %% tags=["nbval-check-output"]
rows = table("nvidia_resnet50")
speed = {row["n_gpus"]: float(row["mixed_images_s"]) for row in rows if row["gpu"] == "A100-80GB"}
images, gradients = 1_281_167, 4 * 25_557_032  # ImageNet's training set; ResNet-50's parameters


def at_worst(gpus, images_per_second, batch=256):
    ring_bytes = 2 * (gpus - 1) / gpus * gradients
    sending = ring_bytes / gpu("A100 80GB").peer_link.link_bytes_per_second
    computing = batch / images_per_second
    return sending, computing, gpus * computing / (computing + sending)


for gpus in (4, 8):
    sent_seconds, computing, speedup = at_worst(gpus, speed["1"])
    print(f"{gpus} A100: step {1e3 * computing:.0f} ms, sending {1e3 * sent_seconds:.2f} ms, speed-up {speedup:.2f} (predicted)")
print(f"8 A100: speed-up {speed['8'] / speed['1']:.2f} (published:", source("nvidia_resnet50").partition(" @")[0] + ")")

# %% [markdown]
# **Read it.** At NVLink's full rate the link takes less than a percent, even unhidden. The published speed-up is lower, so
# the rest is lost elsewhere.
#
# ### Why is it slow?
#
# Take the step apart. A backward in `no_sync` computes and sends nothing.


# %%
def take_apart():
    model = DistributedDataParallel(small_resnet().to(my_device()))
    loader = sharded_loader(data, BATCH)
    share, whole = ([part.to(my_device()) for part in batch] for batch in (next(iter(loader)), data[:BATCH]))

    def step(batch, quiet):
        with model.no_sync() if quiet else contextlib.nullcontext():
            F.cross_entropy(model(batch[0]), batch[1]).backward()

    return sending.in_turns({
        "loading": lambda: next(iter(loader)), "computing": lambda: step(share, True),
        "with sending": lambda: step(share, False), "computing the whole batch": lambda: step(whole, True)})


for rank, parts in enumerate(run_ranks(take_apart, 2)):
    print(f"rank {rank}:", ", ".join(f"{name} {format_seconds(s)}" for name, s in parts.items()))

# %% [markdown]
# **Read it.** Four causes show so:
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
# ## 6. The scenarios as asked
#
# *"Scale our ResNet from one process to four GPUs: DDP, then DDP with mixed precision. Epoch time and memory before and
# after each step."* ResNet-50 on images of 224 x 224, 64 a GPU, on four *simulated* A100: `simulate` runs the
# model's own code, DDP's buckets included, without data.


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
runs = {name: simulate(lambda: build(ranks), lambda m, o: resnet_step(m, o, mixed), device="A100 80GB", world=ranks,
                       items=64, unit="images", name=f"ResNet-50, {name}")
        for name, (ranks, mixed) in CASES.items()}
compare(list(runs.values()), title="ResNet-50, 64 images of 224 x 224 a GPU")

# %% [markdown]
# Speeds of one GPU are published, for 256 images; those of four follow as in section 5, with nothing hidden.

# %% jupyter={"source_hidden": true}
payload = sum(t.payload_bytes for t in runs["four GPUs, DDP + AMP"].traffic if t.collective == "all-reduce")
assert payload == gradients, "the all-reduce should carry every gradient once"
alone = {mixed: float(rows[0][name]) for mixed, name in ((False, "fp32_or_tf32_images_s"), (True, "mixed_images_s"))}
asked = []
for name, (gpus, mixed) in CASES.items():
    speedup = at_worst(gpus, alone[mixed])[2]
    asked.append({"": name, "peak a GPU (simulated)": format_bytes(runs[name].peak_bytes),
                  "payload a step (simulated)": format_bytes(payload if gpus > 1 else 0),
                  "images/s (four: predicted)": f"{alone[mixed] * speedup:,.0f}",
                  "epoch, minutes": f"{images / alone[mixed] / speedup / 60:.1f}"})
display(pd.DataFrame(asked).set_index(""))
for experiment, chosen in [("resnet50", {"image_size": 224}), ("gloo_ranks", {})]:
    display(recorded_table(experiment, where=chosen))

# %% [markdown]
# **Read it.** DDP buys time and costs memory: the peak *rises* by its buckets, since each GPU has 64 images of its own.
# Mixed precision nearly halves the activations; the payload stays, since gradients are fp32. Not shown: loading and
# waiting. This script does it with torchvision's ResNet, and prints an epoch's seconds and the peak:

# %%
here.write_script("train.py", script_text())

# %%
with scratch("lesson-04") as folder, contextlib.chdir(folder):  # it saves model.pt where it is started
    printed = run_torchrun(here.root / "build/lesson-04/train.py", 2, "resnet18", 1, "fake")
assert "accuracy" in printed, "the script should end with an epoch"

# %% [markdown]
# `torchrun` starts a script once per rank and tells each, through environment variables, who it is. On several machines
# `--nnodes` says how many, `--rdzv-endpoint` where they meet.
#
# <div class="alert alert-warning"><b>Trap.</b> That endpoint listens on every address, asks for no password, and runs
# what it is sent (<a href="https://github.com/pytorch/pytorch/blob/main/SECURITY.md#using-distributed-features">PyTorch
# says so</a>). A cluster needs a network closed to all others.</div>
#
# *"Our CNN trains on CIFAR-10. Move it to four GPUs."*

# %%
for name in ("one process", "four ranks, DDP"):
    first = ways[name][0]
    print(f"{name:<16} {STEPS} steps of {BATCH} images, rate 0.03: {first.right:.0%} of 512 unseen images right,",
          f"step {format_seconds(first.step_seconds)} ({Evidence.MEASURED})")
assert abs(one.right - ddp.right) < 0.1, "ranks should not cost accuracy"

# %% jupyter={"source_hidden": true}
score("04", "small ResNet, 4 DDP ranks (one rank)", peak_bytes=ddp.peak_bytes, step_seconds=ddp.step_seconds)
for simulated in runs.values():
    score("04", simulated)
scoreboard("04")

# %% [markdown]
# **Read it.** At an equal *global* batch rate and schedule stay, and so does accuracy, but for a few images. What may
# limit the speed-up of so small a network is its share, 16 images a GPU: section 5's last row tells. With 64 images *a
# GPU* the batch is 256: [lesson 02](02_mixed_precision.ipynb) says what the rate does then.
#
# ## Recap
#
# - A broadcast at the start and an averaged all-reduce per step make four processes one: $4P$ bytes of payload in fp32.
# - They equal one process where shares weigh the same and nothing looks across the batch; fp64 over steps proves it.
# - Weigh by tokens, send once (`no_sync`), and take the step apart when it is slow.
# - States are not divided: [lesson 09](../intermediate/09_sharding.ipynb). A model cut over devices is
#   [lesson 13](../advanced/13_pipelines.ipynb)'s.
#
# **Test yourself.** Eight GPUs are only three times as fast as one. How do you find out why?
#
# <details><summary>Answer</summary>
#
# Take the step apart. Time the loader alone. Time a step inside <code>no_sync</code>: what the full step takes
# longer is communication that backward does not hide; compare it with ring bytes divided by the link's speed. Compare
# ranks: a slow one holds all others up. Last, ask whether a rank's share is too small to keep a GPU busy.
#
# </details>
#
# **Where next.** The [lab](../../labs/beginner/04_four_ranks.ipynb), in a copy (`make my-labs`), then its
# [solution](../../solutions/beginner/04_four_ranks.ipynb). **References.** Li and others 2020, *PyTorch Distributed*,
# [arXiv:2006.15704](https://arxiv.org/abs/2006.15704). Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms*
# (the ring). PyTorch, [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).

# %% [markdown]
# ## On Monday
#
# You have a script with `model`, `dataset` and `batch_size`. Before the optimizer is made:
#
# ```python
# import os
# import torch
# import torch.distributed as dist
# from torch.nn.parallel import DistributedDataParallel
# from torch.utils.data import DataLoader, DistributedSampler
#
# dist.init_process_group()  # NCCL between GPUs, gloo between CPUs
# if torch.cuda.is_available():
#     torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
#     model.cuda()
# model = DistributedDataParallel(model)
# sampler = DistributedSampler(dataset)  # and sampler.set_epoch(epoch) in each epoch
# loader = DataLoader(dataset, batch_size // dist.get_world_size(), sampler=sampler)
# ```
#
# With transformers' `Trainer` no line of the model changes; keep the global batch:
#
# ```python
# import os
# from transformers import Trainer, TrainingArguments
#
# ranks = int(os.environ["WORLD_SIZE"])
# arguments = TrainingArguments("out", num_train_epochs=1, logging_steps=1, average_tokens_across_devices=True,
#                               per_device_train_batch_size=batch_size // ranks)
# trainer = Trainer(model, arguments, train_dataset=dataset)
# trainer.train()
# ```
#
# Start either with `torchrun --nproc-per-node=4 train.py`. Then look at two things: the first losses, averaged over the
# ranks, are those of one process with the same order of items, and `nvidia-smi` shows a busy process on each GPU.
