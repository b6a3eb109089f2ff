"""Hooks that tell which phase a step is in, which module runs, and which storages are known.

The learner's loop is not rewritten: the hooks are PyTorch's public ones, and all of them are
gone when the observer closes.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from utils.memory.events import Category, KnownStorage, Mark, ModuleSpan, Phase
from utils.memory.holdings import is_sharded, tensors_of
from utils.memory.source import EventSource
from utils.memory.watched import Watched
from utils.shims.fsdp import noted_buffers
from utils.shims.torch_ import inside_backward, noted_backward, sparse_parts, unwrapping
from utils.shims.torch_dispatch import torch_function_off

_active: contextvars.ContextVar[StepObserver | None] = contextvars.ContextVar(
    "active_observer", default=None
)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Name a part of the step by hand: `with phase("clip"): ...`.

    The name appears in the meter's timeline and, as a `record_function` range, in profilers.
    """
    observer = _active.get()
    with torch.profiler.record_function(name):
        if observer is None:
            yield
            return
        outer = observer.label(name)
        try:
            yield
        finally:
            observer.label(outer)


def running_module() -> str:
    """The path of the module whose forward is running in the observed step; empty outside."""
    observer = _active.get()
    return observer.running_path() if observer is not None else ""


def note_storages(category: Category, tensors: Iterable[Any]) -> None:
    """Tell the observed step, if there is one, that these tensors hold bytes of a category."""
    observer = _active.get()
    if observer is not None:
        observer.note(category, tensors)


