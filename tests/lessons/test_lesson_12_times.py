"""A layer's stages: the planner's kernels, and eight collectives that all wait for."""

from __future__ import annotations

import pytest

from utils.catalog import model_shape
from utils.lessons.lesson_12.bloom import bloom_prequel_pairs
from utils.lessons.lesson_12.layer_time import (
    Stage,
    draw_layer_times,
    layer_of_22b,
    layer_stages,
    rates_in_training,
)
from utils.planner import Batch, Cluster, Plan
from utils.planner.step_seconds.block_time import block_time
from utils.planner.step_seconds.collectives import Group, all_gather_seconds

BIG = model_shape("gpt-3-175b")


def machine(ports: int) -> Cluster:
    return Cluster(
        gpu="A100 80GB",
        nodes=8,
        network_ports=ports,
        network_bytes_per_second=ports * 25e9,
    )


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_kernels_are_the_planners_and_eight_collectives_stand_between(tp: int) -> None:
    cluster = machine(8)
    stages = layer_stages(BIG, cluster, tp, 2048)
    plan = Plan(tp=tp, dp=64 // tp, sequence_parallel=True)
    times = block_time(BIG, cluster, plan, Batch(sequences=64 // tp, sequence_length=2048))
    wanted = sum(it.matmul + it.memory for it in (times.forward, times.backward))
    assert sum(stage.kernel_seconds for stage in stages) == pytest.approx(wanted, rel=1e-9)
    one = all_gather_seconds(cluster, Group(tp), 2 * 2048 * BIG.hidden)
    assert [stage.sent_seconds for stage in stages if stage.sent_seconds] == [one] * 8
    assert "".join(stage.name for stage in stages) == "gAsgFsgFsgAs"
    assert all(stage.kernel_seconds > 0 for stage in stages if stage.name in "AF")


def test_a_published_layer_that_no_constant_was_set_on() -> None:
    predicted, published = layer_of_22b(machine(8))
    assert predicted == pytest.approx(published, rel=0.1)


def test_a_row_ends_where_its_seconds_do() -> None:
    stages = [Stage(0.0, 1e-3), Stage(4e-3), Stage(0.0, 2e-3)]
    (axes,) = draw_layer_times({"TP 2": stages}).axes
    assert "TP 2: 7.0 ms" in [text.get_text() for text in axes.texts]
    with pytest.raises(ValueError, match="needs one row or more"):
        draw_layer_times({})


def test_rates_stand_beside_one_another() -> None:
    """An A100's NVLink: 20 of 25 GB/s a link alone, and 0.705 of that in training; and eight ports."""
    nvlink, ports = rates_in_training()
    assert (round(nvlink), round(ports)) == (169, 135)


def test_blooms_pairs() -> None:
    """At micro-batch 4 three gain with TP 4, and one loses."""
    pairs = bloom_prequel_pairs()
    gains = pairs["gain"][pairs["micro-batch"] == 4].str.rstrip("%").astype(float)
    assert (len(pairs), sorted(gains)) == (6, [-2.6, 2.3, 4.6, 6.6])
