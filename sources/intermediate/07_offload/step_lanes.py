"""A step whose gradients leave for the host, as lanes: GPU, link and CPU."""

from __future__ import annotations

from typing import NamedTuple

from utils import Span

__all__ = ["StepParts", "step_lanes"]


class StepParts(NamedTuple):
    """Seconds of a step's parts by DeepSpeed; each of the first three is of one micro-batch.

    Attributes:
        compute: forward and backward on the GPU.
        up: the sum so far comes to the card. The first micro-batch has none to bring.
        down: the new sum goes to the host.
        last_down: once a step, the gradients again in fp32.
        step: clipping and AdamW on the CPU.
        weights: they come up group by group, beside the CPU's step of the next group. The last
            group's wait is not counted.
        micro_batches: in the step.
    """

    compute: float
    up: float
    down: float
    last_down: float
    step: float
    weights: float
    micro_batches: int


def step_lanes(parts: StepParts) -> tuple[dict[str, list[Span]], float]:
    """The lanes of one step, and its seconds."""
    lanes: dict[str, list[Span]] = {"GPU": [], "link": [], "CPU": []}
    now = 0.0

    def work(lane: str, kind: str, seconds: float) -> None:
        nonlocal now
        if seconds:
            lanes[lane].append(Span(kind, now, now + seconds))
        now += seconds

    for number in range(parts.micro_batches):
        work("GPU", "forward and backward", parts.compute)
        work("link", "gradients or sums", parts.down + parts.up * (number > 0))
    work("link", "gradients or sums", parts.last_down)
    work("CPU", "clip, AdamW", parts.step)
    stepped = now
    now -= min(parts.weights, parts.step)
    work("link", "weights", parts.weights)
    return lanes, max(now, stepped)
