"""LSTM, GRU and RNN: what their fused kernels keep for backward, predicted or said to be unknown.

On a simulated GPU they run as PyTorch's `_cudnn_rnn`, one operation for all layers and time steps,
whose autograd keeps input, states, output and cuDNN's *reserve space*. Only cuDNN itself can tell
the size of that (`cudnnGetRNNTempSpaceSizes`). Two published sizes say what it is made of:

- an LSTM of one layer of 768, 64 sequences of 50 steps in fp16: 24,576,016 bytes, or five values a
  step, sequence and unit: four gates and the cell (pytorch/pytorch, benchmarks/dynamo/
  microbenchmarks/operator_inp_logs/torchbench_train/tts_angular_training.txt);
- 736,000,000 bytes for an LSTM and 864,000,000 for a GRU in fp32, as 23 to 27, whose numbers of
  parameters are those of four layers of 320 (pytorch/pytorch issue 2895, of 2017). With five a
  layer 23 is 4 x 5 and the outputs of the three layers that have another above them; the GRU's 27
  is then 4 x 6 and the same three.

A plain RNN has one gate and no cell; no size of its own is published. What cuDNN adds for dropout
and projections, and the work space that it gives back, are not known and left out.
On a CPU oneDNN has such a work space of its own, which an LSTM's layers are asked for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from utils.memory.source import counts_calls
from utils.shims.torch_autocast import autocast_off
from utils.shims.torch_dispatch import kernels_replaced
from utils.simulation.cuda_autocast import is_eligible, operator

aten = torch.ops.aten
Tensor = torch.Tensor
_BEGINNING = "LSTM, GRU and RNN are approximated"
CPU_NOTE = (
    f"{_BEGINNING}: they are simulated step by step, and the fused kernels of oneDNN, or of a GPU "
    "without cuDNN, keep other memory for backward."
)
CUDNN_NOTE = (
    f"{_BEGINNING}: what cuDNN keeps for backward is predicted from published sizes of its reserve "
    "space, without its work space, masks of dropout and projections."
)
RELU, TANH, LSTM, GRU = range(4)  # cuDNN's numbers, cudnnRNNMode_t
KINDS = {"rnn_relu": RELU, "rnn_tanh": TANH, "lstm": LSTM, "gru": GRU}
VALUES = {RELU: 1, TANH: 1, LSTM: 5, GRU: 6}  # kept a layer, direction, step, sequence and unit


def reserve_bytes(
    mode: int, layers: int, directions: int, rows: int, hidden: int, output: int, itemsize: int
) -> int:
    """The predicted size of cuDNN's reserve space.

    `rows`: steps of the longest sequence times sequences. `output`: the width of one direction's
    output, that is `hidden` without a projection.
    """
    gates = VALUES[mode] * layers * directions * hidden
    between = (layers - 1) * directions * output
    return rows * (gates + between) * itemsize


@contextlib.contextmanager
def recurrences(remark: Callable[[str], None], is_cuda: bool) -> Iterator[None]:
    """Inside, recurrent layers run as on the device, and the result says how far to trust them."""
    table: dict[tuple[str, str], Callable[..., Any]] = {}
    for kind, mode in KINDS.items():
        for form in ("input", "data"):
            name = f"{kind}.{form}"
            is_asked = form == "input" and mode == LSTM and not is_cuda
            step_by_step = _noted(name, remark, is_asked)
            kernel = _by_cudnn(mode, form == "data", remark, step_by_step)
            table[f"aten::{name}", "AutogradCPU"] = kernel if is_cuda else step_by_step
    if is_cuda:
        table["aten::_cudnn_rnn", "AutocastCPU"] = _cast
    # It looks at addresses, to see whether the weights lie in one buffer: here they count as one.
    flatten = mock.patch.object(nn.RNNBase, "flatten_parameters", lambda self: None)
    with kernels_replaced(table), flatten:
        yield


def _noted(name: str, remark: Callable[[str], None], is_asked: bool) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not is_asked or not _is_told(*args):
            remark(CPU_NOTE)
        return operator(name).decompose(*args, **kwargs)

    return kernel


def _is_told(
    data: Tensor, states: Any, weights: Any, has_biases: bool, layers: int, dropout: float, *_: Any
) -> bool:
    """Whether oneDNN's layers tell what they take (`onednn_lstm.py`)."""
    is_plain = not dropout and states[0].shape == states[1].shape
    return is_plain and torch.backends.mkldnn.is_available() and counts_calls()


