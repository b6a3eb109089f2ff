"""Runs the lines of lesson 05a's last cell."""

from __future__ import annotations

import warnings

import torch
from torch.optim import AdamW, Optimizer

from utils.lessons.blocks import run_block
from utils.models import Transformer, TransformerConfig

SMALL = TransformerConfig(vocabulary=64, hidden=64, layers=2, heads=4, feedforward=176)


def _build() -> tuple[Transformer, Optimizer]:
    model = Transformer(SMALL)
    return model, AdamW(model.parameters())


def _step(model: Transformer, optimizer: Optimizer) -> None:
    model(torch.zeros(4, 128, dtype=torch.long)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def block_1(text: str) -> None:
    """A step simulated on a card that is not here: four bytes a parameter, moments beside them."""
    expected = run_block(text, build=_build, step=_step)["expected"]
    count = sum(p.numel() for p in _build()[0].parameters())
    # On a card each tensor starts at a multiple of 512 bytes.
    held = expected.breakdown["parameters"] / (4 * count)
    assert 1 <= held < 1.05, f"{held:.3f} times the four bytes of {count} parameters"
    assert expected.peak_bytes > 12 * count, "parameters and Adam's moments alone take more"
    assert expected.reserved_bytes >= expected.peak_bytes, "less reserved than alive"


def block_2(text: str) -> None:
    """A model of transformers with peft's adapters, from its configuration alone, and without them."""
    from transformers import LlamaConfig

    warnings.simplefilter("ignore")  # peft calls transformers by an old name
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    layer = 4 * 256**2 + 3 * 256 * 704 + 2 * 256
    count = 2 * layer + 2 * 1000 * 256 + 256
    adapters = 2 * 16 * (4 * 512 + 3 * (256 + 704))
    with_adapters = run_block(text, config=config)["expected"]
    held = with_adapters.breakdown["parameters"] / (2 * count + 4 * adapters)
    assert 1 <= held < 1.02, f"{held:.3f} times bf16 weights and fp32 adapters"
    states = with_adapters.breakdown["optimizer state"] / (8 * adapters)
    assert 1 <= states < 1.05, f"{states:.3f} times two fp32 moments of the adapters alone"
    without = "\n".join(line for line in text.splitlines() if "get_peft_model(" not in line)
    expected = run_block(without, config=config)["expected"]
    assert expected.peak_bytes > 6 * count, "parameters and moments alone take more"
    assert expected.peak_bytes > with_adapters.breakdown["parameters"], "all weights train"


def block_3(text: str) -> None:
    """Both on this machine: simulated within two percent of measured."""
    found = run_block(text, build=_build, step=_step)
    ratio = found["expected"].peak_bytes / found["real"].peak_bytes
    assert abs(ratio - 1) < 0.02, f"simulated / measured = {ratio:.3f}"
