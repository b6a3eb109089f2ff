"""What crosses the link when states live in host memory, and when compute hides it.

Ren et al. 2021, arXiv:2101.06840, section 3: with 16-bit weights, gradients down and weights up are
the least that can cross, 4 bytes a parameter. Rajbhandari et al. 2021, arXiv:2104.07857, section 4:
efficiency from bytes, FLOP and bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

CHECKPOINTED_FLOPS = 8  # a parameter and token: forward, forward again, backward


@dataclass(frozen=True)
class Scheme:
    """Where the states of 16-bit training with Adam live, in bytes per parameter.

    Attributes:
        name: What leaves.
        device_bytes, host_bytes: Held between two steps.
        down_each, up_each: Cross the link for every forward and backward pass.
        down_once, up_once: Cross it once a step.
        steps_on_host: The CPU computes the optimizer's step.
    """

    name: str
    device_bytes: float
    host_bytes: float
    down_each: float = 0.0
    up_each: float = 0.0
    down_once: float = 0.0
    up_once: float = 0.0
    steps_on_host: bool = True

    def link_bytes(self, parameters: float, micro_batches: int = 1) -> tuple[float, float]:
        """Bytes of a step, down to the host and up to the device."""
        down = micro_batches * self.down_each + self.down_once
        up = micro_batches * self.up_each + self.up_once
        return parameters * down, parameters * up


# The host's gradients are fp32, as DeepSpeed keeps them beside its CPU optimizers.
SCHEMES: dict[str, Scheme] = {
    row.name: row
    for row in (
        Scheme("nothing leaves", 16, 0, steps_on_host=False),
        Scheme("optimizer state", 4, 16, down_once=2, up_once=2),
        Scheme("gradients, too", 2, 16, down_each=2, up_once=2),
        # Weights come for the forward pass, and once more for recomputation and backward.
        Scheme("weights, too", 0, 18, down_each=2, up_each=4),
        # L2L's way: the GPU computes the step, so that moments and master copies go up and down.
        Scheme(
            "states to and fro", 2, 14, down_each=2, down_once=12, up_once=12, steps_on_host=False
        ),
    )
}


def step_seconds(
    compute: float, down: float, up: float, on_host: float = 0.0, *, overlap: bool = True
) -> float:
    """Seconds of a step from those of its parts.

    Args:
        compute: of forward and backward on the device.
        down, up: of the transfers, each direction of the link.
        on_host: of the optimizer on the CPU, which waits for the last gradient.
        overlap: transfers run behind compute; else one after the other.
    """
    hidden = max(compute, down, up) if overlap else compute + down + up
    return hidden + on_host
