"""What cannot be shared out, refused before anything is sent: the same sentence on every rank."""

from __future__ import annotations

from utils.checked import check_public
from utils.rules import above_zero

__all__ = ["check_heads", "check_length"]


def check_length(length: int, ranks: int) -> None:
    """Two whole pieces of a sequence for every rank.

    Raises:
        ValueError: it is shorter than that, or does not divide.
    """
    pieces = 2 * ranks
    if length < pieces:
        raise ValueError(
            f"A sequence of {length} tokens is shorter than the ring: {ranks} ranks hold two pieces each. "
            f"Take at least {pieces} tokens, or fewer ranks."
        )
    if length % pieces:
        raise ValueError(
            f"{length} tokens do not divide into two pieces for each of {ranks} ranks. Pad the "
            f"sequence to {-(-length // pieces) * pieces}, and give what you add the target -100."
        )


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Whole heads for every rank, and of keys and values whole heads or whole copies.

    Raises:
        ValueError: they do not divide.
    """
    above_zero("check_heads()", heads=heads, kv_heads=kv_heads, ranks=ranks)
    if heads % ranks:
        fit = max(n for n in range(1, ranks + 1) if heads % n == 0)
        raise ValueError(
            f"{heads} query heads do not divide over {ranks} ranks: Ulysses gives each rank whole "
            f"heads. Take {fit} ranks, or a ring, which does not look at heads."
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"{kv_heads} key-value heads over {ranks} ranks are neither whole heads nor whole copies. "
            "Take a number of ranks that one of the two divides, or a ring."
        )


check_public(globals())
