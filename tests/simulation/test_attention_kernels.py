"""Which kernel attention takes on a simulated GPU, by what a step keeps for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from utils.memory import Category
from utils.simulation import simulate

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 128, 32
SCORES_BYTES = 4 * BATCH * HEADS * TOKENS * TOKENS


class Biased(nn.Module):
    """Attention with a bias for each pair of positions; `transposed`: its rows do not lie in one piece."""

    def __init__(self, transposed: bool = False, trained: bool = True) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, HEADS, TOKENS, TOKENS), requires_grad=trained)
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias.transpose(2, 3) if self.transposed else self.bias
        return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)


def kept_bytes(model: type[Biased], **how: bool) -> int:
    def step(built: nn.Module, _: Any) -> None:
        x = torch.zeros(BATCH, HEADS, TOKENS, WIDTH, requires_grad=True)
        built(x).sum().backward()

    found = simulate(lambda: (model(**how), None), step, device="H100")
    return found.breakdown[Category.ACTIVATIONS]


@pytest.mark.parametrize(
    ("how", "keeps_scores"),
    [
        ({"trained": False}, False),
        ({"trained": True}, True),
        ({"trained": False, "transposed": True}, True),
    ],
)
def test_a_mask_that_is_trained_or_in_pieces_goes_through_plain_operations(
    how: dict[str, bool], keeps_scores: bool
) -> None:
    assert (kept_bytes(Biased, **how) >= SCORES_BYTES) is keeps_scores
