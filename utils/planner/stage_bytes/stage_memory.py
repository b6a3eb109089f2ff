"""Bytes of one rank at its peak, and whether a device has room for them."""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog import Device
from utils.planner.stages import Stage
from utils.units import Category

# What a plan predicts of the meter's categories, in the order of figures.
PREDICTED = (
    Category.PARAMETERS,
    Category.GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.COMMUNICATION,
    Category.GATHERED,
    Category.ACTIVATIONS,
    Category.LOGITS_AND_LOSS,
    Category.TEMPORARIES,
    Category.WORKSPACES,
)
# Share of the device that a plan should leave free. Of the Ultra-Scale sweep's layouts that need
# more than the rest, gaps included, three in four ran 2.7 to 7 times as long as predicted: the
# allocator gives its whole cache back and takes it again. Of those with less to spare, none did.
HEADROOM = 0.05
FITS, TIGHT, DOES_NOT_FIT = "fits", "fits, but within the allocator's reach", "does not fit"


@dataclass(frozen=True)
class StageMemory:
    """What one rank of a stage holds at its peak.

    Attributes:
        stage: The stage.
        phase: When the peak is: "forward", "backward of the head", "backward", "end of backward" or
            "step".
        bytes_by_category: Bytes at that moment, for each category that is `PREDICTED`.
        parameters: Parameters that the rank computes with.
        in_flight: Blocks whose activations it holds at once.
        context_bytes: Outside the allocator: CUDA's context and NCCL's buffers.
        gaps: What gaps add to bytes that come and go, as a share of these.
        host_bytes: What offload puts into its node's memory.
    """

    stage: Stage
    phase: str
    bytes_by_category: dict[Category, float]
    parameters: float
    in_flight: float
    context_bytes: float
    gaps: float
    host_bytes: float = 0.0

    @property
    def allocated_bytes(self) -> float:
        """Peak of the allocator: `torch.cuda.max_memory_allocated`."""
        return sum(self.bytes_by_category.values())

    @property
    def lasting_bytes(self) -> float:
        """Between steps: states, communication buffers and workspaces."""
        names = (Category.COMMUNICATION, Category.WORKSPACES)
        return self.state_bytes + sum(self.bytes_by_category[name] for name in names)

    @property
    def reserved_bytes(self) -> float:
        """The allocator's segments with their gaps: `torch.cuda.max_memory_reserved`.

        Gaps come with what comes and goes; lasting bytes are allocated once, in large pieces.
        """
        return self.allocated_bytes + self.gaps * (self.allocated_bytes - self.lasting_bytes)

    def reserved_on(self, gpu: Device) -> float:
        """`reserved_bytes` where the device has room for the gaps; else what it has."""
        room = gpu.memory_bytes - self.context_bytes
        return min(self.reserved_bytes, max(self.allocated_bytes, room))

    @property
    def device_bytes(self) -> float:
        """What `nvidia-smi` shows: the allocator's segments and what is outside it."""
        return self.reserved_bytes + self.context_bytes

    def fits(self, gpu: Device) -> bool:
        """Whether the device has room. Gaps do not count: near the limit they are given back."""
        return self.needed_bytes <= gpu.memory_bytes

    def tight(self, gpu: Device, headroom: float = HEADROOM) -> bool:
        """Whether gaps included it leaves less than `headroom`, a share of the device, free."""
        return self.device_bytes > (1 - headroom) * gpu.memory_bytes

    def verdict(self, gpu: Device, headroom: float = HEADROOM) -> str:
        """`FITS`, `TIGHT` or `DOES_NOT_FIT`; a tight plan runs several times slower than it could.

        Raises:
            ValueError: `headroom` is not a share between 0 and 1.
        """
        if not 0 <= headroom < 1:
            raise ValueError(
                f"headroom is {headroom}; it is the share of the device to leave free, from 0 to "
                f"below 1. Write headroom={HEADROOM}."
            )
        if not self.fits(gpu):
            return DOES_NOT_FIT
        return TIGHT if self.tight(gpu, headroom) else FITS

    @property
    def needed_bytes(self) -> float:
        """The least that a device must have: no gaps, but what is outside the allocator."""
        return self.allocated_bytes + self.context_bytes

    @property
    def state_bytes(self) -> float:
        """What lasts from step to step: parameters, gradients and optimizer state."""
        names = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
        return sum(self.bytes_by_category[name] for name in names)


def worst(rows: tuple[StageMemory, ...]) -> StageMemory:
    """The stage that holds most. Raises ValueError where there is none."""
    if not rows:
        raise ValueError("worst: rows is empty; give what memory() found, a row for each stage.")
    return max(rows, key=lambda row: row.allocated_bytes)
