"""A step whose gradients leave for the host, as lanes: GPU, link and CPU."""

from __future__ import annotations

from typing import NamedTuple

from utils import Span

__all__ = ["StepParts", "step_lanes"]

BACKWARD_SHARE = 6 / 8  # of the compute with every block checkpointed


class StepParts(NamedTuple):
    """Seconds of a step's parts; each of the first four is of one micro-batch.

    Attributes:
        compute: forward and backward on the GPU.
        up: the sum so far comes to the card. The first micro-batch has none to bring.
        down: gradients, or their sum, go to the host.
        first_add, add: the CPU adds them to its sum; the first time, and each time after.
        last_down: once a step, the gradients again in fp32.
        step: clipping and AdamW on the CPU.
        weights: they come up.
        micro_batches: in the step.
        beside: gradients go down beside backward; else all waits for all.
    """

    compute: float
    up: float
    down: float
    first_add: float
    add: float
    last_down: float
    step: float
    weights: float
    micro_batches: int
    beside: bool


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
        if parts.beside:
            now -= BACKWARD_SHARE * parts.compute
        work("link", "gradients or sums", parts.down + parts.up * (number > 0))
        now = max(now, lanes["GPU"][-1].end_seconds)
        work("CPU", "sum, clip, AdamW", parts.add if number else parts.first_add)
    work("link", "gradients or sums", parts.last_down)
    work("CPU", "sum, clip, AdamW", parts.step)
    work("link", "weights", parts.weights)
    return lanes, now
