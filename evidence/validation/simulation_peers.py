"""What other tools say of the small steps whose peak this machine's allocator gives.

PyTorch's private MemTracker (torch.distributed._tools) simulates as `simulate` does, on tensors
without data, and knows no scratch memory of kernels. It refuses frozen parameters, 8-bit states
and accumulation. Its relative FSDPMemTracker takes FSDP models only, of which these rows have
none. The estimators of accelerate and DeepSpeed get the number of parameters, all they ask for.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from evidence.validation.comparison import Comparison
from evidence.validation.peers import PeerError, error_of
from evidence.validation.simulation_cpu import CASES, Pair
from utils.shims.torch_distributed import mem_tracker
from utils.units import MIB


def memtracker_bytes(case: Pair) -> int:
    """MemTracker's peak of the second step.

    Raises:
        ValueError: a parameter is frozen (it registers hooks on every gradient), the step asks
            for a value, as the 8-bit optimizer of bitsandbytes does, or has several forward
            passes, or the model converts its weights, which plain PyTorch cannot do to modules of
            fake tensors.
    """
    build, step = case
    with FakeTensorMode(), _refused():
        model, optimizer = build()
        if not all(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("MemTracker takes no frozen parameters.")
        tracker = mem_tracker()
        tracker.track_external(model, optimizer)
        with tracker:
            step(model, optimizer)
            tracker.reset_mod_stats()
            step(model, optimizer)
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except DataDependentOutputException as error:
        raise ValueError("The step asks for a value, which these tensors do not have.") from error
    except NotImplementedError as error:
        raise ValueError("MemTracker takes one forward pass a step.") from error
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        raise ValueError("Fake tensors of a module cannot be converted in place.") from error


def accelerate_bytes(parameters: float) -> float:
    """`accelerate estimate-memory`: the training step of an fp32 model of this size."""
    module = importlib.import_module("accelerate.commands.estimate")
    return max(module.estimate_training_usage(int(4 * parameters), "float32").values())


def deepspeed_bytes(parameters: float) -> float:
    """DeepSpeed's estimate of model states on one GPU, without offload.

    Raises:
        ImportError: it is not installed.
    """
    module = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
    return module.estimate_zero2_model_states_mem_needs(int(parameters), 1, 1, cpu_offload=False)[1]


def cpu_peers(rows: Iterable[Comparison]) -> list[PeerError]:
    """Errors of the simulator and of other tools on rows of `cpu_comparisons`."""
    rows = list(rows)
    found = []
    for source in dict.fromkeys(row.source for row in rows):
        group = [row for row in rows if row.source == source]
        ratios: dict[str, list[float]] = {
            "this simulator": [row.predicted / row.published for row in group],
            "MemTracker": list(_tracked(group)),
            "accelerate estimate-memory": _estimated(group, accelerate_bytes),
            "DeepSpeed estimator": _estimated(group, deepspeed_bytes),
        }
        found += [error_of(source, tool, errors) for tool, errors in ratios.items() if errors]
    return found


def _tracked(group: list[Comparison]) -> Iterable[float]:
    for row in group:
        name = f"{row.source.partition(', ')[2]}, {row.case}"
        with contextlib.suppress(ValueError):
            yield memtracker_bytes(CASES[name]) / MIB / row.published


def _estimated(group: list[Comparison], tool: Callable[[float], float]) -> list[float]:
    with contextlib.suppress(ImportError):
        return [tool(row.size) / MIB / row.published for row in group]
    return []
