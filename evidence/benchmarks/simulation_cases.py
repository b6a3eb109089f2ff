"""The large training steps whose simulation is timed: 175B on 64 ranks, 7B on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from utils.models import Transformer, TransformerConfig
from utils.techniques import add_lora, quantize_linears

Built = tuple[nn.Module, torch.optim.Optimizer]

LARGE = {"vocabulary": 51_200, "hidden": 12_288, "heads": 96, "feedforward": 32_768}
LARGE_LAYERS, WORLD, TENSOR_PARALLEL = 96, 64, 8
SEVEN_B = {"vocabulary": 32_000, "hidden": 4096, "heads": 32, "feedforward": 11_008}
SEVEN_B_LAYERS, LENGTH = 32, 2048
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SPLIT = {
    "attention.query": ColwiseParallel,
    "attention.key": ColwiseParallel,
    "attention.value": ColwiseParallel,
    "attention.output": RowwiseParallel,
    "feedforward.gate": ColwiseParallel,
    "feedforward.up": ColwiseParallel,
    "feedforward.down": RowwiseParallel,
}


def large_sharded(layers: int = LARGE_LAYERS) -> Built:
    """GPT-3's size as a Llama: tensor parallel over 8, FSDP2 over 8, bf16, AdamW."""
    shape = (WORLD // TENSOR_PARALLEL, TENSOR_PARALLEL)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = Transformer(TransformerConfig(layers=layers, **LARGE))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {name: plan() for name, plan in SPLIT.items()})
        fully_shard(block, mesh=mesh["dp"], mp_policy=MIXED)
    fully_shard(model, mesh=mesh["dp"], mp_policy=MIXED)
    model.to_empty(device="cpu")
    return model, torch.optim.AdamW(model.parameters())


def seven_b(layers: int = SEVEN_B_LAYERS) -> Built:
    """Llama-2-7B in bf16, all of it trained with AdamW."""
    model = Transformer(TransformerConfig(layers=layers, **SEVEN_B)).bfloat16()
    return model, torch.optim.AdamW(model.parameters())


def seven_b_adapted(quantized: bool, layers: int = SEVEN_B_LAYERS) -> Built:
    """Llama-2-7B with low-rank adapters on queries and values, the base in bf16 or NF4."""
    model = Transformer(TransformerConfig(layers=layers, **SEVEN_B)).bfloat16()
    if quantized:
        quantize_linears(model)
    add_lora(model)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def step_of(vocabulary: int) -> Callable[[nn.Module, Any], None]:
    """One training step on one sequence of 2,048 tokens."""

    def step(model: nn.Module, optimizer: Any) -> None:
        tokens = torch.randint(vocabulary, (1, LENGTH))
        logits = model(tokens)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
