# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 Links and collectives
#
# {{badges}}
#
# **The question.** Eight nodes are only three times as fast as one. Why?
#
# **Promise.** You follow a ring all-reduce message by message, predict what messages cost, hide sending behind computing, and
# find four faults of a simulated job on eight nodes.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (Linux, macOS, WSL2) | under a minute of computing on two CPU cores |

# %% tags=["setup"]
here = setup("advanced/11")

# %% jupyter={"source_hidden": true}
import itertools
import math
import queue
import threading
import time
from dataclasses import replace

import pandas as pd
import torch
import torch.distributed as dist

from utils import GB, MIB, RankError, check, fit_alpha_beta, format_bytes, run_ranks, show, traffic
from utils.catalog import link
from utils.labs.slow_jobs import INFINIBAND, TCP, SlowJob, lesson_job
from utils.ranks.namespaces import bytes_sent_here
from utils.traffic.cost import overlapped_seconds
from utils.views.lanes import Span
from utils.lessons.lesson_11 import algorithms, host_figure, rails, ring_parts
from utils.lessons.lesson_11.buckets import draw_buckets, sweep
from utils.lessons.lesson_11.counted import beside_gloo
from utils.lessons.lesson_11.hosts import run_hosts
from utils.lessons.lesson_11.link_costs import draw_link_costs
from utils.lessons.lesson_11.step_lanes import cure_lanes, draw_steps, step_lanes
from utils.lessons.lesson_11.wire import Wire, messages

# %% [markdown]
# ## A bet
#
# A simulated job: 1.3 billion parameters, 2.6 GB of gradients, eight GPUs and eight network ports of 200 Gb/s a node. Eight
# nodes should take eight times the data in the time of one healthy node with the same script. Count a node's black
# strips: in each it sends all gradients.

# %%
job = lesson_job()


def alone_seconds(job):
    return SlowJob(nodes=1, load_seconds=job.load_seconds).step().step_seconds  # one healthy node, the same script


def times_as_fast(job):
    return 8 * alone_seconds(job) / job.step().step_seconds


show(draw_steps(step_lanes(job), [job] * job.nodes, title=f"A step: one node {alone_seconds(job):.2f} s, eight "
                f"{job.step().step_seconds:.2f} s: {times_as_fast(job):.1f} times as fast"),
     alt="Eight lanes, one a node: loading, then three times forward, backward and a long all-reduce. Node 5 computes "
     "longer in each pass, and the others wait for it. A strip below each lane: the network sends from early in backward on.")

# %% [markdown]
# Each node takes its batch in three passes (micro-batches). In each, seven nodes wait for node 5's backward. Replace node 5,
# and cure nothing else: how many times as fast as one node are the eight then?

# %%
my_bet_times_as_fast = ...

# %% [markdown]
# ## 1. A ring by hand
#
# Every rank sends to the right and receives from the left. Cut the tensor into $N$ parts. In each of $N - 1$ steps a rank
# passes on a part, and adds its own numbers to the one that comes in. Then part $r$ is complete on rank $r$: a
# **reduce-scatter**. In $N - 1$ more steps the complete parts go round: an **all-gather**. Together they are an
# **all-reduce** ([Patarasuk and Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002);
# [glossary](../00_glossary.ipynb)).
#
# `wire.exchange` is `dist.isend` to the right, `dist.recv` from the left, then `wait`: if all first waited to receive, nobody
# would send. A `Wire` notes what it sends. In the picture follow part 0 from rank 2 to rank 0.

# %%
def ring_all_reduce(wire, tensor):
    n, rank = wire.size, wire.rank
    parts, right, left = list(tensor.tensor_split(n)), (rank + 1) % n, (rank - 1) % n
    for step in range(1, n):  # reduce-scatter
        out, into = (rank - step) % n, (rank - step - 1) % n
        parts[into] += wire.exchange(parts[out], right, left, like=parts[into])
    for step in range(n - 1):  # all-gather
        out, into = (rank - step) % n, (rank - step - 1) % n
        parts[into].copy_(wire.exchange(parts[out], right, left, like=parts[into]))
    return tensor


# %%
def by_hand(reduce, numbers=512):
    torch.manual_seed(dist.get_rank())
    ours = torch.randn(numbers, dtype=torch.float64)
    gloos = ours.clone()
    dist.all_reduce(gloos)
    wire = Wire()
    with traffic() as sent:
        reduce(wire, ours)
    apart = ((ours - gloos).abs().max() / gloos.abs().max()).item()
    return wire.moves, apart, sum(row.payload_bytes for row in sent.rows if row.collective == "send")


