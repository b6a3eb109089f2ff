"""LSTM, GRU and RNN: their fused kernels keep memory that no source states, so a note says so.

Without data PyTorch runs them step by step. cuDNN keeps a *reserve space* for backward, and oneDNN a
workspace, whose sizes only the libraries themselves can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from utils.shims.torch_simulated import kernels_replaced
from utils.simulation.cuda_autocast import operator

NOTE = (
    "LSTM, GRU and RNN are approximated: they are simulated step by step, and the fused kernels of "
    "cuDNN and oneDNN keep other memory for backward."
)
_NAMES = [
    f"{kind}.{form}"
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for form in ("input", "data")
]


def noted_recurrences(remark: Callable[[str], None]) -> AbstractContextManager[None]:
    """Inside, a recurrent layer has the result say how far it can be trusted."""

    def kernel(name: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            remark(NOTE)
            return operator(name).decompose(*args, **kwargs)

        return noted

    return kernels_replaced({(f"aten::{name}", "AutogradCPU"): kernel(name) for name in _NAMES})
