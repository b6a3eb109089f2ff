"""Training jobs on eight nodes that are slower than they should be, with planted causes.

Everything here is simulated: a step of data parallelism from a few numbers, and what the usual tools
would show of it. All nodes load, compute, and all-reduce their gradients in buckets while backward
goes on. A collective begins when the last node is there, so one late node makes all of them late.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from utils.traffic.cost import AlphaBeta
from utils.units import MIB

NODES, GPUS = 8, 8
FORWARD_SECONDS, BACKWARD_SECONDS = 0.18, 0.36
GRADIENT_BYTES = 2_600_000_000  # of 1.3 billion parameters in bf16
TENSORS = 218  # that hold them: DDP splits none, so there are no more buckets
# A node's way out: start of an all-reduce over eight nodes, and bytes per second.
INFINIBAND = AlphaBeta(50e-6, 160e9)  # eight ports of 200 Gb/s, at 80%
TCP = AlphaBeta(70e-6, 10e9)  # sockets over one port of 100 Gb/s, at 80%
DDP_BUCKET_BYTES = 25 * MIB
CLOCK_MHZ, TEMPERATURE = 1980, 58


class Stretch(NamedTuple):
    """What a node did from `start_seconds` to `end_seconds` of a step."""

    kind: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Trace:
    """One step of a job, by node.

    Attributes:
        stretches: What each node did, one after the other.
        buckets: All-reduces in a step.
        network_busy_seconds: That all-reduces would take alone.
        step_seconds: From the first load to the last node's end.
    """

    stretches: tuple[tuple[Stretch, ...], ...]
    buckets: int
    network_busy_seconds: float
    step_seconds: float

    def seconds(self, kind: str) -> list[float]:
        """How long each node spent on one kind of thing."""
        return [
            sum(s.end_seconds - s.start_seconds for s in node if s.kind == kind)
            for node in self.stretches
        ]


@dataclass(frozen=True)
class SlowJob:
    """A job and what is wrong with it; `step` runs it, `look` shows it through a tool.

    Attributes:
        slow_nodes: Node -> how many times longer its GPUs compute.
        network: Cost of an all-reduce of the nodes' gradients, by its bytes.
        weak_ports: Node -> share of its bandwidth that is left.
        bucket_bytes: Of an all-reduce; at least a tensor's share of the gradients.
        reduced_passes: Backward passes of a step that all-reduce; more than one where gradients are
            accumulated without `no_sync`.
        load_seconds: That a step waits for data, on every node or, by node, on some.
    """

    slow_nodes: tuple[tuple[int, float], ...] = ()
    network: AlphaBeta = INFINIBAND
    weak_ports: tuple[tuple[int, float], ...] = ()
    bucket_bytes: int = DDP_BUCKET_BYTES
    reduced_passes: int = 1
    load_seconds: tuple[tuple[int, float], ...] = ()
    nodes: int = NODES

    def __post_init__(self) -> None:
        """Raises ValueError where a bucket would be smaller than a tensor."""
        if GRADIENT_BYTES / self.bucket_bytes > TENSORS:
            least = GRADIENT_BYTES / TENSORS / MIB
            raise ValueError(
                f"A bucket of {self.bucket_bytes / MIB:.2f} MiB: DDP splits no tensor, and "
                f"theirs are of {least:.1f} MiB on average."
            )

    def fixed(self, *causes: str) -> SlowJob:
        """The same without these causes: fields by name."""
        healthy = SlowJob()
        return replace(self, **{cause: getattr(healthy, cause) for cause in causes})

    def step(self) -> Trace:
        """One step, as a profiler on every node would see it."""
        slow, load = dict(self.slow_nodes), dict(self.load_seconds)
        starts, ends = [], []
        for node in range(self.nodes):
            starts.append(load.get(node, 0.0))
            ends.append(starts[-1] + (FORWARD_SECONDS + BACKWARD_SECONDS) * slow.get(node, 1.0))
        buckets = max(1, round(GRADIENT_BYTES / self.bucket_bytes)) * self.reduced_passes
        busy, finish = self._all_reduces(buckets, ends, slow)
        rows = [
            self._node(node, starts[node], ends[node], max(ends), finish, slow)
            for node in range(self.nodes)
        ]
        return Trace(tuple(rows), buckets, busy, max(finish, *ends))

    def _all_reduces(
        self, buckets: int, ends: list[float], slow: dict[int, float]
    ) -> tuple[float, float]:
        """Seconds that all buckets take alone, and when the last one is done."""
        if self.nodes == 1:
            return 0.0, 0.0
        port = min([1.0, *(share for _, share in self.weak_ports)])
        payload = self.reduced_passes * GRADIENT_BYTES / buckets
        crossing = 2 * (self.nodes - 1) / self.nodes * payload
        each = self.network.alpha_seconds + crossing / (self.network.bytes_per_second * port)
        free = 0.0
        for number in range(1, buckets + 1):  # a bucket goes when the last node has filled it
            left = 1 - number / buckets
            ready = max(
                end - left * BACKWARD_SECONDS * slow.get(node, 1.0) for node, end in enumerate(ends)
            )
            free = max(free, ready) + each
        return buckets * each, free

    def _node(
        self,
        node: int,
        start: float,
        end: float,
        last: float,
        finish: float,
        slow: dict[int, float],
    ) -> tuple[Stretch, ...]:
        middle = start + FORWARD_SECONDS * slow.get(node, 1.0)
        parts = [
            ("loading", 0.0, start),
            ("forward", start, middle),
            ("backward", middle, end),
            ("waiting for a node", end, last),
            ("all-reduce, not hidden", last, finish),
        ]
        return tuple(Stretch(*part) for part in parts if part[2] > part[1])

    def look(self, at: str) -> str:
        """What the tools of one layer print: "hardware", "network", "collectives" or "code".

        Raises:
            ValueError: no such layer.
        """
        looks = {
            "hardware": self._hardware,
            "network": self._network,
            "collectives": self._collectives,
            "code": self._code,
        }
        if at not in looks:
            raise ValueError(f"There is no layer {at!r}: look at {', '.join(looks)}.")
        return looks[at]()

    def _hardware(self) -> str:
        slow = dict(self.slow_nodes)
        rows = ["nvidia-smi, the hottest GPU of each node:    SM clock   temperature   ECC errors"]
        for node in range(self.nodes):
            times = slow.get(node, 1.0)
            heat = TEMPERATURE + node % 3 + (27 if times > 1 else 0)
            rows.append(f"  node {node} {CLOCK_MHZ / times:44,.0f} MHz {heat:9d} °C {0:10d}")
        return "\n".join(rows)

    def _network(self) -> str:
        weak = dict(self.weak_ports)
        over_ib = self.network.bytes_per_second > 2 * TCP.bytes_per_second
        line = (
            "NET/IB : Using [0]mlx5_0:1/IB ... [7]mlx5_7:1/IB; OOB eth0"
            if over_ib
            else "NET/IB : No device found.\n  NCCL INFO NET/Socket : Using [0]eth0"
        )
        rows = [
            f"NCCL_DEBUG=INFO, node 0:\n  NCCL INFO {line}",
            "ib_write_bw --report_gbits, each port to the next node, mean of 8, Gb/s:",
        ]
        port = 8 * INFINIBAND.bytes_per_second / GPUS / 0.8 / 1e9 * 0.985  # of the line rate
        rates = "  ".join(f"{node}: {port * weak.get(node, 1.0):.1f}" for node in range(self.nodes))
        return "\n".join([*rows, f"  {rates}"])

    def _collectives(self) -> str:
        trace = self.step()
        each = self.reduced_passes * GRADIENT_BYTES / trace.buckets
        took = trace.network_busy_seconds / trace.buckets
        kernel = [
            w + e
            for w, e in zip(
                trace.seconds("waiting for a node"),
                trace.seconds("all-reduce, not hidden"),
                strict=True,
            )
        ]
        rows = "  ".join(f"{node}: {1e3 * seconds:.0f}" for node, seconds in enumerate(kernel))
        return (
            f"gradients: {GRADIENT_BYTES / MIB:,.0f} MiB; {trace.buckets:,} all-reduces a step of {each / MIB:.1f} MiB each, "
            f"{1e6 * took:,.0f} µs each when all nodes are there\n"
            f"milliseconds in all-reduce after backward, as a node's profiler shows them:\n  {rows}"
        )

    def _code(self) -> str:
        waits = self.step().seconds("loading")
        rows = "  ".join(f"{node}: {1e3 * seconds:.0f}" for node, seconds in enumerate(waits))
        return f"milliseconds in next(iter(loader)), GPU idle:\n  {rows}"


def lesson_job() -> SlowJob:
    """The job of the lesson, with four causes."""
    return SlowJob(
        slow_nodes=((5, 1.35),),
        network=TCP,
        reduced_passes=3,
        load_seconds=tuple((node, 0.1) for node in range(NODES)),
    )


def unknown_job(name: str) -> SlowJob:
    """A job of the lab: "A", "B" or "C".

    Raises:
        ValueError: there is no job of that name.
    """
    jobs = {
        "A": SlowJob(load_seconds=((2, 0.22),), bucket_bytes=12 * MIB),
        "B": SlowJob(reduced_passes=32),
        "C": SlowJob(weak_ports=((6, 0.05),), slow_nodes=((1, 1.02),)),
    }
    if name not in jobs:
        raise ValueError(f"There is no job {name!r}; there are A, B and C.")
    return jobs[name]
