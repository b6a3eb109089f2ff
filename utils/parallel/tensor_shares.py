"""Which heads, words and positions a rank of tensor parallelism has, and sentences where none fit."""

from __future__ import annotations

from typing import Any

from torch import nn

HEAD_LAYERS = ("query", "key", "value")


def heads_of(attention: Any, name: str) -> int:
    """Heads of one projection of a whole attention layer."""
    return getattr(attention, name).out_features // attention.head_dim


def own_head_rows(attention: Any, name: str, place: int, ranks: int) -> slice:
    """Rows of a projection's weight that a rank holds: its heads, whole.

    Query heads divide over the ranks. Key-value heads do, or several ranks hold a copy of the one
    that their query heads share.

    Raises:
        ValueError: neither is possible.
    """
    check_heads(attention, ranks)
    heads, width = heads_of(attention, name), attention.head_dim
    count = max(1, heads // ranks)
    first = place * heads // ranks
    return slice(first * width, (first + count) * width)


def check_heads(attention: Any, ranks: int, copies: bool = True) -> None:
    """Hold the heads of an attention layer against the number of ranks.

    Args:
        attention: has `query`, `key` and `head_dim`.
        ranks: of tensor parallelism.
        copies: several ranks may hold a copy of the same key-value head.

    Raises:
        ValueError: heads do not come out whole.
    """
    for name in ("query", "key"):
        heads = heads_of(attention, name)
        if heads % ranks == 0 or (copies and name == "key" and ranks % heads == 0):
            continue
        several = f", or is a multiple of {heads}" if copies and name == "key" else ""
        raise ValueError(
            f"{heads} {name} heads do not divide over {ranks} ranks of tensor parallelism. "
            f"Take a number of ranks that divides {heads}{several}."
        )


def copies_of_head(attention: Any, ranks: int) -> int:
    """How many ranks hold the same key-value head."""
    return max(1, ranks // heads_of(attention, "key"))


def check_width(linear: nn.Module, size: int, name: str, ranks: int) -> None:
    """Raises ValueError: the channels of a layer do not divide over the ranks."""
    if size % ranks:
        raise ValueError(
            f"{size} channels of {type(linear).__name__} `{name}` do not divide over {ranks} ranks "
            f"of tensor parallelism. Make them a multiple of {ranks}."
        )


def check_words(words: int, ranks: int) -> None:
    """Raises ValueError: the vocabulary does not divide over the ranks."""
    if words % ranks:
        above = -(-words // ranks) * ranks
        raise ValueError(
            f"A vocabulary of {words:,} words does not divide over {ranks} ranks of tensor "
            f"parallelism. Pad it to {above:,}."
        )


def check_sequence(length: int, ranks: int) -> None:
    """Raises ValueError: the sequence does not divide over the ranks."""
    if length % ranks:
        above = -(-length // ranks) * ranks
        raise ValueError(
            f"A sequence of {length} tokens does not divide over {ranks} ranks of sequence "
            f"parallelism. Take a multiple of {ranks}, such as {above}."
        )
