"""DeepSpeed: where ZeRO looks into tensors or remembers a world, and where it keeps what it holds."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from utils.shims.shim import Library, Shim

DEEPSPEED = Library("deepspeed", "0.19.8", "utils/shims/deepspeed.py")
_ZERO = "deepspeed.runtime.zero."
_ENGINE = _ZERO + "stage_1_and_2:DeepSpeedZeroOptimizer."

# It keeps the first process group that it sees for ever.
_BACKEND = Shim(
    DEEPSPEED,
    "deepspeed.comm.comm:cdb",
    "zero_without_data",
    "a second simulation has another world",
)
_WORLD = Shim(DEEPSPEED, "deepspeed.utils.groups:_WORLD_GROUP", "zero_without_data", "as for `cdb`")
_ACCELERATOR = Shim(
    DEEPSPEED,
    "deepspeed.accelerator.real_accelerator:ds_accelerator",
    "zero_without_data",
    "simulated tensors are on `cpu`, whatever DeepSpeed was loaded for",
)
_CPU = Shim(
    DEEPSPEED,
    "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator",
    "zero_without_data",
    "as for `ds_accelerator`",
)
_OVERFLOW = Shim(
    DEEPSPEED,
    _ENGINE + "has_overflow",
    "zero_without_data",
    "it asks gradients for infinities",
    patched=True,
)
_NORMS = tuple(
    Shim(
        DEEPSPEED,
        _ZERO + f"{stage}:is_invalid_grad_norm",
        "zero_without_data",
        "it asks for the value of the norm",
        patched=True,
    )
    for stage in ("stage_1_and_2", "stage3")
)
_ORDER = Shim(
    DEEPSPEED,
    _ZERO + "partitioned_param_coordinator:assert_ints_same_as_other_ranks",
    "zero_without_data",
    "it compares the order of modules with ranks that are not there",
    patched=True,
)
_INIT = Shim(
    DEEPSPEED,
    _ENGINE + "__init__",
    "zero_without_data",
    "it asks whether storages are aligned",
    patched=True,
)
_READ = Shim(
    DEEPSPEED,
    "deepspeed.runtime.config:DeepSpeedConfig",
    "own_reading",
    "its class knows the keys and checks them",
)
_READ_ERROR = Shim(
    DEEPSPEED, "deepspeed.runtime.config:DeepSpeedConfigError", "own_reading", "as for the class"
)
_RANK = Shim(
    DEEPSPEED,
    "deepspeed.comm:get_rank",
    "own_reading",
    "without a process group the class would count one rank",
    patched=True,
)
_FIELDS = Shim(
    DEEPSPEED,
    _ZERO + "config:DeepSpeedZeroConfig.model_fields",
    "zero_keys",
    "the names of the settings stand nowhere else",
)
_COMPATIBLE = Shim(
    DEEPSPEED,
    "deepspeed.ops:__compatible_ops__",
    "try_compiler",
    "the compiler is tried once a process, and a linker may complain in the midst of a cell",
)
_ACCELERATOR_IN_USE = Shim(
    DEEPSPEED,
    "deepspeed.accelerator:get_accelerator",
    "device_type",
    "it says for which device it was loaded",
)
SHIMS = (
    _BACKEND,
    _WORLD,
    _ACCELERATOR,
    _CPU,
    _OVERFLOW,
    *_NORMS,
    _ORDER,
    _INIT,
    _READ,
    _READ_ERROR,
    _RANK,
    _FIELDS,
    _COMPATIBLE,
    _ACCELERATOR_IN_USE,
)

# Attributes of engines, and so of no module: where an optimizer of ZeRO keeps what it holds.
SHARD = "ds_tensor"  # on each parameter of stage 3
GRADIENTS = ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer")
LASTING_BUFFERS = ("ipg_bucket",)  # of stage 3
BACKWARD_BUFFERS = "ipg_buckets"  # of stages 1 and 2, which live in backward alone
_EXTENSION = "ShareMemCommBuilder"


@contextlib.contextmanager
def zero_without_data() -> Iterator[None]:
    """Inside, engines of ZeRO-1, 2 and 3 train on tensors without data. Undone at the end.

    ZeRO asks four things of values: whether a gradient overflowed and whether its norm is finite
    (answered so that the step is taken), whether all ranks run the same modules in the same
    order (there is one rank), and whether a partition is aligned in memory.
    """
    with contextlib.ExitStack() as stack:
        for remembered in (_BACKEND, _WORLD):
            stack.enter_context(remembered.replaced(None))
        stack.enter_context(mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}))
        stack.enter_context(_ACCELERATOR.replaced(_CPU.get()()))
        # Stage 3 puts a linear function of its own in the place of PyTorch's, for good.
        stack.enter_context(mock.patch.object(F, "linear", F.linear))
        stack.enter_context(_OVERFLOW.replaced(lambda *_: False))
        for norm in _NORMS:
            stack.enter_context(norm.replaced(lambda _: False))
        stack.enter_context(_ORDER.replaced(lambda _: None))
        stack.enter_context(_INIT.replaced(_with_addresses(_INIT.get())))
        yield


def _with_addresses(init: Callable[..., None]) -> Callable[..., None]:
    """Storages as if at aligned addresses, in here alone: a kernel elsewhere would follow one."""

    @functools.wraps(init)
    def call(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(torch.Tensor, "data_ptr", _offset_bytes):
            init(*args, **kwargs)

    return call


def _offset_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def device_type() -> str:
    """What DeepSpeed was loaded for: "cpu" or "cuda"."""
    return _ACCELERATOR_IN_USE.get()().device_name()


def try_compiler() -> None:
    """Let DeepSpeed find out now which extensions could be compiled here; it remembers."""
    _COMPATIBLE.get()


def extension_builder() -> Any:
    """What compiles the extension that DeepSpeed uses on a CPU; None if it needs none here."""
    if device_type() != "cpu":
        return None
    return op_builder(_EXTENSION)


def op_builder(name: str) -> Any:
    """What compiles one of DeepSpeed's operators, by its class's name; None if it cannot be had."""
    builder = _ACCELERATOR_IN_USE.get()().create_op_builder(name)
    return builder if builder is not None and builder.is_compatible() else None


def own_reading(config: dict[str, Any], world_size: int) -> Any:
    """`DeepSpeedConfig` of a configuration, as if on `world_size` ranks.

    Raises:
        ValueError: DeepSpeed refuses it.
    """
    refused = (AssertionError, _READ_ERROR.get())
    try:
        with _rank_0():
            return _READ.get()(config, mpu=_Ranks(world_size))
    except refused as error:
        raise ValueError(f"DeepSpeed refuses this configuration: {error}") from error


def _rank_0() -> AbstractContextManager[Any]:
    return _RANK.replaced(lambda *_: 0)


class _Ranks:
    """What `DeepSpeedConfig` asks for instead of a process group."""

    def __init__(self, count: int) -> None:
        self._count = count

    def get_data_parallel_world_size(self) -> int:
        return self._count


def zero_keys() -> frozenset[str]:
    """Names and aliases of all settings of `zero_optimization`."""
    fields = _FIELDS.get()
    return frozenset(fields) | {field.alias for field in fields.values() if field.alias}


def shards(engine: Any) -> list[torch.Tensor]:
    """This rank's parts of the parameters of stage 3; empty in the others."""
    whole = engine.module.parameters()
    return [getattr(p, SHARD) for p in whole if hasattr(p, SHARD)]


def gradients(engine: Any) -> list[torch.Tensor]:
    """Gradients, or shards of them, that lie in the optimizer."""
    return _under(engine, GRADIENTS)


def lasting_buffers(engine: Any) -> list[torch.Tensor]:
    """Buffers of communication that lie in the optimizer from step to step."""
    return _under(engine, LASTING_BUFFERS)


def buffers_in_backward(engine: Any, parameter: torch.Tensor) -> list[torch.Tensor]:
    """At a parameter's gradient: itself where stage 3 gathered it, else the buckets it goes to."""
    if hasattr(parameter, SHARD):
        return [parameter]
    return _tensors_in(getattr(engine.optimizer, BACKWARD_BUFFERS, {}))


def _under(engine: Any, names: tuple[str, ...]) -> list[torch.Tensor]:
    keeper = vars(engine.optimizer)
    return _tensors_in({k: v for k, v in keeper.items() if k.startswith(names)})


def _tensors_in(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, Mapping):
        found = list(found.values())
    if not isinstance(found, (list, tuple)):
        found = list(getattr(found, "__dict__", {}).values())
    return [tensor for value in found for tensor in _tensors_in(value)]
