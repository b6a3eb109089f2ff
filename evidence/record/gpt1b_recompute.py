"""A GPT of 1.3 billion parameters with checkpointing none, in part, selective and of every block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from evidence.record.experiment import Experiment, Stage, Trial, measured_row
from evidence.record.store import Row
from utils.memory import measure
from utils.models import Transformer, TransformerConfig
from utils.start import choose_dtype
from utils.techniques import EXPENSIVE, checkpoint_blocks

# GPT-3 XL's depth and width (Brown et al. 2020, arXiv:2005.14165, Table 2.1), with 16 heads and the
# blocks of our transformer; the vocabulary is GPT-2's, rounded up to a multiple of 64.
LARGE = TransformerConfig(
    vocabulary=50_304, hidden=2048, layers=24, heads=16, feedforward=5504, tied=True
)
SMALL = TransformerConfig(vocabulary=256, hidden=128, layers=4, heads=4, feedforward=352, tied=True)
WAYS: Mapping[str, Mapping[str, Any]] = {
    "none": {"every": 0},
    "every 2nd": {"every": 2},
    "selective": {"keep": EXPENSIVE},
    "every block": {"every": 1},
}
LENGTH = 2048  # tokens
MICRO_BATCHES = (1, 2, 4, 8)
TIMED_STEPS = 5


@dataclass(frozen=True)
class RecomputedStep:
    """One row: what is recomputed, and the size of a step."""

    config: TransformerConfig
    way: str
    length: int
    micro_batch: int
    device: torch.device

    def run(self, stage: Stage) -> Row:
        """Measure the step. `first_loss` is the same for every way, up to the GPU's rounding."""
        model, optimizer = build(self.config, self.way, self.device)
        tokens = batch(self.config, self.micro_batch, self.length, self.device)
        stage.name = "step"

        def step() -> float:
            return training_step(model, optimizer, tokens)

        first_loss = step()
        found = measure(
            step,
            model=model,
            optimizer=optimizer,
            items=self.micro_batch * self.length,
            unit="tokens",
            timed_steps=TIMED_STEPS,
        )
        return {"first_loss": first_loss, **measured_row(found)}


def build(
    config: TransformerConfig, way: str, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer; every way begins with the same weights."""
    torch.manual_seed(0)
    with device:
        model = Transformer(config)
    checkpoint_blocks(model, **WAYS[way])
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def batch(
    config: TransformerConfig, sequences: int, length: int, device: torch.device
) -> torch.Tensor:
    """Random tokens of the shape (sequences, length + 1)."""
    with device:
        return torch.randint(config.vocabulary, (sequences, length + 1))


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> float:
    """One step in 16-bit autocast; the loss of its forward."""
    optimizer.zero_grad()
    loss = _loss(model, tokens)
    loss.backward()
    value = loss.detach()
    del loss  # its graph would hold tensors while the optimizer steps
    optimizer.step()
    return value.item()


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast(tokens.device.type, choose_dtype(tokens.device)[0]):
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def trials(device: torch.device) -> list[Trial]:
    """Every way and micro-batch on a GPU; one small step of each way elsewhere."""
    on_gpu = device.type == "cuda"
    config, length, sizes = (LARGE, LENGTH, MICRO_BATCHES) if on_gpu else (SMALL, 64, (2,))
    return [
        Trial(
            {
                "checkpointed": way,
                "layers": config.layers,
                "hidden": config.hidden,
                "sequence_length": length,
                "micro_batch": size,
                "autocast": str(choose_dtype(device)[0]).removeprefix("torch."),
            },
            RecomputedStep(config, way, length, size, device).run,
        )
        for size in sizes
        for way in WAYS
    ]


EXPERIMENT = Experiment(
    name="gpt1b_recompute",
    summary="a GPT of 1.3 billion parameters: checkpointing none, every 2nd, selective, every block",
    configuration={
        "model": "GPT-3 XL's depth and width with Llama's blocks, fp32 weights, 16-bit autocast",
        "selective": "keeps the results of matrix products and attention",
        "optimizer": "AdamW, fused",
        "data": "random tokens, on the device before the step",
        "loss scaling": "none: memory and time are measured, nothing is trained",
        "steps": f"1 for the loss, 1 warm-up, 1 metered, {TIMED_STEPS} timed",
    },
    trials=trials,
)
