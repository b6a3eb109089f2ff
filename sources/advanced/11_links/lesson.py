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
# **Promise.** You write a ring all-reduce over `send` and `recv`, and count every byte of it. You predict what a
# message costs, build two hosts with a slow link between them, and beat a flat ring on it. At the end a job on eight
# nodes runs less than three times as fast as on one, and you find the four causes.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (Linux, macOS, WSL2) | under a minute of computing on two CPU cores |

# %% [markdown]
# ## A bet
#
# Two hosts, four ranks each, one link of 200 Mbit/s between them. All eight ranks add up a tensor. A *flat*
# ring goes 0, 1, ..., 7 and back to 0. A *hierarchical* all-reduce adds up inside each host first. How
# many times fewer bytes does it put on the link? Write your guess. Section 4 counts.

# %%
my_bet_times_fewer = 1

# %% tags=["setup"]
here = setup("advanced/11")

# %%
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
from utils.traffic.cost import AlphaBeta, bus_bytes_per_second, overlapped_seconds
from utils.lessons.lesson_11 import algorithms
from utils.lessons.lesson_11.hosts import run_hosts
from utils.lessons.lesson_11.link_costs import draw_link_costs
from utils.lessons.lesson_11.messages import draw_messages
from utils.lessons.lesson_11.wire import Wire, messages

RANKS = 8

# %% [markdown]
# ## 1. A ring by hand
#
# Every rank talks to its neighbours alone: it sends to the right and receives from the left. Cut the
# tensor into $N$ parts. In each of $N - 1$ steps a rank passes on a part, and adds its own numbers to the one that
# comes in. Then part $r$ is complete on rank $r$: a **reduce-scatter**. In $N - 1$ more steps the complete
# parts go round: an **all-gather**. Together they are an **all-reduce**
# ([Patarasuk and Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)). New words stand in the
# [glossary](../00_glossary.ipynb).
#
# `wire.exchange` is `work = dist.isend(part, right)`, `dist.recv(into, left)`, `work.wait()`. Both at once, and in this
# order: if all ranks first waited to receive, nobody would send. The wire notes who sent what to whom.

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


ring = run_ranks(by_hand, RANKS, ring_all_reduce)
hops = messages([moves for moves, _, _ in ring])
show(draw_messages(hops, title="Ring all-reduce of 8 ranks: first 7 steps add up, last 7 hand round"),
     alt="Fourteen grids, one a step. In each, every rank sends one part to its right neighbour. In the first seven the "
     "parts are sums under way, in the last seven they are complete.")

# %% tags=["nbval-check-output"]
B = 512 * 8
for rank, (_, apart, sent_bytes) in enumerate(ring):
    assert apart < 1e-12, f"rank {rank} is {apart} from gloo: does every part pass every rank once?"
    assert sent_bytes == 2 * (RANKS - 1) * B // RANKS, f"rank {rank} sent {sent_bytes} bytes"
assert {(m.target - m.source) % RANKS for m in hops} == {1}, "somebody sent past its neighbour"
print(f"{len(hops)} messages in {hops[-1].step} steps, every one to the right neighbour")
print(f"each rank sent 2 (N - 1) / N x B = {ring[0][2]:,} bytes, B = {B:,} (counted); gloo's result to 1e-12")

# %% [markdown]
# **Read it.** One square in each row and each column: in every step all links are busy, and no link carries two
# messages. A rank sends $2(N-1)/N \cdot B$ bytes, less than $2B$ *however many ranks there are*. The price
# is steps: $2(N - 1)$.
#
# **Trap.** A right result proves no ring. The reference solution of one well-known course passed the *whole* tensor
# round: right sums, and N times the bytes
# ([ARENA 3.0, pull request 407](https://github.com/callummcdougall/ARENA_3.0/pull/407)). It also hung on GPUs, where a
# send waits behind its neighbour's receive: there, hand both to `dist.batch_isend_irecv`. So the cell above asserts
# bytes *and* neighbours, and lab exercise 4 makes a test of it.
#
# **Question.** 64 ranks, 1 GB of gradients. How many GB does each rank send?

