"""`simulate`: the learner's own model and step, on tensors without data, metered as ever."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

from utils.checked import asks_first
from utils.memory.budgets import Budget
from utils.memory.holdings import is_sharded
from utils.memory.measurement import Measurement
from utils.memory.meter import measure
from utils.memory.notes import GROWN, UNNAMED
from utils.memory.timeline import MemoryTimeline
from utils.memory.watched import Watched, watched
from utils.parallel.dims import ParallelDims
from utils.shims.torch_dispatch import active_modes
from utils.shims.torch_distributed import all_to_all_as_on_gpus
from utils.simulation.arguments import refuse_known_mistakes, without_optimizer
from utils.simulation.cublas import Workspaces
from utils.simulation.cuda_allocator import reserved
from utils.simulation.cuda_choices import choose_optimizer_kernels, cuda_choices
from utils.simulation.cuda_device import cuda_device
from utils.simulation.cuda_module import cuda_module
from utils.simulation.devices import SimulatedDevice, simulated_device
from utils.simulation.errors import explained
from utils.simulation.first_step import library_memory
from utils.simulation.formulas import formulas
from utils.simulation.garbage import set_aside
from utils.simulation.imports import imported_with_data
from utils.simulation.left_out import left_out
from utils.simulation.packed_sequences import packed_sequences
from utils.simulation.recurrences import recurrences
from utils.simulation.result_cache import Recipes, SharedResults
from utils.simulation.stand_ins import Values
from utils.simulation.watcher import StorageWatcher
from utils.simulation.without_data import without_data
from utils.simulation.world import World, check_model_heads, simulated_world
from utils.traffic.collectives import Collective, Traffic, summed
from utils.units import MIB, Category, Evidence, format_bytes

Model = TypeVar("Model", bound=nn.Module)
Build = Callable[[], tuple[Model, torch.optim.Optimizer | None]]
Step = Callable[[Model, Any], Any]


@asks_first(refuse_known_mistakes)
def simulate(
    build: Build[Model],
    step: Step[Model],
    *,
    device: str = "A100 80GB",
    world: int | ParallelDims = 1,
    rank: int = 0,
    items: int = 1,
    unit: str = "items",
    name: str = "",
    within: Budget | str | int | None = None,
    reuse_results: bool | SharedResults = True,
    values: Values = None,
) -> Measurement:
    """Meter one training step of any size on a device that need not exist.

    The same two functions run for real: `model, optimizer = build(); step(model, optimizer)`.

    Args:
        build: makes the model and its optimizer (None for inference), on `cpu`.
        step: runs one whole step; it makes its own inputs.
        device: a GPU of the catalog, or "cpu" for this kind of machine without its memory.
        world: how many devices there are, as a number or by the sizes of the axes that divide
            them; build() may make meshes over them, shard, and split.
        rank: which of them is metered, such as `dims.rank(pp=1)`.
        items: how many items one step processes, and `unit` what they are called.
        within: a memory budget that the step must stay inside.
        reuse_results: False has PyTorch work out every operation anew. The answer is the same and
            takes several times as long; it needs fewer of PyTorch's private names. A `SharedResults`
            keeps what is worked out for the next simulation that is given it.
        values: what to assume where the step asks for a value: `{"loss": 1.0}` by the name, or
            the "file.py:12", at that line, and `{"sizes": [512, 128]}` one after another. True
            leaves nothing out: each mask selects everything, each condition holds, but a way that
            ends in `return`, `break` or `continue` is not taken. A number is 1. Notes say at which
            file and line each was used, and that the result is then no upper bound. A check that
            raises is passed, whatever `values` is, and noted.

    Returns:
        A measurement with evidence *simulated*; its times are event counts. The first note
        says whether the peak fits the device, `traffic` what the rank communicates, and on a
        GPU `reserved_bytes` what the caching allocator would have taken from it and
        `host_bytes` what was kept beside it (`utils.memory.host_memory`). Operations whose bytes
        `traffic` cannot tell are named in a note.

    Raises:
        SimulationError: the step needs values, which simulated tensors do not have, or an
            operation that cannot be simulated; the message says where.
        OverBudgetError: the step goes over `within`.
        MovedError: this version of a library lacks a private name that simulations stand on.
        ValueError: an unknown device, a simulation inside of another, a rank outside of the
            world, a mesh or heads that do not divide over it, or a process group that exists.
    """
    card = simulated_device(device)
    if any(isinstance(mode, FakeTensorMode) for mode in active_modes()):
        raise ValueError("A simulation cannot run inside another. Let this one end first.")
    watcher = StorageWatcher(
        card.granularity_bytes,
        card.scratch,
        card.is_cuda,
        _recipes(reuse_results, card, world, rank),
        values,
        Workspaces(card.capability) if card.is_cuda else None,
    )
    if card.asked and (world.ranks if isinstance(world, ParallelDims) else world) > 1:
        card.asked.as_a_rank()
    with (
        set_aside() as aside,
        simulated_world(world, rank) as ranks,
        _simulating(watcher, card, world) as settle,
    ):
        watcher.axis_of = ranks.axis
        model, optimizer, models = _built(build())
        watcher.in_build = False
        _check_built(models, ranks)
        watcher.libraries |= _libraries(models)
        settle(models.parameters())
        _drop_cycles(models, watcher)
        aside()
        built_ns = watcher.now_ns()
        if card.is_cuda:
            choose_optimizer_kernels(models.optimizers)
        result = measure(
            _run(step, model, optimizer),
            model=model,
            optimizer=optimizer,
            items=items,
            unit=unit,
            name=name,
            within=within,
            timed_steps=0,
            source=watcher,
        )
        del model, optimizer, models
    said = _allocator_bytes(watcher, card.usable_bytes) if card.is_cuda else {}
    notes = [
        card.verdict(result.peak_bytes, said.get("reserved peak")),
        kept_note(result.timeline),
        *map(uncounted, watcher.unknown_operations.items()),
        *watcher.remarks,
        card.asked.note if card.asked else "",
        *(note for note in result.notes if note.startswith((GROWN, UNNAMED))),
    ]
    return dataclasses.replace(
        result,
        evidence=Evidence.SIMULATED,
        device=card.name,
        allocator_bytes=said,
        notes=tuple(filter(None, notes)),
        traffic=_traffic(watcher.collectives, built_ns, result.timeline),
        library_memory=library_memory(watcher.workspaces, result.timeline),
    )


def _recipes(
    reuse: bool | SharedResults, card: SimulatedDevice, world: int | ParallelDims, rank: int
) -> bool | Recipes:
    """What earlier simulations worked out. A CPU's kernels are asked anew: they say what they took."""
    if isinstance(reuse, bool):
        return reuse
    return reuse.recipes(card.name, str(world), rank) if card.is_cuda else True


