"""The lesson's methods by name: what each makes of a weight and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from utils.techniques import nf4

from .awq import awq
from .gptq import gptq
from .int8 import Int8Weight
from .rounding import InFewBits, round_to_nearest
from .weight_only import Inputs

Method = Callable[[Tensor, Inputs], InFewBits]


@dataclass(frozen=True)
class Sixteen:
    """A weight in fp16: what the others are compared with."""

    half: Tensor

    def weight(self) -> Tensor:
        """The stored values in fp32."""
        return self.half.float()

    @property
    def stored_bytes(self) -> float:
        """Two bytes a weight."""
        return 2 * self.half.numel()


def methods(group: int) -> dict[str, Method]:
    """16, 8 and 4 bits, then each method in 4, 3 and 2."""
    found: dict[str, Method] = {
        "fp16": lambda w, x: Sixteen(w.detach().half()),
        "int8": lambda w, x: Int8Weight.of(w),
        "NF4": lambda w, x: nf4.Nf4Weight.of(w),
    }
    for bits in (4, 3, 2):
        found[f"nearest-{bits}"] = partial(_nearest, bits, group)
        found[f"AWQ-{bits}"] = partial(_awq, bits, group)
        found[f"GPTQ-{bits}"] = partial(_gptq, bits, group)
    return found


def _nearest(bits: int, group: int, weight: Tensor, inputs: Inputs) -> InFewBits:
    return round_to_nearest(weight, bits, group)


def _awq(bits: int, group: int, weight: Tensor, inputs: Inputs) -> InFewBits:
    return awq(weight, inputs.moments, inputs.magnitudes, bits, group)


def _gptq(bits: int, group: int, weight: Tensor, inputs: Inputs) -> InFewBits:
    return gptq(weight, inputs.moments, bits, group)
