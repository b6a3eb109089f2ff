"""What kernels of this machine's CPU take in between, asked of themselves: each runs once a shape.

oneDNN, LAPACK and PyTorch plan their working memory by shape, strides, number of threads and
instruction set, and only oneDNN could tell before it runs; PyTorch does not pass that on. So an
operation without data runs once beside the simulation, on tensors of the same looks that hold ones
on their diagonals, and the counting allocator tells what it took beyond its results.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from utils.memory.source import counted, counts_calls
from utils.shims.torch_ import storage_key, with_data
from utils.shims.torch_autocast import autocast_off
from utils.simulation import onednn_lstm
from utils.simulation.scratch import Scratch
from utils.units import MIB

MOST_BYTES = 256 * MIB  # of arguments and results; more would take the learner's own memory
MOST_FLOPS = 10**10  # a second or two on one core
# Kernels that read and write by the shapes of their arguments alone. One that takes indices, or the
# work space of another, as `mkldnn_rnn_layer_backward` does, may not be run on invented values: it
# takes the process down.
_ASKED = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::mv",
        "aten::addmv",
        "aten::convolution",
        "aten::convolution_backward",
        "aten::native_batch_norm",
        "aten::native_batch_norm_backward",
        "aten::native_layer_norm",
        "aten::native_layer_norm_backward",
        "aten::native_group_norm",
        "aten::native_group_norm_backward",
        "aten::im2col",
        "aten::col2im",
        "aten::kthvalue",
        "aten::_trilinear",
        "aten::soft_margin_loss",
        "aten::soft_margin_loss_backward",
        "aten::binary_cross_entropy_with_logits",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    }
)
_ASKED_FAMILIES = ("aten::linalg_", "aten::_linalg_", "aten::_fft_")
_VALUES = (
    bool,
    int,
    float,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
# Of those, what takes memory by its size; the others are not missed where they were not asked.
_TAKERS = ("conv", "linalg", "fft", "native_batch_norm_backward", "2col", "2im", "_trilinear")
_LOW = (torch.float16, torch.bfloat16)
UNASKED = (
    "Low on a CPU: {names} did not run once beside the simulation, which tells what a kernel takes in "
    "between: too large for that, or there is no C++ compiler. It is stated in part. It says nothing "
    "of a GPU."
)
_answers: dict[tuple[Any, ...], int | None] = {}  # this machine's, whoever simulates


class AskedKernels:
    """The kernels of one simulation; `stated` says what those take that cannot be asked."""

    def __init__(self, stated: Scratch) -> None:
        self._stated = stated
        self._unasked: dict[str, None] = {}
        self._threads = torch.get_num_threads()

    def as_a_rank(self) -> None:
        """Ask on one thread, which is what each rank of several on this machine runs on."""
        self._threads = 1

    @property
    def note(self) -> str:
        """Which kernels were not asked, of those that take memory; empty if there are none."""
        return UNASKED.format(names=", ".join(self._unasked)) if self._unasked else ""

    def scratch(self, func: Any, args: tuple[Any, ...], out: Any, kwargs: Mapping[str, Any]) -> int:
        """Bytes beyond the results at an operation's worst moment on a CPU."""
        if func is onednn_lstm.LAYER and not onednn_lstm.asks(args):
            self._unasked["mkldnn_rnn_layer"] = None
        asked = self._asked(func, args, out, kwargs)
        return self._stated(func, args, out, kwargs) if asked is None else asked

    def _asked(
        self, func: Any, args: tuple[Any, ...], out: Any, kwargs: Mapping[str, Any]
    ) -> int | None:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not _can_be_asked(func, tensors):
            return None
        key = _looks(func, args, kwargs, self._threads)
        answer = _answers.get(key) if key is not None else None
        if key is not None and key not in _answers and counts_calls():
            if not _is_too_large(func, args, kwargs, tensors, out):
                answer = _answers[key] = _run(func, args, kwargs, out, self._threads)
        if answer is None and _takes_memory(func, tensors):
            self._unasked[func.name().removeprefix("aten::")] = None
        return answer


