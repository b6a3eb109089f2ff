"""A GPT block whose attention scores are tensors, as it was before flash attention.

What it keeps for backward is what Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, count:
in 16 bits s*b*h*(34 + 5*a*s/h) bytes, their equation 1. Shapes in comments: S sequence, B batch,
H hidden, A heads, D width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.checked import check_public
from utils.rules import divides, whole

__all__ = ["GPTBlock"]

WIDEST = 2**17  # the widest published model has 2**14


def dropout(x: Tensor, probability: float) -> Tensor:
    """Dropout that keeps a mask of one byte an element, as GPUs do.

    `F.dropout` on a CPU keeps a mask as wide as its input.
    """
    return torch.native_dropout(x, probability, True)[0]


class GPTAttention(nn.Module):
    """Causal attention by matrix products, with dropout on the scores."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.dropout = hidden // heads, dropout
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, H) -> (S, B, H)."""
        query, key, value = map(self._by_head, self.project(x))  # (B * A, S, D)
        length = query.shape[1]
        scores = torch.baddbmm(
            query.new_empty(()), query, key.mT, beta=0.0, alpha=self.head_dim**-0.5
        )
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        shares = F.softmax(scores.masked_fill_(later, float("-inf")), dim=-1)
        mixed = torch.bmm(self.drop(shares), value)
        return self.output(mixed.transpose(0, 1).reshape(length, x.shape[1], -1))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; may be replaced, as `Transformer`'s."""
        return self.query(x), self.key(x), self.value(x)

    def drop(self, shares: Tensor) -> Tensor:
        """Dropout of the scores, which belong to this rank's heads; may be replaced."""
        return dropout(shares, self.dropout)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, self.head_dim).transpose(0, 1)


class GPTFeedForward(nn.Module):
    """Two matrices with GELU between."""

    def __init__(self, hidden: int, feedforward: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, feedforward)
        self.down = nn.Linear(feedforward, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, H) -> (S, B, H)."""
        (inner,) = self.open(x)
        return self.down(F.gelu(inner))

    def open(self, x: Tensor) -> tuple[Tensor]:
        """The input of GELU; may be replaced, as `Transformer`'s."""
        return (self.up(x),)


class GPTBlock(nn.Module):
    """LayerNorm, attention, dropout; LayerNorm, feed-forward, dropout; each added to the stream."""

    def __init__(self, hidden: int, heads: int, dropout: float = 0.1) -> None:
        """Make the block.

        Raises:
            ValueError: the heads do not divide `hidden`, or a number is out of its range.
        """
        super().__init__()
        hidden, heads = whole("GPTBlock", hidden=hidden, heads=heads).values()
        if hidden > WIDEST:
            raise ValueError(f"GPTBlock: hidden is {hidden:,}; it can be {WIDEST:,} at most.")
        divides("GPTBlock: heads", heads, "hidden", hidden)
        if not 0 <= dropout < 1:
            raise ValueError(f"GPTBlock: dropout is {dropout}; write a share from 0 to below 1.")
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = GPTAttention(hidden, heads, dropout)
        self.feedforward_norm = nn.LayerNorm(hidden)
        self.feedforward = GPTFeedForward(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, H) -> (S, B, H)."""
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.feedforward(self.feedforward_norm(x)))

    def drop(self, x: Tensor) -> Tensor:
        """Dropout of the stream, which every rank holds or has a part of; may be replaced."""
        return dropout(x, self.dropout)


check_public(globals())
