"""How a simulated device allocates, which kernels it would choose, and what it has to offer."""

from __future__ import annotations

from dataclasses import dataclass

from utils import catalog
from utils.memory.source import CUDA_BLOCK_BYTES
from utils.simulation.asked_kernels import AskedKernels
from utils.simulation.gloo import with_gloo
from utils.simulation.scratch import Scratch, cpu_scratch, cuda_scratch
from utils.units import format_bytes

SIMULATED = "a simulated "  # how its name begins
VERDICTS = ("Fits ", "Does not fit ")  # how a verdict begins
FLASH_CAPABILITY = (8, 0)  # flash attention's kernels need an Ampere GPU or a newer one


@dataclass(frozen=True)
class SimulatedDevice:
    """A device as the simulator sees it.

    `usable_bytes` is its memory less the context, None for a CPU, where nothing is cut off.
    `total_bytes`, `capability` and `multiprocessors` are what CUDA would report.
    `granularity_bytes`: its allocator rounds up to a multiple of it. `asked`: kernels of this
    machine that tell what they take in between.
    """

    name: str
    usable_bytes: int | None
    total_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    granularity_bytes: int
    is_cuda: bool
    flash: bool
    scratch: Scratch
    asked: AskedKernels | None = None

    def verdict(self, peak_bytes: int, reserved_bytes: int | None) -> str:
        """Whether a step fits, with the margin, in a sentence; empty for a CPU.

        `reserved_bytes` is what the caching allocator takes for tensors of at most `peak_bytes`
        together, and decides.
        """
        if self.usable_bytes is None:
            return ""
        margin = self.usable_bytes - (peak_bytes if reserved_bytes is None else reserved_bytes)
        room = f"the {format_bytes(self.usable_bytes)} that {self.name} leaves beside its context"
        if margin >= 0 and reserved_bytes is not None:
            return (
                f"Fits {room}: its allocator reserves {format_bytes(reserved_bytes)}, which leaves "
                f"{format_bytes(margin)} to spare."
            )
        if margin >= 0:
            return f"Fits {room}, with {format_bytes(margin)} to spare."
        if peak_bytes > self.usable_bytes:
            return f"Does not fit {room}: {format_bytes(peak_bytes - self.usable_bytes)} too much."
        return (
            f"Does not fit {room}: the tensors would, but what the allocator reserves for them is "
            f"{format_bytes(-margin)} too much. With expandable_segments:True in "
            "PYTORCH_CUDA_ALLOC_CONF it comes close to the tensors."
        )


def simulated_device(name: str) -> SimulatedDevice:
    """ "cpu", or a GPU of the catalog such as "RTX 4090" or "A100 80GB".

    Raises:
        ValueError: the catalog has no such device; the message offers the nearest names.
    """
    if name.strip().lower() == "cpu":
        asked = AskedKernels(cpu_scratch)
        return SimulatedDevice(
            "a simulated CPU", None, 0, (0, 0), 0, 1, False, False, with_gloo(asked.scratch), asked
        )
    card = catalog.device(name)
    return SimulatedDevice(
        name=f"{SIMULATED}{card.name}",
        usable_bytes=card.memory_bytes - card.context_bytes,
        total_bytes=card.memory_bytes,
        capability=card.capability,
        multiprocessors=card.multiprocessors,
        granularity_bytes=CUDA_BLOCK_BYTES,
        is_cuda=True,
        flash=tuple(card.capability) >= FLASH_CAPABILITY,
        scratch=cuda_scratch,
    )
