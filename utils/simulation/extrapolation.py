"""`extrapolate`: the memory of a deep model's step, or of a large batch's, from small ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from utils.checked import asks_first
from utils.memory.budgets import Budget, budget
from utils.memory.measurement import Measurement
from utils.memory.timeline import MemoryTimeline
from utils.parallel.dims import ParallelDims
from utils.simulation.alignment import align, line
from utils.simulation.arguments import look_at_depths
from utils.simulation.devices import simulated_device
from utils.simulation.extended import (
    GUESSED,
    Depths,
    extended_measurement,
    lasting_notes,
    on_line,
    refusal,
)
from utils.simulation.garbage import set_aside
from utils.simulation.message_stream import Misaligned, stream, timeline
from utils.simulation.result_cache import SharedResults
from utils.simulation.simulator import simulate

BuildAt = Callable[[int], tuple[nn.Module, torch.optim.Optimizer | None]]

# The first and the second layer differ from the others where weights are gathered ahead. Four
# layers between the second and the third depth tell every layer, every 2nd, ... every 6th apart.
FROM_LAYERS: Depths = (3, 4, 7)
MOST_SAMPLES = 2**40
MOST_LAYERS = 10_000  # every allocation of every layer is laid out
# Sizes in proportion to the batch are then whole multiples of a GPU allocator's 512 bytes, for
# elements of four bytes and more, and lie on a line after they are rounded up, too.
FROM_BATCH: Depths = (128, 256, 384)


@asks_first(look_at_depths("extrapolate", ("model", "optimizer", "batch")))
def extrapolate(
    build_at: BuildAt,
    step: Callable[..., Any],
    *,
    layers: int,
    from_layers: Depths = FROM_LAYERS,
    batch: int | None = None,
    from_batch: Depths = FROM_BATCH,
    device: str = "A100 80GB",
    world: int | ParallelDims = 1,
    rank: int = 0,
    items: int = 1,
    unit: str = "items",
    name: str = "",
    within: Budget | str | int | None = None,
    reuse_results: SharedResults | None = None,
) -> Measurement:
    """What `simulate` finds for a model of `layers` layers, from simulations of shallow ones.

    The allocations of three depths are aligned; what a deeper model has in addition is repeated
    until the depth is reached. Peak, phase of the peak and categories are then read off the
    whole step's timeline, so it does not matter where the peak lies at which depth. With
    `batch`, each block's size is extended along a line in the batch, exact but for an
    allocator block where sizes were rounded up. On a CPU the batch is simulated as it is: its
    kernels plan their working memory by shape, in steps and not along a line.

    A deviation that none of the three depths shows cannot be seen: a pattern over more than
    six layers with the default depths, one special layer further up, or a buffer that splits
    once it is large enough (the buckets of DistributedDataParallel: their bytes come out right,
    their number does not).

    Args:
        build_at: makes model and optimizer at a depth: `build_at(layers)`.
        step: as `simulate` takes it; with `batch`, `step(model, optimizer, batch)`.
        layers: the depth wanted. Depths up to the largest of `from_layers` are simulated whole.
        from_layers: three rising depths. The first two lie one repetition apart: 2 where every
            2nd layer is checkpointed. The third, and `layers`, lie whole repetitions further.
        batch: how many samples the step takes; batches up to the largest of `from_batch`, and
            all on a CPU, are simulated as they are.
        from_batch: three rising batch sizes.
        device, world, rank, items, unit, name, within: as `simulate` takes them.
        reuse_results: what earlier simulations of the same program have worked out.

    Returns:
        A measurement with evidence *simulated*; its last note says what it was extended from.
        `reserved_bytes` is that of the extended step after a first one, which is made of it
        (`utils.simulation.first_step`): a whole simulation's, mostly to the segment. `host_bytes`
        is None where the host's peak does not grow along a line.

    Raises:
        ValueError: the small steps do not align, or `layers` is no whole number of repetitions.
        OverBudgetError: the step goes over `within`.
    """
    _check_rising("from_layers", from_layers, layers)
    if max(layers, *from_layers) > MOST_LAYERS:
        most = max(layers, *from_layers)
        raise ValueError(f"layers is {most:,}; the deepest model simulated has {MOST_LAYERS:,}.")
    _check_repetitions(from_layers, layers)
    if batch is not None:
        _check_rising("from_batch", from_batch, batch)

    shared = SharedResults() if reuse_results is None else reuse_results

    def at(depth: int, size: int | None) -> Measurement:
        run = step if size is None else lambda model, optimizer: step(model, optimizer, size)
        return simulate(
            lambda: build_at(depth),
            run,
            device=device,
            world=world,
            rank=rank,
            items=items,
            unit=unit,
            name=name,
            reuse_results=shared,
        )

    def deep(size: int | None) -> Measurement:
        if layers <= from_layers[-1]:
            return at(layers, size)
        return _deeper([at(depth, size) for depth in from_layers], from_layers, layers)

    card = simulated_device(device)
    if batch is None or batch <= from_batch[-1] or card.asked:
        result = deep(batch)
    else:
        grain = card.granularity_bytes
        result = larger([deep(size) for size in from_batch], from_batch, batch, grain)
    if within is not None:
        budget(within).check(result.timeline)
    verdict = card.verdict(result.peak_bytes, result.reserved_bytes)
    return dataclasses.replace(result, notes=tuple(filter(None, [verdict, *lasting_notes(result)])))


@set_aside()  # messages by the ten thousand, none of them garbage
def _deeper(found: Sequence[Measurement], depths: Depths, layers: int) -> Measurement:
    """Extend three simulations of rising depth to `layers`."""
    period = depths[1] - depths[0]

    def extended(told_apart: bool) -> MemoryTimeline:
        first, second, third = (stream(m.timeline, told_apart) for m in found)
        pattern = align((first, second, third), (depths[2] - depths[0]) // period)
        return timeline(pattern.stream((layers - depths[0]) // period), told_apart)

    try:
        deep, remark = _told_apart_if_possible(extended)
    except Misaligned as error:
        raise refusal("layers", depths, error, "simulate() runs the whole depth.") from error
    return extended_measurement(found, deep, depths, layers, "layers", remark)


def _told_apart_if_possible(
    extended: Callable[[bool], MemoryTimeline],
) -> tuple[MemoryTimeline, str]:
    """Which of several like blocks dies decides where gaps are left; where it does not repeat from
    layer to layer, or changes with the batch, sums are right still, and a remark says the rest."""
    try:
        return extended(True), ""
    except Misaligned:
        return extended(False), GUESSED


@set_aside()
def larger(found: Sequence[Measurement], sizes: Depths, batch: int, grain: int) -> Measurement:
    """Extend three simulations of rising batch size to `batch`, block by block."""

    def extended(told_apart: bool) -> MemoryTimeline:
        messages = line(
            [stream(m.timeline, told_apart) for m in found],
            lambda sizes_bytes: on_line(sizes_bytes, sizes, batch, grain),
        )
        return timeline(messages, told_apart)

    try:
        large, remark = _told_apart_if_possible(extended)
    except Misaligned as error:
        raise refusal("samples", sizes, error, "simulate() takes any batch.") from error
    return extended_measurement(found, large, sizes, batch, "samples", remark)


def _check_rising(name: str, places: Depths, wanted: int) -> None:
    if len(places) != 3 or not 0 < places[0] < places[1] < places[2]:
        raise ValueError(f"{name} is {places}; give three rising numbers such as (3, 4, 7).")
    if wanted < 1:
        raise ValueError(f"There is nothing to simulate at {wanted}; {name} is extended upwards.")
    if max(wanted, *places) > MOST_SAMPLES:
        raise ValueError(f"{name} reaches at most {MOST_SAMPLES:,}; got {max(wanted, *places):,}.")


def _check_repetitions(depths: Depths, layers: int) -> None:
    first, second, third = depths
    wanted = [third, layers] if layers > third else [third]
    if third - first < 2 * (second - first) or any((w - first) % (second - first) for w in wanted):
        raise ValueError(
            f"from_layers={depths} repeat every {second - first} layers, and {third} and {layers} "
            f"must lie two or more whole repetitions above {first}. Choose depths that do."
        )