def _run(step: Callable[[Any, Any], Any], model: Any, optimizer: Any) -> Callable[[], Any]:
    """The step, which says what was meant where it asks None for an optimizer's method."""

    def run() -> None:
        try:
            step(model, optimizer)
        except AttributeError as error:
            if optimizer is not None or not (problem := without_optimizer(error)):
                raise
            raise ValueError(problem) from error

    return run


@contextlib.contextmanager
def _simulating(
    watcher: StorageWatcher, card: SimulatedDevice, world: int | ParallelDims
) -> Iterator[Callable[[Sequence[torch.Tensor]], None]]:
    """All that a simulation stands on; gives what to call with the parameters after build()."""
    size = world.ranks if isinstance(world, ParallelDims) else world
    with contextlib.ExitStack() as stack:
        stack.callback(forget_what_devices_there_were)
        stack.enter_context(explained(watcher))
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(watcher)
        stack.enter_context(imported_with_data())
        stack.enter_context(without_data(watcher, card.is_cuda))
        stack.enter_context(recurrences(watcher.remark, card.is_cuda))
        stack.enter_context(packed_sequences())
        stack.enter_context(formulas(card.is_cuda))
        stack.enter_context(left_out(watcher.remark, size, card.is_cuda))
        if not card.is_cuda:
            yield lambda parameters: None
            return
        stack.enter_context(cuda_choices(card.flash))
        stack.enter_context(cuda_module(watcher, card))
        stack.enter_context(all_to_all_as_on_gpus())
        yield stack.enter_context(cuda_device(watcher, mode, size == 1)).settle


