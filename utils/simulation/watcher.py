"""A source of allocation events for tensors without data.

Under `FakeTensorMode` an operation computes shapes only, yet its results own storages, and those
live and die exactly as real ones do. The watcher notes each new storage once and its end.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from utils.memory.events import Category
from utils.memory.host import on_host
from utils.memory.observer import note_storages, running_module
from utils.shims.torch_ import with_data
from utils.shims.torch_dispatch import active_modes, python_dispatch_off, torch_function_off
from utils.simulation import onednn_lstm
from utils.simulation.cublas import PRODUCTS, Workspaces
from utils.simulation.in_place import CANDIDATES, DEVICE, InPlace
from utils.simulation.known_values import LARGEST, KnownValues
from utils.simulation.recurrences import CUDNN_RESULTS
from utils.simulation.result_cache import Recipes, ResultCache
from utils.simulation.scratch import REDUCED_RESULTS, Scratch
from utils.simulation.simulated_memory import SimulatedMemory
from utils.simulation.stand_ins import NEED_VALUES, StandIns, Values
from utils.traffic.collectives import Collective, UnknownOperation, collectives_of, operator_name

# Operation -> the buffers of communication among its arguments. What a reduce-scatter or a
# collective of tensor parallelism makes goes on to be a gradient or an activation.
_BUFFERS: dict[str, Callable[[Any, Any], Any]] = {
    "fsdp::all_gather_copy_in": lambda args, kwargs: args[1],
    "fsdp::split_with_sizes_copy": lambda args, kwargs: kwargs["out"],
    "fsdp::chunk_cat": lambda args, kwargs: kwargs["out"],
    "fsdp::chunk_cat_mixed_dtype": lambda args, kwargs: kwargs["out"],
}
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_NONZERO = torch.ops.aten.nonzero.default
_PACK = torch.ops.aten._pack_padded_sequence.default
_RANGES = frozenset(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)
_OWN_RESULTS = {**CUDNN_RESULTS, **REDUCED_RESULTS}
_ON_CPU = {onednn_lstm.LAYER: onednn_lstm.layer, **_OWN_RESULTS}
# Without data it returns a slice of all that is gathered; with data a tensor of its own.
_SLICED = torch.ops._dtensor.shard_dim_alltoall.default


@functools.cache
def _changes_lists_in_place(func: Any) -> bool:
    """Whether it is one of the operations on lists by which optimizers update all tensors."""
    name = operator_name(func)
    return name.startswith("aten::_foreach_") and name.endswith("_")


def _is_meta(tensor: torch.Tensor) -> bool:
    """Whether it was made on the meta device, on purpose without memory on any."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "meta"


