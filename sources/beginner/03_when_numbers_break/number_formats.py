"""Floating-point formats as bits: what each can hold, and how a number becomes bits and back.

Python alone, exact: a value is sign * significand * 2**exponent (IEEE 754-2019, section 3.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from utils.checked import check_public

__all__ = ["FORMATS", "NumberFormat"]


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format with subnormals.

    Attributes:
        name: Such as "bf16".
        exponent_bits: They set the range.
        mantissa_bits: They set the digits: 2**mantissa_bits numbers from one power of two to the next.
        has_infinity: False for fp8 e4m3, which keeps only its largest bit pattern for NaN and uses
            the rest of that exponent for numbers.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True

    def __post_init__(self) -> None:
        """Refuse formats without range or digits. Raises ValueError."""
        if self.exponent_bits < 2 or self.mantissa_bits < 1:
            raise ValueError(
                f"{self.exponent_bits} exponent and {self.mantissa_bits} mantissa bits are too few; "
                "take 2 and 1 or more."
            )

    @property
    def bits(self) -> int:
        """All bits, with the sign."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """Subtracted from the exponent field."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def smallest_normal(self) -> float:
        """Below it digits are lost one after the other."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest subnormal: below half of it a number becomes zero."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        top = 2**self.exponent_bits - (2 if self.has_infinity else 1)
        steps = 2 ** (self.mantissa_bits + 1) - (1 if self.has_infinity else 2)
        return steps * 2.0 ** (top - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """The step from 1 to the next number."""
        return 2.0**-self.mantissa_bits

    def spacing(self, value: float) -> float:
        """The step between neighbours at a finite value."""
        exponent = math.frexp(value)[1] - 1 if value else 1 - self.bias
        return 2.0 ** (max(exponent, 1 - self.bias) - self.mantissa_bits)

    def encode(self, value: float) -> str:
        """The bits of the nearest number, "0"s and "1"s, sign first; ties go to the even one.

        What is too large becomes infinity. A format without one takes its largest number instead;
        libraries differ there: some give NaN.
        """
        sign = "1" if math.copysign(1.0, value) < 0 else "0"
        if math.isnan(value):
            return sign + "1" * (self.bits - 1)
        steps = self._rounded(abs(value))
        return f"{sign}{steps:0{self.bits - 1}b}"

    def _rounded(self, size: float) -> int:
        """Exponent and mantissa fields as one number: neighbours differ by 1."""
        limit = self._field(self.largest)
        if math.isinf(size):
            return limit + self.has_infinity
        # round() of a float takes the even neighbour, and the division is by a power of two: exact.
        rounded = round(size / self.spacing(size)) * self.spacing(size)
        if rounded > self.largest:
            return limit + self.has_infinity
        return self._field(rounded)

    def _field(self, size: float) -> int:
        spacing = self.spacing(size)
        steps = int(size / spacing)
        exponent = int(math.log2(spacing)) + self.mantissa_bits + self.bias
        if steps < 2**self.mantissa_bits:
            return steps
        return (exponent << self.mantissa_bits) + steps - 2**self.mantissa_bits

    def decode(self, bits: str) -> float:
        """The value of a bit pattern.

        Raises:
            ValueError: not as many "0"s and "1"s as the format has bits.
        """
        if len(bits) != self.bits or set(bits) - {"0", "1"}:
            raise ValueError(f"{self.name} takes {self.bits} digits 0 or 1; this is {bits!r}.")
        sign = -1.0 if bits[0] == "1" else 1.0
        field, fraction = divmod(int(bits[1:], 2), 2**self.mantissa_bits)
        if field == 2**self.exponent_bits - 1 and self.has_infinity:
            return math.nan if fraction else sign * math.inf
        if "0" not in bits[1:]:
            return math.nan
        whole = fraction + (2**self.mantissa_bits if field else 0)
        return sign * whole * 2.0 ** (max(field, 1) - self.bias - self.mantissa_bits)

    def round(self, value: float) -> float:
        """The value after a trip through the format."""
        return self.decode(self.encode(value))


# fp8: Micikevicius and others 2022, "FP8 formats for deep learning", arXiv:2209.05433, table 1.
# tf32: NVIDIA A100 whitepaper; it is stored in 32 bits, of which 19 count.
FORMATS = {
    "fp32": NumberFormat("fp32", 8, 23),
    "tf32": NumberFormat("tf32", 8, 10),
    "bf16": NumberFormat("bf16", 8, 7),
    "fp16": NumberFormat("fp16", 5, 10),
    "fp8 e4m3": NumberFormat("fp8 e4m3", 4, 3, has_infinity=False),
    "fp8 e5m2": NumberFormat("fp8 e5m2", 5, 2),
}


check_public(globals())