N, B = 4, 512 * 8
ring = run_ranks(by_hand, N, ring_all_reduce)
hops = messages([moves for moves, _, _ in ring])
show(ring_parts.draw_ring_parts(hops, title="Ring all-reduce of 4 ranks: who holds what, replayed from the counted messages"),
     alt="Four ranks in a circle, then seven grids of ranks and parts. Each step adds one rank's numbers to one part of "
     "every rank; after three steps each rank has one complete part, after six all four.")

# %% tags=["nbval-check-output"]
for rank, (_, apart, sent_bytes) in enumerate(ring):
    assert apart < 1e-12, f"rank {rank} is {apart} from gloo: does every part pass every rank once?"
    assert sent_bytes == 2 * (N - 1) * B // N, f"rank {rank} sent {sent_bytes} bytes"
assert {(m.target - m.source) % N for m in hops} == {1}, "somebody sent past its neighbour"
print(f"{len(hops)} messages in {hops[-1].step} steps, every one to the right neighbour")
print(f"each rank sent 2 (N - 1) / N x B = {ring[0][2]:,} bytes, B = {B:,} (counted); gloo's result to 1e-12")

# %% [markdown]
# **Read it.** A rank sends $2(N-1)/N \cdot B$ bytes, less than $2B$ *however many ranks there are*. The price is
# $2(N - 1)$ steps.
#
# **Trap.** A right result proves no ring: the whole tensor may go round
# ([ARENA 3.0, 407](https://github.com/callummcdougall/ARENA_3.0/pull/407)). The cell above asserts bytes, too.
#
# **Question.** 64 ranks, 1 GB of gradients. How many GB does each rank send?

# %%
ring_of_64_gb = ...
check("11.ring_of_64", ring_of_64_gb)

# %% [markdown]
# ### Trees, and the rest
#
# In each step of a **binomial tree** half of the remaining ranks send their whole tensor to a partner, which adds it, until
# rank 0 has the sum. It comes down the same way: $2 \log_2 N$ steps. In an **all-to-all**, part $i$ of everyone's tensor goes
# to rank $i$. gloo, PyTorch's library for CPUs, gives the result to compare.

