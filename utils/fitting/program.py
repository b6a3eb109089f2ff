"""The parts of a training program: the simulation runs them, and a script gets those that it needs.

Each function stands alone, with its own imports, so that its text can be copied into `train.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn


def checkpoint_blocks(model: Any, every: int) -> None:
    """Recompute each `every`-th block in backward, in place; `model` is one of transformers."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(f"transformers cannot checkpoint {type(model).__name__}: its blocks do not say how.")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    blocks = [part for part in model.modules() if getattr(part, "gradient_checkpointing", None) is True]
    layers = [part for part in blocks if hasattr(part, "_gradient_checkpointing_func")]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0


def add_adapters(model: nn.Module, rank: int, targets: str | Sequence[str]) -> Any:
    """peft's LoRA on linear layers of a model that is frozen by it; adapters are in fp32."""
    from peft import LoraConfig, get_peft_model

    names = targets if isinstance(targets, str) else list(targets)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names))


def autocast_forward(model: Any, device: str, dtype: torch.dtype) -> None:
    """Run forward under autocast and hand its results out in fp32, in place, as accelerate does."""
    from accelerate.utils import convert_outputs_to_fp32

    model.forward = convert_outputs_to_fp32(torch.autocast(device, dtype)(model.forward))


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The optimizer called `name` over parameters that are trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if name in ("adamw-8bit", "paged-adamw-8bit"):
        import bitsandbytes as bnb

        kind: Any = bnb.optim.AdamW8bit if name == "adamw-8bit" else bnb.optim.PagedAdamW8bit
        return kind(trained, lr=lr)
    kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor, "sgd": torch.optim.SGD}
    return kinds[name](trained, lr=lr)


def chunked_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The next token's cross entropy without the logits of all tokens at once.

    The head is multiplied and forgotten some tokens at a time (torch's linear_cross_entropy).
    """
    from torch.nn import LinearCrossEntropyOptions

    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = plain.base_model(**inputs, use_cache=False).last_hidden_state
    head = plain.get_output_embeddings()
    return nn.functional.linear_cross_entropy(
        hidden[:, :-1].flatten(0, 1), head.weight.to(hidden.dtype), labels[:, 1:].flatten(),
        linear_bias=head.bias, options=LinearCrossEntropyOptions(),
    )  # fmt: skip
