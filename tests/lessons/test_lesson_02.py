"""Lesson 02's search for the largest batch: the edge wherever it lies, in few steps."""

from __future__ import annotations

import pytest

from utils.lessons.lesson_02.edge import largest_batch


@pytest.mark.parametrize("stride", [1, 6])
def test_the_edge_wherever_it_lies(stride: int) -> None:
    for too_large in (2, 3, 40):
        for edge in range(1, too_large):
            found = largest_batch(lambda size, edge=edge: size <= edge, too_large, stride)
            assert found == edge, f"from {too_large} down to {edge}"


def test_an_edge_near_the_guess_takes_few_steps() -> None:
    asked: list[int] = []
    assert largest_batch(lambda size: asked.append(size) or size <= 620, 626) == 620
    assert asked == [620, 623, 621]


def test_no_batch_fits() -> None:
    with pytest.raises(ValueError, match="Not even one image fits"):
        largest_batch(lambda size: False, 40)
