"""One fine-tuning step of a Llama, whole or with adapters, small or simulated at its real size.

What peft and bitsandbytes do, with the course's own layers: bitsandbytes' `Params4bit` cannot be
made of tensors without data, `NF4Linear` can. tests/models/test_finetune.py holds the two stacks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from utils.models.pretrained import enable_checkpointing
from utils.techniques.lora import add_lora
from utils.techniques.optimizers import adamw_8bit
from utils.techniques.quantization import quantize_linears

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclass(frozen=True)
class Method:
    """How a model is kept, and what of it is trained.

    Attributes:
        packed: linear layers but the head in NF4 with double quantization.
        checkpointing: every block is computed again in backward.
        whole: every weight is trained, in fp32 under bf16 autocast: 16 bytes of states each. Else
            the model is frozen, in bf16 where it is not packed, and adapters are trained in fp32.
        moment_bits: of AdamW's moments, 32 or 8.
    """

    packed: bool = False
    checkpointing: bool = False
    whole: bool = False
    moment_bits: int = 32

    @property
    def needs_bitsandbytes(self) -> bool:
        """Whether it packs weights or moments."""
        return self.packed or self.moment_bits == 8


METHODS = {
    "LoRA": Method(),
    "QLoRA": Method(packed=True),
    "QLoRA + checkpointing": Method(packed=True, checkpointing=True),
    "QLoRA + 8-bit AdamW": Method(packed=True, moment_bits=8),
    "full fine-tune": Method(checkpointing=True, whole=True),
}
RANK = 8
TARGETS = ("q_proj", "v_proj")
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def build_finetune(
    config: LlamaConfig,
    method: str,
    *,
    device: torch.device | str = "cpu",
    rank: int = RANK,
    targets: Sequence[str] = TARGETS,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A Llama with random weights, kept as the method says, and the optimizer of what it trains.

    Args:
        config: the Llama.
        method: one of `METHODS`.
        device: where the model goes.
        rank: of the adapters, where the method has some.
        targets: the linear layers that get them; `ALL_LINEAR` are those of a block.

    Raises:
        ValueError: an unknown method, or no layer of a target's name.
        ModuleNotFoundError: the method packs weights or moments; bitsandbytes is not installed.
    """
    from transformers import AutoModelForCausalLM

    if method not in METHODS:
        raise ValueError(f"{method!r} is none of the methods {', '.join(METHODS)}.")
    how = METHODS[method]
    with torch.device(device):
        dtype = torch.float32 if how.whole else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if how.packed:
            quantize_linears(model, double_quantization=True)
        if not how.whole:
            add_lora(model, rank=rank, targets=targets)
    if how.whole:
        autocast = torch.autocast(torch.device(device).type, torch.bfloat16)
        model.forward = autocast(model.forward)  # as accelerate does for `Trainer`
    if how.checkpointing:
        enable_checkpointing(model)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make = adamw_8bit if how.moment_bits == 8 else torch.optim.AdamW
    return model, make(trained)


def finetune_step(
    model: Any, optimizer: torch.optim.Optimizer, sequences: int, length: int
) -> None:
    """One step on `sequences` texts of `length` tokens; memory does not depend on which."""
    weight = model.get_input_embeddings().weight
    numbers = torch.arange(sequences * length, device=weight.device)
    tokens = numbers.remainder(len(weight)).view(sequences, length)
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
