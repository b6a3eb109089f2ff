"""Collectives and hops: what links cost a plan."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import BATCH, BIG, GPT, NODE, cluster_of

from utils.catalog import model_shape
from utils.planner import (
    Batch,
    Cluster,
    Plan,
    calibration,
    estimate,
    step_time,
)
from utils.planner.step_seconds.collectives import (
    NETWORK_HOP_SECONDS,
    NVLINK_HOP_SECONDS,
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    hops_across_nodes,
    send_seconds,
)
from utils.units import GB


def test_zero_tensor_by_tensor_pays_for_every_call():
    plan = Plan(dp=256, zero_stage=1, framework="nanotron")
    bucketed = replace(plan, framework=replace(plan.conventions, shards="bucket"))
    batch = Batch(sequences=256, sequence_length=2048)
    small = model_shape("megatron-1.7b")
    each, few = (
        step_time(small, cluster_of(256), p, batch).data_parallel for p in (plan, bucketed)
    )
    assert each > 1.05 * few


def test_collectives():
    two = Cluster(gpu="A100-80GB", nodes=2)
    inside, across = Group(8), Group(16)
    whole = 1 * GB
    assert all_reduce_seconds(NODE, Group(1), whole) == 0
    reduce, gather = (f(NODE, inside, whole) for f in (all_reduce_seconds, all_gather_seconds))
    assert reduce == pytest.approx(2 * gather - calibration.CALL_SECONDS)  # one start
    assert all_gather_seconds(two, across, whole) > gather
    assert Group(2, stride=8).per_node(two) == 1
    assert Group(2, stride=8).nodes(two) == 2
    assert all_gather_seconds(two, replace(across, one_port=True), whole) > 3 * (
        all_gather_seconds(two, across, whole)
    )
    assert send_seconds(two, True, whole) > send_seconds(two, False, whole)


def test_only_hops_that_leave_a_node_cost_the_latency_between_nodes():
    many, calls = Cluster(gpu="A100-80GB", nodes=64), 1000
    group = Group(512)
    latency = all_gather_seconds(many, group, 0.0, calls) / calls
    inside, start = (511 - 63) * NVLINK_HOP_SECONDS, calibration.CALL_SECONDS
    assert latency == pytest.approx(start + 63 * NETWORK_HOP_SECONDS + inside)
    one = all_gather_seconds(NODE, Group(8), 0.0, calls) / calls
    assert one == pytest.approx(start + 7 * NVLINK_HOP_SECONDS)


def test_which_hops_of_a_pipeline_leave_a_node():
    """On nodes of 8; the last hop is the one from the last stage back to the first."""
    assert hops_across_nodes(8, 4, 4) == (False, True, False, True)
    assert hops_across_nodes(8, 8, 3) == (True, True, True)
    assert hops_across_nodes(8, 4, 2) == (False, False)
    assert hops_across_nodes(8, 3, 3) == (False, True, True)  # rank 8 sits on the second node


LAYOUTS = st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2, st.sampled_from([2, 4, 8]))


@settings(max_examples=80, deadline=None)
@given(layout=LAYOUTS, chunks=st.sampled_from([1, 3]), ports=st.sampled_from([1, 25, 200]))
def test_a_slower_link_is_felt_by_every_pipeline_over_nodes(layout, chunks, ports):
    dp, tp, pp = layout
    plan = Plan(dp=dp, tp=tp, pp=pp, virtual_stages=chunks if pp == 4 else 1)
    assume(plan.ranks > 8)
    fast = Cluster(gpu="A100-80GB", nodes=plan.ranks // 8, network_bytes_per_second=ports * GB)
    slow = replace(fast, network_bytes_per_second=0.8 * ports * GB)
    times = [step_time(GPT, cluster, plan, BATCH).total for cluster in (fast, slow)]
    assert times[1] > times[0]


def test_tp4_pp16_on_nodes_of_8_pays_for_the_hops_between_them():
    """175B on 64 A100: half of the hops leave a node, and stages wait for the slowest."""
    plan = Plan(tp=4, pp=16, sequence_parallel=True)
    batch = Batch(sequences=1536, sequence_length=2048)
    shares = {}
    for name, ports in (("HDR", 8 * 25 * GB), ("Ethernet", 1.25 * GB)):
        cluster = Cluster(gpu="A100-80GB", nodes=8, network_bytes_per_second=ports)
        shares[name] = estimate(BIG, cluster, plan, batch).bubble
    assert shares["Ethernet"] > 10 * shares["HDR"]


def test_zero_2_reduces_for_every_micro_batch_and_zero_1_once():
    slow = replace(cluster_of(64), network_bytes_per_second=1 * GB)
    times = {
        z: step_time(
            GPT, slow, Plan(dp=64, zero_stage=z), Batch(sequences=256, sequence_length=2048)
        )
        for z in (1, 2, 3)
    }
    assert times[2].data_parallel > 1.5 * times[1].data_parallel
    assert times[3].data_parallel > times[2].data_parallel
