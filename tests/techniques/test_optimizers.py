"""Eight-bit moments: counted byte by byte, and the refusal of pages without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from utils.techniques import adam_state_bytes, adamw_8bit, optimizer_bytes

SHAPES = [(64, 64), (100, 100), (63, 65), (7,)]  # 4096, 10,000 (no whole block), 4095 and 7


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def test_moments_in_8_bits_to_the_byte() -> None:
    optimizer = stepped(adamw_8bit(parameters()))
    blocks = 16 + 40
    by_hand = 2 * (4096 + 10_000) + 2 * 4 * blocks + 8 * (4095 + 7) + 2 * 1024
    assert optimizer_bytes(optimizer) == by_hand
    assert adam_state_bytes([p.numel() for p in parameters()], bits=8) == by_hand


def test_moments_in_32_bits_to_the_byte() -> None:
    optimizer = stepped(torch.optim.AdamW(parameters()))
    assert optimizer_bytes(optimizer) == adam_state_bytes([p.numel() for p in parameters()])


def test_small_tensors_need_no_table() -> None:
    assert adam_state_bytes([4095], bits=8) == 8 * 4095
    with pytest.raises(ValueError, match="bits is 4"):
        adam_state_bytes([1], bits=4)


def test_it_trains_as_adamw_does_but_for_rounding() -> None:
    wide, narrow = parameters(), parameters()
    exact = torch.optim.AdamW(wide, lr=1e-2, weight_decay=0.01)
    packed = adamw_8bit(narrow, lr=1e-2)
    for _ in range(5):
        for optimizer, own in ((exact, wide), (packed, narrow)):
            optimizer.zero_grad()
            sum((p * p).sum() for p in own).backward()
            optimizer.step()
    for a, b in zip(wide, narrow, strict=True):
        moved = (a - b).abs().max()
        assert moved < 0.02, "five steps of at most 0.01 each"
    assert torch.equal(wide[3], narrow[3]) or (wide[3] - narrow[3]).abs().max() < 1e-5


def test_pages_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="without a GPU there is no page"):
        adamw_8bit(parameters(), paged=True)


def test_frozen_parameters_are_left_out() -> None:
    frozen, trained = parameters()[:2]
    frozen.requires_grad_(False)
    assert len(adamw_8bit([frozen, trained]).param_groups[0]["params"]) == 1
    with pytest.raises(ValueError, match="nothing to optimize"):
        adamw_8bit([frozen])
