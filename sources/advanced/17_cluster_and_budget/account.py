"""What a finished run amounts to: MFU, HFU, dollars for a million tokens.

MFU counts what the model needs, HFU what the hardware computed (`utils.planner.flops`): the two
differ by what is recomputed, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog import Device, device
from utils.checked import check_public
from utils.rules import of_kind, positive, whole

__all__ = ["Account"]


@dataclass(frozen=True, kw_only=True)
class Account:
    """A run, or a part of one, as it was measured or published.

    Attributes:
        gpu: The device, by its name in the catalog or as a row of your own.
        gpus: How many.
        seconds: Wall time; of all GPUs together with `gpus=1`, where only GPU hours are published.
        tokens: Tokens trained on in that time.
        model_flops: What the model needs for these tokens, forward and backward (MFU).
        hardware_flops: What was computed, recomputation included (HFU); None for `model_flops`.
        usd_per_gpu_hour: Price; None where dollars are not asked for.
        peak_flops_per_second: Of one GPU; None for the device's bf16 peak.
    """

    gpu: Device | str
    gpus: int = 1
    seconds: float
    tokens: float
    model_flops: float
    hardware_flops: float | None = None
    usd_per_gpu_hour: float | None = None
    peak_flops_per_second: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a time, a count or a price that is not above zero."""
        of_kind("account", gpu=(self.gpu, Device, str))
        whole("account", gpus=self.gpus)
        asked = {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "model_flops": self.model_flops,
            "hardware_flops": self.hardware_flops,
            "usd_per_gpu_hour": self.usd_per_gpu_hour,
            "peak_flops_per_second": self.peak_flops_per_second,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        positive("account", least=0, **given)
        if empty := [name for name, value in given.items() if value == 0]:
            raise ValueError(f"account: {empty[0]} is 0; it must be above 0.")
        if self.hardware_flops is not None and self.hardware_flops < self.model_flops:
            raise ValueError(
                "account: hardware_flops is below model_flops; the hardware computes at least what "
                "the model needs. Are the two swapped?"
            )

    @property
    def device(self) -> Device:
        """The device's row."""
        return device(self.gpu) if isinstance(self.gpu, str) else self.gpu

    @property
    def gpu_hours(self) -> float:
        """Of all GPUs together."""
        return self.gpus * self.seconds / 3600

    @property
    def mfu(self) -> float:
        """Model FLOP utilization: what the model needed over what the GPUs could have computed."""
        return self.model_flops / self._possible_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilization: what was computed over what could have been."""
        return (self.hardware_flops or self.model_flops) / self._possible_flops

    @property
    def usd(self) -> float:
        """Dollars for these tokens. Raises ValueError where no price was given."""
        if self.usd_per_gpu_hour is None:
            raise ValueError(
                "account: no price. Write usd_per_gpu_hour=price(...).usd_per_gpu_hour."
            )
        return self.gpu_hours * self.usd_per_gpu_hour

    @property
    def usd_per_million_tokens(self) -> float:
        """Of training, not of serving. Raises ValueError where no price was given."""
        return 1e6 * self.usd / self.tokens

    @property
    def _possible_flops(self) -> float:
        peak = self.peak_flops_per_second or self.device.peak_flops_per_second("bf16")
        return peak * self.gpus * self.seconds


check_public(globals())
