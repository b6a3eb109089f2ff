"""A step by DeepSpeed whose gradients leave for the host, as lanes: GPU, link and CPU."""

from __future__ import annotations

from typing import NamedTuple

from utils import Span

__all__ = ["StepParts", "step_lanes"]

PIECES = 4  # that backward and AdamW are drawn in; DeepSpeed's are buckets and parameter groups


class StepParts(NamedTuple):
    """Seconds of a step's parts by DeepSpeed; each of the first four is of one micro-batch.

    Attributes:
        forward: on the GPU.
        backward: on the GPU, with each block's second forward.
        up: the sum so far comes to the card. The first micro-batch has none to bring.
        down: the new sum goes to the host.
        last_down: once a step, the gradients again in fp32.
        step: clipping and AdamW on the CPU.
        weights: they come up group by group, beside the CPU's step of the next group.
        micro_batches: in the step.
        hidden: copies run beside backward, all of them; else backward stops for each.
    """

    forward: float
    backward: float
    up: float
    down: float
    last_down: float
    step: float
    weights: float
    micro_batches: int
    hidden: bool = False


def step_lanes(parts: StepParts) -> tuple[dict[str, list[Span]], float]:
    """The lanes of one step, and its seconds, in which the last group's way up is not counted."""
    lanes: dict[str, list[Span]] = {"GPU": [], "link": [], "CPU": []}
    now = 0.0

    def work(lane: str, kind: str, start: float, seconds: float) -> float:
        if seconds:
            lanes[lane].append(Span(kind, start, start + seconds))
        return start + seconds

    pieces = 1 if parts.hidden else PIECES
    for number in range(parts.micro_batches):
        now = work("GPU", "forward", now, parts.forward)
        last = number == parts.micro_batches - 1
        copies = parts.down + parts.up * (number > 0) + parts.last_down * last
        for _ in range(pieces):
            computed = work("GPU", "backward", now, parts.backward / pieces)
            start = now if parts.hidden else computed
            copied = work("link", "gradients or sums", start, copies / pieces)
            now = max(computed, copied)
    free = now  # the link
    for _ in range(PIECES):
        now = work("CPU", "clip, AdamW", now, parts.step / PIECES)
        free = work("link", "weights", max(now, free), parts.weights / PIECES)
    return lanes, max(now, free - parts.weights / PIECES)
