"""One fine-tuning step of a Llama with adapters, small or simulated at its real size.

What peft and bitsandbytes do, with the course's own layers: bitsandbytes' `Params4bit` cannot be
made of tensors without data, `NF4Linear` can. tests/test_finetune.py holds the two stacks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from utils.models.pretrained import enable_checkpointing
from utils.techniques.lora import add_lora
from utils.techniques.quantization import quantize_linears

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclass(frozen=True)
class Method:
    """How the frozen model is kept.

    Attributes:
        packed: linear layers but the head in NF4 with double quantization; else all in bf16.
        checkpointing: every block is computed again in backward.
    """

    packed: bool
    checkpointing: bool


METHODS = {
    "LoRA": Method(packed=False, checkpointing=False),
    "QLoRA": Method(packed=True, checkpointing=False),
    "QLoRA + checkpointing": Method(packed=True, checkpointing=True),
}
RANK = 8
TARGETS = ("q_proj", "v_proj")


def build_finetune(
    config: LlamaConfig, method: str, *, device: torch.device | str = "cpu"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A Llama in bf16 with random weights, fp32 adapters as peft makes them, and AdamW for these.

    Raises:
        ValueError: an unknown method.
        ModuleNotFoundError: the method packs weights and bitsandbytes is not installed.
    """
    from transformers import AutoModelForCausalLM

    if method not in METHODS:
        raise ValueError(f"{method!r} is none of the methods {', '.join(METHODS)}.")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if METHODS[method].packed:
            quantize_linears(model, double_quantization=True)
        add_lora(model, rank=RANK, targets=TARGETS)
    if METHODS[method].checkpointing:
        enable_checkpointing(model)
    model.train()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def finetune_step(
    model: Any, optimizer: torch.optim.Optimizer, sequences: int, length: int
) -> None:
    """One step on `sequences` texts of `length` tokens; memory does not depend on which."""
    table = model.get_input_embeddings()
    numbers = torch.arange(sequences * length, device=table.weight.device)
    tokens = numbers.remainder(table.num_embeddings).view(sequences, length)
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
