"""A layer's stages: the planner's seconds where products are long, and more where a collective outlasts them."""

from __future__ import annotations

import pytest

from utils.catalog import model_shape
from utils.lessons.lesson_12.bloom import bloom_prequel_pairs, bloom_prequel_repeats
from utils.lessons.lesson_12.layer_time import (
    Stage,
    draw_layer_times,
    layer_of_22b,
    layer_stages,
    rates_in_training,
)
from utils.planner import Batch, Cluster, Plan
from utils.planner.calibration import CONTENTION
from utils.planner.step_seconds.block_time import block_time

BIG = model_shape("gpt-3-175b")


def machine(ports: int) -> Cluster:
    return Cluster(
        gpu="A100 80GB",
        nodes=8,
        network_ports=ports,
        network_bytes_per_second=ports * 25e9,
    )


def seconds(stages: list[Stage]) -> float:
    waits = (max(CONTENTION * s.sent_seconds, s.sent_seconds - s.product_seconds) for s in stages)
    return sum(s.product_seconds for s in stages) + sum(waits)


def planned(tp: int, ports: int) -> float:
    plan = Plan(tp=tp, dp=64 // tp, sequence_parallel=True)
    return block_time(
        BIG, machine(ports), plan, Batch(sequences=64 // tp, sequence_length=2048)
    ).total


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_stages_are_those_of_the_planner(tp: int) -> None:
    stages = layer_stages(BIG, machine(8), tp, 2048)
    assert sum(stage.sent_seconds > 0 for stage in stages) == 10
    assert sum(stage.sent_seconds > 0 < stage.product_seconds for stage in stages) == 4
    assert seconds(stages) == pytest.approx(planned(tp, 8), rel=1e-9)


def test_a_collective_hides_no_longer_than_the_product_beside_it() -> None:
    slow = layer_stages(BIG, machine(1), 16, 2048)
    hidden = sum(s.sent_seconds for s in slow) - (
        seconds(slow) - sum(s.product_seconds for s in slow)
    )
    assert hidden == pytest.approx(sum(s.product_seconds for s in slow if s.sent_seconds))
    assert seconds(slow) > 1.1 * planned(16, 1)


def test_a_published_layer_that_no_constant_was_set_on() -> None:
    predicted, published = layer_of_22b(machine(8))
    assert predicted == pytest.approx(published, rel=0.1)


def test_a_row_ends_where_its_seconds_do() -> None:
    stages = [Stage(0.0, 1e-3), Stage(4e-3), Stage(2e-3, 1e-3), Stage(1e-3, 5e-3)]
    (axes,) = draw_layer_times({"TP 2": stages}, 0.5).axes
    assert axes.texts[0].get_text() == f"TP 2: {1e3 * (1e-3 + 4e-3 + 2.5e-3 + 5e-3):.1f} ms"
    with pytest.raises(ValueError, match="needs one row or more"):
        draw_layer_times({}, 0.5)


def test_rates_stand_beside_one_another() -> None:
    """An A100's NVLink: 20 of 25 GB/s a link alone, and 0.705 of that in training; and eight ports."""
    nvlink, ports = rates_in_training()
    assert (round(nvlink), round(ports)) == (169, 135)


def test_blooms_repeats() -> None:
    """Runs before and after the nodes were improved are two setups."""
    assert bloom_prequel_repeats() == (
        "runs of one setup (published): on 48 nodes, 5 setups, at most 2.8% apart; "
        "on 1 node, 1 setup, 9.4% apart"
    )


def test_blooms_pairs() -> None:
    """Four of six pairs gain more with TP 4 than runs of one setup are apart, and two lie within that."""
    gains = bloom_prequel_pairs()["gain"].str.rstrip("%").astype(float)
    assert (len(gains), sum(gains > 2.8), sum(gains < -2.8)) == (6, 4, 0)
