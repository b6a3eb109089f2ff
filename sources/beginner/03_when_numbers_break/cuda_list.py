"""What CUDA's autocast lifts to fp32, applied by hand: on a CPU autocast lifts other operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Those that the lesson meets of https://docs.pytorch.org/docs/stable/amp.html
CUDA_FP32 = {
    "softmax",
    "log_softmax",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "pow",
    "rsqrt",
    "exp",
    "log",
    "sum",
    "cumsum",
    "prod",
    "norm",
    "cross_entropy",
    "mse_loss",
    "nll_loss",
}


class CudaList(TorchFunctionMode):
    """Sees each call of PyTorch before autocast does, and lifts the operations of the list."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.__name__ in CUDA_FP32:
            args = tuple(_lifted(each) for each in args)
        return func(*args, **(kwargs or {}))


def _lifted(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if is_tensor else value
