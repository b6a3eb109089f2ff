"""What a step costs beside its peak: products, and bytes that wait for backward."""

from __future__ import annotations

import torch
from torch import nn

from utils.lessons.lesson_05.step_costs import step_cost
from utils.techniques import checkpoint_blocks


def cost(checkpointed: bool):
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    )
    checkpoint_blocks(model, every=1 if checkpointed else 0)
    x = torch.randn(16, 32)
    return step_cost(model, lambda: model(x).sum(), attention_flops=0, name="a")


def test_products_and_kept_bytes_of_linear_layers():
    """Per layer 2 x 16 x 32 x 64 operations, backward twice that; the first input needs no gradient."""
    product = 2 * 16 * 32 * 64
    found = cost(False)
    assert found.product_flops == (4 * 3 - 1) * product
    assert found.kept_bytes == 4 * 16 * (2 * 32 + 2 * 2 * 64), "inputs, and both sides of each GELU"
    assert found.run.peak_bytes > found.kept_bytes


def test_checkpoints_keep_less_and_compute_more():
    plain, checkpointed = cost(False), cost(True)
    assert checkpointed.kept_bytes < plain.kept_bytes / 3
    assert checkpointed.product_flops > plain.product_flops
