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
# **Promise.** You write a ring all-reduce and count its bytes, predict what a message costs, build two hosts
# with a slow link between them, and hide sending behind computing. With that you find the four faults of a job on eight
# nodes.
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

import pandas as pd
import torch
import torch.distributed as dist

from utils import GB, MIB, Evidence, RankError, Span, check, draw_lanes, scoreboard, show, traffic
from utils import fit_alpha_beta, format_bytes, run_ranks, score
from utils.catalog import link
from utils.labs.slow_jobs import SlowJob, lesson_job
from utils.ranks.namespaces import bytes_sent_here
from utils.traffic.cost import AlphaBeta, overlapped_seconds
from utils.lessons.lesson_11 import algorithms
from utils.lessons.lesson_11.buckets import bucket_lanes, sweep
from utils.lessons.lesson_11.counted import beside_gloo
from utils.lessons.lesson_11.hosts import run_hosts
from utils.lessons.lesson_11.link_costs import draw_link_costs
from utils.lessons.lesson_11.messages import draw_messages
from utils.lessons.lesson_11.wire import Wire, messages

# %% [markdown]
# ## A bet
#
# A simulated job: 1.3 billion parameters, 2.6 GB of gradients a step, nodes of eight GPUs and eight ports of 200 Gb/s.
# A healthy node takes 0.54 s a step. Eight should take as long with eight times the data: 8 times as fast.

# %%
job, one_node = lesson_job(), SlowJob(nodes=1).step().step_seconds


def times_as_fast(job):
    return 8 * one_node / job.step().step_seconds


lanes = {f"node {number}": [Span(*stretch) for stretch in row] for number, row in enumerate(job.step().stretches)}
show(draw_lanes(lanes, title=f"One step of eight nodes: {times_as_fast(job):.1f} times as fast as one", evidence=Evidence.SIMULATED),
     alt="Eight lanes, one a node: loading, forward, backward, then a long all-reduce. Node 5 computes longer, and the "
     "others wait for it.")

# %% [markdown]
# Node 5 computes longer, and the other seven wait for it. Replace node 5, and cure nothing else: how many times as fast
# as one node are the eight then? Write your guess. Section 6 tells.

# %%
my_bet_times_as_fast = 8.0

# %% [markdown]
# ## 1. A ring by hand
#
# Most of the picture is all-reduce. What is it? Every rank talks to its neighbours alone: it sends to the right and
# receives from the left. Cut the tensor into $N$ parts. In each of $N - 1$ steps a rank passes on a part, and adds its
# own numbers to the one that comes in. Then part $r$ is complete on rank $r$: a **reduce-scatter**. In $N - 1$ more
# steps the complete parts go round: an **all-gather**. Together they are an **all-reduce**
# ([Patarasuk and Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)). New words stand in the
# [glossary](../00_glossary.ipynb).
#
# `wire.exchange` is `work = dist.isend(part, right)`, `dist.recv(into, left)`, `work.wait()`: if all ranks first waited
# to receive, nobody would send. The wire notes who sent what to whom.

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
show(draw_messages(hops, title="Ring all-reduce of 4 ranks: three steps add up, three hand round", across=6),
     alt="Six grids, one a step. In each, every rank sends one part to its right neighbour. In the first three the "
     "parts are sums under way, in the last three they are complete.")

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
# **Trap.** A right result proves no ring. The reference solution of one well-known course passed the *whole* tensor
# round: right sums, and N times the bytes
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
# In a **binomial tree** ranks add up in pairs, then pairs of pairs, up to rank 0, and the sum comes down the same way:
# $2 \log_2 N$ steps, and whole tensors in each.

# %%
RANKS = 8
tree = messages([moves for moves, _, _ in run_ranks(by_hand, RANKS, algorithms.tree_all_reduce)])
show(draw_messages(tree, title="Tree all-reduce of 8 ranks: up in three steps, down in three"),
     alt="Six grids. In the first, ranks 4 to 7 send the whole tensor to ranks 0 to 3, then 2 and 3 to 0 and 1, then "
     "1 to 0; the last three go the same way back.")

