"""`sweep`: the memory of one deep model's step at many batch sizes, from nine small simulations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from utils.checked import asks_first
from utils.memory.measurement import Measurement
from utils.simulation.arguments import look_at_depths
from utils.simulation.devices import simulated_device
from utils.simulation.extended import Depths, lasting_notes
from utils.simulation.extrapolation import FROM_LAYERS, BuildAt, extrapolate, larger


@asks_first(look_at_depths("sweep", ("model", "optimizer", "batch")))
def sweep(
    build_at: BuildAt,
    step: Callable[[Any, Any, int], Any],
    *,
    layers: int,
    batches: Iterable[int],
    from_layers: Depths = FROM_LAYERS,
    from_batch: Depths = (2, 3, 4),
    device: str = "A100 80GB",
    items: int = 1,
    unit: str = "items",
    name: str = "",
) -> dict[int, Measurement]:
    """What `extrapolate` finds for each batch size, with its small simulations run once for all.

    Args:
        build_at, step, layers, from_layers, device, unit, name: as `extrapolate` takes them.
        batches: the batch sizes wanted.
        from_batch: three rising batch sizes to simulate. Sizes in proportion to the batch must be
            whole multiples of the allocator's 512 bytes at each, as with texts of 128 tokens. A
            batch of 1 often takes another path: PyTorch then needs no copy to make it contiguous.
            On a CPU each of `batches` is simulated as it is, as `extrapolate` says.
        items: how many items one sample of the batch is, such as its tokens.

    Returns:
        Batch size -> measurement with evidence *simulated*.

    Raises:
        ValueError: a batch size below one, or small steps that do not align.
    """
    card, wanted = simulated_device(device), list(batches)
    if not wanted or min(wanted) < 1:
        raise ValueError(f"batches is {wanted}; give sizes of 1 or more.")

    def run(size: int, model: Any, optimizer: Any) -> Any:
        return step(model, optimizer, size)

    small = (*from_batch, *(size for size in wanted if size < from_batch[-1]))
    found = {
        size: extrapolate(
            build_at,
            partial(run, size),
            layers=layers,
            from_layers=from_layers,
            device=device,
            unit=unit,
            name=name,
        )
        for size in set(wanted if card.asked else small)
    }
    for size in wanted:
        if size not in found:
            base = [found[few] for few in from_batch]
            found[size] = larger(base, from_batch, size, card.granularity_bytes)
    return {size: _labelled(found[size], size * items, card) for size in wanted}


def _labelled(found: Measurement, items: int, card: Any) -> Measurement:
    """The measurement with its own items, and the verdict on its own peak."""
    verdict = card.verdict(found.peak_bytes, found.reserved_bytes)
    notes = tuple(filter(None, [verdict, *lasting_notes(found)]))
    return dataclasses.replace(found, items=items, notes=notes)
