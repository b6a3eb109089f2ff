"""The step that `Trainer(bf16=True)` takes in `finetune.py`: for the simulator, and its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from utils.catalog import ModelShape
from utils.checked import check_public
from utils.models import llama_config
from utils.planner import Batch, Cluster, Lora, Plan, estimate
from utils.planner.adapters import TARGETS

from .packing import pack


def scripted(
    shape: ModelShape,
    layers: int,
    packed: bool,
    checkpointed: bool,
    *,
    targets: Sequence[str] | str = "all-linear",
    rank: int = 16,
    autocast: bool = True,
    prepare: bool = False,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A Llama of `layers` layers with adapters by peft, and the optimizer of the adapters.

    Args:
        shape: of the Llama.
        layers: how many of its blocks.
        packed: bitsandbytes' four-bit layers in place of linear ones, as from_pretrained makes them.
        checkpointed: every block is computed again in backward.
        targets: which matrices get adapters, as `LoraConfig` takes them.
        rank: of the adapters.
        autocast: what accelerate puts around forward for `Trainer(bf16=True)`.
        prepare: call `prepare_model_for_kbit_training` on the frozen model.

    Raises:
        ValueError: there is no GPU, neither here nor simulated.
    """
    if not torch.cuda.is_available():
        raise ValueError("scripted() builds on a GPU; without one, call it inside of simulate().")
    import peft
    from accelerate.utils.operations import convert_outputs_to_fp32
    from transformers import AutoModelForCausalLM

    config = llama_config(shape, num_hidden_layers=layers)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if packed:
        pack(model)
    model = model.to("cuda")
    if prepare:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    adapters = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=targets if isinstance(targets, str) else [*targets],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, adapters).train()
    if autocast:
        model.forward = convert_outputs_to_fp32(
            torch.autocast("cuda", torch.bfloat16)(model.forward)
        )
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def accumulated_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    texts: int,
    length: int,
    micro_batches: int = 1,
    *,
    padded: bool = False,
) -> None:
    """One update from some micro-batches of `texts` texts of `length` tokens each.

    Args:
        model: of transformers.
        optimizer: of what trains.
        texts: of a micro-batch.
        length: tokens of each text.
        micro_batches: of the update.
        padded: attention gets the mask that transformers makes where a text of the micro-batch is
            padded: query against key, a boolean each.

    Raises:
        TypeError: `model` is none of transformers'.
    """
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(
            f"accumulated_step() trains a model of transformers, such as script_step builds; "
            f"it was given {type(model).__name__}."
        )
    weight = model.get_input_embeddings().weight
    numbers = torch.arange(texts * length, device=weight.device)
    tokens = numbers.remainder(len(weight)).view(texts, length)
    mask = None
    if padded:
        square = (texts, 1, length, length)
        mask = torch.ones(square, dtype=torch.bool, device=weight.device).tril()
    optimizer.zero_grad()
    for _ in range(micro_batches):
        inputs = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
        model(**inputs, use_cache=False).loss.backward()
    optimizer.step()


def step_seconds(
    packed: bool, checkpointed: bool, texts: int = 4, length: int = 1024, micro_batches: int = 1
) -> float:
    """Of Llama-2-7B on an RTX 4090, adapters of rank 16 on all matrices.

    Predicted whether or not it fits.

    Args:
        packed: the frozen weights are in four bits.
        checkpointed: every block is computed again in backward.
        texts: of a micro-batch.
        length: tokens of each text.
        micro_batches: accumulated in one step.
    """
    lora = Lora(rank=16, targets=TARGETS, base="nf4-dq" if packed else "bf16", autocast=True)
    plan = Plan(
        micro_batch=texts,
        recompute="full" if checkpointed else "none",
        lora=lora,
        framework="peft",
    )
    card = Cluster(gpu="RTX4090", nodes=1, gpus_per_node=1)
    batch = Batch(sequences=texts * micro_batches, sequence_length=length)
    return estimate("llama-2-7b", card, plan, batch).step_seconds


__all__ = ["accumulated_step", "scripted", "step_seconds"]

check_public(globals())