# %%
ring_of_64_gb = ...
check("11.ring_of_64", ring_of_64_gb)

# %% [markdown]
# ## 2. Trees, and the rest
#
# In a **binomial tree** ranks add up in pairs, then pairs of pairs, up to rank 0, and the sum comes down the same way.
# That is $2 \log_2 N$ steps, and whole tensors in each. The course's package has rings, trees and the other
# collectives, over the same wire.

# %%
tree = messages([moves for moves, _, _ in run_ranks(by_hand, RANKS, algorithms.tree_all_reduce)])
show(draw_messages(tree, title="Tree all-reduce of 8 ranks: up in three steps, down in three"),
     alt="Six grids. In the first, ranks 4 to 7 send the whole tensor to ranks 0 to 3, then 2 and 3 to 0 and 1, then "
     "1 to 0; the last three go the same way back.")

# %%
def all_kinds():
    rank, wire, same, moves = dist.get_rank(), Wire(), {}, {}
    x = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    def compare(name, ours, run_gloo, *shape):
        wire.moves.clear()
        result, expected = ours(wire, x.clone()), torch.empty(shape, dtype=x.dtype)
        run_gloo(expected)
        same[name] = ((result - expected).abs().max() / expected.abs().max()).item()
        moves[name] = list(wire.moves)

    compare("all-gather", algorithms.ring_all_gather, lambda e: dist.all_gather_into_tensor(e, x), 512, 8)
    compare("reduce-scatter", algorithms.ring_reduce_scatter, lambda e: dist.reduce_scatter_tensor(e, x.clone()), 8, 8)
    compare("all-to-all", algorithms.all_to_all, lambda e: dist.all_to_all_single(e, x), 64, 8)
    compare("all-reduce, tree", algorithms.tree_all_reduce, lambda e: dist.all_reduce(e.copy_(x)), 64, 8)
    return same, moves


kinds = run_ranks(all_kinds, RANKS)