class _Handler(SimulatedMemory):
    """What `StorageWatcher` does in each operation.

    The mode inherits it: what stands in a mode's own class PyTorch wraps, so that torch.compile
    passes it by, and in the many short calls that wrapper costs as much as all the rest.
    """

    def __init__(
        self,
        granularity_bytes: int,
        scratch: Scratch,
        has_host: bool,
        recipes: Recipes | None,
        values: Values,
        workspaces: Workspaces | None = None,
    ) -> None:
        self._known, self.workspaces = KnownValues(), workspaces
        super().__init__(granularity_bytes, has_host, self._known.died)
        self._scratch = scratch
        self._own_results = _OWN_RESULTS if has_host else _ON_CPU
        self._in_place = InPlace()
        self.is_working = False  # whether PyTorch works out a result
        self.remarks: dict[str, None] = {}  # what the result has to say, in order
        self.stand_ins = StandIns(values, self.remark)
        self._paused = False
        self._follow_values: set[Any] = set()  # operations whose results do; none is kept
        self.in_build, self.failed_in = True, ""
        self.collectives: list[Collective] = []
        self.unknown_operations: Counter[str] = Counter()
        self.libraries: set[str] = set()  # whose operations ran, beside PyTorch's own
        self.axis_of: Callable[[Any], str] = str
        self._cache = ResultCache(recipes) if recipes is not None else None
        self._python_off, self._function_off = python_dispatch_off(), torch_function_off()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            if _changes_lists_in_place(func):
                return None  # it makes nothing, and working that out for lists of shards is slow
            return NotImplemented  # come back with this rank's local tensors
        if func is DEVICE:
            self._in_place.asked = id(args[0])
            return args[0].fake_device  # asked for more often than all else; skip its long way
        if func in CANDIDATES:
            func, args = self._in_place.operation(func, args)
        self._in_place.asked = 0
        if func in _RANGES:
            with self._python_off():
                return func(*args)  # a name for profilers, without tensors
        if func is _WAIT:
            return args[0]  # as the real one does; its stand-in for fake tensors makes a new one
        if self._paused:
            return func(*args, **(kwargs or {}))
        before, self.is_working = self.is_working, True
        try:
            with self._function_off():
                return self._run(func, args, kwargs or {})
        finally:
            self.is_working = before

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = self._cache
        call = cache.call(func, args, kwargs) if cache is not None else None
        recipe = cache.get(call) if cache is not None and call is not None else None
        if cache is not None and call is not None and recipe is not None:
            with self._python_off():
                out, scratch_bytes = cache.results(recipe, call), recipe.scratch_bytes
        else:
            out = self._worked_out(func, args, kwargs)
            filled = out if out is not None else kwargs.get("out")
            scratch_bytes = self._scratch(func, args, filled, kwargs)
        to_host = (
            self._has_host
            and (self.tells_apart or self.offloads or self._placing is not None or on_host())
            and self._goes_to_host(args, kwargs, call.tensors if call is not None else None)
        )
        for leaf in [out] if type(out) is FakeTensor else tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not _is_meta(leaf):
                # A sparse one is made of others, noted before; no recipe makes one.
                if recipe is not None or leaf.layout is torch.strided:
                    self.note_at(leaf.untyped_storage(), to_host)
        self._known.learn(func, args, kwargs, out)
        if func.namespace != "aten":
            self._communication(func, args, kwargs)
        if self.workspaces is not None and func in PRODUCTS and not to_host:
            self.keep(self.workspaces.taken_by(func, self._clock))
        if scratch_bytes and not to_host:
            self.workspace(scratch_bytes)
        if cache is not None and call is not None and recipe is None:
            if func in self._follow_values:
                return out
            cache.learn(call, cache.call(func, args, kwargs), out, scratch_bytes)
        return out

    def _worked_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            out = self._own_results.get(func, func)(*args, **kwargs)
            return out.clone() if func is _SLICED else out
        except NEED_VALUES:
            self._follow_values.add(func)
            out = self._asked(func, args, kwargs)
            if out is None:
                self.failed_in = running_module()
                raise
            return out
        except Exception:
            self.failed_in = running_module()
            raise

    def _asked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What depends on values: of known ones, else of stand-ins; None if there are none."""
        if self._known.all_known(args, kwargs):
            real = self._known.worked_out(func, args, kwargs)
            return tree_map_only(torch.Tensor, self._without_data, real)
        if func is _PACK and self._known.knows(args[1]):
            return self._packed(args[0], self._known.real(args[1]), args[2])
        found = self.stand_ins.results(func, args, kwargs)
        if func is _NONZERO and found is not None and found.numel() <= LARGEST:
            with with_data():
                everywhere = torch.ones(args[0].shape).nonzero()
            self._known.keep(found, everywhere)
        return found

    def _packed(self, padded: Any, lengths: torch.Tensor, batch_first: bool) -> tuple[Any, Any]:
        """Sequences of known lengths without their padding, and how many are as long as each."""
        with with_data():
            numbers: list[int] = lengths.tolist()
            sizes = [sum(n > step for n in numbers) for step in range(max(numbers))]
            counted = torch.tensor(sizes)
        rows = padded.new_empty((sum(sizes), *padded.shape[2:]))
        lasting = self._without_data(counted)
        self.note_at(lasting.untyped_storage(), self.tells_apart)
        return rows, lasting

    def _without_data(self, real: torch.Tensor) -> torch.Tensor:
        out = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
        self._known.keep(out, real)
        return out

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Inside nothing is noted: PyTorch works out shapes by tensors that are never made."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def remark(self, text: str) -> None:
        """Have the result say something, once."""
        self.remarks[text] = None

    def _communication(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note what an operation of FSDP or of the collectives takes and makes."""
        self.libraries.add(func.namespace)
        try:
            self.collectives += collectives_of(func, args, self._clock, self.axis_of)
        except UnknownOperation as error:
            self.unknown_operations[error.name] += 1
        if func.name() in _BUFFERS:
            note_storages(Category.COMMUNICATION, tree_leaves(_BUFFERS[func.name()](args, kwargs)))


class StorageWatcher(_Handler, TorchDispatchMode):
    """Events of all storages that are born while it is entered, on a clock that counts events.

    It is an event source for the meter. `granularity_bytes` is the simulated allocator's,
    `scratch` says what its kernels need beyond their results, and `has_host` whether the device
    has a host with memory of its own, whose storages are summed up apart, without events. Without
    `reuse_results` PyTorch works out every result anew: the same events, in several times as long;
    with recipes of another watcher what that one has worked out is used as well.
    `values` are stand-ins for what the program asks of tensors. `workspaces` are those of the device's
    library of matrix products.
    """

    name = "simulated storages"

    def __init__(
        self,
        granularity_bytes: int,
        scratch: Scratch,
        has_host: bool = False,
        reuse_results: bool | Recipes = True,
        values: Values = None,
        workspaces: Workspaces | None = None,
    ) -> None:
        TorchDispatchMode.__init__(self)
        recipes = (
            ({} if reuse_results else None) if isinstance(reuse_results, bool) else reuse_results
        )
        _Handler.__init__(self, granularity_bytes, scratch, has_host, recipes, values, workspaces)

    def __enter__(self) -> StorageWatcher:
        if self._cache is not None:
            modes = (mode for mode in active_modes() if isinstance(mode, FakeTensorMode))
            self._cache.mode = next(modes, None)
        super().__enter__()
        return self
