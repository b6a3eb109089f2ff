"""Operations that PyTorch computes by another formula where a tensor has no data.

With data it looks at the values first: a product without a zero among its factors has a short
gradient, and a quantile is selected, not sorted. Written after `prod_backward`, `cumprod_backward`
and `evenly_distribute_backward` of torch/csrc/autograd/FunctionsManual.cpp; factors without a zero
are assumed, as a model's are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from utils.shims.torch_dispatch import below_autograd, kernels_replaced

aten = torch.ops.aten
Tensor = torch.Tensor
Gradient = Callable[..., Tensor]  # of an output's gradient, input, output and further arguments


def formulas(is_cuda: bool) -> AbstractContextManager[None]:
    """Inside, these operations take what they take with data."""
    gradients: dict[str, Gradient] = {
        "prod": _prod,
        "prod.dim_int": _prod_along,
        "cumprod": _cumprod,
    }
    table: dict[tuple[str, str], Callable[..., Any]] = {}
    if not is_cuda:  # whose kernels spread the gradient as those without data do
        gradients |= dict.fromkeys(("max", "min", "median", "nanmedian"), _to_the_equal)
        for name, skips in (("quantile", False), ("nanquantile", True)):
            table[f"aten::{name}", "AutogradCPU"] = partial(_quantile, skips)
            table[f"aten::{name}.scalar", "AutogradCPU"] = partial(_quantile_scalar, skips)
    else:  # counts of experts, which are integers; without data the CPU's kernel refuses them
        table["aten::histc", "AutogradCPU"] = _counts
    for name, gradient in gradients.items():
        table[f"aten::{name}", "AutogradCPU"] = _kernel(name, gradient)
    return kernels_replaced(table)


def _kernel(name: str, gradient: Gradient) -> Callable[..., Tensor]:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(aten, packet), overload or "default")

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, args: Any, kwargs: Any) -> Tensor:
            with below_autograd():
                out = func(x, *args, **kwargs)
            ctx.save_for_backward(x, out)
            ctx.args = args
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, out = ctx.saved_tensors
            return gradient(grads[0], x, out, *ctx.args), None, None

    def kernel(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return Formula.apply(x, args, kwargs)  # pyright: ignore[reportReturnType]
        with below_autograd():
            return func(x, *args, **kwargs)

    return kernel


def _counts(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    return x.new_empty(bins)


def _prod(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return grad * (out / x).conj()


def _prod_along(grad: Tensor, x: Tensor, out: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    if not keepdim and x.dim():
        grad, out = grad.unsqueeze(dim), out.unsqueeze(dim)
    mask = x == 0
    mask.sum(dim, True)
    return grad * (out / x).conj()


def _cumprod(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    weighted, is_zero = out.conj() * grad, x == 0
    flipped = weighted.flip(dim)
    reverse = flipped.cumsum(dim).flip(dim)
    del flipped, weighted
    kept = reverse.div(x.conj())
    del is_zero
    return kept


def _to_the_equal(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """The gradient of the largest, the smallest or the median of all, in equal parts."""
    mask = x == out
    return grad.new_zeros(x.shape).masked_fill_(mask, grad / mask.sum())


def _quantile(
    skips_nan: bool,
    x: Tensor,
    q: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    """By the ranks that are selected in each row, of those below and above each quantile."""
    rows = x.flatten() if dim is None else x.movedim(dim, -1)
    ranks = q.new_empty((*rows.shape[:-1], q.numel()))
    isnan = rows.isnan()
    if skips_nan:
        isnan.sum(-1)
    del isnan
    below, above = ranks.long(), ranks.long()
    wanted = torch.cat([below, above], -1)
    at = torch.empty_like(wanted).split(q.numel(), -1)
    del wanted
    found = rows.gather(-1, at[0])
    if interpolation in ("linear", "midpoint"):
        found = found.lerp(rows.gather(-1, at[1]), ranks)
    found = found.movedim(-1, 0)
    if keepdim:
        found = found.unsqueeze(-1 if dim is None else dim + (dim >= 0))
    return found if q.dim() else found.squeeze(0)


def _quantile_scalar(skips_nan: bool, x: Tensor, q: float, *args: Any, **kwargs: Any) -> Tensor:
    return _quantile(skips_nan, x, torch.scalar_tensor(q, dtype=x.dtype), *args, **kwargs)
