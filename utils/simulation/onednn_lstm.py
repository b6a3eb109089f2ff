"""LSTM on a CPU: oneDNN's fused layer keeps a work space for backward, whose size it alone knows.

Without data PyTorch gives it none. So a layer of the same looks runs once beside the simulation, with
data and backward, and tells its work space and what both kernels take in between.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from utils.memory.source import counted, counts_calls
from utils.shims.torch_ import with_data
from utils.shims.torch_autocast import autocast_off

aten = torch.ops.aten
LAYER, BACKWARD = aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default
MOST_FLOPS = 10**10  # a second or two on one core
_GIVEN = slice(0, 7)  # tensors of the layer itself, which come first in its backward too


def asks(args: tuple[Any, ...]) -> bool:
    """Whether a layer can be asked: this machine counts, and it takes no more than seconds."""
    rows, weights = args[0].shape[:-1].numel(), args[1].numel() + args[2].numel()
    return counts_calls() and 6 * rows * weights <= MOST_FLOPS


def layer(*args: Any) -> tuple[torch.Tensor, ...]:
    """The results of `mkldnn_rnn_layer`, its work space among them."""
    *made, _ = LAYER(*args)
    size = _forward(torch.is_grad_enabled(), _looks(args))[0] if asks(args) else 0
    return *made, args[0].new_empty(size, dtype=torch.uint8)


def layer_scratch(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a layer or its backward takes beyond its results."""
    if not asks(args):
        return 0
    if func is LAYER:
        return _forward(torch.is_grad_enabled(), _looks(args))[1]
    return _backward(_looks(args))


@functools.lru_cache(maxsize=1024)
def _forward(keeps: bool, looks: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes of the work space, and of what is taken beyond the results."""
    with with_data(), torch.set_grad_enabled(keeps), autocast_off():
        args = _filled(looks)
        made, taken = counted(lambda: LAYER(*args))
    return _bytes(made[3]), max(0, taken - sum(map(_bytes, made)))


@functools.lru_cache(maxsize=1024)
def _backward(looks: tuple[Any, ...]) -> int:
    """Bytes beyond the results, with the work space that a forward has filled."""
    with with_data(), torch.enable_grad(), autocast_off():
        args = _filled(looks)
        reverse, mode, hidden, layers, biases, train, both, sizes, first, _ = args[13:]
        how = (reverse, sizes, mode, hidden, layers, biases, both, first, train)
        *_, space = LAYER(*args[_GIVEN], *how)
        with torch.no_grad():
            made, taken = counted(lambda: BACKWARD(*args[:-1], space))
    return max(0, taken - sum(map(_bytes, made)))


def _looks(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the answer follows from."""
    return (
        torch.get_num_threads(),
        *(
            (tuple(x.shape), x.stride(), x.dtype)
            if isinstance(x, torch.Tensor)
            else tuple(x)
            if isinstance(x, list)
            else x
            for x in args
        ),
    )


def _filled(looks: tuple[Any, ...]) -> list[Any]:
    """Arguments of the same looks, with data."""
    return [_one(x) for x in looks[1:]]


def _one(look: Any) -> Any:
    if not isinstance(look, tuple):
        return look
    is_tensor = bool(look) and isinstance(look[-1], torch.dtype)
    if not is_tensor:
        return list(look)
    return torch.empty_strided(look[0], look[1], dtype=look[2]).zero_()


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()
