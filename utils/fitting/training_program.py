"""The parts of a training program: the simulation runs them, and a script gets those that it needs.

Each function stands alone, with its own imports, so that its text can be copied into `train.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn


def checkpoint_each(model: Any, every: int, spared: int = 0) -> None:
    """Recompute each `every`-th block in backward, but not each `spared`-th, in place.

    `model` is one of transformers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    newer = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5
    enable = newer or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    blocks = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    for index, block in enumerate(blocks):
        is_spared = spared > 0 and index % spared == spared - 1
        block.gradient_checkpointing = index % every == 0 and not is_spared


def add_adapters(model: nn.Module, rank: int, targets: str | Sequence[str]) -> Any:
    """peft's LoRA on linear layers of a model, which it freezes; the adapters are in fp32."""
    from peft import LoraConfig, get_peft_model

    names = targets if isinstance(targets, str) else list(targets)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names))  # pyright: ignore[reportArgumentType]


def shard(model: Any, dtype: torch.dtype | None = None, offload: bool = False) -> None:
    """FSDP2 over all ranks, block by block, in place; its shards in host memory with `offload`.

    Weights are gathered in `dtype`, and gradients added up in fp32: autocast alone would gather fp32,
    and keep the copy that it casts of each weight until forward ends, the whole model's.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    pinned = torch.cuda.is_available()  # else there is no card to copy to
    policies: dict[str, Any] = {
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32 if dtype else None),
    }
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) > 1:
            for block in part:
                fully_shard(block, **policies)
    fully_shard(model, **policies)


def autocast_forward(model: Any, device: str, dtype: torch.dtype) -> None:
    """Run forward under autocast and hand its results out in fp32, in place, as accelerate does."""
    from accelerate.utils import convert_outputs_to_fp32

    model.forward = convert_outputs_to_fp32(torch.autocast(device, dtype)(model.forward))


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """The optimizer called `name` over those parameters that are trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    packed = {
        "paged-adamw": "PagedAdamW",
        "adamw-8bit": "AdamW8bit",
        "paged-adamw-8bit": "PagedAdamW8bit",
    }
    if name in packed:
        import bitsandbytes as bnb

        return getattr(bnb.optim, packed[name])(trained, lr=lr)
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=lr, fused=True)
    kinds: dict[str, Any] = {
        "adamw-foreach": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
        "sgd": torch.optim.SGD,
    }
    return kinds[name](trained, lr=lr)


def step_in_backward(model: nn.Module, name: str, lr: float) -> list[torch.optim.Optimizer]:
    """Update each weight once its gradient is complete, and drop the gradient: an optimizer a weight."""

    def update(parameter: torch.Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    own: dict[Any, Any] = {
        p: make_optimizer(name, [p], lr) for p in model.parameters() if p.requires_grad
    }
    for parameter in own:
        parameter.register_post_accumulate_grad_hook(update)
    return list(own.values())


def on_the_host() -> Any:
    """A context in which what backward needs is kept in pinned host memory."""
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def chunk_loss(model: Any) -> None:
    """Have forward compute the loss some tokens at a time, in place: their logits are never all there.

    Of bf16 states the loss itself is a bf16 number: between 1 and 2 it moves in steps of 1/128.
    """
    from transformers.modeling_outputs import CausalLMOutput

    def forward(input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> CausalLMOutput:
        hidden = model.base_model(input_ids=input_ids, use_cache=False, **others).last_hidden_state
        head = model.get_output_embeddings()
        loss = nn.functional.linear_cross_entropy(
            hidden[:, :-1].flatten(0, 1),
            head.weight.to(hidden.dtype),
            labels[:, 1:].flatten(),
            linear_bias=head.bias,
            options=torch.nn.LinearCrossEntropyOptions(),
        )
        return CausalLMOutput(loss=loss)  # pyright: ignore[reportArgumentType]

    model.forward = forward


def train_step(
    model: Any,
    optimizer: Any,
    batches: Sequence[dict[str, Any]],
    context: Any = contextlib.nullcontext,
) -> float | torch.Tensor:
    """One optimizer step over micro-batches, each forward inside of `context`; the mean of their losses.

    Without an optimizer the weights are updated in backward.
    """
    total: Any = 0.0
    for batch in batches:
        with context():
            loss = model(**batch).loss / len(batches)
        loss.backward()
        total = total + loss.detach()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return total


def scaled_train_step(
    model: Any,
    optimizer: Any,
    batches: Sequence[dict[str, Any]],
    scaler: Any,
    context: Any = contextlib.nullcontext,
) -> float | torch.Tensor:
    """The same in fp16: `scaler` multiplies each loss, so that small gradients are no zeros."""
    total: Any = 0.0
    for batch in batches:
        with context():
            loss = model(**batch).loss / len(batches)
        scaler.scale(loss).backward()
        total = total + loss.detach()
    if optimizer is not None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return total
