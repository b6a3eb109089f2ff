"""Mixed precision: the 16-bit type that a device computes, a training step with it, and TF32.

Micikevicius and others 2017, "Mixed Precision Training", arXiv:1710.03740: fp32 weights, 16-bit
arithmetic, and for fp16 a scaled loss. PyTorch's form of it is `torch.amp`.
"""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from utils.shims.torch_ import has_bf16_instructions
from utils.start import choose_dtype

LOW_DTYPES = (torch.float16, torch.bfloat16)
Loss = Callable[[Tensor, Tensor], Tensor]


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
def tf32(enabled: bool = True) -> Iterator[None]:
    """Compute fp32 matmuls and convolutions on CUDA in TF32 or not, and set it back afterwards.

    Affects speed and digits, never bytes, and CUDA alone. PyTorch's own defaults differ:
    convolutions use TF32, matmuls do not. These are the settings of PyTorch 2.9 and later
    (docs.pytorch.org/docs/stable/notes/cuda.html, "TensorFloat-32"); to set them and to read the
    older `allow_tf32` raises an error in PyTorch.
    """
    # PyTorch makes `conv` at import, where a type checker does not see it.
    convolutions = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    switches = (torch.backends.cuda.matmul, convolutions)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "tf32" if enabled else "ieee"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


def device_of(device: torch.device | str) -> torch.device:
    """The device of a name.

    Raises:
        ValueError: PyTorch knows none of that name.
    """
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; write 'cpu', 'cuda' or 'cuda:0'.") from error


def _dtype_of(device: torch.device) -> tuple[torch.dtype, str]:
    """`choose_dtype`, which asks a GPU. Raises ValueError where there is none."""
    try:
        return choose_dtype(device)
    except (RuntimeError, AssertionError) as error:  # torch without a driver, or without CUDA
        raise ValueError(f"device is {str(device)!r}, which does not answer: {error}") from error


def choose_autocast_dtype(
    device: torch.device | str, wanted: torch.dtype | None = None
) -> tuple[torch.dtype, str]:
    """The 16-bit type for mixed precision on a device, and why; or the wanted one, if it suits.

    Raises:
        ValueError: the wanted type has no 16 bits, or the GPU would only emulate it.
    """
    device = device_of(device)
    if wanted is not None and wanted not in LOW_DTYPES:
        raise ValueError(
            f"{wanted} is no type for mixed precision. Write torch.float16 or torch.bfloat16."
        )
    dtype, reason = _dtype_of(device)
    if wanted is None or wanted is dtype:
        return dtype, reason
    if wanted is torch.bfloat16:  # only where the device lacks it is float16 the choice
        raise ValueError(
            f"torch.bfloat16 does not suit this device: {reason}. Take torch.float16, with "
            "torch.amp.GradScaler; choose_autocast_dtype(device) chooses it."
        )
    return wanted, "asked for; its range is small, so it needs loss scaling"


def has_native_dtype(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether the device has arithmetic for a 16-bit type, so that it is not slower than fp32.

    On a CPU, fp16 and bf16 are emulated without the instructions. fp16 is answered False there in
    any case: oneDNN trains convolutions in it some 40 times slower than in fp32, even on
    processors with the instructions.
    """
    device = device_of(device)
    if device.type == "cpu":
        return dtype is torch.bfloat16 and _cpu_computes_bf16()
    return dtype is torch.float16 or _dtype_of(device)[0] is dtype


def _cpu_computes_bf16() -> bool:
    """By oneDNN where PyTorch has it. On x86 oneDNN says yes to any AVX-512: ask the processor too."""
    if not torch.backends.mkldnn.is_available():  # PyTorch for macOS has no such operator either
        return False
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    has_instructions = not is_x86 or has_bf16_instructions()
    return has_instructions and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class MixedStep:
    """One training step in mixed precision: `loss = step(inputs, labels)`, the loss detached.

    The parameters stay in fp32. With fp16 the loss is scaled, so that small gradients survive.
    Steps whose gradients overflow are skipped, and the scale is lowered.

    Args:
        model: with fp32 parameters, on one device.
        optimizer: of the model's parameters.
        loss_function: of (outputs, labels), the mean over the batch.
        dtype: torch.float16 or torch.bfloat16; torch.float32 is the plain step; None for
            the choice of `choose_autocast_dtype`.
        scaler: a `torch.amp.GradScaler` with settings of your own, for float16.

    Raises:
        ValueError: the model's parameters are not in fp32, or the dtype does not suit.

    Warns:
        UserWarning: a scaler is given that the dtype does not need.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_function: Loss = nn.functional.cross_entropy,
        *,
        dtype: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.model, self.optimizer, self._loss_function = model, optimizer, loss_function
        self._device_type = _checked_device(model).type
        self.dtype = _checked_dtype(self._device_type, dtype)
        if scaler is not None and scaler.is_enabled() and self.dtype is not torch.float16:
            warnings.warn(
                f"A GradScaler is needless with {self.dtype}: its range is that of fp32, so "
                "gradients do not underflow. It is left out.",
                stacklevel=2,
            )
            scaler = None
        enabled = self.dtype is torch.float16
        self.scaler = scaler or torch.amp.GradScaler(self._device_type, enabled=enabled)

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch. Returns the loss, a detached fp32 scalar."""
        self.optimizer.zero_grad()
        mixed = self.dtype in LOW_DTYPES
        low = self.dtype if mixed else None
        with torch.amp.autocast(self._device_type, dtype=low, enabled=mixed):
            loss = self._loss_function(self.model(inputs), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach().float()


def _checked_device(model: nn.Module) -> torch.device:
    """Where the model is; refuses one that was cast as a whole."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError("The model has no parameters: there is nothing to train.")
    low = sorted({str(p.dtype) for p in model.parameters() if p.dtype in LOW_DTYPES})
    if low:
        raise ValueError(
            f"The model has parameters in {', '.join(low)}. Leave out model.half() or "
            ".bfloat16(): autocast casts copies, and the fp32 parameters take the updates."
        )
    return parameter.device


def _checked_dtype(device_type: str, dtype: torch.dtype | None) -> torch.dtype:
    return torch.float32 if dtype is torch.float32 else choose_autocast_dtype(device_type, dtype)[0]
