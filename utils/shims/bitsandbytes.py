"""bitsandbytes: its eight-bit optimizers and four-bit layers on tensors without data."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn

from utils.shims.shim import Library, Shim
from utils.shims.torch_ import with_data

BITSANDBYTES = Library("bitsandbytes", "0.50.2", "utils/shims/bitsandbytes.py")
_TABLE = Shim(
    BITSANDBYTES,
    "bitsandbytes.functional:create_dynamic_map",
    "code_tables",
    "the optimizers read a table of 256 values back as numbers",
    patched=True,
)
_STATE = Shim(
    BITSANDBYTES,
    "bitsandbytes.optim.optimizer:Optimizer8bit.get_state_buffer",
    "paged_on_host",
    "a paged optimizer's state is in memory that CUDA manages, and no allocator counts",
    patched=True,
)
_WEIGHT = Shim(
    BITSANDBYTES,
    "bitsandbytes.nn.modules:Params4bit.__new__",
    "four_bit_weights",
    "a tensor without data cannot be of a subclass of its own",
    patched=True,
)
_FORWARD = Shim(
    BITSANDBYTES,
    "bitsandbytes.nn.modules:Linear4bit.forward",
    "four_bit_weights",
    "a layer that was never moved quantizes at its first use here",
    patched=True,
)
SHIMS = (_TABLE, _STATE, _WEIGHT, _FORWARD)
# On a CPU its import warns of an optional kernel for inference, which nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
PAGED_FROM = 100_000  # elements; smaller states are never paged (`get_state_buffer`)


def code_tables() -> AbstractContextManager[Any]:
    """Inside, tables of values are computed with data and then copied: they depend on nothing."""
    make = _TABLE.get()

    def table(*args: Any, **kwargs: Any) -> torch.Tensor:
        with with_data():
            values = make(*args, **kwargs).tolist()
        return torch.tensor(values)

    return _TABLE.replaced(table)


@contextlib.contextmanager
def paged_on_host(
    on_host: Callable[[], AbstractContextManager[Any]], note: Callable[[], None]
) -> Iterator[None]:
    """Inside, the state of paged optimizers is made in `on_host()`, and `note()` hears of it."""
    plain = _STATE.get()

    def buffer(optimizer: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if not optimizer.is_paged or p.numel() < PAGED_FROM:
            return (
                torch.zeros_like(p, dtype=dtype)
                if optimizer.is_paged
                else plain(optimizer, p, dtype)
            )
        note()
        with on_host():
            state: Any = torch.zeros_like(p, dtype=dtype)
        state.is_paged, state.page_deviceid = True, 0
        return state

    import bitsandbytes.functional

    with _STATE.replaced(buffer):
        with mock.patch.object(bitsandbytes.functional, "prefetch_tensor", lambda *_, **__: None):
            yield


@contextlib.contextmanager
def four_bit_weights() -> Iterator[None]:
    """Inside, `Linear4bit` holds a plain parameter with the attributes of its own kind.

    It is quantized when the layer is moved to a device, as with data, or else at its first use.
    """
    import bitsandbytes.functional

    forward, make = _FORWARD.get(), _WEIGHT.get()

    def weight(
        cls: Any,
        data: Any = None,
        requires_grad: bool = False,
        quant_state: Any = None,
        blocksize: int | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        module: Any = None,
        bnb_quantized: bool = False,
        **_: Any,
    ) -> nn.Parameter:
        if type(data) is torch.Tensor:
            return make(
                cls,
                data,
                requires_grad,
                quant_state,
                blocksize,
                compress_statistics,
                quant_type,
                quant_storage,
                module,
                bnb_quantized,
            )
        how = {
            "blocksize": blocksize or 64,
            "compress_statistics": compress_statistics,
            "quant_type": quant_type,
            "quant_state": quant_state,
            "quant_storage": quant_storage,
            "bnb_quantized": bnb_quantized,
            "module": module,
        }
        return _parameter(data, how)

    def quantized_first(layer: Any, x: torch.Tensor) -> torch.Tensor:
        quantize(layer)
        return forward(layer, x)

    tables = mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True)
    with _WEIGHT.replaced(weight), _FORWARD.replaced(quantized_first), tables:
        yield


def quantize_moved(layer: nn.Module) -> None:
    """Quantize a four-bit layer that was just converted, unless to another type."""
    weight: Any = layer._parameters.get("weight")
    if getattr(weight, "bnb_quantized", None) is False:
        if weight.dtype is weight.dtype_before:
            quantize(layer)
        else:
            weight.dtype_before = weight.dtype


def quantize(layer: Any) -> None:
    """Replace the weight of a four-bit layer by its quantized form, once."""
    weight = layer._parameters["weight"]
    if getattr(weight, "bnb_quantized", True):
        return
    layer._parameters["weight"] = packed(weight)
    layer.quant_state = layer._parameters["weight"].quant_state


def packed(weight: Any) -> Any:
    """A four-bit layer's weight in its quantized form; itself if it is that already."""
    if getattr(weight, "bnb_quantized", True):
        return weight
    from bitsandbytes.functional import quantize_4bit

    with torch.no_grad():
        values, state = quantize_4bit(
            weight.detach().contiguous(),
            blocksize=weight.blocksize,
            compress_statistics=weight.compress_statistics,
            quant_type=weight.quant_type,
            quant_storage=weight.quant_storage,
        )
    names = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "module")
    how = {name: getattr(weight, name) for name in names}
    return _parameter(values, {**how, "quant_state": state, "bnb_quantized": True})


def _parameter(data: torch.Tensor, attributes: dict[str, Any]) -> nn.Parameter:
    made = nn.Parameter(data.detach(), requires_grad=False)
    vars(made).update(attributes, dtype_before=data.dtype)
    return made
