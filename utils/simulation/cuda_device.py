"""`cuda` in a simulation: the simulated device itself, for programs that put tensors on it by name.

Simulated tensors are all of `cpu` to PyTorch, which needs a GPU for any other kind. A program may
leave it at that: `cpu` is then the simulated device. Once build() names `cuda`, as in
`model.to("cuda")`, the two are told apart: what was not put on `cuda` is in the host's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from utils.memory.holdings import is_sharded
from utils.shims import fsdp
from utils.shims.shim import MovedError, check
from utils.shims.torch_dispatch import also_in_backward, devices_answered
from utils.simulation.simulated_memory import DEVICE, HOST
from utils.simulation.watcher import StorageWatcher

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_DTYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
}  # fmt: skip
LEFT_ON_CPU = (
    "build() names 'cuda' and leaves the model's parameters on 'cpu': all is counted on the device."
)
FSDP_ALONE = (
    "FSDP in a simulated world of one calls the device 'cpu': all is counted on the device, also what a "
    "policy would offload."
)
_CUDA, _CPU = torch.device("cuda", 0), torch.device("cpu")
_FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace",
        "logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor",
        "tril_indices", "triu_indices", "zeros",
    )
)  # fmt: skip


class SimulatedCuda(TorchFunctionMode):
    """Sends tensors where the program puts them, and answers where they are.

    `alone`: the device is not one of a world of many, whose libraries call it `cpu` as well.
    """

    def __init__(self, watcher: StorageWatcher, mode: FakeTensorMode, alone: bool) -> None:
        super().__init__()
        self._watcher, self._mode, self._may_name = watcher, mode, alone
        self.default = torch.get_default_device()
        tensor = torch.Tensor
        self._handlers: dict[Any, Handler] = {
            tensor.to: self._to,
            tensor.cuda: self._cuda,
            tensor.cpu: self._cpu,
            tensor.pin_memory: self._pinned,
            tensor.record_stream: lambda func, args, kwargs: None,
            tensor.is_cuda.__get__: lambda func, args, kwargs: self._on_cuda(args[0]),  # pyright: ignore[reportAttributeAccessIssue]
            tensor.get_device: lambda func, args, kwargs: 0 if self._on_cuda(args[0]) else -1,
            **dict.fromkeys(_FACTORIES, self._made),
        }
        self.answers = contextlib.ExitStack()  # entered once device and host are told apart

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        if not kwargs:
            return func(*args)
        if "device" in kwargs or "pin_memory" in kwargs:
            return self._made(func, args, kwargs)
        return func(*args, **kwargs)

    def settle(self, parameters: Sequence[torch.Tensor]) -> None:
        """The end of build(): no name changes anything from here on.

        If none of the parameters was put on `cuda`, the program takes `cpu` for the device. So does
        FSDP in a world of one: it moves what it shards to where its mesh is.
        """
        self._may_name = False
        watcher = self._watcher
        if any(map(is_sharded, parameters)):
            check(fsdp.SHIMS)
        own = [p.to_local() if is_sharded(p) else p for p in parameters]
        if watcher.tells_apart and all(map(watcher.is_on_host, own)):
            watcher.all_on_device()
            watcher.remark(FSDP_ALONE if any(map(is_sharded, parameters)) else LEFT_ON_CPU)

    def set_default(self, device: Any) -> None:
        """In place of `torch.set_default_device`, by which PyTorch would look for a GPU."""
        self.default = torch.device("cpu" if device is None else device)

    def set_default_type(self, kind: Any) -> None:
        """In place of `torch.set_default_tensor_type`, which names device and type in one."""
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        self.set_default("cuda" if ".cuda." in name else "cpu")
        torch.set_default_dtype(_DTYPES[name.rpartition(".")[2]])

    def _where(self, device: Any) -> str | None:
        """The memory that a device's name stands for; None leaves a tensor where it is."""
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if wanted.type == "cuda":
            if wanted.index:
                raise ValueError(
                    f"'{wanted}' is not there: each rank of a simulation has one device, 'cuda:0'. "
                    "Give the number of devices as simulate(..., world=n)."
                )
            if self._may_name and not self._watcher.tells_apart:
                self._watcher.all_on_host()
                self.answers.enter_context(devices_answered(self.device_of))
            return DEVICE
        return HOST if wanted.type == "cpu" and self._watcher.tells_apart else None

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that may be told the device of what it makes."""
        device, kwargs = kwargs.get("device"), dict(kwargs)
        if device is None and func in _FACTORIES:
            device = self.default
        where = None if device is None or _is_other(device) else self._where(device)
        if where is not None:
            kwargs["device"] = _CPU
        if kwargs.pop("pin_memory", None):
            where = HOST
        with self._watcher.placing(where):
            return func(*args, **kwargs)

    def _to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        if rest and isinstance(rest[0], torch.Tensor):
            rest[:1] = [rest[0].device, rest[0].dtype]
            rest[0] = _CUDA if self._on_cuda(args[1]) else rest[0]
        names = ("dtype", "non_blocking", "copy")
        if rest and (rest[0] is None or not isinstance(rest[0], torch.dtype)):
            names = ("device", *names)
        given = {**dict(zip(names, rest, strict=False)), **kwargs}
        device = given.pop("device", None)
        if device is None or _is_other(device):
            return func(*args, **kwargs)
        return self._moved(tensor, device, {k: v for k, v in given.items() if v is not None})

    def _moved(self, tensor: torch.Tensor, device: Any, how: dict[str, Any]) -> torch.Tensor:
        where = self._where(device)
        if where == DEVICE and type(tensor) is torch.Tensor:
            tensor = self._without_data(tensor)
        if where is None or where == self._place(tensor):
            return tensor.to(**how) if how.keys() & {"dtype", "copy", "memory_format"} else tensor
        with self._watcher.placing(where):
            return torch.Tensor.to(tensor, **{"dtype": tensor.dtype, **how, "copy": True})

    def _without_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor, such as a loader's, on its way to the device."""
        fake = self._mode.from_tensor(tensor)
        with self._watcher.placing(HOST if self._watcher.tells_apart else None):
            self._watcher.note(fake.untyped_storage())
        return fake

    def _cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        device = args[1] if args[1:] else kwargs.get("device")
        return self._moved(args[0], _CUDA if device is None else device, {})

    def _cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if self._watcher.tells_apart:
            return self._moved(args[0], _CPU, {})
        if self._watcher.is_on_host(args[0]):
            return args[0]
        self._watcher.remark(
            "x.cpu() leaves tensors on the device, as this program calls the device itself 'cpu'. "
            "Move the model to 'cuda' in build(), or use host_memory()."
        )
        return func(*args, **kwargs)

    def _pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        with self._watcher.placing(HOST):
            return args[0].clone()

    def _place(self, tensor: torch.Tensor) -> str:
        return HOST if self._watcher.is_on_host(tensor) else DEVICE

    def _on_cuda(self, tensor: torch.Tensor) -> bool:
        if not self._watcher.tells_apart or not isinstance(tensor, FakeTensor):
            return False
        return tensor.fake_device.type == "cpu" and not self._watcher.is_on_host(tensor)

    def device_of(self, tensor: torch.Tensor, device: torch.device) -> torch.device:
        """What `x.device` is to the program; PyTorch's own code sees what it is to PyTorch."""
        return _CUDA if not self._watcher.is_working and self._on_cuda(tensor) else device


@contextlib.contextmanager
def cuda_device(
    watcher: StorageWatcher, mode: FakeTensorMode, alone: bool
) -> Iterator[SimulatedCuda]:
    """`SimulatedCuda` in force, in backward too, where a checkpoint recomputes."""
    simulated, dtype = SimulatedCuda(watcher, mode, alone), torch.get_default_dtype()
    defaults = {
        "set_default_device": simulated.set_default,
        "get_default_device": lambda: simulated.default,
        "set_default_tensor_type": simulated.set_default_type,
    }
    with (
        also_in_backward(simulated),
        simulated.answers,
        mock.patch.multiple(torch, **defaults),
        contextlib.ExitStack() as stack,
    ):
        with contextlib.suppress(MovedError):  # `settle` says so to a model that is sharded
            stack.enter_context(fsdp.shards_on_host(watcher.offloading, _CUDA))
        try:
            yield simulated
        finally:
            torch.set_default_dtype(dtype)


def _is_other(device: Any) -> bool:
    """Whether a device is neither the GPU nor its host, such as `meta`."""
    is_number = isinstance(device, int)
    return not is_number and torch.device(device).type not in ("cuda", "cpu")