def forget_what_devices_there_were() -> None:
    """transformers asks once whether there is a GPU: what it heard in a simulation must not last."""
    asked = sys.modules.get("transformers.utils.import_utils")
    for name, question in list(vars(asked).items()) if asked else ():
        if name.startswith("is_torch_") and hasattr(question, "cache_clear"):
            question.cache_clear()


def _allocator_bytes(watcher: StorageWatcher, room_bytes: int | None) -> dict[str, int]:
    """What CUDA's caching allocator would say, from the warm-up step on.

    What build() left is placed first, in the order in which it was made, as after a move to the
    GPU; how a real program got there may leave other gaps.
    """
    cache = reserved(watcher.existing, watcher.stop(), room_bytes)
    return {
        "allocated peak": cache.allocated_peak_bytes,
        "reserved peak": cache.reserved_peak_bytes,
        "host peak": watcher.host_peak_bytes,
    }


KEPT = "Counted beside model and optimizer"


def kept_note(timeline: MemoryTimeline) -> str:
    """What build() left on the device that neither the model nor the optimizer owns."""
    blocks = [a for a in timeline.allocations if a.category is Category.KEPT and a.bytes]
    if not blocks:
        return ""
    size = format_bytes(sum(block.bytes for block in blocks))
    return f"{KEPT}: {size} in {len(blocks)} tensors that build() keeps."


UNCOUNTED = "Traffic leaves out"


def uncounted(found: tuple[str, int]) -> str:
    """What the traffic of a step does not say."""
    name, calls = found
    return f"{UNCOUNTED} the bytes of {calls} x {name}, an operation that it does not know."


def _traffic(
    seen: list[Collective], built_ns: int, timeline: MemoryTimeline
) -> tuple[Traffic, ...]:
    """The metered step's collectives, then those of build()."""
    step = [c for c in seen if timeline.start_ns <= c.time_ns <= timeline.end_ns]
    return summed(step) + summed((c for c in seen if c.time_ns < built_ns), at_startup=True)


def _built(found: Any) -> tuple[Any, Any, Watched]:
    """What build() returned, as it is and in one form; a model alone has no optimizer."""
    both = (found, None) if isinstance(found, nn.Module) else found
    if isinstance(both, tuple) and len(both) == 2:
        with contextlib.suppress(ValueError):
            return both[0], both[1], watched(both[0], both[1], None)
    raise ValueError(
        "build() must return (model, optimizer), the optimizer None for inference. For several "
        "return ([first, second], [their, optimizers]), and keep anything else in attributes."
    )


def _drop_cycles(models: Watched, watcher: StorageWatcher) -> None:
    """Collect what build() made and dropped, if there is more than the model has.

    Else objects that refer to each other would count as kept until Python happens to look.
    """
    with torch.no_grad():
        parts = (p.to_local() if is_sharded(p) else p for p in models.parameters())
        own = sum(part.numel() * part.element_size() for part in parts)
    if watcher.alive_bytes > 1.01 * own + MIB:
        gc.collect()


def _libraries(models: Watched) -> set[str]:
    """Whose classes the modules and optimizers are of."""
    modules = (module for model in models.models.values() for module in model.modules())
    kinds = {type(part) for part in (*modules, *models.optimizers)}
    return {kind.__module__.partition(".")[0] for kind in kinds}


def _check_built(models: Watched, ranks: World) -> None:
    for model in models.models.values():
        check_model_heads(model, ranks)
        for path, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not isinstance(local, FakeTensor):
                raise ValueError(
                    f"The parameter '{path}' holds real data: it was made before the simulation, or "
                    "from an array. Make the model inside build(), from tensors of PyTorch's."
                )
