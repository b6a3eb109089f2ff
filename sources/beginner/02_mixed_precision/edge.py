"""The largest batch that fits a card, found by trying: a line gives a guess, and no proof."""

from __future__ import annotations

from collections.abc import Callable


def largest_batch(fits: Callable[[int], bool], too_large: int, stride: int = 6) -> int:
    """The largest batch that fits, where the next one does not.

    Args:
        fits: whether a batch of that size fits; it is asked few times, since each answer costs a step.
        too_large: a batch that cannot fit, a little above the edge.
        stride: how far below it the search begins; doubled until a batch fits.

    Raises:
        ValueError: no batch fits.
    """
    low = max(too_large - stride, 1)
    while not fits(low):
        if low == 1:
            raise ValueError("Not even one image fits: take a smaller model or a larger card.")
        too_large, stride = low, 2 * stride
        low = max(too_large - stride, 1)
    while too_large - low > 1:
        middle = (low + too_large) // 2
        low, too_large = (middle, too_large) if fits(middle) else (low, middle)
    return low
