"""What an exported script may import; `script` keeps the names that it uses."""

PLAIN_IMPORTS = """\
import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn"""

IMPORTS = {
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": ("checkpoint_wrapper",),
    "torch.distributed.checkpoint.state_dict": (
        "StateDictOptions", "get_model_state_dict", "set_model_state_dict",
    ),
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "torch.distributed.fsdp": (
        "CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard",
    ),
    "torch.distributed.pipelining": (
        "PipelineStage", "Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B",
    ),
    "torch.distributed.tensor": ("DTensor", "Replicate", "Shard"),
    "torch.distributed.tensor.parallel": (
        "ColwiseParallel", "PrepareModuleInput", "RowwiseParallel", "SequenceParallel",
        "loss_parallel", "parallelize_module",
    ),
    "torch.nn.attention": ("SDPBackend", "sdpa_kernel"),
    "torch.nn.utils": ("clip_grads_with_norm_", "get_total_norm"),
    "utils.models": ("Transformer", "TransformerConfig"),
    "utils.models.transformer": ("rotary",),
}  # fmt: skip