# %% tags=["nbval-check-output"]
B, N = 64 * 8 * 8, RANKS
FORMULAS = {"all-gather": (N - 1, (N - 1) * B), "reduce-scatter": (N - 1, (N - 1) * B // N),
            "all-to-all": (N - 1, (N - 1) * B // N), "all-reduce, tree": (2 * int(math.log2(N)), 3 * B)}
print(f"{'':18}{'steps':>6} {'formula':>8} {'most bytes sent':>16} {'formula':>9}  from gloo")
for name, (steps, most) in FORMULAS.items():
    found = messages([moves[name] for _, moves in kinds])
    sent = [sum(m.bytes for m in found if m.source == rank) for rank in range(N)]
    apart = max(same[name] for same, _ in kinds)
    print(f"{name:18}{found[-1].step:>6} {steps:>8} {max(sent):>16,} {most:>9,}  {'to the bit' if apart == 0 else 'to 1e-12'}")
    assert (found[-1].step, max(sent)) == (steps, most), f"{name}: another algorithm than the formula's"
    assert apart < 1e-12, f"{name} differs from gloo's by {apart}"

# %%
rotation = messages([moves["all-to-all"] for _, moves in kinds])
show(draw_messages(rotation, title="All-to-all of 8 ranks: in step k everybody sends to the rank k places on"),
     alt="Seven grids. In each the squares form a diagonal, one place further right in each step, so every rank "
     "talks to every other one once.")

# %% [markdown]
# **Read it.** What only moves numbers is equal to gloo's to the bit. Sums are equal to rounding, because the order of
# adding differs. The tree's root sends $B \log_2 N$ bytes down, more than a ring's rank ever does, in fewer steps.
# All-to-all, which mixtures of experts need, is the one where *everybody* talks to *everybody*: no ring of near links
# helps it.
#
# ### Break it: a collective in another order
#
# Rank 1 gathers first and reduces then; the others do it the other way round. A second mistake is caught before
# anything is sent: ten rows for four ranks.

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


def ten_rows_on_four():
    algorithms.all_to_all(Wire(), torch.ones(10))


try:
    run_ranks(ten_rows_on_four, 4)
except RankError as error:
    print(str(error).partition("\n")[0])

# %% [markdown]
# On GPUs the first mistake says nothing for ten minutes: NCCL waits, until PyTorch's timeout ends the job. PyTorch's
# flight recorder keeps the last collectives of every rank, to be compared; `TORCH_FR_BUFFER_SIZE` says how many.
#
# ## 3. What a message costs
#
# The **alpha-beta model**: a message of $n$ bytes takes $\alpha + n\beta$ seconds: a start, and a time for each byte.
# Two ranks send a message there and back; half of that is one way. We keep the fastest of fifteen: other programs can
# only add time.

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

# %%
show(draw_link_costs({"two ranks": points}, {"two ranks": mine}, title="One message between two ranks of this machine"),
     alt="Time over message size, both logarithmic: nearly flat at first, then rising in proportion to the "
     "size, with the fitted line through the points.")

# %% [markdown]
# **Read it.** Left of the dotted line, at $\alpha / \beta$ bytes, a message is **latency-bound**: half the bytes save
# less than a quarter of the time. Right of it, it is **bandwidth-bound**. The line is fitted to the points you see, so
# their nearness is no proof. `make bench` fits every second size and predicts the others.
#
# Put into the formulas of sections 1 and 2, with $N$ ranks: a ring costs $2(N-1)\alpha + 2\frac{N-1}{N} B\beta$, a tree
# $2 \log_2 N\,(\alpha + B\beta)$.

# %%
def ring_seconds(cost, ranks, nbytes):
    return cost.seconds(2 * (ranks - 1) / ranks * nbytes, starts=2 * (ranks - 1))


def tree_seconds(cost, ranks, nbytes):
    return 2 * math.ceil(math.log2(ranks)) * cost.seconds(nbytes)


# Start of a ring's message, microseconds (Simple protocol): what NCCL 2.30 of June 2026 counts with in its file
# src/graph/tuning.cc, commit 5067397c.
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
# **Read it.** Rates are line rates in one direction; NVLink's data sheet says 900 GB/s for both. NCCL's model has one
# start for every network; over TCP a real one is longer. A tree wins for small tensors, a ring for large ones. NCCL
# chooses by such a model, and its trees cut the tensor into chunks, so that they lose less than ours. `NCCL_ALGO=Ring`
# or `Tree` forces one: to measure, not to keep.
#
# `nccl-tests` prints two bandwidths. **algbw** is size over time. **busbw** is algbw times $2(N-1)/N$ for an
# all-reduce, $(N-1)/N$ for an all-gather: what a link carried, comparable to its rate whatever $N$. Here are ours. At
# 16 KiB hardly any of the time is bytes, so both are low. With larger tensors they rise. Beside the time stands what the
# ring's formula says with the $\alpha$ and $\beta$ that two ranks had for themselves. Here four share this machine's
# memory and cores, and add and copy besides: a formula from an idle link is a lower bound.

# %%
def as_nccl_tests():
    wire, seconds = Wire(), {2**power: [] for power in (14, 17, 20, 22)}
    for size in list(seconds) * 30:
        x = torch.ones(size // 4)
        dist.barrier()
        start = time.perf_counter()
        ring_all_reduce(wire, x)
        seconds[size].append(time.perf_counter() - start)
    return [(size, min(each)) for size, each in seconds.items()]


print(f"{'size (B)':>10} {'time (us)':>10} {'formula (us)':>13} {'algbw (GB/s)':>13} {'busbw (GB/s)':>13}   4 ranks, this machine (measured, best of 30)")
for size, seconds in run_ranks(as_nccl_tests, 4)[0]:
    bus = bus_bytes_per_second("all-reduce", 4, size, seconds)
    formula = 1e6 * ring_seconds(mine, 4, size)
    print(f"{size:>10,} {1e6 * seconds:>10,.0f} {formula:>13,.0f} {size / seconds / GB:>13.3f} {bus / GB:>13.3f}")

# %% [markdown]
# ## 4. Two hosts
#
# Now a slow link. `run_hosts` makes two *network namespaces* of Linux: each has its own network interfaces, and one
# virtual cable joins them. The kernel's token bucket (`tc tbf`) limits it to 200 Mbit/s in each direction. Ranks 0 to 3
# live on host 0, 4 to 7 on host 1. When the cell ends, both are gone. Where this is not possible (macOS, Colab,
# Binder), all ranks stay on one host, and a message to the "other" waits as long as such a link would be busy. The cell
# says which it was.

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
    return found, ping(wire, 4, [2**power for power in range(16, 23, 2)], repeats=3)


two_hosts = run_hosts(race, 4, megabits_per_second=MEGABITS)
print(f"transport: {two_hosts.transport}. {two_hosts.why}")

# %%
raced, slow_points = two_hosts.results[0]
print(f"one large message over the link: {8 * slow_points[-1][0] / slow_points[-1][1] / 1e6:.0f} Mbit/s (measured) of {MEGABITS} asked for")
over_link, rows = {}, []
for name in WAYS:
    found = messages([result[0][name][0] for result in two_hosts.results])
    over_link[name] = sum(m.bytes for m in found if m.source < 4 <= m.target)
    _, seconds, kernel, is_right = raced[name]
    assert is_right, f"{name} gave a wrong sum"
    rows.append({"": name, "steps": found[-1].step, "host 0 to 1, MB (counted)": over_link[name] / 1e6,
                 "in B": over_link[name] / NBYTES, "by the kernel, MB": (kernel or math.nan) / 1e6,
                 f"at {MEGABITS} Mbit/s, ms (predicted)": 1e3 * over_link[name] / (MEGABITS / 8 * 1e6), "ms (measured, best of 3)": 1e3 * seconds})
display(pd.DataFrame(rows).style.format(precision=2, na_rep="-").hide().set_caption(f"B = {format_bytes(NBYTES)}, {two_hosts.transport}"))
ratio = over_link["ring 0, 1, ..., 7"] / over_link["hierarchical"]
print(f"the flat ring puts {ratio:.2f} times as many bytes on the link (counted); your bet: {my_bet_times_fewer}")

# %% tags=["nbval-check-output"]
in_b = {name: size / NBYTES for name, size in over_link.items()}
for name, times in in_b.items():
    print(f"{name:<20} {times:g} x B over the link, one direction (counted)")
assert in_b == {"ring 0, 4, 1, 5, ...": 7, "ring 0, 1, ..., 7": 1.75, "hierarchical": 1}, "who talks over the link?"

# %%
layers = messages([result[0]["hierarchical"][0] for result in two_hosts.results])
show(draw_messages(layers, title="Hierarchical all-reduce: two hosts of four ranks", across=8, hosts=2),
     alt="Eight grids, parted by lines between the hosts. Three steps inside each host, two across, with half "
     "of a part each, and three inside again.")

# %% [markdown]
# **Read it.** The flat ring carries $2\frac{N-1}{N}B$ over its one hop from host to host. The hierarchical one reduces
# inside each host, and only the host's sums cross: $2\frac{H-1}{H}B$ for $H$ hosts, all ranks of a host together.
# *Order* matters more: a ring that changes hosts at every hop puts seven times $B$ there. So launchers number ranks
# host by host, and NCCL reads the topology before it makes rings. The kernel counts a few percent more than we do:
# headers, and barriers. All three take longer than the link alone would: eight ranks share a few cores, and the link
# idles while a host adds up.
#
# **Question.** 8 hosts of 8 ranks. How many times fewer bytes does the hierarchical all-reduce put on a host's link?

# %%
fewer_on_64 = ...
check("11.fewer_on_64", fewer_on_64)

# %% [markdown]
# ## 5. Buckets and overlap
#
# DDP does not wait for the end of backward. It fills **buckets** with gradients and all-reduces each while backward
# goes on. Here, on two hosts of one rank: sixteen layers, each "computes" 8 ms (it sleeps, as a GPU would leave the CPU
# free), then has 128 KiB of gradient. A thread all-reduces what is ready.

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
BUCKETS, STARTS_MORE = (1, 2, 4, 8, 16), (0.0, 0.010)


def seconds_alone(wire, nbytes):
    dist.barrier()
    start = time.monotonic()
    ring_all_reduce(wire, torch.ones(nbytes // 4))
    return time.monotonic() - start


def sweep_buckets(wire):
    alone = [(layers * LAYER_BYTES, seconds_alone(wire, layers * LAYER_BYTES)) for layers in (*BUCKETS, *BUCKETS)]
    runs = {(more, layers): [train_step(wire, layers, more) for _ in range(4)] for more in STARTS_MORE for layers in BUCKETS}
    return alone, {case: min(each, key=lambda run: run[1]) for case, each in runs.items()}


# %%
alone, stepped = run_hosts(sweep_buckets, 1, megabits_per_second=MEGABITS).results[0]
lanes = {}
for layers in (1, 4, 16):
    for kind in ("backward", "all-reduce"):
        spans = [span for span in stepped[0.0, layers][0] if span.kind == kind]
        first = min(span.start_seconds for span in stepped[0.0, layers][0] if span.kind == "backward")
        lanes[f"{kind}, {layers} a bucket"] = [Span(kind, s.start_seconds - first, s.end_seconds - first) for s in spans]
show(draw_lanes(lanes, title="Backward and all-reduce, side by side", device="two hosts"),
     alt="Three pairs of lanes. With one layer a bucket many short all-reduces run along with backward; with all 16 in one "
     "bucket the single all-reduce begins when backward ends.")

# %%
bucket_cost = fit_alpha_beta(*zip(*alone, strict=True))
ends = [LAYER_SECONDS * (number + 1) for number in range(LAYERS)]


def predicted_ms(layers, more):
    cost = bucket_cost._replace(alpha_seconds=bucket_cost.alpha_seconds + more)
    return 1e3 * overlapped_seconds(ends, [LAYER_BYTES] * LAYERS, layers * LAYER_BYTES, cost.seconds)


columns = {"bucket": [format_bytes(layers * LAYER_BYTES) for layers in BUCKETS]}
for more, name in zip(STARTS_MORE, ("this link", "10 ms more a start"), strict=True):
    columns[f"{name}, predicted"] = [predicted_ms(layers, more) for layers in BUCKETS]
    columns[f"{name}, measured"] = [1e3 * stepped[more, layers][1] for layers in BUCKETS]
    best = [BUCKETS[row.index(min(row))] for row in list(columns.values())[-2:]]
    print(f"{name}: the step is shortest with {best[0]} (predicted) or {best[1]} (measured) of the layers in a bucket")
table = pd.DataFrame(columns, index=pd.Index(BUCKETS, name="layers a bucket"))
display(table.style.format(precision=0).set_caption("ms for backward and all-reduces, best of 4, noisy on a shared machine; backward alone sleeps 128"))

# %% [markdown]
# **Read it.** The prediction takes the cost of one all-reduce alone, and lets them queue beside backward. One bucket
# for all hides nothing. Small ones hide nearly everything where a start is cheap; where it is dear, starts add up and a
# middle size wins. At work the size is one argument, and 25 MiB is its default:
#
# ```python
# model = DistributedDataParallel(model, bucket_cap_mb=100)  # for a network where a start is dear
# ```
#
# ## 6. Reading the tools
#
# These lines were printed on real clusters. The sources are linked; we shortened them.
#
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
# *IB* here means RDMA, over InfiniBand or, as in the second job, over Ethernet (RoCE). *Socket* means TCP. *OOB* is the
# interface over which ranks find each other, and no more. `NCCL_SOCKET_IFNAME` chooses it, and *Socket*'s: its value is a prefix
# (`ens`), an exact name after a `=` (`=ens1f0`), or what to leave out (`^docker`). Later lines tell each pair's way:
# `via P2P/IPC` inside a node ([nccl 398](https://github.com/NVIDIA/nccl/issues/398)), `[send] via NET/IB/2/GDRDMA` from
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
# `SYS`: from one NUMA node, a CPU socket or part of one, to another. A GPU wants a NIC at `PIX` or `PXB`.
#
# **Question.** Which NIC should GPU2 use: 0 or 2?

# %%
nic_of_gpu2 = ...
check("11.nic_of_gpu2", nic_of_gpu2)

# %% [markdown]
# **`ib_write_bw`** tests one port without NCCL. Eight-byte messages
# ([perftest 273](https://github.com/linux-rdma/perftest/issues/273)):
#
# ```
#  #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
#  8          224958464        0.00               0.48               7.498617
# ```
#
# 8 bytes x 8 bits x 7.498617 million a second: 0.48 Gb/s. This says nothing about the *port*: such messages are all
# overhead of a message, hardly any bytes. (224,958,464 iterations in 60 s would be half that rate: so the thread asks.)
# Test with 64 KiB or more.
#
# **`all_reduce_perf`** of nccl-tests, size, time, algbw and busbw
# ([NVIDIA/nccl 1453](https://github.com/NVIDIA/nccl/issues/1453)):
#
# ```
#      size (B)    time (us)   algbw (GB/s)   busbw (GB/s)
#      33554432       2180.1          15.39          29.50
#      67108864        24410           2.75           5.27
#     134217728        49264           2.72           5.22
# ```
#
# Twice the size takes eleven times as long: no alpha-beta line does that. Something changes at 64 MiB, such as
# algorithm, protocol or a congested network. For a fair figure of the network between two nodes, NVIDIA advises
# `NCCL_ALGO=RING`, and to expect 46-48 GB/s for each port of 400 Gb/s
# ([nccl-tests 290](https://github.com/NVIDIA/nccl-tests/issues/290)).
#
# **Question.** How many ranks did this run have? The ratio of the two bandwidths tells.

# %%
ranks_of_that_run = ...
check("11.ranks_of_that_run", ranks_of_that_run)

# %% [markdown]
# ## 7. Eight nodes, three times as fast
#
# A simulated job: 1.3 billion parameters, 2.6 GB of gradients a step, nodes of eight GPUs and eight ports of 200 Gb/s.
# A healthy node takes 0.54 s a step. Eight should take as long with eight times the data: 8 times as fast.

# %%
job, healthy = lesson_job(), SlowJob()
one_node = SlowJob(nodes=1).step().step_seconds


def times_as_fast(job):
    return 8 * one_node / job.step().step_seconds


def draw_job(job, title):
    lanes = {f"node {number}": [Span(*stretch) for stretch in row] for number, row in enumerate(job.step().stretches)}
    return draw_lanes(lanes, title=f"{title}: {times_as_fast(job):.1f} times one node", evidence=Evidence.SIMULATED)


show(draw_job(job, "One step of the slow job"),
     alt="Eight lanes, one a node: loading, forward, backward, then a long all-reduce. Node 5 computes longer, and the "
     "others wait for it.")

# %% [markdown]
# Where do you begin? Seven of eight nodes spend most of the step in the all-reduce, waiting included, so the network
# looks guilty. But **a collective's time includes waiting for the last one to come**. Hence the order: hardware,
# network, collectives, code. Each layer is judged by a test that needs none above it.

# %%
print(job.look("hardware"))
print()
print(job.look("network"))

# %% [markdown]
# **Hardware.** Node 5 is hot and slow, so it is the *straggler*. In the picture the others
# wait for it, and it waits for none: counted with its waiting, its all-reduce is the *shortest*. **Network.** The ports are well, 197 of 200 Gb/s, but NCCL does not use them: it speaks
# TCP over `eth0`. One cause of that is a container that was not given the InfiniBand devices.

# %%
print(job.look("collectives"))
print()
print(job.look("code"))

# %% [markdown]
# **Collectives.** The buckets are DDP's own, of 25 MiB, but three times as many as the gradients fill: the step
# accumulates three micro-batches and reduces after each (`no_sync`, lesson 04). **Code.** Every node waits for
# its loader with the GPU idle: more workers, or prefetching. Now cure one at a time.

# %%
CURES = {"as found": (), "node 5 replaced": ("slow_nodes",), "reduced once a step": ("reduced_passes",),
         "InfiniBand, not TCP": ("network",), "loader ahead": ("load_seconds",)}
cured, rows = job, []
for name, causes in CURES.items():
    cured, alone = cured.fixed(*causes), job.fixed(*causes)
    rows.append({"": name, "step, s": cured.step().step_seconds, "times one node": times_as_fast(cured),
                 "this cure alone": times_as_fast(alone)})
display(pd.DataFrame(rows).style.format(precision=2).hide().set_caption("each row keeps the cures above it (simulated)"))
assert times_as_fast(job) < 3 and times_as_fast(cured) > 7.9, "the planted causes or their cures have changed"

# %% [markdown]
# **Read it.** Replacing the straggler alone gains little, because something slower hides it: the all-reduces. That is
# no reason to skip it: a cure is worth what it gains *after* the others. And nearly all of an all-reduce can hide
# behind backward. What counts is the part that is not hidden.
#
# **Question.** Another job of eight nodes: seven show 300 ms in all-reduce after backward, node 3 shows 20 ms. Which
# node do you look at first?

# %%
node_to_look_at = ...
check("11.node_to_look_at", node_to_look_at)

# %% [markdown]
# ## What helps when
#
# | take | when | costs | does not help |
# |---|---|---|---|
# | ring | large tensors | $2(N-1)$ starts | small tensors, many ranks |
# | tree | small tensors | whole tensors in each step | bandwidth, unless cut in chunks |
# | hierarchical | links inside a host are faster | three phases | hosts with one GPU |
# | larger buckets | a start is expensive | less overlap | a slow link: bytes stay |
# | smaller buckets | backward is long | more starts | latency-bound networks |
# | fewer bytes (bf16 gradients, accumulation) | the link is full | rounding; a larger batch | stragglers |

# %% [markdown]
# ### The scoreboard

# %%
score("11", f"hierarchical, {format_bytes(NBYTES)} over two hosts, {two_hosts.transport}", step_seconds=raced["hierarchical"][1])
score("11", f"flat ring, {format_bytes(NBYTES)} over two hosts, {two_hosts.transport}", step_seconds=raced["ring 0, 1, ..., 7"][1])
scoreboard("11")

# %% [markdown]
# ## Recap
#
# - A ring rank sends less than $2B$ whatever $N$, in $2(N-1)$ steps. A tree takes $2\log_2 N$ steps of whole tensors.
# - A message costs a start and its bytes. Find out which side of $\alpha/\beta$ yours is on.
# - On slow links count the bytes that cross: order of ranks first, then hierarchy.
# - Slow job: hardware, network, collectives, code. The rank that waits least is the one to look at.
#
# ### Test yourself
#
# Eight nodes are only three times as fast as one. Say what you look at, in which order, with which tool. Then open the
# answer.
#
# <details><summary>Answer</summary>
#
# Hardware: clocks, temperature (<code>nvidia-smi</code>), and a matmul on each GPU alone. Network:
# <code>NCCL_DEBUG=INFO</code> for IB or Socket,
# <code>ib_write_bw</code> port by port, <code>all_reduce_perf</code>'s busbw against the rate. Collectives: number and size of all-reduces, what is
# not hidden behind backward. Code: time in the loader, synchronisations such as <code>.item()</code>.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/advanced/11_links.ipynb), in a copy: `make my-labs` makes one. When you are done, compare with
# the [solution](../../solutions/advanced/11_links.ipynb).
#
# **References.** Patarasuk and Yuan 2009, [doi:10.1016/j.jpdc.2008.09.002](https://doi.org/10.1016/j.jpdc.2008.09.002).
# Thakur, Rabenseifner and Gropp 2005, [doi:10.1177/1094342005051521](https://doi.org/10.1177/1094342005051521). Li and
# others 2020, *PyTorch Distributed*, [arXiv:2006.15704](https://arxiv.org/abs/2006.15704). NVIDIA,
# [nccl-tests on bandwidths](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md),
# [NCCL's environment variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
