"""A step whose gradients leave for the host, as lanes: GPU, link and CPU."""

from __future__ import annotations

from typing import NamedTuple

from utils import Span

__all__ = ["StepParts", "step_lanes"]

BACKWARD_SHARE = 6 / 8  # of the compute with every block checkpointed


class StepParts(NamedTuple):
    """Seconds of a step's parts.

    Attributes:
        compute: of all micro-batches on the GPU.
        sums: of the gradients' sums on the link, all micro-batches and both ways.
        down, up: on the link once a step: fp32 gradients, and weights.
        adam: of the optimizer on the CPU.
    """

    compute: float
    sums: float
    down: float
    up: float
    adam: float


def step_lanes(
    parts: StepParts, micro_batches: int, *, beside: bool
) -> tuple[dict[str, list[Span]], float]:
    """The lanes of one step, and its seconds.

    Args:
        parts: of the step.
        micro_batches: in the step.
        beside: gradients travel beside backward; else the GPU waits for them.
    """
    lanes: dict[str, list[Span]] = {"GPU": [], "link": [], "CPU": []}
    each, sums, now = parts.compute / micro_batches, parts.sums / micro_batches, 0.0
    for _ in range(micro_batches):
        computed = now + each
        leaves = computed - BACKWARD_SHARE * each if beside else computed
        lanes["GPU"].append(Span("forward and backward", now, computed))
        if sums:
            lanes["link"].append(Span("gradients and their sums", leaves, leaves + sums))
        now = max(computed, leaves + sums)
    for lane, kind, seconds in (
        ("link", "gradients and their sums", parts.down),
        ("CPU", "AdamW on the CPU", parts.adam),
        ("link", "weights", parts.up),
    ):
        lanes[lane].append(Span(kind, now, now + seconds))
        now += seconds
    return lanes, now
