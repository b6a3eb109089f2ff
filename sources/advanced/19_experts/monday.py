"""Runs the blocks of the lesson's last cell, and asserts what that cell promises of them."""

from __future__ import annotations

from torch import nn

from utils.lessons.blocks import run_block


def block_1(text: str) -> None:
    """Two moments of four bytes for each parameter."""
    found = run_block(text, model=nn.Linear(1024, 1024, bias=False))
    assert found["states_gib"] * 2**30 == 8 * 1024**2, "two fp32 moments a parameter"
