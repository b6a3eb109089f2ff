"""Megatron-Core's own parallel layers on ranks of this machine, where it is installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import warnings
from collections.abc import Iterator
from types import ModuleType

import torch.distributed as dist

from utils.shims.megatron import buffers_on_cpu

INSTALL = "pip install --no-deps 'megatron-core>=0.16'"


def megatron_problem() -> str | None:
    """Why Megatron-Core cannot be used here; None if it is installed."""
    try:
        importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return (
            f"Megatron-Core is not installed, and what uses it is skipped: `{INSTALL}` "
            "brings it (15 MB, Linux)."
        )
    return None


@contextlib.contextmanager
def megatron_layers() -> Iterator[ModuleType]:
    """In a worker of `run_ranks`: `megatron.core.tensor_parallel`, all ranks one group of it.

    Its buffers are in the CPU's memory: give its layers tensors from there. Inside, it does not warn that Transformer Engine and Apex, which need a GPU, are missing.

    Raises:
        ModuleNotFoundError: Megatron-Core is not installed.
    """
    if problem := megatron_problem():
        raise ModuleNotFoundError(problem)
    with warnings.catch_warnings(), buffers_on_cpu():
        warnings.filterwarnings("ignore", category=UserWarning)
        state = importlib.import_module("megatron.core.parallel_state")
        layers = importlib.import_module("megatron.core.tensor_parallel")
        state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
        try:
            yield layers
        finally:
            state.destroy_model_parallel()
