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
# **Promise.** You write a ring all-reduce, predict what a message costs, put a slow link between two hosts, hide sending
# behind computing, and find the four faults of a job on eight nodes.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (Linux, macOS, WSL2) | under a minute of computing on two CPU cores |

# %% tags=["setup"]
here = setup("advanced/11")

# %% jupyter={"source_hidden": true}
import math
import queue
import threading
import time
from dataclasses import replace

import pandas as pd
import torch
import torch.distributed as dist

from utils import GB, MIB, Evidence, RankError, check, draw_lanes, fit_alpha_beta, format_bytes, run_ranks, show, traffic
from utils.catalog import link
from utils.labs.slow_jobs import TCP, SlowJob, lesson_job
from utils.ranks.namespaces import bytes_sent_here
from utils.traffic.cost import AlphaBeta, overlapped_seconds
from utils.views.lanes import Span
from utils.lessons.lesson_11 import algorithms, host_figure, rails, ring_parts
from utils.lessons.lesson_11.buckets import bucket_lanes, sweep
from utils.lessons.lesson_11.counted import beside_gloo
from utils.lessons.lesson_11.hosts import run_hosts
from utils.lessons.lesson_11.link_costs import draw_link_costs
from utils.lessons.lesson_11.step_lanes import cure_lanes, step_lanes
from utils.lessons.lesson_11.wire import Wire, messages

# %% [markdown]
# ## A bet
#
# A simulated job: 1.3 billion parameters, 2.6 GB of gradients a step, eight GPUs and eight ports of 200 Gb/s a node.
# Eight nodes should take eight times the data in the time of one healthy node with the same script.

# %%
job = lesson_job()


def alone_seconds(job):
    return SlowJob(nodes=1, load_seconds=job.load_seconds).step().step_seconds  # one healthy node, the same script


def times_as_fast(job):
    return 8 * alone_seconds(job) / job.step().step_seconds


show(draw_lanes(step_lanes(job), evidence=Evidence.SIMULATED, title=f"A step: one node {alone_seconds(job):.2f} s, eight "
                f"{job.step().step_seconds:.2f} s: {times_as_fast(job):.1f} times as fast"),
     alt="Eight lanes, one a node: loading, then three times forward, backward and a long all-reduce. Node 5 computes "
     "longer in each pass, and the others wait for it.")

# %% [markdown]
# Each node takes its batch in three passes, and seven wait for node 5 in each. Replace node 5, and cure nothing else: how
# many times as fast as one node are the eight then?

# %%
my_bet_times_as_fast = ...

# %% [markdown]
# ## 1. A ring by hand
#
# Every rank sends to the right and receives from the left. Cut the tensor into $N$ parts. In each of $N - 1$ steps a rank
# passes on a part, and adds its own numbers to the one that comes in. Then part $r$ is complete on rank $r$: a
# **reduce-scatter**. In $N - 1$ more steps the complete parts go round: an **all-gather**. Together they are an
# **all-reduce** ([Patarasuk and Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002);
# [glossary](../00_glossary.ipynb)). `wire.exchange` is `dist.isend` to the right, `dist.recv` from the left, then
# `wait`: if all first waited to receive, nobody would send.

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
# **Read it.** In every step all links are busy, and none carries two messages. A rank sends $2(N-1)/N \cdot B$ bytes,
# less than $2B$ *however many ranks there are*. The price is steps: $2(N - 1)$.
#
# **Trap.** A right result proves no ring: one course's solution passed the *whole* tensor round
# ([ARENA 3.0, pull request 407](https://github.com/callummcdougall/ARENA_3.0/pull/407)). So the cell above asserts
# bytes *and* neighbours.
#
# **Question.** 64 ranks, 1 GB of gradients. How many GB does each rank send?

# %%
ring_of_64_gb = ...
check("11.ring_of_64", ring_of_64_gb)