class StepObserver:
    """Watches models and their optimizers while it is open (`with StepObserver(...) as seen`).

    `marks`, `spans` and `known` fill up as the step runs, on the clock of the source of events.
    """

    def __init__(self, watched: Watched, source: EventSource) -> None:
        self.marks: list[Mark] = []
        self.spans: list[ModuleSpan] = []
        self.known: list[KnownStorage] = []
        self._watched = watched
        self._now_ns, self._address = source.now_ns, source.address
        self._function_off = torch_function_off()
        self._phase, self._label = Phase.BEFORE_FORWARD, ""
        self._device = watched.parameters()[0].device
        self.backward_came = False  # through this model: a gradient reached it
        self._running: list[tuple[nn.Module, int, tuple[int, ...]]] = []
        self._cast: set[int] = set()
        self._handles: list[Any] = []
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> StepObserver:
        self._token = _active.set(self)
        try:
            self._hook_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __deepcopy__(self, memo: Any) -> StepObserver:
        """A model that the step copies brings its hooks along, and they tell this observer."""
        return self

    def _hook_up(self) -> None:
        # Weakly: a module that the step replaces must die as it would without the meter.
        self._paths = weakref.WeakKeyDictionary(self._watched.paths())
        own = self._watched.parameters()
        self._shards = {id(p) for p in own} if any(map(is_sharded, own)) else set()
        for module in self._paths:
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            hook = module.register_forward_hook(self._leave, always_call=True)
            self._handles.append(hook)
        for parameter in own:
            if parameter.requires_grad and parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(self._gradient_ready)
                self._handles.append(hook)
        for optimizer in self._watched.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._step_begins))
            self._handles.append(optimizer.register_step_post_hook(self._step_ends))
        self._patches.enter_context(noted_backward(self._backward_called))
        if self._shards:
            note = functools.partial(self.note, Category.COMMUNICATION)
            self._patches.enter_context(noted_buffers(note))

    def __exit__(self, *_: object) -> None:
        _active.reset(self._token)
        self._patches.close()
        while self._handles:
            self._handles.pop().remove()

    def begin_step(self) -> int:
        """Forget what was seen, note the storages that exist, return the time."""
        self.marks, self.spans, self.known, self.backward_came = [], [], [], False
        self.note_states()
        self._phase = Phase.BEFORE_FORWARD
        start_ns = self._now_ns()
        self.marks.append(Mark(start_ns, self._phase))
        return start_ns

    def note_states(self) -> None:
        """Note where parameters, buffers, gradients and optimizer state are now."""
        for category, tensor in self._watched.on_host():
            self.note(category, [tensor], on_host=True)
        self.note(Category.PARAMETERS, self._watched.parameters())
        self.note(Category.BUFFERS, self._watched.buffers())
        self._note_gradients()
        self._note_optimizer_state()
        for category, tensors in self._watched.kept_elsewhere():
            self.note(category, tensors)
        for name, holder in self._watched.keep.items():
            self.note(Category.KEPT, tensors_of(name, holder))

    def running_path(self) -> str:
        """The path of the innermost module whose forward is running."""
        return self._paths.get(self._running[-1][0], "") if self._running else ""

    def label(self, name: str) -> str:
        """Give the time from now on a name of its own (none if empty); return the one before."""
        before, self._label = self._label, name
        self.marks.append(Mark(self._now_ns(), self._phase, name))
        return before

    def _mark(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self.marks.append(Mark(self._now_ns(), phase, self._label))

    def note(self, category: Category, tensors: Iterable[Any], *, on_host: bool = False) -> None:
        """Note where these tensors are now, and that they hold bytes of this category."""
        now_ns, plain = self._now_ns(), unwrapping()
        found = [t for t in tensors if isinstance(t, torch.Tensor)]
        with self._function_off():  # a mode that is in force would hear of each of these questions
            for tensor in found:
                if tensor.device != self._device:
                    continue
                for part in _dense_parts(plain(_local(tensor))):
                    storage = part.untyped_storage()
                    address = self._address(storage)
                    if address is not None:
                        self.known.append(
                            KnownStorage(now_ns, address, storage.nbytes(), category, on_host)
                        )

    def _note_gradients(self) -> None:
        copies, others = self._watched.stepped_elsewhere()
        own = [*self._watched.parameters(), *copies, *others]
        self.note(Category.GRADIENTS, (p.grad for p in own if p.is_leaf))

    def _note_optimizer_state(self) -> None:
        copies, others = self._watched.stepped_elsewhere()
        self.note(Category.OPTIMIZER_STATE, [*tree_leaves(self._watched.states()), *copies])
        self.note(Category.KEPT, others)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._running:
            self._mark(Phase.RECOMPUTE if inside_backward() else Phase.FORWARD)
            self._cast = set()
            if self._phase is Phase.FORWARD:
                self.note(Category.INPUTS, tree_leaves((args, kwargs)))
        self._note_gathered(module)
        self._running.append((module, self._now_ns(), self._cast_bytes(module)))

    def _note_gathered(self, module: nn.Module, *_: Any) -> None:
        """FSDP puts whole parameters in the place of the model's shards while a module runs."""
        if self._shards:
            own = module.parameters(recurse=False)
            self.note(Category.COMMUNICATION, (p for p in own if id(p) not in self._shards))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if (
            self._shards and next(module.parameters(recurse=False), None) is not None
        ):  # FSDP gathers them anew in backward
            again = functools.partial(self._note_gathered, module)
            for tensor in _differentiable(output):
                self._handles.append(tensor.register_hook(again))
        while self._running:  # an exception may have skipped the hooks of inner modules
            entered, start_ns, cast_bytes = self._running.pop()
            path = self._paths.get(entered, "")
            self.spans.append(ModuleSpan(start_ns, self._now_ns(), path, cast_bytes))
            if entered is module:
                break
        if not self._running:
            self._outermost_left(output)

    def _outermost_left(self, output: Any) -> None:
        if self._phase is Phase.RECOMPUTE:
            self._mark(Phase.BACKWARD)
            return
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.note(Category.LOGITS_AND_LOSS, outputs)
        for tensor in _differentiable(output):
            self._handles.append(tensor.register_hook(self._output_gradient_ready))
        self._mark(Phase.LOSS)

    def _cast_bytes(self, module: nn.Module) -> tuple[int, ...]:
        """Sizes of the copies that autocast will make: each trainable weight once a forward.

        Only modules with a matrix are cast; norms keep their own dtype.
        """
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            return ()  # a look-up is not cast; a tied head casts the weight when it runs
        # Attention uses its output projection's weight without calling that module.
        recurse = isinstance(module, nn.MultiheadAttention)
        own = [p for p in module.parameters(recurse) if p.dtype is torch.float32]
        if not any(p.dim() > 1 for p in own):
            return ()
        device_type = own[0].device.type
        if not torch.is_autocast_enabled(device_type):
            return ()
        element_bytes = torch.get_autocast_dtype(device_type).itemsize
        fresh = [p for p in own if id(p) not in self._cast]
        self._cast.update(id(p) for p in fresh if p.requires_grad)
        return tuple(p.numel() * element_bytes for p in fresh)

    def _backward_called(self) -> None:
        """The loss ends where its backward is called: what is born from there on is backward's."""
        if self._phase is Phase.LOSS and _active.get() is self:
            self._mark(Phase.BACKWARD)

    def _output_gradient_ready(self, gradient: torch.Tensor) -> None:
        self.backward_came = True
        self._mark(Phase.BACKWARD)

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        self.backward_came = True
        self._mark(Phase.BACKWARD)
        self.note(Category.GRADIENTS, [parameter.grad])

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._note_gradients()
        self._mark(Phase.OPTIMIZER_STEP)

    def _step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._note_optimizer_state()
        self._mark(Phase.AFTER_STEP)


def _differentiable(output: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part: a DTensor reports the size of the whole."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold the bytes: a sparse one has no storage of its own."""
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    return (tensor,) if tensor.layout is torch.strided else ()
