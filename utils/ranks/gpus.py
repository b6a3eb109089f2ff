"""Ranks of one machine have a GPU each, or none of them sees any.

Trainer, FSDP and DeepSpeed take the GPUs that they find: with more ranks than GPUs the second rank
asks for one that is not there, and the first computes elsewhere than the others.
"""

from __future__ import annotations

from collections.abc import MutableMapping

HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
# They choose a device when they are imported, or ask the GPU what it is, which initialises it: where
# there is one, each rank imports them itself.
CHOOSE_ON_IMPORT = ("accelerate", "bitsandbytes", "deepspeed", "peft")


def has_a_gpu_each(ranks: int) -> bool:
    """Whether this machine has as many GPUs as ranks."""
    import torch

    return torch.cuda.device_count() >= ranks


def hide_gpus_unless_enough(ranks: int, environment: MutableMapping[str, str]) -> None:
    """Let processes of this environment see no GPU where there are fewer than ranks.

    It counts where CUDA is not initialised yet: in a process that begins.
    """
    if not has_a_gpu_each(ranks):
        environment.update(HIDDEN)