# %% [markdown]
# ### Trees, and the rest
#
# In a **binomial tree** ranks add up in pairs, then pairs of pairs, up to rank 0, and the sum comes down again: whole
# tensors in $2 \log_2 N$ steps. Below: steps, and bytes of the rank that sends most, counted over one tensor of $B$ bytes,
# and the result beside that of gloo, PyTorch's library for CPUs.

# %% tags=["nbval-check-output"]
RANKS = 8
kinds = run_ranks(beside_gloo, RANKS)
FORMULAS = {"all-gather": (RANKS - 1, (RANKS - 1) * B // RANKS), "reduce-scatter": (RANKS - 1, (RANKS - 1) * B // RANKS),
            "all-to-all": (RANKS - 1, (RANKS - 1) * B // RANKS), "all-reduce, tree": (2 * int(math.log2(RANKS)), 3 * B)}
print(f"{'8 ranks':18}{'steps':>6} {'formula':>8} {'most bytes sent':>16} {'formula':>9}  equals gloo's")
for name, (steps, most) in FORMULAS.items():
    found = messages([kind[name].moves for kind in kinds])
    sent = max(sum(m.bytes for m in found if m.source == rank) for rank in range(RANKS))
    apart = max(kind[name].apart for kind in kinds)
    print(f"{name:18}{found[-1].step:>6} {steps:>8} {sent:>16,} {most:>9,}  {'to the bit' if apart == 0 else 'to 1e-12'}")
    assert (found[-1].step, sent) == (steps, most) and apart < 1e-12, f"{name}: another algorithm than the formula's"

# %% [markdown]
# **Read it.** All-gather and reduce-scatter are the halves of a ring all-reduce. FSDP gathers weights twice and scatters
# gradients once: 1.5 all-reduces. The tree's root sends $B \log_2 N$ bytes, in fewer steps. In all-to-all, for mixtures of
# experts, *everybody* talks to *everybody*: no ring helps.
#
# ### Break it: a collective in another order
#
# Rank 1 gathers first and reduces then; the others do it the other way round.

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
# NCCL does not compare calls: such a job hangs until PyTorch's timeout of ten minutes, or ends with wrong numbers. Let
# PyTorch's *flight recorder* write every rank's last collectives at a timeout (`TORCH_NCCL_DUMP_ON_TIMEOUT=1`,
# `TORCH_FR_DUMP_TEMP_FILE=/shared/fr_`); `torchfrtrace /shared -p fr_` reads them.
#
# ## 2. What a message costs
#
# The **alpha-beta model**: a message of $n$ bytes takes $\alpha + n\beta$ seconds, a start and a time for each byte.
# Measured is half of a round trip, the fastest of fifteen.

# %%
SIZES = [2**power for power in range(12, 25, 2)]  # 4 KiB to 16 MiB


def ping(wire, other, sizes, repeats=15):
    seconds, tensors = {size: [] for size in sizes}, {size: torch.ones(size // 4) for size in sizes}
    for size in [size for size in sizes for _ in range(repeats)]:
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
show(draw_link_costs({"two ranks": points}, {"two ranks": mine}, title="One message between two ranks of this machine (gloo, fitted)"),
     alt="Time over message size, both logarithmic: nearly flat at first, then rising in proportion to the "
     "size, with the fitted line through the points.")

# %% [markdown]
# **Read it.** At the dotted line, $\alpha / \beta$ bytes, a message costs $2\alpha$. Left of it it is **latency-bound**: half
# the bytes save at most a quarter, $2\alpha$ becomes $1.5\alpha$. Right of it, it is **bandwidth-bound**.
#
# A ring costs $2(N-1)\alpha + 2\frac{N-1}{N} B\beta$, a tree $2 \log_2 N\,(\alpha + B\beta)$. A GPU node has several
# ports, and each has a ring of its own for its part of the tensor:

# %%
show(rails.draw_rails(link("NVLink 4").link_bytes_per_second, link("InfiniBand NDR").link_bytes_per_second),
     alt="Two nodes. In each an NVSwitch joins eight GPUs, and each GPU has a network port. Eight rings go from node to "
     "node, one a port.")

# %%
# Start of a ring's hop, seconds (Simple protocol): NCCL 2.30 of June 2026, src/graph/tuning.cc, 5067397c.
NVLINK_START, NETWORK_START = 3.4e-6, 14e-6


def ring_seconds(nbytes, nodes, bytes_per_second, gpus=8):
    hops, between = 2 * (nodes * gpus - 1), 2 * (nodes - 1)  # so many of a part's hops leave a node: tuning.cc, too
    starts = between * NETWORK_START + (hops - between) * NVLINK_START
    return starts + hops / (nodes * gpus) * nbytes / bytes_per_second


nvlink, ndr, ethernet = (link(name).link_bytes_per_second for name in ("NVLink 4", "InfiniBand NDR", "Ethernet 100G"))
PLACES = {"1 node: NVLink 4": (1, nvlink), "8 nodes: 8 ports of InfiniBand NDR": (8, 8 * ndr),
          "8 nodes: 1 port of InfiniBand NDR": (8, ndr), "8 nodes: 1 port of Ethernet 100G": (8, ethernet)}
rows = [{"8 GPUs a node": name, "GB/s a direction": rate / GB, "64 KiB, ms": 1e3 * ring_seconds(64 * 1024, nodes, rate),
         "1 GB, ms": 1e3 * ring_seconds(GB, nodes, rate)} for name, (nodes, rate) in PLACES.items()]
display(pd.DataFrame(rows).style.format({"64 KiB, ms": "{:.2f}"}, precision=1).hide().set_caption("ring all-reduce: rates and starts published, times predicted"))
more_starts, more_tensors = 2 * 63 - 2 * 6, 2 * 6 - 2 * 63 / 64
even_bytes = AlphaBeta(NETWORK_START, ndr).even_bytes * more_starts / more_tensors
print(f"64 ranks, each alone behind one NDR port: section 1's tree is faster below {format_bytes(even_bytes)} (predicted)")

# %% [markdown]
# **Read it.** With eight ports a gigabyte takes little longer over eight nodes than inside one; with one port, many times
# longer. 64 KiB are all start. Trees win there, but measure where: NCCL's double trees send chunks, its LL
# protocol starts faster, and NVSwitch (NVLS) or the network (SHARP) may add up itself.
#
# ## 3. Two hosts
#
# `run_hosts` makes two *network namespaces* of Linux, joined by a virtual cable of 200 Mbit/s in each direction (`tc
# tbf`). Ranks 0 to 3 live on host 0, 4 to 7 on host 1. Where this is not possible (macOS, Colab, Binder), messages to the
# other host wait as long; the cell says which it was. A *flat* ring goes 0, 1, ..., 7; a *hierarchical* all-reduce adds
# up inside each host first.

# %%
NBYTES, MEGABITS = 4 * MIB, 200
ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # a ring that changes hosts at every hop
WAYS = {"ring 0, 4, 1, 5, ...": lambda wire, x: ring_all_reduce(wire.among(ORDER), x),
        "ring 0, 1, ..., 7": ring_all_reduce,
        "hierarchical": algorithms.hierarchical_all_reduce}


# %%
def race(wire):
    found = {}
    for name, reduce in WAYS.items():
        seconds = []
        for _ in range(3):
            x = torch.ones(NBYTES // 4)
            dist.barrier()
            wire.moves.clear()
            before, start = bytes_sent_here(), time.perf_counter()
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
found = {name: messages([result[name][0] for result in two_hosts.results]) for name in WAYS}
over_link = {name: sum(m.bytes for m in found[name] if m.source < 4 <= m.target) for name in WAYS}
for name, size in over_link.items():
    _, seconds, kernel, is_right = raced[name]
    assert is_right, f"{name} gave a wrong sum"
    predicted = size / (MEGABITS / 8 * 1e6)
    rows.append({"host 0 to 1": name, "in B": size / NBYTES, "MB, counted": size / 1e6, "MB, by the kernel": (kernel or math.nan) / 1e6,
                 f"at {MEGABITS} Mbit/s, ms (predicted)": 1e3 * predicted, "ms (measured, best of 3)": 1e3 * seconds, "ratio": seconds / predicted})
display(pd.DataFrame(rows).style.format(precision=2, na_rep="-").hide().set_caption(f"B = {format_bytes(NBYTES)}, {two_hosts.transport}"))
in_b = {name: size / NBYTES for name, size in over_link.items()}
assert in_b == {"ring 0, 4, 1, 5, ...": 7, "ring 0, 1, ..., 7": 1.75, "hierarchical": 1}, "who talks over the link?"

# %%
show(host_figure.draw_hosts(found, NBYTES, title="Two hosts, one cable: three all-reduces of 8 ranks, bytes counted"),
     alt="Three panels of two hosts with four ranks each. The first ring crosses the cable at every hop, the second once "
     "each way; the hierarchical one has a ring inside each host, and each rank talks to its partner across.")
for hosts in (2, 16, 64):
    flat, layered = 2 * (4 * hosts - 1) / (4 * hosts), 2 * (hosts - 1) / hosts
    print(f"{hosts:2} hosts of 4 ranks: hierarchical sends {flat / layered:.2f} times fewer bytes over a host's link (formulas)")

# %% [markdown]
# **Read it.** The flat ring sends $2\frac{N-1}{N}B$ to the next host, the hierarchical way $2\frac{H-1}{H}B$ for $H$ hosts.
# That gain vanishes with many hosts; fewer steps stay. *Order* matters more: so launchers number ranks host by host, and
# NCCL reads the topology. The kernel also counts headers and acknowledgements. The prediction knows the link alone: the
# rest is work inside the hosts, whose causes we did not separate.
#
# **Question.** 8 hosts of 8 ranks. How many times fewer bytes does the hierarchical all-reduce put on a host's link?

# %%
fewer_on_64 = ...
check("11.fewer_on_64", fewer_on_64)

# %% [markdown]
# ## 4. Buckets and overlap
#
# DDP fills **buckets** with gradients and all-reduces each while backward goes on. Here, on two hosts of one rank:
# sixteen layers, each sleeps 8 ms (as a GPU leaves the CPU free), then has 128 KiB of gradient.

# %%
LAYERS, LAYER_SECONDS, LAYER_BYTES = 16, 0.008, 128 * 1024


# %%
def train_step(wire, layers_in_bucket, start_seconds=0.0):
    ready, spans, filled = queue.SimpleQueue(), [], []

    def communicate():
        while (bucket := ready.get()) is not None:
            start = time.monotonic()
            time.sleep(start_seconds)
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
BUCKETS, STARTS_MORE = {layers: layers * LAYER_BYTES for layers in (1, 2, 4, 8, 16)}, (0.0, 0.010)
alone, stepped = run_hosts(lambda wire: sweep(wire, train_step, BUCKETS, STARTS_MORE), 1, megabits_per_second=MEGABITS).results[0]
shown = {f"{layers} a bucket" + (", +10 ms" if more else ""): stepped[more, layers] for more in STARTS_MORE for layers in (1, 4, 16)}
show(draw_lanes(bucket_lanes(shown), title="All-reduces beside backward, by layers a bucket", device="two hosts"),
     alt="Backward, then six lanes of all-reduces. One layer a bucket: many short ones run along with backward; 16: a single one "
     "begins when backward ends. With 10 ms more a start, one a bucket lasts longest.")

# %%
bucket_cost = fit_alpha_beta(*zip(*alone, strict=True))
ends = [LAYER_SECONDS * (number + 1) for number in range(LAYERS)]
columns = {"bucket": [format_bytes(nbytes) for nbytes in BUCKETS.values()]}
for more, name in zip(STARTS_MORE, ("this link", "10 ms more a start"), strict=True):
    cost = bucket_cost._replace(alpha_seconds=bucket_cost.alpha_seconds + more)
    predicted = [1e3 * overlapped_seconds(ends, [LAYER_BYTES] * LAYERS, nbytes, cost.seconds) for nbytes in BUCKETS.values()]
    measured = [1e3 * stepped[more, layers][1] for layers in BUCKETS]
    columns |= {f"{name}: predicted": predicted, f"{name}: measured": measured, f"{name}: ratio": [m / p for m, p in zip(measured, predicted, strict=True)]}
ratios = {name: "{:.2f}" for name in columns if "ratio" in name}
display(pd.DataFrame(columns, index=pd.Index(BUCKETS, name="layers a bucket")).style.format(ratios, precision=0).set_caption(
    "ms for backward and all-reduces, best of 4; backward alone sleeps 128"))

# %% [markdown]
# **Read it.** One bucket for all hides nothing. Small ones hide most where a start is cheap; where it is dear (+10 ms),
# a middle size wins, and neighbours may tie. The prediction queues all-reduces at the price they have alone: the ratio
# says how far it misses. DDP's size is `bucket_cap_mb`, 25 by default (the very first bucket 1). On GPUs overlap costs
# backward some cores and memory bandwidth, which a sleep does not show.
#
# ## 5. Reading the tools
#
# These lines were printed on real clusters. The sources are linked; we shortened them.
# **`NCCL_DEBUG=INFO`** says which network NCCL took. A 16-GPU H100 job
# ([NVIDIA/nccl 1519](https://github.com/NVIDIA/nccl/issues/1519)):
#
# ```
# NCCL INFO NET/IB : No device found.
# NCCL INFO NET/Socket : Using [0]enp0s12:10.0.0.6<0> [1]enp6s0f0:10.0.1.4<0> ...
# NCCL INFO Using network Socket
# ```
#
# Another, of H100s as well ([NVIDIA/nccl-tests 185](https://github.com/NVIDIA/nccl-tests/issues/185)):
#
# ```
# NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:11.1.128.136<0>
# NCCL INFO Using network IB
# ```
#
# *IB* means RDMA, over InfiniBand or Ethernet (RoCE). *Socket* means TCP, here in spite of fast cards. *OOB* is where
# ranks find each other. `Using network IB` says what was selected: this job died, its network unreachable.

# %% [markdown]
# **`nvidia-smi topo -m`**, first rows of a DGX A100 ([NVIDIA/nccl 1505](https://github.com/NVIDIA/nccl/issues/1505)):
#
# ```
#         GPU0    GPU1    GPU2    ...   NIC0    NIC1    NIC2    NIC3
# GPU0     X      NV12    NV12          PXB     PXB     SYS     SYS
# GPU2    NV12    NV12     X            SYS     SYS     PXB     PXB
# ```
#
# `NV12`: 12 NVLinks. `PIX`, `PXB`: one PCIe switch, or several. `PHB`, `NODE`: the CPU's host bridge. `SYS`: another NUMA
# node. A GPU wants a NIC at `PIX` or `PXB`: GPU2 has NIC2 and NIC3.

# %% [markdown]
# **`all_reduce_perf`** of nccl-tests prints two bandwidths. *algbw* is size over time. *busbw* is algbw times
# $2(N-1)/N$: for a ring, what the links carried, comparable to their rate whatever $N$
# ([NVIDIA/nccl 1453](https://github.com/NVIDIA/nccl/issues/1453)):
#
# ```
#      size (B)    time (us)   algbw (GB/s)   busbw (GB/s)
#      33554432       2180.1          15.39          29.50
#      67108864        24410           2.75           5.27
#     134217728        49264           2.72           5.22
# ```
#
# Twice the size takes eleven times as long, as no alpha-beta line does: at 64 MiB the algorithm changes, or the network is
# congested. Between two nodes set `NCCL_ALGO=RING`, for trees and NVLS may print more than the ports carry
# ([nccl-tests 196](https://github.com/NVIDIA/nccl-tests/issues/196)); then expect 46-48 GB/s a port of 400 Gb/s
# ([nccl-tests 290](https://github.com/NVIDIA/nccl-tests/issues/290)). **`ib_write_bw`** tests one port without NCCL, with
# messages of 64 KiB or more.
#
# **Question.** How many ranks did this run have? The ratio of the two bandwidths tells.

# %%
ranks_of_that_run = ...
check("11.ranks_of_that_run", ranks_of_that_run)

# %% [markdown]
# ## 6. Eight nodes, three times as fast
#
# All nodes spend most of the step in the all-reduce, so the network looks guilty. But **a collective's time includes
# waiting for the last one to come**. Hence the order: hardware, network, collectives, code. Each layer's test needs none
# above it.

# %%
print(job.look("hardware"), job.look("network"), sep="\n\n")

# %% [markdown]
# **Hardware.** Node 5 is hot and slow: the *straggler*. `nvidia-smi -q -d PERFORMANCE` says why a clock is low.
# **Network.** On the hosts `ib_write_bw` finds 197 of 200 Gb/s. In the job's container NCCL finds no device and speaks
# TCP: the container lacks devices or driver; compare `ls /dev/infiniband` in it and outside.

# %%
print(job.look("collectives"), job.look("code"), sep="\n\n")

# %% [markdown]
# **Collectives.** Three times as many buckets of 25 MiB as the gradients fill: one all-reduce a pass. The batch fits into a
# single pass, with a whole backward to hide it. (Else `no_sync`, lesson 04, sends as little, hidden by the last backward
# alone.) Node 5 waits for nobody: its all-reduce is the *shortest*. **Code.** Every node waits for its loader.

# %%
CURES = {"as found": (), "node 5 replaced": ("slow_nodes",), "InfiniBand, not TCP": ("network",),
         "one pass, not three": ("reduced_passes",), "loader ahead": ("load_seconds",)}
cured, so_far, rows = job, {}, []
for name, causes in CURES.items():
    so_far[name] = cured = cured.fixed(*causes)
    step = cured.step()
    rows.append({"": name, "step, s": step.step_seconds, "node 0 waits for a node, ms": 1e3 * step.seconds("waiting for a node")[0],
                 "all-reduce not hidden, ms": 1e3 * step.seconds("all-reduce, not hidden")[0], "times one node": times_as_fast(cured)})
display(pd.DataFrame(rows).style.format({"step, s": "{:.2f}", "times one node": "{:.2f}"}, precision=0).hide().set_caption("each row keeps the cures above it (simulated)"))
your_bet = "none" if my_bet_times_as_fast is ... else f"{my_bet_times_as_fast:g}"
print(f"node 5 replaced, and nothing else: {rows[1]['times one node']:.2f} times one node; your bet: {your_bet}")
assert times_as_fast(job) < 3 and times_as_fast(cured) > 7.9, "the planted causes or their cures have changed"

# %%
show(draw_lanes(cure_lanes(so_far), title="Node 0's step; each keeps the cures above", evidence=Evidence.SIMULATED),
     alt="Five lanes. With node 5 replaced the waiting is gone, and the all-reduces have grown by most of it. With InfiniBand they "
     "vanish. The last lane is forward and backward alone.")

# %% [markdown]
# **The answer.** Too many bytes for the way: TCP, three times a step. Replacing node 5 takes away 189 ms of waiting, and
# 126 come back: its long backward had hidden all-reduces, of which 901 ms showed, and now 1,027. The loader slows one node
# as much as eight: it costs time, and no scaling. Each cure alone, with half and twice TCP's rate:

# %%
alone = {f"TCP at {rate} GB/s": {name: times_as_fast(replace(job, network=TCP._replace(bytes_per_second=rate * GB)).fixed(*causes)) for name, causes in CURES.items()}
         for rate in (5, 10, 20)}
display(pd.DataFrame(alone).style.format(precision=2).set_caption("times one node, each cure alone (simulated; the job has 10)"))

# %% [markdown]
# **Read it.** Either cure of the wait, InfiniBand or one pass (free), lifts the job to about 6.15.
# Then node 5 is the step to 8.00. A slow *link* makes all ranks wait alike: test halves of the nodes with `all_reduce_perf`, and halve the
# slow one again.
#
# **Question.** Another job of eight nodes: seven show 300 ms in all-reduce after backward, node 3 shows 20 ms. Which
# node do you look at first?

# %%
node_to_look_at = ...
check("11.node_to_look_at", node_to_look_at)

# %% [markdown]
# ## Recap: what helps when
#
# Look in this order: hardware, network, collectives, code. The rank that waits least is the one to look at.
#
# | take | when | does not help |
# |---|---|---|
# | ring: under $2B$ a rank, $2(N-1)$ starts | large tensors | small tensors, many ranks |
# | tree: $2\log_2 N$ steps | small tensors | bandwidth, unless cut in chunks |
# | a ring through each port | always: NCCL does it, if it finds the ports | one port a node |
# | hierarchical | links inside are faster, few hosts | bytes between many hosts |
# | larger buckets | a start is expensive | a slow link: bytes stay |
# | fewer bytes (bf16 gradients, accumulation) | the link is full | stragglers |
#
# **Test yourself.** Eight nodes are only three times as fast as one. What do you look at, in which order, with which
# tool?
#
# <details><summary>Answer</summary>
#
# Hardware: <code>nvidia-smi</code>. Network: <code>NCCL_DEBUG=INFO</code>, <code>ib_write_bw</code>,
# <code>all_reduce_perf</code>. Collectives: their number, size, and what backward does not hide. Code: the loader,
# <code>.item()</code>.
#
# </details>
#
# **Where next.** Do the [lab](../../labs/advanced/11_links.ipynb), in a copy (`make my-labs`); then compare with
# the [solution](../../solutions/advanced/11_links.ipynb).
#
# **References.** Thakur, Rabenseifner and Gropp 2005, [doi:10.1177/1094342005051521](https://doi.org/10.1177/1094342005051521).
# Li and others 2020, *PyTorch Distributed*, [arXiv:2006.15704](https://arxiv.org/abs/2006.15704). NVIDIA,
# [nccl-tests on bandwidths](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md),
# [NCCL's environment variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).

# %% [markdown]
# ## On Monday
#
# **Is it the network?** In a script that `torchrun` started on all nodes, after `init_process_group`, with your
# `device`:
#
# ```python
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
# ```
#
# Start it with `NCCL_ALGO=RING`: trees and NVLS print more than ports carry. Above 80%: well. Below 50%: search, port by port. Below 10%: look for `Socket` in `NCCL_DEBUG=INFO`.
#
# **Is it a node?** Under DDP, each rank by itself, forward and backward without a collective:
#
# ```python
# import time
# from statistics import median
# import torch
# import torch.distributed as dist
#
# seconds = []
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
#     print(f"ranks above 1.05 of the median's seconds: {slow}")
# ```
#
# All of one node's ranks, and no others: look at that node.
#
# **Is it the collectives?** In a `torch.profiler` trace, sum `ncclDevKernel` after the last backward kernel. Send once:
#
# ```python
# from contextlib import nullcontext
# from torch.nn.parallel import DistributedDataParallel
#
# model = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
# for number, batch in enumerate(batches, start=1):
#     with nullcontext() if number == len(batches) else model.no_sync():
#         (loss_of(model, batch) / len(batches)).backward()
# ```
#
# With transformers: `TrainingArguments(gradient_accumulation_steps=8, ddp_bucket_cap_mb=100)`. FSDP2 shards inside a node
# and adds shards up across nodes, once (HSDP; a node's eight shards are still all gradients):
#
# ```python
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# mesh = init_device_mesh(device.type, (nodes, gpus_a_node), mesh_dim_names=("replicate", "shard"))
# for layer in model.layers:
#     fully_shard(layer, mesh=mesh)
# fully_shard(model, mesh=mesh)
# for number, batch in enumerate(batches, start=1):
#     model.set_requires_all_reduce(number == len(batches))  # before, shards are reduced inside the node alone
#     (loss_of(model, batch) / len(batches)).backward()
# ```
#
# The losses must not change beyond rounding, and a profiler must show fewer collectives a step.