def _can_be_asked(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether it is one of those kernels, on numbers alone: an integer may be an index."""
    name = func.name().partition(".")[0]
    return (name in _ASKED or name.startswith(_ASKED_FAMILIES)) and all(
        t.layout is torch.strided
        and t.device.type == "cpu"
        and (t.is_floating_point() or t.is_complex())
        for t in tensors
    )


def _looks(func: Any, args: Any, kwargs: Any, threads: int) -> tuple[Any, ...] | None:
    """What the answer follows from; None for arguments that do not compare by value."""
    leaves, form = tree_flatten((args, dict(kwargs)))
    parts: list[Any] = [func, str(form), threads, torch.get_default_dtype()]
    seen: dict[int, int] = {}  # which of them share a storage
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            number = seen.setdefault(storage_key(leaf.untyped_storage()), len(seen))
            parts += (number, leaf.dtype, leaf.shape, leaf.stride(), int(leaf.storage_offset()))
        elif isinstance(leaf, _VALUES):
            parts += (type(leaf), leaf)
        else:
            return None
    return tuple(parts)


def _is_too_large(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], out: Any) -> bool:
    """Whether asking would take long, or much memory."""
    results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    if sum(t.untyped_storage().nbytes() for t in (*tensors, *results)) > MOST_BYTES:
        return True
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        return count(*args, **kwargs, out_val=out) > MOST_FLOPS
    if "linalg" in func.name():
        return 20 * max(t.numel() * math.isqrt(t.numel()) for t in tensors) > MOST_FLOPS
    return False


def _takes_memory(func: Any, tensors: list[torch.Tensor]) -> bool:
    multiplies = func.overloadpacket in flop_registry and tensors[0].dtype in _LOW
    return multiplies or any(word in func.name() for word in _TAKERS)


def _run(func: Any, args: Any, kwargs: Any, out: Any, threads: int) -> int | None:
    """Run it on tensors with data; None if these do not suit it, or it made other results."""
    given = {
        storage_key(x.untyped_storage())
        for x in tree_leaves((args, kwargs))
        if isinstance(x, torch.Tensor)
    }
    made = {
        storage_key(x.untyped_storage()): x.untyped_storage().nbytes()
        for x in tree_leaves(out)
        if isinstance(x, torch.Tensor)
    }
    result_bytes = sum(size for key, size in made.items() if key not in given)
    shapes = [x.shape for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    with with_data(), torch.no_grad(), autocast_off(), torch.random.fork_rng(devices=[]):
        copies: dict[int, torch.Tensor] = {}
        ones = 100 if "matrix_exp" in func.name() else 1  # by squares, as from a norm of 4 on
        args, kwargs = tree_map_only(
            torch.Tensor, lambda x: _filled(x, copies, ones), (args, kwargs)
        )
        try:
            with _on_threads(threads):
                real, peak_bytes = counted(lambda: func(*args, **kwargs))
        except (RuntimeError, IndexError, ValueError):  # such as lengths that are not there
            return None
        found = [x.shape for x in tree_leaves(real) if isinstance(x, torch.Tensor)]
    return max(0, peak_bytes - result_bytes) if found == shapes else None


@contextlib.contextmanager
def _on_threads(threads: int) -> Iterator[None]:
    """So many threads; nothing is set that is so: setting it has MKL choose no number itself."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _filled(tensor: torch.Tensor, copies: dict[int, torch.Tensor], ones: int) -> torch.Tensor:
    """A tensor of the same looks: zeros, and `ones` on the diagonals of matrices."""
    key = storage_key(tensor.untyped_storage())
    if key not in copies:
        size = tensor.untyped_storage().nbytes()
        copies[key] = torch.zeros(size - size % tensor.itemsize, dtype=torch.uint8)
    shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    made = copies[key].view(tensor.dtype).as_strided(shape, stride, offset)
    (made.diagonal(dim1=-2, dim2=-1) if made.dim() > 1 else made).fill_(ones)
    return made
