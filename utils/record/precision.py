"""How numbers are computed: the four choices that records compare, and who offers them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """A way to compute. `autocast` is mixed precision's 16-bit type, `tf32` the 19-bit matmul."""

    name: str
    autocast: torch.dtype | None = None
    tf32: bool = False


FP32 = Precision("fp32")
TF32 = Precision("tf32", tf32=True)
AMP_FP16 = Precision("amp fp16", autocast=torch.float16)
AMP_BF16 = Precision("amp bf16", autocast=torch.bfloat16)


def offered(device: torch.device) -> list[Precision]:
    """What the device computes itself; emulated types are slow and would mislead."""
    if device.type != "cuda":
        return [FP32, AMP_BF16]
    has_tf32 = torch.cuda.get_device_capability(device) >= (8, 0)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    all_of_them = {FP32: True, TF32: has_tf32, AMP_FP16: True, AMP_BF16: has_bf16}
    return [precision for precision, has in all_of_them.items() if has]


@contextlib.contextmanager
def computing(precision: Precision) -> Iterator[None]:
    """Set matmuls and convolutions in fp32 to TF32 or not, and back afterwards.

    PyTorch's own defaults differ: convolutions use TF32, matmuls do not.
    """
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [switch.fp32_precision for switch in switches]
    wanted = "tf32" if precision.tf32 else "ieee"
    try:
        for switch in switches:
            switch.fp32_precision = wanted
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value
