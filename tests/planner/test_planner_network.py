"""Collectives by message, group and place: what must hold whatever the constants are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.catalog import Link
from utils.planner import (
    Batch,
    Cluster,
    Plan,
    Storage,
    cost,
    estimate,
    framework,
    goodput,
    step_time,
)
from utils.planner.step_seconds.collectives import (
    TREE_CHUNK_BYTES,
    TREE_SHARE,
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    broadcast_seconds,
    ring_all_reduce_seconds,
    send_seconds,
    tree_all_reduce_seconds,
    tree_chunk_bytes,
)
from utils.units import GB, MIB

Collective = Callable[[Cluster, Group, float], float]
COLLECTIVES: dict[str, Collective] = {
    "all-gather": all_gather_seconds,
    "all-reduce": all_reduce_seconds,
    "all-to-all": all_to_all_seconds,
    "broadcast": broadcast_seconds,
}
NAMES = st.sampled_from(sorted(COLLECTIVES))
PORT = st.sampled_from([1.25, 3.125, 12.5, 25.0, 50.0])
PORTS = st.sampled_from([1, 2, 4, 8])
STRIDES = st.sampled_from([1, 2, 4, 8])
SIZES = st.floats(1.0, 1e10)
GPUS = st.sampled_from(["A100-80GB", "H100", "B200", "A10"])
KINDS = st.sampled_from(["InfiniBand", "RoCE", "EFA", "TCP"])


def _cluster(gpu: str, ports: int, port_gb: float, kind: str = "InfiniBand") -> Cluster:
    return Cluster(
        gpu=gpu,
        nodes=128,
        network_bytes_per_second=ports * port_gb * GB,
        network_ports=ports,
        network_kind=kind,
    )


@settings(max_examples=150, deadline=None)
@given(
    name=NAMES,
    gpu=GPUS,
    ports=PORTS,
    port=PORT,
    kind=KINDS,
    stride=STRIDES,
    ranks=st.integers(2, 128),
    size=SIZES,
    more=st.floats(1.0, 100.0),
)
def test_time_never_falls_as_bytes_rise(name, gpu, ports, port, kind, stride, ranks, size, more):
    cluster, group = _cluster(gpu, ports, port, kind), Group(ranks, stride)
    one, other = (COLLECTIVES[name](cluster, group, n) for n in (size, more * size))
    assert other >= one * (1 - 1e-12)


@settings(max_examples=200, deadline=None)
@given(
    name=NAMES,
    gpu=GPUS,
    ports=PORTS,
    port=PORT,
    kind=KINDS,
    stride=STRIDES,
    ranks=st.integers(1, 127),
    more=st.integers(1, 60),
    size=SIZES,
)
def test_time_never_falls_as_ranks_rise(name, gpu, ports, port, kind, stride, ranks, more, size):
    cluster = _cluster(gpu, ports, port, kind)
    few, many = (COLLECTIVES[name](cluster, Group(n, stride), size) for n in (ranks, ranks + more))
    assert many >= few * (1 - 1e-12)


@settings(max_examples=150, deadline=None)
@given(
    name=NAMES,
    gpu=GPUS,
    port=PORT,
    stride=STRIDES,
    ranks=st.integers(2, 128),
    size=SIZES,
    one_port=st.booleans(),
)
def test_time_never_rises_with_ports_or_bandwidth(name, gpu, port, stride, ranks, size, one_port):
    group, found = Group(ranks, stride, one_port), COLLECTIVES[name]
    times = [found(_cluster(gpu, ports, port), group, size) for ports in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    faster = [found(_cluster(gpu, 4, scale * port), group, size) for scale in (1, 1.5, 4)]
    assert faster == sorted(faster, reverse=True)


@settings(max_examples=150, deadline=None)
@given(
    gpu=GPUS,
    ports=PORTS,
    port=PORT,
    kind=KINDS,
    stride=STRIDES,
    ranks=st.integers(2, 128),
    size=SIZES,
)
def test_no_collective_beats_the_line_rate(gpu, ports, port, kind, stride, ranks, size):
    cluster, group = _cluster(gpu, ports, port, kind), Group(ranks, stride)
    link = cluster.node_link_bytes_per_second
    far = group.per_node(cluster) * cluster.network_bytes_per_second_per_gpu
    line = link if group.nodes(cluster) == 1 else min(link, far)
    share = (ranks - 1) / ranks
    assert all_gather_seconds(cluster, group, size) >= share * size / line
    assert all_reduce_seconds(cluster, group, size) >= 2 * share * size / line
    assert broadcast_seconds(cluster, group, size) >= size / line
    assert send_seconds(cluster, True, size) >= size / cluster.port_bytes_per_second


@settings(max_examples=150, deadline=None)
@given(
    name=NAMES,
    gpu=GPUS,
    ports=PORTS,
    port=PORT,
    stride=STRIDES,
    ranks=st.integers(2, 128),
    size=SIZES,
)
def test_two_halves_cost_the_whole_and_one_more_start_at_most(
    name, gpu, ports, port, stride, ranks, size
):
    cluster, group = _cluster(gpu, ports, port), Group(ranks, stride)
    whole, half = (COLLECTIVES[name](cluster, group, n) for n in (size, size / 2))
    start = COLLECTIVES[name](cluster, group, 0.0)
    if name == "all-reduce":  # a start is a tree's or a ring's; the tree's is one of half's chunks
        start = ring_all_reduce_seconds(cluster, group, 0.0)
        tree = tree_all_reduce_seconds(cluster, group, size / 2) if group.nodes(cluster) > 1 else 0
        start = max(start, tree - size / (group.bus_bytes_per_second(cluster) * TREE_SHARE))
    assert 2 * half >= whole * (1 - 1e-12)
    assert 2 * half <= (whole + start) * (1 + 1e-12)


def test_one_megabyte_over_64_ranks_waits_for_no_buffer_of_4_mib() -> None:
    hdr = Cluster(gpu="A100-80GB", nodes=8)
    slow = Cluster(gpu="A100-80GB", nodes=8, network_bytes_per_second=1.25 * GB)
    assert all_reduce_seconds(hdr, Group(64), 1e6) < 1e-3
    assert all_reduce_seconds(slow, Group(64), 1e6) < 10e-3
    assert tree_chunk_bytes(hdr, 1e6) < tree_chunk_bytes(hdr, 1e9) == TREE_CHUNK_BYTES == MIB / 2


def test_trees_are_taken_for_small_messages_over_many_nodes_and_rings_for_large() -> None:
    many, group = Cluster(gpu="A100-80GB", nodes=128), Group(1024)
    for size, sooner in ((1e6, tree_all_reduce_seconds), (1e11, ring_all_reduce_seconds)):
        other = {tree_all_reduce_seconds, ring_all_reduce_seconds} - {sooner}
        assert sooner(many, group, size) == all_reduce_seconds(many, group, size)
        assert sooner(many, group, size) < other.pop()(many, group, size)


@pytest.mark.parametrize(
    ("fields", "ports", "kind"),
    [
        ({}, 8, "InfiniBand"),
        ({"network_bytes_per_second": 12.5 * GB}, 1, "InfiniBand"),
        ({"network_bytes_per_second": 1.25 * GB}, 1, "TCP"),
        ({"network_bytes_per_second": 50 * GB}, 4, "InfiniBand"),
        ({"network_bytes_per_second": 400 * GB, "network_kind": "EFA"}, 8, "EFA"),
        ({"network_bytes_per_second": 50 * GB, "network_ports": 2}, 2, "InfiniBand"),
        ({"gpus_per_node": 1}, 1, "InfiniBand"),
    ],
)
def test_ports_and_kinds_that_nobody_named(fields, ports, kind) -> None:
    cluster = Cluster(gpu="A100-80GB", nodes=4, **fields)
    assert (cluster.ports, cluster.network) == (ports, kind)
    assert math.isclose(ports * cluster.port_bytes_per_second, cluster.network_bytes_per_second)


def test_a_framework_of_one_port_takes_one_of_the_nodes_ports_whole() -> None:
    one = Cluster(gpu="A10", nodes=8, network_bytes_per_second=12.5 * GB)
    four = replace(one, network_ports=4)
    both = [all_gather_seconds(one, Group(64, 1, one_port), 1e10) for one_port in (True, False)]
    assert both[0] == both[1]
    assert all_gather_seconds(four, Group(64, 1, True), 1e10) > 3 * both[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Cluster(gpu="H100", nodes=2, network_ports=0), "network_ports is 0"),
        (lambda: Cluster(gpu="H100", nodes=2, network_ports=2.5), "Nearest: 2 or 3"),
        (lambda: Cluster(gpu="H100", nodes=2, network_ports=9), "9, with 8 GPUs a node. Each GPU"),
        (lambda: Cluster(gpu="H100", nodes=2, network_bytes_per_second=0), "must be above 0"),
        (lambda: Cluster(gpu="H100", nodes=2, network_bytes_per_second=math.inf), "and finite"),
        (lambda: Cluster(gpu="H100", nodes=2, network_kind="carrier pigeon"), "network_kind is"),
        (lambda: Link("none", 0.0, "nobody"), "must be above 0, and finite"),
        (lambda: Link("all", math.inf, "nobody"), "must be above 0, and finite"),
        (lambda: Link("odd", 1e9, "nobody", "string and cans"), "kind is 'string and cans'"),
    ],
)
def test_bad_networks_are_refused_with_a_sentence(make, words) -> None:
    with pytest.raises(ValueError, match=words):
        make()


BATCH = Batch(sequences=64, sequence_length=2048)


def test_fewer_ports_than_devices_are_a_cluster() -> None:
    found = Cluster(gpu="A100-80GB", nodes=2, network_bytes_per_second=50 * GB, network_ports=4)
    assert found.network_bytes_per_second_per_gpu == 6.25 * GB


@pytest.mark.parametrize("chunks", [2, 4, 12])
def test_interleaving_saves_time_where_sends_hide_and_costs_it_where_not(chunks) -> None:
    """175B on 64 A100: the bubble falls, and what is sent grows with the chunks."""
    cluster = Cluster(gpu="A100-80GB", nodes=8)
    shown = replace(framework("megatron"), name="sends shown", hides_sends=False)
    seconds = {
        (name, v): step_time(
            "megatron-175b",
            cluster,
            Plan(tp=8, pp=8, virtual_stages=v, sequence_parallel=True, framework=rules),
            BATCH,
        ).total
        for name, rules in (("hidden", framework("megatron")), ("shown", shown))
        for v in (1, chunks)
    }
    assert seconds["hidden", chunks] < seconds["hidden", 1] == seconds["shown", 1]
    assert seconds["shown", chunks] > seconds["hidden", chunks]


def test_chunks_send_gradients_beside_the_work_of_the_others() -> None:
    """On a slow network one pass hides little of them; interleaved stages have a group's passes."""
    cluster = Cluster(gpu="H100", nodes=32, network_bytes_per_second=50 * GB)
    plans = {
        v: Plan(dp=4, tp=8, pp=8, virtual_stages=v, sequence_parallel=True, zero_stage=1)
        for v in (1, 2, 6)
    }
    exposed = [
        step_time("megatron-175b", cluster, plan, BATCH).data_parallel for plan in plans.values()
    ]
    assert exposed[0] > exposed[1] >= exposed[2] > 0
    blocking = replace(
        framework("megatron"), name="blocking", overlap_gradients=False, overlap_parameters=False
    )
    shown = [
        step_time("megatron-175b", cluster, replace(plan, framework=blocking), BATCH).data_parallel
        for plan in plans.values()
    ]
    assert shown[0] == pytest.approx(shown[2])


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_that_shard_add_up_their_gradients_once_a_step(zero) -> None:
    """HSDP: four micro-batches cost no more between nodes than one."""
    slow = Cluster(gpu="A100-80GB", nodes=8, network_bytes_per_second=1.25 * GB)
    rules = replace(
        framework("fsdp"), name="nothing hides", overlap_gradients=False, overlap_parameters=False
    )
    plan = Plan(dp=64, zero_stage=zero, shard_ranks=8, framework=rules)
    fast = replace(slow, network_bytes_per_second=200 * GB)
    extra = [
        step_time("megatron-1.7b", slow, plan, Batch(sequences=64 * m, sequence_length=2048)).total
        - step_time(
            "megatron-1.7b", fast, plan, Batch(sequences=64 * m, sequence_length=2048)
        ).total
        for m in (1, 4)
    ]
    assert extra[0] > 0
    assert extra[1] == pytest.approx(extra[0], rel=1e-6)


