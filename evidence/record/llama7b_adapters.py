"""Llama-2-7B's shape under a cap of 24 GB: LoRA, QLoRA in three forms, and a full fine-tune."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from transformers import LlamaConfig

from evidence.record.experiment import Experiment, Stage, Trial, measured_row
from evidence.record.store import Row
from utils.catalog import model_shape
from utils.memory import budget, measure
from utils.models import llama_config
from utils.models.finetune import METHODS, RANK, TARGETS, build_finetune, finetune_step

CAP = "24GB"
LENGTHS = (512, 2048, 4096)  # tokens
MICRO_BATCHES = (1, 4)
TIMED_STEPS = 5


@dataclass(frozen=True)
class AdapterStep:
    """One row: how the model is kept, and the size of a step."""

    config: LlamaConfig
    method: str
    length: int
    micro_batch: int
    device: torch.device

    def run(self, stage: Stage) -> Row:
        """Measure the step under the cap."""
        model, optimizer = build_finetune(self.config, self.method, device=self.device)
        stage.name = "step"
        step = partial(finetune_step, model, optimizer, self.micro_batch, self.length)
        found = measure(
            step,
            model=model,
            optimizer=optimizer,
            items=self.length * self.micro_batch,
            unit="tokens",
            timed_steps=TIMED_STEPS,
            within=budget(CAP),
        )
        return measured_row(found)


def trials(device: torch.device) -> list[Trial]:
    """Every method, length and micro-batch on a GPU; one small step of each method elsewhere."""
    if device.type == "cuda":
        config, lengths, sizes = llama_config(model_shape("llama-2-7b")), LENGTHS, MICRO_BATCHES
    else:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            use_cache=False,
        )
        lengths, sizes = (64,), (2,)
    return [
        Trial(
            {
                "method": method,
                "layers": config.num_hidden_layers,
                "hidden": config.hidden_size,
                "sequence_length": length,
                "micro_batch": size,
                "cap": CAP,
            },
            AdapterStep(config, method, length, size, device).run,
        )
        for method in METHODS
        for length, size in _steps(method, lengths, sizes)
    ]


def _steps(method: str, lengths: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Lengths and micro-batches; of a full fine-tune, which cannot fit, the smallest alone."""
    every = [(length, size) for length in lengths for size in sizes]
    return every[:1] if METHODS[method].whole else every


EXPERIMENT = Experiment(
    name="llama7b_adapters",
    summary="Llama-2-7B's fine-tuning under 24 GB by method, over sequence lengths and micro-batches",
    configuration={
        "model": "Llama-2-7B's shape, random weights in bf16; full fine-tune: fp32 under autocast",
        "adapters": f"rank {RANK} on {', '.join(TARGETS)}, fp32",
        "packed": "NF4 with double quantization; embeddings, norms and head in bf16",
        "optimizer": "AdamW, PyTorch's default implementation for the device; 8-bit: bitsandbytes'",
        "steps": f"1 warm-up, 1 metered, {TIMED_STEPS} timed",
    },
    trials=trials,
)
