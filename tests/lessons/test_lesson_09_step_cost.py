"""A step's collectives by the pass beside them, and what they cost beside unsharded's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from utils.catalog import ModelShape
from utils.lessons.lesson_09 import step_cost, trust
from utils.lessons.lesson_09.scenario import Scenario
from utils.lessons.lesson_09.step_cost import (
    GPUS,
    HSDP,
    PLANNER,
    SCHEMES,
    UNSHARDED,
    Part,
    Rates,
    optimizer_ms,
    parts,
    passes_ms,
    stretched,
    two_levels,
)
from utils.planner import Batch, Plan, estimate, framework
from utils.traffic.collectives import Traffic
from utils.units import GB

SHAPE = ModelShape(
    name="1.3B", family="llama", layers=24, hidden=2048, heads=16, feedforward=5504,
    vocabulary=50304, max_sequence=2048, tied=True,
)  # fmt: skip
BATCH = Batch(sequences=512, sequence_length=2048)
P = SHAPE.parameter_count
BETWEEN = Traffic("all-reduce", "mesh_replicate", "float32", 25, 4 * P)
CALLS = {  # of two micro-batches, a block and the root in one call each
    UNSHARDED: [BETWEEN],
    "FSDP2": [
        Traffic("all-gather", "mesh_shard", "bfloat16", 98, round(3.84 * 2 * P / GPUS)),
        Traffic("reduce-scatter", "mesh_shard", "float32", 50, 8 * P),
    ],
    "FSDP2 kept": [
        Traffic("all-gather", "mesh_shard", "bfloat16", 50, 2 * 2 * P // GPUS),
        Traffic("reduce-scatter", "mesh_shard", "float32", 50, 8 * P),
    ],
    HSDP: [
        Traffic("all-gather", "mesh_shard", "bfloat16", 98, round(3.84 * 2 * P / 8)),
        Traffic("reduce-scatter", "mesh_shard", "float32", 50, 8 * P),
        replace(BETWEEN, payload_bytes=4 * P // 8),
    ],
    "ZeRO-1": [
        Traffic("reduce", "world", "float32", 92, 4 * P),
        Traffic("all-gather", "world", "bfloat16", 1, 2 * P // GPUS),
        Traffic("broadcast", "world", "uint8", 218, 2 * P, at_startup=True),
    ],
    "ZeRO-2": [
        Traffic("reduce", "world", "float32", 184, 8 * P),
        Traffic("all-gather", "world", "bfloat16", 1, 2 * P // GPUS),
        Traffic("all-reduce", "world", "float32", 2, 8),  # norms
    ],
}


def part_ms(part: Part, network_gb: float, rates: Rates) -> float:
    start = part.calls * rates.start * part.start_ms
    return 1000 * part.sent_gb / rates.link_gb(part.link, network_gb) + start


def cost_ms(found: list[Part], network_gb: float, rates: Rates) -> float:
    """As the page has it, of four micro-batches."""
    total = 0.0
    for beside, work in passes_ms(SHAPE, BATCH, 2).items():
        sums = {True: 0.0, False: 0.0}
        for part in found:
            if part.beside == beside:
                sums[part.each] += part_ms(part, network_gb, rates)
        for sent, times in ((sums[True], 3), (sums[True] + sums[False], 1)):
            hidden = min(sent, work)
            total += times * (sent - hidden + rates.contention * hidden)
    return total


def of(name: str) -> list[Part]:
    return parts(SCHEMES[name], CALLS[name], P)


def scenario() -> Scenario:
    return Scenario(SHAPE, BATCH, 2, {name: of(name) for name in CALLS}, part_ms, cost_ms)


@pytest.mark.parametrize(("name", "ranks"), [(UNSHARDED, 1), ("FSDP2", GPUS), (HSDP, 8)])
@pytest.mark.parametrize("network_gb", [200, 25, 1.25])
def test_counted_calls_cost_what_the_planner_says(name: str, ranks: int, network_gb: float) -> None:
    rules = replace(framework("fsdp"), name="fsdp, as here", eager_norm=False, loss_bytes=12)
    stage = SCHEMES[name].stage
    plan = Plan(
        dp=GPUS,
        zero_stage=stage,
        shard_ranks=ranks if stage else None,
        framework=rules,
        micro_batch=2,
    )
    told = estimate(SHAPE, step_cost.cluster(network_gb), plan, BATCH).time
    assert cost_ms(of(name), network_gb, PLANNER) == pytest.approx(
        1000 * told.data_parallel, rel=0.1
    )
    assert optimizer_ms(SCHEMES[name], P) == pytest.approx(1000 * told.optimizer)
    passes = BATCH.sequences / GPUS / 2 * sum(passes_ms(SHAPE, BATCH, 2).values())
    assert passes == pytest.approx(1000 * (told.total - told.data_parallel - told.optimizer))


def test_what_is_sent_in_each_micro_batch_and_what_once() -> None:
    once = 4 * P * 63 / 64 / GB
    reduced, gathered = of("ZeRO-1")
    assert (reduced.beside, reduced.each, gathered.beside, gathered.each) == (
        "backward",
        False,
        "step",
        False,
    )
    assert reduced.sent_gb == pytest.approx(once) and gathered.sent_gb == pytest.approx(once / 2)
    reduced, gathered = of("ZeRO-2")
    assert reduced.each and reduced.sent_gb == pytest.approx(once) and reduced.calls == 92
    assert not gathered.each, "after the step alone; norms are left out"
    assert [part.beside for part in of("FSDP2")] == ["forward", "backward", "backward"]
    assert [part.beside for part in of("FSDP2 kept")] == ["forward", "backward"]
    forward, backward, _, between = of(HSDP)
    assert forward.sent_gb + backward.sent_gb == pytest.approx(1.92 * 2 * P * 7 / 8 / GB)
    assert (between.link, between.each, forward.link) == ("port", False, "NVLink")


def test_each_constant_is_halved_and_doubled() -> None:
    cases = stretched()
    assert len(cases) == 2 * len(Rates._fields)
    changed = [sum(a != b for a, b in zip(case, PLANNER, strict=True)) for case in cases.values()]
    assert set(changed) == {1}
    assert cases["network x 2"].link_gb("port", 25) == 2 * PLANNER.link_gb("port", 25)
    assert PLANNER.link_gb("node", 1e6) == PLANNER.nvlink_gb, "a ring runs inside of nodes, too"


def test_two_levels_send_what_hsdp_sends_between_nodes() -> None:
    between, *inside = two_levels(of(HSDP))
    assert between == of(HSDP)[-1] and not any(part.each for part in inside) and len(inside) == 2


def test_speeds_and_who_keeps_them() -> None:
    made = scenario()
    found = made.percents(200)
    assert found[UNSHARDED] == pytest.approx([100] * 12)
    assert {len(shares) for shares in found.values()} == {12}
    unsharded, own = (made.step_ms(name, 200) for name in (UNSHARDED, HSDP))
    assert found[HSDP][0] == pytest.approx(100 * unsharded / own)
    assert made.tokens(HSDP, 200) == pytest.approx(512 * 2048 / 64 / own * 1000)
    rows = {row[""]: row for row in made.rows(200)}
    assert rows[HSDP]["step, ms"] == own
    assert rows["ZeRO-2"]["calls"] == 4 * 92 + 1 and rows[UNSHARDED]["calls"] == 25
    assert rows[UNSHARDED]["rank sends, GB"] == pytest.approx(2 * 4 * P * 63 / 64 / GB)
    assert rows[UNSHARDED]["node sends, GB"] == rows[UNSHARDED]["rank sends, GB"]
    assert rows[HSDP]["node sends, GB"] == pytest.approx(8 * 2 * 4 * P / 8 * 7 / 8 / GB)
    assert float(rows["ZeRO-1"]["after it, ms"]) > 0 == rows["FSDP2"]["after it, ms"]
    every, some = made.kept(1.25, 0).split("; ")
    assert all(name in every for name in CALLS if name != UNSHARDED) and some.endswith("none")
    assert "all but" in made.kept(200, sorted(found[HSDP])[0] + 1e-6)


def test_published_runs_of_this_size() -> None:
    rows = trust.beside_published()
    assert len(rows) == 5 and all(str(row["planner's error"]).startswith("+") for row in rows)