# %% tags=["nbval-check-output"]
RANKS = 8
kinds = run_ranks(beside_gloo, RANKS)
FORMULAS = {"all-gather": (RANKS - 1, (RANKS - 1) * B // RANKS), "reduce-scatter": (RANKS - 1, (RANKS - 1) * B // RANKS),
            "all-to-all": (RANKS - 1, (RANKS - 1) * B // RANKS), "all-reduce, tree": (2 * int(math.log2(RANKS)), 3 * B)}
print(f"{'8 ranks':18}{'steps':>6} {'formula':>8} {'most bytes sent':>16} {'formula':>9}  equals gloo's")
for name, (steps, most) in FORMULAS.items():
    sends = messages([kind[name].moves for kind in kinds])
    sent = max(sum(m.bytes for m in sends if m.source == rank) for rank in range(RANKS))
    apart = max(kind[name].apart for kind in kinds)
    print(f"{name:18}{sends[-1].step:>6} {steps:>8} {sent:>16,} {most:>9,}  {'to the bit' if apart == 0 else 'to 1e-12'}")
    assert (sends[-1].step, sent) == (steps, most) and apart < 1e-12, f"{name}: another algorithm than the formula's"

# %% [markdown]
# **Read it.** All-gather and reduce-scatter are the halves of a ring all-reduce: 14 steps, 7,168 bytes. The tree takes 6
# steps, but its root sends $B \log_2 N$ bytes. NCCL, NVIDIA's library, has rings and trees of its own.
#
# ### Break it: a collective in another order
#
# Rank 1 gathers first; the others reduce first.

# %%
def in_another_order():
    x, whole = torch.ones(4), torch.empty(4 * dist.get_world_size())
    calls = [lambda: dist.all_reduce(x), lambda: dist.all_gather_into_tensor(whole, x)]
    for call in calls if dist.get_rank() != 1 else reversed(calls):
        call()


try:
    run_ranks(in_another_order, 3, timeout_seconds=3)
except RankError as error:
    print(next(part for part in str(error).split("\n\n") if "collectives" in part))

# %% [markdown]
# The message is the course's own. With NCCL such a job can hang until PyTorch's timeout, or go on with wrong numbers.
# `TORCH_DISTRIBUTED_DEBUG=DETAIL` makes PyTorch compare the calls first. [Lesson 16a](16a_when_a_run_breaks.ipynb) reads
# PyTorch's *flight recorder* of a timeout.
#
# ## 2. What a message costs
#
# Steps and bytes become seconds in the **alpha-beta model**: a message of $n$ bytes takes $\alpha + n\beta$, a start and a
# time for each byte. A point is half of a round trip, the fastest of sixty. Look where the line bends.

# %%
SIZES = [2**power for power in range(12, 25, 2)]  # 4 KiB to 16 MiB


def ping(wire, other, sizes, repeats=60):
    seconds, tensors = {size: [] for size in sizes}, {size: torch.ones(size // 4) for size in sizes}
    for size in sizes * repeats:  # in turn, so that no disturbance meets one size alone
        x, start = tensors[size], time.perf_counter()
        if wire.rank == 0:
            wire.send(x, other)
            wire.receive(x, other)
        elif wire.rank == other:
            wire.send(wire.receive(x, 0), 0)
        seconds[size].append((time.perf_counter() - start) / 2)
    return [(size, min(each)) for size, each in seconds.items()]


points = run_ranks(lambda: ping(Wire(), 1, SIZES), 2)[0]
mine = fit_alpha_beta(*zip(*points, strict=True))
show(draw_link_costs({"two ranks": points}, {"two ranks": mine}, title="One message between two ranks of this machine (gloo)"),
     alt="Time over message size, both logarithmic: points that are nearly flat at first, then rise, and the line fitted to "
     "them. A dotted line: start and bytes cost the same.")

# %% [markdown]
# **Read it.** At the dotted line, $\alpha / \beta$ bytes, the bytes cost as much as the start. Left of it a message is
# **latency-bound**: half its bytes save at most a quarter of its time. Right of it, it is **bandwidth-bound**.
#
# A ring costs $2(N-1)\alpha + 2\frac{N-1}{N} B\beta$, a tree $2 \log_2 N\,(\alpha + B\beta)$. In the
# drawing each port of a node has a ring for its part of the tensor. Follow ring 0: in by port 0, through all GPUs,
# and from GPU 7 through GPU 0 out by port 0 (*PXN*, [nccl 2193](https://github.com/NVIDIA/nccl/issues/2193)).

# %%
show(rails.draw_rails(link("NVLink 4").link_bytes_per_second, link("InfiniBand NDR").link_bytes_per_second),
     alt="Two nodes. In each an NVSwitch joins eight GPUs, and each GPU has a network port. Ring 0 comes in by port 0, goes from "
     "GPU to GPU, through the NVSwitch back to GPU 0, and leaves by port 0. Rings 1 to 7 are dotted.")

# %%
# Seconds before a ring's bytes, by protocol "Simple" on Intel hosts: NCCL 2.30 of June 2026, src/graph/tuning.cc, 5067397c.
BASE, NVLINK_START, NETWORK_START = 8.4e-6, 3.4e-6, 14e-6  # the card's own latency is left out


def ring_seconds(nbytes, nodes, bytes_per_second, gpus=8):
    hops, between = 2 * (nodes * gpus - 1), 2 * (nodes - 1)  # so many of a part's hops leave a node: tuning.cc, too
    starts = BASE + between * NETWORK_START + (hops - between) * NVLINK_START
    return starts + hops / (nodes * gpus) * nbytes / bytes_per_second


nvlink, ndr = (link(name).link_bytes_per_second for name in ("NVLink 4", "InfiniBand NDR"))
PLACES = {"1 node: NVLink 4": (1, nvlink), "8 nodes: 8 ports of InfiniBand NDR": (8, 8 * ndr),
          "8 nodes: 1 port of InfiniBand NDR": (8, ndr)}
rows = [{"8 GPUs a node": name, "GB/s a direction": rate / GB, "64 KiB, ms": 1e3 * ring_seconds(64 * 1024, nodes, rate),
         "1 GB, ms": 1e3 * ring_seconds(GB, nodes, rate)} for name, (nodes, rate) in PLACES.items()]
display(pd.DataFrame(rows).style.format({"64 KiB, ms": "{:.2f}"}, precision=1).hide().set_caption("ring all-reduce: rates and starts published, times predicted"))

# %% [markdown]
# **Read it.** Predicted, a gigabyte takes 3.9 ms inside a node, 5.5 over eight nodes with eight ports, and 40.0 with one.
# 64 KiB are all start: more ports do not help.
#
# ## 3. Two hosts
#
# `run_hosts` makes two *network namespaces* of Linux, joined by a virtual cable of 200 Mbit/s in
# each direction. Ranks 0 to 3 live on host 0, 4 to 7 on host 1. A *flat* ring goes through all eight ranks, in the order of
# `wire.among`. The *hierarchical* way is built from section 1's halves. In the picture compare the thick arrows.

# %%
NBYTES, MEGABITS = 4 * MIB, 200
ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # a ring that changes hosts at every hop


def hierarchical(wire, tensor):
    host, place = divmod(wire.rank, 4)
    inside, across = wire.among(range(4 * host, 4 * host + 4)), wire.among([place, place + 4])
    part = algorithms.ring_reduce_scatter(inside, tensor)  # inside each host
    ring_all_reduce(across, part)  # each part with the rank at the same place of the other host
    return algorithms.ring_gather_parts(inside, tensor)  # inside each host


WAYS = {"ring 0, 4, 1, 5, ...": lambda wire, x: ring_all_reduce(wire.among(ORDER), x),
        "ring 0, 1, ..., 7": ring_all_reduce,
        "hierarchical": hierarchical}


# %%
def race(wire):
    found = {}
    for name, reduce in WAYS.items():
        seconds = []
        for _ in range(3):
            x = torch.ones(NBYTES // 4)
            wire.moves.clear()
            before = bytes_sent_here()  # before the barrier: after it others may already send
            dist.barrier()
            start = time.perf_counter()
            reduce(wire, x)
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        kernel = None if before is None else bytes_sent_here() - before
        found[name] = (list(wire.moves), min(seconds), kernel, bool((x == RANKS).all()))
    return found


two_hosts = run_hosts(race, 4, megabits_per_second=MEGABITS)
print(f"transport: {two_hosts.transport}. {two_hosts.why}")

# %%
raced, rows = two_hosts.results[0], []
hops_of = {name: messages([result[name][0] for result in two_hosts.results]) for name in WAYS}
over_link = {name: sum(m.bytes for m in hops_of[name] if m.source < 4 <= m.target) for name in WAYS}
for name, size in over_link.items():
    _, seconds, kernel, is_right = raced[name]
    assert is_right, f"{name} gave a wrong sum"
    floor = (kernel or size) / (MEGABITS / 8 * 1e6)  # the kernel also counts headers and acknowledgements
    rows.append({"host 0 to 1": name, "in B": size / NBYTES, "MB in the last run, by the kernel": (kernel or math.nan) / 1e6,
                 f"so many at {MEGABITS} Mbit/s, ms": 1e3 * floor, "ms (measured, best of 3)": 1e3 * seconds, "ratio": seconds / floor})
display(pd.DataFrame(rows).style.format(precision=2, na_rep="-").hide().set_caption(f"B = {format_bytes(NBYTES)}, {two_hosts.transport}"))
assert [size / NBYTES for size in over_link.values()] == [7, 1.75, 1], "who talks over the link?"

# %%
show(host_figure.draw_hosts(hops_of, NBYTES, title=f"Three all-reduces of {format_bytes(NBYTES)} over 8 ranks: bytes counted, best of 3 times",
                            seconds={name: raced[name][1] for name in WAYS}),
     alt="Three panels of two hosts with four ranks each. The first ring crosses the cable at every hop, the second once "
     "each way; the hierarchical one has a ring inside each host, and each rank talks to its partner across.")
for hosts in (2, 16, 64):
    flat, layered = 2 * (4 * hosts - 1) / (4 * hosts), 2 * (hosts - 1) / hosts
    print(f"{hosts:2} hosts of 4 ranks: hierarchical sends {flat / layered:.2f} times fewer bytes over a host's link (formulas)")

# %% [markdown]
# **Read it.** The ring in order sends $2\frac{N-1}{N}B$ to the next host, the hierarchical way $2\frac{H-1}{H}B$ for $H$
# hosts: nearly as much with many. *Order* matters more here, $7B$ against $1.75B$.
#
# **Question.** 8 hosts of 8 ranks. How many times fewer bytes does the hierarchical all-reduce put on a host's link?

# %%
fewer_on_64 = ...
check("11.fewer_on_64", fewer_on_64)

# %% [markdown]
# ## 4. Buckets and overlap
#
# Sending can hide: DDP fills **buckets** with gradients and all-reduces each while backward goes on. Here, on two hosts of
# one rank, each of sixteen layers sleeps 8 ms (as a GPU leaves the CPU free), then has 128 KiB of gradient. The cable lets
# 64 KiB pass at once before its rate holds, so that a short all-reduce alone beats 200 Mbit/s. Look right of the dashed line.

# %%
def train_step(wire, layers_in_bucket, start_seconds=0.0):
    ready, spans, filled = queue.SimpleQueue(), [], []

    def communicate():
        while (bucket := ready.get()) is not None:
            start = time.monotonic()
            if start_seconds:
                time.sleep(start_seconds)
                spans.append(Span("expensive start", start, start := time.monotonic()))
            ring_all_reduce(wire, bucket)
            spans.append(Span("all-reduce", start, time.monotonic()))

    dist.barrier()
    thread, begin = threading.Thread(target=communicate), time.monotonic()
    thread.start()
    for _ in range(LAYERS):
        time.sleep(LAYER_SECONDS)
        filled.append(torch.ones(LAYER_BYTES // 4))
        if len(filled) == layers_in_bucket:
            ready.put(torch.cat(filled))
            filled = []
    spans.append(Span("backward", begin, time.monotonic()))
    ready.put(None)
    thread.join()
    return spans, time.monotonic() - begin


# %%
LAYERS, LAYER_SECONDS, LAYER_BYTES = 16, 0.008, 128 * 1024
BUCKETS, STARTS_MORE = {layers: layers * LAYER_BYTES for layers in (1, 2, 4, 8, 16)}, (0.0, 0.010)
each_alone, stepped = run_hosts(lambda wire: sweep(wire, train_step, BUCKETS, STARTS_MORE), 1, megabits_per_second=MEGABITS).results[0]
shown = {f"{layers} a bucket" + (", +10 ms" if more else ""): stepped[more, layers] for more in STARTS_MORE for layers in (1, 4, 16)}
show(draw_buckets(shown, title="All-reduces beside backward, over the cable", device="two hosts"),
     alt="Backward, then six lanes of all-reduces. One layer a bucket: many short ones run along with backward; 16: a single one "
     "begins when backward ends. Of the three with 10 ms more a start, 4 a bucket ends first.")

# %% jupyter={"source_hidden": true}
seconds_alone = dict(each_alone)
ends = [LAYER_SECONDS * (number + 1) for number in range(LAYERS)]
columns = {"bucket": [format_bytes(nbytes) for nbytes in seconds_alone], "one alone": [1e3 * each for each in seconds_alone.values()]}
for more, name in zip(STARTS_MORE, ("this link", "10 ms more a start"), strict=True):
    predicted = [1e3 * overlapped_seconds(ends, [LAYER_BYTES] * LAYERS, nbytes, lambda n, more=more: more + seconds_alone[n]) for nbytes in BUCKETS.values()]
    measured = [1e3 * stepped[more, layers][1] for layers in BUCKETS]
    columns |= {f"{name}: predicted": predicted, f"{name}: measured": measured, f"{name}: ratio": [m / p for m, p in zip(measured, predicted, strict=True)]}
display(pd.DataFrame(columns, index=pd.Index(BUCKETS, name="layers a bucket")).style.format({name: "{:.2f}" for name in columns if "ratio" in name}, precision=0).set_caption(
    "ms: one all-reduce alone, best of 12; backward (sleeps 128) with all its all-reduces, best of 4"))

# %% [markdown]
# **Read it.** One bucket for all hides nothing. Where a start is cheap, one or two layers a bucket beat all larger ones.
# Where it costs 10 ms more, two or four beat one and sixteen. Both hold predicted and measured. The prediction takes each
# all-reduce at its best of twelve, alone; beside backward most take longer (*ratio*). DDP's size is `bucket_cap_mb`, 25 by
# default (first bucket 1).
#
# ## 5. Reading the tools
#
# **`NCCL_DEBUG=INFO`** says which network NCCL took. Two real logs, shortened: a 16-GPU H100 job
# ([NVIDIA/nccl 1519](https://github.com/NVIDIA/nccl/issues/1519)):
#
# ```
# NCCL INFO NET/IB : No device found.
# NCCL INFO NET/Socket : Using [0]enp0s12:10.0.0.6<0> [1]enp6s0f0:10.0.1.4<0> ...
# NCCL INFO Using network Socket
# ```
#
# and another ([NVIDIA/nccl-tests 185](https://github.com/NVIDIA/nccl-tests/issues/185)):
#
# ```
# NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:11.1.128.136<0>
# NCCL INFO Using network IB
# ```
#
# *IB* means RDMA, over InfiniBand or Ethernet (RoCE). *Socket* means TCP.

# %% [markdown]
# **`nvidia-smi topo -m`**, two rows of a DGX A100 ([NVIDIA/nccl 1505](https://github.com/NVIDIA/nccl/issues/1505)):
#
# ```
#         GPU0    GPU1    GPU2    ...   NIC0    NIC1    NIC2    NIC3
# GPU0     X      NV12    NV12          PXB     PXB     SYS     SYS
# GPU2    NV12    NV12     X            SYS     SYS     PXB     PXB
# ```
#
# `NV12`: 12 NVLinks. `PIX`, `PXB`: one PCIe switch, or several. `SYS`: another NUMA node. A GPU wants a NIC (network card) at
# `PIX` or `PXB`: GPU2 has NIC2 and NIC3.
#
# **`all_reduce_perf`** of nccl-tests prints
# [two bandwidths](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). *algbw* is size over time. *busbw* is algbw
# times $2(N-1)/N$: for a ring, what each link carried ([NVIDIA/nccl 1453](https://github.com/NVIDIA/nccl/issues/1453)):
#
# ```
#      size (B)    time (us)   algbw (GB/s)   busbw (GB/s)
#      33554432       2180.1          15.39          29.50
#      67108864        24410           2.75           5.27
#     134217728        49264           2.72           5.22
# ```
#
# Twice the size takes eleven times as long. Between two nodes set `NCCL_ALGO=RING`: trees may print more than ports carry
# ([nccl-tests 196](https://github.com/NVIDIA/nccl-tests/issues/196)). An engineer of NVIDIA then expects 46-48 GB/s a port of
# 400 Gb/s ([nccl-tests 290](https://github.com/NVIDIA/nccl-tests/issues/290)). **`ib_write_bw`** tests one port without NCCL.
#
# **Question.** How many ranks did this run have? The ratio of the two bandwidths tells.

# %%
ranks_of_that_run = ...
check("11.ranks_of_that_run", ranks_of_that_run)

# %% [markdown]
# ## 6. Eight nodes, three times as fast
#
# Back to the bet: all nodes spend most of the step in the all-reduce. Is that the network? **A collective's time includes
# waiting for the last one to come.** Hence the order: hardware, network, collectives, code. Find each simulated output's
# wrong line.

# %%
print(*map(job.look, ("hardware", "network", "collectives", "code")), sep="\n\n")

# %% [markdown]
# **Hardware.** Node 5 is hot and slow: the *straggler*.
# **Network.** On the hosts `ib_write_bw` finds 197 of 200 Gb/s. In the job NCCL finds no device, and speaks TCP over one port,
# `eth0`, here of 100 Gb/s (`ethtool` tells). **Collectives.** The gradients fill a third of the 297 buckets: the
# job sends in every pass. Node 5 waits for nobody, so its all-reduce is the *shortest*. **Code.** Every node waits for its
# loader.
#
# Compute before you cure. In the simulator an all-reduce between 8 nodes takes one start and $2 \cdot \frac{7}{8} B \beta$, the
# hierarchical way's bytes over a node's link. TCP's one port sends 10 GB/s, InfiniBand's eight send 160: 80% of their rates. A
# step's passes are simulated as one long pass, in which all 297 buckets fill evenly.

# %%
FORWARD, BACKWARD, LOADING, A_PASS = 0.18, 0.36, 0.1, 99  # seconds of a healthy node; buckets of one pass
PASSED_ON_BYTES = 2 * 7 / 8 * 2.6e9 / A_PASS  # of a bucket


def predict(network, slowest=1.35, passes_sent=3, hiding=1.0):
    each, buckets = network.seconds(PASSED_ON_BYTES), A_PASS * passes_sent
    hidden = hiding * slowest * BACKWARD * (1 - 1 / buckets)  # nothing leaves before the first is full
    shown = max(each, buckets * each - hidden)  # the last bucket always shows
    return each, shown, LOADING + slowest * (FORWARD + BACKWARD) + shown


for name, network, slowest in (("as found", TCP, 1.35), ("node 5 replaced", TCP, 1.0), ("then InfiniBand", INFINIBAND, 1.0)):
    each, shown, step = (1e3 * seconds for seconds in predict(network, slowest))
    print(f"{name:15} 297 x {each:.2f} = {297 * each:5,.0f} ms of all-reduce, {shown:7,.1f} not hidden, step {step:5,.0f} ms (predicted)")
print(f"the tool's 4,666 µs: {PASSED_ON_BYTES / 4666e-6 / GB:.1f} GB/s out of a node, {PASSED_ON_BYTES / 4666e-6 / (8 * 25e9):.0%} of its eight ports")

# %% [markdown]
# The first line gives node 5's 901 ms, since both share a formula. By the second, a healthy backward hides less. At 5% of the
# ports, suspect the network. Now cure in turn:

# %%
CURES = {"as found": (), "node 5 replaced": ("slow_nodes",), "one pass, not three": ("reduced_passes",),
         "InfiniBand, not TCP": ("network",), "loader ahead": ("load_seconds",)}
cured, so_far, rows = job, {}, []
for name, causes in CURES.items():
    so_far[name] = cured = cured.fixed(*causes)
    step = cured.step()
    rows.append({"": name, "step, s": step.step_seconds, "node 0 waits for a node, ms": 1e3 * step.seconds("waiting for a node")[0],
                 "all-reduce not hidden, ms": 1e3 * step.seconds("all-reduce, not hidden")[0], "times one node": times_as_fast(cured)})
display(pd.DataFrame(rows).style.format({"step, s": "{:.2f}", "times one node": "{:.2f}"}, precision=0).hide().set_caption("each row keeps the cures above it (simulated)"))
print(f"node 5 replaced, and nothing else: {rows[1]['times one node']:.2f} times one node; your bet: {'none' if my_bet_times_as_fast is ... else my_bet_times_as_fast}")
print(f"loader ahead, and nothing else: {times_as_fast(job.fixed('load_seconds')):.2f}; one node's step {alone_seconds(job):.2f} -> {alone_seconds(cured):.2f} s")
assert times_as_fast(job) < 3 and times_as_fast(cured) > 7.9, "the planted causes or their cures have changed"

# %%
show(draw_steps(cure_lanes(so_far), list(so_far.values()), title="Node 0's step; each keeps the cures above",
                ends=[f"{times_as_fast(each):.2f} times one node" for each in so_far.values()]),
     alt="Five lanes. With node 5 replaced the waiting is gone, and the all-reduces have grown by most of it. With one pass a short "
     "all-reduce is left, with InfiniBand none to be seen. The last lane is forward and backward alone.")

# %% [markdown]
# **The answer.** The job sends its gradients three times a step, and over TCP. A new node 5 alone gives 3.07: 189 ms
# of waiting go, but 901 ms of all-reduce become 1,027. Curing the loader alone makes the *ratio* worse, 2.65.
#
# Which cure first? Here are all combinations without the loader. `no_sync` (lesson 04) keeps three passes and sends in
# the last. One pass needs three times the activations.

# %%
LINKS, verdict = {f"TCP, {rate} GB/s": TCP._replace(bytes_per_second=rate * GB) for rate in (5, 10, 20)} | {"InfiniBand": INFINIBAND}, {}
SENDING = {"sent in all three passes": (3, 1), "no_sync: in the last of three": (1, 1 / 3), "one pass": (1, 1)}
for (sending, (passes, hiding)), slowest in itertools.product(SENDING.items(), (1.35, 1.0)):
    times = verdict[f"{sending}; node 5 {'as found' if slowest > 1 else 'replaced'}"] = {}
    for name, network in LINKS.items():
        step = predict(network, slowest, passes, hiding)[-1]
        times[name] = 8 * alone_seconds(job) / step
        simulated = replace(job, network=network, reduced_passes=passes, slow_nodes=((5, slowest),)).step().step_seconds
        assert hiding < 1 or abs(step / simulated - 1) < 1e-9, f"{sending}, {name}: formula and simulation differ"
display(pd.DataFrame(verdict).T.style.format(precision=2).set_caption("times one node (predicted); the job has TCP at 10 GB/s, beside it half and twice that"))

# %% [markdown]
# **Read it.** InfiniBand or one pass alone doubles the speed: 6.17, 6.14. With TCP at half the rate one pass gives 4.05: cure
# the network first. Then a new node 5 gives 8.00. After one pass it gives 6.87: the slow backward had hidden what TCP sends.
# `no_sync` sends as little as one pass, but only the last backward hides it: 4.53. The simulator leaves out that
# [sending can slow backward](https://github.com/NVIDIA/nccl/issues/338).
#
# **Question.** Another job of eight nodes: seven show 300 ms in all-reduce after backward, node 3 shows 20. Which node
# do you look at first?

# %%
node_to_look_at = ...
check("11.node_to_look_at", node_to_look_at)

# %% [markdown]
# ## Recap: what helps when
#
# **Why only three times as fast?** The job sends its gradients three times a step, and over TCP. A new node 5 alone gives 3.07
# times one node; InfiniBand or one pass alone doubles the speed (simulated).
#
# | take | when | does not help |
# |---|---|---|
# | ring: under $2B$ a rank, $2(N-1)$ starts | large tensors | small tensors, many ranks |
# | binomial tree: $2\log_2 N$ steps | small tensors | large ones: its root sends $B \log_2 N$ |
# | larger buckets | a start is expensive | one for all hides nothing |
# | `no_sync`: once a step, not once a pass | the link is full | a straggler |
#
# **Where next.** The [lab](../../labs/advanced/11_links.ipynb), in a copy (`make my-labs`); then its
# [solution](../../solutions/advanced/11_links.ipynb).

# %% [markdown]
# ## On Monday
#
# **Is it the network?**
#
# ```python
# # In a script that torchrun started on all nodes, after init_process_group, with your `device`.
# import time
# import torch
# import torch.distributed as dist
#
# PORTS_GB_PER_SECOND = 8 * 50  # of a node, all together: yours
# ranks, gradients = dist.get_world_size(), torch.ones(2**29, device=device)  # 2 GiB, so that starts do not count
# for turn in range(6):
#     if torch.cuda.is_available():
#         torch.cuda.synchronize()
#     if turn == 1:  # the first one makes the connections
#         start = time.perf_counter()
#     dist.all_reduce(gradients)
# if torch.cuda.is_available():
#     torch.cuda.synchronize()
# seconds = (time.perf_counter() - start) / 5
# busbw_gb_per_second = 2 * (ranks - 1) / ranks * gradients.nbytes / seconds / 1e9
# if dist.get_rank() == 0:
#     print(f"busbw {busbw_gb_per_second:.1f} GB/s, {busbw_gb_per_second / PORTS_GB_PER_SECOND:.0%} of the ports")
# # Two nodes: start it with NCCL_ALGO=RING. More: without.
# # Look for `Socket` first, whatever this prints: TCP carried 150 to 180 of 200 Gb/s in vllm 42075.
# # Good: section 5's 46 of a port's 50 GB/s are 92%. Far below: test halves of the nodes, then halves of the slow half, then ports.
# ```
#
# Then look for the cause:
#
# ```
# ib_write_bw -d mlx5_0 --report_gbits            # on node A; then on node B, and so for mlx5_1, ..., mlx5_7:
# ib_write_bw -d mlx5_0 --report_gbits NODE_A
# # nccl-tests, built with MPI=1, hosts with a node a line; TUNING prints the algorithm and protocol of each size:
# mpirun --hostfile hosts -np 64 -N 8 -x NCCL_DEBUG=INFO -x NCCL_DEBUG_SUBSYS=INIT,ENV,NET,TUNING all_reduce_perf -b 8 -e 8G -f 2 -g 1 | tee nccl.log
# grep "NET/IB : Using" nccl.log               # are all cards there?
# grep GDRDMA nccl.log                         # nothing: the cards do not read the GPUs' memory (nccl 1412)
# env | grep NCCL_; cat /etc/nccl.conf         # NCCL_IB_DISABLE=1 or NCCL_NET=Socket, left by somebody?
# sudo lspci -vvv | grep "ACSCtl.*SrcValid+"   # ACS is on: switch it off, except in a virtual machine (nccl 1412, nccl-tests 112)
# ```
#
# **`Socket`?** The container needs the cards, memory that it may lock
# ([vllm 42075](https://github.com/vllm-project/vllm/pull/42075)), and `libibverbs`
# ([sglang 1427](https://github.com/sgl-project/sglang/pull/1427)); on Kubernetes, an RDMA resource such as `rdma/ib`.
#
# ```
# docker run --gpus all --network=host --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 ...
# export NCCL_IB_HCA=mlx5 NCCL_SOCKET_IFNAME=eth0    # the cards; where ranks find each other
# # Good, in the log (nccl 1453), since the card reads the GPU's memory:
# # NCCL INFO Channel 07/0 : 0[0] -> 8[0] [send] via NET/IBext_v8/7/GDRDMA
# ```
#
# **Is it a node?** Give all ranks the *same* batches:
#
# ```python
# # Under DDP, each rank by itself, but for the first batch: there DDP may still send the model's buffers.
# import time
# from statistics import median
# import torch
# import torch.distributed as dist
#
# seconds = []  # after minutes of training: a fault that comes with heat shows on hot GPUs only
# with model.no_sync():
#     for batch in batches[:20]:
#         start = time.perf_counter()
#         loss_of(model, batch).backward()
#         if torch.cuda.is_available():
#             torch.cuda.synchronize()
#         seconds.append(time.perf_counter() - start)
# optimizer.zero_grad()
# of_rank = [None] * dist.get_world_size()
# dist.all_gather_object(of_rank, median(seconds))
# slow = [(rank, round(own / median(of_rank), 2)) for rank, own in enumerate(of_rank) if own > 1.05 * median(of_rank)]
# if dist.get_rank() == 0:
#     print(f"ranks above 1.05 of the median's seconds: {slow}")  # all of one node: look at it
# ```
#
# **Is it the collectives?** In a `torch.profiler` trace, sum `ncclDevKernel` after the last backward kernel. Send once:
#
# ```python
# from contextlib import nullcontext
# from torch.nn.parallel import DistributedDataParallel
#
# model = DistributedDataParallel(model, bucket_cap_mb=50)  # MiB; 25 by default: larger where a start is expensive
# for number, batch in enumerate(batches, start=1):
#     with nullcontext() if number == len(batches) else model.no_sync():
#         (loss_of(model, batch) / len(batches)).backward()
# ```
#
# With transformers: `TrainingArguments(gradient_accumulation_steps=8)`. FSDP2 shards inside a node and adds shards up across
# nodes, once (HSDP; all gradients still cross the ports):
#
# ```python
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# mesh = init_device_mesh(device.type, (nodes, gpus_a_node), mesh_dim_names=("replicate", "shard"))
# # A model in bf16: pass mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32) to each fully_shard, too;
# # the sums of passes are held in reduce_dtype (pytorch 194628).
# for layer in model.layers:
#     fully_shard(layer, mesh=mesh)
# fully_shard(model, mesh=mesh)
# for number, batch in enumerate(batches, start=1):
#     model.set_requires_all_reduce(number == len(batches))  # before, shards are reduced inside the node alone
#     (loss_of(model, batch) / len(batches)).backward()
# ```
#
# The losses must not change beyond rounding, and a profiler must show fewer collectives a step.
