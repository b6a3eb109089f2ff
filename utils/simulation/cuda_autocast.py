"""Autocast's lists for CUDA, applied to tensors that stay on `cpu`.

After aten/src/ATen/autocast_mode.h of PyTorch, whose macros these tables follow by name; it installs
the file, and a test holds them against it. An operator is named with its overload, as in
"softmax.int". The kernels stand at the dispatch key of autocast, above autograd: methods, functions
and what libraries call in C++ all pass there, and backward keeps what it would keep on CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from utils.shims.torch_simulated import autocast_off, autocast_operators

Kernel = Callable[..., Any]
_LOW = (torch.float16, torch.bfloat16)

# AT_FORALL_LOWER_PRECISION_FP, without what autocast for CPU lowers as well.
LOWER = (
    "addmv", "addr", "mv", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "einsum", "_convolution", "convolution",
)  # fmt: skip
# AT_FORALL_FP32: the arguments go up.
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
    "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim",
    "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
# AT_FORALL_FP32_SET_OPT_DTYPE: the argument stays as it is, the result goes up.
FLOAT32_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
    "sum.dim_IntList",
)  # fmt: skip
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: likewise, by another overload.
FLOAT32_NORMS = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
# AT_FORALL_PROMOTE: all arguments to the widest type among them.
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
    "tensordot", "scatter_add",
)  # fmt: skip
# In autocast's lists for CPU alone, and the same on CUDA without one: `cat` takes the widest type
# there as well, and the convolutions come back as others that are listed.
ALIKE = frozenset({"cat", "stack", "conv1d.padding", "conv2d.padding", "conv3d.padding"})
BANNED = "binary_cross_entropy"
_DTYPE_PLACES = {"softmax.int": 2, "log_softmax.int": 2}  # elsewhere by keyword alone


def autocast_kernels() -> Iterator[tuple[str, Kernel]]:
    """Each operator's name and its kernel; it runs where autocast is on."""
    yield from ((name, _lowered(operator(name))) for name in LOWER)
    yield from ((name, _raised(operator(name))) for name in FLOAT32)
    yield from (
        (name, _raising(operator(name), _DTYPE_PLACES.get(name))) for name in FLOAT32_RESULT
    )
    for name, other in FLOAT32_NORMS.items():
        yield name, _norm(operator(name), operator(other))
    yield from ((name, _widened(operator(name))) for name in WIDEST)
    yield from ((name, torch.library.fallthrough_kernel) for name in cpu_alone())
    yield BANNED, _banned


@functools.cache
def cpu_alone() -> frozenset[str]:
    """Operators that autocast changes on CPU alone: on CUDA they run in whatever type comes."""
    return autocast_operators("AutocastCPU") - autocast_operators("AutocastCUDA") - ALIKE


def operator(name: str) -> Any:
    """The operator of an overload's name, such as "softmax.int"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _lowered(op: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        to = torch.get_autocast_dtype("cpu")
        with autocast_off():
            return op(*_cast(args, to), **kwargs)

    return kernel


def _raised(op: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with autocast_off():
            return op(*_cast(args, torch.float32), **kwargs)

    return kernel


def _raising(op: Any, place: int | None) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype") or (args[place] if place and len(args) > place else None)
        with autocast_off():
            if given is None and is_eligible(args[0]):
                return op(*args[:place], **{**kwargs, "dtype": torch.float32})
            return op(*args, **kwargs)

    return kernel


def _norm(op: Any, with_dtype: Any) -> Kernel:
    def kernel(tensor: torch.Tensor, p: Any = 2, *rest: Any) -> Any:
        with autocast_off():
            if not is_eligible(tensor):
                return op(tensor, p, *rest)
            # Without dimensions to reduce there is no argument for keeping them either.
            return with_dtype(tensor, p, *(rest + (False,) * (len(rest) == 1)), dtype=torch.float32)

    return kernel


def _widened(op: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        floats = [leaf.dtype for leaf in _tensors(args) if is_eligible(leaf)]
        with autocast_off():
            if len(set(floats)) < 2:
                return op(*args, **kwargs)
            return op(*_cast(args, max(floats, key=lambda dtype: dtype.itemsize)), **kwargs)

    return kernel


def _banned(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "F.binary_cross_entropy and nn.BCELoss are refused under autocast on CUDA: their gradient "
        "overflows in float16. Use F.binary_cross_entropy_with_logits on the values before the "
        "sigmoid."
    )


def is_eligible(value: Any) -> bool:
    """Whether autocast may change a tensor's type."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _cast(args: Iterable[Any], to: torch.dtype) -> list[Any]:
    return [
        arg.to(to) if is_eligible(arg) else _cast(arg, to) if isinstance(arg, list) else arg
        for arg in args
    ]
