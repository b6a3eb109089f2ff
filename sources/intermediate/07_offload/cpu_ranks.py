"""accelerate on the CPU of any machine, so that small ranks compute alike everywhere."""

from __future__ import annotations

import importlib
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy


def fsdp_on_cpu(trainer: Any) -> None:
    """Let a `Trainer` shard on the CPU as its arguments' `fsdp` asks. Call it before `train()`.

    accelerate takes up FSDP on GPUs and their kin alone (`AcceleratorState.__init__` lists them).
    On a CPU it would go on with DDP and say nothing.

    Raises:
        ValueError: the arguments do not ask for FSDP.
    """
    if not trainer.args.fsdp:
        raise ValueError("These TrainingArguments have no fsdp=True, so there is nothing to shard.")
    accelerate = importlib.import_module("accelerate.utils")
    plugin = accelerate.FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # only beside a GPU can it pin
    state = trainer.accelerator.state
    state.distributed_type, state.fsdp_plugin = accelerate.DistributedType.FSDP, plugin
    trainer.is_fsdp_enabled = True
