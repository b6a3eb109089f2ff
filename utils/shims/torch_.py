"""PyTorch: what the meter, the techniques and the recorder ask of it without a public name."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from utils.shims.shim import Library, Shim

TORCH = Library("torch", "2.15.0", "utils/shims/torch_.py")

STORAGE = Shim(
    TORCH,
    "torch:UntypedStorage._cdata",
    "storage_key",
    "storages without data have no pointer to tell them apart by",
)
_INDICES = Shim(
    TORCH,
    "torch:Tensor._indices",
    "sparse_parts",
    "the public `indices()` refuses a sparse gradient that is not coalesced",
)
_VALUES = Shim(TORCH, "torch:Tensor._values", "sparse_parts", "as for `_indices`")
_GRAPH_TASK = Shim(
    TORCH,
    "torch._C:_current_graph_task_id",
    "inside_backward",
    "torch.autograd.graph tells a recomputation from a forward by it",
)
_BACKWARD = Shim(
    TORCH,
    "torch.autograd:backward",
    "noted_backward",
    "a tensor's hooks come after the loss has made gradients of its own",
    patched=True,
)
_IS_WRAPPED = Shim(
    TORCH,
    "torch._C._functorch:is_functorch_wrapped_tensor",
    "unwrapping",
    "inside of vmap and torch.func.grad a tensor stands around the one that has the memory",
)
_UNWRAPPED = Shim(
    TORCH, "torch._C._functorch:get_unwrapped", "unwrapping", "as for whether it is wrapped"
)
_COMPILED = Shim(
    TORCH,
    "torch.nn:Module._compiled_call_impl",
    "is_compiled_in_place",
    "`model.compile()` leaves no other trace",
)
_OPTIMIZED = Shim(
    TORCH,
    "torch._dynamo:OptimizedModule",
    "is_compiled",
    "`torch.compile(model)` returns one, and its inside takes no hooks",
)
_HISTORY = Shim(
    TORCH,
    "torch.cuda.memory:_record_memory_history",
    "record_cuda_history",
    "the CUDA allocator tells its events in no other way",
)
_SNAPSHOT = Shim(TORCH, "torch.cuda.memory:_snapshot", "cuda_snapshot", "as for the history")
_EVENT_TYPE = Shim(
    TORCH,
    "torch:_C._profiler._EventType",
    "is_allocation",
    "the profiler's tree of events names their kinds by it",
)
_WORKSPACES = Shim(
    TORCH,
    "torch._C:_cuda_clearCublasWorkspaces",
    "clear_cublas_workspaces",
    "cuBLAS keeps its workspaces until it is told, and CUDA builds alone have it",
)
_BF16 = Shim(
    TORCH,
    "torch.cpu:_is_avx512_bf16_supported",
    "has_bf16_instructions",
    "oneDNN says yes to any AVX-512",
)
_MODES_OFF = Shim(
    TORCH,
    "torch.utils._python_dispatch:_disable_current_modes",
    "with_data",
    "tables of numbers are computed with data in the midst of a simulation",
)
_SCRIPT_TYPE = Shim(
    TORCH, "torch:ScriptObject._type", "type_name", "operators take process groups as such objects"
)
_LIBRARY_PATH = Shim(
    TORCH,
    "torch.utils.cpp_extension:TORCH_LIB_PATH",
    "quote_library_path",
    "it is written bare into the linker's command, and a space cuts that in two",
)

CUDA_SHIMS = (_WORKSPACES,)  # builds of PyTorch without CUDA lack these names
SHIMS = (
    STORAGE,
    _INDICES,
    _VALUES,
    _GRAPH_TASK,
    _BACKWARD,
    _IS_WRAPPED,
    _UNWRAPPED,
    _COMPILED,
    _OPTIMIZED,
    _HISTORY,
    _SNAPSHOT,
    _EVENT_TYPE,
    _BF16,
    _MODES_OFF,
    _SCRIPT_TYPE,
    _LIBRARY_PATH,
)


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that is this storage's as long as it lives; it need not have data."""
    return storage._cdata  # asked for once a result: too often to go through the row


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and values of a sparse tensor in coordinate format, coalesced or not."""
    return _INDICES.get()(tensor), _VALUES.get()(tensor)


def unwrapping() -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives the tensor that holds the memory: what `torch.func` has wrapped, else itself."""
    is_wrapped, unwrapped = _IS_WRAPPED.get(), _UNWRAPPED.get()

    def of(tensor: torch.Tensor) -> torch.Tensor:
        while is_wrapped(tensor):
            tensor = unwrapped(tensor)
        return tensor

    return of


def inside_backward() -> bool:
    """Whether a backward runs in this thread now."""
    return _GRAPH_TASK.get()() != -1


def noted_backward(note: Callable[[], None]) -> AbstractContextManager[Any]:
    """Inside, `note()` is called before each `loss.backward()`, which calls this public function."""
    backward = _BACKWARD.get()

    @functools.wraps(backward)
    def noted(*args: Any, **kwargs: Any) -> None:
        note()
        backward(*args, **kwargs)

    return _BACKWARD.replaced(noted)


def is_compiled_in_place(module: Any) -> bool:
    """Whether `module.compile()` was called; False for what is no plain module."""
    return getattr(module, _COMPILED.owner()[1], None) is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what `torch.compile(model)` returns."""
    return isinstance(module, _OPTIMIZED.get())


def record_cuda_history(device: torch.device, is_on: bool) -> None:
    """Start or end the CUDA allocator's recording of its events, without stacks."""
    if is_on:
        _HISTORY.get()("all", context=None, device=device)
    else:
        _HISTORY.get()(None, device=device)


def cuda_snapshot(device: torch.device) -> dict[str, Any]:
    """What the CUDA allocator has recorded, in PyTorch's own format."""
    return _SNAPSHOT.get()(device)


def is_allocation(node: Any) -> bool:
    """Whether an event of the profiler's tree is memory taken or given back."""
    return node.tag == _EVENT_TYPE.get().Allocation


def clear_cublas_workspaces() -> None:
    """Free what cuBLAS keeps between matmuls; it takes it again at the next one."""
    _WORKSPACES.get()()


def has_bf16_instructions() -> bool:
    """Whether this x86 processor multiplies bfloat16 itself."""
    return _BF16.get()()


def with_data() -> AbstractContextManager[Any]:
    """Inside, tensors have data, though a simulation may be running around it."""
    return _MODES_OFF.get()()


def type_name(found: torch.ScriptObject) -> str:
    """The name of the C++ class of an object that an operator was called with."""
    return str(_SCRIPT_TYPE.get()(found))


def quote_library_path() -> None:
    """Let extensions be built where PyTorch lies under a path with a space in it."""
    _LIBRARY_PATH.get()
    owner, name = _LIBRARY_PATH.owner()
    setattr(owner, name, shlex.quote(str(Path(torch.__file__).parent / "lib")))
