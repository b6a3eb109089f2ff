"""ZeRO-1, 2 and 3 by DeepSpeed: one configuration for a model, and an engine that runs it.

Rajbhandari et al. 2019, arXiv:1910.02054, section 5: stage 1 shards the optimizer state over the
ranks, stage 2 the gradients as well, stage 3 the parameters as well.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from utils.memory.events import Category
from utils.memory.holdings import reachable_storages
from utils.memory.observer import note_storages
from utils.planner.exporters.deepspeed import batch_keys, precision_keys
from utils.shims.deepspeed import buffers_in_backward, gradients, lasting_buffers, shards
from utils.techniques.deepspeed import deepspeed_missing, load_deepspeed
from utils.techniques.deepspeed_config import check_config
from utils.techniques.offload_capacity import check_offload_room

BUCKETS = 4  # a model's gradients are sent in about as many pieces
LARGEST_BUCKET = 500_000_000  # elements: DeepSpeed's default, meant for models of many billions

SETTINGS: dict[str, str] = {
    "train_micro_batch_size_per_gpu": "items in one forward of one rank",
    "gradient_accumulation_steps": "forwards and backwards before one optimizer step",
    "train_batch_size": "items of one optimizer step: the two above times the ranks",
    "bf16": "parameters and gradients in bfloat16, beside a float32 master copy of each shard",
    "stage": "1 shards the optimizer state, 2 the gradients too, 3 the parameters too",
    "reduce_bucket_size": "gradients, in elements, that are sent in one call; the buffer is as large",
    "allgather_bucket_size": "parameters, in elements, that are gathered in one call after the step",
    "use_multi_rank_bucket_allreduce": "true: one all-reduce for a bucket; "
    "false: each part of it is reduced to the rank that owns it, half of the bytes",
    "overlap_comm": "send while backward goes on, with a second bucket; GPUs only",
    "stage3_prefetch_bucket_size": "parameters, in elements, that are gathered ahead of their use",
    "stage3_param_persistence_threshold": "smaller parameters, in elements, are never sharded",
    "stage3_max_live_parameters": "prefetching stops when so many elements are gathered",
    "stage3_max_reuse_distance": "a parameter stays gathered if it is used again within so many "
    "elements: large saves sending, 0 saves memory",
}


def zero_config(
    stage: int,
    parameter_count: int,
    *,
    world_size: int,
    micro_batch: int = 1,
    accumulation: int = 1,
    precision: str = "bf16",
    **zero: Any,
) -> dict[str, Any]:
    """DeepSpeed's configuration for a model, its buckets scaled to the model's size.

    `SETTINGS` explains each key. DeepSpeed's own defaults are buckets of 5e8 elements: one buffer
    of 1 GB in bfloat16, which hides what a smaller model saves.

    Args:
        stage: 0 (plain data parallelism) to 3.
        parameter_count: of the model.
        world_size: number of ranks.
        micro_batch: items in one forward of one rank.
        accumulation: forwards and backwards before one step.
        precision: "bf16" or "fp32".
        zero: other values of `zero_optimization`, by DeepSpeed's names.

    Raises:
        ValueError: a value that cannot be, or a name that DeepSpeed does not know.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is {stage!r}; ZeRO has the stages 1, 2 and 3, and 0 for none.")
    if precision not in ("bf16", "fp32"):
        raise ValueError(f"precision is {precision!r}; write 'bf16' or 'fp32'.")
    config = {
        **batch_keys(world_size, micro_batch, accumulation),
        "zero_optimization": {"stage": stage, **_sizes(stage, parameter_count), **zero},
        **precision_keys("bf16-mixed" if precision == "bf16" else "fp32"),
    }
    check_config(config, world_size)
    return config


def _sizes(stage: int, parameter_count: int) -> dict[str, Any]:
    bucket = max(2, min(parameter_count // BUCKETS, LARGEST_BUCKET) // 2 * 2)  # even: alignment
    sizes: dict[str, Any] = {"reduce_bucket_size": bucket, "overlap_comm": False}
    if stage < 3:
        return {**sizes, "allgather_bucket_size": bucket}
    return {
        **sizes,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": bucket,
        "stage3_max_reuse_distance": 0,
    }


def zero_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]
) -> Any:
    """DeepSpeed's engine around a model, on every rank of the process group.

    Train with `loss = f(engine(inputs))`, `engine.backward(loss)`, `engine.step()`. The optimizer's
    hyperparameters are kept; it works on this rank's shard from now on. Parts of the meter's
    interest (gathered parameters, shards of gradients) are told to it.

    Raises:
        ValueError: the configuration does not fit the process group, an unknown key, or a model
            on another kind of device than DeepSpeed was loaded for.
        RuntimeError: DeepSpeed cannot run here.
        MemoryError, OSError: the host, or the disk that is named, has no room for what is offloaded.
    """
    if problem := deepspeed_missing():
        raise RuntimeError(problem)
    if not dist.is_initialized():
        raise ValueError(
            "There is no process group here: use zero_engine in a worker of run_ranks."
        )
    check_config(config, dist.get_world_size())
    if _has_data(model):
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        check_offload_room(config.get("zero_optimization", {}), count)
    deepspeed = load_deepspeed()
    _check_device(model, deepspeed.accelerator.get_accelerator().device_name())
    said = io.StringIO()  # it prints that its extension was built, once a rank
    with contextlib.redirect_stdout(said):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
        )
    _tell_the_meter(engine)
    return engine


def _has_data(model: nn.Module) -> bool:
    """Whether its weights take memory here; simulated ones do not, and those on `meta`."""
    first = next(model.parameters())
    return not isinstance(first, FakeTensor) and first.device.type != "meta"


def _check_device(model: nn.Module, wanted: str) -> None:
    found = next(model.parameters()).device.type
    if found != wanted:
        raise ValueError(
            f"The model lies on {found!r}, and DeepSpeed computes on {wanted!r} in this process. "
            f"Move the model, or call load_deepspeed({found!r}) before anything else uses it."
        )


def resident(engine: Any) -> tuple[Any, ...]:
    """What this rank holds for the engine now: `ReachableStorage` rows, by DeepSpeed's own attribute names."""
    return reachable_storages(optimizer=engine.optimizer, engine=engine)


def note_states(engine: Any) -> None:
    """Tell the meter, after `engine.backward`, where DeepSpeed keeps gradients and buckets."""
    for category, tensors in _kept(engine).items():
        note_storages(category, tensors)


def _kept(engine: Any) -> dict[Category, list[torch.Tensor]]:
    """What lies in attributes of the optimizer, not of the model: shards, gradients, buckets."""
    return {
        Category.PARAMETERS: shards(engine),
        Category.GRADIENTS: gradients(engine),
        Category.COMMUNICATION: lasting_buffers(engine),
    }


def _tell_the_meter(engine: Any) -> None:
    """What is kept outside of the model; and that whole parameters of stage 3 are gathered ones."""
    engine.module.kept_elsewhere = lambda: _kept(
        engine
    )  # utils.memory.keeps_elsewhere.KeepsElsewhere
    for module in engine.module.modules() if shards(engine) else ():
        module.register_forward_pre_hook(
            lambda module, _: note_storages(
                Category.COMMUNICATION, module.parameters(recurse=False)
            )
        )
    for parameter in filter(lambda p: p.requires_grad, engine.module.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda whole: note_storages(Category.COMMUNICATION, buffers_in_backward(engine, whole))
        )
