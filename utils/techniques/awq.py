"""AWQ by hand: before rounding, widen the columns whose inputs are large.

Lin et al. 2023, arXiv:2306.00978, section 3.2: W x = (W diag(s)) (x / s). A column that is multiplied
by s > 1 is rounded s times more finely, as long as its group's reach does not grow. What its input is
divided by folds into the norm or layer before. s is the mean magnitude of each input to a power, and
the power is searched; 0 is plain rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from utils.techniques.rounding import Rounded, output_error, round_to_nearest

TRIES = 20  # powers from 0 to 0.95, as in the authors' code


@dataclass(frozen=True)
class Scaled:
    """A weight that was widened, then rounded.

    Attributes:
        rounded: of W diag(s).
        column_scales: s, fp32 (inputs,).
        power: which was best; 0 is plain rounding.
    """

    rounded: Rounded
    column_scales: Tensor
    power: float

    def weight(self) -> Tensor:
        """The weight in effect, the inputs' share taken back: fp32 (outputs, inputs)."""
        return self.rounded.weight() / self.column_scales

    @property
    def stored_bytes(self) -> float:
        """As without scaling: the scales of columns fold into what stands before the layer."""
        return self.rounded.stored_bytes


def awq(
    weight: Tensor, moments: Tensor, magnitudes: Tensor, bits: int, group: int | None = None
) -> Scaled:
    """Scale columns by their inputs' magnitude to the best power, then round to nearest.

    Args:
        weight: (outputs, inputs).
        moments: `second_moments` of the layer's inputs.
        magnitudes: mean of |x| of each input, (inputs,).
        bits: 2 to 8.
        group: inputs that share a scale; None for one scale a row.

    Raises:
        ValueError: bits or group cannot be used, or the magnitudes are of another width.
    """
    if magnitudes.shape != (weight.shape[1],):
        raise ValueError(
            f"The layer has {weight.shape[1]} inputs, and the magnitudes are "
            f"{tuple(magnitudes.shape)}: collect them from the inputs of this very layer."
        )
    found = []
    for power in (step / TRIES for step in range(TRIES)):
        scales = column_scales(magnitudes, power)
        rounded = round_to_nearest(weight.detach().float() * scales, bits, group)
        found.append(Scaled(rounded, scales, power))
    return min(found, key=lambda tried: output_error(weight, tried.weight(), moments))


def column_scales(magnitudes: Tensor, power: float) -> Tensor:
    """Magnitudes to a power, with 1 in the middle of their range: fp32 (inputs,), numbers of fp16."""
    scales = magnitudes.float().clamp(min=1e-4) ** power
    return (scales / (scales.max() * scales.min()).sqrt()).half().float()
