"""Published peaks of adapter training, each beside the simulation of the step that it measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from utils.memory import Measurement
from utils.simulation import simulate
from utils.techniques.replace import replace_linears
from utils.units import GB
from utils.validation import simulation_litgpt as litgpt
from utils.validation.comparison import Comparison
from utils.validation.tables import number, table, whole

LITGPT_DEVICE, PEFT_DEVICE = "A100 40GB", "H100 80GB"


def litgpt_comparisons() -> Iterator[Comparison]:
    """litgpt's LoRA on one A100, by base; allocated GB. A row that ran out of memory is left out.

    NF4 rows appear twice: with the libraries of the time and with today's.
    """
    for row in table("litgpt_adapters"):
        published = number(row["max_gpu_ram_gb"])
        if published is None or row["gpu"] != "1 x A100":
            continue
        if row["quantization"] == "None":
            yield _litgpt(row, published, "litgpt LoRA, bf16", early=False)
        else:
            yield _litgpt(row, published, "litgpt QLoRA", early=True)
            yield _litgpt(row, published, "litgpt QLoRA, as of today", early=False)


def _litgpt(row: dict[str, str], published: float, source: str, early: bool) -> Comparison:
    found = litgpt_step(row["model"], whole(row["micro_batch"]), row["quantization"], early)
    case = f"{row['model']}, {row['quantization']}, micro-batch {row['micro_batch']}"
    size = _parameter_count(litgpt.SHAPES[row["model"]])
    return Comparison(source, "allocated GB", case, published, found.peak_bytes / GB, size)


def litgpt_step(model: str, micro_batch: int, quantization: str, early: bool) -> Measurement:
    """Simulate one training step of litgpt's LoRA script on an A100 with 40 GB."""
    shape = litgpt.SHAPES[model]

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = litgpt.LitGPT(shape).to(torch.bfloat16)
        pack = litgpt.quantizer(quantization, early)
        if pack is not None:
            replace_linears(net, lambda path: True, pack)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_("lora_" in name)
        return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])

    def step(net: nn.Module, optimizer: Any) -> None:
        tokens = torch.zeros(micro_batch, shape.tokens, dtype=torch.long)
        rope = litgpt.rope_cache(shape.tokens, shape.rotary)
        litgpt.chunked_loss(net(tokens, rope), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return simulate(build, step, device=LITGPT_DEVICE, name=model)


def _parameter_count(shape: litgpt.LitShape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in litgpt.LitGPT(shape).parameters())