def test_hsdp_is_faster_than_fsdp_where_the_network_is_slow() -> None:
    slow = Cluster(gpu="A100-80GB", nodes=8, network_bytes_per_second=1.25 * GB)
    whole, groups = (
        step_time(
            "megatron-1.7b", slow, Plan(dp=64, zero_stage=3, shard_ranks=n, framework="fsdp"), BATCH
        ).total
        for n in (None, 8)
    )
    assert groups < whole


def test_spare_nodes_are_paid_and_dollars_are_a_range() -> None:
    cluster = Cluster(gpu="A100-80GB", nodes=8, usd_per_gpu_hour=2.0)
    found = estimate("megatron-7.5b", cluster, Plan(dp=64, zero_stage=1), BATCH)
    none, one, eight = (goodput(cluster, spares=n) for n in (0, 1, 8))
    paid = [cost(found, 1e11, left) for left in (none, one, eight)]
    assert [round(c.gpu_hours / c.days / 24) for c in paid] == [64, 72, 128]
    assert paid[2].usd > paid[1].usd
    for row in paid:
        low, high = row.usd_interval
        assert low < row.usd < high
        assert low / row.days_interval[0] == pytest.approx(row.usd / row.days)
        assert high / row.days_interval[1] == pytest.approx(row.usd / row.days)
    kept = cost(found, 1e11, one, Storage(usd_per_gb_month=1.0, checkpoints=2))
    size = found.model.parameter_count * 14 / 1e9  # parameters, master copy and two moments
    assert kept.storage_usd == pytest.approx(2 * size * kept.days / (365.25 / 12))
    assert kept.usd - kept.storage_usd == pytest.approx(paid[1].usd - paid[1].storage_usd)
    assert 0 < paid[1].storage_usd < 0.02 * paid[1].usd
    with pytest.raises(ValueError, match="checkpoints"):
        Storage(checkpoints=0)
    free = cost(found, 1e11)
    assert round(free.gpu_hours / free.days / 24) == 64