# %% tags=["nbval-check-output"]
kinds = run_ranks(beside_gloo, RANKS)
FORMULAS = {"all-gather": (RANKS - 1, (RANKS - 1) * B), "reduce-scatter": (RANKS - 1, (RANKS - 1) * B // RANKS),
            "all-to-all": (RANKS - 1, (RANKS - 1) * B // RANKS), "all-reduce, tree": (2 * int(math.log2(RANKS)), 3 * B)}
print(f"{'8 ranks':18}{'steps':>6} {'formula':>8} {'most bytes sent':>16} {'formula':>9}  from gloo")
for name, (steps, most) in FORMULAS.items():
    found = messages([kind[name].moves for kind in kinds])
    sent = max(sum(m.bytes for m in found if m.source == rank) for rank in range(RANKS))
    apart = max(kind[name].apart for kind in kinds)
    print(f"{name:18}{found[-1].step:>6} {steps:>8} {sent:>16,} {most:>9,}  {'to the bit' if apart == 0 else 'to 1e-12'}")
    assert (found[-1].step, sent) == (steps, most) and apart < 1e-12, f"{name}: another algorithm than the formula's"

# %% [markdown]
# **Read it.** The tree's root sends $B \log_2 N$ bytes down, more than a ring's rank ever does, in fewer steps.
# All-to-all, which mixtures of experts need, is the one where *everybody* talks to *everybody*: no ring of near links
# helps it.
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
# On GPUs this says nothing for ten minutes: NCCL waits, until PyTorch's timeout ends the job. Its
# flight recorder keeps the last collectives of every rank (`TORCH_FR_BUFFER_SIZE`).
#
# ## 2. What a message costs
#
# The **alpha-beta model**: a message of $n$ bytes takes $\alpha + n\beta$ seconds, a start and a time for each byte.
# Measured is half of a round trip, the fastest of fifteen.

# %%
SIZES = [2**power for power in range(12, 25, 2)]  # 4 KiB to 16 MiB


def ping(wire, other, sizes, repeats=15):
    seconds, tensors = {size: [] for size in sizes}, {size: torch.ones(size // 4) for size in sizes}
    for size in list(sizes) * repeats:
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
show(draw_link_costs({"two ranks": points}, {"two ranks": mine}, title="One message between two ranks of this machine"),
     alt="Time over message size, both logarithmic: nearly flat at first, then rising in proportion to the "
     "size, with the fitted line through the points.")

# %% [markdown]
# **Read it.** Left of the dotted line, at $\alpha / \beta$ bytes, a message is **latency-bound**: half the bytes save
# less than a quarter of the time. Right of it, it is **bandwidth-bound**. (The line is fitted to these very points.)
#
# In the formulas of section 1, with $N$ ranks: a ring costs $2(N-1)\alpha + 2\frac{N-1}{N} B\beta$, a tree
# $2 \log_2 N\,(\alpha + B\beta)$.

# %%
def ring_seconds(cost, ranks, nbytes):
    return cost.seconds(2 * (ranks - 1) / ranks * nbytes, starts=2 * (ranks - 1))


def tree_seconds(cost, ranks, nbytes):
    return 2 * math.ceil(math.log2(ranks)) * cost.seconds(nbytes)


# Start of a ring's message, microseconds (Simple protocol): NCCL 2.30 of June 2026, src/graph/tuning.cc, 5067397c.
STARTS = {"NVLink 4": 3.4, "PCIe 5 x16": 5.7, "InfiniBand NDR": 14.0, "Ethernet 100G": 14.0}
rows = []
for name, start in STARTS.items():
    cost = AlphaBeta(start * 1e-6, link(name).link_bytes_per_second)
    faster = next(size for size in (2**p for p in range(10, 40)) if ring_seconds(cost, 64, size) < tree_seconds(cost, 64, size))
    rows.append({"link": name, "GB/s a direction": cost.bytes_per_second / GB, "start, µs": start,
                 "even at, KiB": cost.even_bytes / 1024, "1 GB over 64 ranks, ms": 1e3 * ring_seconds(cost, 64, GB),
                 "ring beats tree from": format_bytes(faster)})
display(pd.DataFrame(rows).style.format(precision=1).hide().set_caption("rates and starts published, times predicted"))

# %% [markdown]
# **Read it.** The same gigabyte costs many times more over Ethernet than over NVLink. A tree wins for small tensors, a
# ring for large ones. NCCL chooses by such a model, and cuts a tree's tensor into chunks, so that it loses less.
#
# ## 3. Two hosts
#
# Now a slow link. `run_hosts` makes two *network namespaces* of Linux, joined by one virtual cable, which the kernel's
# token bucket (`tc tbf`) limits to 200 Mbit/s in each direction. Ranks 0 to 3 live on host 0, 4 to 7 on host 1. Where
# this is not possible (macOS, Colab, Binder), a message to the "other" host waits as long as such a link would be
# busy. The cell says which it was. A *flat* ring goes 0, 1, ..., 7 and back to 0; a *hierarchical* all-reduce adds up
# inside each host first.

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
raced, over_link, rows = two_hosts.results[0], {}, []
for name in WAYS:
    found = messages([result[name][0] for result in two_hosts.results])
    over_link[name] = sum(m.bytes for m in found if m.source < 4 <= m.target)
    _, seconds, kernel, is_right = raced[name]
    assert is_right, f"{name} gave a wrong sum"
    rows.append({"": name, "steps": found[-1].step, "host 0 to 1, in B (counted)": over_link[name] / NBYTES,
                 "MB": over_link[name] / 1e6, "MB, by the kernel": (kernel or math.nan) / 1e6,
                 f"at {MEGABITS} Mbit/s, ms (predicted)": 1e3 * over_link[name] / (MEGABITS / 8 * 1e6), "ms (measured, best of 3)": 1e3 * seconds})
display(pd.DataFrame(rows).style.format(precision=2, na_rep="-").hide().set_caption(f"B = {format_bytes(NBYTES)}, {two_hosts.transport}"))
in_b = {name: size / NBYTES for name, size in over_link.items()}
assert in_b == {"ring 0, 4, 1, 5, ...": 7, "ring 0, 1, ..., 7": 1.75, "hierarchical": 1}, "who talks over the link?"

# %%
layers = messages([result["hierarchical"][0] for result in two_hosts.results])
show(draw_messages(layers, title="Hierarchical all-reduce: two hosts of four ranks", across=8, hosts=2),
     alt="Eight grids, parted by lines between the hosts. Three steps inside each host, two across, with half "
     "of a part each, and three inside again.")

# %% [markdown]
# **Read it.** The flat ring carries $2\frac{N-1}{N}B$ over its one hop from host to host. The hierarchical one reduces
# inside each host, and only the host's sums cross: $2\frac{H-1}{H}B$ for $H$ hosts.
# *Order* matters more: a ring that changes hosts at every hop puts seven times $B$ there. So launchers number ranks
# host by host, and NCCL reads the topology before it makes rings. All three take longer than the link alone would:
# eight ranks share a few cores, and the link idles while a host adds up.
#
# **Question.** 8 hosts of 8 ranks. How many times fewer bytes does the hierarchical all-reduce put on a host's link?

# %%
fewer_on_64 = ...
check("11.fewer_on_64", fewer_on_64)

# %% [markdown]
# ## 4. Buckets and overlap
#
# DDP does not wait for the end of backward. It fills **buckets** with gradients and all-reduces each while backward
# goes on. Here, on two hosts of one rank: sixteen layers, each "computes" 8 ms (it sleeps, as a GPU would leave the CPU
# free), then has 128 KiB of gradient.

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
show(draw_lanes(bucket_lanes({layers: stepped[0.0, layers] for layers in (1, 4, 16)}), title="Backward and all-reduce, side by side", device="two hosts"),
     alt="Three pairs of lanes. With one layer a bucket many short all-reduces run along with backward; with all 16 in one "
     "bucket the single all-reduce begins when backward ends.")

# %%
bucket_cost = fit_alpha_beta(*zip(*alone, strict=True))
ends = [LAYER_SECONDS * (number + 1) for number in range(LAYERS)]
columns = {"bucket": [format_bytes(nbytes) for nbytes in BUCKETS.values()]}
for more, name in zip(STARTS_MORE, ("this link", "10 ms more a start"), strict=True):
    cost = bucket_cost._replace(alpha_seconds=bucket_cost.alpha_seconds + more)
    columns[f"{name}, predicted"] = [1e3 * overlapped_seconds(ends, [LAYER_BYTES] * LAYERS, nbytes, cost.seconds) for nbytes in BUCKETS.values()]
    columns[f"{name}, measured"] = [1e3 * stepped[more, layers][1] for layers in BUCKETS]
display(pd.DataFrame(columns, index=pd.Index(BUCKETS, name="layers a bucket")).style.format(precision=0).set_caption(
    "ms for backward and all-reduces, best of 4, noisy on a shared machine; backward alone sleeps 128"))

# %% [markdown]
# **Read it.** The prediction takes the cost of one all-reduce alone, and lets them queue beside backward. One bucket
# for all hides nothing. Small ones hide most of it where a start is cheap; where it is dear, starts add up and a
# middle size wins. In DDP the size is `bucket_cap_mb`, 25 by default.
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
# *IB* here means RDMA, over InfiniBand or, as in the second job, over Ethernet (RoCE). *Socket* means TCP. *OOB* is where
# ranks find each other, and no more. `NCCL_SOCKET_IFNAME` chooses it, and *Socket*'s interface;
# `NCCL_IB_HCA` chooses the cards of *IB*. Later lines tell each pair's way: `via P2P/IPC` inside a node
# ([nccl 398](https://github.com/NVIDIA/nccl/issues/398)), `[send] via NET/IB/2/GDRDMA` from
# GPU memory to the network card without the CPU ([nccl 707](https://github.com/NVIDIA/nccl/issues/707)).
#
# **Question.** Which of the two jobs speaks TCP, `"first"` or `"second"`?

# %%
which_job_uses_tcp = ...
check("11.which_uses_tcp", which_job_uses_tcp)

# %% [markdown]
# **`nvidia-smi topo -m`**, first rows of a DGX A100 ([NVIDIA/nccl 1505](https://github.com/NVIDIA/nccl/issues/1505)):
#
# ```
#         GPU0    GPU1    GPU2    ...   NIC0    NIC1    NIC2    NIC3
# GPU0     X      NV12    NV12          PXB     PXB     SYS     SYS
# GPU2    NV12    NV12     X            SYS     SYS     PXB     PXB
# ```
#
# `NV12`: 12 NVLinks. `PIX`, `PXB`: through one PCIe switch, or several. `PHB`, `NODE`: through the CPU's host bridge.
# `SYS`: from one NUMA node to another. A GPU wants a NIC at `PIX` or `PXB`.
#
# **Question.** Which NIC should GPU2 use: 0 or 2?

# %%
nic_of_gpu2 = ...
check("11.nic_of_gpu2", nic_of_gpu2)

# %% [markdown]
# **`all_reduce_perf`** of nccl-tests prints two bandwidths. *algbw* is size over time. *busbw* is algbw times
# $2(N-1)/N$: what a link carried, comparable to its rate whatever $N$
# ([NVIDIA/nccl 1453](https://github.com/NVIDIA/nccl/issues/1453)):
#
# ```
#      size (B)    time (us)   algbw (GB/s)   busbw (GB/s)
#      33554432       2180.1          15.39          29.50
#      67108864        24410           2.75           5.27
#     134217728        49264           2.72           5.22
# ```
#
# Twice the size takes eleven times as long, as no alpha-beta line does: at 64 MiB algorithm or protocol change, or the
# network is congested. Between two healthy nodes NVIDIA says to expect 46-48 GB/s for each port
# of 400 Gb/s ([nccl-tests 290](https://github.com/NVIDIA/nccl-tests/issues/290)). **`ib_write_bw`** tests one port
# without NCCL; give it messages of 64 KiB or more, for small ones are all start.
#
# **Question.** How many ranks did this run have? The ratio of the two bandwidths tells.

# %%
ranks_of_that_run = ...
check("11.ranks_of_that_run", ranks_of_that_run)

# %% [markdown]
# ## 6. Eight nodes, three times as fast
#
# Back to the job. All nodes spend most of the step in the all-reduce, so the network
# looks guilty. But **a collective's time includes waiting for the last one to come**. Hence the order: hardware,
# network, collectives, code. Each layer is judged by a test that needs none above it.

# %%
print(job.look("hardware"), job.look("network"), sep="\n\n")

# %% [markdown]
# **Hardware.** Node 5 is hot and slow, so it is the *straggler*. It waits for none: counted with its waiting, its
# all-reduce is the *shortest*. **Network.** The ports are well, 197 of 200 Gb/s, but NCCL does not use them: it speaks
# TCP over `eth0`. One cause of that is a container that was not given the InfiniBand devices.

# %%
print(job.look("collectives"), job.look("code"), sep="\n\n")

# %% [markdown]
# **Collectives.** DDP's own buckets of 25 MiB, but three times as many as the gradients fill: the step
# accumulates three micro-batches and reduces after each (`no_sync`, lesson 04). **Code.** Every node waits for
# its loader: more workers, or prefetching. Now cure one at a time.

# %%
CURES = {"as found": (), "node 5 replaced": ("slow_nodes",), "reduced once a step": ("reduced_passes",),
         "InfiniBand, not TCP": ("network",), "loader ahead": ("load_seconds",)}
cured, rows = job, []
for name, causes in CURES.items():
    cured, alone = cured.fixed(*causes), job.fixed(*causes)
    rows.append({"": name, "step, s": cured.step().step_seconds, "times one node": times_as_fast(cured),
                 "this cure alone": times_as_fast(alone)})
display(pd.DataFrame(rows).style.format(precision=2).hide().set_caption("each row keeps the cures above it (simulated)"))
print(f"node 5 replaced, and nothing else: {rows[1]['this cure alone']:.2f} times one node; your bet: {my_bet_times_as_fast:g}")
assert times_as_fast(job) < 3 and times_as_fast(cured) > 7.9, "the planted causes or their cures have changed"

# %% [markdown]
# **The answer.** Four faults, and no single cure reaches 6. Replacing the straggler alone gains little, because
# something slower hides it: the all-reduces. That is no reason to skip it: a cure is worth what it gains *after* the
# others. Once all is cured, nearly all of the all-reduce hides behind backward: only the part that does not counts.
#
# **Question.** Another job of eight nodes: seven show 300 ms in all-reduce after backward, node 3 shows 20 ms. Which
# node do you look at first?

# %%
node_to_look_at = ...
check("11.node_to_look_at", node_to_look_at)

# %% [markdown]
# ### The scoreboard

# %% jupyter={"source_hidden": true}
for name in ("hierarchical", "ring 0, 1, ..., 7"):
    score("11", f"{name}, {format_bytes(NBYTES)} over two hosts, {two_hosts.transport}", step_seconds=raced[name][1])
scoreboard("11")

# %% [markdown]
# ## Recap: what helps when
#
# Look in this order: hardware, network, collectives, code. The rank that waits least is the one to look at.
#
# | take | when | does not help |
# |---|---|---|
# | ring: under $2B$ a rank, $2(N-1)$ starts | large tensors | small tensors, many ranks |
# | tree: whole tensors, $2\log_2 N$ steps | small tensors | bandwidth, unless cut in chunks |
# | hierarchical | links inside a host are faster | hosts with one GPU |
# | larger buckets | a start is expensive | a slow link: bytes stay |
# | smaller buckets | backward is long | latency-bound networks |
# | fewer bytes (bf16 gradients, accumulation) | the link is full | stragglers |
#
# **Test yourself.** Eight nodes are only three times as fast as one. Say what you look at, in which order, with which
# tool.
#
# <details><summary>Answer</summary>
#
# Hardware: clocks, temperature (<code>nvidia-smi</code>), and a matmul on each GPU alone. Network:
# <code>NCCL_DEBUG=INFO</code> for IB or Socket, <code>ib_write_bw</code> port by port, <code>all_reduce_perf</code>'s
# busbw against the rate. Collectives: number and size of all-reduces, what is
# not hidden behind backward. Code: time in the loader, synchronisations such as <code>.item()</code>.
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
# ranks, gradients = dist.get_world_size(), torch.ones(64 * 2**20, device=device)  # 256 MiB
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
# ```
#
# Compare it with a node's ports, all together. Far below: start again with `NCCL_DEBUG=INFO`, and look for `Socket`.
#
# **Is it a node?** In your loop, before `loss.backward()`: until there each rank has loaded and computed alone. It
# costs a stop, so take it out again:
#
# ```python
# import time
# import torch
# import torch.distributed as dist
#
# if torch.cuda.is_available():
#     torch.cuda.synchronize()
# arrived = time.perf_counter()
# dist.barrier()
# waits = [None] * dist.get_world_size()
# dist.all_gather_object(waits, time.perf_counter() - arrived)
# slowest = waits.index(min(waits))  # the rank that waits least
# ```
#
# **Is it the collectives?** Accumulate without sending, and send larger buckets where a start is dear:
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
# With transformers the same is `TrainingArguments(gradient_accumulation_steps=8, ddp_bucket_cap_mb=100)`. The losses
# must not change, and a profiler must show fewer all-reduces a step.