def _by_cudnn(
    mode: int, is_packed: bool, remark: Callable[[str], None], otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """A kernel as `_cudnn_impl` of aten/src/ATen/native/cudnn/RNN.cpp."""

    def kernel(data: Tensor, *args: Any) -> Any:
        if not torch.backends.cudnn.enabled or not data.numel():
            return otherwise(data, *args)
        remark(CUDNN_NOTE)
        sizes, rest = (args[0].tolist(), args[1:]) if is_packed else ([], args)
        states, weights, has_biases, layers, dropout, train, both_ways, *batch_first = rest
        hx, cx = states if mode == LSTM else (states, None)
        hidden = hx.shape[2] if cx is None else cx.shape[2]
        projected = hx.shape[2] if hx.shape[2] != hidden else 0
        # Parameters lie in one flat buffer since `flatten_parameters`; what is computed does not.
        flat = data.new_empty(0) if all(weight.is_leaf for weight in weights) else None
        output, hy, cy, *_ = aten._cudnn_rnn(
            data, weights, 4 if has_biases else 2, flat, hx, cx, mode, hidden, projected, layers,
            any(batch_first), dropout, train, both_ways, sizes, None,
        )  # fmt: skip
        return (output, hy) if cx is None else (output, hy, cy)

    return kernel


def _cast(
    data: Tensor, weights: list[Tensor], stride: int, flat: Tensor | None, hx: Tensor,
    cx: Tensor | None, *rest: Any,
) -> Any:  # fmt: skip
    """Autocast: all weights to one flat buffer of 16 bits, anew in each call.

    aten/src/ATen/cudnn/AutocastRNN.cpp, `_cudnn_rnn_cast_reflatten`.
    """
    low = torch.get_autocast_dtype("cpu")

    def lowered(tensor: Any) -> Any:
        return tensor.to(low) if is_eligible(tensor) else tensor

    with autocast_off():
        if is_eligible(weights[0]) and weights[0].dtype is not low:
            weights, flat = [lowered(weight) for weight in weights], data.new_empty(0)
        return aten._cudnn_rnn(
            lowered(data), weights, stride, flat, lowered(hx), lowered(cx), *rest
        )


def _results(
    data: Tensor, weights: list[Tensor], stride: int, flat: Tensor | None, hx: Tensor,
    cx: Tensor | None, mode: int, hidden: int, projected: int, layers: int, batch_first: bool,
    dropout: float, train: bool, both_ways: bool, sizes: list[int], dropout_state: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The results of `_cudnn_rnn`: output, last states, reserve space and the flat weights.

    The weights are copied to a flat buffer where they lie in none; else the result has no memory
    of its own, as it is theirs.
    """
    output, directions = projected or hidden, 2 if both_ways else 1
    steps, batch = (len(sizes), sizes[0]) if sizes else data.shape[:2]
    if batch_first and not sizes:
        steps, batch = batch, steps
    reserved = reserve_bytes(
        mode, layers, directions, steps * batch, hidden, output, data.element_size()
    )
    cells = (layers * directions, batch, hidden) if cx is not None else (0,)
    return (
        _steps_first(data, directions * output, batch_first, sizes),
        data.new_empty((layers * directions, batch, output)),
        data.new_empty(cells),
        data.new_empty(reserved if train else 0, dtype=torch.uint8),
        data.new_empty(sum(w.numel() for w in weights) if flat is None else 0),
    )


def _steps_first(data: Tensor, width: int, batch_first: bool, sizes: list[int]) -> Tensor:
    """Rows like those of `data`, of another width; in memory the steps come first."""
    if not batch_first or sizes:
        return data.new_empty((*data.shape[:-1], width))
    batch, steps, _ = data.shape
    return data.new_empty_strided((batch, steps, width), (width, batch * width, 1))


def _gradients(
    data: Tensor, weights: list[Tensor], stride: int, flat: Tensor, hx: Tensor, cx: Tensor | None,
    output: Tensor, *rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The results of `_cudnn_rnn_backward`; the weights' gradients are parts of one buffer."""
    train, mask = rest[9], rest[-1]
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    parts: list[Tensor] = []
    if mask[3]:
        numbers = [weight.numel() for weight in weights]
        buffer = weights[0].new_empty(sum(numbers))
        pairs = zip(weights, buffer.split(numbers), strict=True)
        parts = [part.view(weight.shape) for weight, part in pairs]
    inputs = _steps_first(data, data.shape[-1], rest[7], rest[11])
    return inputs, hx.new_empty(hx.shape), None if cx is None else cx.new_empty(cx.shape), parts


CUDNN_RESULTS = {aten._cudnn_rnn.default: _results, aten._cudnn_rnn_backward.default: _gradients}


def cudnn_scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes beyond the results: cuDNN wants the steps first, and copies what has them second.

    `_cudnn_rnn_backward_input` copies the input and the output's gradient, then
    `_cudnn_rnn_backward_weight` the input, when the weights' gradients are there too.
    """
    if func is aten._cudnn_rnn.default:
        return _copy_bytes(args[0], args[10], args[14])
    batch_first, sizes, gradient, output = args[14], args[18], args[7], args[6]
    inputs = _copy_bytes(args[0], batch_first, sizes)
    outputs = _copy_bytes(gradient, batch_first, sizes) if gradient is not None else _size(output)
    states = sum(_size(s) for s, g in ((args[4], args[8]), (args[5], args[9])) if g is None)
    weights = sum(map(_size, out[3]))
    return max(inputs, inputs + outputs - weights) + states


def _copy_bytes(tensor: Tensor, batch_first: bool, sizes: list[int]) -> int:
    """Of a copy with the steps first, if the tensor does not have them first in memory."""
    ordered = tensor.transpose(0, 1) if batch_first and not sizes else tensor
    return 0 if ordered.is_contiguous() else _size(tensor)


def _size(tensor: Tensor | None) -> int:
    return 0 if tensor is None else math.prod(tensor.shape) * tensor.element_size()
