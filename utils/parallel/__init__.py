"""Parallel training, one file per axis: real code, which lessons import and `export` copies.

Names are imported when they are first used, so that `dims` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

HOME = {
    "AXES": "dims",
    "DATA_AXES": "dims",
    "ParallelDims": "dims",
    "device_mesh": "mesh",
    "check_versions": "mesh",
    "joined_ranks": "mesh",
    "sum_over": "mesh",
    "accumulated_passes": "data",
    "local_batches": "data",
    "local_positions": "data",
    "local_rows": "data",
    "summed_loss": "data",
    "token_weight": "data",
    "reduce_on_last_micro_batch": "shard",
    "apply_fsdp": "shard",
    "apply_tp": "tensor",
    "gathered_attention": "context",
    "apply_cp": "context",
    "Action": "actions",
    "DeadlockError": "actions",
    "check_program": "actions",
    "read_program": "actions",
    "stage_owners": "actions",
    "write_csv": "actions",
    "chunks_of": "pipeline",
    "even_blocks": "pipeline",
    "keep_chunk": "pipeline",
    "pipeline_passes": "pipeline",
    "CheckpointError": "safe_checkpoint",
    "load_newest": "safe_checkpoint",
    "save_safely": "safe_checkpoint",
    "list_checkpoints": "checkpoint_folder",
    "newest_whole": "checkpoint_folder",
    "step_of": "checkpoint_folder",
    "Saves": "saves",
    "note_signals": "saves",
    "saved_steps": "saves",
    "adamw": "train",
    "clip_grad_norm": "train",
    "keep_scores": "train",
    "materialise": "train",
    "recompute": "train",
    "report": "train",
    "run": "train",
    "train_steps": "train",
}

__all__ = list(HOME)


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"utils.parallel has no name {name!r}; it offers: {sorted(HOME)}")
    return getattr(importlib.import_module(f"utils.parallel.{HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOME})
