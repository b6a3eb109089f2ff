"""Autocast in a simulation gives the types that CUDA gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from silent_cases import A100, peak
from torch import nn

from utils.shims.torch_autocast import autocast_operators
from utils.simulation import cuda_autocast, simulate

# --- autocast


def cast(dtype: torch.dtype, call: Any) -> torch.dtype:
    found: list[torch.dtype] = []

    def step(model: nn.Module, _: Any) -> None:
        x = model(torch.randn(8, 8, device="cuda")).to(dtype)
        with torch.autocast("cuda", dtype=dtype):
            found.append(call(x).dtype)

    simulate(lambda: nn.Linear(8, 8).cuda(), step, device=A100)
    return found[-1]


HIGH = {
    "softmax": lambda x: x.softmax(-1),
    "F.softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "pow": lambda x: x.pow(2),
    "**": lambda x: x**2,
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(-1),
    "exp": lambda x: x.exp(),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: x.norm(dim=-1),
    "F.softplus": F.softplus,
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.long, device="cuda")),
    "cumsum": lambda x: x.cumsum(0),
    "rsqrt": lambda x: x.rsqrt(),
    "cdist": lambda x: torch.cdist(x, x),
}
LOW = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x),
    "relu": lambda x: x.relu(),
    "mean": lambda x: x.mean(),
    "gelu": F.gelu,
    "silu": F.silu,
    "mv": lambda x: x.mv(x[0]),
    "avg_pool3d": lambda x: F.avg_pool3d(x.view(1, 1, 4, 4, 4), 2),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*HIGH, *LOW])
def test_autocast_as_on_cuda(name: str, dtype: torch.dtype) -> None:
    call, wanted = (HIGH[name], torch.float32) if name in HIGH else (LOW[name], dtype)
    assert cast(dtype, call) is wanted


def listed(header: str, macro: str) -> set[str]:
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", header, re.DOTALL)
    assert body, f"PyTorch has no list {macro} any more"
    rows = re.findall(r"_\(\s*(?:ADD_NS\()?(\w+)\)?(?:,\s*\"?([\w.]+))?", body[1])
    return {".".join(filter(None, row)) for row in rows}


def test_the_lists_are_pytorchs_own() -> None:
    """aten/src/ATen/autocast_mode.h, which PyTorch installs, and the dispatcher's own table."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    assert listed(header, "AT_FORALL_FP32") == set(cuda_autocast.FLOAT32)
    assert listed(header, "AT_FORALL_FP32_SET_OPT_DTYPE") == set(cuda_autocast.FLOAT32_RESULT)
    assert listed(header, "AT_FORALL_PROMOTE") == set(cuda_autocast.WIDEST)
    on_cuda, on_cpu = map(autocast_operators, ("AutocastCUDA", "AutocastCPU"))
    lower = listed(header, "AT_FORALL_LOWER_PRECISION_FP")
    assert lower - on_cpu == set(cuda_autocast.LOWER) & lower, "CPU's autocast lowers the rest"
    mine = {
        *cuda_autocast.LOWER,
        *cuda_autocast.FLOAT32,
        *cuda_autocast.FLOAT32_RESULT,
        *cuda_autocast.FLOAT32_NORMS,
        *cuda_autocast.WIDEST,
        cuda_autocast.BANNED,
    }
    cudnn = {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"}
    assert on_cuda - on_cpu - mine == cudnn, "CUDA's autocast knows an operator that is not here"


def test_a_method_keeps_what_the_function_keeps() -> None:
    def keeps(call: Any) -> int:
        def step(model: nn.Module, _: Any) -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                call(model(torch.randn(512, 1024, device="cuda"))).sum().backward()

        return peak(lambda: nn.Linear(1024, 1024).cuda(), step)

    assert keeps(lambda x: x.softmax(-1)) == keeps(lambda x: F.softmax(x, -1))


def test_binary_cross_entropy_is_refused_under_autocast_as_on_cuda() -> None:
    with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        cast(torch.float16, lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)))
